// SPDX-License-Identifier: Apache-2.0
// Tenants from a list that changes: tenants that come, stay, change and go. A bad list changes
// nothing; a full device refuses one tenant and doesn't affect the others.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <string>
#include <thread>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/compute/policies/by_order.hpp>
#include <gpushare/tenant/specification_text.hpp>
#include <gpushare/tenant/tenant_directory.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::parse_specifications;
using gpushare::tenant_spec;

namespace host = gpushare::host;
using kind = gpushare::directory_outcome::kind;

namespace {

struct server {
    host::node node{{.devices = 2, .memory = 64_MiB, .sms = 2, .timing = host::timing::modelled}};
    gpushare::tenancy<host::node> shared{node, {.spill_to = std::pmr::new_delete_resource()}};
    gpushare::tenant_directory<host::node> tenants{shared};

    /// "a admitted, b refused"
    std::string apply(const char* text, gpushare::instant deadline = gpushare::never) {
        std::string told;
        for (const auto& o : tenants.apply(parse_specifications(text), deadline)) {
            told.append(told.empty() ? "" : ", ").append(o.tenant).append(" ").append(to_string(o.what));
            CHECK((o.what == kind::refused) == (o.code != errc::none));
            CHECK((o.what == kind::refused) == !o.why.empty());
        }
        return told;
    }
    tenant_spec spec(const char* name) { return tenants.find(name)->spec(); }
};

}  // namespace

TEST_CASE("a list is applied, and applied again changes nothing", "[tenant]") {
    server s;
    const char* list = "unit=1MiB  name=a memory=8MiB compute=60%  name=b memory=16MiB compute=40% burst=4MiB";
    CHECK(s.apply(list) == "a admitted, b admitted");
    CHECK(s.apply(list) == "a unchanged, b unchanged");
    CHECK(s.tenants.all().size() == 2);
    CHECK(s.spec("b").burst == 4_MiB);
    CHECK(s.tenants.find("c") == nullptr);
}

TEST_CASE("every field that can change does so live", "[tenant]") {
    server s;
    CHECK(s.apply("name=a memory=8MiB compute=60% spill=8MiB") == "a admitted");
    const auto a = s.tenants.find("a");
    void* const held = a->memory().allocate(1 << 20);
    CHECK(s.apply("name=a memory=9MiB burst=1MiB compute=50% priority=1 cap=70% soft_cap=yes slo=5ms longest=1ms "
                  "yields_within=500us keeps=25% queue_limit=3 wait=2ms spill=4MiB") == "a changed");
    const auto now = a->spec();
    CHECK(now.memory == 9_MiB);
    CHECK(now.burst == 1_MiB);
    CHECK(now.compute == 50_pct);
    CHECK(now.level == gpushare::priority{1});
    CHECK(now.cap == 70_pct);
    CHECK(now.soft_cap);
    CHECK(now.slo == 5ms);
    CHECK(now.longest == 1ms);
    CHECK(now.yields_within == 500us);
    CHECK(now.keeps == gpushare::sm_width(0.25));
    CHECK(now.queue_limit == 3);
    CHECK(now.wait == gpushare::ns{2ms});
    CHECK(a->memory().waits() == 2ms);
    CHECK(now.spill == 4_MiB);
    CHECK(s.apply("name=a memory=9MiB burst=1MiB compute=50% priority=1 cap=70% soft_cap=yes slo=5ms "
                  "longest=1ms yields_within=500us keeps=25% queue_limit=3") == "a unchanged");
    CHECK(s.tenants.find("a") == a);
    a->memory().deallocate(held, 1 << 20);
}

TEST_CASE("a tenant that is gone from the list is closed, and makes room", "[tenant]") {
    server s;
    CHECK(s.apply("name=a memory=60MiB compute=100% on=0") == "a admitted");
    const auto kept = s.tenants.find("a");
    CHECK(s.apply("name=b memory=60MiB compute=100% on=0") == "a closed, b admitted");
    CHECK(s.tenants.find("a") == nullptr);
    try {
        (void)kept->memory();
        FAIL("a closed tenant gave memory");
    } catch (const gpushare::error& e) {
        CHECK(e.code() == errc::closed);
    }
}

