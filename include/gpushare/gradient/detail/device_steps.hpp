// SPDX-License-Identifier: Apache-2.0
// Steps of training by ranks that are threads of this process, with gradients on devices, for a
// framework whose threads have current streams of their own. This header doesn't use torch;
// gradient/torch_gradients.hpp has the hooks for libtorch. The thread that brings a bucket's last
// gradient enqueues the bucket for all ranks.
//
//   device_steps<node_type, combine_type, float> steps(node, streams, 2, combine, bucket, patience);
//   steps.add(r, gradients, stream);      // once for each rank
//   steps.ready(r, g, stream);            // the work that computes gradient g is on `stream`
//   auto fault = steps.wait(r, stream);   // later work on `stream` finds the averages
//
// Stream order: when a gradient is ready, the rank's stream waits for `stream`. After the step's
// last bucket, `stream` waits for the rank's stream. The host only waits until the other ranks have
// enqueued as much.
//
// Other processes take part if `combine` supports that (combines_with_others), as a combiner() of
// two_level_devices does. The ranks of all processes then compare what they have registered,
// buckets go type by type, and faults number the ranks of all processes.
//
// One rank here at a time waits for the other processes: in add() the last rank, and in ready() the
// rank that brings a bucket's last gradient. It waits without the lock, so the other ranks' calls
// return in the meantime. A gradient that becomes ready in the meantime is noted, and combined once
// the waiting rank is back. end() ends the wait.
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/lent_stream.hpp>
#include <gpushare/gradient/device_buckets.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The floating types of gradients.
enum class gradient_type : std::uint8_t { f32, f64, f16, bf16 };
template <class T>
inline constexpr gradient_type gradient_type_of = gradient_type::f32;
template <>
inline constexpr gradient_type gradient_type_of<double> = gradient_type::f64;
template <>
inline constexpr gradient_type gradient_type_of<float16> = gradient_type::f16;
template <>
inline constexpr gradient_type gradient_type_of<bfloat16> = gradient_type::bf16;

/// One rank's gradient, which stays where it is.
struct device_gradient {
    std::string name;
    gradient_type type = gradient_type::f32;
    void* data = nullptr;
    std::size_t count = 0;  // the number of elements
};

/// The calls that a framework's hooks make for the ranks. `stream` is the native handle of the
/// calling thread's current stream. A rank's calls come one after the other, on any threads.
class device_ranks {
public:
    device_ranks() = default;
    device_ranks(const device_ranks&) = delete;
    device_ranks& operator=(const device_ranks&) = delete;
    virtual ~device_ranks() = default;

    virtual void add(std::uint32_t rank, std::vector<device_gradient> mine, void* stream) = 0;
    virtual void ready(std::uint32_t rank, std::uint32_t g, void* stream) = 0;
    [[nodiscard]] virtual collective_fault wait(std::uint32_t rank, void* stream) = 0;
    /// Says that the rank has no batches left. Blocks until another rank begins a step, or a fault
    /// comes (true); or until no rank can begin a step any more (false).
    [[nodiscard]] virtual bool another(std::uint32_t rank) = 0;
    /// Makes every rank's wait() return this fault from now on, unless there was an earlier fault.
    /// The other processes learn of the fault. Doesn't wait for these processes.
    virtual void end(errc why, std::uint32_t rank) = 0;
};

/// How far each rank is, and which ranks have no batches left. A plain value. Once all ranks have
/// joined, a new epoch begins, in which each rank may step and join again.
class step_ledger {
public:
    explicit step_ledger(std::uint32_t ranks) : ranks_(ranks) {}

    /// Says that the rank has a gradient of its next step.
    void begins(std::uint32_t rank) noexcept {
        if (!ranks_[rank].joined) begun_ = std::max(begun_, ranks_[rank].done + 1);
    }
    /// Says that the last bucket of a step is enqueued.
    void combined() noexcept { ++combined_; }
    /// Whether the whole next step of the rank is enqueued.
    [[nodiscard]] bool has_next(std::uint32_t rank) const noexcept { return combined_ > ranks_[rank].done; }
    /// Says that the rank continues to the following step.
    void goes_on(std::uint32_t rank) noexcept { ++ranks_[rank].done; }
    /// The number of steps that the rank has finished.
    [[nodiscard]] std::uint32_t done(std::uint32_t rank) const noexcept { return ranks_[rank].done; }

