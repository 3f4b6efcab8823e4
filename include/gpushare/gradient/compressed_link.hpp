// SPDX-License-Identifier: Apache-2.0
// Transports between processes that send fewer bytes: fp8 blocks, or only the largest elements of
// each process. Use them as the link between the processes of a two-level group, of threads or of
// devices (two_level.hpp). Inside each process, the group combines uncompressed elements.
//
//   gpushare::fp8_link coded(net);                            // a scale for each 128 elements
//   gpushare::two_level_devices levels(node.gangs(), devices, std::span(streams),
//                                      members, coded, pinned);
//
//   gpushare::top_k_link sparse(net, elements, 0.01);         // elements of a step; 1 % are sent
//   gpushare::two_level_devices fewer(node.gangs(), devices, std::span(streams),
//                                     members, sparse, pinned);
//
// The links compress all-reduces of floats by a sum or an average, and pass all other calls on. All
// processes get the same bits, and two-level groups of devices get the same bits as two-level
// groups of threads over the same link. When the processes make the link, they compare how they
// compress. At each call they compare whether they add or average. If there is a difference, all
// processes get errc::mismatch. Two-level groups and the sets of horovod.hpp also compare lengths.
// Direct callers of a link must pass equal lengths on all processes.
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/quantised_all_reduce.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/two_level_parts.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/wire.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// Whether a link compresses an all-reduce of T by Op: T is float, and Op is a sum, or an average
/// with or without its last step.
template <class T, class Op>
inline constexpr bool adds_floats = std::same_as<T, float> && (std::same_as<Op, sum> || std::same_as<Op, average> ||
                                                               std::same_as<Op, without_finish<average>>);

/// The base of all links. Link::add_up(data, averages, deadline) adds or averages processes' data.
template <host_transport Net, class Link>
class link_over {
public:
    static constexpr bool rank_ordered = false;   ///< bits of compressed sums depend on chunks
    static constexpr bool in_host_memory = true;  ///< see transport

    link_over(const link_over&) = delete;
    link_over& operator=(const link_over&) = delete;

    [[nodiscard]] std::uint32_t rank() const noexcept { return net_.rank(); }  ///< see transport
    [[nodiscard]] std::uint32_t size() const noexcept { return net_.size(); }  ///< see transport
    /// The compressed bytes.
    [[nodiscard]] bytes carried() const noexcept { return net_.carried(); }

    /// See transport. A single process compresses nothing. An exception, such as std::bad_alloc,
    /// ends the calls of all processes.
    template <reducible T, class Op>
    requires std::is_empty_v<Op>
    [[nodiscard]] collective_fault all_reduce(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                              const Op& op, instant deadline) {
        if constexpr (adds_floats<T, Op>) {
            if (in.size() != out.size()) return {errc::mismatch, collective_kind::all_reduce, rank(), 0};
            if (size() == 1 || out.empty()) return net_.all_reduce(in, out, op, deadline);
            if (stuck_) return stuck_;
            if (in.data() != out.data()) std::copy(in.begin(), in.end(), out.begin());
            auto& link = static_cast<Link&>(*this);
            try {
                auto f = link.add_up(out, std::same_as<Op, average>, deadline);
                if (f) f.what = collective_kind::all_reduce;
                if (f.buffers_in_use) stuck_ = f;
                link.note(f);
                return f;
            } catch (...) {  // std::bad_alloc, for example: the other processes wait for this one
                stuck_ = {code_thrown(), collective_kind::all_reduce, rank(), 0};
                net_.abort(rank(), stuck_.code);
                stuck_.buffers_in_use = gives_up(net_);
                link.note(stuck_);
                throw;
            }
        } else {
            return net_.all_reduce(in, out, op, deadline);
        }
    }
    /// See transport.
    template <reducible T, class Op>
    [[nodiscard]] collective_fault reduce_scatter(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                                  const Op& op, instant deadline) {
        return net_.reduce_scatter(in, out, op, deadline);
    }
    /// See transport.
    template <class T>
    [[nodiscard]] collective_fault all_gather(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                              instant deadline) {
        return net_.all_gather(in, out, deadline);
    }
    /// See transport.
    template <class T>
    [[nodiscard]] collective_fault broadcast(std::span<T> data, std::uint32_t root, instant deadline) {
        return net_.broadcast(data, root, deadline);
    }
    /// See transport.
    [[nodiscard]] collective_fault barrier(instant deadline) { return net_.barrier(deadline); }
    /// See transport.
    void abort(std::uint32_t rank, errc why) { net_.abort(rank, why); }
    /// No fault until one is known.
    [[nodiscard]] collective_fault fault() const noexcept { return fault_so_far(net_); }
    /// See leaving_transport.
    void leave(std::uint32_t rank, errc why) requires leaving_transport<Net> { net_.leave(rank, why); }

protected:
    /// The processes compare `word`, which says how they compress.
    link_over(Net& net, std::uint64_t word, instant deadline) : net_(net) {
        const auto gather = [&](auto mine, auto all) { return net.all_gather(mine, all, deadline); };
        const auto all = exchange_words(net, {word}, net.size(), gather, deadline);
        if (const auto odd = odd_one(all)) raise_fault({errc::mismatch, collective_kind::all_reduce, *odd, 0});
    }
    ~link_over() = default;
    /// Calls `f` with the data that a process sends first. An average passes the data as another
    /// type, so that transports notice if another process adds.
    template <class Adding, class Averaging, class F>
    [[nodiscard]] static collective_fault as_called(bool averages, std::span<Adding> data, const F& f) {
        static_assert(sizeof(Adding) == sizeof(Averaging) && type_id<Adding>() != type_id<Averaging>());
        if (!averages) return f(data);
        return f(std::span(reinterpret_cast<Averaging*>(data.data()), data.size()));
    }

