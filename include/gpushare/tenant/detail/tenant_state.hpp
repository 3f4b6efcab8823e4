// SPDX-License-Identifier: Apache-2.0
// What stands behind a tenant's handle: its parts on the devices, what it was granted, and the order in which it ends.
// tenant.hpp is the handle, tenancy.hpp admits.
//
//   auto state = std::make_unique<detail::tenant_state<Node>>(node, shared);   state->open(node, spec, tag);
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/partition/reservation.hpp>
#include <gpushare/tenant/overhead.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/tenant/tenant_memory.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

template <node Node, compute_policy Policy>
class tenant_state;

/// What a tenant's client is entitled to, of what is `size` permille of a device.
[[nodiscard]] inline client_settings settings_of(const tenant_spec& spec, std::uint32_t tag,
                                                 std::uint32_t size) noexcept {
    const auto of_it = [&](share s) {
        return share::of_permille(std::min<std::uint64_t>(std::uint64_t{s.permille()} * 1000 / size, 1000));
    };
    return {.weight = of_it(spec.compute),
            .level = spec.level,
            .longest = spec.longest,
            .cap = of_it(spec.cap),
            .soft_cap = spec.soft_cap,
            .slo = spec.slo,
            .group = spec.group,
            .tag = tag};
}

/// What the tenants of a node share.
template <node Node, compute_policy Policy>
struct shared_node {
    using clock_type = std::remove_cvref_t<decltype(std::declval<const Node&>().get_clock())>;
    using limiter = compute_limiter<typename Node::stream, clock_type, Policy>;

    /// SMs with a limiter of their own: all of a device, or some.
    struct slice {
        slice(std::uint32_t place, const limiter_options& options, clock_type time, Policy policy)
            : index(place), compute(options, std::move(time), std::move(policy)) {}
        [[nodiscard]] std::uint32_t left() const noexcept { return size - promised; }

        const std::uint32_t index;
        limiter compute;
        std::uint32_t size = 1000;                                           // permille of the device
        std::uint32_t promised = 0;                                          // of those; under the mutex
        std::function<typename Node::stream(priority, std::uint32_t)> open;  // a stream in it, where it is a partition
    };
    struct device {
        explicit device(const typename Node::memory_type& all) : overhead(all), memory(overhead.available()) {}

        /// Which one a tenant would be in: the one it names, or the one with the most left. Null if it isn't there.
        [[nodiscard]] const slice* slice_for(std::uint32_t wanted) const noexcept {
            if (wanted != any_slice) return wanted < slices.size() ? &slices[wanted] : nullptr;
            return &*std::max_element(slices.begin(), slices.end(),
                                      [](const slice& a, const slice& b) { return a.left() < b.left(); });
        }

        device_overhead overhead;
        quota memory;
        std::deque<slice> slices;                            // one or more
        std::function<std::vector<std::uint32_t>()> strays;  // tags of streams in no partition, where there are some
        std::atomic<std::uint32_t> parts{0};                 // of tenants, closed or not; relaxed: a count alone
    };

    shared_node(event_sink sink, ns timeout, trace_function capture)
        : events(std::move(sink)), close_timeout(timeout), trace(capture) {}

    mutable std::mutex mutex;
    std::deque<device> devices;
    std::vector<std::string> names;                                // under the mutex
    std::list<std::unique_ptr<tenant_state<Node, Policy>>> stuck;  // under the mutex
    const event_sink events;
    const ns close_timeout;
    const trace_function trace;
};

/// A tenant's part of one device.
template <node Node, compute_policy Policy>
struct tenant_part {
    using shared = shared_node<Node, Policy>;

    // Without any memory: that comes when all parts are there.
    tenant_part(Node& whole, shared& all, const tenant_spec& spec, device_id d, std::uint32_t tag)
        : device(d),
          on(all.devices[d.index]),
          slice(on.slices[on.slice_for(spec.slice)->index]),
          memory(on.memory, whole.memory(d), spec.name, d, bytes{}, bytes{}, all.events, all.trace),
          stream(slice.open ? slice.open(spec.level, tag) : whole.make_stream(d, spec.level, tag)),
          client(slice.compute.add(settings_of(spec, tag, slice.size))) {
        on.parts.fetch_add(1, std::memory_order_relaxed);
    }
    tenant_part(const tenant_part&) = delete;
    tenant_part& operator=(const tenant_part&) = delete;
    ~tenant_part() {
        slice.compute.close(client, instant::min());
        on.parts.fetch_sub(1, std::memory_order_relaxed);
    }

