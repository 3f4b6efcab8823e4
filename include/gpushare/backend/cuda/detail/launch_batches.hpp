// SPDX-License-Identifier: Apache-2.0
// One client's launches in flight on one stream: batches of launches, each between two events. If
// the device is still busy with a batch, and no wait follows the batch, the batch's end is the
// beginning of the next batch. A batch that begins in this way costs one event, and any other batch
// two. The launches within a batch cost nothing.
//
//   launch_batches in{device, stream};
//   in.begin();                                     // before the first launch of a batch
//   in.add(entry, key, predicted, charge);          // for each
//   in.end();                                       // behind the last one
//   // those that are over, in their order
//   in.settle([](const launch_batch& b, std::optional<ns> took) { ... });
//
// The batches use events with timing, and not words that the stream writes. An event tells both
// that the batch is over and how long it took, whereas words need a second mechanism for the time.
// An event for each 100 us or more costs the stream less than one percent. Not thread-safe.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/detail/launch_call.hpp>
#include <gpushare/backend/cuda/detail/own_calls.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/launch_times.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// Consecutive launches, timed together.
struct launch_batch {
    ns predicted{}, charge{};  // the sums over all launches
    std::uint32_t launches = 0;
    bool prompt = false;          // its end was recorded right behind its last launch
    bool busy = false;            // the device had earlier work until the whole batch was enqueued
    bool call = false;            // a whole call of an engine, whose launches aren't seen
    bool shared = false;          // other clients had launches in flight when it began
    std::uint64_t of_others = 0;  // the number of other clients' launches until then
    instant begun{};              // when its first launch was made
    point_state *from = nullptr, *to = nullptr;
    std::array<gpushare::detail::launch_times::entry, 48> entries{};

    /// Whether the time between the batch's two events is the time of its launches: the device was
    /// busy before the batch, or worked on one launch from the beginning to the end. Otherwise the
    /// device may have waited for the host.
    [[nodiscard]] bool exact() const noexcept { return busy || (launches == 1 && prompt); }
    /// The recorded entries of its launches; of a long batch only the first ones.
    [[nodiscard]] std::span<const gpushare::detail::launch_times::entry> known() const noexcept {
        return {entries.data(), std::min<std::size_t>(call ? 0 : launches, entries.size())};
    }
};

class launch_batches {
public:
    launch_batches(std::shared_ptr<device_state> device, const launch_call& first) noexcept
        : device_(std::move(device)), stream_(first.stream), context_(first.context), thread_(first.thread) {}
    launch_batches(const launch_batches&) = delete;
    launch_batches& operator=(const launch_batches&) = delete;
    ~launch_batches() {
        for (; count_ != 0; pop()) release(ring_[head_]);
        release(open_);
        release(edge_);
    }

    /// Whether these are launches into the stream of `call`. Each context has its own default
    /// streams, and one of them exists once for each thread.
    [[nodiscard]] bool of(const launch_call& call) const noexcept {
        return call.stream == stream_ && !gone_ && (call.context == context_ || !is_default()) &&
               call.thread == thread_;
    }
    /// Whether these are launches into the same stream as those of `other`.
    [[nodiscard]] bool shares(const launch_batches& other) const noexcept {
        return stream_ == other.stream_ && thread_ == other.thread_;
    }
    /// Whether the stream is another thread's per-thread default stream. In the calling thread the
    /// same handle means a different stream.
    [[nodiscard]] bool is_elsewhere() const noexcept { return thread_ != 0 && thread_ != number_of_thread(); }
    [[nodiscard]] CUstream stream() const noexcept { return stream_; }
    /// Whether a thread with that current context may end a batch of another thread's launches.
    [[nodiscard]] bool within_reach(CUcontext of_thread) const noexcept {
        return stream_ != CU_STREAM_PER_THREAD && (of_thread == context_ || !is_default());
    }
    /// The stream is about to be destroyed. Its work in flight still ends, and no launch is added.
    /// If the ring has no room for the open batch, the batch gets an end of its own.
    void stream_gone() noexcept {
        if (!end() && !captured()) {
            const relaxed_capture relaxed(device_->api());
            open_.to = record();
        }
        gone_ = true;
    }
    [[nodiscard]] bool gone() const noexcept { return gone_; }
    /// Counts a binding that keeps the stream known; abandon() ends one, and returns true for the
    /// last.
    void adopt() noexcept { ++adopted_; }
    [[nodiscard]] bool abandon() noexcept { return --adopted_ == 0; }
    [[nodiscard]] bool drained() const noexcept { return gone_ && !may_wait(); }
    /// Whether the stream is another thread's per-thread default stream and has nothing in flight.
    /// No callback reports the end of such a stream.
    [[nodiscard]] bool forgettable() const noexcept { return is_elsewhere() && !may_wait(); }
    /// Whether no enqueued work is behind a wait any more.
    [[nodiscard]] bool passed_waits() const noexcept {
        if (waited_) return false;
        const std::size_t last = (head_ + count_ + ring_.size() - 1) % ring_.size();
        const point_state* const from = open_.from != nullptr ? open_.from : count_ != 0 ? ring_[last].from : nullptr;
        const relaxed_capture relaxed(device_->api());
        return from == nullptr || reached(*from);
    }

