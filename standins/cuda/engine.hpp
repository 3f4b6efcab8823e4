// SPDX-License-Identifier: Apache-2.0
// The interface of an engine that runs compiled kernels over the stand-in. standins/ptx/runtime.cpp
// has one; most programs have none.
//
// All calls are made under the machine's mutex.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>

namespace standin::detail {

/// The stand-in tells the engine about the memory that kernels may touch.
struct engine {
    virtual ~engine() = default;
    /// `device` owns the memory; -1 stands for the host.
    virtual void added(std::uintptr_t begin, std::size_t size, int device) = 0;
    virtual void removed(std::uintptr_t begin) = 0;
    /// A completed copy or memset, in the order of its stream.
    struct transfer {
        std::uintptr_t from = 0, to = 0;  // `from` 0: a memset
        std::size_t size = 0;
        int device = 0;
        std::uint64_t stream = 0, known = 0;  // as for a kernel: see below
    };
    virtual void transferred(const transfer& t) = 0;
    /// All memory is gone.
    virtual void reset() = 0;

    // A kernel or a copy happens after the earlier work of its stream, after the marks of other
    // streams that its stream awaited, and after all work whose end the host had seen when it
    // enqueued the kernel or copy.

    /// A stream has passed the mark `awaited`, and has reached its own mark `reached`. Either may
    /// be null.
    virtual void passed(std::uint64_t stream, const void* awaited, const void* reached) = 0;
    /// The host has seen the end of some work, by waiting or by a query.
    virtual void host_saw() = 0;
    /// A number for the ends that the host has seen so far. It is stored with work that the host
    /// enqueues.
    [[nodiscard]] virtual std::uint64_t known() const = 0;

    /// Whether the host waits for the end of work. If not, the host will soon make another call,
    /// and may launch work for which kernels wait.
    bool host_waits = false;
};
/// The program's engine. If it is null, kernels run on the host: see launch.hpp.
[[nodiscard]] engine*& the_engine();

/// A kernel that has begun. Each call runs it for a while and returns whether it is over. Throws
/// for an illegal access.
using running_kernel = std::function<bool()>;
/// The place at which a kernel begins.
struct beginning {
    int device = 0;
    const std::set<std::uint32_t>& sms;
    std::uint64_t stream = 0, known = 0;  // see engine
};
using kernel_start = std::function<running_kernel(const beginning& here)>;

/// Enqueues a kernel whose length is its computing time; counts as a call of cudaLaunchKernelExC.
/// `kernel` and `together` are as for kernels that run on the host (standin.hpp).
cudaError_t launch(cudaStream_t stream, const void* kernel, bool together, kernel_start start);

}  // namespace standin::detail
