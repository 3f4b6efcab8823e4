// SPDX-License-Identifier: Apache-2.0
// CUDA's stream-ordered pools and virtual memory, over the stand-in.
#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pool.hpp>
#include <gpushare/backend/cuda/virtual_memory.hpp>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <new>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>

#include "conformance/memory_resource_suite.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/sanitizers.hpp"
#include "support/this_heap.hpp"

namespace pool_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::device_id;
using gpushare::errc;
using gpushare::never;
using gpushare::operation_error;

namespace cuda = gpushare::cuda;

namespace {

constexpr device_id d{0}, other{1};
constexpr std::size_t most = std::numeric_limits<std::size_t>::max();

struct fixture {
    const standin::session gpu{{.devices = 2, .memory = 128_MiB}};
    cuda::node node;
    cuda::stream s = node.make_stream(d);
};

}  // namespace

TEST_CASE_METHOD(fixture, "a pool on a stream is a memory_resource", "[cuda][pool]") {
    {
        cuda::memory_pool pool{node, d};
        cuda::stream_memory memory{pool, s};
        // Of no more alignment than CUDA gives: the suite's highest is beyond.
        for (std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{100'000}}) {
            void* const p = memory.allocate(size, 256);
            CHECK(p != nullptr);
            CHECK(memory.deallocate(p, size, 256) == errc::none);
        }
    }
    CHECK(standin::existing().pools == 0);
}

TEST_CASE_METHOD(fixture, "chunks and blocks of pools are allocated here, and what a pool keeps is others'",
                 "[cuda][pool][memory]") {
    const auto& memory = node.memory(d);
    const bytes before = memory.taken_by_others();
    cuda::virtual_memory chunks{node, d};
    {
        auto first = chunks.create(), second = chunks.create();
        REQUIRE((first && second));
        CHECK(standin::used(0) == 4_MiB);
        CHECK(memory.taken_by_others() == before);
        auto moved = *std::move(first);
        moved = *std::move(second);  // one of them is gone
        CHECK(standin::used(0) == 2_MiB);
        CHECK(memory.taken_by_others() == before);
    }
    CHECK(standin::used(0) == 0_B);
    CHECK(memory.taken_by_others() == before);
    {
        cuda::memory_pool made{node, d};
        cuda::memory_pool pool = std::move(made);
        void* const p = pool.allocate(s, 1 << 20);
        CHECK(memory.taken_by_others() == before + 31_MiB);
        CHECK(pool.deallocate(s, p) == errc::none);
        CHECK(s.record().wait(never));
        CHECK(memory.taken_by_others() == before + 32_MiB);
        pool.trim();
        CHECK(memory.taken_by_others() == before);
    }
    CHECK(memory.taken_by_others() == before);
}

TEST_CASE_METHOD(fixture, "a pool keeps as much freed memory as it was asked to", "[cuda][pool]") {
    for (const bytes keep : {0_B, 32_MiB, bytes::max()}) {
        cuda::memory_pool pool{node, d, {.keep = keep}};
        void* const p = pool.allocate(s, 40_MiB);
        const bytes reserved = pool.usage().reserved;
        CHECK(reserved > 32_MiB);
        CHECK(pool.deallocate(s, p) == errc::none);
        CHECK(s.record().wait(never));
        CHECK(cudaStreamSynchronize(s.native_handle()) == cudaSuccess);
        CHECK((pool.usage().reserved == std::min(keep, reserved)));
    }
}

TEST_CASE_METHOD(fixture, "a pool's limit is on what it reserves, rounded up; used is counted apart (cudaMemPool)",
                 "[cuda][pool]") {
    cuda::memory_pool pool{node, d, {.max_size = 1_KiB}};
    void* const p = pool.allocate(s, 1000);
    auto usage = pool.usage();
    CHECK((usage.used == 1_KiB));
    CHECK((usage.used == pool.charged(1000, 256)));
    CHECK((usage.reserved == 32_MiB));           // as others saw it on a device
    void* const q = pool.allocate(s, 16 << 20);  // far beyond the limit, and granted
    CHECK(pool.try_allocate(s, 17 << 20) == nullptr);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    CHECK(pool.deallocate(s, p) == errc::none);
    CHECK(pool.deallocate(s, q) == errc::none);
    CHECK(s.record().wait(never));
    usage = pool.usage();
    CHECK((usage.used == 0_B));
    CHECK((usage.used_peak == 16_MiB + 1_KiB));
    CHECK((usage.reserved == 32_MiB));  // kept, until it is asked to let go
    pool.trim();
    CHECK((pool.usage().reserved == 0_B));
}

TEST_CASE_METHOD(fixture, "a quota in front of a pool holds to the byte, whatever the pool reserves (hami: uncounted)",
                 "[cuda][pool]") {
    cuda::memory_pool pool{node, d, {.max_size = 1_KiB}};
    cuda::stream_memory memory{pool, s};
    gpushare::quota limit{2_KiB};
    gpushare::quota_resource mine{limit, memory};
    void* const p = mine.allocate(1000, 256);
    void* const q = mine.allocate(1024, 256);
    CHECK(mine.try_allocate(1, 256) == nullptr);
    CHECK(mine.deallocate(p, 1000, 256) == errc::none);
    CHECK(mine.deallocate(q, 1024, 256) == errc::none);
    CHECK(s.record().wait(never));
}

TEST_CASE_METHOD(fixture, "a pool aligns blocks as far as is asked for, and charges it", "[cuda][pool]") {
    cuda::memory_pool made{node, d};
    CHECK((made.charged(1000, 256) == 1_KiB));
    CHECK((made.charged(1000, 512) == 1_KiB + 512_B));
    std::vector<void*> blocks;
    for (std::size_t alignment = 1; alignment <= 65536; alignment *= 2) {
        void* const p = made.allocate(s, 1000, alignment);
        CHECK(reinterpret_cast<std::uintptr_t>(p) % alignment == 0);
        s.fill(p, std::byte{1}, 1000);
        blocks.push_back(p);
    }
    for (const std::size_t alignment : {std::size_t{3}, std::size_t{1} << 45, std::size_t{1} << 63}) {
        gpushare::failure why;
        CHECK(made.try_allocate(s, 1, alignment, &why) == nullptr);
        CHECK(why.code == errc::bad_alignment);
    }
    auto pool = std::move(made);
    for (void* const p : blocks) CHECK(pool.deallocate(s, p) == errc::none);
    CHECK(s.record().wait(never));
    CHECK(pool.deallocate(s, blocks.back()) == errc::unknown_block);
    void* const device_block = node.memory(d).allocate(100, 256);
    CHECK(pool.deallocate(s, device_block) == errc::unknown_block);  // and the device has it still
    CHECK(node.memory(d).deallocate(device_block, 100, 256) == errc::none);
    CHECK((pool.usage().used == 0_B));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE("virtual memory is made for network cards where the driver has that", "[cuda][virtual_memory]") {
    const bool has = GENERATE(true, false);
    const standin::session gpu{{.rdma = has}};
    cuda::node node;
    cuda::virtual_memory memory{node, d};
    auto range = memory.reserve(2 << 20).value();
    const cuda::mapping place{memory, range.data(), memory.create().value()};
    CHECK(standin::rdma_capable(place.data()) == has);
}

TEST_CASE_METHOD(fixture, "a request that a pool can't serve is refused before CUDA sees it", "[cuda][pool]") {
    cuda::memory_pool pool{node, d};
    standin::forget_calls();
    CHECK(pool.try_allocate(s, most) == nullptr);
    CHECK(pool.try_allocate(s, 1, 384) == nullptr);
    CHECK(pool.try_allocate(s, 1, 0) == nullptr);
    CHECK((pool.charged(most, 1) == bytes::max()));
    CHECK((pool.charged(1, 384) == bytes::max()));
    CHECK_THROWS_AS(pool.allocate(s, most), gpushare::memory_error);
    CHECK(standin::count("cudaMallocFromPoolAsync") == 0);

    int local = 0;
    CHECK(pool.deallocate(s, &local) == errc::unknown_block);
    CHECK(pool.deallocate(s, nullptr) == errc::none);
    void* const p = pool.allocate(s, 1);
    CHECK(pool.deallocate(s, p) == errc::none);
    CHECK(pool.deallocate(s, p) == errc::unknown_block);
    CHECK(s.record().wait(never));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
}

namespace {

/// Calls back when it is asked for the time so often; a millisecond passes each time.
struct told_clock {
    std::function<void(int)>* asked;
    int* times;
    [[nodiscard]] gpushare::instant now() const noexcept {
        (*asked)(++*times);
        return gpushare::instant{*times * 1ms};
    }
};

}  // namespace

TEST_CASE_METHOD(fixture, "a thread that waits for a pool's memory has it once a stream has reached its free",
                 "[cuda][pool]") {
    cuda::memory_pool pool{node, d};
    cuda::stream_memory memory{pool, s};
    auto other_stream = node.make_stream(d);
    constexpr std::size_t size = 64 << 20;  // of 128 MiB less a context
    void* const first = pool.allocate(s, size);
    standin::hold(s.native_handle());
    CHECK(pool.deallocate(s, first) == errc::none);
    int times = 0;
    std::function<void(int)> asked = [&](int n) {
        if (n != 3) return;
        standin::let_go(s.native_handle());
        CHECK(s.record().wait(never));
    };
    const gpushare::patience until{told_clock{&asked, &times}};
    gpushare::failure why;
    void* const p = pool.allocate(other_stream, size, 256, until);
    CHECK(p != nullptr);
    CHECK(times == 3);
    const auto at = [&](int ms) { return gpushare::instant{ms * 1ms}; };
    CHECK(memory.try_allocate(size, 256, gpushare::patience{until.time, at(6)}, &why) == nullptr);
    CHECK(why.code == errc::deadline_exceeded);
    CHECK(why.asked == size);
    CHECK(times == 6);
    CHECK_THROWS_AS((void)memory.allocate(size, 256, gpushare::patience{until.time, at(7)}), std::bad_alloc);
    std::stop_source stop;
    stop.request_stop();
    CHECK(pool.try_allocate(s, size, 256, gpushare::patience{until.time, never, stop.get_token()}, &why) == nullptr);
    CHECK(why.code == errc::stopped);
    CHECK(pool.try_allocate(s, size * 3, 256, until, &why) == nullptr);  // more than the device has
    CHECK(why.code == errc::out_of_memory);
    CHECK(pool.try_allocate(s, 1, 384, until, &why) == nullptr);
    CHECK(why.code == errc::bad_alignment);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    CHECK(pool.deallocate(other_stream, p) == errc::none);
    CHECK(other_stream.record().wait(never));
}

TEST_CASE_METHOD(fixture, "a pool has nothing for a stream that is captured", "[cuda][pool][capture]") {
    cuda::memory_pool pool{node, d};
    void* const p = pool.allocate(s, 1);
    {
        REQUIRE(s.state().captures.begin());  // as graph_capture does
        CHECK_THROWS_AS(pool.allocate(s, 1), operation_error);
        CHECK(pool.deallocate(s, p) == errc::capturing);
        s.state().captures.end();
    }
    CHECK(pool.deallocate(s, p) == errc::none);
    CHECK(s.record().wait(never));
}

TEST_CASE_METHOD(fixture, "a capture that another thread begins has nothing of a pool's",
                 "[cuda][pool][capture][threads]") {
    cuda::memory_pool pool{node, d};
    void* p = nullptr;
    for (const bool frees : {false, true}) {
        CAPTURE(frees);
        std::promise<void> begun, go_on;
        errc ended = errc::none;
        std::size_t nodes = 1;
        std::thread capturer;
        standin::before_next(frees ? "cudaFreeAsync" : "cudaMallocFromPoolAsync", [&] {
            capturer = std::thread([&] {
                ended = support::code_of([&] {
                    cuda::graph_capture scope{s};
                    begun.set_value();
                    go_on.get_future().wait();
                    nodes = scope.finish().num_nodes();
                });
            });
            // It begins when the pool is through with the stream, so nobody can wait for it here.
            CHECK(begun.get_future().wait_for(50ms) == std::future_status::timeout);
        });
        if (frees)
            CHECK(pool.deallocate(s, p) == errc::none);
        else
            p = pool.try_allocate(s, 1000);
        go_on.set_value();
        capturer.join();
        CHECK(p != nullptr);
        CHECK(ended == errc::none);
        CHECK(nodes == 0);
    }
    CHECK(s.record().wait(never));
}

TEST_CASE("pools: handles in and out, other devices, devices without any", "[cuda][pool]") {
    {
        const standin::session gpu{{.devices = 2}};
        cuda::node node;
        auto pool = cuda::memory_pool::from_native_handle(node, d, raw::make_pool(0));
        pool.open_to(node, other);
        pool.open_to(node, d);
        auto moved = std::move(pool);
        const auto native = moved.release();
        CHECK(standin::existing().pools == 1);
        CHECK(cudaMemPoolDestroy(native) == cudaSuccess);
        CHECK_THROWS_AS(cuda::memory_pool(node, device_id{2}), operation_error);
        standin::inject({.call = "cudaMemPoolSetAttribute", .code = cudaErrorInvalidValue});
        CHECK_THROWS_AS(cuda::memory_pool(node, d), operation_error);
        CHECK(standin::existing().pools == 0);
    }
    const standin::session gpu{{.devices = 2, .peers = false}};
    cuda::node node;
    cuda::memory_pool pool{node, d};
    CHECK_THROWS_AS(pool.open_to(node, other), operation_error);
}

TEST_CASE("copies and fills reach memory of every kind, whatever is current, and between devices", "[cuda][pool]") {
    const bool peers = GENERATE(true, false);
    const int current = GENERATE(0, 1);
    CAPTURE(peers, current);
    const standin::session gpu{{.devices = 2, .memory = 128_MiB, .peers = peers}};
    cuda::node node;
    cuda::memory_pool pools[] = {{node, d}, {node, other}};
    cuda::virtual_memory chunks[] = {{node, d}, {node, other}};
    cuda::stream streams[] = {node.make_stream(d), node.make_stream(other)};
    constexpr std::size_t size = 1000;
    for (int kind = 0; kind < 3; ++kind) {
        CAPTURE(kind);  // the device's memory, a pool's, virtual memory
        std::vector<cuda::virtual_memory::range> ranges;
        std::vector<cuda::mapping> mappings;
        std::vector<void*> blocks;
        for (std::uint32_t i = 0; i < 2; ++i) {
            if (kind == 0) blocks.push_back(node.memory(device_id{i}).allocate(size, 256));
            if (kind == 1) blocks.push_back(pools[i].allocate(streams[i], size));
            if (kind != 2) continue;
            ranges.push_back(chunks[i].reserve(2 << 20).value());
            mappings.emplace_back(chunks[i], ranges[i].data(), chunks[i].create().value());
            blocks.push_back(mappings[i].data());
        }
        REQUIRE(cudaSetDevice(current) == cudaSuccess);
        std::vector<unsigned char> there(size);
        for (std::uint32_t by = 0; by < 2; ++by) {
            cuda::stream& s = streams[by];
            void *const own = blocks[by], *const foreign = blocks[1 - by];
            std::vector<unsigned char> mine(size, static_cast<unsigned char>(10 + by));
            s.copy(own, mine.data(), size);
            s.copy(foreign, own, size);  // by peers, or through the host
            s.fill(own, std::byte{99}, size);
            s.copy(own, foreign, size);
            s.copy(there.data(), own, size);
            CHECK(s.record().wait(never));
            CHECK(there == mine);
            if (peers) CHECK_NOTHROW(s.fill(foreign, std::byte{98}, size));  // as a kernel would, without the host
            CHECK(s.record().wait(never));
        }
        for (std::uint32_t i = 0; i < 2; ++i) {
            if (kind == 0) CHECK(node.memory(device_id{i}).deallocate(blocks[i], size, 256) == errc::none);
            if (kind == 1) CHECK(pools[i].deallocate(streams[i], blocks[i]) == errc::none);
            CHECK(streams[i].record().wait(never));
        }
    }
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    int now = -1;
    CHECK(cudaGetDevice(&now) == cudaSuccess);
    CHECK(now == current);
}

TEST_CASE("pools and virtual memory aren't opened where the node has no peer access, or it isn't wanted",
          "[cuda][pool]") {
    const standin::session gpu{{.devices = 2, .memory = 128_MiB}};
    const bool node_wants = GENERATE(true, false);
    cuda::node node{{.peer_access = node_wants}};
    CHECK(node.peers_of(d).size() == (node_wants ? 1 : 0));
    cuda::memory_pool pool{node, d, {.peers = !node_wants}};
    cuda::virtual_memory memory{node, d, {.peers = !node_wants}};
    auto near = node.make_stream(d), far = node.make_stream(other);
    auto range = memory.reserve(2 << 20).value();
    const cuda::mapping place{memory, range.data(), memory.create().value()};
    void* const p = pool.allocate(near, 100);
    for (void* const closed : {p, place.data()}) CHECK_THROWS_AS(far.fill(closed, std::byte{1}, 100), operation_error);
    pool.open_to(node, other);
    far.fill(p, std::byte{1}, 100);
    CHECK(far.record().wait(never));
    CHECK(pool.deallocate(near, p) == errc::none);
    CHECK(near.record().wait(never));
    // Devices that are named twice are opened to once.
    cuda::virtual_memory open{node, d, {.open_to = {other, other, d}}};
    auto there = open.reserve(2 << 20).value();
    const cuda::mapping seen{open, there.data(), open.create().value()};
    far.fill(seen.data(), std::byte{1}, 100);
    CHECK(far.record().wait(never));
}

TEST_CASE_METHOD(fixture, "a pool asks a borrowed stream whether its owner captures it", "[cuda][pool][capture]") {
    cuda::memory_pool pool{node, d};
    const auto theirs = raw::make_stream();
    {
        auto borrowed = node.borrow(theirs);
        void* const before = pool.allocate(borrowed, 1 << 20);
        REQUIRE(cudaStreamBeginCapture(theirs, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        standin::forget_calls();
        gpushare::failure why;
        CHECK(pool.try_allocate(borrowed, 1 << 20, 256, &why) == nullptr);
        CHECK(why.code == errc::capturing);
        CHECK(pool.deallocate(borrowed, before) == errc::capturing);
        CHECK(standin::count("cudaMallocFromPoolAsync") + standin::count("cudaFreeAsync") == 0);
        CHECK(cudaGraphDestroy(raw::end_capture(theirs)) == cudaSuccess);
        CHECK(pool.deallocate(borrowed, before) == errc::none);
        CHECK(borrowed.record().wait(never));
    }
    raw::destroy(theirs);
}

TEST_CASE_METHOD(fixture, "a chunk keeps what it holds from one place to the next", "[cuda][virtual_memory]") {
    cuda::virtual_memory memory{node, d};
    REQUIRE((memory.granularity() == 2_MiB));
    constexpr std::size_t size = 2 << 20;
    auto range = memory.reserve(4 * size).value();
    const auto at = [&](std::size_t i) { return static_cast<std::byte*>(range.data()) + i * size; };
    const auto a = memory.create().value(), b = memory.create().value();
    CHECK(memory.map(at(0), a) == errc::none);
    CHECK(memory.map(at(1), b) == errc::none);
    std::memset(at(0), 1, 2 * size);
    CHECK(memory.map(at(1), a) == errc::backend_failed);  // taken: nothing has changed
    CHECK(at(1)[0] == std::byte{1});
    CHECK(memory.unmap(at(0), 2 * size) == errc::none);
    CHECK(memory.map(at(3), a) == errc::none);
    CHECK(at(3)[size - 1] == std::byte{1});
    CHECK(memory.unmap(at(3), size) == errc::none);
    CHECK(memory.unmap(at(3), size) != errc::none);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE_METHOD(fixture, "unmapping waits for the points of those who used it, until its deadline",
                 "[cuda][virtual_memory]") {
    cuda::virtual_memory memory{node, d};
    constexpr std::size_t size = 2 << 20;
    auto range = memory.reserve(size).value();
    const auto chunk = memory.create().value();
    cuda::mapping place{memory, range.data(), chunk};
    standin::hold(s.native_handle());
    s.fill(place.data(), std::byte{3}, size);
    const std::array users{s.record()};
    CHECK(place.close(users, node.get_clock().now() + 1ms) == errc::deadline_exceeded);
    CHECK(place.data() == range.data());
    standin::let_go(s.native_handle());
    CHECK(place.close(users, never) == errc::none);
    CHECK(place.close(users, never) == errc::none);
    CHECK(standin::existing().mappings == 0);
    { const cuda::mapping again{memory, range.data(), chunk}; }
    CHECK(standin::existing().mappings == 0);
}

TEST_CASE_METHOD(fixture, "virtual memory that can't be had is refused with its reason", "[cuda][virtual_memory]") {
    cuda::virtual_memory memory{node, d};
    constexpr std::size_t size = 2 << 20;
    CHECK(memory.reserve(0).code() == errc::not_whole);
    CHECK(memory.reserve(size + 1).code() == errc::not_whole);
    CHECK(memory.reserve(most - size + 1).code() == errc::size_overflow);
    for (const auto chunk : {1_MiB, 3_MiB, 6_MiB})  // the driver aligns to powers of two only
        CHECK_THROWS_AS(cuda::virtual_memory(node, d, {.chunk = chunk}), operation_error);
    CHECK((cuda::virtual_memory(node, d, {.chunk = 4_MiB}).granularity() == 4_MiB));
    CHECK_THROWS_AS(cuda::virtual_memory(node, device_id{2}), operation_error);

    std::vector<cuda::virtual_memory::chunk> all;
    auto last = memory.create();
    for (; last; last = memory.create()) all.push_back(std::move(*last));
    CHECK(last.code() == errc::out_of_memory);
    CHECK(all.size() > 32);
    const auto released = all.back().release();
    CHECK(node.api().mem_release(released) == CUDA_SUCCESS);
    all.clear();
    CHECK(memory.create());

    // Half a mapping is none.
    auto range = memory.reserve(size).value();
    const auto chunk = memory.create().value();
    standin::inject({.call = "cuMemSetAccess", .code = cudaErrorMemoryAllocation});
    CHECK(memory.map(range.data(), chunk) == errc::out_of_memory);
    CHECK(standin::existing().mappings == 0);
    standin::inject({.call = "cuMemMap", .code = cudaErrorMemoryAllocation});
    CHECK_THROWS_AS(cuda::mapping(memory, range.data(), chunk), std::bad_alloc);
}

TEST_CASE("virtual memory is opened to other devices, or the driver has none", "[cuda][virtual_memory]") {
    {
        const standin::session gpu{{.devices = 2}};
        cuda::node node;
        cuda::virtual_memory memory{node, d, {.open_to = {other, d}}};
        auto range = memory.reserve(2 << 20).value();
        const cuda::mapping place{memory, range.data(), memory.create().value()};
        auto t = node.make_stream(other);
        t.fill(place.data(), std::byte{1}, 100);
        CHECK(t.record().wait(never));
    }
    {
        const standin::session gpu{{.devices = 2, .peers = false}};
        cuda::node node;
        CHECK_THROWS_AS(cuda::virtual_memory(node, d, {.open_to = {other}}), operation_error);
    }
    const standin::session gpu;
    standin::hide_entry_point("cuMemGetAllocationGranularity");
    cuda::node node;
    try {
        const cuda::virtual_memory memory{node, d};
        FAIL("made without the driver's help");
    } catch (const operation_error& e) {
        CHECK(e.code() == errc::not_supported);
    }
}

TEST_CASE_METHOD(fixture, "memory given back to a lost device is gone, without an error",
                 "[cuda][pool][virtual_memory][fault]") {
    cuda::memory_pool pool{node, d};
    cuda::virtual_memory memory{node, d};
    void* const p = pool.allocate(s, 1000);
    const auto range = memory.reserve(2 << 20);
    const auto chunk = memory.create();
    REQUIRE((range && chunk));
    REQUIRE(memory.map(range->data(), *chunk) == errc::none);
    standin::poison(0, cudaErrorIllegalAddress);
    (void)node.memory(d).taken_by_others();  // somebody sees the loss
    CHECK(node.lost(d));
    CHECK(pool.deallocate(s, p) == errc::none);
    CHECK(memory.unmap(range->data(), 2 << 20) == errc::none);
    gpushare::failure why;
    CHECK(pool.try_allocate(s, 1000, 256, &why) == nullptr);
    CHECK(why.code == errc::device_lost);
    CHECK(memory.create().why().code == errc::device_lost);
}

TEST_CASE_METHOD(fixture, "memory is unmapped though the driver stops at another device's error",
                 "[cuda][virtual_memory][fault]") {
    cuda::virtual_memory memory{node, d};
    const auto range = memory.reserve(2 << 20);
    const auto chunk = memory.create();
    REQUIRE((range && chunk));
    REQUIRE(memory.map(range->data(), *chunk) == errc::none);
    standin::inject({.call = "cuMemUnmap", .code = cudaErrorIllegalAddress});
    CHECK(memory.unmap(range->data(), 2 << 20) == errc::none);
    CHECK_FALSE(node.lost(d));
    CHECK(memory.map(range->data(), *chunk) == errc::none);  // the place is free
    CHECK(memory.unmap(range->data(), 2 << 20) == errc::none);
}

TEST_CASE("ranges and chunks outlive what made them", "[cuda][virtual_memory]") {
    const standin::session gpu;
    auto made = [] {
        cuda::node node;
        cuda::virtual_memory memory{node, d};
        return std::pair(memory.reserve(2 << 20).value(), memory.create().value());
    }();
    CHECK(standin::existing().address_ranges == 1);
    CHECK(standin::existing().physical_blocks == 1);
}

#ifndef SUPPORT_THREAD_SANITIZED

TEST_CASE_METHOD(fixture, "a block that CUDA doesn't take back is remembered without host memory", "[cuda][pool]") {
    cuda::memory_pool pool{node, d};
    // as many as fit into the pool's table without growing it
    std::array<void*, 8> out{};
    for (void*& p : out) p = pool.allocate(s, 512, 1 << 20);
    void* added = nullptr;
    standin::inject({.call = "cudaFreeAsync", .code = cudaErrorNotPermitted});
    standin::before_next("cudaFreeAsync", [&] {
        added = pool.allocate(s, 512, 1 << 20);
        support::this_heap = {.good = 0, .least = 512};
    });
    const errc refused = pool.deallocate(s, out[0]);
    support::this_heap = {};
    CHECK(refused == errc::backend_failed);
    REQUIRE(added != nullptr);
    for (void* const p : out) CHECK(pool.deallocate(s, p) == errc::none);
    CHECK(pool.deallocate(s, added) == errc::none);
    CHECK(s.record().wait(never));
    CHECK(pool.usage().used == 0_B);
}

#endif

}  // namespace pool_test
