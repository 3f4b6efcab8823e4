// SPDX-License-Identifier: Apache-2.0
// Epilogues: fused stages give the bits of the same stages run one after the other, each in a pass
// over memory, for any number of ranks and whichever rank reduces a piece; and each stage computes
// its formula.
#include <algorithm>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include <gpushare/backend/host/kernel_context.hpp>
#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/epilogue_stages.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace epilogue_test {

namespace gs = gpushare;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float lost = std::numeric_limits<float>::quiet_NaN();

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }
std::uint32_t bits(std::int8_t x) { return static_cast<std::uint8_t>(x); }
template <int E, int M>
std::uint32_t bits(gs::stored_number<E, M> x) {
    return x.bits();
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
    return std::ranges::equal(a, b, [](T x, T y) { return bits(x) == bits(y); });
}

/// Numbers of some sizes, both signs.
template <class T = float>
std::vector<T> some_numbers(std::size_t n, std::uint64_t seed) {
    support::random any(seed);
    std::vector<T> values(n);
    for (T& x : values) {
        const float mantissa = static_cast<float>(any.below(1 << 20)) / (1 << 19) - 1;
        x = T{std::ldexp(mantissa, static_cast<int>(any.below(8)) - 4)};
    }
    return values;
}

/// What R ranks brought, added up as they come.
struct reduced {
    std::span<const std::vector<float>> of;

    template <class V>
    V load(const gs::place& at) const {
        const std::size_t i = at.row * at.width + at.column;
        auto x = gs::load_floats<V>(of[0].data() + i, at.count);
        for (std::size_t r = 1; r < of.size(); ++r) x = x + gs::load_floats<V>(of[r].data() + i, at.count);
        return x;
    }
};

template <class E>
void apply(const E& e, const gs::row_range& range, const auto& source) {
    gs::host::kernel_context ctx;
    std::vector<float> scratch(range.width);
    gs::apply_rows(ctx, e, range, source, scratch.data());
}

/// One stage alone, from memory to memory.
template <class Stage>
std::vector<float> pass(const std::vector<float>& in, std::size_t width, const Stage& stage) {
    std::vector<float> out(in.size());
    apply(stage | gs::into(out.data()), {.rows = width == 0 ? 0 : in.size() / width, .width = width},
          gs::from_rows(in.data()));
    return out;
}

/// A block of several threads, each with a context of its own.
class block {
public:
    class context {
    public:
        context(block& b, std::uint32_t thread) : block_(b), thread_(thread) {}
        [[nodiscard]] std::uint32_t block_rank() const noexcept { return 0; }
        [[nodiscard]] std::uint32_t num_blocks() const noexcept { return 1; }
        [[nodiscard]] std::uint32_t thread_rank() const noexcept { return thread_; }
        [[nodiscard]] std::uint32_t num_threads() const noexcept {
            return static_cast<std::uint32_t>(block_.words_.size());
        }
        void sync() noexcept { block_.meeting_.arrive_and_wait(); }
        void backoff(std::uint32_t) noexcept {}
        [[nodiscard]] std::int64_t now() const noexcept { return 0; }
        template <class Op>
        [[nodiscard]] float reduce(float x, Op op) noexcept {
            block_.words_[thread_] = x;
            sync();
            float all = block_.words_[0];
            for (std::size_t t = 1; t < block_.words_.size(); ++t) all = op(all, block_.words_[t]);
            sync();
            return all;
        }

    private:
        block& block_;
        std::uint32_t thread_;
    };

    explicit block(std::uint32_t threads) : words_(threads), meeting_(threads) {}

    void run(auto kernel) {
        std::vector<std::jthread> threads;
        for (std::uint32_t t = 0; t < words_.size(); ++t)
            threads.emplace_back([this, t, &kernel] {
                context ctx(*this, t);
                kernel(ctx);
            });
    }

private:
    std::vector<float> words_;
    std::barrier<> meeting_;
};
static_assert(gs::kernel_context<block::context>);