    /// The latest launches, from which the next one's time is predicted.
    [[nodiscard]] const gpushare::detail::launch_history& history() const noexcept { return history_; }
    /// The launches behind which no event is recorded yet.
    [[nodiscard]] const launch_batch& open() const noexcept { return open_; }
    [[nodiscard]] bool in_flight() const noexcept { return count_ != 0 || open_.launches != 0; }
    /// Whether a wait may still be pending in the stream. The last wait may have no launch after
    /// it, if the driver refused the launch.
    [[nodiscard]] bool may_wait() const noexcept {
        if (in_flight() || waited_) return true;
        const relaxed_capture relaxed(device_->api());
        return open_.from != nullptr && !reached(*open_.from);
    }
    /// The number of unfinished launches.
    [[nodiscard]] std::uint32_t launches() const noexcept { return ended_launches_ + open_.launches; }
    /// Whether work on the legacy default stream waits for this stream. Call in a thread with a
    /// context.
    [[nodiscard]] bool legacy_waits() const noexcept {
        unsigned flags = 0;
        const bool known = !gone_ && !is_default() && handled(cudaStreamGetFlags(stream_, &flags)) == cudaSuccess;
        return !known || (flags & cudaStreamNonBlocking) == 0;
    }

    /// The end of the batch that ends first, with a reference for a look without the lock. The
    /// caller calls let_go() under the lock. Null if there is none.
    [[nodiscard]] point_state* keep_next_end() const noexcept {
        point_state* const p = count_ != 0 ? ring_[head_].to : nullptr;
        if (p != nullptr) p->references.fetch_add(1, std::memory_order_relaxed);
        return p;
    }
    static void let_go(device_state& of, point_state* p) noexcept {
        // relaxed: the gate's lock orders all uses of the event.
        if (p != nullptr && p->references.fetch_sub(1, std::memory_order_relaxed) == 1) of.release(*p);
    }
    [[nodiscard]] static bool reached(device_state& of, const point_state& p) noexcept {
        const own_calls unwatched;
        const CUresult code = of.api().event_query(p.event);
        if (code == CUDA_ERROR_NOT_READY) return false;
        if (code != CUDA_SUCCESS) (void)of.health().note(code, "cuEventQuery");
        return true;
    }

