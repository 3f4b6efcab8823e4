// SPDX-License-Identifier: Apache-2.0
// A stream of a CUDA device: work on it runs in order, work on different streams may overlap. It is non-blocking: it
// doesn't synchronise with the default stream.
//
//   cuda::stream s = node.make_stream(device_id{0}, priority{1});
//   s.copy(to, from, size);
//   s.launch({.blocks = 64, .threads = 256}, kernel);      // with <gpushare/backend/cuda/launch.cuh>, by nvcc
//   s.record().wait(never);
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/detail/launch_widths.hpp>
#include <gpushare/backend/cuda/detail/partition_state.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/backend/cuda/point.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

class device_context;  // what a kernel sees: kernel_context.cuh

namespace detail {

/// A native stream and what we know about it.
struct stream_state {
    stream_state() = default;
    stream_state(const stream_state&) = delete;
    stream_state& operator=(const stream_state&) = delete;
    ~stream_state() {
        const context_guard any(device->context());
        if (end != nullptr) {
            // What is enqueued still runs, on SMs that nobody else may get until it is done. (Runtime API, cudaStreamDestroy:
            // it returns at once.)
            if (owned && !capturing.load(std::memory_order_relaxed) && end->event != nullptr)
                (void)device->health().keep(cudaEventRecord(end->event, native), "cudaEventRecord");
            partition->stream_gone(*end);
        }
        if (owned) (void)device->health().keep(cudaStreamDestroy(native), "cudaStreamDestroy");
        if (registered) device->sms().remove(unpartitioned);
    }
    /// Whoever asks for streams in no partition is told of this one, unless it is in one.
    void register_unpartitioned() {
        if (green != nullptr) return;
        unpartitioned.tag = tag;
        device->sms().add(unpartitioned);
        registered = true;
    }

    // Where it lies tells it from all that there are, how many were made from those that lay there before.
    [[nodiscard]] static std::uint64_t name_of(const stream_state* s) noexcept {
        static std::atomic<std::uint64_t> made{0};
        return reinterpret_cast<std::uintptr_t>(s) ^ made.fetch_add(1, std::memory_order_relaxed) << 48;
    }

    const std::uint64_t name = name_of(this);
    std::shared_ptr<device_state> device;
    std::shared_ptr<partition_state> partition;  // ours that it lives in: destroyed after the stream
    point_state* end = nullptr;                  // of a stream of such a partition: where its last work ends
    CUgreenCtx green = nullptr;                  // the green context that it lives in, whoever made it
    bool registered = false;                     // doesn't, and is counted among those
    unpartitioned_stream unpartitioned{};
    cudaStream_t native = nullptr;
    bool owned = false;            // ours to destroy
    bool captured_unseen = false;  // somebody else has the handle, and may begin a capture on it
    priority level;                // what was asked for
    int native_priority = 0;       // and what it is for CUDA
    std::uint32_t tag = 0;
    std::uint32_t sms = 0;  // that its kernels can run on
    launch_widths widths;
    std::atomic<bool> capturing = false;  // by a graph_capture of ours
};

}  // namespace detail

namespace detail {

/// The most blocks of a kernel that can be resident at once on the stream's SMs; 0 if that isn't known.
[[nodiscard]] inline std::uint32_t resident_blocks(const stream_state& s, const void* entry,
                                                   std::uint32_t threads) noexcept {
    device_state& d = *s.device;
    if (threads == 0 || threads > d.properties().threads_per_block) return 0;
    if (const auto known = d.occupancy().find(entry, threads)) return *known * s.sms;
    auto code = cudaSuccess;
    int of_sm = 0;
    {
        const device_guard on(d.context(), device_guard::context::any, code);
        if (code == cudaSuccess)
            code = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_sm, entry, static_cast<int>(threads), 0);
    }
    if (d.health().keep(code, "cudaOccupancyMaxActiveBlocksPerMultiprocessor") != errc::none) return 0;
    d.occupancy().add(entry, threads, static_cast<std::uint32_t>(of_sm));
    return static_cast<std::uint32_t>(of_sm) * s.sms;
}
/// The same, for blocks that wait for each other; 0 if the device can't do that.
[[nodiscard]] inline std::uint32_t cooperative_blocks(const stream_state& s, const void* entry,
                                                      std::uint32_t threads) noexcept {
    return s.device->properties().cooperative_launch ? resident_blocks(s, entry, threads) : 0;
}

}  // namespace detail

