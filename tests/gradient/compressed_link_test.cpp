// SPDX-License-Identifier: Apache-2.0
// Links between processes that send fp8 blocks, or only the largest elements. They are compared
// with the bits of the collectives that do this between threads, alone and below two levels of
// threads and of devices; with the number of bytes sent; and with the rank that faults name.
#include <gpushare/gradient/compressed_link.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <memory_resource>
#include <new>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/quantised_all_reduce.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/two_level.hpp>
#include <gpushare/gradient/wire.hpp>

#include "support/catch.hpp"
#include "support/leaks.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace compressed_link_test {

using namespace std::chrono_literals;
namespace gs = gpushare;
using gs::errc;

namespace {

using arrays = std::vector<std::vector<float>>;
using net_type = gs::thread_transport;

float normal(support::random& any) {
    float x = 0;
    for (int k = 0; k < 8; ++k) x += static_cast<float>(any.below(2001)) / 1000 - 1;
    return any.one_in(50) ? 1000 * x : x;
}
arrays filled(std::size_t ranks, std::size_t n, support::random& any) {
    arrays x(ranks, std::vector<float>(n));
    for (auto& one : x)
        for (float& v : one) v = normal(any);
    return x;
}
/// Calls f(rank, its transport) in a thread of each.
void on_ranks(std::uint32_t ranks, const std::function<void(unsigned, net_type&)>& f) {
    const gs::communicator group(ranks);
    support::together(ranks, [&](unsigned r) {
        net_type net(group.rank(r));
        f(r, net);
    });
}
struct outcome {
    errc code = errc::none;
    std::uint64_t rank = 0;
    friend bool operator==(const outcome&, const outcome&) = default;
};
std::ostream& operator<<(std::ostream& to, const outcome& o) { return to << gs::to_string(o.code) << " of " << o.rank; }
outcome outcome_of(const std::function<gs::collective_fault()>& f) {
    try {
        const auto fault = f();
        return {fault.code, fault.rank};
    } catch (const gs::operation_error& e) {
        return {e.code(), e.figures().left};
    }
}
bool same_bits(const arrays& a, const arrays& b) {
    for (std::size_t r = 0; r < a.size(); ++r)
        for (std::size_t i = 0; i < a[r].size(); ++i)
            if (__builtin_bit_cast(std::uint32_t, a[r][i]) != __builtin_bit_cast(std::uint32_t, b[r][i])) return false;
    return true;
}

template <std::uint32_t Block, class Op>
void check_bits(std::uint64_t seed, const Op& op) {
    support::random any(seed);
    const auto ranks = static_cast<std::uint32_t>(2 + any.below(3));
    const std::size_t n = any.one_in(8) ? 0 : any.below(any.one_in(2) ? 300 : 3000);
    CAPTURE(seed, ranks, n);
    arrays x = filled(ranks, n, any), expected = x;
    if (n > 4 && any.one_in(4)) {
        x[0][n / 2] = expected[0][n / 2] = std::numeric_limits<float>::infinity();
        x[1][n / 3] = expected[1][n / 3] = 0.0F;
    }
    const gs::communicator group(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::quantised_all_reduce<Block>(group.rank(r), std::span<const float>(expected[r]), std::span(expected[r]), op);
    });
    const bool in_place = any.one_in(2);
    arrays out = x;
    on_ranks(ranks, [&](unsigned r, net_type& net) {
        gs::fp8_link<net_type, Block> link(net);
        std::vector<float> from = x[r];
        (void)link.all_reduce(std::span<const float>(in_place ? out[r] : from), std::span(out[r]), op, gs::never);
    });
    CHECK(same_bits(out, expected));
}

}  // namespace

TEST_CASE("a link of fp8 blocks gives the bits of a quantised all-reduce", "[gradient]") {
    for (std::uint64_t n = 0; n < 10; ++n) {
        check_bits<128>(support::seed(n), gs::sum{});
        check_bits<32>(support::seed(100 + n), gs::average{});
        check_bits<128>(support::seed(200 + n), gs::average{});
    }
}

