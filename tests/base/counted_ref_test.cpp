// SPDX-License-Identifier: Apache-2.0
// Counted references: the last reference gives the object back, and none is counted twice.
#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <gpushare/detail/counted_ref.hpp>

#include "support/catch.hpp"
#include "support/threads.hpp"

namespace {

struct counted {
    std::atomic<std::uint32_t> references{0};
    std::atomic<int> given_back{0};
};
void drop(counted& c) noexcept {
    if (c.references.fetch_sub(1, std::memory_order_acq_rel) == 1) ++c.given_back;
}
using ref = gpushare::detail::counted_ref<counted>;

}  // namespace

TEST_CASE("the last reference to go gives back", "[base]") {
    counted a, b;
    b.references = 1;  // as of somebody who acquired it
    {
        auto first = ref::share(a);
        const ref second = first, moved = std::move(first);
        CHECK_FALSE(first);  // NOLINT: what it is after the move is the question
        CHECK(second == moved);
        CHECK(second.get() == &a);
        CHECK(a.references == 2);
        ref other = ref::adopt(b);
        CHECK(b.references == 1);
        CHECK(other != second);
        other = second;
        CHECK(b.given_back == 1);
        CHECK(a.references == 3);
        const ref& same = other;
        other = same;
        CHECK(a.references == 3);
        CHECK(&other->given_back == &(*second).given_back);
    }
    CHECK(a.given_back == 1);
    CHECK(a.references == 0);
    CHECK_FALSE(ref{});
    CHECK(ref{} == ref{ref{}});
}

TEST_CASE("references are counted by several threads", "[base]") {
    counted a;
    std::optional<ref> mine = ref::share(a);
    support::together(3, [&](unsigned) {
        std::vector<ref> some;
        for (int i = 0; i < 2'000; ++i) {
            some.push_back(*mine);
            if (i % 3 == 0) some.erase(some.begin());
        }
    });
    CHECK(a.references == 1);
    CHECK(a.given_back == 0);
    mine.reset();
    CHECK(a.given_back == 1);
}
