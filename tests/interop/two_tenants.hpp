// SPDX-License-Identifier: Apache-2.0
// Two tenants of 8 MiB on a host device, a stream that a test can hold, and what was reported.
//
//   two_tenants f;    f.hold();    f.chat.memory().deallocate_after(f.stream.record(), p, 100);    f.let_go();
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "host/gate.hpp"
#include "support/catch.hpp"

struct two_tenants {
    using node_type = gpushare::host::node;
    using tenancy = gpushare::tenancy<node_type>;
    using memory = gpushare::tenant_memory<node_type::memory_type, node_type::stream::point>;

    static constexpr std::size_t MiB = std::size_t{1} << 20;

    explicit two_tenants(gpushare::memory_stack made_of = gpushare::memory_stack::pool) : stack(made_of) {}

    /// Work is on the stream until let_go().
    void hold() {
        stream.launch({}, held.kernel());
        held.wait_inside(1);
    }
    void let_go() {
        held.open();
        CHECK(stream.record().wait(gpushare::never));
    }
    [[nodiscard]] std::vector<gpushare::errc> wrong_frees() const {
        const std::lock_guard lock(mutex);
        return reported;
    }
    /// Bytes of the tenant that aren't free, once what is reached is collected.
    static std::uint64_t charged(memory& m) {
        m.collect();
        return (m.capacity() - m.free()).count();
    }

    const gpushare::memory_stack stack;
    gate held;
    mutable std::mutex mutex;
    std::vector<gpushare::errc> reported;
    node_type node{{.devices = 2, .memory = gpushare::bytes{64 * MiB}, .sms = 2}};
    tenancy shared{node, {.events = [this](const gpushare::tenant_event& e) {
                       const std::lock_guard lock(mutex);
                       if (e.what == gpushare::tenant_event::kind::wrong_free) reported.push_back(e.code);
                   }}};
    tenancy::tenant chat = admit("chat"), batch = admit("batch");
    node_type::stream stream = node.make_stream({0});

private:
    tenancy::tenant admit(const char* name) {
        return shared.admit({.name = name,
                             .memory = gpushare::bytes{16 * MiB},
                             .devices = 2,
                             .compute = gpushare::share::of_permille(400),
                             .stack = stack});
    }
};
