// SPDX-License-Identifier: Apache-2.0
// Why a model can't be used: what is wrong, and in which node.
//
//   const gpushare::graph::model_error e(gpushare::graph::model_fault::cyclic, "conv1", "it waits for itself");
//   if (e.fault() == gpushare::graph::model_fault::cyclic) log(e.node(), e.what());
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// What is wrong with a model, or with how it is cut.
enum class model_fault : std::uint8_t {
    no_file,           ///< the file can't be read
    unreadable,        ///< the bytes are no model, or only a part of one
    too_large,         ///< 2 GiB or more, which the format can't hold in one file or one piece
    bad_model,         ///< the model as a whole is malformed: no operator set, a name that is there twice
    bad_node,          ///< a node has attributes, inputs or outputs that its operator doesn't allow
    bad_weight,        ///< a weight has more or fewer bytes than its shape says
    unknown_operator,  ///< nobody says what the node computes
    missing_value,     ///< a node reads what nothing makes
    cyclic,            ///< nodes wait for each other
    bad_shapes,        ///< shapes contradict each other
    external_data,     ///< a weight's file is missing, too short, or outside of the model's folder
    bad_cut,           ///< the model can't be cut there: what crosses is no tensor, or nobody knows its type
    engine,            ///< the engine refuses a piece
};

/// The code that a fault comes with.
[[nodiscard]] constexpr errc code_of(model_fault f) noexcept {
    switch (f) {
        case model_fault::no_file: return errc::io_failed;
        case model_fault::too_large: return errc::size_overflow;
        case model_fault::unknown_operator:
        case model_fault::bad_cut: return errc::not_supported;
        case model_fault::engine: return errc::backend_failed;
        default: return errc::invalid_specification;
    }
}

/// A model can't be used. The text names the node, or the value, and the reason.
class model_error : public operation_error {
public:
    /// `node` may be empty, where the model as a whole is at fault. Unprintable characters of the texts are escaped.
    model_error(model_fault fault, std::string node, std::string_view why)
        : operation_error(code_of(fault), {}, sentence(node, why).c_str()), fault_(fault), node_(std::move(node)) {}

    /// What is wrong.
    [[nodiscard]] model_fault fault() const noexcept { return fault_; }
    /// The name of the node or value that is at fault, as the model has it; empty for the model as a whole.
    [[nodiscard]] const std::string& node() const noexcept { return node_; }

private:
    static std::string sentence(const std::string& node, std::string_view why) {
        return (node.empty() ? std::string("model: ") : "model, '" + node + "': ").append(why);
    }

    model_fault fault_;
    std::string node_;
};

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
