// SPDX-License-Identifier: Apache-2.0
// The collectives besides all-reduce, each against what it is defined to give.
#include <gpushare/collective/collectives.hpp>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include <gpushare/collective/all_reduce.hpp>

#include "collective/rig.hpp"
#include "support/catch.hpp"
#include "support/threads.hpp"

namespace collectives_test {

using gpushare::communicator;
using gpushare::errc;

namespace {

std::int32_t item(unsigned rank, std::size_t i) { return static_cast<std::int32_t>(rank * 100'003 + i * 7); }

std::vector<std::int32_t> items(unsigned rank, std::size_t n) {
    std::vector<std::int32_t> all(n);
    for (std::size_t i = 0; i < n; ++i) all[i] = item(rank, i);
    return all;
}

}  // namespace

TEST_CASE("every collective at many sizes and rank counts", "[collective]") {
    for (unsigned ranks = 1; ranks <= 5; ++ranks) {
        const communicator group(ranks);
        std::atomic<unsigned> wrong{0};
        const auto expect = [&](bool good) { wrong += good ? 0 : 1; };
        support::together(ranks, [&](unsigned rank) {
            const auto me = group.rank(rank);
            for (const std::size_t n : {0U, 1U, 17U, 64U, 1001U, 5000U}) {
                const auto mine = items(rank, n), whole = items(rank, n * ranks);
                std::vector<std::int32_t> part(n), all(n * ranks);

                expect(!gpushare::try_reduce_scatter(me, whole, std::span(part)));
                for (std::size_t i = 0; i < n; ++i) {
                    std::int32_t sum = 0;
                    for (unsigned r = 0; r < ranks; ++r) sum += item(r, rank * n + i);
                    expect(part[i] == sum);
                }
                expect(!gpushare::try_all_gather(me, mine, std::span(all)));
                for (unsigned r = 0; r < ranks; ++r)
                    for (std::size_t i = 0; i < n; ++i) expect(all[r * n + i] == item(r, i));

                const unsigned root = static_cast<unsigned>(n) % ranks;
                auto data = mine;
                expect(!gpushare::try_broadcast(me, std::span(data), root));
                for (std::size_t i = 0; i < n; ++i) expect(data[i] == item(root, i));

                std::vector<std::int32_t> at_root(rank == root ? n : 0);
                expect(!gpushare::try_reduce(me, mine, std::span(at_root), root, gpushare::maximum{}));
                for (std::size_t i = 0; i < at_root.size(); ++i) expect(at_root[i] == item(ranks - 1, i));

                expect(!gpushare::try_all_to_all(me, whole, std::span(all)));
                for (unsigned r = 0; r < ranks; ++r)
                    for (std::size_t i = 0; i < n; ++i) expect(all[r * n + i] == item(r, rank * n + i));
            }
        });
        CAPTURE(ranks);
        CHECK(wrong == 0);
    }
}

TEST_CASE("every collective at every size from 0 to 260 and around the copies' boundaries", "[collective]") {
    constexpr unsigned ranks = 3;
    const communicator group(ranks, {.blocks = 2});
    std::vector<std::size_t> sizes(261);
    std::iota(sizes.begin(), sizes.end(), std::size_t{0});
    for (const std::size_t boundary : {1024U, 4096U, 16'384U, 65'536U})
        for (std::size_t n = boundary - 1; n <= boundary + 1; ++n) sizes.push_back(n);
    std::atomic<std::size_t> wrong_at{0};
    support::together(ranks, [&](unsigned rank) {
        const auto me = group.rank(rank);
        for (const std::size_t n : sizes) {
            const auto expect = [&](bool good) {
                if (!good) wrong_at = n + 1;
            };
            const auto root = static_cast<std::uint32_t>(n % ranks), next = (root + 1) % ranks;
            const auto mine = items(rank, n), whole = items(rank, n * ranks);
            std::vector<std::int32_t> part(n + 1, -7), all(n * ranks + 1, -7);  // one more, which nobody writes
            const std::span to(part.data(), n), to_all(all.data(), n * ranks);
            expect(!gpushare::try_reduce_scatter(me, whole, to));
            expect(n == 0 ||
                   part[n - 1] == item(0, rank * n + n - 1) + item(1, rank * n + n - 1) + item(2, rank * n + n - 1));
            expect(!gpushare::try_all_gather(me, mine, to_all));
            for (unsigned r = 0; r < ranks; ++r)
                for (std::size_t i = 0; i < n; ++i) expect(all[r * n + i] == item(r, i));
            expect(!gpushare::try_all_to_all(me, whole, to_all));
            for (unsigned r = 0; r < ranks; ++r)
                for (std::size_t i = 0; i < n; ++i) expect(all[r * n + i] == item(r, rank * n + i));
            expect(!gpushare::try_reduce(me, mine, to, root, gpushare::maximum{}));
            if (rank == root)
                for (std::size_t i = 0; i < n; ++i) expect(part[i] == item(ranks - 1, i));
            std::copy(mine.begin(), mine.end(), part.begin());
            expect(!gpushare::try_broadcast(me, to, next));
            for (std::size_t i = 0; i < n; ++i) expect(part[i] == item(next, i));
            expect(part[n] == -7 && all[n * ranks] == -7);
        }
    });
    CHECK(wrong_at == 0);
}

TEMPLATE_TEST_CASE("reduce_scatter and all_gather in place make an all_reduce with the same bits, and so does reduce",
                   "[collective]", float, double, gpushare::bfloat16, gpushare::float16) {
    for (const unsigned ranks : {2U, 3U})
        for (const std::size_t n : {1U, 31U, 64U, 700U}) {
            const communicator group(ranks);
            std::atomic<unsigned> wrong{0};
            support::together(ranks, [&](unsigned rank) {
                const auto me = group.rank(rank);
                std::vector<TestType> x(n * ranks), y(n * ranks), z(n * ranks);
                for (std::size_t i = 0; i < x.size(); ++i)
                    x[i] = static_cast<TestType>(0.1F * static_cast<float>(i + 1) / static_cast<float>(rank + 3));
                if (gpushare::try_all_reduce(me, x, std::span(y))) ++wrong;
                if (gpushare::try_reduce(me, x, std::span(z), 1)) ++wrong;
                if (rank == 1 && z != y) ++wrong;
                const auto part = std::span(x).subspan(rank * n, n);
                if (gpushare::try_reduce_scatter(me, x, part)) ++wrong;
                if (gpushare::try_all_gather(me, part, std::span(x))) ++wrong;
                if (x != y) ++wrong;
            });
            CAPTURE(ranks, n);
            CHECK(wrong == 0);
        }
}

TEST_CASE("a barrier: nobody leaves before all have come", "[collective]") {
    constexpr unsigned ranks = 4, rounds = 200;
    const communicator group(ranks);
    std::atomic<unsigned> came{0}, wrong{0};
    support::together(ranks, [&](unsigned rank) {
        for (unsigned i = 1; i <= rounds; ++i) {
            came.fetch_add(1, std::memory_order_relaxed);
            gpushare::barrier(group.rank(rank));
            if (came.load(std::memory_order_relaxed) < ranks * i) ++wrong;
        }
    });
    CHECK(wrong == 0);
}

TEST_CASE("sizes that don't fit together are refused at once", "[collective]") {
    const communicator group(2);
    const auto me = group.rank(0);
    std::vector<int> three(3), two(2);
    CHECK(gpushare::try_reduce_scatter(me, three, std::span(two)).code == errc::mismatch);
    CHECK(gpushare::try_all_gather(me, two, std::span(three)).code == errc::mismatch);
    CHECK(gpushare::try_broadcast(me, std::span(two), 2).code == errc::mismatch);
    CHECK(gpushare::try_reduce(me, two, std::span(three), 0).code == errc::mismatch);
    CHECK(gpushare::try_all_to_all(me, two, std::span(two)).code == errc::mismatch);
    CHECK(gpushare::try_all_to_all(me, three, std::span(three)).code == errc::mismatch);
    CHECK_THROWS_AS(gpushare::all_to_all(me, three, std::span(two)), gpushare::operation_error);
}

TEST_CASE("ranks in different collectives, or with different roots, are told", "[collective]") {
    for (const bool roots : {false, true}) {
        const communicator group(2);
        std::vector<gpushare::collective_fault> faults(2);
        support::together(2, [&](unsigned rank) {
            std::vector<int> x(4);
            faults[rank] = roots       ? gpushare::try_broadcast(group.rank(rank), std::span(x), rank)
                           : rank == 0 ? gpushare::try_barrier(group.rank(rank))
                                       : gpushare::try_broadcast(group.rank(rank), std::span(x), 0);
        });
        CHECK(faults[0].code == errc::mismatch);
        CHECK(faults[1] == faults[0]);
    }
}

TEST_CASE("blocks of several threads exchange as one thread does", "[collective]") {
    constexpr unsigned ranks = 2;
    constexpr std::size_t n = 333;
    const communicator group(ranks);
    std::vector<std::vector<std::int32_t>> in(ranks), out(ranks, std::vector<std::int32_t>(n * ranks));
    for (unsigned r = 0; r < ranks; ++r) in[r] = items(r, n * ranks);
    CHECK(!collective_test::run_blocks(group, 3, gpushare::collective_kind::all_to_all, [&](auto& t) {
        return gpushare::detail::all_to_all_body<std::int32_t>{in[t.rank()].data(), out[t.rank()].data(), n}(t, 1);
    }));
    for (unsigned r = 0; r < ranks; ++r)
        for (std::size_t i = 0; i < n; ++i) REQUIRE(out[1][r * n + i] == item(r, n + i));
}

}  // namespace collectives_test
