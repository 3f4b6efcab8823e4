// SPDX-License-Identifier: Apache-2.0
// Connections of one port: how many there may be, and which one is closed if there are too many.
// Earlier clients can't keep a new one out. A new connection closes the oldest connection that has
// shown no key. If all have shown one, it closes the oldest connection of the key that has most.
//
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

/// A value without clock or lock.
class front_door {
public:
    using id = std::uint64_t;
    struct limits {
        std::size_t most = 10'000;      ///< connections
        std::size_t strangers = 5'500;  ///< of them that have shown no key
    };

    explicit front_door(const limits& l) : limits_(l) {}

    id come() {
        const id i = next_++;
        by_owner_[nullptr].insert(i);
        owners_.emplace(i, nullptr);
        return i;
    }
    /// `whose` isn't null.
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
    /// Which one is to go. None: there are no more than there may be.
    [[nodiscard]] std::optional<id> surplus() const {
        const auto strangers = by_owner_.find(nullptr);
        const std::size_t unknown = strangers == by_owner_.end() ? 0 : strangers->second.size();
        if (unknown > limits_.strangers) return *strangers->second.begin();
        if (owners_.size() <= limits_.most) return std::nullopt;
        // The newest is a stranger, always: it stays, or nobody could ever come in.
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
    id next_ = 0;  // so the oldest has the least
    std::map<id, const void*> owners_;
    std::map<const void*, std::set<id>> by_owner_;  // null: strangers
};

/// How many connections each of two protocols may have where a process may open so many files: some
/// are left for the journal, the file of tenants, models and operators.
[[nodiscard]] constexpr std::size_t connections_for(std::size_t files) noexcept {
    const std::size_t reserve = std::max<std::size_t>(64, std::min<std::size_t>(files / 4, 256));
    return files > reserve + 8 ? (files - reserve) / 2 : 4;
}

}  // namespace inference_server
