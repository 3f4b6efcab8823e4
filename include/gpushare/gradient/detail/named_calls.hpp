// SPDX-License-Identifier: Apache-2.0
// Finds the calls that all ranks of a process have in common, by names that come in any order. So
// horovod_devices.hpp can decide which calls to run without considering devices, streams and locks.
//
//   named_calls<int> calls(2);
//   (void)calls.hand_over(0, {.name = "x", .word = word_of_call}, 7);
//   (void)calls.hand_over(1, {.name = "x", .word = word_of_call}, 8);
//   for (auto& c : calls.take()) ...      // both ranks have "x": c.of_ranks is 7 and 8
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/transport.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace horovod {
namespace detail {

/// A rank's call. `word` is a hash of what all ranks must agree on.
struct named_call {
    std::string name;
    std::uint64_t word = 0;
    collective_kind kind = collective_kind::all_reduce;
    std::uint32_t root = 0;  // the root of a broadcast
};

/// Keeps calls until all ranks have made them. `Item` is a rank's contribution to a call. A plain
/// value.
template <class Item>
class named_calls {
public:
    /// A call that all ranks have made, except ranks that have joined. `fault` says why all ranks
    /// refuse the call, if they do.
    struct common {
        named_call what;
        std::vector<std::optional<Item>> of_ranks;
        collective_fault fault;
    };

    explicit named_calls(std::uint32_t ranks) : ranks_(ranks), joined_(ranks, false) {}

    [[nodiscard]] std::uint32_t size() const noexcept { return ranks_; }
    /// Whether the rank has a call of this name under way.
    [[nodiscard]] bool has(std::uint32_t rank, std::string_view name) const {
        const auto at = open_.find(name);
        return at != open_.end() && at->second.of_ranks[rank];
    }
    /// Adds a rank's call. Returns false, and changes nothing, while the rank has a call of this
    /// name under way.
    [[nodiscard]] bool hand_over(std::uint32_t rank, named_call what, Item item) {
        auto at = open_.find(what.name);
        if (at == open_.end()) {
            const std::string name = what.name;
            at = open_.emplace(name, entry{std::vector<std::optional<Item>>(ranks_), std::vector<named_call>(ranks_)})
                     .first;
        }
        entry& e = at->second;
        if (e.of_ranks[rank]) return false;
        e.of_ranks[rank] = std::move(item);
        e.called[rank] = std::move(what);
        if (is_complete(e)) complete(at);
        return true;
    }
    /// Says that the rank makes no further calls until all ranks have joined.
    void join(std::uint32_t rank) {
        if (!joined_[rank]) last_ = rank;
        joined_[rank] = true;
        for (auto at = open_.begin(); at != open_.end();) {
            const auto next = std::next(at);
            if (is_complete(at->second)) complete(at);
            at = next;
        }
        for (const bool j : joined_)
            if (!j) return;
        joined_.assign(ranks_, false);
        ++rounds_;
    }
    /// How often all ranks have joined.
    [[nodiscard]] std::uint64_t rounds() const noexcept { return rounds_; }
    /// The rank that joined last.
    [[nodiscard]] std::uint32_t last_joined() const noexcept { return last_; }

    /// The calls that became common since the last take(), the earliest call first.
    [[nodiscard]] std::vector<common> take() { return std::exchange(ready_, {}); }
    /// Forgets all calls that lack a rank, and returns their items.
    [[nodiscard]] std::vector<Item> drop() {
        std::vector<Item> all;
        for (auto& [name, e] : open_)
            for (auto& item : e.of_ranks)
                if (item) all.push_back(std::move(*item));
        open_.clear();
        return all;
    }
    /// The first rank for which a call waits.
    [[nodiscard]] std::optional<std::uint32_t> lacking(std::string_view name) const {
        const auto at = open_.find(name);
        if (at == open_.end()) return std::nullopt;
        for (std::uint32_t r = 0; r < ranks_; ++r)
            if (!at->second.of_ranks[r] && !joined_[r]) return r;
        return std::nullopt;
    }

private:
    struct entry {
        std::vector<std::optional<Item>> of_ranks;
        std::vector<named_call> called;
    };
    using entries = std::map<std::string, entry, std::less<>>;

    [[nodiscard]] bool is_complete(const entry& e) const {
        for (std::uint32_t r = 0; r < ranks_; ++r)
            if (!e.of_ranks[r] && !joined_[r]) return false;
        return true;
    }
    void complete(typename entries::iterator at) {
        entry& e = at->second;
        std::uint32_t first = 0;
        while (!e.of_ranks[first]) ++first;
        const collective_fault fault = why_refused(e, first);
        ready_.push_back({std::move(e.called[first]), std::move(e.of_ranks), fault});
        open_.erase(at);
    }
    /// A fault that names the rank whose call differs, or a rank that has joined although the call
    /// needs it.
    [[nodiscard]] collective_fault why_refused(const entry& e, std::uint32_t first) const {
        std::vector<std::uint64_t> words;
        std::vector<std::uint32_t> whose;
        for (std::uint32_t r = 0; r < ranks_; ++r)
            if (e.of_ranks[r]) {
                words.push_back(e.called[r].word);
                whose.push_back(r);
            }
        const named_call& call = e.called[first];
        if (const auto odd = gpushare::detail::odd_one(words)) return {errc::mismatch, call.kind, whose[*odd], 0};
        if (whose.size() == ranks_ || call.kind == collective_kind::all_reduce) return {};
        if (call.kind == collective_kind::broadcast) {
            if (e.of_ranks[call.root]) return {};
            return {errc::not_supported, call.kind, call.root, 0};
        }
        std::uint32_t gone = 0;
        while (e.of_ranks[gone]) ++gone;
        return {errc::not_supported, call.kind, gone, 0};
    }

    std::uint32_t ranks_;
    std::vector<bool> joined_;
    std::uint32_t last_ = 0;
    std::uint64_t rounds_ = 0;
    entries open_;
    std::vector<common> ready_;
};

}  // namespace detail
}  // namespace horovod
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
