// SPDX-License-Identifier: Apache-2.0
// Collectives between processes over an MPI (OpenMPI, MPICH), as a transport of gradient/. The MPI
// moves bytes, and the transport combines elements, in the order of ranks and in float or wider. So
// an all-reduce gives the same bits as between threads, 16-bit numbers aren't rounded at each step,
// and every operator and type of collective/ works.
//
//   MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
//   gpushare::mpi_transport net(MPI_COMM_WORLD);
//   if (auto fault = net.all_reduce<float>(gradient, gradient, gpushare::average{}, deadline)) ...  // names the rank
//
// If several threads have transports, such as those of gradient_buckets on several channels, they
// need MPI_THREAD_MULTIPLE. Ask for this level in mpi_options::threads, which the constructor
// compares with the MPI's level.
//
//   gpushare::mpi_transport several(MPI_COMM_WORLD, {.threads = MPI_THREAD_MULTIPLE});
//
// Large arrays are sent in chunks, with a message to each process and several chunks under way at
// once. Each process combines its part of each chunk and sends the result to all processes, which
// is the least traffic on a link. A transport has no thread, so there is no progress between calls;
// advance() makes progress.
//
// If a process dies or hangs, each process that waits for it gives up at the deadline and tells the
// others. All processes that answer then name the same process that doesn't answer. Without a
// deadline the wait has no end, unless the MPI itself reports the death. MPI_Finalize may hang
// after a death, so leave by MPI_Abort or std::_Exit. shrink() makes a transport of the remaining
// processes. (OpenMPI's launcher ends all processes when one dies, unless it gets
// --enable-recovery.) The header is empty without an MPI.
#pragma once

#if __has_include(<mpi.h>)

#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/mpi_calls.hpp>
#include <gpushare/gradient/detail/mpi_pace.hpp>
#include <gpushare/gradient/detail/mpi_pairs.hpp>
#include <gpushare/gradient/detail/mpi_requests.hpp>
#include <gpushare/gradient/detail/mpi_suspects.hpp>
#include <gpushare/gradient/detail/mpi_transfer.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How arrays are cut into messages.
struct mpi_options {
    /// The bytes of one message, if an array goes to a process in several messages. MPIs send a
    /// message of the default size without a rendezvous. A rendezvous would wait behind other
    /// arrays' bytes while the link idles.
    bytes message{56 << 10};
    std::uint32_t depth = 16;  ///< messages of one array under way to each process
    /// Arrays up to this size, or up to 256 bytes, go to all ranks at once. No message is received
    /// in such an array, so it may be on the stack: a late message would write there after a fault.
    bytes one_shot{4096};
    ns grace = std::chrono::milliseconds(200);  ///< how long a rank that gives up waits for answers
    /// The thread level for which the MPI must have been initialised. With MPI_THREAD_SERIALIZED,
    /// the embedder lets one thread at a time call the MPI. With MPI_THREAD_MULTIPLE, several
    /// threads call the MPI at once. With MPI_THREAD_FUNNELED, only the main thread calls the MPI,
    /// and makes the transport.
    int threads = MPI_THREAD_SERIALIZED;
};

/// A process of an MPI communicator: a pipelined transport. The object can't be moved. One thread
/// at a time makes, uses and destroys it. Any thread may call `abort`, which reaches the other
/// processes with the next call, such as `advance`, of the thread that uses the transport.
class mpi_transport {
public:
    static constexpr bool rank_ordered = true;    ///< see transport
    static constexpr bool in_host_memory = true;  ///< see transport