struct layer {
    std::size_t rows, width;
    std::vector<std::vector<float>> in;  // of each rank
    std::vector<gs::bfloat16> residual;
    std::vector<float> weight;

    layer(std::size_t n, std::size_t columns, std::size_t ranks, std::uint64_t seed)
        : rows(n),
          width(columns),
          residual(some_numbers<gs::bfloat16>(n * columns, seed)),
          weight(some_numbers(columns, seed + 1)) {
        for (std::size_t r = 0; r < ranks; ++r) in.push_back(some_numbers(n * columns, seed + 2 + r));
    }
};

/// What a rank gets of a layer.
struct results {
    std::vector<float> sums, scales, maxima;
    std::vector<gs::bfloat16> normed;
    std::vector<std::int8_t> quantised;

    explicit results(const layer& l)
        : sums(l.rows * l.width, 77),
          scales(l.rows, 77),
          maxima(l.rows, 77),
          normed(l.rows * l.width, gs::bfloat16{77.0F}),
          quantised(l.rows * l.width, 77) {}
    bool operator==(const results& other) const {
        return same_bits(sums, other.sums) && same_bits(scales, other.scales) && same_bits(maxima, other.maxima) &&
               same_bits(normed, other.normed) && same_bits(quantised, other.quantised);
    }
};

auto finish_of(const layer& l, results& out) {
    return gs::add(l.residual.data()) | gs::into(out.sums.data()) | gs::rms_norm(l.weight.data(), 1e-6F) |
           gs::row_maxima(out.maxima.data()) | gs::cast<gs::bfloat16>() | gs::into(out.normed.data()) |
           gs::quantise<std::int8_t>(out.scales) | gs::into(out.quantised);
}

/// The same, each step a pass over memory.
results unfused(const layer& l) {
    results out(l);
    std::vector<float> x(l.rows * l.width);
    apply(gs::epilogue<>{} | gs::into(x.data()), {.rows = l.rows, .width = l.width}, reduced{l.in});
    x = pass(x, l.width, gs::add(l.residual.data()));
    out.sums = x;
    x = pass(x, l.width, gs::rms_norm(l.weight.data(), 1e-6F));
    for (std::size_t r = 0; r < l.rows; ++r) {
        out.maxima[r] = 0;
        for (std::size_t c = 0; c < l.width; ++c)
            out.maxima[r] = std::fmax(out.maxima[r], std::fabs(x[r * l.width + c]));
    }
    for (std::size_t i = 0; i < x.size(); ++i) {
        out.normed[i] = gs::bfloat16{x[i]};
        x[i] = static_cast<float>(out.normed[i]);
    }
    for (std::size_t r = 0; r < l.rows; ++r) {
        float largest = 0;
        for (std::size_t c = 0; c < l.width; ++c) largest = std::fmax(largest, std::fabs(x[r * l.width + c]));
        out.scales[r] = std::fmax(largest / 127, std::numeric_limits<float>::min());
        const float inverse = 1 / out.scales[r];
        for (std::size_t c = 0; c < l.width; ++c)
            out.quantised[r * l.width + c] = static_cast<std::int8_t>(std::nearbyint(x[r * l.width + c] * inverse));
    }
    return out;
}

}  // namespace

TEST_CASE("a fused epilogue has the bits of its stages one by one, at any width") {
    const auto seed = support::seed(1);
    CAPTURE(seed);
    for (std::size_t width = 1; width <= 100; ++width) {
        CAPTURE(width);
        const layer l(3, width, 2, seed + 10 * width);
        results out(l);
        apply(finish_of(l, out), {.rows = l.rows, .width = l.width}, reduced{l.in});
        REQUIRE(out == unfused(l));
    }
    for (const std::size_t width : {1023U, 1024U, 4095U, 4096U, 4097U}) {
        const layer l(2, width, 3, seed + width);
        results out(l);
        apply(finish_of(l, out), {.rows = l.rows, .width = l.width, .streams = true}, reduced{l.in});
        REQUIRE(out == unfused(l));
    }
}

