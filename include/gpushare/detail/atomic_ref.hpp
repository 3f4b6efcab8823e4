// SPDX-License-Identifier: Apache-2.0
// Atomic access to an integer in memory that kernels share. The type has one layout; it uses
// std::atomic_ref in host passes and the compiler's atomic built-ins in device passes. Ranks and
// blocks communicate through such integers.
//
//   gpushare::detail::atomic_ref{*flag}.store_release(epoch);  // earlier writes are visible ...
//   // ... once this reads `epoch`
//   while (gpushare::detail::atomic_ref{*flag}.load_acquire() != epoch) ctx.backoff(tries++);
//
// The memory order is part of a function's name, since device compilers accept only a literal
// order, and each call shows the chosen one. libcu++ has the same in <cuda/atomic>, but that header
// more than doubles the time to compile a small .cu file.
#pragma once

#include <atomic>
#include <concepts>
#include <cstdint>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The scope of an atomic operation on a device. On the host it is always the system.
enum class atomic_scope : std::uint8_t {
    system,  ///< every device and the host: ranks on several devices
    device,  ///< blocks of one device; cheaper
};

/// Refers to an integer of 4 or 8 bytes at its natural alignment, which must outlive it. While an
/// atomic_ref to the integer exists, access it through atomic_refs only.
template <std::integral T, atomic_scope Scope = atomic_scope::system>
requires(sizeof(T) == 4 || sizeof(T) == 8) class atomic_ref {
public:
    /// Refers to `object`.
    GPUSHARE_HD explicit atomic_ref(T& object) noexcept : object_(&object) {}

    /// Reads the value; orders nothing.
    [[nodiscard]] GPUSHARE_HD T load_relaxed() const noexcept {
#ifdef __CUDA_ARCH__
        if constexpr (on_system)
            return __nv_atomic_load_n(object_, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
        else
            return __nv_atomic_load_n(object_, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE);
#else
        return std::atomic_ref{*object_}.load(std::memory_order_relaxed);
#endif
    }
    /// Reads the value. If a release wrote it, all writes before the release are visible after
    /// this.
    [[nodiscard]] GPUSHARE_HD T load_acquire() const noexcept {
#ifdef __CUDA_ARCH__
        if constexpr (on_system)
            return __nv_atomic_load_n(object_, __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_SYSTEM);
        else
            return __nv_atomic_load_n(object_, __NV_ATOMIC_ACQUIRE, __NV_THREAD_SCOPE_DEVICE);
#else
        return std::atomic_ref{*object_}.load(std::memory_order_acquire);
#endif
    }

    /// Sets the value; orders nothing.
    GPUSHARE_HD void store_relaxed(T value) const noexcept {
#ifdef __CUDA_ARCH__
        if constexpr (on_system)
            __nv_atomic_store_n(object_, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
        else
            __nv_atomic_store_n(object_, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE);
#else
        std::atomic_ref{*object_}.store(value, std::memory_order_relaxed);
#endif
    }
    /// Sets the value. Earlier writes are visible after an acquire that reads it.
    GPUSHARE_HD void store_release(T value) const noexcept {
#ifdef __CUDA_ARCH__
        if constexpr (on_system)
            __nv_atomic_store_n(object_, value, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_SYSTEM);
        else
            __nv_atomic_store_n(object_, value, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_DEVICE);
#else
        std::atomic_ref{*object_}.store(value, std::memory_order_release);
#endif
    }

    /// If two threads each store a word by store_crossing and then read the other thread's word by
    /// load_crossing, at least one of them sees the other's store. The two functions order nothing
    /// else. On the host both are sequentially consistent. On devices the load's fence alone
    /// suffices, since the fence is between the store and the load. (PTX ISA, 8.9.3: of two
    /// fence.sc one comes first, and orders the accesses on both sides.) This relies on nvcc's code
    /// for a sequentially consistent load, which is fence.sc followed by ld.acquire; the languages
    /// themselves don't order a relaxed store before such a load. With a compiler that puts the
    /// fence elsewhere, the store would need its own fence.
    GPUSHARE_HD void store_crossing(T value) const noexcept {
#ifdef __CUDA_ARCH__
        store_relaxed(value);
#else
        std::atomic_ref{*object_}.store(value, std::memory_order_seq_cst);
#endif
    }
    /// See store_crossing; an acquire.
    [[nodiscard]] GPUSHARE_HD T load_crossing() const noexcept {
#ifdef __CUDA_ARCH__
        if constexpr (on_system)
            return __nv_atomic_load_n(object_, __NV_ATOMIC_SEQ_CST, __NV_THREAD_SCOPE_SYSTEM);
        else
            return __nv_atomic_load_n(object_, __NV_ATOMIC_SEQ_CST, __NV_THREAD_SCOPE_DEVICE);
#else
        return std::atomic_ref{*object_}.load(std::memory_order_seq_cst);
#endif
    }
    /// As store_crossing, and returns the value before. Each thread that exchanges sees the writes
    /// of the thread that exchanged before it.
    GPUSHARE_HD T exchange_crossing(T value) const noexcept {
#ifdef __CUDA_ARCH__
        if constexpr (on_system)
            return __nv_atomic_exchange_n(object_, value, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_SYSTEM);
        else
            return __nv_atomic_exchange_n(object_, value, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);
#else
        return std::atomic_ref{*object_}.exchange(value, std::memory_order_seq_cst);
#endif
    }

    /// Adds, wrapping around, and returns the value before. For counters that order nothing.
    GPUSHARE_HD T fetch_add_relaxed(T value) const noexcept {
#ifdef __CUDA_ARCH__
        if constexpr (on_system)
            return __nv_atomic_fetch_add(object_, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
        else
            return __nv_atomic_fetch_add(object_, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_DEVICE);
#else
        return std::atomic_ref{*object_}.fetch_add(value, std::memory_order_relaxed);
#endif
    }
    /// As fetch_add_relaxed, for arriving at a barrier: the last thread to arrive sees what all
    /// others wrote before they arrived.
    GPUSHARE_HD T fetch_add_acq_rel(T value) const noexcept {
#ifdef __CUDA_ARCH__
        if constexpr (on_system)
            return __nv_atomic_fetch_add(object_, value, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_SYSTEM);
        else
            return __nv_atomic_fetch_add(object_, value, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);
#else
        return std::atomic_ref{*object_}.fetch_add(value, std::memory_order_acq_rel);
#endif
    }

private:
    static constexpr bool on_system = Scope == atomic_scope::system;

    T* object_;
};

/// An atomic_ref among the blocks of one device.
template <std::integral T>
using device_atomic_ref = atomic_ref<T, atomic_scope::device>;

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
