// SPDX-License-Identifier: Apache-2.0
// The errc for an exception in flight, for calls that tell other ranks why they failed.
//
//   try { launch(); } catch (...) { tell_others(detail::code_thrown()); throw; }
#pragma once

#include <new>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The code of the exception that is being handled; `otherwise` for an exception without a code.
[[nodiscard]] inline errc code_thrown(errc otherwise = errc::backend_failed) noexcept {
    try {
        throw;
    } catch (const error& e) {
        return e.code() == errc::none ? otherwise : e.code();
    } catch (const std::bad_alloc&) {
        return errc::out_of_memory;
    } catch (...) {
        return otherwise;
    }
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
