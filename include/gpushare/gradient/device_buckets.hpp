// SPDX-License-Identifier: Apache-2.0
// Gradients on devices. A program registers them once. In each step, while the backward pass runs,
// the gradients are combined in buckets on streams. Each rank has a device of this process, or all
// ranks share one device. (gradient_buckets is for gradients in the host's memory.)
//
//   gpushare::device_buckets<float> mine(ranks);
//   for (auto& p : parameters) mine.add(p.name, p.of_ranks, p.size);  // a pointer for each rank
//   for (unsigned r = 0; r < ranks; ++r)
//       staging[r] = static_cast<float*>(memory[r]->allocate(mine.staging_bytes().count(), 256));
//   const auto engine = [&](auto ins, auto outs, std::size_t n, auto op) {
//       return gpushare::submit_all_reduce<float>(node.gangs(), devices, std::span(streams),
//                                                 members, ins, outs, n, op);
//   };
//   mine.ready(r, g);              // streams[r] has the work that computes gradient g
//   while (!mine.complete()) mine.advance(std::span(streams), staging, engine);  // enqueues it
//
// Work that is enqueued on a rank's stream after the last bucket finds the averages in the
// gradients. NCCL can be the engine as well, with an nccl_communicator in place of the members
// (nccl.hpp), and so can a quantised all-reduce (collective/quantised_all_reduce.hpp).
//
// If a rank's gradients of a bucket are adjacent in the order of registration, they aren't packed:
// one flat buffer of all gradients is combined in place. Other gradients go through one staging
// array for each rank. With `device_buckets<float, bfloat16>`, packing rounds to 16 bits. With
// error feedback, the next step adds the rounding error.
//
// Error feedback takes halves.feedback_bytes() of each rank's device:
//
//   gpushare::device_buckets<float, gpushare::bfloat16> halves(ranks);
//   halves.feed_back(zeroed);
//   halves.watch(flags);           // if one becomes 1, a gradient isn't finite: halves.skip()
//
// `device_fp8_feedback` adds error feedback to an engine that sends fp8 blocks. `device_top_k` is
// an engine that sends the largest elements only. `device_gossip` averages neighbours' parameters.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/collective/quantised_all_reduce.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/bucket_plan.hpp>
#include <gpushare/gradient/detail/gossip.hpp>
#include <gpushare/gradient/detail/packing.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// An engine that keeps state for each element. The call is `errc(ins, outs, count, op, before)`,
/// where `before` is the number of elements in earlier buckets, in the plan's order.
template <class E, class T, class Op>
concept placed_engine = requires(const E& engine, std::span<const T* const> ins, std::span<T* const> outs,
                                 std::size_t count, Op op) {
    { engine(ins, outs, count, op, count) } -> std::same_as<errc>;
};
/// An engine combines the ranks' arrays on their streams. It is a function `errc(ins, outs, count,
/// op)`, or a placed_engine. `ins` and `outs` have a pointer for each rank; device_buckets passes
/// the same pointers in both. An engine should only enqueue work. The engine of two_level_devices
/// also waits for the devices and for other processes.
template <class E, class T, class Op>
concept device_engine = placed_engine<E, T, Op> ||
    requires(const E& engine, std::span<const T* const> ins, std::span<T* const> outs, std::size_t count, Op op) {
    { engine(ins, outs, count, op) } -> std::same_as<errc>;
};

/// Packs by a kernel of its own, in one pass, whatever the types are. cub_packing (interop/cub.cuh)
/// is another packing. Both have pack(stream, pieces, flat) and unpack(stream, pieces, flat), where
/// `pieces` are pairs of a pointer and a number of elements.
struct kernel_packing {
    /// Enqueues the copy of all pieces to `flat`, one after the other.
    template <launcher Stream, class T, class Wire>
    void pack(Stream& stream, std::span<const std::pair<T*, std::size_t>> pieces, Wire* flat) const {
        run<true>(stream, pieces, flat);
    }
    /// Enqueues the copy back.
    template <launcher Stream, class T, class Wire>
    void unpack(Stream& stream, std::span<const std::pair<T*, std::size_t>> pieces, Wire* flat) const {
        run<false>(stream, pieces, flat);
    }

