// SPDX-License-Identifier: Apache-2.0
// The concepts between the primitives (quotas, limiters, splits, collectives) and the backends
// (host, cuda, sim). A primitive requires a concept; a backend models it and says so in a
// `static_assert`. Primitives and backends don't include each other.
//
//   template <gpushare::timeline Stream>
//   bool is_idle(Stream& s) { return s.record().reached(); }        // a stream of any backend
//
//  - clock: the time
//  - timeline, timeline_point: streams, and points on them that are reached or not
//  - memory, memory_resource, upstream: allocators, and the interface that adaptors need
//  - virtual_memory: address ranges and physical chunks, separate from each other
//  - queue, launcher: enqueuing opaque work, launching kernels
//  - sm_partitionable, sm_timeline: SM partitions; how much of the SMs work used
//  - node, gang_order: devices with all of this; an order for work on several of them
//
// Calls that may wait for memory take a patience: until a deadline by some clock, or until a stop
// is requested. Without a patience, the same call doesn't wait.
//
//   const gpushare::patience until{clock, clock.now() + 50ms, stop};
//   auto* p = pool.allocate(512_MiB, 256, until);
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <string_view>
#include <type_traits>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

// clang-format 14 would break compound requirements apart:
// clang-format off

/// Tells the time: real, thread-CPU or virtual. `now()` never goes back and is safe from any
/// thread.
template <class C>
concept clock = requires(const C& c) {
    { c.now() } noexcept -> std::same_as<instant>;
};

/// A clock of virtual time, which passes only when the program steps it. So no wait can end because
/// time passes during the wait.
template <class C>
concept stepped_clock = clock<C> && requires { requires C::stepped; };

/// A point on a stream's timeline: reached once everything enqueued before it is done. Copies are
/// cheap and refer to the same point; a default-constructed point is reached. Safe from any thread.
///   reached()          never blocks
///   wait(deadline)     true once reached, false at the deadline
///   wait_any(ps, d)    true once any of them is reached
///   status()           once reached: errc::none, or why work between an earlier point and this one
///                      failed; points that others record or query in between don't hide a failure
///                      (telling_timeline)
///   elapsed(a, b)      device time from a to b, both reached (and on one device); negative if b
///                      came first
template <class P>
concept timeline_point = std::copyable<P> && std::default_initializable<P> &&
                         requires(const P& p, std::span<const P> points, instant deadline) {
                             { p.reached() } noexcept -> std::same_as<bool>;
                             { p.wait(deadline) } -> std::same_as<bool>;
                             { P::wait_any(points, deadline) } -> std::same_as<bool>;
                             { p.status() } noexcept -> std::same_as<errc>;
                             { elapsed(p, p) } noexcept -> std::same_as<ns>;
                         };

/// A point whose waits can be ended by another thread, so a waiting thread needs no timer.
///   interrupt              of one wait; raise() from any thread, while it exists
///   wait_any(ps, d, by)    as wait_any(ps, d); false, too, if `by` was raised before any of them
///                          is reached
template <class P>
concept interruptible_point =
    timeline_point<P> && requires(std::span<const P> points, instant deadline, typename P::interrupt& by) {
        { by.raise() } noexcept;
        { P::wait_any(points, deadline, by) } -> std::same_as<bool>;
    };

/// Waits for a point until the deadline, of `time`, or a stop request. Returns whether the point
/// was reached. If waits can't be interrupted, it polls every millisecond.
template <timeline_point P, clock Clock>
[[nodiscard]] bool wait_or_stop(const P& p, const Clock& time, instant deadline, const std::stop_token& stop) {
    if (!stop.stop_possible()) return p.wait(deadline);
    if constexpr (interruptible_point<P>) {
        typename P::interrupt by;
        const std::stop_callback raise(stop, [&]() noexcept { by.raise(); });
        return P::wait_any(std::span<const P>(&p, 1), deadline, by);
    } else {
        for (;;) {
            const instant now = time.now();
            if (stop.stop_requested() || now >= deadline) return p.reached();
            if (p.wait(std::min(deadline, saturating_add(now, std::chrono::milliseconds(1))))) return true;
        }
    }
}

