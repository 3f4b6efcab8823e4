// SPDX-License-Identifier: Apache-2.0
// A model as a plain value: its nodes in the order in which they run, and the values between them.
// This header also has the faults of models, and tensors in memory. split_plan.hpp decides from
// this value where to cut the model, and onnx.hpp reads the value from a file.
//
//   const gpushare::graph::model_graph& g = model.graph();
//   for (const auto& n : g.nodes) std::puts(n.name.c_str());
//   // values that pass from nodes 0..9 to the later ones
//   const auto crossing = gpushare::graph::crossing(g, 10);
//   // what nodes 10..19 read from outside, and leave
//   const auto edges = gpushare::graph::edges_of(g, {10, 20});
//
// A graph is a value: any thread may read it while no thread changes it. A model_error says why a
// model can't be used, and names the node.
//
//   const gpushare::graph::model_error e(gpushare::graph::model_fault::cyclic, "conv1", "it waits for itself");
//   if (e.fault() == gpushare::graph::model_fault::cyclic) log(e.node(), e.what());
//
// A fusion_rule names two operators that an engine fuses, and the cost of a cut between them.
// Without the fusion, kernels write values to memory and read them again; a fused kernel keeps
// these values in registers.
//
//   const gpushare::graph::fusion_rule mine[]{{"Conv", "Relu", 2}, {"MatMul", "element-wise", 2}};
//   const gpushare::graph::split_options options{.fusions = mine};
//
// Without rules of your own, usual_fusions applies. A rule is a preference; it never forbids a cut.
//
// Engines get tensors in memory. A tensor_room gives memory to tensors whose size is known only in
// a run.
//
//   gpushare::graph::tensor picture{gpushare::graph::element::f32, {1, 3, 640, 640}, pixels, pixels_size};
//   // charged to the tenant
//   gpushare::graph::tensor_blocks blocks(chat.memory(), g.values.size());
//   // an output of unknown size, which gets memory from `blocks`
//   gpushare::graph::tensor map{.room = &blocks, .number = 7};
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Models as graphs, cut into pieces that a scheduler sees one by one.
namespace graph {

/// The type of a tensor's elements.
enum class element : std::uint8_t {
    unknown,     ///< not stated
    f32,         ///< float
    f64,         ///< double
    f16,         ///< IEEE half
    bf16,        ///< the upper half of a float
    i8,          ///< signed
    i16,         ///< signed
    i32,         ///< signed
    i64,         ///< signed
    u8,          ///< unsigned
    u16,         ///< unsigned
    u32,         ///< unsigned
    u64,         ///< unsigned
    boolean,     ///< a byte, 0 or 1
    complex64,   ///< two floats
    complex128,  ///< two doubles
    text,        ///< strings, which have no fixed size
};

/// Bytes of one element; 0 for `unknown` and `text`.
[[nodiscard]] constexpr std::size_t size_of(element e) noexcept {
    switch (e) {
        case element::i8:
        case element::u8:
        case element::boolean: return 1;
        case element::f16:
        case element::bf16:
        case element::i16:
        case element::u16: return 2;
        case element::f32:
        case element::i32:
        case element::u32: return 4;
        case element::f64:
        case element::i64:
        case element::u64:
        case element::complex64: return 8;
        case element::complex128: return 16;
        case element::unknown:
        case element::text: break;
    }
    return 0;
}

/// The enumerator's name.
[[nodiscard]] constexpr std::string_view to_string(element e) noexcept {
    switch (e) {
        case element::f32: return "f32";
        case element::f64: return "f64";
        case element::f16: return "f16";
        case element::bf16: return "bf16";
        case element::i8: return "i8";
        case element::i16: return "i16";
        case element::i32: return "i32";
        case element::i64: return "i64";
        case element::u8: return "u8";
        case element::u16: return "u16";
        case element::u32: return "u32";
        case element::u64: return "u64";
        case element::boolean: return "boolean";
        case element::complex64: return "complex64";
        case element::complex128: return "complex128";
        case element::text: return "text";
        case element::unknown: break;
    }
    return "unknown";
}

/// One extent of a tensor.
struct dimension {
    std::int64_t extent = -1;  ///< elements; negative if known only when the model runs
    std::string symbol{};      ///< the model's name for the extent, such as "batch"; may be empty

