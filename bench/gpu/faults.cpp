// SPDX-License-Identifier: Apache-2.0
// Observes the effects of an illegal access on the faulty context, on other contexts, after a
// reset, and on other processes. Each experiment is a process of its own, because a process may not
// be able to continue after the fault.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>

#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/error.hpp>

#include "experiments.hpp"
#include "rig.hpp"

namespace bench {

namespace {

using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::never;

/// Prints CUDA's answer and reports the answer as a figure.
void answer(report& r, const std::string& name, cudaError_t code) {
    (void)cudaGetLastError();
    std::printf("# %s: %s, %s\n", name.c_str(), cudaGetErrorName(code), cudaGetErrorString(code));
    r.figure("gpu." + name, {static_cast<double>(code)}, "cudaError");
}

void seen(report& r, const std::string& name, bool yes) { r.figure("gpu." + name, {yes ? 1.0 : 0.0}, "seen"); }

/// Makes an illegal write on `s` and waits until the error shows.
void break_it(report& r, const std::string& name, cu::stream& s) {
    cu::stream::point p;
    r.figure("gpu." + name + "_noticed_in_us", {us_of([&] {
                 launch_illegal_write(s);
                 p = s.record();
                 spin_until(p);
             })},
             "us");
    seen(r, name + "_point_says_device_lost", p.status() == errc::device_lost);
    answer(r, name + "_own_stream", cudaStreamQuery(s.native_handle()));
}

cudaError_t try_malloc() {
    void* p = nullptr;
    const auto code = cudaMalloc(&p, 1 << 20);
    if (code == cudaSuccess) (void)cudaFree(p);
    return code;
}

/// Launches a kernel on `s` and waits for its end.
cudaError_t try_launch(cu::stream& s) {
    launch_spin(s, {}, 10us);
    return cudaStreamSynchronize(s.native_handle());
}

/// Allocates memory in the current context and fills the memory on a stream of the context.
cudaError_t try_fill(cudaStream_t s) {
    void* p = nullptr;
    if (const auto code = cudaMalloc(&p, 1 << 20); code != cudaSuccess) return code;
    auto code = cudaMemsetAsync(p, 0, 1 << 20, s);
    if (code == cudaSuccess) code = cudaStreamSynchronize(s);
    (void)cudaFree(p);
    return code;
}

}  // namespace

void fault_in_primary_context(report& r) {
    rig device;
    auto guilty = device.stream(), innocent = device.stream();
    limiter gate;
    const auto client = gate.add({});
    launch_spin(innocent, {}, sized<gpushare::ns>(200ms, 200us));
    break_it(r, "fault", guilty);
    answer(r, "fault_other_stream", cudaStreamQuery(innocent.native_handle()));
    answer(r, "fault_malloc", try_malloc());
    std::size_t free = 0, total = 0;
    answer(r, "fault_mem_get_info", cudaMemGetInfo(&free, &total));
    cudaStream_t made = nullptr;
    answer(r, "fault_new_stream", cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    seen(r, "fault_node_says_lost", device.node.lost(device.device));

    auto ticket = gate.submit(client, innocent, [](cu::stream& s) { launch_spin(s, {}, 10us); });
    ticket->wait();
    seen(r, "fault_later_ticket_says_device_lost", ticket->status() == errc::device_lost);
}

void fault_in_partition(report& r) {
    rig device;
    const auto can = cu::query_sm_split(device.node, device.device);
    auto parts = cu::make_green_contexts(device.node, device.device, gpushare::equal_sms(can, 2));
    auto guilty = parts[0].make_stream(), innocent = parts[1].make_stream(), outside = device.stream();
    launch_spin(innocent, {}, sized<gpushare::ns>(200ms, 200us));
    break_it(r, "fault_in_partition", guilty);
    answer(r, "fault_in_partition_other_partition", cudaStreamQuery(innocent.native_handle()));
    answer(r, "fault_in_partition_primary_context", cudaStreamQuery(outside.native_handle()));
    answer(r, "fault_in_partition_malloc", try_malloc());
}

void fault_beside_other_context(report& r) {
    rig device;
    const cu::driver& api = device.node.api();
    const cu::entry_point<decltype(::cuCtxCreate)> ctx_create{"cuCtxCreate", 13000};
    const cu::entry_point<decltype(::cuCtxSetCurrent)> ctx_set_current{"cuCtxSetCurrent", 4000};
    const cu::entry_point<decltype(::cuCtxDestroy)> ctx_destroy{"cuCtxDestroy", 4000};
    CUdevice native = 0;
    CUcontext primary = nullptr, other = nullptr;
    cu::check(api.device_get(&native, device.properties().ordinal), "asking for a device");
    auto guilty = device.stream();
    cu::check(cudaSetDevice(device.properties().ordinal), "making the primary context current");
    cu::check(api.ctx_get_current(&primary), "asking for the primary context");
    // CuCtxCreate also makes the context current.
    cu::check(ctx_create(&other, nullptr, 0, native), "making another context");

    // A plain CUDA stream, because the library's streams belong to primary contexts.
    cudaStream_t innocent = nullptr;
    cu::check(cudaStreamCreateWithFlags(&innocent, cudaStreamNonBlocking), "making a stream of another context");
    answer(r, "other_context_before", try_fill(innocent));
    cu::check(ctx_set_current(primary), "making the primary context current");
    break_it(r, "fault_beside_context", guilty);
    cu::check(ctx_set_current(other), "making another context current");
    answer(r, "fault_beside_context_its_stream", cudaStreamQuery(innocent));
    answer(r, "fault_beside_context_its_malloc", try_malloc());
    answer(r, "fault_beside_context_its_fill", try_fill(innocent));
    (void)cudaStreamDestroy(innocent);
    (void)ctx_destroy(other);
}

void fault_and_reset(report& r) {
    {
        rig device;
        auto guilty = device.stream();
        break_it(r, "fault_before_reset", guilty);
    }
    answer(r, "reset", cudaDeviceReset());
    answer(r, "reset_malloc", try_malloc());
    bool works = false;
    try {
        rig again;
        auto s = again.stream();
        answer(r, "reset_launch", try_launch(s));
        const auto p = s.record();
        p.wait(never);
        works = p.status() == errc::none;
    } catch (const gpushare::operation_error& e) {
        std::printf("# a node after the reset: %s\n", e.what());
    }
    seen(r, "reset_new_node_works", works);
}

void healthy_process(report& r) {
    rig device;
    auto s = device.stream();
    const auto end = gpushare::host::steady_clock::now() + sized(5000ms, 500ms);
    double kernels = 0;
    while (gpushare::host::steady_clock::now() < end) {
        cu::check(try_launch(s), "a kernel of a healthy process");
        ++kernels;
    }
    r.figure("gpu.kernels_of_healthy_process", {kernels}, "kernels");
}

void fault_beside_other_process(report& r) {
    rig device;
    auto guilty = device.stream();
    std::string program = "/proc/self/exe", argument = "healthy_process";
    std::string small = "--small";
    char* const arguments[] = {program.data(), argument.data(), small_form ? small.data() : nullptr, nullptr};
    pid_t child = 0;
    if (posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ) != 0)
        throw std::runtime_error("cannot start another process");
    // By now, the process has its context and is busy.
    std::this_thread::sleep_for(sized(3000ms, 200ms));
    break_it(r, "fault_beside_process", guilty);
    int status = 0;
    if (waitpid(child, &status, 0) != child) throw std::runtime_error("cannot wait for another process");
    std::printf("# the other process %s\n",
                WIFEXITED(status) && WEXITSTATUS(status) == 0 ? "noticed nothing" : "failed");
    seen(r, "fault_seen_by_other_process", !WIFEXITED(status) || WEXITSTATUS(status) != 0);
}

}  // namespace bench
