// SPDX-License-Identifier: Apache-2.0
// Scratch memory that engines lease one after the other: one block, charged once, in stream order,
// and freed with its tenant.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/serving/leased_scratch.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/threads.hpp"

namespace leased_scratch_test {
namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using stream = gpushare::host::stream;

struct rig {
    gpushare::host::node node{{.devices = 1, .memory = 64_MiB, .sms = 2, .timing = gpushare::host::timing::modelled}};
    gpushare::tenancy<gpushare::host::node> shared{node, {.stack = gpushare::memory_stack::direct}};
    decltype(shared)::tenant chat = shared.admit({.name = "chat", .memory = 16_MiB, .compute = 50_pct, .streams = 2});
    gpushare::leased_scratch<decltype(chat)::memory_type, stream> scratch{chat.memory(), 8_MiB};

    [[nodiscard]] gpushare::bytes held() { return chat.usage().current; }
    stream& on(std::size_t n) { return chat.work_stream(0, n); }
};
void busy(stream& s, gpushare::ns length) {
    s.launch({.blocks = 1, .hold = length}, [](auto&) {});
}

}  // namespace

TEST_CASE("engines that never run together share one block, as large as the largest", "[serving]") {
    rig r;
    CHECK(r.held() == 0_B);
    void* first = nullptr;
    {
        auto a = r.scratch.lease(2_MiB, r.on(0));
        CHECK(a.size() == 2_MiB);
        first = a.data();
        REQUIRE(first != nullptr);
        CHECK(r.scratch.try_lease(1_MiB, r.on(0)).code() == errc::in_flight);
        CHECK_FALSE(r.scratch.trim());
    }
    CHECK(r.held() == 2_MiB);
    CHECK(r.scratch.lease(1_MiB, r.on(1)).data() == first);
    { auto b = r.scratch.lease(4_MiB, r.on(1)); }
    CHECK(r.held() == 4_MiB);
    CHECK(r.scratch.reserve(6_MiB).code == errc::none);
    CHECK(r.scratch.size() == 6_MiB);
    CHECK(r.held() == 6_MiB);
    CHECK(r.scratch.leases() == 3);
    CHECK(r.scratch.trim());
    CHECK(r.held() == 0_B);
}

TEST_CASE("scratch that is too large is refused, with figures, and the next lease goes", "[serving]") {
    rig r;
    const auto refused = r.scratch.try_lease(9_MiB, r.on(0));
    CHECK(refused.code() == errc::over_quota);
    CHECK(refused.why().asked == (9_MiB).count());
    CHECK(refused.why().limit == (8_MiB).count());
    CHECK(support::code_of([&] { (void)r.scratch.lease(9_MiB, r.on(0)); }) == errc::over_quota);
    void* const weights = r.chat.memory().allocate(12 << 20);
    CHECK(r.scratch.try_lease(5_MiB, r.on(0)).code() == errc::over_quota);  // the tenant's own limit
    CHECK(r.scratch.try_lease(4_MiB, r.on(0)));
    CHECK(r.chat.memory().deallocate(weights, 12 << 20) == errc::none);
}

TEST_CASE("work of the next lease comes behind that of the one before, on any stream", "[serving]") {
    rig r;
    REQUIRE(r.scratch.reserve(1_MiB).code == errc::none);
    for (int round = 0; round < 20; ++round) {
        std::atomic<int> inside{0};
        std::atomic<bool> together{false};
        for (std::size_t n = 0; n < 6; ++n) {
            auto& s = r.on(n % 2);
            auto room = r.scratch.lease(1_MiB, s);
            s.launch({}, [&](auto&) {
                if (++inside != 1) together = true;
            });
            busy(s, 50us);
            s.launch({}, [&](auto&) { --inside; });
        }
        CHECK(r.on(0).record().wait(gpushare::never));
        CHECK(r.on(1).record().wait(gpushare::never));
        CHECK_FALSE(together);
    }
    // A block that has to grow isn't freed under work.
    {
        auto room = r.scratch.lease(1_MiB, r.on(0));
        r.node.faults({0}).stall(r.on(0));
        busy(r.on(0), 1us);
    }
    CHECK(r.scratch.try_lease(2_MiB, r.on(1), r.chat.now()).code() == errc::deadline_exceeded);
    CHECK(r.scratch.size() == 1_MiB);
    r.node.faults({0}).resume(r.on(0));
    CHECK(r.scratch.try_lease(2_MiB, r.on(1)));
}

TEST_CASE("scratch of a tenant that closes is freed behind its work", "[serving]") {
    rig r;
    for (int n = 0; n < 3; ++n)
        r.chat.submit([&](auto& to) {
            auto room = r.scratch.lease(3_MiB, to);
            busy(to, 2ms);
        });
    const auto report = r.chat.close();
    CHECK(report.complete);
    CHECK(report.leaked_blocks == 0);
    CHECK(report.still_charged == 0_B);
    CHECK(r.scratch.size() == 0_B);
    stream other = r.node.make_stream({0}, {}, 7);
    CHECK(r.scratch.try_lease(1_MiB, other).code() == errc::closed);
}

TEST_CASE("a lease that outlasts a close is the last", "[serving]") {
    rig r;
    {
        auto room = r.scratch.lease(1_MiB, r.on(0));
        CHECK_FALSE(r.chat.close({}).complete);
    }
    stream other = r.node.make_stream({0}, {}, 7);
    CHECK(r.scratch.try_lease(1_MiB, other).code() == errc::closed);
    const auto report = r.chat.close();
    CHECK(report.complete);
    CHECK(report.still_charged == 0_B);
}

TEST_CASE("threads that lease at once get it one by one", "[serving]") {
    rig r;
    std::atomic<int> inside{0}, wrong{0}, got{0};
    support::together(4, [&](unsigned rank) {
        for (int i = 0; i < 200; ++i) {
            const auto mine = r.scratch.try_lease(gpushare::bytes{1ULL << (10 + i % 8)}, r.on(rank % 2));
            if (!mine) {
                if (mine.code() != errc::in_flight) ++wrong;
                continue;
            }
            if (++inside != 1) ++wrong;
            ++got;
            --inside;
        }
    });
    CHECK(wrong == 0);
    CHECK(got > 0);
    CHECK(r.held() == r.scratch.size());
}

}  // namespace leased_scratch_test
