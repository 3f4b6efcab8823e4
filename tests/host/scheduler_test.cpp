// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend/host/detail/scheduler.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "support/catch.hpp"

using namespace gpushare;
using host::detail::scheduler;

namespace {

/// Takes everything that can start now; the work of each claim.
std::vector<int> drain(scheduler<int>& s) {
    std::vector<int> works;
    while (const auto c = s.next()) works.insert(works.end(), c->count, c->work);
    return works;
}

}  // namespace

TEST_CASE("a free SM goes to the highest priority, among equals to the first", "[host]") {
    scheduler<int> s{4};
    s.offer(1, priority{0}, 1, false);
    s.offer(2, priority{3}, 1, false);
    s.offer(3, priority{0}, 1, false);
    s.offer(4, priority{-1}, 1, false);
    CHECK(drain(s) == std::vector{2, 1, 3, 4});
}

TEST_CASE("a better head overtakes the rest of one that has started", "[host]") {
    scheduler<int> s{2};
    s.offer(1, priority{0}, 4, false);
    CHECK(drain(s) == std::vector{1, 1});
    s.offer(2, priority{1}, 1, false);
    s.release(0);
    s.release(1);
    CHECK(drain(s) == std::vector{2, 1});
    s.release(0);
    CHECK(drain(s) == std::vector{1});
    s.release(0);
    CHECK_FALSE(s.next());
}

TEST_CASE("blocks are claimed in order, the lowest free SM first", "[host]") {
    scheduler<int> s{3};
    s.offer(1, priority{}, 5, false);
    for (std::uint32_t i = 0; i < 3; ++i) {
        const auto c = s.next();
        REQUIRE(c);
        CHECK(c->first == i);
        CHECK(c->sm == i);
    }
    s.release(2);
    s.release(1);
    CHECK(s.next()->sm == 1);
    CHECK(s.next()->first == 4);
}

TEST_CASE("a cooperative head starts all blocks together, and nobody else starts meanwhile", "[host]") {
    scheduler<int> s{4};
    s.offer(1, priority{0}, 2, false);
    CHECK(drain(s).size() == 2);
    s.offer(2, priority{1}, 4, true);
    s.offer(3, priority{0}, 1, false);
    CHECK_FALSE(s.next());  // two SMs are free, and kept
    s.release(0);
    CHECK_FALSE(s.next());
    s.release(1);
    CHECK(drain(s) == std::vector{2, 2, 2, 2});
    s.release(3);
    CHECK(drain(s) == std::vector{3});
}

TEST_CASE("a better head goes before a cooperative one that hasn't started", "[host]") {
    scheduler<int> s{2};
    s.offer(1, priority{0}, 1, false);
    CHECK(drain(s).size() == 1);
    s.offer(2, priority{1}, 2, true);
    s.offer(3, priority{2}, 1, false);
    CHECK(drain(s) == std::vector{3});
}

TEST_CASE("once a cooperative head has a block, nothing comes before the others", "[host]") {
    scheduler<int> s{3};
    s.offer(1, priority{0}, 3, true);
    CHECK(s.next()->work == 1);
    s.offer(2, priority{100}, 1, false);
    s.offer(3, priority{std::numeric_limits<std::int32_t>::max()}, 1, true);
    CHECK(s.next()->work == 1);
    CHECK(s.next()->work == 1);
}

TEST_CASE("withdrawn work doesn't start", "[host]") {
    scheduler<int> s{1};
    s.offer(1, priority{}, 2, false);
    CHECK(s.next()->work == 1);
    s.offer(2, priority{}, 1, false);
    CHECK(s.withdraw(1));
    CHECK_FALSE(s.withdraw(1));
    s.release(0);
    CHECK(s.next()->work == 2);
    CHECK_FALSE(s.withdraw(2));  // it has started
}

