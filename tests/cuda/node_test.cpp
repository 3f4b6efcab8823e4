// SPDX-License-Identifier: Apache-2.0
// A CUDA node over the stand-in: the errors of making it, the streams that it takes over, the
// context that stays current, and errors that can't be reported to a caller.
#include <sys/wait.h>
#include <unistd.h>

#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/backend/cuda/pool.hpp>
#include <gpushare/backend/cuda/virtual_memory.hpp>

#include <array>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/tenant/tenancy.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/leaks.hpp"

namespace node_test {

using namespace gpushare::literals;
using Catch::Matchers::Contains;
using gpushare::device_id;
using gpushare::errc;
using gpushare::operation_error;
using gpushare::priority;

namespace cuda = gpushare::cuda;

namespace {

constexpr device_id first{0}, second{1};

/// Of what making a node throws; none if it doesn't.
errc why_no_node(const cuda::node_options& options = {}) {
    return support::code_of([&] { const cuda::node node(options); });
}

int current_device() {
    int d = -1;
    CHECK(cudaGetDevice(&d) == cudaSuccess);
    return d;
}

}  // namespace

TEST_CASE("a node without a driver, or without a device, says which", "[cuda][node]") {
    {
        const standin::session gpu{{.driver_version = 0}};
        CHECK(why_no_node() == errc::no_driver);
        CHECK_THROWS_WITH(cuda::node(), Contains("cudaErrorInsufficientDriver (35)"));
    }
    {
        const standin::session gpu{{.devices = 0}};
        CHECK(why_no_node() == errc::no_device);
    }
    const standin::session gpu{{.devices = 2}};
    CHECK(why_no_node({.devices = {0, 2}}) == errc::no_device);
    CHECK(why_no_node({.devices = {-1}}) == errc::no_device);
    CHECK(why_no_node({.devices = {1, 0, 1}}) == errc::duplicate_device);
    CHECK(why_no_node() == errc::none);
}

TEST_CASE("a node has the devices that were named, in that order, and makes contexts on no others", "[cuda][node]") {
    const standin::session gpu{{.devices = 3, .memory = 64_MiB, .context = 4_MiB}};
    cuda::node node{{.devices = {2, 1}}};
    REQUIRE(node.num_devices() == 2);
    CHECK(node.properties(first).ordinal == 2);
    CHECK(node.properties(second).ordinal == 1);
    CHECK(node.memory(first).taken_by_others() == 4_MiB);
    CHECK_THROWS_AS(node.memory(device_id{2}), operation_error);
    CHECK_THROWS_AS(node.make_stream(device_id{7}), operation_error);
    CHECK_THROWS_AS(node.health(device_id{2}), operation_error);

    void* const p = node.memory(first).allocate(1000, 256);
    auto s = node.make_stream(second);
    s.copy(p, p, 0);
    CHECK(s.record().wait(gpushare::never));
    CHECK_FALSE(standin::has_context(0));

    cudaPointerAttributes at{};
    CHECK(cudaPointerGetAttributes(&at, p) == cudaSuccess);
    CHECK(at.device == 2);
    CHECK(node.memory(first).deallocate(p, 1000, 256) == errc::none);
}

TEST_CASE("no call of the node changes the thread's current device and context", "[cuda][node]") {
    const standin::session gpu{{.devices = 2}};
    const auto driver = raw::load_driver();
    cuda::node node;
    REQUIRE(cudaSetDevice(1) == cudaSuccess);
    const auto exercise = [&] {
        auto s = node.make_stream(first);
        (void)s.record().wait(gpushare::never);
        void* const p = node.memory(first).allocate(100, 256);
        s.fill(p, std::byte{1}, 100);
        CHECK(s.record().wait(gpushare::never));
        CHECK(node.memory(first).deallocate(p, 100, 256) == errc::none);
        CHECK(node.memory(first).taken_by_others() > 0_B);
        CHECK(node.enable_peer_access(first, second));
    };
    exercise();
    CHECK(current_device() == 1);

    // A context of the embedder's own, here a green one of the very same device.
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    const CUgreenCtx green = raw::make_green(driver, 8);
    CUcontext mine = nullptr, now = nullptr;
    REQUIRE(driver.context_of(&mine, green) == CUDA_SUCCESS);
    REQUIRE(driver.set_current(mine) == CUDA_SUCCESS);
    exercise();
    CHECK(driver.get_current(&now) == CUDA_SUCCESS);
    CHECK(now == mine);
    {
        auto s = node.make_stream(first);  // in the primary context, all the same
        std::vector<cuda::point> fresh;    // and so are new events, or the stream couldn't record them
        for (int i = 0; i < 5; ++i) fresh.push_back(s.record());
        CHECK(fresh.back().wait(gpushare::never));
        CHECK_FALSE(cuda::stream_inside_partition(node, s.native_handle()));
    }
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    CHECK(driver.destroy_green(green) == CUDA_SUCCESS);
}

TEST_CASE("priorities count up, are clamped, and what was asked for is remembered", "[cuda][node]") {
    const standin::session gpu{{.least_priority = 0, .greatest_priority = -5}};
    cuda::node node;
    const auto native = [&](int level) {
        const auto s = node.make_stream(first, priority{level});
        CHECK(s.level() == priority{level});
        return s.native_priority();
    };
    CHECK(native(0) == 0);
    CHECK(native(1) == -1);
    CHECK(native(5) == -5);
    CHECK(native(6) == -5);
    CHECK(native(2147483647) == -5);
    CHECK(native(-1) == 0);
    CHECK(native(-2147483647 - 1) == 0);
    CHECK(node.properties(first).native_priority({6}) == -5);
    CHECK(node.properties(first).level_of(-5) == priority{5});
}

TEST_CASE("streams of the embedder's are taken over or borrowed; default streams are refused", "[cuda][node]") {
    const standin::session gpu{{.devices = 2}};
    cuda::node node{{.devices = {1}}};
    REQUIRE(cudaSetDevice(1) == cudaSuccess);
    cudaStream_t mine = nullptr;
    REQUIRE(cudaStreamCreateWithPriority(&mine, cudaStreamNonBlocking, -2) == cudaSuccess);
    {
        auto s = node.borrow(mine, 7);
        CHECK(s.native_handle() == mine);
        CHECK(s.level() == priority{2});
        CHECK(s.native_priority() == -2);
        CHECK(s.tag() == 7);
        CHECK(s.record().wait(gpushare::never));
    }
    CHECK(standin::existing().streams == 1);
    { const auto s = node.from_native_handle(mine); }
    CHECK(standin::existing().streams == 0);

    for (const cudaStream_t none : {cudaStream_t{}, cudaStreamLegacy, cudaStreamPerThread}) {
        CHECK_THROWS_AS(node.borrow(none), operation_error);
        CHECK_THROWS_AS(node.from_native_handle(none), operation_error);
    }
    const auto elsewhere = raw::make_stream(0);
    CHECK_THROWS_AS(node.borrow(elsewhere), operation_error);
    raw::destroy(elsewhere);

    cudaStream_t released = nullptr;
    {
        auto s = node.make_stream(first);
        released = s.release();
        CHECK(s.record().wait(gpushare::never));
    }
    CHECK(standin::existing().streams == 1);
    raw::destroy(released);

    // Literals mean a default stream.
    static_assert(!std::invocable<decltype([](auto& n) -> decltype(n.borrow(0)) { return n.borrow(0); }), cuda::node&>);
    static_assert(!std::invocable<decltype([](auto& n) -> decltype(n.borrow(nullptr)) { return n.borrow(nullptr); }),
                                  cuda::node&>);
}

TEST_CASE("errors of CUDA have codes, and texts that name the call, the error and its number", "[cuda][error]") {
    const standin::session gpu;
    cuda::node node;
    standin::inject({.call = "cudaStreamCreateWithPriority", .code = cudaErrorInvalidValue});
    try {
        (void)node.make_stream(first);
        FAIL("made a stream");
    } catch (const operation_error& e) {
        CHECK(e.code() == errc::backend_failed);
        CHECK_THAT(e.what(), Contains("making a stream: cudaErrorInvalidValue (1)"));
    }
    standin::inject({.call = "cudaStreamCreateWithPriority", .code = cudaErrorMemoryAllocation});
    CHECK_THROWS_AS(node.make_stream(first), std::bad_alloc);
    CHECK(cudaPeekAtLastError() == cudaSuccess);  // nothing is left for the embedder to stumble over

    CHECK(cuda::to_errc(cudaSuccess) == errc::none);
    CHECK(cuda::to_errc(cudaErrorInsufficientDriver) == errc::no_driver);
    CHECK(cuda::to_errc(cudaErrorNoDevice) == errc::no_device);
    CHECK(cuda::to_errc(cudaErrorNotSupported) == errc::not_supported);
    CHECK(cuda::to_errc(cudaErrorStreamCaptureUnsupported) == errc::capturing);
    CHECK(cuda::to_errc(cudaErrorCooperativeLaunchTooLarge) == errc::too_many_blocks);
    const auto all_sticky = {cudaErrorECCUncorrectable,    cudaErrorNvlinkUncorrectable, cudaErrorContained,
                             cudaErrorIllegalAddress,      cudaErrorLaunchTimeout,       cudaErrorAssert,
                             cudaErrorHardwareStackError,  cudaErrorIllegalInstruction,  cudaErrorMisalignedAddress,
                             cudaErrorInvalidAddressSpace, cudaErrorInvalidPc,           cudaErrorLaunchFailure,
                             cudaErrorTensorMemoryLeak,    cudaErrorMpsClientTerminated, cudaErrorExternalDevice};
    for (const auto sticky : all_sticky) {
        CAPTURE(sticky);
        CHECK(cuda::is_sticky(sticky));
        CHECK(cuda::to_errc(sticky) == errc::device_lost);
    }
    std::size_t listed = 0;
    for (int n = 0; n < 1200; ++n) listed += cuda::is_sticky(static_cast<cudaError_t>(n)) ? 1 : 0;
    CHECK(listed == all_sticky.size());
    for (const auto passing : {cudaErrorInvalidValue, cudaErrorMemoryAllocation, cudaErrorNotReady})
        CHECK_FALSE(cuda::is_sticky(passing));
}

TEST_CASE("after an illegal access: every point reached, the error named once, the other device untouched",
          "[cuda][node][fault]") {
    const standin::session gpu{{.devices = 2}};
    cuda::node node;
    auto s = node.make_stream(first);
    auto other = node.make_stream(second);
    standin::hold(s.native_handle());
    std::vector<cuda::point> before;
    for (int i = 0; i < 3; ++i) before.push_back(s.record());
    CHECK_FALSE(before.front().reached());
    CHECK_FALSE(node.lost(first));

    standin::poison(0, cudaErrorIllegalAddress);
    for (const auto& p : before) {
        CHECK(p.wait(gpushare::never));
        CHECK(p.status() == errc::device_lost);
        CHECK(elapsed(before.front(), p) == gpushare::ns{0});
    }
    CHECK(node.lost(first));
    const auto why = node.health(first).fatal();
    REQUIRE(why);
    CHECK(why->code == cudaErrorIllegalAddress);
    CHECK(std::string_view{why->call} == "cuEventQuery");

    // What is enqueued from now on does nothing, and says so at its point.
    int x = 0, y = 0;
    CHECK_NOTHROW(s.copy(&x, &y, sizeof x));
    const auto after = s.record();
    CHECK(after.reached());
    CHECK(after.status() == errc::device_lost);
    CHECK_NOTHROW(s.wait(before.front()));
    CHECK(node.memory(first).try_allocate(100, 256) == nullptr);
    CHECK_THROWS_AS(node.make_stream(first), operation_error);
    CHECK(node.memory(first).taken_by_others() == node.memory(first).capacity());
    CHECK(node.health(first).fatal()->call == why->call);

    // Nobody asks CUDA any more.
    standin::forget_calls();
    CHECK(s.record().status() == errc::device_lost);
    CHECK(standin::count("cuEventQuery") == 0);

    CHECK_FALSE(node.lost(second));
    CHECK(other.record().wait(gpushare::never));
    CHECK(other.record().status() == errc::none);
}

TEST_CASE("an error that a destructor can't report is kept for a later call", "[cuda][node][fault]") {
    const standin::session gpu;
    cuda::node node;
    auto& health = node.health(first);
    CHECK_FALSE(health.take_last_error());
    cudaStream_t left = nullptr;
    {
        const auto s = node.make_stream(first);
        left = s.native_handle();
        standin::inject({.call = "cudaStreamDestroy", .code = cudaErrorInvalidResourceHandle});
    }
    CHECK(health.unreported() == 1);
    const auto last = health.take_last_error();
    REQUIRE(last);
    CHECK(last.code == cudaErrorInvalidResourceHandle);
    CHECK(std::string_view{last.call} == "cudaStreamDestroy");
    CHECK_FALSE(health.take_last_error());
    CHECK_FALSE(health.lost());
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    raw::destroy(left);

    // One that stays isn't lost either: it makes the device lost.
    void* const p = node.memory(first).allocate(100, 256);
    standin::inject({.call = "cudaFree", .code = cudaErrorIllegalAddress, .sticky = true});
    CHECK(node.memory(first).deallocate(p, 100, 256) == errc::none);
    CHECK(health.lost());
    CHECK(health.unreported() == 2);
    REQUIRE(health.fatal());
    CHECK(std::string_view{health.fatal()->call} == "cudaFree");
    CHECK(node.memory(first).used() == 0_B);
    (void)cudaFree(p);  // the fault kept the call from freeing it
}

TEST_CASE("the library's objects don't belong to the current context, and outlive it", "[cuda][node]") {
    const standin::session gpu{{.devices = 2}};
    const auto driver = raw::load_driver();
    cuda::node node{{.peer_access = false}};
    cuda::memory_pool pool{node, first};
    auto s = node.make_stream(first), far = node.make_stream(second);
    const auto g = cuda::capture(s, [](cuda::stream& to) { to.launch({}, gpushare::detail::empty_kernel{}); });
    CUcontext mine = nullptr, now = nullptr;
    REQUIRE(driver.create_context(&mine, nullptr, 0, 0) == CUDA_SUCCESS);
    now = mine;
    void* const p = node.memory(first).allocate(1000, 256);
    void* const q = node.memory(second).allocate(1000, 256);
    CHECK(node.enable_peer_access(first, second));
    s.launch({}, gpushare::detail::empty_kernel{});
    s.fill(p, std::byte{1}, 1000);
    s.fill(q, std::byte{1}, 1000);
    standin::before_next("cudaGraphInstantiate", [&] { CHECK(driver.get_current(&now) == CUDA_SUCCESS); });
    cuda::graph_executable run{g};
    CHECK(now != mine);
    run.launch(s);
    void* const pooled = pool.allocate(s, 100);
    CHECK(s.record().wait(gpushare::never));
    CHECK(driver.get_current(&now) == CUDA_SUCCESS);
    CHECK(now == mine);
    REQUIRE(driver.destroy_context(mine) == CUDA_SUCCESS);
    s.fill(p, std::byte{2}, 1000);
    s.fill(q, std::byte{2}, 1000);
    run.launch(s);
    CHECK(pool.deallocate(s, pooled) == errc::none);
    CHECK(s.record().wait(gpushare::never));
    CHECK(node.memory(first).deallocate(p, 1000, 256) == errc::none);
    CHECK(node.memory(second).deallocate(q, 1000, 256) == errc::none);
    CHECK(node.health(first).unreported() == 0);
}

TEST_CASE("readings by threads without a context make none, and leave no errors", "[cuda][node]") {
    const standin::session gpu{{.devices = 2, .memory = 64_MiB}};
    cuda::node node{{.devices = {1}}};
    const cuda::memory_pool pool{node, first};
    std::thread([&] {
        (void)node.memory(first).taken_by_others();
        CHECK_FALSE(standin::has_context(0));
        standin::inject({.call = "cudaMemPoolGetAttribute", .code = cudaErrorInvalidValue});
        (void)node.memory(first).taken_by_others();
        CHECK(cudaPeekAtLastError() == cudaSuccess);
        cuda::virtual_memory chunks{node, first};
        auto range = chunks.reserve(2 << 20);
        { const cuda::mapping there{chunks, range->data(), chunks.create().value()}; }
        CHECK_FALSE(standin::has_context(0));
    }).join();
    standin::inject({.call = "cudaMemPoolGetAttribute", .code = cudaErrorIllegalAddress, .sticky = true});
    (void)node.memory(first).taken_by_others();
    CHECK(node.lost(first));
}

TEST_CASE("the current device's loss isn't blamed on another one's pool", "[cuda][node][fault]") {
    const standin::session gpu{{.devices = 2, .memory = 64_MiB}};
    {
        cuda::node node;
        cuda::memory_pool pool{node, second};
        REQUIRE(cudaSetDevice(0) == cudaSuccess);
        standin::poison(0, cudaErrorIllegalAddress);
        (void)node.memory(first).taken_by_others();
        (void)node.memory(second).taken_by_others();
        CHECK(node.lost(first));
        CHECK_FALSE(node.lost(second));
        CHECK_NOTHROW(pool.usage());
        CHECK_NOTHROW(pool.trim());
    }
    (void)cudaGetLastError();
}

TEST_CASE("two nodes of one device share its SMs and the order of its gangs", "[cuda][node][green]") {
    const standin::session gpu{{.devices = 2}};  // 2 units of 8 SMs
    cuda::node one, two{{.devices = {1, 0}}};
    const auto unit = std::vector<std::uint32_t>{cuda::query_sm_split(one, first).unit};
    {
        auto a = cuda::make_green_contexts(one, first, unit), b = cuda::make_green_contexts(two, second, unit);
        const auto s = a[0].make_stream(), t = b[0].make_stream();
        const auto of_a = standin::sms_of(s.native_handle()), of_b = standin::sms_of(t.native_handle());
        for (const auto sm : of_a) CHECK(of_b.count(sm) == 0);
        CHECK_THROWS_AS(cuda::make_green_contexts(one, first, unit), operation_error);
        CHECK_NOTHROW(cuda::make_green_contexts(one, second, unit));
    }
    CHECK(cuda::make_green_contexts(one, first, std::vector{unit[0], unit[0]}).size() == 2);
    const auto stray = two.make_stream(second, {}, 7);
    CHECK(one.state(first)->sms().unpartitioned() == std::vector<std::uint32_t>{7});

    // A gang of the one node comes behind that of the other, on the device that both name.
    auto x = one.make_stream(first), y = two.make_stream(second), z = two.make_stream(first);
    standin::hold(x.native_handle());
    {
        auto entered = one.gangs().enter(std::array{first});
        x.launch({}, gpushare::detail::empty_kernel{});
        entered.add(first, cuda::detail::node_gangs::whole_device, &one, x.record());
    }
    auto entered = two.gangs().enter(std::array{second, first});
    entered.make_room(second, cuda::detail::node_gangs::whole_device, &two, y);
    entered.make_room(first, cuda::detail::node_gangs::whole_device, &two, z);
    const auto same = y.record(), other = z.record();
    CHECK_FALSE(same.reached());
    CHECK(other.wait(gpushare::never));
    standin::let_go(x.native_handle());
    CHECK(same.wait(gpushare::never));
    CHECK_THROWS_AS(one.gangs().enter(std::array{device_id{2}}), operation_error);
}

TEST_CASE("an error without a name loses a device that doesn't answer any more, and no other", "[cuda][node][fault]") {
    const standin::session gpu;
    cuda::node node;
    auto s = node.make_stream(first);
    standin::inject({.call = "cudaMemsetAsync", .code = cudaErrorUnknown});
    void* const p = node.memory(first).allocate(100, 256);
    CHECK_THROWS_AS(s.fill(p, std::byte{1}, 100), operation_error);
    CHECK_FALSE(node.lost(first));
    CHECK(node.memory(first).deallocate(p, 100, 256) == errc::none);
    standin::poison(0, cudaErrorUnknown);
    CHECK(s.record().status() == errc::device_lost);
    CHECK(node.lost(first));
}

namespace {

/// What a program may have when the ground goes from under it.
struct household {
    cuda::node node;
    cuda::stream s = node.make_stream(first);
    cuda::stream shared = node.make_stream(second);
    cuda::memory_pool pool{node, first};
    cuda::virtual_memory chunks{node, first};
    cuda::virtual_memory::range range = chunks.reserve(2 << 20).value();
    cuda::virtual_memory::chunk chunk = chunks.create().value();
    cuda::pinned_memory pinned{node};
    std::vector<cuda::green_context> parts =
        cuda::make_green_contexts(node, first, std::vector<std::uint32_t>{cuda::query_sm_split(node, first).unit});
    cuda::stream inside = parts[0].make_stream();
    cuda::graph graph = cuda::capture(s, [](cuda::stream& to) { to.launch({}, gpushare::detail::empty_kernel{}); });
    cuda::graph_executable run{graph};
    void* block = node.memory(first).allocate(1000, 256);
    void* pooled = pool.allocate(s, 1000);
    gpushare::tenancy<cuda::node> tenants{node, {.close_timeout = std::chrono::milliseconds(1)}};
    gpushare::tenancy<cuda::node>::tenant chat =
        tenants.admit({.name = "chat", .memory = 8_MiB, .compute = 50_pct, .on = {first}});
    void* theirs = chat.memory().allocate(1 << 20);
    gpushare::tenancy<cuda::node>::tenant::ticket done =
        chat.submit([](cuda::stream& to) { to.enqueue(std::chrono::hours(1)); });
    cuda::point point = s.record();

