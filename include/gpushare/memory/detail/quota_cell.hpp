// SPDX-License-Identifier: Apache-2.0
// The atomics of one quota. Two words decide: the available bytes, and the total. A charge or a
// release is one compare-and-swap of the first word, which also holds the counts of calls.
// quota.hpp makes a tree of these.
//
//   for (auto [word, total] = cell.read();;) {
//       if (word.frozen() || word.available() < n) ...            // the slow way
//       if (cell.word.compare_exchange_weak(word.bits, word.charged(n).bits)) break;
//   }
#pragma once

#include <atomic>
#include <cstdint>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Bytes available in the low 48 bits, then the numbers of charges and releases with 7 bits each,
/// then the frozen bit. The counts cost nothing extra, since the compare-and-swap is needed anyway.
/// Every 64th call moves 64 of them to a counter of their own.
struct quota_word {
    static constexpr unsigned charge_shift = 48, release_shift = 55;
    static constexpr std::uint64_t mask = (std::uint64_t{1} << charge_shift) - 1, count_mask = 0x7f, spill = 64;
    static constexpr std::uint64_t frozen_bit = std::uint64_t{1} << 63;

    std::uint64_t bits = 0;

    [[nodiscard]] constexpr std::uint64_t available() const noexcept { return bits & mask; }
    [[nodiscard]] constexpr bool frozen() const noexcept { return (bits & frozen_bit) != 0; }
    /// The calls since the counts last moved. At 0, 64 calls have to move now.
    [[nodiscard]] constexpr std::uint64_t charges() const noexcept { return (bits >> charge_shift) % spill; }
    [[nodiscard]] constexpr std::uint64_t releases() const noexcept { return (bits >> release_shift) % spill; }

    [[nodiscard]] constexpr quota_word frozen_if(bool freeze) const noexcept {
        return {freeze ? bits | frozen_bit : bits & ~frozen_bit};
    }
    /// The word with `n` bytes more or less available, and no call counted.
    [[nodiscard]] constexpr quota_word plus(std::uint64_t n) const noexcept { return {bits + n}; }
    [[nodiscard]] constexpr quota_word minus(std::uint64_t n) const noexcept { return {bits - n}; }
    /// The word after one more charge or release, modulo 128: the carry must not reach the field
    /// above.
    [[nodiscard]] constexpr quota_word charged(std::uint64_t n) const noexcept {
        return {count(charge_shift).bits - n};
    }
    [[nodiscard]] constexpr quota_word released(std::uint64_t n) const noexcept {
        return {count(release_shift).bits + n};
    }

private:
    // A branch, not a select: the compare-and-swap needn't wait for its outcome.
    [[nodiscard]] constexpr quota_word count(unsigned shift) const noexcept {
        auto counted = bits;
        if ((counted >> shift & count_mask) == count_mask) [[unlikely]]
            counted -= (count_mask + 1) << shift;
        return {counted + (std::uint64_t{1} << shift)};
    }
};

/// Guaranteed + borrowed bytes in the low 48 bits, then whether the quota is self-contained (the
/// closed bit), then the number of changes. A self-contained quota has no burst, no child that
/// borrows, and isn't stopped. So the quota_word alone says how many bytes are available.
struct quota_total {
    static constexpr std::uint64_t closed_bit = quota_word::mask + 1;

    std::uint64_t bits = 0;

    [[nodiscard]] constexpr std::uint64_t held() const noexcept { return bits & quota_word::mask; }
    [[nodiscard]] constexpr bool closed() const noexcept { return (bits & closed_bit) != 0; }
    [[nodiscard]] constexpr quota_total changed(std::uint64_t held, bool closed) const noexcept {
        return {((bits & ~(2 * closed_bit - 1)) + 2 * closed_bit) | (closed ? closed_bit : 0) | held};
    }
};

/// The atomics of one quota. The holder of the tree's mutex may freeze the word. Then it alone
/// changes word and total, and charges and releases take the mutex.
struct quota_cell {
    std::atomic<std::uint64_t> word{0}, total{0}, peak{0}, charges{0}, releases{0};

    struct reading {
        quota_word word;
        quota_total total;
    };

    /// Reads a word and the total that belonged to it. The word may return to its old value while
    /// the total has changed in between (a resize down and up), so the total must be the same
    /// before and after. Acquire: a changed total is seen together with the freeze before it, and a
    /// thawed word together with the total before it.
    [[nodiscard]] reading read() const noexcept {
        for (auto before = total.load(std::memory_order_acquire);;) {
            const auto bits = word.load(std::memory_order_acquire);
            const auto after = total.load(std::memory_order_acquire);
            if (before == after) return {{bits}, {before}};
            before = after;
        }
    }
    [[nodiscard]] quota_word now() const noexcept { return {word.load(std::memory_order_acquire)}; }

    void freeze() noexcept { word.fetch_or(quota_word::frozen_bit, std::memory_order_acq_rel); }
    /// Release: a thread that sees this word sees what was written before, the total first of all.
    void publish(quota_word w) noexcept { word.store(w.bits, std::memory_order_release); }

    [[nodiscard]] std::uint64_t held() const noexcept {
        return quota_total{total.load(std::memory_order_relaxed)}.held();
    }
    /// In a freeze. Release: for read().
    void hold(std::uint64_t held, bool closed) noexcept {
        const quota_total before{total.load(std::memory_order_relaxed)};
        total.store(before.changed(held, closed).bits, std::memory_order_release);
    }

    /// Call this with every word that counts one more charge or release.
    void count_charge(quota_word w) noexcept {
        if (w.charges() == 0) charges.fetch_add(quota_word::spill, std::memory_order_relaxed);
    }
    void count_release(quota_word w) noexcept {
        if (w.releases() == 0) releases.fetch_add(quota_word::spill, std::memory_order_relaxed);
    }
    /// The word after a release of `n` bytes, counted as a release unless `n` is 0.
    quota_word released(quota_word w, std::uint64_t n) noexcept {
        if (n == 0) return w;
        w = w.released(n);
        count_release(w);
        return w;
    }
    void raise_peak(std::uint64_t current) noexcept {
        auto before = peak.load(std::memory_order_relaxed);
        while (current > before && !peak.compare_exchange_weak(before, current, std::memory_order_relaxed)) {
        }
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
