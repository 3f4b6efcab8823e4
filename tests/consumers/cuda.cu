// SPDX-License-Identifier: Apache-2.0
// A kernel of a consumer's own, compiled by nvcc with the flags of gpushare::cuda.
#include <cstdio>

#include <gpushare/gpushare.cuh>

namespace {
struct twice {
    unsigned* x;
    template <class Context>
    __device__ void operator()(Context& ctx) const {
        x[ctx.thread_rank()] = 2 * ctx.thread_rank();
    }
};
}  // namespace

int main() {
    using namespace gpushare::literals;
    try {
        gpushare::cuda::node node;
        gpushare::tenancy shared{node};
        auto chat = shared.admit({.name = "chat", .memory = 64_MiB, .compute = 70_pct});
        auto* x = static_cast<unsigned*>(chat.memory().allocate(64 * sizeof(unsigned)));
        chat.submit([x](gpushare::cuda::stream& s) { s.launch({.blocks = 1, .threads = 64}, twice{x}); }).wait();
        chat.memory().deallocate(x, 64 * sizeof(unsigned));
        return 0;
    } catch (const gpushare::error& e) {
        std::puts(e.what());
        return e.code() == gpushare::errc::no_driver || e.code() == gpushare::errc::no_device ? 3 : 1;
    }
}
