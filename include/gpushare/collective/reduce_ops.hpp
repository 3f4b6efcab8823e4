// SPDX-License-Identifier: Apache-2.0
// How ranks combine their elements: the operators, the types in which operators compute (never
// types of 16 bits), and the shards into which elements or rows are divided.
//
//   gpushare::all_reduce(me, in, out, gpushare::maximum{});
//   struct loudest {
//       template <class A> GPUSHARE_HD A operator()(A a, A b) const { return std::abs(a) < std::abs(b) ? b : a; }
//   };
//   // a user's: called with float, double or integers
//   gpushare::all_reduce(me, in, out, loudest{});
//   // rows [mine.begin, mine.end)
//   const auto mine = gpushare::shard_of(rows, me.rank(), me.size());
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gpushare/config.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Types that can be reduced: float and double, the library's 8- and 16-bit numbers, integers of 8
/// to 64 bits.
template <class T>
concept reducible = std::same_as<T, float> || std::same_as<T, double> || detail::is_stored_number<T> ||
    (std::integral<T> && !std::same_as<T, bool> && sizeof(T) <= 8);

namespace detail {

/// Divides one integer or several, rounding towards zero. The number of ranks is a power of two in
/// most cases, and a 64-bit division takes as long as fetching a cache line from memory.
template <class A, std::integral N>
[[gnu::always_inline]] GPUSHARE_HD constexpr void divide(A& a, N n) noexcept {
    if ((n & (n - 1)) != 0) {
        a = a / n;
        return;
    }
    int log = 0;
    while (n >> log != 1) ++log;
    // rounds negative numbers up
    if constexpr (std::is_signed_v<N>)
        a = (a + ((a >> (8 * static_cast<int>(sizeof(N)) - 1)) & (n - 1))) >> log;
    else
        a = a >> log;
}

}  // namespace detail

// The members of an operator. `into` combines numbers and vectors in the place of the first
// argument, so that wide vectors needn't be passed. `wraps`: signed integers are computed as
// unsigned integers, which gives the same bits without undefined overflow. `widest`: integers are
// computed in twice their size or more, so that no sum overflows. `selects`: the result is one of
// the two arguments, so small integers needn't be widened.

/// The sum.
struct sum {
    static constexpr bool wraps = true;     ///< signed integers are computed as unsigned ones
    static constexpr std::uint32_t id = 1;  ///< tells calls with different operators apart
    /// Combines in place, in `a`.
    template <class A>
    [[gnu::always_inline]] GPUSHARE_HD static constexpr void into(A& a, const A& b) noexcept {
        a = a + b;
    }
    /// Combines two numbers.
    template <class A>
    GPUSHARE_HD constexpr A operator()(const A& a, const A& b) const noexcept {
        return a + b;
    }
};

/// The product.
struct product {
    static constexpr bool wraps = true;     ///< signed integers are computed as unsigned ones
    static constexpr std::uint32_t id = 2;  ///< tells calls with different operators apart
    /// Combines in place, in `a`.
    template <class A>
    [[gnu::always_inline]] GPUSHARE_HD static constexpr void into(A& a, const A& b) noexcept {
        a = a * b;
    }
    /// Combines two numbers.
    template <class A>
    GPUSHARE_HD constexpr A operator()(const A& a, const A& b) const noexcept {
        return a * b;
    }
};

/// The smallest; NaN if a rank's element is NaN.
struct minimum {
    static constexpr bool selects = true;   ///< the result is one of the two arguments
    static constexpr std::uint32_t id = 3;  ///< tells calls with different operators apart
    /// Combines in place, in `a`.
    template <class A>
    [[gnu::always_inline]] GPUSHARE_HD static constexpr void into(A& a, const A& b) noexcept {
        a = ((b < a) | (b != b)) ? b : a;
    }
    /// Combines two numbers.
    template <class A>
    GPUSHARE_HD constexpr A operator()(const A& a, const A& b) const noexcept {
        A both = a;
        into(both, b);
        return both;
    }
};

/// The largest; NaN if a rank's element is NaN.
struct maximum {
    static constexpr bool selects = true;   ///< the result is one of the two arguments
    static constexpr std::uint32_t id = 4;  ///< tells calls with different operators apart
    /// Combines in place, in `a`.
    template <class A>
    [[gnu::always_inline]] GPUSHARE_HD static constexpr void into(A& a, const A& b) noexcept {
        a = ((a < b) | (b != b)) ? b : a;
    }
    /// Combines two numbers.
    template <class A>
    GPUSHARE_HD constexpr A operator()(const A& a, const A& b) const noexcept {
        A both = a;
        into(both, b);
        return both;
    }
};

