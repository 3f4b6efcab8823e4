// SPDX-License-Identifier: Apache-2.0
// Moves a running tenant to other devices, to defragment a node or to make room there. The move
// first reserves the tenant's memory and share on the new devices, then copies the tenant's blocks,
// and then gives up the old place. If a step before the last fails, nothing has changed.
//
//   std::vector<gpushare::moving_block> blocks{{.at = weights, .size = 1 << 30}};
//   auto moved = gpushare::move_tenant(shared, chat, {gpushare::device_id{3}}, blocks, now + 5s);
//   chat = std::move(moved.successor);      weights = blocks[0].at;
//
// If there isn't room for both places, park the tenant: take it off its devices with its data, and
// put it on other devices later. So two tenants can change places, or a tenant can make room for an
// urgent tenant. A parked tenant has only host memory. Its name is free, and no resources are
// promised to it.
//
//   // pinned: memory of the host, as a resource
//   auto parked = gpushare::park_tenant(chat, blocks, pinned, now + 5s);
//   auto urgent = shared.admit({.name = "urgent", .memory = 24_GiB});
//   // where there is room; blocks[i].at is new
//   chat = gpushare::unpark_tenant(shared, parked, {}, blocks);
#pragma once

#include <algorithm>
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

/// How a move went. Each of the times begins where the previous one ends.
struct move_report {
    bytes moved{};  ///< bytes of all blocks that were copied
    bytes kept{};   ///< bytes of the blocks that stayed, on devices that the tenant didn't leave
    ns reserve{};   ///< until the tenant was admitted at the new place
    ns scrub{};     ///< until its new memory was allocated, which is overwritten first
    ns wait{};      ///< until its work at the old place was done
    ns copy{};      ///< until all blocks were at the new place
    /// submissions of a thread that didn't stop, which ended at the old place after the copy began:
    /// the data that they wrote is lost
    std::uint64_t late = 0;
    /// how the old place closed; if not complete, close the old handle again
    close_report closed{};
};

/// A tenant at its new place.
template <class Tenant>
struct moved_tenant {
    Tenant successor;      ///< same name; the old handle's calls are refused with errc::closed
    move_report report{};  ///< how the move went
};

/// Moves a tenant to the devices `to`, as many as it has, all or nothing. `blocks` are the blocks
/// of its memory to keep: they are copied, and their `at` is changed. Other blocks end with the
/// tenant's old place. The copies are the tenant's own submissions at the new place, and are
/// charged to it. The tenant occupies both places until the end, so the new place needs room for
/// all of it. `slice` is that of tenant_spec.
///
/// A device that the tenant doesn't leave has the same place in `to` as in spec().on. There nothing
/// is copied or taken twice: the successor gets the memory as it is, including blocks that aren't
/// listed, and pools and arenas on that memory.
///
/// The tenant's threads must have stopped submitting work, and using the blocks, until this
/// returns. Work queued by then runs first, so a sleeping tenant is woken, and is awake afterwards.
/// A submission that is seen while the blocks are copied, or a concurrent resize, makes the move
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
    const auto leaves = from.spec().on;  // the devices never change
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

    detail::tenant_copies copies(next);
    copies.run(
        blocks, [&](std::size_t i) { return target.of(i); }, [&](std::size_t i) { return blocks[i].at; },
        {deadline, "move, copying"}, [] {});  // the new places are freed behind the copies
    detail::expect_idle_since(from, before, "move, beside submissions");
    lap(report.copy);

    succession.take_over();  // nothing after this may fail
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

/// The same, with the reason instead of an exception. Throws std::bad_alloc if the host has no
/// memory.
template <node Node, compute_policy Policy>
requires copier<typename Node::stream>
[[nodiscard]] result<moved_tenant<tenant<Node, Policy>>> try_move_tenant(
    tenancy<Node, Policy>& shared, tenant<Node, Policy>& from, std::vector<device_id> to,
    std::span<moving_block> blocks, instant deadline = never, std::uint32_t slice = any_slice) {
    return detail::or_why([&] { return move_tenant(shared, from, std::move(to), blocks, deadline, slice); });
}

