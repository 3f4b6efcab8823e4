// SPDX-License-Identifier: Apache-2.0
// Horovod's names (horovod.hpp) for arrays on devices. The ranks are threads of this process, and
// each rank has a device, or all ranks share one. No thread polls: the thread that brings the last
// rank's array enqueues the collective for all ranks.
//
//   gpushare::horovod::device_ranks all(node, devices, std::span(streams), members, pinned, staging,
//                                       staging_bytes);
//   using namespace gpushare::horovod;
//   process_set mine(all, r);                                  // in the thread of rank r
//   const auto sum = allreduce_async(device_array{x, n, stream}, "fc.weight", Sum, mine);
//   synchronize(sum);                                          // `stream` waits for the sum
//
// `stream` is the native handle of the stream that computes the array (on a node in software, a
// pointer to the stream). The collective runs on the rank's stream of `streams`, after all work
// that was enqueued on the caller's stream before the call. A default stream is refused. Tensors of
// libtorch don't need handles: see torch_gradients.hpp.
//
// If arrays of one type and operator become ready together, such as the arrays of a group, they are
// packed into `staging` and combined at once, as far as they fit. Ranks that have joined bring
// neutral elements, which also come from `staging`. Until synchronize, only the collective may use
// the elements of an array that is combined or sent in place (allreduce, broadcast).
//
// Besides allreduce and broadcast there are allgather, alltoall and reducescatter. For these three,
// the ranks tell each other the lengths of the results, and `place(rows)` returns the memory for a
// result.
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/lent_stream.hpp>
#include <gpushare/gradient/detail/named_calls.hpp>
#include <gpushare/gradient/detail/packing.hpp>
#include <gpushare/gradient/detail/two_level_parts.hpp>
#include <gpushare/gradient/device_buckets.hpp>
#include <gpushare/gradient/horovod.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace horovod {

namespace detail {

/// A hash of the facts that must be equal on all ranks.
[[nodiscard]] inline std::uint64_t word_of(const device_call& c) {
    const bool whole = c.kind == collective_kind::all_reduce || c.kind == collective_kind::broadcast ||
                       c.kind == collective_kind::reduce_scatter;
    const bool combines = c.kind == collective_kind::all_reduce || c.kind == collective_kind::reduce_scatter;
    return gpushare::detail::mixed_word({static_cast<std::uint64_t>(c.kind), c.type,
                                         combines ? static_cast<std::uint64_t>(c.op) : 0, c.root, c.element,
                                         whole ? c.count : 0, c.row, c.shape});
}

/// Throws if the call is invalid regardless of the other ranks' calls.
inline void check_call(const device_call& c, std::uint32_t ranks, bool combinable) {
    const auto refuse = [&](const failure& why, std::string_view what = {}) {
        raise(why, {}, c.name + ": handing over an array on a device" + std::string(what));
    };
    const bool combines = c.kind == collective_kind::all_reduce || c.kind == collective_kind::reduce_scatter;
    if (combines && !combinable) refuse({.code = errc::not_supported}, " whose type isn't combined");
    if (combines && c.op == Average && c.type == gpushare::detail::type_id<std::int64_t>())
        refuse({.code = errc::invalid_specification, .because = reason::not_float});
    if (c.kind == collective_kind::broadcast && c.root >= ranks)
        refuse({errc::invalid_specification, c.root, 0, ranks, reason::no_such_rank});
    if (c.row == 0 || c.count % c.row != 0)
        refuse({errc::invalid_specification, c.count, 0, c.row, reason::unequal_parts});
    if (c.kind != collective_kind::all_to_all) return;
    if (c.splits.size() != ranks) refuse({errc::invalid_specification, c.splits.size(), 0, ranks, reason::wrong_count});
    std::uint64_t rows = c.count / c.row;
    for (const std::uint64_t n : c.splits) {
        if (n > rows) refuse({.code = errc::invalid_specification}, " with fewer rows than its splits");
        rows -= n;
    }
}

}  // namespace detail

/// The types of elements that ranks on devices combine: all or some of float, double, float16,
/// bfloat16 and std::int64_t.
template <number... T>
struct combined_types {};

/// The options of ranks on devices.
struct device_options {
    launch_options launches{};  ///< blocks of collectives, and the ranks' patience in a kernel
    /// How long synchronize waits for ranks that haven't handed over an array of that name. After
    /// that time, all calls fail with errc::deadline_exceeded.
    ns patience = ns::max();
};

/// An array on a rank's device, for the functions below.
template <class T>
struct device_array {
    T* data = nullptr;      ///< the first element
    std::size_t count = 0;  ///< the number of elements
    /// Native handle; the elements are computed on this stream.
    void* stream = nullptr;
    std::size_t row = 1;  ///< elements of a row, which no collective cuts
    /// An object that lives until the devices have finished with the array.
    std::shared_ptr<const void> keeps{};
};
/// Deduces the type of the elements.
template <class T>
device_array(T*, std::size_t, void*) -> device_array<T>;

