// SPDX-License-Identifier: Apache-2.0
// Each trap into which collectives of other libraries have fallen, as a test with the trap's name.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <sys/mman.h>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/submit.hpp>

#include "collective/rig.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace traps_test {

using namespace std::chrono_literals;
namespace gs = gpushare;
using gs::algorithm;
using gs::communicator;
using gs::errc;
using gs::tuning_table;

namespace {

constexpr std::array every_algorithm{algorithm::one_shot, algorithm::two_shot, algorithm::ring};

template <class T>
using sum_body = gs::detail::all_reduce_body<T, gs::sum>;

float element(std::uint32_t rank, std::size_t i, std::uint32_t round) {
    return static_cast<float>((i * 7 + rank * 3 + round) % 1024);
}

gs::instant in(gs::ns d) {
    return gs::instant{std::chrono::duration_cast<gs::ns>(std::chrono::steady_clock::now().time_since_epoch())} + d;
}

/// Calls `round(team, number)` again and again on every rank's block 0, ranks running ahead of each
/// other at random: nothing but the collectives themselves holds them together. Whether all went
/// well.
template <class Round>
bool all_rounds(const communicator& group, std::uint32_t rounds, gs::collective_kind kind, const Round& round) {
    const auto seed = support::seed(11);
    CAPTURE(seed);
    std::atomic<unsigned> wrong{0};
    support::together(group.size(), [&](unsigned rank) {
        collective_test::delaying_context ctx(seed + rank);
        for (std::uint32_t i = 0; i < rounds && wrong == 0; ++i) {
            gs::detail::session<collective_test::delaying_context> t(ctx, group.rank(rank).view(), rank, 0, kind,
                                                                     in(5min).time_since_epoch().count());
            if (!t.enter() || !round(t, i)) ++wrong;
        }
    });
    return wrong == 0;
}

/// An all-reduce of n elements that are different in each round; whether the sums are right.
template <class Team>
bool sum_right(Team& t, std::uint32_t round, algorithm how, std::size_t n, bool in_place) {
    std::vector<float> x(n), y(n);
    for (std::size_t i = 0; i < n; ++i) x[i] = element(t.rank(), i, round);
    float* const to = in_place ? x.data() : y.data();
    if (sum_body<float>{x.data(), to, n, {}, {how, false}}(t, 1)) return false;
    for (std::size_t i = 0; i < n; ++i) {
        float sum = 0;
        for (std::uint32_t r = 0; r < t.ranks(); ++r) sum += element(r, i, round);
        if (to[i] != sum) return false;
    }
    return true;
}

}  // namespace

TEST_CASE("trap: a flag is reset while a peer is already at the next barrier", "[collective][trap]") {
    constexpr unsigned ranks = 4, rounds = 300;
    const communicator group(ranks);
    std::atomic<unsigned> came{0};
    CHECK(all_rounds(group, rounds, gs::collective_kind::barrier, [&](auto& t, std::uint32_t i) {
        came.fetch_add(1, std::memory_order_relaxed);
        return !gs::detail::barrier_body{}(t, 1) && came.load(std::memory_order_relaxed) >= ranks * (i + 1);
    }));
    // Nobody has ever taken a flag back.
    for (std::uint32_t to = 0; to < ranks; ++to)
        for (std::uint32_t from = 0; from < ranks; ++from) {
            CHECK(static_cast<std::uint32_t>(group.rank(0).view().signal(to, from, 0, rounds).ready) == rounds);
            CHECK(static_cast<std::uint32_t>(group.rank(0).view().signal(to, from, 0, rounds - 1).ready) == rounds - 1);
        }
}

