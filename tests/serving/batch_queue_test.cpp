// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Dynamic batching in virtual time: when batches go, what they contain, and that no request is lost
// or late.
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <gpushare/serving/batch_queue.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace batch_queue_test {
namespace {

using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::instant;
using gpushare::never;
using gpushare::ns;

using item = std::unique_ptr<int>;
using queue = gpushare::batch_queue<item>;

instant at(ns t) { return instant{t}; }
std::vector<int> values(const std::vector<item>& all) {
    std::vector<int> v;
    for (const auto& i : all) v.push_back(*i);
    return v;
}
errc push(queue& q, int value, instant now, instant deadline = never) {
    auto one = std::make_unique<int>(value);
    const errc why = q.try_push(std::move(one), now, deadline);
    CHECK((why == errc::none) == (one == nullptr));  // refused, it is still the caller's
    return why;
}

}  // namespace

TEST_CASE("a batch goes when it is full, when it has waited, or in time for a deadline", "[serving]") {
    queue q({.max_size = 3, .max_delay = 10ms, .takes = 4ms, .slack = 0ms});
    CHECK(q.due() == never);
    CHECK(q.take(at(0ms)).empty());
    CHECK(push(q, 1, at(1ms)) == errc::none);
    CHECK(q.due() == at(11ms));
    CHECK(q.take(at(10ms)).empty());
    CHECK(push(q, 2, at(2ms), at(9ms)) == errc::none);
    CHECK(q.due() == at(5ms));  // takes 4 ms
    CHECK(values(q.take(at(5ms))) == std::vector{1, 2});
    CHECK(q.empty());
    for (int i = 0; i < 4; ++i) CHECK(push(q, i, at(6ms)) == errc::none);
    CHECK(q.due() == instant::min());
    CHECK(values(q.take(at(6ms))) == std::vector{0, 1, 2});
    CHECK(q.due() == at(16ms));
    CHECK(values(q.take(at(16ms))) == std::vector{3});
}

TEST_CASE("items of a higher level go first, and the oldest of all still says when a batch is due", "[serving]") {
    queue q({.max_size = 2, .max_delay = 10ms, .slack = 0ms});
    CHECK(q.level() == gpushare::no_priority);
    const auto push_at = [&](int level, int value, gpushare::instant now) {
        REQUIRE(q.try_push(std::make_unique<int>(value), now, never, {level}) == errc::none);
    };
    CHECK(push(q, 1, at(1ms)) == errc::none);
    push_at(2, 2, at(2ms));
    CHECK(q.level().level == 2);
    CHECK(q.due() == instant::min());
    q.set_rule({.max_size = 9, .max_delay = 10ms, .slack = 0ms});
    CHECK(q.due() == at(11ms));  // the first that came, wherever it stands
    push_at(3, 3, at(3ms));
    push_at(2, 4, at(4ms));
    push_at(-5, 5, at(5ms));
    CHECK(push(q, 6, at(6ms)) == errc::none);
    CHECK(q.take(at(10ms)).empty());
    CHECK(q.due() == at(11ms));
    CHECK(values(q.take(at(11ms))) == std::vector{3, 2, 4, 5, 1, 6});
}

TEST_CASE("a request that can't meet its deadline any more isn't run", "[serving]") {
    queue q({.max_size = 2, .max_delay = 10ms, .takes = 4ms, .slack = 0ms});
    CHECK(push(q, 0, at(7ms), at(10ms)) == errc::deadline_exceeded);
    CHECK(push(q, 1, at(0ms), at(10ms)) == errc::none);
    CHECK(push(q, 2, at(0ms)) == errc::none);
    CHECK(push(q, 3, at(0ms)) == errc::none);
    CHECK(q.take_expired(at(6ms)).empty());
    CHECK(values(q.take(at(7ms))) == std::vector{2, 3});
    CHECK(q.size() == 1);
    CHECK(q.expires_at() == at(6ms + 1ns));
    CHECK(values(q.take_expired(q.expires_at())) == std::vector{1});
    CHECK(q.expires_at() == never);
    CHECK(q.due() == never);
}

TEST_CASE("an expired request takes no place, neither in the queue nor in a batch", "[serving]") {
    queue q({.max_size = 4, .max_delay = 100ms, .max_waiting = 4});
    for (int i = 0; i < 4; ++i) REQUIRE(push(q, i, at(0ms), at(1ms)) == errc::none);
    CHECK(push(q, 9, at(0ms)) == errc::queue_full);
    CHECK(push(q, 9, at(50ms)) == errc::none);  // the four are dead
    CHECK(q.live(at(50ms)) == 1);
    CHECK(q.size() == 5);
    // Five are there, and one of them waits: since 50 ms.
    CHECK(q.take(at(50ms)).empty());
    CHECK(q.take(at(149ms)).empty());
    for (int i = 10; i < 13; ++i) CHECK(push(q, i, at(149ms)) == errc::none);
    CHECK(push(q, 13, at(149ms)) == errc::queue_full);
    CHECK(values(q.take(at(149ms))) == std::vector{9, 10, 11, 12});  // full
    CHECK(q.live(at(149ms)) == 0);
    CHECK(values(q.take_expired(at(149ms))) == std::vector{0, 1, 2, 3});
    CHECK(q.due() == never);
}

TEST_CASE("a timer that is a little late still finds a batch that its deadline asked for", "[serving]") {
    queue q({.max_size = 8, .max_delay = 1s, .takes = 3ms});
    CHECK(push(q, 1, at(0ms), at(10ms)) == errc::none);
    CHECK(q.due() < at(7ms));
    const auto late = q.due() + 100us;
    CHECK(q.take_expired(late).empty());
    CHECK(values(q.take(late)) == std::vector{1});
    // Where the slack is over already, it goes at once.
    CHECK(push(q, 2, at(20ms), at(23ms)) == errc::none);
    CHECK(values(q.take(at(20ms))) == std::vector{2});
}

TEST_CASE("items that a batch passes over stay in their order", "[serving]") {
    queue q({.max_size = 3, .takes = 4ms});
    for (int i = 0; i < 8; ++i) CHECK(push(q, i, at(0ms), i % 2 == 0 ? at(5ms) : never) == errc::none);
    CHECK(values(q.take_now(at(2ms))) == std::vector{1, 3, 5});
    CHECK(values(q.take_expired(at(2ms))) == std::vector{0, 2, 4, 6});
    CHECK(values(q.take_all()) == std::vector{7});
}

TEST_CASE("the most extreme times of a rule saturate", "[serving]") {
    for (const ns extreme : {ns::min(), ns::min() + 1ns, ns::max()}) {
        queue q({.takes = extreme, .slack = extreme});
        const bool late = extreme > 0ns;
        CHECK(push(q, 1, at(0ms), at(5ms)) == (late ? errc::deadline_exceeded : errc::none));
        CHECK(q.expires_at() == never);
        if (!late) CHECK(q.due() == at(0ms));  // its delay
    }
}

TEST_CASE("a queue of requests is bounded, and gives all back at its end", "[serving]") {
    queue q({.max_size = 0, .max_delay = 1s, .max_waiting = 2});  // a size of 0 counts as 1
    CHECK(push(q, 1, at(0ms)) == errc::none);
    CHECK(push(q, 2, at(0ms)) == errc::none);
    CHECK(push(q, 3, at(0ms)) == errc::queue_full);
    CHECK(values(q.take(at(0ms))) == std::vector{1});
    CHECK(push(q, 4, at(0ms)) == errc::none);
    CHECK(values(q.take_all()) == std::vector{2, 4});
    CHECK(q.due() == never);
}

TEST_CASE("a server that looks whenever a batch is due runs everything once, in order, in time", "[serving]") {
    for (std::uint64_t run = 0; run < 300; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any(seed);
        const gpushare::batch_rule rule{.max_size = 1 + any.below(5),
                                        .max_delay = ns{static_cast<std::int64_t>(any.below(20))},
                                        .max_waiting = 1 + any.below(8),
                                        .takes = ns{static_cast<std::int64_t>(any.below(5))},
                                        .slack = ns{static_cast<std::int64_t>(any.below(3))}};
        queue q(rule);
        struct told {
            instant arrived, deadline;
        };
        std::vector<told> all;
        std::vector<bool> answered;
        const auto answer = [&](const std::vector<item>& some, instant now, bool ran) {
            int before = -1;
            for (const auto& i : some) {
                CHECK(*i > before);
                before = *i;
                REQUIRE_FALSE(answered[static_cast<std::size_t>(*i)]);
                answered[static_cast<std::size_t>(*i)] = true;
                const auto& t = all[static_cast<std::size_t>(*i)];
                const bool in_time = t.deadline == never || now + rule.takes <= t.deadline;
                CHECK(in_time == ran);
                if (ran) CHECK(now <= t.arrived + rule.max_delay);
            }
        };
        const auto look = [&](instant now) {
            answer(q.take_expired(now), now, false);
            for (;;) {
                const auto batch = q.take(now);
                if (batch.empty()) break;
                CHECK(batch.size() <= rule.max_size);
                answer(batch, now, true);
            }
            CHECK((q.empty() || q.due() > now));
        };
        for (instant now{}; now < instant{ns{200}}; now += ns{1}) {
            while (q.due() <= now) look(now);
            for (auto n = any.below(3); n != 0; --n) {
                const told t{now, any.one_in(2) ? never : now + ns{static_cast<std::int64_t>(any.below(30))}};
                if (push(q, static_cast<int>(all.size()), now, t.deadline) == errc::none) {
                    all.push_back(t);
                    answered.push_back(false);
                }
                look(now);
            }
        }
        answer(q.take_all(), {}, true);
        CHECK(std::ranges::count(answered, false) == 0);
    }
}

}  // namespace batch_queue_test
