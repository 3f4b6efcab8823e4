// SPDX-License-Identifier: Apache-2.0
// The figures memory.arena_* on the host backend: 256 MiB in chunks of 2 MiB, with times scaled to
// 1 GiB. The first owner has touched the memory before each move, and the next owner touches every
// page. A new page costs a fault, and the system clears the page. Both ways use huge pages if the
// system provides them.
#include "memory/arena.hpp"

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <stop_token>
#include <thread>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/host/virtual_memory.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/units.hpp>

namespace bench {

namespace {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::device_id;
using gpushare::never;
using gpushare::scrub_policy;
using std::chrono_literals::operator""us;

constexpr bytes moved = 256_MiB;
constexpr double per_gib = 4;
constexpr std::size_t repeats = 9;

using microseconds = std::chrono::duration<double, std::micro>;

template <std::invocable F>
double us(F f) {
    const auto begin = std::chrono::steady_clock::now();
    f();
    return microseconds(std::chrono::steady_clock::now() - begin).count();
}

void touch(void* p) {
    auto* at = static_cast<volatile char*>(p);
    for (std::uint64_t i = 0; i < moved.count(); i += 4096) at[i] = 1;
}

/// Two tenants of a device. Tenant a has touched its 256 MiB.
struct two_tenants {
    explicit two_tenants(scrub_policy policy)
        : pool{memory, scrubs, {.capacity = moved / pool_chunk, .scrub = policy, .window = 16}} {
        a.commit(0_B, moved);
        touch(a.data());
    }

    /// Times `f`, which moves the memory from a to b, then moves the memory back without timing.
    template <std::invocable F>
    double there(F f) {
        const double took = us(f);
        b.hand_over(0_B, moved, a, 0_B, {});
        touch(a.data());
        return took;
    }

    static constexpr bytes pool_chunk = 2_MiB;
    gpushare::host::node node{{.memory = 1_GiB, .sms = 2}};
    gpushare::host::virtual_memory memory{node.memory(device_id{0}), pool_chunk};
    gpushare::host::stream scrubs = node.make_stream(device_id{0}, {}), kernels = node.make_stream(device_id{0}, {});
    gpushare::quota whole{1_GiB}, of_a{whole, moved}, of_b{whole, moved};
    gpushare::chunk_pool<gpushare::host::virtual_memory, gpushare::host::stream> pool;
    gpushare::virtual_arena<gpushare::host::virtual_memory, gpushare::host::stream> a{pool, of_a, {1}, moved};
    gpushare::virtual_arena<gpushare::host::virtual_memory, gpushare::host::stream> b{pool, of_b, {2}, moved};
};

/// Commits and decommits 256 MiB repeatedly beside a neighbour that does the same. Returns the
/// microseconds of each commit.
std::vector<double> commits_beside_a_neighbour(std::size_t count) {
    gpushare::host::node node{{.memory = 1_GiB, .sms = 2}};
    gpushare::host::virtual_memory memory{node.memory(device_id{0}), two_tenants::pool_chunk};
    gpushare::host::stream scrubs = node.make_stream(device_id{0}, {});
    gpushare::quota whole{1_GiB}, of_a{whole, moved}, of_b{whole, moved};
    gpushare::chunk_pool pool{memory, scrubs, {.capacity = 2 * (moved / two_tenants::pool_chunk), .window = 16}};
    gpushare::virtual_arena a{pool, of_a, {1}, moved}, b{pool, of_b, {2}, moved};
    std::atomic<bool> ready{false};
    std::jthread neighbour([&](const std::stop_token& stop) {
        while (!stop.stop_requested()) {
            b.commit(0_B, moved, never);
            ready.store(true);
            b.decommit(0_B, moved, {});
        }
    });
    while (!ready.load()) std::this_thread::yield();
    std::vector<double> took;
    for (std::size_t i = 0; i < count; ++i) {
        took.push_back(us([&] { a.commit(0_B, moved, never); }));
        a.decommit(0_B, moved, {});
    }
    return took;
}

}  // namespace

void arena(report& r) {
    auto commits = commits_beside_a_neighbour(4 * repeats);
    for (double& t : commits) t *= per_gib;
    r.figure("memory.arena_commit_us_per_gib", commits, "us");
    two_tenants trusting(scrub_policy::off), scrubbed(scrub_policy::on_hand_over);
    std::vector<double> move, first_touch, scrub, wait, free_allocate, free_allocate_touch, ratio;
    for (std::size_t i = 0; i <= repeats; ++i) {
        double touched = 0;
        const double bare = trusting.there([&] { trusting.a.hand_over(0_B, moved, trusting.b, 0_B, {}); });
        const double with_touch = trusting.there([&] {
            trusting.a.hand_over(0_B, moved, trusting.b, 0_B, {});
            touched = us([&] { touch(trusting.b.data()); });
        });
        const double with_scrub = scrubbed.there([&] { scrubbed.a.hand_over(0_B, moved, scrubbed.b, 0_B, {}); });

        // The last kernel ends some time after the call, so the difference is the time to wake up.
        scrubbed.kernels.enqueue(500us);
        const std::array last{scrubbed.kernels.record()};
        scrubbed.a.decommit(0_B, 2_MiB, last);
        const auto after = scrubbed.node.get_clock().now() - last.front().when();
        scrubbed.a.commit(0_B, 2_MiB);
        touch(scrubbed.a.data());

        auto& device = scrubbed.node.memory(device_id{0});
        constexpr auto size = static_cast<std::size_t>(moved.count());
        constexpr std::size_t huge_page = 2 << 20;
        const auto allocate = [&] {
            void* const fresh = device.allocate(size, huge_page);
            ::madvise(fresh, size, MADV_HUGEPAGE);
            return fresh;
        };
        void* p = allocate();
        touch(p);
        const double free_allocated = us([&] {
            device.deallocate(p, size, huge_page);
            p = allocate();
        });
        const double allocated_touch = us([&] { touch(p); });
        device.deallocate(p, size, huge_page);

        if (i == 0) continue;  // a warm-up
        move.push_back(bare * per_gib);
        first_touch.push_back(touched * per_gib);
        scrub.push_back((with_scrub - bare) * per_gib);
        wait.push_back(microseconds(after).count());
        free_allocate.push_back(free_allocated * per_gib);
        free_allocate_touch.push_back((free_allocated + allocated_touch) * per_gib);
        ratio.push_back(with_touch / (free_allocated + allocated_touch));
    }
    r.figure("memory.arena_move_us_per_gib", move, "us");
    r.figure("memory.arena_scrub_us_per_gib", scrub, "us");
    r.figure("memory.arena_wait_us", wait, "us");
    r.figure("memory.arena_first_touch_us_per_gib", first_touch, "us");
    r.figure("memory.free_allocate_us_per_gib", free_allocate, "us");
    r.figure("memory.free_allocate_touch_us_per_gib", free_allocate_touch, "us");
    r.figure("memory.arena_move_touch_vs_free_allocate_touch", ratio, "x");
}

}  // namespace bench
