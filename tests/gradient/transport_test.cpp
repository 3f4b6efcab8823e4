// SPDX-License-Identifier: Apache-2.0
// Tags: lock-free
// Transports: each rank's end keeps the contract of a transport, also with two levels; an aborted
// rank is named on every rank. Also the collectives of lists below them.
#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/detail/atomic_ref.hpp>
#include <gpushare/gradient/buckets.hpp>
#include <gpushare/gradient/detail/mpi_pace.hpp>
#include <gpushare/gradient/detail/mpi_suspects.hpp>
#include <gpushare/gradient/negotiation.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/two_level.hpp>
#include <gpushare/gradient/wire.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "conformance/mismatch_suite.hpp"
#include "conformance/shard_suite.hpp"
#include "conformance/transport_suite.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/leaks.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace transport_test {

namespace gs = gpushare;
using namespace std::chrono_literals;

/// As one over NCCL is: it has all members, but its memory is a device's.
struct device_transport : gs::thread_transport {
    static constexpr bool in_host_memory = false;
};
template <class Net>
concept looked_into = requires(Net& net, gs::top_k_feedback& owed, std::span<float> x, gs::gradient_buckets<>& buckets,
                               gs::ready_bits& bits, std::vector<std::uint32_t>& next, std::optional<gs::stall>& why,
                               gs::communicator& inner) {
    gs::all_reduce_top_k(net, owed, x);
    buckets.reduce(net);
    gs::negotiate(net, bits, next, why);
    gs::split(inner, net);
};
template <class Net>
concept looked_into_somewhere = requires(Net& net, gs::top_k_feedback& owed, std::span<float> x) {
    gs::all_reduce_top_k(net, owed, x);
}
|| requires(Net& net, gs::gradient_buckets<>& buckets) { buckets.reduce(net); }
|| requires(Net& net, gs::ready_bits& bits, std::vector<std::uint32_t>& next, std::optional<gs::stall>& why) {
    gs::negotiate(net, bits, next, why);
}
|| requires(Net& net, gs::communicator& inner) { gs::split(inner, net); };
static_assert(gs::host_transport<gs::thread_transport> && looked_into<gs::thread_transport>);
static_assert(gs::transport<device_transport> && !gs::host_transport<device_transport>);
static_assert(!looked_into_somewhere<device_transport>);

gs::instant soon() { return std::chrono::steady_clock::now() + 400ms; }
/// A deadline that no test reaches.
gs::instant much_later() { return std::chrono::steady_clock::now() + 5min; }

/// Waits until that many ranks of the group are inside a collective.
void wait_for_ranks(const gs::communicator& group, std::ptrdiff_t inside) {
    const auto is_inside = [](const gs::rank_progress& r) { return r.stage != gs::collective_stage::outside; };
    while (std::ranges::count_if(group.progress(), is_inside) != inside) std::this_thread::yield();
}

TEST_CASE("threads of a process are a transport", "[gradient][transport]") {
    const auto ranks = GENERATE(1U, 2U, 3U, 5U);
    const gs::communicator group(ranks);
    std::vector<std::string> wrong(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        wrong[r] = conformance::check_transport(net);
    });
    for (const auto& w : wrong) CHECK(w == "");
}

using group_sizes = std::vector<std::uint32_t>;

/// Groups of threads, joined by a transport between their first ones: processes, as far as ranks
/// can tell. `inside`: how many each has.
struct two_levels {
    explicit two_levels(group_sizes inside, gs::two_level_options options = {})
        : between(static_cast<std::uint32_t>(inside.size())), groups(inside.size()) {
        for (std::uint32_t p = 0; p < inside.size(); ++p) {
            inner.push_back(std::make_unique<gs::communicator>(inside[p]));
            outer.push_back(std::make_unique<gs::thread_transport>(between.rank(p)));
            for (std::uint32_t r = 0; r < inside[p]; ++r) places.emplace_back(p, r);
        }
        support::together(static_cast<unsigned>(groups.size()), [&](unsigned p) {
            auto own = options;
            if (p % 2 == 1) own.chunk = own.chunk + own.chunk;  // the least of them counts
            groups[p].emplace(gs::split(*inner[p], *outer[p], own));
        });
    }
    two_levels(std::uint32_t processes, std::uint32_t inside, gs::two_level_options options = {})
        : two_levels(group_sizes(processes, inside), options) {}

    [[nodiscard]] std::uint32_t size() const { return groups.front()->size(); }
    [[nodiscard]] std::uint32_t process_of(std::uint32_t r) const { return places[r].first; }
    [[nodiscard]] auto rank(std::uint32_t r) const { return groups[places[r].first]->rank(places[r].second); }

    gs::communicator between;
    std::vector<std::unique_ptr<gs::communicator>> inner;
    std::vector<std::unique_ptr<gs::thread_transport>> outer;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> places;
    std::vector<std::optional<gs::two_level_group<gs::thread_transport>>> groups;
};

