// SPDX-License-Identifier: Apache-2.0
// Reads models in the ONNX format, checks them, and takes them apart. Needs the library libonnx
// (Debian: libonnx-dev) and the CMake target gpushare::graph.
//
//   const auto model = gpushare::graph::onnx_model::load("detector.onnx", {.sizes = {{"batch", 1}}});
//   // a plain value, from which a planner decides where to cut
//   const gpushare::graph::model_graph& g = model.graph();
//   const std::string piece = model.extract({0, 20});  // nodes 0 to 19, as a model of their own
//
// edges_of(g, range) lists a piece's inputs and outputs in the order in which the piece has them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/graph/detail/onnx_check.hpp>
#include <gpushare/graph/detail/onnx_files.hpp>
#include <gpushare/graph/detail/onnx_library.hpp>
#include <gpushare/graph/detail/onnx_piece.hpp>
#include <gpushare/graph/detail/onnx_shapes.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// How to read a model.
struct import_options {
    /// Extents by the model's names for extents, such as "batch". The result is valid for these
    /// extents only.
    std::map<std::string, std::int64_t> sizes{};
    /// Whole shapes of inputs, by their names; negative extents stay as they are.
    std::map<std::string, std::vector<std::int64_t>> inputs{};
    /// Domains with operators that the engine knows and ONNX doesn't, such as "com.microsoft"
    /// (ONNX's own domain is ""). The reader neither checks nor understands such operators, so the
    /// shapes after them may be unknown.
    std::vector<std::string> other_domains{};
    /// The graph of the model before an engine fused nodes. If nothing else states the type of a
    /// value, the value takes the type of this graph's value of the same name. Null if there is no
    /// such graph. Used only while the model is read.
    const model_graph* like = nullptr;
    /// Whether the reader orders nodes by their use, and names nodes and values, except the model's
    /// inputs and outputs, by that order. Files that differ only in order and names then give the
    /// same graph. An engine writes a model in a random order and with random names; with this
    /// option, a kept plan and a kept operator table also fit the model that another process
    /// writes. Errors of the reader have the file's names.
    bool own_names = false;
    /// The folder with the files of the model's weights. If empty, `load` takes the model's own
    /// folder.
    std::filesystem::path folder{};
    /// Whether ONNX infers shapes in a process of its own (fork). ONNX trusts what a model says,
    /// and crashes on some malformed models. With this option, only that process ends, and the
    /// model is refused. Turn the option off for models that you trust, if a fork of this process
    /// is too expensive.
    bool apart = true;
};

/// Reads a piece that extract() made, for an engine of your own: operators, attributes, and
/// constants with their numbers. A Constant becomes a constant, and so does an Identity or a
/// Transpose of a constant matrix. Throws std::bad_alloc, and model_error: unreadable;
/// missing_value; bad_model if a value is made twice; bad_weight; engine for a sparse weight. Any
/// thread may call it.
[[nodiscard]] inline detail::piece_program read_operations(std::string_view piece) {
    return detail::piece_reader().read(piece);
}

