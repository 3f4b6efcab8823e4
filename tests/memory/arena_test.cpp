// SPDX-License-Identifier: Apache-2.0
// Virtual arenas: memory comes and goes under fixed addresses, is charged exactly, and leaves only
// when the streams that use it have reached that point.
#include <array>
#include <chrono>
#include <limits>
#include <optional>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/units.hpp>

#include "support/arena_rig.hpp"
#include "support/catch.hpp"
#include "support/waiting.hpp"

namespace arena_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::instant;
using gpushare::never;
using gpushare::ns;
using support::advanced;
using support::arena_rig;
using support::paint;
using support::painted;

namespace {
constexpr instant now{};  // for those who don't wait
}

TEST_CASE("growing moves no pointer and keeps what is there", "[memory][arena]") {
    arena_rig rig;
    auto arena = rig.arena(rig.chat, 1);
    void* const begin = arena.data();
    CHECK(arena.reserved() == rig.chunks(16));
    CHECK(arena.committed() == 0_B);
    CHECK(rig.chat.usage().current == 0_B);
    for (std::uint64_t n = 1; n <= 12; ++n) {
        arena.commit(0_B, rig.chunks(n));
        CHECK(arena.data() == begin);
        CHECK(arena.committed() == rig.chunks(n));
        CHECK(rig.chat.usage().current == rig.chunks(n));
        paint(advanced(begin, rig.chunks(n - 1)), rig.chunk, static_cast<int>(n));
    }
    for (std::uint64_t n = 1; n <= 12; ++n)
        CHECK(painted(advanced(begin, rig.chunks(n - 1)), rig.chunk, static_cast<int>(n)));
}

TEST_CASE("several ranges are committed together or not at all", "[memory][arena]") {
    arena_rig rig;
    rig.scrubber.by_itself();
    auto lanes = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    const auto range = [&](std::uint64_t first, std::uint64_t count) {
        return gpushare::arena_range{rig.chunks(first), rig.chunks(count)};
    };
    lanes.commit(std::array{range(0, 1), range(4, 2), range(6, 0), range(15, 1)});
    CHECK(lanes.committed() == rig.chunks(4));
    CHECK(rig.chat.usage().current == rig.chunks(4));
    for (const std::uint64_t i : {0U, 4U, 5U, 15U}) paint(advanced(lanes.data(), rig.chunks(i)), rig.chunk, 7);
    // What is there stays, and only what is missing is charged.
    lanes.commit(std::array{range(0, 2), range(3, 4), range(14, 2)});
    CHECK(rig.chat.usage().current == rig.chunks(8));
    for (const std::uint64_t i : {0U, 4U, 5U, 15U}) CHECK(painted(advanced(lanes.data(), rig.chunks(i)), rig.chunk, 7));
    // 12 may be there: one too many, and none comes. The same where the driver fails at any of
    // them.
    CHECK(lanes.try_commit(std::array{range(0, 4), range(7, 4), range(14, 1)}).code == errc::over_quota);
    CHECK(rig.chat.usage().current == rig.chunks(8));
    for (std::size_t nth = 1; nth <= 4; ++nth) {
        rig.memory.fail(support::vm_call::map, nth);
        CHECK(lanes.try_commit(std::array{range(1, 2), range(7, 2), range(12, 1)}).code == errc::out_of_memory);
        rig.pool.collect();
        CHECK(rig.chat.usage().current == rig.chunks(8));
        CHECK(lanes.committed() == rig.chunks(8));
        CHECK(lanes.leaving() == 0_B);
    }
    lanes.commit(std::array{range(1, 2), range(7, 2), range(12, 1)});
    CHECK(rig.chat.usage().current == rig.chunks(12));
    // Ranges that overlap would be charged twice.
    const auto code_of = [&](auto... ranges) { return code.try_commit(std::array{ranges...}).code; };
    CHECK(code_of(range(0, 2), range(1, 1)) == errc::invalid_specification);
    CHECK(code_of(range(4, 1), range(0, 1)) == errc::invalid_specification);
    CHECK(code_of(range(0, 1), range(15, 2)) == errc::size_overflow);
    CHECK(code_of(range(0, 1), gpushare::arena_range{rig.chunks(2), 1_B}) == errc::not_whole);
    CHECK(code.try_commit(std::span<const gpushare::arena_range>{}).code == errc::none);
    CHECK(rig.code.usage().current == 0_B);
    const gpushare::patience late{gpushare::host::steady_clock{}, gpushare::host::steady_clock{}.now()};
    CHECK(lanes.try_commit(std::array{range(0, 4), range(9, 1)}, late).code == errc::deadline_exceeded);
    CHECK(rig.chat.usage().current == rig.chunks(12));
}

