// SPDX-License-Identifier: Apache-2.0
// A tenancy: one node, shared by tenants. The tenancy promises each tenant memory and device time,
// in equal parts on some of the devices. It never promises more than the devices have, and an
// admission succeeds as a whole or changes nothing.
//
//   gpushare::tenancy shared{node};
//   auto chat = shared.admit({.name = "chat", .memory = 24_GiB, .devices = 2, .compute = 60_pct});
//   chat.submit([&](auto& stream) { stream.launch(shape, kernel); }).wait();
//
// The tenancy has no thread: threads that submit and wait also drive the devices for all tenants.
// If no tenant of a device ever waits, one of your threads must call dispatch(device, stop).
//
// Weighted shares are the default; the second template argument is another policy, or any_policy.
// If tenants must not share SMs either, call shared.slice<cuda::device_sms>(device_id{0}, weights)
// before the first admission: it splits the device's SMs into slices, and each tenant is in one.
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/erase.hpp>
#include <gpushare/detail/plain_list.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/partition/equal_split.hpp>
#include <gpushare/partition/reservation.hpp>
#include <gpushare/sm_split.hpp>
#include <gpushare/tenant/detail/checked_specification.hpp>
#include <gpushare/tenant/detail/joint_change.hpp>
#include <gpushare/tenant/detail/memory_source.hpp>
#include <gpushare/tenant/detail/room_wait.hpp>
#include <gpushare/tenant/detail/shared_node.hpp>
#include <gpushare/tenant/detail/tenant_admission.hpp>
#include <gpushare/tenant/detail/tenant_claim.hpp>
#include <gpushare/tenant/detail/tenant_state.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/tenant/tenant.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
class topology;

/// A node that tenants share. Thread-safe; neither copied nor moved. The node must outlive the
/// tenancy, and the tenancy its tenants.
template <node Node, compute_policy Policy = weighted_fair>
class tenancy {
public:
    /// The handle that admit() returns.
    using tenant = gpushare::tenant<Node, Policy>;
    /// The limiter of a device, or of a slice of one.
    using limiter = typename tenant::limiter;

    /// Uses one Policy{} for each device. Measures the devices' overhead; see remeasure(). Throws
    /// what the node's memory(d) throws.
    explicit tenancy(Node& shared, tenancy_options options = {});
    /// `make_policy(d)` gives the policy of each device, and of each of its slices; that policy
    /// stays as long as the tenancy. limiter_of(d).set_policy replaces a policy while there are
    /// tenants.
    template <class F>
    requires(std::is_invocable_r_v<Policy, F&, device_id>&& std::copy_constructible<F>)
        tenancy(Node& shared, tenancy_options options, F make_policy)
        : node_(&shared), shared_(std::move(options)), make_policy_(std::move(make_policy)) {
        for (std::uint32_t i = 0; i < shared.num_devices(); ++i) {
            const device_id d{i};
            shared_.devices.emplace_back(shared.memory(d));
            add_slice(d);
        }
    }
    /// Gives tenants the best-connected devices among those with room. `links` is the node's
    /// topology. Include <gpushare/partition/topology.hpp>. Throws operation_error
    /// (invalid_specification) if the topology has another number of devices.
    template <std::same_as<topology> Topology>
    tenancy(Node& shared, Topology links, tenancy_options options = {}) : tenancy(shared, std::move(options)) {
        if (links.size() != shared.num_devices())
            raise({errc::invalid_specification, links.size(), 0, shared.num_devices(), reason::wrong_count}, {},
                  "devices of a node's topology");
        choice_ = [links = std::move(links)](const tenant_spec& spec, const std::vector<device_room>& rooms,
                                             const node_view&) {
            return connected_split(spec.memory, spec.devices, rooms, links, spec.unit);
        };
    }
    /// A policy isn't an option. This overload exists only to say so.
    template <compute_policy Other>
    tenancy(Node& shared, Other, tenancy_options options = {}) : tenancy(shared, std::move(options)) {
        constexpr bool is_option = !compute_policy<Other>;
        static_assert(is_option,
                      "gpushare: the policy is a template argument, tenancy<node, fifo> shared{on}; policies with "
                      "settings are made by a function of the device: {on, options, [](device_id) { return ...; }}");
    }
    /// Chosen if nothing else fits, as for a misspelt option. So the error has few lines, and the
    /// first one shows the option.
    template <int not_an_option_or_not_of_its_type = 0>
    tenancy(Node&, ...) = delete;
    tenancy(const tenancy&) = delete;
    tenancy& operator=(const tenancy&) = delete;

