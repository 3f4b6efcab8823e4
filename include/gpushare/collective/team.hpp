// SPDX-License-Identifier: Apache-2.0
// One lane's part in one collective: takes the next epoch, tells the other ranks, waits for them, and gets out safely when
// one of them fails. The same code in a rank's own thread, in a block of the host backend and on a device.
//
//   team t(ctx, view, rank, lane, collective_kind::barrier, deadline);
//   if (!t.enter() || !t.meet(signature, in, out)) return t.fault();     // all are here
//   ... read theirs, write theirs ...
//   return t.part();                                                            // all are done with mine
//
// Memory orders. Whatever a rank wrote before `meet` is visible to the others behind it: its release of `ready` pairs with
// their acquire. The same for `done`. On a device the release comes from one thread after ctx.sync(), which orders it
// behind the writes of the whole block, and an acquire by one thread holds for all behind the next sync.
//
// What crosses the bus to the host (see report_line) keeps off the way from entering to telling: a read takes a microsecond
// there and back, and a release waits for what was written over it before. So a rank says where it is once it has told the
// others, and looks for the host's request while it waits, now and then in long work, and when it leaves.
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/atomic_ref.hpp>
#include <gpushare/collective/channel.hpp>
#include <gpushare/collective/epoch.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

struct smaller_word {
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const noexcept { return a < b ? a : b; }
};

/// Closes all gates and says why; the first one's reason stands. Out of line, also on a device (by value: what is referred to
/// would lie in local memory): there are twenty places from which a kernel gives up, and these loops were a third of it.
GPUSHARE_EXEC_CHECK_DISABLE
[[gnu::noinline]] GPUSHARE_HD inline void close_gates(channel_view view, std::uint64_t why) noexcept {
    if (atomic_ref{view.own(0, 0).claims}.fetch_add_acq_rel(1) != 0) return;
    // First, for whoever finds a gate closed may end its kernel, and the host looks here then. The gates release it.
    for (std::uint32_t r = 0; view.reports != nullptr && r < view.ranks; ++r)
        atomic_ref{view.reports[r].verdict}.store_release(why);
    for (std::uint32_t r = 0; r < view.ranks; ++r)
        for (std::uint32_t l = 0; l < view.lanes; ++l) {
            // Released by the gate, and by itself for who loses the race above.
            atomic_ref{view.own(r, l).verdict}.store_release(why);
            (void)atomic_ref{view.own(r, l).gate}.fetch_add_acq_rel(gate_closed);
        }
}

}  // namespace detail

