// SPDX-License-Identifier: Apache-2.0
// Buckets of gradients on devices, on the host's backend: what each rank finds in its gradients
// behind a step, what is copied, and what is enqueued when. As compiled, packing is in tests/gpu.
#include <gpushare/gradient/device_buckets.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/quantised_all_reduce.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace device_buckets_test {

namespace gs = gpushare;
using gs::errc;

namespace {

/// Ranks on a device each, or all on one, whose gradients lie behind each other or apart.
template <class T, class Wire, class Packing = gs::kernel_packing>
struct machine {
    machine(std::uint32_t ranks_, bool together_, gs::bytes bucket, Packing packing = {})
        : ranks(ranks_),
          together(together_),
          node({.devices = together ? 1 : ranks, .sms = 8}),
          group(ranks, {.blocks = 2}),
          buckets(ranks, bucket, packing),
          of(ranks),
          staging(ranks) {
        for (std::uint32_t r = 0; r < ranks; ++r) {
            devices.push_back({together ? 0 : r});
            members.push_back(group.rank(r));
            if (!together || r == 0) streams.push_back(node.make_stream(devices[r]));
        }
    }
    /// Rank r's gradients are `apart(r)` elements apart.
    template <class Apart>
    void add(std::span<const std::size_t> sizes_, const Apart& apart) {
        sizes.assign(sizes_.begin(), sizes_.end());
        std::vector<std::size_t> at(ranks, 0);
        for (std::uint32_t r = 0; r < ranks; ++r)
            of[r].resize(std::accumulate(sizes.begin(), sizes.end(), std::size_t{1}) + sizes.size() * apart(r));
        for (std::size_t g = 0; g < sizes.size(); ++g) {
            std::vector<T*> where;
            for (std::uint32_t r = 0; r < ranks; ++r) {
                where.push_back(of[r].data() + at[r]);
                at[r] += sizes[g] + apart(r);
            }
            places.push_back(where);
            buckets.add("g" + std::to_string(g), where, sizes[g]);
        }
        for (auto& s : staging) s.resize(buckets.staging_bytes().count() / sizeof(Wire));
        for (auto& s : staging) to.push_back(s.data());
    }
    void fill(support::random& any) {
        for (auto& x : of)
            for (T& one : x) one = static_cast<T>((static_cast<float>(any.below(20'001)) - 10'000) / 997);
        before = of;
    }
    template <class Op>
    errc exact(std::span<const Wire* const> ins, std::span<Wire* const> outs, std::size_t n, Op op) {
        const std::span<const gs::member> who(members);
        ++calls;
        if (together)
            return gs::submit_shared_all_reduce<Wire>(node.gangs(), devices[0], streams[0], who, ins, outs, n, op);
        return gs::submit_all_reduce<Wire>(node.gangs(), std::span<const gs::device_id>(devices), std::span(streams),
                                           who, ins, outs, n, op);
    }
    errc advance() {
        return buckets.advance(std::span(streams), to,
                               [&](auto ins, auto outs, std::size_t n, auto op) { return exact(ins, outs, n, op); });
    }
    void wait() {
        for (auto& s : streams) s.record().wait(gs::never);
    }
    /// Whether gradients are averages of what went before, rounded as the wire rounds, and all else
    /// is as it was.
    [[nodiscard]] bool averaged() const {
        std::vector<std::vector<T>> expected = before;
        for (std::size_t g = 0; g < places.size(); ++g)
            for (std::size_t i = 0; i < sizes[g]; ++i) {
                const auto at = [&](std::uint32_t r) {
                    return static_cast<std::size_t>(places[g][r] - of[r].data()) + i;
                };
                float sum = static_cast<float>(static_cast<Wire>(before[0][at(0)]));
                for (std::uint32_t r = 1; r < ranks; ++r)
                    sum += static_cast<float>(static_cast<Wire>(before[r][at(r)]));
                const auto mean = static_cast<Wire>(sum / static_cast<float>(ranks));
                for (std::uint32_t r = 0; r < ranks; ++r) expected[r][at(r)] = static_cast<T>(static_cast<float>(mean));
            }
        return of == expected;
    }

    std::uint32_t ranks;
    bool together;
    gs::host::node node;
    gs::communicator group;
    gs::device_buckets<T, Wire, Packing> buckets;
    std::vector<gs::device_id> devices;
    std::vector<gs::host::stream> streams;
    std::vector<gs::member> members;
    std::vector<std::vector<T>> of, before{};
    std::vector<std::vector<Wire>> staging;
    std::vector<Wire*> to;
    std::vector<std::size_t> sizes;
    std::vector<std::vector<T*>> places;
    int calls = 0;
};

template <class T, class Wire>
void check_step(std::uint64_t seed) {
    support::random any(seed);
    const auto ranks = static_cast<std::uint32_t>(1 + any.below(4));
    machine<T, Wire> m(ranks, any.one_in(2), gs::bytes{1 + any.below(4000)});
    std::vector<std::size_t> sizes(1 + any.below(30));
    for (auto& n : sizes) n = any.one_in(8) ? 0 : any.below(any.one_in(4) ? 3000 : 60);
    const auto flat = static_cast<std::uint32_t>(any.below(ranks + 1));  // so many ranks' gradients are
    m.add(sizes, [&](std::uint32_t r) { return r < flat ? std::size_t{0} : std::size_t{1 + r}; });
    CAPTURE(seed, ranks, m.together, sizes.size(), flat);
    for (int step = 0; step < 2; ++step) {
        m.fill(any);
        std::vector<std::pair<std::uint32_t, std::uint32_t>> marks;
        for (std::uint32_t r = 0; r < ranks; ++r)
            for (std::uint32_t g = 0; g < sizes.size(); ++g) marks.emplace_back(r, g);
        for (std::size_t k = marks.size(); k > 1; --k) std::swap(marks[k - 1], marks[any.below(k)]);
        for (const auto& [r, g] : marks) {
            REQUIRE(m.buckets.ready(r, g) == errc::none);
            CHECK_FALSE(m.buckets.complete());
            if (any.one_in(3)) REQUIRE(m.advance() == errc::none);
        }
        REQUIRE(m.advance() == errc::none);
        CHECK(m.buckets.complete());
        CHECK(m.calls == static_cast<int>(m.buckets.plan().size()) * (step + 1));
        m.wait();
        CHECK(m.averaged());
    }
}

}  // namespace

TEST_CASE("gradients on devices are averaged in buckets, wherever they lie", "[gradient]") {
    for (std::uint64_t n = 0; n < 25; ++n) {
        check_step<float, float>(support::seed(n));
        check_step<float, gs::bfloat16>(support::seed(1000 + n));
        check_step<float, gs::float16>(support::seed(2000 + n));
        check_step<gs::bfloat16, gs::bfloat16>(support::seed(3000 + n));
    }
}

namespace {

/// Counts what it is asked for.
struct counted_packing {
    int* packed;
    template <class Stream, class T, class Wire>
    void pack(Stream& stream, std::span<const std::pair<T*, std::size_t>> pieces, Wire* flat) const {
        ++*packed;
        gs::kernel_packing{}.pack(stream, pieces, flat);
    }
    template <class Stream, class T, class Wire>
    void unpack(Stream& stream, std::span<const std::pair<T*, std::size_t>> pieces, Wire* flat) const {
        ++*packed;
        gs::kernel_packing{}.unpack(stream, pieces, flat);
    }
};

}  // namespace

TEST_CASE("one flat buffer of gradients is combined where it is", "[gradient]") {
    const std::vector<std::size_t> sizes{100, 0, 7, 64, 300};
    int packed = 0;
    machine<float, float, counted_packing> m(2, false, gs::bytes{500}, {&packed});
    m.add(sizes, [](std::uint32_t) { return std::size_t{0}; });
    CHECK(m.buckets.packed_elements() == 0);
    support::random any(1);
    m.fill(any);
    const auto step = [&] {
        for (std::uint32_t r = 0; r < 2; ++r)
            for (std::uint32_t g = 0; g < sizes.size(); ++g) CHECK(m.buckets.ready(r, g) == errc::none);
        CHECK(m.advance() == errc::none);
        m.wait();
    };
    step();
    CHECK(m.averaged());
    CHECK(packed == 0);
    // Of one rank whose gradients are apart, that one is packed and the other isn't.
    machine<float, float, counted_packing> half(2, true, gs::bytes{1 << 20}, {&packed});
    half.add(sizes, [](std::uint32_t r) { return std::size_t{r}; });
    CHECK(half.buckets.packed_elements() == 471);
    half.fill(any);
    for (std::uint32_t r = 0; r < 2; ++r)
        for (std::uint32_t g = 0; g < sizes.size(); ++g) (void)half.buckets.ready(r, g);
    CHECK(half.advance() == errc::none);
    half.wait();
    CHECK(half.averaged());
    CHECK(packed == 2);
}

TEST_CASE("a bucket of more gradients than a launch lists is packed by several, each of many blocks", "[gradient]") {
    machine<float, gs::bfloat16> m(2, false, gs::bytes{1 << 20});
    std::vector<std::size_t> sizes(3 * gs::detail::most_pieces + 5, 9);
    for (const std::size_t large : {3U, 200U, 201U}) sizes[large] = 30'001;
    m.add(sizes, [](std::uint32_t r) { return std::size_t{r}; });
    support::random any(2);
    m.fill(any);
    for (std::uint32_t r = 0; r < 2; ++r)
        for (std::uint32_t g = 0; g < m.buckets.size(); ++g) (void)m.buckets.ready(r, g);
    CHECK(m.advance() == errc::none);
    CHECK(m.calls == 1);
    m.wait();
    CHECK(m.averaged());
}

TEST_CASE("a bucket on devices is enqueued when all ranks have its gradients, in the plan's order", "[gradient]") {
    machine<float, float> m(2, true, gs::bytes{40});
    m.add(std::vector<std::size_t>(3, 10),
          [](std::uint32_t) { return std::size_t{1}; });  // a bucket each, the last first
    support::random any(3);
    m.fill(any);
    CHECK(m.buckets.ready(0, 2) == errc::none);
    CHECK(m.buckets.ready(0, 0) == errc::none);
    CHECK(m.buckets.ready(1, 0) == errc::none);
    CHECK(m.advance() == errc::none);
    CHECK(m.calls == 0);
    CHECK(m.buckets.stalled() == std::pair<std::string, std::uint32_t>("g2", 1));
    CHECK(m.buckets.ready(1, 2) == errc::none);
    CHECK(m.advance() == errc::none);
    CHECK(m.calls == 1);
    CHECK(m.buckets.stalled() == std::pair<std::string, std::uint32_t>("g1", 0));
    CHECK(m.buckets.ready(1, 2) == errc::mismatch);
    CHECK(m.buckets.ready(2, 0) == errc::mismatch);
    CHECK(m.buckets.ready(0, 3) == errc::mismatch);
    for (std::uint32_t r = 0; r < 2; ++r) CHECK(m.buckets.ready(r, 1) == errc::none);
    CHECK_FALSE(m.buckets.complete());
    CHECK(m.advance() == errc::none);
    CHECK(m.calls == 3);
    CHECK(m.buckets.complete());
    CHECK(m.buckets.stalled() == std::nullopt);
    m.wait();
    CHECK(m.averaged());
}

TEST_CASE("what an engine refuses is told, and its bucket is tried again", "[gradient]") {
    machine<float, float> m(2, false, gs::bytes{1 << 20});
    m.add(std::vector<std::size_t>{20, 30}, [](std::uint32_t) { return std::size_t{1}; });
    support::random any(4);
    m.fill(any);
    for (std::uint32_t r = 0; r < 2; ++r)
        for (std::uint32_t g = 0; g < 2; ++g) (void)m.buckets.ready(r, g);
    const auto refusing = [](auto, auto, std::size_t, auto) { return errc::too_many_blocks; };
    CHECK(m.buckets.advance(std::span(m.streams), m.to, refusing) == errc::too_many_blocks);
    CHECK_FALSE(m.buckets.complete());
    CHECK(m.advance() == errc::none);
    CHECK(m.buckets.complete());
    m.wait();
    CHECK(m.averaged());
    CHECK(m.buckets.advance(std::span(m.streams), std::span(m.to).first(1), refusing) == errc::invalid_specification);
    const std::vector<std::uint32_t> twice{0, 0};
    CHECK_THROWS_AS(m.buckets.arrange(twice), gs::operation_error);
    CHECK_THROWS_AS(m.buckets.add("x", std::span(m.places[0]).first(1), 3), gs::operation_error);
}

TEST_CASE("a quantised all-reduce is an engine of buckets on devices", "[gradient]") {
    machine<float, float> m(2, true, gs::bytes{1 << 20});
    m.add(std::vector<std::size_t>{200, 31}, [](std::uint32_t) { return std::size_t{3}; });
    support::random any(5);
    m.fill(any);
    for (std::uint32_t r = 0; r < 2; ++r)
        for (std::uint32_t g = 0; g < 2; ++g) (void)m.buckets.ready(r, g);
    const auto engine = [&](auto ins, auto outs, std::size_t n, auto op) {
        return gs::submit_shared_quantised_all_reduce<float, 32>(
            m.node.gangs(), m.devices[0], m.streams[0], std::span<const gs::member>(m.members), ins, outs, n, op);
    };
    CHECK(m.buckets.advance(std::span(m.streams), m.to, engine) == errc::none);
    m.wait();
    for (std::size_t g = 0; g < 2; ++g)
        for (std::size_t i = 0; i < m.sizes[g]; ++i) {
            const auto at = [&](std::uint32_t r) {
                return static_cast<std::size_t>(m.places[g][r] - m.of[r].data()) + i;
            };
            const float a = m.before[0][at(0)], b = m.before[1][at(1)];
            CHECK(std::abs(m.places[g][0][i] - (a + b) / 2) <= 33.0F / 512 * (std::abs(a) + std::abs(b)) + 1e-3F);
            CHECK(m.places[g][0][i] == m.places[g][1][i]);
        }
}

}  // namespace device_buckets_test
