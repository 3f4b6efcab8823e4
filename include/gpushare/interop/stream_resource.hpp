// SPDX-License-Identifier: Apache-2.0
// Memory that frees in the order of one stream, for containers and libraries that free without
// naming a stream. Work that is enqueued on the stream may still use a freed block. Other users get
// the block once that work is done.
//
//   gpushare::stream_resource ordered{chat.memory(), stream};
//   // the free doesn't wait for the kernel
//   void* p = ordered.allocate(1_MiB);     stream.launch(shape, kernel);     ordered.deallocate(p, 1_MiB);
//
// Vendors' libraries that need scratch memory from their caller (cuBLAS, cuBLASLt, cuDNN, cuFFT,
// CUB) get a block from scratch_memory, which frees the block in its resource's order:
//
//   gpushare::scratch_memory scratch{ordered, 4 << 20};
//   transform(scratch.data(), scratch.size());      // e.g. cuDNN's, on that stream
//   scratch.at_least(8 << 20);                      // for a plan that needs more
//
// TensorRT, ONNX Runtime and C programs free by address only. sizeless_memory remembers sizes and
// alignments, outside the blocks:
//
//   gpushare::sizeless_memory blocks{chat.memory()};
//   // errc::unknown_block the second time
//   void* q = blocks.try_allocate(1000, 256);     blocks.deallocate(q);
//
// A program calls a device-wide algorithm of CUB twice: once to ask how many bytes the algorithm
// needs, and once to run it. with_temporary_storage makes both calls, and frees the bytes in the
// order of the stream.
//
//   gpushare::with_temporary_storage(chat.memory(), stream, [&](void* temporary, std::size_t& size) {
//       // native: stream.native_handle()
//       return cub::DeviceReduce::Sum(temporary, size, in, out, n, native);
//   });
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <mutex>
#include <new>
#include <string_view>
#include <thread>
#include <utility>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/pointer_table.hpp>
#include <gpushare/error.hpp>
#include <gpushare/interop/detail/native_stream.hpp>
#include <gpushare/memory/as_upstream.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Memory that can also free in stream order, such as the memory of tenants, pools and
/// scrubbing_resource. Once the point is reached, the quota is credited, and other users can get
/// the block.
template <class R, class Point>
concept stream_ordered_memory = memory_resource<R> && requires(R& r, const Point& point, void* p, std::size_t n) {
    // clang-format off
    { r.deallocate_after(point, p, n, n) } noexcept -> std::same_as<errc>;
    // clang-format on
};

/// Refers to a memory and a stream, which must outlive the resource and its copies. Copies are
/// equal. Sizes and alignments are in bytes. The resource is as thread-safe as the memory and the
/// stream's record(). If work on other streams uses a block, this stream must wait for that work
/// before the free.
template <class Memory, timeline Stream>
requires stream_ordered_memory<Memory, typename Stream::point>
class stream_resource {
public:
    static constexpr std::size_t default_alignment = 256;  ///< as device allocators use

    /// Frees happen in the order of `order`.
    stream_resource(Memory& memory_of, Stream& order) noexcept : memory_(&memory_of), stream_(&order) {}

