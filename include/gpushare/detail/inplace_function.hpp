// SPDX-License-Identifier: Apache-2.0
// A move-only function that never allocates: the callable is stored inside, in a fixed number of
// bytes, and a bigger one doesn't compile.
//
//   gpushare::detail::inplace_function<void(int), 64> f = [&](int i) { sum += i; };
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// True if an inplace_function of `Capacity` bytes takes an `F`.
template <class F, std::size_t Capacity>
concept fits_in_place = sizeof(F) <= Capacity &&
                        alignof(F) <= alignof(std::max_align_t) && std::is_nothrow_move_constructible_v<F>;

template <class Signature, std::size_t Capacity>
class inplace_function;

/// One argument, by a reference through which it may be changed.
template <class... Args>
inline constexpr bool takes_one_object = false;
template <class T>
inline constexpr bool takes_one_object<T&> = !std::is_const_v<T>;

/// A call of an empty function is undefined, and so is a call while the function is moved or
/// destroyed. Concurrent calls are as safe as those of the callable.
template <class R, class... Args, std::size_t Capacity>
class inplace_function<R(Args...), Capacity> {
public:
    inplace_function() noexcept = default;
    inplace_function(std::nullptr_t) noexcept {}  // NOLINT: implicit, as in std::function

    template <class F>
    requires(!std::same_as<std::remove_cvref_t<F>, inplace_function> &&
             std::is_invocable_r_v<R, std::decay_t<F>&, Args...>)
        inplace_function(F&& f)  // NOLINT: implicit, as in std::function
    noexcept(std::is_nothrow_constructible_v<std::decay_t<F>, F>) {
        using target = std::decay_t<F>;
        static_assert(sizeof(target) <= Capacity,
                      "the callable is too big to be stored in place: capture less, or a pointer to what it needs");
        static_assert(alignof(target) <= alignof(std::max_align_t), "the callable is over-aligned: capture a pointer");
        static_assert(std::is_nothrow_move_constructible_v<target>, "the callable must not throw when it is moved");
        if constexpr (std::is_pointer_v<std::remove_cvref_t<F>>)
            if (f == nullptr) return;  // as in std::function
        std::construct_at(reinterpret_cast<target*>(storage_), std::forward<F>(f));
        actions_ = &actions_of<target>;
    }

    /// Diagnoses the commonest mistake in a callable that is called with a stream: another
    /// parameter, or none.
    template <class F>
    requires(std::is_class_v<std::remove_cvref_t<F>> && !std::same_as<std::remove_cvref_t<F>, inplace_function> &&
             !std::is_invocable_r_v<R, std::decay_t<F>&, Args...> && takes_one_object<Args...>)
        inplace_function(F&&) {  // NOLINT
        static_assert(std::is_invocable_r_v<R, std::decay_t<F>&, Args...>,
                      "gpushare: work is a callable that takes the stream it enqueues on, stream&: "
                      "[](auto& stream) { ... }");
    }

    inplace_function(inplace_function&& other) noexcept { take(other); }
    inplace_function& operator=(inplace_function&& other) noexcept {
        if (this != &other) {
            reset();
            take(other);
        }
        return *this;
    }
    ~inplace_function() { reset(); }

    [[nodiscard]] explicit operator bool() const noexcept { return actions_ != nullptr; }
    R operator()(Args... args) { return actions_->invoke(storage_, std::forward<Args>(args)...); }

    /// Destroys the callable.
    void reset() noexcept {
        if (actions_ != nullptr) std::exchange(actions_, nullptr)->destroy(storage_);
    }

private:
    struct actions {
        R (*invoke)(void*, Args&&...);
        void (*relocate)(void* from, void* to) noexcept;
        void (*destroy)(void*) noexcept;
    };

    template <class F>
    static constexpr actions actions_of{
        [](void* f, Args&&... args) -> R { return static_cast<R>((*static_cast<F*>(f))(std::forward<Args>(args)...)); },
        [](void* from, void* to) noexcept {
            std::construct_at(static_cast<F*>(to), std::move(*static_cast<F*>(from)));
            std::destroy_at(static_cast<F*>(from));
        },
        [](void* f) noexcept { std::destroy_at(static_cast<F*>(f)); },
    };

    void take(inplace_function& other) noexcept {
        if (other.actions_ == nullptr) return;
        other.actions_->relocate(other.storage_, storage_);
        actions_ = std::exchange(other.actions_, nullptr);
    }

    const actions* actions_ = nullptr;
    alignas(std::max_align_t) std::byte storage_[Capacity];
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
