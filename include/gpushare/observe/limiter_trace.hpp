// SPDX-License-Identifier: Apache-2.0
// Draws what a limiter does in a timeline trace: each submission's wait, permit and work on the device, the longest wait
// for lower levels that it promises each tenant (its bound), and the waits that broke it. Tenants are identified by their
// clients' tags and names, which a tenancy sets, and a program in client_settings.
//
//   gpushare::timeline_trace trace;    trace.start();
//   gpushare::limiter_trace drawn(trace, shared.limiter_of({0}), {0});
//   ...                                                  // and drawn.collect() now and then
//   drawn.collect();    std::ofstream("trace.json") << trace.json();
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/compute/submission.hpp>
#include <gpushare/config.hpp>
#include <gpushare/observe/timeline_trace.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Moves a limiter's records into a trace. The limiter keeps records while this exists. Neither copied nor moved; for one thread at a
/// time, while others use the limiter and the trace. Both must outlive it.
template <class Limiter>
class limiter_trace {
public:
    /// Records the limiter `from` of device `d`. `most`: submissions that may end between two calls of collect() (208 bytes each);
    /// of more, the latest are drawn. Throws std::bad_alloc.
    limiter_trace(timeline_trace& to, Limiter& from, device_id d, std::size_t most = 16384)
        : to_(to), from_(from), device_(d) {
        from_.record(most);
    }
    limiter_trace(const limiter_trace&) = delete;             ///< Not copied.
    limiter_trace& operator=(const limiter_trace&) = delete;  ///< Not copied.

    /// The limiter records nothing more; what wasn't collected is lost.
    ~limiter_trace() { from_.record(0); }

    /// Draws the submissions that have ended since the last call. Throws std::bad_alloc where a tenant is seen for the first time.
    void collect() {
        std::array<submission_record, 64> some;
        for (auto n = from_.take_records(some); n != 0; n = from_.take_records(some))
            for (const auto& r : std::span(some).first(n)) draw(r);
    }

    /// Submissions that ended and won't be drawn, because `most` was too small.
    [[nodiscard]] std::uint64_t lost() const noexcept { return from_.records_lost(); }

private:
    void draw(const submission_record& r) {
        if (r.arrived < r.let_in) to_.wait(device_, r.tag, r.arrived, r.let_in);
        to_.permit(device_, r.tag, r.let_in, r.noticed);
        to_.kernel(device_, r.tag, r.began, r.ended);
        if (r.bound != std::exchange(last_bound(r), r.bound)) to_.bound(device_, r.tag, r.arrived, r.bound);
        if (r.beyond > ns{0}) to_.violation(device_, r.tag, r.began, r.beyond);
    }

    ns& last_bound(const submission_record& r) {
        const auto found = std::ranges::find(bounds_, r.tag, [](const auto& b) { return b.first; });
        if (found != bounds_.end()) return found->second;
        if (!r.name.empty()) to_.name_tenant(r.tag, r.name.view());
        return bounds_.emplace_back(r.tag, ns{-1}).second;
    }

    timeline_trace& to_;
    Limiter& from_;
    device_id device_;
    std::vector<std::pair<std::uint32_t, ns>> bounds_;  // of each tenant, as last drawn
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
