// SPDX-License-Identifier: Apache-2.0
// The reports of a statistics_resource: statistics in total and for each scope, wrong frees, and
// leaks with labels and stack traces.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/stack_trace.hpp>
#include <gpushare/memory/statistics_resource.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/random.hpp"
#include "support/refusing_memory.hpp"
#include "support/threads.hpp"
#include "support/waiting.hpp"

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::leak;
using gpushare::memory_scope;
using gpushare::statistics_resource;
using support::fault_resource;

TEST_CASE("statistics say what is out, the most that was, the total and the failures", "[memory][statistics]") {
    fault_resource upstream;
    statistics_resource counted{upstream};
    void* a = counted.allocate(100, 4);
    void* b = counted.allocate(300, 4);
    CHECK(counted.deallocate(a, 100, 4) == errc::none);
    upstream.fail_next();
    CHECK_THROWS_AS((void)counted.allocate(1, 1), std::bad_alloc);
    upstream.null_next();
    CHECK(counted.allocate(1, 1) == nullptr);
    const auto f = counted.statistics();
    CHECK(f.current == 300_B);
    CHECK(f.peak == 400_B);
    CHECK(f.total == 400_B);
    CHECK(f.largest == 300_B);
    CHECK(f.allocations == 2);
    CHECK(f.frees == 1);
    CHECK(f.failures == 2);
    CHECK(counted.deallocate(b, 300, 4) == errc::none);
}

TEST_CASE("wrong frees are noticed and change nothing", "[memory][statistics]") {
    fault_resource upstream;
    statistics_resource counted{upstream};
    void* p = counted.allocate(100, 4);
    int other = 0;
    CHECK(counted.deallocate(&other, 100, 4) == errc::unknown_block);
    CHECK(counted.deallocate(p, 99, 4) == errc::wrong_size);
    CHECK(counted.deallocate(p, 100, 8) == errc::wrong_size);
    CHECK(counted.deallocate(nullptr, 100, 4) == errc::none);
    CHECK(counted.statistics().current == 100_B);
    CHECK(counted.statistics().frees == 0);
    CHECK(counted.deallocate(p, 100, 4) == errc::none);
    CHECK(counted.deallocate(p, 100, 4) == errc::unknown_block);
    CHECK(upstream.wrong_frees() == 0);
}

TEST_CASE("a block that the upstream doesn't take back is out as before", "[memory][statistics]") {
    support::refusing_memory upstream;
    statistics_resource counted{upstream};
    std::optional<memory_scope<support::refusing_memory>> scope(std::in_place, counted, "prefill");
    void* const p = scope->allocate(100, 4, "weights");
    const auto refusal = GENERATE(errc::submission_failed, errc::device_lost);
    upstream.refuse(refusal);
    CHECK(counted.deallocate(p, 100, 4) == refusal);
    CHECK(scope->statistics().current == 100_B);
    CHECK(scope->statistics().peak == 100_B);
    CHECK(scope->statistics().frees == 0);
    CHECK(counted.take_back().empty());
    scope.reset();
    std::vector<void*> more;  // the table grows meanwhile
    for (int i = 0; i < 100; ++i) more.push_back(counted.allocate(8, 8));
    REQUIRE(counted.leaks().size() == 101);
    CHECK(counted.leaks().front().what.label == "weights");
    CHECK(counted.leaks().front().scope == "prefill");
    upstream.refuse(errc::none);
    CHECK(counted.deallocate(p, 100, 4) == errc::none);
    CHECK(counted.deallocate(p, 100, 4) == errc::unknown_block);
    CHECK(counted.take_back().size() == 100);
    CHECK(counted.statistics().current == 0_B);
    CHECK(upstream.blocks() == 0);
}

TEST_CASE("a block that no later free gives back is forgotten", "[memory][statistics]") {
    support::refusing_memory upstream;
    statistics_resource counted{upstream};
    const auto last = GENERATE(errc::closed, errc::unknown_block, errc::wrong_size);
    void* const p = counted.allocate(100, 4, "weights");
    (void)counted.allocate(50, 2);
    upstream.refuse(last);
    CHECK(counted.deallocate(p, 100, 4) == last);
    CHECK(counted.deallocate(p, 100, 4) == errc::unknown_block);
    CHECK(counted.statistics().current == 50_B);
    CHECK(counted.take_back().size() == 1);
    CHECK(counted.leaks().empty());
}

