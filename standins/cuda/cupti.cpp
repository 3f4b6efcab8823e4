// SPDX-License-Identifier: Apache-2.0
#include "cupti.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

struct CUpti_Subscriber_st {
    std::string name;
    CUpti_CallbackFunc function = nullptr;
    void* argument = nullptr;
    std::set<CUpti_CallbackId> ids{};
};

namespace standin {

namespace {

struct subscription {
    std::mutex mutex;
    std::unique_ptr<CUpti_Subscriber_st> present{};
    std::atomic<bool> any{false};
    std::atomic<std::uint64_t> callbacks{0};
};
subscription& the_subscription() {
    static auto* const one = new subscription;
    return *one;
}

CUptiResult subscribe(CUpti_SubscriberHandle* out, CUpti_CallbackFunc f, void* argument, CUpti_SubscriberParams* p) {
    auto& all = the_subscription();
    const std::lock_guard lock(all.mutex);
    if (out == nullptr) return CUPTI_ERROR_INVALID_PARAMETER;
    if (all.present != nullptr) {
        if (p != nullptr && p->oldSubscriberName != nullptr && p->oldSubscriberSize != 0) {
            const std::size_t n = std::min(all.present->name.size(), p->oldSubscriberSize - 1);
            std::memcpy(p->oldSubscriberName, all.present->name.data(), n);
            p->oldSubscriberName[n] = '\0';
        }
        return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
    }
    const char* const name = p != nullptr && p->subscriberName != nullptr ? p->subscriberName : "an unnamed subscriber";
    all.present = std::make_unique<CUpti_Subscriber_st>(
        CUpti_Subscriber_st{.name = std::string("CUPTI for ") + name, .function = f, .argument = argument});
    all.any.store(true);
    *out = all.present.get();
    return CUPTI_SUCCESS;
}

}  // namespace

void take_subscriber(std::string name) {
    auto& all = the_subscription();
    const std::lock_guard lock(all.mutex);
    all.present = std::make_unique<CUpti_Subscriber_st>(CUpti_Subscriber_st{.name = std::move(name)});
}
void give_subscriber_back() {
    auto& all = the_subscription();
    const std::lock_guard lock(all.mutex);
    all.present.reset();
}
std::uint64_t callbacks() { return the_subscription().callbacks.load(); }
bool has_subscriber() {
    auto& all = the_subscription();
    const std::lock_guard lock(all.mutex);
    return all.present != nullptr;
}

launch_dimensions& next_dimensions() {
    thread_local launch_dimensions mine;
    return mine;
}

bool detail::traced(CUpti_CallbackId id) {
    auto& all = the_subscription();
    if (!all.any.load()) return false;
    const std::lock_guard lock(all.mutex);
    return all.present != nullptr && all.present->ids.contains(id);
}

void detail::call_back(CUpti_CallbackId id, const char* name, const void* parameters, const CUresult* result,
                       std::uint64_t& between) {
    auto& all = the_subscription();
    CUpti_CallbackFunc function = nullptr;
    void* argument = nullptr;
    {
        const std::lock_guard lock(all.mutex);
        if (all.present == nullptr || !all.present->ids.contains(id)) return;
        function = all.present->function;
        argument = all.present->argument;
    }
    CUresult returned = result != nullptr ? *result : CUDA_SUCCESS;
    CUpti_CallbackData data{};
    data.callbackSite = result != nullptr ? CUPTI_API_EXIT : CUPTI_API_ENTER;
    data.functionName = name;
    data.functionParams = parameters;
    data.functionReturnValue = result != nullptr ? &returned : nullptr;
    data.correlationData = &between;
    data.context = the_machine().context_of_thread();
    all.callbacks.fetch_add(1);
    function(argument, CUPTI_CB_DOMAIN_DRIVER_API, id, &data);
}

extern "C" {

CUptiResult CUPTIAPI cuptiSubscribe(CUpti_SubscriberHandle* out, CUpti_CallbackFunc f, void* argument) {
    return subscribe(out, f, argument, nullptr);
}
CUptiResult CUPTIAPI cuptiSubscribe_v2(CUpti_SubscriberHandle* out, CUpti_CallbackFunc f, void* argument,
                                       CUpti_SubscriberParams* p) {
    return subscribe(out, f, argument, p);
}
CUptiResult CUPTIAPI cuptiUnsubscribe(CUpti_SubscriberHandle h) {
    auto& all = the_subscription();
    const std::lock_guard lock(all.mutex);
    if (h == nullptr || all.present.get() != h) return CUPTI_ERROR_INVALID_PARAMETER;
    all.any.store(false);
    all.present.reset();
    return CUPTI_SUCCESS;
}
CUptiResult CUPTIAPI cuptiEnableCallback(std::uint32_t enable, CUpti_SubscriberHandle h, CUpti_CallbackDomain domain,
                                         CUpti_CallbackId id) {
    auto& all = the_subscription();
    const std::lock_guard lock(all.mutex);
    if (h == nullptr || all.present.get() != h || domain != CUPTI_CB_DOMAIN_DRIVER_API || id == 0 ||
        id >= CUPTI_DRIVER_TRACE_CBID_SIZE)
        return CUPTI_ERROR_INVALID_PARAMETER;
    if (enable != 0)
        h->ids.insert(id);
    else
        h->ids.erase(id);
    return CUPTI_SUCCESS;
}
CUptiResult CUPTIAPI cuptiGetResultString(CUptiResult code, const char** text) {
    *text = code == CUPTI_SUCCESS                                    ? "CUPTI_SUCCESS"
            : code == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED ? "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"
                                                                     : "CUPTI_ERROR";
    return CUPTI_SUCCESS;
}

}  // extern "C"

}  // namespace standin