/// A model that was read and checked. The model can be moved, and any thread may read it. It holds
/// the model's bytes once, without weights in files of their own; these are read when a piece is
/// extracted.
///
/// The result of a node that depends on weights only (a constant, a reshaped weight) counts as a
/// weight, and graph() doesn't have the node. Each piece that needs the result computes it again;
/// most engines do so once, when they load the piece. Such a result never crosses a cut.
class onnx_model {
public:
    /// Reads a file. Throws model_error, std::bad_alloc, and operation_error (io_failed, with
    /// errno) if no process can start (import_options::apart).
    [[nodiscard]] static onnx_model load(const std::filesystem::path& path, import_options o = {}) {
        if (o.folder.empty()) o.folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
        return parse(detail::read_model(path), std::move(o));
    }
    /// load() for bytes in memory.
    [[nodiscard]] static onnx_model parse(std::string_view bytes, import_options o = {}) {
        if (bytes.size() > detail::most_bytes) throw model_error(model_fault::too_large, {}, "it has 2 GiB or more");
        onnx::ModelProto m;
        if (!m.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) || !m.has_graph())
            throw model_error(model_fault::unreadable, {}, "these bytes are no model, or a part of one");
        return onnx_model(std::move(m), std::move(o));
    }
    /// Like load, but returns the reason, without its text, instead of an exception.
    [[nodiscard]] static result<onnx_model> try_load(const std::filesystem::path& path, import_options o = {}) {
        return gpushare::detail::or_why([&] { return load(path, std::move(o)); });
    }
    /// Like parse, but returns the reason, without its text, instead of an exception.
    [[nodiscard]] static result<onnx_model> try_parse(std::string_view bytes, import_options o = {}) {
        return gpushare::detail::or_why([&] { return parse(bytes, std::move(o)); });
    }

    /// The nodes and values. The graph is sound: wrong(graph()) is empty.
    [[nodiscard]] const model_graph& graph() const noexcept { return graph_; }
    /// Whether the model uses operators newer than the installed ONNX. In that case attributes
    /// aren't checked, and only the shapes that the model states are known.
    [[nodiscard]] bool newer() const noexcept { return newer_; }

    /// Some nodes of graph() as a model of their own, in ONNX's format. Its inputs and outputs are
    /// edges_of(graph(), nodes), in that order, and its weights are inside. Throws std::bad_alloc,
    /// and model_error: bad_cut if a value that crosses isn't a tensor or has an unknown type, if
    /// the graph doesn't have such a node, or if `nodes` is empty; too_large; external_data.
    [[nodiscard]] std::string extract(std::span<const std::uint32_t> nodes) const { return extracted(nodes, {}); }
    /// The whole model, with its nodes in graph()'s order, inputs and outputs in the model's order,
    /// and all weights inside. Throws as extract() does.
    [[nodiscard]] std::string whole() const {
        std::vector<std::uint32_t> all(graph_.nodes.size());
        std::iota(all.begin(), all.end(), 0U);
        std::unordered_set<std::string> wanted;
        for (const std::uint32_t v : graph_.outputs)
            if (graph_.values[v].kind == value_kind::weight) wanted.insert(names_[v]);
        onnx::ModelProto m;
        if (!m.ParseFromString(extracted(all, std::move(wanted))))
            throw model_error(model_fault::unreadable, {}, "it can't be written");
        m.mutable_graph()->clear_input();
        m.mutable_graph()->clear_output();
        for (const std::uint32_t v : graph_.inputs) describe(*m.mutable_graph()->add_input(), v);
        for (const std::uint32_t v : graph_.outputs) describe(*m.mutable_graph()->add_output(), v);
        return m.SerializeAsString();
    }
    /// extract() for consecutive nodes of graph().
    [[nodiscard]] std::string extract(node_range range) const {
        // No list of the nodes is made before it is clear that they are there.
        if (range.first >= range.behind || range.behind > graph_.nodes.size())
            return extract(std::span<const std::uint32_t>());
        std::vector<std::uint32_t> nodes(range.size());
        std::iota(nodes.begin(), nodes.end(), range.first);
        return extract(nodes);
    }

