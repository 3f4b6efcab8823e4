// SPDX-License-Identifier: Apache-2.0
// The values in memory that a thread has seen: for each address, the newest value that the thread
// read, wrote, or acquired from another thread that had seen it. The thread no longer reads an
// older value there (PTX ISA 9.0, 8.10: coherence). This says nothing about other addresses. Views
// of this kind come from Kang et al., "A Promising Semantics for Relaxed-Memory Concurrency", POPL
// 2017.
//
//   sight mine;
//   mine.saw(address, 7);                       // the value that is there since moment 7
//   mine.include(theirs);                       // everything that `theirs` has seen
//   mine.of(address);                           // 7, or later
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "arithmetic.hpp"

namespace ptx {

class sight {
public:
    /// The moment of the value seen at the address; 0 if none was seen.
    [[nodiscard]] std::uint64_t of(word address) const {
        if (all_ == nullptr) return 0;
        const auto at = find(*all_, address);
        return at != all_->end() && at->first == address ? at->second : 0;
    }
    void saw(word address, std::uint64_t moment) {
        if (of(address) >= moment) return;
        list& mine = own();
        const auto at = find(mine, address);
        if (at != mine.end() && at->first == address)
            at->second = moment;
        else
            mine.insert(at, {address, moment});
    }
    void include(const sight& other) {
        if (other.all_ == nullptr || other.all_ == all_) return;
        if (all_ == nullptr) {
            all_ = other.all_;
            return;
        }
        if (std::ranges::all_of(*other.all_, [&](const seen& s) { return of(s.first) >= s.second; })) return;
        list both;
        both.reserve(all_->size() + other.all_->size());
        std::ranges::merge(*all_, *other.all_, std::back_inserter(both));  // the later of two behind the earlier
        std::size_t kept = 0;
        for (const seen& s : both) both[kept != 0 && both[kept - 1].first == s.first ? kept - 1 : kept++] = s;
        both.resize(kept);
        all_ = std::make_shared<list>(std::move(both));
    }
    /// Forgets moments up to this one, which no thread needs any more.
    void forget_until(std::uint64_t moment) {
        if (all_ != nullptr) std::erase_if(own(), [&](const seen& s) { return s.second <= moment; });
    }

private:
    using seen = std::pair<word, std::uint64_t>;
    using list = std::vector<seen>;  // sorted

    [[nodiscard]] static list::iterator find(list& all, word address) {
        return std::ranges::lower_bound(all, address, {}, &seen::first);
    }
    [[nodiscard]] list& own() {
        if (all_ == nullptr)
            all_ = std::make_shared<list>();
        else if (all_.use_count() != 1)
            all_ = std::make_shared<list>(*all_);
        return *all_;
    }

    std::shared_ptr<list> all_{};  // null: nothing seen. Shared by threads that have seen the same
};

}  // namespace ptx
