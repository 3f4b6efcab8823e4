// SPDX-License-Identifier: Apache-2.0
// Times all-reduces, in the same way for ours and for every peer: the median of many batches that
// each last some tens of microseconds. "Warm" uses the same buffers again and again. "Cold" uses
// other buffers for every call, from arenas that are larger than the caches.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bench {

inline constexpr std::size_t sweep_sizes[] = {1U << 10, 1U << 12, 1U << 14, 1U << 16, 1U << 18,
                                              1U << 20, 1U << 22, 1U << 24, 1U << 26};
/// The uses of the buffers, in the order of a sweep's results.
enum class buffers { warm, cold, in_place };
inline constexpr buffers sweep_buffers[] = {buffers::warm, buffers::cold, buffers::in_place};

inline constexpr std::size_t arena_floats = std::size_t{1} << 25;  // 128 MiB

/// The buffers of one rank.
struct arenas {
    std::vector<float> in = std::vector<float>(arena_floats), out = std::vector<float>(arena_floats);
};

/// Reads every cache line of a result, which is the least that a program's next step does.
template <class T>
void read_result(const T* from, std::size_t n) noexcept {
    const volatile T* const seen = from;
    for (std::size_t i = 0; i < n; i += 64 / sizeof(T)) (void)seen[i];
}

/// Microseconds per call for each use of the buffers and each size. After each call, every rank
/// reads its result. `call(in, out, n)` and `meet()` are collective. The buffers hold zeros:
/// repeated sums of other numbers in place would overflow. `fewer` divides the number of batches,
/// for a quick trial.
template <class Call, class Meet>
std::vector<double> sweep(arenas& memory, const Call& call, const Meet& meet, std::size_t fewer = 1) {
    std::vector<double> medians;
    for (const buffers use : sweep_buffers)
        for (const std::size_t bytes : sweep_sizes) {
            const std::size_t n = bytes / sizeof(float), step = std::max<std::size_t>(n, 1024);
            const std::size_t batch = bytes <= 4096 ? 32 : bytes <= 65536 ? 8 : bytes <= 262'144 ? 2 : 1;
            const std::size_t all = bytes <= 262'144 ? 101 : bytes <= std::size_t{4} << 20 ? 31 : 7;
            const std::size_t batches = std::max<std::size_t>(all / fewer, 3);
            std::size_t at = 0;
            std::vector<double> took;
            for (std::size_t b = 0; b < batches + 2; ++b) {
                meet();
                const auto begin = std::chrono::steady_clock::now();
                for (std::size_t i = 0; i < batch; ++i) {
                    float* const out = (use == buffers::in_place ? memory.in : memory.out).data() + at;
                    call(memory.in.data() + at, out, n);
                    read_result(out, n);
                    if (use == buffers::cold) at = at + 2 * step <= arena_floats ? at + step : 0;
                }
                const std::chrono::duration<double, std::micro> d = std::chrono::steady_clock::now() - begin;
                if (b >= 2) took.push_back(d.count() / static_cast<double>(batch));
            }
            std::nth_element(took.begin(), took.begin() + static_cast<std::ptrdiff_t>(took.size() / 2), took.end());
            medians.push_back(took[took.size() / 2]);
        }
    return medians;
}

}  // namespace bench
