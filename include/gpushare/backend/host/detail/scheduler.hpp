// SPDX-License-Identifier: Apache-2.0
// Decides what a device runs next, without threads, clocks or work, so that it can be tested step
// by step. The engine offers the heads of streams, asks for claims, and gives SMs back.
//
//   host::detail::scheduler<int> device{4};
//   device.offer(7, priority{1}, 8, false);
//   while (auto c = device.next()) start(c->work, c->first, c->count, c->sm);
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include <gpushare/detail/plain_list.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {
namespace detail {

/// The rules:
/// - A free SM takes blocks of the best head: the one of the highest priority. Of equals, the one
///   that was offered first.
/// - A block keeps its SM until the SM is released.
/// - The blocks of a cooperative head start together. While it is the best head and too few SMs are
///   free, no other head gets one. Once its first block is claimed, no other head's block comes
///   before the rest.
/// - SMs can be set apart in groups. A head of a group gets SMs of that group only; a head of
///   group 0 gets any free SM. A cooperative head reserves only SMs that it may have.
/// Two cooperative heads can't each hold half of the SMs: the second one gets none before the first
/// one has all of its SMs.
template <std::regular Work>
class scheduler {
public:
    /// Blocks [first, first + count) of `work` go to SM `sm`.
    struct claim {
        Work work{};
        std::uint32_t first = 0, count = 0, sm = 0;
    };

    /// A scheduler of `sms` SMs. Claims have up to `largest_batch` blocks if many more blocks than
    /// SMs are left.
    explicit scheduler(std::uint32_t sms, std::uint32_t largest_batch = 1)
        : largest_batch_(largest_batch), group_of_(sms) {
        groups_.emplace_back(sms, sms);
        // Ascending: already a heap.
        for (std::uint32_t sm = 0; sm < sms; ++sm) groups_[0].free.push_back(sm);
    }

    [[nodiscard]] std::uint32_t sms() const noexcept { return static_cast<std::uint32_t>(group_of_.size()); }

    /// Sets apart `count` >= 1 SMs of group 0, which must have as many. Returns the group's number,
    /// from 1; numbers are used again. Other blocks on these SMs run to their end.
    [[nodiscard]] std::uint32_t set_apart(std::uint32_t count) {
        std::uint32_t made = 1;
        while (made < groups_.size() && groups_[made].sms != 0) ++made;
        if (made == groups_.size()) groups_.emplace_back(0, sms());
        for (std::uint32_t sm = 0; count != 0; ++sm) {
            if (group_of_[sm] != 0) continue;
            move_sm(sm, made);
            --count;
        }
        return made;
    }
    /// Returns the SMs of `group`, which must have no heads left, to group 0.
    void put_back(std::uint32_t group) noexcept {
        for (std::uint32_t sm = 0; sm < sms(); ++sm)
            if (group_of_[sm] == group) move_sm(sm, 0);
    }
    [[nodiscard]] std::uint32_t group_of(std::uint32_t sm) const noexcept { return group_of_[sm]; }
    /// The number of SMs of the group, free or not.
    [[nodiscard]] std::uint32_t size_of(std::uint32_t group) const noexcept { return groups_[group].sms; }

    /// Reserves memory, so that this many heads at once can be offered without allocating.
    void reserve(std::size_t heads) { heads_.reserve(heads); }

    /// Offers `work`, which may start: `blocks` >= 1 blocks, and for cooperative work at most as
    /// many as it has SMs.
    void offer(const Work& work, priority level, std::uint32_t blocks, bool cooperative, std::uint32_t group = 0) {
        // Behind all heads of its level: the best head is the last one in the list.
        heads_.push_back({work, level, blocks, 0, group, cooperative});
        for (auto at = heads_.size() - 1; at > 0 && heads_[at - 1].level >= level; --at)
            std::swap(heads_[at - 1], heads_[at]);
    }

    /// Takes back the unclaimed blocks of `work`; false if none are left.
    bool withdraw(const Work& work) noexcept {
        const auto at = std::ranges::find(heads_, work, &head::work);
        if (at == heads_.end()) return false;
        heads_.erase(at);
        return true;
    }

    /// The next claim for a free SM; nothing if no SM is free or no head may use one.
    [[nodiscard]] std::optional<claim> next() noexcept {
        ++look_;
        for (auto at = heads_.size(); at-- > 0;) {
            head& h = heads_[at];
            const std::uint32_t left = h.blocks - h.claimed;
            if (h.cooperative && left > free_for(h.of)) {
                if (h.of == 0) return std::nullopt;
                groups_[h.of].kept_in = look_;
                continue;
            }
            const std::uint32_t from = group_to_take_from(h.of);
            if (from != no_group) return take(at, left, from);
            if (h.of == 0) return std::nullopt;  // no head behind it finds one either
        }
        return std::nullopt;
    }

    /// For a busy SM. Among the heads above `level` that may run on `sm`, chooses the one of the
    /// highest level that has waited longest: a block of it goes there now. As in next(), no head
    /// passes a cooperative head that waits for this SM among others.
    [[nodiscard]] std::optional<claim> next_above(priority level, std::uint32_t sm) noexcept {
        for (auto at = heads_.size(); at-- > 0 && heads_[at].level > level;) {
            head& h = heads_[at];
            if (h.of != 0 && h.of != group_of_[sm]) continue;
            if (h.cooperative) return std::nullopt;
            const claim c{h.work, h.claimed, 1, sm};
            if (++h.claimed == h.blocks) heads_.erase(heads_.begin() + static_cast<std::ptrdiff_t>(at));
            return c;
        }
        return std::nullopt;
    }
    /// The highest level of which a block may go onto a busy SM; the lowest possible level if there
    /// is none.
    [[nodiscard]] std::int32_t highest_waiting() const noexcept {
        for (auto at = heads_.size(); at-- > 0;) {
            if (!heads_[at].cooperative) return heads_[at].level.level;
            if (heads_[at].of == 0) break;
        }
        return std::numeric_limits<std::int32_t>::min();
    }

    /// Ends a claim, whose blocks have ended.
    void release(std::uint32_t sm) noexcept { groups_[group_of_[sm]].put(sm); }

private:
    struct head {
        Work work{};
        priority level{};
        std::uint32_t blocks = 0, claimed = 0, of = 0;
        bool cooperative = false;
    };
    struct sm_group {
        std::uint32_t sms = 0;
        gpushare::detail::plain_list<std::uint32_t> free;  // heap: the lowest SM first
        // The search in which a cooperative head waits for more of these SMs.
        std::uint64_t kept_in = 0;

        sm_group(std::uint32_t size, std::uint32_t room) : sms(size) { free.reserve(room); }
        void put(std::uint32_t sm) noexcept {
            free.push_back(sm);  // within the reserved memory
            std::push_heap(free.begin(), free.end(), std::greater{});
        }
        std::uint32_t take() noexcept {
            std::pop_heap(free.begin(), free.end(), std::greater{});
            const std::uint32_t sm = free.back();
            free.pop_back();
            return sm;
        }
    };
    static constexpr priority started{std::numeric_limits<std::int32_t>::max()};
    static constexpr std::uint32_t no_group = std::numeric_limits<std::uint32_t>::max();

    [[nodiscard]] bool is_open(const sm_group& g) const noexcept { return !g.free.empty() && g.kept_in != look_; }

    /// The number of SMs that a head of group `of` could have now.
    [[nodiscard]] std::size_t free_for(std::uint32_t of) const noexcept {
        if (of != 0) return is_open(groups_[of]) ? groups_[of].free.size() : 0;
        std::size_t sum = 0;
        for (const sm_group& g : groups_)
            if (is_open(g)) sum += g.free.size();
        return sum;
    }
    /// The group to take an SM from; for group 0, the one with the lowest free SM.
    [[nodiscard]] std::uint32_t group_to_take_from(std::uint32_t of) const noexcept {
        if (of != 0) return is_open(groups_[of]) ? of : no_group;
        std::uint32_t best = no_group;
        for (std::uint32_t i = 0; i < groups_.size(); ++i)
            if (is_open(groups_[i]) && (best == no_group || groups_[i].free.front() < groups_[best].free.front()))
                best = i;
        return best;
    }

    claim take(std::size_t at, std::uint32_t left, std::uint32_t from) noexcept {
        head& h = heads_[at];
        // Several claims for each SM, so that they end at about the same time.
        const std::uint32_t share = h.of == 0 ? sms() : groups_[h.of].sms;
        const std::uint32_t batch = h.cooperative ? 1 : std::clamp(left / (4 * share), 1U, largest_batch_);
        const claim c{h.work, h.claimed, batch, groups_[from].take()};
        h.claimed += batch;
        if (h.claimed == h.blocks) {
            heads_.erase(heads_.begin() + static_cast<std::ptrdiff_t>(at));
        } else if (h.cooperative) {
            h.level = started;
            for (; at + 1 < heads_.size(); ++at) std::swap(heads_[at], heads_[at + 1]);
        }
        return c;
    }

    void move_sm(std::uint32_t sm, std::uint32_t to) noexcept {
        sm_group& from = groups_[group_of_[sm]];
        --from.sms;
        ++groups_[to].sms;
        group_of_[sm] = to;
        const auto at = std::ranges::find(from.free, sm);
        if (at == from.free.end()) return;
        *at = from.free.back();
        from.free.pop_back();
        std::make_heap(from.free.begin(), from.free.end(), std::greater{});
        groups_[to].put(sm);
    }

    std::uint32_t largest_batch_;
    // Sorted by level; within a level the head offered first is the last.
    gpushare::detail::plain_list<head> heads_;
    gpushare::detail::plain_list<std::uint32_t> group_of_;  // the group of each SM
    std::vector<sm_group> groups_;
    std::uint64_t look_ = 0;
};

}  // namespace detail
}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
