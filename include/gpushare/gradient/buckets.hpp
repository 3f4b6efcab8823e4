// SPDX-License-Identifier: Apache-2.0
// A rank's gradients. A program registers them once. In each step, while the backward pass runs,
// the gradients are combined in buckets with those of the other ranks.
//
//   gpushare::gradient_buckets<> mine;                // the same on every rank
//   for (auto& p : parameters) mine.add(p.name, p.gradient);
//   mine.ready(g);                                    // computing thread: gradient g is ready
//   mine.reduce(net, gpushare::average{}, patience);  // communicating thread: combines a step
//   mine.wait(deadline);                              // computing thread: before it uses them
//
// One thread can do all of this: ready() for all gradients, then reduce(), without wait(). Between
// threads, gradients that travel unrounded aren't copied, because ranks tell each other where the
// gradients are. Other transports get a packed copy, unless a bucket's gradients are adjacent in
// the order of registration. If the transport combines in the order of ranks, the bits are the same
// for every size of buckets, number of channels and algorithm.
//
// Sharded training: each rank combines its shard of every gradient, updates its shard of every
// parameter, and gets the other ranks' shards before the next forward pass. So the group has one
// copy of the optimiser's state (momentum, master copies), and not a copy on every rank. This is
// what ZeRO's first two stages do (Rajbhandari et al., SC 2020).
//
//   while (!mine.reduce_scatter(net, gpushare::average{}, patience)) {}   // in place of reduce()
//   for (auto& p : parameters) {
//       const gpushare::element_range own =
//           gpushare::shard_of(p.values.size(), net.rank(), net.size());
//       ...  // update the elements `own` of p.values by those of p.gradient
//   }
//   if (auto fault = gpushare::all_gather_shards<float>(net, values, deadline)) ...  // spans
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/bucket_plan.hpp>
#include <gpushare/gradient/detail/bucket_staging.hpp>
#include <gpushare/gradient/detail/lent_arrays.hpp>
#include <gpushare/gradient/detail/packed_list.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/wire.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How one gradient travels between ranks.
struct gradient_options {
    wire_format wire = wire_format::as_is;  ///< 16 bits require T = float
    /// Adds each step's rounding error to the next step's gradient; after a skipped step, the error
    /// from before that step is added. Takes twice the gradient's memory.
    bool error_feedback = false;
};

/// One rank's gradients, of elements of type T. One thread calls add(), arrange() and
/// adopt_order(), between steps only. Threads that compute call ready(). One thread for each
/// channel calls reduce() or reduce_scatter().
template <reducible T = float>
class gradient_buckets {
public:
    gradient_buckets() = default;  ///< the default choice, one channel
    /// In every step, reduce() must be called on `channels` channels, or on choice.in_flight
    /// channels if that is more. Buckets use choice.in_flight of these channels. Throws
    /// operation_error (errc::invalid_specification) if choice.in_flight is 0.
    explicit gradient_buckets(const bucket_choice& choice, std::uint32_t channels = 1)
        : channels_(std::max(channels, choice.in_flight)), choice_(checked(choice)) {}

    /// Registers a gradient, which stays where it is, and returns its number, counted from 0. All
    /// ranks register gradients of the same sizes in the same order. Throws operation_error
    /// (errc::invalid_specification) if `options` asks for 16 bits and T isn't float. After an
    /// exception the gradient isn't registered.
    std::uint32_t add(std::string name, std::span<T> gradient, const gradient_options& options = {}) {
        if (options.wire != wire_format::as_is && !std::same_as<T, float>)
            raise({.code = errc::invalid_specification, .because = reason::not_float}, {}, "registering a gradient");
        registered made{std::move(name), gradient, options.wire, {}, {}, false};
        if (options.wire != wire_format::as_is && options.error_feedback) made.residual.resize(gradient.size());
        const std::scoped_lock lock(mutex_);
        gradients_.push_back(std::move(made));  // the last step that may throw
        order_.clear();
        arranged_ = false;
        return size() - 1;
    }

