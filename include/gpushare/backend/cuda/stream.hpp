// SPDX-License-Identifier: Apache-2.0
// A stream of a CUDA device: work on one stream runs in order, and work on different streams may
// overlap. The stream is non-blocking: it doesn't synchronise with the default stream.
//
//   gpushare::cuda::stream s = node.make_stream(gpushare::device_id{0}, gpushare::priority{1});
//   s.copy(to, from, size);
//   // s.launch({.blocks = 64, .threads = 256}, kernel): with launch.cuh, by nvcc
//   s.record().wait(gpushare::never);
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include <gpushare/backend/cuda/detail/capture_watch.hpp>
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

class device_context;  // defined in launch.cuh

namespace detail {

/// A native stream and the library's state for it.
struct stream_state {
    stream_state() = default;
    stream_state(const stream_state&) = delete;
    stream_state& operator=(const stream_state&) = delete;
    ~stream_state() {
        const context_guard any(device->context());
        if (end != nullptr) {
            // Enqueued work still runs, on SMs that no other partition may get until the work is
            // done. (Runtime API, cudaStreamDestroy: it returns immediately.)
            if (owned && !captures.ours() && end->event != nullptr)
                (void)device->health().keep(cudaEventRecord(end->event, native), "cudaEventRecord");
            partition->stream_gone(*end);
        }
        if (owned) (void)device->health().keep(cudaStreamDestroy(native), "cudaStreamDestroy");
        if (registered) device->sms().remove(unpartitioned);
    }
    /// Lists this stream among the streams in no partition, unless it is in one.
    void register_unpartitioned() {
        if (green != nullptr || tag == kernel_free_tag) return;
        unpartitioned.tag = tag;
        device->sms().add(unpartitioned);
        registered = true;
    }

    // The address distinguishes the stream from all living ones, and the count from earlier ones at
    // the same address.
    [[nodiscard]] static std::uint64_t name_of(const stream_state* s) noexcept {
        static std::atomic<std::uint64_t> made{0};
        return reinterpret_cast<std::uintptr_t>(s) ^ made.fetch_add(1, std::memory_order_relaxed) << 48;
    }

    const std::uint64_t name = name_of(this);
    std::shared_ptr<device_state> device;
    // The library's partition that contains the stream; destroyed after the stream.
    std::shared_ptr<partition_state> partition;
    point_state* end = nullptr;  // for a stream in such a partition: the end of its last work
    CUgreenCtx green = nullptr;  // the stream's green context, whether made by the library or not
    bool registered = false;     // listed among the streams in no partition
    unpartitioned_stream unpartitioned{};
    cudaStream_t native = nullptr;
    bool owned = false;       // whether the library destroys the stream
    priority level;           // the requested level
    int native_priority = 0;  // CUDA's priority for that level
    std::uint32_t tag = 0;
    std::uint32_t sms = 0;  // the number of SMs on which its kernels can run
    launch_widths widths;
    capture_watch captures;
};

/// The most blocks of a kernel that can be resident at once on the stream's SMs; 0 if that isn't
/// known.
[[nodiscard]] inline std::uint32_t resident_blocks(const stream_state& s, const void* entry,
                                                   std::uint32_t threads) noexcept {
    device_state& d = *s.device;
    if (threads == 0 || threads > d.properties().threads_per_block) return 0;
    if (const auto known = d.occupancy().find(entry, threads)) return *known * s.sms;
    int of_sm = 0;
    const cudaError_t code = call_in(d.context(), [&] {
        return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_sm, entry, static_cast<int>(threads), 0);
    });
    if (d.health().keep(code, "cudaOccupancyMaxActiveBlocksPerMultiprocessor") != errc::none) return 0;
    d.occupancy().add(entry, threads, static_cast<std::uint32_t>(of_sm));
    return static_cast<std::uint32_t>(of_sm) * s.sms;
}
/// The same for blocks that wait for each other; 0 if the device doesn't support that.
[[nodiscard]] inline std::uint32_t cooperative_blocks(const stream_state& s, const void* entry,
                                                      std::uint32_t threads) noexcept {
    return s.device->properties().cooperative_launch ? resident_blocks(s, entry, threads) : 0;
}

}  // namespace detail

