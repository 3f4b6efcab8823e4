// SPDX-License-Identifier: Apache-2.0
// A session is one block's part in one collective. It takes the next epoch, tells the other ranks,
// waits for them, and gets out safely if a rank fails. The same code runs in a rank's thread, in a
// block of the host backend and on a device.
//
//   session s(ctx, view, rank, block, collective_kind::barrier, deadline);
//   if (!s.enter() || !s.meet(signature, in, out)) return s.fault();     // all are here
//   ... read theirs, write theirs ...
//   return s.finish();  // all are done with mine
//
// Memory orders. A rank's writes before `meet` are visible to the other ranks after `meet`: the
// rank's release of `ready` pairs with the other ranks' acquire. The same holds for `done`. On a
// device one thread does the release after ctx.sync(), which orders the release after the writes of
// the whole block. One thread's acquire holds for all threads after the next sync.
//
// Accesses to host memory over the bus (see host_report) are few, and off the critical path from
// entering to leaving. Reads of one word are served one after the other, half a microsecond each,
// and a release waits for earlier writes over the bus. So a rank reports its progress only once it
// has waited or worked for long, and by one write after the release with which it leaves. One
// thread looks for the host's request while all threads wait for the other ranks; a thread that
// waits or works for long also looks now and then.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <thread>
#include <type_traits>

#include <gpushare/collective/detail/workspace.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/atomic_ref.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The context of a kernel body that a rank's own thread calls: one block of one thread. Its way of
/// waiting suits as many threads as there are ranks. Functions that could run on a device are
/// marked GPUSHARE_HD, since nvcc compiles them in its device pass, too.
class thread_context {
public:
    /// A waiting thread looks `busy_turns` times before it begins to yield its core at each turn.
    /// `busy_turns` is 0 if ranks outnumber cores.
    constexpr explicit thread_context(std::uint32_t busy_turns = 0) noexcept : busy_turns_(busy_turns) {}

    [[nodiscard]] GPUSHARE_HD static constexpr std::uint32_t block_rank() noexcept { return 0; }
    [[nodiscard]] GPUSHARE_HD static constexpr std::uint32_t num_blocks() noexcept { return 1; }
    [[nodiscard]] GPUSHARE_HD static constexpr std::uint32_t thread_rank() noexcept { return 0; }
    [[nodiscard]] GPUSHARE_HD static constexpr std::uint32_t num_threads() noexcept { return 1; }
    GPUSHARE_HD static constexpr void sync() noexcept {}
    template <class T, class Op>
    [[nodiscard]] GPUSHARE_HD static constexpr T reduce(T x, Op) noexcept {
        return x;
    }
    template <class T>
    [[nodiscard]] GPUSHARE_HD static constexpr T reduce_add(T x) noexcept {
        return x;
    }
    void backoff(std::uint32_t turn) const noexcept {
        if (turn >= busy_turns_) {
            std::this_thread::yield();
        } else {
            // Constant polling delays the flag, because the thread that writes the flag has to take
            // its cache line away from the readers.
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    }
    /// Nanoseconds of the steady clock.
    [[nodiscard]] static std::int64_t now() noexcept {
        return std::chrono::duration_cast<ns>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

private:
    std::uint32_t busy_turns_;
};
static_assert(kernel_context<thread_context>);

/// Whether a context is known to be one thread, as the host's contexts are.
template <class Context>
inline constexpr bool is_one_thread = requires {
    typename std::bool_constant<Context::num_threads() == 1>;
};

struct smaller_word {
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const noexcept { return a < b ? a : b; }
};

/// How long a thread that gives up waits, beyond its deadline, for the other ranks to leave its
/// buffers. Running ranks leave within microseconds.
inline constexpr std::int64_t leaving_grace = 200'000'000;  // ns
inline constexpr std::int64_t no_deadline = std::numeric_limits<std::int64_t>::max();

template <class Context>
class session {
public:
    /// `deadline` is in nanoseconds of the context's clock; no_deadline means none.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD session(Context& ctx, const workspace_view& view, std::uint32_t rank, std::uint32_t block,
                        collective_kind what, std::int64_t deadline) noexcept
        : ctx_(ctx), view_(view), rank_(rank), block_(block), what_(what), deadline_(deadline) {}
    session(const session&) = delete;
    session& operator=(const session&) = delete;

    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD Context& context() const noexcept { return ctx_; }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::uint32_t rank() const noexcept { return rank_; }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::uint32_t ranks() const noexcept { return view_.ranks; }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::uint32_t block() const noexcept { return block_; }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD const collective_fault& fault() const noexcept { return fault_; }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD const workspace_view& view() const noexcept { return view_; }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::byte* slot_of(std::uint32_t rank) const noexcept {
        return view_.slot_of(rank, block_, epoch_);
    }
    /// The signal of `from` to this rank, valid after `meet`. The signals of all ranks are
    /// contiguous.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD const peer_signal& signal_from(std::uint32_t from) const noexcept {
        return signal_of(from);
    }

