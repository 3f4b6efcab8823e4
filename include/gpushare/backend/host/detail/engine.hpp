// SPDX-License-Identifier: Apache-2.0
// The engine of a host node: the model, its lock, and the loop that worker threads run. The node
// makes the threads, one for each SM.
//
// The node has one lock, because points and waits cross devices, and because the model is exact
// only with one order of events over all devices. An event takes a fraction of a microsecond.
// Kernels, and the destructors of kernels and of their exceptions, run unlocked.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/backend/host/detail/model.hpp>
#include <gpushare/backend/host/detail/parking.hpp>
#include <gpushare/backend/host/detail/work.hpp>
#include <gpushare/backend/host/memory.hpp>
#include <gpushare/backend/host/point.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/sm_split.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {
namespace detail {

/// Public members are safe from any thread.
class engine {
public:
    explicit engine(const node_options& options);
    engine(const engine&) = delete;
    engine& operator=(const engine&) = delete;

    [[nodiscard]] const node_options& options() const noexcept { return options_; }
    [[nodiscard]] device_state& device(std::uint32_t index) noexcept { return model_.devices()[index]; }
    [[nodiscard]] const point_hub& hub() const noexcept { return *hub_; }

    // --- streams

    [[nodiscard]] stream_state& open_stream(std::uint32_t device, priority level, std::uint32_t tag,
                                            std::uint32_t part = 0);

    /// Queued work still runs. Points of the stream stay valid.
    void close_stream(stream_state& s) noexcept;

    /// Takes an operation, which the caller fills in unlocked, and then submits or hands back.
    /// Throws std::bad_alloc.
    [[nodiscard]] operation& take_operation(stream_state& s);
    void hand_back(operation& op) noexcept;

    void submit(stream_state& s, operation& op) noexcept;

    /// The calling thread begins a piece of work on `s`. Throws std::bad_alloc.
    [[nodiscard]] outcome begin_work(stream_state& s);
    void end_work(stream_state& s, const outcome& begun) noexcept;

    /// Records a point after the stream's work. Throws std::bad_alloc.
    [[nodiscard]] point record(stream_state& s);
    /// A point to be recorded later, once. Throws std::bad_alloc.
    [[nodiscard]] point prepare();
    void record(stream_state& s, const point& prepared) noexcept;

    /// As kernel_context::yield, for the one block of `s` that the calling thread runs. Does
    /// nothing if there is none.
    bool yield(const stream_state& s) noexcept;

    // --- partitions

    [[nodiscard]] sm_split split() const noexcept;
    /// Opens partitions of these numbers of SMs, all or none; see check_sms.
    [[nodiscard]] std::vector<std::uint32_t> open_partitions(std::uint32_t device, std::span<const std::uint32_t> sms);
    void leave_partition(std::uint32_t device, std::uint32_t part) noexcept;
    /// Tags of the device's streams in no partition, in order.
    [[nodiscard]] std::vector<std::uint32_t> outside_any_partition(std::uint32_t device);

    // --- faults

    void stall(stream_state& s) noexcept;
    void resume(stream_state& s) noexcept;
    void lose(std::uint32_t device) noexcept;

    // --- workers

    /// The life of a worker: runs blocks until `shut_down`.
    void work();

    /// Loses all devices and ends the workers, each after the block that it runs.
    void shut_down() noexcept;

private:
    // Call both under the lock.
    point new_point();
    void record(stream_state& s, const point& p, instant now) noexcept;

    /// The lock, with the model brought up to date at both ends.
    class section {
    public:
        explicit section(engine& e) noexcept : engine_(e), lock_(e.hub_->mutex), now_(steady_clock::now()) {
            engine_.model_.advance(now_);
        }
        section(const section&) = delete;
        section& operator=(const section&) = delete;
        ~section() {
            engine_.model_.settle(now_);
            engine_.model_.wake_waiters(woken_);
            engine_.parking_.call(engine_.model_.has_claimed(), engine_.model_.next_event(), woken_);
            engine_.release(lock_, woken_);
        }
        [[nodiscard]] instant now() const noexcept { return now_; }
        [[nodiscard]] wake_list& woken() noexcept { return woken_; }

