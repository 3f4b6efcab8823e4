// SPDX-License-Identifier: Apache-2.0
// Two devices that tenants are admitted to by a placement policy: who finds no room waits, somebody in the way is moved with its
// data while it lives, and somebody of a lower level is told to go, with notice. Each plan is a value that is applied afterwards.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/placement/admission_queue.hpp>
#include <gpushare/placement/defragment.hpp>
#include <gpushare/placement/placement_policies.hpp>
#include <gpushare/placement/preemption.hpp>
#include <gpushare/tenant/move.hpp>
#include <gpushare/tenant/placed_by.hpp>
#include <gpushare/tenant/tenancy.hpp>

using namespace gpushare::literals;
using tenancy = gpushare::tenancy<gpushare::host::node>;
using outcome = gpushare::admission_result::result;

namespace {

void expect(bool good, const char* what) {
    std::printf("%s %s\n", good ? "ok:  " : "NOT: ", what);
    if (!good) std::exit(1);
}

struct server {
    gpushare::host::node node{{.devices = 2, .memory = 64_MiB, .sms = 2}};
    tenancy shared{node};
    gpushare::cluster plan = gpushare::as_cluster(shared);  // what is placed where
    gpushare::bin_packing policy{};
    gpushare::admission_queue queue{};
    std::map<std::uint64_t, gpushare::tenant_spec> waiting{};
    std::map<std::string, tenancy::tenant> tenants{};

    void admit(gpushare::tenant_spec spec, const gpushare::placement& where) {
        spec.on.assign(where.devices.begin(), where.devices.end());
        tenants.emplace(spec.name, shared.admit(spec));
    }
    outcome arrive(const gpushare::tenant_spec& spec) {
        auto a = queue.submit(shared.now(), policy, plan, {.members = {placement_of(spec)}, .level = spec.level});
        if (a.outcome == outcome::placed) admit(spec, a.placements[0]);
        if (a.outcome == outcome::queued) waiting.emplace(a.id, spec);
        return a.outcome;
    }
    void admit_who_fits() {
        for (auto& a : queue.advance(shared.now(), policy, plan))
            if (a.outcome == outcome::placed) admit(std::move(waiting.extract(a.id).mapped()), a.placements[0]);
    }
    void leave(const std::string& name) {
        plan.release(place_of(tenants.at(name).spec()));
        tenants.erase(name);  // closes it
    }
    std::vector<gpushare::placed_tenant> placed() const {  // in the order of their names
        std::vector<gpushare::placed_tenant> all;
        for (const auto& [name, t] : tenants) all.push_back({place_of(t.spec()), t.spec().level});
        return all;
    }
    std::string name_of(std::size_t number) const { return std::next(tenants.begin(), std::ptrdiff_t(number))->first; }
};

}  // namespace

int main() {
    server s;
    expect(s.arrive({.name = "a", .memory = 16_MiB, .compute = 25_pct}) == outcome::placed, "a is admitted");
    expect(s.arrive({.name = "x", .memory = 32_MiB, .compute = 75_pct}) == outcome::placed, "x is admitted beside it");
    expect(s.arrive({.name = "b", .memory = 16_MiB, .compute = 25_pct}) == outcome::placed,
           "b is, on the other device");
    s.leave("x");
    expect(s.arrive({.name = "big", .memory = 48_MiB, .compute = 100_pct}) == outcome::queued,
           "big waits: no device is whole");

    constexpr std::size_t size = 1 << 20;
    std::map<std::string, std::vector<gpushare::moving_block>> data;
    for (auto& [name, t] : s.tenants) {
        data[name].push_back({.at = t.memory().allocate(size), .size = size});
        std::memset(data[name][0].at, name[0], size);
    }
    std::vector<gpushare::placement> movable;
    for (const auto& p : s.placed()) movable.push_back(p.where);
    const auto room =
        make_room(s.policy, s.plan, movable, gpushare::placement_of({.memory = 48_MiB, .compute = 100_pct}), 2);
    expect(room && room->moves.size() == 1, "one move makes a device whole");
    for (const auto& m : room->moves) {
        auto& t = s.tenants.at(s.name_of(m.which));
        auto& blocks = data[t.name()];
        auto moved = move_tenant(s.shared, t, {m.to.devices.begin(), m.to.devices.end()}, blocks);
        t = std::move(moved.successor);
        s.plan.release(m.from), s.plan.apply(m.to);
        std::printf("      %s: %llu bytes, waited %lld us, copied %lld us, clean memory %lld us\n", t.name().c_str(),
                    static_cast<unsigned long long>(moved.report.moved.count()),
                    static_cast<long long>(moved.report.wait.count() / 1000),
                    static_cast<long long>(moved.report.copy.count() / 1000),
                    static_cast<long long>(moved.report.scrub.count() / 1000));
        expect(moved.report.closed.complete && moved.report.late == 0, "it has left nothing behind");
        expect(std::memcmp(blocks[0].at, std::string(size, t.name()[0]).data(), size) == 0, "its data is what it was");
    }
    s.admit_who_fits();
    expect(s.tenants.contains("big"), "big is admitted");

    const gpushare::tenant_spec urgent{.name = "urgent", .memory = 60_MiB, .compute = 100_pct, .level = {1}};
    const auto victims = plan_preemption(s.policy, s.plan, s.placed(), placement_of(urgent), urgent.level);
    expect(victims && victims->victims.size() == 2, "two small tenants would have to go for an urgent one");
    gpushare::preemption notice(*victims, s.shared.now(), std::chrono::seconds(10));
    expect(!notice.ready(s.shared.now()), "they are told, and have some time");
    std::vector<std::string> told;
    for (const auto v : victims->victims) told.push_back(s.name_of(v));
    for (std::size_t i = 0; i < told.size(); ++i) {
        s.leave(told[i]);
        expect(notice.left(victims->victims[i]), (told[i] + " goes by itself").c_str());
    }
    expect(notice.ready(s.shared.now()), "all have gone");
    expect(!notice.finish(s.plan), "the place is the urgent one's");
    s.admit(urgent, victims->added);
    expect(s.tenants.at("urgent").memory().free() == 60_MiB, "which has what it was promised");
}
