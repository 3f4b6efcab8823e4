// SPDX-License-Identifier: Apache-2.0
// Turns readings of what a tenant uses (counters, and the memory that it has at the moment) into the lines of a journal: what
// it used in between. A value: time and readings come in as arguments.
//
//   gpushare::usage_meter chat_meter{"chat"};
//   if (auto line = chat_meter.read(now, gpushare::reading_of(chat.usage()))) journal.append({&*line, 1});   // once a second
#pragma once

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

/// What is known of a tenant at one point in time.
struct usage_reading {
    ns device_time{};            ///< counter: charged since it was admitted
    bytes reserved{};            ///< now: memory that is promised to it
    bytes used{};                ///< now: memory that it is charged for
    std::uint64_t requests = 0;  ///< counter: that were answered
    std::uint64_t refusals = 0;  ///< counter: that were refused
};

/// Of a tenant, where a request is a submission: a server that counts its own sets `requests` and `refusals` to these.
[[nodiscard]] inline usage_reading reading_of(const tenant_usage& u) noexcept {
    return {u.device_time, u.memory, u.current, u.completed, u.refused + u.dropped};
}

/// Readings of one tenant. All is by the time of day: where that is set back, no memory is billed until it is where it was, and where it is
/// set forward, for the time in between; counters read meanwhile are in the next line, so whoever drops a meter then loses them. Memory counts from one reading to the next with what it was at the first of the two; so who wants it
/// exact reads when it changes as well. Counters are exact whenever they are read: the lines sum to the last reading less the first.
class usage_meter {
public:
    /// Of the tenant of this name, which isn't empty. One that is admitted anew gets a new meter, as soon as its predecessor is read: a counter
    /// that has passed where it was can't be told from one that went on.
    explicit usage_meter(std::string tenant) : tenant_(std::move(tenant)) {}

    /// What was used since the last reading. Nothing for the first one, and where no time has passed, since the time of day can be
    /// set back: then it is in the next line. A counter that went down began anew, for itself: what it shows is counted, and nothing again of
    /// the others, which may be kept elsewhere and go on. Throws std::bad_alloc, and then nothing was read.
    [[nodiscard]] std::optional<usage_line> read(wall_time now, const usage_reading& r) {
        if (!last_) {
            last_.emplace(now, r);
            return {};
        }
        const auto& [before, old] = *last_;
        if (now <= before) return {};
        const auto since = [](auto is, auto was) { return is < was ? is : is - was; };
        usage_line l{
            tenant_,
            before,
            now,
            {since(r.device_time, old.device_time), byte_time{old.reserved, now - before},
             byte_time{old.used, now - before}, since(r.requests, old.requests), since(r.refusals, old.refusals)}};
        last_.emplace(now, r);
        return l;
    }

private:
    std::string tenant_;
    std::optional<std::pair<wall_time, usage_reading>> last_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
