// SPDX-License-Identifier: Apache-2.0
// The state shared by all objects of one device: its properties, its health, and the pool of its
// events. Nodes, streams and points hold it by shared_ptr, so that any of them may be destroyed
// first. A part of the backend.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/detail/occupancy_cache.hpp>
#include <gpushare/backend/cuda/detail/own_calls.hpp>
#include <gpushare/backend/cuda/detail/process_wide.hpp>
#include <gpushare/backend/cuda/detail/sm_registry.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

class device_state;

/// The completion of a point without an event of its own: the point is reached with several other
/// points, or with the end of a graph.
class eventless {
public:
    eventless() = default;
    eventless(const eventless&) = delete;
    eventless& operator=(const eventless&) = delete;
    virtual ~eventless() = default;
    /// The errc of the completion, or point_state::pending. Safe from any thread; never blocks for
    /// long.
    [[nodiscard]] virtual std::uint8_t outcome() noexcept = 0;
    /// Whether the completion depends on a graph.
    [[nodiscard]] virtual bool waits_for_graph() const noexcept = 0;
    /// Whether the loss of the point's device completes the point.
    [[nodiscard]] virtual bool ends_with_device() const noexcept = 0;
};

/// The state that all copies of a point share. The state comes from the pool of the point's device,
/// and its event is reused for the next point.
struct point_state {
    /// The value of `outcome` while the point isn't known to be reached. Every other value is an
    /// errc.
    static constexpr std::uint8_t pending = 0xff;

    point_state() = default;
    point_state(const point_state&) = delete;
    point_state& operator=(const point_state&) = delete;
    // Harmless after the driver is unloaded, and on a lost device.
    ~point_state() {
        if (event == nullptr) return;
        const context_guard any(*home);
        (void)handled(cudaEventDestroy(event));
    }

    point_state* next = nullptr;
    std::atomic<std::uint32_t> references{0};
    // One word: threads that find out at the same time write the same value.
    std::atomic<std::uint8_t> outcome{pending};
    cudaEvent_t event = nullptr;
    const primary_context* home = nullptr;  // the context in which the event was made
    std::unique_ptr<eventless> instead;     // used in place of the event, if set
    std::shared_ptr<device_state> device;   // null while the state is in the pool
};

/// A green context that is used only by work that its streams have enqueued.
struct retired_partition {
    retired_partition* next = nullptr;
    CUgreenCtx native = nullptr;
    bool owned = true;  // whether the library destroys it
    // Its units of the device's SMs, which no other partition has; empty for a context that was
    // taken over.
    std::vector<std::uint32_t> units;
    std::vector<point_state*> ends;  // the ends of its streams' work
};

/// Counts bytes that came and went. out_since() combines these counts with another reading, the
/// device's free memory.
class flow {
public:
    /// Call after the device gave the bytes.
    void enter(bytes n) noexcept { entered_.fetch_add(n.count(), std::memory_order_release); }
    /// Call before the device gets the bytes back.
    void leave(bytes n) noexcept { left_.fetch_add(n.count(), std::memory_order_release); }
    /// The bytes entered so far. Read this count before the device's free memory.
    [[nodiscard]] std::uint64_t entered() const noexcept { return entered_.load(std::memory_order_acquire); }
    /// A lower bound on the bytes that were allocated when the free memory was read. `entered`: the
    /// result of entered() before that reading.
    [[nodiscard]] bytes out_since(std::uint64_t entered) const noexcept {
        return bytes{entered} - bytes{left_.load(std::memory_order_acquire)};
    }

private:
    std::atomic<std::uint64_t> entered_{0}, left_{0};  // since the beginning
};

class device_state {
public:
    /// Makes the device's primary context. Throws operation_error: no_device, no_driver;
    /// memory_error.
    device_state(std::shared_ptr<const driver> functions, int ordinal, bool beside_device_0)
        : api_(std::move(functions)),
          properties_(query_properties(*api_, ordinal)),
          context_(initialised(*api_, ordinal), ordinal, beside_device_0),
          sms_(process_wide<sm_registry>(of_context{ordinal, context_.id()})) {
        health_.ask_by([this] { return answers(); });
    }
    device_state(const device_state&) = delete;
    device_state& operator=(const device_state&) = delete;
    ~device_state() {
        // Even if work still runs there.
        while (retired_partition* const p = retired_.pop()) destroy(p);
    }

