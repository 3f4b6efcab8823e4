// SPDX-License-Identifier: Apache-2.0
// How long to rest before querying an MPI again, if there is no other way to wait. Constant polling
// would take the core away from threads that compute. A rest of a small part of a chunk's time is
// short enough to keep a link busy. A value; the caller passes the time.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

class mpi_pace {
public:
    /// Says that a thread begins to wait. The time before doesn't count; the next chunk is expected
    /// after as long as the last chunk took.
    void begin(instant now) noexcept {
        last_ = now;
        waits_ = true;
    }
    void end() noexcept { waits_ = false; }
    /// Says that a chunk is done. While no thread waits, the time of a chunk isn't meaningful.
    void progressed(instant now) noexcept {
        if (!waits_) return;
        between_ = now - last_;
        last_ = now;
    }
    /// How long to rest. 0 means to let other threads run first, without a rest.
    [[nodiscard]] ns rest(instant now) const noexcept {
        const ns expected = std::max<ns>(between_, now - last_) / part;
        return expected < shortest ? ns{0} : std::min(expected, longest);
    }

private:
    /// Many chunks are under way, and keep a link busy for much longer than one chunk's time. At 10
    /// Gbit/s and more, a chunk of the usual size is too short for a sleep.
    static constexpr int part = 4;
    static constexpr ns shortest = std::chrono::microseconds(20), longest = std::chrono::microseconds(200);

    instant last_{};
    ns between_{0};
    bool waits_ = false;
};

/// A waiting thread yields its core, because other ranks on this machine may need it.
inline void rest_for(ns time) noexcept {
    if (time == ns{0})
        std::this_thread::yield();
    else
        std::this_thread::sleep_for(time);
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
