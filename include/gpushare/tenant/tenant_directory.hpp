// SPDX-License-Identifier: Apache-2.0
// The tenants of a server by name, as a file lists them. When the file is reloaded, new tenants are
// admitted, changed tenants are changed while their work runs, and removed tenants are closed.
//
//   gpushare::tenant_directory tenants{shared};  // shared: a tenancy
//   // at the start, and at each reload: see tenant/specification_text.hpp
//   for (auto& o : tenants.apply(wanted)) log(o);
//   if (auto chat = tenants.find("chat")) chat->submit(work);
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/tenant/detail/checked_specification.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/tenant.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The change that turns `granted` into `wanted`; fields that don't differ aren't set. Throws
/// operation_error (invalid_specification), with the tenant's name and the field, for fields that
/// can't change while the tenant is there: devices, unit, streams, and, where `wanted` names them,
/// on, slice, stack and scrub.
[[nodiscard]] inline tenant_change change_between(const tenant_spec& granted, const tenant_spec& wanted) {
    const auto fixed = [&](bool same, const char* field) {
        if (!same) detail::refuse_field(wanted, std::string_view(field), " can't be changed while the tenant is there");
    };
    fixed(wanted.on.empty() || std::ranges::is_permutation(wanted.on, granted.on), "on");
    fixed((wanted.on.empty() ? wanted.devices : wanted.on.size()) == granted.devices, "devices");
    fixed(wanted.unit == granted.unit, "unit");
    fixed(wanted.slice == any_slice || wanted.slice == granted.slice, "slice");
    fixed(wanted.streams == granted.streams, "streams");
    fixed(!wanted.stack || wanted.stack == granted.stack, "stack");
    fixed(!wanted.scrub || wanted.scrub == granted.scrub, "scrub");
    tenant_change c;
    const auto compare = [](const auto& from, const auto& to, auto& set) {
        if (from != to) set = to;
    };
    compare(granted.memory, wanted.memory, c.memory);
    compare(granted.burst, wanted.burst, c.burst);
    compare(granted.compute, wanted.compute, c.compute);
    compare(granted.level, wanted.level, c.level);
    if (granted.ceiling != wanted.ceiling) c.ceiling = wanted.ceiling.value_or(wanted.level);
    compare(granted.narrowest, wanted.narrowest, c.narrowest);
    compare(granted.cap, wanted.cap, c.cap);
    compare(granted.soft_cap, wanted.soft_cap, c.soft_cap);
    compare(granted.slo, wanted.slo, c.slo);
    compare(granted.group, wanted.group, c.group);
    compare(granted.longest, wanted.longest, c.longest);
    compare(granted.yields_within, wanted.yields_within, c.yields_within);
    compare(granted.keeps, wanted.keeps, c.keeps);
    compare(granted.queue_limit, wanted.queue_limit, c.queue_limit);
    compare(granted.wait, wanted.wait, c.wait);
    compare(granted.spill, wanted.spill, c.spill);
    compare(granted.lends_asleep, wanted.lends_asleep, c.lends_asleep);
    return c;
}

/// Whether nothing is set.
[[nodiscard]] inline bool is_empty(const tenant_change& c) noexcept {
    return !c.memory && !c.burst && !c.compute && !c.level && !c.ceiling && !c.narrowest && !c.cap && !c.soft_cap &&
           !c.slo && !c.group && !c.longest && !c.yields_within && !c.keeps && !c.queue_limit && !c.wait && !c.spill &&
           !c.lends_asleep;
}

/// The outcome for one tenant when a list was applied.
struct directory_outcome {
    /// In the order in which they are done.
    enum class kind : std::uint8_t {
        unchanged,  ///< the tenant is as in the list
        closed,     ///< the list doesn't have the tenant any more
        /// the same, but its work or users of its memory aren't done: the next apply() continues
        closing,
        changed,   ///< the tenant has the grant of the list
        admitted,  ///< the tenant is new
        refused,   ///< stays as it was, or isn't admitted: see `why`; the next apply() tries again
    };
    std::string tenant{};    ///< its name
    kind what{};             ///< what was done
    errc code = errc::none;  ///< if refused: the code
    std::string why{};       ///< if refused: a sentence with figures
};

