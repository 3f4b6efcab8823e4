// SPDX-License-Identifier: Apache-2.0
// A tenant's memory for PyTorch: the functions behind torch.cuda.memory.CUDAPluggableAllocator. PyTorch finds two C
// functions by their names in a shared object:
//
//   using chat_memory = gpushare::tenant<cuda::node>::memory_type;
//   gpushare::pytorch_allocator<chat_memory, cuda::node>& chat();     // your program keeps it, one for each tenant
//   extern "C" void* chat_malloc(ssize_t size, int device, cudaStream_t stream) {
//       return chat().try_allocate(size, device, stream);             // behind a torch.cuda.MemPool
//   }
//   extern "C" void chat_free(void* p, ssize_t size, int device, cudaStream_t stream) {
//       chat().deallocate(p, size, device, stream);
//   }
//
// There are two ways to use it. Behind a torch.cuda.MemPool, one for each tenant, PyTorch's caching allocator calls
// these functions. It takes null for out of memory, frees its cache, asks again, and throws torch.OutOfMemoryError
// itself: so call try_allocate. With torch.cuda.memory.change_current_allocator PyTorch neither caches nor checks for
// null: so call allocate, which throws. The tenant's memory is a pool by default; of memory_stack::direct every call would
// be a cudaMalloc.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/interop/detail/native_stream.hpp>
#include <gpushare/interop/stream_resource.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// One tenant's memory on the devices that PyTorch sees. Refers to the node and the memories, which must outlive it.
/// Thread-safe if the memories are, once all devices are added. `Stream` is a pointer to PyTorch's streams: the target of
/// cudaStream_t.
template <class Memory, node Node>
requires stream_ordered_memory<Memory, typename Node::stream::point> && copier<typename Node::stream>
class pytorch_allocator {
public:
    /// `tenant` is named in refusals of memories that name nobody, such as pools; the text must outlive this.
    explicit pytorch_allocator(Node& on, std::string_view tenant = {}) noexcept : node_(&on), tenant_(tenant) {}
    pytorch_allocator(const pytorch_allocator&) = delete;
    pytorch_allocator& operator=(const pytorch_allocator&) = delete;

    /// What PyTorch calls device `ordinal` is the node's `d`, and the tenant's memory there is `m`. Before PyTorch
    /// allocates. Makes a stream. Throws operation_error (duplicate_device, no_device), std::bad_alloc.
    void add(int ordinal, device_id d, Memory& m) {
        if (find(ordinal) != nullptr)
            throw operation_error(errc::duplicate_device, {}, "memory for PyTorch: the same device twice");
        parts_.push_back({ordinal, d, &m, node_->make_stream(d)});
    }

    /// Bytes; a unique address for 0. Throws, because PyTorch doesn't check for null: what the memory throws, a
    /// std::bad_alloc that names the tenant and its figures, also for negative sizes; operation_error (no_device) for a
    /// device that wasn't added. In Python it is a RuntimeError with that text.
    template <class Stream>
    [[nodiscard]] void* allocate(std::ptrdiff_t size, int ordinal, Stream* /*stream*/) {
        part* const on = find(ordinal);
        if (on == nullptr)
            raise({.code = errc::no_device, .asked = static_cast<std::uint64_t>(ordinal), .limit = parts_.size()},
                  tenant_, "memory for PyTorch");
        try {
            return on->memory->allocate(unsigned_size(size), alignment);
        } catch (const memory_error& e) {
            if (!e.tenant().empty() || tenant_.empty()) throw;
            raise(e.figures(), tenant_, "memory for PyTorch");
        }
    }

    /// As allocate, but null where that would throw, for a MemPool; the tenant's memory counts the refusal.
    template <class Stream>
    [[nodiscard]] void* try_allocate(std::ptrdiff_t size, int ordinal, Stream* /*stream*/) noexcept {
        part* const on = find(ordinal);
        return on == nullptr ? nullptr : as_upstream(*on->memory).try_allocate(unsigned_size(size), alignment, nullptr);
    }

