// SPDX-License-Identifier: Apache-2.0
// Virtual memory of a host device: address ranges and physical chunks are separate. Mapping a chunk
// moves its pages, with their page table entries, to the range: nothing is copied, and no page is
// faulted in again.
//
//   gpushare::host::virtual_memory memory{node.memory(gpushare::device_id{0})};
//   auto range = *memory.reserve(64 << 20);    auto chunk = *memory.create();
//   memory.map(range.data(), chunk);           // readable and writable until unmapped
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

#include <gpushare/backend/host/memory.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {

/// The virtual memory of a host device. Models gpushare::virtual_memory; see there. Chunks are
/// charged to the device's capacity, alongside its allocations, and lost with the device; they cost
/// memory of this process only once they are touched. Any thread can touch mapped memory, even with
/// `guarded`. Safe from any thread; ranges and chunks must not outlive it. Linux 5.7 or newer.
class virtual_memory {
public:
    /// The pages of a new chunk come from the system, which has cleared them.
    static constexpr bool fresh_is_zero = true;

    /// Throws operation_error: invalid_specification unless the granularity is a power of two of at
    /// least a page. With a granularity of 2 MiB, the size of a huge page, chunks are huge pages if
    /// the system allows that.
    explicit virtual_memory(device_memory& device, bytes granularity = 2_MiB)
        : device_(&device), granularity_(static_cast<std::size_t>(granularity.count())) {
        const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
        if (!std::has_single_bit(granularity_) || granularity_ < page)
            throw operation_error(errc::invalid_specification, {},
                                  "host virtual memory: the granularity must be a power of two, a page or more");
    }
    virtual_memory(const virtual_memory&) = delete;
    virtual_memory& operator=(const virtual_memory&) = delete;

    /// A reserved range of addresses, which no other allocation gets. Touching an address where
    /// nothing is mapped faults (SIGSEGV).
    class range {
    public:
        /// Takes over the addresses.
        range(range&& other) noexcept
            : mapping_(std::exchange(other.mapping_, nullptr)), mapped_(other.mapped_), data_(other.data_) {}
        /// Takes over the addresses of `other`, and gives back its own.
        range& operator=(range other) noexcept {
            std::swap(mapping_, other.mapping_);
            std::swap(mapped_, other.mapped_);
            std::swap(data_, other.data_);
            return *this;
        }
        ~range() {
            if (mapping_ != nullptr) ::munmap(mapping_, mapped_);
        }
        /// The first address.
        [[nodiscard]] void* data() const noexcept { return data_; }

    private:
        friend virtual_memory;
        range(void* mapping, std::size_t mapped, void* data) noexcept
            : mapping_(mapping), mapped_(mapped), data_(data) {}

        void* mapping_;  // the whole mapping, with the slack that aligns data_
        std::size_t mapped_;
        void* data_;
    };

    /// A chunk: granularity() bytes of the device.
    class chunk {
    public:
        /// Takes over the memory.
        chunk(chunk&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)), home_(std::move(other.home_)) {}
        /// Takes over the memory of `other`, and gives back its own.
        chunk& operator=(chunk other) noexcept {
            std::swap(memory_, other.memory_);
            std::swap(home_, other.home_);
            return *this;
        }
        ~chunk() {
            if (memory_ != nullptr) memory_->device_->release(memory_->granularity());
        }

    private:
        friend virtual_memory;
        chunk(virtual_memory& memory, range&& home) noexcept : memory_(&memory), home_(std::move(home)) {}

