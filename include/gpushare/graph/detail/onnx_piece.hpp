// SPDX-License-Identifier: Apache-2.0
// A piece in ONNX's format as a plain value, with constants as numbers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/graph/detail/onnx_check.hpp>
#include <gpushare/graph/detail/onnx_library.hpp>
#include <gpushare/graph/detail/onnx_numbers.hpp>
#include <gpushare/graph/detail/piece_program.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

/// Reads one piece.
class piece_reader {
public:
    [[nodiscard]] piece_program read(std::string_view bytes) {
        onnx::ModelProto m;
        if (bytes.size() > static_cast<std::size_t>(std::numeric_limits<int>::max()) ||
            !m.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) || !m.has_graph())
            throw model_error(model_fault::unreadable, {}, "these bytes are no piece");
        const auto& g = m.graph();
        if (g.sparse_initializer_size() > 0)
            throw model_error(model_fault::engine, g.sparse_initializer(0).values().name(), "a sparse weight");
        for (const auto& w : g.initializer()) p_.values[index_of(w.name())] = constant_of(w, w.name());
        for (const auto& v : g.value_info()) describe(v);
        for (const auto& v : g.input()) {
            const std::uint32_t input = index_of(v.name());
            if (p_.values[input].constant) continue;
            describe(v);
            made_[input] = true;
            p_.inputs.push_back(input);
        }
        for (const auto& v : g.output()) describe(v);
        for (int n = 0; n < g.node_size(); ++n) add(g.node(n), static_cast<std::size_t>(n));
        for (const auto& v : g.output()) p_.outputs.push_back(index_of(v.name()));
        return std::move(p_);
    }

