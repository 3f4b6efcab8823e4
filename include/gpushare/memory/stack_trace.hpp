// SPDX-License-Identifier: Apache-2.0
// Stack traces of allocations: return addresses are taken when a block is allocated, and turned
// into names only in a report. Needs glibc's <execinfo.h>, which no other header of the library
// includes.
//
//   gpushare::statistics_resource mine{upstream, {.trace = gpushare::capture_stack}};
//   for (const auto& l : mine.leaks())
//       // link with -rdynamic for names
//       for (const auto& line : gpushare::symbols_of(l.trace)) log(line);
#pragma once

#include <execinfo.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A trace_function, as in statistics_options::trace. The first call of a process loads the
/// unwinder, and allocates from the host's heap.
[[gnu::noinline]] inline std::size_t capture_stack(std::span<void*> callers) noexcept {
    const int depth = ::backtrace(callers.data(), static_cast<int>(callers.size()));
    return depth > 0 ? static_cast<std::size_t>(depth) : 0;
}

/// A line for each address: file, function where it is known, address. Throws std::bad_alloc.
[[nodiscard]] inline std::vector<std::string> symbols_of(std::span<void* const> trace) {
    if (trace.empty()) return {};  // glibc wants an array
    const std::unique_ptr<char*, void (*)(void*)> lines(
        ::backtrace_symbols(trace.data(), static_cast<int>(trace.size())), std::free);
    if (lines == nullptr) throw std::bad_alloc();
    return {lines.get(), lines.get() + trace.size()};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
