// SPDX-License-Identifier: Apache-2.0
// An engine that runs pieces of models with ONNX Runtime on the CPU. Each piece runs on the thread
// of the SM that the limiter gives the piece.
//
//   const gpushare::graph::onnxruntime_library library("libonnxruntime.so.1");
//   gpushare::graph::onnxruntime_engine engine(library);
//   // a piece_engine on host streams
//   const std::uint32_t piece = engine.add(model.extract({0, 20}));
//
// Cut the model that ONNX Runtime has optimised, not the original model. Then no cut undoes a
// fusion or a layout, and pieces give the whole model's bits.
//
//   const auto fused = gpushare::graph::optimised(library, model.whole());
//   const auto cut = onnx_model::parse(
//       fused, {.other_domains = onnxruntime_domains(), .like = &model.graph(), .own_names = true});
//   // the model is optimised already
//   gpushare::graph::onnxruntime_engine pieces(library, {.optimisation = 0});
//
// This header needs no header of ONNX Runtime, because in the C interface each function keeps its
// place. Inputs and outputs stay in the tensors' own memory; only outputs of unknown shape are
// copied.
//
// ONNX Runtime allocates weights and values within a piece in one arena for all sessions. Memory
// that one piece gives back is then still in the processor's caches for the next piece. For the
// same reason, sessions have no memory pattern: with a pattern, each run would allocate all of its
// values as one block, which is a different, cold block for each piece. interop/onnxruntime.hpp
// puts all sessions of a process on one tenant's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <dlfcn.h>
#include <unistd.h>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/graph/detail/onnx_numbers.hpp>
#include <gpushare/graph/detail/onnxruntime_api.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// ONNX Runtime's library and its environment. Any thread may use the object, which can't be copied
/// or moved. The library stays loaded.
class onnxruntime_library {
public:
    /// Loads the shared library at that path. Throws model_error (engine) if it can't be loaded, or
    /// is older than 1.17.
    explicit onnxruntime_library(const std::string& path) : onnxruntime_library(functions{table_of(path)}) {}
    /// The library that the program links: `table` is OrtGetApiBase()->GetApi(17), or a later
    /// version's.
    [[nodiscard]] static onnxruntime_library linked(const void* table) { return onnxruntime_library(functions{table}); }
    onnxruntime_library(const onnxruntime_library&) = delete;
    onnxruntime_library& operator=(const onnxruntime_library&) = delete;
    ~onnxruntime_library() {
        if (info_ != nullptr) api_.ReleaseMemoryInfo(info_);
        if (env_ != nullptr) api_.ReleaseEnv(env_);
    }

    /// The functions, for the engine.
    [[nodiscard]] const detail::onnxruntime_api& api() const noexcept { return api_; }
    /// The environment, an OrtEnv.
    [[nodiscard]] void* environment() const noexcept { return env_; }
    /// The CPU's memory, an OrtMemoryInfo.
    [[nodiscard]] void* cpu() const noexcept { return info_; }
    /// Unless `status` is null, releases the status and throws model_error (engine) with its text.
    void check(void* status) const {
        if (status == nullptr) return;
        const std::string why = api_.GetErrorMessage(status);
        api_.ReleaseStatus(status);
        throw model_error(model_fault::engine, {}, "ONNX Runtime: " + why);
    }

private:
    struct functions {
        const void* table;
    };
    explicit onnxruntime_library(functions f) : api_(checked(f.table)) {
        check(api_.CreateEnv(3, "gpushare", &env_));  // severity 3: errors are logged
        check(api_.CreateCpuMemoryInfo(0, 0, &info_));
        share_arena();
    }
    /// One arena for all sessions of the process, unless an allocator was registered before.
    void share_arena() {
        void* arena = nullptr;
        check(api_.CreateCpuMemoryInfo(1, 0, &arena));  // 1: an arena's allocator
        void* const registered = api_.CreateAndRegisterAllocator(env_, arena, nullptr);
        api_.ReleaseMemoryInfo(arena);
        if (registered != nullptr) api_.ReleaseStatus(registered);
    }
    static void* const* checked(const void* table) {
        if (table == nullptr) throw model_error(model_fault::engine, {}, "ONNX Runtime is older than 1.17");
        return static_cast<void* const*>(table);
    }
    static const void* table_of(const std::string& path) {
        void* const loaded = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (loaded == nullptr) throw model_error(model_fault::engine, {}, dlerror());
        struct base {
            const void* (*get_api)(std::uint32_t);
            const char* (*get_version)();
        };
        const auto get = reinterpret_cast<const base* (*)()>(dlsym(loaded, "OrtGetApiBase"));
        if (get == nullptr) throw model_error(model_fault::engine, {}, "'" + path + "' isn't ONNX Runtime");
        return get()->get_api(detail::onnxruntime_api::version);
    }

