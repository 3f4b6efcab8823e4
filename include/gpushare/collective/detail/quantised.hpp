// SPDX-License-Identifier: Apache-2.0
// A quantised all-reduce as a body that rank threads, blocks of the host backend and blocks of a
// device run: two shots through the slots, chunk by chunk, with fp8 blocks in them.
//
//   quantised_body<float, sum, 128>{in, out, n, {}}(session, blocks)
//
// A rank codes its elements of a chunk into its slot. Each rank decodes its part of all ranks'
// slots, combines the numbers in float in the order of ranks, and leaves the coded result in its
// slot. Each rank then decodes the results of all ranks. No rank touches another rank's buffers.
//
// At step s a rank codes chunk s, combines its part of chunk s - lag and takes the results of chunk
// s - 2 lag. So a rank only waits for work that was begun a step earlier. A slot holds 2 lag + 1
// chunks. No rank has to wait until other ranks have read its data, because the waits for new data
// imply as much:
//   - a rank that has taken chunk c knows that all ranks have combined chunk c, and so have read
//     its codes. Before it codes chunk s it has taken chunk s - 1 - 2 lag, which lay where chunk s
//     goes;
//   - a rank with the codes of chunk c from all ranks knows that each had taken chunk c - 1 - 2 lag
//     before, whose results lay where those of chunk c go.
// All of a rank's threads have read a chunk before the barrier that precedes the rank's next
// release.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include <gpushare/collective/detail/block_team.hpp>
#include <gpushare/collective/detail/fp8_blocks.hpp>
#include <gpushare/collective/detail/reduction.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/numbers.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The layout of chunks in a slot. A chunk has the same number of blocks for every rank. The codes
/// of the rank's elements come first, then the codes of the rank's results, then the scales of
/// both.
struct chunk_layout {
    std::size_t of_rank = 0;  // blocks of a chunk for each rank; 0 if a slot is too small
    std::size_t stage = 0;    // bytes of a slot that a chunk takes
    std::uint32_t lag = 0;

    [[nodiscard]] GPUSHARE_HD static constexpr chunk_layout of(std::size_t slot, std::uint32_t ranks,
                                                               std::size_t block) noexcept {
        chunk_layout l;
        for (std::uint32_t lag = 2; lag-- > 0 && l.of_rank == 0;)
            l = {slot / (2 * lag + 1) / 16 * 16 / ((ranks + 1) * (block + 1)), slot / (2 * lag + 1) / 16 * 16, lag};
        return l;
    }
    /// The smallest slot with room for a chunk of such a group.
    [[nodiscard]] static constexpr std::size_t least_slot(std::uint32_t ranks, std::size_t block) noexcept {
        return ((ranks + 1) * (block + 1) + 15) / 16 * 16;
    }
};

/// A rank's own elements, followed by zeros.
template <class T>
struct brought_elements {
    const T* in;
    std::size_t count;

    [[nodiscard]] GPUSHARE_HD coded_floats operator()(std::size_t i) const noexcept {
        if (i >= count) return coded_floats(0.0F);
        const std::size_t left = count - i;
        return load_floats<coded_floats>(
            in + i, left < coded_floats::lanes ? static_cast<std::uint32_t>(left) : coded_floats::lanes);
    }
    [[nodiscard]] GPUSHARE_HD float one(std::size_t i) const noexcept {
        return i < count ? static_cast<float>(in[i]) : 0.0F;
    }
};