TEST_CASE("a scope has figures of its own, which count for those around it (rmm 1563, 2358)", "[memory][statistics]") {
    fault_resource upstream;
    statistics_resource counted{upstream};
    memory_scope engine{counted, "engine"};
    void* weights = engine.allocate(1000, 8);
    void* late = nullptr;
    {
        memory_scope prefill{engine, "prefill"};
        late = prefill.allocate(64, 8, "kv-cache");
        CHECK(counted.deallocate(prefill.allocate(200, 8), 200, 8) == errc::none);
        CHECK(prefill.statistics().current == 64_B);
        CHECK(prefill.statistics().peak == 264_B);
        CHECK(engine.statistics().peak == 1264_B);
        CHECK(engine.statistics().allocations == 3);
        CHECK(prefill.statistics().allocations == 2);
    }
    CHECK(engine.statistics().current == 1064_B);
    {
        const memory_scope decode{engine, "decode"};  // not where prefill was: that has a block out
        CHECK(decode.statistics().peak == 0_B);
        const auto leaks = counted.leaks();
        REQUIRE(leaks.size() == 2);
        CHECK(leaks[0].scope == "engine");
        CHECK(leaks[1].scope == "engine/prefill");
        CHECK(leaks[1].what.label == "kv-cache");
        CHECK(leaks[1].trace.empty());
    }
    CHECK(counted.deallocate(late, 64, 8) == errc::none);
    CHECK(engine.deallocate(weights, 1000, 8) == errc::none);
    CHECK(engine.statistics().current == 0_B);
    CHECK(counted.statistics().total == 1264_B);
    CHECK(upstream.blocks() == 0);
}

TEST_CASE("a scope waits as what is below it does, and counts what came of it", "[memory][statistics][waiting]") {
    fault_resource upstream;
    gpushare::quota limit{1_KiB};
    gpushare::quota_resource mine{limit, upstream};
    statistics_resource counted{mine};
    memory_scope engine{counted, "engine"};
    const auto soon = support::within(std::chrono::milliseconds(1));
    void* const p = engine.allocate(1000, 8, soon, "kv-cache");
    errc code = errc::none;
    try {
        (void)engine.allocate(1000, 8, soon);
    } catch (const gpushare::memory_error& e) {
        code = e.code();
    }
    CHECK(code == errc::deadline_exceeded);
    gpushare::failure why;
    CHECK(engine.try_allocate(1000, 8, soon, &why) == nullptr);
    CHECK(why.code == errc::deadline_exceeded);
    CHECK(engine.statistics().failures == 2);
    CHECK(engine.deallocate(p, 1000, 8) == errc::none);
    void* const q = engine.try_allocate(1000, 8, soon, &why);
    CHECK(q != nullptr);
    CHECK(engine.statistics().allocations == 2);
    CHECK(engine.deallocate(q, 1000, 8) == errc::none);
    CHECK(limit.usage().current == 0_B);
}

namespace {
template <class R>
concept waits = requires(R& r, const gpushare::patience<support::real_clock>& until, gpushare::failure* why) {
    r.allocate(1, 1, until);
    r.try_allocate(1, 1, until, why);
};
using over_quota = gpushare::quota_resource<fault_resource>;
}  // namespace

TEST_CASE("only over memory that can wait do a counting allocator and its scopes take a patience",
          "[memory][statistics][waiting]") {
    STATIC_REQUIRE(waits<over_quota>);
    STATIC_REQUIRE(waits<statistics_resource<over_quota>>);
    STATIC_REQUIRE(waits<memory_scope<over_quota>>);
    STATIC_REQUIRE_FALSE(waits<fault_resource>);
    STATIC_REQUIRE_FALSE(waits<statistics_resource<fault_resource>>);
    STATIC_REQUIRE_FALSE(waits<memory_scope<fault_resource>>);
}

