// SPDX-License-Identifier: Apache-2.0
// Collectives over a node's devices by NCCL, with the same calls as the functions of
// collective/submit.hpp. Use NCCL for links on which NCCL is faster. Link with -lnccl.
//
//   gpushare::nccl_communicator group{node, devices};
//   auto code = gpushare::submit_all_reduce<float>(node.gangs(), devices, std::span(streams), group, ins, outs, n);
//   streams[0].record().wait(gpushare::never);   auto fault = gpushare::fault_of(group);
//
// Two promises of this library's collectives don't hold with NCCL: the bits may depend on the
// algorithm that NCCL picks for a size, and 16-bit numbers may be rounded after each addition.
// There is no deadline: a watching thread of yours has to call group.abort(). We haven't tested the
// header on several devices yet.
//
// This header is empty if NCCL isn't found.
#pragma once

#if __has_include(<nccl.h>)

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/gang_residents.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/native_queue.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

[[nodiscard]] constexpr errc to_errc(ncclResult_t code) noexcept {
    switch (code) {
        case ncclSuccess: return errc::none;
        case ncclInvalidArgument:
        case ncclInvalidUsage: return errc::invalid_specification;
        case ncclRemoteError: return errc::aborted;  // another rank failed, or the network to it
        case ncclInProgress: return errc::in_flight;
        default: return errc::backend_failed;
    }
}

namespace detail {

template <class T>
[[nodiscard]] constexpr ncclDataType_t nccl_type() noexcept {
    if constexpr (std::same_as<T, float>) return ncclFloat32;
    if constexpr (std::same_as<T, double>) return ncclFloat64;
    if constexpr (std::same_as<T, float16>) return ncclFloat16;
    if constexpr (std::same_as<T, bfloat16>) return ncclBfloat16;
    if constexpr (std::same_as<T, std::int8_t>) return ncclInt8;
    if constexpr (std::same_as<T, std::uint8_t>) return ncclUint8;
    if constexpr (std::same_as<T, std::int32_t>) return ncclInt32;
    if constexpr (std::same_as<T, std::uint32_t>) return ncclUint32;
    if constexpr (std::same_as<T, std::int64_t>) return ncclInt64;
    if constexpr (std::same_as<T, std::uint64_t>) return ncclUint64;
    return ncclNumTypes;
}
template <class Op>
[[nodiscard]] constexpr ncclRedOp_t nccl_op() noexcept {
    if constexpr (std::same_as<Op, sum>) return ncclSum;
    if constexpr (std::same_as<Op, product>) return ncclProd;
    if constexpr (std::same_as<Op, minimum>) return ncclMin;
    if constexpr (std::same_as<Op, maximum>) return ncclMax;
    if constexpr (std::same_as<Op, average>) return ncclAvg;
    return ncclNumOps;
}

}  // namespace detail

/// The numbers that NCCL combines. There are no 16-bit integers, and no user-defined operators.
template <class T>
concept nccl_number = detail::nccl_type<T>()
!= ncclNumTypes;
template <class Op>
concept nccl_operator = detail::nccl_op<Op>()
!= ncclNumOps;

