// SPDX-License-Identifier: Apache-2.0
// Blocks of a tenant that may leave the device. When the tenant lacks memory there, or a neighbour
// wants its burst back, the least recently used blocks are copied to the host. They come back when
// they are used.
//
//   gpushare::tenancy shared{node, {.spill = 32_GiB, .spill_to = &pinned}};     // pinned: a std::pmr::memory_resource
//   auto chat = shared.admit({.name = "chat", .memory = 8_GiB});
//   auto adapter = chat.allocate_spillable(512_MiB);
//   if (auto use = adapter.use()) chat.submit([&](auto& s) { s.launch(shape, reads{use.data()}); }).wait();
//   void* weights = chat.memory().allocate(1_GiB);                              // refused only if spilling doesn't help
#pragma once

#include <memory>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/tenant/detail/spill_list.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A block that may be on the host. Movable; one owner. Frees it when it goes, which must be before
/// the tenancy does; its tenant may be closed by then. Safe from any thread but for moves.
template <class List>
class spillable {
    using entry = typename List::entry;

public:
    /// Keeps the block on its device, at one address. Movable; must not outlive the block.
    class lease {
    public:
        /// Takes over `other`'s.
        lease(lease&& other) noexcept
            : of_(std::exchange(other.of_, nullptr)), block_(other.block_), why_(other.why_) {}
        lease& operator=(lease&&) = delete;
        ~lease() {
            if (of_ != nullptr) of_->let_go(*block_);
        }

        /// Whether it is there.
        [[nodiscard]] explicit operator bool() const noexcept { return of_ != nullptr; }
        /// Why it isn't: out_of_memory (the device has no room), deadline_exceeded, closed, or what
        /// the copy failed with.
        [[nodiscard]] errc code() const noexcept { return why_; }
        /// Where it is, for work on any stream; null if it isn't there. Nothing may use it once the lease is gone.
        [[nodiscard]] void* data() const noexcept { return of_ != nullptr ? block_->block.data() : nullptr; }

    private:
        friend spillable;
        lease(List& of, entry& block, errc why) noexcept
            : of_(why == errc::none ? &of : nullptr), block_(&block), why_(why) {}

        List* of_;
        entry* block_;
        errc why_;
    };

    /// Called by the tenant, to whose memory `of` belongs.
    spillable(std::shared_ptr<List> of, entry& block) noexcept : of_(std::move(of)), block_(&block) {}
    /// Takes over `other`'s block.
    spillable(spillable&& other) noexcept : of_(std::move(other.of_)), block_(std::exchange(other.block_, nullptr)) {}
    /// Frees its own block, and takes over `other`'s.
    spillable& operator=(spillable&& other) noexcept {
        spillable mine(std::move(other));
        std::swap(of_, mine.of_);
        std::swap(block_, mine.block_);
        return *this;
    }
    ~spillable() {
        if (block_ != nullptr) of_->remove(*block_);
    }

    /// Brings the block back if it is on the host, and waits until it is there. Others of the
    /// tenant's may have to leave for it.
    [[nodiscard]] lease use(instant deadline = never) { return {*of_, *block_, of_->hold(*block_, deadline)}; }
    /// Whether it is on the device now, used or not; not while it is on its way.
    [[nodiscard]] bool resident() const noexcept { return of_->resident(*block_); }
    /// As it was made with.
    [[nodiscard]] bytes size() const noexcept { return block_->block.size(); }

private:
    std::shared_ptr<List> of_;
    entry* block_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
