// SPDX-License-Identifier: Apache-2.0
// Scrubbing: memory is overwritten before another tenant gets it, so that no tenant reads a
// neighbour's data.
//
//   // see virtual_arena.hpp
//   gpushare::chunk_pool_options options{.capacity = 512, .scrub = gpushare::scrub_policy::on_hand_over};
//
// A scrubber overwrites memory. A stream does so in its order. For memory that the host reaches
// without a stream, host_scrubber overwrites in the calling thread:
//
//   gpushare::host_scrubber<gpushare::host::point> by_the_caller;
//   gpushare::scrubbing_resource clean{upstream, by_the_caller};      // see scrubbing_resource.hpp
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// When memory is overwritten with zeros.
enum class scrub_policy : std::uint8_t {
    on_hand_over,  ///< before a tenant other than its last owner gets it
    /// as soon as it is free, so that an owner's own data doesn't stay behind either
    on_free,
    off  ///< tenants trust each other
};

/// As in a specification.
[[nodiscard]] constexpr std::string_view to_string(scrub_policy s) noexcept {
    switch (s) {
        case scrub_policy::on_hand_over: return "on_hand_over";
        case scrub_policy::on_free: return "on_free";
        case scrub_policy::off: return "off";
    }
    return "unknown policy";
}

/// Options of a chunk_pool.
struct chunk_pool_options {
    std::size_t capacity = 0;  ///< the most chunks
    /// of these, those that the constructor makes
    std::size_t initial = 0;
    scrub_policy scrub = scrub_policy::on_hand_over;  ///< when a chunk is overwritten
    /// chunks that are scrubbed at a time, 1 or more
    std::size_t window = 16;
};

/// A stream that overwrites memory.
///   fill(p, value, size)   enqueues setting `size` bytes
///   wait(point)            what is enqueued from now on starts after `point`
// clang-format off
template <class S>
concept scrubber = timeline<S> && requires(S& s, const typename S::point& p, void* at, std::byte value, std::size_t size) {
    s.fill(at, value, size);
    s.wait(p);
};
// clang-format on

/// Scrubs in the calling thread, for memory that the host reaches: fill() returns when the memory
/// is overwritten. `Point` is the type of point of the streams that use the memory. Safe from any
/// thread.
template <timeline_point Point>
struct host_scrubber {
    using point = Point;  ///< of the streams that use the memory

    /// Overwrites `size` bytes before it returns.
    static void fill(void* at, std::byte value, std::size_t size) noexcept {
        std::memset(at, std::to_integer<int>(value), size);
    }
    /// Waits for the point, however long that takes.
    static void wait(const point& p) { p.wait(never); }
    /// A reached point.
    [[nodiscard]] static point record() { return {}; }
};
static_assert(scrubber<host_scrubber<immediate_point>>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
