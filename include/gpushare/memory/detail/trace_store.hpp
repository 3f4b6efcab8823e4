// SPDX-License-Identifier: Apache-2.0
// Stack traces of blocks: return addresses, taken when a block is allocated and kept until it is
// freed. The embedder chooses the function that takes them; stack_trace.hpp has one.
//
//   gpushare::detail::trace_store traces;
//   const auto id = traces.keep(gpushare::detail::captured_trace(gpushare::capture_stack));
//   for (void* caller : traces.of(id)) ...;        traces.drop(id);
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/memory/usage.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The return addresses that a trace_function finds at this call. Without such a function, an empty
/// trace that costs nothing.
class captured_trace {
public:
    static constexpr std::size_t longest = 16;

    captured_trace() = default;
    explicit captured_trace(trace_function capture) noexcept
        : depth_(capture != nullptr ? capture({callers_.data(), longest}) : 0) {}

    [[nodiscard]] bool empty() const noexcept { return depth_ == 0; }
    /// Throws std::bad_alloc.
    [[nodiscard]] std::vector<void*> callers() const { return {callers_.data(), callers_.data() + depth_}; }

private:
    std::array<void*, longest> callers_{};
    std::size_t depth_ = 0;
};

/// Not thread-safe. 136 bytes for each trace that was ever kept at once; nothing for blocks without
/// one.
class trace_store {
public:
    using id = std::uint32_t;
    static constexpr id none = std::numeric_limits<id>::max();

    /// `none` for an empty one. Throws std::bad_alloc.
    [[nodiscard]] id keep(const captured_trace& t) {
        if (t.empty()) return none;
        if (vacant_.empty()) {
            traces_.emplace_back();
            try {
                vacant_.reserve(traces_.capacity());  // so that dropping can't fail
            } catch (...) {
                traces_.pop_back();
                throw;
            }
            vacant_.push_back(static_cast<id>(traces_.size() - 1));
        }
        const id kept = vacant_.back();
        vacant_.pop_back();
        traces_[kept] = t;
        return kept;
    }
    void drop(id kept) noexcept {
        if (kept != none) vacant_.push_back(kept);
    }
    /// Empty for `none`. Throws std::bad_alloc.
    [[nodiscard]] std::vector<void*> of(id kept) const {
        return kept == none ? captured_trace().callers() : traces_[kept].callers();
    }

private:
    plain_list<captured_trace> traces_;
    plain_list<id> vacant_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
