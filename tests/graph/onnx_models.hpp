// SPDX-License-Identifier: Apache-2.0
// Models in ONNX's format, built node by node.
//
//   support::onnx_builder b;    b.input("x", {1, 4}).weight("w", {4, 4}).node("MatMul", {"x", "w"}, {"y"}).output("y");
//   const auto model = gpushare::graph::onnx_model::parse(b.bytes());
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gpushare/graph/onnx.hpp>

namespace support {

class onnx_builder {
public:
    using names = std::vector<std::string>;
    using extents = std::vector<std::int64_t>;

    onnx_builder() {
        m.set_ir_version(8);
        m.add_opset_import()->set_version(13);
        m.mutable_graph()->set_name("g");
    }
    /// Floats; an extent below 0 is named "n".
    onnx_builder& input(const std::string& name, const extents& shape) {
        describe(*m.mutable_graph()->add_input(), name, shape);
        return *this;
    }
    onnx_builder& output(const std::string& name, const extents& shape = {}) {
        describe(*m.mutable_graph()->add_output(), name, shape);
        if (shape.empty())
            m.mutable_graph()->mutable_output()->rbegin()->mutable_type()->mutable_tensor_type()->clear_shape();
        return *this;
    }
    onnx_builder& weight(const std::string& name, const extents& shape) {
        auto& w = *m.mutable_graph()->add_initializer();
        w.set_name(name);
        w.set_data_type(onnx::TensorProto::FLOAT);
        std::int64_t count = 1;
        for (const auto e : shape) w.add_dims(e), count *= e;
        for (std::int64_t i = 0; i < count; ++i) w.add_float_data(static_cast<float>(i % 5) - 2);
        return *this;
    }
    onnx_builder& integers(const std::string& name, const extents& values) {
        auto& w = *m.mutable_graph()->add_initializer();
        w.set_name(name);
        w.set_data_type(onnx::TensorProto::INT64);
        w.add_dims(static_cast<std::int64_t>(values.size()));
        for (const auto v : values) w.add_int64_data(v);
        return *this;
    }
    onnx_builder& node(const std::string& type, const names& in, const names& out) {
        add_node(*m.mutable_graph(), type, in, out);
        return *this;
    }
    /// The last node's.
    onnx_builder& attribute(const std::string& name, const extents& values) {
        auto& a = *m.mutable_graph()->mutable_node()->rbegin()->add_attribute();
        a.set_name(name);
        a.set_type(onnx::AttributeProto::INTS);
        for (const auto v : values) a.add_ints(v);
        return *this;
    }
    static void add_node(onnx::GraphProto& to, const std::string& type, const names& in, const names& out) {
        auto& n = *to.add_node();
        n.set_name(type + '_' + std::to_string(to.node_size() - 1));
        n.set_op_type(type);
        for (const auto& name : in) n.add_input(name);
        for (const auto& name : out) n.add_output(name);
    }
    static void describe(onnx::ValueInfoProto& v, const std::string& name, const extents& shape) {
        v.set_name(name);
        auto& type = *v.mutable_type()->mutable_tensor_type();
        type.set_elem_type(onnx::TensorProto::FLOAT);
        (void)type.mutable_shape();
        for (const auto e : shape) {
            auto& d = *type.mutable_shape()->add_dim();
            if (e < 0)
                d.set_dim_param("n");
            else
                d.set_dim_value(e);
        }
    }
    [[nodiscard]] std::string bytes() const { return m.SerializeAsString(); }

    onnx::ModelProto m;
};

/// Two layers with a weight in common, a residual, and a shape that is computed of constants: ten
/// nodes.
[[nodiscard]] inline onnx_builder two_layers() {
    onnx_builder b;
    b.input("x", {-1, 8}).weight("w", {8, 8}).weight("bias", {8}).integers("two", {2, 4}).integers("minus", {-1});
    b.node("MatMul", {"x", "w"}, {"a"}).node("Add", {"a", "bias"}, {"b"}).node("Relu", {"b"}, {"c"});
    b.node("Identity", {"w"}, {"w2"}).node("MatMul", {"c", "w2"}, {"d"}).node("Add", {"d", "x"}, {"e"});
    b.node("Concat", {"minus", "two"}, {"shape"});
    auto& axis = *b.m.mutable_graph()->mutable_node()->rbegin()->add_attribute();
    axis.set_name("axis");
    axis.set_type(onnx::AttributeProto::INT);
    axis.set_i(0);
    b.node("Reshape", {"e", "shape"}, {"f"}).node("Sigmoid", {"f"}, {"y"}).node("Relu", {"e"}, {"z"});
    b.output("y").output("z");
    return b;
}

}  // namespace support
