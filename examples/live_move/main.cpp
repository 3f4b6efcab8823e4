// SPDX-License-Identifier: Apache-2.0
// Two devices, whose tenants are placed by plans. A tenant that finds no room waits. A tenant that
// is in the way moves with its data while it keeps running. A tenant of a lower level is told to
// leave. Room can also be reserved ahead of time. Each plan is a value, and carrying it out is a
// separate step.
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/tenant_planner.hpp>
#include <gpushare/placement/value_descent.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "../expect.hpp"

using namespace gpushare::literals;
using namespace std::chrono_literals;

int main() {
    gpushare::host::node node{{.devices = 2, .memory = 64_MiB, .sms = 2}};
    gpushare::tenancy shared{node};
    const gpushare::tenant_spec small{.memory = 16_MiB, .compute = 25_pct}, large{.memory = 48_MiB, .compute = 100_pct};
    const auto part = gpushare::placement_of(small), whole = gpushare::placement_of(large);
    const gpushare::workload usual(std::vector{part, part, whole});  // the expected arrivals
    gpushare::tenant_planner plan{shared, gpushare::value_descent(gpushare::as_cluster(shared), usual)};

    std::map<std::string, decltype(plan)::tenant> tenants;
    const auto arrive = [&](gpushare::tenant_spec spec, const char* name) {
        spec.name = name;
        auto a = plan.arrive(spec);
        if (a.who) tenants.emplace(name, *std::move(a.who));
        return a.outcome;
    };
    const auto leave = [&](const std::string& name) {
        tenants.erase(name);  // closes the tenant
        plan.left(name);
        for (auto& next : plan.advance())  // tenants that waited, and fit now
            if (next.who) tenants.emplace(next.name, *std::move(next.who));
    };

    for (const char* name : {"a", "b", "c", "d", "e"})
        expect(arrive(small, name) == gpushare::admission_result::placed, "a small one is admitted");
    leave("a"), leave("b"), leave("c");  // d and e remain, one on each device
    expect(arrive(large, "large") == gpushare::admission_result::queued, "a large one waits: no device is whole");

    std::map<std::string, std::vector<gpushare::moving_block>> data;
    for (auto& [name, t] : tenants) {
        data[name].push_back({.at = t.memory().allocate(1_MiB), .size = 1 << 20});
        std::memset(data[name][0].at, name[0], 1 << 20);
    }
    const auto moves = plan.make_room(large);
    expect(moves && moves->size() == 1, "one move makes a device whole");
    const auto& m = moves->front();
    const auto report = plan.carry_out(m, tenants.at(m.tenant), data[m.tenant], shared.now() + 10s);
    expect(report.moved == 1_MiB && report.closed.complete, "it is moved while it lives, and has left nothing behind");
    expect(*static_cast<char*>(data[m.tenant][0].at) == m.tenant[0], "its data is what it was");
    for (auto& next : plan.advance()) tenants.emplace(next.name, *std::move(next.who));
    expect(tenants.contains("large"), "the large one is admitted");

    gpushare::tenant_spec urgent{.name = "urgent", .memory = 60_MiB, .compute = 100_pct, .level = {1}};
    const auto notice = plan.preempt(urgent, 10s);
    expect(notice && !notice->victims.empty(), "for an urgent one somebody has to go, and is told");
    // the victims leave by themselves; otherwise they would be evicted at notice->until
    for (const auto& victim : notice->victims) leave(victim);
    tenants.emplace("urgent", plan.take_place(*notice, urgent));

    for (const char* name : {"d", "e", "large"}) leave(name);
    const auto night = plan.reserve(large, shared.now() + 1h, shared.now() + 9h);
    expect(night && arrive(small, "f") == gpushare::admission_result::queued,
           "room that is reserved for later isn't given away");
}