/// Ranks of one process, with rank r on devices[r]. The object can be moved. One thread at a time
/// uses it, but any thread may call abort() and fault() while another thread submits, or waits for
/// a stream.
class nccl_communicator {
public:
    /// Throws operation_error: the error of NCCL, or of CUDA below NCCL; errc::duplicate_device,
    /// since NCCL can't use a device twice; errc::invalid_specification without devices.
    template <node Node>
    requires requires(const Node& n, device_id d) {
        { n.properties(d).ordinal } -> std::convertible_to<int>;
        n.make_current(d);
    }
    nccl_communicator(const Node& on, std::span<const device_id> devices) : ranks_(devices.size()) {
        std::vector<int> ordinals;
        for (const device_id d : devices) {
            const int ordinal = on.properties(d).ordinal;
            for (const int other : ordinals)
                if (other == ordinal)
                    raise({.code = errc::duplicate_device, .asked = d.index, .because = reason::device_twice}, {},
                          "making an NCCL communicator");
            ordinals.push_back(ordinal);
        }
        if (devices.empty())
            raise({.code = errc::invalid_specification, .because = reason::no_ranks}, {},
                  "making an NCCL communicator");
        // NCCL leaves another device current.
        const auto current = on.make_current(devices.front());
        const ncclResult_t code = ncclCommInitAll(ranks_.data(), static_cast<int>(ordinals.size()), ordinals.data());
        (void)cudaSetDevice(ordinals.front());
        if (code != ncclSuccess && code != ncclInProgress) {
            ranks_.clear();
            fail(code, "ncclCommInitAll");
        }
        if (const ncclResult_t made = settle(code); made != ncclSuccess) {  // it failed later
            abort();
            ranks_.clear();
            fail(made, "ncclCommInitAll");
        }
    }
    nccl_communicator(nccl_communicator&& other) noexcept
        : ranks_(std::move(other.ranks_)), shared_(std::move(other.shared_)) {
        other.ranks_.clear();
    }
    nccl_communicator& operator=(nccl_communicator other) noexcept {
        std::swap(ranks_, other.ranks_);
        std::swap(shared_, other.shared_);
        return *this;
    }
    /// Waits for submitted work, as ncclCommDestroy does.
    ~nccl_communicator() {
        if (shared_ == nullptr || shared_->aborted) return;
        for (const ncclComm_t rank : ranks_) (void)ncclCommDestroy(rank);
    }

    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(ranks_.size()); }

    /// Calls each(rank, comm, stream) for every rank between ncclGroupStart and ncclGroupEnd, for
    /// any of NCCL's collectives. The collective runs alone on the devices: work that was submitted
    /// there before runs first. With a communicator that doesn't block (NCCL's user guide,
    /// "Communicators and asynchronous errors": ncclInProgress), the call waits until all work is
    /// enqueued.
    ///
    /// Returns errc::aborted after an abort, invalid_specification if the spans differ in size,
    /// capturing if only some of the streams are captured, and otherwise NCCL's error. If all
    /// streams are captured, by any thread, the graph gets the collective.
    template <gang_order Gangs, timeline Stream, class Each>
    requires std::is_invocable_r_v<ncclResult_t, const Each&, std::uint32_t, ncclComm_t, cudaStream_t>
    [[nodiscard]] errc submit(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                              collective_kind what, const Each& each) {
        if (devices.size() != size() || streams.size() != size() || size() == 0) return errc::invalid_specification;
        const enqueuing here(*shared_, what);
        if (!here.begun) return errc::aborted;
        constexpr std::uint64_t all = detail::device_parts::whole_device;
        detail::gang_launch<Gangs, Stream> gang(gangs, devices, this);
        if (const errc why = gang.prepare(streams); why != errc::none) return why;
        for (std::uint32_t r = 0; r < size(); ++r) gang.make_room(devices[r], all, streams[r]);
        ncclResult_t code = ncclGroupStart();
        if (code != ncclSuccess) return to_errc(code);
        for (std::uint32_t r = 0; r < size() && goes_on(code); ++r)
            code = each(r, ranks_[r], streams[r].native_handle());
        // also after an error, because only this call ends the group
        const ncclResult_t end = ncclGroupEnd();
        if (goes_on(code)) code = settle(goes_on(end) && code == ncclInProgress ? code : end);
        for (std::uint32_t r = 0; r < size(); ++r) gang.launched(devices[r], all, r, streams[r]);
        return is_aborted() ? errc::aborted : to_errc(code);
    }

    /// A rank's fault, if there is one, with the rank and the last collective.
    [[nodiscard]] collective_fault fault() const noexcept {
        if (ranks_.empty()) return {};
        const std::lock_guard lock(shared_->mutex);
        for (std::uint32_t r = 0; r < size(); ++r) {
            const ncclResult_t state = shared_->aborted ? ncclSuccess : state_of(ranks_[r]);
            if (shared_->aborted || !goes_on(state))
                return {shared_->aborted ? errc::aborted : to_errc(state), shared_->last, r, shared_->calls};
        }
        return {};
    }

    /// Ends every current and later collective on all ranks. Waits until a thread that submits has
    /// enqueued its work, because NCCL then frees the communicators. So `each` of submit() must not
    /// call abort().
    void abort() noexcept {
        if (ranks_.empty()) return;
        std::unique_lock lock(shared_->mutex);
        if (std::exchange(shared_->aborted, true)) return;
        shared_->enqueued.wait(lock, [&] { return shared_->submissions == 0; });
        for (const ncclComm_t rank : ranks_) (void)ncclCommAbort(rank);
    }

