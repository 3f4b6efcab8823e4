// SPDX-License-Identifier: Apache-2.0
// Two levels of ranks on CUDA devices, over the stand-in: nodes that are threads, with a device each that its ranks share. Exact sums,
// what goes over the link to the host, and what each node's devices get of a fault. The bits are checked on the host's backend
// (tests/gradient/two_level_devices_test.cpp), and ranks that have a device each on the PTX executor (tests/gpu/two_level.cpp).
#include <gpushare/gradient/two_level.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/gradient/device_buckets.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/numbers.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/threads.hpp"

namespace two_level_cuda_test {

namespace gs = gpushare;
namespace cuda = gpushare::cuda;
using namespace std::chrono_literals;
using gs::errc;

namespace {

using levels_type = gs::two_level_devices<std::remove_cvref_t<decltype(std::declval<cuda::node&>().gangs())>,
                                          cuda::stream, gs::thread_transport, cuda::pinned_memory>;

/// A node: ranks that share its device, and its end of the transport between nodes.
struct machine {
    machine(std::uint32_t at, std::uint32_t count, const gs::member& outside)
        : device{at}, of_ranks(count, device), group(node, pinned, of_ranks, {.blocks = 2}), outer(outside) {
        for (std::uint32_t r = 0; r < count; ++r) members.push_back(group.rank(r));
    }
    machine(const machine&) = delete;
    machine& operator=(const machine&) = delete;
    ~machine() {
        levels.reset();
        wait();
        for (const auto& [p, size] : memory) (void)node.memory(device).deallocate(p, size, 256);
    }
    /// Collective.
    void split(const gs::two_level_options& options) {
        levels = std::make_unique<levels_type>(node.gangs(), std::span(&device, 1), std::span(&stream, 1), members,
                                               outer, pinned, options);
    }
    /// An array of each rank, of n elements, in the device's memory.
    template <class T>
    [[nodiscard]] std::vector<T*> arrays(std::size_t n) {
        std::vector<T*> all;
        for (std::size_t r = 0; r < members.size(); ++r) {
            memory.emplace_back(node.memory(device).allocate(n * sizeof(T), 256), n * sizeof(T));
            all.push_back(static_cast<T*>(memory.back().first));
        }
        return all;
    }
    template <class T>
    void put(T* to, const std::vector<T>& from) {
        stream.copy(to, from.data(), from.size() * sizeof(T));
        wait();
    }
    template <class T>
    [[nodiscard]] std::vector<T> taken(const T* from, std::size_t n) {
        std::vector<T> to(n);
        stream.copy(to.data(), from, n * sizeof(T));
        wait();
        return to;
    }
    template <class T, class Op>
    gs::collective_fault all_reduce(const std::vector<T*>& in, const std::vector<T*>& out, std::size_t n, const Op& op,
                                    gs::instant deadline = gs::never) {
        return levels->all_reduce<T>(std::vector<const T*>(in.begin(), in.end()), out, n, op, deadline);
    }
    void wait() { (void)stream.record().wait(gs::never); }