private:
    onnx_model(onnx::ModelProto m, import_options o) : proto_(std::move(m)), folder_(std::move(o.folder)) {
        const detail::node_checker checker(proto_, folder_, std::move(o.other_domains));
        newer_ = checker.newer();
        detail::check_functions(proto_);
        detail::check_weights(proto_, folder_);
        order_ = detail::run_order(proto_.graph());
        detail::check_nodes(proto_, order_, checker);
        auto types = detail::infer_types(proto_, order_, !newer_, o.apart, o.like, o.sizes, o.inputs);
        const auto& g = proto_.graph();
        for (int w = 0; w < g.initializer_size(); ++w) weights_.emplace(g.initializer(w).name(), w);
        for (int w = 0; w < g.sparse_initializer_size(); ++w)
            sparse_.emplace(g.sparse_initializer(w).values().name(), w);
        if (o.own_names) order_ = detail::order_from_outputs(g, order_);
        find_constants();
        build(types);
        for (const auto& v : graph_.values) names_.push_back(v.name);
        if (o.own_names) rename();
        if (const auto text = wrong(graph_); !text.empty()) throw model_error(model_fault::bad_model, {}, text);
    }

    /// `read` has the names of weights to include even if no node reads them.
    [[nodiscard]] std::string extracted(std::span<const std::uint32_t> nodes,
                                        std::unordered_set<std::string> read) const {
        if (nodes.empty() || std::ranges::any_of(nodes, [&](std::uint32_t n) { return n >= graph_.nodes.size(); }))
            throw model_error(model_fault::bad_cut, {}, "there are no such nodes");
        onnx::ModelProto piece;
        piece.set_ir_version(proto_.ir_version());
        *piece.mutable_opset_import() = proto_.opset_import();
        *piece.mutable_functions() = proto_.functions();
        detail::weight_taker weights(folder_);
        for (auto& f : *piece.mutable_functions())
            for (auto& n : *f.mutable_node()) weights.take_in(n);
        auto& g = *piece.mutable_graph();
        g.set_name("nodes_from_" + std::to_string(nodes.front()));
        add_nodes(g, nodes, std::move(read));
        weights.take_in(g);
        const auto edges = edges_of(graph_, nodes);
        for (const std::uint32_t v : edges.inputs) describe(*g.add_input(), v);
        for (const std::uint32_t v : edges.outputs) describe(*g.add_output(), v);
        if (piece.ByteSizeLong() > detail::most_bytes) refuse_large(nodes.front());
        return piece.SerializeAsString();
    }

    [[nodiscard]] bool is_weight(const std::string& name) const {
        return weights_.contains(name) || sparse_.contains(name) || constants_.contains(name);
    }
    [[nodiscard]] static bool draws(std::string_view type) noexcept {
        return type.starts_with("Random") || type == "Multinomial" || type == "Bernoulli" || type == "Dropout";
    }
    /// Finds the nodes that depend on weights only, and neither make outputs nor draw random
    /// numbers.
    void find_constants() {
        const auto& g = proto_.graph();
        std::unordered_set<std::string> outputs;
        for (const auto& v : g.output()) outputs.insert(v.name());
        for (const int n : order_) {
            const auto& node = g.node(n);
            bool by_lot = false;
            auto look = [&](const onnx::NodeProto& at) { by_lot = by_lot || draws(at.op_type()); };
            detail::for_each_node(node, look);
            const auto reads = detail::reads_of(node);
            const bool constant =
                !by_lot && detail::is_onnx(node.domain()) &&
                std::ranges::all_of(reads, [&](const auto& name) { return is_weight(name); }) &&
                std::ranges::none_of(node.output(), [&](const auto& name) { return outputs.contains(name); });
            if (!constant) continue;
            for (const auto& name : node.output()) constants_.emplace(name, n);
        }
    }
    /// Builds graph_ from the nodes and values found.
    void build(const std::unordered_map<std::string, onnx::TypeProto>& types) {
        const auto& g = proto_.graph();
        const auto add = [&](const std::string& name, value_kind kind) {
            const auto [at, is_new] = index_.emplace(name, static_cast<std::uint32_t>(graph_.values.size()));
            if (!is_new) return at->second;
            const auto type = types.find(name);
            graph_.values.push_back(detail::value_of(name, kind, type == types.end() ? nullptr : &type->second));
            return at->second;
        };
        for (const auto& v : g.input())
            if (!is_weight(v.name())) graph_.inputs.push_back(add(v.name(), value_kind::input));
        std::unordered_set<std::string> outputs;
        for (const auto& v : g.output()) outputs.insert(v.name());
        for (const int n : order_) {
            const auto& from = g.node(n);
            if (std::ranges::all_of(from.output(), [&](const auto& o) { return o.empty() || constants_.contains(o); }))
                continue;
            graph::node to{.name = detail::name_of(from, static_cast<std::size_t>(n)), .type = from.op_type()};
            for (const auto& name : detail::reads_of(from)) to.inputs.push_back(add(name, value_kind::weight));
            for (const auto& name : from.output())
                if (!name.empty())
                    to.outputs.push_back(add(name, outputs.contains(name) ? value_kind::output : value_kind::inner));
            nodes_.push_back(n);
            graph_.nodes.push_back(std::move(to));
        }
        for (const auto& v : g.output()) graph_.outputs.push_back(add(v.name(), value_kind::weight));
    }

    /// Names nodes and their values by operator and place, and weights by number.
    void rename() {
        std::unordered_set<std::string> taken;
        for (const auto* list : {&graph_.inputs, &graph_.outputs})
            for (const std::uint32_t v : *list) taken.insert(graph_.values[v].name);
        const auto give = [&](std::uint32_t v, std::string name) {
            if (is_callers(v)) return;
            while (!taken.insert(name).second) name += '_';
            graph_.values[v].name = std::move(name);
        };
        for (std::uint32_t n = 0; n < graph_.nodes.size(); ++n) {
            auto& node = graph_.nodes[n];
            node.name = node.type + '_' + std::to_string(n);
            for (std::size_t i = 0; i < node.outputs.size(); ++i)
                give(node.outputs[i], node.name + (i == 0 ? "" : '.' + std::to_string(i)));
        }
        for (std::uint32_t v = 0; v < graph_.values.size(); ++v)
            if (graph_.values[v].kind == value_kind::weight) give(v, "weight_" + std::to_string(v));
    }
    /// Whether a value is an input or an output of the model.
    [[nodiscard]] bool is_callers(std::uint32_t v) const {
        return std::ranges::find(graph_.inputs, v) != graph_.inputs.end() ||
               std::ranges::find(graph_.outputs, v) != graph_.outputs.end();
    }

    /// Adds nodes and the constants that they need, in running order, with their weights.
    void add_nodes(onnx::GraphProto& to, std::span<const std::uint32_t> nodes,
                   std::unordered_set<std::string> read) const {
        const auto& g = proto_.graph();
        std::vector<bool> wanted(static_cast<std::size_t>(g.node_size()));
        for (const std::uint32_t n : nodes) wanted[static_cast<std::size_t>(nodes_[n])] = true;
        for (auto n = order_.rbegin(); n != order_.rend(); ++n) {
            const auto& node = g.node(*n);
            const auto reader = static_cast<std::size_t>(*n);
            for (const auto& name : node.output())
                if (constants_.contains(name) && read.contains(name)) wanted[reader] = true;
            if (!wanted[reader]) continue;
            for (auto& name : detail::reads_of(node)) read.insert(std::move(name));
        }
        require_small(nodes.front(), read);
        for (const int n : order_)
            if (wanted[static_cast<std::size_t>(n)]) *to.add_node() = g.node(n);
        for (const auto& w : g.initializer())
            if (read.contains(w.name())) *to.add_initializer() = w;
        for (const auto& w : g.sparse_initializer())
            if (read.contains(w.values().name())) *to.add_sparse_initializer() = w;
    }
    /// Checks the size before weights are read from files, because the weights of a piece that is
    /// too large might fill the memory.
    void require_small(std::uint32_t first, const std::unordered_set<std::string>& read) const {
        bytes all{};
        for (const auto& w : proto_.graph().initializer()) {
            if (!read.contains(w.name())) continue;
            const bool elsewhere = w.data_location() == onnx::TensorProto::EXTERNAL;
            all += bytes{elsewhere ? detail::file_of(w, folder_).size : w.ByteSizeLong()};
        }
        if (all > bytes{detail::most_bytes}) refuse_large(first);
    }
    [[noreturn]] void refuse_large(std::uint32_t first) const {
        throw model_error(model_fault::too_large, graph_.nodes[first].name,
                          "the piece that begins here has 2 GiB or more of weights");
    }
    /// Describes a value at a piece's edge. An input or output of the model keeps the model's
    /// description.
    void describe(onnx::ValueInfoProto& to, std::uint32_t index) const {
        const value& v = graph_.values[index];
        const bool crosses = v.kind == value_kind::inner;
        for (const auto* list : {&proto_.graph().input(), &proto_.graph().output()})
            for (const auto& known : *list)
                if (known.name() == names_[index]) {
                    to = known;
                    detail::set_extents(to, {}, nullptr);
                    return;
                }
        if (crosses && (!v.tensor || v.type == element::unknown))
            throw model_error(
                model_fault::bad_cut, v.name,
                v.tensor ? "it crosses a cut, and its type is unknown" : "it crosses a cut, and isn't a tensor");
        to.set_name(names_[index]);
        auto& type = *to.mutable_type()->mutable_tensor_type();
        type.set_elem_type(detail::number_of(v.type));
        if (!v.ranked) return;
        (void)type.mutable_shape();
        for (const auto& d : v.shape) {
            auto& extent = *type.mutable_shape()->add_dim();
            if (d.extent >= 0) extent.set_dim_value(d.extent);
        }
    }

    onnx::ModelProto proto_;
    std::filesystem::path folder_;
    bool newer_ = false;
    model_graph graph_;
    std::vector<std::string> names_;                        // of each value, in the file
    std::vector<int> order_;                                // the order of the model's nodes
    std::vector<int> nodes_;                                // for each node, the model's number
    std::unordered_map<std::string, std::uint32_t> index_;  // of values
    std::unordered_map<std::string, int> weights_, sparse_;
    // values, and the numbers of the nodes that make them
    std::unordered_map<std::string, int> constants_;
};

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
