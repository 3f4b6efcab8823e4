// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Tenants on a host that runs out of memory: each call is made as often as it allocates, and
// another allocation fails each time.
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/tenant/limited_scrubber.hpp>
#include <gpushare/tenant/move.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/failing_new.hpp"
#include "support/host_tenants.hpp"
#include "support/manual_scrubber.hpp"
#include "support/manual_timeline.hpp"

namespace no_host_memory_test {

using namespace support::host_tenants;

namespace {

/// Calls `call` until it makes no more allocations than have succeeded before. Calls
/// `look(thrown)` after each failure. `recovers`: one allocation fails, and not all later ones.
template <class F, class Look>
void with_each_failure(bool recovers, F call, Look look) {
    for (std::size_t n = 0;; ++n) {
        bool thrown = false;
        support::this_heap = {.good = n, .recovers = recovers};
        try {
            call();
        } catch (...) {
            thrown = true;
        }
        const bool failed = support::this_heap.failed;
        support::this_heap = {};
        CAPTURE(n, recovers, thrown);
        if (!failed) {
            CHECK_FALSE(thrown);
            return;
        }
        look(thrown);
    }
}

/// What a tenancy has promised.
struct promises {
    std::vector<std::uint64_t> left;

    explicit promises(const tenancy& of) {
        for (const auto& room : of.rooms()) {
            left.push_back(room.free.count());
            left.push_back(of.unpromised(room.device).permille());
        }
    }
    friend bool operator==(const promises&, const promises&) = default;
};

/// The same once the tenants are gone that couldn't be closed before: an admission sees to it.
promises rest(tenancy& of) {
    CHECK(of.admit({.name = "next", .memory = 1_MiB, .compute = 1_pct}).close(soon()).complete);
    return promises(of);
}

/// Counts its bytes.
class counted_host final : public std::pmr::memory_resource {
public:
    std::size_t out = 0;

private:
    void* do_allocate(std::size_t size, std::size_t alignment) override {
        void* const p = std::pmr::new_delete_resource()->allocate(size, alignment);
        out += size;
        return p;
    }
    void do_deallocate(void* p, std::size_t size, std::size_t alignment) override {
        out -= size;
        std::pmr::new_delete_resource()->deallocate(p, size, alignment);
    }
    [[nodiscard]] bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

/// Refuses one change of a client, or throws for lack of memory. From then on the thread has no
/// host memory.
struct refusing {
    struct notes {
        std::size_t good = SIZE_MAX;  // how many further changes it takes
        bool throws = false;
        std::array<gpushare::priority, 2> levels{};  // as told last, by the client's index
    };
    notes* seen = nullptr;
    gpushare::weighted_fair inside{};