/// In English.
[[nodiscard]] constexpr std::string_view to_string(directory_outcome::kind k) noexcept {
    switch (k) {
        case directory_outcome::kind::unchanged: return "unchanged";
        case directory_outcome::kind::closed: return "closed";
        case directory_outcome::kind::closing: return "closing";
        case directory_outcome::kind::changed: return "changed";
        case directory_outcome::kind::admitted: return "admitted";
        case directory_outcome::kind::refused: return "refused";
    }
    return "unknown";
}

/// A server's tenants by name. Safe from any thread; the tenancy must outlive it. A tenant that
/// find() returned may be kept: once the directory has closed the tenant, its calls are refused
/// (errc::closed).
template <node Node, compute_policy Policy = weighted_fair>
class tenant_directory {
public:
    /// The tenancy's tenant type.
    using tenant = gpushare::tenant<Node, Policy>;

    /// An empty directory of tenants of `shared`.
    explicit tenant_directory(tenancy<Node, Policy>& shared) : shared_(&shared) {}

    /// The tenant of that name; null if there is none or it is being closed.
    [[nodiscard]] std::shared_ptr<tenant> find(std::string_view name) const {
        const std::lock_guard lock(mutex_);
        const auto at = tenants_.find(name);
        return at == tenants_.end() ? nullptr : at->second;
    }

    /// All tenants in the order of their names.
    [[nodiscard]] std::vector<std::shared_ptr<tenant>> all() const {
        const std::lock_guard lock(mutex_);
        std::vector<std::shared_ptr<tenant>> found;
        for (const auto& [name, t] : tenants_) found.push_back(t);
        return found;
    }

    /// Checks a list without any change. Throws the errors of apply() for an invalid list. A server
    /// calls this function before steps that it can't undo.
    void check(std::span<const tenant_spec> wanted) const { (void)plan(wanted); }

    /// Makes the tenants those of the list. An invalid list changes nothing: throws operation_error
    /// (invalid_specification: no name, neither memory nor burst, a field with an impossible value
    /// or one that can't be changed; not_whole; no_device; duplicate_name). Otherwise first closes,
    /// until `close_deadline`, the tenants that aren't in the list, then makes all changes as one
    /// (tenancy::resize_together), so that tenants may trade, and then admits, in the list's order.
    /// A tenant that finds no room is refused and stays as it was, without harm to the others:
    /// apply the same list again when there is room.
    std::vector<directory_outcome> apply(std::span<const tenant_spec> wanted, instant close_deadline = never) {
        const std::lock_guard applying(applying_);
        auto plan = this->plan(wanted);
        std::vector<directory_outcome> outcomes;
        close_gone(wanted, close_deadline, outcomes);
        std::ranges::stable_partition(plan, [](const step& s) { return s.shrinks(); });
        change(plan, outcomes);
        for (const auto& spec : wanted) {
            if (find(spec.name)) continue;
            attempt(spec.name, kind::admitted, outcomes, [&] {
                auto t = std::make_shared<tenant>(shared_->admit(spec));
                const std::lock_guard lock(mutex_);
                tenants_.emplace(spec.name, std::move(t));
            });
        }
        return outcomes;
    }

private:
    using kind = directory_outcome::kind;

    struct step {
        std::shared_ptr<tenant> there;
        tenant_change change;
        tenant_spec granted;

        [[nodiscard]] bool shrinks() const {
            return change.memory.value_or(granted.memory) <= granted.memory &&
                   change.burst.value_or(granted.burst) <= granted.burst &&
                   change.compute.value_or(granted.compute) <= granted.compute;
        }
    };