    [[nodiscard]] const driver& api() const noexcept { return *api_; }
    [[nodiscard]] const device_properties& properties() const noexcept { return properties_; }
    [[nodiscard]] int ordinal() const noexcept { return properties_.ordinal; }
    [[nodiscard]] cuda::health& health() noexcept { return health_; }
    [[nodiscard]] const primary_context& context() const noexcept { return context_; }
    /// call_in() that ends no capture of another thread.
    template <class Call>
    [[nodiscard]] cudaError_t call_beside_captures(const Call& call) const noexcept {
        return call_in(context_, [&] {
            const relaxed_capture relaxed(*api_);
            return call();
        });
    }
    /// The registry of the device's SMs, shared by all nodes that have the device in this context.
    [[nodiscard]] sm_registry& sms() noexcept { return *sms_; }
    [[nodiscard]] occupancy_cache& occupancy() noexcept { return occupancy_; }

    /// The device's bytes that chunks of virtual memory take.
    [[nodiscard]] flow& chunks() noexcept { return chunks_; }
    /// From now on the blocks of this pool count as allocated by the library.
    void enter_pool(cudaMemPool_t p) {
        const std::lock_guard lock(pools_mutex_);
        pools_.push_back(p);
    }
    /// Call before the pool is destroyed or handed out.
    void leave_pool(cudaMemPool_t p) noexcept {
        const std::lock_guard lock(pools_mutex_);
        std::erase(pools_, p);
    }
    /// The bytes of allocated blocks, of all these pools.
    [[nodiscard]] bytes used_of_pools() noexcept {
        const std::lock_guard lock(pools_mutex_);
        bytes all{};
        if (pools_.empty()) return all;
        // The device's own context, not just any: if the context of a lost device were current, the
        // answer would be about that device.
        auto code = cudaSuccess;
        const device_guard on(context_, code);
        if (health_.note(code, "cuCtxPushCurrent") != errc::none) return all;
        for (const cudaMemPool_t p : pools_) {
            cuuint64_t used = 0;
            code = cudaMemPoolGetAttribute(p, cudaMemPoolAttrUsedMemCurrent, &used);
            if (health_.note(code, "cudaMemPoolGetAttribute") == errc::none) all += bytes{used};
        }
        return all;
    }

    /// A pending point with one reference, and with an event of its own unless there is `instead`.
    /// Without `self`, for the device's own use, the state doesn't keep the device alive and is
    /// given back by release(). Allocates only if more points are in use than ever before. Throws
    /// std::bad_alloc and the errors of making an event.
    [[nodiscard]] point_state& acquire(std::shared_ptr<device_state> self = nullptr,
                                       std::unique_ptr<eventless> instead = nullptr) {
        point_state& p = take();
        if (instead == nullptr && p.event == nullptr) make_event(p);
        // Relaxed: no other thread knows the state yet.
        p.outcome.store(point_state::pending, std::memory_order_relaxed);
        p.references.store(1, std::memory_order_relaxed);
        p.instead = std::move(instead);
        p.device = std::move(self);
        return p;
    }

    void release(point_state& p) noexcept {
        const std::lock_guard lock(mutex_);
        points_.release(p);
    }

