// SPDX-License-Identifier: Apache-2.0
// Collectives through the gates of compute limiters, one per device: admitted and charged on all
// devices or on none, whole or in pieces between which higher tenants get in on every device alike.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/handles.hpp>

#include "support/catch.hpp"

namespace gang_collectives_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
namespace gs = gpushare;

namespace {

using limiter = gs::compute_limiter<gs::host::stream, gs::host::steady_clock>;
using gang = gs::gang_permit<limiter>;

constexpr std::uint32_t ranks = 3;

/// A rank per device, with a limiter each, and a tenant above the group's on device 1.
struct machine {
    explicit machine(std::size_t n, const gs::limiter_options& options = {}) {
        for (std::uint32_t r = 0; r < ranks; ++r) {
            devices.push_back({r});
            streams.push_back(node.make_stream({r}));
            members.push_back(group.rank(r));
            in.emplace_back(n);
            out.emplace_back(n);
            for (std::size_t i = 0; i < n; ++i) in[r][i] = 1.0F / static_cast<float>(1 + (i * (r + 1)) % 977);
            limiters.emplace_back(options);
            clients.push_back(limiters[r].add({.weight = 50_pct}));
        }
        // Devices in another order than ranks: whoever takes their permits sorts.
        for (const std::uint32_t r : {2U, 0U, 1U}) gang_members.push_back({&limiters[r], clients[r], {r}});
        for (const std::uint32_t r : {2U, 0U, 1U}) gang_streams.push_back(&streams[r]);
    }

    /// Of the elements from `first` on.
    gs::errc all_reduce(std::size_t first, std::size_t n) {
        std::vector<const float*> from;
        std::vector<float*> to;
        for (std::uint32_t r = 0; r < ranks; ++r) {
            from.push_back(in[r].data() + first);
            to.push_back(out[r].data() + first);
        }
        return gs::submit_all_reduce<float>(node.gangs(), devices, std::span(streams), members, from, to, n);
    }
    /// In `pieces`; `f(i)` is called behind each.
    template <class F>
    gs::errc in_pieces(std::size_t pieces, F f, gs::instant deadline = gs::never) {
        const std::size_t each = in[0].size() / pieces;
        return gs::enqueue_in_pieces<limiter>(
            gang_members, gang_streams, pieces,
            [&](std::size_t i) {
                const auto why = all_reduce(i * each, i + 1 < pieces ? each : in[0].size() - i * each);
                f(i);
                return why;
            },
            deadline);
    }
    void finish() {
        for (auto& s : streams) (void)s.record().wait(gs::never);
        for (auto& l : limiters) l.poll();
    }
    [[nodiscard]] gs::client_usage usage(std::uint32_t r) { return limiters[r].usage(clients[r]); }

