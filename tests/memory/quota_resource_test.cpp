// SPDX-License-Identifier: Apache-2.0
// An allocator behind a quota: its charges, the texts of its errors, and that no failure of the
// upstream leaks a byte.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory_resource>
#include <new>
#include <stdexcept>
#include <string>

#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/scrubbing_resource.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/fault_resource.hpp"
#include "support/manual_scrubber.hpp"
#include "support/threads.hpp"
#include "support/upstream_answers.hpp"
#include "support/waiting.hpp"

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::failure;
using gpushare::quota;
using gpushare::quota_resource;
using support::fault_resource;

namespace {

/// Takes whole granules, says so, and refuses wrong frees with a code, as a device's memory does.
class granular_resource : public support::upstream_answers {
public:
    static constexpr std::size_t granule = 512;

    void* allocate(std::size_t size, std::size_t alignment) { return below_.allocate(size, alignment); }
    void* try_allocate(std::size_t size, std::size_t alignment, failure* why) noexcept {
        if (full && why != nullptr) *why = {.code = errc::out_of_memory, .asked = size};
        if (full) return nullptr;
        return below_.allocate(size, alignment);
    }
    errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept {
        const auto wrong = below_.wrong_frees();
        below_.deallocate(p, size, alignment);
        return below_.wrong_frees() == wrong ? errc::none : errc::wrong_size;
    }
    [[nodiscard]] static bytes charged(std::size_t size, std::size_t) noexcept {
        const bytes padded = bytes{size} + bytes{granule - 1};
        return padded == bytes::max() ? padded : padded - padded % bytes{granule};
    }

    bool full = false;

private:
    fault_resource below_;
};

constexpr std::size_t mib = std::size_t{1} << 20;

}  // namespace

static_assert(gpushare::memory<quota_resource<fault_resource>>);
static_assert(gpushare::memory<quota_resource<granular_resource>>);
static_assert(gpushare::memory<quota_resource<std::pmr::memory_resource>>);
static_assert(gpushare::memory<quota_resource<quota_resource<fault_resource>>>, "quotas stack");

TEST_CASE("an allocation is charged while it is out", "[memory][resource]") {
    quota q{1_MiB};
    fault_resource upstream;
    quota_resource mine{q, upstream, "chat"};
    void* p = mine.allocate(1000, 8);
    REQUIRE(p != nullptr);
    CHECK(q.usage().current == 1000_B);
    CHECK(mine.capacity() == 1_MiB);
    CHECK(mine.free() == 1_MiB - 1000_B);
    CHECK(mine.deallocate(p, 1000, 8) == errc::none);
    CHECK(q.usage().current == 0_B);
    CHECK(upstream.blocks() == 0);
}

TEST_CASE("a refusal names the tenant, what was asked and what is left, and asks nothing upstream (rmm 2507)",
          "[memory][resource]") {
    quota q{4096_MiB};
    REQUIRE(q.try_charge(4059_MiB) == errc::none);
    fault_resource upstream;
    quota_resource mine{q, upstream, "chat"};
    CHECK_THROWS_WITH((void)mine.allocate(512 * mib, 256),
                      "tenant 'chat': allocate: asked for 512 MiB, 37 MiB of 4 GiB left (over the quota)");
    CHECK_THROWS_AS((void)mine.allocate(512 * mib, 256), std::bad_alloc);
    failure why;
    CHECK(mine.try_allocate(512 * mib, 256, &why) == nullptr);
    CHECK(why.code == errc::over_quota);
    CHECK(why.asked == (512_MiB).count());
    CHECK(why.left == (37_MiB).count());
    CHECK(why.limit == (4096_MiB).count());
    CHECK(mine.try_allocate(512 * mib, 256) == nullptr);
    CHECK(upstream.calls() == 0);
    CHECK(q.usage().refusals == 4);
}

