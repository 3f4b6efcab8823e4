// SPDX-License-Identifier: Apache-2.0
// Runs a cut model for a tenant. Each piece is a submission of its own, so other work runs between
// pieces, and bounds, shares and deadlines apply to single pieces.
//
//   gpushare::graph::onnxruntime_engine engine(library);
//   // piece 0, 1, ...
//   for (const auto& p : plan.pieces) engine.add(model.extract(plan.nodes(p.places)));
//   gpushare::graph::cut_model pages(batch, model.graph(), plan, engine);
//   std::array in{picture};    std::array out{gpushare::graph::tensor{}};
//   pages.run(in, out, {.deadline = now + 100ms});  // the whole model's results
//
// On a device, captured_model makes one graph of all pieces, with a gate between any two.
//
// Values that pass from piece to piece are in the tenant's memory. Values that are never alive at
// the same time share bytes. A value whose size is known only in a run has a block of its own,
// which grows.
//
// place_buffers finds places in one block for the values between pieces. Use it for runners of your
// own:
//
//   const auto values = gpushare::graph::crossing_values(g, plan);
//   const auto layout = gpushare::graph::place_buffers(gpushare::graph::needs_of(g, values), 256);
//   std::byte* block = allocate(layout.total);  // values[i]: at block + layout.offsets[i]
//
// Inputs and outputs of the model belong to the caller and need no place. Layouts are values: any
// thread may read a layout while no thread changes it.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/handles.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/graph/split_plan.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// Bytes that are needed from one step to another, including both steps.
struct buffer_need {
    bytes size{};             ///< 0 needs no place
    std::uint32_t first = 0;  ///< the step that writes the bytes
    std::uint32_t last = 0;   ///< the last step that reads the bytes; not before `first`

    friend constexpr bool operator==(const buffer_need&, const buffer_need&) = default;
};

/// Where the bytes of each need are in one block.
struct buffer_layout {
    /// The offset of each need, in order; multiples of the alignment.
    std::vector<std::uint64_t> offsets{};
    bytes total{};  ///< the block's size

    friend bool operator==(const buffer_layout&, const buffer_layout&) = default;
};

/// A value that passes from one piece of a plan to later ones.
struct crossing_value {
    std::uint32_t value = 0;  ///< index in the graph
    std::uint32_t first = 0;  ///< the piece that makes the value
    std::uint32_t last = 0;   ///< the last piece that reads the value

    friend constexpr bool operator==(const crossing_value&, const crossing_value&) = default;
};

/// The values to keep across a plan's cuts, by index. The model's outputs aren't among them,
/// because the caller has buffers for outputs. `p` must fit the graph (check() in plan_text.hpp).
[[nodiscard]] inline std::vector<crossing_value> crossing_values(const model_graph& g, const split_plan& p) {
    std::vector<std::optional<crossing_value>> all(g.values.size());
    for (std::uint32_t i = 0; i < p.pieces.size(); ++i)
        for (const std::uint32_t n : p.nodes(p.pieces[i].places)) {
            for (const std::uint32_t v : g.nodes[n].outputs)
                if (g.values[v].kind == value_kind::inner) all[v] = {v, i, i};
            for (const std::uint32_t v : g.nodes[n].inputs)
                if (all[v]) all[v]->last = i;
        }
    std::vector<crossing_value> crossing;
    for (const auto& v : all)
        if (v && v->last > v->first) crossing.push_back(*v);
    return crossing;
}

/// The memory that these values need. `sizes` has the size of each value of the graph, for callers
/// that know better than the graph (dynamic shapes). If `sizes` is empty, the graph's sizes apply.
/// Throws operation_error (invalid_specification) if a size is unknown, or if `sizes` has another
/// number of sizes.
[[nodiscard]] inline std::vector<buffer_need> needs_of(const model_graph& g, std::span<const crossing_value> values,
                                                       std::span<const bytes> sizes = {}) {
    if (!sizes.empty() && sizes.size() != g.values.size())
        throw operation_error(errc::invalid_specification, {}, "buffers of a model: each value needs a size");
    std::vector<buffer_need> needs;
    for (const auto& c : values) {
        const auto size = sizes.empty() ? g.values[c.value].size() : std::optional(sizes[c.value]);
        if (!size)
            throw operation_error(errc::invalid_specification, {},
                                  ("buffers of a model: unknown size of " + g.values[c.value].name).c_str());
        needs.push_back({*size, c.first, c.last});
    }
    return needs;
}

