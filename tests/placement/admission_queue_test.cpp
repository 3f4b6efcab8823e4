// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Which requests are placed, wait, go first, or are never placed.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/placement/admission_queue.hpp>
#include <gpushare/placement/placement_policy.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

namespace admission_queue_test {

using namespace gpushare;
using namespace gpushare::literals;
using namespace std::chrono_literals;

namespace {

constexpr instant start{1s};

cluster one_node() {
    cluster c;
    c.add({.cpu_milli = 32'000, .memory = 128_GiB, .devices = 4, .device_memory = 80_GiB});
    return c;
}

admission_request asks(std::uint32_t devices, int level = 0, instant deadline = never) {
    return {
        .members = {{.cpu_milli = 1000, .devices = devices, .each = 100_pct}}, .level = {level}, .deadline = deadline};
}

std::vector<std::uint64_t> ids(const std::vector<admission_result>& done) {
    std::vector<std::uint64_t> all;
    for (const auto& a : done) all.push_back(a.id);
    return all;
}

}  // namespace

TEST_CASE("a request that fits is placed at once", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q;
    const auto a = q.submit(start, first_fit{}, c, asks(3));
    CHECK(a.outcome == admission_result::placed);
    REQUIRE(a.placements.size() == 1);
    CHECK(c.placed_permille() == 3000);
    CHECK(q.waiting() == 0);
}

TEST_CASE("a request that doesn't fit now waits, and is told what it lacks", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q;
    const auto first = q.submit(start, first_fit{}, c, asks(3));
    const auto second = q.submit(start, first_fit{}, c, asks(2));
    CHECK(second.outcome == admission_result::queued);
    CHECK(second.why.missing == shortage::whole_devices);
    CHECK(second.why.left == 1);
    CHECK(q.advance(start, first_fit{}, c).empty());
    c.release(first.placements.front());
    const auto done = q.advance(start + 1s, first_fit{}, c);
    REQUIRE(done.size() == 1);
    CHECK(done.front().id == second.id);
    CHECK(done.front().outcome == admission_result::placed);
    CHECK(c.placed_permille() == 2000);
    CHECK(q.waiting() == 0);
}

TEST_CASE("a request that can never fit is refused at once, with what it lacks", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q;
    (void)q.submit(start, first_fit{}, c, asks(4));
    const auto a = q.submit(start, first_fit{}, c, asks(5));
    CHECK(a.outcome == admission_result::refused);
    CHECK(a.code == errc::too_few_devices);
    CHECK(a.why.asked == 5);
    CHECK(a.why.left == 4);
    auto memory = asks(1);
    memory.members.front().device_memory = 81_GiB;
    const auto too_much = q.submit(start, first_fit{}, c, memory);
    CHECK(too_much.why.missing == shortage::device_memory);
    CHECK(too_much.why.left == (80_GiB).count());
    CHECK(q.waiting() == 0);
}

TEST_CASE("a request near somebody who isn't there yet waits for them", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q;
    auto follower = asks(1), leader = asks(1);
    follower.members.front().near = label{5};
    leader.members.front().group = label{5};
    const auto waits = q.submit(start, first_fit{}, c, follower);
    CHECK(waits.outcome == admission_result::queued);
    CHECK(q.submit(start, first_fit{}, c, leader).outcome == admission_result::placed);
    CHECK(ids(q.advance(start, first_fit{}, c)) == std::vector{waits.id});
}

TEST_CASE("a request that waits for another one doesn't keep it out, however often it was overtaken",
          "[placement][queue]") {
    cluster c = one_node();
    admission_queue q({.most_overtakes = 1});
    auto follower = asks(2), leader = asks(1);
    follower.members.front().near = label{5};
    leader.members.front().group = label{5};
    const auto waits = q.submit(start, first_fit{}, c, follower);
    const auto other = q.submit(start, first_fit{}, c, asks(1));
    CHECK(other.outcome == admission_result::placed);
    CHECK(q.submit(start, first_fit{}, c, leader).outcome == admission_result::placed);
    CHECK(q.submit(start, first_fit{}, c, asks(1)).outcome == admission_result::placed);  // of two, that takes one
    const auto held = q.submit(start, first_fit{}, c, asks(1));
    CHECK(held.outcome == admission_result::queued);  // now the follower's turn has come
    CHECK(held.why.missing == shortage::turn);
    CHECK(held.why.asked == waits.id);
    c.release(other.placements.front());
    CHECK(ids(q.advance(start, first_fit{}, c)).front() == waits.id);
}

TEST_CASE("a request for a full model holds up nobody who wants another one", "[placement][queue]") {
    cluster c;
    c.add({.devices = 2, .model = {1}});
    for (int i = 0; i < 4; ++i) c.add({.devices = 8, .model = {2}});
    const auto of = [](std::uint8_t model) {
        return admission_request{.members = {{.devices = 2, .each = 100_pct, .models = {{model}}}}};
    };
    admission_queue q;
    const auto first = q.submit(start, best_fit{}, c, of(1));
    const auto second = q.submit(start, best_fit{}, c, of(1));
    CHECK(second.outcome == admission_result::queued);
    for (int i = 0; i < 100; ++i) {
        const auto other = q.submit(start, best_fit{}, c, of(2));
        REQUIRE(other.outcome == admission_result::placed);
        c.release(other.placements.front());
    }
    auto either = of(1);  // and who would take either gets the one that nobody waits for, whatever the policy prefers
    either.members = {{.devices = 1, .each = 1_pct}};
    c.release(first.placements.front());
    const auto small = q.submit(start, first_fit{}, c, either);
    REQUIRE(small.outcome == admission_result::placed);
    c.release(small.placements.front());
    for (int i = 0; i < 40; ++i) {
        const auto one = q.submit(start, first_fit{}, c, either);
        REQUIRE(one.outcome == admission_result::placed);
    }
    CHECK(ids(q.advance(start, first_fit{}, c)).empty());  // 16 of them had gone past it
    CHECK(c[{0}].devices[1].permille == 1000);             // and then none
    CHECK(c[{0}].devices[0].permille >= 1000 - 17 * 10);
}

TEST_CASE("a placement that its carrier refuses is chosen again, and overtakes no request", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q({.most_overtakes = 1});
    const auto running = q.submit(start, first_fit{}, c, asks(1));
    const auto large = q.submit(start, first_fit{}, c, asks(4));
    const auto before = c;
    int asked = 0;
    for (int i = 0; i < 8; ++i) {
        const auto dropped = q.submit(start, first_fit{}, c, asks(1), [&](auto, cluster&) {
            ++asked;
            return gpushare::carried::dropped;
        });
        REQUIRE(dropped.outcome == admission_result::refused);
        REQUIRE(dropped.code == errc::none);
        REQUIRE(dropped.placements.empty());
        REQUIRE(c == before);
    }
    CHECK(asked == 8);
    std::vector<std::uint32_t> tried;
    const auto second = q.submit(start, first_fit{}, c, asks(1), [&](auto where, cluster& view) {
        CHECK(view.placed_permille() == 1000);  // it has nothing yet
        tried.push_back((*where[0].devices.begin()).index);
        if (tried.size() == 2) return gpushare::carried::out;
        view.drain({0}, *where[0].devices.begin());
        return gpushare::carried::elsewhere;
    });
    CHECK(second.outcome == admission_result::placed);
    CHECK(tried == std::vector<std::uint32_t>{1, 2});
    CHECK(second.placements.front().devices.contains({2}));
    const auto held = q.submit(start, first_fit{}, c, asks(1));  // that was the one that may
    CHECK(held.why.missing == shortage::turn);
    CHECK(q.withdraw(held.id));
    CHECK(q.withdraw(large.id));
    const auto stubborn = q.submit(start, first_fit{}, c, asks(1, 0, instant::min()),
                                   [](auto, cluster&) { return gpushare::carried::elsewhere; });
    CHECK(stubborn.code == errc::deadline_exceeded);  // nothing has changed, so nothing else can be chosen
    CHECK(stubborn.why.missing == shortage::consent);
    // Who waited is asked about in the same way.
    const auto waits = q.submit(start, first_fit{}, c, asks(3));
    c.resume({0}, {1});
    const auto done = q.advance(start, first_fit{}, c, [&](const admission_result& a) {
        CHECK(a.id == waits.id);
        return [&](auto, cluster& view) {
            view.drain({0});
            return gpushare::carried::elsewhere;
        };
    });
    CHECK(done.empty());
    CHECK(q.waiting() == 1);
    c.release(running.placements.front());
}

TEST_CASE("a carrier's changes to the cluster stay, beside its placement", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q;
    const auto running = q.submit(start, first_fit{}, c, asks(1));
    const auto next = q.submit(start, first_fit{}, c, asks(1), [&](auto, cluster& view) {
        view.release(running.placements.front());  // it ended meanwhile
        view.drain({0}, {3});
        return gpushare::carried::out;
    });
    REQUIRE(next.outcome == admission_result::placed);
    CHECK(c.placed_permille() == 1000);
    CHECK_FALSE(c[{0}].devices[3].open);
    c.resume({0}, {3});
    c.release(next.placements.front());
    CHECK(c == one_node());
}

TEST_CASE("a carrier that holds more than can be counted loses no placement", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q;
    const auto next = q.submit(start, first_fit{}, c, asks(1), [](auto, cluster& view) {
        view.hold({{.cpu_milli = std::numeric_limits<std::uint64_t>::max()}, {0}, {}});
        return gpushare::carried::out;
    });
    REQUIRE(next.outcome == admission_result::placed);
    c.release(next.placements.front());
    CHECK(c == one_node());
}

TEST_CASE("a request that names devices waits for these, and keeps no request from the others", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q({.most_overtakes = 1});
    auto third = asks(1), first = asks(1);
    third.on = {{2}};
    first.on = {{0}};
    CHECK(q.submit(start, first_fit{}, c, third).placements.front().devices.contains({2}));
    const auto waits = q.submit(start, first_fit{}, c, third);
    CHECK(waits.outcome == admission_result::queued);
    CHECK(waits.why.missing == shortage::whole_devices);
    for (int i = 0; i < 8; ++i) {
        const auto a = q.submit(start, first_fit{}, c, asks(1));
        REQUIRE(a.outcome == admission_result::placed);
        c.release(a.placements.front());
    }
    const auto all = q.submit(start, first_fit{}, c, asks(4));
    CHECK(q.submit(start, first_fit{}, c, first).outcome == admission_result::placed);
    auto second = asks(1);
    second.on = {{1}};
    CHECK(q.submit(start, first_fit{}, c, second).why.asked == all.id);  // these count as others do
    auto none = asks(2);
    none.on = {{2}};
    CHECK(q.submit(start, first_fit{}, c, none).code == errc::too_few_devices);
}

TEST_CASE("a request that waits for a device that has gone is told so", "[placement][queue]") {
    cluster c = one_node();
    c.add({.devices = 1, .model = {7}});
    admission_queue q;
    auto other = asks(1);
    other.members.front() = {.devices = 1, .each = 100_pct, .models = {{7}}};
    const auto has = q.submit(start, first_fit{}, c, other);
    const auto waits = q.submit(start, first_fit{}, c, other);
    c.drain({1});
    CHECK(q.submit(start, first_fit{}, c, other).outcome == admission_result::queued);  // it may come back
    CHECK(q.advance(start, first_fit{}, c).empty());
    c.remove({1});
    const auto done = q.advance(start, first_fit{}, c);
    REQUIRE(done.size() == 2);
    CHECK(done.front().id == waits.id);
    CHECK(done.front().outcome == admission_result::refused);
    CHECK(done.front().code == errc::no_device);
    CHECK(done.front().why.missing == shortage::model);
    CHECK(q.submit(start, first_fit{}, c, other).code == errc::no_device);
    c.release(has.placements.front());
    c.add({.devices = 1, .model = {7}});
    CHECK(q.submit(start, first_fit{}, c, other).outcome == admission_result::placed);
}

TEST_CASE("a request that waits in vain is told so, though the sum is the same as before", "[placement][queue]") {
    cluster c;
    admission_queue q;
    const auto takes = [&](const placement_request& r) {
        CHECK(q.submit(start, first_fit{}, c, {.members = {r}}).outcome == admission_result::placed);
        CHECK(q.submit(start, first_fit{}, c, {.members = {r}}).outcome == admission_result::queued);
        CHECK(q.advance(start, first_fit{}, c).empty());
    };
    SECTION("a node without devices is gone") {
        c.add({.cpu_milli = 1'000});
        c.add({.cpu_milli = 64'000});
        takes({.cpu_milli = 64'000});
        c.remove({1});
        CHECK(q.advance(start, first_fit{}, c).size() == 1);
    }
    SECTION("one device shrinks and another grows") {
        c.add({.devices = 2, .device_memory = 80_GiB});
        c.resize({0}, {1}, 40_GiB);
        takes({.devices = 1, .each = 100_pct, .device_memory = 80_GiB});
        c.resize({0}, {0}, 60_GiB);
        c.resize({0}, {1}, 60_GiB);
        CHECK(q.advance(start, first_fit{}, c).size() == 1);
    }
    SECTION("what was there only when it came is gone again") {
        c.add({.devices = 1, .device_memory = 40_GiB});
        takes({.devices = 1, .each = 100_pct});
        c.resize({0}, {0}, 80_GiB);
        const placement_request large{.devices = 1, .each = 100_pct, .device_memory = 80_GiB};
        CHECK(q.submit(start, first_fit{}, c, {.members = {large}}).outcome == admission_result::queued);
        c.resize({0}, {0}, 40_GiB);
        CHECK(q.advance(start, first_fit{}, c).size() == 1);
    }
    CHECK(q.waiting() <= 1);
}

TEST_CASE("a queue is bounded, and a request may prefer not to wait", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q({.most_waiting = 2});
    (void)q.submit(start, first_fit{}, c, asks(4));
    CHECK(q.submit(start, first_fit{}, c, asks(1, 0, instant::min())).code == errc::deadline_exceeded);
    CHECK(q.submit(start, first_fit{}, c, asks(1)).outcome == admission_result::queued);
    CHECK(q.submit(start, first_fit{}, c, asks(1)).outcome == admission_result::queued);
    const auto full = q.submit(start, first_fit{}, c, asks(1));
    CHECK(full.outcome == admission_result::refused);
    CHECK(full.code == errc::queue_full);
    CHECK(q.waiting() == 2);
}

TEST_CASE("deadlines end a wait, and who withdraws is gone", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q;
    const auto all = q.submit(start, first_fit{}, c, asks(4));
    const auto soon = q.submit(start, first_fit{}, c, asks(1, 0, start + 1s));
    const auto later = q.submit(start, first_fit{}, c, asks(1, 0, start + 5s));
    const auto gone = q.submit(start, first_fit{}, c, asks(1));
    CHECK(q.next_deadline() == start + 1s);
    CHECK(q.withdraw(gone.id));
    CHECK_FALSE(q.withdraw(gone.id));
    const auto done = q.advance(start + 1s, first_fit{}, c);
    REQUIRE(ids(done) == std::vector{soon.id});
    CHECK(done.front().outcome == admission_result::expired);
    CHECK(done.front().code == errc::deadline_exceeded);
    CHECK(q.next_deadline() == start + 5s);
    // At the deadline itself it is too late, even if there is room.
    c.release(all.placements.front());
    CHECK(q.advance(start + 5s, first_fit{}, c).front().outcome == admission_result::expired);
    CHECK_FALSE(q.withdraw(later.id));
    CHECK(q.next_deadline() == never);
}

TEST_CASE("higher levels go first, and within a level who came first", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q;
    const auto all = q.submit(start, first_fit{}, c, asks(4));
    const auto low = q.submit(start, first_fit{}, c, asks(2, 0));
    const auto low_too = q.submit(start, first_fit{}, c, asks(2, 0));
    const auto high = q.submit(start, first_fit{}, c, asks(2, 1));
    c.release(all.placements.front());
    CHECK(ids(q.advance(start, first_fit{}, c)) == std::vector{high.id, low.id});
    CHECK(q.withdraw(low_too.id));
}

TEST_CASE("small requests may overtake a large one, but not for ever", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q({.most_overtakes = 3});
    const auto running = q.submit(start, first_fit{}, c, asks(1));
    const auto large = q.submit(start, first_fit{}, c, asks(4));
    REQUIRE(large.outcome == admission_result::queued);
    std::vector<placement> small;
    for (int i = 0; i < 3; ++i) {
        const auto a = q.submit(start, first_fit{}, c, asks(1));
        REQUIRE(a.outcome == admission_result::placed);
        small.push_back(a.placements.front());
    }
    c.release(small.back());
    // There is room for it, but the large one has waited for three already.
    const auto held = q.submit(start, first_fit{}, c, asks(1));
    CHECK(held.outcome == admission_result::queued);
    CHECK(q.advance(start, first_fit{}, c).empty());
    // A higher level owes the large one nothing.
    const auto urgent = q.submit(start, first_fit{}, c, asks(1, 1));
    CHECK(urgent.outcome == admission_result::placed);
    c.release(urgent.placements.front());
    c.release(small[0]);
    c.release(small[1]);
    c.release(running.placements.front());
    CHECK(ids(q.advance(start, first_fit{}, c)) == std::vector{large.id});
    CHECK(q.waiting() == 1);
}

TEST_CASE("a gang waits as one", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q;
    const auto running = q.submit(start, first_fit{}, c, asks(2));
    auto gang = asks(1);
    gang.members = {gang.members.front(), asks(2).members.front()};
    const auto waits = q.submit(start, first_fit{}, c, gang);
    CHECK(waits.outcome == admission_result::queued);
    CHECK(c.placed_permille() == 2000);
    c.release(running.placements.front());
    const auto done = q.advance(start, first_fit{}, c);
    REQUIRE(ids(done) == std::vector{waits.id});
    CHECK(done.front().placements.size() == 2);
}

TEST_CASE("a gang that can't be placed even on empty nodes is refused at once", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q({.most_overtakes = 1});
    (void)q.submit(start, first_fit{}, c, asks(1));
    auto gang = asks(3);
    gang.members.push_back(asks(2).members.front());
    const auto a = q.submit(start, first_fit{}, c, gang);  // each fits alone
    CHECK(a.outcome == admission_result::refused);
    CHECK(a.code == errc::too_few_devices);
    CHECK(a.member == 1);
    // Whoever a member wants to be near may still come.
    gang = asks(2);
    gang.members.push_back(asks(2).members.front());
    gang.members.front().near = label{6};
    CHECK(q.submit(start, first_fit{}, c, gang).outcome == admission_result::queued);
}

TEST_CASE("a gang that fits is placed, though not by taking the largest first", "[placement][queue]") {
    cluster c;
    c.add({.cpu_milli = 8'000, .devices = 1});
    c.add({.cpu_milli = 4'000, .devices = 1});
    const placement_request large{.cpu_milli = 2'000, .devices = 1, .each = 60_pct};
    const placement_request busy{.cpu_milli = 6'000, .devices = 1, .each = 50_pct};
    for (const bool first : {true, false}) {
        cluster now = c;
        admission_queue q;
        const auto a = first ? q.submit(start, first_fit{}, now, {.members = {large, busy}})
                             : q.submit(start, gpushare::spreading{}, now, {.members = {large, busy}});
        REQUIRE(a.outcome == admission_result::placed);
        CHECK(a.placements[0].node.index == 1);
        CHECK(a.placements[1].node.index == 0);
    }
}

TEST_CASE("a gang for which no plan is found waits, as it might fit, and keeps nobody out", "[placement][queue]") {
    cluster c;
    admission_request gang;
    support::random any(1);
    // Each three of them fill a device, so all fit: but to find that takes more steps than the
    // queue takes.
    for (int i = 0; i < 12; ++i) {
        c.add({.cpu_milli = 1'000, .devices = 1});
        const auto first = 100 + any.below(300), second = 100 + any.below(300);
        for (const auto part : {first, second, 1000 - first - second})
            gang.members.push_back({.devices = 1, .each = gpushare::share::of_permille(part)});
    }
    admission_queue q({.most_overtakes = 1});
    const auto waits = q.submit(start, first_fit{}, c, gang);
    REQUIRE(waits.outcome == admission_result::queued);
    CHECK(q.advance(start, first_fit{}, c).empty());
    for (int i = 0; i < 4; ++i) {
        const auto small = q.submit(start, first_fit{}, c, asks(1));
        REQUIRE(small.outcome == admission_result::placed);
        c.release(small.placements.front());
    }
    CHECK(q.withdraw(waits.id));
}

// Against the set of ids: each comes back once, nobody is lost, and nobody waits for ever behind
// others.
TEST_CASE("random arrivals and departures lose and duplicate nobody", "[placement][queue][property]") {
    for (std::uint64_t run = 0; run < 100; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        cluster c = one_node();
        const cluster empty = c;
        admission_queue q({.most_waiting = 20, .most_overtakes = 4});
        std::map<std::uint64_t, int> overtaken;  // who waits, and by how many of its level or lower
        std::vector<placement> placed;
        const auto take = [&](const admission_result& a) {
            placed.insert(placed.end(), a.placements.begin(), a.placements.end());
        };
        instant now = start;
        for (int step = 0; step < 300; ++step) {
            now += 1ms;
            if (any.one_in(2)) {
                const auto deadline =
                    any.one_in(4) ? now + ns{static_cast<std::int64_t>(any.below(50'000'000))} : never;
                auto r = asks(1 + static_cast<std::uint32_t>(any.below(4)), 0, deadline);
                const auto a = q.submit(now, best_fit{}, c, r);
                if (a.outcome == admission_result::placed) {
                    take(a);
                    for (auto& [id, times] : overtaken) REQUIRE(++times <= 4);
                } else if (a.outcome == admission_result::queued) {
                    REQUIRE(overtaken.emplace(a.id, 0).second);
                } else {
                    REQUIRE((a.code == errc::queue_full || a.code == errc::deadline_exceeded));
                }
            } else if (!placed.empty()) {
                auto& any_of_them = any.of(placed);
                c.release(any_of_them);
                std::swap(any_of_them, placed.back());
                placed.pop_back();
            }
            for (const auto& a : q.advance(now, best_fit{}, c)) {
                REQUIRE(overtaken.erase(a.id) == 1);
                if (a.outcome != admission_result::placed) continue;
                take(a);
                for (auto& [id, times] : overtaken)
                    if (id < a.id) REQUIRE(++times <= 4);
            }
            REQUIRE(q.waiting() == overtaken.size());
        }
        for (const auto& p : placed) c.release(p);
        CHECK(c == empty);
        std::size_t rounds = 0;  // whoever is left comes as soon as there is room
        while (q.waiting() != 0 && ++rounds < 100)
            for (const auto& a : q.advance(now, best_fit{}, c))
                for (const auto& p : a.placements) c.release(p);
        CHECK(q.waiting() == 0);
    }
}

namespace {

/// What one node has: whatever a request could find there at some time, if this or that leaves.
struct fill {
    std::uint64_t cpu = 0;
    std::array<std::uint32_t, 2> share{};
    std::array<std::uint64_t, 2> memory{};
};

bool goes_in(const placement_request& r, gpushare::device_set on, std::uint32_t devices, const fill& f) {
    std::uint32_t good = 0;
    for (std::uint32_t d = 0; d < devices; ++d)
        good += f.share[d] >= r.each.permille() && f.memory[d] >= r.device_memory.count() &&
                        (on.empty() || on.contains({d}))
                    ? 1U
                    : 0U;
    return r.cpu_milli <= f.cpu && good >= r.devices;
}

fill without(fill f, const placement& p) {
    f.cpu -= std::min(f.cpu, p.request.cpu_milli);
    for (const auto d : p.devices) {
        f.share[d.index] -= std::min(f.share[d.index], p.request.each.permille());
        f.memory[d.index] -= std::min(f.memory[d.index], p.request.device_memory.count());
    }
    return f;
}

/// Whether there is a future in which whoever is on the node leaves any of it, so that the request
/// fits there, but not beside the placement. All futures that could differ are looked at.
bool delays(const cluster& c, const placement& p, const placement_request& r, gpushare::device_set on) {
    const auto n = c[p.node];
    if (!r.models.allows(n.whole.model)) return false;
    const std::uint32_t devices = n.whole.devices;
    const auto levels = [](std::uint64_t now, std::uint64_t need, std::uint64_t whole) {
        return std::vector<std::uint64_t>{now, std::min(std::max(now, need), whole), whole};
    };
    std::vector<fill> futures{{}};
    const auto branch = [&](const std::vector<std::uint64_t>& values, auto set) {
        std::vector<fill> all;
        for (const auto& f : futures)
            for (const auto v : values) set(all.emplace_back(f), v);
        futures = std::move(all);
    };
    branch(levels(n.cpu_milli, r.cpu_milli, n.whole.cpu_milli), [](fill& f, std::uint64_t v) { f.cpu = v; });
    for (std::uint32_t d = 0; d < devices; ++d) {
        branch(levels(n.devices[d].permille, r.each.permille(), 1000),
               [d](fill& f, std::uint64_t v) { f.share[d] = static_cast<std::uint32_t>(v); });
        branch(levels(n.devices[d].memory.count(), r.device_memory.count(), n.whole.device_memory.count()),
               [d](fill& f, std::uint64_t v) { f.memory[d] = v; });
    }
    return std::ranges::any_of(
        futures, [&](const fill& f) { return goes_in(r, on, devices, f) && !goes_in(r, on, devices, without(f, p)); });
}

std::vector<placement> all_places(const cluster& c, const placement_request& r, gpushare::device_set on) {
    std::vector<placement> all;
    for (std::uint32_t i = 0; i < c.size(); ++i)
        for (std::uint32_t bits = 0; bits < 4; ++bits) {
            placement p{r, {i}, {}};
            for (std::uint32_t d = 0; d < 2; ++d)
                if ((bits >> d & 1) != 0) p.devices.add({d});
            const bool named = std::ranges::all_of(p.devices, [&](auto d) { return on.empty() || on.contains(d); });
            if (auto after = c; named && !after.try_apply(p)) all.push_back(p);
        }
    return all;
}

struct waiting_one {
    std::uint64_t id = 0;
    admission_request request{};
    int overtaken = 0;
};

/// A queue beside the list of who waits in it, and how often each was overtaken by what we count
/// ourselves.
struct watched_queue {
    static constexpr int most = 2;

    cluster c{};
    admission_queue q{{.most_waiting = 12, .most_overtakes = most}};
    std::vector<waiting_one> waits{};  // in the order in which they go
    std::vector<placement> placed{};

    void took(const cluster& before, const placement& p, int level, std::size_t ahead) {
        for (std::size_t i = 0; i < ahead; ++i)
            if (level <= waits[i].request.level.level &&
                delays(before, p, waits[i].request.members[0], waits[i].request.on))
                REQUIRE(++waits[i].overtaken <= most);
        placed.push_back(p);
    }
    [[nodiscard]] std::size_t behind(int level) const {
        return static_cast<std::size_t>(
            std::ranges::find_if(waits, [&](const auto& w) { return w.request.level.level < level; }) - waits.begin());
    }
    void submit(admission_request r) {
        const cluster before = c;
        const auto at = behind(r.level.level);
        const auto a = q.submit(start, best_fit{}, c, r);
        if (a.outcome == admission_result::placed)
            took(before, a.placements[0], r.level.level, at);
        else if (a.outcome == admission_result::queued)
            waits.insert(waits.begin() + static_cast<std::ptrdiff_t>(at), {a.id, std::move(r), 0});
        if (a.outcome == admission_result::queued) REQUIRE(a.why.missing != shortage::none);
    }
    void advance() {
        cluster before = c;
        for (const auto& a : q.advance(start, best_fit{}, c)) {
            REQUIRE(a.outcome == admission_result::placed);
            const auto at = std::ranges::find(waits, a.id, &waiting_one::id);
            REQUIRE(at != waits.end());
            took(before, a.placements[0], at->request.level.level, static_cast<std::size_t>(at - waits.begin()));
            waits.erase(at);
            before.apply(a.placements[0]);
        }
        REQUIRE(before == c);
    }
    // Whatever fits, somebody before it is delayed by it who has been overtaken often enough.
    std::size_t check_nobody_stands_still() const {
        std::size_t held = 0;
        for (std::size_t i = 0; i < waits.size(); ++i)
            for (const auto& p : all_places(c, waits[i].request.members[0], waits[i].request.on)) {
                REQUIRE(std::any_of(waits.begin(), waits.begin() + static_cast<std::ptrdiff_t>(i), [&](const auto& w) {
                    return w.overtaken >= most && delays(c, p, w.request.members[0], w.request.on);
                }));
                ++held;
            }
        return held;
    }
};

}  // namespace

// Against all futures and all places, counted apart from the queue.
TEST_CASE("a request that fits and delays no other goes in", "[placement][queue][property]") {
    std::size_t held = 0, placed = 0;
    for (std::uint64_t run = 0; run < support::few(std::uint64_t{30}); ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        watched_queue w;
        for (int i = 0; i < 3; ++i)
            w.c.add({.cpu_milli = 4'000,
                     .devices = static_cast<std::uint32_t>(1 + any.below(2)),
                     .model = {static_cast<std::uint8_t>(any.below(2))},
                     .device_memory = 16_GiB});
        for (int step = 0; step < 60; ++step) {
            if (any.below(3) != 0) {
                placement_request r{.cpu_milli = 500 * any.below(7),
                                    .devices = static_cast<std::uint32_t>(any.below(3))};
                if (r.devices != 0) {
                    r.each = gpushare::share::of_permille(100 * any.below(11));
                    r.device_memory = 4_GiB * any.below(5);
                    if (any.one_in(2)) r.models.add({static_cast<std::uint8_t>(any.below(2))});
                }
                admission_request all{.members = {r}, .level = {static_cast<int>(any.below(2))}};
                if (any.one_in(4)) all.on.add({static_cast<std::uint32_t>(any.below(2))});
                w.submit(std::move(all));
            } else if (!w.placed.empty()) {
                auto& one = any.of(w.placed);
                w.c.release(one);
                std::swap(one, w.placed.back());
                w.placed.pop_back();
            }
            w.advance();
            held += w.check_nobody_stands_still();
        }
        placed += w.placed.size();
    }
    CHECK(held > 0);  // else it shows nothing
    CHECK(placed > 0);
}

TEST_CASE("a gang holds back what competes with it, and nothing else", "[placement][queue]") {
    cluster c;
    const auto full = c.add({.cpu_milli = 4'000, .devices = 1, .model = {1}});
    for (int i = 0; i < 2; ++i) c.add({.cpu_milli = 4'000, .devices = 1, .model = {2}});
    const auto one = [](std::uint8_t model, std::uint64_t cpu) {
        return placement_request{
            .cpu_milli = cpu, .devices = 1, .each = 100_pct, .models = {gpushare::device_model{model}}};
    };
    c.apply({one(1, 0), full, {gpushare::device_id{0}}});
    admission_queue q({.most_overtakes = 2});
    const auto gang = q.submit(start, best_fit{}, c, {.members = {one(1, 1'000), one(2, 1'000)}});
    REQUIRE(gang.outcome == admission_result::queued);
    for (int i = 0; i < 10; ++i) {  // a member that fits on the other node doesn't wait for this one
        const auto a = q.submit(start, best_fit{}, c, {.members = {one(2, 3'000)}});
        REQUIRE(a.outcome == admission_result::placed);
        c.release(a.placements[0]);
    }
    const auto first = q.submit(start, best_fit{}, c, {.members = {one(2, 0)}});
    REQUIRE(first.outcome == admission_result::placed);
    for (int i = 0; i < 2; ++i) {  // what is left there, it waits for
        const auto a = q.submit(start, best_fit{}, c, {.members = {one(2, 0)}});
        REQUIRE(a.outcome == admission_result::placed);
        c.release(a.placements[0]);
    }
    CHECK(q.submit(start, best_fit{}, c, {.members = {one(2, 0)}, .deadline = instant::min()}).why.missing ==
          shortage::turn);
}

TEST_CASE("a gang is held what its members could have of a node at once", "[placement][queue]") {
    cluster c;
    for (int i = 0; i < 4; ++i) c.add({.cpu_milli = 4'000, .devices = 2});
    const placement_request member{.cpu_milli = 1'000, .devices = 1, .each = 100_pct};
    c.apply({{.devices = 2, .each = 10_pct}, {0}, {gpushare::device_id{0}, gpushare::device_id{1}}});
    admission_queue q({.most_overtakes = 2});
    REQUIRE(q.submit(start, best_fit{}, c, {.members = std::vector(8, member)}).outcome == admission_result::queued);
    for (int i = 0; i < 10; ++i) {  // two members to a node leave 2,000 of its cores
        const auto a = q.submit(start, best_fit{}, c, {.members = {{.cpu_milli = 2'000}}});
        REQUIRE(a.outcome == admission_result::placed);
        c.release(a.placements[0]);
    }
    for (int i = 0; i < 2; ++i) {
        const auto a = q.submit(start, best_fit{}, c, {.members = {{.cpu_milli = 2'001}}});
        REQUIRE(a.outcome == admission_result::placed);
        c.release(a.placements[0]);
    }
    CHECK(q.submit(start, best_fit{}, c, {.members = {{.cpu_milli = 2'001}}, .deadline = instant::min()}).why.missing ==
          shortage::turn);
}

namespace {

bool fit_together(const cluster& c, std::span<const placement_request> members) {
    if (members.empty()) return true;
    return std::ranges::any_of(all_places(c, members.front(), {}), [&](const placement& p) {
        cluster after = c;
        after.apply(p);
        return fit_together(after, members.subspan(1));
    });
}

/// `c` where others have left as much as makes room for `gang`, and no more.
cluster with_just_room(const cluster& c, std::span<const placement> gang) {
    const cluster empty = c.emptied();
    cluster room = empty, all = empty;
    for (const auto& p : gang) all.hold(p);
    for (std::uint32_t i = 0; i < c.size(); ++i) {
        const auto now = c[{i}], then = all[{i}];
        room.hold({{.cpu_milli = std::min(now.whole.cpu_milli - now.cpu_milli, then.cpu_milli)}, {i}, {}});
        for (std::uint32_t d = 0; d < now.devices.size(); ++d)
            room.hold(
                {{.devices = 1,
                  .each =
                      gpushare::share::of_permille(std::min(1000 - now.devices[d].permille, then.devices[d].permille)),
                  .device_memory = std::min(now.whole.device_memory - now.devices[d].memory, then.devices[d].memory)},
                 {i},
                 {gpushare::device_id{d}}});
    }
    return room;
}

/// Whether the gang fits in some future, in which others leave what they like, and not beside the
/// placement.
bool delays_gang(const cluster& c, const placement& p, std::span<const placement_request> members,
                 std::vector<placement> planned = {}) {
    if (planned.size() == members.size()) {
        cluster beside = with_just_room(c, planned);
        beside.hold(p);
        return !fit_together(beside, members);
    }
    cluster empty = c.emptied();
    for (const auto& one : planned) empty.apply(one);
    return std::ranges::any_of(all_places(empty, members[planned.size()], {}), [&](const placement& one) {
        auto with = planned;
        with.push_back(one);
        return delays_gang(c, p, members, std::move(with));
    });
}

}  // namespace

// Against all futures, counted apart from the queue.
TEST_CASE("a gang is delayed as often as the queue allows, and not more often", "[placement][queue][property]") {
    constexpr int most = 2;
    constexpr std::uint64_t runs = support::few(std::uint64_t{200});
    std::size_t delayed = 0, waited = 0, past = 0;
    for (std::uint64_t run = 0; run < runs; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        const auto request = [&] {
            placement_request r{.cpu_milli = 500 * any.below(5), .devices = static_cast<std::uint32_t>(any.below(2))};
            if (r.devices == 0) return r;
            r.each = gpushare::share::of_permille(100 * (1 + any.below(10)));
            if (any.one_in(2)) r.models.add({static_cast<std::uint8_t>(any.below(2))});
            return r;
        };
        cluster c;
        for (int i = 0; i < 3; ++i)
            c.add({.cpu_milli = 4'000,
                   .devices = static_cast<std::uint32_t>(1 + any.below(2)),
                   .model = {static_cast<std::uint8_t>(any.below(2))}});
        admission_queue q({.most_overtakes = most});
        std::vector<placement> placed;
        const auto submit = [&](std::vector<placement_request> members) {
            auto a = q.submit(start, best_fit{}, c, {.members = std::move(members)});
            placed.insert(placed.end(), a.placements.begin(), a.placements.end());
            return a.outcome;
        };
        for (int i = 0; i < 5; ++i) (void)submit({request()});
        q = admission_queue({.most_overtakes = most});  // whoever waited has gone
        const std::vector<placement_request> gang{request(), request()};
        if (submit(gang) != admission_result::queued) continue;
        ++waited;
        for (int step = 0, overtaken = 0; step < 40; ++step) {
            if (any.one_in(3) && !placed.empty()) {
                std::swap(any.of(placed), placed.back());
                c.release(placed.back());
                placed.pop_back();
                if (fit_together(c, gang)) break;  // its turn
            }
            const cluster before = c;
            auto a = q.submit(start, best_fit{}, c, {.members = {request()}, .deadline = instant::min()});
            if (a.outcome != admission_result::placed) continue;
            ++past;
            placed.push_back(a.placements[0]);
            if (!delays_gang(before, a.placements[0], gang)) continue;
            ++delayed;
            REQUIRE(++overtaken <= most);
        }
    }
    CHECK(waited > runs / 20);
    CHECK(delayed > 0);
    CHECK(past > 2 * delayed);
}

}  // namespace admission_queue_test
