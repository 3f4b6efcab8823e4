// SPDX-License-Identifier: Apache-2.0
// The texts of an iteration_batch that run, wait or have ended, by tenant and level. A value. Once
// a text is in the book, no call for the text allocates.
//
//   auto& r = book.add(request, tokens);     // waits
//   book.run(r);  book.yield(r, true);  book.end(r, errc::stopped);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/serving/detail/text_pages.hpp>
#include <gpushare/serving/detail/text_record.hpp>
#include <gpushare/serving/iteration_options.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

class text_book {
public:
    explicit text_book(const iteration_options& o) : pages_(o.page_tokens, o.host_pages, o.share_prefixes) {
        for (std::uint32_t p = o.pages; p-- > 0;) pages_.all().add(p);
    }

    [[nodiscard]] text_pages& pages() noexcept { return pages_; }
    [[nodiscard]] const text_pages& pages() const noexcept { return pages_; }
    /// The flows with texts, the highest level first.
    [[nodiscard]] std::vector<std::unique_ptr<text_flow>>& flows() noexcept { return flows_; }
    /// The running texts, in the order in which they keep their pages.
    [[nodiscard]] const std::vector<text_record*>& running() const noexcept { return running_; }
    [[nodiscard]] std::size_t size() const noexcept { return all_.size(); }
    [[nodiscard]] std::uint64_t yields() const noexcept { return yields_; }
    [[nodiscard]] std::uint64_t moved() const noexcept { return moved_; }

    [[nodiscard]] text_record* find(text_id id) const noexcept {
        const auto at = all_.find(id);
        return at == all_.end() ? nullptr : at->second.get();
    }
    [[nodiscard]] text_tenant* find_tenant(std::uint32_t tag) const noexcept {
        const auto at = tenants_.find(tag);
        return at == tenants_.end() ? nullptr : at->second.get();
    }
    void set_tenant(std::uint32_t tag, const text_tenant_spec& spec) {
        auto& t = tenants_[tag];
        if (!t)
            t = std::make_unique<text_tenant>(text_tenant{.tag = tag, .root = shared_pages::root_of(++tenants_made_)});
        t->weight = spec.weight;
        t->pages = spec.pages;
        t->most_waiting = spec.max_waiting;
    }
    void remove_tenant(text_tenant& t) noexcept {
        end_all(errc::closed, &t);
        std::erase_if(flows_, [&](const auto& f) { return f->tenant == &t; });
        tenants_.erase(t.tag);
    }

    /// The reason why a text of that many tokens can never get its pages.
    [[nodiscard]] failure too_long(std::uint64_t tokens, const text_tenant& t) const noexcept {
        const auto all = pages_.all().total();
        const std::uint64_t needs = tokens > longest_text ? longest_text : pages_.pages_for(tokens);
        if (needs > t.pages) return {errc::over_quota, needs, 0, t.pages, reason::count_limit};
        if (needs > all) return {errc::no_room, needs, 0, all, reason::count_limit};
        return {};
    }
    /// Adds a waiting text that begins with `before`. `q` must not be too long, and its tenant must
    /// be known. If this throws, the book is unchanged.
    text_record& add(const text_request& q, std::span<const text_token> before) {
        auto& f = flow_of(*find_tenant(q.tenant), q.level);
        auto made = make(q, before, f);
        auto& r = *made;
        make_room(running_, all_.size() + 1);
        make_room(ended_, ended_.size() + all_.size() + 1);
        make_room(f.turn, 2 * (f.texts + 1));
        pages_.reserve(all_.size() + 1);
        all_.emplace(r.id, std::move(made));
        ++last_id_;
        if (f.texts == 0) lift(f);
        ++f.texts;
        ++f.tenant->texts;
        wait(r);
        return r;
    }

