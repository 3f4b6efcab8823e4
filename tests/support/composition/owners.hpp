// SPDX-License-Identifier: Apache-2.0
// The owners of the memory below the stacks of the composition matrix: a quota, a leaf of a tree of
// quotas, a tenant of one device or two. Each owner has `granted` blocks, and a neighbour that is
// promised half of the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <thread>

#include <gpushare/closing.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/deferred_frees.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/tenant/detail/device_overhead.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/tenant.hpp>
#include <gpushare/units.hpp>

#include "support/composition/any_upstream.hpp"
#include "support/composition/stacks.hpp"

namespace support::composition {

/// The blocks of a device, and those that the neighbour is promised. A few blocks are left over.
inline constexpr std::size_t on_device = 24, promised_to_neighbour = 12;

template <class Backend>
class owner {
public:
    using point = typename Backend::stream::point;
    using memory_type = ordered_upstream<point>;

    owner() = default;
    owner(const owner&) = delete;
    owner& operator=(const owner&) = delete;
    virtual ~owner() = default;

    [[nodiscard]] virtual gpushare::quota& limit() = 0;
    [[nodiscard]] virtual memory_type& memory() = 0;
    [[nodiscard]] virtual any_upstream& neighbour() = 0;
    [[nodiscard]] virtual gpushare::quota& neighbours_limit() = 0;
    /// Requests more than there can be while one block is allocated. Always returns null.
    [[nodiscard]] virtual void* ask_too_much() noexcept { return memory().try_allocate(granted * unit, 256, nullptr); }
    /// Charges a block that a library took from the device. Throws memory_error.
    [[nodiscard]] virtual gpushare::workspace declare() = 0;
    /// Returns whether all memory is back.
    virtual bool close(gpushare::instant deadline) = 0;
    /// Resizes the owner to so many blocks.
    [[nodiscard]] virtual bool resize(std::size_t blocks) = 0;
    /// The bytes that its own memory keeps idle.
    [[nodiscard]] virtual bytes idle() { return {}; }
    /// The bytes by which the device is overcommitted, by a new measurement.
    [[nodiscard]] virtual bytes overpromised() { return {}; }
    /// The bytes that could still be promised, by the last measurement.
    [[nodiscard]] virtual bytes left_to_promise() { return {}; }
    /// From now on the owner's close waits for work on another device, until let go. False if the
    /// owner has no other device.
    [[nodiscard]] virtual bool hold_close() { return false; }
    virtual void let_close() {}
    /// Whether its close takes back allocated blocks.
    [[nodiscard]] virtual bool takes_back() { return false; }
    /// Makes the device get back memory that is kept without an owner.
    virtual void make_room() {}
    /// Admits and closes another tenant, if the owner has a tenancy.
    virtual void meet_another() {}
    /// Whether its account shows as many frees as allocations.
    [[nodiscard]] virtual bool is_even() { return true; }
};

/// Declares a workspace as a tenant does.
inline gpushare::workspace declared(gpushare::quota& limit, gpushare::detail::device_overhead& on) {
    errc why = limit.try_charge(bytes{unit});
    for (gpushare::detail::hook_cursor asked; why != errc::none && limit.ask_next(asked, bytes{unit});)
        why = limit.try_charge(bytes{unit});
    if (why != errc::none) gpushare::raise(limit.explain(why, bytes{unit}), {}, "declare a workspace");
    return {limit, on, bytes{unit}};
}

/// The memory of a quota, with frees in stream order.
template <class Memory, class Point>
class ordered_quota final : public ordered_upstream<Point> {
    using resource = gpushare::quota_resource<Memory>;

public:
    ordered_quota(gpushare::quota& limit, Memory& of, const char* name) : memory_(limit, of, name) {}
    void* try_allocate(std::size_t size, std::size_t alignment, failure* why) noexcept override {
        return memory_.try_allocate(size, alignment, why);
    }
    errc deallocate(void* p, std::size_t size, std::size_t alignment) noexcept override {
        return memory_.deallocate(p, size, alignment);
    }
    errc deallocate_after(const Point& used, void* p, std::size_t size, std::size_t alignment) noexcept override {
        frees_.add(used, p, size, alignment);
        return errc::none;
    }
    void collect() noexcept override { (void)frees_.collect(); }
    bytes charged(std::size_t size, std::size_t alignment) const noexcept override {
        return memory_.charged(size, alignment);
    }
    failure refuses(std::size_t size, std::size_t alignment) const noexcept override {
        return memory_.refuses(size, alignment);
    }
    bytes largest_free() const noexcept override { return memory_.largest_free(); }
    std::string_view owner() const noexcept override { return memory_.owner(); }
    gpushare::close_token closing() const noexcept override { return memory_.closing(); }
    bool in_hook(std::thread::id t) const noexcept override { return memory_.in_hook(t); }

private:
    resource memory_;
    gpushare::deferred_frees<Point, resource> frees_{memory_};
    gpushare::quota_hook collects_{gpushare::collecting_hook(memory_.limit(), frees_)};
};

/// A quota of device memory, or of pinned host memory, which has its own quotas.
template <class Backend, class Memory = typename Backend::memory_type>
class quota_owner : public owner<Backend> {
    using resource = ordered_quota<Memory, typename owner<Backend>::point>;

public:
    quota_owner(Backend& on, Memory& memory)
        : overhead_(on.memory()), mine_(of_mine_, memory, "mine"), theirs_(of_theirs_, memory, "theirs") {}
    gpushare::quota& limit() override { return of_mine_; }
    resource& memory() override { return mine_; }
    any_upstream& neighbour() override { return theirs_; }
    gpushare::quota& neighbours_limit() override { return of_theirs_; }
    gpushare::workspace declare() override { return declared(of_mine_, overhead_); }
    bool close(gpushare::instant deadline) override { return of_mine_.close(deadline); }
    bool resize(std::size_t n) override { return of_mine_.resize(blocks(n), {}) == errc::none; }

private:
    gpushare::detail::device_overhead overhead_;
    gpushare::quota all_{blocks(on_device)};
    gpushare::quota of_mine_{all_, blocks(granted)}, of_theirs_{all_, blocks(promised_to_neighbour)};
    resource mine_, theirs_;
};

/// A leaf that borrows half of its blocks from a team, whose memory a rival wants entirely.
template <class Backend>
class tree_owner : public owner<Backend> {
    using resource = ordered_quota<typename Backend::memory_type, typename owner<Backend>::point>;

public:
    explicit tree_owner(Backend& on)
        : overhead_(on.memory()),
          mine_(of_mine_, on.memory(), "mine"),
          rival_(of_rival_, on.memory(), "rival"),
          theirs_(of_theirs_, on.memory(), "theirs") {}
    gpushare::quota& limit() override { return of_mine_; }
    resource& memory() override { return mine_; }
    any_upstream& neighbour() override { return theirs_; }
    gpushare::quota& neighbours_limit() override { return of_theirs_; }
    void* ask_too_much() noexcept override {
        if (void* const p = rival_.try_allocate((granted / 2 + 1) * unit, 256, nullptr)) return p;
        return owner<Backend>::ask_too_much();
    }
    gpushare::workspace declare() override { return declared(of_mine_, overhead_); }
    bool close(gpushare::instant deadline) override { return of_mine_.close(deadline); }
    bool resize(std::size_t n) override {
        const bytes burst = n > granted / 2 ? blocks(n - granted / 2) : bytes{};
        const bool first = n < granted || team_.resize(blocks(n), {}) == errc::none;  // the lender grows first
        return first && of_mine_.resize(blocks(granted / 2), burst) == errc::none;
    }

private:
    gpushare::detail::device_overhead overhead_;
    gpushare::quota all_{blocks(on_device)};
    gpushare::quota team_{all_, blocks(granted)}, of_theirs_{all_, blocks(promised_to_neighbour)};
    gpushare::quota of_mine_{team_, blocks(granted / 2), blocks(granted / 2)}, of_rival_{team_, {}, blocks(granted)};
    resource mine_, rival_, theirs_;
};

/// A tenant on that many devices; the stack is on the first one.
template <class Backend>
class tenant_owner : public owner<Backend> {
    using tenancy = gpushare::tenancy<typename Backend::node_type>;
    using tenants_memory = typename tenancy::tenant::memory_type;
    using point = typename owner<Backend>::point;

public:
    tenant_owner(Backend& on, gpushare::memory_stack made_of, std::uint32_t devices = 1)
        : on_(&on),
          shared_(on.node(), {.stack = made_of}),
          devices_(devices),
          offers_(offer(made_of)),
          mine_(shared_.admit(
              {.name = "mine", .memory = blocks(granted * devices), .devices = devices, .compute = a_third})),
          theirs_(shared_.admit(
              {.name = "theirs", .memory = blocks(promised_to_neighbour), .compute = a_third, .on = {first}})) {
        if (devices > 1) other_.emplace(on.make_stream(gpushare::device_id{1}));
    }
    gpushare::quota& limit() override { return memory_.limit(); }
    ordered_upstream<point>& memory() override { return erased_mine_; }
    any_upstream& neighbour() override { return erased_theirs_; }
    gpushare::quota& neighbours_limit() override { return theirs_.memory().limit(); }
    gpushare::workspace declare() override { return mine_.declare_workspace(bytes{unit}); }
    bool close(gpushare::instant deadline) override {
        const bool complete = mine_.close(deadline).complete;
        make_room();
        return complete;
    }
    void make_room() override {
        if (offers_) shared_.trim(first);
    }
    bool resize(std::size_t n) override try {
        mine_.resize({.memory = blocks(n * devices_)});
        return true;
    } catch (const gpushare::error&) {
        return false;
    }
    bytes idle() override { return memory_.idle(); }
    bytes overpromised() override { return shared_.remeasure(); }
    bytes left_to_promise() override { return shared_.rooms()[0].free; }
    bool hold_close() override {
        if (!other_) return false;
        auto& there = mine_.memory(1);
        void* const p = there.allocate(unit);
        on_->stall(*other_);
        return there.deallocate_after(other_->record(), p, unit) == errc::none;
    }
    void let_close() override {
        if (other_) on_->resume(*other_);
    }
    bool takes_back() override { return true; }
    void meet_another() override {
        (void)shared_.admit({.name = "guest", .memory = blocks(1), .compute = a_third}).close();
    }
    bool is_even() override {
        const auto account = mine_.usage();
        return account.frees == account.allocations;
    }

private:
    // Offers the memory that a stack needs beside the device's own memory.
    bool offer(gpushare::memory_stack made_of) {
        if (made_of == gpushare::memory_stack::arena) shared_.offer(first, on_->chunks());
        if constexpr (requires { on_->device_pool(); })
            if (made_of == gpushare::memory_stack::stream_ordered) shared_.offer(first, on_->device_pool());
        return made_of == gpushare::memory_stack::arena || made_of == gpushare::memory_stack::stream_ordered;
    }

    static constexpr gpushare::device_id first{0};
    static constexpr gpushare::share a_third = gpushare::share::of_permille(333);
    Backend* on_;
    tenancy shared_;
    std::uint32_t devices_;
    bool offers_;
    typename tenancy::tenant mine_, theirs_;
    tenants_memory& memory_ = mine_.memory();
    std::optional<typename Backend::stream> other_;
    ordered_upstream_of<tenants_memory, point> erased_mine_{memory_};
    upstream_of<tenants_memory> erased_theirs_{theirs_.memory()};
};

}  // namespace support::composition
