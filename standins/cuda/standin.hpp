// SPDX-License-Identifier: Apache-2.0
// A stand-in for the CUDA runtime, for tests on machines without a GPU. Linked instead of
// libcudart, it implements the calls that the library makes, with memory of this process. Work
// takes its stated time, and tests can inject faults. The stand-in finds objects that a program
// leaks, and calls that a program must not make.
//
//   // session.hpp; checks that nothing leaked
//   standin::session gpu{{.devices = 2, .memory = 64_MiB}};
//   standin::inject({.call = "cudaMalloc", .code = cudaErrorMemoryAllocation, .skip = 3});
//   standin::hold(stream);     ...     standin::let_go(stream);
//
// It models the order within a stream and across events, capture with its three modes, pools with a
// maximum size, virtual memory, green contexts, contexts of cuCtxCreate, sticky errors of a
// context, a device that is reset, fork, and a driver that is unloaded. It doesn't model the speed
// of a device, contention for SMs (streams never slow each other down), or the waits of the
// synchronising default stream.
//
// If CUDA doesn't guarantee a behaviour, the stand-in doesn't show it unless an option asks for it:
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

/// The contexts that a sticky error makes unusable: those of its device, or all of the process.
enum class poison_scope : std::uint8_t { device, process };

/// All devices are alike.
struct options {
    std::uint32_t devices = 2;  // 0: cudaErrorNoDevice
    bytes memory{64 << 20};     // per device
    bytes taken{};              // the part that other processes have
    bytes context{2 << 20};     // the part that a context takes once it exists
    bytes page{2 << 20};        // of virtual memory, and of cudaMalloc beyond half a page; smaller blocks share pages
    bytes small_step{512};      // the step of these smaller blocks
    bytes pool_step{32 << 20};  // pools reserve multiples of this; a maximum size is rounded up
    std::uint32_t sms = 16;
    std::uint32_t sm_step = 8;  // partitions have multiples of this
    std::uint32_t blocks_per_sm = 2;
    int least_priority = 0, greatest_priority = -5;
    int driver_version = 13000;            // 0: cudaErrorInsufficientDriver
    int capability = 90;                   // 80 for 8.0
    bool rdma = true;                      // network cards reach virtual memory that was made for RDMA
    bool stream_memory_operations = true;  // streams wait for words of 64 bits in memory
    bool peers = true;                     // every device reaches every other device
    /// Devices can use atomics on each other's memory and on the host's. Over PCIe they can't.
    /// (Programming Guide, "Peer-to-Peer Memory Access".) With false, a compiled kernel that needs
    /// such atomics is a finding.
    bool peer_atomics = false;
    timing time = timing::automatic;
    ns synchronous_copy{};  // how long a synchronous copy or fill takes on the device
    poison_scope scope = poison_scope::device;
    std::size_t log_capacity = 4096;  // calls

    // Behaviour that CUDA doesn't guarantee, but that some machines show.

    /// cudaEventElapsedTime reports a fault. (Runtime API, cudaEventElapsedTime: it may only report
    /// that an event isn't complete.)
    bool elapsed_reports_faults = false;
    /// Launches, copies and records report the failure of an earlier kernel before any thread has
    /// waited for its end or queried it. (Runtime API, "Error Handling": asynchronous errors may be
    /// reported by any later call.)
    bool prompt_errors = false;
    /// Making events, streams or memory doesn't wait for running kernels that wait for other
    /// kernels.
    bool creation_beside_spinning = false;
    /// Kernels are loaded before their first use. (Programming Guide, "Lazy Loading", "Concurrent
    /// Execution": loading a kernel may wait for running kernels.)
    bool eager_loading = false;
    /// Loading a kernel waits for all work of its device. A kernel is loaded at its first launch
    /// or, if a capture has recorded it, when the graph is instantiated or updated. (Programming
    /// Guide, as above.)
    bool loading_waits = false;
    /// The number of a device's hardware queues, which its streams share. Work that waits in a
    /// queue blocks later work in the same queue, even of other streams. (Programming Guide,
    /// CUDA_DEVICE_MAX_CONNECTIONS: 8 by default.)
    std::uint32_t connections = 8;
    /// Asynchronous copies from and to pageable memory return only when they are over. (Runtime
    /// API, "API synchronization behavior": such a copy may be synchronous.)
    bool pageable_copies_wait = false;
};