TEST_CASE("alignment is charged, above 256 as well (rmm's limiter)", "[memory][resource]") {
    quota q{1_MiB};
    fault_resource upstream;
    quota_resource mine{q, upstream};
    for (std::size_t alignment = 1; alignment <= 65536; alignment *= 2) {
        CAPTURE(alignment);
        void* p = mine.allocate(1, alignment);
        CHECK(q.usage().current == bytes{alignment});
        CHECK(mine.deallocate(p, 1, alignment) == errc::none);
        CHECK(q.usage().current == 0_B);
        CHECK(mine.charged(alignment, alignment) == bytes{alignment});
        CHECK(mine.charged(alignment + 1, alignment) == bytes{alignment == 1 ? 2 : 2 * alignment});
    }
    CHECK(mine.try_allocate(1, std::size_t{2} << 20) == nullptr);
}

TEST_CASE("a charge is the size that the upstream says it takes", "[memory][resource]") {
    quota q{1024_B};
    granular_resource upstream;
    quota_resource mine{q, upstream};
    void* a = mine.allocate(1, 8);
    void* b = mine.allocate(512, 8);
    CHECK(q.usage().current == 1024_B);
    failure why;
    CHECK(mine.try_allocate(1, 8, &why) == nullptr);
    CHECK(why.asked == 512);
    CHECK(mine.deallocate(a, 1, 8) == errc::none);
    CHECK(mine.deallocate(b, 512, 8) == errc::none);
    CHECK(q.usage().current == 0_B);
}

TEMPLATE_TEST_CASE("sizes near SIZE_MAX don't wrap to something small (rmm's limiter)", "[memory][resource]",
                   fault_resource, granular_resource) {
    quota q{1_MiB};
    TestType upstream;
    quota_resource mine{q, upstream, "chat"};
    for (std::size_t alignment : {std::size_t{1}, std::size_t{256}, std::size_t{4096}, ~(SIZE_MAX >> 1)})
        for (std::size_t less = 0; less < 1030; ++less) {
            failure why;
            const auto size = std::numeric_limits<std::size_t>::max() - less;
            REQUIRE(mine.try_allocate(size, alignment, &why) == nullptr);
            REQUIRE(why.code == errc::size_overflow);
        }
    CHECK_THROWS_AS((void)mine.allocate(SIZE_MAX, 256), gpushare::memory_error);
    CHECK(q.usage().current == 0_B);
    CHECK(q.usage().peak == 0_B);
}

TEST_CASE("an alignment that isn't a power of two is refused", "[memory][resource]") {
    quota q{1_MiB};
    fault_resource upstream;
    quota_resource mine{q, upstream, "chat"};
    for (const std::size_t alignment : {0U, 3U, 24U, 4097U}) {
        failure why;
        CHECK(mine.try_allocate(64, alignment, &why) == nullptr);
        CHECK(why.code == errc::bad_alignment);
        CHECK_THROWS_AS((void)mine.allocate(64, alignment), gpushare::memory_error);
    }
    CHECK(upstream.calls() == 0);
}

TEST_CASE("an alignment above the quota is refused as that, and a size above it as a size", "[memory][resource]") {
    quota q{1_MiB};
    fault_resource upstream;
    quota_resource mine{q, upstream, "chat"};
    const auto check = [&](std::size_t size, std::size_t alignment, errc code, std::uint64_t limit) {
        CAPTURE(size, alignment);
        failure why;
        CHECK(mine.try_allocate(size, alignment, &why) == nullptr);
        CHECK(why.code == code);
        CHECK(why.limit == limit);
        CHECK(mine.refuses(size, alignment) == why.code);
        CHECK(support::code_of([&] { (void)mine.allocate(size, alignment, support::within(1ms)); }) == code);
    };
    for (const std::size_t alignment : {std::size_t{2} << 20, std::size_t{1} << 40, std::size_t{1} << 63})
        check(100, alignment, errc::bad_alignment, 1 << 20);
    check(600 << 10, 2 << 20, errc::bad_alignment, 1 << 20);
    check(2 << 20, 256, errc::over_quota, 1 << 20);
    check(2 << 20, std::size_t{1} << 40, errc::over_quota, 1 << 20);  // whatever the alignment
    failure why;
    CHECK(q.try_charge(512_KiB) == errc::none);
    CHECK(mine.try_allocate(100, 1 << 20, &why) == nullptr);  // it could be had, once more is free
    CHECK(why.code == errc::over_quota);
    CHECK(upstream.calls() == 0);
    q.close(gpushare::instant{});
    CHECK(mine.try_allocate(100, std::size_t{1} << 40, &why) == nullptr);
    CHECK(why.code == errc::closed);
    CHECK(q.release(512_KiB));
}

