// SPDX-License-Identifier: Apache-2.0
// Measures how long the pieces of a model take on an engine. With several engines, chooses for each
// piece the fastest engine that computes the piece correctly.
//
// Each measurement is a submission of a tenant, so it counts against the tenant's share. First each
// node runs by itself, then the pieces that a planner asks for. An operator table keeps the times
// permanently:
//
//   gpushare::graph::piece_measurer times(chat, model, onnxruntime, table, {.engine = "onnxruntime"});
//   times.run_nodes(inputs);  // one by one: their times, and all values
//   gpushare::graph::split_planner planner(times.graph(), times.nodes(), {.limit = 5ms});
//   gpushare::graph::refine(planner, [&](auto nodes) { return times.measure(nodes); });
//
// graph() has the extents that these inputs lead to, so dynamic models get plans and buffers, too.
//
// With several engines:
//
//   gpushare::graph::engine_set<gpushare::host::stream> engines;
//   engines.add("onnxruntime", onnxruntime);    engines.add("openvino", openvino);
//   gpushare::graph::piece_chooser choice(chat, model, engines, table);
//   choice.run_nodes(inputs);  // on the first engine, whose results are the reference
//   gpushare::graph::split_planner cuts(choice.graph(), choice.nodes(), {.limit = 5ms});
//   refine(cuts, [&](auto nodes) { return choice.measure(nodes); });
//   const auto plan = choice.chosen(cuts.plan());                 // with the engine of each piece
//   engines.load(model, plan);
//   gpushare::graph::cut_model pages(chat, choice.graph(), plan, engines);
//
// If a faster engine makes pieces short, the planner joins them and measures the joined piece on
// all engines. The operator table keeps the choices, and to_text() writes them with the plan.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/graph/detail/differences.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/graph/plan_text.hpp>
#include <gpushare/graph/split_plan.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/serving/operator_selection.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// A piece's key in an operator table: one word made of the graph and of the nodes in their order.
[[nodiscard]] inline std::string piece_key(std::uint64_t graph, std::span<const std::uint32_t> nodes) {
    std::uint64_t h = 0xcbf29ce484222325;  // FNV-1a
    for (const std::uint32_t n : nodes)
        for (int shift = 0; shift < 32; shift += 8) h = (h ^ ((n >> shift) & 0xff)) * 0x100000001b3;
    char text[96];
    const int size = std::snprintf(text, sizeof text, "%016llx:%zu:%016llx", static_cast<unsigned long long>(graph),
                                   nodes.size(), static_cast<unsigned long long>(h));
    return {text, static_cast<std::size_t>(size)};
}

namespace detail {

/// Whether `fits` holds for an error or for an error nested in it. The error of a submission has
/// the engine's own error nested.
template <class Fits>
[[nodiscard]] bool any_nested(const std::exception& e, Fits fits) {
    if (fits(e)) return true;
    try {
        std::rethrow_if_nested(e);
    } catch (const std::exception& inside) {
        return any_nested(inside, fits);
    } catch (...) {
    }
    return false;
}
/// Whether an engine refused a piece.
[[nodiscard]] inline bool is_refusal(const std::exception& e) {
    return any_nested(e, [](const std::exception& one) { return dynamic_cast<const model_error*>(&one) != nullptr; });
}
/// Whether a tenant or its device lacks memory, or permission to submit. No engine is at fault
/// then.
[[nodiscard]] inline bool is_of_tenant(const std::exception& e) {
    constexpr std::array codes{errc::deadline_exceeded, errc::stopped, errc::closed,     errc::queue_full,
                               errc::quarantined,       errc::asleep,  errc::device_lost};
    return any_nested(e, [&](const std::exception& one) {
        const auto* const known = dynamic_cast<const error*>(&one);
        return dynamic_cast<const std::bad_alloc*>(&one) != nullptr ||
               (known != nullptr && std::ranges::find(codes, known->code()) != codes.end());
    });
}

}  // namespace detail

