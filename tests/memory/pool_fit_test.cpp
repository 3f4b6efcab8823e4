// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The pool's bookkeeping against a model that is simple enough to be right: a sorted map of the
// live blocks.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <vector>

#include <gpushare/memory/detail/pool_block.hpp>
#include <gpushare/memory/detail/pool_fit.hpp>
#include <gpushare/memory/detail/size_classes.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace pool_fit_test {

using gpushare::detail::pool_block;
using gpushare::detail::pool_fit;
using gpushare::detail::pool_granule;

namespace {

std::byte* address(std::uint64_t n) { return reinterpret_cast<std::byte*>(n); }

template <unsigned LogSteps>
void check_classes() {
    using classes = gpushare::detail::size_classes<LogSteps>;
    CAPTURE(LogSteps);
    std::vector<std::uint64_t> sizes;
    for (std::uint64_t n = 0; n < 5'000; ++n) sizes.push_back(n);
    for (unsigned bit = 13; bit < 62; ++bit)
        for (const unsigned more : {0U, 1U, 2U}) sizes.push_back((std::uint64_t{1} << bit) - 1 + more);
    std::uint32_t last = 0;
    for (const auto n : sizes) {
        const auto c = classes::of(n);
        CAPTURE(n, c);
        REQUIRE(c - last <= 1 + (n > 5'000 ? classes::steps : 0));  // without gaps
        REQUIRE(classes::smallest(c) <= n);
        REQUIRE(classes::smallest(c + 1) > n);
        REQUIRE(classes::of(classes::smallest(c)) == c);
        const auto covering = classes::covering(n);
        REQUIRE(classes::smallest(covering) >= n);
        REQUIRE(classes::smallest(covering) - n <= n / classes::steps);
        last = c;
    }
}

/// A fit over several ranges, and what it should hold.
class model {
public:
    explicit model(std::uint64_t seed) : any_(seed) {
        for (std::uint64_t i = 0; i < ranges; ++i) {
            const auto size = (1 + any_.below(64)) * 16 * pool_granule;
            auto& whole = fit_.add(address((i + 1) << 32), size);
            whole_.push_back(&whole);
            total_ += size;
        }
    }

    /// False if the fit did something wrong.
    bool step() {
        if (any_.one_in(2) && !out_.empty()) {
            auto at = out_.begin();
            std::advance(at, static_cast<std::ptrdiff_t>(any_.below(out_.size())));
            used_ -= at->second->size;
            fit_.give(*at->second);
            out_.erase(at);
            return fit_.free_bytes() == total_ - used_;
        }
        const auto size = (1 + any_.below(std::uint64_t{1} << any_.below(8))) * pool_granule;
        const auto alignment = std::size_t{1} << any_.below(14);
        const bool thorough = any_.one_in(2);
        pool_block* const b = thorough ? fit_.take_any(size, alignment) : fit_.take(size, alignment);
        if (b == nullptr) return !thorough || !fits(size, alignment);
        used_ += b->size;
        const auto begin = reinterpret_cast<std::uintptr_t>(b->begin);
        const auto [at, fresh] = out_.emplace(begin, b);
        if (!fresh || b->size != size || begin % std::max(alignment, pool_granule) != 0 || b->free) return false;
        if (at != out_.begin() && end(*std::prev(at)) > begin) return false;
        if (std::next(at) != out_.end() && begin + size > std::next(at)->first) return false;
        return fit_.free_bytes() == total_ - used_;
    }

    /// Gives everything back. True if every range is one free block again.
    bool winds_down() {
        while (!out_.empty()) {
            fit_.give(*out_.begin()->second);
            out_.erase(out_.begin());
        }
        return fit_.free_bytes() == total_ &&
               std::ranges::all_of(whole_, [](const pool_block* b) { return b->free && b->whole_range(); });
    }

private:
    using entry = std::pair<const std::uintptr_t, pool_block*>;
    static constexpr std::uint64_t ranges = 3;

    static std::uintptr_t end(const entry& e) { return e.first + e.second->size; }

    /// Whether a gap between what is out has room.
    [[nodiscard]] bool fits(std::uint64_t size, std::size_t alignment) const {
        const auto unit = std::max(alignment, pool_granule);
        for (const pool_block* b : whole_) {
            auto from = reinterpret_cast<std::uintptr_t>(b->begin);
            const auto range = from >> 32;
            const auto gap = [&](std::uintptr_t to) { return ((from + unit - 1) & ~(unit - 1)) + size <= to; };
            for (const auto& e : out_) {
                if (e.first >> 32 != range) continue;
                if (gap(e.first)) return true;
                from = end(e);
            }
            if (gap(range_end(b))) return true;
        }
        return false;
    }
    [[nodiscard]] static std::uintptr_t range_end(const pool_block* b) {
        while (b->after != nullptr) b = b->after;
        return reinterpret_cast<std::uintptr_t>(b->begin) + b->size;
    }

    support::random any_;
    pool_fit fit_;
    std::vector<pool_block*> whole_;
    std::map<std::uintptr_t, pool_block*> out_;
    std::uint64_t total_ = 0, used_ = 0;
};

void compare(std::uint64_t runs, std::uint64_t steps) {
    for (std::uint64_t run = 0; run < runs; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        model m{seed};
        for (std::uint64_t step = 0; step < steps; ++step)
            if (!m.step()) FAIL("the fit and its model disagree after step " << step);
        REQUIRE(m.winds_down());
    }
}

}  // namespace

TEST_CASE("size classes have no gaps, cover what they say and waste no more than a step", "[memory][pool]") {
    check_classes<2>();
    check_classes<3>();
    check_classes<5>();
}

TEST_CASE("blocks never overlap, nothing that fits is overlooked, and all comes together again",
          "[memory][pool][property]") {
    compare(40, 2'000);
}

TEST_CASE("blocks never overlap, nothing that fits is overlooked, for ten million steps", "[.long]") {
    compare(1'000, 10'000);
}

TEST_CASE("the fast search wastes at most a class: what is one class bigger is found (rmm's best-fit list)",
          "[memory][pool]") {
    pool_fit fit;
    for (std::uint64_t granules = 1; granules < 3'000; granules += 7) {
        const auto size = granules * pool_granule, room = size + size / 32 + pool_granule;
        auto& whole = fit.add(address(std::uint64_t{1} << 40), room / pool_granule * pool_granule);
        pool_block* const b = fit.take(size, 1);
        CAPTURE(granules);
        REQUIRE(b != nullptr);
        fit.give(*b);
        fit.remove(whole);
    }
    CHECK(fit.free_bytes() == 0);
}

TEST_CASE("an alignment bigger than anything in the range is refused, one that fits by luck is found",
          "[memory][pool]") {
    pool_fit fit;
    (void)fit.add(address(3ULL << 20), 1 << 20);
    CHECK(fit.take(4096, 1 << 21) == nullptr);
    CHECK(fit.take_any(4096, 1 << 21) == nullptr);
    CHECK(fit.take(1 << 20, 1 << 20) == nullptr);  // there might be a gap in front
    pool_block* const all = fit.take_any(1 << 20, 1 << 20);
    REQUIRE(all != nullptr);
    CHECK(all->begin == address(3ULL << 20));
}

TEST_CASE("the largest free block is the largest", "[memory][pool]") {
    pool_fit fit;
    CHECK(fit.largest_free() == 0);
    (void)fit.add(address(1ULL << 32), 1000 * pool_granule);
    (void)fit.add(address(2ULL << 32), 1007 * pool_granule);
    (void)fit.add(address(3ULL << 32), 1003 * pool_granule);
    CHECK(fit.largest_free() == 1007 * pool_granule);
    (void)fit.take_any(1004 * pool_granule, 1);
    CHECK(fit.largest_free() == 1003 * pool_granule);
}

}  // namespace pool_fit_test