    /// Sets how gradients are fused from the next step on. All ranks make the same call. Throws
    /// like the constructor, and if more buckets are in flight than there are channels.
    void arrange(const bucket_choice& choice) {
        const std::scoped_lock lock(mutex_);  // a thread in reduce() may already wait for the step
        arranged_ = checked(choice) == choice_ && arranged_;
        choice_ = choice;
    }
    /// Sets the order in which gradients become ready, the same on all ranks. Throws like
    /// bucket_plan.
    void arrange(std::span<const std::uint32_t> order) {
        const std::scoped_lock lock(mutex_);
        (void)bucket_plan(wire_sizes(), order, choice_.bucket);  // throws before anything changes
        order_.assign(order.begin(), order.end());
        arranged_ = false;
        prepare();
    }
    /// All ranks take the order in which rank 0's gradients became ready in its last step. All
    /// ranks call adopt_order() between two steps.
    template <host_transport Net>
    [[nodiscard]] collective_fault adopt_order(Net& net, instant deadline = never) {
        std::vector<std::uint32_t> seen =
            seen_.size() == gradients_.size() ? seen_ : bucket_plan::backward_order(size());
        detail::lent_arrays memory(seen);
        const auto f = memory.to([&] { return net.broadcast(std::span(seen), 0, deadline); });
        if (!f) arrange(seen);
        return f;
    }

    /// The number of gradients.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(gradients_.size()); }
    /// The name with which the gradient was registered.
    [[nodiscard]] std::string_view name(std::uint32_t g) const { return gradients_[g].name; }
    /// The latest choice.
    [[nodiscard]] const bucket_choice& choice() const noexcept { return choice_; }
    /// The number of channels on which reduce() must be called.
    [[nodiscard]] std::uint32_t channels() const noexcept { return channels_; }
    /// Which gradients are in which bucket.
    [[nodiscard]] const bucket_plan& plan() {
        const std::scoped_lock lock(mutex_);
        prepare();
        return plan_;
    }
    /// The bytes on the wire of this rank's gradients, for one step.
    [[nodiscard]] bytes wire_bytes() const noexcept {
        bytes all;
        for (const auto& g : gradients_) all += bytes_on_wire(g.wire, g.data.size(), sizeof(T));
        return all;
    }

    /// Reports that gradient `g` is ready for this step. Returns errc::mismatch if `g` was ready
    /// already or doesn't exist. Report a parameter that is used twice only once, after its last
    /// use. Returns errc::in_flight if all gradients were ready and a thread is in reduce() for
    /// them. The caller has then begun another step without wait(), and overwrites data that is
    /// being combined. This fault ends the training on all ranks.
    errc ready(std::uint32_t g) {
        const std::scoped_lock lock(mutex_);
        prepare();
        if (g >= size()) return errc::mismatch;
        if (is_ready_[g]) {
            if (inside_ == 0 || now_seen_.size() != size() || fault_) return errc::mismatch;
            fault_ = {errc::in_flight, collective_kind::all_reduce, rank_, static_cast<std::uint32_t>(steps_)};
            changed_.notify_all();
            return errc::in_flight;
        }
        // a thread that calls reduce() itself needs no wait()
        if (now_seen_.empty()) waited_for_ = steps_;
        is_ready_[g] = true;
        now_seen_.push_back(g);
        ++signs_;
        if (--missing_[plan_.bucket_of(g)] == 0) changed_.notify_all();
        return errc::none;
    }

    /// Combines the step's buckets of one channel, in their order, each bucket as soon as it is
    /// ready. Each channel has a transport and a thread of its own. The call may come long before
    /// the step. Once a bucket is ready here, reduce() waits up to `patience` for other ranks. This
    /// rank's backward pass may be silent for at least as long, counted from its first gradient or
    /// from wait().
    ///
    /// After a fault no later step succeeds, and the step has to be computed again. After a fault
    /// with buffers_in_use, the transport may still read and write the gradients and the channel's
    /// packed and 16-bit copies. The memory of these copies is then never freed.
    ///
    /// Faults that name this rank:
    ///  - deadline_exceeded: a gradient isn't ready; stalled() says which
    ///  - in_flight: see ready()
    ///  - stopped: stop() came before the step's first gradient; the group continues
    ///  - invalid_specification: there is no such channel
    ///  - other codes: the transport threw an error with this code. out_of_memory stands for
    ///    std::bad_alloc, and backend_failed for other exceptions.
    template <host_transport Net, class Op = average>
    [[nodiscard]] collective_fault reduce(Net& net, const Op& op = {}, ns patience = ns::max(),
                                          std::uint32_t channel = 0) {
        return combine<false>(net, op, patience, channel);
    }
    /// Like reduce(), but this rank gets only its shard (shard_of) of each gradient; the rest of
    /// the gradient has unspecified content. Sends half the bytes of reduce() to other ranks, plus
    /// eight bytes for each step and channel. In each step, all ranks call the same one of the two
    /// functions.
    template <host_transport Net, class Op = average>
    [[nodiscard]] collective_fault reduce_scatter(Net& net, const Op& op = {}, ns patience = ns::max(),
                                                  std::uint32_t channel = 0) {
        return combine<true>(net, op, patience, channel);
    }