namespace detail {

[[nodiscard]] inline bool meet(const buffer_need& a, const buffer_need& b) noexcept {
    return a.first <= b.last && b.first <= a.last;
}

/// The needs' sizes, rounded up to multiples of the alignment. Throws if the alignment isn't a
/// power of two, or if the sum of the sizes overflows.
[[nodiscard]] inline std::vector<std::uint64_t> rounded_sizes(std::span<const buffer_need> needs,
                                                              std::size_t alignment) {
    if (!std::has_single_bit(alignment)) raise(gpushare::detail::impossible_block(0, alignment), {}, "placing buffers");
    std::vector<std::uint64_t> sizes;
    bytes sum{};
    for (const auto& n : needs) {
        const bytes up = n.size + bytes{alignment - 1};
        sum += up;
        sizes.push_back(up.count() & ~(std::uint64_t{alignment} - 1));
    }
    if (sum == bytes::max()) raise(gpushare::detail::impossible_block(sum.count(), alignment), {}, "placing buffers");
    return sizes;
}

/// Places the needs in `order`. Each need goes into the smallest gap between needs that are alive
/// at the same time. If the need fits into no gap, the need goes behind all of them.
[[nodiscard]] inline buffer_layout place_in_order(std::span<const buffer_need> needs,
                                                  std::span<const std::uint64_t> sizes,
                                                  std::span<const std::uint32_t> order) {
    buffer_layout out{std::vector<std::uint64_t>(needs.size()), {}};
    std::vector<std::uint32_t> placed;  // by offset
    std::uint64_t total = 0;
    for (const std::uint32_t i : order) {
        if (sizes[i] == 0) continue;
        std::uint64_t until = 0, best = 0, gap = std::numeric_limits<std::uint64_t>::max();
        for (const std::uint32_t other : placed) {
            if (!meet(needs[i], needs[other])) continue;
            const std::uint64_t at = out.offsets[other];
            if (at >= until && at - until >= sizes[i] && at - until < gap) best = until, gap = at - until;
            until = std::max(until, at + sizes[other]);
        }
        const std::uint64_t at = gap == std::numeric_limits<std::uint64_t>::max() ? until : best;
        out.offsets[i] = at;
        total = std::max(total, at + sizes[i]);
        placed.insert(std::ranges::upper_bound(placed, at, {}, [&](std::uint32_t p) { return out.offsets[p]; }), i);
    }
    out.total = bytes{total};
    return out;
}

}  // namespace detail

/// The most bytes that one step needs, in multiples of the alignment. No layout can be smaller.
/// Throws as place_buffers does.
[[nodiscard]] inline bytes least_total(std::span<const buffer_need> needs, std::size_t alignment) {
    const auto sizes = detail::rounded_sizes(needs, alignment);
    std::uint64_t most = 0;
    for (const auto& at : needs) {  // the maximum is reached where a need begins
        std::uint64_t there = 0;
        for (std::size_t i = 0; i < needs.size(); ++i)
            if (needs[i].first <= at.first && at.first <= needs[i].last) there += sizes[i];
        most = std::max(most, there);
    }
    return bytes{most};
}

