// SPDX-License-Identifier: Apache-2.0
// Tenants whose launches pass a gate: their clients follow them, and they sleep, change their size
// and close while a launch is held, for others or for a quota of time.
#include <sys/wait.h>
#include <unistd.h>

#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/backend/cuda/node.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include <gpushare/interop/detail/torch_scope.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "standins/cuda/session.hpp"
#include "standins/cuda/standin.hpp"
#include "support/catch.hpp"
#include "support/launch_rig.hpp"
#include "support/sanitizers.hpp"
#include "support/threads.hpp"

namespace launch_tenants_test {

using namespace launch_rig;
using namespace gpushare::literals;

namespace {

using tenancy = gpushare::tenancy<cuda::node>;

/// A call in a thread of an engine's, which may be held for an hour of the device's. A test that
/// fails meanwhile lets everybody go.
template <class Result>
class engine_call {
public:
    engine_call() = default;
    engine_call(std::optional<gate_type>& gate, std::future<Result> call) : gate_(&gate), call_(std::move(call)) {}
    engine_call(engine_call&&) noexcept = default;
    engine_call& operator=(engine_call&&) noexcept = default;
    ~engine_call() {
        if (call_.valid() && gate_->has_value()) (*gate_)->close();
    }
    [[nodiscard]] bool is_over() const { return call_.wait_for(0s) == std::future_status::ready; }
    [[nodiscard]] Result get() {
        REQUIRE(eventually([&] { return is_over(); }));
        return call_.get();
    }

private:
    std::optional<gate_type>* gate_ = nullptr;
    std::future<Result> call_{};
};
template <class F>
[[nodiscard]] auto in_engine(std::optional<gate_type>& gate, F call) {
    return engine_call<std::invoke_result_t<F&>>(gate, std::async(std::launch::async, std::move(call)));
}

/// Whether the one thread that was held is held on. Nobody else asks the gate's clock meanwhile:
/// when the thread has asked twice, it has looked at least once at what the test did before.
[[nodiscard]] bool is_held_on(const gate_type& gate) {
    const std::uint64_t before = device_clock::asked;
    const bool looked = eventually([&] { return gate.held() != 1 || device_clock::asked >= before + 2; });
    return looked && gate.held() == 1;
}

/// A tenant below an urgent client, with a launch that waits: its thread is held, or its stream
/// waits.
struct held_tenant {
    explicit held_tenant(cuda::launch_wait how)
        : r({.longest_hold = 1h}, {.waits = how, .gap = ns{0}}),
          shared(r.node),
          batch(shared.admit({.name = "batch", .memory = 16_MiB, .compute = 50_pct})),
          stream(batch.work_stream().native_handle()),
          bound(r.gate->bind(r.batch, stream)),
          request(r.gate->announce(r.urgent)) {}

    void launches() {
        engine = in_engine(r.gate, [this] {
            const cudaError_t code = launch(stream, conv, 10us, &ran);
            launched = true;
            return code;
        });
        REQUIRE(eventually([&] { return r.gate->waits_in_streams() ? launched.load() : r.gate->held() == 1; }));
    }
    [[nodiscard]] bool still_waits() {
        standin::advance(1ms);
        return (r.gate->waits_in_streams() || is_held_on(*r.gate)) && ran == 0;
    }
    void let_go() {
        request.reset();
        CHECK(eventually([&] {
            standin::advance(100us);
            return ran == 1;
        }));
        CHECK(engine.get() == cudaSuccess);
    }
    [[nodiscard]] instant in_a_while() { return batch.now() + 5min; }

