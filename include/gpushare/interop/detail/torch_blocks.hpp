// SPDX-License-Identifier: Apache-2.0
// Assigns torch's allocations to tenants. If the allocating thread's current stream is bound to a
// tenant, the allocation is that tenant's, because autograd's threads work on the streams of the
// forward pass. On an unbound stream, the allocation belongs to the tenant whose scope the thread
// is in. Any thread may free a block, which goes back to its owner, even after the scope has ended.
//
//   auto& all = detail::torch_blocks::of_process();
//   all.add(chat, 0, streams); // chat: a std::shared_ptr<torch_owner>
//   const auto got = all.try_allocate(0, stream, 4096);     // got.whose is null: no tenant's
//   all.deallocate(got.p);                                  // false: the block is no tenant's
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/pointer_table.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A tenant's memory on one device, for torch. A stream is a native handle. Any thread may use the
/// object.
class torch_owner : public std::enable_shared_from_this<torch_owner> {
public:
    torch_owner() = default;
    torch_owner(const torch_owner&) = delete;
    torch_owner& operator=(const torch_owner&) = delete;
    virtual ~torch_owner() = default;

    /// Allocates for work on `stream`; null if that fails, with the reason in `why`.
    [[nodiscard]] virtual void* try_allocate(std::size_t size, void* stream, failure& why) noexcept = 0;
    /// Frees in the order of `stream`, on which the block was allocated, and after the work of
    /// `others`. An answer other than `none` says why the block stays charged.
    virtual errc deallocate(void* p, std::size_t size, void* stream, std::span<void* const> others) noexcept = 0;
    /// Frees a block that graphs use, after the work of all streams.
    virtual errc deallocate_of_graphs(void* p, std::size_t size) noexcept = 0;
    /// Tells the owner that a capture of the stream begins or ends. During a capture the owner
    /// records no event there.
    virtual void captures(void* stream, bool begin) noexcept = 0;
    /// Gives back the memory that is kept for the next allocation.
    virtual void give_back() noexcept = 0;
    /// A sentence for people, which names the tenant.
    [[nodiscard]] virtual std::string sentence(const failure& why) const = 0;

private:
    friend class torch_blocks;
    std::uint64_t out_ = 0;  // the number of blocks; guarded by torch_blocks, like the next member
    bool listed_ = false;
};

/// The scope that a thread is in. Scopes must end on the thread that made them, the last scope
/// first. Any other end would leave a thread in a destroyed scope, so it ends the program.
class torch_inside {
public:
    torch_inside(std::shared_ptr<torch_owner> who, int device) noexcept
        : who_(std::move(who)), device_(device), outer_(std::exchange(innermost(), this)) {}
    torch_inside(const torch_inside&) = delete;
    torch_inside& operator=(const torch_inside&) = delete;
    ~torch_inside() {
        if (innermost() != this) {
            std::fputs("gpushare: a scope of torch must end on the thread that entered it, the last one first\n",
                       stderr);
            std::abort();
        }
        innermost() = outer_;
    }

    /// The calling thread's owner on `device`; null if the thread isn't in a scope there.
    [[nodiscard]] static torch_owner* on(int device) noexcept {
        for (const torch_inside* at = innermost(); at != nullptr; at = at->outer_)
            if (at->device_ == device) return at->who_.get();
        return nullptr;
    }

private:
    [[nodiscard]] static const torch_inside*& innermost() noexcept {
        static thread_local const torch_inside* now = nullptr;
        return now;
    }

    std::shared_ptr<torch_owner> who_;
    int device_;
    const torch_inside* outer_;
};

/// The blocks that torch has from tenants, and the streams that are bound to tenants. Any thread
/// may use the object, which holds no lock while it calls owners.
class torch_blocks {
public:
    /// The result of an allocation.
    struct answer {
        /// Null if no tenant is concerned, so torch serves the allocation.
        std::shared_ptr<torch_owner> whose;
        /// Null with an owner means that the owner refused, because of `why`.
        void* p = nullptr;
        failure why{};
    };

    /// The process's object. It is never destroyed, because tensors may outlive everything else.
    [[nodiscard]] static torch_blocks& of_process() {
        static torch_blocks* const all = new torch_blocks;
        return *all;
    }

    /// Makes allocations on these streams of `device` the owner's from now on. Throws
    /// std::bad_alloc, and operation_error (invalid_specification) if a stream is already bound.
    void add(const std::shared_ptr<torch_owner>& who, int device, std::span<void* const> streams) {
        const std::lock_guard lock(mutex_);
        for (void* const s : streams)
            if (bound(device, s) != nullptr)
                throw operation_error(errc::invalid_specification, {}, "a scope of torch: the stream has one already");
        owners_.reserve(owners_.size() + 1);
        routes_.reserve(routes_.size() + streams.size());
        for (void* const s : streams) routes_.push_back({device, s, who.get()});
        if (!std::exchange(who->listed_, true)) owners_.push_back(who);
    }
    /// From now on, only threads in the owner's scope allocate from the owner. The owner stays
    /// alive while blocks are allocated.
    void remove(torch_owner& who) noexcept {
        std::shared_ptr<torch_owner> last;  // destroyed while no lock is held
        const std::lock_guard lock(mutex_);
        std::erase_if(routes_, [&](const route& r) { return r.who == &who; });
        last = drop_if_unused(who);
    }

