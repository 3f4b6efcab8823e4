// SPDX-License-Identifier: Apache-2.0
// Shares a device by SMs. Clients get SM partitions of their own, each with a stream inside, as far
// as the device's SMs come in small enough units. The other clients share a partition by time, or
// the whole device if it can't be split.
//
//   const std::array clients{gpushare::client_settings{.weight = 75_pct, .tag = 1},
//                            gpushare::client_settings{.weight = 25_pct, .tag = 2}};
//   gpushare::partitioned_limiter shared{gpushare::host::device_sms{node, d}, clients, node.get_clock()};
//   shared.plan().sms;                                     // 3 and 1, of 4
//   auto done = shared.submit(0, [&](auto& s) { s.launch(shape, kernel); });
//   shared.verify();  // throws if a stream runs on everybody's SMs
//
// Every partition has a limiter of its own, since work in flight on other SMs is no reason to wait.
// So clients of different partitions are never held back for each other, whatever their levels, and
// each is charged its own partition's time. Only SMs are split: memory bandwidth and caches aren't.
//
// The plan, which says which client gets how many SMs, is a value computed from the numbers that
// the device reports:
//
//   const gpushare::sm_split can{.sms = 132, .unit = 8, .units = 16};  // split() of an H100
//   const auto p = gpushare::plan_sms(can, std::array{60_pct, 35_pct, 5_pct});
//   p.sms;             // 80, 48
//   p.clients[2];  // in partition 1, an eighth of its time: 5 % of the device are less than a unit
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stop_token>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/sm_split.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Which partition each client of a device runs in, and which clients share one. A value.
struct sm_plan {
    /// The place of one client.
    struct place {
        /// The client's partition, from 0; 0 if the device isn't partitioned.
        std::uint32_t partition = 0;
        /// Its weight for the partition's time, relative to the other clients there.
        share weight = share::whole();
        bool alone = true;  ///< no other client is in the partition

        friend bool operator==(const place&, const place&) = default;
    };

    /// The SMs of each partition; empty: all clients share the device by time.
    std::vector<std::uint32_t> sms;
    std::vector<place> clients;  ///< in the order in which the clients were given

    /// Whether the device is partitioned.
    [[nodiscard]] bool partitioned() const noexcept { return !sms.empty(); }
    /// The number of partitions; 1 if the device isn't partitioned.
    [[nodiscard]] std::uint32_t num_partitions() const noexcept {
        return std::max<std::uint32_t>(static_cast<std::uint32_t>(sms.size()), 1);
    }

    friend bool operator==(const sm_plan&, const sm_plan&) = default;
};

namespace detail {

inline void check_shares(std::span<const share> shares) {
    std::uint64_t sum = 0;
    for (const share s : shares) sum += s.permille();
    if (shares.empty() || std::count(shares.begin(), shares.end(), share{}) != 0)
        throw operation_error(errc::invalid_specification, {},
                              "a split of SMs needs clients, and each of them a share");
    if (sum > 1000) raise({errc::share_exceeded, sum, 0, 1000, reason::weights_exceeded}, {}, "a split of SMs");
}

/// The plan without partitions: each client has a share of the device's time.
[[nodiscard]] inline sm_plan gated_plan(std::span<const share> shares) {
    sm_plan plan;
    for (const share s : shares) plan.clients.push_back({.partition = 0, .weight = s, .alone = shares.size() == 1});
    return plan;
}

/// Groups the clients by partition. Merges the two smallest groups (ties: the earlier ones) until
/// each group is due at least one unit, so as many clients as possible stay alone.
[[nodiscard]] inline std::vector<std::vector<std::size_t>> sm_groups(std::span<const share> shares,
                                                                     std::uint32_t units) {
    struct group {
        std::uint64_t weight = 0;
        std::vector<std::size_t> clients;
    };
    std::vector<group> groups;
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < shares.size(); ++i) {
        groups.push_back({shares[i].permille(), {i}});
        total += shares[i].permille();
    }
    const auto lighter = [](const group& a, const group& b) { return a.weight < b.weight; };
    while (groups.size() > 1) {
        std::stable_sort(groups.begin(), groups.end(), lighter);
        if (groups[0].weight * units >= total) break;
        groups[1].weight += groups[0].weight;
        groups[1].clients.insert(groups[1].clients.end(), groups[0].clients.begin(), groups[0].clients.end());
        groups.erase(groups.begin());
    }
    std::vector<std::vector<std::size_t>> clients;
    for (auto& g : groups) {
        std::sort(g.clients.begin(), g.clients.end());
        clients.push_back(std::move(g.clients));
    }
    std::sort(clients.begin(), clients.end());  // partitions in the order of their first clients
    return clients;
}

}  // namespace detail

