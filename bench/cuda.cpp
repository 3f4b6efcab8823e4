// SPDX-License-Identifier: Apache-2.0
// Measures what needs no GPU in the CUDA backend: the time and the CUDA calls that a limiter adds
// to a launch, over the stand-in for the runtime.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <fstream>
#include <future>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/host/clock.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/launch_gate.hpp>
#include <gpushare/interop/detail/torch_memory.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "arguments.hpp"
#include "harness.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/standin.hpp"

namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::cuda::stream;

/// The stand-in's clock. The clock runs in real time unless a benchmark moves the time by hand.
struct standin_clock {
    [[nodiscard]] static gpushare::instant now() noexcept { return gpushare::instant{standin::now()}; }
};
using call_counts = std::map<std::string, double>;

constexpr gpushare::detail::empty_kernel empty;

/// A node on a fresh stand-in, with two clients of a limiter and a stream for each client.
template <class Clock>
struct rig {
    using limiter = gpushare::compute_limiter<stream, Clock>;

    rig(standin::timing time, std::size_t n)
        : started((standin::reset({.devices = 1, .time = time}), true)), clients(n) {}

    /// The next client in turn, among the first `clients` clients.
    std::size_t turn() { return next = next + 1 < clients ? next + 1 : 0; }
    void launch() { streams[turn()].launch({}, empty); }
    void launch_gated() {
        const auto i = turn();
        (void)gate.enqueue(ids[i], streams[i], [](stream& x) { x.launch({}, empty); });
    }
    void launch_in_two_steps() {
        const auto i = turn();
        if (auto p = gate.acquire(ids[i])) p->enqueue(streams[i], [](stream& x) { x.launch({}, empty); });
    }

    bool started;  // resets the stand-in before the node is made
    std::size_t clients = 1, next = 0;
    gpushare::cuda::node node;
    stream streams[2] = {node.make_stream({0}), node.make_stream({0})};
    limiter gate;
    gpushare::client_id ids[2] = {gate.add({.weight = 50_pct}), gate.add({.weight = 50_pct})};
};

/// Counts the CUDA calls that `f` makes, by name: the mean per call of `f` after a warm-up.
template <std::invocable F>
call_counts cuda_calls(F f) {
    constexpr std::size_t warm_up = 1000, counted = 1000;
    for (std::size_t i = 0; i < warm_up; ++i) f();
    standin::forget_calls();
    for (std::size_t i = 0; i < counted; ++i) f();
    call_counts counts;
    for (const auto& c : standin::calls()) counts.try_emplace(c.name);  // the last calls contain every name
    for (auto& [name, n] : counts) n = static_cast<double>(standin::count(name)) / static_cast<double>(counted);
    return counts;
}

call_counts operator-(call_counts counts, const call_counts& others) {
    for (const auto& [name, n] : others) counts[name] -= n;
    std::erase_if(counts, [](const auto& c) { return c.second < 0.005; });
    return counts;
}

double sum(const call_counts& counts) {
    double all = 0;
    for (const auto& [name, n] : counts) all += n;
    return all;
}

double of(const call_counts& counts, const char* name) {
    const auto found = counts.find(name);
    return found == counts.end() ? 0 : found->second;
}

/// Closes the client while the benchmark advances the stand-in's clock.
template <class Limiter>
void close(Limiter& gate, gpushare::client_id client) {
    while (!gate.close(client, gpushare::instant::min())) standin::advance(1s);
}

void print(const char* what, const call_counts& counts) {
    std::printf("# %s:", what);
    for (const auto& [name, n] : counts) std::printf(" %.3g %s,", n, name.c_str());
    std::printf("\n");
}