    // Checks for errors that room can't cure.
    void check_one(const tenant_spec& spec) const {
        detail::check_admission(spec);
        const auto there = shared_->rooms().size();
        for (const device_id d : spec.on)
            if (d.index >= there) raise({errc::no_device, d.index, 0, there}, spec.name, "a list of tenants");
        tenant_spec whole = spec;
        if (!spec.on.empty()) whole.devices = static_cast<std::uint32_t>(spec.on.size());
        if (whole.devices > there)
            raise({errc::no_device, whole.devices, there, 0, reason::too_few_devices}, spec.name, "a list of tenants");
        detail::check_change(whole, {.memory = spec.memory, .burst = spec.burst});
    }
    [[nodiscard]] std::vector<step> plan(std::span<const tenant_spec> wanted) const {
        std::vector<step> steps;
        for (auto spec = wanted.begin(); spec != wanted.end(); ++spec) {
            if (spec->name.empty())
                throw operation_error(errc::invalid_specification, {}, "a list of tenants: one of them has no name");
            if (std::ranges::find(wanted.begin(), spec, spec->name, &tenant_spec::name) != spec)
                raise({errc::duplicate_name}, spec->name, "a list of tenants");
            check_one(*spec);
            if (auto t = find(spec->name)) {
                auto granted = t->spec();
                auto change = change_between(granted, *spec);
                steps.push_back({std::move(t), change, std::move(granted)});
            }
        }
        return steps;
    }

    void close_gone(std::span<const tenant_spec> wanted, instant deadline, std::vector<directory_outcome>& outcomes) {
        {
            const std::lock_guard lock(mutex_);
            for (auto at = tenants_.begin(); at != tenants_.end();) {
                if (std::ranges::find(wanted, at->first, &tenant_spec::name) != wanted.end()) {
                    ++at;
                    continue;
                }
                closing_.push_back(at->second);
                at = tenants_.erase(at);
            }
        }
        for (auto at = closing_.begin(); at != closing_.end();) {
            // First what may throw: then the tenant is still in closing_.
            directory_outcome& told = outcomes.emplace_back(directory_outcome{(*at)->name(), kind::closing});
            if (!(*at)->close(deadline).complete) {
                ++at;
                continue;
            }
            told.what = kind::closed;
            at = closing_.erase(at);
        }
    }

    // Makes all changes as one. Leaves out a change that finds no room, so that the others aren't
    // harmed.
    void change(const std::vector<step>& plan, std::vector<directory_outcome>& outcomes) {
        using tenancy_type = tenancy<Node, Policy>;
        std::vector<typename tenancy_type::update> all;
        std::map<const tenant*, directory_outcome> refused;
        for (const auto& s : plan)
            if (!is_empty(s.change)) all.push_back({s.there.get(), s.change});
        while (!all.empty()) {
            const auto why = shared_->try_resize_together(all);
            if (why.why.code == errc::none) break;
            const auto at = all.begin() + static_cast<std::ptrdiff_t>(why.which);
            refused.emplace(at->who, directory_outcome{at->who->name(), kind::refused, why.why.code,
                                                       detail::describe(why.why, at->who->name(), "resize").c_str()});
            all.erase(at);
        }
        for (const auto& s : plan)
            if (const auto at = refused.find(s.there.get()); at != refused.end())
                outcomes.push_back(at->second);
            else
                outcomes.push_back({s.there->name(), is_empty(s.change) ? kind::unchanged : kind::changed});
    }

    template <class F>
    static void attempt(const std::string& name, kind done, std::vector<directory_outcome>& outcomes, F f) {
        try {
            f();
            outcomes.push_back({name, done});
        } catch (const error& e) {
            outcomes.push_back({name, kind::refused, e.code(), e.what()});
        }
    }

    tenancy<Node, Policy>* shared_;
    std::mutex applying_;  // one list at a time
    mutable std::mutex mutex_;
    std::map<std::string, std::shared_ptr<tenant>, std::less<>> tenants_;  // under mutex_
    std::vector<std::shared_ptr<tenant>> closing_;                         // under applying_
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
