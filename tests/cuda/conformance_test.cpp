// SPDX-License-Identifier: Apache-2.0
// The suites that every backend passes, on CUDA: here its host side, over the stand-in. On a device
// the same suites run.
#include <gpushare/backend/cuda/cuda.hpp>
#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/backend/cuda/virtual_memory.hpp>

#include <cstddef>
#include <cstdint>
#include <set>

#include "conformance/clock_suite.hpp"
#include "conformance/gang_suite.hpp"
#include "conformance/kernel_suite.hpp"
#include "conformance/launcher_suite.hpp"
#include "conformance/memory_resource_suite.hpp"
#include "conformance/memory_suite.hpp"
#include "conformance/node_suite.hpp"
#include "conformance/sms_suite.hpp"
#include "conformance/timeline_suite.hpp"
#include "conformance/virtual_memory_suite.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"

namespace conformance_test {

using namespace gpushare;

namespace {

class cuda_backend {
public:
    using stream = cuda::stream;

    cuda::node& node() { return node_; }
    cuda::device_memory& memory() { return node_.memory(device_id{0}); }
    stream make_stream(priority level) { return node_.make_stream(device_id{0}, level); }
    static void hold(stream& s) { standin::hold(s.native_handle()); }
    static void let_go(stream& s) { standin::let_go(s.native_handle()); }
    [[nodiscard]] instant now() const { return node_.get_clock().now(); }
    static void read(stream& s, void* to, const void* from, std::size_t size) { s.copy(to, from, size); }

private:
    const standin::session gpu_{{.devices = 4}};
    cuda::node node_;
};

class virtual_memory_backend : public cuda_backend {
public:
    cuda::virtual_memory& virtual_memory() { return memory_; }
    void read(const void* at, void* to, std::size_t size) { move(to, at, size); }
    void write(void* at, const void* from, std::size_t size) { move(at, from, size); }

private:
    void move(void* to, const void* from, std::size_t size) {
        stream_.copy(to, from, size);
        CHECK(stream_.record().wait(never));
    }

    cuda::virtual_memory memory_{node(), device_id{0}};
    stream stream_ = make_stream(priority{});
};

class sms_backend {
public:
    cuda::device_sms sms() { return {node_, device_id{0}}; }
    static std::set<std::uint32_t> sms_of(cuda::stream& s) { return standin::sms_of(s.native_handle()); }

private:
    const standin::session gpu_{{.sms = 132, .sm_step = 8}};
    cuda::node node_;
};

}  // namespace

TEST_CASE("SMs", "[cuda][conformance]") { conformance::check_sms_split<sms_backend>(); }
TEST_CASE("timeline", "[cuda][conformance]") { conformance::check_timeline<cuda_backend>(); }
TEST_CASE("queue", "[cuda][conformance]") { conformance::check_queue<cuda_backend>(); }
TEST_CASE("launcher", "[cuda][conformance]") { conformance::check_launcher<cuda_backend>(); }
TEST_CASE("memory", "[cuda][conformance]") { conformance::check_memory<cuda_backend>(); }
TEST_CASE("memory_resource", "[cuda][conformance]") {
    cuda_backend backend;
    conformance::check_memory_resource(backend.memory());
}
TEST_CASE("virtual memory", "[cuda][conformance]") { conformance::check_virtual_memory<virtual_memory_backend>(); }
TEST_CASE("kernels", "[cuda][conformance]") { conformance::check_kernels<cuda_backend>(1); }
TEST_CASE("node", "[cuda][conformance]") { conformance::check_node<cuda_backend>(); }
TEST_CASE("gang order of a node", "[cuda][conformance]") {
    cuda_backend backend;
    conformance::check_gang_order(backend.node().gangs());
}
TEST_CASE("clock of a node", "[cuda][conformance]") {
    cuda_backend backend;
    conformance::check_clock(backend.node().get_clock(), true);
}

}  // namespace conformance_test