/// Repeats, directly, the calls that the library makes in addition to a launch.
class same_calls {
public:
    explicit same_calls(const call_counts& counts) {
        for (const auto& [name, n] : counts) {
            owed* const calls = name == "cudaEventRecord"                     ? &records_
                                : name == "cuEventQuery"                      ? &queries_
                                : name == "cuEventElapsedTime"                ? &spans_
                                : name == "cuThreadExchangeStreamCaptureMode" ? &modes_
                                : name == "cudaPeekAtLastError"               ? &peeks_
                                : name == "cudaStreamWaitEvent"               ? &waits_
                                : name == "cuStreamIsCapturing"               ? &asks_
                                                                              : nullptr;
            if (calls == nullptr) throw std::runtime_error("cuda.permit_submit_ns: don't know how to call " + name);
            calls->each_time = n;
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
        const auto& api = s.state().device->api();
        auto mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        float ms = 0;
        while (records_.due()) (void)cudaEventRecord(events_[0], s.native_handle());
        auto status = CU_STREAM_CAPTURE_STATUS_NONE;
        while (asks_.due()) (void)api.stream_is_capturing(s.native_handle(), &status);
        while (waits_.due()) (void)cudaStreamWaitEvent(s.native_handle(), events_[0], 0);
        while (queries_.due()) (void)api.event_query(events_[0]);
        while (peeks_.due()) bench::keep(cudaPeekAtLastError());
        while (modes_.due()) (void)api.exchange_capture_mode(&mode);
        while (spans_.due()) (void)api.event_elapsed_time(&ms, events_[0], events_[0]);
        bench::keep(ms);
    }

private:
    struct owed {  // accumulates fractions of a call until a whole call is due
        double each_time = 0, now = 0;
        bool due() {
            if (now < 1) {
                now += each_time;
                return false;
            }
            now -= 1;
            return true;
        }
    };
    owed records_, queries_, spans_, modes_, peeks_, waits_, asks_;
    cudaEvent_t events_[2] = {};
};

/// The work that no permit can avoid: one reading of the clock, and two exchanges that other
/// threads see. The first exchange admits the work, the second marks the work as enqueued.
class least_permit {
public:
    void operator()() {
        bench::keep(gpushare::host::steady_clock::now());
        bench::keep(let_in_.exchange(nullptr));
        bench::keep(landed_.exchange(this));
    }

private:
    std::atomic<least_permit*> let_in_{nullptr}, landed_{nullptr};
};

struct permit_costs {
    std::vector<double> submit, floor, in_two_steps;  // ns
};

/// Measures an uncontended permit together with the launch and the accounting, on a device that
/// finishes work at once. Subtracts the launch and the same CUDA calls made directly, because the
/// stand-in's calls have a cost of their own. Measures two variants the same way: the least work
/// that a permit needs, and a permit that the program takes before the stream is known and that
/// therefore locks the mutex each time. Several clients take turns, each on its own stream.
permit_costs permits(std::size_t clients) {
    // Each turn is short, and measured turns alternate with bare turns: the difference is small
    // compared with the time that the stand-in takes. The median of many pairs leaves out the pairs
    // that another program disturbed.
    constexpr std::size_t calls = 64, turns = 2001;
    rig<gpushare::host::steady_clock> device(standin::timing::automatic, clients);
    // The stand-in makes progress only when the program calls the runtime. Both sides query often
    // enough that no work piles up.
    auto drained = [&, n = 0](auto launch) mutable {
        launch();
        if (++n % 16 == 0)
            for (auto& s : device.streams) (void)cudaStreamQuery(s.native_handle());
    };
    const auto beyond = cuda_calls([&] { drained([&] { device.launch_gated(); }); }) -
                        cuda_calls([&] { drained([&] { device.launch(); }); });
    print("CUDA calls on both sides of cuda.permit_submit_ns, beside the launch", beyond);
    same_calls direct(beyond);
    least_permit least;
    const auto turn = [&](auto before_launch) {
        return bench::ns_per_call(calls, [&] {
            before_launch();
            drained([&] { device.launch(); });
            direct(device.streams[device.next]);
        });
    };
    const auto gated_turn = [&](auto launch) { return bench::ns_per_call(calls, [&] { drained(launch); }); };
    permit_costs all;
    all.submit = bench::repeated(turns, [&] {
        const double bare = turn([] {});
        all.floor.push_back(turn([&] { least(); }) - bare);
        all.in_two_steps.push_back(gated_turn([&] { device.launch_in_two_steps(); }) - bare);
        return gated_turn([&] { device.launch_gated(); }) - bare;
    });
    for (auto& s : device.streams) s.record().wait(gpushare::never);
    return all;
}

void permit_submit(bench::report& r) {
    const auto one = permits(1), two = permits(2);
    const auto median = [](const std::vector<double>& v) { return bench::value_of(bench::statistic::median, v); };
    r.figure("cuda.permit_submit_one_client_ns", one.submit, "ns");
    r.figure("cuda.permit_submit_two_clients_ns", two.submit, "ns");
    r.figure("cuda.permit_submit_ns", median(two.submit) > median(one.submit) ? two.submit : one.submit, "ns");
    r.figure("cuda.permit_floor_ns", one.floor, "ns");
    r.figure("cuda.permit_in_two_steps_ns", one.in_two_steps, "ns");
}

/// Counts CUDA calls per launch through a limiter, without the calls of the launch itself. The
/// device always has as much work as the limiter admits, so one submission ends for each submission
/// that is handed over. The clients submit in turn, each to its own stream. A submission fills the
/// device, so the clients also take turns on the device.
call_counts calls_per_submission(std::chrono::microseconds length, std::size_t clients) {
    rig<standin_clock> device(standin::timing::manual, clients);
    const auto bare = cuda_calls([&] { device.launch(); });
    const auto submit = [&] {
        const auto i = device.turn();
        (void)device.gate.submit(device.ids[i], device.streams[i], [&](stream& x) { x.enqueue(length); });
    };
    for (int waiting = 0; waiting < 100; ++waiting) submit();
    const auto beyond = cuda_calls([&] {
                            submit();
                            standin::advance(length);
                        }) -
                        bare;
    for (const auto id : device.ids) close(device.gate, id);
    return beyond;
}

/// The main figure comes from one client with kernels so short that the cost of their points
/// matters. The worst case also includes two clients and kernels of 1 ms.
void call_figures(bench::report& r) {
    double worst_of_short = 0, worst_records = 0, worst_but_peeks = 0, worst = 0;
    for (const std::size_t clients : {1U, 2U})
        for (const auto length : {10us, 50us, 100us, 1000us}) {
            const auto beyond = calls_per_submission(length, clients);
            const std::string us = std::to_string(length.count()), whose = clients == 1 ? "" : "of_two_clients_";
            print(((clients == 1 ? "kernels of " : "two clients, kernels of ") + us + " us").c_str(), beyond);
            const double all = sum(beyond);
            worst = std::max(worst, all);
            if (clients == 1 && length <= 100us) {
                worst_of_short = std::max(worst_of_short, all);
                worst_records = std::max(worst_records, of(beyond, "cudaEventRecord"));
                worst_but_peeks = std::max(worst_but_peeks, all - of(beyond, "cudaPeekAtLastError"));
            }
            r.figure("cuda.standin_calls_" + whose + us + "us", {all}, "calls");
        }
    r.figure("cuda.standin_calls_per_submission", {worst_of_short}, "calls");
    r.figure("cuda.standin_calls_per_submission_worst", {worst}, "calls");
    r.figure("cuda.standin_calls_but_peeks_per_submission", {worst_but_peeks}, "calls");
    r.figure("cuda.standin_records_per_submission", {worst_records}, "calls");
}

/// Counts the CUDA calls of the pool behind `torch_scope` for blocks that are freed on the stream
/// that allocated them. The sizes are typical of models.
double calls_per_free_on_the_same_stream() {
    constexpr std::size_t sizes[] = {512, 100'000, 1 << 20, 5 << 20, 12 << 20, 20 << 20};
    constexpr std::size_t rounds = 200;
    standin::reset({.devices = 1, .memory = 256_MiB});
    gpushare::cuda::node node;
    gpushare::tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 128_MiB});
    stream* const streams[] = {&chat.work_stream()};
    gpushare::detail::torch_memory<decltype(chat)::memory_type, gpushare::cuda::node> blocks{
        node, gpushare::device_id{0}, chat.memory(), streams};
    const auto allocate_and_free = [&](std::size_t n) {
        gpushare::failure why;
        void* const p = blocks.try_allocate(n, streams[0]->native_handle(), why);
        if (p == nullptr) throw std::runtime_error("cuda.standin_calls_per_free_same_stream: no memory");
        (void)blocks.deallocate(p, n, streams[0]->native_handle(), {});
    };
    double worst = 0;
    for (const std::size_t n : sizes) {
        for (int i = 0; i < 3; ++i) allocate_and_free(n);
        standin::forget_calls();
        for (std::size_t i = 0; i < rounds; ++i) allocate_and_free(n);
        worst = std::max(worst, static_cast<double>(standin::calls().size()) / rounds);
    }
    return worst;
}

