// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, slow
// The promises of the policies, in virtual time, for random tenants, weights, arrivals and kernel
// lengths. Every property is also tried on a policy with a bug that it must find.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <vector>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/units.hpp>

#include "policy/every_policy.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "support/simulated_limiter.hpp"

namespace properties_test {

using namespace gpushare;
using namespace gpushare::literals;
using namespace std::chrono_literals;

namespace {

constexpr instant start{};
constexpr std::uint32_t depth = 2;
constexpr ns shortest = 100us, longest = 1ms;  // log-uniform between: mixed 10x

ns log_uniform(sim::random& any) {
    return ns{std::llround(static_cast<double>(shortest.count()) * std::pow(10.0, any.fraction()))};
}

/// A device, a limiter, and tenants of every habit: always backlogged, in bursts, or with Poisson
/// arrivals.
template <compute_policy Policy>
class scene {
public:
    enum class habit { backlogged, poisson, synchronous };
    struct tenant {
        client_id id{};
        client_settings settings{};
        habit kind{};
        sim::random any;
        std::vector<std::pair<instant, ns>> ends{};  // of each kernel, and its length
        ns longest_wait{};
        instant last_end = start;
        ns longest_gap{};
        bool stopped = false;
    };

    explicit scene(Policy p = {}) : limiter(world, {0}, {.depth = depth}, std::move(p)) {}

    tenant& add(const client_settings& s, habit kind, std::uint64_t seed) {
        tenants.push_back({.settings = s, .kind = kind, .any = sim::random(seed)});
        tenant& t = tenants.back();
        t.id = limiter.add(s);
        limiter.client(t.id).on_end = [this, &t](const support::simulated_end& e) {
            t.ends.emplace_back(e.end, e.length);
            t.longest_wait = std::max(t.longest_wait, e.let_in - e.arrival);
            t.longest_gap = std::max(t.longest_gap, e.end - t.last_end);
            t.last_end = e.end;
            if (t.stopped) return;
            if (t.kind == habit::backlogged) submit(t);
            if (t.kind == habit::synchronous)
                world.at(world.now() + t.any.exponential(300us), [this, &t] { submit(t); });
        };
        return t;
    }

    void begin(tenant& t) {
        t.stopped = false;
        if (t.kind == habit::backlogged)
            for (int i = 0; i < 16; ++i) submit(t);  // many more than may be in flight
        if (t.kind == habit::synchronous) submit(t);
        if (t.kind == habit::poisson) arrive(t);
    }

    void submit(tenant& t) {
        const auto length = log_uniform(t.any);
        limiter.submit(t.id, {.length = length, .head = {.remaining = length * static_cast<int>(1 + t.any.below(20))}});
    }

    /// Device time that it had of `from` to `to`, by the ends of its kernels.
    static ns had(const tenant& t, instant from, instant to) {
        ns sum{};
        for (const auto& [end, length] : t.ends)
            if (end > from && end <= to) sum += length;
        return sum;
    }
    double part(const tenant& t, instant from, instant to) {
        ns all{};
        for (const auto& u : tenants) all += had(u, from, to);
        return static_cast<double>(had(t, from, to).count()) / static_cast<double>(all.count());
    }

