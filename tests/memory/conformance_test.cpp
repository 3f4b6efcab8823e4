// SPDX-License-Identifier: Apache-2.0
// The library's resources do what every memory_resource has to do.
#include <memory_resource>

#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/statistics_resource.hpp>
#include <gpushare/tenant/tenant_memory.hpp>
#include <gpushare/units.hpp>

#include "conformance/memory_resource_suite.hpp"
#include "support/catch.hpp"
#include "support/fault_resource.hpp"
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