    rig r;
    tenancy shared;
    tenancy::tenant batch;
    cudaStream_t stream;
    gate_type::binding bound;
    std::optional<gate_type::request> request;
    std::atomic<int> ran{0};
    std::atomic<bool> launched{false};
    engine_call<cudaError_t> engine;
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
    auto asleep = in_engine(t.r.gate, [&] { return t.batch.sleep(t.in_a_while()); });
    // A pool's segments go back by cudaFree, which waits for the device: for a stream that waits,
    // too.
    const bool at_once = !t.r.gate->waits_in_streams();
    if (at_once) CHECK(eventually([&] { return asleep.is_over(); }));
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
    const auto client = r.gate->add(urgent);
    const auto below = r.gate->add(gpushare::launch_client_options_of(spare.spec()));
    const auto bound = r.gate->bind(below, spare.work_stream().native_handle());
    std::optional<gate_type::request> request = r.gate->announce(client);
    std::atomic<int> ran{0};
    auto engine = in_engine(r.gate, [&] { return launch(spare.work_stream().native_handle(), conv, 10us, &ran); });
    if (!r.gate->waits_in_streams()) CHECK(eventually([&] { return r.gate->held() == 1; }));
    standin::advance(1ms);
    if (!r.gate->waits_in_streams()) CHECK(is_held_on(*r.gate));
    CHECK(ran == 0);
    request.reset();
    CHECK(eventually([&] {
        standin::advance(100us);
        return ran == 1;
    }));
    CHECK(engine.get() == cudaSuccess);
}

// ---- clients that follow their tenants

namespace {

/// Two tenants of two levels, with a client each, which follows.
struct two_levels {
    explicit two_levels(cuda::launch_wait how)
        : r({.longest_hold = 1h}, {.waits = how, .gap = ns{0}}), upper(r.gate->add(high)), lower(r.gate->add(low)) {}

    [[nodiscard]] engine_call<cudaError_t> launches() {
        return in_engine(r.gate, [this] { return launch(theirs, conv, 10us, &ran); });
    }
    /// So often, if the device goes on for long.
    [[nodiscard]] bool has_run(int times) {
        return eventually([&] {
            standin::advance(100us);
            return ran == times;
        });
    }

