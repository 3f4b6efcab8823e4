// SPDX-License-Identifier: Apache-2.0
// Compares all-reduces of other element types with float at the same number of bytes, and pipelines
// of 16-bit floats with float at the same number of elements.
#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/fused_all_reduce.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "collective/group.hpp"
#include "collective/measurements.hpp"

namespace bench::collective {

namespace {
namespace gs = gpushare;
constexpr std::size_t rounds = 5;
}  // namespace

/// The all-reduces combine 1 MiB: types of 8, 16 and 32 bits, averages, and the maximum of floats,
/// each compared with a sum of floats.
void types(report& r) {
    const gs::communicator group(2);
    constexpr std::size_t bytes = std::size_t{1} << 20;
    const auto us_of = [&]<class T, class Op>(std::vector<std::vector<T>>& x, std::vector<std::vector<T>>& y, Op op) {
        return timed(group, 51, [&](const gs::member& me) {
            gs::all_reduce(me, std::span<const T>(x[me.rank()]), std::span(y[me.rank()]), op);
        });
    };
    const auto against_floats = [&]<class T, class Op = gs::sum>(const char* name, T, Op op = {}) {
        std::vector<std::vector<T>> x(2, std::vector<T>(bytes / sizeof(T))), y = x;
        std::vector<std::vector<float>> a(2, std::vector<float>(bytes / sizeof(float))), b = a;
        r.figure(name,
                 ratios(
                     rounds, [&] { return us_of(x, y, op); }, [&] { return us_of(a, b, gs::sum{}); }),
                 "x");
    };
    against_floats("collective.bfloat16_vs_float", gs::bfloat16{});
    against_floats("collective.float16_vs_float", gs::float16{});
    against_floats("collective.int8_vs_float", std::int8_t{});
    against_floats("collective.int8_average_vs_float", std::int8_t{}, gs::average{});
    against_floats("collective.int32_average_vs_float", std::int32_t{}, gs::average{});
    against_floats("collective.fp8_e4m3_vs_float", gs::fp8_e4m3{});
    against_floats("collective.maximum_vs_float", float{}, gs::maximum{});
    // A transformer's residual and RMSNorm over 64 rows, with everything of type T.
    const auto fused_us = [&]<class T>(T) {
        constexpr std::size_t width = 4096, n = 64 * width;
        const std::vector<T> weight(width, T{1.1F});
        std::vector<std::vector<T>> x(2, std::vector<T>(n, T{0.5F})), residual = x, y = x;
        return timed(group, 51, [&](const gs::member& me) {
            const auto own = me.rank();
            gs::run(me,
                    gs::reduced(std::span<const T>(x[own]), width) | gs::add_to(residual[own]) |
                        gs::rms_norm(weight, 1e-6F) | gs::cast<T>(),
                    std::span(y[own]));
        });
    };
    const auto fused_against_floats = [&]<class T>(const char* name, T of_type) {
        r.figure(name,
                 ratios(
                     rounds, [&] { return fused_us(of_type); }, [&] { return fused_us(float{}); }),
                 "x");
    };
    fused_against_floats("collective.fused_bfloat16_vs_float", gs::bfloat16{});
    fused_against_floats("collective.fused_float16_vs_float", gs::float16{});
}

}  // namespace bench::collective
