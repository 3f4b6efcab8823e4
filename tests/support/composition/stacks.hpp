// SPDX-License-Identifier: Apache-2.0
// The stacks of the composition matrix: the resources that can be built on the memory of a quota or
// a tenant. One interface gives and takes blocks of one size, so that each scenario is written
// once.
//
//   // a pool's cache
//   auto s = support::composition::stacks<Backend>()[2].make({backend, limit, memory});
//   failure why;      void* p = s->get(why);      s->put(p);      s->reach();      s->settle();
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/interop/pytorch.hpp>
#include <gpushare/memory/block_handle.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/private_pool.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/scrubbing_resource.hpp>
#include <gpushare/memory/spillable_block.hpp>
#include <gpushare/memory/statistics_resource.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/tenant/tenant.hpp>
#include <gpushare/units.hpp>

#include "support/composition/any_upstream.hpp"

namespace support::composition {

using gpushare::bytes;
using gpushare::errc;
using gpushare::failure;

/// The size of every block. Chunks and segments have the same size, so that promises are exact in
/// blocks.
inline constexpr std::size_t unit = 64 << 10;
inline constexpr bytes blocks(std::uint64_t n) { return bytes{unit} * n; }
/// The number of blocks granted to the owner of the stack.
inline constexpr std::size_t granted = 8;

/// Thread-safe.
class stack {
public:
    stack() = default;
    stack(const stack&) = delete;
    stack& operator=(const stack&) = delete;
    virtual ~stack() = default;

    /// Gets a block of `unit` bytes; null and the reason if there is none.
    [[nodiscard]] virtual void* get(failure& why) noexcept = 0;
    virtual errc put(void* p) noexcept = 0;
    /// Waits until the device has done all work that was enqueued for the stack.
    virtual void reach() {}
    /// Collects frees that the device has reached.
    virtual void settle() {}
    /// If the test can arrange it, the device does no work for the stack from now on, until let go.
    virtual void hold() {}
    virtual void let_go() {}
    /// Requests a block of 1 TiB, which no device has. Always returns null.
    [[nodiscard]] virtual void* get_impossible() noexcept { return nullptr; }
    /// The bytes that it keeps for later requests, in caches and segments.
    [[nodiscard]] virtual bytes kept() { return {}; }
    /// Whether a block can be used again only once the device has reached its free.
    [[nodiscard]] virtual bool defers() const noexcept { return false; }
    /// Whether a block that is freed during a capture can be used again only after the capture.
    [[nodiscard]] virtual bool keeps_captured() const noexcept { return false; }
    /// Whether a close of the owner takes back allocated blocks.
    [[nodiscard]] virtual bool is_taken_back() const noexcept { return true; }
    /// Whether it closes with its owner. If not, its work for the owner ends by itself, and the
    /// owner's close waits for that.
    [[nodiscard]] virtual bool closes() const noexcept { return true; }
    /// Whether it has all its memory from the beginning, whatever the owner is granted later.
    [[nodiscard]] virtual bool is_fixed() const noexcept { return false; }
    /// As get and put, for blocks that are available while another thread is inside get().
    virtual void* get_beside(failure& why) noexcept { return get(why); }
    virtual errc put_beside(void* p) noexcept { return put(p); }
    /// The backend's stream in whose order the stack frees, or on which it does its own work; null
    /// if it has none.
    [[nodiscard]] virtual void* own_stream() noexcept { return nullptr; }
    /// Frees `n` small blocks, half of them behind a stream that is held, and the others behind a
    /// stream that works. False if its frees wait for at most one stream.
    [[nodiscard]] virtual bool free_many(std::size_t /*n*/) { return false; }
    /// Whether put() returns the owner's answer to a free.
    [[nodiscard]] virtual bool passes_answers() const noexcept { return false; }
    /// Misuses an allocated block. Returns the misuse that isn't refused properly; empty if all
    /// are.
    [[nodiscard]] virtual std::string_view misuse(void* p) noexcept {
        return put(p) != errc::none   ? "a block isn't taken back"
               : put(p) == errc::none ? "a block is taken back twice"
                                      : std::string_view{};
    }
};

/// Frees many small blocks in the order of two streams.
template <class Backend>
class two_streams {
public:
    explicit two_streams(Backend& on) : on_(&on), slow_(on.make_stream()), fast_(on.make_stream()) {}