/// A stream of a CUDA device. Movable; one owner. Safe from any thread; each thread's work stays in
/// order.
///
/// On a lost device, enqueuing does nothing, and the next point's `status()` is errc::device_lost.
/// Other errors of CUDA throw immediately: operation_error, or memory_error for a lack of memory.
/// Enqueued work still runs when the stream is destroyed.
class stream {
public:
    using point = cuda::point;       ///< a point of its timeline
    using context = device_context;  ///< the first argument of its kernels

    /// Keeps the native stream, and can record points when the stream object is gone. Safe from any
    /// thread.
    class handle {
    public:
        /// The handle of no stream.
        handle() noexcept = default;
        /// Whether the handle has a stream.
        [[nodiscard]] explicit operator bool() const noexcept { return state_ != nullptr; }
        /// As stream::record().
        [[nodiscard]] point record() const { return record_on(*state_); }

    private:
        friend stream;
        explicit handle(std::shared_ptr<detail::stream_state> s) noexcept : state_(std::move(s)) {}
        std::shared_ptr<detail::stream_state> state_;
    };

    stream(stream&&) noexcept = default;
    stream& operator=(stream&&) noexcept = default;

    // --- kernels: defined in launch.cuh and cooperative.cuh, which need nvcc

    /// Enqueues `g.blocks` blocks of `g.threads` threads of `kernel`, a model of kernel_for, which
    /// is copied into the launch. A grid of no blocks does nothing.
    template <class K>
    void launch(grid g, const K& kernel);

    /// The same, with all blocks starting together. Enqueues nothing and returns
    /// errc::too_many_blocks if the grid has more blocks than can be resident at once on sms().
    template <class K>
    errc launch_cooperative(grid g, const K& kernel);

    /// The most blocks of `threads` threads that a cooperative launch may have; 0 if the device
    /// doesn't support such launches.
    template <class K = gpushare::detail::empty_kernel>
    [[nodiscard]] std::uint32_t max_cooperative_blocks(const K& kernel = {}, std::uint32_t threads = 1) const noexcept;

    /// Enqueues opaque work that takes `length`: a single block that polls the device's clock.
    template <class Rep, class Period>
    void enqueue(std::chrono::duration<Rep, Period> length);

    // --- everything else

    /// Enqueues a copy of `size` bytes between ranges that don't overlap, in memory of the host or
    /// of any device that this device reaches. With pageable host memory the call waits, as in
    /// CUDA; with pinned_memory it doesn't.
    void copy(void* to, const void* from, std::size_t size) {
        if (size == 0) return;
        enqueued_on_device([&] { return copy_on(state_->native, to, from, size); }, "cudaMemcpyAsync");
    }

    /// Enqueues filling `size` bytes of device memory.
    void fill(void* to, std::byte value, std::size_t size) {
        if (size == 0) return;
        enqueued_on_device([&] { return cudaMemsetAsync(to, static_cast<int>(value), size, state_->native); },
                           "cudaMemsetAsync");
    }

    /// Makes work enqueued from now on wait until `p`, a point of any stream of this process, is
    /// reached. Throws operation_error: errc::capturing if this stream is captured and `p` is still
    /// to come, or if `p` is the end of a graph (last_use()), for which a device can't wait.
    void wait(const point& p) {
        for (const point& part : p.parts()) wait(part);
        if (!p.parts().empty() || p.known()) return;
        if (p.native_handle() == nullptr) {
            if (p.reached()) return;
            throw operation_error(errc::capturing, {}, "a stream can't wait until a graph is gone");
        }
        {
            const auto none_begins = state_->captures.hold_off();
            if (!captured()) return wait_uncaptured(p);
        }
        if (!p.reached())
            throw operation_error(errc::capturing, {}, "a capture can't wait for a point from outside of it");
    }