    gpushare::failure add(gpushare::client_id c, const gpushare::client_settings& s) { return inside.add(c, s); }
    gpushare::failure change(gpushare::client_id c, const gpushare::client_settings& s) {
        if (seen->good-- == 0) {
            support::this_heap = {.good = 0};
            if (seen->throws) throw std::bad_alloc();
            return {errc::share_exceeded};
        }
        seen->levels[c.index] = s.level;
        return inside.change(c, s);
    }
    void remove(gpushare::client_id c) noexcept { inside.remove(c); }
    void wake(gpushare::client_id c, const gpushare::queue_head& head, gpushare::instant now) noexcept {
        inside.wake(c, head, now);
    }
    void sleep(gpushare::client_id c) noexcept { inside.sleep(c); }
    [[nodiscard]] gpushare::choice pick(gpushare::instant now) noexcept { return inside.pick(now); }
    void serve(gpushare::client_id c, gpushare::ns cost, gpushare::instant now) noexcept { inside.serve(c, cost, now); }
    void correct(gpushare::client_id c, gpushare::ns delta) noexcept { inside.correct(c, delta); }
};
static_assert(gpushare::compute_policy<refusing>);

errc submits(tenancy::tenant& t) {
    const auto ticket = t.try_submit([](auto&) {});
    if (!ticket) return ticket.code();
    return ticket->wait(soon()) ? ticket->status() : errc::deadline_exceeded;
}

}  // namespace

TEST_CASE("a tenant that can't fall asleep for lack of host memory is awake", "[tenant][sleep]") {
    const bool recovers = GENERATE(true, false);
    node n(modelled(2));
    tenancy shared(n);
    auto t = shared.admit({.name = "t", .memory = 32_MiB, .compute = 40_pct, .lends_asleep = true});
    REQUIRE(submits(t) == errc::none);
    bool sleeps = false;
    with_each_failure(
        recovers,
        [&] {
            sleeps = false;
            sleeps = t.sleep(soon(), {}, gpushare::while_asleep::refuse);
        },
        [&](bool thrown) {
            CHECK(sleeps != thrown);
            CHECK(submits(t) == (sleeps ? errc::asleep : errc::none));
            if (sleeps) t.wake(soon());
        });
    CHECK(sleeps);
    with_each_failure(
        recovers, [&] { t.wake(soon()); },
        [&](bool thrown) {
            CHECK(submits(t) == (thrown ? errc::asleep : errc::none));
            if (!thrown) CHECK(t.sleep(soon(), {}, gpushare::while_asleep::refuse));
        });
    CHECK(submits(t) == errc::none);
}

TEST_CASE("a call for a part that a tenant hasn't is refused without host memory", "[tenant]") {
    node n(modelled(2));
    tenancy shared(n);
    auto t = shared.admit({.name = "a tenant with a name that needs memory of its own", .memory = 8_MiB});
    const auto before = support::this_heap.allocations;
    const std::array refused{t.try_submit([](auto&) {}, 1).why(), t.acquire(1).why(),
                             t.try_declare_workspace(1_MiB, 1).why()};
    const auto after = support::this_heap.allocations;
    CHECK(after == before);
    for (const auto& why : refused) {
        CHECK(why.code == errc::no_device);
        CHECK(why.asked == 1);
        CHECK(why.limit == 1);
    }
}

TEST_CASE("an admission that lacks host memory takes nothing", "[tenant][admission]") {
    const bool recovers = GENERATE(true, false);
    node n(modelled(2));
    tenancy shared(n);
    const auto beside = shared.admit({.name = "beside", .memory = 8_MiB, .compute = 10_pct});
    const promises before(shared);
    const tenant_spec wanted{.name = "a tenant with a name that needs memory of its own",
                             .memory = 16_MiB,
                             .devices = 2,
                             .compute = 20_pct,
                             .burst = 4_MiB,
                             .streams = 2};
    std::optional<tenancy::tenant> t;
    with_each_failure(
        recovers, [&] { t.emplace(shared.admit(wanted)); },
        [&](bool thrown) {
            CHECK(t.has_value() != thrown);
            t.reset();
            CHECK(rest(shared) == before);
        });
    REQUIRE(t);
    CHECK(submits(*t) == errc::none);
}

TEST_CASE("a resize that lacks host memory changes nothing", "[tenant][resize]") {
    const bool recovers = GENERATE(true, false);
    node n(modelled(2));
    tenancy shared(n);
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .devices = 2, .compute = 20_pct});
    auto b = shared.admit({.name = "b", .memory = 16_MiB, .devices = 2, .compute = 20_pct});
    const gpushare::tenant_change more{.memory = 24_MiB, .compute = 30_pct, .level = gpushare::priority{2}};
    const gpushare::tenant_change less{.memory = 8_MiB, .compute = 10_pct, .level = gpushare::priority{1}};
    const promises before(shared);
    const auto back = [&] {
        a.resize({.memory = 16_MiB, .compute = 20_pct, .level = gpushare::priority{}});
        b.resize({.memory = 16_MiB, .compute = 20_pct, .level = gpushare::priority{}});
    };
    const auto look = [&](bool thrown) {
        if (!thrown) back();
        CHECK(a.spec().memory == 16_MiB);
        CHECK(a.spec().compute == 20_pct);
        CHECK(b.spec().memory == 16_MiB);
        CHECK(rest(shared) == before);
        CHECK(submits(a) == errc::none);
    };
    SECTION("of one tenant") {
        with_each_failure(
            recovers, [&] { a.resize(more); }, look);
    }
    SECTION("of two") {
        const std::vector<tenancy::update> both{{&a, more}, {&b, less}};
        with_each_failure(
            recovers, [&] { shared.resize_together(both); }, look);
    }
    back();
    CHECK(rest(shared) == before);
}

