// SPDX-License-Identifier: Apache-2.0
// A ggml buffer type over a tenant's memory: weights, KV cache and compute buffers of an engine on
// ggml are charged, and refused over the quota.
//
//   ggml_buffers mine{chat.memory()};
//   ggml_backend_buffer_t weights = ggml_backend_alloc_ctx_tensors_from_buft(context, mine.type());
//   ggml_gallocr_t scratch = ggml_gallocr_new(mine.type());
#pragma once

#include <cstddef>

#include <ggml-backend.h>

// As ggml-backend-impl.h of ggml 0.20 has them, which its packages leave out: an engine's own tree
// includes that instead.
struct ggml_backend_buffer_type {
    struct {
        const char* (*get_name)(ggml_backend_buffer_type_t);
        ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, std::size_t);
        std::size_t (*get_alignment)(ggml_backend_buffer_type_t);
        std::size_t (*get_max_size)(ggml_backend_buffer_type_t);
        std::size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const ggml_tensor*);
        bool (*is_host)(ggml_backend_buffer_type_t);
    } iface;
    ggml_backend_dev_t device;
    void* context;
};
struct ggml_backend_buffer {
    struct {
        void (*free_buffer)(ggml_backend_buffer_t);
        void* others[10];
    } iface;
    ggml_backend_buffer_type_t buft;
    void* context;
    std::size_t size;
    ggml_backend_buffer_usage usage;
};

/// Must outlive its buffers.
template <class Memory>
class ggml_buffers {
public:
    explicit ggml_buffers(Memory& memory)
        : type_{{name, take, alignment, nullptr, nullptr, on_host}, nullptr, &memory} {}
    ggml_buffers(const ggml_buffers&) = delete;
    ggml_buffers& operator=(const ggml_buffers&) = delete;

    [[nodiscard]] ggml_backend_buffer_type_t type() noexcept { return &type_; }

private:
    static const char* name(ggml_backend_buffer_type_t) { return "gpushare"; }
    static std::size_t alignment(ggml_backend_buffer_type_t) {
        return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
    }
    static bool on_host(ggml_backend_buffer_type_t) { return true; }

    /// Null where there is no room: ggml passes that on.
    static ggml_backend_buffer_t take(ggml_backend_buffer_type_t type, std::size_t size) {
        void* const p = static_cast<Memory*>(type->context)->try_allocate(size, alignment(type));
        if (p == nullptr) return nullptr;
        ggml_backend_buffer_t made =
            ggml_backend_cpu_buffer_from_ptr(p, size);  // reads and writes as any buffer of the host
        made->buft = type;
        made->iface.free_buffer = [](ggml_backend_buffer_t b) {
            static_cast<Memory*>(b->buft->context)->deallocate(b->context, b->size, alignment(b->buft));
        };
        return made;
    }

    ggml_backend_buffer_type type_;
};