    /// The point after everything enqueued so far: one event from the pool, recorded. Throws
    /// operation_error: errc::capturing while the stream is captured, by whatever thread, because
    /// nothing runs then; also if another thread begins to capture it meanwhile.
    [[nodiscard]] point record() { return record_on(*state_); }

    /// A point with an event that isn't recorded yet, so recording the point makes no event. This
    /// matters because making an event may wait for a kernel that itself waits for others.
    class reserved_point {
    public:
        /// No point.
        reserved_point() noexcept = default;

    private:
        friend stream;
        explicit reserved_point(point p) noexcept : point_(std::move(p)) {}
        point point_;
    };
    /// Reserves a point. Throws as record(), except for captures.
    [[nodiscard]] reserved_point reserve() { return reserved_point(point(state_->device->acquire(state_->device))); }
    /// As record(), for a point that was reserved on a stream of the same device. Without a point,
    /// or with one that was used, even by a call that threw, it is record().
    [[nodiscard]] point record(reserved_point&& reserved) {
        const auto turn = uncaptured_turn(*state_);
        point made = std::exchange(reserved.point_, {});
        if (made == point{}) made = point(state_->device->acquire(state_->device));
        return record_as(*state_, std::move(made), turn);
    }

    /// The point after which no work enqueued so far uses memory. Without a capture, the same as
    /// record(). If any thread captures the stream, the point is the end of the graph: the graph
    /// and everything made from it are gone, and their launches are done. On a stream of another
    /// owner, work enqueued before such a capture must be done by then. Throws as record().
    [[nodiscard]] point last_use();

    /// A handle for recording later. Empty if the native stream belongs to another library, since
    /// the stream may be gone by then.
    [[nodiscard]] handle share() const noexcept { return state_->owned ? handle(state_) : handle(); }

    /// A number that identifies the timeline among all existing and recent streams.
    [[nodiscard]] std::uint64_t timeline() const noexcept { return state_->name; }

    /// The requested level. CUDA has few priorities: see native_priority().
    [[nodiscard]] priority level() const noexcept { return state_->level; }
    /// CUDA's priority for that level: 0 is the lowest, and about -5 the highest.
    [[nodiscard]] int native_priority() const noexcept { return state_->native_priority; }
    /// The owner's tag, for traces.
    [[nodiscard]] std::uint32_t tag() const noexcept { return state_->tag; }
    /// The number of SMs on which its kernels run: those of its green context, or all of the
    /// device.
    [[nodiscard]] std::uint32_t sms() const noexcept { return state_->sms; }
    /// Whether the stream is in a green context.
    [[nodiscard]] bool in_partition() const noexcept { return state_->green != nullptr; }
    /// The properties of its device.
    [[nodiscard]] const device_properties& properties() const noexcept { return state_->device->properties(); }
    /// Whether any call has found its device to be unusable. Makes no query.
    [[nodiscard]] bool lost() const noexcept { return state_->device->health().lost(); }
    /// Whether a graph_capture of the stream is under way.
    [[nodiscard]] bool capturing() const noexcept { return state_->captures.ours(); }
    /// Whether enqueued work is recorded into a graph: between the begin and the end of a
    /// graph_capture, or of any capture. Queries the driver if another owner has had the handle.
    /// Throws operation_error if the driver doesn't answer.
    [[nodiscard]] bool captured() const {
        const errc why = capture_status();
        if (why != errc::none && why != errc::capturing)
            throw operation_error(why, {}, "querying whether a stream is captured");
        return why == errc::capturing;
    }
    /// Separate cooperative launches needn't run side by side on a device, even if they fit, so a
    /// launch that waits for another one may wait for ever. (Programming Guide, "Concurrent Kernel
    /// Execution": kernels may run concurrently, but needn't.)
    static constexpr bool launches_run_together = false;

