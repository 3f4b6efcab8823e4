// SPDX-License-Identifier: Apache-2.0
// The plain data of the host node's engine: what a stream's queue holds, what an SM is doing, and a
// device's state.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <thread>
#include <vector>

#include <gpushare/backend/host/detail/scheduler.hpp>
#include <gpushare/backend/host/kernel_context.hpp>
#include <gpushare/backend/host/ledger.hpp>
#include <gpushare/backend/host/memory.hpp>
#include <gpushare/backend/host/point.hpp>
#include <gpushare/detail/inplace_function.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {
namespace detail {

/// Kernels up to this size are stored inside the operation. Bigger ones are allocated at each
/// launch.
inline constexpr std::size_t kernel_capacity = 256;

/// The most blocks that an SM claims at once.
inline constexpr std::uint32_t largest_batch = 16;

/// One entry of a stream: a kernel, opaque work (a kernel without a body), or a wait for a point.
/// Pooled.
struct operation {
    operation* next = nullptr;
    stream_state* stream = nullptr;
    // The request: fixed once it is submitted.
    gpushare::detail::inplace_function<void(kernel_context&), kernel_capacity> body;
    point_state* awaited = nullptr;  // owns a reference
    outcome_state* owner = nullptr;  // the owner of the work; owns a reference
    bool for_another = false;        // enqueued by a thread without work of its own there
    std::uint32_t blocks = 0;
    bool cooperative = false;
    ns hold{};
    // Progress, under the node's lock.
    std::uint32_t wanted = 0;  // blocks to run: fewer than requested once the device is lost
    std::uint32_t claimed = 0, ended = 0;
    instant not_before{};  // when it was submitted, or when its stream was resumed
    instant ready{}, end{};
    instant start{};  // the start of all blocks, if cooperative
    errc status = errc::none;
    std::exception_ptr exception;
    // Points that are reached when it is done; owns a reference to each.
    gpushare::detail::fifo<point_state> points;
    // Shared by the workers that run its blocks.
    std::atomic<std::uint32_t> unexecuted{0};
    grid_barrier barrier;
};

struct device_state;

/// An SM and its present work. While the SM has work, only its own worker writes `edges`.
struct sm_state {
    sm_state* next = nullptr;
    device_state* device = nullptr;
    std::uint32_t index = 0;
    operation* work = nullptr;  // null: the SM is free
    std::uint32_t first = 0, count = 0;
    // The order of claims: blocks that end at one instant end in the order in which they started.
    std::uint64_t order = 0;
    std::thread::id runner{};  // its worker, while the worker computes
    instant free_since{};
    // Block i of the claim runs from edges[i] to edges[i + 1].
    std::array<instant, largest_batch + 1> edges{};

    [[nodiscard]] instant end() const noexcept { return edges[count]; }
};

struct stream_state {
    // Links streams that wait for a point, or that are about to start.
    stream_state* next = nullptr;
    device_state* device = nullptr;
    priority level{};
    std::uint32_t tag = 0;
    std::uint32_t part = 0;  // the group of SMs on which it runs; 0: all SMs
    std::uint32_t sms = 0;   // the number of these SMs; never changes
    std::size_t index = 0;   // the index among the engine's streams
    gpushare::detail::fifo<operation> queue;
    bool busy = false;     // the head is offered, running, or waits for a point
    bool stalled = false;  // the head must not start
    // The stream has no handle any more, and is removed when its queue is empty.
    bool closed = false;
    instant last_end{};
    ns used{};  // SM time of all its blocks that have ended
    // The same, with each block's time multiplied by the part of the SMs that its kernel could
    // fill.
    double wide = 0;
    // The first failure since the last point that belongs to no own_work. Once that point is
    // reached, the failure stays until other work is done.
    errc status = errc::none;
    std::exception_ptr exception;
    bool told = false;                // whether that point is reached
    outcome_state* latest = nullptr;  // the work that began last, linked to other work under way
    // An operation at hand for the next launch, so that a launch takes the lock once.
    std::atomic<operation*> spare{nullptr};
};

struct device_state {
    explicit device_state(const node_options& o)
        : order(o.sms, o.timing == timing::real ? largest_batch : 1),
          sms(o.sms),
          memory({.capacity = o.memory,
                  .taken = o.taken,
                  .granularity = o.granularity,
                  .guarded = o.guarded,
                  .stale = o.stale}),
          ledger(o.ledger_capacity) {
        for (std::uint32_t i = 0; i < o.sms; ++i) {
            sms[i].device = this;
            sms[i].index = i;
        }
    }

    /// Since when all free SMs for streams of `part` have been free.
    [[nodiscard]] instant all_free_since(std::uint32_t part) const noexcept {
        instant latest{};
        for (const sm_state& sm : sms)
            if (sm.work == nullptr && (part == 0 || order.group_of(sm.index) == part))
                latest = std::max(latest, sm.free_since);
        return latest;
    }

    scheduler<operation*> order;
    std::vector<sm_state> sms;
    // The users of each group of SMs that was set apart: its handle and its streams.
    gpushare::detail::plain_list<std::size_t> users;
    device_memory memory;
    host::ledger ledger;
    // The highest waiting level, for blocks that may yield.
    std::atomic<std::int32_t> waiting{std::numeric_limits<std::int32_t>::min()};
    std::atomic<bool> lost{false};  // written under the node's lock, read by kernels
    instant lost_since{};
};

/// The blocks that occupy an SM until a known instant, soonest first.
class event_queue {
public:
    explicit event_queue(std::size_t sms) { sms_.reserve(sms); }

    /// `never` if there is none.
    [[nodiscard]] instant next() const noexcept { return sms_.empty() ? never : sms_.front()->end(); }
    void push(sm_state& sm) noexcept {
        sms_.push_back(&sm);  // at most one entry for each SM
        std::push_heap(sms_.begin(), sms_.end(), later);
    }
    [[nodiscard]] sm_state& pop() noexcept {
        std::pop_heap(sms_.begin(), sms_.end(), later);
        sm_state& sm = *sms_.back();
        sms_.pop_back();
        return sm;
    }
    /// Ends at `at` all blocks of `device` that would hold their SM for longer.
    void cut(const device_state& device, instant at) noexcept {
        for (sm_state* sm : sms_)
            if (sm->device == &device) sm->edges[sm->count] = std::min(sm->end(), at);
        std::make_heap(sms_.begin(), sms_.end(), later);
    }

private:
    static bool later(const sm_state* a, const sm_state* b) noexcept {
        return a->end() != b->end() ? a->end() > b->end() : a->order > b->order;
    }

    gpushare::detail::plain_list<sm_state*> sms_;
};

}  // namespace detail
}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
