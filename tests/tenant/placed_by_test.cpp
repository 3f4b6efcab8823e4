// SPDX-License-Identifier: Apache-2.0
// A tenancy whose devices are chosen by a placement policy, or by any function of the embedder.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory_resource>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/placement/placement.hpp>
#include <gpushare/placement/placement_policy.hpp>
#include <gpushare/placement/tenant_planner.hpp>
#include <gpushare/placement/value_descent.hpp>
#include <gpushare/tenant/move.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/host_tenants.hpp"
#include "support/random.hpp"

namespace placed_by_test {

using namespace support::host_tenants;
using gpushare::device_room;
using gpushare::node_view;
using gpushare::partition;

namespace {

tenant_spec small(const std::string& name) { return {.name = name, .memory = 16_MiB, .compute = 30_pct}; }
tenant_spec wide(std::uint32_t devices) {
    return {.name = "wide", .memory = 60_MiB * devices, .devices = devices, .compute = 100_pct};
}

void check_untouched(const tenancy& t) {
    for (const auto& room : t.rooms()) CHECK(room.free == 64_MiB);
    for (std::uint32_t d = 0; d < 4; ++d) CHECK(t.unpromised({d}) == gpushare::share::whole());
}

}  // namespace

TEST_CASE("a placement policy leaves whole devices to tenants that need them", "[tenant][placement]") {
    node n(modelled(4, 1));
    tenancy by_room(n), packed(n), learnt(n);
    packed.choose_devices(gpushare::placed_by(gpushare::bin_packing{}));
    const std::vector<gpushare::placement_request> expected{gpushare::placement_of(small("")),
                                                            gpushare::placement_of(wide(3))};
    const gpushare::workload usual(expected);
    learnt.choose_devices(gpushare::placed_by(gpushare::value_descent(gpushare::as_cluster(learnt), usual)));
    const auto three_small = [](tenancy& t) {
        std::vector<tenancy::tenant> all;
        for (const auto* name : {"a", "b", "c"}) all.push_back(t.admit(small(name)));
        return all;
    };
    {
        const auto spread = three_small(by_room);
        CHECK(code_of([&] { (void)by_room.admit(wide(3)); }) == errc::share_exceeded);
    }
    for (auto* t : {&packed, &learnt}) {
        const auto together = three_small(*t);
        for (const auto& one : together) CHECK(one.spec().on == together.front().spec().on);
        const auto rest = t->admit(wide(3));
        CHECK(rest.spec().on.size() == 3);
        CHECK(code_of([&] { (void)t->admit(small("d")); }) == errc::share_exceeded);
    }
    check_untouched(packed);
}

TEST_CASE("a placement policy sees memory and device time of every device", "[tenant][placement]") {
    node n(modelled(4, 1));
    tenancy shared(n);
    std::vector<std::pair<std::uint32_t, bytes>> seen;
    shared.choose_devices([&](const tenant_spec& spec, const std::vector<device_room>& rooms, const node_view& all) {
        seen.clear();
        for (const auto& d : all.devices) seen.emplace_back(d.permille, d.memory);
        CHECK(all.whole.devices == 4);
        CHECK(all.whole.device_memory == 64_MiB);
        return gpushare::equal_split(spec.memory, spec.devices, rooms, spec.unit);
    });
    const auto named = shared.admit({.name = "named", .memory = 20_MiB, .compute = 40_pct, .on = {{2}}});
    CHECK(seen.empty());  // it said where
    CHECK(named.spec().on == std::vector<device_id>{{2}});
    const auto large = shared.admit({.name = "large", .memory = 60_MiB, .compute = 10_pct});
    CHECK(seen ==
          std::vector<std::pair<std::uint32_t, bytes>>{{1000, 64_MiB}, {1000, 64_MiB}, {600, 44_MiB}, {1000, 64_MiB}});
    shared.choose_devices(gpushare::placed_by(gpushare::bin_packing{}));
    const auto beside = shared.admit({.name = "beside", .memory = 30_MiB, .compute = 10_pct});
    CHECK(beside.spec().on == std::vector<device_id>{{2}});  // the fullest with so much memory
    const auto elsewhere = shared.admit({.name = "elsewhere", .memory = 30_MiB, .compute = 10_pct});
    CHECK(elsewhere.spec().on != std::vector<device_id>{{2}});
    shared.choose_devices({});
    CHECK(shared.admit(small("most room")).spec().on.size() == 1);
}

TEST_CASE("a choice of devices that is wrong, or throws, admits nobody and takes nothing", "[tenant][placement]") {
    node n(modelled(4, 1));
    tenancy shared(n);
    const auto refused_with = [&](std::vector<device_id> on, bytes each, std::uint32_t devices = 2) {
        shared.choose_devices([=](const auto&, const auto&, const auto&) { return partition{each, 0, on}; });
        const auto why = code_of(
            [&] { (void)shared.admit({.name = "x", .memory = 32_MiB, .devices = devices, .compute = 30_pct}); });
        check_untouched(shared);
        return why;
    };
    CHECK(refused_with({{0}, {1}}, 16_MiB) == errc::none);
    CHECK(refused_with({{0}, {0}}, 16_MiB) == errc::no_room);
    CHECK(refused_with({{0}, {7}}, 16_MiB) == errc::no_room);
    CHECK(refused_with({{0}}, 65_MiB) == errc::no_room);
    CHECK(refused_with({{0}, {1}}, 8_MiB) == errc::not_whole);
    CHECK(refused_with({}, 16_MiB) == errc::not_whole);
    const auto full = shared.admit({.name = "full", .memory = 1_MiB, .compute = 90_pct, .on = {{1}}});
    shared.choose_devices([](const auto&, const auto&, const auto&) { return partition{32_MiB, 0, {{1}}}; });
    CHECK(code_of([&] { (void)shared.admit({.name = "y", .memory = 32_MiB, .compute = 30_pct}); }) == errc::no_room);
    shared.choose_devices([](const auto&, const auto&, const auto&) -> partition { throw std::runtime_error("no"); });
    CHECK_THROWS_WITH(shared.admit(small("z")), "no");
    CHECK(shared.rooms()[0].free == 64_MiB);
}

TEST_CASE("a placed tenancy promises all that it has, as one that isn't placed does, whatever comes and goes",
          "[tenant][placement]") {
    for (std::uint64_t nth = 0; nth < 8; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        node n(modelled(4, 1));
        tenancy shared(n);
        shared.choose_devices(gpushare::placed_by(gpushare::fragmentation_descent(
            gpushare::workload(std::vector{gpushare::placement_of(small("")), gpushare::placement_of(wide(2))}))));
        std::vector<tenancy::tenant> all;
        for (int step = 0; step < 200; ++step) {
            if (!all.empty() && any.below(3) == 0) {
                const auto at = static_cast<std::ptrdiff_t>(any.below(all.size()));
                all.erase(all.begin() + at);
                continue;
            }
            const auto devices = static_cast<std::uint32_t>(1 + any.below(3));
            const tenant_spec spec{.name = "t" + std::to_string(step),
                                   .memory = 1_MiB * (devices * (1 + any.below(40))),
                                   .devices = devices,
                                   .compute = gpushare::share::of_permille(50 + any.below(950))};
            // It is admitted where as many devices as it wants have room for it, and else refused.
            const auto rooms = shared.rooms();
            std::uint32_t with_room = 0;
            for (std::uint32_t d = 0; d < 4; ++d)
                with_room += shared.unpromised({d}) >= spec.compute && rooms[d].free >= spec.memory / devices ? 1U : 0U;
            try {
                all.push_back(shared.admit(spec));
                CHECK(with_room >= devices);
            } catch (const gpushare::operation_error& e) {
                CHECK(with_room < devices);
                CHECK(e.tenant() == spec.name);
            }
        }
        all.clear();
        check_untouched(shared);
    }
}

TEST_CASE("a tenant moves with its data while it lives, all or nothing", "[tenant][placement][move]") {
    using namespace std::chrono_literals;
    using gpushare::memory_stack;
    const auto stack = GENERATE(memory_stack::direct, memory_stack::pool);
    auto options = modelled(4, 1);
    options.stale = true;
    node n(options);
    std::vector<gpushare::tenant_event::kind> events;
    tenancy shared(n, {.events = [&](const gpushare::tenant_event& e) { events.push_back(e.what); }, .stack = stack});
    auto chat = shared.admit(
        {.name = "chat", .memory = 32_MiB, .devices = 2, .compute = 60_pct, .level = {1}, .on = {{0}, {1}}});
    std::vector<gpushare::moving_block> blocks;
    for (std::size_t part = 0; part < 2; ++part)
        for (const std::size_t size : {std::size_t{1000}, std::size_t{3} << 20}) {
            blocks.push_back({.part = part, .at = chat.memory(part).allocate(size), .size = size});
            std::memset(blocks.back().at, static_cast<int>(blocks.size()), size);
        }
    (void)chat.memory(1).allocate(5000);  // isn't listed: ends where it is
    const auto before = blocks;
    const auto good = [&](std::size_t i) {
        const auto* const p = static_cast<const unsigned char*>(blocks[i].at);
        return std::all_of(p, p + blocks[i].size, [&](unsigned char c) { return c == i + 1; });
    };
    const auto stayed = [&] {
        for (std::size_t i = 0; i < blocks.size(); ++i) {
            CHECK(blocks[i].at == before[i].at);
            CHECK(good(i));
        }
        CHECK(n.memory({2}).used() == 0_B);
        CHECK(n.memory({3}).used() == 0_B);
        CHECK(shared.unpromised({2}) == 100_pct);
        CHECK(shared.rooms()[2].free == 64_MiB);
        CHECK(chat.submit([](auto&) {}).wait());
    };
    const auto soon = [&] { return shared.now() + 5min; };
    const auto move = [&](std::vector<device_id> to, gpushare::instant deadline) {
        return gpushare::move_tenant(shared, chat, std::move(to), blocks, deadline);
    };

    SECTION("what is queued runs first") {
        auto& first = blocks[0];
        auto t = chat.submit([&](auto& s) {
            s.enqueue(5ms);
            s.fill(first.at, std::byte{1}, first.size);
        });
        auto moved = move({{3}, {2}}, soon());
        CHECK(t.done());
        CHECK(moved.report.closed.complete);
        CHECK(moved.report.closed.leaked_blocks == 1);
        CHECK(moved.report.moved == gpushare::bytes{2 * (1000 + (3 << 20))});
        CHECK(moved.report.late == 0);
        CHECK(moved.report.wait > 0ns);
        CHECK(code_of([&] { (void)chat.memory(); }) == errc::closed);
        chat = std::move(moved.successor);
        CHECK(chat.name() == "chat");
        CHECK(chat.spec().on == std::vector<device_id>{{3}, {2}});
        CHECK(chat.spec().level == gpushare::priority{1});
        for (std::size_t i = 0; i < blocks.size(); ++i) {
            CHECK(good(i));
            CHECK(chat.memory(blocks[i].part).deallocate(blocks[i].at, blocks[i].size) == errc::none);
        }
        CHECK(n.memory({0}).used() == 0_B);
        CHECK(n.memory({1}).used() == 0_B);
        CHECK(shared.unpromised({0}) == 100_pct);
        CHECK(shared.unpromised({3}) == 40_pct);
        CHECK(code_of([&] { (void)shared.admit({.name = "chat", .memory = 1_MiB}); }) == errc::duplicate_name);
        CHECK(chat.close(soon()).complete);
        auto again = shared.admit({.name = "chat", .memory = 1_MiB});  // the name is free once both are gone
    }
    SECTION("one that sleeps is woken, and what waits of it runs first") {
        REQUIRE(chat.sleep());
        auto& first = blocks[0];
        auto t = chat.submit([&](auto& s) { s.fill(first.at, std::byte{1}, first.size); });
        auto moved = move({{2}, {3}}, soon());
        CHECK(t.status() == errc::none);
        chat = std::move(moved.successor);
        for (std::size_t i = 0; i < blocks.size(); ++i) CHECK(good(i));
        CHECK(chat.submit([](auto&) {}).wait());
    }
    SECTION("on a device that it doesn't leave it keeps what it has, and needs no room for more") {
        auto neighbour =
            shared.admit({.name = "neighbour", .memory = 48_MiB, .compute = 40_pct, .level = {1}, .on = {{0}}});
        gpushare::pool_resource own(chat.memory(0));  // stands on it, and goes on
        void* const kept = own.allocate(500);
        const bytes used = n.memory({0}).used();
        auto moved = move({{0}, {2}}, soon());
        CHECK(n.memory({0}).used() == used);
        CHECK(n.memory({1}).used() == 0_B);
        CHECK(moved.report.closed.complete);
        CHECK(moved.report.closed.leaked_blocks == 1);  // of the other part
        CHECK(moved.report.moved == bytes{1000 + (3 << 20)});
        CHECK(moved.report.kept == bytes{1000 + (3 << 20)});
        CHECK(chat.usage().current == 0_B);
        chat = std::move(moved.successor);
        CHECK(blocks[0].at == before[0].at);
        CHECK(blocks[2].at != before[2].at);
        for (std::size_t i = 0; i < blocks.size(); ++i) CHECK(good(i));
        CHECK(own.deallocate(kept, 500) == errc::none);
        own.deallocate(own.allocate(1 << 20), 1 << 20);
        CHECK(shared.unpromised({0}) == 0_pct);
        CHECK(shared.unpromised({1}) == 100_pct);
        CHECK(shared.unpromised({2}) == 40_pct);
        CHECK(shared.rooms()[0].free == 0_B);
        CHECK(shared.rooms()[1].free == 64_MiB);
        chat.resize({.memory = 24_MiB, .compute = 50_pct});
        CHECK(shared.rooms()[0].free == 4_MiB);
        CHECK(shared.unpromised({0}) == 10_pct);
        CHECK(chat.submit([](auto&) {}).wait());
        for (auto& b : blocks) CHECK(chat.memory(b.part).deallocate(b.at, b.size) == errc::none);
        auto again = gpushare::move_tenant(shared, chat, {{0}, {1}}, {}, soon());  // and back
        chat = std::move(again.successor);
        CHECK(chat.close(soon()).complete);
        CHECK(chat.usage().current == 0_B);
        CHECK(shared.rooms()[0].free == 16_MiB);
        CHECK(shared.unpromised({0}) == 60_pct);
        CHECK(own.try_allocate(1, 256) == nullptr);
    }
    SECTION("a resize of what runs first") {
        const auto there = GENERATE(std::vector<device_id>{{0}, {2}}, std::vector<device_id>{{2}, {3}});
        REQUIRE(chat.sleep());
        auto t = chat.submit([&](auto&) { chat.resize({.memory = 16_MiB, .compute = 20_pct}); });
        CHECK(code_of([&] { (void)move(there, soon()); }) == errc::in_flight);
        CHECK(t.status() == errc::none);
        stayed();
        CHECK(shared.unpromised({0}) == 80_pct);
        CHECK(shared.rooms()[0].free == 56_MiB);
        chat = std::move(move(there, soon()).successor);
        CHECK(chat.spec().memory == 16_MiB);
        CHECK(chat.memory(0).limit().usage().guaranteed == 8_MiB);
        CHECK(shared.unpromised(there[0]) == 80_pct);
        CHECK(chat.close(soon()).complete);
        check_untouched(shared);
        return;
    }
    SECTION("what fails beside a device that it doesn't leave") {
        auto other = shared.admit({.name = "other", .memory = 60_MiB, .compute = 10_pct, .on = {{3}}});
        CHECK(code_of([&] { (void)move({{0}, {3}}, soon()); }) == errc::no_room);
        CHECK(chat.usage().current > 0_B);
        other.close();
        n.memory({3}).fail_allocations(0, 1'000'000);
        CHECK(code_of([&] { (void)move({{0}, {3}}, soon()); }) == errc::out_of_memory);
        n.memory({3}).fail_allocations(0, 0);
        CHECK(shared.unpromised({0}) == 40_pct);
        CHECK(shared.rooms()[0].free == 48_MiB);
        stayed();
    }
    SECTION("a device that is lost when one part's copy waits already") {
        auto beside = shared.admit({.name = "beside", .memory = 1_MiB, .compute = 10_pct, .on = {{2}}});
        auto witness = shared.admit({.name = "witness", .memory = 1_MiB, .compute = 10_pct, .on = {{3}}});
        n.faults({3}).stall(witness.work_stream());
        auto seen = witness.submit([](auto& s) { s.enqueue(1us); });
        REQUIRE(chat.sleep());
        std::vector<tenancy::tenant::ticket> busy;
        auto last = chat.submit([&](auto&) {  // runs when the places there are had, and nothing is copied yet
            n.faults({3}).lose_device();
            while (witness.usage().in_flight != 0) {
            }
            for (int i = 0; i < 8; ++i) busy.push_back(beside.submit([](auto& s) { s.enqueue(5ms); }));
        });
        CHECK(code_of([&] { (void)move({{2}, {3}}, soon()); }) == errc::device_lost);
        CHECK(last.status() == errc::none);
        for (std::size_t i = 0; i < blocks.size(); ++i) CHECK(good(i));
        CHECK(chat.spec().on == std::vector<device_id>{{0}, {1}});
        CHECK(shared.unpromised({2}) == 90_pct);
        CHECK(chat.submit([](auto&) {}).wait());
        for (auto& b : busy) CHECK(b.wait(soon()));
        return;
    }
    SECTION("no room there") {
        auto other = shared.admit({.name = "other", .memory = 40_MiB, .compute = 10_pct, .on = {{3}}});
        auto big = shared.admit({.name = "big", .memory = 20_MiB, .on = {{3}}});
        CHECK(code_of([&] { (void)move({{2}, {3}}, soon()); }) == errc::no_room);
        stayed();
    }
    SECTION("no share there") {
        auto other = shared.admit({.name = "other", .memory = 1_MiB, .compute = 50_pct, .level = {1}, .on = {{3}}});
        CHECK(code_of([&] { (void)move({{2}, {3}}, soon()); }) == errc::share_exceeded);
        stayed();
    }
    SECTION("another number of devices, or a part that isn't there") {
        CHECK(code_of([&] { (void)move({{2}}, soon()); }) == errc::invalid_specification);
        blocks[3].part = 2;
        CHECK(code_of([&] { (void)move({{2}, {3}}, soon()); }) == errc::unknown_block);
        blocks[3].part = 1;
        stayed();
    }
    SECTION("work that isn't done in time") {
        n.faults({1}).stall(chat.work_stream(1));
        auto t = chat.submit([](auto& s) { s.enqueue(1us); }, 1);
        CHECK(code_of([&] { (void)move({{2}, {3}}, shared.now() + 5ms); }) == errc::deadline_exceeded);
        n.faults({1}).resume(chat.work_stream(1));
        CHECK(t.wait());
        stayed();
    }
    SECTION("a block that can't be had there") {
        n.memory({3}).fail_allocations(0, 1'000'000);
        CHECK(code_of([&] { (void)move({{2}, {3}}, soon()); }) == errc::out_of_memory);
        n.memory({3}).fail_allocations(0, 0);
        stayed();
    }
    SECTION("a closed tenant") {
        CHECK(chat.close(soon()).complete);
        CHECK(code_of([&] { (void)move({{2}, {3}}, soon()); }) == errc::closed);
        return;
    }
    CHECK(std::ranges::count(events, gpushare::tenant_event::kind::wrong_free) == 0);
}

TEST_CASE("a successor takes over from one that is there, and what that one was granted", "[tenant][placement][move]") {
    node n(modelled(4, 1));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .devices = 2, .compute = 60_pct, .on = {{0}, {1}}});
    void* const block = a.memory().allocate(1000);
    {
        gpushare::detail::succession to(shared, a, {{0}, {2}}, gpushare::any_slice);
        CHECK(shared.unpromised({0}) == 40_pct);
        CHECK(shared.unpromised({2}) == 40_pct);
        CHECK(code_of([&] { (void)gpushare::move_tenant(shared, a, {{0}, {3}}, {}); }) == errc::duplicate_name);
        SECTION("as it is") {
            to.take_over();
            CHECK(code_of([&] { a.resize({.compute = 20_pct}); }) == errc::closed);
            CHECK(shared.unpromised({0}) == 40_pct);
            CHECK(a.close().complete);
            CHECK(a.usage().current == 0_B);
            CHECK(shared.unpromised({1}) == 100_pct);
            CHECK(to.next().usage().current >= 1000_B);
            CHECK(to.next().memory(0).deallocate(block, 1000) == errc::none);
            to.next().resize({.memory = 8_MiB, .compute = 90_pct});
            CHECK(shared.unpromised({0}) == 10_pct);
            CHECK(shared.rooms()[0].free == 60_MiB);
            CHECK(to.next().close().complete);
        }
        SECTION("resized meanwhile") {
            a.resize({.compute = 20_pct});
            CHECK(code_of([&] { to.take_over(); }) == errc::in_flight);
            CHECK(shared.unpromised({0}) == 80_pct);
            CHECK(a.memory().deallocate(block, 1000) == errc::none);
        }
        SECTION("closed meanwhile") {
            CHECK(a.close().complete);
            CHECK(code_of([&] { to.take_over(); }) == errc::closed);
            CHECK(to.next().close().complete);
        }
    }
    CHECK(a.close().complete);
    check_untouched(shared);
}

