// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend/host/memory.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory_resource>
#include <random>
#include <thread>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include "support/catch.hpp"
#include "support/sanitizers.hpp"

using namespace gpushare;
using host::device_memory;

namespace {
constexpr std::size_t no_size = std::numeric_limits<std::size_t>::max();
}

TEST_CASE("charges are rounded up to granularity and alignment", "[host]") {
    const device_memory m{{.capacity = 1_MiB, .granularity = 512_B}};
    CHECK(m.charged(0, 1) == 512_B);
    CHECK(m.charged(1, 1) == 512_B);
    CHECK(m.charged(512, 256) == 512_B);
    CHECK(m.charged(513, 256) == 1_KiB);
    CHECK(m.charged(1, 4096) == 4_KiB);
    CHECK(m.charged(no_size, 1) == bytes::max());
    CHECK(m.charged(1, std::size_t{1} << 63) == bytes::max());
    CHECK(m.charged(1, 0) == bytes::max());
    CHECK(m.charged(1, 24) == bytes::max());
}

TEST_CASE("memory is had to the last byte and not beyond", "[host]") {
    device_memory m{{.capacity = 1_MiB, .taken = 128_KiB}};
    CHECK(m.taken_by_others() == 128_KiB);
    void* const most = m.allocate(800 << 10, 256);
    void* const rest = m.try_allocate(96 << 10, 256);
    REQUIRE(rest != nullptr);
    CHECK(m.used() == 896_KiB);
    CHECK(m.try_allocate(0, 1) == nullptr);
    CHECK(m.deallocate(most, 800 << 10, 256) == errc::none);
    CHECK(m.try_allocate((800 << 10) + 1, 256) == nullptr);
    void* const again = m.try_allocate(800 << 10, 256);
    REQUIRE(again != nullptr);
    std::memset(again, 1, 800 << 10);
    CHECK(m.deallocate(again, 800 << 10, 256) == errc::none);
    CHECK(m.deallocate(rest, 96 << 10, 256) == errc::none);
    CHECK(m.used() == 0_B);
}

TEST_CASE("a refusal says what was asked and what was left", "[host]") {
    device_memory m{{.capacity = 1_MiB, .taken = 256_KiB}};
    const auto refusal = [&](std::size_t size, std::size_t alignment) {
        try {
            (void)m.allocate(size, alignment);
        } catch (const memory_error& e) {
            return e.figures();
        }
        return failure{};
    };
    const failure full = refusal(1 << 20, 256);
    CHECK(full.code == errc::out_of_memory);
    CHECK(full.asked == 1 << 20);
    CHECK(full.left == 768 << 10);
    CHECK(full.limit == 1 << 20);
    CHECK(refusal(no_size, 1).code == errc::size_overflow);
    CHECK(refusal(1, 3).code == errc::bad_alignment);
    CHECK_THROWS_AS(m.allocate(no_size, 1), std::bad_alloc);
    CHECK(m.used() == 0_B);
}

TEST_CASE("wrong frees are named and change nothing", "[host]") {
    device_memory m{{.capacity = 1_MiB}};
    void* const p = m.allocate(1000, 256);
    int stranger = 0;
    CHECK(m.deallocate(&stranger, 4, 4) == errc::unknown_block);
    CHECK(m.deallocate(static_cast<std::byte*>(p) + 1, 1000, 256) == errc::unknown_block);
    CHECK(m.deallocate(p, 1001, 256) == errc::wrong_size);
    CHECK(m.deallocate(p, 1000, 128) == errc::wrong_size);
    CHECK(m.deallocate(nullptr, 1, 1) == errc::none);
    CHECK(m.used() == 1_KiB);
    CHECK(m.deallocate(p, 1000, 256) == errc::none);
    CHECK(m.deallocate(p, 1000, 256) == errc::unknown_block);
    CHECK(m.used() == 0_B);
}

TEST_CASE("addresses are aligned and distinct, zero bytes included", "[host]") {
    device_memory m{{.capacity = 1_GiB}};
    std::vector<void*> seen;
    for (const std::size_t size : {0U, 1U, 100U, 70000U, 1U << 20}) {
        for (std::size_t alignment = 1; alignment <= std::size_t{4} << 20; alignment *= 4) {
            void* const p = m.allocate(size, alignment);
            CHECK(reinterpret_cast<std::uintptr_t>(p) % alignment == 0);
            std::memset(p, 1, size);
            seen.push_back(p);
        }
    }
    std::ranges::sort(seen);
    CHECK(std::ranges::adjacent_find(seen) == seen.end());
}

