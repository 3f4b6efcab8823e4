// SPDX-License-Identifier: Apache-2.0
// Places the elements [0, n) on M ranks: contiguous, block-cyclic, or by weight. Every element is
// on exactly one rank. Index arithmetic only, in 64 bits, for host and device code.
//
//   // boundaries at multiples of 64
//   constexpr gpushare::contiguous_partition rows{1'000'000, 8, 64};
//   const auto r = rows.rank_of(i);     const auto j = rows.local_index(i);     i == rows.global_index(r, j);
//
// A multi_buffer is one array spread over several devices by a data partition. Its copies go from
// and to the host, and between neighbours.
//
//   gpushare::contiguous_partition parts{n, ranks};  // which elements each rank has
//   // a memory resource for each rank
//   std::vector<device_memory*> memories{&node.memory({0}), &node.memory({1})};
//   gpushare::multi_buffer<float, gpushare::contiguous_partition, device_memory> grid{parts, memories, /*halo=*/128};
//   // from a float*; streams: a std::span, [r] on the device of rank r
//   grid.scatter(host_rows, streams);
//   grid.exchange_halo(streams);  // each rank gets 128 elements of either neighbour
//   grid.gather(host_rows, streams);
//
// Calls enqueue copies without waiting for them; the copies of rank r go to streams[r]. The host
// array and the buffer must exist until the copies are done.
#pragma once

#include <algorithm>
#include <concepts>
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

namespace gpushare {
inline namespace GPUSHARE_ABI {

// clang-format 14 would break the compound requirements apart:
// clang-format off

/// A partition of [0, size()) over ranks 0 to ranks()-1. Indices must be in range: only the
/// construction is checked.
///   extent(rank)           elements of the rank, numbered from 0: its local indices
///   rank_of(i)             the rank that has element i
///   local_index(i)         its number there
///   global_index(rank, j)  the element with that number
///   run(rank, j)           how many elements from there on are contiguous, on the rank and in the
///                          whole; 0 at the end
template <class P>
concept data_partition = std::copyable<P> && requires(const P& p, std::uint32_t rank, std::uint64_t i) {
    { p.size() } noexcept -> std::same_as<std::uint64_t>;
    { p.ranks() } noexcept -> std::same_as<std::uint32_t>;
    { p.extent(rank) } noexcept -> std::same_as<std::uint64_t>;
    { p.rank_of(i) } noexcept -> std::same_as<std::uint32_t>;
    { p.local_index(i) } noexcept -> std::same_as<std::uint64_t>;
    { p.global_index(rank, i) } noexcept -> std::same_as<std::uint64_t>;
    { p.run(rank, i) } noexcept -> std::same_as<std::uint64_t>;
};

/// A partition in which each rank has one contiguous run, [begin(rank), begin(rank + 1)), in rank
/// order.
template <class P>
concept run_partition = data_partition<P> && requires(const P& p, std::uint32_t rank) {
    { p.begin(rank) } noexcept -> std::same_as<std::uint64_t>;  // rank <= ranks()
};

// clang-format on

namespace detail {

struct partition_shape {
    std::uint64_t size = 0, block = 1;
    std::uint32_t ranks = 1;

    /// Throws operation_error (invalid_specification) for no ranks or empty blocks.
    constexpr partition_shape(std::uint64_t n, std::uint32_t m, std::uint64_t b) : size(n), block(b), ranks(m) {
        if (m == 0 || b == 0)
            throw operation_error(errc::invalid_specification, {},
                                  "a data partition needs ranks, and blocks of elements");
    }

    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t blocks() const noexcept {
        return size / block + (size % block != 0 ? 1 : 0);
    }
    /// The first element of block `k` <= blocks(). The last block may be cut short.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t begin_of(std::uint64_t k) const noexcept {
        return k > size / block ? size : k * block;
    }
};

/// The members that follow from the boundaries alone.
template <class Derived>
class run_arithmetic {
public:
    /// The number of elements of the rank.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t extent(std::uint32_t rank) const noexcept {
        return self().begin(rank + 1) - self().begin(rank);
    }
    /// The number of element `i` on its rank.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t local_index(std::uint64_t i) const noexcept {
        return i - self().begin(self().rank_of(i));
    }
    /// The element with number `j` on the rank.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t global_index(std::uint32_t rank, std::uint64_t j) const noexcept {
        return self().begin(rank) + j;
    }
    /// How many elements from number `j` on are contiguous, both on the rank and in the whole.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t run(std::uint32_t rank, std::uint64_t j) const noexcept {
        return extent(rank) - j;
    }

private:
    [[nodiscard]] GPUSHARE_HD constexpr const Derived& self() const noexcept {
        return static_cast<const Derived&>(*this);
    }
};

}  // namespace detail

