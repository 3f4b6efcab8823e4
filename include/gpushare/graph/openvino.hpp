// SPDX-License-Identifier: Apache-2.0
// An engine that runs pieces of models with OpenVINO on the CPU. Each piece runs on the thread of
// the SM that the limiter gives the piece.
//
//   const gpushare::graph::openvino_library library("libopenvino_c.so");
//   gpushare::graph::openvino_engine engine(library);
//   // a piece_engine on host streams
//   const std::uint32_t piece = engine.add(model.extract({0, 20}));
//
// OpenVINO reads ONNX's own operators, but only a few of ONNX Runtime's. So cut the original model,
// or the result of optimised() with `optimisation` 1. This header finds OpenVINO's C functions by
// name and needs no header of OpenVINO. OpenVINO reads inputs and writes outputs in the tensors'
// own memory; only outputs of unknown shape are copied. OpenVINO allocates all other memory of a
// compiled piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <dlfcn.h>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/graph/detail/openvino_api.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// OpenVINO's library and its core. Any thread may use the object, which can't be copied or moved.
/// The library stays loaded.
class openvino_library {
public:
    /// Loads OpenVINO's C library at that path. Throws model_error (engine) if it can't be loaded.
    explicit openvino_library(const std::string& path) : api_(loaded(path)) { check(api_.core_create(&core_)); }
    openvino_library(const openvino_library&) = delete;
    openvino_library& operator=(const openvino_library&) = delete;
    ~openvino_library() { api_.core_free(core_); }

    /// The functions, for the engine.
    [[nodiscard]] const detail::openvino_api& api() const noexcept { return api_; }
    /// The core, an ov_core_t.
    [[nodiscard]] void* core() const noexcept { return core_; }
    /// Throws model_error (engine) with OpenVINO's text for a status that isn't 0.
    void check(int status) const {
        if (status == 0) return;
        const std::unique_ptr<const char, void (*)(const char*)> why(api_.get_last_err_msg(), api_.free);
        throw model_error(model_fault::engine, {}, std::string("OpenVINO: ") + (why ? why.get() : "no reason"));
    }

private:
    static void* loaded(const std::string& path) {
        void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) throw model_error(model_fault::engine, {}, dlerror());
        return library;
    }

    detail::openvino_api api_;
    void* core_ = nullptr;
};

/// The options of compiled pieces. Floats keep their 32 bits, even if the processor is faster with
/// smaller types.
struct openvino_options {
    int threads = 1;  ///< threads of a piece; all but the SM's own thread are OpenVINO's
};

/// Pieces that OpenVINO has compiled: a piece_engine. One thread adds pieces before any of them
/// runs. Different pieces may run at the same time, but each piece only once at a time. The engine
/// can't be copied or moved. The library must outlive the engine.
class openvino_engine {
public:
    /// An engine without pieces.
    explicit openvino_engine(const openvino_library& of, const openvino_options& o = {}) : library_(&of), options_(o) {}
    openvino_engine(const openvino_engine&) = delete;
    openvino_engine& operator=(const openvino_engine&) = delete;

    /// Adds a model in ONNX's format, such as extract() makes, and returns its number. Throws
    /// model_error (engine) with OpenVINO's reason.
    std::uint32_t add(std::string_view model) {
        const auto& api = library_->api();
        void* read = nullptr;
        library_->check(
            api.core_read_model_from_memory_buffer(library_->core(), model.data(), model.size(), nullptr, &read));
        const handle release(read, api.model_free);
        compiled_piece p;
        p.compiled = handle(compiled(read), api.compiled_model_free);
        make_request(p);
        std::size_t count = 0;
        library_->check(api.compiled_model_inputs_size(p.compiled.get(), &count));
        for (std::size_t i = 0; i < count; ++i) p.inputs.push_back(port_of(p, api.compiled_model_input_by_index, i));
        library_->check(api.compiled_model_outputs_size(p.compiled.get(), &count));
        for (std::size_t i = 0; i < count; ++i) p.outputs.push_back(port_of(p, api.compiled_model_output_by_index, i));
        pieces_.push_back(std::move(p));
        return static_cast<std::uint32_t>(pieces_.size() - 1);
    }
    /// Removes the last piece.
    void remove_last() noexcept { pieces_.pop_back(); }
    /// The number of pieces.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(pieces_.size()); }

