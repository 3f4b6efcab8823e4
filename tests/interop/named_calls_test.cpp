// SPDX-License-Identifier: Apache-2.0
// Which calls ranks have in common, by their names: in any order, with ranks that join; and the
// calls that are refused.
#include <gpushare/gradient/detail/named_calls.hpp>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace named_calls_test {

namespace gs = gpushare;
using gs::collective_fault;
using gs::collective_kind;
using gs::errc;
using calls_type = gs::horovod::detail::named_calls<int>;

namespace {

gs::horovod::detail::named_call named(std::string name, std::uint64_t word = 1,
                                      collective_kind kind = collective_kind::all_reduce, std::uint32_t root = 0) {
    return {std::move(name), word, kind, root};
}
std::vector<std::string> names_of(const std::vector<calls_type::common>& some) {
    std::vector<std::string> all;
    for (const auto& c : some) all.push_back(c.what.name);
    return all;
}

}  // namespace

TEST_CASE("a call is common once the last rank has it, in whatever order ranks call", "[interop]") {
    const auto seed = support::seed(GENERATE(range(1U, 11U)));
    CAPTURE(seed);
    support::random any(seed);
    const auto ranks = static_cast<std::uint32_t>(1 + any.below(4));
    const int count = static_cast<int>(1 + any.below(20));
    std::vector<std::pair<std::uint32_t, int>> order;
    for (std::uint32_t r = 0; r < ranks; ++r)
        for (int k = 0; k < count; ++k) order.emplace_back(r, k);
    for (std::size_t k = order.size(); k > 1; --k) std::swap(order[k - 1], order[any.below(k)]);
    calls_type calls(ranks);
    std::vector<std::uint32_t> left(static_cast<std::size_t>(count), ranks);
    for (const auto& [r, k] : order) {
        const std::string name = "g" + std::to_string(k);
        CHECK_FALSE(calls.has(r, name));
        REQUIRE(calls.hand_over(r, named(name), 100 * static_cast<int>(r) + k));
        const auto now = calls.take();
        if (--left[static_cast<std::size_t>(k)] != 0) {
            CHECK(now.empty());
            CHECK(calls.has(r, name));
            continue;
        }
        REQUIRE(names_of(now) == std::vector<std::string>{name});
        CHECK_FALSE(now[0].fault);
        for (std::uint32_t q = 0; q < ranks; ++q) CHECK(now[0].of_ranks[q] == 100 * static_cast<int>(q) + k);
        CHECK_FALSE(calls.has(r, name));
    }
    CHECK(calls.drop().empty());
}

TEST_CASE("a rank has a name once at a time, and what it lacks is named", "[interop]") {
    calls_type calls(3);
    CHECK(calls.hand_over(1, named("x"), 1));
    CHECK_FALSE(calls.hand_over(1, named("x"), 2));
    CHECK(calls.lacking("x") == 0U);
    CHECK(calls.hand_over(0, named("x"), 3));
    CHECK(calls.lacking("x") == 2U);
    CHECK(calls.lacking("y") == std::nullopt);
    CHECK(calls.take().empty());
    CHECK(calls.drop() == std::vector<int>{3, 1});
    CHECK_FALSE(calls.has(1, "x"));
    CHECK(calls.lacking("x") == std::nullopt);
}

TEST_CASE("the odd rank of a mismatch is named, and of two the second one", "[interop]") {
    calls_type calls(3);
    for (std::uint32_t r = 0; r < 3; ++r) REQUIRE(calls.hand_over(r, named("x", r == 0 ? 7 : 8), 0));
    auto now = calls.take();
    REQUIRE(now.size() == 1);
    CHECK(now[0].fault == collective_fault{errc::mismatch, collective_kind::all_reduce, 0, 0});
    calls_type two(2);
    for (std::uint32_t r = 0; r < 2; ++r) REQUIRE(two.hand_over(r, named("x", r), 0));
    CHECK(two.take()[0].fault.rank == 1);
    // Of the ranks that are there: rank 0 has joined.
    calls.join(0);
    for (std::uint32_t r = 1; r < 3; ++r) REQUIRE(calls.hand_over(r, named("y", r), 0));
    CHECK(calls.take()[0].fault == collective_fault{errc::mismatch, collective_kind::all_reduce, 2, 0});
}

TEST_CASE("ranks that have joined aren't waited for, and only some collectives do without them", "[interop]") {
    calls_type calls(3);
    const auto on_others = [&](const char* name, collective_kind kind, std::uint32_t root = 0) {
        for (std::uint32_t r = 1; r < 3; ++r) REQUIRE(calls.hand_over(r, named(name, 1, kind, root), 5));
        auto now = calls.take();
        REQUIRE(now.size() == 1);
        return now[0];
    };
    for (std::uint32_t r = 1; r < 3; ++r) REQUIRE(calls.hand_over(r, named("early"), 5));
    CHECK(calls.take().empty());
    calls.join(0);
    CHECK(names_of(calls.take()) == std::vector<std::string>{"early"});
    const auto summed = on_others("sum", collective_kind::all_reduce);
    CHECK_FALSE(summed.fault);
    CHECK(summed.of_ranks == std::vector<std::optional<int>>{std::nullopt, 5, 5});
    CHECK_FALSE(on_others("sent", collective_kind::broadcast, 2).fault);
    CHECK(on_others("sent", collective_kind::broadcast, 0).fault ==
          collective_fault{errc::not_supported, collective_kind::broadcast, 0, 0});
    for (const auto kind : {collective_kind::all_gather, collective_kind::all_to_all, collective_kind::reduce_scatter})
        CHECK(on_others("all", kind).fault == collective_fault{errc::not_supported, kind, 0, 0});
    CHECK(calls.rounds() == 0);
    calls.join(2);
    calls.join(1);
    CHECK(calls.rounds() == 1);
    CHECK(calls.last_joined() == 1);
    // All are back.
    REQUIRE(calls.hand_over(1, named("late"), 5));
    CHECK(calls.take().empty());
    CHECK(calls.lacking("late") == 0U);
}

}  // namespace named_calls_test