/// Finds a place for each need. Needs of the same step don't overlap, and the block is never larger
/// than the sum of the rounded sizes. Tries four orders: the largest first, the largest product of
/// size and lifetime first, the longest-lived first, and the order of the steps. Takes the order
/// with the smallest block. Throws memory_error: bad_alignment unless the alignment is a power of
/// two, or size_overflow. O(needs^2).
[[nodiscard]] inline buffer_layout place_buffers(std::span<const buffer_need> needs, std::size_t alignment) {
    const auto sizes = detail::rounded_sizes(needs, alignment);
    const bytes least = least_total(needs, alignment);
    const auto steps = [&](std::uint32_t i) { return std::uint64_t{needs[i].last} - needs[i].first + 1; };
    const auto area = [&](std::uint32_t i) { return static_cast<double>(sizes[i]) * static_cast<double>(steps(i)); };
    std::vector<std::uint32_t> order(needs.size());
    buffer_layout best;
    const auto attempt = [&](auto before) {
        if (!best.offsets.empty() && best.total == least) return;
        std::iota(order.begin(), order.end(), 0U);
        std::ranges::stable_sort(order, before);
        auto layout = detail::place_in_order(needs, sizes, order);
        if (best.offsets.empty() || layout.total < best.total) best = std::move(layout);
    };
    attempt([&](std::uint32_t a, std::uint32_t b) { return sizes[a] > sizes[b]; });
    attempt([&](std::uint32_t a, std::uint32_t b) { return area(a) > area(b); });
    attempt([&](std::uint32_t a, std::uint32_t b) { return steps(a) > steps(b); });
    attempt([&](std::uint32_t a, std::uint32_t b) { return needs[a].first < needs[b].first; });
    return best;
}

}  // namespace graph

namespace graph {

namespace detail {

/// The fraction `part` of a time, which counts as at most a year, so that numbers in an edited plan
/// can't overflow.
[[nodiscard]] inline ns part_of(ns time, double part) noexcept {
    constexpr ns most = std::chrono::hours(24 * 365);
    return ns{static_cast<std::int64_t>(static_cast<double>(std::clamp(time, ns{}, most).count()) * part)};
}

}  // namespace detail

/// The options of a cut model's runs.
struct cut_options {
    /// The options of each piece's submission. Piece i has the key `key` + i, by which a limiter
    /// learns how long the piece takes. The deadline is the run's.
    submit_options submit{.key = 1};
    /// Whether to declare the planned time of each piece to the limiter. If not, the limiter learns
    /// all times by itself.
    bool declare_lengths = false;
    /// The most pieces that are submitted and haven't ended; at least 1. With 1, the device waits
    /// between two pieces until the thread that runs the model wakes up. With a larger number, the
    /// device waits there only if the limiter doesn't admit the next piece behind a piece of that
    /// length.
    std::uint32_t ahead = 2;
    std::size_t part = 0;  ///< the number of the tenant's device
};

/// The values of a cut model while it runs, and room for them in `Memory`. Values between pieces
/// that are never alive at the same time share bytes of one block. A value whose size is known only
/// in a run has a block of its own, and so has an output without a buffer. The object has no engine
/// and doesn't submit; cut_model does. The object can't be copied or moved, and serves one run at a
/// time. The memory must outlive the object, and no work may use the values when the object is
/// destroyed.
template <memory_resource Memory>
class piece_tensors {
public:
    /// Throws as cut_model's constructor does. Errors name `owner`.
    piece_tensors(Memory& of, const model_graph& g, const split_plan& plan, std::string_view owner = {})
        : owner_(owner),
          inputs_(g.inputs),
          outputs_(g.outputs),
          blocks_(of, g.values.size() + 1),
          tensors_(g.values.size()),
          kinds_(g.values.size()),
          given_(g.outputs.size()),
          passed_(g.outputs.size()) {
        for (const std::uint32_t v : g.inputs) input_types_.push_back(g.values[v].type);
        if (plan.of_graph != fingerprint(g) || plan.pieces.empty())
            throw operation_error(errc::invalid_specification, owner_, "a plan of cuts for a different graph");
        for (std::uint32_t v = 0; v < g.values.size(); ++v) prepare(g.values[v], v);
        detail::refuse_weights_as_outputs(g);
        for (const auto& p : plan.pieces) add(g, plan.nodes(p.places));
        place(g, plan);
    }
    piece_tensors(const piece_tensors&) = delete;
    piece_tensors& operator=(const piece_tensors&) = delete;
    ~piece_tensors() = default;

    /// The number of pieces.
    [[nodiscard]] std::uint32_t pieces() const noexcept { return static_cast<std::uint32_t>(pieces_.size()); }
    /// The bytes of all blocks.
    [[nodiscard]] bytes held() const noexcept { return blocks_.size(); }