    /// Packs with error feedback. A piece also points to the residuals of its elements, and its
    /// `end` is the number of elements. The residuals for the next step are stored `next` elements
    /// further on.
    template <launcher Stream, class Wire>
    void pack_owing(Stream& stream, std::span<const typename detail::packing_owing<Wire>::piece> pieces, Wire* flat,
                    std::ptrdiff_t next) const {
        launch_lists(stream, detail::packing_owing<Wire>{flat, next, {}}, pieces, std::identity{});
    }

private:
    template <bool Packs, class Stream, class T, class Wire>
    static void run(Stream& stream, std::span<const std::pair<T*, std::size_t>> pieces, Wire* flat) {
        using kernel = detail::packing<T, Wire, Packs>;
        const auto listed = [](const auto& p) { return typename kernel::piece{p.first, p.second}; };
        launch_lists(stream, kernel{flat, {}}, pieces, listed);
    }
    /// Launches as many kernels like `empty` as the lists of all pieces take.
    template <class Stream, class Kernel, class Piece, class Listed>
    static void launch_lists(Stream& stream, Kernel empty, std::span<const Piece> pieces, const Listed& listed) {
        while (!pieces.empty()) {
            Kernel some = empty;
            std::size_t taken = 0;
            while (taken < pieces.size() && some.list.add(listed(pieces[taken]))) ++taken;
            stream.launch(some.shape(), some);
            empty.flat += some.list.elements();
            pieces = pieces.subspan(taken);
        }
    }
};