TEST_CASE("an upstream that throws leaks nothing, and what it throws passes through (umpire)", "[memory][resource]") {
    quota q{1_MiB};
    fault_resource upstream;
    quota_resource mine{q, upstream, "chat"};
    struct odd {};

    upstream.fail_next();
    CHECK_THROWS_AS((void)mine.allocate(1000, 8), std::bad_alloc);
    upstream.fail_next([] { throw std::runtime_error("device lost"); });
    CHECK_THROWS_WITH((void)mine.allocate(1000, 8), "device lost");
    upstream.fail_next([] { throw odd{}; });
    CHECK_THROWS_AS((void)mine.allocate(1000, 8), odd);
    CHECK(q.usage().current == 0_B);

    SECTION("try_allocate gives null instead, whatever was thrown") {
        failure why;
        upstream.fail_next([] { throw odd{}; });
        CHECK(mine.try_allocate(1000, 8, &why) == nullptr);
        CHECK(why.code == errc::out_of_memory);
        CHECK(why.asked == 1000);
        CHECK(q.usage().current == 0_B);
    }
    SECTION("null from the upstream is a refusal too") {
        upstream.null_next();
        CHECK_THROWS_WITH((void)mine.allocate(1000, 8),
                          "tenant 'chat': allocate: asked for 1000 B (out of device memory)");
        upstream.null_next();
        CHECK(mine.try_allocate(1000, 8) == nullptr);
        CHECK(q.usage().current == 0_B);
    }
    SECTION("the whole quota is there afterwards") {
        void* p = mine.allocate(mib, 8);
        CHECK(mine.deallocate(p, mib, 8) == errc::none);
    }
}

TEST_CASE("the last refusal counts, not what the upstream threw before a hook was asked", "[memory][resource]") {
    quota q{1_MiB};
    fault_resource upstream;
    quota_resource mine{q, upstream, "chat"};
    // Somebody else takes the bytes meanwhile, so that the quota refuses the next try.
    const gpushare::quota_hook hook{q, 0, [&](const gpushare::reclaim_request& r) {
                                        return r.below && q.try_charge(1_MiB) == errc::none ? 1_B : 0_B;
                                    }};
    const auto code_of = [](auto allocate) {
        try {
            (void)allocate();
        } catch (const gpushare::memory_error& refused) {
            return refused.code();
        } catch (const std::bad_alloc&) {
        }
        return errc::none;
    };
    upstream.fail_next();
    CHECK(code_of([&] { return mine.allocate(1000, 8); }) == errc::over_quota);
    CHECK(q.release(1_MiB));
    upstream.fail_next();
    CHECK(code_of([&] { return mine.allocate(1000, 8, support::within(1ms)); }) == errc::deadline_exceeded);
    CHECK(q.release(1_MiB));
}

TEST_CASE("an upstream with try_allocate is never made to throw", "[memory][resource]") {
    quota q{1_MiB};
    granular_resource upstream;
    upstream.full = true;
    quota_resource mine{q, upstream, "chat"};
    failure why;
    CHECK(mine.try_allocate(64, 8, &why) == nullptr);
    CHECK(why.code == errc::out_of_memory);
    CHECK_THROWS_AS((void)mine.allocate(64, 8), gpushare::memory_error);
    CHECK(q.usage().current == 0_B);
}

