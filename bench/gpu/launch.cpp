// SPDX-License-Identifier: Apache-2.0
// Measures the cost of launches, permits, events and graphs on a device.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/graph.hpp>

#include "experiments.hpp"
#include "rig.hpp"

namespace bench {

namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::never;

std::size_t repeats() { return sized<std::size_t>(21, 2); }

}  // namespace

void launch_cost(report& r) {
    rig device;
    auto s = device.stream();
    limiter gate;
    const auto client = gate.add({});
    const auto bare = [&] { launch_empty(s); };
    const auto between_points = [&] {
        const auto begin = s.record();
        launch_empty(s);
        const auto end = s.record();
    };
    const auto gated = [&] { gate.acquire(client)->enqueue(s, launch_empty); };
    const auto submitted = [&] { (void)gate.submit(client, s, launch_empty); };

    // The host's time for each kind of launch while the device is idle.
    const auto per_launch = [&](auto launch) {
        const int launches = sized(200, 10);
        double sum = 0;
        for (int i = 0; i < launches; ++i) {
            sum += ns_per_call(1, launch);
            spin_until(s.record());
            gate.poll();
        }
        return sum / launches;
    };
    r.figure("gpu.launch_ns", repeated(repeats(), [&] { return per_launch(bare); }), "ns");
    r.figure("gpu.launch_between_points_ns", repeated(repeats(), [&] { return per_launch(between_points); }), "ns");
    r.figure("gpu.gated_launch_ns", repeated(repeats(), [&] { return per_launch(gated); }), "ns");
    r.figure("gpu.submitted_launch_ns", repeated(repeats(), [&] { return per_launch(submitted); }), "ns");
    r.figure("gpu.permit_submit_ns",
             repeated(repeats(), [&] { return per_launch(gated) - per_launch(between_points); }), "ns");

    // The time per kernel until the last of many kernels ends: the device's throughput.
    const auto throughput = [&](auto launch) {
        const int kernels = sized(2000, 20);
        return us_of([&] {
                   for (int i = 0; i < kernels; ++i) launch();
                   spin_until(s.record());
               }) /
               kernels;
    };
    r.figure("gpu.empty_kernel_us", repeated(repeats(), [&] { return throughput(bare); }), "us");
    r.figure("gpu.gated_empty_kernel_us", repeated(repeats(), [&] { return throughput(gated); }), "us");
}

void event_cost(report& r) {
    rig device;
    auto s = device.stream();
    const std::size_t many = sized<std::size_t>(500, 20);
    std::vector<cu::stream::point> points(many);
    const auto record_all = [&] { std::ranges::generate(points, [&] { return s.record(); }); };

    r.figure("gpu.record_ns",
             repeated(repeats(),
                      [&] {
                          const double all = ns_per_call(1, record_all);
                          s.record().wait(never);
                          return all / static_cast<double>(many);
                      }),
             "ns");
    r.figure("gpu.query_of_reached_ns",
             repeated(repeats(),
                      [&] {
                          record_all();
                          if (cudaStreamSynchronize(s.native_handle()) != cudaSuccess)
                              throw std::runtime_error("no sync");
                          const auto ask = [&] { return std::ranges::count_if(points, &cu::stream::point::reached); };
                          return ns_per_call(1, [&] { keep(ask()); }) / static_cast<double>(many);
                      }),
             "ns");
    r.figure("gpu.query_of_pending_ns",
             repeated(repeats(),
                      [&] {
                          launch_spin(s, {}, sized<gpushare::ns>(20ms, 100us));
                          const auto p = s.record();
                          std::size_t asked = 0;
                          bool reached = false;
                          const double all = ns_per_call(1, [&] {
                              while (asked < many && !reached) {
                                  reached = p.reached();
                                  ++asked;
                              }
                          });
                          p.wait(never);
                          return all / static_cast<double>(asked);
                      }),
             "ns");
    r.figure("gpu.launch_and_wait_us",
             repeated(repeats(),
                      [&] {
                          return us_of([&] {
                              launch_empty(s);
                              spin_until(s.record());
                          });
                      }),
             "us");

    // The time that the limiter charges for a submission, compared with the time that the kernel
    // itself measured.
    device_array<block_record> record(device, 1);
    for (const auto& [length, name] :
         {std::pair{20us, "gpu.span_excess_of_20us_us"}, std::pair{sized(1000us, 50us), "gpu.span_excess_of_1ms_us"},
          std::pair{sized(20000us, 100us), "gpu.span_excess_of_20ms_us"}}) {
        r.figure(name,
                 repeated(repeats(),
                          [&, length = length] {
                              const auto begin = s.record();
                              launch_spin(s, {}, length, record.data());
                              const auto end = s.record();
                              end.wait(never);
                              return to_us(elapsed(begin, end)) - span_of(record.read(s)).us();
                          }),
                 "us");
    }
}

