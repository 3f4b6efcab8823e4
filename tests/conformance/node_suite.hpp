// SPDX-License-Identifier: Apache-2.0
// The contract of every node. A backend is a default-constructible type with `auto& node()`, of two
// or more devices.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gpushare/concepts.hpp>
#include "conformance/timeline_suite.hpp"
#include "support/catch.hpp"

namespace conformance {

template <class Backend>
void check_node() {
    using namespace gpushare;
    using namespace std::chrono_literals;
    Backend backend;
    node auto& n = backend.node();
    const std::uint32_t devices = n.num_devices();
    REQUIRE(devices >= 2);

    SECTION("every device has a memory of its own") {
        for (std::uint32_t d = 0; d < devices; ++d) {
            auto& m = n.memory(device_id{d});
            CHECK(&m == &n.memory(device_id{d}));
            CHECK(m.capacity() > bytes{});
            for (std::uint32_t other = 0; other < d; ++other) CHECK(&m != &n.memory(device_id{other}));
        }
    }
    SECTION("every device takes work") {
        using stream = typename Backend::stream;
        std::vector<stream> streams;
        std::vector<typename stream::point> points;
        for (std::uint32_t d = 0; d < devices; ++d) {
            streams.push_back(n.make_stream(device_id{d}, priority{1}, d));
            streams.back().enqueue(10us);
            points.push_back(streams.back().record());
        }
        CHECK(stream::point::wait_any(points, never));
        for (const auto& p : points) CHECK(p.wait(never));
    }
    SECTION("work on one device doesn't wait for another") {
        auto s = n.make_stream(device_id{0}, priority{9}, 0);
        auto t = n.make_stream(device_id{1}, priority{0}, 1);
        check_not_held_up(backend, s, t);
    }
    SECTION("a device that isn't there is refused") {
        CHECK_THROWS_AS(n.memory(device_id{devices}), error);
        CHECK_THROWS_AS(n.make_stream(device_id{devices}, priority{0}, 0), error);
        const std::vector gang{device_id{0}, device_id{devices}};
        CHECK_THROWS_AS(n.gangs().enter(gang), error);
        const std::vector whole{device_id{0}};
        auto guard = n.gangs().enter(whole);  // the refused gang holds nothing
    }
}

}  // namespace conformance
