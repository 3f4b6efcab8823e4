// SPDX-License-Identifier: Apache-2.0
// A rank's gradients, registered once, and combined with those of the other ranks in buckets while the backward pass goes on.
//
//   gpushare::gradient_buckets<> mine;                         // on every rank alike
//   for (auto& p : parameters) mine.add(p.name, p.gradient);
//   ...  mine.ready(g) by the thread that computes, as soon as gradient g is there
//   ...  mine.reduce(net, average{}, deadline) by a thread of yours that communicates: returns when the step's gradients are combined
//   ...  mine.wait(deadline) by the thread that computes, before it uses them
//
// (Or all of it by one thread: ready() for all, then reduce().) Between threads no gradient is copied: ranks tell each other where
// theirs are. Other transports get a packed copy. The bits are the same for every size of buckets, number of channels and algorithm,
// where the transport combines in the order of ranks.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/bucket_plan.hpp>
#include <gpushare/gradient/bucket_tuner.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/wire.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How a gradient travels.
struct gradient_options {
    wire_format wire = wire_format::as_is;  ///< 16 bits are for floats
    /// What rounding leaves is added to the next step's, and a step that is skipped leaves what was owed before it. Takes twice as much
    /// memory as the gradient.
    bool error_feedback = false;
};

/// One rank's gradients. add(), arrange() and the like between steps only, by one thread; ready() by the thread or threads that compute,
/// reduce() by one thread a channel. T is what gradients consist of.
template <reducible T = float>
class gradient_buckets {
public:
    gradient_buckets() = default;  ///< With the default choice.
    /// `choice.in_flight`: on how many channels reduce() is called in every step.
    /// Throws operation_error (errc::invalid_specification) for none.
    explicit gradient_buckets(const bucket_choice& choice) : choice_(checked(choice)) {}

    /// Registers a gradient, which stays where it is; its number is what was registered before. On all ranks in the same order, with the
    /// same sizes. Throws operation_error (errc::invalid_specification) for 16 bits of what isn't float.
    std::uint32_t add(std::string name, std::span<T> gradient, const gradient_options& options = {}) {
        if (options.wire != wire_format::as_is && !std::same_as<T, float>)
            raise({.code = errc::invalid_specification}, {}, "16 bits for a gradient that isn't float");
        const std::scoped_lock lock(mutex_);
        gradients_.push_back({std::move(name), gradient, options.wire, {}, {}});
        if (options.error_feedback && options.wire != wire_format::as_is)
            gradients_.back().residual.resize(gradient.size());
        order_.clear();
        arranged_ = false;
        return size() - 1;
    }

    /// Sets how gradients are fused from the next step on; on all ranks alike. Another number of channels only while no thread is in
    /// reduce(). Throws as the constructor.
    void arrange(const bucket_choice& choice) {
        const std::scoped_lock lock(mutex_);  // a thread may wait in reduce() for the next step already
        arranged_ = checked(choice) == choice_ && arranged_;
        choice_ = choice;
    }
    /// Sets in which order gradients become ready; on all ranks alike. Throws as bucket_plan.
    void arrange(std::span<const std::uint32_t> order) {
        const std::scoped_lock lock(mutex_);
        (void)bucket_plan(wire_sizes(), order, choice_.bucket);  // throws while nothing has changed
        order_.assign(order.begin(), order.end());
        arranged_ = false;
        prepare();
    }
    /// All ranks take the order in which rank 0's became ready in its last step. Called by all between two steps.
    template <transport Net>
    [[nodiscard]] collective_fault adopt_order(Net& net, instant deadline = never) {
        std::vector<std::uint32_t> seen =
            seen_.size() == gradients_.size() ? seen_ : bucket_plan::backward_order(size());
        const auto f = net.broadcast(std::span(seen), 0, deadline);
        if (!f) arrange(seen);
        return f;
    }