private:
    // State that several threads read. After an abort the communicator no longer exists, so no
    // thread may query it.
    struct shared_state {
        mutable std::mutex mutex;
        std::condition_variable enqueued;
        bool aborted = false;
        std::uint32_t submissions = 0;  // submissions that are using the communicators
        std::uint32_t calls = 0;
        collective_kind last = collective_kind::none;
    };
    // A submission that uses the communicators. abort() doesn't free them in that time.
    struct enqueuing {
        enqueuing(shared_state& s, collective_kind what) : of(s) {
            const std::lock_guard lock(of.mutex);
            if (of.aborted) return;
            begun = true;
            ++of.submissions;
            ++of.calls;
            of.last = what;
        }
        enqueuing(const enqueuing&) = delete;
        enqueuing& operator=(const enqueuing&) = delete;
        ~enqueuing() {
            if (!begun) return;
            const std::lock_guard lock(of.mutex);
            if (--of.submissions == 0) of.enqueued.notify_all();
        }
        shared_state& of;
        bool begun = false;
    };

    [[nodiscard]] static constexpr bool goes_on(ncclResult_t code) noexcept {
        return code == ncclSuccess || code == ncclInProgress;
    }
    [[nodiscard]] static ncclResult_t state_of(ncclComm_t rank) noexcept {
        ncclResult_t state = ncclSuccess;
        const ncclResult_t asked = ncclCommGetAsyncError(rank, &state);
        return asked != ncclSuccess ? asked : state;
    }
    [[nodiscard]] bool is_aborted() const noexcept {
        const std::lock_guard lock(shared_->mutex);
        return shared_->aborted;
    }
    // Waits until no rank is in progress: submitted work is then enqueued, failed, or aborted.
    [[nodiscard]] ncclResult_t settle(ncclResult_t code) const noexcept {
        while (code == ncclInProgress) {
            {
                const std::lock_guard lock(shared_->mutex);
                if (shared_->aborted) return ncclSuccess;
                code = ncclSuccess;
                for (const ncclComm_t rank : ranks_) {
                    const ncclResult_t state = state_of(rank);
                    if (!goes_on(state)) return state;
                    if (state == ncclInProgress) code = state;
                }
            }
            if (code == ncclInProgress) std::this_thread::yield();
        }
        return code;
    }
    [[noreturn]] static void fail(ncclResult_t code, const char* call) {
        detail::message text;
        text.add(call, ": ", std::string_view{ncclGetErrorString(code)}, " (", static_cast<std::uint64_t>(code), ")");
        // CUDA still has the error, which the embedder must not find.
        const cudaError_t below = code == ncclUnhandledCudaError ? cudaGetLastError() : cudaSuccess;
        throw operation_error({.code = below != cudaSuccess ? detail::errc_of_native(below) : to_errc(code)}, {}, text);
    }

    std::vector<ncclComm_t> ranks_;
    std::unique_ptr<shared_state> shared_ = std::make_unique<shared_state>();
};

[[nodiscard]] inline collective_fault fault_of(const nccl_communicator& group) noexcept { return group.fault(); }