    device_id device;
    typename shared::device& on;
    typename shared::slice& slice;
    tenant_memory<typename Node::memory_type, typename Node::stream::point> memory;
    typename Node::stream stream;
    client_id client;
    client_usage account{};  // once the client is closed; under the mutex
};

template <node Node, compute_policy Policy>
class tenant_state {
public:
    using shared = shared_node<Node, Policy>;
    using part = tenant_part<Node, Policy>;

    tenant_state(Node& whole, shared& all) : clock_(whole.get_clock()), all_(&all) {}
    tenant_state(const tenant_state&) = delete;
    tenant_state& operator=(const tenant_state&) = delete;

    ~tenant_state() {
        close_report late;  // what calls that overlapped the close have left behind
        if (closed())
            for (auto& p : parts_) p.memory.take_back(late);
    }

    // Under the mutex of `all`, with the memory `taken` for it on its devices. When it throws, nothing is
    // promised, and the parts go with the state: its destructor must not run under the mutex, for a limiter that a client
    // leaves may let in somebody's work.
    void open(Node& whole, tenant_spec spec, std::uint32_t tag, reservation<quota_draw>& taken) {
        spec_ = std::move(spec);
        tag_ = tag;
        for (const auto d : spec_.on) parts_.emplace_back(whole, *all_, spec_, d, tag);
        all_->names.push_back(spec_.name);
        promise(spec_.compute);
        for (auto& p : parts_) (void)p.memory.limit().adopt(spec_.memory / spec_.devices, spec_.burst / spec_.devices);
        taken.dismiss();
    }

    [[nodiscard]] const std::string& name() const noexcept { return spec_.name; }  // never changes
    [[nodiscard]] tenant_spec spec() const {
        const std::lock_guard lock(all_->mutex);
        return spec_;
    }
    [[nodiscard]] std::uint32_t tag() const noexcept { return tag_; }
    [[nodiscard]] std::deque<part>& parts() noexcept { return parts_; }
    [[nodiscard]] shared& all() const noexcept { return *all_; }
    [[nodiscard]] instant now() const noexcept { return clock_.now(); }

    // Acquire: who sees it closed sees the final accounts.
    [[nodiscard]] bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

    [[nodiscard]] tenant_usage usage() {
        const auto granted = spec();
        tenant_usage sum{.memory = granted.memory, .burst = granted.burst};
        for (auto& p : parts_) {
            p.memory.collect();
            const auto held = p.memory.limit().usage();
            sum.current += held.current;
            sum.peak += held.peak;
            sum.pending += p.memory.pending();
            sum.largest_free = std::max(sum.largest_free, p.memory.largest_free());
            sum.refused += p.memory.refused();
            add(sum, p.slice.compute.usage(p.client));  // nothing, once the client is closed
            const std::lock_guard lock(all_->mutex);
            add(sum, p.account);
        }
        return sum;
    }

    // The order of closing: (1) nothing new is let in and what waits is cancelled, on all devices; (2) permits that are
    // out and work in flight end; (3) frees in stream order are collected; (4) blocks that are still out are reported
    // and taken back; (5) quota, share and name return. A deadline can end it before (4), never within. The parts stay
    // until the handle goes, so that a call that overlaps is refused and not lost.
    close_report finish(instant deadline) {
        close_report report;
        for (auto& p : parts_) end_client(p, instant::min());
        for (auto& p : parts_)
            if (!end_client(p, deadline)) return report;
        for (auto& p : parts_)
            if (!p.stream.record().wait(deadline) || !p.memory.drain(deadline)) return report;
        {
            const std::lock_guard lock(all_->mutex);  // of two closes and a resize, none undoes the other
            closed_.store(true, std::memory_order_release);
            // Refuses whatever comes now, and gives the device what is freed.
            for (auto& p : parts_) (void)p.memory.limit().resize({}, {});
        }
        for (auto& p : parts_) p.memory.take_back(report);
        report.complete = true;
        report.usage = usage();
        const std::lock_guard lock(all_->mutex);
        if (promised_ != share{}) {  // else another close was first, and the name may be somebody else's by now
            promise({});
            std::erase(all_->names, spec_.name);
        }
        return report;
    }

