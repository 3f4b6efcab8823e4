// SPDX-License-Identifier: Apache-2.0
// The contract of every device whose SMs can be split. A backend is a default-constructible type
// with
//   auto sms()                                     a handle of an idle device of four units or more, all of them free
//   std::set<std::uint32_t> sms_of(stream&)        the SMs that its kernels run on
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/sm_split.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"

namespace conformance {

template <class Backend>
void check_sms_split() {
    using namespace gpushare;
    using namespace std::chrono_literals;
    using counts = std::vector<std::uint32_t>;
    using tags = std::vector<std::uint32_t>;
    Backend backend;
    sm_partitionable auto sms = backend.sms();
    using stream = typename decltype(sms)::stream;
    const sm_split can = sms.split();
    REQUIRE(can.units >= 4);
    REQUIRE(can.unit >= 1);
    REQUIRE(can.units * can.unit <= can.sms);

    SECTION("partitions have the SMs that were asked for, and share none") {
        auto parts = sms.partition(weighted_sms(can, counts{2, 1, 1}));
        REQUIRE(parts.size() == 3);
        std::set<std::uint32_t> seen;
        for (auto& p : parts) {
            auto s = p.make_stream(priority{1}, 5);
            CHECK(s.level() == priority{1});
            CHECK(s.tag() == 5);
            auto own = backend.sms_of(s);
            CHECK(own.size() == p.sms());
            seen.merge(own);
            CHECK(own.empty());
        }
        CHECK(seen.size() == can.units * can.unit);
        auto everywhere = sms.make_stream(priority{}, 6);
        CHECK(backend.sms_of(everywhere).size() == can.sms);
    }
    SECTION("all or none: whole units, and no more than there are") {
        const auto ask = [&](const counts& n) { return support::code_of([&] { (void)sms.partition(n); }); };
        if (can.unit > 1) CHECK(ask({can.unit, can.unit + 1}) == errc::not_whole);
        CHECK(ask({0}) == errc::not_whole);
        CHECK(ask({can.unit, can.units * can.unit}) == errc::too_few_sms);
        CHECK(ask({can.units * can.unit}) == errc::none);
    }
    SECTION("what somebody has, nobody else gets, until the last stream of it is gone") {
        const std::uint32_t all = can.units * can.unit;
        std::optional<stream> last;
        {
            auto half = sms.partition(counts{2 * can.unit});
            CHECK(support::code_of([&] { (void)sms.partition(counts{all}); }) == errc::too_few_sms);
            auto rest = sms.partition(counts{all - 2 * can.unit});
            last = half[0].make_stream({}, 1);
            auto theirs = rest[0].make_stream({}, 2);
            auto a = backend.sms_of(*last);
            auto b = backend.sms_of(theirs);
            a.merge(b);
            CHECK(b.empty());
        }
        CHECK(support::code_of([&] { (void)sms.partition(counts{all}); }) == errc::too_few_sms);
        last->enqueue(10us);
        CHECK(last->record().wait(never));
        CHECK(backend.sms_of(*last).size() == 2 * can.unit);
        last.reset();
        CHECK(sms.partition(counts{all}).size() == 1);
    }
    SECTION("streams in no partition are named, the others aren't") {
        CHECK(sms.outside_any_partition() == tags{});
        auto parts = sms.partition(equal_sms(can, 2));
        auto in = parts[1].make_stream({}, 3);
        CHECK(sms.outside_any_partition() == tags{});
        {
            auto out = sms.make_stream({}, 8), too = sms.make_stream(priority{1}, 4);
            CHECK(sms.outside_any_partition() == tags{4, 8});
            auto moved = std::move(out);
            CHECK(sms.outside_any_partition() == tags{4, 8});
        }
        CHECK(sms.outside_any_partition() == tags{});
    }
    if constexpr (launcher<stream>) SECTION("what is resident at once is asked of the partition") {
            auto parts = sms.partition(weighted_sms(can, counts{3, 1}));
            auto big = parts[0].make_stream(), small = parts[1].make_stream(), whole = sms.make_stream();
            const detail::empty_kernel kernel;
            const std::uint32_t most = small.max_cooperative_blocks(kernel, 1);
            CHECK(most >= 1);
            CHECK(big.max_cooperative_blocks(kernel, 1) * parts[1].sms() == most * parts[0].sms());
            CHECK(whole.max_cooperative_blocks(kernel, 1) * parts[1].sms() == most * can.sms);
            CHECK(small.launch_cooperative({.blocks = most + 1}, kernel) == errc::too_many_blocks);
            CHECK(small.launch_cooperative({.blocks = most}, kernel) == errc::none);
            CHECK(small.record().wait(never));
        }
    SECTION("work of a partition doesn't wait for that of another one") {
        auto parts = sms.partition(equal_sms(can, 2));
        auto a = parts[0].make_stream(priority{1}, 1), b = parts[1].make_stream({}, 2);
        a.enqueue(20ms);
        const auto slow = a.record();
        b.enqueue(1us);
        CHECK(b.record().wait(never));
        CHECK(slow.wait(never));
    }
}

}  // namespace conformance
