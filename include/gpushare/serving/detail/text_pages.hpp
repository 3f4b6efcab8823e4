// SPDX-License-Identifier: Apache-2.0
// The pages of the texts of an iteration_batch. A value that knows which text has which page, which
// pages must be copied before a text writes to them, which pages are moved to the host, and which
// moves an engine has to carry out.
//
//   if (pages.fits(text, 16) == 16) pages.extend(text, 16);  // in pages that nobody else reads
//   pages.yield(text, true);                                 // to the host, if there is room
//   pages.release(text);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/serving/detail/shared_pages.hpp>
#include <gpushare/serving/detail/text_record.hpp>
#include <gpushare/serving/iteration_options.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// How many pages a text needs to begin, or to continue where it stopped.
struct pages_to_begin {
    std::uint32_t matched = 0;  // published prefixes with the text's tokens
    std::uint32_t unused = 0;   // the prefixes among them that no text uses yet
    std::uint32_t fresh = 0;    // further pages

    [[nodiscard]] std::uint32_t charged() const noexcept { return unused + fresh; }
};

class text_pages {
public:
    text_pages(std::uint32_t page_tokens, std::uint32_t host_pages, bool shares)
        : tokens_(page_tokens), shares_(shares), pages_(page_tokens) {
        host_free_.reserve(host_pages);
        for (std::uint32_t p = host_pages; p-- > 0;) host_free_.push_back(p);
        host_pages_ = host_pages;
    }

    [[nodiscard]] const shared_pages& all() const noexcept { return pages_; }
    [[nodiscard]] shared_pages& all() noexcept { return pages_; }
    [[nodiscard]] std::uint32_t host_used() const noexcept {
        return host_pages_ - static_cast<std::uint32_t>(host_free_.size());
    }
    [[nodiscard]] std::uint32_t pages_for(std::uint64_t tokens) const noexcept {
        return static_cast<std::uint32_t>((tokens + tokens_ - 1) / tokens_);
    }
    [[nodiscard]] step_list<page_move>& moves() noexcept { return moves_; }
    [[nodiscard]] std::uint32_t copies() const noexcept { return copies_; }

    /// The number of pages that the text lacks for all of its known tokens.
    [[nodiscard]] std::uint32_t outstanding(const text_record& r) const noexcept {
        const auto all = pages_for(r.known());
        return all - std::min(all, static_cast<std::uint32_t>(r.pages.size()));
    }
    /// The number of further tokens in this step, at most `n`, for which there are pages, counting
    /// the tenant's quota as well.
    [[nodiscard]] std::uint32_t fits(const text_record& r, std::uint32_t n) const noexcept {
        const std::uint64_t end = r.computed + r.planned;
        const std::uint32_t copied = copies_first(r) ? 1 : 0;
        const auto more = std::min(pages_.available(), quota_left(*r.flow->tenant));
        if (more < copied) return 0;
        const auto room = (std::uint64_t{r.pages.size()} + more - copied) * tokens_;
        return static_cast<std::uint32_t>(std::min<std::uint64_t>(n, room - std::min(room, end)));
    }
    [[nodiscard]] static std::uint32_t quota_left(const text_tenant& t) noexcept {
        return t.pages - std::min(t.pages, t.held);
    }
    /// Whether one more token doesn't fit because of the tenant's quota, however many pages are
    /// free.
    [[nodiscard]] bool wants_quota(const text_record& r) const noexcept {
        return quota_left(*r.flow->tenant) == 0 && fits(r, 1) == 0;
    }
    /// Gives the text pages for `n` more tokens, which must fit.
    void extend(text_record& r, std::uint32_t n) noexcept {
        if (copies_first(r)) copy_on_write(r, (r.computed + r.planned) / tokens_);
        const auto all = pages_for(std::uint64_t{r.computed} + r.planned + n);
        while (r.pages.size() < all) r.pages.push_back(acquire(*r.flow->tenant));
    }

    [[nodiscard]] pages_to_begin to_begin(const text_record& r) const noexcept {
        pages_to_begin n;
        if (r.parked.empty() && shares_) {
            auto chain = r.flow->tenant->root;
            for (std::uint32_t p = 0; (p = match(r, n.matched, chain)) != shared_pages::none; ++n.matched) {
                n.unused += pages_.users(p) == 0 ? 1 : 0;
                chain = pages_.serial(p);
            }
        }
        // the text's last token is computed, in a copy of the page
        const bool whole = std::uint64_t{n.matched} * tokens_ >= r.known();
        n.fresh = pages_for(r.known()) - n.matched + (whole ? 1 : 0);
        return n;
    }
    /// Takes the prefixes that to_begin() found, or brings back parked pages.
    void begin(text_record& r) noexcept {
        r.chained = 0;
        r.chain = r.flow->tenant->root;
        for (const auto h : r.parked) {
            r.pages.push_back(acquire(*r.flow->tenant));
            moves_.add({page_move_kind::to_device, h, r.pages.back()});
            host_free_.push_back(h);
        }
        const bool was_parked = !r.parked.empty();
        r.parked.clear();
        if (was_parked || !shares_) return;
        for (std::uint32_t p = 0; (p = match(r, r.chained, r.chain)) != shared_pages::none;) chain(r, p);
        r.computed = std::min(r.chained * tokens_, r.known() - 1);
    }
    /// Lets the text share the pages of another text, as far as the two have had the same content.
    void share(const text_record& with, text_record& r) noexcept {
        r.computed = with.computed;
        r.chained = with.chained;
        r.chain = with.chain;
        for (std::uint32_t i = 0; i < pages_for(r.computed); ++i) {
            r.pages.push_back(with.pages[i]);
            use(*r.flow->tenant, with.pages[i]);
        }
    }

