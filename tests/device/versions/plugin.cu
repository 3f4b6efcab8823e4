// SPDX-License-Identifier: Apache-2.0
// A shared object that uses the library inside, as a plug-in of a server might; see main.cpp.
#include <gpushare/backend/host/host.hpp>
#include <gpushare/gpushare.cuh>

#include "plugin.hpp"

namespace {

// True if quotas, exceptions and kernels work among themselves.
bool works() {
    gpushare::quota quota{gpushare::bytes{1000}};
    gpushare::host::node node{{.sms = 2}};
    gpushare::quota_resource memory{quota, node.memory(gpushare::device_id{0}), "plug-in"};
    try {
        (void)memory.allocate(1 << 20, 256);
        return false;
    } catch (const gpushare::memory_error& e) {
        if (e.code() != gpushare::errc::over_quota) return false;
    }
    auto s = node.make_stream(gpushare::device_id{0});
    std::atomic<int> ran{0};
    s.launch({.blocks = 10}, [&](auto&) { ++ran; });
    return s.record().wait(gpushare::never) && ran == 10;
}

}  // namespace

void launch_something(gpushare::cuda::stream& s) { s.launch({}, gpushare::detail::empty_kernel{}); }

extern "C" plugin_facts plugin_entry() {
    return {gpushare::version.major_, &gpushare::version, reinterpret_cast<const void*>(&launch_something), works()};
}
