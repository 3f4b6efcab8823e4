// SPDX-License-Identifier: Apache-2.0
// Points recorded behind work that was enqueued earlier: the ends of batches that stayed open, and
// the points for which a stream waits before its turn. Used under the limiter's mutex, which both
// functions release while they call the device.
//
//   detail::late_points<stream, clock> points(time, batches);
//   points.end_batches(lock, &wanted, false);        // records the ends that a thread wants
//   points.await_turn(lock, admission, stream);      // `stream` waits for others' work
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/detail/batches.hpp>
#include <gpushare/compute/detail/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

template <timeline Stream, clock Clock>
class late_points {
public:
    using point = typename Stream::point;
    using submission = detail::submission<Stream>;
    using lock_type = std::unique_lock<std::mutex>;

    /// The arguments must outlive this object.
    late_points(const Clock& time, batches<Stream>& all) noexcept : clock_(time), batches_(all) {}

    /// Records the ends of the batches that `wanted` or other threads need; `quiet`: of all open
    /// batches if no end is recorded. Returns whether any were recorded.
    bool end_batches(lock_type& lock, const submission* wanted, bool quiet) noexcept {
        bool any = false;
        if constexpr (batch<Stream>::shares) {
            const auto now = [this] { return clock_.now(); };
            for (auto i = batches_.next_to_end(wanted, quiet, now); i != batches_.none;
                 i = batches_.next_to_end(wanted, quiet, now)) {
                auto handle = batches_.handle(i);
                lock.unlock();
                auto end = recorded(handle);
                lock.lock();
                if (!end) {
                    batches_.not_ended(i);
                    return any;
                }
                batches_.ended(i, *std::move(end));
                any = true;
                lock.unlock();
                handle = {};  // may be the stream's last handle
                lock.lock();
            }
        }
        return any;
    }

    /// Makes `stream` wait for others' work, if the work of `a` isn't to run alongside it.
    /// Exceptions are the stream's; after one the stream waits for nothing.
    void await_turn(lock_type& lock, const admission& a, Stream& stream) {
        batches_.mark_others(a, stream);
        if (batches_.fits_beside(a, stream)) return;
        end_batches(lock, nullptr, false);
        std::uint64_t after = 0;  // considers each batch once, even if other threads mark them, too
        while (auto* const b = turn_before<Stream>(batches_.all(), after, a, stream)) {
            after = b->order;
            // The end of that batch, if recorded. Otherwise a thread is enqueuing into the batch,
            // and a point is recorded now.
            std::optional<point> end;
            if (const auto* const ended = b->ended()) end = ended->end;
            typename batch<Stream>::handle_type open{};
            if (!end) open = b->not_ended()->handle;
            lock.unlock();
            try {
                if constexpr (batch<Stream>::shares)
                    if (!end) end = recorded(open);
                if (end) stream.wait(*end);
            } catch (...) {
                open = {};
                lock.lock();
                for (auto& other : batches_.all())
                    // The stream doesn't wait after all.
                    if (other.followed_on == &stream) other.followed_on = nullptr;
                throw;
            }
            open = {};  // may be the stream's last handle: destroyed under no lock
            lock.lock();
        }
    }

private:
    // Returns no point if none can be recorded now, for example during a capture. A later thread
    // tries again.
    template <class Handle>
    [[nodiscard]] static std::optional<point> recorded(const Handle& open) noexcept {
        try {
            return open.record();
        } catch (...) {
            return std::nullopt;
        }
    }

    const Clock& clock_;
    batches<Stream>& batches_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
