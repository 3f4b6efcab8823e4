// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <vector>

#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/compute/policies/policy_tree.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/drain.hpp"
#include "support/random.hpp"

namespace limiter_core_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::admission;
using gpushare::client_id;
using gpushare::instant;
using gpushare::limiter_core;
using gpushare::ns;
using gpushare::share;
using support::drain;

namespace {

constexpr instant now{};

void arrive(limiter_core<>& core, client_id c, int times) {
    for (int i = 0; i < times; ++i) core.arrive(c, now);
}

}  // namespace

TEST_CASE("so many are in flight and no more", "[compute]") {
    const auto depth = GENERATE(1U, 2U, 3U, 17U);
    limiter_core core{{.depth = depth}};
    const auto c = core.add({});
    arrive(core, c, 40);
    auto in = drain(core);
    CHECK(in.size() == depth);
    CHECK(core.usage(c).in_flight == depth);
    CHECK(core.usage(c).waiting == 40 - depth);
    core.complete(in.front(), 1ms);
    CHECK(drain(core).size() == 1);
}

TEST_CASE("of a client that alone wants the device, as much short work is in flight as the horizon allows",
          "[compute]") {
    limiter_core core{{.depth = 2, .horizon = 1ms}};
    const auto a = core.add({.weight = 50_pct, .longest = 100us});
    const auto b = core.add({.weight = 50_pct, .longest = 100us});
    arrive(core, a, 30);
    auto in = drain(core);
    CHECK(in.size() == 10);
    CHECK(core.wait_bound() == 1ms);
    SECTION("but no more than depth once others come, who couldn't be given their shares else") {
        arrive(core, b, 30);
        CHECK(drain(core).empty());
        for (std::size_t i = 0; i < 8; ++i) core.complete(in[i], 100us);
        CHECK(drain(core).empty());
        core.complete(in[8], 100us);
        core.complete(in[9], 100us);
        CHECK(drain(core).size() == 2);
    }
    SECTION("and a quarter of that below others, who would wait for it") {
        for (const auto& g : in) core.complete(g, 100us);
        (void)core.add({.level = {1}});
        CHECK(drain(core).size() == 2);
        core.change(a, {.longest = 10us});
        CHECK(core.wait_bound() == 250us);
    }
    SECTION("unless one took longer than that, and might again") {
        for (const auto& g : in) core.complete(g, g.predicted == 100us && &g == &in[0] ? 600us : 100us);
        CHECK(drain(core).size() == 2);
        CHECK(core.wait_bound() == 1200us);
    }
}

TEST_CASE("an option that would let nothing in is one", "[compute]") {
    limiter_core core{{.depth = 0, .queue_limit = 0}};
    CHECK(core.options().depth == 1);
    CHECK(core.options().queue_limit == 1);
    const auto c = core.add({});
    arrive(core, c, 1);
    CHECK(drain(core).size() == 1);
}

TEST_CASE("a lower level never fills the room of a higher one", "[compute]") {
    limiter_core core{{.depth = 3}};
    const auto low = core.add({.level = {-1}});
    const auto middle = core.add({});
    const auto high = core.add({.level = {5}});
    arrive(core, low, 10);
    CHECK(drain(core).size() == 2);  // with somebody above
    arrive(core, middle, 10);
    auto in = drain(core);
    CHECK(in.size() == 2);
    CHECK(std::ranges::all_of(in, [&](const admission& g) { return g.client == middle; }));
    arrive(core, high, 10);
    in = drain(core);
    CHECK(in.size() == 3);
    CHECK(std::ranges::all_of(in, [&](const admission& g) { return g.client == high; }));
    SECTION("and gets in again only when those above leave room") {
        for (const auto& g : in) core.complete(g, 1ms);
        in = drain(core);
        CHECK(in.size() == 3);
        CHECK(std::ranges::all_of(in, [&](const admission& g) { return g.client == high; }));
    }
}