    /// Says that no further step comes: a thread that waits in reduce() for the next step returns.
    /// Any thread may call stop().
    void stop() {
        const std::scoped_lock lock(mutex_);
        stopped_ = true;
        changed_.notify_all();
    }
    /// Waits until reduce() has combined the step's gradients on all channels. Returns the fault,
    /// if any. After a fault, wait() returns as soon as no channel works on the gradients, since no
    /// later step succeeds. At `deadline`, wait() returns errc::deadline_exceeded with this rank's
    /// number, and the step continues.
    [[nodiscard]] collective_fault wait(instant deadline = never) {
        std::unique_lock lock(mutex_);
        prepare();
        const auto over = [&] { return steps_ != waited_for_ || (fault_ && working_ == 0); };
        awaited_ = !over();
        ++signs_;
        if (!changed_.wait_until(lock, detail::within_a_year(deadline), over))
            return {errc::deadline_exceeded, collective_kind::all_reduce, rank_, static_cast<std::uint32_t>(steps_)};
        waited_for_ = steps_;
        return fault_;
    }

    /// Whether all combined gradients of the last step were finite. All ranks get the same answer.
    /// If the answer is no, skip the step. Infinities of fp8_e5m2 don't count: see all_finite().
    [[nodiscard]] bool was_finite() const {
        const std::scoped_lock lock(mutex_);
        return was_finite_;
    }
    /// The rounding error that error feedback owes gradient `g`. The span is empty without error
    /// feedback. After a failed step the span has the error before that step. Call this between
    /// steps only. Save the error with the parameters, or copy it into the buckets that continue
    /// after a fault.
    [[nodiscard]] std::span<float> owed(std::uint32_t g) {
        const std::scoped_lock lock(mutex_);
        registered& r = gradients_[g];
        return fault_ && r.rounded ? r.owed_before : r.residual;
    }
    /// The name of the gradient for which the next bucket waits; none if all gradients are ready.
    [[nodiscard]] std::optional<std::string> stalled() const {
        const std::scoped_lock lock(mutex_);
        for (const std::uint32_t g : plan_.order())
            if (!is_ready_[g]) return gradients_[g].name;
        return std::nullopt;
    }

private:
    using registered = detail::registered_gradient<T>;

    /// Clears `finite` if another rank has cleared it.
    template <class Net>
    [[nodiscard]] static collective_fault agree(Net& net, bool& finite, ns patience) {
        // not on the stack: after a fault the transport may still touch the word
        std::vector<std::uint64_t> anywhere{finite ? 0U : 1U};
        detail::lent_arrays memory(anywhere);
        const auto fault = memory.to([&] {
            return net.all_reduce(std::span<const std::uint64_t>(anywhere), std::span(anywhere), maximum{},
                                  saturating_add(std::chrono::steady_clock::now(), patience));
        });
        if (!fault) finite = anywhere[0] == 0;
        return fault;
    }
    /// One channel's step.
    template <bool Sharded, class Net, class Op>
    [[nodiscard]] collective_fault combine(Net& net, const Op& op, ns patience, std::uint32_t channel) {
        std::unique_lock lock(mutex_);
        prepare();
        rank_ = net.rank();
        channel_step<Sharded, Net, Op> step(*this, lock, net, op, patience, channel);
        if (channel >= channels_) return step.own(errc::invalid_specification, channel);
        const detail::counted here(inside_);
        return step.run();
    }
    /// One channel's part of a step, run by the thread in reduce(). The thread holds the mutex,
    /// except in calls of the transport and while it waits.
    template <bool Sharded, class Net, class Op>
    class channel_step {
    public:
        channel_step(gradient_buckets& all, std::unique_lock<std::mutex>& lock, Net& net, const Op& op, ns patience,
                     std::uint32_t channel) noexcept
            : all_(all), lock_(lock), net_(net), op_(op), patience_(patience), channel_(channel) {}