    /// The native stream, which this object still owns or borrows. Launches into the handle are
    /// invisible to this object, so from now on a limiter treats all work of the stream as opaque:
    /// as wide as declared, or as the whole device. Captures are invisible, too, so the driver is
    /// queried before and after each point.
    [[nodiscard]] cudaStream_t native_handle() const noexcept {
        state_->widths.give_up();
        state_->captures.hand_out();
        return state_->native;
    }
    /// Releases the handle: from now on the caller destroys it, after the work that limiters
    /// admitted on it is done. Its partition stays for good, and so do the partition's SMs: see
    /// green_context::release.
    [[nodiscard]] cudaStream_t release() noexcept {
        state_->owned = false;
        if (state_->partition) state_->partition->keep();
        return native_handle();
    }

    // --- for code that enqueues: launch.cuh, graphs, pools, limiters

    /// Collects the errors that this thread's launches by <<<>>> on a stream leave for
    /// cudaGetLastError() during its life: such launches have no other way to report failure. The
    /// errors stay there for the embedder. An earlier error stays as well, unless a launch may
    /// leave the same one: since the two couldn't be told apart, it goes to
    /// health().take_last_error(). A program that asks CUDA between its launches (cudaEventQuery)
    /// checks each launch itself: the answer replaces the launch's error.
    class launch_errors {
    public:
        /// Begins to collect, for no particular stream: an earlier error hides a later one of the
        /// same kind.
        launch_errors() noexcept : before_(cudaPeekAtLastError()) {}
        /// Begins to collect for this stream.
        explicit launch_errors(const stream& s) noexcept : before_(cudaPeekAtLastError()) {
            // A sticky error can't be cleared.
            if (!is_left_by_launch(before_) || is_sticky(before_)) return;
            (void)s.state().device->health().keep(before_, "a call before a submission");
            before_ = cudaSuccess;
        }
        /// The code of the last error; errc::none if there was none.
        [[nodiscard]] errc found() const noexcept {
            const cudaError_t now = cudaPeekAtLastError();
            return now == before_ || !is_left_by_launch(now) ? errc::none : to_errc(now);
        }

    private:
        cudaError_t before_;
    };

    /// Records which part of the SMs this thread's launches on a stream can fill, until found() is
    /// called or the object is destroyed.
    class launch_notes {
    public:
        /// Begins to note launches on this stream, which must outlive this object.
        explicit launch_notes(const stream& s) noexcept : of_(&s.state().widths), notes_(of_->begin()) {}
        launch_notes(const launch_notes&) = delete;
        launch_notes& operator=(const launch_notes&) = delete;
        ~launch_notes() {
            if (notes_) (void)of_->end();
        }
        /// The part that the launches can fill. Call once. Opaque if work other than the library's
        /// launches was enqueued, or if another thread enqueued.
        [[nodiscard]] sm_fill found() noexcept {
            return std::exchange(notes_, false) ? of_->end() : sm_fill{.opaque = true};
        }

    private:
        detail::launch_widths* of_;
        bool notes_;
    };

