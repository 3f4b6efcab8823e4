// SPDX-License-Identifier: Apache-2.0
// Tags: lock-free
// Groups: faults on every rank, aborts, deadlines, splits, shrinking, epochs that wrap around, and
// the name of the rank that hangs.
#include <gpushare/collective/communicator.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <gpushare/collective/collectives.hpp>

#include "collective/rig.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace communicator_test {

using namespace std::chrono_literals;
using gpushare::algorithm;
using gpushare::collective_fault;
using gpushare::collective_kind;
using gpushare::collective_stage;
using gpushare::communicator;
using gpushare::communicator_options;
using gpushare::errc;
using gpushare::rank_progress;
using gpushare::tuning_table;

namespace {

constexpr std::array every_algorithm{algorithm::one_shot, algorithm::two_shot, algorithm::ring};

gpushare::instant in(gpushare::ns d) {
    return gpushare::instant{
               std::chrono::duration_cast<gpushare::ns>(std::chrono::steady_clock::now().time_since_epoch())} +
           d;
}

collective_fault reduce(const gpushare::member& me, std::size_t n, gpushare::instant deadline = gpushare::never) {
    std::vector<float> x(n, 1.0F);
    const auto fault = gpushare::try_all_reduce(me, x, std::span(x), gpushare::sum{}, deadline);
    if (!fault && x[n - 1] != static_cast<float>(me.size())) return {errc::backend_failed, {}, 0, 0};
    return fault;
}

bool in_use(const std::vector<collective_fault>& faults) {
    return std::ranges::any_of(faults, [](const collective_fault& f) { return f.buffers_in_use; });
}

/// Waits until one rank has told the other one that it is in the collective with this number.
void wait_for_rank(const communicator& group, std::uint32_t from, std::uint32_t to, std::uint32_t epoch) {
    auto& told = group.rank(to).view().signal(to, from, 0, epoch).ready;
    while (static_cast<std::uint32_t>(gpushare::detail::atomic_ref{told}.load_acquire()) != epoch)
        std::this_thread::yield();
}

}  // namespace

TEST_CASE("a rank that doesn't come is named to all ranks that came", "[collective]") {
    const auto gives_up = GENERATE(0U, 2U);  // it speaks for both
    for (const algorithm how : every_algorithm) {
        std::optional<communicator> made;
        std::vector<collective_fault> faults(3);
        std::vector<collective_fault> before(3);
        // Again where the machine stopped a rank on its way out for 200 ms: its buffers are in use.
        for (int again = 0; again == 0 || (again < 5 && in_use(faults)); ++again) {
            const communicator& group = made.emplace(3U, communicator_options{.tuning = tuning_table::always(how)});
            support::together(3, [&](unsigned rank) {
                before[rank] = reduce(group.rank(rank), 100);
                if (rank == 1) return;
                if (rank == gives_up) wait_for_rank(group, 2 - rank, rank, 2);  // a late one is blamed
                faults[rank] = reduce(group.rank(rank), 100, rank == gives_up ? in(20ms) : gpushare::never);
            });
        }
        const communicator& group = *made;
        CAPTURE(to_string(how), gives_up);
        for (const auto& f : before) REQUIRE_FALSE(f);
        // In the ring a neighbour's neighbour may be blamed first, but not here: all meet before.
        CHECK(faults[0] == collective_fault{errc::deadline_exceeded, collective_kind::all_reduce, 1, 2});
        CHECK(faults[2] == faults[0]);
        CHECK(std::string(gpushare::describe(faults[0]).c_str()) == "all_reduce, epoch 2: rank 1 (deadline exceeded)");
        // It stays so, also for the one that comes late.
        CHECK(reduce(group.rank(1), 100) == faults[0]);
        CHECK(reduce(group.rank(0), 100) == faults[0]);
    }
}

