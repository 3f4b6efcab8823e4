// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The predictions of limiter::estimate, compared with what then happens: random calls on a modelled
// device, of several widths, streams and tenants. The same in every run.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/modelled_device.hpp"

namespace limiter_estimate_test {

using namespace std::chrono_literals;
using gpushare::instant;
using gpushare::ns;
using gpushare::share;
using support::modelled_device;

namespace {

constexpr ns to_notice = 20us;

/// A tenant whose calls, of so many blocks, come by chance and go to its streams in turn.
struct caller {
    ns length{};
    std::uint32_t blocks = 1, streams = 1;
    double load = 0;  // of the device
    unsigned permille = 500;
};

/// Of its calls that came when it was known how long they take: the mean of what was said and of
/// what happened, and of how far these were apart.
struct told {
    ns wait_said{}, wait{}, wait_off{}, finish_said{}, finish{};

    [[nodiscard]] double wait_ratio() const { return std::chrono::duration<double>(wait_said) / wait; }
    [[nodiscard]] double finish_ratio() const { return std::chrono::duration<double>(finish_said) / finish; }
    [[nodiscard]] double off() const { return std::chrono::duration<double>(wait_off) / finish; }
};

std::vector<told> run(std::uint32_t sms, const std::vector<caller>& callers) {
    using stream = modelled_device::stream;
    using limiter = gpushare::compute_limiter<stream, modelled_device::clock>;
    struct tenant {
        caller what;
        gpushare::client_id id{};
        std::deque<stream> streams{};
        instant next{};
        ns mean_gap{};
        std::size_t turn = 0;
        told all{};
    };
    std::deque<tenant> tenants;  // outlives the limiter, which tells callers that it ends
    modelled_device device(sms);
    limiter compute({}, modelled_device::clock(device));
    gpushare::sim::random any(11);
    for (const auto& c : callers) {
        auto& t = tenants.emplace_back();
        t.what = c;
        t.id = compute.add({.weight = share::of_permille(c.permille)});
        for (std::uint32_t i = 0; i < c.streams; ++i) t.streams.emplace_back(device, gpushare::priority{}, 0);
        const double part = static_cast<double>(c.blocks) / sms;
        t.mean_gap = ns{static_cast<ns::rep>(static_cast<double>(c.length.count()) * part / c.load)};
        t.next = device.now() + any.exponential(t.mean_gap);
    }
    const auto known = device.now() + 2s, end = device.now() + 60s;
    while (device.now() < end) {
        auto next = compute.resume_at();
        for (const auto& t : tenants) next = std::min(next, t.next);
        (void)device.step(to_notice, next);
        for (auto& t : tenants) {
            if (t.next > device.now()) continue;
            const auto e = compute.estimate(t.id, 1);
            const auto done = [&t, came = device.now(), known, wait_said = e.wait,
                               finish_said = e.finish()](const gpushare::completion& how) {
                if (came < known || how.status != gpushare::errc::none) return;
                const ns took = how.finished_at - came, wait = std::max(took - t.what.length - to_notice, ns{0});
                t.all.wait_said += wait_said;
                t.all.wait += wait;
                t.all.wait_off += std::max(wait_said, wait) - std::min(wait_said, wait);
                t.all.finish_said += finish_said;
                t.all.finish += took;
            };
            const auto work = [c = t.what](stream& s) { s.launch(c.blocks, c.length); };
            if (!compute.submit(t.id, t.streams[t.turn++ % t.streams.size()], work, {.key = 1}, done))
                FAIL("not submitted");
            t.next = device.now() + any.exponential(t.mean_gap);
        }
        compute.poll();
    }
    std::vector<told> all;
    for (const auto& t : tenants) all.push_back(t.all);
    return all;
}

}  // namespace

TEST_CASE("an estimate of when a call will be done, and what then happens", "[compute][sweep][estimate]") {
    const std::vector<std::pair<std::uint32_t, std::vector<caller>>> cases{
        {1, {{1ms, 1, 1, 0.7}}},
        {1, {{1ms, 1, 1, 0.4}, {5ms, 1, 1, 0.4}}},
        {2, {{25ms, 1, 1, 0.4}}},
        {2, {{25ms, 1, 2, 0.8}}},
        {2, {{25ms, 1, 2, 0.1}}},
        {2, {{25ms, 1, 1, 0.35}, {75ms, 1, 1, 0.35}}},
        {2, {{25ms, 1, 2, 0.4}, {75ms, 1, 2, 0.4}}},
        {4, {{25ms, 1, 4, 0.3}, {10ms, 2, 2, 0.3}, {3ms, 4, 1, 0.2}}},
    };
    for (std::size_t nth = 0; nth < cases.size(); ++nth) {
        const auto& [sms, callers] = cases[nth];
        const auto all = run(sms, callers);
        for (std::size_t i = 0; i < all.size(); ++i) {
            CAPTURE(nth, i, all[i].wait_ratio());
            CHECK(all[i].finish_ratio() >= 0.85);
            CHECK(all[i].finish_ratio() <= 1.4);
            CHECK(all[i].off() <= 0.45);
        }
    }
}

}  // namespace limiter_estimate_test