    /// Resets every value to its state before the first piece. `inputs` and `outputs` are in the
    /// model's order. Throws operation_error (invalid_specification) for a wrong number of tensors
    /// or an input of a different type from the model's, and what the memory throws.
    void begin(std::span<const tensor> inputs, std::span<const tensor> outputs) {
        if (inputs.size() != inputs_.size() || outputs.size() != outputs_.size())
            throw operation_error({errc::invalid_specification, inputs.size() + outputs.size(), 0,
                                   inputs_.size() + outputs_.size(), reason::wrong_count},
                                  owner_, "inputs and outputs of a model");
        for (std::size_t i = 0; i < inputs.size(); ++i) check_type(i, inputs[i].type);
        reset();
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            tensor& t = tensors_[outputs_[i]];
            const bool mine = !of_caller(i, outputs[i]);
            given_[i] = !mine;
            t.data = mine ? nullptr : outputs[i].data;
            t.capacity = mine ? 0 : outputs[i].capacity;
            if (mine && known_[t.number]) {
                t.data = blocks_.room_for(t.number, t.size());
                t.capacity = t.size();
            }
            if (t.data != nullptr) t.room = mine ? &blocks_ : nullptr;
        }
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            tensor& t = tensors_[inputs_[i]];
            t = inputs[i];
            t.room = nullptr;
        }
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            const bool passes = kinds_[outputs_[i]] == value_kind::input && !given_[i];
            passed_[i] = passes ? tensors_[outputs_[i]].data : nullptr;
        }
    }
    /// Whether `to` has a caller's buffer for output `i`. Neither a block nor an input that an
    /// earlier run returned counts as one.
    [[nodiscard]] bool of_caller(std::size_t i, const tensor& to) const noexcept {
        const bool returned = i < outputs_.size() && (blocks_.holds(outputs_[i], to.data) || passed_[i] == to.data);
        return to.data != nullptr && !returned;
    }
    /// The same question for the outputs that begin() got.
    [[nodiscard]] bool of_caller(std::size_t i) const noexcept { return given_[i]; }
    /// The inputs of a piece, as piece_engine::enqueue takes them.
    [[nodiscard]] std::span<const tensor* const> inputs(std::uint32_t number) const noexcept {
        return pieces_[number].inputs;
    }
    /// The outputs of a piece, as piece_engine::enqueue takes them.
    [[nodiscard]] std::span<tensor* const> outputs(std::uint32_t number) const noexcept {
        return pieces_[number].outputs;
    }
    /// The model's output `i` after the last piece.
    [[nodiscard]] const tensor& output(std::size_t i) const noexcept { return tensors_[outputs_[i]]; }

