// SPDX-License-Identifier: Apache-2.0
// Quotas and limiters on CUDA in plain C++, built without nvcc. Where there is no driver or device, the error says so
// by its type: that is what the test looks for.
#include <cstddef>
#include <cstdio>

#include <gpushare/backend/cuda/cuda.hpp>
#include <gpushare/gpushare.hpp>

int main() {
    using namespace gpushare::literals;
    try {
        gpushare::cuda::node node;
        gpushare::tenancy shared{node};
        auto chat = shared.admit({.name = "chat", .memory = 64_MiB, .compute = 70_pct});
        void* block = chat.memory().allocate(1 << 20);
        chat.submit([&](gpushare::cuda::stream& s) { s.fill(block, std::byte{}, 1 << 20); }).wait();
        chat.memory().deallocate(block, 1 << 20);
        std::printf("%u devices\n", unsigned(node.num_devices()));
        return 0;
    } catch (const gpushare::error& e) {
        std::puts(e.what());
        return e.code() == gpushare::errc::no_driver || e.code() == gpushare::errc::no_device ? 3 : 1;
    }
}