TEST_CASE("a link of the largest elements gives the bits of all_reduce_top_k, step after step", "[gradient]") {
    for (std::uint64_t n = 0; n < 12; ++n) {
        const auto seed = support::seed(n);
        support::random any(seed);
        const auto ranks = static_cast<std::uint32_t>(2 + any.below(3));
        const double part = any.one_in(3) ? 1e-6 : any.one_in(2) ? 1.0 : 0.1;
        std::vector<std::size_t> calls(1 + any.below(3));
        std::size_t elements = 0;
        for (auto& c : calls) elements += c = 1 + any.below(300);
        CAPTURE(seed, ranks, part, calls);
        constexpr std::size_t steps = 4;
        std::vector<arrays> x;
        for (std::size_t s = 0; s < steps; ++s) x.push_back(filled(ranks, elements, any));
        auto expected = x;
        arrays owed(ranks), left(ranks);
        const auto by_calls = [&](std::vector<float>& of, const auto& f) {
            std::size_t at = 0;
            for (std::size_t k = 0; k < calls.size(); at += calls[k++]) f(k, std::span(of).subspan(at, calls[k]));
        };
        on_ranks(ranks, [&](unsigned r, net_type& net) {
            std::vector<gs::top_k_feedback> mine;
            for (const std::size_t c : calls)
                mine.emplace_back(c, std::max<std::size_t>(static_cast<std::size_t>(static_cast<double>(c) * part), 1));
            for (std::size_t s = 0; s < steps; ++s)
                by_calls(expected[s][r],
                         [&](std::size_t k, auto some) { (void)gs::all_reduce_top_k(net, mine[k], some); });
            for (const auto& m : mine) left[r].insert(left[r].end(), m.residual().begin(), m.residual().end());
        });
        on_ranks(ranks, [&](unsigned r, net_type& net) {
            gs::top_k_link link(net, elements, part);
            for (std::size_t s = 0; s < steps; ++s)
                by_calls(x[s][r], [&](std::size_t, auto some) {
                    (void)link.all_reduce(std::span<const float>(some), some, gs::average{}, gs::never);
                });
            owed[r] = link.owed();
        });
        for (std::size_t s = 0; s < steps; ++s) CHECK(same_bits(x[s], expected[s]));
        CHECK(same_bits(owed, left));
    }
}

TEST_CASE("elements that a link of the largest ones skips are owed again", "[gradient]") {
    std::vector<arrays> owed(2);
    arrays last(2);
    on_ranks(2, [&](unsigned r, net_type& net) {
        gs::top_k_link link(net, 4, 0.5);
        const auto step = [&](std::vector<float> x) {
            (void)link.all_reduce(std::span<const float>(x), std::span(x), gs::sum{}, gs::never);
            owed[r].push_back(link.owed());
            return x;
        };
        (void)step({4, 3, 2, 1});
        (void)step({1, 1, 5, 5});
        link.skip();
        link.skip();
        owed[r].push_back(link.owed());
        const float bad = r == 0 ? std::numeric_limits<float>::infinity() : 0.0F;
        (void)step({bad, 0, 0, 0});
        last[r] = step({0, 0, 0, 0});
    });
    for (const auto& o : owed) {
        CHECK(o[0] == std::vector<float>{0, 0, 2, 1});
        CHECK(o[1] == std::vector<float>{1, 1, 0, 0});
        CHECK(o[2] == o[0]);  // skipped once
        CHECK(o[3] == o[0]);  // not finite
        CHECK(o[4] == std::vector<float>(4));
    }
    CHECK(last == arrays(2, {0, 0, 4, 2}));
}

