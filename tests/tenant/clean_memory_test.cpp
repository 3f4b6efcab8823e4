// SPDX-License-Identifier: Apache-2.0
// Memory that is overwritten between tenants, with failures and with tenants that don't need it: no
// tenant finds another tenant's data, and no fill writes into a block that has another owner by
// then. Also tenants that close while threads wait.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/tenant/detail/scrub_stream.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/tenant_memory.hpp>

#include "support/catch.hpp"
#include "support/manual_scrubber.hpp"
#include "support/waiting.hpp"

namespace clean_memory_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::memory_stack;
using gpushare::never;
using gpushare::quota;
using gpushare::scrub_policy;

namespace host = gpushare::host;
using tenancy = gpushare::tenancy<host::node>;

namespace {

constexpr std::size_t mib = 1 << 20;

/// A deadline that no test reaches.
gpushare::instant soon() { return host::steady_clock::now() + 5min; }
host::node_options stale_node() {
    return {.devices = 1, .memory = 64_MiB, .sms = 1, .timing = host::timing::modelled, .stale = true};
}
bool holds(const void* p, std::size_t size, unsigned char value) {
    const auto* const all = static_cast<const unsigned char*>(p);
    return std::all_of(all, all + size, [&](unsigned char c) { return c == value; });
}

/// A scrubber of the test's by its address.
struct scrubber_ref {
    using point = support::manual_point;
    support::manual_scrubber* to;
    const bool* no_points = nullptr;  // true: it gives none; else all are reached at once

    void fill(void* p, std::byte value, std::size_t size) { to->fill(p, value, size); }
    void wait(const point& p) { to->wait(p); }
    [[nodiscard]] point record() {
        if (no_points != nullptr && *no_points) throw std::runtime_error("the test lets record() fail");
        auto p = to->record();
        while (no_points != nullptr && to->reach_next()) {
        }
        return p;
    }
};

}  // namespace

TEST_CASE("a tenant that doesn't ask for clean memory finds no data of a neighbour that does", "[tenant][scrub]") {
    const auto stack = GENERATE(memory_stack::direct, memory_stack::pool);
    const auto usual = GENERATE(scrub_policy::on_hand_over, scrub_policy::off);
    CAPTURE(stack, usual);
    host::node n(stale_node());
    tenancy shared(n, {.stack = stack, .scrub = usual});
    const auto of = [&](const char* name, scrub_policy scrub) {
        return shared.admit({.name = name, .memory = 16_MiB, .compute = 10_pct, .scrub = scrub});
    };
    {
        auto careless = of("careless", scrub_policy::off);
        void* const p = careless.memory().allocate(mib);
        CHECK(holds(p, mib, 0xA5));  // what a device holds at first: nobody has been here who minds
        CHECK(careless.memory().deallocate(p, mib) == errc::none);
        CHECK(careless.usage().scrubbed == 0_B);
    }
    {
        auto careful = of("careful", scrub_policy::on_hand_over);
        void* const p = careful.memory().allocate(16 * mib);
        CHECK(holds(p, 16 * mib, 0));
        std::memset(p, 0x77, 16 * mib);
        CHECK(careful.close(soon()).complete);
    }
    auto careless = of("careless", scrub_policy::off);
    for (int i = 0; i < 2; ++i) {
        void* const p = careless.memory().allocate(16 * mib);
        CHECK(holds(p, 16 * mib, 0));
        CHECK(careless.memory().deallocate(p, 16 * mib) == errc::none);
    }
}

TEST_CASE("a fill is never lost sight of, though its point can't be had at once", "[tenant][scrub]") {
    support::manual_scrubber device;
    gpushare::detail::scrub_stream<scrubber_ref> zeros{[&] { return scrubber_ref{&device}; }};
    int block = 7;
    device.fail_next_record();
    const auto done = zeros.fill(nullptr, &block, sizeof block);
    CHECK_FALSE(done.reached());
    CHECK(block == 7);
    CHECK(device.reach_next());
    CHECK(done.reached());
    CHECK(block == 0);
    device.fail_next_fill();
    CHECK_THROWS_AS((void)zeros.fill(nullptr, &block, sizeof block), std::runtime_error);
    CHECK_FALSE(device.reach_next());  // nothing was enqueued
}

