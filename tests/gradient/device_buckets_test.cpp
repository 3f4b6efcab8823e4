// SPDX-License-Identifier: Apache-2.0
// Buckets of gradients on devices, on the host backend: each rank's gradients after a step, the
// copies, and the order of enqueuing. tests/gpu runs the compiled packing.
#include <gpushare/gradient/device_buckets.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/quantised_all_reduce.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/wire.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

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

TEST_CASE("a gradient of no elements may lie anywhere, and its bucket isn't packed for that", "[gradient]") {
    // Frameworks say "nowhere" of a tensor without elements, and give no staging for one flat
    // buffer.
    machine<float, float> m(2, false, gs::bytes{1 << 20});
    std::vector<float> x(20, 1), y(20, 3);
    std::vector<float*> nowhere(2, nullptr), no_staging(2, nullptr);
    m.buckets.add("none", nowhere, 0);
    m.buckets.add("first", std::vector<float*>{x.data(), y.data()}, 13);
    m.buckets.add("none again", nowhere, 0);
    m.buckets.add("second", std::vector<float*>{x.data() + 13, y.data() + 13}, 7);
    CHECK(m.buckets.packed_elements() == 0);
    for (std::uint32_t r = 0; r < 2; ++r)
        for (std::uint32_t g = 0; g < m.buckets.size(); ++g) CHECK(m.buckets.ready(r, g) == errc::none);
    REQUIRE(m.buckets.packed_elements() == 0);
    m.to = no_staging;
    CHECK(m.advance() == errc::none);
    m.wait();
    CHECK(x == std::vector<float>(20, 2));
    CHECK(y == x);
    // A step of nothing at all is a step.
    machine<float, float> none(2, true, gs::bytes{1 << 20});
    none.buckets.add("none", nowhere, 0);
    for (std::uint32_t r = 0; r < 2; ++r) CHECK(none.buckets.ready(r, 0) == errc::none);
    none.to = no_staging;
    CHECK(none.advance() == errc::none);
    CHECK(none.buckets.complete());
    none.wait();
    CHECK_FALSE(gs::fault_of(none.members[0]));
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

TEST_CASE("an engine's refusal is told, and its bucket is tried again", "[gradient]") {
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

namespace {

/// Error feedback of two ranks, beside to_wire on the host.
template <class Wire>
struct owing_machine {
    explicit owing_machine(bool together) : m(2, together, gs::bytes{700}) {
        m.add(sizes, [](std::uint32_t r) { return std::size_t{r}; });
        for (std::uint32_t r = 0; r < 2; ++r) {
            memory.emplace_back(m.buckets.feedback_bytes().count() / sizeof(float));
            owed.emplace_back();
            for (const std::size_t n : sizes) owed[r].emplace_back(n);
        }
        m.buckets.feed_back(std::vector<float*>{memory[0].data(), memory[1].data()});
        m.buckets.watch(std::vector<std::uint32_t*>{&flags[0], &flags[1]});
    }
    void mark_all() {
        for (std::uint32_t r = 0; r < 2; ++r)
            for (std::uint32_t g = 0; g < sizes.size(); ++g) REQUIRE(m.buckets.ready(r, g) == errc::none);
    }
    /// A step, and what the host gets.
    void step(support::random& any, bool skipped, bool finite = true) {
        m.fill(any);
        if (!finite) m.places[1][1][2] = std::nanf("");
        m.before = m.of;
        auto was = owed;
        std::vector<std::vector<float>> expected;
        for (std::size_t g = 0; g < sizes.size(); ++g) {
            std::vector<std::vector<Wire>> wire(2, std::vector<Wire>(sizes[g]));
            for (std::uint32_t r = 0; r < 2; ++r)
                gs::to_wire(std::span<const float>(m.places[g][r], sizes[g]), std::span(wire[r]),
                            std::span(owed[r][g]));
            auto& mean = expected.emplace_back();
            for (std::size_t i = 0; i < sizes[g]; ++i)
                mean.push_back(static_cast<float>(
                    static_cast<Wire>((static_cast<float>(wire[0][i]) + static_cast<float>(wire[1][i])) / 2)));
        }
        mark_all();
        REQUIRE(m.advance() == errc::none);
        m.wait();
        for (std::size_t g = 0; g < sizes.size(); ++g)
            for (std::size_t i = 0; i < sizes[g]; ++i) {
                const bool odd = !finite && g == 1 && i == 2;
                for (std::uint32_t r = 0; r < 2; ++r)
                    CHECK((odd ? std::isnan(m.places[g][r][i]) : m.places[g][r][i] == expected[g][i]));
            }
        if (skipped) {
            m.buckets.skip();
            m.buckets.skip();  // once for each step
            owed = was;
        }
        for (std::uint32_t r = 0; r < 2; ++r)
            for (std::uint32_t g = 0; g < sizes.size(); ++g)
                CHECK(std::equal(owed[r][g].begin(), owed[r][g].end(), m.buckets.owed(r, g)));
    }

    std::vector<std::size_t> sizes{100, 7, 0, 300, 64};
    machine<float, Wire> m;
    std::vector<std::vector<float>> memory;
    std::vector<std::vector<std::vector<float>>> owed;
    std::uint32_t flags[2] = {0, 0};
};
template <class Wire>
void check_feedback(std::uint64_t seed) {
    CAPTURE(seed);
    support::random any(seed);
    owing_machine<Wire> o(any.one_in(2));
    for (int step = 0; step < 6; ++step) o.step(any, any.one_in(3));
    CHECK(o.flags[0] == 0);
    CHECK(o.flags[1] == 0);
    o.step(any, true, false);
    CHECK(o.flags[0] == 1);
    CHECK(o.flags[1] == 1);
    o.step(any, false);
}

}  // namespace

TEST_CASE("error feedback on devices keeps what rounding takes: the bits of the host's, skipped steps too",
          "[gradient]") {
    for (std::uint64_t n = 0; n < 8; ++n) {
        check_feedback<gs::bfloat16>(support::seed(n));
        check_feedback<gs::float16>(support::seed(100 + n));
    }
}

TEST_CASE("error feedback of a bucket that is tried again counts once", "[gradient]") {
    owing_machine<gs::bfloat16> refused(true), straight(true);
    for (auto* const o : {&refused, &straight}) {
        support::random any(6);
        for (int step = 0; step < 3; ++step) {
            o->m.fill(any);
            o->mark_all();
            const auto refusing = [](auto, auto, std::size_t, auto) { return errc::too_many_blocks; };
            if (o == &refused)
                CHECK(o->m.buckets.advance(std::span(o->m.streams), o->m.to, refusing) == errc::too_many_blocks);
            REQUIRE(o->m.advance() == errc::none);
            o->m.wait();
        }
    }
    CHECK(refused.m.of == straight.m.of);
    CHECK(refused.memory == straight.memory);
    CHECK_THROWS_AS(refused.m.buckets.feed_back(std::vector<float*>{nullptr}), gs::operation_error);
    CHECK_THROWS_AS(refused.m.buckets.watch(std::vector<std::uint32_t*>{nullptr}), gs::operation_error);
}

TEST_CASE("an infinity in one flat buffer is found as well", "[gradient]") {
    machine<float, float> m(2, false, gs::bytes{400});
    m.add(std::vector<std::size_t>{50, 90}, [](std::uint32_t) { return std::size_t{0}; });
    CHECK(m.buckets.packed_elements() == 0);
    std::uint32_t flags[2] = {0, 0};
    m.buckets.watch(std::vector<std::uint32_t*>{&flags[0], &flags[1]});
    support::random any(7);
    for (const bool finite : {true, false}) {
        m.fill(any);
        if (!finite) m.places[0][1][49] = HUGE_VALF;
        for (std::uint32_t r = 0; r < 2; ++r)
            for (std::uint32_t g = 0; g < 2; ++g) (void)m.buckets.ready(r, g);
        CHECK(m.advance() == errc::none);
        m.wait();
        CHECK(flags[0] == (finite ? 0U : 1U));
        CHECK(flags[1] == flags[0]);
    }
}

namespace {

/// Ranks that send each other fp8 blocks of 32, with error feedback, beside threads that do.
struct fp8_machine {
    fp8_machine(std::uint32_t ranks, bool together) : m(ranks, together, gs::bytes{1200}) {
        m.add(std::vector<std::size_t>{100, 7, 0, 300, 64}, [](std::uint32_t r) { return std::size_t{r}; });
        owing.emplace(m.buckets);
        use_zeroed();
        for (std::uint32_t b = 0; b < m.buckets.plan().size(); ++b)
            residuals.emplace_back(ranks, std::vector<float>(bucket(b, 0).size()));
    }
    void use_zeroed() {
        std::vector<float*> zeroed;
        for (std::uint32_t r = 0; r < m.ranks; ++r)
            zeroed.push_back(memory.emplace_back(owing->memory_bytes().count() / sizeof(float)).data());
        owing->use(zeroed);
    }
    /// Goes on in other memory, with what was saved. The threads go on without an interruption.
    void restore() {
        std::vector<std::vector<float>> saved;
        for (std::uint32_t r = 0; r < m.ranks; ++r)
            saved.emplace_back(owing->owed(r), owing->owed(r) + m.buckets.elements());
        use_zeroed();
        for (std::uint32_t r = 0; r < m.ranks; ++r) std::copy(saved[r].begin(), saved[r].end(), owing->owed(r));
    }
    /// What a rank has in a bucket, one gradient behind the other.
    [[nodiscard]] std::vector<float> bucket(std::uint32_t b, std::uint32_t r) {
        std::vector<float> all;
        for (const std::uint32_t g : m.buckets.plan().gradients(b))
            all.insert(all.end(), m.places[g][r], m.places[g][r] + m.sizes[g]);
        return all;
    }
    [[nodiscard]] std::vector<std::vector<std::vector<float>>> by_threads() {
        std::vector<std::vector<std::vector<float>>> all;
        const gs::communicator group(m.ranks);
        for (std::uint32_t b = 0; b < residuals.size(); ++b) {
            auto& x = all.emplace_back(m.ranks);
            support::together(m.ranks, [&](unsigned r) {
                x[r] = bucket(b, r);
                gs::feed_back_quantised<32>(x[r], x[r], residuals[b][r]);
                gs::quantised_all_reduce<32>(group.rank(r), x[r], std::span(x[r]), gs::average{});
            });
        }
        return all;
    }
    [[nodiscard]] errc advance() {
        const auto coded = [&](auto ins, auto outs, std::size_t n, auto op) {
            if (refused-- == 0) return errc::too_many_blocks;
            const std::span<const gs::member> who(m.members);
            if (m.together)
                return gs::submit_shared_quantised_all_reduce<float, 32>(m.node.gangs(), m.devices[0], m.streams[0],
                                                                         who, ins, outs, n, op);
            return gs::submit_quantised_all_reduce<float, 32>(m.node.gangs(), std::span<const gs::device_id>(m.devices),
                                                              std::span(m.streams), who, ins, outs, n, op);
        };
        return m.buckets.advance(std::span(m.streams), m.to, owing->engine(std::span(m.streams), coded));
    }
    void check_step(support::random& any) {
        m.fill(any);
        const auto before = residuals;
        const auto expected = by_threads();
        for (std::uint32_t r = 0; r < m.ranks; ++r)
            for (std::uint32_t g = 0; g < m.sizes.size(); ++g) REQUIRE(m.buckets.ready(r, g) == errc::none);
        refused = any.one_in(2) ? static_cast<int>(any.below(residuals.size())) : -1;
        if (refused >= 0) CHECK(advance() == errc::too_many_blocks);
        REQUIRE(advance() == errc::none);
        m.wait();
        const bool skipped = any.one_in(3);
        if (skipped) {
            owing->skip();
            owing->skip();  // which does nothing
            residuals = before;
        }
        std::size_t at = 0;
        for (std::uint32_t b = 0; b < residuals.size(); at += residuals[b++][0].size())
            for (std::uint32_t r = 0; r < m.ranks; ++r) {
                CHECK(bucket(b, r) == expected[b][r]);
                CHECK(std::equal(residuals[b][r].begin(), residuals[b][r].end(), owing->owed(r) + at));
            }
    }

    machine<float, float> m;
    std::optional<gs::device_fp8_feedback<32>> owing{};
    std::vector<std::vector<float>> memory{};
    std::vector<std::vector<std::vector<float>>> residuals{};  // of each bucket, of each rank
    int refused = -1;                                          // so many calls of the engine later
};

}  // namespace

TEST_CASE("fp8 blocks with error feedback on devices have the bits of threads with it, refused and restored too",
          "[gradient]") {
    for (std::uint64_t n = 0; n < 8; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        support::random any(seed);
        fp8_machine both(static_cast<std::uint32_t>(2 + any.below(2)), any.one_in(2));
        REQUIRE(both.residuals.size() > 1);
        for (int step = 0; step < 5; ++step) {
            if (step == 2) both.restore();
            both.check_step(any);
        }
    }
    fp8_machine other(2, true);
    const auto none = [](auto, auto, std::size_t, auto) { return errc::none; };
    const auto engine = other.owing->engine(std::span(other.m.streams), none);
    const std::vector<const float*> one(1), two(2);
    const std::vector<float*> out(2);
    CHECK(engine(std::span(one), std::span(out).first(1), 1, gs::average{}, 0) == errc::invalid_specification);
    CHECK(engine(std::span(two), std::span(out), 472, gs::average{}, 0) == errc::invalid_specification);
    CHECK(engine(std::span(two), std::span(out), 1, gs::average{}, 471) == errc::invalid_specification);
    CHECK_THROWS_AS(other.owing->use(std::vector<float*>{nullptr}), gs::operation_error);
}

namespace {

/// Gradients of a rank, step after step: of one sign and size for each element, sizes far apart.
struct steady_gradients {
    explicit steady_gradients(std::size_t n, support::random& any) : sizes(n) {
        for (float& x : sizes) x = std::ldexp(any.one_in(2) ? 1.0F : -1.0F, -static_cast<int>(any.below(22)));
    }
    void next(float* to, support::random& any) const {
        for (std::size_t i = 0; i < sizes.size(); ++i)
            to[i] = sizes[i] * (0.5F + static_cast<float>(any.below(1001)) / 1000);
    }
    std::vector<float> sizes;
};
/// What was sent of what was to be sent, by a rank, element by element.
struct sent_so_far {
    explicit sent_so_far(std::size_t n) : wanted(n), sent(n), largest(n), last(n) {}
    /// The codes of `x`, which a group of one rank sends to itself.
    void add(const float* gradient, const float* x) {
        last.assign(x, x + last.size());
        std::vector<float> carried = last;
        const gs::communicator alone(1);
        gs::quantised_all_reduce<32>(alone.rank(0), last, std::span(carried));
        for (std::size_t i = 0; i < last.size(); ++i) {
            wanted[i] += static_cast<double>(gradient[i]);
            sent[i] += static_cast<double>(carried[i]);
            largest[i] = std::max(largest[i], std::abs(static_cast<double>(last[i])));
        }
        ++steps;
    }
    /// Elements that are off by more than so many roundings of the last step, and by what adding in
    /// float takes.
    [[nodiscard]] std::size_t off(double roundings) const {
        std::size_t some = 0;
        for (std::size_t i = 0; i < last.size(); ++i) {
            double most = 0;  // of the block
            for (std::size_t k = i / 32 * 32; k < std::min(last.size(), i / 32 * 32 + 32); ++k)
                most = std::max(most, std::abs(static_cast<double>(last[k])));
            const double rounding = std::abs(static_cast<double>(last[i])) / 16 + most / 229'376;
            const double adding = steps * largest[i] * 0x1p-24;
            some += std::abs(sent[i] - wanted[i]) > roundings * rounding + adding ? 1 : 0;
        }
        return some;
    }
    std::vector<double> wanted, sent, largest;
    std::vector<float> last;
    int steps = 0;
};

}  // namespace

TEST_CASE("with error feedback what fp8 blocks sent stays within a rounding of the gradients, and drifts without",
          "[gradient]") {
    for (std::uint64_t n = 0; n < 4; ++n) {
        const auto seed = support::seed(200 + n);
        CAPTURE(seed);
        support::random any(seed);
        constexpr std::size_t elements = 300;
        machine<float, float> m(2, any.one_in(2), gs::bytes{1 << 20});
        m.add(std::vector<std::size_t>{elements}, [](std::uint32_t) { return std::size_t{0}; });
        gs::device_fp8_feedback<32> owing(m.buckets);
        std::vector<std::vector<float>> memory(2, std::vector<float>(owing.memory_bytes().count() / sizeof(float)));
        owing.use(std::vector<float*>{memory[0].data(), memory[1].data()});
        const std::vector<steady_gradients> of{steady_gradients(elements, any), steady_gradients(elements, any)};
        std::vector<sent_so_far> with(2, sent_so_far(elements)), without = with;
        for (int step = 0; step < 60; ++step) {
            for (std::uint32_t r = 0; r < 2; ++r) {
                of[r].next(m.places[0][r], any);
                without[r].add(m.places[0][r], m.places[0][r]);
                REQUIRE(m.buckets.ready(r, 0) == errc::none);
            }
            const auto coded = [&](std::span<const float* const> ins, auto, std::size_t, auto) {
                m.wait();
                for (std::uint32_t r = 0; r < 2; ++r) with[r].add(m.places[0][r], ins[r]);
                return errc::none;
            };
            REQUIRE(m.buckets.advance(std::span(m.streams), m.to, owing.engine(std::span(m.streams), coded)) ==
                    errc::none);
        }
        for (std::uint32_t r = 0; r < 2; ++r) {
            CHECK(with[r].off(1) == 0);
            CHECK(without[r].off(4) > elements / 50);
        }
    }
}

namespace {

/// The choice of top_k_feedback, by one thread of one block: what CUB does on a device.
struct chosen_by_a_thread {
    const float* gradient;
    float* owed;
    std::size_t n, k;
    std::uint32_t* places;
    float* values;
    template <class C>
    void operator()(C& ctx) const {
        if (ctx.block_rank() != 0 || ctx.thread_rank() != 0) return;
        std::vector<std::uint32_t> order(n);
        std::iota(order.begin(), order.end(), 0U);
        for (std::size_t i = 0; i < n; ++i) owed[i] += gradient[i];
        std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
            const auto of = [&](std::uint32_t i) { return std::isnan(owed[i]) ? HUGE_VALF : std::abs(owed[i]); };
            return of(a) > of(b);
        });
        for (std::size_t j = 0; j < k; ++j) {
            places[j] = order[j];
            values[j] = std::exchange(owed[order[j]], 0.0F);
        }
    }
};
struct by_a_thread {
    template <class Stream>
    void operator()(Stream& s, const float* gradient, float* owed, std::size_t n, std::size_t k, std::uint32_t* places,
                    float* values) const {
        s.launch({.blocks = 1, .threads = 1, .hold = {}}, chosen_by_a_thread{gradient, owed, n, k, places, values});
    }
};

}  // namespace

