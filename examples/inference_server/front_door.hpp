// SPDX-License-Identifier: Apache-2.0
// The connections of one port: how many there may be, and which one is closed if there are too
// many. Earlier clients can't keep a new client out. A new connection closes the oldest connection
// that hasn't shown a key. If all connections have shown a key, it closes the oldest connection of
// the key with the most connections.
//   front_door door({.most = connections_for(files)});
//   const auto id = door.come();
//   while (const auto old = door.surplus()) close(*old);            // which calls door.gone(*old)
//   door.known(id, &tenant);                                        // it has shown a key
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>

namespace inference_server {

/// A value without a clock or a lock.
class front_door {
public:
    using id = std::uint64_t;
    struct limits {
        std::size_t most = 10'000;      ///< the most connections
        std::size_t strangers = 5'500;  ///< the most connections that haven't shown a key
    };

    explicit front_door(const limits& l) : limits_(l) {}

    id come() {
        const id i = next_++;
        by_owner_[nullptr].insert(i);
        owners_.emplace(i, nullptr);
        return i;
    }
    /// `whose` must not be null.
    void known(id i, const void* whose) {
        const auto found = owners_.find(i);
        if (found == owners_.end() || found->second == whose) return;
        auto& theirs = by_owner_[whose];
        theirs.insert(i);
        leave(found->second, i);
        found->second = whose;
    }
    void gone(id i) noexcept {
        const auto found = owners_.find(i);
        if (found == owners_.end()) return;
        leave(found->second, i);
        owners_.erase(found);
    }
    /// The connection to close; none if there aren't too many.
    [[nodiscard]] std::optional<id> surplus() const {
        const auto strangers = by_owner_.find(nullptr);
        const std::size_t unknown = strangers == by_owner_.end() ? 0 : strangers->second.size();
        if (unknown > limits_.strangers) return *strangers->second.begin();
        if (owners_.size() <= limits_.most) return std::nullopt;
        // The newest connection is always a stranger. It stays, or no new client could ever come
        // in.
        if (unknown > 1) return *strangers->second.begin();
        const auto size = [](const auto& of) { return of.first == nullptr ? 0 : of.second.size(); };
        return *std::ranges::max_element(by_owner_, {}, size)->second.begin();
    }
    [[nodiscard]] std::size_t size() const noexcept { return owners_.size(); }

private:
    void leave(const void* owner, id i) noexcept {
        const auto theirs = by_owner_.find(owner);
        theirs->second.erase(i);
        if (theirs->second.empty()) by_owner_.erase(theirs);
    }

    limits limits_;
    id next_ = 0;  // the oldest connection has the smallest id
    std::map<id, const void*> owners_;
    std::map<const void*, std::set<id>> by_owner_;  // null stands for strangers
};

/// The number of connections for each of two protocols if the process may open this many files.
/// Some files are kept for the journal, the file of tenants, models and operators.
[[nodiscard]] constexpr std::size_t connections_for(std::size_t files) noexcept {
    const std::size_t reserve = std::max<std::size_t>(64, std::min<std::size_t>(files / 4, 256));
    return files > reserve + 8 ? (files - reserve) / 2 : 4;
}

}  // namespace inference_server