    sim::world world;
    support::simulated_limiter<Policy> limiter;
    std::deque<tenant> tenants;

private:
    void arrive(tenant& t) {
        if (t.stopped) return;
        submit(t);
        world.at(world.now() + t.any.exponential(5ms), [this, &t] { arrive(t); });
    }
};

/// Shares that sum to 950 at most, none under 20, so that any policy can promise them.
std::vector<unsigned> random_shares(support::random& any) {
    std::vector<unsigned> shares;
    unsigned left = 950;
    while (left >= 20 && shares.size() < 10) {
        const auto next = static_cast<unsigned>(20 + any.below(std::min(left - 19, 400U)));
        shares.push_back(next);
        left -= next;
    }
    if (shares.size() == 1) shares.push_back(20);
    return shares;
}

template <class Policy>
void populate(scene<Policy>& s, support::random& any, unsigned levels = 1, bool caps = true) {
    std::uint64_t nth = 1;
    for (const auto permille : random_shares(any)) {
        const auto kind = static_cast<typename scene<Policy>::habit>(nth == 1 ? 0 : any.below(3));
        auto& t = s.add({.weight = share::of_permille(permille),
                         .level = {static_cast<std::int32_t>(any.below(levels))},
                         .cap = caps ? share::of_permille(permille + 50) : share::whole(),
                         .slo = any.one_in(2) ? ns{20ms} : ns{0},
                         .group = static_cast<std::uint32_t>(any.below(3))},
                        kind, any.below(1U << 30) + nth++);
        s.begin(t);
    }
}

// ---- the properties: each is true of a policy, or not

/// What a tenant with a share of 2 % or more waits at most: work without a deadline is due after
/// one second.
constexpr ns patience = 1200ms;

/// Everybody with work is served again and again.
template <class Policy>
bool nobody_starves(std::uint64_t seed, unsigned levels = 1, bool caps = true) {
    support::random any(seed);
    scene<Policy> s;
    populate(s, any, levels, caps);
    s.world.run_until(start + 5s);
    bool holds = true;
    for (const auto& t : s.tenants) {
        if (t.kind != scene<Policy>::habit::poisson) holds &= !t.ends.empty() && t.longest_gap < patience;
        if (t.kind == scene<Policy>::habit::backlogged) holds &= start + 5s - t.last_end < patience;
    }
    return holds;
}

/// The device never idles while somebody waits: one tenant is always backlogged, so that is never.
template <class Policy>
bool conserves_work(std::uint64_t seed) {
    support::random any(seed);
    scene<Policy> s;
    populate(s, any, 1, false);  // weighted_fair honours hard caps, within others too
    s.world.run_until(start + 2s);
    return s.world.device_time({0}) >= 2s - longest;
}

/// Between any two moments, two backlogged tenants got device time by their weights, but for so
/// many kernels of each.
template <class Policy>
bool lag_is_bounded(std::uint64_t seed) {
    support::random any(seed);
    scene<Policy> s;
    for (std::uint64_t i = 0; const auto permille : random_shares(any))
        s.begin(s.add({.weight = share::of_permille(permille)}, scene<Policy>::habit::backlogged, seed + ++i));
    std::vector<double> virtual_time(s.tenants.size());
    std::vector<std::vector<std::pair<double, double>>> range(s.tenants.size());
    for (auto& r : range) r.resize(s.tenants.size(), {0.0, 0.0});
    for (instant now = start; now < start + 3s; now += 1ms) {
        s.world.run_until(now);
        for (std::size_t i = 0; i < s.tenants.size(); ++i)
            virtual_time[i] = static_cast<double>(s.limiter.client(s.tenants[i].id).device_time.count()) /
                              s.tenants[i].settings.weight.fraction();
        for (std::size_t i = 0; i < s.tenants.size(); ++i) {
            for (std::size_t j = 0; j < i; ++j) {
                auto& [least, most] = range[i][j];
                const double ahead = virtual_time[i] - virtual_time[j];
                least = std::min(least, ahead);
                most = std::max(most, ahead);
                // One kernel each if costs were known; here they are predictions, and `depth`
                // kernels are in flight.
                const double bound =
                    (depth + 1) * static_cast<double>(longest.count()) *
                    (1 / s.tenants[i].settings.weight.fraction() + 1 / s.tenants[j].settings.weight.fraction());
                if (most - least > bound) return false;
            }
        }
    }
    return true;
}

/// No window holds more of a tenant than its cap, the pacer's grace, and what is in flight.
template <class Policy, class CapOf>
bool cap_holds(std::uint64_t seed, CapOf cap_of, Policy p = {}) {
    support::random any(seed);
    scene<Policy> s(std::move(p));
    populate(s, any);
    s.world.run_until(start + 3s);
    for (const auto& t : s.tenants) {
        for (const ns window : {50ms, 200ms, 1000ms}) {
            const auto most = ns{std::llround(cap_of(t.settings) *
                                              static_cast<double>((window + detail::pacer::most_kept).count()))} +
                              (depth + 1) * longest;
            ns sum{};
            for (std::size_t from = 0, to = 0; to < t.ends.size(); ++to) {
                sum += t.ends[to].second;
                while (t.ends[to].first - t.ends[from].first >= window) sum -= t.ends[from++].second;
                if (sum > most) return false;
            }
        }
    }
    return true;
}

/// Within 100 ms of a change of weights, and from there on, shares are the new ones.
template <class Policy>
bool converges(std::uint64_t seed) {
    scene<Policy> s;
    constexpr auto kind = scene<Policy>::habit::backlogged;
    auto &a = s.add({.weight = 80_pct}, kind, seed), &b = s.add({.weight = 15_pct}, kind, seed + 1),
         &c = s.add({.weight = 5_pct}, kind, seed + 2);
    for (auto& t : s.tenants) s.begin(t);
    s.world.run_until(start + 1s);
    (void)s.limiter.core().change(b.id, {.weight = 5_pct});
    (void)s.limiter.core().change(c.id, {.weight = 70_pct});
    (void)s.limiter.core().change(a.id, {.weight = 25_pct});
    s.world.run_until(start + 3s);
    const auto near = [&](const auto& t, double part, instant from, instant to, double off) {
        return std::abs(s.part(t, from, to) - part) <= off;
    };
    const instant changed = start + 1s, then = changed + 100ms;
    return near(c, 0.70, changed, then, 0.03) && near(a, 0.25, changed, then, 0.03) &&
           near(c, 0.70, then, then + 1s, 0.01) && near(a, 0.25, then, then + 1s, 0.01);
}

/// A tenant that wakes up gets its share from there on, and not what it didn't use.
template <class Policy>
bool owes_nothing(std::uint64_t seed, double off = 0.03) {
    scene<Policy> s;
    constexpr auto kind = scene<Policy>::habit::backlogged;
    auto &busy = s.add({.weight = 50_pct}, kind, seed), &late = s.add({.weight = 50_pct}, kind, seed + 1);
    s.begin(busy);
    s.begin(late);
    s.world.run_until(start + 100ms);
    late.stopped = true;
    s.world.run_until(start + 2s);
    s.begin(late);
    s.world.run_until(start + 2200ms);
    return std::abs(s.part(late, start + 2s, start + 2200ms) - 0.5) < off;
}

// ---- policies with a bug

/// Serves whoever was there first, always.
struct unfair : fifo {
    void wake(client_id c, const queue_head&, instant now) noexcept { fifo::wake(c, {}, now); }
};
/// Waits a moment now and then, for nothing.
struct hesitant : weighted_fair {
    [[maybe_unused]] static constexpr bool timeless = false;
    [[nodiscard]] choice pick(instant now) noexcept {
        if (now >= awake_from && now < awake_from + 20ms) return weighted_fair::pick(now);
        if (now >= awake_from) awake_from = now + 10ms;
        return choice(awake_from);
    }
    instant awake_from = start;
};
/// Doesn't hear of changes.
struct deaf : weighted_fair {
    failure change(client_id, const client_settings&) { return {}; }
};
/// Takes half of what it is told for true.
struct generous : hard_share {
    void serve(client_id c, ns cost, instant now) noexcept { hard_share::serve(c, cost / 2, now); }
    void correct(client_id c, ns delta) noexcept { hard_share::correct(c, delta / 2); }
};
/// Remembers who had less, for ever.
class grudging {
public:
    failure add(client_id c, const client_settings&) {
        all_.resize(std::max<std::size_t>(all_.size(), c.index + 1));
        all_[c.index] = {c, {}, false};
        return {};
    }
    failure change(client_id, const client_settings&) { return {}; }
    void remove(client_id c) noexcept { sleep(c); }
    void wake(client_id c, const queue_head&, instant) noexcept { all_[c.index].waits = true; }
    void sleep(client_id c) noexcept { all_[c.index].waits = false; }
    [[nodiscard]] choice pick(instant) const noexcept {
        const entry* first = nullptr;
        for (const auto& e : all_)
            if (e.waits && (first == nullptr || e.had < first->had)) first = &e;
        return first != nullptr ? choice(first->id) : choice();
    }
    void serve(client_id c, ns cost, instant) noexcept { all_[c.index].had += cost; }
    void correct(client_id c, ns delta) noexcept { all_[c.index].had += delta; }

private:
    struct entry {
        client_id id{};
        ns had{};
        bool waits = false;
    };
    std::vector<entry> all_;
};

constexpr std::uint64_t repeats = 8;

template <class F>
void check_for_seeds(F holds) {
    for (std::uint64_t nth = 0; nth < support::few(repeats); ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        CHECK(holds(seed));
    }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("no client starves", "[policy][property]", policies::starving_nobody) {
    check_for_seeds([](auto seed) { return nobody_starves<TestType>(seed); });
}

TEST_CASE("a cap on the high class keeps the low one from starving, and strict priority alone doesn't",
          "[policy][property]") {
    check_for_seeds([](auto seed) { return nobody_starves<strict_priority<>>(seed, 2); });
    struct uncapped : strict_priority<> {
        uncapped() : strict_priority<>(share::whole()) {}
    };
    // Without caps of their own either, which weighted_fair keeps within a class.
    bool starved = false;
    for (std::uint64_t nth = 0; nth < repeats && !starved; ++nth)
        starved = !nobody_starves<uncapped>(support::seed(nth), 2, false);
    CHECK(starved);
}

TEST_CASE("a policy that starves somebody is found out", "[policy][property]") {
    CHECK_FALSE(nobody_starves<unfair>(support::seed(0)));
}

TEMPLATE_LIST_TEST_CASE("the device never idles while a client waits, unless there are hard caps", "[policy][property]",
                        policies::work_conserving) {
    check_for_seeds([](auto seed) { return conserves_work<TestType>(seed); });
    CHECK_FALSE(conserves_work<hesitant>(support::seed(0)));
    CHECK_FALSE(conserves_work<hard_share>(support::seed(0)));
}

TEMPLATE_LIST_TEST_CASE("shares hold between any two moments, but for the kernels in flight", "[policy][property]",
                        policies::proportional) {
    check_for_seeds([](auto seed) { return lag_is_bounded<TestType>(seed); });
    CHECK_FALSE(lag_is_bounded<fifo>(support::seed(0)));
    CHECK_FALSE(lag_is_bounded<fair>(support::seed(0)));
}

TEST_CASE("a hard cap is never exceeded", "[policy][property]") {
    const auto by_weight = [](const client_settings& s) { return s.weight.fraction(); };
    const auto by_cap = [](const client_settings& s) { return s.cap.fraction(); };
    check_for_seeds([&](auto seed) { return cap_holds<hard_share>(seed, by_weight); });
    check_for_seeds([&](auto seed) { return cap_holds<capped<weighted_fair>>(seed, by_cap); });
    check_for_seeds([&](auto seed) { return cap_holds<capped<shortest_remaining>>(seed, by_cap); });
    check_for_seeds([&](auto seed) {
        return cap_holds(
            seed, [](auto&) { return 1.0 / 12; }, equal_share(12));
    });
    check_for_seeds([&](auto seed) { return cap_holds<policy_tree<weighted_fair, hard_share>>(seed, by_weight); });
    CHECK_FALSE(cap_holds<generous>(support::seed(0), by_weight));
    CHECK_FALSE(cap_holds<soft_share>(support::seed(0), by_weight));
}

TEMPLATE_LIST_TEST_CASE("a change of weights is in force within 100 ms", "[policy][property]", policies::converging) {
    check_for_seeds([](auto seed) { return converges<TestType>(seed); });
    CHECK_FALSE(converges<deaf>(support::seed(0)));
}

TEMPLATE_LIST_TEST_CASE("a client that wakes up is owed nothing", "[policy][property]", policies::owing_nothing) {
    // Shortest remaining first lets anybody lead or lag by its guard: half of 100 ms, from one to
    // the other.
    const double off = std::same_as<TestType, shortest_remaining> ? 0.3 : 0.03;
    check_for_seeds([off](auto seed) { return owes_nothing<TestType>(seed, off); });
    CHECK_FALSE(owes_nothing<grudging>(support::seed(0)));
}

}  // namespace properties_test