/// Microseconds from the end of an urgent client's work until a held launch returns. In `by_device`
/// the scope is over already, and the device's work ends. In `by_host` the scope itself ends.
struct held_wakes {
    std::vector<double> by_device, by_host;
};
held_wakes wakes() {
    constexpr int rounds = 300;
    constexpr auto length = 300us;
    using clock = gpushare::host::steady_clock;
    static const char urgent_kernel = 0, held_kernel = 0;
    standin::reset({.devices = 1});
    gpushare::cuda::node node;
    gpushare::cuda::launch_gate<gpushare::launch_gate> gate{node, gpushare::device_id{0},
                                                            gpushare::launch_gate({.linger = gpushare::ns{0}})};
    const auto urgent = gate.add({.level = 1}), batch = gate.add({});
    auto theirs = node.make_stream({0}), ours = node.make_stream({0});
    const auto launch = [](stream& s, const char& kernel, gpushare::ns time) {
        if (standin::detail::launch(s.native_handle(), &kernel, false, time, [] {}) != cudaSuccess)
            throw std::runtime_error("cuda.held_wake_us: a launch failed");
    };
    const auto held_launch = [&] {
        const auto inside = gate.enter(batch);
        launch(ours, held_kernel, gpushare::ns{0});
        return clock::now();
    };
    const auto us = [](gpushare::ns t) { return static_cast<double>(t.count()) / 1e3; };
    held_wakes all;
    for (int i = 0; i < rounds; ++i) {
        gpushare::instant begun{};
        {
            const auto inside = gate.enter(urgent);
            begun = clock::now();
            launch(theirs, urgent_kernel, length);
        }
        all.by_device.push_back(us(held_launch() - begun - length));
    }
    for (int i = 0; i < rounds; ++i) {
        std::optional request(gate.announce(urgent));
        auto held = std::async(std::launch::async, held_launch);
        const auto begun = clock::now();
        while (gate.held() == 0 || clock::now() - begun < length) std::this_thread::yield();
        const auto over = clock::now();
        request.reset();
        all.by_host.push_back(us(held.get() - over));
    }
    for (auto* const s : {&theirs, &ours}) s->record().wait(gpushare::never);
    return all;
}

