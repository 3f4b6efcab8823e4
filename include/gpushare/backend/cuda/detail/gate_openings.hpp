// SPDX-License-Identifier: Apache-2.0
// When a launch gate must open its waits: a thread waits for work that is behind a closed wait, so
// the request that keeps the wait closed might never end. A part of gated_launches.hpp.
//
//   gate_openings openings(clients);
//   if (openings.may_wait(call) && openings.first_stopped(call)) {
//       openings.begin();                            // opens the waits, until end()
//       ...                                          // the thread waits inside the driver
//       openings.end();
//   }
//
// Not thread-safe: every function is called under the gate's mutex.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <thread>
#include <type_traits>
#include <vector>

#include <gpushare/backend/cuda/detail/gate_clients.hpp>
#include <gpushare/backend/cuda/detail/launch_batches.hpp>
#include <gpushare/backend/cuda/detail/launch_call.hpp>
#include <gpushare/backend/cuda/detail/sync_call.hpp>
#include <gpushare/backend/cuda/detail/thread_polls.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

template <launch_core Core, gpushare::clock Clock>
class gate_openings {
public:
    using client = gate_client<Core>;

    explicit gate_openings(gate_clients<Core, Clock>& clients) noexcept : clients_(clients) {}
    gate_openings(const gate_openings&) = delete;
    gate_openings& operator=(const gate_openings&) = delete;
    ~gate_openings() {
        if (told_closing_) thread_polls::closing_gates().fetch_sub(1, std::memory_order_relaxed);
    }

    /// Opens the waits. Each call needs one call of end().
    void begin() noexcept {
        clients_.core().keep_open();
        clients_.waits().keep_open();
        clients_.threads().wake();
    }
    void end() noexcept {
        clients_.core().let_close();
        clients_.waits().let_close();
        clients_.threads().wake();
    }
    /// A request of the client launches: its waits close again if they were forced open.
    void close_for(const client& c) noexcept {
        if (!clients_.in_streams() || c.requests == 0) return;
        end_polls(clients_.now());
        clients_.waits().keep(c.level);
    }
    /// Opens the waits of a client whose launch has been held for the longest time.
    void open_overdue(const client& c, instant now) noexcept {
        if (!clients_.is_gated(c) || !clients_.is_stopped(c)) return;
        const auto overdue = core().overdue(c.number, now);
        if (!overdue) return;
        clients_.waits().force_above(c.level);
        note_forced({c.number, overdue->held_by, overdue->held, now});
    }
    /// Publishes whether the gate may have closed waits. Threads read this without a lock to decide
    /// whether polls matter.
    void tell_closing() noexcept {
        const bool may_close = clients_.in_streams() && !clients_.closed() && clients_.waits().any_closed();
        if (may_close == told_closing_) return;
        told_closing_ = may_close;
        thread_polls::closing_gates().fetch_add(may_close ? 1 : -1, std::memory_order_relaxed);
    }

    // ---- launches that went because they had been held for too long

    void note_forced(const forced_launch& f) noexcept {
        forced_launches_[first_forced_] = f;
        first_forced_ = (first_forced_ + 1) % forced_launches_.size();
        forced_ = std::min(forced_ + 1, forced_launches_.size());
    }
    [[nodiscard]] std::optional<forced_launch> take_forced() noexcept {
        if (forced_ == 0) return std::nullopt;
        return forced_launches_[(first_forced_ + forced_launches_.size() - forced_--) % forced_launches_.size()];
    }

    // ---- polling threads: one doesn't say when it stops, so the waits stay open for it until it
    // ---- gets its answer, launches, or doesn't poll for a while

    /// Whether the waits are open for the calling thread, which has polled again.
    [[nodiscard]] bool polls_on(const void* what, instant now) noexcept {
        const auto there = find_poll(what);
        if (there == polls_.end()) return false;
        there->last = now;
        return true;
    }
    /// Opens the waits for the calling thread. Returns false if there is no memory for a record.
    [[nodiscard]] bool begin_poll(const void* what, instant now) noexcept {
        if (!has_pushed(polls_, {std::this_thread::get_id(), what, now})) return false;
        begin();
        return true;
    }
    void end_poll(const void* what) noexcept {
        const auto there = find_poll(what);
        if (there == polls_.end()) return;
        polls_.erase(there);
        end();
    }
    /// Ends the polls of threads that have stopped polling.
    void end_polls(instant now) noexcept {
        constexpr ns longest{10'000'000};
        while (!polls_.empty()) {
            const auto gone = std::ranges::find_if(polls_, [&](const auto& p) { return now - p.last >= longest; });
            if (gone == polls_.end()) return;
            polls_.erase(gone);
            end();
        }
    }

    // ---- host functions that threads are about to enqueue, by their streams. The legacy stream
    // ---- waits for others, so its functions count for all streams.

    /// Returns false if there is no memory for a record.
    [[nodiscard]] bool note_function(CUstream s) noexcept { return has_pushed(functions_, s); }
    void forget_function(CUstream s) noexcept {
        const auto there = std::ranges::find(functions_, s);
        if (there != functions_.end()) functions_.erase(there);
        clients_.threads().wake();
    }
    [[nodiscard]] bool has_function(CUstream s) const noexcept {
        return std::ranges::any_of(functions_, [s](CUstream f) { return f == s || f == CU_STREAM_LEGACY; });
    }