namespace detail {
/// Waits for the point. Returns false if the wait ends, or throws, before the point is reached.
template <timeline_point P>
[[nodiscard]] bool await(const P& p) noexcept {
    try {
        return p.wait(never);
    } catch (...) {
        return p.reached();
    }
}
}  // namespace detail

/// A stream seen as a timeline: `record()` marks the point after the work enqueued so far.
/// Stream-ordered frees, timing and the completion of permits all build on it.
template <class S>
concept timeline = requires(S& s) {
    typename S::point;
    requires timeline_point<typename S::point>;
    { s.record() } -> std::same_as<typename S::point>;
};

/// A stream on which a point may be recorded later, even after the stream object is gone. If points
/// are expensive, one point can then serve several pieces of work.
///   share()     a handle that keeps the timeline alive; empty (false) where others may destroy it
///   record()    of a handle: as of the stream
///   timeline()  a number of the timeline, unique while anything is in flight on it, the stream
///               gone or not
template <class S>
concept shared_timeline = timeline<S> && requires(const S& s, const typename S::handle& h) {
    requires std::copyable<typename S::handle> && std::default_initializable<typename S::handle>;
    { s.share() } noexcept -> std::same_as<typename S::handle>;
    { h.record() } -> std::same_as<typename S::point>;
    { s.timeline() } noexcept -> std::same_as<std::uint64_t>;
    { static_cast<bool>(h) } noexcept;
};

/// A timeline whose points can be made beforehand, so that recording one can't fail.
template <class S>
concept preparing_timeline = timeline<S> && requires(S& s, typename S::point& p) {
    { s.prepare() } -> std::same_as<typename S::point>;
    { s.record(p) } noexcept;
};

/// A stream that reports how a piece of work went, even if other threads record points on it
/// meanwhile. For backends on which a single kernel can fail without the others.
///   own_work w(s)     work that this thread enqueues while `w` exists is one piece of work: points
///                     recorded meanwhile have the status of all of it before them
///   w.how_it_went()   a handle: once a point after the work is reached, status() says why a part
///                     of it failed
template <class S>
concept telling_timeline = timeline<S> && std::constructible_from<typename S::own_work, S&> &&
                           requires(const typename S::own_work& w) {
                               requires std::copyable<std::remove_cvref_t<decltype(w.how_it_went())>>;
                               requires std::default_initializable<std::remove_cvref_t<decltype(w.how_it_went())>>;
                               { w.how_it_went().status() } noexcept -> std::same_as<errc>;
                           };

namespace detail {
/// For streams that can't distinguish pieces of work: their points report the status of all work,
/// as after the loss of a device.
struct no_own_work {
    struct outcome {};
    explicit no_own_work(const auto&) noexcept {}
    [[nodiscard]] static outcome how_it_went() noexcept { return {}; }
};
template <class Stream>
struct own_work_of {
    using type = no_own_work;
    using outcome = no_own_work::outcome;
};
template <telling_timeline Stream>
struct own_work_of<Stream> {
    using type = typename Stream::own_work;
    using outcome = std::remove_cvref_t<decltype(std::declval<const type&>().how_it_went())>;
};
/// How work went, once the point after the work is reached. If the stream can tell, only that work
/// counts; otherwise all work before the point counts.
template <class Outcome, timeline_point Point>
[[nodiscard]] errc status_of(const Outcome& own, const Point& end) noexcept {
    const errc status = end.status();
    if constexpr (requires { own.status(); })
        return status == errc::device_lost ? status : own.status();
    else
        return status;
}
}  // namespace detail

/// A stream that can wait on the device for a point of another stream.
template <class S>
concept joining_timeline = timeline<S> && requires(S& s, const typename S::point& p) { s.wait(p); };

/// A stream that takes opaque work of a known length at a fixed priority, in order.
template <class S>
concept queue = timeline<S> && std::movable<S> && requires(S& s, const S& cs, ns length) {
    s.enqueue(length);
    { cs.level() } noexcept -> std::same_as<priority>;
};

/// How a kernel's blocks and threads are spread over a device.
struct grid {
    std::uint32_t blocks = 1;  ///< blocks in the whole grid
    std::uint32_t threads = 1;  ///< per block; the host backend always runs one
    /// how long a block occupies its SM where time is modelled; ignored elsewhere
    ns hold{};
};

