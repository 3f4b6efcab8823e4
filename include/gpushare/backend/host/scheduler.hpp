// SPDX-License-Identifier: Apache-2.0
// What a device runs next: the decision alone, without threads, clocks or work, so that it can be tested step by
// step. The engine offers the heads of streams, asks for claims, and gives SMs back.
//
//   host::scheduler<int> device{4};
//   device.offer(7, priority{1}, 8, false);
//   while (auto c = device.next()) start(c->work, c->first, c->count, c->sm);
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI::host {

/// The rules:
///   - a free SM takes blocks of the best head: the highest priority, among equals the one offered first;
///   - a block that has an SM keeps it until it is released;
///   - the blocks of a cooperative head start together: while it is the best head and too few SMs are free,
///     nobody else gets one, and once its first block is claimed nothing comes before the others.
/// Two cooperative heads can't each hold half of the SMs: the one behind gets none before the first has all.
template <std::regular Work>
class scheduler {
public:
    /// Blocks [first, first + count) of `work` go to SM `sm`.
    struct claim {
        Work work{};
        std::uint32_t first = 0, count = 0, sm = 0;
    };

    /// Claims of up to `largest_batch` blocks where many more blocks than SMs are left.
    explicit scheduler(std::uint32_t sms, std::uint32_t largest_batch = 1) : sms_(sms), largest_batch_(largest_batch) {
        free_.resize(sms);
        std::iota(free_.begin(), free_.end(), 0U);  // ascending: already a heap
    }

    [[nodiscard]] std::uint32_t sms() const noexcept { return sms_; }
    [[nodiscard]] std::uint32_t free_sms() const noexcept { return static_cast<std::uint32_t>(free_.size()); }

    /// So many heads at once can be offered without allocating.
    void reserve(std::size_t heads) { heads_.reserve(heads); }

    /// `work` may start: `blocks` >= 1 of them, if cooperative no more than there are SMs.
    void offer(const Work& work, priority level, std::uint32_t blocks, bool cooperative) {
        // Behind all of its level: the best head is the last one.
        const auto behind = std::ranges::lower_bound(heads_, level, {}, &head::level);
        heads_.insert(behind, head{work, level, blocks, 0, cooperative});
    }

    /// Takes back what isn't claimed yet of `work`; false if nothing is left of it.
    bool withdraw(const Work& work) noexcept {
        const auto at = std::ranges::find(heads_, work, &head::work);
        if (at == heads_.end()) return false;
        heads_.erase(at);
        return true;
    }

    /// What the next free SM does; nothing if none is free or no head may use it.
    [[nodiscard]] std::optional<claim> next() noexcept {
        if (heads_.empty() || free_.empty()) return std::nullopt;
        head& best = heads_.back();
        const std::uint32_t left = best.blocks - best.claimed;
        if (best.cooperative && left > free_.size()) return std::nullopt;

        // Several claims for each SM, so that they end at about the same time.
        const std::uint32_t batch = best.cooperative ? 1 : std::clamp(left / (4 * sms_), 1U, largest_batch_);
        const claim c{best.work, best.claimed, batch, take_sm()};
        best.claimed += batch;
        if (best.claimed == best.blocks)
            heads_.pop_back();
        else if (best.cooperative)
            best.level = started;
        return c;
    }

    /// The blocks of a claim have ended.
    void release(std::uint32_t sm) noexcept {
        free_.push_back(sm);  // never beyond the size that it was made with
        std::ranges::push_heap(free_, std::greater{});
    }

private:
    struct head {
        Work work{};
        priority level{};
        std::uint32_t blocks = 0, claimed = 0;
        bool cooperative = false;
    };
    static constexpr priority started{std::numeric_limits<std::int32_t>::max()};

    std::uint32_t take_sm() noexcept {
        std::ranges::pop_heap(free_, std::greater{});
        const std::uint32_t sm = free_.back();
        free_.pop_back();
        return sm;
    }

    std::uint32_t sms_, largest_batch_;
    std::vector<head> heads_;          // by level; within a level the first offered is the last
    std::vector<std::uint32_t> free_;  // heap: the lowest SM first
};

}  // namespace gpushare::inline GPUSHARE_ABI::host