        [[nodiscard]] collective_fault own(errc code, std::uint32_t epoch = 0) const {
            return {code, Sharded ? collective_kind::reduce_scatter : collective_kind::all_reduce, net_.rank(), epoch};
        }
        [[nodiscard]] collective_fault run() {
            // Other channels may still be in the last step. The plan may change until a gradient is
            // ready.
            there_ = wait_for([&] { return all_.steps_of_channel_[channel_] == all_.steps_; }) &&
                     wait_for([&] { return !all_.now_seen_.empty() || all_.gradients_.empty(); });
            if (there_ && is_idle()) return own(errc::stopped);
            std::optional<detail::counted> works;
            if (there_) works.emplace(all_.working_);
            combine_buckets();
            if constexpr (Sharded)  // each rank has looked at its own shards only
                if (there_ && !fault_) unlocked([&] { fault_ = agree(net_, finite_, patience_); });
            if (!there_) fault_ = all_.fault_ ? all_.fault_ : own(errc::deadline_exceeded);
            if (!there_ || threw_) tell_others();
            end();
            return fault_;
        }

    private:
        /// Begins the buckets that are ready, as many as may be under way at once. Then waits for
        /// the oldest bucket.
        void combine_buckets() {
            const std::uint32_t stride = all_.choice_.in_flight, buckets = channel_ < stride ? all_.plan_.size() : 0;
            const auto is_ready = [&](std::uint32_t b) { return b < buckets && all_.missing_[b] == 0; };
            for (std::uint32_t next = channel_, oldest = channel_; there_ && !fault_;) {
                if (next == oldest) {
                    there_ = wait_for([&] { return next >= buckets || is_ready(next); });
                    if (!there_ || next >= buckets) break;
                }
                const bool begins =
                    is_ready(next) && !all_.fault_ && next - oldest < detail::buckets_at_once<Net> * stride;
                std::uint32_t& b = begins ? next : oldest;
                auto& staging = all_.staging_[(b / stride) % detail::most_buckets_at_once * all_.channels_ + channel_];
                const std::span gradients(all_.gradients_);
                unlocked([&] {
                    if (begins)
                        staging.template begin<Sharded>(net_, op_, gradients, all_.plan_.gradients(b));
                    else
                        fault_ =
                            staging.template end<Sharded>(net_, op_, gradients, all_.plan_.gradients(b), finite_,
                                                          saturating_add(std::chrono::steady_clock::now(), patience_));
                });
                b += stride;
            }
        }
        /// Call this if a gradient isn't ready, another channel has failed, or the transport threw.
        /// The other ranks should not wait for this channel.
        void tell_others() {
            lock_.unlock();
            const bool in_use = tell(net_, fault_);
            lock_.lock();
            fault_.buffers_in_use = fault_.buffers_in_use || in_use;
        }
        void end() {
            all_.finite_ = all_.finite_ && finite_;
            if (fault_ && !all_.fault_) all_.fault_ = fault_;
            if (fault_.buffers_in_use) {
                all_.fault_.buffers_in_use = true;
                for (std::size_t s = channel_; s < all_.staging_.size(); s += all_.channels_)
                    all_.staging_[s].leave_behind();
            }
            if (!all_.fault_) {  // a step with a fault never ends
                ++all_.steps_of_channel_[channel_];
                if (++all_.channels_done_ == all_.channels_) all_.end_step();
            }
            all_.changed_.notify_all();
        }

