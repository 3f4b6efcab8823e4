// SPDX-License-Identifier: Apache-2.0
// The amounts that an equal split divides: bytes, SMs, or device time. Each is counted in whole numbers, and each has
// its own error code for too little of it.
//
//   std::vector<gpushare::sm_room> sms;                                // the devices, each with its free SMs
//   gpushare::equal_split(gpushare::sm_count{64}, 4, sms, gpushare::sm_count{8});      // 16 SMs on each of four, in groups of 8
//   std::vector<gpushare::share_room> times;                           // the same with the free device time
//   gpushare::equal_split(60_pct * 4, 4, times);                       // 60 % of each of four devices' time
#pragma once

#include <compare>
#include <concepts>
#include <cstdint>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A number of SMs, of one device or of several.
struct sm_count {
    std::uint64_t count = 0;  ///< of SMs

    friend constexpr auto operator<=>(sm_count, sm_count) = default;
    friend constexpr bool operator==(sm_count, sm_count) = default;
};

/// Device time of several devices together, in permille of one: 2500 are two and a half devices.
struct share_sum {
    std::uint64_t permille = 0;  ///< of one device

    friend constexpr auto operator<=>(share_sum, share_sum) = default;
    friend constexpr bool operator==(share_sum, share_sum) = default;
};
/// That share of each of them.
[[nodiscard]] constexpr share_sum operator*(share each, std::uint32_t devices) noexcept {
    return {std::uint64_t{each.permille()} * devices};
}

/// How an amount of one device is counted, and the type of a sum of such amounts. Specialise it to split other kinds.
///   total_type                what several devices have together
///   count(amount or total)    in the smallest unit there is
///   amount(count), total(count)
///   too_little                the code of a refusal for lack of it
///   print(message, count)
template <class Amount>
struct amount_traits;

/// Memory.
template <>
struct amount_traits<bytes> {
    /// A sum over devices.
    using total_type = bytes;
    static constexpr errc too_little = errc::no_room;  ///< where there isn't enough
    /// Bytes.
    static constexpr std::uint64_t count(bytes b) noexcept { return b.count(); }
    /// The amount on one device.
    static constexpr bytes amount(std::uint64_t n) noexcept { return bytes{n}; }
    /// The amount on several devices.
    static constexpr bytes total(std::uint64_t n) noexcept { return bytes{n}; }
    /// For messages.
    static void print(detail::message& m, std::uint64_t n) noexcept { m.add(bytes{n}); }
};

/// SMs.
template <>
struct amount_traits<sm_count> {
    /// A sum over devices.
    using total_type = sm_count;
    static constexpr errc too_little = errc::too_few_sms;  ///< where there isn't enough
    /// SMs.
    static constexpr std::uint64_t count(sm_count s) noexcept { return s.count; }
    /// The amount on one device.
    static constexpr sm_count amount(std::uint64_t n) noexcept { return {n}; }
    /// The amount on several devices.
    static constexpr sm_count total(std::uint64_t n) noexcept { return {n}; }
    /// For messages.
    static void print(detail::message& m, std::uint64_t n) noexcept { m.add(n, n == 1 ? " SM" : " SMs"); }
};

/// Device time.
template <>
struct amount_traits<share> {
    /// A sum over devices.
    using total_type = share_sum;
    static constexpr errc too_little = errc::share_exceeded;  ///< where there isn't enough
    /// Permille of one device.
    static constexpr std::uint64_t count(share s) noexcept { return s.permille(); }
    /// Permille of one device.
    static constexpr std::uint64_t count(share_sum s) noexcept { return s.permille; }
    /// The amount on one device. Throws std::out_of_range above a whole one.
    static constexpr share amount(std::uint64_t n) { return share::of_permille(n); }
    /// The amount on several devices.
    static constexpr share_sum total(std::uint64_t n) noexcept { return {n}; }
    /// For messages.
    static void print(detail::message& m, std::uint64_t n) noexcept {
        m.add(n / 10);
        if (n % 10 != 0) m.add(".", n % 10);
        m.add(" %");
    }
};

// Version 14 would break the compound requirements apart:
// clang-format off

/// An amount that can be split over devices.
template <class A>
concept splittable = std::copyable<A> && std::default_initializable<A> &&
    requires(A a, typename amount_traits<A>::total_type t, std::uint64_t n, detail::message& m) {
    { amount_traits<A>::count(a) } -> std::same_as<std::uint64_t>;
    { amount_traits<A>::count(t) } -> std::same_as<std::uint64_t>;
    { amount_traits<A>::amount(n) } -> std::same_as<A>;
    { amount_traits<A>::total(n) } -> std::same_as<typename amount_traits<A>::total_type>;
    { a == a } -> std::same_as<bool>;
    { amount_traits<A>::too_little } -> std::same_as<const errc&>;
    amount_traits<A>::print(m, n);
};

// clang-format on

static_assert(splittable<bytes> && splittable<sm_count> && splittable<share>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
