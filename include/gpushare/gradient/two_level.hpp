// SPDX-License-Identifier: Apache-2.0
// A group of groups: the ranks of this process, each a thread, and the same in other processes, with one transport between
// processes. An all-reduce combines inside the process, sends one copy of the result to the others however many ranks there are, and
// hands what comes back to all: chunk by chunk, so that one is combined here while others are under way there.
//
//   gpushare::communicator inner(4);
//   gpushare::mpi_transport outer(MPI_COMM_WORLD);
//   gpushare::two_level_group group = gpushare::split(inner, outer);
//   auto net = group.rank(r);                                // in thread r of four: a transport of 4 * outer.size() ranks
//
// Rank r of process p is rank p * inner.size() + r of all. An element is combined in the order of ranks in each process, rounded to
// T, and then in the order of processes: the same bits at every run, but other bits than those of a flat group. An average of
// halves is one of the processes' averages.
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
#include <vector>

#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How an all-reduce of two levels is cut.
struct two_level_options {
    bytes chunk{1 << 20};     ///< what goes between processes at once
    std::uint32_t depth = 4;  ///< chunks under way there, where the transport can do that
    /// How much longer than its deadline a rank waits for the one that talks to other processes, which learns there whom to name.
    ns grace = std::chrono::milliseconds(500);
};

namespace detail {

/// Op without what it does at the end, which is done once and not at each level.
template <class Op>
struct without_finish {
    static constexpr bool elementwise = requires { Op::elementwise; };
    static constexpr std::uint32_t id = op_id<Op>();
    template <class A>
    requires requires(A& a, const A& b) { Op::into(a, b); }
    [[gnu::always_inline]] static constexpr void into(A& a, const A& b) noexcept { Op::into(a, b); }
    template <class A>
    constexpr A operator()(const A& a, const A& b) const noexcept {
        return Op{}(a, b);
    }
};
template <class Op>
inline constexpr bool has_finish = requires(const Op& op, float a) {
    op.finish(a, a);
};

/// What both levels combine by: Op, or its part that can be done in two steps. An average of what is narrower than float is one of averages,
/// since all processes have as many ranks: so a sum that 16 bits can't hold never is between the two.
template <class T, class Op>
[[nodiscard]] constexpr auto op_of_a_level(const Op& op) noexcept {
    if constexpr (has_finish<Op> && !(std::same_as<Op, average> && sizeof(T) < sizeof(float)))
        return without_finish<Op>{};
    else
        return op;
}

}  // namespace detail

/// The part of a group of two levels that is in this process. `inner` and `outer` must outlive it, and nothing else uses `outer` while
/// a collective runs; the transport's calls come from the thread of rank 0.
template <host_transport Outer>
class two_level_group {
    struct shared_state {
        communicator& inner;
        Outer& outer;
        two_level_options options;
        std::atomic<std::uint64_t> outer_fault{0};  // packed; set before the inner group is closed for it
    };

public:
    /// One rank's end, a transport.
    class rank_type {
    public:
        static constexpr bool rank_ordered = false;   ///< of a flat group; see the header
        static constexpr bool in_host_memory = true;  ///< see transport

        [[nodiscard]] std::uint32_t rank() const noexcept { return first() + me_.rank(); }  ///< of all
        [[nodiscard]] std::uint32_t size() const noexcept {
            return me_.size() * s_->outer.size();
        }                                                                  ///< in all processes
        [[nodiscard]] bytes carried() const noexcept { return carried_; }  ///< see transport