    cuda::node node;
    cuda::pinned_memory pinned{node};
    gs::device_id device;
    std::vector<gs::device_id> of_ranks;
    gs::device_communicator<cuda::node, cuda::pinned_memory> group;
    gs::thread_transport outer;
    cuda::stream stream = node.make_stream(device);
    std::vector<gs::member> members;
    std::vector<std::pair<void*, std::size_t>> memory;
    std::unique_ptr<levels_type> levels;
};

/// Nodes of so many ranks each, joined by threads.
struct cluster {
    explicit cluster(const std::vector<std::uint32_t>& ranks, const gs::two_level_options& options = {})
        : between(static_cast<std::uint32_t>(ranks.size())) {
        for (std::uint32_t p = 0; p < ranks.size(); ++p)
            nodes.push_back(std::make_unique<machine>(p, ranks[p], between.rank(p)));
        each([&](unsigned, machine& m) { m.split(options); });
    }
    void each(const std::function<void(unsigned, machine&)>& f) const {
        support::together(static_cast<unsigned>(nodes.size()), [&](unsigned p) { f(p, *nodes[p]); });
    }
    const standin::session gpu{{.devices = 2, .sms = 16, .blocks_per_sm = 1}};
    gs::communicator between;
    std::vector<std::unique_ptr<machine>> nodes;
};

/// Small integers, whose sums are exact in any order: of rank `rank` of all, in its `call`.
template <class T>
T number(std::uint32_t rank, int call, std::size_t i) {
    return static_cast<T>(static_cast<float>((3 * rank + 5 * i + static_cast<std::size_t>(call)) % 17) - 8);
}

template <class T, class Op>
void check_results(const std::vector<std::uint32_t>& ranks, std::size_t n, const Op& op, const auto& wanted) {
    const cluster all(ranks, {.chunk = gs::bytes{4096}, .depth = 3});
    const auto size = static_cast<std::uint32_t>(all.nodes.back()->levels->size());
    for (const bool in_place : {false, true}) {
        std::vector<gs::collective_fault> faults(ranks.size());
        std::vector<std::size_t> wrong(ranks.size());
        all.each([&](unsigned p, machine& m) {
            const auto in = m.arrays<T>(n), out = in_place ? in : m.arrays<T>(n);
            for (std::uint32_t r = 0; r < in.size(); ++r) {
                std::vector<T> x(n);
                for (std::size_t i = 0; i < n; ++i) x[i] = number<T>(m.levels->first() + r, in_place, i);
                m.put(in[r], x);
            }
            faults[p] = m.all_reduce(in, out, n, op);
            for (const T* const mine : out) {
                const std::vector<T> got = m.taken(mine, n);
                for (std::size_t i = 0; i < n; ++i) wrong[p] += got[i] == wanted(size, in_place, i) ? 0U : 1U;
            }
        });
        CAPTURE(ranks, n, in_place);
        for (const auto& f : faults) CHECK_FALSE(f);
        CHECK(wrong == std::vector<std::size_t>(ranks.size()));
    }
}

template <class T>
T sum_of(std::uint32_t ranks, int call, std::size_t i) {
    float sum = 0;
    for (std::uint32_t r = 0; r < ranks; ++r) sum += static_cast<float>(number<T>(r, call, i));
    return static_cast<T>(sum);
}

}  // namespace

TEST_CASE("two levels of ranks on CUDA devices give the exact sums", "[cuda][gradient]") {
    for (const std::vector<std::uint32_t>& ranks : {std::vector<std::uint32_t>{2, 2}, {4, 4}, {4, 2}, {1, 1}})
        for (const std::size_t n : {std::size_t{1}, std::size_t{1024}, std::size_t{5003}}) {
            check_results<float>(ranks, n, gs::sum{}, sum_of<float>);
            check_results<gs::bfloat16>(ranks, n, gs::sum{}, sum_of<gs::bfloat16>);
            check_results<std::int32_t>(ranks, n, gs::maximum{}, [](std::uint32_t size, int call, std::size_t i) {
                std::int32_t most = number<std::int32_t>(0, call, i);
                for (std::uint32_t r = 1; r < size; ++r) most = std::max(most, number<std::int32_t>(r, call, i));
                return most;
            });
        }
}

TEST_CASE("each element on a CUDA device goes to pinned memory once and back once", "[cuda][gradient]") {
    const cluster all({2, 4}, {.chunk = gs::bytes{4096}});
    constexpr std::size_t n = 5003;
    std::vector<std::uint64_t> before(2), sent(2);
    all.each([&](unsigned p, machine& m) {
        const auto x = m.arrays<float>(n);
        for (float* const one : x) m.put(one, std::vector<float>(n, 3.0F));
        before[p] = m.outer.carried().count();
        (void)m.all_reduce(x, x, n, gs::average{});
        sent[p] = m.outer.carried().count() - before[p];
        for (const float* const one : x) CHECK(m.taken(one, n) == std::vector<float>(n, 3.0F));
    });
    for (std::uint32_t p = 0; p < 2; ++p) {
        CHECK(all.nodes[p]->levels->copied() == gs::bytes{2 * n * sizeof(float)});
        CHECK(sent[p] == n * sizeof(float) + sizeof(std::uint64_t));
    }
}

TEST_CASE("two levels on CUDA devices are an engine of buckets", "[cuda][gradient]") {
    const cluster all({2, 2}, {.chunk = gs::bytes{2048}});
    constexpr std::size_t sizes[] = {700, 31, 1200};
    std::vector<errc> codes(2, errc::stuck);
    std::vector<std::size_t> wrong(2);
    all.each([&](unsigned p, machine& m) {
        gs::device_buckets<float> buckets(2, gs::bytes{4000});
        std::vector<std::vector<float*>> g;
        for (const std::size_t n : sizes) {
            g.push_back(m.arrays<float>(n));
            for (std::uint32_t r = 0; r < 2; ++r) {
                std::vector<float> x(n);
                for (std::size_t i = 0; i < n; ++i) x[i] = number<float>(m.levels->first() + r, 0, i);
                m.put(g.back()[r], x);
            }
            buckets.add("g", g.back(), n);
        }
        const auto staging = m.arrays<float>(buckets.staging_bytes().count() / sizeof(float));
        for (std::uint32_t r = 0; r < 2; ++r)
            for (std::uint32_t k = 0; k < 3; ++k) (void)buckets.ready(r, k);
        codes[p] = buckets.advance(std::span(&m.stream, 1), staging, m.levels->engine());
        for (std::size_t k = 0; k < 3; ++k)
            for (const float* const mine : g[k]) {
                const auto got = m.taken(mine, sizes[k]);
                for (std::size_t i = 0; i < got.size(); ++i) wrong[p] += got[i] == sum_of<float>(4, 0, i) / 4 ? 0U : 1U;
            }
    });
    CHECK(codes == std::vector<errc>(2, errc::none));
    CHECK(wrong == std::vector<std::size_t>(2));
}

namespace {

/// What two nodes, of two and of four ranks, get when each calls f(node), and once more.
struct outcome {
    std::vector<gs::collective_fault> first{2}, again{2};
};
template <class F>
outcome faults_of(const cluster& all, const F& f) {
    outcome seen;
    all.each([&](unsigned p, machine& m) {
        seen.first[p] = f(p, m);
        const auto x = m.arrays<float>(500);
        seen.again[p] = m.all_reduce(x, x, 500, gs::sum{});
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
gs::collective_fault sum(machine& m, std::size_t n, gs::instant deadline = gs::never) {
    const auto x = m.arrays<float>(n);
    for (float* const one : x) m.put(one, std::vector<float>(n, 1.0F));
    return m.all_reduce(x, x, n, gs::sum{}, deadline);
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

TEST_CASE("a node that never comes is told by the other one's devices at their deadline", "[cuda][gradient]") {
    const cluster all({2, 4});
    std::vector<gs::collective_fault> faults(2);
    all.each([&](unsigned p, machine& m) {
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

/// The other node comes when the device has failed.
TEST_CASE("a copy that a device refuses is a fault on every node, of its first rank", "[cuda][gradient]") {
    for (const std::uint64_t skip : {0U, 1U, 3U}) {
        const cluster all({2, 4}, {.chunk = gs::bytes{1024}});
        std::latch over(1);
        check_faults(
            faults_of(all,
                      [&](unsigned p, machine& m) {
                          if (p == 0) over.wait();
                          const auto x = m.arrays<float>(200);
                          for (float* const one : x) m.put(one, std::vector<float>(200, 1.0F));
                          if (p == 1)
                              standin::inject({.call = "cudaMemcpyAsync", .code = cudaErrorUnknown, .skip = skip});
                          const auto f = m.all_reduce(x, x, 200, gs::sum{}, std::chrono::steady_clock::now() + 60s);
                          if (p == 1) over.count_down();
                          return f;
                      }),
            errc::backend_failed, 2);
    }
}

}  // namespace two_level_cuda_test