    friend bool operator==(const dimension&, const dimension&) = default;
};

/// Where a value comes from.
enum class value_kind : std::uint8_t {
    input,   ///< the caller gives the value with every run
    weight,  ///< the value is a constant of the model
    inner,   ///< a node makes the value, for other nodes
    output,  ///< a node makes the value, for the caller, and perhaps for other nodes
};

/// A value between nodes.
struct value {
    std::string name{};                   ///< unique in the graph, not empty
    element type = element::unknown;      ///< the type of the value's elements
    std::vector<dimension> shape{};       ///< outermost first; valid only if `ranked`
    value_kind kind = value_kind::inner;  ///< where the value comes from
    bool ranked = false;                  ///< whether the number of dimensions is known
    bool tensor = true;                   ///< false for a sequence, a map or an optional

    /// The size of the tensor if its type and all extents are known. Saturates at bytes::max().
    [[nodiscard]] std::optional<bytes> size() const noexcept {
        const std::size_t one = size_of(type);
        if (!tensor || !ranked || one == 0) return std::nullopt;
        bytes all{one};
        for (const auto& d : shape) {
            if (d.extent < 0) return std::nullopt;
            all = all * static_cast<std::uint64_t>(d.extent);
        }
        return all;
    }
    friend bool operator==(const value&, const value&) = default;
};

/// An operation. A loop or a branch is one node. The values that its body reads from outside are
/// among its inputs.
struct node {
    std::string name{};                    ///< from the model; not empty, not necessarily unique
    std::string type{};                    ///< the operator's name, such as "Conv"
    std::vector<std::uint32_t> inputs{};   ///< indices of values, each once, without omitted inputs
    std::vector<std::uint32_t> outputs{};  ///< indices of values, each once

    friend bool operator==(const node&, const node&) = default;
};

/// A model. The nodes are in an order in which they can run.
struct model_graph {
    std::vector<node> nodes{};             ///< each after the nodes whose values it reads
    std::vector<value> values{};           ///< the values, in no particular order
    std::vector<std::uint32_t> inputs{};   ///< values that the caller gives, in the model's order
    std::vector<std::uint32_t> outputs{};  ///< values that the caller gets, in the model's order

    friend bool operator==(const model_graph&, const model_graph&) = default;
};

/// Consecutive nodes.
struct node_range {
    std::uint32_t first = 0;   ///< the first node
    std::uint32_t behind = 0;  ///< one past the last node

