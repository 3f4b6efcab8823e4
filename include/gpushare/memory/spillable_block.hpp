// SPDX-License-Identifier: Apache-2.0
// A block that can be moved to host memory and back by copies on a stream, for spill hooks.
//
//   gpushare::spillable_block weights{stream, mine, pinned, 1_GiB};  // on the device, in mine
//   gpushare::quota_hook spill{chat, 10, [&](const gpushare::reclaim_request&) {
//       return weights.spill(clock.now() + 1s) == gpushare::errc::none ? weights.size() : 0_B; }};
//   // in the order of that stream
//   if (weights.restore() == gpushare::errc::none) use(weights.data());
//   if (weights.wait(gpushare::never) == gpushare::errc::none) use(weights.data());  // on any
//
// The caller decides when to spill. A hook may be called by several threads, and while work is in
// flight, so the caller guards the block with a lock, and calls spill() only when no work uses it.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/memory/detail/call_gate.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A block on a device that can be moved to the host and back. Refers to the stream and both
/// resources, which must outlive it. `Host` is memory that the stream's device can reach: pinned,
/// for speed. For one thread at a time. The device's resource may close at any time, even during
/// the constructor. After that the block is the resource's to take back. Neither copied nor moved.
template <copier Stream, memory_resource Device, memory_resource Host>
class spillable_block {
public:
    /// On the device, contents undefined. For several blocks on one stream, pass a mutex `turn`: it
    /// is held while a copy is enqueued, so that the failure of a copy is reported by the block
    /// that the copy was for. Throws what the device's allocate throws.
    spillable_block(Stream& by, Device& on, Host& aside, bytes size, std::size_t alignment = 256,
                    std::mutex* turn = nullptr)
        : spillable_block(by, on, aside, size, alignment,
                          on.allocate(static_cast<std::size_t>(size.count()), alignment), turn) {}
    /// The same for `there`, a block of `on` of that size and alignment, which this object owns
    /// from now on.
    spillable_block(Stream& by, Device& on, Host& aside, bytes size, std::size_t alignment, void* there,
                    std::mutex* turn)
        : stream_(&by), device_(&on), host_(&aside), turn_(turn), size_(size), alignment_(alignment), data_(there) {
        const close_token closing = as_upstream(on).closing();
        closes_.emplace(closing, [this](instant deadline) { return close(deadline); });
        // A block that registers after the close isn't notified of it, and the resource has already
        // taken the block back.
        if (const detail::call_gate::pass in(gate_); in && closing.closed()) {
            (void)gate_.shut(instant::min());
            data_ = nullptr;
        }
    }
    spillable_block(const spillable_block&) = delete;
    spillable_block& operator=(const spillable_block&) = delete;
    /// Waits for a copy that is under way.
    ~spillable_block() {
        closes_.reset();
        try {
            (void)over(never);
        } catch (...) {  // a device that can't be asked runs nothing
        }
        (void)give_back(data_);
        (void)give_back(spare_);
        if (copy_ != nullptr) host_->deallocate(copy_, count(), alignment_);
    }

    /// The address on the device. Null while the block is on the host, and once the device's
    /// resource is closed. Nothing may use it from a call of spill() on.
    [[nodiscard]] void* data() const noexcept {
        const detail::call_gate::pass in(gate_);
        return in && !leaving_ ? data_ : nullptr;
    }
    /// Whether the block takes device memory: it is at data(), or still on its way to the host.
    [[nodiscard]] bool on_device() const noexcept {
        const detail::call_gate::pass in(gate_);
        return in && (data_ != nullptr || spare_ != nullptr);
    }
    /// The size of the block.
    [[nodiscard]] bytes size() const noexcept { return size_; }

    /// Copies the block to the host, after the work enqueued on the stream, waits for the copy, and
    /// frees the block on the device. Other streams' work on it must be done before. errc::none: it
    /// is on the host. deadline_exceeded: it still takes device memory; call again, or restore() to
    /// keep it there. out_of_memory: the host has no room. closed: the device's resource is closed.
    /// Otherwise the copy's error, or the answer of the device's resource if it doesn't take the
    /// block back now (concepts.hpp): the block stays on the device; call again.
    [[nodiscard]] errc spill(instant deadline) noexcept try {
        const detail::call_gate::pass in(gate_);
        if (!in) return errc::closed;
        if (data_ == nullptr) return give_back(spare_);
        if (!over(deadline)) return errc::deadline_exceeded;
        if (came() != errc::none) return give_back(spare_);  // the host's copy is intact
        if (!std::exchange(leaving_, false)) {
            if (copy_ == nullptr) copy_ = obtain(*host_);
            if (copy_ == nullptr) return errc::out_of_memory;
            start(copy_, data_);
            if (!moved_.wait(deadline)) {
                leaving_ = true;
                return errc::deadline_exceeded;
            }
        }
        if (const errc why = detail::status_of(copied_, moved_); why != errc::none) return why;
        return give_back(data_);
    } catch (...) {  // of the stream: the block stays where it is
        return errc::backend_failed;
    }

    /// Copies the block back to the device. errc::none: work enqueued on the stream after this call
    /// finds it at data(), unless the copy fails, see wait(). out_of_memory: the device has no
    /// room, and the block stays on the host. closed: the device's resource is closed.
    [[nodiscard]] errc restore() noexcept {
        return restore_by([this](errc&) { return obtain(*device_); });
    }
    /// The same, but waits for memory until the deadline or stop request of `until`, a patience;
    /// deadline_exceeded or stopped then. For a device's resource that can be waited for.
    template <clock Clock>
    [[nodiscard]] errc restore(const patience<Clock>& until) noexcept {
        return restore_by([&](errc& code) {
            failure why;
            void* const p = device_->try_allocate(count(), alignment_, until, &why);
            if (p == nullptr) code = why.code;
            return p;
        });
    }