namespace {
[[gnu::noinline]] void* somebody_allocates(statistics_resource<fault_resource>& counted) {
    return counted.allocate(8, 8);
}
}  // namespace

TEST_CASE("stack traces are taken when asked, and named in the report", "[memory][statistics]") {
    fault_resource upstream;
    statistics_resource counted{upstream, {.trace = gpushare::capture_stack}};
    void* first = somebody_allocates(counted);
    CHECK(counted.deallocate(first, 8, 8) == errc::none);
    (void)somebody_allocates(counted);
    (void)counted.allocate(16, 8);
    const auto leaks = counted.take_back();
    REQUIRE(leaks.size() == 2);
    REQUIRE(leaks[1].trace.size() > 2);
    CHECK(leaks[0].trace != leaks[1].trace);
    CHECK(gpushare::symbols_of(leaks[1].trace).size() == leaks[1].trace.size());
    CHECK(upstream.blocks() == 0);
    CHECK(counted.leaks().empty());
}

TEST_CASE("blocks that are out at the end are reported", "[memory][statistics]") {
    fault_resource upstream;
    std::vector<std::string> labels;
    {
        statistics_resource counted{upstream, {.on_leak = [&](const leak& l) { labels.emplace_back(l.what.label); }}};
        (void)counted.allocate(8, 8, "small");
        (void)counted.allocate(800, 8, "big");
    }
    CHECK(labels == std::vector<std::string>{"big", "small"});
    CHECK(upstream.blocks() == 2);  // they may be in use
}

TEST_CASE("the entries agree with a count from outside, whoever frees what", "[memory][statistics][property]") {
    const auto seed = support::seed(1);
    CAPTURE(seed);
    support::random any{seed};
    fault_resource upstream;
    statistics_resource counted{upstream};
    std::vector<std::unique_ptr<memory_scope<fault_resource>>> scopes;
    struct out {
        void* p;
        std::size_t size;
    };
    std::vector<out> blocks;
    std::uint64_t current = 0, peak = 0, total = 0;
    for (int i = 0; i < 5'000; ++i) {
        if (any.one_in(4) && scopes.size() < 8) {
            scopes.push_back(scopes.empty() || any.one_in(2)
                                 ? std::make_unique<memory_scope<fault_resource>>(counted, "s")
                                 : std::make_unique<memory_scope<fault_resource>>(*scopes.back(), "n"));
        } else if (any.one_in(8) && !scopes.empty()) {
            scopes.pop_back();
        } else if (any.one_in(2)) {
            const auto size = 1 + any.below(100);
            blocks.push_back({scopes.empty() ? counted.allocate(size, 1) : any.of(scopes)->allocate(size, 1), size});
            total += size;
            peak = std::max(peak, current += size);
        } else if (!blocks.empty()) {
            auto& b = any.of(blocks);
            REQUIRE(counted.deallocate(b.p, b.size, 1) == errc::none);
            current -= b.size;
            b = blocks.back();
            blocks.pop_back();
        }
        const auto f = counted.statistics();
        if (f.current.count() != current || f.peak.count() != peak || f.total.count() != total)
            FAIL("the entries are wrong after step " << i);
    }
    scopes.clear();
    CHECK(counted.take_back().size() == blocks.size());
    CHECK(counted.statistics().current == 0_B);
    CHECK(upstream.blocks() == 0);
}

TEST_CASE("threads share the entries", "[memory][statistics]") {
    fault_resource upstream;
    statistics_resource counted{upstream};
    memory_scope shared{counted, "shared"};
    std::atomic<int> wrong{0};
    support::together(3, [&](unsigned) {
        for (int i = 0; i < 500; ++i) {
            memory_scope own{shared, "own"};
            void* p = own.allocate(16, 8);
            void* q = shared.allocate(16, 8);
            if (own.statistics().current != 16_B) wrong.fetch_add(1);
            if (counted.deallocate(q, 16, 8) != errc::none || shared.deallocate(p, 16, 8) != errc::none)
                wrong.fetch_add(1);
        }
    });
    CHECK(wrong.load() == 0);
    CHECK(shared.statistics().allocations == 3'000);
    CHECK(counted.statistics().current == 0_B);
}
