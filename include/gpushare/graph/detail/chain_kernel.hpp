// SPDX-License-Identifier: Apache-2.0
// Chains of element-wise operations and a norm as values, and the one kernel that runs every chain
// by interpreting a list of steps. A thread takes four elements at a time through all steps, in
// registers. The same functor runs on the host, with the same bits.
//
//   chain_kernel k;                                     // chain_steps.hpp makes one of a piece
//   k.steps[0] = {.op = chain_op::load, .from = chain_source::input, .out = 0};
//   stream.launch(k.shape(), k);
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <gpushare/collective/floats.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

inline constexpr std::uint32_t most_chain_steps = 32, most_chain_inputs = 8, most_chain_outputs = 4;
/// Slots for values that later steps read. The value at hand needs no slot.
inline constexpr std::uint32_t chain_slots = 4;
/// Marks a step without a slot or an output.
inline constexpr std::uint8_t chain_nowhere = 0xff;
/// Threads that normalise a row together, so a row's sums don't depend on the grid.
inline constexpr std::uint32_t chain_team = 32;

/// The operation of a step on the value at hand, x, and the step's operand, y. Operations from
/// `negate` on have no operand.
enum class chain_op : std::uint8_t {
    load,           ///< y
    add,            ///< x + y
    subtract,       ///< x - y
    subtract_from,  ///< y - x
    multiply,       ///< x y
    divide,         ///< x / y
    divide_into,    ///< y / x
    smaller,        ///< the smaller operand; x if both are equal; NaN if either is NaN
    smaller_of,     ///< likewise, but y if both are equal, because zeros have signs
    larger,         ///< the larger operand; x if both are equal; NaN if either is NaN
    larger_of,      ///< likewise, but y if both are equal
    negate,
    magnitude,
    square_root,
    exponential,
    reciprocal,
    sigmoid,
    hyperbolic_tangent,
    error_function,
    gelu,          ///< by the error function
    gelu_by_tanh,  ///< by an approximation with tanh
};
/// Where an operand is.
enum class chain_source : std::uint8_t { at_hand, kept, input, number };

/// A step of a chain.
struct chain_step {
    chain_op op = chain_op::load;
    chain_source from = chain_source::at_hand;
    std::uint8_t index = 0;             ///< the index of the slot or of the input
    std::uint8_t keep = chain_nowhere;  ///< a slot that also gets the result
    std::uint8_t out = chain_nowhere;   ///< the output that gets the result
    float number = 0;

    friend bool operator==(const chain_step&, const chain_step&) = default;
};

/// A norm over whole rows; a chain has at most one.
enum class chain_norm : std::uint8_t { none, layer, root_mean_square, softmax };

/// An array that a chain reads. An element of the result has a column and three indices of its row.
/// Strides are in elements; a stride of 0 broadcasts one element along the index.
struct chain_operand {
    const float* data = nullptr;
    std::uint32_t column = 0;     ///< 0 or 1
    std::uint32_t outer[3] = {};  ///< the outermost index first
};

struct tanh_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& x) const noexcept {
        using gpushare::detail::product_of;
        // Taylor's polynomial, for numbers for which the difference below would cancel. The
        // polynomial's relative error is below 6e-8.
        const R square = product_of(x, x);
        R y = product_of(square, R(62.0F / 2835)) + -17.0F / 315;
        y = product_of(y, square) + 2.0F / 15;
        y = product_of(y, square) + -1.0F / 3;
        const R near_zero = product_of(product_of(y, square) + 1.0F, x);
        const R size = gpushare::detail::magnitude_lanes{}(x);
        const R e = gpushare::detail::exp_lanes{}(size + size);
        const R elsewhere = R(1.0F) - gpushare::detail::quotient_of(R(2.0F), e + 1.0F);
        return select(size < 0.3F, near_zero, signed_as(x, elsewhere));
    }
    /// `x`, which isn't negative, with the sign of `sign`.
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD static R signed_as(const R& sign, const R& x) noexcept {
        return select(sign < 0.0F, R(0.0F) - x, x);
    }
};

struct erf_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& x) const noexcept {
        using gpushare::detail::product_of;
        const R square = product_of(x, x), size = gpushare::detail::magnitude_lanes{}(x);
        const R elsewhere = R(1.0F) - product_of(tail(size), gpushare::detail::exp_lanes{}(R(0.0F) - square));
        return select(size < 1.0F, series(x, square), tanh_lanes::signed_as(x, elsewhere));
    }