TEST_CASE("bits depend neither on the number of ranks nor on who reduces what") {
    const auto seed = support::seed(2);
    CAPTURE(seed);
    support::random any(seed);
    const layer l(13, 61, 4, seed);
    const results expected = unfused(l);
    for (std::uint32_t ranks = 1; ranks <= 7; ++ranks) {
        CAPTURE(ranks);
        std::vector<results> out(ranks, results(l));
        using finish = decltype(finish_of(l, out[0]));
        std::vector<finish> finishes;
        for (results& o : out) finishes.push_back(finish_of(l, o));
        std::vector<void*> arrays(ranks * finish::sharing);
        for (std::uint32_t r = 0; r < ranks; ++r) finishes[r].collect(arrays.data() + r * finish::sharing);
        for (std::size_t row = 0; row < l.rows;) {
            const std::size_t n = std::min<std::size_t>(1 + any.below(4), l.rows - row);
            const std::size_t who = any.below(ranks);
            gs::host::kernel_context ctx;
            std::vector<float> scratch(l.width);
            gs::apply_rows(ctx, finishes[who], {.first = row, .rows = n, .width = l.width, .streams = any.one_in(2)},
                           reduced{l.in}, scratch.data(), gs::shared_outputs{arrays.data(), ranks, finish::sharing});
            row += n;
        }
        for (const results& o : out) REQUIRE(o == expected);
    }
}

TEST_CASE("a shard stays with the rank that reduces it, and counts from its first row") {
    const std::size_t width = 20, rows = 5, first = 2;
    const layer l(rows, width, 2, support::seed(3));
    std::vector<float> shard_sums(2 * width, 77), other_sums(2 * width, 77), scales(2, 77);
    std::vector<gs::fp8_e4m3> mine(rows * width), other(rows * width);
    const auto finish = [&](std::vector<float>& sums, std::vector<gs::fp8_e4m3>& out) {
        return gs::add(gs::shard(l.residual.data())) | gs::into(gs::shard(sums.data())) |
               gs::row_maxima(gs::shard(scales.data())) | gs::cast<float>() | gs::into(out.data());
    };
    const auto a = finish(shard_sums, mine), b = finish(other_sums, other);
    STATIC_REQUIRE(decltype(a)::sharing == 1);
    void* arrays[2];
    a.collect(arrays);
    b.collect(arrays + 1);
    gs::host::kernel_context ctx;
    std::vector<float> scratch(width);
    gs::apply_rows(ctx, a, {.first = first, .rows = 2, .width = width, .shard_first = first}, reduced{l.in},
                   scratch.data(), gs::shared_outputs{arrays, 2, 1});
    for (std::size_t i = 0; i < 2 * width; ++i) {
        const std::size_t of_all = first * width + i;
        REQUIRE(shard_sums[i] == l.in[0][of_all] + l.in[1][of_all] + static_cast<float>(l.residual[i]));
        REQUIRE(other_sums[i] == 77);
        REQUIRE(bits(mine[of_all]) == bits(gs::fp8_e4m3{shard_sums[i]}));
        REQUIRE(bits(other[of_all]) == bits(mine[of_all]));
    }
    for (std::size_t r = 0; r < 2; ++r) {
        float largest = 0;
        for (std::size_t c = 0; c < width; ++c) largest = std::fmax(largest, std::fabs(shard_sums[r * width + c]));
        REQUIRE(scales[r] == largest);
    }
    REQUIRE(bits(mine[0]) == 0);  // another rank's row
}

TEST_CASE("rows may lie apart and at any address") {
    const std::size_t width = 37, rows = 4, pitch = 41;
    const auto in = some_numbers(rows * pitch + 1, support::seed(4));
    const auto residual = some_numbers<gs::float16>(rows * pitch + 1, support::seed(5));
    std::vector<gs::bfloat16> out(rows * pitch + 1, gs::bfloat16{77.0F});
    for (const bool streams : {false, true}) {
        apply(gs::add(gs::rows(residual.data() + 1, pitch)) | gs::into(gs::rows(out.data() + 1, pitch)),
              {.rows = rows, .width = width, .streams = streams}, gs::from_rows(in.data() + 1, pitch));
        for (std::size_t r = 0; r < rows; ++r)
            for (std::size_t c = 0; c < pitch && r * pitch + c + 1 < out.size(); ++c) {
                const std::size_t i = r * pitch + c + 1;
                const float expected = c < width ? in[i] + static_cast<float>(residual[i]) : 77;
                REQUIRE(bits(out[i]) == bits(gs::bfloat16{expected}));
            }
    }
}

