// SPDX-License-Identifier: Apache-2.0
// What a limiter has to say that nobody asked for: promises that somebody's work broke, and faults.
//
//   while (auto e = limiter.take_event()) log(to_string(e->what), e->client, e->took, e->bound);
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// What happened that nobody asked for.
struct limiter_event {
    /// What it was.
    enum class kind : std::uint8_t {
        overran,  ///< a submission took longer than its kind was counted with: others may wait beyond the bound
        waited_beyond_bound,  ///< a submission waited longer for work of lower levels than was published when it came
        quarantined,          ///< too many failures in a row: nothing of the client is admitted until it is pardoned
        stuck,                ///< work of the client doesn't end; it is quarantined as well
        device_lost,          ///< the device became unusable while the client had work in flight
    };

    kind what{};                 ///< what it was
    client_id client{};          ///< whose submission
    ns took{};                   ///< of overran: the submission; of waited_beyond_bound: its wait
    ns bound{};                  ///< of both: what it should have been at most
    std::uint64_t key = 0;       ///< of both: the kind of submission, if it has one
    std::uint32_t failures = 0;  ///< of quarantined: so many in a row
};

/// In words.
[[nodiscard]] constexpr std::string_view to_string(limiter_event::kind k) noexcept {
    switch (k) {
        case limiter_event::kind::overran: return "overran";
        case limiter_event::kind::waited_beyond_bound: return "waited beyond bound";
        case limiter_event::kind::quarantined: return "quarantined";
        case limiter_event::kind::stuck: return "stuck";
        case limiter_event::kind::device_lost: return "device lost";
    }
    return "unknown event";
}

namespace detail {

/// The latest events that nobody has taken; the oldest make room. A value.
class event_queue {
public:
    static constexpr std::size_t capacity = 64;

    void push(const limiter_event& e) noexcept {
        events_[(first_ + size_) % capacity] = e;
        if (size_ < capacity) {
            ++size_;
        } else {
            first_ = (first_ + 1) % capacity;
            ++dropped_;
        }
    }
    std::optional<limiter_event> take() noexcept {
        if (size_ == 0) return std::nullopt;
        const auto e = events_[first_];
        first_ = (first_ + 1) % capacity;
        --size_;
        return e;
    }
    [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_; }

private:
    std::array<limiter_event, capacity> events_{};
    std::size_t first_ = 0, size_ = 0;
    std::uint64_t dropped_ = 0;
};

}  // namespace detail

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