TEST_CASE("a block that is listed twice, or overlaps another, is refused and stays", "[tenant][placement][move]") {
    gpushare::host::node n{{.devices = 2, .memory = 64_MiB}};
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 50_pct, .on = {{0}}});
    auto* const p = static_cast<std::byte*>(a.memory().allocate(4096));
    auto* const q = static_cast<std::byte*>(a.memory().allocate(1000));
    using blocks = std::vector<gpushare::moving_block>;
    auto& host = *std::pmr::new_delete_resource();
    for (blocks list : {blocks{{.at = p, .size = 4096}, {.at = q, .size = 1000}, {.at = p, .size = 4096}},
                        blocks{{.at = p + 2048, .size = 2048}, {.at = p, .size = 4096}},
                        blocks{{.at = q, .size = 0}, {.at = q, .size = 0}}}) {
        CHECK(code_of([&] { (void)move_tenant(shared, a, {{1}}, list); }) == errc::invalid_specification);
        CHECK(code_of([&] { (void)park_tenant(a, list, host); }) == errc::invalid_specification);
    }
    blocks good{{.at = q, .size = 1000}, {.at = p, .size = 4096}};
    auto moved = move_tenant(shared, a, {{1}}, good);
    CHECK(moved.successor.usage().current >= bytes{5096});
    CHECK(moved.report.closed.leaked_blocks == 0);
    CHECK(moved.successor.close().leaked_blocks == 2);
}

