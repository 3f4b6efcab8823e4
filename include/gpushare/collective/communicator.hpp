// SPDX-License-Identifier: Apache-2.0
// A communicator is a group of ranks in one process that do collectives together. It owns their
// memory, gives each rank a `member`, and can be aborted.
//
//   #include <gpushare/collective/collectives.hpp>
//   gpushare::communicator group(4);
//   // thread r of four; in and out are spans:
//   gpushare::member me = group.rank(r);
//   gpushare::all_reduce(me, in, out);
//
// The constructor allocates all memory. Groups share no memory, so overlapping groups can work at
// the same time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <stop_token>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/collective/detail/groups.hpp>
#include <gpushare/collective/detail/workspace.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/atomic_ref.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The shape of a group's memory.
struct communicator_options {
    std::uint32_t channels = 1;  ///< collectives that a rank can have in flight at once
    std::uint32_t blocks = 1;    ///< the largest number of blocks in a rank's kernel
    /// the space in which a block leaves data for the other ranks; larger data doesn't go through
    /// the slot
    bytes slot{32768};
    /// The algorithm for each size. If there is no table, the group takes tuning_table::measured()
    /// for threads and tuning_table::for_devices() for devices.
    std::optional<tuning_table> tuning{};
    std::uint32_t first_epoch = 0;  ///< for tests of what happens when the count wraps around
};

