// SPDX-License-Identifier: Apache-2.0
// Handles: correct frees pass, and stale and foreign handles are noticed even if the address is in
// use again.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <set>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/block_handle.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/refusing_memory.hpp"
#include "support/threads.hpp"

using namespace gpushare::literals;
using gpushare::block_handle;
using gpushare::errc;
using gpushare::handle_resource;
using gpushare::handle_table;
using gpushare::tenant_tag;
using support::fault_resource;
using support::refusing_memory;

static_assert(sizeof(block_handle) == 8);
static_assert(std::is_trivially_copyable_v<block_handle>);

namespace {

/// Gives the same address again and again.
struct one_place {
    alignas(64) std::byte place[64];
    int out = 0;
    void* allocate(std::size_t, std::size_t) {
        ++out;
        return place;
    }
    void deallocate(void*, std::size_t, std::size_t) { --out; }
};

struct tenants {
    fault_resource upstream;
    handle_table table;
    handle_resource<fault_resource> chat{table, {1}, upstream}, code{table, {2}, upstream};
};

}  // namespace

TEST_CASE("a handle that was freed stays bad although its address is used again", "[memory][handles]") {
    one_place upstream;
    handle_table table;
    handle_resource mine{table, tenant_tag{1}, upstream};
    const auto first = mine.allocate(64, 8);
    void* const p = mine.pointer(first);
    CHECK(mine.deallocate(first) == errc::none);
    const auto second = mine.allocate(64, 8);
    REQUIRE(mine.pointer(second) == p);
    CHECK(mine.pointer(first) == nullptr);
    CHECK(mine.deallocate(first) == errc::unknown_block);
    CHECK(mine.resize(first, 32, std::memcpy) == errc::unknown_block);
    CHECK(upstream.out == 1);
    CHECK(mine.deallocate(second) == errc::none);
    CHECK(mine.deallocate(second) == errc::unknown_block);
    CHECK(upstream.out == 0);
    CHECK(table.size() == 0);
}

TEST_CASE("a tenant can't free, resize or see another tenant's block", "[memory][handles]") {
    tenants t;
    const auto h = t.chat.allocate(100, 8);
    CHECK(t.code.pointer(h) == nullptr);
    CHECK(t.code.deallocate(h) == errc::unknown_block);
    CHECK(t.code.resize(h, 10, std::memcpy) == errc::unknown_block);
    CHECK(t.upstream.blocks() == 1);
    CHECK(t.chat.pointer(h) != nullptr);
    CHECK(t.chat.deallocate(h) == errc::none);
    CHECK(t.upstream.wrong_frees() == 0);
}

TEST_CASE("handles that never existed are noticed", "[memory][handles]") {
    tenants t;
    CHECK(t.chat.deallocate({}) == errc::unknown_block);
    const auto h = t.chat.allocate(8, 8);
    CHECK(t.chat.deallocate({h.slot + 1, h.generation}) == errc::unknown_block);
    CHECK(t.chat.deallocate({h.slot, h.generation + 1}) == errc::unknown_block);
    CHECK(t.chat.deallocate({h.slot, h.generation - 1}) == errc::unknown_block);
    CHECK(t.chat.deallocate(h) == errc::none);
}

TEST_CASE("resizing keeps the handle and the bytes that both sizes have in common", "[memory][handles]") {
    tenants t;
    const auto h = t.chat.allocate(100, 16, "cache");
    std::memset(t.chat.pointer(h), 7, 100);
    CHECK(t.chat.resize(h, 300, std::memcpy) == errc::none);
    CHECK(t.upstream.bytes() == 300);
    const auto* seen = static_cast<const unsigned char*>(t.chat.pointer(h));
    CHECK(std::count(seen, seen + 100, 7) == 100);
    CHECK(t.chat.resize(h, 10, std::memcpy) == errc::none);
    CHECK(t.upstream.bytes() == 10);
    CHECK(t.table.find({1}, h)->label == "cache");

    t.upstream.fail_next();
    CHECK_THROWS_AS(t.chat.resize(h, 20, std::memcpy), std::bad_alloc);
    CHECK_THROWS_AS(t.chat.resize(h, 20, [](void*, const void*, std::size_t) { throw std::runtime_error("no copy"); }),
                    std::runtime_error);
    CHECK(t.upstream.bytes() == 10);
    CHECK(t.chat.deallocate(h) == errc::none);
    CHECK(t.upstream.wrong_frees() == 0);
}

