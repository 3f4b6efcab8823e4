// SPDX-License-Identifier: Apache-2.0
// A tenant's memory for PyTorch: the functions behind torch.cuda.memory.CUDAPluggableAllocator.
// PyTorch finds two C functions by their names in a shared object:
//
//   using chat_memory = gpushare::tenant<gpushare::cuda::node>::memory_type;
//   // your program keeps it, one for each tenant
//   gpushare::pytorch_allocator<chat_memory, gpushare::cuda::node>& chat();
//   extern "C" void* chat_malloc(ssize_t size, int device, cudaStream_t stream) {
//       return chat().try_allocate(size, device, stream);  // behind a torch.cuda.MemPool
//   }
//   extern "C" void chat_free(void* p, ssize_t size, int device, cudaStream_t stream) {
//       chat().deallocate(p, size, device, stream);
//   }
//
// There are two ways to use the allocator.
//
// Behind a torch.cuda.MemPool, one for each tenant, PyTorch's caching allocator calls these
// functions. If it gets null, it frees its cache, asks again, and throws torch.OutOfMemoryError, so
// call try_allocate.
//
// With torch.cuda.memory.change_current_allocator, PyTorch neither caches nor checks for null, so
// call allocate, which throws. The tenant's memory is a pool by default; with memory_stack::direct
// every call would be a cudaMalloc.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/interop/detail/free_by_address.hpp>
#include <gpushare/interop/detail/native_stream.hpp>
#include <gpushare/interop/stream_resource.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// One tenant's memory on the devices that PyTorch sees. Refers to the node and the memories, which
/// must outlive the object. Once all devices are added, any thread may use the object if the
/// memories allow that. `Stream*` is the type of PyTorch's streams, such as cudaStream_t.
template <class Memory, node Node>
requires stream_ordered_memory<Memory, typename Node::stream::point> && copier<typename Node::stream>
class pytorch_allocator {
public:
    /// Refusals name `tenant` if the memory itself names no tenant, as pools do. The text must
    /// outlive the object.
    explicit pytorch_allocator(Node& on, std::string_view tenant = {}) noexcept : node_(&on), tenant_(tenant) {}
    pytorch_allocator(const pytorch_allocator&) = delete;
    pytorch_allocator& operator=(const pytorch_allocator&) = delete;

    /// Maps PyTorch's device `ordinal` to the node's `d`, with the tenant's memory `m` there. Call
    /// add() before PyTorch allocates. Throws operation_error (duplicate_device, no_device),
    /// std::bad_alloc.
    void add(int ordinal, device_id d, Memory& m) {
        if (find(ordinal) != nullptr)
            throw operation_error(errc::duplicate_device, {}, "memory for PyTorch: the same device twice");
        if (d.index >= node_->num_devices()) raise({errc::no_device, d.index, 0, node_->num_devices()});
        parts_.push_back({ordinal, d, &m});
    }

    /// Allocates bytes; a size of 0 gets a unique address. Throws, because PyTorch doesn't check
    /// for null. The exception is what the memory throws, a std::bad_alloc that names the tenant
    /// and its figures, also for negative sizes; or operation_error (no_device) for a device that
    /// wasn't added. Python gets a RuntimeError with that text.
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

    /// Like allocate, but returns null instead of throwing, for a MemPool. The tenant's memory
    /// counts the refusal.
    template <class Stream>
    [[nodiscard]] void* try_allocate(std::ptrdiff_t size, int ordinal, Stream* /*stream*/) noexcept {
        part* const on = find(ordinal);
        return on == nullptr ? nullptr : as_upstream(*on->memory).try_allocate(unsigned_size(size), alignment, nullptr);
    }

    /// Credits the block once `stream`, and all streams recorded for the block, have done the work
    /// enqueued so far. Never throws, because PyTorch frees in destructors. Null is ignored.
    ///
    /// A pointer that isn't currently allocated changes nothing: the call returns the memory's
    /// answer, and a tenant_memory reports an event. If the size isn't that of the allocation, a
    /// tenant_memory also reports an event, but the block goes back by its address nevertheless. On
    /// a captured stream, the block may be part of the graph, so the block is credited once the
    /// graph, and all graphs made from it, are gone.
    template <class Stream>
    errc deallocate(void* p, std::ptrdiff_t size, int ordinal, Stream* stream) noexcept {
        if (p == nullptr) return errc::none;
        errc why = errc::out_of_memory;  // the host's memory
        try {
            // Also if the free fails, because the next block at this address is a different block.
            const std::vector<void*> others = take_recorded(p);
            part* const on = find(ordinal);
            if (on != nullptr) return free_after(last_use(*on, others, stream), *on, p, unsigned_size(size));
            why = errc::no_device;
        } catch (const error& e) {
            why = e.code();
        } catch (...) {
        }
        unfreed_.fetch_add(1, std::memory_order_relaxed);  // freeing now could be too early
        return why;
    }

