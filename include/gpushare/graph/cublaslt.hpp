// SPDX-License-Identifier: Apache-2.0
// Runs matrix products of models on a device by NVIDIA's cuBLASLt. One kernel computes a product
// with the bias, the residual and the activation that follow it.
//
//   const gpushare::graph::cublaslt_library library("libcublasLt.so.13");
//   // read: graph::read_operations of onnx.hpp
//   gpushare::graph::cublaslt_engine engine(tenant, library, read);
//   // a piece_engine on the tenant's streams
//   const std::uint32_t piece = engine.add(model.extract(nodes));
//
// The engine computes MatMul and Gemm of floats. If only one node reads a product, that node
// becomes part of the product's kernel. This applies to an Add of one element per column, to an Add
// of a tensor of the product's shape, and then to a Relu or a Gelu by tanh. The engine refuses a
// piece with any other node and names the node, so a piece_chooser leaves the engine out for the
// piece. The engine finds cuBLASLt's functions by name and needs no header of NVIDIA's.
//
// Constants, values within a piece and the workspace are in the tenant's memory. The first run of
// each shape asks cuBLASLt for an algorithm and allocates memory. A run with addresses that are
// less aligned than before does so, too. All other runs only enqueue, so they can be captured. We
// tested the engine on the stand-in for CUDA, with a test's functions in place of cuBLASLt's, but
// never on a device.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/graph/detail/cublaslt_api.hpp>
#include <gpushare/graph/detail/matmul_steps.hpp>
#include <gpushare/graph/detail/piece_program.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/graph/run.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// cuBLASLt's functions. Any thread may use the object; the library stays loaded.
class cublaslt_library {
public:
    /// Loads the shared library at that path. Throws model_error (engine) if loading fails.
    explicit cublaslt_library(const std::string& path) : api_(detail::load_cublaslt(path)) {}
    /// Functions of the caller, such as a test's.
    explicit cublaslt_library(const detail::cublaslt_api& functions) noexcept : api_(functions) {}

    /// The functions, for the engine.
    [[nodiscard]] const detail::cublaslt_api& api() const noexcept { return api_; }
    /// Throws model_error (engine) with the node and cuBLASLt's text unless `status` is 0.
    void check(int status, const std::string& node = {}) const {
        if (status != detail::cublaslt::success)
            throw model_error(model_fault::engine, node, std::string("cuBLASLt: ") + api_.status_string(status));
    }

private:
    detail::cublaslt_api api_;
};

/// How pieces are computed.
struct cublaslt_options {
    bytes workspace = 4_MiB;  ///< the most that an algorithm may need, for each piece and shape
    bool tf32 = false;        ///< whether factors may be rounded to TF32, with 10 bits of fraction
    std::size_t shapes = 4;   ///< input shapes for which each piece is kept ready; at least 1
    std::size_t part = 0;     ///< the number of the tenant's device
};

/// Pieces that cuBLASLt computes: a piece_engine on streams of a CUDA device. One thread adds
/// pieces before any of them runs. Different pieces may run at the same time, but each piece only
/// once at a time. The engine can't be copied or moved. Tenant and library must outlive the engine,
/// and no work of the engine may run when it is destroyed. A graph of a captured run is valid while
/// its piece exists, and until `shapes` other shapes of the piece have run.
template <class Tenant>
class cublaslt_engine {
    using stream = typename Tenant::stream;
    using blocks = tensor_blocks<typename Tenant::memory_type>;
    using program = detail::piece_program;

public:
    /// Makes a piece's program from what extract() returned.
    using reader = std::function<program(std::string_view)>;

    /// An engine without pieces. Throws model_error (engine) if cuBLASLt refuses, and what
    /// tenant::submit throws.
    cublaslt_engine(Tenant& by, const cublaslt_library& of, reader read, const cublaslt_options& o = {})
        : by_(&by), library_(&of), read_(std::move(read)), options_(o), handle_(nullptr, of.api().destroy) {
        submit([&](stream& to) {
            on_device(to, "cublasLtCreate", [&] {
                void* made = nullptr;
                library_->check(library_->api().create(&made));
                handle_.reset(made);
            });
        });
    }
    cublaslt_engine(const cublaslt_engine&) = delete;
    cublaslt_engine& operator=(const cublaslt_engine&) = delete;
    ~cublaslt_engine() = default;

