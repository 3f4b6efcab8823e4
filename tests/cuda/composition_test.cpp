// SPDX-License-Identifier: Apache-2.0
// Tags: slow
// The composition matrix on CUDA, over the stand-in: the same stacks, owners and scenarios as on
// the host, CUDA's own stream-ordered pools, and all of them during a capture.
#include <gpushare/backend/cuda/cuda.hpp>
#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/backend/cuda/pool.hpp>
#include <gpushare/backend/cuda/virtual_memory.hpp>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <utility>

#include <gpushare/error.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/composition/interruption.hpp"
#include "support/composition/matrix.hpp"

namespace composition_matrix_test {

using namespace gpushare::literals;
using namespace support::composition;

namespace cuda = gpushare::cuda;

namespace {

class cuda_backend {
public:
    using node_type = cuda::node;
    using stream = cuda::stream;
    using memory_type = cuda::device_memory;
    using pinned_type = cuda::pinned_memory;
    using virtual_memory = cuda::virtual_memory;

    cuda_backend(bytes capacity, std::uint32_t devices)
        : gpu_{{.devices = devices,
                .memory = capacity + 2_MiB,
                .context = 2_MiB,
                .page = bytes{unit},
                .pool_step = bytes{unit}}} {
        chunks_.emplace(node_, d);
        pinned_.emplace(node_, d);
    }

