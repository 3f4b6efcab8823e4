// SPDX-License-Identifier: Apache-2.0
#include <gpushare/backend/host/clock.hpp>

#include <chrono>

#include "support/catch.hpp"

using namespace gpushare;
using namespace std::chrono_literals;

TEST_CASE("a manual clock moves when it is told, and forward only", "[host]") {
    host::manual_clock c{instant{5ms}};
    CHECK(c.now() == instant{5ms});
    c.advance(2ms);
    CHECK(c.now() == instant{7ms});
    c.advance(-1ms);
    CHECK(c.now() == instant{7ms});
    CHECK(host::manual_clock{}.now() == instant{});
}
