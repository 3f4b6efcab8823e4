// SPDX-License-Identifier: Apache-2.0
// Declares the classes that the library of gpushare::compiled has instantiated, for the host
// backend, and for CUDA if gpushare::compiled_cuda is linked. Without these targets the header
// declares nothing. tenancy.hpp includes it for programs that link them; cmake/compiled.cpp
// instantiates them.
//
//   // as usual; the program's CMakeLists.txt links gpushare::compiled
//   gpushare::tenancy shared{node};
#pragma once

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/config.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/tenant.hpp>
#include <gpushare/tenant/tenant_memory.hpp>

#if defined(GPUSHARE_COMPILED_HOST)
#include <gpushare/backend/host/host.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

GPUSHARE_EXTERN template class tenancy<host::node>;
GPUSHARE_EXTERN template class tenant<host::node>;
GPUSHARE_EXTERN template class tenant_request<tenancy<host::node>::limiter>;
GPUSHARE_EXTERN template class tenant_memory<host::device_memory, host::point>;
GPUSHARE_EXTERN template class compute_limiter<host::stream, host::steady_clock>;
GPUSHARE_EXTERN template class permit<tenancy<host::node>::limiter>;
GPUSHARE_EXTERN template class ticket<tenancy<host::node>::limiter>;
GPUSHARE_EXTERN template class request<tenancy<host::node>::limiter>;
GPUSHARE_EXTERN template class detail::limiter_engine<host::stream, host::steady_clock, weighted_fair>;
GPUSHARE_EXTERN template class detail::device_watch<host::stream, host::steady_clock, weighted_fair>;
GPUSHARE_EXTERN template class detail::endings<host::stream, host::steady_clock, weighted_fair>;
GPUSHARE_EXTERN template struct detail::submission<host::stream>;
GPUSHARE_EXTERN template class detail::submission_pool<host::stream>;
GPUSHARE_EXTERN template class detail::tenant_state<host::node, weighted_fair>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
#endif

#if defined(GPUSHARE_COMPILED_CUDA)
#include <gpushare/backend/cuda/cuda.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

GPUSHARE_EXTERN template class tenancy<cuda::node>;
GPUSHARE_EXTERN template class tenant<cuda::node>;
GPUSHARE_EXTERN template class tenant_request<tenancy<cuda::node>::limiter>;
GPUSHARE_EXTERN template class tenant_memory<cuda::node::memory_type, cuda::node::stream::point>;
GPUSHARE_EXTERN template class compute_limiter<cuda::node::stream, cuda::node::clock_type>;
GPUSHARE_EXTERN template class permit<tenancy<cuda::node>::limiter>;
GPUSHARE_EXTERN template class ticket<tenancy<cuda::node>::limiter>;
GPUSHARE_EXTERN template class request<tenancy<cuda::node>::limiter>;
GPUSHARE_EXTERN template class detail::limiter_engine<cuda::node::stream, cuda::node::clock_type, weighted_fair>;
GPUSHARE_EXTERN template class detail::device_watch<cuda::node::stream, cuda::node::clock_type, weighted_fair>;
GPUSHARE_EXTERN template class detail::endings<cuda::node::stream, cuda::node::clock_type, weighted_fair>;
GPUSHARE_EXTERN template struct detail::submission<cuda::node::stream>;
GPUSHARE_EXTERN template class detail::submission_pool<cuda::node::stream>;
GPUSHARE_EXTERN template class detail::tenant_state<cuda::node, weighted_fair>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
#endif