TEST_CASE("a link compresses sums of floats alone, and nothing of one process", "[gradient]") {
    const auto ranks = static_cast<std::uint32_t>(GENERATE(1, 3));
    arrays largest(ranks, std::vector<float>(200)), alone = largest;
    std::vector<std::vector<double>> wide(ranks, std::vector<double>(200));
    on_ranks(ranks, [&](unsigned r, net_type& net) {
        gs::fp8_link coded(net);
        for (std::size_t i = 0; i < 200; ++i) {
            largest[r][i] = alone[r][i] = static_cast<float>(i) + 0.001F * static_cast<float>(r);
            wide[r][i] = 1000.001 * static_cast<double>(i);
        }
        (void)coded.all_reduce(std::span<const float>(largest[r]), std::span(largest[r]), gs::maximum{}, gs::never);
        (void)coded.all_reduce(std::span<const double>(wide[r]), std::span(wide[r]), gs::sum{}, gs::never);
        if (ranks == 1)
            (void)coded.all_reduce(std::span<const float>(alone[r]), std::span(alone[r]), gs::sum{}, gs::never);
    });
    for (std::size_t i = 0; i < 200; ++i) {
        CHECK(largest[0][i] == static_cast<float>(i) + 0.001F * static_cast<float>(ranks - 1));
        if (ranks == 1) CHECK(alone[0][i] == static_cast<float>(i));
        double sum = 0;
        for (std::uint32_t r = 0; r < ranks; ++r) sum += 1000.001 * static_cast<double>(i);
        CHECK(wide[0][i] == sum);
    }
}

TEST_CASE("fp8 blocks are at most 0.27 of the bytes of floats, and the largest elements 8 bytes each", "[gradient]") {
    constexpr std::size_t n = 64'000;
    std::vector<std::uint64_t> bytes(3);
    on_ranks(2, [&](unsigned r, net_type& net) {
        std::vector<float> x(n, 1.0F);
        gs::fp8_link coded(net);
        gs::top_k_link sparse(net, n, 0.01);
        const auto carried = [&](auto& link) {
            const auto before = net.carried().count();
            (void)link.all_reduce(std::span<const float>(x), std::span(x), gs::sum{}, gs::never);
            return net.carried().count() - before;
        };
        const std::uint64_t seen[] = {carried(net), carried(coded), carried(sparse)};
        if (r == 0) bytes.assign(std::begin(seen), std::end(seen));
    });
    CHECK(bytes[0] == n * sizeof(float));
    // Each process hands over its elements and its part of the result: between two, half of as much
    // crosses the link.
    CHECK(bytes[1] <= n * sizeof(float) * 27 / 100 * 3 / 2);
    CHECK(bytes[2] == n / 100 * 8);
}

namespace {

/// A node of two levels over such a link: its devices, or one that all its ranks share.
template <class Link>
struct machine {
    using levels_type = gs::two_level_devices<std::remove_cvref_t<decltype(std::declval<gs::host::node&>().gangs())>,
                                              gs::host::stream, Link, std::pmr::memory_resource>;
    machine(std::uint32_t ranks, bool together, Link& outer, const gs::two_level_options& options)
        : node({.devices = together ? 1 : ranks, .sms = 8}), group(ranks, {.blocks = 2}) {
        for (std::uint32_t r = 0; r < ranks; ++r) {
            members.push_back(group.rank(r));
            if (together && r != 0) continue;
            devices.push_back({r});
            streams.push_back(node.make_stream(devices[r]));
        }
        levels.emplace(node.gangs(), devices, std::span(streams), members, outer, *std::pmr::new_delete_resource(),
                       options);
    }
    template <class Op>
    gs::collective_fault all_reduce(std::span<std::vector<float>> x, const Op& op, gs::instant deadline = gs::never) {
        std::vector<const float*> ins;
        std::vector<float*> outs;
        for (auto& one : x) {
            ins.push_back(one.data());
            outs.push_back(one.data());
        }
        const auto f = levels->template all_reduce<float>(ins, outs, x[0].size(), op, deadline);
        for (auto& s : streams) s.record().wait(gs::never);
        return f;
    }

