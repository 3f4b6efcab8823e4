// SPDX-License-Identifier: Apache-2.0
// Faults of collectives. A fault names the rank, the collective and the epoch (the number of the
// collective in its sequence). hang_watch finds out which rank hangs, from snapshots of all ranks'
// progress.
//
//   if (auto f = gpushare::try_all_reduce(me, in, out)) log(gpushare::describe(f).c_str());
//   // "all_reduce, epoch 17: rank 3 (deadline exceeded)"
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The collectives.
enum class collective_kind : std::uint8_t {
    none,            ///< not in a collective
    barrier,         ///< barrier()
    all_reduce,      ///< all_reduce(), plain or fused
    reduce_scatter,  ///< reduce_scatter()
    all_gather,      ///< all_gather()
    broadcast,       ///< broadcast()
    reduce,          ///< reduce()
    all_to_all,      ///< all_to_all()
};

/// The name of the collective.
[[nodiscard]] constexpr std::string_view to_string(collective_kind kind) noexcept {
    switch (kind) {
        case collective_kind::none: return "no collective";
        case collective_kind::barrier: return "barrier";
        case collective_kind::all_reduce: return "all_reduce";
        case collective_kind::reduce_scatter: return "reduce_scatter";
        case collective_kind::all_gather: return "all_gather";
        case collective_kind::broadcast: return "broadcast";
        case collective_kind::reduce: return "reduce";
        case collective_kind::all_to_all: return "all_to_all";
    }
    return "unknown collective";
}

/// The reason why a collective failed; converts to true after a failure. Every rank of the group
/// gets the same fault, except for `buffers_in_use`.
struct collective_fault {
    errc code = errc::none;                        ///< none if the collective succeeded
    collective_kind what = collective_kind::none;  ///< the collective
    /// the rank that was late, made another call, or aborted
    std::uint32_t rank = 0;
    std::uint32_t epoch = 0;  ///< the number of the collective on its channel
    /// Another rank was still inside the collective when this rank gave up waiting, 0.2 s after its
    /// deadline. The other rank may touch this rank's buffers until it is known to have ended.
    bool buffers_in_use = false;

    /// Whether the collective failed.
    [[nodiscard]] GPUSHARE_HD constexpr explicit operator bool() const noexcept { return code != errc::none; }
    friend constexpr bool operator==(const collective_fault&, const collective_fault&) = default;

    /// The fault as one word, which ranks pass on in one store. The word of a fault is never 0.
    /// Every rank number from 65535 on is packed as 65535.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t packed() const noexcept {
        return std::uint64_t{buffers_in_use} << 63 | std::uint64_t{static_cast<std::uint8_t>(code)} << 56 |
               std::uint64_t{static_cast<std::uint8_t>(what)} << 48 |
               std::uint64_t{rank < 0xffff ? rank : 0xffff} << 32 | epoch;
    }
    /// Unpacks a fault.
    [[nodiscard]] GPUSHARE_HD static constexpr collective_fault unpacked(std::uint64_t word) noexcept {
        collective_fault f;
        f.buffers_in_use = word >> 63 != 0;
        f.code = static_cast<errc>(static_cast<std::uint8_t>(word >> 56) & 0x7fU);
        f.what = static_cast<collective_kind>(static_cast<std::uint8_t>(word >> 48));
        f.rank = static_cast<std::uint32_t>(word >> 32) & 0xffffU;
        f.epoch = static_cast<std::uint32_t>(word);
        return f;
    }
};

/// A sentence that describes the fault. Makes no allocation.
[[nodiscard]] inline detail::message describe(const collective_fault& f) noexcept {
    detail::message m;
    m.add(to_string(f.what), ", epoch ", std::uint64_t{f.epoch}, ": rank ", std::uint64_t{f.rank}, " (",
          to_string(f.code), ")");
    if (f.buffers_in_use) m.add(", its buffers may still be in use");
    return m;
}

namespace detail {
[[nodiscard]] inline operation_error error_of(const collective_fault& f) {
    return {failure{.code = f.code, .asked = f.epoch, .left = f.rank, .because = reason::rank_failed}, {}, describe(f)};
}
}  // namespace detail

/// Throws operation_error if there is a fault. The error's `asked` is the epoch, and `left` is the
/// rank.
inline void raise_fault(const collective_fault& f) {
    if (f) throw detail::error_of(f);
}

/// How far a rank is in a collective.
enum class collective_stage : std::uint8_t {
    outside,  ///< outside any collective; `epoch` is the last collective's
    waiting,  ///< waiting for the other ranks to come
    working,  ///< working on its share of the data
    leaving,  ///< waiting for the other ranks to be done
};

/// The collective in which a rank is, and how far the rank is in it.
struct rank_progress {
    /// The epoch of the rank's last collective.
    std::uint32_t epoch = 0;
    collective_kind what = collective_kind::none;        ///< the kind of that collective
    collective_stage stage = collective_stage::outside;  ///< how far the rank is in that collective
    friend constexpr bool operator==(const rank_progress&, const rank_progress&) = default;
};

/// The rank that the other ranks wait for, if any of them waits: the rank furthest behind, by epoch
/// and then by stage. A rank that is outside with the newest epoch is done with that collective.
[[nodiscard]] inline std::optional<collective_fault> laggard(std::span<const rank_progress> ranks) noexcept {
    // the rank furthest ahead by epoch, of the ranks inside a collective
    const rank_progress* front = nullptr;
    // also correct where the count has wrapped around
    const auto epoch_reached = [](std::uint32_t at, std::uint32_t epoch) {
        return static_cast<std::int32_t>(at - epoch) >= 0;
    };
    for (const rank_progress& r : ranks)
        if (r.stage != collective_stage::outside && (front == nullptr || epoch_reached(r.epoch, front->epoch)))
            front = &r;
    if (front == nullptr) return std::nullopt;
    const auto place = [&](const rank_progress& r) {
        if (r.epoch != front->epoch) return epoch_reached(r.epoch, front->epoch) ? 4 : 0;
        return r.stage == collective_stage::outside ? 4 : static_cast<int>(r.stage);
    };
    std::size_t last = 0;
    for (std::size_t i = 1; i < ranks.size(); ++i)
        if (place(ranks[i]) < place(ranks[last])) last = i;
    return collective_fault{errc::deadline_exceeded, front->what, static_cast<std::uint32_t>(last), front->epoch};
}

/// Notices that a group hangs. The caller passes snapshots, and the watch names the laggard once no
/// rank has moved for `patience` although a rank is inside a collective. A plain value; time is an
/// argument.
class hang_watch {
public:
    /// `patience` is how long the ranks may go without a move.
    explicit hang_watch(ns patience) noexcept : patience_(patience) {}

    /// The laggard, once it is time to name it. Call look() repeatedly.
    [[nodiscard]] std::optional<collective_fault> look(std::span<const rank_progress> ranks, instant now) {
        const auto late = laggard(ranks);
        const bool same = seen_.size() == ranks.size() && equal(ranks);
        if (!late || !same) {
            seen_.assign(ranks.begin(), ranks.end());
            since_ = now;
            return std::nullopt;
        }
        return now - since_ >= patience_ ? late : std::nullopt;
    }

private:
    [[nodiscard]] bool equal(std::span<const rank_progress> ranks) const noexcept {
        for (std::size_t i = 0; i < ranks.size(); ++i)
            if (!(seen_[i] == ranks[i])) return false;
        return true;
    }

    ns patience_;
    instant since_{};
    std::vector<rank_progress> seen_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