TEST_CASE("a resize that fails says why and leaves the block unchanged", "[memory][handles]") {
    tenants t;
    const auto h = t.chat.allocate(64, 8);
    void* const before = t.chat.pointer(h);
    const auto copy = [](void* to, const void* from, std::size_t n) { std::memcpy(to, from, n); };
    t.upstream.fail_next();
    CHECK(t.chat.try_resize(h, 128, copy).code == errc::out_of_memory);
    CHECK(t.chat.try_resize(h, 128, [](void*, const void*, std::size_t) { throw std::runtime_error("no"); }).code ==
          errc::backend_failed);
    CHECK(
        t.chat
            .try_resize(h, 128, [](void*, const void*, std::size_t) { gpushare::raise({.code = errc::kernel_failed}); })
            .code == errc::kernel_failed);
    CHECK(t.code.try_resize(h, 128, copy).code == errc::unknown_block);
    CHECK(t.chat.pointer(h) == before);
    CHECK(t.upstream.blocks() == 1);
    CHECK(t.chat.try_resize(h, 128, copy).code == errc::none);
    CHECK(t.chat.pointer(h) != before);
    CHECK(t.chat.deallocate(h) == errc::none);
    CHECK(t.upstream.blocks() == 0);
}

TEST_CASE("a block that the upstream refuses to take back in a resize goes back when its handle is freed",
          "[memory][handles]") {
    refusing_memory upstream;
    handle_table table;
    handle_resource mine{table, tenant_tag{1}, upstream};
    const auto h = mine.allocate(64, 8);
    upstream.refuse(errc::capturing);
    const bool copies = GENERATE(true, false);
    if (copies) {
        CHECK(mine.resize(h, 128, std::memcpy) == errc::none);
    } else {
        const auto fail = [](void*, const void*, std::size_t) { throw std::runtime_error("no copy"); };
        CHECK_THROWS_AS(mine.resize(h, 128, fail), std::runtime_error);
    }
    CHECK(upstream.bytes() == 192);  // both
    const void* const there = mine.pointer(h);
    CHECK(mine.resize(h, 256, std::memcpy) == errc::capturing);
    CHECK(mine.try_resize(h, 256, [](void*, const void*, std::size_t) {}).code == errc::capturing);
    CHECK(mine.deallocate(h) == errc::capturing);
    CHECK(mine.pointer(h) == there);
    CHECK(upstream.bytes() == 192);
    upstream.refuse(errc::none);
    SECTION("with the next resize") {
        CHECK(mine.resize(h, 256, std::memcpy) == errc::none);
        CHECK(upstream.bytes() == 256);
    }
    SECTION("with its free") {}
    CHECK(mine.deallocate(h) == errc::none);
    CHECK(upstream.blocks() == 0);
    CHECK(upstream.wrong_frees() == 0);
    CHECK(table.size() == 0);
    const auto next = mine.allocate(8, 8);  // in the same place of the table
    CHECK(next.slot == h.slot);
    CHECK(mine.deallocate(next) == errc::none);
    CHECK(upstream.wrong_frees() == 0);
}

TEST_CASE("an allocation that fails leaves no handle behind", "[memory][handles]") {
    tenants t;
    t.upstream.fail_next();
    CHECK_THROWS_AS((void)t.chat.allocate(8, 8), std::bad_alloc);
    CHECK(t.table.size() == 0);
}

TEST_CASE("if several threads free one handle, one of them succeeds", "[memory][handles][threads]") {
    tenants t;
    std::vector<block_handle> handles;
    for (int i = 0; i < 500; ++i) handles.push_back(t.chat.allocate(8, 8));
    CHECK(std::set(handles.begin(), handles.end()).size() == 500);
    std::atomic<int> freed{0}, refused{0};
    support::together(3, [&](unsigned) {
        for (const auto h : handles) {
            (t.chat.deallocate(h) == errc::none ? freed : refused).fetch_add(1);
            (void)t.code.deallocate(t.code.allocate(8, 8));
        }
    });
    CHECK(freed.load() == 500);
    CHECK(refused.load() == 1'000);
    CHECK(t.upstream.blocks() == 0);
    CHECK(t.upstream.wrong_frees() == 0);
}