TEST_CASE("trap: byte flags share a word", "[collective][trap]") {
    const communicator group(3, {.channels = 2, .blocks = 2});
    std::vector<std::uintptr_t> written;  // by different writers, or at different times
    for (std::uint32_t channel = 0; channel < 2; ++channel) {
        const gs::detail::workspace_view& view = group.rank(0, channel).view();
        for (std::uint32_t to = 0; to < 3; ++to)
            for (std::uint32_t block = 0; block < 2; ++block) {
                written.push_back(reinterpret_cast<std::uintptr_t>(&view.state(to, block)));
                for (std::uint32_t from = 0; from < 3; ++from)
                    for (const std::uint32_t turn : {0U, 1U})
                        written.push_back(reinterpret_cast<std::uintptr_t>(&view.signal(to, from, block, turn)));
            }
    }
    std::sort(written.begin(), written.end());
    for (std::size_t i = 1; i < written.size(); ++i)
        CHECK(written[i] - written[i - 1] >= gs::detail::interference_bytes);
    static_assert(sizeof(gs::detail::peer_signal::ready) == 8 && sizeof(gs::detail::peer_signal::done) == 4);
}

TEST_CASE("trap: a release or an acquire is missing", "[collective][trap]") {
    // What a rank wrote before a collective is seen by all behind it, and what they read of it may
    // be overwritten then. On x86 it takes ThreadSanitizer to see that.
    constexpr unsigned ranks = 3;
    const communicator group(ranks);
    std::vector<std::array<int, 64>> pages(ranks);
    CHECK(all_rounds(group, 60, gs::collective_kind::barrier, [&](auto& t, std::uint32_t i) {
        pages[t.rank()].fill(static_cast<int>(i));
        bool good = !gs::detail::barrier_body{}(t, 1);
        for (const auto& page : pages) good = good && page[63] == static_cast<int>(i);
        // Nobody writes the next round's before all have read this one's.
        gs::detail::session<collective_test::delaying_context> again(
            t.context(), t.view(), t.rank(), 0, gs::collective_kind::barrier, in(5min).time_since_epoch().count());
        return good && again.enter() && !gs::detail::barrier_body{}(again, 1);
    }));
    for (const algorithm how : every_algorithm)
        CHECK(all_rounds(group, 20, gs::collective_kind::all_reduce,
                         [&](auto& t, std::uint32_t i) { return sum_right(t, i, how, 200, false); }));
}

TEST_CASE("trap: one counter is shared by two kernels", "[collective][trap]") {
    // Block 0 and block 1 as two kernels that know nothing of each other: the one does ten times as
    // much.
    const communicator group(2, {.blocks = 2});
    std::atomic<unsigned> wrong{0};
    support::together(4, [&](unsigned i) {
        const std::uint32_t rank = i % 2, block = i / 2, rounds = block == 0 ? 200 : 20;
        collective_test::delaying_context ctx(i);
        for (std::uint32_t k = 0; k < rounds; ++k) {
            gs::detail::session<collective_test::delaying_context> t(ctx, group.rank(rank).view(), rank, block,
                                                                     gs::collective_kind::barrier,
                                                                     in(5min).time_since_epoch().count());
            if (!t.enter() || gs::detail::barrier_body{}(t, 1)) ++wrong;
        }
        if (group.rank(0).view().state(rank, block).epoch != rounds) ++wrong;
    });
    CHECK(wrong == 0);
}

TEST_CASE("trap: the grid changes between two launches", "[collective][trap]") {
    constexpr std::uint32_t ranks = 2;
    const communicator group(ranks, {.blocks = 4});
    for (std::uint32_t round = 0; round < 4 * every_algorithm.size(); ++round) {
        const std::uint32_t blocks = std::array{1U, 4U, 2U, 3U}[round % 4];
        const algorithm how = every_algorithm[round / 4];
        constexpr std::size_t n = 777;
        std::vector<std::vector<float>> x(ranks, std::vector<float>(n));
        for (std::uint32_t r = 0; r < ranks; ++r)
            for (std::size_t i = 0; i < n; ++i) x[r][i] = element(r, i, round);
        CHECK_FALSE(collective_test::run_delayed(group, blocks, round, gs::collective_kind::all_reduce, [&](auto& t) {
            return sum_body<float>{x[t.rank()].data(), x[t.rank()].data(), n, {}, {how, false}}(t, blocks);
        }));
        for (std::size_t i = 0; i < n; ++i) {
            const float sum = element(0, i, round) + element(1, i, round);
            if (x[0][i] != sum || x[1][i] != sum) FAIL(to_string(how) << " with " << blocks << " blocks at " << i);
        }
    }
}

