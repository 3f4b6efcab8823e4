// SPDX-License-Identifier: Apache-2.0
// Who allocated what: return addresses, taken where a block is allocated and kept until it is freed. Which function takes
// them is the embedder's choice; stack_trace.hpp has one.
//
//   gpushare::trace_store traces;
//   const auto id = traces.keep(gpushare::captured_trace(gpushare::capture_stack));
//   for (void* caller : traces.of(id)) ...;        traces.drop(id);
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Writes the return addresses of its callers, the nearest first, and returns how many.
using trace_function = std::size_t (*)(std::span<void*>) noexcept;

/// What such a function finds here; nothing, at no cost, without one.
template <class Pointer = void*>
class basic_captured_trace {
public:
    static constexpr std::size_t longest = 16;

    basic_captured_trace() = default;
    explicit basic_captured_trace(trace_function capture) noexcept
        : depth_(capture != nullptr ? capture({callers_.data(), longest}) : 0) {}

    [[nodiscard]] bool empty() const noexcept { return depth_ == 0; }
    /// Throws std::bad_alloc.
    [[nodiscard]] std::vector<Pointer> callers() const { return {callers_.data(), callers_.data() + depth_}; }

private:
    std::array<Pointer, longest> callers_{};
    std::size_t depth_ = 0;
};
using captured_trace = basic_captured_trace<>;

/// Not thread-safe. 136 bytes for each trace that was ever kept at once; nothing for blocks without one.
/// A template so that where it is included and not used it costs little.
template <class Trace = captured_trace, class Id = std::uint32_t>
class basic_trace_store {
public:
    using id = Id;
    static constexpr id none = std::numeric_limits<id>::max();

    /// `none` for an empty one. Throws std::bad_alloc.
    [[nodiscard]] id keep(const Trace& t) {
        if (t.empty()) return none;
        if (vacant_.empty()) {
            traces_.emplace_back();
            vacant_.reserve(traces_.capacity());  // so that dropping can't fail
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
        return kept == none ? Trace().callers() : traces_[kept].callers();
    }

private:
    std::vector<Trace> traces_;
    std::vector<id> vacant_;
};
using trace_store = basic_trace_store<>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
