// SPDX-License-Identifier: Apache-2.0
// Checks a model node by node, so that an error names the node, and orders the nodes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <optional>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/graph/detail/onnx_files.hpp>
#include <gpushare/graph/detail/onnx_library.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

/// The node's name, or its type and place if it has none.
[[nodiscard]] inline std::string name_of(const onnx::NodeProto& n, std::size_t place) {
    return n.name().empty() ? n.op_type() + "#" + std::to_string(place) : n.name();
}
/// ONNX's own domain has two names.
[[nodiscard]] inline bool is_onnx(std::string_view domain) noexcept { return domain.empty() || domain == "ai.onnx"; }

/// The first line of a message. The checker adds further lines.
[[nodiscard]] inline std::string first_line(std::string_view text) {
    return std::string(text.substr(0, text.find('\n')));
}

/// Names in the order of their first occurrence, each once.
struct name_list {
    void add(const std::string& name) {
        if (!name.empty() && known.insert(name).second) names.push_back(name);
    }
    std::vector<std::string> names{};
    std::unordered_set<std::string> known{};
};

/// Names that a graph reads from outside, in the order of their first occurrence.
inline void add_captured(const onnx::GraphProto& body, name_list& captured) {
    std::unordered_set<std::string> own;
    for (const auto& v : body.input()) own.insert(v.name());
    for (const auto& w : body.initializer()) own.insert(w.name());
    for (const auto& w : body.sparse_initializer()) own.insert(w.values().name());
    for (const auto& n : body.node()) own.insert(n.output().begin(), n.output().end());
    const auto add = [&](const std::string& name) {
        if (!own.contains(name)) captured.add(name);
    };
    for (const auto& n : body.node()) {
        std::ranges::for_each(n.input(), add);
        name_list deeper;
        for (const auto& a : n.attribute()) {
            if (a.has_g()) add_captured(a.g(), deeper);
            for (const auto& g : a.graphs()) add_captured(g, deeper);
        }
        std::ranges::for_each(deeper.names, add);
    }
    for (const auto& v : body.output()) add(v.name());
}

/// The values that a node reads, and the outer values that its bodies read; each once.
[[nodiscard]] inline std::vector<std::string> reads_of(const onnx::NodeProto& n) {
    name_list all;
    for (const auto& name : n.input()) all.add(name);
    std::vector<const onnx::AttributeProto*> bodies;
    for (const auto& a : n.attribute())
        if (a.has_g() || a.graphs_size() > 0) bodies.push_back(&a);
    // Sorted, because engines write attributes in any order.
    std::ranges::stable_sort(bodies, {}, [](const auto* a) -> const std::string& { return a->name(); });
    for (const auto* a : bodies) {
        if (a->has_g()) add_captured(a->g(), all);
        for (const auto& g : a->graphs()) add_captured(g, all);
    }
    return std::move(all.names);
}

/// The node that makes each value; -1 for inputs and weights. Throws model_error (bad_model) if a
/// value is made twice.
[[nodiscard]] inline std::unordered_map<std::string, int> makers(const onnx::GraphProto& g) {
    std::unordered_map<std::string, int> made;
    const auto add = [&](const std::string& name, int by) {
        if (name.empty()) throw model_error(model_fault::bad_model, {}, "a value has no name");
        if (!made.emplace(name, by).second) throw model_error(model_fault::bad_model, name, "it is made twice");
    };
    for (const auto& w : g.initializer()) add(w.name(), -1);
    for (const auto& w : g.sparse_initializer()) add(w.values().name(), -1);
    std::unordered_set<std::string> inputs;
    for (const auto& v : g.input()) {
        if (!inputs.insert(v.name()).second) throw model_error(model_fault::bad_model, v.name(), "it is made twice");
        if (!made.contains(v.name())) add(v.name(), -1);  // an input with a default is a weight
    }
    for (int n = 0; n < g.node_size(); ++n)
        for (const auto& name : g.node(n).output())
            if (!name.empty()) add(name, n);
    return made;
}

/// An order in which the nodes can run: the model's own order if it works. Throws model_error:
/// missing_value, cyclic.
[[nodiscard]] inline std::vector<int> run_order(const onnx::GraphProto& g) {
    const auto made = makers(g);
    const auto count = static_cast<std::size_t>(g.node_size());
    std::vector<std::vector<int>> readers(count);
    std::vector<std::size_t> waits(count);
    for (int n = 0; n < g.node_size(); ++n)
        for (const auto& name : reads_of(g.node(n))) {
            const auto from = made.find(name);
            if (from == made.end())
                throw model_error(model_fault::missing_value, name_of(g.node(n), static_cast<std::size_t>(n)),
                                  "nothing makes '" + name + "'");
            if (from->second < 0) continue;
            readers[static_cast<std::size_t>(from->second)].push_back(n);
            ++waits[static_cast<std::size_t>(n)];
        }
    std::priority_queue<int, std::vector<int>, std::greater<>> ready;
    for (int n = 0; n < g.node_size(); ++n)
        if (waits[static_cast<std::size_t>(n)] == 0) ready.push(n);
    std::vector<int> order;
    while (!ready.empty()) {
        const int n = ready.top();
        ready.pop();
        order.push_back(n);
        for (const int reader : readers[static_cast<std::size_t>(n)])
            if (--waits[static_cast<std::size_t>(reader)] == 0) ready.push(reader);
    }
    for (std::size_t n = 0; n < count && order.size() != count; ++n)
        if (waits[n] != 0)
            throw model_error(model_fault::cyclic, name_of(g.node(static_cast<int>(n)), n),
                              "it waits for itself, through other nodes");
    return order;
}

