// SPDX-License-Identifier: Apache-2.0
// The names of calls that wait before they took a patience: they forward, until 0.3 removes them.
#include <chrono>
#include <cstddef>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/serving/page_store.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/arena_rig.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/manual_scrubber.hpp"
#include "support/waiting.hpp"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace old_names_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using support::code_of;
using support::within;

/// The old names wait, so none of them can be called without a patience.
template <class Memory>
concept allocates_without_patience = requires(Memory& m) {
    m.allocate_until(std::size_t{1}, std::size_t{256});
};
static_assert(!allocates_without_patience<gpushare::tenancy<gpushare::host::node>::tenant::memory_type>);

TEST_CASE("the old names of calls that wait are those calls", "[tenant][memory]") {
    gpushare::host::node node{{.devices = 1, .memory = 64_MiB, .sms = 2}};
    gpushare::tenancy shared{node, {.stack = gpushare::memory_stack::direct}};
    auto a = shared.admit_until({.name = "a", .memory = 16_MiB}, within(1ms));
    CHECK(code_of([&] { (void)shared.admit_until({.name = "b", .memory = 65_MiB}, within(1ms)); }) == errc::no_room);
    a.resize_until({.memory = 32_MiB}, within(1ms));
    CHECK(a.spec().memory == 32_MiB);
    CHECK(a.declare_workspace_until(24_MiB, within(1ms)).size() == 24_MiB);

    auto& memory = a.memory();
    const std::size_t size = 8 << 20, alignment = 256;
    void* const p = memory.allocate_until(size, alignment, within(1ms), "label");
    void* const q = memory.allocate_until(24_MiB, within(1ms));
    gpushare::failure why;
    CHECK(memory.try_allocate_until(size, alignment, within(1ms), &why) == nullptr);
    CHECK(why.code == errc::deadline_exceeded);
    CHECK(gpushare::charge_until(memory.limit(), 1_MiB, within(1ms)).code == errc::deadline_exceeded);
    CHECK(memory.deallocate(p, size, alignment) == errc::none);
    CHECK(memory.deallocate(q, 24_MiB) == errc::none);

    support::arena_rig rig;
    auto arena = rig.arena(rig.chat, 1);
    arena.commit_until(0_B, rig.chunks(12), within(1ms));
    CHECK(code_of([&] { arena.commit_until(0_B, rig.chunks(13), within(1ms)); }) == errc::deadline_exceeded);
    gpushare::page_store<support::arena_rig::memory_type, support::manual_scrubber> pages(
        rig.pool, rig.chat, {2}, {.token = 64_B, .tokens = 16, .pages = 4}, "chat");
    std::vector<std::uint32_t> one(1);
    CHECK(pages.try_allocate_until(one, within(1ms)).code == errc::deadline_exceeded);
}

}  // namespace old_names_test

#pragma GCC diagnostic pop
