// SPDX-License-Identifier: Apache-2.0
// An engine for graphs that don't come from files. Each node adds its inputs' bytes, position by
// position, to its own number, so that a wrong order, a missing edge or an overwritten buffer
// shows.
//
//   support::toy_engine engine(g);    engine.add({0, 1, 2});    gpushare::graph::cut_model model(chat, g, plan, engine);
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/graph/graph.hpp>

namespace support {

class toy_engine {
public:
    using bytes_of = std::map<std::uint32_t, std::vector<unsigned char>>;

    explicit toy_engine(const gpushare::graph::model_graph& g) : g_(&g) {}

    std::uint32_t add(std::span<const std::uint32_t> nodes) {
        pieces_.emplace_back(nodes.begin(), nodes.end());
        return static_cast<std::uint32_t>(pieces_.size() - 1);
    }
    void remove_last() { pieces_.pop_back(); }

    /// The values that nodes make of those that are there.
    static void compute(const gpushare::graph::model_graph& g, std::span<const std::uint32_t> nodes, bytes_of& values) {
        for (const std::uint32_t n : nodes)
            for (const std::uint32_t to : g.nodes[n].outputs) {
                std::vector<unsigned char> made(g.values[to].size()->count(), static_cast<unsigned char>(7 * n + 1));
                for (const std::uint32_t from : g.nodes[n].inputs) {
                    if (g.values[from].kind == gpushare::graph::value_kind::weight) continue;
                    const auto& read = values.at(from);
                    for (std::size_t i = 0; i < made.size() && !read.empty(); ++i)
                        made[i] = static_cast<unsigned char>(3 * made[i] + read[i % read.size()]);
                }
                values[to] = std::move(made);
            }
    }

    template <gpushare::launcher Stream>
    void enqueue(Stream& to, std::uint32_t piece, std::span<const gpushare::graph::tensor* const> in,
                 std::span<gpushare::graph::tensor* const> out) {
        if (piece == throws_when_enqueued) throw std::runtime_error("no such piece today");
        to.launch({.blocks = 1}, [this, piece, in, out](const auto&) { run(piece, in, out); });
    }
    void run(std::uint32_t piece, std::span<const gpushare::graph::tensor* const> in,
             std::span<gpushare::graph::tensor* const> out) {
        const auto& nodes = pieces_.at(piece);
        if (before) before(piece);
        ++runs;
        if (piece == fails) throw std::runtime_error("piece " + std::to_string(piece) + " fails");
        const auto edges = edges_of(*g_, nodes);
        bytes_of values;
        for (std::size_t i = 0; i < in.size(); ++i) {
            if (in[i]->data == nullptr) throw std::runtime_error("an input isn't there");
            const auto* from = static_cast<const unsigned char*>(in[i]->data);
            values[edges.inputs[i]].assign(from, from + in[i]->size());
        }
        compute(*g_, nodes, values);
        for (std::size_t i = 0; i < out.size(); ++i) {
            const auto& made = values.at(edges.outputs[i]);
            void* const place = out[i]->place(gpushare::graph::element::u8, {static_cast<std::int64_t>(made.size())});
            std::copy(made.begin(), made.end(), static_cast<unsigned char*>(place));
        }
    }

    static constexpr std::uint32_t none = ~0U;
    std::uint32_t fails = none, throws_when_enqueued = none;
    std::atomic<int> runs{0};
    std::function<void(std::uint32_t)> before{};  ///< called where a piece runs

private:
    const gpushare::graph::model_graph* g_;
    std::vector<std::vector<std::uint32_t>> pieces_;
};

}  // namespace support