TEST_CASE("two tenants change places by way of the host, where there isn't room for both",
          "[tenant][placement][move]") {
    using namespace std::chrono_literals;
    auto options = modelled(4, 1);
    options.devices = 2;
    options.stale = true;
    node n(options);
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 48_MiB, .compute = 80_pct, .level = {1}, .on = {{0}}});
    auto b = shared.admit({.name = "b", .memory = 48_MiB, .compute = 80_pct, .level = {1}, .on = {{1}}});
    constexpr std::size_t size = std::size_t{5} << 20;
    std::vector<gpushare::moving_block> of_a{{.at = a.memory().allocate(size), .size = size}},
        of_b{{.at = b.memory().allocate(1000), .size = 1000}};
    std::memset(of_a[0].at, 1, size);
    std::memset(of_b[0].at, 2, 1000);
    const auto holds = [](const gpushare::moving_block& block, unsigned char what) {
        const auto* const p = static_cast<const unsigned char*>(block.at);
        return std::all_of(p, p + block.size, [what](unsigned char c) { return c == what; });
    };
    const auto soon = [&] { return shared.now() + 5min; };

    CHECK(code_of([&] { (void)move_tenant(shared, a, {{1}}, of_a, soon()); }) == errc::share_exceeded);
    std::pmr::monotonic_buffer_resource too_small(64, std::pmr::null_memory_resource());
    CHECK_THROWS_AS(park_tenant(a, of_a, too_small, soon()), std::bad_alloc);
    n.faults({0}).stall(a.work_stream());
    auto held = a.submit([](auto& s) { s.enqueue(1us); });
    auto& host = *std::pmr::new_delete_resource();
    CHECK(code_of([&] { (void)park_tenant(a, of_a, host, shared.now() + 5ms); }) == errc::deadline_exceeded);
    n.faults({0}).resume(a.work_stream());
    CHECK(held.wait(soon()));
    CHECK(holds(of_a[0], 1));

    n.faults({0}).stall(a.work_stream());
    auto resizes = a.submit([](auto& s) { s.enqueue(1us); }, {}, [&](const auto&) { a.resize({.compute = 70_pct}); });
    n.faults({0}).resume(a.work_stream());
    auto parked = park_tenant(a, of_a, host, soon());
    CHECK(parked.spec().compute == 70_pct);  // by what was queued
    CHECK(parked.closed().complete);
    CHECK(parked.closed().leaked_blocks == 0);
    CHECK(parked.size() == bytes{size});
    CHECK(parked.spec().level == gpushare::priority{1});
    CHECK(n.memory({0}).used() == 0_B);
    CHECK(shared.unpromised({0}) == 100_pct);
    CHECK(code_of([&] { (void)unpark_tenant(shared, parked, {{1}}, of_a, soon()); }) == errc::share_exceeded);
    std::vector<gpushare::moving_block> fewer;
    CHECK(code_of([&] { (void)unpark_tenant(shared, parked, {}, fewer, soon()); }) == errc::invalid_specification);
    CHECK(code_of([&] {
              (void)unpark_tenant(shared, parked, {{0}, {1}}, of_a, soon());
          }) == errc::invalid_specification);
    for (auto other :
         {gpushare::moving_block{.size = size + 1}, {.part = 1, .size = size}, {.size = size, .alignment = 512}}) {
        const auto before = shared.unpromised({0});
        CHECK(code_of([&] {
                  (void)unpark_tenant(shared, parked, {}, {&other, 1}, soon());
              }) == errc::invalid_specification);
        CHECK(shared.unpromised({0}) == before);
        CHECK(other.at == nullptr);
    }

    auto moved = move_tenant(shared, b, {{0}}, of_b, soon());
    b = std::move(moved.successor);
    n.memory({1}).fail_allocations(0, 1'000'000);
    CHECK(code_of([&] { (void)unpark_tenant(shared, parked, {}, of_a, soon()); }) == errc::out_of_memory);
    n.memory({1}).fail_allocations(0, 0);
    CHECK(shared.unpromised({1}) == 100_pct);
    a = unpark_tenant(shared, parked, {}, of_a, soon());  // where there is room
    CHECK(parked.size() == 0_B);
    CHECK(a.name() == "a");
    CHECK(a.spec().on == std::vector<device_id>{{1}});
    CHECK(a.spec().level == gpushare::priority{1});
    CHECK(b.spec().on == std::vector<device_id>{{0}});
    CHECK(holds(of_a[0], 1));
    CHECK(holds(of_b[0], 2));
    CHECK(a.memory().deallocate(of_a[0].at, size) == errc::none);
    CHECK(b.memory().deallocate(of_b[0].at, 1000) == errc::none);
}