/// How to measure pieces.
struct measure_options {
    std::string engine = "engine";  ///< the engine's name in its rows of the table, one word
    int warm_up = 1;                ///< runs of each piece that don't count
    int repeats = 3;                ///< runs of each piece that count; the result is their median
    std::size_t part = 0;           ///< the number of the tenant's device on which to measure
    submit_options submit{};        ///< options of each run's submission
};

/// Measures pieces of one model for one shape of inputs. Keeps all values of a run in the tenant's
/// memory, without any reuse of bytes. The object can't be copied or moved, and one thread at a
/// time uses it. Tenant, model, engine and table must outlive the object. `Model` has graph() and
/// extract(nodes) like onnx_model; `Engine` is a piece_engine with add(model) and remove_last().
template <class Tenant, class Model, class Engine>
requires piece_engine<Engine, typename Tenant::stream>
class piece_measurer {
    using stream = typename Tenant::stream;

public:
    /// Measures nothing yet.
    piece_measurer(Tenant& by, const Model& model, Engine& engine, operator_table& table, measure_options o = {})
        : by_(&by),
          model_(&model),
          engine_(&engine),
          table_(&table),
          o_(std::move(o)),
          graph_(model.graph()),
          blocks_(by.memory(o_.part), graph_.values.size()),
          values_(graph_.values.size()) {
        for (std::uint32_t v = 0; v < values_.size(); ++v) {
            values_[v].type = graph_.values[v].type;
            values_[v].room = &blocks_;
            values_[v].number = v;
        }
    }
    piece_measurer(const piece_measurer&) = delete;
    piece_measurer& operator=(const piece_measurer&) = delete;
    ~piece_measurer() = default;

    /// Runs the model node by node, in its order. The run yields all values, each node's time and
    /// each value's shape. If no buffer can hold a value between some nodes, these nodes run
    /// together and share their time. `inputs` must stay in place for this call and for measure().
    /// Throws as measure() does, and also for a node that the engine can't run.
    void run_nodes(std::span<const tensor> inputs) {
        if (inputs.size() != graph_.inputs.size())
            throw operation_error(errc::invalid_specification, by_->name(),
                                  "measuring a model: a wrong number of inputs");
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            values_[graph_.inputs[i]] = inputs[i];
            take_shape(graph_.inputs[i]);
        }
        times_.assign(graph_.nodes.size(), ns{});
        const auto lives = lifetimes(graph_);
        std::vector<std::uint32_t> together;
        std::vector<std::pair<std::vector<std::uint32_t>, ns>> found;
        for (std::uint32_t n = 0; n < graph_.nodes.size(); ++n) {
            together.push_back(n);
            const auto over = crossing(graph_, lives, n + 1);
            if (std::ranges::any_of(over, [&](std::uint32_t v) { return !can_cross(v); })) continue;
            const ns took = time(together);
            for (const std::uint32_t m : together) {
                times_[m] = took / static_cast<std::int64_t>(together.size());
                for (const std::uint32_t v : graph_.nodes[m].outputs) take_shape(v);
            }
            found.emplace_back(std::exchange(together, {}), took);
        }
        id_ = fingerprint(graph_);
        for (const auto& [nodes, took] : found) keep(piece_key(id_, nodes), took);
    }
    /// The model's graph with the extents that these inputs lead to.
    [[nodiscard]] const model_graph& graph() const noexcept { return graph_; }
    /// The time of each node, by index.
    [[nodiscard]] std::span<const ns> nodes() const noexcept { return times_; }

    /// Each value by index, with the contents from the last run that made the value.
    [[nodiscard]] std::span<const tensor> values() const noexcept { return values_; }

    /// The median time of some nodes as one piece. The time comes from the table, or is measured
    /// and kept there. If the engine can't run these nodes by themselves, that is, if loading,
    /// enqueuing or running them throws a model_error, the function returns no time. Call
    /// run_nodes() first. Throws all other errors of a submission, and what tenant::submit throws.
    [[nodiscard]] std::optional<ns> measure(std::span<const std::uint32_t> nodes) {
        const std::string key = piece_key(id_, nodes);
        if (const auto* known = table_->find(operation(), key)) return known->took;
        try {
            const ns took = time(nodes);
            keep(key, took);
            return took;
        } catch (const std::exception& e) {
            if (!detail::is_refusal(e)) throw;
            return std::nullopt;
        }
    }