    /// Adds a piece that extract() made, and returns the piece's number. Copies the piece's
    /// constants to the device and waits for the copy. Throws model_error (engine) that names a
    /// node that isn't supported and the reason. Also throws the errors of the reader and of the
    /// tenant's memory, and what tenant::submit throws.
    std::uint32_t add(std::string_view model) { return add(read_(model)); }
    /// Adds a program.
    std::uint32_t add(program p) {
        auto made = std::make_unique<piece>(by_->memory(options_.part));
        made->steps = detail::matmul_steps(p);
        made->of = std::move(p);
        load_constants(*made);
        pieces_.push_back(std::move(made));
        return static_cast<std::uint32_t>(pieces_.size() - 1);
    }
    /// Removes the last piece.
    void remove_last() noexcept { pieces_.pop_back(); }
    /// The number of pieces.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(pieces_.size()); }
    /// Bytes of the tenant's memory that pieces hold.
    [[nodiscard]] bytes held() const noexcept {
        bytes all{};
        for (const auto& p : pieces_) {
            all += p->constants.size();
            for (const auto& r : p->ready) all += r->room.size();
        }
        return all;
    }

    /// See piece_engine. Gives the outputs their memory in this call, on this thread. This call
    /// throws model_error (engine), and what the tenant's memory and the outputs' room throw.
    void enqueue(stream& to, std::uint32_t number, std::span<const tensor* const> in, std::span<tensor* const> out) {
        piece& p = *pieces_[number];
        prepared& r = shaped(p, in, out);
        const std::size_t alignment = place_outputs(p, r, in, out);
        on_device(to, "cublasLtMatmul", [&] {
            if (r.steps.empty() || alignment < r.alignment) prepare(p, r, alignment);
            take_places(p, r, in, out);
            for (std::size_t i = 0; i < p.steps.size(); ++i)
                if (!r.steps[i].empty) multiply(p.steps[i], r, r.steps[i], to.state().native);
        });
    }

private:
    using lt = detail::cublaslt;
    using step = detail::matmul_step;
    using handle = std::unique_ptr<void, int (*)(void*)>;
    static constexpr std::size_t most_alignment = 256;  // the largest that cuBLASLt distinguishes
    static constexpr std::size_t alignments = std::bit_width(most_alignment / alignof(float));

    /// A step for known shapes.
    struct prepared_step {
        bool empty = false;  // whether the step's result has no elements
        handle desc{nullptr, nullptr}, first{nullptr, nullptr}, second{nullptr, nullptr}, out{nullptr, nullptr};
        lt::algorithm algo{};
        std::size_t workspace = 0;
    };
    /// A piece for known shapes of its inputs.
    struct prepared {
        explicit prepared(typename Tenant::memory_type& in) : room(in, alignments) {}

        std::vector<std::vector<std::int64_t>> shapes{};  // of each value
        std::size_t alignment = 0;                        // of inputs and outputs
        std::vector<prepared_step> steps{};
        std::vector<const void*> places{};  // of each value
        std::vector<const void*> biases{};  // of each step
        blocks room;                        // values between steps, then the workspace
        // the number of the current block; captured graphs may use earlier blocks
        std::uint32_t block = 0;
        std::size_t block_size = 0;
        void* workspace = nullptr;
        std::size_t workspace_size = 0;
    };
    struct piece {
        explicit piece(typename Tenant::memory_type& in) : constants(in, 1) {}

        program of{};
        std::vector<step> steps{};
        blocks constants;
        std::vector<const void*> values{};               // of each constant value
        std::vector<const void*> biases{};               // of each step with a constant bias
        std::vector<std::unique_ptr<prepared>> ready{};  // the least recently used first
    };

    template <class Work>
    void submit(Work work) {
        auto ticket = by_->submit(work, {}, {}, options_.part);
        (void)ticket.wait();
        if (ticket.status() != errc::none) ticket.rethrow();
    }
    /// The backend's error type, named here without the backend's headers.
    template <class Code>
    static Code code_of(void (stream::*)(Code, const char*));
    template <class Work>
    static void on_device(stream& to, const char* call, Work work) {
        using code = decltype(code_of(&stream::enqueued));
        to.enqueued_on_device(
            [&] {
                work();
                return code{};
            },
            call);
    }

    // --- constants

