// SPDX-License-Identifier: Apache-2.0
// Leave to enqueue on several devices: all or none. For work whose parts wait for each other, such as a collective.
//
//   auto g = gpushare::gang_permit<limiter>::acquire({{&on_0, a, {0}}, {&on_1, b, {1}}}, deadline);
//   if (g) g->enqueue(node.gangs(), streams, [&](std::size_t rank, auto& s) { s.launch(shape, part[rank]); });
//
// No two gangs wait for each other for ever: permits are taken in the order of the devices (ordered resources, Havender
// 1968), all of them before anything is enqueued, and what is enqueued goes under the node's gang order.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <numeric>
#include <span>
#include <stop_token>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// Movable; one owner. What isn't used is given back.
template <class Limiter>
class [[nodiscard]] gang_permit {
public:
    using stream = typename Limiter::stream;
    using permit = typename Limiter::permit;

    /// One rank: a client of the limiter of one device.
    struct member {
        Limiter* limiter = nullptr;
        client_id client{};
        device_id device{};
    };

    /// Waits for a permit of every member, at most until `deadline`; without all of them it holds none. The codes of
    /// Limiter::acquire, duplicate_device, invalid_specification (no member). Whoever holds a permit or another gang of
    /// one of these limiters may wait for himself: don't.
    [[nodiscard]] static result<gang_permit> acquire(std::span<const member> members, instant deadline = never,
                                                     const std::stop_token& stop = {}, const submit_options& o = {}) {
        if (members.empty()) return errc::invalid_specification;
        std::vector<std::size_t> order(members.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::ranges::sort(order, [&](std::size_t a, std::size_t b) { return members[a].device < members[b].device; });
        for (std::size_t i = 1; i < order.size(); ++i)
            if (members[order[i - 1]].device == members[order[i]].device) return errc::duplicate_device;
        gang_permit g;
        g.parts_.reserve(members.size());
        for (const auto i : order) {
            auto p = members[i].limiter->acquire(members[i].client, deadline, stop, o);
            if (!p) return p.why();  // the others go back
            g.parts_.push_back({i, members[i].device, *std::move(p)});
        }
        return g;
    }
    [[nodiscard]] static result<gang_permit> acquire(std::initializer_list<member> members, instant deadline = never,
                                                     const std::stop_token& stop = {}, const submit_options& o = {}) {
        return acquire(std::span<const member>(members.begin(), members.size()), deadline, stop, o);
    }

    /// Calls `enqueue_part(rank, stream)` for each member, whose stream is `streams[rank]`, with no other gang between.
    /// Once only. What it throws passes through, and then the later devices have got nothing: the parts that were enqueued
    /// must not wait for them without end.
    template <gang_order Order, std::invocable<std::size_t, stream&> F>
    void enqueue(Order& order, std::span<stream* const> streams, F enqueue_part) {
        std::vector<device_id> devices;
        devices.reserve(parts_.size());
        for (const auto& p : parts_) devices.push_back(p.device);
        auto parts = std::move(parts_);
        const auto guard = order.enter(devices);
        for (auto& p : parts) p.leave.enqueue(*streams[p.rank], [&](stream& s) { enqueue_part(p.rank, s); });
    }

    [[nodiscard]] std::size_t size() const noexcept { return parts_.size(); }

private:
    struct part {
        std::size_t rank;
        device_id device;
        permit leave;
    };

    gang_permit() = default;
    std::vector<part> parts_;
};

}  // namespace gpushare::inline GPUSHARE_ABI