/// The first argument of a kernel. Kernels are written once, as thread-strided loops that are
/// correct for any `num_threads() >= 1`:
///   for (auto i = ctx.thread_rank(); i < n; i += ctx.num_threads()) ...
///   sync()          barrier of all threads of the block
///   backoff(n)      call it while polling for another block, for the nth time: yields the SM's
///                   core
///   now()           ns of the clock that deadlines inside kernels belong to: the steady clock, or
///                   a device's own
template <class C>
concept kernel_context = requires(C& c, const C& cc, std::uint32_t n) {
    { cc.block_rank() } noexcept -> std::same_as<std::uint32_t>;
    { cc.num_blocks() } noexcept -> std::same_as<std::uint32_t>;
    { cc.thread_rank() } noexcept -> std::same_as<std::uint32_t>;
    { cc.num_threads() } noexcept -> std::same_as<std::uint32_t>;
    { c.sync() } noexcept;
    { c.backoff(n) } noexcept;
    { cc.now() } noexcept -> std::same_as<std::int64_t>;
};

/// A kernel: called once per thread with its context. Copied at the launch, so the arguments travel
/// inside it.
template <class K, class Context>
concept kernel_for = kernel_context<Context> && std::copy_constructible<K> && requires(const K& k, Context& c) { k(c); };

namespace detail {
/// The kernel that concept checks launch.
struct empty_kernel {
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class C>
    GPUSHARE_HD void operator()(C&) const noexcept {}
};
}  // namespace detail

/// A stream that launches kernels. `launch_cooperative` starts all blocks together or fails with
/// errc::too_many_blocks, because blocks that wait for each other would otherwise hang.
///   max_cooperative_blocks(kernel, threads)   the most blocks of `threads` threads that such a
///                                             launch may have: on a device it depends on the
///                                             kernel's resources
template <class S>
concept launcher = timeline<S> && requires(S& s, const S& cs, grid g, detail::empty_kernel k, std::uint32_t threads) {
    typename S::context;
    requires kernel_context<typename S::context>;
    s.launch(g, k);
    { s.launch_cooperative(g, k) } -> std::same_as<errc>;
    { cs.max_cooperative_blocks(k, threads) } noexcept -> std::same_as<std::uint32_t>;
};

/// Any type that hands out memory and takes it back, including std::pmr::memory_resource.
/// `allocate` throws std::bad_alloc or a class derived from it.
template <class R>
concept memory_resource = requires(R& r, void* p, std::size_t size, std::size_t alignment) {
    { r.allocate(size, alignment) } -> std::same_as<void*>;
    r.deallocate(p, size, alignment);
};

class close_token;  // closing.hpp

/// The interface between an adaptor and the memory below it. Every allocator of this library models
/// it, and so does every backend's memory; as_upstream() makes one of a plain memory_resource.
///   try_allocate(size, alignment, why)   null instead of an exception; `why`, unless it is null,
///                                        gets the reason
///   deallocate(p, size, alignment)       errc::none: the block is back, or goes back by itself.
///                              After any other code nothing has happened. After unknown_block,
///                              wrong_size or closed, no later free of the block succeeds, either,
///                              so a resource drops its record of the block. After all other codes
///                              the block stays allocated, and a later free may succeed
///                              (submission_failed, capturing). Don't use the block until then: it
///                              may be overwritten
///   charged(size, alignment)   bytes that such an allocation really takes; bytes::max() if it can
///                              never be granted
///   refuses(size, alignment)   why it can't be granted even if all is freed (size_overflow,
///                              bad_alignment, over_quota, out_of_memory, closed); errc::none if it
///                              could be. Takes locks: not for a hot path
///   largest_free()             the largest block at a multiple of 256 bytes that is free now;
///                              bytes::max() of memory that doesn't say
///   owner()                    the tenant that the memory is charged to; empty if unknown
///   closing()                  the token that closes before the memory goes (closing.hpp); empty
///                              for memory that never closes. Closed memory refuses with
///                              errc::closed. A resource that keeps some of the memory registers a
///                              close_callback there, to give that memory back first
template <class R>
concept upstream = memory_resource<R> && requires(R& r, const R& c, void* p, std::size_t size, std::size_t alignment,
                                                  failure* why) {
    { r.try_allocate(size, alignment, why) } noexcept -> std::same_as<void*>;
    { r.deallocate(p, size, alignment) } noexcept -> std::same_as<errc>;
    { c.charged(size, alignment) } noexcept -> std::same_as<bytes>;
    { c.refuses(size, alignment) } noexcept -> std::same_as<failure>;
    { c.largest_free() } noexcept -> std::same_as<bytes>;
    { c.owner() } noexcept -> std::convertible_to<std::string_view>;
    { c.closing() } noexcept -> std::same_as<close_token>;
};

