// SPDX-License-Identifier: Apache-2.0
// Tenancies under other policies than weighted shares.
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/compute/policies/any_policy.hpp>
#include <gpushare/compute/policies/by_order.hpp>
#include <gpushare/compute/policies/capped.hpp>
#include <gpushare/compute/policies/policy_tree.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"

namespace tenancy_policy_test {

using namespace gpushare;
using namespace gpushare::literals;
using namespace std::chrono_literals;

namespace {

/// Remembers what it is told of each client, and refuses whom it is told to.
struct witness {
    struct notes {
        std::vector<client_settings> told;
        bool refuses = false;
        std::function<void()> refused{};  ///< called at each refusal
    };
    notes* seen = nullptr;
    weighted_fair inside{};

    failure tell(const client_settings& s) const {
        if (seen == nullptr) return {};
        if (seen->refuses) {
            if (seen->refused) seen->refused();
            return {errc::share_exceeded};
        }
        seen->told.push_back(s);
        return {};
    }
    failure add(client_id c, const client_settings& s) {
        const auto why = tell(s);
        return why.code != errc::none ? why : inside.add(c, s);
    }
    failure change(client_id c, const client_settings& s) {
        const auto why = tell(s);
        return why.code != errc::none ? why : inside.change(c, s);
    }
    void remove(client_id c) noexcept { inside.remove(c); }
    void wake(client_id c, const queue_head& head, instant now) noexcept { inside.wake(c, head, now); }
    void sleep(client_id c) noexcept { inside.sleep(c); }
    [[nodiscard]] choice pick(instant now) noexcept { return inside.pick(now); }
    void serve(client_id c, ns cost, instant now) noexcept { inside.serve(c, cost, now); }
    void correct(client_id c, ns delta) noexcept { inside.correct(c, delta); }
};
static_assert(compute_policy<witness>);

template <class Tenant>
void run_some(Tenant& t) {
    for (int i = 0; i < 3; ++i) {
        const auto done = t.submit([](auto& s) { s.launch({}, [](auto&) {}); });
        CHECK(done.wait());
        CHECK(done.status() == errc::none);
    }
}

}  // namespace

TEST_CASE("a tenancy has the policy that it is asked for", "[tenant]") {
    host::node node{{.devices = 2, .memory = 1_MiB}};
    tenancy weighted{node};
    static_assert(std::is_same_v<decltype(weighted), tenancy<host::node, weighted_fair>>);
    tenancy<host::node, earliest_deadline> urgent{node};
    auto chat = urgent.admit({.name = "chat", .memory = 2_KiB, .devices = 2, .compute = 50_pct, .slo = 5ms});
    run_some(chat);
    CHECK(chat.spec().slo == 5ms);
    tenancy equal{node, {}, [](device_id) { return equal_share{2}; }};
    static_assert(std::is_same_v<decltype(equal), tenancy<host::node, equal_share>>);
    auto a = equal.admit({.name = "a", .memory = 1_KiB, .compute = 10_pct, .on = {device_id{0}}});
    auto b = equal.admit({.name = "b", .memory = 1_KiB, .compute = 10_pct, .on = {device_id{0}}});
    run_some(a);
    try {
        (void)equal.admit({.name = "c", .memory = 1_KiB, .compute = 10_pct, .on = {device_id{0}}});
        FAIL("the policy has room for two");
    } catch (const operation_error& e) {
        CHECK(e.code() == errc::share_exceeded);
        CHECK(std::string(e.tenant()) == "c");
    }
    CHECK(equal.unpromised({0}) == 80_pct);  // and nothing was taken
    CHECK(equal.rooms()[0].free == 1_MiB - 2_KiB);
    (void)equal.admit({.name = "c", .memory = 1_KiB, .compute = 10_pct, .on = {device_id{1}}});
}

TEST_CASE("shares are promised level by level", "[tenant]") {
    host::node node{{.devices = 1, .memory = 1_MiB}};
    tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 1_KiB, .compute = 80_pct, .level = {1}});
    auto batch = shared.admit({.name = "batch", .memory = 1_KiB, .compute = 80_pct});
    CHECK(shared.unpromised({0}, priority{0}) == 20_pct);
    CHECK(shared.unpromised({0}, priority{1}) == 20_pct);
    CHECK(shared.unpromised({0}, priority{2}) == 100_pct);
    CHECK(support::code_of([&] { (void)shared.admit({.name = "c", .memory = 1_KiB, .compute = 30_pct}); }) ==
          errc::share_exceeded);
    CHECK(batch.try_resize({.level = priority{1}}) == errc::share_exceeded);
    CHECK(batch.try_resize({.compute = 20_pct, .level = priority{1}}) == errc::none);
    CHECK(shared.unpromised({0}, priority{0}) == 100_pct);
    CHECK(shared.unpromised({0}) == 0_pct);
    CHECK(chat.try_resize({.compute = 90_pct}) == errc::share_exceeded);
    CHECK(chat.try_resize({.compute = 90_pct, .level = priority{0}}) == errc::none);
    CHECK(chat.close().complete);
    CHECK(batch.close().complete);
    CHECK(shared.unpromised({0}) == share::whole());
}

