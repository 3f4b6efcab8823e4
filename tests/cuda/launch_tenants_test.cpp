// SPDX-License-Identifier: Apache-2.0
// Tenants whose launches pass a gate: they sleep and change their size while a launch is held.
#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/backend/cuda/node.hpp>

#include <atomic>
#include <chrono>
#include <future>
#include <optional>

#include <gpushare/tenant/tenancy.hpp>

#include "standins/cuda/session.hpp"
#include "standins/cuda/standin.hpp"
#include "support/catch.hpp"
#include "support/launch_rig.hpp"

namespace launch_tenants_test {

using namespace launch_rig;
using namespace gpushare::literals;

namespace {

using tenancy = gpushare::tenancy<cuda::node>;

/// A tenant below an urgent client, with a launch that waits: its thread is held, or its stream waits.
struct held_tenant {
    explicit held_tenant(cuda::launch_wait how)
        : r({.longest_hold = 1h}, {.waits = how, .gap = ns{0}}),
          shared(r.node),
          batch(shared.admit({.name = "batch", .memory = 16_MiB, .compute = 50_pct})),
          stream(batch.work_stream().native_handle()),
          bound(r.gate->bind(r.batch, stream)),
          request(r.gate->announce(r.urgent)) {}

    void launches() {
        engine = std::async(std::launch::async, [this] {
            const cudaError_t code = launch(stream, conv, 10us, &ran);
            launched = true;
            return code;
        });
        REQUIRE(eventually([&] { return r.gate->waits_in_streams() ? launched.load() : r.gate->held() == 1; }));
    }
    [[nodiscard]] bool still_waits() {
        standin::advance(1ms);
        return ran == 0 && (r.gate->waits_in_streams() || r.gate->held() == 1);
    }
    void let_go() {
        request.reset();
        CHECK(eventually([&] {
            standin::advance(100us);
            return ran == 1;
        }));
        CHECK(engine.get() == cudaSuccess);
    }
    [[nodiscard]] instant in_a_while() { return batch.now() + 20s; }

    rig r;
    tenancy shared;
    tenancy::tenant batch;
    cudaStream_t stream;
    gate_type::binding bound;
    std::optional<gate_type::request> request;
    std::atomic<int> ran{0};
    std::atomic<bool> launched{false};
    std::future<cudaError_t> engine;
};
constexpr standin::options stepped{.devices = 1, .time = manual};

}  // namespace

TEST_CASE("a tenant is resized while a launch of it is held, and the launch stays held", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    held_tenant t(GENERATE(cuda::launch_wait::thread, cuda::launch_wait::stream));
    void* const used = t.batch.memory().allocate(1_MiB);
    t.launches();
    CHECK(t.batch.try_resize({.memory = 32_MiB, .compute = 60_pct}).code == errc::none);
    CHECK(t.batch.spec().memory == 32_MiB);
    CHECK(t.batch.try_resize({.memory = 4_MiB}).code == errc::none);
    CHECK(t.still_waits());
    t.let_go();
    CHECK(t.batch.memory().deallocate(used, 1_MiB) == errc::none);
}

TEST_CASE("a tenant with a permit falls asleep only when its held launch is over", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    held_tenant t(GENERATE(cuda::launch_wait::thread, cuda::launch_wait::stream));
    {
        auto permit = t.batch.acquire();
        REQUIRE(permit);
        t.launches();
        CHECK_FALSE(t.batch.sleep(t.batch.now() + 10ms));
        CHECK(t.still_waits());
        t.let_go();
    }
    CHECK(t.batch.sleep(t.in_a_while()));
    t.batch.wake();
    CHECK(t.batch.acquire());
}

TEST_CASE("a tenant without a permit may sleep while a launch is held, whose memory stays", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    held_tenant t(GENERATE(cuda::launch_wait::thread, cuda::launch_wait::stream));
    void* const used = t.batch.memory().allocate(1_MiB);
    CHECK(t.batch.memory().deallocate(t.batch.memory().allocate(8_MiB), 8_MiB) == errc::none);
    t.launches();
    auto asleep = std::async(std::launch::async, [&] { return t.batch.sleep(t.in_a_while()); });
    // A pool's segments go back by cudaFree, which waits for the device: for a stream that waits, too.
    const bool at_once = !t.r.gate->waits_in_streams();
    if (at_once) CHECK(eventually([&] { return asleep.wait_for(0s) == std::future_status::ready; }));
    CHECK(t.still_waits());
    t.let_go();
    CHECK(asleep.get());
    t.batch.wake();
    CHECK(t.batch.memory().deallocate(used, 1_MiB) == errc::none);
}

TEST_CASE("a tenant's policy is its client's at a gate", "[cuda][launch_gate]") {
    const auto all = gpushare::launch_client_options_of(gpushare::tenant_spec{
        .compute = 30_pct, .level = gpushare::priority{2}, .cap = 60_pct, .soft_cap = true, .slo = 20ms});
    CHECK(all.level == 2);
    CHECK(all.weight == 300);
    CHECK(all.cap == 60_pct);
    CHECK(all.soft_cap);
    CHECK(all.slo == 20ms);
    CHECK(gpushare::launch_client_options_of(gpushare::tenant_spec{}).level == gpushare::best_effort.level);
    CHECK(gpushare::launch_client_options_of(gpushare::tenant_spec{.level = gpushare::priority{1}}).level == 1);

    const standin::session gpu{stepped};
    const cuda::launch_wait how = GENERATE(cuda::launch_wait::thread, cuda::launch_wait::stream);
    rig r({.longest_hold = 1h}, {.waits = how, .gap = ns{0}});
    tenancy shared(r.node);
    auto urgent = shared.admit({.name = "urgent", .memory = 16_MiB, .compute = 50_pct, .level = gpushare::priority{1}});
    auto spare = shared.admit({.name = "spare", .memory = 16_MiB});
    const auto client = r.gate->add(gpushare::launch_client_options_of(urgent.spec()));
    const auto below = r.gate->add(gpushare::launch_client_options_of(spare.spec()));
    const auto bound = r.gate->bind(below, spare.work_stream().native_handle());
    std::optional<gate_type::request> request = r.gate->announce(client);
    std::atomic<int> ran{0};
    auto engine =
        std::async(std::launch::async, [&] { return launch(spare.work_stream().native_handle(), conv, 10us, &ran); });
    if (!r.gate->waits_in_streams()) CHECK(eventually([&] { return r.gate->held() == 1; }));
    standin::advance(1ms);
    CHECK(ran == 0);
    request.reset();
    CHECK(eventually([&] {
        standin::advance(100us);
        return ran == 1;
    }));
    CHECK(engine.get() == cudaSuccess);
}

}  // namespace launch_tenants_test
