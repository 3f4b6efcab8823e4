// SPDX-License-Identifier: Apache-2.0
// The state that the tenants of a node share: for each device its overhead account, the quota above
// all tenants' quotas, and one limiter for each slice; and the set of names in use.
//
//   detail::shared_node<Node, Policy> all{options};
//   all.devices.emplace_back(node.memory(d));     all.devices[d.index].slices.emplace_back(0, options, clock, policy);
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/detail/stable_list.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/tenant/detail/device_overhead.hpp>
#include <gpushare/tenant/detail/memory_source.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

template <node Node, compute_policy Policy>
class tenant_state;

/// The level of a tenant's submissions.
[[nodiscard]] inline priority level_of(const tenant_spec& spec) noexcept { return level_of(spec.compute, spec.level); }

/// The entitlement of a tenant's client, relative to a slice of `size` permille of a device.
[[nodiscard]] inline client_settings settings_of(const tenant_spec& spec, std::uint32_t tag,
                                                 std::uint32_t size) noexcept {
    const auto of_it = [&](share s) {
        return share::of_permille(std::min<std::uint64_t>(std::uint64_t{s.permille()} * 1000 / size, 1000));
    };
    return {.weight = of_it(spec.compute),
            .level = level_of(spec),
            .ceiling = spec.ceiling.value_or(no_priority),
            .narrowest = spec.narrowest,
            .longest = spec.longest,
            .yields_within = spec.yields_within,
            .cap = of_it(spec.cap),
            .soft_cap = spec.soft_cap,
            .keeps = spec.keeps,
            .slo = spec.slo,
            .group = spec.group,
            .queue_limit = spec.queue_limit,
            .tag = tag,
            .name = spec.name};
}

/// The promised shares of one slice, level by level. The shares of a level are parts of the time
/// that the levels above leave to it, and sum to at most the whole. A value; under the node's
/// mutex.
class promised_shares {
public:
    /// Makes room for this level. Throws std::bad_alloc.
    void open(priority level) {
        if (find(level) == nullptr) levels_.push_back({level, 0});
    }
    /// In permille; the level must be open.
    void add(priority level, std::uint32_t more) noexcept {
        for (auto& l : levels_)
            if (l.level == level) l.promised += more;
    }
    [[nodiscard]] std::uint32_t of(priority level) const noexcept {
        const auto* const l = find(level);
        return l != nullptr ? l->promised : 0;
    }
    /// The sum over all levels.
    [[nodiscard]] std::uint32_t sum() const noexcept {
        std::uint32_t sum = 0;
        for (const auto& l : levels_) sum += l.promised;
        return sum;
    }
    /// The share of the level with the most promised.
    [[nodiscard]] std::uint32_t most() const noexcept {
        std::uint32_t most = 0;
        for (const auto& l : levels_) most = std::max(most, l.promised);
        return most;
    }

private:
    struct of_level {
        priority level;
        std::uint32_t promised;
    };
    [[nodiscard]] const of_level* find(priority level) const noexcept {
        for (const auto& l : levels_)
            if (l.level == level) return &l;
        return nullptr;
    }
    plain_list<of_level> levels_;  // few elements
};

/// The state that the tenants of a node share.
template <node Node, compute_policy Policy>
struct shared_node {
    using clock_type = std::remove_cvref_t<decltype(std::declval<const Node&>().get_clock())>;
    using limiter = compute_limiter<typename Node::stream, clock_type, Policy>;

    /// SMs with a limiter of their own: all of a device, or some.
    struct slice {
        slice(std::uint32_t place, const limiter_options& options, clock_type time, Policy policy)
            : index(place), compute(options, std::move(time), std::move(policy)) {}
        /// Permille of the device that tenants of this level could still be promised; without a
        /// level, of the level with the least left.
        [[nodiscard]] std::uint32_t left(priority level) const noexcept { return size - promised.of(level); }
        [[nodiscard]] std::uint32_t left() const noexcept { return size - promised.most(); }
        [[nodiscard]] typename Node::stream stream_for(Node& whole, device_id d, priority level, std::uint32_t tag) {
            return open ? open(level, tag) : whole.make_stream(d, level, tag);
        }

        const std::uint32_t index;
        limiter compute;
        // permille of the device
        std::uint32_t size = 1000;
        // of `size`; under the mutex
        promised_shares promised{};
        // makes streams in it, if a partition
        std::function<typename Node::stream(priority, std::uint32_t)> open;
    };
    struct device {
        explicit device(const typename Node::memory_type& all) : overhead(all), memory(overhead.available()) {}