/// The gradients of all ranks of this process. T is the type of the gradients. Wire is the type
/// that is combined: T, or 16-bit floats. Call add() and arrange() between steps only, in one
/// thread. Any thread may call ready(), and one thread at a time may call advance().
template <reducible T, reducible Wire = T, class Packing = kernel_packing>
requires std::same_as<T, Wire> ||(std::same_as<T, float>&& detail::is_half<Wire>)class device_buckets {
public:
    /// For this many ranks. `bucket` is the most bytes of a bucket on the wire.
    explicit device_buckets(std::uint32_t ranks, bytes bucket = bucket_choice{}.bucket, Packing packing = {})
        : ranks_(ranks), bucket_(bucket), packing_(std::move(packing)), ins_(ranks), outs_(ranks) {}

    /// Registers a gradient of `count` elements, which stays at of_ranks[r] on rank r's device.
    /// Returns its number, counted from 0. Throws operation_error (errc::invalid_specification)
    /// unless there is a pointer for each rank.
    std::uint32_t add(std::string name, std::span<T* const> of_ranks, std::size_t count) {
        if (of_ranks.size() != ranks_)
            raise({errc::invalid_specification, of_ranks.size(), 0, ranks_, reason::no_such_rank}, {},
                  "registering a gradient");
        const std::scoped_lock lock(mutex_);
        gradients_.push_back({std::move(name), {of_ranks.begin(), of_ranks.end()}, count});
        order_.clear();
        owed_.clear();
        may_skip_ = false;
        arranged_ = false;
        return size() - 1;
    }
    /// Sets the order in which gradients become ready, from the next step on. By default the
    /// gradient that was registered last comes first. Throws what bucket_plan throws.
    void arrange(std::span<const std::uint32_t> order) {
        const std::scoped_lock lock(mutex_);
        (void)bucket_plan(wire_sizes(), order, bucket_);
        order_.assign(order.begin(), order.end());
        arranged_ = false;
    }

    /// The number of gradients.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(gradients_.size()); }
    /// The number of ranks in this process.
    [[nodiscard]] std::uint32_t ranks() const noexcept { return ranks_; }
    /// The name with which the gradient was registered.
    [[nodiscard]] std::string_view name(std::uint32_t g) const { return gradients_[g].name; }
    /// The number of elements in all gradients of a rank.
    [[nodiscard]] std::size_t elements() const {
        const std::scoped_lock lock(mutex_);
        return count_all();
    }
    /// Which gradients are in which bucket.
    [[nodiscard]] const bucket_plan& plan() {
        const std::scoped_lock lock(mutex_);
        prepare();
        return plan_;
    }
    /// The bytes of each rank's staging array, which holds the largest bucket. The array has an
    /// alignment of 16.
    [[nodiscard]] bytes staging_bytes() {
        const std::scoped_lock lock(mutex_);
        prepare();
        std::size_t most = 0;
        for (std::uint32_t b = 0; b < plan_.size(); ++b) most = std::max(most, elements_of(b));
        return bytes{most * sizeof(Wire)};
    }
    /// The elements that a step copies to the staging arrays of all ranks, and as many back; 0 if
    /// each rank's gradients are one flat buffer.
    [[nodiscard]] std::size_t packed_elements() {
        const std::scoped_lock lock(mutex_);
        prepare();
        std::size_t all = 0;
        for (std::uint32_t b = 0; b < plan_.size(); ++b)
            for (std::uint32_t r = 0; r < ranks_; ++r) all += is_flat(b, r) ? 0 : elements_of(b);
        return all;
    }

    /// Reports that the work that computes gradient `g` of this step on rank `rank` is enqueued on
    /// that rank's stream, or that the stream waits for the work. Returns errc::mismatch if the
    /// gradient was ready already, or there is no such rank or gradient.
    errc ready(std::uint32_t rank, std::uint32_t g) {
        const std::scoped_lock lock(mutex_);
        prepare();
        if (rank >= ranks_ || g >= size() || is_ready_[std::size_t{rank} * size() + g]) return errc::mismatch;
        if (next_ == plan_.size()) reset();  // the first gradient of another step
        is_ready_[std::size_t{rank} * size() + g] = true;
        --missing_[plan_.bucket_of(g)];
        return errc::none;
    }
    /// Whether all buckets of the step are enqueued. Any thread may ask.
    [[nodiscard]] bool complete() const {
        const std::scoped_lock lock(mutex_);
        return arranged_ && next_ == plan_.size();
    }
    /// The plan's first gradient that isn't ready on some rank, and the rank; none if all are
    /// ready.
    [[nodiscard]] std::optional<std::pair<std::string, std::uint32_t>> stalled() const {
        const std::scoped_lock lock(mutex_);
        if (!arranged_ || next_ == plan_.size()) return std::nullopt;
        for (const std::uint32_t g : plan_.order())
            for (std::uint32_t r = 0; r < ranks_; ++r)
                if (!is_ready_[std::size_t{r} * size() + g]) return std::pair(gradients_[g].name, r);
        return std::nullopt;
    }

    /// The bytes that error feedback takes on each rank's device: two floats for each element.
    [[nodiscard]] bytes feedback_bytes() const {
        const std::scoped_lock lock(mutex_);
        return bytes{2 * count_all() * sizeof(float)};
    }
    /// From the next step on, packing adds to each element its earlier rounding error, and keeps
    /// the new error, with the bits of to_wire (gradient/wire.hpp). memory[r] is zeroed memory of
    /// rank r's device, of feedback_bytes(). An empty span turns error feedback off, and so does
    /// add(). Call this between steps only. Throws operation_error (errc::invalid_specification)
    /// unless there is memory for each rank.
    void feed_back(std::span<float* const> memory) requires detail::is_half<Wire> {
        const std::scoped_lock lock(mutex_);
        if (!memory.empty() && memory.size() != ranks_)
            raise({errc::invalid_specification, memory.size(), 0, ranks_, reason::no_such_rank}, {},
                  "error feedback of gradients");
        owed_.assign(memory.begin(), memory.end());
        first_.clear();
        for (std::size_t at = 0; const auto& g : gradients_) {
            first_.push_back(at);
            at += g.count;
        }
        later_half_ = may_skip_ = false;
    }
    /// Where the rank's device has the residuals of gradient g, between steps. Save them with the
    /// parameters. Null without error feedback.
    [[nodiscard]] float* owed(std::uint32_t rank, std::uint32_t g) const {
        const std::scoped_lock lock(mutex_);
        return owed_.empty() ? nullptr : owed_at(rank, g);
    }
    /// Takes back the last step, which the caller doesn't apply: the residuals from before the step
    /// apply again. Call skip() between steps, before the next step's first ready(). A second call
    /// does nothing.
    void skip() {
        const std::scoped_lock lock(mutex_);
        later_half_ = later_half_ != may_skip_;
        may_skip_ = false;
    }
    /// From the next step on, rank r's device sets flags[r] to 1 if a combined gradient is infinite
    /// or NaN. The caller sets the flags back to 0. All ranks get the same flag if the engine gives
    /// them the same bits. An empty span turns the check off. Call this between steps only. Throws
    /// as feed_back does.
    void watch(std::span<std::uint32_t* const> flags) {
        const std::scoped_lock lock(mutex_);
        if (!flags.empty() && flags.size() != ranks_)
            raise({errc::invalid_specification, flags.size(), 0, ranks_, reason::no_such_rank}, {},
                  "a look for gradients that aren't finite");
        flags_.assign(flags.begin(), flags.end());
    }

    /// Enqueues the next buckets, in the plan's order, as long as all ranks' gradients are ready. A
    /// bucket is packed on each rank's stream, combined by `engine`, and unpacked. There is a
    /// stream for each rank, or one stream for all ranks if they share a device. staging[r] is
    /// memory of rank r's device that other streams don't use. Returns the engine's error, if any;
    /// the next call tries that bucket again. Returns errc::invalid_specification for another
    /// number of streams or staging arrays. Throws what streams throw.
    template <launcher Stream, class Engine, class Op = average>
    requires device_engine<Engine, Wire, Op>
    [[nodiscard]] errc advance(std::span<Stream> streams, std::span<Wire* const> staging, const Engine& engine,
                               Op op = {}) {
        if (staging.size() != ranks_ || (streams.size() != ranks_ && streams.size() != 1))
            return errc::invalid_specification;
        for (;;) {
            std::unique_lock lock(mutex_);
            prepare();
            if (next_ == plan_.size() || missing_[next_] != 0) return errc::none;
            const std::uint32_t b = next_;
            lock.unlock();
            if (const errc why = combine(b, streams, staging, engine, op); why != errc::none) return why;
            lock.lock();
            if (++next_ == plan_.size()) end_step();
        }
    }

private:
    /// Only used for 16-bit floats; other types have no rounding error.
    using owing_piece =
        typename detail::packing_owing<std::conditional_t<detail::is_half<Wire>, Wire, bfloat16>>::piece;

    struct registered {
        std::string name;
        std::vector<T*> of_ranks;
        std::size_t count;
    };

    template <class Stream, class Engine, class Op>
    [[nodiscard]] errc combine(std::uint32_t b, std::span<Stream> streams, std::span<Wire* const> staging,
                               const Engine& engine, Op op) {
        const std::size_t count = elements_of(b);
        const auto stream_of = [&](std::uint32_t r) -> Stream& { return streams[streams.size() == 1 ? 0 : r]; };
        for (std::uint32_t r = 0; r < ranks_; ++r) {
            outs_[r] = staging[r];
            if constexpr (std::same_as<T, Wire>)
                if (is_flat(b, r)) outs_[r] = flat_begin(b, r);
            ins_[r] = outs_[r];
            if (!is_flat(b, r)) pack(stream_of(r), b, r, staging[r]);
        }
        const std::span<const Wire* const> ins(ins_);
        errc why = errc::none;
        if constexpr (placed_engine<Engine, Wire, Op>)
            why = engine(ins, std::span<Wire* const>(outs_), count, op, elements_before(b));
        else
            why = engine(ins, std::span<Wire* const>(outs_), count, op);
        if (why != errc::none) return why;
        for (std::uint32_t r = 0; r < ranks_; ++r) {
            if constexpr (!std::integral<Wire>)
                if (!flags_.empty()) {
                    const detail::finite_look<Wire> look{outs_[r], count, flags_[r]};
                    stream_of(r).launch(look.shape(), look);
                }
            if (!is_flat(b, r)) packing_.unpack(stream_of(r), pieces_of(b, r), staging[r]);
        }
        return errc::none;
    }
    template <class Stream>
    void pack(Stream& stream, std::uint32_t b, std::uint32_t r, Wire* to) {
        if constexpr (detail::is_half<Wire> && std::same_as<T, float>)
            if (!owed_.empty()) {
                owing_.clear();
                for (const std::uint32_t g : plan_.gradients(b))
                    if (const std::size_t n = gradients_[g].count; n != 0)
                        owing_.push_back({gradients_[g].of_ranks[r], owed_at(r, g), n});
                const auto half = static_cast<std::ptrdiff_t>(count_all());
                return kernel_packing{}.pack_owing(stream, std::span<const owing_piece>(owing_), to,
                                                   later_half_ ? -half : half);
            }
        packing_.pack(stream, pieces_of(b, r), to);
    }
    [[nodiscard]] float* owed_at(std::uint32_t rank, std::uint32_t g) const {
        return owed_[rank] + (later_half_ ? count_all() : 0) + first_[g];
    }
    [[nodiscard]] std::size_t count_all() const {
        std::size_t all = 0;
        for (const auto& g : gradients_) all += g.count;
        return all;
    }
    [[nodiscard]] std::size_t elements_before(std::uint32_t bucket) const {
        std::size_t all = 0;
        for (std::uint32_t b = 0; b < bucket; ++b) all += elements_of(b);
        return all;
    }
    void end_step() {
        std::fill(is_ready_.begin(), is_ready_.end(), false);
        may_skip_ = !owed_.empty();
        later_half_ = later_half_ != may_skip_;
    }

    [[nodiscard]] std::size_t elements_of(std::uint32_t b) const {
        std::size_t all = 0;
        for (const std::uint32_t g : plan_.gradients(b)) all += gradients_[g].count;
        return all;
    }
    [[nodiscard]] bool is_flat(std::uint32_t b, std::uint32_t r) const noexcept {
        return flat_[std::size_t{b} * ranks_ + r];
    }
    /// The address of the bucket's first gradient with elements. Empty gradients may be anywhere.
    [[nodiscard]] T* flat_begin(std::uint32_t b, std::uint32_t r) const {
        for (const std::uint32_t g : plan_.gradients(b))
            if (gradients_[g].count != 0) return gradients_[g].of_ranks[r];
        return nullptr;
    }
    [[nodiscard]] bool lies_flat(std::uint32_t b, std::uint32_t r) const {
        if (!std::same_as<T, Wire>) return false;
        const T* next = flat_begin(b, r);
        for (const std::uint32_t g : plan_.gradients(b)) {
            if (gradients_[g].count == 0) continue;
            if (gradients_[g].of_ranks[r] != next) return false;
            next += gradients_[g].count;
        }
        return true;
    }
    /// Only the thread in advance() calls this. prepare() has allocated the list's memory.
    [[nodiscard]] std::span<const std::pair<T*, std::size_t>> pieces_of(std::uint32_t b, std::uint32_t r) {
        pieces_.clear();
        for (const std::uint32_t g : plan_.gradients(b))
            if (gradients_[g].count != 0) pieces_.emplace_back(gradients_[g].of_ranks[r], gradients_[g].count);
        return pieces_;
    }
    [[nodiscard]] std::vector<std::size_t> wire_sizes() const {
        std::vector<std::size_t> sizes;
        for (const auto& g : gradients_) sizes.push_back(g.count * sizeof(Wire));
        return sizes;
    }
    void prepare() {
        if (arranged_) return;
        if (order_.size() != gradients_.size()) order_ = bucket_plan::backward_order(gradients_.size());
        plan_ = bucket_plan(wire_sizes(), order_, bucket_);
        flat_.assign(std::size_t{plan_.size()} * ranks_, false);
        for (std::uint32_t b = 0; b < plan_.size(); ++b)
            for (std::uint32_t r = 0; r < ranks_; ++r) flat_[std::size_t{b} * ranks_ + r] = lies_flat(b, r);
        pieces_.reserve(gradients_.size());
        if (!owed_.empty()) owing_.reserve(gradients_.size());
        is_ready_.assign(std::size_t{ranks_} * gradients_.size(), false);
        missing_.resize(plan_.size());
        arranged_ = true;
        reset();
    }
    /// The end of a step, or prepare(), has cleared is_ready_.
    void reset() {
        for (std::uint32_t b = 0; b < plan_.size(); ++b)
            missing_[b] = ranks_ * static_cast<std::uint32_t>(plan_.gradients(b).size());
        next_ = 0;
    }

    const std::uint32_t ranks_;
    const bytes bucket_;
    Packing packing_;
    std::vector<registered> gradients_;
    mutable std::mutex mutex_;  // guards the members below, except those that only advance() uses
    std::vector<std::uint32_t> order_;
    bool arranged_ = false;
    bucket_plan plan_;
    std::vector<bool> flat_, is_ready_;
    // for each bucket: the number of its gradients that aren't ready
    std::vector<std::uint32_t> missing_;
    std::uint32_t next_ = 0;  // the next bucket
    std::vector<std::pair<T*, std::size_t>> pieces_;
    std::vector<float*> owed_;           // memory of each rank, in two halves
    std::vector<std::size_t> first_;     // where each gradient begins in a half
    bool later_half_ = false;            // the later half holds the residuals
    bool may_skip_ = false;              // whether the last step can be taken back
    std::vector<std::uint32_t*> flags_;  // a flag for each rank
    std::vector<owing_piece> owing_;
    std::vector<const Wire*> ins_;
    std::vector<Wire*> outs_;
};