private:
    /// Taylor's polynomial of degree 21, whose error is below 1.3e-9 for magnitudes up to 1.
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD static R series(const R& x, const R& square) noexcept {
        using gpushare::detail::product_of;
        R y = product_of(square, R(1.0F / 76204800)) + -1.0F / 6894720;
        y = product_of(y, square) + 1.0F / 685440;
        y = product_of(y, square) + -1.0F / 75600;
        y = product_of(y, square) + 1.0F / 9360;
        y = product_of(y, square) + -1.0F / 1320;
        y = product_of(y, square) + 1.0F / 216;
        y = product_of(y, square) + -1.0F / 42;
        y = product_of(y, square) + 1.0F / 10;
        y = product_of(y, square) + -1.0F / 3;
        y = product_of(y, square) + 1.0F;
        return product_of(product_of(y, x), R(1.12837917F));
    }
    /// (1 - erf(x)) e^(x^2), within 1.5e-7 e^(x^2) (Abramowitz and Stegun, 7.1.26).
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD static R tail(const R& size) noexcept {
        using gpushare::detail::product_of;
        const R t = gpushare::detail::quotient_of(R(1.0F), product_of(size, R(0.3275911F)) + 1.0F);
        R y = product_of(t, R(1.061405429F)) + -1.453152027F;
        y = product_of(y, t) + 1.421413741F;
        y = product_of(y, t) + -0.284496736F;
        y = product_of(y, t) + 0.254829592F;
        return product_of(y, t);
    }
};

