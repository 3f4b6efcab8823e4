// SPDX-License-Identifier: Apache-2.0
// Runs engines beside each other on a device in virtual time: the experiment of
// data/h100/colocation.csv on an H100, and variations of the experiment.
//
//   const auto r = engines::colocate({.served = {{.model = &bert}}, .busy = {{.model = &resnet}}, .how = engines::strategy::held}, 1);
//   r.served[0].from_arrival_us;  r.busy[0].iterations_per_s;
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <gpushare/compute/launch_gate.hpp>
#include <gpushare/units.hpp>

#include "engines/device.hpp"
#include "engines/threads.hpp"
#include "percentile.hpp"

namespace engines {

struct setting {
    std::vector<served_model> served{};
    std::vector<busy_model> busy{};
    strategy how = strategy::plain;
    ns length{2'000'000'000};
    gpushare::launch_gate_options gate{};
    device_constants device{};
    host_costs host{};
};

/// Results of one serving engine, in microseconds. All lists except `in_order` are sorted.
struct answers {
    std::vector<double> from_arrival_us, call_us;
    std::vector<double> told_us;                   ///< the announced bounds on the wait
    std::vector<double> beyond_us;                 ///< call time minus announced bound
    std::vector<serving_thread::answer> in_order;  ///< in the order of arrival
};

/// Results of one engine that always has work.
struct progress {
    double iterations_per_s = 0;
    /// Device time as the gate charges it, and as the device measures it.
    double charged_s = 0, device_s = 0;
    double longest_hold_us = 0;
};

struct outcome {
    std::vector<answers> served;
    std::vector<progress> busy;
};

using bench::percentile;

namespace detail {

[[nodiscard]] inline double in_us(ns t) noexcept { return static_cast<double>(t.count()) * 1e-3; }

[[nodiscard]] inline answers answers_of(const serving_thread& t) {
    answers a;
    a.in_order = t.answers();
    for (const auto& r : a.in_order) {
        a.from_arrival_us.push_back(in_us(r.from_arrival));
        a.call_us.push_back(in_us(r.call));
        a.told_us.push_back(in_us(r.told));
        a.beyond_us.push_back(in_us(r.call - r.told));
    }
    for (auto* const values : {&a.from_arrival_us, &a.call_us, &a.told_us, &a.beyond_us}) std::ranges::sort(*values);
    return a;
}

[[nodiscard]] inline progress progress_of(const busy_thread& t, ns length) {
    return {t.iterations() / gpushare::in_seconds(length), gpushare::in_seconds(t.charged()),
            gpushare::in_seconds(t.device_time()), in_us(t.longest_hold())};
}

}  // namespace detail

[[nodiscard]] inline outcome colocate(const setting& s, std::uint64_t seed) {
    stage on(s.host, s.device, s.gate, s.how, seed);
    std::vector<std::unique_ptr<busy_thread>> busy;
    std::vector<std::unique_ptr<serving_thread>> serving;
    for (const busy_model& m : s.busy) busy.push_back(std::make_unique<busy_thread>(on, m));
    for (const served_model& m : s.served) serving.push_back(std::make_unique<serving_thread>(on, m));
    for (const auto& t : busy) t->begin();
    for (const auto& t : serving) t->begin();
    on.gpu.run_until(instant{} + s.length);
    outcome all;
    for (const auto& t : busy) all.busy.push_back(detail::progress_of(*t, s.length));
    for (const auto& t : serving) all.served.push_back(detail::answers_of(*t));
    return all;
}

}  // namespace engines
