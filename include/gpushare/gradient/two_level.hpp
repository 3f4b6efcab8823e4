// SPDX-License-Identifier: Apache-2.0
// A group of groups: the ranks of this process, each a thread, and the same in other processes,
// with one transport between processes. An all-reduce combines inside the process, sends one copy
// of the result to the others however many ranks there are, and hands what comes back to all: chunk
// by chunk, so that one is combined here while others are under way there.
//
//   gpushare::communicator inner(4);
//   gpushare::two_level_group group = gpushare::split(inner, outer);       // outer: a transport between processes, e.g. an mpi_transport
//   auto mine = group.rank(r);                               // in thread r of four: a transport of the ranks of all processes
//
// Ranks are numbered in the order of processes. An element is combined in the order of ranks in
// each process, rounded to T, and then in the order of processes: the same bits at every run and on
// every rank, but other bits than those of a flat group. An average of halves is one of the
// processes' averages, weighted by their ranks where these aren't as many everywhere; so are those
// of 8 bits.
//
// Before any rank gets a result, all ranks of all processes have compared what they call. A rank
// that is late is named on every rank.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/two_level_parts.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How an all-reduce of two levels is cut.
struct two_level_options {
    bytes chunk{1 << 20};     ///< what goes between processes at once: of several processes' wishes the least
    std::uint32_t depth = 4;  ///< chunks under way there, where the transport can do that
    /// How much longer than its deadline a rank waits for the one that talks to other processes,
    /// which learns there whom to name: that one waits half of it for the others, since they first
    /// look for the rank that is late among their own.
    ns grace = std::chrono::milliseconds(500);
};

/// The part of a group of two levels that is in this process. `inner` and `outer` must outlive it,
/// and nothing else uses `outer` while a collective runs; the transport's calls come from the
/// thread of rank 0, but for abort.
template <host_transport Outer>
class two_level_group {
    struct shared_state {
        communicator& inner;
        Outer& outer;
        two_level_options options;
        detail::ranks_of_processes ranks{};
        // Used by rank 0. Here, and not on its stack: after a fault the transport may still touch
        // them (buffers_in_use).
        std::vector<std::uint64_t> words{};
        std::vector<std::unique_ptr<std::byte[]>> scratch{};
        bool in_use = false;
        std::atomic<std::uint64_t> outer_fault{0};  // packed; set before the inner group is closed for it

        shared_state(communicator& in, Outer& out, const two_level_options& o) : inner(in), outer(out), options(o) {}
        ~shared_state() {
            if (in_use)
                for (auto& memory : scratch) (void)memory.release();
        }
        shared_state(const shared_state&) = delete;
        shared_state& operator=(const shared_state&) = delete;
    };

public:
    /// One rank's end, a transport.
    class rank_type {
    public:
        static constexpr bool rank_ordered = false;   ///< of a flat group; see the header
        static constexpr bool in_host_memory = true;  ///< see transport

        [[nodiscard]] std::uint32_t rank() const noexcept { return first() + me_.rank(); }  ///< of all
        [[nodiscard]] std::uint32_t size() const noexcept { return s_->ranks.size(); }      ///< in all processes
        [[nodiscard]] bytes carried() const noexcept { return carried_; }                   ///< see transport