    [[nodiscard]] std::uint32_t size() const noexcept {
        return static_cast<std::uint32_t>(gradients_.size());
    }                                                                                          ///< gradients
    [[nodiscard]] std::string_view name(std::uint32_t g) const { return gradients_[g].name; }  ///< as it was registered
    [[nodiscard]] const bucket_choice& choice() const noexcept { return choice_; }             ///< of this step
    /// Which gradients go together.
    [[nodiscard]] const bucket_plan& plan() {
        const std::scoped_lock lock(mutex_);
        prepare();
        return plan_;
    }
    /// In which order they became ready in the step before.
    [[nodiscard]] std::span<const std::uint32_t> seen_order() const noexcept { return seen_; }
    /// What one step of this rank's gradients takes on the wire.
    [[nodiscard]] bytes wire_bytes() const noexcept {
        bytes all;
        for (const auto& g : gradients_) all += bytes_on_wire(g.wire, g.data.size(), sizeof(T));
        return all;
    }

    /// Says that gradient `g` is there for this step. errc::mismatch if it was already, or isn't one: a parameter that is used twice
    /// says so once, after its last use.
    errc ready(std::uint32_t g) {
        const std::scoped_lock lock(mutex_);
        prepare();
        if (g >= size() || is_ready_[g]) return errc::mismatch;
        is_ready_[g] = true;
        now_seen_.push_back(g);
        if (--missing_[plan_.bucket_of(g)] == 0) changed_.notify_all();
        return errc::none;
    }

    /// Combines the step's buckets of one channel, in their order, each as soon as it is ready. Of several channels, each has a transport
    /// and a thread of its own. After a fault no later step succeeds.
    ///   deadline_exceeded, of this rank   a gradient isn't ready: stalled() says which
    ///   stopped, of this rank             stop() was called, and no gradient of the step is ready: the group isn't aborted
    template <transport Net, class Op = average>
    [[nodiscard]] collective_fault reduce(Net& net, const Op& op = {}, instant deadline = never,
                                          std::uint32_t channel = 0) {
        std::unique_lock lock(mutex_);
        prepare();
        rank_ = net.rank();
        const std::uint32_t stride = choice_.in_flight;
        if (channel >= stride) return {errc::invalid_specification, collective_kind::all_reduce, net.rank(), channel};
        const auto idle = [&] { return stopped_ && now_seen_.empty(); };
        const auto wait_for = [&](const auto& seen) {
            return changed_.wait_until(lock, at_most(deadline), [&] { return fault_ || idle() || seen(); }) && !fault_;
        };
        // Other channels may still be in the step before.
        bool there = wait_for([&] { return steps_of_channel_[channel] == steps_; }), finite = true;
        const collective_fault stopped{errc::stopped, collective_kind::all_reduce, net.rank(), 0};
        if (there && idle()) return stopped;
        collective_fault fault;
        for (std::uint32_t b = channel; there && !fault; b += stride) {
            // Until the step's first gradient is ready there may come another plan, with fewer buckets.
            there = wait_for([&] { return b >= plan_.size() || missing_[b] == 0; });
            if (!there || b >= plan_.size()) break;
            if (idle()) return stopped;
            lock.unlock();
            fault = reduce_bucket(net, op, b, staging_[channel], finite, deadline);
            lock.lock();
        }
        if (!there) {  // a gradient isn't ready, or another channel has failed: nobody shall wait for this one
            fault =
                fault_ ? fault_ : collective_fault{errc::deadline_exceeded, collective_kind::all_reduce, net.rank(), 0};
            lock.unlock();
            net.abort(fault.rank, fault.code);
            (void)net.barrier(std::chrono::steady_clock::now());  // what has no thread tells others with its next call
            lock.lock();
        }
        finite_ = finite_ && finite;
        if (fault && !fault_) fault_ = fault;
        ++steps_of_channel_[channel];
        if (++channels_done_ == stride) end_step();
        changed_.notify_all();
        return fault;
    }

