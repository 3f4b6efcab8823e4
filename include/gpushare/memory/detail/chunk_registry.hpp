// SPDX-License-Identifier: Apache-2.0
// Which physical chunk goes to which tenant: the decisions behind chunk_pool, as a plain value
// without memory, streams or locks. A chunk remembers which tenant wrote to it last. That tenant
// gets the chunk back as it is; another tenant gets it only after scrubbing.
//
//   gpushare::detail::chunk_registry chunks{gpushare::scrub_policy::on_hand_over};
//   chunks.open(chat);    chunks.add(/*zero=*/true);    auto c = chunks.take(chat);    chunks.give(c);
//   chunks.take(code);                   // detail::no_index: `c` has to be scrubbed before
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/chain.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Chunks are numbers from 0, reused after drop(). All calls take constant time, except finding a
/// chunk to scrub, which passes over the requesting tenant's own chunks. Not thread-safe. Throws
/// std::bad_alloc from add() and open() only.
class chunk_registry {
public:
    using index = std::uint32_t;
    static constexpr index none = detail::no_index;

    explicit chunk_registry(scrub_policy policy) : policy_(policy) {}

    /// The tenant can take chunks from now on, until close() was called as often as open().
    void open(tenant_tag tenant) { ++tenants_[tenant.value].opened; }
    /// After the last close, when all chunks are back, the dirty chunks belong to no tenant: the
    /// next tenant of that tag may be another one.
    void close(tenant_tag tenant) noexcept {
        --of(tenant).opened;
        forget_if_gone(tenant);
    }

    /// A new chunk, free immediately. `zero`: nobody has ever written to it.
    index add(bool zero) {
        index i = none;
        if (vacant_.empty()) {
            i = static_cast<index>(cells_.size());
            cells_.emplace_back();
            ++count_[static_cast<std::size_t>(state::vacant)];
        } else {
            i = vacant_.front();
            vacant_.erase(cells_, i);
        }
        if (zero || policy_ == scrub_policy::off)
            make_clean(i);
        else
            make_dirty(i, std::nullopt);
        return i;
    }

    /// A free chunk that can go for good, dirty ones first, or `none`. Never a chunk that is being
    /// scrubbed.
    index drop() noexcept {
        const index i = dirty_.empty() ? clean_.front() : dirty_.front();
        if (i == none) return none;
        remove(i);
        set(i, state::vacant);
        vacant_.push_back(cells_, i);
        return i;
    }

    /// Takes a chunk that `tenant`, which is open, may see as it is, or `none`: its own chunks
    /// before others, the latest returned first. The tenant may write to it until give().
    index take(tenant_tag tenant) noexcept {
        auto& taker = of(tenant);
        const index i = taker.dirty.empty() ? clean_.back() : taker.dirty.back();
        if (i == none) return none;
        remove(i);
        set(i, state::out);
        cells_[i].writer = tenant;
        ++taker.out;
        return i;
    }
    /// How many chunks take() could give.
    [[nodiscard]] std::size_t ready(tenant_tag tenant) const noexcept { return clean_.size() + usage(tenant).kept; }

    /// Gives a taken chunk back.
    void give(index i) noexcept {
        const tenant_tag writer = leave(i);
        if (policy_ == scrub_policy::off)
            make_clean(i);
        else
            make_dirty(i, policy_ == scrub_policy::on_free ? std::nullopt : std::optional(writer));
        forget_if_gone(writer);
    }
    /// Passes a taken chunk to another tenant without freeing it.
    void pass(index i, tenant_tag to) noexcept {
        const tenant_tag from = leave(i);
        cells_[i].writer = to;
        ++of(to).out;
        forget_if_gone(from);
    }

    /// A free chunk that has to be scrubbed before `tenant` gets it, the longest free first, or
    /// `none`. The chunk isn't free until end_scrub().
    index begin_scrub(tenant_tag tenant) noexcept {
        index i = dirty_.front();
        while (i != none && cells_[i].writer == tenant) i = cells_[i].age.next;
        return begin(i);
    }
    /// The same, whichever tenant gets the chunk.
    index begin_scrub() noexcept { return begin(dirty_.front()); }
    /// Takes a chunk back that is already being scrubbed.
    void give_scrubbing(index i) noexcept {
        const tenant_tag writer = leave(i);
        set(i, state::scrubbing);
        forget_if_gone(writer);
    }
    /// `done`: the chunk holds zeros. Otherwise the chunk belongs to no tenant, and is dirty.
    void end_scrub(index i, bool done) noexcept {
        if (done)
            make_clean(i);
        else
            make_dirty(i, std::nullopt);
    }