TEST_CASE("top-k on devices sends what all_reduce_top_k sends, bucket by bucket, to the bit", "[gradient]") {
    const bool together = GENERATE(false, true);
    const std::vector<std::size_t> sizes{90, 7, 300, 64};  // a bucket each, the last first
    machine<float, float> m(3, together, gs::bytes{4});
    m.add(sizes, [](std::uint32_t) { return std::size_t{2}; });
    gs::device_top_k top(3, 461, 0.05, by_a_thread{});
    CHECK(top.chosen(7) == 1);
    for (const double part : {0.0, -0.5, 1.5, std::nan("")})
        CHECK(support::code_of([&] { gs::device_top_k(3, 461, part, by_a_thread{}); }) == errc::invalid_specification);
    std::vector<std::vector<float>> memory(3, std::vector<float>(top.memory_bytes().count() / sizeof(float)));
    CHECK_THROWS_AS(top.use(std::vector<float*>{nullptr}), gs::operation_error);
    top.use(std::vector<float*>{memory[0].data(), memory[1].data(), memory[2].data()});
    int gathers = 0;  // eight for each step; the first step's second bucket is refused, and the third step's first one
    const auto gather = [&]<class T>(std::span<const T* const> ins, std::span<T* const> outs, std::size_t n) {
        if (const int n_th = gathers++; n_th == 2 || n_th == 17) return errc::too_many_blocks;
        const std::span<const gs::member> who(m.members);
        if (together)
            return gs::submit_shared_all_gather<T>(m.node.gangs(), m.devices[0], m.streams[0], who, ins, outs, n);
        return gs::submit_all_gather<T>(m.node.gangs(), std::span<const gs::device_id>(m.devices), std::span(m.streams),
                                        who, ins, outs, n);
    };
    std::vector<std::vector<gs::top_k_feedback>> host(3);
    for (auto& of_rank : host)
        for (const std::size_t n : sizes) of_rank.emplace_back(n, top.chosen(n));
    support::random any(8);
    for (int step = 0; step < 5; ++step) {
        CAPTURE(step, together);
        m.fill(any);
        std::vector<std::vector<std::vector<float>>> expected(3);
        const gs::communicator group(3);
        support::together(3, [&](unsigned r) {
            gs::thread_transport net(group.rank(r));
            for (std::size_t g = 0; g < sizes.size(); ++g) {
                auto& x = expected[r].emplace_back(m.places[g][r], m.places[g][r] + sizes[g]);
                (void)gs::all_reduce_top_k(net, host[r][g], x);
            }
        });
        for (std::uint32_t r = 0; r < 3; ++r)
            for (std::uint32_t g = 0; g < sizes.size(); ++g) REQUIRE(m.buckets.ready(r, g) == errc::none);
        const auto engine = top.engine(std::span(m.streams), gather);
        const auto lacks_one = top.engine(std::span(m.streams).first(m.streams.size() - 1), gather);
        if (step == 0) CHECK(m.buckets.advance(std::span(m.streams), m.to, lacks_one) == errc::invalid_specification);
        if (step == 0 || step == 2)
            CHECK(m.buckets.advance(std::span(m.streams), m.to, engine) == errc::too_many_blocks);
        REQUIRE(m.buckets.advance(std::span(m.streams), m.to, engine) == errc::none);
        m.wait();
        for (std::uint32_t r = 0; r < 3; ++r)
            for (std::size_t g = 0; g < sizes.size(); ++g)
                CHECK(std::equal(expected[r][g].begin(), expected[r][g].end(), m.places[g][r]));
        if (step == 1) {  // goes on in other memory, with what was saved
            std::vector<std::vector<float>> other(3, std::vector<float>(memory[0].size()));
            std::vector<const float*> saved;
            for (std::uint32_t r = 0; r < 3; ++r) saved.push_back(top.owed(r));
            top.use(std::vector<float*>{other[0].data(), other[1].data(), other[2].data()});
            for (std::uint32_t r = 0; r < 3; ++r) std::copy_n(saved[r], 461, top.owed(r));
            memory.swap(other);
        }
        if (step == 3) {
            top.skip();
            top.skip();  // which does nothing
            for (auto& of_rank : host)
                for (auto& one : of_rank) one.skip();
        }
    }
}