    /// Aborts, and names the tenant on stderr, if a tenant's handle still exists, because the
    /// handle uses the tenancy whenever it is used or destroyed. Declare the tenancy before its
    /// tenants.
    ~tenancy();

    /// Admits a tenant. Throws operation_error, which names the tenant, and then nothing is taken:
    /// invalid_specification (no name, neither memory nor burst, a slice that doesn't exist),
    /// duplicate_name, share_exceeded (permille of a device, in one of its slices), no_device, and
    /// the errors of equal_split.
    ///
    /// If lent burst is in the way (no_room), a call with a patience asks the borrowers' hooks
    /// (memory/quota_wait.hpp) to give it back, and waits until the deadline or stop request of
    /// `until`. Then throws deadline_exceeded or stopped, with the figures of the last refusal and
    /// the name of the largest borrower. Guaranteed memory is never recalled: a request that
    /// wouldn't fit alongside it even if all burst came back is refused immediately (no_room).
    // One function, not two: a misspelt field of the specification is then in the compiler's first
    // lines.
    template <class Until = no_patience>
    requires std::same_as<Until, no_patience> || detail::is_patience<Until>
    [[nodiscard]] tenant admit(tenant_spec spec, const Until& until = {}) {
        if constexpr (std::same_as<Until, no_patience>)
            return admit_beside(nullptr, std::move(spec));
        else
            return admit_patiently(spec, until);
    }
    /// The same, with the reason instead of an exception.
    template <class Until = no_patience>
    requires std::same_as<Until, no_patience> || detail::is_patience<Until>
    [[nodiscard]] result<tenant> try_admit(tenant_spec spec, const Until& until = {}) try {
        return admit(std::move(spec), until);
    } catch (const operation_error& e) {
        return e.figures();
    }
    /// The old name of admit() with a patience. 0.3 removes it.
    [[deprecated("use admit with a patience")]] [[nodiscard]] tenant admit_until(const tenant_spec& spec,
                                                                                 const auto& until) {
        return admit(spec, until);
    }

    /// One of several changes that are made together.
    struct update {
        tenant* who = nullptr;   ///< the tenant, of this tenancy
        tenant_change change{};  ///< as for tenant::resize
    };
    /// Why several changes were not made.
    struct refused_update {
        failure why{};  ///< errc::none: the changes were made
        /// the first update of the list that can't be made alongside those before it, with
        /// everything that the others give up
        std::size_t which = 0;
    };
    /// Changes the grants of several tenants, each of them once, as one change. First all of them
    /// give up the resources that shrink. Then they all get the resources that grow, and no other
    /// tenant gets anything in between. All or nothing. So tenants can trade memory for device
    /// time. Throws as tenant::resize, with the name of the tenant that can't be resized;
    /// duplicate_name for a tenant that is named twice.
    void resize_together(std::span<const update> all) {
        if (const auto refused = try_resize_together(all); refused.why.code != errc::none)
            raise(refused.why, all[refused.which].who->name(), "resize together");
    }
    /// The same, with the reason instead of an exception.
    [[nodiscard]] refused_update try_resize_together(std::span<const update> all);

    /// From now on `choice` chooses the devices of tenants that don't name them. With an empty
    /// choice, tenants get the devices with the most memory left. admit() passes its exceptions on,
    /// and refuses an invalid choice.
    void choose_devices(device_choice choice);

