// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend/host/host.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "host/gate.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace std::chrono_literals;
using host::timing;

TEST_CASE("a stream runs its work in order, others overlap it", "[host]") {
    gate g;
    host::node node{{.sms = 2}};
    auto blocked = node.make_stream(device_id{0}), other = node.make_stream(device_id{0});
    std::vector<int> order;
    blocked.launch({}, g.kernel());
    for (int i = 0; i < 50; ++i) blocked.launch({}, [&order, i](auto&) { order.push_back(i); });
    const auto blocked_done = blocked.record();
    std::atomic<int> ran{0};
    other.launch({.blocks = 10}, [&](auto&) { ++ran; });
    CHECK(other.record().wait(never));
    CHECK(ran == 10);
    CHECK_FALSE(blocked_done.reached());
    g.open();
    CHECK(blocked_done.wait(never));
    REQUIRE(order.size() == 50);
    for (std::size_t i = 0; i < 50; ++i) CHECK(order[i] == static_cast<int>(i));
}

TEST_CASE("a stream that waits for a prepared point goes on when an idle stream records it", "[host]") {
    host::node node{{.devices = 2, .sms = 1}};
    auto idle = node.make_stream(device_id{0}), waiting = node.make_stream(device_id{1});
    auto later = idle.prepare();
    std::atomic<bool> ran{false};
    waiting.wait(later);
    waiting.launch({}, [&](auto&) { ran = true; });
    const auto done = waiting.record();
    CHECK_FALSE(done.wait(node.get_clock().now() + 1ms));
    idle.record(later);
    CHECK(done.wait(node.get_clock().now() + 20s));
    CHECK(ran);
}

TEST_CASE("a worker that gets free takes the highest priority", "[host]") {
    for (const auto t : {timing::real, timing::modelled}) {
        gate g;
        host::node node{{.sms = 1, .timing = t}};
        auto holder = node.make_stream(device_id{0});
        holder.launch({}, g.kernel());
        g.wait_inside(1);
        std::vector<int> order;
        std::vector<host::stream> streams;
        for (const int level : {0, 2, -1, 1, 2}) {
            streams.push_back(node.make_stream(device_id{0}, priority{level}));
            streams.back().launch({}, [&order, level](auto&) { order.push_back(level); });
        }
        std::vector<host::point> done;
        for (auto& s : streams) done.push_back(s.record());
        g.open();
        for (const auto& p : done) CHECK(p.wait(never));
        CHECK(order == std::vector{2, 2, 1, 0, -1});
    }
}

TEST_CASE("the ledger shows modelled time exactly", "[host]") {
    host::node node{{.sms = 1, .timing = timing::modelled}};
    auto s = node.make_stream(device_id{0}, {}, 9);
    // Submitted as one, so that the submitting thread's pace doesn't show.
    node.faults(device_id{0}).stall(s);
    for (int i = 0; i < 100; ++i) s.enqueue(1ms);
    node.faults(device_id{0}).resume(s);
    const auto done = s.record();
    CHECK(done.wait(never));
    CHECK(done.when() <= node.get_clock().now());
    const auto page = node.ledger(device_id{0}).take();
    REQUIRE(page.blocks.size() == 100);
    CHECK(page.dropped == 0);
    CHECK(page.blocks.back().end - page.blocks.front().start == 100ms);
    CHECK(page.blocks.back().end == done.when());
    for (const auto& b : page.blocks) {
        CHECK(b.tag == 9);
        CHECK(b.end - b.start == 1ms);
    }
}

TEST_CASE("a modelled kernel computes, and holds its SM at least as long as it says", "[host]") {
    host::node node{{.sms = 4, .timing = timing::modelled}};
    auto s = node.make_stream(device_id{0});
    std::array<int, 8> out{};
    node.faults(device_id{0}).stall(s);
    for (int i = 0; i < 20; ++i) s.launch({.blocks = 8, .hold = 500us}, [&](auto& ctx) { out[ctx.block_rank()] += 1; });
    const auto start = s.record();
    node.faults(device_id{0}).resume(s);
    const auto done = s.record();
    CHECK(done.wait(never));
    for (const int n : out) CHECK(n == 20);
    const auto blocks = node.ledger(device_id{0}).take().blocks;
    REQUIRE(blocks.size() == 160);
    for (const auto& b : blocks) CHECK(b.end - b.start >= 500us);
}