namespace {

/// What gossip makes of the parameters of such a machine on the host.
std::vector<std::vector<std::vector<float>>> gossip_on_host(const machine<float, float>& m,
                                                            const gs::neighbour_graph& among) {
    std::vector<std::vector<std::vector<float>>> all(m.ranks);
    const gs::communicator group(m.ranks);
    support::together(m.ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        for (std::size_t g = 0; g < m.sizes.size(); ++g) {
            auto& x = all[r].emplace_back(m.places[g][r], m.places[g][r] + m.sizes[g]);
            (void)gs::gossip_average(net, among, x);
        }
    });
    return all;
}
[[nodiscard]] bool same_bits(const machine<float, float>& m,
                             const std::vector<std::vector<std::vector<float>>>& expected) {
    bool same = true;
    for (std::uint32_t r = 0; r < m.ranks; ++r)
        for (std::size_t g = 0; g < m.sizes.size(); ++g)
            same = same && (m.sizes[g] == 0 ||
                            std::memcmp(expected[r][g].data(), m.places[g][r], m.sizes[g] * sizeof(float)) == 0);
    return same;
}
/// What a device writes as soon as it may.
struct late {
    const std::atomic<bool>* go;
    float* data;
    template <class C>
    void operator()(C&) const {
        while (!go->load()) std::this_thread::yield();
        for (int i = 0; i < 40; ++i) data[i] = 5;
    }
};
[[nodiscard]] errc gossip_fault(gs::device_gossip& gossip, machine<float, float>& m) {
    for (std::uint32_t r = 0; r < m.ranks; ++r) (void)m.buckets.ready(r, 0);
    return m.buckets.advance(std::span(m.streams), m.to, gossip.engine(std::span(m.streams)));
}
void check_gossip(std::uint64_t seed) {
    support::random any(seed);
    const auto ranks = static_cast<std::uint32_t>(1 + any.below(5));
    machine<float, float> m(ranks, any.one_in(2), gs::bytes{1 + any.below(4000)});
    std::vector<std::size_t> sizes(1 + any.below(10));
    for (auto& n : sizes) n = any.one_in(6) ? 0 : any.below(any.one_in(4) ? 20'000 : 60);
    const auto flat = static_cast<std::uint32_t>(any.below(ranks + 1));
    m.add(sizes, [&](std::uint32_t r) { return r < flat ? std::size_t{0} : std::size_t{1 + r}; });
    std::vector<std::pair<std::uint32_t, std::uint32_t>> links;
    for (std::uint32_t r = 0; r < ranks; ++r)
        for (std::uint32_t q = 0; q < r; ++q)
            if (any.one_in(2)) links.emplace_back(r, q);
    const auto among = any.one_in(3) ? gs::neighbour_graph::ring(ranks) : gs::neighbour_graph(ranks, links);
    auto second = m.staging;
    std::vector<float*> memory;
    for (auto& x : second) memory.push_back(x.data());
    gs::device_gossip gossip(among);
    gossip.use(memory);
    m.fill(any);
    CAPTURE(seed, ranks, m.together, links.size(), flat);
    for (int step = 0; step < 3; ++step) {
        const auto expected = gossip_on_host(m, among);
        for (std::uint32_t r = 0; r < ranks; ++r)
            for (std::uint32_t g = 0; g < sizes.size(); ++g) REQUIRE(m.buckets.ready(r, g) == errc::none);
        REQUIRE(m.buckets.advance(std::span(m.streams), m.to, gossip.engine(std::span(m.streams))) == errc::none);
        CHECK(m.buckets.complete());
        m.wait();
        CHECK(same_bits(m, expected));
    }
}

}  // namespace