/// The sum divided by the number of ranks. Integers round towards zero, and their sum must fit into
/// 64 bits.
struct average : sum {
    static constexpr bool wraps = false;    ///< integers have a type in which no sum overflows
    static constexpr bool widest = true;    ///< integers are computed in twice their size
    static constexpr std::uint32_t id = 5;  ///< tells calls with different operators apart
    /// Divides the sum in `a` by the number of ranks, once all are combined.
    template <class A, class N>
    [[gnu::always_inline]] GPUSHARE_HD static constexpr void finish_into(A& a, N n) noexcept {
        if constexpr (std::integral<N>)
            detail::divide(a, n);
        else
            a = a / n;
    }
    /// `n` is the number of ranks, as the type that `a` consists of.
    template <class A, class N>
    GPUSHARE_HD constexpr A finish(const A& a, N n) const noexcept {
        A mean = a;
        finish_into(mean, n);
        return mean;
    }
};

namespace detail {

template <class Op>
concept wrapping_op = Op::wraps;
template <class Op>
concept widest_op = Op::widest;
template <class Op>
concept selecting_op = Op::selects;

/// A hash of a type's name: the same in all processes that one compiler built. Two lambdas of one
/// function may have the same hash.
template <class Op>
[[nodiscard]] consteval std::uint32_t hash_of_name() noexcept {
    std::uint32_t mix = 2166136261U;  // FNV-1a
    for (const char c : __PRETTY_FUNCTION__) mix = (mix ^ static_cast<unsigned char>(c)) * 16777619U;
    return mix;
}
template <class Op>
inline constexpr std::uint32_t user_op_id = 0x8000U | (hash_of_name<Op>() >> 17);

/// Tells calls with different operators apart by 16 bits. An operator that declares `id`, as the
/// library's do, has this number; any other operator has a number made from its name.
template <class Op>
[[nodiscard]] GPUSHARE_HD constexpr std::uint32_t op_id() noexcept {
    if constexpr (requires { Op::id; })
        return Op::id;
    else
        return user_op_id<Op>;
}

/// Tells calls with different types apart, by 24 bits. Numbers take 7 bits, so that callers can add
/// bits of their own. All other types, of up to 16 KiB, are told apart by their size alone.
template <class T>
[[nodiscard]] GPUSHARE_HD constexpr std::uint32_t type_id() noexcept {
    if constexpr (is_stored_number<T>) {
        if (std::same_as<T, float16>) return 65;
        if (std::same_as<T, bfloat16>) return 66;
        return std::same_as<T, fp8_e4m3> ? 67 : 68;
    } else if constexpr (std::is_arithmetic_v<T>) {
        return sizeof(T) | (std::is_floating_point_v<T> ? 16U : 0U) | (std::is_signed_v<T> ? 32U : 0U);
    } else {
        return (sizeof(T) & 0x3fffU) << 10;
    }
}

template <class T, class Op>
struct accumulator {
    using type = float;
};
template <class Op>
struct accumulator<double, Op> {
    using type = double;
};
template <std::integral T, class Op>
struct accumulator<T, Op> {
    // 32 bits hold the sum of 16-bit integers of 32768 ranks, and the flags of that many ranks
    // alone would take 256 GiB.
    static constexpr bool wide = sizeof(T) == 8 || (widest_op<Op> && sizeof(T) == 4);
    using signed_type = std::conditional_t<wide, std::int64_t, std::int32_t>;
    using unsigned_type = std::make_unsigned_t<signed_type>;
    using type = std::conditional_t<std::is_unsigned_v<T> || wrapping_op<Op>, unsigned_type, signed_type>;
};

}  // namespace detail

/// The type in which `Op` computes elements of type T: float for floats of up to 32 bits, double
/// for doubles, and integers of 32 or 64 bits for integers.
template <class T, class Op>
using accumulator_t = typename detail::accumulator<T, Op>::type;

/// The elements or rows in [begin, end).
struct element_range {
    std::size_t begin = 0;  ///< the first element
    std::size_t end = 0;    ///< one past the last element
    /// The number of elements.
    [[nodiscard]] GPUSHARE_HD constexpr std::size_t size() const noexcept { return end - begin; }
};

/// Shard `index` of `shards` consecutive parts of `count` elements or rows, cut at multiples of
/// `grain`. Sizes differ by at most one grain, and the last shard may be smaller still, or empty.
/// Rank r keeps shard r of the rows of a sharded result.
[[nodiscard]] GPUSHARE_HD constexpr element_range shard_of(std::size_t count, std::uint32_t index, std::uint32_t shards,
                                                           std::size_t grain = 1) noexcept {
    const std::size_t grains = count / grain + (count % grain != 0 ? 1 : 0);
    const std::size_t each = grains / shards, rest = grains % shards;
    const std::size_t first = index * each + (index < rest ? index : rest);
    const std::size_t begin = first * grain;
    const std::size_t end = begin + (each + (index < rest ? 1 : 0)) * grain;
    return {begin < count ? begin : count, end < count ? end : count};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
