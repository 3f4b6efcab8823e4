// SPDX-License-Identifier: Apache-2.0
// The machine inside the stand-in, which owns all objects, and the functions that implement what
// all calls have in common.
//
//   extern "C" cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) {
//       return on_stream({"cudaStreamGetPriority"}, s, [&](machine&, stream& on) { ... return cudaSuccess; });
//   }
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "objects.hpp"
#include "standin.hpp"

namespace standin::detail {

/// The state that CUDA keeps for each thread.
struct thread_state {
    std::uint64_t generation = 0;                      // of the machine to which it belongs
    std::vector<std::shared_ptr<context>> contexts{};  // the last is current
    cudaError_t last_error = cudaSuccess;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    std::map<int, std::shared_ptr<stream>> own_streams{};  // per-thread default streams that were used
};

/// A call's name and properties.
struct call_info {
    const char* name = "";
    bool always = false;   // works without a driver and without devices
    bool unsafe = false;   // "potentially unsafe": forbidden during some captures
    bool returns = false;  // frees something, so it works even on a device with a sticky error
    bool silent = false;   // leaves nothing for cudaGetLastError
    bool bare = false;     // a runtime call that makes no context current
    bool looks = false;    // reports errors of earlier work on the device
    bool makes = false;    // may wait for the device; see options::creation_beside_spinning
};

/// How many forks led to this process since the first machine was made. A handler of forks counts
/// them, because getpid() in every call would take longer than the rest of the call.
inline std::atomic<std::uint32_t> forks{0};

/// Everything happens under the mutex, including the effects of work, which therefore must not call
/// CUDA. When work is due, the next call of any thread does it.
struct machine {
    explicit machine(const options& o);
    machine(const machine&) = delete;
    machine& operator=(const machine&) = delete;
    ~machine();

    // machine.cpp: time, work, errors

    [[nodiscard]] ns now() const;
    void run();
    void enqueue(stream& on, operation op);
    /// Waits until `done()`. Returns false if no work can go on by itself, and no other thread
    /// changes anything for a long time.
    template <class Done>
    [[nodiscard]] bool wait(const char* who, Done done);
    void poison(int device, cudaError_t code);
    /// The code of the fault that strikes a call, and whether the call does its work nevertheless.
    struct blow {
        cudaError_t code = cudaSuccess;
        bool works = true;
    };
    [[nodiscard]] blow strike(const call_info& info);
    /// Records a finding if `who` would wait for kernels of the device that may themselves wait for
    /// other kernels for ever.
    void find_spinning(int device, const char* who);
    /// Loads the kernel, which may wait for running work. Returns false if it waited in vain.
    [[nodiscard]] bool load(int device, const void* kernel, const char* who);
    /// The same for a graph's kernels.
    [[nodiscard]] bool load(int device, const std::vector<operation>& nodes, const char* who);
    void log(const char* call, const void* stream, int result);
    void find(std::string what);

    thread_state& thread();
    [[nodiscard]] CUcontext context_of_thread();  // the current context, or else the runtime's
    std::shared_ptr<context> current();           // by default the primary context of device 0
    std::shared_ptr<context> primary(int device);
    [[nodiscard]] static std::uint64_t new_context_id() noexcept;
    std::shared_ptr<context> new_context(int device);
    [[nodiscard]] device_state& device(int d) { return devices[static_cast<std::size_t>(d)]; }
    [[nodiscard]] bool has_device(int d) const { return d >= 0 && static_cast<std::size_t>(d) < devices.size(); }
    template <class Handle>
    [[nodiscard]] Handle new_handle() {
        last_handle += 16;
        if constexpr (std::is_pointer_v<Handle>)
            return reinterpret_cast<Handle>(last_handle);
        else
            return last_handle;
    }

    // stream.cpp