    void joins(std::uint32_t rank) noexcept {
        if (std::exchange(ranks_[rank].joined, true)) return;
        ranks_[rank].epoch = epoch_;
        if (++joined_ < ranks_.size()) return;
        joined_ = 0;
        ++epoch_;
    }
    /// Whether a rank that has joined takes part in another step; empty while that is undecided.
    /// After `false`, the rank no longer counts as joined.
    [[nodiscard]] std::optional<bool> another(std::uint32_t rank) noexcept {
        of_rank& r = ranks_[rank];
        // Checked first, because another rank may have begun a step of the new epoch, which needs
        // this rank's own gradients.
        if (r.epoch != epoch_) return r.joined = false;
        if (begun_ > r.done) return true;
        return std::nullopt;
    }

private:
    struct of_rank {
        std::uint32_t done = 0;
        bool joined = false;
        std::uint32_t epoch = 0;  // the epoch in which the rank joined
    };
    std::vector<of_rank> ranks_;
    std::uint32_t begun_ = 0, combined_ = 0;  // numbers of steps
    std::uint32_t epoch_ = 0;
    std::size_t joined_ = 0;  // the number of ranks that have joined in this epoch
};

/// A way to combine with other processes. agree_on compares a number of each process. end tells the
/// other processes of a fault of a rank here. fault() returns the fault of all processes, with the
/// ranks of this process numbered from first() on. One thread at a time calls these functions. Any
/// thread may call interrupt, which ends another thread's call with a fault of a rank here.
template <class C>
concept combines_with_others = requires(C& c, std::uint64_t number, errc why, std::uint32_t rank) {
    { c.agree_on(number) } -> std::same_as<collective_fault>;
    c.end(why, rank);
    c.interrupt(why, rank);
    { c.fault() } -> std::same_as<collective_fault>;
    { c.first() } -> std::convertible_to<std::uint32_t>;
};

