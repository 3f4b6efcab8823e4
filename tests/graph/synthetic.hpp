// SPDX-License-Identifier: Apache-2.0
// Graphs that don't come from files: in the forms that models have, and random ones.
//
//   const auto g = support::detector();      const auto h = support::random_graph(any, 12);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/graph/graph.hpp>

#include "support/random.hpp"

namespace support {

/// Adds one node after the other; a value is named by its index.
class graph_builder {
public:
    std::uint32_t input(std::uint64_t size) { return add(size, gpushare::graph::value_kind::input, g_.inputs); }
    std::uint32_t weight(std::uint64_t size) {
        std::vector<std::uint32_t> none;
        return add(size, gpushare::graph::value_kind::weight, none);
    }
    /// A node that makes one value of `size` bytes.
    std::uint32_t node(const std::string& type, std::vector<std::uint32_t> reads, std::uint64_t size) {
        std::vector<std::uint32_t> none;
        const auto made = add(size, gpushare::graph::value_kind::inner, none);
        g_.nodes.push_back({type + '_' + std::to_string(g_.nodes.size()), type, std::move(reads), {made}});
        return made;
    }
    graph_builder& output(std::uint32_t v) {
        if (g_.values[v].kind == gpushare::graph::value_kind::inner)
            g_.values[v].kind = gpushare::graph::value_kind::output;
        g_.outputs.push_back(v);
        return *this;
    }
    gpushare::graph::model_graph& graph() { return g_; }

private:
    std::uint32_t add(std::uint64_t size, gpushare::graph::value_kind kind, std::vector<std::uint32_t>& list) {
        const auto v = static_cast<std::uint32_t>(g_.values.size());
        g_.values.push_back({.name = "v" + std::to_string(v),
                             .type = gpushare::graph::element::u8,
                             .shape = {{.extent = static_cast<std::int64_t>(size)}},
                             .kind = kind,
                             .ranked = true});
        list.push_back(v);
        return v;
    }