/// Counts the lines of code at the start of the documentation page on engines.
double lines_of_the_scope() {
    std::ifstream page(GPUSHARE_GPU_PAGE);
    bool inside = false;
    double lines = 0;
    for (std::string line; std::getline(page, line) && !line.starts_with("## ");) {
        if (line.starts_with("```"))
            inside = line == "```c++";
        else
            lines += inside && !line.empty();
    }
    if (lines == 0) throw std::runtime_error("cuda.torch_scope_lines: " GPUSHARE_GPU_PAGE " has no code");
    return lines;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const bench::arguments asked(argc, argv);
        bench::start_a_second_thread();
        bench::report r(
            "one thread, limiter depth 3, one client or two in turn; the stand-in for the CUDA runtime with 1 device");
        permit_submit(r);
        call_figures(r);
        r.figure("cuda.standin_calls_per_free_same_stream", {calls_per_free_on_the_same_stream()}, "calls");
        const auto held = wakes();
        r.figure("cuda.held_wake_us", held.by_device, "us");
        r.figure("cuda.held_wake_by_host_us", held.by_host, "us");
        r.figure("cuda.torch_scope_lines", {lines_of_the_scope()}, "lines");
        r.write(asked.json());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_cuda: %s\n", e.what());
        return 1;
    }
}