TEST_CASE("a rank that dies inside holds up nobody for long beyond the deadline", "[collective]") {
    const communicator group(3);
    const auto dead = group.rank(2);
    gpushare::detail::thread_context ctx{0};
    gpushare::detail::session<gpushare::detail::thread_context> dying(
        ctx, dead.view(), 2, 0, collective_kind::all_reduce, gpushare::detail::no_deadline);
    REQUIRE(dying.enter());  // and never leaves
    std::vector<collective_fault> faults(2);
    const auto begin = std::chrono::steady_clock::now();
    support::together(2, [&](unsigned rank) { faults[rank] = reduce(group.rank(rank), 100, in(500ms)); });
    const auto took = std::chrono::steady_clock::now() - begin;
    CHECK(took < 2min);  // for ever before
    for (const auto& f : faults) {
        CHECK(f.code == errc::deadline_exceeded);
        CHECK(f.rank == 2);
        CHECK(f.buffers_in_use);
    }
    CHECK(faults[0] == faults[1]);
    CHECK(std::string(gpushare::describe(faults[0]).c_str()) ==
          "all_reduce, epoch 1: rank 2 (deadline exceeded), its buffers may still be in use");
    CHECK(collective_fault::unpacked(faults[0].packed()) == faults[0]);
    // What comes later doesn't wait again.
    CHECK(reduce(group.rank(0), 100) == faults[0]);
    // A rank that was only slow finds the group closed, and what it takes as the fault is the same.
    dying.fail(errc::deadline_exceeded, 0);
    CHECK(dying.fault().code == faults[0].code);
    CHECK(dying.fault().rank == faults[0].rank);
    CHECK_FALSE(dying.fault().buffers_in_use);
}

TEST_CASE("ranks that give up at the same time for different reasons return the same one", "[collective]") {
    for (unsigned round = 0; round < 200; ++round) {
        const communicator group(4, {.blocks = 2});
        std::vector<collective_fault> faults(8);
        support::together(8, [&](unsigned i) {
            const std::uint32_t rank = i % 4, block = i / 4;
            collective_test::delaying_context ctx(round * 8 + i);
            gpushare::detail::session<collective_test::delaying_context> s(
                ctx, group.rank(rank).view(), rank, block, collective_kind::barrier, gpushare::detail::no_deadline);
            ctx.sync();
            if (s.enter()) s.fail(errc::kernel_failed, i);  // each blames another
            faults[i] = s.fault();
        });
        for (const auto& f : faults) {
            REQUIRE(f.code == errc::kernel_failed);
            REQUIRE(f == faults[0]);
        }
        REQUIRE(group.rank(3).fault() == faults[0]);
    }
}

TEST_CASE("the throwing call carries the fault", "[collective]") {
    const communicator group(2);
    std::vector<float> x(4);
    try {
        gpushare::all_reduce(group.rank(0), x, std::span(x), gpushare::sum{}, in(1ms));
        FAIL("no exception");
    } catch (const gpushare::operation_error& e) {
        CHECK(e.code() == errc::deadline_exceeded);
        CHECK(e.figures().asked == 1);  // epoch
        CHECK(e.figures().left == 1);   // rank
        CHECK(std::string(e.what()) == "all_reduce, epoch 1: rank 1 (deadline exceeded)");
    }
}

TEST_CASE("an abort ends the wait of every rank with the reason", "[collective]") {
    for (const algorithm how : every_algorithm) {
        const communicator group(4, {.tuning = tuning_table::always(how)});
        std::vector<collective_fault> faults(4);
        support::together(4, [&](unsigned rank) {
            if (rank == 3) {
                std::this_thread::sleep_for(2ms);
                group.abort(3, errc::kernel_failed);
            }
            faults[rank] = reduce(group.rank(rank), 100);
        });
        for (const auto& f : faults) {
            CHECK(f.code == errc::kernel_failed);
            CHECK(f.rank == 3);
        }
    }
}

TEST_CASE("behind an abort the group is closed, though another thread's is under way", "[collective]") {
    communicator group(2);
    auto& first = group.rank(0).view().state(0, 0);
    first.host_claims = 1;  // of a thread that stands still between its claim and its reason
    std::atomic<bool> back{false};
    std::jthread other([&] {
        group.abort(1, errc::kernel_failed);
        back = true;
    });
    std::this_thread::sleep_for(5ms);
    CHECK_FALSE(back);
    gpushare::detail::atomic_ref{first.host_proposal}.store_release(
        gpushare::collective_fault{errc::stopped, gpushare::collective_kind::barrier, 0, 0}.packed());
    other.join();
    CHECK(reduce(group.rank(0), 100).code == errc::stopped);
}