    /// From now on, admits tenants of memory_stack::arena on that device, with chunks of `memory`,
    /// which must outlive the tenancy. Without it, admit() refuses them (not_supported). Unused
    /// chunks are kept until the device lacks memory. Throws operation_error: no_device;
    /// invalid_specification the second time. Don't call it while other threads use the tenancy.
    template <virtual_memory Memory>
    void offer(device_id d, Memory& memory) {
        place(d, &shared_node::device::arena, [&] { return std::make_unique<detail::arena_source<Memory>>(memory); });
    }
    /// The same for memory_stack::stream_ordered, out of a pool for all tenants: cuda::memory_pool,
    /// host::memory_pool.
    template <class Pool>
    requires detail::stream_ordered_pool<Pool, typename Node::stream>
    void offer(device_id d, Pool& pool) {
        place(d, &shared_node::device::stream_ordered, [&] {
            using source = detail::stream_ordered_source<Pool, typename Node::stream>;
            const auto& first = shared_.devices[d.index].slices.front();
            return std::make_unique<source>(
                pool, first.open ? first.open({}, kernel_free_tag) : node_->make_stream(d, {}, kernel_free_tag));
        });
    }
    /// Gives back the memory that is kept on a device for arenas and in stream order. Throws
    /// operation_error (no_device).
    void trim(device_id d);

    /// Splits a device's SMs into slices, in proportion to `weights`. Tenants of different slices
    /// don't run on each other's SMs and never wait for each other. Tenants of one slice share its
    /// time by a limiter of its own. A tenant's `compute` is still a share of the device, and must
    /// fit into one slice; slices() returns their sizes. Memory, its bandwidth and the caches
    /// aren't sliced. `Sms` is the backend's device_sms.
    ///
    /// Returns errc::not_supported or too_few_sms if the device can't be split, or not so finely.
    /// The device then stays whole, and its tenants share its time. Throws operation_error:
    /// no_device; invalid_specification (no weights, a weight of 0, a device that has tenants with
    /// handles or is sliced already); too_few_sms (others have partitions there). Don't call it
    /// while other threads use the tenancy.
    template <sm_partitionable Sms>
    requires(std::constructible_from<Sms, Node&, device_id>&& std::copy_constructible<Sms>&&
                 std::same_as<typename Sms::stream, typename Node::stream>) [[nodiscard]] errc
        slice(device_id d, std::span<const std::uint32_t> weights) {
        check(d);
        reap();
        auto& device = shared_.devices[d.index];
        if (device.strays || device.parts.load(std::memory_order_relaxed) != 0)
            throw operation_error(errc::invalid_specification, {}, "slices of a device that has tenants, or slices");
        Sms sms(*node_, d);
        const sm_split can = split_of(sms);
        if (weights.size() > can.units) return can.units == 0 ? errc::not_supported : errc::too_few_sms;
        const auto counts = weighted_sms(can, weights);
        const auto all = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
        const auto parts = std::make_shared<decltype(sms.partition(counts))>(sms.partition(counts));
        std::vector<std::function<typename Node::stream(priority, std::uint32_t)>> open;
        for (std::size_t i = 0; i < counts.size(); ++i)
            open.emplace_back(
                [parts, i](priority level, std::uint32_t tag) { return (*parts)[i].make_stream(level, tag); });
        std::function<std::vector<std::uint32_t>()> strays = [sms] { return sms.outside_any_partition(); };
        try {
            while (device.slices.size() < counts.size()) add_slice(d);
        } catch (...) {
            while (device.slices.size() > 1) device.slices.pop_back();
            throw;
        }
        for (std::size_t i = 0; i < counts.size(); ++i) {  // nothing throws from here on
            device.slices[i].size = static_cast<std::uint32_t>(counts[i] * std::uint64_t{1000} / all);
            device.slices[i].open = std::move(open[i]);
        }
        device.strays = std::move(strays);
        return errc::none;
    }
    /// The size of each slice as a share of the device; the whole if it isn't sliced. Throws
    /// operation_error (no_device).
    [[nodiscard]] std::vector<share> slices(device_id d) const;
    /// Checks that all streams of a device are in slices. Otherwise throws operation_error
    /// (invalid_specification, with the streams' tags in its text), since the kernels of the other
    /// streams run on the SMs of all slices. Does nothing if the device isn't sliced.
    void verify(device_id d) const;

