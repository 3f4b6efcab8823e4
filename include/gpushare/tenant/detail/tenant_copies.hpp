// SPDX-License-Identifier: Apache-2.0
// The common part of moving and parking a tenant: its blocks, the wait for its work, and copies
// that are the tenant's own submissions.
//
//   const auto before = detail::run_out(from, deadline, "move");
//   detail::new_places to(next, blocks);
//   detail::tenant_copies copies(next);
//   copies.run(blocks, there, here, {deadline, "move, copying"}, [] { /* a copy still runs */ });
//   detail::expect_idle_since(from, before, "move, beside submissions");
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// Throws operation_error: unknown_block for a part that doesn't exist; invalid_specification if
/// two blocks overlap or are the same: that memory would be copied to two places, and freed twice.
template <class Tenant>
void check_blocks(const Tenant& of, std::span<const moving_block> blocks, std::string_view what) {
    const auto parts = of.spec().devices;
    std::vector<std::pair<std::uintptr_t, const moving_block*>> by_place;
    by_place.reserve(blocks.size());
    for (const auto& b : blocks) {
        if (b.part >= parts) raise({errc::unknown_block, b.part, 0, parts, reason::other_part}, of.name(), what);
        by_place.emplace_back(reinterpret_cast<std::uintptr_t>(b.at), &b);
    }
    std::sort(by_place.begin(), by_place.end(), [](const auto& a, const auto& b) {
        return std::pair(a.second->part, a.first) < std::pair(b.second->part, b.first);
    });
    for (std::size_t i = 1; i < by_place.size(); ++i) {
        const moving_block &before = *by_place[i - 1].second, &b = *by_place[i].second;
        const auto distance = by_place[i].first - by_place[i - 1].first;
        if (b.part == before.part && distance < std::max<std::size_t>(before.size, 1))
            raise({.code = errc::invalid_specification, .because = reason::occupied}, of.name(), what);
    }
}

/// Throws operation_error unless the ticket's work has succeeded by the deadline.
template <class Ticket>
void expect_done(const Ticket& t, instant deadline, std::string_view tenant, std::string_view what) {
    if (!t.wait(deadline)) raise({errc::deadline_exceeded}, tenant, what);
    if (t.status() != errc::none) raise({t.status()}, tenant, what);
}

/// Waits until all work that the tenant has submitted so far is done, on all of its streams.
/// Returns the number of these submissions.
template <class Tenant>
[[nodiscard]] std::uint64_t run_out(Tenant& of, instant deadline, std::string_view what) {
    of.wake();  // otherwise waiting work would wait for ever
    const auto spec = of.spec();
    for (std::size_t part = 0; part < spec.devices; ++part)
        for (std::uint32_t i = 0; i < spec.streams; ++i)
            expect_done(of.submit([](auto&) {}, {.stream = i}, {}, part), deadline, of.name(), what);
    return of.usage().completed;
}

/// Throws operation_error (in_flight) if the tenant has submitted anything since.
template <class Tenant>
void expect_idle_since(Tenant& of, std::uint64_t completed, std::string_view what) {
    const auto now = of.usage();
    if (now.completed != completed || now.waiting + now.in_flight != 0) raise({errc::in_flight}, of.name(), what);
}

/// Frees a block that the tenant doesn't need here any more. Its data is elsewhere, and no failure
/// from now on may lose that data.
template <class Tenant>
void leave_block(Tenant& of, const moving_block& b) noexcept {
    try {
        (void)of.memory(b.part).deallocate(b.at, b.size, b.alignment);
    } catch (...) {  // another thread closes the tenant, and the close takes the block back
    }
}
/// Closes the tenant in the place that it doesn't need any more. If an exception interrupts the
/// close, as for lack of host memory, the report isn't complete: then close again.
template <class Tenant>
[[nodiscard]] close_report close_left(Tenant& from, instant deadline) noexcept {
    try {
        return from.close(deadline);
    } catch (...) {
        return {};
    }
}