TEST_CASE("memory moves between tenants without being copied or made anew (rmm 1109)", "[memory][arena]") {
    arena_rig rig({.capacity = 12});
    rig.scrubber.by_itself();
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    chat.commit(0_B, rig.chunks(12));
    const auto first = rig.memory.at(chat.data());
    chat.decommit(0_B, rig.chunks(12), {});
    code.commit(0_B, rig.chunks(12), never);
    CHECK(rig.memory.chunks() == 12);
    CHECK(rig.pool.usage().made == 12);
    bool there = false;
    for (std::uint64_t n = 0; n < 12; ++n) there |= rig.memory.at(advanced(code.data(), rig.chunks(n))) == first;
    CHECK(there);
    CHECK(rig.chat.usage().current == 0_B);
    CHECK(rig.code.usage().current == rig.chunks(12));
}

TEST_CASE("any place of the range can be committed and given up", "[memory][arena]") {
    arena_rig rig;
    auto arena = rig.arena(rig.chat, 1);
    arena.commit(rig.chunks(3), rig.chunks(2));
    arena.commit(rig.chunks(15), rig.chunks(1));
    paint(advanced(arena.data(), rig.chunks(3)), rig.chunks(2), 1);
    paint(advanced(arena.data(), rig.chunks(15)), rig.chunk, 2);
    arena.decommit(rig.chunks(4), rig.chunks(1), {});
    CHECK(arena.committed() == rig.chunks(2));
    arena.commit(rig.chunks(2), rig.chunks(3));  // what is there stays
    CHECK(painted(advanced(arena.data(), rig.chunks(3)), rig.chunk, 1));
    CHECK(painted(advanced(arena.data(), rig.chunks(15)), rig.chunk, 2));
    CHECK(arena.committed() == rig.chunks(4));
    CHECK(rig.chat.usage().current == rig.chunks(4));
    CHECK(arena.try_commit(rig.chunks(2), rig.chunks(3)).code == errc::none);
    CHECK(rig.chat.usage().current == rig.chunks(4));
}

// The driver's unmapping isn't stream-ordered: PEERS and DESIGN call it a trap.
TEST_CASE("nothing is unmapped before every stream that uses it has reached its point", "[memory][arena]") {
    arena_rig rig;
    auto chat = rig.arena(rig.chat, 1);
    chat.commit(0_B, rig.chunks(4));
    auto other = rig.scrubber.neighbour();
    const std::array used{rig.kernels.record(), other.record()};

    const auto why = chat.try_decommit(0_B, rig.chunks(4), used, now);
    CHECK(why.code == errc::deadline_exceeded);
    rig.kernels.reach_next();
    CHECK(chat.try_decommit(0_B, rig.chunks(4), used, now).code == errc::deadline_exceeded);
    CHECK(rig.memory.mapped() == 4);
    CHECK(chat.committed() == rig.chunks(4));
    paint(chat.data(), rig.chunks(4), 7);  // all is as it was
    CHECK(rig.memory.calls(support::vm_call::unmap) == 0);

    other.reach_next();
    CHECK(chat.try_decommit(0_B, rig.chunks(4), used, now).code == errc::none);
    CHECK(rig.memory.mapped() == 0);
    CHECK(rig.chat.usage().current == 0_B);
}

TEST_CASE("chunks that leave later stay mapped and charged until their points are reached", "[memory][arena]") {
    arena_rig rig;
    auto chat = rig.arena(rig.chat, 1);
    chat.commit(0_B, rig.chunks(4));
    paint(chat.data(), rig.chunks(4), 7);
    chat.decommit_after(rig.chunks(1), rig.chunks(3), std::array{rig.kernels.record()});
    CHECK(chat.committed() == rig.chunks(1));
    CHECK(chat.leaving() == rig.chunks(3));
    CHECK(rig.chat.usage().current == rig.chunks(4));
    CHECK(rig.pool.usage().leaving == 3);
    CHECK_FALSE(rig.pool.collect());
    CHECK(painted(chat.data(), rig.chunks(4), 7));  // the kernel's view
    CHECK(chat.try_decommit(rig.chunks(1), rig.chunks(1), {}).code == errc::unknown_block);
    CHECK(chat.try_decommit_after(rig.chunks(0), rig.chunks(2), {}).code == errc::unknown_block);

    rig.kernels.reach_next();
    CHECK(rig.pool.collect());
    CHECK(chat.leaving() == 0_B);
    CHECK(rig.chat.usage().current == rig.chunks(1));
    CHECK(rig.memory.mapped() == 1);
}

