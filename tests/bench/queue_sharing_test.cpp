// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// The counts of streams beside a stream that waits; and no wait stays closed.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "gpu/queue_sharing.hpp"
#include "support/catch.hpp"

namespace {

using namespace std::chrono_literals;
using bench::patience;
using bench::stream_beside;
using seen = std::vector<stream_beside>;

}  // namespace

TEST_CASE("a stream whose end is seen only when the wait is opened counts as blocked, in its group", "[bench]") {
    const seen open{{0, 3.0}, {1, 4.0}, {0, 5.0}, {1, 6.0}};
    CHECK(bench::compare(open, open).blocked == std::array<std::uint32_t, 2>{0, 0});
    const seen one_each{{0, {}}, {1, 8.0}, {0, 6.0}, {1, {}}};
    CHECK(bench::compare(one_each, open).blocked == std::array<std::uint32_t, 2>{1, 1});
    const seen same_alone{{0, {}}, {1, 4.0}, {0, {}}, {1, 6.0}};
    CHECK(bench::compare(same_alone, open).blocked == std::array<std::uint32_t, 2>{2, 0});
}

TEST_CASE("the others' time is compared with that of the same streams", "[bench]") {
    const seen open{{0, 3.0}, {0, 4.0}, {0, 100.0}};
    const seen closed{{0, 9.0}, {0, 10.0}, {0, {}}};  // the last one's 100 us don't count
    CHECK(*bench::compare(closed, open).slowdown == 2.5);
    const seen all_blocked{{0, {}}, {0, {}}, {0, {}}};
    CHECK_FALSE(bench::compare(all_blocked, open).slowdown.has_value());
    CHECK_THROWS_AS(bench::compare(closed, closed), std::runtime_error);  // something else stops the last one
}

TEST_CASE("a host that stood still has looked long enough only after its looks", "[bench]") {
    const patience::clock::time_point begin{};
    patience looks(10ms, 3);
    CHECK(looks.go_on(false, begin));
    CHECK(looks.go_on(false, begin + 1h));
    CHECK(looks.go_on(true, begin + 2h));  // begins anew
    CHECK(looks.go_on(false, begin + 3h));
    CHECK(looks.go_on(false, begin + 3h));
    CHECK_FALSE(looks.go_on(false, begin + 3h));
    patience quick(10ms, 1);
    CHECK(quick.go_on(false, begin));
    CHECK(quick.go_on(false, begin + 9ms));
    CHECK_FALSE(quick.go_on(false, begin + 10ms));
}

TEST_CASE("a word is open again when nobody wants it closed, and when its time is over", "[bench]") {
    std::uint64_t word = 0;
    const auto value = [&] { return std::atomic_ref(word).load(std::memory_order_acquire); };
    {
        const bench::closed_word closed(word, 24h);
        CHECK(value() == 1);
        CHECK_FALSE(closed.forced());
    }
    CHECK(value() == 0);
    const bench::closed_word closed(word, 1ms);
    while (value() != 0) std::this_thread::yield();
    CHECK(closed.forced());
}
