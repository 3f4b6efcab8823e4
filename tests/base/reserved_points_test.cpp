// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Points that are made before a launch: recording them afterwards needs no memory, so the launcher
// always learns when its work is done.
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <cstddef>
#include <new>
#include <span>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/detail/device_work.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/failing_new.hpp"

namespace reserved_points_test {

namespace gs = gpushare;
using reserved = gs::detail::point_reserve<gs::host::stream>;

TEST_CASE("a reserved point is recorded without memory, behind the stream's work", "[base]") {
    for (const std::size_t count : {std::size_t{2}, gs::detail::ranks_in_place + 1}) {
        CAPTURE(count);
        gs::host::node node{{.devices = 1, .sms = 1}};
        std::vector<gs::host::stream> streams;
        for (std::size_t i = 0; i < count; ++i) streams.push_back(node.make_stream(gs::device_id{0}));
        for (auto& s : streams) node.faults(gs::device_id{0}).stall(s);
        reserved points;
        points.reserve(streams);
        for (auto& s : streams) s.launch({.blocks = 1}, [](auto&) {});

        std::vector<gs::host::point> ends(count);
        bool lacked = false;
        support::this_heap = {.good = 0};
        try {
            for (std::size_t i = 0; i < count; ++i) ends[i] = points.record(i, streams[i]);
        } catch (const std::bad_alloc&) {
            lacked = true;
        }
        support::this_heap = {};
        CHECK_FALSE(lacked);
        for (std::size_t i = 0; i < count; ++i) {
            CHECK_FALSE(ends[i].reached());
            node.faults(gs::device_id{0}).resume(streams[i]);
            CHECK(ends[i].wait(gs::never));
        }
    }
}

TEST_CASE("points that are reserved and never recorded are made again without memory", "[base]") {
    gs::host::node node{{.devices = 1, .sms = 1}};
    std::vector<gs::host::stream> streams;
    streams.push_back(node.make_stream(gs::device_id{0}));
    {
        reserved unused;
        unused.reserve(streams);
    }
    reserved points;
    support::this_heap = {.good = 0};
    bool lacked = false;
    try {
        points.reserve(streams);
    } catch (const std::bad_alloc&) {
        lacked = true;
    }
    support::this_heap = {};
    CHECK_FALSE(lacked);
}

}  // namespace reserved_points_test

#endif
