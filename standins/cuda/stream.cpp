// SPDX-License-Identifier: Apache-2.0
// The calls for streams, events and copies, and launches of kernels that run on the host.
#include <algorithm>
#include <cstring>

#include "cupti.hpp"
#include "machine.hpp"

namespace standin {

using namespace detail;

namespace detail {

cudaStream_t machine::open_stream(const std::shared_ptr<context>& in, int priority) {
    const auto s = std::make_shared<stream>();
    s->handle = new_handle<cudaStream_t>();
    s->id = ++last_id;
    s->in = in;
    s->connection = device(in->device).streams_made++ % std::max(1U, chosen.connections);
    // The runtime clamps priorities to its range.
    s->priority = std::clamp(priority, chosen.greatest_priority, chosen.least_priority);
    ++in->streams;
    streams.add(s->handle, s);
    return s->handle;
}

std::shared_ptr<stream> machine::find_stream(const char* who, cudaStream_t handle) {
    if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread)
        return look_up(streams, handle, who);
    find(std::string(who) + " on the default stream");
    const int d = current()->device;
    auto& stand_in = handle == cudaStreamPerThread ? thread().own_streams[d] : device(d).default_stream;
    if (stand_in == nullptr) {
        stand_in = std::make_shared<stream>();
        stand_in->id = ++last_id;
        stand_in->in = current();
        if (handle == cudaStreamPerThread)
            stand_in->connection = device(d).streams_made++ % std::max(1U, chosen.connections);
    }
    return stand_in;
}

bool machine::capture_in_the_way(const stream& legacy, const char* who) {
    bool any = false;
    for (const auto& c : captures)
        for (const auto* const s : c->streams) {
            if (!s->blocking || s->in->device != legacy.in->device) continue;
            any = true;
            // cudaStreamIsCapturing reports this, "and the blocking stream capture is not
            // invalidated".
            if (!std::string_view(who).ends_with("StreamIsCapturing")) invalidate(*c, who);
        }
    return any;
}

}  // namespace detail

namespace {

/// A stream that is being captured can't be queried or awaited; the attempt invalidates the
/// capture.
bool captures(machine& m, stream& s, const char* who) {
    if (s.recording == nullptr) return false;
    m.invalidate(*s.recording, who);
    return true;
}

range range_of(const void* p, std::size_t size) { return {reinterpret_cast<std::uintptr_t>(p), size}; }

operation copying(void* to, const void* from, std::size_t size) {
    const auto copy = [=] { std::memmove(to, from, size); };
    return {.effect = copy, .writes = range_of(to, size), .reads = range_of(from, size)};
}

/// A copy whose source may change once the call has returned.
operation copying_staged(void* to, const void* from, std::size_t size) {
    const auto* const begin = static_cast<const char*>(from);
    const auto staged = std::make_shared<const std::vector<char>>(begin, begin + size);
    return {.effect = [=] { std::memcpy(to, staged->data(), size); }, .writes = range_of(to, size)};
}

/// Whether the stream may copy from or to this address. Memory of cudaMalloc can be copied between
/// any devices, if need be through the host. (Runtime API, cudaMemcpyDefault: unified virtual
/// addressing tells where a pointer points.) Memory of pools and virtual memory can be copied only
/// if it is accessible to the stream's device and to the current device. (Programming Guide,
/// "Stream-Ordered Memory Allocator", "Device Accessibility for Multi-GPU Support"; observed in
/// NVIDIA's bug 3446335, llama.cpp, pull request 4620.)
bool copies(const machine& m, const void* p, const stream& on, int current) {
    const auto where = m.place_of(p);
    return where.peers_alone || (m.reaches(on.in->device, where) && m.reaches(current, where));
}

/// When a synchronous copy or fill returns. (Runtime API, "API synchronization behavior".)
enum class returns : std::uint8_t {
    once_enqueued,  // a copy from device to device, and a fill of device memory
    once_staged,    // a copy from pageable memory to a device; waits for the stream first
    when_over,
};
returns when_copied(const machine& m, const void* to, const void* from) {
    if (m.place_of(to).device < 0) return returns::when_over;
    if (m.place_of(from).device >= 0) return returns::once_enqueued;
    return m.is_pageable(from) ? returns::once_staged : returns::when_over;
}
returns when_filled(const machine& m, const void* to) {
    return m.place_of(to).device < 0 ? returns::when_over : returns::once_enqueued;
}

/// The streams with work for which the legacy stream waits.
std::vector<std::shared_ptr<stream>> before_legacy(const machine& m, const stream& legacy) {
    std::vector<std::shared_ptr<stream>> all;
    for (const auto& s : m.busy)
        if (s->blocking && s->in->device == legacy.in->device && m.has_work(*s)) all.push_back(s);
    return all;
}

/// Enqueues the operation that make() returns, behind the streams for which the legacy stream
/// waits.
template <class Make>
cudaError_t in_legacy_stream(const char* name, machine& m, stream& on, returns when, Make make) {
    if (when == returns::once_enqueued) {
        for (const auto& s : before_legacy(m, on)) {
            const auto passed = std::make_shared<mark>(mark{.device = on.in->device});
            m.enqueue(*s, {.reaches = passed});
            m.enqueue(on, {.awaited = passed});
        }
    } else if (!m.wait(name, [&] { return before_legacy(m, on).empty() && !m.has_work(on); })) {
        return cudaErrorUnknown;
    }
    operation op = make();
    op.length = m.chosen.synchronous_copy;
    m.enqueue(on, std::move(op));
    m.run();  // in an idle stream the operation is over at once
    if (when != returns::when_over) return cudaSuccess;
    return m.wait(name, [&] { return !m.has_work(on); }) ? cudaSuccess : cudaErrorUnknown;
}

/// Whether the event's last recording lies in a capture, which the call then invalidates.
bool captured(machine& m, const event& e, const char* who) {
    if (e.last == nullptr || e.last->captured == nullptr) return false;
    m.invalidate(*e.last->captured, who);
    return true;
}

}  // namespace

