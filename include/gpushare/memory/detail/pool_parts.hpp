// SPDX-License-Identifier: Apache-2.0
// What the parts of a pool tell each other: a request, and a worker that keeps blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/memory/detail/pool_fit.hpp>
#include <gpushare/memory/detail/pool_pending.hpp>
#include <gpushare/memory/detail/pool_shelves.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// One user of caches: its shelves, and its stream if it has one.
template <timeline_point Point>
struct pool_worker {
    explicit pool_worker(void* on = nullptr, Point (*point_of)(void* stream) = nullptr)
        : stream(on), record(point_of) {}

    /// Records on the stream. False, and no point, if that threw.
    [[nodiscard]] bool try_record(Point& point) const noexcept {
        try {
            point = record(stream);
            return true;
        } catch (...) {
            return false;
        }
    }

    pool_shelves shelves;
    void* const stream;
    Point (*const record)(void* stream);

    // Under the lock of the store.
    pool_chain unrecorded;        // has left the shelves; a point must be recorded behind it
    unsigned recording = 0;       // threads that record on the stream right now
    unsigned paused = 0;          // how many forbid it
    std::uint64_t failed_in = 0;  // the last pass in which recording threw
};

/// What a request is: whole granules, `least` of which will do; `asked` is what the caller said. Bytes.
struct pool_request {
    std::uint64_t size = 0, least = 0;
    std::size_t alignment = 1, asked = 0;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
