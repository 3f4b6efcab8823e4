// SPDX-License-Identifier: Apache-2.0
// NCCL's own library, where it is found, on a machine without a device: it is linked, and says so.
#include <gpushare/interop/nccl.hpp>

#include <gpushare/config.hpp>

#ifdef GPUSHARE_TEST_NCCL

#include <cuda_runtime_api.h>

#include <vector>

#include <gpushare/backend/host/host.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"

namespace gs = gpushare;

namespace {

/// Says that it has CUDA devices, which nothing here has looked for.
struct claimed_devices : gs::host::node {
    struct properties_type {
        int ordinal;
    };
    claimed_devices() : node({.devices = 2, .sms = 1}) {}
    [[nodiscard]] static properties_type properties(gs::device_id d) { return {static_cast<int>(d.index)}; }
};

}  // namespace

TEST_CASE("NCCL's library without a device: a typed error", "[interop][nccl]") {
    int version = 0;
    REQUIRE(ncclGetVersion(&version) == ncclSuccess);
    CHECK(version >= 22000);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) return;
    const claimed_devices node;
    const std::vector<gs::device_id> both{{0}, {1}};
    const auto code = support::code_of([&] { gs::nccl_communicator{node, both}; });
    CHECK((code == gs::errc::no_driver || code == gs::errc::no_device));
}

#endif