/// One rank of a group, on one channel. Members are copied freely, but only one thread, or one
/// stream, may use a rank's channel at a time; a second user gets errc::in_flight. A member must
/// not outlive its communicator.
class member {
public:
    /// The rank's number, from 0.
    [[nodiscard]] std::uint32_t rank() const noexcept { return rank_; }
    /// The number of ranks in the group.
    [[nodiscard]] std::uint32_t size() const noexcept { return view_->ranks; }
    /// The group's memory, for code that submits collectives.
    [[nodiscard]] const detail::workspace_view& view() const noexcept { return *view_; }
    /// The table of algorithms by size: the same for all ranks.
    [[nodiscard]] const tuning_table& tuning() const noexcept { return *tuning_; }
    /// An address that identifies the channel: the same for all its ranks.
    [[nodiscard]] const void* channel() const noexcept {
        return view_->reports != nullptr ? static_cast<const void*>(view_->reports) : view_->workspaces;
    }
    /// Ends the channel's collectives with `why`, unless another fault has ended them before.
    /// Doesn't wait until the collectives have ended. Any thread may call close(). Each collective
    /// that the caller begins afterwards finds the channel closed, even if another thread closed
    /// the channel first.
    void close(const collective_fault& why) const noexcept {
        if (view_->reports != nullptr) {
            claim_or_await(view_->reports[0].claims, view_->reports[0].request, why);
        } else {
            detail::block_state& first = view_->state(0, 0);
            claim_or_await(first.host_claims, first.host_proposal, why);
            detail::close_group(*view_);
        }
    }
    /// Waits until no other rank is inside the last collective that this rank took part in. Every
    /// such rank leaves by itself, since all ranks have come. Only for ranks that are threads, and
    /// only outside a collective.
    void await_last() const noexcept {
        const std::uint32_t last = progress().epoch;
        for (std::uint32_t r = 0; r < size(); ++r) {
            if (r == rank_) continue;
            detail::block_state& other = view_->state(r, 0);
            // acquire: a rank that is outside has finished its work inside. relaxed: a rank with
            // another epoch has begun a later collective, and has left this one before.
            while (detail::atomic_ref{other.inside}.load_acquire() != 0 &&
                   detail::atomic_ref{other.epoch}.load_relaxed() == last)
                std::this_thread::yield();
        }
    }
    /// The packed fault with which close() has asked the devices to end; 0 if close() wasn't
    /// called, and always 0 for ranks that are threads.
    [[nodiscard]] std::uint64_t asked() const noexcept {
        return view_->reports == nullptr ? 0 : detail::atomic_ref{view_->reports[0].request}.load_acquire();
    }
    /// The fault with which the channel's collectives fail; no fault until one has failed. The
    /// answer is final once all ranks have returned.
    [[nodiscard]] collective_fault fault() const noexcept {
        // relaxed: each word is complete by itself, and is final once the kernels have ended
        if (view_->reports != nullptr) {
            // this rank's report comes first; a rank that never ran has reported no verdict
            for (std::uint32_t i = 0; i < size(); ++i) {
                const std::uint32_t r = rank_ + i < size() ? rank_ + i : rank_ + i - size();
                const std::uint64_t word = detail::atomic_ref{view_->reports[r].verdict}.load_relaxed();
                if (word != 0) return collective_fault::unpacked(word);
            }
            for (std::uint32_t r = 0; r < size(); ++r)
                if (detail::atomic_ref{view_->reports[r].heeded}.load_relaxed() != 0)
                    return collective_fault::unpacked(asked());
            return {};
        }
        detail::block_state& own = view_->state(rank_, 0);
        if (detail::atomic_ref{own.closed}.load_acquire() == 0) return {};
        const std::uint64_t verdict = detail::atomic_ref{own.verdict}.load_acquire();
        return collective_fault::unpacked(verdict != 0 ? verdict : detail::chosen_proposal(*view_));
    }
    /// How far the rank's first block is, for a hang_watch. The answer isn't ordered with other
    /// memory accesses. A rank on a device reports its progress when it leaves a collective. Inside
    /// a collective it reports once it has waited for some tens of microseconds or, in an
    /// all-reduce, has done a MiB of a block.
    [[nodiscard]] rank_progress progress() const noexcept {
        std::uint32_t epoch = 0, word = 0;
        if (view_->reports != nullptr) {
            const std::uint64_t place = detail::atomic_ref{view_->reports[rank_].place}.load_relaxed();
            epoch = static_cast<std::uint32_t>(place >> 32);
            word = static_cast<std::uint32_t>(place);
        } else {
            detail::block_state& own = view_->state(rank_, 0);
            word = detail::atomic_ref{own.progress}.load_relaxed();
            epoch = detail::atomic_ref{own.epoch}.load_relaxed();
        }
        return {epoch, static_cast<collective_kind>(word >> 8), static_cast<collective_stage>(word & 0xffU)};
    }

private:
    // The first of the host's threads stores the reason. The other threads return once the reason
    // is stored, which takes the first thread a single store. acq_rel: the threads claim only among
    // themselves. acquire: everything that a waiting thread does after its return comes after the
    // store.
    static void claim_or_await(std::uint32_t& claims, std::uint64_t& word, const collective_fault& why) noexcept {
        if (detail::atomic_ref{claims}.fetch_add_acq_rel(1) == 0)
            return detail::atomic_ref{word}.store_release(why.packed());
        while (detail::atomic_ref{word}.load_acquire() == 0) std::this_thread::yield();
    }

    friend class communicator;
    template <class, class>
    friend class device_communicator;
    member(const detail::workspace_view& view, const tuning_table& tuning, std::uint32_t rank) noexcept
        : view_(&view), tuning_(&tuning), rank_(rank) {}

    const detail::workspace_view* view_;
    const tuning_table* tuning_;
    std::uint32_t rank_;
};

/// While the guard lives, a stop request ends the collectives of a rank and of its whole group:
/// each current and later call returns errc::stopped, and the fault names this rank. `End` is a
/// member, or a transport (gradient/transport.hpp), which must outlive the guard.
///
///   const abort_on_stop guard{net, token};
///   auto fault = net.all_reduce(in, out, sum{}, deadline);
template <class End>
class abort_on_stop {
public:
    /// A stop that was requested earlier takes effect immediately.
    abort_on_stop(End& end, const std::stop_token& stop) : callback_(stop, ender{&end}) {}

private:
    struct ender {
        End* end;
        void operator()() const noexcept {
            if constexpr (requires { end->close(collective_fault{}); }) {
                const rank_progress at = end->progress();
                end->close({errc::stopped, at.what, end->rank(), at.epoch});
            } else {
                end->abort(end->rank(), errc::stopped);
            }
        }
    };
    std::stop_callback<ender> callback_;
};