    /// Destroys the partition and gives its SMs back once the work of its streams is done:
    /// cudaStreamDestroy and cuGreenCtxDestroy don't wait for that work. This object checks for
    /// that end now, and again before new partitions are made.
    void retire(std::unique_ptr<retired_partition> p) noexcept {
        {
            const std::lock_guard lock(mutex_);
            retired_.push(*p.release());
        }
        collect_partitions();
    }
    void drop_ended(std::vector<point_state*>& ends) noexcept {
        const relaxed_capture relaxed(*api_);
        std::erase_if(ends, [this](point_state* end) {
            if (!ended(*end)) return false;
            release(*end);
            return true;
        });
    }
    /// Marks SMs as free before the driver destroys their partition. So a concurrent thread never
    /// finds SMs taken whose work is done.
    void collect_partitions() noexcept {
        gpushare::detail::fifo<retired_partition> gone;
        {
            const relaxed_capture relaxed(*api_);
            const std::lock_guard lock(mutex_);
            gpushare::detail::fifo<retired_partition> all(std::move(retired_));
            while (retired_partition* const p = all.pop()) {
                std::erase_if(p->ends, [this](point_state* end) {
                    if (!ended(*end)) return false;
                    points_.release(*end);
                    return true;
                });
                if (p->ends.empty()) give_back_sms(*p);
                (p->ends.empty() ? gone : retired_).push(*p);
            }
        }
        while (retired_partition* const p = gone.pop()) destroy(p);
    }

    /// The number of events made so far, in use or not.
    [[nodiscard]] std::size_t events() const noexcept {
        const std::lock_guard lock(mutex_);
        return points_.size();
    }

private:
    [[nodiscard]] point_state& take() {
        const std::lock_guard lock(mutex_);
        return points_.acquire();
    }

    // Makes the event in the device's primary context, to which its green contexts belong as well:
    // the events of a device serve all its streams. On a lost device there are no events, and
    // recording them fails like every other call.
    void make_event(point_state& p) {
        const cudaError_t code =
            call_beside_captures([&] { return handled(cudaEventCreateWithFlags(&p.event, cudaEventDefault)); });
        p.home = &context_;
        if (code == cudaSuccess) return;
        p.event = nullptr;
        if (health_.note(static_cast<CUresult>(code), "cudaEventCreateWithFlags") == errc::device_lost) return;
        release(p);
        fail(code, "making an event");
    }

    // Makes the context through the runtime, so that the runtime keeps the context for the
    // embedder.
    static const driver& initialised(const driver& api, int ordinal) {
        check(cudaInitDevice(ordinal, 0, 0), "making a device's context");
        return api;
    }

    [[nodiscard]] bool ended(const point_state& end) noexcept {
        if (end.event == nullptr || health_.lost()) return true;
        // A launch gate that saw this call would need a lock that this thread holds.
        const own_calls unwatched;
        const CUresult code = api_->event_query(end.event);
        if (code == CUDA_ERROR_NOT_READY) return false;
        (void)health_.note(code, "cuEventQuery");
        return true;
    }
    void give_back_sms(retired_partition& p) noexcept {
        sms_->give_back(p.units);
        p.units.clear();
    }
    void destroy(retired_partition* p) noexcept {
        if (p->native != nullptr && p->owned) (void)health_.keep(api_->green_destroy(p->native), "cuGreenCtxDestroy");
        give_back_sms(*p);
        for (point_state* end : p->ends) release(*end);
        delete p;
    }

    // Whether the device still works, in the context that was made.
    [[nodiscard]] bool answers() const noexcept {
        std::size_t free = 0, total = 0;
        cudaError_t code = cudaSuccess;
        const device_guard on(context_, code);
        return code == cudaSuccess && context_.is_as_made() && handled(cudaMemGetInfo(&free, &total)) == cudaSuccess;
    }

    const std::shared_ptr<const driver> api_;
    const device_properties properties_;
    const primary_context context_;
    cuda::health health_;
    const std::shared_ptr<sm_registry> sms_;
    occupancy_cache occupancy_;
    flow chunks_;
    std::mutex pools_mutex_;
    std::vector<cudaMemPool_t> pools_;
    mutable std::mutex mutex_;
    gpushare::detail::fifo<retired_partition> retired_;
    gpushare::detail::pool<point_state> points_;
};

/// Drops a reference; the last one puts the point back into its pool.
inline void drop(point_state& p) noexcept {
    // acq_rel: the thread that reuses the event has seen every other thread's last use.
    if (p.references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const std::shared_ptr<device_state> device = std::move(p.device);
    p.instead.reset();  // may drop other points
    device->release(p);
}

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