/// Gives out all SMs in proportion to the shares (see weighted_sms: no client is off by a unit).
/// Clients that are due less than a unit share a partition with one another, or otherwise with the
/// client that is due least. If all clients would share one partition, the device isn't
/// partitioned. Throws operation_error: invalid_specification (no client, or one without a share),
/// share_exceeded.
[[nodiscard]] inline sm_plan plan_sms(const sm_split& can, std::span<const share> shares) {
    detail::check_shares(shares);
    const auto groups = detail::sm_groups(shares, can.units);
    if (groups.size() == 1 || can.unit == 0) return detail::gated_plan(shares);
    std::vector<std::uint32_t> weights;
    sm_plan plan;
    plan.clients.resize(shares.size());
    for (const auto& clients : groups) {
        std::uint32_t sum = 0;
        for (const std::size_t i : clients) sum += shares[i].permille();
        for (const std::size_t i : clients)
            plan.clients[i] = {.partition = static_cast<std::uint32_t>(weights.size()),
                               .weight = share::of_permille(std::uint64_t{shares[i].permille()} * 1000 / sum),
                               .alone = clients.size() == 1};
        weights.push_back(sum);
    }
    plan.sms = weighted_sms(can, weights);
    return plan;
}

/// Gives each client the same number of SMs and leaves the rest unused. If there are fewer units
/// than clients, all get equal shares of the device's time. Throws operation_error:
/// invalid_specification (no client, or more than a thousand).
[[nodiscard]] inline sm_plan plan_equal_sms(const sm_split& can, std::size_t clients) {
    const std::vector<share> shares(
        clients, clients > 1000 ? share{} : share::of_permille(1000 / std::max<std::size_t>(clients, 1)));
    detail::check_shares(shares);
    sm_plan plan = detail::gated_plan(shares);
    if (clients == 1 || clients > can.units) return plan;
    plan.sms = equal_sms(can, static_cast<std::uint32_t>(clients));
    for (std::uint32_t i = 0; i < clients; ++i) plan.clients[i] = {.partition = i};
    return plan;
}

/// How SMs are divided between clients.
enum class sm_sharing : std::uint8_t {
    weighted,  ///< in proportion to the clients' weights
    equal      ///< the same number for each
};

/// One limiter for each partition of a device, behind one set of calls. Clients are numbered from
/// 0, in the order in which they were given. Thread-safe as compute_limiter is, except for
/// change(); neither copied nor moved. The destructor ends all tickets with errc::closed; work that
/// is enqueued continues.
///
/// The split can't be changed, since no device moves SMs under running streams. For another split,
/// destroy this object first. change() changes settings that move no SMs.
template <stream_source Device, clock Clock, compute_policy Policy = weighted_fair>
class partitioned_limiter {
public:
    /// The stream of each client, in its partition.
    using stream = typename Device::stream;
    using limiter = compute_limiter<stream, Clock, Policy>;  ///< The limiter of each partition.
    using ticket = typename limiter::ticket;                 ///< The type that submit returns.
    using permit = typename limiter::permit;                 ///< The type that acquire returns.

