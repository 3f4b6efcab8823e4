// SPDX-License-Identifier: Apache-2.0
// Decides what the next step of an iteration_batch computes, in this order:
//  1. Each running text gets room for one more token, in the order in which texts keep their pages.
//     Later texts yield for earlier texts.
//  2. Tokens are given out level by level. On each level, the tenant with the lowest counter
//     repeatedly gets a page of tokens or less. A waiting text begins when there are enough pages
//     for all of its known tokens, alongside the pages that running texts still lack. Texts of
//     lower levels yield for it if that suffices. If there are too few pages, no later text begins
//     either, so the waiting text isn't overtaken forever.
//  3. A tenant that got everything it wanted keeps no credit: its counter is raised to the lowest
//     counter of the tenants that were held back.
//
//   planner.plan(book, now);  ...  planner.complete(book, next);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/serving/detail/text_book.hpp>
#include <gpushare/serving/detail/text_record.hpp>
#include <gpushare/serving/iteration_options.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

class step_planner {
public:
    explicit step_planner(const iteration_options& o) : o_(o) {}

    [[nodiscard]] const step_plan& current() const noexcept { return plan_; }
    [[nodiscard]] bool in_flight() const noexcept { return in_flight_; }
    [[nodiscard]] std::uint64_t computed() const noexcept { return computed_; }
    [[nodiscard]] std::uint64_t recomputed() const noexcept { return recomputed_; }
    [[nodiscard]] std::uint64_t found() const noexcept { return found_; }

    /// Reserves memory, so that no plan for that many texts and flows allocates.
    void reserve(std::size_t texts, std::size_t flows) {
        detail::make_room(in_step_, texts);
        entries_.make_room(texts);
        detail::make_room(active_, flows);
    }
    void plan(text_book& b, instant now) noexcept {
        b.pages().moves().clear();
        entries_.clear();
        in_step_.clear();
        expire(b, now);
        budget_ = o_.step_tokens;
        may_begin_ = true;
        make_room(b);
        give_out(b);
        for (std::size_t i = 0; i < active_.size(); i = behind_level(i)) lift(i, behind_level(i));
        for (const auto* r : in_step_) entries_.add(entry_of(*r));
        plan_ = {b.pages().moves().all(), entries_.all(), o_.step_tokens - budget_};
        in_flight_ = !entries_.empty() || !b.pages().moves().empty();
    }
    /// `next` has a token for each entry.
    void complete(text_book& b, std::span<const text_token> next) noexcept {
        in_flight_ = false;
        for (std::size_t i = 0; i < in_step_.size(); ++i) {
            auto& r = *in_step_[i];
            const bool samples = plan_.entries[i].samples;
            r.computed += std::exchange(r.planned, 0);
            b.pages().publish(r);
            if (samples) r.tokens.push_back(next[i]);
            const bool whole = samples && (r.known() == r.most || (r.has_last_token && next[i] == r.last_token));
            if (whole || r.ends != errc::none) b.end(r, whole ? errc::none : r.ends);
        }
        in_step_.clear();  // ended texts will be removed soon
    }
    /// Ends the step after a failure: the contents of the pages are unknown.
    void fail(text_book& b, errc why) noexcept {
        in_flight_ = false;
        for (auto* r : in_step_) r->planned = 0;
        in_step_.clear();
        while (!b.running().empty()) b.end(*b.running().back(), why);
        for (const auto& f : b.flows())
            for (auto at = f->waiting.begin(); at != f->waiting.end();)
                if (auto& r = **at++; !r.parked.empty()) b.end(r, why);
        b.pages().all().forget_unused();
    }

private:
    static void expire(text_book& b, instant now) noexcept {
        for (auto i = b.running().size(); i-- > 0;)
            if (b.running()[i]->deadline <= now) b.end(*b.running()[i], errc::deadline_exceeded);
        for (const auto& f : b.flows())
            while (!f->waiting.empty() && (*f->waiting.begin())->deadline <= now)
                b.end(**f->waiting.begin(), errc::deadline_exceeded);
    }
    [[nodiscard]] std::size_t behind_level(std::size_t first) const noexcept {
        auto last = first;
        while (last < active_.size() && active_[last]->level == active_[first]->level) ++last;
        return last;
    }

    // ---- pages for running texts