    /// Allocates a block that work on any stream may use at once. Throws what the memory throws, a
    /// std::bad_alloc.
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment = default_alignment) {
        return memory_->allocate(size, alignment);
    }
    /// Like allocate(), but returns null instead of throwing.
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment = default_alignment,
                                     failure* why = nullptr) noexcept {
        return as_upstream(*memory_).try_allocate(size, alignment, why);
    }
    /// As allocate(), but waits as the memory does.
    template <clock Clock>
    requires requires(Memory& m, const patience<Clock>& until) { m.allocate(1, 1, until); }
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment, const patience<Clock>& until) {
        return memory_->allocate(size, alignment, until);
    }
    /// The same, but returns null instead of throwing.
    template <clock Clock>
    requires requires(Memory& m, const patience<Clock>& until) { m.try_allocate(1, 1, until); }
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                     failure* why = nullptr) noexcept {
        return memory_->try_allocate(size, alignment, until, why);
    }
    /// The memory's answer; see concepts.hpp.
    [[nodiscard]] bytes charged(byte_count size, std::size_t alignment) const noexcept {
        return as_upstream(*memory_).charged(size, alignment);
    }
    /// The memory's answer.
    [[nodiscard]] failure refuses(byte_count size, std::size_t alignment) const noexcept {
        return as_upstream(*memory_).refuses(size, alignment);
    }
    /// The memory's answer.
    [[nodiscard]] bytes largest_free() const noexcept { return as_upstream(*memory_).largest_free(); }
    /// The memory's answer.
    [[nodiscard]] std::string_view owner() const noexcept { return as_upstream(*memory_).owner(); }
    /// The memory's answer.
    [[nodiscard]] close_token closing() const noexcept { return as_upstream(*memory_).closing(); }
    /// The memory's answer; see quota::in_hook.
    [[nodiscard]] bool in_hook(std::thread::id thread) const noexcept { return as_upstream(*memory_).in_hook(thread); }

    /// Credits the block once the stream has done the work enqueued so far; on a captured stream,
    /// once the graph is gone. Returns the memory's answer to wrong frees, which change nothing.
    /// Null is ignored. If the library can't place a point on the stream, because its capture was
    /// invalidated or the host has no memory, the answer says so. The block then stays charged
    /// until its tenant closes, because freeing it now could be too early.
    errc deallocate(void* p, byte_count size, std::size_t alignment = default_alignment) noexcept {
        if (p == nullptr) return errc::none;
        try {
            return memory_->deallocate_after(detail::last_use(*stream_), p, size, alignment);
        } catch (const error& why) {
            return why.code();
        } catch (...) {
            return errc::out_of_memory;
        }
    }

    /// The memory's answer.
    [[nodiscard]] auto find(const void* p) const noexcept requires requires(const Memory& m) { m.find(p); }
    { return memory_->find(p); }

    /// Whether both use the same memory and the same stream.
    friend bool operator==(const stream_resource& a, const stream_resource& b) noexcept {
        return a.memory_ == b.memory_ && a.stream_ == b.stream_;
    }

private:
    Memory* memory_;
    Stream* stream_;
};

/// A block of `Resource`, which must outlive the object. The destructor frees the block. The object
/// can be moved, and one thread at a time uses it. Use the block on one stream only. If the
/// resource frees in the order of a stream, use the block on that stream.
template <memory_resource Resource>
class scratch_memory {
public:
    static constexpr std::size_t default_alignment = 256;  ///< cuBLAS refuses less

    /// Sizes and alignments are in bytes. With 0 bytes nothing is allocated, and data() is null.
    /// Throws what the resource throws.
    explicit scratch_memory(Resource& from, std::size_t size = 0, std::size_t alignment = default_alignment)
        : from_(&from),
          data_(size == 0 ? nullptr : from.allocate(size, alignment)),
          size_(size),
          alignment_(alignment) {}
    /// Takes over the block.
    scratch_memory(scratch_memory&& other) noexcept
        : from_(other.from_),
          data_(std::exchange(other.data_, nullptr)),
          size_(std::exchange(other.size_, 0)),
          alignment_(other.alignment_) {}
    /// Takes over the block of `other`, and frees the object's own.
    scratch_memory& operator=(scratch_memory other) noexcept {
        swap(other);
        return *this;
    }
    ~scratch_memory() {
        if (data_ != nullptr) (void)from_->deallocate(data_, size_, alignment_);
    }

    /// The address of the block; null for 0 bytes.
    [[nodiscard]] void* data() const noexcept { return data_; }
    /// The size in bytes.
    [[nodiscard]] std::size_t size() const noexcept { return size_; }

    /// Grows to `size` bytes if the block has fewer, without keeping the contents, and returns
    /// data(). Both blocks exist for a moment. If the resource throws, the object is unchanged.
    void* at_least(std::size_t size) {
        if (size > size_) *this = scratch_memory(*from_, size, alignment_);
        return data_;
    }

private:
    void swap(scratch_memory& other) noexcept {
        std::swap(from_, other.from_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(alignment_, other.alignment_);
    }

    Resource* from_;
    void* data_;
    std::size_t size_, alignment_;
};

/// Memory that frees by address only. Refers to `Memory`, which must outlive the object. Any thread
/// may use it if the memory allows that; one mutex is held for a look into a hash table. Blocks
/// that are still allocated when the object is destroyed stay charged to the memory, whose tenant
/// reports them.
template <memory_resource Memory>
class sizeless_memory {
public:
    /// Refers to `of`.
    explicit sizeless_memory(Memory& of) noexcept : memory_(&of) {}
    sizeless_memory(const sizeless_memory&) = delete;
    sizeless_memory& operator=(const sizeless_memory&) = delete;

