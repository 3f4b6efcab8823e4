// SPDX-License-Identifier: Apache-2.0
// Handles instead of pointers. They protect against use after free, and they protect tenants that
// don't trust each other. The handle of a freed block stays invalid even when the address is used
// again, and only a block's owner can access the block.
//
//   gpushare::handle_table blocks;  // one per device, for all tenants
//   gpushare::handle_resource mine{blocks, gpushare::tenant_tag{1}, upstream};
//   gpushare::block_handle h = mine.allocate(1_MiB, 256);
//   void* p = mine.pointer(h);    mine.deallocate(h);  // a second time: errc::unknown_block
#pragma once

#include <algorithm>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Refers to a block until the block is freed, and afterwards to no block. A default-constructed
/// handle refers to no block. A handle is valid only in the table that made it.
struct block_handle {
    std::uint32_t slot = std::numeric_limits<std::uint32_t>::max();  ///< its place in the table
    /// counts the blocks of the slot
    std::uint32_t generation = 0;

    friend constexpr auto operator<=>(block_handle, block_handle) = default;
    friend constexpr bool operator==(block_handle, block_handle) = default;
};

/// Knows which handles are valid, and for which block and tenant. Thread-safe: one mutex, held for
/// one look-up. Takes host memory only when more blocks are allocated than ever before. A slot
/// serves 2^32-1 blocks and is then retired, so that no generation comes twice.
class handle_table {
public:
    /// Throws std::bad_alloc if the host has no memory for the entry.
    [[nodiscard]] block_handle insert(tenant_tag owner, const block& b) {
        const std::lock_guard lock(mutex_);
        if (vacant_ == none) {
            entries_.emplace_back();
            vacant_ = static_cast<std::uint32_t>(entries_.size() - 1);
        }
        const auto slot = vacant_;
        entry& e = entries_[slot];
        vacant_ = e.next_vacant;
        e.what = b;
        e.left_over = {};
        e.owner = owner;
        e.live = true;
        ++size_;
        return {slot, e.generation};
    }

    /// Returns the block of a handle. A handle of a freed block or of another tenant is invalid:
    /// this member and the members below then return errc::unknown_block.
    [[nodiscard]] result<block> find(tenant_tag owner, block_handle h) const noexcept {
        const std::lock_guard lock(mutex_);
        if (!good(owner, h)) return errc::unknown_block;
        return entries_[h.slot].what;
    }
    /// Makes the handle invalid and returns the block, for the caller to free.
    result<block> remove(tenant_tag owner, block_handle h) noexcept {
        const auto removed = begin_free(owner, h);
        if (removed) end_free(h, true);
        return removed;
    }
    /// As remove(), while the caller tries to free the block: the handle is invalid until
    /// end_free(), which must follow.
    result<block> begin_free(tenant_tag owner, block_handle h) noexcept {
        const std::lock_guard lock(mutex_);
        if (!good(owner, h)) return errc::unknown_block;
        entry& e = entries_[h.slot];
        if (e.moving) return errc::in_flight;
        e.live = false;
        --size_;
        return e.what;
    }
    /// After begin_free(): the block is `gone`, or else the handle is valid again.
    void end_free(block_handle h, bool gone) noexcept {
        const std::lock_guard lock(mutex_);
        entry& e = entries_[h.slot];
        if (!gone) {
            e.live = true;
            ++size_;
        } else if (++e.generation != std::numeric_limits<std::uint32_t>::max()) {
            e.next_vacant = std::exchange(vacant_, h.slot);
        }
    }
    /// Begins to move the block and returns it. Until move_to(), no other thread can free or move
    /// it (in_flight).
    result<block> begin_move(tenant_tag owner, block_handle h) noexcept {
        const std::lock_guard lock(mutex_);
        if (!good(owner, h)) return errc::unknown_block;
        if (std::exchange(entries_[h.slot].moving, true)) return errc::in_flight;
        return entries_[h.slot].what;
    }
    /// After begin_move(): the handle refers to `now`, and the move continues.
    void refer_to(block_handle h, const block& now) noexcept {
        const std::lock_guard lock(mutex_);
        entries_[h.slot].what = now;
    }
    /// After begin_move(): the handle refers to `now`.
    void move_to(block_handle h, const block& now) noexcept {
        const std::lock_guard lock(mutex_);
        entries_[h.slot].what = now;
        entries_[h.slot].moving = false;
    }
    /// A second block of the handle, which an earlier move left behind: its pointer is null if
    /// there is none. Only between begin_free() or begin_move() and the end.
    [[nodiscard]] block left_over(block_handle h) const noexcept {
        const std::lock_guard lock(mutex_);
        return entries_[h.slot].left_over;
    }
    /// Sets this second block. Only between begin_free() or begin_move() and the end.
    void leave(block_handle h, const block& left_over) noexcept {
        const std::lock_guard lock(mutex_);
        entries_[h.slot].left_over = left_over;
    }