    void make_room(text_book& b) noexcept {
        for (std::size_t i = 0; i < b.running().size();) {
            auto& r = *b.running()[i];
            while (b.pages().fits(r, 1) == 0 && yield_behind(b, i)) {
            }
            if (b.pages().fits(r, 1) != 0)
                b.pages().extend(r, 1);
            else if (never_has_room(b, i)) {
                b.end(r, b.pages().wants_quota(r) ? errc::over_quota : errc::no_room);
                continue;
            }
            ++i;
        }
    }
    // The last text behind text i yields. If the tenant's quota is short, the last text of that
    // tenant yields.
    bool yield_behind(text_book& b, std::size_t i) noexcept {
        const auto* const t = b.running()[i]->flow->tenant;
        const bool own = b.pages().wants_quota(*b.running()[i]);
        for (auto j = b.running().size(); --j > i;) {
            if (own && b.running()[j]->flow->tenant != t) continue;
            b.yield(*b.running()[j], moves());
            return true;
        }
        return false;
    }
    // True if every text that could yield has yielded already. The text's tenant, or the device,
    // then has fewer pages than when the text arrived.
    static bool never_has_room(text_book& b, std::size_t i) noexcept {
        if (i == 0) return true;
        const auto* const t = b.running()[i]->flow->tenant;
        const auto first = b.running().begin();
        return b.pages().wants_quota(*b.running()[i]) &&
               std::none_of(first, first + static_cast<std::ptrdiff_t>(i),
                            [&](const auto* r) { return r->flow->tenant == t; });
    }
    [[nodiscard]] bool moves() const noexcept { return o_.on_yield == yields_by::moving; }

    // ---- tokens

    void give_out(text_book& b) noexcept {
        active_.clear();
        for (const auto& f : b.flows()) {
            f->turn.clear();
            f->next = 0;
            f->may_begin = true;
            f->held_back = false;
            if (f->texts != 0) active_.push_back(f.get());
        }
        for (auto* r : b.running())
            if (r->missing() == 1) r->flow->turn.push_back(r);
        for (auto* r : b.running())
            if (r->missing() != 1) r->flow->turn.push_back(r);
        for (std::size_t i = 0; i < active_.size(); i = behind_level(i))
            while (auto* const f = budget_ != 0 ? neediest(i, behind_level(i)) : nullptr) serve(b, *f);
    }
    [[nodiscard]] text_flow* neediest(std::size_t first, std::size_t last) const noexcept {
        text_flow* best = nullptr;
        for (; first < last; ++first) {
            auto& f = *active_[first];
            const bool more = f.next < f.turn.size() || (may_begin_ && f.may_begin && !f.waiting.empty());
            if (more && (best == nullptr || f.counter < best->counter)) best = &f;
        }
        return best;
    }
    // Gives a page of tokens, or less, to the flow's next text, or lets the next text begin.
    void serve(text_book& b, text_flow& f) noexcept {
        if (f.next == f.turn.size()) {
            begin(b, f);
            return;
        }
        auto& r = *f.turn[f.next];
        const auto wants = r.running ? std::min(r.missing(), o_.prompt_chunk - r.planned) : 0;
        const auto n = b.pages().fits(r, std::min({wants, o_.page_tokens, budget_}));
        if (n == 0) {
            f.held_back = f.held_back || (wants != 0 && !b.pages().wants_quota(r));
            ++f.next;
            return;
        }
        b.pages().extend(r, n);
        if (r.planned == 0) in_step_.push_back(&r);
        r.planned += n;
        budget_ -= n;
        computed_ += n;
        const auto end = r.computed + r.planned;
        const auto first_time = end - std::min(end, std::max(r.charged, end - n));
        recomputed_ += n - first_time;
        charge_tokens(f, first_time);
        r.charged = std::max(r.charged, end);
    }

    // ---- texts begin

