// SPDX-License-Identifier: Apache-2.0
// An exchange with some of the ranks: each tells where its elements are, and reads those of its neighbours alone.
//
//   const std::uint32_t beside[] = {left, right};
//   gpushare::try_exchange(me, std::span<const float>(x), beside, std::span(theirs));     // theirs: left's elements, then right's
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

template <class T>
struct exchange_body {
    std::span<const T> in;
    std::span<const std::uint32_t> neighbours;
    T* out;
    static constexpr auto kind = collective_kind::all_gather;

    collective_fault operator()(session<thread_context>& t, std::uint32_t blocks) const {
        if (!t.meet(call_signature(kind, type_id<T>() | 256U, 0, in.size(), blocks), in.data())) return t.fault();
        for (std::size_t i = 0; i < neighbours.size(); ++i)
            copy_elements(t.context(), out + i * in.size(), static_cast<const T*>(t.signal_from(neighbours[i]).in),
                          in.size());
        return t.finish();
    }
};

}  // namespace detail

/// `out` gets the elements of each neighbour, one behind the other. Called by all ranks, with as many elements each; each has neighbours
/// of its own, perhaps none. errc::mismatch at once for one that isn't a rank, or an `out` of another size.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault try_exchange(const member& me, std::span<const std::type_identity_t<T>> in,
                                            std::span<const std::uint32_t> neighbours, std::span<T> out,
                                            instant deadline = never) {
    bool good = out.size() == in.size() * neighbours.size();
    for (const std::uint32_t q : neighbours) good = good && q < me.size();
    if (!good) return {errc::mismatch, collective_kind::all_gather, me.rank(), 0};
    return detail::run_in_thread(me, detail::exchange_body<T>{in, neighbours, out.data()}, deadline);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
