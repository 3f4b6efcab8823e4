// SPDX-License-Identifier: Apache-2.0
// The ranges that a pool has from its upstream, and which of them could go back.
//
//   gpushare::pool_segments segments;
//   gpushare::pool_block& whole = segments.add(fit, {begin, size, alignment});
//   auto idle = segments.remove_empty(fit, target);      // idle.begin is null if there is none, or the target is met
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/memory/detail/pool_block.hpp>
#include <gpushare/memory/detail/pool_fit.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// As the upstream knows it.
struct pool_segment {
    std::byte* begin = nullptr;
    std::uint64_t size = 0;
    std::size_t alignment = 0;
};

/// Not thread-safe. Sizes are bytes.
class pool_segments {
public:
    /// Throws std::bad_alloc, and then nothing has changed.
    pool_block& add(pool_fit& fit, const pool_segment& s) {
        all_.push_back({s, nullptr});
        try {
            all_.back().first = &fit.add(s.begin, s.size);
        } catch (...) {
            all_.pop_back();
            throw;
        }
        held_ += s.size;
        peak_ = std::max(peak_, held_);
        return *all_.back().first;
    }

    /// One in which nothing is, if more than `target` bytes are held. Steps in proportion to the number of segments.
    [[nodiscard]] pool_segment remove_empty(pool_fit& fit, std::uint64_t target) noexcept {
        if (held_ <= target) return {};
        const auto found =
            std::ranges::find_if(all_, [](const entry& e) { return e.first->free && e.first->whole_range(); });
        return found == all_.end() ? pool_segment{} : remove(fit, *found);
    }
    /// One that is free as a whole, by its first block.
    pool_segment remove(pool_fit& fit, pool_block& whole) noexcept {
        return remove(fit, *std::ranges::find(all_, &whole, &entry::first));
    }
    /// Any, whatever is in it: for the end.
    [[nodiscard]] pool_segment remove_any() noexcept { return all_.empty() ? pool_segment{} : drop(all_.back()); }

    [[nodiscard]] std::uint64_t held() const noexcept { return held_; }
    [[nodiscard]] std::uint64_t peak() const noexcept { return peak_; }
    [[nodiscard]] std::size_t count() const noexcept { return all_.size(); }

private:
    struct entry {
        pool_segment segment;
        pool_block* first = nullptr;
    };

    pool_segment remove(pool_fit& fit, entry& e) noexcept {
        fit.remove(*e.first);
        return drop(e);
    }
    pool_segment drop(entry& e) noexcept {
        const pool_segment dropped = std::exchange(e, all_.back()).segment;
        all_.pop_back();
        held_ -= dropped.size;
        return dropped;
    }

    std::vector<entry> all_;
    std::uint64_t held_ = 0, peak_ = 0;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
