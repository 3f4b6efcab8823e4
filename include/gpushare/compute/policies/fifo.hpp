// SPDX-License-Identifier: Apache-2.0
// First come, first served, under strict priority between levels: what the device would do by itself. No client is held
// to a share. Work in flight stays bounded, and all device time is metered.
//
//   using limiter_type = gpushare::compute_limiter<gpushare::host::stream, gpushare::host::steady_clock, gpushare::fifo>;
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include <gpushare/compute/detail/client_heap.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Serves in the order of arrival. Looks at `level` and at arrivals; refuses nothing. A value; not thread-safe. `pick` is
/// O(1), the rest O(log waiting). The members are those of compute_policy.
class fifo {
public:
    /// A client begins.
    failure add(client_id c, const client_settings& s) {
        if (clients_.size() <= c.index) clients_.resize(c.index + std::size_t{1});
        waiting_.reserve(clients_.size());
        clients_[c.index] = {.id = c, .level = s.level};
        return {};
    }
    /// Another level.
    failure change(client_id c, const client_settings& s) {
        auto& client = clients_[c.index];
        client.level = s.level;
        if (waiting_.contains(c.index)) place(client);
        return {};
    }
    /// Whether it holds a client to the cap in these settings: it has none.
    [[nodiscard]] static bool honours(const client_settings& s) noexcept { return s.cap >= share::whole(); }
    [[nodiscard]] static bool has_classes() noexcept { return false; }  ///< See compute_policy.
    /// A client ends.
    void remove(client_id c) noexcept { sleep(c); }

    /// It waits, with the arrival in `head`.
    void wake(client_id c, const queue_head& head, instant) noexcept {
        auto& client = clients_[c.index];
        client.arrival = head.arrival;
        client.lifted = head.level;
        place(client);
    }
    /// It waits no more.
    void sleep(client_id c) noexcept { waiting_.drop(c.index); }

    /// The client of the highest level whose first submission came first.
    [[nodiscard]] choice pick(instant) const noexcept {
        if (waiting_.empty()) return {};
        return clients_[waiting_.first()].id;
    }
    void serve(client_id, ns, instant) noexcept {}  ///< Costs don't matter.
    void correct(client_id, ns) noexcept {}         ///< Costs don't matter.

private:
    struct client_state {
        client_id id{};
        priority level{};
        priority lifted = no_priority;  // what waits first
        instant arrival{};
    };

    void place(const client_state& c) noexcept {
        waiting_.put(c.id.index, std::max(c.level, c.lifted), c.arrival.time_since_epoch().count());
    }

    std::vector<client_state> clients_;
    detail::client_heap waiting_;  // by arrival
};
static_assert(compute_policy<fifo>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
