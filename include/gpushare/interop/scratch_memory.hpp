// SPDX-License-Identifier: Apache-2.0
// Scratch memory from a tenant's memory, for vendors' libraries that ask their caller for it (cuBLAS, cuBLASLt, cuDNN,
// cuFFT, CUB). It is kept as long as work may use it.
//
//   gpushare::stream_resource ordered{tenant.memory(), stream};
//   gpushare::scratch_memory scratch{ordered, 4 << 20};
//   transform(scratch.data(), scratch.size());      // e.g. cuDNN's, on that stream
//   scratch.at_least(8 << 20);                      // for a plan that needs more
#pragma once

#include <cstddef>
#include <utility>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A block of `Resource`, which must outlive it; goes back when it is destroyed. Movable, one
/// owner; not safe from several threads. Use it on one stream only; if the resource frees in stream
/// order, on that stream.
template <memory_resource Resource>
class scratch_memory {
public:
    static constexpr std::size_t default_alignment = 256;  ///</< cuBLAS refuses less

    /// Sizes and alignments in bytes. With 0 bytes it takes none, and data() is null. Exceptions
    /// are the resource's.
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
    /// Gives its own block back.
    scratch_memory& operator=(scratch_memory other) noexcept {
        swap(other);
        return *this;
    }
    ~scratch_memory() {
        if (data_ != nullptr) (void)from_->deallocate(data_, size_, alignment_);
    }

    /// Null for 0 bytes.
    [[nodiscard]] void* data() const noexcept { return data_; }
    /// In bytes.
    [[nodiscard]] std::size_t size() const noexcept { return size_; }

    /// Grows to `size` bytes if it has fewer, without keeping what is in it, and returns data().
    /// Throws what the resource throws, and then it is as before; for a moment there are both, the
    /// old block and the new.
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

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
