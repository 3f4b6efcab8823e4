// SPDX-License-Identifier: Apache-2.0
// A stream that overwrites memory only when the test says so, so a test notices memory that is read
// before it was scrubbed.
//
//   support::manual_scrubber s;        s.fill(p, std::byte{0}, 64);   auto done = s.record();
//   s.reach_next();                    // now it is filled, and `done` reached
//   s.by_itself();                     // from now on whoever waits finds it done
#pragma once

#include <cstddef>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/scrub.hpp>

#include "support/manual_timeline.hpp"

namespace support {

/// Thread-safe.
class manual_scrubber {
public:
    using point = manual_point;

    void fill(void* p, std::byte value, std::size_t size) {
        const std::lock_guard lock(mutex_);
        if (std::exchange(fail_fill_, false)) throw std::runtime_error("the test lets fill() fail");
        open_.push_back({p, value, size});
        filled_ += size;
    }
    /// Only records the point, for the test to see.
    void wait(const point& p) {
        const std::lock_guard lock(mutex_);
        awaited_.push_back(p);
    }
    [[nodiscard]] point record() {
        const std::lock_guard lock(mutex_);
        point p = stream_.record();
        batches_.push_back(std::exchange(open_, {}));
        return p;
    }

    /// Does the fills that were enqueued before the oldest open point, and reaches the point. False
    /// if no point is open.
    bool reach_next(gpushare::errc status = gpushare::errc::none) {
        const std::lock_guard lock(mutex_);
        if (batches_.empty()) return false;
        if (status == gpushare::errc::none)
            for (const job& j : batches_.front()) std::memset(j.at, std::to_integer<int>(j.value), j.size);
        batches_.pop_front();
        return stream_.reach_next(status);
    }
    /// From now on every wait on this device first reaches the next point.
    void by_itself(gpushare::errc status = gpushare::errc::none) {
        stream_.on_wait([this, status] { reach_next(status); });
    }

    void fail_next_fill() {
        const std::lock_guard lock(mutex_);
        fail_fill_ = true;
    }
    void fail_next_record() { stream_.fail_next_record(); }

    /// The number of bytes requested by fill().
    [[nodiscard]] std::size_t filled() const {
        const std::lock_guard lock(mutex_);
        return filled_;
    }
    [[nodiscard]] std::vector<point> awaited() const {
        const std::lock_guard lock(mutex_);
        return awaited_;
    }
    /// Another stream of the same device.
    [[nodiscard]] manual_stream neighbour() const { return {stream_, {}}; }

private:
    struct job {
        void* at;
        std::byte value;
        std::size_t size;
    };

    mutable std::mutex mutex_;
    manual_stream stream_;
    std::vector<job> open_;
    std::deque<std::vector<job>> batches_;  // one per open point
    std::vector<point> awaited_;
    std::size_t filled_ = 0;
    bool fail_fill_ = false;
};
static_assert(gpushare::scrubber<manual_scrubber>);

}  // namespace support