        /// See transport. Averages are of floats.
        template <reducible T, class Op>
        requires(!detail::has_finish<Op> || !std::integral<T>) [[nodiscard]] collective_fault
            all_reduce(std::span<const std::type_identity_t<T>> in, std::span<T> out, const Op& op, instant deadline) {
            carried_ += bytes{in.size_bytes()};
            if (in.size() != out.size()) return {errc::mismatch, collective_kind::all_reduce, rank(), 0};
            return by_levels<T>(op, [&](const auto& here, const auto& between, const auto& at_end) {
                return reduce_chunks<T, Op>(in, out, here, between, at_end, deadline);
            });
        }
        /// See transport. Averages are of floats. Rank 0 takes as much memory as there is input,
        /// and more where processes have different numbers of ranks.
        template <reducible T, class Op>
        requires(!detail::has_finish<Op> || !std::integral<T>) [[nodiscard]] collective_fault
            reduce_scatter(std::span<const std::type_identity_t<T>> in, std::span<T> out, const Op& op,
                           instant deadline) {
            carried_ += bytes{in.size_bytes()};
            if (in.size() != out.size() * size()) return {errc::mismatch, collective_kind::reduce_scatter, rank(), 0};
            return by_levels<T>(op, [&](const auto& here, const auto& between, const auto& at_end) {
                return reduce_and_scatter<T, Op>(in, out, here, between, at_end, deadline);
            });
        }
        /// See transport.
        template <class T>
        [[nodiscard]] collective_fault all_gather(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                                  instant deadline) {
            constexpr auto what = collective_kind::all_gather;
            carried_ += bytes{in.size_bytes()};
            if (out.size() != in.size() * size()) return {errc::mismatch, what, rank(), 0};
            outer_call between{*this, what};
            if (const auto f = between.agree(detail::call_word<T>(what, in.size()), deadline)) return f;
            const std::size_t of_process = in.size() * s_->ranks.largest();
            const bool alike = s_->ranks.alike();
            std::span<T> here, all = out;
            std::vector<T> mine;  // of the others
            if (me_.rank() == 0) {
                here = scratch<T>(0, of_process);
                if (!alike) all = scratch<T>(1, of_process * s_->ranks.processes());
            } else {
                mine.resize(in.size() * me_.size());
                here = mine;
            }
            if (const auto f = inner_fault(try_all_gather(me_, in, here.first(in.size() * me_.size()), deadline)))
                return f;
            if (me_.rank() == 0) {
                std::fill(here.begin() + static_cast<std::ptrdiff_t>(in.size() * me_.size()), here.end(), T{});
                if (const auto f = between.agreed()) return f;
                if (const auto f = s_->outer.all_gather(std::span<const T>(here), all, outer_deadline(deadline)))
                    return outer_failed(f);
                if (!alike && !out.empty()) s_->ranks.join(as_bytes(all.data()), as_bytes(out.data()), in.size_bytes());
            }
            return inner_fault(try_broadcast(me_, out, 0, behind_outer(deadline)));
        }
        /// See transport.
        template <class T>
        [[nodiscard]] collective_fault broadcast(std::span<T> data, std::uint32_t root, instant deadline) {
            constexpr auto what = collective_kind::broadcast;
            carried_ += bytes{data.size_bytes()};
            if (root >= size()) return {errc::mismatch, what, rank(), 0};
            outer_call between{*this, what};
            if (const auto f = between.agree(detail::call_word<T>(what, data.size(), 0, root), deadline)) return f;
            const std::uint32_t process = s_->ranks.process_of(root), inside = root - s_->ranks.first(process);
            if (process == s_->outer.rank() && inside != 0)
                if (const auto f = inner_fault(try_broadcast(me_, data, inside, deadline))) return f;
            if (me_.rank() == 0) {
                if (const auto f = between.agreed()) return f;
                if (const auto f = s_->outer.broadcast(data, process, outer_deadline(deadline))) return outer_failed(f);
            }
            return inner_fault(try_broadcast(me_, data, 0, behind_outer(deadline)));
        }
        /// See transport.
        [[nodiscard]] collective_fault barrier(instant deadline) {
            constexpr auto what = collective_kind::barrier;
            outer_call between{*this, what};
            if (const auto f = between.agree(detail::call_word<std::byte>(what, 0), deadline)) return f;
            if (me_.rank() == 0)
                if (const auto f = between.agreed()) return f;
            return inner_fault(try_barrier(me_, behind_outer(deadline)));
        }
        /// See transport.
        void abort(std::uint32_t rank, errc why) const noexcept {
            fail_all({why, me_.progress().what, rank, me_.progress().epoch});
            tell_others(rank, why);
        }

    private:
        friend class two_level_group;
        rank_type(shared_state& s, const member& me) noexcept : s_(&s), me_(me) {}

        [[nodiscard]] std::uint32_t first() const noexcept { return s_->ranks.first(s_->outer.rank()); }
        template <class P>
        [[nodiscard]] static auto as_bytes(P* p) noexcept {
            return reinterpret_cast<std::conditional_t<std::is_const_v<P>, const std::byte, std::byte>*>(p);
        }