/// Movable; one owner. Safe from any thread; what one thread enqueues stays in its order.
///
/// On a device that is lost, enqueuing does nothing, and the next point's `status()` says errc::device_lost. What else
/// CUDA refuses throws at once: operation_error, or memory_error where there is no memory for it.
/// What was enqueued still runs when the stream is destroyed.
class stream {
public:
    using point = cuda::point;       ///< on its timeline
    using context = device_context;  ///< what its kernels see

    /// Keeps the native stream, and marks its timeline when the stream object may be gone. Safe from any thread.
    class handle {
    public:
        /// Of no stream.
        handle() noexcept = default;
        /// Whether it is of a stream.
        [[nodiscard]] explicit operator bool() const noexcept { return state_ != nullptr; }
        /// As the stream's.
        [[nodiscard]] point record() const { return record_on(*state_); }

    private:
        friend stream;
        explicit handle(std::shared_ptr<detail::stream_state> s) noexcept : state_(std::move(s)) {}
        std::shared_ptr<detail::stream_state> state_;
    };

    stream(stream&&) noexcept = default;
    stream& operator=(stream&&) noexcept = default;

    // --- kernels: defined in launch.cuh and cooperative.cuh, which need nvcc

    /// Enqueues `g.blocks` blocks of `g.threads` threads of `kernel`, a model of kernel_for, which is copied into the
    /// launch. A grid of no blocks does nothing.
    template <class K>
    void launch(grid g, const K& kernel);

    /// The same, all blocks starting together. Enqueues nothing and returns errc::too_many_blocks if more are asked for
    /// than can be resident at once on sms().
    template <class K>
    errc launch_cooperative(grid g, const K& kernel);

    /// The most blocks of `threads` threads that such a launch may have; 0 if the device can't do it.
    template <class K = gpushare::detail::empty_kernel>
    [[nodiscard]] std::uint32_t max_cooperative_blocks(const K& kernel = {}, std::uint32_t threads = 1) const noexcept;

    /// Enqueues opaque work that takes `length`: a single block that looks at the device's clock.
    template <class Rep, class Period>
    void enqueue(std::chrono::duration<Rep, Period> length);

    // --- everything else