TEST_CASE("trap: a two-shot grid is larger than what is resident", "[collective][trap]") {
    gs::host::node node({.devices = 2, .sms = 2});
    const communicator group(2, {.blocks = 8});
    const std::vector<gs::member> members{group.rank(0), group.rank(1)};
    std::vector<std::vector<float>> x(2, std::vector<float>(1000, 1));
    const std::vector<const float*> from{x[0].data(), x[1].data()};
    const std::vector<float*> to{x[0].data(), x[1].data()};
    const auto submit = [&](const std::vector<gs::device_id>& devices, std::uint32_t blocks) {
        std::vector<gs::host::stream> streams;
        for (const auto d : devices) streams.push_back(node.make_stream(d));
        const errc code = gs::submit_all_reduce<float>(node.gangs(), devices, std::span(streams), members, from, to,
                                                       1000, gs::sum{}, {.blocks = blocks, .patience = 1s});
        for (auto& s : streams) s.record().wait(gs::never);
        return code;
    };
    CHECK(submit({{0}, {1}}, 3) == errc::too_many_blocks);
    CHECK(submit({{0}, {0}}, 2) == errc::too_many_blocks);  // each rank's fit there, but not both
    CHECK(group.progress()[0].epoch == 0);                  // nothing was launched
    CHECK(submit({{0}, {1}}, 2) == errc::none);
    CHECK(x[1][999] == 2);
    CHECK(submit({{1}, {1}}, 1) == errc::none);
    CHECK(x[1][999] == 4);
}

TEST_CASE("trap: two streams on one communicator", "[collective][trap]") {
    gs::host::node node({.devices = 2, .sms = 4});  // there would be room for both
    const communicator group(2);
    const std::vector<gs::device_id> devices{{0}, {1}};
    std::vector<gs::host::stream> one, two;
    for (const auto d : devices) {
        one.push_back(node.make_stream(d));
        two.push_back(node.make_stream(d));
    }
    const std::vector<gs::member> members{group.rank(0), group.rank(1)};
    std::vector<std::vector<float>> x(2, std::vector<float>(100, 1));
    const std::vector<const float*> from{x[0].data(), x[1].data()};
    const std::vector<float*> to{x[0].data(), x[1].data()};
    const auto submit = [&](std::vector<gs::host::stream>& on) {
        return gs::submit_all_reduce<float>(node.gangs(), devices, std::span(on), members, from, to, 100);
    };
    auto faults = node.faults({0});
    faults.stall(one[0]);  // so that the first is under way for long
    REQUIRE(submit(one) == errc::none);
    REQUIRE(submit(two) == errc::none);
    REQUIRE(submit(one) == errc::none);
    CHECK_FALSE(two[1].record().reached());
    faults.resume(one[0]);
    for (auto* const on : {&one, &two})
        for (auto& s : *on) s.record().wait(gs::never);
    CHECK_FALSE(gs::fault_of(members[0]));
    CHECK(x[0] == std::vector<float>(100, 8));  // one after the other
    CHECK(x[1] == x[0]);
}

TEST_CASE("trap: overlapping groups share slots", "[collective][trap]") {
    const communicator whole(3);
    std::vector<communicator> groups;
    for (const auto& ranks : {std::vector<std::uint32_t>{0, 1}, {1, 2}, {2, 0}, {0, 1, 2}})
        groups.push_back(whole.subgroup(ranks));
    std::vector<std::byte*> areas;
    for (const communicator& g : groups)
        for (std::uint32_t r = 0; r < g.size(); ++r) areas.push_back(g.rank(0).view().workspaces[r]);
    std::sort(areas.begin(), areas.end());
    CHECK(std::adjacent_find(areas.begin(), areas.end()) == areas.end());
    std::atomic<unsigned> wrong{0};
    // All groups at once, through their slots, which go from one algorithm to the next in any
    // order.
    support::together(9, [&](unsigned i) {
        std::uint32_t g = 0;
        while (i >= groups[g].size()) i -= groups[g++].size();
        collective_test::delaying_context ctx(g * 10 + i);
        support::random any(g);  // the same for all ranks of a group
        for (std::uint32_t round = 0; round < 60; ++round) {
            gs::detail::session<collective_test::delaying_context> t(ctx, groups[g].rank(i).view(), i, 0,
                                                                     gs::collective_kind::all_reduce,
                                                                     in(5min).time_since_epoch().count());
            const algorithm how = every_algorithm[any.below(every_algorithm.size())];
            if (!t.enter() || !sum_right(t, round * 10 + g, how, 300, false)) ++wrong;
        }
    });
    CHECK(wrong == 0);
}

