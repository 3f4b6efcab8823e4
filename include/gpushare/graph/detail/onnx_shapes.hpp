// SPDX-License-Identifier: Apache-2.0
// Types and shapes of values, as the model states them and as ONNX's shape inference finds them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/graph/detail/apart.hpp>
#include <gpushare/graph/detail/onnx_check.hpp>
#include <gpushare/graph/detail/onnx_library.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

/// Sets a value's extents: from `sizes` by the extents' names, from `given` by their places. Throws
/// model_error (bad_shapes).
inline void set_extents(onnx::ValueInfoProto& v, const std::map<std::string, std::int64_t>& sizes,
                        const std::vector<std::int64_t>* given) {
    if (!v.type().has_tensor_type()) return;
    auto& type = *v.mutable_type()->mutable_tensor_type();
    if (given != nullptr && !type.has_shape())
        for (std::size_t i = 0; i < given->size(); ++i) (void)type.mutable_shape()->add_dim();
    if (!type.has_shape()) return;
    auto& shape = *type.mutable_shape();
    if (given != nullptr && given->size() != static_cast<std::size_t>(shape.dim_size()))
        throw model_error(model_fault::bad_shapes, v.name(),
                          "it has " + std::to_string(shape.dim_size()) + " dimensions, and is given " +
                              std::to_string(given->size()));
    for (int i = 0; i < shape.dim_size(); ++i) {
        auto& d = *shape.mutable_dim(i);
        if (d.has_dim_value() && d.dim_value() < 0) d.clear_dim_value();  // means "any extent"
        const auto size = sizes.find(d.dim_param());
        std::int64_t extent = d.has_dim_param() && size != sizes.end() ? size->second : -1;
        if (given != nullptr) extent = (*given)[static_cast<std::size_t>(i)];
        if (extent < 0) continue;
        if (d.has_dim_value() && d.dim_value() != extent)
            throw model_error(model_fault::bad_shapes, v.name(),
                              "dimension " + std::to_string(i) + " is " + std::to_string(d.dim_value()) +
                                  ", and is given as " + std::to_string(extent));
        d.set_dim_value(extent);
    }
}

/// A copy without the numbers of large weights, so that a large model isn't in memory twice.
/// Weights that hold shapes are small, and stay in the copy.
[[nodiscard]] inline onnx::ModelProto without_large_weights(const onnx::ModelProto& m) {
    constexpr std::size_t large = 1 << 14;  // bytes
    onnx::ModelProto small;
    small.set_ir_version(std::min<std::int64_t>(m.ir_version(), onnx::IR_VERSION));
    *small.mutable_opset_import() = m.opset_import();
    *small.mutable_functions() = m.functions();
    auto& g = *small.mutable_graph();
    g.set_name(m.graph().name());
    *g.mutable_node() = m.graph().node();
    *g.mutable_input() = m.graph().input();
    *g.mutable_output() = m.graph().output();
    *g.mutable_value_info() = m.graph().value_info();
    *g.mutable_sparse_initializer() = m.graph().sparse_initializer();
    std::unordered_set<std::string> inputs;
    for (const auto& v : g.input()) inputs.insert(v.name());
    for (const auto& w : m.graph().initializer()) {
        if (w.data_location() != onnx::TensorProto::EXTERNAL && w.ByteSizeLong() <= large) {
            *g.add_initializer() = w;
            continue;
        }
        if (inputs.contains(w.name())) continue;
        auto& v = *g.add_input();  // the type without the numbers
        v.set_name(w.name());
        auto& type = *v.mutable_type()->mutable_tensor_type();
        type.set_elem_type(w.data_type());
        for (const std::int64_t extent : w.dims()) type.mutable_shape()->add_dim()->set_dim_value(extent);
    }
    return small;
}

/// Makes ONNX infer the types of all values. With `strict`, a failed inference is an error. With
/// `apart`, ONNX runs in a process of its own, because ONNX trusts numbers in attributes and some
/// numbers crash it. Throws model_error (bad_shapes), also if that process takes longer than 30 s.
/// Throws operation_error (io_failed, with errno) if the process can't start, which doesn't mean
/// that the model is at fault.
inline void infer(onnx::ModelProto& m, bool strict, bool apart) {
    const auto work = [&] {
        onnx::shape_inference::InferShapes(m, onnx::OpSchemaRegistry::Instance(),
                                           onnx::ShapeInferenceOptions(false, strict ? 1 : 0, true));
    };
    if (!apart) try {
            return work();
        } catch (const std::exception& e) {
            throw model_error(model_fault::bad_shapes, {}, e.what());
        }
    const auto told = [&] {
        work();
        onnx::GraphProto values;
        *values.mutable_value_info() = m.graph().value_info();
        *values.mutable_output() = m.graph().output();
        return values.SerializeAsString();
    };
    using kind = apart_result::kind;
    const auto r = run_apart(told, std::chrono::seconds(30));
    if (r.how == kind::no_fork)
        throw operation_error(
            {.code = errc::io_failed, .asked = static_cast<std::uint64_t>(r.error), .because = reason::system_error},
            {}, "starting a process for ONNX's shape inference");
    onnx::GraphProto values;
    if (r.how == kind::threw) throw model_error(model_fault::bad_shapes, {}, r.text);
    if (r.how != kind::done || !values.ParseFromString(r.text))
        throw model_error(model_fault::bad_shapes, {}, "ONNX's shape inference can't cope with the model");
    *m.mutable_graph()->mutable_value_info() = values.value_info();
    *m.mutable_graph()->mutable_output() = values.output();
}

