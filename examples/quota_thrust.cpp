// SPDX-License-Identifier: Apache-2.0
// Runs vectors and algorithms of Thrust in a tenant's memory. The quota refuses vectors beyond its
// limit, and temporary storage is charged as well. The next line chooses Thrust's CPP system, so the
// example runs without a GPU. To run on a GPU, remove the line, use a cuda::node, and compile with
// nvcc.
#define THRUST_DEVICE_SYSTEM THRUST_DEVICE_SYSTEM_CPP
#include <cstdint>
#include <functional>
#include <new>

#include <thrust/device_vector.h>
#include <thrust/reduce.h>
#include <thrust/sequence.h>
#include <thrust/sort.h>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/interop/thrust.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "expect.hpp"

using namespace gpushare::literals;

int main() {
    gpushare::host::node node{{.memory = 64_MiB, .sms = 1}};
    gpushare::tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 16_MiB}),
         batch = shared.admit({.name = "batch", .memory = 32_MiB});

    using allocator = gpushare::thrust_allocator<int, decltype(chat)::memory_type>;
    using vector = thrust::device_vector<int, allocator>;
    const allocator in_chat{chat.memory()}, in_batch{batch.memory()};
    constexpr std::size_t n = 1 << 20;  // 4 MiB
    {
        // docs/recipes.md has these lines.
        vector v(n, in_chat);  // 1
        thrust::sequence(v.begin(), v.end());
        thrust::sort(v.begin(), v.end(), std::greater<int>{});

        expect(
            v[0] == int(n) - 1 && thrust::reduce(v.begin(), v.end(), std::int64_t{0}) == std::int64_t{n} * (n - 1) / 2,
            "algorithms run as they always do");
        bool refused = false;
        try {
            v.resize(4 * n);
        } catch (const std::bad_alloc&) {
            refused = true;
        }
        expect(refused && v.size() == n, "over the quota it is refused, and the vector is as it was");

        vector theirs(2 * n, in_batch);
        theirs = v;  // a copy: the memory is still batch's
        expect(theirs.get_allocator() == in_batch && !(in_chat == in_batch),
               "no tenant is charged for another's vector");
        expect(chat.usage().current >= 4_MiB && batch.usage().current >= 4_MiB, "each is charged for its own");
    }
    expect(chat.close().leaked_blocks == 0 && batch.close().leaked_blocks == 0, "nothing is left behind");
}