/// The ranks of this process on devices, each with a process_set. All arguments of the constructor
/// must outlive this object, which must outlive the sets. `Node` is cuda::node or host::node.
/// `Visible` is memory that the host and all devices reach, such as cuda::pinned_memory. Any thread
/// may use the object.
///
/// Different ranks may make their calls in different orders. Only the host decides which work is
/// enqueued, and when, and it doesn't wait for any device.
template <node Node, memory_resource Visible, number... T>
requires joining_timeline<typename Node::stream> && launcher<typename Node::stream>
class device_ranks final : public detail::named_ranks {
    using stream = typename Node::stream;
    using point = typename stream::point;
    using device_call = detail::device_call;

public:
    /// Rank r of `members`, a whole group, is on devices[r] with streams[r]. If all ranks share a
    /// device, `devices` and `streams` have one element each. staging[r] is memory of rank r's
    /// device, at a multiple of 16 bytes. It has `staging_size` bytes, at least 64. Throws
    /// operation_error (errc::invalid_specification) for spans of other lengths.
    device_ranks(Node& on, std::span<const device_id> devices, std::span<stream> streams,
                 std::span<const member> members, Visible& visible, std::span<void* const> staging, bytes staging_size,
                 const device_options& options = {}, combined_types<T...> = {})
        : node_(on),
          devices_(devices),
          streams_(streams),
          members_(members),
          visible_(visible),
          staging_(staging.begin(), staging.end()),
          half_(static_cast<std::size_t>(staging_size.count()) / 32 * 16),
          options_(options),
          calls_(static_cast<std::uint32_t>(members.size())),
          lent_(members.size()),
          here_(members.size(), false) {
        if (members.empty() || devices.size() != streams.size() ||
            (devices.size() != members.size() && devices.size() != 1) || staging.size() != members.size() || half_ < 32)
            raise({errc::invalid_specification, devices.size(), 0, members.size(), reason::wrong_count}, {},
                  "streams and staging of named arrays on devices");
    }
    /// Waits for all enqueued work.
    ~device_ranks() override {
        for (const under_way& u : running_)
            for (const point& p : u.ends) (void)p.wait(never);
        running_.clear();
        for (void* const block : lengths_) (void)visible_.deallocate(block, lengths_size(), alignment);
    }

    /// The number of ranks.
    [[nodiscard]] std::uint32_t size() const noexcept override { return calls_.size(); }
    /// Ends all current and later calls, even on the devices. The fault names `rank`. Doesn't wait.
    void abort(std::uint32_t rank, errc why) {
        members_[0].close({why, members_[0].progress().what, rank, members_[0].progress().epoch});
        std::vector<request_ptr> dropped;
        const std::scoped_lock lock(mutex_);
        end_all({why, collective_kind::none, rank, 0}, dropped);
    }

    // --- for process_set