        [[nodiscard]] bool is_idle() const { return all_.stopped_ && all_.now_seen_.empty(); }
        template <class Seen>
        [[nodiscard]] bool wait_for(const Seen& seen) {
            return all_.heard(lock_, patience_, [&] { return all_.fault_ || is_idle() || seen(); }) && !all_.fault_;
        }
        template <class F>
        void unlocked(const F& f) {
            ++all_.with_others_;
            lock_.unlock();
            try {
                f();
            } catch (...) {
                threw_ = true;
                fault_ = own(detail::code_thrown());
            }
            lock_.lock();
            --all_.with_others_;
            ++all_.signs_;
        }

        gradient_buckets& all_;
        std::unique_lock<std::mutex>& lock_;
        Net& net_;
        const Op& op_;
        ns patience_;
        std::uint32_t channel_;
        collective_fault fault_;
        bool there_ = false;  // the last wait has succeeded
        bool finite_ = true, threw_ = false;
    };
    /// Waits until `seen()` holds. Returns false once a step in progress was silent for `patience`.
    template <class Seen>
    [[nodiscard]] bool heard(std::unique_lock<std::mutex>& lock, ns patience, const Seen& seen) {
        for (;;) {
            const std::uint64_t before = signs_;
            const instant until =
                saturating_add(std::chrono::steady_clock::now(), std::max<ns>(patience, std::chrono::milliseconds(1)));
            if (changed_.wait_until(lock, detail::within_a_year(until), seen)) return true;
            if (signs_ == before && with_others_ == 0 && (awaited_ || !now_seen_.empty())) return false;
        }
    }
    /// Tells the other ranks of a fault without waiting for them. Returns whether the transport may
    /// still touch the memory of transfers under way.
    template <class Net>
    [[nodiscard]] static bool tell(Net& net, const collective_fault& fault) noexcept {
        try {
            net.abort(fault.rank, fault.code);
        } catch (...) {  // nobody told the other ranks: they end when their own patience does
            return true;
        }
        return detail::gives_up(net);
    }

    /// Requires that `channels_` is set.
    [[nodiscard]] const bucket_choice& checked(const bucket_choice& choice) const {
        if (choice.in_flight == 0)
            raise({.code = errc::invalid_specification, .because = reason::no_channel}, {}, "choosing buckets");
        if (choice.in_flight > channels_)
            raise({errc::invalid_specification, choice.in_flight, 0, channels_, reason::count_limit}, {},
                  "buckets in flight, each on a channel");
        return choice;
    }
    [[nodiscard]] std::vector<std::size_t> wire_sizes() const {
        std::vector<std::size_t> sizes;
        for (const auto& g : gradients_) sizes.push_back(bytes_on_wire(g.wire, g.data.size(), sizeof(T)).count());
        return sizes;
    }
    /// Makes the plan of the next step if something has changed.
    void prepare() {
        if (arranged_) return;
        if (order_.size() != gradients_.size()) order_ = bucket_plan::backward_order(gradients_.size());
        plan_ = bucket_plan(wire_sizes(), order_, choice_.bucket);
        staging_.resize(std::size_t{channels_} * detail::most_buckets_at_once);
        steps_of_channel_.assign(channels_, steps_);
        seen_.reserve(gradients_.size());  // end_step() doesn't allocate
        reset();
        arranged_ = true;
    }
    void reset() {
        is_ready_.assign(gradients_.size(), false);
        missing_.resize(plan_.size());
        for (std::uint32_t b = 0; b < plan_.size(); ++b)
            missing_[b] = static_cast<std::uint32_t>(plan_.gradients(b).size());
        now_seen_.clear();
        now_seen_.reserve(gradients_.size());  // ready() doesn't allocate
        channels_done_ = 0;
        finite_ = true;
        awaited_ = false;
    }
    void end_step() {
        was_finite_ = finite_;
        std::swap(seen_, now_seen_);
        ++steps_;
        for (registered& g : gradients_) {
            if (!finite_) g.residual.swap(g.owed_before);
            g.rounded = false;
        }
        reset();
    }

    std::vector<registered> gradients_;
    std::uint32_t channels_ = 1;
    bucket_choice choice_;
    std::vector<std::uint32_t> order_;
    bucket_plan plan_;
    bool arranged_ = false, stopped_ = false;
    std::vector<detail::bucket_staging<T>> staging_;

