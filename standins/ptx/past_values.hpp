// SPDX-License-Identifier: Apache-2.0
// The earlier values of an address, kept as long as a thread may still read them. A load needn't
// return the newest value if nothing orders the load after the store (PTX ISA, 8.10).
//
// Moments count the strong stores of a machine. A moment says which value of an address a thread
// has seen: see sight.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "happens_before.hpp"

namespace ptx {

class past_values {
public:
    struct one {
        word value = 0;
        std::uint64_t from = 0, until = 0;  // moments
        std::uint64_t gone = 0;             // the machine's instruction count when it was replaced
        releases_of carried{};              // the releases that a reader acquires
    };

    /// `old` has been replaced by `now`.
    void replace(one old, word now, std::uint8_t bytes) {
        constexpr std::size_t many = 4;
        if (bytes != bytes_ || old.value != now_) past_.clear();  // another write came in between
        old.from = past_.empty() ? 0 : past_.back().until;
        if (past_.size() == many) past_.erase(past_.begin());
        past_.push_back(std::move(old));
        now_ = now;
        bytes_ = bytes;
    }
    /// Whether these values precede the present value.
    [[nodiscard]] bool describe(word now, std::uint8_t bytes) const {
        return !past_.empty() && now == now_ && bytes == bytes_;
    }
    /// The first value that a thread may still see if it has seen `moment` here; it may also see
    /// all later values.
    [[nodiscard]] std::size_t first_after(std::uint64_t moment, std::uint64_t gone) const {
        std::size_t first = past_.size();
        while (first > 0 && past_[first - 1].until > moment && past_[first - 1].gone >= gone) --first;
        return first;
    }
    [[nodiscard]] const std::vector<one>& all() const { return past_; }

private:
    std::vector<one> past_{};  // the oldest first
    word now_ = 0;
    std::uint8_t bytes_ = 0;
};

}  // namespace ptx