    /// Nothing hangs, throws where it may not, or claims to have worked.
    void expect(errc why) {
        CHECK(s.record().wait(gpushare::never));
        CHECK(done.wait(gpushare::never));
        CHECK(done.status() != errc::none);
        CHECK(s.record().status() == why);
        CHECK(node.memory(first).try_allocate(100, 256) == nullptr);
        CHECK(chat.memory().try_allocate(2 << 20) == nullptr);
        CHECK(chat.memory().deallocate(theirs, 1 << 20) == errc::none);
        (void)pool.deallocate(s, pooled);
        (void)node.memory(first).deallocate(block, 1000, 256);
        CHECK(chat.close(gpushare::host::steady_clock::now() + std::chrono::minutes(5)).complete);
    }
};

}  // namespace

TEST_CASE("cudaDeviceReset loses the device for the nodes that were there, and a new one has it",
          "[cuda][node][fault]") {
    const standin::session gpu{{.devices = 2, .memory = 64_MiB}};
    {
        household all;
        REQUIRE(cudaSetDevice(0) == cudaSuccess);
        REQUIRE(cudaDeviceReset() == cudaSuccess);
        all.expect(errc::device_lost);
        CHECK(all.node.lost(first));
        CHECK_FALSE(all.node.lost(second));
        CHECK(all.shared.record().wait(gpushare::never));
        cuda::node fresh;
        auto s = fresh.make_stream(first, {}, 5);
        s.launch({}, gpushare::detail::empty_kernel{});
        CHECK(s.record().wait(gpushare::never));
        CHECK(s.record().status() == errc::none);
        // Nor are the SMs, and the streams, those that there were.
        CHECK(fresh.state(first)->sms().unpartitioned() == std::vector<std::uint32_t>{5});
    }
    CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE("objects that go after the driver do so quietly, as static objects at the end of a process",
          "[cuda][node][fault]") {
    const standin::session gpu{{.devices = 2, .memory = 64_MiB}};
    {
        const support::leaks_are_meant here;  // of a driver that has gone nobody knows what is over
        household all;
        standin::unload();
        CHECK(all.point.wait(gpushare::never));
        CHECK(all.done.wait(gpushare::host::steady_clock::now() + std::chrono::minutes(5)));
        CHECK_THROWS_AS(all.s.record(), operation_error);
    }
    CHECK_THROWS_AS(cuda::node{}, operation_error);
    standin::reset();
}

TEST_CASE("a child of fork() can't use its parent's devices, and goes without a trace", "[cuda][node][fault]") {
    const standin::session gpu{{.devices = 2, .memory = 64_MiB}};
    auto all = std::make_unique<household>();
    const pid_t child = ::fork();
    if (child == 0) {
        int wrong = 0;
        const auto expect = [&](bool well) { wrong += well ? 0 : 1; };
        expect(why_no_node() == errc::no_driver);
        expect(all->point.wait(gpushare::never));
        expect(all->node.memory(first).try_allocate(100, 256) == nullptr);
        try {
            all->s.launch({}, gpushare::detail::empty_kernel{});
            expect(false);
        } catch (const gpushare::error& e) {
            expect(e.code() == errc::no_driver);
        }
        all.reset();  // and the destructors come through
        ::_exit(wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS));
    standin::poison(0, cudaErrorIllegalAddress);  // nobody waits for the hour
    all.reset();
    (void)standin::take_findings();
}

TEST_CASE("devices that can't reach each other's memory are no error", "[cuda][node]") {
    {
        const standin::session gpu{{.devices = 2, .peers = false}};
        cuda::node node;
        CHECK_FALSE(node.enable_peer_access(first, second));
    }
    const standin::session gpu{{.devices = 2}};
    cuda::node node;  // has enabled it
    CHECK(node.enable_peer_access(first, second));
    CHECK(node.enable_peer_access(first, first));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    cuda::node apart{{.peer_access = false}};
    CHECK(standin::count("cudaDeviceEnablePeerAccess") == 3);
}

TEST_CASE("the topology has a link for every pair, by what the runtime tells", "[cuda][topology]") {
    using cuda::classify;
    using cuda::link_kind;
    CHECK(classify(true, true, 0, 1) == link_kind::nvlink);
    CHECK(classify(true, false, 0, 1) == link_kind::pcie);
    CHECK(classify(false, false, 0, 0) == link_kind::host);
    CHECK(classify(false, false, 0, 1) == link_kind::across_sockets);
    CHECK(classify(false, false, -1, 1) == link_kind::host);
    std::set<std::string_view> texts;
    for (int k = 0; k < 5; ++k) texts.insert(to_string(static_cast<link_kind>(k)));
    CHECK(texts.size() == 5);

    for (const bool peers : {false, true}) {
        const standin::session gpu{{.devices = 3, .peers = peers}};
        cuda::node node;
        const auto t = cuda::query_topology(node);
        REQUIRE(t.devices.size() == 3);
        REQUIRE(t.links.size() == 9);
        for (std::uint32_t i = 0; i < 3; ++i)
            for (std::uint32_t k = 0; k < 3; ++k) {
                const auto& link = t.between(device_id{i}, device_id{k});
                CHECK((link.kind == link_kind::same_device) == (i == k));
                CHECK(link.access == (i == k || peers));
            }
        CHECK_THROWS_AS(t.between(device_id{3}, device_id{0}), std::out_of_range);
        CHECK_THROWS_AS(t.between(device_id{0}, device_id{3}), std::out_of_range);
        CHECK_THROWS_AS(t.between(device_id{1}, device_id{~0U}), std::out_of_range);
    }
}

TEST_CASE("the overhead account says who took what, and what nobody said", "[cuda][overhead]") {
    const standin::session gpu{{.memory = 64_MiB, .taken = 3_MiB, .context = 1_MiB}};
    cuda::node node;
    cuda::overhead_account account{node, first};
    REQUIRE(account.entries().size() == 1);
    CHECK(account.entries()[0].size == 4 << 20);

    void* workspace = nullptr;
    account.measure("workspace", [&] { REQUIRE(cudaMalloc(&workspace, 2 << 20) == cudaSuccess); });
    void* const tenant = node.memory(first).allocate(8 << 20, 256);  // isn't overhead
    CHECK(account.entries()[1].label == "workspace");
    CHECK(account.entries()[1].size == 2 << 20);
    CHECK(account.unexplained() == 0);
    CHECK_THROWS_AS(account.measure("fails", [] { throw 1; }), int);
    CHECK(account.entries().size() == 2);

    void* other = nullptr;
    REQUIRE(cudaMalloc(&other, 4 << 20) == cudaSuccess);
    CHECK(account.unexplained() == 4 << 20);
    CHECK(cudaFree(workspace) == cudaSuccess);
    CHECK(account.unexplained() == 2 << 20);
    CHECK(cudaFree(other) == cudaSuccess);
    CHECK(account.unexplained() == -(2 << 20));
    CHECK(node.memory(first).deallocate(tenant, 8 << 20, 256) == errc::none);
}

}  // namespace node_test
