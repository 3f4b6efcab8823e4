// SPDX-License-Identifier: Apache-2.0
// A tenant's scope with libtorch's own c10 over the stand-in for CUDA: its streams, its guards, and
// its caching allocator with tenants' memory behind it. Models need libtorch_cuda and a device.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/host/host.hpp>
#include <gpushare/compute/launch_gate.hpp>
#include <gpushare/interop/libtorch.hpp>
#include <gpushare/interop/libtorch_cpu.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "no_libtorch_cuda.hpp"
#include "standins/cuda/session.hpp"
#include "standins/cuda/standin.hpp"
#include "support/catch.hpp"
#include "support/launch_rig.hpp"

namespace torch_scope_test {

using namespace gpushare::literals;
using Catch::Matchers::Contains;
namespace caching = c10::cuda::CUDACachingAllocator;
using tenancy = gpushare::tenancy<gpushare::cuda::node>;

constexpr std::size_t MiB = 1 << 20;

c10::DataPtr bytes_of(std::size_t n) { return caching::get()->allocate(n); }

struct rig {
    explicit rig(gpushare::bytes guaranteed = 64_MiB, gpushare::bytes burst = {}) {
        c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
        caching::init(1);
        chat = admit("chat", guaranteed, burst, 2);
        batch = admit("batch", 64_MiB, {}, 1);
    }
    rig(const rig&) = delete;
    rig& operator=(const rig&) = delete;
    ~rig() {
        chat.reset();
        batch.reset();
        caching::emptyCache();  // what torch keeps for itself
    }
    std::unique_ptr<tenancy::tenant> admit(const char* name, gpushare::bytes memory, gpushare::bytes burst,
                                           std::uint32_t streams) {
        return std::make_unique<tenancy::tenant>(
            shared.admit({.name = name, .memory = memory, .compute = 30_pct, .burst = burst, .streams = streams}));
    }
    /// Of no tenant. Torch's own streams are of the process, and the stand-in's devices of a test.
    c10::cuda::CUDAStream elsewhere() const { return c10::cuda::getStreamFromExternal(side.native_handle(), 0); }
    gpushare::bytes charged() { return chat->memory().limit().usage().current; }