    /// False if some blocks can't be allocated. In any case call let_go() and reach() afterwards.
    template <class Get, class Free>
    bool free_many(std::size_t n, Get get, Free free) {
        if constexpr (requires { on_->hold(slow_); }) {
            on_->hold(slow_);
            on_->hold(fast_);
            for (std::size_t i = 0; i < n; ++i) {
                void* const p = get();
                if (p == nullptr || free((i % 2 == 0 ? slow_ : fast_).record(), p) != errc::none) return false;
            }
            on_->let_go(fast_);
            return fast_.record().wait(gpushare::never);
        }
        return false;
    }
    void let_go() {
        if constexpr (requires { on_->let_go(slow_); }) on_->let_go(slow_), on_->let_go(fast_);
    }
    void reach() {
        (void)slow_.record().wait(gpushare::never);
        (void)fast_.record().wait(gpushare::never);
    }

private:
    Backend* on_;
    typename Backend::stream slow_, fast_;
};
inline constexpr std::size_t crumb = 256;

/// The parts on which a stack is built.
template <class Backend>
struct site {
    Backend& on;
    gpushare::quota& limit;  ///< `memory` is charged there
    ordered_upstream<typename Backend::stream::point>& memory;
    std::function<gpushare::workspace()>
        declare;                      ///< charges a block that a library took past `memory`. Throws if refused
    std::function<void()> make_room;  ///< makes the device get back memory that is kept without an owner
};

/// Turns a get() that may throw into one that doesn't.
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
    [[nodiscard]] bool passes_answers() const noexcept override { return true; }

private:
    any_upstream* memory_;
};