TEST_CASE("a refusal comes only after what was reached has come back", "[memory][arena]") {
    arena_rig rig;
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    chat.commit(0_B, rig.chunks(12));
    code.commit(0_B, rig.chunks(4));
    chat.decommit_after(0_B, rig.chunks(12), std::array{rig.kernels.record()});
    SECTION("over the own quota") {
        CHECK(chat.try_commit(rig.chunks(12), rig.chunks(1)).code == errc::over_quota);
        rig.kernels.reach_next();
        CHECK(chat.try_commit(rig.chunks(12), rig.chunks(4)).code == errc::none);
        CHECK(chat.committed() == rig.chunks(4));
    }
    SECTION("beyond what another tenant's burst leaves, or the pool has") {
        CHECK(code.try_commit(rig.chunks(4), rig.chunks(8)).code == errc::out_of_memory);
        rig.kernels.reach_next();
        CHECK(code.try_commit(rig.chunks(4), rig.chunks(8)).code == errc::deadline_exceeded);  // to be scrubbed first
        rig.scrubber.by_itself();
        CHECK(code.try_commit(rig.chunks(4), rig.chunks(8), never).code == errc::none);
    }
    SECTION("one that may wait, waits for it") {
        rig.work_by_itself();
        CHECK(code.try_commit(rig.chunks(4), rig.chunks(8), never).code == errc::none);
        CHECK(code.committed() == rig.chunks(12));
    }
    CHECK(rig.memory.wrong() == 0);
}

TEST_CASE("chunks that were about to leave can be committed again, with their contents", "[memory][arena]") {
    arena_rig rig;
    auto chat = rig.arena(rig.chat, 1);
    chat.commit(0_B, rig.chunks(4));
    paint(chat.data(), rig.chunks(4), 7);
    const auto first = rig.kernels.record(), second = rig.kernels.record();
    chat.decommit_after(0_B, rig.chunks(4), std::array{first});
    chat.commit(rig.chunks(1), rig.chunks(2));
    CHECK(chat.committed() == rig.chunks(2));
    CHECK(rig.chat.usage().current == rig.chunks(4));
    // Given up a second time: the first departure must not take it along.
    chat.decommit_after(rig.chunks(1), rig.chunks(1), std::array{second});
    rig.kernels.reach_next();
    CHECK(rig.pool.collect());
    CHECK(rig.memory.mapped() == 2);
    CHECK(painted(advanced(chat.data(), rig.chunks(1)), rig.chunks(2), 7));
    CHECK(rig.chat.usage().current == rig.chunks(2));
    rig.kernels.reach_next();
    CHECK(rig.pool.collect());
    CHECK(rig.chat.usage().current == rig.chunks(1));
    CHECK(chat.committed() == rig.chunks(1));
}

