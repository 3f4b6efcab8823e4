// SPDX-License-Identifier: Apache-2.0
// The earlier values of an address, for as long as a thread may still read them: a load needn't
// find the newest value if nothing orders the load after the store (PTX ISA, 8.10).
//
// Moments count the strong stores of a machine; what a thread has seen of an address is one of
// them: see sight.hpp.
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
        std::uint64_t gone = 0;             // instructions of the machine, when it was replaced
        releases_of carried{};              // who acquires from it
    };

    /// `old` is replaced.
    void replace(one old, word now, std::uint8_t bytes) {
        constexpr std::size_t many = 4;
        if (bytes != bytes_ || old.value != now_) past_.clear();  // somebody else wrote meanwhile
        old.from = past_.empty() ? 0 : past_.back().until;
        if (past_.size() == many) past_.erase(past_.begin());
        past_.push_back(std::move(old));
        now_ = now;
        bytes_ = bytes;
    }
    /// Whether these are about the value that is there.
    [[nodiscard]] bool describe(word now, std::uint8_t bytes) const {
        return !past_.empty() && now == now_ && bytes == bytes_;
    }
    /// Those that may still be seen by who has seen `moment` here: the last ones.
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