    /// The dispatcher: drives the limiter of a device until a stop is requested, on one of the
    /// embedder's threads. Not needed if tenants' threads wait for their work. Each slice has a
    /// limiter of its own. Throws as limiter_of.
    void dispatch(device_id d, const std::stop_token& stop, std::uint32_t slice = 0) { limiter_of(d, slice).run(stop); }

    /// The limiter of a device, or of one of its slices. Throws operation_error (no_device;
    /// invalid_specification for a slice that doesn't exist).
    [[nodiscard]] limiter& limiter_of(device_id d, std::uint32_t slice = 0) {
        check(d, slice);
        return shared_.devices[d.index].slices[slice].compute;
    }

    /// Checks a specification as admit() does. Throws operation_error (invalid_specification) if a
    /// field makes no sense however much room there is.
    static void check_specification(const tenant_spec& spec) { detail::check_admission(spec); }

    /// The time of the node.
    [[nodiscard]] instant now() const noexcept { return node_->get_clock().now(); }

    /// The memory that could be promised on each device now, out of the memory that the last
    /// measurement leaves to tenants. A lost device has none.
    [[nodiscard]] std::vector<device_room> rooms() const;
    /// The same if all lent burst came back; `whole` is the device's memory, including the memory
    /// in use outside tenants.
    [[nodiscard]] std::vector<device_room> promisable() const;
    /// Whether the device is lost, where the node can tell. Throws operation_error (no_device).
    [[nodiscard]] bool lost(device_id d) const {
        check(d);
        return detail::is_lost(*node_, d);
    }

    /// Measures again how much memory contexts, modules, libraries and other processes take on each
    /// device, and sets that memory aside. If fewer bytes are left than are promised and in use,
    /// nothing is taken from tenants. Instead no new grant is made until everything fits, an event
    /// for each device says by how many bytes it is over, and their sum is returned. Every
    /// admission measures first.
    bytes remeasure() noexcept;

    /// The share of device time that isn't promised yet, in all slices, at the level with the most
    /// promised. Throws operation_error (no_device).
    [[nodiscard]] share unpromised(device_id d) const;
    /// The same for one level.
    [[nodiscard]] share unpromised(device_id d, priority level) const;
    /// The largest share, in one slice, with which one more tenant of this level could be admitted
    /// there, if its memory fits. Throws as unpromised(d).
    [[nodiscard]] share admissible(device_id d, priority level) const;
    /// The same for one slice, also as a share of the device. Throws as limiter_of.
    [[nodiscard]] share unpromised(device_id d, std::uint32_t slice) const;

private:
    template <node, compute_policy>
    friend class detail::succession;

    using shared_node = detail::shared_node<Node, Policy>;

    template <class Make>
    void place(device_id d, std::unique_ptr<detail::memory_source> shared_node::device::*where, Make make) {
        check(d);
        auto& source = shared_.devices[d.index].*where;
        if (source != nullptr)
            raise({.code = errc::invalid_specification, .because = reason::has_source}, {},
                  "placing memory on a device");
        shared_.devices[d.index].trim_for_all();
        source = make();
    }
    void check(device_id d) const;
    void check(device_id d, std::uint32_t slice) const;

    void add_slice(device_id d);

