// SPDX-License-Identifier: Apache-2.0
// Runs a captured graph as a tenant's work. The example reserves the graph's memory before the
// capture, and no other work uses that memory. Each launch is one submission, and the limiter
// charges the launch as one. The example links with the CUDA runtime or, in the tests, with a
// stand-in for the runtime.
#include <chrono>

#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/memory/private_pool.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "expect.hpp"

using namespace gpushare::literals;

int main() {
    gpushare::cuda::node node;  // all devices of the process
    gpushare::tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 16_MiB, .compute = 60_pct});
    auto& stream = chat.work_stream();

    gpushare::pool_resource<decltype(chat)::memory_type, gpushare::cuda::point> pool{chat.memory()};
    // a capturing stream must not ask the device for memory
    gpushare::private_pool graph_memory{pool, 8_MiB};
    const auto charged = chat.usage().current;
    expect(charged >= 8_MiB, "its memory is the tenant's");

    void* cache = nullptr;
    const auto graph = gpushare::cuda::capture(stream, [&](gpushare::cuda::stream& to) {
        cache = graph_memory.allocate(1_MiB, 256);
        to.fill(cache, std::byte{0}, 1 << 20);
        void* scratch = graph_memory.allocate(4_MiB, 256);
        to.fill(scratch, std::byte{1}, 4 << 20);
        to.copy(cache, scratch, 4096);
        graph_memory.deallocate(scratch, 4_MiB, 256);  // may be used again within the graph
    });
    gpushare::cuda::graph_executable step{graph};
    expect(graph.num_nodes() == 3 && chat.usage().current == charged, "captured, without another byte of the device");

    for (int i = 0; i < 10; ++i) chat.submit([&](gpushare::cuda::stream& to) { step.launch(to); }).wait();
    unsigned char first = 0;
    chat.submit([&](gpushare::cuda::stream& to) { to.copy(&first, cache, 1); }).wait();
    expect(first == 1, "its kernels and copies have run");
    expect(chat.usage().completed == 11, "each launch was one submission");
    graph_memory.deallocate(cache, 1_MiB, 256);
}