    void enter(std::uint32_t rank) override {  ///< See process_set.
        const std::scoped_lock lock(mutex_);
        if (rank >= size() || here_[rank])
            raise({errc::invalid_specification, rank, 0, size(), reason::no_such_rank}, {},
                  "a set of a rank on devices");
        here_[rank] = true;
    }
    void leave(std::uint32_t rank) override {  ///< See process_set.
        std::vector<request_ptr> dropped;
        std::vector<point> last;
        {
            const std::scoped_lock lock(mutex_);
            end_all({errc::stopped, collective_kind::none, rank, 0}, dropped);
            for (const under_way& u : running_) last.push_back(u.ends[streams_.size() == 1 ? 0 : rank]);
        }
        for (const point& p : last) (void)p.wait(never);
    }
    /// See process_set.
    [[nodiscard]] std::vector<std::shared_ptr<detail::device_request>> start(std::uint32_t rank,
                                                                             std::vector<device_call> calls) override {
        garbage over;
        std::vector<std::shared_ptr<detail::device_request>> all;
        for (const device_call& c : calls) check_call(c, size(), is_combined(c.type));
        const std::scoped_lock lock(mutex_);
        collect(over);
        for (const device_call& c : calls)
            if (calls_.has(rank, c.name))
                raise({.code = errc::duplicate_name}, {}, c.name + ": handing over an array that is in use");
        std::vector<request_ptr> mine;
        for (device_call& c : calls) {
            auto computed = lent(rank, c.stream).record();
            mine.push_back(std::make_shared<request>(std::move(c), rank, std::move(computed)));
        }
        all.assign(mine.begin(), mine.end());
        telling(rank, over, [&] {
            for (const request_ptr& one : mine) {
                const device_call& c = one->call;
                if (fault_)
                    finish(*one, fault_);
                else if (!calls_.hand_over(rank, {c.name, word_of(c), c.kind, c.root}, one))
                    // the name comes twice in the list
                    finish(*one, {errc::duplicate_name, c.kind, rank, 0});
            }
            go_on(rank, over);
        });
        return all;
    }
    /// See process_set.
    [[nodiscard]] bool is_done(detail::device_request& any) override {
        auto& one = static_cast<request&>(any);
        garbage over;
        const std::scoped_lock lock(mutex_);
        collect(over);
        return one.enqueued && (one.fault || one.well || one.end.reached());
    }
    /// See process_set.
    [[nodiscard]] collective_fault wait(detail::device_request& any, void* current) override {
        auto& one = static_cast<request&>(any);
        garbage over;
        std::unique_lock lock(mutex_);
        const auto done = [&] { return one.enqueued; };
        if (!wait_for(lock, done))
            end_all({errc::deadline_exceeded, one.call.kind, calls_.lacking(one.call.name).value_or(one.rank), 0},
                    over.requests);
        collect(over);
        if (one.fault || one.well) return one.fault;
        if (const auto f = members_[one.rank].fault()) {
            end_all(f, over.requests);
            return f;
        }
        if (current == nullptr) current = one.call.current ? one.call.current() : one.call.stream;
        lent(one.rank, current).wait(one.end);
        return {};
    }
    /// See process_set.
    [[nodiscard]] std::uint32_t join(std::uint32_t rank) override {
        garbage over;
        std::unique_lock lock(mutex_);
        const std::uint64_t before = calls_.rounds();
        telling(rank, over, [&] {
            calls_.join(rank);
            go_on(rank, over);
        });
        changed_.notify_all();
        changed_.wait(lock, [&] { return fault_ || calls_.rounds() != before; });
        if (calls_.rounds() == before) raise_fault(fault_);
        return calls_.last_joined();
    }

private:
    struct request final : detail::device_request {
        request(device_call c, std::uint32_t of, point is_there)
            : call(std::move(c)), rank(of), computed(std::move(is_there)) {}
        device_call call;
        std::uint32_t rank;
        point computed, end{};
        collective_fault fault{};
        bool enqueued = false;  // whether the request is enqueued or refused
        bool well = false;      // whether the request is known to be over, without a fault
    };
    using request_ptr = std::shared_ptr<request>;
    using common = typename detail::named_calls<request_ptr>::common;
    /// Requests that the devices may still be working on.
    struct under_way {
        std::vector<point> ends{};  // a point for each stream
        std::vector<request_ptr> requests{};
        void* lengths = nullptr;
    };
    /// Objects to destroy after the lock is released, because they may own a framework's tensors.
    struct garbage {
        std::list<under_way> done{};
        std::vector<request_ptr> requests{};
        std::vector<std::shared_ptr<const void>> kept{};
        std::vector<device_call::placing> places{};
    };
    static constexpr std::size_t alignment = 64;

    [[nodiscard]] static constexpr bool is_combined(std::uint32_t type) noexcept {
        return ((gpushare::detail::type_id<T>() == type) || ...);
    }
    [[nodiscard]] stream& stream_of(std::uint32_t rank) { return streams_[streams_.size() == 1 ? 0 : rank]; }
    [[nodiscard]] stream& lent(std::uint32_t rank, void* handle) { return lent_[rank].as(node_, handle); }
    template <class Done>
    [[nodiscard]] bool wait_for(std::unique_lock<std::mutex>& lock, const Done& done) {
        const instant deadline = saturating_add(std::chrono::steady_clock::now(), options_.patience);
        return changed_.wait_until(lock, gpushare::detail::within_a_year(deadline), done);
    }
    void finish(request& r, const collective_fault& f) {
        r.fault = f;
        r.enqueued = true;
    }
    void end_all(const collective_fault& f, std::vector<request_ptr>& dropped) {
        if (!fault_) fault_ = f;
        for (request_ptr& r : calls_.drop()) {
            finish(*r, fault_);
            dropped.push_back(std::move(r));
        }
        for (common& c : calls_.take()) drop(c, dropped);
        changed_.notify_all();
    }
    /// Ends the requests of a call of which no work is enqueued.
    void drop(common& c, std::vector<request_ptr>& dropped) {
        for (auto& r : c.of_ranks)
            if (r && *r && !(*r)->enqueued) {
                finish(**r, fault_);
                dropped.push_back(std::move(*r));
            }
    }
    /// Hands over calls of a rank. An exception, such as std::bad_alloc, ends the calls of all
    /// ranks, which would otherwise wait for this rank, and then propagates.
    template <class F>
    void telling(std::uint32_t rank, garbage& over, const F& hand_over) {
        try {
            hand_over();
        } catch (...) {
            end_all(thrown_by(rank, collective_kind::none), over.requests);
            throw;
        }
    }
    /// Takes out the requests that the devices have finished, in the order of enqueuing. A failure
    /// of a device ends all calls.
    void collect(garbage& over) {
        const auto reached = [](const point& p) { return p.reached(); };
        while (!running_.empty() && std::all_of(running_.front().ends.begin(), running_.front().ends.end(), reached)) {
            // Taken out first, so that no request is looked at again after an exception.
            over.done.splice(over.done.begin(), running_, running_.begin());
            under_way& u = over.done.front();
            if (u.lengths != nullptr) free_.push_back(u.lengths);
            for (request_ptr& r : u.requests) {
                if (!r->fault) {
                    r->fault = members_[r->rank].fault();
                    if (const errc status = r->end.status(); !r->fault && status != errc::none)
                        r->fault = {status, r->call.kind, r->rank, 0};
                    if (r->fault) end_all(r->fault, over.requests);
                }
                r->well = !r->fault;
                over.kept.push_back(std::move(r->call.keeps));
                over.places.push_back(std::move(r->call.place));
            }
        }
    }

