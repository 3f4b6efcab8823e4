// SPDX-License-Identifier: Apache-2.0
// A cut model as one graph of the device, with gates between its pieces, over the stand-in.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/compute/launch_gate.hpp>
#include <gpushare/graph/run.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "standins/cuda/cupti.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/launch_rig.hpp"

namespace cut_graph_test {

using namespace launch_rig;
using namespace gpushare::literals;
using gpushare::graph::element;
using gpushare::graph::model_graph;
using gpushare::graph::split_plan;
using gpushare::graph::tensor;
using support::code_of;
using tenancy = gpushare::tenancy<cuda::node>;

namespace {

/// x -> six nodes in a row -> y, of bytes, whose number only a run tells.
model_graph chain() {
    model_graph g;
    for (std::uint32_t v = 0; v <= 6; ++v) {
        g.values.push_back(
            {.name = "v" + std::to_string(v), .type = element::u8, .shape = {{.extent = -1}}, .ranked = true});
        if (v != 0) g.nodes.push_back({"n" + std::to_string(v), "Relu", {v - 1}, {v}});
    }
    g.values.front().kind = gpushare::graph::value_kind::input;
    g.values.back().kind = gpushare::graph::value_kind::output;
    g.inputs = {0};
    g.outputs = {6};
    return g;
}
/// Two nodes to a piece.
split_plan three_pieces(const model_graph& g) {
    split_plan p{.of_graph = fingerprint(g), .limit = 1ms};
    p.order.resize(g.nodes.size());
    std::iota(p.order.begin(), p.order.end(), 0U);
    for (const std::uint32_t first : {0U, 2U, 4U}) p.pieces.push_back({{first, first + 2}, 200us});
    return p;
}
unsigned char made_of(unsigned char byte, std::uint32_t first, std::uint32_t behind) {
    for (std::uint32_t n = first; n < behind; ++n) byte = static_cast<unsigned char>(3 * byte + n);
    return byte;
}

/// Kernels of 100 us, one for a piece, which compute when the device gets there.
struct kernel_engine {
    struct kernel {
        const unsigned char* from;
        unsigned char* to;
        std::size_t size;
        std::uint32_t first;
        std::atomic<int>* ran;
        template <class C>
        void operator()(C&) const {
            for (std::size_t i = 0; i < size; ++i) to[i] = made_of(from[i], first, first + 2);
            ran->fetch_add(1);
        }
    };
    void enqueue(cuda::stream& to, std::uint32_t piece, std::span<const tensor* const> in,
                 std::span<tensor* const> out) {
        ++enqueued;
        if (piece == throws_at) throw std::runtime_error("no such piece today");
        void* const place = out[0]->place(element::u8, in[0]->shape);
        to.launch({.blocks = 1, .hold = 100us},
                  kernel{static_cast<const unsigned char*>(in[0]->data), static_cast<unsigned char*>(place),
                         in[0]->size(), 2 * piece, &ran});
    }
    std::uint32_t throws_at = ~0U;
    int enqueued = 0;
    std::atomic<int> ran{0};
};
static_assert(gpushare::graph::piece_engine<kernel_engine, cuda::stream>);
using model_type = gpushare::graph::captured_model<tenancy::tenant, kernel_engine, cuda::graph_executable>;

struct fixture {
    cuda::node node;
    tenancy shared{node};
    tenancy::tenant pages = shared.admit({.name = "pages", .memory = 32_MiB, .compute = 50_pct});
    model_graph g = chain();
    split_plan plan = three_pieces(g);
    kernel_engine engine;
};

/// Bytes on the device, in the tenant's memory.
struct device_bytes {
    device_bytes(tenancy::tenant& of, std::size_t n) : whose(&of), size(n) {
        data = static_cast<unsigned char*>(of.memory().allocate(n, 256));
        std::iota(data, data + n, static_cast<unsigned char>(n));
    }
    device_bytes(const device_bytes&) = delete;
    device_bytes& operator=(const device_bytes&) = delete;
    ~device_bytes() { whose->memory().deallocate(data, size, 256); }
    [[nodiscard]] tensor in() const { return {element::u8, {static_cast<std::int64_t>(size)}, data, size}; }
    tenancy::tenant* whose;
    std::size_t size;
    unsigned char* data;
};
bool right(const device_bytes& from, const tensor& out) {
    if (out.shape != from.in().shape || out.data == nullptr) return false;
    const auto* const y = static_cast<const unsigned char*>(out.data);
    for (std::size_t i = 0; i < from.size; ++i)
        if (y[i] != made_of(from.data[i], 0, 6)) return false;
    return true;
}

}  // namespace

TEST_CASE("a cut model as one graph gives what its pieces give, and is made anew for other shapes", "[cuda][graph]") {
    const standin::session gpu;
    fixture f;
    {
        const device_bytes x(f.pages, 1000), z(f.pages, 1000), longer(f.pages, 70'000), to(f.pages, 1000);
        model_type model(f.pages, f.g, f.plan, f.engine);
        CHECK(model.pieces() == 3);
        const auto run = [&](const device_bytes& from, tensor out = {}) {
            const auto before = f.pages.usage().completed;
            model.run(std::vector{from.in()}, std::span(&out, 1));
            CHECK(right(from, out));
            return f.pages.usage().completed - before;
        };
        CHECK(run(x) == 3);  // piece by piece
        CHECK(model.made() == 0);
        CHECK(run(x) == 2);  // the capture, and the graph
        const int enqueued = f.engine.enqueued;
        for (int i = 0; i < 3; ++i) CHECK(run(x) == 1);
        CHECK(f.engine.enqueued == enqueued);
        CHECK(f.engine.ran == 5 * 3);
        CHECK(model.made() == 1);
        CHECK(run(z) == 2);  // other addresses
        CHECK(run(z) == 1);
        CHECK(model.made() == 1);
        CHECK(run(longer) == 3);
        CHECK(run(longer) == 2);
        CHECK(run(longer) == 1);
        CHECK(model.made() == 2);
        CHECK(model.held() >= 3 * 70'000_B);
        CHECK(run(x) == 3);
        tensor mine{.data = to.data, .capacity = to.size};
        CHECK(run(x, mine) == 3);
        CHECK(run(x, mine) == 2);
        CHECK(run(x, mine) == 1);
        CHECK(right(x, {element::u8, {1000}, to.data, to.size}));
    }
    f.pages.memory().collect();
    CHECK(f.pages.memory().free() == f.pages.memory().capacity());
}

TEST_CASE("urgent work runs between two pieces of a graph", "[cuda][graph][launch_gate]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    const bool gated = GENERATE(true, false);
    CAPTURE(gated);
    {
        fixture f;
        std::optional<gate_type> gate;
        gate.emplace(f.node, first, gpushare::launch_gate({.longest_hold = 1h}),
                     cuda::launch_shell_options{.waits = cuda::launch_wait::stream, .gap = ns{0}});
        rig::load_kernels();
        const auto urgent = gate->add({.level = 1});
        const auto batch = gate->add({});
        std::optional<gate_type::binding> bound;
        const device_bytes x(f.pages, 1000);
        model_type::gate between = [&](cuda::stream& to) { gate->wait_in_capture(batch, to.native_handle()); };
        model_type model(f.pages, f.g, f.plan, f.engine, gated ? std::move(between) : model_type::gate{});
        tensor out;
        const auto run = [&] {
            out = {};
            return std::async(std::launch::async, [&] { model.run(std::vector{x.in()}, std::span(&out, 1)); });
        };
        const auto finish = [&](std::future<void>& of) {
            while (of.wait_for(0s) != std::future_status::ready) standin::advance(100us);
            of.get();
        };
        for (int i = 0; i < 2; ++i) {
            auto once = run();
            finish(once);
        }
        (void)f.pages.submit([&](cuda::stream& to) { bound.emplace(gate->bind(batch, to.native_handle())); }).wait();
        f.engine.ran = 0;
        auto page = run();
        while (f.engine.ran < 1) standin::advance(10us);
        auto request = std::make_optional(gate->announce(urgent));
        standin::advance(10ms);
        CHECK(f.engine.ran == (gated ? 2 : 3));  // the piece that ran beside the request, or all of them
        const cudaStream_t s = raw::make_stream();
        std::atomic<int> urgent_ran{0};
        {
            const auto inside = gate->enter(urgent);
            CHECK(launch(s, gemm, 300us, &urgent_ran) == cudaSuccess);
        }
        standin::advance(300us);
        CHECK(urgent_ran == 1);
        CHECK(f.engine.ran == (gated ? 2 : 3));
        request.reset();
        finish(page);
        CHECK(f.engine.ran == 3);
        CHECK(right(x, out));
        CHECK(cudaStreamDestroy(s) == cudaSuccess);
        bound.reset();
    }
    CHECK(standin::take_findings() == (gated ? "left behind: 1 host allocations\n" : ""));  // the words
}

TEST_CASE("a capture that fails leaves a usable stream, and nothing of it runs", "[cuda][graph][fault]") {
    const standin::session gpu;
    fixture f;
    const device_bytes x(f.pages, 500), z(f.pages, 500);
    bool gate_throws = false;
    model_type model(f.pages, f.g, f.plan, f.engine, [&](cuda::stream& to) {
        CHECK(to.capturing());
        if (gate_throws) throw std::runtime_error("no gate");
    });
    tensor out;
    const auto run = [&](const device_bytes& from) {
        out = {};
        model.run(std::vector{from.in()}, std::span(&out, 1));
    };
    run(x);
    const bool by_gate = GENERATE(false, true);
    const bool captured_before = GENERATE(false, true);
    if (captured_before) run(x);
    const int ran = f.engine.ran;
    const auto fails = [&] {
        gate_throws = by_gate;
        f.engine.throws_at = by_gate ? ~0U : 1;
        CHECK_THROWS_AS(run(z), gpushare::operation_error);
        gate_throws = false;
        f.engine.throws_at = ~0U;
    };
    fails();
    fails();
    CHECK(f.engine.ran == ran);
    CHECK(standin::existing().graphs == 0);
    run(x);
    CHECK(right(x, out));
    run(z);
    CHECK(right(z, out));
    CHECK(model.made() == 1);
}

TEST_CASE("a gate says where it can't be put into a graph", "[cuda][graph][launch_gate]") {
    const standin::session gpu{{.devices = 1, .time = manual}};
    {
        rig r{{.longest_hold = 1h}, {.waits = cuda::launch_wait::stream, .gap = ns{0}}};
        const streams s;
        CHECK(code_of([&] { r.gate->wait_in_capture(r.batch, s.batch); }) == errc::invalid_specification);
        REQUIRE(cudaStreamBeginCapture(s.batch, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        r.gate->wait_in_capture(r.urgent, s.batch);  // nobody is above it
        cudaGraph_t graph = raw::end_capture(s.batch);
        std::size_t nodes = 1;
        CHECK(cudaGraphGetNodes(graph, nullptr, &nodes) == cudaSuccess);
        CHECK(nodes == 0);
        CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    }
    (void)standin::take_findings();  // the words stay
    rig threads;
    const streams s;
    CHECK(code_of([&] { threads.gate->wait_in_capture(threads.batch, s.batch); }) == errc::not_supported);
}

}  // namespace cut_graph_test
