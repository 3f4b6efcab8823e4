// SPDX-License-Identifier: Apache-2.0
// A host device in virtual time, on one thread: the model behind host::node by itself, with its blocks, SMs and ledger. What a
// limiter does with it is the same at every run.
//
//   support::modelled_device device(4);
//   support::modelled_device::stream s(device, priority{}, tag);
//   s.launch(1, 25ms);                    // one block
//   while (device.step(20us)) limiter.poll();     // to the next end, which is noticed 20 us later
#pragma once

#include <algorithm>
#include <cstdint>
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

    /// Models sm_timeline. Stays where it is.
    class stream {
    public:
        using point = gpushare::host::point;

        stream(modelled_device& d, gpushare::priority level, std::uint32_t tag)
            : device_(d), state_(d.model_.open_stream(0, level, tag)) {}
        stream(const stream&) = delete;
        stream& operator=(const stream&) = delete;

        /// Enqueues `blocks` blocks that hold an SM for `length` each.
        void launch(std::uint32_t blocks, gpushare::ns length) {
            auto& op = device_.model_.operations().acquire();
            op.blocks = blocks;
            op.cooperative = false;
            op.hold = length;
            device_.model_.submit(state_, op, device_.now_);
            device_.model_.settle(device_.now_);
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
          model_({.memory = gpushare::bytes{1 << 20}, .sms = sms, .timing = gpushare::host::timing::modelled},
                 hub_->points) {}
    modelled_device(const modelled_device&) = delete;
    modelled_device& operator=(const modelled_device&) = delete;

    /// To the next end of a block, and `later`, when somebody notices; or to `until`, if that is sooner. False if nothing runs.
    bool step(gpushare::ns later, gpushare::instant until = gpushare::never) {
        const bool runs = model_.next_event() != gpushare::never;
        const auto noticed = runs ? model_.next_event() + later : gpushare::never;
        if (!runs && until == gpushare::never) return false;
        now_ = std::max(now_, std::min(noticed, until));
        model_.advance(now_);
        return runs;
    }

    [[nodiscard]] gpushare::instant now() const noexcept { return now_; }
    [[nodiscard]] std::uint32_t sms() const noexcept { return sms_; }
    /// What ended since the last call.
    [[nodiscard]] std::vector<gpushare::host::block_record> blocks() {
        return model_.devices()[0].ledger.take().blocks;
    }

private:
    std::uint32_t sms_;
    gpushare::instant now_{std::chrono::seconds(1)};
    std::shared_ptr<gpushare::host::detail::point_hub> hub_ = std::make_shared<gpushare::host::detail::point_hub>();
    gpushare::host::detail::model model_;
};
static_assert(gpushare::clock<modelled_device::clock>);
static_assert(gpushare::timeline<modelled_device::stream>);
static_assert(gpushare::sm_timeline<modelled_device::stream>);

}  // namespace support