    /// Puts all constants that steps read into one block on the device.
    void load_constants(piece& p) {
        std::vector<std::byte> host;
        std::vector<std::pair<const void**, std::size_t>> at;
        p.values.resize(p.of.values.size());
        p.biases.resize(p.steps.size());
        const auto add = [&](const void*& to, std::uint32_t v, float factor) {
            const auto& value = p.of.values[v];
            if (value.type != element::f32) detail::refuse(value.name, "a constant that isn't a tensor of floats");
            auto numbers = value.numbers;
            for (float& n : numbers) n *= factor;
            at.emplace_back(&to, host.size());
            host.resize((host.size() + numbers.size() * sizeof(float) + most_alignment) / most_alignment *
                        most_alignment);
            if (!numbers.empty())
                std::memcpy(host.data() + at.back().second, numbers.data(), numbers.size() * sizeof(float));
        };
        std::vector<bool> known(p.of.values.size());
        for (std::size_t i = 0; i < p.steps.size(); ++i) {
            const step& s = p.steps[i];
            for (const std::uint32_t v : {s.a, s.b, s.addend})
                if (v != detail::no_value && p.of.values[v].constant && !known[v]) {
                    known[v] = true;
                    add(p.values[v], v, 1);
                }
            if (s.bias != detail::no_value && p.of.values[s.bias].constant) add(p.biases[i], s.bias, s.bias_factor);
        }
        if (host.empty()) return;
        auto* const block = static_cast<std::byte*>(p.constants.room_for(0, host.size()));
        for (const auto& [to, offset] : at) *to = block + offset;
        submit([&](stream& to) { to.copy(block, host.data(), host.size()); });
        for (auto& v : p.of.values) v.numbers = {};  // the device has the numbers now
    }

    // --- shapes

    /// The state for the inputs' shapes. Makes the state if there is none.
    [[nodiscard]] prepared& shaped(piece& p, std::span<const tensor* const> in, std::span<tensor* const> out) {
        detail::require_all(p.of, in.size(), out.size());
        for (std::size_t i = 0; i < in.size(); ++i) detail::require_floats(p.of.values[p.of.inputs[i]].name, *in[i]);
        const auto fits = [&](const auto& r) {
            for (std::size_t i = 0; i < in.size(); ++i)
                if (r->shapes[p.of.inputs[i]] != in[i]->shape) return false;
            return true;
        };
        if (const auto at = std::ranges::find_if(p.ready, fits); at != p.ready.end()) {
            std::rotate(at, at + 1, p.ready.end());
            return *p.ready.back();
        }
        auto made = std::make_unique<prepared>(by_->memory(options_.part));
        take_shapes(p, *made, in);
        if (p.ready.size() >= std::max<std::size_t>(options_.shapes, 1)) p.ready.erase(p.ready.begin());
        p.ready.push_back(std::move(made));
        return *p.ready.back();
    }
    static void take_shapes(const piece& p, prepared& r, std::span<const tensor* const> in) {
        r.shapes.resize(p.of.values.size());
        for (std::size_t v = 0; v < p.of.values.size(); ++v)
            if (p.of.values[v].constant) r.shapes[v] = p.of.values[v].shape;
        for (std::size_t i = 0; i < in.size(); ++i) r.shapes[p.of.inputs[i]] = in[i]->shape;
        for (const step& s : p.steps) {
            const auto made = detail::product_shape(r.shapes[s.a], r.shapes[s.b], s.transpose_a, s.transpose_b);
            if (!made) detail::refuse(s.node, "its inputs aren't matrices of matching sizes");
            if (s.addend != detail::no_value && r.shapes[s.addend] != *made)
                detail::refuse(s.node, "the added array has a different shape");
            if (s.bias != detail::no_value && !detail::has_columns_of(*made, r.shapes[s.bias]))
                detail::refuse(s.node, "its bias isn't one row with an element for each column");
            r.shapes[s.out] = *made;
        }
    }
    /// Gives the outputs their memory, and returns the alignment that all addresses have.
    static std::size_t place_outputs(const piece& p, const prepared& r, std::span<const tensor* const> in,
                                     std::span<tensor* const> out) {
        std::uintptr_t all = most_alignment;
        for (std::size_t i = 0; i < out.size(); ++i) {
            tensor& t = *out[i];
            const auto& shape = r.shapes[p.of.outputs[i]];
            const bool there =
                t.type == element::f32 && t.shape == shape && t.data != nullptr && t.size() <= t.capacity;
            if (!there) (void)t.place(element::f32, shape);
            all |= reinterpret_cast<std::uintptr_t>(t.data);
        }
        for (const tensor* t : in) all |= reinterpret_cast<std::uintptr_t>(t->data);
        const auto alignment = static_cast<std::size_t>(all & (~all + 1));
        if (alignment < alignof(float)) detail::refuse({}, "an input or output isn't aligned as a float");
        return alignment;
    }

