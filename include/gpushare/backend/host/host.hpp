// SPDX-License-Identifier: Apache-2.0
// The host backend: a software node with N devices, each with memory, SMs and streams, in this
// process. The node behaves like hardware in all that matters to a scheduler (order, priorities,
// occupancy, capacity, failures), and keeps a ledger of its blocks.
//
//   #include <gpushare/backend/host/host.hpp>
//   gpushare::host::node node{{.devices = 2, .memory = 8_GiB, .sms = 4, .timing = gpushare::host::timing::modelled}};
//   gpushare::host::stream s = node.make_stream(gpushare::device_id{0}, gpushare::priority{1}, /*tag=*/7);
//
// Work on one stream runs in order, and work on different streams overlaps.
//
//   s.launch({.blocks = 8, .hold = 250us}, [=](auto& ctx) { out[ctx.block_rank()] = f(ctx.block_rank()); });
//   // hold: how long each block keeps its SM where time is modelled
//   s.record().wait(gpushare::never);
//
// The blocks of an SM partition's streams run on its SMs only, as the ledger shows. Streams made by
// the node itself run on all SMs, so tenants are protected from each other only if every tenant is
// in a partition.
//
//   gpushare::host::device_sms sms{node, gpushare::device_id{0}};
//   auto parts = sms.partition(gpushare::equal_sms(sms.split(), 2));
//   gpushare::host::stream on_half = parts[0].make_stream(gpushare::priority{1}, /*tag=*/7);
//
// Blocks of stream-ordered memory are freed in the order of a stream, and their pool keeps them for
// later requests, as CUDA's own pools do.
//
//   gpushare::host::memory_pool pool{node, gpushare::device_id{0}};
//   void* p = pool.allocate(s, 1_MiB);     s.launch(shape, kernel);     pool.deallocate(s, p);
//
// For tests, faults can be injected into a device. For a fault of a kernel, let the kernel throw.
//
//   node.faults(gpushare::device_id{0}).fail_allocations(10, 1);  // the 11th fails
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <sys/prctl.h>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/backend/host/detail/engine.hpp>
#include <gpushare/backend/host/kernel_context.hpp>
#include <gpushare/backend/host/ledger.hpp>
#include <gpushare/backend/host/memory.hpp>
#include <gpushare/backend/host/point.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/device_order_lock.hpp>
#include <gpushare/detail/gang_residents.hpp>
#include <gpushare/detail/inplace_function.hpp>
#include <gpushare/detail/stable_list.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {

class fault_injector;

namespace detail {

/// Splits [0, size) over the blocks of a grid, to the byte.
struct chunk {
    std::size_t begin, end;
    chunk(const kernel_context& ctx, std::size_t size) noexcept {
        const std::size_t each = size / ctx.num_blocks(), rest = size % ctx.num_blocks();
        begin = ctx.block_rank() * each + std::min<std::size_t>(ctx.block_rank(), rest);
        end = begin + each + (ctx.block_rank() < rest ? 1 : 0);
    }
};

struct copy_kernel {
    std::byte* to;
    const std::byte* from;
    std::size_t size;
    void operator()(const kernel_context& ctx) const noexcept {
        const chunk part{ctx, size};
        if (part.begin != part.end) std::memcpy(to + part.begin, from + part.begin, part.end - part.begin);
    }
};

struct fill_kernel {
    std::byte* to;
    std::byte value;
    std::size_t size;
    void operator()(const kernel_context& ctx) const noexcept {
        const chunk part{ctx, size};
        std::fill(to + part.begin, to + part.end, value);
    }
};

}  // namespace detail

/// A stream of a host device. Safe from any thread; each thread's work stays in order. Enqueuing
/// doesn't wait. If work fails later, `status()` of the next point has the code. Work queued when
/// the stream is destroyed still runs, and work enqueued after the node is gone fails with
/// errc::device_lost. Enqueuing throws std::bad_alloc only if more operations are in flight than
/// ever before.
class stream {
public:
    /// The type that record() returns.
    using point = host::point;
    /// The context that kernels get.
    using context = kernel_context;
    /// Kernels can yield: see yield().
    static constexpr bool yields = true;

    stream(stream&&) noexcept = default;
    /// Closes the old stream, whose queued work still runs.
    stream& operator=(stream other) noexcept {  // by value: the old stream is closed now
        std::swap(engine_, other.engine_);
        std::swap(state_, other.state_);
        return *this;
    }
    ~stream() {
        if (engine_ != nullptr) engine_->close_stream(*state_);
    }

