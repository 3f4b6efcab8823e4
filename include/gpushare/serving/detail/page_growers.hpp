// SPDX-License-Identifier: Apache-2.0
// The calls of a page store that are bringing memory at the moment. Further calls may wait for the
// pages that these calls bring, and these calls may instead take pages that were freed. Guarded by
// the store's lock.
//
//   page_growers now;
//   page_grower here{deadline, wants};
//   now.add(here); ... now.remove(here);
#pragma once

#include <cstddef>
#include <stop_token>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A call that lacks pages, and gives up at `until`. The call may bring more pages than it wants.
/// If the call waits in the quota's queue, `enough` ends the wait once `wants` pages are free.
struct page_grower {
    instant until;
    std::size_t wants;
    std::stop_source enough{std::nostopstate};
    page_grower* next = nullptr;
};

/// How long a call that lacks pages waits for the pages of other calls. With `again`, the call then
/// looks again; otherwise it gives up because of `why`.
struct page_look {
    bool again = false;
    failure why{};
    instant until{};
};

/// The growers of one store. They don't move.
class page_growers {
public:
    void add(page_grower& g) noexcept {
        g.next = first_;
        first_ = &g;
    }
    void remove(page_grower& g) noexcept {
        page_grower** at = &first_;
        while (*at != &g) at = &(*at)->next;
        *at = g.next;
    }
    /// Stops the growers for which `free` pages are enough.
    void tell(std::size_t free) noexcept {
        for (auto* g = first_; g != nullptr; g = g->next)
            if (free >= g->wants) (void)g->enough.request_stop();
    }
    /// Whether a grower gives up no later than `by`.
    [[nodiscard]] bool any(instant by) const noexcept {
        for (const auto* g = first_; g != nullptr; g = g->next)
            if (g->until <= by) return true;
        return false;
    }

private:
    page_grower* first_ = nullptr;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
