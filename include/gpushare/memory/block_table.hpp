// SPDX-License-Identifier: Apache-2.0
// Records the allocated blocks, with size, alignment and label. The table detects frees of unknown
// blocks, double frees and frees of the wrong size. It also makes leak reports, with stack traces
// on request. The entries are in host memory, since the host can't read device memory.
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

/// The allocated blocks. Thread-safe: one mutex, held for a hash-table operation.
class block_table {
public:
    /// With `capture`, each block's entry has the stack trace of its allocation, which costs a few
    /// microseconds.
    explicit block_table(trace_function capture = nullptr) noexcept : capture_(capture) {}

    /// Enters a block, whose pointer is neither null nor in the table. Throws std::bad_alloc if the
    /// host has no memory for the entry.
    void insert(const block& b);

    /// Forgets the block. errc::none: the caller may free the block. unknown_block (never inserted,
    /// or already freed) or wrong_size: nothing changes.
    [[nodiscard]] errc remove(void* pointer, bytes size, std::size_t alignment) noexcept;

    /// The entry of a block that take_out() has removed.
    class taken {
    public:
        taken() noexcept = default;  ///< of no block

    private:
        friend block_table;
        block what_{};
        detail::trace_store::id trace_ = detail::trace_store::none;
    };
    /// As remove(), and `entry` gets the removed entry. After errc::none call forget() if the block
    /// could be freed, and put_back() if not.
    [[nodiscard]] errc take_out(void* pointer, bytes size, std::size_t alignment, taken& entry) noexcept;
    /// After take_out(): the block is back.
    void forget(const taken& entry) noexcept;
    /// After take_out(): the block stays allocated, with its label and trace.
    void put_back(const taken& entry) noexcept;

    /// The block that begins at `pointer`, if one is in the table.
    [[nodiscard]] std::optional<block> find(const void* pointer) const noexcept;

    /// All entries. Throws std::bad_alloc.
    [[nodiscard]] std::vector<leak> all() const;
    /// Removes all entries and returns them: the leaks, if every block should have been freed. If
    /// this throws std::bad_alloc, nothing has changed.
    [[nodiscard]] std::vector<leak> take_all();

    /// Removes all entries. Each leak whose block was in the table gets the trace of that entry. If
    /// this throws std::bad_alloc, no entry was removed.
    void take_traces(std::span<leak> of);

    /// The number of allocated blocks.
    [[nodiscard]] std::size_t size() const noexcept;

private:
    // Under the mutex.
    [[nodiscard]] std::vector<leak> list() const;
    void clear() noexcept;

    const trace_function capture_;
    mutable std::mutex mutex_;
    detail::pointer_table<taken> blocks_;
    detail::trace_store traces_;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE void block_table::insert(const block& b) {
    const detail::captured_trace callers(capture_);
    const std::lock_guard lock(mutex_);
    const auto trace = traces_.keep(callers);
    try {
        taken entry;
        entry.what_ = b;
        entry.trace_ = trace;
        blocks_.insert(b.pointer, entry);
    } catch (...) {
        traces_.drop(trace);
        throw;
    }
}

GPUSHARE_INLINE errc block_table::remove(void* pointer, bytes size, std::size_t alignment) noexcept {
    taken entry;
    const errc why = take_out(pointer, size, alignment, entry);
    if (why == errc::none) forget(entry);
    return why;
}

GPUSHARE_INLINE errc block_table::take_out(void* pointer, bytes size, std::size_t alignment, taken& entry) noexcept {
    const std::lock_guard lock(mutex_);
    const taken* const found = blocks_.find(pointer);
    if (found == nullptr) return errc::unknown_block;
    if (found->what_.size != size || found->what_.alignment != alignment) return errc::wrong_size;
    entry = *found;
    blocks_.take_out(pointer);
    return errc::none;
}

GPUSHARE_INLINE void block_table::forget(const taken& entry) noexcept {
    const std::lock_guard lock(mutex_);
    blocks_.forget();
    traces_.drop(entry.trace_);
}

GPUSHARE_INLINE void block_table::put_back(const taken& entry) noexcept {
    const std::lock_guard lock(mutex_);
    blocks_.put_back(entry.what_.pointer, entry);
}

GPUSHARE_INLINE std::optional<block> block_table::find(const void* pointer) const noexcept {
    const std::lock_guard lock(mutex_);
    const taken* const found = blocks_.find(pointer);
    return found == nullptr ? std::nullopt : std::optional(found->what_);
}

GPUSHARE_INLINE auto block_table::all() const -> std::vector<leak> {
    const std::lock_guard lock(mutex_);
    return list();
}

GPUSHARE_INLINE auto block_table::take_all() -> std::vector<leak> {
    const std::lock_guard lock(mutex_);
    auto found = list();
    clear();
    return found;
}

GPUSHARE_INLINE void block_table::take_traces(std::span<leak> of) {
    const std::lock_guard lock(mutex_);
    for (auto& l : of)
        if (const taken* const found = blocks_.find(l.what.pointer)) l.trace = traces_.of(found->trace_);
    clear();
}

GPUSHARE_INLINE auto block_table::list() const -> std::vector<leak> {
    std::vector<leak> found;
    found.reserve(blocks_.size());
    blocks_.for_each([&](const taken& e) { found.push_back({e.what_, {}, traces_.of(e.trace_)}); });
    return found;
}

GPUSHARE_INLINE void block_table::clear() noexcept {
    blocks_.for_each([&](const taken& e) { traces_.drop(e.trace_); });
    blocks_.clear();
}

GPUSHARE_INLINE std::size_t block_table::size() const noexcept {
    const std::lock_guard lock(mutex_);
    return blocks_.size();
}

#endif  // GPUSHARE_BODIES

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