private:
    using kind = program_attribute::kind;

    std::uint32_t index_of(const std::string& name) {
        const auto [at, is_new] = index_.emplace(name, static_cast<std::uint32_t>(p_.values.size()));
        if (is_new) {
            p_.values.push_back({.name = name});
            made_.push_back(false);
        }
        return at->second;
    }
    void describe(const onnx::ValueInfoProto& v) {
        program_value& to = p_.values[index_of(v.name())];
        if (to.constant || !v.type().has_tensor_type()) return;
        const auto& type = v.type().tensor_type();
        to.type = element_of(type.elem_type());
        to.ranked = type.has_shape();
        to.shape.clear();
        for (const auto& d : type.shape().dim()) to.shape.push_back(d.has_dim_value() ? d.dim_value() : -1);
    }

    [[nodiscard]] static program_value constant_of(const onnx::TensorProto& w, const std::string& name) {
        program_value v{.name = name, .type = element_of(w.data_type()), .ranked = true, .constant = true};
        gpushare::bytes count{1};  // saturates
        for (const std::int64_t extent : w.dims()) {
            if (extent < 0) throw model_error(model_fault::bad_weight, name, "a negative extent");
            v.shape.push_back(extent);
            count = count * static_cast<std::uint64_t>(extent);
        }
        if (v.type == element::f32) fill(v.numbers, w, w.float_data(), count.count(), name);
        if (v.type == element::i64 && v.shape.size() <= 1) fill(v.integers, w, w.int64_data(), count.count(), name);
        return v;
    }
    template <class T, class List>
    static void fill(std::vector<T>& to, const onnx::TensorProto& w, const List& list, std::uint64_t count,
                     const std::string& name) {
        static_assert(std::endian::native == std::endian::little, "weights are in that order");
        const std::string& raw = w.raw_data();
        const auto there = w.has_raw_data() ? raw.size() / sizeof(T) : static_cast<std::size_t>(list.size());
        if (there != count || (w.has_raw_data() && raw.size() % sizeof(T) != 0))
            throw model_error(model_fault::bad_weight, name, "it hasn't the bytes that its shape says");
        to.assign(list.begin(), list.end());
        if (w.has_raw_data()) to.resize(there);
        if (w.has_raw_data() && there > 0) std::memcpy(to.data(), raw.data(), raw.size());
    }

    void add(const onnx::NodeProto& from, std::size_t place) {
        program_node n{.name = name_of(from, place), .type = from.op_type(), .onnx = is_onnx(from.domain())};
        for (const auto& name : from.input()) {
            n.inputs.push_back(name.empty() ? no_value : index_of(name));
            const std::uint32_t v = n.inputs.back();
            if (v != no_value && !p_.values[v].constant && !made_[v])
                throw model_error(model_fault::missing_value, n.name, "nothing makes '" + name + "'");
        }
        for (const auto& name : from.output()) {
            n.outputs.push_back(name.empty() ? no_value : index_of(name));
            const std::uint32_t v = n.outputs.back();
            if (v != no_value && (p_.values[v].constant || made_[v]))
                throw model_error(model_fault::bad_model, n.name, "it makes '" + name + "' once more");
        }
        for (const auto& a : from.attribute()) n.attributes.push_back(attribute_of(a));
        if (becomes_constant(n, from)) return;
        for (const std::uint32_t v : n.outputs)
            if (v != no_value) made_[v] = true;
        p_.nodes.push_back(std::move(n));
    }
    [[nodiscard]] static program_attribute attribute_of(const onnx::AttributeProto& a) {
        program_attribute to{.name = a.name()};
        switch (a.type()) {
            case onnx::AttributeProto::INT:
                to.is = kind::integer;
                to.integer = a.i();
                break;
            case onnx::AttributeProto::INTS:
                to.is = kind::integers;
                to.integers.assign(a.ints().begin(), a.ints().end());
                break;
            case onnx::AttributeProto::FLOAT:
                to.is = kind::number;
                to.number = a.f();
                break;
            case onnx::AttributeProto::STRING:
                to.is = kind::text;
                to.text = a.s();
                break;
            default: break;
        }
        return to;
    }

    /// Whether a node's result is known already. If so, makes the result a constant.
    bool becomes_constant(const program_node& n, const onnx::NodeProto& from) {
        if (!n.onnx || n.outputs.size() != 1 || n.outputs[0] == no_value) return false;
        const std::string& name = from.output(0);
        if (n.type == "Constant" && from.attribute_size() == 1 && from.attribute(0).has_t()) {
            p_.values[n.outputs[0]] = constant_of(from.attribute(0).t(), name);
            return true;
        }
        if (n.inputs.size() != 1 || n.inputs[0] == no_value || !p_.values[n.inputs[0]].constant) return false;
        program_value copy = p_.values[n.inputs[0]];
        copy.name = name;
        if (n.type == "Transpose" && copy.has_rank(2) && copy.type == element::f32 && swaps(from))
            transpose(copy);
        else if (n.type != "Identity")
            return false;
        p_.values[n.outputs[0]] = std::move(copy);
        return true;
    }
    /// Whether a Transpose of a matrix swaps its two dimensions, which is the default.
    [[nodiscard]] static bool swaps(const onnx::NodeProto& n) {
        if (n.attribute_size() == 0) return true;
        const auto& order = n.attribute(0).ints();
        return n.attribute_size() == 1 && n.attribute(0).name() == "perm" && order.size() == 2 && order[0] == 1 &&
               order[1] == 0;
    }
    static void transpose(program_value& v) {
        const auto rows = static_cast<std::size_t>(v.shape[0]), columns = static_cast<std::size_t>(v.shape[1]);
        std::vector<float> turned(v.numbers.size());
        // A matrix without columns may have very many rows.
        for (std::size_t r = 0; r < rows && columns != 0; ++r)
            for (std::size_t c = 0; c < columns; ++c) turned[c * rows + r] = v.numbers[r * columns + c];
        v.numbers = std::move(turned);
        std::swap(v.shape[0], v.shape[1]);
    }

    piece_program p_{};
    std::unordered_map<std::string, std::uint32_t> index_{};
    std::vector<bool> made_{};  // for each value: whether a node or the caller makes it
};

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
