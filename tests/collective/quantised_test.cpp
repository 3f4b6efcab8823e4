// SPDX-License-Identifier: Apache-2.0
// Quantised all-reduces: the bits of a reference that searches a table of codes, the promised
// error, and the same faults as in exact all-reduces. tests/gpu has the compiled kernels as jobs.
#include <gpushare/collective/quantised_all_reduce.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/collectives.hpp>

#include "collective/rig.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace quantised_test {

using namespace std::chrono_literals;
namespace gs = gpushare;

namespace {

using blocks = std::vector<std::vector<float>>;  // of each rank

// ---- the reference: what the documentation says, in double, number by number

/// The numbers of the codes 0 to 126; 127 is NaN.
std::array<double, 127> codes() {
    std::array<double, 127> all{};
    for (int c = 0; c < 127; ++c)
        all[static_cast<std::size_t>(c)] = c < 8 ? std::ldexp(c, -9) : std::ldexp(8 + c % 8, c / 8 - 10);
    return all;
}

float sent(float x, int exponent) {
    static const auto all = codes();
    if (!std::isfinite(x)) return std::bit_cast<float>(0x7fff'ffff);
    const double y = std::min(std::ldexp(std::abs(static_cast<double>(x)), -exponent), exponent == 120 ? 240.0 : 448.0);
    const auto above = std::lower_bound(all.begin(), all.end(), y);
    auto nearest = above;
    if (above != all.begin()) {
        const auto below = above - 1;
        const bool even = (below - all.begin()) % 2 == 0;
        if (y - *below < *above - y || (y - *below == *above - y && even)) nearest = below;
    }
    return static_cast<float>(std::copysign(std::ldexp(*nearest, exponent), x));
}

int exponent_of(std::span<const float> block) {
    double largest = 0;
    for (const float x : block)
        if (std::isfinite(x)) largest = std::max(largest, std::abs(static_cast<double>(x)));
    int e = -126;
    while (largest > std::ldexp(448.0, e)) ++e;
    return e;
}

std::vector<float> all_sent(std::span<const float> x, std::size_t block) {
    std::vector<float> y;
    for (std::size_t at = 0; at < x.size(); at += block) {
        const auto some = x.subspan(at, std::min(block, x.size() - at));
        for (const float one : some) y.push_back(sent(one, exponent_of(some)));
    }
    return y;
}

template <class T>
std::vector<T> expected(const blocks& in, std::size_t block, bool average) {
    std::vector<float> sum;
    for (const auto& x : in) {
        const auto y = all_sent(x, block);
        if (sum.empty())
            sum = y;
        else
            for (std::size_t i = 0; i < y.size(); ++i) sum[i] = sum[i] + y[i];
    }
    if (average)
        for (float& x : sum) x = x / static_cast<float>(in.size());
    std::vector<T> out;
    for (float y : all_sent(sum, block)) {
        if (std::is_same_v<T, gs::float16> && std::abs(y) == 65536.0F) y = std::copysign(65504.0F, y);
        out.push_back(static_cast<T>(y));
    }
    return out;
}

// ---- what ranks bring

enum class kind { ordinary, all_magnitudes, special, denormal, huge, zeros, one_large, ties, kinds };

float any_float(support::random& any, kind what) {
    const auto unit = [&] { return static_cast<float>(static_cast<double>(any.below(2'000'001)) / 1e6 - 1); };
    const float x = unit();
    switch (what) {
        case kind::all_magnitudes: return std::ldexp(x, static_cast<int>(any.below(250)) - 130);
        case kind::special:
            if (any.one_in(40)) return any.one_in(2) ? NAN : std::copysign(INFINITY, x);
            return any.one_in(10) ? -0.0F : x;
        case kind::denormal: return std::ldexp(x, -120 - static_cast<int>(any.below(30)));
        case kind::huge: return std::numeric_limits<float>::max() * (any.one_in(3) ? std::copysign(1.0F, x) : x);
        case kind::zeros: return any.one_in(200) ? x : 0.0F;
        case kind::one_large: return any.one_in(100) ? x * 1e6F : x;
        case kind::ties: return std::copysign(std::ldexp(static_cast<float>(16 + any.below(33)), -4), x);
        case kind::ordinary:
        case kind::kinds: break;
    }
    return x;
}

template <class T>
blocks brought(support::random& any, std::uint32_t ranks, std::size_t n, kind what) {
    blocks in(ranks, std::vector<float>(n));
    for (auto& x : in)
        for (float& one : x) one = static_cast<float>(static_cast<T>(any_float(any, what)));
    return in;
}

template <class T>
std::vector<T> as(const std::vector<float>& x, std::size_t lead = 0) {
    std::vector<T> y(lead);
    for (const float one : x) y.push_back(static_cast<T>(one));
    return y;
}

template <class T>
bool same(std::span<const T> a, std::span<const T> b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

/// By a thread for each rank, which begin `lead` elements behind an aligned place.
template <class T, std::uint32_t Block, class Op>
std::vector<std::vector<T>> by_threads(const gs::communicator& group, const blocks& in, std::size_t lead, Op op) {
    std::vector<std::vector<T>> out(group.size());
    std::vector<gs::collective_fault> faults(group.size());
    support::together(group.size(), [&](unsigned r) {
        auto x = as<T>(in[r], lead);
        const auto part = std::span(x).subspan(lead);
        faults[r] = gs::try_quantised_all_reduce<Block>(group.rank(r), part, part, op);
        out[r].assign(part.begin(), part.end());
    });
    for (const auto& f : faults) CHECK_FALSE(f);
    return out;
}

template <class T, std::uint32_t Block>
void check_bits(std::uint64_t seed) {
    support::random any(seed);
    const auto ranks = static_cast<std::uint32_t>(1 + any.below(5));
    const std::size_t n = any.one_in(2) ? any.below(300) : any.below(6000), lead = any.below(9);
    const auto what = static_cast<kind>(any.below(static_cast<std::uint64_t>(kind::kinds)));
    const gs::bytes slot{any.one_in(2) ? 32768U : 1024U};
    const auto in = brought<T>(any, ranks, n, what);
    CAPTURE(seed, ranks, n, lead, static_cast<int>(what), slot.count());
    const gs::communicator group(ranks, {.slot = slot});
    const bool average = any.one_in(2);
    const auto out = average ? by_threads<T, Block>(group, in, lead, gs::average{})
                             : by_threads<T, Block>(group, in, lead, gs::sum{});
    const auto want = expected<T>(in, Block, average);
    for (const auto& o : out) CHECK(same<T>(o, want));
}

}  // namespace

TEST_CASE("a quantised all-reduce has the bits that its documentation says, on every rank", "[collective]") {
    for (std::uint64_t n = 0; n < 60; ++n) {
        check_bits<float, 128>(support::seed(n));
        check_bits<float, 32>(support::seed(1000 + n));
        check_bits<gs::bfloat16, 32>(support::seed(2000 + n));
        check_bits<gs::float16, 128>(support::seed(3000 + n));
    }
}

namespace {

/// What is off, of what is promised: at most 1. Elements that aren't finite, or whose sums aren't,
/// don't count.
double part_of_bound(const blocks& in, std::span<const float> out, std::size_t block, bool average) {
    const auto ranks = static_cast<std::uint32_t>(in.size());
    double worst = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
        const std::size_t first = i / block * block, last = std::min(first + block, out.size());
        double exact = 0, magnitudes = 0, largest = 0;
        for (const auto& x : in) {
            exact += static_cast<double>(x[i]);
            magnitudes += std::abs(static_cast<double>(x[i]));
            double most = 0;
            for (std::size_t k = first; k < last; ++k) most = std::max(most, std::abs(static_cast<double>(x[k])));
            largest += most;
        }
        if (!(magnitudes < 3e38)) continue;
        double bound = gs::quantised_error_bound(magnitudes, largest, ranks);
        if (average) exact /= ranks, bound = bound / ranks + gs::quantised_floor;
        worst = std::max(worst, std::abs(static_cast<double>(out[i]) - exact) / bound);
    }
    return worst;
}

}  // namespace

TEST_CASE("a quantised all-reduce is as near as it says, whatever ranks bring", "[collective]") {
    double worst = 0;
    for (std::uint64_t n = 0; n < 40; ++n) {
        const auto seed = support::seed(n);
        support::random any(seed);
        const auto ranks = static_cast<std::uint32_t>(1 + any.below(6));
        const std::size_t count = 1 + any.below(500);
        auto what = static_cast<kind>(n % static_cast<std::uint64_t>(kind::kinds));
        if (what == kind::special) what = kind::ordinary;
        auto in = brought<float>(any, ranks, count, what);
        if (what == kind::huge)
            for (auto& x : in)
                for (float& one : x) one /= static_cast<float>(ranks);
        const gs::communicator group(ranks);
        CAPTURE(seed, ranks, count, static_cast<int>(what));
        const auto sums = by_threads<float, 128>(group, in, 0, gs::sum{});
        const auto means = by_threads<float, 32>(group, in, 0, gs::average{});
        worst = std::max(worst, part_of_bound(in, sums[0], 128, false));
        worst = std::max(worst, part_of_bound(in, means[0], 32, true));
        CHECK(worst <= 1);
    }
    CHECK(worst > 0.5);  // a bound that is never come near promises little
}

/// 17/16 of a power of two is half a code above it, as is what the sum of two such codes becomes.
TEST_CASE("elements that round as badly as any come near the bound of a quantised all-reduce", "[collective]") {
    const gs::communicator group(2);
    blocks in(2, std::vector<float>(128, 0.0F));
    for (float& x : in[0]) x = 17.0F / 16 - 0.001F;
    for (float& x : in[1]) x = (17.0F / 16 - 0.001F) / 16;
    const auto out = by_threads<float, 128>(group, in, 0, gs::sum{});
    CHECK(part_of_bound(in, out[0], 128, false) > 0.85);
    CHECK(part_of_bound(in, out[0], 128, false) <= 1);
}

TEST_CASE("an element that isn't finite spoils no other one of its block", "[collective]") {
    const gs::communicator group(2);
    blocks in(2, std::vector<float>(256, 1.0F));
    in[0][5] = INFINITY;
    in[1][7] = NAN;
    in[0][9] = in[1][9] = std::numeric_limits<float>::max();  // whose sum is infinite
    const auto out = by_threads<float, 128>(group, in, 0, gs::sum{});
    for (const std::size_t i : {5U, 7U, 9U}) CHECK(std::isnan(out[1][i]));
    for (std::size_t i = 128; i < 256; ++i) CHECK(out[1][i] == 2.0F);
    for (std::size_t i = 0; i < 128; ++i)
        if (i != 5 && i != 7 && i != 9) CHECK(out[0][i] == 0.0F);  // small beside the largest float there is
    blocks small(2, std::vector<float>(128, 1.0F));
    small[1][3] = -INFINITY;
    const auto finite = by_threads<float, 32>(group, small, 0, gs::average{});
    for (std::size_t i = 0; i < 128; ++i) CHECK((i == 3 ? std::isnan(finite[0][i]) : finite[0][i] == 1.0F));
}

TEST_CASE("values that a type holds stay finite in a quantised all-reduce", "[collective]") {
    const gs::communicator alone(1);
    const auto of = [&]<class T>(T largest) {
        const blocks in(1, std::vector<float>(5, static_cast<float>(largest)));
        return static_cast<float>(by_threads<T, 32>(alone, in, 0, gs::sum{})[0][4]);
    };
    CHECK(of(gs::float16::max()) == 65504.0F);
    CHECK(std::isfinite(of(gs::bfloat16::max())));
    CHECK(std::isfinite(of(std::numeric_limits<float>::max())));
    CHECK(of(-std::numeric_limits<float>::max()) < -3.1e38F);
}

/// 448, the largest code, is the largest number of a scale.
TEST_CASE("a block's largest number is at the edge between two scales, or beside that", "[collective]") {
    const gs::communicator alone(1);
    for (const int e : {-126, -119, 0, 119, 127})
        for (const float largest : {1.75F, std::nextafter(1.75F, 0.0F), std::nextafter(1.75F, 2.0F)}) {
            blocks in(1, std::vector<float>(32));
            for (std::size_t i = 0; i < 32; ++i) in[0][i] = std::ldexp(largest * static_cast<float>(i) / 31, e);
            CAPTURE(e, largest);
            CHECK(same<float>(by_threads<float, 32>(alone, in, 0, gs::sum{})[0], expected<float>(in, 32, false)));
        }
}

TEST_CASE("bytes of quantised elements", "[collective]") {
    CHECK(gs::quantised_bytes(0) == 0);
    CHECK(gs::quantised_bytes(1) == 129);
    CHECK(gs::quantised_bytes(1024) == 8 * 129);
    CHECK(gs::quantised_bytes(33, 32) == 66);
}

TEST_CASE("one group's quantised and exact all-reduces follow each other, delayed and in blocks", "[collective]") {
    for (std::uint64_t n = 0; n < 30; ++n) {
        const auto seed = support::seed(n);
        support::random any(seed);
        const auto ranks = static_cast<std::uint32_t>(2 + any.below(3)),
                   teams = static_cast<std::uint32_t>(1 + any.below(2));
        const std::size_t count = any.below(3000);
        CAPTURE(seed, ranks, teams, count);
        const gs::communicator group(
            ranks, {.blocks = teams, .slot = gs::bytes{1024}, .first_epoch = any.one_in(2) ? ~std::uint32_t{1} : 0});
        const auto in = brought<float>(any, ranks, count, kind::ordinary);
        const auto want = expected<float>(in, 32, false);
        std::vector<std::vector<float>> out(ranks), exact(ranks);
        for (auto& o : out) o.resize(count);
        for (auto& o : exact) o.resize(count);
        for (int round = 0; round < 3; ++round) {
            for (auto& o : out) std::ranges::fill(o, 0.0F);
            CHECK_FALSE(collective_test::run_delayed(group, teams, seed + static_cast<unsigned>(round),
                                                     gs::collective_kind::all_reduce, [&](auto& t) {
                                                         const auto r = t.rank();
                                                         return gs::detail::quantised_body<float, gs::sum, 32>{
                                                             in[r].data(), out[r].data(), count, {}}(t, teams);
                                                     }));
            for (const auto& o : out) CHECK(same<float>(o, want));
            CHECK_FALSE(collective_test::run_delayed(group, teams, seed, gs::collective_kind::all_reduce, [&](auto& t) {
                const auto r = t.rank();
                return gs::detail::all_reduce_body<float, gs::sum>{
                    in[r].data(), exact[r].data(), count, {}, {gs::algorithm::ring}}(t, teams);
            }));
            CHECK(exact[0] == exact[ranks - 1]);
        }
    }
}

TEST_CASE("a quantised all-reduce by blocks of several threads has the same bits", "[collective]") {
    support::random any(3);
    const auto in = brought<gs::bfloat16>(any, 3, 1000, kind::special);
    const auto want = expected<gs::bfloat16>(in, 128, false);
    const gs::communicator group(3, {.slot = gs::bytes{2048}});
    for (const std::uint32_t threads : {2U, 5U}) {
        std::vector<std::vector<gs::bfloat16>> out(3);
        for (std::uint32_t r = 0; r < 3; ++r) out[r] = as<gs::bfloat16>(in[r]);
        CHECK_FALSE(collective_test::run_blocks(group, threads, gs::collective_kind::all_reduce, [&](auto& t) {
            auto& mine = out[t.rank()];
            return gs::detail::quantised_body<gs::bfloat16, gs::sum, 128>{mine.data(), mine.data(), mine.size(), {}}(t,
                                                                                                                     1);
        }));
        for (const auto& o : out) CHECK(same<gs::bfloat16>(o, want));
    }
}

namespace {

struct machine {
    machine(std::uint32_t ranks, bool one_device, std::size_t n, gs::bytes slot = gs::bytes{2048})
        : node({.devices = one_device ? 1 : ranks, .sms = 8}), group(ranks, {.blocks = 2, .slot = slot}) {
        support::random any(n);
        in = brought<float>(any, ranks, n, kind::all_magnitudes);
        for (std::uint32_t r = 0; r < ranks; ++r) {
            devices.push_back({one_device ? 0 : r});
            streams.push_back(node.make_stream(devices[r]));
            members.push_back(group.rank(r));
            out.emplace_back(n);
        }
        for (std::uint32_t r = 0; r < ranks; ++r) {
            from.push_back(in[r].data());
            to.push_back(out[r].data());
        }
    }
    gs::errc submit(std::size_t n, const gs::launch_options& options) {
        const std::span<const gs::member> who(members);
        const std::span<const float* const> ins(from);
        if (devices[0] == devices[1])
            return gs::submit_shared_quantised_all_reduce<float>(node.gangs(), devices[0], streams[0], who, ins,
                                                                 std::span<float* const>(to), n, gs::sum{}, options);
        return gs::submit_quantised_all_reduce<float, 32>(node.gangs(), std::span<const gs::device_id>(devices),
                                                          std::span(streams), who, ins, std::span<float* const>(to), n,
                                                          gs::sum{}, options);
    }
    void wait() {
        for (auto& s : streams) s.record().wait(gs::never);
    }