namespace detail {

/// Each rank's memory for the residuals of `elements` elements, in two halves. A step reads one
/// half and writes the other. So a first bucket that is tried again counts once, and the step can
/// be taken back.
class owed_memory {
public:
    owed_memory(std::uint32_t ranks, std::size_t elements) noexcept : ranks_(ranks), elements_(elements) {}
    /// Takes zeroed memory. Throws operation_error (errc::invalid_specification), which says `what`
    /// needs the memory, unless there is memory for each rank.
    void use(std::span<float* const> memory, std::string_view what) {
        if (memory.size() != ranks_)
            raise({errc::invalid_specification, memory.size(), 0, ranks_, reason::no_such_rank}, {}, what);
        memory_.assign(memory.begin(), memory.end());
        later_ = may_skip_ = false;
        fresh_ = true;
    }
    [[nodiscard]] std::uint32_t ranks() const noexcept { return ranks_; }
    [[nodiscard]] std::size_t elements() const noexcept { return elements_; }
    /// Whether there is memory for a bucket on that many streams.
    [[nodiscard]] bool fits(std::size_t streams, std::size_t ranks, std::size_t count,
                            std::size_t before) const noexcept {
        return memory_.size() == ranks_ && ranks == ranks_ && (streams == 1 || streams == ranks_) &&
               before + count <= elements_;
    }
    /// The half that holds the residuals; during a step, the half that the step writes.
    [[nodiscard]] float* owed(std::uint32_t rank) const { return memory_[rank] + (later_ ? elements_ : 0); }
    /// The other half.
    [[nodiscard]] float* other(std::uint32_t rank) const { return memory_[rank] + (later_ ? 0 : elements_); }
    /// Where the rank's memory continues.
    [[nodiscard]] float* behind(std::uint32_t rank) const { return memory_[rank] + 2 * elements_; }
    /// Call this before each bucket.
    void begin(std::size_t elements_before) noexcept {
        if (elements_before != 0 || !std::exchange(fresh_, false)) return;
        later_ = !later_;
        may_skip_ = false;
    }
    /// Call this when a bucket is enqueued. The next first bucket belongs to another step.
    void enqueued() noexcept { fresh_ = may_skip_ = true; }
    /// Takes the last step back, once.
    void skip() noexcept {
        later_ = later_ != may_skip_;
        may_skip_ = false;
    }

private:
    std::uint32_t ranks_;
    std::size_t elements_;
    std::vector<float*> memory_;
    bool later_ = false;
    bool fresh_ = true;      // the next first bucket begins a step
    bool may_skip_ = false;  // the last step can be taken back
};

}  // namespace detail

