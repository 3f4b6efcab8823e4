// SPDX-License-Identifier: Apache-2.0
// Measures how much device memory allocations take, when the pool reuses stream-ordered blocks, and
// how fast copies are.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/backend/cuda/pool.hpp>
#include <gpushare/error.hpp>

#include "experiments.hpp"
#include "rig.hpp"

namespace bench {

namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::never;

std::string size_name(bytes b) {
    const std::uint64_t n = b.count();
    if (n >= 1 << 20 && n % (1 << 20) == 0) return std::to_string(n >> 20) + "MiB";
    if (n >= 1 << 10 && n % (1 << 10) == 0) return std::to_string(n >> 10) + "KiB";
    return std::to_string(n) + "B";
}

bytes free_memory() {
    std::size_t free = 0, total = 0;
    cu::check(cudaMemGetInfo(&free, &total), "asking for free memory");
    return bytes{free};
}

}  // namespace

void malloc_granularity(report& r) {
    rig device;
    auto& memory = device.node.memory(device.device);
    double worst = 0;
    for (const bytes size : {bytes{1}, bytes{512}, bytes{513}, 4_KiB, 64_KiB, 65_KiB, 512_KiB, bytes{(1 << 20) - 1},
                             1_MiB, bytes{(1 << 20) + 1}, 2_MiB, bytes{(2 << 20) + 1}, 3_MiB, 33_MiB, 1_GiB}) {
        const auto n = static_cast<std::size_t>(size.count());
        const std::size_t count = std::clamp<std::size_t>((64U << 20) / n, 2, 16'384);
        std::vector<void*> blocks;
        const bytes before = free_memory();
        const double ns = ns_per_call(count, [&] { blocks.push_back(memory.allocate(n, 1)); });
        const double taken = static_cast<double>((before - free_memory()).count()) / static_cast<double>(count);
        for (void* const p : blocks) (void)memory.deallocate(p, n, 1);
        const auto charged = static_cast<double>(memory.charged(n, 1).count());
        // Small blocks may start in a page that other blocks have started, and may leave the last
        // page partly empty.
        const double page = bytes{n} < memory.model().paged_from
                                ? static_cast<double>(memory.model().page.count()) / static_cast<double>(count)
                                : 0;
        worst = std::max(worst, (std::abs(taken - charged) - page) / charged);
        std::printf("# %zu blocks of %llu bytes: %.0f bytes each, charged %.0f; %.0f ns each\n", count,
                    static_cast<unsigned long long>(size.count()), taken, charged, ns);
        r.figure("gpu.malloc_of_" + size_name(size) + "_vs_charged", {taken / charged}, "x");
    }
    r.figure("gpu.malloc_and_free_us",
             repeated(21,
                      [&] {
                          return us_of([&] {
                              void* const p = memory.allocate(4 << 20, 256);
                              (void)memory.deallocate(p, 4 << 20, 256);
                          });
                      }),
             "us");
    r.figure("gpu.malloc_model_error_pct", {100 * worst}, "%");
    if (worst > 0.05) throw std::runtime_error("cudaMalloc takes something else than allocation_model says");
}

void pool_rounding(report& r) {
    rig device;
    auto s = device.stream();
    for (const bytes most : {1_KiB, 1_MiB, 31_MiB, 32_MiB, 33_MiB, 64_MiB, 1_GiB}) {
        cu::memory_pool pool(device.node, device.device, {.max_size = most});
        const bytes step = std::clamp(most / 32, 1_KiB, 1_MiB);
        std::vector<void*> blocks;
        bytes first{};
        while (void* const p = pool.try_allocate(s, static_cast<std::size_t>(step.count()))) {
            blocks.push_back(p);
            if (blocks.size() == 1) first = pool.usage().reserved;
            if (pool.usage().used > most * 4 + 64_MiB) break;  // the pool ignores its maximum
        }
        const auto full = pool.usage();
        std::printf("# maxSize %s: %.4g MiB reserved for the first block, %.4g MiB when full, %.4g MiB used\n",
                    size_name(most).c_str(), to_mib(first), to_mib(full.reserved), to_mib(full.used));
        r.figure("gpu.pool_of_" + size_name(most) + "_reserves", {to_mib(full.reserved)}, "MiB");
        r.figure("gpu.pool_of_" + size_name(most) + "_gives", {to_mib(full.used)}, "MiB");
        for (void* const p : blocks) (void)pool.deallocate(s, p);
        s.record().wait(never);
    }

    double off = 0;
    cu::memory_pool pool(device.node, device.device);
    for (const std::size_t size : {1U, 511U, 512U, 513U, 4096U, 5000U, 1U << 20, (1U << 20) + 1}) {
        const bytes before = pool.usage().used;
        void* const p = pool.allocate(s, size);
        const bytes taken = pool.usage().used - before;
        off += taken == cu::memory_pool::charged(size, 256) ? 0 : 1;
        std::printf("# %zu bytes of a pool: %llu used, charged %llu\n", size,
                    static_cast<unsigned long long>(taken.count()),
                    static_cast<unsigned long long>(cu::memory_pool::charged(size, 256).count()));
        (void)pool.deallocate(s, p);
    }
    s.record().wait(never);
    r.figure("gpu.pool_allocate_and_free_us",
             repeated(21,
                      [&] {
                          constexpr int pairs = 200;
                          const double us = us_of([&] {
                              for (int i = 0; i < pairs; ++i) (void)pool.deallocate(s, pool.allocate(s, 4 << 20));
                          });
                          s.record().wait(never);
                          return us / pairs;
                      }),
             "us");
    expect_none(r, "gpu.pool_sizes_charged_wrongly", off, "sizes");
}

void pool_reuse(report& r) {
    constexpr std::size_t size = 64 << 20;
    const std::size_t repeats = sized<std::size_t>(11, 1);
    rig device;
    auto a = device.stream(), b = device.stream();
    device_array<block_record> records(device, 2);
    double overlaps = 0;
    // Frees a block on `a` behind a kernel that still runs, then allocates a block of the same size
    // on `on`. Returns 1 if both blocks are the same.
    const auto reused = [&](cu::stream& on, bool let_end) {
        cu::memory_pool pool(device.node, device.device);
        void* const first = pool.allocate(a, size);
        launch_spin(a, {}, sized<gpushare::ns>(10ms, 100us), records.data());
        (void)pool.deallocate(a, first);
        if (let_end) a.record().wait(never);
        void* const second = pool.allocate(on, size);
        launch_spin(on, {}, 10us, records.data() + 1);
        (void)pool.deallocate(on, second);
        a.record().wait(never);
        on.record().wait(never);
        const auto of = records.read(a);
        if (first == second && of[1].begin < of[0].end) overlaps += 1;
        return first == second ? 1.0 : 0.0;
    };
    r.figure("gpu.pool_reuses_on_same_stream", repeated(repeats, [&] { return reused(a, false); }), "seen");
    r.figure("gpu.pool_reuses_on_other_stream_at_once", repeated(repeats, [&] { return reused(b, false); }), "seen");
    r.figure("gpu.pool_reuses_on_other_stream_later", repeated(repeats, [&] { return reused(b, true); }), "seen");
    expect_none(r, "gpu.pool_blocks_used_by_two_at_once", overlaps, "blocks");
}

void copy_bandwidth(report& r) {
    const std::size_t size = sized<std::size_t>(1U << 30, 1U << 20), repeats = sized<std::size_t>(11, 1);
    rig device;
    auto s = device.stream();
    device_array<std::byte> from(device, size), to(device, size);
    cu::pinned_memory pinned(device.node);
    void* const host = pinned.allocate(size, 4096);
    const auto gb_per_s = [&](void* target, const void* source, double moved) {
        return repeated(repeats, [&, target, source, moved] {
            const auto begin = s.record();
            s.copy(target, source, size);
            const auto end = s.record();
            end.wait(never);
            return moved * static_cast<double>(size) / static_cast<double>(elapsed(begin, end).count());
        });
    };
    // A copy within the device reads and writes every byte.
    r.figure("gpu.copy_within_device_gb_per_s", gb_per_s(to.data(), from.data(), 2), "GB/s");
    r.figure("gpu.copy_to_device_gb_per_s", gb_per_s(to.data(), host, 1), "GB/s");
    r.figure("gpu.copy_from_device_gb_per_s", gb_per_s(host, from.data(), 1), "GB/s");
    (void)pinned.deallocate(host, size, 4096);
}

}  // namespace bench