    /// No further step comes: lets a thread that waits in reduce() for the next one go. From any thread.
    void stop() {
        const std::scoped_lock lock(mutex_);
        stopped_ = true;
        changed_.notify_all();
    }
    /// Waits until reduce() has combined the step's gradients on all channels. Returns the fault, if any: after one at once, for no
    /// later step succeeds.
    [[nodiscard]] collective_fault wait(instant deadline = never) {
        std::unique_lock lock(mutex_);
        const auto over = [&] { return steps_ != waited_for_ || (fault_ && channels_done_ == 0); };
        if (!changed_.wait_until(lock, at_most(deadline), over))
            return {errc::deadline_exceeded, collective_kind::all_reduce, rank_, static_cast<std::uint32_t>(steps_)};
        waited_for_ = steps_;
        return fault_;
    }

    /// Whether all combined gradients of the last step were finite, with the same answer on all ranks: if not, the step is to be skipped.
    [[nodiscard]] bool was_finite() const {
        const std::scoped_lock lock(mutex_);
        return was_finite_;
    }
    /// The gradient that the next bucket waits for, by its name; none if all are ready.
    [[nodiscard]] std::optional<std::string> stalled() const {
        const std::scoped_lock lock(mutex_);
        for (const std::uint32_t g : plan_.order())
            if (!is_ready_[g]) return gradients_[g].name;
        return std::nullopt;
    }

private:
    struct registered {
        std::string name;
        std::span<T> data;
        wire_format wire;
        std::vector<float> residual, owed_before;  // of error feedback: now, and when the step began
    };
    /// Of a channel: kept from step to step.
    struct staging {
        std::vector<std::span<T>> list;
        std::vector<T> packed;
        std::vector<float16> float16s;
        std::vector<bfloat16> bfloat16s;
    };

    /// What a condition variable takes: some overflow with the last instant there is.
    [[nodiscard]] static instant at_most(instant deadline) noexcept {
        const instant far = std::chrono::steady_clock::now() + std::chrono::hours(24 * 365);
        return std::min(deadline, far);
    }

    [[nodiscard]] static const bucket_choice& checked(const bucket_choice& choice) {
        if (choice.in_flight == 0) raise({.code = errc::invalid_specification}, {}, "buckets on no channel");
        return choice;
    }
    [[nodiscard]] std::vector<std::size_t> wire_sizes() const {
        std::vector<std::size_t> sizes;
        for (const auto& g : gradients_) sizes.push_back(bytes_on_wire(g.wire, g.data.size(), sizeof(T)).count());
        return sizes;
    }
    /// The plan of the next step, if something has changed.
    void prepare() {
        if (arranged_) return;
        if (order_.size() != gradients_.size()) order_ = bucket_plan::backward_order(gradients_.size());
        plan_ = bucket_plan(wire_sizes(), order_, choice_.bucket);
        staging_.resize(choice_.in_flight);
        steps_of_channel_.assign(choice_.in_flight, steps_);
        arranged_ = true;
        reset();
    }
    void reset() {
        is_ready_.assign(gradients_.size(), false);
        missing_.resize(plan_.size());
        for (std::uint32_t b = 0; b < plan_.size(); ++b)
            missing_[b] = static_cast<std::uint32_t>(plan_.gradients(b).size());
        now_seen_.clear();
        channels_done_ = 0;
        finite_ = true;
    }
    void end_step() {
        was_finite_ = finite_;
        if (!finite_)
            for (auto& g : gradients_) g.residual.swap(g.owed_before);
        std::swap(seen_, now_seen_);
        ++steps_;
        channels_done_ = 0;
        if (!fault_) reset();  // else stalled() still tells
    }