/// One contiguous run per rank, as equal as possible in blocks of `align` elements. The numbers of
/// blocks differ by at most one, lower ranks have more, and the last block may be cut short.
/// Boundaries are multiples of `align`, or the end.
class contiguous_partition : public detail::run_arithmetic<contiguous_partition> {
public:
    /// `align`: each boundary is a multiple of `align`. Throws operation_error
    /// (invalid_specification) for no ranks or an `align` of 0.
    constexpr contiguous_partition(std::uint64_t size, std::uint32_t ranks, std::uint64_t align = 1)
        : shape_(size, ranks, align), each_(shape_.blocks() / ranks), more_(shape_.blocks() % ranks) {}

    /// The number of elements.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t size() const noexcept { return shape_.size; }
    /// The number of ranks.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint32_t ranks() const noexcept { return shape_.ranks; }
    /// The first element of the rank; size() for rank ranks().
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t begin(std::uint32_t rank) const noexcept {
        return shape_.begin_of(rank * each_ + (rank < more_ ? rank : more_));
    }
    /// The rank that owns element `i`.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint32_t rank_of(std::uint64_t i) const noexcept {
        const auto block = i / shape_.block, of_more = more_ * (each_ + 1);
        return static_cast<std::uint32_t>(block < of_more ? block / (each_ + 1) : more_ + (block - of_more) / each_);
    }

private:
    detail::partition_shape shape_;
    std::uint64_t each_, more_;  // the blocks of every rank; the first `more_` ranks have one more
};
static_assert(run_partition<contiguous_partition>);

/// Block-cyclic: block k of `block` elements is on rank k % M. The last block may be cut short.
class block_cyclic_partition {
public:
    /// `block` elements go to each rank in turn. Throws operation_error (invalid_specification) for
    /// no ranks or a `block` of 0.
    constexpr block_cyclic_partition(std::uint64_t size, std::uint32_t ranks, std::uint64_t block)
        : shape_(size, ranks, block) {}

    /// The number of elements.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t size() const noexcept { return shape_.size; }
    /// The number of ranks.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint32_t ranks() const noexcept { return shape_.ranks; }
    /// The number of elements of a block.
    [[nodiscard]] constexpr std::uint64_t block() const noexcept { return shape_.block; }
    /// The number of elements of the rank.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t extent(std::uint32_t rank) const noexcept {
        const auto full = shape_.size / shape_.block;  // blocks that aren't cut short
        const auto mine = full / shape_.ranks + (rank < full % shape_.ranks ? 1 : 0);
        return mine * shape_.block + (rank == full % shape_.ranks ? shape_.size % shape_.block : 0);
    }
    /// The rank that owns element `i`.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint32_t rank_of(std::uint64_t i) const noexcept {
        return static_cast<std::uint32_t>(i / shape_.block % shape_.ranks);
    }
    /// The number of element `i` on its rank.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t local_index(std::uint64_t i) const noexcept {
        return i / shape_.block / shape_.ranks * shape_.block + i % shape_.block;
    }
    /// The element with number `j` on the rank.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t global_index(std::uint32_t rank, std::uint64_t j) const noexcept {
        return (j / shape_.block * shape_.ranks + rank) * shape_.block + j % shape_.block;
    }
    /// How many elements from number `j` on are contiguous, both on the rank and in the whole.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t run(std::uint32_t rank, std::uint64_t j) const noexcept {
        const auto rest_of_block = shape_.block - j % shape_.block, rest = extent(rank) - j;
        return rest < rest_of_block ? rest : rest_of_block;
    }

private:
    detail::partition_shape shape_;
};
static_assert(data_partition<block_cyclic_partition>);

/// One contiguous run per rank, in proportion to weights. Every boundary is less than one `align`
/// below its exact place, so an extent differs from its share by less than one `align`. Boundaries
/// are multiples of `align`, or the end. A rank of weight 0 has nothing. The boundaries, at most
/// MaxRanks + 1, are stored by value, so that the partition can be passed to a kernel.
template <std::uint32_t MaxRanks = 16>
class weighted_partition : public detail::run_arithmetic<weighted_partition<MaxRanks>> {
public:
    /// Throws operation_error (invalid_specification) if no weight is above 0, if the sum of the
    /// weights exceeds 64 bits, or for more ranks than MaxRanks.
    constexpr weighted_partition(std::uint64_t size, std::span<const std::uint64_t> weights, std::uint64_t align = 1)
        : ranks_(static_cast<std::uint32_t>(weights.size())) {
        (void)detail::partition_shape(size, ranks_, align);  // checks
        if (weights.size() > MaxRanks)
            throw operation_error(errc::invalid_specification, {},
                                  "a weighted partition has no room for that many ranks");
        std::uint64_t sum = 0;
        for (const auto w : weights) {
            if (sum + w < sum)
                throw operation_error(errc::invalid_specification, {},
                                      "the sum of a partition's weights exceeds 64 bits");
            sum += w;
        }
        if (sum == 0) throw operation_error(errc::invalid_specification, {}, "a partition needs some weight");
        std::uint64_t before = 0;
        for (std::uint32_t r = 0; r < ranks_; ++r) {
            const auto exact = share_of(size, before, sum);
            begins_[r] = exact == size ? size : exact - exact % align;
            before += weights[r];
        }
        begins_[ranks_] = size;
    }

