// SPDX-License-Identifier: Apache-2.0
// Memory that refuses to take blocks back while a test says so, as a device's pool does during a
// capture.
//
//   support::refusing_memory memory;    memory.refuse(gpushare::errc::capturing);
//   CHECK(memory.deallocate(p, 64, 64) == gpushare::errc::capturing);      // p is out still
#pragma once

#include <atomic>
#include <cstddef>

#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>

#include "support/fault_resource.hpp"

namespace support {

/// Thread-safe, as fault_resource.
class refusing_memory : public fault_resource {
public:
    gpushare::errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept {
        if (const auto why = answer_.load(); why != gpushare::errc::none) return why;
        fault_resource::deallocate(p, size, alignment);
        return gpushare::errc::none;
    }
    /// From now on frees return this code and do nothing; errc::none: they succeed.
    void refuse(gpushare::errc answer) noexcept { answer_.store(answer); }

private:
    std::atomic<gpushare::errc> answer_{gpushare::errc::none};
};
static_assert(gpushare::memory_resource<refusing_memory>);

}  // namespace support
