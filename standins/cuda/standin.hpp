// SPDX-License-Identifier: Apache-2.0
// A stand-in for the CUDA runtime, for tests on machines without a GPU. Linked instead of
// libcudart, it answers the library's calls, over memory of this process. Work takes its stated
// time, faults come on demand, and the stand-in finds objects that a program leaves behind and
// calls that it must not make.
//
//   // session.hpp; checks that nothing leaked
//   standin::session gpu{{.devices = 2, .memory = 64_MiB}};
//   standin::inject({.call = "cudaMalloc", .code = cudaErrorMemoryAllocation, .skip = 3});
//   standin::hold(stream);     ...     standin::let_go(stream);
//
// What it models: order within a stream and across events, capture with its three modes, pools with
// a maximum size, virtual memory, green contexts, contexts of cuCtxCreate, errors that stick to a
// context, a device that is reset, fork, and a driver that is gone. What it doesn't: how fast a
// device is, contention for SMs (streams never slow each other down), and the waiting of the
// synchronising default stream.
//
// Where CUDA doesn't guarantee something, the stand-in doesn't grant it unless an option says so:
// see `options`.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/units.hpp>

namespace standin {

using gpushare::bytes;
using gpushare::ns;

/// automatic: work ends when its length has passed in real time. manual: time stands still until
/// `advance`.
enum class timing : std::uint8_t { automatic, manual };

/// Whom an error that sticks takes along: the contexts of its device, or all of the process.
enum class poison_scope : std::uint8_t { device, process };

/// All devices are alike.
struct options {
    std::uint32_t devices = 2;  // 0: cudaErrorNoDevice
    bytes memory{64 << 20};     // per device
    bytes taken{};              // of these, what other processes have
    bytes context{2 << 20};     // of these, what a context takes once it exists
    bytes page{2 << 20};        // of virtual memory, and of cudaMalloc beyond half a page; smaller blocks share pages
    bytes small_step{512};      // of those
    bytes pool_step{32 << 20};  // in which pools reserve; a maximum size is rounded up to it
    std::uint32_t sms = 16;
    std::uint32_t sm_step = 8;  // in which SMs are split
    std::uint32_t blocks_per_sm = 2;
    int least_priority = 0, greatest_priority = -5;
    int driver_version = 13000;            // 0: cudaErrorInsufficientDriver
    int capability = 90;                   // 80 for 8.0
    bool rdma = true;                      // network cards reach virtual memory that is made for it
    bool stream_memory_operations = true;  // streams wait for words of 64 bits in memory
    bool peers = true;                     // every device reaches every other one ...
    bool peer_atomics = false;  // ... with atomics too: not over PCIe (Programming Guide, "Peer-to-Peer Memory Access")
                                // nor on the host's memory. Without, a compiled kernel that needs
                                // them is a finding
    timing time = timing::automatic;
    ns synchronous_copy{};  // how long a synchronous copy or fill takes on the device
    poison_scope scope = poison_scope::device;
    std::size_t log_capacity = 4096;  // calls

    // What CUDA doesn't guarantee, and what happens to be so on some machines.