TEST_CASE("trap: the counter wraps around", "[collective][trap]") {
    for (const algorithm how : every_algorithm)
        for (const std::uint32_t first : {0xffff'fff7U, 0x7fff'fff7U}) {
            const communicator group(3, {.slot = gs::bytes{1024}, .first_epoch = first});
            if (how == algorithm::ring)  // which counts chunks, too
                for (std::uint32_t r = 0; r < 3; ++r) {
                    const gs::detail::workspace_view& view = group.rank(r).view();
                    view.state(r, 0).chunks = first;
                    for (std::uint32_t from = 0; from < 3; ++from) {
                        auto& line = view.signal(r, from, 0, 0);
                        line.partial_ready = line.result_ready = first;
                    }
                }
            CAPTURE(to_string(how), first);
            CHECK(all_rounds(group, 20, gs::collective_kind::all_reduce,
                             [&](auto& t, std::uint32_t i) { return sum_right(t, i, how, 120, i % 2 == 0); }));
            CHECK(group.progress()[2].epoch == first + 20);
        }
}

TEMPLATE_TEST_CASE("trap: sizes that neither the vector, the rank count nor 16 divides", "[collective][trap]",
                   std::int8_t, float) {
    constexpr TestType guard = 111;
    for (const algorithm how : every_algorithm)
        for (const std::uint32_t ranks : {1U, 3U, 5U}) {
            const communicator group(ranks, {.tuning = tuning_table::always(how)});
            std::atomic<std::size_t> wrong_at{0};
            support::together(ranks, [&](unsigned rank) {
                for (std::size_t n = 0; n < 140; n += n < 34 || n > 62 ? 1 : 7) {
                    std::vector<TestType> x(n + 2, guard), y(n + 2, guard);  // at an odd address, too
                    for (std::size_t i = 0; i < n; ++i) x[i + 1] = static_cast<TestType>((i + rank) % 8);
                    if (gs::try_all_reduce(group.rank(rank), std::span(x).subspan(1, n), std::span(y).subspan(1, n)))
                        wrong_at = n + 1;
                    for (std::size_t i = 0; i < n; ++i) {
                        TestType sum = 0;
                        for (std::uint32_t r = 0; r < ranks; ++r)
                            sum = static_cast<TestType>(sum + static_cast<TestType>((i + r) % 8));
                        if (y[i + 1] != sum) wrong_at = n + 1;
                    }
                    if (y[0] != guard || y[n + 1] != guard) wrong_at = n + 1;
                }
            });
            CAPTURE(to_string(how), ranks);
            CHECK(wrong_at == 0);
        }
}