TEST_CASE("gossip between devices has the bits of gossip between threads", "[gradient][averaging]") {
    for (std::uint64_t n = 0; n < 20; ++n) check_gossip(support::seed(n));
}

TEST_CASE("gossip between devices waits for neighbours that are late, with what they read", "[gradient][averaging]") {
    machine<float, float> m(3, false, gs::bytes{1 << 20});  // 0 - 1 - 2, each one flat buffer
    m.add(std::vector<std::size_t>{40}, [](std::uint32_t) { return std::size_t{0}; });
    const std::vector<std::pair<std::uint32_t, std::uint32_t>> links{{0, 1}, {1, 2}};
    const gs::neighbour_graph among(3, links);
    auto second = m.staging;
    gs::device_gossip gossip(among);
    CHECK(gossip_fault(gossip, m) == errc::invalid_specification);  // without memory
    gossip.use(std::vector<float*>{second[0].data(), second[1].data(), second[2].data()});
    support::random any(9);
    m.fill(any);
    for (float& x : m.of[2]) x = 5;
    const auto expected = gossip_on_host(m, among);
    for (float& x : m.of[2]) x = 0;
    std::atomic<bool> go{false};
    m.streams[2].launch({}, late{&go, m.of[2].data()});
    CHECK(gossip_fault(gossip, m) == errc::none);
    // Rank 0 needs nothing of rank 2, but rank 1 does: rank 0's parameters stay until rank 1 has
    // read them.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    go = true;
    m.wait();
    CHECK(same_bits(m, expected));
    CHECK_THROWS_AS(gossip.use(std::vector<float*>{nullptr}), gs::operation_error);
}

