// SPDX-License-Identifier: Apache-2.0
// A tenant's memory for torch, on one device: a pool over the tenant's memory, with a cache for
// each of the tenant's streams. A block that is freed on the stream on which it was allocated is
// free there immediately, as in torch's own cache: without an event or any other driver call. The
// pool gives its free memory back when the tenant sleeps, and when the tenant or a neighbour needs
// memory.
//
//   auto mine = std::make_shared<torch_memory<memory, cuda::node>>(node, d, chat.memory(), streams);
//   void* p = mine->try_allocate(1 << 20, stream, why);    mine->deallocate(p, 1 << 20, stream, {});
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/interop/detail/native_stream.hpp>
#include <gpushare/interop/detail/torch_blocks.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The handle by which other libraries know a stream. On a node without handles, this is the
/// stream's address.
template <timeline Stream>
[[nodiscard]] void* native_handle_of(Stream& s) noexcept {
    if constexpr (requires { s.native_handle(); })
        return s.native_handle();
    else
        return &s;
}

/// Locks the mutex, or returns false at the deadline. In most cases other threads hold the mutex
/// briefly. A holder that waits itself, for memory or for a driver, costs this thread one look in
/// each millisecond.
template <class Mutex>
[[nodiscard]] bool lock_by(Mutex& mutex, instant deadline) noexcept {
    constexpr int yields = 16;
    constexpr ns longest = std::chrono::milliseconds(1);
    ns rest = std::chrono::microseconds(10);
    for (int turn = 0; !mutex.try_lock(); ++turn) {
        const instant now = std::chrono::steady_clock::now();
        if (now >= deadline) return false;
        if (turn < yields) {
            std::this_thread::yield();
            continue;
        }
        std::this_thread::sleep_until(std::min(deadline, now + rest));
        rest = std::min(2 * rest, longest);
    }
    return true;
}

/// Memory for torch. Once the tenant is closed, the object refuses allocations, ignores frees, and
/// touches neither the memory nor a stream, so it may outlive both. `Memory` is a tenant_memory.
template <class Memory, node Node>
class torch_memory final : public torch_owner {
    using stream = typename Node::stream;
    using point = typename stream::point;
    using pool = pool_resource<Memory, point>;

public:
    /// `streams` are the tenant's streams on `d`. Without streams, all threads can use a freed
    /// block at once, because work is over when its call returns. Throws std::bad_alloc.
    torch_memory(Node& on, device_id d, Memory& memory, std::span<stream* const> streams)
        : node_(&on),
          device_(d),
          tenant_(memory.owner()),
          pool_(memory),
          hook_(
              memory.limit(), std::numeric_limits<int>::min() + 1,
              [this, limit = &memory.limit()](const reclaim_request& r) {
                  return pool_.give_back(limit->wanted_back() ? bytes::max() : r.missing);
              },
              [this](instant deadline) { return pool_.wait_any(deadline); }) {
        for (stream* const s : streams) lanes_.push_back(std::make_unique<lane>(*s, pool_.make_cache(*s)));
        if (lanes_.empty()) anywhere_.emplace(pool_.make_cache());
        closes_.emplace(memory.closing(), [this](instant deadline) { return close(deadline); });
    }
    ~torch_memory() override { closes_.reset(); }

    [[nodiscard]] void* try_allocate(std::size_t size, void* on, failure& why) noexcept override {
        const std::shared_lock use(calls_);
        if (closed_) {
            why = {.code = errc::closed, .asked = size};
            return nullptr;
        }
        if (anywhere_) return anywhere_->try_allocate(size, alignment, &why);
        lane* const l = find(on);
        return l != nullptr ? l->cache.try_allocate(size, alignment, &why) : pool_.try_allocate(size, alignment, &why);
    }

