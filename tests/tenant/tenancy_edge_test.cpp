// SPDX-License-Identifier: Apache-2.0
// Tenants, threads and locks: code that runs inside a resize, readers beside it, impossible
// requests beside others' burst, and the texts of refusals.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include <gpushare/error.hpp>

#include "support/catch.hpp"
#include "support/host_tenants.hpp"
#include "support/threads.hpp"

namespace tenancy_edge_test {

using namespace support::host_tenants;

namespace {

/// What `f` says when it throws; empty if it returns.
template <class F>
std::string text_of(F f) {
    try {
        f();
    } catch (const gpushare::error& e) {
        CHECK(e.tenant() == "a");
        return e.what();
    }
    return {};
}

}  // namespace

TEST_CASE("work that a resize lets in runs under no lock of the tenancy", "[tenant]") {
    // Were the tenancy's lock held, this would hang.
    node n(modelled(1));
    tenancy shared(n, {.limiter = {.depth = 1}});
    auto a = shared.admit({.name = "a", .memory = 1_MiB, .compute = 50_pct});
    n.faults({0}).stall(a.work_stream());
    auto first = a.submit([](host::stream& s) { s.enqueue(1ms); });
    gpushare::share seen{};
    auto second = a.submit([&](host::stream& s) {
        seen = shared.unpromised({0});
        s.enqueue(1ms);
    });
    CHECK(seen == 0_pct);
    a.resize({.compute = 60_pct, .level = gpushare::priority{1}});  // there is room on level 1
    CHECK(seen == 40_pct);
    n.faults({0}).resume(a.work_stream());
    CHECK(first.wait(soon()));
    CHECK(second.wait(soon()));
}

TEST_CASE("a tenant can be read while it is resized", "[tenant]") {
    node n(modelled(2));
    tenancy shared(n);
    auto a = shared.admit({.name = "a name that is too long to be kept inside a string",
                           .memory = 16_MiB,
                           .devices = 2,
                           .compute = 50_pct});
    const std::string& name = a.name();
    const std::string before = name;
    std::atomic<int> wrong{0};
    {
        support::background resizer(2, [&](unsigned rank) {
            a.resize({.memory = rank == 0 ? 16_MiB : 32_MiB,
                      .compute = rank == 0 ? 50_pct : 70_pct,
                      .level = gpushare::priority{static_cast<std::int32_t>(rank)}});
        });
        for (int i = 0; i < 2'000; ++i) {
            const auto granted = a.spec();
            const bool first = granted.memory == 16_MiB && granted.compute == 50_pct && granted.level.level == 0;
            const bool second = granted.memory == 32_MiB && granted.compute == 70_pct && granted.level.level == 1;
            if (!first && !second) wrong.fetch_add(1);
            if (name != before) wrong.fetch_add(1);
            (void)a.usage();
        }
    }
    CHECK(wrong.load() == 0);
    CHECK(shared.unpromised({0}).permille() == 1000 - a.spec().compute.permille());
    CHECK(a.close(soon()).complete);
    CHECK(shared.rooms()[0].free == 64_MiB);
}

TEST_CASE("a resize that fails on one device is invisible to the bursts on another", "[tenant]") {
    node n(modelled(2));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .devices = 2, .compute = 10_pct});
    auto full = shared.admit({.name = "full", .memory = 48_MiB, .compute = 10_pct, .on = {{1}}});
    auto lent = shared.admit({.name = "lent", .memory = 1_MiB, .compute = 10_pct, .burst = 47_MiB, .on = {{0}}});
    std::atomic<int> granted{0};
    {
        support::background doomed(1, [&](unsigned) {
            try {
                a.resize({.memory = 120_MiB});
                granted.fetch_add(1);
            } catch (const gpushare::operation_error&) {  // device 1 is full
            }
        });
        int refused = 0;
        for (const auto enough = doomed.rounds() + 500; doomed.rounds() < enough;) {
            void* p = lent.memory().try_allocate(std::size_t{48} << 20);
            refused += p == nullptr;
            lent.memory().deallocate(p, std::size_t{48} << 20);
        }
        CHECK(refused == 0);
    }
    CHECK(granted.load() == 0);
}

TEST_CASE("refusals name the tenant and say what would do", "[tenant]") {
    node n(modelled(2));
    tenancy shared(n);
    CHECK(
        text_of([&] { (void)shared.admit({.name = "a", .memory = 130_MiB, .devices = 2, .compute = 1_pct}); }) ==
        "tenant 'a': split of 130 MiB over 2 devices: needs 65 MiB on each, but only 64 MiB fits on each of 2; 128 MiB "
        "in all would fit");
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .devices = 2, .compute = 40_pct});
    auto b = shared.admit({.name = "b", .memory = 30_MiB, .compute = 50_pct, .on = {{1}}});
    CHECK(text_of([&] { a.resize({.memory = 70_MiB}); }) ==
          "tenant 'a': resize, on one device: asked for 35 MiB, 34 MiB of 64 MiB left (not enough unpromised memory)");
    CHECK(
        text_of([&] { a.resize({.compute = 50.1_pct}); }) ==
        "tenant 'a': resize: asked for 50.1 % of the device's time, 50 % of 100 % left (shares would exceed the whole "
        "device)");
    CHECK(text_of([&] { a.resize({.memory = 1_B}); }) ==
          "tenant 'a': memory = 1 B: must be whole in units of 1 B on each of its devices");
    a.resize({.memory = 68_MiB, .compute = 50_pct});  // as much as there is
    CHECK(text_of([&] { (void)shared.admit({.name = "a", .memory = 1_MiB, .compute = 1_pct}); }) ==
          "tenant 'a': the name is taken");
}

TEST_CASE("an allocation after a collected free isn't counted as refused", "[tenant]") {
    node n(modelled(1));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct});
    void* p = a.memory().allocate(16 << 20);
    auto& s = a.work_stream();
    n.faults({0}).stall(s);
    s.enqueue(100us);
    const auto point = s.record();
    CHECK(a.memory().deallocate_after(point, p, 16 << 20) == errc::none);
    CHECK(a.memory().try_allocate(1 << 20) == nullptr);
    n.faults({0}).resume(s);
    REQUIRE(point.wait(soon()));
    p = a.memory().allocate(16 << 20);
    CHECK(a.usage().refused == 1);
    CHECK(a.memory().deallocate(p, 16 << 20) == errc::none);
}

TEST_CASE("a resize beside a close takes nothing back", "[tenant]") {
    for (int round = 0; round < 200; ++round) {
        node n(modelled(1));
        tenancy shared(n);
        auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct});
        std::atomic<bool> done{false};
        std::jthread resizer([&] {
            try {
                while (!done) a.resize({.memory = 32_MiB});
            } catch (const gpushare::error& e) {
                if (e.code() != errc::closed) throw;
            }
        });
        CHECK(a.close(soon()).complete);
        done = true;
        resizer.join();
        CHECK(shared.rooms()[0].free == 64_MiB);  // while the handle lives
        CHECK(shared.unpromised({0}) == gpushare::share::whole());
    }
}

}  // namespace tenancy_edge_test