/// The planted fault: refuses every third block, whether it fits or not. The matrix has to notice.
template <class Backend>
class refusing_stack : public direct_stack<Backend> {
public:
    using direct_stack<Backend>::direct_stack;
    [[nodiscard]] void* get(failure& why) noexcept override {
        if (asked_.fetch_add(1) % 3 != 2) return direct_stack<Backend>::get(why);
        why = {errc::over_quota};
        return nullptr;
    }

private:
    std::atomic<unsigned> asked_{0};
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

/// A stack that takes all its memory at the beginning.
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

/// A stack that frees in the order of a working stream.
template <class Backend>
class ordered_stack : public stack {
public:
    explicit ordered_stack(const site<Backend>& s)
        : others_(s.on),
          stream_(s.on.make_stream()),
          pool_(s.memory, {.segment = bytes{unit}}),
          cache_(pool_.make_cache(stream_)) {}
    void* get(failure& why) noexcept override { return cache_.try_allocate(unit, 256, &why); }
    errc put(void* p) noexcept override { return cache_.deallocate(p, unit, 256); }
    void reach() override {
        (void)stream_.record().wait(gpushare::never);
        others_.reach();
    }
    void let_go() override { others_.let_go(); }
    bool free_many(std::size_t n) override {
        return others_.free_many(
            n, [&] { return pool_.try_allocate(crumb, 256); },
            [&](const auto& used, void* p) { return pool_.deallocate_after(used, p, crumb, 256); });
    }
    void settle() override {
        pool_.collect();
        (void)pool_.trim({});
    }
    [[nodiscard]] void* own_stream() noexcept override { return &stream_; }
    [[nodiscard]] bool defers() const noexcept override { return true; }

private:
    using stream = typename Backend::stream;
    two_streams<Backend> others_;
    stream stream_;
    gpushare::pool_resource<any_upstream, typename stream::point> pool_;
    typename gpushare::pool_resource<any_upstream, typename stream::point>::cache cache_;
};

/// Blocks of the owner's own memory. Each is freed behind the work that was enqueued by then.
template <class Backend>
class deferred_stack : public stack {
public:
    explicit deferred_stack(const site<Backend>& s)
        : on_(&s.on), stream_(s.on.make_stream()), others_(s.on), memory_(&s.memory) {}
    void* get(failure& why) noexcept override { return memory_->try_allocate(unit, 256, &why); }
    errc put(void* p) noexcept override try {
        return memory_->deallocate_after(stream_.record(), p, unit, 256);
    } catch (...) {  // a lost device
        return errc::backend_failed;
    }
    void reach() override {
        (void)stream_.record().wait(gpushare::never);
        others_.reach();
    }
    void settle() override { memory_->collect(); }
    void hold() override { hold_stream(*on_, stream_); }
    void let_go() override {
        let_go_stream(*on_, stream_);
        others_.let_go();
    }
    [[nodiscard]] void* own_stream() noexcept override { return &stream_; }
    [[nodiscard]] bool defers() const noexcept override { return true; }
    bool free_many(std::size_t n) override {
        return others_.free_many(
            n, [&] { return memory_->try_allocate(crumb, 256, nullptr); },
            [&](const auto& used, void* p) { return memory_->deallocate_after(used, p, crumb, 256); });
    }
    /// The owner checks frees, if it does, and not this stack.
    std::string_view misuse(void* p) noexcept override {
        return put(p) != errc::none ? "a block isn't taken back" : std::string_view{};
    }

private:
    Backend* on_;
    typename Backend::stream stream_;
    two_streams<Backend> others_;
    ordered_upstream<typename Backend::stream::point>* memory_;
};

/// A model of PyTorch's caching allocator in front of its pluggable functions. It caches freed
/// blocks by stream. If the function returns null, the allocator frees its cache and tries again;
/// exceptions go straight to the caller. Blocks that are freed while a stream is captured aren't
/// cached. Like PyTorch's, the allocator holds its one lock even while it calls the function.
template <class Backend>
class pytorch_stack : public stack {
    using memory_type = ordered_upstream<typename Backend::stream::point>;

public:
    explicit pytorch_stack(const site<Backend>& s)
        : on_(&s.on), memory_(&s.memory), streams_{s.on.make_stream(), s.on.make_stream()}, torch_(s.on.node()) {
        torch_.add(0, gpushare::device_id{0}, s.memory);
    }
    ~pytorch_stack() override {
        settle();
        reach();
        memory_->collect();
    }
    void* get(failure& why) noexcept override {
        const std::lock_guard lock(mutex_);
        const std::size_t on = turn_ / granted % 2;
        void* p = nullptr;
        if (!memory_->closing().closed()) {
            if (!kept_[on].empty()) {
                p = kept_[on].back();
                kept_[on].pop_back();
            } else if (answer from = ask(on, unit); from.asks_again()) {
                empty_cache();
                p = ask(on, unit).pointer;
            } else {
                p = from.pointer;
            }
        }
        if (p != nullptr) {
            out_[p] = on;
            ++turn_;
        }
        why.code = memory_->closing().closed() ? errc::closed : errc::out_of_memory;
        return p;
    }
    errc put(void* p) noexcept override {
        const std::lock_guard lock(mutex_);
        const auto found = out_.find(p);
        if (found == out_.end()) return errc::unknown_block;
        const auto on = found->second;
        out_.erase(found);
        if constexpr (requires { on_->capturing(); })
            if (auto* const captured = on_->capturing()) {
                const errc why = torch_.deallocate(p, unit, 0, captured->native_handle());
                return why == errc::capturing ? errc::none : why;
            }
        kept_[on].push_back(p);
        return errc::none;
    }
    void* get_beside(failure& /*why*/) noexcept override { return ask(0, unit).pointer; }
    errc put_beside(void* p) noexcept override { return torch_.deallocate(p, unit, 0, handle(0)); }
    void reach() override {
        for (auto& s : streams_) (void)s.record().wait(gpushare::never);
    }
    void settle() override {
        {
            const std::lock_guard lock(mutex_);
            empty_cache();
        }
        (void)torch_.free_captured();
        memory_->collect();
    }
    [[nodiscard]] void* own_stream() noexcept override { return &streams_[0]; }
    [[nodiscard]] bool keeps_captured() const noexcept override { return true; }
    void* get_impossible() noexcept override { return ask(0, std::ptrdiff_t{1} << 40).pointer; }
    [[nodiscard]] bool defers() const noexcept override { return true; }

private:
    struct answer {
        void* pointer = nullptr;
        bool thrown = false;
        [[nodiscard]] bool asks_again() const noexcept { return pointer == nullptr && !thrown; }
    };
    [[nodiscard]] answer ask(std::size_t on, std::ptrdiff_t size) noexcept {
        try {
            return {torch_.try_allocate(size, 0, handle(on))};
        } catch (...) {
            return {nullptr, true};
        }
    }
    [[nodiscard]] auto handle(std::size_t i) noexcept {
        if constexpr (requires { streams_[i].native_handle(); })
            return streams_[i].native_handle();
        else
            return &streams_[i];
    }
    void empty_cache() noexcept {
        for (std::size_t on = 0; on < kept_.size(); ++on) {
            for (void* const p : kept_[on]) (void)torch_.deallocate(p, unit, 0, handle(on));
            kept_[on].clear();
        }
    }