/// A notification that a block is back in its upstream: `tell(to, size)` is called then, on any
/// thread and under no lock. No call if `tell` is null.
struct when_back {
    void (*tell)(void* to, bytes size) noexcept = nullptr;  ///< The function to call.
    void* to = nullptr;                                     ///< Passed on.
    /// Passed on: the bytes that the block took.
    bytes size{};
};

/// An upstream that gets a block back only some time after deallocate() returns, for example
/// because it scrubs the block first. The block stays charged until it is back. Then the note
/// credits the quota above.
///   deallocate_then(p, size, alignment, note)   as deallocate; the note is told once the block is
///                                               back, unless it failed
///   returned()     how many blocks have come back so far
///   settle(seen)   collects the blocks that can come back now. True if a block has come back since
///                  returned() was `seen`, which is then up to date: allocate again
template <class R>
concept deferring_upstream = upstream<R> && requires(R& r, void* p, std::size_t size, when_back note, std::uint64_t& seen) {
    { r.deallocate_then(p, size, size, note) } noexcept -> std::same_as<errc>;
    { r.returned() } noexcept -> std::same_as<std::uint64_t>;
    { r.settle(seen) } noexcept -> std::same_as<bool>;
};

/// The memory of a device, or a part of it with the same interface. Safe from any thread.
///   try_allocate(size, alignment)   null if there is no memory
///   capacity()                      bytes of the device
///   taken_by_others()               of these, bytes that no allocation from here accounts for;
///                                   never too few
template <class M>
concept memory = upstream<M> && requires(M& m, const M& c, std::size_t size, std::size_t alignment) {
    { m.try_allocate(size, alignment) } noexcept -> std::same_as<void*>;
    { c.capacity() } noexcept -> std::same_as<bytes>;
    { c.taken_by_others() } noexcept -> std::same_as<bytes>;
};

/// Device memory with separate address ranges and physical chunks, so that a chunk moves from one
/// range to another without a copy. Safe from any thread. A `range` (addresses without memory) and
/// a `chunk` (granularity() bytes without an address) are freed by their destructors; before that,
/// everything mapped must be unmapped.
///   granularity()     bytes of a chunk; ranges begin at, and are as big as, a multiple of it
///   reserve(size)     a range of `size` bytes
///   create()          a chunk; `fresh_is_zero` says whether it holds nothing of earlier users
///   map(at, chunk)    maps the chunk to `at`, in a range, where nothing is mapped: readable and
///                     writable
///   unmap(at, size)   unmaps one or several whole chunks side by side. Not stream-ordered: no work
///                     may use them any more. An error changes nothing.
template <class V>
concept virtual_memory = requires(V& v, const V& cv, const typename V::range& r, const typename V::chunk& c, void* at,
                                  std::size_t size) {
    requires std::movable<typename V::range> && std::movable<typename V::chunk>;
    { r.data() } noexcept -> std::same_as<void*>;
    { cv.granularity() } noexcept -> std::same_as<bytes>;
    { V::fresh_is_zero } -> std::convertible_to<bool>;
    { v.reserve(size) } noexcept -> std::same_as<result<typename V::range>>;
    { v.create() } noexcept -> std::same_as<result<typename V::chunk>>;
    { v.map(at, c) } noexcept -> std::same_as<errc>;
    { v.unmap(at, size) } noexcept -> std::same_as<errc>;
};

/// A stream that moves bytes and waits for other streams of its node, all in its own order.
///   copy(to, from, size)   both reachable from the stream's device, without overlap; they must
///                          last until it is done
///   wait(point)            work that is enqueued later starts after `point`
template <class S>
concept copier = timeline<S> && requires(S& s, void* to, const void* from, std::size_t size,
                                         const typename S::point& p) {
    s.copy(to, from, size);
    s.wait(p);
};