/// One operation, on as many elements as V has.
template <class V>
[[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V applied(chain_op op, const V& x, const V& y) noexcept {
    switch (op) {
        case chain_op::load: return y;
        case chain_op::add: return x + y;
        case chain_op::subtract: return x - y;
        case chain_op::subtract_from: return y - x;
        case chain_op::multiply: return x * y;
        case chain_op::divide: return x / y;
        case chain_op::divide_into: return y / x;
        case chain_op::smaller: return min(x, y);
        case chain_op::smaller_of: return min(y, x);
        case chain_op::larger: return max(x, y);
        case chain_op::larger_of: return max(y, x);
        case chain_op::negate: return x * -1.0F;
        case chain_op::magnitude: return abs(x);
        case chain_op::square_root: return x.each([](float one) { return std::sqrt(one); });
        case chain_op::exponential: return exp(x);
        case chain_op::reciprocal: return V(1.0F) / x;
        case chain_op::sigmoid: return V(1.0F) / (exp(x * -1.0F) + 1.0F);
        case chain_op::hyperbolic_tangent: return V::map(tanh_lanes{}, x);
        case chain_op::error_function: return V::map(erf_lanes{}, x);
        case chain_op::gelu: return x * 0.5F * (V::map(erf_lanes{}, x * 0.70710678F) + 1.0F);
        case chain_op::gelu_by_tanh: return x / (exp(x * (x * x * 0.044715F + 1.0F) * -1.59576912F) + 1.0F);
    }
    return x;
}

/// A norm's statistics of a row. Each pass over the row adds to them.
struct chain_row {
    chain_norm norm;
    float epsilon;
    float width;                  ///< the number of elements of the row
    float shift = 0, factor = 1;  ///< subtracted from elements; their factor, or Softmax's divisor

    /// The number of passes before elements can be normalised.
    [[nodiscard]] GPUSHARE_HD std::uint32_t passes() const noexcept {
        return norm == chain_norm::root_mean_square ? 1 : 2;
    }
    /// Whether a pass finds the maximum rather than a sum.
    [[nodiscard]] GPUSHARE_HD bool finds_largest(std::uint32_t pass) const noexcept {
        return norm == chain_norm::softmax && pass == 0;
    }
    /// The term that a pass combines.
    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V looked_at(std::uint32_t pass, const V& x) const noexcept {
        if (norm == chain_norm::root_mean_square) return x * x;
        if (pass == 0) return x;
        const V y = x - shift;
        return norm == chain_norm::softmax ? exp(y) : y * y;
    }
    /// Ends a pass with its result.
    GPUSHARE_HD void learn(std::uint32_t pass, float total) noexcept {
        if (norm == chain_norm::softmax) {
            (pass == 0 ? shift : factor) = total;
            return;
        }
        const float mean = gpushare::detail::quotient_of(total, width);
        if (norm == chain_norm::layer && pass == 0)
            shift = mean;
        else
            factor = gpushare::detail::quotient_of(1.0F, std::sqrt(mean + epsilon));
    }
    /// A normalised element, once all passes are done.
    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V normalised(const V& x) const noexcept {
        return norm == chain_norm::softmax ? exp(x - shift) / V(factor) : (x - shift) * factor;
    }
};

/// The kernel. On a device, its number of threads is a multiple of 32. No output may share a byte
/// with an input, because a later pass reads the inputs again. device_chains.hpp refuses such
/// outputs.
struct chain_kernel {
    chain_step steps[most_chain_steps] = {};
    chain_operand inputs[most_chain_inputs] = {};
    float* outputs[most_chain_outputs] = {};
    std::uint32_t count = 0;              ///< the number of steps
    std::uint32_t norm_at = 0;            ///< the number of steps before the norm
    chain_norm norm = chain_norm::none;   ///< the norm over the columns
    float epsilon = 0;                    ///< the norm's epsilon
    std::uint32_t rows = 0, width = 0;    ///< of the result; rows * width below 2^31
    std::uint32_t middle = 1, inner = 1;  ///< the extents of the two inner indices of a row

    [[nodiscard]] constexpr grid shape() const noexcept {
        constexpr std::uint32_t most = 1024, threads = 256, rows_of_block = 4;
        const std::uint32_t vectors = rows * ((width + lanes - 1) / lanes);
        const bool by_rows = norm != chain_norm::none;
        const std::uint32_t work = by_rows ? rows : vectors, each = by_rows ? rows_of_block : threads;
        const std::uint32_t blocks = work / each + (work % each != 0 ? 1 : 0);
        return {.blocks = blocks < most ? blocks : most,
                .threads = by_rows ? rows_of_block * chain_team : threads,
                .hold = {}};
    }

    GPUSHARE_EXEC_CHECK_DISABLE
    template <kernel_context C>
    GPUSHARE_HD void operator()(C& ctx) const noexcept {
        if (norm == chain_norm::none)
            run_elements(ctx);
        else
            run_rows(ctx);
    }

private:
    static constexpr std::uint32_t lanes = 4;
    using values = floats<lanes>;

    /// A few elements between steps.
    struct state {
        values x{0.0F};
        values kept[chain_slots] = {values{0.0F}, values{0.0F}, values{0.0F}, values{0.0F}};
    };
    /// The place of these elements.
    struct position {
        std::uint32_t outer[3];
        std::uint32_t column, count;
        std::size_t at;  // the offset of the first element in the outputs
    };
    [[nodiscard]] GPUSHARE_HD position position_of(std::uint32_t row, std::uint32_t column) const noexcept {
        position p{
            {0, 0, row}, column, width - column < lanes ? width - column : lanes, std::size_t{row} * width + column};
        if (inner != rows) {
            p.outer[2] = row % inner;
            p.outer[1] = row / inner % middle;
            p.outer[0] = row / inner / middle;
        }
        return p;
    }

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void run_elements(C& ctx) const noexcept {
        const std::uint32_t of_row = (width + lanes - 1) / lanes;
        const std::size_t all = std::size_t{rows} * of_row, step = std::size_t{ctx.num_blocks()} * ctx.num_threads();
        for (std::size_t v = std::size_t{ctx.block_rank()} * ctx.num_threads() + ctx.thread_rank(); v < all;
             v += step) {
            const auto vector = static_cast<std::uint32_t>(v);
            const std::uint32_t row = rows == 1 ? 0 : vector / of_row;
            state s;
            run(s, 0, count, position_of(row, (vector - row * of_row) * lanes));
        }
    }

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void run_rows(C& ctx) const noexcept {
#ifdef __CUDA_ARCH__
        const std::uint32_t teams = ctx.num_threads() / chain_team, mine = ctx.thread_rank() / chain_team;
        if (mine >= teams) return;
#else
        constexpr std::uint32_t teams = 1, mine = 0;
#endif
        const std::size_t step = std::size_t{ctx.num_blocks()} * teams;
        for (std::size_t row = std::size_t{ctx.block_rank()} * teams + mine; row < rows; row += step)
            run_row(static_cast<std::uint32_t>(row));
    }

    /// Normalises a row by a team of threads. Each thread has every 32nd vector. On a host, one
    /// thread does the work of the whole team.
    GPUSHARE_HD void run_row(std::uint32_t row) const noexcept {
        chain_row known{norm, epsilon, static_cast<float>(width)};
        const std::uint32_t passes = known.passes();
#ifdef __CUDA_ARCH__
        state s;
        for (std::uint32_t pass = 0; pass <= passes; ++pass) {
            float total = pass_of(threadIdx.x % chain_team, row, pass, known, s);
            for (std::uint32_t by = chain_team / 2; by != 0; by /= 2)
                total = combined(known.finds_largest(pass), total, __shfl_xor_sync(~0U, total, static_cast<int>(by)));
            if (pass != passes) known.learn(pass, total);
        }
#else
        for (std::uint32_t pass = 0; pass <= passes; ++pass) {
            float total[chain_team];
            for (std::uint32_t lane = 0; lane < chain_team; ++lane) {
                state s;
                total[lane] = pass_of(lane, row, pass, known, s);
            }
            for (std::uint32_t by = chain_team / 2; by != 0; by /= 2)
                for (std::uint32_t lane = 0; lane < by; ++lane)
                    total[lane] = combined(known.finds_largest(pass), total[lane], total[lane + by]);
            if (pass != passes) known.learn(pass, total[0]);
        }
#endif
    }
    /// One thread's part of a pass. The last pass writes the results.
    GPUSHARE_FLAT GPUSHARE_HD float pass_of(std::uint32_t lane, std::uint32_t row, std::uint32_t pass,
                                            const chain_row& known, state& s) const noexcept {
        const bool largest = known.finds_largest(pass), last = pass == known.passes();
        const float none = largest ? -__builtin_huge_valf() : 0.0F;
        values all(none);
        for (std::uint32_t column = lane * lanes; column < width; column += chain_team * lanes) {
            const position at = position_of(row, column);
            // A short row stays in registers from pass to pass. For a longer row, each pass runs
            // the first steps again and stores the same values.
            if (pass == 0 || !stays()) run(s, 0, norm_at, at);
            if (last) {
                s.x = known.normalised(s.x);
                run(s, norm_at, count, at);
                continue;
            }
            values x = known.looked_at(pass, s.x);
            if (at.count != lanes) x = x.first(at.count, none);
            all = largest ? max(all, x) : all + x;
        }
        return largest ? all.folded(gpushare::detail::larger_lanes{}) : all.folded(gpushare::detail::plus_lanes{});
    }
    [[nodiscard]] GPUSHARE_HD bool stays() const noexcept {
#ifdef __CUDA_ARCH__
        return width <= chain_team * lanes;
#else
        return false;  // one thread has the whole team's vectors
#endif
    }
    [[nodiscard]] GPUSHARE_HD static float combined(bool largest, float a, float b) noexcept {
        return largest ? gpushare::detail::larger_lanes{}(a, b) : a + b;
    }

    /// Runs the steps in [first, behind).
    GPUSHARE_FLAT GPUSHARE_HD void run(state& s, std::uint32_t first, std::uint32_t behind,
                                       const position& at) const noexcept {
        for (std::uint32_t i = first; i < behind; ++i) {
            const chain_step& step = steps[i];
            s.x = applied(step.op, s.x, operand(s, step, at));
            // With a variable index, the compiler would move the array from registers to memory.
            if (step.keep != chain_nowhere) {
                if (step.keep == 0) s.kept[0] = s.x;
                if (step.keep == 1) s.kept[1] = s.x;
                if (step.keep == 2) s.kept[2] = s.x;
                if (step.keep == 3) s.kept[3] = s.x;
            }
            if (step.out != chain_nowhere) store_floats(outputs[step.out] + at.at, s.x, at.count);
        }
    }
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD values operand(const state& s, const chain_step& step,
                                                           const position& at) const noexcept {
        if (step.from == chain_source::number) return values(step.number);
        if (step.from == chain_source::input) return loaded(inputs[step.index], at);
        if (step.from == chain_source::at_hand) return s.x;
        if (step.index == 0) return s.kept[0];
        if (step.index == 1) return s.kept[1];
        return step.index == 2 ? s.kept[2] : s.kept[3];
    }
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD static values loaded(const chain_operand& from,
                                                                 const position& at) noexcept {
        const float* const row =
            from.data + (std::size_t{from.outer[0]} * at.outer[0] + std::size_t{from.outer[1]} * at.outer[1] +
                         std::size_t{from.outer[2]} * at.outer[2]);
        if (from.column == 0) return values(*row);
        return load_floats<values>(row + at.column, at.count);
    }
    static_assert(chain_slots == 4);
};

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
