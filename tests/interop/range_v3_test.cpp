// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Data partitions as range-v3 views.
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include <range/v3/algorithm/fill.hpp>
#include <range/v3/algorithm/sort.hpp>
#include <range/v3/numeric/accumulate.hpp>
#include <range/v3/range/concepts.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/join.hpp>
#include <range/v3/view/transform.hpp>

#include <gpushare/interop/range_v3.hpp>
#include <gpushare/partition/data_partition.hpp>

#include "support/catch.hpp"

using gpushare::block_cyclic_partition;
using gpushare::contiguous_partition;
using gpushare::weighted_partition;
namespace views = gpushare::views;

TEST_CASE("the indices of all ranks are the whole", "[interop][range]") {
    const auto check = [](const auto& p) {
        auto all = views::ranks(p) | ::ranges::views::transform([&](std::uint32_t r) {
                       return views::indices(p, r) | ::ranges::to<std::vector>;
                   }) |
                   ::ranges::views::join | ::ranges::to<std::vector>;
        ::ranges::sort(all);
        std::vector<std::uint64_t> expected(p.size());
        std::iota(expected.begin(), expected.end(), 0U);
        CHECK(all == expected);
    };
    check(contiguous_partition{100, 7, 4});
    check(block_cyclic_partition{100, 7, 4});
    check(weighted_partition<>{100, std::array<std::uint64_t, 3>{1, 0, 5}});
    check(contiguous_partition{0, 3});
}

TEST_CASE("indices are random access and in local order", "[interop][range]") {
    const block_cyclic_partition p{20, 2, 3};
    const auto mine = views::indices(p, 1);
    CPP_assert(::ranges::random_access_range<decltype(mine)>);
    CHECK(mine[3] == 9);
    CHECK((mine | ::ranges::to<std::vector>) == std::vector<std::uint64_t>{3, 4, 5, 9, 10, 11, 15, 16, 17});
}

TEST_CASE("elements and parts refer to the array", "[interop][range]") {
    std::vector<int> all(10, 0);
    for (const auto rank : {0U, 1U})
        ::ranges::fill(views::elements(std::span(all), block_cyclic_partition{10, 2, 2}, rank), static_cast<int>(rank));
    CHECK(all == std::vector<int>{0, 0, 1, 1, 0, 0, 1, 1, 0, 0});

    const contiguous_partition p{10, 3};
    int rank = 0;
    for (auto part : views::parts(std::span(all), p)) {
        CHECK(part.size() == p.extent(static_cast<std::uint32_t>(rank)));
        ::ranges::fill(part, rank++);
    }
    CHECK(all == std::vector<int>{0, 0, 0, 0, 1, 1, 1, 2, 2, 2});
    const auto sums = views::parts(std::span<const int>(all), p) |
                      ::ranges::views::transform([](auto part) { return ::ranges::accumulate(part, 0); });
    CHECK((sums | ::ranges::to<std::vector>) == std::vector<int>{0, 3, 6});
}

TEST_CASE("an array of another size than the partition's is refused", "[interop][range]") {
    std::vector<int> all(9);
    CHECK_THROWS_AS(views::parts(std::span(all), contiguous_partition{10, 3}), gpushare::operation_error);
    CHECK_THROWS_AS(views::elements(std::span(all), contiguous_partition{10, 3}, 0), gpushare::operation_error);
}
