// SPDX-License-Identifier: Apache-2.0
#include "colocation.hpp"

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/backend/host/clock.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/launch_gate.hpp>

#include "arrivals.hpp"
#include "percentile.hpp"

namespace gpu_engines {
namespace {

namespace cu = gpushare::cuda;
using gate_type = cu::launch_gate<gpushare::launch_gate>;
using limiter_type = gpushare::compute_limiter<cu::stream, gpushare::host::steady_clock>;

/// Schedules a tenant's passes with a limiter: each pass needs a permit.
class turns {
public:
    turns(limiter_type& by, cu::stream s, int level)
        : by_(&by), stream_(std::move(s)), who_(by.add({.level = {level}})) {}

    /// Keeps the permits whose work may still be in flight.
    template <class F>
    void pass(F enqueue) {
        while (!kept_.empty() && kept_.front().poll()) kept_.pop_front();
        kept_.push_back(*by_->acquire(who_));
        kept_.back().enqueue(stream_, [&](cu::stream&) { enqueue(); });
    }

private:
    limiter_type* by_;
    cu::stream stream_;
    gpushare::client_id who_;
    std::deque<limiter_type::permit> kept_;
};

/// A launch gate with its clients, or a limiter, or nothing, depending on the strategy.
class gatekeeper {
public:
    /// `urgent` adds a client with priority, whether or not this client ever makes a request.
    /// `in_flight` is as in setting. `gap` is the time before each launch that the gate doesn't
    /// charge. `graphs` puts waits into graphs.
    gatekeeper(strategy how, bool urgent, gpushare::ns in_flight = setting{}.in_flight,
               gpushare::ns gap = cu::launch_shell_options{}.gap, bool graphs = false) {
        if (how != strategy::held && how != strategy::gated && how != strategy::acquire) return;
        node_.emplace(cu::node_options{.devices = {0}});
        if (how == strategy::acquire) {
            limiter_.emplace();
            return;
        }
        gate_.emplace(*node_, gpushare::device_id{0}, gpushare::launch_gate{{.in_flight = in_flight}},
                      cu::launch_shell_options{
                          .waits = how == strategy::gated ? cu::launch_wait::stream : cu::launch_wait::thread,
                          .waits_in_graphs = graphs,
                          .gap = gap});
        if (urgent) requests_.emplace(gate_->add({.level = 1}));
    }

    /// The place of a busy tenant; empty without a gate and without a limiter.
    struct seat {
        std::optional<gate_type::client> client;
        std::optional<gate_type::binding> bound;
        std::optional<turns> by_permits;
    };
    [[nodiscard]] seat admit(const lane& l, std::uint32_t weight) {
        seat s;
        if (limiter_) s.by_permits.emplace(*limiter_, node_->borrow(l.native()), 0);
        if (!gate_) return s;
        s.client.emplace(gate_->add({.weight = weight}));
        s.bound.emplace(gate_->bind(*s.client, l.native()));
        return s;
    }
    /// The place of a tenant whose requests have priority.
    [[nodiscard]] seat invite(const lane& l) {
        seat s;
        if (limiter_) s.by_permits.emplace(*limiter_, node_->borrow(l.native()), 1);
        if (gate_) s.client.emplace(gate_->add({.level = 1}));
        return s;
    }
    /// Announces another request. The announcement lasts until `waiting` is reset.
    void announce(const seat& who, std::optional<gate_type::request>& waiting) {
        if (who.client) waiting.emplace(gate_->announce(*who.client));
    }
    /// Runs `enqueue` and `wait` as a request. Returns the gate's bound on the wait for other
    /// tenants.
    template <class E, class W>
    gpushare::ns request(seat& who, E enqueue, W wait) {
        if (!who.client) {
            pass(who, enqueue);
            wait();
            return gpushare::ns{0};
        }
        const auto inside = gate_->enter(*who.client);
        const gpushare::ns told = gate_->bound(*who.client);
        enqueue();
        wait();
        return told;
    }
    template <class E>
    static void pass(seat& who, E enqueue) {
        if (who.by_permits)
            who.by_permits->pass(enqueue);
        else
            enqueue();
    }
    [[nodiscard]] cu::launch_usage usage(const seat& p) const {
        return p.client ? gate_->usage(*p.client) : cu::launch_usage{};
    }