/// A group of ranks that are threads of this process. One thread makes and destroys the group, at
/// times when no collective runs. Const members are safe from any thread.
class communicator {
public:
    /// Takes memory from operator new. Throws std::bad_alloc, or operation_error
    /// (errc::invalid_specification) for 0 ranks, channels or blocks.
    explicit communicator(std::uint32_t ranks, communicator_options options = {})
        : communicator(numbered(ranks), std::move(options)) {}

    communicator(communicator&&) noexcept = default;
    communicator& operator=(communicator&&) noexcept = default;

    /// The number of ranks.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(parents_.size()); }
    /// The number of channels of each rank.
    [[nodiscard]] std::uint32_t channels() const noexcept { return options_.channels; }
    /// The table of algorithms by size.
    [[nodiscard]] const tuning_table& tuning() const noexcept { return shared_->tuning; }
    /// Sets the table. Only while no collective runs, since all ranks must see the same table.
    void set_tuning(tuning_table table) noexcept { shared_->tuning = std::move(table); }

    /// Throws operation_error (errc::invalid_specification) for a rank or channel that doesn't
    /// exist.
    [[nodiscard]] member rank(std::uint32_t r, std::uint32_t channel = 0) const {
        check(r < size(), r, size(), reason::no_such_rank, "getting a rank of a communicator");
        check(channel < channels(), channel, channels(), reason::no_such_channel,
              "getting a channel of a communicator");
        return {shared_->views[channel], shared_->tuning, r};
    }

    /// The parent_rank() of a rank that joined by grow().
    static constexpr std::uint32_t joined = std::numeric_limits<std::uint32_t>::max();

    /// The number that rank `r` had in the communicator from which this communicator was made; `r`
    /// itself if this communicator wasn't made from another.
    [[nodiscard]] std::uint32_t parent_rank(std::uint32_t r) const {
        check(r < size(), r, size(), reason::no_such_rank, "getting a rank of a communicator");
        return parents_[r];
    }

    /// A group of some of the ranks, in the given order, with memory of its own. Groups may overlap
    /// and run at once. Throws operation_error (errc::invalid_specification) for an empty list, a
    /// rank that doesn't exist, or a rank that comes twice.
    [[nodiscard]] communicator subgroup(std::span<const std::uint32_t> ranks) const {
        std::vector<bool> taken(size());
        for (const std::uint32_t r : ranks) {
            check(r < size(), r, size(), reason::no_such_rank, "splitting a communicator");
            check(!taken[r], r, size(), reason::rank_twice, "splitting a communicator");
            taken[r] = true;
        }
        return communicator(std::vector<std::uint32_t>(ranks.begin(), ranks.end()), inherited());
    }

    /// One group for each colour, in ascending order of colours. Rank r has the colour colours[r].
    [[nodiscard]] std::vector<communicator> split(std::span<const std::uint32_t> colours) const {
        check(colours.size() == size(), colours.size(), size(), reason::wrong_count,
              "splitting a communicator, colours");
        std::vector<communicator> groups;
        for (const auto& ranks : detail::ranks_by_colour(colours)) groups.push_back(subgroup(ranks));
        return groups;
    }

    /// A group of the ranks that aren't in `dead`. After an abort of the old group, the survivors
    /// continue with this group.
    [[nodiscard]] communicator shrink(std::span<const std::uint32_t> dead) const {
        return subgroup(detail::ranks_without(dead, size()));
    }

