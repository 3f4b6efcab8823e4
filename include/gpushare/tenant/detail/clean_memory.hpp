// SPDX-License-Identifier: Apache-2.0
// A device's memory for one tenant, without data of other tenants: memory from the device is
// overwritten with zeros before the tenant gets it. A pool above it pays for that once for each
// segment, because blocks that circulate in the pool are the tenant's own.
//
//   detail::clean_memory<host::device_memory, host::point> clean{node.memory(d), scrub_policy::on_hand_over, fill};
//   void* p = clean.try_allocate(1 << 20, 256);      // zeros
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/as_upstream.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/memory/usage.hpp>
#include <gpushare/tenant/detail/memory_source.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Enqueues overwriting `size` bytes at `p`, behind the point unless that is null, and returns the
/// point after it. Throws what a stream throws.
template <timeline_point Point>
using fill_function = std::function<Point(const Point* after, void* p, std::size_t size)>;

/// Thread-safe. Models `memory`. Refers to `Upstream`, which must outlive it. Without a `fill`,
/// hands out blocks as they come. Blocks come from the device, or from a source if there is one.
/// After a refusal, calls `make_room`, which returns whether it has given memory back.
///
/// With scrub_policy::off, blocks are overwritten only once `minded` is true. It says whether any
/// earlier owner of the device's memory minds that others read that memory. Once true it stays
/// true.
///
/// The device doesn't tell who had a block before: another tenant, an arena, or the embedder. So
/// every block from the device is overwritten, and the thread waits for that, as it waits for the
/// driver anyway. If memory were overwritten when it goes back, it would stay charged until then,
/// and a neighbour's request for it would be refused.
template <memory Upstream, timeline_point Point>
class clean_memory {
public:
    clean_memory(Upstream& below, scrub_policy policy, fill_function<Point> fill, memory_source* source = nullptr,
                 std::function<bool()> make_room = {}, const std::atomic<bool>* minded = nullptr)
        : below_(&below),
          source_(source),
          make_room_(std::move(make_room)),
          policy_(policy),
          minded_(minded),
          fill_(std::move(fill)) {}
    clean_memory(const clean_memory&) = delete;
    clean_memory& operator=(const clean_memory&) = delete;
    ~clean_memory() { retry_held(); }  // blocks that are still held stay with the device

    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment) {
        failure why;
        void* const p = try_allocate(size, alignment, &why);
        if (p == nullptr) throw memory_error(why, owner(), "allocate");
        return p;
    }
    /// Null if the memory isn't there or can't be overwritten. The memory has then gone back,
    /// except with in_flight: then it goes back once it is certain that no fill overwrites it any
    /// more.
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment, failure* why = nullptr) noexcept {
        // a hint: the next caller looks as well
        if (holds_.load(std::memory_order_relaxed)) retry_held();
        failure refusal;
        void* p = from_below(size, alignment, refusal);
        // Tries again even if make_room_ gave nothing back: another thread may just have given
        // memory back, or may have freed some since.
        for (int fruitless = 0; p == nullptr && refusal.code == errc::out_of_memory && make_room_ && fruitless < 3;) {
            fruitless += make_room_() ? 0 : 1;
            p = from_below(size, alignment, refusal);
        }
        if (p == nullptr) {
            if (why != nullptr) *why = refusal;
            return p;
        }
        if (size == 0 || !cleans() || is_zero(p, size)) return p;
        const errc failed = overwrite(p, size);
        if (failed == errc::none) return p;
        if (failed == errc::in_flight)
            hold({p, bytes{size}, alignment});
        else
            (void)deallocate(p, size, alignment);
        if (why != nullptr) *why = {.code = failed, .asked = size, .because = reason::size};
        return nullptr;
    }
    errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept {
        return source_ != nullptr ? source_->deallocate(p, size, alignment) : below_->deallocate(p, size, alignment);
    }

    /// Whether blocks are overwritten as soon as their owner frees them.
    [[nodiscard]] bool on_free() const noexcept { return policy_ == scrub_policy::on_free && fill_; }
    /// Enqueues overwriting a block of the tenant's that is free after `after`, and returns the
    /// point when that is done. If the block can't be overwritten, returns `after`, or a reached
    /// point if `after` is null, since no other tenant sees the block anyway. Returns nothing if
    /// the point can't be known: then the block isn't free, and the call can be repeated.
    [[nodiscard]] std::optional<Point> overwrite_after(const Point* after, void* p, std::size_t size) noexcept {
        try {
            Point done = fill_(after, p, size);
            scrubbed_.fetch_add(size, std::memory_order_relaxed);
            return done;
        } catch (const error& e) {
            if (may_be_under_way(e.code())) return std::nullopt;
        } catch (...) {
        }
        return after != nullptr ? *after : Point{};
    }
    /// Bytes that were overwritten so far. Relaxed: a count and no more.
    [[nodiscard]] bytes scrubbed() const noexcept { return bytes{scrubbed_.load(std::memory_order_relaxed)}; }

    [[nodiscard]] bytes charged(std::size_t size, std::size_t alignment) const noexcept {
        return source_ != nullptr ? source_->charged(size, alignment) : std::as_const(*below_).charged(size, alignment);
    }
    [[nodiscard]] failure refuses(std::size_t size, std::size_t alignment) const noexcept {
        if (source_ == nullptr) return std::as_const(*below_).refuses(size, alignment);
        const auto takes = [&](std::size_t a) { return charged(size, a); };
        if (takes(alignment) <= capacity()) return {};
        if (const failure why = never_had(size, alignment, capacity(), takes); why.code != errc::none) return why;
        return {
            .code = errc::out_of_memory, .asked = size, .limit = capacity().count(), .because = reason::beyond_device};
    }
    // As the device's memory has it.
    [[nodiscard]] bytes largest_free() const noexcept { return std::as_const(*below_).largest_free(); }
    [[nodiscard]] std::string_view owner() const noexcept { return std::as_const(*below_).owner(); }
    [[nodiscard]] close_token closing() const noexcept { return std::as_const(*below_).closing(); }
    [[nodiscard]] bool in_hook(std::thread::id thread) const noexcept { return as_upstream(*below_).in_hook(thread); }
    [[nodiscard]] bytes capacity() const noexcept { return std::as_const(*below_).capacity(); }
    [[nodiscard]] bytes taken_by_others() const noexcept { return std::as_const(*below_).taken_by_others(); }
    [[nodiscard]] bool lost() const noexcept {
        if constexpr (requires { static_cast<bool>(below_->lost()); })
            return below_->lost();
        else
            return false;
    }