TEST_CASE("a tenant whose work isn't over at the deadline is closing until a later list", "[tenant]") {
    server s;
    CHECK(s.apply("name=a memory=8MiB compute=50% on=0") == "a admitted");
    {
        const auto a = s.tenants.find("a");
        auto holds = a->acquire();
        REQUIRE(holds);
        CHECK(s.apply("name=b memory=8MiB compute=50% on=0", gpushare::instant::min()) == "a closing, b admitted");
        CHECK(s.tenants.find("a") == nullptr);
        CHECK(s.apply("name=b memory=8MiB compute=50% on=0  name=a memory=8MiB compute=50% on=0",
                      gpushare::instant::min()) == "a closing, b unchanged, a refused");
    }
    CHECK(s.apply("name=b memory=8MiB compute=50% on=0  name=a memory=8MiB compute=50% on=0") ==
          "a closed, b unchanged, a admitted");
}

TEST_CASE("a shrinking tenant makes room for a growing one", "[tenant]") {
    server s;
    CHECK(s.apply("name=a memory=20MiB compute=30% on=0  name=b memory=40MiB compute=70% on=0") ==
          "a admitted, b admitted");
    CHECK(s.apply("name=a memory=40MiB compute=70% on=0  name=b memory=20MiB compute=30% on=0") ==
          "b changed, a changed");
}

TEST_CASE("tenants that trade memory for device time change at once", "[tenant]") {
    host::node node{{.memory = 30_MiB, .sms = 1}};
    gpushare::tenancy<host::node> shared{node};
    gpushare::tenant_directory<host::node> tenants{shared};
    const auto apply = [&](const char* text) {
        std::string told;
        for (const auto& o : tenants.apply(parse_specifications(text)))
            told.append(told.empty() ? "" : ", ").append(o.tenant).append(" ").append(to_string(o.what));
        return told;
    };
    const auto has = [&](const char* name, gpushare::bytes memory, gpushare::share compute) {
        const auto t = tenants.find(name);
        return t->spec().memory == memory && t->spec().compute == compute && t->memory().free() == memory;
    };
    CHECK(apply("name=a memory=10MiB compute=60%  name=b memory=20MiB compute=40%") == "a admitted, b admitted");
    CHECK(apply("name=a memory=20MiB compute=40%  name=b memory=10MiB compute=60%") == "a changed, b changed");
    CHECK((has("a", 20_MiB, 40_pct) && has("b", 10_MiB, 60_pct)));
    // Three in a circle, of whom each waits for the next, after one of them is replaced.
    CHECK(apply("name=a memory=5MiB compute=60%  name=b memory=10MiB compute=10%  name=c memory=15MiB compute=30%") ==
          "b changed, a changed, c admitted");
    CHECK(apply("name=a memory=10MiB compute=30%  name=b memory=15MiB compute=60%  name=c memory=5MiB compute=10%") ==
          "c changed, a changed, b changed");
    CHECK(shared.rooms()[0].free == 0_B);
    // One asks for too much, and the others trade all the same.
    CHECK(apply("name=a memory=15MiB compute=30%  name=b memory=10MiB compute=60%  name=c memory=5MiB compute=20%") ==
          "b changed, a changed, c refused");
    CHECK((has("a", 15_MiB, 30_pct) && has("b", 10_MiB, 60_pct) && has("c", 5_MiB, 10_pct)));
}

