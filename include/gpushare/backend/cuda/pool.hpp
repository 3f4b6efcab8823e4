// SPDX-License-Identifier: Apache-2.0
// Stream-ordered memory: CUDA's own pools, which allocate and free in the order of a stream,
// without waiting for it.
//
//   gpushare::cuda::memory_pool pool{node, gpushare::device_id{0}, {.max_size = 4_GiB}};
//   void* p = pool.allocate(stream, 1_MiB);     ...     // work on that stream that uses it
//   pool.deallocate(stream, p);
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include <gpushare/backend/cuda/detail/block_registry.hpp>
#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/detail/owned.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/pointer_table.hpp>
#include <gpushare/detail/wait_slices.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// Options of a pool.
struct memory_pool_options {
    bytes max_size{};  ///< CUDA's maxSize; 0: no maximum. CUDA may round it up
    /// Reserved memory that the pool doesn't return to the device at a sync.
    bytes keep = bytes::max();
    /// Whether the pool is open to the node's other devices, if they reach this one; see
    /// node_options::peer_access.
    bool peers = true;
};

/// A pool's bytes. `reserved` is taken from the device, in large pieces. `used` is the part of it
/// in allocated blocks. A maximum limits `reserved`, rounded up: a pool for 1 KiB was seen to
/// reserve 32 MiB. So a quota over the pool counts `used`. device_memory counts `used` as allocated
/// here, and the rest of `reserved` as taken by others until trim() returns it.
struct memory_pool_usage {
    bytes reserved{};       ///< taken from the device
    bytes used{};           ///< the bytes in allocated blocks
    bytes reserved_peak{};  ///< the peak of `reserved`
    bytes used_peak{};      ///< the peak of `used`
};

namespace detail {
struct memory_pool_kind {
    using native_type = cudaMemPool_t;
    static constexpr const char* destroys = "cudaMemPoolDestroy";
    static cudaError_t destroy(const driver&, cudaMemPool_t p) noexcept { return cudaMemPoolDestroy(p); }
};

/// CUDA's addresses of blocks with a larger alignment, which are few, if any. Safe from any thread.
class aligned_blocks {
public:
    /// False if the host has no memory for the entry.
    [[nodiscard]] bool add(void* at, void* base) noexcept try {
        const std::lock_guard lock(mutex_);
        bases_.insert(at, base);
        // relaxed: the thread that frees a block got it from the thread that allocated it.
        count_.fetch_add(1, std::memory_order_relaxed);
        return true;
    } catch (...) {
        return false;
    }
    /// CUDA's address of the block at `p`. Takes the entry out if there is one, which is so if the
    /// address isn't `p`: forget() or put_back() must follow.
    [[nodiscard]] void* take_out(void* p) noexcept {
        if (count_.load(std::memory_order_relaxed) == 0) return p;
        const std::lock_guard lock(mutex_);
        void* const* const found = bases_.find(p);
        if (found == nullptr) return p;
        void* const base = *found;
        bases_.take_out(p);
        return base;
    }
    /// After take_out(): the block is back.
    void forget() noexcept {
        const std::lock_guard lock(mutex_);
        bases_.forget();
        count_.fetch_sub(1, std::memory_order_relaxed);
    }
    /// After take_out(): the block is still allocated.
    void put_back(void* at, void* base) noexcept {
        const std::lock_guard lock(mutex_);
        bases_.put_back(at, base);
    }

private:
    std::mutex mutex_;
    gpushare::detail::pointer_table<void*> bases_;
    std::atomic<std::size_t> count_{0};
};
}  // namespace detail

/// A pool of device memory. Movable; one owner. Safe from any thread. Blocks of a pool that the
/// library made count as allocated by the library. Free all blocks, and wait until their streams
/// have reached the frees, before you destroy the pool.
class memory_pool {
public:
    /// The alignment of every block. A larger alignment can be requested, and is charged.
    static constexpr std::size_t natural_alignment = 256;
    /// A block takes a multiple of this size. `./dev gpu` checks the size on a device.
    static constexpr bytes step{512};