        /// The slice for a tenant of this level: the slice that the tenant names. Without a name,
        /// the slice with the most left for the level, and of several such slices the one with the
        /// most left alongside all levels. Null if the named slice doesn't exist.
        [[nodiscard]] slice* slice_for(std::uint32_t wanted, priority level) noexcept {
            if (wanted != any_slice) return wanted < slices.size() ? &slices[wanted] : nullptr;
            return &*std::max_element(slices.begin(), slices.end(), [=](const slice& a, const slice& b) {
                if (a.left(level) != b.left(level)) return a.left(level) < b.left(level);
                return a.size + b.promised.sum() < b.size + a.promised.sum();
            });
        }
        [[nodiscard]] const slice* slice_for(std::uint32_t wanted, priority level) const noexcept {
            return const_cast<device*>(this)->slice_for(wanted, level);  // NOLINT: changes nothing
        }

        /// From now on memory that sources keep goes to any tenant that lacks memory. Throws
        /// std::bad_alloc.
        void trim_for_all() {
            if (trims) return;
            trims.emplace(quota_hook::at_root, memory, std::numeric_limits<int>::min(),
                          [this](const reclaim_request& r) { return r.below && trim() ? r.missing : bytes{}; });
        }
        /// Gives back memory that arenas and the like keep and that is charged to no tenant. True
        /// if there was any.
        [[nodiscard]] bool trim() noexcept {
            bool any = false;
            for (auto* const source : {arena.get(), stream_ordered.get()})
                if (source != nullptr) any |= source->trim();
            return any;
        }

        /// Bytes of guarantees, lent while their tenants sleep. Relaxed: written under the mutex; a
        /// read without the mutex gives the value of some moment.
        [[nodiscard]] bytes asleep() const noexcept { return bytes{lent_asleep.load(std::memory_order_relaxed)}; }
        void lends(bytes before, bytes now) noexcept {
            lent_asleep.fetch_add(now.count() - before.count(), std::memory_order_relaxed);
        }
        /// Bytes that could be promised: neither guaranteed to anybody nor lent by a sleeping
        /// tenant.
        [[nodiscard]] bytes unpromised() const noexcept {
            return std::min(memory.free(), memory.promisable() - asleep());
        }

        device_overhead overhead;
        quota memory;
        std::atomic<std::uint64_t> lent_asleep{0};             // bytes: see asleep()
        std::unique_ptr<memory_source> arena, stream_ordered;  // if the embedder offers them
        // gives kept memory to tenants in need
        std::optional<quota_hook> trims;
        stable_list<slice> slices;  // one or more
        // tags of streams in no partition; empty: not sliced
        std::function<std::vector<std::uint32_t>()> strays;
        // of tenants, closed or not; relaxed: a count alone
        std::atomic<std::uint32_t> parts{0};
        // whether a tenant here ever minded that others read its memory
        std::atomic<bool> minded{false};
    };

    explicit shared_node(tenancy_options with) : options(std::move(with)) {}

    /// Under the mutex. A tenant and its successor have the same name for a while.
    void forget(const std::string& name) noexcept {
        auto at = names.begin();
        while (at != names.end() && *at != name) ++at;
        if (at != names.end()) names.erase(at);
    }

    /// A tenant's memory on each of its devices must be a multiple of this: of the tenant's own
    /// unit and, with an arena, of a chunk, since less than a chunk could be promised but not
    /// granted.
    [[nodiscard]] bytes unit_of(const tenant_spec& spec) const noexcept {
        bytes unit = spec.unit;
        if (spec.stack.value_or(options.stack) != memory_stack::arena) return unit;
        for (const auto& d : devices) {
            if (d.arena == nullptr) continue;
            const bytes chunk = d.arena->charged(1, 1);
            unit = chunk * (unit.count() / std::gcd(unit.count(), chunk.count()));
        }
        return unit;
    }

    mutable std::mutex mutex;
    stable_list<device> devices;
    std::vector<std::string> names;                                // under the mutex
    std::list<std::unique_ptr<tenant_state<Node, Policy>>> stuck;  // under the mutex
    // under the mutex; of all tenants, stuck ones too
    plain_list<const tenant_state<Node, Policy>*> handles;
    const tenancy_options options;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