    [[nodiscard]] node_type& node() { return node_; }
    [[nodiscard]] memory_type& memory() { return node_.memory(d); }
    [[nodiscard]] virtual_memory& chunks() { return *chunks_; }
    [[nodiscard]] stream make_stream(gpushare::device_id on = d) { return node_.make_stream(on); }
    [[nodiscard]] pinned_type& pinned() { return *pinned_; }
    /// CUDA's own.
    [[nodiscard]] cuda::memory_pool& device_pool() { return pool_ ? *pool_ : pool_.emplace(node_, d); }
    [[nodiscard]] bytes used() const {
        bytes sum = pinned_->used();
        for (std::uint32_t i = 0; i < node_.num_devices(); ++i) sum += standin::used(static_cast<int>(i));
        return sum;
    }
    /// By a call of its own, which spoils no capture.
    [[nodiscard]] static void* take_for_library() {
        void* p = nullptr;
        auto mode = cudaStreamCaptureModeRelaxed;
        (void)cudaThreadExchangeStreamCaptureMode(&mode);
        const auto code = cudaMalloc(&p, unit);
        (void)cudaThreadExchangeStreamCaptureMode(&mode);
        return code == cudaSuccess ? p : nullptr;
    }
    static void give_for_library(void* p) {
        auto mode = cudaStreamCaptureModeRelaxed;
        (void)cudaThreadExchangeStreamCaptureMode(&mode);
        (void)cudaFree(p);
        (void)cudaThreadExchangeStreamCaptureMode(&mode);
    }
    static void fail_allocation(std::uint64_t after) {
        standin::inject({.call = "cudaMalloc", .code = cudaErrorMemoryAllocation, .skip = after});
        standin::inject({.call = "cuMemCreate", .code = cudaErrorMemoryAllocation, .skip = after});
    }
    /// Those that haven't struck do so now.
    void heal() {
        while (standin::faults_left() != 0) {
            if (void* const p = memory().try_allocate(unit, 256)) (void)memory().deallocate(p, unit, 256);
            (void)chunks().create();
        }
    }
    /// A launch past the stream that fails, as by <<<>>>.
    static void fail(const stream& s) {
        standin::inject({.call = "cudaLaunchKernelExC", .code = cudaErrorInvalidConfiguration});
        (void)standin::detail::launch(s.native_handle(), gpushare::ns{1'000}, [] {});
    }
    static void work(stream& s) { s.enqueue(gpushare::ns{1'000}); }
    static void stall(const stream& s) { standin::hold(s.native_handle()); }
    static void resume(const stream& s) { standin::let_go(s.native_handle()); }
    /// What takes memory, and what makes streams: to be asked for before each use.
    [[nodiscard]] support::interruption& allocations() {
        return armed(allocations_, {"cudaMalloc", "cuMemCreate", "cudaHostAlloc", "cudaMallocFromPoolAsync"});
    }
    [[nodiscard]] support::interruption& new_streams() { return armed(new_streams_, {"cudaStreamCreateWithPriority"}); }
    /// What comes between two of its readings.
    static void before_reading(std::function<void()> what) { standin::before_next("cudaMemGetInfo", std::move(what)); }
    void lose() {
        standin::poison(0, cudaErrorIllegalAddress);
        behind_.lost = true;
    }
    /// Whether what was captured meanwhile can be had.
    template <class F>
    bool captured(F f) {
        stream s = make_stream();
        const struct ended {
            std::atomic<const stream*>& capturing;
            ~ended() { capturing = nullptr; }
        } at_the_end{capturing_};
        try {
            (void)cuda::capture(s, [&](stream&) {
                capturing_ = &s;
                f();
            });
            return true;
        } catch (const gpushare::error&) {
            return false;
        }
    }
    /// The stream that is being captured now; null if none is.
    [[nodiscard]] const stream* capturing() const { return capturing_; }

private:
    static constexpr gpushare::device_id d{0};
    // What a lost device leaves behind is no finding: nothing of it can be given back.
    struct left_behind {
        bool lost = false;
        ~left_behind() {
            if (lost) (void)standin::take_findings();
        }
    };
    static support::interruption& armed(support::interruption& by, std::initializer_list<const char*> calls) {
        for (const char* const call : calls) standin::before_next(call, [&by] { by.strike(); });
        return by;
    }

    support::interruption allocations_, new_streams_;
    std::atomic<const stream*> capturing_{nullptr};
    const standin::session gpu_;
    left_behind behind_;
    cuda::node node_;
    std::optional<virtual_memory> chunks_;
    std::optional<pinned_type> pinned_;
    std::optional<cuda::memory_pool> pool_;
};

/// CUDA's pool behind the quota. What it keeps, charged to nobody, goes back when somebody lacks
/// memory.
class native_stack : public stack {
public:
    explicit native_stack(const site<cuda_backend>& s)
        : stream_(s.on.make_stream()),
          pool_(s.on.node(), {0}),
          below_(pool_, stream_),
          memory_(s.limit, below_),
          trims_(gpushare::quota_hook::at_root, s.limit, std::numeric_limits<int>::min(),
                 [this](const gpushare::reclaim_request& r) { return r.below ? trim() : bytes{}; }) {}
    void* get(failure& why) noexcept override { return memory_.try_allocate(unit, 256, &why); }
    errc put(void* p) noexcept override { return memory_.deallocate(p, unit, 256); }
    void reach() override { (void)stream_.record().wait(gpushare::never); }
    void settle() override { (void)trim(); }
    [[nodiscard]] bool is_taken_back() const noexcept override { return false; }  // it is past the owner's memory
    [[nodiscard]] bool defers() const noexcept override { return true; }

private:
    bytes trim() {
        try {
            const bytes before = pool_.usage().reserved;
            pool_.trim();
            return before - pool_.usage().reserved;
        } catch (const gpushare::error&) {  // a lost device has nothing to give
            return {};
        }
    }
    cuda::stream stream_;
    cuda::memory_pool pool_;
    cuda::stream_memory below_;
    gpushare::quota_resource<cuda::stream_memory> memory_;
    gpushare::quota_hook trims_;
};

}  // namespace

TEST_CASE("a launch that fails is told, by every way in, whoever records points meanwhile",
          "[cuda][failures][threads]") {
    const standin::session gpu;
    cuda::node node;
    auto on = node.make_stream({0}), other = node.make_stream({1});
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    failures tried(
        node.get_clock(), on, other, [](cuda::stream& s) { cuda_backend::fail(s); },
        [](cuda::stream& s) { cuda_backend::work(s); });
    for (const auto& what : tried.wrong(tried.usual())) FAIL_CHECK(what);
    const auto graph_on = [&](gpushare::device_id d) {  // which runs nowhere else
        cuda::stream shape = node.make_stream(d);
        return cuda::graph_executable{cuda::capture(shape, [](cuda::stream& s) { cuda_backend::work(s); })};
    };
    std::array runs{graph_on({0}), graph_on({1})};
    const auto run = [&](cuda::stream& s) { runs[s.properties().ordinal == 0 ? 0 : 1].launch(s); };
    const auto graph_fails = [&](cuda::stream& s) {
        standin::inject({.call = "cudaGraphLaunch", .code = cudaErrorInvalidValue});
        run(s);
    };
    failures by_graph(node.get_clock(), on, other, graph_fails, run);
    for (const auto& what : by_graph.wrong(by_graph.usual())) FAIL_CHECK(what);
    (void)cudaGetLastError();
}

TEST_CASE("the composition matrix on CUDA", "[cuda][composition][threads]") {
    const auto all = run_matrix<cuda_backend>(10, {kind<native_stack, cuda_backend>("CUDA's pool")});
    CHECK(all.cells == 1826);  // of 16 stacks, 9 owners and 14 scenarios, as on the host
    for (const auto& what : all.wrong) FAIL_CHECK(what);
}

}  // namespace composition_matrix_test