    // --- descriptors

    void prepare(const piece& p, prepared& r, std::size_t alignment) const {
        std::vector<prepared_step> steps;
        std::size_t workspace = 0;
        for (std::size_t i = 0; i < p.steps.size(); ++i) {
            steps.push_back(described(p, r, i, alignment));
            workspace = std::max(workspace, steps.back().workspace);
        }
        place_inner(p, r, workspace);
        r.steps = std::move(steps);
        r.alignment = alignment;
    }
    [[nodiscard]] prepared_step described(const piece& p, const prepared& r, std::size_t i,
                                          std::size_t alignment) const {
        const auto& api = library_->api();
        const step& s = p.steps[i];
        const auto e = detail::extents_of(s, r.shapes[s.a], r.shapes[s.b]);
        prepared_step made;
        made.empty = e.rows == 0 || e.columns == 0 || e.batch == 0;
        if (made.empty) return made;
        if (e.inner == 0) detail::refuse(s.node, "its inputs have no elements");
        const auto columns = detail::in_columns(s, e);
        void* desc = nullptr;
        library_->check(api.desc_create(&desc, options_.tf32 ? lt::compute_fast_tf32 : lt::compute_32f, lt::real_32f),
                        s.node);
        made.desc = handle(desc, api.desc_destroy);
        set(made, lt::transa, columns.first.transpose ? lt::op_t : lt::op_n, s);
        set(made, lt::transb, columns.second.transpose ? lt::op_t : lt::op_n, s);
        std::uint32_t epilogue = s.bias != detail::no_value ? lt::bias : 0;
        if (s.act == detail::activation::relu) epilogue |= lt::relu;
        if (s.act == detail::activation::gelu) epilogue |= lt::gelu;
        set(made, lt::epilogue, epilogue == 0 ? lt::by_default : epilogue, s);
        // Only the bias's alignment matters here; each run sets the address.
        if (s.bias != detail::no_value) set(made, lt::bias_pointer, reinterpret_cast<const void*>(alignment), s);
        made.first = layout(columns.first, e.batch, s);
        made.second = layout(columns.second, e.batch, s);
        made.out = layout(columns.out, e.batch, s);
        choose_algorithm(made, alignment, s);
        return made;
    }
    template <class Value>
    void set(const prepared_step& to, int attribute, Value value, const step& s) const {
        library_->check(library_->api().desc_set(to.desc.get(), attribute, &value, sizeof value), s.node);
    }
    [[nodiscard]] handle layout(const detail::column_matrix& m, std::int64_t batch, const step& s) const {
        const auto& api = library_->api();
        void* found = nullptr;
        library_->check(api.layout_create(&found, lt::real_32f, static_cast<std::uint64_t>(m.rows),
                                          static_cast<std::uint64_t>(m.columns), m.leading),
                        s.node);
        handle made(found, api.layout_destroy);
        if (batch == 1) return made;
        if (batch > std::numeric_limits<std::int32_t>::max())
            detail::refuse(s.node, "a stack of more than 2^31 matrices");
        const auto count = static_cast<std::int32_t>(batch);
        library_->check(api.layout_set(found, lt::batch_count, &count, sizeof count), s.node);
        library_->check(api.layout_set(found, lt::strided_batch_offset, &m.stride, sizeof m.stride), s.node);
        return made;
    }
    void choose_algorithm(prepared_step& to, std::size_t alignment, const step& s) const {
        const auto& api = library_->api();
        void* found = nullptr;
        library_->check(api.preference_create(&found), s.node);
        const handle preference(found, api.preference_destroy);
        const std::uint64_t workspace = options_.workspace.count();
        library_->check(api.preference_set(found, lt::max_workspace_bytes, &workspace, sizeof workspace), s.node);
        const auto least = static_cast<std::uint32_t>(alignment);
        for (const int attribute : lt::min_alignment)
            library_->check(api.preference_set(found, attribute, &least, sizeof least), s.node);
        lt::heuristic best{};
        int count = 0;
        library_->check(api.heuristic(handle_.get(), to.desc.get(), to.first.get(), to.second.get(), to.out.get(),
                                      to.out.get(), found, 1, &best, &count),
                        s.node);
        if (count < 1) detail::refuse(s.node, "cuBLASLt has no algorithm for it");
        library_->check(best.state, s.node);
        to.algo = best.algo;
        to.workspace = best.workspace;
    }
    /// Finds places for the values between steps and for the workspace.
    static void place_inner(const piece& p, prepared& r, std::size_t workspace) {
        std::vector<buffer_need> needs;
        std::vector<std::uint32_t> whose;
        for (std::uint32_t i = 0; i < p.steps.size(); ++i) {
            const std::uint32_t v = p.steps[i].out;
            if (std::ranges::find(p.of.outputs, v) != p.of.outputs.end()) continue;
            bytes size{sizeof(float)};
            for (const std::int64_t extent : r.shapes[v]) size = size * static_cast<std::uint64_t>(extent);
            std::uint32_t last = i;
            for (std::uint32_t j = i + 1; j < p.steps.size(); ++j)
                for (const std::uint32_t read : {p.steps[j].a, p.steps[j].b, p.steps[j].addend, p.steps[j].bias})
                    if (read == v) last = j;
            needs.push_back({size, i, last});
            whose.push_back(v);
        }
        const auto layout = place_buffers(needs, most_alignment);
        auto* const block = room_for(r, layout.total.count() + workspace);
        r.places.assign(p.of.values.size(), nullptr);
        for (std::size_t i = 0; i < whose.size(); ++i)
            r.places[whose[i]] = block == nullptr ? nullptr : block + layout.offsets[i];
        r.workspace = workspace == 0 ? nullptr : block + layout.total.count();
        r.workspace_size = workspace;
        for (std::size_t v = 0; v < p.values.size(); ++v)
            if (p.values[v] != nullptr) r.places[v] = p.values[v];
        r.biases = p.biases;
    }

