// SPDX-License-Identifier: Apache-2.0
// Turns readings of what a tenant uses (counters, and the memory that it has at the moment) into
// the lines of a journal: what it used in between. A value: time and readings come in as arguments.
//
//   gpushare::usage_meter chat_meter{"chat"};
//   const auto now = std::chrono::system_clock::now();                                                         // once a second:
//   if (auto line = chat_meter.read(now, gpushare::reading_of(chat.usage()))) journal.append({&*line, 1});
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/serving/usage_line.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A tenant's usage at one point in time.
struct usage_reading {
    ns device_time{};            ///< counter: charged since it was admitted
    bytes reserved{};            ///< now: memory that is promised to it
    bytes used{};                ///< now: memory that it is charged for
    std::uint64_t requests = 0;  ///< counter: that were answered
    std::uint64_t refusals = 0;  ///< counter: that were refused
};

/// A reading of a tenant, where a request is a submission: a server that counts its own requests
/// overwrites `requests` and `refusals`.
[[nodiscard]] inline usage_reading reading_of(const tenant_usage& u) noexcept {
    return {u.device_time, u.memory, u.current, u.completed, u.refused + u.dropped};
}

/// Readings of one tenant. Memory counts from one reading to the next with what it was at the first
/// of the two; so who wants it exact reads when it changes as well. Counters are exact whenever
/// they are read: the lines sum to the last reading less the first. The time of day may be set: who
/// reads by a steady clock as well bills the time that passed, whatever the day says. By the time
/// of day alone, no memory is billed for the one reading before which it was set back, and too much
/// for that before which it was set forward; counters are right.
class usage_meter {
public:
    /// For the tenant of this name, which isn't empty. If a tenant is admitted anew, read the last
    /// of its predecessor's counters, then call restarted(), or begin with a new meter.
    explicit usage_meter(std::string tenant) : tenant_(std::move(tenant)) {}

    /// The usage since the last reading. Nothing for the first reading, or if neither time has
    /// passed nor a counter moved. If the time of day was set back, counters have a line of 1 ns.
    /// If a counter is lower than before without restarted(), nothing is billed for it until it has
    /// passed its old value. Throws std::bad_alloc, and then nothing was read.
    [[nodiscard]] std::optional<usage_line> read(wall_time now, const usage_reading& r) {
        return line(now, last_ ? now - last_->first : ns{}, r);
    }
    /// The same where `passing`, of a clock that is never set, tells how much time has passed: a
    /// line ends `now`, and is as long as that. All readings of a meter are of one kind.
    [[nodiscard]] std::optional<usage_line> read(wall_time now, instant passing, const usage_reading& r) {
        auto l = line(now, passing_ ? passing - *passing_ : ns{}, r);
        passing_ = passing;
        return l;
    }

    /// Counters have begun anew since the last reading, as of a tenant that was admitted again: the
    /// next line counts from the counters of `from`. One that is kept elsewhere and went on is
    /// given with its latest value. Before the first reading there is nothing to tell.
    void restarted(const usage_reading& from = {}) noexcept {
        if (!last_) return;
        auto& last = last_->second;
        last.device_time = from.device_time;
        last.requests = from.requests;
        last.refusals = from.refusals;
    }

private:
    [[nodiscard]] std::optional<usage_line> line(wall_time now, ns passed, const usage_reading& r) {
        if (!last_) {
            last_.emplace(now, r);
            return {};
        }
        const auto& old = last_->second;
        const auto since = [](auto is, auto was) { return is < was ? decltype(is){} : is - was; };
        const usage_amounts used{since(r.device_time, old.device_time), byte_time{old.reserved, passed},
                                 byte_time{old.used, passed}, since(r.requests, old.requests),
                                 since(r.refusals, old.refusals)};
        std::optional<usage_line> l;
        if (passed > ns{} || used != usage_amounts{}) l = {tenant_, now - std::max(passed, ns{1}), now, used};
        usage_reading last = r;  // of a counter that fell, the highest
        last.device_time = std::max(r.device_time, old.device_time);
        last.requests = std::max(r.requests, old.requests);
        last.refusals = std::max(r.refusals, old.refusals);
        last_.emplace(now, last);
        return l;
    }

    std::string tenant_;
    std::optional<instant> passing_;
    std::optional<std::pair<wall_time, usage_reading>> last_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