    /// Collects freed blocks whose streams are done, as the next allocation would. These include
    /// blocks that were freed on captured streams, if their graphs are gone. Returns how many of
    /// the blocks that captured() counts no longer have a graph.
    std::size_t free_captured() noexcept {
        std::size_t gone = 0;
        {
            const std::lock_guard lock(mutex_);
            gone = std::erase_if(captured_, [](const kept& k) { return k.graph.reached(); });
        }
        for (const part& p : parts_)
            if constexpr (requires { p.memory->collect(); }) p.memory->collect();
        return gone;
    }
    /// The bytes of blocks that were freed on captured streams and wait until their graphs are
    /// gone.
    [[nodiscard]] bytes captured() const noexcept {
        const std::lock_guard lock(mutex_);
        bytes sum;
        for (const kept& k : captured_)
            if (!k.graph.reached()) sum += bytes{k.size};
        return sum;
    }

    /// Records that work on `stream` also uses the block, in addition to work on the stream of the
    /// allocation. For PyTorch's set_record_stream_fn. As everywhere, null is the default stream of
    /// the block's device. The stream must exist until the block is freed. Throws std::bad_alloc.
    template <class Stream>
    void record_stream(void* p, Stream* stream) {
        if (p == nullptr) return;
        const std::lock_guard lock(mutex_);
        const auto [first, last] = recorded_.equal_range(p);
        if (std::none_of(first, last, [&](const auto& use) { return use.second == stream; }))
            recorded_.emplace(p, stream);
    }

    /// The number of frees that could not be ordered. Either the device wasn't added, or the
    /// library can't place a point on the stream: it isn't on a device of the node, or it is a
    /// per-thread default stream. These blocks stay charged until the tenant closes.
    [[nodiscard]] std::uint64_t unfreed() const noexcept { return unfreed_.load(std::memory_order_relaxed); }

private:
    // the alignment that PyTorch expects of cudaMalloc
    static constexpr std::size_t alignment = 256;

    struct part {
        int ordinal;
        device_id device;
        Memory* memory;
    };
    using point = typename Node::stream::point;
    struct kept {
        point graph;  // a point at the graph's end
        std::size_t size;
    };

    // Turns a negative size into a size that no memory has.
    [[nodiscard]] static std::size_t unsigned_size(std::ptrdiff_t size) noexcept {
        return size < 0 ? std::numeric_limits<std::size_t>::max() : static_cast<std::size_t>(size);
    }

    [[nodiscard]] part* find(int ordinal) noexcept {
        for (part& p : parts_)
            if (p.ordinal == ordinal) return &p;
        return nullptr;
    }

    errc free_after(const point& used, const part& on, void* p, std::size_t size) {
        const errc why = detail::free_by_address(*on.memory, p, size, alignment, [&](std::size_t n, std::size_t align) {
            return on.memory->deallocate_after(used, p, n, align);
        });
        if constexpr (requires { used.waits_for_graph(); })
            if (why == errc::none && used.waits_for_graph()) remember({used, size});
        return why;
    }
    // Only for captured(): if the host has no memory for the record, captured() doesn't count the
    // block.
    void remember(const kept& k) noexcept {
        try {
            const std::lock_guard lock(mutex_);
            std::erase_if(captured_, [](const kept& other) { return other.graph.reached(); });
            captured_.push_back(k);
        } catch (...) {
        }
    }

    // The point after all work that may use the block, on the block's stream and on the streams
    // recorded for the block.
    template <class Stream>
    point last_use(const part& on, const std::vector<void*>& others, Stream* stream) {
        std::vector<point> all;
        all.push_back(detail::point_after(*node_, on.device, stream));
        for (void* const other : others)
            if (other != stream) all.push_back(detail::point_after(*node_, on.device, static_cast<Stream*>(other)));
        return detail::point_after_all(*node_, on.device, std::move(all));
    }

    // The streams recorded for the block, which are forgotten here. Throws std::bad_alloc.
    std::vector<void*> take_recorded(void* p) {
        std::vector<void*> streams;
        const std::lock_guard lock(mutex_);
        const auto [first, last] = recorded_.equal_range(p);
        for (auto use = first; use != last; ++use) streams.push_back(use->second);
        recorded_.erase(first, last);
        return streams;
    }

    Node* node_;
    std::string_view tenant_;
    std::vector<part> parts_;
    mutable std::mutex mutex_;
    std::unordered_multimap<void*, void*> recorded_;  // blocks, and the other streams that use them
    // blocks freed on streams that are captured, or were
    std::vector<kept> captured_;
    std::atomic<std::uint64_t> unfreed_{0};
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
