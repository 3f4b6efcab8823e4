// SPDX-License-Identifier: Apache-2.0
// The library's resources keep the contract of every memory_resource.
#include <memory_resource>
#include <string>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/memory/block_handle.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/scrubbing_resource.hpp>
#include <gpushare/memory/statistics_resource.hpp>
#include <gpushare/tenant/tenant_memory.hpp>
#include <gpushare/units.hpp>

#include "conformance/memory_resource_suite.hpp"
#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/manual_scrubber.hpp"
#include "support/manual_timeline.hpp"
#include "support/refusing_memory.hpp"

using namespace gpushare::literals;
using gpushare::errc;
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

TEST_CASE("a free that the memory below refuses leaves the block out, whatever is above", "[memory][conformance]") {
    support::refusing_memory memory;
    quota limit{1_MiB};
    quota_resource charged{limit, memory};
    const auto nothing = [] {};
    SECTION("quota_resource, and as_upstream()") {
        conformance::check_refused_free(charged, memory, nothing);
        auto same = gpushare::as_upstream(charged);
        conformance::check_refused_free(same, memory, nothing);
    }
    SECTION("statistics_resource") {
        gpushare::statistics_resource counted{charged};
        gpushare::memory_scope scope{counted, "prefill"};
        conformance::check_refused_free(counted, memory, nothing);
        conformance::check_refused_free(scope, memory, nothing);
        CHECK(counted.statistics().current == 0_B);
        CHECK(counted.statistics().frees == 8);
        CHECK(scope.statistics().frees == 4);
    }
    SECTION("scrubbing_resource") {
        support::manual_scrubber scrubber;
        gpushare::scrubbing_resource scrubs{charged, scrubber};
        conformance::check_refused_free(scrubs, memory, [&] {
            while (scrubber.reach_next()) {
            }
            (void)scrubs.collect();
        });
    }
    SECTION("quota_resource over one that scrubs") {
        support::manual_scrubber scrubber;
        gpushare::scrubbing_resource scrubs{memory, scrubber};
        quota_resource above{limit, scrubs};
        conformance::check_refused_free(above, memory, [&] {
            while (scrubber.reach_next()) {
            }
            (void)scrubs.collect();
            CHECK(limit.usage().current == gpushare::bytes{memory.bytes()});
        });
    }
    SECTION("pool_resource and its caches") {
        gpushare::pool_resource pool{charged};
        const auto trim = [&] { (void)pool.trim({}); };
        conformance::check_refused_free(pool, memory, trim);
        auto cache = pool.make_cache();
        conformance::check_refused_free(cache, memory, trim);
        CHECK(pool.usage().reserved == 0_B);
    }
    CHECK(limit.usage().current == 0_B);
    CHECK(memory.blocks() == 0);
}

TEST_CASE("a handle is valid as long as its block is out, and no longer", "[memory][conformance]") {
    support::refusing_memory memory;
    gpushare::handle_table table;
    gpushare::handle_resource handles{table, gpushare::tenant_tag{1}, memory};
    const auto h = handles.allocate(64, 64, "weights");
    void* const p = handles.pointer(h);
    for (const errc refusal : {errc::submission_failed, errc::capturing, errc::device_lost, errc::backend_failed}) {
        memory.refuse(refusal);
        CHECK(handles.deallocate(h) == refusal);
        CHECK(handles.pointer(h) == p);
        CHECK(table.size() == 1);
    }
    SECTION("it is freed later") {
        memory.refuse(errc::none);
        CHECK(handles.deallocate(h) == errc::none);
        CHECK(memory.blocks() == 0);
    }
    SECTION("no later free could succeed") {
        const auto last = GENERATE(errc::closed, errc::unknown_block, errc::wrong_size);
        memory.refuse(last);
        CHECK(handles.deallocate(h) == last);
    }
    CHECK(handles.deallocate(h) == errc::unknown_block);
    CHECK(handles.pointer(h) == nullptr);
    CHECK(table.size() == 0);
}

