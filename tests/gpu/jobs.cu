// SPDX-License-Identifier: Apache-2.0
// The kernels of jobs.hpp.
#include <gpushare/backend/cuda/cooperative.cuh>
#include <gpushare/backend/cuda/launch.cuh>

#include <gpushare/gradient/device_buckets.hpp>
#include <gpushare/gradient/horovod_devices.hpp>

#include "gpu/batch_norm.hpp"
#include "gpu/jobs.hpp"
#include "gpu/joined.hpp"
#include "gpu/packing.hpp"
#include "gpu/softmax.hpp"

namespace jobs {

gs::errc launch_on_devices(gs::cuda::node& node, std::span<const gs::device_id> devices,
                           std::span<gs::cuda::stream> streams, std::span<const gs::member> members, const job& j,
                           std::span<std::byte* const> arenas) {
    return launch(node.gangs(), devices, streams, members, j, arenas);
}

void reuse_on_device(gs::cuda::stream& s, std::uint32_t* to, const std::uint32_t* from, std::uint32_t threads) {
    s.launch({.blocks = 1, .threads = threads, .hold = {}}, bring{to, from});
}

namespace {

template <class Wire>
void pack(gs::cuda::stream& s, std::span<const std::pair<float*, std::size_t>> arrays, Wire* flat, bool back) {
    if (back)
        gs::kernel_packing{}.unpack(s, arrays, flat);
    else
        gs::kernel_packing{}.pack(s, arrays, flat);
}

}  // namespace

void pack_on_device(gs::cuda::stream& s, std::span<const std::pair<float*, std::size_t>> arrays, float* flat,
                    bool back) {
    pack(s, arrays, flat, back);
}
void pack_on_device(gs::cuda::stream& s, std::span<const std::pair<float*, std::size_t>> arrays, gs::bfloat16* flat,
                    bool back) {
    pack(s, arrays, flat, back);
}
void pack_owing_on_device(gs::cuda::stream& s, std::span<const gs::detail::packing_owing<gs::bfloat16>::piece> arrays,
                          gs::bfloat16* flat, std::ptrdiff_t next) {
    gs::kernel_packing{}.pack_owing(s, arrays, flat, next);
}
void feed_back_fp8_on_device(gs::cuda::stream& s, std::uint32_t block, const float* from, float* to, const float* owed,
                             float* left, std::size_t count) {
    if (block == 32)
        gs::submit_feed_back_quantised<32>(s, from, to, owed, left, count);
    else
        gs::submit_feed_back_quantised<128>(s, from, to, owed, left, count);
}
void add_chosen_on_device(gs::cuda::stream& s, float* data, std::size_t count, std::span<const chosen> ranks,
                          std::uint32_t* flag) {
    const gs::detail::fill_elements<float> clear{data, count, 0};
    s.launch(clear.shape(), clear);
    for (const chosen& c : ranks) {
        const gs::detail::add_chosen add{data, count, c.places, c.values, c.count};
        s.launch(add.shape(), add);
    }
    const gs::detail::divide_elements<float> divide{data, count, static_cast<float>(ranks.size())};
    s.launch(divide.shape(), divide);
    const gs::detail::finite_look<float> look{data, count, flag};
    s.launch(look.shape(), look);
}

void gossip_on_device(gs::cuda::stream& s, float* out, std::size_t count,
                      std::span<const std::pair<const float*, float>> arrays) {
    gs::detail::gossip_sum some{out, count};
    for (const auto& [data, weight] : arrays) {
        if (some.add(data, weight)) continue;
        s.launch(some.shape(), some);
        some = {out, count, true};
        (void)some.add(data, weight);
    }
    s.launch(some.shape(), some);
}

gs::errc batch_norm_on_device(gs::cuda::stream& s, std::span<const gs::device_batch> batches, float epsilon,
                              const gathers& gather, const adds& all_reduce) {
    const std::span<gs::cuda::stream> streams(&s, 1);
    const auto code = gs::submit_sync_batch_norm(streams, batches, epsilon, gather);
    return code != gs::errc::none ? code : gs::submit_sync_batch_norm_backward(streams, batches, all_reduce);
}
gs::errc softmax_on_device(gs::cuda::stream& s, gs::device_partial_softmax& layer,
                           std::span<const gs::device_softmax_rank> ranks, const combines& combine) {
    return softmax_step(s, layer, ranks, combine);
}

template <class T>
void fill_on_device(gs::cuda::stream& s, T* data, std::size_t count, T value) {
    const gs::detail::fill_elements<T> fill{data, count, value};
    s.launch(fill.shape(), fill);
}
template void fill_on_device(gs::cuda::stream&, float*, std::size_t, float);
template void fill_on_device(gs::cuda::stream&, double*, std::size_t, double);
template void fill_on_device(gs::cuda::stream&, gs::float16*, std::size_t, gs::float16);
template void fill_on_device(gs::cuda::stream&, gs::bfloat16*, std::size_t, gs::bfloat16);
template void fill_on_device(gs::cuda::stream&, std::int64_t*, std::size_t, std::int64_t);
template <class T>
void divide_on_device(gs::cuda::stream& s, T* data, std::size_t count, divided_in<T> by) {
    const gs::detail::divide_elements<T> divide{data, count, by};
    s.launch(divide.shape(), divide);
}
template void divide_on_device(gs::cuda::stream&, float*, std::size_t, float);
template void divide_on_device(gs::cuda::stream&, double*, std::size_t, double);
template void divide_on_device(gs::cuda::stream&, gs::float16*, std::size_t, float);
template void divide_on_device(gs::cuda::stream&, gs::bfloat16*, std::size_t, float);

namespace {

template <class T, class Bits>
__global__ void converting(float* widened, const float* floats, std::uint16_t* narrowed, std::uint32_t n) {
    const std::uint32_t first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (std::uint32_t i = first; i < 1U << 8 * sizeof(Bits); i += step)
        widened[i] = static_cast<float>(T::from_bits(static_cast<Bits>(i)));
    for (std::uint32_t i = first; i < n; i += step) narrowed[i] = T(floats[i]).bits();
}

__global__ void adding(std::uint32_t* words, std::uint32_t n) {
    const std::uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
    for (std::uint32_t i = first; i < n; i += gridDim.x * blockDim.x) ++words[i];
}

}  // namespace

void convert_on_device(format f, gs::cuda::stream& s, float* widened, const float* floats, std::uint16_t* narrowed,
                       std::uint32_t n) {
    const auto run = [&](auto kernel) { kernel<<<2, 64, 0, s.native_handle()>>>(widened, floats, narrowed, n); };
    switch (f) {
        case format::float16: run(&converting<gs::float16, std::uint16_t>); break;
        case format::bfloat16: run(&converting<gs::bfloat16, std::uint16_t>); break;
        case format::fp8_e4m3: run(&converting<gs::fp8_e4m3, std::uint8_t>); break;
        case format::fp8_e5m2: run(&converting<gs::fp8_e5m2, std::uint8_t>); break;
    }
}

void add_one(form how, gs::cuda::stream& s, std::uint32_t* words, std::uint32_t n) {
    const dim3 blocks(2), threads(64);
    void* arguments[] = {&words, &n};
    const auto* const kernel = reinterpret_cast<const void*>(&adding);
    switch (how) {
        case form::chevrons: adding<<<blocks, threads, 0, s.native_handle()>>>(words, n); break;
        case form::function: cudaLaunchKernel(kernel, blocks, threads, arguments, 0, s.native_handle()); break;
        case form::cooperative_function:
            cudaLaunchCooperativeKernel(kernel, blocks, threads, arguments, 0, s.native_handle());
            break;
    }
}

}  // namespace jobs
