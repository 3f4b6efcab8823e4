// SPDX-License-Identifier: Apache-2.0
// Two levels on devices, on the host backend: nodes that are threads, each with devices or with
// ranks that share one. They are compared with the bits of two levels of threads, with the bytes
// copied and sent, and with the rank that faults name.
#include <gpushare/gradient/two_level.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <memory_resource>
#include <new>
#include <span>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/device_buckets.hpp>
#include <gpushare/gradient/transport.hpp>

#include "support/catch.hpp"
#include "support/eager_transport.hpp"
#include "support/few_blocks.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace two_level_devices_test {

using namespace std::chrono_literals;
namespace gs = gpushare;
using gs::errc;

namespace {

using levels_type = gs::two_level_devices<std::remove_cvref_t<decltype(std::declval<gs::host::node&>().gangs())>,
                                          gs::host::stream, gs::thread_transport, std::pmr::memory_resource>;

/// A node: its devices, and its end of the transport between nodes.
struct machine {
    machine(std::uint32_t ranks, bool together, const gs::member& outside)
        : node({.devices = together ? 1 : ranks, .sms = 8}), group(ranks, {.blocks = 2}), outer(outside) {
        for (std::uint32_t r = 0; r < ranks; ++r) {
            members.push_back(group.rank(r));
            if (together && r != 0) continue;
            devices.push_back({r});
            streams.push_back(node.make_stream(devices[r]));
        }
    }
    /// Collective.
    void split(gs::two_level_options options, const gs::launch_options& launches = {}) {
        levels = std::make_unique<levels_type>(node.gangs(), devices, std::span(streams), members, outer,
                                               *std::pmr::new_delete_resource(), options, launches);
    }
    template <class T, class Op>
    gs::collective_fault all_reduce(std::vector<std::vector<T>>& in, std::vector<std::vector<T>>& out, std::size_t n,
                                    const Op& op, gs::instant deadline = gs::never) {
        std::vector<const T*> ins;
        std::vector<T*> outs;
        for (auto& x : in) ins.push_back(x.data());
        for (auto& x : out) outs.push_back(x.data());
        return levels->all_reduce<T>(ins, outs, n, op, deadline);
    }
    void wait() {
        for (auto& s : streams) s.record().wait(gs::never);
    }

