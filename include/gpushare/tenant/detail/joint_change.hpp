// SPDX-License-Identifier: Apache-2.0
// Changes several tenants as one: first all resources that they give up, then all resources that
// they get. So tenants that trade, such as memory for device time, don't block each other.
//
//   detail::joint_change<Node, Policy> change(shared);
//   change.add(state, {.memory = 20_MiB});      change.add(other, {.memory = 10_MiB});
//   if (const auto why = change.apply(); why.code != errc::none) blame(change.refused());
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/partition/reservation.hpp>
#include <gpushare/tenant/detail/shared_node.hpp>
#include <gpushare/tenant/detail/tenant_state.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// For tenants of one node, each of them once. They must outlive it.
template <node Node, compute_policy Policy>
class joint_change {
public:
    using shared = shared_node<Node, Policy>;
    using state = tenant_state<Node, Policy>;

    explicit joint_change(shared& all) noexcept : all_(&all) {}

    void add(state& who, const tenant_change& change) { list_.push_back({&who, change, {}, {}, {}}); }

    /// Makes all changes or none. Returns why one of them can't be made, alongside those before it.
    /// May be called again.
    failure apply() {
        make_room();
        for (auto& one : list_) one.who->open_level_for(one.change);
        {
            const std::lock_guard lock(all_->mutex);
            if (const auto why = grant(); why.code != errc::none) return why;
        }
        failure why{};
        try {
            for (refused_ = 0; refused_ < list_.size(); ++refused_)
                if (why = list_[refused_].who->tell_limiters(); why.code != errc::none) break;
        } catch (...) {  // a policy lacks host memory
            undo();
            throw;
        }
        if (why.code != errc::none) undo();
        return why;
    }
    /// The index of the refused change, after apply() has failed.
    [[nodiscard]] std::size_t refused() const noexcept { return refused_; }

private:
    struct member {
        state* who;
        tenant_change change;
        tenant_spec old;
        tenant_change undone{};
        std::optional<priority> ceiling{};
    };
    struct slice_share {
        typename shared::slice* of;
        priority level;
        std::uint32_t promised;
    };

    // The quota of one part, and the tenant that the part belongs to.
    struct share_of_device {
        std::size_t of;  // in the list
        typename state::part* in;
    };

    // Makes everything that a grant needs, so that undoing can't run out of memory halfway.
    void make_room() {
        exchanges_.clear();
        owners_.clear();
        std::size_t parts = 0;
        for (auto& device : all_->devices) {
            std::vector<quota_limits> wanted;
            std::vector<share_of_device> whose;
            for (std::size_t i = 0; i < list_.size(); ++i)
                for (auto& p : list_[i].who->parts())
                    if (&p.on == &device) {
                        wanted.push_back({&p.memory.limit(), {}, {}});
                        whose.push_back({i, &p});
                    }
            if (wanted.empty()) continue;
            parts += wanted.size();
            exchanges_.emplace_back(device.memory, std::move(wanted));
            owners_.push_back(std::move(whose));
        }
        after_.reserve(2 * parts);  // a part's level before and after
    }

    // Under the mutex. Needs no memory when it undoes an earlier grant.
    failure grant() {
        for (refused_ = 0; refused_ < list_.size(); ++refused_) {
            auto& one = list_[refused_];
            one.old = one.who->granted_now();
            if (const auto why = one.who->unfit(one.change); why.code != errc::none) return why;
        }
        if (const auto why = check_shares(); why.code != errc::none) return why;
        if (const auto why = check_lent(); why.code != errc::none) return why;
        want_memory();
        prepared_together held(exchanges_);
        if (!held) {
            const auto at = static_cast<std::size_t>(held.refused() - exchanges_.data());
            refused_ = owners_[at][held.refused()->refused()].of;
            return held.why();
        }
        held.commit();
        for (auto& one : list_) one.who->note(one.change);
        return {};
    }