template <class Context>
class team {
public:
    /// `deadline` in nanoseconds of the context's clock; the largest number is none.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD team(Context& ctx, const channel_view& view, std::uint32_t rank, std::uint32_t lane,
                     collective_kind what, std::int64_t deadline) noexcept
        : ctx_(ctx), view_(view), rank_(rank), lane_(lane), what_(what), deadline_(deadline) {}
    team(const team&) = delete;
    team& operator=(const team&) = delete;

    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD Context& context() const noexcept { return ctx_; }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::uint32_t rank() const noexcept { return rank_; }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::uint32_t ranks() const noexcept { return view_.ranks; }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::uint32_t lane() const noexcept { return lane_; }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::uint32_t epoch() const noexcept { return epoch_; }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD const collective_fault& fault() const noexcept { return fault_; }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD const channel_view& view() const noexcept { return view_; }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::byte* slot_of(std::uint32_t rank) const noexcept {
        return view_.slot_of(rank, lane_, epoch_);
    }
    /// What `from` told this rank: valid after `meet`.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD const detail::flag_line& told_by(std::uint32_t from) const noexcept {
        return view_.flag(rank_, from, lane_, epoch_);
    }

    /// Aborts if the host had asked for it when it launched this: a packed fault, or 0. Before `enter`.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void heed(std::uint64_t asked) const noexcept {
        if (asked == 0 || ctx_.thread_rank() != 0) return;
        close(view_, collective_fault::unpacked(asked));
        // Whoever was first is at it, and runs: until it has been here this lane would find its gate open.
        for (std::uint32_t turn = 0; !closed(); ++turn) ctx_.backoff(turn);
    }

    /// False if the group is aborted, or this rank's previous collective isn't done: nothing happened then.
    ///
    /// The gate is one word that both sides change by read-modify-write. So either an aborter comes first and the gate is
    /// closed here, or it finds this rank inside and whoever returns an error waits for it to leave (see `fail`): nobody
    /// touches a buffer of a rank that has returned.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD bool enter() noexcept {
        std::uint64_t came = 0;  // the epoch, and above it whether this rank is in; the other threads add nothing
        if (ctx_.thread_rank() == 0) {
            if (atomic_ref{own().gate}.fetch_add_acq_rel(1) == 0) {
                // relaxed: this lane's own count, which others only look at.
                const atomic_ref count{own().epoch};
                const std::uint32_t next = count.load_relaxed() + 1;
                count.store_relaxed(next);
                came = std::uint64_t{1} << 32 | next;
                atomic_ref{own().progress}.store_relaxed(progress_word(collective_stage::waiting));
            } else {
                (void)atomic_ref{own().gate}.fetch_add_acq_rel(~0U);
            }
        }
        came = ctx_.reduce_add(came);
        epoch_ = static_cast<std::uint32_t>(came);
        if (came != 0) return true;
        fault_ = {errc::in_flight, what_, rank_, 0};
        if (closed()) fault_ = verdict();
        return false;
    }

    /// As many as `others` points to, if to any.
    static constexpr std::uint32_t shared_pointers = sizeof(detail::flag_line::other) / sizeof(void*);

    /// Tells all ranks where this one's buffers are, and waits until all have done so. False: fault() says why, and this
    /// rank has left.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD bool meet(std::uint32_t signature, const void* in = nullptr, void* out = nullptr,
                          void* const* others = nullptr) noexcept {
        ctx_.sync();
        for (std::uint32_t to = ctx_.thread_rank(); to < ranks(); to += ctx_.num_threads()) {
            detail::flag_line& mine = view_.flag(to, rank_, lane_, epoch_);
            mine.signature = signature;
            mine.in = in;
            mine.out = out;
            for (std::uint32_t i = 0; others != nullptr && i < shared_pointers; ++i) mine.other[i] = others[i];
            atomic_ref{mine.ready}.store_release(epoch_);
        }
        report_waiting();
        std::uint32_t bad = none;
        for (std::uint32_t from = ctx_.thread_rank(); from < ranks() && bad == none; from += ctx_.num_threads()) {
            if (!await(view_.flag(rank_, from, lane_, epoch_).ready))
                bad = from;
            else if (told_by(from).signature != signature)
                bad = from | differs;
        }
        bad = ctx_.reduce(bad, detail::smaller_word{});
        if (bad != none) {
            fail((bad & differs) != 0 ? errc::mismatch : errc::deadline_exceeded, bad & ~differs);
            return false;
        }
        stage(collective_stage::working);
        return true;
    }

    /// Says that this rank has left the others' buffers, waits until they have left its own, and leaves.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD collective_fault part() noexcept {
        ctx_.sync();
        for (std::uint32_t to = ctx_.thread_rank(); to < ranks(); to += ctx_.num_threads())
            atomic_ref{view_.flag(to, rank_, lane_, epoch_).done}.store_release(epoch_);
        stage(collective_stage::leaving);
        std::uint32_t bad = none;
        for (std::uint32_t from = ctx_.thread_rank(); from < ranks() && bad == none; from += ctx_.num_threads())
            if (!await(view_.flag(rank_, from, lane_, epoch_).done)) bad = from;
        bad = ctx_.reduce(bad, detail::smaller_word{});
        if (bad != none) {
            fail(errc::deadline_exceeded, bad);
            return fault_;
        }
        return leave();
    }

    /// Leaves without waiting: for collectives in which nobody touches another rank's buffers, only its slot.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD collective_fault leave() noexcept {
        ctx_.sync();
        if (ctx_.thread_rank() == 0) {
            // acq_rel: what this rank did inside is over for whoever finds the gate empty.
            (void)atomic_ref{own().gate}.fetch_add_acq_rel(~0U);
            stage(collective_stage::outside);
        }
        // Beside it, by the thread that has nothing else to do.
        if (lane_ == 0 && ctx_.thread_rank() + 1 == ctx_.num_threads()) heed_request();
        return fault_;
    }

    /// Says to the host that this rank has told the others and waits for them. `meet` does it.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void report_waiting() noexcept {
        if (!reports() || ctx_.thread_rank() != 0) return;
        atomic_ref{view_.reports[rank_].epoch}.store_relaxed(epoch_);
        atomic_ref{view_.reports[rank_].progress}.store_relaxed(progress_word(collective_stage::waiting));
    }

    /// To be asked now and then in long work: false if the group has been aborted.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool goes_on() const noexcept {
        heed_request();
        return !closed();
    }

    /// Gives up: closes all gates, if nobody has yet, leaves, and waits until no rank touches another one's buffers.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void fail(errc code, std::uint32_t who) noexcept {
        if (ctx_.thread_rank() == 0) {
            close(view_, {code, what_, who, epoch_});
            stage(collective_stage::outside);
            (void)atomic_ref{own().gate}.fetch_add_acq_rel(~0U);
            await_empty();
        }
        ctx_.sync();
        fault_ = verdict();
    }

    /// Whether all threads of the lane say so. A barrier.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool agreed(bool yes) noexcept {
        return ctx_.reduce(yes ? 1U : 0U, detail::smaller_word{}) != 0;
    }

    /// Waits until `seen()`; false at the deadline, or when the group is aborted.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Seen>
    [[nodiscard]] GPUSHARE_HD bool wait_until(const Seen& seen) noexcept {
        for (std::uint32_t turn = 0; !seen(); ++turn) {
            if (closed()) return false;
            if (turn % 256 == 255) {
                heed_request();
                if (ctx_.now() >= deadline_) return false;
            }
            ctx_.backoff(turn);
        }
        return true;
    }

    /// Closes all gates and says why; the first one's reason stands. From any thread.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD static void close(const channel_view& view, const collective_fault& why) noexcept {
        detail::close_gates(view, why.packed());
    }

