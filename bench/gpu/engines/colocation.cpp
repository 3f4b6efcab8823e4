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
#include <gpushare/compute/launch_gate.hpp>

#include "arrivals.hpp"
#include "percentile.hpp"

namespace gpu_engines {
namespace {

namespace cu = gpushare::cuda;
using gate_type = cu::launch_gate<gpushare::launch_gate>;

/// A launch gate and its clients, or nothing where the strategy has none.
class gatekeeper {
public:
    /// `urgent`: a client is there that goes before others, whether or not it ever asks.
    /// `in_flight`: as in setting. `gap`: in front of each launch, which the gate doesn't charge.
    gatekeeper(strategy how, bool urgent, gpushare::ns in_flight = setting{}.in_flight,
               gpushare::ns gap = cu::launch_shell_options{}.gap) {
        if (how != strategy::held && how != strategy::gated) return;
        node_.emplace(cu::node_options{.devices = {0}});
        gate_.emplace(
            *node_, gpushare::device_id{0}, gpushare::launch_gate{{.in_flight = in_flight}},
            cu::launch_shell_options{
                .waits = how == strategy::gated ? cu::launch_wait::stream : cu::launch_wait::thread, .gap = gap});
        if (urgent) requests_.emplace(gate_->add({.level = 1}));
    }

    /// A busy tenant's; empty without a gate.
    struct seat {
        gate_type::client client;
        gate_type::binding bound;
    };
    [[nodiscard]] std::optional<seat> admit(const lane& l, std::uint32_t weight) {
        if (!gate_) return std::nullopt;
        auto c = gate_->add({.weight = weight});
        auto b = gate_->bind(c, l.native());
        return seat{std::move(c), std::move(b)};
    }
    /// Another request is there, until `waiting` is reset.
    void announce(std::optional<gate_type::request>& waiting) {
        if (requests_) waiting.emplace(gate_->announce(*requests_));
    }
    /// `call` as a request. How long that waits for others at most, as the gate told it.
    template <class F>
    gpushare::ns request(F call) {
        if (!requests_) {
            call();
            return gpushare::ns{0};
        }
        const auto inside = gate_->enter(*requests_);
        const gpushare::ns told = gate_->bound(*requests_);
        call();
        return told;
    }
    [[nodiscard]] cu::launch_usage usage(const std::optional<seat>& p) const {
        return p ? gate_->usage(p->client) : cu::launch_usage{};
    }

    [[nodiscard]] bool waits_in_streams() const { return gate_ && gate_->waits_in_streams(); }

private:
    std::optional<cu::node> node_;
    std::optional<gate_type> gate_;
    std::optional<gate_type::client> requests_;
};

/// When a run began, when it begins to count and when it ends.
struct times {
    explicit times(const setting& s) : begin(steady::now()), counts(begin + s.warm), end(counts + s.length) {}
    steady::time_point begin, counts, end;
};

void serve(serving_tenant& t, gatekeeper& gate, const std::vector<std::chrono::nanoseconds>& requests, const times& at,
           latencies& into) {
    t.way.use();
    std::optional<gate_type::request> next;
    for (std::size_t i = 0; i < requests.size(); ++i) {
        const auto arrival = at.begin + requests[i];
        wait_until(arrival);
        const auto turn = steady::now();
        if (turn >= at.end) {
            if (arrival >= at.counts) into.from_arrival_us.push_back(us_from(arrival, at.end));
            continue;
        }
        const gpushare::ns told = gate.request([&] {
            next.reset();
            t.pass();
            const auto done = t.way.mark();
            while (!done.reached()) {
            }
            // So that nobody slips in between the two.
            if (i + 1 < requests.size() && at.begin + requests[i + 1] <= steady::now()) gate.announce(next);
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

/// Until the end; `over`: when each pass was.
void keep_busy(const busy_part& part, const times& at, std::vector<steady::time_point>& over) {
    busy_tenant& t = *part.tenant;
    t.way.use();
    const std::size_t most = part.rest.count() == 0 ? 3 : 1;
    std::deque<point> in_flight;
    while (steady::now() < at.end) {
        t.engine->step();
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
    gatekeeper gate(s.how, s.urgent, s.in_flight);
    std::vector<std::optional<gatekeeper::seat>> seats;
    for (const busy_part& b : s.busy) seats.push_back(gate.admit(b.tenant->way, b.weight));
    const auto requests = arrivals(s.per_s, s.warm + s.length, seed);
    std::vector<std::vector<steady::time_point>> over(s.busy.size());
    outcome all;
    const times at(s);
    for (std::size_t i = 0; i < s.busy.size(); ++i)
        s.busy[i].tenant->work.begin([&, i] { keep_busy(s.busy[i], at, over[i]); });
    if (s.serving != nullptr) s.serving->work.begin([&] { serve(*s.serving, gate, requests, at, all.answers); });
    std::exception_ptr why;
    const auto join = [&why](worker& w) {  // all of them, since they use what is here
        try {
            w.wait();
        } catch (...) {
            why = std::current_exception();
        }
    };
    if (s.serving != nullptr) join(s.serving->work);
    for (const busy_part& b : s.busy) join(b.tenant->work);
    if (why != nullptr) std::rethrow_exception(why);
    for (std::size_t i = 0; i < s.busy.size(); ++i)
        all.busy.push_back({rate_between(over[i], at.counts, at.end),
                            static_cast<double>(gate.usage(seats[i]).longest_hold.count()) / 1e3});
    return all;
}

double charged_over_measured(busy_tenant& t, strategy how, std::size_t passes) {
    // No urgent client: below one, a tenant waits for itself, and leaves the device idle. And no gap
    // that isn't charged: the two events around a pass count the gaps between its launches.
    gatekeeper gate(how, false, setting{}.in_flight, gpushare::ns{0});
    const auto seat = gate.admit(t.way, 1);
    double measured_us = 0;
    gpushare::ns before{0};
    t.work.begin([&] {
        t.way.use();
        for (std::size_t i = 0; i < passes / 2; ++i) t.engine->step();  // the gate learns how long launches take
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
