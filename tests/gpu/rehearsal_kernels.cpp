// SPDX-License-Identifier: Apache-2.0
// The kernels of bench/gpu over the stand-in: with them the experiments run through without a
// device. Their figures mean nothing then, but what the host does is what it will do.

#include <chrono>
#include <cstdint>
#include <stdexcept>

#include <gpushare/detail/atomic_ref.hpp>

#include "gpu/kernels.hpp"
#include "standins/cuda/launch.hpp"

#include "gpu/collective_kind_launches.hpp"
#include "gpu/collective_launches.hpp"

namespace bench {

namespace {

using gpushare::cuda::device_context;

// Not the stand-in's: kernels run inside of it, when their time is over.
std::uint64_t now() {
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / gpushare::ns{1});
}

struct spin {
    std::uint64_t length;
    block_record* records;

    void operator()(device_context& ctx) const {
        if (records != nullptr) records[ctx.block_rank()] = {now() - length, now(), ctx.sm()};
    }
};

// Blocks of one launch run together, but those of several run one after the other: they wait for
// nobody.
struct attend {
    meeting m;
    std::uint32_t first_rank;

    void operator()(device_context& ctx) const {
        const std::uint32_t rank = first_rank + ctx.block_rank();
        gpushare::detail::atomic_ref{m.flags[rank * meeting::flag_stride]}.store_release(m.rounds);
        m.records[rank] = {now() - 1, now(), ctx.sm()};
    }
};

struct illegal_write {
    void operator()(device_context&) const { throw std::runtime_error("illegal access"); }
};

}  // namespace

void launch_empty(gpushare::cuda::stream& s) { s.launch({}, gpushare::detail::empty_kernel{}); }

void launch_spin(gpushare::cuda::stream& s, gpushare::grid g, gpushare::ns length, block_record* records) {
    g.hold = length;
    s.launch(g, spin{static_cast<std::uint64_t>(length.count()), records});
}

std::uint32_t max_resident_spins(const gpushare::cuda::stream& s, std::uint32_t threads) {
    return s.max_cooperative_blocks(spin{}, threads);
}

gpushare::errc launch_meeting(gpushare::cuda::stream& s, const meeting& m) {
    return s.launch_cooperative({.blocks = m.ranks}, attend{m, 0});
}

void launch_rank(gpushare::cuda::stream& s, const meeting& m, std::uint32_t rank) { s.launch({}, attend{m, rank}); }

void launch_illegal_write(gpushare::cuda::stream& s) { s.launch({}, illegal_write{}); }

}  // namespace bench
