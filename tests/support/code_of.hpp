// SPDX-License-Identifier: Apache-2.0
// The code and the text of the error that a callable throws.
//
//   CHECK(support::code_of([&] { cuda::query_sm_split(node, d); }) == errc::not_supported);
#pragma once

#include <string>

#include <gpushare/error.hpp>

namespace support {

/// errc::none if it throws nothing.
template <class F>
gpushare::errc code_of(F f) {
    try {
        f();
    } catch (const gpushare::error& e) {
        return e.code();
    }
    return gpushare::errc::none;
}

/// "CODE: TEXT" of the error, or "accepted".
template <class F>
std::string refusal_of(F f) {
    try {
        f();
        return "accepted";
    } catch (const gpushare::error& e) {
        return std::string(gpushare::to_string(e.code())) + ": " + e.what();
    }
}

}  // namespace support
