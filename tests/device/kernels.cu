// SPDX-License-Identifier: Apache-2.0
// The kernels of the conformance suites and of the library, launched in every way. The first test
// is that this file compiles without a warning for every architecture; other tests check the
// results.
#include <gpushare/gpushare.cuh>

#include <chrono>

#include "conformance/kernels.hpp"

namespace cu = gpushare::cuda;
namespace kernels = conformance::kernels;

static_assert(gpushare::launcher<cu::stream>);
static_assert(gpushare::node<cu::node>);

void launch_everything(cu::stream& s) {
    using namespace std::chrono_literals;
    const gpushare::grid g{.blocks = 2, .threads = 64};
    s.enqueue(1us);
    s.launch(g, gpushare::detail::empty_kernel{});
    s.launch(g, kernels::step{});
    s.launch(g, kernels::count_threads{});
    s.launch(g, kernels::copy_packed<std::uint8_t>{});
    s.launch(g, kernels::copy_packed<gpushare::bfloat16>{});
    s.launch(g, kernels::copy_packed<float>{});
    s.launch(g, kernels::reduce_block{});
    s.launch(g, kernels::round_floats<gpushare::float16>{});
    s.launch(g, kernels::round_floats<gpushare::bfloat16>{});
    s.launch(g, kernels::round_floats<gpushare::fp8_e4m3>{});
    s.launch(g, kernels::round_floats<gpushare::fp8_e5m2>{});
    (void)s.launch_cooperative(g, kernels::talk_across_ranks{});
    (void)s.launch_cooperative(g, kernels::talk_on_device{});
    (void)s.launch_cooperative(g, kernels::meet{});
}
