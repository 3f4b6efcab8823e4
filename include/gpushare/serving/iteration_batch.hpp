// SPDX-License-Identifier: Apache-2.0
// Batching by iteration (continuous batching) for texts: decides which requests' tokens an engine
// computes in its next step. Requests join and leave between two steps. Prompts are computed in
// chunks alongside the decoding of other texts, and keys and values are in pages. The batch is a
// value: time is an argument, and the caller owns the lock, the clock and the engine.
//
//   gpushare::iteration_batch texts({.page_tokens = 16, .pages = 4096, .step_tokens = 512});
//   texts.set_tenant(1, {.weight = 3, .pages = 2048});
//   const gpushare::text_request q{.tenant = 1, .prompt = {7, 8, 9}, .most_new = 100};
//   const gpushare::text_id id = texts.try_push(q, now).value();
//   for (bool more = true; more;) {
//       more = gpushare::run_step(texts, engine, now) != 0;  // plan, engine.step(), complete
//       for (auto& t : texts.take_ended()) answer(t.id, t.why, t.tokens);
//   }
//
// The order of texts: a higher level goes first. On one level, the tenant with the fewest tokens
// for its weight goes first. Of one tenant's texts, the texts under way go first, then the text
// with the earliest deadline, then the text with the earliest arrival.
//
// A text yields if another text needs its pages. Either the text is computed again later, or its
// pages are moved to the host; the text keeps its tokens in both cases. Of two texts that need
// pages, the text on the higher level keeps its pages; on the same level, the older text does.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/serving/detail/step_planner.hpp>
#include <gpushare/serving/detail/text_book.hpp>
#include <gpushare/serving/iteration_options.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Decides which texts are computed in each step. Texts of different tenants share no page. No text
/// is lost: take_ended() returns each text once. Not thread-safe. A step costs O(texts with pages),
/// plus O(flows) for each page of tokens that it computes, plus a look at the tokens of each flow's
/// next text; a flow is a tenant's texts on one level. Steps don't allocate.
class iteration_batch {
public:
    /// Throws operation_error (invalid_specification) if pages, steps or chunks have no tokens, or
    /// if there may be no texts.
    explicit iteration_batch(const iteration_options& o) : book_(checked(o)), planner_(o) {}

    /// Adds a tenant, or changes its settings. The tenant's texts stay, but texts that now need
    /// more pages than the tenant has end with over_quota. Returns invalid_specification for a
    /// weight that isn't from 1 to 1,024.
    failure set_tenant(std::uint32_t tenant, const text_tenant_spec& spec = {}) {
        if (spec.weight == 0 || spec.weight > detail::most_weight)
            return {errc::invalid_specification, spec.weight, 0, detail::most_weight, reason::count_limit};
        book_.set_tenant(tenant, spec);
        return {};
    }
    /// Ends the tenant's texts with errc::closed, and removes the tenant. From now on no text finds
    /// the tenant's prefixes, not even texts of a new tenant with the same number. Between plan()
    /// and complete(), returns in_flight and changes nothing.
    failure remove_tenant(std::uint32_t tenant) noexcept {
        auto* const t = book_.find_tenant(tenant);
        if (t == nullptr) return no_such(tenant);
        if (planner_.in_flight()) return {errc::in_flight};
        book_.remove_tenant(*t);
        return {};
    }

    /// Adds pages by their numbers, such as pages that a page_store has allocated. Skips pages that
    /// the batch already has.
    void add_pages(std::span<const std::uint32_t> numbers) {
        for (const auto p : numbers)
            if (!book_.pages().all().knows(p)) book_.pages().all().add(p);
        book_.pages().reserve(book_.size());
    }
    /// Gives up as many pages as `to` has room for, as page_options::evict of a page_store needs:
    /// first empty pages, then the least recently used prefixes. Returns the number of pages, which
    /// is 0 between plan() and complete().
    std::uint32_t take_pages(std::span<std::uint32_t> to) noexcept {
        auto& all = book_.pages().all();
        const auto n = planner_.in_flight() ? 0 : std::min<std::size_t>(to.size(), all.available());
        for (std::size_t i = 0; i < n; ++i) to[i] = all.remove();
        return static_cast<std::uint32_t>(n);
    }

    /// Adds a waiting text. Refuses it with queue_full, deadline_exceeded, over_quota if it may
    /// need more pages than its tenant has, no_room if it may need more pages than there are, or
    /// invalid_specification. Throws std::bad_alloc. After an error nothing has changed.
    [[nodiscard]] result<text_id> try_push(const text_request& request, instant now) { return add(request, {}, now); }
    /// Adds a text that begins with all known tokens of another text, `of`, followed by its own
    /// prompt, which may be empty. The two texts share pages until one of them writes to a page.
    /// The new text has the same tenant. Refuses as try_push() does, and also if `of` doesn't
    /// exist.
    [[nodiscard]] result<text_id> try_fork(text_id of, text_request request, instant now) {
        auto* const from = book_.find(of);
        if (from == nullptr) return no_such(of);
        request.tenant = from->flow->tenant->tag;
        const auto made = add(request, from->tokens, now);
        if (made && from->running && from->computed != 0 && book_.running().size() < texts_) {
            auto& r = *book_.find(*made);
            book_.run(r);
            book_.pages().share(*from, r);
            r.charged = r.computed;
        }
        return made;
    }
    /// Ends a text with `why`, at any time. A text that is in a step ends once the step is
    /// completed. The text's pages are free then. Returns false if there is no such text.
    bool abort(text_id id, errc why = errc::stopped) noexcept {
        auto* const r = book_.find(id);
        if (r != nullptr) book_.end(*r, why);
        return r != nullptr;
    }
    /// Ends all texts, for a server that shuts down.
    void abort_all(errc why = errc::closed) noexcept { book_.end_all(why, nullptr); }