    /// Throws operation_error: errc::no_device, not_supported. Streams that share the pool never
    /// wait for each other because of it. A freed block is reused only in the same stream, behind
    /// points for which a stream waits anyway, or once its work is done.
    memory_pool(node& on, device_id d, const memory_pool_options& options = {}) : native_(on.state(d), nullptr) {
        if (!device().properties().memory_pools)
            throw operation_error(errc::not_supported, {}, "the device has no stream-ordered memory pools");
        cudaMemPoolProps wanted{};
        wanted.allocType = cudaMemAllocationTypePinned;
        wanted.location.type = cudaMemLocationTypeDevice;
        wanted.location.id = device().ordinal();
        wanted.maxSize = static_cast<std::size_t>(options.max_size.count());
        const detail::context_guard any(device().context());
        cudaMemPool_t made = nullptr;
        check(cudaMemPoolCreate(&made, &wanted), "making a memory pool");
        native_ = {native_.device(), made};
        cuuint64_t keep = options.keep.count();
        check(cudaMemPoolSetAttribute(made, cudaMemPoolAttrReleaseThreshold, &keep), "setting up a memory pool");
        // Otherwise an allocation of one tenant might wait on the device for another tenant's work,
        // which frees a block. (Runtime API, cudaMemPoolReuseAllowInternalDependencies: on by
        // default.)
        int couple = 0;
        check(cudaMemPoolSetAttribute(made, cudaMemPoolReuseAllowInternalDependencies, &couple),
              "setting up a memory pool");
        if (options.peers)
            for (const device_id other : on.peers_of(d)) {
                const auto code = give_access(on, other);
                if (is_sticky(code) && device().health().answers())
                    (void)detail::handled(code);  // the other device is lost
                else
                    check(code, "opening a memory pool to another device");
            }
        native_.device()->enter_pool(made);
    }
    /// `other` is empty afterwards.
    memory_pool(memory_pool&& other) noexcept = default;
    /// The old value's resources are released.
    memory_pool& operator=(memory_pool other) noexcept {
        std::swap(native_, other.native_);
        std::swap(aligned_, other.aligned_);
        return *this;
    }
    ~memory_pool() { leave(); }

    /// Takes over a pool of the embedder on this device.
    [[nodiscard]] static memory_pool from_native_handle(node& on, device_id d, cudaMemPool_t handle) {
        return {on.state(d), handle};
    }
    static memory_pool from_native_handle(node&, device_id, std::nullptr_t) = delete;
    static memory_pool from_native_handle(node&, device_id, int) = delete;
    /// The native handle, which this object still owns.
    [[nodiscard]] cudaMemPool_t native_handle() const noexcept { return native_.get(); }
    /// Releases the handle: from now on the caller destroys it.
    [[nodiscard]] cudaMemPool_t release() noexcept {
        leave();
        return native_.release();
    }

    /// Allocates `size` bytes. Work enqueued on `s` from now on may use them, and so may work of
    /// other streams behind a later point of `s`. A unique address for 0 bytes. Throws
    /// memory_error: errc::out_of_memory (the device's, or over max_size), size_overflow,
    /// bad_alignment; operation_error: errc::capturing.
    [[nodiscard]] void* allocate(stream& s, byte_count size, std::size_t alignment = natural_alignment) {
        failure why;
        void* const p = obtain(s, size, alignment, why);
        if (p == nullptr) raise(why, {}, "allocating from a memory pool");
        return p;
    }
    /// Returns null if `allocate` would throw; `why`, unless null, receives the reason.
    [[nodiscard]] void* try_allocate(stream& s, byte_count size, std::size_t alignment = natural_alignment,
                                     failure* why = nullptr) noexcept {
        failure unused;
        return obtain(s, size, alignment, why != nullptr ? *why : unused);
    }
    /// As allocate, but waits for memory. `until` is a patience (concepts.hpp): a deadline or a
    /// stop request. If the device or max_size lacks memory, tries again every two milliseconds,
    /// since CUDA doesn't tell when memory is free. Waiters are served in no order. At the end of
    /// the patience throws memory_error: deadline_exceeded, stopped. A request larger than the
    /// device is refused immediately.
    template <clock Clock>
    [[nodiscard]] void* allocate(stream& s, byte_count size, std::size_t alignment, const patience<Clock>& until) {
        failure why;
        void* const p = try_allocate(s, size, alignment, until, &why);
        if (p != nullptr) return p;
        if (why.code == errc::deadline_exceeded || why.code == errc::stopped)
            throw memory_error(why, {}, "allocating from a memory pool");
        raise(why, {}, "allocating from a memory pool");
    }
    /// The same, but returns null instead of throwing.
    template <clock Clock>
    [[nodiscard]] void* try_allocate(stream& s, byte_count size, std::size_t alignment, const patience<Clock>& until,
                                     failure* why = nullptr) noexcept {
        failure refused;
        for (;;) {
            if (void* const p = obtain(s, size, alignment, refused)) return p;
            const instant now = until.time.now();
            if (refused.code != errc::out_of_memory || charged(size, alignment) > device().properties().memory) break;
            if (until.stop.stop_requested())
                refused.code = errc::stopped;
            else if (now >= until.deadline)
                refused.code = errc::deadline_exceeded;
            if (refused.code != errc::out_of_memory) break;
            std::this_thread::sleep_for(std::min(until.deadline - now, gpushare::detail::look_slice));
        }
        if (why != nullptr) *why = refused;
        return nullptr;
    }

