// SPDX-License-Identifier: Apache-2.0
// Tenants grow, shrink and hand over at the same time, beside a dispatcher that collects: no tenant
// sees a neighbour's data, no chunk is in two places, and all memory is accounted for at the end.
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/units.hpp>

#include "support/arena_rig.hpp"
#include "support/catch.hpp"
#include "support/fault_virtual_memory.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace arena_threads_test {

using namespace gpushare;
using support::advanced;

namespace {

constexpr bytes chunk = 16_KiB;

struct busy_device {
    host::node node{{.memory = 4_MiB, .sms = 2}};
    support::fault_virtual_memory memory{node.memory(device_id{0}), chunk};
    host::stream scrubs = node.make_stream(device_id{0}, {});
    quota whole{chunk * 24};
};

}  // namespace

TEST_CASE("tenants on several threads never meet in a chunk", "[memory][arena][threads]") {
    const auto policy = GENERATE(scrub_policy::on_hand_over, scrub_policy::on_free);
    busy_device d;
    {
        chunk_pool pool{d.memory, d.scrubs, {.capacity = 20, .scrub = policy, .window = 4}};
        std::atomic<int> foreign{0}, lost{0}, committed{0};
        {
            support::background dispatcher(1, [&](unsigned) {
                pool.collect();
                pool.scrub_ahead(2);
                pool.trim(6);
            });
            support::together(3, [&](unsigned rank) {
                quota mine{d.whole, 0_B, chunk * 24};
                const int own = static_cast<int>(rank) + 1;
                host::stream kernels = d.node.make_stream(device_id{0}, {});
                support::random any(support::seed(rank));
                std::optional<virtual_arena<support::fault_virtual_memory, host::stream>> arena;
                for (int i = 0; i < 300; ++i) {
                    if (!arena) arena.emplace(pool, mine, tenant_tag{rank + 1}, chunk * 12);
                    const bytes offset = chunk * any.below(8), size = chunk * (1 + any.below(4));
                    const auto why = arena->try_commit(offset, size, any.one_in(2) ? never : instant{});
                    if (why.code != errc::none) continue;
                    committed.fetch_add(1);
                    kernels.record().wait(never);  // what was about to leave may still have been written to
                    const auto* seen = static_cast<const unsigned char*>(advanced(arena->data(), offset));
                    for (std::uint64_t b = 0; b < size.count(); b += 64)
                        if (seen[b] != 0 && seen[b] != own) foreign.fetch_add(1);
                    kernels.fill(advanced(arena->data(), offset), std::byte(own),
                                 static_cast<std::size_t>(size.count()));
                    const std::array used{kernels.record()};
                    if (any.one_in(3)) {
                        arena->decommit(offset, size, used, never);
                    } else if (any.one_in(8)) {
                        (void)arena->close(used);
                        arena.reset();
                    } else {
                        arena->decommit_after(offset, size, used);
                    }
                }
                arena.reset();
                if (!pool.drain(never)) lost.fetch_add(1);
                if (mine.usage().current != 0_B) lost.fetch_add(1);
            });
        }
        CHECK(foreign.load() == 0);
        CHECK(lost.load() == 0);
        CHECK(committed.load() > 0);
        CHECK(pool.usage().mapped == 0);
    }
    CHECK(d.memory.wrong() == 0);
    CHECK(d.memory.chunks() == 0);
    CHECK(d.node.memory(device_id{0}).used() == 0_B);
    CHECK(d.whole.usage().current == 0_B);
}

TEST_CASE("one arena can be used, handed over and closed from several threads", "[memory][arena][threads]") {
    busy_device d;
    for (int round = 0; round < 20; ++round) {
        chunk_pool pool{d.memory, d.scrubs, {.capacity = 20, .window = 4}};
        quota one{d.whole, 0_B, chunk * 24}, two{d.whole, 0_B, chunk * 24};
        virtual_arena a{pool, one, tenant_tag{1}, chunk * 8};
        virtual_arena b{pool, two, tenant_tag{2}, chunk * 8};
        support::together(3, [&](unsigned rank) {
            support::random any(support::seed(rank + 10 * static_cast<unsigned>(round)));
            for (int i = 0; i < 20; ++i) {
                const bytes offset = chunk * any.below(8);
                (void)a.try_commit(offset, chunk, never);
                (void)a.try_hand_over(offset, chunk, b, offset, {}, never);
                (void)b.try_decommit(offset, chunk, {}, never);
            }
            if (rank == 0) (void)a.close();
        });
        CHECK(a.committed() == 0_B);
        CHECK(pool.drain(never));
        CHECK(one.usage().current == a.leaving());
        CHECK(two.usage().current == b.committed());
    }
    CHECK(d.memory.wrong() == 0);
    CHECK(d.whole.usage().current == 0_B);
}