/// Gives error feedback to another engine of buckets: a quantised all-reduce with the same block
/// size. The part of a rank's gradients that the codes don't carry is added to the rank's next
/// gradients, bucket by bucket, with the bits of feed_back_quantised
/// (collective/quantised_all_reduce.hpp). The rounding of the ranks' sums isn't fed back. One
/// thread at a time uses the object.
///
///   gpushare::device_fp8_feedback owing(buckets);          // after the last buckets.add()
///   owing.use(zeroed);                                     // of each rank, owing.memory_bytes()
///   const auto coded = [&](auto ins, auto outs, std::size_t n, auto op) {
///       return gpushare::submit_quantised_all_reduce<float>(..., ins, outs, n, op);
///   };
///   buckets.advance(std::span(streams), staging, owing.engine(std::span(streams), coded));
///
/// buckets.arrange() moves elements, so clear the memory afterwards. No bucket may become larger
/// than the largest bucket was when this object was constructed.
template <std::uint32_t Block = 128>
requires quantised_block<Block>
class device_fp8_feedback {
public:
    /// For the gradients that `of` has.
    template <class Packing>
    explicit device_fp8_feedback(device_buckets<float, float, Packing>& of)
        : memory_(of.ranks(), of.elements()), largest_(of.staging_bytes().count() / sizeof(float)) {}