TEST_CASE("offsets and sizes that can't be are refused and change nothing", "[memory][arena]") {
    arena_rig rig;
    auto arena = rig.arena(rig.chat, 1), other = rig.arena(rig.chat, 1);
    const bytes huge{std::numeric_limits<std::uint64_t>::max() & ~(rig.chunk.count() - 1)};
    for (const auto& [offset, size, code] : {std::tuple{1_B, rig.chunk, errc::not_whole},
                                             {0_B, 1_B, errc::not_whole},
                                             {0_B, bytes::max(), errc::not_whole},
                                             {0_B, rig.chunks(17), errc::size_overflow},
                                             {rig.chunks(16), rig.chunk, errc::size_overflow},
                                             {huge, rig.chunk, errc::size_overflow},
                                             {rig.chunk, huge, errc::size_overflow},
                                             {huge, huge, errc::size_overflow}}) {
        CHECK(arena.try_commit(offset, size).code == code);
        CHECK(arena.try_decommit(offset, size, {}).code == code);
        CHECK(arena.try_decommit_after(offset, size, {}).code == code);
        CHECK(arena.try_hand_over(offset, size, other, 0_B, {}).code == code);
        CHECK(other.try_hand_over(0_B, size, arena, offset, {}).code == code);
    }
    CHECK(arena.try_commit(0_B, 0_B).code == errc::none);
    CHECK(arena.try_commit(rig.chunks(16), 0_B).code == errc::none);
    CHECK(arena.try_decommit(0_B, 0_B, {}).code == errc::none);
    CHECK(arena.try_decommit(0_B, rig.chunk, {}).code == errc::unknown_block);
    CHECK(arena.committed() == 0_B);
    CHECK(rig.chat.usage().charges == 0);
    CHECK_THROWS_AS(rig.arena(rig.chat, 1, 0), gpushare::operation_error);
    CHECK_THROWS_AS(arena_rig::arena_type(rig.pool, rig.chat, {1}, rig.chunk + 1_B), gpushare::operation_error);
}

TEST_CASE("errors name the tenant and the figures", "[memory][arena]") {
    arena_rig rig;
    auto arena = rig.arena(rig.chat, 1);
    try {
        arena.commit(0_B, rig.chunks(13));
        FAIL("13 chunks of 12");
    } catch (const gpushare::memory_error& e) {
        CHECK(e.code() == errc::over_quota);
        CHECK(e.tenant() == "chat");
        CHECK(std::string_view(e.what()) ==
              "tenant 'chat': commit: asked for 208 KiB, 192 KiB of 192 KiB left (over the quota)");
    }
    CHECK_THROWS_AS(arena.decommit(0_B, rig.chunk, {}), gpushare::operation_error);
    CHECK_THROWS_AS(arena.decommit_after(0_B, rig.chunk, {}), gpushare::operation_error);
}

TEST_CASE("an arena that ends gives all back, what is in use when the streams got there", "[memory][arena]") {
    arena_rig rig;
    {
        std::optional chat(rig.arena(rig.chat, 1));
        chat->commit(0_B, rig.chunks(6));
        chat->decommit_after(rig.chunks(2), rig.chunks(2), std::array{rig.kernels.record()});
        void* const leaving = advanced(chat->data(), rig.chunks(2));
        paint(leaving, rig.chunks(2), 9);
        chat.reset();
        CHECK(rig.chat.usage().current == rig.chunks(2));
        CHECK(rig.memory.mapped() == 2);
        CHECK(painted(leaving, rig.chunks(2), 9));  // the kernel goes on
    }
    CHECK_FALSE(rig.pool.drain(now));
    rig.kernels.reach_next();
    CHECK(rig.pool.drain(now));
    CHECK(rig.chat.usage().current == 0_B);
    CHECK(rig.memory.mapped() == 0);
    CHECK(rig.pool.usage(gpushare::tenant_tag{1}).kept == 0);  // nobody's now
    CHECK(rig.pool.usage().dirty == 6);
}

TEST_CASE("a request that can never fit is refused without a wait for others' memory", "[memory][arena]") {
    arena_rig rig;
    gpushare::quota large{rig.chunks(64)};
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2), beyond = rig.arena(large, 3, 32);
    code.commit(0_B, rig.chunk);
    code.decommit_after(0_B, rig.chunk, std::array{rig.kernels.record()});
    int waits = 0;
    rig.kernels.on_wait([&] {
        ++waits;
        rig.kernels.reach_all();
        while (rig.scrubber.reach_next()) {
        }
    });
    CHECK(chat.try_commit(0_B, rig.chunks(13), never).code == errc::over_quota);
    CHECK(beyond.try_commit(0_B, rig.chunks(17), never).code == errc::out_of_memory);
    CHECK(waits == 0);
    CHECK(beyond.try_commit(0_B, rig.chunks(16), never).code == errc::none);  // for which the wait is worth it
    CHECK(waits != 0);
}