TEST_CASE("changes of several tenants are all made or none", "[tenant]") {
    host::node node{{.devices = 2, .memory = 30_MiB, .sms = 1}};
    gpushare::tenancy<host::node> shared{node};
    using update = gpushare::tenancy<host::node>::update;
    auto a = shared.admit({.name = "a", .memory = 20_MiB, .devices = 2, .compute = 60_pct});
    auto b = shared.admit({.name = "b", .memory = 20_MiB, .devices = 1, .compute = 40_pct, .on = {{0}}});
    auto greedy = shared.admit({.name = "greedy", .memory = 1_MiB, .burst = gpushare::all_burst, .on = {{1}}});
    void* const lent = greedy.memory().allocate(18 << 20);
    const auto same = [&] {
        return a.spec().memory == 20_MiB && a.memory(0).free() == 10_MiB && a.memory(1).free() == 10_MiB &&
               a.spec().compute == 60_pct && b.spec().memory == 20_MiB && b.memory().free() == 20_MiB &&
               b.spec().compute == 40_pct && shared.unpromised({0}) == 0_pct;
    };
    // On device 0 it would do, on device 1 somebody has what is lent.
    const auto r = shared.try_resize_together(std::vector{update{&b, {.memory = 10_MiB, .compute = 60_pct}},
                                                          update{&a, {.memory = 40_MiB, .compute = 40_pct}}});
    CHECK(r.why.code == errc::no_room);
    CHECK(r.which == 1);
    CHECK(r.why.left == (12_MiB).count());
    CHECK(same());
    CHECK(shared.try_resize_together(std::vector{update{&b, {.compute = 41_pct}}, update{&a, {.memory = 2_MiB}}})
              .why.code == errc::share_exceeded);
    CHECK(shared.try_resize_together(std::vector{update{&a, {.memory = 2_MiB}}, update{&b, {.slo = -1ns}}}).which == 1);
    CHECK(shared.try_resize_together(std::vector{update{&a, {.memory = 2_MiB}}, update{&a, {.memory = 4_MiB}}})
              .why.code == errc::duplicate_name);
    CHECK(same());
    CHECK(greedy.memory().deallocate(lent, 18 << 20) == errc::none);
    shared.resize_together(std::vector{update{&b, {.memory = 10_MiB, .compute = 60_pct}},
                                       update{&a, {.memory = 40_MiB, .compute = 40_pct}}});
    CHECK(a.memory(1).free() == 20_MiB);
    CHECK(b.memory().free() == 10_MiB);
    b.close();
    CHECK_THROWS_WITH(shared.resize_together(std::vector{update{&a, {.memory = 2_MiB}}, update{&b, {.memory = 1_MiB}}}),
                      Catch::Contains("'b'"));
    CHECK(a.spec().memory == 40_MiB);
}

TEST_CASE("shares change together if each level's fit afterwards, and else not at all", "[tenant][property]") {
    host::node node{{.devices = 2, .memory = 30_MiB, .sms = 1}};
    std::size_t changed = 0, refused = 0;
    for (std::uint64_t nth = 0; nth < support::few(std::uint64_t{10}); ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        gpushare::tenancy<host::node> shared{node};
        using update = gpushare::tenancy<host::node>::update;
        std::vector<gpushare::tenancy<host::node>::tenant> all;
        for (int i = 0; i < 5; ++i)
            all.push_back(shared.admit({.name = std::to_string(i),
                                        .memory = 1_MiB,
                                        .compute = 10_pct,
                                        .level = {i % 2},
                                        .on = {{static_cast<std::uint32_t>(i % 3 == 0)}}}));
        struct has {
            std::uint32_t permille;
            int level;
        };
        std::vector<has> then;
        for (const auto& t : all) then.push_back({t.spec().compute.permille(), t.spec().level.level});
        const auto promised = [&](const std::vector<has>& of, std::uint32_t device, int level) {
            std::uint32_t sum = 0;
            for (std::size_t i = 0; i < of.size(); ++i)
                sum += of[i].level == level && all[i].spec().on[0].index == device ? of[i].permille : 0;
            return sum;
        };
        for (int step = 0; step < 100; ++step) {
            std::vector<update> together;
            auto after = then;
            for (std::size_t i = 0; i < all.size(); ++i) {
                if (any.one_in(3)) continue;
                after[i] = {static_cast<std::uint32_t>(10 * (1 + any.below(80))), static_cast<int>(any.below(2))};
                together.push_back({&all[i],
                                    {.compute = gpushare::share::of_permille(after[i].permille),
                                     .level = gpushare::priority{after[i].level}}});
            }
            bool fit = true;
            for (const int level : {0, 1})
                for (const std::uint32_t d : {0U, 1U}) fit = fit && promised(after, d, level) <= 1000;
            const auto why = shared.try_resize_together(together).why;
            CHECK(why.code == (fit ? errc::none : errc::share_exceeded));
            ++(fit ? changed : refused);
            if (fit) then = after;
            for (const int level : {0, 1})
                for (const std::uint32_t d : {0U, 1U})
                    CHECK(shared.unpromised({d}, gpushare::priority{level}).permille() ==
                          1000 - promised(then, d, level));
        }
    }
    CHECK(changed > 0);
    CHECK(refused > 0);
}

