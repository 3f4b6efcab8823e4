// SPDX-License-Identifier: Apache-2.0
// The figures of the CUDA backend that need no device: what a limiter adds to a launch, in time and in CUDA calls, over
// the stand-in for the runtime.
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/compute/compute_limiter.hpp>

#include "harness.hpp"
#include "support/cuda_standin/launch.hpp"
#include "support/cuda_standin/standin.hpp"

namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::cuda::stream;
using limiter = gpushare::compute_limiter<stream, gpushare::host::steady_clock>;
using call_counts = std::map<std::string, double>;

constexpr gpushare::detail::empty_kernel empty;
constexpr std::size_t repeats = 41;

/// A node on a stand-in of its own, with a stream and two clients of a limiter.
struct rig {
    explicit rig(standin::timing time) : started((standin::reset({.devices = 1, .time = time}), true)) {}

    void launch() { s.launch({}, empty); }
    void launch_gated() {
        gate.acquire(client)->enqueue(s, [](stream& x) { x.launch({}, empty); });
    }

    bool started;  // before the node
    gpushare::cuda::node node;
    stream s = node.make_stream({0});
    limiter gate;
    gpushare::client_id client = gate.add({.weight = 50_pct}), other = gate.add({.weight = 50_pct});
};

/// CUDA calls by name that `f` makes, per call of it in the long run.
template <std::invocable F>
call_counts cuda_calls(F f) {
    constexpr std::size_t warm_up = 100, counted = 1000;
    for (std::size_t i = 0; i < warm_up; ++i) f();
    standin::forget_calls();
    for (std::size_t i = 0; i < counted; ++i) f();
    call_counts counts;
    for (const auto& c : standin::calls()) counts.try_emplace(c.name);  // the last calls: all names are among them
    for (auto& [name, n] : counts) n = static_cast<double>(standin::count(name)) / static_cast<double>(counted);
    return counts;
}

call_counts operator-(call_counts counts, const call_counts& others) {
    for (const auto& [name, n] : others) counts[name] -= n;
    std::erase_if(counts, [](const auto& c) { return c.second < 0.005; });
    return counts;
}

void print(const char* what, const call_counts& counts) {
    std::printf("# %s:", what);
    for (const auto& [name, n] : counts) std::printf(" %.3g %s,", n, name.c_str());
    std::printf("\n");
}

/// Calls that the library makes beyond a launch, made directly.
class same_calls {
public:
    explicit same_calls(const call_counts& counts) {
        for (const auto& [name, n] : counts) {
            int* const times = name == "cudaEventRecord"                       ? &records_
                               : name == "cudaEventQuery"                      ? &queries_
                               : name == "cudaEventElapsedTime"                ? &spans_
                               : name == "cudaThreadExchangeStreamCaptureMode" ? &modes_
                                                                               : nullptr;
            if (times == nullptr) throw std::runtime_error("cuda.permit_submit_ns: don't know how to call " + name);
            *times = static_cast<int>(std::lround(n));
        }
        for (auto& e : events_)
            if (cudaEventCreateWithFlags(&e, cudaEventDefault) != cudaSuccess) throw std::runtime_error("no event");
    }
    same_calls(const same_calls&) = delete;
    same_calls& operator=(const same_calls&) = delete;
    ~same_calls() {
        for (const auto e : events_) (void)cudaEventDestroy(e);
    }

    void operator()(stream& s) {
        auto mode = cudaStreamCaptureModeRelaxed;
        float ms = 0;
        for (int i = 0; i < records_; ++i) (void)cudaEventRecord(events_[i % 2], s.native_handle());
        for (int i = 0; i < queries_; ++i) (void)cudaEventQuery(events_[i % 2]);
        for (int i = 0; i < modes_; ++i) (void)cudaThreadExchangeStreamCaptureMode(&mode);
        for (int i = 0; i < spans_; ++i) (void)cudaEventElapsedTime(&ms, events_[0], events_[1]);
        bench::keep(ms);
    }

private:
    int records_ = 0, queries_ = 0, spans_ = 0, modes_ = 0;
    cudaEvent_t events_[2] = {};
};

/// An uncontended permit, the launch behind it and the account of it, on a device that is done at once; less the launch
/// and the same CUDA calls made directly, for the stand-in's calls cost what they cost.
void permit_submit(bench::report& r) {
    constexpr std::size_t calls = 5'000;
    rig device(standin::timing::automatic);
    const auto beyond = cuda_calls([&] { device.launch_gated(); }) - cuda_calls([&] { device.launch(); });
    print("CUDA calls on both sides of cuda.permit_submit_ns, beside the launch", beyond);
    same_calls direct(beyond);
    r.figure("cuda.permit_submit_ns",
             bench::repeated(repeats,
                             [&] {
                                 const double bare = bench::ns_per_call(calls, [&] {
                                     device.launch();
                                     direct(device.s);
                                 });
                                 return bench::ns_per_call(calls, [&] { device.launch_gated(); }) - bare;
                             }),
             "ns");
    device.s.record().wait(gpushare::never);
}

/// CUDA calls per launch through a limiter, beyond those of the launch, where the device always has as much work as the
/// limiter lets in: one submission ends for each that is handed over.
void calls_per_submission(bench::report& r) {
    rig device(standin::timing::manual);
    const auto bare = cuda_calls([&] { device.launch(); });
    const auto submit = [&] { (void)device.gate.submit(device.client, device.s, [](stream& x) { x.enqueue(100us); }); };
    for (int waiting = 0; waiting < 100; ++waiting) submit();
    const auto gated = cuda_calls([&] {
        submit();
        standin::advance(100us);
    });
    const auto beyond = gated - bare;
    print("cuda.standin_calls_per_submission", beyond);
    double all = 0;
    for (const auto& [name, n] : beyond) all += n;
    r.figure("cuda.standin_calls_per_submission", {all}, "calls");
    r.figure("cuda.standin_records_per_submission",
             {beyond.contains("cudaEventRecord") ? beyond.at("cudaEventRecord") : 0}, "calls");
    for (bool idle = false; !idle; idle = device.gate.close(device.client, gpushare::instant::min()))
        standin::advance(1s);
}

}  // namespace

int main(int argc, char** argv) {
    try {
        bench::start_a_second_thread();
        bench::report r("one thread, limiter depth 3, the stand-in for the CUDA runtime with 1 device");
        permit_submit(r);
        calls_per_submission(r);
        r.write(argc > 1 ? argv[1] : nullptr);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_cuda: %s\n", e.what());
        return 1;
    }
}
