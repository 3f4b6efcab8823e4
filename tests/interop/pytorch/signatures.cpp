// SPDX-License-Identifier: Apache-2.0
// PyTorch's own declarations, from its wheel, against the two forms of our functions: null for a
// MemPool, throwing for change_current_allocator. It compiles or it doesn't; nothing of PyTorch is
// linked.
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <type_traits>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/interop/pytorch.hpp>
#include <gpushare/tenant/tenant_memory.hpp>

namespace {

namespace torchs = ::torch::cuda::CUDAPluggableAllocator;
using node = gpushare::cuda::node;
using allocator = gpushare::pytorch_allocator<gpushare::tenant_memory<node::memory_type, node::stream::point>, node>;

[[maybe_unused]] allocator& chat();

}  // namespace

// As an embedder writes them: what CUDAPluggableAllocator(path, "chat_malloc", "chat_free") finds
// by name.
extern "C" {
void* chat_malloc(std::ptrdiff_t size, int device, cudaStream_t stream) {
    return chat().try_allocate(size, device, stream);
}
void* chat_malloc_or_throw(std::ptrdiff_t size, int device, cudaStream_t stream) {
    return chat().allocate(size, device, stream);
}
void chat_free(void* p, std::ptrdiff_t size, int device, cudaStream_t stream) {
    chat().deallocate(p, size, device, stream);
}
void chat_record_stream(void* p, cudaStream_t stream) { chat().record_stream(p, stream); }
}

namespace {

allocator& chat() {
    static std::unique_ptr<allocator> one;
    return *one;
}

// What PyTorch makes an allocator of, and its setters.
[[maybe_unused]] auto for_a_pool() { return torchs::createCustomAllocator(chat_malloc, chat_free); }
[[maybe_unused]] void in_place_of_its_own() {
    torchs::changeCurrentAllocator(torchs::createCustomAllocator(chat_malloc_or_throw, chat_free));
}
[[maybe_unused]] void other_streams(torchs::CUDAPluggableAllocator& a) { a.set_record_stream_fn(chat_record_stream); }

static_assert(std::is_same_v<decltype(for_a_pool()), std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator>>);

}  // namespace
