// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <memory_resource>
#include <utility>
#include <vector>

#include "sources.hpp"

namespace bench {

namespace {

void* load(const char* library) { return ::dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND); }

template <class F>
F find(void* library, const char* name) {
    return library == nullptr ? nullptr : reinterpret_cast<F>(::dlsym(library, name));
}

struct jemalloc {
    static constexpr int flags = 8;  // log2 of the alignment
    void* library = load("libjemalloc.so.2");
    void* (*mallocx)(std::size_t, int) = find<void* (*)(std::size_t, int)>(library, "mallocx");
    void (*sdallocx)(void*, std::size_t, int) = find<void (*)(void*, std::size_t, int)>(library, "sdallocx");
};
struct mimalloc {
    void* library = load("libmimalloc.so.2");
    void* (*malloc)(std::size_t, std::size_t) = find<void* (*)(std::size_t, std::size_t)>(library, "mi_malloc_aligned");
    void (*free)(void*, std::size_t,
                 std::size_t) = find<void (*)(void*, std::size_t, std::size_t)>(library, "mi_free_size_aligned");
};

template <class Resource>
peer pmr_peer(const char* name) {
    return {name, std::make_shared<Resource>(),
            [](void* r, std::size_t size) { return static_cast<Resource*>(r)->allocate(size, alignment); },
            [](void* r, void* p, std::size_t size) { static_cast<Resource*>(r)->deallocate(p, size, alignment); }};
}

}  // namespace

std::vector<peer> peers() {
    std::vector<peer> found;
    if (auto je = std::make_shared<jemalloc>(); je->mallocx != nullptr && je->sdallocx != nullptr)
        found.push_back(
            {"jemalloc", je,
             [](void* j, std::size_t size) { return static_cast<jemalloc*>(j)->mallocx(size, jemalloc::flags); },
             [](void* j, void* p, std::size_t size) {
                 static_cast<jemalloc*>(j)->sdallocx(p, size, jemalloc::flags);
             }});
    if (auto mi = std::make_shared<mimalloc>(); mi->malloc != nullptr && mi->free != nullptr)
        found.push_back(
            {"mimalloc", mi,
             [](void* m, std::size_t size) { return static_cast<mimalloc*>(m)->malloc(size, alignment); },
             [](void* m, void* p, std::size_t size) { static_cast<mimalloc*>(m)->free(p, size, alignment); }});
    found.push_back(pmr_peer<std::pmr::synchronized_pool_resource>("pmr_pool"));
    if (peer thrust = thrust_pool(); !thrust.name.empty()) found.push_back(std::move(thrust));
    return found;
}

void make_room_for_jemalloc(char** argv) {
    if (std::getenv("GLIBC_TUNABLES") != nullptr) return;
    ::setenv("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=16384", 0);
    ::execv("/proc/self/exe", argv);  // if it can't be, jemalloc is left out
}

}  // namespace bench