// CUPTI sees polls through the runtime and through the driver, so both call the subscriber back.
cudaError_t detail::query(const char* name, cudaEvent_t handle) {
    const cuEventQuery_params told{handle};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuEventQuery, "cuEventQuery", told, [&] {
        return on_event({.name = name, .unsafe = true, .looks = true}, handle, [&](machine& m, event& e) {
            if (captured(m, e, name)) return cudaErrorCapturedEvent;
            if (e.last != nullptr && !e.last->reached) return cudaErrorNotReady;
            host_saw();
            return cudaSuccess;
        });
    });
}

cudaError_t detail::query(const char* name, cudaStream_t handle) {
    const cuStreamQuery_params told{handle};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuStreamQuery, "cuStreamQuery", told, [&] {
        return on_stream({.name = name, .unsafe = true, .looks = true}, handle, [&](machine& m, stream& on) {
            if (captures(m, on, name)) return cudaErrorStreamCaptureUnsupported;
            if (m.has_work(on)) return cudaErrorNotReady;
            host_saw();
            return cudaSuccess;
        });
    });
}

cudaError_t detail::elapsed_time(const char* name, float* ms, cudaEvent_t from, cudaEvent_t to) {
    return enter({.name = name}, nullptr, [&](machine& m) {
        // The runtime has made a context current.
        if (m.thread().contexts.empty()) return static_cast<cudaError_t>(CUDA_ERROR_INVALID_CONTEXT);
        const auto found = m.look_up(m.events, from, name);
        if (found == nullptr) return cudaErrorInvalidResourceHandle;
        const event& a = *found;
        const auto b = m.look_up(m.events, to, name);
        if (b == nullptr || a.in->device != b->in->device) return cudaErrorInvalidResourceHandle;
        if (((a.flags | b->flags) & cudaEventDisableTiming) != 0) return cudaErrorInvalidResourceHandle;
        if (a.last == nullptr || b->last == nullptr) return cudaErrorInvalidResourceHandle;
        if (captured(m, a, name) || captured(m, *b, name)) return cudaErrorCapturedEvent;
        if (m.device(a.in->device).sticky != cudaSuccess)
            return m.chosen.elapsed_reports_faults ? m.device(a.in->device).sticky : cudaErrorNotReady;
        if (!a.last->reached || !b->last->reached) return cudaErrorNotReady;
        host_saw();
        *ms = std::chrono::duration<float, std::milli>(b->last->at - a.last->at).count();
        return cudaSuccess;
    });
}

