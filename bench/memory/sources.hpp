// SPDX-License-Identifier: Apache-2.0
// What the memory benchmarks allocate from: upstreams that cost nothing, and the peers behind one
// interface.
#pragma once

#include <sys/mman.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace bench {

class report;

/// What a worker thread allocates with. Alignments are 256 throughout.
inline constexpr std::size_t alignment = 256;
template <class A>
concept block_source = requires(A& a, void* p, std::size_t size) {
    // clang-format off
    { a.allocate(size, alignment) } -> std::same_as<void*>;
    a.deallocate(p, size, alignment);
    // clang-format on
};

/// Addresses that nothing stands behind, from the operating system: what a driver gives out, at a
/// tenth of its price, and the host can't read it. Thread-safe.
struct address_space {
    void* allocate(std::size_t size, std::size_t) {
        void* const p = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        return p;
    }
    void deallocate(void* p, std::size_t size, std::size_t) noexcept { ::munmap(p, size); }
};

/// Always the same address: leaves the cost of what lies in front.
struct null_upstream {
    void* allocate(std::size_t, std::size_t) noexcept { return this; }
    void deallocate(void*, std::size_t, std::size_t) noexcept {}
};

/// A resource that several threads share, as a source for each.
template <class Resource>
struct shared {
    Resource* resource;
    void* allocate(std::size_t size, std::size_t align) { return resource->allocate(size, align); }
    void deallocate(void* p, std::size_t size, std::size_t align) { resource->deallocate(p, size, align); }
};

/// An allocator of the field. Memory is the process's; nobody touches it.
struct peer {
    std::string name, version;  // as the library itself says it
    std::shared_ptr<void> state;
    void* (*allocate_from)(void* state, std::size_t size) = nullptr;
    void (*give_back)(void* state, void* p, std::size_t size) = nullptr;

    /// For one thread.
    struct source {
        const peer* of;
        void* allocate(std::size_t size, std::size_t) { return of->allocate_from(of->state.get(), size); }
        void deallocate(void* p, std::size_t size, std::size_t) { of->give_back(of->state.get(), p, size); }
    };
    [[nodiscard]] source make() const { return {this}; }
};

/// Those that are installed: std::pmr always; jemalloc, mimalloc and tcmalloc are loaded beside the
/// C library's malloc, which stays what it is; Thrust where the CUDA toolkit's headers were found.
std::vector<peer> peers();
/// Thrust's pool for memory that can't be read, over the process's own; empty name without its
/// headers.
peer thrust_pool();

/// Starts this program again with the settings that peers have by the environment, unless these are
/// set, and with room set aside by the C library, without which jemalloc can't be loaded late.
void prepare_for_peers(char** argv);
/// Says which peers there are and what they were set to.
void peer_settings(report& r);

}  // namespace bench
