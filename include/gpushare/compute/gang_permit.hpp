// SPDX-License-Identifier: Apache-2.0
// Permits on several devices at once, on all or on none, for work whose ranks wait for each other, such as a
// collective.
//
//   auto g = gpushare::gang_permit<limiter>::acquire({{&on_0, a, {0}}, {&on_1, b, {1}}}, deadline);
//   const std::array streams{&stream_0, &stream_1};
//   if (g) g->enqueue(node.gangs(), streams, [&](std::size_t rank, auto& s) { s.launch(shape, part[rank]); });
//   // or, for a call that enters the gang order by itself, such as submit_all_reduce:
//   if (g) g->enqueue(streams, [&] { return all_reduce_on(streams); });
//
// No two gangs wait for each other for ever: all permits are taken before anything is enqueued, in
// the order of the devices (ordered resources, Havender 1968), and the work is enqueued within the
// node's gang order.
//
// A gang holds its first permits while it waits for the others, and so keeps those devices from
// their other clients. For each further device it does so for 2 * bound_of(client) there plus
// gang_patience at first. Then it gives its permits back, waits without any until its turn has come
// on the device that was late, and begins anew. It isn't charged for what it didn't use, so its
// turns come soon; in case they don't, as behind a long line in the order of arrival, it is twice
// as patient each time.
//
// Other clients of a device may wait so much longer than their own bound says: after n times that a
// gang came too late, 2^n times that, for each of its further devices. No number bounds n, since
// otherwise a gang behind a longer line would never come through. The gang's deadline bounds the
// wait: at the deadline it holds nothing. If you share a device with other people's gangs, require
// a deadline of them.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <span>
#include <stop_token>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How long a gang that holds permits waits for another one, beyond twice the bound that was
/// published to it there; twice as long after each time that this wasn't enough.
inline constexpr ns gang_patience{1'000'000};

/// The permits of a gang: one for each member, or none. Movable; one owner; for one thread at a time. The destructor
/// gives unused permits back.
template <class Limiter>
class [[nodiscard]] gang_permit {
public:
    using stream = typename Limiter::stream;  ///< The stream that members enqueue on.
    using permit = typename Limiter::permit;  ///< The permit of each limiter.

    /// One rank: a client of the limiter of one device.
    struct member {
        Limiter* limiter = nullptr;  ///< of the device; outlives the permit
        client_id client{};          ///< of that limiter
        device_id device{};          ///< no other member has it
    };