    /// Frees the block once `s` has reached this point. Before this call, `s` must have been made
    /// to wait for other streams that used the block. Null is ignored. errc::unknown_block if CUDA
    /// says that it isn't a block of a pool; errc::capturing. Blocks of a lost device are gone:
    /// then the result is errc::none. CUDA knows no sizes, so it doesn't notice a wrong size; the
    /// quota's block table does.
    errc deallocate(stream& s, void* p) noexcept {
        if (p == nullptr) return errc::none;
        const auto none_begins = s.state().captures.hold_off();
        if (const errc captured = s.capture_status(); captured != errc::none) return captured;
        void* const base = aligned_->take_out(p);
        const detail::context_guard any(device().context());
        const auto code = cudaFreeAsync(base, s.state().native);
        const errc why = device().health().note(code, "cudaFreeAsync");
        const bool is_back = why == errc::none || why == errc::device_lost;
        if (base != p && is_back) aligned_->forget();
        if (is_back) return errc::none;
        if (base != p) aligned_->put_back(p, base);
        return code == cudaErrorInvalidValue || code == cudaErrorInvalidDevicePointer ? errc::unknown_block : why;
    }

    /// The bytes of `used` that a block takes; bytes::max() if no device can have it.
    [[nodiscard]] static constexpr bytes charged(byte_count size, std::size_t alignment) noexcept {
        if (!std::has_single_bit(alignment)) return bytes::max();
        const auto asked = detail::padded(size, alignment, natural_alignment);
        return asked == 0 ? bytes::max() : step * ((asked + step.count() - 1) / step.count());
    }

    /// The pool's present bytes. Throws operation_error: errc::device_lost.
    [[nodiscard]] memory_pool_usage usage() const {
        return {.reserved = ask(cudaMemPoolAttrReservedMemCurrent),
                .used = ask(cudaMemPoolAttrUsedMemCurrent),
                .reserved_peak = ask(cudaMemPoolAttrReservedMemHigh),
                .used_peak = ask(cudaMemPoolAttrUsedMemHigh)};
    }

    /// Returns unused reserved memory to the device, except for `keep` bytes.
    void trim(bytes keep = {}) {
        // So that the context of another, lost device can't answer.
        const device_guard on(device().context());
        check(cudaMemPoolTrimTo(native_.get(), static_cast<std::size_t>(keep.count())), "trimming a memory pool");
    }

    /// Opens the pool's memory to kernels and copies of `other`, including allocated blocks. By
    /// default a pool made by the library is open to its node's other devices. Use this function
    /// for a pool of the embedder, or without `peers`. (Runtime API, cudaMemPoolSetAccess:
    /// cudaDeviceEnablePeerAccess doesn't cover pools.) Once the pool is open, copy its memory to
    /// another device by cudaMemcpyAsync, as stream::copy does, and not by cudaMemcpyPeerAsync,
    /// which was seen to do nothing then. Throws operation_error: errc::not_supported if the
    /// devices can't reach each other.
    void open_to(const node& on, device_id other) {
        const int theirs = on.state(other)->ordinal();
        int reach = 1;
        if (theirs != device().ordinal())
            check(cudaDeviceCanAccessPeer(&reach, theirs, device().ordinal()), "opening a memory pool");
        if (reach == 0) fail(cudaErrorPeerAccessUnsupported, "opening a memory pool to another device");
        check(give_access(on, other), "opening a memory pool to another device");
    }

private:
    memory_pool(std::shared_ptr<detail::device_state> device, cudaMemPool_t handle) noexcept
        : native_(std::move(device), handle) {}

