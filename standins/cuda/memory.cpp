// SPDX-License-Identifier: Apache-2.0
// The calls for memory: device memory, stream-ordered pools and pinned host memory.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <new>
#include <set>
#include <span>

#include "cupti.hpp"
#include "driver.hpp"
#include "machine.hpp"

namespace standin {

using namespace detail;

namespace {

constexpr std::size_t alignment = 512;  // of all allocations

std::uint64_t round_up(std::uint64_t n, std::uint64_t step) { return (n + step - 1) / step * step; }

/// The block that begins at `p`; null if there is none.
block* begins(machine& m, const void* p) {
    const auto at = m.blocks.find(reinterpret_cast<std::uintptr_t>(p));
    return at == m.blocks.end() || at->second.freed_on != 0 ? nullptr : &at->second;
}

/// The context to which a new allocation belongs; null if it belongs to the device. (Driver API,
/// cuCtxDestroy: allocations of a context are freed with the context.)
const context* users_context(machine& m) { return m.current()->users ? m.current().get() : nullptr; }

/// The block that contains `p`, and its beginning.
const std::pair<const std::uintptr_t, block>* around(const machine& m, const void* p) {
    const auto address = reinterpret_cast<std::uintptr_t>(p);
    auto at = m.blocks.upper_bound(address);
    if (at == m.blocks.begin()) return nullptr;
    --at;
    return address - at->first < std::max<std::size_t>(at->second.size, 1) ? &*at : nullptr;
}

void grow(pool& p, std::uint64_t used, std::uint64_t step) {
    p.used = used;
    p.used_high = std::max(p.used_high, p.used);
    p.reserved = std::max(p.reserved, round_up(p.used, step));
    p.reserved_high = std::max(p.reserved_high, p.reserved);
}

/// Makes room for `charge` more bytes. Blocks that were freed earlier in the same stream can be
/// reused without a wait.
bool make_room(machine& m, pool& p, std::uint64_t charge, stream& on) {
    const std::uint64_t step = m.chosen.pool_step.count();
    const auto fits = [&] {
        const std::uint64_t whole = std::max(p.reserved, round_up(p.used + charge, step));
        return (p.limit == 0 || whole <= round_up(p.limit, step)) && whole - p.reserved <= m.free_memory(p.device);
    };
    for (auto& [at, b] : m.blocks) {
        if (fits()) break;
        if (b.from.get() != &p || b.freed_on != on.id || b.settled) continue;
        b.settled = true;
        p.used -= b.charge;
    }
    // Blocks that were freed in another stream can be reused, too, but this stream then waits for
    // the other one. So streams that share a pool may wait for each other's work.
    const auto couples = p.switches.find(cudaMemPoolReuseAllowInternalDependencies);
    if (couples == p.switches.end() || couples->second != 0)
        for (auto& [at, b] : m.blocks) {
            if (fits()) break;
            if (b.from.get() != &p || b.freed_on == 0 || b.settled) continue;
            b.settled = true;
            p.used -= b.charge;
            m.enqueue(on, {.awaited = b.freed});
        }
    if (!fits()) return false;
    const std::uint64_t before = p.reserved;
    grow(p, p.used + charge, step);
    m.device(p.device).used += p.reserved - before;
    return true;
}

cudaError_t allocate_from(machine& m, void** out, std::size_t size, const std::shared_ptr<pool>& from, stream& on) {
    *out = nullptr;
    if (size == 0) return cudaSuccess;
    if (size > m.chosen.memory.count()) return cudaErrorMemoryAllocation;
    if (on.recording != nullptr) {
        // Programming Guide, "Graph Memory Nodes": the allocation belongs to the graph. It has its
        // address from now on, but memory only while the graph runs. No work outside of the graph
        // may use this memory.
        *out = m.take({.size = size, .device = from->device, .of_graph = true});
        if (*out == nullptr) return cudaErrorMemoryAllocation;
        const auto with_graph = [](void* p) {
            auto& now = the_machine();
            const auto at = reinterpret_cast<std::uintptr_t>(p);
            if (now.blocks.contains(at) && now.blocks.at(at).of_graph) now.give_back(at);
        };
        on.recording->owns.push_back(std::make_shared<user_object>(with_graph, *out));
        m.enqueue(on, {});
        return cudaSuccess;
    }
    const std::uint64_t charge = round_up(size, alignment);
    if (!make_room(m, *from, charge, on)) return cudaErrorMemoryAllocation;
    *out = m.take({.size = size, .charge = charge, .device = from->device, .from = from});
    return *out == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

// Driver API, cuPointerGetAttribute: CUDA_ERROR_INVALID_VALUE for memory that CUDA doesn't know.
CUresult pointer_attribute(void* out, CUpointer_attribute what, CUdeviceptr at) {
    return driver(enter({"cuPointerGetAttribute"}, nullptr, [&](machine& m) {
        const auto* const p = reinterpret_cast<const void*>(at);
        if (m.is_pageable(p)) return cudaErrorInvalidValue;
        if (what == CU_POINTER_ATTRIBUTE_IS_MANAGED) return *static_cast<unsigned*>(out) = 0, cudaSuccess;
        if (what != CU_POINTER_ATTRIBUTE_MEMORY_TYPE) return cudaErrorInvalidValue;
        *static_cast<unsigned*>(out) = m.place_of(p).device < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return cudaSuccess;
    }));
}

}  // namespace

std::span<const entry_point> detail::memory_functions() {
    static const std::array all{
        point<decltype(cuPointerGetAttribute)>("cuPointerGetAttribute", 4000, pointer_attribute),
    };
    return all;
}

namespace detail {

machine::place machine::place_of(const void* p) const {
    if (const auto* const b = around(*this, p)) {
        const block& found = b->second;
        if (found.device < 0) return {};
        if (found.from == nullptr) return {.device = found.device, .peers_alone = true};
        place here{.device = found.device, .open_to = found.from->open_to, .pooled = true};
        here.open_to.insert(found.device);
        return here;
    }
    const auto address = reinterpret_cast<std::uintptr_t>(p);
    auto at = mapped.upper_bound(address);
    if (at == mapped.begin() || address - (--at)->first >= at->second.size) return {};
    return {.device = at->second.of->device, .open_to = at->second.open_to};
}

bool machine::is_pageable(const void* p) const { return around(*this, p) == nullptr && place_of(p).device < 0; }

bool machine::reaches(int from, const place& p) const {
    if (p.device < 0) return true;
    if (!p.peers_alone) return p.open_to.contains(from);
    return from == p.device || devices[static_cast<std::size_t>(from)].primary->peers.contains(p.device);
}

std::uint64_t machine::used_memory(int d) { return device(d).used + round_up(device(d).small, chosen.page.count()); }

std::uint64_t machine::free_memory(int d) {
    const std::uint64_t gone =
        chosen.taken.count() + used_memory(d) + (device(d).active ? chosen.context.count() : std::uint64_t{0});
    return chosen.memory.count() - std::min(chosen.memory.count(), gone);
}

machine::bill machine::price(std::size_t size) const {
    const std::uint64_t page = chosen.page.count();
    if (size <= page / 2) return {&device_state::small, round_up(size, chosen.small_step.count())};
    return {&device_state::used, round_up(size, page)};
}

void* machine::take(block b) {
    constexpr std::size_t worth_mapping = std::size_t{64} << 10;
    void* p = nullptr;
    if (b.size < worth_mapping) {
        // Exactly the requested size, so that AddressSanitizer finds overruns.
        p = ::operator new (std::max<std::size_t>(b.size, 1), std::align_val_t{alignment}, std::nothrow);
    } else {
        p = ::mmap(nullptr, b.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) p = nullptr;
        b.mapped = b.size;
    }
    if (p == nullptr) return nullptr;
    const auto at = reinterpret_cast<std::uintptr_t>(p);
    if (the_engine() != nullptr) the_engine()->added(at, b.size, b.device);
    blocks.emplace(at, std::move(b));
    return p;
}

void machine::give_back(std::uintptr_t at) {
    if (the_engine() != nullptr) the_engine()->removed(at);
    const auto node = blocks.extract(at);
    const block& b = node.mapped();
    if (b.from != nullptr) {
        if (!b.settled) b.from->used -= b.charge;
        if (b.from->closing) trim(*b.from, 0);
    } else if (b.device >= 0 && !b.of_graph) {
        device(b.device).*price(b.size).account -= b.charge;
    }
    auto* const p = reinterpret_cast<void*>(at);
    if (b.mapped != 0)
        ::munmap(p, b.mapped);
    else
        ::operator delete (p, std::align_val_t{alignment});
}

void machine::trim(pool& p, std::uint64_t keep) {
    const std::uint64_t kept = std::min(p.reserved, round_up(std::max(p.used, keep), chosen.pool_step.count()));
    device(p.device).used -= p.reserved - kept;
    p.reserved = kept;
}

void machine::trim_all() {
    for (const auto& [handle, p] : pools.all())
        if (p->reserved > p->threshold) trim(*p, p->threshold);
}

}  // namespace detail

extern "C" {

// ---- device memory

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    return on_device({.name = "cudaMemGetInfo", .looks = true}, [&](machine& m, int device) {
        *free = static_cast<std::size_t>(m.free_memory(device));
        *total = static_cast<std::size_t>(m.chosen.memory.count());
        return cudaSuccess;
    });
}

cudaError_t cudaMalloc(void** out, std::size_t size) {
    return on_device({.name = "cudaMalloc", .unsafe = true, .looks = true, .makes = true}, [&](machine& m, int device) {
        *out = nullptr;
        if (size == 0) return cudaSuccess;
        if (size > m.chosen.memory.count()) return cudaErrorMemoryAllocation;
        const auto [account, charge] = m.price(size);
        const std::uint64_t before = m.used_memory(device), free = m.free_memory(device);
        m.device(device).*account += charge;
        if (m.used_memory(device) - before <= free)
            *out = m.take({.size = size, .charge = charge, .device = device, .in = users_context(m)});
        if (*out != nullptr) return cudaSuccess;
        m.device(device).*account -= charge;
        return cudaErrorMemoryAllocation;
    });
}

cudaError_t cudaFree(void* p) {
    constexpr call_info info{.name = "cudaFree", .unsafe = true, .returns = true, .looks = true};
    const cuMemFree_v2_params told{reinterpret_cast<CUdeviceptr>(p)};
    const auto free = [&](machine& m, int) {
        if (p == nullptr) return cudaSuccess;
        const block* b = begins(m, p);
        if (b == nullptr || b->device < 0) return cudaErrorInvalidValue;
        // Waits for all work of the device, whatever memory the work uses.
        const int device = b->device;
        const auto done = [&] {
            return m.device(device).sticky != cudaSuccess ||
                   std::ranges::none_of(m.busy, [&](const auto& s) { return s->in->device == device; });
        };
        if (!m.wait(info.name, done)) return cudaErrorUnknown;
        if (begins(m, p) == nullptr) return cudaErrorInvalidValue;  // another thread has freed it meanwhile
        m.give_back(reinterpret_cast<std::uintptr_t>(p));
        return m.device(device).sticky;
    };
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemFree_v2, "cuMemFree_v2", told,
                       [&] { return on_device(info, free); });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
    return on_device({"cudaPointerGetAttributes"}, [&](machine& m, int) {
        *out = {};
        out->type = cudaMemoryTypeUnregistered;
        out->device = -1;
        out->hostPointer = const_cast<void*>(p);
        const auto where = m.place_of(p);
        if (around(m, p) == nullptr && where.device < 0) return cudaSuccess;
        const int device = where.device;
        out->type = device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
        out->device = std::max(device, 0);
        out->devicePointer = const_cast<void*>(p);
        out->hostPointer = device < 0 ? const_cast<void*>(p) : nullptr;
        return cudaSuccess;
    });
}

// ---- host memory

cudaError_t cudaHostAlloc(void** out, std::size_t size, unsigned flags) {
    constexpr call_info info{.name = "cudaHostAlloc", .unsafe = true, .looks = true, .makes = true};
    const cuMemHostAlloc_params told{out, size, flags};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemHostAlloc, "cuMemHostAlloc", told, [&] {
        return on_device(info, [&](machine& m, int) {
            *out = size == 0 ? nullptr : m.take({.size = size, .in = users_context(m)});
            return *out == nullptr && size != 0 ? cudaErrorMemoryAllocation : cudaSuccess;
        });
    });
}