private:
    [[nodiscard]] std::string operation() const { return "piece/" + o_.engine; }
    [[nodiscard]] bool can_cross(std::uint32_t v) const {
        const value& of = graph_.values[v];
        return of.kind != value_kind::inner || (of.tensor && size_of(of.type) != 0);
    }
    void keep(const std::string& key, ns took) {
        table_->keep({.operation = operation(), .shape = key, .candidate = o_.engine, .took = took});
    }
    void take_shape(std::uint32_t v) {
        value& to = graph_.values[v];
        if (!values_[v].shaped() || values_[v].type == element::unknown) return;
        to.type = values_[v].type;
        to.ranked = true;
        to.shape.resize(values_[v].shape.size());
        for (std::size_t i = 0; i < to.shape.size(); ++i) to.shape[i].extent = values_[v].shape[i];
    }
    [[nodiscard]] ns time(std::span<const std::uint32_t> nodes) {
        const std::uint32_t piece = engine_->add(model_->extract(nodes));
        struct removing {
            Engine* engine;
            ~removing() { engine->remove_last(); }
        } const after{engine_};
        const auto edges = edges_of(graph_, nodes);
        std::vector<const tensor*> in;
        std::vector<tensor*> out;
        for (const std::uint32_t v : edges.inputs) in.push_back(&values_[v]);
        for (const std::uint32_t v : edges.outputs) out.push_back(&values_[v]);
        std::vector<ns> all;
        for (int i = -std::max(o_.warm_up, 0); i < std::max(o_.repeats, 1); ++i) {
            const ns took = run(piece, in, out);
            if (i >= 0) all.push_back(took);
        }
        const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
        std::ranges::nth_element(all, middle);
        return std::max(*middle, ns{});
    }
    [[nodiscard]] ns run(std::uint32_t piece, std::span<const tensor* const> in, std::span<tensor* const> out) {
        typename stream::point begin, end;
        auto ticket = by_->submit(
            [&](stream& to) {
                begin = to.record();
                engine_->enqueue(to, piece, in, out);
                end = to.record();
            },
            o_.submit, {}, o_.part);
        (void)ticket.wait();
        if (ticket.status() != errc::none) ticket.rethrow();
        return elapsed(begin, end);
    }

    Tenant* by_;
    const Model* model_;
    Engine* engine_;
    operator_table* table_;
    measure_options o_;
    model_graph graph_;
    std::uint64_t id_ = 0;
    tensor_blocks<typename Tenant::memory_type> blocks_;
    std::vector<tensor> values_;
    std::vector<ns> times_{};
};

/// A set of engines by name, with pieces on them. The set is a piece_engine itself. `Piece` is what
/// a model's extract() returns. One thread adds the pieces before any of them runs. The set can't
/// be copied or moved. The engines must outlive the set, and only the set adds pieces to them.
template <timeline Stream, class Piece = std::string>
class engine_set {
public:
    engine_set() = default;
    engine_set(const engine_set&) = delete;
    engine_set& operator=(const engine_set&) = delete;
    ~engine_set() = default;

