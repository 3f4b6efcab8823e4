// SPDX-License-Identifier: Apache-2.0
// Two levels of ranks on CUDA devices, over the stand-in: nodes that are threads, each with a
// device that its ranks share. Tests exact sums, the bytes on the link to the host, and the faults
// that each node's devices get. The bits are checked on the host backend
// (tests/gradient/two_level_devices_test.cpp), and ranks with a device each on the PTX executor
// (tests/gpu/two_level_test.cpp).
#include "standins/cuda/launch.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <latch>
#include <span>
#include <vector>

#include <gpushare/gradient/device_buckets.hpp>
#include <gpushare/numbers.hpp>

#include "gpu/two_level.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"

namespace two_level_cuda_test {

namespace gs = gpushare;
using namespace std::chrono_literals;
using gs::errc;
using two_level::machine;
using two_level::number;
using two_level::sum_of;

namespace {

/// Nodes of so many ranks, with a device each.
struct cluster {
    explicit cluster(const std::vector<std::uint32_t>& ranks, const gs::two_level_options& options = {})
        : all(ranks, two_level::layout::shared, options) {}
    [[nodiscard]] const two_level::cluster* operator->() const noexcept { return &all; }

    const standin::session gpu{{.devices = 2, .sms = 16, .blocks_per_sm = 1}};
    two_level::cluster all;
};

template <class T, class Op>
gs::collective_fault all_reduce(machine& m, const std::vector<T*>& in, const std::vector<T*>& out, std::size_t n,
                                const Op& op, gs::instant deadline = gs::never) {
    return m.levels->all_reduce<T>(std::vector<const T*>(in.begin(), in.end()), out, n, op, deadline);
}

template <class T, class Op, class Wanted>
void check_results(const std::vector<std::uint32_t>& ranks, std::size_t n, const Op& op, const Wanted& wanted) {
    const cluster all(ranks, {.chunk = gs::bytes{4096}, .depth = 3});
    for (const bool in_place : {false, true}) {
        std::vector<gs::collective_fault> faults(ranks.size());
        std::vector<std::size_t> wrong(ranks.size());
        all->each([&](unsigned p, machine& m) {
            const auto in = m.arrays<T>(n, number<T>);
            const auto out = in_place ? in : m.arrays<T>(n, number<T>);
            faults[p] = all_reduce(m, in, out, n, op);
            wrong[p] = m.wrong(out, n, [&](std::size_t i) { return wanted(all->size, i); });
        });
        CAPTURE(ranks, n, in_place);
        for (const auto& f : faults) CHECK_FALSE(f);
        CHECK(wrong == std::vector<std::size_t>(ranks.size()));
    }
}

std::int32_t most_of(std::uint32_t ranks, std::size_t i) {
    auto most = number<std::int32_t>(0, i);
    for (std::uint32_t r = 1; r < ranks; ++r) most = std::max(most, number<std::int32_t>(r, i));
    return most;
}

}  // namespace

TEST_CASE("two levels of ranks on CUDA devices give the exact sums", "[cuda][gradient]") {
    for (const std::vector<std::uint32_t>& ranks : {std::vector<std::uint32_t>{2, 2}, {4, 4}, {4, 2}, {1, 1}})
        for (const std::size_t n : {std::size_t{1}, std::size_t{1024}, std::size_t{5003}}) {
            check_results<float>(ranks, n, gs::sum{}, sum_of<float>);
            check_results<gs::bfloat16>(ranks, n, gs::sum{}, sum_of<gs::bfloat16>);
            check_results<std::int32_t>(ranks, n, gs::maximum{}, most_of);
        }
}

TEST_CASE("each element on a CUDA device goes to pinned memory once and back once", "[cuda][gradient]") {
    const cluster all({2, 4}, {.chunk = gs::bytes{4096}});
    constexpr std::size_t n = 5003;
    std::vector<std::uint64_t> before(2), sent(2);
    std::vector<std::size_t> wrong(2);
    all->each([&](unsigned p, machine& m) {
        const auto x = m.arrays<float>(n, [](std::uint32_t, std::size_t) { return 3.0F; });
        before[p] = m.outer.carried().count();
        (void)all_reduce(m, x, x, n, gs::average{});
        sent[p] = m.outer.carried().count() - before[p];
        wrong[p] = m.wrong(x, n, [](std::size_t) { return 3.0F; });
    });
    CHECK(wrong == std::vector<std::size_t>(2));
    for (std::uint32_t p = 0; p < 2; ++p) {
        CHECK(all->nodes[p]->levels->copied() == gs::bytes{2 * n * sizeof(float)});
        CHECK(sent[p] == n * sizeof(float) + sizeof(std::uint64_t));
    }
}

TEST_CASE("two levels on CUDA devices are an engine of buckets", "[cuda][gradient]") {
    const cluster all({2, 2}, {.chunk = gs::bytes{2048}});
    constexpr std::size_t sizes[] = {700, 31, 1200};
    std::vector<errc> codes(2, errc::stuck);
    std::vector<std::size_t> wrong(2);
    all->each([&](unsigned p, machine& m) {
        gs::device_buckets<float> buckets(2, gs::bytes{4000});
        std::vector<std::vector<float*>> g;
        for (const std::size_t n : sizes) {
            g.push_back(m.arrays<float>(n, number<float>));
            buckets.add("g", g.back(), n);
        }
        const auto staging = m.arrays<float>(buckets.staging_bytes().count() / sizeof(float), number<float>);
        for (std::uint32_t r = 0; r < 2; ++r)
            for (std::uint32_t k = 0; k < 3; ++k) (void)buckets.ready(r, k);
        codes[p] = buckets.advance(std::span(m.streams), staging, m.levels->engine());
        for (std::size_t k = 0; k < 3; ++k)
            wrong[p] += m.wrong(g[k], sizes[k], [&](std::size_t i) { return sum_of<float>(all->size, i) / 4; });
    });
    CHECK(codes == std::vector<errc>(2, errc::none));
    CHECK(wrong == std::vector<std::size_t>(2));
}

namespace {

gs::collective_fault sum(machine& m, std::size_t n, gs::instant deadline = gs::never) {
    const auto x = m.arrays<float>(n, number<float>);
    return all_reduce(m, x, x, n, gs::sum{}, deadline);
}

/// What two nodes, of two and of four ranks, get when each calls f(node), and once more.
struct outcome {
    std::vector<gs::collective_fault> first{2}, again{2};
};
template <class F>
outcome faults_of(const cluster& all, const F& f) {
    outcome seen;
    all->each([&](unsigned p, machine& m) {
        seen.first[p] = f(p, m);
        seen.again[p] = sum(m, 500);
        m.wait();  // nothing hangs on a device
    });
    return seen;
}
void check_faults(const outcome& seen, errc code, std::uint32_t rank) {
    for (std::uint32_t p = 0; p < 2; ++p) {
        CAPTURE(p);
        CHECK(seen.first[p].code == code);
        CHECK(seen.first[p].rank == rank);
        CHECK(seen.again[p] == seen.first[p]);
    }
}

}  // namespace

TEST_CASE("a link that another node ends is a fault of every node's devices, with the rank", "[cuda][gradient]") {
    const cluster all({2, 4}, {.chunk = gs::bytes{1024}});
    check_faults(faults_of(all,
                           [](unsigned p, machine& m) {
                               if (p == 1) m.levels->abort(4, errc::stopped);
                               return sum(m, 5000);
                           }),
                 errc::stopped, 4);
}

TEST_CASE("a node that never comes is named to the other one's devices at their deadline", "[cuda][gradient]") {
    const cluster all({2, 4});
    std::vector<gs::collective_fault> faults(2);
    all->each([&](unsigned p, machine& m) {
        if (p == 0) faults[p] = sum(m, 500, std::chrono::steady_clock::now() + 300ms);
        m.wait();
    });
    CHECK(faults[0].code == errc::deadline_exceeded);
    CHECK(faults[0].rank == 2);
}

TEST_CASE("a device whose group has ended is named on every node", "[cuda][gradient]") {
    const cluster all({2, 4});
    check_faults(faults_of(all,
                           [](unsigned p, machine& m) {
                               if (p == 1) m.members[3].close({errc::aborted, gs::collective_kind::all_reduce, 3, 0});
                               return sum(m, 500);
                           }),
                 errc::aborted, 5);
}

/// Of any of its ranks. The other node comes once that has happened, and would wait for a minute.
TEST_CASE("a copy that a device refuses is a fault on every node", "[cuda][gradient]") {
    const auto skipped = static_cast<std::uint64_t>(GENERATE(0, 1, 3));
    const cluster all({2, 4}, {.chunk = gs::bytes{1024}});
    std::latch over(1);
    check_faults(
        faults_of(all,
                  [&](unsigned p, machine& m) {
                      if (p == 0) over.wait();
                      const auto x = m.arrays<float>(200, number<float>);
                      if (p == 1)
                          standin::inject({.call = "cudaMemcpyAsync", .code = cudaErrorUnknown, .skip = skipped});
                      const auto deadline = std::chrono::steady_clock::now() + 60s;
                      const auto f = all_reduce(m, x, x, 200, gs::sum{}, deadline);
                      if (p == 1) over.count_down();
                      return f;
                  }),
        errc::backend_failed, 2);
}

}  // namespace two_level_cuda_test