/// An order that depends only on the edges between nodes, and not on names or the file's order. The
/// order goes from each output of the model back to the nodes that the output needs. Nodes that no
/// output needs come last, in the order of `order`.
[[nodiscard]] inline std::vector<int> order_from_outputs(const onnx::GraphProto& g, const std::vector<int>& order) {
    struct step {
        int node;
        std::vector<std::string> reads;
        std::size_t next;
    };
    const auto made = makers(g);
    std::vector<bool> seen(static_cast<std::size_t>(g.node_size()));
    std::vector<step> open;  // a stack in place of recursion, because a chain of nodes may be long
    std::vector<int> found;
    const auto visit = [&](int n) {
        if (n < 0 || seen[static_cast<std::size_t>(n)]) return;
        seen[static_cast<std::size_t>(n)] = true;
        open.push_back({n, reads_of(g.node(n)), 0});
    };
    const auto go = [&](int from) {
        visit(from);
        while (!open.empty()) {
            step& s = open.back();
            if (s.next < s.reads.size()) {
                visit(made.at(s.reads[s.next++]));
                continue;
            }
            found.push_back(s.node);
            open.pop_back();
        }
    };
    for (const auto& v : g.output())
        if (const auto by = made.find(v.name()); by != made.end()) go(by->second);
    for (const int n : order) go(n);
    return found;
}

/// The versions of the operator sets that a model imports. Throws model_error (bad_model).
[[nodiscard]] inline std::unordered_map<std::string, int> operator_sets(const onnx::ModelProto& m) {
    std::unordered_map<std::string, int> all;
    for (const auto& set : m.opset_import()) {
        const std::string domain = is_onnx(set.domain()) ? std::string() : set.domain();
        if (set.version() < 1 || set.version() > 10000 || !all.emplace(domain, static_cast<int>(set.version())).second)
            throw model_error(model_fault::bad_model, {}, "its operator sets contradict each other");
    }
    if (all.empty() && m.ir_version() < 3) all.emplace("", 1);
    if (all.empty()) throw model_error(model_fault::bad_model, {}, "it names no operator set");
    return all;
}

/// Checks nodes against the operators that the installed ONNX knows.
class node_checker {
public:
    /// `others` has the domains with operators that the engine knows and ONNX doesn't.
    node_checker(const onnx::ModelProto& m, const std::filesystem::path& folder, std::vector<std::string> others)
        : sets_(operator_sets(m)), others_(std::move(others)) {
        for (const auto& f : m.functions()) functions_.insert(f.domain() + "." + f.name());
        const auto& known = onnx::OpSchemaRegistry::DomainToVersionRange::Instance().Map();
        if (const auto set = sets_.find(""); set != sets_.end()) newer_ = set->second > known.at("").second;
        // Newer formats only add number types and metadata. Before format 4, weights had to be
        // inputs.
        context_.set_ir_version(static_cast<int>(std::clamp<std::int64_t>(m.ir_version(), 4, onnx::IR_VERSION)));
        context_.set_opset_imports(sets_);
        context_.set_model_dir(folder.string());
    }

    /// Whether the model imports operators newer than the installed ONNX. That ONNX knows neither
    /// their attributes nor their shapes.
    [[nodiscard]] bool newer() const noexcept { return newer_; }

    /// Throws model_error: unknown_operator, bad_node. Adds the node's outputs to `scope`.
    void check(const onnx::NodeProto& n, std::size_t place, onnx::checker::LexicalScopeContext& scope) const {
        const bool known = know(n, place);
        try {
            if (known && !newer_) onnx::checker::check_node(n, context_, scope);
        } catch (const std::exception& e) {
            throw model_error(model_fault::bad_node, name_of(n, place), n.op_type() + ": " + first_line(e.what()));
        }
        for (const auto& name : n.output()) scope.add(name);
    }

private:
    /// Whether ONNX knows the operator. Returns false if the operator may be the engine's, or newer
    /// than ONNX; otherwise throws model_error (unknown_operator).
    [[nodiscard]] bool know(const onnx::NodeProto& n, std::size_t place) const {
        const auto unknown = [&](const std::string& why) {
            throw model_error(model_fault::unknown_operator, name_of(n, place),
                              "operator '" + n.op_type() + "' " + why);
        };
        if (functions_.contains(n.domain() + "." + n.op_type())) return true;
        const std::string domain = is_onnx(n.domain()) ? std::string() : n.domain();
        const auto set = sets_.find(domain);
        const bool listed = set != sets_.end();
        if (listed && onnx::OpSchemaRegistry::Schema(n.op_type(), set->second, domain) != nullptr) return true;
        if (std::ranges::find(others_, domain) != others_.end()) return false;
        if (!listed) unknown("is of domain '" + domain + "', which the model doesn't import");
        if (newer_ && domain.empty()) return false;  // the operator may be newer
        unknown("isn't known in version " + std::to_string(set->second) + " of domain '" + domain + "'");
        return false;
    }