    void begin(text_book& b, text_flow& f) noexcept {
        auto& r = **f.waiting.begin();
        if (const auto why = b.too_long(r.most, *f.tenant); why.code != errc::none) return b.end(r, why.code);
        if (!gets_room(b, f, r)) return;
        const bool parked = !r.parked.empty();
        b.run(r);
        b.pages().begin(r);
        if (!parked) found_ += r.computed - std::min(r.computed, r.charged);
        r.charged = std::max(r.charged, r.computed);
        f.turn.push_back(&r);
    }
    // Texts on lower levels yield only if the text can then begin. Otherwise they would yield in
    // vain in each step, and never make progress.
    bool gets_room(text_book& b, text_flow& f, const text_record& r) noexcept {
        auto needs = b.pages().to_begin(r).charged();
        if (!enough_below(b, f, needs, f.tenant)) return f.may_begin = false;
        if (!enough_below(b, f, needs, nullptr) || !(has_place(b) || b.running().back()->flow->level < f.level))
            return may_begin_ = false;
        for (;; needs = b.pages().to_begin(r).charged()) {
            if (needs + promised(b, f.tenant, lowest) > text_pages::quota_left(*f.tenant)) {
                if (yield_below(b, f, f.tenant)) continue;
                return f.may_begin = false;
            }
            if (has_place(b) && needs + promised(b, nullptr, f.level) <= b.pages().all().available()) return true;
            if (enough_below(b, f, needs, nullptr) && yield_below(b, f, nullptr)) continue;
            return may_begin_ = false;
        }
    }
    [[nodiscard]] bool has_place(text_book& b) const noexcept { return b.running().size() < o_.texts; }
    // The pages that running texts on this level and above will still need: the texts of one
    // tenant, or all texts.
    static std::uint64_t promised(text_book& b, const text_tenant* of, int level) noexcept {
        std::uint64_t sum = 0;
        for (const auto* r : b.running())
            if (r->flow->level >= level && (of == nullptr || r->flow->tenant == of)) sum += b.pages().outstanding(*r);
        return sum;
    }
    // Whether there are enough pages once all texts on lower levels have yielded: in the tenant's
    // quota, or on the device.
    static bool enough_below(text_book& b, const text_flow& f, std::uint64_t needs, const text_tenant* of) noexcept {
        std::uint64_t pages = of != nullptr ? text_pages::quota_left(*of) : b.pages().all().available();
        for (const auto* r : b.running())
            if (r->flow->level < f.level && (of == nullptr || r->flow->tenant == of)) pages += r->pages.size();
        return needs + promised(b, of, f.level) <= pages;
    }
    // The last text of a lower level yields. If a tenant is given, the last text of that tenant
    // yields.
    bool yield_below(text_book& b, const text_flow& f, const text_tenant* of) noexcept {
        for (auto j = b.running().size(); j-- > 0 && b.running()[j]->flow->level < f.level;)
            if (of == nullptr || b.running()[j]->flow->tenant == of) {
                b.yield(*b.running()[j], moves());
                return true;
            }
        return false;
    }

    // ---- counters

    [[nodiscard]] bool held_back(const text_flow& f) const noexcept {
        if (f.held_back || (f.may_begin && !f.waiting.empty())) return true;
        return std::any_of(f.turn.begin() + static_cast<std::ptrdiff_t>(f.next), f.turn.end(), [&](const auto* r) {
            return r->running && r->missing() != 0 && r->planned < o_.prompt_chunk;
        });
    }
    void lift(std::size_t first, std::size_t last) const noexcept {
        std::uint64_t least = ~std::uint64_t{0}, most = 0;
        for (auto i = first; i < last; ++i) {
            most = std::max(most, active_[i]->counter);
            if (held_back(*active_[i])) least = std::min(least, active_[i]->counter);
        }
        for (auto i = first; i < last; ++i)
            if (auto& f = *active_[i]; !held_back(f))
                f.counter = std::max(f.counter, least == ~std::uint64_t{0} ? most : least);
    }

    [[nodiscard]] static step_entry entry_of(const text_record& r) noexcept {
        return {r.id,       r.flow->tenant->tag,
                r.computed, std::span<const text_token>(r.tokens).subspan(r.computed, r.planned),
                r.pages,    r.computed + r.planned == r.known()};
    }

    static constexpr int lowest = std::numeric_limits<int>::min();  // below every level

    iteration_options o_;
    std::vector<text_record*> in_step_;
    step_list<step_entry> entries_;
    std::vector<text_flow*> active_;  // flows with texts, the highest level first
    step_plan plan_;
    bool in_flight_ = false;
    bool may_begin_ = true;  // whether no text waits for pages, on this level or above
    std::uint32_t budget_ = 0;
    std::uint64_t computed_ = 0, recomputed_ = 0, found_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