TEST_CASE("of tenants that wait for the last chunks, each gets them in the end", "[memory][arena][threads]") {
    busy_device d;
    chunk_pool pool{d.memory, d.scrubs, {.capacity = 4, .window = 2}};
    std::atomic<int> served{0};
    support::together(3, [&](unsigned rank) {
        quota mine{d.whole, 0_B, chunk * 8};
        host::stream kernels = d.node.make_stream(device_id{0}, {});
        virtual_arena arena{pool, mine, tenant_tag{rank + 1}, chunk * 4};
        for (int got = 0; got < 20;) {
            const auto why = arena.try_commit(0_B, chunk * 3, never);
            if (why.code != errc::none) continue;  // the others have them, and aren't done yet
            ++got;
            served.fetch_add(1);
            kernels.fill(arena.data(), std::byte(rank + 1), static_cast<std::size_t>((chunk * 3).count()));
            arena.decommit_after(0_B, chunk * 3, std::array{kernels.record()});
        }
        pool.drain(never);
    });
    CHECK(served.load() == 60);
}

TEST_CASE("the driver's work for one arena delays no other", "[memory][arena][threads]") {
    using support::vm_call;
    const auto held_up = GENERATE(vm_call::create, vm_call::map, vm_call::unmap);
    std::atomic<bool> inside{false}, over{false}, in_time{true};
    std::atomic<std::thread::id> slow{};
    const auto latest = host::steady_clock::now() + std::chrono::minutes(5);
    support::arena_rig rig;  // asks `during` until it is gone
    auto a = rig.arena(rig.chat, 1), b = rig.arena(rig.code, 2);
    if (held_up == vm_call::unmap) a.commit(0_B, rig.chunks(2));
    rig.memory.during = [&](vm_call call) {
        if (call != held_up || slow.load() != std::this_thread::get_id()) return;
        for (inside.store(true); !over.load(); std::this_thread::yield()) {
            if (host::steady_clock::now() < latest) continue;
            in_time.store(false);
            return;
        }
    };
    {
        std::jthread first([&] {
            slow.store(std::this_thread::get_id());
            (void)(held_up == vm_call::unmap ? a.try_decommit(0_B, rig.chunks(2), {})
                                             : a.try_commit(0_B, rig.chunks(2)));
        });
        while (!inside.load()) std::this_thread::yield();
        CHECK(b.try_commit(0_B, rig.chunks(3)).code == errc::none);
        CHECK(b.try_decommit(0_B, rig.chunks(1), {}).code == errc::none);
        CHECK(b.try_decommit_after(rig.chunks(1), rig.chunks(1), {}).code == errc::none);
        CHECK(b.committed() == rig.chunks(1));
        (void)rig.pool.usage();
        over.store(true);
    }
    CHECK(in_time.load());
    CHECK(a.committed() == rig.chunks(held_up == vm_call::unmap ? 0 : 2));
    CHECK(rig.memory.wrong() == 0);
}

TEST_CASE("a commit isn't refused for a chunk that another thread is just giving back", "[memory][arena][threads]") {
    const bool closes = GENERATE(false, true);
    std::atomic<bool> inside{false}, asks{false};
    support::arena_rig rig{{.capacity = 1, .window = 1}};  // asks `during` until it is gone
    auto a = rig.arena(rig.chat, 1), b = rig.arena(rig.code, 1);
    a.commit(0_B, rig.chunk);
    rig.memory.during = [&](support::vm_call call) {
        if (call != support::vm_call::unmap) return;
        inside.store(true);
        while (!asks.load()) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));  // it is refused by then, or waits
    };
    errc answer = errc::none;
    {
        std::jthread gives([&] {
            if (closes)
                (void)a.close();
            else
                (void)a.try_decommit_after(0_B, rig.chunk, {});
        });
        while (!inside.load()) std::this_thread::yield();
        asks.store(true);
        answer = b.try_commit(0_B, rig.chunk).code;
    }
    CHECK(answer == errc::none);
}

