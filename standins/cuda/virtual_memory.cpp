// SPDX-License-Identifier: Apache-2.0
// Driver functions for virtual memory. Accesses to reserved addresses fault until physical memory
// is mapped there and made accessible.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <set>
#include <span>
#include <vector>

#include "driver.hpp"

namespace standin {

using namespace detail;

namespace {

bool on_page(const machine& m, std::uint64_t n) { return n % m.chosen.page.count() == 0; }
void* pointer(std::uintptr_t at) { return reinterpret_cast<void*>(at); }
/// Makes the addresses fault.
bool close_off(std::uintptr_t at, std::size_t size) {
    return ::mmap(pointer(at), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) !=
           MAP_FAILED;
}

void unless_used(machine& m, const std::shared_ptr<physical>& p, std::uintptr_t handle) {
    if (!p->released || p->mappings != 0) return;
    m.device(p->device).used -= p->size;
    ::close(p->file);
    m.physicals.remove(handle);
}

CUresult granularity(std::size_t* out, const CUmemAllocationProp* wanted, CUmemAllocationGranularity_flags) {
    return driver(enter({"cuMemGetAllocationGranularity"}, nullptr, [&](machine& m) {
        if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !m.has_device(wanted->location.id))
            return cudaErrorInvalidDevice;
        *out = static_cast<std::size_t>(m.chosen.page.count());
        return cudaSuccess;
    }));
}

CUresult reserve_addresses(CUdeviceptr* out, std::size_t size, std::size_t alignment, CUdeviceptr, unsigned long long) {
    return driver(beside_context({"cuMemAddressReserve"}, [&](machine& m) {
        if (size == 0 || !on_page(m, size) || (alignment & (alignment - 1)) != 0) return invalid_value;
        const std::size_t unit = std::max(alignment, static_cast<std::size_t>(m.chosen.page.count()));
        if (size > (std::size_t{1} << 46)) return cudaErrorMemoryAllocation;
        void* const p = ::mmap(nullptr, size + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return cudaErrorMemoryAllocation;
        const auto begin = reinterpret_cast<std::uintptr_t>(p);
        const std::uintptr_t aligned = (begin + unit - 1) / unit * unit;
        if (aligned != begin) ::munmap(p, aligned - begin);
        if (const std::size_t rest = begin + unit - aligned; rest != 0) ::munmap(pointer(aligned + size), rest);
        m.reserved.emplace(aligned, size);
        *out = aligned;
        return cudaSuccess;
    }));
}

CUresult free_addresses(CUdeviceptr at, std::size_t size) {
    return driver(beside_context({.name = "cuMemAddressFree", .returns = true}, [&](machine& m) {
        const auto found = m.reserved.find(at);
        if (found == m.reserved.end() || found->second != size) return invalid_value;
        const auto inside = m.mapped.lower_bound(at);
        if (inside != m.mapped.end() && inside->first < at + size) return invalid_value;  // still mapped
        ::munmap(pointer(at), size);
        m.reserved.erase(found);
        return cudaSuccess;
    }));
}

CUresult create_physical(CUmemGenericAllocationHandle* out, std::size_t size, const CUmemAllocationProp* wanted,
                         unsigned long long) {
    return driver(beside_context({"cuMemCreate"}, [&](machine& m) {
        if (size == 0 || !on_page(m, size) || wanted->type != CU_MEM_ALLOCATION_TYPE_PINNED) return invalid_value;
        const int device = wanted->location.id;
        if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !m.has_device(device))
            return cudaErrorInvalidDevice;
        const bool rdma = wanted->allocFlags.gpuDirectRDMACapable != 0;
        if (rdma && !m.chosen.rdma) return cudaErrorNotSupported;  // see CUmemAllocationProp
        if (size > m.free_memory(device)) return cudaErrorMemoryAllocation;
        const int file = ::memfd_create("standin", MFD_CLOEXEC);
        if (file < 0 || ::ftruncate(file, static_cast<off_t>(size)) != 0) return cudaErrorMemoryAllocation;
        m.device(device).used += size;
        *out = m.new_handle<std::uintptr_t>();
        m.physicals.add(
            *out, std::make_shared<physical>(physical{.device = device, .file = file, .size = size, .rdma = rdma}));
        return cudaSuccess;
    }));
}

CUresult release_physical(CUmemGenericAllocationHandle handle) {
    return driver(beside_context({.name = "cuMemRelease", .returns = true}, [&](machine& m) {
        const auto p = m.physicals.find(handle);
        if (p == nullptr || p->released) return invalid_value;
        p->released = true;
        unless_used(m, p, handle);
        return cudaSuccess;
    }));
}

CUresult map(CUdeviceptr at, std::size_t size, std::size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {
    return driver(beside_context({"cuMemMap"}, [&](machine& m) {
        const auto p = m.physicals.find(handle);
        if (p == nullptr || p->released || offset != 0 || size != p->size) return invalid_value;
        auto home = m.reserved.upper_bound(at);
        if (home == m.reserved.begin()) return invalid_value;
        --home;
        if (!on_page(m, at) || at + size > home->first + home->second) return invalid_value;
        for (const auto& [begin, other] : m.mapped)
            if (range{begin, other.size}.meets({at, size})) return invalid_value;
        ++p->mappings;
        m.mapped.emplace(at, mapping{size, p, handle});
        return cudaSuccess;
    }));
}

/// Calls f(address, mapping&) for the mappings of which [at, at + size) consists; invalid_value if
/// it doesn't consist of whole mappings.
template <class F>
cudaError_t for_mappings(machine& m, CUdeviceptr at, std::size_t size, F f) {
    std::vector<std::uintptr_t> parts;
    std::uintptr_t end = at;
    for (auto i = m.mapped.find(at); i != m.mapped.end() && i->first == end && end < at + size; ++i) {
        parts.push_back(i->first);
        end += i->second.size;
    }
    if (parts.empty() || end != at + size) return invalid_value;
    for (const auto part : parts) f(part, m.mapped.at(part));
    return cudaSuccess;
}

CUresult set_access(CUdeviceptr at, std::size_t size, const CUmemAccessDesc* list, std::size_t count) {
    return driver(beside_context({"cuMemSetAccess"}, [&](machine& m) {
        // Driver API, CUmemAccessDesc and cuMemSetAccess: locations and flags of the list,
        // CUDA_ERROR_INVALID_VALUE and INVALID_DEVICE. CUDA doesn't promise to accept a device that
        // is named twice.
        if (count == 0) return invalid_value;
        std::set<int> seen;
        for (const auto& d : std::span(list, count)) {
            if (d.location.type != CU_MEM_LOCATION_TYPE_DEVICE || !seen.insert(d.location.id).second)
                return invalid_value;
            if (d.flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return invalid_value;
            if (!m.has_device(d.location.id)) return cudaErrorInvalidDevice;
        }
        cudaError_t unreached = cudaSuccess;
        const auto open = [&](std::uintptr_t, const mapping& what) {
            for (const int d : seen)
                if (d != what.of->device && !m.chosen.peers) unreached = cudaErrorInvalidDevice;
        };
        if (const auto code = for_mappings(m, at, size, open); code != cudaSuccess) return code;
        if (unreached != cudaSuccess) return unreached;
        return for_mappings(m, at, size, [&](std::uintptr_t part, mapping& what) {
            what.open_to.insert(seen.begin(), seen.end());
            ::mmap(pointer(part), what.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, what.of->file, 0);
            if (the_engine() != nullptr) the_engine()->added(part, what.size, what.of->device);
        });
    }));
}

CUresult unmap(CUdeviceptr at, std::size_t size) {
    return driver(beside_context({.name = "cuMemUnmap", .returns = true}, [&](machine& m) {
        // Unmapping isn't stream-ordered: the caller must have waited for all users. (Driver API,
        // cuMemUnmap: "the virtual address range should not be in use".) The stand-in knows the
        // memory that copies use, and that kernels use by their arguments. A lost device uses no
        // memory any more.
        const range all{at, size};
        const auto uses = [&](const operation& op) {
            return op.writes.meets(all) || op.reads.meets(all) ||
                   std::ranges::any_of(op.touches, [&](std::uintptr_t p) {
                       return all.meets({p, 1});
                   });
        };
        for (const auto& s : m.busy)
            if (m.device(s->in->device).sticky == cudaSuccess && std::ranges::any_of(s->queue, uses))
                m.find("cuMemUnmap of addresses that queued work uses");
        return for_mappings(m, at, size, [&](std::uintptr_t part, const mapping& what) {
            const mapping gone = what;
            close_off(part, gone.size);
            if (the_engine() != nullptr) the_engine()->removed(part);
            m.mapped.erase(part);
            --gone.of->mappings;
            unless_used(m, gone.of, gone.handle);
        });
    }));
}

}  // namespace

std::span<const entry_point> detail::virtual_memory_functions() {
    static const std::array all{
        point<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity", 10020, granularity),
        point<decltype(cuMemAddressReserve)>("cuMemAddressReserve", 10020, reserve_addresses),
        point<decltype(cuMemAddressFree)>("cuMemAddressFree", 10020, free_addresses),
        point<decltype(cuMemCreate)>("cuMemCreate", 10020, create_physical),
        point<decltype(cuMemRelease)>("cuMemRelease", 10020, release_physical),
        point<decltype(cuMemMap)>("cuMemMap", 10020, map),
        point<decltype(cuMemUnmap)>("cuMemUnmap", 10020, unmap),
        point<decltype(cuMemSetAccess)>("cuMemSetAccess", 10020, set_access),
    };
    return all;
}

}  // namespace standin
