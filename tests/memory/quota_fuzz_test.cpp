// SPDX-License-Identifier: Apache-2.0
// Allocators behind quotas under load: threads that allocate, free, wait, give up and request too
// much, over an upstream that fails at random. Requests within the limits are never refused, no
// quota is ever exceeded, and no count drifts.
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <vector>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::failure;
using gpushare::quota;
using gpushare::quota_resource;

namespace {

/// Hands out addresses with nothing behind them, fails one time in sixteen, and knows what is out.
class flaky_upstream {
public:
    explicit flaky_upstream(std::uint64_t limit) : limit_(limit) {}

    void* allocate(std::size_t size, std::size_t alignment) {
        thread_local std::uint64_t calls = 0;
        failed = ++calls % 16 == 0;
        if (failed) switch (calls % 48) {
                case 0: throw std::bad_alloc();
                case 16: throw std::runtime_error("injected");
                default: return nullptr;
            }
        // Behind the charge here, and before the credit below: what is over the limit here is over
        // it in truth.
        const auto takes = padded(size, alignment);
        if (out_.fetch_add(takes) + takes > limit_) over_.fetch_add(1);
        return reinterpret_cast<void*>((next_.fetch_add(1) + 1) << 24U);
    }
    void deallocate(void*, std::size_t size, std::size_t alignment) noexcept {
        out_.fetch_sub(padded(size, alignment));
    }

    [[nodiscard]] std::uint64_t out() const { return out_.load(); }
    [[nodiscard]] std::uint64_t over() const { return over_.load(); }

    static thread_local bool failed;  // whether this thread's last allocation did

private:
    static std::uint64_t padded(std::size_t size, std::size_t alignment) {
        return (size + alignment - 1) & ~(alignment - 1);
    }

    const std::uint64_t limit_;
    std::atomic<std::uint64_t> out_{0}, over_{0}, next_{0};
};
thread_local bool flaky_upstream::failed = false;

struct piece {
    void* p = nullptr;
    std::size_t size = 0;
};

// Each of four threads keeps within an eighth of the device: all of that always fits. The
// attackers' requests never do.
void fire(std::uint64_t steps, bool two_levels) {
    constexpr std::size_t eighth = 1 << 20;
    constexpr unsigned threads = 4;
    flaky_upstream upstream{8 * eighth};
    quota device{bytes{8 * eighth}};
    quota first{device, bytes{eighth}, bytes{7 * eighth}}, second{device, 0_B, bytes{6 * eighth}};
    quota left{first, 0_B, bytes{4 * eighth}}, right{first, bytes{eighth / 2}, bytes{4 * eighth}};
    const std::array tree{&left, &right, &second, &first};
    const auto seed = support::seed(two_levels ? 2 : 1);
    CAPTURE(seed);
    std::atomic<std::uint64_t> falsely{0}, wrong{0}, impossible{0}, asked{0};
    {
        const gpushare::quota_hook useless{device, 0, [&](const gpushare::reclaim_request&) {
                                               asked.fetch_add(1, std::memory_order_relaxed);
                                               return bytes{};
                                           }};
        support::background attacker(1, [&](unsigned) {
            for (quota* q : tree) {
                quota_resource greedy{two_levels ? *q : device, upstream};
                if (greedy.try_allocate(8 * eighth + 1, 1) != nullptr) impossible.fetch_add(1);
                if (greedy.try_allocate(~std::size_t{0}, 1) != nullptr) impossible.fetch_add(1);
                if (greedy.try_allocate(16, 3) != nullptr) impossible.fetch_add(1);
            }
            (void)right.resize(bytes{eighth / 2}, bytes{4 * eighth});
        });
        support::together(threads, [&](unsigned rank) {
            support::random any{seed + rank};
            quota_resource mine{two_levels ? *tree[rank] : device, upstream};
            std::vector<piece> out;
            std::size_t held = 0;
            for (std::uint64_t i = 0; i < steps; ++i) {
                if (!out.empty() && any.one_in(2)) {
                    auto& b = any.of(out);
                    if (mine.deallocate(b.p, b.size, 64) != errc::none) wrong.fetch_add(1);
                    held -= b.size;
                    b = out.back();
                    out.pop_back();
                    continue;
                }
                const std::size_t size = 64 * (1 + any.below(any.one_in(8) ? 4096 : 64));
                if (held + size > eighth) continue;
                failure why;
                void* p = nullptr;
                upstream.failed = false;
                if (any.one_in(8)) {
                    p = mine.try_allocate(size, 64, gpushare::patience{gpushare::host::steady_clock{}, gpushare::never},
                                          &why);
                } else if (any.one_in(8)) {
                    try {
                        p = mine.allocate(size, 64);
                    } catch (const std::exception&) {
                    }
                } else {
                    p = mine.try_allocate(size, 64, &why);
                }
                if (p == nullptr) {
                    if (!upstream.failed) falsely.fetch_add(1);
                    continue;
                }
                out.push_back({p, size});
                held += size;
            }
            for (const auto& b : out)
                if (mine.deallocate(b.p, b.size, 64) != errc::none) wrong.fetch_add(1);
        });
    }
    CHECK(falsely.load() == 0);
    CHECK(upstream.over() == 0);
    CHECK(upstream.out() == 0);
    CHECK(wrong.load() == 0);
    CHECK(impossible.load() == 0);
    CHECK(asked.load() > 0);
    for (const auto* q : tree) {
        CHECK(q->usage().borrowed == 0_B);
        CHECK(q->usage().waiting == 0);
    }
    CHECK(device.usage().current == bytes{eighth});
    CHECK(first.usage().current == bytes{eighth / 2});
    CHECK(device.usage().peak <= bytes{8 * eighth});
    CHECK(device.free() == bytes{7 * eighth});
}

}  // namespace

TEST_CASE("no request that fits is refused, none is over, nothing drifts, while the upstream fails",
          "[memory][attack][property]") {
    fire(10'000, false);
    fire(10'000, true);
}

TEST_CASE("no request that fits is refused, none is over, nothing drifts, for ten million operations", "[.long]") {
    fire(2'500'000, false);
    fire(2'500'000, true);
}
