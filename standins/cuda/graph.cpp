// SPDX-License-Identifier: Apache-2.0
// The calls for capture and graphs. A graph replays the recorded work of its capture one after the
// other, in an order that respects the forks and joins of the capture.
#include <algorithm>
#include <iterator>

#include "cupti.hpp"
#include "machine.hpp"

namespace standin {

using namespace detail;

namespace detail {

void machine::invalidate(capture& c, const char* who) {
    c.invalid = true;
    find(std::string(who) + " isn't allowed during a stream capture");
}

bool machine::capture_forbids(const char* who) {
    const auto& t = thread();
    if (t.mode == cudaStreamCaptureModeRelaxed) return false;
    bool forbidden = false;
    for (const auto& c : captures) {
        const bool mine = c->thread == std::this_thread::get_id();
        if (c->mode == cudaStreamCaptureModeRelaxed) continue;
        // Other threads' captures concern this one only if both sides are global.
        if (!mine && (c->mode != cudaStreamCaptureModeGlobal || t.mode != cudaStreamCaptureModeGlobal)) continue;
        invalidate(*c, who);
        forbidden = true;
    }
    return forbidden;
}

}  // namespace detail

namespace {

cudaStreamCaptureStatus status_of(const stream& s) {
    if (s.recording == nullptr) return cudaStreamCaptureStatusNone;
    return s.recording->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

/// Whether the origin has waited for all work of the capture's other streams.
bool joined(const capture& c) {
    return std::ranges::all_of(c.streams, [&](const stream* s) {
        const auto seen = c.origin->seen.find(s->id);
        return s == c.origin || (seen != c.origin->seen.end() && seen->second >= s->seen.at(s->id));
    });
}

/// Ends the capture, and returns the recorded work.
std::vector<operation> dissolve(machine& m, const std::shared_ptr<capture>& c) {
    std::vector<operation> nodes = std::move(c->origin->recorded);
    for (stream* s : c->streams) {
        s->recording = nullptr;
        s->recorded.clear();
        s->seen.clear();
    }
    std::erase(m.captures, c);
    return nodes;
}

}  // namespace

cudaError_t detail::exchange_mode(const char* name, cudaStreamCaptureMode* mode) {
    return enter({.name = name, .always = true}, nullptr, [&](machine& m) {
        std::swap(m.thread().mode, *mode);
        return cudaSuccess;
    });
}

cudaError_t detail::is_capturing(const char* name, cudaStream_t handle, cudaStreamCaptureStatus* status) {
    return on_stream({name}, handle, [&](machine&, stream& on) {
        *status = status_of(on);
        return cudaSuccess;
    });
}

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    return exchange_mode("cudaThreadExchangeStreamCaptureMode", mode);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    return on_stream({"cudaStreamBeginCapture"}, handle, [&](machine& m, stream& on) {
        if (on.recording != nullptr) return cudaErrorIllegalState;
        on.recording = std::make_shared<capture>(capture{.id = ++m.last_id,
                                                         .mode = mode,
                                                         .thread = std::this_thread::get_id(),
                                                         .origin = &on,
                                                         .streams = {&on},
                                                         .graph = m.new_handle<cudaGraph_t>()});
        m.captures.push_back(on.recording);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
    *out = nullptr;
    return on_stream({.name = "cudaStreamEndCapture", .returns = true}, handle, [&](machine& m, stream& on) {
        const auto c = on.recording;
        if (c == nullptr) return cudaErrorIllegalState;
        if (c->origin != &on) return cudaErrorStreamCaptureUnmatched;
        if (c->mode != cudaStreamCaptureModeRelaxed && c->thread != std::this_thread::get_id())
            return cudaErrorStreamCaptureWrongThread;
        const bool whole = joined(*c);
        auto nodes = dissolve(m, c);
        if (c->invalid) return cudaErrorStreamCaptureInvalidated;
        if (!whole) return cudaErrorStreamCaptureUnjoined;
        *out = c->graph;
        m.graphs.add(*out, std::make_shared<graph>(graph{std::move(nodes), std::move(c->owns)}));
        return cudaSuccess;
    });
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* out, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     std::size_t*) {
    return on_stream({"cudaStreamGetCaptureInfo"}, handle, [&](machine&, stream& on) {
        *status = status_of(on);
        if (*status == cudaStreamCaptureStatusNone) return cudaSuccess;
        if (id != nullptr) *id = on.recording->id;
        // "The graph handle may be invalidated before end of capture for certain errors."
        if (out != nullptr) *out = on.recording->invalid ? nullptr : on.recording->graph;
        return cudaSuccess;
    });
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* out, void* argument, cudaHostFn_t destroy, unsigned references,
                                 unsigned flags) {
    return enter({.name = "cudaUserObjectCreate", .bare = true}, nullptr, [&](machine& m) {
        if (destroy == nullptr || references != 1 || flags != cudaUserObjectNoDestructorSync)
            return cudaErrorInvalidValue;
        *out = m.new_handle<cudaUserObject_t>();
        m.user_objects_of_callers.add(*out, std::make_shared<user_object>(destroy, argument));
        return cudaSuccess;
    });
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count) {
    return enter({.name = "cudaUserObjectRelease", .returns = true, .bare = true}, nullptr, [&](machine& m) {
        return count == 1 && m.user_objects_of_callers.remove(object) ? cudaSuccess : cudaErrorInvalidValue;
    });
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count, unsigned flags) {
    return enter({.name = "cudaGraphRetainUserObject", .bare = true}, nullptr, [&](machine& m) {
        const auto kept = m.user_objects_of_callers.find(object);
        if (kept == nullptr || count != 1) return cudaErrorInvalidValue;
        const auto done = m.graphs.find(graph);
        const auto under_way = std::ranges::find(m.captures, graph, [](const auto& c) { return c->graph; });
        if (done == nullptr && under_way == m.captures.end()) return cudaErrorInvalidValue;
        (done != nullptr ? done->owns : (*under_way)->owns).push_back(kept);
        if ((flags & cudaGraphUserObjectMove) != 0) m.user_objects_of_callers.remove(object);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    return is_capturing("cudaStreamIsCapturing", handle, status);
}

// ---- graphs

cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, std::size_t* count) {
    return enter({"cudaGraphGetNodes"}, nullptr, [&](machine& m) {
        const auto g = m.look_up(m.graphs, handle, "a call");
        if (g == nullptr) return cudaErrorInvalidValue;
        if (nodes != nullptr) return cudaErrorNotSupported;
        *count = g->nodes.size();
        return cudaSuccess;
    });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t handle, unsigned long long flags) {
    constexpr call_info info{"cudaGraphInstantiate"};
    const cuGraphInstantiateWithFlags_params told{out, handle, flags};
    const auto body = [&](machine& m, int device) {
        const auto g = m.look_up(m.graphs, handle, "a call");
        if (g == nullptr) return cudaErrorInvalidValue;
        if (!m.load(device, g->nodes, info.name)) return cudaErrorUnknown;
        *out = m.new_handle<cudaGraphExec_t>();
        m.executables.add(*out, std::make_shared<executable>(executable{g->nodes, g->owns, nullptr}));
        return cudaSuccess;
    };
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", told,
                       [&] { return on_device(info, body); });
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t handle, cudaGraphExecUpdateResultInfo* why) {
    constexpr call_info info{"cudaGraphExecUpdate"};
    const auto body = [&](machine& m, int device) {
        const auto g = m.look_up(m.graphs, handle, "a call");
        const auto e = m.look_up(m.executables, exec, "a call");
        if (g == nullptr || e == nullptr) return cudaErrorInvalidValue;
        // Runtime API, cudaGraphExecUpdate, "Limitations": the context of a kernel node can't
        // change.
        const auto device_of = [](const std::vector<operation>& nodes) {
            return nodes.empty() || nodes.front().in == nullptr ? -1 : nodes.front().in->device;
        };
        const bool same = g->nodes.size() == e->nodes.size() && device_of(g->nodes) == device_of(e->nodes);
        *why = {};
        why->result = same ? cudaGraphExecUpdateSuccess : cudaGraphExecUpdateErrorTopologyChanged;
        if (!same) return cudaErrorGraphExecUpdateFailure;
        if (!m.load(device, g->nodes, info.name)) return cudaErrorUnknown;
        e->nodes = g->nodes;
        e->owns = g->owns;
        return cudaSuccess;
    };
    const cuGraphExecUpdate_v2_params told{exec, handle, nullptr};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuGraphExecUpdate_v2, "cuGraphExecUpdate_v2", told,
                       [&] { return on_device(info, body); });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
    const cuGraphLaunch_params told{exec, handle};
    return traced_call(CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch, "cuGraphLaunch", told, [&] {
        return on_stream({"cudaGraphLaunch"}, handle, [&](machine& m, stream& on) {
            const auto e = m.look_up(m.executables, exec, "a call");
            if (e == nullptr) return cudaErrorInvalidValue;
            if (on.recording == nullptr && e->running != nullptr) m.enqueue(on, {.awaited = e->running});
            // A node runs on the SMs of the context in which it was captured, not on those of the
            // stream in which the graph is launched. (Driver API, CUDA_KERNEL_NODE_PARAMS.) So it
            // also runs on the device of that context.
            for (const operation& node : e->nodes) {
                if (node.in == nullptr || (node.in->device == on.in->device && node.in->sms == on.in->sms)) continue;
                m.find(node.in->device == on.in->device
                           ? "a graph that was captured in one partition was launched in another one"
                           : "a graph that was captured on one device was launched on another one");
                break;
            }
            for (const operation& node : e->nodes) m.enqueue(on, node);
            if (on.recording == nullptr) {
                e->running = std::make_shared<mark>(mark{.device = on.in->device});
                // Programming Guide, "CUDA User Objects": an executable's objects stay until its
                // launches are done.
                m.enqueue(on, {.effect = [owns = e->owns] {}, .reaches = e->running});
            }
            return cudaSuccess;
        });
    });
}

// Graphs and executables can be destroyed while their launches are still under way.

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    constexpr call_info info{.name = "cudaGraphExecDestroy", .returns = true};
    return on_device(info, [&](machine& m, int) {
        if (m.look_up(m.executables, exec, info.name) == nullptr) return cudaErrorInvalidValue;
        m.executables.remove(exec);
        return cudaSuccess;
    });
}

cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
    constexpr call_info info{.name = "cudaGraphDestroy", .returns = true};
    return on_device(info, [&](machine& m, int) {
        if (m.look_up(m.graphs, handle, info.name) == nullptr) return cudaErrorInvalidValue;
        m.graphs.remove(handle);
        return cudaSuccess;
    });
}

}  // extern "C"

}  // namespace standin