private:
    struct piece {
        std::vector<const tensor*> inputs{};
        std::vector<tensor*> outputs{};
    };
    static constexpr std::uint64_t unplaced = ~std::uint64_t{0};

    /// Checks the type of input `i`, since an engine may take numbers of the same size for its own.
    void check_type(std::size_t i, element type) const {
        if (input_types_[i] == element::unknown || type == input_types_[i]) return;
        std::string text = owner_.empty() ? "" : "tenant '" + owner_ + "': ";
        text.append("input ").append(std::to_string(i)).append(" of a model is ");
        text.append(to_string(input_types_[i])).append(", not ").append(to_string(type));
        throw operation_error(errc::invalid_specification, owner_, text.c_str());
    }
    void prepare(const value& v, std::uint32_t number) {
        kinds_[number] = v.kind;
        tensor& t = tensors_[number];
        t.type = v.type;
        for (const auto& d : v.shape) t.shape.push_back(d.extent);
        if (!v.ranked) t.shape = {-1};  // an empty shape would be a single number
        known_.push_back(v.size().has_value());
        shapes_.push_back(t.shape);
    }
    void add(const model_graph& g, std::span<const std::uint32_t> nodes) {
        const auto edges = edges_of(g, nodes);
        piece p;
        const auto check = [&](std::uint32_t v) {
            if (g.values[v].kind == value_kind::inner && !g.values[v].tensor)
                throw model_error(model_fault::bad_cut, g.values[v].name, "it crosses a cut, and isn't a tensor");
            return &tensors_[v];
        };
        for (const std::uint32_t v : edges.inputs) p.inputs.push_back(check(v));
        for (const std::uint32_t v : edges.outputs) p.outputs.push_back(check(v));
        pieces_.push_back(std::move(p));
    }
    /// Finds places in one block for the values of known size between pieces.
    void place(const model_graph& g, const split_plan& plan) {
        auto crossing = crossing_values(g, plan);
        std::erase_if(crossing, [&](const crossing_value& c) { return !g.values[c.value].size(); });
        const auto layout = place_buffers(needs_of(g, crossing), tensor_blocks<Memory>::alignment);
        offsets_.assign(g.values.size(), unplaced);
        for (std::size_t i = 0; i < crossing.size(); ++i) offsets_[crossing[i].value] = layout.offsets[i];
        if (layout.total > bytes{}) block_ = static_cast<std::byte*>(blocks_.room_for(last(), layout.total.count()));
    }
    [[nodiscard]] std::uint32_t last() const noexcept { return static_cast<std::uint32_t>(tensors_.size()); }

    void reset() {
        for (std::uint32_t v = 0; v < tensors_.size(); ++v) {
            tensor& t = tensors_[v];
            t.shape = shapes_[v];
            t.data = nullptr;
            t.capacity = 0;
            t.room = &blocks_;
            t.number = v;
            if (offsets_[v] == unplaced) continue;
            t.data = block_ + offsets_[v];
            t.capacity = t.size();
        }
    }

    std::string owner_;
    std::vector<std::uint32_t> inputs_, outputs_;
    std::vector<element> input_types_{};
    tensor_blocks<Memory> blocks_;  // one for each value, and the last for values that share it
    std::vector<tensor> tensors_;   // by value
    std::vector<value_kind> kinds_;
    std::vector<bool> given_;  // whether each output of the model has a buffer of the caller's
    // of each output that is an input and has no buffer: the input's buffer in the last run
    std::vector<const void*> passed_;
    std::vector<bool> known_{};  // whether each value's size is known
    std::vector<std::vector<std::int64_t>> shapes_{};
    std::vector<std::uint64_t> offsets_{};
    std::byte* block_ = nullptr;
    std::vector<piece> pieces_{};
};

/// A model in pieces, on one tenant. The object can't be copied or moved, and serves one run at a
/// time. Tenant, engine and everything that they use must outlive the object. Piece i of the plan
/// is the engine's piece i.
template <class Tenant, class Engine>
requires piece_engine<Engine, typename Tenant::stream>
class cut_model {
    using stream = typename Tenant::stream;
    using memory = typename Tenant::memory_type;

public:
    /// Values between pieces get their places in one block if `g` has their extents. Throws
    /// operation_error (invalid_specification) if the plan doesn't fit the graph; model_error
    /// (bad_cut) for a value that a buffer can't hold and for an output that is a weight;
    /// memory_error if the tenant has no room for the buffers; and what tenant::memory throws.
    cut_model(Tenant& whose, const model_graph& g, const split_plan& plan, Engine& engine, const cut_options& o = {})
        : whose_(&whose), engine_(&engine), options_(o), values_(whose.memory(o.part), g, plan, whose.name()) {
        for (const auto& p : plan.pieces) takes_.push_back(p.takes);
    }
    cut_model(const cut_model&) = delete;
    cut_model& operator=(const cut_model&) = delete;
    ~cut_model() = default;

    /// The number of pieces.
    [[nodiscard]] std::uint32_t pieces() const noexcept { return values_.pieces(); }
    /// Bytes of the tenant's memory for values between pieces, and for outputs without a buffer.
    [[nodiscard]] bytes held() const noexcept { return values_.held(); }

    /// Runs the model and waits until all pieces have ended. `inputs` and `outputs` are in the
    /// model's order, in memory that the engine can use. An output without a buffer (data is null)
    /// gets a buffer in the tenant's memory, valid until the next run; an output that is an input
    /// gets the input's buffer. The next run may have the same array of outputs, because a buffer
    /// in the tenant's memory counts as no buffer. `o` applies to the run as a whole.
    ///
    /// Throws operation_error (invalid_specification) for a wrong number of tensors, or for an
    /// input of a different type from the model's. Throws the error of a failed piece, with the
    /// engine's own exception nested, and what tenant::submit throws. By then all pieces have
    /// ended.
    void run(std::span<const tensor> inputs, std::span<tensor> outputs, const request_options& o = {}) {
        values_.begin(inputs, outputs);
        // the block of an output may grow
        for (std::size_t i = 0; i < outputs.size(); ++i)
            if (!values_.of_caller(i)) outputs[i].data = nullptr, outputs[i].capacity = 0;
        submit_all(o);
        finish(outputs);
    }

private:
    template <class, class, class>
    friend class captured_model;