TEST_CASE("a cap that no policy would keep is refused by name", "[tenant]") {
    host::node node{{.devices = 1, .memory = 1_MiB}};
    tenancy<host::node, earliest_deadline> urgent{node};
    CHECK_THROWS_WITH((void)urgent.admit({.name = "a", .memory = 1_KiB, .compute = 30_pct, .cap = 40_pct}),
                      Catch::Contains("tenant 'a'") && Catch::Contains("no caps") && Catch::Contains("weighted_fair"));
    CHECK(urgent.unpromised({0}) == share::whole());
    auto a = urgent.admit({.name = "a", .memory = 1_KiB, .compute = 30_pct});
    CHECK_THROWS_WITH(a.resize({.compute = 50_pct, .cap = 40_pct}), Catch::Contains("no caps"));
    CHECK(a.spec().cap == share::whole());
    CHECK(urgent.unpromised({0}) == 70_pct);
    tenancy<host::node, capped<earliest_deadline>> limits{node};
    auto b = limits.admit({.name = "b", .memory = 1_KiB, .compute = 30_pct, .cap = 40_pct});
    tenancy plain{node};
    auto c = plain.admit({.name = "c", .memory = 1_KiB, .compute = 30_pct, .cap = 40_pct});
    CHECK(plain.limiter_of({0}).set_policy({}) == errc::none);
}

TEST_CASE("a class under a policy that has none is refused by name", "[tenant]") {
    host::node node{{.devices = 1, .memory = 1_MiB}};
    const tenant_spec of_class{.name = "a", .memory = 1_KiB, .compute = 30_pct, .group = 1};
    const auto names_it = [](auto admit) {
        CHECK_THROWS_WITH(
            admit(), Catch::Contains("tenant 'a'") && Catch::Contains("no classes") && Catch::Contains("policy_tree"));
    };
    tenancy fair_ones{node};
    names_it([&] { (void)fair_ones.admit(of_class); });
    CHECK(fair_ones.unpromised({0}) == share::whole());
    auto a = fair_ones.admit({.name = "a", .memory = 1_KiB, .compute = 30_pct});
    names_it([&] { a.resize({.compute = 50_pct, .group = 2}); });
    CHECK(a.spec().group == 0);
    CHECK(fair_ones.unpromised({0}) == 70_pct);
    tenancy<host::node, earliest_deadline> urgent{node};
    names_it([&] { (void)urgent.admit(of_class); });
    tenancy<host::node, capped<earliest_deadline>> within{node};
    names_it([&] { (void)within.admit(of_class); });
    tenancy<host::node, policy_tree<weighted_fair, fair>> tree{node};
    CHECK(tree.admit(of_class).spec().group == 1);
}