    /// The number of nodes.
    [[nodiscard]] constexpr std::uint32_t size() const noexcept { return behind - first; }
    friend constexpr bool operator==(const node_range&, const node_range&) = default;
};

namespace detail {

/// Checks the values' names, kinds and extents. Returns the fault, or an empty text.
[[nodiscard]] inline std::string wrong_values(const model_graph& g) {
    std::vector<std::string_view> names;
    for (const auto& v : g.values) {
        names.push_back(v.name);
        if (v.name.empty()) return "a value has no name";
        if (!v.ranked && !v.shape.empty()) return "value '" + v.name + "' has extents but no rank";
    }
    std::ranges::sort(names);
    if (const auto twice = std::ranges::adjacent_find(names); twice != names.end())
        return "two values are named '" + std::string(*twice) + "'";
    const auto all_there = [&](const auto& list) {
        return std::ranges::all_of(list, [&](std::uint32_t v) { return v < g.values.size(); });
    };
    if (!all_there(g.inputs)) return "an input names no value";
    if (!all_there(g.outputs)) return "an output names no value";
    for (const std::uint32_t v : g.inputs)
        if (g.values[v].kind != value_kind::input) return "input '" + g.values[v].name + "' is of another kind";
    std::vector<bool> leaves(g.values.size());
    for (const std::uint32_t v : g.outputs) leaves[v] = true;
    for (std::size_t v = 0; v < g.values.size(); ++v)
        if (g.values[v].kind == value_kind::output && !leaves[v])
            return "value '" + g.values[v].name + "' is no output of the model";
    return {};
}

/// Whether `list` has an index twice.
[[nodiscard]] inline bool has_twice(std::vector<std::uint32_t> list) {
    std::ranges::sort(list);
    return std::ranges::adjacent_find(list) != list.end();
}

/// Checks node `n`, where the nodes before it made the values in `made`. Returns the fault, or an
/// empty text. Adds the node's outputs to `made`.
[[nodiscard]] inline std::string wrong_node(const model_graph& g, const node& n, std::vector<bool>& made) {
    const auto named = [&](std::string_view what, std::uint32_t v) {
        return "node '" + n.name + "' (" + n.type + ") " + std::string(what) + " '" + g.values[v].name + "'";
    };
    if (n.name.empty() || n.type.empty()) return "a node has no name or no type";
    for (const auto* list : {&n.inputs, &n.outputs}) {
        for (const std::uint32_t v : *list)
            if (v >= g.values.size()) return "node '" + n.name + "' (" + n.type + ") names no value";
        if (has_twice(*list)) return "node '" + n.name + "' (" + n.type + ") names a value twice";
    }
    for (const std::uint32_t v : n.inputs)
        if (!made[v]) return named("reads before it is made", v);
    for (const std::uint32_t v : n.outputs) {
        if (made[v]) return named("makes once more", v);
        made[v] = true;
    }
    return {};
}

}  // namespace detail

/// Checks a graph. Returns the fault with the name of the node or value, or an empty text if the
/// graph is sound. In a sound graph, all indices name values, and names of values are unique. Each
/// node comes after the nodes whose values it reads. Exactly one node makes each value that is
/// neither an input nor a weight, and no node makes an input or a weight. An output of the model
/// may be an input or a weight that passes through.
[[nodiscard]] inline std::string wrong(const model_graph& g) {
    if (auto text = detail::wrong_values(g); !text.empty()) return text;
    std::vector<bool> made(g.values.size());
    for (std::size_t v = 0; v < g.values.size(); ++v)
        made[v] = g.values[v].kind == value_kind::input || g.values[v].kind == value_kind::weight;
    for (const auto& n : g.nodes)
        if (auto text = detail::wrong_node(g, n, made); !text.empty()) return text;
    for (std::size_t v = 0; v < g.values.size(); ++v)
        if (!made[v]) return "no node makes value '" + g.values[v].name + "'";
    return {};
}

/// The positions between nodes at which a value is alive. Position p is before node p.
struct lifetime {
    std::uint32_t born = 0;  ///< after the node that makes the value; 0 for inputs and weights
    std::uint32_t last = 0;  ///< after the last node that reads the value; `born` if none does