TEST_CASE("a drain waits for what another thread began to take back meanwhile", "[memory][arena][threads]") {
    std::atomic<int> begun{0}, allowed{0};
    support::arena_rig rig;  // asks `during` until it is gone
    auto a = rig.arena(rig.chat, 1), b = rig.arena(rig.code, 2);
    a.commit(0_B, rig.chunk);
    b.commit(0_B, rig.chunk);
    rig.memory.during = [&](support::vm_call call) {
        if (call != support::vm_call::unmap) return;
        for (const int mine = ++begun; allowed.load() < mine;) std::this_thread::yield();
    };
    bytes left{};
    {
        std::jthread first([&] { (void)b.try_decommit_after(0_B, rig.chunk, {}); });
        while (begun.load() != 1) std::this_thread::yield();
        (void)a.try_decommit_after(0_B, rig.chunk, std::array{rig.kernels.record()});
        std::jthread drains([&] {
            (void)rig.pool.drain(never);
            left = rig.chat.usage().current;
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(10));  // it waits for the first
        rig.kernels.reach_all();
        std::jthread second([&] { rig.pool.collect(); });
        while (begun.load() != 2) std::this_thread::yield();
        allowed.store(1);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));  // it has returned by then, or waits for the second
        allowed.store(100);
    }
    CHECK(left == 0_B);
    CHECK(rig.memory.wrong() == 0);
}

TEST_CASE("an arena may be made while its quota closes", "[memory][arena][threads]") {
    support::arena_rig rig;
    for (int round = 0; round < 3'000; ++round) {
        gpushare::quota limit{rig.chunks(4)};  // a tree of its own, which the pool has to watch first
        std::atomic<bool> made{false};
        support::together(2, [&](unsigned rank) {
            if (rank == 0) {
                auto arena = rig.arena(limit, 7);
                made.store(true);
            } else {
                while (!made.load()) (void)limit.close(gpushare::instant::min());
            }
        });
    }
    CHECK(rig.pool.usage(gpushare::tenant_tag{7}).out == 0);
    auto chat = rig.arena(rig.chat, 7);
    CHECK(chat.try_commit(0_B, rig.chunk).code == errc::none);
}

TEST_CASE("a close for ever waits for a hand-over that scrubs", "[memory][arena][threads]") {
    support::arena_rig rig;
    auto a = rig.arena(rig.chat, 1), b = rig.arena(rig.code, 2);
    a.commit(0_B, rig.chunk);
    errc answer = errc::none;
    bool closed = false;
    {
        std::jthread hands_over([&] { answer = a.try_hand_over(0_B, rig.chunk, b, 0_B, {}, never).code; });
        while (rig.scrubber.filled() == 0) std::this_thread::yield();
        std::jthread closes([&] { closed = rig.code.close(never); });
        while (b.try_commit(0_B, rig.chunk).code != errc::closed) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));  // it has given up by then, or waits
        rig.scrubber.reach_next();
    }
    CHECK(answer == errc::closed);
    CHECK(closed);
    CHECK(rig.code.usage().current == 0_B);
}

TEST_CASE("a commit isn't refused for a chunk that another thread took back meanwhile", "[memory][arena][threads]") {
    support::arena_rig rig{{.capacity = 1, .scrub = scrub_policy::off, .window = 1}};
    auto a = rig.arena(rig.chat, 1), b = rig.arena(rig.code, 2);
    a.commit(0_B, rig.chunk);
    a.decommit_after(0_B, rig.chunk, std::array{rig.kernels.record()});
    bool collected = false;
    const quota_hook meanwhile(quota_hook::at_root, rig.whole, 0, [&](const reclaim_request&) {
        rig.kernels.reach_all();
        std::jthread([&] { collected = rig.pool.collect(); }).join();
        return 0_B;
    });
    CHECK(b.try_commit(0_B, rig.chunk).code == errc::none);
    CHECK(collected);
    CHECK(b.committed() == rig.chunk);
}

