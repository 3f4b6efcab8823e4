// SPDX-License-Identifier: Apache-2.0
// Moves a running tenant to other devices, to defragment a node or to make room there. It first
// reserves what the tenant is promised on the new devices, then copies its blocks, then gives back
// the old place. If a step before that fails, nothing has changed.
//
//   std::vector<gpushare::moving_block> blocks{{.at = weights, .size = 1 << 30}};
//   auto moved = gpushare::move_tenant(shared, chat, {gpushare::device_id{3}}, blocks, now + 5s);
//   chat = std::move(moved.successor);      weights = blocks[0].at;
//
// Where there isn't room for both, see park.hpp.
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
#include <gpushare/tenant/detail/succession.hpp>
#include <gpushare/tenant/detail/tenant_copies.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/tenant.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How a move went. The times follow each other.
struct move_report {
    bytes moved{};  ///< of all blocks that were copied
    bytes kept{};   ///< of the blocks that stayed, on a device that it didn't leave
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

/// Moves a tenant to the devices `to`, as many as it has, all or nothing. `blocks` are the blocks
/// of its memory to keep: they are copied, and their `at` is changed. Its other blocks end with it
/// here. The copies are the tenant's own submissions there, charged to it. The tenant occupies both
/// places until the end, so it needs room for itself there. `slice` is that of tenant_spec.
///
/// On a device that it doesn't leave, one with the same place in `to` as in spec().on, nothing is
/// copied or taken twice: the successor gets the memory as it is, blocks that aren't listed, pools
/// and arenas on it included.
///
/// The tenant's threads must have stopped to submit, and to use the blocks, until this returns.
/// Work queued by then runs first, so a sleeping tenant is woken, and is awake afterwards. A
/// submission that is seen while the blocks are copied, or a resize beside all this, makes the move
/// fail with errc::in_flight, and nothing has happened.
///
/// Throws what tenancy::admit and an allocation throw; operation_error: deadline_exceeded, the code
/// with which the work or a copy failed, invalid_specification (another number of devices),
/// unknown_block for a part that isn't there. Then the tenant is where it was. Copies that the
/// device has begun are waited for up to ten seconds beyond the deadline.
template <node Node, compute_policy Policy>
requires copier<typename Node::stream>
[[nodiscard]] moved_tenant<tenant<Node, Policy>> move_tenant(tenancy<Node, Policy>& shared, tenant<Node, Policy>& from,
                                                             std::vector<device_id> to, std::span<moving_block> blocks,
                                                             instant deadline = never,
                                                             std::uint32_t slice = any_slice) {
    const auto leaves = from.spec().on;  // the same for ever
    if (to.size() != leaves.size())
        raise({errc::invalid_specification, to.size(), 0, leaves.size(), reason::wrong_count}, from.name(),
              "move, devices to go to");
    detail::check_blocks(from, blocks, "move");
    move_report report;
    instant last = shared.now();
    const auto lap = [&](ns& phase) { phase = shared.now() - std::exchange(last, shared.now()); };
    detail::succession succession(shared, from, to, slice);
    auto& next = succession.next();
    lap(report.reserve);
    detail::new_places target(next, blocks, [&](const moving_block& b) { return to[b.part] == leaves[b.part]; });
    lap(report.scrub);

    const auto before = detail::run_out(from, deadline, "move");
    lap(report.wait);

    {
        detail::tenant_copies copies(next);
        copies.submit(
            blocks, [&](std::size_t i) { return target.of(i); }, [&](std::size_t i) { return blocks[i].at; });
        copies.wait(deadline, "move, copying");
        detail::expect_idle_since(from, before, "move, beside submissions");
        lap(report.copy);
    }

    succession.take_over();  // the last that may fail
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        auto& b = blocks[i];
        (target.of(i) != nullptr ? report.moved : report.kept) += bytes{b.size};
        if (target.of(i) == nullptr) continue;
        detail::leave_block(from, b);
        b.at = target.of(i);
    }
    target.keep();
    report.closed = detail::close_left(from, deadline);
    report.late = report.closed.usage.completed > before ? report.closed.usage.completed - before : 0;
    return {std::move(next), report};
}

/// The same, with the reason instead of an exception; but std::bad_alloc where the host has no memory.
template <node Node, compute_policy Policy>
requires copier<typename Node::stream>
[[nodiscard]] result<moved_tenant<tenant<Node, Policy>>> try_move_tenant(
    tenancy<Node, Policy>& shared, tenant<Node, Policy>& from, std::vector<device_id> to,
    std::span<moving_block> blocks, instant deadline = never, std::uint32_t slice = any_slice) {
    return detail::or_why([&] { return move_tenant(shared, from, std::move(to), blocks, deadline, slice); });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
