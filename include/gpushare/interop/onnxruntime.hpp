// SPDX-License-Identifier: Apache-2.0
// A tenant's memory as an OrtAllocator, for sessions and tensors of ONNX Runtime.
//
//   gpushare::stream_resource ordered{tenant.memory(), stream};  // the execution provider's stream
//   gpushare::onnxruntime_allocator<OrtAllocator, decltype(ordered)> mine{ordered, memory_info, ORT_API_VERSION};
//   // sessions take it with "session.use_env_allocators" = "1"
//   api->RegisterAllocator(env, &mine);
//
// The struct is a template argument, so this header needs no header of ONNX Runtime and fits every
// version, because the struct only grows at its end.
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/interop/stream_resource.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Refers to `Memory` and the memory info, which must outlive the allocator. ONNX Runtime demands
/// that the allocator outlives its allocations. Any thread may use it if the memory allows that.
/// Alloc returns null for 0 bytes. If there is no memory, Alloc throws, as ONNX Runtime's own
/// allocators do: its functions catch the exception and return a status with the text. If Alloc
/// returned null instead, these functions would make a tensor of it (1.31 does). A program in C
/// can't catch an exception, so it must call AllocatorAlloc instead of Alloc. Freeing an address
/// that isn't currently allocated changes nothing.
///
/// ONNX Runtime frees without naming a stream, while kernels may still use the block. For a device,
/// `Memory` must therefore free in the order of the provider's stream (its option
/// user_compute_stream): use a stream_resource, or a pool's cache for the stream.
template <class Struct, memory_resource Memory>
class onnxruntime_allocator : public Struct {
public:
    /// `info` says where the memory is, as CreateMemoryInfo returned it. `api_version` is
    /// ORT_API_VERSION.
    template <class Info>
    onnxruntime_allocator(Memory& of, const Info* info, std::uint32_t api_version) noexcept
        // functions added after 1.18 are optional, and stay null
        : Struct{}, blocks_(of), info_(info) {
        this->version = api_version;
        this->Alloc = [](Struct* self, std::size_t size) -> void* { return from(self).get(size); };
        this->Free = [](Struct* self, void* p) noexcept { (void)from(self).blocks_.deallocate(p); };
        this->Info = [](const Struct* self) noexcept {
            return static_cast<const Info*>(static_cast<const onnxruntime_allocator*>(self)->info_);
        };
        // Reserve serves initialisers, which an arena would not hold.
        if constexpr (requires { this->Reserve; }) this->Reserve = this->Alloc;
    }
    onnxruntime_allocator(const onnxruntime_allocator&) = delete;
    onnxruntime_allocator& operator=(const onnxruntime_allocator&) = delete;

private:
    // the alignment of cudaMalloc, and more than any provider asks for
    static constexpr std::size_t alignment = 256;

    static onnxruntime_allocator& from(Struct* self) noexcept { return static_cast<onnxruntime_allocator&>(*self); }
    void* get(std::size_t size) { return size == 0 ? nullptr : blocks_.allocate(size, alignment); }

    sizeless_memory<Memory> blocks_;
    const void* info_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