TEST_CASE("without a point a fill is given up soon, and its block goes to no tenant until there is one",
          "[tenant][scrub]") {
    const auto stack = GENERATE(memory_stack::direct, memory_stack::pool);
    const auto scrub = GENERATE(scrub_policy::on_hand_over, scrub_policy::on_free);
    host::device_memory device{{.capacity = 64_MiB, .stale = true}};
    support::manual_scrubber scrubber;
    bool no_points = false;
    gpushare::detail::scrub_stream<scrubber_ref> zeros{[&] { return scrubber_ref{&scrubber, &no_points}; }};
    const auto code_of_fill = [&](void* p) {
        try {
            (void)zeros.fill(nullptr, p, 4096);
            return errc::none;
        } catch (const gpushare::error& e) {
            return e.code();
        }
    };
    quota all{64_MiB};
    const gpushare::event_sink nobody;
    {
        gpushare::tenant_memory<host::device_memory, support::manual_point> mine(
            all, device, "a", gpushare::device_id{0}, 16_MiB, 0_B, nobody,
            {.stack = stack, .scrub = scrub, .fill = [&](auto* after, void* p, std::size_t size) {
                 return zeros.fill(after, p, size);
             }});
        void* const p = mine.allocate(4096);
        const bytes used = device.used();
        no_points = true;
        if (scrub == scrub_policy::on_free) {
            CHECK(mine.deallocate(p, 4096) == errc::submission_failed);
            CHECK(mine.deallocate_after({}, p, 4096) == errc::submission_failed);
            CHECK(mine.counts().frees == 0);
            mine.close();
            gpushare::close_report report;
            CHECK_FALSE(mine.take_back(report, support::within(1ms)));
            CHECK(report.leaked_blocks == 0);
        } else {
            CHECK(mine.try_allocate(8 * mib) == nullptr);
            CHECK(device.used() > used);  // one that a fill may reach into
        }
        const auto filled = scrubber.filled();
        CHECK(code_of_fill(p) == errc::submission_failed);
        CHECK(scrubber.filled() == filled);
        no_points = false;
        if (scrub == scrub_policy::on_hand_over) {
            void* const q = mine.allocate(8 * mib);
            CHECK(holds(q, 8 * mib, 0));
            CHECK(mine.deallocate(q, 8 * mib) == errc::none);
            mine.close();
        }
        gpushare::close_report report;
        CHECK(mine.take_back(report, support::forever()));
        CHECK(report.leaked_blocks == 1);
        CHECK(mine.drain(never));
        CHECK(all.usage().current == 0_B);
        CHECK(device.used() == 0_B);
        int other[1024] = {7};
        no_points = true;
        CHECK(code_of_fill(other) == errc::in_flight);
        no_points = false;
        CHECK(code_of_fill(other) == errc::none);
        while (scrubber.reach_next()) {
        }
    }
}

TEST_CASE("fills on another stream come after one without a point on the stream before", "[tenant][scrub][move]") {
    struct refusing_ref : scrubber_ref {
        [[nodiscard]] point record() {
            if (*no_points) throw std::runtime_error("the test lets record() fail");
            return to->record();
        }
    };
    support::manual_scrubber before, after;
    bool no_points = true;
    gpushare::detail::scrub_stream<refusing_ref> zeros{[&] { return refusing_ref{{&before, &no_points}}; }};
    int block = 7;
    CHECK_THROWS_AS((void)zeros.fill(nullptr, &block, sizeof block), gpushare::operation_error);
    zeros.made_by([&] { return refusing_ref{{&after, &no_points}}; });
    CHECK_THROWS_AS((void)zeros.fill(nullptr, &block, sizeof block), gpushare::operation_error);
    no_points = false;
    (void)zeros.fill(nullptr, &block, sizeof block);
    REQUIRE(after.awaited().size() == 1);
    CHECK_FALSE(after.awaited().front().reached());
    CHECK(before.reach_next());
    CHECK(after.awaited().front().reached());
    (void)zeros.fill(nullptr, &block, sizeof block);
    CHECK(after.awaited().size() == 1);
}

