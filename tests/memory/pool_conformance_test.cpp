// SPDX-License-Identifier: Apache-2.0
// Pools, their caches and private pools keep the contract of every memory_resource, over several
// upstreams.
#include <cstddef>
#include <memory_resource>
#include <mutex>
#include <utility>

#include <gpushare/backend/host/memory.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/private_pool.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/units.hpp>

#include "conformance/memory_resource_suite.hpp"
#include "support/catch.hpp"
#include "support/fault_resource.hpp"

using namespace gpushare::literals;
using gpushare::pool_resource;
using gpushare::quota;
using gpushare::quota_resource;
using support::fault_resource;

namespace {

/// Each thread of the suite has to have a cache of its own: this one has many threads' calls take
/// turns.
template <class Cache>
class in_turns {
public:
    explicit in_turns(Cache cache) : cache_(std::move(cache)) {}
    void* allocate(std::size_t size, std::size_t alignment) {
        const std::lock_guard lock(mutex_);
        return cache_.allocate(size, alignment);
    }
    void deallocate(void* p, std::size_t size, std::size_t alignment) {
        const std::lock_guard lock(mutex_);
        CHECK(cache_.deallocate(p, size, alignment) == gpushare::errc::none);
    }

private:
    std::mutex mutex_;
    Cache cache_;
};

}  // namespace

TEST_CASE("pool_resource is a memory_resource over any other", "[memory][pool][conformance]") {
    pool_resource over_pmr(*std::pmr::new_delete_resource());
    conformance::check_memory_resource(over_pmr);
    fault_resource upstream;
    {
        pool_resource small(upstream, {.segment = 4_KiB, .kept = 0_B});
        conformance::check_memory_resource(small);
        CHECK(small.trim(0_B) == 0_B);
    }
    CHECK(upstream.blocks() == 0);
    CHECK(upstream.wrong_frees() == 0);
}

TEST_CASE("pool_resource over a quota is a memory", "[memory][pool][conformance]") {
    fault_resource upstream;
    quota device{16_MiB}, q{device, 1_MiB, 3_MiB};
    quota_resource mine{q, upstream, "chat"};
    {
        pool_resource pool(mine);
        static_assert(gpushare::memory<decltype(pool)>);
        conformance::check_memory_resource(pool);
        conformance::check_memory_view(pool);
    }
    CHECK(upstream.blocks() == 0);
    CHECK(q.usage().current == 0_B);
}

TEST_CASE("pool_resource over device memory that the host can't touch is a memory", "[memory][pool][conformance]") {
    gpushare::host::device_memory device{{.capacity = 32_MiB, .granularity = 2_MiB, .guarded = true}};
    {
        pool_resource pool(device, {.segment = 64_MiB});
        static_assert(gpushare::memory<decltype(pool)>);
        conformance::check_memory_resource(pool);
    }
    CHECK(device.used() == 0_B);
}

TEST_CASE("a cache is a memory_resource", "[memory][pool][conformance]") {
    fault_resource upstream;
    {
        pool_resource pool(upstream, {.segment = 1_MiB});
        in_turns cache(pool.make_cache());
        conformance::check_memory_resource(cache);
    }
    CHECK(upstream.blocks() == 0);
}

TEST_CASE("a private pool is a memory_resource", "[memory][pool][conformance]") {
    fault_resource upstream;
    {
        pool_resource pool(upstream, {.segment = 8_MiB});
        gpushare::private_pool graph(pool, 2_MiB);
        conformance::check_memory_resource(graph);
        CHECK(graph.used() == 0_B);
    }
    CHECK(upstream.blocks() == 0);
}