    /// Allocates `size` bytes at a multiple of `alignment`, a power of two. Throws what the memory
    /// throws.
    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment) {
        void* const p = memory_->allocate(size, alignment);
        if (p == nullptr || !remember(p, {size, alignment})) throw std::bad_alloc();
        return p;
    }
    /// Like allocate(), but returns null instead of throwing.
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment) noexcept {
        void* const p = as_upstream(*memory_).try_allocate(size, alignment, nullptr);
        return p != nullptr && remember(p, {size, alignment}) ? p : nullptr;
    }

    /// Frees a block, which no work may use any more, and returns what the memory says. If a later
    /// free may succeed (concepts.hpp), the block stays allocated. Does nothing and returns
    /// unknown_block for an address that isn't currently allocated. Null is ignored.
    errc deallocate(void* p) noexcept {
        return forget(p, [&](const extent& e) { return give(p, e); });
    }
    /// Frees once `used` is reached. The memory must be a stream_ordered_memory.
    template <timeline_point Point>
    errc deallocate_after(const Point& used, void* p) noexcept {
        return forget(p, [&](const extent& e) { return memory_->deallocate_after(used, p, e.size, e.alignment); });
    }

    /// Whether the block is allocated, large enough and aligned enough.
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

    // The entry is taken out first, because as soon as the block is free, its address may be handed
    // out again. If the memory doesn't take the block back now, the entry comes back.
    template <class Free>
    errc forget(void* p, Free free) noexcept {
        if (p == nullptr) return errc::none;
        extent found;
        {
            const std::lock_guard lock(mutex_);
            const extent* const e = out_.find(p);
            if (e == nullptr) return errc::unknown_block;
            found = *e;
            out_.take_out(p);
        }
        const errc why = free(found);
        const std::lock_guard lock(mutex_);
        detail::stays_out(why) ? out_.put_back(p, found) : out_.forget();
        return why;
    }

    Memory* memory_;
    mutable std::mutex mutex_;
    detail::pointer_table<extent> out_;
};

/// An algorithm in CUB's two phases: with null the algorithm writes the size that it needs; with
/// that many bytes it enqueues its work. The zero of its status, such as cudaSuccess, means
/// success.
template <class F>
concept two_phase_algorithm = requires(F& f, void* temporary, std::size_t& size) {
    f(temporary, size) == decltype(f(temporary, size)){};
};

/// Calls `algorithm` twice and returns its last status; if the first phase fails, there is no
/// second phase. `from` must free in the order of the stream on which `algorithm` enqueues: a
/// stream_resource, or a pool's cache for that stream. Throws what `from` throws, a std::bad_alloc,
/// and what `algorithm` throws.
template <memory_resource Resource, two_phase_algorithm Algorithm>
auto with_temporary_storage(Resource& from, Algorithm&& algorithm) {
    std::size_t size = 0;
    const auto asked = algorithm(static_cast<void*>(nullptr), size);
    if (asked != decltype(algorithm(nullptr, size)){}) return asked;
    size = std::max<std::size_t>(size, 1);  // with null, the algorithm would tell its size again
    const scratch_memory<Resource> temporary(from, size);
    return algorithm(temporary.data(), size);
}

/// with_temporary_storage() with any memory that can free in stream order. `on` is the stream on
/// which `algorithm` enqueues. During a capture, the storage belongs to the graph, and is charged
/// until the graph is gone.
template <class Memory, timeline Stream, two_phase_algorithm Algorithm>
requires stream_ordered_memory<Memory, typename Stream::point>
auto with_temporary_storage(Memory& memory_of, Stream& on, Algorithm&& algorithm) {
    stream_resource<Memory, Stream> ordered(memory_of, on);
    return with_temporary_storage(ordered, algorithm);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