/// Converts to the type of the result. float16 holds sums of less than 65536, and a code may round
/// such a sum up to 65536, which float16 doesn't hold. The conversion then takes the largest
/// float16, which is within the error bound.
template <class T>
struct result_lanes {
    template <class R>
    GPUSHARE_FLAT GPUSHARE_HD R operator()(const R& x) const noexcept {
        if constexpr (std::same_as<T, float16>) {
            const auto bits = bits_of(x);
            return select((bits & 0x7fff'ffff) == __builtin_bit_cast(std::int32_t, 65536.0F),
                          from_bits((bits & ~0x7fff'ffff) | __builtin_bit_cast(std::int32_t, 65504.0F)), x);
        } else {
            return x;
        }
    }
};

template <class T, std::uint32_t Block, class Context, class Op>
class quantised_walk {
public:
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD quantised_walk(session<Context>& t, const T* in, T* out, std::size_t n, const Op& op) noexcept
        : session_(t),
          team_(block_team::of<Block / coded_floats::lanes>(t.context())),
          layout_(chunk_layout::of(t.view().slot, t.ranks(), Block)),
          in_(in),
          out_(out),
          n_(n),
          op_(op),
          base_(t.view().state(t.rank(), t.block()).coded) {
        const std::size_t chunk = layout_.of_rank * t.ranks() * Block;
        chunks_ = (n + chunk - 1) / chunk;
    }

    /// Codes the first chunk before the ranks meet, so that the chunk is ready when they have met.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void begin() noexcept {
        if (chunks_ != 0) code(0);
    }
    /// Returns false after a fault; why() and who() describe the fault.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD bool run() noexcept {
        const std::size_t lag = layout_.lag;
        std::size_t unseen = 0;  // bytes since the last look
        for (std::size_t s = 0; s < chunks_ + 2 * lag; ++s) {
            if (s != 0 && s < chunks_) code(s);
            if (s >= lag && s - lag < chunks_ && !combine(s - lag)) return false;
            if (s >= 2 * lag && !take(s - 2 * lag)) return false;
            unseen += layout_.of_rank * session_.ranks() * Block * sizeof(T);
            if (unseen < look_every || s + 1 == chunks_ + 2 * lag) continue;
            unseen = 0;
            if (!session_.all_agree(session_.still_open())) return gave_up(errc::aborted, session_.rank());
        }
        // The thread may store the count, since all threads have read it before the ranks met.
        if (session_.context().thread_rank() == 0)
            session_.view().state(session_.rank(), session_.block()).coded =
                base_ + static_cast<std::uint32_t>(chunks_);
        return true;
    }
    [[nodiscard]] GPUSHARE_HD errc why() const noexcept { return why_; }
    [[nodiscard]] GPUSHARE_HD std::uint32_t who() const noexcept { return who_; }

private:
    static constexpr std::uint32_t none = ~0U;

    /// Combines the elements that the ranks have left in their slots, rank by rank from 0 on, in
    /// float.
    struct combined_elements {
        const quantised_walk& of;
        std::size_t c, skip;  // the chunk; its elements before this rank's part

        [[nodiscard]] GPUSHARE_HD coded_floats operator()(std::size_t i) const noexcept {
            const std::uint32_t ranks = of.session_.ranks();
            coded_floats x = decoded<Block>(of.brought_by(0, c), skip + i);
            for (std::uint32_t r = 1; r < ranks; ++r)
                x = coded_floats::combined(of.op_, x, decoded<Block>(of.brought_by(r, c), skip + i));
            if constexpr (requires { of.op_.finish(1.0F, 1.0F); }) x = x.finished(of.op_, static_cast<float>(ranks));
            return x;
        }
        [[nodiscard]] GPUSHARE_HD float one(std::size_t i) const noexcept {
            const std::uint32_t ranks = of.session_.ranks();
            float x = decoded_one<Block>(of.brought_by(0, c), skip + i);
            for (std::uint32_t r = 1; r < ranks; ++r) x = of.op_(x, decoded_one<Block>(of.brought_by(r, c), skip + i));
            if constexpr (requires { of.op_.finish(1.0F, 1.0F); }) x = of.op_.finish(x, static_cast<float>(ranks));
            return x;
        }
    };

    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::size_t blocks_of_chunk() const noexcept {
        return layout_.of_rank * session_.ranks();
    }
    /// The elements of chunk c.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD element_range range(std::size_t c) const noexcept {
        const std::size_t chunk = blocks_of_chunk() * Block, begin = c * chunk;
        return {begin, n_ - begin < chunk ? n_ : begin + chunk};
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD std::size_t blocks_in(std::size_t c) const noexcept {
        return (range(c).size() + Block - 1) / Block;
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD fp8_blocks blocks_from(std::uint32_t rank, std::size_t c,
                                                     std::size_t first) const noexcept {
        std::byte* const stage = session_.slot_of(rank) + c % (2 * layout_.lag + 1) * layout_.stage;
        std::byte* const scales = stage + (blocks_of_chunk() + layout_.of_rank) * Block;
        return {reinterpret_cast<fp8_e4m3*>(stage) + first * Block, reinterpret_cast<std::uint8_t*>(scales) + first};
    }
    /// The place where a rank leaves its elements of a chunk, and its part of the result.
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD fp8_blocks brought_by(std::uint32_t rank, std::size_t c) const noexcept {
        return blocks_from(rank, c, 0);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD fp8_blocks result_of(std::uint32_t rank, std::size_t c) const noexcept {
        return blocks_from(rank, c, blocks_of_chunk());
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    [[nodiscard]] GPUSHARE_HD peer_signal& signal(std::uint32_t to, std::uint32_t from) const noexcept {
        return session_.view().signal(to, from, session_.block(), 0);
    }

    /// Tells all ranks how far this rank is, after all threads have finished their reads and
    /// writes.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void publish(std::uint32_t peer_signal::*count, std::size_t c) noexcept {
        Context& ctx = session_.context();
        ctx.sync();
        for (std::uint32_t to = ctx.thread_rank(); to < session_.ranks(); to += ctx.num_threads())
            session_.release(signal(to, session_.rank()).*count, base_ + static_cast<std::uint32_t>(c) + 1);
    }
    /// Waits until all ranks have come this far. All threads agree on the outcome.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD bool await(std::uint32_t peer_signal::*count, std::size_t c) noexcept {
        Context& ctx = session_.context();
        const std::uint32_t wanted = base_ + static_cast<std::uint32_t>(c) + 1;
        std::uint32_t late = none;
        for (std::uint32_t from = ctx.thread_rank(); from < session_.ranks() && late == none;
             from += ctx.num_threads()) {
            std::uint32_t& word = signal(session_.rank(), from).*count;
            if (!session_.wait_until([&] { return epoch_reached(session_.acquired(word), wanted); })) late = from;
        }
        late = ctx.reduce(late, smaller_word{});
        return late == none || gave_up(errc::deadline_exceeded, late);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD bool gave_up(errc why, std::uint32_t who) noexcept {
        why_ = why;
        who_ = who;
        return false;
    }

    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void code(std::size_t c) noexcept {
        const element_range mine = range(c);
        const fp8_blocks to = brought_by(session_.rank(), c);
        const brought_elements<T> from{in_ + mine.begin, mine.size()};
        team_.each(blocks_in(c), [&](std::size_t b) { encode_block<Block, Context>(team_, to, b, from); });
        publish(&peer_signal::coded_ready, c);
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD bool combine(std::size_t c) noexcept {
        if (!await(&peer_signal::coded_ready, c)) return false;
        const element_range own = shard_of(blocks_in(c), session_.rank(), session_.ranks());
        const fp8_blocks to = result_of(session_.rank(), c);
        const combined_elements from{*this, c, own.begin * Block};
        team_.each(own.size(), [&](std::size_t b) { encode_block<Block, Context>(team_, to, b, from); });
        publish(&peer_signal::sums_ready, c);
        return true;
    }
    /// Decodes the results of all ranks. Each rank begins with its own, so that ranks begin at
    /// different ranks.
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD bool take(std::size_t c) noexcept {
        if (!await(&peer_signal::sums_ready, c)) return false;
        const element_range all = range(c);
        for (std::uint32_t i = 0; i < session_.ranks(); ++i) {
            const std::uint32_t r = (session_.rank() + i) % session_.ranks();
            const element_range part = shard_of(blocks_in(c), r, session_.ranks());
            const fp8_blocks from = result_of(r, c);
            const std::size_t skip = part.begin * Block;
            team_.each(part.size(), [&](std::size_t b) {
                for (std::size_t k = team_.lane(); k < Block / coded_floats::lanes; k += team_.lanes()) {
                    const std::size_t at = b * Block + k * coded_floats::lanes;
                    store(all, skip + at, decoded<Block>(from, at));
                }
            });
        }
        return true;
    }
    GPUSHARE_EXEC_CHECK_DISABLE
    GPUSHARE_HD void store(element_range all, std::size_t at, const coded_floats& x) const noexcept {
        if (at >= all.size()) return;
        const std::size_t left = all.size() - at;
        store_floats(out_ + all.begin + at, coded_floats::map(result_lanes<T>{}, x),
                     left < coded_floats::lanes ? static_cast<std::uint32_t>(left) : coded_floats::lanes);
    }

    session<Context>& session_;
    const block_team team_;
    const chunk_layout layout_;
    const T* const in_;
    T* const out_;
    const std::size_t n_;
    const Op& op_;
    const std::uint32_t base_;
    std::size_t chunks_ = 0;
    errc why_ = errc::none;
    std::uint32_t who_ = none;
};

/// A rank's part in a quantised all-reduce, block by block.
template <class T, class Op, std::uint32_t Block>
struct quantised_body {
    const T* in;
    T* out;
    std::size_t count;
    Op op;

    static constexpr auto kind = collective_kind::all_reduce;
    static constexpr bool through_slots = true;

    /// Blocks of threads take whole blocks of numbers, so the bits don't depend on how many blocks
    /// of threads there are.
    GPUSHARE_EXEC_CHECK_DISABLE
    template <class Context>
    GPUSHARE_HD collective_fault operator()(session<Context>& t, std::uint32_t blocks) const {
        const element_range mine = shard_of(count, t.block(), blocks, Block);
        quantised_walk<T, Block, Context, Op> walk(t, in + mine.begin, out + mine.begin, mine.size(), op);
        walk.begin();
        if (!t.meet(call_signature(kind, Block << 8 | type_id<T>(), op_id<Op>(), count, blocks))) return t.fault();
        if (walk.run()) return t.leave();
        t.fail(walk.why(), walk.who());
        return t.fault();
    }
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
