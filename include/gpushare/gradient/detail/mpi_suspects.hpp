// SPDX-License-Identifier: Apache-2.0
// Chooses the rank to blame when a collective between processes fails. Each rank that gives up
// names the rank for which it waits. Ranks that answer are alive, so the culprit is among the
// awaited ranks that don't answer. A value.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

class mpi_suspects {
public:
    explicit mpi_suspects(std::uint32_t ranks = 0) : alive_(ranks), faults_(ranks) {}

    /// Records that a rank gave up because of this packed fault, or only answers (0). A rank's
    /// first fault counts. Doesn't allocate, because a rank without memory gives up, too.
    void heard(std::uint32_t from, std::uint64_t fault) noexcept {
        if (from >= alive_.size()) return;
        alive_[from] = true;
        if (fault != 0 && !faults_[from]) faults_[from] = collective_fault::unpacked(fault);
    }
    [[nodiscard]] bool all_have_answered() const noexcept {
        return std::find(alive_.begin(), alive_.end(), false) == alive_.end();
    }

    /// The fault to report. A requested abort or a detected error takes precedence over a deadline.
    /// Among deadlines, a fault that blames a silent rank takes precedence; among mismatches, the
    /// fault that most ranks report; among equals, the fault of the lowest rank.
    [[nodiscard]] collective_fault chosen() const noexcept {
        const auto place = [&](const collective_fault& f) {
            if (f.code != errc::deadline_exceeded) return 0;
            return f.rank < alive_.size() && alive_[f.rank] ? 2 : 1;
        };
        const auto against = [&](const collective_fault& f) {
            return std::count_if(faults_.begin(), faults_.end(), [&](const collective_fault& other) {
                return f.code == errc::mismatch && other.code == f.code && other.rank == f.rank;
            });
        };
        const auto before = [&](const collective_fault& a, const collective_fault& b) {
            if (place(a) != place(b)) return place(a) < place(b);
            return against(a) != against(b) ? against(a) > against(b) : a.rank < b.rank;
        };
        const collective_fault* best = nullptr;
        for (const collective_fault& f : faults_)
            if (f && (best == nullptr || before(f, *best))) best = &f;
        return best != nullptr ? *best : collective_fault{errc::aborted, collective_kind::none, 0, 0};
    }

private:
    std::vector<bool> alive_;
    std::vector<collective_fault> faults_;  // by the rank that gave up; no fault otherwise
};

/// The notices of ranks that have left in order: such a rank takes part only in its first `calls`
/// calls. A notice is one word: a fault with `calls` in place of an epoch, and a mark. A plain
/// value.
class mpi_farewells {
public:
    [[nodiscard]] static std::uint64_t notice(collective_fault why, std::uint32_t calls) noexcept {
        why.epoch = calls;
        why.buffers_in_use = true;  // the mark, which a rank that gives up never sets
        return why.packed();
    }
    /// Takes in a notice. Returns false if the word isn't a notice of that kind.
    [[nodiscard]] bool heard(std::uint64_t notice) noexcept {
        const collective_fault f = collective_fault::unpacked(notice);
        if (!f.buffers_in_use) return false;
        if (none() || later(first_.epoch, f.epoch) || (first_.epoch == f.epoch && f.rank < first_.rank)) first_ = f;
        return true;
    }
    [[nodiscard]] bool none() const noexcept { return !first_; }
    /// The reason why this call, counted from 0, can't end; no fault if the call can end.
    [[nodiscard]] collective_fault of(std::uint32_t call) const noexcept {
        return none() || later(first_.epoch, call) ? collective_fault{} : first_;
    }

private:
    /// Whether number a comes after b, also where the count has wrapped around.
    [[nodiscard]] static bool later(std::uint32_t a, std::uint32_t b) noexcept {
        return static_cast<std::int32_t>(a - b) > 0;
    }
    collective_fault first_{};  // the fault of the rank that left first
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
