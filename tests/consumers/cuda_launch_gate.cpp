// SPDX-License-Identifier: Apache-2.0
// A gate for launches, built without nvcc and linked with CUPTI. Where there is no driver or device, the error says so by its type:
// that is what the test looks for.
#include <cstddef>
#include <cstdio>

#include <gpushare/backend/cuda/cuda.hpp>
#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/compute/launch_gate.hpp>

namespace {

/// Stands for an engine of somebody else's, which launches on a stream that it was given.
struct some_engine {
    gpushare::cuda::stream stream;
    void* block;

    void forward() { stream.fill(block, std::byte{}, 1 << 20); }
};

void serve(gpushare::cuda::node& node, some_engine& engine, some_engine& other) {
    gpushare::cuda::launch_gate<gpushare::launch_gate> gate{node, gpushare::device_id{0}};
    const auto chat = gate.add({.level = 1});
    const auto batch = gate.add({});
    const auto theirs = gate.bind(batch, other.stream.native_handle());  // whatever thread launches there

    {
        const auto inside = gate.enter(chat);  // a request: batch holds back until its work is done
        engine.forward();
    }
    other.forward();  // each launch asks, and waits where it must
    std::printf("batch: %.3f ms of the device\n", 1e3 * gpushare::in_seconds(gate.usage(batch).device_time));
}

}  // namespace

int main() {
    try {
        gpushare::cuda::node node;
        auto& memory = node.memory(gpushare::device_id{0});
        void* block = memory.allocate(1 << 20, 256);
        some_engine a{node.make_stream(gpushare::device_id{0}), block},
            b{node.make_stream(gpushare::device_id{0}), block};
        serve(node, a, b);
        memory.deallocate(block, 1 << 20, 256);
        return 0;
    } catch (const gpushare::error& e) {
        std::puts(e.what());
        return e.code() == gpushare::errc::no_driver || e.code() == gpushare::errc::no_device ? 3 : 1;
    }
}