TEST_CASE("eight devices of four SMs each run side by side", "[host]") {
    host::node node{{.devices = 8, .sms = 4, .timing = timing::modelled}};
    std::vector<host::stream> streams;
    for (std::uint32_t d = 0; d < 8; ++d) {
        streams.push_back(node.make_stream(device_id{d}));
        node.faults(device_id{d}).stall(streams.back());
        for (int i = 0; i < 200; ++i) streams.back().enqueue(250us);
    }
    std::vector<host::point> done;
    for (std::uint32_t d = 0; d < 8; ++d) node.faults(device_id{d}).resume(streams[d]);
    for (auto& s : streams) done.push_back(s.record());
    for (const auto& p : done) CHECK(p.wait(never));
    for (std::uint32_t d = 0; d < 8; ++d) {
        const auto blocks = node.ledger(device_id{d}).take().blocks;
        REQUIRE(blocks.size() == 800);
        CHECK(blocks.back().end - blocks.front().start == 50ms);
        CHECK(host::busy_union(blocks, instant::min(), never) == 50ms);
    }
}

TEST_CASE("opaque work fills the device under both timings", "[host]") {
    for (const auto t : {timing::real, timing::modelled}) {
        host::node node{{.sms = 3, .timing = t}};
        auto s = node.make_stream(device_id{0});
        const auto before = s.record();
        s.enqueue(2ms);
        s.enqueue(ns{-5});  // none
        const auto after = s.record();
        CHECK(after.wait(never));
        CHECK(elapsed(before, after) >= 2ms);
        const auto blocks = node.ledger(device_id{0}).take().blocks;
        REQUIRE(blocks.size() == 6);
        CHECK(blocks[0].end - blocks[0].start == 2ms);
        CHECK(host::busy_union(blocks, instant::min(), never) == 2ms);
    }
}

TEST_CASE("work without an end ends with its device", "[host]") {
    const auto t = GENERATE(timing::real, timing::modelled);
    const bool opaque = t == timing::real || GENERATE(true, false);
    host::node node{{.sms = 1, .timing = t}};
    auto s = node.make_stream(device_id{0});
    if (opaque)
        s.enqueue(ns::max());
    else
        s.launch({.hold = ns::max()}, [](auto&) {});
    const auto done = s.record();
    CHECK_FALSE(done.wait(node.get_clock().now() + 5ms));
    node.faults(device_id{0}).lose_device();
    CHECK(done.wait(never));
    CHECK(done.status() == errc::device_lost);
}

TEST_CASE("copies and fills are work like any other", "[host]") {
    host::node node{{.memory = 64_MiB, .sms = 4}};
    auto s = node.make_stream(device_id{0}, {}, 5);
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, (std::size_t{5} << 20) + 3}) {
        auto* const p = static_cast<std::byte*>(node.memory(device_id{0}).allocate(size, 256));
        std::vector<std::byte> from(size, std::byte{7}), to(size + 1, std::byte{9});
        s.copy(p, from.data(), size);
        s.fill(p, std::byte{3}, size / 2);
        s.copy(to.data(), p, size);
        CHECK(s.record().wait(never));
        bool right = to[size] == std::byte{9};
        for (std::size_t i = 0; i < size; ++i) right &= to[i] == (i < size / 2 ? std::byte{3} : std::byte{7});
        CHECK(right);
        CHECK(node.memory(device_id{0}).deallocate(p, size, 256) == errc::none);
    }
    const auto blocks = node.ledger(device_id{0}).take().blocks;
    CHECK(blocks.size() == 3 * 3 + 4 + 2 + 4);
    for (const auto& b : blocks) CHECK(b.tag == 5);
}

