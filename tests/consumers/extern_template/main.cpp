// SPDX-License-Identifier: Apache-2.0
// A program of two files, of which this one compiles nothing of tenancy, tenant and limiter.
#include "shared.hpp"

int main() {
    using namespace gpushare::literals;
    gpushare::host::node node{{.devices = 2, .memory = 64_MiB}};
    gpushare::tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 16_MiB, .devices = 2, .compute = 70_pct});
    auto* x = static_cast<unsigned*>(chat.memory().allocate(100 * sizeof(unsigned)));
    auto done = chat.submit([x](auto& stream) {
        stream.launch({.blocks = 100}, [x](auto& ctx) { x[ctx.block_rank()] = 2 * ctx.block_rank(); });
    });
    done.wait();
    return x[99] == 198 && chat.close().leaked_blocks == 1 ? 0 : 1;
}