    /// `name` must be one printable word that no other engine has; otherwise throws operation_error
    /// (invalid_specification).
    template <class Engine>
    requires piece_engine<Engine, Stream> && requires(Engine& e, const Piece& p) {
        { e.add(p) } -> std::convertible_to<std::uint32_t>;
        e.remove_last();
    }
    void add(std::string name, Engine& e) {
        if (name.empty() || detail::as_word(name) != name || find(name))
            throw operation_error(errc::invalid_specification, {},
                                  "an engine's name is a word that can be printed, and no other engine's");
        engines_.push_back({std::move(name), [&e](const Piece& p) { return static_cast<std::uint32_t>(e.add(p)); },
                            [&e] { e.remove_last(); },
                            [&e](Stream& to, std::uint32_t piece, std::span<const tensor* const> in,
                                 std::span<tensor* const> out) { e.enqueue(to, piece, in, out); }});
    }
    /// The number of engines.
    [[nodiscard]] std::size_t engines() const noexcept { return engines_.size(); }
    /// An engine's name.
    [[nodiscard]] const std::string& name(std::size_t engine) const { return engines_.at(engine).name; }
    /// The engine of that name, if there is one.
    [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept {
        const auto at = std::ranges::find(engines_, name, &one::name);
        if (at == engines_.end()) return std::nullopt;
        return static_cast<std::size_t>(at - engines_.begin());
    }

    /// Adds a piece to an engine and returns the piece's number in the set. Throws what the engine
    /// throws.
    std::uint32_t add_piece(std::size_t engine, const Piece& p) {
        pieces_.reserve(pieces_.size() + 1);
        pieces_.push_back({engine, engines_.at(engine).add(p)});
        return static_cast<std::uint32_t>(pieces_.size() - 1);
    }
    /// Removes the last piece.
    void remove_last() {
        engines_[pieces_.back().engine].remove_last();
        pieces_.pop_back();
    }
    /// The number of pieces.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(pieces_.size()); }
    /// Replaces all pieces by a plan's pieces. Each piece runs on the engine that the plan names,
    /// or on the first engine if the plan names none. Throws model_error (engine) for an engine
    /// that isn't in the set, and what extract() or an engine throws; the set then has no pieces.
    template <class Model>
    void load(const Model& model, const split_plan& plan) {
        clear();
        try {
            for (const auto& p : plan.pieces) {
                const auto engine = p.engine.empty() ? std::optional(std::size_t{0}) : find(p.engine);
                if (!engine || *engine >= engines_.size())
                    throw model_error(model_fault::engine, p.engine, "the plan names an engine that isn't there");
                add_piece(*engine, model.extract(plan.nodes(p.places)));
            }
        } catch (...) {
            clear();
            throw;
        }
    }
    /// Removes all pieces.
    void clear() {
        while (!pieces_.empty()) remove_last();
    }

    /// See piece_engine.
    void enqueue(Stream& to, std::uint32_t piece, std::span<const tensor* const> in, std::span<tensor* const> out) {
        const auto& p = pieces_[piece];
        engines_[p.engine].enqueue(to, p.number, in, out);
    }

private:
    struct one {
        std::string name{};
        std::function<std::uint32_t(const Piece&)> add{};
        std::function<void()> remove_last{};
        std::function<void(Stream&, std::uint32_t, std::span<const tensor* const>, std::span<tensor* const>)> enqueue{};
    };
    struct placed {
        std::size_t engine = 0;
        std::uint32_t number = 0;  // the piece's number on the engine
    };
    std::vector<one> engines_{};
    std::vector<placed> pieces_{};
};

/// How to choose engines.
struct choice_options {
    /// How far a float may differ from the first engine's float. Other numbers must be equal.
    operator_tolerance within{.absolute = 0, .relative = 1e-3};
    /// A float may also differ by this part of the largest magnitude in the same value.
    double of_largest = 1e-4;
    measure_options measure{.repeats = 5};  ///< how to measure; `engine` is ignored
};

/// An engine that can't be chosen for a piece, because it failed or gave wrong results.
struct left_out_engine {
    std::string engine{};                ///< the engine's name
    std::vector<std::uint32_t> nodes{};  ///< the piece, by nodes of the graph
    /// The exception's message, or a message that names the wrong output.
    std::string why{};
};

/// Chooses engines for pieces of one model, for one shape of inputs. Keeps all values of a run in
/// the tenant's memory. The object can't be copied or moved, and one thread at a time uses it.
/// Tenant, model, engines and table must outlive the object; in the meantime, no other code adds
/// pieces to the engines. `Model` has graph() and extract(nodes) like onnx_model.
template <class Tenant, class Model, class Piece>
requires copier<typename Tenant::stream> && scrubber<typename Tenant::stream>
class piece_chooser {
    using stream = typename Tenant::stream;
    using set = engine_set<stream, Piece>;

public:
    /// Runs nothing yet. Throws operation_error (invalid_specification) for an empty set.
    piece_chooser(Tenant& by, const Model& model, set& engines, operator_table& table, choice_options o = {})
        : by_(&by),
          model_(&model),
          engines_(&engines),
          table_(&table),
          o_(std::move(o)),
          first_(engines),
          reference_(by, model, first_, table, measuring(engines, o_.measure)),
          scratch_(by.memory(o_.measure.part), model.graph().values.size()) {
        operation_ = "choice/" + engines.name(0);
        for (std::size_t e = 1; e < engines.engines(); ++e) operation_ += '+' + engines.name(e);
    }
    piece_chooser(const piece_chooser&) = delete;
    piece_chooser& operator=(const piece_chooser&) = delete;
    ~piece_chooser() = default;