cudaError_t detail::enqueue_kernel(cudaStream_t handle, const void* kernel, operation op) {
    constexpr call_info info{"cudaLaunchKernelExC"};
    const auto dimensions = next_dimensions();
    CUlaunchConfig how{};
    how.gridDimX = dimensions.blocks;
    how.blockDimX = dimensions.threads;
    how.gridDimY = how.gridDimZ = how.blockDimY = how.blockDimZ = 1;
    how.hStream = handle;
    const cuLaunchKernelEx_params told{&how, reinterpret_cast<CUfunction>(const_cast<void*>(kernel)), nullptr, nullptr};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx, "cuLaunchKernelEx", told, [&] {
        return on_stream(info, handle, [&](machine& m, stream& on) {
            // Driver API, cuLaunchKernel: the stream's context must be current; for a stream of a
            // green context, that is the device's primary context.
            const auto now = m.current();
            if (now != on.in && !(on.in->green && now == m.device(on.in->device).primary))
                return cudaErrorInvalidResourceHandle;
            if (on.recording != nullptr && m.chosen.loading_waits)
                op.kernel = kernel;
            else if (!m.load(on.in->device, kernel, info.name))
                return cudaErrorUnknown;
            m.enqueue(on, std::move(op));
            return cudaSuccess;
        });
    });
}

cudaError_t detail::record(const char* name, cudaEvent_t handle, cudaStream_t stream_handle) {
    return on_stream({name}, stream_handle, [&](machine& m, stream& on) {
        const auto e = m.look_up(m.events, handle, name);
        if (e == nullptr) return cudaErrorInvalidResourceHandle;
        // An event belongs to the stream's context or, for a green context, to the device's primary
        // context.
        const auto& primary = m.device(on.in->device).primary;
        if (e->in != on.in && !(on.in->green && e->in == primary)) return cudaErrorInvalidResourceHandle;
        e->last = std::make_shared<mark>(mark{.device = on.in->device});
        if (on.recording != nullptr) {
            if (on.recording->invalid) return cudaErrorStreamCaptureInvalidated;
            e->last->captured = on.recording;
            e->last->seen = on.seen;
        } else {
            m.enqueue(on, {.reaches = e->last});
            m.run();  // on an idle stream the event is reached at once
        }
        return cudaSuccess;
    });
}

cudaError_t detail::launch(cudaStream_t handle, const void* kernel, bool together, ns length,
                           std::function<void()> body, std::vector<std::uintptr_t> touches) {
    return enqueue_kernel(
        handle, kernel,
        {.length = length, .effect = std::move(body), .spins = together, .touches = std::move(touches)});
}

