// SPDX-License-Identifier: Apache-2.0
// The place where a model of libtorch runs: on the host, in the thread that calls it, or on CUDA,
// on its tenant's stream and in its tenant's memory.
//
//   const auto inside = where.enter();                  // for each load and each call
//   const auto y = model.forward({where.input(x, at::kFloat)});
//   where.output(y, outputs, 0, on);                    // there when the call's work is over
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "inference_server/engine.hpp"
#include "inference_server/lane.hpp"

#ifdef INFERENCE_SERVER_ON_CUDA
#include <map>
#include <memory>
#include <mutex>

#include <c10/cuda/CUDAStream.h>
#include <gpushare/interop/libtorch.hpp>
#endif

namespace inference_server {

/// Copies the data of a contiguous tensor on the host.
inline void assign(std::vector<std::byte>& to, const at::Tensor& from) {
    const auto bytes = std::as_bytes(std::span(static_cast<const char*>(from.data_ptr()), from.nbytes()));
    to.assign(bytes.begin(), bytes.end());
}

#ifdef INFERENCE_SERVER_ON_CUDA

/// A tenant's scope in libtorch. All models of the tenant share it, and it lives while the tenant
/// has a model. Any thread may use it.
class tenant_scope {
public:
    using scope = gpushare::torch_scope<server_node, tenant>;

    explicit tenant_scope(const owner& whose) : who_(&whose.who) {
        const std::lock_guard lock(mutex());
        auto& mine = all()[who_];
        if (mine.of == nullptr) try {
                mine.of = std::make_unique<scope>(whose.on, whose.who);
            } catch (...) {
                all().erase(who_);
                throw;
            }
        ++mine.models;
        scope_ = mine.of.get();
    }
    tenant_scope(const tenant_scope&) = delete;
    tenant_scope& operator=(const tenant_scope&) = delete;
    ~tenant_scope() {
        const std::lock_guard lock(mutex());
        if (const auto mine = all().find(who_); --mine->second.models == 0) all().erase(mine);
    }
    [[nodiscard]] auto enter(std::size_t stream) { return scope_->enter(stream); }

private:
    struct entry {
        std::unique_ptr<scope> of{};
        std::size_t models = 0;
    };
    // Used under the mutex, also while a scope is made or destroyed, so that a stream never has two
    // scopes.
    static std::map<const tenant*, entry>& all() {
        static std::map<const tenant*, entry> scopes;
        return scopes;
    }
    static std::mutex& mutex() {
        static std::mutex of_all;
        return of_all;
    }
    const tenant* const who_;
    scope* scope_ = nullptr;
};

class torch_place {
public:
    explicit torch_place(const surroundings& at)
        : scope_(*at.whose),
          who_(at.whose->who),
          stream_(at.whose->stream),
          device_(at::kCUDA, static_cast<at::DeviceIndex>(at.whose->on.properties(server_device).ordinal)) {}

    [[nodiscard]] at::Device device() const noexcept { return device_; }
    [[nodiscard]] auto enter() { return scope_.enter(stream_); }
    /// The tenant's stream, for a thread that is inside the scope.
    [[nodiscard]] void* stream() const { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }
    /// How often the tenant's memory has refused.
    [[nodiscard]] std::uint64_t refusals() const { return who_.usage().refused; }
    [[nodiscard]] std::string out_of_memory() const {
        const auto now = who_.usage();
        return "out of memory. tenant '" + std::string(who_.name()) + "' has " + std::to_string(now.current.count()) +
               " bytes, and the model asked for more";
    }
    /// Enqueues a copy to the device from pinned memory, because a copy from other memory would
    /// wait.
    [[nodiscard]] at::Tensor input(const tensor& t, at::ScalarType type) const {
        const auto staged = at::empty(t.shape, at::TensorOptions(type).pinned_memory(true));
        std::memcpy(staged.data_ptr(), t.data.data(), t.data.size());
        return staged.to(device_, true);
    }
    /// Fills outputs[i].data when the work is over.
    static void output(const at::Tensor& from, std::vector<tensor>& outputs, std::size_t i, place& on) {
        const auto staged = at::empty(from.sizes(), at::TensorOptions(from.scalar_type()).pinned_memory(true));
        staged.copy_(from, true);
        on.afterwards([staged, &outputs, i] { assign(outputs[i].data, staged); });
    }

private:
    tenant_scope scope_;
    tenant& who_;
    const std::size_t stream_;
    const at::Device device_;
};

#else

class torch_place {
public:
    struct [[maybe_unused]] nothing {};  ///< stands for a scope
    explicit torch_place(const surroundings&) noexcept {}

    [[nodiscard]] static at::Device device() noexcept { return at::kCPU; }
    [[nodiscard]] static nothing enter() noexcept { return {}; }
    [[nodiscard]] static void* stream() noexcept { return nullptr; }
    // On the host libtorch doesn't allocate in the tenant's memory, which therefore refuses
    // nothing.
    [[nodiscard]] static std::uint64_t refusals() noexcept { return 0; }
    [[nodiscard]] static std::string out_of_memory() { return "out of memory"; }
    /// The data itself, which the model only reads.
    [[nodiscard]] static at::Tensor input(const tensor& t, at::ScalarType type) {
        return at::from_blob(const_cast<std::byte*>(t.data.data()), t.shape, at::TensorOptions(type));
    }
    /// Fills outputs[i].data.
    static void output(const at::Tensor& from, std::vector<tensor>& outputs, std::size_t i, place&) {
        assign(outputs[i].data, from.cpu().contiguous());
    }
};

#endif

}  // namespace inference_server