    Net& net_;

private:
    // a fault with buffers_in_use, or of an exception: no later call may touch the buffers
    collective_fault stuck_{};
};

/// Memory that is never freed if a transport may still touch it.
class lasting_bytes {
public:
    lasting_bytes() = default;
    lasting_bytes(const lasting_bytes&) = delete;
    lasting_bytes& operator=(const lasting_bytes&) = delete;
    ~lasting_bytes() {
        if (in_use_) (void)memory_.release();
    }
    /// Returns `n` bytes of any content. The earlier content is gone.
    [[nodiscard]] std::span<std::byte> of(std::size_t n) {
        if (n > size_) {
            memory_ = std::make_unique_for_overwrite<std::byte[]>(n);
            size_ = n;
        }
        return {memory_.get(), n};
    }
    void note(const collective_fault& f) noexcept { in_use_ = in_use_ || f.buffers_in_use; }

private:
    std::unique_ptr<std::byte[]> memory_;
    std::size_t size_ = 0;
    bool in_use_ = false;
};

}  // namespace detail

/// Sends fp8 blocks, with a scale for each `Block` floats, in two shots like quantised_all_reduce.
/// The processes' sums have the same bits and the same error bound (quantised_error_bound) as
/// there. Blocks begin at the first element of each call, or with two levels of each chunk. A
/// call's elements travel as quantised_bytes, and up to 15 bytes more for each process. `net` must
/// outlive the link.
template <host_transport Net, std::uint32_t Block = 128>
requires quantised_block<Block> && unequal_transport<Net>
class fp8_link : public detail::link_over<Net, fp8_link<Net, Block>> {
    using base = detail::link_over<Net, fp8_link<Net, Block>>;
    friend base;

public:
    /// Collective over `net`. Throws operation_error: errc::mismatch, naming the process that
    /// compresses in another way, or a fault of `net`.
    explicit fp8_link(Net& net, instant deadline = never) : base(net, detail::mixed_word({0xf8, Block}), deadline) {}

private:
    using base::net_;

    void note(const collective_fault& f) noexcept {
        for (auto* memory : {&brought_, &taken_, &own_}) memory->note(f);
    }
    /// Cuts the elements, in blocks, into parts. Each rank combines one part.
    struct parts {
        std::size_t blocks, elements;
        std::uint32_t ranks;
        [[nodiscard]] element_range of(std::uint32_t r) const noexcept { return shard_of(blocks, r, ranks); }
        /// The bytes of a part: codes, then scales. The next part begins at a multiple of 16.
        [[nodiscard]] std::size_t size(std::uint32_t r) const noexcept {
            return (of(r).size() * (Block + 1) + 15) / 16 * 16;
        }
        [[nodiscard]] detail::fp8_blocks at(std::byte* begin, std::uint32_t r) const noexcept {
            return {reinterpret_cast<fp8_e4m3*>(begin), reinterpret_cast<std::uint8_t*>(begin) + of(r).size() * Block};
        }
    };
    /// The sum or average of one part of all ranks' elements, added in the order of ranks.
    struct added {
        const parts& all;
        std::byte* from;
        std::uint32_t part;
        bool averages;
        [[nodiscard]] detail::fp8_blocks of(std::uint32_t r) const noexcept {
            return all.at(from + r * all.size(part), part);
        }
        [[nodiscard]] detail::coded_floats operator()(std::size_t i) const noexcept {
            auto x = detail::decoded<Block>(of(0), i);
            for (std::uint32_t r = 1; r < all.ranks; ++r)
                x = detail::coded_floats::combined(sum{}, x, detail::decoded<Block>(of(r), i));
            return averages ? x.finished(average{}, static_cast<float>(all.ranks)) : x;
        }
        [[nodiscard]] float one(std::size_t i) const noexcept {
            float x = detail::decoded_one<Block>(of(0), i);
            for (std::uint32_t r = 1; r < all.ranks; ++r) x = x + detail::decoded_one<Block>(of(r), i);
            return averages ? average{}.finish(x, static_cast<float>(all.ranks)) : x;
        }
    };

