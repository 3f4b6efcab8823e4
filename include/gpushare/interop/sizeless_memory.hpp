// SPDX-License-Identifier: Apache-2.0
// Memory that is freed by its address alone, for TensorRT, ONNX Runtime and C programs. It remembers sizes and
// alignments, outside the blocks.
//
//   gpushare::sizeless_memory blocks{chat.memory()};
//   void* p = blocks.try_allocate(1000, 256);     blocks.deallocate(p);      // errc::unknown_block the second time
#pragma once

#include <cstddef>
#include <mutex>
#include <new>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/pointer_table.hpp>
#include <gpushare/error.hpp>
#include <gpushare/interop/stream_resource.hpp>
#include <gpushare/memory/as_upstream.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Refers to `Memory`, which must outlive it. Thread-safe if that is: one mutex, held for a look
/// into a hash table. Blocks that are still out when it is destroyed stay with the memory, whose
/// tenant reports them.
template <memory_resource Memory>
class sizeless_memory {
public:
    /// Refers to `of`.
    explicit sizeless_memory(Memory& of) noexcept : memory_(&of) {}
    sizeless_memory(const sizeless_memory&) = delete;
    sizeless_memory& operator=(const sizeless_memory&) = delete;

    /// `size` bytes at a multiple of `alignment`, a power of two. Throws what the memory throws, a std::bad_alloc.
    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment) {
        void* const p = memory_->allocate(size, alignment);
        if (p == nullptr || !remember(p, {size, alignment})) throw std::bad_alloc();
        return p;
    }
    /// Null if they aren't there.
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment) noexcept {
        void* const p = as_upstream(*memory_).try_allocate(size, alignment, nullptr);
        return p != nullptr && remember(p, {size, alignment}) ? p : nullptr;
    }

    /// No work may use the block any more, or `Memory` frees in the order of a stream. unknown_block, and nothing
    /// happened, for an address that isn't out. Null is ignored.
    errc deallocate(void* p) noexcept {
        return forget(p, [&](const extent& e) { return give(p, e); });
    }
    /// Once `used` is reached, with a stream_ordered_memory.
    template <timeline_point Point>
    errc deallocate_after(const Point& used, void* p) noexcept {
        return forget(p, [&](const extent& e) { return memory_->deallocate_after(used, p, e.size, e.alignment); });
    }

    /// Whether the block is out, and has room for as much.
    [[nodiscard]] bool holds(const void* p, std::size_t size, std::size_t alignment) const noexcept {
        const std::lock_guard lock(mutex_);
        const extent* const e = out_.find(p);
        return e != nullptr && e->size >= size && e->alignment >= alignment;
    }

private:
    struct extent {
        std::size_t size = 0, alignment = 0;
    };

    // Gives the block back if the host has no memory for the entry.
    bool remember(void* p, const extent& e) noexcept {
        try {
            const std::lock_guard lock(mutex_);
            out_.insert(p, e);
            return true;
        } catch (...) {
            (void)give(p, e);
            return false;
        }
    }

    errc give(void* p, const extent& e) noexcept { return as_upstream(*memory_).deallocate(p, e.size, e.alignment); }

    // Forgotten first: as soon as it is free, the address may be handed out again.
    template <class Free>
    errc forget(void* p, Free free) noexcept {
        if (p == nullptr) return errc::none;
        extent found;
        {
            const std::lock_guard lock(mutex_);
            const extent* const e = out_.find(p);
            if (e == nullptr) return errc::unknown_block;
            found = *e;
            out_.erase(p);
        }
        return free(found);
    }

    Memory* memory_;
    mutable std::mutex mutex_;
    detail::pointer_table<extent> out_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