TEST_CASE("trap: int32 overflows", "[collective][trap]") {
    constexpr std::size_t count = (std::size_t{1} << 32) + 4096;
    std::size_t at = 0;
    for (std::uint32_t part = 0; part < 3; ++part) {
        const auto range = gs::shard_of(count, part, 3, gs::detail::vector_grain);
        CHECK(range.begin == at);
        at = range.end;
    }
    CHECK(at == count);

    // Memory of which only what is touched exists: blocks are so many that block 0 has 64 elements.
    constexpr std::uint32_t blocks = 1U << 26;
    struct unmap {
        std::size_t size;
        void operator()(std::int8_t* p) const { (void)munmap(p, size); }
    };
    const auto sparse = [](std::size_t size) {
        void* const p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return std::unique_ptr<std::int8_t, unmap>(p == MAP_FAILED ? nullptr : static_cast<std::int8_t*>(p),
                                                   unmap{size});
    };
    const communicator group(2);
    std::array ins{sparse(2 * count), sparse(2 * count)}, outs{sparse(2 * count), sparse(2 * count)};
    for (const auto& p : ins) REQUIRE(p != nullptr);
    for (const auto& p : outs) REQUIRE(p != nullptr);
    const auto run = [&](gs::collective_kind kind, const auto& body_of) {
        return collective_test::run_delayed(group, 1, 5, kind, [&](auto& t) { return body_of(t.rank())(t, blocks); });
    };
    for (std::uint32_t r = 0; r < 2; ++r) {
        ins[r].get()[0] = static_cast<std::int8_t>(10 + r);
        ins[r].get()[count] = static_cast<std::int8_t>(20 + r);
    }
    REQUIRE_FALSE(run(gs::collective_kind::all_gather, [&](std::uint32_t r) {
        return gs::detail::all_gather_body<std::int8_t>{ins[r].get(), outs[r].get(), count};
    }));
    CHECK(outs[0].get()[count] == 11);
    REQUIRE_FALSE(run(gs::collective_kind::all_to_all, [&](std::uint32_t r) {
        return gs::detail::all_to_all_body<std::int8_t>{ins[r].get(), outs[r].get(), count};
    }));
    CHECK(outs[1].get()[0] == 20);
    CHECK(outs[1].get()[count] == 21);
    REQUIRE_FALSE(run(gs::collective_kind::reduce_scatter, [&](std::uint32_t r) {
        return gs::detail::reduce_scatter_body<std::int8_t, gs::sum>{ins[r].get(), outs[r].get(), count, {}};
    }));
    CHECK(outs[0].get()[0] == 21);
    CHECK(outs[1].get()[0] == 41);
}

TEST_CASE("trap: a one-shot in place", "[collective][trap]") {
    const communicator group(3);
    CHECK(all_rounds(group, 100, gs::collective_kind::all_reduce,
                     [&](auto& t, std::uint32_t i) { return sum_right(t, i, algorithm::one_shot, 100 + i, true); }));
}

TEST_CASE("trap: accumulation in 16 bits", "[collective][trap]") {
    constexpr unsigned ranks = 12;
    for (const algorithm how : every_algorithm) {
        const communicator group(ranks, {.tuning = tuning_table::always(how)});
        std::atomic<unsigned> wrong{0};
        support::together(ranks, [&](unsigned rank) {
            // 2048 + 11: added in float16, whose numbers are 2 apart there, it would stay 2048.
            std::vector<gs::float16> x(65, gs::float16{rank == 0 ? 2048.0F : 1.0F});
            if (gs::try_all_reduce(group.rank(rank), x, std::span(x))) ++wrong;
            if (static_cast<float>(x[0]) != 2060.0F || static_cast<float>(x[64]) != 2060.0F) ++wrong;
        });
        CAPTURE(to_string(how));
        CHECK(wrong == 0);
    }
}

TEST_CASE("trap: the order changes with the size, the bucket or the run", "[collective][trap]") {
    constexpr unsigned ranks = 5;
    constexpr std::size_t n = 150;
    std::vector<std::vector<float>> x(ranks, std::vector<float>(n));
    support::random any(4);
    for (auto& of_rank : x)
        for (float& f : of_rank) f = (static_cast<float>(any.below(2'000'001)) - 1e6F) * 1.7e-3F;
    std::vector<float> want = x[0];
    for (unsigned r = 1; r < ranks; ++r)
        for (std::size_t i = 0; i < n; ++i) want[i] += x[r][i];
    for (const algorithm how : every_algorithm)
        for (const std::size_t bucket : {n, std::size_t{7}, std::size_t{63}, std::size_t{64}}) {
            const communicator group(ranks);
            CAPTURE(to_string(how), bucket);
            CHECK(all_rounds(group, 1, gs::collective_kind::all_reduce, [&](auto& first, std::uint32_t) {
                std::vector<float> y(n);
                const auto part = [&](auto& t, std::size_t at) {
                    const std::size_t size = std::min(bucket, n - at);
                    return !sum_body<float>{x[t.rank()].data() + at, y.data() + at, size, {}, {how, false}}(t, 1);
                };
                bool good = part(first, 0);
                for (std::size_t at = bucket; at < n && good; at += bucket) {
                    gs::detail::session<collective_test::delaying_context> t(
                        first.context(), first.view(), first.rank(), 0, gs::collective_kind::all_reduce,
                        in(5min).time_since_epoch().count());
                    good = t.enter() && part(t, at);
                }
                return good && std::memcmp(y.data(), want.data(), n * sizeof(float)) == 0;
            }));
        }
}

