// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <memory_resource>
#include <string>
#include <utility>
#include <vector>

#include "harness.hpp"
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
    [[nodiscard]] std::string version() const {
        const char* is = nullptr;
        std::size_t size = sizeof is;
        const auto control = find<int (*)(const char*, void*, std::size_t*, void*, std::size_t)>(library, "mallctl");
        return control != nullptr && control("version", &is, &size, nullptr, 0) == 0 ? is : "unknown";
    }
};
struct mimalloc {
    void* library = load("libmimalloc.so.2");
    void* (*malloc)(std::size_t, std::size_t) = find<void* (*)(std::size_t, std::size_t)>(library, "mi_malloc_aligned");
    void (*free)(void*, std::size_t,
                 std::size_t) = find<void (*)(void*, std::size_t, std::size_t)>(library, "mi_free_size_aligned");
    [[nodiscard]] std::string version() const {
        const auto number = find<int (*)()>(library, "mi_version");
        return number != nullptr ? std::to_string(number()) : "unknown";
    }
};

struct tcmalloc {
    void* library = load("libtcmalloc_minimal.so.4");
    // Not tc_memalign, whose blocks can't be freed with their size.
    void* (*malloc)(std::size_t, std::size_t) = find<void* (*)(std::size_t, std::size_t)>(library, "tc_new_aligned");
    void (*free)(void*, std::size_t,
                 std::size_t) = find<void (*)(void*, std::size_t, std::size_t)>(library, "tc_delete_sized_aligned");
    [[nodiscard]] std::string version() const {
        int major = 0, minor = 0;
        const char* patch = nullptr;
        const auto text = find<const char* (*)(int*, int*, const char**)>(library, "tc_version");
        return text != nullptr ? text(&major, &minor, &patch) : "unknown";
    }
};

template <class Resource>
peer pmr_peer(const char* name) {
    return {name, "libstdc++ " + std::to_string(_GLIBCXX_RELEASE), std::make_shared<Resource>(),
            [](void* r, std::size_t size) { return static_cast<Resource*>(r)->allocate(size, alignment); },
            [](void* r, void* p, std::size_t size) { static_cast<Resource*>(r)->deallocate(p, size, alignment); }};
}

}  // namespace

std::vector<peer> peers() {
    std::vector<peer> found;
    if (auto je = std::make_shared<jemalloc>(); je->mallocx != nullptr && je->sdallocx != nullptr)
        found.push_back(
            {"jemalloc", je->version(), je,
             [](void* j, std::size_t size) { return static_cast<jemalloc*>(j)->mallocx(size, jemalloc::flags); },
             [](void* j, void* p, std::size_t size) {
                 static_cast<jemalloc*>(j)->sdallocx(p, size, jemalloc::flags);
             }});
    if (auto mi = std::make_shared<mimalloc>(); mi->malloc != nullptr && mi->free != nullptr)
        found.push_back(
            {"mimalloc", mi->version(), mi,
             [](void* m, std::size_t size) { return static_cast<mimalloc*>(m)->malloc(size, alignment); },
             [](void* m, void* p, std::size_t size) { static_cast<mimalloc*>(m)->free(p, size, alignment); }});
    if (auto tc = std::make_shared<tcmalloc>(); tc->malloc != nullptr && tc->free != nullptr)
        found.push_back(
            {"tcmalloc", tc->version(), tc,
             [](void* t, std::size_t size) { return static_cast<tcmalloc*>(t)->malloc(size, alignment); },
             [](void* t, void* p, std::size_t size) { static_cast<tcmalloc*>(t)->free(p, size, alignment); }});
    found.push_back(pmr_peer<std::pmr::synchronized_pool_resource>("pmr_pool"));
    if (peer thrust = thrust_pool(); !thrust.name.empty()) found.push_back(std::move(thrust));
    return found;
}

namespace {

// Settings that the peers' own documents recommend for programs like this benchmark: freed memory
// is soon used again, so the allocator should keep the memory. Sources: jemalloc's TUNING.md on
// speed; mimalloc's README; gperftools' tcmalloc.html, which allows thread caches above the default
// of 32 MiB.
constexpr std::pair<const char*, const char*> settings[] = {
    {"MALLOC_CONF", "background_thread:true,metadata_thp:auto,dirty_decay_ms:30000,muzzy_decay_ms:30000"},
    {"MIMALLOC_PURGE_DELAY", "1000"},
    {"MIMALLOC_ALLOW_LARGE_OS_PAGES", "1"},
    {"TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES", "268435456"},
    {"TCMALLOC_RELEASE_RATE", "0"}};

}  // namespace

void prepare_for_peers(char** argv) {
    if (std::getenv("GLIBC_TUNABLES") != nullptr) return;
    for (const auto& [name, value] : settings) ::setenv(name, value, 0);
    ::setenv("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=16384", 0);
    ::execv("/proc/self/exe", argv);  // without the restart, jemalloc is left out
}

void peer_settings(report& r) {
    std::string names;
    for (const auto& p : peers()) names += (names.empty() ? "" : ", ") + p.name + " " + p.version;
    r.setting("peers", names);
    for (const auto& [name, value] : settings)
        if (const char* is = std::getenv(name); is != nullptr) r.setting(name, is);
}

}  // namespace bench
