// SPDX-License-Identifier: Apache-2.0
// Waits of a stream for a word in memory, and writes of a word: the two driver functions for this
// that the library uses.
#include <array>
#include <atomic>

#include "driver.hpp"
#include "machine.hpp"

namespace standin {

using namespace detail;

namespace {

// Driver API, Stream Memory Operations: "the device address should be mapped to a CPU pointer" or
// be registered device memory, and naturally aligned. All words of the library are pinned, so any
// other memory is a finding.
bool fits(machine& m, CUdeviceptr at, std::size_t size) {
    const bool good = at % size == 0 && m.is_pinned(static_cast<std::uintptr_t>(at & ~CUdeviceptr{7}));
    if (!good) m.find("a stream memory operation on memory that isn't pinned, or isn't aligned");
    return good;
}
CUresult missing() { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult wait_value(CUstream s, CUdeviceptr at, cuuint64_t value, unsigned flags) {
    if (!the_machine().chosen.stream_memory_operations) return missing();
    return driver(on_stream({"cuStreamWaitValue64"}, s, [&](machine& m, stream& on) {
        if (flags != CU_STREAM_WAIT_VALUE_EQ || value != 0 || !fits(m, at, 8)) return invalid_value;
        m.enqueue(on, {.until_zero = static_cast<std::uintptr_t>(at)});
        return cudaSuccess;
    }));
}

CUresult write_value(CUstream s, CUdeviceptr at, cuuint32_t value, unsigned flags) {
    if (!the_machine().chosen.stream_memory_operations) return missing();
    return driver(on_stream({"cuStreamWriteValue32"}, s, [&](machine& m, stream& on) {
        if (flags != CU_STREAM_WRITE_VALUE_DEFAULT || !fits(m, at, 4)) return invalid_value;
        const auto where = static_cast<std::uintptr_t>(at);
        // The stream outlives its work, and knows when the work ended.
        const auto write = [&m, &on, where, value] {
            std::atomic_ref(*reinterpret_cast<std::uint32_t*>(where)).store(value, std::memory_order_release);
            m.words_written[where] = on.idle_since;
        };
        m.enqueue(on, {.effect = write});
        return cudaSuccess;
    }));
}

}  // namespace

std::span<const entry_point> detail::memory_operation_functions() {
    static const std::array all{
        point<decltype(cuStreamWaitValue64)>("cuStreamWaitValue64", 12000, wait_value),
        point<decltype(cuStreamWriteValue32)>("cuStreamWriteValue32", 12000, write_value),
    };
    return all;
}

}  // namespace standin
