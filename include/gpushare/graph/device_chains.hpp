// SPDX-License-Identifier: Apache-2.0
// Runs element-wise chains and norms of models on a device, by a kernel of this library. Each piece
// is one launch, and values between its nodes stay in registers.
//
//   gpushare::graph::chain_engine engine(tenant, read);             // read: graph::read_operations
//   const std::uint32_t piece = engine.add(model.extract(nodes));   // a piece_engine on streams
//
// A piece is a chain or a small tree of operators of floats: Add, Sub, Mul, Div, Min, Max, Clip,
// Abs, Neg, Sqrt, Reciprocal, Exp, Erf, Sigmoid, HardSigmoid, HardSwish, Tanh, Relu, LeakyRelu,
// Gelu, and Pow by 2 or 3. A piece may also have one norm: a LayerNormalization, RMSNormalization
// or Softmax over the last axis, or a norm that the model spells out (ReduceMean, Sub, Pow, ...).
// Inputs are broadcast as ONNX specifies. The engine refuses a piece with any other node and names
// the node, so a piece_chooser leaves the engine out for that piece.
//
// One kernel interprets the steps of all pieces, so nothing is compiled when a piece is added. A
// file that calls enqueue must be compiled by nvcc and include backend/cuda/launch.cuh. The kernel
// gives the same bits on host and device. We ran the compiled kernel on the executor of PTX, but
// never on a device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/graph/detail/chain_kernel.hpp>
#include <gpushare/graph/detail/chain_steps.hpp>
#include <gpushare/graph/detail/piece_program.hpp>
#include <gpushare/graph/detail/spelt_norms.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// Pieces that this library's kernel computes: a piece_engine on streams that launch kernels. One
/// thread adds pieces before any of them runs. Different pieces may run at the same time, but each
/// piece only once at a time. The engine can't be copied or moved. The tenant must outlive the
/// engine, and no work of the engine may run when it is destroyed. A graph of a captured run is
/// valid as long as its piece.
template <class Tenant>
class chain_engine {
    using stream = typename Tenant::stream;
    using blocks = tensor_blocks<typename Tenant::memory_type>;
    using program = detail::piece_program;

public:
    /// Makes a piece's program from what extract() returned.
    using reader = std::function<program(std::string_view)>;

    /// An engine without pieces. `part` is the number of the tenant's device.
    chain_engine(Tenant& by, reader read, std::size_t part = 0) : by_(&by), read_(std::move(read)), part_(part) {}
    chain_engine(const chain_engine&) = delete;
    chain_engine& operator=(const chain_engine&) = delete;
    ~chain_engine() = default;

    /// Adds a piece that extract() made, and returns the piece's number. Copies the piece's
    /// constants to the device and waits for the copy. Throws model_error (engine) that names a
    /// node that isn't supported and the reason. Also throws the errors of the reader and of the
    /// tenant's memory, and what tenant::submit throws.
    std::uint32_t add(std::string_view model) { return add(read_(model)); }
    /// Adds a program.
    std::uint32_t add(program p) {
        auto made = std::make_unique<piece>(by_->memory(part_));
        made->of = detail::with_norms(std::move(p));
        made->steps = detail::chain_steps(made->of);
        load_constants(*made);
        pieces_.push_back(std::move(made));
        return static_cast<std::uint32_t>(pieces_.size() - 1);
    }
    /// Removes the last piece.
    void remove_last() noexcept { pieces_.pop_back(); }
    /// The number of pieces.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(pieces_.size()); }
    /// Bytes of the tenant's memory that pieces hold: their constants.
    [[nodiscard]] bytes held() const noexcept {
        bytes all{};
        for (const auto& p : pieces_) all += p->constants.size();
        return all;
    }

    /// See piece_engine. Gives the outputs their memory in this call, on this thread. Enqueues one
    /// launch, or none if the outputs have no elements.
    ///
    /// This call throws model_error (engine) that names a node whose inputs don't fit each other,
    /// an input that isn't a tensor of floats, or an output that shares bytes with an input or
    /// another output. It also throws what the outputs' room throws. A piece never works in place,
    /// because a norm reads long rows again after the kernel has written some results.
    void enqueue(stream& to, std::uint32_t number, std::span<const tensor* const> in, std::span<tensor* const> out) {
        piece& p = *pieces_[number];
        require_inputs(p, in, out);
        if (!same_shapes(p, in)) take_shapes(p, in);
        for (std::size_t i = 0; i < out.size(); ++i) p.kernel.outputs[i] = placed(p, i, *out[i]);
        require_apart(p, in, out);
        for (std::size_t i = 0; i < p.steps.inputs.size(); ++i) {
            const std::uint32_t v = p.steps.inputs[i];
            if (p.of.values[v].constant) continue;
            const auto at = std::ranges::find(p.of.inputs, v) - p.of.inputs.begin();
            p.kernel.inputs[i].data = static_cast<const float*>(in[static_cast<std::size_t>(at)]->data);
        }
        if (p.kernel.rows != 0 && p.kernel.width != 0) to.launch(p.kernel.shape(), p.kernel);
    }

private:
    struct piece {
        explicit piece(typename Tenant::memory_type& in) : constants(in, 1) {}

