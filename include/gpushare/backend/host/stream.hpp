// SPDX-License-Identifier: Apache-2.0
// A stream of a host device: work on one stream runs in order, and work on different streams
// overlaps.
//
//   gpushare::host::stream s = node.make_stream(gpushare::device_id{0}, gpushare::priority{1});
//   s.launch({.blocks = 8, .hold = 250us}, [=](auto& ctx) { out[ctx.block_rank()] = f(ctx.block_rank()); });
//   // hold: how long each block keeps its SM where time is modelled
//   s.record().wait(gpushare::never);
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include <gpushare/backend/host/detail/engine.hpp>
#include <gpushare/backend/host/kernel_context.hpp>
#include <gpushare/backend/host/point.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/detail/inplace_function.hpp>
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

    /// The point after everything enqueued so far. On an idle stream it is reached at once.
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
        /// The outcome of the work. Query it once a point behind the work is reached.
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
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
