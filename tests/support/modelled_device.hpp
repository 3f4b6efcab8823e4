// SPDX-License-Identifier: Apache-2.0
// A host device in virtual time, on one thread: the model behind host::node alone, with its blocks,
// SMs and ledger. A limiter on this device behaves the same in every run. Blocks may yield, as
// blocks of a real device do in yield_point().
//
//   support::modelled_device device(4);
//   support::modelled_device::stream s(device, priority{}, tag);
//   s.launch(1, 25ms);                    // one block
//   while (device.step(20us)) limiter.poll();     // to the next end, which is noticed 20 us later
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/units.hpp>

namespace support {

class modelled_device {
public:
    /// Copies show the same time.
    class clock {
    public:
        explicit clock(const modelled_device& d) noexcept : device_(&d) {}
        [[nodiscard]] gpushare::instant now() const noexcept { return device_->now_; }

    private:
        const modelled_device* device_;
    };

    /// Models sm_timeline. Neither copied nor moved.
    class stream {
    public:
        using point = gpushare::host::point;
        static constexpr bool yields = true;

        stream(modelled_device& d, gpushare::priority level, std::uint32_t tag)
            : device_(d), state_(d.model_.open_stream(0, level, tag)) {}
        stream(const stream&) = delete;
        stream& operator=(const stream&) = delete;

        /// Enqueues `blocks` blocks that hold an SM for `length` each. `yields_each`: the interval
        /// at which they let waiting blocks of higher levels have the SM; 0: never.
        void launch(std::uint32_t blocks, gpushare::ns length, gpushare::ns yields_each = {}) {
            auto& op = device_.model_.operations().acquire();
            op.blocks = blocks;
            op.cooperative = false;
            op.hold = length;
            if (yields_each > gpushare::ns{0}) {
                op.body = [](auto&) {};  // the device doesn't compute, but only lets time pass
                device_.stretches_[&op] = yields_each;
            }
            device_.model_.submit(state_, op, device_.now_);
            device_.model_.settle(device_.now_);
            device_.begin_claimed();
        }
        /// Enqueues opaque work that fills the device.
        void enqueue(gpushare::ns length) { launch(device_.sms_, length); }

        [[nodiscard]] point record() {
            auto& p = device_.hub_->points.acquire();
            p.reached.store(false, std::memory_order_relaxed);
            p.references.store(1, std::memory_order_relaxed);
            p.hub = device_.hub_;
            point made{p};
            device_.model_.record(state_, p, device_.now_);
            return made;
        }

    private:
        modelled_device& device_;
        gpushare::host::detail::stream_state& state_;
    };

    explicit modelled_device(std::uint32_t sms)
        : sms_(sms),
          model_({.memory = gpushare::bytes{1 << 20}, .sms = sms, .timing = gpushare::host::timing::modelled}, *hub_) {}
    modelled_device(const modelled_device&) = delete;
    modelled_device& operator=(const modelled_device&) = delete;

    /// Moves the time to the next end of a block plus `later`, the delay until a thread notices the
    /// end; or to `until`, if that is sooner. False if no block runs.
    bool step(gpushare::ns later, gpushare::instant until = gpushare::never) {
        const auto next = std::min(model_.next_event(), next_of_yielding());
        const bool runs = next != gpushare::never;
        const auto noticed = runs ? next + later : gpushare::never;
        if (!runs && until == gpushare::never) return false;
        advance(std::max(now_, std::min(noticed, until)));
        return runs;
    }

    [[nodiscard]] gpushare::instant now() const noexcept { return now_; }
    [[nodiscard]] std::uint32_t sms() const noexcept { return sms_; }
    /// The blocks that have ended since the last call.
    [[nodiscard]] std::vector<gpushare::host::block_record> blocks() {
        return model_.devices()[0].ledger.take().blocks;
    }

private:
    /// A block that yields, with its SM.
    struct yielding {
        gpushare::host::detail::sm_state* sm;
        gpushare::host::detail::operation* work;
        std::uint32_t first;
        gpushare::ns each, left;
        gpushare::instant since;  // since when this block, or another one on top of it, has been running
    };

    [[nodiscard]] static bool is_paused(const yielding& y) noexcept { return y.sm->work != y.work; }
    /// When the block needs attention: the block, or a block on top of it, ends; or it yields while
    /// another block waits.
    [[nodiscard]] gpushare::instant due(const yielding& y) noexcept {
        if (is_paused(y)) return y.since + y.sm->work->hold;
        const auto end = y.since + y.left;
        if (model_.devices()[0].waiting.load(std::memory_order_relaxed) <= y.work->stream->level.level) return end;
        const auto stretches = std::max<std::int64_t>((now_ - y.since + y.each - gpushare::ns{1}) / y.each, 1);
        return std::min(end, y.since + stretches * y.each);
    }
    [[nodiscard]] gpushare::instant next_of_yielding() noexcept {
        auto next = gpushare::never;
        for (const auto& y : yielding_) next = std::min(next, due(y));
        return next;
    }
    void begin_claimed() {
        while (auto* const sm = model_.take_claimed())
            yielding_.push_back({sm, sm->work, sm->first, stretches_.at(sm->work), sm->work->hold, sm->edges[0]});
    }
    void advance(gpushare::instant to) {
        for (;;) {
            const auto next = std::min(model_.next_event(), next_of_yielding());
            if (next > to) break;
            now_ = std::max(now_, next);
            model_.advance(next);
            model_.settle(next);
            begin_claimed();
            for (std::size_t i = 0; i < yielding_.size();)
                if (due(yielding_[i]) > next || !is_over(yielding_[i], next))
                    ++i;
                else
                    yielding_.erase(yielding_.begin() + static_cast<std::ptrdiff_t>(i));
        }
        now_ = to;
        model_.advance(now_);
        begin_claimed();
    }
    /// Handles a block that is due, as engine::run_above does. Returns whether the block has ended.
    bool is_over(yielding& y, gpushare::instant at) {
        std::exception_ptr thrown;
        if (is_paused(y)) {
            y.sm->edges[1] = at;
            model_.finish_nested(*y.sm, thrown);
            model_.settle(at);
        } else if (y.since + y.left <= at) {
            y.sm->edges[1] = at;
            if (y.work->unexecuted.fetch_sub(1, std::memory_order_relaxed) == 1) y.work->body.reset();
            model_.finish(*y.sm, thrown, at);
            return true;
        } else {
            y.left -= at - y.since;
        }
        y.since = at;
        if (model_.pause(*y.sm, *y.work, at)) return false;
        y.sm->work = y.work;
        y.sm->first = y.first;
        y.sm->count = 1;
        y.sm->edges[0] = at;
        return false;
    }

    std::uint32_t sms_;
    gpushare::instant now_{std::chrono::seconds(1)};
    std::map<const gpushare::host::detail::operation*, gpushare::ns> stretches_;
    std::vector<yielding> yielding_;
    std::shared_ptr<gpushare::host::detail::point_hub> hub_ = std::make_shared<gpushare::host::detail::point_hub>();
    gpushare::host::detail::model model_;
};
static_assert(gpushare::clock<modelled_device::clock>);
static_assert(gpushare::timeline<modelled_device::stream>);
static_assert(gpushare::sm_timeline<modelled_device::stream>);

}  // namespace support
