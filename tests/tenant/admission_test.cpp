// SPDX-License-Identifier: Apache-2.0
// The part of an admission outside of the tenancy's mutex: the driver may take long to make a
// stream, and no other thread waits for that.
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <new>
#include <utility>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"

namespace admission_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::device_id;
using gpushare::errc;
using gpushare::priority;

using support::code_of;

namespace {

/// A node that calls `making` before each stream.
struct telling_node : gpushare::host::node {
    using gpushare::host::node::node;

    gpushare::host::stream make_stream(device_id d, priority level = {}, std::uint32_t tag = 0) {
        if (making) making();
        return gpushare::host::node::make_stream(d, level, tag);
    }

    std::function<void()> making;
};
using tenancy = gpushare::tenancy<telling_node>;

constexpr gpushare::host::node_options small{
    .devices = 1, .memory = 64_MiB, .sms = 1, .timing = gpushare::host::timing::modelled};

}  // namespace

TEST_CASE("streams of a tenant are made under no lock of the tenancy", "[tenant][admission]") {
    telling_node n(small);
    tenancy shared(n);
    std::future<errc> other;
    bool asked = false, answered = false;
    n.making = [&] {
        if (std::exchange(asked, true)) return;  // by the other admission
        other = std::async(std::launch::async, [&] {
            return code_of([&] { (void)shared.admit({.name = "a", .memory = 1_MiB, .compute = 1_pct}); });
        });
        answered = other.wait_for(5min) == std::future_status::ready;
    };
    auto a = shared.admit({.name = "a", .memory = 32_MiB, .compute = 60_pct});
    CHECK(answered);
    CHECK(other.get() == errc::duplicate_name);  // the name is taken from the decision on
    CHECK(shared.unpromised({0}) == 40_pct);
    CHECK(a.memory().capacity() == 32_MiB);
}

TEST_CASE("an admission whose streams can't be made takes nothing", "[tenant][admission]") {
    telling_node n(small);
    tenancy shared(n);
    n.making = [] { throw std::bad_alloc(); };
    CHECK_THROWS_AS(shared.admit({.name = "a", .memory = 32_MiB, .compute = 60_pct}), std::bad_alloc);
    CHECK(shared.unpromised({0}) == gpushare::share::whole());
    CHECK(shared.rooms()[0].free == 64_MiB);
    n.making = nullptr;
    auto a = shared.admit({.name = "a", .memory = 64_MiB, .compute = 100_pct});
    CHECK(a.spec().memory == 64_MiB);
}

}  // namespace admission_test
