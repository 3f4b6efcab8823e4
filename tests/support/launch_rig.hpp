// SPDX-License-Identifier: Apache-2.0
// The parts that tests of the launch gate share: launches as an engine makes them, on the stand-in,
// and a gate with an urgent client and a batch client.
//
//   const standin::session gpu{{.devices = 1, .time = manual}};
//   rig r;
//   const streams s;
//   const auto inside = r.gate->enter(r.batch);
//   launch(s.batch, conv, 10us);
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <thread>
#include <utility>

#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/compute/launch_gate.hpp>

#include "standins/cuda/raw.hpp"
#include "standins/cuda/standin.hpp"
#include "support/catch.hpp"

namespace launch_rig {

using namespace gpushare;
using namespace std::chrono_literals;

/// The device's time, which moves only when the test steps it.
struct device_clock {
    static inline std::atomic<std::uint64_t> asked{0};  ///< how often, of all
    [[nodiscard]] static instant now() noexcept {
        asked.fetch_add(1, std::memory_order_relaxed);
        return instant{standin::now()};
    }
};
using gate_type = cuda::launch_gate<gpushare::launch_gate, device_clock>;

inline constexpr device_id first{0};
inline constexpr auto manual = standin::timing::manual;

/// Kernels by their names.
inline const char conv = 0, gemm = 0, norm = 0;

/// Launches as an engine does: through the runtime, without calling the library.
inline cudaError_t launch(cudaStream_t s, const char& kernel, ns length, std::atomic<int>* ran = nullptr) {
    return standin::detail::launch(s, &kernel, false, length, [ran] {
        if (ran != nullptr) ran->fetch_add(1);
    });
}

/// Waits until the condition holds; false after five minutes.
template <class F>
bool eventually(F so) {
    for (const auto end = std::chrono::steady_clock::now() + 5min; std::chrono::steady_clock::now() < end;) {
        if (so()) return true;
        std::this_thread::yield();
    }
    return so();
}

/// Options without gaps: the stand-in's kernels begin when the previous ones end.
inline constexpr cuda::launch_shell_options no_gaps{.gap = ns{0}};

/// A node with a gate and two clients, of which the first has the higher level.
struct rig {
    // No launch goes because of the longest hold, since a test must not depend on the machine's
    // speed.
    explicit rig(const launch_gate_options& how = {.longest_hold = 1h},
                 const cuda::launch_shell_options& shell = no_gaps)
        : gate(std::in_place, node, first, gpushare::launch_gate(how), shell),
          urgent(gate->add({.level = 1})),
          batch(gate->add({})) {
        REQUIRE(cudaSetDevice(0) == cudaSuccess);
        if (gate->waits_in_streams()) load_kernels();
    }
    /// Loads the kernels beforehand. The first launch of a kernel may wait for the device, so gates
    /// that wait in streams hold it.
    static void load_kernels() {
        const cudaStream_t s = raw::make_stream();
        for (const char* const kernel : {&conv, &gemm, &norm}) CHECK(launch(s, *kernel, ns{0}) == cudaSuccess);
        raw::destroy(s);
    }
    /// That the gate has let the batch through because of the longest hold, beside the request.
    void was_forced(ns least = ns{0}) {
        const auto forced = gate->take_forced();
        REQUIRE(forced);
        CHECK(forced->client == batch.number());
        CHECK(forced->held_by == urgent.number());
        CHECK(forced->held >= least);
    }

    cuda::node node;
    std::optional<gate_type> gate;
    gate_type::client urgent, batch;
};

/// The test's streams, destroyed with this object.
struct streams {
    cudaStream_t urgent = raw::make_stream(), batch = raw::make_stream();
    streams() = default;
    streams(const streams&) = delete;
    streams& operator=(const streams&) = delete;
    ~streams() {
        for (const cudaStream_t s : {urgent, batch})
            if (s != nullptr) (void)cudaStreamDestroy(s);
    }
};

}  // namespace launch_rig
