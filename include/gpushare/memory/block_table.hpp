// SPDX-License-Identifier: Apache-2.0
// Records the blocks that are out, with size, alignment and label. It distinguishes a right free
// from a foreign, double or wrong-size one, and makes leak reports, with stack traces if wanted.
// The entries lie in host memory, since the host can't read device memory.
//
//   gpushare::block_table blocks;
//   blocks.insert({p, 4096_B, 256, "kv-cache"});
//   if (blocks.remove(p, 4096_B, 256) == gpushare::errc::none) upstream.deallocate(p, 4096, 256);
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/pointer_table.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/trace_store.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The blocks that are out. Thread-safe: one mutex, held for a hash-table operation.
class block_table {
public:
    /// With `capture`, each block's entry has the stack trace of its allocation, which costs some microseconds.
    explicit block_table(trace_function capture = nullptr) noexcept : capture_(capture) {}

    /// Enters a block, whose pointer is neither null nor in the table. Throws std::bad_alloc if the host has no memory
    /// for the entry.
    void insert(const block& b);

    /// Forgets the block. errc::none: the caller may free the block. unknown_block (never inserted,
    /// or already freed) or wrong_size: nothing changes.
    [[nodiscard]] errc remove(void* pointer, bytes size, std::size_t alignment) noexcept;

    /// The block that begins at `pointer`, if one is in the table.
    [[nodiscard]] std::optional<block> find(const void* pointer) const noexcept;

    /// Removes all entries and returns them: the leaks, if every block should have been freed. If
    /// this throws std::bad_alloc, nothing has changed.
    [[nodiscard]] std::vector<leak> take_all();

    /// Removes all entries, and gives each leak whose block was in the table the trace of its entry. Throws
    /// std::bad_alloc; all entries are there then.
    void take_traces(std::span<leak> of);

    /// How many blocks are out.
    [[nodiscard]] std::size_t size() const noexcept;

private:
    struct entry {
        block what{};
        detail::trace_store::id trace = detail::trace_store::none;
    };

    void clear() noexcept;  // under the mutex

    const trace_function capture_;
    mutable std::mutex mutex_;
    detail::pointer_table<entry> blocks_;
    detail::trace_store traces_;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE void block_table::insert(const block& b) {
    const detail::captured_trace callers(capture_);
    const std::lock_guard lock(mutex_);
    const auto trace = traces_.keep(callers);
    try {
        blocks_.insert(b.pointer, {b, trace});
    } catch (...) {
        traces_.drop(trace);
        throw;
    }
}

GPUSHARE_INLINE errc block_table::remove(void* pointer, bytes size, std::size_t alignment) noexcept {
    const std::lock_guard lock(mutex_);
    const entry* const found = blocks_.find(pointer);
    if (found == nullptr) return errc::unknown_block;
    if (found->what.size != size || found->what.alignment != alignment) return errc::wrong_size;
    traces_.drop(found->trace);
    blocks_.erase(pointer);
    return errc::none;
}

GPUSHARE_INLINE std::optional<block> block_table::find(const void* pointer) const noexcept {
    const std::lock_guard lock(mutex_);
    const entry* const found = blocks_.find(pointer);
    return found == nullptr ? std::nullopt : std::optional(found->what);
}

GPUSHARE_INLINE auto block_table::take_all() -> std::vector<leak> {
    const std::lock_guard lock(mutex_);
    std::vector<leak> all;
    all.reserve(blocks_.size());
    blocks_.for_each([&](const entry& e) { all.push_back({e.what, {}, traces_.of(e.trace)}); });
    clear();
    return all;
}

GPUSHARE_INLINE void block_table::take_traces(std::span<leak> of) {
    const std::lock_guard lock(mutex_);
    for (auto& l : of)
        if (const entry* const found = blocks_.find(l.what.pointer)) l.trace = traces_.of(found->trace);
    clear();
}

GPUSHARE_INLINE void block_table::clear() noexcept {
    blocks_.for_each([&](const entry& e) { traces_.drop(e.trace); });
    blocks_.clear();
}

GPUSHARE_INLINE std::size_t block_table::size() const noexcept {
    const std::lock_guard lock(mutex_);
    return blocks_.size();
}

#endif  // GPUSHARE_BODIES

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
