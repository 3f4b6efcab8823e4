// SPDX-License-Identifier: Apache-2.0
// The C functions behind gpushare_torch.py, with libtorch's own c10 over the stand-in for CUDA.
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include <gpushare/units.hpp>

#include "no_libtorch_cuda.hpp"
#include "pytorch_tenants/tenants.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"

namespace torch_python_test {

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using Catch::Matchers::Contains;
constexpr std::size_t MiB = 1 << 20;

c10::DataPtr bytes_of(std::size_t n) { return caching::get()->allocate(n); }

struct rig {
    rig() {
        c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
        caching::init(1);
    }
    rig(const rig&) = delete;
    rig& operator=(const rig&) = delete;
    ~rig() {
        tenants_stop();
        caching::emptyCache();
    }
    standin::session gpu{{.devices = 1, .memory = gpushare::bytes{256 * MiB}}};
};

constexpr const char* two = "name=chat memory=64MiB compute=30%\nname=batch memory=64MiB compute=70%";

}  // namespace

TEST_CASE("memory that threads allocate for a thread of Python on its tenant's stream is the tenant's",
          "[interop][torch]") {
    const rig r;
    REQUIRE(tenants_start(0, two) == 0);
    void* const inside = tenants_enter("chat");
    REQUIRE(inside != nullptr);
    const auto stream = c10::cuda::getCurrentCUDAStream(0);
    std::vector<c10::DataPtr> tensors;
    tensors.push_back(bytes_of(MiB));
    CHECK(tenants_used("chat") == MiB);
    std::thread([&] {  // of autograd: it takes the stream of the forward pass, and no scope
        const c10::cuda::CUDAStreamGuard there(stream);
        tensors.push_back(bytes_of(2 * MiB));
    })
        .join();
    CHECK(tenants_used("chat") == 3 * MiB);
    CHECK(tenants_used("batch") == 0);
    tenants_leave(inside);
    CHECK(c10::cuda::getCurrentCUDAStream(0) != stream);
    CHECK(tenants_used("chat") == 3 * MiB);  // tensors outlive the call
    tensors.clear();
    CHECK(tenants_used("chat") == 0);
}

TEST_CASE("a tenant of Python gets no more than its quota on any thread, and goes on", "[interop][torch]") {
    const rig r;
    REQUIRE(tenants_start(0, two) == 0);
    void* const inside = tenants_enter("batch");
    REQUIRE(inside != nullptr);
    const auto stream = c10::cuda::getCurrentCUDAStream(0);
    {
        const auto most = bytes_of(60 * MiB);
        std::thread([&] {
            const c10::cuda::CUDAStreamGuard there(stream);
            CHECK_THROWS_AS(bytes_of(8 * MiB), c10::OutOfMemoryError);
        }).join();
        CHECK(tenants_used("batch") == 60 * MiB);
        CHECK(tenants_refused("batch") >= 1);
        CHECK(tenants_refused("chat") == 0);
    }
    CHECK(bytes_of(8 * MiB).get() != nullptr);
    tenants_leave(inside);
    tenants_give_back();
}

TEST_CASE("a mistake in Python is reported, and ends no process", "[interop][torch]") {
    const rig r;
    CHECK(tenants_enter("chat") == nullptr);
    CHECK_THAT(tenants_problem(), Contains("aren't started"));
    CHECK(tenants_start(0, "name=chat memory=lots") == -1);
    CHECK_THAT(tenants_problem(), Contains("memory"));
    CHECK(tenants_start(0, "") == -1);
    CHECK_THAT(tenants_problem(), Contains("no tenant"));
    REQUIRE(tenants_start(0, two) == 0);
    CHECK(tenants_start(0, two) == -1);
    CHECK_THAT(tenants_problem(), Contains("started already"));
    CHECK(tenants_enter("nobody") == nullptr);
    CHECK_THAT(tenants_problem(), Contains("no tenant 'nobody'"));
    CHECK(tenants_used("nobody") == static_cast<std::uint64_t>(-1));
    CHECK(std::string(tenants_torch()).find('.') != std::string::npos);
}

}  // namespace torch_python_test