    /// Credited once `stream`, and all streams that were recorded for the block, have done what was enqueued so far.
    /// Never throws, since PyTorch calls it from destructors. What isn't out, or has another size, changes nothing: the
    /// memory's answer is returned, and a tenant_memory has an event for it. Null is ignored. On a stream that is captured
    /// (errc::capturing) the block may be part of the graph: it is kept until free_captured().
    template <class Stream>
    errc deallocate(void* p, std::ptrdiff_t size, int ordinal, Stream* stream) noexcept {
        if (p == nullptr) return errc::none;
        errc why = errc::out_of_memory;  // of the host's
        try {
            part* const on = find(ordinal);
            if (on != nullptr)
                return on->memory->deallocate_after(last_use(*on, p, stream), p, unsigned_size(size), alignment);
            why = errc::no_device;
        } catch (const error& e) {
            why = e.code();
        } catch (...) {
        }
        if (why == errc::capturing && keep({p, unsigned_size(size), ordinal})) return why;
        unfreed_.fetch_add(1, std::memory_order_relaxed);  // to free it now could be too early
        return why;
    }

    /// Frees what was freed on streams that were captured, at once, and returns how many blocks those were. The graphs must
    /// be gone, and nothing may use the blocks any more: call it after the last graph was reset and its stream synchronised.
    std::size_t free_captured() noexcept {
        std::vector<kept> blocks;
        {
            const std::lock_guard lock(mutex_);
            blocks.swap(captured_);
        }
        for (const kept& k : blocks) (void)find(k.ordinal)->memory->deallocate(k.pointer, k.size, alignment);
        return blocks.size();
    }
    /// What free_captured() would free.
    [[nodiscard]] bytes captured() const noexcept {
        const std::lock_guard lock(mutex_);
        bytes sum;
        for (const kept& k : captured_) sum += bytes{k.size};
        return sum;
    }

    /// The block is used on `stream` as well, other than the one it was allocated on: for PyTorch's set_record_stream_fn.
    /// Throws std::bad_alloc.
    template <class Stream>
    void record_stream(void* p, Stream* stream) {
        if (p == nullptr || stream == nullptr) return;
        const std::lock_guard lock(mutex_);
        const auto [first, last] = recorded_.equal_range(p);
        if (std::none_of(first, last, [&](const auto& use) { return use.second == stream; }))
            recorded_.emplace(p, stream);
    }

    /// Frees that could not be ordered, because of the device, or because there is no point on the stream: it is on no
    /// device of the node, or a per-thread default stream. The blocks stay charged until the tenant closes.
    [[nodiscard]] std::uint64_t unfreed() const noexcept { return unfreed_.load(std::memory_order_relaxed); }

private:
    static constexpr std::size_t alignment = 256;  // what PyTorch expects of cudaMalloc

    struct part {
        int ordinal;
        device_id device;
        Memory* memory;
        typename Node::stream joined;
    };
    struct kept {
        void* pointer;
        std::size_t size;
        int ordinal;
    };

    // A negative size becomes one that no memory has.
    [[nodiscard]] static std::size_t unsigned_size(std::ptrdiff_t size) noexcept {
        return size < 0 ? std::numeric_limits<std::size_t>::max() : static_cast<std::size_t>(size);
    }

    [[nodiscard]] part* find(int ordinal) noexcept {
        for (part& p : parts_)
            if (p.ordinal == ordinal) return &p;
        return nullptr;
    }

    // False if the host has no memory for the entry.
    bool keep(const kept& k) noexcept {
        try {
            const std::lock_guard lock(mutex_);
            captured_.push_back(k);
            return true;
        } catch (...) {
            return false;
        }
    }

    // The point after everything that may use the block.
    template <class Stream>
    typename Node::stream::point last_use(part& on, void* p, Stream* stream) {
        auto used = detail::point_after(*node_, on.device, stream);
        while (void* const other = take_recorded(p)) {
            // In order on a stream that has nothing else to do: each wait is behind the one before.
            on.joined.wait(used);
            on.joined.wait(detail::point_after(*node_, on.device, static_cast<Stream*>(other)));
            used = on.joined.record();
        }
        return used;
    }

    // A stream that was recorded for the block, which is forgotten; null if there is none.
    void* take_recorded(void* p) noexcept {
        const std::lock_guard lock(mutex_);
        const auto use = recorded_.find(p);
        if (use == recorded_.end()) return nullptr;
        void* const stream = use->second;
        recorded_.erase(use);
        return stream;
    }

    Node* node_;
    std::string_view tenant_;
    std::vector<part> parts_;
    mutable std::mutex mutex_;
    std::unordered_multimap<void*, void*> recorded_;  // blocks, and streams that use them besides their own
    std::vector<kept> captured_;                      // freed on streams that were captured
    std::atomic<std::uint64_t> unfreed_{0};
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
