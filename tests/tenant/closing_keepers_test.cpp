// SPDX-License-Identifier: Apache-2.0
// Layers that keep memory of a tenant (pools, arenas) close with it: they hand out no memory that
// was taken back, and nothing stays charged.
#include <optional>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/host/virtual_memory.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"

namespace closing_keepers_test {

using namespace gpushare::literals;
using gpushare::errc;
namespace gs = gpushare;

TEST_CASE("a pool over a tenant's memory hands nothing out after the close", "[tenant][closing]") {
    gs::host::node node{{.devices = 1, .memory = 64_MiB}};
    gs::tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 32_MiB, .compute = 50_pct});
    gs::pool_resource pool{chat.memory(), {.segment = 1_MiB}};
    auto cache = pool.make_cache();
    void* const out = pool.allocate(1000, 256);
    void* const kept = cache.allocate(5000, 256);
    CHECK(cache.deallocate(kept, 5000, 256) == errc::none);
    const auto report = chat.close();
    CHECK(report.complete);
    CHECK(report.leaked_blocks == 1);  // the segment in which a block is out
    gs::failure why;
    CHECK(pool.try_allocate(1000, 256, &why) == nullptr);
    CHECK(why.code == errc::closed);
    CHECK(cache.try_allocate(5000, 256, &why) == nullptr);
    CHECK(why.code == errc::closed);
    CHECK(pool.deallocate(out, 1000, 256) == errc::closed);
    CHECK(node.memory(gs::device_id{0}).used() == 0_B);
}

TEST_CASE("an arena of a tenant closes with it, and may outlive it", "[tenant][closing]") {
    gs::host::node node{{.devices = 1, .memory = 64_MiB}};
    gs::host::virtual_memory chunks{node.memory(gs::device_id{0})};
    auto scrubs = node.make_stream(gs::device_id{0});
    gs::chunk_pool pool{chunks, scrubs, {.capacity = 32}};
    std::optional<gs::virtual_arena<gs::host::virtual_memory, gs::host::stream>> arena;
    {
        gs::tenancy shared{node};
        auto llm = shared.admit({.name = "llm", .memory = 32_MiB, .compute = 50_pct});
        arena.emplace(pool, llm.memory().limit(), gs::tenant_tag{llm.tag()}, 32_MiB, "llm");
        arena->commit(0_B, 24_MiB);
        CHECK(llm.usage().current == 24_MiB);
        const auto report = llm.close();
        CHECK(report.complete);
        CHECK(report.usage.current == 0_B);
    }
    CHECK(arena->committed() == 0_B);
    CHECK(arena->try_commit(0_B, 2_MiB).code == errc::closed);
    arena.reset();
}

TEST_CASE("free chunks of an arena don't stand in the way of a tenant's guarantee", "[tenant][arena]") {
    gs::host::node node{{.devices = 1, .memory = 64_MiB}};
    gs::tenancy shared{node};
    auto llm = shared.admit({.name = "llm", .memory = 40_MiB, .compute = 50_pct});
    gs::host::virtual_memory chunks{node.memory(gs::device_id{0})};
    auto scrubs = node.make_stream(gs::device_id{0});
    gs::chunk_pool pool{chunks, scrubs, {.capacity = 32}};
    {
        gs::virtual_arena kv{pool, llm.memory().limit(), {llm.tag()}, 40_MiB, "llm"};
        kv.commit(0_B, 36_MiB);
    }
    llm.resize({.memory = 2_MiB});
    auto ocr = shared.admit({.name = "ocr", .memory = 60_MiB, .compute = 50_pct});
    void* const p = ocr.memory().try_allocate(60 << 20, 256);
    CHECK(p != nullptr);
    CHECK(ocr.memory().deallocate(p, 60 << 20, 256) == errc::none);
}

}  // namespace closing_keepers_test
