// SPDX-License-Identifier: Apache-2.0
// A transport between threads that combines already when an all-reduce begins, and counts the calls
// of advance() afterwards. So a test knows that a rank waits for its device. And a kernel for which
// devices wait.
//
//   std::atomic<int> advanced{0};
//   support::eager_transport net(group.rank(r), advanced);
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <thread>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/config.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace support {

struct eager_transport : gpushare::thread_transport {
    eager_transport(const gpushare::member& me, std::atomic<int>& count) noexcept
        : gpushare::thread_transport(me), advanced(&count) {}
    template <class T, class Op>
    std::uint64_t start_all_reduce(std::span<T> data, const Op& op) {
        last = all_reduce(std::span<const T>(data), data, op, gpushare::never);
        return 0;
    }
    /// Not for use.
    template <class T, class Op>
    std::uint64_t start_reduce_scatter(std::span<T>, const Op&) {
        return 0;
    }
    /// Not for use.
    template <class T>
    std::uint64_t start_all_gather(std::span<T>) {
        return 0;
    }
    void advance() { advanced->fetch_add(1); }
    gpushare::collective_fault finish(std::uint64_t, gpushare::instant) const { return last; }

    std::atomic<int>* advanced;
    gpushare::collective_fault last;
};
static_assert(gpushare::pipelined_transport<eager_transport>);

/// A kernel that runs until somebody lets its stream go on.
struct until {
    const std::atomic<bool>* gone;
    template <class C>
    GPUSHARE_HD void operator()(C&) const {
        while (!gone->load(std::memory_order_acquire)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
};

}  // namespace support