        /// Until when rank 0 waits for other processes: they may know better who is late.
        [[nodiscard]] instant outer_deadline(instant deadline) const noexcept {
            return saturating_add(deadline, s_->options.grace / 2);
        }
        /// Where rank 0 may have been waiting for other processes.
        [[nodiscard]] instant behind_outer(instant deadline) const noexcept {
            return saturating_add(deadline, s_->options.grace);
        }
        template <class T>
        [[nodiscard]] std::size_t elements_of_a_chunk() const noexcept {
            const std::size_t grain = std::size_t{64} * s_->ranks.largest();  // each rank's part is whole lines
            return std::max<std::size_t>(s_->options.chunk.count() / sizeof(T) / grain, 1) * grain;
        }
        template <class T>
        [[nodiscard]] std::size_t cut(std::size_t n) const noexcept {
            return (n + elements_of_a_chunk<T>() - 1) / elements_of_a_chunk<T>();
        }
        template <class T>
        [[nodiscard]] element_range chunk(std::size_t n, std::size_t k) const noexcept {
            const std::size_t each = elements_of_a_chunk<T>();
            return {std::min(n, k * each), std::min(n, (k + 1) * each)};
        }
        /// Memory of rank 0, kept until the group ends.
        template <class T>
        [[nodiscard]] std::span<T> scratch(std::size_t which, std::size_t n) {
            if (s_->scratch.size() <= which) s_->scratch.resize(which + 1);
            s_->scratch[which] = std::make_unique_for_overwrite<std::byte[]>(std::max<std::size_t>(n, 1) * sizeof(T));
            T* const begin = reinterpret_cast<T*>(s_->scratch[which].get());
            std::uninitialized_default_construct_n(begin, n);
            return {begin, n};
        }

        /// Calls f(what is combined by in a process, what between processes, what is done at the end).
        template <class T, class Op, class F>
        [[nodiscard]] collective_fault by_levels(const Op& op, const F& f) {
            constexpr auto nothing = [](std::span<T>) {};
            if constexpr (detail::averages_by_level<T, Op>) {
                const detail::part_of_average part{static_cast<float>(size())};
                return s_->ranks.alike() ? f(op, op, nothing) : f(part, sum{}, nothing);
            } else if constexpr (detail::has_finish<Op>) {
                const auto by = detail::op_of_a_level<T>(op);
                return f(by, by, [&](std::span<T> data) {
                    using A = accumulator_t<T, Op>;
                    for (T& x : data) x = static_cast<T>(op.finish(static_cast<A>(x), static_cast<A>(size())));
                });
            } else {
                return f(op, op, nothing);
            }
        }

        /// Rank 0's output is where chunks are combined, each rank a part of one, and what goes to the other processes.
        template <class T, class Op, class Here, class Between, class End>
        [[nodiscard]] collective_fault reduce_chunks(std::span<const T> in, std::span<T> out, const Here& here,
                                                     const Between& between, const End& at_end, instant deadline) {
            constexpr auto what = collective_kind::all_reduce;
            outer_call outside{*this, what};
            if (const auto f = outside.agree(detail::call_word<T>(what, in.size(), detail::op_id<Op>()), deadline))
                return f;
            const auto chunks = cut<T>(out.size());
            const std::size_t depth = s_->options.depth;
            pipeline<T> under_way{*this};
            for (std::size_t k = 0; k < chunks + depth; ++k) {
                if (k < chunks) {
                    const auto range = chunk<T>(out.size(), k);
                    const std::span<T> to = out.subspan(range.begin, range.size());
                    const instant until = k == 0 ? deadline : behind_outer(deadline);
                    const std::span<const T> from = in.subspan(range.begin, range.size());
                    if (const auto f = inner_fault(try_reduce<T, Here>(me_, from, to, 0, here, until))) return f;
                    if (me_.rank() == 0) {
                        if (k == 0 && !pipelined_transport<Outer>)
                            if (const auto f = outside.agreed()) return f;
                        under_way.start(to, between, outer_deadline(deadline));
                    }
                }
                if (k < depth) continue;
                const auto range = chunk<T>(out.size(), k - depth);
                const std::span<T> done = out.subspan(range.begin, range.size());
                if (me_.rank() == 0) {
                    if (k == depth && pipelined_transport<Outer>)
                        if (const auto f = outside.agreed()) return f;
                    if (const auto f = under_way.finish(outer_deadline(deadline))) return outer_failed(f);
                    at_end(done);
                }
                if (const auto f = inner_fault(try_broadcast(me_, done, 0, behind_outer(deadline)))) return f;
            }
            return chunks != 0 ? collective_fault{} : nothing_to_do(outside, deadline);
        }
        /// A call without elements: all ranks have to know that the others have called it, too.
        template <class Call>
        [[nodiscard]] collective_fault nothing_to_do(Call& outside, instant deadline) {
            if (me_.rank() == 0)
                if (const auto f = outside.agreed()) return f;
            return inner_fault(try_barrier(me_, behind_outer(deadline)));
        }