cudaError_t cudaFreeHost(void* p) {
    constexpr call_info info{.name = "cudaFreeHost", .unsafe = true, .returns = true};
    const cuMemFreeHost_params told{p};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemFreeHost, "cuMemFreeHost", told, [&] {
        return on_device(info, [&](machine& m, int) {
            if (p == nullptr) return cudaSuccess;
            const block* b = begins(m, p);
            if (b == nullptr || b->device >= 0) return cudaErrorInvalidValue;
            m.give_back(reinterpret_cast<std::uintptr_t>(p));
            return cudaSuccess;
        });
    });
}

// ---- pools

cudaError_t cudaMemPoolCreate(cudaMemPool_t* out, const cudaMemPoolProps* props) {
    return on_device({"cudaMemPoolCreate"}, [&](machine& m, int) {
        if (props->allocType != cudaMemAllocationTypePinned || props->location.type != cudaMemLocationTypeDevice)
            return cudaErrorInvalidValue;
        if (!m.has_device(props->location.id)) return cudaErrorInvalidValue;
        *out = m.new_handle<cudaMemPool_t>();
        m.pools.add(*out, std::make_shared<pool>(pool{.device = props->location.id, .limit = props->maxSize}));
        return cudaSuccess;
    });
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t handle) {
    return on_device({.name = "cudaMemPoolDestroy", .returns = true}, [&](machine& m, int) {
        const auto p = m.look_up(m.pools, handle, "a pool call");
        if (p == nullptr || m.device(p->device).default_pool == handle) return cudaErrorInvalidValue;
        m.trim(*p, 0);
        p->closing = true;
        m.pools.remove(handle);  // its blocks keep it alive
        return cudaSuccess;
    });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, cudaMemPoolAttr what, void* value) {
    return on_device({"cudaMemPoolSetAttribute"}, [&](machine& m, int) {
        const auto p = m.look_up(m.pools, handle, "a pool call");
        if (p == nullptr) return cudaErrorInvalidValue;
        switch (what) {
            case cudaMemPoolAttrReleaseThreshold: p->threshold = *static_cast<std::uint64_t*>(value); break;
            case cudaMemPoolAttrReservedMemHigh: p->reserved_high = p->reserved; break;  // only zero can be written
            case cudaMemPoolAttrUsedMemHigh: p->used_high = p->used; break;
            case cudaMemPoolReuseFollowEventDependencies:
            case cudaMemPoolReuseAllowOpportunistic:
            case cudaMemPoolReuseAllowInternalDependencies: p->switches[what] = *static_cast<int*>(value); break;
            default: return cudaErrorInvalidValue;
        }
        return cudaSuccess;
    });
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, cudaMemPoolAttr what, void* value) {
    return on_device({"cudaMemPoolGetAttribute"}, [&](machine& m, int) {
        const auto p = m.look_up(m.pools, handle, "a pool call");
        if (p == nullptr) return cudaErrorInvalidValue;
        auto& number = *static_cast<std::uint64_t*>(value);
        switch (what) {
            case cudaMemPoolAttrReleaseThreshold: number = p->threshold; break;
            case cudaMemPoolAttrReservedMemCurrent: number = p->reserved; break;
            case cudaMemPoolAttrReservedMemHigh: number = p->reserved_high; break;
            case cudaMemPoolAttrUsedMemCurrent: number = p->used; break;
            case cudaMemPoolAttrUsedMemHigh: number = p->used_high; break;
            default: {
                const auto at = p->switches.find(what);
                *static_cast<int*>(value) = at == p->switches.end() ? 1 : at->second;
            }
        }
        return cudaSuccess;
    });
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t handle, const cudaMemAccessDesc* list, std::size_t count) {
    return on_device({"cudaMemPoolSetAccess"}, [&](machine& m, int) {
        const auto p = m.look_up(m.pools, handle, "a pool call");
        if (p == nullptr) return cudaErrorInvalidValue;
        // Runtime API, cudaMemPoolSetAccess: a device gets read-write access or none; the access of
        // the pool's own device can't be revoked (RMM 1753: cudaErrorInvalidDevice).
        std::set<int> seen;
        for (const auto& d : std::span(list, count)) {
            if (d.location.type != cudaMemLocationTypeDevice || !seen.insert(d.location.id).second)
                return cudaErrorInvalidValue;
            if (!m.has_device(d.location.id)) return cudaErrorInvalidDevice;
            if (d.location.id == p->device && d.flags != cudaMemAccessFlagsProtReadWrite) return cudaErrorInvalidDevice;
            if (d.location.id != p->device && !m.chosen.peers) return cudaErrorInvalidDevice;
        }
        for (const int d : seen) p->open_to.insert(d);
        return cudaSuccess;
    });
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t handle, std::size_t keep) {
    return on_device({"cudaMemPoolTrimTo"}, [&](machine& m, int) {
        const auto p = m.look_up(m.pools, handle, "a pool call");
        if (p == nullptr) return cudaErrorInvalidValue;
        m.trim(*p, keep);
        return cudaSuccess;
    });
}

