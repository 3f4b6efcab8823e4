// SPDX-License-Identifier: Apache-2.0
// A kernel that must not pass the check of its PTX: its ranks talk through flags that order
// nothing. On x86 and on many a run of a device it would work.
#include <gpushare/backend/cuda/cooperative.cuh>

#include "conformance/kernels.hpp"

template <class T>
struct relaxed_atomic {
    T* object;
    __device__ explicit relaxed_atomic(T& t) : object(&t) {}
    __device__ void store_release(T value) const { gpushare::detail::atomic_ref<T>{*object}.store_relaxed(value); }
    [[nodiscard]] __device__ T load_acquire() const { return gpushare::detail::atomic_ref<T>{*object}.load_relaxed(); }
};

void launch(gpushare::cuda::stream& s) { (void)s.launch_cooperative({}, conformance::kernels::talk<relaxed_atomic>{}); }