    // --- enqueues the calls that all ranks have made, under the lock

    /// Enqueues the calls that all ranks have. `rank` is the calling thread's.
    void go_on(std::uint32_t rank, garbage& over) {
        auto ready = calls_.take();
        try {
            for (std::size_t k = 0; k < ready.size();) {
                const std::size_t some = fused(std::span<const common>(ready).subspan(k));
                enqueue(std::span(ready).subspan(k, some), rank);
                k += some;
            }
        } catch (...) {
            end_all(thrown_by(rank, collective_kind::none), over.requests);
            for (common& c : ready) drop(c, over.requests);
            throw;
        }
        if (!ready.empty()) changed_.notify_all();
    }
    /// The number of calls, from the first on, that are combined at once.
    [[nodiscard]] std::size_t fused(std::span<const common> calls) const {
        const auto packs = [&](const common& c) {
            return !c.fault && c.what.kind == collective_kind::all_reduce &&
                   std::all_of(c.of_ranks.begin(), c.of_ranks.end(), [](const auto& r) { return r.has_value(); });
        };
        const auto of = [](const common& c) -> const device_call& { return first_of(c).call; };
        if (!packs(calls[0])) return 1;
        std::size_t n = 0, elements = 0;
        for (; n < calls.size() && packs(calls[n]); ++n) {
            const device_call& c = of(calls[n]);
            if (c.type != of(calls[0]).type || c.op != of(calls[0]).op) break;
            if (c.count > 2 * half_ / c.element - elements) break;
            elements += c.count;
        }
        return std::max<std::size_t>(n, 1);
    }
    [[nodiscard]] static const request& first_of(const common& c) {
        for (const auto& r : c.of_ranks)
            if (r) return **r;
        std::terminate();  // unreachable, since each call has a rank
    }
    /// Points are reserved before the launches, because creating an event may wait for a kernel,
    /// and the kernel may be waiting for other ranks.
    using reserved = gpushare::detail::point_reserve<stream>;

    void enqueue(std::span<common> calls, std::uint32_t rank) {
        // Allocated before any work is enqueued, so that keep() doesn't allocate.
        std::list<under_way> one(1);
        one.front().ends.reserve(streams_.size());
        one.front().requests.reserve(calls.size() * size());
        reserved points;
        points.reserve(streams_);
        collective_fault f = calls[0].fault;
        try {
            if (!f) f = move(calls, one.front());
        } catch (...) {
            keep(calls, one, points, thrown_by(rank, calls[0].what.kind));
            throw;
        }
        keep(calls, one, points, f);
    }
    /// A fault for the exception that is being handled. Other exceptions than the library's and
    /// std::bad_alloc are a framework's, for example.
    [[nodiscard]] static collective_fault thrown_by(std::uint32_t rank, collective_kind kind) noexcept {
        return {gpushare::detail::code_thrown(errc::submission_failed), kind, rank, 0};
    }
    /// Keeps the requests, because enqueued work uses their arrays. A refused call hasn't enqueued
    /// any work.
    void keep(std::span<common> calls, std::list<under_way>& one, reserved& points, const collective_fault& f) {
        under_way& now = one.front();
        for (std::size_t s = 0; s < streams_.size(); ++s) now.ends.push_back(points.record(s, streams_[s]));
        for (common& c : calls)
            for (auto& r : c.of_ranks)
                if (r) {
                    (*r)->end = now.ends[streams_.size() == 1 ? 0 : (*r)->rank];
                    finish(**r, f);
                    now.requests.push_back(std::move(*r));
                }
        running_.splice(running_.end(), one);
    }
    [[nodiscard]] collective_fault move(std::span<common> calls, under_way& now) {
        for (common& c : calls)
            for (auto& r : c.of_ranks)
                if (r) stream_of((*r)->rank).wait((*r)->computed);
        switch (calls[0].what.kind) {
            case collective_kind::broadcast: return broadcast(calls[0]);
            case collective_kind::all_gather: return all_gather(calls[0], now);
            case collective_kind::all_to_all: return all_to_all(calls[0], now);
            case collective_kind::reduce_scatter: return reduce_scatter(calls[0], now);
            default: break;
        }
        const device_call& c = first_of(calls[0]).call;
        collective_fault f;
        ((c.type == gpushare::detail::type_id<T>() ? void(f = all_reduce<T>(calls, c.op)) : void()), ...);
        return f;
    }
    /// Enqueues the call of all ranks. The fault says why it is refused.
    template <class Call>
    [[nodiscard]] collective_fault submitted(const Call& call, collective_kind kind) {
        using gpushare::detail::submit_on;
        const errc code = submit_on(node_.gangs(), devices_, streams_, members_, call, options_.launches);
        return code == errc::none ? collective_fault{} : collective_fault{code, kind, 0, 0};
    }

