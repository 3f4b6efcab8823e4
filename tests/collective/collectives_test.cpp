// SPDX-License-Identifier: Apache-2.0
// The collectives besides all-reduce, each against its definition.
#include <gpushare/collective/collectives.hpp>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "collective/rig.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
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

TEST_CASE("ranks with elements of different types, or with other roots and sizes, are told", "[collective]") {
    const auto told = [](const auto& call) {
        const communicator group(2);
        std::vector<gpushare::collective_fault> faults(2);
        support::together(2, [&](unsigned rank) { faults[rank] = call(group.rank(rank), rank); });
        return faults[0].code == errc::mismatch && faults[1] == faults[0];
    };
    const auto of_types = [&]<class First, class Second>(First, Second) {
        return told([](const gpushare::member& me, unsigned rank) {
            // Room for the larger type, so that a missed mismatch overwrites nothing.
            std::vector<First> x(80);
            std::vector<Second> y(80);
            if (rank == 0)
                return gpushare::try_all_gather(me, std::span<const First>(x).first(1), std::span(x).first(2));
            return gpushare::try_all_gather(me, std::span<const Second>(y).first(1), std::span(y).first(2));
        });
    };
    struct bytes_of_float {
        std::byte of[52];  // an id made of the size alone would be that of float
    };
    struct one_more {
        std::byte of[53];
    };
    CHECK(of_types(std::uint8_t{}, gpushare::float16{}));
    CHECK(of_types(std::uint16_t{}, gpushare::bfloat16{}));
    CHECK(of_types(std::uint16_t{}, gpushare::float16{}));
    CHECK(of_types(std::uint32_t{}, gpushare::fp8_e5m2{}));
    CHECK(of_types(std::uint32_t{}, float{}));
    CHECK(of_types(float{}, bytes_of_float{}));
    CHECK(of_types(one_more{}, bytes_of_float{}));
    CHECK(told([](const gpushare::member& me, unsigned rank) {
        std::vector<std::byte> x(std::size_t{1} << 20);
        return gpushare::try_broadcast(me, rank == 0 ? std::span(x) : std::span(x).first(0), rank);
    }));
}

TEST_CASE("blocks of several threads exchange as one thread does", "[collective]") {
    constexpr unsigned ranks = 2;
    constexpr std::size_t n = 333;
    for (const bool in_place : {false, true}) {
        const communicator group(ranks);
        std::vector<std::vector<std::int32_t>> in(ranks), out(ranks, std::vector<std::int32_t>(n * ranks));
        for (unsigned r = 0; r < ranks; ++r) in[r] = items(r, n * ranks);
        auto& result = in_place ? in : out;
        CHECK(!collective_test::run_blocks(group, 3, gpushare::collective_kind::all_to_all, [&](auto& t) {
            return gpushare::detail::all_to_all_body<std::int32_t>{in[t.rank()].data(), result[t.rank()].data(), n}(t,
                                                                                                                    1);
        }));
        CAPTURE(in_place);
        for (unsigned r = 0; r < ranks; ++r)
            for (std::size_t i = 0; i < n; ++i) REQUIRE(result[1][r * n + i] == item(r, n + i));
    }
}

TEST_CASE("all_to_all in place swaps parts of any length and size of elements", "[collective]") {
    struct three {
        std::int32_t of[3];
    };
    for (const unsigned ranks : {1U, 2U, 3U, 4U})
        for (const std::size_t n : {0U, 1U, 5U, 64U, 129U, 5000U}) {
            const communicator group(ranks);
            std::atomic<std::size_t> wrong{0};
            support::together(ranks, [&](unsigned rank) {
                auto x = items(rank, n * ranks);
                std::vector<three> y(n * ranks);
                for (std::size_t i = 0; i < y.size(); ++i) y[i] = {{item(rank, i), 0, item(rank, i + 1)}};
                if (gpushare::try_all_to_all(group.rank(rank), x, std::span(x))) ++wrong;
                if (gpushare::try_all_to_all(group.rank(rank), y, std::span(y))) ++wrong;
                for (unsigned r = 0; r < ranks; ++r)
                    for (std::size_t i = 0; i < n; ++i) {
                        wrong += x[r * n + i] == item(r, rank * n + i) ? 0 : 1;
                        wrong += y[r * n + i].of[2] == item(r, rank * n + i + 1) ? 0 : 1;
                    }
            });
            CAPTURE(ranks, n);
            CHECK(wrong == 0);
        }
}

TEST_CASE("all_to_all in place on some ranks only is a mismatch on all", "[collective]") {
    const communicator group(2);
    std::vector<gpushare::collective_fault> faults(2);
    support::together(2, [&](unsigned rank) {
        std::vector<int> x(4), y(4);
        faults[rank] = gpushare::try_all_to_all(group.rank(rank), x, std::span(rank == 0 ? x : y));
    });
    CHECK(faults[0].code == errc::mismatch);
    CHECK(faults[1] == faults[0]);
}

namespace {

using counts = std::vector<std::uint64_t>;
std::uint64_t before(const counts& c, unsigned rank) {
    return std::accumulate(c.begin(), c.begin() + rank, std::uint64_t{0});
}
/// Some are empty, and rank 0's or all of them may be.
counts random_counts(support::random& any, unsigned ranks) {
    counts all(ranks);
    const std::uint64_t most = any.one_in(8) ? 1 : any.one_in(4) ? 2000 : 70;
    for (auto& c : all) c = any.one_in(3) ? 0 : any.below(most);
    return all;
}

}  // namespace