    rig r;
    tenancy shared{r.node};
    tenancy::tenant high =
        shared.admit({.name = "high", .memory = 16_MiB, .compute = 30_pct, .level = gpushare::priority{1}});
    tenancy::tenant low = shared.admit({.name = "low", .memory = 16_MiB, .compute = 30_pct});
    gate_type::client upper, lower;
    cudaStream_t theirs = low.work_stream().native_handle();
    gate_type::binding bound = r.gate->bind(lower, theirs);
    std::atomic<int> ran{0};
};

}  // namespace

TEST_CASE("a tenant's client follows a resize at once, and so does its held launch", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    two_levels t(cuda::launch_wait::thread);
    const auto request = t.r.gate->announce(t.upper);
    for (int round = 0; round < 2; ++round) {
        auto engine = t.launches();
        CHECK(eventually([&] { return t.r.gate->held() == 1; }));
        standin::advance(1ms);
        CHECK(is_held_on(*t.r.gate));
        CHECK(t.ran == 2 * round);
        if (round == 0)
            t.high.resize({.level = gpushare::priority{0}});
        else
            t.low.resize({.level = gpushare::priority{2}});
        CHECK(t.has_run(2 * round + 1));
        CHECK(engine.get() == cudaSuccess);
        CHECK(t.launches().get() == cudaSuccess);  // held no more
        CHECK(t.has_run(2 * round + 2));
        t.high.resize({.level = gpushare::priority{1}});
    }
}

TEST_CASE("a client whose streams wait changes its level once none of its work is in them", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    two_levels t(cuda::launch_wait::stream);
    const auto own = t.high.work_stream().native_handle();
    const auto also_bound = t.r.gate->bind(t.upper, own);
    std::optional<gate_type::request> request = t.r.gate->announce(t.upper);
    t.high.resize({.level = gpushare::priority{0}});
    CHECK(t.launches().get() == cudaSuccess);
    standin::advance(1ms);
    CHECK(t.ran == 0);  // the request came as one of the old level
    request.reset();
    CHECK(t.has_run(1));
    request.emplace(t.r.gate->announce(t.upper));
    CHECK(t.launches().get() == cudaSuccess);
    CHECK(t.has_run(2));
    request.reset();

    t.high.resize({.level = gpushare::priority{1}});
    standin::hold(own);
    auto in_flight = in_engine(t.r.gate, [&] { return launch(own, gemm, 10us); });
    CHECK(eventually([&] {
        standin::advance(100us);
        return in_flight.is_over();
    }));
    t.high.resize({.level = gpushare::priority{2}});  // beside that launch
    t.high.resize({.level = gpushare::priority{0}});  // the last one counts
    request.emplace(t.r.gate->announce(t.upper));
    CHECK(t.launches().get() == cudaSuccess);
    standin::advance(1ms);
    CHECK(t.ran == 2);
    request.reset();
    standin::let_go(own);
    CHECK(t.has_run(3));
    request.emplace(t.r.gate->announce(t.upper));
    CHECK(t.launches().get() == cudaSuccess);
    CHECK(t.has_run(4));
    CHECK_FALSE(t.r.gate->change(t.upper, {.level = 1}));
    CHECK(t.r.gate->change(t.upper, {.level = 0}));
    t.r.gate->close();
    CHECK(t.r.gate->change(t.upper, {.level = 1}));  // which matters to nobody any more
    CHECK(in_flight.get() == cudaSuccess);
}

TEST_CASE("a client that launches on follows to another level as soon as it pauses", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    two_levels t(cuda::launch_wait::stream);
    const auto launches_of_10us = [&](int n) {
        for (int i = 0; i < n; ++i) CHECK(launch(t.theirs, conv, 10us) == cudaSuccess);
    };
    launches_of_10us(5);
    t.low.resize({.level = gpushare::priority{2}});
    for (int round = 0; round < 3; ++round) {
        launches_of_10us(3);
        standin::advance(20us);
    }
    standin::advance(1ms);
    launches_of_10us(1);
    const auto request = t.r.gate->announce(t.upper);
    CHECK(t.launches().get() == cudaSuccess);
    CHECK(t.has_run(1));  // above the request
}

namespace {

/// What a scope of torch's asks of torch, of which nothing matters here.
struct no_torch {
    static constexpr bool on_streams = true;
    struct guard {
        guard(int, void*) noexcept {}
    };
    static void install() {}
    static int ordinal(const cuda::node&, device_id) { return 0; }
    static void forget(void*) {}
};
using scope_type = gpushare::detail::basic_torch_scope<no_torch, cuda::node, tenancy::tenant, gate_type>;

}  // namespace

TEST_CASE("a scope of a tenant's follows its tenant, but for options of its own", "[cuda][launch_gate]") {
    const standin::session gpu{stepped};
    rig r({.longest_hold = 1h});
    tenancy shared{r.node};
    auto high = shared.admit({.name = "high", .memory = 16_MiB, .compute = 30_pct, .level = gpushare::priority{1}});
    auto low = shared.admit({.name = "low", .memory = 16_MiB, .compute = 30_pct});
    const int how = GENERATE(0, 1, 2);
    scope_type upper = how == 0   ? scope_type(r.node, high, *r.gate)
                       : how == 1 ? scope_type(r.node, high, *r.gate, r.gate->add(high))
                                  : scope_type(r.node, high, *r.gate, {1});  // a level, no part
    scope_type lower(r.node, low, *r.gate);
    std::atomic<int> ran{0};
    std::optional<gate_type::request> request = r.gate->announce(upper.client());
    auto engine = in_engine(r.gate, [&] {
        const auto inside = lower.enter();
        return launch(low.work_stream().native_handle(), conv, 10us, &ran);
    });
    CHECK(eventually([&] { return r.gate->held() == 1; }));
    high.resize({.level = gpushare::priority{0}});
    if (how == 2) {
        standin::advance(1ms);
        CHECK(is_held_on(*r.gate));
        request.reset();
    }
    CHECK(eventually([&] {
        standin::advance(100us);
        return ran == 1;
    }));
    CHECK(engine.get() == cudaSuccess);
}

TEST_CASE("a child of fork() removes a tenant's client while its parent changes the tenant",
          "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    rig r;
    tenancy shared{r.node};
    auto tenant = shared.admit({.name = "t", .memory = 16_MiB, .compute = 10_pct});
    std::atomic<bool> inside{false}, go_on{false};
    std::optional<gate_type::client> client = r.gate->add(tenant, [&](const gpushare::tenant_spec& s) {
        if (s.level == gpushare::priority{1}) {
            inside = true;
            (void)eventually([&] { return go_on.load(); });
        }
        return gpushare::launch_client_options_of(s);
    });
    auto change = in_engine(r.gate, [&] { return tenant.try_resize({.level = gpushare::priority{1}}).code; });
    REQUIRE(eventually([&] { return inside.load(); }));
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(300);
        client.reset();
        ::_exit(EXIT_SUCCESS);
    }
    go_on = true;
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS));
    CHECK(change.get() == errc::none);
}