    /// Takes the text's pages away. They move to the host if `moves` is set and there is room;
    /// otherwise the text is computed again. Returns whether the pages moved.
    bool yield(text_record& r, bool moves) noexcept {
        const bool parks = moves && r.computed != 0 && pages_for(r.computed) <= host_free_.size();
        for (std::uint32_t i = 0; parks && i < pages_for(r.computed); ++i) {
            r.parked.push_back(host_free_.back());
            host_free_.pop_back();
            moves_.add({page_move_kind::to_host, r.pages[i], r.parked.back()});
        }
        leave(r);
        if (!parks) r.computed = 0;
        return parks;
    }
    void release(text_record& r) noexcept {
        leave(r);
        for (const auto h : r.parked) host_free_.push_back(h);
        r.parked.clear();
    }
    /// Makes pages that became full into prefixes. If another text has published the same page in
    /// the meantime, the text gives its own page back and uses the published page.
    void publish(text_record& r) noexcept {
        while (shares_ && (std::uint64_t{r.chained} + 1) * tokens_ <= r.computed) {
            const auto mine = r.pages[r.chained];
            const auto text = std::span<const text_token>(r.tokens).subspan(std::size_t{r.chained} * tokens_, tokens_);
            const auto theirs = pages_.find(r.chain, text);
            if (theirs == shared_pages::none) {
                pages_.publish(mine, r.chain, text);
            } else if (theirs != mine) {
                drop(*r.flow->tenant, mine);
                use(*r.flow->tenant, theirs);
                r.pages[r.chained] = theirs;
            }
            r.chain = pages_.serial(r.pages[r.chained++]);
        }
    }

    /// Reserves memory, so that no plan for that many texts allocates. A text begins and yields at
    /// most once in a plan, and no text yields in the plan in which it begins.
    void reserve(std::size_t texts) { moves_.make_room(2 * (pages_.total() + texts) + host_pages_); }

private:
    // Whether another text reads, or may read, the first page that the text writes to in this step.
    [[nodiscard]] bool copies_first(const text_record& r) const noexcept {
        const auto at = (r.computed + r.planned) / tokens_;
        return at < r.pages.size() && !pages_.writable(r.pages[at]);
    }
    void copy_on_write(text_record& r, std::uint32_t at) noexcept {
        const auto shared = r.pages[at];
        const auto mine = acquire(*r.flow->tenant);
        moves_.add({page_move_kind::copy, shared, mine});
        ++copies_;
        if (r.chained > at) {
            r.chained = at;
            r.chain = pages_.parent(shared);
        }
        drop(*r.flow->tenant, shared);
        r.pages[at] = mine;
    }
    [[nodiscard]] std::uint32_t match(const text_record& r, std::uint32_t at, std::uint64_t chain) const noexcept {
        if ((std::uint64_t{at} + 1) * tokens_ > r.known()) return shared_pages::none;
        return pages_.find(chain, std::span<const text_token>(r.tokens).subspan(std::size_t{at} * tokens_, tokens_));
    }
    void chain(text_record& r, std::uint32_t page) noexcept {
        use(*r.flow->tenant, page);
        r.pages.push_back(page);
        r.chain = pages_.serial(page);
        ++r.chained;
    }
    // The last pages leave first, so that the end of an unused prefix is evicted before its
    // beginning.
    void leave(text_record& r) noexcept {
        while (!r.pages.empty()) {
            drop(*r.flow->tenant, r.pages.back());
            r.pages.pop_back();
        }
        r.chained = 0;
    }
    std::uint32_t acquire(text_tenant& t) noexcept {
        ++t.held;
        return pages_.acquire();
    }
    void use(text_tenant& t, std::uint32_t page) noexcept {
        t.held += pages_.users(page) == 0 ? 1 : 0;
        pages_.use(page);
    }
    void drop(text_tenant& t, std::uint32_t page) noexcept {
        pages_.drop(page);
        t.held -= pages_.users(page) == 0 ? 1 : 0;
    }

    std::uint32_t tokens_;  // tokens of a page
    bool shares_;
    shared_pages pages_;
    std::vector<std::uint32_t> host_free_;
    std::uint32_t host_pages_ = 0, copies_ = 0;
    step_list<page_move> moves_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
