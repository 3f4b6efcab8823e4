// SPDX-License-Identifier: Apache-2.0
// The contract of every launcher. In addition to the needs of the timeline suite, a backend has
// `auto& memory()`, and
//   void read(stream&, void* host, const void* device, std::size_t)     enqueued; done when a later point is
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gpushare/concepts.hpp>
#include "conformance/kernels.hpp"
#include "support/catch.hpp"

namespace conformance {

template <class Backend>
requires gpushare::launcher<typename Backend::stream>
void check_launcher() {
    using namespace gpushare;
    using namespace std::chrono_literals;
    Backend backend;
    auto s = backend.make_stream(priority{0});
    constexpr std::uint32_t slots = 64;
    constexpr std::size_t size = slots * sizeof(std::uint32_t);
    auto* const device = static_cast<std::uint32_t*>(backend.memory().allocate(size, 256));

    const auto values = [&] {
        std::vector<std::uint32_t> host(slots);
        backend.read(s, host.data(), device, size);
        CHECK(s.record().wait(never));
        return host;
    };
    const std::vector<std::uint32_t> start(slots, 7);  // tools of devices complain about memory that nobody has written
    s.copy(device, start.data(), size);
    CHECK(values() == start);

    SECTION("every thread of every block runs once") {
        s.launch({.blocks = 32, .threads = 1}, kernels::count_threads{device});
        const auto after = values();
        for (std::uint32_t i = 0; i < slots; ++i) CHECK(after[i] == start[i] + (i < 32 ? 1 : 0));
    }
    SECTION("kernels of a stream run one after the other") {
        auto expected = start;
        for (std::uint32_t i = 0; i < 100; ++i) {
            const std::uint32_t blocks = 1 + i % slots;
            s.launch({.blocks = blocks, .hold = 1us}, kernels::step{device, i});
            for (std::uint32_t b = 0; b < blocks; ++b) expected[b] = expected[b] * 3 + i;
        }
        CHECK(values() == expected);
    }
    SECTION("a cooperative launch runs, or is refused and does nothing") {
        const std::uint32_t most = s.max_cooperative_blocks(kernels::step{device, 7}, 1);
        REQUIRE(most >= 1);
        auto expected = start;
        for (std::uint32_t b = 0; b < std::min(most, slots); ++b) expected[b] = expected[b] * 3 + 7;
        CHECK(s.launch_cooperative({.blocks = std::min(most, slots)}, kernels::step{device, 7}) == errc::none);
        CHECK(s.launch_cooperative({.blocks = most + 1}, kernels::step{device, 9}) == errc::too_many_blocks);
        CHECK(values() == expected);
    }
    backend.memory().deallocate(device, size, 256);
}

}  // namespace conformance