TEST_CASE("sharded gradients between threads are those of an all-reduce, to the bit", "[gradient][transport]") {
    const auto seed = support::seed(GENERATE(range(1U, 13U)));
    CAPTURE(seed);
    const auto ranks = static_cast<std::uint32_t>(1 + seed % 5);
    const gs::communicator group(ranks);
    std::vector<std::string> wrong(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        wrong[r] = conformance::check_shards(net, seed);
    });
    for (const auto& w : wrong) CHECK(w == "");
}

TEST_CASE("sharded gradients over two levels are those of an all-reduce, to the bit", "[gradient][transport]") {
    const auto seed = support::seed(GENERATE(range(1U, 7U)));
    CAPTURE(seed);
    const two_levels all = seed % 2 == 0 ? two_levels(static_cast<std::uint32_t>(1 + seed % 3), 2)
                                         : two_levels(group_sizes{1, 2 + static_cast<std::uint32_t>(seed % 2)});
    std::vector<std::string> wrong(all.size());
    support::together(all.size(), [&](unsigned r) {
        auto net = all.rank(r);
        wrong[r] = conformance::check_shards(net, seed);
    });
    for (const auto& w : wrong) CHECK(w == "");
}

TEST_CASE("groups of groups are a transport", "[gradient][transport]") {
    struct shape {
        group_sizes inside;
        std::uint64_t chunk;
    };
    const auto s = GENERATE(shape{{1}, 1 << 20}, shape{{3}, 4096}, shape{{1, 1, 1}, 4096}, shape{{2, 2}, 4096},
                            shape{{3, 3}, 1}, shape{{2, 3}, 4096}, shape{{3, 1, 2}, 1 << 20}, shape{{1, 4}, 1});
    CAPTURE(s.inside);
    const two_levels all(s.inside, {.chunk = gs::bytes{s.chunk}, .depth = 3});
    std::vector<std::string> wrong(all.size());
    support::together(all.size(), [&](unsigned r) {
        auto net = all.rank(r);
        wrong[r] = net.rank() == r ? conformance::check_transport(net) : "another rank";
    });
    for (const auto& w : wrong) CHECK(w == "");
}

TEST_CASE("a sum over two levels is that of each level, in order", "[gradient][transport]") {
    const two_levels all(2, 2);
    std::vector<float> got(4);
    support::together(4, [&](unsigned r) {
        constexpr float values[] = {1.0F, 1e8F, -1e8F, 1.0F};  // by groups: 1e8 and -1e8; one by one: 1
        auto net = all.rank(r);
        if (net.all_reduce(std::span<const float>(&values[r], 1), std::span(&got[r], 1), gs::sum{}, gs::never))
            got[r] = -1;
    });
    CHECK(got == std::vector<float>{0, 0, 0, 0});
}

/// Adds, but the first rank that adds stays inside until it may go on.
struct stuck_sum {
    std::atomic<int>* inside;
    const std::atomic<bool>* goes_on;

    template <class A>
    A operator()(const A& a, const A& b) const noexcept {
        if (inside->fetch_add(1) == 0)
            while (!goes_on->load()) std::this_thread::yield();
        return a + b;
    }
};

TEST_CASE("two levels: a rank knows that a stuck one may still read its numbers", "[gradient][transport]") {
    std::atomic<int> inside{0};
    std::vector<gs::collective_fault> faults(2);
    while (inside.load() == 0) {  // again if the machine kept one rank from the call for a second
        const two_levels all(1, 2);
        std::atomic<bool> goes_on{false};
        std::atomic<int> over{0};
        // of both ranks, since the stuck one uses the other's
        std::vector<std::vector<float>> numbers(2, std::vector<float>(100, 1.0F));
        support::together(3, [&](unsigned r) {
            if (r == 2) {  // not a rank of the call
                while (inside.load() == 0 && over.load() < 2) std::this_thread::yield();
                all.rank(0).abort(1, gs::errc::stopped);
                while (over.load() == 0) std::this_thread::yield();
                goes_on.store(true);
                return;
            }
            auto net = all.rank(r);
            auto& x = numbers[r];
            faults[r] = net.all_reduce(std::span<const float>(x), std::span(x), stuck_sum{&inside, &goes_on},
                                       std::chrono::steady_clock::now() + 1s);
            over.fetch_add(1);
        });
    }
    for (const auto& f : faults) CHECK(f);
    CHECK((faults[0].buffers_in_use || faults[1].buffers_in_use));
}

TEST_CASE("two levels with any depth take no longer than their chunks do", "[gradient][transport]") {
    const two_levels all(1, 1, {.chunk = gs::bytes{4096}, .depth = std::numeric_limits<std::uint32_t>::max()});
    auto net = all.rank(0);
    const auto begin = std::chrono::steady_clock::now();
    int calls = 0;
    for (; calls < 100 && std::chrono::steady_clock::now() - begin < 10s; ++calls) {
        std::vector<float> x(static_cast<std::size_t>(calls) * 100, 1.0F);
        REQUIRE_FALSE(net.all_reduce(std::span<const float>(x), std::span(x), gs::sum{}, gs::never));
    }
    CHECK(calls == 100);
}