    /// Waits for a permit of every member, as is said above, at most until `deadline`; without all
    /// of them it holds none. The codes of Limiter::acquire, duplicate_device,
    /// invalid_specification (no member). A thread must not call it while it holds a permit of one
    /// of these limiters: it might wait for itself for ever.
    [[nodiscard]] static result<gang_permit> acquire(std::span<const member> members, instant deadline = never,
                                                     const std::stop_token& stop = {}, const submit_options& o = {}) {
        if (members.empty()) return failure{.code = errc::invalid_specification, .because = reason::no_members};
        std::vector<std::size_t> order(members.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::ranges::sort(order, [&](std::size_t a, std::size_t b) { return members[a].device < members[b].device; });
        for (std::size_t i = 1; i < order.size(); ++i)
            if (members[order[i - 1]].device == members[order[i]].device)
                return failure{.code = errc::duplicate_device,
                               .asked = members[order[i]].device.index,
                               .because = reason::device_twice};
        gang_permit g;
        g.parts_.reserve(members.size());
        int times_late = 0;
        for (std::size_t next = 0; next < order.size();) {
            const member& m = members[order[next]];
            const instant until = next == 0 ? deadline : std::min(deadline, patience_of(m, times_late));
            auto p = m.limiter->acquire(m.client, until, stop, o);
            if (p) {
                g.parts_.push_back({order[next++], m.device, *std::move(p)});
            } else {
                g.parts_.clear();  // they go back
                if (p.code() != errc::deadline_exceeded || until == deadline) return p.why();
                if (auto turn = m.limiter->acquire(m.client, deadline, stop, o); !turn) return turn.why();
                ++times_late;
                next = 0;
            }
        }
        return g;
    }
    /// The same for a list of members.
    [[nodiscard]] static result<gang_permit> acquire(std::initializer_list<member> members, instant deadline = never,
                                                     const std::stop_token& stop = {}, const submit_options& o = {}) {
        return acquire(std::span<const member>(members.begin(), members.size()), deadline, stop, o);
    }

    /// Calls `enqueue_part(rank, *streams[rank])` for each member, in the order of the devices,
    /// with no other gang between. Call once. Exceptions pass through. Later devices received no
    /// work then, so a part that was enqueued must not wait for theirs without a deadline.
    template <gang_order Order, std::invocable<std::size_t, stream&> F>
    void enqueue(Order& order, std::span<stream* const> streams, F enqueue_part) {
        std::vector<device_id> devices;
        devices.reserve(parts_.size());
        for (const auto& p : parts_) devices.push_back(p.device);
        auto parts = std::move(parts_);
        const auto guard = order.enter(devices);
        for (auto& p : parts) p.taken.enqueue(*streams[p.rank], [&](stream& s) { enqueue_part(p.rank, s); });
    }

    /// Calls `enqueue_all()` once, which enqueues on all the streams and enters the node's gang
    /// order itself, as submitted collectives do. Each member is charged what its stream takes.
    /// Returns what `enqueue_all` returns. Call once. Exceptions pass through, after the work
    /// enqueued until then is accounted for.
    template <std::invocable<> F>
    std::invoke_result_t<F&> enqueue(std::span<stream* const> streams, F enqueue_all) {
        auto parts = std::move(parts_);
        return nest(std::span(parts), streams, enqueue_all);
    }

    /// How many members' permits haven't been used yet.
    [[nodiscard]] std::size_t size() const noexcept { return parts_.size(); }

private:
    struct part;

    // Until when the permits already held wait for the permit of `m`.
    [[nodiscard]] static instant patience_of(const member& m, int times_late) {
        const ns bound = m.limiter->bound_of(m.client);
        ns patience = saturating_add(saturating_add(bound, bound), gang_patience);
        while (times_late-- > 0) patience = saturating_add(patience, patience);
        return saturating_add(m.limiter->now(), patience);
    }

    // The points of one part around those of the next.
    template <class F>
    static std::invoke_result_t<F&> nest(std::span<part> parts, std::span<stream* const> streams, F& enqueue_all) {
        if (parts.empty()) return enqueue_all();
        auto& outer = parts.front();
        const auto inner = [&] { return nest(parts.subspan(1), streams, enqueue_all); };
        if constexpr (std::is_void_v<std::invoke_result_t<F&>>) {
            outer.taken.enqueue(*streams[outer.rank], [&](stream&) { inner(); });
        } else {
            std::optional<std::invoke_result_t<F&>> came;
            outer.taken.enqueue(*streams[outer.rank], [&](stream&) { came.emplace(inner()); });
            return *std::move(came);
        }
    }

    struct part {
        std::size_t rank;
        device_id device;
        permit taken;
    };

    gang_permit() = default;
    std::vector<part> parts_;
};

/// Enqueues long work over several devices in pieces, for example a collective as one call per range of its elements.
/// Calls `enqueue_piece(i)` for i from 0, each in a gang of its own. Higher levels get in between two pieces. All ranks
/// yield or none, since a piece is admitted on all devices before it is enqueued on any. `deadline` is that of all
/// pieces. Returns the first error of acquiring a gang or of a piece, and then no later piece is enqueued.
template <class Limiter, class F>
requires std::is_invocable_r_v<errc, F&, std::size_t> errc
enqueue_in_pieces(std::span<const typename gang_permit<Limiter>::member> members,
                  std::span<typename Limiter::stream* const> streams, std::size_t pieces, F enqueue_piece,
                  instant deadline = never, const std::stop_token& stop = {}, const submit_options& o = {}) {
    for (std::size_t i = 0; i < pieces; ++i) {
        auto gang = gang_permit<Limiter>::acquire(members, deadline, stop, o);
        if (!gang) return gang.code();
        if (const errc why = gang->enqueue(streams, [&] { return enqueue_piece(i); }); why != errc::none) return why;
    }
    return errc::none;
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
