// SPDX-License-Identifier: Apache-2.0
#include "collective/copies.hpp"

#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bench {

namespace {

void by_memcpy(float* to, const float* from, std::size_t n) { std::memcpy(to, from, n * sizeof(float)); }

#if defined(__x86_64__)
// Each step copies one cache line in each of `Places` equal parts of the array. More places keep
// more of the memory's banks and prefetchers busy.

template <std::size_t Places>
void by_16(float* to, const float* from, std::size_t n) {
    const std::size_t part = n / Places;
    for (std::size_t i = 0; i < part; i += 16)
        for (std::size_t p = 0; p < n; p += part)
            for (std::size_t j = 0; j < 16; j += 4) _mm_stream_ps(to + p + i + j, _mm_loadu_ps(from + p + i + j));
    _mm_sfence();
}
template <std::size_t Places>
[[gnu::target("avx2")]] void by_32(float* to, const float* from, std::size_t n) {
    const std::size_t part = n / Places;
    for (std::size_t i = 0; i < part; i += 16)
        for (std::size_t p = 0; p < n; p += part) {
            const __m256 low = _mm256_loadu_ps(from + p + i), high = _mm256_loadu_ps(from + p + i + 8);
            _mm256_stream_ps(to + p + i, low);
            _mm256_stream_ps(to + p + i + 8, high);
        }
    _mm_sfence();
}
template <std::size_t Places>
[[gnu::target("avx512f")]] void by_64(float* to, const float* from, std::size_t n) {
    const std::size_t part = n / Places;
    for (std::size_t i = 0; i < part; i += 16)
        for (std::size_t p = 0; p < n; p += part) _mm512_stream_ps(to + p + i, _mm512_loadu_ps(from + p + i));
    _mm_sfence();
}
#endif

std::vector<copy> known() {
    std::vector<copy> all{{"memcpy", by_memcpy}};
#if defined(__x86_64__)
    all.insert(
        all.end(),
        {{"16 bytes, one place", by_16<1>}, {"16 bytes, two places", by_16<2>}, {"16 bytes, four places", by_16<4>}});
    if (__builtin_cpu_supports("avx2"))
        all.insert(all.end(), {{"32 bytes, one place", by_32<1>},
                               {"32 bytes, two places", by_32<2>},
                               {"32 bytes, four places", by_32<4>}});
    if (__builtin_cpu_supports("avx512f"))
        all.insert(all.end(), {{"64 bytes, one place", by_64<1>},
                               {"64 bytes, two places", by_64<2>},
                               {"64 bytes, four places", by_64<4>}});
#endif
    return all;
}

}  // namespace

std::span<const copy> copies() {
    static const std::vector<copy> all = known();
    return all;
}

}  // namespace bench
