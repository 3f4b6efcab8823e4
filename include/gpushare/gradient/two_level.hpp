// SPDX-License-Identifier: Apache-2.0
// A two-level group: the ranks are threads of several processes, and one transport connects the
// processes. An all-reduce combines elements inside each process, exchanges one copy between the
// processes, however many ranks there are, and hands the result to all ranks. The all-reduce works
// chunk by chunk, so that the ranks combine one chunk while other chunks are under way between
// processes.
//
//   gpushare::communicator inner(4);
//   gpushare::two_level_group group = gpushare::split(inner, outer);  // outer: an mpi_transport
//   auto mine = group.rank(r);  // in thread r of four: a transport of all processes' ranks
//
// Ranks are numbered in the order of processes. Elements are combined in the order of ranks in each
// process, rounded to T, and then combined in the order of processes. The bits are the same in
// every run and on every rank, but differ from the bits of a flat group. An average of 16-bit or
// 8-bit elements is the average of the processes' averages, weighted by their numbers of ranks.
//
// All ranks of all processes compare their calls before any rank gets a result. If a rank is late,
// every rank's fault names the late rank.
//
// Ranks can be devices, or share a device. One thread of each process serves all its ranks:
//
//   gpushare::two_level_devices levels(node.gangs(), devices, std::span(streams),
//                                      members, outer, pinned);
//   auto fault = levels.all_reduce<float>(ins, outs, n, gpushare::average{}, deadline);
//   while (!buckets.complete())
//       buckets.advance(std::span(streams), staging, levels.engine(patience));
//
// The devices reduce-scatter on their streams. Each device copies its part to pinned memory,
// `outer` combines the parts with those of the other processes, and each device gets its part back
// for an all-gather. So a device's link to the host carries only a part of the elements, there and
// back. The link between processes carries as many bytes as the link of a two_level_group, and the
// results have the same bits.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/two_level_parts.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How a two-level all-reduce is cut into chunks.
struct two_level_options {
    /// Bytes of a chunk; all processes use the smallest of their settings.
    bytes chunk{1 << 20};
    std::uint32_t depth = 4;  ///< chunks under way at once, over a pipelined transport
    /// How much longer than its deadline a rank waits for rank 0 of its process, which learns from
    /// the other processes which rank to name. Rank 0 waits half of this time longer for the other
    /// processes, which first look for the late rank among their own ranks.
    ns grace = std::chrono::milliseconds(500);
};

/// This process's part of a two-level group. `inner` and `outer` must outlive the object. No other
/// code may use `outer` while a collective runs. Only rank 0's thread runs collectives on `outer`,
/// but each rank may abort them.
template <host_transport Outer>
class two_level_group {
    struct shared_state {
        communicator& inner;
        Outer& outer;
        two_level_options options;
        detail::ranks_of_processes ranks{};
        // Memory of rank 0, but not on its stack, because after a fault the transport may still
        // touch it. The memory has a word for each process, and this process's own word once more.
        std::unique_ptr<std::uint64_t[]> words_memory{};
        std::vector<std::unique_ptr<std::byte[]>> scratch{};
        bool in_use = false;
        std::atomic<std::uint64_t> outer_fault{0};  // packed; stored before the inner group closes

        shared_state(communicator& in, Outer& out, const two_level_options& o) : inner(in), outer(out), options(o) {}
        ~shared_state() {
            if (!in_use) return;
            (void)words_memory.release();
            for (auto& memory : scratch) (void)memory.release();
        }
        [[nodiscard]] std::span<std::uint64_t> words() const noexcept {
            return {words_memory.get(), ranks.processes()};
        }
        shared_state(const shared_state&) = delete;
        shared_state& operator=(const shared_state&) = delete;
    };

public:
    /// One rank's end of the group: a transport.
    class rank_type {
    public:
        static constexpr bool rank_ordered = false;   ///< ordered by levels: see the header
        static constexpr bool in_host_memory = true;  ///< see transport

        /// The rank's number among all ranks.
        [[nodiscard]] std::uint32_t rank() const noexcept { return first() + me_.rank(); }
        /// The number of ranks in all processes.
        [[nodiscard]] std::uint32_t size() const noexcept { return s_->ranks.size(); }
        /// See transport.
        [[nodiscard]] bytes carried() const noexcept { return carried_; }
        /// No fault until a rank has failed or aborted, as far as this rank knows.
        [[nodiscard]] collective_fault fault() const noexcept {
            // The group's fault comes first. A thread that closes the group has stored the word
            // before, with the rank's number among all ranks.
            collective_fault f = me_.fault();
            const std::uint64_t word = s_->outer_fault.load(std::memory_order_acquire);
            if (word != 0) return collective_fault::unpacked(word);
            if (f) f.rank += first();
            return f;
        }