    cudaStream_t open_stream(const std::shared_ptr<context>& in, int priority);
    /// Returns null for an invalid handle. For the default stream's handle, returns a stream in its
    /// place and records a finding.
    std::shared_ptr<stream> find_stream(const char* who, cudaStream_t handle);
    /// The object of the handle. For a destroyed object, returns null and records a finding, since
    /// the driver's behaviour is then undefined. (Runtime API, cudaStreamDestroy, cudaEventDestroy,
    /// cudaGraphExecDestroy and others.)
    template <class T, class Handle>
    [[nodiscard]] std::shared_ptr<T> look_up(const table<T>& in, Handle h, const char* who) {
        auto found = in.find(h);
        const auto number = reinterpret_cast<std::uintptr_t>(h);
        if (found == nullptr && number > first_handle && number <= last_handle && !reset_away.contains(number))
            find(std::string(who) + " of something that was destroyed");
        return found;
    }
    /// Whether streams that synchronise with the legacy stream are being captured. The legacy
    /// stream can't wait for these, so such captures become invalid. (Runtime API, cudaStreamLegacy
    /// and cudaErrorStreamCaptureImplicit.)
    [[nodiscard]] bool capture_in_the_way(const stream& legacy, const char* who);
    /// Implements cudaDeviceReset.
    void reset_device(int d);
    /// Whether the stream has unfinished work, even if it was destroyed.
    [[nodiscard]] bool has_work(const stream& s) const { return !s.queue.empty(); }

    // graph.cpp

    /// Whether a capture forbids an unsafe call to this thread. If so, the call invalidates that
    /// capture.
    [[nodiscard]] bool capture_forbids(const char* who);
    void invalidate(capture& c, const char* who);

    // memory.cpp

    [[nodiscard]] std::uint64_t used_memory(int device);
    [[nodiscard]] std::uint64_t free_memory(int device);
    /// The account to which a block of cudaMalloc is charged, and the amount.
    struct bill {
        std::uint64_t device_state::*account = nullptr;
        std::uint64_t amount = 0;
    };
    [[nodiscard]] bill price(std::size_t size) const;
    /// The owner of the memory at an address, and the devices that may use it.
    struct place {
        int device = -1;           // -1: the host
        bool peers_alone = false;  // memory of cudaMalloc: for devices with peer access
        std::set<int> open_to{};   // other memory: for these devices
        bool pooled = false;
    };
    [[nodiscard]] place place_of(const void* p) const;
    /// Whether the address is host memory that CUDA doesn't know.
    [[nodiscard]] bool is_pageable(const void* p) const;
    /// Whether kernels and copies of device `from` may use it.
    [[nodiscard]] bool reaches(int from, const place& p) const;
    /// Allocates memory for the block and doesn't charge it. Null if the host has no memory.
    void* take(block b);
    void give_back(std::uintptr_t at);
    void trim(pool& p, std::uint64_t keep);
    /// At each synchronisation, pools give back the memory that they hold above their threshold.
    void trim_all();

    const options chosen;
    const std::uint64_t generation;
    std::mutex mutex;
    std::condition_variable changed;

    std::vector<device_state> devices;
    table<stream> streams;
    table<event> events;
    table<graph> graphs;
    table<executable> executables;
    table<pool> pools;
    table<user_object> user_objects_of_callers;
    table<context> green_contexts;
    table<physical> physicals;
    std::vector<std::shared_ptr<stream>> busy;  // streams with work, including destroyed ones
    std::vector<std::shared_ptr<capture>> captures;
    std::map<std::uintptr_t, block> blocks;
    std::map<std::uintptr_t, std::size_t> reserved;  // addresses
    std::map<std::uintptr_t, mapping> mapped;
    std::size_t pushed = 0;                                                             // contexts, by all threads
    std::map<CUdevResourceDesc, std::pair<int, std::set<std::uint32_t>>> descriptions;  // device and SMs

    std::vector<fault> faults;
    std::vector<std::pair<std::string, std::function<void()>>> interruptions;  // see before_next()
    std::set<std::string, std::less<>> hidden;
    std::vector<std::string> findings;
    std::vector<call> ring;
    std::uint64_t logged = 0;
    std::unordered_map<std::string_view, std::uint64_t> counts;

