// SPDX-License-Identifier: Apache-2.0
// How long the pieces of a model take on an engine: each node once, then what a planner asks for, as submissions of a
// tenant, which pays with its own share. What was measured is kept in an operator table, and not measured again.
//
//   gpushare::graph::piece_measurer times(chat, model, engine, table, {.engine = "onnxruntime"});
//   times.run_nodes(inputs);                                               // one by one: their times, and all values
//   gpushare::graph::split_planner planner(times.graph(), times.nodes(), {.limit = 5ms});
//   gpushare::graph::refine(planner, [&](auto nodes) { return times.measure(nodes); });
//
// graph() is the model's graph with the extents that these inputs lead to: a plan and buffers for dynamic models.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/graph/split_plan.hpp>
#include <gpushare/serving/operator_selection.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// By which an operator table knows a piece: the graph, and the nodes in their order. A word.
[[nodiscard]] inline std::string piece_key(std::uint64_t graph, std::span<const std::uint32_t> nodes) {
    std::uint64_t h = 0xcbf29ce484222325;  // FNV-1a
    for (const std::uint32_t n : nodes)
        for (int shift = 0; shift < 32; shift += 8) h = (h ^ ((n >> shift) & 0xff)) * 0x100000001b3;
    char text[96];
    const int size = std::snprintf(text, sizeof text, "%016llx:%zu:%016llx", static_cast<unsigned long long>(graph),
                                   nodes.size(), static_cast<unsigned long long>(h));
    return {text, static_cast<std::size_t>(size)};
}

/// How to measure pieces.
struct measure_options {
    std::string engine = "engine";  ///< its name in the table, a word: each engine has rows of its own
    int warm_up = 1;                ///< runs of each piece that don't count
    int repeats = 3;                ///< of each; the median counts
    std::size_t part = 0;           ///< of the tenant's devices
    submit_options submit{};        ///< of each run
};

/// Measures pieces of one model for one shape of inputs. Holds all values of a run in the tenant's memory, as much as the
/// model needs without any reuse. Neither copied nor moved; for one thread. Tenant, model, engine and table must outlive
/// it. `Model` has graph() and extract(nodes) as onnx_model; `Engine` is a piece_engine with add(model) and remove_last().
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

    /// Runs node by node, in the model's order, which makes all values and tells each node's time and each value's shape.
    /// Nodes between which something lives that no buffer holds run together, and share their time. `inputs` stay where
    /// they are meanwhile and for measure(). Throws as measure(), for a node that the engine can't run, too.
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

    /// Each value as the last run made it, by index.
    [[nodiscard]] std::span<const tensor> values() const noexcept { return values_; }

    /// The median time of some nodes as one piece: as the table has it, else measured and kept. Nothing: the engine can't
    /// run these by themselves. After run_nodes(). Throws what a submission fails with beside that, and as tenant::submit.
    [[nodiscard]] std::optional<ns> measure(std::span<const std::uint32_t> nodes) {
        const std::string key = piece_key(id_, nodes);
        if (const auto* known = table_->find(operation(), key)) return known->took;
        try {
            const ns took = time(nodes);
            keep(key, took);
            return took;
        } catch (const model_error&) {
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

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