    Backend* on_;
    memory_type* memory_;
    std::array<typename Backend::stream, 2> streams_;
    gpushare::pytorch_allocator<memory_type, typename Backend::node_type> torch_;
    std::mutex mutex_;
    // Blocks come in turns from one stream and then from the other, which doesn't use blocks cached
    // for the first.
    std::size_t turn_ = 0;
    std::map<void*, std::size_t> out_;  // on which stream
    std::array<std::vector<void*>, 2> kept_;
};

/// A block is a chunk. One arena serves most calls, and another one the concurrent calls.
template <class Backend>
class arena_stack : public stack {
public:
    explicit arena_stack(const site<Backend>& s)
        : scrubs_(s.on.make_stream()),
          work_(s.on.make_stream()),
          pool_(s.on.chunks(), scrubs_, {.capacity = 2 * slots}),
          arena_(pool_, s.limit, gpushare::tenant_tag{1}, blocks(slots)),
          beside_(pool_, s.limit, gpushare::tenant_tag{1}, bytes{unit}) {
        for (std::size_t i = 0; i < slots; ++i) vacant_.push_back(i);
    }
    void* get_beside(failure& why) noexcept override {
        why = beside_.try_commit({}, bytes{unit}, gpushare::never);
        return why.code == errc::none ? beside_.data() : nullptr;
    }
    errc put_beside(void* /*p*/) noexcept override {
        const std::array used{work_.record()};
        return beside_.try_decommit_after({}, bytes{unit}, used).code;
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
        if (why == errc::none) give(slot);
        return why;
    }
    void reach() override {
        (void)work_.record().wait(gpushare::never);
        (void)scrubs_.record().wait(gpushare::never);
    }
    void settle() override { (void)pool_.collect(); }
    [[nodiscard]] void* own_stream() noexcept override { return &scrubs_; }
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
    gpushare::virtual_arena<typename Backend::virtual_memory, stream> arena_, beside_;
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
    [[nodiscard]] void* own_stream() noexcept override { return &stream_; }
    [[nodiscard]] bool defers() const noexcept override { return true; }
    /// It checks no free: that is left to what is above.
    std::string_view misuse(void* p) noexcept override {
        return put(p) != errc::none ? "a block isn't taken back" : std::string_view{};
    }

protected:
    using scrubbing = gpushare::scrubbing_resource<any_upstream, typename Backend::stream>;
    Backend* on_;
    typename Backend::stream stream_;
    scrubbing memory_;
};

/// The quota lies above the scrubbing resource, which is on the device's memory.
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
    [[nodiscard]] void* own_stream() noexcept override { return &stream_; }
    [[nodiscard]] bool closes() const noexcept override { return false; }
    [[nodiscard]] bool is_taken_back() const noexcept override { return false; }
    [[nodiscard]] bool defers() const noexcept override { return true; }
    /// It checks no free: that is left to what is above.
    std::string_view misuse(void* p) noexcept override {
        return put(p) != errc::none ? "a block isn't taken back" : std::string_view{};
    }

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
                   : errc::backend_failed;  // a second free has no block any more
    }
    [[nodiscard]] bool passes_answers() const noexcept override { return true; }
    /// Frees and moves the block while it is being moved.
    std::string_view misuse(void* p) noexcept override {
        gpushare::block_handle h;
        {
            const std::lock_guard lock(mutex_);
            h = std::exchange(out_[p], {});
        }
        bool refused = true;
        const auto nothing = [](void*, const void*, std::size_t) {};
        const failure moved = memory_.try_resize(h, unit, [&](void*, const void*, std::size_t) {
            refused = memory_.deallocate(h) == errc::in_flight &&
                      memory_.try_resize(h, unit, nothing).code == errc::in_flight;
        });
        return memory_.deallocate(h) != errc::none ? "a block isn't taken back"
               : moved.code != errc::none          ? "a block isn't moved"
               : !refused                          ? "a block is freed or moved while it is moved"
                                                   : std::string_view{};
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
            const auto found = out_.find(p);
            if (found == out_.end()) return errc::unknown_block;
            last = std::move(found->second);
            out_.erase(found);
        }
        const errc why = last->spill(gpushare::never);
        return why == errc::none && last->data() != nullptr ? errc::backend_failed : why;
    }
    void reach() override { (void)stream_.record().wait(gpushare::never); }
    [[nodiscard]] void* own_stream() noexcept override { return &stream_; }