    gs::host::node node;
    gs::communicator group;
    gs::thread_transport outer;
    std::vector<gs::device_id> devices;
    std::vector<gs::host::stream> streams;
    std::vector<gs::member> members;
    std::unique_ptr<levels_type> levels;
};

/// Nodes of as many ranks, joined by threads.
struct cluster {
    explicit cluster(const std::vector<std::uint32_t>& inside, gs::two_level_options options = {},
                     std::uint64_t together = 0, const gs::launch_options& launches = {})
        : between(static_cast<std::uint32_t>(inside.size())) {
        for (std::uint32_t p = 0; p < inside.size(); ++p)
            nodes.push_back(std::make_unique<machine>(inside[p], (together >> p & 1U) != 0, between.rank(p)));
        each([&](unsigned p) { nodes[p]->split(options, launches); });
    }
    void each(const std::function<void(unsigned)>& f) const {
        support::together(static_cast<unsigned>(nodes.size()), f);
    }
    gs::communicator between;
    std::vector<std::unique_ptr<machine>> nodes;
};

template <class T>
using arrays = std::vector<std::vector<std::vector<T>>>;  // of nodes, of their ranks

template <class T>
arrays<T> filled(const std::vector<std::uint32_t>& inside, std::size_t n, support::random& any) {
    arrays<T> all;
    for (const std::uint32_t ranks : inside) {
        auto& node = all.emplace_back(ranks, std::vector<T>(n + 1));
        for (auto& x : node)
            for (T& one : x) one = static_cast<T>(static_cast<float>(any.below(200'001)) / 997 - 100);
    }
    return all;
}
/// The same by threads of two levels.
template <class T, class Op>
arrays<T> by_threads(const arrays<T>& in, std::size_t n, const Op& op) {
    const auto nodes = static_cast<std::uint32_t>(in.size());
    const gs::communicator between(nodes);
    auto out = in;
    support::together(nodes, [&](unsigned p) {
        gs::thread_transport outer(between.rank(p));
        const auto ranks = static_cast<unsigned>(in[p].size());
        gs::communicator inner(ranks);
        const auto group = gs::split(inner, outer);
        support::together(ranks, [&](unsigned r) {
            auto me = group.rank(r);
            (void)me.all_reduce(std::span<const T>(in[p][r]).first(n), std::span(out[p][r]).first(n), op, gs::never);
        });
    });
    return out;
}

template <class T, class Op>
void check_bits(std::uint64_t seed, const Op& op) {
    support::random any(seed);
    std::vector<std::uint32_t> inside(1 + any.below(3));
    for (auto& ranks : inside) ranks = static_cast<std::uint32_t>(1 + any.below(4));
    const std::uint64_t together = any.below(8);
    const gs::two_level_options options{.chunk = gs::bytes{1 + any.below(8000)},
                                        .depth = static_cast<std::uint32_t>(1 + any.below(5))};
    const cluster all(inside, options, together);
    CAPTURE(seed, inside, together, options.chunk.count(), options.depth);
    for (int call = 0; call < 3; ++call) {
        const std::size_t n = any.one_in(6) ? 0 : any.below(any.one_in(3) ? 9000 : 600);
        auto in = filled<T>(inside, n, any), out = in;
        const bool in_place = any.one_in(2);
        const auto expected = by_threads(in, n, op);
        std::vector<gs::collective_fault> faults(inside.size());
        all.each([&](unsigned p) {
            faults[p] = all.nodes[p]->all_reduce(in_place ? out[p] : in[p], out[p], n, op);
            all.nodes[p]->wait();
        });
        CAPTURE(call, n, in_place);
        for (const auto& f : faults) CHECK_FALSE(f);
        CHECK(out == expected);
    }
}

}  // namespace

TEST_CASE("two levels on devices give the bits of two levels of threads", "[gradient]") {
    for (std::uint64_t n = 0; n < 12; ++n) {
        check_bits<float>(support::seed(n), gs::average{});
        check_bits<float>(support::seed(100 + n), gs::sum{});
        check_bits<gs::bfloat16>(support::seed(200 + n), gs::average{});
        check_bits<double>(support::seed(300 + n), gs::average{});
        check_bits<std::int32_t>(support::seed(400 + n), gs::maximum{});
    }
}

TEST_CASE("each element of a node goes to the host once and back once, and between nodes once", "[gradient]") {
    const std::vector<std::uint32_t> inside{3, 2};
    const cluster all(inside, {.chunk = gs::bytes{4096}});
    support::random any(1);
    constexpr std::size_t n = 5003;
    auto x = filled<float>(inside, n, any);
    std::vector<std::uint64_t> before(2), sent(2);
    all.each([&](unsigned p) {
        machine& m = *all.nodes[p];
        before[p] = m.outer.carried().count();
        (void)m.all_reduce(x[p], x[p], n, gs::sum{});
        m.wait();
        sent[p] = m.outer.carried().count() - before[p];
    });
    for (std::uint32_t p = 0; p < 2; ++p) {
        CHECK(all.nodes[p]->levels->copied() == gs::bytes{2 * n * sizeof(float)});
        CHECK(sent[p] == n * sizeof(float) + sizeof(std::uint64_t));
    }
    CHECK(all.nodes[1]->levels->size() == 5);
    CHECK(all.nodes[1]->levels->first() == 3);
}

TEST_CASE("two levels are an engine of buckets on devices", "[gradient]") {
    const std::vector<std::uint32_t> inside{2, 2};
    const cluster all(inside, {.chunk = gs::bytes{2048}}, 2);
    constexpr std::size_t sizes[] = {700, 31, 1200};
    support::random any(2);
    arrays<float> g[3];
    for (std::size_t k = 0; k < 3; ++k) g[k] = filled<float>(inside, sizes[k], any);
    arrays<float> expected[3];
    for (std::size_t k = 0; k < 3; ++k) expected[k] = by_threads(g[k], sizes[k], gs::average{});
    std::vector<errc> codes(2, errc::stuck);
    all.each([&](unsigned p) {
        machine& m = *all.nodes[p];
        gs::device_buckets<float> buckets(2, gs::bytes{4000});
        for (std::size_t k = 0; k < 3; ++k)
            buckets.add("g", std::vector{g[k][p][0].data(), g[k][p][1].data()}, sizes[k]);
        std::vector<std::vector<float>> staging(2, std::vector<float>(buckets.staging_bytes().count() / sizeof(float)));
        const std::vector<float*> to{staging[0].data(), staging[1].data()};
        for (std::uint32_t r = 0; r < 2; ++r)
            for (std::uint32_t k = 0; k < 3; ++k) (void)buckets.ready(r, k);
        codes[p] = buckets.advance(std::span(m.streams), to, m.levels->engine());
        m.wait();
    });
    CHECK(codes == std::vector<errc>(2, errc::none));
    for (std::size_t k = 0; k < 3; ++k) CHECK(g[k] == expected[k]);
}

namespace {

/// What each of three nodes, of two, one and two ranks, gets when it calls f(node, its array), and
/// once more.
struct outcome {
    std::vector<gs::collective_fault> first{3}, again{3};
};
template <class F>
outcome faults_of(const gs::two_level_options& options, const gs::launch_options& launches, const F& f) {
    const std::vector<std::uint32_t> inside{2, 1, 2};
    const cluster all(inside, options, 1, launches);
    support::random any(3);
    auto x = filled<float>(inside, 600, any);
    outcome seen;
    all.each([&](unsigned p) {
        seen.first[p] = f(p, *all.nodes[p], x[p]);
        seen.again[p] = all.nodes[p]->all_reduce(x[p], x[p], 500, gs::sum{});
        all.nodes[p]->wait();  // after a fault, too, what is enqueued uses the arrays
    });
    return seen;
}
void check_faults(const outcome& seen, errc code, std::uint32_t rank) {
    for (std::uint32_t p = 0; p < 3; ++p) {
        CAPTURE(p);
        CHECK(seen.first[p].code == code);
        CHECK(seen.first[p].rank == rank);
        CHECK(seen.again[p].code == code);
        CHECK(seen.again[p].rank == rank);
    }
}

}  // namespace

TEST_CASE("a node that calls something else is named by its first rank", "[gradient]") {
    check_faults(
        faults_of({}, {},
                  [](unsigned p, machine& m, auto& x) { return m.all_reduce(x, x, p == 2 ? 501 : 500, gs::sum{}); }),
        errc::mismatch, 3);
    check_faults(faults_of({}, {},
                           [](unsigned p, machine& m, auto& x) {
                               return p == 1 ? m.all_reduce(x, x, 500, gs::maximum{})
                                             : m.all_reduce(x, x, 500, gs::sum{});
                           }),
                 errc::mismatch, 2);
}

TEST_CASE("a device that gives up is named on every node", "[gradient]") {
    check_faults(faults_of({}, {},
                           [](unsigned p, machine& m, auto& x) {
                               if (p == 2) m.members[1].close({errc::aborted, gs::collective_kind::all_reduce, 1, 0});
                               return m.all_reduce(x, x, 500, gs::sum{});
                           }),
                 errc::aborted, 4);
}

TEST_CASE("a node that never comes is named by its first rank", "[gradient]") {
    const std::vector<std::uint32_t> inside{2, 1, 2};
    const cluster all(inside);
    support::random any(4);
    auto x = filled<float>(inside, 600, any);
    std::vector<gs::collective_fault> faults(3);
    all.each([&](unsigned p) {
        const gs::ns patience = p == 0 ? gs::ns(500ms) : gs::ns(5min);  // node 2 may be late
        if (p != 1)
            faults[p] =
                all.nodes[p]->all_reduce(x[p], x[p], 500, gs::sum{}, std::chrono::steady_clock::now() + patience);
        all.nodes[p]->wait();
    });
    for (const unsigned p : {0U, 2U}) {
        CHECK(faults[p].code == errc::deadline_exceeded);
        CHECK(faults[p].rank == 2);
    }
}

TEST_CASE("an abort ends two levels on all nodes, and names whom it was told", "[gradient]") {
    const auto told = static_cast<std::uint32_t>(GENERATE(0, 2, 4));
    check_faults(faults_of({}, {},
                           [&](unsigned p, machine& m, auto& x) {
                               if (p == 0) m.levels->abort(told, errc::stopped);
                               return m.all_reduce(x, x, 500, gs::sum{});
                           }),
                 errc::stopped, told);
}

TEST_CASE("a fault of another node ends what waits for a device", "[gradient]") {
    const gs::communicator between(2);
    std::atomic<bool> gone{false};
    std::atomic<int> advanced[2]{};
    std::vector<gs::collective_fault> faults(2);
    support::together(2, [&](unsigned p) {
        machine m(1, false, between.rank(p));
        support::eager_transport outer(between.rank(p), advanced[p]);
        gs::two_level_devices levels(m.node.gangs(), m.devices, std::span(m.streams), m.members, outer,
                                     *std::pmr::new_delete_resource());
        std::vector<float> x(500, 1);
        if (p == 1) m.streams[0].launch({.blocks = 1, .threads = 1, .hold = {}}, support::until{&gone});
        const std::jthread aborting([&] {
            const auto late = std::chrono::steady_clock::now() + 60s;
            while (p == 0 && advanced[1] == 0 && std::chrono::steady_clock::now() < late) std::this_thread::yield();
            if (p == 0) levels.abort(0, errc::stopped);  // node 1 waits for its device
        });
        const float* const in = x.data();
        float* const out = x.data();
        faults[p] = levels.all_reduce<float>(std::span(&in, 1), std::span(&out, 1), 500, gs::sum{},
                                             std::chrono::steady_clock::now() + 5min);
        if (p == 1) gone.store(true, std::memory_order_release);
        m.wait();
    });
    for (const auto& f : faults) {
        CHECK(f.code == errc::stopped);
        CHECK(f.rank == 0);
    }
}

TEST_CASE("a combiner that ends has the fault that it tells, and the first one stays", "[gradient]") {
    const auto faults = faults_of({}, {}, [](unsigned p, machine& m, auto& x) {
        if (p != 2) return m.all_reduce(x, x, 500, gs::sum{});
        const auto combiner = m.levels->combiner();
        combiner.end(errc::deadline_exceeded, 1);
        const auto first = combiner.fault();
        combiner.end(errc::in_flight, 0);
        return first == combiner.fault() ? first : gs::collective_fault{};
    });
    check_faults(faults, errc::deadline_exceeded, 4);
}

TEST_CASE("two levels of arrays and streams that don't fit are refused", "[gradient]") {
    const gs::communicator between(1);
    machine m(3, false, between.rank(0));
    const auto split = [&](std::size_t devices) {
        const levels_type levels(m.node.gangs(), std::span(m.devices).first(devices),
                                 std::span(m.streams).first(devices), m.members, m.outer,
                                 *std::pmr::new_delete_resource());
    };
    CHECK_THROWS_AS(split(2), gs::operation_error);
    m.split({});
    std::vector<std::vector<float>> x(2, std::vector<float>(4));
    CHECK(m.all_reduce(x, x, 4, gs::sum{}).code == errc::invalid_specification);
    x.resize(3, x[0]);
    CHECK_FALSE(m.all_reduce(x, x, 4, gs::sum{}));
    m.wait();
}

TEST_CASE("a node whose streams don't fit is named to all, and no node has two levels", "[gradient]") {
    const gs::communicator between(3);
    std::vector<errc> codes(3);
    std::vector<std::uint64_t> named(3, 99);
    support::together(3, [&](unsigned p) {
        machine m(3, false, between.rank(p));
        const std::size_t devices = p == 1 ? 2 : 3;
        try {
            const levels_type levels(m.node.gangs(), std::span(m.devices).first(devices),
                                     std::span(m.streams).first(devices), m.members, m.outer,
                                     *std::pmr::new_delete_resource(), {}, {}, std::chrono::steady_clock::now() + 5min);
        } catch (const gs::operation_error& e) {
            codes[p] = e.code();
            named[p] = e.figures().left;
        }
    });
    CHECK(codes == std::vector(3, errc::invalid_specification));
    CHECK(named[0] == 1);
    CHECK(named[2] == 1);
}

TEST_CASE("two levels that get only some of their chunks give them back", "[gradient]") {
    const gs::communicator between(1);
    machine m(1, false, between.rank(0));
    support::few_blocks pinned(1);
    const auto split = [&] {
        const gs::two_level_devices levels(m.node.gangs(), m.devices, std::span(m.streams), m.members, m.outer, pinned);
    };
    CHECK_THROWS_AS(split(), std::bad_alloc);
    CHECK(pinned.out() == 0);
}

TEST_CASE("a node without memory for its chunks is named to all, and no node has two levels", "[gradient]") {
    const gs::communicator between(3);
    std::vector<errc> codes(3);
    std::vector<std::uint64_t> named(3);
    std::vector<int> out(3, -1);
    support::together(3, [&](unsigned p) {
        machine m(1, false, between.rank(p));
        support::few_blocks pinned(p == 1 ? 1 : 100);
        try {
            const gs::two_level_devices levels(m.node.gangs(), m.devices, std::span(m.streams), m.members, m.outer,
                                               pinned);
        } catch (const gs::operation_error& e) {
            codes[p] = e.code();
            named[p] = e.figures().left;
        } catch (const std::bad_alloc&) {
            named[p] = 1;
        }
        out[p] = pinned.out();
        m.split({});  // with memory enough: nobody has given up
    });
    CHECK(codes == std::vector{errc::out_of_memory, errc::none, errc::out_of_memory});
    CHECK(named == std::vector<std::uint64_t>(3, 1));
    CHECK(out == std::vector<int>(3));
}

}  // namespace two_level_devices_test
