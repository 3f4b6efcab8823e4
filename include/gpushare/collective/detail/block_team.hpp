// SPDX-License-Identifier: Apache-2.0
// A team: the threads of a block that look at a few neighbouring elements together. On a device a
// team is some lanes of a warp, which exchange their largest number. Elsewhere a team is one
// thread.
//
//   const auto team = block_team::of<8>(ctx);
//   team.each(blocks, [&](std::size_t b) { most = team.largest(mine_of(b, team.lane())); });
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Threads that work together. A team has one thread if a block has fewer threads than a whole
/// team.
class block_team {
public:
    /// The team of the calling thread. `Lanes` is the size of a team, a power of two up to 32.
    template <std::uint32_t Lanes, class Context>
    [[nodiscard]] GPUSHARE_HD static block_team of(const Context& ctx) noexcept {
        static_assert(Lanes <= 32 && (Lanes & (Lanes - 1)) == 0);
        block_team t;
#ifdef __CUDA_ARCH__
        if (ctx.num_threads() >= Lanes) t.lanes_ = Lanes;
#endif
        t.lane_ = ctx.thread_rank() % t.lanes_;
        t.index_ = ctx.thread_rank() / t.lanes_;
        t.teams_ = ctx.num_threads() / t.lanes_;
        return t;
    }
    [[nodiscard]] GPUSHARE_HD std::uint32_t lane() const noexcept { return lane_; }
    [[nodiscard]] GPUSHARE_HD std::uint32_t lanes() const noexcept { return lanes_; }
    /// The first of this team's blocks, out of `blocks`. The team's next block is `teams()` further
    /// on. Threads outside all teams have no blocks.
    [[nodiscard]] GPUSHARE_HD std::size_t first(std::size_t blocks) const noexcept {
        return index_ < teams_ ? index_ : blocks;
    }
    [[nodiscard]] GPUSHARE_HD std::uint32_t teams() const noexcept { return teams_; }
    /// Calls f(block) for each of the team's blocks.
    template <class F>
    GPUSHARE_HD void each(std::size_t blocks, const F& f) const noexcept {
        if (index_ >= teams_) return;
        for (std::size_t b = index_; b < blocks; b += teams_) f(b);
    }
    /// The largest number of the team's threads. No thread may pass a NaN.
    [[nodiscard]] GPUSHARE_HD float largest(float x) const noexcept {
#ifdef __CUDA_ARCH__
        const std::uint32_t first = threadIdx.x % 32 / lanes_ * lanes_;
        const std::uint32_t mask = (~0U >> (32 - lanes_)) << first;
        for (std::uint32_t by = lanes_ / 2; by != 0; by /= 2) {
            const float other = __shfl_xor_sync(mask, x, static_cast<int>(by));
            x = x < other ? other : x;
        }
#endif
        return x;
    }

private:
    std::uint32_t lane_ = 0, lanes_ = 1, index_ = 0, teams_ = 1;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