TEST_CASE("stages without rows take any range of elements") {
    const std::size_t width = 23, rows = 7;
    const auto in = some_numbers(rows * width, support::seed(6)), bias = some_numbers(width, support::seed(7)),
               residual = some_numbers(rows * width, support::seed(8));
    const auto finish = [&](std::vector<float>& out) {
        return gs::bias(bias.data()) | gs::silu() | gs::add(residual.data()) | gs::scale(0.3F) | gs::into(out.data());
    };
    std::vector<float> whole(in.size());
    apply(finish(whole), {.rows = rows, .width = width}, gs::from_rows(in.data()));
    gs::host::kernel_context ctx;
    for (std::size_t first = 0; first <= in.size(); ++first)
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, width - 1, width, 3 * width + 5, in.size()}) {
            if (first + count > in.size()) continue;
            CAPTURE(first, count);
            std::vector<float> out(in.size(), 77), expected(in.size(), 77);
            std::copy_n(whole.begin() + static_cast<std::ptrdiff_t>(first), count,
                        expected.begin() + static_cast<std::ptrdiff_t>(first));
            gs::apply_elements(ctx, finish(out), {.width = width}, first, count, gs::from_rows(in.data()));
            REQUIRE(same_bits(out, expected));
        }
}

TEST_CASE("a chain without a collective has the same bits for any number of blocks and threads") {
    for (const std::size_t width : {std::size_t{1}, std::size_t{23}, std::size_t{640}})
        for (const std::size_t rows : {std::size_t{0}, std::size_t{1}, std::size_t{7}}) {
            CAPTURE(width, rows);
            const auto in = some_numbers<gs::bfloat16>(rows * width, support::seed(6));
            const auto bias = some_numbers(width, support::seed(7)),
                       residual = some_numbers(rows * width, support::seed(8));
            const auto chain = [&](std::vector<float>& out) {
                return gs::elements(in, width) | gs::bias(bias.data()) | gs::silu() |
                       (gs::add(residual.data()) | gs::into(out.data()));
            };
            std::vector<float> wide(in.size()), expected;
            apply(gs::into(wide.data()) | gs::scale(1), {.rows = rows, .width = width}, gs::from_rows(in.data()));
            expected = pass(pass(pass(wide, width, gs::bias(bias.data())), width, gs::silu()), width,
                            gs::add(residual.data()));
            for (const std::uint32_t blocks : {1U, 2U, 3U, 16U}) {
                std::vector<float> out(in.size());
                for (std::uint32_t b = 0; b < blocks; ++b) {
                    gs::host::kernel_context ctx(b, blocks, 0, nullptr, gs::host::detail::never_lost);
                    chain(out)(ctx);
                }
                REQUIRE(same_bits(out, expected));
            }
            std::vector<float> out(in.size());
            block(3).run(chain(out));
            REQUIRE(same_bits(out, expected));
            REQUIRE(gs::elements(in).width == std::max(in.size(), std::size_t{1}));
        }
}

TEST_CASE("several threads share a row") {
    const auto seed = support::seed(9);
    CAPTURE(seed);
    for (const std::uint32_t threads : {2U, 3U})
        for (const std::size_t width : {1U, 7U, 64U, 333U}) {
            CAPTURE(threads, width);
            // Small integers: sums are exact in any order.
            layer l(3, width, 2, seed);
            for (auto& in : l.in)
                for (float& x : in) x = std::round(4 * x);
            for (gs::bfloat16& x : l.residual) x = gs::bfloat16{std::round(static_cast<float>(x))};
            results out(l);
            std::vector<float> scratch(width);
            const auto finish = finish_of(l, out);
            block(threads).run([&](auto& ctx) {
                gs::apply_rows(ctx, finish, {.rows = l.rows, .width = width}, reduced{l.in}, scratch.data());
            });
            REQUIRE(out == unfused(l));
        }
}

