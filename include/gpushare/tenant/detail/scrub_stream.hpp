// SPDX-License-Identifier: Apache-2.0
// The stream on which a tenant's memory is overwritten. It is made at the first fill, in the
// tenant's slice and under its tag, alongside the stream of its work, so that an allocation doesn't
// wait for that work.
//
//   detail::scrub_stream<host::stream> scrubber{[&] { return node.make_stream(d, level, tag); }};
//   auto done = scrubber.fill(nullptr, p, size);
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Thread-safe.
template <timeline Stream>
class scrub_stream {
public:
    using point = typename Stream::point;

    explicit scrub_stream(std::function<Stream()> make) : make_(std::move(make)) {}

    /// Enqueues zeros behind `after`, unless that is null. The returned point has the fill's
    /// status. Throws what the stream throws, or what making one throws, and then nothing is
    /// enqueued. Throws operation_error (in_flight) if the stream gives no point for about 30 ms.
    /// This fill may then be under way, and no one may use the block until it has been filled once
    /// more afterwards. Until there is a point, further calls throw submission_failed and enqueue
    /// nothing.
    [[nodiscard]] point fill(const point* after, void* p, std::size_t size) {
        const std::lock_guard lock(mutex_);  // each fill has its own point and status
        if (!stream_ || renewed_) renew();
        if (unmarked_) (void)mark(errc::submission_failed);
        if (after != nullptr) stream_->wait(*after);
        stream_->fill(p, std::byte{0}, size);
        unmarked_ = true;
        return mark(errc::in_flight);
    }

    /// Makes the next fill use a stream that `make` returns.
    void made_by(std::function<Stream()> make) {
        const std::lock_guard lock(mutex_);
        make_ = std::move(make);
        renewed_ = true;
    }

private:
    // Fills on the new stream come after a fill on the old one whose end is unknown.
    void renew() {
        Stream next = make_();
        if (unmarked_) next.wait(mark(errc::submission_failed));
        stream_.emplace(std::move(next));
        renewed_ = false;
    }
    // Without a point, the end of the fill is unknown, and so is the time when the block may be
    // used again. So this function tries repeatedly to record the point. The host may lack memory
    // only for a while, and a lost device still gives points.
    [[nodiscard]] point mark(errc otherwise) {
        for (int again = 0; again < 30; ++again) try {
                point done = stream_->record();
                unmarked_ = false;
                return done;
            } catch (...) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        raise({otherwise}, {}, "overwriting memory: the stream gives no point");
    }

    std::function<Stream()> make_;
    std::mutex mutex_;
    std::optional<Stream> stream_;
    bool unmarked_ = false;  // a fill on the stream has no point
    bool renewed_ = false;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
