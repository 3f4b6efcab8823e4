// SPDX-License-Identifier: Apache-2.0
// Growth over several chunks happens whole or not at all, whichever step fails, and no memory is
// lost.
#include <array>
#include <cstddef>
#include <utility>

#include <gpushare/error.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/units.hpp>

#include "support/arena_rig.hpp"
#include "support/catch.hpp"

using namespace gpushare::literals;
using gpushare::errc;
using gpushare::instant;
using gpushare::never;
using support::advanced;
using support::arena_rig;
using support::paint;
using support::painted;
using support::vm_call;

TEST_CASE("a commit that fails at any step is undone to the last chunk", "[memory][arena][fault]") {
    const auto [call, steps] = GENERATE(std::pair{vm_call::create, 6U}, std::pair{vm_call::map, 6U});
    for (std::size_t step = 1; step <= steps; ++step) {
        CAPTURE(step);
        arena_rig rig;
        auto arena = rig.arena(rig.chat, 1);
        arena.commit(rig.chunks(2), rig.chunks(2));
        paint(advanced(arena.data(), rig.chunks(2)), rig.chunks(2), 0x77);
        rig.memory.fail(call, step, errc::device_lost);
        CHECK(arena.try_commit(0_B, rig.chunks(8)).code == errc::device_lost);
        CHECK(arena.committed() == rig.chunks(2));
        CHECK(arena.leaving() == 0_B);
        CHECK(rig.chat.usage().current == rig.chunks(2));
        CHECK(rig.memory.mapped() == 2);
        CHECK(painted(advanced(arena.data(), rig.chunks(2)), rig.chunks(2), 0x77));
        CHECK(arena.try_commit(0_B, rig.chunks(8)).code == errc::none);
        CHECK(rig.chat.usage().current == rig.chunks(8));
        CHECK(painted(advanced(arena.data(), rig.chunks(2)), rig.chunks(2), 0x77));
        CHECK(rig.memory.wrong() == 0);
    }
}

TEST_CASE("a quota that refuses costs no chunk", "[memory][arena][fault]") {
    arena_rig rig;
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    CHECK(chat.try_commit(0_B, rig.chunks(13)).code == errc::over_quota);
    CHECK(rig.memory.calls(vm_call::create) == 0);
    code.commit(0_B, rig.chunks(10));
    const auto why = chat.try_commit(0_B, rig.chunks(7));
    CHECK(why.code == errc::out_of_memory);  // burst that code has
    CHECK(why.left == rig.chunks(6).count());
    CHECK(rig.chat.usage().current == 0_B);
    CHECK(chat.try_commit(0_B, rig.chunks(6)).code == errc::none);
    CHECK(rig.pool.usage().made == 16);
}

TEST_CASE("a pool that is empty refuses with what is left", "[memory][arena][fault]") {
    arena_rig rig({.capacity = 5});
    auto chat = rig.arena(rig.chat, 1);
    const auto why = chat.try_commit(0_B, rig.chunks(6));
    CHECK(why.code == errc::out_of_memory);
    CHECK(why.asked == rig.chunks(6).count());
    CHECK(why.left == rig.chunks(5).count());
    CHECK(why.limit == rig.chunks(5).count());
    CHECK(chat.try_commit(0_B, rig.chunks(5)).code == errc::none);
}

TEST_CASE("chunks that the memory doesn't let go of stay charged, and are asked for again", "[memory][arena][fault]") {
    arena_rig rig;
    auto arena = rig.arena(rig.chat, 1);
    SECTION("when given up") {
        arena.commit(0_B, rig.chunks(4));
        rig.memory.fail(vm_call::unmap, 1, errc::device_lost);
        CHECK(arena.try_decommit(0_B, rig.chunks(4), {}).code == errc::device_lost);
        CHECK(arena.committed() == rig.chunks(4));
        rig.memory.fail(vm_call::unmap, 1, errc::device_lost);
        CHECK(arena.try_decommit_after(0_B, rig.chunks(4), {}).code == errc::none);
        CHECK(arena.leaving() == rig.chunks(4));
    }
    SECTION("when a commit is undone") {
        rig.memory.fail(vm_call::map, 4);
        rig.memory.fail(vm_call::unmap, 1, errc::device_lost);
        CHECK(arena.try_commit(0_B, rig.chunks(4)).code == errc::out_of_memory);
        CHECK(arena.leaving() == rig.chunks(3));
        CHECK(rig.chat.usage().current == rig.chunks(3));
    }
    SECTION("when the arena ends") {
        arena.commit(0_B, rig.chunks(4));
        rig.memory.fail(vm_call::unmap, 1, errc::device_lost);
        CHECK(arena.close().code == errc::none);
        CHECK(arena.leaving() == rig.chunks(4));
    }
    CHECK(rig.chat.usage().current == arena.leaving());
    CHECK(rig.pool.collect());
    CHECK(arena.leaving() == 0_B);
    CHECK(rig.chat.usage().current == 0_B);
    CHECK(rig.memory.mapped() == 0);
    CHECK(rig.memory.wrong() == 0);
}

TEST_CASE("a pool doesn't hang at its end on memory that is lost", "[memory][arena][fault]") {
    arena_rig rig;
    {
        auto arena = rig.arena(rig.chat, 1);
        arena.commit(0_B, rig.chunks(2));
        rig.memory.fail(vm_call::unmap, 1, errc::device_lost, 100);
    }
    CHECK_FALSE(rig.pool.drain(never));
}

TEST_CASE("a pool isn't made without its chunks, addresses or sense", "[memory][arena][fault]") {
    arena_rig rig;
    const auto make = [&](gpushare::chunk_pool_options o) { gpushare::chunk_pool(rig.memory, rig.scrubber, o); };
    rig.memory.fail(vm_call::create, 3);
    CHECK_THROWS_AS(make({.capacity = 4, .initial = 4}), gpushare::memory_error);
    CHECK(rig.memory.chunks() == 0);
    CHECK_NOTHROW(make({.capacity = 4, .initial = 4}));
    CHECK_THROWS_AS(make({.capacity = 4, .initial = 5}), gpushare::operation_error);
    CHECK_THROWS_AS(make({.capacity = 4, .window = 0}), gpushare::operation_error);
    CHECK_THROWS_AS(make({.capacity = std::size_t{1} << 40}), gpushare::operation_error);
    rig.memory.fail(vm_call::reserve, 1);
    CHECK_THROWS_AS(rig.arena(rig.chat, 1), gpushare::memory_error);
    CHECK_NOTHROW(rig.arena(rig.chat, 1));
}