TEST_CASE("a list with a cap that the policy doesn't keep is refused for that tenant alone", "[tenant]") {
    host::node node{{.devices = 1, .memory = 64_MiB, .sms = 1}};
    gpushare::tenancy<host::node, gpushare::earliest_deadline> shared{node};
    gpushare::tenant_directory<host::node, gpushare::earliest_deadline> tenants{shared};
    const auto apply = [&](const char* text) { return tenants.apply(parse_specifications(text)); };
    auto told = apply("name=a memory=1MiB compute=30% cap=40%  name=b memory=1MiB compute=30%");
    REQUIRE(told.size() == 2);
    CHECK(told[0].what == kind::refused);
    CHECK(told[0].code == errc::invalid_specification);
    CHECK_THAT(told[0].why, Catch::Contains("tenant 'a'") && Catch::Contains("no caps"));
    CHECK(told[1].what == kind::admitted);
    told = apply("name=a memory=1MiB compute=30%  name=b memory=2MiB compute=30% cap=40%");
    REQUIRE(told.size() == 2);
    CHECK(told[0].what == kind::refused);  // b's change: all of it
    CHECK_THAT(told[0].why, Catch::Contains("tenant 'b'") && Catch::Contains("no caps"));
    CHECK(tenants.find("b")->spec().memory == 1_MiB);
    CHECK(tenants.find("b")->spec().cap == gpushare::share::whole());
    CHECK(told[1].what == kind::admitted);
}

TEST_CASE("a tenant without room is refused with figures, and the others have theirs", "[tenant]") {
    server s;
    CHECK(s.apply("name=a memory=20MiB compute=30% on=0  name=b memory=20MiB compute=30% on=0") ==
          "a admitted, b admitted");
    const auto list = parse_specifications(
        "name=a memory=21MiB compute=30% on=0  name=b memory=60MiB compute=30% on=0  name=c memory=50MiB compute=10% "
        "on=0 "
        "name=d memory=1MiB compute=10% on=0");
    const auto told = s.tenants.apply(list);
    REQUIRE(told.size() == 4);
    CHECK(told[0].what == kind::changed);
    CHECK(told[1].what == kind::refused);
    CHECK(told[1].code == errc::no_room);
    CHECK(told[1].why.find("'b'") != std::string::npos);
    CHECK(told[2].what == kind::refused);
    CHECK(told[3].what == kind::admitted);
    CHECK(s.spec("a").memory == 21_MiB);
    CHECK(s.spec("b").memory == 20_MiB);
    CHECK(s.tenants.find("c") == nullptr);
    CHECK(s.apply("name=a memory=1MiB compute=30% on=0  name=c memory=50MiB compute=10% on=0") ==
          "b closed, d closed, a changed, c admitted");
}