/// The data of a tenant that is on no device. Movable, one owner; the destructor frees the data.
/// `Host` must outlive it. The devices' copies must reach that memory: pinned, for speed.
template <memory_resource Host>
class parked_tenant {
public:
    /// Called by park_tenant(). Throws what the host's allocate throws.
    parked_tenant(Host& host, std::span<const moving_block> blocks) : host_(&host) {
        copies_.reserve(blocks.size());
        try {
            for (const auto& b : blocks) copies_.push_back({host.allocate(b.size, b.alignment), b});
        } catch (...) {
            free();
            throw;
        }
    }
    /// Takes over the data.
    parked_tenant(parked_tenant&& other) noexcept
        : host_(other.host_),
          spec_(std::move(other.spec_)),
          copies_(std::exchange(other.copies_, {})),
          closed_(std::move(other.closed_)),
          left_(other.left_) {}
    parked_tenant& operator=(parked_tenant&&) = delete;
    ~parked_tenant() { free(); }

    /// The tenant's grant, with the devices that it left.
    [[nodiscard]] const tenant_spec& spec() const noexcept { return spec_; }
    /// The size of the data.
    [[nodiscard]] bytes size() const noexcept {
        bytes all;
        for (const auto& c : copies_) all += bytes{c.of.size};
        return all;
    }
    /// The number of blocks.
    [[nodiscard]] std::size_t blocks() const noexcept { return copies_.size(); }
    /// Whether the data is of these blocks, wherever they are.
    [[nodiscard]] bool has(std::span<const moving_block> blocks) const noexcept {
        return std::equal(copies_.begin(), copies_.end(), blocks.begin(), blocks.end(),
                          [](const copy& c, const moving_block& b) {
                              return c.of.part == b.part && c.of.size == b.size && c.of.alignment == b.alignment;
                          });
    }
    /// A block's data on the host.
    [[nodiscard]] void* copy_of(std::size_t block) const noexcept { return copies_[block].at; }
    /// How the tenant ended on its devices; if that isn't complete, close the old handle again.
    [[nodiscard]] const close_report& closed() const noexcept { return closed_; }

    /// Called by park_tenant().
    void set_spec(tenant_spec granted) noexcept { spec_ = std::move(granted); }
    /// Called by park_tenant().
    void set_closed(close_report how) noexcept { closed_ = std::move(how); }
    /// Called by park_tenant() and unpark_tenant(): a copy that doesn't end may still use the
    /// memory, so the memory is never freed.
    void leave_memory() noexcept { left_ = true; }
    /// Frees the data.
    void free() noexcept {
        for (const auto& c : std::exchange(copies_, {}))
            if (!left_) (void)host_->deallocate(c.at, c.of.size, c.of.alignment);
    }

private:
    struct copy {
        void* at;
        moving_block of;
    };

    Host* host_;
    tenant_spec spec_;
    std::vector<copy> copies_;
    close_report closed_{};
    bool left_ = false;
};

namespace detail {
template <class Tenant, memory_resource Host>
[[nodiscard]] parked_tenant<Host> park(Tenant& from, std::span<moving_block> blocks, Host& host, instant deadline,
                                       ns patience) {
    check_blocks(from, blocks, "park");
    parked_tenant<Host> parked(host, blocks);
    const auto before = run_out(from, deadline, "park");
    tenant_copies copies(from, patience);
    copies.run(
        blocks, [&](std::size_t i) { return parked.copy_of(i); }, [&](std::size_t i) { return blocks[i].at; },
        {deadline, "park, copying"}, [&] { parked.leave_memory(); });
    expect_idle_since(from, before + copies.count(), "park, beside submissions");
    parked.set_spec(from.spec());  // queued work may have resized the tenant
    for (auto& b : blocks) {       // nothing may fail from here on
        leave_block(from, b);
        b.at = nullptr;
    }
    parked.set_closed(close_left(from, deadline));
    return parked;
}
}  // namespace detail

