// SPDX-License-Identifier: Apache-2.0
// Measures the cost of decisions: a permit, and a pick among 10 and among 10,000 tenants. Also
// measures the simulator's decisions per second.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <string>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/policies/by_order.hpp>
#include <gpushare/compute/policies/capped.hpp>
#include <gpushare/compute/policies/policy_tree.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>

#include "compute/measurements.hpp"
#include "compute/rig.hpp"
#include "support/simulated_limiter.hpp"

namespace bench::compute {

namespace {

using gpushare::client_id;
using gpushare::share;

/// Finishes each piece of work at once, so that only the limiter's own cost is left.
struct immediate_stream {
    using point = gpushare::immediate_point;
    static point record() { return {}; }
};

void admit(report& r) {
    constexpr std::size_t calls = 100'000;
    gpushare::compute_limiter<immediate_stream, gpushare::host::steady_clock> l{configuration};
    const auto client = l.add({.weight = share::of_permille(500)});
    (void)l.add({.weight = share::of_permille(500)});
    immediate_stream s;
    r.figure(
        "compute.admit_ns",
        repeated(21,
                 [&] { return ns_per_call(calls, [&] { l.acquire(client)->enqueue(s, [](auto& x) { keep(x); }); }); }),
        "ns");
    l.close(client);
}

/// Measures the cost of a yield point while no tenant waits, inside a block of a host device:
/// through the block's context and through its stream. The floors are a load of a word that no
/// other thread touches, and a call through a pointer.
void yield(report& r) {
    constexpr std::size_t calls = 1'000'000, repeats = 21;
    gpushare::host::node node{{.memory = gpushare::bytes{1 << 20}, .sms = 1}};
    auto s = node.make_stream(gpushare::device_id{0});
    struct {
        std::vector<double> context, stream, load, call, vs_load;
    } ns;
    s.launch({}, [&s, &ns](gpushare::host::kernel_context& on) {
        std::atomic<std::int32_t> word{0};
        bool (*volatile nothing)() = [] { return false; };
        const auto by_context = [&] { return ns_per_call(calls, [&] { keep(gpushare::yield_point(on)); }); };
        const auto loads = [&] { return ns_per_call(calls, [&] { keep(word.load(std::memory_order_relaxed)); }); };
        ns.context = repeated(repeats, by_context);
        ns.stream = repeated(repeats, [&] { return ns_per_call(calls, [&] { keep(gpushare::yield_point(s)); }); });
        ns.load = repeated(repeats, loads);
        ns.call = repeated(repeats, [&] { return ns_per_call(calls, [&] { keep(nothing()); }); });
        ns.vs_load = ratios(repeats, by_context, loads);
    });
    (void)s.record().wait(gpushare::never);
    r.figure("compute.yield_point_ns", ns.context, "ns");
    r.figure("compute.yield_point_of_stream_ns", ns.stream, "ns");
    r.figure("compute.yield_load_ns", ns.load, "ns");
    r.figure("compute.yield_call_ns", ns.call, "ns");
    r.figure("compute.yield_point_vs_load", ns.vs_load, "x");
}

/// Nanoseconds per decision: the pick, the charge, the update with the client's next piece of work,
/// and the correction. All clients have work; costs and lengths of requests differ.
template <gpushare::compute_policy Policy>
class decisions_of {
public:
    explicit decisions_of(std::uint32_t clients) {
        for (std::uint32_t i = 0; i < clients; ++i) {
            const client_id c{i, 1};
            policy_.add(c, {.weight = share::of_permille(1 + i * 37 % 1000), .group = i % 10});
            policy_.wake(c, head(), time_);
        }
    }

    double operator()() {
        constexpr std::size_t calls = 100'000;
        return ns_per_call(calls, [&] {
            const auto c = policy_.pick(time_);
            const auto h = head();
            time_ += h.cost;
            policy_.serve(*c, h.cost, time_);
            policy_.wake(*c, h, time_);
            policy_.correct(*c, h.cost / 16);
        });
    }

private:
    gpushare::queue_head head() {
        const auto cost = any_.between(100us, 1ms);
        return {.cost = cost,
                .remaining = cost * static_cast<int>(1 + any_.below(20)),
                .arrival = time_,
                .deadline = time_ + 20 * cost};
    }