TEST_CASE("a stream waits for a point of another stream", "[host]") {
    gate g;
    host::node node{{.devices = 2, .sms = 1}}, stranger{{.sms = 1}};
    auto s = node.make_stream(device_id{0}), t = node.make_stream(device_id{1}), u = stranger.make_stream(device_id{0});
    int value = 0, seen = 0;
    s.launch({}, g.kernel());
    s.launch({}, [&](auto&) { value = 5; });
    const auto written = s.record();
    t.wait(written);
    t.launch({}, [&](auto&) { seen = value; });
    const auto read = t.record();
    CHECK_FALSE(read.reached());
    CHECK_THROWS_AS(u.wait(written), operation_error);
    g.open();
    CHECK(read.wait(never));
    CHECK(seen == 5);
    u.wait(written);  // reached: no matter whose
    t.wait({});
    CHECK(t.record().wait(never));
}

TEST_CASE("streams waiting for one another around many devices", "[host]") {
    host::node node{{.devices = 4, .sms = 1, .timing = timing::modelled}};
    std::vector<host::stream> streams;
    for (std::uint32_t d = 0; d < 4; ++d) streams.push_back(node.make_stream(device_id{d}));
    int steps = 0;  // not atomic: the waits order the kernels
    host::point last;
    for (int i = 0; i < 400; ++i) {
        auto& s = streams[static_cast<std::size_t>(i) % 4];
        s.wait(last);
        s.launch({.hold = 1us}, [&](auto&) { ++steps; });
        last = s.record();
    }
    CHECK(last.wait(never));
    CHECK(steps == 400);
}

TEST_CASE("big and over-aligned kernels, and those that throw when they are copied", "[host]") {
    host::node node{{.sms = 1}};
    auto s = node.make_stream(device_id{0});
    std::array<int, 200> big{};
    big.back() = 3;
    int seen = 0;
    s.launch({}, [big, &seen](auto&) { seen += big.back(); });
    struct alignas(64) wide {
        int* seen;
        void operator()(host::kernel_context&) const {
            *seen += reinterpret_cast<std::uintptr_t>(this) % 64 == 0 ? 10 : 0;
        }
    };
    s.launch({}, wide{&seen});
    const std::string text = "a string long enough for the heap, to be copied with the kernel";
    s.launch({.blocks = 3}, [text, &seen](auto&) { seen += static_cast<int>(text.size()); });
    CHECK(s.record().wait(never));
    CHECK(seen == 13 + 3 * static_cast<int>(text.size()));

    struct refuses_copies {
        refuses_copies() = default;
        refuses_copies(const refuses_copies&) { throw std::runtime_error{"no"}; }
        void operator()(host::kernel_context&) const {}
    };
    const refuses_copies k;
    CHECK_THROWS_AS(s.launch({}, k), std::runtime_error);
    CHECK(s.record().wait(never));
}

TEST_CASE("kernels are destroyed as often as they were made, outside the node's lock", "[host]") {
    static std::atomic<int> alive{0};
    struct counted {
        explicit counted(host::stream& s) : stream(&s) { ++alive; }
        counted(const counted& o) : stream(o.stream) { ++alive; }
        counted(counted&& o) noexcept : stream(o.stream) { ++alive; }
        ~counted() {
            (void)stream->record();  // takes the lock
            --alive;
        }
        void operator()(host::kernel_context&) const {}
        host::stream* stream;
    };
    {
        host::node node{{.sms = 2}};
        auto other = node.make_stream(device_id{0}), s = node.make_stream(device_id{0});
        for (int i = 0; i < 100; ++i) s.launch({.blocks = 5}, counted{other});
        CHECK(s.record().wait(never));
        CHECK(alive == 0);
        node.faults(device_id{0}).stall(s);
        for (int i = 0; i < 10; ++i) s.launch({}, counted{other});
        node.faults(device_id{0}).lose_device();
        s.launch({}, counted{other});
        CHECK(s.record().wait(never));
    }
    CHECK(alive == 0);
}

