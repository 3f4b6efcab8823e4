// SPDX-License-Identifier: Apache-2.0
// Memory that changes hands between arenas holds no data of its last owner, and is scrubbed where
// necessary and no more often.
#include <array>
#include <cstdint>

#include <gpushare/error.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/units.hpp>

#include "support/arena_rig.hpp"
#include "support/catch.hpp"

using namespace gpushare::literals;
using gpushare::errc;
using gpushare::instant;
using gpushare::never;
using gpushare::scrub_policy;
using gpushare::tenant_tag;
using support::advanced;
using support::arena_rig;
using support::paint;
using support::painted;

namespace {

constexpr instant now{};

/// `n` chunks full of chat's secrets, free again.
template <class Rig>
void leave_secrets(Rig& rig, typename Rig::arena_type& chat, std::uint64_t n) {
    chat.commit(0_B, rig.chunks(n), never);
    paint(chat.data(), rig.chunks(n), 0x5e);
    chat.decommit(0_B, rig.chunks(n), {});
}

}  // namespace

TEST_CASE("a chunk that changes hands holds zeros, every byte of it", "[memory][arena][scrub]") {
    arena_rig rig({.capacity = 12, .window = 4});
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    leave_secrets(rig, chat, 12);
    // More than the window holds: in several rounds.
    rig.scrubber.by_itself();
    code.commit(0_B, rig.chunks(12), never);
    CHECK(painted(code.data(), rig.chunks(12), 0));
    CHECK(rig.scrubber.filled() == rig.chunks(12).count());
    CHECK(rig.memory.chunks() == 12);
    CHECK(rig.memory.wrong() == 0);
}

TEST_CASE("a chunk is mapped for its next owner only when the scrubbing is done", "[memory][arena][scrub]") {
    arena_rig rig({.capacity = 2});
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    leave_secrets(rig, chat, 2);
    CHECK(code.try_commit(0_B, rig.chunks(2), now).code == errc::deadline_exceeded);
    CHECK_FALSE(rig.memory.at(code.data()));
    CHECK(code.committed() == 0_B);
    CHECK(rig.code.usage().current == 0_B);
    CHECK(rig.pool.usage().scrubbing == 2);
    CHECK(code.try_commit(0_B, rig.chunks(2), now).code == errc::deadline_exceeded);  // goes on, isn't begun again
    CHECK(rig.scrubber.filled() == rig.chunks(2).count());
    rig.scrubber.reach_next();
    CHECK(code.try_commit(0_B, rig.chunks(2), now).code == errc::none);
    CHECK(painted(code.data(), rig.chunks(2), 0));
}

TEST_CASE("a tenant gets its own chunks back unscrubbed", "[memory][arena][scrub]") {
    arena_rig rig;
    auto chat = rig.arena(rig.chat, 1), more = rig.arena(rig.chat, 1);
    leave_secrets(rig, chat, 3);
    CHECK(rig.pool.usage(tenant_tag{1}).kept == 3);
    more.commit(0_B, rig.chunks(3));
    CHECK(rig.memory.chunks() == 3);
    CHECK(rig.scrubber.filled() == 0);
    CHECK(rig.pool.usage(tenant_tag{1}).out == 3);
}

TEST_CASE("the next tenant of a tag that was given up sees nothing of the last one", "[memory][arena][scrub]") {
    arena_rig rig;
    {
        auto chat = rig.arena(rig.chat, 1);
        leave_secrets(rig, chat, 3);
    }
    auto next = rig.arena(rig.chat, 1);
    CHECK(next.try_commit(0_B, rig.chunks(1), now).code == errc::none);  // a new chunk
    CHECK(painted(next.data(), rig.chunk, 0));
    rig.scrubber.by_itself();
    auto others = rig.arena(rig.code, 2);
    others.commit(0_B, rig.chunks(4), never);
    next.commit(0_B, rig.chunks(12), never);
    CHECK(rig.memory.chunks() == 16);  // all there are
    CHECK(painted(next.data(), rig.chunks(12), 0));
}