private:
    // Relaxed: by the lock of the device's allocator, the next owner of a block comes after
    // everything that its last owner did.
    [[nodiscard]] bool cleans() const noexcept {
        return policy_ != scrub_policy::off || (minded_ != nullptr && minded_->load(std::memory_order_relaxed));
    }
    [[nodiscard]] void* from_below(std::size_t size, std::size_t alignment, failure& why) noexcept {
        return source_ != nullptr ? source_->try_allocate(size, alignment, why)
                                  : below_->try_allocate(size, alignment, &why);
    }
    // Zeros the block and returns true if the memory can do that itself, as a host's can. Also
    // returns true without a `fill`.
    [[nodiscard]] bool is_zero(void* p, std::size_t size) noexcept {
        if (!fill_) return true;
        if (source_ != nullptr) return false;
        if constexpr (requires { static_cast<bool>(below_->zero(p, size)); })
            return below_->zero(p, size);
        else
            return false;
    }
    errc overwrite(void* p, std::size_t size) noexcept {
        try {
            const Point done = fill_(nullptr, p, size);
            (void)done.wait(never);  // ends when the device is lost
            if (done.status() == errc::none) scrubbed_.fetch_add(size, std::memory_order_relaxed);
            return done.status();
        } catch (const error& e) {
            return e.code();
        } catch (...) {
            return errc::submission_failed;
        }
    }

    // See scrub_stream::fill.
    [[nodiscard]] static constexpr bool may_be_under_way(errc why) noexcept {
        return why == errc::in_flight || why == errc::submission_failed;
    }
    // Nobody may use the block until it has been overwritten once more.
    void hold(const block& b) noexcept {
        const std::lock_guard lock(held_mutex_);
        try {
            held_.push_back(b);
            holds_.store(true, std::memory_order_relaxed);
        } catch (...) {  // nor can it be remembered: it stays with the device
        }
    }
    void retry_held() noexcept {
        std::vector<block> again;
        {
            const std::lock_guard lock(held_mutex_);
            again.swap(held_);
            holds_.store(false, std::memory_order_relaxed);
        }
        for (const block& b : again) {
            const auto size = static_cast<std::size_t>(b.size.count());
            if (may_be_under_way(overwrite(b.pointer, size)))
                hold(b);
            else
                (void)deallocate(b.pointer, size, b.alignment);
        }
    }

    Upstream* below_;
    memory_source* source_;
    std::function<bool()> make_room_;
    scrub_policy policy_;
    const std::atomic<bool>* minded_;
    fill_function<Point> fill_;
    std::atomic<std::uint64_t> scrubbed_{0};
    std::mutex held_mutex_;
    std::vector<block> held_;  // blocks on which a fill without a point may be under way
    std::atomic<bool> holds_{false};
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