    ns manual_now{};
    const std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
    static constexpr std::uintptr_t first_handle = 0x10000;
    std::uintptr_t last_handle = first_handle;
    std::set<std::uintptr_t> reset_away;  // handles of objects that a reset of their device destroyed
    table<context> user_contexts;
    bool unloaded = false;
    const std::uint32_t process = forks.load(std::memory_order_relaxed);  // a child can't use its parent's machine
    std::uint64_t last_id = 0;
    std::map<std::uintptr_t, ns> words_written;  // when streams last wrote each word

    /// Whether a parent of this process made the machine.
    [[nodiscard]] bool is_parents() const noexcept { return process != forks.load(std::memory_order_relaxed); }
    /// Calls the function of before_next() for this call, once, with the lock released.
    void interrupt(std::string_view call, std::unique_lock<std::mutex>& lock) {
        const auto at = std::ranges::find(interruptions, call, [](const auto& i) { return std::string_view(i.first); });
        if (at == interruptions.end()) return;
        const auto what = std::move(at->second);
        interruptions.erase(at);
        lock.unlock();
        what();
        lock.lock();
    }

private:
    [[nodiscard]] bool step(stream& s, ns until);
    [[nodiscard]] bool run_kernel(stream& s);
    [[nodiscard]] std::optional<ns> begin_of(stream& s);
    [[nodiscard]] std::optional<ns> passes(operation& waits);

public:
    /// Whether the 64 bits there are pinned host memory.
    [[nodiscard]] bool is_pinned(std::uintptr_t at) const;

private:
    [[nodiscard]] ns next_end();
    void wait_for_change(ns end);

