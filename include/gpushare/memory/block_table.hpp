// SPDX-License-Identifier: Apache-2.0
// Which blocks are out, with size, alignment and label: what tells a right free from a foreign, double or
// wrong-size one, and what a leak report is made of. Kept outside the blocks, since device memory isn't the host's
// to read.
//
//   gpushare::block_table blocks;
//   blocks.insert(p, {4096_B, 256, "kv-cache"});
//   if (blocks.remove(p, 4096_B, 256) == gpushare::errc::none) upstream.deallocate(p, 4096, 256);
#pragma once

#include <cstddef>
#include <mutex>
#include <string_view>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/pointer_table.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// One allocation. The label is the caller's text and must outlive the block (a literal, usually).
struct block {
    void* pointer = nullptr;
    bytes size{};
    std::size_t alignment = 0;
    std::string_view label{};
};

/// Thread-safe: one mutex, held for a hash-table operation.
class block_table {
public:
    /// Throws std::bad_alloc if the host has no memory for the entry. Pointers are unique while they are
    /// out, and none is null.
    void insert(const block& b) {
        const std::lock_guard lock(mutex_);
        blocks_.insert(b.pointer, b);
    }

    /// Forgets the block: errc::none, and the caller may free it. unknown_block (never inserted, or freed already) or
    /// wrong_size, and nothing changes.
    [[nodiscard]] errc remove(void* pointer, bytes size, std::size_t alignment) noexcept {
        const std::lock_guard lock(mutex_);
        const block* const found = blocks_.find(pointer);
        if (found == nullptr) return errc::unknown_block;
        if (found->size != size || found->alignment != alignment) return errc::wrong_size;
        blocks_.erase(pointer);
        return errc::none;
    }

    /// Forgets all blocks and returns them: what has leaked, once nobody should hold any.
    [[nodiscard]] std::vector<block> take_all() {
        const std::lock_guard lock(mutex_);
        std::vector<block> all;
        all.reserve(blocks_.size());
        blocks_.for_each([&](const block& b) { all.push_back(b); });
        blocks_.clear();
        return all;
    }

    [[nodiscard]] std::size_t size() const noexcept {
        const std::lock_guard lock(mutex_);
        return blocks_.size();
    }

private:
    mutable std::mutex mutex_;
    detail::pointer_table<block> blocks_;
};

}  // namespace gpushare::inline GPUSHARE_ABI