    /// The memory that error feedback takes on each rank's device, with an alignment of 16.
    [[nodiscard]] bytes memory_bytes() const noexcept {
        return bytes{(2 * memory_.elements() + largest_) * sizeof(float)};
    }
    /// Takes zeroed memory of each rank's device. To continue with a saved training, copy the saved
    /// residuals to owed() after this call. Throws operation_error (errc::invalid_specification)
    /// unless there is memory for each rank.
    void use(std::span<float* const> memory) {
        memory_.use(memory, "error feedback of fp8 blocks");
        sums_.resize(memory.size());
    }
    /// Takes back the last step, which the caller doesn't apply: the residuals from before the step
    /// apply again. Call skip() between steps. A second call does nothing.
    void skip() noexcept { memory_.skip(); }
    /// Where rank r's device has the residuals between steps, bucket by bucket. Save them with the
    /// parameters.
    [[nodiscard]] float* owed(std::uint32_t rank) const { return memory_.owed(rank); }

    /// An engine on these streams: one stream for each rank, or one for all ranks. Call use()
    /// first. `coded` is the quantised engine, and must outlive the new engine. The new engine
    /// returns errc::invalid_specification for another number of ranks or for more elements, and
    /// otherwise what `coded` returns.
    template <launcher Stream, class Coded>
    [[nodiscard]] auto engine(std::span<Stream> streams, const Coded& coded) {
        return [this, streams, &coded]<class Op>(std::span<const float* const> ins, std::span<float* const> outs,
                                                 std::size_t count, Op op, std::size_t before) -> errc {
            if (!memory_.fits(streams.size(), ins.size(), count, before) || count > largest_)
                return errc::invalid_specification;
            if (count == 0) return errc::none;
            memory_.begin(before);
            for (std::uint32_t r = 0; r < memory_.ranks(); ++r) {
                float* const sums = memory_.behind(r);
                submit_feed_back_quantised<Block>(streams[streams.size() == 1 ? 0 : r], ins[r], sums,
                                                  memory_.other(r) + before, owed(r) + before, count);
                sums_[r] = sums;
            }
            const errc why = coded(std::span<const float* const>(sums_), outs, count, op);
            if (why == errc::none) memory_.enqueued();
            return why;
        };
    }

private:
    detail::owed_memory memory_;      // behind the residuals: a bucket's sums
    std::size_t largest_;             // the elements of the largest bucket
    std::vector<const float*> sums_;  // of each rank: the bucket's sums
};

/// An engine of buckets that sends only each rank's largest elements, and keeps the rest for later
/// steps. It does what all_reduce_top_k (gradient/wire.hpp) does, on devices, bucket by bucket,
/// with the same bits. select(stream, gradient, owed, n, k, places, values) enqueues what
/// select_top_k (interop/cub.cuh) does. One thread at a time uses the object.
///
///   gpushare::device_top_k top(ranks, elements, 0.01, select);
///   top.use(zeroed);                                      // of each rank, top.memory_bytes()
///   const auto gather = [&](auto ins, auto outs, std::size_t n) {
///       return gpushare::submit_all_gather<...>(...);
///   };
///   buckets.advance(std::span(streams), staging, top.engine(std::span(streams), gather));
///
/// `gather` gets 32-bit integers and floats. buckets.arrange() moves elements, so clear the memory
/// afterwards.
template <class Select>
class device_top_k {
public:
    /// For `elements` elements of each rank. Sends `part` of each bucket, at least one element.
    /// Throws operation_error (errc::invalid_specification) unless 0 < part <= 1.
    device_top_k(std::uint32_t ranks, std::size_t elements, double part, Select select)
        : memory_(ranks, elements), part_(part), select_(std::move(select)) {
        if (!(part > 0 && part <= 1)) raise({.code = errc::invalid_specification}, {}, "sending the largest elements");
    }

