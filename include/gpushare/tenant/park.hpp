// SPDX-License-Identifier: Apache-2.0
// Takes a live tenant off its devices with its data, and puts it on others later: two tenants that
// are to change places, one that has to make room for an urgent one. In between it has nothing but
// host memory: neither its name nor a promise.
//
//   auto parked = gpushare::park_tenant(chat, blocks, pinned, now + 5s);      // pinned: memory of the host, as a resource
//   auto urgent = shared.admit({.name = "urgent", .memory = 24_GiB});
//   chat = gpushare::unpark_tenant(shared, parked, {}, blocks);               // where there is room; blocks[i].at is new
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/tenant/detail/tenant_copies.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/tenant.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The data of a tenant that is on no device. Movable, one owner; frees it when it goes. `Host`
/// must outlive it, and is reached by the devices' copies: pinned, for speed.
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
          closed_(std::move(other.closed_)) {}
    parked_tenant& operator=(parked_tenant&&) = delete;
    ~parked_tenant() { free(); }

    /// As it was granted, with the devices where it was.
    [[nodiscard]] const tenant_spec& spec() const noexcept { return spec_; }
    /// The size of its data, bytes.
    [[nodiscard]] bytes size() const noexcept {
        bytes all;
        for (const auto& c : copies_) all += bytes{c.of.size};
        return all;
    }
    /// How many blocks it has.
    [[nodiscard]] std::size_t blocks() const noexcept { return copies_.size(); }
    /// Whether they are these, wherever they are.
    [[nodiscard]] bool has(std::span<const moving_block> blocks) const noexcept {
        return std::equal(copies_.begin(), copies_.end(), blocks.begin(), blocks.end(),
                          [](const copy& c, const moving_block& b) {
                              return c.of.part == b.part && c.of.size == b.size && c.of.alignment == b.alignment;
                          });
    }
    /// One of them, on the host.
    [[nodiscard]] void* copy_of(std::size_t block) const noexcept { return copies_[block].at; }
    /// How it ended on its devices; if that isn't complete, close the old handle again.
    [[nodiscard]] const close_report& closed() const noexcept { return closed_; }

    /// Called by park_tenant().
    void set_spec(tenant_spec granted) noexcept { spec_ = std::move(granted); }
    /// Called by park_tenant().
    void set_closed(close_report how) noexcept { closed_ = std::move(how); }
    /// Its data isn't needed any more.
    void free() noexcept {
        for (const auto& c : std::exchange(copies_, {})) (void)host_->deallocate(c.at, c.of.size, c.of.alignment);
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
};

/// Copies `blocks` of a tenant to the host and closes it, all or nothing; its other memory ends
/// there. Queued work runs first, and its threads must have stopped, as for move_tenant(). Throws
/// what an allocation of `host` throws; operation_error: deadline_exceeded, the code with which the
/// work or a copy failed, in_flight, unknown_block, closed. Then the tenant is where it was.
template <node Node, compute_policy Policy, memory_resource Host>
requires copier<typename Node::stream>
[[nodiscard]] parked_tenant<Host> park_tenant(tenant<Node, Policy>& from, std::span<moving_block> blocks, Host& host,
                                              instant deadline = never) {
    detail::check_blocks(from, blocks, "park");
    parked_tenant<Host> parked(host, blocks);
    const auto before = detail::run_out(from, deadline, "park");
    detail::tenant_copies copies(from);
    copies.submit(
        blocks, [&](std::size_t i) { return parked.copy_of(i); }, [&](std::size_t i) { return blocks[i].at; });
    copies.wait(deadline, "park, copying");
    detail::expect_idle_since(from, before + copies.count(), "park, beside submissions");
    parked.set_spec(from.spec());  // what was queued may have resized it
    for (auto& b : blocks) {       // nothing may fail any more
        detail::leave_block(from, b);
        b.at = nullptr;
    }
    parked.set_closed(detail::close_left(from, deadline));
    return parked;
}
/// The same, with the reason instead of an exception; but what isn't an error of the library's, as
/// std::bad_alloc, is thrown.
template <node Node, compute_policy Policy, memory_resource Host>
requires copier<typename Node::stream>
[[nodiscard]] result<parked_tenant<Host>> try_park_tenant(tenant<Node, Policy>& from, std::span<moving_block> blocks,
                                                          Host& host, instant deadline = never) {
    return detail::or_why([&] { return park_tenant(from, blocks, host, deadline); });
}

/// Admits a parked tenant and copies its data back, all or nothing. It goes to the devices `to` or,
/// if there are none, to devices that the tenancy chooses. `blocks` are the blocks with which it
/// was parked; their `at` is set. Then `parked` has no data any more. Throws what tenancy::admit
/// and an allocation throw; operation_error: deadline_exceeded, the code with which a copy failed,
/// invalid_specification (other blocks, another number of devices). Then it is still parked.
template <node Node, compute_policy Policy, memory_resource Host>
requires copier<typename Node::stream>
[[nodiscard]] tenant<Node, Policy> unpark_tenant(tenancy<Node, Policy>& shared, parked_tenant<Host>& parked,
                                                 std::vector<device_id> to, std::span<moving_block> blocks,
                                                 instant deadline = never) {
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
    detail::new_places places(back, blocks);
    detail::tenant_copies copies(back);
    copies.submit(
        blocks, [&](std::size_t i) { return places.of(i); }, [&](std::size_t i) { return parked.copy_of(i); });
    copies.wait(deadline, "unpark, copying");
    for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i].at = places.of(i);
    places.keep();
    parked.free();
    return back;
}
/// The same, with the reason instead of an exception; but std::bad_alloc where the host has no memory.
template <node Node, compute_policy Policy, memory_resource Host>
requires copier<typename Node::stream>
[[nodiscard]] result<tenant<Node, Policy>> try_unpark_tenant(tenancy<Node, Policy>& shared, parked_tenant<Host>& parked,
                                                             std::vector<device_id> to, std::span<moving_block> blocks,
                                                             instant deadline = never) {
    return detail::or_why([&] { return unpark_tenant(shared, parked, std::move(to), blocks, deadline); });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
