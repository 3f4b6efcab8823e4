// SPDX-License-Identifier: Apache-2.0
// Scrubbing that is a client of a limiter like any other: in pieces, between which a higher tenant gets in, at a share and
// a price of its own. For scrubbing_resource, in place of a stream.
//
//   const auto cleaner = limiter.add({.weight = 5_pct, .level = {-1}});
//   gpushare::limited_scrubber scrubs{limiter, cleaner, stream};
//   gpushare::scrubbing_resource blocks{node.memory(d), scrubs};        // below what tenants allocate from
//
// A chunk_pool needs none: it scrubs chunk by chunk, as one likes, on a stream that it is given. With that stream:
//   gpushare::submit_chunked(limiter, cleaner, stream, n, [&](auto&, std::size_t) { pool.scrub_ahead(1); });
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/compute/chunked.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Limiter and stream must outlive it and its points, until these are reached. Safe from any thread, but under no lock that
/// submissions of others may want: fill() lets in whatever can go, so a chunk_pool must not call it. Somebody must drive
/// the limiter; who waits for a point does.
template <class Limiter>
requires scrubber<typename Limiter::stream>
class limited_scrubber {
    using stream = typename Limiter::stream;
    using native_point = typename stream::point;

    // What lies between two points, which doesn't change once the second is there.
    struct work {
        const limited_scrubber* of = nullptr;
        std::vector<chunked_ticket<Limiter>> fills;
        std::vector<native_point> after;
        std::shared_ptr<const work> before;  // where there is nothing else to wait for

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
    /// Of the scrubber, or of a stream, whose points become one by themselves.
    class point {
    public:
        point() = default;
        /// What a stream has recorded.
        point(native_point p) : native_(std::move(p)) {}  // NOLINT: kernels end with points of streams

        /// Drives nothing.
        [[nodiscard]] bool reached() const noexcept { return native_.reached() && (work_ == nullptr || work_->done()); }
        /// False at the deadline. Drives the limiter.
        bool wait(instant deadline) const {
            return native_.wait(deadline) && (work_ == nullptr || work_->wait(deadline));
        }
        /// Waits for one after the other: the scrubber's are reached in the order in which they were recorded.
        static bool wait_any(std::span<const point> points, instant deadline) {
            return std::ranges::any_of(points, [](const point& p) { return p.reached(); }) ||
                   std::ranges::any_of(points, [&](const point& p) { return p.wait(deadline); });
        }
        /// Of the first fill that failed.
        [[nodiscard]] errc status() const noexcept {
            if (work_ == nullptr) return native_.status();
            for (const auto& f : work_->fills)
                if (const errc why = f.status(); why != errc::none) return why;
            return errc::none;
        }
        /// Of two points of streams, as theirs. Else what the scrubbing before `b` was charged, since the point before it.
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

    /// Pieces of `piece` bytes: so long does a higher tenant wait for scrubbing.
    limited_scrubber(Limiter& limiter, client_id c, stream& s, bytes piece = 16_MiB, const submit_options& o = {})
        : limiter_(&limiter), stream_(&s), client_(c), options_(o), piece_(std::max(piece, bytes{1})) {}

    /// Queues the pieces. Throws operation_error with the limiter's code where it takes them not or not all; std::bad_alloc.
    void fill(void* at, std::byte value, std::size_t size) {
        const std::size_t each = std::min(static_cast<std::size_t>(piece_.count()), std::max<std::size_t>(size, 1));
        const auto enqueue = [at = static_cast<std::byte*>(at), value, size, each, after = awaited()](stream& s,
                                                                                                      std::size_t i) {
            if (i == 0)  // if this fails, no piece is enqueued
                for (const auto& p : after) s.wait(p);
            s.fill(at + i * each, value, std::min(each, size - i * each));
        };
        auto queued = submit_chunked(*limiter_, client_, *stream_, (size + each - 1) / each, enqueue, options_);
        if (!queued) raise(queued.why(), {}, "scrubbing");
        const std::lock_guard lock(mutex_);
        fills_.push_back(*std::move(queued));
    }

    /// What is enqueued from now on starts after `p`. One of another scrubber is waited for on the spot.
    void wait(const point& p) {
        if (p.work_ != nullptr && p.work_->of != this) (void)p.wait(never);  // its own are earlier in the client's line
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
    // Of the points to wait for, those that aren't reached yet.
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
    std::vector<chunked_ticket<Limiter>> fills_;  // since the last point
    std::shared_ptr<const work> last_;            // that had fills
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