        template <class T, class Op, class Here, class Between, class End>
        [[nodiscard]] collective_fault reduce_and_scatter(std::span<const T> in, std::span<T> out, const Here& here,
                                                          const Between& between, const End& at_end, instant deadline) {
            constexpr auto what = collective_kind::reduce_scatter;
            const std::size_t n = out.size();
            outer_call outside{*this, what};
            if (const auto f = outside.agree(detail::call_word<T>(what, n, detail::op_id<Op>()), deadline)) return f;
            const std::size_t of_process = n * s_->ranks.largest();
            std::span<T> all, part;
            std::vector<T> mine;  // of the others
            if (me_.rank() == 0) {
                all = scratch<T>(0, of_process * s_->ranks.processes());
                part = scratch<T>(1, of_process);
            } else {
                mine.resize(of_process);
                part = mine;
            }
            const std::span<T> to = me_.rank() == 0 ? all.first(in.size()) : all;
            if (const auto f = inner_fault(try_reduce<T, Here>(me_, in, to, 0, here, deadline))) return f;
            if (me_.rank() == 0) {
                if (!s_->ranks.alike() && n != 0) s_->ranks.spread(as_bytes(all.data()), n * sizeof(T));
                if (const auto f = outside.agreed()) return f;
                if (const auto f =
                        s_->outer.reduce_scatter(std::span<const T>(all), part, between, outer_deadline(deadline)))
                    return outer_failed(f);
                at_end(part);
            }
            if (const auto f = inner_fault(try_broadcast(me_, part, 0, behind_outer(deadline)))) return f;
            std::copy_n(part.begin() + static_cast<std::ptrdiff_t>(n * me_.rank()), n, out.begin());
            return {};
        }

        /// Compares what all ranks of all processes call: in the process at once, between processes
        /// by rank 0, which first goes on with what it can do without an answer, if the transport
        /// can do that.
        struct outer_call {
            rank_type& of;
            collective_kind what;
            instant until{};
            std::uint64_t ticket = 0;

            [[nodiscard]] collective_fault agree(std::uint64_t word, instant deadline) {
                until = of.outer_deadline(deadline);
                const auto inside = detail::run_in_thread(of.me_, detail::agreement_body{word}, deadline);
                if (auto f = of.inner_fault(inside)) {
                    f.what = what;
                    return f;
                }
                if (of.me_.rank() != 0) return {};
                auto& words = of.s_->words;
                words.assign(of.s_->ranks.processes(), 0);
                words[of.s_->outer.rank()] = word;
                if constexpr (pipelined_transport<Outer>) {
                    ticket = of.s_->outer.start_all_gather(std::span(words));
                    of.s_->outer.advance();
                }
                return {};
            }
            [[nodiscard]] collective_fault agreed() {
                auto& words = of.s_->words;
                collective_fault f;
                if constexpr (pipelined_transport<Outer>) {
                    f = of.s_->outer.finish(ticket, until);
                } else {
                    const std::uint64_t own = words[of.s_->outer.rank()];
                    f = of.s_->outer.all_gather(std::span(&own, 1), std::span(words), until);
                }
                if (f) return of.outer_failed(f);
                const auto odd = detail::odd_one(words);
                if (!odd) return {};
                // Others may have noticed it by what came behind the words: the transport decides whom all name.
                of.tell_others(of.s_->ranks.first(*odd), errc::mismatch);
                f = of.s_->outer.barrier(std::chrono::steady_clock::now());
                if (!f) f = {errc::mismatch, what, *odd, 0};
                f.what = what;
                return of.outer_failed(f);
            }
        };

        /// All-reduces between processes, by rank 0.
        template <class T>
        struct pipeline {
            rank_type& of;
            std::vector<std::uint64_t> tickets{};
            std::size_t finished = 0;
            collective_fault fault{};