    // The root quotas of the devices that the tenant may use.
    [[nodiscard]] detail::plain_list<quota*> roots_for(const tenant_spec& spec);
    [[nodiscard]] static bytes per_device_of(const tenant_spec& spec) noexcept {
        return spec.memory / std::max<std::uint64_t>(std::max<std::uint64_t>(spec.on.size(), spec.devices), 1);
    }

    // Whether enough devices could have the tenant's memory if all lent memory came back.
    [[nodiscard]] bool could_promise(const tenant_spec& spec) const;

    // Admits alongside the predecessor, if there is one, which has the same name: both exist until
    // one is closed.
    tenant admit_beside(const tenant* predecessor, tenant_spec spec);
    template <clock Clock>
    tenant admit_patiently(const tenant_spec& spec, const patience<Clock>& until) {
        detail::room_wait wait{roots_for(spec), until};
        const bytes per_device = per_device_of(spec);
        for (;;) try {
                return admit(spec);
            } catch (const operation_error& e) {
                if (e.code() != errc::no_room || !could_promise(spec)) throw;
                if (const errc why = wait.again(per_device); why != errc::none)
                    wait.refuse(why, e.figures(), spec.name, per_device);
            }
    }
    tenant admit_named(const tenant* predecessor, tenant_spec spec);
    detail::tenant_claim<Node, Policy> claim(const tenant* predecessor, tenant_spec spec);

    // Destroys the tenants whose destructor could not wait any longer, once their work is done. Not
    // under the mutex, since leaks are reported to the embedder.
    void reap() noexcept;

    Node* node_;
    detail::shared_node<Node, Policy> shared_;
    std::function<Policy(device_id)> make_policy_;
    device_choice choice_;        // under the mutex; empty: the devices with the most room
    std::uint32_t last_tag_ = 0;  // under the mutex
};

// Out of the class, and so without `inline`: an `extern template` then stops compilers from
// instantiating the members.

template <node Node, compute_policy Policy>
tenancy<Node, Policy>::tenancy(Node& shared, tenancy_options options)
    : tenancy(shared, std::move(options), [](device_id) { return Policy{}; }) {}

template <node Node, compute_policy Policy>
tenancy<Node, Policy>::~tenancy() {
    reap();
    // work may still use the memory
    for (auto& s : shared_.stuck) detail::erase_equal(shared_.handles, s.release());
    if (shared_.handles.empty()) return;
    std::fprintf(stderr, "gpushare: tenant '%s' outlives its tenancy: destroy the handles of tenants first\n",
                 tenant_name{shared_.handles.front()->name()}.view().data());
    std::abort();
}

template <node Node, compute_policy Policy>
auto tenancy<Node, Policy>::try_resize_together(std::span<const update> all) -> refused_update {
    detail::joint_change<Node, Policy> joint(shared_);
    for (std::size_t i = 0; i < all.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j)
            if (all[j].who == all[i].who) return {{errc::duplicate_name}, i};
        try {
            detail::check_change(all[i].who->spec(), all[i].change);
        } catch (const operation_error& e) {
            return {e.figures(), i};
        }
        joint.add(*all[i].who->state_, all[i].change);
    }
    detail::idle_room idle{roots_for({})};
    auto why = joint.apply();
    while (why.code == errc::no_room && idle.gather(bytes{why.asked} - bytes{why.left})) why = joint.apply();
    return {why, why.code == errc::none ? 0 : joint.refused()};
}

template <node Node, compute_policy Policy>
void tenancy<Node, Policy>::choose_devices(device_choice choice) {
    const std::lock_guard lock(shared_.mutex);
    choice_ = std::move(choice);
}

template <node Node, compute_policy Policy>
std::vector<share> tenancy<Node, Policy>::slices(device_id d) const {
    check(d);
    std::vector<share> sizes;
    for (const auto& s : shared_.devices[d.index].slices) sizes.push_back(share::of_permille(s.size));
    return sizes;
}

template <node Node, compute_policy Policy>
void tenancy<Node, Policy>::verify(device_id d) const {
    check(d);
    const auto& strays = shared_.devices[d.index].strays;
    if (strays) refuse_strays(strays());
}

