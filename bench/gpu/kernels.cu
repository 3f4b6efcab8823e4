// SPDX-License-Identifier: Apache-2.0
#include "kernels.hpp"

#include <chrono>
#include <cstdint>

#include <gpushare/backend/cuda/cooperative.cuh>
#include <gpushare/backend/cuda/launch.cuh>
#include <gpushare/detail/atomic_ref.hpp>

namespace bench {

namespace {

using gpushare::cuda::device_context;

__device__ std::uint64_t device_now() {
    std::uint64_t t = 0;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

struct spin {
    std::uint64_t length;
    block_record* records;

    __device__ void operator()(device_context& ctx) const {
        if (ctx.thread_rank() == 0) {
            const std::uint64_t begin = device_now();
            std::uint64_t end = begin;
            while (end - begin < length) end = device_now();
            if (records != nullptr) records[ctx.block_rank()] = {begin, end, ctx.sm()};
        }
        ctx.sync();  // the other threads only occupy the SM
    }
};

struct attend {
    meeting m;
    std::uint32_t first_rank;

    __device__ void operator()(device_context& ctx) const {
        const std::uint32_t rank = first_rank + ctx.block_rank();
        const std::uint64_t begin = device_now();
        bool late = false;
        for (std::uint32_t round = 1; round <= m.rounds && !late; ++round) {
            // Two places alternate, because no rank is ever more than one round ahead.
            std::uint32_t* const payload = m.payload + (round % 2) * m.ranks;
            if (ctx.thread_rank() == 0) {
                payload[rank] = word(round, rank);
                gpushare::detail::atomic_ref{m.flags[rank * meeting::flag_stride]}.store_release(round);
            }
            for (std::uint32_t peer = ctx.thread_rank(); peer < m.ranks; peer += ctx.num_threads()) {
                if (!arrived(ctx, peer, round))
                    late = true;
                else if (payload[peer] != word(round, peer))
                    (void)gpushare::detail::atomic_ref{*m.wrong}.fetch_add_relaxed(1);
            }
            late = ctx.reduce(late ? 1 : 0, [](int a, int b) { return a | b; }) != 0;
        }
        if (ctx.thread_rank() != 0) return;
        if (late) (void)gpushare::detail::atomic_ref{*m.late}.fetch_add_relaxed(1);
        m.records[rank] = {begin, device_now(), ctx.sm()};
    }

private:
    __device__ static std::uint32_t word(std::uint32_t round, std::uint32_t rank) { return round * 2654435761U + rank; }

    __device__ bool arrived(device_context& ctx, std::uint32_t peer, std::uint32_t round) const {
        constexpr std::uint32_t awake = 10'000, most = awake + 4'000'000;  // two seconds
        const gpushare::detail::atomic_ref flag{m.flags[peer * meeting::flag_stride]};
        for (std::uint32_t turn = 0; turn < most; ++turn) {
            if (flag.load_acquire() >= round) return true;
            if (turn >= awake) ctx.backoff(turn);
        }
        return false;
    }
};

struct illegal_write {
    __device__ void operator()(device_context&) const { *reinterpret_cast<volatile int*>(16) = 1; }
};

constexpr std::uint32_t rank_threads = 128;

}  // namespace

void launch_empty(gpushare::cuda::stream& s) { s.launch({}, gpushare::detail::empty_kernel{}); }

void launch_spin(gpushare::cuda::stream& s, gpushare::grid g, gpushare::ns length, block_record* records) {
    s.launch(g, spin{static_cast<std::uint64_t>(length.count()), records});
}

std::uint32_t max_resident_spins(const gpushare::cuda::stream& s, std::uint32_t threads) {
    return s.max_cooperative_blocks(spin{}, threads);
}

gpushare::errc launch_meeting(gpushare::cuda::stream& s, const meeting& m) {
    return s.launch_cooperative({.blocks = m.ranks, .threads = rank_threads}, attend{m, 0});
}

void launch_rank(gpushare::cuda::stream& s, const meeting& m, std::uint32_t rank) {
    s.launch({.blocks = 1, .threads = rank_threads}, attend{m, rank});
}

void launch_illegal_write(gpushare::cuda::stream& s) { s.launch({}, illegal_write{}); }

}  // namespace bench
