// SPDX-License-Identifier: Apache-2.0
// The calls about streams, events and copies, and launches of kernels that run on the host.
#include <algorithm>
#include <cstring>

#include "support/cuda_standin/machine.hpp"

namespace standin {

using namespace detail;

namespace detail {

cudaStream_t machine::open_stream(const std::shared_ptr<context>& in, int priority) {
    const auto s = std::make_shared<stream>();
    s->handle = new_handle<cudaStream_t>();
    s->id = ++last_id;
    s->in = in;
    s->connection = device(in->device).streams_made++ % std::max(1U, chosen.connections);
    // Outside of the range is nearest in it, as the runtime has it.
    s->priority = std::clamp(priority, chosen.greatest_priority, chosen.least_priority);
    ++in->streams;
    streams.add(s->handle, s);
    return s->handle;
}

std::shared_ptr<stream> machine::find_stream(const char* who, cudaStream_t handle) {
    if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread) return streams.find(handle);
    find(std::string(who) + " on the default stream");
    auto& stand_in = device(current()->device).default_stream;
    if (stand_in == nullptr) {
        stand_in = std::make_shared<stream>();
        stand_in->id = ++last_id;
        stand_in->in = current();
    }
    return stand_in;
}

}  // namespace detail

namespace {

/// A stream that captures can't be asked or waited for.
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

/// Whether the event's last recording lies in a capture, which such a call invalidates.
bool captured(machine& m, const event& e, const char* who) {
    if (e.last == nullptr || e.last->captured == nullptr) return false;
    m.invalidate(*e.last->captured, who);
    return true;
}

}  // namespace

cudaError_t detail::query(const char* name, cudaEvent_t handle) {
    return on_event({.name = name, .unsafe = true, .looks = true}, handle, [&](machine& m, event& e) {
        if (captured(m, e, name)) return cudaErrorCapturedEvent;
        if (e.last != nullptr && !e.last->reached) return cudaErrorNotReady;
        host_saw();
        return cudaSuccess;
    });
}

cudaError_t detail::elapsed_time(const char* name, float* ms, cudaEvent_t from, cudaEvent_t to) {
    return enter({.name = name}, nullptr, [&](machine& m) {
        // The runtime has made one current.
        if (m.thread().contexts.empty()) return static_cast<cudaError_t>(CUDA_ERROR_INVALID_CONTEXT);
        const auto found = m.events.find(from);
        if (found == nullptr) return cudaErrorInvalidResourceHandle;
        const event& a = *found;
        const auto b = m.events.find(to);
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
    return on_stream(info, handle, [&](machine& m, stream& on) {
        if (m.current()->device != on.in->device) return cudaErrorInvalidResourceHandle;
        m.load(on.in->device, kernel, info.name);
        m.enqueue(on, std::move(op));
        return cudaSuccess;
    });
}

cudaError_t detail::launch(cudaStream_t handle, const void* kernel, bool together, ns length,
                           std::function<void()> body) {
    return enqueue_kernel(handle, kernel, {.length = length, .effect = std::move(body), .spins = together});
}

extern "C" {

// ---- streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
    return on_device({.name = "cudaStreamCreateWithPriority", .makes = true}, [&](machine& m, int) {
        if (flags != cudaStreamNonBlocking) m.find("a stream that synchronises with the default stream was created");
        *out = m.open_stream(m.current(), priority);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    return on_stream({.name = "cudaStreamDestroy", .returns = true}, handle, [&](machine& m, stream& on) {
        if (on.recording != nullptr) m.invalidate(*on.recording, "cudaStreamDestroy");
        --on.in->streams;
        m.streams.remove(handle);  // `busy` keeps it until its work is done
        return cudaSuccess;
    });
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
    return on_stream({"cudaStreamGetPriority"}, handle, [&](machine&, stream& on) {
        *priority = on.priority;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
    return on_stream({"cudaStreamGetDevice"}, handle, [&](machine&, stream& on) {
        *device = on.in->device;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    constexpr call_info info{.name = "cudaStreamQuery", .unsafe = true, .looks = true};
    return on_stream(info, handle, [&](machine& m, stream& on) {
        if (captures(m, on, info.name)) return cudaErrorStreamCaptureUnsupported;
        if (m.has_work(on)) return cudaErrorNotReady;
        host_saw();
        return cudaSuccess;
    });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    constexpr call_info info{.name = "cudaStreamSynchronize", .unsafe = true, .looks = true};
    return on_stream(info, handle, [&](machine& m, stream& on) {
        if (captures(m, on, info.name)) return cudaErrorStreamCaptureUnsupported;
        const auto& device = m.device(on.in->device);
        const auto done = [&] { return !m.has_work(on) || device.sticky != cudaSuccess; };
        return m.wait(info.name, done) ? device.sticky : cudaErrorUnknown;
    });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
    constexpr call_info info{.name = "cudaStreamWaitEvent"};
    return on_stream(info, handle, [&](machine& m, stream& on) {
        const auto e = m.events.find(event_handle);
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
    return on_stream({"cudaEventRecord"}, stream_handle, [&](machine& m, stream& on) {
        const auto e = m.events.find(handle);
        if (e == nullptr) return cudaErrorInvalidResourceHandle;
        // An event belongs to the stream's context, or to the primary one under a green context.
        const auto& primary = m.device(on.in->device).primary;
        if (e->in != on.in && !(on.in->green && e->in == primary)) return cudaErrorInvalidResourceHandle;
        e->last = std::make_shared<mark>(mark{.device = on.in->device});
        if (on.recording != nullptr) {
            if (on.recording->invalid) return cudaErrorStreamCaptureInvalidated;
            e->last->captured = on.recording;
            e->last->seen = on.seen;
        } else {
            m.enqueue(on, {.reaches = e->last});
            m.run();  // on an idle stream it is reached at once
        }
        return cudaSuccess;
    });
}

cudaError_t cudaEventQuery(cudaEvent_t handle) { return query("cudaEventQuery", handle); }

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    constexpr call_info info{.name = "cudaEventSynchronize", .unsafe = true, .looks = true};
    return on_event(info, handle, [&](machine& m, event& e) {
        if (captured(m, e, info.name)) return cudaErrorCapturedEvent;
        if (e.last == nullptr) return cudaSuccess;
        const auto until = e.last;
        const auto& device = m.device(e.in->device);
        const auto done = [&] { return until->reached || device.sticky != cudaSuccess; };
        return m.wait(info.name, done) ? device.sticky : cudaErrorUnknown;
    });
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    return elapsed_time("cudaEventElapsedTime", ms, from, to);
}

// ---- copies

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind, cudaStream_t handle) {
    return on_stream({"cudaMemcpyAsync"}, handle, [&](machine& m, stream& on) {
        if (size != 0 && (to == nullptr || from == nullptr)) return cudaErrorInvalidValue;
        m.enqueue(on, copying(to, from, size));
        return cudaSuccess;
    });
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t size, cudaStream_t handle) {
    return on_stream({"cudaMemsetAsync"}, handle, [&](machine& m, stream& on) {
        if (size != 0 && to == nullptr) return cudaErrorInvalidValue;
        const auto set = [=] { std::memset(to, value, size); };
        m.enqueue(on, {.effect = set, .writes = range_of(to, size)});
        return cudaSuccess;
    });
}

}  // extern "C"

}  // namespace standin