cudaError_t cudaMallocFromPoolAsync(void** out, std::size_t size, cudaMemPool_t handle, cudaStream_t stream_handle) {
    return on_stream({"cudaMallocFromPoolAsync"}, stream_handle, [&](machine& m, stream& on) {
        const auto from = m.look_up(m.pools, handle, "a pool call");
        return from == nullptr ? cudaErrorInvalidValue : allocate_from(m, out, size, from, on);
    });
}

cudaError_t cudaMallocAsync(void** out, std::size_t size, cudaStream_t stream_handle) {
    return on_stream({"cudaMallocAsync"}, stream_handle, [&](machine& m, stream& on) {
        return allocate_from(m, out, size, m.pools.find(m.device(on.in->device).default_pool), on);
    });
}

cudaError_t cudaFreeAsync(void* p, cudaStream_t stream_handle) {
    return on_stream({.name = "cudaFreeAsync", .returns = true}, stream_handle, [&](machine& m, stream& on) {
        if (p == nullptr) return cudaSuccess;
        block* const b = begins(m, p);
        if (b == nullptr || b->device < 0) return cudaErrorInvalidValue;
        if (on.recording != nullptr) {
            // "During stream capture, this function results in the creation of a free node and must
            // therefore be passed the address of a graph allocation." (Runtime API, cudaFreeAsync.)
            if (!b->of_graph) {
                m.invalidate(*on.recording, "cudaFreeAsync of a block that isn't the graph's");
                return cudaErrorInvalidValue;
            }
            m.enqueue(on, {});
            return cudaSuccess;
        }
        // Runtime API, cudaFreeAsync: "the memory pointed to by devPtr must have been allocated by
        // stream-ordered allocation". CUDA doesn't guarantee that it takes other blocks.
        if (b->from == nullptr && !b->of_graph) return cudaErrorInvalidValue;
        b->freed_on = on.id;
        b->freed = std::make_shared<mark>(mark{.device = b->device});
        m.enqueue(on,
                  {.effect = [&m, at = reinterpret_cast<std::uintptr_t>(p)] { m.give_back(at); }, .reaches = b->freed});
        return cudaSuccess;
    });
}

}  // extern "C"

}  // namespace standin