    gpushare::graph::model_graph g_;
};

/// Of `nodes` nodes that read up to three earlier values each, with one or two values made.
inline gpushare::graph::model_graph random_graph(random& any, std::uint32_t nodes) {
    static const std::vector<std::string> types{"Conv",  "BatchNormalization", "Relu", "MatMul", "Add", "Softmax",
                                                "Concat"};
    graph_builder b;
    std::vector<std::uint32_t> there{b.input(1 + any.below(1000)), b.weight(1 + any.below(1000))};
    for (std::uint32_t n = 0; n < nodes; ++n) {
        std::vector<std::uint32_t> reads;
        for (std::uint64_t i = 0, count = any.below(4); i < count; ++i) {
            const std::size_t back = any.one_in(3) ? there.size() : std::min<std::size_t>(there.size(), 3);
            const auto v = there[there.size() - 1 - any.below(back)];
            if (std::ranges::find(reads, v) == reads.end()) reads.push_back(v);
        }
        there.push_back(b.node(any.of(types), reads, any.below(100'000)));
        if (any.one_in(5)) {  // a second result
            const auto second = b.node("Split", {}, any.below(1000));
            b.graph().nodes.pop_back();
            b.graph().nodes.back().outputs.push_back(second);
            there.push_back(second);
        }
        if (any.one_in(6)) b.output(there.back());
    }
    b.output(there.back());
    return b.graph();
}

/// Random times of nodes, some of them 0.
inline std::vector<gpushare::ns> random_times(random& any, std::size_t nodes, std::uint64_t most) {
    std::vector<gpushare::ns> times;
    for (std::size_t n = 0; n < nodes; ++n)
        times.emplace_back(any.one_in(8) ? 0 : static_cast<std::int64_t>(any.below(most)));
    return times;
}

/// A model with a time for each node.
struct timed_graph {
    gpushare::graph::model_graph graph{};
    std::vector<gpushare::ns> times{};
};

/// A detector: a backbone of four stages that each halve the image and double the channels, and a
/// pyramid that brings all stages to one size and joins them. As exporters write such models, nodes
/// of the four branches take turns.
inline timed_graph detector(std::uint64_t side = 640) {
    graph_builder b;
    std::vector<std::int64_t> us;
    const auto conv = [&](std::uint32_t in, std::uint64_t at, std::uint64_t from, std::uint64_t to) {
        const auto bytes = at * at * to * 4;
        const auto w = b.weight(from * to * 36);
        const auto c = b.node("Conv", {in, w}, bytes);
        us.push_back(static_cast<std::int64_t>(at * at * from * to * 9 / 60'000));  // 60 multiplications a ns
        const auto n = b.node("BatchNormalization", {c}, bytes);
        const auto r = b.node("Relu", {n}, bytes);
        for (int i = 0; i < 2; ++i) us.push_back(static_cast<std::int64_t>(bytes / 10'000));
        return r;
    };
    const auto add = [&](std::uint32_t x, std::uint32_t y, std::uint64_t bytes) {
        us.push_back(static_cast<std::int64_t>(bytes / 10'000));
        return b.node("Add", {x, y}, bytes);
    };
    auto x = conv(b.input(side * side * 12), side / 2, 3, 16);
    std::vector<std::uint32_t> stages;
    std::uint64_t at = side / 4, channels = 16;
    for (int stage = 0; stage < 4; ++stage, at /= 2, channels *= 2) {
        x = conv(x, at, stage == 0 ? 16 : channels / 2, channels);
        for (int block = 0; block < 2; ++block)
            x = add(x, conv(conv(x, at, channels, channels), at, channels, channels), at * at * channels * 4);
        stages.push_back(x);
    }
    std::vector<std::uint32_t> branch(4);
    for (std::size_t s = 0; s < 4; ++s) branch[s] = conv(stages[s], side / 4 >> s, std::uint64_t{16} << s, 24);
    for (std::size_t s = 0; s < 4; ++s) {  // in turn, as a loop over layers is exported
        branch[s] = conv(branch[s], side / 4 >> s, 24, 24);
        const auto size = side / 4 * side / 4 * 24 * 4;
        us.push_back(static_cast<std::int64_t>(size / 10'000));
        branch[s] = b.node("Resize", {branch[s]}, size);
    }
    us.push_back(300);
    const auto all = b.node("Concat", branch, side / 4 * side / 4 * 96 * 4);
    const auto map = conv(all, side / 4, 96, 24);
    us.push_back(200);
    b.output(b.node("Sigmoid", {map}, side * side * 4));
    timed_graph t{b.graph(), {}};
    for (const auto time : us) t.times.emplace_back(time * 1000);
    return t;
}

/// An encoder of `blocks` blocks, whose heads and layer norms are small nodes, as exporters write
/// them.
inline timed_graph transformer(std::uint32_t blocks, std::uint64_t tokens = 128, std::uint64_t width = 384) {
    graph_builder b;
    std::vector<std::int64_t> ns_of;
    const auto node = [&](const char* type, std::vector<std::uint32_t> reads, std::uint64_t floats,
                          std::uint64_t work) {
        ns_of.push_back(static_cast<std::int64_t>(work));
        return b.node(type, std::move(reads), floats * 4);
    };
    const auto wise = [&](const char* type, std::vector<std::uint32_t> reads, std::uint64_t floats) {
        return node(type, std::move(reads), floats, floats / 2);
    };
    const auto linear = [&](std::uint32_t x, std::uint64_t from, std::uint64_t to) {
        const auto m = node("MatMul", {x, b.weight(from * to * 4)}, tokens * to, tokens * from * to / 60);
        return wise("Add", {m, b.weight(to * 4)}, tokens * to);
    };
    const auto norm = [&](std::uint32_t x) {
        const auto mean = wise("ReduceMean", {x}, tokens);
        const auto off = wise("Sub", {x, mean}, tokens * width);
        const auto square = wise("Pow", {off}, tokens * width);
        const auto root = wise("Sqrt", {wise("ReduceMean", {square}, tokens)}, tokens);
        return wise("Mul", {wise("Div", {off, root}, tokens * width), b.weight(width * 4)}, tokens * width);
    };
    auto x = b.input(tokens * width * 4);
    for (std::uint32_t i = 0; i < blocks; ++i) {
        const auto n = norm(x);
        const auto q = linear(n, width, width), k = linear(n, width, width), v = linear(n, width, width);
        const auto turned = wise("Transpose", {k}, tokens * width);
        const auto scores = node("MatMul", {q, turned}, tokens * tokens * 6, tokens * tokens * width / 60);
        const auto soft = wise("Softmax", {scores}, tokens * tokens * 6);
        const auto mixed = node("MatMul", {soft, v}, tokens * width, tokens * tokens * width / 60);
        x = wise("Add", {x, linear(mixed, width, width)}, tokens * width);
        const auto inner = linear(norm(x), width, 4 * width);
        const auto gelu = wise("Mul", {inner, wise("Erf", {inner}, 4 * tokens * width)}, 4 * tokens * width);
        x = wise("Add", {x, linear(gelu, 4 * width, width)}, tokens * width);
    }
    b.output(x);
    timed_graph t{b.graph(), {}};
    for (const auto time : ns_of) t.times.emplace_back(time);
    return t;
}

}  // namespace support