TEST_CASE("a prediction is corrected by the time taken", "[compute]") {
    limiter_core core{{.depth = 1}};
    const auto quick = core.add({.weight = 50_pct});
    const auto slow = core.add({.weight = 50_pct});
    arrive(core, quick, 100'000);
    arrive(core, slow, 100'000);
    for (int i = 0; i < 11'000; ++i) {
        const auto g = core.next(now).value();
        core.complete(g, g.client == quick ? 100us : 1ms);
    }
    CHECK(std::abs((core.usage(quick).device_time - core.usage(slow).device_time).count()) <= ns{1ms}.count());
    CHECK(core.usage(quick).completed == Approx(10'000).margin(10));
    CHECK(core.usage(quick).longest == 100us);
    CHECK(core.usage(slow).longest == 1ms);
}

TEST_CASE("predictions begin with what is declared, and learn", "[compute]") {
    limiter_core core{{.depth = 1, .first_guess = 70us}};
    const auto undeclared = core.add({});
    const auto declared = core.add({.longest = 5ms});
    arrive(core, undeclared, 100);
    auto g = core.next(now).value();
    CHECK(g.predicted == 70us);
    for (int i = 0; i < 90; ++i) {
        core.complete(g, 2ms);
        g = core.next(now).value();
    }
    CHECK(g.predicted > 1900us);
    CHECK(g.predicted <= 2ms);
    core.complete(g, 2ms);
    for (auto n = core.usage(undeclared).waiting; n > 0; --n) core.withdraw(undeclared);
    arrive(core, declared, 1);
    CHECK(core.next(now).value().predicted == 5ms);
}

TEST_CASE("a cancelled submission costs nothing", "[compute]") {
    limiter_core core{{.depth = 1}};
    const auto a = core.add({.weight = 50_pct, .longest = 1ms});
    const auto b = core.add({.weight = 50_pct, .longest = 1ms});
    arrive(core, a, 10'000);
    arrive(core, b, 10'000);
    // `a` gives back everything that it gets: it stays the first, and `b` isn't served for it.
    for (int i = 0; i < 100; ++i) {
        const auto g = core.next(now).value();
        CHECK(g.client == a);
        core.cancel(g);
    }
    CHECK(core.usage(a).completed == 0);
    CHECK(core.usage(a).device_time == 0ns);
    CHECK(core.usage(a).in_flight == 0);
    for (int i = 0; i < 1000; ++i) core.complete(core.next(now).value(), 1ms);
    CHECK(core.usage(a).device_time == 500ms);
    CHECK(core.usage(b).device_time == 500ms);
}

TEST_CASE("failed submissions are charged, and counted", "[compute]") {
    limiter_core core;
    const auto c = core.add({});
    arrive(core, c, 2);
    core.complete(core.next(now).value(), 3ms, true);
    core.complete(core.next(now).value(), 1ms);
    CHECK(core.usage(c).failed == 1);
    CHECK(core.usage(c).completed == 2);
    CHECK(core.usage(c).device_time == 4ms);
}

TEST_CASE("a client that withdraws isn't admitted", "[compute]") {
    limiter_core core;
    const auto a = core.add({});
    const auto b = core.add({});
    arrive(core, a, 2);
    arrive(core, b, 1);
    core.withdraw(a);
    core.withdraw(b);
    const auto in = drain(core);
    REQUIRE(in.size() == 1);
    CHECK(in.front().client == a);
    CHECK(core.usage(b).waiting == 0);
}

TEST_CASE("an index is used again, under a new name", "[compute]") {
    limiter_core core;
    const auto a = core.add({});
    const auto b = core.add({});
    arrive(core, a, 1);
    core.complete(core.next(now).value(), 1ms);
    core.remove(a);
    CHECK_FALSE(core.contains(a));
    CHECK(core.contains(b));
    const auto again = core.add({.weight = 20_pct});
    CHECK(again.index == a.index);
    CHECK_FALSE(again == a);
    CHECK(core.contains(again));
    CHECK_FALSE(core.contains(a));
    CHECK(core.usage(again).device_time == 0ns);
    CHECK(core.settings(again).weight == 20_pct);
    CHECK_FALSE(core.contains({.index = 99, .generation = 1}));
    CHECK(core.num_indices() == 2);
}

TEST_CASE("work in flight stays where it was let in when its client changes level", "[compute]") {
    limiter_core core{{.depth = 2}};
    const auto c = core.add({});
    arrive(core, c, 10);
    auto in = drain(core);
    REQUIRE(in.size() == 2);
    core.change(c, {.level = {1}});
    const auto above = drain(core);
    CHECK(above.size() == 2);  // room of its own
    for (const auto& g : in) core.complete(g, 1ms);
    CHECK(drain(core).empty());  // level 1 is as full as before
    for (const auto& g : above) core.complete(g, 1ms);
    CHECK(drain(core).size() == 2);
    CHECK(core.usage(c).in_flight == 2);
}

TEST_CASE("the bound on a wait is two of the longest kernel of every level below", "[compute]") {
    limiter_core core{{.depth = 3}};
    CHECK(core.wait_bound() == 0ns);
    const auto low = core.add({.longest = 2ms});
    CHECK(core.wait_bound() == 6ms);
    SECTION("one level below") {
        (void)core.add({.level = {1}, .longest = 10ms});  // nobody waits for this one
        CHECK(core.wait_bound() == 4ms);
    }
    SECTION("two levels below") {
        (void)core.add({.level = {1}});
        (void)core.add({.level = {2}});
        CHECK(core.wait_bound() == 8ms);
    }
    SECTION("what is in flight counts on the level where it was let in") {
        arrive(core, low, 1);
        (void)core.next(now).value();
        core.change(low, {.level = {1}, .longest = 2ms});
        (void)core.add({.level = {2}});
        CHECK(core.wait_bound() == 8ms);
    }
    SECTION("a kernel that was longer than declared is learnt") {
        arrive(core, low, 1);
        core.complete(core.next(now).value(), 5ms);
        CHECK(core.wait_bound() == 15ms);
        core.remove(low);
        CHECK(core.wait_bound() == 0ns);
    }
    SECTION("nothing overflows") {
        (void)core.add({.longest = ns::max()});
        CHECK(core.wait_bound() == ns::max());
    }
}

namespace {

/// A device that runs what is enqueued in the order of enqueuing, one after the other: the worst
/// for who comes late. Clients send kernels of 1/10 of their longest up to their longest.
class simulation {
public:
    struct client {
        client_id id;
        gpushare::client_settings settings;
        bool backlogged = true;  // else it sends one now and then
        instant next_arrival{};
        ns pause{};  // mean time between arrivals
        ns served{};
        std::uint64_t arrivals = 0;
    };

    simulation(std::uint64_t seed, std::uint32_t depth) : any_(seed), core_{{.depth = depth}} {}

    void add(const gpushare::client_settings& s, std::optional<ns> pause = {}) {
        client c{.id = core_.add(s), .settings = s, .backlogged = !pause.has_value()};
        top_ = std::max(top_, s.level);
        if (pause) {
            c.pause = *pause;
            c.next_arrival = time_ + gap(c);
        } else {
            core_.arrive(c.id, time_);
            core_.arrive(c.id, time_);
        }
        clients_.push_back(c);
    }

    /// One event: an arrival, or the end of what the device is running.
    void step() {
        let_in();
        const auto sooner = std::ranges::min_element(
            clients_, {}, [](const client& c) { return c.backlogged ? gpushare::never : c.next_arrival; });
        const auto next_end = device_.empty() ? gpushare::never : device_.front().end;
        if (!sooner->backlogged && sooner->next_arrival <= next_end) {
            time_ = sooner->next_arrival;
            sooner->next_arrival = time_ + gap(*sooner);
            ++sooner->arrivals;
            if (sooner->settings.level == top_)
                waits_.push_back({sooner->id, time_, top_done(time_), core_.wait_bound()});
            core_.arrive(sooner->id, time_);
        } else {
            const auto done = device_.front();
            device_.pop_front();
            time_ = done.end;
            if (done.what.level == top_) top_done_ += done.cost;
            clients_[done.what.client.index].served += done.cost;
            core_.complete(done.what, {.took = done.cost, .in_flight = time_ - done.let_in});
            while (core_.events().take()) ++events;
            if (!device_.empty()) start(device_.front());
        }
        let_in();
        check_invariants();
    }

    [[nodiscard]] const std::vector<client>& clients() const { return clients_; }

    std::uint64_t idle_beside_work = 0, too_many_in_flight = 0, bound_violations = 0, wrong_books = 0, events = 0;
    ns longest_wait{}, smallest_bound = ns::max();

private:
    struct running {
        admission what;
        ns cost;
        instant let_in{}, begin{}, end{};
    };
    struct waiting_at_top {
        client_id who;
        instant arrived;
        ns top_done;  // how long work of the top level had run until then
        ns bound;     // as published then
    };

    void let_in() {
        while (const auto g = core_.next(time_)) {
            auto& c = clients_[g->client.index];
            if (c.backlogged) core_.arrive(c.id, time_);
            device_.push_back({.what = *g, .cost = length(c), .let_in = time_, .end = gpushare::never});
            if (device_.size() == 1) start(device_.front());
        }
    }

    ns gap(const client& c) {
        return ns{1 + static_cast<std::int64_t>(any_.below(2 * static_cast<std::uint64_t>(c.pause.count())))};
    }
    ns length(const client& c) {
        const auto tenth = c.settings.longest.count() / 10;
        return ns{tenth + static_cast<std::int64_t>(
                              any_.below(static_cast<std::uint64_t>(c.settings.longest.count() - tenth + 1)))};
    }

    ns top_done(instant t) const {
        if (device_.empty() || device_.front().what.level != top_) return top_done_;
        return top_done_ + (t - device_.front().begin);
    }

    void start(running& r) {
        r.begin = time_;
        r.end = time_ + r.cost;
        if (r.what.level != top_) return;
        const auto w = std::ranges::find(waits_, r.what.client, &waiting_at_top::who);
        if (w == waits_.end()) return;  // a backlogged client of the top level: not measured
        const ns for_others = (time_ - w->arrived) - (top_done_ - w->top_done);
        longest_wait = std::max(longest_wait, for_others);
        smallest_bound = std::min(smallest_bound, w->bound);
        if (for_others > w->bound) ++bound_violations;
        waits_.erase(w);
    }

    void check_invariants() {
        std::uint32_t waiting = 0, in_flight = 0;
        for (const auto& c : clients_) {
            waiting += core_.usage(c.id).waiting;
            in_flight += core_.usage(c.id).in_flight;
            if (core_.usage(c.id).device_time != c.served) ++wrong_books;
        }
        if (in_flight != device_.size()) ++wrong_books;
        if (waiting > 0 && device_.empty()) ++idle_beside_work;
        for (const auto& c : clients_) {
            const auto on_level =
                std::ranges::count(device_, c.settings.level, [](const running& r) { return r.what.level; });
            ns sum{};  // those of one client alone may be more, while they take no longer than the horizon
            for (const auto& r : device_)
                if (r.what.level == c.settings.level) sum += r.cost;
            if (on_level > core_.options().depth && sum > core_.options().horizon) ++too_many_in_flight;
        }
    }

    support::random any_;
    limiter_core<> core_;
    std::vector<client> clients_;
    std::deque<running> device_;
    std::deque<waiting_at_top> waits_;
    instant time_{};
    ns top_done_{};
    gpushare::priority top_{-1000};
};

void check(const simulation& s) {
    CHECK(s.idle_beside_work == 0);
    CHECK(s.too_many_in_flight == 0);
    CHECK(s.wrong_books == 0);
    CHECK(s.bound_violations == 0);
    CHECK(s.events == 0);  // nor does the limiter believe that there was one
}

}  // namespace

TEST_CASE("a hundred thousand arrivals at the highest level wait no longer than was published", "[compute][sweep]") {
    const auto levels = GENERATE(1, 2, 3);  // below the highest
    const auto depth = GENERATE(1U, 3U);
    const auto seed = support::seed(static_cast<std::uint64_t>(levels));
    CAPTURE(levels, depth, seed);
    simulation s(seed, depth);
    for (int level = 0; level < levels; ++level) {
        s.add({.weight = 50_pct, .level = {level}, .longest = 100us});
        // The levels between come and go, so that each fills its room now and then.
        s.add({.weight = 50_pct, .level = {level}, .longest = 1ms}, level == 0 ? std::optional<ns>{} : ns{5ms});
    }
    s.add({.level = {levels}, .longest = 300us}, 3ms);
    const auto& high = s.clients().back();
    while (high.arrivals < 100'000 / 6 + 1) s.step();
    check(s);
    const auto below = std::min(depth, 2U);
    CHECK(s.longest_wait <= below * ns{1ms} * levels);
    CHECK(s.longest_wait > 0ns);
    // The bound is what the design says, not a guess on the safe side.
    CHECK(s.smallest_bound == below * ns{1ms} * levels);
}

TEST_CASE("random tenants: shares within the kernels in flight, no idle device, accounts that agree", "[compute]") {
    for (std::uint64_t nth = 0; nth < 20; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        const auto depth = static_cast<std::uint32_t>(1 + any.below(6));
        simulation s(seed, depth);
        const ns longest = 1ms;
        const auto backlogged = 2 + any.below(6);
        for (auto i = backlogged; i > 0; --i)
            s.add(
                {.weight = share::of_permille(10 + any.below(990)), .longest = any.one_in(2) ? longest : longest / 10});
        for (auto others = any.below(4); others > 0; --others)
            s.add({.weight = share::of_permille(1 + any.below(1000)),
                   .level = {static_cast<std::int32_t>(any.below(3))},
                   .longest = longest},
                  longest * static_cast<int>(4 + any.below(10)));
        // Tags order what was let in by what was predicted of it, and at most `depth` predictions
        // are wrong at once, each by less than a longest kernel: two backlogged clients differ by
        // at most depth + 1 of these, over their weights, and by 3 ns of rounding a step.
        double worst_excess = -1e300;
        for (int step = 0; step < 10'000; ++step) {
            s.step();
            for (std::size_t i = 0; i < backlogged; ++i)
                for (std::size_t j = 0; j < backlogged; ++j) {
                    const auto& a = s.clients()[i];
                    const auto& b = s.clients()[j];
                    const double wa = a.settings.weight.fraction(), wb = b.settings.weight.fraction();
                    const auto lead =
                        static_cast<double>(a.served.count()) / wa - static_cast<double>(b.served.count()) / wb;
                    const auto bound =
                        (depth + 1) * static_cast<double>(longest.count()) * (1 / wa + 1 / wb) + 3.0 * step;
                    worst_excess = std::max(worst_excess, lead - bound);
                }
        }
        CHECK(worst_excess <= 0);
        check(s);
    }
}

TEST_CASE("random tenants, ten million steps", "[compute][.long]") {
    for (std::uint64_t nth = 0; nth < 100; ++nth) {
        const auto seed = support::seed(1000 + nth);
        CAPTURE(seed);
        support::random any(seed);
        simulation s(seed, static_cast<std::uint32_t>(1 + any.below(6)));
        for (auto clients = 2 + any.below(8); clients > 0; --clients)
            s.add({.weight = share::of_permille(1 + any.below(1000)),
                   .level = {static_cast<std::int32_t>(any.below(3))},
                   .longest = ns{100us} * static_cast<int>(1 + any.below(10))},
                  any.one_in(2) ? std::optional<ns>{} : ns{1ms} * static_cast<int>(1 + any.below(10)));
        for (int step = 0; step < 100'000; ++step) s.step();
        check(s);
    }
}

TEST_CASE("several clients have as much in flight as is predicted to fill a quarter of the horizon", "[compute]") {
    gpushare::limiter_core core{{.depth = 3, .horizon = 1ms}};
    const std::array clients{core.add({.weight = 50_pct}), core.add({.weight = 50_pct})};
    const auto longest = GENERATE(10us, 40us, 500us);
    CAPTURE(longest);
    const auto run = [&](client_id c, ns took) {
        core.arrive(c, {});
        const auto g = core.next({});
        REQUIRE(g);
        (void)core.complete(*g, took);
    };
    for (const auto c : clients) {
        run(c, 10us);
        run(c, longest);  // long once, and not as the first
        for (int i = 0; i < 100; ++i) run(c, 10us);
    }
    for (int i = 0; i < 100; ++i)
        for (const auto c : clients) core.arrive(c, {});
    std::size_t in_flight = 0;
    while (core.next({})) ++in_flight;
    if (longest == 500us)
        CHECK(in_flight == 3);  // more would break the bound if all were as long
    else
        CHECK((in_flight == 24 || in_flight == 25));
}

TEST_CASE("an estimate counts the work in flight, the work that goes first, and the call's own time", "[compute]") {
    limiter_core core{{.depth = 1}};
    const auto a = core.add({.weight = 50_pct, .longest = 10ms}), b = core.add({.weight = 50_pct, .longest = 10ms});
    arrive(core, a, 3);
    REQUIRE(core.next(now));
    CHECK(core.estimate(a).wait == 30ms);
    CHECK(core.estimate(b).wait == 20ms);  // two of `a` wait, and one of them has its turn before
    CHECK(core.estimate(b).finish() == 30ms);
    CHECK_FALSE(core.estimate(b).known);
    const auto high = core.add({.level = {1}, .longest = 1ms});
    CHECK(core.estimate(high).wait == 10ms);
    CHECK(core.estimate(high).lasts == 1ms);
    CHECK(core.estimate(high).bound == 10ms);
    arrive(core, high, 5);
    CHECK(core.estimate(b).wait == 25ms);
    for (int i = 0; i < 5; ++i) core.withdraw(high);
    for (int i = 0; i < 8; ++i) {
        core.arrive(high, now, {.head = {.key = 7}});
        (void)core.complete(core.next(now).value(), i == 3 ? 4ms : 2ms);
    }
    const auto e = core.estimate(high, 7);
    CHECK(e.known);
    CHECK(e.longest == 4ms);
    CHECK(e.lasts > 2ms);
    CHECK(e.lasts < 3ms);
    CHECK(e.p99 == 4ms);  // of so few it is the longest; the first isn't among them
    CHECK(e.observed == 7);
}

TEST_CASE("bounds have a quantile beside the worst: one call in a hundred is in the one and not in the other",
          "[compute]") {
    limiter_core core{{.depth = 3}};
    const auto low = core.add({}), high = core.add({.level = {1}});
    const auto call = [&](std::uint64_t key, ns took) {
        core.arrive(low, now, {.head = {.key = key}});
        const auto a = core.next(now);
        REQUIRE(a);
        core.complete(*a, took);
    };
    call(1, 600ms);  // cold
    for (int i = 0; i < 99; ++i) call(1, 25ms);
    CHECK(core.estimate(high).bound == 50ms);
    CHECK(core.estimate(high).bound_p99 == 50ms);
    call(1, 300ms);
    CHECK(core.estimate(high).bound == 600ms);
    CHECK(core.estimate(high).bound_p99 == 50ms);
    const auto one = core.estimate(low, 1);
    CHECK(one.longest == 300ms);
    CHECK(one.p99 == 25ms);
    CHECK(one.observed == 100);
    // Another kind is another matter, until too little is known of it.
    for (int i = 0; i < 20; ++i) call(2, 5ms);
    CHECK(core.estimate(low, 2).p99 == 5ms);
    CHECK(core.estimate(low, 2).observed == 19);
    CHECK(core.estimate(low, 3).p99 == 25ms);  // as any of the client's
    CHECK(core.estimate(high).p99 == 0ns);
    CHECK(core.estimate(high).observed == 0);
    // Two in a hundred are more than that.
    for (int i = 0; i < 3; ++i) call(1, 300ms);
    CHECK(core.estimate(high).bound_p99 == 600ms);
}

TEST_CASE(
    "a bound's quantile is no guess: before a hundred calls what is declared counts, and without either it isn't known",
    "[compute]") {
    limiter_core core{{.depth = 3}};
    const auto low = core.add({.longest = 100ms}), high = core.add({.level = {1}});
    const auto call = [&] {
        core.arrive(low, now);
        core.complete(core.next(now).value(), 1ms);
    };
    for (int i = 0; i < 100; ++i) {  // the first is cold
        call();
        REQUIRE(core.estimate(high).bound_p99 == 200ms);
    }
    call();
    CHECK(core.estimate(high).bound_p99 == 2ms);
    const auto fresh = core.add({});
    CHECK(core.estimate(high).bound == 200ms);
    CHECK(core.estimate(high).bound_p99 == 0ns);
    CHECK(core.change(fresh, {.longest = 50ms}) == gpushare::errc::none);
    CHECK(core.estimate(high).bound_p99 == 100ms);
    CHECK(core.change(fresh, {.yields_within = 50ms}) == gpushare::errc::none);
    CHECK(core.estimate(high).bound_p99 == 52ms);
}

TEST_CASE("kept SMs are a part of the SMs, or are refused", "[compute]") {
    limiter_core<> core;
    const auto c = core.add({.keeps = gpushare::sm_width(1)});
    for (const double part : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
        CAPTURE(part);
        CHECK_THROWS_WITH(core.add({.keeps = gpushare::sm_width(part)}),
                          "limiter: keeps: a part of the SMs is from 0 to 1");
        CHECK(core.change(c, {.keeps = gpushare::sm_width(part)}) == gpushare::errc::invalid_specification);
    }
    CHECK(core.change(c, {}) == gpushare::errc::none);
}

TEST_CASE("an objective that others' longest work makes impossible is refused, with figures", "[compute]") {
    limiter_core<> core;
    const auto pages = core.add({.longest = 75ms});
    const auto code = [&](const gpushare::client_settings& s) {
        try {
            core.remove(core.add(s));
            return gpushare::failure{};
        } catch (const gpushare::operation_error& e) {
            return e.figures();
        }
    };
    const auto why = code({.level = {1}, .longest = 1ms, .slo = 20ms});
    CHECK(why.code == gpushare::errc::slo_unreachable);
    CHECK(why.asked == 20'000'000);
    CHECK(why.left == 0);
    CHECK(why.limit == 76'000'000);
    CHECK(code({.level = {1}, .longest = 1ms, .slo = 76ms}).code == gpushare::errc::none);
    CHECK(code({.level = {-1}, .longest = 1ms, .slo = 20ms}).code ==
          gpushare::errc::none);  // of what is above, nothing is known
    CHECK(code({.level = {1}, .longest = 1ms, .keeps = gpushare::sm_width(0.5), .slo = 20ms}).code ==
          gpushare::errc::none);
    // The same for who is there and asks for another one, and not for what it has.
    const auto chat = core.add({.level = {1}, .longest = 1ms, .slo = 80ms});
    const auto refused = core.change(chat, {.level = {1}, .longest = 1ms, .slo = 70ms});
    CHECK(refused == gpushare::errc::slo_unreachable);
    CHECK(refused.asked == 70'000'000);
    CHECK(refused.left == 0);
    CHECK(refused.limit == 76'000'000);
    CHECK(core.settings(chat).slo == 80ms);
    CHECK(core.change(pages, {.longest = 90ms}) == gpushare::errc::none);
    CHECK(core.change(chat, {.weight = 50_pct, .level = {1}, .longest = 1ms, .slo = 80ms}) == gpushare::errc::none);
    // Below, what yields is waited for from one yield to the next; of its own level, for all of it.
    CHECK(core.change(pages, {.longest = 90ms, .yields_within = 5ms}) == gpushare::errc::none);
    CHECK(code({.level = {2}, .longest = 1ms, .slo = 20ms}).limit == 0);
    CHECK(code({.longest = 1ms, .slo = 20ms}).limit == 91'000'000);
}

TEST_CASE("at the lowest level somebody has the device while nobody else wants it", "[compute]") {
    limiter_core core{{.depth = 1}};
    const auto idle = core.add({.level = gpushare::best_effort}), busy = core.add({.weight = 0.1_pct, .level = {-5}});
    arrive(core, idle, 3);
    arrive(core, busy, 3);
    for (const auto c : {busy, busy, busy, idle, idle, idle}) {
        const auto a = core.next(now);
        REQUIRE(a);
        CHECK(a->client == c);
        core.complete(*a, 1ms);
    }
}

TEMPLATE_TEST_CASE("the device is kept for who may be back at once, and at the time that is said for that no longer",
                   "[compute]", gpushare::weighted_fair,
                   (gpushare::policy_tree<gpushare::weighted_fair, gpushare::weighted_fair>)) {
    limiter_core<TestType> core{{.depth = 1}};
    const auto back = core.add({}), other = core.add({.group = 1});
    instant t{1s};
    const auto run = [&](client_id c, ns took) {
        core.arrive(c, t);
        const auto a = core.next(t);
        REQUIRE(a);
        t += took;
        core.complete(*a, {.took = took}, t);
    };
    run(other, 100ms);  // it is far ahead of its share
    for (int i = 0; i < 4; ++i) {
        run(back, 10ms);
        t += 100us;
    }
    run(back, 10ms);
    core.arrive(other, t);
    CHECK_FALSE(core.next(t));
    const auto then = core.resume_at();
    CHECK(then > t);
    CHECK(then <= t + 201us);
    CHECK(core.next(then));
}

namespace {

/// Knows whom it was asked about though they are none of its clients.
struct watchful_policy : gpushare::weighted_fair {
    std::vector<client_id> clients;
    int* strangers = nullptr;

    gpushare::failure add(client_id c, const gpushare::client_settings& s) {
        clients.push_back(c);
        return gpushare::weighted_fair::add(c, s);
    }
    [[nodiscard]] bool before(client_id a, client_id b) const noexcept {
        if (std::ranges::count(clients, a) == 1 && std::ranges::count(clients, b) == 1)
            return gpushare::weighted_fair::before(a, b);
        ++*strangers;
        return false;
    }
};

}  // namespace

TEST_CASE("under a new policy a predicted cost isn't taken for a declared one", "[compute]") {
    limiter_core core{{.first_guess = 200us}};
    const auto a = core.add({});
    core.arrive(a, now);
    gpushare::weighted_fair other;
    REQUIRE(core.set_policy(other, now) == gpushare::errc::none);
    const auto admitted = core.next(now);
    REQUIRE(admitted);
    CHECK(admitted->predicted == 200us);
    CHECK_FALSE(admitted->unproven);
    CHECK(admitted->longest == 0ns);
    SECTION("a declared one stays declared") {
        core.complete(*admitted, 200us);
        const gpushare::submission_facts facts{.head = {.cost = 3ms}};
        core.arrive(a, now, facts);
        gpushare::weighted_fair third;
        REQUIRE(core.set_policy(third, now) == gpushare::errc::none);
        CHECK(core.next(now)->longest == 3ms);
    }
}

TEST_CASE("an estimate behind work that was declared to last for ever is that long", "[compute]") {
    limiter_core core{{.depth = 1}};
    const auto a = core.add({}), b = core.add({});
    core.arrive(a, now, {.head = {.cost = ns::max()}});
    REQUIRE(core.next(now));
    CHECK(core.estimate(b).wait > 24h * 365 * 100);
}

TEST_CASE("a new policy isn't asked about who has gone", "[compute]") {
    int strangers = 0;
    const auto policy = [&] {
        watchful_policy p;
        p.strangers = &strangers;
        return p;
    };
    limiter_core<watchful_policy> core{{.depth = 1}, policy()};
    const auto stays = core.add({}), goes = core.add({});
    core.arrive(goes, instant{1s});
    const auto a = core.next(instant{1s});
    REQUIRE(a);
    core.complete(*a, {.took = 10ms}, instant{1s + 10ms});  // from now on it may be back at any time
    core.remove(goes);
    auto next = policy();
    REQUIRE(core.set_policy(next, instant{1s + 10ms}) == gpushare::errc::none);
    core.arrive(stays, instant{1s + 10ms});
    CHECK(core.next(instant{1s + 10ms}));
    CHECK(strangers == 0);
}

}  // namespace limiter_core_test