    gs::host::node node;
    gs::communicator group;
    std::vector<gs::device_id> devices;
    std::vector<gs::host::stream> streams;
    std::vector<gs::member> members;
    std::optional<levels_type> levels;
};

/// Two levels of devices and of threads over the links that `make` makes, some steps of each: node
/// p has inside[p] ranks.
template <class Make>
void check_two_levels(std::uint64_t seed, const Make& make) {
    support::random any(seed);
    std::vector<std::uint32_t> inside(2 + any.below(2));
    std::size_t ranks = 0;
    std::vector<std::size_t> first;
    for (auto& one : inside) {
        first.push_back(ranks);
        ranks += one = static_cast<std::uint32_t>(1 + any.below(3));
    }
    const std::size_t n = 1 + any.below(4000);
    const gs::two_level_options options{.chunk = gs::bytes{1 + any.below(8000)},
                                        .depth = static_cast<std::uint32_t>(1 + any.below(4))};
    const std::uint64_t together = any.below(8);
    CAPTURE(seed, inside, n, options.chunk.count(), options.depth, together);
    constexpr std::size_t steps = 3;
    std::vector<arrays> x;
    for (std::size_t s = 0; s < steps; ++s) x.push_back(filled(ranks, n, any));
    auto expected = x;
    const auto nodes = static_cast<std::uint32_t>(inside.size());
    on_ranks(nodes, [&](unsigned p, net_type& net) {
        auto link = make(net, n);
        gs::communicator inner(inside[p]);
        const auto group = gs::split(inner, *link, options);
        support::together(inside[p], [&](unsigned r) {
            auto me = group.rank(r);
            for (std::size_t s = 0; s < steps; ++s) {
                auto& mine = expected[s][first[p] + r];
                (void)me.all_reduce(std::span<const float>(mine), std::span(mine), gs::average{}, gs::never);
            }
        });
    });
    on_ranks(nodes, [&](unsigned p, net_type& net) {
        auto link = make(net, n);
        machine<std::remove_reference_t<decltype(*link)>> mine(inside[p], (together >> p & 1U) != 0, *link, options);
        for (std::size_t s = 0; s < steps; ++s)
            (void)mine.all_reduce(std::span(x[s]).subspan(first[p], inside[p]), gs::average{});
    });
    for (std::size_t s = 0; s < steps; ++s) {
        CHECK(same_bits(x[s], expected[s]));
        for (const auto& one : x[s]) CHECK(one == x[s][0]);
    }
}

}  // namespace

TEST_CASE("two levels of devices over a compressed link give the bits of two levels of threads over it", "[gradient]") {
    for (std::uint64_t n = 0; n < 8; ++n) {
        check_two_levels(support::seed(n),
                         [](net_type& net, std::size_t) { return std::make_unique<gs::fp8_link<net_type>>(net); });
        check_two_levels(support::seed(100 + n), [](net_type& net, std::size_t elements) {
            return std::make_unique<gs::top_k_link<net_type>>(net, elements, 0.05);
        });
    }
}

TEST_CASE("two levels over fp8 blocks are within the bound of the nodes' sums", "[gradient]") {
    const auto seed = support::seed(7);
    CAPTURE(seed);
    support::random any(seed);
    constexpr std::size_t n = 2000;
    const arrays x = filled(4, n, any);
    arrays y = x;
    on_ranks(2, [&](unsigned p, net_type& net) {
        gs::fp8_link link(net);
        machine<gs::fp8_link<net_type>> mine(2, p == 0, link, {.chunk = gs::bytes{4096}});
        (void)mine.all_reduce(std::span(y).subspan(2 * p, 2), gs::sum{});
    });
    int outside = 0;
    for (std::size_t i = 0; i < n; ++i) {
        double largest = 0;
        for (std::size_t p = 0; p < 2; ++p) {
            double most = 0;  // of the whole chunk: at least that of the block
            for (std::size_t j = i / 1024 * 1024; j < std::min(n, i / 1024 * 1024 + 1024); ++j)
                most = std::max(most, std::abs(static_cast<double>(x[2 * p][j] + x[2 * p + 1][j])));
            largest += most;
        }
        const double a = static_cast<double>(x[0][i] + x[1][i]), b = static_cast<double>(x[2][i] + x[3][i]);
        outside += std::abs(static_cast<double>(y[0][i]) - (a + b)) >
                           gs::quantised_error_bound(std::abs(a) + std::abs(b), largest, 2)
                       ? 1
                       : 0;
    }
    CHECK(outside == 0);
}