TEST_CASE("batches shrink to single blocks towards the end", "[host]") {
    scheduler<int> s{2, 16};
    s.offer(1, priority{}, 300, false);
    std::uint32_t next = 0, last = 16;
    while (const auto c = s.next()) {
        CHECK(c->first == next);
        CHECK(c->count <= last);
        last = c->count;
        next += c->count;
        s.release(c->sm);
    }
    CHECK(next == 300);
    CHECK(last == 1);
}

TEST_CASE("random offers: every block runs once, cooperative ones together, priorities hold", "[host]") {
    const auto seed = std::random_device{}();
    CAPTURE(seed);
    std::mt19937 random{seed};
    const auto pick = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };

    const std::uint32_t sms = 1 + pick(6);
    scheduler<int> s{sms, 1 + pick(3)};
    struct work {
        std::int32_t level;
        std::uint32_t blocks, claimed;
        bool cooperative;
    };
    std::map<int, work> offered;
    std::vector<std::uint32_t> running;
    bool right = true;
    for (int step = 0, id = 0; step < 20000; ++step) {
        if (pick(3) == 0 && offered.size() < 8) {
            const bool cooperative = pick(3) == 0;
            const work w{static_cast<std::int32_t>(pick(3)), 1 + pick(cooperative ? sms : 12), 0, cooperative};
            s.offer(++id, priority{w.level}, w.blocks, cooperative);
            offered[id] = w;
        }
        std::uint32_t left_of_cooperative = 0;  // whose first block was claimed in this round
        while (const auto c = s.next()) {
            work& w = offered.at(c->work);
            const auto better = [&](const auto& o) { return o.second.level > w.level; };
            right &= left_of_cooperative != 0 || std::ranges::none_of(offered, better);
            right &= left_of_cooperative == 0 || w.cooperative;
            right &= c->first == w.claimed;
            right &= std::ranges::count(running, c->sm) == 0;
            if (w.cooperative) left_of_cooperative = (w.claimed == 0 ? w.blocks : left_of_cooperative) - 1;
            w.claimed += c->count;
            right &= w.claimed <= w.blocks;
            if (w.claimed == w.blocks) offered.erase(c->work);
            running.push_back(c->sm);
        }
        right &= left_of_cooperative == 0;
        // Work-conserving, but for SMs that are kept for a cooperative head.
        right &= running.size() == sms ||
                 std::ranges::none_of(offered, [](auto& o) { return !o.second.cooperative; }) ||
                 std::ranges::any_of(offered, [](auto& o) { return o.second.cooperative; });
        if (!running.empty() && pick(2) == 0) {
            const auto at = running.begin() + pick(static_cast<std::uint32_t>(running.size()));
            s.release(*at);
            running.erase(at);
        }
    }
    CHECK(right);
}

TEST_CASE("a head of a group gets SMs of the group only, one of no group gets any", "[host]") {
    scheduler<int> s{6};
    const auto a = s.set_apart(2), b = s.set_apart(3);
    CHECK(s.size_of(0) == 1);
    CHECK(s.size_of(a) == 2);
    CHECK(s.group_of(1) == a);
    CHECK(s.group_of(4) == b);
    s.offer(1, priority{2}, 9, false, a);
    s.offer(2, priority{1}, 2, false, b);
    s.offer(3, priority{0}, 9, false);
    CHECK(drain(s) == std::vector{1, 1, 2, 2, 3, 3});  // 3: the one SM of b that 2 has left, and the one of nobody
    s.release(0);
    CHECK(s.next()->sm == 0);
    CHECK(s.withdraw(1));
    s.release(0);
    CHECK(s.next()->work == 3);
}

TEST_CASE("a cooperative head of a group keeps the SMs of its group free, and no others", "[host]") {
    scheduler<int> s{4};
    const auto a = s.set_apart(2);
    s.offer(1, priority{0}, 1, false, a);
    CHECK(drain(s) == std::vector{1});
    s.offer(2, priority{1}, 2, true, a);
    s.offer(3, priority{0}, 9, false, a);
    s.offer(4, priority{0}, 9, false);
    CHECK(drain(s) == std::vector{4, 4});
    s.release(0);
    CHECK(drain(s) == std::vector{2, 2});

    // One of no group keeps all of them.
    s.offer(5, priority{1}, 4, true);
    s.release(0);
    s.release(2);
    CHECK(drain(s).empty());
}