    /// Enqueues `g.blocks` blocks of `kernel`, which is copied; up to 256 bytes without allocating.
    /// A grid of no blocks does nothing. A kernel that throws fails alone, and the work after it
    /// runs.
    template <kernel_for<kernel_context> K>
    void launch(grid g, const K& kernel) {
        enqueue_kernel(g, kernel, false);
    }

    /// Chosen only to explain a wrong kernel.
    template <class K>
    requires(!kernel_for<K, kernel_context>) void launch(grid, const K&) {
        constexpr bool is_kernel = kernel_for<K, kernel_context>;
        static_assert(is_kernel, "gpushare: a kernel is called with its context, const: [](auto& ctx) { ... }");
    }

    /// The same, with all blocks starting together once as many SMs are free;
    /// `kernel_context::grid_sync` works. Enqueues nothing and returns errc::too_many_blocks if the
    /// stream's partition, or the device, has fewer SMs.
    template <kernel_for<kernel_context> K>
    errc launch_cooperative(grid g, const K& kernel) {
        if (g.blocks > max_cooperative_blocks()) return errc::too_many_blocks;
        enqueue_kernel(g, kernel, true);
        return errc::none;
    }
    /// The most blocks of a cooperative launch: one for each SM, for any kernel.
    template <kernel_for<kernel_context> K = gpushare::detail::empty_kernel>
    [[nodiscard]] std::uint32_t max_cooperative_blocks(const K& = {}, std::uint32_t /*threads*/ = 1) const noexcept {
        return state_->sms;
    }

    /// Enqueues opaque work that fills the device, or the stream's partition, for `length`: a block
    /// on every SM, with both timings.
    void enqueue(ns length);

    /// Enqueues a copy of `size` bytes between ranges that don't overlap. From 2 MiB on, the copy
    /// is split over the SMs, at least 1 MiB for each.
    void copy(void* to, const void* from, std::size_t size);

    /// Enqueues filling `size` bytes.
    void fill(void* to, std::byte value, std::size_t size);

    /// Makes work enqueued from now on wait until `p`, a point of any stream of this node, is
    /// reached. Throws operation_error: errc::different_nodes.
    void wait(const point& p);

    /// The point after everything enqueued so far. On an idle stream it is reached immediately.
    [[nodiscard]] point record() { return engine_->record(*state_); }
    /// A point to be recorded later by record(point&), once. It isn't reached before that. Throws
    /// std::bad_alloc.
    [[nodiscard]] point prepare() { return engine_->prepare(); }
    /// Records a point of prepare().
    void record(point& p) noexcept { engine_->record(*state_, p); }

    /// While this object exists, work enqueued on the stream is one piece of work: by the thread
    /// that made the object, and by threads without a piece of their own there. Points recorded
    /// meanwhile report on the part before them, and how_it_went() on the whole, whichever thread
    /// records points in between. Within another own_work of the same thread, the work is a part of
    /// that one. The stream must outlive it, and the thread that made it must end it. Throws
    /// std::bad_alloc.
    class own_work {
    public:
        /// Begins a piece of work on this stream.
        explicit own_work(stream& s) : engine_(*s.engine_), of_(*s.state_), begun_(engine_.begin_work(of_)) {}
        own_work(const own_work&) = delete;
        own_work& operator=(const own_work&) = delete;
        ~own_work() { engine_.end_work(of_, begun_); }
        /// The outcome of the work. Query it once a point after the work is reached.
        [[nodiscard]] outcome how_it_went() const noexcept { return begun_; }

    private:
        detail::engine& engine_;
        detail::stream_state& of_;
        outcome begun_;
    };

    /// As kernel_context::yield, called from the one running block of this stream: for an engine's
    /// callback, which has the stream and not the context. Elsewhere does nothing.
    bool yield() noexcept { return engine_->yield(*state_); }

    /// The stream's priority.
    [[nodiscard]] priority level() const noexcept { return state_->level; }
    /// The owner's tag, for the ledger.
    [[nodiscard]] std::uint32_t tag() const noexcept { return state_->tag; }
    /// The number of SMs on which its blocks run: those of its partition, or all of the device.
    [[nodiscard]] std::uint32_t sms() const noexcept { return state_->sms; }
    /// Whether the stream is in a partition.
    [[nodiscard]] bool in_partition() const noexcept { return state_->part != 0; }

private:
    friend class node;
    friend class sm_subset;
    friend fault_injector;

