// SPDX-License-Identifier: Apache-2.0
// The stacks of the composition matrix: what may stand on the memory of a quota or a tenant, behind one interface that gives
// and takes blocks of one size, so that a scenario is written once.
//
//   auto s = support::composition::stacks<Backend>()[2].make({backend, limit, memory});      // a pool's cache
//   failure why;      void* p = s->get(why);      s->put(p);      s->reach();      s->settle();
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/block_handle.hpp>
#include <gpushare/memory/chunk_pool.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/private_pool.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/scrubbing_resource.hpp>
#include <gpushare/memory/spillable_block.hpp>
#include <gpushare/memory/statistics_resource.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/tenant/workspace.hpp>
#include <gpushare/units.hpp>

#include "support/composition/any_upstream.hpp"

namespace support::composition {

using gpushare::bytes;
using gpushare::errc;
using gpushare::failure;

/// Every block: what a chunk and a segment take, too, so that what is promised is exact by blocks.
inline constexpr std::size_t unit = 64 << 10;
inline constexpr bytes blocks(std::uint64_t n) { return bytes{unit} * n; }
/// What is granted to the owner of the stack, in blocks.
inline constexpr std::size_t granted = 8;

/// Thread-safe.
class stack {
public:
    stack() = default;
    stack(const stack&) = delete;
    stack& operator=(const stack&) = delete;
    virtual ~stack() = default;

