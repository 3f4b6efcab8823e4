// SPDX-License-Identifier: Apache-2.0
// Who is placed, who waits, who goes first, and who never comes.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <gpushare/placement/admission_queue.hpp>
#include <gpushare/placement/placement_policies.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

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

TEST_CASE("what fits is placed at once", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q;
    const auto a = q.submit(start, first_fit{}, c, asks(3));
    CHECK(a.outcome == admission_result::placed);
    REQUIRE(a.placements.size() == 1);
    CHECK(c.placed_permille() == 3000);
    CHECK(q.waiting() == 0);
}

TEST_CASE("what doesn't fit now waits, and is told what it lacks", "[placement][queue]") {
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

TEST_CASE("what can never fit is refused at once, with what it lacks", "[placement][queue]") {
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

TEST_CASE("who waits for somebody doesn't keep them out, however often it was overtaken", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q({.most_overtakes = 1});
    auto follower = asks(1), leader = asks(1);
    follower.members.front().near = label{5};
    leader.members.front().group = label{5};
    const auto waits = q.submit(start, first_fit{}, c, follower);
    CHECK(q.submit(start, first_fit{}, c, asks(1)).outcome == admission_result::placed);
    CHECK(q.submit(start, first_fit{}, c, leader).outcome == admission_result::placed);
    CHECK(q.submit(start, first_fit{}, c, asks(1)).outcome ==
          admission_result::queued);  // now the follower's turn has come
    CHECK(ids(q.advance(start, first_fit{}, c)).front() == waits.id);
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

TEST_CASE("a gang for which there is no plan even on empty nodes is refused at once", "[placement][queue]") {
    cluster c = one_node();
    admission_queue q({.most_overtakes = 1});
    (void)q.submit(start, first_fit{}, c, asks(1));
    auto gang = asks(3);
    gang.members.push_back(asks(2).members.front());
    const auto a =
        q.submit(start, first_fit{}, c, gang);  // each fits alone; waiting, it would block the queue for ever
    CHECK(a.outcome == admission_result::refused);
    CHECK(a.code == errc::too_few_devices);
    CHECK(a.member == 1);
    // Whoever a member wants to be near may still come.
    gang = asks(2);
    gang.members.push_back(asks(2).members.front());
    gang.members.front().near = label{6};
    CHECK(q.submit(start, first_fit{}, c, gang).outcome == admission_result::queued);
}

// Against the set of ids: each comes back once, nobody is lost, and nobody waits for ever behind others.
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

}  // namespace admission_queue_test