    bool news_ = false;  // some work has begun
    ns looked_{};        // the time of the latest run()
};

/// Tells the engine that the host waits, while this object exists.
class waiting_host {
public:
    waiting_host() { say(true); }
    waiting_host(const waiting_host&) = delete;
    waiting_host& operator=(const waiting_host&) = delete;
    ~waiting_host() { say(false); }

private:
    static void say(bool waits) {
        if (the_engine() != nullptr) the_engine()->host_waits = waits;
    }
};

/// Tells the engine that the host has seen the end of some work.
inline void host_saw() {
    if (the_engine() != nullptr) the_engine()->host_saw();
}

/// The process's machine, made by the first call.
[[nodiscard]] machine& the_machine();
/// Replaces the machine by a new one. No thread may be inside a call.
void restart(const options& o);
/// A safety net for tests that don't check findings themselves: fails the program at its exit if
/// there are any.
void check_at_exit();

template <class Done>
bool machine::wait(const char* who, Done done) {
    const waiting_host waits;
    constexpr auto patience = std::chrono::seconds(20);
    auto give_up = std::chrono::steady_clock::now() + patience;
    for (run(); !done(); run()) {
        const ns end = next_end();
        if (end != ns::max()) give_up = std::chrono::steady_clock::now() + patience;
        if (std::chrono::steady_clock::now() > give_up) {
            find(std::string(who) + " waited for work that nobody lets go on");
            return false;
        }
        wait_for_change(end);
    }
    trim_all();
    host_saw();
    return true;
}

/// The frame of every call. Calls body(machine&) under the mutex, unless there is no driver or a
/// fault strikes the call.
template <class Body>
cudaError_t enter(const call_info& info, const void* stream, Body body) {
    machine& m = the_machine();
    // Programming Guide, "Initialization", and fork(): a child can't use CUDA if its parent has
    // initialised it. This check comes before the mutex is taken: a thread of the parent may have
    // held the mutex at the fork, and the child lacks that thread.
    if (m.is_parents()) return cudaErrorInitializationError;
    std::unique_lock lock(m.mutex);
    if (!m.interruptions.empty()) [[unlikely]]
        m.interrupt(info.name, lock);
    cudaError_t result = cudaSuccess;
    // At the end of the process, the driver may be unloaded before static objects are destroyed.
    // (Runtime API, cudaErrorCudartUnloading.)
    if (m.unloaded) result = cudaErrorCudartUnloading;
    if (!info.always && result == cudaSuccess) {
        if (m.chosen.driver_version == 0)
            result = cudaErrorInsufficientDriver;
        else if (m.devices.empty())
            result = cudaErrorNoDevice;
    }
    const auto struck = result == cudaSuccess ? m.strike(info) : machine::blow{result, false};
    result = struck.code;
    if (struck.works) {
        // For a thread without a context, the runtime makes the primary context of device 0
        // current, or that of the device that the thread chose. (Programming Guide,
        // "Initialization".) Driver functions make no context, except for those whose purpose that
        // is. A driver function that needs a context fails without one. (Driver API,
        // CUDA_ERROR_INVALID_CONTEXT.)
        if (!info.bare && !m.devices.empty() && std::string_view(info.name).starts_with("cuda")) (void)m.current();
        if (!m.busy.empty()) m.run();
        const cudaError_t own = body(m);
        if (result == cudaSuccess) result = own;
    }
    // Driver functions don't remember errors.
    const bool remembered = !info.silent && std::string_view(info.name).starts_with("cuda");
    if (result != cudaSuccess && remembered) m.thread().last_error = result;
    m.log(info.name, stream, result);
    return result;
}

/// A call that concerns a device. Fails if the device has a sticky error, or if a capture forbids
/// the call.
template <class Body>
cudaError_t concerning(machine& m, int device, const call_info& info, Body body) {
    auto& d = m.device(device);
    d.told |= d.sticky != cudaSuccess && (info.looks || m.chosen.prompt_errors);
    const cudaError_t stuck = d.told ? d.sticky : cudaSuccess;
    if (stuck != cudaSuccess && !info.returns) return stuck;
    if (info.makes) m.find_spinning(device, info.name);
    if (stuck == cudaSuccess && info.unsafe && m.capture_forbids(info.name)) return cudaErrorStreamCaptureUnsupported;
    const cudaError_t result = body();
    return stuck != cudaSuccess ? stuck : result;
}

/// Calls body(machine&, int device) with the current device, whose context exists from then on.
template <class Body>
cudaError_t on_device(const call_info& info, Body body) {
    return enter(info, nullptr, [&](machine& m) {
        const int current = m.current()->device;
        return concerning(m, current, info, [&] { return body(m, current); });
    });
}

/// Calls body(machine&, stream&) for a valid handle.
template <class Body>
cudaError_t on_stream(const call_info& info, cudaStream_t handle, Body body) {
    return enter(info, handle, [&](machine& m) {
        const auto on = m.find_stream(info.name, handle);
        if (on == nullptr) return cudaErrorInvalidResourceHandle;
        if (on->handle == nullptr && m.capture_in_the_way(*on, info.name)) return cudaErrorStreamCaptureImplicit;
        if (on->in->destroyed && !info.returns) return cudaErrorContextIsDestroyed;
        return concerning(m, on->in->device, info, [&] { return body(m, *on); });
    });
}

/// Implements all launches, under the name of cudaLaunchKernelExC.
cudaError_t enqueue_kernel(cudaStream_t s, const void* kernel, operation op);  // stream.cpp
/// Each of these implements a function of the runtime and the driver's function for the same
/// purpose. `name` is the name of the function that was called.
cudaError_t query(const char* name, cudaEvent_t handle);                                      // stream.cpp
cudaError_t query(const char* name, cudaStream_t handle);                                     // stream.cpp
cudaError_t record(const char* name, cudaEvent_t e, cudaStream_t s);                          // stream.cpp
cudaError_t elapsed_time(const char* name, float* ms, cudaEvent_t from, cudaEvent_t to);      // stream.cpp
cudaError_t is_capturing(const char* name, cudaStream_t s, cudaStreamCaptureStatus* status);  // graph.cpp
cudaError_t exchange_mode(const char* name, cudaStreamCaptureMode* mode);                     // graph.cpp

/// Calls body(machine&, event&) for a valid handle.
template <class Body>
cudaError_t on_event(const call_info& info, cudaEvent_t handle, Body body) {
    return enter(info, nullptr, [&](machine& m) {
        const auto on = m.look_up(m.events, handle, info.name);
        if (on == nullptr) return cudaErrorInvalidResourceHandle;
        return concerning(m, on->in->device, info, [&] { return body(m, *on); });
    });
}

}  // namespace standin::detail