    template <class E>
    [[nodiscard]] collective_fault all_reduce(std::span<const common> calls, reduce_op op) {
        const auto gone =
            static_cast<std::uint32_t>(std::count(calls[0].of_ranks.begin(), calls[0].of_ranks.end(), std::nullopt));
        if (gone != 0) return all_reduce_joined<E>(calls[0], op, gone);
        std::vector<const E*> ins(size());
        std::vector<E*> outs(size());
        std::size_t n = 0;
        std::vector<std::vector<std::pair<E*, std::size_t>>> pieces(size());
        for (const common& c : calls) {
            n += first_of(c).call.count;
            for (std::uint32_t r = 0; r < size(); ++r)
                if (const device_call& mine = (*c.of_ranks[r])->call; mine.count != 0)
                    pieces[r].emplace_back(static_cast<E*>(mine.data), mine.count);
        }
        const bool packs = pieces[0].size() > 1;
        for (std::uint32_t r = 0; r < size() && n != 0; ++r) {
            outs[r] = packs ? static_cast<E*>(staging_[r]) : pieces[r][0].first;
            ins[r] = outs[r];
            if (packs) kernel_packing{}.pack(stream_of(r), std::span(std::as_const(pieces[r])), outs[r]);
        }
        const auto f = combine<E>(ins, outs, n, op);
        for (std::uint32_t r = 0; r < size() && packs && !f; ++r)
            kernel_packing{}.unpack(stream_of(r), std::span(std::as_const(pieces[r])), outs[r]);
        return f;
    }
    /// Ranks that have joined bring the neutral element from one half of their staging memory, and
    /// get the result in the other half. So half of the staging memory limits how many elements go
    /// at once. An average of 16 bits is computed at once, because the sum may be infinite although
    /// the average isn't.
    template <class E>
    [[nodiscard]] collective_fault all_reduce_joined(const common& call, reduce_op op, std::uint32_t gone) {
        const std::size_t count = first_of(call).call.count, each = half_ / sizeof(E);
        const auto others = static_cast<float>(size() - gone);
        std::vector<const E*> ins(size());
        std::vector<E*> outs(size());
        for (std::size_t at = 0; at < count; at += each) {
            const std::size_t n = std::min(each, count - at);
            for (std::uint32_t r = 0; r < size(); ++r) {
                E* const own = static_cast<E*>(call.of_ranks[r] ? (*call.of_ranks[r])->call.data : staging_[r]);
                ins[r] = outs[r] = call.of_ranks[r] ? own + at : own;
                if (call.of_ranks[r]) continue;
                outs[r] = own + each;
                if (at == 0) launch(r, gpushare::detail::fill_elements<E>{own, n, detail::neutral_of<E>(op)});
            }
            if (const auto f = combine_others<E>(ins, outs, n, op, others)) return f;
        }
        if constexpr (!std::integral<E> && sizeof(E) >= sizeof(float))
            for (std::uint32_t r = 0; r < size() && op == Average && count != 0; ++r)
                if (call.of_ranks[r]) {
                    using divide = gpushare::detail::divide_elements<E>;
                    launch(r, divide{static_cast<E*>((*call.of_ranks[r])->call.data), count, others});
                }
        return {};
    }
    template <class Kernel>
    void launch(std::uint32_t rank, const Kernel& kernel) {
        stream_of(rank).launch(kernel.shape(), kernel);
    }
    template <class E>
    [[nodiscard]] collective_fault combine(const std::vector<const E*>& ins, const std::vector<E*>& outs, std::size_t n,
                                           reduce_op op) {
        return detail::with_operator<E>(op, [&](auto by) { return combine_by<E>(ins, outs, n, by); });
    }
    /// Combines alongside ranks that have joined. A sum stands for an average of more than 16 bits.
    template <class E>
    [[nodiscard]] collective_fault combine_others(const std::vector<const E*>& ins, const std::vector<E*>& outs,
                                                  std::size_t n, reduce_op op, float others) {
        if constexpr (sizeof(E) < sizeof(float))
            if (op == Average) return combine_by<E>(ins, outs, n, gpushare::detail::part_of_average{others});
        return combine<E>(ins, outs, n, op == Average ? Sum : op);
    }
    template <class E, class By>
    [[nodiscard]] collective_fault combine_by(const std::vector<const E*>& ins, const std::vector<E*>& outs,
                                              std::size_t n, const By& by) {
        if (n == 0) return {};
        return submitted(gpushare::detail::all_reduce_call<E, By>{{ins, outs, n}, by}, collective_kind::all_reduce);
    }

