// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// The suite's kernels on the host backend, whose blocks have one thread.
#include <gpushare/backend/host/host.hpp>

#include "conformance/kernel_suite.hpp"
#include "support/catch.hpp"

using namespace gpushare;

namespace {

class host_backend {
public:
    using stream = host::stream;
    host::device_memory& memory() { return node_.memory(device_id{0}); }
    stream make_stream(priority level) { return node_.make_stream(device_id{0}, level); }

private:
    host::node node_{{.memory = 64_MiB, .sms = 4}};
};

}  // namespace

TEST_CASE("kernels", "[conformance]") { conformance::check_kernels<host_backend>(1); }