    [[nodiscard]] detail::device_state& device() const noexcept { return *native_.device(); }
    [[nodiscard]] cudaError_t give_access(const node& on, device_id to) {
        cudaMemAccessDesc access{};
        access.location.type = cudaMemLocationTypeDevice;
        access.location.id = on.state(to)->ordinal();
        access.flags = cudaMemAccessFlagsProtReadWrite;
        const detail::context_guard any(device().context());
        return cudaMemPoolSetAccess(native_.get(), &access, 1);
    }
    void leave() noexcept {
        if (native_.get() != nullptr) device().leave_pool(native_.get());
    }

    void* obtain(stream& s, std::size_t size, std::size_t alignment, failure& why) noexcept {
        const bytes charge = charged(size, alignment);
        why = {};
        if (charge > device().properties().memory)
            why = gpushare::detail::never_had(size, alignment, device().properties().memory,
                                              [&](std::size_t a) { return charged(size, a); });
        if (why.code != errc::none) return nullptr;
        why.asked = size;

        const auto none_begins = s.state().captures.hold_off();
        // During a capture, the block would become part of the graph and live as long as the graph.
        why.code = s.capture_status();
        if (why.code != errc::none) return nullptr;
        const detail::context_guard any(device().context());
        void* p = nullptr;
        const auto code =
            cudaMallocFromPoolAsync(&p, static_cast<std::size_t>(charge.count()), native_.get(), s.state().native);
        why.code = device().health().note(code, "cudaMallocFromPoolAsync");
        if (why.code != errc::none || alignment <= natural_alignment) return why.code == errc::none ? p : nullptr;
        void* const at = detail::aligned(p, alignment);
        if (at == p || aligned_->add(at, p)) return at;
        (void)device().health().keep(cudaFreeAsync(p, s.state().native), "cudaFreeAsync");
        why = gpushare::detail::no_host_memory;
        return nullptr;
    }

    [[nodiscard]] bytes ask(cudaMemPoolAttr what) const {
        cuuint64_t figure = 0;
        // So that the context of another, lost device can't answer.
        const device_guard on(device().context());
        check(cudaMemPoolGetAttribute(native_.get(), what, &figure), "querying a memory pool");
        return bytes{figure};
    }

    detail::owned<detail::memory_pool_kind> native_;
    std::unique_ptr<detail::aligned_blocks> aligned_ = std::make_unique<detail::aligned_blocks>();
};

/// A pool and a stream as one memory_resource, whose blocks follow the stream's order. Refers to
/// both.
class stream_memory {
public:
    /// Both must outlive this object.
    stream_memory(memory_pool& pool, stream& s) noexcept : pool_(&pool), stream_(&s) {}

    /// As memory_pool::allocate on the stream. The other members correspond in the same way.
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment) {
        return pool_->allocate(*stream_, size, alignment);
    }
    /// Returns null if `allocate` would throw; `why`, unless null, receives the reason.
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, failure* why = nullptr) noexcept {
        return pool_->try_allocate(*stream_, size, alignment, why);
    }
    /// See memory_pool::allocate with a patience.
    template <clock Clock>
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment, const patience<Clock>& until) {
        return pool_->allocate(*stream_, size, alignment, until);
    }
    /// The same, but returns null instead of throwing.
    template <clock Clock>
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                     failure* why = nullptr) noexcept {
        return pool_->try_allocate(*stream_, size, alignment, until, why);
    }
    /// See memory_pool::deallocate.
    errc deallocate(void* p, byte_count /*size*/, std::size_t /*alignment*/) noexcept {
        return pool_->deallocate(*stream_, p);
    }
    /// See memory_pool::charged.
    [[nodiscard]] static constexpr bytes charged(byte_count size, std::size_t alignment) noexcept {
        return memory_pool::charged(size, alignment);
    }
    /// The reason why a request can never be granted: too big for any device, a bad alignment;
    /// errc::none if it can be.
    [[nodiscard]] static failure refuses(byte_count size, std::size_t alignment) noexcept {
        return gpushare::detail::never_had(size, alignment, bytes::max(),
                                           [&](std::size_t a) { return charged(size, a); });
    }
    /// Not known.
    [[nodiscard]] static constexpr bytes largest_free() noexcept { return bytes::max(); }
    /// No owner: shared by all.
    [[nodiscard]] static constexpr std::string_view owner() noexcept { return {}; }
    /// Never closes.
    [[nodiscard]] static close_token closing() noexcept { return {}; }

private:
    memory_pool* pool_;
    stream* stream_;
};
static_assert(upstream<stream_memory>);

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