TEST_CASE("a close waits for every fill, though a later one can't be enqueued", "[tenant][scrub][close]") {
    const auto stack = GENERATE(memory_stack::direct, memory_stack::pool);
    host::device_memory device{{.capacity = 64_MiB}};
    support::manual_scrubber scrubber;
    gpushare::detail::scrub_stream<scrubber_ref> zeros{[&] { return scrubber_ref{&scrubber}; }};
    int fills_left = 0;
    quota all{64_MiB};
    const gpushare::event_sink nobody;
    {
        using memory = gpushare::tenant_memory<host::device_memory, support::manual_point>;
        memory mine(
            all, device, "a", gpushare::device_id{0}, 16_MiB, 0_B, nobody,
            {.stack = stack, .scrub = scrub_policy::on_free, .fill = [&](auto* after, void* p, std::size_t size) {
                 if (fills_left-- == 0) throw std::runtime_error("the test lets it fail");
                 return zeros.fill(after, p, size);
             }});
        scrubber.by_itself();
        fills_left = 100;
        void* const p = mine.allocate(4096);
        void* const q = mine.allocate(4096);
        REQUIRE((p != nullptr && q != nullptr));
        std::memset(p, 0x77, 4096);
        std::memset(q, 0x77, 4096);
        fills_left = 1;  // of the first of the two that are taken back
        mine.close();
        gpushare::close_report report;
        CHECK(mine.take_back(report, support::forever()));
        CHECK(report.leaked_blocks == 2);
        CHECK(mine.drain(soon()));
        CHECK(all.usage().current == 0_B);
    }
    CHECK_FALSE(scrubber.reach_next());  // none is under way in memory that has gone back
    CHECK(device.used() == 0_B);
}

TEST_CASE("a close for ever is complete though threads wait and have been granted what they wait for",
          "[tenant][close][waiters][threads]") {
    const auto stack = GENERATE(memory_stack::direct, memory_stack::pool);
    host::node n({.devices = 1, .memory = 64_MiB, .sms = 1, .timing = host::timing::modelled});
    tenancy shared(n, {.stack = stack});
    int incomplete = 0;
    for (int round = 0; round < 50; ++round) {
        auto a = shared.admit({.name = "a", .memory = 16_MiB, .compute = 10_pct});
        auto& memory = a.memory();
        void* const all = memory.allocate(16 * mib);
        std::vector<std::jthread> waiting;
        for (int i = 0; i < 2; ++i)
            waiting.emplace_back([&] {
                try {
                    void* const p = memory.allocate(12 * mib, support::forever());
                    (void)memory.deallocate(p, 12 * mib);
                } catch (const gpushare::memory_error&) {  // closed
                }
            });
        support::wait_for_line(memory.limit(), 2);
        (void)memory.deallocate(all, 16 * mib);
        incomplete += a.close(never).complete ? 0 : 1;
    }
    CHECK(incomplete == 0);
}

TEST_CASE("a pool's idle memory is handed out to waiting threads before the pool grows", "[tenant][pool]") {
    constexpr std::size_t size = 64 << 10;
    const gpushare::event_sink nobody;
    // Without a number: counts how many blocks fit into the first segment. With it: fills that, and
    // looks at the last one.
    const auto fill = [&](std::size_t in_segment) {
        host::device_memory device{{.capacity = 256_MiB}};
        quota all{256_MiB};
        using memory = gpushare::tenant_memory<host::device_memory, gpushare::immediate_point>;
        gpushare::tenant_memory_options<gpushare::immediate_point> options;
        options.scrub = scrub_policy::off;
        memory mine(all, device, "a", gpushare::device_id{0}, 128_MiB, 64_MiB, nobody, options);
        std::vector<void*> blocks{mine.allocate(size)};
        const bytes first = device.used();
        while (in_segment != 0 ? blocks.size() < in_segment : device.used() == first)
            blocks.push_back(mine.allocate(size));
        if (in_segment != 0) {
            void* const kept = blocks.back();
            CHECK(mine.deallocate(kept, size) == errc::none);
            const gpushare::quota_pressure waits{all};
            blocks.back() = mine.allocate(size);
            CHECK(blocks.back() == kept);
            CHECK(device.used() == first);
        }
        for (void* const p : blocks) CHECK(mine.deallocate(p, size) == errc::none);
        return blocks.size() - 1;
    };
    const auto in_segment = fill(0);
    REQUIRE(in_segment > 0);
    (void)fill(in_segment);
}

}  // namespace clean_memory_test
