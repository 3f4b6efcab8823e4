// SPDX-License-Identifier: Apache-2.0
// The backend gives back everything that it takes, and leaves the thread's state unchanged.
// Whichever CUDA call fails, and whenever: nothing leaks without a report, exceptions are typed,
// and a program that asks CUDA for its last error never finds an error of the library.
#include <gpushare/backend/cuda/cuda.hpp>
#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/backend/cuda/pool.hpp>
#include <gpushare/backend/cuda/virtual_memory.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gpushare/tenant/tenancy.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"

namespace leak_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::device_id;
using gpushare::errc;

namespace cuda = gpushare::cuda;

namespace {

const standin::options machine{.devices = 2, .memory = 128_MiB};

gpushare::instant soon() { return gpushare::host::steady_clock::now() + 5min; }

/// Ends what can't go on.
void expect(bool good) {
    if (!good) throw gpushare::operation_error(errc::backend_failed, {}, "not as expected");
}

// Something of everything that the backend has, begun and ended.

void use_streams(cuda::node& node) {
    std::vector<cuda::point> points;
    cuda::stream s = node.make_stream({0}, {2}), t = node.make_stream({1});
    void* const p = node.memory({1}).allocate(3 << 20, 4096);
    t.fill(p, std::byte{1}, 3 << 20);
    points.push_back(t.record());
    s.wait(points.back());
    s.launch({.blocks = 2}, gpushare::detail::empty_kernel{});
    points.push_back(s.record());
    expect(cuda::point::wait_any(points, soon()));
    expect(node.memory({1}).deallocate(p, 3 << 20, 4096) == errc::none);
}

void use_memory(cuda::node& node) {
    cuda::memory_pool pool{node, {0}, {.max_size = 32_MiB}};
    cuda::stream s = node.make_stream({0});
    void* const p = pool.allocate(s, 1 << 20);
    expect(pool.deallocate(s, p) == errc::none);
    expect(s.record().wait(soon()));
    pool.trim();

    cuda::pinned_memory pinned{node};
    (void)pinned.allocate(5000, 64);  // its destructor's

    cuda::virtual_memory space{node, {1}};
    auto range = space.reserve(8 << 20).value();
    const auto chunk = space.create().value();
    const cuda::mapping mapped{space, range.data(), chunk};
}

void use_graphs(cuda::node& node) {
    cuda::stream s = node.make_stream({1});
    const auto record = [&] {
        return cuda::capture(s, [](cuda::stream& x) {
            x.launch({}, gpushare::detail::empty_kernel{});
            x.launch({}, gpushare::detail::empty_kernel{});
        });
    };
    const auto first = record(), second = record();
    cuda::graph_executable run{first};
    expect(run.update(second));
    run.launch(s);
    expect(s.record().wait(soon()));
}

void use_partitions(cuda::node& node) {
    const std::vector<std::uint32_t> sizes{8, 8};
    auto parts = cuda::make_green_contexts(node, {0}, sizes);
    cuda::stream s = parts[1].make_stream({1});
    parts.clear();  // the stream keeps its own
    s.enqueue(1us);
    expect(s.record().wait(soon()));
}

void use_tenants(cuda::node& node) {
    gpushare::tenancy shared{node, {.close_timeout = 1s}};
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .devices = 2, .compute = 50_pct});
    (void)a.memory(1).allocate(1 << 20);  // leaks into the close
    auto done = a.submit([](cuda::stream& s) { s.enqueue(1us); });
    expect(done.wait(soon()));
    expect(a.close(soon()).complete);
}

/// What the thread must find again afterwards.
struct footprint {
    int device = -1;
    cudaError_t last_error = cudaSuccess;
    std::size_t pushed = 0;

    static footprint now() {
        footprint f;
        (void)cudaGetDevice(&f.device);
        f.last_error = cudaGetLastError();
        f.pushed = standin::existing().pushed_contexts;
        return f;
    }
    friend bool operator==(const footprint&, const footprint&) = default;
};

using use = void (*)(cuda::node&);

void just_make_it(cuda::node&) {}

}  // namespace

TEST_CASE("every part of the backend gives everything back", "[cuda]") {
    const standin::session gpu{machine};
    CHECK(cudaSetDevice(1) == cudaSuccess);
    {
        cuda::node node;
        const auto before = footprint::now();
        const auto existing = standin::existing();
        for (const use each : {use_streams, use_memory, use_graphs, use_partitions, use_tenants}) {
            each(node);
            CHECK(footprint::now() == before);
            auto after = standin::existing();
            after.events = existing.events;  // the pool of points keeps those
            CHECK(after == existing);
        }
        CHECK(standin::used(0) == 0_B);
        CHECK(standin::used(1) == 0_B);
    }
    CHECK(standin::existing() == standin::inventory{});
}

// Exhaustive: the first call fails, then the second one, and so on until none is left to fail.
TEST_CASE("nothing leaks in silence whichever CUDA call fails, and the exception is typed", "[cuda]") {
    const use what = GENERATE(just_make_it, use_streams, use_memory, use_graphs, use_partitions, use_tenants);
    const auto [code, sticky] = GENERATE(table<cudaError_t, bool>({
        {cudaErrorMemoryAllocation, false},
        {cudaErrorInvalidValue, false},
        {cudaErrorNotReady, false},
        {cudaErrorInsufficientDriver, false},
        {cudaErrorNoDevice, false},
        {cudaErrorIllegalAddress, true},
        {cudaErrorECCUncorrectable, true},
    }));
    std::uint64_t nth = 0;
    for (bool struck = true; struck; ++nth) {
        CAPTURE(code, nth);
        standin::reset(machine);
        bool typed = true, kept = false;
        {
            const standin::fault next{.call = "", .code = code, .skip = nth, .sticky = sticky};
            std::optional<cuda::node> node;
            try {
                if (what == just_make_it) standin::inject(next);
                node.emplace();
                if (what != just_make_it) standin::inject(next);
                what(*node);
            } catch (const gpushare::error& e) {
                typed = e.code() != errc::none;
            } catch (...) {
                typed = false;
            }
            struck = standin::faults_left() == 0;
            std::vector<std::shared_ptr<cuda::detail::device_state>> devices;
            for (std::uint32_t d = 0; node && d < node->num_devices(); ++d) devices.push_back(node->state({d}));
            node.reset();
            // What couldn't be given back is told.
            kept = std::ranges::any_of(devices, [](const auto& d) { return d->health().unreported() > 0; });
        }
        const auto calls = standin::calls();
        const auto failed = std::ranges::find(calls, static_cast<int>(code), &standin::call::result);
        const std::string culprit = failed == calls.end() ? "none" : failed->name;
        CAPTURE(culprit);
        CHECK(typed);
        if (!sticky) CHECK(cudaPeekAtLastError() == cudaSuccess);
        const auto found = standin::take_findings();
        if (!kept) CHECK(found == "");
    }
    CHECK(nth > 10);
}

}  // namespace leak_test