    /// Enqueues a copy of `size` bytes that don't overlap, from and to memory of the host or of any device that this
    /// one reaches. From or to pageable host memory it waits, as CUDA does; pinned_memory doesn't.
    void copy(void* to, const void* from, std::size_t size) {
        if (size == 0) return;
        state_->widths.note_opaque();
        const detail::context_guard any(state_->device->context());
        enqueued(cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, state_->native), "cudaMemcpyAsync");
    }

    /// Enqueues filling `size` bytes of device memory.
    void fill(void* to, std::byte value, std::size_t size) {
        if (size == 0) return;
        enqueued_on_device([&] { return cudaMemsetAsync(to, static_cast<int>(value), size, state_->native); },
                           "cudaMemsetAsync");
    }

    /// What is enqueued from now on waits until `p`, a point of any stream of this process, is reached.
    /// Throws operation_error: errc::capturing if this stream is captured and `p` is still to come.
    void wait(const point& p) {
        if (p.known()) return;
        if (captured()) {
            if (p.reached()) return;
            throw operation_error(errc::capturing, {}, "a capture can't wait for a point from outside of it");
        }
        const detail::context_guard any(state_->device->context());
        enqueued(cudaStreamWaitEvent(state_->native, p.native_handle(), cudaEventWaitDefault), "cudaStreamWaitEvent");
    }

    /// The point after everything enqueued so far: one event out of the pool, recorded.
    /// Throws operation_error: errc::capturing while the stream is captured, because nothing happens then. (A capture
    /// that others begin on a stream of ours, by its handle, goes unnoticed unless the stream is borrowed.)
    [[nodiscard]] point record() { return record_on(*state_); }

    /// A point that is still to be recorded, with its event: recording it makes none. While a kernel waits for others on the
    /// device, making an event may wait for the kernel.
    class reserved_point {
    public:
        /// None.
        reserved_point() noexcept = default;

    private:
        friend stream;
        explicit reserved_point(point p) noexcept : point_(std::move(p)) {}
        point point_;
    };
    /// Throws as record(), but for captures.
    [[nodiscard]] reserved_point reserve() { return reserved_point(point(state_->device->acquire(state_->device))); }
    /// As record(), of a point that was reserved on a stream of the same device.
    [[nodiscard]] point record(reserved_point&& reserved) {
        refuse_captured(*state_);
        return record_as(*state_, std::exchange(reserved.point_, {}));
    }

    /// For whoever records later. Empty where the native stream is somebody else's, and may be gone by then.
    [[nodiscard]] handle share() const noexcept {
        return state_->owned && !state_->captured_unseen ? handle(state_) : handle();
    }

    /// Names its timeline among those of all streams that there are or lately were.
    [[nodiscard]] std::uint64_t timeline() const noexcept { return state_->name; }

    /// As asked for. CUDA has few priorities: see native_priority().
    [[nodiscard]] priority level() const noexcept { return state_->level; }
    /// What CUDA made of it: 0 is the lowest, -5 or so the highest.
    [[nodiscard]] int native_priority() const noexcept { return state_->native_priority; }
    /// Who it belongs to, in traces.
    [[nodiscard]] std::uint32_t tag() const noexcept { return state_->tag; }
    /// How many SMs its kernels run on: those of its green context, or all of the device.
    [[nodiscard]] std::uint32_t sms() const noexcept { return state_->sms; }
    /// Lives in a green context, its own SMs.
    [[nodiscard]] bool in_partition() const noexcept { return state_->green != nullptr; }
    /// Its device's.
    [[nodiscard]] const device_properties& properties() const noexcept { return state_->device->properties(); }
    /// Whether its device was seen to be unusable, by any call. Asks nothing.
    [[nodiscard]] bool lost() const noexcept { return state_->device->health().lost(); }
    /// Between the begin and the end of a graph_capture.
    [[nodiscard]] bool capturing() const noexcept { return state_->capturing.load(std::memory_order_relaxed); }
    /// Whether what is enqueued is recorded into a graph: between the begin and the end of a graph_capture, or, of a borrowed
    /// stream, of any capture. Asks the driver about borrowed streams only. Throws operation_error where it doesn't answer.
    [[nodiscard]] bool captured() const { return capturing() || (state_->captured_unseen && is_captured(*state_)); }
    /// Separate cooperative launches needn't run side by side on a device, though they fit: one that waits for another may
    /// wait for ever. (Programming Guide, "Concurrent Kernel Execution": kernels may run concurrently, none must.)
    static constexpr bool launches_run_together = false;

    /// Still owned, or borrowed, by this. What is launched by it can't be seen, so from now on a limiter takes all work of the stream
    /// for opaque: as wide as is declared, or as the device.
    [[nodiscard]] cudaStream_t native_handle() const noexcept {
        state_->widths.give_up();
        return state_->native;
    }
    /// The handle, which is the caller's to destroy from now on: after what limiters let in on it is done. A stream of a
    /// green context must go before that.
    [[nodiscard]] cudaStream_t release() noexcept {
        state_->owned = false;
        state_->captured_unseen = true;
        return native_handle();
    }

    // --- for what enqueues: launch.cuh, graphs, pools, limiters

    /// What this thread's launches by <<<>>> on a stream left for cudaGetLastError() since this was made: they have no other way to
    /// say that they failed. It stays there for the embedder. What was there before stays as well, unless a launch may leave it:
    /// then one with the same number couldn't be told from it, so it goes to health().take_last_error(). A program that asks CUDA
    /// between its launches (cudaEventQuery) looks after each by itself: the answer replaces what the launch left.
    class launch_errors {
    public:
        /// From now on.
        explicit launch_errors(const stream& s) noexcept : before_(cudaPeekAtLastError()) {
            if (!is_left_by_launch(before_) || is_sticky(before_)) return;  // what is sticky stays whatever is done
            (void)s.state().device->health().keep(before_, "a call before a submission");
            before_ = cudaSuccess;
        }
        /// errc::none, or what the last of them stands for.
        [[nodiscard]] errc found() const noexcept {
            const cudaError_t now = cudaPeekAtLastError();
            return now == before_ || !is_left_by_launch(now) ? errc::none : to_errc(now);
        }

    private:
        cudaError_t before_;
    };

    /// Notes which part of the SMs can be filled by what this thread launches on a stream from now on, until widest() is called or
    /// it goes.
    class launch_notes {
    public:
        /// On this stream, which outlives it.
        explicit launch_notes(const stream& s) noexcept : of_(&s.state().widths), notes_(of_->begin()) {}
        launch_notes(const launch_notes&) = delete;
        launch_notes& operator=(const launch_notes&) = delete;
        ~launch_notes() {
            if (notes_) (void)of_->end();
        }
        /// Once. Opaque, if something was enqueued that isn't a launch of ours, or by another thread.
        [[nodiscard]] sm_fill found() noexcept {
            return std::exchange(notes_, false) ? of_->end() : sm_fill{.opaque = true};
        }

    private:
        detail::launch_widths* of_;
        bool notes_;
    };

    /// Takes note of how a call that enqueued something went; throws what isn't left to the next point.
    void enqueued(cudaError_t code, const char* call) {
        if (code == cudaSuccess) return;
        if (state_->device->health().note(code, call) != errc::device_lost) fail(code, call);
    }
    /// The same around a call that needs the device to be current, and whose work can fill this part of it, or any.
    template <class F>
    requires requires(F& call) {
        { call() } -> std::same_as<cudaError_t>;
    }
    void enqueued_on_device(F&& call, const char* name, sm_fill fills = {.opaque = true}) {
        state_->widths.note(fills);
        on_device(call, name);
    }
    /// The same around the launch of the kernel `entry`.
    template <class F>
    void launched(const void* entry, grid g, F&& launch) {
        state_->widths.note(entry, g, [&] { return detail::resident_blocks(*state_, entry, g.threads); });
        on_device(launch, "launching a kernel");
    }
    /// What it is made of, for the backend.
    [[nodiscard]] detail::stream_state& state() const noexcept { return *state_; }
    /// For the backend.
    explicit stream(std::shared_ptr<detail::stream_state> state) noexcept : state_(std::move(state)) {}