TEST_CASE("scrubbing ahead makes hand-overs immediate", "[memory][arena][scrub]") {
    arena_rig rig;
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    leave_secrets(rig, chat, 6);
    CHECK(rig.pool.scrub_ahead(3) == 3);
    CHECK(rig.pool.scrub_ahead(3) == 1);  // the window has four slots
    CHECK(rig.pool.scrub_ahead(3) == 0);
    rig.scrubber.reach_next();
    rig.scrubber.reach_next();
    CHECK(rig.pool.collect());
    CHECK(rig.pool.usage().clean == 4);
    CHECK(rig.pool.usage().dirty == 2);
    code.commit(0_B, rig.chunks(4), now);
    CHECK(painted(code.data(), rig.chunks(4), 0));
}

TEST_CASE("scrubbing on free leaves nothing behind, not even for its owner", "[memory][arena][scrub]") {
    arena_rig rig({.capacity = 12, .scrub = scrub_policy::on_free, .window = 4});
    auto chat = rig.arena(rig.chat, 1);
    leave_secrets(rig, chat, 6);
    CHECK(rig.pool.usage().scrubbing == 4);
    CHECK(rig.pool.usage().dirty == 2);
    CHECK(chat.try_commit(0_B, rig.chunks(12), now).code == errc::deadline_exceeded);
    while (rig.scrubber.reach_next()) rig.pool.collect();
    CHECK(rig.pool.usage().clean == 12);
    chat.commit(0_B, rig.chunks(12), now);
    CHECK(painted(chat.data(), rig.chunks(12), 0));
}

TEST_CASE("scrubbing on free doesn't go on for ever on a device that is lost", "[memory][arena][scrub]") {
    arena_rig rig({.capacity = 6, .scrub = scrub_policy::on_free, .window = 4});
    auto chat = rig.arena(rig.chat, 1);
    rig.scrubber.by_itself(errc::device_lost);
    leave_secrets(rig, chat, 6);
    CHECK(rig.pool.drain(never));
    CHECK(rig.pool.usage().dirty == 6);
    CHECK(chat.try_commit(0_B, rig.chunks(1), never).code == errc::device_lost);
}

TEST_CASE("nothing is scrubbed between tenants that trust each other", "[memory][arena][scrub]") {
    arena_rig rig({.capacity = 6, .scrub = scrub_policy::off});
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    leave_secrets(rig, chat, 6);
    code.commit(0_B, rig.chunks(6), now);
    CHECK(rig.scrubber.filled() == 0);
}

TEST_CASE("new chunks are scrubbed where the memory doesn't clear them", "[memory][arena][scrub]") {
    support::basic_arena_rig<false> rig;
    rig.scrubber.by_itself();
    auto chat = rig.arena(rig.chat, 1);
    CHECK(chat.try_commit(0_B, rig.chunks(3), now).code != errc::out_of_memory);
    chat.commit(0_B, rig.chunks(3), never);
    CHECK(rig.scrubber.filled() == rig.chunks(3).count());
}

TEST_CASE("a chunk whose scrubbing failed is given to nobody", "[memory][arena][scrub]") {
    arena_rig rig({.capacity = 4, .window = 4});
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    leave_secrets(rig, chat, 4);
    SECTION("on the device") {
        rig.scrubber.by_itself(errc::device_lost);
        CHECK(code.try_commit(0_B, rig.chunks(2), never).code == errc::device_lost);
    }
    SECTION("because the stream takes no more") {
        rig.scrubber.fail_next_fill();
        CHECK(code.try_commit(0_B, rig.chunks(1), never).code == errc::submission_failed);
    }
    SECTION("because the window can't be mapped") {
        rig.memory.fail(support::vm_call::map, 1);
        CHECK(code.try_commit(0_B, rig.chunks(1), never).code == errc::out_of_memory);
    }
    SECTION("because there are no addresses for the window") {
        rig.memory.fail(support::vm_call::reserve, 1);
        CHECK(code.try_commit(0_B, rig.chunks(1), never).code == errc::out_of_memory);
    }
    CHECK(code.committed() == 0_B);
    CHECK(rig.code.usage().current == 0_B);
    CHECK(rig.pool.usage().dirty == 4);
    rig.memory.heal();
    rig.scrubber.by_itself();
    code.commit(0_B, rig.chunks(4), never);
    CHECK(painted(code.data(), rig.chunks(4), 0));
    CHECK(rig.memory.wrong() == 0);
}