    /// Duplicates `all`, so that the transport's messages don't mix with others. Collective. Throws
    /// operation_error: errc::not_supported, before it sends any message, if the MPI isn't
    /// initialised or doesn't have the level options.threads; errc::backend_failed. May throw
    /// std::bad_alloc, which ends the other ranks' calls, as an exception of any later call does.
    explicit mpi_transport(MPI_Comm all, const mpi_options& options = {})
        : mpi_transport(duplicate_of(all, options.threads), options) {}
    mpi_transport(const mpi_transport&) = delete;
    mpi_transport& operator=(const mpi_transport&) = delete;
    /// Not collective. Doesn't free a communicator that has failed, because other processes may
    /// never free theirs. If the destructor runs during a collective or because of an exception, it
    /// tells the other processes (errc::aborted, with this rank).
    ~mpi_transport() {
        int over = 0, left = 0;  // left: whether a message from ranks that gave up is unread
        if (MPI_Finalized(&over); over != 0) return;
        // Unread notices of other ranks may still be here.
        const bool others_gave_up = hear() || !farewells_.none();
        const bool halfway = std::any_of(jobs_.begin(), jobs_.end(), [](const job& j) { return !j.done; });
        if (!others_gave_up && (halfway || std::uncaught_exceptions() > exceptions_))
            fail({errc::aborted, collective_kind::none, rank_, epoch_});
        give_up_requests();
        // MPICH 5 can't free a communicator that has unread messages.
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_, &left, MPI_STATUS_IGNORE);
        MPI_Cancel(&notice_request_);
        MPI_Wait(&notice_request_, MPI_STATUS_IGNORE);
        if (!fault_ && !others_gave_up && left == 0) MPI_Comm_free(&comm_);
    }

    [[nodiscard]] std::uint32_t rank() const noexcept { return rank_; }  ///< from 0
    /// The number of processes.
    [[nodiscard]] std::uint32_t size() const noexcept { return size_; }
    [[nodiscard]] bytes carried() const noexcept { return carried_; }  ///< see transport
    /// Bytes sent to other processes, without headers.
    [[nodiscard]] bytes sent() const noexcept { return sent_; }
    /// The fault of the first call that failed; no fault until then.
    [[nodiscard]] const collective_fault& fault() const noexcept { return fault_; }

    /// See transport. Op must not have state.
    template <reducible T, class Op>
    requires std::is_empty_v<Op>
    [[nodiscard]] collective_fault all_reduce(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                              const Op& op, instant deadline) {
        if (in.size() != out.size()) return {errc::mismatch, collective_kind::all_reduce, rank_, epoch_};
        return telling([&] { return finish(start(in.data(), out, op), deadline); });
    }
    /// See pipelined_transport. At most 1000 collectives may run at once, with at most as many
    /// bytes as docs/gradients.md says ("What isn't there").
    template <reducible T, class Op>
    requires std::is_empty_v<Op>
    [[nodiscard]] std::uint64_t start_all_reduce(std::span<T> data, const Op& op) {
        return telling([&] { return start(data.data(), data, op); });
    }
    /// See pipelined_transport. Throws operation_error (errc::mismatch) if the array doesn't
    /// consist of size() parts.
    template <reducible T, class Op>
    requires std::is_empty_v<Op>
    [[nodiscard]] std::uint64_t start_reduce_scatter(std::span<T> data, const Op& op) {
        const std::span<T> mine = part_of(data);
        return telling([&] { return start_scatter(data.data(), mine, op); });
    }
    /// See pipelined_transport. Throws as start_reduce_scatter.
    template <class T>
    requires std::is_trivially_copyable_v<T>
    [[nodiscard]] std::uint64_t start_all_gather(std::span<T> data) {
        const std::size_t mine = part_of(data).size();
        return telling([&] { return start_gather(mine, data); });
    }
    /// See transport.
    template <reducible T, class Op>
    requires std::is_empty_v<Op>
    [[nodiscard]] collective_fault reduce_scatter(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                                  const Op& op, instant deadline) {
        if (in.size() != out.size() * size_) return {errc::mismatch, collective_kind::reduce_scatter, rank_, epoch_};
        return telling([&] { return finish(start_scatter(in.data(), out, op), deadline); });
    }
    /// See transport.
    template <class T>
    requires std::is_trivially_copyable_v<T>
    [[nodiscard]] collective_fault all_gather(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                              instant deadline) {
        if (out.size() != in.size() * size_) return {errc::mismatch, collective_kind::all_gather, rank_, epoch_};
        if (!in.empty()) std::memmove(out.data() + in.size() * rank_, in.data(), in.size_bytes());
        return telling([&] { return finish(start_gather(in.size(), out), deadline); });
    }
    /// See unequal_transport.
    template <reducible T, class Op>
    requires std::is_empty_v<Op>
    [[nodiscard]] collective_fault reduce_scatterv(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                                   std::span<const std::uint64_t> counts, const Op&, instant deadline) {
        constexpr auto what = collective_kind::reduce_scatter;
        carried_ += bytes{in.size_bytes()};
        if (!parts_fit(counts, out.size(), in.size())) return refuse(what);
        const auto sign = signature<T>(what, detail::unequal_parts{counts.data(), size_}.layout(), detail::op_id<Op>(),
                                       of_unequal_parts);
        const auto slice = [&](std::size_t at, std::vector<element_range> parts) {
            return detail::mpi_transfer::scatter_parts(as_bytes(in.data()), as_bytes(out.data()) + at, std::move(parts),
                                                       &detail::combine_mpi_parts<T, Op>);
        };
        return telling([&] { return finish(in_unequal_slices<T>(begin_job(what), sign, counts, slice), deadline); });
    }
    /// See unequal_transport.
    template <class T>
    requires std::is_trivially_copyable_v<T>
    [[nodiscard]] collective_fault all_gatherv(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                               std::span<const std::uint64_t> counts, instant deadline) {
        constexpr auto what = collective_kind::all_gather;
        carried_ += bytes{in.size_bytes()};
        if (!parts_fit(counts, in.size(), out.size())) return refuse(what);
        const detail::unequal_parts all{counts.data(), size_};
        if (const std::size_t mine = counts[rank_]; mine != 0)
            std::memmove(out.data() + all.begin(rank_), in.data(), mine * sizeof(T));
        const auto sign = signature<T>(what, all.layout(), 0, of_unequal_parts);
        const auto slice = [&](std::size_t, std::vector<element_range> parts) {
            return detail::mpi_transfer::gather_parts(as_bytes(out.data()), std::move(parts));
        };
        return telling([&] { return finish(in_unequal_slices<T>(begin_job(what), sign, counts, slice), deadline); });
    }
    /// See unequal_transport. The processes first tell each other all lengths, so that all of them
    /// learn which pair disagrees.
    template <class T>
    requires std::is_trivially_copyable_v<T>
    [[nodiscard]] collective_fault all_to_allv(std::span<const std::type_identity_t<T>> in,
                                               std::span<const std::uint64_t> sends, std::span<T> out,
                                               std::span<const std::uint64_t> receives, instant deadline) {
        constexpr auto what = collective_kind::all_to_all;
        carried_ += bytes{in.size_bytes()};
        if (sends.size() != size_ || receives.size() != size_ || (in.data() == out.data() && !in.empty()) ||
            !detail::unequal_parts{sends.data(), size_}.fit(in.size()) ||
            !detail::unequal_parts{receives.data(), size_}.fit(out.size()))
            return refuse(what);
        return telling([&]() -> collective_fault {
            detail::mpi_pairs pairs(sends, receives);
            if (const auto f = agree_on_pairs(signature<T>(what, 0, 0, of_unequal_parts), pairs, deadline)) return f;
            pairs.copy_own(rank_, as_bytes(in.data()), as_bytes(out.data()), sizeof(T));
            job& j = begin_job(what);
            const std::size_t slice = elements_of_a_slice(sizeof(T));
            for (std::size_t at = 0; at < pairs.largest(); at += slice)
                j.transfers.push_back(detail::mpi_transfer::exchange_parts(
                    as_bytes(in.data()), as_bytes(out.data()), pairs.slice(pairs.sends(rank_), at, slice, sizeof(T)),
                    pairs.slice(pairs.receives(rank_), at, slice, sizeof(T))));
            return finish(enter(j, signature<T>(what, pairs.largest(), 0, of_unequal_parts)), deadline);
        });
    }
    /// See transport.
    template <class T>
    requires std::is_trivially_copyable_v<T>
    [[nodiscard]] collective_fault broadcast(std::span<T> data, std::uint32_t root, instant deadline) {
        carried_ += bytes{data.size_bytes()};
        if (root >= size_) return {errc::mismatch, collective_kind::broadcast, rank_, epoch_};
        const auto slice = [&](auto at, auto n) {
            return detail::mpi_transfer::from_root(as_bytes(data.data()) + at, n, root);
        };
        const auto sign = signature<T>(collective_kind::broadcast, data.size(), 0, root);
        return telling([&] {
            job& j = begin_job(collective_kind::broadcast);
            j.transfers.push_back(detail::mpi_transfer::agreement(sign));
            return finish(in_slices(j, data.size_bytes(), sizeof(T), sign, slice), deadline);
        });
    }
    /// See neighbour_transport.
    template <class T>
    requires std::is_trivially_copyable_v<T>
    [[nodiscard]] collective_fault exchange(std::span<const std::type_identity_t<T>> in,
                                            std::span<const std::uint32_t> neighbours, std::span<T> out,
                                            instant deadline) {
        carried_ += bytes{in.size_bytes()};
        bool good = out.size() == in.size() * neighbours.size();
        for (const std::uint32_t q : neighbours) good = good && q < size_ && q != rank_;
        if (!good) return {errc::mismatch, collective_kind::all_gather, rank_, epoch_};
        const auto slice = [&](auto at, auto n) {
            return detail::mpi_transfer::exchange(as_bytes(in.data()) + at, as_bytes(out.data()) + at, n,
                                                  in.size_bytes(), neighbours);
        };
        const auto sign = signature<T>(collective_kind::all_gather, in.size(), exchanging, 0);
        return telling([&] {
            job& j = begin_job(collective_kind::all_gather);
            j.transfers.push_back(detail::mpi_transfer::agreement(sign, neighbours));
            return finish(in_slices(j, in.size_bytes(), sizeof(T), sign, slice), deadline);
        });
    }
    /// See transport.
    [[nodiscard]] collective_fault barrier(instant deadline) {
        const auto sign = signature<std::byte>(collective_kind::barrier, 0, 0, 0);
        return telling([&] {
            job& j = begin_job(collective_kind::barrier);
            j.transfers.push_back(detail::mpi_transfer::agreement(sign));
            return finish(enter(j, sign), deadline);
        });
    }

    /// See pipelined_transport.
    void advance() {
        take_notices();
        telling([&] { progress(); });
    }
    /// See pipelined_transport.
    [[nodiscard]] collective_fault finish(std::uint64_t ticket, instant deadline) {
        return telling([&] { return wait_for(ticket, deadline); });
    }

    /// See transport.
    void abort(std::uint32_t rank, errc why) noexcept {
        std::uint64_t none = 0;
        // acq_rel: of several faults, the first one counts.
        asked_.compare_exchange_strong(none, collective_fault{why, collective_kind::none, rank, 0}.packed(),
                                       std::memory_order_acq_rel);
    }

    /// See leaving_transport.
    void leave(std::uint32_t rank, errc why) noexcept {
        if (fault_) return;
        fault_ = {why, collective_kind::none, rank, epoch_};
        told_ = detail::mpi_farewells::notice(fault_, static_cast<std::uint32_t>(first_job_ + jobs_.size()));
        tell_others();
        let_go();
    }

    /// A new transport of the ranks that aren't in `dead`. These ranks continue with it after a
    /// fault. All of them call shrink(), and no other ranks do. Throws operation_error
    /// (errc::backend_failed), and std::bad_alloc, of which the other ranks' new transports learn.
    [[nodiscard]] std::unique_ptr<mpi_transport> shrink(std::span<const std::uint32_t> dead) {
        const owned made{detail::mpi_without(comm_, dead)};
        void* const room = room_over(made);
        try {
            return std::unique_ptr<mpi_transport>(::new (room) mpi_transport(made, options_));
        } catch (...) {
            ::operator delete(room);
            throw;
        }
    }

