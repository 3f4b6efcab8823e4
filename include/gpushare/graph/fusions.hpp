// SPDX-License-Identifier: Apache-2.0
// Which operators an engine fuses, as far as that is worth a cut elsewhere: a cut between them
// costs a kernel that has to read and write what the fused one kept in registers.
//
//   const gpushare::graph::fusion_rule mine[]{{"Conv", "Relu", 2}, {"MatMul", "element-wise", 2}};
//   const gpushare::graph::split_options options{.fusions = mine};
//
// Without rules of one's own, usual_fusions stands. A rule is a preference and never a ban.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <string_view>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// Two operators that an engine makes one of, where the first one's result is read by the second
/// alone. The types are ONNX's; `element-wise` stands for all of element_wise_types.
struct fusion_rule {
    std::string_view before{};  ///< makes the value
    std::string_view after{};   ///< reads the value
    /// What a cut between them costs: how often more memory is passed over, in sizes of that value.
    /// Above 0.
    double passes = 2;

    friend constexpr bool operator==(const fusion_rule&, const fusion_rule&) = default;
};

/// Operators that make each element of one element of each input.
inline constexpr std::array<std::string_view, 40> element_wise_types{
    "Abs",  "Add",      "Cast",  "Ceil",     "Celu",        "Clip",      "Cos",       "Div",        "Elu",  "Erf",
    "Exp",  "FastGelu", "Floor", "Gelu",     "HardSigmoid", "HardSwish", "LeakyRelu", "Log",        "Max",  "Min",
    "Mish", "Mul",      "Neg",   "Not",      "PRelu",       "Pow",       "QuickGelu", "Reciprocal", "Relu", "Round",
    "Selu", "Sigmoid",  "Sin",   "Softplus", "Softsign",    "Sqrt",      "Sub",       "Swish",      "Tanh", "Where"};

/// Whether an operator is element-wise.
[[nodiscard]] constexpr bool is_element_wise(std::string_view type) noexcept {
    return std::ranges::find(element_wise_types, type) != element_wise_types.end();
}

/// What ONNX Runtime, OpenVINO and TensorRT have in common. A quantised operator counts more:
/// without its neighbours, the operator runs in floats.
inline constexpr std::array<fusion_rule, 24> usual_fusions{{
    {"Conv", "BatchNormalization", 2},
    {"Conv", "element-wise", 2},
    {"ConvTranspose", "BatchNormalization", 2},
    {"ConvTranspose", "element-wise", 2},
    {"MatMul", "element-wise", 2},
    {"Gemm", "element-wise", 2},
    {"BatchNormalization", "element-wise", 2},
    {"element-wise", "element-wise", 2},
    {"element-wise", "LayerNormalization", 2},
    {"element-wise", "Softmax", 1},
    {"element-wise", "ReduceMean", 1},
    {"ReduceMean", "element-wise", 1},
    {"Pad", "Conv", 2},
    {"Transpose", "MatMul", 2},
    {"MatMul", "Transpose", 1},
    {"MatMul", "Softmax", 2},
    {"Softmax", "MatMul", 2},
    {"DequantizeLinear", "Conv", 8},
    {"DequantizeLinear", "MatMul", 8},
    {"DequantizeLinear", "Gemm", 8},
    {"DequantizeLinear", "element-wise", 4},
    {"Conv", "QuantizeLinear", 8},
    {"MatMul", "QuantizeLinear", 8},
    {"element-wise", "QuantizeLinear", 4},
}};

/// What the first rule that fits says; 0: the engine keeps the two apart.
[[nodiscard]] constexpr double fusion_passes(std::span<const fusion_rule> rules, std::string_view before,
                                             std::string_view after) noexcept {
    const auto fits = [](std::string_view rule, std::string_view type) {
        return rule == type || (rule == "element-wise" && is_element_wise(type));
    };
    for (const auto& r : rules)
        if (fits(r.before, before) && fits(r.after, after)) return r.passes;
    return 0;
}

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
