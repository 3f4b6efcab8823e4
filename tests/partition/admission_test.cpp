// SPDX-License-Identifier: Apache-2.0
// Tenants over several devices: the view that each device gives them, and admissions and resizes
// beside other tenants that use burst.
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/partition/topology.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/threads.hpp"

namespace admission_test {

using namespace gpushare::literals;
using gpushare::errc;

namespace host = gpushare::host;
using node = host::node;
using tenancy = gpushare::tenancy<node>;

namespace {

constexpr std::size_t mebibyte = std::size_t{1} << 20;

host::node_options devices(std::uint32_t count) {
    return {.devices = count, .memory = 64_MiB, .sms = 1, .timing = host::timing::modelled};
}

}  // namespace

TEST_CASE("each device shows the tenant a total of N/M and its own free bytes", "[partition][tenant]") {
    node n(devices(4));
    tenancy shared(n, {.stack = gpushare::memory_stack::direct});  // what is asked for is what is charged
    auto other = shared.admit({.name = "other", .memory = 20_MiB, .compute = 10_pct, .on = {{1}}});
    auto chat = shared.admit({.name = "chat", .memory = 96_MiB, .devices = 4, .compute = 60_pct, .unit = 1_MiB});
    for (std::size_t part = 0; part < 4; ++part) {
        CHECK(chat.memory(part).capacity() == 24_MiB);
        void* p = chat.memory(part).allocate((part + 1) * mebibyte);
        for (std::size_t seen = 0; seen < 4; ++seen)
            CHECK(chat.memory(seen).free() == 24_MiB - (seen <= part ? 1_MiB * (seen + 1) : 0_B));
        (void)p;
    }
    CHECK(chat.usage().current == 10_MiB);
    CHECK(chat.memory(3).try_allocate(21 * mebibyte) == nullptr);
    CHECK(chat.close(gpushare::never).leaked == 10_MiB);
}

TEST_CASE("an admission refused on one device leaves no trace on the others", "[partition][tenant]") {
    node n(devices(3));
    tenancy shared(n);
    auto big = shared.admit({.name = "big", .memory = 60_MiB, .compute = 10_pct, .on = {{2}}});
    auto burst = shared.admit({.name = "burst", .memory = 1_MiB, .compute = 10_pct, .burst = 63_MiB, .on = {{0}}});
    std::atomic<std::uint64_t> admitted{0};
    std::size_t refused = 0;
    {
        // Would fit on the first two devices, never on the third.
        support::background doomed(2, [&](unsigned rank) {
            try {
                auto t = shared.admit({.name = "doomed" + std::to_string(rank),
                                       .memory = 90_MiB,
                                       .devices = 3,
                                       .compute = 10_pct,
                                       .on = {{0}, {1}, {2}}});
                admitted.fetch_add(1);
            } catch (const gpushare::operation_error&) {
            }
        });
        const auto enough = doomed.rounds() + 1'000;
        while (doomed.rounds() < enough) {
            void* p = burst.memory().try_allocate(64 * mebibyte);
            refused += p == nullptr ? 1 : 0;
            burst.memory().deallocate(p, 64 * mebibyte);
        }
    }
    CHECK(admitted.load() == 0);
    CHECK(refused == 0);
}

TEST_CASE("an admission that always fits somewhere is never refused, wherever others burst", "[partition][tenant]") {
    node n(devices(2));
    tenancy shared(n);
    auto burst = shared.admit({.name = "burst", .memory = 2_MiB, .devices = 2, .compute = 10_pct, .burst = 126_MiB});
    std::size_t refused = 0;
    {
        // At any moment one of the two devices has at least 40 MiB.
        support::background mover(1, [&](unsigned) {
            for (const std::size_t part : {0U, 1U}) {
                void* p = burst.memory(part).try_allocate(60 * mebibyte);
                burst.memory(part).deallocate(p, 60 * mebibyte);
            }
        });
        const auto enough = mover.rounds() + 2'000;
        for (int i = 0; mover.rounds() < enough || i < 500; ++i) {
            try {
                auto t = shared.admit({.name = "small", .memory = 40_MiB, .compute = 10_pct});
            } catch (const gpushare::operation_error&) {
                ++refused;
            }
        }
    }
    CHECK(refused == 0);
}

TEST_CASE("a resize refused on one device leaves no trace on the others", "[partition][tenant]") {
    node n(devices(2));
    tenancy shared(n);
    auto wide = shared.admit({.name = "wide", .memory = 2_MiB, .devices = 2, .compute = 10_pct});
    auto full = shared.admit({.name = "full", .memory = 60_MiB, .compute = 10_pct, .on = {{1}}});
    auto burst = shared.admit({.name = "burst", .memory = 1_MiB, .compute = 10_pct, .burst = 62_MiB, .on = {{0}}});
    std::atomic<std::uint64_t> granted{0};
    std::size_t refused = 0;
    {
        support::background doomed(1, [&](unsigned) {
            try {
                wide.resize({.memory = 60_MiB});
                granted.fetch_add(1);
            } catch (const gpushare::operation_error&) {
            }
        });
        const auto enough = doomed.rounds() + 1'000;
        while (doomed.rounds() < enough) {
            void* p = burst.memory().try_allocate(63 * mebibyte);
            refused += p == nullptr ? 1 : 0;
            burst.memory().deallocate(p, 63 * mebibyte);
        }
    }
    CHECK(granted.load() == 0);
    CHECK(refused == 0);
    CHECK(wide.spec().memory == 2_MiB);
    try {
        wide.resize({.memory = 60_MiB});
        FAIL("resized");
    } catch (const gpushare::error& e) {
        CHECK(e.figures().asked == (30_MiB).count());
        CHECK(e.figures().left == (4_MiB).count());
        CHECK(e.figures().limit == (64_MiB).count());
    }
}

TEST_CASE("a refused admission keeps its figures beside its text", "[partition][tenant]") {
    node n(devices(2));
    tenancy shared(n);
    auto some = shared.admit({.name = "some", .memory = 20_MiB, .compute = 10_pct, .on = {{0}}});
    try {
        (void)shared.admit({.name = "chat", .memory = 100_MiB, .devices = 2, .compute = 10_pct});
        FAIL("admitted");
    } catch (const gpushare::error& e) {
        CHECK(e.code() == errc::no_room);
        CHECK(e.tenant() == "chat");
        CHECK(e.figures().asked == (50_MiB).count());
        CHECK(e.figures().left == (44_MiB).count());
        CHECK(std::string(e.what()).find("88 MiB in all would fit") != std::string::npos);
    }
    CHECK_THROWS_AS(
        shared.admit({.name = "burst", .memory = 2_MiB, .compute = 10_pct, .burst = gpushare::quota::max_limit()}),
        gpushare::operation_error);
    CHECK(shared.rooms()[0].free == 44_MiB);
    CHECK(shared.rooms()[1].free == 64_MiB);
}

TEST_CASE("tenants get the best connected devices of those with room, where the links are known",
          "[partition][tenant]") {
    node n(devices(4));
    auto links = gpushare::describe(n);
    links.connect({1}, {3}, {gpushare::link_class::nvlink, 4, true});
    links.connect({0}, {2}, {gpushare::link_class::nvlink, 2, true});
    tenancy shared(n, links);
    auto first = shared.admit({.name = "first", .memory = 80_MiB, .devices = 2, .compute = 50_pct});
    CHECK(first.spec().on == std::vector<gpushare::device_id>{{1}, {3}});
    auto second = shared.admit({.name = "second", .memory = 80_MiB, .devices = 2, .compute = 50_pct});
    CHECK(second.spec().on == std::vector<gpushare::device_id>{{0}, {2}});
    try {
        (void)shared.admit({.name = "third", .memory = 80_MiB, .devices = 2, .compute = 50_pct});
        FAIL("admitted");
    } catch (const gpushare::error& e) {
        CHECK(e.code() == errc::no_room);
        CHECK(e.figures().left == (24_MiB).count());
    }
    CHECK_THROWS_AS(tenancy(n, gpushare::topology{}), gpushare::operation_error);
}

TEST_CASE("nobody is admitted to a lost device", "[partition][tenant]") {
    node n(devices(3));
    tenancy shared(n);
    n.faults({1}).lose_device();
    auto two = shared.admit({.name = "two", .memory = 2_MiB, .devices = 2, .compute = 10_pct});
    CHECK(two.spec().on == std::vector<gpushare::device_id>{{0}, {2}});
    try {
        (void)shared.admit({.name = "there", .memory = 2_MiB, .compute = 10_pct, .on = {{1}}});
        FAIL("admitted");
    } catch (const gpushare::error& e) {
        CHECK(e.code() == errc::device_lost);
    }
    try {
        (void)shared.admit({.name = "three", .memory = 3_MiB, .devices = 3, .compute = 10_pct});
        FAIL("admitted");
    } catch (const gpushare::error& e) {
        CHECK(e.code() == errc::too_few_devices);
        CHECK(e.figures().left == 2);
    }
    CHECK(shared.rooms()[0].free == 63_MiB);
}

}  // namespace admission_test