    /// An operation that is handed back if it isn't submitted.
    class prepared {
    public:
        explicit prepared(stream& s) : stream_(s), op_(&s.engine_->take_operation(*s.state_)) {
            op_->blocks = 0;
            op_->cooperative = false;
            op_->hold = ns{0};
        }
        prepared(const prepared&) = delete;
        prepared& operator=(const prepared&) = delete;
        ~prepared() {
            if (op_ != nullptr) stream_.engine_->hand_back(*op_);
        }
        detail::operation* operator->() const noexcept { return op_; }
        void submit() noexcept { stream_.engine_->submit(*stream_.state_, *std::exchange(op_, nullptr)); }

    private:
        stream& stream_;
        detail::operation* op_;
    };

    stream(std::shared_ptr<detail::engine> engine, detail::stream_state& state) noexcept
        : engine_(std::move(engine)), state_(&state) {}

    template <class K>
    void enqueue_kernel(grid g, const K& kernel, bool cooperative) {
        prepared op{*this};
        op->blocks = g.blocks;
        op->cooperative = cooperative;
        op->hold = std::max(g.hold, ns{0});
        if constexpr (std::same_as<K, gpushare::detail::empty_kernel>)
            // Opaque work, too: a worker that is woken only to find nothing to do would disturb
            // work on the same cores.
            if (engine_->options().timing == timing::modelled) return op.submit();
        if constexpr (gpushare::detail::fits_in_place<K, detail::kernel_capacity>)
            op->body = [kernel = K(kernel)](kernel_context& ctx) { kernel(ctx); };
        else
            op->body = [kernel = std::make_unique<const K>(kernel)](kernel_context& ctx) { (*kernel)(ctx); };
        op.submit();
    }

    [[nodiscard]] grid spread(std::size_t size) const noexcept {
        constexpr std::size_t worth_a_block = std::size_t{1} << 20;
        const std::size_t blocks = std::clamp<std::size_t>(size / worth_a_block, 1, state_->sms);
        return {.blocks = static_cast<std::uint32_t>(blocks)};
    }

    std::shared_ptr<detail::engine> engine_;
    detail::stream_state* state_ = nullptr;
};
static_assert(queue<stream>);
static_assert(launcher<stream>);
static_assert(sm_timeline<stream>);
static_assert(preparing_timeline<stream>);
static_assert(yielding_timeline<stream>);
static_assert(telling_timeline<stream>);

#if GPUSHARE_BODIES

GPUSHARE_INLINE void stream::enqueue(ns length) {
    prepared op{*this};
    op->blocks = state_->sms;
    op->hold = std::max(length, ns{0});
    op.submit();
}

GPUSHARE_INLINE void stream::copy(void* to, const void* from, std::size_t size) {
    launch(spread(size), detail::copy_kernel{static_cast<std::byte*>(to), static_cast<const std::byte*>(from), size});
}

GPUSHARE_INLINE void stream::fill(void* to, std::byte value, std::size_t size) {
    launch(spread(size), detail::fill_kernel{static_cast<std::byte*>(to), value, size});
}

GPUSHARE_INLINE void stream::wait(const point& p) {
    if (p.reached()) return;
    if (p.state()->hub.get() != &engine_->hub())
        throw operation_error(errc::different_nodes, {}, "a host stream can't wait for a point of another node");
    prepared op{*this};
    // relaxed: `p` keeps the state alive meanwhile.
    p.state()->references.fetch_add(1, std::memory_order_relaxed);
    op->awaited = p.state();
    op.submit();
}

#endif  // GPUSHARE_BODIES

}  // namespace host
namespace host {

/// Injects faults into a device. Safe from any thread.
class fault_injector {
public:
    /// After `after` more allocations, the next `count` are refused as if the memory were full.
    void fail_allocations(std::uint64_t after, std::uint64_t count) noexcept {
        memory().fail_allocations(after, count);
    }

    /// Lets others take device memory: `wanted` bytes in all, or all that is left if this is less.
    /// Returns how many bytes they have.
    bytes take_memory(bytes wanted) noexcept { return memory().take_for_others(wanted); }

    /// Stops the stream before its next operation. Work that has started ends; work behind it waits
    /// for `resume`.
    void stall(stream& s) noexcept { s.engine_->stall(*s.state_); }
    /// Ends a stall.
    void resume(stream& s) noexcept { s.engine_->resume(*s.state_); }

