// SPDX-License-Identifier: Apache-2.0
// The ring all-reduce, in which each rank talks to its neighbours only. Partial results go from
// rank 0 up to the last rank, which passes the finished results on around the ring, chunk by chunk.
// The traffic of each link is the same as in the usual ring, whose parts start at different ranks.
// But here every element is combined in rank order, so the bits are the same as with the other
// algorithms. For the same reason, partial results travel in the type of the computation.
//
// At step s a rank combines chunk s, then takes the result of chunk s - lag. It waits only for the
// rank before it, for data of an earlier step or of the same step, so waits form no cycle.
//
// A rank reuses a place in its slot every `depth` chunks. It needn't wait until the next rank has
// taken the old data there, because lag < depth, and because the last rank makes a result only from
// data that each rank has taken from the rank before. So
//   - a rank with the result of a chunk knows that its own part of that chunk was taken. All ranks
//     but the last have the result of chunk c - depth before they combine chunk c;
//   - a rank with the result of chunk c, or the last rank when it is about to make that result,
//     knows that all others have combined chunk c, and so have taken the result of chunk c - depth.
// Data counts as taken when all threads of the next rank have read it. The threads read the data
// before a barrier, and the next rank releases its own work on the data after that barrier.
#pragma once

#include <cstddef>
#include <cstdint>

#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

inline constexpr std::size_t ring_depth = 4, ring_lag = 3;  // chunks in a slot; chunks under way
static_assert(ring_lag < ring_depth);
inline constexpr std::size_t smallest_ring_slot = 1024;

template <class T, class Context, class Op>
class ring_walk {
    using A = accumulator_t<T, Op>;

public:
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD ring_walk(session<Context>& t, const T* in, T* out, std::size_t n, const Op& op) noexcept
        : session_(t), in_(in), out_(out), n_(n), op_(op) {
        chunk_ = t.view().slot / (2 * ring_depth) / sizeof(A);
        chunks_ = (n + chunk_ - 1) / chunk_;
        next_ = t.rank() + 1 == t.ranks() ? 0 : t.rank() + 1;
        before_ = t.rank() == 0 ? t.ranks() - 1 : t.rank() - 1;
        base_ = t.view().state(t.rank(), t.block()).chunks;
    }

    /// Returns false if a neighbour didn't come; `late` is that neighbour.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD bool run(std::uint32_t& late) noexcept {
        late_ = none;
        for (std::size_t s = 0; s < chunks_ + ring_lag && late_ == none; ++s) {
            if (s < chunks_) combine(s);
            if (s >= ring_lag && late_ == none && !last()) take(s - ring_lag);
        }
        session_.context().sync();  // all threads have read the count
        if (late_ == none && session_.context().thread_rank() == 0)
            session_.view().state(session_.rank(), session_.block()).chunks =
                base_ + static_cast<std::uint32_t>(chunks_);
        late = late_;
        return late_ == none;
    }

private:
    static constexpr std::uint32_t none = ~0U;

    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD bool last() const noexcept { return session_.rank() + 1 == session_.ranks(); }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD element_range range(std::size_t c) const noexcept {
        const std::size_t begin = c * chunk_;
        return {begin, n_ - begin < chunk_ ? n_ : begin + chunk_};
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD A* partial(std::uint32_t rank, std::size_t c) const noexcept {
        return reinterpret_cast<A*>(session_.slot_of(rank)) + c % ring_depth * chunk_;
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD T* result(std::uint32_t rank, std::size_t c) const noexcept {
        return reinterpret_cast<T*>(session_.slot_of(rank) + session_.view().slot / 2) + c % ring_depth * chunk_;
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::uint32_t count_of(std::size_t c) const noexcept {
        return base_ + static_cast<std::uint32_t>(c) + 1;
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD peer_signal& signal(std::uint32_t to, std::uint32_t from) const noexcept {
        return session_.view().signal(to, from, session_.block(), 0);
    }
    /// Waits until the previous rank has counted this far. All threads agree on the outcome.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD bool await(std::uint32_t& count, std::uint32_t wanted) noexcept {
        bool came = true;
        if (session_.context().thread_rank() == 0)
            came = session_.wait_until([&] { return epoch_reached(session_.acquired(count), wanted); });
        if (session_.all_agree(came)) return true;
        late_ = before_;
        return false;
    }
    /// Call after all threads have finished their reads and writes.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void publish(std::uint32_t& count, std::uint32_t value) noexcept {
        session_.context().sync();
        if (session_.context().thread_rank() == 0) session_.release(count, value);
    }

    /// Adds this rank's elements to the partial result of the previous ranks.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void combine(std::size_t c) noexcept {
        const element_range mine = range(c);
        Context& ctx = session_.context();
        if (session_.rank() != 0 && !await(signal(session_.rank(), before_).partial_ready, count_of(c))) return;
        const A* const had = session_.rank() != 0 ? partial(before_, c) : nullptr;
        const bool alone = session_.ranks() == 1;
        A* const to = last() ? nullptr : partial(session_.rank(), c);
        T* const done = last() && !alone ? result(session_.rank(), c) : nullptr;
        for (std::size_t i = ctx.thread_rank(); i < mine.size(); i += ctx.num_threads()) {
            A x = widened<A>(in_[mine.begin + i]);
            if (had != nullptr) x = op_(had[i], x);
            if (to != nullptr) {
                to[i] = x;
                continue;
            }
            if constexpr (requires { op_.finish(x, x); }) x = op_.finish(x, static_cast<A>(session_.ranks()));
            const T y = narrowed<T>(x);
            out_[mine.begin + i] = y;
            if (done != nullptr) done[i] = y;
        }
        if (alone) return;
        publish(last() ? signal(next_, session_.rank()).result_ready : signal(next_, session_.rank()).partial_ready,
                count_of(c));
    }

    /// Takes a result from the previous rank. Hands the result on, unless the next rank made the
    /// result.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void take(std::size_t c) noexcept {
        const element_range mine = range(c);
        Context& ctx = session_.context();
        if (!await(signal(session_.rank(), before_).result_ready, count_of(c))) return;
        const bool hand_on = next_ + 1 != session_.ranks();
        const T* const from = result(before_, c);
        copy_elements(ctx, out_ + mine.begin, from, mine.size());
        if (hand_on) {
            // Each thread reads its own writes, rather than the other rank's memory again.
            const T* const taken = out_ + mine.begin;
            copy_elements(ctx, result(session_.rank(), c), taken, mine.size());
            publish(signal(next_, session_.rank()).result_ready, count_of(c));
        }
    }

    session<Context>& session_;
    const T* in_;
    T* out_;
    std::size_t n_;
    const Op& op_;
    std::size_t chunk_ = 0, chunks_ = 0;
    std::uint32_t next_ = 0, before_ = 0, base_ = 0, late_ = none;
};

GPUSHARE_EXEC_CHECK_DISABLE
template <class T, class Context, class Op>
GPUSHARE_HD collective_fault by_ring(session<Context>& t, std::uint32_t signature, const T* in, T* out, std::size_t n,
                                     const Op& op) noexcept {
    if (!t.meet(signature)) return t.fault();
    ring_walk<T, Context, Op> walk(t, in, out, n, op);
    std::uint32_t late = 0;
    if (walk.run(late)) return t.leave();
    t.fail(errc::deadline_exceeded, late);
    return t.fault();
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
