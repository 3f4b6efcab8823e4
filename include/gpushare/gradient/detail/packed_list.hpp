// SPDX-License-Identifier: Apache-2.0
// Packs many arrays into one, for transports that take no list. The result has a single part with
// whole arrays, or a part for each rank with a shard of every array. All parts have equal lengths.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/gradient/detail/lent_arrays.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The size of an array's slot in each part: the size of its largest shard, so that all ranks have
/// the same layout. The array has `n` elements.
[[nodiscard]] constexpr std::size_t slot_of(std::size_t n, std::uint32_t parts) noexcept {
    return n / parts + (n % parts != 0 ? 1 : 0);
}

/// A range of a packed_list's parts.
struct part_range {
    std::uint32_t begin = 0, end = 1;
};

/// The packed copy of some arrays, kept from step to step so that its memory is allocated once.
template <class T>
class packed_list {
public:
    /// If the arrays already have this layout, data() is their own memory. Otherwise data() is a
    /// copy of the parts `which`; other parts, and gaps between shards, have unspecified content.
    void pack(std::span<const std::span<T>> list, std::uint32_t parts, part_range which) {
        parts_ = parts;
        std::size_t elements = 0, slots = 0;
        bool lies_so = parts == 1 || (list.size() == 1 && list.front().size() % parts == 0);
        for (const auto& array : list) {
            lies_so = lies_so && array.data() == list.front().data() + elements;
            elements += array.size();
            slots += slot_of(array.size(), parts);
        }
        is_copy_ = !lies_so;
        data_ = list.empty() ? std::span<T>() : std::span<T>(list.front().data(), elements);
        if (lies_so) return;
        copy_.resize(slots * parts);
        data_ = copy_;
        each_slot(list, which, [](std::span<T> array, std::span<T> slot) { std::ranges::copy(array, slot.begin()); });
    }
    /// Copies the parts `which` back into the arrays.
    void unpack(std::span<const std::span<T>> list, part_range which) const noexcept {
        if (!is_copy_) return;
        each_slot(list, which, [](std::span<T> array, std::span<T> slot) { std::ranges::copy(slot, array.begin()); });
    }
    [[nodiscard]] std::span<T> data() const noexcept { return data_; }  ///< all parts
    /// Never frees the copy: after a fault with buffers_in_use, a transport may still touch it.
    void leave_behind() noexcept { never_free(copy_); }

private:
    /// Calls f(shard, its packed place) for each array and part.
    template <class F>
    void each_slot(std::span<const std::span<T>> list, part_range which, const F& f) const {
        const std::size_t each = data_.size() / parts_;
        for (std::uint32_t p = which.begin; p < which.end; ++p) {
            std::size_t at = p * each;
            for (const auto& array : list) {
                const element_range shard = shard_of(array.size(), p, parts_);
                f(array.subspan(shard.begin, shard.size()), data_.subspan(at, shard.size()));
                at += slot_of(array.size(), parts_);
            }
        }
    }

    std::uint32_t parts_ = 1;
    bool is_copy_ = false;
    std::span<T> data_;
    std::vector<T> copy_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