template <node Node, compute_policy Policy>
void tenancy<Node, Policy>::trim(device_id d) {
    check(d);
    (void)shared_.devices[d.index].trim();
}

template <node Node, compute_policy Policy>
std::vector<device_room> tenancy<Node, Policy>::rooms() const {
    std::vector<device_room> all;
    for (std::uint32_t i = 0; i < shared_.devices.size(); ++i)
        all.push_back(
            lost({i}) ? device_room{{i}}
                      : device_room{{i}, 0, shared_.devices[i].unpromised(), shared_.devices[i].overhead.available()});
    return all;
}

template <node Node, compute_policy Policy>
std::vector<device_room> tenancy<Node, Policy>::promisable() const {
    std::vector<device_room> all;
    for (std::uint32_t i = 0; i < shared_.devices.size(); ++i)
        all.push_back(lost({i}) ? device_room{{i}}
                                : device_room{{i},
                                              0,
                                              shared_.devices[i].memory.promisable() - shared_.devices[i].asleep(),
                                              shared_.devices[i].overhead.capacity()});
    return all;
}

template <node Node, compute_policy Policy>
bytes tenancy<Node, Policy>::remeasure() noexcept {
    bytes over{};
    for (std::uint32_t i = 0; i < shared_.devices.size(); ++i) {
        // all of it is taken, and refusing doesn't bring any back
        if (detail::is_lost(*node_, {i})) continue;
        auto& d = shared_.devices[i];
        if (d.stream_ordered) (void)d.stream_ordered->trim();  // a pool's memory looks like others'
        {
            const std::lock_guard lock(shared_.mutex);  // of two measurements, the later one counts
            (void)d.memory.resize(d.overhead.measure(node_->memory(device_id{i})), {});
        }
        const auto now = d.memory.usage();
        if (now.current <= now.limit()) continue;
        over += now.current - now.limit();
        detail::tell(shared_.options.events,
                     {tenant_event::kind::overcommitted, {}, {i}, errc::no_room, now.current - now.limit(), {}, {}});
    }
    return over;
}

template <node Node, compute_policy Policy>
share tenancy<Node, Policy>::unpromised(device_id d) const {
    check(d);
    const std::lock_guard lock(shared_.mutex);
    std::uint32_t left = 0;
    for (const auto& s : shared_.devices[d.index].slices) left += s.left();
    return share::of_permille(left);
}

template <node Node, compute_policy Policy>
share tenancy<Node, Policy>::unpromised(device_id d, priority level) const {
    check(d);
    const std::lock_guard lock(shared_.mutex);
    std::uint32_t left = 0;
    for (const auto& s : shared_.devices[d.index].slices) left += s.left(level);
    return share::of_permille(left);
}

template <node Node, compute_policy Policy>
share tenancy<Node, Policy>::admissible(device_id d, priority level) const {
    check(d);
    const std::lock_guard lock(shared_.mutex);
    return share::of_permille(shared_.devices[d.index].slice_for(any_slice, level)->left(level));
}

template <node Node, compute_policy Policy>
share tenancy<Node, Policy>::unpromised(device_id d, std::uint32_t slice) const {
    check(d, slice);
    const std::lock_guard lock(shared_.mutex);
    return share::of_permille(shared_.devices[d.index].slices[slice].left());
}

template <node Node, compute_policy Policy>
void tenancy<Node, Policy>::check(device_id d) const {
    if (d.index >= shared_.devices.size())
        raise({errc::no_device, d.index, 0, shared_.devices.size(), reason::no_such_device});
}

template <node Node, compute_policy Policy>
void tenancy<Node, Policy>::check(device_id d, std::uint32_t slice) const {
    check(d);
    const auto there = shared_.devices[d.index].slices.size();
    if (slice >= there) raise({errc::invalid_specification, slice, 0, there, reason::no_such_slice});
}