TEST_CASE("undoing a change that a policy refuses, or can't take, needs no host memory", "[tenant][resize]") {
    node n(modelled(2));
    refusing::notes seen;
    gpushare::tenancy shared(n, {}, [&](device_id) { return refusing{&seen}; });
    auto a = shared.admit({.name = "a", .memory = 16_MiB, .devices = 2, .compute = 20_pct});
    auto b = shared.admit({.name = "b", .memory = 16_MiB, .devices = 2, .compute = 20_pct});
    const gpushare::tenant_change more{.memory = 24_MiB, .compute = 30_pct, .level = gpushare::priority{2}};
    const gpushare::tenant_change less{.memory = 8_MiB, .compute = 10_pct, .level = gpushare::priority{1}};
    const auto free = shared.rooms().front().free;
    const std::size_t refused = GENERATE(0U, 1U, 2U, 3U);  // each tenant has two parts
    seen.throws = GENERATE(false, true);
    CAPTURE(refused, seen.throws);
    const std::vector<decltype(shared)::update> both{{&a, more}, {&b, less}};
    errc why = errc::share_exceeded;
    seen.good = refused;
    try {
        why = refused < 2 ? errc{a.try_resize(more).code} : errc{shared.try_resize_together(both).why.code};
    } catch (const std::bad_alloc&) {  // the policy's, or for the text of the error
    }
    support::this_heap = {};
    CHECK(why == errc::share_exceeded);
    for (auto* const t : {&a, &b}) {
        CHECK(t->spec().memory == 16_MiB);
        CHECK(t->spec().compute == 20_pct);
        CHECK(t->spec().level == gpushare::priority{});
    }
    CHECK(shared.rooms().front().free == free);
    CHECK(shared.unpromised({0}) == 60_pct);
    CHECK(seen.levels == std::array<gpushare::priority, 2>{});
}

TEST_CASE("a tenant that can't move or park for lack of host memory is where it was", "[tenant][move]") {
    const bool recovers = GENERATE(true, false);
    node n(modelled(3));
    tenancy shared(n);
    auto t = shared.admit({.name = "t", .memory = 16_MiB, .devices = 2, .compute = 20_pct, .on = {{0}, {1}}});
    const auto block = [&](std::size_t part, std::size_t size) {
        return gpushare::moving_block{.part = part, .at = t.memory(part).allocate(size), .size = size};
    };
    std::vector<gpushare::moving_block> blocks{block(0, 4096), block(1, 8192), block(1, 1 << 20)};
    *static_cast<int*>(blocks[1].at) = 42;
    const auto intact = [&](const std::vector<device_id>& on) {
        CHECK(t.spec().on == on);
        CHECK(*static_cast<int*>(blocks[1].at) == 42);
        for (const auto& b : blocks) CHECK(t.memory(b.part).find(b.at).has_value());
        CHECK(submits(t) == errc::none);
    };
    promises before(shared);
    SECTION("to another device") {
        std::vector<device_id> on{{0}, {1}}, to{{0}, {2}};
        with_each_failure(
            recovers,
            [&] {
                auto moved = gpushare::move_tenant(shared, t, to, blocks, soon());
                t = std::move(moved.successor);
            },
            [&](bool thrown) {
                if (!thrown) {
                    std::swap(on, to);
                    before = rest(shared);
                }
                CHECK(rest(shared) == before);
                intact(on);
            });
        intact(to);
    }
    SECTION("to the host and back") {
        counted_host host;
        std::optional<gpushare::parked_tenant<counted_host>> parked;
        with_each_failure(
            recovers, [&] { parked.emplace(gpushare::park_tenant(t, blocks, host, soon())); },
            [&](bool thrown) {
                CHECK(parked.has_value() != thrown);
                if (!thrown) {
                    if (!parked->closed().complete) CHECK(t.close(soon()).complete);
                    t = gpushare::unpark_tenant(shared, *parked, {{0}, {1}}, blocks, soon());
                }
                parked.reset();
                CHECK(host.out == 0);
                CHECK(rest(shared) == before);
                intact({{0}, {1}});
            });
        REQUIRE(parked);
        const promises without(shared);
        std::optional<tenancy::tenant> again;
        with_each_failure(
            recovers,
            [&] {
                again.emplace(gpushare::unpark_tenant(shared, *parked, {{0}, {1}}, blocks, soon()));
            },
            [&](bool thrown) {
                if (!thrown) {
                    t = *std::exchange(again, std::nullopt);
                    parked.reset();
                    parked.emplace(gpushare::park_tenant(t, blocks, host, soon()));
                }
                CHECK(rest(shared) == without);
                CHECK(parked->blocks() == 3);
            });
        t = *std::exchange(again, std::nullopt);
        intact({{0}, {1}});
        CHECK(rest(shared) == before);
    }
}