    void finish(std::span<tensor> outputs) {
        for (std::size_t i = 0; i < outputs.size(); ++i) finish(i, outputs[i]);
    }
    /// Submits the pieces, some of them ahead of the piece that runs.
    void submit_all(const request_options& o) {
        auto request = whose_->request(o, options_.part);
        using ticket = decltype(request.submit({}));
        std::vector<ticket> tickets;
        tickets.reserve(values_.pieces());  // so that no push_back throws and loses a ticket
        std::exception_ptr failed;
        std::size_t ended = 0;
        const auto end_one = [&] {
            const ticket& t = tickets[ended++];
            (void)t.wait();
            if (t.status() == errc::none || failed) return;
            try {
                t.rethrow();
            } catch (...) {
                failed = std::current_exception();
            }
        };
        for (std::uint32_t i = 0; i < values_.pieces() && !failed; ++i) try {
                tickets.push_back(request.submit([this, i](stream& to) { enqueue(to, i); }, options_of(i, o)));
                while (tickets.size() - ended > std::max(options_.ahead, 1U) - 1 && !failed) end_one();
            } catch (...) {
                failed = std::current_exception();
            }
        while (ended < tickets.size()) end_one();
        if (failed) std::rethrow_exception(failed);
    }
    void enqueue(stream& to, std::uint32_t i) { engine_->enqueue(to, i, values_.inputs(i), values_.outputs(i)); }
    [[nodiscard]] submit_options options_of(std::uint32_t i, const request_options& o) const {
        submit_options s = options_.submit;
        s.key += i;
        s.deadline = o.deadline;
        if (options_.declare_lengths) s.cost = detail::part_of(takes_[i], s.width.part());
        return s;
    }
    /// Tells the caller where output i is.
    void finish(std::size_t i, tensor& to) {
        const tensor& t = values_.output(i);
        if (values_.of_caller(i) && to.data != t.data) {  // an input, or an output listed twice
            pass_through(t, to);
            return;
        }
        to.type = t.type;
        to.shape = t.shape;
        to.data = t.data;
        to.capacity = t.capacity;
    }
    void pass_through(const tensor& t, tensor& to) {
        const std::size_t size = t.size();
        if constexpr (copier<stream>) {
            auto copied = whose_->submit([&](stream& s) { s.copy(to.place(t.type, t.shape), t.data, size); },
                                         options_.submit, {}, options_.part);
            (void)copied.wait();
            if (copied.status() != errc::none) copied.rethrow();
        } else {
            throw model_error(model_fault::bad_cut, {},
                              "an output that is an input or there twice, on a device that can't copy");
        }
    }

    Tenant* whose_;
    Engine* engine_;
    cut_options options_;
    piece_tensors<memory> values_;
    std::vector<ns> takes_{};  // the planned time of each piece
};

/// A model in pieces as one graph of a device, which is one submission. With a gate between two
/// pieces, urgent work can run there. `Executable` is the device's type, such as
/// cuda::graph_executable; argument-dependent lookup finds capture(stream, body).
///
///   auto between = [&](cuda::stream& to) { gate.wait_in_capture(pages, to.native_handle()); };
///   graph::captured_model<tenant, my_engine, cuda::graph_executable> model(batch, g, plan, engine, between);
///
/// The engine must enqueue kernels, and place outputs when it enqueues. Otherwise the class works
/// as cut_model does; buffers live as long as the graph. A tenant that gets another device or other
/// SMs of its own needs a new captured_model. The object can't be copied or moved, and serves one
/// run at a time.
template <class Tenant, class Engine, class Executable>
class captured_model {
    using stream = typename Tenant::stream;

public:
    /// Enqueues a gate, or any other work, between two pieces of a capture.
    using gate = std::function<void(stream&)>;

