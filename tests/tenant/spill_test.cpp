// SPDX-License-Identifier: Apache-2.0
// Blocks of a tenant that leave the device when memory is short, and come back when they are used.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory_resource>
#include <new>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/tenant/move.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"
#include "support/waiting.hpp"

namespace spill_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::device_id;
using gpushare::errc;
using gpushare::memory_stack;
using support::code_of;
using support::within;

namespace host = gpushare::host;
using tenancy = gpushare::tenancy<host::node>;
using block = decltype(std::declval<tenancy::tenant&>().allocate_spillable(bytes{}));

namespace {

/// The host's memory, which counts what is out.
struct counting : std::pmr::memory_resource {
    void* do_allocate(std::size_t size, std::size_t alignment) override {
        void* const p = std::pmr::new_delete_resource()->allocate(size, alignment);
        used += size;
        return p;
    }
    void do_deallocate(void* p, std::size_t size, std::size_t alignment) override {
        used -= size;
        std::pmr::new_delete_resource()->deallocate(p, size, alignment);
    }
    [[nodiscard]] bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
        return this == &other;
    }
    std::atomic<std::size_t> used{0};
};

struct fixture {
    counting aside;
    host::node n{{.devices = 2, .memory = 64_MiB, .sms = 1, .timing = host::timing::modelled}};
    tenancy shared{n, {.spill = 64_MiB, .spill_to = &aside}};
    const memory_stack stack = GENERATE(memory_stack::pool, memory_stack::direct);

    static void fill(block& b, int value) {
        const auto use = b.use();
        REQUIRE(use);
        std::memset(use.data(), value, static_cast<std::size_t>(b.size().count()));
    }
    static bool holds(block& b, int value) {
        const auto use = b.use();
        if (!use) return false;
        const auto* const p = static_cast<const unsigned char*>(use.data());
        for (std::size_t i = 0; i < b.size().count(); i += 4096)
            if (p[i] != value) return false;
        return true;
    }
};

}  // namespace

TEST_CASE_METHOD(fixture, "an allocation that lacks bytes spills the blocks that were used longest ago",
                 "[tenant][spill]") {
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct, .stack = stack});
    {
        std::vector<block> adapters;
        for (int i = 0; i < 3; ++i) fill(adapters.emplace_back(a.allocate_spillable(4_MiB)), i + 1);
        CHECK(holds(adapters[0], 1));  // used last
        void* const p = a.memory().allocate(7 << 20);
        CHECK(adapters[0].resident());
        CHECK_FALSE(adapters[1].resident());
        CHECK(aside.used >= 4 << 20);
        {
            const auto in_use = adapters[0].use();
            REQUIRE(in_use);
            CHECK(a.memory().try_allocate(12 << 20) == nullptr);  // in use, it stays
            CHECK(adapters[0].resident());
            CHECK_FALSE(adapters[2].resident());
        }
        CHECK(code_of([&] { (void)a.memory().allocate(17 << 20); }) == errc::over_quota);
        REQUIRE(a.memory().deallocate(p, 7 << 20) == errc::none);
        for (int i = 0; i < 3; ++i) CHECK(holds(adapters[static_cast<std::size_t>(i)], i + 1));
        CHECK(a.usage().peak <= 16_MiB);
    }
    CHECK(aside.used == 0);
    const auto report = a.close();
    CHECK(report.complete);
    CHECK(report.leaked_blocks == 0);
}

TEST_CASE_METHOD(fixture, "burst that a neighbour was promised comes back by spilling", "[tenant][spill]") {
    auto a =
        shared.admit({.name = "a", .memory = 8_MiB, .compute = 50_pct, .burst = 48_MiB, .on = {{0}}, .stack = stack});
    std::vector<block> lent;
    for (int i = 0; i < 5; ++i) fill(lent.emplace_back(a.allocate_spillable(8_MiB)), i + 1);
    auto b = shared.admit({.name = "b", .memory = 48_MiB, .compute = 50_pct, .on = {{0}}}, within(5min));
    CHECK(b.memory().capacity() == 48_MiB);
    CHECK(a.usage().current <= 16_MiB);
    for (int i = 0; i < 5; ++i) CHECK(holds(lent[static_cast<std::size_t>(i)], i + 1));
}

