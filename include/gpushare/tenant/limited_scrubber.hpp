// SPDX-License-Identifier: Apache-2.0
// A scrubber that is a client of a limiter like any other. It scrubs in pieces, at a weight and a
// level of its own, so that higher levels run between two pieces. For scrubbing_resource, in place
// of a stream.
//
//   const auto cleaner = limiter.add({.weight = 5_pct, .level = {-1}});
//   gpushare::limited_scrubber scrubs{limiter, cleaner, stream};
//   gpushare::scrubbing_resource blocks{node.memory(d), scrubs};  // below the tenants' resources
//
// A chunk_pool needs no such scrubber, since it scrubs chunk by chunk on the stream that it is
// given. To limit its scrubbing, submit with that stream:
//   gpushare::submit_chunked(limiter, cleaner, stream, n, [&](auto&, std::size_t) { pool.scrub_ahead(1); });
#pragma once

#include <algorithm>
#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Scrubs as a client of a limiter. The limiter and the stream must outlive the scrubber and all of
/// its points that aren't reached. Safe from any thread. fill() drives the limiter, so call it
/// under no lock that others' callables take. A chunk_pool must not call it. Some thread must drive
/// the limiter; a wait for a point does.
template <class Limiter>
requires scrubber<typename Limiter::stream>
class limited_scrubber {
    using stream = typename Limiter::stream;
    using native_point = typename stream::point;

    // The fills between two points; constant once the second point exists.
    struct work {
        const limited_scrubber* of = nullptr;
        std::list<chunked_ticket<Limiter>> fills;
        std::vector<native_point> after;
        std::shared_ptr<const work> before;  // the earlier work, if there are no other waits

        [[nodiscard]] bool done() const noexcept {
            return std::ranges::all_of(fills, [](const auto& f) { return f.done(); }) &&
                   std::ranges::all_of(after, [](const auto& p) { return p.reached(); }) &&
                   (before == nullptr || before->done());
        }
        bool wait(instant deadline) const {
            return std::ranges::all_of(fills, [&](const auto& f) { return f.wait(deadline); }) &&
                   std::ranges::all_of(after, [&](const auto& p) { return p.wait(deadline); }) &&
                   (before == nullptr || before->wait(deadline));
        }
    };

public:
    /// A point of the scrubber. A stream's point converts to one.
    class point {
    public:
        point() = default;
        /// A point that a stream has recorded.
        point(native_point p) : native_(std::move(p)) {}  // NOLINT: kernels end with points of streams

        /// Whether the point is reached. Doesn't drive the limiter.
        [[nodiscard]] bool reached() const noexcept { return native_.reached() && (work_ == nullptr || work_->done()); }
        /// Waits, and drives the limiter meanwhile. False at the deadline.
        bool wait(instant deadline) const {
            return native_.wait(deadline) && (work_ == nullptr || work_->wait(deadline));
        }
        /// Waits for one point after the other, since a scrubber's points are reached in the order
        /// of their records.
        static bool wait_any(std::span<const point> points, instant deadline) {
            return std::ranges::any_of(points, [](const point& p) { return p.reached(); }) ||
                   std::ranges::any_of(points, [&](const point& p) { return p.wait(deadline); });
        }
        /// The error of the first fill that failed since the previous point. Without fills in
        /// between, the previous point's error.
        [[nodiscard]] errc status() const noexcept {
            if (work_ == nullptr) return native_.status();
            for (const auto& f : work_->fills)
                if (const errc why = f.status(); why != errc::none) return why;
            return work_->before != nullptr ? point(work_->before).status() : errc::none;
        }
        /// For two points of streams, their elapsed(). Otherwise the device time charged for
        /// scrubbing between `b` and the point before it.
        friend ns elapsed(const point& a, const point& b) noexcept {
            if (b.work_ == nullptr) return elapsed(a.native_, b.native_);
            ns sum{};
            for (const auto& f : b.work_->fills) sum += f.device_time();
            return sum;
        }

    private:
        friend limited_scrubber;
        explicit point(std::shared_ptr<const work> w) noexcept : work_(std::move(w)) {}

        native_point native_{};
        std::shared_ptr<const work> work_;
    };

    /// Scrubs in pieces of `piece` bytes; a higher level waits for at most one.
    limited_scrubber(Limiter& limiter, client_id c, stream& s, bytes piece = 16_MiB, const submit_options& o = {})
        : limiter_(&limiter), stream_(&s), client_(c), options_(o), piece_(std::max(piece, bytes{1})) {}

    /// Queues the pieces. Throws operation_error with the limiter's code if the limiter refuses a
    /// piece, and std::bad_alloc. If it throws, no further piece is enqueued.
    void fill(void* at, std::byte value, std::size_t size) {
        const std::size_t each = std::min(static_cast<std::size_t>(piece_.count()), std::max<std::size_t>(size, 1));
        const auto enqueue = [at = static_cast<std::byte*>(at), value, size, each, after = awaited()](stream& s,
                                                                                                      std::size_t i) {
            if (i == 0)  // if this fails, no piece is enqueued
                for (const auto& p : after) s.wait(p);
            s.fill(at + i * each, value, std::min(each, size - i * each));
        };
        // Made before the pieces are queued. Otherwise a lack of memory could leave them without a
        // point.
        std::list<chunked_ticket<Limiter>> place;
        place.emplace_back(nullptr, std::vector<typename Limiter::ticket>{});
        auto queued = submit_chunked(*limiter_, client_, *stream_, (size + each - 1) / each, enqueue, options_);
        if (!queued) raise(queued.why(), {}, "scrubbing");
        place.front() = *std::move(queued);
        const std::lock_guard lock(mutex_);
        fills_.splice(fills_.end(), place);
    }

    /// Work enqueued from now on starts after `p`. Blocks the thread if `p` is another scrubber's.
    void wait(const point& p) {
        if (p.work_ != nullptr && p.work_->of != this)
            (void)p.wait(never);  // the scrubber's own points are earlier in the client's queue
        if (p.native_.reached()) return;
        const std::lock_guard lock(mutex_);
        after_.push_back(p.native_);
    }

    /// Reached once all fills and waits so far are done.
    [[nodiscard]] point record() {
        auto made = std::make_shared<work>();
        made->of = this;
        made->after = awaited();
        const std::lock_guard lock(mutex_);
        if (fills_.empty()) {
            made->before = last_;
        } else {
            made->fills.swap(fills_);
            last_ = made;
        }
        return point(std::move(made));
    }

private:
    // The points to wait for, without those that are reached.
    [[nodiscard]] std::vector<native_point> awaited() {
        const std::lock_guard lock(mutex_);
        std::erase_if(after_, [](const auto& p) { return p.reached(); });
        return after_;
    }

    Limiter* limiter_;
    stream* stream_;
    client_id client_;
    submit_options options_;
    bytes piece_;
    std::mutex mutex_;
    std::vector<native_point> after_;
    std::list<chunked_ticket<Limiter>> fills_;  // since the last point
    std::shared_ptr<const work> last_;          // the last work that had fills
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