TEST_CASE("an abort in the midst of traffic: each call succeeds or fails whole", "[collective]") {
    for (unsigned round = 0; round < 30; ++round) {
        const communicator group(3, {.tuning = tuning_table::always(every_algorithm[round % every_algorithm.size()])});
        std::atomic<unsigned> wrong{0};
        support::together(4, [&](unsigned rank) {
            if (rank == 3) {
                std::this_thread::sleep_for(std::chrono::microseconds(round * 20));
                group.abort(2);
                return;
            }
            // A buffer that is freed as soon as the call returns: nobody may touch it any more.
            for (;;) {
                const auto fault = reduce(group.rank(rank), 3000);
                if (!fault) continue;
                if (fault.code != errc::aborted || fault.rank != 2) ++wrong;
                break;
            }
        });
        CHECK(wrong == 0);
    }
}

TEST_CASE("ranks that call with different sizes or operators are told", "[collective]") {
    for (const algorithm how : every_algorithm) {
        const communicator group(2, {.tuning = tuning_table::always(how)});
        std::vector<collective_fault> faults(2);
        support::together(2, [&](unsigned rank) { faults[rank] = reduce(group.rank(rank), 100 + rank); });
        CAPTURE(to_string(how));
        CHECK(faults[0].code == errc::mismatch);
        CHECK(faults[0] == faults[1]);

        const communicator other(2, {.tuning = tuning_table::always(how)});
        support::together(2, [&](unsigned rank) {
            std::vector<float> x(10);
            faults[rank] = rank == 0 ? gpushare::try_all_reduce(other.rank(rank), x, std::span(x), gpushare::sum{})
                                     : gpushare::try_all_reduce(other.rank(rank), x, std::span(x), gpushare::maximum{});
        });
        CHECK(faults[0].code == errc::mismatch);
    }
    const communicator alone(1);
    std::vector<float> a(3), b(4);
    CHECK(gpushare::try_all_reduce(alone.rank(0), a, std::span(b)).code == errc::mismatch);
}

TEST_CASE("two threads on one rank's channel: the second is refused, and the first not disturbed", "[collective]") {
    const communicator group(2);
    std::atomic<bool> refused{false};
    std::vector<collective_fault> faults(2);
    support::together(3, [&](unsigned i) {
        if (i == 0) {
            faults[0] = reduce(group.rank(0), 10);
        } else if (i == 1) {  // until it meets the other one inside
            collective_fault f;
            while (group.progress()[0].stage != collective_stage::waiting) std::this_thread::yield();
            f = reduce(group.rank(0), 10, in(5s));
            refused = f.code == errc::in_flight;
        } else {
            while (!refused) std::this_thread::yield();
            faults[1] = reduce(group.rank(1), 10);
        }
    });
    CHECK(refused);
    CHECK_FALSE(faults[0]);
    CHECK_FALSE(faults[1]);
}

TEST_CASE("channels of one group don't know each other", "[collective]") {
    const communicator group(2, {.channels = 2});
    std::atomic<unsigned> wrong{0};
    // Rank 0 does channel 0 first, rank 1 channel 1: each channel in a thread of its own.
    support::together(4, [&](unsigned i) {
        for (unsigned round = 0; round < 50; ++round)
            if (reduce(group.rank(i % 2, i / 2), 10 + round)) ++wrong;
    });
    CHECK(wrong == 0);
}