template <node Node, compute_policy Policy>
void tenancy<Node, Policy>::add_slice(device_id d) {
    auto& slices = shared_.devices[d.index].slices;
    slices.emplace_back(static_cast<std::uint32_t>(slices.size()), shared_.options.limiter, node_->get_clock(),
                        make_policy_(d));
}

template <node Node, compute_policy Policy>
detail::plain_list<quota*> tenancy<Node, Policy>::roots_for(const tenant_spec& spec) {
    detail::plain_list<quota*> roots;
    for (std::uint32_t i = 0; i < shared_.devices.size(); ++i)
        if (spec.on.empty() || std::ranges::find(spec.on, device_id{i}) != spec.on.end())
            roots.push_back(&shared_.devices[i].memory);
    return roots;
}

template <node Node, compute_policy Policy>
bool tenancy<Node, Policy>::could_promise(const tenant_spec& spec) const {
    const bytes per_device = per_device_of(spec);
    std::size_t enough = 0;
    for (const auto& r : promisable())
        if (r.free >= per_device && (spec.on.empty() || std::ranges::count(spec.on, r.device) != 0)) ++enough;
    return enough >= std::max<std::size_t>(spec.on.size(), spec.devices);
}

template <node Node, compute_policy Policy>
auto tenancy<Node, Policy>::admit_beside(const tenant* predecessor, tenant_spec spec) -> tenant {
    detail::check_admission(spec);
    const std::string name = spec.name;
    for (detail::idle_room idle{roots_for(spec)};;) try {
            return admit_named(predecessor, spec);
        } catch (const operation_error& e) {
            if (e.code() == errc::no_room && idle.gather(per_device_of(spec))) continue;
            if (!e.tenant().empty()) throw;
            detail::refuse_admission(e.figures(), name, e.what());  // a split knows no tenants
        }
}

template <node Node, compute_policy Policy>
auto tenancy<Node, Policy>::admit_named(const tenant* predecessor, tenant_spec spec) -> tenant {
    reap();
    (void)remeasure();
    auto state = std::make_unique<detail::tenant_state<Node, Policy>>(*node_, shared_);
    auto claim = this->claim(predecessor, std::move(spec));
    state->open(claim, predecessor != nullptr ? predecessor->state_.get() : nullptr);
    return tenant(std::move(state));
}

template <node Node, compute_policy Policy>
auto tenancy<Node, Policy>::claim(const tenant* predecessor, tenant_spec spec) -> detail::tenant_claim<Node, Policy> {
    const std::lock_guard lock(shared_.mutex);
    const auto namesakes = std::count(shared_.names.begin(), shared_.names.end(), spec.name);
    if (predecessor != nullptr && (predecessor->closed() || namesakes == 0))
        detail::refuse_admission({errc::closed}, spec.name, "its predecessor is closed");
    if (namesakes != (predecessor != nullptr ? 1 : 0))
        detail::refuse_admission({errc::duplicate_name}, spec.name, "the name is taken");
    detail::plain_list<typename shared_node::slice*> kept;
    if (predecessor != nullptr) kept = predecessor->state_->stays_on(spec.on);
    auto memory = detail::tenant_admission(*node_, shared_, choice_, kept).reserve(spec);
    return {shared_, std::move(spec), std::move(memory), ++last_tag_, std::move(kept)};
}

template <node Node, compute_policy Policy>
void tenancy<Node, Policy>::reap() noexcept {
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

/// The policy is what `make_policy` returns.
template <node Node, class F>
tenancy(Node&, tenancy_options, F) -> tenancy<Node, std::invoke_result_t<F&, device_id>>;
/// For anything else; keeps errors short.
template <node Node>
tenancy(Node&, ...) -> tenancy<Node>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare

#if defined(GPUSHARE_COMPILED)
#include <gpushare/tenant/detail/compiled.hpp>  // at the end: it needs all of the above
#endif