    // First all tenants that shrink or leave their level; then those that grow or come to another
    // level, in the order of the list.
    failure check_shares() {
        after_.clear();
        const auto in = [this](typename shared::slice& s, priority level) -> std::uint32_t& {
            for (auto& one : after_)
                if (one.of == &s && one.level == level) return one.promised;
            return after_.emplace_back(&s, level, s.promised.of(level)).promised;
        };
        for (auto& one : list_) {
            const auto from = level_of(one.old), to = one.who->level_after(one.change);
            for (auto& p : one.who->parts()) {
                p.slice.promised.open(to);
                if (from != to && p.has_share) in(p.slice, from) -= one.old.compute.permille();
            }
        }
        for (const bool growing : {false, true})
            for (refused_ = 0; refused_ < list_.size(); ++refused_)
                if (const auto why = check_share(list_[refused_], growing, in); why.code != errc::none) return why;
        return {};
    }
    // Checks one tenant, if it grows (or, without `growing`, if it doesn't). `in(slice, level)`:
    // the share promised there so far.
    template <class In>
    static failure check_share(const member& one, bool growing, In& in) {
        const auto to = one.who->level_after(one.change);
        const bool stays = level_of(one.old) == to;
        const auto now = one.old.compute.permille(), then = one.change.compute.value_or(one.old.compute).permille();
        if ((!stays || then > now) != growing) return {};
        for (auto& p : one.who->parts()) {
            if (!p.has_share) continue;
            auto& promised = in(p.slice, to);
            if (stays) promised -= now;
            if (growing && promised + then > p.slice.size)
                return {errc::share_exceeded, then, p.slice.size - std::min(p.slice.size, promised), p.slice.size,
                        reason::shares_exceeded};
            promised += then;
        }
        return {};
    }

    // Memory that sleeping tenants lend isn't room to grow.
    failure check_lent() {
        for (auto& device : all_->devices) {
            if (device.asleep() == bytes{}) continue;
            bytes before{}, then{};
            for (std::size_t i = 0; i < list_.size(); ++i)
                for (auto& p : list_[i].who->parts()) {
                    if (&p.on != &device) continue;
                    const bytes has = p.memory.limit().usage().guaranteed;
                    const bytes wants = list_[i].who->limits_of(p, list_[i].change).guaranteed;
                    if (wants > has) refused_ = i;
                    before += has;
                    then += wants;
                }
            if (const bytes room = device.memory.promisable() - device.asleep(); then - before > room)
                return {errc::no_room, then.count(), (before + room).count(), device.memory.usage().limit().count()};
        }
        return {};
    }
    void want_memory() noexcept {
        for (std::size_t at = 0; at < exchanges_.size(); ++at)
            for (std::size_t i = 0; i < owners_[at].size(); ++i) {
                const auto& [of, in] = owners_[at][i];
                exchanges_[at].want(i, list_[of].who->limits_of(*in, list_[of].change));
            }
    }

    // Undoes all changes after a policy has refused one of them. Memory that was given away, and
    // that others have taken meanwhile, doesn't come back.
    void undo() {
        const auto refused = refused_;
        for (auto& one : list_) {
            one.ceiling = one.old.ceiling;  // a grant looks at the present settings
            one.undone = std::exchange(one.change, state::back_to(one.old));
        }
        {
            const std::lock_guard lock(all_->mutex);
            state::undo_by([this] { return grant(); },
                           [this](auto leave) {
                               for (auto& one : list_) leave(one.change, one.who->granted_now());
                           });
            for (auto& one : list_) one.who->undo_ceiling(one.ceiling);
        }
        for (auto& one : list_) {
            one.who->tell_undone();
            one.change = one.undone;
        }
        refused_ = refused;
    }

    shared* all_;
    std::vector<member> list_;
    std::vector<quota_exchange> exchanges_;             // one for each device
    std::vector<std::vector<share_of_device>> owners_;  // of the exchanges' quotas
    std::vector<slice_share> after_;
    std::size_t refused_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