private:
    template <class F>
    void on_device(F& call, const char* name) {
        cudaError_t code = cudaSuccess;
        {
            const device_guard on(state_->device->context(), device_guard::context::any, code);
            if (code == cudaSuccess) code = call();
        }
        enqueued(code, name);
    }

    [[nodiscard]] static point record_on(detail::stream_state& s) {
        refuse_captured(s);
        return record_as(s, point(s.device->acquire(s.device)));
    }
    static void refuse_captured(const detail::stream_state& s) {
        if (s.capturing.load(std::memory_order_relaxed) || (s.captured_unseen && is_captured(s)))
            throw operation_error(errc::capturing, {},
                                  "a stream has no points while it is captured: launch the graph, then record");
    }
    [[nodiscard]] static point record_as(detail::stream_state& s, point made) {
        const cudaEvent_t event = made.native_handle();
        if (event == nullptr) {  // the device is lost
            made.end_as(errc::device_lost);
            return made;
        }
        const detail::context_guard any(s.device->context());
        const auto code = cudaEventRecord(event, s.native);
        if (code == cudaSuccess) return made;
        const errc why = s.device->health().note(code, "cudaEventRecord");
        made.end_as(why);  // reached at once: there is nothing to ask about
        if (why != errc::device_lost) fail(code, "recording a point");
        return made;
    }

    [[nodiscard]] static bool is_captured(const detail::stream_state& s) {
        auto status = CU_STREAM_CAPTURE_STATUS_NONE;
        check(s.device->api().stream_is_capturing(s.native, &status), "asking a stream whether it is captured");
        return status != CU_STREAM_CAPTURE_STATUS_NONE;
    }

    std::shared_ptr<detail::stream_state> state_;  // shared with handles, which don't use what the stream may change
};
static_assert(queue<stream>);
static_assert(copier<stream>);
static_assert(shared_timeline<stream>);

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