TEST_CASE_METHOD(fixture, "a block that can't be spilled or come back says so and stays where it was",
                 "[tenant][spill]") {
    auto a =
        shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct, .on = {{0}}, .stack = stack, .spill = 4_MiB});
    auto first = a.allocate_spillable(4_MiB), second = a.allocate_spillable(8_MiB);
    fill(first, 1), fill(second, 2);
    CHECK(a.memory().try_allocate(14 << 20) == nullptr);  // the larger one is more than the host may have
    CHECK(second.resident());
    void* const p = a.memory().allocate(8 << 20);
    CHECK_FALSE(first.resident());
    CHECK(first.use().code() == errc::out_of_memory);
    CHECK_FALSE(first.use());
    CHECK(first.use().data() == nullptr);
    REQUIRE(a.memory().deallocate(p, 8 << 20) == errc::none);
    CHECK(holds(first, 1));
    CHECK(holds(second, 2));

    auto plain = shared.admit({.name = "plain", .memory = 1_MiB, .compute = 10_pct, .stack = stack, .spill = 0_B});
    CHECK(code_of([&] { (void)plain.allocate_spillable(1_KiB); }) == errc::not_supported);
    CHECK(plain.try_allocate_spillable(1_KiB).code() == errc::not_supported);
    CHECK(a.try_allocate_spillable(17_MiB).code() == errc::over_quota);
    CHECK(a.try_allocate_spillable(1_KiB, 7).code() == errc::no_device);
    tenancy without(n);
    CHECK(code_of([&] { (void)without.admit({.name = "x", .memory = 1_MiB, .spill = 1_MiB}); }) == errc::not_supported);

    (void)a.close();
    CHECK(first.use().code() == errc::closed);
    CHECK(code_of([&] { (void)a.allocate_spillable(1_KiB); }) == errc::closed);
}

TEST_CASE_METHOD(fixture, "a spillable block waits for its bytes, as any other", "[tenant][spill][waiters]") {
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct, .on = {{0}}, .stack = stack});
    void* const p = a.memory().allocate(12 << 20);
    CHECK(a.try_allocate_spillable(8_MiB, within(1ms)).code() == errc::deadline_exceeded);
    CHECK(code_of([&] { (void)a.allocate_spillable(8_MiB, within(1ms)); }) == errc::deadline_exceeded);
    CHECK(a.try_allocate_spillable(17_MiB, within(1min)).code() == errc::over_quota);  // at once
    CHECK(a.try_allocate_spillable(1_KiB, within(1ms), 7).code() == errc::no_device);
    std::jthread frees([&] {
        while (a.memory().limit().usage().waiting == 0) std::this_thread::yield();
        a.memory().deallocate(p, 12 << 20);
    });
    auto first = a.allocate_spillable(8_MiB, within(1min));
    frees.join();
    fill(first, 1);
    auto second = a.allocate_spillable(12_MiB, within(1min));  // for which the first one leaves
    CHECK_FALSE(first.resident());
    fill(second, 2);
    CHECK(holds(first, 1));
    CHECK(holds(second, 2));
}

TEST_CASE_METHOD(fixture, "the limit of spilled memory changes live", "[tenant][spill]") {
    auto a =
        shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct, .on = {{0}}, .stack = stack, .spill = 16_MiB});
    auto first = a.allocate_spillable(4_MiB), second = a.allocate_spillable(4_MiB);
    fill(first, 1), fill(second, 2);
    a.resize({.spill = 4_MiB});
    CHECK(a.spec().spill == 4_MiB);
    CHECK(a.memory().try_allocate(16 << 20) == nullptr);  // one of them may leave
    CHECK(first.resident() != second.resident());
    a.resize({.spill = 0_B});
    CHECK(a.memory().try_allocate(16 << 20) == nullptr);  // none any more; the one that has left is still there
    CHECK(holds(first, 1));
    CHECK(holds(second, 2));
    a.resize({.spill = 16_MiB});
    void* const p = a.memory().allocate(16 << 20);
    CHECK(a.memory().deallocate(p, 16 << 20) == errc::none);
    CHECK(holds(first, 1));
    CHECK(holds(second, 2));

    auto plain = shared.admit({.name = "plain", .memory = 1_MiB, .compute = 10_pct, .stack = stack, .spill = 0_B});
    CHECK(plain.try_resize({.memory = 2_MiB, .spill = 1_MiB}).code == errc::not_supported);
    CHECK(plain.spec().memory == 1_MiB);
    plain.resize({.memory = 2_MiB, .spill = 0_B});
}

