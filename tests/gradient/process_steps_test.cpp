// SPDX-License-Identifier: Apache-2.0
// Training steps by ranks of several processes, for which threads stand: what the ranks learn, and
// which rank they name if one registers other parameters or doesn't come. mpi/processes.cpp has
// processes.
#include "process_steps.hpp"

#include <barrier>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <gpushare/gradient/transport.hpp>

#include "support/catch.hpp"

namespace process_steps_test {

namespace gs = gpushare;
using namespace std::chrono_literals;
using gs::errc;
using process_steps::manner;
using process_steps::outcome;
using process = process_steps::process<gs::thread_transport>;

namespace {

/// What the ranks of each process get, where processes of so many ranks call f(process, number).
std::vector<std::vector<outcome>> together(const std::vector<std::uint32_t>& inside,
                                           const std::function<std::vector<outcome>(process&, unsigned)>& f) {
    const gs::communicator between(static_cast<std::uint32_t>(inside.size()));
    std::vector<std::vector<outcome>> all(inside.size());
    support::together(static_cast<unsigned>(inside.size()), [&](unsigned p) {
        gs::thread_transport outer(between.rank(p));
        process mine(inside[p], outer);
        all[p] = f(mine, p);
    });
    return all;
}
void check_faults(const std::vector<std::vector<outcome>>& all, errc code, std::uint32_t rank) {
    for (const auto& ranks : all)
        for (const outcome& seen : ranks) {
            CHECK(seen.fault.code == code);
            CHECK(seen.fault.rank == rank);
        }
}

enum class difference : std::uint8_t { order_of_gradients, size, number, buckets, order_of_types };
manner differing(difference what) {
    manner other;
    other.change = [what](std::vector<gs::detail::device_gradient>& mine) {
        if (what == difference::order_of_gradients) std::swap(mine[2], mine[3]);
        if (what == difference::size) mine[4].count -= 1;
        if (what == difference::number) mine.pop_back();
    };
    if (what == difference::buckets) other.bucket = gs::bytes{100};
    return other;
}

}  // namespace

TEST_CASE("ranks of several processes get the averages of all, of two types, whatever is ready first", "[gradient]") {
    for (std::uint64_t n = 0; n < 4; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        const auto all = together({2, 2}, [&](process& mine, unsigned p) {
            return mine.train<float, gs::bfloat16>(4, {.seed = seed + 10 * p});
        });
        check_faults(all, errc::none, 0);
        for (const auto& ranks : all)
            for (const outcome& seen : ranks) CHECK(seen.wrong == 0);
    }
}

TEST_CASE("a process that registers something else than the others is named to all ranks", "[gradient]") {
    const auto what = GENERATE(difference::order_of_gradients, difference::size, difference::number,
                               difference::buckets, difference::order_of_types);
    CAPTURE(static_cast<int>(what));
    const auto all = together({2, 1, 2}, [&](process& mine, unsigned p) {
        if (p != 1) return mine.train<float, gs::bfloat16>(1, {});
        const manner other = differing(what);
        return what == difference::order_of_types ? mine.train<gs::bfloat16, float>(1, other)
                                                  : mine.train<float, gs::bfloat16>(1, other);
    });
    check_faults(all, errc::mismatch, 2);
    for (const auto& ranks : all) {  // the rank that came last is told at once
        int told = 0;
        for (const outcome& seen : ranks) told += seen.thrown == errc::mismatch && seen.named == 2 ? 1 : 0;
        CHECK(told == 1);
    }
}

TEST_CASE("a process that doesn't register is named to the others", "[gradient]") {
    std::barrier meet(4);  // of the ranks that register: none of them is late for the others
    const manner patient{.change = [&](auto&) { meet.arrive_and_wait(); }, .between = 2s};
    auto all = together({2, 1, 2}, [&](process& mine, unsigned p) {
        return p == 1 ? std::vector<outcome>() : mine.train<float, gs::bfloat16>(1, patient);
    });
    check_faults(all, errc::deadline_exceeded, 2);
    CHECK(all[2].size() == 2);
}

TEST_CASE("a rank that doesn't come to its step is named to the ranks of all processes", "[gradient]") {
    const auto all = together({2, 1, 2}, [&](process& mine, unsigned p) {
        return mine.train<float, gs::bfloat16>(1, p == 2 ? manner{.patience = 50ms, .idle = 1} : manner{});
    });
    check_faults(all, errc::deadline_exceeded, 4);
}

TEST_CASE("a process that stops is named to the others by their next step, and their last one is whole", "[gradient]") {
    const auto seed = support::seed(7);
    CAPTURE(seed);
    for (std::uint64_t n = 0; n < 8; ++n) {
        const auto all = together({2, 1, 2}, [&](process& mine, unsigned p) {
            manner how{.between = 60s, .seed = seed + 10 * p + 100 * n};
            if (p == 1) how.stops = 0;
            return mine.train<float, gs::bfloat16>(p == 1 ? 2 : 3, how);
        });
        for (const std::size_t p : {0U, 2U})
            for (const outcome& seen : all[p]) {
                CHECK(seen.steps == 2);
                CHECK(seen.wrong == 0);
                CHECK(seen.fault.code == errc::stopped);
                CHECK(seen.fault.rank == 2);
            }
        CHECK_FALSE(all[1][0].fault);
        CHECK(all[1][0].steps == 2);
    }
}

TEST_CASE("a rank that stops in a step that waits for another process ends it in all processes", "[gradient]") {
    for (int n = 0; n < 4; ++n) {
        // Process 1 registers, and has a step once the others have given up.
        std::barrier ended(3);
        const auto all = together({2, 1, 2}, [&](process& mine, unsigned p) {
            manner how{.between = 60s};
            if (p == 1) how.before_steps = [&] { ended.arrive_and_wait(); };
            if (p == 2) how.stops = 1, how.halfway = true;
            auto seen = mine.train<float, gs::bfloat16>(p == 2 ? 0 : 1, how);
            if (p != 1) ended.arrive_and_wait();
            return seen;
        });
        check_faults(all, errc::stopped, 4);
    }
}

}  // namespace process_steps_test