    /// Makes later launches wait until the word is 0. Call before begin(). `closings`: see
    /// closings().
    void wait_for(CUdeviceptr word, std::uint64_t closings) noexcept {
        put_wait(*device_, stream_, word);
        closings_ = closings;
        waited_ = true;
    }
    /// Enqueues a wait in the stream or, if it is captured, in the graph.
    static void put_wait(device_state& on, CUstream s, CUdeviceptr word) noexcept {
        const relaxed_capture relaxed(on.api());
        (void)on.health().note(on.api().stream_wait_value(s, word, 0, CU_STREAM_WAIT_VALUE_EQ), "cuStreamWaitValue64");
    }
    /// How often the words had been closed when the last wait was enqueued.
    [[nodiscard]] std::uint64_t closings() const noexcept { return closings_; }
    /// Makes the device write 0 into the word after all enqueued work. Returns false if that isn't
    /// possible.
    [[nodiscard]] bool clear_behind(CUdeviceptr word) noexcept {
        if (gone_ || captured()) return false;
        const context_guard any(device_->context());
        const relaxed_capture relaxed(device_->api());
        const CUresult code = device_->api().stream_write_value(stream_, word, 0, CU_STREAM_WRITE_VALUE_DEFAULT);
        return device_->health().note(code, "cuStreamWriteValue32") == errc::none;
    }
    /// Makes later work wait for the work of `other` as well. If its open batch couldn't end,
    /// because the ring was full, the batch gets an event only for this.
    void run_behind(launch_batches& other) noexcept {
        if (gone_ || captured()) return;
        const context_guard any(device_->context());
        const relaxed_capture relaxed(device_->api());
        const bool is_open = other.open_.launches != 0 && !other.is_elsewhere() && !other.captured();
        point_state* own = is_open ? other.record() : nullptr;
        const point_state* const end = own != nullptr ? own : other.edge_;
        if (end != nullptr && end->event != nullptr) (void)handled(cudaStreamWaitEvent(stream_, end->event, 0));
        release(own);
    }
    /// Whether the ring has room for another batch.
    [[nodiscard]] bool has_room() const noexcept { return count_ + 1 < ring_.size(); }