TEST_CASE("activations are what they are called") {
    auto in = some_numbers(999, support::seed(10));
    in.insert(in.end(), {0.0F, -0.0F, 100.0F, -100.0F, infinity, lost, 1e30F, -1e30F, 1e-30F});
    const auto relu = pass(in, in.size(), gs::relu()), silu = pass(in, in.size(), gs::silu()),
               gelu = pass(in, in.size(), gs::gelu_tanh()),
               user = pass(in, in.size(), gs::map([](float x) { return std::cbrt(x); }));
    for (std::size_t i = 0; i < in.size(); ++i) {
        CAPTURE(in[i]);
        if (std::isnan(in[i])) {
            REQUIRE((std::isnan(relu[i]) && std::isnan(silu[i]) && std::isnan(gelu[i])));
            continue;
        }
        const double x = in[i];
        REQUIRE(relu[i] == std::fmax(in[i], 0.0F));
        REQUIRE(user[i] == std::cbrt(in[i]));
        if (std::isinf(in[i])) {
            REQUIRE((silu[i] == infinity && gelu[i] == infinity));
            continue;
        }
        REQUIRE(std::fabs(silu[i] - x / (1 + std::exp(-x))) <= 4e-7 * std::fabs(x));
        const double u = std::sqrt(2 / 3.14159265358979324) * (x + 0.044715 * x * x * x);
        REQUIRE(std::fabs(gelu[i] - x * 0.5 * (1 + std::tanh(u))) <= 1e-6 * std::fabs(x));
    }
}

TEMPLATE_TEST_CASE("norms are what they are called", "", float, gs::bfloat16) {
    const std::size_t width = 333, rows = 3;
    auto in = some_numbers(rows * width, support::seed(11));
    for (std::size_t c = 0; c < width; ++c) in[c] += 1000;  // a large mean beside a small variance
    const auto weight = some_numbers<TestType>(width, support::seed(12)),
               offset = some_numbers<TestType>(width, support::seed(13));
    const auto rms = pass(in, width, gs::rms_norm(weight, 1e-5F)), plain_rms = pass(in, width, gs::rms_norm(1e-5F)),
               full = pass(in, width, gs::layer_norm(weight, offset, 1e-5F)),
               plain = pass(in, width, gs::layer_norm(1e-5F));
    for (std::size_t r = 0; r < rows; ++r) {
        double squares = 0, sum = 0, variance = 0;
        for (std::size_t c = 0; c < width; ++c) {
            const double x = in[r * width + c];
            squares += x * x;
            sum += x;
        }
        for (std::size_t c = 0; c < width; ++c) variance += std::pow(in[r * width + c] - sum / width, 2);
        for (std::size_t c = 0; c < width; ++c) {
            const std::size_t i = r * width + c;
            const double w = static_cast<float>(weight[c]), o = static_cast<float>(offset[c]);
            const double by_rms = in[i] / std::sqrt(squares / width + 1e-5),
                         normal = (in[i] - sum / width) / std::sqrt(variance / width + 1e-5);
            CAPTURE(r, c);
            REQUIRE(rms[i] == Approx(by_rms * w).epsilon(1e-5).margin(1e-9));
            REQUIRE(plain_rms[i] == Approx(by_rms).epsilon(1e-5).margin(1e-9));
            REQUIRE(plain[i] == Approx(normal).epsilon(1e-4).margin(1e-4));
            REQUIRE(full[i] == Approx(normal * w + o).epsilon(1e-4).margin(1e-3));
        }
    }
}