    /// A block of that size; null for a size of 0. Keeps a block that is too small, because a
    /// captured graph may use that block. Each alignment is prepared at most once, so there are
    /// enough blocks.
    static std::byte* room_for(prepared& r, std::size_t size) {
        if (size == 0) return nullptr;
        const std::uint32_t number = r.block_size == 0 || size <= r.block_size ? r.block : r.block + 1;
        auto* const block = static_cast<std::byte*>(r.room.room_for(number, size));
        r.block_size = std::max(r.block_size, size);
        r.block = number;
        return block;
    }

    // --- a run

    static void take_places(const piece& p, prepared& r, std::span<const tensor* const> in,
                            std::span<tensor* const> out) {
        for (std::size_t i = 0; i < in.size(); ++i) r.places[p.of.inputs[i]] = in[i]->data;
        for (std::size_t i = 0; i < out.size(); ++i) r.places[p.of.outputs[i]] = out[i]->data;
        for (std::size_t i = 0; i < p.steps.size(); ++i)
            if (p.biases[i] == nullptr && p.steps[i].bias != detail::no_value) r.biases[i] = r.places[p.steps[i].bias];
    }
    template <class Native>
    void multiply(const step& s, const prepared& r, const prepared_step& by, Native* on) const {
        const std::size_t i = static_cast<std::size_t>(&by - r.steps.data());
        if (s.bias != detail::no_value) set(by, lt::bias_pointer, r.biases[i], s);
        void* const out = const_cast<void*>(r.places[s.out]);
        const void* const addend = s.addend == detail::no_value ? out : r.places[s.addend];
        library_->check(library_->api().matmul(handle_.get(), by.desc.get(), &s.alpha, r.places[s.b], by.first.get(),
                                               r.places[s.a], by.second.get(), &s.beta, addend, by.out.get(), out,
                                               by.out.get(), &by.algo, r.workspace, by.workspace, on),
                        s.node);
    }

    Tenant* by_;
    const cublaslt_library* library_;
    reader read_;
    cublaslt_options options_;
    handle handle_;
    std::vector<std::unique_ptr<piece>> pieces_{};
};

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
