// SPDX-License-Identifier: Apache-2.0
// RMM itself, from its wheel: its adaptors on a tenant's memory, and its resources below a quota.
// Over the stand-in, so without RMM's resources that call a driver.
#include <rmm/error.hpp>
#include <rmm/mr/callback_memory_resource.hpp>
#include <rmm/mr/limiting_resource_adaptor.hpp>
#include <rmm/mr/statistics_resource_adaptor.hpp>

#include <gpushare/interop/cuda_mr.hpp>

#include <cstddef>
#include <new>
#include <string>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"

using namespace gpushare::literals;
using gpushare::errc;

namespace {

namespace mr = ::cuda::mr;
using tenancy = gpushare::tenancy<gpushare::cuda::node>;

constexpr std::size_t MiB = std::size_t{1} << 20;

struct fixture {
    const standin::session gpu{{.devices = 1, .memory = 64_MiB}};
    gpushare::cuda::node node;
    tenancy shared{node};
    tenancy::tenant chat = shared.admit({.name = "chat", .memory = 8_MiB, .compute = 50_pct});
    gpushare::cuda::stream stream = node.make_stream({0});
    ::cuda::stream_ref handle{stream.native_handle()};
    mr::any_resource<mr::device_accessible> ours{gpushare::as_cuda_mr<mr::device_accessible>(chat.memory(), node)};
};

}  // namespace

TEST_CASE("RMM's adaptors stand on a tenant's memory", "[interop][rmm]") {
    fixture f;
    rmm::mr::statistics_resource_adaptor counted(f.ours);
    rmm::mr::limiting_resource_adaptor limited(counted, 6 * MiB);
    void* const p = limited.allocate(f.handle, 4 * MiB, 256);
    CHECK(counted.get_bytes_counter().value == 4 * MiB);
    CHECK(f.chat.memory().free() == 4_MiB);
    CHECK_THROWS_AS(limited.allocate(f.handle, 3 * MiB, 256), rmm::out_of_memory);  // by RMM's limit
    try {
        (void)counted.allocate(f.handle, 5 * MiB, 256);  // by the tenant's quota, through RMM
        FAIL("allocated");
    } catch (const gpushare::error& e) {
        CHECK(e.code() == errc::over_quota);
        CHECK(e.tenant() == "chat");
    }
    CHECK(counted.get_bytes_counter().value == 4 * MiB);
    standin::hold(f.stream.native_handle());
    limited.deallocate(f.handle, p, 4 * MiB, 256);
    CHECK(f.chat.memory().pending() > 0_B);  // in the order of its stream
    standin::let_go(f.stream.native_handle());
    CHECK(f.stream.record().wait(gpushare::never));
    f.chat.memory().collect();
    CHECK(f.chat.memory().free() == 8_MiB);
    CHECK(limited.get_allocated_bytes() == 0);
    CHECK(f.chat.close().leaked_blocks == 0);
}

TEST_CASE("RMM's resources are memory below a quota", "[interop][rmm]") {
    std::size_t out = 0;
    rmm::mr::callback_memory_resource rmms(
        [&](std::size_t size, ::cuda::stream_ref, void*) -> void* {
            if (size > 2 * MiB) throw rmm::out_of_memory("no more");
            out += size;
            return ::operator new (size, std::align_val_t{256});
        },
        [&](void* p, std::size_t size, ::cuda::stream_ref, void*) {
            out -= size;
            ::operator delete (p, std::align_val_t{256});
        });
    gpushare::cuda_mr_upstream below(rmms, ::cuda::stream_ref{cudaStream_t{}});
    gpushare::quota limit(4_MiB);
    gpushare::quota_resource mine(limit, below, "chat");
    void* const p = mine.allocate(MiB, 256);
    CHECK(out == MiB);
    CHECK(limit.usage().current == 1_MiB);
    CHECK_THROWS_AS(mine.allocate(4 * MiB, 256), gpushare::memory_error);
    CHECK_THROWS_AS(mine.allocate(3 * MiB, 256), std::bad_alloc);  // what RMM throws passes through, uncharged
    CHECK(limit.usage().current == 1_MiB);
    CHECK(mine.deallocate(p, MiB, 256) == errc::none);
    CHECK(out == 0);
    CHECK(limit.usage().current == 0_B);
}