namespace {

/// Memory of the host that knows what it gave, and frees it in the end.
class counting_memory : public std::pmr::memory_resource {
public:
    ~counting_memory() override {
        for (const auto& b : given_) std::pmr::new_delete_resource()->deallocate(b.at, b.size, b.alignment);
    }
    [[nodiscard]] std::size_t given() const noexcept { return given_.size(); }

private:
    struct block {
        void* at;
        std::size_t size, alignment;
    };
    void* do_allocate(std::size_t size, std::size_t alignment) override {
        given_.push_back({std::pmr::new_delete_resource()->allocate(size, alignment), size, alignment});
        return given_.back().at;
    }
    void do_deallocate(void* p, std::size_t size, std::size_t alignment) override {
        std::erase_if(given_, [p](const block& b) { return b.at == p; });
        std::pmr::new_delete_resource()->deallocate(p, size, alignment);
    }
    [[nodiscard]] bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
        return this == &other;
    }
    std::vector<block> given_;
};

/// A tenant whose stream stalls when its queued work has run, so that copies begin and don't end.
struct stalling_tenant : tenancy::tenant {
    node* on;
    bool stalled = false;

    stalling_tenant(tenancy::tenant of, node& n) : tenancy::tenant(std::move(of)), on(&n) {}
    auto usage() {
        on->faults({0}).stall(work_stream());
        stalled = true;
        return tenancy::tenant::usage();
    }
};

