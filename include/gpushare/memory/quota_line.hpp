// SPDX-License-Identifier: Apache-2.0
// A place in the line for bytes of a quota: granted as soon as they are there, to whoever has waited longest. Waits for
// nothing by itself; quota_waiters.hpp has the wait.
//
//   gpushare::quota_claim claim{chat, 512_MiB};            // in line, unless the bytes are there now
//   if (claim.state() == gpushare::claim_state::granted) claim.take();        // ... later: chat.release(512_MiB)
//
// Who is in line keeps its place: bytes that it waits for are refused to whoever comes later, however little that asks
// for, so a big claim isn't starved by small ones. Only bytes that it could be served from are held back: its own
// quota's, and if that isn't the obstacle, what its parent lends, and so on up to the quota whose limit is the obstacle.
// Guarantees stay untouched: nobody's guaranteed bytes are held back for others, and new guarantees go ahead of the
// line. Every resize, release and end of a quota looks whom it serves, under the mutex of the tree that it has anyway.
//
// How no wake-up is lost. A release is one compare-and-swap of a word, and so is what asks for the mutex instead: the
// frozen bit of the same word. Whoever joins the line freezes all words that its bytes may come from, and then looks.
// A release before the freeze is in the word that it looks at; one after it fails to swap, sees the bit, comes to
// the mutex and serves the line. There is no second flag that the two could miss each other by, and while nobody
// waits a release pays nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>

#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/quota_tree.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// refused: no release could make it fit, as its quota or one above is smaller than that.
enum class claim_state : std::uint8_t { waiting, granted, refused };

namespace detail {

/// Somebody in the line. All under the mutex of the tree.
struct quota_place {
    quota_place* next = nullptr;
    quota_node* at = nullptr;
    std::uint64_t size = 0;
    claim_state state = claim_state::waiting;
    errc why = errc::none;                          // of the last refusal
    void (*wake)(quota_place&) noexcept = nullptr;  // once it waits no more; under the mutex
};

/// The line of a tree: a state machine without a clock or a thread. All under the mutex of the tree.
struct quota_line {
    static void join(quota_place& p) noexcept {
        auto& root = *p.at->root_;
        auto& top = p.at->top();
        root.serve_ = &serve;
        root.line_.push(p);
        ++root.waiting_;
        if (++top.in_line_ == 1) top.watch();  // before anybody looks
        serve(root);
    }

    static void leave(quota_place& p) noexcept {
        unmark(p);
        remove(p);
        p.at->serve_line();
    }

    /// Serves everybody whom it can, first come first.
    static void serve(quota_node& root) noexcept {
        for (const auto* p = root.line_.front(); p != nullptr; p = p->next) unmark(*p);
        for (quota_place *p = root.line_.front(), *next = nullptr; p != nullptr; p = next) {
            next = p->next;
            p->why = p->at->unfit(p->size);
            const bool hopeless = p->why != errc::none;
            if (!hopeless) p->why = p->at->take(p->size, nullptr);
            if (!hopeless && p->why != errc::none) {
                mark(*p);
                continue;
            }
            p->state = hopeless ? claim_state::refused : claim_state::granted;
            remove(*p);
            if (p->wake != nullptr) p->wake(*p);
        }
    }

private:
    // After a refusal: who comes later doesn't get bytes from where these may come from.
    static void mark(const quota_place& p) noexcept {
        auto n = p.size;
        for (auto* q = p.at; q->behind_ == errc::none; q = q->parent_) {
            n -= std::min(n, q->cell_.now().available());
            const bool obstacle =
                q->parent_ == nullptr || q->borrowed_.load(std::memory_order_relaxed) + n > q->burst_.count();
            q->behind_ = obstacle ? errc::over_quota : errc::out_of_memory;
            if (obstacle) break;
        }
    }
    static void unmark(const quota_place& p) noexcept {
        for (auto* q = p.at; q != nullptr; q = q->may_borrow_ ? q->parent_ : nullptr) q->behind_ = errc::none;
    }

    static void remove(quota_place& p) noexcept {
        auto& top = p.at->top();
        p.at->root_->line_.remove(p);
        --p.at->root_->waiting_;
        if (--top.in_line_ == 0) top.unwatch();
    }
};

}  // namespace detail

/// See the top of the file. Neither copied nor moved; the quota must outlive it. Safe beside any other use of the quota,
/// by one thread at a time.
class quota_claim {
public:
    quota_claim(quota& of, bytes size) noexcept : of_(&of) {
        place_.at = &of;
        place_.size = size.count();
        const std::lock_guard lock(place_.at->root_->mutex_);
        detail::quota_line::join(place_);
    }
    quota_claim(const quota_claim&) = delete;
    quota_claim& operator=(const quota_claim&) = delete;
    /// Leaves the line, or gives back what was granted and not taken.
    ~quota_claim() {
        if (leave() == claim_state::granted && !taken_) of_->release(size());
    }

    [[nodiscard]] claim_state state() const noexcept {
        const std::lock_guard lock(place_.at->root_->mutex_);
        return place_.state;
    }
    /// Why it wasn't granted when somebody last looked.
    [[nodiscard]] errc why() const noexcept {
        const std::lock_guard lock(place_.at->root_->mutex_);
        return place_.why;
    }
    /// Only if granted: from now on the bytes are the caller's to release.
    void take() noexcept { taken_ = true; }
    [[nodiscard]] bytes size() const noexcept { return bytes{place_.size}; }

private:
    claim_state leave() noexcept {
        const std::lock_guard lock(place_.at->root_->mutex_);
        if (place_.state == claim_state::waiting) detail::quota_line::leave(place_);
        return place_.state;
    }

    quota* of_;
    detail::quota_place place_{};
    bool taken_ = false;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