    errc deallocate(void* p, std::size_t size, void* on, std::span<void* const> others) noexcept override {
        const std::shared_lock use(calls_);
        if (closed_) return errc::closed;
        if (anywhere_) return anywhere_->deallocate(p, size, alignment);
        lane* const l = find(on);
        if (l != nullptr && others.empty()) return l->cache.deallocate(p, size, alignment);
        return free_after(p, size, [&](std::vector<point>& points) {
            points.push_back(point_on(l, on));
            for (void* const s : others) points.push_back(point_on(find(s), s));
        });
    }
    errc deallocate_of_graphs(void* p, std::size_t size) noexcept override {
        const std::shared_lock use(calls_);
        if (closed_) return errc::closed;
        if (anywhere_) return anywhere_->deallocate(p, size, alignment);
        return free_after(p, size, [&](std::vector<point>& points) {
            for (const auto& l : lanes_) points.push_back(last_use(*l->on));
        });
    }

    void captures(void* on, bool begin) noexcept override {
        const std::shared_lock use(calls_);
        lane* const l = closed_ ? nullptr : find(on);
        if (l == nullptr) return;
        const std::lock_guard lock(l->mutex);
        l->captured += begin ? 1U : -1U;
        if (begin && l->captured == 1) l->quiet.emplace(l->cache);
        if (!begin && l->captured == 0) l->quiet.reset();
    }

    void give_back() noexcept override {
        const std::shared_lock use(calls_);
        if (!closed_) (void)pool_.give_back(bytes::max());
    }

    [[nodiscard]] std::string sentence(const failure& why) const override {
        return memory_error(why, tenant_, "allocate for torch").what();
    }

    /// The bytes that the pool holds, and how many of these bytes are allocated.
    [[nodiscard]] pool_usage usage() const noexcept { return pool_.usage(); }

private:
    // as cudaMalloc's; caches search longer for larger alignments
    static constexpr std::size_t alignment = 256;

    struct lane {
        using cache_type = typename pool::cache;
        lane(stream& s, cache_type&& c) noexcept : on(&s), handle(native_handle_of(s)), cache(std::move(c)) {}
        stream* on;
        void* handle;
        cache_type cache;
        std::mutex mutex;  // guards the next two members
        unsigned captured = 0;
        std::optional<typename cache_type::pause> quiet;
    };

    [[nodiscard]] lane* find(const void* handle) const noexcept {
        for (const auto& l : lanes_)
            if (l->handle == handle) return l.get();
        return nullptr;
    }
    // A point on a stream; `l` is null if the stream isn't the tenant's.
    [[nodiscard]] point point_on(lane* l, void* handle) {
        if (l != nullptr) return last_use(*l->on);
        if constexpr (requires(typename Node::stream & s) { s.native_handle(); })
            return point_after(*node_, device_, static_cast<decltype(std::declval<stream&>().native_handle())>(handle));
        else
            return point_after(*node_, device_, handle);
    }
    template <class Points>
    errc free_after(void* p, std::size_t size, Points add) noexcept {
        try {
            std::vector<point> points;
            add(points);
            return pool_.deallocate_after(point_after_all(*node_, device_, std::move(points)), p, size, alignment);
        } catch (const error& e) {
            return e.code();
        } catch (...) {
            return errc::out_of_memory;
        }
    }

    // Waits for all calls under way, so that no call uses a stream or the memory any more. Returns
    // false at the deadline.
    [[nodiscard]] bool close(instant deadline) noexcept {
        if (!lock_by(calls_, deadline)) return false;
        closed_ = true;
        for (const auto& l : lanes_) l->quiet.reset();
        lanes_.clear();  // records their last frees while the streams still exist
        anywhere_.reset();
        calls_.unlock();
        return true;
    }

    Node* node_;
    device_id device_;
    std::string tenant_;
    mutable std::shared_mutex calls_;  // shared by calls; exclusive in close()
    bool closed_ = false;
    pool pool_;
    quota_hook hook_;
    std::vector<std::unique_ptr<lane>> lanes_;
    std::optional<typename pool::cache> anywhere_;
    std::optional<close_callback> closes_;  // newer than the pool's, so it is called first
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
