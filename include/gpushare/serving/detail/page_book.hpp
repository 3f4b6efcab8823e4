// SPDX-License-Identifier: Apache-2.0
// The decisions of a page store, as a value: which pages are free, and which slabs of chunks exist.
// Pages come from the lowest slab with a free page, so that the upper slabs become empty and can be
// given back.
//
//   page_book book(pages_per_slab, slabs);
//   if (!book.take(out)) { auto more = book.plan(out.size()); ... book.landed(slab) each; book.take(out); }
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// `arriving` and `leaving` mean that a thread is adding or removing the slab, so its pages can't
/// be taken.
enum class slab_stage : std::uint8_t { absent, arriving, there, leaving };

class page_book {
public:
    page_book(std::uint32_t pages_per_slab, std::uint32_t slabs)
        : per_slab_(pages_per_slab),
          slabs_(slabs),
          free_((std::uint64_t{slabs} * pages_per_slab + 63) / 64),
          out_(free_.size()) {}

    [[nodiscard]] std::uint32_t pages() const noexcept { return per_slab_ * static_cast<std::uint32_t>(slabs_.size()); }
    [[nodiscard]] std::uint32_t per_slab() const noexcept { return per_slab_; }
    /// The number of pages that can be taken.
    [[nodiscard]] std::uint32_t free() const noexcept { return free_count_; }
    /// The number of taken pages.
    [[nodiscard]] std::uint32_t out() const noexcept { return out_count_; }
    [[nodiscard]] slab_stage stage(std::uint32_t s) const noexcept { return slabs_[s].stage; }
    [[nodiscard]] bool is_out(std::uint32_t page) const noexcept { return page < pages() && get(out_, page); }

    /// Takes as many pages as `to` has room for, or none.
    bool take(std::span<std::uint32_t> to) noexcept {
        if (to.size() > free_count_) return false;
        std::size_t n = 0;
        for (std::size_t w = first_; n < to.size(); ++w) {
            if (free_[w] == 0) {
                if (w == first_) ++first_;
                continue;
            }
            for (; free_[w] != 0 && n < to.size(); ++n) {
                const auto page =
                    static_cast<std::uint32_t>(w * 64 + static_cast<std::size_t>(std::countr_zero(free_[w])));
                clear(free_, page);
                set(out_, page);
                ++slabs_[page / per_slab_].busy;
                to[n] = page;
            }
        }
        free_count_ -= static_cast<std::uint32_t>(n);
        out_count_ += static_cast<std::uint32_t>(n);
        return true;
    }
    /// Says that the page was freed. The page can't be taken yet, because enqueued work may still
    /// use it: see put(). Returns false, and does nothing, if the page isn't currently allocated.
    bool leave(std::uint32_t page) noexcept {
        if (!is_out(page)) return false;
        clear(out_, page);
        --out_count_;
        return true;
    }
    /// Undoes leave().
    void stay(std::uint32_t page) noexcept {
        set(out_, page);
        ++out_count_;
    }
    /// Makes a page available again after leave(), once no work uses the page any more.
    void put(std::uint32_t page) noexcept {
        --slabs_[page / per_slab_].busy;
        offer(page);
    }

    /// The lowest missing slabs that are enough for `more` pages. They count as arriving from now
    /// on. If there aren't enough slabs, returns none and doesn't change the book.
    [[nodiscard]] std::vector<std::uint32_t> plan(std::uint32_t more) {
        const auto wanted = (std::uint64_t{more} + per_slab_ - 1) / per_slab_;
        std::vector<std::uint32_t> chosen;
        for (std::uint32_t s = 0; s < slabs_.size() && chosen.size() < wanted; ++s)
            if (slabs_[s].stage == slab_stage::absent) chosen.push_back(s);
        if (chosen.size() < wanted) return {};
        for (const auto s : chosen) slabs_[s].stage = slab_stage::arriving;
        return chosen;
    }
    void landed(std::uint32_t s) noexcept { come(s); }
    void fell_through(std::uint32_t s) noexcept { slabs_[s].stage = slab_stage::absent; }

    /// The highest present slab without a page that is allocated or left, if more than `keep` slabs
    /// are present. The slab counts as leaving from now on. Returns slabs() if there is no such
    /// slab.
    [[nodiscard]] std::uint32_t begin_leaving(std::uint32_t keep) noexcept {
        const auto all = static_cast<std::uint32_t>(slabs_.size());
        if (there_ <= keep) return all;
        for (auto s = all; s-- != 0;) {
            if (slabs_[s].stage != slab_stage::there || slabs_[s].busy != 0) continue;
            for (auto page = s * per_slab_; page < (s + 1) * per_slab_; ++page) clear(free_, page);
            free_count_ -= per_slab_;
            --there_;
            slabs_[s].stage = slab_stage::leaving;
            ++leaving_;
            return s;
        }
        return all;
    }
    void left(std::uint32_t s) noexcept {
        slabs_[s].stage = slab_stage::absent;
        --leaving_;
    }
    /// Says that the slab couldn't leave.
    void stays(std::uint32_t s) noexcept {
        come(s);
        --leaving_;
    }
    /// The number of slabs that are leaving.
    [[nodiscard]] std::uint32_t leaving() const noexcept { return leaving_; }
    [[nodiscard]] std::uint32_t slabs() const noexcept { return static_cast<std::uint32_t>(slabs_.size()); }

private:
    struct slab {
        slab_stage stage = slab_stage::absent;
        std::uint32_t busy = 0;  // pages that can't be taken
    };
    using bits = std::vector<std::uint64_t>;

    static bool get(const bits& b, std::uint32_t i) noexcept { return (b[i / 64] >> (i % 64) & 1U) != 0; }
    static void set(bits& b, std::uint32_t i) noexcept { b[i / 64] |= std::uint64_t{1} << (i % 64); }
    static void clear(bits& b, std::uint32_t i) noexcept { b[i / 64] &= ~(std::uint64_t{1} << (i % 64)); }

    void offer(std::uint32_t page) noexcept {
        set(free_, page);
        ++free_count_;
        first_ = std::min(first_, std::size_t{page} / 64);
    }
    void come(std::uint32_t s) noexcept {
        slabs_[s] = {slab_stage::there, 0};
        ++there_;
        for (auto page = s * per_slab_; page < (s + 1) * per_slab_; ++page) offer(page);
    }

    std::uint32_t per_slab_;
    std::vector<slab> slabs_;
    bits free_, out_;
    std::size_t first_ = 0;  // no word before this one has a free page
    std::uint32_t free_count_ = 0, out_count_ = 0, there_ = 0, leaving_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