    gs::host::node node;
    gs::communicator group;
    blocks in;
    std::vector<gs::device_id> devices;
    std::vector<gs::host::stream> streams;
    std::vector<gs::member> members;
    std::vector<std::vector<float>> out;
    std::vector<const float*> from;
    std::vector<float*> to;
};

}  // namespace

TEST_CASE("quantised all-reduces on streams have the bits of rank threads, by any number of blocks", "[collective]") {
    for (const bool one_device : {false, true})
        for (const std::size_t n : {0U, 31U, 700U, 5000U}) {
            machine m(3, one_device, n);
            const auto want = expected<float>(m.in, one_device ? 128 : 32, false);
            for (const std::uint32_t teams : {1U, 2U, 0U}) {
                CAPTURE(one_device, n, teams);
                for (auto& o : m.out) std::ranges::fill(o, -1.0F);
                REQUIRE(m.submit(n, {.blocks = teams}) == gs::errc::none);
                m.wait();
                CHECK_FALSE(gs::fault_of(m.members[0]));
                for (const auto& o : m.out) CHECK(same<float>(o, want));
            }
        }
}

TEST_CASE("a quantised all-reduce refuses what can't work", "[collective]") {
    const gs::communicator small(8, {.slot = gs::bytes{1024}});  // nine blocks of 129 bytes don't fit
    std::vector<float> x(10);
    CHECK(gs::try_quantised_all_reduce(small.rank(0), x, std::span(x)).code == gs::errc::invalid_specification);
    CHECK(gs::try_quantised_all_reduce(small.rank(0), x, std::span(x).first(9)).code == gs::errc::mismatch);
    machine m(8, true, 10, gs::bytes{1024});
    CHECK(m.submit(10, {.blocks = 1}) == gs::errc::invalid_specification);
    machine two(2, true, 10);
    two.to.pop_back();
    CHECK(two.submit(10, {.blocks = 1}) == gs::errc::invalid_specification);
}

TEST_CASE("late ranks, other calls and aborts end a quantised all-reduce as they end an exact one", "[collective]") {
    const auto soon = [] { return gs::instant(std::chrono::steady_clock::now() + 500ms); };
    const auto run = [](const gs::member& me, std::size_t n, gs::instant deadline = gs::never) {
        std::vector<float> x(n, 1.0F);
        return gs::try_quantised_all_reduce(me, x, std::span(x), gs::sum{}, deadline);
    };
    {
        std::optional<gs::communicator> made;
        std::vector<gs::collective_fault> faults(3);
        const auto in_use = [](const gs::collective_fault& f) { return f.buffers_in_use; };
        // Again where the machine stopped a rank on its way out for 200 ms: its buffers are in use.
        for (int again = 0; again == 0 || (again < 5 && std::ranges::any_of(faults, in_use)); ++again) {
            const gs::communicator& group = made.emplace(3U);
            support::together(3, [&](unsigned r) {
                faults[r] = run(group.rank(r), 100);
                if (faults[r] || r == 1) return;
                // Rank 0 gives up, once it has heard of rank 2: a slow thread isn't blamed.
                auto& told = group.rank(0).view().signal(0, 2, 0, 2).ready;
                while (r == 0 && static_cast<std::uint32_t>(gs::detail::atomic_ref{told}.load_acquire()) != 2)
                    std::this_thread::yield();
                faults[r] = run(group.rank(r), 100, r == 0 ? soon() : gs::never);
            });
        }
        const gs::communicator& group = *made;
        CHECK(faults[0] == gs::collective_fault{gs::errc::deadline_exceeded, gs::collective_kind::all_reduce, 1, 2});
        CHECK(faults[2] == faults[0]);
        CHECK(run(group.rank(1), 100) == faults[0]);
    }
    for (const int how : {0, 1, 2}) {
        const gs::communicator group(2);
        std::vector<gs::collective_fault> faults(2);
        support::together(2, [&](unsigned r) {
            std::vector<float> x(100, 1.0F);
            const gs::member me = group.rank(r);
            if (r == 0)
                faults[r] = gs::try_quantised_all_reduce(me, x, std::span(x));
            else if (how == 0)
                faults[r] = gs::try_quantised_all_reduce<32>(me, x, std::span(x));
            else if (how == 1)
                faults[r] = gs::try_quantised_all_reduce(me, x, std::span(x), gs::average{});
            else
                faults[r] = gs::try_all_reduce(me, x, std::span(x));
        });
        CAPTURE(how);
        CHECK(faults[0].code == gs::errc::mismatch);
        CHECK(faults[1] == faults[0]);
    }
}

/// Enough elements that the ranks are in the midst of chunks for most of the time.
TEST_CASE("an abort in the midst of quantised all-reduces: each call succeeds or fails whole", "[collective]") {
    for (unsigned round = 0; round < 10; ++round) {
        const gs::communicator group(3, {.slot = gs::bytes{1024}});
        std::vector<gs::collective_fault> faults(3);
        std::atomic<int> wrong{0}, calls{0};
        support::together(4, [&](unsigned r) {
            if (r == 3) {
                while (calls.load() < 4) std::this_thread::yield();
                support::spin(round * 2000);
                return group.abort(1);
            }
            std::vector<float> in(20'000, 1.0F), out(in.size());
            while (!faults[r]) {
                faults[r] = gs::try_quantised_all_reduce(group.rank(r), in, std::span(out));
                ++calls;
                if (!faults[r] && std::ranges::count(out, 3.0F) != 20'000) ++wrong;
            }
        });
        CHECK(wrong == 0);
        CHECK(faults[0].code == gs::errc::aborted);
        for (const auto& f : faults) CHECK(f == faults[0]);
    }
}

}  // namespace quantised_test
