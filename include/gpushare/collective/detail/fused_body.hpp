// SPDX-License-Identifier: Apache-2.0
// A fused all-reduce as a body that rank threads, blocks of the host backend and blocks of a device
// run. With two shots, each rank combines its shard of the rows, runs the stages on these rows, and
// stores the finished rows to all ranks, or keeps them. With one shot, for few bytes, each rank
// leaves its rows in its slots and then processes all rows for itself: one wait instead of two.
//
//   fused_body<float, sum, false, Stages...>{pipeline, out, plan}(session, blocks)
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <gpushare/collective/detail/epilogue_run.hpp>
#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/epilogue.hpp>
#include <gpushare/collective/epilogue_stages.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Reads and combines the elements of all ranks, rank by rank from 0 on.
template <class T, class Op>
struct combined_rows {
    const peer_signal* from_rank;
    const T* first;   // the address of rank 0's array
    const T* second;  // rank 1's array, kept here because groups of two ranks are the most frequent
    std::uint32_t ranks;
    std::size_t row;  // the row of the inputs that is row 0 of the result
    Op op;

    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V load(const place& at) const noexcept {
        const std::size_t i = (at.row + row) * at.width + at.column;
        V x = load_floats<V>(first + i, at.count);
        if (ranks > 1) x = V::combined(op, x, load_floats<V>(second + i, at.count));
        for (std::uint32_t r = 2; r < ranks; ++r)
            x = V::combined(op, x, load_floats<V>(static_cast<const T*>(from_rank[r].in) + i, at.count));
        if constexpr (requires { op.finish(float{}, float{}); }) x = x.finished(op, static_cast<float>(ranks));
        return x;
    }
};

/// combined_rows for a thread of a device. The thread keeps the addresses of up to eight ranks in
/// registers, and loads from all of them before it combines any elements, because each load from
/// another device takes a microsecond.
template <class T, class Op>
class held_rows {
public:
    GPUSHARE_HD held_rows(const peer_signal* from_rank, std::uint32_t ranks, std::size_t row, const Op& op) noexcept
        : from_rank_(from_rank), ranks_(ranks), row_(row), op_(op) {
        for (std::uint32_t r = 0; r < most; ++r) {
            of_[r] = r < ranks ? static_cast<const T*>(from_rank[r].in) : nullptr;
            places_ |= reinterpret_cast<std::uintptr_t>(of_[r]);
        }
    }
    template <class V>
    [[nodiscard]] GPUSHARE_FLAT GPUSHARE_HD V load(const place& at) const noexcept {
        const std::size_t i = (at.row + row_) * at.width + at.column;
        V x;
#ifdef __CUDA_ARCH__
        using four = four_elements<T>;
        if (at.count == V::lanes && ranks_ <= most && (places_ | i * sizeof(T)) % sizeof(four) == 0) [[likely]] {
            for (std::uint32_t first = 0; first < most; first += at_once) {
                if (first != 0 && first >= ranks_) break;
                four had[at_once];
                for (std::uint32_t r = 0; r < at_once; ++r)
                    if (first + r < ranks_) had[r] = *reinterpret_cast<const four*>(of_[first + r] + i);
                for (std::uint32_t r = 0; r < at_once; ++r) {
                    if (first + r == 0)
                        x = widened_four<V>(had[0]);
                    else if (first + r < ranks_)
                        x = V::combined(op_, x, widened_four<V>(had[r]));
                }
            }
        } else
#endif
        {
            x = load_floats<V>(of_[0] + i, at.count);
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
            for (std::uint32_t r = 1; r < ranks_; ++r)
                x = V::combined(op_, x, load_floats<V>(static_cast<const T*>(from_rank_[r].in) + i, at.count));
        }
        if constexpr (requires { op_.finish(float{}, float{}); }) x = x.finished(op_, static_cast<float>(ranks_));
        return x;
    }

private:
    static constexpr std::uint32_t most = 8, at_once = 4;

    const peer_signal* from_rank_;
    std::uint32_t ranks_;
    std::size_t row_;
    Op op_;
    const T* of_[most];
    std::uintptr_t places_ = 0;
};

/// The outputs at the addresses that ranks have signalled. Output `result` is the result, and the
/// other outputs are the stages' arrays.
struct peer_outputs {
    const peer_signal* from_rank;
    std::uint32_t of_ranks;
    std::uint32_t result;

    [[nodiscard]] GPUSHARE_HD std::uint32_t ranks() const noexcept { return of_ranks; }
    [[nodiscard]] GPUSHARE_HD void* of(std::uint32_t rank, std::uint32_t k) const noexcept {
        return k == result ? from_rank[rank].out : from_rank[rank].other[k];
    }
};