TEST_CASE("a close waits for a chunk that another thread is just taking back", "[memory][arena][threads][closing]") {
    std::array<std::atomic<bool>, 2> inside{}, over{};
    std::atomic<std::size_t> unmaps{0};
    support::arena_rig rig{{.capacity = 2, .window = 1}};  // asks `during` until it is gone
    auto a = rig.arena(rig.chat, 1), b = rig.arena(rig.code, 2);
    a.commit(0_B, rig.chunk);
    b.commit(0_B, rig.chunk);
    b.decommit_after(0_B, rig.chunk, std::array{rig.kernels.record()});
    a.decommit_after(0_B, rig.chunk, std::array{rig.kernels.record()});
    rig.memory.during = [&](support::vm_call call) {
        if (call != support::vm_call::unmap) return;
        const auto i = unmaps.fetch_add(1);
        inside.at(i).store(true);
        while (!over.at(i).load()) std::this_thread::yield();
    };
    const auto take_back = [&] { rig.kernels.reach_next(), rig.pool.collect(); };
    const auto a_while = [] { std::this_thread::sleep_for(std::chrono::milliseconds(10)); };
    bool closed = false;
    {
        std::jthread other(take_back);
        while (!inside[0].load()) std::this_thread::yield();
        std::jthread closing([&] { closed = rig.chat.close(never); });
        while (!rig.chat.closed()) std::this_thread::yield();
        a_while();  // it waits for the other arena's chunk by then
        std::jthread own(take_back);
        while (!inside[1].load()) std::this_thread::yield();
        over[0].store(true);
        a_while();  // it has seen that, or waits on
        over[1].store(true);
    }
    CHECK(closed);
    CHECK(rig.chat.usage().current == 0_B);
}

TEST_CASE("a close keeps its deadline beside another arena's slow call of the driver",
          "[memory][arena][threads][closing]") {
    const bool has_memory = GENERATE(true, false);
    std::atomic<bool> inside{false}, over{false};
    support::arena_rig rig{{.capacity = 2, .window = 1}};  // asks `during` until it is gone
    auto a = rig.arena(rig.chat, 1), b = rig.arena(rig.code, 2);
    b.commit(0_B, rig.chunk);
    b.decommit_after(0_B, rig.chunk, std::array{rig.kernels.record()});
    if (has_memory) {
        a.commit(0_B, rig.chunk);
        a.decommit_after(0_B, rig.chunk, std::array{rig.kernels.record()});
    }
    rig.memory.during = [&](support::vm_call call) {
        if (call != support::vm_call::unmap) return;
        inside.store(true);
        while (!over.load()) std::this_thread::yield();
    };
    bool closed = false, in_time = false;
    {
        std::jthread other([&] { rig.kernels.reach_next(), rig.pool.collect(); });
        while (!inside.load()) std::this_thread::yield();
        // ends what waits for the call
        std::jthread rescue([&](const std::stop_token& stop) {
            for (int i = 0; i < 1000 && !stop.stop_requested(); ++i)
                std::this_thread::sleep_for(std::chrono::milliseconds(10));
            over.store(true);
        });
        closed = rig.chat.close(host::steady_clock::now() + std::chrono::milliseconds(5));
        in_time = !over.load();
    }
    CHECK(closed == !has_memory);
    CHECK(in_time);
    rig.kernels.reach_all();
    CHECK(rig.chat.close(never));
    CHECK(rig.chat.usage().current == 0_B);
}

TEST_CASE("a tree of quotas may end while arenas of other trees begin", "[memory][arena][threads]") {
    busy_device d;
    chunk_pool pool{d.memory, d.scrubs, {.capacity = 4}};
    std::atomic<int> refused{0};
    support::together(3, [&](unsigned rank) {
        for (int i = 0; i < 200; ++i) {
            const auto tree = std::make_unique<quota>(chunk);
            virtual_arena arena{pool, *tree, tenant_tag{rank}, chunk};
            if (arena.try_commit(0_B, chunk, never).code != errc::none) refused.fetch_add(1);
            if (arena.try_decommit(0_B, chunk, {}).code != errc::none) refused.fetch_add(1);
        }
    });
    CHECK(refused.load() == 0);
    CHECK(pool.usage().mapped == 0);
}

}  // namespace arena_threads_test