TEST_CASE("nothing of what a link of the largest elements is given gets lost", "[gradient]") {
    constexpr std::size_t n = 500;
    constexpr int steps = 10;
    std::vector<float> given(n), got(n);
    arrays owed(3);
    const auto seed = support::seed(8);
    CAPTURE(seed);
    support::random any(seed);
    std::vector<arrays> x(steps, arrays(6, std::vector<float>(n)));
    for (auto& step : x)
        for (auto& one : step)
            for (std::size_t i = 0; i < n; ++i) given[i] += one[i] = static_cast<float>(any.below(41)) - 20;
    on_ranks(3, [&](unsigned p, net_type& net) {
        gs::top_k_link link(net, n, 0.1);
        machine<gs::top_k_link<net_type>> mine(2, p != 0, link, {.chunk = gs::bytes{600}});
        for (auto& step : x) (void)mine.all_reduce(std::span(step).subspan(2 * p, 2), gs::sum{});
        owed[p] = link.owed();
    });
    for (const auto& step : x)
        for (std::size_t i = 0; i < n; ++i) got[i] += step[0][i];
    for (const auto& one : owed)
        for (std::size_t i = 0; i < n; ++i) got[i] += one[i];
    CHECK(got == given);
    CHECK(x[0][0] != given);
}

TEST_CASE("processes that compress in other ways all get a mismatch that names the odd one", "[gradient]") {
    const auto make = [](net_type& net, int how) {
        return outcome_of([&]() -> gs::collective_fault {
            if (how == 0) const gs::fp8_link<net_type> link(net);
            if (how == 1) const gs::fp8_link<net_type, 32> link(net);
            if (how == 2) const gs::top_k_link link(net, 100, 0.1);
            if (how == 3) const gs::top_k_link link(net, 101, 0.1);
            if (how == 4) const gs::top_k_link link(net, 100, 0.2);
            return {};
        });
    };
    for (const auto& [most, odd] : {std::pair{0, 1}, {0, 2}, {2, 3}, {2, 4}}) {
        CAPTURE(most, odd);
        std::vector<outcome> seen(3);
        on_ranks(3,
                 [&, most = most, odd = odd](unsigned r, net_type& net) { seen[r] = make(net, r == 1 ? odd : most); });
        CHECK(seen == std::vector<outcome>(3, {errc::mismatch, 1}));
    }
    // One that doesn't compress begins with something else.
    std::vector<outcome> seen(3);
    on_ranks(3, [&](unsigned r, net_type& net) {
        if (r != 2)
            seen[r] = make(net, 0);
        else
            seen[r] = outcome_of([&]() -> gs::collective_fault {
                gs::communicator inner(1);
                (void)gs::split(inner, net);
                return {};
            });
    });
    // The two sides differ from each other, so whoever notices first names the other side.
    CHECK(seen[0].code == errc::mismatch);
    CHECK(seen == std::vector<outcome>(3, seen[0]));
}