    /// Runs the model on the first engine, node by node (see piece_measurer::run_nodes()) and then
    /// as a whole. The run by nodes says which values a piece must compute. `inputs` must stay in
    /// place while pieces are measured. Throws model_error (engine) if the results of the two runs
    /// differ by more than the tolerance, model_error (bad_cut) for an output that is a weight, and
    /// the error of a failed submission.
    void run_nodes(std::span<const tensor> inputs) {
        detail::refuse_weights_as_outputs(model_->graph());
        reference_.run_nodes(inputs);
        std::vector<std::uint32_t> all(graph().nodes.size());
        std::iota(all.begin(), all.end(), 0U);
        place(all);
        const removing after{engines_, engines_->size()};
        const auto number = engines_->add_piece(0, model_->extract(all));
        run([&](stream& to) { engines_->enqueue(to, number, in_, outs()); });
        whole_.clear();
        for (const std::uint32_t v : graph().outputs) whole_.push_back(copy_of(of_output(v)));
        std::vector<tensor> by_nodes;
        for (const std::uint32_t v : graph().outputs) by_nodes.push_back(reference_.values()[v]);
        if (const auto why = difference(by_nodes); !why.empty())
            throw model_error(model_fault::engine, {}, "node by node it doesn't give what it gives as a whole: " + why);
    }
    /// The model's graph with the extents that these inputs lead to.
    [[nodiscard]] const model_graph& graph() const noexcept { return reference_.graph(); }
    /// The time of each node by the first engine, by index.
    [[nodiscard]] std::span<const ns> nodes() const noexcept { return reference_.nodes(); }