TEST_CASE("tenants, clients and gates go in any order, beside resizes", "[cuda][launch_gate][fault]") {
    const standin::session gpu{stepped};
    cuda::node node;
    tenancy shared{node};
    std::optional<gate_type::client> left;
    for (const bool gate_first : {true, false}) {
        std::optional<gate_type> gate(std::in_place, node, first);
        auto tenant = shared.admit({.name = "short", .memory = 16_MiB, .compute = 10_pct});
        left = gate->add(tenant);
        gate_type::client moved = gate->add(tenant);
        *left = std::move(moved);
        if (gate_first) gate.reset();
        tenant.resize({.level = gpushare::priority{1}});
        CHECK(tenant.close().complete);
    }
    left.reset();
    auto tenant = shared.admit({.name = "long", .memory = 16_MiB, .compute = 10_pct});
    gate_type gate{node, first};
    std::atomic<int> refused{0};
    support::together(3, [&](unsigned rank) {
        for (int i = 0; i < support::few(300); ++i) {
            if (rank == 0)
                (void)gate.add(tenant);
            else
                refused += tenant.try_resize({.level = gpushare::priority{i % 3}}).code != errc::none;
        }
    });
    CHECK(refused == 0);
}

// ---- quotas of time

namespace {

/// A tenant whose client has a quota, by its share, and has spent it: 11 ms of the 1 ms in each 10
/// that the client may have. The client may go on 100 ms after that began.
struct spent_quota {
    explicit spent_quota(cuda::launch_wait how) : r({.longest_hold = 1h}, {.waits = how, .gap = ns{0}}) {
        CHECK(launch(stream, conv, 11ms, &ran) == cudaSuccess);
        standin::advance(11ms);
        CHECK(r.gate->usage(*client).device_time == 11ms);
        CHECK(ran == 1);
    }
    void launches() {
        engine = in_engine(r.gate, [this] { return launch(stream, conv, 11ms, &ran); });
        CHECK(eventually([&] { return r.gate->held() == 1; }));
    }
    [[nodiscard]] bool still_waits_after(ns step) {
        standin::advance(step);
        return is_held_on(*r.gate) && ran == 1;
    }
    void goes_after(ns step) {
        standin::advance(step);
        CHECK(engine.get() == cudaSuccess);
        standin::advance(11ms);
        CHECK(ran == 2);
        CHECK(r.gate->held() == 0);
    }
    static gate_type::client_options by_share(const gpushare::tenant_spec& s) {
        auto o = gpushare::launch_client_options_of(s);
        o.quota = {.time = ns{1'000'000} * s.compute.permille() / 400, .each = 10ms};
        return o;
    }

    rig r;
    tenancy shared{r.node};
    tenancy::tenant batch = shared.admit({.name = "batch", .memory = 16_MiB, .compute = 40_pct});
    cudaStream_t stream = batch.work_stream().native_handle();
    std::optional<gate_type::client> client = r.gate->add(batch, by_share);
    std::optional<gate_type::binding> bound = r.gate->bind(*client, stream);
    std::atomic<int> ran{0};
    engine_call<cudaError_t> engine;
};
// Of one SM, so that each launch fills it.
constexpr standin::options one_sm{.devices = 1, .sms = 1, .time = manual};

}  // namespace