TEST_CASE("a capacity costs nothing until it is touched", "[host]") {
    device_memory m{{.capacity = 256_GiB}};
    void* const p = m.try_allocate(std::size_t{200} << 30, 256);
    REQUIRE(p != nullptr);
    static_cast<std::byte*>(p)[std::size_t{100} << 30] = std::byte{1};
    CHECK(m.deallocate(p, std::size_t{200} << 30, 256) == errc::none);
}

TEST_CASE("impossible options are refused", "[host]") {
    CHECK_THROWS_AS((device_memory{{.granularity = 0_B}}), operation_error);
    CHECK_THROWS_AS((device_memory{{.granularity = 500_B}}), operation_error);
    CHECK_THROWS_AS((device_memory{{.capacity = 1_MiB, .taken = 2_MiB}}), operation_error);
}

TEST_CASE("injected refusals come when they were ordered", "[host]") {
    host::node node{{.devices = 2, .memory = 1_MiB}};
    device_memory& m = node.memory(device_id{0});
    node.faults(device_id{0}).fail_allocations(2, 2);
    std::vector<bool> got;
    for (int i = 0; i < 6; ++i) got.push_back(m.try_allocate(512, 256) != nullptr);
    CHECK(got == std::vector{true, true, false, false, true, true});
    CHECK(m.used() == 2_KiB);
    CHECK(node.memory(device_id{1}).used() == 0_B);
}

TEST_CASE("others can take what isn't allocated", "[host]") {
    host::node node{{.memory = 1_MiB}};
    device_memory& m = node.memory(device_id{0});
    (void)m.allocate(256 << 10, 256);
    CHECK(node.faults(device_id{0}).take_memory(512_KiB) == 512_KiB);
    CHECK(m.try_allocate(512 << 10, 256) == nullptr);
    CHECK(node.faults(device_id{0}).take_memory(2_MiB) == 768_KiB);
    CHECK(m.try_allocate(1, 1) == nullptr);
    CHECK(node.faults(device_id{0}).take_memory(0_B) == 0_B);
    CHECK(m.try_allocate(768 << 10, 256) != nullptr);
}

TEST_CASE("a request that fits is never refused while others ask for too much", "[host]") {
    const auto seed = std::random_device{}();
    CAPTURE(seed);
    constexpr int threads = 3;
    device_memory m{{.capacity = 3_MiB}};  // 1 MiB for each worker
    std::atomic<int> refused{0}, granted_too_much{0}, left{threads};
    std::vector<std::jthread> all;
    for (unsigned i = 0; i < threads; ++i) {
        all.emplace_back([&, i] {
            std::mt19937 random{seed + i};
            for (int round = 0; round < 3000; ++round) {
                const std::size_t a = 1 + random() % (512 << 10), b = 1 + random() % (512 << 10);
                void* const p = m.try_allocate(a, 256);
                void* const q = m.try_allocate(b, 256);
                refused += (p == nullptr) + (q == nullptr);
                m.deallocate(p, a, 256);
                m.deallocate(q, b, 256);
            }
            --left;
        });
    }
    all.emplace_back([&] {
        while (left > 0) granted_too_much += m.try_allocate((3 << 20) + 1, 256) != nullptr;
    });
    all.clear();
    CHECK(refused == 0);
    CHECK(granted_too_much == 0);
    CHECK(m.used() == 0_B);
}

#ifndef SUPPORT_SANITIZED
TEST_CASE("guarded memory can be touched by kernels only", "[host]") {
    host::node node{{.memory = 1_MiB, .sms = 2, .guarded = true}};
    device_memory& m = node.memory(device_id{0});
    auto* const p = static_cast<int*>(m.allocate(4096, 256));
    auto s = node.make_stream(device_id{0});

    const auto touching_kills = [&] {
        const pid_t child = ::fork();
        if (child == 0) {
            std::signal(SIGSEGV, SIG_DFL);
            *static_cast<volatile int*>(p) = 1;
            ::_exit(0);
        }
        int status = 0;
        ::waitpid(child, &status, 0);
        return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
    };
    CHECK(touching_kills());
    int seen = 0;
    s.launch({.blocks = 4}, [=](auto& ctx) { p[ctx.block_rank()] = 42; });
    s.copy(&seen, p + 3, sizeof seen);
    CHECK(s.record().wait(never));
    CHECK(seen == 42);
    CHECK(touching_kills());
    CHECK(m.deallocate(p, 4096, 256) == errc::none);
}
#endif
