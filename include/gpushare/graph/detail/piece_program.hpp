// SPDX-License-Identifier: Apache-2.0
// A piece of a model with everything that its nodes say: attributes, inputs by position, and
// constants with their numbers. Engines that compute pieces themselves read this form. A
// model_graph has only the facts that decide where to cut.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

/// Stands in place of a value's index where there is no value.
inline constexpr std::uint32_t no_value = ~std::uint32_t{0};

/// A value of a piece.
struct program_value {
    std::string name{};
    element type = element::unknown;
    bool ranked = false;
    std::vector<std::int64_t> shape{};  ///< negative extents are known only when the piece runs
    bool constant = false;
    std::vector<float> numbers{};  ///< the numbers of a constant of floats
    /// The numbers of a constant of i64 with at most one dimension.
    std::vector<std::int64_t> integers{};

    /// Whether the value has this many dimensions.
    [[nodiscard]] bool has_rank(std::size_t n) const noexcept { return ranked && shape.size() == n; }
};

/// An attribute of a node.
struct program_attribute {
    enum class kind : std::uint8_t { integer, integers, number, text, other };

    std::string name{};
    kind is = kind::other;
    std::int64_t integer = 0;
    std::vector<std::int64_t> integers{};
    float number = 0;
    std::string text{};
};

/// An operation.
struct program_node {
    std::string name{};
    std::string type{};                    ///< the operator's name
    bool onnx = true;                      ///< whether the operator is ONNX's own
    std::vector<std::uint32_t> inputs{};   ///< by position; no_value for an omitted input
    std::vector<std::uint32_t> outputs{};  ///< by position; no_value for an omitted output
    std::vector<program_attribute> attributes{};

    /// The attribute of that name; null if there is none.
    [[nodiscard]] const program_attribute* find(std::string_view attribute) const noexcept {
        const auto at = std::ranges::find(attributes, attribute, &program_attribute::name);
        return at == attributes.end() ? nullptr : &*at;
    }
};

/// A piece. Each node comes after the nodes whose values it reads.
struct piece_program {
    std::vector<program_value> values{};
    std::vector<program_node> nodes{};
    std::vector<std::uint32_t> inputs{};   ///< in the order in which the engine gets them
    std::vector<std::uint32_t> outputs{};  ///< in the order in which the engine gets them
};

[[noreturn]] inline void refuse(const std::string& node, std::string_view why) {
    throw model_error(model_fault::engine, node, why);
}
/// Throws model_error (engine) unless there is a tensor for each input and output.
inline void require_all(const piece_program& p, std::size_t in, std::size_t out) {
    if (in != p.inputs.size() || out != p.outputs.size())
        refuse({}, "a piece with another number of inputs or outputs");
}
/// Throws model_error (engine) with `name` unless the input is a tensor of floats in its buffer.
inline void require_floats(const std::string& name, const tensor& in) {
    if (!in.shaped() || in.type != element::f32) refuse(name, "an input that isn't a tensor of floats");
    if (in.size() > in.capacity || (in.data == nullptr && in.size() > 0))
        refuse(name, "an input isn't there, or is larger than its buffer");
}

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