    [[nodiscard]] collective_fault add_up(std::span<float> data, bool averages, instant deadline) {
        const auto me = net_.rank();
        const parts all{(data.size() + Block - 1) / Block, data.size(), net_.size()};
        std::vector<std::uint64_t> sends(all.ranks);
        for (std::uint32_t r = 0; r < all.ranks; ++r) sends[r] = all.size(r);
        const std::vector<std::uint64_t> receives(all.ranks, sends[me]);
        std::size_t whole = 0;
        for (const std::uint64_t n : sends) whole += n;
        const auto brought = brought_.of(whole), taken = taken_.of(sends[me] * all.ranks), own = own_.of(sends[me]);
        encode(data, all, brought);
        auto f = base::template as_called<std::byte, std::int8_t>(averages, brought, [&]<class T>(std::span<T> in) {
            return net_.all_to_allv(std::span<const T>(in), std::span<const std::uint64_t>(sends),
                                    std::span(reinterpret_cast<T*>(taken.data()), taken.size()),
                                    std::span<const std::uint64_t>(receives), deadline);
        });
        if (!f) {
            std::fill(own.begin(), own.end(), std::byte{});  // not memset: `own` may be null
            each_block(all.of(me).size(), all.at(own.data(), me), added{all, taken.data(), me, averages});
            f = net_.all_gatherv(std::span<const std::byte>(own), brought, std::span<const std::uint64_t>(sends),
                                 deadline);
        }
        if (!f) decode(all, brought, data);
        return f;
    }
    template <class Source>
    static void each_block(std::size_t blocks, const detail::fp8_blocks& to, const Source& from) {
        using context = detail::thread_context;
        const auto team = detail::block_team::of<Block / detail::coded_floats::lanes>(context());
        for (std::size_t b = 0; b < blocks; ++b) detail::encode_block<Block, context>(team, to, b, from);
    }
    static void encode(std::span<const float> from, const parts& all, std::span<std::byte> to) {
        std::memset(to.data(), 0, to.size());
        std::byte* at = to.data();
        for (std::uint32_t r = 0; r < all.ranks; at += all.size(r++)) {
            const std::size_t first = all.of(r).begin * Block;
            if (first >= from.size()) break;
            each_block(all.of(r).size(), all.at(at, r),
                       detail::brought_elements<float>{from.data() + first, from.size() - first});
        }
    }
    static void decode(const parts& all, std::span<std::byte> from, std::span<float> to) {
        std::byte* at = from.data();
        for (std::uint32_t r = 0; r < all.ranks; at += all.size(r++)) {
            const auto blocks = all.at(at, r);
            const std::size_t first = all.of(r).begin * Block, end = std::min(all.of(r).end * Block, to.size());
            for (std::size_t i = first; i < end; i += detail::coded_floats::lanes)
                store_floats(to.data() + i, detail::decoded<Block>(blocks, i - first),
                             static_cast<std::uint32_t>(std::min<std::size_t>(end - i, detail::coded_floats::lanes)));
        }
    }

    detail::lasting_bytes brought_, taken_, own_;
};

