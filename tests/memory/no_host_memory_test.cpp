// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Frees behind a point, if the host has no memory to record the point.
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <cstddef>
#include <new>
#include <span>

#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/deferred_frees.hpp>
#include <gpushare/memory/detail/trace_store.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/failing_new.hpp"
#include "support/fault_resource.hpp"

namespace no_host_memory_test {

using namespace gpushare::literals;
using gpushare::errc;
using gpushare::instant;
using support::fault_resource;

namespace {

enum class waits { throws, fails, succeeds };

/// As the variable says.
struct told_point {
    const waits* how = nullptr;
    const bool* is_reached = nullptr;

    [[nodiscard]] bool reached() const noexcept { return is_reached == nullptr || *is_reached; }
    [[nodiscard]] bool wait(instant) const {
        if (*how == waits::throws) throw std::bad_alloc();
        return *how == waits::succeeds;
    }
    static bool wait_any(std::span<const told_point> points, instant deadline) {
        return points.empty() || points.front().wait(deadline);
    }
    [[nodiscard]] static errc status() noexcept { return errc::none; }
    [[maybe_unused]] friend gpushare::ns elapsed(const told_point&, const told_point&) noexcept { return {}; }
};
static_assert(gpushare::timeline_point<told_point>);

/// What `call` returns where the host has no memory.
template <class F>
auto without_memory(F call) {
    support::this_heap = {.good = 0};
    const auto answer = call();
    support::this_heap = {};
    return answer;
}

}  // namespace

TEST_CASE("a free behind a point that can be neither remembered nor awaited leaves the block out",
          "[memory][deferred]") {
    waits how = waits::throws;
    bool reached = false;
    const told_point used{&how, &reached};
    fault_resource memory;
    SECTION("in a pool") {
        gpushare::pool_resource<fault_resource, told_point> pool(memory, {.segment = 1_MiB});
        void* const p = pool.allocate(4096, 256);
        const auto free = [&] { return without_memory([&] { return pool.deallocate_after(used, p, 4096, 256); }); };
        CHECK(free() == errc::submission_failed);
        how = waits::fails;
        CHECK(free() == errc::submission_failed);
        CHECK(pool.usage().used == 4_KiB);
        CHECK(pool.usage().frees == 0);
        how = waits::succeeds;
        CHECK(free() == errc::none);
        CHECK(pool.usage().used == 0_B);
        CHECK(free() == errc::unknown_block);
    }
    SECTION("in a list of frees") {
        gpushare::deferred_frees<told_point, fault_resource> frees{memory};
        void* const p = memory.allocate(64, 8);
        int told = 0;
        const gpushare::when_back note{[](void* to, gpushare::bytes) noexcept { ++*static_cast<int*>(to); }, &told,
                                       64_B};
        const auto add = [&] { return without_memory([&] { return frees.add(used, p, 64, 8, note); }); };
        CHECK_FALSE(add());
        how = waits::fails;  // as the point of a scrub that has failed: nobody may get the block
        CHECK_FALSE(add());
        CHECK(memory.blocks() == 1);
        CHECK(told == 0);
        CHECK(frees.pending() == 0_B);
        how = waits::succeeds;
        CHECK(add());
        CHECK(memory.blocks() == 0);
        CHECK(told == 1);
    }
}

TEST_CASE("a trace that can't be kept for lack of host memory leaves no gap", "[memory][blocks]") {
    const gpushare::detail::captured_trace some([](std::span<void*> callers) noexcept {
        callers.front() = nullptr;
        return std::size_t{1};
    });
    gpushare::detail::trace_store traces;
    support::this_heap = {.good = 1, .recovers = true};
    CHECK_THROWS_AS((void)traces.keep(some), std::bad_alloc);
    const bool failed = support::this_heap.failed;
    support::this_heap = {};
    REQUIRE(failed);
    CHECK(traces.keep(some) == 0);
    CHECK(traces.keep(some) == 1);
    CHECK(traces.of(1).size() == 1);
}

}  // namespace no_host_memory_test

#endif
