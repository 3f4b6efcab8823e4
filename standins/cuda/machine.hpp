// SPDX-License-Identifier: Apache-2.0
// The machine inside the stand-in, which owns all objects, and the functions through which every
// call goes.
//
//   extern "C" cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) {
//       return on_stream({"cudaStreamGetPriority"}, s, [&](machine&, stream& on) { ... return cudaSuccess; });
//   }
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
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

/// What CUDA keeps per thread.
struct thread_state {
    std::uint64_t generation = 0;                      // of the machine that it is about
    std::vector<std::shared_ptr<context>> contexts{};  // the last is current
    cudaError_t last_error = cudaSuccess;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    std::map<int, std::shared_ptr<stream>> own_streams{};  // by device, once it has used them
};

/// What a call is like, beside its name.
struct call_info {
    const char* name = "";
    bool always = false;   // answers without a driver and without devices
    bool unsafe = false;   // "potentially unsafe": forbidden during some captures
    bool returns = false;  // gives something back, so it is done even where an error sticks
    bool silent = false;   // leaves nothing for cudaGetLastError
    bool bare = false;     // of the runtime, but makes no context current
    bool looks = false;    // says what went wrong on the device meanwhile
    bool makes = false;    // may wait for the device: see options::creation_beside_spinning
};

/// Everything happens under the mutex, the effects of work included: they mustn't call CUDA. Work
/// is done by whoever calls next, once its time has come.
struct machine {
    explicit machine(const options& o);
    machine(const machine&) = delete;
    machine& operator=(const machine&) = delete;
    ~machine();

    // machine.cpp: time, work, errors

    [[nodiscard]] ns now() const;
    void run();
    void enqueue(stream& on, operation op);
    /// Until `done()`; false if nothing can change any more that isn't for another thread to
    /// change, and none does.
    template <class Done>
    [[nodiscard]] bool wait(const char* who, Done done);
    void poison(int device, cudaError_t code);
    /// The code of the fault that strikes the call, and whether it does its work all the same.
    struct blow {
        cudaError_t code = cudaSuccess;
        bool works = true;
    };
    [[nodiscard]] blow strike(const call_info& info);
    /// A finding if kernels of the device wait for what may never come while `who` waits for them.
    void find_spinning(int device, const char* who);
    /// The kernel is loaded, which may wait for what runs. False if it waited in vain.
    [[nodiscard]] bool load(int device, const void* kernel, const char* who);
    /// The same for a graph's kernels.
    [[nodiscard]] bool load(int device, const std::vector<operation>& nodes, const char* who);
    void log(const char* call, const void* stream, int result);
    void find(std::string what);

    thread_state& thread();
    [[nodiscard]] CUcontext context_of_thread();  // that it has, or that the runtime gives it
    std::shared_ptr<context> current();           // the primary context of device 0 if there is none yet
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
    /// Null for a handle of none; for the default stream's one that stands for it, and a finding.
    std::shared_ptr<stream> find_stream(const char* who, cudaStream_t handle);
    /// What the handle stands for; null, and a finding, for one that was destroyed: what a driver
    /// makes of such a handle is undefined. (Runtime API, cudaStreamDestroy, cudaEventDestroy,
    /// cudaGraphExecDestroy and others.)
    template <class T, class Handle>
    [[nodiscard]] std::shared_ptr<T> look_up(const table<T>& in, Handle h, const char* who) {
        auto found = in.find(h);
        const auto number = reinterpret_cast<std::uintptr_t>(h);
        if (found == nullptr && number > first_handle && number <= last_handle && !reset_away.contains(number))
            find(std::string(who) + " of something that was destroyed");
        return found;
    }
    /// The legacy stream waits for the streams that capture and synchronise with it, which it
    /// can't: those captures are over. (Runtime API, cudaStreamLegacy and
    /// cudaErrorStreamCaptureImplicit.)
    [[nodiscard]] bool capture_in_the_way(const stream& legacy, const char* who);
    /// What cudaDeviceReset does.
    void reset_device(int d);
    /// Work on it isn't done. Of streams that were destroyed too.
    [[nodiscard]] bool has_work(const stream& s) const { return !s.queue.empty(); }

    // graph.cpp

    /// Whether a capture forbids this thread an unsafe call, which then invalidates that capture.
    [[nodiscard]] bool capture_forbids(const char* who);
    void invalidate(capture& c, const char* who);

    // memory.cpp