    /// The memory that the engine takes on each rank's device, with an alignment of 16.
    [[nodiscard]] bytes memory_bytes() const noexcept {
        const std::size_t all = memory_.elements();
        return bytes{(2 * all + 2 * chosen(all) * (memory_.ranks() + std::size_t{1})) * sizeof(float)};
    }
    /// How many of `count` elements are sent.
    [[nodiscard]] std::size_t chosen(std::size_t count) const noexcept {
        const auto some = static_cast<std::size_t>(static_cast<double>(count) * part_);
        return std::min(count, std::max<std::size_t>(some, 1));
    }
    /// Takes zeroed memory of each rank's device. To continue with a saved training, copy the saved
    /// residuals to owed() after this call. Throws operation_error (errc::invalid_specification)
    /// unless there is memory for each rank.
    void use(std::span<float* const> memory) { memory_.use(memory, "sending the largest elements"); }
    /// Takes back the last step, which the caller doesn't apply: the residuals from before the step
    /// apply again. Call skip() between steps. A second call does nothing.
    void skip() noexcept { memory_.skip(); }
    /// Where rank r's device has the residuals between steps, bucket by bucket. Save them with the
    /// parameters.
    [[nodiscard]] float* owed(std::uint32_t rank) const { return memory_.owed(rank); }

    /// An engine on these streams: one stream for each rank, or one for all ranks. Call use()
    /// first. `gather` must outlive the engine. The engine returns errc::invalid_specification for
    /// another number of ranks or streams, or for more elements, and otherwise what `gather`
    /// returns.
    template <launcher Stream, class Gather>
    requires copier<Stream>
    [[nodiscard]] auto engine(std::span<Stream> streams, const Gather& gather) {
        return [this, streams, &gather](std::span<const float* const> ins, std::span<float* const> outs,
                                        std::size_t count, average, std::size_t before) -> errc {
            return combine(streams, gather, ins, outs, count, before);
        };
    }

private:
    template <class Stream, class Gather>
    [[nodiscard]] errc combine(std::span<Stream> streams, const Gather& gather, std::span<const float* const> ins,
                               std::span<float* const> outs, std::size_t count, std::size_t before) {
        if (!memory_.fits(streams.size(), ins.size(), count, before)) return errc::invalid_specification;
        if (count == 0) return errc::none;
        memory_.begin(before);
        const std::size_t k = chosen(count), ranks = memory_.ranks();
        const auto stream_of = [&](std::uint32_t r) -> Stream& { return streams[streams.size() == 1 ? 0 : r]; };
        const auto places_of = [&](std::uint32_t r) { return reinterpret_cast<std::uint32_t*>(memory_.behind(r)); };
        std::vector<const std::uint32_t*> places;
        std::vector<std::uint32_t*> all_places;
        std::vector<const float*> values;
        std::vector<float*> all_values;
        for (std::uint32_t r = 0; r < ranks; ++r) {
            float* const now = owed(r) + before;
            stream_of(r).copy(now, memory_.other(r) + before, count * sizeof(float));
            places.push_back(places_of(r));
            all_places.push_back(places_of(r) + k);
            values.push_back(memory_.behind(r) + (ranks + 1) * k);
            all_values.push_back(memory_.behind(r) + (ranks + 2) * k);
            select_(stream_of(r), ins[r], now, count, k, places_of(r), all_values[r] - k);
        }
        if (const errc why =
                gather(std::span<const std::uint32_t* const>(places), std::span<std::uint32_t* const>(all_places), k);
            why != errc::none)
            return why;
        if (const errc why = gather(std::span<const float* const>(values), std::span<float* const>(all_values), k);
            why != errc::none)
            return why;
        memory_.enqueued();
        for (std::uint32_t r = 0; r < ranks; ++r) add_up(stream_of(r), outs[r], count, all_places[r], all_values[r], k);
        return errc::none;
    }
    template <class Stream>
    void add_up(Stream& stream, float* out, std::size_t count, const std::uint32_t* places, const float* values,
                std::size_t k) const {
        const detail::fill_elements<float> clear{out, count, 0};
        stream.launch(clear.shape(), clear);
        for (std::uint32_t q = 0; q < memory_.ranks(); ++q) {
            const detail::add_chosen add{out, count, places + q * k, values + q * k, k};
            stream.launch(add.shape(), add);
        }
        const detail::divide_elements<float> divide{out, count, static_cast<float>(memory_.ranks())};
        stream.launch(divide.shape(), divide);
    }

