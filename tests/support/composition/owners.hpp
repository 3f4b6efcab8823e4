// SPDX-License-Identifier: Apache-2.0
// Whose memory the stacks of the composition matrix stand on: a quota, a leaf of a tree of quotas, a tenant. Each has `granted`
// blocks, and a neighbour on the device that is promised half of it.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_hook.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/tenant/detail/device_overhead.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/workspace.hpp>
#include <gpushare/units.hpp>

#include "support/composition/any_upstream.hpp"
#include "support/composition/stacks.hpp"

namespace support::composition {

/// What a device has, and what of it the neighbour is promised; a few are nobody's.
inline constexpr std::size_t on_device = 24, promised_to_neighbour = 12;

class owner {
public:
    owner() = default;
    owner(const owner&) = delete;
    owner& operator=(const owner&) = delete;
    virtual ~owner() = default;

    [[nodiscard]] virtual gpushare::quota& limit() = 0;
    [[nodiscard]] virtual any_upstream& memory() = 0;
    [[nodiscard]] virtual any_upstream& neighbour() = 0;
    [[nodiscard]] virtual gpushare::quota& neighbours_limit() = 0;
    /// Asks for more than can be there while one block is out: null, always.
    [[nodiscard]] virtual void* ask_too_much() noexcept { return memory().try_allocate(granted * unit, 256, nullptr); }
    /// A block that a library took of the device is charged here. Throws memory_error.
    [[nodiscard]] virtual gpushare::workspace declare() = 0;
    /// True if all is back.
    virtual bool close(gpushare::instant deadline) = 0;
    /// To so many blocks.
    [[nodiscard]] virtual bool resize(std::size_t blocks) = 0;
    /// Kept by its own memory, in no block.
    [[nodiscard]] virtual bytes idle() { return {}; }
    /// What the device lacks of what is promised on it, by a new measurement.
    [[nodiscard]] virtual bytes overpromised() { return {}; }
    /// What could still be promised, by the last one.
    [[nodiscard]] virtual bytes left_to_promise() { return {}; }
};

/// As a tenant does it.
inline gpushare::workspace declared(gpushare::quota& limit, gpushare::detail::device_overhead& on) {
    errc why = limit.try_charge(bytes{unit});
    for (gpushare::detail::hook_cursor asked; why != errc::none && limit.ask_next(asked, bytes{unit});)
        why = limit.try_charge(bytes{unit});
    if (why != errc::none) gpushare::raise(limit.explain(why, bytes{unit}), {}, "declare a workspace");
    return {limit, on, bytes{unit}};
}

/// Of the device's memory, or of the host's, which is pinned and has quotas of its own.
template <class Backend, class Memory = typename Backend::memory_type>
class quota_owner : public owner {
    using resource = gpushare::quota_resource<Memory>;

public:
    quota_owner(Backend& on, Memory& memory)
        : overhead_(on.memory()), mine_(of_mine_, memory, "mine"), theirs_(of_theirs_, memory, "theirs") {}
    gpushare::quota& limit() override { return of_mine_; }
    any_upstream& memory() override { return erased_mine_; }
    any_upstream& neighbour() override { return erased_theirs_; }
    gpushare::quota& neighbours_limit() override { return of_theirs_; }
    gpushare::workspace declare() override { return declared(of_mine_, overhead_); }
    bool close(gpushare::instant deadline) override { return of_mine_.close(deadline); }
    bool resize(std::size_t n) override { return of_mine_.resize(blocks(n), {}) == errc::none; }

private:
    gpushare::detail::device_overhead overhead_;
    gpushare::quota all_{blocks(on_device)};
    gpushare::quota of_mine_{all_, blocks(granted)}, of_theirs_{all_, blocks(promised_to_neighbour)};
    resource mine_, theirs_;
    upstream_of<resource> erased_mine_{mine_}, erased_theirs_{theirs_};
};

/// Half of what is granted is borrowed from a team, of which a rival would have all.
template <class Backend>
class tree_owner : public owner {
    using resource = gpushare::quota_resource<typename Backend::memory_type>;

public:
    explicit tree_owner(Backend& on)
        : overhead_(on.memory()),
          mine_(of_mine_, on.memory(), "mine"),
          rival_(of_rival_, on.memory(), "rival"),
          theirs_(of_theirs_, on.memory(), "theirs") {}
    gpushare::quota& limit() override { return of_mine_; }
    any_upstream& memory() override { return erased_mine_; }
    any_upstream& neighbour() override { return erased_theirs_; }
    gpushare::quota& neighbours_limit() override { return of_theirs_; }
    void* ask_too_much() noexcept override {
        if (void* const p = rival_.try_allocate((granted / 2 + 1) * unit, 256)) return p;
        return owner::ask_too_much();
    }
    gpushare::workspace declare() override { return declared(of_mine_, overhead_); }
    bool close(gpushare::instant deadline) override { return of_mine_.close(deadline); }
    bool resize(std::size_t n) override {
        const bytes burst = n > granted / 2 ? blocks(n - granted / 2) : bytes{};
        const bool first = n < granted || team_.resize(blocks(n), {}) == errc::none;  // what is lent is there before
        return first && of_mine_.resize(blocks(granted / 2), burst) == errc::none;
    }

private:
    gpushare::detail::device_overhead overhead_;
    gpushare::quota all_{blocks(on_device)};
    gpushare::quota team_{all_, blocks(granted)}, of_theirs_{all_, blocks(promised_to_neighbour)};
    gpushare::quota of_mine_{team_, blocks(granted / 2), blocks(granted / 2)}, of_rival_{team_, {}, blocks(granted)};
    resource mine_, rival_, theirs_;
    upstream_of<resource> erased_mine_{mine_}, erased_theirs_{theirs_};
};

template <class Backend>
class tenant_owner : public owner {
    using tenancy = gpushare::tenancy<typename Backend::node_type>;
    using memory_type = typename tenancy::tenant::memory_type;

public:
    tenant_owner(Backend& on, gpushare::memory_stack made_of)
        : shared_(on.node(), {.stack = made_of}),
          mine_(shared_.admit({.name = "mine", .memory = blocks(granted), .compute = half})),
          theirs_(shared_.admit({.name = "theirs", .memory = blocks(promised_to_neighbour), .compute = half})) {}
    gpushare::quota& limit() override { return memory_.limit(); }
    any_upstream& memory() override { return erased_mine_; }
    any_upstream& neighbour() override { return erased_theirs_; }
    gpushare::quota& neighbours_limit() override { return theirs_.memory().limit(); }
    gpushare::workspace declare() override { return mine_.declare_workspace(bytes{unit}); }
    bool close(gpushare::instant deadline) override { return mine_.close(deadline).complete; }
    bool resize(std::size_t n) override try {
        mine_.resize({.memory = blocks(n)});
        return true;
    } catch (const gpushare::error&) {
        return false;
    }
    bytes idle() override { return memory_.idle(); }
    bytes overpromised() override { return shared_.remeasure(); }
    bytes left_to_promise() override { return shared_.rooms()[0].free; }

private:
    static constexpr gpushare::share half = gpushare::share::of_permille(500);
    tenancy shared_;
    typename tenancy::tenant mine_, theirs_;
    memory_type& memory_ = mine_.memory();
    upstream_of<memory_type> erased_mine_{memory_}, erased_theirs_{theirs_.memory()};
};

}  // namespace support::composition