extern "C" {

// ---- streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
    return on_device({.name = "cudaStreamCreateWithPriority", .makes = true}, [&](machine& m, int) {
        if (flags != cudaStreamNonBlocking) m.find("a stream that synchronises with the default stream was created");
        *out = m.open_stream(m.current(), priority);
        m.streams.find(*out)->blocking = flags != cudaStreamNonBlocking;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    const cuStreamDestroy_v2_params told{handle};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuStreamDestroy_v2, "cuStreamDestroy_v2", told, [&] {
        return on_stream({.name = "cudaStreamDestroy", .returns = true}, handle, [&](machine& m, stream& on) {
            if (on.recording != nullptr) m.invalidate(*on.recording, "cudaStreamDestroy");
            --on.in->streams;
            m.streams.remove(handle);  // `busy` keeps the stream until its work is done
            return cudaSuccess;
        });
    });
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
    return on_stream({"cudaStreamGetPriority"}, handle, [&](machine&, stream& on) {
        *priority = on.priority;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
    return on_stream({"cudaStreamGetFlags"}, handle, [&](machine&, stream& on) {
        *flags = on.blocking ? cudaStreamDefault : cudaStreamNonBlocking;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
    return on_stream({"cudaStreamGetDevice"}, handle, [&](machine&, stream& on) {
        *device = on.in->device;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) { return query("cudaStreamQuery", handle); }

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    constexpr call_info info{.name = "cudaStreamSynchronize", .unsafe = true, .looks = true};
    const cuStreamSynchronize_params told{handle};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuStreamSynchronize, "cuStreamSynchronize", told, [&] {
        return on_stream(info, handle, [&](machine& m, stream& on) {
            if (captures(m, on, info.name)) return cudaErrorStreamCaptureUnsupported;
            const auto& device = m.device(on.in->device);
            const auto done = [&] { return !m.has_work(on) || device.sticky != cudaSuccess; };
            return m.wait(info.name, done) ? device.sticky : cudaErrorUnknown;
        });
    });
}

// Runtime API, cudaDeviceSynchronize: "blocks until the device has completed all preceding
// requested tasks". Here, as in cudaFree, the call also waits for tasks that arrive meanwhile,
// since CUDA doesn't promise that it doesn't. The symbol is weak, since tests that link parts of
// libtorch define their own.
[[gnu::weak]] cudaError_t cudaDeviceSynchronize() {
    constexpr call_info info{.name = "cudaDeviceSynchronize", .unsafe = true, .looks = true};
    const auto all_done = [&](machine& m, int d) {
        const auto done = [&] {
            return m.device(d).sticky != cudaSuccess ||
                   std::ranges::none_of(m.busy, [&](const auto& s) { return s->in->device == d; });
        };
        return m.wait(info.name, done) ? m.device(d).sticky : cudaErrorUnknown;
    };
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize, "cuCtxSynchronize", nullptr,
                       [&] { return on_device(info, all_done); });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
    constexpr call_info info{.name = "cudaStreamWaitEvent"};
    return on_stream(info, handle, [&](machine& m, stream& on) {
        const auto e = m.look_up(m.events, event_handle, info.name);
        if (e == nullptr) return cudaErrorInvalidResourceHandle;
        if (e->last == nullptr) return cudaSuccess;
        if (const auto& c = e->last->captured) {
            if (on.recording != nullptr && on.recording != c) {
                m.invalidate(*c, info.name);
                m.invalidate(*on.recording, info.name);
                return cudaErrorStreamCaptureMerge;
            }
            if (c->invalid) return cudaErrorStreamCaptureInvalidated;
            on.recording = c;  // the stream joins the capture
            c->streams.insert(&on);
            for (const auto& [stream, step] : e->last->seen) on.seen[stream] = std::max(on.seen[stream], step);
            ++on.seen[on.id];
            return cudaSuccess;
        }
        if (on.recording != nullptr) {
            m.invalidate(*on.recording, info.name);
            return cudaErrorStreamCaptureIsolation;
        }
        if (!e->last->reached)
            m.enqueue(on, {.awaited = e->last});
        else if (the_engine() != nullptr)
            the_engine()->passed(on.id, e->last.get(), nullptr);
        return cudaSuccess;
    });
}

// ---- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
    return on_device({.name = "cudaEventCreateWithFlags", .makes = true}, [&](machine& m, int) {
        *out = m.new_handle<cudaEvent_t>();
        m.events.add(*out, std::make_shared<event>(event{.in = m.current(), .flags = flags}));
        return cudaSuccess;
    });
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    return on_event({.name = "cudaEventDestroy", .returns = true}, handle, [&](machine& m, event&) {
        m.events.remove(handle);
        return cudaSuccess;
    });
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
    return record("cudaEventRecord", handle, stream_handle);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) { return query("cudaEventQuery", handle); }

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    constexpr call_info info{.name = "cudaEventSynchronize", .unsafe = true, .looks = true};
    const cuEventSynchronize_params told{handle};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuEventSynchronize, "cuEventSynchronize", told, [&] {
        return on_event(info, handle, [&](machine& m, event& e) {
            if (captured(m, e, info.name)) return cudaErrorCapturedEvent;
            if (e.last == nullptr) return cudaSuccess;
            const auto until = e.last;
            const auto& device = m.device(e.in->device);
            const auto done = [&] { return until->reached || device.sticky != cudaSuccess; };
            return m.wait(info.name, done) ? device.sticky : cudaErrorUnknown;
        });
    });
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    return elapsed_time("cudaEventElapsedTime", ms, from, to);
}

// ---- copies

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind, cudaStream_t handle) {
    const cuMemcpyAsync_params told{reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), size,
                                    handle};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpyAsync, "cuMemcpyAsync", told, [&] {
        return on_stream({"cudaMemcpyAsync"}, handle, [&](machine& m, stream& on) {
            if (size == 0) return cudaSuccess;
            if (to == nullptr || from == nullptr) return cudaErrorInvalidValue;
            const int current = m.current()->device;
            if (!copies(m, to, on, current) || !copies(m, from, on, current)) return cudaErrorInvalidValue;
            m.enqueue(on, copying(to, from, size));
            const bool waits =
                m.chosen.pageable_copies_wait && on.recording == nullptr && (m.is_pageable(to) || m.is_pageable(from));
            return !waits || m.wait("cudaMemcpyAsync", [&] { return !m.has_work(on); }) ? cudaSuccess
                                                                                        : cudaErrorUnknown;
        });
    });
}