TEST_CASE("a tenant's entitlement reaches the policy, and so does each change", "[tenant]") {
    host::node node{{.devices = 1, .memory = 1_MiB}};
    witness::notes seen;
    tenancy shared{node, {}, [&](device_id) { return witness{&seen}; }};
    auto t = shared.admit({.name = "t",
                           .memory = 1_KiB,
                           .compute = 40_pct,
                           .level = {2},
                           .ceiling = priority{3},
                           .narrowest = sm_width(0.5),
                           .cap = 60_pct,
                           .soft_cap = true,
                           .slo = 7ms,
                           .group = 3,
                           .longest = 2ms,
                           .yields_within = 1ms,
                           .keeps = gpushare::sm_width(0.5)});
    client_settings expected{.weight = 40_pct,
                             .level = {2},
                             .ceiling = {3},
                             .narrowest = sm_width(0.5),
                             .longest = 2ms,
                             .yields_within = 1ms,
                             .cap = 60_pct,
                             .soft_cap = true,
                             .keeps = gpushare::sm_width(0.5),
                             .slo = 7ms,
                             .group = 3,
                             .tag = t.tag(),
                             .name = "t"};
    REQUIRE(seen.told.size() == 1);
    CHECK((seen.told.back() == expected));
    t.resize({.ceiling = priority{5},
              .narrowest = sm_width(1),
              .cap = 50_pct,
              .soft_cap = false,
              .slo = 8ms,
              .group = 4,
              .longest = 3ms,
              .yields_within = 2ms,
              .keeps = gpushare::sm_width(0.25)});
    expected.ceiling = {5};
    expected.narrowest = sm_width(1);
    expected.cap = 50_pct;
    expected.soft_cap = false;
    expected.slo = 8ms;
    expected.group = 4;
    expected.longest = 3ms;
    expected.yields_within = 2ms;
    expected.keeps = gpushare::sm_width(0.25);
    CHECK((seen.told.back() == expected));
    CHECK(t.spec().group == 4);
    CHECK(shared.limiter_of({0}).wait_bound() >= 3ms);
    SECTION("what the policy refuses changes nothing") {
        seen.refuses = true;
        CHECK(support::code_of([&] { t.resize({.memory = 2_KiB, .compute = 90_pct, .slo = 4ms}); }) ==
              errc::share_exceeded);
        seen.refuses = false;
        CHECK(t.spec().slo == 8ms);
        CHECK(t.spec().memory == 1_KiB);
        CHECK(t.spec().compute == 40_pct);
        CHECK(shared.unpromised({0}) == 60_pct);
        CHECK(shared.rooms()[0].free == 1_MiB - 1_KiB);
        run_some(t);
    }
}

TEST_CASE("a watcher of a tenant's grant learns of each change, and last of its present state", "[tenant]") {
    host::node node{{.devices = 1, .memory = 1_MiB}};
    witness::notes seen;
    tenancy shared{node, {}, [&](device_id) { return witness{&seen}; }};
    auto a = shared.admit({.name = "a", .memory = 1_KiB, .compute = 40_pct});
    auto b = shared.admit({.name = "b", .memory = 1_KiB, .compute = 40_pct});
    std::vector<tenant_spec> told;
    std::vector<std::uint32_t> others;
    const auto other = [&](const tenant_spec& s) { others.push_back(s.compute.permille()); };
    auto also = std::make_optional(a.watch_grant(other));
    {
        auto made = a.watch_grant([&](const tenant_spec& s) {
            told.push_back(s);
            if (told.size() > 1) throw std::runtime_error("too late to refuse");
        });
        const auto watch = std::move(made);
        REQUIRE(told.size() == 1);
        CHECK(told.back().name == "a");
        CHECK(told.back().compute == 40_pct);
        a.resize({.compute = 30_pct, .level = priority{2}});
        REQUIRE(told.size() == 2);
        CHECK(told.back().compute == 30_pct);
        CHECK(told.back().level == priority{2});
        also.reset();
        using update = decltype(shared)::update;
        shared.resize_together(std::vector{update{&a, {.compute = 20_pct}}, update{&b, {.compute = 50_pct}}});
        REQUIRE(told.size() == 3);
        CHECK(told.back().compute == 20_pct);
        seen.refuses = true;
        CHECK(a.try_resize({.compute = 10_pct}).code == errc::share_exceeded);
        seen.refuses = false;
        CHECK(told.back().compute == 20_pct);
        CHECK_THROWS_AS(a.watch_grant([](const tenant_spec&) { throw std::runtime_error("at once"); }),
                        std::runtime_error);
    }
    const auto so_often = told.size();
    a.resize({.compute = 40_pct});
    CHECK(told.size() == so_often);
    const auto outlives = b.watch_grant(other);
    CHECK(b.close().complete);
    b = shared.admit({.name = "b", .memory = 1_KiB});
    CHECK((others == std::vector<std::uint32_t>{400, 300, 500}));
}

TEST_CASE("a watcher that was told an undone grant is told the old one, whatever the policy says", "[tenant]") {
    host::node node{{.devices = 1, .memory = 1_MiB}};
    witness::notes seen;
    tenancy shared{node, {}, [&](device_id) { return witness{&seen}; }};
    auto a = shared.admit({.name = "a", .memory = 1_KiB, .compute = 40_pct});
    auto b = shared.admit({.name = "b", .memory = 1_KiB, .compute = 40_pct});
    std::vector<std::uint32_t> told;
    std::optional<grant_watch> watch;
    seen.refused = [&] {  // before the change is undone, which the policy refuses as well
        if (watch) return;
        std::async(std::launch::async, [&] {
            watch.emplace(a.watch_grant([&](const tenant_spec& s) { told.push_back(s.compute.permille()); }));
        }).get();
    };
    seen.refuses = true;
    const bool together = GENERATE(false, true);
    if (together) {
        using update = decltype(shared)::update;
        CHECK_THROWS_AS(
            shared.resize_together(std::vector{update{&a, {.compute = 20_pct}}, update{&b, {.compute = 50_pct}}}),
            operation_error);
    } else {
        CHECK(a.try_resize({.compute = 20_pct}).code == errc::share_exceeded);
    }
    CHECK(a.spec().compute == 40_pct);
    CHECK((told == std::vector<std::uint32_t>{200, 400}));
}