    /// Makes a waiting text run, with its pages.
    void run(text_record& r) noexcept {
        r.place = r.flow->waiting.extract(&r);
        --r.flow->tenant->waiting;
        r.running = true;
        running_.insert(std::ranges::upper_bound(running_, &r, goes_first), &r);
    }
    /// Makes a running text wait without pages.
    void yield(text_record& r, bool moves) noexcept {
        ++r.yields;
        ++yields_;
        moved_ += pages_.yield(r, moves) ? 1 : 0;
        stop(r);
        wait(r);
    }
    /// Ends the text. If the text is in a step, it ends once the step is over.
    void end(text_record& r, errc why) noexcept {
        r.ends = why;
        if (r.planned != 0) return;
        pages_.release(r);
        if (r.running) {
            stop(r);
        } else {
            (void)r.flow->waiting.extract(&r);
            --r.flow->tenant->waiting;
        }
        --r.flow->texts;
        --r.flow->tenant->texts;
        const auto at = all_.find(r.id);
        ended_.push_back({std::move(at->second), r.flow->tenant->tag});
        all_.erase(at);
    }
    /// Ends all texts, of one tenant or of all.
    void end_all(errc why, const text_tenant* of) noexcept {
        for (auto& f : flows_) {
            if (of != nullptr && f->tenant != of) continue;
            while (!f->waiting.empty()) end(**f->waiting.begin(), why);
        }
        for (auto i = running_.size(); i-- > 0;)
            if (of == nullptr || running_[i]->flow->tenant == of) end(*running_[i], why);
    }
    [[nodiscard]] std::vector<ended_text> take_ended() {
        std::vector<ended_text> all;
        all.reserve(ended_.size());
        for (auto& [r, tenant] : ended_) {
            r->tokens.erase(r->tokens.begin(), r->tokens.begin() + r->prompt);
            all.push_back({r->id, tenant, r->ends, std::move(r->tokens), r->yields});
        }
        ended_.clear();
        return all;
    }

private:
    struct ended {
        std::unique_ptr<text_record> text;
        std::uint32_t tenant;
    };
    static constexpr std::uint64_t longest_text = 1U << 30;

    [[nodiscard]] std::unique_ptr<text_record> make(const text_request& q, std::span<const text_token> before,
                                                    text_flow& f) const {
        auto r = std::make_unique<text_record>();
        r->id = last_id_ + 1;
        r->flow = &f;
        r->deadline = q.deadline;
        r->prompt = static_cast<std::uint32_t>(before.size() + q.prompt.size());
        r->most = r->prompt + q.most_new;
        r->has_last_token = q.last.has_value();
        r->last_token = q.last.value_or(0);
        r->tokens.reserve(r->most);
        r->tokens.insert(r->tokens.end(), before.begin(), before.end());
        r->tokens.insert(r->tokens.end(), q.prompt.begin(), q.prompt.end());
        r->pages.reserve(pages_.pages_for(r->most) + 1);
        r->parked.reserve(pages_.pages_for(r->most) + 1);
        waiting_texts one;
        one.insert(r.get());
        r->place = one.extract(one.begin());
        return r;
    }
    text_flow& flow_of(text_tenant& t, int level) {
        const auto is = [&](const auto& f) { return f->tenant == &t && f->level == level; };
        if (const auto at = std::ranges::find_if(flows_, is); at != flows_.end()) return **at;
        auto f = std::make_unique<text_flow>();
        f->tenant = &t;
        f->level = level;
        const auto below = std::ranges::find_if(flows_, [&](const auto& g) { return g->level < level; });
        return **flows_.insert(below, std::move(f));
    }
    // A tenant gets no credit for the time without texts. It begins at the lowest counter of the
    // tenants with texts or, if there are none, at the highest counter so far.
    void lift(text_flow& f) const noexcept {
        std::uint64_t least = ~std::uint64_t{0}, most = 0;
        for (const auto& g : flows_) {
            if (g->level != f.level || g.get() == &f) continue;
            most = std::max(most, g->counter);
            if (g->texts != 0) least = std::min(least, g->counter);
        }
        f.counter = std::max(f.counter, least == ~std::uint64_t{0} ? most : least);
    }
    void wait(text_record& r) noexcept {
        r.flow->waiting.insert(std::move(r.place));
        ++r.flow->tenant->waiting;
    }
    void stop(text_record& r) noexcept {
        running_.erase(std::ranges::find(running_, &r));
        r.running = false;
    }

    text_pages pages_;
    std::unordered_map<std::uint32_t, std::unique_ptr<text_tenant>> tenants_;
    std::vector<std::unique_ptr<text_flow>> flows_;
    std::unordered_map<text_id, std::unique_ptr<text_record>> all_;
    std::vector<text_record*> running_;
    std::vector<ended> ended_;
    text_id last_id_ = 0;
    std::uint64_t tenants_made_ = 0;
    std::uint64_t yields_ = 0, moved_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