    standin::session gpu{{.devices = 1, .memory = 256_MiB}};
    gpushare::cuda::node node;
    gpushare::cuda::stream side = node.make_stream(gpushare::device_id{0});
    tenancy shared{node};
    std::unique_ptr<tenancy::tenant> chat, batch;
};

/// As autograd's threads: on the stream of the forward pass, and in no scope.
template <class F>
void on_another_thread(cudaStream_t s, F f) {
    std::thread([&] {
        const c10::cuda::CUDAStreamGuard there(c10::cuda::getStreamFromExternal(s, 0));
        f();
    }).join();
}

TEST_CASE("in a scope torch's stream and memory are the tenant's, and outside they are torch's", "[interop][torch]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    const auto own = r.chat->work_stream().native_handle(), other = r.chat->work_stream(0, 1).native_handle();
    const auto before = c10::cuda::getCurrentCUDAStream(0).stream();
    {
        const auto inside = scope.enter();
        CHECK(c10::cuda::getCurrentCUDAStream(0).stream() == own);
        const auto p = bytes_of(MiB);
        CHECK(p.device() == c10::Device(c10::kCUDA, 0));
        CHECK(scope.live() == 1);
        CHECK(r.charged() >= 1_MiB);
        CHECK(bytes_of(0).get() == nullptr);
        {
            const auto second = scope.enter(1);
            CHECK(c10::cuda::getCurrentCUDAStream(0).stream() == other);
        }
        CHECK(c10::cuda::getCurrentCUDAStream(0).stream() == own);
    }
    CHECK(c10::cuda::getCurrentCUDAStream(0).stream() == before);
    CHECK(scope.live() == 0);
    const c10::cuda::CUDAStreamGuard outside(r.elsewhere());
    const auto p = bytes_of(MiB);
    CHECK(scope.live() == 0);
    CHECK_THROWS_WITH(scope.enter(2), Contains("no stream"));
    CHECK_THROWS_WITH((gpushare::torch_scope{r.node, *r.chat}), Contains("the stream has one already"));
}

TEST_CASE("memory that other threads, such as autograd's, allocate on a tenant's stream is the tenant's",
          "[interop][torch]") {
    rig r;
    gpushare::torch_scope chat{r.node, *r.chat}, batch{r.node, *r.batch};
    std::vector<c10::DataPtr> gradients;
    const auto inside = batch.enter();  // of this thread alone
    on_another_thread(r.chat->work_stream().native_handle(), [&] {
        for (int i = 0; i < 3; ++i) gradients.push_back(bytes_of(MiB));
    });
    CHECK(chat.live() == 3);
    CHECK(batch.live() == 0);
    {
        // The stream tells, not the scope.
        const c10::cuda::CUDAStreamGuard there(
            c10::cuda::getStreamFromExternal(r.chat->work_stream().native_handle(), 0));
        gradients.push_back(bytes_of(MiB));
    }
    CHECK(chat.live() == 4);
    const auto mine = bytes_of(MiB);
    CHECK(batch.live() == 1);
    gradients.clear();  // on a thread that is in another tenant's scope
    CHECK(chat.live() == 0);
}

TEST_CASE("a free on the stream of the allocation makes no call, and is used again at once", "[interop][torch]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    const auto inside = scope.enter();
    for (const std::size_t n : {std::size_t{512}, std::size_t{100'000}, MiB, 5 * MiB, 12 * MiB, 20 * MiB}) {
        CAPTURE(n);
        (void)bytes_of(n);
        void* const first = bytes_of(n).get();
        standin::forget_calls();
        int elsewhere = 0;
        for (int i = 0; i < 100; ++i) elsewhere += bytes_of(n).get() != first;
        CHECK(elsewhere == 0);
        CHECK(standin::calls().size() == standin::count("cudaGetDevice"));  // by which torch asks for the device
    }
}

TEST_CASE("a block goes to another stream once its own stream has done the work", "[interop][torch]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    const auto own = r.chat->work_stream().native_handle();
    const auto inside = scope.enter();
    void* const p = bytes_of(30 * MiB).get();  // freed at once
    standin::hold(own);
    {
        const auto second = scope.enter(1);
        CHECK_THROWS_AS(bytes_of(40 * MiB), c10::OutOfMemoryError);  // 64 MiB, of which 30 are in use on the device
    }
    CHECK(bytes_of(30 * MiB).get() == p);
    standin::let_go(own);
    REQUIRE(cudaStreamSynchronize(own) == cudaSuccess);
    const auto second = scope.enter(1);
    CHECK(bytes_of(40 * MiB).get() != nullptr);
}

TEST_CASE("a block that another stream uses waits for that stream, too", "[interop][torch]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    const auto inside = scope.enter();
    const bool of_tenant = GENERATE(true, false);
    const auto side =
        of_tenant ? c10::cuda::getStreamFromExternal(r.chat->work_stream(0, 1).native_handle(), 0) : r.elsewhere();
    auto p = bytes_of(MiB);
    void* const at = p.get();
    (void)bytes_of(MiB);  // for the next one: the device isn't asked for more meanwhile
    standin::hold(side.stream());
    caching::recordStream(p, side);
    p.clear();
    CHECK(scope.live() == 0);
    const auto next = bytes_of(MiB);
    CHECK(next.get() != at);
    standin::let_go(side.stream());
    REQUIRE(cudaStreamSynchronize(side.stream()) == cudaSuccess);
    scope.give_back();
    CHECK(scope.usage().pending == 0_B);
}

TEST_CASE("in a scope, an allocation on a stream of torch's own is the tenant's", "[interop][torch]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    const auto inside = scope.enter();
    const auto side = r.elsewhere();
    const c10::cuda::CUDAStreamGuard there(side);
    (void)bytes_of(MiB);
    auto p = bytes_of(MiB);
    const auto more = bytes_of(MiB);
    CHECK(scope.live() == 2);
    standin::hold(side.stream());
    void* const at = std::exchange(p, {}).get();
    CHECK(bytes_of(MiB).get() != at);  // not a stream of the tenant's: freed behind an event
    standin::let_go(side.stream());
    REQUIRE(cudaStreamSynchronize(side.stream()) == cudaSuccess);
}

TEST_CASE("out of memory is torch's own error, with the tenant's figures", "[interop][torch]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    const auto inside = scope.enter();
    const auto weights = bytes_of(50 * MiB);
    try {
        (void)bytes_of(20 * MiB);
        FAIL("allocated");
    } catch (const c10::OutOfMemoryError& e) {
        CHECK_THAT(e.what(),
                   Contains("CUDA out of memory. tenant 'chat': allocate for torch: asked for 20 MiB, 14 MiB of "
                            "64 MiB left (over the quota)"));
    }
    const auto fits = bytes_of(13 * MiB);
    CHECK(r.charged() <= 64_MiB);
}

TEST_CASE("torch's cache stands in no tenant's way: blocks of all sizes, and then a block of all memory",
          "[interop][torch]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    const auto inside = scope.enter();
    for (std::size_t n = 3 * MiB; n < 40 * MiB; n += 5 * MiB) (void)bytes_of(n);
    CHECK(bytes_of(60 * MiB).get() != nullptr);
    for (std::size_t n = 1000; n < MiB; n *= 2) (void)bytes_of(n);
    CHECK(bytes_of(60 * MiB).get() != nullptr);
}

TEST_CASE("a tenant that sleeps gives torch's cache back, and so does empty_cache", "[interop][torch]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    {
        const auto inside = scope.enter();
        const auto weights = bytes_of(10 * MiB);
        (void)bytes_of(30 * MiB);
        CHECK(scope.usage().reserved >= 40_MiB);
        CHECK(r.chat->sleep(r.chat->now() + std::chrono::seconds(10)));
        CHECK(scope.usage().reserved < 12_MiB);
        CHECK(r.charged() < 12_MiB);
        r.chat->wake();
        (void)bytes_of(30 * MiB);
        caching::emptyCache();
        CHECK(scope.usage().reserved < 12_MiB);
    }
    CHECK(scope.usage().peak_reserved >= 40_MiB);
}

TEST_CASE("torch's cache isn't burst that a neighbour has to wait for", "[interop][torch]") {
    rig r(16_MiB, 160_MiB);
    gpushare::torch_scope scope{r.node, *r.chat};
    const auto inside = scope.enter();
    (void)bytes_of(140 * MiB);
    CHECK(scope.usage().reserved >= 140_MiB);
    const auto third = r.shared.admit({.name = "third", .memory = 100_MiB, .compute = 10_pct},
                                      gpushare::patience{r.node.get_clock(), r.chat->now() + std::chrono::seconds(10)});
    CHECK(third.spec().memory == 100_MiB);
    CHECK(scope.usage().reserved < 80_MiB);
}

TEST_CASE("tensors that outlive the scope stay charged, and go back in order", "[interop][torch]") {
    rig r;
    c10::DataPtr answer;
    {
        gpushare::torch_scope scope{r.node, *r.chat};
        const auto inside = scope.enter();
        answer = bytes_of(MiB);
        (void)bytes_of(30 * MiB);
    }
    CHECK(r.charged() >= 1_MiB);
    CHECK(r.charged() < 32_MiB);  // the cache went with the scope
    {
        gpushare::torch_scope again{r.node, *r.chat};
        CHECK(again.live() == 0);
    }
    answer.clear();
    r.chat->memory().trim();
    CHECK(r.charged() == 0_B);
    CHECK(r.chat->close().leaked_blocks == 0);
}

TEST_CASE("tensors that outlive their tenant are leaks of it, and freeing them does nothing", "[interop][torch]") {
    rig r;
    c10::DataPtr answer, used;
    {
        gpushare::torch_scope scope{r.node, *r.chat};
        const auto inside = scope.enter();
        answer = bytes_of(MiB);
        used = bytes_of(MiB);
        caching::recordStream(used, r.elsewhere());
    }
    const auto report = r.chat->close();
    CHECK(report.complete);
    CHECK(report.leaked_blocks > 0);
    CHECK(report.leaked >= 2_MiB);
    r.chat.reset();
    answer.clear();
    used.clear();
}

TEST_CASE("a tenant in a slice of SMs gets no scope, and the error says why", "[interop][torch]") {
    const standin::session gpu{{.devices = 1, .memory = 64_MiB, .sms = 132, .sm_step = 8}};
    gpushare::cuda::node node;
    tenancy shared{node};
    REQUIRE(shared.slice<gpushare::cuda::device_sms>({0}, std::array{3U, 1U}) == gpushare::errc::none);
    auto chat = shared.admit({.name = "chat", .memory = 16_MiB});
    try {
        const gpushare::torch_scope scope{node, chat};
        FAIL("a scope on a slice");
    } catch (const gpushare::operation_error& e) {
        CHECK(e.code() == gpushare::errc::not_supported);
        CHECK_THAT(e.what(), Contains("chat") && Contains("slice of SMs"));
    }
}

TEST_CASE("a closed tenant's scope lets no thread in and allocates nothing", "[interop][torch]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    const auto own = r.chat->work_stream().native_handle();
    {
        const auto inside = scope.enter();
        CHECK(r.chat->close().complete);
        CHECK_THROWS_AS(bytes_of(MiB), c10::OutOfMemoryError);
    }
    CHECK_THROWS_AS(scope.enter(), gpushare::operation_error);
    (void)own;
}

TEST_CASE("an exception leaves the scope as it was entered", "[interop][torch]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    const auto before = c10::cuda::getCurrentCUDAStream(0).stream();
    const auto request = [&] {
        const auto inside = scope.enter();
        const auto activations = bytes_of(MiB);
        (void)bytes_of(100 * MiB);
    };
    CHECK_THROWS_AS(request(), c10::OutOfMemoryError);
    CHECK(c10::cuda::getCurrentCUDAStream(0).stream() == before);
    CHECK(scope.live() == 0);
    const c10::cuda::CUDAStreamGuard outside(r.elsewhere());
    const auto p = bytes_of(MiB);
    CHECK(scope.live() == 0);
}

/// Stands for a module: what libtorch does of it on a device. Each forward pass launches once.
struct module {
    c10::DataPtr forward(std::size_t n) {
        CHECK(launch_rig::launch(c10::cuda::getCurrentCUDAStream(0), launch_rig::conv, std::chrono::microseconds(10),
                                 &launches) == cudaSuccess);
        return bytes_of(n);
    }
    std::atomic<int> launches{0};
};

TEST_CASE("three lines: stream, memory, and launches behind the gate", "[interop][torch]") {
    rig r;
    auto& node = r.node;
    auto& chat = *r.chat;
    gpushare::cuda::launch_gate<gpushare::launch_gate> gate{node, gpushare::device_id{0}};
    module model;
    const std::size_t input = MiB;
    {
        gpushare::torch_scope scope{node, chat, gate};  // once for each tenant
        {
            const auto inside = scope.enter();  // by each thread, for each request
            const auto answer = model.forward(input);
            CHECK(scope.live() == 1);
        }
        on_another_thread(chat.work_stream().native_handle(), [&] { (void)model.forward(input); });
        REQUIRE(cudaStreamSynchronize(chat.work_stream().native_handle()) == cudaSuccess);
        CHECK(model.launches == 2);
        (void)gate.in_flight(scope.client());  // asks the device
        // That of the other thread, too, and the scrubbing of memory that a thread asked for
        // inside.
        CHECK(gate.usage(scope.client()).launches == 2 + standin::count("cudaMemsetAsync"));
    }
    { const gpushare::torch_scope otherwise{node, chat, gate, {.level = 1}}; }
    { const gpushare::torch_scope otherwise{node, chat, gate, {}}; }  // the options, not the part
    { const gpushare::torch_scope otherwise{node, chat, gate, gate.add(chat)}; }
    { const gpushare::torch_scope otherwise{node, chat, gate, gate.add(chat), 0}; }
    CHECK(chat.close().complete);
}

// What CUDAGraph does around a capture, on its stream.
struct graph {
    explicit graph(cudaStream_t s) : on(s) {
        caching::beginAllocateToPool(0, id, [this](cudaStream_t other) { return other == on; });
        REQUIRE(cudaStreamBeginCapture(on, cudaStreamCaptureModeGlobal) == cudaSuccess);
    }
    void end() {
        cudaGraph_t made = nullptr;
        REQUIRE(cudaStreamEndCapture(on, &made) == cudaSuccess);
        caching::endAllocateToPool(0, id);
        REQUIRE(cudaGraphDestroy(made) == cudaSuccess);
    }
    void reset() { caching::releasePool(0, id); }

    static inline unsigned long long made_so_far = 100;
    cudaStream_t on;
    c10::MempoolId_t id{++made_so_far, 0};
};

TEST_CASE("a graph's memory is the tenant's, and the graph's alone until it is gone", "[interop][torch]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    const auto inside = scope.enter();
    const auto kept = bytes_of(8 * MiB).get();  // in the cache of the stream
    std::optional<c10::DataPtr> input = bytes_of(MiB);
    graph g(r.chat->work_stream().native_handle());
    void* const temporary = bytes_of(8 * MiB).get();
    const auto output = bytes_of(MiB).get();
    CHECK(temporary != kept);
    CHECK(output != kept);
    input.reset();  // of the stream that is captured: no event is recorded there
    (void)scope.usage();
    CHECK(r.charged() >= 17_MiB);
    g.end();
    void* const after = bytes_of(8 * MiB).get();
    CHECK(after == kept);
    CHECK(scope.live() == 2);  // torch takes 20 MiB for one block, and 2 MiB for the other
    scope.give_back();
    const auto with_graph = r.charged();
    g.reset();
    CHECK(scope.live() == 0);
    scope.give_back();
    r.chat->memory().trim();
    CHECK(r.charged() + 20_MiB <= with_graph);
}

TEST_CASE("a graph that lacks memory gets torch's error, and the next one fits", "[interop][torch]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    const auto inside = scope.enter();
    graph g(r.chat->work_stream().native_handle());
    CHECK_THROWS_WITH(bytes_of(100 * MiB), Contains("tenant 'chat'"));
    g.end();
    g.reset();
    graph again(r.chat->work_stream().native_handle());
    CHECK(bytes_of(8 * MiB).get() != nullptr);
    again.end();
    again.reset();
    CHECK(scope.live() == 0);
}

TEST_CASE("cuBLAS's workspace of a stream goes with its scope", "[interop][torch]") {
    rig r;
    auto& all = at::cuda::cublas_handle_stream_to_workspace();
    int handle = 0;
    {
        gpushare::torch_scope scope{r.node, *r.chat};
        const auto inside = scope.enter();
        void* const s = c10::cuda::getCurrentCUDAStream(0).stream();
        all.map.emplace(std::tuple<void*, void*>(&handle, s), bytes_of(8 * MiB));
        all.map.emplace(std::tuple<void*, void*>(&handle, nullptr), c10::DataPtr());
        CHECK(scope.live() == 1);
    }
    CHECK(all.map.size() == 1);
    all.map.clear();
    CHECK(r.chat->close().leaked_blocks == 0);
}

TEST_CASE("torch's raw allocations and its queries about blocks work for tenants' blocks", "[interop][torch]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    const auto inside = scope.enter();
    void* const p = caching::raw_alloc(MiB);
    void* const q = caching::get()->raw_allocate(MiB);
    CHECK(scope.live() == 2);
    std::size_t size = 0;
    CHECK_THROWS_WITH(caching::getBaseAllocation(p, &size), Contains("isn't shared"));
    CHECK_THROWS_WITH(caching::shareIpcHandle(p), Contains("isn't shared"));
    caching::raw_delete(p);
    caching::get()->raw_deallocate(q);
    caching::raw_delete(nullptr);
    CHECK(scope.live() == 0);
    CHECK(c10::GetAllocator(c10::kCUDA) == caching::get());
}

TEST_CASE("a scope that ends on another thread ends the program", "[interop][torch][fault]") {
    rig r;
    gpushare::torch_scope scope{r.node, *r.chat};
    const pid_t child = ::fork();
    if (child == 0) {
        (void)std::freopen("/dev/null", "w", stderr);
        const struct rlimit none {};
        (void)::setrlimit(RLIMIT_CORE, &none);
        std::signal(SIGABRT, SIG_DFL);
        auto owner = std::make_optional<gpushare::detail::torch_inside>(nullptr, 0);
        std::thread([&] { owner.reset(); }).join();
        ::_exit(0);
    }
    int how = 0;
    REQUIRE(::waitpid(child, &how, 0) == child);
    CHECK(WIFSIGNALED(how));
    CHECK(WTERMSIG(how) == SIGABRT);
}

TEST_CASE("on the host the same lines put a thread's tensors into the tenant's memory", "[interop][torch]") {
    gpushare::host::node node{{.memory = 64_MiB, .sms = 1}};
    gpushare::tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 16_MiB, .compute = 50_pct});
    const auto tensor = [](std::size_t n) { return c10::GetAllocator(c10::kCPU)->allocate(n); };
    gpushare::torch_cpu_scope scope{node, chat};
    {
        const auto inside = scope.enter();
        const auto answer = tensor(MiB);
        CHECK(answer.device() == c10::Device(c10::kCPU));
        CHECK(scope.live() == 1);
        CHECK_THROWS_AS(tensor(20 * MiB), c10::OutOfMemoryError);
        CHECK(tensor(0).get() == nullptr);
        CHECK(c10::GetAllocator(c10::kCPU)->clone(answer.get(), 100).get() != answer.get());
        void* const raw = c10::GetAllocator(c10::kCPU)->raw_allocate(MiB);
        CHECK(scope.live() == 2);
        c10::GetAllocator(c10::kCPU)->raw_deallocate(raw);
        CHECK_THROWS_AS(scope.enter(1), gpushare::operation_error);
    }
    const auto outside = tensor(20 * MiB);
    CHECK(scope.live() == 0);
    CHECK(chat.close().leaked_blocks == 0);
}

}  // namespace torch_scope_test