    /// Loses the device for good. Queued work fails with errc::device_lost. Running blocks end, and
    /// their work fails as well. Every later launch and allocation fails. All points are reached.
    void lose_device() noexcept { engine_->lose(device_); }

private:
    friend class node;
    fault_injector(std::shared_ptr<detail::engine> engine, std::uint32_t device) noexcept
        : engine_(std::move(engine)), device_(device) {}

    [[nodiscard]] device_memory& memory() noexcept { return engine_->device(device_).memory; }

    std::shared_ptr<detail::engine> engine_;
    std::uint32_t device_;
};

}  // namespace host
namespace host {

/// A node of software devices. The node *is* the hardware. The constructor starts one thread for
/// each SM. The destructor works like pulling the plug: it lets started blocks end, fails queued
/// work with errc::device_lost, reaches all points, and joins the threads. Streams and points may
/// outlive the node; its memory may not. Safe from any thread.
class node {
public:
    /// The type of a stream.
    using stream = host::stream;
    /// The type of a device's memory.
    using memory_type = device_memory;
    /// The clock: real time, with both timings.
    using clock_type = steady_clock;

    /// Makes a node. Throws operation_error (errc::invalid_specification) or std::system_error (too
    /// many threads).
    explicit node(const node_options& options);
    node(const node&) = delete;
    node& operator=(const node&) = delete;
    ~node();

    /// The number of devices.
    [[nodiscard]] std::uint32_t num_devices() const noexcept { return options().devices; }
    /// The options given to the constructor.
    [[nodiscard]] const node_options& options() const noexcept { return engine_->options(); }
    /// The clock of deadlines and spans.
    [[nodiscard]] steady_clock get_clock() const noexcept { return {}; }
    /// The order in which gangs are enqueued.
    [[nodiscard]] gpushare::detail::gang_residents<point>& gangs() noexcept { return gangs_; }

    // The following functions throw operation_error (errc::no_device) if there is no such device.

    /// The device's memory. Throws operation_error (no_device), as do all functions with a device.
    [[nodiscard]] device_memory& memory(device_id d) { return at(d).memory; }
    /// The record of blocks that ran on the device.
    [[nodiscard]] host::ledger& ledger(device_id d) { return at(d).ledger; }
    /// Injects faults into the device, for tests.
    [[nodiscard]] fault_injector faults(device_id d) { return {engine_, checked(d)}; }
    /// Whether the device is lost.
    [[nodiscard]] bool lost(device_id d) const { return at(d).lost.load(std::memory_order_acquire); }
    /// Makes a stream. Its work has priority `level`, is recorded with `tag` in the ledger, and
    /// runs on all SMs, partitioned or not.
    [[nodiscard]] stream make_stream(device_id d, priority level = {}, std::uint32_t tag = 0) {
        return {engine_, engine_->open_stream(checked(d), level, tag)};
    }

private:
    friend class device_sms;

    /// The threads. A member by itself, so that the started threads end if starting another one
    /// fails.
    class crew {
    public:
        explicit crew(detail::engine& e) noexcept : engine_(e) {}
        crew(const crew&) = delete;
        crew& operator=(const crew&) = delete;
        ~crew();
        void hire(std::size_t n);

    private:
        detail::engine& engine_;
        gpushare::detail::stable_list<std::thread> threads_;
    };

    static const node_options& checked(const node_options& o);
    [[nodiscard]] std::uint32_t checked(device_id d) const;
    [[nodiscard]] detail::device_state& at(device_id d) const { return engine_->device(checked(d)); }