TEST_CASE("a row is added up in lanes and then as a tree") {
    // Sixteen lanes, each in rising order of its columns: in another order these sums round
    // differently.
    const std::size_t width = 200;
    const auto in = some_numbers(width, support::seed(14));
    std::vector<float> lane(16);
    for (std::size_t c = 0; c < width; ++c) {
        volatile float square = in[c] * in[c];
        lane[c % 16] += square;
    }
    for (std::size_t half = 8; half != 0; half /= 2)
        for (std::size_t i = 0; i < half; ++i) lane[i] += lane[i + half];
    const float inverse = 1 / std::sqrt(lane[0] / width + 1e-6F);
    const auto out = pass(in, width, gs::rms_norm(1e-6F));
    for (std::size_t c = 0; c < width; ++c) REQUIRE(bits(out[c]) == bits(in[c] * inverse));
}

TEMPLATE_TEST_CASE("quantised by given scales", "", std::int8_t, gs::fp8_e4m3, gs::fp8_e5m2) {
    const std::size_t width = 50, rows = 4;
    const auto in = some_numbers(rows * width, support::seed(15));
    std::vector<TestType> by_one(in.size()), by_row(in.size()), by_shard(in.size());
    const std::vector<float> scales{0.5F, 0.01F, 1e-30F, 3.0F};
    apply(gs::epilogue<>{} | gs::quantise<TestType>(0.03F) | gs::into(by_one), {.rows = rows, .width = width},
          gs::from_rows(in.data()));
    apply(gs::epilogue<>{} | gs::quantise<TestType>(gs::given_scales(scales)) | gs::into(by_row),
          {.rows = rows, .width = width}, gs::from_rows(in.data()));
    apply(gs::epilogue<>{} | gs::quantise<TestType>(gs::given_scales(gs::shard(scales.data()))) |
              gs::into(gs::shard(by_shard.data())),
          {.first = 1, .rows = 2, .width = width, .shard_first = 1}, gs::from_rows(in.data()));
    const auto expected = [](float x, float scale) {
        const float y = x * (1 / scale);
        if constexpr (std::same_as<TestType, std::int8_t>)
            return static_cast<std::int8_t>(std::nearbyint(std::fmin(std::fmax(y, -127.0F), 127.0F)));
        else
            return TestType{y};
    };
    for (std::size_t i = 0; i < in.size(); ++i) {
        CAPTURE(i, in[i]);
        REQUIRE(bits(by_one[i]) == bits(expected(in[i], 0.03F)));
        REQUIRE(bits(by_row[i]) == bits(expected(in[i], scales[i / width])));
        if (i < 2 * width) REQUIRE(bits(by_shard[i]) == bits(expected(in[i + width], scales[i / width])));
    }
}

TEMPLATE_TEST_CASE("quantised by the row's own scale", "", std::int8_t, gs::fp8_e4m3, gs::fp8_e5m2) {
    const std::size_t width = 65, rows = 5;
    auto in = some_numbers(rows * width, support::seed(16));
    std::fill_n(in.begin() + width, width, 0.0F);        // zeros
    std::fill_n(in.begin() + 2 * width, width, 1e-44F);  // too small for a scale
    in[3 * width + 64] = lost;
    in[4 * width] = -1e30F;
    std::vector<TestType> q(in.size());
    std::vector<float> scales(rows);
    apply(gs::epilogue<>{} | gs::quantise<TestType>(scales) | gs::into(q), {.rows = rows, .width = width},
          gs::from_rows(in.data()));
    const float most = gs::largest_quantum<TestType>();
    REQUIRE(scales[1] == std::numeric_limits<float>::min());
    REQUIRE(scales[2] == std::numeric_limits<float>::min());
    REQUIRE(std::isnan(scales[3]));
    REQUIRE(scales[4] == 1e30F / most);
    REQUIRE(static_cast<float>(q[4 * width]) == -most);
    for (std::size_t c = 0; c < width; ++c) {
        REQUIRE(static_cast<float>(q[width + c]) == 0);
        REQUIRE(std::isfinite(static_cast<float>(q[2 * width + c])));
    }
    float largest = 0;
    for (std::size_t c = 0; c < width; ++c) largest = std::fmax(largest, std::fabs(static_cast<float>(q[c])));
    REQUIRE(largest == most);  // the largest of the row uses the whole range
}