    /// Records the result of a call that enqueued something. Throws failures that aren't left to
    /// the next point.
    void enqueued(cudaError_t code, const char* call) {
        if (code == cudaSuccess) return;
        if (state_->device->health().note(code, call) != errc::device_lost) fail(code, call);
    }
    /// The same around a call that needs the device to be current. Its work can fill this part of
    /// the device, or any part.
    template <class F>
    requires requires(F& call) {
        { call() } -> std::same_as<cudaError_t>;
    }
    void enqueued_on_device(F&& call, const char* name, sm_fill fills = {.opaque = true}) {
        state_->widths.note(fills);
        const cudaError_t code = detail::call_in(state_->device->context(), call);
        // Copies, fills and graphs may use memory of other devices, and so may report the loss of
        // another device.
        if (is_sticky(code) && state_->device->health().answers()) {
            (void)detail::handled(code);
            fail(code, "using memory of another device, which is lost");
        }
        enqueued(code, name);
    }
    /// The same around the launch of the kernel `entry`.
    template <class F>
    void launched(const void* entry, grid g, F&& launch) {
        state_->widths.note(entry, g, [&] { return detail::resident_blocks(*state_, entry, g.threads); });
        enqueued(detail::call_in(state_->device->context(), launch), "launching a kernel");
    }
    /// errc::none, capturing, or the code of the driver's error; see captured(). To rely on the
    /// result for a while, hold off captures.
    [[nodiscard]] errc capture_status() const noexcept {
        if (capturing()) return errc::capturing;
        return state_->captures.handed_out() ? is_captured(*state_) : errc::none;
    }
    /// For the backend: the stream's state.
    [[nodiscard]] detail::stream_state& state() const noexcept { return *state_; }
    /// For the backend: a stream with this state.
    explicit stream(std::shared_ptr<detail::stream_state> state) noexcept : state_(std::move(state)) {}

private:
    void wait_uncaptured(const point& p) {
        cudaError_t code = cudaSuccess;
        {
            const detail::context_guard any(state_->device->context());
            code = cudaStreamWaitEvent(state_->native, p.native_handle(), cudaEventWaitDefault);
        }
        // The call may report another device's loss, and the points of a lost device are reached.
        if (is_sticky(code) && !p.is_of(*state_->device) && p.reached()) return (void)detail::handled(code);
        enqueued(code, "cudaStreamWaitEvent");
    }

    [[nodiscard]] static point record_on(detail::stream_state& s) {
        const auto turn = uncaptured_turn(s);
        return record_as(s, point(s.device->acquire(s.device)), turn);
    }
    [[nodiscard]] static std::uint64_t uncaptured_turn(const detail::stream_state& s) {
        const auto turn = s.captures.turn();
        refuse_captured(s, detail::capture_watch::captures(turn));
        return turn;
    }
    static void refuse_captured(const detail::stream_state& s, bool by_us) {
        errc why = by_us ? errc::capturing : errc::none;
        if (!by_us && s.captures.handed_out()) why = is_captured(s);
        if (why == errc::none) return;
        throw operation_error(why, {}, "a stream has no points while it is captured: launch the graph, then record");
    }
    // Call after uncaptured_turn().
    [[nodiscard]] static point record_as(detail::stream_state& s, point made, std::uint64_t turn) {
        const cudaEvent_t event = made.native_handle();
        if (event == nullptr) {  // the device is lost
            made.end_as(errc::device_lost);
            return made;
        }
        const detail::context_guard any(s.device->context());
        const auto code = cudaEventRecord(event, s.native);
        if (code == cudaSuccess) {
            // Otherwise the record may have gone into a capture that another thread has begun
            // meanwhile. No thread queries this event then, and the next point records it again.
            refuse_captured(s, s.captures.turn() != turn);
            return made;
        }
        const errc why = s.device->health().note(code, "cudaEventRecord");
        made.end_as(why);  // reached at once: there is no event to query
        if (why != errc::device_lost) fail(code, "recording a point");
        return made;
    }

    // Between devices that don't reach each other, cudaMemcpyAsync refuses memory of pools and
    // virtual memory; cudaMemcpyPeerAsync copies it, through the host. The library never uses both
    // for the same memory: if a pool is open to the other device, cudaMemcpyPeerAsync was seen to
    // write nothing (CUDA.jl, pull request 3112).
    [[nodiscard]] static cudaError_t copy_on(cudaStream_t on, void* to, const void* from, std::size_t size) noexcept {
        const cudaError_t code = cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, on);
        if (code != cudaErrorInvalidValue) return code;
        cudaPointerAttributes target{}, source{};
        if (cudaPointerGetAttributes(&target, to) != cudaSuccess ||
            cudaPointerGetAttributes(&source, from) != cudaSuccess || target.type != cudaMemoryTypeDevice ||
            source.type != cudaMemoryTypeDevice || target.device == source.device)
            return code;
        (void)detail::handled(code);
        return cudaMemcpyPeerAsync(to, target.device, from, source.device, size, on);
    }

    [[nodiscard]] static errc is_captured(const detail::stream_state& s) noexcept {
        auto status = CU_STREAM_CAPTURE_STATUS_NONE;
        const CUresult code = s.device->api().stream_is_capturing(s.native, &status);
        // On a lost device nothing is captured any more, and the point's status reports the loss.
        const errc why = s.device->health().note(code, "cuStreamIsCapturing");
        if (why != errc::none) return why == errc::device_lost ? errc::none : why;
        return status == CU_STREAM_CAPTURE_STATUS_NONE ? errc::none : errc::capturing;
    }

    // Shared with handles, which don't use members that the stream may change.
    std::shared_ptr<detail::stream_state> state_;
};