    friend constexpr bool operator==(const lifetime&, const lifetime&) = default;
};

/// The lifetime of each value, by index. O(edges). The caller's use of an output doesn't count.
[[nodiscard]] inline std::vector<lifetime> lifetimes(const model_graph& g) {
    std::vector<lifetime> all(g.values.size());
    for (std::uint32_t n = 0; n < g.nodes.size(); ++n) {
        for (const std::uint32_t v : g.nodes[n].outputs) all[v] = {n + 1, n + 1};
        for (const std::uint32_t v : g.nodes[n].inputs) all[v].last = std::max(all[v].last, n + 1);
    }
    return all;
}

/// The values that a cut before node `position` has to pass on, by index: an earlier node makes the
/// value, and this or a later node reads it. Inputs and weights don't count, because every piece
/// gets them from the caller and from the model.
[[nodiscard]] inline std::vector<std::uint32_t> crossing(const model_graph& g, const std::vector<lifetime>& lives,
                                                         std::uint32_t position) {
    std::vector<std::uint32_t> all;
    for (std::uint32_t v = 0; v < g.values.size(); ++v)
        if (lives[v].born != 0 && lives[v].born <= position && lives[v].last > position) all.push_back(v);
    return all;
}
/// crossing() for a single position.
[[nodiscard]] inline std::vector<std::uint32_t> crossing(const model_graph& g, std::uint32_t position) {
    return crossing(g, lifetimes(g), position);
}

/// The values that a piece shares with the rest of the graph: indices, ascending.
struct piece_edges {
    std::vector<std::uint32_t> inputs{};   ///< read here, given by the caller or an earlier piece
    std::vector<std::uint32_t> weights{};  ///< read here, constants of the model
    std::vector<std::uint32_t> outputs{};  ///< made here, read by a later piece or by the caller

    friend bool operator==(const piece_edges&, const piece_edges&) = default;
};

/// The edges of these nodes, which may come in any order. Each must be a node of the graph.
[[nodiscard]] inline piece_edges edges_of(const model_graph& g, std::span<const std::uint32_t> nodes) {
    std::vector<bool> inside(g.nodes.size()), read(g.values.size()), made(g.values.size()), wanted(g.values.size());
    for (const std::uint32_t n : nodes) inside[n] = true;
    for (std::size_t n = 0; n < g.nodes.size(); ++n) {
        for (const std::uint32_t v : g.nodes[n].inputs) (inside[n] ? read : wanted)[v] = true;
        for (const std::uint32_t v : g.nodes[n].outputs) made[v] = inside[n];
    }
    piece_edges e;
    for (std::uint32_t v = 0; v < g.values.size(); ++v) {
        const auto kind = g.values[v].kind;
        if (read[v] && !made[v]) (kind == value_kind::weight ? e.weights : e.inputs).push_back(v);
        if (made[v] && (kind == value_kind::output || wanted[v])) e.outputs.push_back(v);
    }
    return e;
}
/// edges_of() for consecutive nodes.
[[nodiscard]] inline piece_edges edges_of(const model_graph& g, node_range of) {
    std::vector<std::uint32_t> nodes(of.size());
    std::iota(nodes.begin(), nodes.end(), of.first);
    return edges_of(g, nodes);
}

}  // namespace graph

namespace graph {

/// The faults of a model, or of a cut.
enum class model_fault : std::uint8_t {
    no_file,           ///< the file can't be read
    unreadable,        ///< the bytes aren't a model, or are only a part of one
    too_large,         ///< 2 GiB or more, which the format can't hold in one file or one piece
    bad_model,         ///< the model as a whole is malformed: no operator set, or a name used twice
    bad_node,          ///< a node has attributes, inputs or outputs that its operator doesn't allow
    bad_weight,        ///< a weight has more or fewer bytes than its shape says
    unknown_operator,  ///< nothing says what the node computes
    missing_value,     ///< a node reads a value that nothing makes
    cyclic,            ///< nodes wait for each other
    bad_shapes,        ///< shapes contradict each other
    external_data,     ///< a weight's file is missing, too short, or outside the model's folder
    bad_cut,           ///< no buffer can hold a value at the cut, or the graph lacks the nodes
    engine,            ///< the engine can't be loaded, refuses a piece or fails
};

/// The error code of a fault.
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

/// Says why a model can't be used. The text names the node or the value, and the reason.
class model_error : public operation_error {
public:
    /// `node` is empty if the model as a whole is at fault. Unprintable characters are escaped.
    model_error(model_fault fault, std::string node, std::string_view why)
        : operation_error(code_of(fault), {}, sentence(node, why).c_str()), fault_(fault), node_(std::move(node)) {}

