// SPDX-License-Identifier: Apache-2.0
// Shares of a device by SMs: clients get partitions of their own, with streams inside, as far as SMs come in small enough
// units; the others share a partition, or the device where it has none, by a limiter. The same calls either way.
//
//   const std::array<gpushare::client_settings, 2> clients{{{.weight = 75_pct, .tag = 1}, {.weight = 25_pct, .tag = 2}}};
//   gpushare::partitioned_limiter shared{host::device_sms{node, d}, clients, node.get_clock()};
//   shared.plan().sms;                                     // 3 and 1, of 4
//   auto done = shared.submit(0, [](auto& s) { s.launch(shape, kernel); });
//   shared.verify();                                       // throws if somebody runs on the SMs of all
//
// Every part has a limiter of its own, for what is in flight on other SMs is no reason to wait: clients of different parts
// are never held back for each other, whatever their levels, and charged the time of their own part. Only SMs are split:
// memory bandwidth and caches aren't.
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
#include <gpushare/compute/sm_plan.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How SMs are divided: by the clients' weights, or equally.
enum class sm_sharing : std::uint8_t { weighted, equal };

/// Clients are counted from 0, in the order in which they were given. Thread-safe as compute_limiter is, but for change();
/// neither copied nor moved. Destroying it ends all tickets with errc::closed; its streams end what they have.
///
/// A split is not changed while it is in use: no device moves SMs under running streams. Another one is made when this is
/// gone (the SMs are free again then). What can change live, because no SM moves, change() does.
template <stream_source Device, clock Clock, compute_policy Policy = weighted_fair>
class partitioned_limiter {
public:
    using stream = typename Device::stream;
    using limiter = compute_limiter<stream, Clock, Policy>;
    using ticket = typename limiter::ticket;
    using permit = typename limiter::permit;

    /// `clients[i].weight` is a share of the device, as is its cap; its tag is that of its stream. Throws operation_error:
    /// invalid_specification, share_exceeded (see plan_sms, and what the policy refuses), too_few_sms (there are other
    /// partitions on the device).
    partitioned_limiter(Device device, std::span<const client_settings> clients, Clock time = {},
                        const limiter_options& options = {}, sm_sharing how = sm_sharing::weighted)
        : partitioned_limiter(std::move(device), clients, std::move(time), options, how, [] { return Policy{}; }) {}
    /// `make_policy()` gives the policy of each part.
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
        for (std::uint32_t p = 0; p < plan_.parts(); ++p)
            limiters_.push_back(std::make_unique<limiter>(options, time, make_policy()));
        for (std::size_t i = 0; i < settings_.size(); ++i)
            ids_.push_back(limiter_of(i).add(inside(settings_[i], i, plan_)));
    }

    [[nodiscard]] std::size_t size() const noexcept { return settings_.size(); }
    /// Who got SMs, and who shares.
    [[nodiscard]] const sm_plan& plan() const noexcept { return plan_; }
    /// Why the device isn't partitioned: not_supported, it can't be; too_few_sms, nobody would have been alone. errc::none if
    /// it is.
    [[nodiscard]] errc why_gated() const noexcept {
        return plan_.partitioned() ? errc::none : can_.units == 0 ? errc::not_supported : errc::too_few_sms;
    }

    /// With these three, all of compute/ works: requests, gangs, coroutines, chunks.
    [[nodiscard]] limiter& limiter_of(std::size_t client) noexcept { return *limiters_[plan_.clients[client].part]; }
    [[nodiscard]] client_id id_of(std::size_t client) const noexcept { return ids_[client]; }
    [[nodiscard]] stream& stream_of(std::size_t client) noexcept { return streams_[client]; }
    /// Of part 0 to plan().parts() - 1: each needs a dispatcher of its own, where nobody waits.
    [[nodiscard]] limiter& limiter_of_part(std::uint32_t part) noexcept { return *limiters_[part]; }

    /// See compute_limiter.
    [[nodiscard]] result<ticket> submit(std::size_t client, submission_work<stream> work,
                                        const submit_options& o = no_options, submission_callback on_done = {}) {
        return limiter_of(client).submit(ids_[client], streams_[client], std::move(work), o, std::move(on_done));
    }
    [[nodiscard]] result<permit> acquire(std::size_t client, instant deadline = never,
                                         const std::stop_token& stop = {}) {
        return limiter_of(client).acquire(ids_[client], deadline, stop);
    }
    [[nodiscard]] client_usage usage(std::size_t client) { return limiter_of(client).usage(ids_[client]); }
    /// Of all parts.
    void poll() {
        for (const auto& l : limiters_) l->poll();
    }

    /// Live, while work is in flight: other settings for a client. Throws operation_error: not_supported where SMs would have
    /// to move; as the constructor. Then nothing has changed. One thread at a time.
    void change(std::size_t client, const client_settings& s) {
        auto wanted = settings_;
        wanted[client] = s;
        const sm_plan then = make_plan(wanted);
        const auto same_part = [](const sm_plan::place& a, const sm_plan::place& b) { return a.part == b.part; };
        if (then.sms != plan_.sms ||
            !std::equal(then.clients.begin(), then.clients.end(), plan_.clients.begin(), same_part))
            throw operation_error(errc::not_supported, {},
                                  "SMs can't move from one partition to another while streams are there");
        // Those whose weight goes down first: no policy ever sees a sum over the whole.
        std::vector<std::size_t> order(size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::stable_partition(order.begin(), order.end(),
                              [&](std::size_t i) { return then.clients[i].weight <= plan_.clients[i].weight; });
        for (std::size_t n = 0; n < order.size(); ++n) {
            const std::size_t i = order[n];
            const errc why = limiter_of(i).change(ids_[i], inside(wanted[i], i, then));
            if (why == errc::none) continue;
            while (n-- > 0)
                (void)limiter_of(order[n]).change(ids_[order[n]], inside(settings_[order[n]], order[n], plan_));
            raise({why}, {}, "other settings for a client");
        }
        settings_ = std::move(wanted);
        plan_ = then;
    }

    /// Throws operation_error (invalid_specification, with the tags in its text, the first one and how many in its figures) if
    /// streams of the device are in no partition: their kernels run on everybody's SMs. Whatever shares time alone is fine.
    void verify() const {
        if constexpr (sm_partitionable<Device>) {
            if (!plan_.partitioned()) return;
            detail::refuse_strays(device_.outside_any_partition());
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

    // Nothing can be split where the device has no such thing.
    [[nodiscard]] sm_split ask_for_split() const {
        if constexpr (sm_partitionable<Device>) return detail::split_of(device_);
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
            if (plan_.partitioned()) return partitions_[plan_.clients[i].part].make_stream(s.level, s.tag);
        return device_.make_stream(s.level, s.tag);
    }

    // What a client's settings for the device are for the limiter of its part.
    [[nodiscard]] static client_settings inside(client_settings s, std::size_t i, const sm_plan& plan) {
        s.weight = plan.clients[i].weight;
        if (plan.partitioned()) {
            const auto all = std::accumulate(plan.sms.begin(), plan.sms.end(), std::uint64_t{0});
            s.cap = share::of_permille(
                std::min<std::uint64_t>(s.cap.permille() * all / plan.sms[plan.clients[i].part], 1000));
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
    std::vector<std::unique_ptr<limiter>> limiters_;  // go before the streams
    std::vector<client_id> ids_;
};

template <stream_source Device, clock Clock, class F>
partitioned_limiter(Device, std::span<const client_settings>, Clock, limiter_options, sm_sharing, F)
    -> partitioned_limiter<Device, Clock, std::invoke_result_t<F&>>;

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
