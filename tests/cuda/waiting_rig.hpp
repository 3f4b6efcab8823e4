// SPDX-License-Identifier: Apache-2.0
// The parts that tests of gates with waits in streams share, beside launch_rig.hpp.
//
//   const standin::session gpu{stepped};
//   waiting_rig w;
//   w.batch_launches(4);
//   standin::advance(1ms);
#pragma once

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>

#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/compute/launch_gate.hpp>

#include "standins/cuda/standin.hpp"
#include "support/catch.hpp"
#include "support/launch_rig.hpp"

namespace launch_rig {

// Two kernels of a waiting_rig to a piece.
inline constexpr cuda::launch_shell_options in_streams{
    .waits = cuda::launch_wait::stream, .piece = 200us, .gap = ns{0}};

/// A rig whose clients' kernels have been timed.
struct waiting_rig {
    explicit waiting_rig(const launch_gate_options& how = {.longest_hold = 1h},
                         const cuda::launch_shell_options& shell = in_streams)
        : r(how, shell) {
        REQUIRE(r.gate->waits_in_streams());
        {
            const auto inside = r.gate->enter(r.batch);
            for (const ns length : {100us, 10us})
                CHECK(launch(s.batch, length == 10us ? norm : conv, length) == cudaSuccess);
        }
        standin::advance(1ms);
        {
            const auto inside = r.gate->enter(r.urgent);
            CHECK(launch(s.urgent, gemm, 300us) == cudaSuccess);
            standin::advance(1ms);
        }
        CHECK(r.gate->usage(r.batch).time == 110us);
        CHECK(r.gate->usage(r.urgent).time == 300us);
    }
    ~waiting_rig() { CHECK(failed == 0); }
    /// Kernels of 100 us each. In any thread.
    void batch_launches(int n) {
        const auto inside = r.gate->enter(r.batch);
        for (int i = 0; i < n; ++i)
            if (launch(s.batch, conv, 100us, &ran) != cudaSuccess) ++failed;
    }
    /// And leaves, while they run.
    void urgent_launches(int n) {
        const auto inside = r.gate->enter(r.urgent);
        for (int i = 0; i < n; ++i) CHECK(launch(s.urgent, gemm, 300us) == cudaSuccess);
    }

    rig r;
    const streams s;
    std::atomic<int> ran{0}, failed{0};
};
inline constexpr standin::options stepped{.devices = 1, .time = manual};

/// What the call returns, while time goes on. The stand-in lets no call wait for ever.
template <class F>
cudaError_t meanwhile(F call) {
    auto result = std::async(std::launch::async, call);
    CHECK(eventually([&] {
        standin::advance(100us);
        return result.wait_for(0s) == std::future_status::ready;
    }));
    return result.get();
}

/// In an engine's thread of the batch, makes a call that waits for the batch's closed stream, under
/// the engine's lock. Meanwhile the request waits for the lock, which costs the longest hold.
template <class Call>
void call_under_lock(waiting_rig& w, Call call) {
    std::mutex of_engine;
    std::atomic<bool> locked{false};
    auto engine = std::async(std::launch::async, [&] {
        const auto inside = w.r.gate->enter(w.r.batch);
        const std::lock_guard lock(of_engine);
        locked = true;
        return call();
    });
    REQUIRE(eventually([&] { return locked.load(); }));
    CHECK(meanwhile([&] {
              const auto inside = w.r.gate->enter(w.r.urgent);
              const std::lock_guard lock(of_engine);
              return cudaSuccess;
          }) == cudaSuccess);
    CHECK(engine.get() == cudaSuccess);
    w.r.was_forced(20ms);
}

}  // namespace launch_rig