namespace {

using refused_tenant = gpushare::tenant_memory<quota_resource<support::refusing_memory>, support::manual_point>;

/// Of 16 MiB.
struct refused_device {
    quota guarantees{16_MiB}, whole{16_MiB};
    support::refusing_memory memory;
    quota_resource<support::refusing_memory> node{whole, memory};
    std::string told;  // what the events say: the labels of leaks
    const gpushare::event_sink sink = [this](const gpushare::tenant_event& e) {
        told += e.what == gpushare::tenant_event::kind::leak ? std::string(e.label) + ' ' : "wrong free ";
    };
};

}  // namespace

TEST_CASE("memory that a tenant couldn't free is still its own, under its label", "[memory][conformance]") {
    refused_device on;
    {
        refused_tenant mine(on.guarantees, on.node, "chat", gpushare::device_id{0}, 1_MiB, 3_MiB, on.sink,
                            {.stack = gpushare::memory_stack::direct});
        conformance::check_refused_free(mine, on.memory, [] {});
        CHECK(mine.counts().frees == 4);
        void* const weights = mine.allocate(100, 64, "weights");
        void* const cache = mine.allocate(200, 64, "cache");
        on.memory.refuse(errc::capturing);
        CHECK(mine.deallocate(weights, 100, 64) == errc::capturing);
        CHECK(mine.deallocate_after(support::manual_point{}, cache, 200, 64) == errc::submission_failed);
        REQUIRE(mine.find(weights));
        CHECK(mine.find(weights)->label == "weights");
        mine.close();
        CHECK(mine.deallocate(weights, 100, 64) == errc::capturing);
        gpushare::close_report report;
        const gpushare::patience at_once{gpushare::host::steady_clock{}, gpushare::instant::min()};
        CHECK_FALSE(mine.take_back(report, at_once));
        CHECK(report.leaked_blocks == 0);
        on.memory.refuse(errc::none);
        CHECK(mine.deallocate(cache, 200, 64) == errc::none);
        CHECK(mine.take_back(report, at_once));
        CHECK(report.leaked_blocks == 1);
        CHECK(on.told == "weights ");
        CHECK(mine.deallocate(weights, 100, 64) == errc::closed);
    }
    CHECK(on.memory.blocks() == 0);
    CHECK(on.whole.usage().current == 0_B);
}

TEST_CASE("memory that a tenant couldn't overwrite keeps its label, too", "[memory][conformance]") {
    const auto stack = GENERATE(gpushare::memory_stack::direct, gpushare::memory_stack::pool);
    refused_device on;
    bool fails = false;
    {
        refused_tenant mine(on.guarantees, on.node, "chat", gpushare::device_id{0}, 1_MiB, 3_MiB, on.sink,
                            {.stack = stack,
                             .scrub = gpushare::scrub_policy::on_free,
                             .fill = [&](const support::manual_point*, void*, std::size_t) {
                                 if (fails) gpushare::raise({.code = errc::submission_failed}, {}, "overwrite");
                                 return support::manual_point{};
                             }});
        void* const p = mine.allocate(100, 64, "weights");
        fails = true;
        CHECK(mine.deallocate(p, 100, 64) == errc::submission_failed);
        CHECK(mine.deallocate_after(support::manual_point{}, p, 100, 64) == errc::submission_failed);
        CHECK(mine.deallocate(p, 99, 64) == errc::wrong_size);
        CHECK(on.told == "wrong free ");
        mine.close();
        gpushare::close_report report;
        const gpushare::patience at_once{gpushare::host::steady_clock{}, gpushare::instant::min()};
        CHECK_FALSE(mine.take_back(report, at_once));
        fails = false;
        CHECK(mine.take_back(report, at_once));
        CHECK(report.leaked_blocks == 1);
        CHECK(on.told == "wrong free weights ");
        CHECK(mine.counts().frees == 1);
    }
    CHECK(on.memory.blocks() == 0);
    CHECK(on.whole.usage().current == 0_B);
}