    /// See piece_engine. The stream's kernels must run on the CPU. Launches one block.
    template <launcher Stream>
    void enqueue(Stream& to, std::uint32_t piece, std::span<const tensor* const> inputs,
                 std::span<tensor* const> outputs) {
        to.launch({.blocks = 1}, [this, piece, inputs, outputs](const auto&) { run(piece, inputs, outputs); });
    }
    /// Computes immediately, on this thread. Throws model_error (engine), and what the outputs'
    /// room throws.
    void run(std::uint32_t number, std::span<const tensor* const> inputs, std::span<tensor* const> outputs) {
        compiled_piece& p = pieces_[number];
        if (inputs.size() != p.inputs.size() || outputs.size() != p.outputs.size())
            throw model_error(model_fault::engine, {}, "a piece with another number of inputs or outputs");
        const auto& api = library_->api();
        const auto found = [](const tensor& t) { return t.data != nullptr && t.shaped() && size_of(t.type) != 0; };
        for (std::size_t i = 0; i < outputs.size(); ++i)  // a request keeps its old tensors
            if (!found(*outputs[i]) && p.outputs[i].bound) {
                make_request(p);
                break;
            }
        for (std::size_t i = 0; i < inputs.size(); ++i)
            bind(p, p.inputs[i], *inputs[i], api.infer_request_set_input_tensor_by_index, i);
        for (std::size_t i = 0; i < outputs.size(); ++i)
            if (found(*outputs[i])) bind(p, p.outputs[i], *outputs[i], api.infer_request_set_output_tensor_by_index, i);
        library_->check(api.infer_request_infer(p.request.get()));
        for (std::size_t i = 0; i < outputs.size(); ++i)
            if (!p.outputs[i].bound) take(p, i, *outputs[i]);
    }

private:
    using handle = std::unique_ptr<void, void (*)(void*)>;
    struct port_state {
        int type = 0;                // OpenVINO's number
        bool bound = false;          // whether the request may have a caller's tensor
        const void* data = nullptr;  // the address of that tensor's data; null if unknown
        std::size_t size = 0;
        std::vector<std::int64_t> shape{};
    };
    struct compiled_piece {
        handle compiled{nullptr, nullptr}, request{nullptr, nullptr};
        std::vector<port_state> inputs{}, outputs{};
    };

    [[nodiscard]] void* compiled(void* model) const {
        void* made = nullptr;
        const std::string threads = std::to_string(options_.threads);
        library_->check(library_->api().core_compile_model(library_->core(), model, "CPU", 6, &made,
                                                           "INFERENCE_NUM_THREADS", threads.c_str(), "NUM_STREAMS", "1",
                                                           "INFERENCE_PRECISION_HINT", "f32"));
        return made;
    }
    void make_request(compiled_piece& p) const {
        void* request = nullptr;
        library_->check(library_->api().compiled_model_create_infer_request(p.compiled.get(), &request));
        p.request = handle(request, library_->api().infer_request_free);
        for (auto* list : {&p.inputs, &p.outputs})
            for (auto& each : *list) each.bound = false;
    }
    template <class Find>
    [[nodiscard]] port_state port_of(const compiled_piece& p, Find find, std::size_t i) const {
        void* found = nullptr;
        library_->check(find(p.compiled.get(), i, &found));
        const handle release(found, library_->api().output_const_port_free);
        port_state made;
        library_->check(library_->api().port_get_element_type(found, &made.type));
        return made;
    }
    /// Makes a request use a tensor's bytes, unless the request uses these bytes already.
    template <class Set>
    void bind(const compiled_piece& p, port_state& to, const tensor& t, Set set, std::size_t i) const {
        const std::size_t size = t.size();
        if (!t.shaped() || size_of(t.type) == 0 || size > t.capacity || (t.data == nullptr && size > 0))
            throw model_error(model_fault::engine, {}, "an input isn't there, or is larger than its buffer");
        static std::byte nothing{};
        void* const data = t.data == nullptr ? &nothing : t.data;
        if (to.bound && to.data == data && to.size == size && to.shape == t.shape) return;
        void* made = nullptr;
        auto extents = t.shape;
        const detail::openvino_shape shape{static_cast<std::int64_t>(extents.size()), extents.data()};
        library_->check(library_->api().tensor_create_from_host_ptr(to.type, shape, data, &made));
        const handle release(made, library_->api().tensor_free);
        std::size_t needed = 0;
        library_->check(library_->api().tensor_get_byte_size(made, &needed));
        if (needed != size) throw model_error(model_fault::engine, {}, "an input or output is of another type");
        to.bound = true;
        to.data = nullptr;  // if the call fails, the request may still have its old tensor
        library_->check(set(p.request.get(), i, made));
        to.data = data;
        to.size = size;
        to.shape = std::move(extents);
    }
    /// Copies an output that OpenVINO allocated.
    void take(const compiled_piece& p, std::size_t i, tensor& to) const {
        const auto& api = library_->api();
        void* made = nullptr;
        library_->check(api.infer_request_get_output_tensor_by_index(p.request.get(), i, &made));
        const handle release(made, api.tensor_free);
        detail::openvino_shape shape{};
        library_->check(api.tensor_get_shape(made, &shape));
        std::vector<std::int64_t> extents(shape.dims, shape.dims + shape.rank);
        library_->check(api.shape_free(&shape));
        std::size_t size = 0;
        void* data = nullptr;
        library_->check(api.tensor_get_byte_size(made, &size));
        if (to.type == element::unknown) throw model_error(model_fault::engine, {}, "an output's type is unknown");
        void* const place = to.place(to.type, std::move(extents));
        if (size != to.size()) throw model_error(model_fault::engine, {}, "an output is of another type");
        if (size == 0) return;
        library_->check(api.tensor_data(made, &data));
        std::memcpy(place, data, size);
    }

    const openvino_library* library_;
    openvino_options options_;
    std::vector<compiled_piece> pieces_{};
};

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