    // ---- what waits for what

    /// The client of the lowest level that has enqueued work behind a wait ahead of a launch of
    /// client `own`; null if there is no such work.
    [[nodiscard]] const client* in_front(std::uint32_t own, const launch_call& call) const noexcept {
        const client* lowest = nullptr;
        for (const client& c : clients_.all()) {
            if (!c.used || !clients_.is_gated(c) || (lowest != nullptr && lowest->level <= c.level)) continue;
            const auto stops = [&](const auto& in) {
                const bool counts = c.number == own || in->of(call) || (call.of_legacy() && in->legacy_waits());
                return counts && !in->passed_waits();
            };
            if (std::ranges::any_of(c.streams, stops)) lowest = &c;
        }
        return lowest;
    }
    /// Whether the call may have to wait for work of a client whose streams have waits.
    [[nodiscard]] bool may_wait(const sync_call& call) const noexcept {
        if (call.reach == wait_reach::all) return true;
        const auto of = [&](const client& c) { return runs_for(c, call.reach); };
        if (std::ranges::none_of(clients_.all(), of)) return false;
        return call.reach == wait_reach::legacy || clients_.site().is_pending(call);
    }
    /// A client whose work in flight is behind closed waits, and may be what the call waits for;
    /// null if there is no such client.
    [[nodiscard]] const client* first_stopped(const sync_call& call) const noexcept {
        for (const client& c : clients_.all())
            if (runs_for(c, call.reach) && clients_.is_stopped(c)) return &c;
        return nullptr;
    }
    /// Whether the client `own` (null: none) waits for work that is certainly behind work of lower
    /// clients. An event may be in any of the client's streams.
    [[nodiscard]] bool needs_all(const client* own, const sync_call& call) const noexcept {
        if (call.reach >= wait_reach::legacy) return true;
        if (own == nullptr) return false;
        const auto is_shared = [&](const launch_batches& in) {
            if (call.stream != nullptr) return in.stream() == call.stream && !in.is_elsewhere();
            return std::ranges::any_of(own->streams, [&](const auto& mine) { return mine->shares(in); });
        };
        return std::ranges::any_of(clients_.all(), [&](const client& c) {
            return c.used && c.level < own->level &&
                   std::ranges::any_of(c.streams, [&](const auto& in) { return in->in_flight() && is_shared(*in); });
        });
    }
    /// Whether the waits open for a copy of a client that has none. Its stream may be a lower
    /// client's, which has waits, and the work in front of the copy would then wait for the
    /// client's own request.
    [[nodiscard]] bool opens_for_copy(const client& own, const launch_call& call) const noexcept {
        const sync_call waits{.reach = wait_reach::stream, .stream = call.stream};
        return needs_all(&own, waits) && clients_.site().is_pageable(call);
    }
    /// Since when, and for whom, work is held back that a thread has awaited since `since`; none if
    /// the waits stay closed. For a request whose work is behind lower clients' (`needs_all`), the
    /// waits open immediately. For others they open after the longest hold.
    [[nodiscard]] auto opens_at(std::optional<std::uint32_t> own, bool needs_all, instant now,
                                instant since) const noexcept {
        const auto held = core().awaited(own, needs_all, now, since);
        return held && held->held == ns{0} ? held : opens_anyway(now, since);
    }
    /// The same for any thread: after the longest hold.
    [[nodiscard]] auto opens_anyway(instant now, instant since) const noexcept {
        return core().awaited(std::nullopt, false, now, since);
    }

private:
    // A polling thread for which the waits are open.
    struct poll_under_way {
        std::thread::id thread{};
        const void* what = nullptr;
        instant last{};  // when it polled last
    };

    [[nodiscard]] const Core& core() const noexcept { return clients_.core(); }
    [[nodiscard]] bool runs_for(const client& c, wait_reach reach) const noexcept {
        if (!c.used || !clients_.is_gated(c)) return false;
        return std::ranges::any_of(c.streams, [&](const auto& in) {
            return in->in_flight() && (reach != wait_reach::legacy || in->legacy_waits());
        });
    }
    [[nodiscard]] auto find_poll(const void* what) noexcept {
        return std::ranges::find_if(polls_, [&, me = std::this_thread::get_id()](const poll_under_way& p) {
            return p.what == what && p.thread == me;
        });
    }
    template <class T>
    [[nodiscard]] static bool has_pushed(std::vector<T>& list, const std::type_identity_t<T>& element) noexcept {
        try {
            list.push_back(element);
            return true;
        } catch (const std::bad_alloc&) {
            return false;
        }
    }

    gate_clients<Core, Clock>& clients_;
    std::vector<poll_under_way> polls_{};
    std::vector<CUstream> functions_{};  // under way
    bool told_closing_ = false;
    std::array<forced_launch, 64> forced_launches_{};  // a ring of the latest
    std::size_t first_forced_ = 0, forced_ = 0;
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