TEST_CASE("collectives of unequal parts match their definition, empty parts too", "[collective]") {
    for (std::uint64_t round = 0; round < support::few(std::uint64_t{60}); ++round) {
        const auto seed = support::seed(round);
        support::random any(seed);
        const auto ranks = static_cast<unsigned>(1 + any.below(5));
        const counts of_ranks = random_counts(any, ranks);
        std::vector<counts> pairs;
        for (unsigned r = 0; r < ranks; ++r) pairs.push_back(random_counts(any, ranks));
        const bool in_place = any.one_in(2);
        const communicator group(ranks);
        std::atomic<unsigned> wrong{0};
        support::together(ranks, [&](unsigned rank) {
            const auto me = group.rank(rank);
            const auto expect = [&](bool good) { wrong += good ? 0 : 1; };
            const std::size_t n = of_ranks[rank], all = before(of_ranks, ranks), first = before(of_ranks, rank);
            const auto mine = items(rank, n);
            std::vector<std::int32_t> whole(all + 1, -7);
            std::copy(mine.begin(), mine.end(), whole.begin() + static_cast<std::ptrdiff_t>(first));
            const std::span<const std::int32_t> part(whole.data() + first, n);
            expect(!gpushare::try_all_gatherv(me, in_place ? part : std::span(mine), std::span(whole).first(all),
                                              of_ranks));
            for (unsigned r = 0; r < ranks; ++r)
                for (std::size_t i = 0; i < of_ranks[r]; ++i) expect(whole[before(of_ranks, r) + i] == item(r, i));
            expect(whole[all] == -7);

            auto in = items(rank, all);
            std::vector<std::int32_t> apart(n);
            const std::span out = in_place ? std::span(in).subspan(first, n) : std::span(apart);
            expect(!gpushare::try_reduce_scatterv(me, in, out, of_ranks));
            for (std::size_t i = 0; i < n; ++i) {
                std::int32_t sum = 0;
                for (unsigned r = 0; r < ranks; ++r) sum += item(r, first + i);
                expect(out[i] == sum);
            }

            counts receives(ranks);
            for (unsigned r = 0; r < ranks; ++r) receives[r] = pairs[r][rank];
            const auto sent = items(rank, before(pairs[rank], ranks));
            std::vector<std::int32_t> got(before(receives, ranks) + 1, -7);
            expect(!gpushare::try_all_to_allv(me, sent, pairs[rank], std::span(got), receives));
            for (unsigned r = 0; r < ranks; ++r)
                for (std::size_t i = 0; i < receives[r]; ++i)
                    expect(got[before(receives, r) + i] == item(r, before(pairs[r], rank) + i));
            expect(got.back() == -7);
        });
        CAPTURE(seed, ranks, in_place);
        CHECK(wrong == 0);
    }
}

TEST_CASE("ranks that disagree about lengths all get a mismatch at once, and no rank waits", "[collective]") {
    enum { counts_differ, too_short_in, too_short_out, too_few_counts, huge };
    for (const auto how : {counts_differ, too_short_in, too_short_out, too_few_counts, huge}) {
        for (const auto kind : {gpushare::collective_kind::all_gather, gpushare::collective_kind::reduce_scatter,
                                gpushare::collective_kind::all_to_all}) {
            constexpr unsigned ranks = 3, odd = 1;
            const communicator group(ranks);
            std::vector<gpushare::collective_fault> faults(ranks);
            const std::vector<std::int32_t> untouched(12, -7);
            std::atomic<unsigned> written{0};
            support::together(ranks, [&](unsigned rank) {
                const auto me = group.rank(rank);
                counts all(ranks, 4), sends(ranks, 4);
                std::size_t in_size = kind == gpushare::collective_kind::all_gather ? 4 : 12;
                std::size_t out_size = kind == gpushare::collective_kind::reduce_scatter ? 4 : 12;
                if (rank == odd && how == counts_differ) all[2] = 3, sends[0] = 3;
                if (rank == odd && how == too_short_in) --in_size;
                if (rank == odd && how == too_short_out) --out_size;
                if (rank == odd && how == too_few_counts) all.pop_back();
                if (rank == odd && how == huge) all[0] = ~std::uint64_t{0} - 3;
                const auto in = items(rank, in_size);
                auto out = untouched;
                const std::span to(out.data(), out_size);
                faults[rank] =
                    kind == gpushare::collective_kind::all_gather ? gpushare::try_all_gatherv(me, in, to, all)
                    : kind == gpushare::collective_kind::reduce_scatter
                        ? gpushare::try_reduce_scatterv(me, in, to, all)
                        : gpushare::try_all_to_allv(me, in, sends, to, how == counts_differ ? counts(3, 4) : all);
                if (how != counts_differ && out != untouched) ++written;
            });
            CAPTURE(static_cast<int>(how), to_string(kind));
            CHECK(faults[0].code == errc::mismatch);
            CHECK(faults[0].what == kind);
            CHECK(faults[1] == faults[0]);
            CHECK(faults[2] == faults[0]);
            if (how != counts_differ || kind == gpushare::collective_kind::all_to_all) CHECK(faults[0].rank == odd);
            CHECK(written == 0);
        }
    }
}

}  // namespace collectives_test