    const std::shared_ptr<detail::engine> engine_;
    gpushare::detail::gang_residents<point> gangs_;
    crew crew_;
};
static_assert(gpushare::node<node>);

#if GPUSHARE_BODIES

GPUSHARE_INLINE node::~node() = default;

GPUSHARE_INLINE node::crew::~crew() {
    engine_.shut_down();
    for (std::thread& t : threads_) t.join();
}

GPUSHARE_INLINE void node::crew::hire(std::size_t n) {
    while (threads_.size() < n) {
        threads_.emplace_back([&e = engine_] {
            // Timers fire on time, not up to 50 us later.
            ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
            e.work();
        });
    }
}

GPUSHARE_INLINE node::node(const node_options& options)
    : engine_(std::make_shared<detail::engine>(checked(options))), gangs_(options.devices), crew_(*engine_) {
    crew_.hire(std::size_t{options.devices} * options.sms);
}

GPUSHARE_INLINE auto node::checked(const node_options& o) -> const node_options& {
    if (o.devices == 0 || o.devices > gpushare::detail::device_order_lock::max_devices || o.sms == 0 || o.sm_unit == 0)
        throw operation_error(errc::invalid_specification, {},
                              "a host node needs 1 to 1024 devices of 1 or more SMs, in units of 1 or more");
    return o;
}

GPUSHARE_INLINE std::uint32_t node::checked(device_id d) const {
    if (d.index >= num_devices())
        raise({.code = errc::no_device, .asked = d.index, .limit = num_devices()}, {}, "host node");
    return d.index;
}

#endif  // GPUSHARE_BODIES

}  // namespace host
namespace host {

/// A partition: some SMs of a device. Movable; one owner; safe from any thread. The SMs are in no
/// partition again when this object and its streams are gone.
class sm_subset {
public:
    sm_subset(sm_subset&&) noexcept = default;
    /// Gives back the SMs that this object had.
    sm_subset& operator=(sm_subset other) noexcept {  // by value: the old SMs are given back now
        std::swap(engine_, other.engine_);
        std::swap(device_, other.device_);
        std::swap(part_, other.part_);
        std::swap(sms_, other.sms_);
        return *this;
    }
    ~sm_subset() {
        if (engine_ != nullptr) engine_->leave_partition(device_, part_);
    }

    /// The number of SMs.
    [[nodiscard]] std::uint32_t sms() const noexcept { return sms_; }
    /// A stream in the subset; see node::make_stream.
    [[nodiscard]] stream make_stream(priority level = {}, std::uint32_t tag = 0) {
        return {engine_, engine_->open_stream(device_, level, tag, part_)};
    }

private:
    friend class device_sms;
    sm_subset(std::shared_ptr<detail::engine> e, std::uint32_t device, std::uint32_t part, std::uint32_t sms) noexcept
        : engine_(std::move(e)), device_(device), part_(part), sms_(sms) {}

    std::shared_ptr<detail::engine> engine_;
    std::uint32_t device_, part_, sms_;
};

/// The SMs of a device as a handle: copies refer to the same SMs. Safe from any thread; the node
/// must outlive it.
class device_sms {
public:
    /// The device's stream type.
    using stream = host::stream;
    /// The type of a partition.
    using partition_type = sm_subset;

    /// The SMs of device `d`. Throws operation_error (no_device).
    device_sms(node& on, device_id d) : node_(&on), device_(d) { (void)on.checked(d); }

    /// Makes a stream in no partition: its kernels run on every SM.
    [[nodiscard]] stream make_stream(priority level = {}, std::uint32_t tag = 0) {
        return node_->make_stream(device_, level, tag);
    }
    /// How the SMs can be split, by the node's options.
    [[nodiscard]] sm_split split() const noexcept { return node_->engine_->split(); }
    /// Makes partitions of the lowest SMs that are in none. Other blocks that run on these SMs end
    /// first. See sm_partitionable.
    [[nodiscard]] std::vector<sm_subset> partition(std::span<const std::uint32_t> sms) {
        std::vector<sm_subset> subsets;
        subsets.reserve(sms.size());
        const auto parts = node_->engine_->open_partitions(device_.index, sms);
        for (std::size_t i = 0; i < sms.size(); ++i)
            subsets.push_back(sm_subset(node_->engine_, device_.index, parts[i], sms[i]));
        return subsets;
    }
    /// The tags of streams in no partition. A destroyed stream counts while its work runs.
    [[nodiscard]] std::vector<std::uint32_t> outside_any_partition() const {
        return node_->engine_->outside_any_partition(device_.index);
    }

private:
    node* node_;
    device_id device_;
};
static_assert(sm_partitionable<device_sms>);

}  // namespace host
namespace host {

/// A pool's bytes: `reserved` of the device, `used` of that in allocated blocks.
struct memory_pool_usage {
    bytes reserved{};  ///< taken from the device
    bytes used{};      ///< the bytes in allocated blocks
};

/// A pool of device memory. Neither copied nor moved. Safe from any thread. The node must outlive
/// it. The destructor frees blocks that are still allocated.
class memory_pool {
public:
    /// The alignment of blocks, as with cudaMallocAsync.
    static constexpr std::size_t natural_alignment = 256;