    /// Waits for the copy that restore() began, if there is one. errc::none: other streams' work
    /// finds the block at data() as well. deadline_exceeded: not yet. closed: the device's resource
    /// is closed, and its close doesn't wait for this call. Otherwise the copy's error, and the
    /// block is on the host as before.
    [[nodiscard]] errc wait(instant deadline) noexcept try {
        typename Stream::point last;
        {
            const detail::call_gate::pass in(gate_);
            if (!in) return errc::closed;
            if (!coming_) return errc::none;
            mark();
            last = moved_;
        }
        if (!last.wait(deadline)) return errc::deadline_exceeded;
        const detail::call_gate::pass in(gate_);
        return in ? came() : errc::closed;
    } catch (const error& failed) {
        return failed.code();
    } catch (...) {
        return errc::backend_failed;
    }

    /// Whether work on any stream finds the block at data().
    [[nodiscard]] bool settled() const noexcept {
        const detail::call_gate::pass in(gate_);
        return in && data_ != nullptr && !leaving_ && !coming_;
    }

private:
    [[nodiscard]] std::size_t count() const noexcept { return static_cast<std::size_t>(size_.count()); }

    template <class Obtain>
    errc restore_by(Obtain obtain_there) noexcept {
        const detail::call_gate::pass in(gate_);
        if (!in) return errc::closed;
        leaving_ = false;  // the copy to the host was only reading

        // A copy back that failed begins again.
        if (coming_ && !unmarked_ && moved_.reached()) (void)came();
        if (data_ != nullptr) return errc::none;
        errc why = errc::out_of_memory;
        data_ = spare_ != nullptr ? std::exchange(spare_, nullptr) : obtain_there(why);
        if (data_ == nullptr) return why;
        coming_ = true;
        try {
            start(data_, copy_);
        } catch (...) {
            if (!unmarked_) drop();  // otherwise the copy continues, in the stream's order
            return errc::backend_failed;
        }
        return errc::none;
    }

    // Makes sure that no copy reads or writes memory that is taken back. False if a copy or a call
    // is under way at the deadline. A hook doesn't wait for calls, because its own thread may be
    // within one.
    bool close(instant deadline) {
        const bool waits = !as_upstream(*device_).in_hook(std::this_thread::get_id());
        if (!gate_.shut(waits ? deadline : instant::min()) || !over(deadline)) return false;
        data_ = spare_ = nullptr;
        return true;
    }

    // A copy and its point. Nothing of other blocks is between the two, since a stream's points may
    // not tell the copies apart.
    void start(void* to, const void* from) {
        const auto turn = take_turn();
        const typename detail::own_work_of<Stream>::type mine(*stream_);
        copied_ = mine.how_it_went();
        stream_->copy(to, from, count());
        unmarked_ = true;
        moved_ = stream_->record();
        unmarked_ = false;
    }
    // The point that start() couldn't record.
    void mark() {
        if (!unmarked_) return;
        const auto turn = take_turn();
        moved_ = stream_->record();
        unmarked_ = false;
    }
    [[nodiscard]] std::unique_lock<std::mutex> take_turn() const {
        return turn_ != nullptr ? std::unique_lock(*turn_) : std::unique_lock<std::mutex>();
    }
    // Whether no copy is under way at the deadline.
    bool over(instant deadline) {
        mark();
        return moved_.wait(deadline);
    }
    // Once the copy back is over: its error, if any; then the block isn't on the device.
    errc came() noexcept {
        if (!coming_) return errc::none;
        coming_ = false;
        const errc why = detail::status_of(copied_, moved_);
        if (why != errc::none) drop();
        return why;
    }
    void drop() noexcept {
        spare_ = std::exchange(data_, nullptr);
        coming_ = false;
        (void)give_back(spare_);
    }
    // Gives a block of the device back, if there is one. If its resource doesn't take it back now,
    // returns the answer, and `block` stays as it is.
    errc give_back(void*& block) noexcept {
        if (block == nullptr) return errc::none;
        const errc why = as_upstream(*device_).deallocate(block, count(), alignment_);
        if (detail::stays_out(why)) return why;
        block = nullptr;
        return errc::none;
    }

    template <class Resource>
    void* obtain(Resource& from) noexcept {
        try {
            return from.allocate(count(), alignment_);
        } catch (...) {
            return nullptr;
        }
    }

    Stream* stream_;
    Device* device_;
    Host* host_;
    std::mutex* turn_;
    bytes size_;
    std::size_t alignment_;
    void *data_ = nullptr, *copy_ = nullptr;  // the copy is kept for the next time
    // a block of the device with no contents, until its resource takes it back
    void* spare_ = nullptr;
    typename Stream::point moved_{};  // behind the last copy
    typename detail::own_work_of<Stream>::outcome copied_{};
    bool unmarked_ = false;           // the point of the last copy isn't recorded yet
    bool leaving_ = false;            // the copy to the host is under way, or over
    bool coming_ = false;             // the copy back has begun, and its result wasn't looked at
    mutable detail::call_gate gate_;  // of calls, which a hook may make within another one
    std::optional<close_callback> closes_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