TEST_CASE("a scrubbing without a point is asked for one again", "[memory][arena][scrub]") {
    arena_rig rig({.capacity = 12});
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    leave_secrets(rig, chat, 12);
    rig.scrubber.fail_next_record();
    rig.scrubber.by_itself();
    CHECK(code.try_commit(0_B, rig.chunks(12), never).code == errc::none);
    CHECK(painted(code.data(), rig.chunks(12), 0));
}

TEST_CASE("a hand-over waits, scrubs and maps the very chunks", "[memory][arena][scrub]") {
    arena_rig rig;
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    chat.commit(0_B, rig.chunks(8));
    paint(chat.data(), rig.chunks(8), 0x5e);
    const auto third = rig.memory.at(advanced(chat.data(), rig.chunks(2)));
    const std::array used{rig.kernels.record()};
    CHECK(chat.try_hand_over(rig.chunks(2), rig.chunks(6), code, rig.chunks(1), used, now).code ==
          errc::deadline_exceeded);
    CHECK(chat.committed() == rig.chunks(8));
    rig.kernels.reach_next();
    rig.scrubber.by_itself();
    chat.hand_over(rig.chunks(2), rig.chunks(6), code, rig.chunks(1), used);
    CHECK(chat.committed() == rig.chunks(2));
    CHECK(code.committed() == rig.chunks(6));
    CHECK(rig.chat.usage().current == rig.chunks(2));
    CHECK(rig.code.usage().current == rig.chunks(6));
    CHECK(rig.memory.at(advanced(code.data(), rig.chunks(1))) == third);
    CHECK(painted(advanced(code.data(), rig.chunks(1)), rig.chunks(6), 0));
    CHECK(painted(chat.data(), rig.chunks(2), 0x5e));
    CHECK(rig.pool.usage(tenant_tag{2}).out == 6);
    CHECK(rig.memory.chunks() == 8);
    CHECK(rig.memory.wrong() == 0);
}

TEST_CASE("between arenas of one tenant contents are handed over as well", "[memory][arena][scrub]") {
    arena_rig rig;
    auto chat = rig.arena(rig.chat, 1), more = rig.arena(rig.chat, 1);
    chat.commit(0_B, rig.chunks(12));  // all of the quota: no second charge
    for (std::uint64_t n = 0; n < 12; ++n) paint(advanced(chat.data(), rig.chunks(n)), rig.chunk, static_cast<int>(n));
    chat.hand_over(0_B, rig.chunks(6), more, rig.chunks(4), {});
    chat.hand_over(rig.chunks(6), rig.chunks(1), chat, 0_B, {});  // within one range as well
    for (std::uint64_t n = 0; n < 6; ++n)
        CHECK(painted(advanced(more.data(), rig.chunks(4 + n)), rig.chunk, static_cast<int>(n)));
    CHECK(painted(chat.data(), rig.chunk, 6));
    CHECK(rig.chat.usage().current == rig.chunks(12));
    CHECK(rig.scrubber.filled() == 0);
}

TEST_CASE("a hand-over isn't refused for want of the very bytes that change hands", "[memory][arena][scrub]") {
    arena_rig rig;
    rig.scrubber.by_itself();
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    chat.commit(0_B, rig.chunks(12));  // all the burst there is
    code.commit(0_B, rig.chunks(4));
    CHECK(rig.whole.free() == 0_B);
    chat.hand_over(0_B, rig.chunks(8), code, rig.chunks(8), {});
    CHECK(rig.chat.usage().current == rig.chunks(4));
    CHECK(rig.code.usage().current == rig.chunks(12));
    CHECK(painted(advanced(code.data(), rig.chunks(8)), rig.chunks(8), 0));
}