    /// Ranks that have joined get a copy that isn't read, in pieces that fit into their staging
    /// memory.
    [[nodiscard]] collective_fault broadcast(const common& call) {
        const device_call& c = first_of(call).call;
        const std::size_t size_of_all = c.count * c.element;
        const bool some_joined =
            std::any_of(call.of_ranks.begin(), call.of_ranks.end(), [](const auto& r) { return !r; });
        const std::size_t each = some_joined ? 2 * half_ : std::max<std::size_t>(size_of_all, 1);
        std::vector<std::byte*> data(size());
        for (std::size_t at = 0; at < size_of_all; at += each) {
            const std::size_t n = std::min(each, size_of_all - at);
            for (std::uint32_t r = 0; r < size(); ++r)
                data[r] = call.of_ranks[r] ? static_cast<std::byte*>((*call.of_ranks[r])->call.data) + at
                                           : static_cast<std::byte*>(staging_[r]);
            const gpushare::detail::broadcast_call<std::byte> all{data, n, c.root};
            if (const auto f = submitted(all, collective_kind::broadcast)) return f;
        }
        return {};
    }

    // --- results whose length the ranks tell each other; no rank has joined

    /// A rank's output for these rows. The memory belongs to the caller's stream, so the rank's
    /// stream waits for earlier work there.
    [[nodiscard]] void* place(request& r, std::span<const std::uint64_t> rows) {
        void* const to = r.call.place(rows);
        stream_of(r.rank).wait(lent(r.rank, r.call.stream).record());
        return to;
    }
    /// The outputs of all ranks; rows(r) returns rank r's rows. The fault names a rank without
    /// memory.
    template <class Rows>
    [[nodiscard]] collective_fault place_all(const common& call, std::vector<void*>& to, const Rows& rows) {
        for (std::uint32_t r = 0; r < size(); ++r) {
            request& one = **call.of_ranks[r];
            try {
                to.push_back(place(one, rows(r)));
            } catch (...) {
                return thrown_by(r, call.what.kind);
            }
        }
        return {};
    }
    [[nodiscard]] std::size_t lengths_size() const noexcept {
        return 2 * std::size_t{size()} * size() * sizeof(std::uint64_t);
    }
    /// Memory that the devices read, for two numbers of each pair of ranks.
    [[nodiscard]] std::uint64_t* lengths(under_way& now) {
        if (free_.empty()) {
            lengths_.reserve(lengths_.size() + 1);
            free_.reserve(lengths_.size() + 1);
            lengths_.push_back(visible_.allocate(lengths_size(), alignment));
            free_.push_back(lengths_.back());
        }
        now.lengths = free_.back();
        free_.pop_back();
        return static_cast<std::uint64_t*>(now.lengths);
    }
    [[nodiscard]] static const device_call& call_of(const common& c, std::uint32_t r) { return (*c.of_ranks[r])->call; }
    template <class U>
    struct arrays {
        std::vector<std::span<const U>> ins{};
        std::vector<std::span<U>> outs{};
        std::vector<const std::uint64_t*> lengths{}, more{};
    };
    /// Moves the bytes of rows unchanged.
    [[nodiscard]] collective_fault all_gather(const common& call, under_way& now) {
        std::vector<std::uint64_t> rows;
        for (std::uint32_t r = 0; r < size(); ++r) rows.push_back(call_of(call, r).count / call_of(call, r).row);
        std::vector<void*> to;
        if (const auto f = place_all(call, to, [&](std::uint32_t) { return std::span<const std::uint64_t>(rows); }))
            return f;
        const std::size_t row = call_of(call, 0).row * call_of(call, 0).element;
        const std::uint64_t all = std::accumulate(rows.begin(), rows.end(), std::uint64_t{0});
        if (all * row == 0) return {};
        std::uint64_t* const counts = lengths(now);
        arrays<std::byte> a;
        for (std::uint32_t r = 0; r < size(); ++r) {
            counts[r] = rows[r] * row;
            a.ins.emplace_back(static_cast<const std::byte*>(call_of(call, r).data), rows[r] * row);
            a.outs.emplace_back(static_cast<std::byte*>(to[r]), all * row);
            a.lengths.push_back(counts);
        }
        return submitted(gpushare::detail::all_gatherv_call<std::byte>{{a.ins, a.outs, a.lengths}}, call.what.kind);
    }
    [[nodiscard]] collective_fault all_to_all(const common& call, under_way& now) {
        const auto rows_for = [&](std::uint32_t r) {  // the rows from each rank
            std::vector<std::uint64_t> rows;
            for (std::uint32_t q = 0; q < size(); ++q) rows.push_back(call_of(call, q).splits[r]);
            return rows;
        };
        std::vector<void*> to;
        if (const auto f = place_all(call, to, rows_for)) return f;
        const std::size_t row = call_of(call, 0).row * call_of(call, 0).element;
        std::uint64_t* const sends = lengths(now);
        std::uint64_t* const receives = sends + std::size_t{size()} * size();
        arrays<std::byte> a;
        for (std::uint32_t r = 0; r < size(); ++r) {
            std::uint64_t all = 0;
            const auto rows = rows_for(r);
            for (std::uint32_t q = 0; q < size(); ++q) {
                sends[r * size() + q] = call_of(call, r).splits[q] * row;
                receives[r * size() + q] = rows[q] * row;
                all += rows[q];
            }
            a.ins.emplace_back(static_cast<const std::byte*>(call_of(call, r).data),
                               call_of(call, r).count * call_of(call, r).element);
            a.outs.emplace_back(static_cast<std::byte*>(to[r]), all * row);
            a.lengths.push_back(sends + r * size());
            a.more.push_back(receives + r * size());
        }
        using all_to_allv = gpushare::detail::all_to_allv_call<std::byte>;
        return submitted(all_to_allv{{a.ins, a.outs, a.lengths}, a.more}, call.what.kind);
    }
    /// Rank r gets shard_of(rows, r, size()).
    [[nodiscard]] collective_fault reduce_scatter(const common& call, under_way& now) {
        const device_call& c = first_of(call).call;
        const auto rows_of = [&](std::uint32_t r) { return shard_of(c.count / c.row, r, size()).size(); };
        std::vector<void*> to;
        if (const auto f = place_all(call, to, [&](std::uint32_t r) { return std::vector<std::uint64_t>{rows_of(r)}; }))
            return f;
        if (c.count == 0) return {};
        std::uint64_t* const counts = lengths(now);
        for (std::uint32_t r = 0; r < size(); ++r) counts[r] = rows_of(r) * c.row;
        collective_fault f;
        ((c.type == gpushare::detail::type_id<T>() ? void(f = reduce_parts<T>(call, to, counts)) : void()), ...);
        return f;
    }
    template <class E>
    [[nodiscard]] collective_fault reduce_parts(const common& call, const std::vector<void*>& to,
                                                const std::uint64_t* counts) {
        arrays<E> a;
        for (std::uint32_t r = 0; r < size(); ++r) {
            a.ins.emplace_back(static_cast<const E*>(call_of(call, r).data), call_of(call, r).count);
            a.outs.emplace_back(static_cast<E*>(to[r]), counts[r]);
            a.lengths.push_back(counts);
        }
        return detail::with_operator<E>(call_of(call, 0).op, [&]<class By>(By by) {
            using reduce_scatterv = gpushare::detail::reduce_scatterv_call<E, By>;
            return submitted(reduce_scatterv{{a.ins, a.outs, a.lengths}, by}, call.what.kind);
        });
    }

