// SPDX-License-Identifier: Apache-2.0
// The bodies of collectives that rank threads and host streams run, as kernels: that they compile
// without a warning, how ranks talk in them, that their work is in them (nvcc leaves out, without a
// word, what follows a call of a host function), and that nothing lies in local memory. The
// all-reduce of floats is in bench/gpu/collective_kernels.cu.
#include <gpushare/backend/cuda/cooperative.cuh>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>

#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/fused_all_reduce.hpp>
#include <gpushare/collective/quantised_all_reduce.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/gradient/detail/gossip.hpp>
#include <gpushare/gradient/detail/packing.hpp>
#include <gpushare/gradient/group_operators.hpp>
#include <gpushare/gradient/horovod_devices.hpp>
#include <gpushare/numbers.hpp>

namespace cu = gpushare::cuda;
namespace detail = gpushare::detail;
namespace horovod = gpushare::horovod::detail;
namespace gs = gpushare;
using gpushare::sum;

namespace {

template <class Body>
void launch(cu::stream& s) {
    (void)s.launch_cooperative({.blocks = 2, .threads = 64, .hold = {}}, detail::rank_kernel<Body>{});
}

template <bool Sharded, class T, class Op, class... Stages>
void launch(cu::stream& s, const gs::pipeline<T, Op, Stages...>&) {
    launch<detail::fused_body<T, Op, Sharded, Stages...>>(s);
}

}  // namespace

void launch_collectives(cu::stream& s) {
    launch<detail::reduce_scatter_body<float, sum>>(s);
    launch<detail::all_gather_body<gs::bfloat16>>(s);
    launch<detail::broadcast_body<float>>(s);
    launch<detail::reduce_body<float, gs::maximum>>(s);
    launch<detail::all_to_all_body<float>>(s);
    launch<detail::barrier_body>(s);
    launch<detail::all_gatherv_body<gs::bfloat16>>(s);
    launch<detail::reduce_scatterv_body<float, sum>>(s);
    launch<detail::all_to_allv_body<float>>(s);
    launch<detail::quantised_body<float, sum, 128>>(s);
}

/// Row stages of every kind: norms with one look and with two, scales that are published,
/// replicated and sharded; and a group stage.
void launch_fused(cu::stream& s, std::span<const gs::bfloat16> x, gs::bfloat16* residual, const gs::bfloat16* weight,
                  float* scales, gs::fp8_e4m3* blocks) {
    constexpr std::size_t width = 4096;
    const auto normed = gs::rms_norm(weight, 1e-6F) | gs::cast<gs::bfloat16>();
    launch<false>(s, gs::reduced(x, width) | gs::add_to(residual) | normed);
    launch<true>(s, gs::reduced(x, width) | gs::add_to(gs::shard(residual)) | normed);
    launch<false>(s, gs::reduced(x, width) | gs::bias(weight) | gs::gelu_tanh() |
                         gs::layer_norm(weight, weight, 1e-6F) | gs::quantise<gs::fp8_e4m3>(scales));
    launch<false>(s, gs::reduced(x, width) | gs::add_to(residual) | gs::rms_norm(weight, 1e-6F) |
                         gs::quantise_groups<gs::fp8_e4m3>(scales));
    launch<true>(s, gs::reduced(x, width, gs::average{}) | gs::silu() | gs::row_maxima(gs::shard(scales)) |
                        gs::quantise<std::int8_t>(gs::shard(scales)));
    launch<false>(s, gs::reduced(x, width) | gs::add_to(residual) | gs::rms_norm(weight, 1e-6F) |
                         gs::quantise_nvfp4(blocks, 0.004F));
}

/// The kernels of gradients on devices.
template <class... Kernels>
void launch_each(cu::stream& s) {
    (s.launch({.blocks = 2, .threads = 256, .hold = {}}, Kernels{}), ...);
}

void launch_gradients(cu::stream& s) {
    launch_each<detail::packing<float, float, true>, detail::packing<float, gs::bfloat16, true>,
                detail::packing<float, gs::bfloat16, false>, detail::packing_owing<gs::bfloat16>,
                detail::finite_look<float>, detail::add_chosen>(s);
    launch_each<detail::of_channels<detail::own_moments>, detail::of_channels<detail::normalise_channel>,
                detail::of_channels<detail::sums_of_channel>, detail::of_channels<detail::gradient_of_channel>>(s);
    launch_each<detail::of_softmax<detail::logits_of_sample>, detail::of_softmax<detail::exponentials_of_sample>,
                detail::of_softmax<detail::mean_of_losses>, detail::of_softmax<detail::gradient_of_class>,
                detail::of_softmax<detail::gradient_of_sample>>(s);
    launch_each<detail::gossip_sum, detail::owing_blocks<32>, detail::owing_blocks<128>>(s);
    launch_each<detail::fill_elements<float>, detail::fill_elements<double>, detail::fill_elements<gs::bfloat16>,
                detail::fill_elements<std::int64_t>, detail::divide_elements<float>, detail::divide_elements<double>,
                detail::divide_elements<gs::bfloat16>>(s);
}

/// A group on several devices or on one, as an embedder writes it.
gs::errc all_reduce(cu::node& node, std::span<const gs::device_id> devices, std::span<cu::stream> streams,
                    std::span<const gs::bfloat16* const> in, std::span<gs::bfloat16* const> out, std::size_t n) {
    cu::pinned_memory visible(node);
    const auto where = cu::connect(node, devices) ? gs::workspaces::on_devices : gs::workspaces::on_host;
    const gs::device_communicator group(node, visible, devices, {.blocks = 8}, where);
    std::vector<gs::member> members;
    for (std::uint32_t r = 0; r < group.size(); ++r) members.push_back(group.rank(r));
    const std::span<const gs::member> ranks(members);
    const gs::launch_options shape{.blocks = 4, .threads = 64};
    const gs::errc code =
        devices.front() == devices.back()
            ? gs::submit_shared_all_reduce<gs::bfloat16>(node.gangs(), devices[0], streams[0], ranks, in, out, n, sum{},
                                                         shape)
            : gs::submit_all_reduce<gs::bfloat16>(node.gangs(), devices, streams, ranks, in, out, n, sum{}, shape);
    for (auto& s : streams) s.record().wait(gs::never);
    return code == gs::errc::none ? gs::fault_of(members[0]).code : code;
}
