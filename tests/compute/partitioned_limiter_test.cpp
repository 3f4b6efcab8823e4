// SPDX-License-Identifier: Apache-2.0
// Shares as partitions of SMs, and as shares of time if there are no partitions: on the host
// device, whose ledger knows each block's SM, and in virtual time.
#include <gpushare/compute/partitioned_limiter.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
#include <new>
#include <set>
#include <span>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/told_policy.hpp"

namespace partitioned_limiter_test {

using namespace gpushare;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using support::code_of;

namespace {

constexpr device_id d{0};
using limiter_type = partitioned_limiter<host::device_sms, host::steady_clock>;

std::vector<client_settings> with_shares(std::initializer_list<share> shares) {
    std::vector<client_settings> clients;
    for (const share s : shares) {
        clients.push_back({.weight = s});
        clients.back().tag = static_cast<std::uint32_t>(clients.size());
    }
    return clients;
}

std::map<std::uint32_t, std::set<std::uint32_t>> sms_by_tag(host::node& node) {
    std::map<std::uint32_t, std::set<std::uint32_t>> had;
    for (const auto& b : node.ledger(d).take().blocks) had[b.tag].insert(b.sm);
    return had;
}

/// Refuses small clients that become bigger.
share refuse_above = share::whole();
bool throws_instead = false;
struct spy : support::told_policy {
    failure change(client_id c, const client_settings& s) {
        if (throws_instead && s.weight > refuse_above && s.weight < 20_pct) throw std::bad_alloc();
        if (s.weight > refuse_above && s.weight < 20_pct) return {errc::share_exceeded};
        return told_policy::change(c, s);
    }
};
static_assert(compute_policy<spy>);

}  // namespace

TEST_CASE("clients run on the SMs of their partitions and on no others", "[partitioned]") {
    for (const auto t : {host::timing::real, host::timing::modelled}) {
        host::node node{{.sms = 8, .timing = t}};
        limiter_type shared{{node, d}, with_shares({60_pct, 35_pct, 5_pct})};
        CHECK(shared.why_gated() == errc::none);
        CHECK(shared.plan().sms == std::vector<std::uint32_t>{5, 3});
        CHECK(&shared.limiter_of(1) == &shared.limiter_of(2));
        CHECK(&shared.limiter_of(0) != &shared.limiter_of(1));
        CHECK_NOTHROW(shared.verify());
        std::vector<limiter_type::ticket> done;
        for (int round = 0; round < 30; ++round)
            for (std::size_t i = 0; i < 3; ++i)
                done.push_back(
                    shared.submit(i, [](auto& s) { s.launch({.blocks = 9, .hold = 10us}, [](auto&) {}); }).value());
        for (const auto& t2 : done) CHECK(t2.wait());
        const auto had = sms_by_tag(node);
        CHECK(had.at(1) == std::set<std::uint32_t>{0, 1, 2, 3, 4});
        for (const std::uint32_t tag : {2U, 3U})
            for (const std::uint32_t sm : had.at(tag)) CHECK(sm >= 5);
        CHECK(shared.usage(2).completed == 30);
    }
}

TEST_CASE("clients of different partitions don't wait for one another, whatever their levels", "[partitioned]") {
    host::node node{{.sms = 2}};
    auto clients = with_shares({50_pct, 50_pct});
    clients[0].level = {7};
    limiter_type shared{{node, d}, clients, {}, {.depth = 1}};
    std::atomic<bool> other_ran{false};
    auto first = shared.submit(0, [&](auto& s) {
        s.launch({}, [&](auto& ctx) {
            for (std::uint32_t turn = 0; !other_ran && !ctx.device_lost(); ++turn) ctx.backoff(turn);
        });
    });
    auto second = shared.submit(1, [&](auto& s) { s.launch({}, [&](auto&) { other_ran = true; }); });
    CHECK(second->wait());
    CHECK(first->wait());
}

TEST_CASE("a stream in no partition is found and named", "[partitioned]") {
    host::node node{{.sms = 4}};
    limiter_type shared{{node, d}, with_shares({50_pct, 50_pct})};
    CHECK_NOTHROW(shared.verify());
    {
        auto a = node.make_stream(d, {}, 42), b = node.make_stream(d, {}, 77);
        CHECK(code_of([&] { shared.verify(); }) == errc::invalid_specification);
        CHECK_THROWS_WITH(shared.verify(), Contains("tags 42, 77"));
    }
    CHECK_NOTHROW(shared.verify());
}

TEST_CASE("cooperative launches fit their partition or are refused", "[partitioned]") {
    host::node node{{.sms = 4}};
    limiter_type shared{{node, d}, with_shares({75_pct, 25_pct})};
    const auto launch = [&](std::size_t client, std::uint32_t blocks) {
        errc how = errc::none;
        auto done = shared.submit(client, [&](auto& s) {
            how = s.launch_cooperative({.blocks = blocks}, [](auto& ctx) { (void)ctx.grid_sync(); });
        });
        CHECK(done->wait());
        return how;
    };
    CHECK(launch(0, 3) == errc::none);
    CHECK(launch(0, 4) == errc::too_many_blocks);
    CHECK(launch(1, 1) == errc::none);
    CHECK(launch(1, 2) == errc::too_many_blocks);
}

TEST_CASE("a split stays while it is used, and the SMs are free again afterwards", "[partitioned]") {
    host::node node{{.sms = 4}};
    const host::device_sms sms{node, d};
    {
        limiter_type shared{sms, with_shares({75_pct, 25_pct})};
        CHECK(code_of([&] { const limiter_type again{sms, with_shares({50_pct, 50_pct})}; }) == errc::too_few_sms);
        CHECK(code_of([&] { shared.change(0, {.weight = 25_pct}); }) == errc::not_supported);  // 2 and 2
        CHECK(code_of([&] { shared.change(0, {.weight = 80_pct}); }) == errc::share_exceeded);
        CHECK(shared.plan().sms == std::vector<std::uint32_t>{3, 1});
        // What moves no SM does change.
        CHECK_NOTHROW(shared.change(0, {.weight = 72_pct, .level = {3}}));
        CHECK(shared.submit(0, [](auto& s) { s.launch({}, [](auto&) {}); })->wait());
    }
    const limiter_type equal{sms, with_shares({75_pct, 25_pct}), {}, {}, sm_sharing::equal};
    CHECK(equal.plan().sms == std::vector<std::uint32_t>{2, 2});
}

TEST_CASE("without SMs to split, shares of the device are shares of its time", "[partitioned][sim]") {
    sim::world world;
    using shared_type = partitioned_limiter<sim::device, sim::clock_of>;
    shared_type shared{{world, d}, with_shares({60_pct, 30_pct, 10_pct}), sim::clock_of(world), {.depth = 2}};
    CHECK(shared.why_gated() == errc::not_supported);
    CHECK_FALSE(shared.plan().partitioned());
    CHECK_NOTHROW(shared.verify());
    std::deque<shared_type::ticket> tickets;
    for (int i = 0; i < 1500; ++i)
        for (std::size_t c = 0; c < 3; ++c)
            tickets.push_back(shared.submit(c, [c](auto& s) { s.enqueue((1 + 4 * (c % 2)) * 1ms); }).value());
    CHECK_FALSE(tickets.back().wait(world.now() + 1s));
    CHECK(shared.usage(0).device_time / 1ms == Approx(600).margin(10));
    CHECK(shared.usage(1).device_time / 1ms == Approx(300).margin(10));
    CHECK(shared.usage(2).device_time / 1ms == Approx(100).margin(10));

    // Nothing has to move: the shares change while work is in flight.
    shared.change(0, {.weight = 30_pct});
    shared.change(1, {.weight = 60_pct});
    const std::array before{shared.usage(0).device_time, shared.usage(1).device_time};
    CHECK_FALSE(tickets.back().wait(world.now() + 1s));
    CHECK((shared.usage(0).device_time - before[0]) / 1ms == Approx(300).margin(10));
    CHECK((shared.usage(1).device_time - before[1]) / 1ms == Approx(600).margin(10));
}

TEST_CASE("with fewer units than clients, the same calls share time", "[partitioned]") {
    host::node node{{.sms = 4, .sm_unit = 2}};
    limiter_type shared{{node, d}, with_shares({40_pct, 30_pct, 30_pct}), {}, {}, sm_sharing::equal};
    CHECK(shared.why_gated() == errc::too_few_sms);
    CHECK(shared.limiter_of_partition(0).bound_of(shared.id_of(2)) == 0ns);
    for (std::size_t i = 0; i < 3; ++i) {
        CHECK_FALSE(shared.stream_of(i).in_partition());
        shared.acquire(i)->enqueue(shared.stream_of(i), [](auto& s) { s.launch({}, [](auto&) {}); });
    }
    shared.poll();
    CHECK_NOTHROW(shared.verify());  // nobody relies on partitions
}

TEST_CASE("weights and caps are told to the policies as those of the part, a policy for each part", "[partitioned]") {
    host::node node{{.sms = 8}};
    auto clients = with_shares({60_pct, 35_pct, 5_pct});
    clients[0].cap = 50_pct;
    clients[1].cap = 30_pct;
    std::vector<client_settings> told;
    int made = 0;
    const auto make = [&] {
        ++made;
        return spy{{{}, &told}};
    };
    partitioned_limiter shared{host::device_sms{node, d}, std::span<const client_settings>(clients),
                               node.get_clock(),          limiter_options{},
                               sm_sharing::weighted,      make};
    CHECK(made == 2);
    REQUIRE(told.size() == 3);
    CHECK(told[0].weight == share::whole());
    CHECK(told[0].cap == 80_pct);  // of 5 SMs, half of 8
    CHECK(told[1].weight == 87.5_pct);
    CHECK(told[1].cap == 80_pct);  // of 3, 2.4
    CHECK(told[2].cap == share::whole());
    CHECK(shared.submit(1, [](auto& s) { s.launch({}, [](auto&) {}); })->wait());

    // A refusal leaves all as it was.
    told.clear();
    shared.change(1, {.weight = 34_pct, .tag = 2});
    REQUIRE(told.size() == 3);
    CHECK(told[0].weight == share::whole());
    CHECK(told[1].weight == 87.1_pct);
    CHECK(told[2].weight == 12.8_pct);
    refuse_above = 12.8_pct;
    CHECK(code_of([&] { shared.change(1, {.weight = 33_pct}); }) == errc::share_exceeded);
    refuse_above = share::whole();
    CHECK(shared.plan().clients[2].weight == 12.8_pct);
    CHECK(told[told.size() - 2].weight == 87.1_pct);  // as it was before
}

TEST_CASE("a policy that throws in a change of settings leaves all clients as they were", "[partitioned]") {
    host::node node{{.sms = 8}};
    const auto clients = with_shares({60_pct, 35_pct, 5_pct});
    std::vector<client_settings> told;
    partitioned_limiter shared{host::device_sms{node, d}, std::span<const client_settings>(clients),
                               node.get_clock(),          limiter_options{},
                               sm_sharing::weighted,      [&] { return spy{{{}, &told}}; }};
    const auto before = shared.plan();
    told.clear();
    refuse_above = 12.5_pct;
    throws_instead = true;
    CHECK_THROWS_AS(shared.change(1, {.weight = 33_pct, .tag = 2}), std::bad_alloc);
    refuse_above = share::whole();
    throws_instead = false;
    CHECK(shared.plan() == before);
    REQUIRE(told.size() == 4);  // two that fall or stay, and both again
    CHECK(told[1].weight == 86.8_pct);
    CHECK(told[2].weight == 87.5_pct);
    CHECK(told[3].weight == share::whole());
}

}  // namespace partitioned_limiter_test