    Node& node_;
    std::span<const device_id> devices_;
    std::span<stream> streams_;
    std::span<const member> members_;
    Visible& visible_;
    std::vector<void*> staging_;
    std::size_t half_;  // the bytes of half the staging memory
    device_options options_;
    // Guards all members below, and streams_.
    std::mutex mutex_;
    std::condition_variable changed_;
    detail::named_calls<request_ptr> calls_;
    std::vector<gpushare::detail::lent_stream<Node>> lent_;
    std::vector<bool> here_;
    std::list<under_way> running_;
    std::vector<void*> lengths_, free_;  // all blocks of numbers; the blocks that no device reads
    collective_fault fault_{};
};
/// Combines float.
template <class Node, class Stream, class Visible>
device_ranks(Node&, std::span<const device_id>, std::span<Stream>, std::span<const member>, Visible&,
             std::span<void* const>, bytes) -> device_ranks<Node, Visible, float>;
/// Combines float.
template <class Node, class Stream, class Visible>
device_ranks(Node&, std::span<const device_id>, std::span<Stream>, std::span<const member>, Visible&,
             std::span<void* const>, bytes, device_options) -> device_ranks<Node, Visible, float>;
/// Combines these types.
template <class Node, class Stream, class Visible, number... T>
device_ranks(Node&, std::span<const device_id>, std::span<Stream>, std::span<const member>, Visible&,
             std::span<void* const>, bytes, device_options, combined_types<T...>) -> device_ranks<Node, Visible, T...>;

namespace detail {
template <class T>
[[nodiscard]] device_call call_of(const device_array<T>& x, std::string_view name, collective_kind kind) {
    using element = std::remove_const_t<T>;
    device_call c{.name = std::string(name), .kind = kind};
    c.type = gpushare::detail::type_id<element>();
    c.element = sizeof(element);
    c.data = const_cast<element*>(x.data);
    c.count = x.count;
    c.row = x.row;
    c.keeps = x.keeps;
    c.stream = x.stream;
    return c;
}
}  // namespace detail

