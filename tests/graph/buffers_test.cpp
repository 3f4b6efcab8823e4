// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Buffers between pieces: buffers that are needed at the same time don't overlap, and the block is
// as small as can be expected.
#include <gpushare/graph/plan_text.hpp>
#include <gpushare/graph/run.hpp>

#include <algorithm>
#include <vector>

#include "graph/synthetic.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"

namespace buffers_test {

using namespace gpushare::graph;
using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::ns;

/// Bytes of all, each as a multiple of the alignment.
std::uint64_t sum_of(const std::vector<buffer_need>& needs, std::uint64_t alignment) {
    std::uint64_t sum = 0;
    for (const auto& n : needs) sum += (n.size.count() + alignment - 1) / alignment * alignment;
    return sum;
}

/// The most bytes in one step, step by step.
std::uint64_t most_of(const std::vector<buffer_need>& needs, std::uint64_t alignment) {
    std::uint64_t most = 0;
    for (std::uint32_t step = 0; step < 200; ++step) {
        std::vector<buffer_need> there;
        for (const auto& n : needs)
            if (n.first <= step && step <= n.last) there.push_back(n);
        most = std::max(most, sum_of(there, alignment));
    }
    return most;
}

/// What every layout promises.
void check_layout(const std::vector<buffer_need>& needs, const buffer_layout& layout, std::uint64_t alignment) {
    REQUIRE(layout.offsets.size() == needs.size());
    std::uint64_t end = 0;
    for (std::size_t a = 0; a < needs.size(); ++a) {
        CHECK(layout.offsets[a] % alignment == 0);
        if (needs[a].size == 0_B) continue;
        end = std::max(end, layout.offsets[a] + needs[a].size.count());
        for (std::size_t b = 0; b < a; ++b) {
            if (needs[b].size == 0_B || needs[a].first > needs[b].last || needs[b].first > needs[a].last) continue;
            CHECK((layout.offsets[a] + needs[a].size.count() <= layout.offsets[b] ||
                   layout.offsets[b] + needs[b].size.count() <= layout.offsets[a]));
        }
    }
    CHECK(end <= layout.total.count());
    CHECK(layout.total.count() <= sum_of(needs, alignment));
    CHECK(layout.total >= least_total(needs, alignment));
}

std::vector<buffer_need> random_needs(support::random& any, std::size_t count, std::uint32_t steps,
                                      std::uint64_t most) {
    std::vector<buffer_need> needs;
    for (std::size_t i = 0; i < count; ++i) {
        const auto first = static_cast<std::uint32_t>(any.below(steps));
        const auto longest = any.one_in(4) ? steps - first : std::min<std::uint32_t>(steps - first, 4);
        needs.push_back({bytes{any.below(most)}, first, first + static_cast<std::uint32_t>(any.below(longest))});
    }
    return needs;
}

TEST_CASE("no two values that live together overlap", "[graph]") {
    double all = 0, least = 0, sum = 0;
    for (std::uint64_t n = 0; n < 200; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        support::random any(seed);
        const std::uint64_t alignment = std::uint64_t{1} << any.below(10);
        const auto needs = random_needs(any, any.below(60), 1 + static_cast<std::uint32_t>(any.below(100)), 5000);
        const auto layout = place_buffers(needs, alignment);
        check_layout(needs, layout, alignment);
        CHECK(least_total(needs, alignment).count() == most_of(needs, alignment));
        all += static_cast<double>(layout.total.count());
        least += static_cast<double>(least_total(needs, alignment).count());
        sum += static_cast<double>(sum_of(needs, alignment));
    }
    INFO("of the bytes that live at once: " << all / least << ", of all: " << all / sum);
    CHECK(all < 1.1 * least);
}

TEST_CASE("if the largest buffer first leaves a gap, another order is taken", "[graph]") {
    const std::vector<buffer_need> needs{{bytes{4}, 3, 5}, {bytes{3}, 2, 4}, {bytes{2}, 0, 2}, {bytes{4}, 0, 0}};
    CHECK(place_buffers(needs, 1).total == bytes{7});  // 9 with the largest first
}

/// The smallest block over all orders of placing each value at the lowest offset that is free: one
/// of them is optimal.
std::uint64_t smallest(const std::vector<buffer_need>& needs) {
    std::vector<std::size_t> order(needs.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::uint64_t best = ~std::uint64_t{0};
    do {
        std::vector<std::uint64_t> offsets(needs.size());
        std::uint64_t total = 0;
        for (std::size_t i = 0; i < order.size(); ++i) {
            std::uint64_t at = 0;
            for (bool moved = true; moved;) {
                moved = false;
                for (std::size_t j = 0; j < i; ++j) {
                    const auto &a = needs[order[i]], &b = needs[order[j]];
                    const auto there = offsets[order[j]];
                    if (a.first > b.last || b.first > a.last || at >= there + b.size.count() ||
                        there >= at + a.size.count())
                        continue;
                    at = there + b.size.count();
                    moved = true;
                }
            }
            offsets[order[i]] = at;
            total = std::max(total, at + needs[order[i]].size.count());
        }
        best = std::min(best, total);
    } while (std::ranges::next_permutation(order).found);
    return best;
}

TEST_CASE("a block is hardly ever larger than the smallest that there is", "[graph]") {
    int optimal = 0;
    double all = 0, least = 0;
    for (std::uint64_t n = 0; n < 100; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        support::random any(seed);
        const auto needs = random_needs(any, 6, 6, 20);
        const auto layout = place_buffers(needs, 1);
        const auto best = smallest(needs);
        CHECK(layout.total.count() >= best);
        optimal += layout.total.count() == best ? 1 : 0;
        all += static_cast<double>(layout.total.count());
        least += static_cast<double>(best);
    }
    INFO(optimal << " of 100 are the smallest; all together " << all / least << " of it");
    CHECK(optimal >= 90);
    CHECK(all < 1.02 * least);
}

TEST_CASE("the tensors that a plan's cuts keep share one block", "[graph]") {
    for (const auto& t : {support::detector(), support::transformer(6)}) {
        const split_planner planner(t.graph, t.times, {.limit = std::chrono::milliseconds(2)});
        const auto& p = planner.plan();
        const auto values = crossing_values(t.graph, p);
        const auto needs = needs_of(t.graph, values);
        const auto layout = place_buffers(needs, 256);
        check_layout(needs, layout, 256);
        REQUIRE(values.size() >= p.pieces.size() - 1);
        if (p.pieces.size() > 3) CHECK(layout.total.count() < sum_of(needs, 256));

        // The cut behind piece i is crossed by exactly the values that are there before and behind
        // it.
        for (std::uint32_t i = 0; i + 1 < p.pieces.size(); ++i) {
            bytes over{};
            for (std::size_t v = 0; v < values.size(); ++v)
                if (values[v].first <= i && i < values[v].last) over += needs[v].size;
            CHECK(over == p.pieces[i].crossing);
        }
    }
}

TEST_CASE("outputs are the caller's, and a size that nobody knows is an error", "[graph]") {
    support::graph_builder b;
    const auto in = b.input(10);
    const auto first = b.node("Relu", {in}, 300);
    const auto second = b.node("Relu", {first}, 20);
    const auto third = b.node("Add", {second, in, first}, 30);
    b.output(second).output(third);
    auto g = b.graph();
    split_plan p{.of_graph = fingerprint(g), .limit = ns{1}, .order = {0, 1, 2}, .pieces = {}};
    for (std::uint32_t i = 0; i < 3; ++i) p.pieces.push_back({.places = {i, i + 1}});
    check(p, g);
    const auto values = crossing_values(g, p);
    CHECK(values == std::vector<crossing_value>{{first, 0, 2}});
    CHECK(needs_of(g, values) == std::vector<buffer_need>{{300_B, 0, 2}});
    CHECK(place_buffers(needs_of(g, values), 256).total == 512_B);
    g.values[first].shape[0].extent = -1;
    CHECK(support::code_of([&] { (void)needs_of(g, values); }) == errc::invalid_specification);
    const std::vector<bytes> sizes(g.values.size(), 7_B);
    CHECK(needs_of(g, values, sizes) == std::vector<buffer_need>{{7_B, 0, 2}});
    CHECK(support::code_of([&] { (void)needs_of(g, values, std::span(sizes).first(2)); }) ==
          errc::invalid_specification);
}

TEST_CASE("buffers that can't be are refused", "[graph]") {
    const auto code = [](const std::vector<buffer_need>& needs, std::size_t alignment) {
        return support::code_of([&] { (void)place_buffers(needs, alignment); });
    };
    CHECK(code({{1_B, 0, 1}}, 0) == errc::bad_alignment);
    CHECK(code({{1_B, 0, 1}}, 3) == errc::bad_alignment);
    CHECK(code({{bytes::max(), 0, 1}}, 1) == errc::size_overflow);
    CHECK(code({{bytes::max() / 2, 0, 1}, {bytes::max() / 2, 3, 4}, {1_GiB, 0, 0}}, 1) == errc::size_overflow);
    CHECK(place_buffers({}, 256) == buffer_layout{});
    CHECK(place_buffers(std::vector<buffer_need>{{0_B, 0, 1}, {0_B, 0, 1}}, 256).total == 0_B);
    CHECK(place_buffers(std::vector<buffer_need>{{1_B, 0, ~0U}, {1_B, ~0U, ~0U}}, 64).total == 128_B);
}

}  // namespace buffers_test