TEST_CASE("a copy back that takes its time, or fails, is told of", "[tenant][spill][threads]") {
    std::atomic<bool> inside{false}, end{false};  // what a lost device runs goes on until the node is gone
    counting aside;
    host::node n{{.devices = 1, .memory = 64_MiB, .sms = 1}};
    tenancy shared{n, {.spill = 32_MiB, .spill_to = &aside}};
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 50_pct, .stack = memory_stack::direct});
    auto b = a.allocate_spillable(16_MiB);
    fixture::fill(b, 5);
    void* const p = a.memory().allocate(24 << 20);
    REQUIRE(a.memory().deallocate(p, 24 << 20) == errc::none);
    REQUIRE_FALSE(b.resident());
    const auto busy = a.submit([&](auto& s) {
        s.launch({}, [&](auto&) {
            inside = true;
            while (!end) std::this_thread::yield();
        });
    });
    while (!inside) std::this_thread::yield();
    const auto patience = shared.now() + 5min;
    errc others = errc::none;
    {
        const std::jthread other([&] { others = b.use(patience).code(); });
        while (a.usage().current < 16_MiB) std::this_thread::yield();  // the copy waits for the SM
        CHECK(b.use(shared.now()).code() == errc::deadline_exceeded);
        CHECK(shared.now() < patience);  // not the other's patience
        CHECK_FALSE(b.resident());
        n.faults({0}).lose_device();
        end = true;
    }
    CHECK(others == errc::device_lost);
    CHECK_FALSE(b.resident());
    CHECK_FALSE(b.use());
}

TEST_CASE_METHOD(fixture, "a spill that was given up goes on with the next one, and a use keeps its own deadline",
                 "[tenant][spill]") {
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct, .on = {{0}}, .stack = stack});
    {
        auto first = a.allocate_spillable(8_MiB), second = a.allocate_spillable(8_MiB);
        fill(first, 1), fill(second, 2);
        // Nothing gets to the device while it is full of other work.
        std::atomic<bool> inside{false}, end{false};
        const auto busy = a.submit([&](auto& s) {
            s.launch({}, [&](auto&) {
                inside = true;
                while (!end) std::this_thread::yield();
            });
        });
        while (!inside) std::this_thread::yield();
        const auto brief = within(5ms);
        CHECK(a.memory().try_allocate(8 << 20, 256, brief) == nullptr);
        CHECK_FALSE(first.resident());  // on its way
        end = true;
        CHECK(busy.wait(shared.now() + 5min));
        void* const p = a.memory().allocate(8 << 20);
        CHECK(second.resident());
        inside = false, end = false;
        const auto again = a.submit([&](auto& s) {
            s.launch({}, [&](auto&) {
                inside = true;
                while (!end) std::this_thread::yield();
            });
        });
        while (!inside) std::this_thread::yield();
        const auto late = shared.now() + 5min;
        CHECK_FALSE(first.use(shared.now() + 1ms));  // the second can't go so soon
        CHECK(shared.now() < late);
        end = true;
        CHECK(again.wait(shared.now() + 5min));
        REQUIRE(a.memory().deallocate(p, 8 << 20) == errc::none);
        CHECK(holds(first, 1));
        CHECK(holds(second, 2));
    }
    CHECK(a.close().complete);
}