TEST_CASE("a launch beyond a quota waits until the quota fills again, asleep", "[cuda][launch_gate]") {
    const standin::session gpu{one_sm};
    spent_quota t(GENERATE(cuda::launch_wait::thread, cuda::launch_wait::stream));
    t.launches();
    CHECK(t.still_waits_after(1ms));
    const std::uint64_t before = device_clock::asked;
    const auto began = std::chrono::steady_clock::now();
    CHECK(eventually([&] { return device_clock::asked >= before + 20; }));
    // Naps of 10 ms at least, since nothing of it is in flight.
    CHECK(std::chrono::steady_clock::now() - began >= 150ms);
    CHECK(t.r.gate->held() == 1);
    CHECK(t.still_waits_after(87ms));
    t.goes_after(1ms);
    CHECK(t.r.gate->usage(*t.client).longest_hold == 89ms);
}

TEST_CASE("a tenant that waits for its quota sleeps, grows and closes", "[cuda][launch_gate]") {
    const standin::session gpu{one_sm};
    spent_quota t(GENERATE(cuda::launch_wait::thread, cuda::launch_wait::stream));
    t.launches();
    SECTION("it sleeps, and wakes") {
        CHECK(t.batch.sleep(t.batch.now() + 5min));
        CHECK(t.still_waits_after(50ms));
        t.batch.wake();
        t.goes_after(39ms);
    }
    SECTION("it gets twice the quota, and makes up for the 8.9 ms that it had too much at twice the pace") {
        t.batch.resize({.compute = 80_pct});
        CHECK(t.still_waits_after(44ms));
        t.goes_after(500us);
    }
    SECTION("it gets less, and waits for longer") {
        t.batch.resize({.compute = 20_pct});
        CHECK(t.still_waits_after(177ms));
        t.goes_after(1ms);
    }
    SECTION("it closes") {
        CHECK(t.batch.close().complete);
        CHECK(t.still_waits_after(1ms));
        t.client.reset();  // which nobody holds any more
        t.goes_after(0ms);
    }
}

TEST_CASE("a close, a removal and a destructor let threads go that wait for a quota", "[cuda][launch_gate][fault]") {
    const standin::session gpu{one_sm};
    spent_quota t(GENERATE(cuda::launch_wait::thread, cuda::launch_wait::stream));
    t.launches();
    SECTION("the gate") { t.r.gate->close(); }
    SECTION("the client") { t.client.reset(); }
    SECTION("all of it") { t.r.gate.reset(); }
    CHECK(t.engine.get() == cudaSuccess);
    standin::advance(11ms);
    CHECK(t.ran == 2);
}

TEST_CASE("nobody waits for a quota on a device that is lost", "[cuda][launch_gate][fault]") {
    const standin::session gpu{one_sm};
    {
        spent_quota t(GENERATE(cuda::launch_wait::thread, cuda::launch_wait::stream));
        const bool work_in_flight = GENERATE(true, false);
        if (work_in_flight) {
            standin::advance(200ms);  // the quota is full again
            CHECK(launch(t.stream, conv, 11ms) == cudaSuccess);
        }
        t.launches();
        standin::poison(0, cudaErrorIllegalAddress);
        // Else nobody asks the device.
        if (!work_in_flight) (void)t.batch.work_stream().record().wait(t.batch.now());
        CHECK(t.engine.get() == cudaErrorIllegalAddress);
        CHECK(t.r.node.lost(first));
    }
    (void)standin::take_findings();
}

TEST_CASE("a child of fork() waits for no quota of its parent's", "[cuda][launch_gate][fault]") {
    const standin::session gpu{one_sm};
    spent_quota t(GENERATE(cuda::launch_wait::thread, cuda::launch_wait::stream));
    t.launches();
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(300);
        if (launch(t.stream, conv, 10us) != cudaErrorInitializationError) ::_exit(2);
        t.bound.reset();
        t.client.reset();
        t.r.gate.reset();
        ::_exit(EXIT_SUCCESS);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS));
    CHECK(t.still_waits_after(1ms));
    t.goes_after(88ms);
}

}  // namespace launch_tenants_test