    gs::host::node node{{.devices = ranks, .memory = 1_MiB, .sms = 2}};
    gs::communicator group{ranks, {.blocks = 2}};
    std::vector<gs::device_id> devices;
    std::vector<gs::host::stream> streams;
    std::vector<gs::member> members;
    std::vector<std::vector<float>> in, out;
    std::deque<limiter> limiters;
    std::vector<gs::client_id> clients;
    std::vector<gang::member> gang_members;
    std::vector<gs::host::stream*> gang_streams;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

TEST_CASE("a gated collective is charged on every device, and its result is that of one that isn't gated",
          "[collective]") {
    constexpr std::size_t n = 70'001;
    machine bare(n), gated(n);
    REQUIRE(bare.all_reduce(0, n) == gs::errc::none);
    bare.finish();
    {
        auto g = gang::acquire(gated.gang_members).value();
        CHECK(g.enqueue(gated.gang_streams, [&] { return gated.all_reduce(0, n); }) == gs::errc::none);
    }
    gated.finish();
    for (std::uint32_t r = 0; r < ranks; ++r) {
        CHECK(same_bits(gated.out[r], bare.out[r]));
        CHECK(gated.usage(r).completed == 1);
        CHECK(gated.usage(r).in_flight == 0);
        CHECK(gated.usage(r).device_time > 0ns);
    }
}

TEST_CASE("other collectives are gated alike: a reduce-scatter and an all-gather are an all-reduce, charged as two",
          "[collective]") {
    constexpr std::size_t part = 20'001, n = ranks * part;
    machine whole(n), gated(n);
    REQUIRE(whole.all_reduce(0, n) == gs::errc::none);
    whole.finish();
    std::vector<const float*> in, own_in;
    std::vector<float*> own, out;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        in.push_back(gated.in[r].data());
        out.push_back(gated.out[r].data());
        own.push_back(out[r] + r * part);
        own_in.push_back(own[r]);
    }
    const auto enqueued = [&](const auto& submit) {
        auto g = gang::acquire(gated.gang_members).value();
        return g.enqueue(gated.gang_streams, submit);
    };
    CHECK(enqueued([&] {
              return gs::submit_reduce_scatter<float>(gated.node.gangs(), gated.devices, std::span(gated.streams),
                                                      gated.members, in, own, part);
          }) == gs::errc::none);
    CHECK(enqueued([&] {
              return gs::submit_all_gather<float>(gated.node.gangs(), gated.devices, std::span(gated.streams),
                                                  gated.members, own_in, out, part);
          }) == gs::errc::none);
    gated.finish();
    for (std::uint32_t r = 0; r < ranks; ++r) {
        CHECK(same_bits(gated.out[r], whole.out[r]));
        CHECK(gated.usage(r).completed == 2);
        CHECK(gated.usage(r).device_time > 0ns);
    }
}

TEST_CASE("a collective in pieces: the same bits, and a higher tenant gets in between any two", "[collective]") {
    constexpr std::size_t n = 50'003, pieces = 7;
    machine whole(n), cut(n);
    REQUIRE(whole.all_reduce(0, n) == gs::errc::none);
    whole.finish();

    const auto urgent = cut.limiters[1].add({.level = {1}});
    auto urgent_stream = cut.node.make_stream({1}, {1});
    std::vector<std::string> order;
    CHECK(cut.in_pieces(pieces, [&](std::size_t i) {
        order.push_back("piece");
        if (i % 2 == 1)
            (void)cut.limiters[1]
                .submit(urgent, urgent_stream, [&](gs::host::stream&) { order.push_back("urgent"); })
                .value();
    }) == gs::errc::none);
    cut.finish();
    CHECK(order == std::vector<std::string>{"piece", "piece", "urgent", "piece", "piece", "urgent", "piece", "piece",
                                            "urgent", "piece"});
    for (std::uint32_t r = 0; r < ranks; ++r) {
        CHECK(same_bits(cut.out[r], whole.out[r]));
        CHECK(cut.usage(r).completed == pieces);
    }
    cut.limiters[1].close(urgent);
}

TEST_CASE("a piece that isn't admitted on one device is enqueued on none, and is the last", "[collective]") {
    machine m(9'000, {.depth = 1});
    SECTION("a device that is taken") {
        const auto other = m.limiters[1].add({.weight = 50_pct});
        const auto held = m.limiters[1].acquire(other).value();
        CHECK(m.in_pieces(
                  3, [](std::size_t) { FAIL("must not be enqueued"); }, gs::instant::min()) ==
              gs::errc::deadline_exceeded);
        CHECK(m.usage(0).in_flight == 0);
        CHECK(m.usage(0).completed == 0);
    }
    SECTION("a piece that is refused") {
        std::size_t asked = 0;
        CHECK(gs::enqueue_in_pieces<limiter>(m.gang_members, m.gang_streams, 5, [&](std::size_t i) {
                  ++asked;
                  return i < 2 ? m.all_reduce(0, 100) : gs::errc::too_many_blocks;
              }) == gs::errc::too_many_blocks);
        CHECK(asked == 3);
    }
    SECTION("a piece that throws") {
        CHECK_THROWS_AS(gs::enqueue_in_pieces<limiter>(m.gang_members, m.gang_streams, 5,
                                                       [](std::size_t) -> gs::errc { throw std::logic_error("mine"); }),
                        std::logic_error);
        for (std::uint32_t r = 0; r < ranks; ++r) {
            m.finish();
            CHECK(m.usage(r).failed == 1);  // on all devices: something may have been enqueued
        }
    }
    SECTION("no pieces") {
        CHECK(m.in_pieces(1, [](std::size_t) {}) == gs::errc::none);
    }
    m.finish();
    for (std::uint32_t r = 0; r < ranks; ++r) {
        CHECK(m.usage(r).in_flight == 0);
        CHECK(m.limiters[r].try_acquire(m.clients[r]));
    }
}

}  // namespace gang_collectives_test