    /// The fault.
    [[nodiscard]] model_fault fault() const noexcept { return fault_; }
    /// The name of the node or value at fault, as in the model; empty for the model as a whole.
    [[nodiscard]] const std::string& node() const noexcept { return node_; }

private:
    static std::string sentence(const std::string& node, std::string_view why) {
        return (node.empty() ? std::string("model: ") : "model, '" + node + "': ").append(why);
    }

    model_fault fault_;
    std::string node_;
};

namespace detail {

/// Throws model_error (bad_cut) if an output of the model is a weight, which no piece gives.
inline void refuse_weights_as_outputs(const model_graph& g) {
    for (const std::uint32_t v : g.outputs)
        if (g.values[v].kind == value_kind::weight)
            throw model_error(model_fault::bad_cut, g.values[v].name, "an output that is a weight");
}

}  // namespace detail
}  // namespace graph

namespace graph {

/// Two operators that an engine fuses if only the second operator reads the first one's result. The
/// names of operators are ONNX's; `element-wise` stands for all of element_wise_types.
struct fusion_rule {
    std::string_view before{};  ///< the operator that makes the value
    std::string_view after{};   ///< the operator that reads the value
    /// The cost of a cut between the two: how many more times the value's bytes pass through
    /// memory. Must be above 0.
    double passes = 2;

    friend constexpr bool operator==(const fusion_rule&, const fusion_rule&) = default;
};

/// Operators that compute each element from one element of each input.
inline constexpr std::array<std::string_view, 40> element_wise_types{
    "Abs",  "Add",      "Cast",  "Ceil",     "Celu",        "Clip",      "Cos",       "Div",        "Elu",  "Erf",
    "Exp",  "FastGelu", "Floor", "Gelu",     "HardSigmoid", "HardSwish", "LeakyRelu", "Log",        "Max",  "Min",
    "Mish", "Mul",      "Neg",   "Not",      "PRelu",       "Pow",       "QuickGelu", "Reciprocal", "Relu", "Round",
    "Selu", "Sigmoid",  "Sin",   "Softplus", "Softsign",    "Sqrt",      "Sub",       "Swish",      "Tanh", "Where"};

/// Whether an operator is element-wise.
[[nodiscard]] constexpr bool is_element_wise(std::string_view type) noexcept {
    return std::ranges::find(element_wise_types, type) != element_wise_types.end();
}

/// Fusions that ONNX Runtime, OpenVINO and TensorRT have in common. A cut next to a quantised
/// operator costs more, because without its neighbours the operator runs in floats.
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

/// The passes of the first rule that fits; 0 if no rule fits, because the engine then doesn't fuse
/// the two.
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

namespace graph {

/// Provides memory for tensors whose size is known only in a run.
class tensor_room {
public:
    /// Memory for tensor `number`: at least `size` bytes, at a multiple of 256. The memory is valid
    /// until the next call for that number, even if that call throws. Engines call room_for on the
    /// thread that computes, for one tensor at a time. Throws std::bad_alloc or a class derived
    /// from it.
    [[nodiscard]] virtual void* room_for(std::uint32_t number, std::size_t size) = 0;

protected:
    ~tensor_room() = default;
};

/// A tensor in memory that an engine can use. A plain value, which doesn't own the memory.
struct tensor {
    element type = element::unknown;    ///< the type of the tensor's elements
    std::vector<std::int64_t> shape{};  ///< outermost first; the engine replaces negative extents
    void* data = nullptr;               ///< row-major without gaps; null if there is no memory yet
    std::size_t capacity = 0;           ///< bytes at `data`
    tensor_room* room = nullptr;        ///< gives memory to an output that has none, or too little
    std::uint32_t number = 0;           ///< the tensor's number in `room`

