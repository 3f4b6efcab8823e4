// SPDX-License-Identifier: Apache-2.0
// One block of scratch memory for all engines of a tenant that never run at the same time. An
// engine has the block while it holds a permit. So ten engines with compute buffers of 64 MiB each
// need 64 MiB in all, instead of 640 MiB.
//
//   // one block, as large as the largest lease so far
//   gpushare::leased_scratch<memory, gpushare::host::stream> scratch{chat.memory(), 256_MiB};
//   chat.submit([&](auto& to) {
//       auto room = scratch.lease(64_MiB, to);  // until the end of the callable ...
//       engine.enqueue(to, room.data());
//   });  // ... and of its work, by order of streams
//
// As long as the block exists, it is charged once, to the tenant of its memory. Don't use a block
// for several tenants: one tenant would read another tenant's data in it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A block that engines lease one after the other. Any thread may use the object; it can't be
/// copied or moved. `Memory` must outlive the object. When the memory closes, the block is freed
/// and leases are refused with errc::closed. No call waits for a device unless the block has to
/// grow.
template <upstream Memory, joining_timeline Stream>
class leased_scratch {
    using point = typename Stream::point;

public:
    static constexpr std::size_t alignment = 256;  ///< the block's alignment, in bytes

    /// The block, for work on one stream, until the lease ends. A lease can be moved but not
    /// copied, and must not outlive the scratch or the stream.
    class lease_type {
    public:
        /// Takes over the other's lease.
        lease_type(lease_type&& other) noexcept
            : of_(std::exchange(other.of_, nullptr)), on_(other.on_), size_(other.size_) {}
        lease_type& operator=(lease_type&&) = delete;
        ~lease_type() {
            if (of_ != nullptr) of_->give_back(*on_);
        }

        /// The first byte.
        [[nodiscard]] void* data() const noexcept { return of_->block_; }
        /// The requested size.
        [[nodiscard]] bytes size() const noexcept { return size_; }

    private:
        friend leased_scratch;
        lease_type(leased_scratch& of, Stream& on, bytes size) noexcept : of_(&of), on_(&on), size_(size) {}

        leased_scratch* of_;
        Stream* on_;
        bytes size_;
    };

    /// Makes a scratch that has no block yet. The block never has more than `most` bytes.
    leased_scratch(Memory& from, bytes most) noexcept : from_(&from), most_(most) {
        closes_.emplace(from.closing(), [this](instant by) { return close(by); });
    }
    leased_scratch(const leased_scratch&) = delete;
    leased_scratch& operator=(const leased_scratch&) = delete;
    /// Waits for the work of the last lease.
    ~leased_scratch() {
        closes_.reset();  // not called from here on
        try {
            (void)last_.wait(never);
        } catch (...) {  // the device is lost, and the block with it
        }
        free();
    }

    /// Leases the block for work on `on`, which runs after the work of the previous lease. Fails
    /// with in_flight if another thread has the block, over_quota for more than `most`, closed, the
    /// refusal of the tenant's memory, or the failure of `on` (submission_failed). If the block is
    /// too small, waits until the previous work is over; at `deadline`, by the clock of the
    /// streams, fails with deadline_exceeded.
    [[nodiscard]] result<lease_type> try_lease(bytes size, Stream& on, instant deadline = never) noexcept {
        if (const failure why = take(size); why.code != errc::none) return why;
        if (const failure why = ready(size, &on, deadline); why.code != errc::none) {
            put_back();
            return why;
        }
        return lease_type(*this, on, size);
    }
    /// try_lease(), but throws the failure.
    [[nodiscard]] lease_type lease(bytes size, Stream& on, instant deadline = never) {
        return try_lease(size, on, deadline).value(from_->owner(), "lease of scratch");
    }

    /// Makes the block this large in advance, so that no lease has to grow it. Call reserve() after
    /// loading an engine that needs this much. Fails as try_lease does.
    failure reserve(bytes size, instant deadline = never) noexcept {
        if (const failure why = take(size); why.code != errc::none) return why;
        const failure why = ready(size, nullptr, deadline);
        put_back();
        return why;
    }

    /// Frees the block if no work uses it. Returns whether the block is gone.
    bool trim() noexcept {
        if (take({}).code != errc::none) return false;
        const bool idle = last_.reached();
        if (idle) free();
        put_back();
        return idle;
    }

    /// The size of the block.
    [[nodiscard]] bytes size() const noexcept { return bytes{size_.load(std::memory_order_relaxed)}; }
    /// The number of leases so far.
    [[nodiscard]] std::uint64_t leases() const noexcept {
        const std::lock_guard lock(mutex_);
        return leases_;
    }

private:
    // Only the taker uses the block and the point. The taker holds no lock, because an allocation
    // may run hooks.
    failure take(bytes size) noexcept {
        const std::lock_guard lock(mutex_);
        if (closed_) return {errc::closed};
        if (size > most_) return {errc::over_quota, size.count(), most_.count(), most_.count()};
        if (taken_) return {errc::in_flight};
        taken_ = true;
        return {};
    }
    void put_back() noexcept {
        const std::lock_guard lock(mutex_);
        taken_ = false;
    }
    void give_back(Stream& on) noexcept {
        try {
            last_ = on.record();
        } catch (...) {
            // Nothing can wait for the work. So no engine gets the block again, and the tenant's
            // close takes it back.
            block_ = nullptr;
            size_ = 0;
        }
        const std::lock_guard lock(mutex_);
        ++leases_;
        taken_ = false;
    }
    failure ready(bytes size, Stream* on, instant deadline) noexcept {
        try {
            if (size.count() <= size_) {
                if (on != nullptr && !last_.reached()) on->wait(last_);
                return {};
            }
            if (!last_.wait(deadline)) return {errc::deadline_exceeded};
        } catch (const error& e) {
            return e.figures();
        } catch (...) {
            return {errc::submission_failed};
        }
        free();  // the contents aren't kept, so there are never two blocks
        failure why;
        block_ = from_->try_allocate(static_cast<std::size_t>(size.count()), alignment, &why);
        if (block_ == nullptr) return why;
        size_ = size.count();
        return {};
    }
    void free() noexcept {
        if (block_ != nullptr)
            (void)from_->deallocate(std::exchange(block_, nullptr), static_cast<std::size_t>(size_), alignment);
        size_ = 0;
    }
    bool close(instant by) {
        {
            const std::lock_guard lock(mutex_);
            closed_ = true;  // the lease under way is the last
            if (taken_) return false;
        }
        if (!last_.wait(by)) return false;
        free();
        return true;
    }

    Memory* from_;
    const bytes most_;
    mutable std::mutex mutex_;
    bool taken_ = false, closed_ = false;
    std::uint64_t leases_ = 0;
    // Owned by the taker, or by a close while no one has taken the block.
    void* block_ = nullptr;
    std::atomic<std::uint64_t> size_{0};  // for readings
    point last_{};                        // behind the work of the last lease
    std::optional<close_callback> closes_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