private:
    struct owned {
        MPI_Comm comm;
    };
    using job = detail::mpi_job;
    static constexpr bytes least_one_shot{256};
    // stands for an exchange, in place of an operator
    static constexpr std::uint32_t exchanging = 1;
    // stands for unequal parts, in place of a root
    static constexpr std::uint32_t of_unequal_parts = 1;

    [[nodiscard]] static owned duplicate_of(MPI_Comm all, int threads) {
        detail::need_mpi_threads(threads);
        owned made{MPI_COMM_NULL};
        if (MPI_Comm_dup(all, &made.comm) != MPI_SUCCESS)
            raise({.code = errc::backend_failed}, {}, "duplicating an MPI communicator");
        return made;
    }
    /// The members may throw, too: a deque allocates. All ranks have their duplicates by then.
    mpi_transport(owned comm, const mpi_options& options) try : options_(options), comm_(comm.comm) {
        begin();
    } catch (...) {
        refuse_to_begin(comm.comm, detail::code_thrown());
    }

    /// Memory for a transport over `comm`. The constructor tells the other ranks that it throws, so
    /// this function does, too.
    [[nodiscard]] static void* room_over(owned comm) {
        try {
            return ::operator new(sizeof(mpi_transport));
        } catch (...) {
            refuse_to_begin(comm.comm, detail::code_thrown());
            throw;
        }
    }

    /// Makes a call. An exception, such as std::bad_alloc, ends the calls of all ranks, and then
    /// propagates. The other ranks would otherwise wait for messages that never come.
    template <class F>
    std::invoke_result_t<const F&> telling(const F& call) {
        try {
            return call();
        } catch (...) {
            fail({detail::code_thrown(), collective_kind::none, rank_, epoch_});
            throw;
        }
    }
    [[nodiscard]] collective_fault wait_for(std::uint64_t ticket, instant deadline) {
        if (ticket < first_job_) return fault_;  // done while this thread waited for other calls
        const auto at = static_cast<std::size_t>(ticket - first_job_);
        pace_.begin(std::chrono::steady_clock::now());
        advance();
        for (std::uint32_t turn = 0; !fault_ && !jobs_[at].done; ++turn, progress()) {
            const instant now = std::chrono::steady_clock::now();
            if (turn % 8 == 7) take_notices();
            if (turn % 64 == 63) look_for_others_calls();
            if (fault_) break;
            if (now < deadline)
                detail::rest_for(pace_.rest(now));
            else
                fail({errc::deadline_exceeded, jobs_[at].what, jobs_[at].waits_for(), epoch_});
        }
        pace_.end();
        if (!fault_)
            for (; !jobs_.empty() && jobs_.front().done; ++first_job_) jobs_.pop_front();
        return fault_;
    }

    void begin() {
        MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
        int rank = 0, size = 0;
        MPI_Comm_rank(comm_, &rank);
        MPI_Comm_size(comm_, &size);
        rank_ = static_cast<std::uint32_t>(rank);
        size_ = static_cast<std::uint32_t>(size);
        suspects_ = detail::mpi_suspects(size_);
        notices_.assign(size_, MPI_REQUEST_NULL);
        options_.depth = std::max(options_.depth, 1U);
        // An MPI counts bytes in an int.
        options_.message = std::min(options_.message, bytes{std::uint64_t{1} << 30});
        options_.one_shot = std::max(std::min(options_.one_shot, options_.message), least_one_shot);
        int there = 0;
        const int* last_tag = nullptr;
        MPI_Comm_get_attr(comm_, MPI_TAG_UB, &last_tag, &there);
        // The standard guarantees 32767.
        tags_ = detail::mpi_transfer::numbering(there != 0 ? *last_tag : 32767);
        listen();
    }
    /// Tells the other ranks that this rank has no transport. The sends block, because the word
    /// ends with this call; each of the others receives the word once it has its transport.
    static void refuse_to_begin(MPI_Comm comm, errc why) noexcept {
        int rank = 0, size = 0;
        MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
        MPI_Comm_rank(comm, &rank);
        MPI_Comm_size(comm, &size);
        const collective_fault f{why, collective_kind::none, static_cast<std::uint32_t>(rank), 0};
        const std::uint64_t word = f.packed();
        for (int r = 0; r < size; ++r)
            if (r != rank) MPI_Send(&word, sizeof word, MPI_BYTE, r, detail::mpi_transfer::notice_tag, comm);
    }
    void listen() noexcept {
        MPI_Irecv(&heard_, sizeof heard_, MPI_BYTE, MPI_ANY_SOURCE, detail::mpi_transfer::notice_tag, comm_,
                  &notice_request_);
    }

    template <class P>
    [[nodiscard]] static auto as_bytes(P* p) noexcept {
        return reinterpret_cast<std::conditional_t<std::is_const_v<P>, const std::byte, std::byte>*>(p);
    }

    /// The signature of a call, including the options that decide how its messages are cut.
    template <class T>
    [[nodiscard]] std::uint64_t signature(collective_kind what, std::size_t elements, std::uint32_t op,
                                          std::uint32_t root) const noexcept {
        return detail::mixed_word(
            {detail::call_word<T>(what, elements, op, root), options_.message.count(), options_.one_shot.count()});
    }
    [[nodiscard]] job& begin_job(collective_kind what) {
        job& j = jobs_.emplace_back();
        j.what = what;
        ++epoch_;
        return j;
    }
    template <class T, class Op>
    [[nodiscard]] std::uint64_t start(const T* in, std::span<T> out, const Op&) {
        using detail::mpi_transfer;
        carried_ += bytes{out.size_bytes()};
        const auto sign = signature<T>(collective_kind::all_reduce, out.size(), detail::op_id<Op>(), 0);
        constexpr mpi_transfer::combiner by = &detail::combine_mpi_parts<T, Op>;
        job& j = begin_job(collective_kind::all_reduce);
        if (out.size_bytes() <= options_.one_shot.count()) {
            j.transfers.push_back(
                mpi_transfer::one_shot(as_bytes(in), as_bytes(out.data()), out.size_bytes(), sign, by));
            return enter(j, sign);
        }
        j.transfers.push_back(mpi_transfer::agreement(sign));
        const std::size_t chunk = std::max<std::size_t>(options_.message.count() / 64 * 64, 64) * size_;
        for (std::size_t at = 0; at < out.size_bytes(); at += chunk)
            j.transfers.push_back(mpi_transfer::all_reduce(as_bytes(in) + at, as_bytes(out.data()) + at,
                                                           std::min(chunk, out.size_bytes() - at), sizeof(T), by));
        return enter(j, sign);
    }
    template <class T>
    [[nodiscard]] std::span<T> part_of(std::span<T> data) const {
        const std::size_t each = data.size() / size_;
        if (each * size_ != data.size())
            raise({errc::mismatch, data.size(), 0, size_, reason::unequal_parts}, {}, "parts of a collective");
        return data.subspan(rank_ * each, each);
    }
    template <class T, class Op>
    [[nodiscard]] std::uint64_t start_scatter(const T* in, std::span<T> out, const Op&) {
        carried_ += bytes{out.size_bytes() * size_};
        const auto sign = signature<T>(collective_kind::reduce_scatter, out.size(), detail::op_id<Op>(), 0);
        job& j = begin_job(collective_kind::reduce_scatter);
        j.transfers.push_back(detail::mpi_transfer::agreement(sign));
        return in_slices(j, out.size_bytes(), sizeof(T), sign, [&](auto at, auto n) {
            return detail::mpi_transfer::scatter(as_bytes(in) + at, as_bytes(out.data()) + at, n, out.size_bytes(),
                                                 &detail::combine_mpi_parts<T, Op>);
        });
    }
    /// Gathers `each` elements of every rank. This rank's elements are already in their place.
    template <class T>
    [[nodiscard]] std::uint64_t start_gather(std::size_t each, std::span<T> out) {
        using detail::mpi_transfer;
        const std::size_t size = each * sizeof(T);
        carried_ += bytes{size};
        const auto sign = signature<T>(collective_kind::all_gather, each, 0, 0);
        job& j = begin_job(collective_kind::all_gather);
        std::byte* const all = as_bytes(out.data());
        if (size <= options_.one_shot.count()) {
            j.transfers.push_back(mpi_transfer::one_shot(size != 0 ? all + size * rank_ : nullptr, all, size, sign,
                                                         &detail::concatenate_mpi_parts));
            return enter(j, sign);
        }
        j.transfers.push_back(mpi_transfer::agreement(sign));
        return in_slices(j, size, sizeof(T), sign,
                         [&](auto at, auto n) { return mpi_transfer::gather(all + at, n, size); });
    }
    /// How many elements of `unit` bytes a slice has. Slices take at most a message, because a
    /// block may be larger than an MPI can count.
    [[nodiscard]] std::size_t elements_of_a_slice(std::size_t unit) const noexcept {
        return std::max<std::size_t>(options_.message.count() / unit, 1);
    }
    /// Cuts blocks into slices.
    template <class Make>
    [[nodiscard]] std::uint64_t in_slices(job& j, std::size_t all, std::size_t unit, std::uint64_t sign,
                                          const Make& make) {
        const std::size_t slice = elements_of_a_slice(unit) * unit;
        for (std::size_t at = 0; at < all; at += slice) j.transfers.push_back(make(at, std::min(slice, all - at)));
        return enter(j, sign);
    }
    /// Whether there is a count for each rank, `mine` elements hold this rank's part, and `all`
    /// elements hold all parts.
    [[nodiscard]] bool parts_fit(std::span<const std::uint64_t> counts, std::size_t mine,
                                 std::size_t all) const noexcept {
        return counts.size() == size_ && counts[rank_] <= mine && detail::unequal_parts{counts.data(), size_}.fit(all);
    }
    /// Tells the other ranks that this rank can't take part, so that no rank waits for it.
    [[nodiscard]] collective_fault refuse(collective_kind what) noexcept {
        ++epoch_;
        fail({errc::mismatch, what, rank_, epoch_});
        return fault_;
    }
    /// All processes get the lengths of all pairs, and the same fault if a pair disagrees.
    [[nodiscard]] collective_fault agree_on_pairs(std::uint64_t sign, detail::mpi_pairs& pairs, instant deadline) {
        constexpr auto what = collective_kind::all_to_all;
        job& j = begin_job(what);
        j.transfers.push_back(detail::mpi_transfer::one_shot(as_bytes(pairs.mine().data()),
                                                             as_bytes(pairs.all().data()), pairs.mine().size_bytes(),
                                                             sign, &detail::concatenate_mpi_parts));
        if (const auto f = finish(enter(j, sign), deadline)) return f;
        if (const auto odd = pairs.odd_one()) fail({errc::mismatch, what, *odd, epoch_});
        return fault_;
    }
    /// Moves parts of `counts` elements of T, in slices of at most a message. `make(at, parts)`
    /// returns a transfer of one slice of all parts; `at` is the slice's offset in this rank's own
    /// part.
    template <class T, class Make>
    [[nodiscard]] std::uint64_t in_unequal_slices(job& j, std::uint64_t sign, std::span<const std::uint64_t> counts,
                                                  const Make& make) {
        j.transfers.push_back(detail::mpi_transfer::agreement(sign));
        const std::size_t most = *std::max_element(counts.begin(), counts.end()),
                          slice = elements_of_a_slice(sizeof(T));
        for (std::size_t at = 0; at < most; at += slice)
            j.transfers.push_back(make(std::min<std::size_t>(at, counts[rank_]) * sizeof(T),
                                       detail::mpi_pairs::slice(counts, at, slice, sizeof(T))));
        return enter(j, sign);
    }
    [[nodiscard]] std::uint64_t enter(job& j, std::uint64_t sign) {
        for (auto& t : j.transfers) {
            t.number(tags_, next_number_, sign);
            next_number_ = next_number_ + 1 < tags_.numbers ? next_number_ + 1 : 0;
        }
        take_notices();
        const std::uint64_t ticket = first_job_ + jobs_.size() - 1;
        if (!fault_)
            step(j);
        else
            jobs_.pop_back();  // never begins; its ticket only gets the fault
        return ticket;
    }

    /// Takes in the MPI's progress, and advances all jobs.
    void progress() {
        if (fault_) return;
        if (!under_way_.look(jobs_)) return fail({errc::backend_failed, collective_kind::none, rank_, epoch_});
        for (job& j : jobs_)
            if (!fault_) step(j);
    }
    void step(job& j) {
        const auto [code, rank] = j.go_on(comm_, rank_, size_, options_.depth, sent_, pace_);
        if (code != errc::none) fail({code, j.what, rank, epoch_});
    }

    /// Checks whether another rank, or this rank's embedder, has given up.
    void take_notices() noexcept {
        if (fault_) return;
        // acquire: pairs with abort(). The word holds the whole fault.
        if (const std::uint64_t word = asked_.load(std::memory_order_acquire); word != 0)
            return fail(collective_fault::unpacked(word));
        const bool others_gave_up = hear();
        look_for_farewells();
        if (fault_ || !others_gave_up) return;
        look_for_others_calls();  // a mismatch takes precedence over a late rank
        if (!fault_) answer();
    }
    /// Checks whether another rank has made a different call than the call in which this rank
    /// waits.
    void look_for_others_calls() noexcept {
        for (const job& j : jobs_)
            for (std::uint32_t i = 0; i < j.begun && !fault_; ++i)
                if (const auto rank = j.transfers[i].differs_from(comm_)) fail({errc::mismatch, j.what, *rank, epoch_});
    }
    /// Gives up calls in which a rank that has left in order doesn't take part. Doesn't tell the
    /// other ranks, which may still be in that rank's last call, and which hear from that rank
    /// themselves.
    void look_for_farewells() noexcept {
        for (std::size_t i = 0; i < jobs_.size() && !fault_; ++i)
            if (const auto f = farewells_.of(static_cast<std::uint32_t>(first_job_ + i)); f && !jobs_[i].done)
                fault_ = {f.code, jobs_[i].what, f.rank, epoch_, !give_up_requests()};
    }
    /// Whether another rank says that it has given up.
    [[nodiscard]] bool hear() noexcept {
        int there = 0;
        MPI_Status status;
        if (MPI_Test(&notice_request_, &there, &status) != MPI_SUCCESS || there == 0) return false;
        const bool farewell = farewells_.heard(heard_);
        suspects_.heard(static_cast<std::uint32_t>(status.MPI_SOURCE), farewell ? 0 : heard_);
        listen();
        return !farewell;
    }
    /// Gives up because another rank gave up. Names the rank that this rank waits for, if any.
    void answer() noexcept {
        collective_fault own{};
        for (const job& j : jobs_)
            if (!j.done && j.begun != 0) own = {errc::deadline_exceeded, j.what, j.waits_for(), epoch_};
        fail(own);
    }
    /// Tells the other ranks, hears their answers, and names a rank that others wait for and that
    /// doesn't answer. Waits for at most options_.grace.
    void fail(const collective_fault& own) noexcept {
        if (fault_) return;
        fault_ = own;  // set first, so that no call below comes here again
        told_ = own ? own.packed() : 0;
        suspects_.heard(rank_, told_);
        tell_others();
        const instant until = std::chrono::steady_clock::now() + options_.grace;
        for (instant now{}; !suspects_.all_have_answered() && (now = std::chrono::steady_clock::now()) < until;) {
            (void)hear();
            detail::rest_for(pace_.rest(now));
        }
        let_go();
        fault_ = suspects_.chosen();
        fault_.buffers_in_use = !give_up_requests();
    }
    /// Sends `told_` to all other ranks. A transport calls this once at most.
    void tell_others() noexcept {
        for (std::uint32_t r = 0; r < size_; ++r)
            if (r != rank_)
                MPI_Isend(&told_, sizeof told_, MPI_BYTE, static_cast<int>(r), detail::mpi_transfer::notice_tag, comm_,
                          &notices_[r]);
    }
    void let_go() noexcept {
        int sent = 0;
        MPI_Testall(static_cast<int>(size_), notices_.data(), &sent, MPI_STATUSES_IGNORE);
        for (MPI_Request& r : notices_)
            if (r != MPI_REQUEST_NULL) MPI_Request_free(&r);
    }
    /// Gives up all requests. Returns false if the MPI may still touch a buffer.
    bool give_up_requests() noexcept {
        bool all = true;
        for (job& j : jobs_)
            for (std::uint32_t i = 0; i < j.begun; ++i) all = j.transfers[i].cancel() && all;
        return all;
    }

    mpi_options options_;
    MPI_Comm comm_ = MPI_COMM_NULL;
    std::uint32_t rank_ = 0, size_ = 0, epoch_ = 0;
    std::uint32_t next_number_ = 0;
    detail::mpi_transfer::numbering tags_;
    bytes carried_, sent_;
    std::deque<job> jobs_;  // a deque, so that a job keeps its address while others are added
    detail::mpi_requests under_way_;
    std::uint64_t first_job_ = 0;
    // notices: packed faults, or 0 from a rank that only answers
    std::uint64_t told_ = 0, heard_ = 0;
    MPI_Request notice_request_ = MPI_REQUEST_NULL;
    // of this rank's notice to each rank; made early, because a rank without memory gives up, too
    std::vector<MPI_Request> notices_;
    detail::mpi_suspects suspects_;
    detail::mpi_farewells farewells_;
    detail::mpi_pace pace_;
    collective_fault fault_;
    std::atomic<std::uint64_t> asked_{0};
    // exceptions under way when the transport was made
    int exceptions_ = std::uncaught_exceptions();
};
static_assert(pipelined_transport<mpi_transport> && host_transport<mpi_transport> && unequal_transport<mpi_transport> &&
              leaving_transport<mpi_transport>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare

#endif