private:
    using spillable = gpushare::spillable_block<typename Backend::stream, any_upstream, std::pmr::memory_resource>;
    typename Backend::stream stream_;
    any_upstream* memory_;
    std::mutex mutex_;
    std::map<void*, std::unique_ptr<spillable>> out_;
};

/// Blocks of a vendor's library, taken past every allocator and declared.
template <class Backend>
class workspace_stack : public stack {
public:
    explicit workspace_stack(const site<Backend>& s) : on_(&s.on), declare_(s.declare), make_room_(s.make_room) {}
    void* get(failure& why) noexcept override {
        void* p = on_->take_for_library();
        if (p == nullptr) {  // a vendor's library calls none of our hooks
            make_room_();
            p = on_->take_for_library();
        }
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
        std::map<void*, gpushare::workspace>::node_type last;
        {
            const std::lock_guard lock(mutex_);
            last = out_.extract(p);
        }
        if (last.empty()) return errc::unknown_block;
        on_->give_for_library(p);
        return errc::none;
    }
    /// The vendor's library still has the block.
    [[nodiscard]] bool is_taken_back() const noexcept override { return false; }

private:
    Backend* on_;
    std::function<gpushare::workspace()> declare_;
    std::function<void()> make_room_;
    std::mutex mutex_;
    std::map<void*, gpushare::workspace> out_;
};

template <class Backend>
class counted_stack : public stack {
public:
    explicit counted_stack(const site<Backend>& s) : memory_(s.memory) {}
    void* get(failure& why) noexcept override { return memory_.try_allocate(unit, 256, &why); }
    errc put(void* p) noexcept override { return memory_.deallocate(p, unit, 256); }
    [[nodiscard]] bool passes_answers() const noexcept override { return true; }

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
    std::string_view misuse(void* p) noexcept override { return stack::misuse(p); }
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
