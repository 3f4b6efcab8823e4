// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// The stand-in for CUPTI: one subscriber, and callbacks at the entry and the exit of launches.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cupti.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "standins/cuda/cupti.hpp"
#include "standins/cuda/raw.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"

namespace standin_cupti_test {

namespace {

/// The callbacks that a subscriber got.
struct seen {
    std::vector<CUpti_ApiCallbackSite> sites{};
    std::vector<std::uint64_t> kept{};  // the word that goes from entry to exit
    std::vector<bool> with_result{};
};

void CUPTIAPI look(void* to, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* about) {
    const auto& data = *static_cast<const CUpti_CallbackData*>(about);
    auto& all = *static_cast<seen*>(to);
    if (domain != CUPTI_CB_DOMAIN_DRIVER_API || id != CUPTI_DRIVER_TRACE_CBID_cuMemsetD8Async) return;
    if (data.callbackSite == CUPTI_API_ENTER) *data.correlationData = 42;
    all.sites.push_back(data.callbackSite);
    all.kept.push_back(*data.correlationData);
    all.with_result.push_back(data.functionReturnValue != nullptr);
}

}  // namespace

TEST_CASE("a subscriber hears of a launch twice, with a word from the entry to the exit", "[cuda][standin]") {
    const standin::session gpu{{.devices = 1}};
    const auto s = raw::make_stream();
    void* p = nullptr;
    REQUIRE(cudaMalloc(&p, 64) == cudaSuccess);
    seen all;
    CUpti_SubscriberHandle me = nullptr;
    REQUIRE(cuptiSubscribe(&me, look, &all) == CUPTI_SUCCESS);
    CHECK(standin::has_subscriber());
    const auto hear = [&](std::uint32_t enable) {
        return cuptiEnableCallback(enable, me, CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_cuMemsetD8Async);
    };

    CHECK(cudaMemsetAsync(p, 0, 64, s) == cudaSuccess);  // callbacks of this function aren't enabled yet
    CHECK(all.sites.empty());
    CHECK(hear(1) == CUPTI_SUCCESS);
    CHECK(cudaMemsetAsync(p, 0, 64, s) == cudaSuccess);
    CHECK(all.sites == std::vector{CUPTI_API_ENTER, CUPTI_API_EXIT});
    CHECK(all.kept == std::vector<std::uint64_t>{42, 42});
    CHECK(all.with_result == std::vector{false, true});
    CHECK(hear(0) == CUPTI_SUCCESS);
    CHECK(cudaMemsetAsync(p, 0, 64, s) == cudaSuccess);
    CHECK(all.sites.size() == 2);

    CHECK(cuptiUnsubscribe(me) == CUPTI_SUCCESS);
    CHECK(cuptiUnsubscribe(me) == CUPTI_ERROR_INVALID_PARAMETER);
    CHECK_FALSE(standin::has_subscriber());
    CHECK(cudaFree(p) == cudaSuccess);
    raw::destroy(s);
}

TEST_CASE("calls that wait for the device are told as the driver's, and wait", "[cuda][standin]") {
    const standin::session gpu{{.devices = 1}};
    const auto s = raw::make_stream();
    void *device = nullptr, *host = nullptr;
    REQUIRE(cudaMalloc(&device, 64) == cudaSuccess);
    std::vector<CUpti_CallbackId> ids;
    const auto note = [](void* to, CUpti_CallbackDomain, CUpti_CallbackId id, const void*) {
        static_cast<std::vector<CUpti_CallbackId>*>(to)->push_back(id);
    };
    CUpti_SubscriberHandle me = nullptr;
    REQUIRE(cuptiSubscribe(&me, note, &ids) == CUPTI_SUCCESS);
    constexpr CUpti_CallbackId all[] = {CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize, CUPTI_DRIVER_TRACE_CBID_cuMemFree_v2,
                                        CUPTI_DRIVER_TRACE_CBID_cuMemHostAlloc, CUPTI_DRIVER_TRACE_CBID_cuMemFreeHost};
    for (const CUpti_CallbackId id : all)
        CHECK(cuptiEnableCallback(1, me, CUPTI_CB_DOMAIN_DRIVER_API, id) == CUPTI_SUCCESS);

    bool ran = false;
    CHECK(standin::detail::launch(s, &ids, false, std::chrono::milliseconds(1), [&] { ran = true; }) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(ran);
    CHECK(cudaFree(device) == cudaSuccess);
    CHECK(cudaHostAlloc(&host, 64, 0) == cudaSuccess);
    CHECK(cudaFreeHost(host) == cudaSuccess);
    CHECK(ids == std::vector{all[0], all[0], all[1], all[1], all[2], all[2], all[3], all[3]});
    CHECK(cuptiUnsubscribe(me) == CUPTI_SUCCESS);
    raw::destroy(s);
}

TEST_CASE("a second subscriber is refused, and is told the name of the first", "[cuda][standin]") {
    const standin::session gpu{{.devices = 1}};
    standin::take_subscriber("CUPTI for a profiler");
    seen all;
    CUpti_SubscriberHandle me = nullptr;
    std::string name(64, ' ');
    CUpti_SubscriberParams told{};
    told.structSize = CUpti_SubscriberParams_STRUCT_SIZE;
    told.subscriberName = "a test";
    told.oldSubscriberName = name.data();
    told.oldSubscriberSize = name.size();
    CHECK(cuptiSubscribe_v2(&me, look, &all, &told) == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED);
    CHECK(std::string(name.c_str()) == "CUPTI for a profiler");
    standin::give_subscriber_back();
    CHECK(cuptiSubscribe_v2(&me, look, &all, &told) == CUPTI_SUCCESS);
    CHECK(cuptiUnsubscribe(me) == CUPTI_SUCCESS);
}

}  // namespace standin_cupti_test
