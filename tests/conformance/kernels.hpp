// SPDX-License-Identifier: Apache-2.0
// Kernels that use everything a context offers, written once: the suites launch them on every
// backend, and the area `device` inspects the code that nvcc generates from them.
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/atomic_ref.hpp>
#include <gpushare/numbers.hpp>

namespace conformance::kernels {

/// slots[block] = slots[block] * 3 + add, by one thread of each block.
struct step {
    std::uint32_t* slots;
    std::uint32_t add;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <gpushare::kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        ctx.sync();
        if (ctx.thread_rank() == 0) slots[ctx.block_rank()] = slots[ctx.block_rank()] * 3 + add;
    }
};

/// Every thread of every block counts itself once, and checks its ranks, in slots of its own.
struct count_threads {
    std::uint32_t* slots;
    GPUSHARE_EXEC_CHECK_DISABLE
    template <gpushare::kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        if (ctx.thread_rank() < ctx.num_threads() && ctx.block_rank() < ctx.num_blocks())
            slots[ctx.block_rank() * ctx.num_threads() + ctx.thread_rank()] += 1;
    }
};

/// Blocks as ranks that talk: each writes `count` words, says so by its flag, waits for the flags
/// of all others, and adds up what everybody wrote. Needs a cooperative launch. Flags count epochs
/// and are never reset; `Atomic` is a parameter so that a test can see a wrong one fail.
template <template <class> class Atomic>
struct talk {
    std::uint32_t* flags;   // one per block
    std::uint32_t* words;   // `count` per block
    std::uint32_t* sums;    // `count` per block
    std::uint32_t* missed;  // per block: flags that never came
    std::uint32_t count;
    std::uint32_t epoch;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <gpushare::kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        const std::uint32_t mine = ctx.block_rank() * count;
        for (auto i = ctx.thread_rank(); i < count; i += ctx.num_threads()) words[mine + i] = word(ctx.block_rank(), i);
        ctx.sync();
        if (ctx.thread_rank() == 0) Atomic<std::uint32_t>{flags[ctx.block_rank()]}.store_release(epoch);

        std::uint32_t late = 0;
        for (auto r = ctx.thread_rank(); r < ctx.num_blocks(); r += ctx.num_threads())
            if (!wait_for(ctx, flags[r])) ++late;
        late = ctx.reduce_add(late);  // a barrier, too: what one thread has acquired, all see
        if (ctx.thread_rank() == 0) missed[ctx.block_rank()] = late;

        for (auto i = ctx.thread_rank(); i < count; i += ctx.num_threads()) {
            std::uint32_t sum = 0;
            for (std::uint32_t r = 0; r < ctx.num_blocks(); ++r) sum += words[r * count + i];
            sums[mine + i] = sum;
        }
    }

    [[nodiscard]] GPUSHARE_HD std::uint32_t word(std::uint32_t rank, std::uint32_t i) const {
        return (rank + 1) * 7919 + i * epoch;
    }

private:
    template <class C>
    [[nodiscard]] GPUSHARE_HD bool wait_for(C& ctx, std::uint32_t& flag) const {
        constexpr std::uint32_t most = 1'000'000;
        for (std::uint32_t turn = 0; turn < most; ++turn) {
            // The difference, so that it may wrap around.
            if (static_cast<std::int32_t>(Atomic<std::uint32_t>{flag}.load_acquire() - epoch) >= 0) return true;
            ctx.backoff(turn);
        }
        return false;
    }
};

template <class T>
using system_atomic = gpushare::detail::atomic_ref<T>;
using talk_across_ranks = talk<system_atomic>;
using talk_on_device = talk<gpushare::detail::device_atomic_ref>;

/// Copies `count` elements, 16 bytes at a time.
template <class T>
struct copy_packed {
    T* to;
    const T* from;
    std::uint32_t count;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <gpushare::kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        constexpr auto width = gpushare::packed<T>::width;
        const std::uint32_t whole = count / width * width;
        for (auto i = ctx.thread_rank() * width; i < whole; i += ctx.num_threads() * width)
            gpushare::store_packed(to + i, gpushare::load_packed(from + i));
        for (auto i = whole + ctx.thread_rank(); i < count; i += ctx.num_threads()) to[i] = from[i];
    }
};

struct larger {
    GPUSHARE_HD std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const { return a < b ? b : a; }
};

/// Sum and maximum of `count` words by each block, told to all its threads.
struct reduce_block {
    const std::uint32_t* words;
    std::uint64_t* sums;    // one per block and thread
    std::uint32_t* maxima;  // the same
    std::uint32_t count;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <gpushare::kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        std::uint64_t sum = 0;
        std::uint32_t most = 0;
        for (auto i = ctx.thread_rank(); i < count; i += ctx.num_threads()) {
            sum += words[i];
            most = larger{}(most, words[i]);
        }
        const std::uint32_t slot = ctx.block_rank() * ctx.num_threads() + ctx.thread_rank();
        sums[slot] = ctx.reduce_add(sum);
        maxima[slot] = ctx.reduce(most, larger{});
    }
};

/// Rounds floats, given as bits, and widens them again.
template <class Number>
struct round_floats {
    const float* in;
    Number* out;
    float* back;
    std::uint32_t count;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <gpushare::kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        for (auto i = ctx.thread_rank(); i < count; i += ctx.num_threads()) {
            out[i] = Number{in[i]};
            back[i] = static_cast<float>(out[i]);
        }
    }
};

/// Blocks meet `rounds` times; in between each adds one to a counter and finds that all others
/// have.
struct meet {
    std::uint32_t* counter;
    std::uint32_t* wrong;  // per block: times that the counter was off, or that the barrier failed
    std::uint32_t rounds;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <gpushare::kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const {
        std::uint32_t off = 0;
        for (std::uint32_t round = 1; round <= rounds; ++round) {
            if (ctx.thread_rank() == 0)
                gpushare::detail::device_atomic_ref<std::uint32_t>{*counter}.fetch_add_relaxed(1);
            if (!ctx.grid_sync()) ++off;
            if (gpushare::detail::device_atomic_ref<std::uint32_t>{*counter}.load_relaxed() != round * ctx.num_blocks())
                ++off;
            if (!ctx.grid_sync()) ++off;
        }
        off = ctx.reduce_add(off);
        if (ctx.thread_rank() == 0) wrong[ctx.block_rank()] = off;
    }
};

}  // namespace conformance::kernels