/// The steps of this process's ranks, with gradients of the types T. device_steps calls `Combine`
/// with the buckets of each type, as errc(device_buckets<T>&); `Combine` calls advance() on the
/// same streams. Calls of different ranks may run at the same time.
template <node Node, class Combine, class... T>
requires joining_timeline<typename Node::stream> &&(sizeof...(T) > 0) &&
    (... && std::is_invocable_r_v<errc, Combine&, device_buckets<T>&>)class device_steps : public device_ranks {
public:
    using stream = typename Node::stream;

    /// One stream for each rank, or one for all ranks; the streams must outlive the object. Throws
    /// operation_error (errc::invalid_specification) for another number of streams.
    device_steps(Node& on, std::span<stream> streams, std::uint32_t ranks, Combine combine, bytes bucket, ns patience)
        : node_(&on),
          streams_(streams),
          combine_(std::move(combine)),
          patience_(patience),
          bucket_(bucket),
          ledger_(ranks),
          of_(ranks),
          all_(std::conditional_t<true, layout, T>{ranks, bucket}...) {
        if (ranks == 0 || (streams.size() != ranks && streams.size() != 1))
            raise({errc::invalid_specification, streams.size(), 0, ranks, reason::wrong_count}, {},
                  "streams of ranks with gradients on devices");
    }

    /// Throws operation_error: invalid_specification for a rank that doesn't exist, or was added
    /// before; not_supported for a type that isn't one of T; mismatch, with the parameter's name,
    /// if another rank has other parameters; and the errors of borrowing the stream. The last rank
    /// here waits for other processes, and throws their fault: mismatch, with the rank, if a
    /// process has other parameters, types or buckets. A fault of a rank here also ends that wait,
    /// and add() throws the fault.
    void add(std::uint32_t rank, std::vector<device_gradient> mine, void* current) override {
        std::unique_lock lock(mutex_);
        if (rank >= of_.size() || of_[rank].here)
            raise({errc::invalid_specification, rank, 0, of_.size(), reason::no_such_rank}, {},
                  "registering a rank's gradients");
        for (const auto& g : mine)
            if (!((g.type == gradient_type_of<T>) || ...))
                raise({.code = errc::not_supported}, {}, g.name + ": a type that the ranks don't combine");
        for (const of_rank& other : of_)
            if (other.here) check_alike(mine, other.gradients);
        (void)lent(rank, current);
        of_[rank].marked.assign(mine.size(), false);
        of_[rank].gradients = std::move(mine);
        of_[rank].here = true;
        if (++here_ == of_.size()) try {
                register_all();
                agree(lock);
                go_on(lock);
            } catch (...) {  // the other ranks count this rank as present
                end_locked(lock, errc::submission_failed, rank);
                throw;
            }
    }

    void ready(std::uint32_t rank, std::uint32_t g, void* current) override {
        try {
            auto computed = lent(rank, current).record();
            std::unique_lock lock(mutex_);
            if (fault_) return;
            if (of_[rank].marked[g]) return end_locked(lock, errc::in_flight, rank);
            marks_.push_back({rank, g, std::move(computed)});
            of_[rank].marked[g] = true;
            ledger_.begins(rank);
            changed_.notify_all();
            go_on(lock);
        } catch (...) {
            end(errc::submission_failed, rank);
            throw;
        }
    }

    collective_fault wait(std::uint32_t rank, void* current) override {
        std::unique_lock lock(mutex_);
        if (of_[rank].gradients.empty()) return fault_;
        if (!wait_until(lock, [&] { return fault_ || ledger_.has_next(rank); }))
            end_locked(lock, errc::deadline_exceeded, late_rank());
        if (fault_) return fault_;
        try {
            // Waits for this step only, because no bucket of the next step is enqueued without this
            // rank.
            lent(rank, current).wait(stream_of(rank).record());
        } catch (...) {  // the other ranks would wait for this rank
            end_locked(lock, errc::submission_failed, rank);
            throw;
        }
        ledger_.goes_on(rank);
        of_[rank].marked.assign(of_[rank].marked.size(), false);
        return {};
    }

    bool another(std::uint32_t rank) override {
        std::unique_lock lock(mutex_);
        ledger_.joins(rank);
        changed_.notify_all();
        std::optional<bool> known;
        changed_.wait(lock, [&] {
            known = ledger_.another(rank);
            return fault_ || known;
        });
        return fault_ || *known;
    }

    void end(errc why, std::uint32_t rank) override {
        std::unique_lock lock(mutex_);
        end_locked(lock, why, rank);
    }

    /// The gradient for which a step waits, and the rank that lacks it; nothing if no step waits.
    [[nodiscard]] std::optional<std::pair<std::string, std::uint32_t>> stalled() const {
        const std::scoped_lock lock(mutex_);
        std::optional<std::pair<std::string, std::uint32_t>> found;
        ((found = found ? std::move(found) : stalled_of(gradient_type_of<T>)), ...);
        return found;
    }

private:
    struct layout {
        std::uint32_t ranks;
        bytes bucket;
    };
    template <class E>
    struct of_type {
        explicit of_type(const layout& l) : buckets(l.ranks, l.bucket) {}
        device_buckets<E> buckets;
        // whether gradients of the type are ready for combine_, and whether the type's part of the
        // step is over
        bool fresh = false, over = false;
    };
    static constexpr bool between_processes = combines_with_others<Combine>;
    struct of_rank {
        std::vector<device_gradient> gradients{};
        std::vector<bool> marked{};  // gradients that are ready in the rank's next step
        bool here = false;
        lent_stream<Node> current{};  // the framework's stream
    };

    /// A gradient that is ready once `computed` is reached.
    struct mark {
        std::uint32_t rank, g;
        typename stream::point computed;
    };

    static void check_alike(const std::vector<device_gradient>& a, const std::vector<device_gradient>& b) {
        for (std::size_t g = 0; g < std::max(a.size(), b.size()); ++g)
            if (g >= a.size() || g >= b.size() || a[g].type != b[g].type || a[g].count != b[g].count)
                raise({.code = errc::mismatch}, {},
                      (g < a.size() ? a[g].name : b[g].name) + ": another rank has other parameters");
    }
    [[nodiscard]] stream& stream_of(std::uint32_t rank) { return streams_[streams_.size() == 1 ? 0 : rank]; }
    [[nodiscard]] stream& lent(std::uint32_t rank, void* handle) { return of_[rank].current.as(*node_, handle); }

    void register_all() {
        for (std::size_t g = 0; g < of_[0].gradients.size(); ++g)
            ((of_[0].gradients[g].type == gradient_type_of<T> ? register_one<T>(g) : void()), ...);
        types_ = ((std::get<of_type<T>>(all_).buckets.size() != 0 ? 1U : 0U) + ...);
        left_ = types_;
    }
    /// Agrees with the other processes on what the ranks registered. Throws their fault.
    void agree(std::unique_lock<std::mutex>& lock) {
        if constexpr (between_processes) {
            if (fault_) return;
            const std::uint64_t mine = digest();
            const collective_fault f = away(lock, [&] { return combine_.agree_on(mine); });
            take_over(f);
            tell(lock);
            raise_fault(fault_);
        }
    }
    template <class E>
    void register_one(std::size_t g) {
        std::vector<E*> where;
        for (const of_rank& r : of_) where.push_back(static_cast<E*>(r.gradients[g].data));
        number_.push_back(
            std::get<of_type<E>>(all_).buckets.add(of_[0].gradients[g].name, where, of_[0].gradients[g].count));
    }

    // ---- one thread at a time combines, and doesn't hold the lock while it does

    /// Calls f without the lock. Until the thread is back, no other thread combines, or touches the
    /// data that combine_ works on; other threads may only interrupt.
    template <class F>
    auto away(std::unique_lock<std::mutex>& lock, const F& f) {
        struct trip {
            device_steps& of;
            std::unique_lock<std::mutex>& lock;
            trip(device_steps& s, std::unique_lock<std::mutex>& l) : of(s), lock(l) {
                of.is_away_ = true;
                of.changed_.notify_all();
                lock.unlock();
            }
            trip(const trip&) = delete;
            trip& operator=(const trip&) = delete;
            ~trip() {
                lock.lock();
                of.is_away_ = false;
                of.changed_.notify_all();
            }
        };
        const trip there_and_back(*this, lock);
        return f();
    }
    /// Combines the gradients that are ready, and those that become ready in the meantime. Does
    /// nothing while another thread combines.
    void go_on(std::unique_lock<std::mutex>& lock) {
        while (!is_away_ && here_ == of_.size() && !marks_.empty() && !fault_) {
            taken_.clear();
            taken_.swap(marks_);
            const std::uint32_t last = taken_.back().rank;
            if (const errc why = away(lock, [&] { return take_up(); }); why != errc::none)
                return combine_failed(lock, why, last);
            if (left_ != 0) continue;
            left_ = types_;
            ((std::get<of_type<T>>(all_).over = false), ...);
            ledger_.combined();
            changed_.notify_all();
        }
        tell(lock);
    }
    /// For each gradient in `taken_`, makes the rank's stream wait for the work that computes the
    /// gradient. Then sends all buckets that are ready.
    [[nodiscard]] errc take_up() {
        errc why = errc::none;
        for (const mark& m : taken_) {
            stream_of(m.rank).wait(m.computed);
            ((of_[m.rank].gradients[m.g].type == gradient_type_of<T> ? mark_one<T>(m, why) : void()), ...);
        }
        [[maybe_unused]] bool on = true;
        if constexpr (between_processes)  // all processes combine in one order: type by type
            ((on = on && advance_one<T>(why)), ...);
        else
            ((void)advance_one<T>(why), ...);
        return why;
    }
    template <class E>
    void mark_one(const mark& m, errc& why) {
        of_type<E>& mine = std::get<of_type<E>>(all_);
        if (const errc code = mine.buckets.ready(m.rank, number_[m.g]); code != errc::none) why = code;
        mine.fresh = true;
    }
    /// Whether the step needs no more work on this type.
    template <class E>
    [[nodiscard]] bool advance_one(errc& why) {
        of_type<E>& mine = std::get<of_type<E>>(all_);
        if (mine.over || mine.buckets.size() == 0) return true;
        if (why != errc::none || !std::exchange(mine.fresh, false)) return false;
        why = combine_(mine.buckets);
        // ready() has begun a step of these buckets, so complete() tells whether this call has
        // ended the step.
        if (why != errc::none || !mine.buckets.complete()) return false;
        mine.over = true;
        --left_;
        return true;
    }
    /// Waits until `over`. Returns false once the patience ends, not counting time in which a rank
    /// is away.
    template <class Over>
    [[nodiscard]] bool wait_until(std::unique_lock<std::mutex>& lock, const Over& over) {
        using clock = std::chrono::steady_clock;
        for (instant until = saturating_add(clock::now(), patience_); !over();) {
            const instant now = clock::now();
            if (is_away_) {
                changed_.wait(lock, [&] { return !is_away_ || over(); });
                until = saturating_add(until, clock::now() - now);
            } else if (now >= until) {
                return false;
            } else {
                changed_.wait_until(lock, within_a_year(until), [&] { return is_away_ || over(); });
            }
        }
        return true;
    }
    /// A hash of what the ranks registered, in the order in which they combine it.
    [[nodiscard]] std::uint64_t digest() const {
        std::uint64_t word = 1;
        const auto add = [&](std::uint64_t x) {
            word = (word ^ x) * 0x9e37'79b9'7f4a'7c15U;
            word ^= word >> 32U;
        };
        (add(static_cast<std::uint64_t>(gradient_type_of<T>)), ...);
        add(bucket_.count());
        for (const device_gradient& g : of_[0].gradients) {
            add(static_cast<std::uint64_t>(g.type));
            add(g.count);
        }
        return word;
    }

    /// The rank for which the others wait. Call this only while no thread is away.
    [[nodiscard]] std::uint32_t late_rank() const {
        for (std::uint32_t r = 0; r < of_.size(); ++r)
            if (!of_[r].here) return r;
        std::optional<std::pair<std::string, std::uint32_t>> who;
        ((who = who ? std::move(who) : stalled_of(gradient_type_of<T>)), ...);
        return who ? who->second : 0;
    }
    /// The answer of stalled() for one type. Looks from the last gradient on, because a step needs
    /// the last gradient first. While a thread is away, `marked` knows of more gradients than the
    /// buckets do.
    [[nodiscard]] std::optional<std::pair<std::string, std::uint32_t>> stalled_of(gradient_type type) const {
        if (here_ != of_.size()) return std::nullopt;
        const auto has = [&](std::uint32_t r, std::size_t g) { return !ledger_.has_next(r) && of_[r].marked[g]; };
        std::optional<std::pair<std::string, std::uint32_t>> found;
        bool begun = false;
        for (std::size_t g = of_[0].gradients.size(); g-- > 0;)
            for (std::uint32_t r = 0; r < of_.size() && of_[0].gradients[g].type == type; ++r)
                if (has(r, g))
                    begun = true;
                else if (!found)
                    found.emplace(of_[0].gradients[g].name, r);
        return begun ? found : std::nullopt;
    }
    void end_locked(std::unique_lock<std::mutex>& lock, errc why, std::uint32_t rank) {
        if (!fault_) {
            fault_ = {why, collective_kind::all_reduce, rank, ledger_.done(rank) + 1};
            if constexpr (between_processes) {
                fault_.rank += combine_.first();
                if (is_away_) combine_.interrupt(why, rank);
            }
            changed_.notify_all();
        }
        tell(lock);
    }
    /// Tells the other processes of a fault here, once, or lets the thread that is away do so.
    void tell(std::unique_lock<std::mutex>& lock) {
        if constexpr (between_processes)
            if (fault_ && !is_away_ && !std::exchange(told_, true))
                away(lock, [&] { combine_.end(fault_.code, fault_.rank - combine_.first()); });
    }
    /// Takes over a fault that the other processes know.
    void take_over(const collective_fault& theirs) {
        if (!theirs || fault_) return;
        fault_ = theirs;
        told_ = true;
        changed_.notify_all();
    }
    void combine_failed(std::unique_lock<std::mutex>& lock, errc why, std::uint32_t rank) {
        if constexpr (between_processes)
            if (collective_fault f = combine_.fault()) {
                f.epoch = ledger_.done(rank) + 1;
                take_over(f);
            }
        end_locked(lock, why, rank);
    }

    Node* node_;
    std::span<stream> streams_;
    Combine combine_;
    ns patience_;
    bytes bucket_;
    // Guards all members below, except of_[r].as, which belongs to rank r, and the data of the
    // thread that is away: combine_, all_, taken_ and left_. Once added, gradients in of_ don't
    // change.
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    step_ledger ledger_;
    std::vector<of_rank> of_;
    std::size_t here_ = 0;
    std::tuple<of_type<T>...> all_;
    // For each gradient: its number among the gradients of its type.
    std::vector<std::uint32_t> number_;
    // the ready gradients; those taken up by the thread that is away
    std::vector<mark> marks_, taken_;
    std::uint32_t types_ = 0, left_ = 0;  // types with gradients; types whose step isn't finished
    bool is_away_ = false;                // whether a thread works with combine_
    bool told_ = false;                   // whether the other processes know of the fault
    collective_fault fault_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
