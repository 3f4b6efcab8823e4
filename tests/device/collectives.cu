// SPDX-License-Identifier: Apache-2.0
// The bodies of collectives that rank threads and host streams run, as kernels: that they compile without a warning, how
// ranks talk in them, and that nothing lies in local memory.
#include <gpushare/backend/cuda/cooperative.cuh>

#include <gpushare/collective/all_reduce.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/numbers.hpp>

namespace cu = gpushare::cuda;
namespace detail = gpushare::detail;
using gpushare::sum;

namespace {

template <class Body>
void launch(cu::stream& s) {
    (void)s.launch_cooperative({.blocks = 2, .threads = 64, .hold = {}}, detail::rank_kernel<Body>{});
}

}  // namespace

void launch_collectives(cu::stream& s) {
    launch<detail::all_reduce_body<gpushare::bfloat16, sum>>(s);
    (void)s.launch_cooperative({.blocks = 2, .threads = 64, .hold = {}},
                               detail::shared_device_kernel<detail::all_reduce_body<float, sum>>{});
}