    /// A group of all ranks, in their order, followed by `joining` new ranks, with memory of its
    /// own. The new ranks replace dead ranks after shrink(). The ranks switch to the new group
    /// between two collectives; work of the old group need not end first. Throws as the constructor
    /// does.
    [[nodiscard]] communicator grow(std::uint32_t joining) const {
        std::vector<std::uint32_t> parents = numbered(size());
        parents.resize(parents.size() + joining, joined);
        return communicator(std::move(parents), inherited());
    }

    /// Ends every current and later collective on all channels: each rank's call returns this
    /// error, unless another error came first. The fault names `rank`. Doesn't wait.
    void abort(std::uint32_t rank = 0, errc why = errc::aborted) const noexcept {
        for (const detail::workspace_view& v : shared_->views) {
            const member first(v, shared_->tuning, 0);
            const rank_progress at = first.progress();
            first.close({why, at.what, rank, at.epoch});
        }
    }

    /// The progress of each rank's first block on one channel, for a hang_watch. The snapshot isn't
    /// ordered with other memory accesses.
    [[nodiscard]] std::vector<rank_progress> progress(std::uint32_t channel = 0) const {
        check(channel < channels(), channel, channels(), reason::no_such_channel,
              "getting a channel of a communicator");
        std::vector<rank_progress> all(size());
        for (std::uint32_t r = 0; r < size(); ++r) all[r] = rank(r, channel).progress();
        return all;
    }

private:
    struct aligned_delete {
        void operator()(std::byte* p) const noexcept {
            ::operator delete (p, std::align_val_t{detail::interference_bytes});
        }
    };
    /// The state is at a fixed address, so that members stay valid when the communicator moves.
    struct shared_state {
        tuning_table tuning;
        std::unique_ptr<std::byte, aligned_delete> memory;
        std::vector<std::byte*> workspaces;  // of all ranks, channel by channel
        std::vector<detail::workspace_view> views;
    };

    communicator(std::vector<std::uint32_t> parents, communicator_options options)
        : parents_(std::move(parents)), options_(std::move(options)), shared_(std::make_unique<shared_state>()) {
        if (size() == 0 || options_.channels == 0 || options_.blocks == 0)
            raise({.code = errc::invalid_specification, .because = reason::no_ranks}, {}, "making a communicator");
        shared_->tuning = options_.tuning ? *options_.tuning : tuning_table::measured();
        const std::size_t areas = std::size_t{size()} * options_.channels;
        const auto [slot, area] = detail::sizes_of_workspaces(size(), options_.blocks, options_.slot, areas);
        shared_->memory.reset(
            static_cast<std::byte*>(::operator new (area* areas, std::align_val_t{detail::interference_bytes})));
        shared_->workspaces.resize(areas);
        for (std::size_t i = 0; i < areas; ++i) shared_->workspaces[i] = shared_->memory.get() + i * area;
        // If ranks outnumber cores, a spinning thread only keeps the awaited rank from getting a
        // core.
        const std::uint32_t turns = size() > std::thread::hardware_concurrency() ? 0 : 2000;
        for (std::uint32_t c = 0; c < options_.channels; ++c) {
            const detail::workspace_view view{shared_->workspaces.data() + std::size_t{c} * size(), size(),
                                              options_.blocks, slot, turns};
            view.prepare(options_.first_epoch);
            shared_->views.push_back(view);
        }
    }

    [[nodiscard]] static std::vector<std::uint32_t> numbered(std::uint32_t ranks) {
        std::vector<std::uint32_t> all(ranks);
        std::iota(all.begin(), all.end(), 0U);
        return all;
    }
    [[nodiscard]] communicator_options inherited() const {
        communicator_options o = options_;
        o.tuning = shared_->tuning;
        return o;
    }
    static void check(bool good, std::uint64_t asked, std::uint64_t limit, reason because, std::string_view what) {
        if (!good)
            raise({.code = errc::invalid_specification, .asked = asked, .limit = limit, .because = because}, {}, what);
    }

    std::vector<std::uint32_t> parents_;
    communicator_options options_;
    std::unique_ptr<shared_state> shared_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
