// SPDX-License-Identifier: Apache-2.0
// One program of objects compiled by g++ and by nvcc: how each side sees the types, and calls
// across the border.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include <gpushare/backend/cuda/cuda.hpp>
#include <gpushare/backend/host/host.hpp>
#include <gpushare/detail/atomic_ref.hpp>
#include <gpushare/gpushare.hpp>
#include <gpushare/numbers.hpp>

namespace contract {

/// A type's size and alignment, or a member's offset.
struct layout {
    const char* what;
    std::size_t size, alignment;
};

#define CONTRACT_TYPE(...) \
    layout { #__VA_ARGS__, sizeof(__VA_ARGS__), alignof(__VA_ARGS__) }
#define CONTRACT_MEMBER(type, member) \
    layout { #type "::" #member, offsetof(type, member), 0 }

using cuda_tenancy = gpushare::tenancy<gpushare::cuda::node>;
using cuda_limiter = gpushare::compute_limiter<gpushare::cuda::stream, gpushare::host::steady_clock>;

// static: every file that includes this works them out for itself.
static constexpr layout layouts[] = {
    CONTRACT_TYPE(gpushare::bytes),
    CONTRACT_TYPE(gpushare::share),
    CONTRACT_TYPE(gpushare::grid),
    CONTRACT_MEMBER(gpushare::grid, threads),
    CONTRACT_MEMBER(gpushare::grid, hold),
    CONTRACT_TYPE(gpushare::failure),
    CONTRACT_MEMBER(gpushare::failure, limit),
    CONTRACT_TYPE(gpushare::memory_error),
    CONTRACT_TYPE(gpushare::operation_error),
    CONTRACT_TYPE(gpushare::result<int>),
    CONTRACT_TYPE(gpushare::quota),
    CONTRACT_TYPE(gpushare::quota_resource<gpushare::cuda::device_memory>),
    CONTRACT_TYPE(gpushare::deferred_frees<gpushare::cuda::point, gpushare::cuda::device_memory>),
    CONTRACT_TYPE(gpushare::detail::device_order_lock),
    CONTRACT_TYPE(gpushare::tenant_spec),
    CONTRACT_TYPE(cuda_tenancy),
    CONTRACT_TYPE(gpushare::tenant<gpushare::cuda::node>),
    CONTRACT_TYPE(cuda_limiter),
    CONTRACT_TYPE(gpushare::permit<cuda_limiter>),
    CONTRACT_TYPE(gpushare::host::node),
    CONTRACT_TYPE(gpushare::host::kernel_context),
    CONTRACT_TYPE(gpushare::cuda::node),
    CONTRACT_TYPE(gpushare::cuda::stream),
    CONTRACT_TYPE(gpushare::cuda::detail::stream_state),
    CONTRACT_TYPE(gpushare::cuda::point),
    CONTRACT_TYPE(gpushare::cuda::detail::point_state),
    CONTRACT_TYPE(gpushare::cuda::device_memory),
    CONTRACT_TYPE(gpushare::cuda::device_properties),
    CONTRACT_MEMBER(gpushare::cuda::device_properties, memory),
    CONTRACT_MEMBER(gpushare::cuda::device_properties, cooperative_launch),
    CONTRACT_TYPE(gpushare::detail::atomic_ref<unsigned>),
    CONTRACT_TYPE(gpushare::float16),
    CONTRACT_TYPE(gpushare::fp8_e4m3),
    CONTRACT_TYPE(gpushare::packed<gpushare::bfloat16>),
};

#undef CONTRACT_TYPE
#undef CONTRACT_MEMBER

/// What a side of the program does; one by each compiler, with the same body.
struct side {
    const char* compiler;
    std::span<const layout> layouts;
    const gpushare::version_number* version;            // one variable in the whole program
    void (*charge)(gpushare::quota&, gpushare::bytes);  // throws memory_error
    std::uint32_t (*run_on)(gpushare::host::node&);     // a kernel on the host backend
    gpushare::errc (*open_node)();                      // why there is no CUDA node, or errc::none
};

[[nodiscard]] side by_gcc();
[[nodiscard]] side by_nvcc();

}  // namespace contract
