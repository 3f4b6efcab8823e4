// SPDX-License-Identifier: Apache-2.0
// State that the nodes of a process share, since two nodes may have the same device, and with it
// the same SMs and gangs.
//
//   const std::shared_ptr<sm_registry> sms = process_wide<sm_registry>(of_context{ordinal, context.id()});
//
// The state lives as long as an object holds it. The table of such states is the only object in the
// backend that no node owns. Without the table, two nodes (say, of two libraries in a process)
// would hand out the same SMs twice and enqueue their gangs in different orders.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// The key of a device's context. A reset makes a new context, without the state of the old one.
using of_context = std::pair<int, unsigned long long>;

/// The process's T of that key, made from `arguments` if there is none. Safe from any thread.
/// Throws what T's constructor throws.
template <class T, class Key, class... Arguments>
[[nodiscard]] std::shared_ptr<T> process_wide(const Key& key, Arguments&&... arguments) {
    struct table {
        std::mutex mutex;
        std::map<Key, std::weak_ptr<T>> known;
    };
    // never destroyed: nodes come and go until the process ends
    static table* const all = new table;
    const std::lock_guard lock(all->mutex);
    std::erase_if(all->known, [](const auto& one) { return one.second.expired(); });
    auto& there = all->known[key];
    auto shared = there.lock();
    if (shared == nullptr) there = shared = std::make_shared<T>(std::forward<Arguments>(arguments)...);
    return shared;
}

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
