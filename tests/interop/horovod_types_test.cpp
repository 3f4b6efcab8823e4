// SPDX-License-Identifier: Apache-2.0
// Horovod's names for arrays on devices: every operator and type, with ranks that join, as over
// every transport (conformance/named_suite.hpp). On the host backend.
#include <gpushare/gradient/horovod_devices.hpp>

#include <cstdint>
#include <memory>
#include <memory_resource>
#include <string>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/communicator.hpp>

#include "conformance/named_suite.hpp"
#include "support/catch.hpp"
#include "support/named_ranks.hpp"
#include "support/threads.hpp"

namespace horovod_types_test {

namespace gs = gpushare;
using machine_type = support::named_machine<gs::host::node, std::pmr::memory_resource, gs::communicator, float, double,
                                            gs::float16, gs::bfloat16, std::int64_t>;

TEST_CASE("every operator on devices: ranks that have joined change no result", "[interop]") {
    const auto ranks = GENERATE(1U, 2U, 3U);
    const bool together = GENERATE(false, true);
    CAPTURE(ranks, together);
    gs::host::node node({.devices = together ? 1 : ranks, .sms = 8});
    const gs::communicator group(ranks, {.blocks = 2});
    machine_type m(node, *std::pmr::new_delete_resource(), group, together);
    std::vector<std::string> wrong(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::horovod::process_set of(*m.ranks, r);
        wrong[r] = conformance::check_named(of, support::named_on_device<machine_type>{m, r});
    });
    for (const auto& w : wrong) CHECK(w == "");
}

TEST_CASE("an average of integers on devices is refused", "[interop]") {
    gs::host::node node({.devices = 1, .sms = 8});
    const gs::communicator group(1);
    machine_type m(node, *std::pmr::new_delete_resource(), group, true);
    gs::horovod::process_set of(*m.ranks, 0);
    std::vector<std::int64_t> x(2);
    auto code = gs::errc::none;
    try {
        (void)gs::horovod::allreduce_async(m.array(0, std::span(x)), "x", gs::horovod::Average, of);
    } catch (const gs::operation_error& e) {
        code = e.code();
    }
    CHECK(code == gs::errc::invalid_specification);
}

}  // namespace horovod_types_test