    mutable std::mutex mutex_;
    // a bucket is ready, a channel is done, or a fault or stop() came
    std::condition_variable changed_;
    std::vector<bool> is_ready_;
    // for each bucket: the number of its gradients that aren't ready
    std::vector<std::uint32_t> missing_;
    std::vector<std::uint32_t> seen_, now_seen_;
    std::uint32_t channels_done_ = 0;
    std::vector<std::uint64_t> steps_of_channel_;
    std::uint64_t steps_ = 0, waited_for_ = 0;
    // signs of progress: calls of ready() and wait(), and of the transport
    std::uint64_t signs_ = 0;
    std::uint32_t inside_ = 0;  // threads in reduce()
    // threads in the transport, which has a deadline; they count in inside_, too
    std::uint32_t with_others_ = 0;
    // threads that have begun the step and may touch gradients; they count in inside_, too
    std::uint32_t working_ = 0;
    std::uint32_t rank_ = 0;  // this rank's number in the transport
    bool awaited_ = false;    // a thread is in wait() for this step
    bool finite_ = true, was_finite_ = true;
    collective_fault fault_;
};

namespace detail {

/// Some arrays of a list, under way between ranks.
template <class T>
struct gathered_group {
    std::span<const std::span<T>> arrays;
    packed_list<T> packed;
    std::uint64_t ticket = 0;

    template <class Net>
    void begin(Net& net, std::span<const std::span<T>> some) {
        arrays = some;
        packed.pack(some, net.size(), {net.rank(), net.rank() + 1});
        if constexpr (pipelined_transport<Net>) ticket = net.start_all_gather(packed.data());
    }
    template <class Net>
    [[nodiscard]] collective_fault end(Net& net, instant deadline) {
        collective_fault fault;
        if constexpr (pipelined_transport<Net>) {
            fault = net.finish(ticket, deadline);
        } else {
            const std::span<T> all = packed.data();
            const std::size_t each = all.size() / net.size();
            fault = net.all_gather(std::span<const T>(all.subspan(net.rank() * each, each)), all, deadline);
        }
        if (!fault) packed.unpack(arrays, {0, net.size()});
        return fault;
    }
};

}  // namespace detail

/// Every rank gets each rank's shard (shard_of) of every array of the list, in place. All ranks
/// make the same call, with the same sizes. Between threads nothing is packed. Otherwise arrays
/// travel in groups of at most `group` bytes, and a larger array travels alone. After a fault with
/// buffers_in_use, or an exception, the transport may still read and write the arrays. The call may
/// use the communicating thread's transport between a step's gradient_buckets::wait() and the next
/// step's first ready(), since that thread only waits in between. May throw std::bad_alloc, and the
/// transport's exceptions.
template <class T, host_transport Net>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] collective_fault all_gather_shards(Net& net, std::span<const std::type_identity_t<std::span<T>>> list,
                                                 instant deadline = never, bytes group = bytes{1 << 20}) {
    if constexpr (list_transport<Net>) {
        return net.template all_gather_list<T>(list, deadline);
    } else {
        // One group goes over the link while the next group is packed.
        std::array<detail::gathered_group<T>, pipelined_transport<Net> ? 2 : 1> under_way;
        std::size_t begun = 0, ended = 0;
        collective_fault fault;
        const auto leave_behind = [&] {
            for (auto& one : under_way) one.packed.leave_behind();
        };
        try {
            while (!fault && (!list.empty() || ended < begun)) {
                if (!list.empty() && begun - ended < under_way.size()) {
                    std::size_t arrays = 1, filled = list.front().size_bytes();
                    while (arrays < list.size() && filled + list[arrays].size_bytes() <= group.count())
                        filled += list[arrays++].size_bytes();
                    under_way[begun++ % under_way.size()].begin(net, list.first(arrays));
                    list = list.subspan(arrays);
                } else {
                    fault = under_way[ended++ % under_way.size()].end(net, deadline);
                }
            }
        } catch (...) {  // std::bad_alloc, for example: another group may be under way
            leave_behind();
            throw;
        }
        if (fault.buffers_in_use) leave_behind();
        return fault;
    }
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