namespace {

struct squared {
    template <class V>
    V operator()(const V& x, const gs::place&) const {
        return x * x;
    }
};

/// Writes the sum of a few elements, one by one.
struct counted {
    double* total;
    template <class V>
    void store(const V& x, const gs::place& at) const {
        float lanes[V::lanes];
        gs::store_floats(lanes, x);
        for (std::uint32_t i = 0; i < at.count; ++i) *total += lanes[i];
    }
};

/// Divides by the row's largest magnitude.
struct by_largest {
    using combine = gs::row_max;
    static constexpr std::uint32_t looks = 1;
    struct learnt {
        float largest;
    };
    template <std::uint32_t, class V>
    V measure(const V& x, const gs::place&, const learnt&) const {
        return abs(x);
    }
    void learn(std::uint32_t, float largest, const gs::place&, learnt& known) const { known.largest = largest; }
    template <class V>
    V apply(const V& x, const gs::place&, const learnt& known) const {
        return x / known.largest;
    }
};

}  // namespace

TEST_CASE("users write stages, sinks and row stages") {
    static_assert(gs::element_stage<squared> && gs::sink_stage<counted> && gs::row_stage<by_largest>);
    static_assert(!decltype(gs::epilogue<>{} | squared{} | counted{})::whole_rows);
    static_assert(decltype(squared{} | gs::epilogue<>{} | by_largest{})::whole_rows);
    const std::size_t width = 21;
    std::vector<float> in(2 * width), out(2 * width);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i) - 20;
    double total = 0;
    apply(gs::epilogue<>{} | squared{} | counted{&total} | by_largest{} | gs::into(out.data()),
          {.rows = 2, .width = width}, gs::from_rows(in.data()));
    double expected = 0;
    for (std::size_t i = 0; i < in.size(); ++i) {
        expected += in[i] * in[i];
        REQUIRE(out[i] == in[i] * in[i] / (i < width ? 400.0F : 441.0F));
    }
    REQUIRE(total == expected);
}

TEST_CASE("casting rounds what comes behind it") {
    const auto in = some_numbers(100, support::seed(17));
    std::vector<float> rounded(100), doubled(100);
    std::vector<gs::bfloat16> stored(100), again(100);
    apply(gs::cast<gs::bfloat16>() | gs::into(rounded.data()) | gs::into(stored.data()), {.rows = 1, .width = 100},
          gs::from_rows(in.data()));
    // What only into() would round anyway isn't rounded twice; what goes on is.
    apply(gs::scale(1.7F) | gs::cast<gs::bfloat16>() | gs::into(again.data()) | gs::scale(2) | gs::into(doubled.data()),
          {.rows = 1, .width = 100}, gs::from_rows(in.data()));
    for (std::size_t i = 0; i < in.size(); ++i) {
        const gs::bfloat16 r{in[i]}, s{in[i] * 1.7F};
        REQUIRE(rounded[i] == static_cast<float>(r));
        REQUIRE(bits(stored[i]) == bits(r));
        REQUIRE(bits(again[i]) == bits(s));
        REQUIRE(doubled[i] == 2 * static_cast<float>(s));
    }
}

TEST_CASE("no rows and no columns are nothing to do") {
    gs::host::kernel_context ctx;
    float out = 77, in = 1, scratch = 0;
    const auto finish = gs::rms_norm(1e-6F) | gs::into(&out);
    gs::apply_rows(ctx, finish, {.rows = 0, .width = 1}, gs::from_rows(&in), &scratch);
    gs::apply_rows(ctx, finish, {.rows = 1, .width = 0}, gs::from_rows(&in), &scratch);
    gs::apply_elements(ctx, gs::epilogue<>{} | gs::into(&out), {.width = 0}, 0, 0, gs::from_rows(&in));
    REQUIRE(out == 77);
}

}  // namespace epilogue_test