private:
    static constexpr std::uint32_t none = ~0U, differs = 1U << 31;

    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD detail::own_line& own() const noexcept { return view_.own(rank_, lane_); }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool closed() const noexcept {
        return atomic_ref{own().gate}.load_acquire() >= detail::gate_closed;
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::uint32_t progress_word(collective_stage s) const noexcept {
        return static_cast<std::uint32_t>(what_) << 8 | static_cast<std::uint32_t>(s);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void stage(collective_stage s) noexcept {
        if (ctx_.thread_rank() != 0) return;
        const std::uint32_t word = progress_word(s);
        atomic_ref{own().progress}.store_relaxed(word);  // relaxed: a snapshot for people
        if (reports()) atomic_ref{view_.reports[rank_].progress}.store_relaxed(word);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool reports() const noexcept { return view_.reports != nullptr && lane_ == 0; }
    /// Aborts if the host asks for it, which can't reach the gates itself. Reads the host's memory.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void heed_request() const noexcept {
        if (view_.reports == nullptr) return;
        const std::uint64_t asked = atomic_ref{view_.reports[0].request}.load_acquire();
        if (asked != 0) close(view_, collective_fault::unpacked(asked));
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool await(std::uint32_t& flag) noexcept {
        return wait_until([&] { return epoch_reached(atomic_ref{flag}.load_acquire(), epoch_); });
    }
    /// The reason comes from whoever aborts, a few stores after its claim.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD collective_fault verdict() noexcept {
        std::uint64_t word = 0;
        for (std::uint32_t turn = 0; word == 0; ++turn) {
            word = atomic_ref{own().verdict}.load_acquire();
            if (word == 0) ctx_.backoff(turn);
        }
        return collective_fault::unpacked(word);
    }
    /// Ranks inside see the closed gate at their next step, which is microseconds away; a rank whose thread doesn't run is
    /// waited for.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void await_empty() noexcept {
        for (std::uint32_t r = 0; r < ranks(); ++r)
            for (std::uint32_t turn = 0;; ++turn) {
                const std::uint32_t gate = atomic_ref{view_.own(r, lane_).gate}.load_acquire();
                if (gate == detail::gate_closed) break;  // closed, and nobody inside
                ctx_.backoff(turn);
            }
    }

    Context& ctx_;
    const channel_view& view_;
    const std::uint32_t rank_, lane_;
    const collective_kind what_;
    const std::int64_t deadline_;
    std::uint32_t epoch_ = 0;
    collective_fault fault_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