    /// An empty pool. Throws operation_error (no_device).
    memory_pool(node& on, device_id d) : memory_(&on.memory(d)) {}
    memory_pool(const memory_pool&) = delete;
    memory_pool& operator=(const memory_pool&) = delete;
    /// Waits until streams have reached pending frees.
    ~memory_pool();

    /// `size` bytes for work enqueued from now on: from the device, or a block of this size whose
    /// free is reached. Throws memory_error as the device's memory does.
    [[nodiscard]] void* allocate(stream& s, byte_count size, std::size_t alignment = natural_alignment);
    /// Returns null if `allocate` would throw; `why`, unless null, receives the reason.
    [[nodiscard]] void* try_allocate(stream& /*s*/, byte_count size, std::size_t alignment = natural_alignment,
                                     failure* why = nullptr) noexcept;

    /// Frees the block once `s` has reached this point. unknown_block if the block isn't allocated.
    /// Null is ignored.
    errc deallocate(stream& s, void* p) noexcept;

    /// The bytes that a block takes; bytes::max() if no device can have it.
    [[nodiscard]] bytes charged(byte_count size, std::size_t alignment) const noexcept;
    /// The pool's present bytes.
    [[nodiscard]] memory_pool_usage usage() const noexcept;
    /// Returns free blocks, whose frees are reached, to the device.
    void trim() noexcept;

private:
    struct block {
        std::size_t size = 0, alignment = 0;
        friend bool operator==(const block&, const block&) = default;
    };
    struct kept {
        void* at;
        block what;
        point freed;
    };

    device_memory* memory_;
    mutable std::mutex mutex_;
    std::unordered_map<void*, block> out_;
    std::vector<kept> kept_;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE memory_pool::~memory_pool() {
    for (auto& [p, b] : out_) (void)memory_->deallocate(p, b.size, b.alignment);
    for (auto& k : kept_) {
        (void)k.freed.wait(never);
        (void)memory_->deallocate(k.at, k.what.size, k.what.alignment);
    }
}

GPUSHARE_INLINE void* memory_pool::allocate(stream& s, byte_count size, std::size_t alignment) {
    failure why;
    void* const p = try_allocate(s, size, alignment, &why);
    if (p == nullptr) raise(why, {}, "allocating from a memory pool");
    return p;
}

GPUSHARE_INLINE void* memory_pool::try_allocate(stream& /*s*/, byte_count size, std::size_t alignment,
                                                failure* why) noexcept try {
    const std::lock_guard lock(mutex_);
    const block wanted{size, alignment};
    const auto again =
        std::ranges::find_if(kept_, [&](const kept& k) { return k.what == wanted && k.freed.reached(); });
    if (again != kept_.end()) {
        void* const p = again->at;
        out_.emplace(p, wanted);
        kept_.erase(again);
        return p;
    }
    void* const p = memory_->try_allocate(size, alignment, why);
    if (p == nullptr) return nullptr;
    try {
        out_.emplace(p, wanted);
    } catch (...) {
        (void)memory_->deallocate(p, size, alignment);
        throw;
    }
    return p;
} catch (...) {
    if (why != nullptr) *why = gpushare::detail::no_host_memory;
    return nullptr;
}

GPUSHARE_INLINE errc memory_pool::deallocate(stream& s, void* p) noexcept {
    if (p == nullptr) return errc::none;
    const std::lock_guard lock(mutex_);
    const auto at = out_.find(p);
    if (at == out_.end()) return errc::unknown_block;
    try {
        kept_.push_back({p, at->second, s.record()});
    } catch (...) {
        return errc::out_of_memory;  // the host's memory; the block is still allocated
    }
    out_.erase(at);
    return errc::none;
}

GPUSHARE_INLINE bytes memory_pool::charged(byte_count size, std::size_t alignment) const noexcept {
    return memory_->charged(size, alignment);
}

GPUSHARE_INLINE auto memory_pool::usage() const noexcept -> memory_pool_usage {
    const std::lock_guard lock(mutex_);
    memory_pool_usage u;
    for (const auto& [p, b] : out_) u.used += charged(b.size, b.alignment);
    u.reserved = u.used;
    for (const auto& k : kept_) u.reserved += charged(k.what.size, k.what.alignment);
    return u;
}

GPUSHARE_INLINE void memory_pool::trim() noexcept {
    const std::lock_guard lock(mutex_);
    std::erase_if(kept_, [&](const kept& k) {
        return k.freed.reached() && memory_->deallocate(k.at, k.what.size, k.what.alignment) == errc::none;
    });
}

#endif  // GPUSHARE_BODIES

}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