TEST_CASE("SMs that were set apart while they were busy come to their group when they are free", "[host]") {
    scheduler<int> s{2};
    s.offer(1, priority{}, 2, false);
    CHECK(drain(s).size() == 2);
    const auto a = s.set_apart(1);
    s.offer(2, priority{}, 1, false, a);
    s.release(1);
    CHECK_FALSE(s.next());
    s.release(0);
    CHECK(s.next()->work == 2);
    s.put_back(a);
    s.release(0);
    CHECK(s.size_of(0) == 2);
    s.offer(3, priority{}, 3, false);
    CHECK(drain(s) == std::vector{3, 3});  // both SMs are free
    s.release(0);
    CHECK(drain(s) == std::vector{3});
    s.release(0);
    s.release(1);
    CHECK(s.set_apart(2) == a);  // numbers are used again
    s.offer(4, priority{}, 3, false, a);
    CHECK(drain(s) == std::vector{4, 4});
}

TEST_CASE("random groups: nobody is outside of its own, and no SM idles while somebody may have it", "[host]") {
    const auto seed = std::random_device{}();
    CAPTURE(seed);
    std::mt19937 random{seed};
    const auto pick = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
    const std::uint32_t sms = 2 + pick(8);
    scheduler<int> s{sms, 1 + pick(3)};
    struct work {
        std::uint32_t group, blocks, claimed;
        bool cooperative;
    };
    std::map<int, work> offered;
    std::map<std::uint32_t, std::uint32_t> groups;  // how much work each has
    std::vector<std::uint32_t> running;
    bool right = true;
    for (int step = 0, id = 0; step < 20000; ++step) {
        if (pick(50) == 0 && s.size_of(0) > 1) groups[s.set_apart(1 + pick(s.size_of(0) - 1))] = 0;
        std::erase_if(groups, [&](const auto& g) {
            const bool goes = g.second == 0 && pick(50) == 0;
            if (goes) s.put_back(g.first);
            return goes;
        });
        if (pick(2) == 0 && offered.size() < 8) {
            auto g = groups.begin();
            std::advance(g, pick(static_cast<std::uint32_t>(groups.size()) + 1));
            const std::uint32_t of = g == groups.end() ? 0 : g->first, most = of == 0 ? sms : s.size_of(of);
            const bool cooperative = pick(3) == 0;
            const work w{of, 1 + pick(cooperative ? most : 12), 0, cooperative};
            s.offer(++id, priority{static_cast<std::int32_t>(pick(3))}, w.blocks, cooperative, of);
            offered[id] = w;
            if (of != 0) ++groups[of];
        }
        while (const auto c = s.next()) {
            work& w = offered.at(c->work);
            right &= w.group == 0 || s.group_of(c->sm) == w.group;
            right &= c->first == w.claimed && std::ranges::count(running, c->sm) == 0;
            w.claimed += c->count;
            if (w.claimed == w.blocks) {
                if (w.group != 0) --groups[w.group];
                offered.erase(c->work);
            }
            running.push_back(c->sm);
        }
        // No cooperative head has started in part, and none is waiting that could start.
        for (const auto& [which, w] : offered) right &= !w.cooperative || w.claimed == 0;
        for (const auto& [which, w] : offered) {
            if (std::ranges::any_of(offered, [](const auto& o) { return o.second.cooperative; })) break;
            const auto busy = std::ranges::count_if(
                running, [&](std::uint32_t sm) { return w.group == 0 || s.group_of(sm) == w.group; });
            right &= busy == (w.group == 0 ? sms : s.size_of(w.group));
        }
        if (!running.empty() && pick(2) == 0) {
            const auto at = running.begin() + pick(static_cast<std::uint32_t>(running.size()));
            s.release(*at);
            running.erase(at);
        }
    }
    CHECK(right);

    // No SM was lost: without groups and running work, one piece of work has all of them at once.
    do {
        for (const auto sm : running) s.release(sm);
        running.clear();
        while (const auto c = s.next()) {
            work& w = offered.at(c->work);
            w.claimed += c->count;
            if (w.claimed == w.blocks) offered.erase(c->work);
            running.push_back(c->sm);
        }
    } while (!running.empty());
    CHECK(offered.empty());
    for (const auto& g : groups) s.put_back(g.first);
    CHECK(s.size_of(0) == sms);
    s.offer(0, priority{}, sms, true);
    CHECK(drain(s).size() == sms);
}

