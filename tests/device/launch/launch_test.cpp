// SPDX-License-Identifier: Apache-2.0
// The calls of launch.cuh and cooperative.cuh to the CUDA runtime, over the stand-in: their host
// side as nvcc compiles it.
#include <gpushare/backend/cuda/node.hpp>

#include <cstring>
#include <limits>

#include "launches.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"

using namespace gpushare;

namespace {

constexpr std::uint32_t sms = 16;
constexpr launches::payload kernel{{2, 3, 5, 7, 11}};

struct fixture {
    const standin::session gpu{{.devices = 2, .sms = sms}};
    cuda::node node;
    cuda::stream stream = node.make_stream(device_id{1}, priority{0});
    launches::fake& runtime = launches::runtime();

    fixture() { runtime = {}; }
    void finish() { CHECK(stream.record().wait(never)); }
};

}  // namespace

TEST_CASE("a launch reaches its stream with its grid and its arguments", "[device]") {
    fixture f;
    launches::launch(f.stream, {.blocks = 7, .threads = 96}, kernel);
    REQUIRE(f.runtime.requests.size() == 1);
    const auto& r = f.runtime.requests[0];
    CHECK(r.stream == f.stream.native_handle());
    CHECK(r.blocks == 7);
    CHECK(r.threads == 96);
    CHECK(r.shared_memory == 0);
    CHECK_FALSE(r.cooperative);
    CHECK(std::memcmp(&r.arguments, &kernel, sizeof kernel) == 0);
    f.finish();
}

TEST_CASE("the stream's device is current for a launch, and the thread's own again afterwards", "[device]") {
    fixture f;
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    launches::launch(f.stream, {.blocks = 1, .threads = 32}, kernel);
    CHECK(f.runtime.requests.at(0).device == 1);
    int device = -1;
    CHECK(cudaGetDevice(&device) == cudaSuccess);
    CHECK(device == 0);
    f.finish();
}

TEST_CASE("a grid of no blocks is not launched", "[device]") {
    fixture f;
    launches::launch(f.stream, {.blocks = 0, .threads = 32}, kernel);
    CHECK(launches::launch_cooperative(f.stream, {.blocks = 0, .threads = 32}, kernel) == errc::none);
    CHECK(f.runtime.requests.empty());
}

TEST_CASE("a cooperative launch has at most the blocks that its stream's SMs hold", "[device]") {
    fixture f;
    f.runtime.blocks_per_sm = 3;
    CHECK(launches::max_cooperative_blocks(f.stream, 64) == 3 * sms);
    CHECK(launches::launch_cooperative(f.stream, {.blocks = 3 * sms + 1, .threads = 64}, kernel) ==
          errc::too_many_blocks);
    CHECK(launches::launch_cooperative(f.stream, {.blocks = std::numeric_limits<std::uint32_t>::max(), .threads = 64},
                                       kernel) == errc::too_many_blocks);
    CHECK(f.runtime.requests.empty());
    CHECK(launches::launch_cooperative(f.stream, {.blocks = 3 * sms, .threads = 64}, kernel) == errc::none);
    REQUIRE(f.runtime.requests.size() == 1);
    CHECK(f.runtime.requests[0].cooperative);
    f.finish();
}

TEST_CASE("blocks without threads, or with more than the device has, can't be resident", "[device]") {
    fixture f;
    CHECK(launches::max_cooperative_blocks(f.stream, 0) == 0);
    CHECK(launches::max_cooperative_blocks(f.stream, f.stream.properties().threads_per_block + 1) == 0);
    CHECK(launches::max_cooperative_blocks(f.stream, std::numeric_limits<std::uint32_t>::max()) == 0);
}

TEST_CASE("a refusal of the runtime is typed", "[device]") {
    fixture f;
    SECTION("a cooperative launch that doesn't fit after all") {
        // Between the question and the launch, the answer has changed: here, only the launch fails.
        f.runtime.blocks_per_sm = 1;
        const auto before = f.runtime.requests.size();
        standin::inject({.call = "cudaLaunchKernelExC", .code = cudaErrorCooperativeLaunchTooLarge});
        CHECK(launches::launch_cooperative(f.stream, {.blocks = 1, .threads = 32}, kernel) == errc::too_many_blocks);
        CHECK(f.runtime.requests.size() == before + 1);
        CHECK(cudaGetLastError() == cudaSuccess);  // it was handled, and isn't the embedder's to find
    }
    SECTION("a configuration that the device can't run") {
        f.runtime.answer = cudaErrorInvalidConfiguration;
        CHECK_THROWS_WITH(launches::launch(f.stream, {.blocks = 1, .threads = 5000}, kernel),
                          Catch::Contains("launching a kernel") && Catch::Contains("(9)"));
    }
    SECTION("a kernel that this device has no code for") {
        f.runtime.answer = cudaErrorNoKernelImageForDevice;
        try {
            launches::launch(f.stream, {.blocks = 1, .threads = 32}, kernel);
            FAIL("launched");
        } catch (const operation_error& e) {
            CHECK(e.code() == errc::not_supported);
        }
    }
    SECTION("an occupancy that can't be told: nothing is launched") {
        f.runtime.answer = cudaErrorInvalidDeviceFunction;
        CHECK(launches::max_cooperative_blocks(f.stream, 32) == 0);
        CHECK(launches::launch_cooperative(f.stream, {.blocks = 1, .threads = 32}, kernel) == errc::too_many_blocks);
        CHECK(f.runtime.requests.empty());
    }
    SECTION("a device that is lost: the next point says so") {
        f.runtime.answer = cudaErrorIllegalAddress;
        launches::launch(f.stream, {.blocks = 1, .threads = 32}, kernel);
        CHECK(f.stream.record().status() == errc::device_lost);
    }
}

TEST_CASE("opaque work is one block that gets its length in nanoseconds", "[device]") {
    fixture f;
    using us = std::chrono::duration<double, std::micro>;
    launches::enqueue(f.stream, us{0});
    launches::enqueue(f.stream, us{-1});
    CHECK(f.runtime.requests.empty());
    launches::enqueue(f.stream, us{2.5});
    REQUIRE(f.runtime.requests.size() == 1);
    CHECK(f.runtime.requests[0].blocks == 1);
    CHECK(f.runtime.requests[0].threads == 1);
    CHECK(f.runtime.requests[0].arguments.words[0] == 2500);
    f.finish();
}