    /// A block of `unit` bytes; null, and the reason.
    [[nodiscard]] virtual void* get(failure& why) noexcept = 0;
    virtual errc put(void* p) noexcept = 0;
    /// Waits until the device has done what was enqueued for the stack.
    virtual void reach() {}
    /// Collects what the device has reached.
    virtual void settle() {}
    /// From here on until it is let go the device does nothing of what is enqueued for the stack, where the test can have that.
    virtual void hold() {}
    virtual void let_go() {}
    /// A block of 1 TiB, which can never be there: null, always.
    [[nodiscard]] virtual void* get_impossible() noexcept { return nullptr; }
    /// What it keeps for the next one: in caches, and in segments.
    [[nodiscard]] virtual bytes kept() { return {}; }
    /// Whether what is put is had again only once the device has got there.
    [[nodiscard]] virtual bool defers() const noexcept { return false; }
    /// Whether it has all its memory from the beginning, whatever is granted later.
    [[nodiscard]] virtual bool is_fixed() const noexcept { return false; }
};

/// What a stack stands on.
template <class Backend>
struct site {
    Backend& on;
    gpushare::quota& limit;  ///< `memory` is charged there
    any_upstream& memory;
    std::function<gpushare::workspace()>
        declare;  ///< of what a library took past `memory`: a block. Throws where that is refused
};

/// A get() that may throw.
template <class F>
void* caught(failure& why, F f) noexcept {
    try {
        return f();
    } catch (const gpushare::error& e) {
        why = e.figures();
        why.code = e.code();
    } catch (...) {
        why.code = errc::backend_failed;
    }
    return nullptr;
}

template <class Backend>
void hold_stream(Backend& on, typename Backend::stream& s) {
    if constexpr (requires { on.hold(s); }) on.hold(s);
}
template <class Backend>
void let_go_stream(Backend& on, typename Backend::stream& s) {
    if constexpr (requires { on.let_go(s); }) on.let_go(s);
}

template <class Backend>
class direct_stack : public stack {
public:
    explicit direct_stack(const site<Backend>& s) : memory_(&s.memory) {}
    void* get(failure& why) noexcept override { return memory_->try_allocate(unit, 256, &why); }
    errc put(void* p) noexcept override { return memory_->deallocate(p, unit, 256); }

private:
    any_upstream* memory_;
};

template <class Backend>
class pool_stack : public stack {
public:
    explicit pool_stack(const site<Backend>& s) : pool_(s.memory, {.segment = bytes{unit}}) {}
    void* get(failure& why) noexcept override { return pool_.try_allocate(unit, 256, &why); }
    errc put(void* p) noexcept override { return pool_.deallocate(p, unit, 256); }
    void settle() override { (void)pool_.trim({}); }
    void* get_impossible() noexcept override { return pool_.try_allocate(std::size_t{1} << 40, 256); }
    bytes kept() override {
        const auto u = pool_.usage();
        return u.reserved + u.cached;
    }

protected:
    gpushare::pool_resource<any_upstream> pool_;
};

template <class Backend>
class cache_stack : public pool_stack<Backend> {
public:
    explicit cache_stack(const site<Backend>& s) : pool_stack<Backend>(s), cache_(this->pool_.make_cache()) {}
    void* get(failure& why) noexcept override { return cache_.try_allocate(unit, 256, &why); }
    errc put(void* p) noexcept override { return cache_.deallocate(p, unit, 256); }

private:
    typename gpushare::pool_resource<any_upstream>::cache cache_;
};

/// Everything is set aside from the beginning.
template <class Backend>
class private_stack : public pool_stack<Backend> {
public:
    explicit private_stack(const site<Backend>& s) : pool_stack<Backend>(s), own_(this->pool_, blocks(granted)) {}
    void* get(failure& why) noexcept override { return own_.try_allocate(unit, 256, &why); }
    errc put(void* p) noexcept override { return own_.deallocate(p, unit, 256); }
    [[nodiscard]] bool is_fixed() const noexcept override { return true; }

private:
    gpushare::private_pool<gpushare::pool_resource<any_upstream>> own_;
};

/// Frees are in the order of a stream that works.
template <class Backend>
class ordered_stack : public stack {
public:
    explicit ordered_stack(const site<Backend>& s)
        : stream_(s.on.make_stream()), pool_(s.memory, {.segment = bytes{unit}}), cache_(pool_.make_cache(stream_)) {}
    void* get(failure& why) noexcept override { return cache_.try_allocate(unit, 256, &why); }
    errc put(void* p) noexcept override { return cache_.deallocate(p, unit, 256); }
    void reach() override { (void)stream_.record().wait(gpushare::never); }
    void settle() override {
        pool_.collect();
        (void)pool_.trim({});
    }
    [[nodiscard]] bool defers() const noexcept override { return true; }

private:
    using stream = typename Backend::stream;
    stream stream_;
    gpushare::pool_resource<any_upstream, typename stream::point> pool_;
    typename gpushare::pool_resource<any_upstream, typename stream::point>::cache cache_;
};

/// A chunk is a block.
template <class Backend>
class arena_stack : public stack {
public:
    explicit arena_stack(const site<Backend>& s)
        : scrubs_(s.on.make_stream()),
          work_(s.on.make_stream()),
          pool_(s.on.chunks(), scrubs_, {.capacity = 2 * slots}),
          arena_(pool_, s.limit, gpushare::tenant_tag{1}, blocks(slots)) {
        for (std::size_t i = 0; i < slots; ++i) vacant_.push_back(i);
    }
    void* get(failure& why) noexcept override {
        const std::size_t slot = take();
        if (slot == slots) {
            why.code = errc::out_of_memory;
            return nullptr;
        }
        why = arena_.try_commit(blocks(slot), bytes{unit});
        if (why.code == errc::none) return static_cast<std::byte*>(arena_.data()) + slot * unit;
        give(slot);
        return nullptr;
    }
    errc put(void* p) noexcept override {
        const auto slot =
            static_cast<std::size_t>(static_cast<std::byte*>(p) - static_cast<std::byte*>(arena_.data())) / unit;
        const std::array used{work_.record()};
        const errc why = arena_.try_decommit_after(blocks(slot), bytes{unit}, used).code;
        give(slot);
        return why;
    }
    void reach() override {
        (void)work_.record().wait(gpushare::never);
        (void)scrubs_.record().wait(gpushare::never);
    }
    void settle() override { (void)pool_.collect(); }
    [[nodiscard]] bool defers() const noexcept override { return true; }

private:
    static constexpr std::size_t slots = 24;
    std::size_t take() noexcept {
        const std::lock_guard lock(mutex_);
        if (vacant_.empty()) return slots;
        const std::size_t slot = vacant_.front();
        vacant_.pop_front();
        return slot;
    }
    void give(std::size_t slot) noexcept {
        const std::lock_guard lock(mutex_);
        vacant_.push_back(slot);
    }