/// A tenant's new memory for blocks. Unused memory goes back, after the copies that may be under
/// way.
template <class Tenant>
class new_places {
public:
    /// Allocates memory for each block, except those for which `stays` is true. Throws what an
    /// allocation throws.
    template <class F>
    new_places(Tenant& of, std::span<const moving_block> blocks, F stays) : of_(&of), blocks_(blocks) {
        at_.reserve(blocks.size());
        try {
            for (const auto& b : blocks)
                at_.push_back(stays(b) ? nullptr : of.memory(b.part).allocate(b.size, b.alignment));
        } catch (...) {
            give_back();
            throw;
        }
    }
    new_places(Tenant& of, std::span<const moving_block> blocks)
        : new_places(of, blocks, [](const moving_block&) { return false; }) {}
    new_places(const new_places&) = delete;
    new_places& operator=(const new_places&) = delete;
    ~new_places() { give_back(); }

    /// Null if the block stays.
    [[nodiscard]] void* of(std::size_t block) const noexcept { return at_[block]; }
    /// The caller owns the blocks from now on.
    void keep() noexcept { at_.clear(); }

private:
    void give_back() noexcept {
        for (std::size_t i = 0; i < at_.size(); ++i) try {
                const auto& b = blocks_[i];
                if (at_[i] != nullptr)
                    of_->memory(b.part).deallocate_after(of_->work_stream(b.part).record(), at_[i], b.size,
                                                         b.alignment);
            } catch (...) {  // the tenant's close takes it back
            }
    }

    Tenant* of_;
    std::span<const moving_block> blocks_;
    std::vector<void*> at_;
};

/// The longest time beyond the deadline for which a move, or a park, waits for a copy that the
/// device has begun.
inline constexpr ns copy_patience = std::chrono::seconds(10);

/// Copies that a tenant submits, which refer to nothing but the blocks.
template <class Tenant>
class tenant_copies {
public:
    explicit tenant_copies(Tenant& by, ns patience = copy_patience) : by_(&by), patience_(patience) {
        tickets_.reserve(by.spec().devices);
    }
    tenant_copies(const tenant_copies&) = delete;
    tenant_copies& operator=(const tenant_copies&) = delete;

    struct limits {
        instant deadline;
        std::string_view what;  // for errors
    };
    /// Copies each block that has a destination `to(i)`, one submission for a part. Returns when
    /// all copies have succeeded. Otherwise throws what the tenant's submit throws, or
    /// operation_error; then no copy will begin any more, and copies that have begun are over,
    /// unless that takes longer than the patience. In that case calls `still_runs` before it
    /// throws. Call once.
    template <class To, class From, class F>
    void run(std::span<const moving_block> blocks, To to, From from, const limits& by, F still_runs) {
        try {
            submit(blocks, to, from);
            for (const auto& t : tickets_) expect_done(t, by.deadline, by_->name(), by.what);
        } catch (...) {
            if (!stop()) still_runs();
            throw;
        }
    }
    /// Submissions, one for each part that had something to copy.
    [[nodiscard]] std::size_t count() const noexcept { return tickets_.size(); }

private:
    struct copy {
        void* to;
        const void* from;
        std::size_t size;
    };

    template <class To, class From>
    void submit(std::span<const moving_block> blocks, To to, From from) {
        for (std::size_t part = 0; part < by_->spec().devices; ++part) {
            std::vector<copy> all;
            for (std::size_t i = 0; i < blocks.size(); ++i)
                if (blocks[i].part == part && to(i) != nullptr) all.push_back({to(i), from(i), blocks[i].size});
            if (all.empty()) continue;
            tickets_.push_back(by_->submit(
                [all = std::move(all)](auto& stream) {
                    for (const auto& c : all) stream.copy(c.to, c.from, c.size);
                },
                part));
        }
    }
    // Cancels the copies that haven't begun, and waits for the others. Returns whether all are
    // over.
    [[nodiscard]] bool stop() noexcept try {
        for (auto& t : tickets_) (void)t.cancel();
        const auto until = saturating_add(by_->now(), patience_);
        bool over = true;
        for (auto& t : tickets_) over = t.wait(until) && over;
        return over;
    } catch (...) {  // the clock is stepped by the caller, or the host has no memory: unknown
        return false;
    }

    Tenant* by_;
    ns patience_;
    std::vector<typename Tenant::ticket> tickets_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
