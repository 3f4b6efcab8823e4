// SPDX-License-Identifier: Apache-2.0
// What runs compiled kernels over the stand-in, if a program has such a thing:
// standins/ptx/runtime.cpp.
//
// All calls come under the machine's mutex.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>

namespace standin::detail {

/// Is told what happens to memory that kernels may touch.
struct engine {
    virtual ~engine() = default;
    /// `device`: whose it is; -1: the host's.
    virtual void added(std::uintptr_t begin, std::size_t size, int device) = 0;
    virtual void removed(std::uintptr_t begin) = 0;
    /// A copy or memset has been done, in the order of its stream.
    struct transfer {
        std::uintptr_t from = 0, to = 0;  // `from` 0: a memset
        std::size_t size = 0;
        int device = 0;
        std::uint64_t stream = 0, known = 0;  // as of a kernel: see below
    };
    virtual void transferred(const transfer& t) = 0;
    /// Nothing exists any more.
    virtual void reset() = 0;

    // What happens before a kernel or a copy: what its stream did before it, marks of other streams
    // that this awaited, and what the host had seen the end of when it enqueued it.

    /// A stream has come past the mark that it awaited, and reached one. Either may be null.
    virtual void passed(std::uint64_t stream, const void* awaited, const void* reached) = 0;
    /// The host waited for the end of something, or asked and it was over.
    virtual void host_saw() = 0;
    /// What the host has seen so far, to be kept with what it enqueues.
    [[nodiscard]] virtual std::uint64_t known() const = 0;

    /// The host waits for the end of something: else it comes back soon, to launch what kernels
    /// wait for.
    bool host_waits = false;
};
/// Null: kernels run on the host, see launch.hpp.
[[nodiscard]] engine*& the_engine();

/// Asked again and again once it has begun: goes on for a while, and says whether it is over.
/// Throws if it went wrong: an illegal access.
using running_kernel = std::function<bool()>;
/// Where a kernel begins.
struct beginning {
    int device = 0;
    const std::set<std::uint32_t>& sms;
    std::uint64_t stream = 0, known = 0;  // see engine
};
using kernel_start = std::function<running_kernel(const beginning& here)>;

/// Enqueues a kernel that takes as long as it computes; counts as a call of cudaLaunchKernelExC.
/// `kernel` and `together` as for kernels that run on the host.
cudaError_t launch(cudaStream_t stream, const void* kernel, bool together, kernel_start start);

}  // namespace standin::detail