    /// Works as cut_model's constructor. `between` may be empty.
    captured_model(Tenant& whose, const model_graph& g, const split_plan& plan, Engine& engine, gate between = {},
                   const cut_options& o = {})
        : model_(whose, g, plan, engine, o), between_(std::move(between)) {}
    captured_model(const captured_model&) = delete;
    captured_model& operator=(const captured_model&) = delete;
    ~captured_model() = default;

    /// The number of pieces.
    [[nodiscard]] std::uint32_t pieces() const noexcept { return model_.pieces(); }
    /// Bytes of the tenant's memory that the object holds.
    [[nodiscard]] bytes held() const noexcept { return model_.held(); }
    /// How many graphs were instantiated. Updates for other addresses don't count.
    [[nodiscard]] std::uint32_t made() const noexcept { return made_; }

    /// Works as cut_model::run. The first run with other shapes drops the graph and goes piece by
    /// piece, so that the engine and the buffers get the memory that they need. The next run is
    /// captured. A run with the same shapes at other addresses updates the graph. Throws what
    /// cut_model::run throws, and the error of a capture. After such an error the stream is as
    /// before, and no part of the graph has run.
    void run(std::span<const tensor> inputs, std::span<tensor> outputs, const request_options& o = {}) {
        run_key next = key_of(inputs, outputs);
        if (next.shapes != last_.shapes) {
            graph_.reset();  // no run is in flight, and buffers may grow
            last_ = {};
            model_.run(inputs, outputs, o);
            last_ = std::move(next);
            return;
        }
        if (!graph_ || next.places != last_.places) {
            // set again after the capture, so that a half-updated graph is never launched
            last_.places.clear();
            submit([&](stream& to) { capture_into(to, inputs, outputs); }, {}, model_.pieces() + 1);
            last_.places = std::move(next.places);
        }
        submit([this](stream& to) { graph_->launch(to); }, o, model_.pieces());
        model_.finish(outputs);
    }

private:
    /// Identifies the runs that a graph is for.
    struct run_key {
        std::vector<std::int64_t> shapes{};  // with types and ranks, so that no two runs look alike
        std::vector<const void*> places{};
    };
    [[nodiscard]] run_key key_of(std::span<const tensor> inputs, std::span<const tensor> outputs) const {
        run_key k{{static_cast<std::int64_t>(inputs.size())}, {}};
        for (const tensor& t : inputs) {
            k.shapes.push_back(static_cast<std::int64_t>(t.type));
            k.shapes.push_back(static_cast<std::int64_t>(t.shape.size()));
            k.shapes.insert(k.shapes.end(), t.shape.begin(), t.shape.end());
            k.places.push_back(t.data);
        }
        for (std::size_t i = 0; i < outputs.size(); ++i) {
            const bool given = model_.values_.of_caller(i, outputs[i]);
            k.shapes.push_back(given ? static_cast<std::int64_t>(outputs[i].capacity) : -1);
            k.places.push_back(given ? outputs[i].data : nullptr);
        }
        return k;
    }
    void capture_into(stream& to, std::span<const tensor> inputs, std::span<const tensor> outputs) {
        model_.values_.begin(inputs, outputs);
        const auto made = capture(to, [&](stream& s) {
            for (std::uint32_t i = 0; i < model_.pieces(); ++i) {
                if (i != 0 && between_) between_(s);
                model_.enqueue(s, i);
            }
        });
        if (graph_ && graph_->update(made)) return;
        graph_.reset();
        graph_.emplace(made);
        ++made_;
    }
    template <class F>
    void submit(F work, const request_options& o, std::uint32_t kind) {
        submit_options s = model_.options_.submit;
        s.key += kind;  // after the keys of the pieces
        s.deadline = o.deadline;
        if (model_.options_.declare_lengths && kind == model_.pieces())
            for (std::uint32_t i = 0; i < model_.pieces(); ++i)
                s.cost += std::min(model_.options_of(i, o).cost, ns::max() - s.cost);
        const auto ticket = model_.whose_->submit(std::move(work), s, {}, model_.options_.part);
        (void)ticket.wait();
        if (ticket.status() != errc::none) ticket.rethrow();
    }

    cut_model<Tenant, Engine> model_;  // declared first, so that its buffers outlive the graph
    gate between_;
    std::optional<Executable> graph_{};
    run_key last_{};
    std::uint32_t made_ = 0;
};

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