    /// Partitions `device` for `clients`: `weight` and `cap` of each are shares of the device, and
    /// `tag` is that of its stream. `options` are those of each limiter. Throws operation_error:
    /// invalid_specification, share_exceeded (see plan_sms, and what the policy refuses),
    /// too_few_sms (there are other partitions on the device).
    partitioned_limiter(Device device, std::span<const client_settings> clients, Clock time = {},
                        const limiter_options& options = {}, sm_sharing how = sm_sharing::weighted)
        : partitioned_limiter(std::move(device), clients, std::move(time), options, how, [] { return Policy{}; }) {}
    /// The same; `make_policy()` returns the policy of each partition.
    template <class F>
    requires std::is_invocable_r_v<Policy, F&> partitioned_limiter(Device device,
                                                                   std::span<const client_settings> clients, Clock time,
                                                                   const limiter_options& options, sm_sharing how,
                                                                   F make_policy)
        : device_(std::move(device)),
          settings_(clients.begin(), clients.end()),
          how_(how),
          can_(ask_for_split()),
          plan_(make_plan(settings_)) {
        if constexpr (sm_partitionable<Device>)
            if (plan_.partitioned()) partitions_ = device_.partition(plan_.sms);
        for (std::size_t i = 0; i < settings_.size(); ++i) streams_.push_back(open_stream(i));
        for (std::uint32_t p = 0; p < plan_.num_partitions(); ++p)
            limiters_.push_back(std::make_unique<limiter>(options, time, make_policy()));
        for (std::size_t i = 0; i < settings_.size(); ++i)
            ids_.push_back(limiter_of(i).add(inside(settings_[i], i, plan_)));
    }

    /// The number of clients.
    [[nodiscard]] std::size_t size() const noexcept { return settings_.size(); }
    /// Which clients have SMs of their own, and which share.
    [[nodiscard]] const sm_plan& plan() const noexcept { return plan_; }
    /// Why the device isn't partitioned: not_supported if it can't be, too_few_sms if all clients
    /// would share one partition; errc::none if it is.
    [[nodiscard]] errc why_gated() const noexcept {
        return plan_.partitioned() ? errc::none : can_.units == 0 ? errc::not_supported : errc::too_few_sms;
    }

    /// The limiter of a client's partition. With it, id_of and stream_of, all of compute/ works:
    /// requests, gangs, coroutines.
    [[nodiscard]] limiter& limiter_of(std::size_t client) noexcept {
        return *limiters_[plan_.clients[client].partition];
    }
    /// The client's id in its limiter.
    [[nodiscard]] client_id id_of(std::size_t client) const noexcept { return ids_[client]; }
    /// The client's stream, in its partition.
    [[nodiscard]] stream& stream_of(std::size_t client) noexcept { return streams_[client]; }
    /// The limiter of partition 0 to plan().num_partitions() - 1. Each needs a dispatcher of its
    /// own if no thread waits in it.
    [[nodiscard]] limiter& limiter_of_partition(std::uint32_t index) noexcept { return *limiters_[index]; }

    /// As compute_limiter::submit, on the client's stream.
    [[nodiscard]] result<ticket> submit(std::size_t client, submission_work<stream> work,
                                        const submit_options& o = no_options, submission_callback on_done = {}) {
        return limiter_of(client).submit(ids_[client], streams_[client], std::move(work), o, std::move(on_done));
    }
    /// As compute_limiter::acquire.
    [[nodiscard]] result<permit> acquire(std::size_t client, instant deadline = never,
                                         const std::stop_token& stop = {}) {
        return limiter_of(client).acquire(ids_[client], deadline, stop);
    }
    /// As compute_limiter::usage.
    [[nodiscard]] client_usage usage(std::size_t client) { return limiter_of(client).usage(ids_[client]); }
    /// As compute_limiter::poll, for all partitions.
    void poll() {
        for (const auto& l : limiters_) l->poll();
    }