            template <class By>
            void start(std::span<T> data, const By& by, instant deadline) {
                if constexpr (pipelined_transport<Outer>) {
                    tickets.push_back(of.s_->outer.start_all_reduce(data, by));
                    of.s_->outer.advance();
                } else if (!fault) {
                    fault = of.s_->outer.all_reduce(std::span<const T>(data), data, by, deadline);
                }
            }
            [[nodiscard]] collective_fault finish(instant deadline) {
                if constexpr (pipelined_transport<Outer>)
                    return of.s_->outer.finish(tickets[finished++], deadline);
                else
                    return fault;
            }
        };

        /// Numbers behind those of the processes are ranks of all: so others hear which rank of a process it is.
        void tell_others(std::uint32_t rank, errc why) const noexcept { s_->outer.abort(s_->outer.size() + rank, why); }

        /// A fault of the ranks here, by its number among all; or what it was closed for. The other
        /// processes hear of it.
        [[nodiscard]] collective_fault inner_fault(collective_fault f) const {
            if (!f) return f;
            // acquire: whoever closed the group had stored it before.
            const std::uint64_t word = s_->outer_fault.load(std::memory_order_acquire);
            if (word != 0)
                f = collective_fault::unpacked(word);
            else
                f.rank += first();
            // By each rank: it may be rank 0 that isn't there.
            if (word == 0) tell_others(f.rank, f.code);
            if (me_.rank() == 0) {
                // A transport without a thread tells others with its next call, and gives up work
                // under way; this call doesn't wait.
                const auto given_up = s_->outer.barrier(std::chrono::steady_clock::now());
                s_->in_use = s_->in_use || given_up.buffers_in_use;
                f.buffers_in_use = f.buffers_in_use || given_up.buffers_in_use;
            }
            return f;
        }
        /// By rank 0: the others here get the fault as well. Where a process knew no better, it is
        /// named by its first rank.
        [[nodiscard]] collective_fault outer_failed(collective_fault f) const noexcept {
            s_->in_use = s_->in_use || f.buffers_in_use;
            f.rank = f.rank < s_->outer.size() ? s_->ranks.first(f.rank) : f.rank - s_->outer.size();
            return fail_all(f);
        }
        collective_fault fail_all(const collective_fault& f) const noexcept {
            std::uint64_t none = 0;
            // acq_rel: the first fault stands, and ranks that find the group closed read it.
            if (!s_->outer_fault.compare_exchange_strong(none, f.packed(), std::memory_order_acq_rel))
                return collective_fault::unpacked(none);
            me_.close(f);
            return f;
        }

        shared_state* s_;
        member me_;
        bytes carried_;
    };
    static_assert(host_transport<rank_type>);

    /// Collective over `outer`: the processes tell each other how many ranks they have. Throws
    /// operation_error: what `outer` fails for, a deadline that passed, say.
    two_level_group(communicator& inner, Outer& outer, two_level_options options = {}, instant deadline = never)
        : s_(std::make_unique<shared_state>(inner, outer, options)) {
        s_->options.depth = std::max(options.depth, 1U);
        const std::uint64_t mine[] = {inner.size(), options.chunk.count()};
        std::vector<std::uint64_t> all(std::size(mine) * outer.size());
        raise_fault(outer.all_gather(std::span(mine), std::span(all), deadline));
        std::vector<std::uint32_t> sizes(outer.size());
        for (std::uint32_t p = 0; p < outer.size(); ++p) {
            sizes[p] = static_cast<std::uint32_t>(all[std::size_t{2} * p]);
            s_->options.chunk = std::min(s_->options.chunk, bytes{all[std::size_t{2} * p + 1]});
        }
        s_->ranks = detail::ranks_of_processes(sizes);
        // Nobody goes on, and fails, before all know the sizes: by these a fault names its rank. So a fault from here on is
        // told by the first call of each rank, as the transport keeps it.
        (void)outer.barrier(deadline);
    }

    /// Throws operation_error (errc::invalid_specification) for one that isn't there.
    [[nodiscard]] rank_type rank(std::uint32_t r, std::uint32_t channel = 0) const {
        return {*s_, s_->inner.rank(r, channel)};
    }
    /// Ranks in all processes.
    [[nodiscard]] std::uint32_t size() const noexcept { return s_->ranks.size(); }

private:
    std::unique_ptr<shared_state> s_;
};

/// The two of them as one group: called by all processes. Throws operation_error as two_level_group does.
template <host_transport Outer>
[[nodiscard]] two_level_group<Outer> split(communicator& inner, Outer& outer, two_level_options options = {},
                                           instant deadline = never) {
    return two_level_group<Outer>(inner, outer, options, deadline);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