TEST_CASE("work goes onto a taken SM only above the work there, and only where it may run", "[host][yield]") {
    scheduler<int> s{4};
    const auto part = s.set_apart(1);
    for (std::uint32_t i = 0; i < 4; ++i) s.offer(0, priority{0}, 1, false, i == 0 ? part : 0);
    CHECK(drain(s).size() == 4);
    CHECK(s.highest_waiting() == std::numeric_limits<std::int32_t>::min());
    s.offer(1, priority{0}, 1, false);
    s.offer(2, priority{1}, 2, false);
    s.offer(3, priority{2}, 1, false, part);
    s.offer(4, priority{1}, 2, true);
    CHECK(s.highest_waiting() == 2);
    CHECK_FALSE(s.next_above(priority{2}, 0));  // SM 0 is the one that is apart
    const auto on_any = s.next_above(priority{0}, 2);
    REQUIRE(on_any);
    CHECK(on_any->work == 2);
    CHECK(on_any->count == 1);
    CHECK(on_any->sm == 2);
    const auto on_part = s.next_above(priority{0}, 0);
    REQUIRE(on_part);
    CHECK(on_part->work == 3);
    CHECK(s.next_above(priority{0}, 3)->first == 1);
    CHECK_FALSE(s.next_above(priority{0}, 3));  // as high, or for several SMs at once
    CHECK(s.withdraw(4));
    CHECK(s.highest_waiting() == 0);
}

TEST_CASE("a yield lets no block past a cooperative launch that waits for its SM", "[host][yield]") {
    constexpr auto none = std::numeric_limits<std::int32_t>::min();
    scheduler<int> s{4};
    const auto part = s.set_apart(2);
    for (int i = 0; i < 2; ++i) s.offer(0, priority{0}, 2, false, i == 0 ? part : 0);
    CHECK(drain(s).size() == 4);
    s.offer(1, priority{1}, 4, false);
    SECTION("of the whole device") {
        s.offer(2, priority{2}, 2, true);
        CHECK_FALSE(s.next_above(priority{0}, 0));
        CHECK_FALSE(s.next_above(priority{0}, 3));
        CHECK(s.highest_waiting() == none);  // nobody asks in vain
        s.offer(3, priority{3}, 1, false);
        CHECK(s.highest_waiting() == 3);
        CHECK(s.next_above(priority{0}, 3)->work == 3);
    }
    SECTION("of a group: on its SMs") {
        s.offer(2, priority{2}, 2, true, part);
        CHECK_FALSE(s.next_above(priority{0}, 0));
        CHECK(s.next_above(priority{0}, 2)->work == 1);
        CHECK(s.highest_waiting() == 1);
    }
    SECTION("and none of its blocks is begun elsewhere: all start once two SMs are free") {
        s.offer(2, priority{2}, 2, true);
        s.release(2);
        CHECK_FALSE(s.next());
        s.release(3);
        CHECK(s.next()->work == 2);
        CHECK_FALSE(s.next_above(priority{0}, 0));
        CHECK(s.next()->work == 2);
        CHECK(s.next_above(priority{0}, 0)->work == 1);
    }
}
