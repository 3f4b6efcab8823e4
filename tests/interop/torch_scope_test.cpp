// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// A tenant's scope without torch: the owner of each block, by thread and stream, and the blocks
// that remain when scopes and tenants end. tests/interop/torch has the same with libtorch's own
// libraries.
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/interop/detail/torch_scope.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "support/this_heap.hpp"  // horovod_memory_test.cpp replaces operator new
#include "support/threads.hpp"

namespace torch_scope_without_torch {

using namespace gpushare::literals;
using gpushare::detail::torch_blocks;
using tenancy = gpushare::tenancy<gpushare::host::node>;

/// What a scope asks of torch: a current stream for each thread.
struct fake_torch {
    static constexpr bool on_streams = true;
    static inline thread_local void* current = nullptr;
    static inline std::vector<void*> forgotten;

    struct guard {
        guard(int, void* s) noexcept : before(std::exchange(current, s)) {}
        guard(const guard&) = delete;
        guard& operator=(const guard&) = delete;
        ~guard() { current = before; }
        void* before;
    };
    static void install() {}
    static int ordinal(const gpushare::host::node&, gpushare::device_id d) { return static_cast<int>(d.index); }
    static void forget(void* s) { forgotten.push_back(s); }
};
static_assert(gpushare::detail::torch_runtime<fake_torch, gpushare::host::node>);
using scope_type = gpushare::detail::basic_torch_scope<fake_torch, gpushare::host::node, tenancy::tenant>;

constexpr std::size_t KiB = 1 << 10;

torch_blocks::answer allocate(std::size_t n) {
    return torch_blocks::of_process().try_allocate(0, fake_torch::current, n);
}

struct rig {
    gpushare::host::node node{{.memory = 64_MiB, .sms = 1}};
    tenancy shared{node};
    tenancy::tenant chat = shared.admit({.name = "chat", .memory = 16_MiB, .compute = 40_pct, .streams = 2});
    tenancy::tenant batch = shared.admit({.name = "batch", .memory = 16_MiB, .compute = 40_pct});
};

TEST_CASE("scopes nest, and the stream goes before the thread", "[interop][torch]") {
    rig r;
    fake_torch::forgotten.clear();
    {
        scope_type chat{r.node, r.chat}, batch{r.node, r.batch};
        CHECK(allocate(KiB).whose == nullptr);
        const auto outer = chat.enter(1);
        CHECK(fake_torch::current == &r.chat.work_stream(0, 1));
        const auto of_chat = allocate(KiB);
        {
            const auto inner = batch.enter();
            const auto of_batch = allocate(KiB);
            CHECK(of_batch.whose != of_chat.whose);
            const fake_torch::guard there(0, &r.chat.work_stream());
            CHECK(allocate(KiB).whose == of_chat.whose);  // by its stream
            int elsewhere = 0;
            const fake_torch::guard unknown(0, &elsewhere);
            CHECK(torch_blocks::of_process().owner_of(0, &elsewhere) == of_batch.whose);  // by its thread
            CHECK(torch_blocks::of_process().owner_of(1, &elsewhere) == nullptr);         // of that device
            CHECK(batch.live() == 1);
        }
        CHECK(fake_torch::current == &r.chat.work_stream(0, 1));
        CHECK(chat.live() == 2);
    }
    CHECK(fake_torch::current == nullptr);
    CHECK(fake_torch::forgotten.size() == 3);
    CHECK(r.chat.close().leaked >= 2_KiB);
}

TEST_CASE("a refused scope leaves its streams unbound", "[interop][torch]") {
    rig r;
    {
        scope_type first{r.node, r.chat};
        CHECK_THROWS_AS((scope_type{r.node, r.chat}), gpushare::operation_error);
        CHECK_THROWS_AS((scope_type{r.node, r.batch, 1}), gpushare::operation_error);
        CHECK(torch_blocks::of_process().owner_of(0, &r.chat.work_stream()) != nullptr);
    }
    CHECK(torch_blocks::of_process().owner_of(0, &r.chat.work_stream()) == nullptr);
    scope_type again{r.node, r.chat};
    CHECK(torch_blocks::of_process().owner_of(0, &r.chat.work_stream()) != nullptr);
}

/// A mutex that another thread holds for so many looks.
struct looked_at {
    bool try_lock() noexcept { return ++looks > held; }
    int held = 0, looks = 0;
};

TEST_CASE("a close that waits for a call looks for its end, and rests in between", "[interop][torch]") {
    using gpushare::detail::lock_by;
    const auto start = std::chrono::steady_clock::now();
    looked_at free, brief{.held = 20}, kept{.held = 1'000'000'000};
    CHECK(lock_by(free, gpushare::instant::min()));
    CHECK(lock_by(brief, gpushare::never));
    CHECK(brief.looks == 21);
    CHECK_FALSE(lock_by(kept, gpushare::instant::min()));
    CHECK(kept.looks == 1);
    CHECK_FALSE(lock_by(kept, start + std::chrono::milliseconds(100)));
    CHECK(kept.looks < 200);  // one in a millisecond, and some at the start
    CHECK(std::chrono::steady_clock::now() >= start + std::chrono::milliseconds(100));
}

/// Blocks that threads hand to each other, each filled with its own number.
struct board {
    struct block {
        unsigned char* p = nullptr;
        std::size_t size = 0;
        unsigned char mark = 0;
    };
    /// What was there, if it is still as it was written; and puts another one there.
    bool exchange(std::size_t slot, block& b) {
        const std::lock_guard lock(mutex);
        std::swap(slots[slot], b);
        for (std::size_t i = 0; i < b.size; i += 64)
            if (b.p[i] != b.mark) return false;
        return true;
    }
    std::mutex mutex;
    std::array<block, 40> slots{};
};

TEST_CASE("no block is two tensors' at a time, whoever allocates and frees where", "[interop][torch]") {
    const auto seed = support::seed(1);
    CAPTURE(seed);
    rig r;
    board all;
    std::atomic<int> spoilt{0}, lost{0};
    {
        scope_type chat{r.node, r.chat}, batch{r.node, r.batch};
        support::together(4, [&](unsigned rank) {
            support::random any(seed + rank);
            for (int i = 0; i < support::few(4000); ++i) {
                const fake_torch::guard forward(0, any.below(2) == 0 ? &r.chat.work_stream() : &r.batch.work_stream());
                board::block b;
                b.size = 64 + any.below(any.below(10) == 0 ? 300 * KiB : 4 * KiB);
                const auto got = allocate(b.size);
                b.p = static_cast<unsigned char*>(got.p);
                b.mark = static_cast<unsigned char>(1 + any.below(200));
                if (b.p == nullptr)
                    b.size = 0;  // the quota is used up
                else
                    std::memset(b.p, b.mark, b.size);
                spoilt += !all.exchange(any.below(all.slots.size()), b);
                if (b.p != nullptr && any.below(8) == 0)
                    (void)torch_blocks::of_process().use(b.p, &r.chat.work_stream(0, 1));
                if (b.p != nullptr) lost += !torch_blocks::of_process().deallocate(b.p);
                if (any.below(500) == 0) torch_blocks::of_process().give_back();
            }
        });
        CHECK(r.chat.memory().limit().usage().peak <= 16_MiB);
        // One tenant ends beside frees of its blocks.
        support::together(2, [&](unsigned rank) {
            if (rank == 0) {
                (void)r.chat.close();
                return;
            }
            for (std::size_t slot = 0; slot < all.slots.size(); ++slot)
                if (all.slots[slot].p != nullptr) lost += !torch_blocks::of_process().deallocate(all.slots[slot].p);
        });
        CHECK(chat.live() == 0);
        CHECK(batch.live() == 0);
    }
    CHECK(spoilt == 0);
    CHECK(lost == 0);
    CHECK(torch_blocks::of_process().unfreed() == 0);
    CHECK(r.batch.close().leaked_blocks == 0);
}

#ifndef SUPPORT_THREAD_SANITIZED
namespace {
/// An owner whose blocks are the places of an array. Keeps the streams of the last free.
struct place_owner : gpushare::detail::torch_owner {
    void* try_allocate(std::size_t, void*, gpushare::failure&) noexcept override { return &places[next++]; }
    gpushare::errc deallocate(void*, std::size_t, void*, std::span<void* const> others) noexcept override {
        waited_for.assign(others.begin(), others.end());
        return gpushare::errc::none;
    }
    gpushare::errc deallocate_of_graphs(void*, std::size_t) noexcept override { return gpushare::errc::none; }
    void captures(void*, bool) noexcept override {}
    void give_back() noexcept override {}
    std::string sentence(const gpushare::failure&) const override { return {}; }

    std::array<std::uint64_t, 64> places{};
    std::size_t next = 0;
    std::vector<void*> waited_for;
};
}  // namespace

TEST_CASE("a use that the host has no memory to note leaves nothing for the next block there", "[interop][torch]") {
    int own = 0, first = 0, second = 0;  // streams
    for (std::size_t blocks = 0; blocks <= 32; ++blocks)
        for (std::size_t good = 0;; ++good) {
            const auto who = std::make_shared<place_owner>();
            torch_blocks all;
            for (std::size_t i = 0; i < blocks; ++i) (void)all.try_allocate_for_graphs(who, 8);
            all.add(who, 0, std::array<void*, 1>{&own});
            void* const p = all.try_allocate(0, &own, 8).p;
            support::this_heap = {.good = good, .recovers = true};
            bool thrown = false;
            try {
                (void)all.use(p, &first);
            } catch (const std::bad_alloc&) {
                thrown = true;
            }
            support::this_heap = {};
            CHECK(all.deallocate(p));
            --who->next;
            CHECK(all.try_allocate(0, &own, 8).p == p);
            CHECK(all.use(p, &second));
            CHECK(all.deallocate(p));
            CHECK(who->waited_for == std::vector<void*>{&second});
            if (!thrown) break;
        }
}
#endif

}  // namespace torch_scope_without_torch