    /// Changes a client's settings while work is in flight. Throws operation_error as the
    /// constructor, and not_supported if SMs would have to move; then nothing has changed. The same
    /// holds if a policy throws. For one thread at a time.
    void change(std::size_t client, const client_settings& s) {
        auto wanted = settings_;
        wanted[client] = s;
        sm_plan then = make_plan(wanted);
        const auto same_partition = [](const sm_plan::place& a, const sm_plan::place& b) {
            return a.partition == b.partition;
        };
        if (then.sms != plan_.sms ||
            !std::equal(then.clients.begin(), then.clients.end(), plan_.clients.begin(), same_partition))
            throw operation_error(errc::not_supported, {},
                                  "SMs can't move from one partition to another while streams are there");
        // Clients whose weight falls come first, so no policy ever sees weights that sum to more
        // than the whole.
        std::vector<std::size_t> order(size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::stable_partition(order.begin(), order.end(),
                              [&](std::size_t i) { return then.clients[i].weight <= plan_.clients[i].weight; });
        std::size_t changed = 0;
        try {
            for (; changed < order.size(); ++changed) {
                const std::size_t i = order[changed];
                const failure why = limiter_of(i).change(ids_[i], inside(wanted[i], i, then));
                if (why != errc::none) raise(why, {}, "changing a client's settings");
            }
        } catch (...) {  // a refusal, or a policy has thrown
            while (changed-- > 0) change_back(order[changed]);
            throw;
        }
        settings_ = std::move(wanted);
        plan_ = std::move(then);
    }

    /// Checks that all streams of the device are in partitions. Otherwise throws operation_error
    /// (invalid_specification), since the kernels of the other streams run on all partitions' SMs.
    /// The error's text has the streams' tags, and its figures the first tag and the number of
    /// tags. Does nothing if the device isn't partitioned.
    void verify() const {
        if constexpr (sm_partitionable<Device>) {
            if (!plan_.partitioned()) return;
            refuse_strays(device_.outside_any_partition());
        }
    }

private:
    struct none {};
    static auto partition_type_of() {
        if constexpr (sm_partitionable<Device>)
            return std::type_identity<typename Device::partition_type>{};
        else
            return std::type_identity<none>{};
    }
    using partition_type = typename decltype(partition_type_of())::type;

    // An empty split if the device can't be split.
    [[nodiscard]] sm_split ask_for_split() const {
        if constexpr (sm_partitionable<Device>) return split_of(device_);
        return {};
    }

    [[nodiscard]] sm_plan make_plan(std::span<const client_settings> clients) const {
        if (how_ == sm_sharing::equal) return plan_equal_sms(can_, clients.size());
        std::vector<share> shares;
        for (const auto& c : clients) shares.push_back(c.weight);
        return plan_sms(can_, shares);
    }

    [[nodiscard]] stream open_stream(std::size_t i) {
        const auto& s = settings_[i];
        if constexpr (sm_partitionable<Device>)
            if (plan_.partitioned()) return partitions_[plan_.clients[i].partition].make_stream(s.level, s.tag);
        return device_.make_stream(s.level, s.tag);
    }

    // Gives a client its earlier settings again, unless its policy throws.
    void change_back(std::size_t i) noexcept {
        try {
            (void)limiter_of(i).change(ids_[i], inside(settings_[i], i, plan_));
        } catch (...) {  // the other clients still get theirs
        }
    }

    // Translates a client's settings for the device into settings for the limiter of its partition.
    [[nodiscard]] static client_settings inside(client_settings s, std::size_t i, const sm_plan& plan) {
        s.weight = plan.clients[i].weight;
        if (plan.partitioned()) {
            const auto all = std::accumulate(plan.sms.begin(), plan.sms.end(), std::uint64_t{0});
            s.cap = share::of_permille(
                std::min<std::uint64_t>(s.cap.permille() * all / plan.sms[plan.clients[i].partition], 1000));
        }
        return s;
    }

    Device device_;
    std::vector<client_settings> settings_;
    sm_sharing how_;
    sm_split can_;
    sm_plan plan_;
    std::vector<partition_type> partitions_;
    std::vector<stream> streams_;
    std::vector<std::unique_ptr<limiter>> limiters_;  // destroyed before the streams
    std::vector<client_id> ids_;
};

/// Deduces the policy from the result of `make_policy`.
template <stream_source Device, clock Clock, class F>
partitioned_limiter(Device, std::span<const client_settings>, Clock, limiter_options, sm_sharing, F)
    -> partitioned_limiter<Device, Clock, std::invoke_result_t<F&>>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