/// Copies `blocks` of a tenant to the host and closes the tenant, all or nothing. Its other memory
/// ends with it. Queued work runs first, and the tenant's threads must have stopped, as for
/// move_tenant(). Throws what an allocation of `host` throws; operation_error: deadline_exceeded,
/// the code with which the work or a copy failed, in_flight, unknown_block, closed. After an error
/// the tenant is where it was, and the host has its memory back, except the memory of copies that
/// still run ten seconds after the deadline: that memory is never freed.
template <node Node, compute_policy Policy, memory_resource Host>
requires copier<typename Node::stream>
[[nodiscard]] parked_tenant<Host> park_tenant(tenant<Node, Policy>& from, std::span<moving_block> blocks, Host& host,
                                              instant deadline = never) {
    return detail::park(from, blocks, host, deadline, detail::copy_patience);
}
/// The same, with the reason instead of an exception. Exceptions other than the library's errors,
/// such as std::bad_alloc, are still thrown.
template <node Node, compute_policy Policy, memory_resource Host>
requires copier<typename Node::stream>
[[nodiscard]] result<parked_tenant<Host>> try_park_tenant(tenant<Node, Policy>& from, std::span<moving_block> blocks,
                                                          Host& host, instant deadline = never) {
    return detail::or_why([&] { return park_tenant(from, blocks, host, deadline); });
}

namespace detail {
template <class Tenancy, memory_resource Host>
[[nodiscard]] auto unpark(Tenancy& shared, parked_tenant<Host>& parked, std::vector<device_id> to,
                          std::span<moving_block> blocks, instant deadline, ns patience) {
    tenant_spec spec = parked.spec();
    if (!parked.has(blocks))
        raise({errc::invalid_specification, blocks.size(), 0, parked.blocks(), reason::wrong_blocks}, spec.name,
              "unpark");
    if (!to.empty() && to.size() != spec.devices)
        raise({errc::invalid_specification, to.size(), 0, spec.devices, reason::wrong_count}, spec.name,
              "unpark, devices to go to");
    spec.on = std::move(to);
    spec.slice = any_slice;
    auto back = shared.admit(std::move(spec));
    new_places places(back, blocks);
    tenant_copies copies(back, patience);
    copies.run(
        blocks, [&](std::size_t i) { return places.of(i); }, [&](std::size_t i) { return parked.copy_of(i); },
        {deadline, "unpark, copying"}, [&] { parked.leave_memory(); });
    for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i].at = places.of(i);
    places.keep();
    parked.free();
    return back;
}
}  // namespace detail

/// Admits a parked tenant and copies its data back, all or nothing. The tenant goes to the devices
/// `to` or, if there are none, to devices that the tenancy chooses. `blocks` are the blocks with
/// which it was parked; their `at` is set. Afterwards `parked` has no data. Throws what
/// tenancy::admit and an allocation throw; operation_error: deadline_exceeded, the code with which
/// a copy failed, invalid_specification (other blocks, another number of devices). After an error
/// the tenant is still parked. If a copy still runs ten seconds after the deadline, the host's
/// memory is never freed.
template <node Node, compute_policy Policy, memory_resource Host>
requires copier<typename Node::stream>
[[nodiscard]] tenant<Node, Policy> unpark_tenant(tenancy<Node, Policy>& shared, parked_tenant<Host>& parked,
                                                 std::vector<device_id> to, std::span<moving_block> blocks,
                                                 instant deadline = never) {
    return detail::unpark(shared, parked, std::move(to), blocks, deadline, detail::copy_patience);
}
/// The same, with the reason instead of an exception. Throws std::bad_alloc if the host has no
/// memory.
template <node Node, compute_policy Policy, memory_resource Host>
requires copier<typename Node::stream>
[[nodiscard]] result<tenant<Node, Policy>> try_unpark_tenant(tenancy<Node, Policy>& shared, parked_tenant<Host>& parked,
                                                             std::vector<device_id> to, std::span<moving_block> blocks,
                                                             instant deadline = never) {
    return detail::or_why([&] { return unpark_tenant(shared, parked, std::move(to), blocks, deadline); });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
