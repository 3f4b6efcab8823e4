// SPDX-License-Identifier: Apache-2.0
// Random numbers for simulations: the same sequence for the same seed, with every compiler and library.
//
//   gpushare::sim::random any{42};    ns gap = any.exponential(1ms);    ns length = any.between(100us, 1ms);
#pragma once

#include <cmath>
#include <cstdint>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace sim {

/// A value; not thread-safe. SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
class random {
public:
    explicit random(std::uint64_t seed = 0) noexcept : state_(seed) {}

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
    /// Uniform, both ends included; `to` is not before `from`.
    [[nodiscard]] ns between(ns from, ns to) noexcept {
        return from + ns{static_cast<std::int64_t>(below(static_cast<std::uint64_t>((to - from).count()) + 1))};
    }
    /// Between arrivals of a Poisson process, so many apart on average.
    [[nodiscard]] ns exponential(ns mean) noexcept {
        return ns{std::llround(-std::log1p(-fraction()) * static_cast<double>(mean.count()))};
    }

private:
    std::uint64_t state_;
};

}  // namespace sim
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