    // All or nothing. The limiters are told last and under no lock, since they may let in work at once. What a policy
    // refuses then is undone; memory that was given away and is taken by others meanwhile doesn't come back.
    template <std::same_as<tenant_change> Change>
    failure change(const Change& c) {
        if (c.level) open_level(*c.level);
        tenant_spec old;
        {
            const std::lock_guard lock(all_->mutex);
            old = spec_;
            if (const auto why = grant(c); why.code != errc::none) return why;
        }
        if (const errc why = tell_limiters(); why != errc::none) {
            undo<Change>(old);
            (void)tell_limiters();
            return {why};
        }
        return {};
    }

private:
    bool end_client(part& p, instant deadline) {
        client_usage account;
        if (!p.slice.compute.close(p.client, deadline, {}, &account)) return false;
        const std::lock_guard lock(all_->mutex);
        if (account.completed != 0) p.account = account;  // else it was closed before
        return true;
    }

    static void add(tenant_usage& sum, const client_usage& ran) noexcept {
        sum.device_time += ran.device_time;
        sum.completed += ran.completed;
        sum.failed += ran.failed;
        sum.waiting += ran.waiting;
        sum.in_flight += ran.in_flight;
    }

    // A new level is all that telling a limiter may run out of memory for: a client opens it, and goes.
    void open_level(priority level) {
        for (auto& p : parts_) p.slice.compute.close(p.slice.compute.add({.level = level}), instant::min());
    }

    // Under the mutex.
    template <std::same_as<tenant_change> Change>
    failure grant(const Change& c) {
        if (closed()) return {errc::closed};
        const bytes memory = c.memory.value_or(spec_.memory), burst = c.burst.value_or(spec_.burst);
        const share compute = c.compute.value_or(spec_.compute);
        const bytes step = spec_.unit * spec_.devices;
        if (memory == bytes{} || compute == share{}) return {errc::invalid_specification};
        if (memory % step != bytes{} || burst % step != bytes{}) return {errc::not_whole};
        for (const auto& p : parts_)
            if (const auto left = p.slice.left() + spec_.compute.permille(); compute.permille() > left)
                return {errc::share_exceeded, compute.permille(), left, p.slice.size};
        if (const auto why = resize_parts(memory / spec_.devices, burst / spec_.devices); why.code != errc::none)
            return why;
        promise(compute);
        spec_.memory = memory;
        spec_.burst = burst;
        spec_.compute = compute;
        spec_.level = c.level.value_or(spec_.level);
        spec_.cap = c.cap.value_or(spec_.cap);
        spec_.soft_cap = c.soft_cap.value_or(spec_.soft_cap);
        spec_.slo = c.slo.value_or(spec_.slo);
        spec_.group = c.group.value_or(spec_.group);
        spec_.longest = c.longest.value_or(spec_.longest);
        return {};
    }

    template <std::same_as<tenant_change> Change>
    void undo(const tenant_spec& old) {
        const std::lock_guard lock(all_->mutex);
        (void)grant(Change{.memory = old.memory,
                           .burst = old.burst,
                           .compute = old.compute,
                           .level = old.level,
                           .cap = old.cap,
                           .soft_cap = old.soft_cap,
                           .slo = old.slo,
                           .group = old.group,
                           .longest = old.longest});
    }

    // Figures are those of one device.
    failure resize_parts(bytes memory, bytes burst) {
        std::vector<quota_resize> changes;
        for (auto& p : parts_) changes.emplace_back(p.memory.limit(), memory, burst);
        return try_commit_together(changes);
    }

    [[nodiscard]] client_settings settings(std::uint32_t size) const {
        const std::lock_guard lock(all_->mutex);
        return settings_of(spec_, tag_, size);
    }

    // Two resizes may get here in either order: whoever finds newer settings than it told tells those.
    errc tell_limiters() {
        for (auto& p : parts_) {
            client_settings told, now = settings(p.slice.size);
            do {
                told = now;
                const errc why = p.slice.compute.change(p.client, told);
                if (why != errc::none && why != errc::closed) return why;
                now = settings(p.slice.size);
            } while (now != told);
        }
        return errc::none;
    }

    void promise(share compute) {
        for (auto& p : parts_) p.slice.promised += compute.permille() - promised_.permille();
        promised_ = compute;
    }

    typename shared::clock_type clock_;
    shared* all_;
    tenant_spec spec_;  // what a resize changes: under the mutex
    std::uint32_t tag_ = 0;
    share promised_{};
    std::atomic<bool> closed_{false};
    std::deque<part> parts_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