TEST_CASE("epochs wrap around", "[collective]") {
    for (const algorithm how : every_algorithm)
        for (const std::uint32_t first : {0xffff'fffaU, 0x7fff'fffaU, 0x3fff'fffaU}) {
            const communicator group(3, {.tuning = tuning_table::always(how), .first_epoch = first});
            std::atomic<unsigned> wrong{0};
            support::together(3, [&](unsigned rank) {
                for (unsigned i = 0; i < 20; ++i)
                    if (reduce(group.rank(rank), 50 + i)) ++wrong;
            });
            CAPTURE(to_string(how), first);
            CHECK(wrong == 0);
            CHECK(group.progress()[0].epoch == first + 20);
        }
    CHECK(gpushare::detail::epoch_reached(3, 0xffff'ffffU));
    CHECK_FALSE(gpushare::detail::epoch_reached(0xffff'ffffU, 0));
}

TEST_CASE("every split of a group works at once with the group and with others that overlap", "[collective]") {
    const unsigned ranks = GENERATE(2U, 6U, 11U, 16U);
    const communicator group(ranks);
    const auto seed = support::seed(3);
    CAPTURE(seed);
    support::random any(seed);
    for (unsigned round = 0; round < 4; ++round) {
        std::vector<std::uint32_t> one(ranks), two(ranks);
        for (auto& c : one) c = static_cast<std::uint32_t>(any.below(3));
        for (auto& c : two) c = static_cast<std::uint32_t>(any.below(2));
        const auto first = group.split(one), second = group.split(two);
        const auto find = [](const std::vector<communicator>& groups, unsigned rank) {
            for (const communicator& g : groups)
                for (std::uint32_t r = 0; r < g.size(); ++r)
                    if (g.parent_rank(r) == rank) return g.rank(r);
            throw std::logic_error("a rank without a group");
        };
        std::atomic<unsigned> wrong{0};
        support::together(ranks * 3, [&](unsigned i) {
            const unsigned rank = i % ranks;
            const auto me = i / ranks == 0 ? find(first, rank) : i / ranks == 1 ? find(second, rank) : group.rank(rank);
            for (unsigned n = 1; n < 2000; n = n * 3 + 1)
                if (reduce(me, n)) ++wrong;
        });
        CHECK(wrong == 0);
    }
}

TEST_CASE("every subset of four ranks is a group", "[collective]") {
    const communicator group(4);
    for (unsigned mask = 1; mask < 16; ++mask) {
        std::vector<std::uint32_t> ranks;
        for (std::uint32_t r = 0; r < 4; ++r)
            if ((mask >> r & 1U) != 0) ranks.push_back(r);
        const communicator part = group.subgroup(ranks);
        std::atomic<unsigned> wrong{0};
        support::together(part.size(), [&](unsigned rank) {
            if (reduce(part.rank(rank), 77)) ++wrong;
        });
        CHECK(wrong == 0);
    }
    CHECK_THROWS_AS(group.subgroup(std::vector<std::uint32_t>{}), gpushare::operation_error);
    CHECK_THROWS_AS(group.subgroup(std::vector<std::uint32_t>{1, 1}), gpushare::operation_error);
    CHECK_THROWS_AS(group.subgroup(std::vector<std::uint32_t>{4}), gpushare::operation_error);
    CHECK_THROWS_AS(group.rank(4), gpushare::operation_error);
    CHECK_THROWS_AS(communicator(0), gpushare::operation_error);
}

TEST_CASE("the surviving ranks go on without the dead ones", "[collective]") {
    const communicator group(4);
    support::together(4, [&](unsigned rank) {
        if (rank != 2) (void)reduce(group.rank(rank), 100, in(10ms));  // 2 has died
    });
    const communicator rest = group.shrink(std::vector<std::uint32_t>{2});
    REQUIRE(rest.size() == 3);
    CHECK(rest.parent_rank(2) == 3);
    std::atomic<unsigned> wrong{0};
    support::together(3, [&](unsigned rank) {
        if (reduce(rest.rank(rank), 100)) ++wrong;
    });
    CHECK(wrong == 0);
}

TEST_CASE("a rank joins a group that has shrunk, and gets the others' data", "[collective]") {
    const communicator group(3, {.channels = 2, .tuning = gpushare::tuning_table::always(gpushare::algorithm::ring)});
    group.abort(1);
    const communicator rest = group.shrink(std::vector<std::uint32_t>{1});
    const communicator again = rest.grow(1);
    REQUIRE(again.size() == 3);
    CHECK(again.channels() == 2);
    CHECK(again.tuning() == group.tuning());
    CHECK(again.parent_rank(1) == 1);
    CHECK(rest.parent_rank(again.parent_rank(1)) == 2);
    CHECK(again.parent_rank(2) == communicator::joined);
    std::atomic<unsigned> wrong{0};
    support::together(3, [&](unsigned rank) {
        // The ranks that stay still work in their old group, and then hand the newcomer their
        // state.
        if (rank < 2 && reduce(rest.rank(rank), 100)) ++wrong;
        std::vector<float> state(500, rank < 2 ? 7.0F : 0.0F);
        if (gpushare::try_broadcast(again.rank(rank), std::span(state), 0)) ++wrong;
        if (state != std::vector<float>(500, 7.0F)) ++wrong;
        if (reduce(again.rank(rank, 1), 100)) ++wrong;
    });
    CHECK(wrong == 0);
    CHECK(group.grow(0).size() == 3);
    CHECK_FALSE(group.grow(0).rank(0).fault());
}

TEST_CASE("the laggard is the rank that is furthest behind", "[collective]") {
    using enum collective_stage;
    constexpr auto kind = collective_kind::all_reduce;
    const auto who = [](const std::vector<rank_progress>& ranks) { return gpushare::laggard(ranks); };
    CHECK_FALSE(who({{5, kind, outside}, {5, kind, outside}}));
    CHECK(who({{5, kind, waiting}, {4, kind, outside}})->rank == 1);
    CHECK(who({{5, kind, waiting}, {4, kind, outside}})->epoch == 5);
    CHECK(who({{5, kind, leaving}, {5, kind, working}, {5, kind, leaving}})->rank == 1);
    CHECK(who({{5, kind, outside}, {5, kind, leaving}})->rank == 1);
    CHECK(who({{0, kind, waiting}, {0xffff'ffffU, kind, outside}})->rank == 1);  // 0 comes after the largest
    CHECK(who({{5, kind, outside}, {6, kind, waiting}, {6, kind, waiting}})->rank == 0);
}

TEST_CASE("a watchdog names who hangs once nothing has moved for its patience", "[collective]") {
    gpushare::hang_watch watch(100ms);
    const gpushare::instant t0{};
    const std::vector<rank_progress> stuck{{3, collective_kind::all_reduce, collective_stage::waiting},
                                           {2, collective_kind::all_reduce, collective_stage::outside}};
    auto moved = stuck;
    moved[1].epoch = 3;
    moved[1].stage = collective_stage::waiting;
    CHECK_FALSE(watch.look(stuck, t0));
    CHECK_FALSE(watch.look(stuck, t0 + 99ms));
    CHECK(watch.look(stuck, t0 + 100ms) ==
          collective_fault{errc::deadline_exceeded, collective_kind::all_reduce, 1, 3});
    CHECK_FALSE(watch.look(moved, t0 + 150ms));
    CHECK_FALSE(watch.look(moved, t0 + 200ms));
    CHECK(watch.look(moved, t0 + 250ms));
}

TEST_CASE("a watchdog over a group that hangs, and the abort that ends it", "[collective]") {
    const communicator group(3);
    std::vector<collective_fault> faults(3);
    std::optional<collective_fault> seen;
    support::together(3, [&](unsigned rank) {
        if (rank != 1) {
            faults[rank] = reduce(group.rank(rank), 100);
            return;
        }
        gpushare::hang_watch watch(2ms);
        const auto waits = [](const gpushare::rank_progress& r) {
            return r.stage != gpushare::collective_stage::outside;
        };
        auto at = group.progress();
        while (!waits(at[0]) || !waits(at[2])) {  // else one that hasn't begun yet is the one that hangs
            std::this_thread::yield();
            at = group.progress();
        }
        while (!seen) {
            std::this_thread::yield();
            seen = watch.look(group.progress(), in(0ns));
        }
        group.abort(seen->rank, seen->code);
    });
    CHECK(seen->rank == 1);
    CHECK(seen->what == collective_kind::all_reduce);
    CHECK(faults[0].rank == 1);
    CHECK(faults[2].code == errc::deadline_exceeded);
}

TEST_CASE("slots that don't fit into all addresses are refused", "[collective]") {
    for (const gpushare::bytes slot :
         {gpushare::bytes::max(), gpushare::bytes{std::uint64_t{1} << 63}, gpushare::bytes{std::uint64_t{1} << 62}})
        CHECK_THROWS_AS(communicator(2, {.slot = slot}), std::bad_alloc);
    CHECK_THROWS_AS(communicator(2, {.blocks = ~0U, .slot = gpushare::bytes{std::uint64_t{1} << 31}}), std::bad_alloc);
}

TEST_CASE("workspaces stay where they are", "[collective]") {
    communicator group(2);
    const auto before = group.rank(1).view().workspaces[1];
    communicator moved = std::move(group);
    for (unsigned i = 0; i < 3; ++i)
        support::together(2, [&](unsigned rank) { (void)reduce(moved.rank(rank), 10U << (i * 8)); });
    CHECK(moved.rank(1).view().workspaces[1] == before);
}

}  // namespace communicator_test
