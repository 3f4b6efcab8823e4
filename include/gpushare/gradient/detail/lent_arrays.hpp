// SPDX-License-Identifier: Apache-2.0
// Memory that a function lends to a transport. If the transport may still touch the memory when the
// function returns, the memory is never freed.
//
//   std::vector<float> sums(n);
//   detail::lent_arrays memory(sums);
//   if (const auto f = memory.to([&] { return net.all_reduce(in, std::span(sums), op, deadline); }))
//       return f;
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Moves from `x`, and never frees the memory that `x` had. Doesn't allocate, so it can't fail.
template <class T>
requires std::is_nothrow_move_constructible_v<T>
void never_free(T& x) noexcept {
    union forever {
        explicit forever(T& from) noexcept : kept(std::move(from)) {}
        ~forever() {}  // doesn't destroy `kept`
        T kept;
    };
    const forever one(x);
}

/// Arrays of the caller that its calls of a transport read and write. They must outlive this
/// object, and keep their memory during a call.
template <class... T>
class lent_arrays {
public:
    explicit lent_arrays(std::vector<T>&... arrays) noexcept : arrays_(arrays...) {}
    lent_arrays(const lent_arrays&) = delete;
    lent_arrays& operator=(const lent_arrays&) = delete;
    ~lent_arrays() {
        if (in_use_) std::apply([](auto&... array) { (never_free(array), ...); }, arrays_);
    }
    /// Makes a call of the transport. After an exception, the transport may still use the arrays,
    /// as after a fault with buffers_in_use.
    template <class Call>
    [[nodiscard]] collective_fault to(const Call& call) {
        in_use_ = true;
        const collective_fault f = call();
        in_use_ = f.buffers_in_use;
        return f;
    }

private:
    std::tuple<std::vector<T>&...> arrays_;
    bool in_use_ = false;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