    Policy policy_;
    gpushare::sim::random any_{1};
    instant time_{};
};

/// The planted fault: a decision that looks at every client.
class looks_at_all : public gpushare::weighted_fair {
public:
    gpushare::failure add(client_id c, const gpushare::client_settings& s) {
        all_.push_back(c);
        return gpushare::weighted_fair::add(c, s);
    }
    [[nodiscard]] gpushare::choice pick(instant at) noexcept {
        for (const auto& c : all_) keep(c.index);
        return gpushare::weighted_fair::pick(at);
    }

private:
    std::vector<client_id> all_;
};

template <gpushare::compute_policy Policy>
std::vector<double> growth_of(std::size_t repeats) {
    decisions_of<Policy> few(10), many(10'000);
    return ratios(
        repeats, [&] { return many(); }, [&] { return few(); });
}

template <gpushare::compute_policy Policy>
void decision_ns(report& r, const std::string& name) {
    decisions_of<Policy> many(10'000);
    r.figure("compute.decision_ns" + name, repeated(5, [&] { return many(); }), "ns");
}

template <gpushare::compute_policy Policy>
void growth(report& r, const std::string& name) {
    r.figure("compute.pick_growth" + name, growth_of<Policy>(21), "x");
    decision_ns<Policy>(r, name);
}

/// Simulates 10,000 tenants with Poisson arrivals on 1,000 devices at 90 % load in one world. The
/// world orders the events of all devices by time.
double sim_submissions_per_s() {
    constexpr std::uint32_t devices = 1000, tenants_each = 10;
    using device_limiter = support::simulated_limiter<gpushare::weighted_fair>;
    struct tenant {
        device_limiter* to;
        client_id id;
        gpushare::sim::world* world;
        gpushare::sim::random any;
        ns gap;
        void arrive() {
            to->submit(id, {.length = ns{std::llround(100'000 * std::exp(any.fraction() * std::log(10.0)))}});
            world->at(world->now() + any.exponential(gap), [this] { arrive(); });
        }
    };
    gpushare::sim::world world{{.devices = devices}};
    std::deque<device_limiter> limiters;
    std::deque<tenant> tenants;
    constexpr double mean_length = 900'000 / 2.302585;  // the mean of the log-uniform lengths
    for (std::uint32_t d = 0; d < devices; ++d) {
        auto& to = limiters.emplace_back(world, gpushare::device_id{d}, configuration);
        for (std::uint32_t t = 0; t < tenants_each; ++t) {
            const auto id = to.add({.weight = share::of_permille(20 + 15 * t)});
            tenants.push_back({&to, id, &world, gpushare::sim::random(tenants.size()),
                               ns{std::llround(tenants_each * mean_length / 0.9)}});
            auto& next = tenants.back();
            world.at(instant{} + next.any.exponential(next.gap), [&next] { next.arrive(); });
        }
    }
    const auto let_in = [&] {
        std::uint64_t sum = 0;
        for (const auto& l : limiters) sum += l.let_in();
        return sum;
    };
    world.run_until(instant{} + 50ms);
    const auto before = let_in();
    const auto begin = now();
    world.run_until(instant{} + 350ms);
    const double seconds = std::chrono::duration<double>(now() - begin).count();
    return static_cast<double>(let_in() - before) / seconds;
}

}  // namespace

void decisions(report& r) {
    admit(r);
    yield(r);
    r.figure("compute.pick_growth", growth_of<gpushare::weighted_fair>(21), "x",
             {at_most(3), growth_of<looks_at_all>(1).front(), "a decision that looks at every client"});
    decision_ns<gpushare::weighted_fair>(r, "");
    growth<gpushare::earliest_deadline>(r, "_earliest_deadline");
    growth<gpushare::shortest_remaining>(r, "_shortest_remaining");
    growth<gpushare::capped<gpushare::weighted_fair>>(r, "_capped");
    growth<gpushare::policy_tree<gpushare::weighted_fair, gpushare::weighted_fair>>(r, "_tree");
    r.figure("compute.sim_submissions_per_s", repeated(5, sim_submissions_per_s), "1/s");
}

}  // namespace bench::compute