    /// Bytes that the shape needs; 0 if an extent or the type is unknown. Saturates.
    [[nodiscard]] std::size_t size() const noexcept {
        bytes all{size_of(type)};
        for (const std::int64_t extent : shape) all = extent < 0 ? bytes{} : all * static_cast<std::uint64_t>(extent);
        return static_cast<std::size_t>(all.count());
    }
    /// Whether all extents are known.
    [[nodiscard]] bool shaped() const noexcept {
        for (const std::int64_t extent : shape)
            if (extent < 0) return false;
        return true;
    }
    /// Sets an output's type and shape, and returns memory for them. Throws model_error (engine) if
    /// the memory is too small and there is no `room`, and what `room` throws; the tensor then has
    /// no memory.
    void* place(element of, std::vector<std::int64_t> extents) {
        type = of;
        shape = std::move(extents);
        const std::size_t needed = size();
        if (needed <= capacity && data != nullptr) return data;
        if (room == nullptr)
            throw model_error(
                model_fault::engine, {},
                "an output has " + std::to_string(needed) + " bytes, and its buffer " + std::to_string(capacity));
        data = nullptr;  // if the call throws, the old memory is gone, too
        capacity = 0;
        data = room->room_for(number, needed);
        capacity = needed;
        return data;
    }
};

/// Blocks of a memory, one for each tensor that needs a block. A block that is too small is
/// replaced by a larger block; other blocks are kept. The object can't be copied or moved, and one
/// thread at a time uses it. `Memory` must outlive the object, and no work may use the blocks when
/// it is destroyed.
template <memory_resource Memory>
class tensor_blocks final : public tensor_room {
public:
    static constexpr std::size_t alignment = 256;  ///< the alignment of each block, in bytes

    /// Blocks for tensors 0 to n - 1.
    tensor_blocks(Memory& of, std::size_t n) : memory_(&of), blocks_(n) {}
    tensor_blocks(const tensor_blocks&) = delete;
    tensor_blocks& operator=(const tensor_blocks&) = delete;
    ~tensor_blocks() {
        for (auto& b : blocks_) free(b);
    }

    [[nodiscard]] void* room_for(std::uint32_t number, std::size_t size) override {
        block& b = blocks_.at(number);
        if (b.data != nullptr && size <= b.size) return b.data;
        free(b);
        const std::size_t whole = size == 0 ? 1 : size;
        b.data = memory_->allocate(whole, alignment);
        b.size = whole;
        return b.data;
    }
    /// Whether tensor `number` has a block, and that block begins at `data`.
    [[nodiscard]] bool holds(std::uint32_t number, const void* data) const noexcept {
        return data != nullptr && blocks_[number].data == data;
    }
    /// Frees one tensor's block.
    void release(std::uint32_t number) noexcept { free(blocks_[number]); }
    /// The size of all blocks together.
    [[nodiscard]] bytes size() const noexcept {
        bytes all{};
        for (const auto& b : blocks_) all += bytes{b.size};
        return all;
    }

private:
    struct block {
        void* data = nullptr;
        std::size_t size = 0;
    };
    void free(block& b) noexcept {
        if (b.data != nullptr) memory_->deallocate(b.data, b.size, alignment);
        b = {};
    }

    Memory* memory_;
    std::vector<block> blocks_;
};

/// An engine that runs pieces of models. `enqueue(stream, piece, inputs, outputs)` enqueues piece
/// number `piece`, with inputs and outputs in the order of edges_of(). The enqueued work reads the
/// inputs' shapes and bytes when it runs. It gives each output its type and shape by place(); if an
/// output has a shape and memory already, the work writes there. The spans and tensors live until
/// the work has ended, and no other code uses them in the meantime. An input without memory comes
/// from a piece that failed, so the work must fail, too. Both enqueue and the work report failures
/// by exceptions.
template <class E, class Stream>
concept piece_engine = timeline<Stream> &&
    requires(E& e, Stream& to, std::uint32_t piece, std::span<const tensor* const> inputs,
             std::span<tensor* const> outputs) {
    e.enqueue(to, piece, inputs, outputs);
};

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