/// Starts with an empty machine: all existing objects are gone. If findings remain that no test has
/// taken, the program fails at its end. No other thread may be inside a call.
void reset(const options& o = {});

// --- time

/// The time since the reset.
[[nodiscard]] ns now();
/// With manual timing, moves the clock forward, and does the work that is due by then.
void advance(ns step);
/// From hold() on, no work on the stream begins until let_go() is called.
void hold(cudaStream_t stream);
void let_go(cudaStream_t stream);

// --- faults

/// After `skip` more calls of this name, the next `times` fail with `code` and do nothing else.
struct fault {
    std::string call;  // "cudaMalloc", "cuMemCreate"; empty: any call that can fail; calls that free still free
    int code = cudaErrorUnknown;  // a cudaError_t or CUresult: both have the same numbers
    std::uint64_t skip = 0, times = 1;
    bool sticky = false;  // from then on every call on the device returns the code
};
void inject(fault f);
/// The next call of this name first calls `what`, on its thread and under no lock. So a test can
/// change something between two calls of the library.
void before_next(std::string call, std::function<void()> what);
/// The number of injected faults that haven't yet struck as often as requested.
[[nodiscard]] std::size_t faults_left();
/// From now on every call that concerns the device fails with `code`, and its work stands still.
void poison(int device, cudaError_t code);
/// Unloads the driver with all objects, as at the end of a process: from then on every call returns
/// cudaErrorCudartUnloading.
void unload();
/// From now on the driver lacks this entry point, as an older driver does.
void hide_entry_point(std::string name);

// --- what happened

struct call {
    const char* name = "";
    const void* stream = nullptr;  // null if the call names no stream
    std::thread::id thread{};
    int result = 0;
};
/// The latest calls, the oldest first.
[[nodiscard]] std::vector<call> calls();
/// The number of calls of this name since the reset or `forget_calls`.
[[nodiscard]] std::uint64_t count(std::string_view name);
[[nodiscard]] std::uint64_t count_all();
void forget_calls();

/// The objects that exist now and haven't been freed.
struct inventory {
    std::size_t streams = 0, events = 0, pools = 0, allocations = 0, host_allocations = 0, graphs = 0, executables = 0,
                user_objects = 0, green_contexts = 0, address_ranges = 0, physical_blocks = 0, mappings = 0,
                pushed_contexts = 0, captures = 0;

    friend bool operator==(const inventory&, const inventory&) = default;
};
[[nodiscard]] inventory existing();
/// Whether the device's primary context exists.
[[nodiscard]] bool has_context(int device);
/// Destroys the stream's green context, as another owner might. From then on calls that concern its
/// streams return cudaErrorContextIsDestroyed.
void destroy_context_of(cudaStream_t stream);
/// The numbers of the SMs on which the stream's work runs; empty for a stream that doesn't exist.
[[nodiscard]] std::set<std::uint32_t> sms_of(cudaStream_t stream);
/// Whether network cards can reach the memory that is mapped there.
[[nodiscard]] bool rdma_capable(const void* p);
/// The device memory that cudaMalloc, pools and physical blocks take, in whole pages.
[[nodiscard]] bytes used(int device);

/// One line for each leaked object and each forbidden call; empty if there are none. If there are
/// any, the program fails at its end.
[[nodiscard]] std::string findings();
/// Returns `findings`, and then forgets them and all leaked objects.
std::string take_findings();

// --- for kernels that run on the host, see launch.hpp

namespace detail {
/// Enqueues `body`, which takes `length` on the device; counts as a call of cudaLaunchKernelExC. A
/// body that throws counts as an illegal access. `kernel` identifies the kernel, which is loaded at
/// its first launch. With `together`, this is a cooperative launch, whose blocks may wait for each
/// other. `touches` has the addresses to which the kernel's arguments point, so that the stand-in
/// finds a program that unmaps memory in use.
cudaError_t launch(cudaStream_t stream, const void* kernel, bool together, ns length, std::function<void()> body,
                   std::vector<std::uintptr_t> touches = {});
/// The same for a kernel that is loaded already and waits for no other kernel.
inline cudaError_t launch(cudaStream_t stream, ns length, std::function<void()> body) {
    return launch(stream, nullptr, false, length, std::move(body));
}
[[nodiscard]] options current_options();
}  // namespace detail

}  // namespace standin