/// A change to one counted resource that is made in two steps, so that several are made together or
/// not at all.
///   prepare()   errc::none: the change can be made, and other requests for the resource wait from
///               now on. Otherwise nothing happened, and the figures say why
///   commit(), abandon()   after a successful prepare, from the same thread: makes the change, or
///                         doesn't; waiters continue
///   resource()  identifies the resource: two changes of one resource can't be prepared at once
template <class C>
concept prepared_change = std::movable<C> && requires(C& c, const C& cc) {
    { c.prepare() } noexcept -> std::same_as<failure>;
    { c.commit() } noexcept;
    { c.abandon() } noexcept;
    { cc.resource() } noexcept -> std::same_as<const void*>;
};

/// The order in which work for several devices is enqueued. `enter` returns a guard, and waits
/// while another guard holds one of the devices. So two gangs are never enqueued on common devices
/// in different orders.
template <class G>
concept gang_order = requires(G& g, std::span<const device_id> devices) {
    { g.enter(devices) } -> std::movable;
};

/// How the SMs of a device can be split: into partitions made of units, where a unit is `unit` SMs.
/// See sm_split.hpp.
struct sm_split {
    std::uint32_t sms = 0;  ///< of the device; those beyond unit * units can be in no partition
    std::uint32_t unit = 0;  ///< SMs of a unit
    std::uint32_t units = 0;  ///< how many units there are
};

/// The tag of a stream on which no kernel ever runs, such as the library's own streams for
/// allocations and frees. Such a stream delays no other stream's kernels.
inline constexpr std::uint32_t kernel_free_tag = 0xffff'ffff;

/// Some SMs of a device: kernels of the partition's streams run on these SMs and on no others. The
/// partition lasts until its streams are gone.
template <class P, class Stream>
concept sm_partition_for = std::movable<P> && requires(P& p, const P& c, priority level, std::uint32_t tag) {
    { c.sms() } noexcept -> std::same_as<std::uint32_t>;
    { p.make_stream(level, tag) } -> std::same_as<Stream>;
};

/// One device, as a place where streams come from.
template <class D>
concept stream_source = requires(D& d, priority level, std::uint32_t tag) {
    requires timeline<typename D::stream>;
    { d.make_stream(level, tag) } -> std::same_as<typename D::stream>;
};

/// A device whose SMs can be split. Safe from any thread.
///   make_stream(level, tag)   a stream in no partition: its kernels run on every SM, those of
///                             partitions too
///   split()        how it can be split; throws operation_error (not_supported) where the driver
///                  can't
///   partition(n)   partitions of n[i] SMs, disjoint from each other and from existing ones; all or
///                  none. Throws operation_error: not_whole if one isn't a multiple of the unit,
///                  too_few_sms, not_supported
///   outside_any_partition()   the tags of streams in no partition that this process made, in
///                             order, but for kernel_free_tag
template <class D>
concept sm_partitionable = stream_source<D> && requires(D& d, const D& c, std::span<const std::uint32_t> sms) {
    requires sm_partition_for<typename D::partition_type, typename D::stream>;
    { c.split() } -> std::same_as<sm_split>;
    { d.partition(sms)[0] } -> std::same_as<typename D::partition_type&>;
    { c.outside_any_partition()[0] } -> std::convertible_to<std::uint32_t>;
};

/// The part of its device that the work of a stream used. Only the SMs that the stream may use
/// count.
struct sm_use {
    ns time{};         ///< SM time / the number of SMs: half of them busy for 2 ms is 1 ms
    /// the part of these SMs that it could fill, in the mean of that time; not known if nothing ran
    sm_width width{};
};

/// The part of its stream's SMs that a submission's launches can fill, as the stream noted it.
struct sm_fill {
    sm_width width{};     ///< of the widest launch; not known where none was noted
    bool opaque = false;  ///< there may be launches that the stream didn't note

    friend constexpr bool operator==(sm_fill, sm_fill) = default;
};