    private:
        engine& engine_;
        std::unique_lock<std::mutex> lock_;
        instant now_;
        wake_list woken_;
    };

    [[nodiscard]] bool may_yield(const sm_state& sm) const noexcept;
    /// Within a block of an SM: runs the waiting blocks of higher levels, one after the other.
    static bool run_above(yielding& y) noexcept { return y.owner.run_above(y.sm); }
    bool run_above(sm_state& sm) noexcept;

    /// Runs the claimed blocks, unlocked. Returns the first exception.
    std::exception_ptr execute(sm_state& sm) noexcept;

    /// Unlocks, wakes threads, and destroys objects that are left over.
    void release(std::unique_lock<std::mutex>& lock, wake_list& woken) noexcept;

    const node_options options_;
    const std::shared_ptr<point_hub> hub_;
    model model_;
    parking parking_;
    bool stopping_ = false;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE engine::engine(const node_options& options)
    : options_(options),
      hub_(std::make_shared<point_hub>()),
      model_(options, *hub_),
      parking_(std::size_t{options.devices} * options.sms) {}

GPUSHARE_INLINE auto engine::open_stream(std::uint32_t device, priority level, std::uint32_t tag, std::uint32_t part)
    -> stream_state& {
    const section locked{*this};
    return model_.open_stream(device, level, tag, part);
}

GPUSHARE_INLINE void engine::close_stream(stream_state& s) noexcept {
    std::exception_ptr unread;  // declared out here, so that it is destroyed unlocked
    const section locked{*this};
    // relaxed: this is the last use of the handle, and the lock orders it after all others.
    if (operation* const spare = s.spare.exchange(nullptr, std::memory_order_relaxed))
        model_.operations().release(*spare);
    unread = model_.close_stream(s);
}

GPUSHARE_INLINE auto engine::take_operation(stream_state& s) -> operation& {
    // acquire: sees the operation as the thread that stored it left it.
    if (operation* const spare = s.spare.exchange(nullptr, std::memory_order_acquire)) return *spare;
    const std::lock_guard lock{hub_->mutex};
    return model_.operations().acquire();
}

GPUSHARE_INLINE void engine::hand_back(operation& op) noexcept {
    op.body.reset();
    const std::lock_guard lock{hub_->mutex};
    model_.operations().release(op);
}

GPUSHARE_INLINE void engine::submit(stream_state& s, operation& op) noexcept {
    const section locked{*this};
    model_.submit(s, op, locked.now(), std::this_thread::get_id());
    // Without the lock, only `take_operation` writes it, and only null. release: pairs with the
    // acquire there.
    if (s.spare.load(std::memory_order_relaxed) == nullptr)
        s.spare.store(model_.operations().try_acquire(), std::memory_order_release);
}

GPUSHARE_INLINE auto engine::begin_work(stream_state& s) -> outcome {
    const std::lock_guard lock{hub_->mutex};
    outcome_state& begun = hub_->outcomes.acquire();
    begun.references.store(0, std::memory_order_relaxed);  // relaxed: no other thread knows it yet
    begun.hub = hub_;
    model::begin_work(s, begun, std::this_thread::get_id());
    return outcome{begun};
}

GPUSHARE_INLINE void engine::end_work(stream_state& s, const outcome& begun) noexcept {
    const std::lock_guard lock{hub_->mutex};
    model_.end_work(s, *begun.state());
}

GPUSHARE_INLINE auto engine::record(stream_state& s) -> point {
    const section locked{*this};
    point made = new_point();
    record(s, made, locked.now());
    return made;
}

GPUSHARE_INLINE auto engine::prepare() -> point {
    const std::lock_guard lock{hub_->mutex};
    return new_point();
}

GPUSHARE_INLINE void engine::record(stream_state& s, const point& prepared) noexcept {
    const section locked{*this};
    record(s, prepared, locked.now());
}

GPUSHARE_INLINE bool engine::yield(const stream_state& s) noexcept {
    device_state& d = *s.device;
    // relaxed: as in kernel_context::yield.
    if (options_.timing != timing::real || d.waiting.load(std::memory_order_relaxed) <= s.level.level) return false;
    sm_state* own = nullptr;
    {
        const std::lock_guard lock{hub_->mutex};
        for (sm_state& sm : d.sms)
            if (sm.runner == std::this_thread::get_id() && sm.work->stream == &s && may_yield(sm)) own = &sm;
    }
    return own != nullptr && run_above(*own);
}

GPUSHARE_INLINE auto engine::split() const noexcept -> sm_split {
    const std::uint32_t unit = options_.sm_unit;
    return {.sms = options_.sms, .unit = unit, .units = options_.sms / unit};
}

GPUSHARE_INLINE std::vector<std::uint32_t> engine::open_partitions(std::uint32_t device,
                                                                   std::span<const std::uint32_t> sms) {
    std::vector<std::uint32_t> parts;
    parts.reserve(sms.size());
    const section locked{*this};
    check_sms(split(), sms, model_.devices()[device].order.size_of(0) / options_.sm_unit);
    try {
        for (const std::uint32_t n : sms) parts.push_back(model_.open_partition(device, n));
    } catch (...) {
        for (const std::uint32_t p : parts) model_.leave_partition(model_.devices()[device], p);
        throw;
    }
    return parts;
}

GPUSHARE_INLINE void engine::leave_partition(std::uint32_t device, std::uint32_t part) noexcept {
    const section locked{*this};
    model_.leave_partition(model_.devices()[device], part);
}

GPUSHARE_INLINE std::vector<std::uint32_t> engine::outside_any_partition(std::uint32_t device) {
    std::vector<std::uint32_t> tags;
    {
        const std::lock_guard lock{hub_->mutex};
        for (const auto& s : model_.streams())
            if (s->device == &model_.devices()[device] && s->part == 0 && s->tag != kernel_free_tag)
                tags.push_back(s->tag);
    }
    std::ranges::sort(tags);
    return tags;
}

GPUSHARE_INLINE void engine::stall(stream_state& s) noexcept {
    const section locked{*this};
    model_.stall(s);
}

GPUSHARE_INLINE void engine::resume(stream_state& s) noexcept {
    const section locked{*this};
    model_.resume(s, locked.now());
}

GPUSHARE_INLINE void engine::lose(std::uint32_t device) noexcept {
    const section locked{*this};
    model_.lose(model_.devices()[device], locked.now());
}

GPUSHARE_INLINE void engine::work() {
    parking::worker self;
    // Declared out here, so that an exception that the model doesn't keep is destroyed unlocked.
    std::exception_ptr thrown;
    wake_list woken;
    std::unique_lock lock{hub_->mutex};
    while (true) {
        const instant now = steady_clock::now();
        model_.advance(now);
        sm_state* const sm = model_.take_claimed();
        model_.wake_waiters(woken);
        if (sm != nullptr) {
            // From here on the SM belongs to the claimed blocks.
            if (options_.timing == timing::real) sm->edges[0] = now;
            sm->runner = std::this_thread::get_id();
            parking_.call(model_.has_claimed(), model_.next_event(), woken);
            release(lock, woken);
            thrown = execute(*sm);
            lock.lock();
            sm->runner = {};
            model_.finish(*sm, thrown, steady_clock::now());
        } else if (!model_.left().empty()) {
            release(lock, woken);
            lock.lock();
        } else if (stopping_) {
            release(lock, woken);
            return;
        } else {
            parking_.park(lock, self, model_.next_event(), woken);
        }
    }
}

GPUSHARE_INLINE void engine::shut_down() noexcept {
    section locked{*this};
    for (device_state& d : model_.devices()) model_.lose(d, locked.now());
    stopping_ = true;
    parking_.call_all(locked.woken());
}

GPUSHARE_INLINE auto engine::new_point() -> point {
    point_state& p = hub_->points.acquire();
    // Relaxed: no other thread knows the point yet.
    p.reached.store(false, std::memory_order_relaxed);
    p.references.store(0, std::memory_order_relaxed);
    p.hub = hub_;
    return point{p};
}

GPUSHARE_INLINE void engine::record(stream_state& s, const point& p, instant now) noexcept {
    p.state()->references.fetch_add(1, std::memory_order_relaxed);  // the model's reference
    model_.record(s, *p.state(), now, std::this_thread::get_id());
}

GPUSHARE_INLINE bool engine::may_yield(const sm_state& sm) const noexcept {
    return options_.timing == timing::real && sm.count == 1 && !sm.work->cooperative;
}

GPUSHARE_INLINE bool engine::run_above(sm_state& sm) noexcept {
    std::exception_ptr thrown;  // declared out here, so that it is destroyed unlocked
    wake_list woken;
    std::unique_lock lock{hub_->mutex};
    operation& paused = *sm.work;
    const auto first = sm.first, count = sm.count;
    const auto bring_up_to_date = [&] {
        const instant now = steady_clock::now();
        model_.advance(now);
        model_.settle(now);
        return now;
    };
    bool any = false;
    for (instant now = bring_up_to_date(); model_.pause(sm, paused, now); now = bring_up_to_date()) {
        any = true;
        model_.wake_waiters(woken);
        parking_.call(model_.has_claimed(), model_.next_event(), woken);
        release(lock, woken);
        thrown = execute(sm);
        lock.lock();
        model_.finish_nested(sm, thrown);
    }
    sm.work = &paused;
    sm.first = first;
    sm.count = count;
    if (any) sm.edges[0] = steady_clock::now();
    model_.wake_waiters(woken);
    parking_.call(model_.has_claimed(), model_.next_event(), woken);
    release(lock, woken);
    return any;
}

GPUSHARE_INLINE std::exception_ptr engine::execute(sm_state& sm) noexcept {
    operation& op = *sm.work;
    device_state& d = *sm.device;
    const std::uint32_t first = sm.first, count = sm.count;
    yielding above{d.waiting, op.stream->level.level, *this, sm, run_above};
    const bool yields = may_yield(sm);
    std::exception_ptr thrown;
    {
        const device_memory::opening opened{d.memory};
        instant began = options_.timing == timing::real ? sm.edges[0] : steady_clock::now();
        for (std::uint32_t i = 0; i < count; ++i) {
            kernel_context context{first + i, op.blocks,
                                   sm.index,  op.cooperative ? &op.barrier : nullptr,
                                   d.lost,    yields ? &above : nullptr};
            try {
                op.body(context);
            } catch (...) {
                if (thrown == nullptr) thrown = std::current_exception();
            }
            if (op.cooperative) op.barrier.leave();
            const instant ended = steady_clock::now();
            const ns hold = options_.timing == timing::real ? ns{0} : op.hold;
            // If the block has yielded, edges[0] is later than `began`, so only `ended` counts.
            sm.edges[i + 1] = yields ? ended : saturating_add(sm.edges[i], std::max(hold, ended - began));
            began = ended;
        }
    }
    // acq_rel: the block that destroys the kernel does so after all other blocks' last use of it.
    if (op.unexecuted.fetch_sub(count, std::memory_order_acq_rel) == count) op.body.reset();
    return thrown;
}

GPUSHARE_INLINE void engine::release(std::unique_lock<std::mutex>& lock, wake_list& woken) noexcept {
    if (model_.left().empty()) {
        lock.unlock();
        woken.wake_all();
        return;
    }
    leavings dirty{std::move(model_.left())}, clean;
    lock.unlock();
    woken.wake_all();
    while (operation* const op = dirty.operations.pop()) {
        op->body.reset();
        op->exception = nullptr;
        clean.operations.push(*op);
    }
    while (point_state* const p = dirty.points.pop()) {
        p->exception = nullptr;
        clean.points.push(*p);
    }
    while (outcome_state* const o = dirty.outcomes.pop()) {
        o->exception = nullptr;
        clean.outcomes.push(*o);
    }
    lock.lock();
    while (operation* const op = clean.operations.pop()) model_.operations().release(*op);
    while (point_state* const p = clean.points.pop()) hub_->points.release(*p);
    while (outcome_state* const o = clean.outcomes.pop()) hub_->outcomes.release(*o);
    lock.unlock();
}

#endif  // GPUSHARE_BODIES

}  // namespace detail
}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