    /// Whether a beginning is recorded, with or without launches after it.
    [[nodiscard]] bool has_begun() const noexcept { return open_.from != nullptr; }
    /// Begins a batch, unless one is open. Call before its first launch. `shared`, `of_others`: as
    /// in launch_batch.
    void begin(instant now, bool shared = false, std::uint64_t of_others = 0) noexcept {
        if (open_.launches != 0) return;
        const relaxed_capture relaxed(device_->api());
        release(open_);
        open_ = {};
        open_.begun = now;
        open_.shared = shared;
        open_.of_others = of_others;
        if (!std::exchange(waited_, false) && edge_ != nullptr && !reached(*edge_)) {
            open_.from = edge_;
            edge_->references.fetch_add(1, std::memory_order_relaxed);
        } else {
            open_.from = record();
        }
    }
    void add(gpushare::detail::launch_times::entry e, std::uint64_t key, ns predicted, ns charge) noexcept {
        history_.add(key);
        if (open_.launches < open_.entries.size()) open_.entries[open_.launches] = e;
        ++open_.launches;
        open_.predicted += predicted;
        open_.charge += charge;
    }
    /// Adds the whole call of an engine.
    void add_call(ns predicted) noexcept {
        open_.call = true;
        ++open_.launches;
        open_.predicted += predicted;
        open_.charge += predicted;
    }
    /// Takes back the last launch added, which the driver refused. Returns whether it was in the
    /// open batch.
    bool take_back(ns predicted, ns charge) noexcept {
        if (open_.launches == 0 || open_.predicted < predicted || open_.charge < charge) return false;
        // Another thread may have ended that batch and opened this one for a launch of its own.
        if (open_.launches == 1 && (open_.predicted != predicted || open_.charge != charge)) return false;
        --open_.launches;
        open_.predicted -= predicted;
        open_.charge -= charge;
        return true;
    }
    /// Ends the batch after its last launch; `prompt`: immediately. Returns false if that isn't
    /// possible now, and the batch stays open: the stream is captured, gone or another thread's, or
    /// there is no room for more batches.
    bool end(bool prompt = false) noexcept {
        if (open_.launches == 0) return true;
        const bool full = count_ == ring_.size();
        if (gone_ || is_elsewhere() || (full && thread_ == 0) || captured()) return false;
        if (full) return join_last();
        const relaxed_capture relaxed(device_->api());
        open_.prompt = prompt;
        open_.busy = open_.from != nullptr && !reached(*open_.from);
        open_.to = record();
        release(edge_);
        edge_ = open_.to;
        if (edge_ != nullptr) edge_->references.fetch_add(1, std::memory_order_relaxed);
        ring_[(head_ + count_) % ring_.size()] = open_;
        ended_launches_ += open_.launches;
        ++count_;
        open_ = {};
        return true;
    }
    /// Calls over(batch, took) for each batch whose end is reached; `took` is empty if the time
    /// isn't known. Batches lost with the device are over, too.
    template <class F>
    void settle(F over) noexcept {
        const bool last_is_open = gone_ && open_.launches != 0;
        if (count_ == 0 && !last_is_open) return;
        const relaxed_capture relaxed(device_->api());
        while (count_ != 0) {
            launch_batch& b = ring_[head_];
            if (b.to != nullptr && !reached(*b.to)) return;
            over(std::as_const(b), took(b));
            release(b);
            pop();
        }
        if (!last_is_open || (open_.to != nullptr && !reached(*open_.to))) return;
        over(std::as_const(open_), took(open_));
        release(open_);
        open_ = {};
    }

private:
    [[nodiscard]] bool is_default() const noexcept {
        return stream_ == CU_STREAM_LEGACY || stream_ == CU_STREAM_PER_THREAD;
    }
    [[nodiscard]] bool captured() const noexcept {
        CUstreamCaptureStatus s = CU_STREAM_CAPTURE_STATUS_NONE;
        return device_->api().stream_is_capturing(stream_, &s) == CUDA_SUCCESS && s != CU_STREAM_CAPTURE_STATUS_NONE;
    }
    // No other thread can end the batch later, and this one may launch no more. So where there is
    // no room, the batch becomes a part of the last one.
    bool join_last() noexcept {
        launch_batch& last = ring_[(head_ + count_ - 1) % ring_.size()];
        const relaxed_capture relaxed(device_->api());
        point_state* const to = record();
        if (to == nullptr) return false;
        const bool follows = last.to != nullptr && open_.from == last.to && !reached(*last.to);
        last.busy = last.busy && follows;
        last.prompt = false;
        last.shared = last.shared || open_.shared;
        std::size_t known = last.known().size();
        for (const auto e : open_.known())
            if (known < last.entries.size()) last.entries[known++] = e;
        last.launches += open_.launches;
        last.predicted += open_.predicted;
        last.charge += open_.charge;
        ended_launches_ += open_.launches;
        for (point_state** const end : {&last.to, &edge_}) {
            release(*end);
            *end = to;
        }
        to->references.fetch_add(1, std::memory_order_relaxed);
        release(open_);
        open_ = {};
        return true;
    }
    // Records an event. Null if the driver gives none: then the batch counts as over immediately.
    [[nodiscard]] point_state* record() noexcept {
        try {
            point_state& p = device_->acquire();
            // Driver API, cuEventRecord: the function may want a context, and a thread that ends a
            // request may have none.
            const auto record_it = [&] { return device_->api().event_record(p.event, stream_); };
            const CUresult code =
                p.event != nullptr ? in_some_context(device_->context(), record_it) : CUDA_ERROR_UNKNOWN;
            if (code == CUDA_SUCCESS) return &p;
            (void)device_->health().note(code, "cuEventRecord");
            device_->release(p);
        } catch (...) {  // no memory for an event
        }
        return nullptr;
    }
    [[nodiscard]] bool reached(const point_state& p) const noexcept { return reached(*device_, p); }
    [[nodiscard]] std::optional<ns> took(const launch_batch& b) const noexcept {
        if (b.from == nullptr || b.to == nullptr) return std::nullopt;
        float ms = 0;
        const auto ask = [&] { return device_->api().event_elapsed_time(&ms, b.from->event, b.to->event); };
        if (in_some_context(device_->context(), ask) != CUDA_SUCCESS) return std::nullopt;
        return ns{std::llround(static_cast<double>(ms) * 1e6)};
    }
    void release(point_state*& p) noexcept { let_go(*device_, std::exchange(p, nullptr)); }
    void release(launch_batch& b) noexcept {
        release(b.from);
        release(b.to);
    }
    void pop() noexcept {
        ended_launches_ -= ring_[head_].launches;
        head_ = (head_ + 1) % ring_.size();
        --count_;
    }

    std::shared_ptr<device_state> device_;
    CUstream stream_;
    CUcontext context_;
    std::uint64_t thread_;
    bool gone_ = false;
    std::uint32_t adopted_ = 0;
    // Whether a wait follows the last batch. If so, the end of that batch isn't the beginning of
    // the next.
    bool waited_ = false;
    std::uint64_t closings_ = 0;
    gpushare::detail::launch_history history_;
    launch_batch open_;
    point_state* edge_ = nullptr;  // the end of the last batch
    std::array<launch_batch, 64> ring_;
    std::size_t head_ = 0, count_ = 0;
    std::uint32_t ended_launches_ = 0;  // the launches of batches in the ring
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
