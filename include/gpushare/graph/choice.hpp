// SPDX-License-Identifier: Apache-2.0
// The fastest engine for each piece of a model, among those that compute the piece right.
//
//   gpushare::graph::engine_set<gpushare::host::stream> engines;
//   engines.add("onnxruntime", onnxruntime);    engines.add("openvino", openvino);
//   gpushare::graph::piece_chooser choice(chat, model, engines, table);
//   choice.run_nodes(inputs);                                      // by the first engine, which says what is right
//   gpushare::graph::split_planner planner(choice.graph(), choice.nodes(), {.limit = 5ms});
//   refine(planner, [&](auto nodes) { return choice.measure(nodes); });
//   const auto plan = choice.chosen(planner.plan());               // with the engine of each piece
//   engines.load(model, plan);
//   gpushare::graph::cut_model pages(chat, choice.graph(), plan, engines);
//
// The planner joins pieces that the faster engine leaves short, and measures what it joins on all
// engines again. Choices are rows of the operator table, and to_text() writes them with the plan.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
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
#include <gpushare/graph/measure.hpp>
#include <gpushare/graph/plan_text.hpp>
#include <gpushare/graph/split_plan.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/serving/operator_selection.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// Engines by name, and pieces on them: a piece_engine itself. `Piece` is what a model's extract()
/// makes. Pieces are added by one thread before any runs. Neither copied nor moved; the engines
/// must outlive it, and get pieces from nobody else.
template <timeline Stream, class Piece = std::string>
class engine_set {
public:
    engine_set() = default;
    engine_set(const engine_set&) = delete;
    engine_set& operator=(const engine_set&) = delete;
    ~engine_set() = default;

    /// `name`: a word that can be printed, and no other engine's; else throws operation_error
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
    /// How many engines there are.
    [[nodiscard]] std::size_t engines() const noexcept { return engines_.size(); }
    /// An engine's name.
    [[nodiscard]] const std::string& name(std::size_t engine) const { return engines_.at(engine).name; }
    /// The engine of that name; nothing: there is none.
    [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept {
        const auto at = std::ranges::find(engines_, name, &one::name);
        if (at == engines_.end()) return std::nullopt;
        return static_cast<std::size_t>(at - engines_.begin());
    }

    /// A piece for one of the engines; returns its number here. Throws what the engine throws.
    std::uint32_t add_piece(std::size_t engine, const Piece& p) {
        pieces_.reserve(pieces_.size() + 1);
        pieces_.push_back({engine, engines_.at(engine).add(p)});
        return static_cast<std::uint32_t>(pieces_.size() - 1);
    }
    /// Gives back the last piece.
    void remove_last() {
        engines_[pieces_.back().engine].remove_last();
        pieces_.pop_back();
    }
    /// How many pieces there are.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(pieces_.size()); }
    /// All pieces of a plan, in place of those that were there: each on the engine that the plan
    /// names, else on the first. Throws model_error (engine) for an engine that isn't there, and
    /// what an engine throws; then no piece is left.
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
    /// Without pieces.
    void clear() {
        while (!pieces_.empty()) remove_last();
    }

    /// As piece_engine has it.
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
        std::uint32_t number = 0;  // there
    };
    std::vector<one> engines_{};
    std::vector<placed> pieces_{};
};

/// How to choose.
struct choice_options {
    /// How far a float may be from the first engine's. Other numbers must be the same.
    operator_tolerance within{.absolute = 0, .relative = 1e-3};
    /// Or by so much of the largest number of the same value, without regard to its sign.
    double of_largest = 1e-4;
    measure_options measure{.repeats = 5};  ///< but for the engine's name, which is the set's
};

/// An engine that isn't chosen for a piece whatever its time.
struct left_out_engine {
    std::string engine{};                ///< its name
    std::vector<std::uint32_t> nodes{};  ///< the piece, by nodes of the graph
    std::string why{};                   ///< for people: what was thrown, or which output is wrong
};

/// Chooses engines for pieces of one model, for one shape of inputs. Holds all values of a run in
/// the tenant's memory. Neither copied nor moved; for one thread. Tenant, model, engines and table
/// must outlive it; the engines have no other pieces meanwhile. `Model` has graph() and
/// extract(nodes) as onnx_model.
template <class Tenant, class Model, class Piece>
requires copier<typename Tenant::stream> && scrubber<typename Tenant::stream>
class piece_chooser {
    using stream = typename Tenant::stream;
    using set = engine_set<stream, Piece>;

public:
    /// Runs nothing yet. Throws operation_error (invalid_specification) for a set without an
    /// engine.
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

    /// Runs the model by the first engine, node by node and as a whole, as
    /// piece_measurer::run_nodes() has it. Values of that run are what pieces have to compute.
    /// `inputs` stay where they are for as long as pieces are measured. Throws model_error (engine)
    /// where the two runs don't agree within the tolerance, and what a submission fails with.
    void run_nodes(std::span<const tensor> inputs) {
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

    /// The fastest engine that computes these nodes right, and its median time: as the table has
    /// it, else measured by select_operator and kept. Nothing: there is no such engine. After
    /// run_nodes(). Throws what isn't an engine's fault: that the tenant is closed, has no memory
    /// left, or its device is lost.
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
    /// The time of what choose() chooses: for refine().
    [[nodiscard]] std::optional<ns> measure(std::span<const std::uint32_t> nodes) {
        const auto best = choose(nodes);
        return best ? std::optional(best->took) : std::nullopt;
    }
    /// A plan with the engine and time of each piece. Throws model_error (engine) for a piece that
    /// no engine computes right, with the reason of each; and as choose().
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
    /// Engines that failed or were wrong, with the pieces, as they were found; not those of choices
    /// that the table had.
    [[nodiscard]] std::span<const left_out_engine> left_out() const noexcept { return left_out_; }

    /// How outputs of the model, for the inputs of run_nodes(), differ from those of the uncut
    /// model by the first engine: empty where they agree within the tolerance, else a description,
    /// for people. Errors of pieces add up: call this for a run of the whole plan. Throws what a
    /// submission fails with.
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
    /// Tensors for a piece's inputs, which stay as they are, and its outputs, in blocks of their
    /// own.
    void place(std::span<const std::uint32_t> nodes) {
        for (const tensor& t : out_) scratch_.release(t.number);
        const auto edges = edges_of(graph(), nodes);
        in_.clear(), out_.clear(), right_.clear(), out_pointers_.clear();
        for (const std::uint32_t v : edges.inputs) in_.push_back(&reference_.values()[v]);
        for (const std::uint32_t v : edges.outputs) {
            const tensor& right = reference_.values()[v];
            right_.push_back(&right);
            // Without room: what an engine makes larger than it has to be is wrong.
            out_.push_back({right.type, right.shape, scratch_.room_for(v, right.size()), right.size(), nullptr, v});
        }
        for (auto& t : out_) out_pointers_.push_back(&t);
    }
    /// The outputs as they are before a run.
    [[nodiscard]] std::span<tensor* const> outs() {
        for (std::size_t i = 0; i < out_.size(); ++i) out_[i].type = right_[i]->type, out_[i].shape = right_[i]->shape;
        return out_pointers_;
    }
    [[nodiscard]] const tensor& of_output(std::uint32_t v) const {
        const auto at = std::ranges::find(out_, v, &tensor::number);
        return at == out_.end() ? reference_.values()[v] : *at;
    }
    /// A candidate for each engine that takes the piece.
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