/// The types that are known so far, by name.
[[nodiscard]] inline std::unordered_map<std::string, onnx::TypeProto> types_in(const onnx::ModelProto& m) {
    const auto& g = m.graph();
    std::unordered_map<std::string, onnx::TypeProto> types;
    for (const auto* list : {&g.value_info(), &g.input(), &g.output()})
        for (const auto& v : *list) types[v.name()] = v.type();
    for (const auto& w : g.initializer()) {
        auto& type = *types[w.name()].mutable_tensor_type();
        type.set_elem_type(w.data_type());
        type.clear_shape();
        for (const std::int64_t extent : w.dims()) type.mutable_shape()->add_dim()->set_dim_value(extent);
    }
    return types;
}

/// Whether ONNX knows all operators. Inference fails or stops at an operator that ONNX doesn't
/// know.
[[nodiscard]] inline bool all_known(const onnx::ModelProto& m) {
    const auto sets = operator_sets(m);
    std::unordered_set<std::string> functions;
    for (const auto& f : m.functions()) functions.insert(f.domain() + "." + f.name());
    return std::ranges::all_of(m.graph().node(), [&](const onnx::NodeProto& n) {
        const auto set = sets.find(is_onnx(n.domain()) ? std::string() : n.domain());
        const bool own = is_onnx(n.domain()) && set != sets.end() &&
                         onnx::OpSchemaRegistry::Schema(n.op_type(), set->second, "") != nullptr;
        return own || functions.contains(n.domain() + "." + n.op_type());
    });
}

/// Adds missing types of values, from a graph that has values of the same names. ONNX Runtime's
/// operators in its own layout always work on floats, but the models that it writes don't say so.
inline void add_types(const onnx::GraphProto& g, const model_graph* like,
                      std::unordered_map<std::string, onnx::TypeProto>& types) {
    std::unordered_map<std::string_view, element> known;
    if (like != nullptr)
        for (const auto& v : like->values) known.emplace(v.name, v.type);
    for (const auto& n : g.node())
        for (const auto& name : n.output()) {
            const auto at = known.find(name);
            element e = at != known.end() ? at->second : element::unknown;
            if (e == element::unknown && n.domain() == "com.microsoft.nchwc") e = element::f32;
            if (e == element::unknown || name.empty()) continue;
            auto& type = types[name];
            const bool open = type.value_case() == onnx::TypeProto::VALUE_NOT_SET ||
                              (type.has_tensor_type() && type.tensor_type().elem_type() == 0);
            if (open) type.mutable_tensor_type()->set_elem_type(number_of(e));
        }
}

/// The types of all values, by name. Throws model_error (bad_shapes), and as infer() if no process
/// can start.
[[nodiscard]] inline std::unordered_map<std::string, onnx::TypeProto> infer_types(
    const onnx::ModelProto& m, const std::vector<int>& order, bool known, bool apart, const model_graph* like,
    const std::map<std::string, std::int64_t>& sizes, const std::map<std::string, std::vector<std::int64_t>>& inputs) {
    onnx::ModelProto small = without_large_weights(m);
    auto& g = *small.mutable_graph();
    g.clear_node();
    for (const int n : order) *g.add_node() = m.graph().node(n);
    for (auto& v : *g.mutable_input()) {
        const auto given = inputs.find(v.name());
        set_extents(v, sizes, given == inputs.end() ? nullptr : &given->second);
    }
    for (auto& v : *g.mutable_output()) set_extents(v, sizes, nullptr);
    for (auto& v : *g.mutable_value_info()) set_extents(v, sizes, nullptr);
    if (!known) return types_in(small);
    const bool only_onnx = all_known(small);
    if (!only_onnx) {  // states the types of other operators' results, which ONNX can't infer
        auto told = types_in(small);
        add_types(g, like, told);
        g.clear_value_info();
        for (auto& [name, type] : told) {
            auto& v = *g.add_value_info();
            v.set_name(name);
            *v.mutable_type() = std::move(type);
        }
    }
    const auto stated = only_onnx ? std::unordered_map<std::string, onnx::TypeProto>() : types_in(small);
    try {
        infer(small, only_onnx, apart);
    } catch (const model_error&) {
        if (only_onnx) throw;
        return stated;
    }
    return types_in(small);
}

/// A value of the graph. If there is no type, only the value's name and kind are known.
[[nodiscard]] inline value value_of(std::string name, value_kind kind, const onnx::TypeProto* type) {
    value v{.name = std::move(name), .kind = kind};
    if (type == nullptr || type->value_case() == onnx::TypeProto::VALUE_NOT_SET) return v;
    v.tensor = type->has_tensor_type();
    if (!v.tensor) return v;
    v.type = element_of(type->tensor_type().elem_type());
    v.ranked = type->tensor_type().has_shape();
    for (const auto& d : type->tensor_type().shape().dim())
        v.shape.push_back({d.has_dim_value() && d.dim_value() >= 0 ? d.dim_value() : -1, d.dim_param()});
    return v;
}

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