/// Tells calls with different pipelines apart, by 24 bits. Ranks write to each other's arrays as
/// their own stages say.
template <class Body>
inline constexpr std::uint32_t fused_id = hash_of_name<Body>() >> 8;

template <class T, class Op, bool Sharded, class... Stages>
struct fused_body {
    using steps = pipeline<T, Op, Stages...>;
    using out_type = typename steps::out_type;

    steps what;
    out_type* out;
    fused_plan plan;
    float* spare = nullptr;  // room for a row, if slots are too small for one
    static constexpr auto kind = collective_kind::all_reduce;

    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(session<Context>& t, std::uint32_t blocks) const {
        const std::uint32_t signature =
            call_signature(kind, fused_id<fused_body>, 0, what.count, blocks, static_cast<std::uint32_t>(what.width));
        constexpr std::uint32_t sharing = decltype(what.list)::sharing;
        static_assert(sharing <= session<Context>::shared_pointers,
                      "gpushare: too many stages that write to all ranks");
        void* others[session<Context>::shared_pointers] = {};
        what.list.collect(others);
        const std::size_t rows = what.count / what.width;
        const bool alone = works_alone(t.view().slot, rows, blocks);
        const element_range own = alone ? element_range{0, rows} : shard_of(rows, t.rank(), t.ranks());
        const element_range mine = shard_of(own.size(), t.block(), blocks);
        std::byte* const slot = t.slot_of(t.rank());
        const T* brought = what.in;
        if (alone) {
            T* const left = reinterpret_cast<T*>(slot);
            copy_elements(t.context(), left, brought + mine.begin * what.width, mine.size() * what.width);
            brought = left;
        }
        if (!t.meet(signature, brought, out, others)) return t.fault();
        // Between passes, a row is at the end of the rank's slot: the slot is local, and the row
        // stays in the first-level cache.
        float* const scratch = scratch_bytes() <= t.view().slot
                                   ? reinterpret_cast<float*>(slot + (t.view().slot - scratch_bytes()))
                                   : spare;
        const peer_signal* const from_rank = &t.signal_from(0);
        // Slots have only this block's rows, so the row in the slot is the row minus mine.begin.
        // The subtraction wraps around.
        const std::size_t first_row = alone ? 0 - mine.begin : Sharded ? own.begin : 0;
        const auto from = [&] {
            if constexpr (is_one_thread<Context>) {
                const T* const second = t.ranks() > 1 ? static_cast<const T*>(from_rank[1].in) : nullptr;
                return combined_rows<T, Op>{
                    from_rank, static_cast<const T*>(from_rank[0].in), second, t.ranks(), first_row, what.op};
            } else {
                return held_rows<T, Op>(from_rank, t.ranks(), first_row, what.op);
            }
        }();
        const matrix<out_type, false> result{out, 0};
        const auto all = joined(what.list, as_epilogue(storing<matrix<out_type, false>>{result}));
        // Works on some rows at a time, and checks between them whether the group was aborted.
        const std::size_t step = 1 + look_every / (what.width * sizeof(T));
        const std::size_t to_kept = Sharded ? 0 : own.begin;
        const peer_outputs to{alone ? from_rank + t.rank() : from_rank, alone ? 1 : t.ranks(), sharing};
        bool whole = true;
        for (std::size_t row = mine.begin; row < mine.end && whole; row += step) {
            const std::size_t n = mine.end - row < step ? mine.end - row : step;
            const row_range range{row + to_kept, n, what.width, to_kept, plan.streaming};
            if constexpr (Sharded)
                run_rows(t.context(), all, range, from, scratch, own_outputs{});
            else
                run_rows(t.context(), all, range, from, scratch, to);
            // A rank that is done needn't check. Either all threads continue or none does, because
            // rows have barriers.
            whole = mine.end - row <= step || t.all_agree(t.still_open());
        }
        return alone && whole ? t.leave() : t.finish_if(whole);
    }

private:
    [[nodiscard]] GPUSHARE_HD std::size_t scratch_bytes() const noexcept {
        return (what.width * sizeof(float) + interference_bytes - 1) / interference_bytes * interference_bytes;
    }
    /// Whether this call takes one shot. All blocks get the same answer. Otherwise one block could
    /// leave a row to another rank whose block doesn't process it.
    [[nodiscard]] GPUSHARE_HD bool works_alone(std::size_t slot, std::size_t rows,
                                               std::uint32_t blocks) const noexcept {
        if constexpr (Sharded || !epilogue<Stages...>::any_row) {
            return false;
        } else {
            const std::size_t scratch = epilogue<Stages...>::whole_rows ? scratch_bytes() : 0;
            const std::size_t most_rows = shard_of(rows, 0, blocks).size();
            return plan.one_shot && most_rows * what.width * sizeof(T) + scratch <= slot;
        }
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