    /// The number of elements.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t size() const noexcept { return begins_[ranks_]; }
    /// The number of ranks.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint32_t ranks() const noexcept { return ranks_; }
    /// The first element of the rank; size() for rank ranks().
    [[nodiscard]] GPUSHARE_HD constexpr std::uint64_t begin(std::uint32_t rank) const noexcept { return begins_[rank]; }
    /// The rank that owns element `i`.
    [[nodiscard]] GPUSHARE_HD constexpr std::uint32_t rank_of(std::uint64_t i) const noexcept {
        std::uint32_t low = 0, high = ranks_;  // begins_[low] <= i < begins_[high]
        while (high - low > 1) {
            const auto middle = low + (high - low) / 2;
            (begins_[middle] <= i ? low : high) = middle;
        }
        return low;
    }

private:
    // a * b / c, rounded down, for b <= c.
    static constexpr std::uint64_t share_of(std::uint64_t a, std::uint64_t b, std::uint64_t c) noexcept {
        __extension__ using wide = unsigned __int128;
        return static_cast<std::uint64_t>(static_cast<wide>(a) * b / c);
    }

    // Not std::array, whose operator[] device code can't call.
    std::uint64_t begins_[MaxRanks + 1] = {};
    std::uint32_t ranks_;
};
static_assert(run_partition<weighted_partition<>>);

/// Calls `f(global, local, count)` for each contiguous run of `rank`, in ascending order.
template <data_partition P, std::invocable<std::uint64_t, std::uint64_t, std::uint64_t> F>
constexpr void for_each_run(const P& p, std::uint32_t rank, F f) {
    for (std::uint64_t j = 0, n = 0; (n = p.run(rank, j)) != 0; j += n) f(p.global_index(rank, j), j, n);
}

namespace detail {

/// A block of a memory resource, returned by the destructor.
template <memory_resource Resource>
class owned_block {
public:
    /// Allocates `size` bytes; nothing for 0. Throws the exceptions of the resource, and
    /// std::bad_alloc if it returns null.
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

/// One array in parts on several devices. Elements are copied as bytes. Movable; one owner. Not
/// thread-safe.
template <class T, data_partition Partition, memory_resource Resource>
requires std::is_trivially_copyable_v<T>
class multi_buffer {
public:
    /// The alignment of each block.
    static constexpr std::size_t alignment = std::max<std::size_t>(256, alignof(T));

    /// Allocates for each rank its elements and `halo` more on either side, from the rank's
    /// resource; all or nothing. Throws the exceptions of the resources; operation_error
    /// (invalid_specification) if the number of resources isn't the number of ranks; memory_error
    /// (size_overflow) for more bytes than there are addresses.
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

    /// The partition of the elements.
    [[nodiscard]] const Partition& shape() const noexcept { return shape_; }
    /// The number of elements that a rank has of either neighbour.
    [[nodiscard]] std::uint64_t halo() const noexcept { return halo_; }
    /// The rank's own elements, with the halo right before and after them. Null if the rank has
    /// neither.
    [[nodiscard]] T* data(std::uint32_t rank) const noexcept {
        auto* begin = reinterpret_cast<T*>(blocks_[rank].data());
        return begin == nullptr ? begin : begin + halo_;
    }
    /// The rank's elements, in its memory.
    [[nodiscard]] std::span<T> own(std::uint32_t rank) const noexcept {
        return {data(rank), static_cast<std::size_t>(shape_.extent(rank))};
    }

    /// Enqueues copies of all elements from one array of shape().size(), one copy for each
    /// contiguous run.
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

    /// Enqueues copies that fill every halo from the ranks that own its elements; halo elements
    /// beyond the ends of the array aren't written. The copies run after the work enqueued before
    /// on all the streams involved, and work enqueued later may overwrite elements that others have
    /// fetched.
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
                // Several neighbours, if ranks have fewer elements than a halo.
                while (begin < end) {
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

    // The address of an element of the rank or its halo.
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
