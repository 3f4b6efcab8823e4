// SPDX-License-Identifier: Apache-2.0
// See survivors.hpp.
#include "survivors.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/host/virtual_memory.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/units.hpp>

namespace bench {

namespace {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::memory_stack;

namespace host = gpushare::host;

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

/// A device that offers every stack.
struct device {
    explicit device(memory_stack stack) : tenants(node, {.stack = stack, .scrub = gpushare::scrub_policy::off}) {
        tenants.offer({0}, chunks);
        tenants.offer({0}, pool);
    }
    host::node node{{.memory = 256_MiB, .sms = 1, .timing = host::timing::modelled}};
    host::virtual_memory chunks{node.memory({0}), 256_KiB};
    host::memory_pool pool{node, {0}};
    gpushare::tenancy<host::node> tenants;
};

/// A tenant with its own account of the most that each block can take: in a pool, a small block may
/// keep the segment that it shares; in an arena, a block keeps its chunks.
class tenant {
public:
    tenant(device& on, const char* name, bytes memory)
        : of_(on.tenants.admit({.name = name, .memory = memory, .compute = 10_pct})),
          largest_(memory),
          limit_(memory) {}

    void allocate(std::size_t size, survivors_outcome& o) {
        ++o.operations;
        void* const p = of_.memory().try_allocate(size);
        if (p == nullptr) {
            // Lost to blocks that are reused.
            const bytes wasted = stack() == memory_stack::pool ? largest_ / 64 : 0_B;
            o.false_refusals += taken_ + rounded(size) + wasted <= limit_ ? 1 : 0;
            return;
        }
        blocks_.emplace_back(p, size);
        taken_ += rounded(size);
        live_ += bytes{size};
    }
    void free(std::size_t i) {
        const auto [p, size] = std::exchange(blocks_[i], blocks_.back());
        blocks_.pop_back();
        taken_ = taken_ - rounded(size);
        live_ = live_ - bytes{size};
        (void)of_.memory().deallocate(p, size);
    }
    void resize(bytes to) {
        limit_ = to;
        of_.resize({.memory = to});
    }
    void sleep() {
        if (of_.sleep(host::steady_clock::now() + std::chrono::seconds(10))) of_.wake();
    }
    /// Measures after idle memory has gone back.
    void measure(survivors_outcome& o) {
        of_.memory().trim();
        const auto held = of_.memory().limit().usage().current;
        if (live_ >= 1_MiB)
            o.held_over_live =
                std::max(o.held_over_live, static_cast<double>(held.count()) / static_cast<double>(live_.count()));
    }
    [[nodiscard]] std::size_t count() const { return blocks_.size(); }
    [[nodiscard]] bytes live() const { return live_; }
    [[nodiscard]] bytes limit() const { return limit_; }
    [[nodiscard]] memory_stack stack() const { return of_.memory().made_of(); }
    [[nodiscard]] std::size_t size_of(std::size_t i) const { return blocks_[i].second; }

private:
    [[nodiscard]] bytes rounded(std::size_t size) const {
        const auto up = [](std::size_t n, std::size_t to) { return bytes{(n + to - 1) / to * to}; };
        if (stack() == memory_stack::arena) return up(size, 256 * KiB);
        if (stack() == memory_stack::pool) return size < 16 * KiB ? 128_KiB : up(size, 512);
        return of_.memory().charged(size, 256);
    }

    mutable gpushare::tenant<host::node> of_;
    std::vector<std::pair<void*, std::size_t>> blocks_;
    bytes taken_{}, live_{}, largest_, limit_;
};

/// Three tenants that fill the device. Half of the blocks have 1 to 512 KiB, and one in ten frees
/// of these small blocks is skipped. The other blocks have 1 to 16 MiB. The first tenant shrinks
/// and grows, the second tenant sleeps.
void random_survivors(memory_stack stack, std::uint64_t multiple, std::uint64_t seed, survivors_outcome& o) {
    std::mt19937_64 random(seed);
    device on(stack);
    tenant all[] = {{on, "a", 128_MiB}, {on, "b", 96_MiB}, {on, "c", 32_MiB}};
    for (std::size_t step = 0; step < 3'000; ++step) {
        auto& t = all[random() % 3];
        if (step % 200 == 0) all[0].resize(bytes{(32 + random() % 97) * MiB});
        if (step % 300 == 0) all[1].sleep();
        if (t.count() != 0 && (t.live() > bytes{t.limit().count() / multiple} || random() % 3 == 0)) {
            const auto i = random() % t.count();
            if (t.size_of(i) >= MiB || random() % 10 != 0) t.free(i);
            continue;
        }
        const auto power = random() % 2 == 0 ? 10 + random() % 9 : 20 + random() % 4;
        t.allocate((std::size_t{1} << power) + random() % (std::size_t{1} << power), o);
        if (step % 100 == 0) t.measure(o);
    }
}

/// The scratch block grows with each request, and each request leaves a cache page behind.
void growing_scratch(memory_stack stack, survivors_outcome& o) {
    device on(stack);
    tenant t(on, "chat", 128_MiB);
    for (std::size_t i = 0; t.count() == i && i < 40; ++i) {
        t.allocate((8 + 2 * i) * MiB + 4096, o);
        t.allocate(256 * KiB, o);
        if (t.count() != i + 2) break;
        t.free(i);
        t.measure(o);
    }
}

/// Allocates a small block after a freed large block, then a large block that fits beside the small
/// block.
void small_after_large(memory_stack stack, survivors_outcome& o) {
    device on(stack);
    tenant t(on, "chat", 64_MiB);
    t.allocate(40 * MiB, o);
    t.allocate(20 * MiB, o);
    t.free(1);
    t.allocate(300 * KiB, o);
    t.allocate(20 * MiB, o);
    t.measure(o);
}

}  // namespace

survivors_outcome survivors(memory_stack stack) {
    survivors_outcome all;
    for (std::uint64_t multiple = 1; multiple <= 4; ++multiple)
        for (std::uint64_t seed = 1; seed <= 3; ++seed) random_survivors(stack, multiple, seed, all);
    growing_scratch(stack, all);
    small_after_large(stack, all);
    return all;
}

}  // namespace bench
