// SPDX-License-Identifier: Apache-2.0
// Subsets of a host device's SMs. The ledger says on which SM each block ran.
#include <gpushare/backend/host/host.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include <gpushare/sm_split.hpp>

#include "host/gate.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"

namespace sms_test {

using namespace gpushare;
using namespace std::chrono_literals;
using host::timing;
using support::code_of;

namespace {

constexpr device_id d{0};

/// Which SMs each tag had.
std::map<std::uint32_t, std::set<std::uint32_t>> sms_by_tag(host::node& node) {
    std::map<std::uint32_t, std::set<std::uint32_t>> had;
    for (const auto& b : node.ledger(d).take().blocks) had[b.tag].insert(b.sm);
    return had;
}

}  // namespace

TEST_CASE("blocks of a subset have its SMs and no others, whatever else runs", "[host][sms]") {
    for (const auto t : {timing::real, timing::modelled}) {
        host::node node{{.sms = 6, .timing = t}};
        host::device_sms sms{node, d};
        auto parts = sms.partition(std::array{2U, 3U});
        std::vector<host::stream> streams;
        for (std::uint32_t i = 0; i < 6; ++i)
            streams.push_back(parts[i % 2].make_stream(priority{static_cast<int>(i % 3)}, 1 + i % 2));
        for (int round = 0; round < 50; ++round)
            for (auto& s : streams) {
                s.launch({.blocks = 7, .hold = 20us}, [](auto&) {});
                s.enqueue(5us);
                CHECK(s.launch_cooperative({.blocks = 2, .hold = 5us}, [](auto& ctx) { (void)ctx.grid_sync(); }) ==
                      errc::none);
            }
        for (auto& s : streams) CHECK(s.record().wait(never));
        const auto had = sms_by_tag(node);
        CHECK(had.at(1) == std::set<std::uint32_t>{0, 1});
        CHECK(had.at(2) == std::set<std::uint32_t>{2, 3, 4});
        CHECK(sms.outside_any_partition().empty());
    }
}

TEST_CASE("a stream of the node runs on every SM, those of subsets too, and is named", "[host][sms]") {
    host::node node{{.sms = 4, .timing = timing::modelled}};
    host::device_sms sms{node, d};
    auto parts = sms.partition(std::array{2U, 2U});
    auto in = parts[0].make_stream({}, 1), also_in = parts[1].make_stream({}, 2);
    CHECK(sms.outside_any_partition().empty());
    auto out = node.make_stream(d, {}, 42);
    auto later = sms.make_stream({}, 9);
    CHECK(sms.outside_any_partition() == std::vector<std::uint32_t>{9, 42});
    CHECK(in.in_partition());
    CHECK_FALSE(out.in_partition());
    out.launch({.blocks = 4, .hold = 2ms}, [](auto&) {});
    CHECK(out.record().wait(never));
    CHECK(sms_by_tag(node).at(42).size() == 4);
    { const auto gone = std::move(out); }
    CHECK(sms.outside_any_partition() == std::vector<std::uint32_t>{9});
}

TEST_CASE("subsets don't wait for one another", "[host][sms]") {
    gate g;
    host::node node{{.sms = 2}};
    auto parts = host::device_sms{node, d}.partition(std::array{1U, 1U});
    auto slow = parts[0].make_stream(priority{5}, 1), fast = parts[1].make_stream({}, 2);
    for (int i = 0; i < 3; ++i) slow.launch({.blocks = 4}, g.kernel());
    g.wait_inside(1);
    for (int i = 0; i < 20; ++i) fast.launch({.blocks = 3}, [](auto&) {});
    CHECK(fast.record().wait(never));
    g.open();
    CHECK(slow.record().wait(never));
}

TEST_CASE("a subset tells how many blocks are resident at once", "[host][sms]") {
    host::node node{{.sms = 5}};
    auto parts = host::device_sms{node, d}.partition(std::array{2U, 3U});
    auto two = parts[0].make_stream(), three = parts[1].make_stream(), all = node.make_stream(d);
    CHECK(two.max_cooperative_blocks() == 2);
    CHECK(three.max_cooperative_blocks() == 3);
    CHECK(all.max_cooperative_blocks() == 5);
    CHECK(two.sms() == 2);
    std::atomic<int> met{0};
    const auto meet = [&](auto& ctx) { met += ctx.grid_sync(); };
    CHECK(two.launch_cooperative({.blocks = 3}, meet) == errc::too_many_blocks);
    CHECK(three.launch_cooperative({.blocks = 4}, meet) == errc::too_many_blocks);
    for (int i = 0; i < 20; ++i) {
        CHECK(two.launch_cooperative({.blocks = 2}, meet) == errc::none);
        CHECK(three.launch_cooperative({.blocks = 3}, meet) == errc::none);
        CHECK(all.launch_cooperative({.blocks = 5}, meet) == errc::none);
    }
    for (auto* s : {&two, &three, &all}) CHECK(s->record().wait(never));
    CHECK(met == 20 * (2 + 3 + 5));
}

TEST_CASE("in modelled time a cooperative launch starts when its subset is free, to the nanosecond", "[host][sms]") {
    host::node node{{.sms = 4, .timing = timing::modelled}};
    auto parts = host::device_sms{node, d}.partition(std::array{2U, 2U});
    auto a = parts[0].make_stream({}, 1), other = parts[0].make_stream({}, 2), b = parts[1].make_stream({}, 3);
    b.enqueue(300ms);
    other.launch({.blocks = 1, .hold = 100ms}, [](auto&) {});
    CHECK(a.launch_cooperative({.blocks = 2, .hold = 1ms}, [](auto&) {}) == errc::none);
    const auto launched = host::steady_clock{}.now();
    CHECK(a.record().wait(never));
    CHECK(b.record().wait(never));
    instant other_end{}, start{};
    for (const auto& block : node.ledger(d).take().blocks) {
        if (block.tag == 2) other_end = block.end;
        if (block.tag == 1) start = std::max(start, block.start);
    }
    if (launched < other_end) CHECK(start == other_end);  // and not b's end; later, this machine had stalled
}

TEST_CASE("SMs are taken all or none, in whole units, and come back with the last stream", "[host][sms]") {
    host::node node{{.sms = 9, .sm_unit = 2}};
    host::device_sms sms{node, d};
    const auto can = sms.split();
    CHECK(can.sms == 9);
    CHECK(can.unit == 2);
    CHECK(can.units == 4);
    CHECK(code_of([&] { (void)sms.partition(std::array{3U}); }) == errc::not_whole);
    CHECK(code_of([&] { (void)sms.partition(std::array{6U, 4U}); }) == errc::too_few_sms);
    CHECK(code_of([&] { host::device_sms{node, device_id{1}}; }) == errc::no_device);
    CHECK(sms.partition({}).empty());

    std::optional<host::stream> last;
    {
        auto parts = sms.partition(std::array{4U, 2U});
        CHECK(code_of([&] { (void)sms.partition(std::array{4U}); }) == errc::too_few_sms);
        CHECK(sms.partition(std::array{2U}).front().sms() == 2);
        last = parts[0].make_stream({}, 7);
        auto moved = std::move(parts[1]);
        parts[0] = std::move(moved);  // what it was stays for its stream
    }
    CHECK(code_of([&] { (void)sms.partition(std::array{6U}); }) == errc::too_few_sms);
    last->launch({.blocks = 8}, [](auto&) {});
    CHECK(last->record().wait(never));
    CHECK(sms_by_tag(node).at(7) == std::set<std::uint32_t>{0, 1, 2, 3});
    last.reset();
    CHECK(sms.partition(std::array{8U}).front().sms() == 8);
    CHECK_THROWS_AS((host::node{{.sms = 4, .sm_unit = 0}}), operation_error);
}

TEST_CASE("a device that is lost takes the work of subsets along", "[host][sms][fault]") {
    gate g;
    host::node node{{.sms = 2}};
    auto parts = host::device_sms{node, d}.partition(std::array{1U, 1U});
    auto a = parts[0].make_stream(), b = parts[1].make_stream();
    a.launch({.blocks = 3}, g.kernel());
    b.launch({.blocks = 3}, g.kernel());
    g.wait_inside(2);
    node.faults(d).lose_device();
    g.open();
    for (auto* s : {&a, &b}) {
        const auto p = s->record();
        CHECK(p.wait(never));
        CHECK(p.status() == errc::device_lost);
    }
}

}  // namespace sms_test