TEST_CASE("a stream can be destroyed with work in it, moved, and used from many threads", "[host]") {
    host::node node{{.sms = 2}};
    std::atomic<int> ran{0};
    host::point done;
    {
        auto s = node.make_stream(device_id{0}, priority{3}, 8);
        auto t = std::move(s);
        CHECK(t.level() == priority{3});
        CHECK(t.tag() == 8);
        s = std::move(t);
        {
            std::vector<std::jthread> threads;
            for (int i = 0; i < 4; ++i)
                threads.emplace_back([&] {
                    for (int j = 0; j < 500; ++j) s.launch({.blocks = 2}, [&](auto&) { ++ran; });
                });
        }
        done = s.record();
    }
    CHECK(done.wait(never));
    CHECK(ran == 4000);
}

TEST_CASE("random work over random streams all runs, each stream in order", "[host]") {
    const auto seed = GENERATE(take(4, random(0U, ~0U)));
    CAPTURE(seed);
    std::mt19937 generator{seed};
    const auto random = [&] { return static_cast<std::uint32_t>(generator()); };
    const timing t = random() % 2 == 0 ? timing::real : timing::modelled;
    struct track {
        std::uint32_t blocks = 0;  // that have run; written by one kernel at a time only
        std::atomic<std::uint32_t> in_kernel{0};
        bool ordered = true;
    };
    std::array<track, 6> tracks;
    std::array<std::uint32_t, 6> expected{};
    host::node node{{.devices = 2, .sms = 3, .timing = t}};
    std::vector<host::stream> streams;
    std::vector<host::point> recent;
    for (std::uint32_t i = 0; i < 6; ++i)
        streams.push_back(node.make_stream(device_id{i % 2}, priority{static_cast<int>(random() % 3)}, i));
    for (int step = 0; step < 1500; ++step) {
        const auto i = random() % 6;
        auto& s = streams[i];
        track& k = tracks[i];
        switch (random() % 5) {
            case 0: {
                const std::uint32_t blocks = 1 + random() % 3, before = expected[i];
                const auto err = s.launch_cooperative({.blocks = blocks, .hold = 2us}, [&k, before](auto& ctx) {
                    (void)ctx.grid_sync();
                    if (ctx.block_rank() == 0) k.ordered &= k.blocks == before;
                    (void)ctx.grid_sync();
                    if (ctx.block_rank() == 0) k.blocks += ctx.num_blocks();
                });
                if (err != errc::none) FAIL("refused");
                expected[i] += blocks;
                break;
            }
            case 1: s.wait(recent.empty() ? host::point{} : recent[random() % recent.size()]); break;
            case 2:
                recent.push_back(s.record());
                if (recent.size() > 10) recent.erase(recent.begin());
                break;
            case 3: s.enqueue(ns{random() % 3000}); break;
            default: {
                const std::uint32_t before = expected[i], blocks = 1 + random() % 100;
                s.launch({.blocks = blocks, .hold = ns{random() % 2000}}, [&k, before](auto& ctx) {
                    // The last of the blocks to get here counts them all.
                    if (k.in_kernel.fetch_add(1) + 1 != ctx.num_blocks()) return;
                    k.in_kernel = 0;
                    k.ordered &= k.blocks == before;
                    k.blocks += ctx.num_blocks();
                });
                expected[i] += blocks;
            }
        }
    }
    for (std::size_t i = 0; i < 6; ++i) {
        const auto done = streams[i].record();
        CHECK(done.wait(never));
        CHECK(done.status() == errc::none);
        CHECK(tracks[i].ordered);
        CHECK(tracks[i].blocks == expected[i]);
    }
}