    /// Closes the group if the host requested that before this launch. `asked` is a packed fault,
    /// or 0. Call this before `enter`.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void abort_if(std::uint64_t asked) const noexcept {
        if (asked != 0 && ctx_.thread_rank() == 0) close_for_host();
    }

    /// Returns false if the group is closed, or if this rank's previous collective isn't done. In
    /// both cases nothing has happened.
    ///
    /// This block says that it is inside, and then checks whether it is closed. A thread that gives
    /// up closes the block, and then checks whether the block is inside. At least one of the two
    /// sees the other's store (see atomic_ref::store_crossing): either this block turns back, or
    /// the thread that gives up waits for the block to leave. So no rank touches a buffer of a rank
    /// that has returned.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool enter() noexcept {
        constexpr std::uint64_t is_in = std::uint64_t{1} << 32, is_closed = std::uint64_t{2} << 32;
        // the epoch, with the outcome in the bits above; the other threads add nothing
        std::uint64_t came = 0;
        std::uint32_t last = 0;
        // loaded here, alongside `inside`, because each load takes most of a microsecond
        if constexpr (!is_one_thread<Context>)
            if (ctx_.thread_rank() == 0) last = own().epoch;
        if (ctx_.thread_rank() == 0 && say_inside()) {
            if (atomic_ref{own().closed}.load_crossing() != 0) {
                // This block did nothing inside. On the host the store is still a release: by
                // C++20, it hides the earlier collective's store from a thread that finds the block
                // outside. On devices, the other ranks have waited for the earlier collective.
                if constexpr (is_one_thread<Context>)
                    atomic_ref{own().inside}.store_release(0);
                else
                    atomic_ref{own().inside}.store_relaxed(0);
                settle();
                came = is_closed;
            } else {
                if constexpr (is_one_thread<Context>) last = kept(own().epoch);
                const std::uint32_t next = last + 1;
                keep(own().epoch, next);
                came = is_in | next;
                // a device's block reports its stage in wait_until
                if constexpr (is_one_thread<Context>) keep(own().progress, progress_word(collective_stage::waiting));
            }
        }
        came = ctx_.reduce_add(came);
        epoch_ = static_cast<std::uint32_t>(came);
        if ((came & is_in) != 0) return true;
        fault_ = came == is_closed ? verdict() : collective_fault{errc::in_flight, what_, rank_, 0};
        return false;
    }

    /// The number of pointers in `others`, unless `others` is null.
    static constexpr std::uint32_t shared_pointers = sizeof(peer_signal::other) / sizeof(void*);

    /// Tells all ranks where this rank's buffers are, and waits until all ranks have done the same.
    /// If the call returns false, fault() says why, and this rank has left.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool meet(std::uint32_t signature, const void* in = nullptr, void* out = nullptr,
                                        void* const* others = nullptr) noexcept {
        return meet_telling(signature, [=](peer_signal& mine, std::uint32_t) {
            mine.in = in;
            mine.out = out;
            for (std::uint32_t i = 0; others != nullptr && i < shared_pointers; ++i) mine.other[i] = others[i];
        });
    }

    /// The same, with a different message to each rank: `tell(signal, to)` fills in the message to
    /// rank `to`.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Tell>
    [[nodiscard]] GPUSHARE_HD bool meet_telling(std::uint32_t signature, const Tell& tell) noexcept {
        ctx_.sync();
        for (std::uint32_t to = ctx_.thread_rank(); to < ranks(); to += ctx_.num_threads()) {
            peer_signal& mine = view_.signal(to, rank_, block_, epoch_);
            tell(mine, to);
            release(mine.ready, std::uint64_t{signature} << 32 | epoch_);
        }
        stage_ = collective_stage::waiting;
        // One thread looks for the host's request on behalf of all threads, since a short wait
        // doesn't look. In most cases this thread has nothing else to do.
        if (rank_ == 0 && block_ == 0 && ctx_.thread_rank() + 1 == ctx_.num_threads()) take_request();
        std::uint32_t bad = none;
        for (std::uint32_t from = ctx_.thread_rank(); from < ranks() && bad == none; from += ctx_.num_threads()) {
            std::uint64_t word = 0;
            const bool came = wait_until([&] {
                word = acquired(signal_of(from).ready);
                return epoch_reached(static_cast<std::uint32_t>(word), epoch_);
            });
            if (!came)
                bad = from;
            else if (static_cast<std::uint32_t>(word >> 32) != signature)
                bad = from | differs;
        }
        bad = ctx_.reduce(bad, smaller_word{});
        if (bad != none) {
            fail((bad & differs) != 0 ? errc::mismatch : errc::deadline_exceeded, bad & ~differs);
            return false;
        }
        stage(collective_stage::working);
        return true;
    }

    /// One thread tells all ranks a word along with `finish`. Afterwards, signal_from() has the
    /// words of all ranks.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void remark(std::uint32_t word) const noexcept {
        for (std::uint32_t to = 0; to < ranks(); ++to) view_.signal(to, rank_, block_, epoch_).remark = word;
    }

    /// Says that this rank has left the other ranks' buffers, waits until they have left its own,
    /// and leaves.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD collective_fault finish() noexcept {
        ctx_.sync();
        for (std::uint32_t to = ctx_.thread_rank(); to < ranks(); to += ctx_.num_threads())
            release(view_.signal(to, rank_, block_, epoch_).done, epoch_);
        stage(collective_stage::leaving);
        std::uint32_t bad = none;
        for (std::uint32_t from = ctx_.thread_rank(); from < ranks() && bad == none; from += ctx_.num_threads())
            if (!wait_until([&] { return epoch_reached(acquired(signal_of(from).done), epoch_); })) bad = from;
        bad = ctx_.reduce(bad, smaller_word{});
        if (bad != none) {
            fail(errc::deadline_exceeded, bad);
            return fault_;
        }
        return leave();
    }

    /// Ends work that called still_open() now and then. Finishes if all threads of the block did
    /// the whole work; otherwise gives up, since the group has been closed.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD collective_fault finish_if(bool whole) noexcept {
        if (all_agree(whole)) return finish();
        fail(errc::aborted, rank_);
        return fault_;
    }

    /// Leaves without waiting, for collectives in which ranks read other ranks' slots but touch no
    /// other rank's buffers. No barrier is needed: before `finish` calls leave(), all threads of
    /// the block are done with other ranks' buffers, and slots stay as they are once a rank has
    /// given up.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD collective_fault leave() noexcept {
        if (ctx_.thread_rank() == 0) {
            // release: once a thread finds this rank outside, the rank's work inside is over.
            release(own().inside, 0);
            stage(collective_stage::outside);
            report();
        }
        return fault_;
    }

    /// Call this now and then in long work. Returns false if the group has been closed. Each thread
    /// finds out by itself, so use all_agree() if barriers follow.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool still_open() const noexcept {
        if (block_ == 0 && ctx_.thread_rank() == 0) {
            report();
            take_request();
        }
        return !closed();
    }

    /// Gives up: proposes this fault unless the group is closed already, closes the group, leaves,
    /// and waits until no rank touches another rank's buffers. The wait ends at the deadline or
    /// after leaving_grace, whichever is later.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void fail(errc code, std::uint32_t who) noexcept {
        if (ctx_.thread_rank() == 0) {
            propose(collective_fault{code, what_, who, epoch_}.packed());
            stage(collective_stage::outside);
            report();
            atomic_ref{own().inside}.store_release(0);
            settle();
        }
        ctx_.sync();
        fault_ = verdict();
    }

    /// Whether `yes` is true in all threads of the block. Acts as a barrier.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool all_agree(bool yes) noexcept {
        return ctx_.reduce(yes ? 1U : 0U, smaller_word{}) != 0;
    }

    /// Releases a word that another rank reads. Ranks that share a device use accesses of the
    /// device's scope, because a release for the system takes half a microsecond longer.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Word>
    GPUSHARE_HD void release(Word& word, std::type_identity_t<Word> value) const noexcept {
        if (view_.one_device)
            device_atomic_ref<Word>{word}.store_release(value);
        else
            atomic_ref{word}.store_release(value);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Word>
    [[nodiscard]] GPUSHARE_HD Word acquired(Word& word) const noexcept {
        return view_.one_device ? device_atomic_ref<Word>{word}.load_acquire() : atomic_ref{word}.load_acquire();
    }

    /// Waits until `seen()` is true. Returns false at the deadline, or when the group is closed.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Seen>
    [[nodiscard]] GPUSHARE_HD bool wait_until(const Seen& seen) noexcept {
        for (std::uint32_t turn = 0; !seen(); ++turn) {
            // Doesn't look at each turn: on a device, each look at the flag would then wait for
            // another look.
            if (turn % 8 == 7 && closed()) return false;
            if (turn == 63) report();
            if (turn % 256 == 255) {
                // The other blocks look, too, in case the first block has left, but they look
                // seldom, because there may be hundreds of them.
                if (block_ == 0 || turn % 65'536 == 65'535) take_request();
                if (ctx_.now() >= deadline_) return false;
            }
            ctx_.backoff(turn);
        }
        return true;
    }

private:
    static constexpr std::uint32_t none = ~0U, differs = 1U << 31;

    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD block_state& own() const noexcept { return view_.state(rank_, block_); }
    /// relaxed: settle() learns from other words why the group is closed.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool closed() const noexcept { return atomic_ref{own().closed}.load_relaxed() != 0; }

    /// Loads a word that only this block writes, and that orders nothing; keep() stores the word.
    /// relaxed: the host's threads may read their ranks' words at any time. On a device only this
    /// block uses the word (see host_report): one thread writes the word, and barriers separate the
    /// accesses.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Word>
    [[nodiscard]] GPUSHARE_HD static Word kept(Word& word) noexcept {
        if constexpr (is_one_thread<Context>)
            return atomic_ref{word}.load_relaxed();
        else
            return word;
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Word>
    GPUSHARE_HD static void keep(Word& word, std::type_identity_t<Word> value) noexcept {
        if constexpr (is_one_thread<Context>)
            atomic_ref{word}.store_relaxed(value);
        else
            word = value;
    }

    /// Returns false if a collective is inside. Two of the host's threads may try at once, and an
    /// atomic exchange decides between them. On a device, launches of one channel follow each other
    /// (see submit.hpp), so the word has one writer.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool say_inside() const noexcept {
        if constexpr (is_one_thread<Context>) {
            return atomic_ref{own().inside}.exchange_crossing(1) == 0;
        } else {
            if (kept(own().inside) != 0) return false;
            atomic_ref{own().inside}.store_crossing(1);
            return true;
        }
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::uint32_t progress_word(collective_stage s) const noexcept {
        return static_cast<std::uint32_t>(what_) << 8 | static_cast<std::uint32_t>(s);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void stage(collective_stage s) noexcept {
        stage_ = s;
        if constexpr (is_one_thread<Context>) keep(own().progress, progress_word(s));
    }
    /// The first block tells the host where the rank is. relaxed: the report is a snapshot for
    /// people. Several threads may report between two barriers of the block, with the same value.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void report() const noexcept {
        if (view_.reports == nullptr || block_ != 0) return;
        atomic_ref{view_.reports[rank_].place}.store_relaxed(std::uint64_t{epoch_} << 32 | progress_word(stage_));
    }
    /// Call this from inside. Proposes the fault, unless this block is closed already, and closes
    /// the group. relaxed: leaving is a release, and the thread that chooses has seen this block
    /// leave.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void propose(std::uint64_t fault) const noexcept {
        if (!closed()) atomic_ref{own().proposal}.store_relaxed(fault);
        close_group(view_);
    }
    /// Closes the group on the host's request, because the host can't reach the workspaces itself.
    /// The call reads the host's memory. relaxed: the request is this one word.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void take_request() const noexcept {
        if (view_.reports == nullptr) return;
        const std::uint64_t asked = atomic_ref{view_.reports[0].request}.load_relaxed();
        if (asked != 0 && !closed()) close_for_host();
    }
    /// Closes the group without a proposal, since all ranks read the host's request where the host
    /// wrote it. So a block outside the collective may call this as well.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void close_for_host() const noexcept {
        if (view_.reports != nullptr) atomic_ref{view_.reports[rank_].heeded}.store_relaxed(1);
        close_group(view_);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD peer_signal& signal_of(std::uint32_t from) const noexcept {
        return view_.signal(rank_, from, block_, epoch_);
    }

    /// One thread calls this outside, after the group's end. Waits for the other ranks, and records
    /// the fault that all ranks take, for this block and for the host. Inline, because on devices a
    /// call took up to 16 registers more.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void settle() const noexcept {
        if (kept(own().verdict) != 0) return;
        close_group(view_);  // closes everything, even if the thread that began doesn't finish
        const std::int64_t least = ctx_.now() + leaving_grace;
        const bool in_use = !await_empty(deadline_ < least ? least : deadline_);
        // The rank that closed the group stored its proposal before. So the ranks' proposals are
        // here by now; the host's request may come later.
        std::uint64_t chosen = chosen_proposal(view_);
        for (std::uint32_t turn = 0; chosen == 0 && ctx_.now() < least; ++turn) {
            ctx_.backoff(turn);
            chosen = chosen_proposal(view_);
        }
        collective_fault why = collective_fault::unpacked(chosen);
        if (!why) why = {errc::aborted, what_, rank_, 0};
        why.buffers_in_use = in_use;
        // This word is stored first, because the host looks at it once the kernel has ended.
        // relaxed: the word stands alone.
        if (view_.reports != nullptr) atomic_ref{view_.reports[rank_].verdict}.store_relaxed(why.packed());
        keep(own().verdict, why.packed());
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD collective_fault verdict() const noexcept {
        return collective_fault::unpacked(kept(own().verdict));
    }

    /// Call this after close_group. Blocks that are inside see the closing at their next step,
    /// within microseconds. Returns false if a block is still inside at `until`.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool await_empty(std::int64_t until) const noexcept {
        for (std::uint32_t r = 0; r < ranks(); ++r)
            for (std::uint32_t b = 0; b < view_.blocks; ++b)
                for (std::uint32_t turn = 0; atomic_ref{view_.state(r, b).inside}.load_crossing() != 0; ++turn) {
                    if (turn % 16 == 15 && ctx_.now() >= until) return false;
                    ctx_.backoff(turn);
                }
        return true;
    }

    Context& ctx_;
    const workspace_view& view_;
    const std::uint32_t rank_, block_;
    const collective_kind what_;
    const std::int64_t deadline_;
    std::uint32_t epoch_ = 0;
    collective_stage stage_ = collective_stage::outside;
    collective_fault fault_;
};

/// Runs a collective's body in the calling thread, as the rank `me`.
template <class Member, class Body>
[[nodiscard]] collective_fault run_in_thread(const Member& me, const Body& body, instant deadline) {
    thread_context ctx{me.view().busy_turns};
    session<thread_context> s(ctx, me.view(), me.rank(), 0, Body::kind, deadline.time_since_epoch().count());
    if (!s.enter()) return s.fault();
    return body(s, 1);
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