    [[nodiscard]] bool waits_in_streams() const { return gate_ && gate_->waits_in_streams(); }

private:
    std::optional<cu::node> node_;
    std::optional<gate_type> gate_;
    std::optional<limiter_type> limiter_;
    std::optional<gate_type::client> requests_;
};

/// The times at which a run starts, starts to count, and ends.
struct times {
    explicit times(const setting& s) : begin(steady::now()), counts(begin + s.warm), end(counts + s.length) {}
    steady::time_point begin, counts, end;
};

void serve(serving_tenant& t, gatekeeper& gate, const std::vector<std::chrono::nanoseconds>& requests, const times& at,
           latencies& into) {
    t.way.use();
    auto who = gate.invite(t.way);
    std::optional<gate_type::request> next;
    for (std::size_t i = 0; i < requests.size(); ++i) {
        const auto arrival = at.begin + requests[i];
        wait_until(arrival);
        const auto turn = steady::now();
        if (turn >= at.end) {
            if (arrival >= at.counts) into.from_arrival_us.push_back(us_from(arrival, at.end));
            continue;
        }
        const auto pass = [&] {
            next.reset();
            t.pass();
        };
        const gpushare::ns told = gate.request(who, pass, [&] {
            const auto done = t.way.mark();
            while (!done.reached()) {
            }
            // Announces the next request before this request ends, so that no other tenant starts
            // in between.
            if (i + 1 < requests.size() && at.begin + requests[i + 1] <= steady::now()) gate.announce(who, next);
        });
        const auto seen = steady::now();
        if (arrival < at.counts) continue;
        into.from_arrival_us.push_back(us_from(arrival, seen));
        into.call_us.push_back(us_from(turn, seen));
        into.told_us.push_back(static_cast<double>(told.count()) / 1e3);
        into.beyond_us.push_back(into.call_us.back() - into.told_us.back());
    }
    for (auto* const values : {&into.from_arrival_us, &into.call_us, &into.told_us, &into.beyond_us})
        std::ranges::sort(*values);
}

/// Runs passes until the end. `over` gets the end of each pass.
void keep_busy(const busy_part& part, gatekeeper::seat& who, const times& at, std::vector<steady::time_point>& over) {
    busy_tenant& t = *part.tenant;
    t.way.use();
    std::function<void()> pass = [&t] { t.engine->step(); };
    // Captured behind the gate, which puts waits into the graph.
    if (part.as_graph) pass = t.way.captured(pass);
    const std::size_t most = part.rest.count() == 0 ? 3 : 1;
    std::deque<point> in_flight;
    while (steady::now() < at.end) {
        gatekeeper::pass(who, pass);
        in_flight.push_back(t.way.mark());
        if (in_flight.size() < most) continue;
        in_flight.front().wait();
        over.push_back(steady::now());
        in_flight.pop_front();
        std::this_thread::sleep_for(part.rest);
    }
    t.way.drain();
}

}  // namespace

outcome colocate(const setting& s, std::uint64_t seed) {
    gatekeeper gate(s.how, s.urgent && s.serving == nullptr, s.in_flight, cu::launch_shell_options{}.gap,
                    std::ranges::any_of(s.busy, &busy_part::as_graph));
    std::vector<gatekeeper::seat> seats;
    for (const busy_part& b : s.busy) seats.push_back(gate.admit(b.tenant->way, b.weight));
    const auto requests = arrivals(s.per_s, s.warm + s.length, seed, s.burst);
    const auto of_second = arrivals(s.per_s, s.warm + s.length, seed + 1000, s.burst);
    std::vector<std::vector<steady::time_point>> over(s.busy.size());
    outcome all;
    const times at(s);
    for (std::size_t i = 0; i < s.busy.size(); ++i)
        s.busy[i].tenant->work.begin([&, i] { keep_busy(s.busy[i], seats[i], at, over[i]); });
    if (s.serving != nullptr) s.serving->work.begin([&] { serve(*s.serving, gate, requests, at, all.answers); });
    if (s.second != nullptr) s.second->work.begin([&] { serve(*s.second, gate, of_second, at, all.of_second); });
    std::exception_ptr why;
    // Waits for all workers, because they use local variables.
    const auto join = [&why](worker& w) {
        try {
            w.wait();
        } catch (...) {
            why = std::current_exception();
        }
    };
    if (s.serving != nullptr) join(s.serving->work);
    if (s.second != nullptr) join(s.second->work);
    for (const busy_part& b : s.busy) join(b.tenant->work);
    if (why != nullptr) std::rethrow_exception(why);
    for (std::size_t i = 0; i < s.busy.size(); ++i)
        all.busy.push_back({rate_between(over[i], at.counts, at.end),
                            static_cast<double>(gate.usage(seats[i]).longest_hold.count()) / 1e3});
    return all;
}

double charged_over_measured(busy_tenant& t, strategy how, std::size_t passes) {
    // There is no urgent client: a tenant below another level leaves the device idle while it waits
    // for its own pieces. All gaps are charged, because the two events around the passes also count
    // the gaps between launches.
    gatekeeper gate(how, false, setting{}.in_flight, gpushare::ns{0});
    const auto seat = gate.admit(t.way, 1);
    double measured_us = 0;
    gpushare::ns before{0};
    t.work.begin([&] {
        t.way.use();
        // The gate learns the launches' durations.
        for (std::size_t i = 0; i < passes / 2; ++i) t.engine->step();
        t.way.drain();
        before = gate.usage(seat).time;
        const auto begin = t.way.mark(true);
        for (std::size_t i = 0; i < passes; ++i) t.engine->step();
        const auto end = t.way.mark(true);
        t.way.drain();
        measured_us = us_between(begin, end);
    });
    t.work.wait();
    return static_cast<double>((gate.usage(seat).time - before).count()) / 1e3 / measured_us;
}

bool can_wait_in_streams() { return gatekeeper(strategy::gated, false).waits_in_streams(); }

double pass_us(serving_tenant& t, std::size_t passes) {
    std::vector<double> took(passes);
    t.work.begin([&] {
        t.way.use();
        for (double& us : took) {
            const auto begin = steady::now();
            t.pass();
            const auto done = t.way.mark();
            while (!done.reached()) {
            }
            us = us_from(begin, steady::now());
        }
    });
    t.work.wait();
    std::ranges::sort(took);
    return bench::percentile(took, 0.5);
}

}  // namespace gpu_engines