    std::unordered_map<std::string, int> sets_;
    std::vector<std::string> others_;
    std::unordered_set<std::string> functions_;
    onnx::checker::CheckerContext context_;
    bool newer_ = false;
};

inline void check_weight(const onnx::SparseTensorProto& w, const std::filesystem::path& folder) {
    check_weight(w.values(), folder);
    check_weight(w.indices(), folder);
}
inline void check_weights(const onnx::GraphProto& g, const std::filesystem::path& folder);
/// Checks the weights in attributes and bodies.
inline void check_weights(const onnx::NodeProto& n, const std::filesystem::path& folder) {
    for (const auto& a : n.attribute()) {
        if (a.has_t()) check_weight(a.t(), folder);
        for (const auto& t : a.tensors()) check_weight(t, folder);
        if (a.has_sparse_tensor()) check_weight(a.sparse_tensor(), folder);
        for (const auto& t : a.sparse_tensors()) check_weight(t, folder);
        if (a.has_g()) check_weights(a.g(), folder);
        for (const auto& body : a.graphs()) check_weights(body, folder);
    }
}
inline void check_weights(const onnx::GraphProto& g, const std::filesystem::path& folder) {
    for (const auto& w : g.initializer()) check_weight(w, folder);
    for (const auto& w : g.sparse_initializer()) check_weight(w, folder);
    for (const auto& n : g.node()) check_weights(n, folder);
}
/// Checks the weights of the model's functions, too.
inline void check_weights(const onnx::ModelProto& m, const std::filesystem::path& folder) {
    check_weights(m.graph(), folder);
    for (const auto& f : m.functions())
        for (const auto& n : f.node()) check_weights(n, folder);
}

/// Calls f with a node and the nodes of its bodies.
template <class F>
void for_each_node(const onnx::NodeProto& n, F& f) {
    f(n);
    for (const auto& a : n.attribute()) {
        for (const auto& inner : a.g().node()) for_each_node(inner, f);
        for (const auto& body : a.graphs())
            for (const auto& inner : body.node()) for_each_node(inner, f);
    }
}

/// Throws model_error (cyclic) if a function of the model calls itself, directly or through other
/// functions: an engine would inline the function without end.
inline void check_functions(const onnx::ModelProto& m) {
    std::unordered_map<std::string, std::size_t> by_name;
    for (const auto& f : m.functions()) by_name.emplace(f.domain() + "." + f.name(), by_name.size());
    std::vector<std::vector<std::size_t>> callers(by_name.size());
    std::vector<std::size_t> calls(by_name.size());
    const auto index = [&](const std::string& domain, const std::string& name) {
        const auto at = by_name.find(domain + "." + name);
        return at == by_name.end() ? by_name.size() : at->second;
    };
    for (const auto& f : m.functions()) {
        const std::size_t own = index(f.domain(), f.name());
        auto call = [&](const onnx::NodeProto& n) {
            const std::size_t of = index(n.domain(), n.op_type());
            if (of == by_name.size()) return;
            callers[of].push_back(own);
            ++calls[own];
        };
        for (const auto& n : f.node()) for_each_node(n, call);
    }
    std::vector<std::size_t> done;
    for (std::size_t f = 0; f < calls.size(); ++f)
        if (calls[f] == 0) done.push_back(f);
    for (std::size_t i = 0; i < done.size(); ++i)
        for (const std::size_t caller : callers[done[i]])
            if (--calls[caller] == 0) done.push_back(caller);
    for (const auto& f : m.functions())
        if (calls[index(f.domain(), f.name())] != 0)
            throw model_error(model_fault::cyclic, f.name(), "a function that needs itself");
}

/// Checks all nodes in `order`, and that each output is made. Throws model_error.
inline void check_nodes(const onnx::ModelProto& m, const std::vector<int>& order, const node_checker& with) {
    onnx::checker::LexicalScopeContext scope;
    for (const auto& v : m.graph().input()) scope.add(v.name());
    for (const auto& w : m.graph().initializer()) scope.add(w.name());
    for (const auto& w : m.graph().sparse_initializer()) scope.add(w.values().name());
    for (const int n : order) with.check(m.graph().node(n), static_cast<std::size_t>(n), scope);
    for (const auto& v : m.graph().output())
        if (!scope.this_graph_has(v.name()))
            throw model_error(model_fault::missing_value, v.name(), "nothing makes this output");
}

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
