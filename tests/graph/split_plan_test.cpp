// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Where models are cut: the plan compared with all possible plans, its promises on random graphs,
// measurements that correct it, and its text.
#include <gpushare/graph/plan_text.hpp>
#include <gpushare/graph/split_plan.hpp>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graph/synthetic.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"

namespace split_plan_test {

using namespace gpushare::graph;
using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::ns;
using order = std::vector<std::uint32_t>;

// One byte a ns, so that bytes are times.
const split_options plain{
    .limit = 1000ns, .per_piece = 100ns, .bandwidth = bytes{1'000'000'000}, .order = split_order::given};

split_options with_order(split_options o, split_order kind) {
    o.order = kind;
    return o;
}

std::uint64_t size_in(const model_graph& g, const order& values) {
    std::uint64_t all = 0;
    for (const auto v : values) all += g.values[v].size()->count();
    return all;
}

/// What the pieces that end at `ends` cost, by the words of the documentation: above the limit, and
/// in all. `g` is in the order of the pieces.
template <class Length>
std::pair<ns, ns> cost_of(const model_graph& g, const split_options& o, const order& ends, Length length) {
    std::pair<ns, ns> cost{};
    std::map<std::uint32_t, std::uint32_t> maker, piece_of;
    std::map<std::uint32_t, int> readers;
    for (std::uint32_t n = 0; n < g.nodes.size(); ++n) {
        for (const auto v : g.nodes[n].outputs) maker[v] = n;
        for (const auto v : g.nodes[n].inputs) ++readers[v];
        piece_of[n] = static_cast<std::uint32_t>(std::ranges::upper_bound(ends, n) - ends.begin());
    }
    for (std::uint32_t i = 0; i < ends.size(); ++i) {
        const node_range range{i == 0 ? 0 : ends[i - 1], ends[i]};
        cost.first += std::max(length(range) - o.limit, ns{});
        cost.second += o.per_piece;
        const auto edges = edges_of(g, range);
        for (const auto v : edges.inputs)
            if (maker.contains(v)) cost.second += ns{g.values[v].size()->count()};
        for (const auto v : edges.outputs)
            if (g.values[v].kind == value_kind::inner) cost.second += ns{g.values[v].size()->count()};
    }
    for (std::uint32_t n = 0; n < g.nodes.size(); ++n)
        for (const auto v : g.nodes[n].inputs) {
            if (!maker.contains(v) || readers[v] != 1 || g.values[v].kind != value_kind::inner) continue;
            if (piece_of[maker[v]] == piece_of[n]) continue;
            const double passes = fusion_passes(o.fusions, g.nodes[maker[v]].type, g.nodes[n].type);
            cost.second += ns{static_cast<std::int64_t>(passes * static_cast<double>(g.values[v].size()->count()))};
        }
    return cost;
}

/// The least of all ways to cut the graph in its own order.
template <class Length>
std::pair<ns, ns> least_cost(const model_graph& g, const split_options& o, Length length) {
    std::pair<ns, ns> least{ns::max(), ns::max()};
    const auto nodes = static_cast<std::uint32_t>(g.nodes.size());
    for (std::uint32_t set = 0; set < 1U << (nodes - 1); ++set) {
        order ends;
        bool allowed = true;
        for (std::uint32_t n = 1; n <= nodes; ++n) {
            if (n < nodes && (set >> (n - 1) & 1) == 0) continue;
            const node_range range{ends.empty() ? 0 : ends.back(), n};
            allowed = allowed && (range.size() == 1 || length(range) <= o.limit);
            ends.push_back(n);
        }
        if (allowed) least = std::min(least, cost_of(g, o, ends, length));
    }
    return least;
}

order ends_of(const split_plan& p) {
    order ends;
    for (const auto& piece : p.pieces) ends.push_back(piece.places.behind);
    return ends;
}

/// The length of places in an order, as a sum.
auto sum_of(const std::vector<ns>& times, const order& by, ns per_piece) {
    return [&times, &by, per_piece](node_range r) {
        ns sum = per_piece;
        for (std::uint32_t p = r.first; p < r.behind; ++p) sum += times[by[p]];
        return sum;
    };
}

/// All orders in which the nodes can run.
template <class F>
void each_order(const model_graph& g, F f) {
    order all = gpushare::graph::detail::given_order(g);
    do {
        std::set<std::uint32_t> made;
        for (std::uint32_t v = 0; v < g.values.size(); ++v)
            if (g.values[v].kind == value_kind::input || g.values[v].kind == value_kind::weight) made.insert(v);
        const bool runs = std::ranges::all_of(all, [&](auto n) {
            made.insert(g.nodes[n].outputs.begin(), g.nodes[n].outputs.end());
            return std::ranges::all_of(g.nodes[n].inputs, [&](auto v) { return made.contains(v); });
        });
        if (runs) f(all);
    } while (std::ranges::next_permutation(all).found);
}

TEST_CASE("no way to cut a small graph is cheaper than the plan", "[graph]") {
    for (std::uint64_t n = 0; n < 300; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        support::random any(seed);
        const auto g = support::random_graph(any, 1 + static_cast<std::uint32_t>(any.below(9)));
        const auto times = support::random_times(any, g.nodes.size(), 700);
        const auto as_given = gpushare::graph::detail::given_order(g);
        split_planner planner(g, times, plain);
        const auto length = sum_of(times, as_given, plain.per_piece);
        const auto cost = cost_of(g, plain, ends_of(planner.plan()), length);
        CHECK(cost == least_cost(g, plain, length));
        CHECK(planner.overhead() == cost.second);
    }
}

TEST_CASE("the best order is none that costs more", "[graph]") {
    double all = 0, least_of_all = 0, given = 0;
    for (std::uint64_t n = 0; n < 40; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        support::random any(seed);
        const auto g = support::random_graph(any, 6);
        const auto times = support::random_times(any, g.nodes.size(), 700);
        std::map<split_order, std::pair<ns, ns>> cost;
        for (const auto kind : {split_order::best, split_order::given, split_order::depth_first, split_order::narrow}) {
            const split_planner planner(g, times, with_order(plain, kind));
            const auto& p = planner.plan();
            cost[kind] = cost_of(reordered(g, p.order), plain, ends_of(p), sum_of(times, p.order, plain.per_piece));
        }
        for (const auto& [kind, c] : cost) CHECK(cost[split_order::best] <= c);
        std::pair<ns, ns> least{ns::max(), ns::max()};
        each_order(g, [&](const order& o) {
            least = std::min(least, least_cost(reordered(g, o), plain, sum_of(times, o, plain.per_piece)));
        });
        CHECK(least <= cost[split_order::best]);
        all += static_cast<double>(cost[split_order::best].second.count());
        given += static_cast<double>(cost[split_order::given].second.count());
        least_of_all += static_cast<double>(least.second.count());
    }
    INFO("of the least over all orders: best " << all / least_of_all << ", given " << given / least_of_all);
    CHECK(all < 1.02 * least_of_all);
    CHECK(all < given);
}

TEST_CASE("a plan of any graph runs, covers all, and keeps the limit where it can", "[graph]") {
    for (std::uint64_t n = 0; n < 60; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        support::random any(seed);
        const auto g = support::random_graph(any, 1 + static_cast<std::uint32_t>(any.below(120)));
        const auto times = support::random_times(any, g.nodes.size(), 1200);
        const split_planner planner(g, times, with_order(plain, split_order::best));
        const auto& p = planner.plan();
        check(p, g);
        const auto ordered = reordered(g, p.order);
        const auto length = sum_of(times, p.order, plain.per_piece);
        for (const auto& piece : p.pieces) {
            CHECK(piece.takes == length(piece.places));
            CHECK(piece.over == (piece.takes > plain.limit));
            CHECK((!piece.over || piece.places.size() == 1));
            CHECK(piece.crossing.count() == size_in(ordered, crossing(ordered, piece.places.behind)));
        }
        CHECK(planner.priced(p) == p);
        CHECK(planner.next_to_measure().has_value());
    }
}

TEST_CASE("no cut where something lives that no buffer holds", "[graph]") {
    for (std::uint64_t n = 0; n < 60; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        support::random any(seed);
        auto g = support::random_graph(any, 30);
        for (auto& v : g.values) {
            v.tensor = !any.one_in(20);
            if (any.one_in(20)) v.type = any.one_in(2) ? element::text : element::unknown;
        }
        const split_planner planner(g, support::random_times(any, g.nodes.size(), 700),
                                    with_order(plain, split_order::best));
        const auto ordered = reordered(g, planner.plan().order);
        for (const auto& piece : planner.plan().pieces)
            for (const auto v : crossing(ordered, piece.places.behind)) {
                CHECK(g.values[v].tensor);
                CHECK(g.values[v].type != element::text);
                CHECK(g.values[v].type != element::unknown);  // whose size nobody knows
            }
    }
}

TEST_CASE("a cut keeps off what an engine fuses, and goes where little crosses", "[graph]") {
    support::graph_builder b;
    auto x = b.node("Conv", {b.input(10)}, 1000);
    x = b.node("BatchNormalization", {x}, 1000);
    x = b.node("Relu", {x}, 1000);
    x = b.node("Conv", {x}, 1000);
    x = b.node("MaxPool", {x}, 10);
    b.output(b.node("Conv", {x}, 10));
    const std::vector<ns> times{500ns, 100ns, 200ns, 100ns, 10ns, 400ns};
    const auto ends = [&](split_options o) { return ends_of(split_planner(b.graph(), times, o).plan()); };
    split_options none = plain, other = plain, wide = plain;
    none.fusions = {};
    const fusion_rule odd[]{{.before = "Relu", .after = "Conv", .passes = 5}};
    other.fusions = odd;
    wide.limit = 1010ns;
    CHECK(ends(none) == order{2, 6});   // of equal bytes, where the longer piece is shortest
    CHECK(ends(plain) == order{3, 6});  // not between the normalisation and its activation
    CHECK(ends(other) == order{2, 6});
    CHECK(ends(wide) == order{5, 6});  // behind the pool
}

TEST_CASE("a node above the limit is a piece by itself", "[graph]") {
    support::graph_builder b;
    auto x = b.node("Conv", {b.input(10)}, 10);
    x = b.node("Conv", {x}, 10);
    b.output(b.node("Conv", {x}, 10));
    const split_planner planner(b.graph(), std::vector<ns>{10ns, 2us, 10ns}, plain);
    CHECK(ends_of(planner.plan()) == order{1, 2, 3});
    CHECK(planner.plan().pieces[1].over);
    CHECK_FALSE(planner.plan().pieces[0].over);
    CHECK(planner.plan().longest() == 2100ns);
    CHECK(planner.plan().crossing() == 20_B);
}

TEST_CASE("the longest times of very many pieces don't overflow", "[graph]") {
    support::graph_builder b;
    auto v = b.input(1);
    constexpr std::uint32_t nodes = 9000;
    for (std::uint32_t n = 0; n < nodes; ++n) v = b.node("Relu", {v}, 1);
    const auto& g = b.output(v).graph();
    auto options = plain;
    options.limit = 1ns;
    options.per_piece = ns::max();
    const split_planner planner(g, std::vector<ns>(nodes, ns::max()), options);
    CHECK(planner.plan().pieces.size() == nodes);
    CHECK(planner.overhead() > 0ns);
}

TEST_CASE("branches run one after the other where that leaves less alive", "[graph]") {
    support::graph_builder b;
    std::vector<std::uint32_t> branch(4, b.input(10));
    for (int depth = 0; depth < 6; ++depth)  // in turn
        for (auto& v : branch) v = b.node("Conv", {v}, 100);
    b.output(b.node("Concat", branch, 10));
    const std::vector<ns> times(25, 100ns);
    const split_planner given(b.graph(), times, plain),
        branches(b.graph(), times, with_order(plain, split_order::depth_first)),
        best(b.graph(), times, with_order(plain, split_order::best));
    CHECK(given.plan().crossing().count() == 800);     // two cuts over all four
    CHECK(branches.plan().crossing().count() == 600);  // behind each branch
    CHECK(best.overhead() <= branches.overhead());
    CHECK(branches.overhead() < given.overhead());
}

TEST_CASE("cuts of a detector cost less than cuts at equal times", "[graph]") {
    const auto t = support::detector();
    const split_options o{.limit = 5ms, .bandwidth = bytes{1'000'000'000}, .order = split_order::given};
    const split_planner given(t.graph, t.times, o), best(t.graph, t.times, with_order(o, split_order::best));
    CHECK(best.overhead() <= given.overhead());

    // Cuts that only look at times, in as many pieces.
    const auto total = std::accumulate(t.times.begin(), t.times.end(), ns{});
    const auto pieces = static_cast<std::int64_t>(best.plan().pieces.size());
    order naive;
    ns sum{};
    for (std::uint32_t n = 0; n < t.times.size(); ++n) {
        sum += t.times[n];
        if (sum >= total * static_cast<std::int64_t>(naive.size() + 1) / pieces) naive.push_back(n + 1);
    }
    const auto as_given = gpushare::graph::detail::given_order(t.graph);
    const auto cost = cost_of(t.graph, o, naive, sum_of(t.times, as_given, o.per_piece));
    CHECK(naive.size() == best.plan().pieces.size());
    CHECK(std::pair(ns{}, best.overhead()) < cost);
    CHECK(best.overhead() < cost.second);
}

/// What a fusing engine takes: element-wise nodes are free behind what they are fused with in the
/// same piece.
ns fused_length(const model_graph& g, const std::vector<ns>& times, std::span<const std::uint32_t> nodes,
                ns per_piece) {
    const auto by = gpushare::graph::detail::makers(g);
    ns sum = per_piece;
    for (const auto n : nodes) {
        const bool free = std::ranges::any_of(g.nodes[n].inputs, [&](auto v) {
            return by[v] != gpushare::graph::detail::nobody && std::ranges::find(nodes, by[v]) != nodes.end() &&
                   fusion_passes(usual_fusions, g.nodes[by[v]].type, g.nodes[n].type) > 0;
        });
        sum += free ? ns{} : times[n];
    }
    return sum;
}

TEST_CASE("measurements correct a plan until every piece is measured and within the limit", "[graph]") {
    std::uint64_t measured = 0, pieces = 0;
    for (std::uint64_t n = 0; n < 60; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        support::random any(seed);
        const auto g = support::random_graph(any, 2 + static_cast<std::uint32_t>(any.below(60)));
        const auto truth = support::random_times(any, g.nodes.size(), 800);
        auto guess = truth;  // off by up to the factor 2 either way
        for (auto& t : guess) t = t * static_cast<std::int64_t>(50 + any.below(150)) / 100;
        split_options o = with_order(plain, split_order::best);
        o.measurements = 1000;
        split_planner planner(g, guess, o);
        std::map<std::pair<std::uint32_t, std::uint32_t>, ns> seen;
        const auto took = [&](node_range r) {
            return fused_length(g, truth, planner.plan().nodes(r), plain.per_piece);
        };
        while (const auto r = planner.next_to_measure()) {
            CHECK(seen.emplace(std::pair(r->first, r->behind), took(*r)).second);  // nothing twice
            planner.measured(*r, took(*r));
        }
        check(planner.plan(), g);
        for (const auto& p : planner.plan().pieces) {
            REQUIRE(seen.contains({p.places.first, p.places.behind}));
            CHECK(p.takes == took(p.places));
            CHECK((p.takes <= plain.limit || p.places.size() == 1));
        }
        const auto& all = planner.plan().pieces;
        for (std::size_t i = 1; i < all.size(); ++i) {
            const node_range both{all[i - 1].places.first, all[i].places.behind};
            if (all[i - 1].takes + all[i].takes - plain.per_piece <= plain.limit) CHECK(took(both) > plain.limit);
        }
        measured += planner.measurements();
        pieces += all.size();
    }
    CHECK(measured < 12 * pieces);
}

TEST_CASE("measurements that agree with the nodes change nothing", "[graph]") {
    for (std::uint64_t n = 0; n < 60; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        support::random any(seed);
        const auto g = support::random_graph(any, 2 + static_cast<std::uint32_t>(any.below(60)));
        const auto times = support::random_times(any, g.nodes.size(), 800);
        split_options o = with_order(plain, split_order::best);
        o.measurements = 1000;
        split_planner planner(g, times, o);
        const auto before = planner.plan();
        refine(planner, [&](std::span<const std::uint32_t> nodes) {
            ns sum = plain.per_piece;
            for (const auto i : nodes) sum += times[i];
            return sum;
        });
        CHECK(planner.plan() == before);
        CHECK(planner.measurements() == before.pieces.size());
    }
}

TEST_CASE("pieces that measure too long are split, and short ones are joined", "[graph]") {
    support::graph_builder b;
    auto x = b.input(10);
    for (int i = 0; i < 8; ++i) x = b.node("Conv", {x}, 10);
    b.output(x);
    const auto pieces_if = [&](ns each, ns worth = {}) {
        split_options o = plain;
        o.worth = worth;
        split_planner planner(b.graph(), std::vector<ns>(8, 200ns), o);  // four in a piece
        CHECK(planner.plan().pieces.size() == 2);
        const auto p = refine(planner, [&](auto nodes) { return 100ns + each * nodes.size(); });
        CHECK(planner.settled());
        for (const auto& piece : p.pieces) CHECK(piece.takes == 100ns + each * piece.places.size());
        return p.pieces.size();
    };
    CHECK(pieces_if(200ns) == 2);
    CHECK(pieces_if(400ns) == 4);
    CHECK(pieces_if(900ns) == 8);
    CHECK(pieces_if(2us) == 8);
    CHECK(pieces_if(100ns) == 1);
    CHECK(pieces_if(0ns) == 1);
    CHECK(pieces_if(100ns, 1us) == 2);  // not worth the measurement
}

TEST_CASE("a measurement says something of all nodes in it", "[graph]") {
    support::graph_builder b;
    auto x = b.input(10);
    for (int i = 0; i < 64; ++i) x = b.node("Conv", {x}, 10);
    b.output(x);
    split_options o = plain;
    o.measurements = 10'000;
    split_planner planner(b.graph(), std::vector<ns>(64, 10ns), o);  // a twentieth of what they take
    CHECK(planner.plan().pieces.size() == 1);
    refine(planner, [](auto nodes) { return 100ns + 200ns * nodes.size(); });
    CHECK(planner.plan().pieces.size() == 16);
    CHECK(planner.measurements() == 17);  // all of it, then each piece
}

TEST_CASE("a piece that no engine runs by itself is in no plan", "[graph]") {
    support::graph_builder b;
    auto x = b.input(10);
    for (int i = 0; i < 6; ++i) x = b.node("Conv", {x}, 10);
    b.output(x);
    const std::vector<ns> times(6, 300ns);
    // Nothing that begins with node 3 or ends with node 2 runs: the two stay together.
    const auto measure = [](std::span<const std::uint32_t> nodes) -> std::optional<ns> {
        if (nodes.front() == 3 || nodes.back() == 2) return std::nullopt;
        return 100ns + 300ns * nodes.size();
    };
    split_planner planner(b.graph(), times, plain);
    for (const auto& p : refine(planner, measure).pieces) {
        CHECK(measure(planner.plan().nodes(p.places)).has_value());
        CHECK_FALSE(p.over);
    }
    // No piece of less than all runs: one piece, above the limit.
    split_planner whole(b.graph(), times, plain);
    refine(whole, [](std::span<const std::uint32_t> nodes) {
        return nodes.size() == 6 ? std::optional<ns>(1900ns) : std::nullopt;
    });
    CHECK(ends_of(whole.plan()) == order{6});
    CHECK(whole.plan().pieces[0].over);
    // One cut is possible, in front of node 4: one piece above the limit is better than more above
    // it.
    split_planner two(b.graph(), times, plain);
    two.measured({0, 6}, 1900ns);
    refine(two, [](std::span<const std::uint32_t> nodes) {
        const bool whole_side = (nodes.front() == 0 && nodes.back() >= 3) || (nodes.front() == 4 && nodes.back() == 5);
        return whole_side && nodes.size() != 5 ? std::optional<ns>(100ns + 300ns * nodes.size()) : std::nullopt;
    });
    CHECK(ends_of(two.plan()) == order{4, 6});
    CHECK(two.plan().pieces[0].over);
    CHECK_FALSE(two.plan().pieces[1].over);
    // Nothing at all runs: as few pieces as can be, and no end of the world.
    split_planner none(b.graph(), times, plain);
    refine(none, [](auto) { return std::optional<ns>{}; });
    CHECK(none.settled());
    CHECK(ends_of(none.plan()) == order{6});
}

TEST_CASE("no more is measured than the options allow, and no more than is worth it", "[graph]") {
    const auto t = support::transformer(6);
    for (const std::uint32_t most : {0U, 1U, 5U, 1000U}) {
        split_planner planner(t.graph, t.times, {.limit = 2ms, .measurements = most});
        refine(planner, [&](auto nodes) { return fused_length(t.graph, t.times, nodes, 20us); });
        CHECK(planner.measurements() <= most);
        CHECK(planner.settled());
        check(planner.plan(), t.graph);
    }
    const auto measurements = [&](ns worth) {
        std::uint32_t all = 0;
        for (std::uint64_t n = 0; n < 200; ++n) {
            support::random any(support::seed(n));
            const auto g = support::random_graph(any, 16);
            const auto times = support::random_times(any, g.nodes.size(), 800);
            split_options o = plain;
            o.measurements = 1000;
            o.worth = worth;
            split_planner planner(g, times, o);
            refine(planner, [&](auto nodes) { return fused_length(g, times, nodes, plain.per_piece); });
            all += planner.measurements();
        }
        return all;
    };
    CHECK(measurements(1s) < measurements(0ns));
}

TEST_CASE("a plan of what is no problem is refused", "[graph]") {
    auto t = support::transformer(1);
    const auto code = [&](const model_graph& g, std::span<const ns> times, const split_options& o,
                          std::span<const bytes> sizes = {}) {
        return support::code_of([&] { split_planner(g, times, o, sizes); });
    };
    using gpushare::errc;
    const std::span<const ns> times(t.times);
    CHECK(code(t.graph, times, {}) == errc::none);
    CHECK(code(t.graph, times.first(3), {}) == errc::invalid_specification);
    CHECK(code(t.graph, times, {.limit = 0ns}) == errc::invalid_specification);
    CHECK(code(t.graph, times, {.bandwidth = 0_B}) == errc::invalid_specification);
    CHECK(code(t.graph, times, {}, std::vector<bytes>(1)) == errc::invalid_specification);
    CHECK(code(t.graph, times, {}, std::vector<bytes>(t.graph.values.size(), bytes::max())) == errc::none);
    CHECK(code(t.graph, std::vector<ns>(times.size(), ns::max()), {.per_piece = ns::max()}) == errc::none);
    split_planner planner(t.graph, times);
    CHECK(support::code_of([&] { planner.measured({3, 3}, 1ns); }) == errc::invalid_specification);
    CHECK(support::code_of([&] { planner.measured({0, 1000}, 1ns); }) == errc::invalid_specification);
    auto broken = t.graph;
    std::swap(broken.nodes[0], broken.nodes[1]);
    CHECK(code(broken, times, {}) == errc::invalid_specification);
    CHECK(support::code_of([&] { (void)reordered(t.graph, order{1, 0}); }) == errc::invalid_specification);
    CHECK(split_planner(model_graph{}, {}).plan().pieces.empty());
    CHECK(split_planner(model_graph{}, {}).settled());
}

TEST_CASE("sizes that the caller knows decide where cuts go", "[graph]") {
    support::graph_builder b;
    auto x = b.input(10);
    for (int i = 0; i < 3; ++i) x = b.node("Pool", {x}, 10);
    b.output(x);
    for (auto& v : b.graph().values) v.shape = {{.extent = -1, .symbol = "n"}};
    const std::vector<ns> times(3, 400ns);
    const auto ends = [&](std::vector<bytes> sizes) {
        return ends_of(split_planner(b.graph(), times, plain, sizes).plan());
    };
    CHECK(ends({1_B, 5_B, 9_B, 1_B}) == order{1, 3});
    CHECK(ends({1_B, 9_B, 5_B, 1_B}) == order{2, 3});
}

// The text.

plan_error::kind kind_of(const std::string& text, const model_graph& g, std::size_t* line = nullptr) {
    try {
        (void)parse_split_plan(text, g);
    } catch (const plan_error& e) {
        if (line != nullptr) *line = e.line();
        CHECK(std::string(e.what()).starts_with("a plan of cuts: "));
        return e.why();
    }
    FAIL("the text was read");
    return {};
}

TEST_CASE("a plan's text says all of the plan", "[graph]") {
    for (std::uint64_t n = 0; n < 40; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        support::random any(seed);
        auto g = support::random_graph(any, 1 + static_cast<std::uint32_t>(any.below(40)));
        for (auto& node : g.nodes)
            if (any.one_in(3)) node.name = std::string("a b\\\n#\xc3\xa4\xff") + static_cast<char>(any.below(256));
        const split_planner planner(g, support::random_times(any, g.nodes.size(), 1'000'000),
                                    {.limit = 1ms, .per_piece = 10us});
        static const std::vector<std::string> engines{"", "onnxruntime", "b=2", "\xc3\xa4"};
        auto plan = planner.plan();
        for (auto& p : plan.pieces) p.engine = any.of(engines);
        const auto text = to_text(plan, g);
        CAPTURE(text);
        CHECK(parse_split_plan(text, g) == plan);
        CHECK(planner.priced(plan) == plan);
    }
}

struct small_plan {
    model_graph g;
    std::string text =
        "split_plan 1\n# by hand\ngraph 0123\nlimit 1us\npiece takes=500ns\nnode 0 Conv_0\n\tnode 1\r\n\npiece "
        "takes=1us\nnode 2 Relu_2 Relu\n";
    small_plan() {
        support::graph_builder b;
        auto x = b.node("Conv", {b.input(10)}, 30);
        x = b.node("Relu", {x}, 20);
        b.output(b.node("Relu", {x}, 10));
        g = b.graph();
        const auto made = to_text(split_planner(g, std::vector<ns>(3)).plan(), g);
        replace("graph 0123", made.substr(made.find("graph "), 22));
    }
    void replace(const std::string& from, const std::string& to) { text.replace(text.find(from), from.size(), to); }
    plan_error::kind with(const std::string& from, const std::string& to, std::size_t* line = nullptr) const {
        small_plan other = *this;
        other.replace(from, to);
        return kind_of(other.text, g, line);
    }
};

TEST_CASE("a plan that somebody changed counts, where the graph can run that way", "[graph]") {
    small_plan p;
    auto plan = parse_split_plan(p.text, p.g);
    CHECK(ends_of(plan) == order{2, 3});
    CHECK(plan.pieces[0].crossing == 20_B);  // found anew
    CHECK(plan.pieces[0].takes == 500ns);
    CHECK_FALSE(plan.pieces[1].over);
    CHECK(plan.pieces[0].engine.empty());
    p.replace("piece takes=500ns", "piece engine=openvino takes=500ns");
    CHECK(parse_split_plan(p.text, p.g).pieces[0].engine == "openvino");
    p.replace("engine=openvino ", "");
    p.replace("piece takes=1us\n", "");
    CHECK(ends_of(parse_split_plan(p.text, p.g)) == order{3});
    p.replace("node 0 Conv_0\n", "node 0 Conv_0\npiece takes=7us\n");
    plan = parse_split_plan(p.text, p.g);
    CHECK(ends_of(plan) == order{1, 3});
    CHECK(plan.pieces[0].crossing == 30_B);
    CHECK(plan.pieces[1].over);
    split_planner planner(p.g, std::vector<ns>{1us, 2us, 3us}, with_order(plain, split_order::given));
    const auto priced = planner.priced(plan);
    CHECK(priced.pieces[0].takes == 1100ns);
    CHECK(priced.pieces[1].takes == 5100ns);
    p.replace(p.text.substr(p.text.find("graph "), 23), "");  // on one's own risk
    CHECK(parse_split_plan(p.text, p.g) == plan);
    p.g.values[1].shape[0].extent = 31;
    CHECK(parse_split_plan(p.text, p.g).pieces[0].crossing == 31_B);
}

TEST_CASE("a plan that can't be is refused with line and reason", "[graph]") {
    using kind = plan_error::kind;
    const small_plan p;
    std::size_t line = 0;
    CHECK(kind_of("", p.g, &line) == kind::bad_version);
    CHECK(line == 0);
    CHECK(p.with("split_plan 1", "split_plan 2", &line) == kind::bad_version);
    CHECK(line == 1);
    CHECK(p.with("limit 1us\n", "", &line) == kind::bad_line);
    CHECK(line == 0);
    CHECK(p.with("limit 1us", "limit 0us", &line) == kind::bad_value);
    CHECK(line == 4);
    CHECK(p.with("limit 1us", "limit 1us\nlimit 1us", &line) == kind::bad_line);
    CHECK(line == 5);
    CHECK(p.with("1us", "1.5us") == kind::bad_value);
    CHECK(p.with("1us", "99999999999s") == kind::bad_value);
    CHECK(p.with("1us", "1us 2us") == kind::bad_line);
    CHECK(p.with("limit", "node 0\nlimit", &line) == kind::bad_line);
    CHECK(line == 4);
    CHECK(p.with("node 1", "knot 1") == kind::bad_line);
    CHECK(p.with("node 1", "node x") == kind::bad_value);
    CHECK(p.with("node 1", "node 3", &line) == kind::unknown_node);
    CHECK(line == 7);
    CHECK(p.with("node 1", "node 99999999999999999999") == kind::unknown_node);
    CHECK(p.with("Conv_0", "Conv_1", &line) == kind::other_node);
    CHECK(line == 6);
    small_plan blank = p;
    blank.replace("Conv_0", "a\\x20b");
    blank.replace(blank.text.substr(blank.text.find("graph "), 23), "");
    blank.g.nodes[0].name = "a b";
    CHECK(ends_of(parse_split_plan(blank.text, blank.g)) == order{2, 3});
    blank.g.nodes[0].name = "a\\x20b";
    CHECK(kind_of(blank.text, blank.g) == kind::other_node);
    CHECK(p.with("node 1", "node 0", &line) == kind::node_twice);
    CHECK(line == 7);
    CHECK(p.with("\tnode 1\r\n", "", &line) == kind::wrong_order);  // before what is missing: node 2 reads node 1
    CHECK(line == 9);
    CHECK(p.with("node 2 Relu_2 Relu\n", "# ", &line) == kind::empty_piece);
    CHECK(p.with("piece takes=1us\nnode 2 Relu_2 Relu\n", "", &line) == kind::node_missing);
    CHECK(line == 0);
    CHECK(p.with("piece takes=1us", "piece\npiece", &line) == kind::empty_piece);
    CHECK(line == 9);
    CHECK(p.with("piece takes=1us", "piece soon") == kind::bad_line);
    CHECK(p.with("piece takes=1us", "piece engine=", &line) == kind::bad_value);
    CHECK(line == 9);
    CHECK(p.with("piece takes=1us", "piece engine=a\\b") == kind::bad_value);
    CHECK(p.with("piece takes=1us", "piece engine=a takes=1us crosses=0B over now") == kind::bad_line);
    CHECK(p.with("piece takes=1us", "piece takes=1us takes=2us") == kind::bad_line);
    CHECK(p.with("piece takes=1us", "piece engine=a engine=b") == kind::bad_line);
    CHECK(p.with("piece takes=1us", "piece over over") == kind::bad_line);
    CHECK(p.with("piece takes=1us", "piece crosses=0B crosses=1B") == kind::bad_line);
    small_plan other = p;
    other.g.values[1].shape[0].extent = 31;
    CHECK(kind_of(other.text, other.g, &line) == kind::graph_changed);
    CHECK(line == 3);
    other = p;
    other.g.values[2].tensor = false;
    other.replace(other.text.substr(other.text.find("graph "), 23), "");
    CHECK(kind_of(other.text, other.g, &line) == kind::no_cut);
    CHECK(line == 8);
    auto plan = parse_split_plan(p.text, p.g);
    plan.pieces.pop_back();
    CHECK(support::code_of([&] { check(plan, p.g); }) == gpushare::errc::invalid_specification);
    plan.of_graph ^= 1;
    CHECK(support::code_of([&] { check(plan, p.g); }) == gpushare::errc::mismatch);
}

TEST_CASE("any text is a sound plan or a typed error", "[graph]") {
    const auto t = support::transformer(1, 8, 12);
    const auto text = to_text(split_planner(t.graph, t.times, {.limit = 500ns, .per_piece = 50ns}).plan(), t.graph);
    REQUIRE(text.find("\npiece", text.find("\npiece") + 1) != text.npos);
    std::size_t read = 0;
    for (std::uint64_t n = 0; n < 2000; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        support::random any(seed);
        std::string changed = text;
        for (std::uint64_t i = 0, count = 1 + any.below(3); i < count && !changed.empty(); ++i) {
            const auto at = any.below(changed.size());
            const auto size = std::min<std::size_t>(any.below(40), changed.size() - at);
            switch (any.below(5)) {
                case 0: changed[at] = static_cast<char>(any.below(256)); break;
                case 1: changed.erase(at, size); break;
                case 2: changed.insert(any.below(changed.size()), changed.substr(at, size)); break;
                case 3: changed.resize(at); break;
                default:  // a whole line somewhere else
                    const auto begin = changed.find('\n', at) + 1, end = changed.find('\n', begin) + 1;
                    if (begin == 0 || end == 0) break;
                    const auto line = changed.substr(begin, end - begin);
                    changed.erase(begin, end - begin);
                    const auto to = changed.find('\n', any.below(changed.size() + 1));
                    changed.insert(to == changed.npos ? changed.size() : to + 1, line);
            }
        }
        try {
            const auto p = parse_split_plan(changed, t.graph);
            check(p, t.graph);
            CHECK(parse_split_plan(to_text(p, t.graph), t.graph) == p);
            ++read;
        } catch (const plan_error& e) {
            CHECK(e.line() <= static_cast<std::size_t>(std::ranges::count(changed, '\n')) + 1);
        }
    }
    CHECK(read > 20);
    CHECK(read < 1500);
}

}  // namespace split_plan_test
