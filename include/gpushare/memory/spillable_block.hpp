// SPDX-License-Identifier: Apache-2.0
// A block that can be moved to host memory and back by copies on a stream, for spill hooks.
//
//   gpushare::spillable_block weights{stream, mine, pinned, 1_GiB};         // on the device, in mine
//   gpushare::quota_hook spill{chat, 10, [&](const gpushare::reclaim_request& r) {
//       return weights.spill(now() + 1s) == errc::none ? weights.size() : 0_B; }};
//   if (weights.restore() == errc::none) use(weights.data());               // in the order of that stream
//
// The caller decides when to spill. A hook may be called by several threads, and while work is in flight, so the caller
// guards the block with a lock, and calls spill() only when no work uses it.
#pragma once

#include <cstddef>
#include <optional>
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

/// A block on a device that can be moved to the host and back. Refers to the stream and both resources, which must
/// outlive it. `Host` is memory that the stream's device reaches: pinned, for speed. One thread at a time, beside a close
/// of the device's resource, after which the block is that resource's to take back; neither copied nor moved.
template <copier Stream, memory_resource Device, memory_resource Host>
class spillable_block {
public:
    /// On the device, contents undefined. Throws what the device's allocate throws.
    spillable_block(Stream& by, Device& on, Host& aside, bytes size, std::size_t alignment = 256)
        : stream_(&by), device_(&on), host_(&aside), size_(size), alignment_(alignment) {
        data_ = device_->allocate(count(), alignment_);
        closes_.emplace(as_upstream(on).closing(), [this](instant deadline) { return close(deadline); });
    }
    spillable_block(const spillable_block&) = delete;
    spillable_block& operator=(const spillable_block&) = delete;
    /// Waits for a copy that is under way.
    ~spillable_block() {
        closes_.reset();
        try {
            (void)moved_.wait(never);
        } catch (...) {  // a device that can't be asked runs nothing
        }
        if (data_ != nullptr) device_->deallocate(data_, count(), alignment_);
        if (copy_ != nullptr) host_->deallocate(copy_, count(), alignment_);
    }

    /// Where it is on the device; null while it is on the host, and once the device's resource is closed. Not to be used from
    /// the call of spill() on.
    [[nodiscard]] void* data() const noexcept {
        const detail::call_gate::pass in(gate_);
        return in && !leaving_ ? data_ : nullptr;
    }
    /// As it was made with.
    [[nodiscard]] bytes size() const noexcept { return size_; }

    /// Copies the block to the host, behind what is enqueued on the stream, waits for the copy, and frees the block on
    /// the device. Other streams' work on it must be done before. errc::none: it is on the host. deadline_exceeded: it
    /// still takes device memory; call again, or restore() to keep it there. out_of_memory: the host has no room. closed:
    /// the device's resource is. Else the copy's error, and the block stays on the device.
    [[nodiscard]] errc spill(instant deadline) noexcept try {
        const detail::call_gate::pass in(gate_);
        if (!in) return errc::closed;
        if (data_ == nullptr) return errc::none;
        if (!moved_.wait(deadline)) return errc::deadline_exceeded;
        if (!std::exchange(leaving_, false)) {
            if (copy_ == nullptr) copy_ = obtain(*host_);
            if (copy_ == nullptr) return errc::out_of_memory;
            stream_->copy(copy_, data_, count());
            moved_ = stream_->record();
            if (!moved_.wait(deadline)) {
                leaving_ = true;
                return errc::deadline_exceeded;
            }
        }
        if (const errc why = moved_.status(); why != errc::none) return why;
        device_->deallocate(std::exchange(data_, nullptr), count(), alignment_);
        return errc::none;
    } catch (...) {  // of the stream's: it is where it was
        return errc::backend_failed;
    }

    /// Copies the block back to the device. errc::none: work enqueued on the stream after this call finds it at data().
    /// out_of_memory: the device has no room, and the block stays on the host. closed: the device's resource is.
    [[nodiscard]] errc restore() noexcept {
        const detail::call_gate::pass in(gate_);
        if (!in) return errc::closed;
        leaving_ = false;  // reading it did no harm
        if (data_ != nullptr) return errc::none;
        void* const p = obtain(*device_);
        if (p == nullptr) return errc::out_of_memory;
        try {
            stream_->copy(p, copy_, count());
        } catch (...) {
            device_->deallocate(p, count(), alignment_);
            return errc::backend_failed;
        }
        data_ = p;
        try {
            moved_ = stream_->record();
        } catch (...) {  // the copy goes on all the same, in the stream's order
            return errc::backend_failed;
        }
        return errc::none;
    }

private:
    [[nodiscard]] std::size_t count() const noexcept { return static_cast<std::size_t>(size_.count()); }

    // No copy reads or writes what is taken back. False if one is under way at the deadline, or a call, which isn't waited for.
    bool close(instant deadline) {
        if (!gate_.try_shut() || !moved_.wait(deadline)) return false;
        data_ = nullptr;
        return true;
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
    bytes size_;
    std::size_t alignment_;
    void *data_ = nullptr, *copy_ = nullptr;  // the copy is kept for the next time
    typename Stream::point moved_{};          // behind the last copy
    bool leaving_ = false;
    mutable detail::call_gate gate_;  // of calls, which a hook may make within another one
    std::optional<close_callback> closes_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