TEST_CASE("a tenant closes as soon as the host has memory again", "[tenant][close]") {
    const bool recovers = GENERATE(true, false);
    const auto stack = GENERATE(gpushare::memory_stack::pool, gpushare::memory_stack::direct);
    node n(modelled(2));
    tenancy shared(n);
    const promises before(shared);
    std::optional<tenancy::tenant> t;
    const auto begin = [&] {
        t.emplace(shared.admit({.name = "t", .memory = 16_MiB, .devices = 2, .compute = 20_pct, .stack = stack}));
        CHECK(t->memory(0).allocate(4096) != nullptr);
        CHECK(t->memory(1).allocate(4096) != nullptr);
        CHECK(submits(*t) == errc::none);
    };
    SECTION("by a call") {
        bool complete = false;
        begin();
        with_each_failure(
            recovers, [&] { complete = t->close(soon()).complete; },
            [&](bool thrown) {
                if (thrown || !complete) CHECK(t->close(soon()).complete);
                complete = false;
                CHECK(rest(shared) == before);
                t.reset();
                begin();
            });
    }
    SECTION("by its end") {
        begin();
        with_each_failure(
            recovers, [&] { t.reset(); },
            [&](bool) {
                CHECK(rest(shared) == before);
                begin();
            });
    }
    t.reset();
    CHECK(rest(shared) == before);
}

TEST_CASE("a scrubber's point covers each fill that is queued", "[tenant][scrub]") {
    const bool recovers = GENERATE(true, false);
    support::manual_clock clock;
    support::manual_scrubber stream;
    gpushare::compute_limiter<support::manual_scrubber, support::manual_clock> compute{{.depth = 1, .horizon = 0ms},
                                                                                       clock};
    gpushare::limited_scrubber scrubs{compute, compute.add({.weight = 5_pct}), stream, 16_B};
    std::vector<std::byte> memory(16);
    const auto end_all = [&] {
        while (stream.reach_next()) compute.poll();
    };
    std::size_t filled = 0;
    with_each_failure(
        recovers, [&] { scrubs.fill(memory.data(), std::byte{1}, memory.size()); },
        [&](bool thrown) {
            end_all();
            if (thrown) CHECK(stream.filled() == filled);
            filled = stream.filled();
            CHECK(scrubs.record().reached());
        });
    const auto last = scrubs.record();
    CHECK_FALSE(last.reached());
    end_all();
    CHECK(last.reached());
    CHECK(last.status() == errc::none);
}

}  // namespace no_host_memory_test

#endif