    /// How many handles are valid.
    [[nodiscard]] std::size_t size() const noexcept {
        const std::lock_guard lock(mutex_);
        return size_;
    }

private:
    static constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();
    struct entry {
        block what{}, left_over{};
        tenant_tag owner{};
        std::uint32_t generation = 0;
        std::uint32_t next_vacant = none;
        bool live = false, moving = false;
    };

    [[nodiscard]] bool good(tenant_tag owner, block_handle h) const noexcept {
        if (h.slot >= entries_.size()) return false;
        const entry& e = entries_[h.slot];
        return e.live && e.generation == h.generation && e.owner == owner;
    }

    mutable std::mutex mutex_;
    std::vector<entry> entries_;
    std::uint32_t vacant_ = none;  // head of the free list: the last freed is reused first
    std::size_t size_ = 0;
};

/// One tenant's allocator of handles. Refers to the table and the upstream, which must outlive it.
/// Thread-safe if the upstream is.
template <memory_resource Upstream>
class handle_resource {
public:
    /// For `tenant`, with memory of `upstream`.
    handle_resource(handle_table& table, tenant_tag tenant, Upstream& upstream) noexcept
        : table_(&table), tenant_(tenant), upstream_(upstream), closing_(upstream_.closing()) {}

    /// Throws what the upstream throws, and std::bad_alloc if the host has no memory for the entry.
    /// `label` must outlive the block.
    [[nodiscard]] block_handle allocate(byte_count size, std::size_t alignment, std::string_view label = {}) {
        return entered({upstream_, {upstream_.allocate(size, alignment), bytes{size}, alignment, label}});
    }

    /// As allocate(), with the reason instead of an exception.
    [[nodiscard]] result<block_handle> try_allocate(byte_count size, std::size_t alignment,
                                                    std::string_view label = {}) noexcept {
        failure why{.code = errc::out_of_memory, .asked = size, .because = reason::size};
        void* const p = upstream_.try_allocate(size, alignment, &why);
        return try_entered({upstream_, {p, bytes{size}, alignment, label}}, why);
    }

    /// As allocate(), but waits for memory until the deadline or stop request of `until`, where the
    /// upstream can wait.
    template <clock Clock>
    [[nodiscard]] block_handle allocate(byte_count size, std::size_t alignment, const patience<Clock>& until,
                                        std::string_view label = {}) {
        void* const p = upstream_.resource().allocate(size, alignment, until);
        return entered({upstream_, {p, bytes{size}, alignment, label}});
    }
    /// The same, with the reason instead of an exception.
    template <clock Clock>
    [[nodiscard]] result<block_handle> try_allocate(byte_count size, std::size_t alignment,
                                                    const patience<Clock>& until,
                                                    std::string_view label = {}) noexcept {
        failure why{.code = errc::out_of_memory, .asked = size, .because = reason::size};
        void* const p = upstream_.resource().try_allocate(size, alignment, until, &why);
        return try_entered({upstream_, {p, bytes{size}, alignment, label}}, why);
    }