TEST_CASE_METHOD(fixture, "spillable blocks go on where their tenant stays on its device", "[tenant][spill][move]") {
    auto a = shared.admit(
        {.name = "a", .memory = 32_MiB, .devices = 2, .compute = 50_pct, .on = {{0}, {1}}, .stack = stack});
    auto kept = a.allocate_spillable(8_MiB, 0);
    fill(kept, 3);
    auto moved = move_tenant(shared, a, {{0}, {1}}, {}, shared.now() + 5min);
    a = std::move(moved.successor);
    CHECK(holds(kept, 3));
    void* const p = a.memory(0).allocate(12 << 20);
    CHECK_FALSE(kept.resident());
    CHECK(a.memory(0).deallocate(p, 12 << 20) == errc::none);
    CHECK(holds(kept, 3));
}

TEST_CASE_METHOD(fixture, "threads that use and allocate lose no byte of a spillable block",
                 "[tenant][spill][threads]") {
    auto a = shared.admit({.name = "a", .memory = 8_MiB, .compute = 50_pct, .stack = stack});
    std::vector<block> blocks;
    for (int i = 0; i < 6; ++i) fill(blocks.emplace_back(a.allocate_spillable(2_MiB)), i + 1);
    std::atomic<int> wrong{0}, used{0};
    support::together(3, [&](unsigned rank) {
        support::random any{support::seed(rank)};
        for (int i = 0; i < 60; ++i) {
            const auto which = any.below(blocks.size());
            const auto use = blocks[which].use();
            if (!use) {
                wrong += use.code() == errc::out_of_memory ? 0 : 1;  // all others in use
                continue;
            }
            ++used;
            const auto* const p = static_cast<const unsigned char*>(use.data());
            wrong += p[0] == which + 1 && p[(2 << 20) - 1] == which + 1 ? 0 : 1;
        }
    });
    CHECK(wrong == 0);
    CHECK(used > 0);
    CHECK(a.usage().peak <= 8_MiB);
}

namespace {

/// A device of 64 MiB for one that sleeps and one that borrows.
struct lenders {
    host::node n{{.devices = 1, .memory = 64_MiB, .sms = 1, .timing = host::timing::modelled}};
    tenancy shared{n, {.spill_to = std::pmr::new_delete_resource()}};
    tenancy::tenant big =
        shared.admit({.name = "big", .memory = 48_MiB, .compute = 50_pct, .spill = 48_MiB, .lends_asleep = true});
    tenancy::tenant other =
        shared.admit({.name = "other", .memory = 8_MiB, .compute = 20_pct, .burst = gpushare::all_burst});
    std::vector<void*> borrowed;

    std::size_t borrow() {
        while (void* p = other.memory().try_allocate(2 << 20)) borrowed.push_back(p);
        return borrowed.size() * 2;
    }
    void give_back(bytes at_least) {
        for (bytes freed; freed < at_least && !borrowed.empty(); freed += 2_MiB, borrowed.pop_back())
            CHECK(other.memory().deallocate(borrowed.back(), 2 << 20) == errc::none);
    }
    static gpushare::instant soon() { return host::steady_clock::now() + 5min; }
};

}  // namespace