    using stream = typename Backend::stream;
    stream scrubs_, work_;
    gpushare::chunk_pool<typename Backend::virtual_memory, stream> pool_;
    gpushare::virtual_arena<typename Backend::virtual_memory, stream> arena_;
    std::mutex mutex_;
    std::deque<std::size_t> vacant_;
};

template <class Backend>
class scrubbing_stack : public stack {
public:
    explicit scrubbing_stack(const site<Backend>& s)
        : on_(&s.on), stream_(s.on.make_stream()), memory_(s.memory, stream_) {}
    ~scrubbing_stack() override { (void)memory_.drain(gpushare::never); }
    void* get(failure& why) noexcept override { return memory_.try_allocate(unit, 256, &why); }
    errc put(void* p) noexcept override { return memory_.deallocate(p, unit, 256); }
    void reach() override { (void)stream_.record().wait(gpushare::never); }
    void settle() override { (void)memory_.collect(); }
    void hold() override { hold_stream(*on_, stream_); }
    void let_go() override { let_go_stream(*on_, stream_); }
    [[nodiscard]] bool defers() const noexcept override { return true; }

protected:
    using scrubbing = gpushare::scrubbing_resource<any_upstream, typename Backend::stream>;
    Backend* on_;
    typename Backend::stream stream_;
    scrubbing memory_;
};

/// The quota is above what scrubs.
template <class Backend>
class scrubbed_stack : public stack {
public:
    explicit scrubbed_stack(const site<Backend>& s)
        : on_(&s.on), stream_(s.on.make_stream()), below_(s.on.memory(), stream_), memory_(s.limit, below_) {}
    ~scrubbed_stack() override { (void)below_.drain(gpushare::never); }
    void* get(failure& why) noexcept override { return memory_.try_allocate(unit, 256, &why); }
    errc put(void* p) noexcept override { return memory_.deallocate(p, unit, 256); }
    void reach() override { (void)stream_.record().wait(gpushare::never); }
    void settle() override { (void)below_.collect(); }
    void hold() override { hold_stream(*on_, stream_); }
    void let_go() override { let_go_stream(*on_, stream_); }
    [[nodiscard]] bool defers() const noexcept override { return true; }

private:
    using scrubbing = gpushare::scrubbing_resource<typename Backend::memory_type, typename Backend::stream>;
    Backend* on_;
    typename Backend::stream stream_;
    scrubbing below_;
    gpushare::quota_resource<scrubbing> memory_;
};

template <class Backend>
class handle_stack : public stack {
public:
    explicit handle_stack(const site<Backend>& s) : memory_(table_, gpushare::tenant_tag{1}, s.memory) {}
    void* get(failure& why) noexcept override {
        return caught(why, [&] {
            const auto h = memory_.allocate(unit, 256);
            void* const p = memory_.pointer(h);
            const std::lock_guard lock(mutex_);
            out_[p] = h;
            return p;
        });
    }
    errc put(void* p) noexcept override {
        gpushare::block_handle h;
        {
            const std::lock_guard lock(mutex_);
            h = std::exchange(out_[p], {});
        }
        const errc why = memory_.deallocate(h);
        return memory_.deallocate(h) == errc::unknown_block
                   ? why
                   : errc::backend_failed;  // a second time it refers to nothing
    }

private:
    gpushare::handle_table table_;
    gpushare::handle_resource<any_upstream> memory_;
    std::mutex mutex_;
    std::map<void*, gpushare::block_handle> out_;
};

/// Every block goes to the host before it is freed.
template <class Backend>
class spillable_stack : public stack {
public:
    explicit spillable_stack(const site<Backend>& s) : stream_(s.on.make_stream()), memory_(&s.memory) {}
    void* get(failure& why) noexcept override {
        return caught(why, [&] {
            auto made = std::make_unique<spillable>(stream_, *memory_, *std::pmr::new_delete_resource(), bytes{unit});
            void* const p = made->data();
            const std::lock_guard lock(mutex_);
            out_[p] = std::move(made);
            return p;
        });
    }
    errc put(void* p) noexcept override {
        std::unique_ptr<spillable> last;
        {
            const std::lock_guard lock(mutex_);
            last = std::move(out_[p]);
        }
        const errc why = last->spill(gpushare::never);
        return why == errc::none && last->data() != nullptr ? errc::backend_failed : why;
    }
    void reach() override { (void)stream_.record().wait(gpushare::never); }

private:
    using spillable = gpushare::spillable_block<typename Backend::stream, any_upstream, std::pmr::memory_resource>;
    typename Backend::stream stream_;
    any_upstream* memory_;
    std::mutex mutex_;
    std::map<void*, std::unique_ptr<spillable>> out_;
};

/// Blocks are a vendor's library's, taken past every allocator, and declared.
template <class Backend>
class workspace_stack : public stack {
public:
    explicit workspace_stack(const site<Backend>& s) : on_(&s.on), declare_(s.declare) {}
    void* get(failure& why) noexcept override {
        void* const p = on_->take_for_library();
        if (p == nullptr) {
            why = {.code = errc::out_of_memory, .asked = unit};
            return p;
        }
        if (void* const declared = caught(why, [&] {
                auto made = declare_();
                const std::lock_guard lock(mutex_);
                out_.emplace(p, std::move(made));
                return p;
            }))
            return declared;
        on_->give_for_library(p);
        return nullptr;
    }
    errc put(void* p) noexcept override {
        on_->give_for_library(p);
        const std::lock_guard lock(mutex_);
        return out_.erase(p) == 1 ? errc::none : errc::unknown_block;
    }

private:
    Backend* on_;
    std::function<gpushare::workspace()> declare_;
    std::mutex mutex_;
    std::map<void*, gpushare::workspace> out_;
};

template <class Backend>
class counted_stack : public stack {
public:
    explicit counted_stack(const site<Backend>& s) : memory_(s.memory) {}
    void* get(failure& why) noexcept override { return memory_.try_allocate(unit, 256, &why); }
    errc put(void* p) noexcept override { return memory_.deallocate(p, unit, 256); }

private:
    gpushare::statistics_resource<any_upstream> memory_;
};

/// Adaptors on adaptors: counted blocks of a pool over memory that is scrubbed.
template <class Backend>
class tall_stack : public scrubbing_stack<Backend> {
public:
    explicit tall_stack(const site<Backend>& s)
        : scrubbing_stack<Backend>(s),
          below_(this->memory_),
          pool_(below_, {.segment = bytes{unit}}),
          counted_(pool_) {}
    void* get(failure& why) noexcept override { return counted_.try_allocate(unit, 256, &why); }
    errc put(void* p) noexcept override { return counted_.deallocate(p, unit, 256); }
    void settle() override {
        (void)pool_.trim({});
        this->reach();
        scrubbing_stack<Backend>::settle();
    }

private:
    upstream_of<typename scrubbing_stack<Backend>::scrubbing> below_;
    gpushare::pool_resource<any_upstream> pool_;
    gpushare::statistics_resource<gpushare::pool_resource<any_upstream>> counted_;
};

}  // namespace support::composition