TEST_CASE("bytes of a quota are awaited only where they come back to its tree", "[memory][arena]") {
    gpushare::quota elsewhere{arena_rig::chunks(2)};  // lives until its chunks are back
    arena_rig rig;
    auto chat = rig.arena(rig.chat, 1), other = rig.arena(elsewhere, 3);
    chat.commit(0_B, rig.chunks(12));
    other.commit(0_B, rig.chunks(2));
    other.decommit_after(0_B, rig.chunk, std::array{rig.kernels.record()});
    int waits = 0;
    rig.kernels.on_wait([&] {
        ++waits;
        rig.kernels.reach_all();
        while (rig.scrubber.reach_next()) {
        }
    });
    CHECK(chat.try_commit(rig.chunks(12), rig.chunk, never).code == errc::over_quota);
    CHECK(waits == 0);
    SECTION("its own") {
        chat.decommit_after(0_B, rig.chunk, std::array{rig.kernels.record()});
        CHECK(chat.try_commit(rig.chunks(12), rig.chunk, never).code == errc::none);
        CHECK(waits != 0);
    }
    SECTION("not those of a quota that is gone") {
        {
            gpushare::quota brief{rig.chunk};
            auto guest = rig.arena(brief, 4);
            guest.commit(0_B, rig.chunk);
            guest.decommit_after(0_B, rig.chunk, std::array{rig.kernels.record()});
            guest.commit(0_B, rig.chunk);  // the chunk stays, and the point is open
            guest.decommit(0_B, rig.chunk, {});
        }
        CHECK(chat.try_commit(rig.chunks(12), rig.chunk, never).code == errc::over_quota);
        CHECK(waits == 0);
    }
}

TEST_CASE("closing gives all back after its points, and takes no more", "[memory][arena]") {
    arena_rig rig;
    auto chat = rig.arena(rig.chat, 1), code = rig.arena(rig.code, 2);
    chat.commit(0_B, rig.chunks(3));
    code.commit(0_B, rig.chunks(1));
    const std::array used{rig.kernels.record()};
    CHECK(chat.close(used).code == errc::none);
    CHECK(chat.close(used).code == errc::closed);
    CHECK(chat.try_commit(0_B, rig.chunks(1)).code == errc::closed);
    CHECK(code.try_hand_over(0_B, rig.chunks(1), chat, rig.chunks(8), {}).code == errc::closed);
    CHECK(chat.leaving() == rig.chunks(3));
    rig.kernels.reach_next();
    rig.pool.collect();
    CHECK(chat.leaving() == 0_B);
    CHECK(rig.chat.usage().current == 0_B);
    CHECK(chat.committed() == 0_B);
}

TEST_CASE("a pool that ends waits for what is pending rather than unmap it", "[memory][arena]") {
    arena_rig rig;
    std::optional<support::manual_point> used;
    {
        gpushare::chunk_pool pool(rig.memory, rig.scrubber, {.capacity = 4});
        gpushare::virtual_arena arena(pool, rig.chat, gpushare::tenant_tag{1}, rig.chunks(4));
        arena.commit(0_B, rig.chunks(2));
        used = rig.kernels.record();
        arena.decommit_after(0_B, rig.chunks(2), std::array{*used});
        rig.kernels.on_wait([&] {
            CHECK(rig.memory.mapped() == 2);
            rig.kernels.reach_next();
        });
    }
    CHECK(used->reached());
    CHECK(rig.memory.mapped() == 0);
    CHECK(rig.memory.chunks() == 0);
    CHECK(rig.chat.usage().current == 0_B);
}

TEST_CASE("arenas move", "[memory][arena]") {
    arena_rig rig;
    auto a = rig.arena(rig.chat, 1);
    a.commit(0_B, rig.chunks(2));
    void* const begin = a.data();
    auto b = std::move(a);
    CHECK(b.data() == begin);
    auto c = rig.arena(rig.code, 2);
    c.commit(0_B, rig.chunks(1));
    c = std::move(b);
    CHECK(c.committed() == rig.chunks(2));
    CHECK(rig.code.usage().current == 0_B);
    CHECK(rig.memory.mapped() == 2);
}

TEST_CASE("the device's own memory counts, whoever allocates it", "[memory][arena]") {
    arena_rig rig({.capacity = 64, .window = 4});
    gpushare::quota ample{rig.chunks(64)};
    auto arena = rig.arena(ample, 1, 64);
    void* const block = rig.device.allocate(1 << 19, 512);
    const auto why = arena.try_commit(0_B, rig.chunks(33));
    CHECK(why.code == errc::out_of_memory);
    CHECK(why.asked == rig.chunks(33).count());
    CHECK(why.left == rig.chunks(32).count());
    CHECK(ample.usage().current == 0_B);
    CHECK(arena.try_commit(0_B, rig.chunks(32)).code == errc::none);
    CHECK(rig.device.used() == rig.device.capacity());
    CHECK(rig.device.try_allocate(1, 1) == nullptr);
    arena.decommit(0_B, rig.chunks(32), {});
    CHECK(rig.pool.trim(0) == 32);
    CHECK(rig.device.used() == bytes{1 << 19});
    CHECK(rig.device.deallocate(block, 1 << 19, 512) == errc::none);
}

