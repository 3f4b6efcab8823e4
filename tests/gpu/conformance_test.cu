// SPDX-License-Identifier: Apache-2.0
// The suites that every backend passes, on a real device: the bodies that run over the stand-in in
// tests/cuda.
#include <gpushare/gpushare.cuh>

#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/backend/cuda/virtual_memory.hpp>

#include <cstddef>
#include <cstdint>
#include <map>

#include "conformance/clock_suite.hpp"
#include "conformance/gang_suite.hpp"
#include "conformance/kernel_suite.hpp"
#include "conformance/launcher_suite.hpp"
#include "conformance/memory_resource_suite.hpp"
#include "conformance/memory_suite.hpp"
#include "conformance/node_suite.hpp"
#include "conformance/timeline_suite.hpp"
#include "conformance/virtual_memory_suite.hpp"
#include "support/catch.hpp"

namespace cu = gpushare::cuda;

namespace {

/// Keeps a stream busy until the host says so, or for some ten seconds: a test that fails must not
/// hang the device.
struct wait_for_host {
    std::uint32_t* go;

    __device__ void operator()(cu::device_context& ctx) const {
        constexpr std::uint32_t most_turns = 20'000'000;
        const gpushare::detail::atomic_ref flag{*go};
        for (std::uint32_t turn = 0; turn < most_turns && flag.load_acquire() == 0; ++turn) ctx.backoff(turn);
    }
};

class gpu_backend {
public:
    using stream = cu::stream;

    gpu_backend() = default;
    gpu_backend(const gpu_backend&) = delete;
    gpu_backend& operator=(const gpu_backend&) = delete;
    ~gpu_backend() {
        for (const auto& [native, go] : held_) gpushare::detail::atomic_ref{*go}.store_release(1);
    }

    cu::node& node() { return node_; }
    cu::device_memory& memory() { return node_.memory(gpushare::device_id{0}); }
    stream make_stream(gpushare::priority level) { return node_.make_stream(gpushare::device_id{0}, level); }
    void hold(stream& s) {
        auto* const go = static_cast<std::uint32_t*>(flags_.allocate(sizeof(std::uint32_t), 64));
        *go = 0;
        held_[s.native_handle()] = go;
        s.launch({}, wait_for_host{go});
    }
    void let_go(stream& s) { gpushare::detail::atomic_ref{*held_.at(s.native_handle())}.store_release(1); }
    [[nodiscard]] gpushare::instant now() const { return node_.get_clock().now(); }
    static void read(stream& s, void* to, const void* from, std::size_t size) { s.copy(to, from, size); }

private:
    cu::node node_;
    cu::pinned_memory flags_{node_};
    std::map<cudaStream_t, std::uint32_t*> held_;
};

class virtual_memory_backend : public gpu_backend {
public:
    cu::virtual_memory& virtual_memory() { return memory_; }
    void read(const void* at, void* to, std::size_t size) { move(to, at, size); }
    void write(void* at, const void* from, std::size_t size) { move(at, from, size); }

private:
    void move(void* to, const void* from, std::size_t size) {
        stream_.copy(to, from, size);
        CHECK(stream_.record().wait(gpushare::never));
    }

    // Big ones, because a test takes all that there are.
    cu::virtual_memory memory_{node(), gpushare::device_id{0}, {.chunk = gpushare::bytes{256 << 20}}};
    stream stream_ = make_stream(gpushare::priority{});
};

/// Catch2 2.13 can't skip: says why there is nothing to see.
bool has_devices(std::uint32_t wanted) {
    const std::uint32_t devices = gpu_backend{}.node().num_devices();
    if (devices < wanted) WARN("skipped: needs " << wanted << " devices, found " << devices);
    return devices >= wanted;
}

}  // namespace

TEST_CASE("timeline", "[gpu][waits]") { conformance::check_timeline<gpu_backend>(); }
TEST_CASE("queue", "[gpu][waits]") { conformance::check_queue<gpu_backend>(); }
TEST_CASE("launcher", "[gpu]") { conformance::check_launcher<gpu_backend>(); }
TEST_CASE("kernels of one thread", "[gpu]") { conformance::check_kernels<gpu_backend>(1); }
TEST_CASE("kernels of one warp", "[gpu]") { conformance::check_kernels<gpu_backend>(32); }
TEST_CASE("kernels of an odd number of threads", "[gpu]") { conformance::check_kernels<gpu_backend>(77); }
TEST_CASE("kernels of many threads", "[gpu]") { conformance::check_kernels<gpu_backend>(1024); }
TEST_CASE("memory", "[gpu][memory]") { conformance::check_memory<gpu_backend>(); }
TEST_CASE("memory_resource", "[gpu][memory]") {
    gpu_backend backend;
    conformance::check_memory_resource(backend.memory());
}
TEST_CASE("virtual memory", "[gpu][memory]") { conformance::check_virtual_memory<virtual_memory_backend>(); }
TEST_CASE("pinned memory", "[gpu][memory]") {
    gpu_backend backend;
    cu::pinned_memory pinned{backend.node()};
    conformance::check_memory_resource(pinned);
}
TEST_CASE("node", "[gpu][waits]") {
    if (has_devices(2)) conformance::check_node<gpu_backend>();
}
TEST_CASE("gang order of a node", "[gpu]") {
    if (!has_devices(4)) return;
    gpu_backend backend;
    conformance::check_gang_order(backend.node().gangs());
}
TEST_CASE("clock of a node", "[gpu]") {
    gpu_backend backend;
    conformance::check_clock(backend.node().get_clock(), true);
}