TEST_CASE("two levels without a bound of chunks combine elements of one byte", "[gradient][transport]") {
    const two_levels all(2, 2, {.chunk = gs::bytes::max()});
    std::vector<std::vector<std::int8_t>> x(4, std::vector<std::int8_t>(300, 3));
    std::vector<gs::collective_fault> faults(4);
    support::together(4, [&](unsigned r) {
        auto net = all.rank(r);
        faults[r] = net.all_reduce(std::span<const std::int8_t>(x[r]), std::span(x[r]), gs::sum{}, gs::never);
    });
    CHECK(faults == std::vector<gs::collective_fault>(4));
    CHECK(x == std::vector<std::vector<std::int8_t>>(4, std::vector<std::int8_t>(300, 12)));
}

TEST_CASE("an average of halves over two levels holds what their sum can't", "[gradient][transport]") {
    const two_levels all(2, 2);
    std::vector<float> got(4);
    support::together(4, [&](unsigned r) {
        auto net = all.rank(r);
        gs::float16 x{20000.0F + 16.0F * static_cast<float>(r)};  // four are beyond 65504, two aren't
        if (net.all_reduce(std::span<const gs::float16>(&x, 1), std::span(&x, 1), gs::average{}, gs::never)) return;
        x = gs::float16{50000.0F};  // two are
        if (net.all_reduce(std::span<const gs::float16>(&x, 1), std::span(&x, 1), gs::average{}, gs::never)) return;
        got[r] = static_cast<float>(x);
    });
    CHECK(got == std::vector<float>(4, 50000.0F - 16.0F));  // a float16 has steps of 32 there
}

TEST_CASE("processes of different sizes: an average weighs each rank alike, with the same bits on all",
          "[gradient][transport]") {
    const two_levels all(group_sizes{2, 3, 1});
    std::vector<std::string> wrong(all.size());
    support::together(all.size(), [&](unsigned r) {
        auto net = all.rank(r);
        const auto check = [&]<class T>(T, const char* name, float values[], float mean) {
            std::vector<T> x(1000, static_cast<T>(values[net.rank()]));
            if (net.all_reduce(std::span<const T>(x), std::span(x), gs::average{}, gs::never) || float(x[999]) != mean)
                wrong[r] += name + std::to_string(float(x[999]));
            std::vector<T> whole(6, static_cast<T>(values[net.rank()])), part(1);
            if (net.reduce_scatter(std::span<const T>(whole), std::span(part), gs::average{}, gs::never) ||
                std::memcmp(part.data(), x.data(), sizeof(T)) != 0)
                wrong[r] += std::string(name) + "scattered " + std::to_string(float(part[0]));
        };
        float ones[] = {1, 1, 1, 1, 1, 1}, steps[] = {0, 6, 12, 18, 24, 30};
        check(0.0F, "floats ", ones, 1);
        check(0.0, "doubles ", steps, 15);
        check(gs::float16{}, "float16 ", ones, 1);
        check(gs::bfloat16{}, "bfloat16 ", ones, 1);
        check(gs::float16{}, "steps ", steps, 15);
        // What a sum of two can't hold, in the largest process and in all.
        float large[] = {60000, 60000, 60000, 60000, 60000, 60000};
        check(gs::float16{}, "large ", large, 60000);
        for (const auto root : {4U, 5U, 2U}) {
            std::uint32_t word = net.rank();
            if (net.broadcast(std::span(&word, 1), root, gs::never) || word != root) wrong[r] += "root";
        }
    });
    for (const auto& w : wrong) CHECK(w == "");
}

TEST_CASE("processes of different sizes: the average of the largest halves is finite", "[gradient][transport]") {
    const auto sizes = GENERATE(group_sizes{1, 2}, group_sizes{2, 3, 1}, group_sizes{1, 3});
    const float sign = GENERATE(1.0F, -1.0F);
    const two_levels all(sizes);
    std::vector<float> of_largest(all.size()), of_infinity(all.size());
    support::together(all.size(), [&](unsigned r) {
        auto net = all.rank(r);
        const auto mean = [&](float value) {
            gs::float16 x(sign * value);
            if (net.all_reduce(std::span<const gs::float16>(&x, 1), std::span(&x, 1), gs::average{}, gs::never))
                return 0.0F;
            return sign * static_cast<float>(x);
        };
        of_largest[r] = mean(65504.0F);
        of_infinity[r] = mean(std::numeric_limits<float>::infinity());
    });
    for (const float x : of_largest) CHECK((x == 65504.0F || x == 65472.0F));  // or the number before it
    CHECK(of_infinity == std::vector<float>(all.size(), std::numeric_limits<float>::infinity()));
}

