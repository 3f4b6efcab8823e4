// SPDX-License-Identifier: Apache-2.0
// The library's resources do what every memory_resource has to do.
#include <cstddef>
#include <memory_resource>

#include <gpushare/error.hpp>
#include <gpushare/memory/block_handle.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/scrubbing_resource.hpp>
#include <gpushare/memory/statistics_resource.hpp>
#include <gpushare/tenant/tenant_memory.hpp>
#include <gpushare/units.hpp>

#include "conformance/memory_resource_suite.hpp"
#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/manual_scrubber.hpp"
#include "support/manual_timeline.hpp"

using namespace gpushare::literals;
using gpushare::quota;
using gpushare::quota_resource;
using support::fault_resource;

TEST_CASE("the suite holds for std::pmr", "[memory][conformance]") {
    conformance::check_memory_resource(*std::pmr::new_delete_resource());
    std::pmr::synchronized_pool_resource pool;
    conformance::check_memory_resource(pool);
}

TEST_CASE("quota_resource is a memory_resource and a memory", "[memory][conformance]") {
    quota device{16_MiB};
    quota q{device, 1_MiB, 3_MiB};
    fault_resource upstream;
    quota_resource mine{q, upstream, "chat"};
    conformance::check_memory_resource(mine);
    conformance::check_memory_view(mine);
    CHECK(upstream.blocks() == 0);
    CHECK(upstream.wrong_frees() == 0);
    CHECK(q.usage().current == 0_B);
    CHECK(device.usage().current == 1_MiB);
}

TEST_CASE("tenant_memory is a memory_resource and a memory", "[memory][conformance]") {
    quota device{16_MiB};
    fault_resource upstream;
    quota whole{16_MiB};
    quota_resource node{whole, upstream};
    int events = 0;
    const gpushare::event_sink sink = [&](const gpushare::tenant_event&) { ++events; };
    {
        gpushare::tenant_memory<quota_resource<fault_resource>, support::manual_point> mine(
            device, node, "chat", gpushare::device_id{0}, 1_MiB, 3_MiB, sink,
            {.stack = gpushare::memory_stack::direct});
        conformance::check_memory_resource(mine);
        conformance::check_memory_view(mine);
        CHECK(mine.limit().usage().current == 0_B);
    }
    CHECK(upstream.blocks() == 0);
    CHECK(events == 0);
    CHECK(whole.usage().current == 0_B);
    CHECK(device.usage().current == 0_B);
}

TEST_CASE("tenant_memory is a memory_resource out of a pool, too", "[memory][conformance]") {
    quota device{16_MiB};
    fault_resource upstream;
    quota whole{16_MiB};
    quota_resource node{whole, upstream};
    int events = 0;
    const gpushare::event_sink sink = [&](const gpushare::tenant_event&) { ++events; };
    {
        gpushare::tenant_memory<quota_resource<fault_resource>, support::manual_point> mine(
            device, node, "chat", gpushare::device_id{0}, 1_MiB, 3_MiB, sink);
        conformance::check_memory_resource(mine);
        CHECK(mine.limit().usage().current == mine.idle());
    }
    CHECK(upstream.blocks() == 0);
    CHECK(upstream.wrong_frees() == 0);
    CHECK(events == 0);
    CHECK(whole.usage().current == 0_B);
    CHECK(device.usage().current == 0_B);
}

TEST_CASE("statistics_resource and its scopes are memory_resources", "[memory][conformance]") {
    fault_resource upstream;
    gpushare::statistics_resource counted{upstream};
    gpushare::memory_scope scope{counted, "prefill"};
    conformance::check_memory_resource(counted);
    conformance::check_memory_resource(scope);
    CHECK(counted.statistics().current == 0_B);
    CHECK(upstream.blocks() == 0);
    CHECK(upstream.wrong_frees() == 0);
}

TEST_CASE("a free whose work can't be enqueued leaves the block out, whatever is above", "[memory][conformance]") {
    using gpushare::errc;
    fault_resource memory;
    quota limit{1_MiB};
    support::manual_scrubber scrubber;
    gpushare::scrubbing_resource scrubs{memory, scrubber};
    quota_resource charged{limit, scrubs};
    const bool at_once = GENERATE(true, false);
    const auto let_fail = [&](bool fails) {
        if (fails) at_once ? scrubber.fail_next_fill() : scrubber.fail_next_record();
    };
    SECTION("scrubbing_resource") { conformance::check_failed_free(scrubs, let_fail); }
    SECTION("quota_resource") { conformance::check_failed_free(charged, let_fail); }
    SECTION("statistics_resource") {
        gpushare::statistics_resource counted{charged};
        gpushare::memory_scope scope{counted, "prefill"};
        conformance::check_failed_free(counted, let_fail);
        conformance::check_failed_free(scope, let_fail);
        CHECK(counted.statistics().current == 0_B);
        CHECK(scope.statistics().frees == 1);
    }
    SECTION("handle_resource") {
        gpushare::handle_table table;
        gpushare::handle_resource handles{table, gpushare::tenant_tag{1}, charged};
        const auto h = handles.allocate(64, 64);
        void* const p = handles.pointer(h);
        let_fail(true);
        CHECK(handles.deallocate(h) == errc::submission_failed);
        CHECK(handles.pointer(h) == p);
        CHECK(table.size() == 1);
        CHECK(handles.deallocate(h) == errc::none);
        CHECK(handles.deallocate(h) == errc::unknown_block);
        CHECK(table.size() == 0);
    }
    CHECK(memory.blocks() != 0);  // until it is overwritten
    while (scrubber.reach_next()) {
    }
    CHECK(scrubs.drain(gpushare::never));
    CHECK(memory.blocks() == 0);
    CHECK(memory.wrong_frees() == 0);
    CHECK(limit.usage().current == 0_B);
}

TEST_CASE("in a tenant's memory, too", "[memory][conformance]") {
    const auto stack = GENERATE(gpushare::memory_stack::direct, gpushare::memory_stack::pool);
    quota device{16_MiB}, whole{16_MiB};
    fault_resource upstream;
    quota_resource node{whole, upstream};
    const gpushare::event_sink nobody;
    bool fails = false;
    gpushare::tenant_memory<quota_resource<fault_resource>, support::manual_point> mine(
        device, node, "chat", gpushare::device_id{0}, 1_MiB, 3_MiB, nobody,
        {.stack = stack,
         .scrub = gpushare::scrub_policy::on_free,
         .fill = [&](const support::manual_point*, void*, std::size_t) {
             if (fails) gpushare::raise({.code = gpushare::errc::submission_failed}, {}, "overwrite");
             return support::manual_point{};
         }});
    conformance::check_failed_free(mine, [&](bool on) { fails = on; });
    CHECK(mine.counts().frees == 1);
}