/// An all-reduce of ins[r] into outs[r] on every device. Returns errors as
/// nccl_communicator::submit does.
template <nccl_number T, gang_order Gangs, timeline Stream, nccl_operator Op = sum>
[[nodiscard]] errc submit_all_reduce(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                     nccl_communicator& group, std::span<const T* const> ins, std::span<T* const> outs,
                                     std::size_t count, Op = {}) {
    if (ins.size() != group.size() || outs.size() != group.size()) return errc::invalid_specification;
    return group.submit(gangs, devices, streams, collective_kind::all_reduce,
                        [&](std::uint32_t r, ncclComm_t comm, cudaStream_t stream) {
                            return ncclAllReduce(ins[r], outs[r], count, detail::nccl_type<T>(), detail::nccl_op<Op>(),
                                                 comm, stream);
                        });
}

/// Whether ranks compare their calls. If calls differ and weren't compared, NCCL hangs, or adds
/// floats to integers.
enum class nccl_calls : std::uint8_t {
    /// Compared by an all-gather of 8 bytes before each call, as slow as a small collective.
    compared,
    trusted,  ///< not compared
};

/// One rank of an NCCL communicator that its own thread drives: a transport of gradient/ whose
/// spans are memory of the rank's device. Each call goes to the stream and waits for it, even
/// during captures of other threads. The communicator, which may be non-blocking, and the stream
/// belong to the embedder and must outlive the transport.
///
/// Once a call has failed, the communicator is aborted, and must not be destroyed. NCCL doesn't say
/// which rank is missing, so at a deadline the fault names the rank that gave up. Code that reads
/// elements on the host (buckets, negotiation) needs another transport: a host_transport.
class nccl_transport {
public:
    static constexpr bool rank_ordered = false;  ///< see the top of this header
    /// False even for managed memory, because a pointer's type doesn't tell which memory it points
    /// to.
    static constexpr bool in_host_memory = false;

    /// `calls` must be the same on all ranks. Throws operation_error: the error of NCCL or of CUDA.
    nccl_transport(ncclComm_t comm, cudaStream_t stream, nccl_calls calls = nccl_calls::compared)
        : comm_(comm), stream_(stream), queue_(stream), compares_(calls == nccl_calls::compared) {
        int rank = 0, size = 0;
        const ncclResult_t code =
            ncclCommUserRank(comm, &rank) != ncclSuccess ? ncclInvalidArgument : ncclCommCount(comm, &size);
        if (code != ncclSuccess) raise({.code = to_errc(code)}, {}, "taking an NCCL communicator");
        rank_ = static_cast<std::uint32_t>(rank);
        size_ = static_cast<std::uint32_t>(size);
        const std::size_t words = (std::size_t{size_} + 1) * sizeof(std::uint64_t);
        cudaError_t why = cudaSuccess;
        device_words_ = static_cast<std::uint64_t*>(queue_.allocate(words, why));
        // Pinned: a copy to pageable memory would wait for the stream, even beyond the deadline.
        if (device_words_ != nullptr) words_ = static_cast<std::uint64_t*>(queue_.allocate_host(words, why));
        if (words_ != nullptr) return;
        queue_.free(device_words_);
        raise({.code = detail::errc_of_native(why), .asked = words}, {}, "taking an NCCL communicator");
    }
    nccl_transport(const nccl_transport&) = delete;
    nccl_transport& operator=(const nccl_transport&) = delete;
    ~nccl_transport() {
        queue_.free(device_words_);
        queue_.free_host(words_);
    }

    [[nodiscard]] std::uint32_t rank() const noexcept { return rank_; }  ///< from 0
    [[nodiscard]] std::uint32_t size() const noexcept { return size_; }  ///< the number of ranks
    [[nodiscard]] bytes carried() const noexcept { return carried_; }    ///< see transport
    /// The fault of the first call that failed; no fault until then.
    [[nodiscard]] const collective_fault& fault() const noexcept { return fault_; }

