// SPDX-License-Identifier: Apache-2.0
// Moves a running tenant to other devices, to defragment a node or to make room there. It first reserves what the tenant is
// promised on the new devices, then copies its blocks, then gives back the old place. If a step before that fails, nothing
// has changed.
//
//   std::vector<gpushare::moving_block> blocks{{.at = weights, .size = 1 << 30}};
//   auto moved = gpushare::move_tenant(shared, chat, {device_id{3}}, blocks, now + 5s);
//   chat = std::move(moved.successor);      weights = blocks[0].at;
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/tenant.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A block of a tenant's memory that goes with it.
struct moving_block {
    std::size_t part = 0;         ///< which of the tenant's devices, from 0
    void* at = nullptr;           ///< where it is; once move_tenant() has returned, where it is from now on
    std::size_t size = 0;         ///< as it was allocated, bytes
    std::size_t alignment = 256;  ///< likewise
};

/// How a move went. The times follow each other.
struct move_report {
    bytes moved{};  ///< of all blocks
    ns reserve{};   ///< until the tenant was admitted there
    ns scrub{};     ///< until its memory there was allocated, which is overwritten before it is had
    ns wait{};      ///< until its work here was done
    ns copy{};      ///< until all blocks were there
    std::uint64_t late =
        0;  ///< submissions that ended here after the copy began, by a thread that didn't stop: what they wrote is lost
    close_report closed{};  ///< how it ended here; if that isn't complete, close the old handle again
};

/// A tenant at its new place.
template <class Tenant>
struct moved_tenant {
    Tenant successor;      ///< of the same name; the old handle's calls are refused with errc::closed
    move_report report{};  ///< how it went
};

namespace detail {

/// Where the blocks are to go. What isn't taken goes back, behind the copies that may be under way.
template <class Tenant>
class move_target {
public:
    move_target(Tenant& next, std::span<moving_block> blocks) : next_(&next), blocks_(blocks) {
        at_.reserve(blocks.size());
        try {
            for (const auto& b : blocks) at_.push_back(next.memory(b.part).allocate(b.size, b.alignment));
        } catch (...) {
            give_back();
            throw;
        }
    }
    move_target(const move_target&) = delete;
    move_target& operator=(const move_target&) = delete;
    ~move_target() { give_back(); }

    [[nodiscard]] void* of(std::size_t block) const noexcept { return at_[block]; }
    /// They are the caller's from now on.
    void keep() noexcept { at_.clear(); }

private:
    void give_back() noexcept {
        for (std::size_t i = 0; i < at_.size(); ++i) try {
                const auto& b = blocks_[i];
                next_->memory(b.part).deallocate_after(next_->work_stream(b.part).record(), at_[i], b.size,
                                                       b.alignment);
            } catch (...) {  // the tenant's close takes it back
            }
    }

    Tenant* next_;
    std::span<moving_block> blocks_;
    std::vector<void*> at_;
};

/// Throws operation_error unless the ticket's work was done well by the deadline.
template <class Ticket>
void expect_done(const Ticket& t, instant deadline, const std::string& tenant, const char* what) {
    if (!t.wait(deadline)) raise({errc::deadline_exceeded}, tenant, what);
    if (t.status() != errc::none) raise({t.status()}, tenant, what);
}

}  // namespace detail

/// Moves a tenant to the devices `to`, as many as it has, all or nothing. `blocks` are those of its memory that it wants to keep: they are
/// copied, their `at` is changed, and the others end with it here. Both places are taken until the end, so it needs room for
/// itself there. The copies are the tenant's own submissions there, charged to it.
///
/// The tenant's threads must have stopped to submit, and to use the blocks, until this returns. What is queued by then runs first. A
/// submission that is seen while the blocks are copied makes the move fail with errc::in_flight, and nothing has happened.
///
/// Throws what tenancy::admit and an allocation throw; operation_error: deadline_exceeded, what the work or a copy failed with,
/// invalid_specification (another number of devices), unknown_block for a part that isn't there. Then the tenant is where it was.
template <node Node, compute_policy Policy>
requires copier<typename Node::stream>
[[nodiscard]] moved_tenant<tenant<Node, Policy>> move_tenant(tenancy<Node, Policy>& shared, tenant<Node, Policy>& from,
                                                             std::vector<device_id> to, std::span<moving_block> blocks,
                                                             instant deadline = never) {
    const std::string name = from.name();
    tenant_spec spec = from.spec();
    if (to.size() != spec.devices)
        raise({errc::invalid_specification, to.size(), 0, spec.devices}, name, "move, to as many devices");
    for (const auto& b : blocks)
        if (b.part >= spec.devices) raise({errc::unknown_block, b.part, 0, spec.devices}, name, "move");
    move_report report;
    instant last = shared.now();
    const auto lap = [&](ns& phase) { phase = shared.now() - std::exchange(last, shared.now()); };

    spec.on = std::move(to);
    spec.slice = any_slice;
    auto next = shared.admit_successor(from, std::move(spec));
    lap(report.reserve);
    detail::move_target target(next, blocks);
    lap(report.scrub);

    const std::size_t parts = from.spec().devices;
    for (std::size_t part = 0; part < parts; ++part)  // behind all that it has submitted
        for (std::uint32_t i = 0; i < from.spec().streams; ++i)
            detail::expect_done(from.submit([](auto&) {}, {.stream = i}, {}, part), deadline, name,
                                "move, waiting for its work");
    const auto before = from.usage();
    lap(report.wait);

    std::vector<typename tenant<Node, Policy>::ticket> copies;
    for (std::size_t part = 0; part < parts; ++part)
        copies.push_back(next.submit(
            [&blocks, &target, part](auto& stream) {
                for (std::size_t i = 0; i < blocks.size(); ++i)
                    if (blocks[i].part == part) stream.copy(target.of(i), blocks[i].at, blocks[i].size);
            },
            part));
    try {
        for (const auto& c : copies) detail::expect_done(c, deadline, name, "move, copying");
    } catch (...) {
        for (auto& c : copies)
            c.wait(saturating_add(shared.now(), std::chrono::seconds(10)));  // they refer to this frame
        throw;
    }
    const auto now = from.usage();
    if (now.completed != before.completed || now.waiting + now.in_flight != 0)
        raise({errc::in_flight}, name, "move, beside submissions");
    lap(report.copy);

    for (std::size_t i = 0; i < blocks.size(); ++i) {
        auto& b = blocks[i];
        report.moved += bytes{b.size};
        (void)from.memory(b.part).deallocate(b.at, b.size, b.alignment);
        b.at = target.of(i);
    }
    target.keep();
    report.closed = from.close(deadline);
    report.late =
        report.closed.usage.completed > before.completed ? report.closed.usage.completed - before.completed : 0;
    return {std::move(next), report};
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