        /// See transport. Averages are of floats.
        template <reducible T, class Op>
        requires(!detail::has_finish<Op> || !std::integral<T>) [[nodiscard]] collective_fault
            all_reduce(std::span<const std::type_identity_t<T>> in, std::span<T> out, const Op& op, instant deadline) {
            carried_ += bytes{in.size_bytes()};
            if (in.size() != out.size()) return {errc::mismatch, collective_kind::all_reduce, rank(), 0};
            const auto chunks = cut<T>(out.size());
            // Rank 0's output is where chunks are combined, each rank a part of one, and what goes to the other processes.
            const auto by = detail::op_of_a_level<T>(op);
            using By = std::remove_const_t<decltype(by)>;
            pipeline<T> under_way{*this};
            for (std::size_t k = 0; k < chunks + s_->options.depth; ++k) {
                if (k < chunks) {
                    const auto range = chunk<T>(out.size(), k);
                    const std::span<T> to = out.subspan(range.begin, range.size());
                    if (const auto f = inner_fault(try_reduce<T, By>(me_, in.subspan(range.begin, range.size()), to, 0,
                                                                     by, k == 0 ? deadline : behind_outer(deadline))))
                        return f;
                    if (me_.rank() == 0) under_way.start(to, by, deadline);
                }
                if (k < s_->options.depth) continue;
                const auto range = chunk<T>(out.size(), k - s_->options.depth);
                const std::span<T> done = out.subspan(range.begin, range.size());
                if (me_.rank() == 0) {
                    if (const auto f = under_way.finish(deadline)) return outer_failed(f);
                    if constexpr (!std::same_as<By, Op>) divide(done, op);
                }
                if (const auto f = inner_fault(try_broadcast(me_, done, 0, behind_outer(deadline)))) return f;
            }
            return {};
        }
        /// See transport. Averages are of floats. Rank 0 takes as much memory as there is input.
        template <reducible T, class Op>
        requires(!detail::has_finish<Op> || !std::integral<T>) [[nodiscard]] collective_fault
            reduce_scatter(std::span<const std::type_identity_t<T>> in, std::span<T> out, const Op& op,
                           instant deadline) {
            carried_ += bytes{in.size_bytes()};
            if (in.size() != out.size() * size()) return {errc::mismatch, collective_kind::reduce_scatter, rank(), 0};
            const auto by = detail::op_of_a_level<T>(op);
            using By = std::remove_const_t<decltype(by)>;
            std::vector<T> here(me_.rank() == 0 ? in.size() : 0), part(out.size() * me_.size());
            if (const auto f = inner_fault(try_reduce<T, By>(me_, in, std::span(here), 0, by, deadline))) return f;
            if (me_.rank() == 0) {
                if (const auto f = s_->outer.reduce_scatter(std::span<const T>(here), std::span(part), by, deadline))
                    return outer_failed(f);
                if constexpr (!std::same_as<By, Op>) divide(std::span(part), op);
            }
            if (const auto f = inner_fault(try_broadcast(me_, std::span(part), 0, behind_outer(deadline)))) return f;
            std::copy_n(part.begin() + static_cast<std::ptrdiff_t>(out.size() * me_.rank()), out.size(), out.begin());
            return {};
        }
        /// See transport.
        template <class T>
        [[nodiscard]] collective_fault all_gather(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                                  instant deadline) {
            carried_ += bytes{in.size_bytes()};
            if (out.size() != in.size() * size()) return {errc::mismatch, collective_kind::all_gather, rank(), 0};
            const std::size_t of_process = in.size() * me_.size();
            std::vector<T> here(of_process);
            if (const auto f = inner_fault(try_all_gather(me_, in, std::span(here), deadline))) return f;
            if (me_.rank() == 0)
                if (const auto f = s_->outer.all_gather(std::span<const T>(here), out, deadline))
                    return outer_failed(f);
            return inner_fault(try_broadcast(me_, out, 0, behind_outer(deadline)));
        }
        /// See transport.
        template <class T>
        [[nodiscard]] collective_fault broadcast(std::span<T> data, std::uint32_t root, instant deadline) {
            carried_ += bytes{data.size_bytes()};
            if (root >= size()) return {errc::mismatch, collective_kind::broadcast, rank(), 0};
            const std::uint32_t process = root / me_.size(), inside = root % me_.size();
            if (process == s_->outer.rank() && inside != 0)
                if (const auto f = inner_fault(try_broadcast(me_, data, inside, deadline))) return f;
            if (me_.rank() == 0)
                if (const auto f = s_->outer.broadcast(data, process, deadline)) return outer_failed(f);
            return inner_fault(try_broadcast(me_, data, 0, behind_outer(deadline)));
        }
        /// See transport.
        [[nodiscard]] collective_fault barrier(instant deadline) {
            if (const auto f = inner_fault(try_barrier(me_, deadline))) return f;
            if (me_.rank() == 0)
                if (const auto f = s_->outer.barrier(deadline)) return outer_failed(f);
            return inner_fault(try_barrier(me_, behind_outer(deadline)));
        }
        /// See transport.
        void abort(std::uint32_t rank, errc why) const noexcept {
            fail_all({why, me_.progress().what, rank, me_.progress().epoch});
            s_->outer.abort(rank / me_.size(), why);
        }