TEST_CASE("a sum of more neighbours than a launch lists goes on in another one", "[gradient][averaging]") {
    constexpr std::uint32_t ranks = gs::detail::most_pieces + 9;
    std::vector<std::pair<std::uint32_t, std::uint32_t>> star;
    for (std::uint32_t r = 1; r < ranks; ++r) star.emplace_back(0, r);
    const gs::neighbour_graph among(ranks, star);
    gs::host::node node({.devices = 1, .sms = 2});
    std::vector<gs::host::stream> streams;
    streams.push_back(node.make_stream({0}));
    std::vector<std::vector<float>> x(ranks), other(ranks, std::vector<float>(3));
    std::vector<float*> at, memory;
    float sum = 0;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        x[r].assign(3, 1.0F + static_cast<float>(r));
        at.push_back(x[r].data());
        memory.push_back(other[r].data());
        sum += among.weight(0, r) * x[r][0];
    }
    gs::device_gossip gossip(among);
    gossip.use(memory);
    const std::vector<const float*> ins(at.begin(), at.end());
    CHECK(gossip.engine(std::span(streams))(ins, at, 3, gs::average{}) == errc::none);
    streams[0].record().wait(gs::never);
    CHECK(std::abs(x[0][2] - sum) < 1e-3F * sum);
}

TEST_CASE("parameters on devices are averaged every so many steps", "[gradient]") {
    constexpr gs::local_steps local{.every = 3};
    machine<float, float> m(2, true, gs::bytes{1 << 20});
    m.add(std::vector<std::size_t>{5}, [](std::uint32_t) { return std::size_t{0}; });
    m.of = {std::vector<float>(6, 0.0F), std::vector<float>(6, 0.0F)};
    for (std::uint32_t r = 0; r < 2; ++r) REQUIRE(m.places[0][r] == m.of[r].data());
    std::vector<float> seen;
    for (std::uint64_t step = 0; step < 6; ++step) {
        for (std::uint32_t r = 0; r < 2; ++r) m.of[r][0] += static_cast<float>(1 + 2 * r);
        if (local.due(step)) {
            for (std::uint32_t r = 0; r < 2; ++r) CHECK(m.buckets.ready(r, 0) == errc::none);
            CHECK(m.advance() == errc::none);
            m.wait();
        }
        seen.push_back(m.of[0][0]);
    }
    CHECK(seen == std::vector<float>{1, 2, 6, 7, 8, 12});
}

}  // namespace device_buckets_test