    /// The owner of an allocation of the calling thread on this stream; null if there is none.
    [[nodiscard]] std::shared_ptr<torch_owner> owner_of(int device, void* stream) {
        {
            const std::lock_guard lock(mutex_);
            if (torch_owner* const who = bound(device, stream)) return who->shared_from_this();
        }
        torch_owner* const who = torch_inside::on(device);
        return who != nullptr ? who->shared_from_this() : nullptr;
    }

    /// Allocates `size` bytes from the owner, if there is one.
    [[nodiscard]] answer try_allocate(int device, void* stream, std::size_t size) {
        answer a{.whose = owner_of(device, stream)};
        if (a.whose != nullptr) allocate_of(a, stream, size, false);
        return a;
    }
    /// Allocates from `whose`, for graphs.
    [[nodiscard]] answer try_allocate_for_graphs(std::shared_ptr<torch_owner> whose, std::size_t size) {
        answer a{.whose = std::move(whose)};
        allocate_of(a, nullptr, size, true);
        return a;
    }

    /// Gives a block back to its owner. Returns false if the block has no owner.
    bool deallocate(void* p) noexcept {
        record b;
        std::vector<void*> others;
        std::shared_ptr<torch_owner> whose;
        {
            const std::lock_guard lock(mutex_);
            const record* const found = out_.find(p);
            if (found == nullptr) return false;
            b = *found;
            whose = b.who->shared_from_this();
            if (b.used_elsewhere)
                if (const auto uses = uses_.find(p); uses != uses_.end()) {
                    others = std::move(uses->second);
                    uses_.erase(uses);
                }
            out_.erase(p);
        }
        const errc why =
            b.of_graphs ? whose->deallocate_of_graphs(p, b.size) : whose->deallocate(p, b.size, b.stream, others);
        std::shared_ptr<torch_owner> last;
        const std::lock_guard lock(mutex_);
        unfreed_ += why != errc::none && why != errc::closed;
        --whose->out_;
        last = drop_if_unused(*whose);
        return true;
    }

    /// Records that `stream` uses the block, too. Returns false if the block isn't a tenant's.
    /// Throws std::bad_alloc.
    bool use(void* p, void* stream) {
        const std::lock_guard lock(mutex_);
        const record* const found = out_.find(p);
        if (found == nullptr) return false;
        record b = *found;
        if (b.stream == stream) return true;
        b.used_elsewhere = true;
        out_.insert(p, b);  // first: if a later step throws, deallocate() still looks for streams
        auto& streams = uses_[p];
        if (std::ranges::find(streams, stream) == streams.end()) streams.push_back(stream);
        return true;
    }

    /// Whether the block is a tenant's.
    [[nodiscard]] bool has(const void* p) const noexcept {
        const std::lock_guard lock(mutex_);
        return out_.find(p) != nullptr;
    }
    /// The number of one owner's blocks that torch has.
    [[nodiscard]] std::uint64_t out(const torch_owner& who) const noexcept {
        const std::lock_guard lock(mutex_);
        return who.out_;
    }
    /// The number of frees that the owners refused. Those blocks stay charged until their tenant
    /// closes.
    [[nodiscard]] std::uint64_t unfreed() const noexcept {
        const std::lock_guard lock(mutex_);
        return unfreed_;
    }
    /// Makes all owners give back the memory that they keep.
    void give_back() {
        std::vector<std::shared_ptr<torch_owner>> all;
        {
            const std::lock_guard lock(mutex_);
            all = owners_;
        }
        for (const auto& who : all) who->give_back();
    }

private:
    struct route {
        int device;
        void* stream;
        torch_owner* who;
    };
    struct record {
        torch_owner* who = nullptr;
        std::size_t size = 0;
        void* stream = nullptr;
        bool of_graphs = false, used_elsewhere = false;
    };

    [[nodiscard]] torch_owner* bound(int device, const void* stream) const noexcept {
        for (const route& r : routes_)
            if (r.stream == stream && r.device == device) return r.who;
        return nullptr;
    }

    void allocate_of(answer& a, void* stream, std::size_t size, bool of_graphs) {
        a.p = a.whose->try_allocate(size, stream, a.why);
        if (a.p == nullptr) return;
        try {
            const std::lock_guard lock(mutex_);
            if (!a.whose->listed_) {  // the owner's scope has ended in the meantime
                owners_.push_back(a.whose);
                a.whose->listed_ = true;
            }
            out_.insert(a.p, {.who = a.whose.get(), .size = size, .stream = stream, .of_graphs = of_graphs});
            ++a.whose->out_;
        } catch (...) {
            (void)a.whose->deallocate(a.p, size, stream, {});
            a.p = nullptr;
            a.why = {.code = errc::out_of_memory, .asked = size};
        }
    }

    // Removes the owner from the list if it has neither routes nor blocks out. Returns the owner,
    // which the caller destroys while no lock is held.
    [[nodiscard]] std::shared_ptr<torch_owner> drop_if_unused(torch_owner& who) noexcept {
        const bool routed = std::ranges::any_of(routes_, [&](const route& r) { return r.who == &who; });
        if (routed || who.out_ != 0 || !who.listed_) return nullptr;
        const auto at = std::ranges::find_if(owners_, [&](const auto& o) { return o.get() == &who; });
        std::shared_ptr<torch_owner> last = std::move(*at);
        owners_.erase(at);
        who.listed_ = false;
        return last;
    }

    mutable std::mutex mutex_;
    std::vector<std::shared_ptr<torch_owner>> owners_;  // owners that have routes, or blocks out
    std::vector<route> routes_;                         // few: searched one by one
    pointer_table<record> out_;
    std::unordered_map<void*, std::vector<void*>> uses_;  // other streams that use a block
    std::uint64_t unfreed_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
