// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// The suites on the host backend, with both timings.
#include <gpushare/backend/host/host.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <set>
#include <tuple>

#include <gpushare/detail/device_order_lock.hpp>
#include "conformance/clock_suite.hpp"
#include "conformance/gang_suite.hpp"
#include "conformance/launcher_suite.hpp"
#include "conformance/memory_suite.hpp"
#include "conformance/node_suite.hpp"
#include "conformance/sms_suite.hpp"
#include "conformance/timeline_suite.hpp"
#include "support/catch.hpp"

using namespace gpushare;
using namespace std::chrono_literals;

namespace {

template <host::timing Timing>
class host_backend {
public:
    using stream = host::stream;

    host::node& node() { return node_; }
    host::device_memory& memory() { return node_.memory(device_id{0}); }
    stream make_stream(priority level) { return node_.make_stream(device_id{0}, level); }
    void hold(stream& s) { node_.faults(device_id{0}).stall(s); }
    void let_go(stream& s) { node_.faults(device_id{0}).resume(s); }
    [[nodiscard]] instant now() const { return node_.get_clock().now(); }
    static void read(stream& s, void* to, const void* from, std::size_t size) { s.copy(to, from, size); }

private:
    host::node node_{{.devices = 4, .memory = 64_MiB, .sms = 2, .timing = Timing, .taken = 1_MiB}};
};

template <host::timing Timing>
class host_sms {
public:
    host::device_sms sms() { return {node_, device_id{0}}; }
    std::set<std::uint32_t> sms_of(host::stream& s) {
        (void)node_.ledger(device_id{0}).take();
        for (int i = 0; i < 3; ++i) s.enqueue(1us);  // a block on each
        CHECK(s.record().wait(never));
        std::set<std::uint32_t> had;
        for (const auto& block : node_.ledger(device_id{0}).take().blocks) had.insert(block.sm);
        return had;
    }

private:
    host::node node_{{.sms = 9, .sm_unit = 2, .timing = Timing}};
};

using backends = std::tuple<host_backend<host::timing::real>, host_backend<host::timing::modelled>>;

}  // namespace

TEMPLATE_LIST_TEST_CASE("timeline", "[conformance]", backends) { conformance::check_timeline<TestType>(); }
TEMPLATE_LIST_TEST_CASE("queue", "[conformance]", backends) { conformance::check_queue<TestType>(); }
TEMPLATE_LIST_TEST_CASE("memory", "[conformance]", backends) { conformance::check_memory<TestType>(); }
TEMPLATE_LIST_TEST_CASE("launcher", "[conformance]", backends) { conformance::check_launcher<TestType>(); }
TEMPLATE_LIST_TEST_CASE("node", "[conformance]", backends) { conformance::check_node<TestType>(); }
TEMPLATE_LIST_TEST_CASE("gang order of a node", "[conformance]", backends) {
    TestType backend;
    conformance::check_gang_order(backend.node().gangs());
}

TEMPLATE_TEST_CASE("SMs", "[conformance]", host_sms<host::timing::real>, host_sms<host::timing::modelled>) {
    conformance::check_sms_split<TestType>();
}

TEST_CASE("clocks", "[conformance]") {
    conformance::check_clock(host::steady_clock{}, true);
    conformance::check_clock(host::thread_cpu_clock{}, false);
    conformance::check_clock(host::manual_clock{}, true);
}

TEST_CASE("gang order", "[conformance]") {
    gpushare::detail::device_order_lock order{4};
    conformance::check_gang_order(order);
    CHECK_THROWS_AS(gpushare::detail::device_order_lock{100000}, operation_error);
}
