// SPDX-License-Identifier: Apache-2.0
// Many arrays as one, for transports that take no list: in one part as they are, or in as many
// parts of equal length as there are ranks, each with a shard of every array.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The slot of an array of `n` elements in each part: the size of the largest shard, so that all
/// ranks have one layout.
[[nodiscard]] constexpr std::size_t slot_of(std::size_t n, std::uint32_t parts) noexcept {
    return n / parts + (n % parts != 0 ? 1 : 0);
}

/// Which parts of a packed_list are meant.
struct part_range {
    std::uint32_t begin = 0, end = 1;
};

/// Kept from step to step for its memory.
template <class T>
class packed_list {
public:
    /// If the arrays already have this layout, data() is their own memory. Otherwise data() is a
    /// copy of `which` parts; other parts, and gaps between shards, have any content.
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
    /// Back into the arrays.
    void unpack(std::span<const std::span<T>> list, part_range which) const noexcept {
        if (!is_copy_) return;
        each_slot(list, which, [](std::span<T> array, std::span<T> slot) { std::ranges::copy(slot, array.begin()); });
    }
    [[nodiscard]] std::span<T> data() const noexcept { return data_; }  ///< all parts
    /// A transport may still touch it, after a fault with buffers_in_use: its memory is never freed.
    void leave_behind() noexcept { (void)new (std::nothrow) std::vector<T>(std::move(copy_)); }

private:
    /// `f(shard, where it lies packed)` for each array and part.
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
