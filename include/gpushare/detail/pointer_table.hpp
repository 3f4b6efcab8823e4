// SPDX-License-Identifier: Apache-2.0
// A hash table with addresses for keys: open addressing, linear probing, at most half full. It
// allocates only to grow, and takes a small fraction of std::unordered_map's time to compile.
//
//   detail::pointer_table<entry> out;    out.insert(p, {4096, 256});
//   if (const entry* e = out.find(p)) ... ;    out.erase(p);
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gpushare/config.hpp>
#include <gpushare/detail/golden_ratio.hpp>
#include <gpushare/detail/plain_list.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Not thread-safe. The null pointer isn't a valid key, and find() never finds it.
template <class T>
class pointer_table {
public:
    [[nodiscard]] std::size_t size() const noexcept { return size_; }

    /// Adds a key, or replaces the value of a key that is in the table. Throws std::bad_alloc, and
    /// then nothing has changed.
    void insert(void* key, const T& value) {
        static_assert(std::is_trivially_copyable_v<T>);  // values move within the table
        if (slots_.size() < 2 * (size_ + kept_ + 1)) grow();
        slot& s = slots_[seek(key)];
        if (s.key == nullptr) ++size_;
        s.key = key;
        s.value = value;
    }

    /// Null if the key isn't in the table. The pointer is valid until the table changes.
    [[nodiscard]] const T* find(const void* key) const noexcept {
        if (size_ == 0) return nullptr;
        const slot& s = slots_[seek(key)];
        return s.key != nullptr ? &s.value : nullptr;
    }

    void erase(const void* key) noexcept {
        if (find(key) == nullptr) return;
        std::size_t hole = seek(key);
        // There are no tombstones: an entry moves back into the hole if the hole is between its
        // home and its place.
        for (std::size_t i = next(hole); slots_[i].key != nullptr; i = next(i)) {
            if (distance(home(slots_[i].key), i) < distance(hole, i)) continue;
            slots_[hole] = slots_[i];
            hole = i;
        }
        slots_[hole].key = nullptr;
        --size_;
    }

    /// As erase, of a key that is in the table, but its room stays reserved: put_back() or forget()
    /// must follow.
    void take_out(const void* key) noexcept {
        erase(key);
        ++kept_;
    }
    /// Puts back a key that was taken out.
    void put_back(void* key, const T& value) noexcept {
        --kept_;
        insert(key, value);  // there is room
    }
    /// A key that was taken out won't come back.
    void forget() noexcept { --kept_; }

    void clear() noexcept {
        if (kept_ == 0) slots_.clear();
        for (slot& s : slots_) s.key = nullptr;
        size_ = 0;
    }

    /// Calls f(value) for each entry, in no particular order. `f` must not change the table.
    template <class F>
    void for_each(F f) const {
        for (const slot& s : slots_)
            if (s.key != nullptr) f(s.value);
    }

private:
    struct slot {
        void* key = nullptr;
        T value{};
    };

    // Fibonacci hashing: addresses of devices differ in their middle bits only, which the product
    // spreads upwards.
    [[nodiscard]] std::size_t home(const void* key) const noexcept {
        const std::uint64_t product = reinterpret_cast<std::uintptr_t>(key) * golden_ratio;
        return static_cast<std::size_t>(product >> 32U) & (slots_.size() - 1);
    }
    [[nodiscard]] std::size_t next(std::size_t i) const noexcept { return (i + 1) & (slots_.size() - 1); }
    [[nodiscard]] std::size_t distance(std::size_t from, std::size_t to) const noexcept {
        return (to - from) & (slots_.size() - 1);
    }

    // The slot of the key, or the free slot where the key would be. There is always a free slot.
    [[nodiscard]] std::size_t seek(const void* key) const noexcept {
        std::size_t i = home(key);
        while (slots_[i].key != nullptr && slots_[i].key != key) i = next(i);
        return i;
    }

    void grow() {
        plain_list<slot> old(slots_.empty() ? 16 : 2 * slots_.size());
        old.swap(slots_);
        for (const slot& s : old)
            if (s.key != nullptr) slots_[seek(s.key)] = s;
    }

    plain_list<slot> slots_;  // none, or a power of two
    std::size_t size_ = 0;
    std::size_t kept_ = 0;  // for how many more entries there is room
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
