// SPDX-License-Identifier: Apache-2.0
// When the machine took a core from everybody: a hypervisor that ran somebody else, an interrupt that took long. On each
// core a thread that goes before all others wakes up every 250 us and notes by how much it was late.
//
//   const stolen_time stolen;
//   ...                                         // what is measured, from `begin` to `end`
//   ns machine = stolen.between(begin, end);    // of all cores
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "compute/rig.hpp"

namespace bench::compute {

/// Starts a thread for each core that this one may run on. Safe from any thread.
class stolen_time {
public:
    stolen_time() {
        ::cpu_set_t usable;
        if (::sched_getaffinity(0, sizeof usable, &usable) != 0) return;
        for (int core = 0; core < CPU_SETSIZE; ++core)
            if (CPU_ISSET(core, &usable)) {
                auto& book = books_.emplace_back();
                threads_.emplace_back([core, &book](const std::stop_token& stop) { watch(core, book, stop); });
            }
    }

    /// Of all cores, what was taken from `begin` on until `end`, both less than ten seconds ago.
    [[nodiscard]] ns between(instant begin, instant end) const {
        ns sum{};
        for (const auto& book : books_) {
            const std::lock_guard lock(book.mutex);
            for (auto g = book.late.rbegin(); g != book.late.rend() && g->woke > begin; ++g)
                sum += std::max(std::min(g->woke, end) - std::max(g->due, begin), ns{0});
        }
        return sum;
    }

private:
    struct gap {
        instant due, woke;
    };
    struct core_book {
        mutable std::mutex mutex;
        std::deque<gap> late;
    };

    static void watch(int core, core_book& book, const std::stop_token& stop) {
        ::cpu_set_t here;
        CPU_ZERO(&here);
        CPU_SET(core, &here);
        (void)::pthread_setaffinity_np(::pthread_self(), sizeof here, &here);
        const ::sched_param first{.sched_priority = ::sched_get_priority_max(SCHED_FIFO)};
        (void)::pthread_setschedparam(::pthread_self(), SCHED_FIFO, &first);  // or it says how late anybody is
        while (!stop.stop_requested()) {
            const auto due = now() + 250us;
            sleep_until(due);
            const auto woke = now();
            if (woke - due < usual) continue;
            const std::lock_guard lock(book.mutex);
            book.late.push_back({due, woke});
            while (book.late.front().woke < woke - 10s) book.late.pop_front();
        }
    }

    static constexpr ns usual = 30us;  // an idle core takes that long to wake up

    std::deque<core_book> books_;
    std::vector<std::jthread> threads_;  // last: they use the others
};

}  // namespace bench::compute