    [[nodiscard]] std::uint64_t used_memory(int device);
    [[nodiscard]] std::uint64_t free_memory(int device);
    /// Where such a block of cudaMalloc is counted, and for how much.
    struct bill {
        std::uint64_t device_state::*account = nullptr;
        std::uint64_t amount = 0;
    };
    [[nodiscard]] bill price(std::size_t size) const;
    /// Whose memory an address is, and who may use it.
    struct place {
        int device = -1;           // -1: the host's
        bool peers_alone = false;  // of cudaMalloc: for devices with peer access
        std::set<int> open_to{};   // else for these
        bool pooled = false;
    };
    [[nodiscard]] place place_of(const void* p) const;
    /// Memory of the host's that CUDA doesn't know.
    [[nodiscard]] bool is_pageable(const void* p) const;
    /// Whether kernels and copies of the device may use it.
    [[nodiscard]] bool reaches(int from, const place& p) const;
    /// Null if the host has no memory. The block isn't charged.
    void* take(block b);
    void give_back(std::uintptr_t at);
    void trim(pool& p, std::uint64_t keep);
    /// What pools hold above their threshold goes back whenever somebody synchronises.
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
    std::vector<std::shared_ptr<stream>> busy;  // those with work, destroyed ones too
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
    std::set<std::uintptr_t> reset_away;  // handles that went with their context
    table<context> user_contexts;
    bool unloaded = false;
    const int process;  // that it was made in: a child has none of it
    std::uint64_t last_id = 0;
    std::map<std::uintptr_t, ns> words_written;  // by streams: when, last

    /// What is to come before this call, once; without the lock meanwhile.
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
    /// Whether 64 bits there are the host's pinned memory.
    [[nodiscard]] bool is_pinned(std::uintptr_t at) const;

private:
    [[nodiscard]] ns next_end();
    void wait_for_change(ns end);

    bool news_ = false;  // something has begun
    ns looked_{};        // when run() was called, last
};

/// Says so to the engine.
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

/// It was told that something is over.
inline void host_saw() {
    if (the_engine() != nullptr) the_engine()->host_saw();
}

/// The first call of the process makes it.
[[nodiscard]] machine& the_machine();
/// A new one in its place, while nobody is inside a call.
void restart(const options& o);
/// The safety net under tests that don't look for themselves: ends the program if there are
/// findings.
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

/// The frame of every call: body(machine&) under the mutex, unless there is no driver or a fault
/// strikes.
template <class Body>
cudaError_t enter(const call_info& info, const void* stream, Body body) {
    machine& m = the_machine();
    // Programming Guide, "Initialization", and fork(): a child can't use what its parent has
    // initialised. The answer comes before the mutex: a thread of the parent may have held the
    // mutex at the fork, and the child lacks that thread.
    if (m.process != ::getpid()) return cudaErrorInitializationError;
    std::unique_lock lock(m.mutex);
    if (!m.interruptions.empty()) [[unlikely]]
        m.interrupt(info.name, lock);
    cudaError_t result = cudaSuccess;
    // At the end of the process the driver may be gone before static objects are. (Runtime API,
    // cudaErrorCudartUnloading.)
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
        // The runtime makes a context current for a thread that has none: that of device 0, unless
        // it chose another one. (Programming Guide, "Initialization".) The driver's functions make
        // none, but for those that are for that: those that need one say that there is none.
        // (Driver API, CUDA_ERROR_INVALID_CONTEXT.)
        if (!info.bare && !m.devices.empty() && std::string_view(info.name).starts_with("cuda")) (void)m.current();
        if (!m.busy.empty()) m.run();
        const cudaError_t own = body(m);
        if (result == cudaSuccess) result = own;
    }
    // The driver's functions have no such memory.
    const bool remembered = !info.silent && std::string_view(info.name).starts_with("cuda");
    if (result != cudaSuccess && remembered) m.thread().last_error = result;
    m.log(info.name, stream, result);
    return result;
}

/// A call that concerns a device: fails where an error sticks, and where a capture forbids it.
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

/// body(machine&, int device) with the current device, whose context exists from then on.
template <class Body>
cudaError_t on_device(const call_info& info, Body body) {
    return enter(info, nullptr, [&](machine& m) {
        const int current = m.current()->device;
        return concerning(m, current, info, [&] { return body(m, current); });
    });
}

/// body(machine&, stream&)
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

/// What any launch does, under the name of cudaLaunchKernelExC.
cudaError_t enqueue_kernel(cudaStream_t s, const void* kernel, operation op);  // stream.cpp
/// What the runtime's and the driver's function of that purpose do, under the name of either.
cudaError_t query(const char* name, cudaEvent_t handle);                                      // stream.cpp
cudaError_t query(const char* name, cudaStream_t handle);                                     // stream.cpp
cudaError_t record(const char* name, cudaEvent_t e, cudaStream_t s);                          // stream.cpp
cudaError_t elapsed_time(const char* name, float* ms, cudaEvent_t from, cudaEvent_t to);      // stream.cpp
cudaError_t is_capturing(const char* name, cudaStream_t s, cudaStreamCaptureStatus* status);  // graph.cpp
cudaError_t exchange_mode(const char* name, cudaStreamCaptureMode* mode);                     // graph.cpp

/// body(machine&, event&)
template <class Body>
cudaError_t on_event(const call_info& info, cudaEvent_t handle, Body body) {
    return enter(info, nullptr, [&](machine& m) {
        const auto on = m.look_up(m.events, handle, info.name);
        if (on == nullptr) return cudaErrorInvalidResourceHandle;
        return concerning(m, on->in->device, info, [&] { return body(m, *on); });
    });
}

}  // namespace standin::detail