TEST_CASE("code over transports runs over processes of different sizes: top-k, ready bits, buckets in 16 bits",
          "[gradient][transport]") {
    const two_levels all(group_sizes{1, 3});
    std::vector<std::string> wrong(all.size());
    support::together(all.size(), [&](unsigned r) {
        auto net = all.rank(r);
        // Each has one large element of its own, and a small one that all have.
        std::vector<float> sparse(20);
        sparse[net.rank()] = 8.0F;
        sparse[10] = 0.5F;
        gs::top_k_feedback owed(20, 2);
        if (gs::all_reduce_top_k(net, owed, sparse)) wrong[r] += "top-k: a fault";
        for (std::uint32_t q = 0; q < 4; ++q)
            if (sparse[q] != 2.0F) wrong[r] += "top-k: " + std::to_string(sparse[q]);
        if (sparse[10] != 0.5F) wrong[r] += "top-k: what all have: " + std::to_string(sparse[10]);
        gs::ready_bits bits(70);
        std::vector<std::uint32_t> next;
        std::optional<gs::stall> why;
        for (std::uint32_t g = 0; g < 70; ++g)
            if (g != 33 || r != 2) (void)bits.mark(g);
        if (gs::negotiate(net, bits, next, why, gs::never) || next.size() != 69) wrong[r] += "ready bits";
        (void)bits.mark(33);
        if (r == 0) bits.raise_alarm();
        if (gs::negotiate(net, bits, next, why, gs::never) || next.size() != 70 || next.back() != 33)
            wrong[r] += "ready bits: the last";
        std::vector<float> a(5000, static_cast<float>(net.rank())), b(3, 1.0F);
        gs::gradient_buckets<> buckets;
        buckets.add("a", a, {.wire = gs::wire_format::fp16});
        buckets.add("b", b);
        (void)buckets.ready(0);
        (void)buckets.ready(1);
        if (buckets.reduce(net, gs::average{}, gs::ns(60s))) wrong[r] += "buckets: a fault";
        if (a[4999] != 1.5F || b[2] != 1.0F) wrong[r] += "buckets: a wrong average";
    });
    for (const auto& w : wrong) CHECK(w == "");
}

/// Runs the list of mismatches over groups that `make` makes, whose ranks are threads here.
template <class Net, class Make>
void check_mismatches(std::uint32_t ranks, const Make& make) {
    for (std::size_t k = 0; k < conformance::mismatches<Net>().size(); ++k)
        for (const std::uint32_t odd : {ranks - 1, 0U}) {
            conformance::mismatch_buffers memory[8];
            const auto group = make();
            std::vector<gs::collective_fault> faults(ranks), later(ranks);
            support::together(ranks, [&](unsigned r) {
                Net net = group->rank(r);
                const auto until = std::chrono::steady_clock::now() + 60s;
                faults[r] = conformance::mismatches<Net>()[k].call(net, r == odd, memory[r], until);
                later[r] = net.barrier(until);
            });
            CHECK(conformance::wrong_mismatch<Net>(k, faults, later) == "");
        }
}
struct threads {
    gs::communicator group;
    [[nodiscard]] gs::thread_transport rank(std::uint32_t r) const { return gs::thread_transport(group.rank(r)); }
};

TEST_CASE("threads that call different collectives all learn of the mismatch", "[gradient][transport]") {
    const auto ranks = GENERATE(2U, 3U);
    check_mismatches<gs::thread_transport>(ranks, [&] { return std::make_unique<threads>(gs::communicator(ranks)); });
}

TEST_CASE("ranks of two levels that call different things all learn it, whichever level they differ on",
          "[gradient][transport]") {
    const auto inside = GENERATE(group_sizes{1, 1}, group_sizes{2, 1}, group_sizes{2, 2});
    CAPTURE(inside);
    std::uint32_t ranks = 0;
    for (const std::uint32_t n : inside) ranks += n;
    check_mismatches<gs::two_level_group<gs::thread_transport>::rank_type>(
        ranks, [&] { return std::make_unique<two_levels>(inside); });
}

TEST_CASE("a process that calls something else is named by its first rank", "[gradient][transport]") {
    const auto odd = GENERATE(0U, 1U, 2U);
    const two_levels all(group_sizes{2, 1, 2});
    std::vector<gs::collective_fault> faults(5);
    support::together(5, [&](unsigned r) {
        auto net = all.rank(r);
        std::vector<float> x(100, 1.0F);
        // Roots that are one and the same process to those in between.
        faults[r] = net.broadcast(std::span(x), all.process_of(r) == odd ? 4 : 3, gs::never);
    });
    for (const auto& f : faults) {
        CHECK(f.code == gs::errc::mismatch);
        CHECK(f.rank == (odd == 0 ? 0U : odd == 1 ? 2U : 3U));
    }
}

TEST_CASE("a rank that never comes is named on every rank, in its own process and in others", "[gradient][transport]") {
    const two_levels all(group_sizes{2, 3}, {.grace = 20s});
    const auto absent = GENERATE(0U, 1U, 2U, 3U, 4U);
    const auto what = GENERATE(0, 1, 2);
    std::vector<gs::collective_fault> faults(5);
    support::together(5, [&](unsigned r) {
        if (r == absent) return;
        auto net = all.rank(r);
        std::vector<float> x(5, 1.0F), one(1);
        // One rank gives up, once the others of its process are there. So no late rank is named.
        const auto process = all.process_of(absent);
        const bool is_last = absent + 1 == all.size() || all.process_of(absent + 1) != process;
        const auto gives_up = is_last ? absent - 1 : absent + 1;
        if (r == gives_up) wait_for_ranks(*all.inner[process], all.inner[process]->size() - 2);
        const auto until = r == gives_up ? soon() : much_later();
        faults[r] = what == 0   ? net.all_reduce(std::span<const float>(x), std::span(x), gs::sum{}, until)
                    : what == 1 ? net.reduce_scatter(std::span<const float>(x), std::span(one), gs::sum{}, until)
                                : net.broadcast(std::span(x), 3, until);
        if (faults[r]) faults[r] = net.barrier(gs::never);  // still the same, at once
    });
    for (unsigned r = 0; r < 5; ++r) {
        if (r == absent) continue;
        CAPTURE(r, absent, what, gs::describe(faults[r]).c_str());
        CHECK(faults[r].code == gs::errc::deadline_exceeded);
        CHECK(faults[r].rank == absent);
    }
}