TEST_CASE("a refused change leaves a tenant without a ceiling of its own as it was", "[tenant]") {
    host::node node{{.devices = 1, .memory = 1_MiB}};
    witness::notes seen;
    tenancy shared{node, {}, [&](device_id) { return witness{&seen}; }};
    auto a = shared.admit({.name = "a", .memory = 1_KiB, .compute = 40_pct});
    auto b = shared.admit({.name = "b", .memory = 1_KiB, .compute = 40_pct});
    seen.refuses = true;
    const bool together = GENERATE(false, true);
    if (together) {
        using update = decltype(shared)::update;
        CHECK_THROWS_AS(shared.resize_together(std::vector{update{&a, {.slo = 1ms}}, update{&b, {.slo = 1ms}}}),
                        operation_error);
    } else {
        CHECK(a.try_resize({.slo = 1ms}).code == errc::share_exceeded);
    }
    seen.refuses = false;
    CHECK_FALSE(a.spec().ceiling);
    a.resize({.level = priority{-2}});  // nor may its requests be above that from now on
    CHECK(seen.told.back().level == priority{-2});
    CHECK(seen.told.back().ceiling == gpushare::no_priority);
}

TEST_CASE("of a refused change only memory that others have by now doesn't come back", "[tenant]") {
    host::node node{{.devices = 1, .memory = 1_MiB}};
    witness::notes seen;
    tenancy shared{node, {}, [&](device_id) { return witness{&seen}; }};
    auto a = shared.admit({.name = "a", .memory = 600_KiB, .compute = 40_pct, .slo = 5ms});
    auto b = shared.admit({.name = "b", .memory = 100_KiB, .compute = 40_pct});
    auto c = shared.admit({.name = "c", .memory = 1_KiB, .burst = 1000_KiB});
    void* taken = nullptr;
    seen.refused = [&] {  // of what was just given away
        if (taken == nullptr) taken = c.memory().allocate(700_KiB);
    };
    seen.refuses = true;
    const bool together = GENERATE(false, true);
    const tenant_change change{.memory = 100_KiB, .compute = 10_pct, .slo = 1ms};
    if (together) {
        using update = decltype(shared)::update;
        CHECK_THROWS_AS(shared.resize_together(std::vector{update{&a, change}, update{&b, {.compute = 70_pct}}}),
                        operation_error);
    } else {
        CHECK(a.try_resize(change).code == errc::share_exceeded);
    }
    seen.refuses = false;
    REQUIRE(taken != nullptr);
    CHECK(a.spec().memory == 100_KiB);
    CHECK(a.memory().limit().usage().guaranteed == 100_KiB);
    CHECK(a.spec().compute == 40_pct);
    CHECK(a.spec().slo == 5ms);
    CHECK(b.spec().compute == 40_pct);
    CHECK(shared.unpromised({0}) == 20_pct);
    CHECK(c.memory().deallocate(taken, 700_KiB) == errc::none);
}

TEST_CASE("objects of a watch's function are destroyed when others may be added and removed", "[tenant]") {
    const auto all = std::make_shared<gpushare::detail::grant_followers>(tenant_spec{});
    const auto same = [](tenant_spec&) {};
    std::future<void> another;
    bool free = false;
    auto owned = std::shared_ptr<void>(nullptr, [&](void*) {
        another = std::async(std::launch::async, [&] { all->remove(0); });
        free = another.wait_for(5min) == std::future_status::ready;
    });
    const auto number = all->add([kept = std::move(owned)](const tenant_spec&) {}, same);
    all->remove(number);
    CHECK(free);
    all->remove(number);
}

