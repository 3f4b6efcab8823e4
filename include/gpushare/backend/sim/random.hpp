// SPDX-License-Identifier: Apache-2.0
// Random numbers for simulations: the same sequence for the same seed, with every compiler and library.
//
//   gpushare::sim::random any{42};    gpushare::ns gap = any.exponential(1ms);    gpushare::ns length = any.between(100us, 1ms);
#pragma once

#include <cmath>
#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace sim {

/// A generator of 64-bit numbers: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). A value; not thread-safe.
class random {
public:
    /// The same seed gives the same sequence.
    explicit random(std::uint64_t seed = 0) noexcept : state_(seed) {}

    /// Any number of 64 bits.
    [[nodiscard]] std::uint64_t next() noexcept {
        std::uint64_t z = state_ += 0x9e3779b97f4a7c15U;
        z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9U;
        z = (z ^ (z >> 27U)) * 0x94d049bb133111ebU;
        return z ^ (z >> 31U);
    }
    /// 0 to n-1; n > 0. The bias of the remainder is far below anything that a simulation shows.
    [[nodiscard]] std::uint64_t below(std::uint64_t n) noexcept { return next() % n; }
    /// In [0, 1).
    [[nodiscard]] double fraction() noexcept { return static_cast<double>(next() >> 11U) * 0x1.0p-53; }
    /// Uniform, both ends included. `to` is not less than `from`.
    [[nodiscard]] ns between(ns from, ns to) noexcept {
        // Unsigned: the distance may not fit into ns.
        const auto first = static_cast<std::uint64_t>(from.count());
        const auto distance = static_cast<std::uint64_t>(to.count()) - first;
        return ns{static_cast<std::int64_t>(first + (distance + 1 == 0 ? next() : below(distance + 1)))};
    }
    /// Time between two arrivals of a Poisson process whose arrivals are `mean` apart on average; ns::max() at the most.
    [[nodiscard]] ns exponential(ns mean) noexcept {
        const double drawn = -std::log1p(-fraction()) * static_cast<double>(mean.count());
        return drawn < 0x1p63 ? ns{std::llround(drawn)} : ns::max();
    }

private:
    std::uint64_t state_;
};

}  // namespace sim
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