    [[nodiscard]] chunk_usage usage(tenant_tag tenant) const noexcept {
        const auto found = tenants_.find(tenant.value);
        return found == tenants_.end() ? chunk_usage{} : chunk_usage{found->second.out, found->second.dirty.size()};
    }
    [[nodiscard]] bool is_out(index i) const noexcept { return cells_[i].state == state::out; }
    [[nodiscard]] std::size_t total() const noexcept { return cells_.size() - vacant_.size(); }
    [[nodiscard]] std::size_t clean() const noexcept { return clean_.size(); }
    [[nodiscard]] std::size_t dirty() const noexcept { return dirty_.size(); }
    [[nodiscard]] std::size_t scrubbing() const noexcept { return count_[static_cast<std::size_t>(state::scrubbing)]; }
    [[nodiscard]] std::size_t out() const noexcept { return count_[static_cast<std::size_t>(state::out)]; }
    /// Chunks that are free, or will be once scrubbed.
    [[nodiscard]] std::size_t available() const noexcept { return clean() + dirty() + scrubbing(); }
    [[nodiscard]] scrub_policy policy() const noexcept { return policy_; }

private:
    enum class state : std::uint8_t { vacant, clean, dirty, scrubbing, out };
    struct cell {
        // `age` for the one of clean_, dirty_ and vacant_ that it is in
        detail::chain_link age{}, owner{};
        std::optional<tenant_tag> writer{};  // of a dirty or taken chunk; while the tenant is known
        chunk_registry::state state = state::vacant;
    };
    struct tenant_cells {
        std::size_t opened = 0, out = 0;
        detail::chain<cell, &cell::owner> dirty{};
    };

    void set(index i, state s) noexcept {
        --count_[static_cast<std::size_t>(cells_[i].state)];
        ++count_[static_cast<std::size_t>(s)];
        cells_[i].state = s;
    }
    void make_clean(index i) noexcept {
        set(i, state::clean);
        clean_.push_back(cells_, i);
    }
    void make_dirty(index i, std::optional<tenant_tag> writer) noexcept {
        set(i, state::dirty);
        dirty_.push_back(cells_, i);
        cells_[i].writer = writer;
        if (writer) of(*writer).dirty.push_back(cells_, i);
    }
    [[nodiscard]] tenant_cells& of(tenant_tag tenant) noexcept { return tenants_.find(tenant.value)->second; }
    // A taken chunk leaves its tenant, which is returned.
    tenant_tag leave(index i) noexcept {
        const tenant_tag writer = *std::exchange(cells_[i].writer, std::nullopt);
        --of(writer).out;
        return writer;
    }
    void forget_if_gone(tenant_tag tenant) noexcept {
        auto& leaver = of(tenant);
        if (leaver.opened != 0 || leaver.out != 0) return;
        while (!leaver.dirty.empty()) disown(leaver, leaver.dirty.front());
        tenants_.erase(tenant.value);
    }
    void disown(tenant_cells& owner, index i) noexcept {
        owner.dirty.erase(cells_, i);
        cells_[i].writer = std::nullopt;
    }
    // Removes the chunk from the list of free chunks that it is in.
    void remove(index i) noexcept {
        if (cells_[i].state == state::clean) {
            clean_.erase(cells_, i);
            return;
        }
        dirty_.erase(cells_, i);
        if (cells_[i].writer) disown(of(*cells_[i].writer), i);
    }
    index begin(index i) noexcept {
        if (i == none) return none;
        remove(i);
        set(i, state::scrubbing);
        return i;
    }

    scrub_policy policy_;
    std::vector<cell> cells_;
    detail::chain<cell, &cell::age> clean_, dirty_, vacant_;  // longest there first
    std::unordered_map<std::uint32_t, tenant_cells> tenants_;
    std::size_t count_[5]{};  // by state
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
