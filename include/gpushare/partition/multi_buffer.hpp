// SPDX-License-Identifier: Apache-2.0
// One array spread over several devices: each device has its part by a data partition. Copies go from and to the host,
// and between neighbours.
//
//   gpushare::contiguous_partition rows{n, ranks};  // which elements each rank has
//   std::vector<device_memory*> memories{&node.memory({0}), &node.memory({1})};     // a memory resource for each rank
//   gpushare::multi_buffer<float, gpushare::contiguous_partition, device_memory> grid{rows, memories, /*halo=*/128};
//   grid.scatter(host_rows, streams);               // from a float*; streams: a std::span, [r] on the device of rank r
//   grid.exchange_halo(streams);                    // each rank gets 128 elements of either neighbour
//   grid.gather(host_rows, streams);
//
// Calls enqueue copies and don't wait for them: those of rank r go to streams[r]. The host array and the buffer must
// last until the streams have done them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <ranges>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/partition/data_partition.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// A block of a memory resource that returns to it.
template <memory_resource Resource>
class owned_block {
public:
    /// Allocates `size` bytes; nothing for 0. Throws what the resource throws, std::bad_alloc if it returns null.
    owned_block(Resource& from, std::size_t size, std::size_t alignment)
        : from_(&from),
          pointer_(size == 0 ? nullptr : from.allocate(size, alignment)),
          size_(size),
          alignment_(alignment) {
        if (size != 0 && pointer_ == nullptr) throw std::bad_alloc();
    }
    owned_block(owned_block&& other) noexcept
        : from_(other.from_),
          pointer_(std::exchange(other.pointer_, nullptr)),
          size_(other.size_),
          alignment_(other.alignment_) {}
    owned_block& operator=(owned_block other) noexcept {
        std::swap(from_, other.from_);
        std::swap(pointer_, other.pointer_);
        std::swap(size_, other.size_);
        std::swap(alignment_, other.alignment_);
        return *this;
    }
    ~owned_block() {
        if (pointer_ != nullptr) (void)from_->deallocate(pointer_, size_, alignment_);
    }

    [[nodiscard]] std::byte* data() const noexcept { return static_cast<std::byte*>(pointer_); }

private:
    Resource* from_;
    void* pointer_;
    std::size_t size_, alignment_;
};

}  // namespace detail

/// One array in parts on several devices. It copies elements as bytes. Movable; one owner. Not thread-safe.
template <class T, data_partition Partition, memory_resource Resource>
requires std::is_trivially_copyable_v<T>
class multi_buffer {
public:
    /// of each block
    static constexpr std::size_t alignment = std::max<std::size_t>(256, alignof(T));

    /// Allocates on each rank its elements and `halo` more on either side, from the resource of the same rank; all or
    /// nothing. Throws what the resources throw; operation_error (invalid_specification) if there is another number of
    /// resources than ranks, memory_error (size_overflow) for more bytes than there are addresses.
    template <std::ranges::forward_range Resources>
    requires std::same_as<std::ranges::range_value_t<Resources>, Resource*> multi_buffer(Partition shape,
                                                                                         const Resources& of_ranks,
                                                                                         std::uint64_t halo = 0)
        : shape_(std::move(shape)), halo_(halo) {
        check_count(static_cast<std::size_t>(std::ranges::distance(of_ranks)));
        blocks_.reserve(shape_.ranks());
        std::uint32_t rank = 0;
        for (Resource* resource : of_ranks) blocks_.emplace_back(*resource, size_of(rank++), alignment);
    }

    /// How the elements lie.
    [[nodiscard]] const Partition& shape() const noexcept { return shape_; }
    /// Elements of either neighbour.
    [[nodiscard]] std::uint64_t halo() const noexcept { return halo_; }
    /// The rank's own elements, with the halo right before and behind them. Null if there are neither.
    [[nodiscard]] T* data(std::uint32_t rank) const noexcept {
        auto* begin = reinterpret_cast<T*>(blocks_[rank].data());
        return begin == nullptr ? begin : begin + halo_;
    }
    /// The rank's elements, in its memory.
    [[nodiscard]] std::span<T> own(std::uint32_t rank) const noexcept {
        return {data(rank), static_cast<std::size_t>(shape_.extent(rank))};
    }