    /// The fastest engine that computes these nodes correctly, and its median time. The choice
    /// comes from the table, or is measured by select_operator and kept there. Returns no choice if
    /// there is no such engine. Call run_nodes() first. Throws if no engine is at fault: the tenant
    /// is closed or has no memory left, or its device is lost.
    [[nodiscard]] std::optional<operator_choice> choose(std::span<const std::uint32_t> nodes) {
        const std::string key = piece_key(fingerprint(graph()), nodes);
        if (const auto* known = table_->find(operation_, key); known != nullptr && engines_->find(known->candidate))
            return *known;
        const removing after{engines_, engines_->size()};
        const auto candidates = add(nodes);
        if (candidates.empty()) return std::nullopt;
        place(nodes);
        std::vector<left_out_operator> wrong;
        const auto note = [&] {
            for (auto& w : wrong) left_out_.push_back({w.name, {nodes.begin(), nodes.end()}, std::move(w.why)});
        };
        try {
            auto best = select_operator(*by_, *table_, operation_, key, std::span(candidates), reference(),
                                        {.warm_up = o_.measure.warm_up,
                                         .repeats = o_.measure.repeats,
                                         .part = o_.measure.part,
                                         .submit = o_.measure.submit,
                                         .left_out = &wrong});
            note();
            return best;
        } catch (const operation_error&) {
            if (wrong.size() != candidates.size()) throw;
            note();
            return std::nullopt;
        }
    }
    /// The time of the engine that choose() returns, for refine().
    [[nodiscard]] std::optional<ns> measure(std::span<const std::uint32_t> nodes) {
        const auto best = choose(nodes);
        return best ? std::optional(best->took) : std::nullopt;
    }
    /// The plan with the engine and time of each piece. Throws model_error (engine) for a piece
    /// that no engine computes correctly, with each engine's reason. Also throws what choose()
    /// throws.
    [[nodiscard]] split_plan chosen(split_plan p) {
        for (auto& piece : p.pieces) {
            const auto nodes = p.nodes(piece.places);
            const auto best = choose(nodes);
            if (!best) throw model_error(model_fault::engine, graph().nodes[nodes.front()].name, reasons(nodes));
            piece.engine = best->candidate;
            piece.takes = best->took;
            piece.over = piece.takes > p.limit;
        }
        return p;
    }
    /// Engines that failed or gave wrong results, with their pieces, in the order in which choose()
    /// found them. A choice that came from the table adds no engines.
    [[nodiscard]] std::span<const left_out_engine> left_out() const noexcept { return left_out_; }

    /// Compares outputs of the model, for the inputs of run_nodes(), with the outputs of the uncut
    /// model on the first engine. Returns a message, empty if the outputs agree within the
    /// tolerance. Call this for a run of the whole plan, since the errors of pieces add up. Throws
    /// the error of a failed submission.
    [[nodiscard]] std::string difference(std::span<const tensor> outputs) {
        if (outputs.size() != whole_.size()) return "another number of outputs";
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            const value& v = graph().values[graph().outputs[i]];
            const copied got = copy_of(outputs[i]);
            if (got.type != whole_[i].type || got.shape != whole_[i].shape) return v.name + " has another shape";
            const auto why = detail::compared_as(got.type, nullptr, got.bytes.size(), o_.within, o_.of_largest)
                                 .difference(whole_[i].bytes.data(), got.bytes.data());
            if (!why.empty()) return v.name + ": " + why;
        }
        return {};
    }

private:
    /// The first engine, for a measurer.
    struct first_engine {
        explicit first_engine(set& s) : of(&s) {}
        std::uint32_t add(const Piece& p) { return of->add_piece(0, p); }
        void remove_last() { of->remove_last(); }
        void enqueue(stream& to, std::uint32_t piece, std::span<const tensor* const> in, std::span<tensor* const> out) {
            of->enqueue(to, piece, in, out);
        }
        set* of;
    };
    struct removing {
        set* of;
        std::uint32_t until;
        ~removing() {
            while (of->size() > until) of->remove_last();
        }
    };
    struct copied {
        element type = element::unknown;
        std::vector<std::int64_t> shape{};
        std::vector<std::byte> bytes{};
    };
    using candidate = operator_candidate<stream>;