namespace detail {

/// The end of a graph: the graph is gone, and the work that its stream enqueued before the capture
/// is done, if the stream still exists.
class graph_end final : public eventless {
public:
    using flag = std::shared_ptr<std::atomic<bool>>;

    graph_end(flag gone, stream::handle of) noexcept : gone_(std::move(gone)), of_(std::move(of)) {}

    [[nodiscard]] std::uint8_t outcome() noexcept override {
        // acquire: the effects of the launches are visible to this thread.
        if (!gone_->load(std::memory_order_acquire)) return point_state::pending;
        if (!of_) return static_cast<std::uint8_t>(errc::none);
        const std::lock_guard lock(mutex_);
        if (!recorded_) try {
                before_ = of_.record();
                recorded_ = true;
            } catch (...) {  // the stream is captured again: try later
                return point_state::pending;
            }
        return before_.reached() ? static_cast<std::uint8_t>(before_.status()) : point_state::pending;
    }

    [[nodiscard]] bool waits_for_graph() const noexcept override { return true; }
    [[nodiscard]] bool ends_with_device() const noexcept override { return true; }

    /// Makes the end of the captured graph set the flag. (Runtime API, cudaUserObjectCreate and
    /// cudaGraphRetainUserObject; Programming Guide, "CUDA User Objects": executables keep the
    /// objects of their graph until they are gone and have run. The callback makes no CUDA call.)
    /// Throws operation_error.
    static void belong(const flag& gone, cudaGraph_t graph) {
        auto held = std::make_unique<flag>(gone);
        const auto tell = [](void* of) {
            const std::unique_ptr<flag> mine(static_cast<flag*>(of));
            (*mine)->store(true, std::memory_order_release);
        };
        cudaUserObject_t object = nullptr;
        check(cudaUserObjectCreate(&object, held.get(), tell, 1, cudaUserObjectNoDestructorSync),
              "watching a graph that is captured");
        (void)held.release();
        const auto code = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
        if (code != cudaSuccess) (void)handled(cudaUserObjectRelease(object, 1));
        check(code, "watching a graph that is captured");
    }

private:
    const flag gone_;
    const stream::handle of_;
    std::mutex mutex_;
    bool recorded_ = false;
    point before_;
};

}  // namespace detail

inline point stream::last_use() {
    if (!captured()) return record();
    const detail::context_guard any(state_->device->context());
    auto status = cudaStreamCaptureStatusNone;
    cudaGraph_t graph = nullptr;
    check(cudaStreamGetCaptureInfo(state_->native, &status, nullptr, &graph, nullptr, nullptr, nullptr),
          "querying a stream's capture");
    if (status == cudaStreamCaptureStatusNone) return record();  // the capture has just ended
    if (status != cudaStreamCaptureStatusActive || graph == nullptr)
        throw operation_error(errc::capturing, {}, "the capture of a stream was invalidated");
    const auto gone = std::make_shared<std::atomic<bool>>(false);
    point end(state_->device->acquire(state_->device, std::make_unique<detail::graph_end>(gone, share())));
    detail::graph_end::belong(gone, graph);
    return end;
}

static_assert(queue<stream>);
static_assert(copier<stream>);
static_assert(shared_timeline<stream>);

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