    private:
        friend class two_level_group;
        rank_type(shared_state& s, const member& me) noexcept : s_(&s), me_(me) {}

        [[nodiscard]] std::uint32_t first() const noexcept { return s_->outer.rank() * me_.size(); }

        /// Where rank 0 may be waiting for other processes.
        [[nodiscard]] instant behind_outer(instant deadline) const noexcept {
            return me_.rank() == 0 ? deadline : saturating_add(deadline, s_->options.grace);
        }
        template <class T>
        [[nodiscard]] std::size_t elements_of_a_chunk() const noexcept {
            const std::size_t grain = std::size_t{64} * me_.size();  // each rank's part is whole lines
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

        /// All-reduces between processes, by rank 0.
        template <class T>
        struct pipeline {
            rank_type& of;
            std::vector<std::uint64_t> tickets{};
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
                if constexpr (pipelined_transport<Outer>) {
                    const std::uint64_t ticket = tickets.front();
                    tickets.erase(tickets.begin());
                    return of.s_->outer.finish(ticket, deadline);
                } else {
                    return fault;
                }
            }
        };

        template <class T, class Op>
        void divide(std::span<T> data, const Op& op) const noexcept {
            using A = accumulator_t<T, Op>;
            for (T& x : data) x = static_cast<T>(op.finish(static_cast<A>(x), static_cast<A>(size())));
        }

        /// A fault of the ranks here, by its number among all; or what it was closed for. The other processes hear of it.
        [[nodiscard]] collective_fault inner_fault(collective_fault f) const {
            if (!f) return f;
            // acquire: whoever closed the group had stored it before.
            const std::uint64_t word = s_->outer_fault.load(std::memory_order_acquire);
            if (word != 0)
                f = collective_fault::unpacked(word);
            else
                f.rank += first();
            if (me_.rank() == 0) {
                if (word == 0) s_->outer.abort(s_->outer.rank(), f.code);
                // What has no thread tells others with its next call, and gives up what is under way; this one doesn't wait.
                const auto given_up = s_->outer.barrier(std::chrono::steady_clock::now());
                f.buffers_in_use = f.buffers_in_use || given_up.buffers_in_use;
            }
            return f;
        }
        /// By rank 0: the others here get the fault as well. A process is named by its first rank.
        [[nodiscard]] collective_fault outer_failed(collective_fault f) const noexcept {
            f.rank *= me_.size();
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

    /// Allocates little.
    two_level_group(communicator& inner, Outer& outer, two_level_options options = {})
        : s_(std::make_unique<shared_state>(inner, outer, options)) {
        s_->options.depth = std::max(options.depth, 1U);
    }

    /// Throws operation_error (errc::invalid_specification) for one that isn't there.
    [[nodiscard]] rank_type rank(std::uint32_t r, std::uint32_t channel = 0) const {
        return {*s_, s_->inner.rank(r, channel)};
    }
    /// Ranks in all processes.
    [[nodiscard]] std::uint32_t size() const noexcept { return s_->inner.size() * s_->outer.size(); }

private:
    std::unique_ptr<shared_state> s_;
};

/// The two of them as one group.
template <host_transport Outer>
[[nodiscard]] two_level_group<Outer> split(communicator& inner, Outer& outer, two_level_options options = {}) {
    return two_level_group<Outer>(inner, outer, options);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