TEST_CASE("a tenant without a share goes below all who have one, unless it has a level of its own", "[tenant]") {
    host::node node{{.devices = 1, .memory = 1_MiB, .sms = 1, .timing = host::timing::modelled}};
    witness::notes seen;
    {
        tenancy shared{node, {}, [&](device_id) { return witness{&seen}; }};
        auto lent = shared.admit({.name = "lent", .memory = 1_KiB});
        CHECK(seen.told.back().level == gpushare::best_effort);
        lent.resize({.compute = 10_pct});
        CHECK(seen.told.back().level == gpushare::priority{});
        CHECK(seen.told.back().weight == 10_pct);
        lent.resize({.level = gpushare::priority{-1}});
        CHECK(seen.told.back().level == gpushare::priority{-1});
        lent.resize({.compute = 0_pct, .level = gpushare::priority{}});
        CHECK(seen.told.back().level == gpushare::best_effort);
        auto urgent = shared.admit({.name = "urgent", .memory = 1_KiB, .level = {1}});
        CHECK(seen.told.back().level == gpushare::priority{1});
    }
    tenancy<host::node> shared{node, {.limiter = {.depth = 1, .horizon = 1ns}}};
    auto lent = shared.admit({.name = "lent", .memory = 1_KiB});
    auto paid = shared.admit({.name = "paid", .memory = 1_KiB, .compute = 10_pct});
    const auto work = [](auto& s) { s.launch({.hold = 1ms}, [](auto&) {}); };
    (void)node.ledger({0}).take();
    node.faults({0}).stall(paid.work_stream());
    auto first = paid.submit(work);
    auto behind = lent.submit(work);  // was there before the second
    auto second = paid.submit(work);
    node.faults({0}).resume(paid.work_stream());
    for (auto* one : {&first, &behind, &second}) REQUIRE(one->wait(std::chrono::steady_clock::now() + 5min));
    const std::vector<host::block_record> ran = node.ledger({0}).take().blocks;
    REQUIRE(ran.size() == 3);
    CHECK(ran[1].tag == paid.tag());
    CHECK(ran[2].tag == lent.tag());
}

TEST_CASE("a level changes where shares are promised, though others have all of it", "[tenant]") {
    host::node node{{.devices = 1, .memory = 1_MiB}};
    tenancy<host::node, hard_share> shared{node};
    auto all = shared.admit({.name = "all", .memory = 1_KiB, .compute = 90_pct, .level = {1}});
    auto some = shared.admit({.name = "some", .memory = 1_KiB, .compute = 10_pct});
    some.resize({.level = gpushare::priority{1}});
    CHECK(some.spec().level == gpushare::priority{1});
}

TEST_CASE("a tenancy's policies are replaced while tenants work, by any kind, trees too", "[tenant]") {
    host::node node{{.devices = 2, .memory = 1_MiB}};
    tenancy shared{node, {}, [](device_id d) {
                       return d.index == 0 ? any_policy{hard_share{}} : any_policy{policy_tree<weighted_fair, fair>{}};
                   }};
    auto a = shared.admit({.name = "a", .memory = 1_KiB, .compute = 50_pct, .on = {device_id{0}}, .group = 0});
    auto b = shared.admit({.name = "b", .memory = 1_KiB, .compute = 50_pct, .on = {device_id{1}}, .group = 1});
    run_some(a);
    run_some(b);
    CHECK(shared.limiter_of({0}).set_policy(earliest_deadline{}) == errc::none);
    // It has no classes.
    CHECK(shared.limiter_of({1}).set_policy(capped<weighted_fair>{}) == errc::invalid_specification);
    b.resize({.group = 0});
    CHECK(shared.limiter_of({1}).set_policy(capped<weighted_fair>{}) == errc::none);
    run_some(a);
    run_some(b);
    CHECK(a.close().complete);
    CHECK(b.close().complete);
}

TEST_CASE("a tenant's hard cap holds on the device", "[tenant]") {
    host::node node{{.devices = 1, .memory = 1_MiB, .sms = 1, .timing = host::timing::modelled}};
    tenancy<host::node, capped<weighted_fair>> shared{node};
    auto t = shared.admit({.name = "t", .memory = 1_KiB, .compute = 100_pct, .cap = 10_pct});
    const auto begin = node.get_clock().now();
    std::vector<decltype(t)::ticket> tickets;
    for (int i = 0; i < 40; ++i) tickets.push_back(t.submit([](auto& s) { s.launch({.hold = 500us}, [](auto&) {}); }));
    for (const auto& done : tickets) CHECK(done.wait());
    // 20 ms of work at a tenth of the device: the pacer lets 5 ms of it be caught up, and the last
    // one be begun.
    CHECK(node.get_clock().now() - begin >= 140ms);
}

}  // namespace tenancy_policy_test