TEST_CASE("a free that the upstream refuses changes nothing", "[memory][resource]") {
    quota q{1_MiB};
    granular_resource upstream;
    quota_resource mine{q, upstream};
    void* p = mine.allocate(1000, 8);
    CHECK(mine.deallocate(p, 2000, 8) == errc::wrong_size);
    CHECK(mine.deallocate(p, 1000, 16) == errc::wrong_size);
    CHECK(q.usage().current == 1_KiB);
    CHECK(mine.deallocate(p, 1000, 8) == errc::none);
    CHECK(mine.deallocate(p, 1000, 8) == errc::wrong_size);
    CHECK(q.usage().current == 0_B);
    CHECK(q.free() == 1_MiB);
}

TEST_CASE("a free of more than is charged never makes the quota underflow (rmm's limiter, hami 1181)",
          "[memory][resource]") {
    quota q{1_MiB};
    fault_resource upstream;  // says nothing about wrong frees, as most resources
    quota_resource mine{q, upstream};
    void* p = mine.allocate(1000, 8);
    CHECK(mine.deallocate(p, 2000, 8) == errc::wrong_size);
    CHECK(q.usage().current == 1000_B);
    CHECK(mine.deallocate(p, 1000, 8) == errc::none);
    CHECK(q.free() == 1_MiB);
}

TEST_CASE("a free of more than is charged doesn't reach the upstream", "[memory][resource]") {
    quota q{1_MiB};
    support::manual_scrubber scrubber;
    SECTION("one that would take it") {
        std::pmr::monotonic_buffer_resource upstream;
        struct counted : std::pmr::memory_resource {
            explicit counted(std::pmr::memory_resource& of) : below(&of) {}
            void* do_allocate(std::size_t size, std::size_t alignment) override {
                return below->allocate(size, alignment);
            }
            void do_deallocate(void*, std::size_t, std::size_t) override { ++frees; }
            [[nodiscard]] bool do_is_equal(const memory_resource& o) const noexcept override { return this == &o; }
            std::pmr::memory_resource* below;
            int frees = 0;
        } takes_all{upstream};
        quota_resource mine{q, static_cast<std::pmr::memory_resource&>(takes_all)};
        void* p = mine.allocate(1000, 8);
        CHECK(mine.deallocate(p, 2000, 8) == errc::wrong_size);
        CHECK(takes_all.frees == 0);
        CHECK(mine.deallocate(p, 1000, 8) == errc::none);
        CHECK(takes_all.frees == 1);
    }
    SECTION("one that would overwrite it") {
        fault_resource memory;
        gpushare::scrubbing_resource upstream{memory, scrubber};
        quota_resource mine{q, upstream};
        void* p = mine.allocate(1000, 8);
        CHECK(mine.deallocate(p, 2000, 8) == errc::wrong_size);
        CHECK(scrubber.filled() == 0);
        CHECK(mine.deallocate(p, 1000, 8) == errc::none);
        CHECK(scrubber.reach_next());
        CHECK(upstream.drain(gpushare::never));
    }
    CHECK(q.usage().current == 0_B);
}

TEST_CASE("whether bytes are charged, also while the word is frozen", "[memory][quota]") {
    quota q{100_B};
    CHECK(q.has_charged(0_B));
    CHECK_FALSE(q.has_charged(1_B));
    REQUIRE(q.try_charge(60_B) == errc::none);
    const gpushare::quota_claim waits{q, 50_B};
    REQUIRE(q.pressed());
    CHECK(q.has_charged(60_B));
    CHECK_FALSE(q.has_charged(61_B));
}

TEST_CASE("a tenant sees its quota as its device, and others' burst as taken (rmm 533, 956)", "[memory][resource]") {
    quota device{100_KiB};
    quota a{device, 40_KiB, 30_KiB};
    quota b{device, 20_KiB, 40_KiB};
    fault_resource upstream;
    quota_resource mine{a, upstream, "chat"};
    CHECK(mine.capacity() == 70_KiB);
    CHECK(mine.free() == 70_KiB);
    CHECK(mine.taken_by_others() == 0_B);
    REQUIRE(b.try_charge(50_KiB) == errc::none);  // 30 of them borrowed, 10 are left
    CHECK(mine.free() == 50_KiB);
    CHECK(mine.taken_by_others() == 20_KiB);

    void* p = mine.allocate(45 * 1024, 8);
    CHECK(mine.free() == 5_KiB);
    CHECK(mine.taken_by_others() == 20_KiB);
    CHECK_THROWS_WITH(
        (void)mine.allocate(6 * 1024, 8),
        "tenant 'chat': allocate: asked for 6 KiB, 5 KiB of 70 KiB left (others who share the memory have the rest)");
    CHECK(mine.deallocate(p, 45 * 1024, 8) == errc::none);
    CHECK(b.release(50_KiB));
}