/// Sends the largest elements of each process's sum, 8 bytes for each, and keeps the rest for later
/// steps (error feedback). The link chooses and adds elements as all_reduce_top_k (wire.hpp) does.
/// Each step must have the constructor's number of elements, in the same sequence of calls. A call
/// (with two levels, a chunk) of n elements sends n * `part` of them, at least one. `net` must
/// outlive the link. Use fp8_link below a process_set (horovod.hpp): a set fuses arrays in the
/// order in which they come, so its calls may differ from step to step.
///
/// If a call's sum isn't finite, all processes owe for the call what they owed before. The same
/// holds for a process whose call fails or throws. skip() takes the rest of the step back.
template <host_transport Net>
class top_k_link : public detail::link_over<Net, top_k_link<Net>> {
    using base = detail::link_over<Net, top_k_link<Net>>;
    friend base;

public:
    /// Collective over `net`. All processes pass the same `elements` and `part`. Throws like
    /// fp8_link, and operation_error (errc::invalid_specification) unless 0 < part <= 1.
    top_k_link(Net& net, std::size_t elements, double part, instant deadline = never)
        : base(net, word(elements, part), deadline), elements_(elements), part_(part) {
        if (!(part > 0 && part <= 1))
            raise({.code = errc::invalid_specification}, {}, "sending the largest elements between processes");
    }
    /// Takes back the last complete step, which the caller doesn't apply: the link owes again what
    /// it owed before the step. All processes call skip() between steps. A second call does
    /// nothing.
    void skip() noexcept {
        for (call& c : calls_) c.take_back();
    }
    /// This process's debt for each element, between steps. Empty before the first step.
    [[nodiscard]] std::vector<float> owed() const {
        std::vector<float> all;
        for (const call& c : calls_) all.insert(all.end(), c.owing.residual().begin(), c.owing.residual().end());
        return all;
    }

private:
    using base::net_;

    void note(const collective_fault& f) noexcept {
        for (auto* memory : {&places_, &values_}) memory->note(f);
    }
    /// One of the calls that each step makes.
    struct call {
        top_k_feedback owing;
        bool sent = false;  // the last step sent this call, and the call isn't taken back

        void take_back() noexcept {
            if (std::exchange(sent, false)) owing.skip();
        }
    };
    /// Takes the call back unless it succeeds, also if the transport throws.
    struct undo {
        call* of;
        ~undo() {
            if (of != nullptr) of->take_back();
        }
    };
    [[nodiscard]] static std::uint64_t word(std::size_t elements, double part) noexcept {
        return detail::mixed_word({0x70, elements, __builtin_bit_cast(std::uint64_t, part)});
    }
    /// The step's next call; null if a call of `n` elements can't come next.
    [[nodiscard]] call* next(std::size_t n) {
        if (next_ == calls_.size()) {
            if (n > elements_ - begun_) return nullptr;
            const auto some = static_cast<std::size_t>(static_cast<double>(n) * part_);
            calls_.push_back({top_k_feedback(n, std::max<std::size_t>(some, 1)), false});
        }
        return calls_[next_].owing.residual().size() == n ? &calls_[next_] : nullptr;
    }
    [[nodiscard]] collective_fault add_up(std::span<float> data, bool averages, instant deadline) {
        call* const mine = next(data.size());
        if (mine == nullptr) return refuse();
        const std::size_t k = mine->owing.indices().size() * sizeof(std::uint32_t);
        const auto places = places_.of(k * net_.size()), values = values_.of(k * net_.size());
        mine->owing.select(data);
        mine->sent = true;
        undo unless_right{mine};
        const auto as = []<class T>(T, std::span<std::byte> of) {
            return std::span(reinterpret_cast<T*>(of.data()), of.size() / sizeof(T));
        };
        const auto all_places = as(std::uint32_t{}, places);
        const auto all_values = as(float{}, values);
        auto f = base::template as_called<std::uint32_t, std::int32_t>(
            averages, all_places, [&](auto all) { return gather(mine->owing.indices(), all, deadline); });
        if (!f) f = gather(mine->owing.values(), all_values, deadline);
        if (f) return f;
        std::fill(data.begin(), data.end(), 0.0F);
        for (std::size_t i = 0; i < all_places.size(); ++i)
            if (all_places[i] < data.size()) data[all_places[i]] += all_values[i];
        if (averages)
            for (float& x : data) x /= static_cast<float>(net_.size());
        if (all_finite(data)) unless_right.of = nullptr;
        begun_ += data.size();
        if (++next_; begun_ == elements_) next_ = begun_ = 0;
        return {};
    }
    /// Gathers in place, because the transport may still read the data after this object has ended.
    template <class Own, class T>
    [[nodiscard]] collective_fault gather(std::span<const Own> own, std::span<T> all, instant deadline) {
        const auto mine = all.subspan(own.size() * net_.rank(), own.size());
        std::memcpy(mine.data(), own.data(), own.size_bytes());
        return net_.all_gather(std::span<const T>(mine), all, deadline);
    }
    /// Tells the other processes of the mismatch.
    [[nodiscard]] collective_fault refuse() {
        net_.abort(net_.rank(), errc::mismatch);
        (void)net_.barrier(std::chrono::steady_clock::now());
        return {errc::mismatch, collective_kind::all_reduce, net_.rank(), 0};
    }

    std::size_t elements_;
    double part_;
    std::vector<call> calls_;
    // the step's next call; the number of elements in earlier calls
    std::size_t next_ = 0, begun_ = 0;
    detail::lasting_bytes places_, values_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