    /// The next step. Before it, texts whose deadline has passed end. A step without entries and
    /// moves means that there is nothing to do. The step stays the same until complete() or fail(),
    /// whatever calls come in between.
    const step_plan& plan(instant now) noexcept {
        if (!planner_.in_flight()) planner_.plan(book_, now);
        return planner_.current();
    }
    /// Call this when the step is done. `next` has a token for each entry, which is read if the
    /// entry samples. Throws operation_error (mismatch) if `next` is too short; the step isn't
    /// completed then.
    void complete(std::span<const text_token> next) {
        if (!planner_.in_flight()) return;
        if (const auto n = planner_.current().entries.size(); next.size() < n)
            raise({errc::mismatch, next.size(), 0, n, reason::wrong_count}, {}, "complete a step");
        planner_.complete(book_, next);
    }
    /// Says that the step failed, so the contents of the pages are unknown. Texts with any pages,
    /// on the device or the host, end with `why`, and no prefix is kept. Waiting texts without
    /// pages stay. A call between two steps, for example after run_step() has thrown, does the
    /// same.
    void fail(errc why) noexcept { planner_.fail(book_, why); }
    /// The texts that ended since the last call. Throws std::bad_alloc; the next call then has the
    /// texts.
    [[nodiscard]] std::vector<ended_text> take_ended() { return book_.take_ended(); }

    /// Whether no text waits or runs.
    [[nodiscard]] bool empty() const noexcept { return book_.size() == 0; }
    /// All known tokens of a text, including the prompt, until the next call that changes anything.
    /// No tokens if there is no such text.
    [[nodiscard]] std::span<const text_token> tokens(text_id id) const noexcept {
        const auto* const r = book_.find(id);
        return r == nullptr ? std::span<const text_token>{} : r->tokens;
    }
    /// A reading of the batch.
    [[nodiscard]] iteration_usage usage() const noexcept {
        const auto& all = book_.pages().all();
        return {.pages = all.total(),
                .free = all.free(),
                .unused = all.unused(),
                .host_pages = book_.pages().host_used(),
                .running = book_.running().size(),
                .waiting = book_.size() - book_.running().size(),
                .computed = planner_.computed(),
                .found = planner_.found(),
                .recomputed = planner_.recomputed(),
                .yields = book_.yields(),
                .moved = book_.moved(),
                .copies = book_.pages().copies()};
    }
    /// A reading of one tenant; zeros if the tenant doesn't exist.
    [[nodiscard]] text_tenant_usage usage(std::uint32_t tenant) const noexcept {
        const auto* const t = book_.find_tenant(tenant);
        if (t == nullptr) return {};
        return {.pages = t->held, .running = t->texts - t->waiting, .waiting = t->waiting, .tokens = t->tokens};
    }

private:
    template <iteration_engine Engine>
    friend std::uint32_t run_step(iteration_batch& texts, Engine& engine, instant now);

    static constexpr int lowest_level = -64, highest_level = 63;

    const iteration_options& checked(const iteration_options& o) {
        if (o.page_tokens == 0 || o.step_tokens == 0 || o.prompt_chunk == 0 || o.texts == 0)
            raise({.code = errc::invalid_specification}, {}, "batching by iteration");
        texts_ = o.texts;
        return o;
    }
    static failure no_such(std::uint64_t number) noexcept {
        return {.code = errc::invalid_specification, .asked = number, .because = reason::unknown_number};
    }
    [[nodiscard]] failure refuses(const text_request& q, std::size_t before, instant now) const noexcept {
        const auto* const t = book_.find_tenant(q.tenant);
        if (t == nullptr) return no_such(q.tenant);
        if (before + q.prompt.size() == 0 || q.most_new == 0 || q.level < lowest_level || q.level > highest_level)
            return {errc::invalid_specification};
        if (q.deadline <= now) return {errc::deadline_exceeded};
        if (t->waiting >= t->most_waiting)
            return {errc::queue_full, t->waiting + 1, 0, t->most_waiting, reason::count_limit};
        return book_.too_long(std::uint64_t{before} + q.prompt.size() + q.most_new, *t);
    }
    result<text_id> add(const text_request& q, std::span<const text_token> before, instant now) {
        if (const failure why = refuses(q, before.size(), now); why.code != errc::none) return why;
        planner_.reserve(book_.size() + 1, book_.flows().size() + 1);
        next_.make_room(book_.size() + 1);
        return book_.add(q, before).id;
    }

    std::uint32_t texts_ = 0;
    detail::text_book book_;
    detail::step_planner planner_;
    detail::step_list<text_token> next_;  // the tokens that run_step() gets from the engine
};

/// Plans a step, lets the engine compute it, and completes it. Returns the number of computed
/// tokens; 0 means that nothing was left to do. Even then, texts may have ended at their deadlines.
/// The engine's exceptions propagate, after fail(kernel_failed).
template <iteration_engine Engine>
std::uint32_t run_step(iteration_batch& texts, Engine& engine, instant now) {
    const auto& plan = texts.plan(now);
    if (!texts.planner_.in_flight()) return 0;
    texts.next_.clear();
    const auto next = texts.next_.first(plan.entries.size());
    try {
        engine.step(plan, next);
    } catch (...) {
        texts.fail(errc::kernel_failed);
        throw;
    }
    const auto tokens = plan.tokens;
    texts.complete(next);
    return tokens;
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