        program of{};
        detail::chain_program steps{};
        blocks constants;
        std::vector<const float*> places{};         // of each constant array
        bool bound = false;                         // whether `shapes` and `kernel` are set
        std::vector<detail::chain_shape> shapes{};  // of each value
        detail::chain_kernel kernel{};
    };

    /// Puts all arrays that are constant into one block on the device.
    void load_constants(piece& p) {
        constexpr std::size_t alignment = 256;
        std::vector<std::byte> host;
        // arrays, and their places in the block
        std::vector<std::pair<std::size_t, std::size_t>> at;
        p.places.assign(p.steps.inputs.size(), nullptr);
        for (std::size_t i = 0; i < p.steps.inputs.size(); ++i) {
            auto& value = p.of.values[p.steps.inputs[i]];
            if (!value.constant) continue;
            const std::size_t size = value.numbers.size() * sizeof(float);
            at.emplace_back(i, host.size());
            host.resize(host.size() + (size + alignment) / alignment * alignment);
            if (size != 0) std::memcpy(host.data() + at.back().second, value.numbers.data(), size);
            value.numbers = {};  // the device gets the numbers below
        }
        if (host.empty()) return;
        auto* const block = static_cast<std::byte*>(p.constants.room_for(0, host.size()));
        for (const auto& [i, offset] : at) p.places[i] = reinterpret_cast<const float*>(block + offset);
        auto ticket = by_->submit([&](stream& to) { to.copy(block, host.data(), host.size()); }, {}, {}, part_);
        (void)ticket.wait();
        if (ticket.status() != errc::none) ticket.rethrow();
    }

    static void require_inputs(const piece& p, std::span<const tensor* const> in, std::span<tensor* const> out) {
        detail::require_all(p.of, in.size(), out.size());
        for (std::size_t i = 0; i < in.size(); ++i) {
            const auto& name = p.of.values[p.of.inputs[i]].name;
            detail::require_floats(name, *in[i]);
            require_aligned(name, in[i]->data);
        }
    }
    static void require_aligned(const std::string& name, const void* data) {
        if (reinterpret_cast<std::uintptr_t>(data) % alignof(float) != 0)
            detail::refuse(name, "an input or output isn't aligned as a float");
    }
    static void require_apart(const piece& p, std::span<const tensor* const> in, std::span<tensor* const> out) {
        for (std::size_t i = 0; i < out.size(); ++i) {
            const tensor& to = *out[i];
            const bool apart = std::ranges::none_of(in, [&](const tensor* from) { return overlap(*from, to); }) &&
                               std::ranges::none_of(out.first(i), [&](const tensor* t) { return overlap(*t, to); });
            if (!apart)
                detail::refuse(p.of.values[p.of.outputs[i]].name,
                               "an output shares memory with an input or another output");
        }
    }
    /// Whether two tensors share a byte.
    [[nodiscard]] static bool overlap(const tensor& a, const tensor& b) noexcept {
        const auto first = reinterpret_cast<std::uintptr_t>(a.data), second = reinterpret_cast<std::uintptr_t>(b.data);
        return first < second ? second - first < a.size() && b.size() != 0 : first - second < b.size() && a.size() != 0;
    }
    [[nodiscard]] static bool same_shapes(const piece& p, std::span<const tensor* const> in) {
        if (!p.bound) return false;
        for (std::size_t i = 0; i < in.size(); ++i)
            if (p.shapes[p.of.inputs[i]] != in[i]->shape) return false;
        return true;
    }
    static void take_shapes(piece& p, std::span<const tensor* const> in) {
        p.bound = false;
        p.shapes.assign(p.of.values.size(), {});
        for (std::size_t v = 0; v < p.of.values.size(); ++v)
            if (p.of.values[v].constant) p.shapes[v] = p.of.values[v].shape;
        for (std::size_t i = 0; i < in.size(); ++i) p.shapes[p.of.inputs[i]] = in[i]->shape;
        detail::chain_shapes(p.of, p.shapes);
        p.kernel = detail::bound_chain(p.steps, p.of, p.shapes);
        for (std::size_t i = 0; i < p.places.size(); ++i) p.kernel.inputs[i].data = p.places[i];
        p.bound = true;
    }
    /// The memory of an output.
    [[nodiscard]] static float* placed(const piece& p, std::size_t i, tensor& t) {
        const std::uint32_t v = p.of.outputs[i];
        const auto& shape = p.shapes[v];
        const bool there = t.type == element::f32 && t.shape == shape && t.data != nullptr && t.size() <= t.capacity;
        if (!there) (void)t.place(element::f32, shape);
        require_aligned(p.of.values[v].name, t.data);
        return static_cast<float*>(t.data);
    }

    Tenant* by_;
    reader read_;
    std::size_t part_;
    std::vector<std::unique_ptr<piece>> pieces_{};
};

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