TEST_CASE("a commit asks hooks before it is refused", "[memory][arena][hook]") {
    arena_rig rig;
    auto arena = rig.arena(rig.chat, 1);
    REQUIRE(rig.chat.try_charge(rig.chunks(10)) == errc::none);
    std::vector<bytes> missing;
    const gpushare::quota_hook spill{rig.chat, 0, [&](const gpushare::reclaim_request& r) {
                                         missing.push_back(r.missing);
                                         return rig.chat.release(r.missing) ? r.missing : 0_B;
                                     }};
    CHECK(arena.try_commit(0_B, rig.chunks(4)).code == errc::none);
    CHECK(missing == std::vector{rig.chunks(2)});
    arena.close();
    rig.pool.collect();
    CHECK(rig.chat.release(rig.chunks(8)));
}

TEST_CASE("chunks that are given up go to whoever lacks bytes, without a commit", "[memory][arena]") {
    arena_rig rig;
    auto arena = rig.arena(rig.chat, 1);
    gpushare::quota_resource mine{rig.chat, rig.device, "chat"};
    arena.commit(0_B, rig.chunks(12));
    const std::array used{rig.kernels.record()};
    arena.decommit_after(0_B, rig.chunks(12), used);
    const auto all = static_cast<std::size_t>(rig.chunks(12).count());
    CHECK(mine.try_allocate(all, 256) == nullptr);  // a stream uses them
    rig.kernels.reach_all();
    void* const p = mine.try_allocate(all, 256);
    CHECK(p != nullptr);
    CHECK(mine.deallocate(p, all, 256) == errc::none);
}

TEST_CASE("a commit waits in the queue, until its deadline, a stop, or a close", "[memory][arena][waiting]") {
    arena_rig rig;
    auto arena = rig.arena(rig.chat, 1);
    CHECK(arena.try_commit(0_B, rig.chunks(12), support::within(ns{0})).code == errc::none);
    CHECK(arena.try_decommit(0_B, rig.chunks(12), {}).code == errc::none);
    CHECK(arena.try_commit(0_B, rig.chunks(13), support::forever()).code == errc::over_quota);  // never
    REQUIRE(rig.chat.try_charge(rig.chunks(10)) == errc::none);
    CHECK(arena.try_commit(0_B, rig.chunks(4), support::within(std::chrono::milliseconds(1))).code ==
          errc::deadline_exceeded);
    CHECK_THROWS_AS(arena.commit(0_B, rig.chunks(4), support::within(ns{0})), gpushare::error);
    CHECK(rig.chat.usage().current == rig.chunks(10));
    errc answer = errc::backend_failed;  // of the thread that waits
    {
        std::jthread waits([&] { answer = arena.try_commit(0_B, rig.chunks(4), support::forever()).code; });
        support::wait_for_line(rig.chat, 1);
        CHECK(rig.chat.try_charge(rig.chunks(1)) != errc::none);  // it came first
        CHECK(rig.chat.release(rig.chunks(2)));
    }
    CHECK(answer == errc::none);
    CHECK(arena.committed() == rig.chunks(4));
    CHECK(rig.chat.usage().current == rig.chunks(12));
    const auto one_more = [&](const std::stop_token& stop) {
        auto until = support::forever();
        until.stop = stop;
        answer = arena.try_commit(rig.chunks(4), rig.chunks(1), until).code;
    };
    {
        std::jthread waits(one_more);
        support::wait_for_line(rig.chat, 1);
    }
    CHECK(answer == errc::stopped);
    {
        std::jthread waits(one_more);
        support::wait_for_line(rig.chat, 1);
        (void)rig.chat.close(now);
    }
    CHECK(answer == errc::closed);
    CHECK(rig.chat.usage().current == rig.chunks(8));
    CHECK(rig.chat.release(rig.chunks(8)));
}

}  // namespace arena_test