/// A tenant whose copies begin, and don't end before `go`.
struct held_tenant : tenancy::tenant {
    const std::atomic<bool>* go;

    template <class... Args>
    auto submit(Args&&... args) {
        work_stream().launch({}, [go = go](auto&) {
            while (!*go) std::this_thread::yield();
        });
        return tenancy::tenant::submit(std::forward<Args>(args)...);
    }
};
struct held_tenancy {
    tenancy* of;
    const std::atomic<bool>* go;

    [[nodiscard]] held_tenant admit(tenant_spec spec) const { return {of->admit(std::move(spec)), go}; }
};

}  // namespace

TEST_CASE("a host's memory stays while a copy to it may still run", "[tenant][placement][move]") {
    using namespace std::chrono_literals;
    node n(modelled(1, 1));
    tenancy shared(n);
    stalling_tenant a(shared.admit({.name = "a", .memory = 48_MiB, .compute = 80_pct}), n);
    std::vector<gpushare::moving_block> blocks{{.at = a.memory().allocate(100'000), .size = 100'000}};
    std::memset(blocks[0].at, 1, 100'000);
    counting_memory host;
    while (!a.stalled) {  // again if even the queued work wasn't over by the deadline
        CHECK(host.given() == 0);
        CHECK(code_of([&] {
                  (void)gpushare::detail::park(a, blocks, host, shared.now() + 100ms, gpushare::ns{1'000'000});
              }) == errc::deadline_exceeded);
    }
    CHECK(host.given() == 1);  // the copy is still to come
    n.faults({0}).resume(a.work_stream());
    CHECK(a.submit([](auto&) {}).wait(shared.now() + 5min));
    CHECK(*static_cast<char*>(blocks[0].at) == 1);

    {
        gpushare::parked_tenant<counting_memory> freed(host, blocks), left(host, blocks);
        CHECK(host.given() == 3);
        left.leave_memory();
        const auto moved = std::move(left);
        CHECK(moved.blocks() == 1);
    }
    CHECK(host.given() == 2);
    CHECK(a.close().complete);
}

TEST_CASE("a host's memory stays while a copy from it may still run", "[tenant][placement][move]") {
    std::atomic<bool> go{false};
    node n(modelled(1, 1));
    tenancy shared(n, {.close_timeout = 5ms});
    auto a = shared.admit({.name = "a", .memory = 24_MiB, .compute = 40_pct});
    std::vector<gpushare::moving_block> blocks{{.at = a.memory().allocate(100'000), .size = 100'000}};
    std::memset(blocks[0].at, 7, 100'000);
    counting_memory host;
    {
        auto parked = park_tenant(a, blocks, host, soon());
        held_tenancy held{&shared, &go};
        CHECK(code_of([&] {
                  (void)gpushare::detail::unpark(held, parked, {}, blocks, shared.now() + 5ms, gpushare::ns{1'000'000});
              }) == errc::deadline_exceeded);
        CHECK(blocks[0].at == nullptr);
        CHECK(parked.has(blocks));
        go = true;
        auto back = try_unpark_tenant(shared, parked, {}, blocks, soon());
        for (; !back; back = try_unpark_tenant(shared, parked, {}, blocks, soon())) {
            CHECK(back.code() == errc::duplicate_name);  // until an admission can close the other
            std::this_thread::yield();
        }
        a = *std::move(back);
        CHECK(static_cast<unsigned char*>(blocks[0].at)[99'999] == 7);
    }
    CHECK(host.given() == 1);
    CHECK(a.memory().deallocate(blocks[0].at, 100'000) == errc::none);
}

TEST_CASE("moving and parking say why they can't instead of throwing it, and then nothing has happened",
          "[tenant][placement][move]") {
    node n(modelled(2, 1));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 60_pct, .on = {{0}}});
    auto other = shared.admit({.name = "other", .memory = 16_MiB, .compute = 50_pct, .on = {{1}}});
    std::vector<gpushare::moving_block> blocks{{.at = a.memory().allocate(1000), .size = 1000}};
    const void* const was = blocks[0].at;
    std::memset(blocks[0].at, 7, 1000);
    auto& host = *std::pmr::new_delete_resource();

    const auto refused = try_move_tenant(shared, a, {{1}}, blocks, soon());
    CHECK(refused.code() == errc::share_exceeded);
    CHECK(refused.why().asked == 600);
    CHECK(refused.why().left == 500);
    other.resize({.compute = 10_pct});
    n.memory({1}).fail_allocations(0, 1'000'000);
    CHECK(try_move_tenant(shared, a, {{1}}, blocks, soon()).code() == errc::out_of_memory);
    n.memory({1}).fail_allocations(0, 0);
    n.faults({0}).stall(a.work_stream());
    const auto held = a.submit([](auto& s) { s.enqueue(1us); });
    CHECK(try_park_tenant(a, blocks, host, shared.now() + 5ms).code() == errc::deadline_exceeded);
    n.faults({0}).resume(a.work_stream());
    CHECK(held.wait(soon()));
    CHECK(blocks[0].at == was);

    auto moved = try_move_tenant(shared, a, {{1}}, blocks, soon());
    REQUIRE(moved);
    a = std::move(moved->successor);
    auto parked = try_park_tenant(a, blocks, host, soon());
    REQUIRE(parked);
    CHECK(try_unpark_tenant(shared, *parked, {{0}, {1}}, blocks, soon()).why().asked == 2);
    auto back = try_unpark_tenant(shared, *parked, {{0}}, blocks, soon());
    REQUIRE(back);
    CHECK(back->spec().on == std::vector<device_id>{{0}});
    CHECK(static_cast<unsigned char*>(blocks[0].at)[999] == 7);
}

}  // namespace placed_by_test
