// SPDX-License-Identifier: Apache-2.0
// Which blocks are out, with size, alignment and label: what tells a right free from a foreign, double or
// wrong-size one, and what a leak report is made of, stack traces included when asked. Kept outside the blocks, since device memory isn't the host's
// to read.
//
//   gpushare::block_table blocks;
//   blocks.insert(p, {4096_B, 256, "kv-cache"});
//   if (blocks.remove(p, 4096_B, 256) == gpushare::errc::none) upstream.deallocate(p, 4096, 256);
#pragma once

#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/pointer_table.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/trace_store.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// One allocation. The label is the caller's text and must outlive the block (a literal, usually).
struct block {
    void* pointer = nullptr;
    bytes size{};
    std::size_t alignment = 0;
    std::string_view label{};
};

/// A block that is out, with all that is known of where it came from.
struct leak {
    block what{};
    std::string scope{};         // "engine/prefill": empty for the whole, and where there are no scopes
    std::vector<void*> trace{};  // return addresses, where they were asked for
};

/// Thread-safe: one mutex, held for a hash-table operation.
/// A template of nothing: where it is included and not used it costs little.
template <class = void>
class basic_block_table {
public:
    /// With `capture`, each block is entered with who allocated it: some microseconds each.
    explicit basic_block_table(trace_function capture = nullptr) noexcept : capture_(capture) {}

    /// Throws std::bad_alloc if the host has no memory for the entry. Pointers are unique while they are
    /// out, and none is null.
    void insert(const block& b) {
        const captured_trace callers(capture_);
        const std::lock_guard lock(mutex_);
        const auto trace = traces_.keep(callers);
        try {
            blocks_.insert(b.pointer, {b, trace});
        } catch (...) {
            traces_.drop(trace);
            throw;
        }
    }

    /// Forgets the block: errc::none, and the caller may free it. unknown_block (never inserted, or freed already) or
    /// wrong_size, and nothing changes.
    [[nodiscard]] errc remove(void* pointer, bytes size, std::size_t alignment) noexcept {
        const std::lock_guard lock(mutex_);
        const entry* const found = blocks_.find(pointer);
        if (found == nullptr) return errc::unknown_block;
        if (found->what.size != size || found->what.alignment != alignment) return errc::wrong_size;
        traces_.drop(found->trace);
        blocks_.erase(pointer);
        return errc::none;
    }

    /// Forgets all blocks and returns them: what has leaked, once nobody should hold any. Throws std::bad_alloc, and then
    /// nothing has changed.
    [[nodiscard]] std::vector<leak> take_all() {
        const std::lock_guard lock(mutex_);
        std::vector<leak> all;
        all.reserve(blocks_.size());
        blocks_.for_each([&](const entry& e) { all.push_back({e.what, {}, traces_.of(e.trace)}); });
        blocks_.for_each([&](const entry& e) { traces_.drop(e.trace); });
        blocks_.clear();
        return all;
    }

    [[nodiscard]] std::size_t size() const noexcept {
        const std::lock_guard lock(mutex_);
        return blocks_.size();
    }

private:
    struct entry {
        block what{};
        trace_store::id trace = trace_store::none;
    };

    const trace_function capture_;
    mutable std::mutex mutex_;
    detail::pointer_table<entry> blocks_;
    trace_store traces_;
};
using block_table = basic_block_table<>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