TEST_CASE("a call that isn't one of a step is a mismatch on all processes", "[gradient]") {
    std::vector<outcome> seen(2);
    on_ranks(2, [&](unsigned r, net_type& net) {
        gs::top_k_link link(net, 10, 0.5);
        std::vector<float> x(11);
        const auto add = [&](std::size_t n) {
            return link.all_reduce(std::span<const float>(x).first(n), std::span(x).first(n), gs::sum{}, gs::never);
        };
        (void)add(4);
        (void)add(6);
        seen[r] = outcome_of([&] { return add(5); });
    });
    for (const auto& o : seen) CHECK(o.code == errc::mismatch);
    CHECK(outcome_of([] {
              const gs::communicator group(1);
              net_type net(group.rank(0));
              const gs::top_k_link link(net, 10, 0);
              return gs::collective_fault{};
          }).code == errc::invalid_specification);
}

TEST_CASE("processes of which one adds and another averages all get a mismatch", "[gradient]") {
    const bool sparse = GENERATE(false, true);
    std::vector<outcome> seen(3);
    on_ranks(3, [&](unsigned r, net_type& net) {
        std::vector<float> x(10, 1);
        const auto call = [&](auto& link) {
            const std::span<const float> in(x);
            seen[r] = outcome_of([&] {
                return r == 1 ? link.all_reduce(in, std::span(x), gs::average{}, gs::never)
                              : link.all_reduce(in, std::span(x), gs::sum{}, gs::never);
            });
        };
        if (sparse) {
            gs::top_k_link link(net, x.size(), 0.5);
            call(link);
        } else {
            gs::fp8_link link(net);
            call(link);
        }
    });
    for (const auto& o : seen) CHECK(o.code == errc::mismatch);
}

namespace {

/// Gives up the collective that it is told to, and may touch its memory from then on.
struct stuck_transport : gs::thread_transport {
    using gs::thread_transport::thread_transport;
    template <class T>
    gs::collective_fault all_gather(std::span<const T> in, std::span<T> out, gs::instant deadline) {
        return sticks ? give_up(in, out) : gs::thread_transport::all_gather(in, out, deadline);
    }
    template <class T>
    gs::collective_fault all_gatherv(std::span<const T> in, std::span<T> out, std::span<const std::uint64_t>,
                                     gs::instant) {
        return give_up(in, out);
    }
    template <class T>
    gs::collective_fault give_up(std::span<const T> in, std::span<T> out) {
        ++calls;
        for (const auto& some : {std::as_bytes(in), std::as_bytes(std::span<const T>(out))})
            for (const std::byte& b : some) kept.emplace_back(&b, b);
        return {errc::deadline_exceeded, gs::collective_kind::all_gather, 0, 0, true};
    }

    bool sticks = false;
    int calls = 0;
    std::vector<std::pair<const std::byte*, std::byte>> kept;  // where the bytes are that it got, and what they were
};

}  // namespace