TEST_CASE("a block that yields lets those above have its SM, and uses none meanwhile", "[host][yield]") {
    host::node node{{.sms = 1}};
    auto low = node.make_stream(device_id{0}, {}, 1), high = node.make_stream(device_id{0}, {1}, 2),
         top = node.make_stream(device_id{0}, {2}, 3);
    std::atomic<int> inside{0};
    std::atomic<bool> go_on{false};
    std::vector<std::string> order;
    std::thread::id worker{};
    std::array<bool, 3> yielded{};
    int elsewhere = 0;
    const auto begin = low.record();
    low.launch({}, [&](auto& ctx) {
        worker = std::this_thread::get_id();
        yielded[0] = yield_point(ctx);  // nobody waits
        inside = 1;
        while (!go_on) std::this_thread::yield();
        order.emplace_back("begun");
        yielded[1] = yield_point(ctx);
        order.emplace_back("ended");
        yielded[2] = yield_point(ctx);
    });
    while (inside == 0) std::this_thread::yield();
    const auto above = [&](const char* what) {
        return [&, what](auto&) {
            elsewhere += std::this_thread::get_id() != worker ? 1 : 0;
            order.emplace_back(what);
            std::this_thread::sleep_for(2ms);
        };
    };
    high.launch({}, above("high"));
    high.launch({}, above("high again"));
    top.launch({}, above("top"));
    const auto of_high = high.record(), of_top = top.record();
    low.launch({}, [&](auto&) { order.emplace_back("next"); });
    go_on = true;
    const auto end = low.record();
    CHECK(end.wait(never));
    CHECK(of_high.reached());
    CHECK(of_top.reached());
    CHECK(order == std::vector<std::string>{"begun", "top", "high", "high again", "ended", "next"});
    CHECK(yielded == std::array{false, true, false});
    CHECK(elsewhere == 0);
    // By the ledger no two had the SM at once, and each had what it is charged.
    auto blocks = node.ledger(device_id{0}).take().blocks;
    std::ranges::sort(blocks, {}, &host::block_record::start);
    REQUIRE(blocks.size() == 6);  // of the one that yielded, two parts
    std::array<ns, 4> used{};
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        used[blocks[i].tag] += blocks[i].end - blocks[i].start;
        if (i > 0) CHECK(blocks[i].start >= blocks[i - 1].end);
    }
    CHECK(used[1] == used_between(begin, end).time);
    CHECK(elapsed(begin, end) >= used[1] + used[2] + used[3]);
    CHECK(used[2] >= 4ms);
}

TEST_CASE("a block on top of one that yielded fails for itself, and yields in its turn", "[host][yield]") {
    host::node node{{.sms = 1}};
    auto low = node.make_stream(device_id{0}), high = node.make_stream(device_id{0}, {1}),
         top = node.make_stream(device_id{0}, {2});
    std::atomic<int> inside{0};
    std::atomic<bool> go_on{false}, higher{false}, yielded{false};
    std::vector<int> order;
    low.launch({}, [&](auto& ctx) {
        inside = 1;
        while (!go_on) std::this_thread::yield();
        yield_point(ctx);
        order.push_back(0);
    });
    while (inside == 0) std::this_thread::yield();
    high.launch({}, [&](auto& ctx) {
        inside = 2;
        while (!higher) std::this_thread::yield();
        yielded = yield_point(ctx);
        order.push_back(1);
        throw std::runtime_error("of its own");
    });
    go_on = true;
    while (inside == 1) std::this_thread::yield();
    top.launch({}, [&](auto&) { order.push_back(2); });
    higher = true;
    const auto first = low.record(), second = high.record(), third = top.record();
    for (const auto* p : {&first, &second, &third}) CHECK(p->wait(never));
    CHECK(order == std::vector{2, 1, 0});
    CHECK(yielded);
    CHECK(first.status() == errc::none);
    CHECK(second.status() == errc::kernel_failed);
    CHECK(third.status() == errc::none);
}

TEST_CASE("blocks of a grid, and of modelled timing, don't yield", "[host][yield]") {
    for (const auto t : {timing::real, timing::modelled}) {
        host::node node{{.sms = 1, .timing = t}};
        auto low = node.make_stream(device_id{0}), high = node.make_stream(device_id{0}, {1});
        std::atomic<int> inside{0}, ran{0};
        std::atomic<bool> go_on{false}, yielded{false};
        low.launch({.blocks = t == timing::real ? 100U : 1U}, [&](auto& ctx) {
            inside = 1;
            while (!go_on) std::this_thread::yield();
            if (ctx.num_blocks() == 1 || ctx.block_rank() == 0) yielded = yield_point(ctx);
        });
        while (inside == 0) std::this_thread::yield();
        high.launch({}, [&](auto&) { ++ran; });
        go_on = true;
        CHECK(low.record().wait(never));
        CHECK(high.record().wait(never));
        CHECK(ran == 1);
        CHECK_FALSE(yielded);
    }
}