/// A point that reports when it was reached, by its node's clock.
template <class P>
concept dated_point = timeline_point<P> && requires(const P& p) {
    { reached_at(p) } noexcept -> std::same_as<instant>;
};

/// A point whose waits report the last time, by the node's clock, at which they looked and found no
/// point reached. Without such a look the time stays unchanged. The caller then knows how late, at
/// most, it noticed the end of the work. Not used for interruptible points.
template <class P>
concept looking_point = timeline_point<P> && requires(std::span<const P> any, instant deadline, instant& pending_at) {
    { P::wait_any(any, deadline, pending_at) } -> std::same_as<bool>;
};

/// A timeline that reports how much of the device its work used between two of its reached points.
template <class S>
concept sm_timeline = timeline<S> && requires(const typename S::point& a, const typename S::point& b) {
    { used_between(a, b) } noexcept -> std::same_as<sm_use>;
};

/// A timeline whose kernels can yield their SM to more urgent kernels; see yield_point().
template <class S>
concept yielding_timeline = timeline<S> && requires { requires S::yields; };

/// A node: the devices that one process reaches, each with memory and streams.
template <class N>
concept node = requires(N& n, const N& c, device_id d, priority p, std::uint32_t tag) {
    typename N::stream;
    typename N::memory_type;
    requires timeline<typename N::stream>;
    requires memory<typename N::memory_type>;
    { c.num_devices() } noexcept -> std::same_as<std::uint32_t>;
    { n.memory(d) } -> std::same_as<typename N::memory_type&>;
    // tag: the owner, in ledgers and traces
    { n.make_stream(d, p, tag) } -> std::same_as<typename N::stream>;
    { c.get_clock() } -> clock;
    { n.gangs() } -> gang_order;
};

// clang-format on

/// A preemption point. Long work calls this function between its parts (tokens, layers, chunks), on
/// the thread that runs the work. Pass the work's permit, the stream that its callable was given,
/// or its kernel context; an engine's callback can capture one of these. If work of a higher level
/// waits for the SM, and the backend supports yielding (host::kernel_context::yield), that work
/// goes first. Returns whether other work went first. If no such work waits, a call costs one or
/// two loads. client_settings::yields_within states how often the work calls this function.
template <class Permit>
bool yield_point(Permit& permit) noexcept {
    if constexpr (requires { permit.yield(); })
        return permit.yield();
    else
        return false;
}

/// Points that are always reached, for tests and for work that completes immediately.
struct immediate_point {
    /// Always.
    [[nodiscard]] static constexpr bool reached() noexcept { return true; }
    /// Doesn't wait.
    static constexpr bool wait(instant) noexcept { return true; }
    /// Doesn't wait.
    static constexpr bool wait_any(std::span<const immediate_point>, instant) noexcept { return true; }
    /// None.
    [[nodiscard]] static constexpr errc status() noexcept { return errc::none; }
    /// None.
    friend constexpr ns elapsed(const immediate_point&, const immediate_point&) noexcept { return ns{0}; }
};
static_assert(timeline_point<immediate_point>);

/// The limit of a wait: until `deadline` by `time`, or until a stop is requested.
template <clock Clock>
struct patience {
    Clock time{};              ///< the clock of the deadline
    instant deadline = never;  ///< when to give up
    std::stop_token stop{};    ///< gives up when a stop is requested
};
/// In place of a patience: the call doesn't wait.
struct no_patience {};
namespace detail {
template <class T>
inline constexpr bool is_patience = false;
template <class Clock>
inline constexpr bool is_patience<patience<Clock>> = true;

/// The clock of an object that tells the time, by now() or when called. The object must outlive it.
template <class T>
class clock_of {
public:
    explicit clock_of(const T& of) noexcept : of_(&of) {}
    [[nodiscard]] instant now() const noexcept {
        if constexpr (std::invocable<const T&>)
            return (*of_)();
        else
            return of_->now();
    }

private:
    const T* of_;
};
}  // namespace detail
/// Waits without limit.
template <class Clock>
patience(Clock) -> patience<Clock>;
/// Until a deadline.
template <class Clock>
patience(Clock, instant) -> patience<Clock>;
/// Until a deadline or a stop.
template <class Clock>
patience(Clock, instant, std::stop_token) -> patience<Clock>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
