// SPDX-License-Identifier: Apache-2.0
// Has a file of its own because it needs the CUDA toolkit's headers. Without the headers, this peer
// doesn't exist.
#define THRUST_DEVICE_SYSTEM THRUST_DEVICE_SYSTEM_CPP
#if __has_include(<thrust/mr/disjoint_sync_pool.h>)
#include <thrust/mr/disjoint_sync_pool.h>
#include <thrust/mr/new.h>
#include <thrust/version.h>
#define BENCH_HAS_THRUST 1
#endif

#include "sources.hpp"

namespace bench {

#ifdef BENCH_HAS_THRUST
namespace {
using upstream = thrust::mr::new_delete_resource;
struct pool {
    upstream memory, bookkeeper;
    thrust::mr::disjoint_synchronized_pool_resource<upstream, upstream> resource{&memory, &bookkeeper};
};
}  // namespace

peer thrust_pool() {
    return {"thrust_pool", std::to_string(THRUST_VERSION), std::make_shared<pool>(),
            [](void* p, std::size_t size) { return static_cast<pool*>(p)->resource.do_allocate(size, alignment); },
            [](void* p, void* block, std::size_t size) {
                static_cast<pool*>(p)->resource.do_deallocate(block, size, alignment);
            }};
}
#else
peer thrust_pool() { return {}; }
#endif

}  // namespace bench
