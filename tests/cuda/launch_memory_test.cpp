// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// The launch gate on a host that runs out of memory.
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <chrono>
#include <future>

#include <gpushare/backend/cuda/launch_gate.hpp>

#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/failing_new.hpp"
#include "support/launch_rig.hpp"

namespace launch_memory_test {

using namespace launch_rig;

TEST_CASE("a launch that the gate can't follow for lack of host memory is in nobody's way",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{{.devices = 1}};
    rig r{{.longest_hold = 10ms}};
    const auto neighbour = r.gate->add({});
    const streams s;
    {
        const auto inside = r.gate->enter(r.batch);
        support::this_heap = {.good = 0, .recovers = true, .least = sizeof(cuda::detail::launch_batches)};
        const auto code = launch(s.batch, conv, 10us);
        const bool failed = support::this_heap.failed;
        support::this_heap = {};
        CHECK(code == cudaSuccess);
        REQUIRE(failed);
    }
    CHECK(cudaStreamSynchronize(s.batch) == cudaSuccess);
    CHECK(r.gate->usage(r.batch).launches == 0);
    const auto inside = r.gate->enter(neighbour);
    CHECK(launch(s.urgent, gemm, 10us) == cudaSuccess);
    CHECK_FALSE(r.gate->take_forced());
    CHECK(cudaStreamSynchronize(s.urgent) == cudaSuccess);
}

}  // namespace launch_memory_test

#endif