void graph_replay(report& r) {
    constexpr std::size_t kernels = 50;
    rig device;
    auto s = device.stream();
    const auto sequence = [&](cu::stream& on) {
        for (std::size_t i = 0; i < kernels; ++i) launch_empty(on);
    };

    // Another thread queries events and allocates memory throughout. Captures must not be affected.
    std::size_t spoilt = 0;
    // Relaxed: only a count, which is read after the other thread has ended.
    std::atomic<std::size_t> asked = 0;
    std::atomic<bool> under_way = false;
    double recorded = 0;
    {
        auto beside = device.stream();
        std::jthread other([&](const std::stop_token& stop) {
            auto& memory = device.node.memory(device.device);
            try {
                while (!stop.stop_requested()) {
                    launch_spin(beside, {}, sized(100us, 10us));
                    const auto p = beside.record();
                    while (!p.reached()) asked.fetch_add(1, std::memory_order_relaxed);
                    under_way.store(true, std::memory_order_relaxed);
                    void* const block = memory.allocate(1 << 20, 256);
                    (void)memory.deallocate(block, 1 << 20, 256);
                }
            } catch (const std::exception& e) {
                std::printf("# the other thread was disturbed: %s\n", e.what());
                under_way.store(true, std::memory_order_relaxed);
            }
        });
        while (!under_way.load(std::memory_order_relaxed)) std::this_thread::yield();
        const auto captured = [&] {
            try {
                recorded = static_cast<double>(cu::capture(s, sequence).num_nodes());
            } catch (const gpushare::operation_error& e) {
                std::printf("# capture spoilt: %s\n", e.what());
                ++spoilt;
            }
        };
        r.figure("gpu.capture_us", repeated(sized<std::size_t>(201, 5), [&] { return us_of(captured); }), "us");
    }
    std::printf("# queries from another thread: %zu\n", asked.load(std::memory_order_relaxed));
    r.figure("gpu.captured_nodes", {recorded}, "nodes");
    expect_none(r, "gpu.captures_spoilt", static_cast<double>(spoilt), "captures");

    const cu::graph g = cu::capture(s, sequence);
    cu::graph_executable replay(g);
    limiter gate;
    const auto client = gate.add({});
    const auto timed = [&](auto enqueue) {
        return repeated(repeats(), [&] {
            return us_of([&] {
                enqueue();
                spin_until(s.record());
            });
        });
    };
    r.figure("gpu.sequence_direct_us", timed([&] { sequence(s); }), "us");
    r.figure("gpu.sequence_replayed_us", timed([&] { replay.launch(s); }), "us");
    r.figure("gpu.sequence_replayed_gated_us",
             timed([&] { gate.acquire(client)->enqueue(s, [&](cu::stream& on) { replay.launch(on); }); }), "us");
    r.figure("gpu.graph_update_us", repeated(repeats(), [&] { return us_of([&] { keep(replay.update(g)); }); }), "us");
}

}  // namespace bench