    /// cudaEventElapsedTime says that a fault has happened. (Runtime API, cudaEventElapsedTime: it
    /// may only say that an event isn't complete.)
    bool elapsed_reports_faults = false;
    /// Launches, copies and records say that an earlier kernel has failed before somebody has
    /// waited or asked for the end of it. (Runtime API, "Error Handling": asynchronous errors may
    /// be reported by any later call.)
    bool prompt_errors = false;
    /// Events, streams and memory are made beside kernels that wait for others without waiting for
    /// them.
    bool creation_beside_spinning = false;
    /// Kernels are loaded before their first use. (Programming Guide, "Lazy Loading", "Concurrent
    /// Execution": loading one may wait for those that run.)
    bool eager_loading = false;
    /// Loading a kernel waits for all work of its device: at its first launch and, for a kernel
    /// that a capture has recorded, when the graph is instantiated or updated. (Programming Guide,
    /// as above.)
    bool loading_waits = false;
    /// Hardware queues of a device, which its streams share: what waits in one holds up what was
    /// enqueued there later, by other streams too. (Programming Guide, CUDA_DEVICE_MAX_CONNECTIONS:
    /// 8 by default.)
    std::uint32_t connections = 8;
    /// Asynchronous copies from and to pageable memory come back when they are over. (Runtime API,
    /// "API synchronization behavior": such a copy may be synchronous.)
    bool pageable_copies_wait = false;
};

/// Starts from nothing: whatever exists is gone. Findings that nobody took make the program fail at
/// its end. No other thread may be inside a call.
void reset(const options& o = {});

// --- time

/// Since the reset.
[[nodiscard]] ns now();
/// Manual timing: moves the clock, and with it the work.
void advance(ns step);
/// Nothing that is enqueued on the stream begins until it is let go.
void hold(cudaStream_t stream);
void let_go(cudaStream_t stream);

// --- faults

/// After `skip` more calls of this name, the next `times` fail with `code` and do nothing else.
struct fault {
    std::string call;  // "cudaMalloc", "cuMemCreate"; none: any that can fail, and what gives back gives back
    int code = cudaErrorUnknown;  // a cudaError_t or CUresult: they share their numbers
    std::uint64_t skip = 0, times = 1;
    bool sticky = false;  // the device answers everything with it from then on
};
void inject(fault f);
/// The next call of this name does `what` first, on its thread and under no lock: what comes
/// between two of the library's readings.
void before_next(std::string call, std::function<void()> what);
/// How many haven't struck as often as they were to.
[[nodiscard]] std::size_t faults_left();
/// From now on every call that concerns the device fails with `code`, and its work stands still.
void poison(int device, cudaError_t code);
/// The driver is gone, with everything, as at the end of a process: every call answers
/// cudaErrorCudartUnloading from then on.
void unload();
/// The driver doesn't know the entry point: as an older one wouldn't.
void hide_entry_point(std::string name);

// --- what happened

struct call {
    const char* name = "";
    const void* stream = nullptr;  // null where none is named
    std::thread::id thread{};
    int result = 0;
};
/// The last calls, oldest first.
[[nodiscard]] std::vector<call> calls();
/// Since the reset or `forget_calls`.
[[nodiscard]] std::uint64_t count(std::string_view name);
[[nodiscard]] std::uint64_t count_all();
void forget_calls();

/// What exists now and hasn't been returned.
struct inventory {
    std::size_t streams = 0, events = 0, pools = 0, allocations = 0, host_allocations = 0, graphs = 0, executables = 0,
                user_objects = 0, green_contexts = 0, address_ranges = 0, physical_blocks = 0, mappings = 0,
                pushed_contexts = 0, captures = 0;

    friend bool operator==(const inventory&, const inventory&) = default;
};
[[nodiscard]] inventory existing();
/// Whether the device's primary context exists.
[[nodiscard]] bool has_context(int device);
/// The green context that the stream lives in is destroyed, by somebody who doesn't ask: what
/// concerns its streams answers cudaErrorContextIsDestroyed from then on.
void destroy_context_of(cudaStream_t stream);
/// The numbers of the SMs that the stream's work runs on; none for a stream that doesn't exist.
[[nodiscard]] std::set<std::uint32_t> sms_of(cudaStream_t stream);
/// Whether network cards can reach what is mapped there.
[[nodiscard]] bool rdma_capable(const void* p);
/// Of the device's memory, what cudaMalloc, pools and physical blocks took: whole pages.
[[nodiscard]] bytes used(int device);

/// One line for each thing that was left behind or must not happen; empty if all is well. The
/// program fails at its end if it isn't.
[[nodiscard]] std::string findings();
/// `findings`, which are then forgotten, with everything that was left behind.
std::string take_findings();

// --- for kernels that run on the host, see launch.hpp

namespace detail {
/// Enqueues `body`, which takes `length` on the device; counts as a call of cudaLaunchKernelExC. A
/// body that throws is an illegal access. `kernel` names it, and is loaded the first time;
/// `together` for a cooperative launch, whose blocks may wait for others. `touches`: what its
/// arguments point to, so that unmapping that under it is found out.
cudaError_t launch(cudaStream_t stream, const void* kernel, bool together, ns length, std::function<void()> body,
                   std::vector<std::uintptr_t> touches = {});
/// Of a kernel that is loaded, and waits for nobody.
inline cudaError_t launch(cudaStream_t stream, ns length, std::function<void()> body) {
    return launch(stream, nullptr, false, length, std::move(body));
}
[[nodiscard]] options current_options();
}  // namespace detail

}  // namespace standin