TEST_CASE("a process that never comes is named by its first rank", "[gradient][transport]") {
    const two_levels all(group_sizes{2, 3, 1}, {.grace = 4s});  // a machine may stall for half of it
    std::vector<gs::collective_fault> faults(6);
    support::together(6, [&](unsigned r) {
        if (all.process_of(r) == 1) return;
        auto net = all.rank(r);
        if (r == 0) wait_for_ranks(*all.inner[0], 1);  // a late rank 1 would be named
        faults[r] = net.barrier(r == 0 ? soon() : much_later());
    });
    for (unsigned r = 0; r < 6; ++r)
        if (all.process_of(r) != 1) CHECK(faults[r].rank == 2);
}

TEST_CASE("a rank that aborts is named by its own number in all processes", "[gradient][transport]") {
    const two_levels all(group_sizes{2, 3});
    std::vector<gs::collective_fault> faults(5);
    support::together(5, [&](unsigned r) {
        auto net = all.rank(r);
        if (r == 3) return net.abort(3, gs::errc::stopped);
        faults[r] = net.barrier(gs::never);
    });
    for (const unsigned r : {0U, 1U, 2U, 4U}) {
        CHECK(faults[r].code == gs::errc::stopped);
        CHECK(faults[r].rank == 3);
    }
}

TEST_CASE("groups of groups of groups: three levels, each of another size", "[gradient][transport]") {
    // Two of the middle groups' ranks are processes of the outermost one; all of them are threads.
    const two_levels middle(group_sizes{1, 1, 1});
    std::vector<std::unique_ptr<gs::communicator>> inner;
    for (const std::uint32_t n : {2U, 1U, 2U}) inner.push_back(std::make_unique<gs::communicator>(n));
    std::vector<gs::two_level_group<gs::thread_transport>::rank_type> outer;
    for (std::uint32_t p = 0; p < 3; ++p) outer.push_back(middle.rank(p));
    using group = decltype(gs::split(*inner[0], outer[0]));
    std::vector<std::optional<group>> groups(3);
    support::together(3, [&](unsigned p) { groups[p].emplace(gs::split(*inner[p], outer[p], {.grace = 20s})); });
    const std::pair<unsigned, unsigned> places[] = {{0, 0}, {0, 1}, {1, 0}, {2, 0}, {2, 1}};
    std::vector<std::string> wrong(5);
    std::vector<gs::collective_fault> faults(5);
    support::together(5, [&](unsigned r) {
        auto net = groups[places[r].first]->rank(places[r].second);
        wrong[r] = net.rank() == r ? conformance::check_transport(net) : "another rank";
        if (r != 4) faults[r] = net.barrier(r == 3 ? soon() : much_later());  // in 4's group
    });
    for (const auto& w : wrong) CHECK(w == "");
    for (unsigned r = 0; r < 4; ++r) CHECK(faults[r].rank == 4);
}

TEST_CASE("a stop request ends the collectives of all ranks, and names who was stopped", "[gradient][transport]") {
    const two_levels all(group_sizes{1, 2});
    std::vector<gs::collective_fault> faults(3);
    std::stop_source source;
    support::together(3, [&](unsigned r) {
        auto net = all.rank(r);
        if (r == 1) {
            const gs::abort_on_stop guard{net, source.get_token()};
            faults[r] = net.barrier(gs::never);
            (void)source.request_stop();
        } else {
            faults[r] = net.barrier(gs::never);
        }
        if (!faults[r]) faults[r] = r == 1 ? gs::collective_fault{} : net.barrier(gs::never);
    });
    CHECK(faults[0].code == gs::errc::stopped);
    CHECK(faults[0].rank == 1);
    CHECK(faults[2].code == gs::errc::stopped);
    CHECK(faults[2].rank == 1);

    // A member, and a stop that came before.
    const gs::communicator group(2);
    gs::member me = group.rank(0);
    const gs::abort_on_stop guard{me, source.get_token()};
    const auto f = gs::try_barrier(me);
    CHECK(f.code == gs::errc::stopped);
    CHECK(f.rank == 0);
}

TEST_CASE("splitting waits for other processes until its deadline", "[gradient][transport]") {
    const gs::communicator between(2);
    gs::communicator inner(1);
    gs::thread_transport outer(between.rank(0));
    try {
        (void)gs::split(inner, outer, {}, soon());
        FAIL("a group without the others");
    } catch (const gs::operation_error& e) {
        CHECK(e.code() == gs::errc::deadline_exceeded);
    }
}