TEST_CASE("trap: workspaces are resized after a graph was captured", "[collective][trap]") {
    // What is captured is the kernel with its arguments: launched again, byte by byte the same,
    // after larger collectives, by a group that has moved. (tests/cuda/communicator_test.cpp does
    // it with CUDA's graphs.)
    gs::host::node node({.devices = 2, .sms = 1});
    communicator group(2);
    std::vector<gs::host::stream> streams;
    for (const std::uint32_t d : {0U, 1U}) streams.push_back(node.make_stream({d}));
    std::vector<std::vector<float>> x(2, std::vector<float>(64, 1));
    std::vector<gs::detail::rank_kernel<sum_body<float>>> captured;
    for (std::uint32_t r = 0; r < 2; ++r)
        captured.push_back({group.rank(r).view(),
                            r,
                            gs::ns{10s}.count(),
                            0,
                            {x[r].data(), x[r].data(), 64, {}, {algorithm::one_shot, false}}});
    const auto launch = [&] {
        for (std::uint32_t r = 0; r < 2; ++r)
            REQUIRE(streams[r].launch_cooperative({.blocks = 1}, captured[r]) == errc::none);
        for (auto& s : streams) s.record().wait(gs::never);
    };
    launch();
    const communicator moved = std::move(group);
    support::together(2, [&](unsigned rank) {
        for (const std::size_t n : {100'000U, 1U, 1'000'000U}) {
            std::vector<float> y(n, 1);
            (void)gs::try_all_reduce(moved.rank(rank), y, std::span(y));
        }
    });
    launch();
    CHECK(moved.progress()[0].epoch == 5);
    CHECK_FALSE(moved.rank(0).fault());
    CHECK(x[0] == std::vector<float>(64, 4));
    CHECK(x[1] == x[0]);
}

TEST_CASE("trap: no timeout", "[collective][trap]") {
    std::vector<float> two(2), four(4);
    const auto alone = [&](const auto& call, tuning_table table = {}) {  // rank 1 never comes
        const communicator group(2, {.tuning = std::move(table)});
        const auto fault = call(group.rank(0), in(2ms));
        CHECK(fault.code == errc::deadline_exceeded);
        CHECK(fault.rank == 1);
        CHECK(fault.epoch == 1);
        CHECK(group.rank(1).fault() == fault);
        return fault.what;
    };
    using gs::collective_kind, gs::instant, gs::member;
    const std::span<float> small(two), large(four);
    CHECK(alone([&](const member& me, instant d) { return gs::try_barrier(me, d); }) == collective_kind::barrier);
    CHECK(alone([&](const member& me, instant d) { return gs::try_broadcast(me, small, 1, d); }) ==
          collective_kind::broadcast);
    CHECK(alone([&](const member& me, instant d) { return gs::try_all_gather(me, small, large, d); }) ==
          collective_kind::all_gather);
    CHECK(alone([&](const member& me, instant d) { return gs::try_reduce_scatter(me, large, small, gs::sum{}, d); }) ==
          collective_kind::reduce_scatter);
    CHECK(alone([&](const member& me, instant d) { return gs::try_reduce(me, small, small, 1, gs::sum{}, d); }) ==
          collective_kind::reduce);
    std::vector<float> other(4);
    CHECK(alone([&](const member& me, instant d) { return gs::try_all_to_all(me, large, std::span(other), d); }) ==
          collective_kind::all_to_all);
    for (const algorithm how : every_algorithm)
        CHECK(alone([&](const member& me, instant d) { return gs::try_all_reduce(me, small, small, gs::sum{}, d); },
                    tuning_table::always(how)) == collective_kind::all_reduce);
}

}  // namespace traps_test