TEST_CASE("a hand-over that is refused changes nothing", "[memory][arena][scrub]") {
    arena_rig rig;
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    chat.commit(0_B, rig.chunks(8));
    paint(chat.data(), rig.chunks(8), 0x5e);
    SECTION("by the other's quota") {
        code.commit(0_B, rig.chunks(5));
        CHECK(chat.try_hand_over(0_B, rig.chunks(8), code, rig.chunks(8), {}).code == errc::over_quota);
        code.decommit(0_B, rig.chunks(5), {});
    }
    SECTION("because of burst that isn't there") {
        // chat's eight: four guaranteed to it, four of the eight that are burst; a third tenant has
        // the rest.
        gpushare::quota third{rig.whole, 0_B, rig.chunks(4)};
        REQUIRE(third.try_charge(rig.chunks(4)) == errc::none);
        auto all_burst = rig.arena(third, 3);
        CHECK(chat.try_hand_over(0_B, rig.chunks(8), all_burst, 0_B, {}).code == errc::over_quota);
        gpushare::quota fourth{rig.whole, 0_B, rig.chunks(8)};
        auto other = rig.arena(fourth, 4);
        CHECK(chat.try_hand_over(0_B, rig.chunks(8), other, 0_B, {}).code == errc::out_of_memory);
        CHECK(third.release(rig.chunks(4)));
    }
    SECTION("because something is there") {
        code.commit(rig.chunks(2), rig.chunks(1));
        CHECK(chat.try_hand_over(0_B, rig.chunks(8), code, 0_B, {}).code == errc::invalid_specification);
        code.decommit(rig.chunks(2), rig.chunks(1), {});
    }
    SECTION("because it isn't all there") {
        CHECK(chat.try_hand_over(rig.chunks(1), rig.chunks(8), code, 0_B, {}).code == errc::unknown_block);
        CHECK_THROWS_AS(chat.hand_over(rig.chunks(1), rig.chunks(8), code, 0_B, {}), gpushare::operation_error);
    }
    SECTION("because the memory doesn't let go") {
        rig.memory.fail(support::vm_call::unmap, 1, errc::device_lost);
        CHECK(chat.try_hand_over(0_B, rig.chunks(8), code, 0_B, {}).code == errc::device_lost);
    }
    SECTION("to another pool") {
        arena_rig elsewhere;
        auto foreign = elsewhere.arena(elsewhere.code, 2);
        CHECK(chat.try_hand_over(0_B, rig.chunks(8), foreign, 0_B, {}).code == errc::invalid_specification);
    }
    CHECK(painted(chat.data(), rig.chunks(8), 0x5e));
    CHECK(chat.committed() == rig.chunks(8));
    CHECK(rig.chat.usage().current == rig.chunks(8));
    CHECK(rig.code.usage().current == 0_B);
}

TEST_CASE("a hand-over that fails half way leaves the bytes to the pool, uncharged", "[memory][arena][scrub]") {
    arena_rig rig;
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    chat.commit(0_B, rig.chunks(8));
    paint(chat.data(), rig.chunks(8), 0x5e);
    SECTION("at the deadline") {
        CHECK(chat.try_hand_over(0_B, rig.chunks(8), code, 0_B, {}, now).code == errc::deadline_exceeded);
        CHECK(rig.pool.usage().scrubbing == 4);
        CHECK(rig.pool.usage().dirty == 4);
    }
    SECTION("because of the device") {
        rig.scrubber.by_itself(errc::device_lost);
        CHECK(chat.try_hand_over(0_B, rig.chunks(8), code, 0_B, {}).code == errc::device_lost);
    }
    SECTION("because the stream takes no more") {
        rig.scrubber.by_itself();
        rig.scrubber.fail_next_fill();
        CHECK(chat.try_hand_over(0_B, rig.chunks(8), code, 0_B, {}).code == errc::submission_failed);
    }
    SECTION("because of a map") {
        rig.scrubber.by_itself();
        rig.memory.fail(support::vm_call::map, 8 + 5);  // scrubbed, and the fifth of the new ones
        CHECK(chat.try_hand_over(0_B, rig.chunks(8), code, 0_B, {}).code == errc::out_of_memory);
    }
    CHECK(rig.chat.usage().current == 0_B);
    CHECK(rig.code.usage().current == 0_B);
    CHECK(chat.committed() + code.committed() + chat.leaving() + code.leaving() == 0_B);
    rig.memory.heal();
    rig.scrubber.by_itself();
    CHECK(rig.pool.drain(never));
    code.commit(0_B, rig.chunks(12), never);
    CHECK(painted(code.data(), rig.chunks(12), 0));
    CHECK(rig.memory.wrong() == 0);
}
