// SPDX-License-Identifier: Apache-2.0
// A tenancy: one node, shared by tenants. It promises each tenant memory and device time on equal parts of some
// devices, never more than there is, all or nothing.
//
//   gpushare::tenancy shared{node};
//   auto chat = shared.admit({.name = "chat", .memory = 24_GiB, .devices = 2, .compute = 60_pct});
//   std::jthread dispatcher([&](std::stop_token stop) { shared.dispatch(device_id{0}, stop); });
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/partition/equal_split.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/tenant/tenant.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

struct tenancy_options {
    limiter_options limiter{};
    ns close_timeout = std::chrono::seconds(10);  // how long a tenant's destructor waits for its work
    event_sink events{};
};

/// Thread-safe; neither copied nor moved. The node must outlive it, and it must outlive its tenants.
template <node Node>
class tenancy {
public:
    using tenant = gpushare::tenant<Node>;
    using limiter = typename tenant::limiter;

    explicit tenancy(Node& shared, tenancy_options options = {})
        : node_(&shared), shared_(std::move(options.events), options.close_timeout) {
        for (std::uint32_t i = 0; i < shared.num_devices(); ++i) {
            auto& memory = shared.memory(device_id{i});
            shared_.devices.emplace_back(memory.capacity() - memory.taken_by_others(), options.limiter,
                                         shared.get_clock());
        }
    }
    tenancy(const tenancy&) = delete;
    tenancy& operator=(const tenancy&) = delete;

    ~tenancy() {
        reap();
        for (auto& s : shared_.stuck) (void)s.release();  // work may still use the memory
    }

    /// Admits a tenant or throws operation_error, which names it, and then nothing is taken: invalid_specification (no
    /// name, no memory, no share), duplicate_name, share_exceeded, no_device, and the errors of equal_split.
    [[nodiscard]] tenant admit(tenant_spec spec) {
        if (spec.name.empty()) refuse(errc::invalid_specification, {}, "a tenant needs a name");
        if (spec.compute == share{}) refuse(errc::invalid_specification, spec.name, "needs a share of device time");
        const std::string name = spec.name;
        try {
            return admit_named(std::move(spec));
        } catch (const operation_error& e) {
            if (!e.tenant().empty()) throw;
            refuse(e.code(), name, e.what());  // of a split or a quota, which know no tenants
        }
    }

    /// Drives the limiter of a device until a stop is requested; the dispatcher, on a thread of the embedder's. Not
    /// needed where clients wait for their work themselves. Throws operation_error (no_device).
    void dispatch(device_id d, const std::stop_token& stop) { limiter_of(d).run(stop); }

    /// Throws operation_error (no_device).
    [[nodiscard]] limiter& limiter_of(device_id d) {
        check(d);
        return shared_.devices[d.index].compute;
    }

    /// What could still be promised on each device.
    [[nodiscard]] std::vector<device_room> rooms() const {
        std::vector<device_room> all;
        for (std::uint32_t i = 0; i < shared_.devices.size(); ++i)
            all.push_back({.device = {i}, .node = 0, .free = shared_.devices[i].memory.free()});
        return all;
    }

    /// The share of device time that isn't promised yet. Throws operation_error (no_device).
    [[nodiscard]] share unpromised(device_id d) const {
        check(d);
        const std::lock_guard lock(shared_.mutex);
        return share::of_permille(1000 - shared_.devices[d.index].promised);
    }

private:
    void check(device_id d) const {
        if (d.index >= shared_.devices.size()) raise({errc::no_device, d.index, 0, shared_.devices.size()});
    }

    [[noreturn]] static void refuse(errc code, std::string_view name, std::string_view why) {
        detail::message m;
        m.add("tenant '", name.substr(0, detail::longest_name), "': ", why);
        throw operation_error(code, name, m.c_str());
    }

    tenant admit_named(tenant_spec spec) {
        reap();
        auto state = std::make_unique<detail::tenant_state<Node>>(*node_, shared_);  // outlives the lock: see open()
        const std::lock_guard lock(shared_.mutex);
        if (std::ranges::find(shared_.names, spec.name) != shared_.names.end())
            refuse(errc::duplicate_name, spec.name, "the name is taken");
        const auto rooms = rooms_for(spec);
        const auto chosen = spec.on.empty() ? equal_split(spec.memory, spec.devices, rooms, spec.unit)
                                            : equal_split_over(spec.memory, rooms, spec.unit);
        if (const bytes step = spec.unit * chosen.devices.size(); spec.burst % step != bytes{})
            refuse(errc::not_whole, spec.name, "burst does not divide into whole units over the devices");
        spec.devices = static_cast<std::uint32_t>(chosen.devices.size());
        spec.on = chosen.devices;
        state->open(*node_, std::move(spec), ++last_tag_);
        return tenant(std::move(state));
    }

    // The devices that the tenant may go to: those it named, or those with enough device time left.
    std::vector<device_room> rooms_for(const tenant_spec& spec) const {
        const auto asked = spec.compute.permille();
        const auto all = rooms();
        std::vector<device_room> fit;
        if (spec.on.empty()) {
            for (const auto& r : all)
                if (shared_.devices[r.device.index].promised + asked <= 1000) fit.push_back(r);
            if (fit.size() < spec.devices && all.size() >= spec.devices) refuse_share(spec, all);
        } else {
            for (const auto d : spec.on) {
                if (d.index >= all.size()) refuse(errc::no_device, spec.name, "no such device");
                fit.push_back(all[d.index]);
            }
            if (spec.on.size() != spec.devices && spec.devices != 1)
                refuse(errc::invalid_specification, spec.name, "names another number of devices than it asks for");
            if (std::ranges::any_of(
                    fit, [&](const device_room& r) { return shared_.devices[r.device.index].promised + asked > 1000; }))
                refuse_share(spec, fit);
        }
        return fit;
    }

    [[noreturn]] void refuse_share(const tenant_spec& spec, const std::vector<device_room>& rooms) const {
        std::vector<std::uint32_t> left;
        for (const auto& r : rooms) left.push_back(1000 - shared_.devices[r.device.index].promised);
        std::ranges::sort(left, [](std::uint32_t a, std::uint32_t b) { return a > b; });
        const auto fits = left[std::min<std::size_t>(std::max(spec.devices, 1U), left.size()) - 1];
        raise({errc::share_exceeded, spec.compute.permille(), fits, 1000}, spec.name, "admission, in permille");
    }

    // Tenants whose destructor could not wait any longer are gone as soon as their work is. Not under the mutex: what
    // leaked is reported to the embedder.
    void reap() noexcept {
        decltype(shared_.stuck) stuck;
        {
            const std::lock_guard lock(shared_.mutex);
            stuck.swap(shared_.stuck);
        }
        std::erase_if(stuck, [](const auto& s) {
            try {
                return s->finish(instant::min()).complete;
            } catch (...) {  // the host is out of memory: next time
                return false;
            }
        });
        const std::lock_guard lock(shared_.mutex);
        shared_.stuck.splice(shared_.stuck.end(), stuck);
    }

    Node* node_;
    detail::shared_node<Node> shared_;
    std::uint32_t last_tag_ = 0;  // under the mutex
};

}  // namespace gpushare::inline GPUSHARE_ABI