/// Hands over an array on a device, to be combined in place. Name, length, type and operator must
/// be the same on all ranks; otherwise all ranks get errc::mismatch, with the rank that differs.
/// Throws operation_error: errc::duplicate_name while an array of this name is under way;
/// errc::not_supported for a type that isn't combined, and for a set over a transport;
/// errc::invalid_specification for an average of integers and for a default stream; errc::capturing
/// if the stream is captured.
template <number T>
[[nodiscard]] handle allreduce_async(const device_array<T>& x, std::string_view name, reduce_op op = Average,
                                     process_set& of = global_process_set()) {
    auto c = detail::call_of(x, name, collective_kind::all_reduce);
    c.op = op;
    return of.start_on_device(std::move(c));
}
/// Hands over several arrays at once, by the names `name.0`, `name.1` and so on. Throws as
/// allreduce_async does, and then hands no array over.
template <number T>
[[nodiscard]] std::vector<handle> grouped_allreduce_async(std::span<const device_array<T>> list, std::string_view name,
                                                          reduce_op op = Average,
                                                          process_set& of = global_process_set()) {
    std::vector<detail::device_call> calls;
    for (std::size_t k = 0; k < list.size(); ++k) {
        calls.push_back(
            detail::call_of(list[k], std::string(name) + "." + std::to_string(k), collective_kind::all_reduce));
        calls.back().op = op;
    }
    return of.start_on_device(std::move(calls));
}
/// All ranks get rank `root`'s array. Throws as allreduce_async, and for a rank that doesn't exist.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] handle broadcast_async(const device_array<T>& x, std::uint32_t root, std::string_view name,
                                     process_set& of = global_process_set()) {
    auto c = detail::call_of(x, name, collective_kind::broadcast);
    c.root = root;
    return of.start_on_device(std::move(c));
}
/// All ranks get the rows of each rank, in the order of ranks. Each rank may bring a different
/// number of rows. `place` is a function `void*(std::span<const std::uint64_t> rows)`. It gets the
/// rows of each rank and returns memory for all these rows; it may return null only if there are no
/// rows. The set calls `place` on any thread, usually another rank's, and under a lock, so `place`
/// must not use the set. If `place` throws, all ranks get a fault that names its rank. While a rank
/// has joined, allgather, alltoall and reducescatter fail (errc::not_supported, with that rank).
/// Throws as allreduce_async does.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] handle allgather_async(const device_array<T>& x, detail::device_call::placing place,
                                     std::string_view name, process_set& of = global_process_set()) {
    auto c = detail::call_of(x, name, collective_kind::all_gather);
    c.place = std::move(place);
    return of.start_on_device(std::move(c));
}
/// splits[q] rows go to rank q, one after the other. `place` gets the numbers of rows that come
/// from each rank. Otherwise works as allgather_async.
template <class T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] handle alltoall_async(const device_array<T>& x, std::span<const std::uint64_t> splits,
                                    detail::device_call::placing place, std::string_view name,
                                    process_set& of = global_process_set()) {
    auto c = detail::call_of(x, name, collective_kind::all_to_all);
    c.splits.assign(splits.begin(), splits.end());
    c.place = std::move(place);
    return of.start_on_device(std::move(c));
}
/// Combines the ranks' arrays, which have the same length. Each rank gets a part of the rows
/// (shard_of); if the number of ranks doesn't divide the rows, the first ranks get one row more.
/// `place` gets the number of this rank's rows. Otherwise works as allgather_async.
template <number T>
[[nodiscard]] handle reducescatter_async(const device_array<T>& x, detail::device_call::placing place,
                                         std::string_view name, reduce_op op = Average,
                                         process_set& of = global_process_set()) {
    auto c = detail::call_of(x, name, collective_kind::reduce_scatter);
    c.op = op;
    c.place = std::move(place);
    return of.start_on_device(std::move(c));
}
/// Waits as synchronize(h), but makes `stream` wait for the collective's end.
inline void synchronize(const handle& h, void* stream) {
    if (h.of() == nullptr) return;
    const auto fault = h.of()->wait(h, stream);
    detail::raise_with(fault, h.of()->thrown(h));
}
/// Hands an array over, and waits for it.
template <number T>
void allreduce(const device_array<T>& x, std::string_view name, reduce_op op = Average,
               process_set& of = global_process_set()) {
    synchronize(allreduce_async(x, name, op, of));
}
/// Hands arrays over, and waits for them.
template <number T>
void grouped_allreduce(std::span<const device_array<T>> list, std::string_view name, reduce_op op = Average,
                       process_set& of = global_process_set()) {
    synchronize(std::span<const handle>(grouped_allreduce_async(list, name, op, of)));
}

}  // namespace horovod
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