        /// See transport. Integers have no average.
        template <reducible T, class Op>
        requires(!detail::has_finish<Op> || !std::integral<T>) [[nodiscard]] collective_fault
            all_reduce(std::span<const std::type_identity_t<T>> in, std::span<T> out, const Op& op, instant deadline) {
            carried_ += bytes{in.size_bytes()};
            if (in.size() != out.size()) return {errc::mismatch, collective_kind::all_reduce, rank(), 0};
            return telling([&] {
                return detail::by_levels<T>(s_->ranks, op,
                                            [&](const auto& here, const auto& between, const auto& at_end) {
                                                return reduce_chunks<T, Op>(in, out, here, between, at_end, deadline);
                                            });
            });
        }
        /// See transport. Integers have no average. Rank 0 allocates memory for its input, and more
        /// if processes have different numbers of ranks. Every rank allocates memory for the parts
        /// of its process's ranks.
        template <reducible T, class Op>
        requires(!detail::has_finish<Op> || !std::integral<T>) [[nodiscard]] collective_fault
            reduce_scatter(std::span<const std::type_identity_t<T>> in, std::span<T> out, const Op& op,
                           instant deadline) {
            carried_ += bytes{in.size_bytes()};
            if (in.size() != out.size() * size()) return {errc::mismatch, collective_kind::reduce_scatter, rank(), 0};
            return telling([&] {
                return detail::by_levels<T>(
                    s_->ranks, op, [&](const auto& here, const auto& between, const auto& at_end) {
                        return reduce_and_scatter<T, Op>(in, out, here, between, at_end, deadline);
                    });
            });
        }
        /// See transport.
        template <class T>
        [[nodiscard]] collective_fault all_gather(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                                  instant deadline) {
            carried_ += bytes{in.size_bytes()};
            if (out.size() != in.size() * size()) return {errc::mismatch, collective_kind::all_gather, rank(), 0};
            return telling([&] { return gather(in, out, deadline); });
        }
        /// See transport.
        template <class T>
        [[nodiscard]] collective_fault broadcast(std::span<T> data, std::uint32_t root, instant deadline) {
            constexpr auto what = collective_kind::broadcast;
            carried_ += bytes{data.size_bytes()};
            if (root >= size()) return {errc::mismatch, what, rank(), 0};
            return telling([&]() -> collective_fault {
                outer_call between{*this, what};
                if (const auto f = between.agree(detail::call_word<T>(what, data.size(), 0, root), deadline)) return f;
                const std::uint32_t process = s_->ranks.process_of(root), inside = root - s_->ranks.first(process);
                if (process == s_->outer.rank() && inside != 0)
                    if (const auto f = inner_fault(try_broadcast(me_, data, inside, deadline))) return f;
                if (me_.rank() == 0) {
                    if (const auto f = between.agreed()) return f;
                    if (const auto f = s_->outer.broadcast(data, process, outer_deadline(deadline)))
                        return outer_failed(f);
                }
                return inner_fault(try_broadcast(me_, data, 0, behind_outer(deadline)));
            });
        }
        /// See transport.
        [[nodiscard]] collective_fault barrier(instant deadline) {
            constexpr auto what = collective_kind::barrier;
            return telling([&]() -> collective_fault {
                outer_call between{*this, what};
                if (const auto f = between.agree(detail::call_word<std::byte>(what, 0), deadline)) return f;
                if (me_.rank() == 0)
                    if (const auto f = between.agreed()) return f;
                return inner_fault(try_barrier(me_, behind_outer(deadline)));
            });
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

        /// The time until which rank 0 waits for other processes, which may know better which rank
        /// is late.
        [[nodiscard]] instant outer_deadline(instant deadline) const noexcept {
            return saturating_add(deadline, s_->options.grace / 2);
        }
        /// The deadline of a call for which rank 0 may be late, because it may have waited for
        /// other processes.
        [[nodiscard]] instant behind_outer(instant deadline) const noexcept {
            return saturating_add(deadline, s_->options.grace);
        }
        template <class T>
        [[nodiscard]] std::size_t elements_of_a_chunk() const noexcept {
            return detail::elements_of_a_chunk<T>(s_->options.chunk, s_->ranks);
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
        /// Rank 0's memory, kept until a later call needs it or the group ends.
        template <class T>
        [[nodiscard]] std::span<T> scratch(std::size_t which, std::size_t n) {
            if (s_->scratch.size() <= which) s_->scratch.resize(which + 1);
            s_->scratch[which] = std::make_unique_for_overwrite<std::byte[]>(std::max<std::size_t>(n, 1) * sizeof(T));
            T* const begin = reinterpret_cast<T*>(s_->scratch[which].get());
            std::uninitialized_default_construct_n(begin, n);
            return {begin, n};
        }

        /// The ranks combine each chunk in rank 0's output, and rank 0 exchanges the chunk with the
        /// other processes.
        template <class T, class Op, class Here, class Between, class End>
        [[nodiscard]] collective_fault reduce_chunks(std::span<const T> in, std::span<T> out, const Here& here,
                                                     const Between& between, const End& at_end, instant deadline) {
            constexpr auto what = collective_kind::all_reduce;
            outer_call outside{*this, what};
            if (const auto f = outside.agree(detail::call_word<T>(what, in.size(), detail::op_id<Op>()), deadline))
                return f;
            const auto chunks = cut<T>(out.size());
            const std::size_t depth = std::min<std::size_t>(s_->options.depth, chunks);
            detail::outer_reduces<Outer> under_way{s_->outer};
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
        /// A call without elements: every rank must still know that all other ranks have made the
        /// call.
        template <class Call>
        [[nodiscard]] collective_fault nothing_to_do(Call& outside, instant deadline) {
            if (me_.rank() == 0)
                if (const auto f = outside.agreed()) return f;
            return inner_fault(try_barrier(me_, behind_outer(deadline)));
        }

        template <class T>
        [[nodiscard]] collective_fault gather(std::span<const T> in, std::span<T> out, instant deadline) {
            constexpr auto what = collective_kind::all_gather;
            outer_call between{*this, what};
            if (const auto f = between.agree(detail::call_word<T>(what, in.size()), deadline)) return f;
            const std::size_t of_process = in.size() * s_->ranks.largest();
            const bool alike = s_->ranks.alike();
            std::span<T> here, all = out;
            std::vector<T> mine;  // of ranks other than 0
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
                if (!alike && !out.empty())
                    s_->ranks.join(std::as_bytes(all).data(), std::as_writable_bytes(out).data(), in.size_bytes());
            }
            return inner_fault(try_broadcast(me_, out, 0, behind_outer(deadline)));
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
            std::vector<T> mine;  // of ranks other than 0
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
                if (!s_->ranks.alike() && n != 0) s_->ranks.spread(std::as_writable_bytes(all).data(), n * sizeof(T));
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

        /// Compares the calls of all ranks: first inside each process, then between processes by
        /// rank 0. Over a pipelined transport, rank 0 continues with other work until agreed()
        /// needs the answer.
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
                const std::span<std::uint64_t> words = of.s_->words();
                std::fill(words.begin(), words.end(), 0);
                words[of.s_->outer.rank()] = word;
                if constexpr (pipelined_transport<Outer>) {
                    ticket = of.s_->outer.start_all_gather(words);
                    of.s_->outer.advance();
                }
                return {};
            }
            [[nodiscard]] collective_fault agreed() {
                const std::span<std::uint64_t> words = of.s_->words();
                collective_fault f;
                if constexpr (pipelined_transport<Outer>) {
                    f = of.s_->outer.finish(ticket, until);
                } else {
                    std::uint64_t& own = of.s_->words_memory[words.size()];
                    own = words[of.s_->outer.rank()];
                    f = of.s_->outer.all_gather(std::span<const std::uint64_t>(&own, 1), words, until);
                }
                if (f) return of.outer_failed(f);
                const auto odd = detail::odd_one(words);
                if (!odd) return {};
                // Other processes may have noticed the mismatch from what followed the words. The
                // transport decides which rank all of them name.
                of.tell_others(of.s_->ranks.first(*odd), errc::mismatch);
                f = of.s_->outer.barrier(std::chrono::steady_clock::now());
                if (!f) f = {errc::mismatch, what, *odd, 0};
                f.what = what;
                return of.outer_failed(f);
            }
        };

        /// Runs a call. An exception, such as std::bad_alloc, ends the calls of all ranks, and then
        /// propagates.
        template <class F>
        [[nodiscard]] collective_fault telling(const F& call) {
            try {
                return call();
            } catch (...) {
                abort(rank(), detail::code_thrown());
                if (me_.rank() == 0) s_->in_use = detail::gives_up(s_->outer) || s_->in_use;
                throw;
            }
        }

        /// The transport takes numbers from outer.size() on as ranks of the whole group. So the
        /// other processes learn which rank of this process is at fault.
        void tell_others(std::uint32_t rank, errc why) const noexcept { s_->outer.abort(s_->outer.size() + rank, why); }

        /// Returns a fault of the ranks here, with the rank's number among all ranks, and tells the
        /// other processes. If the group was closed for another fault, returns that fault.
        [[nodiscard]] collective_fault inner_fault(collective_fault f) const {
            if (!f) return f;
            // acquire: the thread that closed the group stored the fault before.
            const std::uint64_t word = s_->outer_fault.load(std::memory_order_acquire);
            const bool here = f.buffers_in_use;  // the group's fault doesn't know this
            if (word != 0)
                f = collective_fault::unpacked(word);
            else
                f.rank += first();
            f.buffers_in_use = f.buffers_in_use || here;
            // Each rank tells the other processes, since rank 0 may be the late rank.
            if (word == 0) tell_others(f.rank, f.code);
            if (me_.rank() == 0) {
                // A transport without a thread of its own tells the other processes in its next
                // call, and gives up work under way. This call doesn't wait.
                const bool in_use = detail::gives_up(s_->outer);
                s_->in_use = s_->in_use || in_use;
                f.buffers_in_use = f.buffers_in_use || in_use;
            }
            return f;
        }
        /// Rank 0 passes a fault between processes on to the other ranks here. If only the process
        /// is known, the fault names the process's first rank.
        [[nodiscard]] collective_fault outer_failed(collective_fault f) const noexcept {
            s_->in_use = s_->in_use || f.buffers_in_use;
            f.rank = detail::named_rank(s_->ranks, f.rank);
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
    /// operation_error for a fault of `outer`, such as a deadline that has passed. If a process
    /// throws std::bad_alloc, the other processes throw an operation_error that names it.
    two_level_group(communicator& inner, Outer& outer, two_level_options options = {}, instant deadline = never) {
        options.depth = std::max(options.depth, 1U);
        auto ranks = detail::meet_processes(outer, inner.size(), options.chunk, deadline);
        const auto allocate = [&] {
            s_ = std::make_unique<shared_state>(inner, outer, options);
            s_->words_memory = std::make_unique<std::uint64_t[]>(ranks.processes() + 1);
            s_->ranks = std::move(ranks);
        };
        detail::make_on_all(
            outer, allocate, [] {}, deadline);
    }

    /// All channels share `outer`, so only one channel at a time may run collectives. Throws
    /// operation_error (errc::invalid_specification) if there is no such rank or channel.
    [[nodiscard]] rank_type rank(std::uint32_t r, std::uint32_t channel = 0) const {
        return {*s_, s_->inner.rank(r, channel)};
    }
    /// The number of ranks in all processes.
    [[nodiscard]] std::uint32_t size() const noexcept { return s_->ranks.size(); }

private:
    std::unique_ptr<shared_state> s_;
};

/// Makes one group of `inner` and `outer`. All processes call split(). Throws as two_level_group's
/// constructor does.
template <host_transport Outer>
[[nodiscard]] two_level_group<Outer> split(communicator& inner, Outer& outer, two_level_options options = {},
                                           instant deadline = never) {
    return two_level_group<Outer>(inner, outer, options, deadline);
}

/// The ranks on this process's devices, in a group with the ranks of other processes. Each process
/// has a two_level_devices. One thread at a time calls its members, except for abort(). All objects
/// that the constructor refers to must outlive the two_level_devices. No other code may use `outer`
/// while a collective runs. `Pinned` allocates memory that the host, the streams' copies and the
/// devices reach, such as gpushare::cuda::pinned_memory.
template <gang_order Gangs, launcher Stream, host_transport Outer, memory_resource Pinned>
requires copier<Stream>
class two_level_devices {
public:
    /// Rank r of `members` is on devices[r], with streams[r]. If all ranks share a device, there is
    /// one device and one stream. Collective over `outer`: the processes tell each other how many
    /// ranks they have. Allocates options.depth chunks, but at least two. Throws what `pinned`
    /// throws; the other processes then throw an operation_error that names this process. Throws
    /// operation_error with errc::invalid_specification for spans of other lengths, or with a fault
    /// of `outer`.
    two_level_devices(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                      std::span<const member> members, Outer& outer, Pinned& pinned, two_level_options options = {},
                      const launch_options& launches = {}, instant deadline = never)
        : gangs_(gangs),
          devices_(devices),
          streams_(streams),
          members_(members),
          outer_(outer),
          pinned_(pinned),
          options_(options),
          launches_(launches) {
        const auto check = [&] {
            if (!members.empty() && devices.size() == streams.size() &&
                (devices.size() == here() || devices.size() == 1))
                return;
            raise({.code = errc::invalid_specification,
                   .asked = devices.size(),
                   .limit = members.size(),
                   .because = reason::wrong_count},
                  {}, "making two levels of devices");
        };
        detail::make_on_all(
            outer, check, [] {}, deadline);
        ranks_ = detail::meet_processes(outer, here(), options_.chunk, deadline);
        const auto allocate = [&] {
            words_ = std::make_unique<std::uint64_t[]>(outer.size() + 1);
            counts_.resize(here());
            chunks_.resize(std::max(options.depth, 2U));
            for (chunk& c : chunks_) c = {static_cast<std::byte*>(pinned.allocate(chunk_bytes(), alignment)), {}, 0};
        };
        detail::make_on_all(
            outer, allocate, [this] { give_memory_back(); }, deadline);
    }
    two_level_devices(const two_level_devices&) = delete;
    two_level_devices& operator=(const two_level_devices&) = delete;
    /// Waits for all enqueued work. Keeps pinned memory that `outer` may still use after a fault.
    ~two_level_devices() {
        for (auto& c : chunks_)
            for (auto& p : c.last) (void)p.wait(never);
        if (in_use_)
            (void)words_.release();
        else
            give_memory_back();
    }

    /// The number of ranks in all processes.
    [[nodiscard]] std::uint32_t size() const noexcept { return ranks_.size(); }
    /// The number of this process's first rank among all ranks.
    [[nodiscard]] std::uint32_t first() const noexcept { return ranks_.first(outer_.rank()); }
    /// The first fault, if there was one.
    [[nodiscard]] const collective_fault& fault() const noexcept { return fault_; }
    /// The bytes that all devices here have copied so far, to the host and back.
    [[nodiscard]] bytes copied() const noexcept { return copied_; }

    /// Combines `count` elements of ins[r] of all ranks of all processes into outs[r], which may be
    /// the same array. Integers have no average. Returns once all work is enqueued; work that is
    /// enqueued later on a rank's stream finds the result. Waits for the devices and for the other
    /// processes, so these must not wait for the caller.
    ///
    /// If a rank is late, here or in another process, returns a fault that names the rank or, if
    /// only the process is known, the process's first rank. After a fault, outputs have unspecified
    /// content, and later calls return the fault again. Work that was enqueued before the fault
    /// still uses the arrays: wait for the streams before you free them. An exception, such as a
    /// stream's error or std::bad_alloc, becomes a fault of this process's first rank.
    ///
    /// Two faults end only this call, before any work is enqueued: errc::capturing if a stream is
    /// captured, and errc::invalid_specification for another number of arrays.
    template <movable_on_devices T, class Op>
    requires reducible<T> &&(!detail::has_finish<Op> || !std::integral<T>) [[nodiscard]] collective_fault
        all_reduce(std::span<const T* const> ins, std::span<T* const> outs, std::size_t count, const Op& op,
                   instant deadline = never) {
        if (fault_) return fault_;
        if (ins.size() != here() || outs.size() != here()) return named(errc::invalid_specification);
        for (const Stream& s : streams_)
            if (detail::is_captured(s)) return named(errc::capturing);
        try {
            return detail::by_levels<T>(ranks_, op, [&](const auto& inside, const auto& between, const auto& at_end) {
                const auto word = detail::call_word<T>(collective_kind::all_reduce, count, detail::op_id<Op>());
                return reduce_chunks<T>(ins, outs, count, inside, between, at_end, word, deadline);
            });
        } catch (...) {
            return stream_failed(detail::code_thrown());
        }
    }
    /// Compares a number of each process, such as a digest of the data to combine. If the numbers
    /// differ, the fault is errc::mismatch and names the first rank of a process whose number isn't
    /// the most common number. With two processes, the fault names the second process. Otherwise
    /// works like all_reduce, without the devices.
    [[nodiscard]] collective_fault agree_on(std::uint64_t number, instant deadline = never) {
        if (fault_) return fault_;
        try {
            return agree(number, deadline);
        } catch (...) {
            return stream_failed(detail::code_thrown());
        }
    }
    /// all_reduce as an engine of device_buckets, with `patience` for each call. See fault().
    [[nodiscard]] auto engine(ns patience = ns::max()) {
        return [this, patience]<class T, class Op>(std::span<const T* const> ins, std::span<T* const> outs,
                                                   std::size_t count, Op op) -> errc {
            return this
                ->template all_reduce<T>(ins, outs, count, op,
                                         saturating_add(std::chrono::steady_clock::now(), patience))
                .code;
        };
    }
    /// Combines the buckets of torch_device_ranks (torch_gradients.hpp) on these streams.
    /// The buckets' gradients must be adjacent, since the combiner doesn't pack. Each call waits up
    /// to `patience` for the other processes. One thread at a time calls the members, except for
    /// interrupt().
    class combiner_type {
    public:
        /// Combines over the devices of `of`.
        combiner_type(two_level_devices& of, ns patience) : of_(&of), patience_(patience) {}

        /// Enqueues the buckets that are ready.
        template <template <class...> class Buckets, class T, class... More>
        [[nodiscard]] errc operator()(Buckets<T, More...>& buckets) const {
            const std::vector<T*> no_staging(of_->here());
            return buckets.advance(of_->streams_, no_staging, of_->engine(patience_));
        }
        /// Compares a number of each process: see two_level_devices::agree_on.
        [[nodiscard]] collective_fault agree_on(std::uint64_t number) const {
            return of_->agree_on(number, saturating_add(std::chrono::steady_clock::now(), patience_));
        }
        /// Takes a fault of a rank here, which fault() returns from now on, and tells the other
        /// processes without waiting for them. Does nothing after an earlier fault. The other
        /// processes learn of errc::stopped only over a leaving_transport, and then finish the
        /// steps in which this process has taken part.
        void end(errc why, std::uint32_t rank) const {
            if (of_->fault_) return;
            if (why == errc::stopped)
                of_->leave(first() + rank);
            else
                of_->give_up(why, first() + rank);
            of_->fault_ = {why, what, first() + rank, 0};
        }
        /// Ends the current calls of all processes, including a call of another thread here, with a
        /// fault of a rank here. Doesn't wait. Any thread may call interrupt().
        void interrupt(errc why, std::uint32_t rank) const noexcept { of_->abort(first() + rank, why); }
        /// The first fault, if there was one.
        [[nodiscard]] collective_fault fault() const noexcept { return of_->fault_; }
        /// The number of this process's first rank among all ranks.
        [[nodiscard]] std::uint32_t first() const noexcept { return of_->first(); }

    private:
        two_level_devices* of_;
        ns patience_;
    };
    /// See combiner_type. With ns::max(), a wait for a process that hangs ends only when a fault is
    /// reported.
    [[nodiscard]] combiner_type combiner(ns patience = std::chrono::minutes(10)) noexcept { return {*this, patience}; }
    /// Ends the collectives of all processes, and names `rank`, a number among all ranks. Doesn't
    /// wait. Any thread may call abort().
    void abort(std::uint32_t rank, errc why) noexcept {
        // release: a thread that finds the members closed reads the fault.
        aborted_.store(collective_fault{why, what, rank, 0}.packed(), std::memory_order_release);
        members_[0].close({why, what, 0, 0});
        outer_.abort(outer_.size() + rank, why);
    }

private:
    using point = typename Stream::point;
    static constexpr std::size_t alignment = 256;

    /// A chunk under way. Its memory holds this process's sum and then the sum of all processes.
    /// The lengths of the ranks' parts follow the sum.
    struct chunk {
        std::byte* memory = nullptr;
        std::vector<point> last{};  // of each stream, behind the chunk's work
        std::size_t elements = 0;   // for which the lengths were computed
    };

    [[nodiscard]] std::uint32_t here() const noexcept { return static_cast<std::uint32_t>(members_.size()); }
    [[nodiscard]] Stream& stream_of(std::uint32_t r) const noexcept { return streams_[streams_.size() == 1 ? 0 : r]; }
    /// The most bytes that a chunk's elements take, of any type.
    [[nodiscard]] std::size_t room() const noexcept {
        constexpr std::size_t widest = sizeof(std::uint64_t);
        const std::size_t least = std::size_t{64} * ranks_.largest() * widest;  // 64 per rank
        return std::max<std::size_t>((options_.chunk.count() + widest - 1) / widest * widest, least);
    }
    [[nodiscard]] std::size_t chunk_bytes() const noexcept { return room() + here() * sizeof(std::uint64_t); }
    [[nodiscard]] std::uint64_t* lengths(const chunk& c) const noexcept {
        return reinterpret_cast<std::uint64_t*>(c.memory + room());
    }
    void give_memory_back() {
        for (chunk& c : chunks_)
            if (c.memory != nullptr) (void)pinned_.deallocate(c.memory, chunk_bytes(), alignment);
    }
    [[nodiscard]] element_range part(std::size_t elements, std::uint32_t r) const noexcept {
        return shard_of(elements, r, here(), std::size_t{64});
    }

    /// Tells the other processes that this process makes no more calls, if the transport can be
    /// left.
    void leave(std::uint32_t rank) {
        if constexpr (leaving_transport<Outer>) outer_.leave(outer_.size() + rank, errc::stopped);
    }
    void give_up(errc why, std::uint32_t rank) {
        abort(rank, why);
        in_use_ = detail::gives_up(outer_) || in_use_;
    }

    template <class T, class Inside, class Between, class End>
    [[nodiscard]] collective_fault reduce_chunks(std::span<const T* const> ins, std::span<T* const> outs,
                                                 std::size_t count, const Inside& inside, const Between& between,
                                                 const End& at_end, std::uint64_t word, instant deadline) {
        const std::size_t each = detail::elements_of_a_chunk<T>(options_.chunk, ranks_);
        const std::size_t n = (count + each - 1) / each, depth = chunks_.size();
        const auto range = [&](std::size_t k) { return element_range{k * each, std::min(count, (k + 1) * each)}; };
        detail::outer_reduces<Outer> under_way{outer_};
        arrays<T> a{ins, outs, std::vector<std::span<const T>>(here()), std::vector<std::span<T>>(here())};
        if (n == 0) return agree(word, deadline);
        for (std::size_t k = 0; k < n + depth; ++k) {
            if (k >= depth) {
                if (const auto f = under_way.finish(deadline)) return outer_failed(f);
                at_end(summed<T>(k - depth, range(k - depth).size()));
                if (const auto f = give_back(chunks_[k % depth], a, range(k - depth))) return f;
            }
            if (k < n)
                if (const auto f = bring(chunks_[k % depth], a, range(k), inside, deadline)) return f;
            if (k == 1)
                if (const auto f = agree(word, deadline)) return f;
            if (k >= 1 && k <= n) {
                if (const auto f = await(chunks_[(k - 1) % depth], deadline)) return f;
                under_way.start(summed<T>(k - 1, range(k - 1).size()), between, deadline);
            }
        }
        return {};
    }

    template <class T>
    [[nodiscard]] std::span<T> summed(std::size_t k, std::size_t elements) const noexcept {
        return {reinterpret_cast<T*>(chunks_[k % chunks_.size()].memory), elements};
    }
    /// The arrays of a call, in the form that collectives on streams take.
    template <class T>
    struct arrays {
        std::span<const T* const> ins;
        std::span<T* const> outs;
        std::vector<std::span<const T>> from{};
        std::vector<std::span<T>> to{};
    };

    /// Enqueues the reduce-scatter: each rank combines its part of the chunk in its output, and
    /// copies the part to the host.
    template <class T, class Op>
    [[nodiscard]] collective_fault bring(chunk& c, arrays<T>& a, const element_range& at, const Op& op,
                                         instant deadline) {
        if (const auto f = divide(c, at.size(), deadline)) return f;
        for (std::uint32_t r = 0; r < here(); ++r) {
            const element_range mine = part(at.size(), r);
            a.from[r] = {a.ins[r] + at.begin, at.size()};
            a.to[r] = {a.outs[r] + at.begin + mine.begin, mine.size()};
        }
        if (const errc code = submit(detail::reduce_scatterv_call<T, Op>{{a.from, a.to, counts_}, op});
            code != errc::none)
            return stream_failed(code);
        for (std::uint32_t r = 0; r < here(); ++r)
            copy(r, c.memory + part(at.size(), r).begin * sizeof(T), a.to[r].data(), a.to[r].size_bytes());
        enqueued(c);
        return {};
    }
    /// Enqueues the all-gather: each rank copies its part of the chunk from the host, and gathers
    /// all parts.
    template <class T>
    [[nodiscard]] collective_fault give_back(chunk& c, arrays<T>& a, const element_range& at) {
        std::fill(counts_.begin(), counts_.end(), lengths(c));
        for (std::uint32_t r = 0; r < here(); ++r) {
            const element_range mine = part(at.size(), r);
            T* const out = a.outs[r] + at.begin;
            copy(r, out + mine.begin, c.memory + mine.begin * sizeof(T), mine.size() * sizeof(T));
            a.from[r] = {out + mine.begin, mine.size()};
            a.to[r] = {out, at.size()};
        }
        if (const errc code = submit(detail::all_gatherv_call<T>{{a.from, a.to, counts_}}); code != errc::none)
            return stream_failed(code);
        enqueued(c);
        return {};
    }
    template <class Call>
    [[nodiscard]] errc submit(const Call& call) {
        return detail::submit_on(gangs_, devices_, streams_, members_, call, launches_);
    }
    void copy(std::uint32_t r, void* to, const void* from, std::size_t size) {
        if (size != 0) stream_of(r).copy(to, from, size);
        copied_ += bytes{size};
    }
    void enqueued(chunk& c) {
        c.last.clear();
        for (Stream& s : streams_) c.last.push_back(s.record());
    }
    /// Sets the lengths of the parts. First waits until the devices no longer read earlier lengths.
    [[nodiscard]] collective_fault divide(chunk& c, std::size_t elements, instant deadline) {
        std::fill(counts_.begin(), counts_.end(), lengths(c));
        if (c.elements == elements) return {};
        if (const auto f = await(c, deadline)) return f;
        for (std::uint32_t r = 0; r < here(); ++r) lengths(c)[r] = part(elements, r).size();
        c.elements = elements;
        return {};
    }
    /// Waits until the chunk's enqueued work is done. Meanwhile the transport makes progress.
    [[nodiscard]] collective_fault await(const chunk& c, instant deadline) {
        for (std::uint32_t r = 0; r < c.last.size(); ++r) {  // the only stream's rank is 0
            const point& p = c.last[r];
            for (auto now = std::chrono::steady_clock::now();
                 !p.reached() && now < deadline && !p.wait(std::min(deadline, now + poll));
                 now = std::chrono::steady_clock::now()) {
                if constexpr (pipelined_transport<Outer>) outer_.advance();
                if (const auto f = detail::fault_so_far(outer_)) return others_failed(f);
            }
            if (!p.wait(deadline)) {
                members_[0].close({errc::deadline_exceeded, what, 0, 0});
                return local_failed({errc::deadline_exceeded, what, 0, 0, true});
            }
            if (const auto f = members_[0].fault()) return local_failed(f);
            if (p.status() != errc::none) return local_failed({p.status(), what, r, 0});
        }
        return {};
    }

    /// Compares the calls of all processes.
    [[nodiscard]] collective_fault agree(std::uint64_t word, instant deadline) {
        // `words` and `own` aren't on the stack, because after a fault the transport may still
        // touch them.
        const std::span<std::uint64_t> words(words_.get(), outer_.size());
        std::uint64_t& own = words_[outer_.size()] = word;
        if (const auto f = outer_.all_gather(std::span<const std::uint64_t>(&own, 1), words, deadline))
            return outer_failed(f);
        const auto odd = detail::odd_one(words);
        if (!odd) return {};
        // Other processes may have noticed the mismatch by what followed the words. The transport
        // decides which rank all of them name.
        outer_.abort(outer_.size() + ranks_.first(*odd), errc::mismatch);
        collective_fault f = outer_.barrier(std::chrono::steady_clock::now());
        if (!f) f = {errc::mismatch, what, *odd, 0};
        f.what = what;
        return outer_failed(f);
    }
    [[nodiscard]] collective_fault named(errc code) const noexcept { return {code, what, first(), 0}; }
    /// Takes a fault that numbers ranks within this process, and tells the other processes.
    [[nodiscard]] collective_fault local_failed(collective_fault f) {
        const std::uint64_t asked = aborted_.load(std::memory_order_acquire);
        f.rank += first();
        if (asked != 0) f = collective_fault::unpacked(asked);
        outer_.abort(outer_.size() + f.rank, f.code);
        in_use_ = detail::gives_up(outer_) || in_use_;
        return fault_ = f;
    }
    /// Ends the group because, for example, a stream has refused a copy. Work that streams took
    /// before still uses the chunks.
    [[nodiscard]] collective_fault stream_failed(errc code) {
        try {
            enqueued(chunks_.front());  // behind all work that is enqueued for any chunk
        } catch (const std::exception&) {
            in_use_ = true;
        }
        return local_failed({code, what, 0, 0});
    }
    [[nodiscard]] collective_fault outer_failed(collective_fault f) {
        in_use_ = in_use_ || f.buffers_in_use;
        f.rank = detail::named_rank(ranks_, f.rank);
        return fault_ = f;
    }
    /// Takes over a fault of another process, and ends the work of the devices here.
    [[nodiscard]] collective_fault others_failed(collective_fault f) {
        members_[0].close({f.code, what, 0, 0});
        f.buffers_in_use = detail::gives_up(outer_);
        f.what = what;
        return outer_failed(f);
    }

    static constexpr auto what = collective_kind::all_reduce;
    static constexpr ns poll = std::chrono::microseconds(50);

    Gangs& gangs_;
    std::span<const device_id> devices_;
    std::span<Stream> streams_;
    std::span<const member> members_;
    Outer& outer_;
    Pinned& pinned_;
    two_level_options options_;
    launch_options launches_;
    detail::ranks_of_processes ranks_{};
    // a word for each process, and this process's word once more
    std::unique_ptr<std::uint64_t[]> words_;
    std::vector<const std::uint64_t*> counts_;
    std::vector<chunk> chunks_;
    collective_fault fault_{};
    std::atomic<std::uint64_t> aborted_{0};  // the fault of abort(), packed
    bool in_use_ = false;
    bytes copied_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
