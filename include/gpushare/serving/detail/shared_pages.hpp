// SPDX-License-Identifier: Apache-2.0
// Says which pages of an iteration_batch are free, in use, or kept as unused prefixes. A value.
//
//   shared_pages pages(16);  pages.add(0);
//   const auto p = pages.acquire();         // a free page, or the prefix unused for longest
//   pages.publish(p, parent, tokens);       // p is full: other texts can find and share it
//   if (auto q = pages.find(parent, tokens); q != shared_pages::none) pages.use(q);
//   pages.drop(p);
//
// A prefix is found by its tokens and the serial number of the page before it. Both are compared in
// full, so two texts with the same hash don't get each other's pages. Serials aren't reused, so
// pages after an evicted page aren't found.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/golden_ratio.hpp>
#include <gpushare/serving/iteration_options.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

class shared_pages {
public:
    static constexpr std::uint32_t none = ~0U;
    explicit shared_pages(std::uint32_t page_tokens) noexcept : page_tokens_(page_tokens) {}
    /// The parent of a text's first page. Texts of different tenants share no pages, nor does a
    /// tenant find pages of an earlier tenant with its tag. So `tenant` counts the tenants, from 1.
    [[nodiscard]] static constexpr std::uint64_t root_of(std::uint64_t tenant) noexcept {
        return (std::uint64_t{1} << 63) | tenant;
    }

    [[nodiscard]] std::uint32_t total() const noexcept { return total_; }
    [[nodiscard]] std::uint32_t free() const noexcept { return static_cast<std::uint32_t>(free_.size()); }
    /// The number of pages that are kept as prefixes, but that no text uses.
    [[nodiscard]] std::uint32_t unused() const noexcept { return unused_; }
    [[nodiscard]] std::uint32_t available() const noexcept { return free() + unused_; }

    [[nodiscard]] bool knows(std::uint32_t page) const noexcept { return page < all_.size() && all_[page].present; }
    /// Adds a page that isn't in the object yet.
    void add(std::uint32_t page) {
        if (page >= all_.size()) all_.resize(std::size_t{page} + 1);
        if (free_.capacity() <= total_) free_.reserve(std::max<std::size_t>(64, 2 * free_.capacity()));
        grow_index(total_ + 1);
        all_[page].tokens.reserve(page_tokens_);  // so that publishing doesn't allocate
        all_[page].present = true;
        free_.push_back(page);
        ++total_;
    }
    /// Removes an available page.
    [[nodiscard]] std::uint32_t remove() noexcept {
        const auto page = take();
        all_[page].present = false;
        --total_;
        return page;
    }

    /// Not a cryptographic hash: anyone can find tokens with the hash of other tokens.
    [[nodiscard]] static std::uint64_t hash_of(std::uint64_t parent, std::span<const text_token> tokens) noexcept {
        std::uint64_t h = parent ^ golden_ratio;
        for (const auto t : tokens) {
            h = (h ^ t) * 0xff51afd7ed558ccdU;
            h ^= h >> 32;
        }
        return h;
    }

    /// Takes a page for one user. There must be an available page.
    [[nodiscard]] std::uint32_t acquire() noexcept {
        const auto page = take();
        all_[page].users = 1;
        return page;
    }
    /// Adds a user.
    void use(std::uint32_t page) noexcept {
        if (all_[page].users++ == 0) unlist(page);
    }
    /// Removes a user. A page without users is available.
    void drop(std::uint32_t page) noexcept {
        if (--all_[page].users != 0) return;
        if (all_[page].serial == 0)
            free_.push_back(page);
        else
            enlist(page);
    }
    [[nodiscard]] std::uint32_t users(std::uint32_t page) const noexcept { return all_[page].users; }
    /// Whether the page's only user may write to it, because no other text reads the page, now or
    /// later.
    [[nodiscard]] bool writable(std::uint32_t page) const noexcept {
        return all_[page].users == 1 && all_[page].serial == 0;
    }

    /// The page with these tokens after the page with that serial, or `none`.
    [[nodiscard]] std::uint32_t find(std::uint64_t parent, std::span<const text_token> tokens) const noexcept {
        if (index_.empty()) return none;
        const auto hash = hash_of(parent, tokens);
        for (auto p = index_[hash % index_.size()]; p != none; p = all_[p].same_bucket) {
            const auto& is = all_[p];
            if (is.hash == hash && is.parent == parent && std::ranges::equal(is.tokens, tokens)) return p;
        }
        return none;
    }
    /// Publishes a page in use. Neither the page nor one with the same parent and tokens may be
    /// published already.
    void publish(std::uint32_t page, std::uint64_t parent, std::span<const text_token> tokens) noexcept {
        auto& is = all_[page];
        is.tokens.assign(tokens.begin(), tokens.end());
        is.serial = ++last_serial_;
        is.parent = parent;
        is.hash = hash_of(parent, tokens);
        auto& bucket = index_[is.hash % index_.size()];
        is.same_bucket = bucket;
        bucket = page;
    }
    [[nodiscard]] std::uint64_t serial(std::uint32_t page) const noexcept { return all_[page].serial; }
    [[nodiscard]] std::uint64_t parent(std::uint32_t page) const noexcept { return all_[page].parent; }
    /// Frees all unused prefixes.
    void forget_unused() noexcept {
        while (oldest_ != none) {
            const auto page = oldest_;
            unlist(page);
            unpublish(page);
            free_.push_back(page);
        }
    }

private:
    struct record {
        std::vector<text_token> tokens{};
        // a serial of 0 means that the page isn't published
        std::uint64_t serial = 0, parent = 0, hash = 0;
        std::uint32_t users = 0;
        std::uint32_t same_bucket = none;
        std::uint32_t older = none, newer = none;  // of unused pages
        bool present = false;
    };

    std::uint32_t take() noexcept {
        if (free_.empty()) {
            const auto page = oldest_;
            unlist(page);
            unpublish(page);
            return page;
        }
        const auto page = free_.back();
        free_.pop_back();
        return page;
    }
    void unpublish(std::uint32_t page) noexcept {
        auto& is = all_[page];
        auto* at = &index_[is.hash % index_.size()];
        while (*at != page) at = &all_[*at].same_bucket;
        *at = is.same_bucket;
        is.serial = 0;
    }
    void enlist(std::uint32_t page) noexcept {
        auto& is = all_[page];
        is.older = newest_;
        is.newer = none;
        (newest_ == none ? oldest_ : all_[newest_].newer) = page;
        newest_ = page;
        ++unused_;
    }
    void unlist(std::uint32_t page) noexcept {
        auto& is = all_[page];
        (is.older == none ? oldest_ : all_[is.older].newer) = is.newer;
        (is.newer == none ? newest_ : all_[is.newer].older) = is.older;
        --unused_;
    }
    void grow_index(std::uint32_t pages) {
        if (pages <= index_.size()) return;
        index_.assign(std::max<std::size_t>(64, 2 * index_.size()), none);
        for (std::uint32_t p = 0; p < all_.size(); ++p) {
            if (all_[p].serial == 0) continue;
            auto& bucket = index_[all_[p].hash % index_.size()];
            all_[p].same_bucket = bucket;
            bucket = p;
        }
    }

    std::uint32_t page_tokens_;
    std::vector<record> all_;
    std::vector<std::uint32_t> free_;
    std::vector<std::uint32_t> index_;  // the first page of each bucket
    std::uint32_t oldest_ = none, newest_ = none, unused_ = 0, total_ = 0;
    std::uint64_t last_serial_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