// Synchronous copies go into the legacy default stream, behind the streams that synchronise with
// it.

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind) {
    constexpr call_info info{.name = "cudaMemcpy", .unsafe = true};
    const cuMemcpy_params told{reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), size};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpy, "cuMemcpy", told, [&] {
        return on_stream(info, nullptr, [&](machine& m, stream& on) {
            if (size == 0) return cudaSuccess;
            const int current = m.current()->device;
            if (to == nullptr || from == nullptr || !copies(m, to, on, current) || !copies(m, from, on, current))
                return cudaErrorInvalidValue;
            const returns when = when_copied(m, to, from);
            return in_legacy_stream(info.name, m, on, when, [&] {
                return when == returns::once_staged ? copying_staged(to, from, size) : copying(to, from, size);
            });
        });
    });
}

cudaError_t cudaMemset(void* to, int value, std::size_t size) {
    constexpr call_info info{.name = "cudaMemset", .unsafe = true};
    const cuMemsetD8_v2_params told{reinterpret_cast<CUdeviceptr>(to), static_cast<unsigned char>(value), size};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemsetD8_v2, "cuMemsetD8_v2", told, [&] {
        return on_stream(info, nullptr, [&](machine& m, stream& on) {
            if (size == 0) return cudaSuccess;
            if (to == nullptr || !m.reaches(on.in->device, m.place_of(to))) return cudaErrorInvalidValue;
            return in_legacy_stream(info.name, m, on, when_filled(m, to), [&]() -> operation {
                return {.effect = [=] { std::memset(to, value, size); }, .writes = range_of(to, size)};
            });
        });
    });
}

cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, std::size_t size,
                                cudaStream_t handle) {
    return on_stream({"cudaMemcpyPeerAsync"}, handle, [&](machine& m, stream& on) {
        if (!m.has_device(to_device) || !m.has_device(from_device)) return cudaErrorInvalidDevice;
        const auto target = m.place_of(to), source = m.place_of(from);
        if (target.device != to_device || source.device != from_device) return cudaErrorInvalidValue;
        // CUDA.jl, pull request 3112: a copy into a pool that is open to another device was
        // observed to write nothing.
        for (const auto* const p : {&target, &source})
            if (p->pooled && p->open_to.size() > 1)
                m.find("cudaMemcpyPeerAsync of a pool's memory that is open to another device");
        m.enqueue(on, copying(to, from, size));
        return cudaSuccess;
    });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t size, cudaStream_t handle) {
    const cuMemsetD8Async_params told{reinterpret_cast<CUdeviceptr>(to), static_cast<unsigned char>(value), size,
                                      handle};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuMemsetD8Async, "cuMemsetD8Async", told, [&] {
        return on_stream({"cudaMemsetAsync"}, handle, [&](machine& m, stream& on) {
            if (size == 0) return cudaSuccess;
            // Programming Guide, "Peer-to-Peer Memory Access", "Accessibility" of pools,
            // cuMemSetAccess: a device that fills memory must reach it.
            if (to == nullptr || !m.reaches(on.in->device, m.place_of(to))) return cudaErrorInvalidValue;
            const auto set = [=] { std::memset(to, value, size); };
            m.enqueue(on, {.effect = set, .writes = range_of(to, size)});
            return cudaSuccess;
        });
    });
}

}  // extern "C"

}  // namespace standin
