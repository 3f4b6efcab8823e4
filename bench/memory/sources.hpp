// SPDX-License-Identifier: Apache-2.0
// The sources from which the memory benchmarks allocate: upstreams of almost no cost, and the peers
// behind a common interface.
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

/// The interface of a worker thread's allocator. All blocks have an alignment of 256.
inline constexpr std::size_t alignment = 256;
template <class A>
concept block_source = requires(A& a, void* p, std::size_t size) {
    // clang-format off
    { a.allocate(size, alignment) } -> std::same_as<void*>;
    a.deallocate(p, size, alignment);
    // clang-format on
};

/// Reserves addresses without memory from the operating system. Like a driver's memory, the host
/// can't read the blocks, but an allocation costs only a tenth of a driver's. Thread-safe.
struct address_space {
    void* allocate(std::size_t size, std::size_t) {
        void* const p = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        return p;
    }
    void deallocate(void* p, std::size_t size, std::size_t) noexcept { ::munmap(p, size); }
};

/// Always returns the same address, so that only the cost of the layer in front is left.
struct null_upstream {
    void* allocate(std::size_t, std::size_t) noexcept { return this; }
    void deallocate(void*, std::size_t, std::size_t) noexcept {}
};

/// Gives each thread a source that allocates from a shared resource.
template <class Resource>
struct shared {
    Resource* resource;
    void* allocate(std::size_t size, std::size_t align) { return resource->allocate(size, align); }
    void deallocate(void* p, std::size_t size, std::size_t align) { resource->deallocate(p, size, align); }
};

/// Another project's allocator. The memory comes from the process, and no benchmark touches the
/// memory.
struct peer {
    std::string name, version;  // as the library reports them
    std::shared_ptr<void> state;
    void* (*allocate_from)(void* state, std::size_t size) = nullptr;
    void (*give_back)(void* state, void* p, std::size_t size) = nullptr;

    /// A source for one thread.
    struct source {
        const peer* of;
        void* allocate(std::size_t size, std::size_t) { return of->allocate_from(of->state.get(), size); }
        void deallocate(void* p, std::size_t size, std::size_t) { of->give_back(of->state.get(), p, size); }
    };
    [[nodiscard]] source make() const { return {this}; }
};

/// The installed peers. std::pmr is always available. jemalloc, mimalloc and tcmalloc are loaded
/// beside the C library's malloc, which doesn't change. Thrust is available if the build found the
/// CUDA toolkit's headers.
std::vector<peer> peers();
/// Thrust's pool for memory that the host can't read, over the process's memory. The name is empty
/// without the headers.
peer thrust_pool();

/// Starts this program again with the environment variables that configure the peers, unless they
/// are set. Also makes the C library reserve the room without which jemalloc can't be loaded late.
void prepare_for_peers(char** argv);
/// Records the available peers and their settings.
void peer_settings(report& r);

}  // namespace bench
