// SPDX-License-Identifier: Apache-2.0
// Records for how long, and how often, a held thread has polled the work for which it waits. A part
// of the launch gate.
//
//   patience seen;
//   if (seen.remaining(client, in_flight, now) > 200us) sleep();
//   else if (seen.look(client, has_request, in_flight) <= 64) look_again();
//   else sleep();
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// Counts looks, and times the work in flight. The count starts over when something has happened,
/// since the rest may follow immediately: another client counts, its request began or ended, or its
/// work in flight changed. During a request, work that ends or comes brings the thread no nearer,
/// but the end of the last work may.
class patience {
public:
    /// `whose`: the client for which the thread waits. `request`: another client's open request
    /// keeps the thread back. Returns the number of looks before this one.
    [[nodiscard]] unsigned look(std::uint32_t whose, bool request, ns in_flight) noexcept {
        const ns left = request ? std::min(in_flight, ns{1}) : in_flight;
        if (whose != whose_ || request != request_ || left != left_) {
            whose_ = whose;
            request_ = request;
            left_ = left;
            looks_ = 0;
        }
        return looks_++;
    }

    /// The longest time for which the client's work in flight may continue, if predictions are
    /// right. The thread knows only for how long the work has been as much as now.
    [[nodiscard]] ns remaining(std::uint32_t whose, ns in_flight, instant now) noexcept {
        if (whose != of_ || in_flight != work_) {
            of_ = whose;
            work_ = in_flight;
            since_ = now;
        }
        return std::max(in_flight - (now - since_), ns{0});
    }

private:
    std::uint32_t whose_ = std::numeric_limits<std::uint32_t>::max();
    bool request_ = false;
    ns left_{};
    unsigned looks_ = 0;
    std::uint32_t of_ = std::numeric_limits<std::uint32_t>::max();
    ns work_{};
    instant since_{};
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