TEST_CASE("an abort ends the calls of all ranks and names the given rank", "[gradient][transport]") {
    const gs::communicator group(3);
    std::vector<gs::collective_fault> faults(3);
    support::together(3, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        if (r == 2) return net.abort(1, gs::errc::stopped);
        faults[r] = net.barrier(gs::never);
    });
    for (unsigned r = 0; r < 2; ++r) {
        CHECK(faults[r].code == gs::errc::stopped);
        CHECK(faults[r].rank == 1);
    }
}

TEST_CASE("a rank that leaves in order ends what comes behind its last call, and nothing else",
          "[gradient][transport]") {
    for (std::uint32_t n = 0; n < 50; ++n) {
        const gs::communicator group(3);
        std::vector<gs::collective_fault> last(3), behind(3);
        std::vector<int> wrong(3);
        support::together(3, [&](unsigned r) {
            gs::thread_transport net(group.rank(r));
            std::vector<float> x(20'000, static_cast<float>(r));
            last[r] = net.all_reduce(std::span<const float>(x), std::span(x), gs::sum{}, gs::never);
            if (r == n % 3) net.leave(7, gs::errc::stopped);
            behind[r] = net.barrier(gs::never);
            for (const float y : x) wrong[r] += y == 3 ? 0 : 1;
        });
        for (unsigned r = 0; r < 3; ++r) {
            CHECK_FALSE(last[r]);
            CHECK(wrong[r] == 0);
            CHECK(behind[r].code == gs::errc::stopped);
            CHECK(behind[r].rank == 7);
        }
    }
}

TEST_CASE("a rank that leaves waits for those that are in its last call, and for no others", "[gradient][transport]") {
    const gs::communicator group(2);
    gs::thread_transport net(group.rank(0));
    auto& other = group.rank(1).view().state(1, 0);
    gs::detail::atomic_ref{other.inside}.store_release(1);  // in the call that rank 0 is over with
    std::jthread leaves([&] { net.leave(1, gs::errc::stopped); });
    std::this_thread::sleep_for(20ms);  // long enough for who doesn't wait, mostly
    CHECK_FALSE(group.rank(1).fault());
    const bool ahead = GENERATE(false, true);  // or in the one behind that
    if (ahead)
        gs::detail::atomic_ref{other.epoch}.store_relaxed(1);
    else
        gs::detail::atomic_ref{other.inside}.store_release(0);
    leaves.join();
    CHECK(group.rank(1).fault().code == gs::errc::stopped);
}

TEST_CASE("of ranks that have left, the one that left first ends a call, whatever is heard first",
          "[gradient][transport]") {
    using farewells = gs::detail::mpi_farewells;
    const auto left = [](std::uint32_t rank, std::uint32_t calls) {
        return farewells::notice({gs::errc::stopped, gs::collective_kind::none, rank, 99}, calls);
    };
    farewells heard;
    CHECK(heard.none());
    CHECK_FALSE(heard.heard(0));
    CHECK_FALSE(heard.heard(gs::collective_fault{gs::errc::stopped, gs::collective_kind::none, 1, 2}.packed()));
    CHECK(heard.none());
    CHECK(heard.heard(left(5, 2)));
    CHECK(heard.heard(left(3, 2)));
    CHECK(heard.heard(left(1, 4)));
    CHECK(heard.heard(left(4, 2)));
    CHECK_FALSE(heard.of(1));
    CHECK(heard.of(2).code == gs::errc::stopped);
    CHECK(heard.of(2).rank == 3);
    CHECK(heard.of(1000).rank == 3);
    farewells wrapped;
    CHECK(wrapped.heard(left(2, 1)));
    CHECK(wrapped.heard(left(6, ~0U)));
    CHECK_FALSE(wrapped.of(~0U - 1));
    CHECK(wrapped.of(~0U).rank == 6);
    CHECK(wrapped.of(0).rank == 6);
}

TEST_CASE("lists are combined as arrays are, to the bit, and sharded there and back", "[gradient][transport]") {
    const auto seed = support::seed(GENERATE(range(1U, 25U)));
    CAPTURE(seed);
    support::random any(seed);
    const auto ranks = static_cast<std::uint32_t>(any.one_in(4) ? 17 + any.below(2) : 1 + any.below(5));
    std::vector<std::size_t> sizes(any.below(40));
    for (auto& n : sizes) n = any.one_in(5) ? 0 : any.one_in(4) ? any.below(5000) : 1 + any.below(40);
    std::size_t elements = 0;
    for (const auto n : sizes) elements += n;
    std::vector<std::vector<float>> memory(ranks), plain(ranks), whole(ranks), scattered(ranks), shards(ranks);
    const std::size_t skew = any.below(16);
    // Some arrays lie behind each other on every rank, and go as one; some on all but one.
    std::vector<std::vector<std::size_t>> gaps(ranks, std::vector<std::size_t>(sizes.size()));
    for (std::size_t a = 0; a < sizes.size(); ++a) {
        const auto whose = any.below(3 * ranks);
        for (std::uint32_t r = 0; r < ranks; ++r) gaps[r][a] = whose < ranks ? whose == r : whose < 2 * ranks;
    }
    const bool planted = elements != 0 && any.one_in(2);
    const std::size_t at_element = planted ? any.below(elements) : 0;
    const auto of_rank = static_cast<std::uint32_t>(any.below(ranks));
    const float odd = any.one_in(2) ? std::numeric_limits<float>::quiet_NaN() : -std::numeric_limits<float>::infinity();
    std::vector<char> finite(ranks), finite_shards(ranks), kept(ranks);
    for (std::uint32_t r = 0; r < ranks; ++r) {
        plain[r].resize(elements);
        for (std::size_t i = 0; i < elements; ++i) plain[r][i] = conformance::odd_value(r, i);
        memory[r].resize(elements + skew + sizes.size());
    }
    const auto given = plain;
    const gs::communicator group(ranks);
    std::vector<gs::collective_fault> faults(ranks);
    support::together(ranks, [&](unsigned r) {
        const gs::member me = group.rank(r);
        std::vector<std::span<float>> list;
        std::size_t at = skew;
        for (std::size_t a = 0; a < sizes.size(); at += sizes[a] + gaps[r][a], ++a)
            list.emplace_back(memory[r].data() + at, sizes[a]);
        const auto fill = [&] {
            std::size_t i = 0;
            for (const auto& array : list)
                for (float& x : array) x = plain[r][i++];
        };
        const auto taken = [&] {
            std::vector<float> all;
            for (const auto& array : list) all.insert(all.end(), array.begin(), array.end());
            return all;
        };
        const std::span<const std::span<float>> as_list(list);
        fill();
        faults[r] = gs::try_all_reduce_list<float>(me, as_list, gs::average{});
        whole[r] = taken();
        fill();
        if (!faults[r]) faults[r] = gs::try_reduce_scatter_list<float>(me, as_list, gs::average{});
        scattered[r] = taken();
        if (!faults[r]) faults[r] = gs::try_all_gather_list<float>(me, as_list);
        shards[r] = taken();
        const auto plant = [&] {
            fill();
            std::size_t before = 0;
            for (const auto& array : list) {
                if (planted && r == of_rank && at_element - before < array.size()) array[at_element - before] = odd;
                before += array.size();
            }
        };
        bool all = false;
        plant();
        if (!faults[r]) faults[r] = gs::try_all_reduce_list<float>(me, as_list, gs::sum{}, gs::never, &all);
        finite[r] = static_cast<char>(all);
        plant();
        if (!faults[r]) faults[r] = gs::try_reduce_scatter_list<float>(me, as_list, gs::sum{}, gs::never, &all);
        finite_shards[r] = static_cast<char>(all);
        for (const auto& array : list) std::fill(array.begin(), array.end(), 0.0F);
        kept[r] = static_cast<char>(std::all_of(memory[r].begin(), memory[r].end(), [](float x) { return x == 0; }));
        if (!faults[r]) faults[r] = gs::try_all_reduce(me, plain[r], std::span(plain[r]), gs::average{});
    });
    for (std::uint32_t r = 0; r < ranks; ++r) {
        CHECK_FALSE(faults[r]);
        CHECK(whole[r] == plain[r]);
        CHECK(shards[r] == plain[r]);
        bool alike = true;  // this rank's shards are combined, and the rest is as it was
        for (std::size_t first = 0; const std::size_t n : sizes) {
            const auto own = gs::shard_of(n, r, ranks);
            for (std::size_t i = 0; i < n; ++i)
                alike = alike && scattered[r][first + i] ==
                                     (i >= own.begin && i < own.end ? plain[r][first + i] : given[r][first + i]);
            first += n;
        }
        CHECK(alike);
        CHECK((finite_shards[r] != 0) == !planted);
        CHECK((finite[r] != 0) == !planted);
        CHECK(kept[r] != 0);  // what lies between the arrays
    }
}

namespace {

/// Throws in its next all-reduce.
struct failing_transport : gs::thread_transport {
    failing_transport(const gs::member& me, bool throws) noexcept : gs::thread_transport(me), fails(throws) {}
    template <gs::reducible T, class Op>
    gs::collective_fault all_reduce(std::span<const std::type_identity_t<T>> in, std::span<T> out, const Op& op,
                                    gs::instant deadline) {
        return kept.to(in, out, [&] {
            if (fails && armed) throw std::bad_alloc();
            return gs::thread_transport::all_reduce(in, out, op, deadline);
        });
    }
    bool fails = false, armed = false;
    support::kept_words kept{};
};

}  // namespace

TEST_CASE("a rank that runs out of the host's memory between processes ends the call on all ranks",
          "[gradient][transport]") {
    const gs::communicator between(2);
    std::vector<gs::collective_fault> faults(4);
    std::vector<int> thrown(4);
    support::together(2, [&](unsigned p) {
        failing_transport outer(between.rank(p), p == 1);
        gs::communicator inner(2);
        const auto group = gs::split(inner, outer);
        outer.armed = true;
        support::together(2, [&](unsigned r) {
            auto me = group.rank(r);
            std::vector<float> x(100, 1);
            try {
                faults[2 * p + r] = me.all_reduce(std::span<const float>(x), std::span(x), gs::sum{},
                                                  std::chrono::steady_clock::now() + 20s);
            } catch (const std::bad_alloc&) {
                thrown[2 * p + r] = 1;
            }
        });
    });
    CHECK(thrown == std::vector{0, 0, 1, 0});
    for (const std::size_t r : {0U, 1U, 3U}) {
        CAPTURE(r);
        CHECK(faults[r].code == gs::errc::out_of_memory);
        CHECK(faults[r].rank == 2);
    }
}

TEST_CASE("a process whose transport throws is named to those that wait for it to split", "[gradient][transport]") {
    const gs::communicator between(2);
    std::vector<gs::errc> codes(2);
    std::vector<std::uint64_t> named(2);
    support::together(2, [&](unsigned p) {
        failing_transport outer(between.rank(p), p == 1);
        outer.armed = true;
        gs::communicator inner(1);
        try {
            (void)gs::split(inner, outer, {}, std::chrono::steady_clock::now() + 20s);
        } catch (const gs::operation_error& e) {
            codes[p] = e.code();
            named[p] = e.figures().left;
        } catch (const std::bad_alloc&) {
            named[p] = 1;
        }
    });
    CHECK(codes == std::vector{gs::errc::out_of_memory, gs::errc::none});
    CHECK(named == std::vector<std::uint64_t>{1, 1});
}

TEST_CASE("a hypercube has at most as many ranks as bits can tell apart", "[gradient][transport]") {
    const auto ranks = GENERATE((1U << 31) + 1, std::numeric_limits<std::uint32_t>::max());
    CHECK(support::code_of([&] { (void)gs::neighbour_graph::hypercube(ranks); }) == gs::errc::invalid_specification);
}

TEST_CASE("lists of different sizes are a mismatch", "[gradient][transport]") {
    const gs::communicator group(2);
    std::vector<gs::collective_fault> faults(2);
    support::together(2, [&](unsigned r) {
        std::vector<float> x(10);
        std::vector<std::span<float>> list{std::span(x).first(4 + r), std::span(x).subspan(5, 5 - r)};
        faults[r] = gs::try_all_reduce_list<float>(group.rank(r), std::span<const std::span<float>>(list));
    });
    CHECK(faults[0].code == gs::errc::mismatch);
    CHECK(faults[1].code == gs::errc::mismatch);
}

TEST_CASE("of what ranks say that give up, who is silent is named; of ranks that differ, whom most name",
          "[gradient][transport]") {
    using kind = gs::collective_kind;
    const auto says = [](gs::errc code, std::uint32_t rank) {
        return gs::collective_fault{code, kind::all_reduce, rank, 1}.packed();
    };
    gs::detail::mpi_suspects late(4);
    late.heard(0, says(gs::errc::deadline_exceeded, 1));
    late.heard(1, says(gs::errc::deadline_exceeded, 3));
    CHECK_FALSE(late.all_have_answered());
    late.heard(2, 0);
    CHECK(late.chosen().rank == 3);  // 1 only waits, too
    gs::detail::mpi_suspects different(4);
    different.heard(3, says(gs::errc::mismatch, 0));
    for (const std::uint32_t r : {0U, 2U}) different.heard(r, says(gs::errc::mismatch, 3));
    different.heard(1, says(gs::errc::deadline_exceeded, 0));
    CHECK(different.all_have_answered());
    CHECK(different.chosen().code == gs::errc::mismatch);
    CHECK(different.chosen().rank == 3);
    CHECK(gs::detail::mpi_suspects(2).chosen().code == gs::errc::aborted);
}

TEST_CASE("a waiting thread rests for a part of a chunk's time", "[gradient][transport]") {
    const gs::instant begin{5s};
    gs::detail::mpi_pace pace;
    pace.begin(begin);
    CHECK(pace.rest(begin + 60us) == 0ns);
    CHECK(pace.rest(begin + 400us) == 100us);  // nothing is known, but that it takes long
    CHECK(pace.rest(begin + 10s) == 200us);
    pace.progressed(begin + 400us);
    CHECK(pace.rest(begin + 400us) == 100us);  // the next one will take as long
    CHECK(pace.rest(begin + 16s) == 200us);
    pace.progressed(begin + 401us);
    CHECK(pace.rest(begin + 401us) == 0ns);  // fast again
    pace.end();
    pace.progressed(begin + 1s);  // nobody waited for it
    pace.begin(begin + 2s);
    CHECK(pace.rest(begin + 2s) == 0ns);
    pace.progressed(begin + 3s);
    pace.end();
    pace.begin(begin + 4s);
    CHECK(pace.rest(begin + 4s) == 200us);  // as slow as the wait before
}

TEST_CASE("arrays that are here are combined in their order and rounded once", "[gradient][transport]") {
    const std::vector<std::vector<float>> parts{{1.0F, 1e8F, 3.0F}, {1e8F, 1.0F, 4.0F}, {-1e8F, -1e8F, 5.0F}};
    std::vector<float> out(3);
    gs::combine(
        3, [&](std::uint32_t r) { return parts[r].data(); }, std::span(out), gs::average{});
    CHECK(out == std::vector<float>{0.0F, 0.0F, 4.0F});
}

}  // namespace transport_test