TEST_CASE_METHOD(lenders, "a sleeper that says so lends its guarantee, and has it back when it wakes",
                 "[tenant][sleep]") {
    auto weights = big.allocate_spillable(40_MiB);
    fixture::fill(weights, 7);
    CHECK(borrow() == 16);
    REQUIRE(big.sleep(host::steady_clock::now() + 5min));
    CHECK(big.usage().current == 0_B);
    CHECK(big.recall().lent == 48_MiB);
    CHECK(big.recall().missing == 0_B);
    CHECK(borrow() == 64);
    CHECK(big.recall().missing == 48_MiB);
    CHECK(big.spec().memory == 48_MiB);  // as promised as before

    // Who has it keeps it: in its own time, by name, and nothing is lost.
    try {
        big.wake(host::steady_clock::now() + 3ms);
        FAIL("others have its memory");
    } catch (const gpushare::operation_error& e) {
        CHECK(e.code() == errc::deadline_exceeded);
        CHECK(e.tenant() == "big");
        CHECK(std::string(e.what()).find("'other'") != std::string::npos);
    }
    CHECK(big.try_wake().code == errc::deadline_exceeded);
    std::stop_source stop;
    stop.request_stop();
    CHECK(big.try_wake(gpushare::never, stop.get_token()).code == errc::stopped);
    CHECK(big.recall().lent == 48_MiB);
    CHECK_FALSE(weights.resident());

    // Who can give it back is asked for it.
    const gpushare::quota_hook gives{other.memory().limit(), 0, [&](const gpushare::reclaim_request& r) {
                                         if (r.own) return 0_B;  // of what it asks for itself
                                         give_back(r.missing);
                                         return r.missing;
                                     }};
    big.wake(host::steady_clock::now() + 5min);
    CHECK(big.recall().lent == 0_B);
    CHECK(big.recall().usual_longest > gpushare::ns{});
    CHECK(fixture::holds(weights, 7));
    CHECK(big.memory().free() == 8_MiB);
    void* const p = big.memory().try_allocate(8 << 20);
    CHECK(p != nullptr);
    CHECK(big.memory().deallocate(p, 8 << 20) == errc::none);
    CHECK(borrow() <= 16);
    CHECK(big.usage().burst == 0_B);
    give_back(gpushare::bytes::max());
}

TEST_CASE_METHOD(lenders, "memory that a sleeper lends is promised to no other tenant", "[tenant][sleep]") {
    REQUIRE(big.sleep(host::steady_clock::now() + 5min));
    CHECK(shared.rooms()[0].free == 8_MiB);
    CHECK(code_of([&] { (void)shared.admit({.name = "third", .memory = 9_MiB}); }) == errc::no_room);
    CHECK(code_of([&] { other.resize({.memory = 17_MiB}); }) == errc::no_room);
    CHECK(code_of([&] { big.resize({.memory = 8_MiB}); }) == errc::asleep);
    big.resize({.compute = 40_pct});
    CHECK(borrow() == 64);
    CHECK(shared.rooms()[0].free == 0_B);
    // What is borrowed of it becomes nobody's guarantee, either.
    CHECK(code_of([&] { other.resize({.memory = 17_MiB}); }) == errc::no_room);
    other.resize({.memory = 16_MiB});
    CHECK(code_of([&] { (void)shared.admit({.name = "third", .memory = 1_MiB}); }) == errc::no_room);
    give_back(gpushare::bytes::max());
    big.wake();
    CHECK(shared.rooms()[0].free == 0_B);
    big.resize({.memory = 40_MiB});
    CHECK(shared.rooms()[0].free == 8_MiB);
    big.resize({.lends_asleep = false});
    REQUIRE(big.sleep(host::steady_clock::now() + 5min));
    CHECK(big.recall().lent == 0_B);
    big.resize({.lends_asleep = true});
    REQUIRE(big.sleep(host::steady_clock::now() + 5min));  // again
    CHECK(big.recall().lent == 40_MiB);
    CHECK(big.close(host::steady_clock::now() + 5min).complete);
    CHECK(shared.rooms()[0].free == 48_MiB);
}

TEST_CASE_METHOD(lenders, "a tenant whose wake failed sleeps again once it was awake", "[tenant][sleep]") {
    REQUIRE(big.sleep(soon()));
    CHECK(borrow() == 64);
    CHECK(big.try_wake().code == errc::deadline_exceeded);
    CHECK(big.try_wake(host::steady_clock::now() + 3ms).code == errc::deadline_exceeded);
    CHECK(big.sleep(soon()));  // still
    CHECK(big.recall().lent == 48_MiB);
    give_back(bytes::max());
    REQUIRE(big.try_wake(soon()).code == errc::none);
    CHECK(big.sleep(soon()));
    CHECK(big.recall().lent == 48_MiB);
    REQUIRE(big.try_wake(soon()).code == errc::none);
    CHECK(big.submit([](auto&) {}).wait(soon()));
}

}  // namespace spill_test