        virtual_memory* memory_;
        range home_;  // holds the pages while the chunk isn't mapped
    };

    /// The size of a chunk.
    [[nodiscard]] bytes granularity() const noexcept { return bytes{granularity_}; }

    /// Reserves a range. not_whole: `size` is zero or no multiple of the granularity;
    /// size_overflow: no process has as many addresses; out_of_memory: the system gives no more.
    [[nodiscard]] result<range> reserve(std::size_t size) noexcept {
        if (size == 0 || size % granularity_ != 0)
            return failure{
                .code = errc::not_whole, .asked = size, .limit = granularity_, .because = reason::whole_sizes};
        if (size > std::numeric_limits<std::size_t>::max() / 4)
            return failure{.code = errc::size_overflow, .asked = size, .because = reason::no_addresses};
        const std::size_t whole = size + granularity_;
        void* const mapping = ::mmap(nullptr, whole, PROT_NONE, anonymous, -1, 0);
        if (mapping == MAP_FAILED)
            return failure{.code = errc::out_of_memory, .asked = size, .because = reason::no_addresses};
        const std::size_t before = -reinterpret_cast<std::uintptr_t>(mapping) & (granularity_ - 1);
        return range{mapping, whole, static_cast<std::byte*>(mapping) + before};
    }

    /// Makes a chunk. Errors: out_of_memory, device_lost.
    [[nodiscard]] result<chunk> create() noexcept {
        failure why{.code = device_->charge(granularity()), .asked = granularity_, .because = reason::size};
        if (why.code != errc::none) return why;
        auto home = reserve(granularity_);
        if (!home || ::mprotect(home->data(), granularity_, PROT_READ | PROT_WRITE) != 0) {
            device_->release(granularity());
            why.code = errc::out_of_memory;
            return why;
        }
        ::madvise(home->data(), granularity_, MADV_HUGEPAGE);  // only a hint
        return chunk{*this, *std::move(home)};
    }

    /// Maps the chunk at `at`. out_of_memory if the system allows no more mappings.
    errc map(void* at, const chunk& c) noexcept {
        void* const home = c.home_.data();
        try {
            const std::lock_guard lock{mutex_};
            homes_[at] = home;
        } catch (const std::bad_alloc&) {
            return errc::out_of_memory;
        }
        if (move(home, at)) return errc::none;
        const std::lock_guard lock{mutex_};
        homes_.erase(at);
        return errc::out_of_memory;
    }

    /// Unmaps chunks. unknown_block if a part isn't mapped; out_of_memory as for map().
    errc unmap(void* at, std::size_t size) noexcept {
        const std::lock_guard lock{mutex_};
        for (std::size_t offset = 0; offset < size; offset += granularity_)
            if (!homes_.contains(advanced(at, offset))) return errc::unknown_block;
        for (std::size_t offset = 0; offset < size; offset += granularity_) {
            if (move(advanced(at, offset), home_of(at, offset))) continue;
            while (offset != 0) {
                offset -= granularity_;
                (void)move(home_of(at, offset), advanced(at, offset));
            }
            return errc::out_of_memory;
        }
        // The vacated addresses have no pages, but could still be touched.
        ::mmap(at, size, PROT_NONE, anonymous | MAP_FIXED, -1, 0);
        for (std::size_t offset = 0; offset < size; offset += granularity_) homes_.erase(advanced(at, offset));
        return errc::none;
    }

private:
    static constexpr int anonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

    static void* advanced(void* at, std::size_t offset) noexcept { return static_cast<std::byte*>(at) + offset; }
    [[nodiscard]] void* home_of(void* at, std::size_t offset) const noexcept {
        return homes_.find(advanced(at, offset))->second;
    }

    /// Moves a chunk's pages in one step. Both addresses stay taken all the time: no other mapping
    /// gets either of them.
    [[nodiscard]] bool move(void* from, void* to) const noexcept {
        constexpr int how = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
        return ::mremap(from, granularity_, granularity_, how, to) != MAP_FAILED;
    }

    device_memory* device_;
    std::size_t granularity_;
    std::mutex mutex_;
    // The homes of mapped chunks, by the address of the mapping.
    std::unordered_map<void*, void*> homes_;
};
static_assert(gpushare::virtual_memory<virtual_memory>);

}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