    template <class Net, class Op>
    [[nodiscard]] collective_fault reduce_bucket(Net& net, const Op& op, std::uint32_t b, staging& s, bool& finite,
                                                 instant deadline) {
        if (const auto f = reduce_as_is(net, op, b, s, deadline)) return f;
        if constexpr (std::same_as<T, float>) {
            if (const auto f = reduce_halves<float16>(net, op, b, s, wire_format::fp16, deadline)) return f;
            if (const auto f = reduce_halves<bfloat16>(net, op, b, s, wire_format::bf16, deadline)) return f;
        }
        for (const std::uint32_t g : plan_.gradients(b))
            finite = finite && all_finite(std::span<const T>(gradients_[g].data));
        return {};
    }
    template <class Net, class Op>
    [[nodiscard]] collective_fault reduce_as_is(Net& net, const Op& op, std::uint32_t b, staging& s, instant deadline) {
        s.list.clear();
        std::size_t elements = 0;
        for (const std::uint32_t g : plan_.gradients(b))
            if (gradients_[g].wire == wire_format::as_is) {
                s.list.push_back(gradients_[g].data);
                elements += s.list.back().size();
            }
        if (s.list.empty()) return {};
        if constexpr (list_transport<Net>) {
            return net.all_reduce_list(std::span<const std::span<T>>(s.list), op, deadline);
        } else {
            if (s.list.size() == 1)
                return net.all_reduce(std::span<const T>(s.list.front()), s.list.front(), op, deadline);
            s.packed.resize(elements);
            std::size_t at = 0;
            for (const auto& x : s.list) at = copy(x, std::span(s.packed).subspan(at, x.size()), at);
            if (const auto f = net.all_reduce(std::span<const T>(s.packed), std::span(s.packed), op, deadline))
                return f;
            at = 0;
            for (const auto& x : s.list) at = copy(std::span(s.packed).subspan(at, x.size()), x, at);
            return {};
        }
    }
    static std::size_t copy(std::span<const T> from, std::span<T> to, std::size_t at) noexcept {
        std::copy(from.begin(), from.end(), to.begin());
        return at + from.size();
    }
    template <class Wire, class Net, class Op>
    [[nodiscard]] collective_fault reduce_halves(Net& net, const Op& op, std::uint32_t b, staging& s,
                                                 wire_format format, instant deadline) {
        std::size_t elements = 0;
        for (const std::uint32_t g : plan_.gradients(b))
            if (gradients_[g].wire == format) elements += gradients_[g].data.size();
        if (elements == 0) return {};
        std::vector<Wire>& memory = [&]() -> std::vector<Wire>& {
            if constexpr (std::same_as<Wire, float16>)
                return s.float16s;
            else
                return s.bfloat16s;
        }();
        memory.resize(elements);
        const std::span<Wire> halves(memory);
        std::size_t at = 0;
        for (const std::uint32_t g : plan_.gradients(b))
            if (gradients_[g].wire == format) {
                const std::size_t n = gradients_[g].data.size();
                gradients_[g].owed_before = gradients_[g].residual;
                to_wire<Wire>(gradients_[g].data, halves.subspan(at, n), gradients_[g].residual);
                at += n;
            }
        if (const auto f = net.all_reduce(std::span<const Wire>(halves), halves, op, deadline)) return f;
        at = 0;
        for (const std::uint32_t g : plan_.gradients(b))
            if (gradients_[g].wire == format) {
                const std::size_t n = gradients_[g].data.size();
                from_wire<Wire>(halves.subspan(at, n), gradients_[g].data);
                at += n;
            }
        return {};
    }

    std::vector<registered> gradients_;
    bucket_choice choice_;
    std::vector<std::uint32_t> order_;
    bucket_plan plan_;
    bool arranged_ = false, stopped_ = false;
    std::vector<staging> staging_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;  // a bucket is ready, or a channel is done
    std::vector<bool> is_ready_;
    std::vector<std::uint32_t> missing_;  // of each bucket, how many aren't ready
    std::vector<std::uint32_t> seen_, now_seen_;
    std::uint32_t channels_done_ = 0;
    std::vector<std::uint64_t> steps_of_channel_;
    std::uint64_t steps_ = 0, waited_for_ = 0;
    std::uint32_t rank_ = 0;  // of the transport
    bool finite_ = true, was_finite_ = true;
    collective_fault fault_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