    /// See transport.
    template <nccl_number T, nccl_operator Op>
    [[nodiscard]] collective_fault all_reduce(std::span<const std::type_identity_t<T>> in, std::span<T> out, const Op&,
                                              instant deadline) {
        if (in.size() != out.size()) return {errc::mismatch, collective_kind::all_reduce, rank_, calls_};
        const auto word = detail::call_word<T>(collective_kind::all_reduce, in.size(), detail::op_id<Op>());
        return run(collective_kind::all_reduce, word, in.size_bytes(), deadline, [&] {
            return ncclAllReduce(in.data(), out.data(), out.size(), detail::nccl_type<T>(), detail::nccl_op<Op>(),
                                 comm_, stream_);
        });
    }
    /// See transport.
    template <nccl_number T, nccl_operator Op>
    [[nodiscard]] collective_fault reduce_scatter(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                                  const Op&, instant deadline) {
        if (in.size() != out.size() * size_) return {errc::mismatch, collective_kind::reduce_scatter, rank_, calls_};
        const auto word = detail::call_word<T>(collective_kind::reduce_scatter, out.size(), detail::op_id<Op>());
        return run(collective_kind::reduce_scatter, word, in.size_bytes(), deadline, [&] {
            return ncclReduceScatter(in.data(), out.data(), out.size(), detail::nccl_type<T>(), detail::nccl_op<Op>(),
                                     comm_, stream_);
        });
    }
    /// See transport.
    template <class T>
    requires std::is_trivially_copyable_v<T>
    [[nodiscard]] collective_fault all_gather(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                              instant deadline) {
        if (out.size() != in.size() * size_) return {errc::mismatch, collective_kind::all_gather, rank_, calls_};
        const auto word = detail::call_word<T>(collective_kind::all_gather, in.size());
        return run(collective_kind::all_gather, word, in.size_bytes(), deadline,
                   [&] { return ncclAllGather(in.data(), out.data(), in.size_bytes(), ncclUint8, comm_, stream_); });
    }
    /// See transport.
    template <class T>
    requires std::is_trivially_copyable_v<T>
    [[nodiscard]] collective_fault broadcast(std::span<T> data, std::uint32_t root, instant deadline) {
        if (root >= size_) return {errc::mismatch, collective_kind::broadcast, rank_, calls_};
        const auto word = detail::call_word<T>(collective_kind::broadcast, data.size(), 0, root);
        return run(collective_kind::broadcast, word, data.size_bytes(), deadline, [&] {
            return ncclBroadcast(data.data(), data.data(), data.size_bytes(), ncclUint8, static_cast<int>(root), comm_,
                                 stream_);
        });
    }
    /// See transport.
    [[nodiscard]] collective_fault barrier(instant deadline) {
        const auto word = detail::call_word<std::uint64_t>(collective_kind::barrier, 0);
        return run(collective_kind::barrier, word, 0, deadline,
                   // acts as a barrier, too
                   [&] { return compares_ ? ncclSuccess : gather_words(); });
    }
    /// See transport. Aborts this rank. NCCL tells the other ranks once it has aborted here.
    void abort(std::uint32_t rank, errc why) noexcept {
        std::uint64_t none = 0;
        // acq_rel: of several faults, the first one counts.
        asked_.compare_exchange_strong(none, collective_fault{why, collective_kind::none, rank, 0}.packed(),
                                       std::memory_order_acq_rel);
    }

private:
    /// Makes a call, and waits for its end. `word` is a hash of the facts on which ranks must
    /// agree.
    template <class Call>
    [[nodiscard]] collective_fault run(collective_kind what, std::uint64_t word, std::size_t size, instant deadline,
                                       const Call& call) {
        if (fault_) return fault_;
        carried_ += bytes{size};
        ++calls_;
        const detail::relaxed_thread relaxed;
        if (compares_)
            if (const auto f = compare(what, word, deadline)) return f;
        return await(call(), what, deadline);
    }
    [[nodiscard]] ncclResult_t gather_words() noexcept {
        return ncclAllGather(device_words_, device_words_ + 1, sizeof *words_, ncclUint8, comm_, stream_);
    }
    [[nodiscard]] collective_fault compare(collective_kind what, std::uint64_t word, instant deadline) {
        words_[0] = word;
        const auto copied = [&](void* to, const void* from, std::size_t size) {
            const errc why = detail::errc_of_native(queue_.copy(to, from, size));
            return why == errc::none ? collective_fault{} : fail({why, what, rank_, calls_});
        };
        if (const auto f = copied(device_words_, words_, sizeof word)) return f;
        // Once the all-gather is enqueued, later work is ordered behind it.
        if (const auto f = enqueued(gather_words(), what, deadline)) return f;
        if (const auto f = copied(words_ + 1, device_words_ + 1, sizeof word * size_)) return f;
        if (const auto f = await(ncclSuccess, what, deadline)) return f;
        const auto odd = detail::odd_one(std::span<const std::uint64_t>(words_ + 1, size_));
        return odd ? fail({errc::mismatch, what, *odd, calls_}) : collective_fault{};
    }
    // The fault if this rank was aborted, or if its deadline has passed.
    [[nodiscard]] collective_fault given_up(collective_kind what, instant deadline) const {
        // acquire: pairs with abort(). The word holds the whole fault.
        if (const std::uint64_t asked = asked_.load(std::memory_order_acquire); asked != 0)
            return collective_fault::unpacked(asked);
        if (std::chrono::steady_clock::now() < deadline) return {};
        return {errc::deadline_exceeded, what, rank_, calls_};
    }
    // Waits until the communicator has enqueued the work whose submission returned this code. While
    // a communicator that doesn't block is in progress, the stream doesn't have any of that work
    // yet, and reports that all its work is done. (NCCL, pull request 715; ncclCommGetAsyncError:
    // no work may be ordered behind a call that is still in progress.)
    [[nodiscard]] collective_fault enqueued(ncclResult_t code, collective_kind what, instant deadline) {
        while (code == ncclInProgress) {
            if (const auto f = given_up(what, deadline)) return fail(f);
            if (const ncclResult_t asked = ncclCommGetAsyncError(comm_, &code); asked != ncclSuccess) code = asked;
            if (code == ncclInProgress) std::this_thread::yield();
        }
        return code == ncclSuccess ? collective_fault{} : fail({to_errc(code), what, rank_, calls_});
    }
    // Waits until the work has ended.
    [[nodiscard]] collective_fault await(ncclResult_t code, collective_kind what, instant deadline) {
        if (const auto f = enqueued(code, what, deadline)) return f;
        for (code = ncclSuccess; code == ncclSuccess || code == ncclInProgress;) {
            const cudaError_t at = queue_.state();
            if (at == cudaSuccess) return {};
            if (at != cudaErrorNotReady) return fail({detail::errc_of_native(at), what, rank_, calls_});
            if (const auto f = given_up(what, deadline)) return fail(f);
            if (const ncclResult_t asked = ncclCommGetAsyncError(comm_, &code); asked != ncclSuccess) code = asked;
            std::this_thread::yield();
        }
        return fail({to_errc(code), what, rank_, calls_});
    }
    collective_fault fail(const collective_fault& why) noexcept {
        fault_ = why;
        (void)ncclCommAbort(comm_);
        return why;
    }

    ncclComm_t comm_;
    cudaStream_t stream_;
    // this rank's word, followed by all ranks' words
    std::uint64_t *device_words_ = nullptr, *words_ = nullptr;
    detail::native_queue queue_;
    bool compares_;
    std::uint32_t rank_ = 0, size_ = 0, calls_ = 0;
    bytes carried_;
    collective_fault fault_;
    std::atomic<std::uint64_t> asked_{0};
};
static_assert(transport<nccl_transport> && !host_transport<nccl_transport>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare

#endif