    static measure_options measuring(const set& engines, measure_options o) {
        if (engines.engines() == 0)
            throw operation_error(errc::invalid_specification, {}, "choosing engines: there is none");
        o.engine = engines.name(0);
        return o;
    }
    /// Takes a piece's inputs from the reference run, and gives its outputs blocks of their own.
    void place(std::span<const std::uint32_t> nodes) {
        for (const tensor& t : out_) scratch_.release(t.number);
        const auto edges = edges_of(graph(), nodes);
        in_.clear(), out_.clear(), right_.clear(), out_pointers_.clear();
        for (const std::uint32_t v : edges.inputs) in_.push_back(&reference_.values()[v]);
        for (const std::uint32_t v : edges.outputs) {
            const tensor& right = reference_.values()[v];
            right_.push_back(&right);
            // There is no `room`, so an engine that makes an output larger than the reference
            // fails.
            out_.push_back({right.type, right.shape, scratch_.room_for(v, right.size()), right.size(), nullptr, v});
        }
        for (auto& t : out_) out_pointers_.push_back(&t);
    }
    /// The outputs, with their types and shapes reset for a run.
    [[nodiscard]] std::span<tensor* const> outs() {
        for (std::size_t i = 0; i < out_.size(); ++i) out_[i].type = right_[i]->type, out_[i].shape = right_[i]->shape;
        return out_pointers_;
    }
    [[nodiscard]] const tensor& of_output(std::uint32_t v) const {
        const auto at = std::ranges::find(out_, v, &tensor::number);
        return at == out_.end() ? reference_.values()[v] : *at;
    }
    /// A candidate for each engine that accepts the piece. Throws if no engine is at fault.
    [[nodiscard]] std::vector<candidate> add(std::span<const std::uint32_t> nodes) {
        std::vector<candidate> all;
        std::optional<Piece> piece;
        for (std::size_t e = 0; e < engines_->engines(); ++e) try {
                if (!piece) piece.emplace(model_->extract(nodes));
                const auto number = engines_->add_piece(e, *piece);
                all.push_back({engines_->name(e),
                               [this, number](stream& to) { engines_->enqueue(to, number, in_, outs()); },
                               [this] {
                                   return std::ranges::equal(out_, right_, [](const tensor& got, const tensor* want) {
                                       return got.type == want->type && got.shape == want->shape;
                                   });
                               }});
            } catch (const std::exception& why) {
                if (detail::is_of_tenant(why)) throw;
                left_out_.push_back({engines_->name(e), {nodes.begin(), nodes.end()}, why.what()});
            }
        return all;
    }
    /// The values of the first engine's run.
    [[nodiscard]] operator_reference<stream> reference() {
        operator_reference<stream> right{.by = {engines_->name(0), [this](stream& to) {
                                                    for (std::size_t i = 0; i < out_.size(); ++i)
                                                        if (const auto size = out_[i].capacity; size > 0)
                                                            to.copy(out_[i].data, right_[i]->data, size);
                                                }}};
        for (const tensor& t : out_)
            right.results.push_back(detail::compared_as(t.type, t.data, t.capacity, o_.within, o_.of_largest));
        return right;
    }
    template <class Work>
    void run(Work work) {
        auto ticket = by_->submit(work, o_.measure.submit, {}, o_.measure.part);
        (void)ticket.wait();
        if (ticket.status() != errc::none) ticket.rethrow();
    }
    [[nodiscard]] copied copy_of(const tensor& t) {
        copied c{t.type, t.shape, std::vector<std::byte>(t.size())};
        if (!c.bytes.empty()) run([&](stream& to) { to.copy(c.bytes.data(), t.data, c.bytes.size()); });
        return c;
    }
    [[nodiscard]] std::string reasons(std::span<const std::uint32_t> nodes) const {
        std::string text = "no engine computes the piece right";
        for (const auto& l : left_out_)
            if (std::ranges::equal(l.nodes, nodes)) text += "; " + l.engine + ": " + l.why;
        return text;
    }

    Tenant* by_;
    const Model* model_;
    set* engines_;
    operator_table* table_;
    choice_options o_;
    std::string operation_{};
    first_engine first_;
    piece_measurer<Tenant, Model, first_engine> reference_;
    tensor_blocks<typename Tenant::memory_type> scratch_;
    std::vector<const tensor*> in_{}, right_{};
    std::vector<tensor> out_{};
    std::vector<tensor*> out_pointers_{};
    std::vector<copied> whole_{};
    std::vector<left_out_engine> left_out_{};
};

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
