// SPDX-License-Identifier: Apache-2.0
// A host device's ledger: which stream's blocks ran on which SM, from when to when. The ledger is
// independent of limiters and meters, so tests can check limiters and meters against it.
//
//   auto taken = node.ledger(gpushare::device_id{0}).take();
//   for (auto [tag, busy] : gpushare::host::sm_time_by_tag(taken.blocks, from, to, node.options().sms)) ...
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {

/// One block that ran.
struct block_record {
    std::uint32_t tag = 0;  ///< the tag of its stream
    std::uint32_t sm = 0;   ///< the SM on which it ran
    instant start{};        ///< when it got the SM
    instant end{};          ///< when it left the SM

    friend bool operator==(const block_record&, const block_record&) = default;
};

/// Records the blocks that ended on one device since the last take(). Keeps `capacity` records and
/// counts the rest. Safe from any thread.
class ledger {
public:
    /// The result of a read.
    struct page {
        /// In the order of their ends, except for blocks that computed past their hold.
        std::vector<block_record> blocks;
        std::uint64_t dropped = 0;  ///< blocks that ended while the ledger was full
    };

    /// Keeps `capacity` blocks until they are read.
    explicit ledger(std::size_t capacity) : capacity_(capacity) { blocks_.reserve(capacity); }

    /// The records since the last call. Take a page regularly, or blocks are dropped.
    [[nodiscard]] page take();

    /// For the engine: a block has ended.
    void record(const block_record& block) noexcept;

private:
    std::mutex mutex_;
    std::size_t capacity_;
    std::vector<block_record> blocks_;
    std::uint64_t dropped_ = 0;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE auto ledger::take() -> page {
    const std::lock_guard lock{mutex_};
    page taken{{blocks_.begin(), blocks_.end()}, std::exchange(dropped_, 0)};
    blocks_.clear();  // keeps its capacity: recording never allocates
    return taken;
}

GPUSHARE_INLINE void ledger::record(const block_record& block) noexcept {
    const std::lock_guard lock{mutex_};
    if (blocks_.size() < capacity_)
        blocks_.push_back(block);
    else
        ++dropped_;
}

#endif  // GPUSHARE_BODIES

/// Busy time of one tag.
struct tag_time {
    std::uint32_t tag = 0;  ///< the tag of the streams
    ns busy{};              ///< device time: SM time over the SMs

    friend bool operator==(const tag_time&, const tag_time&) = default;
};

namespace detail {

/// The moment at which a tag gets its first block, or loses its last one, within [from, to).
struct activity_edge {
    instant at{};
    std::uint32_t tag = 0;
    bool begins = false;
};

/// When each tag is active, that is, has at least one block running: edges in the order of time.
[[nodiscard]] std::vector<activity_edge> activity(std::span<const block_record> blocks, instant from, instant to);

}  // namespace detail

/// Device time of each tag within [from, to), sorted by tag: the SM time of its blocks over the
/// device's SMs. Work that fills half of the SMs for 2 ms has used 1 ms. The sum is the device's
/// used time.
[[nodiscard]] std::vector<tag_time> sm_time_by_tag(std::span<const block_record> blocks, instant from, instant to,
                                                   std::uint32_t sms);

/// Time within [from, to) during which at least one block ran.
[[nodiscard]] ns busy_union(std::span<const block_record> blocks, instant from, instant to);

#if GPUSHARE_BODIES

GPUSHARE_INLINE auto detail::activity(std::span<const block_record> blocks, instant from, instant to)
    -> std::vector<activity_edge> {
    std::vector<activity_edge> edges;
    edges.reserve(2 * blocks.size());
    for (const block_record& b : blocks) {
        const instant start = std::max(b.start, from), end = std::min(b.end, to);
        if (start >= end) continue;
        edges.push_back({start, b.tag, true});
        edges.push_back({end, b.tag, false});
    }
    // A begin before an end at the same instant: a tag whose blocks touch stays active.
    std::ranges::sort(edges, [](const activity_edge& a, const activity_edge& b) {
        return a.at != b.at ? a.at < b.at : a.begins && !b.begins;
    });
    std::map<std::uint32_t, std::size_t> running;
    std::erase_if(edges, [&](const activity_edge& e) {
        std::size_t& n = running[e.tag];
        return e.begins ? n++ != 0 : --n != 0;
    });
    return edges;
}

GPUSHARE_INLINE auto sm_time_by_tag(std::span<const block_record> blocks, instant from, instant to, std::uint32_t sms)
    -> std::vector<tag_time> {
    std::map<std::uint32_t, ns> used;
    for (const block_record& b : blocks)
        if (const instant start = std::max(b.start, from), end = std::min(b.end, to); start < end)
            used[b.tag] += end - start;
    std::vector<tag_time> times;
    times.reserve(used.size());
    for (const auto& [tag, time] : used) times.push_back({tag, time / static_cast<ns::rep>(sms)});
    return times;
}

GPUSHARE_INLINE auto busy_union(std::span<const block_record> blocks, instant from, instant to) -> ns {
    ns busy{};
    std::size_t active = 0;
    instant last = from;
    for (const auto& edge : detail::activity(blocks, from, to)) {
        if (active != 0) busy += edge.at - last;
        last = edge.at;
        edge.begins ? ++active : --active;
    }
    return busy;
}

#endif  // GPUSHARE_BODIES

}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
