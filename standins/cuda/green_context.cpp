// SPDX-License-Identifier: Apache-2.0
// Driver functions for green contexts. A program splits SMs, describes the parts, and makes
// contexts with streams from them.
#include <algorithm>
#include <array>
#include <cstring>

#include "driver.hpp"

namespace standin {

using namespace detail;

namespace {

/// The stand-in's content of the opaque part of a CUdevResource.
struct sm_set {
    int device = 0;
    std::uint32_t first = 0;
    std::uint64_t split = 0;  // the number of the split from which it comes; 0: none
};
static_assert(std::is_trivially_copyable_v<sm_set> && sizeof(sm_set) <= sizeof(CUdevResource::_internal_padding));

CUdevResource resource(const machine& m, std::uint32_t sms, const sm_set& which) {
    CUdevResource r{};
    r.type = sms == 0 ? CU_DEV_RESOURCE_TYPE_INVALID : CU_DEV_RESOURCE_TYPE_SM;
    r.sm = {.smCount = sms, .minSmPartitionSize = m.chosen.sm_step, .smCoscheduledAlignment = m.chosen.sm_step};
    std::memcpy(r._internal_padding, &which, sizeof which);
    return r;
}
sm_set which_sms(const CUdevResource& r) {
    sm_set which;
    std::memcpy(&which, r._internal_padding, sizeof which);
    return which;
}

CUresult device_resource(CUdevice device, CUdevResource* out, CUdevResourceType type) {
    return driver(enter({"cuDeviceGetDevResource"}, nullptr, [&](machine& m) {
        if (!m.has_device(device)) return cudaErrorInvalidDevice;
        if (type != CU_DEV_RESOURCE_TYPE_SM) return cudaErrorInvalidResourceType;
        *out = resource(m, m.chosen.sms, {.device = device});
        return cudaSuccess;
    }));
}

CUresult split(CUdevResource* out, unsigned* groups, const CUdevResource* input, CUdevResource* rest, unsigned flags,
               unsigned least) {
    return driver(enter({"cuDevSmResourceSplitByCount"}, nullptr, [&](machine& m) {
        if (input->type != CU_DEV_RESOURCE_TYPE_SM) return cudaErrorInvalidResourceType;
        if (groups == nullptr || least > input->sm.smCount) return invalid_value;
        if (which_sms(*input).split != 0) return cudaErrorInvalidResourceConfiguration;  // can't be split again
        const bool fine = (flags & CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING) != 0;
        const std::uint32_t step = fine ? 2 : m.chosen.sm_step;
        const std::uint32_t each = std::max(step, (least + step - 1) / step * step);
        const std::uint32_t most = input->sm.smCount / each;
        if (out == nullptr) {
            *groups = most;
            return cudaSuccess;
        }
        *groups = std::min(*groups, most);
        sm_set which = which_sms(*input);
        which.split = ++m.last_id;
        for (unsigned g = 0; g < *groups; ++g) {
            out[g] = resource(m, each, which);
            which.first += each;
        }
        if (rest != nullptr) *rest = resource(m, input->sm.smCount - *groups * each, which);
        return cudaSuccess;
    }));
}

CUresult describe(CUdevResourceDesc* out, CUdevResource* list, unsigned count) {
    return driver(enter({"cuDevResourceGenerateDesc"}, nullptr, [&](machine& m) {
        if (count == 0) return invalid_value;
        std::set<std::uint32_t> sms;
        for (const auto& r : std::span(list, count)) {
            if (r.type != CU_DEV_RESOURCE_TYPE_SM) return cudaErrorInvalidResourceType;
            const auto first = which_sms(list[0]), other = which_sms(r);
            if (other.device != first.device || other.split != first.split)
                return cudaErrorInvalidResourceConfiguration;
            for (std::uint32_t i = 0; i < r.sm.smCount; ++i) sms.insert(other.first + i);
        }
        *out = m.new_handle<CUdevResourceDesc>();
        m.descriptions.emplace(*out, std::pair{which_sms(list[0]).device, std::move(sms)});
        return cudaSuccess;
    }));
}

CUresult create_green(CUgreenCtx* out, CUdevResourceDesc what, CUdevice device, unsigned flags) {
    return driver(enter({"cuGreenCtxCreate"}, nullptr, [&](machine& m) {
        const auto found = m.descriptions.find(what);
        if (found == m.descriptions.end() || flags != CU_GREEN_CTX_DEFAULT_STREAM) return invalid_value;
        if (!m.has_device(device) || found->second.first != device) return cudaErrorInvalidDevice;
        (void)m.primary(device);
        m.find_spinning(device, "cuGreenCtxCreate");
        for (const auto& s : m.busy)
            if (s->in->green && s->in->destroyed && s->in->device == device &&
                std::ranges::any_of(s->in->sms, [&](auto sm) { return found->second.second.contains(sm); }))
                m.find("SMs were handed out while work of a destroyed partition is still on them");
        const auto c = std::make_shared<context>(
            context{.device = device, .sms = found->second.second, .green = true, .id = m.new_context_id()});
        *out = reinterpret_cast<CUgreenCtx>(c.get());
        m.green_contexts.add(*out, c);
        return cudaSuccess;
    }));
}

/// Calls body(machine&, shared_ptr<context>&) for a valid handle.
template <class Body>
CUresult on_green(const call_info& info, CUgreenCtx handle, Body body) {
    return driver(enter(info, nullptr, [&](machine& m) {
        const auto c = m.green_contexts.find(handle);
        if (c == nullptr) return invalid_context;
        return concerning(m, c->device, info, [&] { return body(m, c); });
    }));
}

CUresult destroy_green(CUgreenCtx handle) {
    return on_green({.name = "cuGreenCtxDestroy", .returns = true}, handle, [&](machine& m, const auto& c) {
        if (c->streams != 0) m.find("a green context was destroyed before its streams");
        const auto& mine = m.thread().contexts;
        if (std::ranges::find(mine, c) != mine.end()) m.find("a green context was destroyed while it was current");
        c->destroyed = true;
        m.green_contexts.remove(handle);
        return cudaSuccess;
    });
}

CUresult green_stream(CUstream* out, CUgreenCtx handle, unsigned flags, int priority) {
    return on_green({.name = "cuGreenCtxStreamCreate", .makes = true}, handle, [&](machine& m, const auto& c) {
        if (flags != CU_STREAM_NON_BLOCKING) return invalid_value;
        *out = m.open_stream(c, priority);
        return cudaSuccess;
    });
}

CUresult green_resource(CUgreenCtx handle, CUdevResource* out, CUdevResourceType type) {
    return on_green({"cuGreenCtxGetDevResource"}, handle, [&](machine& m, const auto& c) {
        if (type != CU_DEV_RESOURCE_TYPE_SM) return cudaErrorInvalidResourceType;
        *out = resource(m, static_cast<std::uint32_t>(c->sms.size()), {.device = c->device});
        return cudaSuccess;
    });
}

CUresult context_from_green(CUcontext* out, CUgreenCtx handle) {
    return on_green({"cuCtxFromGreenCtx"}, handle, [&](machine&, const auto& c) {
        *out = handle_of(c);
        return cudaSuccess;
    });
}

CUresult stream_green(CUstream handle, CUgreenCtx* out) {
    return driver(on_stream({"cuStreamGetGreenCtx"}, handle, [&](machine&, stream& on) {
        *out = on.in->green ? reinterpret_cast<CUgreenCtx>(on.in.get()) : nullptr;
        return cudaSuccess;
    }));
}

}  // namespace

std::span<const entry_point> detail::green_context_functions() {
    static const std::array all{
        point<decltype(cuDeviceGetDevResource)>("cuDeviceGetDevResource", 12040, device_resource),
        point<decltype(cuDevSmResourceSplitByCount)>("cuDevSmResourceSplitByCount", 12040, split),
        point<decltype(cuDevResourceGenerateDesc)>("cuDevResourceGenerateDesc", 12040, describe),
        point<decltype(cuGreenCtxCreate)>("cuGreenCtxCreate", 12040, create_green),
        point<decltype(cuGreenCtxDestroy)>("cuGreenCtxDestroy", 12040, destroy_green),
        point<decltype(cuGreenCtxStreamCreate)>("cuGreenCtxStreamCreate", 12050, green_stream),
        point<decltype(cuGreenCtxGetDevResource)>("cuGreenCtxGetDevResource", 12040, green_resource),
        point<decltype(cuCtxFromGreenCtx)>("cuCtxFromGreenCtx", 12040, context_from_green),
        point<decltype(cuStreamGetGreenCtx)>("cuStreamGetGreenCtx", 12040, stream_green),
    };
    return all;
}

}  // namespace standin