    detail::owed_memory memory_;  // behind the residuals: what ranks send
    double part_;
    Select select_;
};

/// An engine of buckets that averages each rank's parameters only with its neighbours' parameters.
/// Register the parameters in place of gradients. The bits are those of gossip_average
/// (gradient/transport.hpp), whatever the buckets are. A device reads its neighbours' memory, so it
/// must be able to reach that memory. One thread at a time uses the object.
///
///   gpushare::device_gossip ring(gpushare::neighbour_graph::ring(ranks));
///   ring.use(second);                  // of each rank, as large as its staging array
///   buckets.advance(std::span(streams), staging, ring.engine(std::span(streams)));
///
/// A stream waits for its neighbours' streams only, and the host doesn't wait at all.
class device_gossip {
public:
    /// Copies `among`, a neighbour_graph (gradient/transport.hpp).
    template <class Graph>
    requires requires(const Graph& g, std::uint32_t r) {
        g.neighbours(r);
        { g.weight(r, r) } -> std::same_as<float>;
    }
    explicit device_gossip(const Graph& among) : beside_(among.size()), added_(among.size()) {
        for (std::uint32_t r = 0; r < among.size(); ++r) {
            const auto others = among.neighbours(r);  // ascending
            beside_[r].assign(others.begin(), others.end());
            auto in_order = beside_[r];
            in_order.insert(std::lower_bound(in_order.begin(), in_order.end(), r), r);
            for (const std::uint32_t q : in_order) added_[r].emplace_back(q, among.weight(r, q));
        }
    }

    /// Takes memory of each rank's device, as large as its staging array, with an alignment of 16.
    /// Throws operation_error (errc::invalid_specification) unless there is memory for each rank.
    void use(std::span<float* const> memory) {
        if (memory.size() != beside_.size())
            raise({errc::invalid_specification, memory.size(), 0, beside_.size(), reason::no_such_rank}, {},
                  "averaging with neighbours");
        memory_.assign(memory.begin(), memory.end());
    }

    /// An engine on these streams: one stream for each rank, or one for all ranks. Call use()
    /// first. The engine returns errc::invalid_specification for another number of ranks or
    /// streams.
    template <launcher Stream>
    requires copier<Stream>
    [[nodiscard]] auto engine(std::span<Stream> streams) {
        return [this, streams](std::span<const float* const> ins, std::span<float* const> outs, std::size_t count,
                               average) -> errc { return combine(streams, ins, outs, count); };
    }

private:
    template <class Stream>
    [[nodiscard]] errc combine(std::span<Stream> streams, std::span<const float* const> ins,
                               std::span<float* const> outs, std::size_t count) const {
        const std::size_t ranks = beside_.size();
        if (memory_.size() != ranks || ins.size() != ranks) return errc::invalid_specification;
        if (streams.size() != ranks && streams.size() != 1) return errc::invalid_specification;
        if (count == 0) return errc::none;
        // until the neighbours have computed the parameters that are read here
        wait_for_neighbours(streams);
        for (std::uint32_t r = 0; r < ranks; ++r) add_up(streams[streams.size() == 1 ? 0 : r], r, ins, count);
        wait_for_neighbours(streams);  // until the neighbours have read the parameters
        for (std::uint32_t r = 0; r < ranks; ++r)
            streams[streams.size() == 1 ? 0 : r].copy(outs[r], memory_[r], count * sizeof(float));
        return errc::none;
    }
    /// Does nothing for a single stream, which runs in order anyway.
    template <class Stream>
    void wait_for_neighbours(std::span<Stream> streams) const {
        if (streams.size() == 1) return;
        std::vector<typename Stream::point> here;
        here.reserve(streams.size());
        for (Stream& s : streams) here.push_back(s.record());
        for (std::size_t r = 0; r < streams.size(); ++r)
            for (const std::uint32_t q : beside_[r]) streams[r].wait(here[q]);
    }
    template <class Stream>
    void add_up(Stream& stream, std::uint32_t r, std::span<const float* const> ins, std::size_t count) const {
        detail::gossip_sum some{memory_[r], count};
        for (const auto& [q, weight] : added_[r]) {
            if (some.add(ins[q], weight)) continue;
            stream.launch(some.shape(), some);
            some = {memory_[r], count, true};
            (void)some.add(ins[q], weight);
        }
        stream.launch(some.shape(), some);
    }

    std::vector<std::vector<std::uint32_t>> beside_;  // each rank's neighbours
    // the neighbours and the rank itself, in order, with weights
    std::vector<std::vector<std::pair<std::uint32_t, float>>> added_;
    std::vector<float*> memory_;  // of each rank
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