TEST_CASE("later calls leave buffers alone that a transport may still touch, and the buffers outlive the link",
          "[gradient]") {
    const bool sparse = GENERATE(false, true);
    const gs::communicator group(2);
    std::vector<std::vector<gs::collective_fault>> seen(2);
    std::vector<int> calls(2), changed(2);
    support::together(2, [&](unsigned r) {
        const support::leaks_are_meant here;
        stuck_transport net(group.rank(r));
        {
            std::vector<float> x(20'000, 3);
            const auto call = [&](auto& link) {
                net.sticks = true;
                for (const std::size_t n : {200U, 200U, 19'800U}) {
                    const auto some = std::span(x).first(n);
                    seen[r].push_back(link.all_reduce(std::span<const float>(some), some, gs::sum{}, gs::never));
                    std::fill(x.begin(), x.end(), 5.0F);
                }
            };
            if (sparse) {
                gs::top_k_link link(net, 20'000, 0.5);
                call(link);
            } else {
                gs::fp8_link link(net);
                call(link);
            }
        }
        calls[r] = net.calls;
        for (const auto& [byte, was] : net.kept) changed[r] += *byte != was ? 1 : 0;
    });
    CHECK(calls == std::vector<int>{1, 1});
    CHECK(changed == std::vector<int>(2));
    for (const auto& of_rank : seen)
        for (const auto& f : of_rank) CHECK((f.code == errc::deadline_exceeded && f.buffers_in_use));
}

namespace {

/// Throws instead of the nth gather.
struct throwing_transport : gs::thread_transport {
    using gs::thread_transport::thread_transport;
    template <class T>
    gs::collective_fault all_gather(std::span<const T> in, std::span<T> out, gs::instant deadline) {
        if (--left == 0) throw std::bad_alloc();
        return gs::thread_transport::all_gather(in, out, deadline);
    }
    int left = 0;
};

}  // namespace

TEST_CASE("elements that a link can't send, because its transport throws, are owed again", "[gradient]") {
    const gs::communicator group(2);
    arrays owed(2), x(2, {4, 3, 2, 1});
    std::vector<int> thrown(2);
    support::together(2, [&](unsigned r) {
        throwing_transport net(group.rank(r));
        gs::top_k_link link(net, 4, 0.5);
        const auto add = [&](std::vector<float>& some) {
            (void)link.all_reduce(std::span<const float>(some), std::span(some), gs::sum{}, gs::never);
        };
        std::vector<float> first{1, 2, 3, 4};
        add(first);
        net.left = 2;  // that of the values
        try {
            add(x[r]);
        } catch (const std::bad_alloc&) {
            ++thrown[r];
        }
        owed[r] = link.owed();
    });
    CHECK(thrown == std::vector<int>{1, 1});
    CHECK(owed == arrays(2, {1, 2, 0, 0}));
    CHECK(x == arrays(2, {4, 3, 2, 1}));
}

TEST_CASE("a process whose link throws is named to the others, which don't wait for it", "[gradient]") {
    const gs::communicator group(2);
    std::vector<outcome> seen(2), later(2);
    std::vector<int> thrown(2);
    support::together(2, [&](unsigned r) {
        throwing_transport net(group.rank(r));
        gs::top_k_link link(net, 4, 0.5);
        net.left = r == 1 ? 1 : 0;
        std::vector<float> x{1, 2, 3, 4};
        const auto add = [&] {
            return link.all_reduce(std::span<const float>(x), std::span(x), gs::sum{},
                                   std::chrono::steady_clock::now() + 20s);
        };
        try {
            seen[r] = outcome_of(add);
        } catch (const std::bad_alloc&) {
            ++thrown[r];
        }
        later[r] = outcome_of(add);
    });
    CHECK(thrown == std::vector<int>{0, 1});
    CHECK(seen[0] == outcome{errc::out_of_memory, 1});
    CHECK(later == std::vector(2, outcome{errc::out_of_memory, 1}));
}

TEST_CASE("a process that doesn't come to a compressed call is named to the others, on both levels", "[gradient]") {
    const bool sparse = GENERATE(false, true);
    std::vector<outcome> seen(3);
    arrays x(6, std::vector<float>(300, 1));
    on_ranks(3, [&](unsigned p, net_type& net) {
        const auto call = [&](auto& link) {
            machine<std::remove_reference_t<decltype(link)>> mine(2, p == 0, link, {.chunk = gs::bytes{512}});
            if (p == 1) return;
            seen[p] = outcome_of([&] {
                // The first process gives up. The last one may be late, and isn't named.
                return mine.all_reduce(std::span(x).subspan(2 * p, 2), gs::sum{},
                                       std::chrono::steady_clock::now() + (p == 0 ? gs::ns(500ms) : gs::ns(5min)));
            });
        };
        if (sparse) {
            gs::top_k_link link(net, 300, 0.1);
            call(link);
        } else {
            gs::fp8_link link(net);
            call(link);
        }
    });
    for (const unsigned p : {0U, 2U}) CHECK(seen[p] == outcome{errc::deadline_exceeded, 2});
}

}  // namespace compressed_link_test
