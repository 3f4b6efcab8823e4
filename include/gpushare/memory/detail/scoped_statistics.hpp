// SPDX-License-Identifier: Apache-2.0
// An allocator's statistics, for the whole and for each scope: the allocated bytes, their peak and
// total, and the counts of calls and failures. On request it also keeps a stack trace of each
// allocated block. statistics_resource.hpp has one.
//
//   gpushare::detail::scoped_statistics all;
//   const auto prefill = all.open(all.whole, "prefill");
//   all.enter(prefill, {p, 4096_B, 256, "kv-cache"});
//   all.figures(prefill).peak;     all.leaks();
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/pointer_table.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/detail/trace_store.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A scope. The id is valid while the scope is open or a block that was allocated in it still
/// exists.
struct scope_id {
    std::uint32_t index = 0;
};

/// Thread-safe: one mutex, held for a few table look-ups.
class scoped_statistics {
public:
    /// The scope of everything.
    static constexpr scope_id whole{0};

    /// With `capture`, each block is entered with the stack that allocated it: a few microseconds
    /// and 136 bytes each.
    explicit scoped_statistics(trace_function capture = nullptr) : capture_(capture), scopes_(1) {}

    /// A scope within another one. Throws std::bad_alloc.
    [[nodiscard]] scope_id open(scope_id in, std::string name) {
        const std::lock_guard lock(mutex_);
        if (vacant_ == none) {
            scopes_.emplace_back();
            vacant_ = static_cast<std::uint32_t>(scopes_.size() - 1);
        }
        const auto index = vacant_;
        vacant_ = scopes_[index].parent;
        scopes_[index] = {.parent = in.index, .name = std::move(name)};
        ++scopes_[in.index].users;
        return {index};
    }
    /// Call after the scope's last allocation. Allocated blocks still count for the scopes around
    /// it.
    void close(scope_id s) noexcept {
        const std::lock_guard lock(mutex_);
        leave(s.index);
    }

    /// A block has been allocated. Throws std::bad_alloc if the host has no memory for the entry.
    void enter(scope_id s, const block& b) {
        const captured_trace callers(capture_);
        const std::lock_guard lock(mutex_);
        const auto trace = traces_.keep(callers);
        try {
            blocks_.insert(b.pointer, {b, s.index, trace});
        } catch (...) {
            traces_.drop(trace);
            throw;
        }
        ++scopes_[s.index].users;
        for_each_above(s.index, [&](memory_statistics& f) {
            f.current += b.size;
            f.peak = std::max(f.peak, f.current);
            f.total += b.size;
            f.largest = std::max(f.largest, b.size);
            ++f.allocations;
        });
    }
    /// A block that is being freed.
    struct struck {
        block what{};
        std::uint32_t scope = 0;
        trace_store::id trace = trace_store::none;
    };

    /// Begins to free a block. After errc::none the caller may free the block, and then calls
    /// forget(), or put_back() if the free failed. unknown_block or wrong_size: nothing changes.
    [[nodiscard]] errc strike(void* pointer, bytes size, std::size_t alignment, struck& going) noexcept {
        const std::lock_guard lock(mutex_);
        const entry* const found = blocks_.find(pointer);
        if (found == nullptr) return errc::unknown_block;
        if (found->what.size != size || found->what.alignment != alignment) return errc::wrong_size;
        going = *found;
        blocks_.take_out(pointer);
        for_each_above(going.scope, [&](memory_statistics& f) {
            f.current -= size;
            ++f.frees;
        });
        return errc::none;
    }
    /// The block was freed.
    void forget(const struck& gone) noexcept {
        const std::lock_guard lock(mutex_);
        blocks_.forget();
        traces_.drop(gone.trace);
        leave(gone.scope);
    }
    /// The block stays allocated.
    void put_back(const struck& still) noexcept {
        const std::lock_guard lock(mutex_);
        blocks_.put_back(still.what.pointer, still);
        for_each_above(still.scope, [&](memory_statistics& f) {
            f.current += still.what.size;
            f.peak = std::max(f.peak, f.current);
            --f.frees;
        });
    }
    /// An allocation was refused.
    void fail(scope_id s) noexcept {
        const std::lock_guard lock(mutex_);
        for_each_above(s.index, [](memory_statistics& f) { ++f.failures; });
    }

    [[nodiscard]] memory_statistics figures(scope_id s = whole) const noexcept {
        const std::lock_guard lock(mutex_);
        return scopes_[s.index].figures;
    }
    /// Every allocated block, the largest first.
    [[nodiscard]] std::vector<leak> leaks() const {
        std::vector<leak> all;
        const std::lock_guard lock(mutex_);
        all.reserve(blocks_.size());
        blocks_.for_each([&](const entry& e) { all.push_back({e.what, path(e.scope), traces_.of(e.trace)}); });
        std::sort(all.begin(), all.end(), [](const leak& a, const leak& b) { return a.what.size > b.what.size; });
        return all;
    }

private:
    static constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();
    struct scope_entry {
        std::uint32_t parent = none;  // of a vacant entry: the next vacant entry
        // the open scope itself, scopes in it, and blocks allocated in it
        std::uint32_t users = 1;
        std::string name{};
        memory_statistics figures{};
    };
    using entry = struck;

    template <class F>
    void for_each_above(std::uint32_t scope, F f) noexcept {
        for (auto s = scope; s != none; s = scopes_[s].parent) f(scopes_[s].figures);
    }
    void leave(std::uint32_t s) noexcept {
        while (s != none && --scopes_[s].users == 0) {
            const auto parent = std::exchange(scopes_[s].parent, vacant_);
            vacant_ = std::exchange(s, parent);
        }
    }
    [[nodiscard]] std::string path(std::uint32_t s) const {
        std::string text;
        for (; s != whole.index; s = scopes_[s].parent)
            text.insert(0, text.empty() ? scopes_[s].name : scopes_[s].name + '/');
        return text;
    }

    const trace_function capture_;
    mutable std::mutex mutex_;
    std::vector<scope_entry> scopes_;
    std::uint32_t vacant_ = none;
    detail::pointer_table<entry> blocks_;
    trace_store traces_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
