// SPDX-License-Identifier: Apache-2.0
// Parts that all launches for the ranks of a group share: the grid for a number of elements, and
// points that are made before a kernel waits for other ranks.
//
//   gpushare::detail::point_reserve<stream> points;
//   points.reserve(std::span(streams));                       // may make events, which may wait
//   streams[r].launch(gpushare::detail::grid_of(n), kernel);
//   const auto end = points.record(r, streams[r]);            // makes none
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Up to this many ranks, a submission allocates no memory.
inline constexpr std::size_t ranks_in_place = 32;

/// A grid with no more blocks than have work, so that a device has room for other kernels.
[[nodiscard]] GPUSHARE_HD constexpr grid grid_of(std::size_t elements) noexcept {
    constexpr std::size_t of_block = 8192;
    const std::size_t blocks = elements / of_block < 1 ? 1 : elements / of_block > 256 ? 256 : elements / of_block;
    return {.blocks = static_cast<std::uint32_t>(blocks), .threads = 256, .hold = {}};
}

/// Points that are made before the work that they follow, so that recording one neither fails nor
/// waits for a device. Streams that can't make points beforehand make them when recording.
template <class Stream>
class point_reserve {
public:
    void reserve(std::span<Stream>) noexcept {}
    [[nodiscard]] auto record(std::size_t, Stream& stream) { return stream.record(); }
};

/// One value for each stream. The first values are within the object.
template <class T>
class reserved_values {
public:
    void resize(std::size_t n) {
        if (n > few_.size()) many_.resize(n);
    }
    [[nodiscard]] T& operator[](std::size_t r) noexcept { return many_.empty() ? few_[r] : many_[r]; }

private:
    std::array<T, ranks_in_place> few_{};
    std::vector<T> many_;
};

template <class Stream>
requires requires(Stream& s) { s.record(s.reserve()); }
class point_reserve<Stream> {
public:
    void reserve(std::span<Stream> streams) {
        made_.resize(streams.size());
        for (std::size_t r = 0; r < streams.size(); ++r) made_[r] = streams[r].reserve();
    }
    [[nodiscard]] auto record(std::size_t r, Stream& stream) { return stream.record(std::move(made_[r])); }

private:
    reserved_values<decltype(std::declval<Stream&>().reserve())> made_;
};
template <preparing_timeline Stream>
class point_reserve<Stream> {
public:
    void reserve(std::span<Stream> streams) {
        made_.resize(streams.size());
        for (std::size_t r = 0; r < streams.size(); ++r) made_[r] = streams[r].prepare();
    }
    [[nodiscard]] auto record(std::size_t r, Stream& stream) noexcept {
        auto made = std::move(made_[r]);
        stream.record(made);
        return made;
    }

private:
    reserved_values<typename Stream::point> made_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