    /// The block's address. Null if the handle is another tenant's, if the block was freed, or once
    /// the upstream is closed.
    [[nodiscard]] void* pointer(block_handle h) const noexcept {
        if (closing_.closed()) return nullptr;
        const auto found = table_->find(tenant_, h);
        return found ? found->pointer : nullptr;
    }
    /// Frees the block and returns what the upstream says. If a later free may succeed
    /// (concepts.hpp), the handle is valid as before. For an invalid handle it returns
    /// unknown_block, and nothing happens.
    errc deallocate(block_handle h) noexcept {
        const auto leaving = table_->begin_free(tenant_, h);
        if (!leaving) return leaving.code();
        errc why = give_left_over(h);
        if (!detail::stays_out(why)) why = give(upstream_, *leaving);
        table_->end_free(h, !detail::stays_out(why));
        return why;
    }
    /// Resizes the block to `size` bytes, with the same alignment: allocates a new one, calls
    /// `copy(to, from, bytes)` for the bytes that both have, and frees the old one. The handle
    /// stays the same, the address doesn't. Throws what allocate() and `copy` throw, and then
    /// nothing has happened. unknown_block as in deallocate(). A thread that frees or resizes the
    /// block meanwhile gets in_flight. If the upstream doesn't take the old block back now, the
    /// handle keeps that block too: the next resize() or deallocate() of the handle frees it first,
    /// or fails as the upstream does.
    template <std::invocable<void*, const void*, std::size_t> Copy>
    errc resize(block_handle h, std::size_t size, Copy copy) {
        return exchange(h, size, copy, [&](std::size_t alignment) { return upstream_.allocate(size, alignment); });
    }
    /// As resize(), with the reason instead of an exception: the reason of try_allocate(), or, if
    /// `copy` throws, the code of its gpushare::error (backend_failed for any other exception).
    template <std::invocable<void*, const void*, std::size_t> Copy>
    [[nodiscard]] failure try_resize(block_handle h, std::size_t size, Copy copy) noexcept try {
        failure why;
        const errc code = exchange(
            h, size, copy, [&](std::size_t alignment) { return upstream_.try_allocate(size, alignment, &why); });
        return code == errc::out_of_memory && why.code != errc::none
                   ? why
                   : failure{.code = code, .asked = size, .because = reason::size};
    } catch (const error& e) {
        return e.figures();
    } catch (...) {
        return {.code = errc::backend_failed, .asked = size, .because = reason::size};
    }

private:
    static errc give(const upstream_ref<Upstream>& to, const block& b) noexcept {
        return to.deallocate(b.pointer, static_cast<std::size_t>(b.size.count()), b.alignment);
    }
    errc give_left_over(block_handle h) const noexcept {
        const block b = table_->left_over(h);
        if (b.pointer == nullptr) return errc::none;
        const errc why = give(upstream_, b);
        if (!detail::stays_out(why)) table_->leave(h, {});
        return why;
    }
    /// Gives its block back, unless there is none.
    struct obtained {
        upstream_ref<Upstream> from;
        block what;
        ~obtained() {
            if (what.pointer != nullptr) (void)give(from, what);
        }
    };

    template <class Copy, class Allocate>
    errc exchange(block_handle h, std::size_t size, Copy& copy, Allocate allocate) {
        const auto old = table_->begin_move(tenant_, h);
        if (!old) return old.code();
        // Even if something throws, the handle refers to a block that exists.
        struct moved {
            handle_resource& of;
            block_handle h;
            // the block that goes back: the new block or, after an exchange, the old block
            block now, spare{};
            ~moved() {
                of.table_->refer_to(h, now);
                if (spare.pointer != nullptr && detail::stays_out(give(of.upstream_, spare)))
                    of.table_->leave(h, spare);
                of.table_->move_to(h, now);
            }
        };
        moved end{*this, h, *old};
        if (const errc why = give_left_over(h); detail::stays_out(why)) return why;
        end.spare = {allocate(old->alignment), bytes{size}, old->alignment, old->label};
        if (end.spare.pointer == nullptr) return errc::out_of_memory;
        copy(end.spare.pointer, static_cast<const void*>(old->pointer),
             static_cast<std::size_t>(std::min(old->size, bytes{size}).count()));
        std::swap(end.spare, end.now);
        return errc::none;
    }

    block_handle entered(obtained b) {
        const block_handle h = table_->insert(tenant_, b.what);
        b.what.pointer = nullptr;
        return h;
    }
    result<block_handle> try_entered(obtained b, const failure& why) noexcept {
        if (b.what.pointer == nullptr) return why;
        try {
            const block_handle h = table_->insert(tenant_, b.what);
            b.what.pointer = nullptr;
            return h;
        } catch (...) {  // the host has no memory for the entry
            return detail::no_host_memory;
        }
    }

    handle_table* table_;
    tenant_tag tenant_;
    upstream_ref<Upstream> upstream_;
    close_token closing_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