TEST_CASE("a list that can't be meant changes nothing", "[tenant]") {
    server s;
    CHECK(s.apply("name=a memory=20MiB compute=30% on=0  name=b memory=20MiB compute=30% on=0") ==
          "a admitted, b admitted");
    const auto refuse = [&](const char* list, errc code, const char* says) {
        try {
            (void)s.tenants.apply(parse_specifications(list));
            FAIL(list);
        } catch (const gpushare::error& e) {
            CHECK(e.code() == code);
            CHECK(std::string(e.what()).find(says) != std::string::npos);
        }
        CHECK(s.spec("a").memory == 20_MiB);
        CHECK(s.spec("b").compute == 30_pct);
    };
    refuse("name=a memory=1MiB compute=30%  name=b memory=20MiB compute=30% on=1", errc::invalid_specification, "on");
    refuse("name=a memory=2MiB compute=30% devices=2", errc::invalid_specification, "devices");
    refuse("name=a memory=2MiB compute=30% unit=2MiB", errc::invalid_specification, "unit");
    refuse("name=a memory=2MiB compute=30% slice=1", errc::invalid_specification, "slice");
    refuse("name=a memory=1MiB compute=30%  name=b memory=lots", errc::invalid_specification, "line 1, tenant 'b'");
    refuse("name=a memory=1MiB compute=30%  name=c compute=10%", errc::invalid_specification, "'c': needs memory");
    refuse("name=a memory=1MiB compute=30%  name=b compute=20%", errc::invalid_specification, "'b': needs memory");
    refuse("name=a memory=1MiB compute=30%  name=c memory=1MiB on=7", errc::no_device, "'c'");
    refuse("name=a memory=1MiB compute=30%  name=c memory=3MiB devices=3", errc::no_device, "'c'");
    refuse("name=a memory=1MiB compute=30%  name=c memory=3MiB unit=2MiB", errc::invalid_specification, "'c'");
    for (const tenant_spec& odd :
         {tenant_spec{.name = "c", .memory = 2_MiB, .devices = 2, .burst = 1_MiB, .unit = 1_MiB},
          tenant_spec{.name = "c", .memory = 1_MiB, .slo = -1ms}})
        CHECK_THROWS_AS(
            s.tenants.apply(std::vector<tenant_spec>{{.name = "b", .memory = 1_MiB, .compute = 30_pct}, odd}),
            gpushare::operation_error);
    CHECK(s.spec("a").memory == 20_MiB);
    CHECK(s.spec("b").memory == 20_MiB);
    std::vector<tenant_spec> twice(2, {.name = "c", .memory = 1_MiB, .compute = 1_pct});
    CHECK_THROWS_AS(s.tenants.apply(twice), gpushare::operation_error);
    CHECK_THROWS_AS(s.tenants.apply(std::vector<tenant_spec>{{.memory = 1_MiB}}), gpushare::operation_error);
    CHECK_THROWS_AS(s.tenants.check(twice), gpushare::operation_error);
    s.tenants.check(parse_specifications("name=c memory=1MiB"));  // one that can be, and isn't applied
    CHECK(s.tenants.all().size() == 2);
}

TEST_CASE("requests find their tenants while lists are applied", "[tenant]") {
    server s;
    const auto with = parse_specifications("name=a memory=8MiB compute=50%  name=b memory=8MiB compute=50%");
    const auto without = parse_specifications("name=b memory=9MiB compute=50%");
    (void)s.tenants.apply(with);
    std::atomic<int> missed{0}, wrong{0};
    std::jthread requests([&](const std::stop_token& stop) {
        while (!stop.stop_requested()) {
            missed += s.tenants.find("b") == nullptr ? 1 : 0;
            const auto a = s.tenants.find("a");
            if (!a) continue;
            try {
                void* const p = a->memory().allocate(4096);
                a->memory().deallocate(p, 4096);
            } catch (const gpushare::error& e) {
                wrong += e.code() == errc::closed ? 0 : 1;
            }
        }
    });
    for (int i = 0; i < 50; ++i) (void)s.tenants.apply(i % 2 == 0 ? without : with);
    requests.request_stop();
    requests.join();
    CHECK(missed == 0);
    CHECK(wrong == 0);
}