TEST_CASE("a quota over std::pmr's resources", "[memory][resource]") {
    quota q{64_KiB};
    SECTION("new_delete") {
        quota_resource mine{q, *std::pmr::new_delete_resource()};
        void* p = mine.allocate(100, 64);
        CHECK(reinterpret_cast<std::uintptr_t>(p) % 64 == 0);
        CHECK(q.usage().current == 128_B);
        CHECK(mine.deallocate(p, 100, 64) == errc::none);
    }
    SECTION("a monotonic buffer that runs out") {
        std::array<std::byte, 1024> buffer{};
        std::pmr::monotonic_buffer_resource arena(buffer.data(), buffer.size(), std::pmr::null_memory_resource());
        quota_resource mine{q, static_cast<std::pmr::memory_resource&>(arena)};
        void* p = mine.allocate(1000, 8);
        CHECK_THROWS_AS((void)mine.allocate(1000, 8), std::bad_alloc);
        CHECK(mine.try_allocate(1000, 8) == nullptr);
        CHECK(q.usage().current == 1000_B);
        CHECK(mine.deallocate(p, 1000, 8) == errc::none);
    }
    CHECK(q.usage().current == 0_B);
}

TEST_CASE("quotas stack: the tighter one decides, and neither drifts", "[memory][resource]") {
    quota outer{1_KiB}, inner{512_B};
    fault_resource upstream;
    quota_resource below{outer, upstream, "outer"};
    quota_resource mine{inner, below, "inner"};
    CHECK(mine.try_allocate(600, 8) == nullptr);
    void* p = mine.allocate(500, 4);
    REQUIRE(outer.try_charge(520_B) == errc::none);
    failure why;
    CHECK(mine.try_allocate(8, 4, &why) == nullptr);
    CHECK(why.code == errc::out_of_memory);
    CHECK(inner.usage().current == 500_B);
    CHECK(outer.release(520_B));
    CHECK(mine.deallocate(p, 500, 4) == errc::none);
    CHECK(inner.usage().current == 0_B);
    CHECK(outer.usage().current == 0_B);
}

TEST_CASE("copies of a quota_resource share quota and upstream, and compare equal", "[memory][resource]") {
    quota q{1_MiB}, other{1_MiB};
    fault_resource upstream;
    quota_resource mine{q, upstream};
    auto copy = mine;
    CHECK(copy == mine);
    CHECK_FALSE(quota_resource{other, upstream} == mine);
    void* p = mine.allocate(100, 4);
    CHECK(copy.deallocate(p, 100, 4) == errc::none);
    CHECK(&copy.limit() == &q);
    CHECK(&copy.upstream() == &upstream);
}

TEST_CASE("threads allocate up to the quota, with an upstream that fails now and then (umpire)", "[memory][resource]") {
    quota device{1_MiB};
    quota q{device, 256_KiB, 256_KiB};
    fault_resource upstream;
    quota_resource mine{q, upstream, "chat"};
    std::atomic<std::uint64_t> over{0};
    support::together(3, [&](unsigned rank) {
        for (int i = 0; i < 3'000; ++i) {
            if (i % 50 == 0) upstream.fail_next();
            const std::size_t size = std::size_t{1024} << (rank + static_cast<unsigned>(i) % 7);
            void* p = mine.try_allocate(size, 64);
            if (upstream.bytes() > 512 * 1024) over.fetch_add(1);
            if (p != nullptr) mine.deallocate(p, size, 64);
        }
    });
    CHECK(over.load() == 0);
    CHECK(upstream.blocks() == 0);
    CHECK(q.usage().current == 0_B);
    CHECK(device.usage().current == 256_KiB);
}