    detail::onnxruntime_api api_;
    void* env_ = nullptr;
    void* info_ = nullptr;
};

namespace detail {

/// Makes a session, and writes its optimised model to `keep` unless `keep` is null. Throws
/// model_error (engine).
[[nodiscard]] inline void* make_session(const onnxruntime_library& library, std::string_view model, int threads,
                                        int optimisation, const char* keep) {
    const auto& api = library.api();
    void* options = nullptr;
    library.check(api.CreateSessionOptions(&options));
    const std::unique_ptr<void, void (*)(void*)> release(options, api.ReleaseSessionOptions);
    library.check(api.SetIntraOpNumThreads(options, threads));
    library.check(api.DisableMemPattern(options));
    library.check(api.SetSessionGraphOptimizationLevel(options, optimisation));
    library.check(api.AddSessionConfigEntry(options, "session.use_env_allocators", "1"));
    if (keep != nullptr) library.check(api.SetOptimizedModelFilePath(options, keep));
    void* made = nullptr;
    library.check(api.CreateSessionFromArray(library.environment(), model.data(), model.size(), options, &made));
    return made;
}

}  // namespace detail

/// The domains of operators that optimised() uses: ONNX's, and ONNX Runtime's own.
[[nodiscard]] inline std::vector<std::string> onnxruntime_domains() {
    return {"", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc"};
}

/// A model as ONNX Runtime optimises it for this machine: with fused nodes, computed constants and
/// layouts of ONNX Runtime's own. The model is in ONNX's format, with operators of ONNX Runtime's
/// own. `optimisation` is as in onnxruntime_options; with 1 the model has only ONNX's operators.
/// The model goes through a file in the system's temporary folder. ONNX Runtime orders and names
/// some nodes at random, so read the result with import_options::own_names if plans and table rows
/// should fit the next result. Throws model_error: engine, no_file.
[[nodiscard]] inline std::string optimised(const onnxruntime_library& library, std::string_view model,
                                           int optimisation = 99) {
    std::string path = (std::filesystem::temp_directory_path() / "gpushare_model_XXXXXX").string();
    const int file = ::mkstemp(path.data());
    if (file < 0) throw model_error(model_fault::no_file, {}, "no file can be made in the temporary folder");
    ::close(file);
    struct removing {
        const std::string& path;
        ~removing() { (void)::unlink(path.c_str()); }
    } const after{path};
    library.api().ReleaseSession(detail::make_session(library, model, 1, optimisation, path.c_str()));
    std::ifstream from(path, std::ios::binary);
    std::string all{std::istreambuf_iterator<char>(from), {}};
    if (!from || all.empty()) throw model_error(model_fault::no_file, {}, "ONNX Runtime wrote no model");
    return all;
}

/// The options of sessions.
struct onnxruntime_options {
    int threads = 1;  ///< threads of a session; all but the SM's own thread are ONNX Runtime's
    /// The changes that a session may make: 0 for none, 1 to remove redundant nodes, 2 to fuse
    /// nodes as well, 99 to change the layout of tensors as well. Each cut changes the layout back,
    /// but convolutions are faster in that layout.
    int optimisation = 99;
};

/// Sessions of ONNX Runtime, one for each piece: a piece_engine. One thread adds pieces before any
/// of them runs. Different pieces may run at the same time. The engine can't be copied or moved.
/// The library must outlive the engine.
class onnxruntime_engine {
public:
    /// An engine without pieces.
    explicit onnxruntime_engine(const onnxruntime_library& of, const onnxruntime_options& o = {})
        : library_(&of), options_(o) {}
    onnxruntime_engine(const onnxruntime_engine&) = delete;
    onnxruntime_engine& operator=(const onnxruntime_engine&) = delete;
    ~onnxruntime_engine() {
        for (const auto& s : sessions_) library_->api().ReleaseSession(s.handle);
    }

    /// Adds a model in ONNX's format, such as extract() makes, and returns its number. Throws
    /// model_error (engine) with ONNX Runtime's reason.
    std::uint32_t add(std::string_view model) {
        const auto& api = library_->api();
        sessions_.emplace_back();
        session& s = sessions_.back();
        try {
            s.handle = detail::make_session(*library_, model, options_.threads, options_.optimisation, nullptr);
            s.inputs = names(s.handle, api.SessionGetInputCount, api.SessionGetInputName);
            s.outputs = names(s.handle, api.SessionGetOutputCount, api.SessionGetOutputName);
        } catch (...) {
            if (s.handle != nullptr) api.ReleaseSession(s.handle);
            sessions_.pop_back();
            throw;
        }
        return static_cast<std::uint32_t>(sessions_.size() - 1);
    }
    /// Removes the last piece.
    void remove_last() noexcept {
        library_->api().ReleaseSession(sessions_.back().handle);
        sessions_.pop_back();
    }
    /// The number of pieces.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(sessions_.size()); }

    /// See piece_engine. The stream's kernels must run on the CPU. Launches one block.
    template <launcher Stream>
    void enqueue(Stream& to, std::uint32_t piece, std::span<const tensor* const> inputs,
                 std::span<tensor* const> outputs) {
        to.launch({.blocks = 1}, [this, piece, inputs, outputs](const auto&) { run(piece, inputs, outputs); });
    }
    /// Computes immediately, on this thread. Throws model_error (engine), and what the outputs'
    /// room throws.
    void run(std::uint32_t piece, std::span<const tensor* const> inputs, std::span<tensor* const> outputs) const {
        const session& s = sessions_[piece];
        if (inputs.size() != s.inputs.size() || outputs.size() != s.outputs.size())
            throw model_error(model_fault::engine, {}, "a piece with another number of inputs or outputs");
        const auto& api = library_->api();
        values in(api), out(api);
        for (const tensor* t : inputs) in.all.push_back(value_of(*t));
        for (const tensor* t : outputs)
            out.all.push_back(t->data != nullptr && t->shaped() && size_of(t->type) != 0 ? value_of(*t) : nullptr);
        const std::vector<void*> placed = out.all;
        library_->check(api.Run(s.handle, nullptr, s.inputs.pointers.data(), in.all.data(), in.all.size(),
                                s.outputs.pointers.data(), out.all.size(), out.all.data()));
        for (std::size_t i = 0; i < outputs.size(); ++i)
            if (placed[i] == nullptr) take(out.all[i], *outputs[i]);
    }

private:
    struct name_list {
        std::vector<std::string> texts{};
        std::vector<const char*> pointers{};
        [[nodiscard]] std::size_t size() const noexcept { return texts.size(); }
    };
    struct session {
        void* handle = nullptr;
        name_list inputs{}, outputs{};
    };
    struct values {
        explicit values(const detail::onnxruntime_api& of) : api(&of) {}
        values(const values&) = delete;
        values& operator=(const values&) = delete;
        ~values() {
            for (void* v : all)
                if (v != nullptr) api->ReleaseValue(v);
        }
        const detail::onnxruntime_api* api;
        std::vector<void*> all{};
    };

    template <class Count, class Name>
    [[nodiscard]] name_list names(void* of, Count count_of, Name name_of) const {
        void* allocator = nullptr;
        library_->check(library_->api().GetAllocatorWithDefaultOptions(&allocator));
        std::size_t count = 0;
        library_->check(count_of(of, &count));
        name_list list;
        for (std::size_t i = 0; i < count; ++i) {
            char* name = nullptr;
            library_->check(name_of(of, i, allocator, &name));
            list.texts.emplace_back(name);
            library_->check(library_->api().AllocatorFree(allocator, name));
        }
        for (const auto& text : list.texts) list.pointers.push_back(text.c_str());
        return list;
    }
    /// A value over a tensor's bytes.
    [[nodiscard]] void* value_of(const tensor& t) const {
        const std::size_t size = t.size();
        if (!t.shaped() || size_of(t.type) == 0 || size > t.capacity || (t.data == nullptr && size > 0))
            throw model_error(model_fault::engine, {}, "an input isn't there, or is larger than its buffer");
        static std::byte nothing{};
        void* value = nullptr;
        library_->check(library_->api().CreateTensorWithDataAsOrtValue(
            library_->cpu(), t.data == nullptr ? &nothing : t.data, size, t.shape.data(), t.shape.size(),
            detail::number_of(t.type), &value));
        return value;
    }
    /// Copies an output that ONNX Runtime allocated.
    void take(void* value, tensor& to) const {
        const auto& api = library_->api();
        int is_tensor = 0;
        library_->check(api.IsTensor(value, &is_tensor));
        if (is_tensor == 0) throw model_error(model_fault::engine, {}, "an output isn't a tensor");
        void* info = nullptr;
        library_->check(api.GetTensorTypeAndShape(value, &info));
        const std::unique_ptr<void, void (*)(void*)> release(info, api.ReleaseTensorTypeAndShapeInfo);
        int type = 0;
        std::size_t rank = 0;
        library_->check(api.GetTensorElementType(info, &type));
        library_->check(api.GetDimensionsCount(info, &rank));
        std::vector<std::int64_t> shape(rank);
        library_->check(api.GetDimensions(info, shape.data(), rank));
        if (size_of(detail::element_of(type)) == 0)
            throw model_error(model_fault::engine, {}, "an output has elements of no fixed size");
        void* data = nullptr;
        library_->check(api.GetTensorMutableData(value, &data));
        void* const place = to.place(detail::element_of(type), std::move(shape));
        if (const std::size_t size = to.size(); size > 0) std::memcpy(place, data, size);
    }

    const onnxruntime_library* library_;
    onnxruntime_options options_;
    std::vector<session> sessions_{};
};

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
