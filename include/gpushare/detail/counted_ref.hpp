// SPDX-License-Identifier: Apache-2.0
// A counted reference to an object in a pool. Handles that may outlive their maker use it, since it
// costs no allocation.
//
//   struct state { std::atomic<std::uint32_t> references{0};  ... };
//   void drop(state&) noexcept;  // counts down; gives the object back to its pool at 0
//   // copies share it; the last one to go gives it back
//   auto mine = detail::counted_ref<state>::share(s);
#pragma once

#include <atomic>
#include <concepts>
#include <cstdint>
#include <utility>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

// clang-format off
template <class S>
concept reference_counted = requires(S& s) {
    { s.references } -> std::same_as<std::atomic<std::uint32_t>&>;
    { drop(s) } noexcept;
};
// clang-format on

/// A reference-counting pointer, as safe from several threads as a shared_ptr. Null by default and
/// after a move.
template <reference_counted State>
class counted_ref {
public:
    counted_ref() noexcept = default;
    /// One more reference.
    [[nodiscard]] static counted_ref share(State& s) noexcept {
        // relaxed: the sharing thread has a reference, which keeps the object alive.
        s.references.fetch_add(1, std::memory_order_relaxed);
        return counted_ref(&s);
    }
    /// A reference that is there already.
    [[nodiscard]] static counted_ref adopt(State& s) noexcept { return counted_ref(&s); }

    counted_ref(const counted_ref& other) noexcept
        : counted_ref(other.state_ == nullptr ? counted_ref() : share(*other.state_)) {}
    counted_ref(counted_ref&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
    counted_ref& operator=(counted_ref other) noexcept {
        other.state_ = std::exchange(state_, other.state_);
        return *this;
    }
    ~counted_ref() {
        if (state_ != nullptr) drop(*state_);
    }

    [[nodiscard]] explicit operator bool() const noexcept { return state_ != nullptr; }
    [[nodiscard]] State* get() const noexcept { return state_; }
    [[nodiscard]] State* operator->() const noexcept { return state_; }
    [[nodiscard]] State& operator*() const noexcept { return *state_; }

    /// Whether they refer to the same one.
    friend bool operator==(const counted_ref&, const counted_ref&) noexcept = default;

private:
    explicit counted_ref(State* s) noexcept : state_(s) {}

    State* state_ = nullptr;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