    /// Enqueues copies of all elements from one array of shape().size(), one copy for each contiguous run.
    template <copier Stream>
    void scatter(const T* from, std::span<Stream> streams) const {
        check_count(streams.size());
        for (std::uint32_t rank = 0; rank < shape_.ranks(); ++rank)
            for_each_run(shape_, rank, [&](std::uint64_t global, std::uint64_t local, std::uint64_t count) {
                copy(streams[rank], data(rank) + local, from + global, count);
            });
    }

    /// Enqueues copies of all elements back into one array.
    template <copier Stream>
    void gather(T* to, std::span<Stream> streams) const {
        check_count(streams.size());
        for (std::uint32_t rank = 0; rank < shape_.ranks(); ++rank)
            for_each_run(shape_, rank, [&](std::uint64_t global, std::uint64_t local, std::uint64_t count) {
                copy(streams[rank], to + global, data(rank) + local, count);
            });
    }

    /// Enqueues copies that fill every halo from the ranks that own its elements; beyond the ends of the whole array
    /// nothing is written. The copies run after the work enqueued before on all the streams involved, and work enqueued
    /// later may overwrite elements that others have fetched.
    template <copier Stream>
    requires run_partition<Partition>
    void exchange_halo(std::span<Stream> streams) const {
        check_count(streams.size());
        if (halo_ == 0) return;
        const auto ranks = shape_.ranks();
        std::vector<typename Stream::point> ready;
        for (auto& s : streams) ready.push_back(s.record());
        std::vector<std::vector<std::uint32_t>> read_by(ranks);
        for (std::uint32_t rank = 0; rank < ranks; ++rank) {
            if (shape_.extent(rank) == 0) continue;
            const auto fetch = [&](std::uint64_t begin, std::uint64_t end) {
                while (begin < end) {  // more than one neighbour, where ranks have less than a halo
                    const auto owner = shape_.rank_of(begin);
                    const auto count = std::min(end, shape_.begin(owner + 1)) - begin;
                    streams[rank].wait(ready[owner]);
                    copy(streams[rank], at(rank, begin), data(owner) + (begin - shape_.begin(owner)), count);
                    read_by[owner].push_back(rank);
                    begin += count;
                }
            };
            const auto first = shape_.begin(rank), last = shape_.begin(rank + 1);
            fetch(first - std::min(first, halo_), first);
            fetch(last, last + std::min(shape_.size() - last, halo_));
        }
        std::vector<typename Stream::point> fetched;
        for (auto& s : streams) fetched.push_back(s.record());
        for (std::uint32_t owner = 0; owner < ranks; ++owner)
            for (const auto reader : read_by[owner]) streams[owner].wait(fetched[reader]);
    }

private:
    void check_count(std::size_t count) const {
        if (count != shape_.ranks())
            raise({errc::invalid_specification, count, 0, shape_.ranks(), reason::wrong_count}, {},
                  "resources and streams, one per rank");
    }

    [[nodiscard]] std::size_t size_of(std::uint32_t rank) const {
        const auto extent = shape_.extent(rank);
        if (extent == 0) return 0;
        constexpr auto most = std::numeric_limits<std::size_t>::max() / sizeof(T);
        if (halo_ > most / 4 || extent > most / 4)
            raise({errc::size_overflow, std::max<std::uint64_t>(extent, halo_), 0, most / 4, reason::count_limit}, {},
                  "elements of a rank, or of its halo");
        return static_cast<std::size_t>(extent + 2 * halo_) * sizeof(T);
    }

    // Where the rank keeps an element of its own or of its halo.
    [[nodiscard]] T* at(std::uint32_t rank, std::uint64_t global) const noexcept {
        return data(rank) + (static_cast<std::ptrdiff_t>(global) - static_cast<std::ptrdiff_t>(shape_.begin(rank)));
    }

    template <copier Stream>
    static void copy(Stream& on, T* to, const T* from, std::uint64_t count) {
        on.copy(to, from, static_cast<std::size_t>(count) * sizeof(T));
    }

    Partition shape_;
    std::uint64_t halo_;
    std::vector<detail::owned_block<Resource>> blocks_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
