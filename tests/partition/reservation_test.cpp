// SPDX-License-Identifier: Apache-2.0
// Reservations across devices: all or nothing, in one step as other threads see it, with quotas as
// the reserved resources.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/partition/reservation.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace reservation_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::failure;
using gpushare::prepared_together;
using gpushare::quota;
using gpushare::quota_charge;
using gpushare::quota_resize;
using gpushare::try_commit_together;

using reservation = gpushare::reservation<quota_charge>;
using charges = std::vector<quota_charge>;

namespace {

/// Not on the stack: ThreadSanitizer would take the quotas of one test for those of another, in
/// another order.
template <class... Arguments>
std::unique_ptr<quota> heap(Arguments&&... arguments) {
    return std::make_unique<quota>(std::forward<Arguments>(arguments)...);
}

struct four_devices {
    std::array<quota, 4> all{quota{1_GiB}, quota{1_GiB}, quota{1_GiB}, quota{1_GiB}};

    charges each(bytes n) {
        charges parts;
        for (auto& q : all) parts.emplace_back(q, n);
        return parts;
    }
    [[nodiscard]] bool charged(bytes n) const {
        return std::ranges::all_of(all, [&](const quota& q) { return q.usage().current == n; });
    }
};

/// A charge on a device that can be lost, and of which a test can say when.
class fragile_charge {
public:
    fragile_charge(quota& from, bytes n, std::atomic<bool>& lost) noexcept : charge_(from, n), lost_(&lost) {}

    failure prepare() noexcept {
        if (lost_->load()) return {errc::device_lost};
        const auto why = charge_.prepare();
        if (why.code != errc::none || !lost_->load()) return why;
        charge_.abandon();
        return {errc::device_lost};
    }
    void commit() noexcept { charge_.commit(); }
    void abandon() noexcept { charge_.abandon(); }
    [[nodiscard]] const void* resource() const noexcept { return charge_.resource(); }
    bool undo() noexcept { return charge_.undo(); }

private:
    quota_charge charge_;
    std::atomic<bool>* lost_;
};
static_assert(gpushare::undoable_change<fragile_charge>);

}  // namespace

TEST_CASE("a reservation charges all devices, and returns what it took", "[partition][reservation]") {
    const auto nodes = std::make_unique<four_devices>();
    auto& node = *nodes;
    {
        auto r = reservation::make(node.each(600_MiB));
        CHECK(node.charged(600_MiB));
        CHECK(r.changes().size() == 4);
        CHECK(reservation::try_make(node.each(600_MiB)).code() == errc::over_quota);
        CHECK(node.charged(600_MiB));
        auto rest = reservation::make(node.each(424_MiB));
        CHECK(node.charged(1_GiB));
        r = std::move(rest);  // returns the first
        CHECK(node.charged(424_MiB));
        CHECK(r.release());
        CHECK(node.charged(0_B));
        CHECK(r.release());  // nothing left to do
    }
    {
        auto r = reservation::make(node.each(1_MiB));
        r.dismiss();
    }
    CHECK(node.charged(1_MiB));
    CHECK_FALSE(reservation(node.each(2_MiB)).release());  // never charged: nothing is returned
    CHECK(node.charged(1_MiB));
    CHECK(reservation(node.each(1_MiB)).release());
    CHECK(node.charged(0_B));
}

TEST_CASE("a reservation that one device refuses takes nothing and names the figures", "[partition][reservation]") {
    const auto nodes = std::make_unique<four_devices>();
    auto& node = *nodes;
    REQUIRE(node.all[2].try_charge(300_MiB) == errc::none);
    auto parts = node.each(800_MiB);
    {
        prepared_together held(parts);
        CHECK_FALSE(held);
        CHECK(held.refused() == &parts[2]);
        CHECK(held.why().code == errc::over_quota);
        CHECK(held.why().asked == (800_MiB).count());
        CHECK(held.why().left == (724_MiB).count());
        CHECK(held.why().limit == (1_GiB).count());
    }
    CHECK_THROWS_WITH(reservation::make(node.each(800_MiB), "chat"),
                      "tenant 'chat': reservation: asked for 800 MiB, 724 MiB of 1 GiB left (over the quota)");
    CHECK(try_commit_together(parts).code == errc::over_quota);
    CHECK(node.all[2].usage().current == 300_MiB);
    CHECK(node.all[2].release(300_MiB));
    CHECK(node.charged(0_B));
    CHECK(node.all[2].usage().refusals == 3);
    CHECK(node.all[0].usage().charges == 0);
    CHECK(try_commit_together(parts).code == errc::none);
    CHECK(node.charged(800_MiB));
}

TEST_CASE("sizes at the edge of the type are refused, nothing of them remains", "[partition][reservation]") {
    const auto nodes = std::make_unique<four_devices>();
    auto& node = *nodes;
    CHECK(reservation::try_make(node.each(bytes::max())).code() == errc::size_overflow);
    CHECK(reservation::try_make(node.each(quota::max_limit())).code() == errc::over_quota);
    CHECK(reservation::try_make({}));
    CHECK(reservation::try_make(node.each(0_B)));
    CHECK(node.charged(0_B));
}

TEST_CASE("two parts of a reservation can't be on the same device", "[partition][reservation]") {
    const auto own_device = heap(1_GiB);
    auto& device = *own_device;
    const auto own_first = heap(device, 256_MiB, 256_MiB);
    auto& first = *own_first;
    const auto own_second = heap(device, 0_B, 256_MiB);
    auto& second = *own_second;
    const auto own_other = heap(1_GiB);
    auto& other = *own_other;
    // The second of two children would wait for their parent for ever.
    CHECK(reservation::try_make({{first, 300_MiB}, {other, 1_MiB}, {second, 1_MiB}}).code() == errc::duplicate_device);
    CHECK(reservation::try_make({{other, 1_MiB}, {other, 1_MiB}}).code() == errc::duplicate_device);
    CHECK(other.usage().current == 0_B);
    CHECK(device.usage().current == 256_MiB);
    CHECK(device.try_charge(768_MiB) == errc::none);  // nothing is locked
    CHECK(device.release(768_MiB));
}

TEST_CASE("parts may borrow from their devices", "[partition][reservation]") {
    const auto own_one = heap(1_GiB);
    auto& one = *own_one;
    const auto own_two = heap(1_GiB);
    auto& two = *own_two;
    const auto own_a = heap(one, 256_MiB, 512_MiB);
    auto& a = *own_a;
    const auto own_b = heap(two, 0_B, 512_MiB);
    auto& b = *own_b;
    {
        auto r = reservation::make({{a, 500_MiB}, {b, 400_MiB}});
        CHECK(a.usage().borrowed == 244_MiB);
        CHECK(b.usage().borrowed == 400_MiB);
        CHECK(one.usage().current == 500_MiB);

        REQUIRE(two.try_charge(600_MiB) == errc::none);
        const auto refused = reservation::try_make({{a, 100_MiB}, {b, 100_MiB}});
        CHECK(refused.code() == errc::out_of_memory);
        CHECK(refused.why().left == (24_MiB).count());
        CHECK(one.usage().current == 500_MiB);
        CHECK(reservation::try_make({{a, 100_MiB}, {b, 200_MiB}}).code() == errc::over_quota);
        CHECK(reservation::try_make({{a, 100_MiB}, {b, 200_MiB}}).why().left == (24_MiB).count());
        CHECK(two.release(600_MiB));
    }
    CHECK(a.usage().current == 0_B);
    CHECK(one.usage().current == 256_MiB);
    CHECK(two.usage().current == 0_B);
}

TEST_CASE("guarantees of several devices change together or not at all", "[partition][reservation]") {
    const auto own_one = heap(1_GiB);
    auto& one = *own_one;
    const auto own_two = heap(1_GiB);
    auto& two = *own_two;
    const auto own_a = heap(one, 100_MiB, 50_MiB);
    auto& a = *own_a;
    const auto own_b = heap(two, 100_MiB, 50_MiB);
    auto& b = *own_b;
    REQUIRE(b.try_charge(120_MiB) == errc::none);
    REQUIRE(two.try_charge(500_MiB) == errc::none);

    std::vector<quota_resize> grow{{a, 600_MiB, 10_MiB}, {b, 600_MiB, 10_MiB}};
    const auto refused = try_commit_together(grow);
    CHECK(refused.code == errc::no_room);
    CHECK(refused.asked == (600_MiB).count());
    CHECK(refused.left == (524_MiB).count());
    CHECK(refused.limit == (1_GiB).count());
    CHECK(refused.left == b.guarantee_room().count());
    CHECK(a.usage().guaranteed == 100_MiB);
    CHECK(a.usage().burst == 50_MiB);

    std::vector<quota_resize> fits{{a, 524_MiB, 10_MiB}, {b, 524_MiB, 10_MiB}};
    CHECK(try_commit_together(fits).code == errc::none);
    for (auto* q : {&a, &b}) CHECK(q->usage().limit() == 534_MiB);
    CHECK(b.usage().borrowed == 0_B);
    CHECK(two.usage().current == 1_GiB);

    std::vector<quota_resize> shrink{{a, 0_B, 0_B}, {b, 0_B, 0_B}};
    CHECK(try_commit_together(shrink).code == errc::none);
    CHECK(one.usage().current == 0_B);
    CHECK(two.usage().current == 620_MiB);  // b still holds its 120
    CHECK(b.release(120_MiB));
    CHECK(two.usage().current == 500_MiB);

    std::vector<quota_resize> wrong{{a, 1_MiB, 0_B}, {b, quota::max_limit(), 1_B}};
    CHECK(try_commit_together(wrong).code == errc::invalid_specification);
    std::vector<quota_resize> roots{{one, 2_GiB, 0_B}, {two, 2_GiB, 0_B}};
    CHECK(try_commit_together(roots).code == errc::none);
    CHECK(one.usage().limit() == 2_GiB);
    std::vector<quota_resize> bursting{{one, 2_GiB, 1_B}};
    CHECK(try_commit_together(bursting).code == errc::invalid_specification);
    CHECK(a.usage().guaranteed == 0_B);
}

TEST_CASE("a quota takes over what was reserved for it", "[partition][reservation]") {
    const auto nodes = std::make_unique<four_devices>();
    auto& node = *nodes;
    auto r = reservation::make(node.each(100_MiB));
    {
        const auto own_tenant = heap(node.all[0], 0_B);
        auto& tenant = *own_tenant;
        CHECK(tenant.adopt(100_MiB, 50_MiB) == errc::none);
        r.dismiss();
        CHECK(tenant.free() == 150_MiB);
        CHECK(tenant.try_charge(120_MiB) == errc::none);
        CHECK(node.all[0].usage().current == 120_MiB);
        CHECK(tenant.release(120_MiB));
        CHECK(tenant.adopt(quota::max_limit(), 0_B) == errc::invalid_specification);
        CHECK(tenant.usage().guaranteed == 100_MiB);
    }
    CHECK(node.all[0].usage().current == 0_B);
    CHECK(node.all[1].adopt(1_MiB, 0_B) == errc::invalid_specification);  // nobody was charged for a root
}

TEST_CASE("the free memory of all devices is read at one moment, and can then be taken", "[partition][reservation]") {
    const auto nodes = std::make_unique<four_devices>();
    auto& node = *nodes;
    const auto own_tenant = heap(node.all[1], 100_MiB, 1_GiB);
    auto& tenant = *own_tenant;
    REQUIRE(tenant.try_charge(324_MiB) == errc::none);
    REQUIRE(tenant.release(200_MiB));  // idle: nobody's
    std::vector<gpushare::quota_draw> draws;
    for (auto& q : node.all) draws.emplace_back(q);
    {
        prepared_together held(draws);
        REQUIRE(held);
        CHECK(draws[0].left() == 1_GiB);
        CHECK(draws[1].left() == 900_MiB);
    }
    {
        prepared_together held(draws);
        draws[1].take(900_MiB);
        held.commit();
    }
    CHECK(node.all[1].usage().current == 1_GiB);
    CHECK(node.all[0].usage().current == 0_B);
    CHECK(node.all[0].usage().charges == 0);
    CHECK(tenant.usage().current == 124_MiB);
    CHECK(tenant.try_charge(1_B) == errc::out_of_memory);
    CHECK(gpushare::reservation(std::move(draws)).release());
    CHECK(node.all[1].usage().current == 124_MiB);
    CHECK(tenant.try_charge(900_MiB) == errc::none);
}

TEST_CASE("a device that is lost half-way takes the whole reservation back", "[partition][reservation]") {
    const auto nodes = std::make_unique<four_devices>();
    auto& node = *nodes;
    std::array<std::atomic<bool>, 4> lost{};
    for (std::size_t dead = 0; dead < 4; ++dead) {
        std::vector<fragile_charge> parts;
        for (std::size_t i = 0; i < 4; ++i) parts.emplace_back(node.all[i], 100_MiB, lost[i]);
        lost[dead] = true;
        CHECK(gpushare::reservation<fragile_charge>::try_make(parts).code() == errc::device_lost);
        CHECK(node.charged(0_B));
        lost[dead] = false;
        auto r = gpushare::reservation<fragile_charge>::make(parts);
        lost[dead] = true;  // afterwards: everything still returns
        CHECK(r.release());
        CHECK(node.charged(0_B));
        lost[dead] = false;
    }
}

TEST_CASE("a change made in two steps does what the same change does in one", "[partition][reservation][property]") {
    for (std::uint64_t run = 0; run < 200; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any{seed};
        const auto own_device = heap(1000_B);
        auto& device = *own_device;
        const auto own_twin_device = heap(1000_B);
        auto& twin_device = *own_twin_device;
        const auto own_tenant = heap(device, 100_B, 200_B);
        auto& tenant = *own_tenant;
        const auto own_twin = heap(twin_device, 100_B, 200_B);
        auto& twin = *own_twin;
        std::uint64_t others = 0;
        for (int step = 0; step < 500; ++step) {
            CAPTURE(step);
            const bytes n{any.below(500)}, burst{any.below(300)};
            switch (any.below(5)) {
                case 0: {
                    quota_charge c{tenant, n};
                    if (any.one_in(4)) {  // abandoned: changes nothing
                        if (c.prepare().code == errc::none) c.abandon();
                        break;
                    }
                    const auto why = c.prepare();
                    if (why.code == errc::none) c.commit();
                    REQUIRE(why.code == twin.try_charge(n));
                    if (why.code != errc::none) {
                        REQUIRE(why.left == tenant.free().count());
                        REQUIRE(why.left < why.asked);
                    }
                    break;
                }
                case 1: REQUIRE(tenant.release(n) == twin.release(n)); break;
                case 2: {
                    quota_resize c{tenant, n, burst};
                    const auto why = c.prepare();
                    if (why.code != errc::none) REQUIRE(why.left == tenant.guarantee_room().count());
                    if (why.code == errc::none && any.one_in(4)) {
                        c.abandon();
                        break;
                    }
                    if (why.code == errc::none) c.commit();
                    REQUIRE(why.code == twin.resize(n, burst));
                    break;
                }
                case 3: {
                    const auto granted = device.try_charge(n);
                    REQUIRE(granted == twin_device.try_charge(n));
                    if (granted == errc::none) others += n.count();
                    break;
                }
                default: {
                    const bytes back{std::min(others, n.count())};
                    REQUIRE(device.release(back) == twin_device.release(back));
                    others -= back.count();
                }
            }
            REQUIRE(tenant.usage().current == twin.usage().current);
            REQUIRE(tenant.usage().borrowed == twin.usage().borrowed);
            REQUIRE(tenant.usage().limit() == twin.usage().limit());
            REQUIRE(tenant.free() == twin.free());
            REQUIRE(device.usage().current == twin_device.usage().current);
        }
    }
}

namespace {

/// The classic defect: one device after the other, rolled back when one refuses.
failure charge_one_by_one(std::span<quota_charge> parts) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
        const errc why = parts[i].of().try_charge(parts[i].size());
        if (why == errc::none) continue;
        while (i-- > 0) parts[i].of().release(parts[i].size());
        return {why};
    }
    return {};
}

/// How often charges that always fit are refused on the first devices, while others try to reserve
/// all four, of which the last is full.
template <class Reserve>
std::uint64_t refusals_beside_doomed(const Reserve& reserve, std::uint64_t rounds) {
    const auto nodes = std::make_unique<four_devices>();
    auto& node = *nodes;
    REQUIRE(node.all[3].try_charge(1_B) == errc::none);
    std::atomic<std::uint64_t> granted{0};
    std::uint64_t refused = 0;
    {
        support::background doomed(2, [&](unsigned) {
            auto parts = node.each(1_GiB);
            if (reserve(parts).code == errc::none) granted.fetch_add(1);
        });
        const auto enough = doomed.rounds() + rounds / 30;
        for (std::uint64_t i = 0; i < rounds || doomed.rounds() < enough; ++i)
            for (std::size_t d = 0; d < 3; ++d) {
                const bool fits = node.all[d].try_charge(1_GiB) == errc::none;
                refused += fits && node.all[d].release(1_GiB) ? 0 : 1;
            }
    }
    CHECK(granted.load() == 0);
    return refused;
}

}  // namespace

TEST_CASE("the attack finds reservations that are rolled back in sight of others", "[partition][reservation][attack]") {
    std::uint64_t refused = 0;
    for (int tries = 0; tries < 100 && refused == 0; ++tries)
        refused = refusals_beside_doomed(charge_one_by_one, 20'000);
    CHECK(refused > 0);
}

TEST_CASE("a doomed reservation is never visible on the devices that had room", "[partition][reservation][attack]") {
    CHECK(refusals_beside_doomed([](charges& parts) { return try_commit_together(parts); }, 100'000) == 0);
}

TEST_CASE("no thread sees one half of a reservation", "[partition][reservation][attack]") {
    const auto own_one = heap(quota::max_limit());
    auto& one = *own_one;
    const auto own_two = heap(quota::max_limit());
    auto& two = *own_two;
    std::atomic<std::uint64_t> torn{0};
    {
        support::background writers(2, [&](unsigned rank) {
            std::vector<quota_charge> parts{{rank == 0 ? one : two, 1_B}, {rank == 0 ? two : one, 1_B}};
            if (try_commit_together(parts).code != errc::none) torn.fetch_add(1);
        });
        const auto enough = writers.rounds() + 10'000;
        while (writers.rounds() < enough) {
            std::vector<gpushare::quota_draw> look{gpushare::quota_draw{one}, gpushare::quota_draw{two}};
            prepared_together held(look);
            if (look[0].left() != look[1].left()) torn.fetch_add(1);
        }
    }
    CHECK(torn.load() == 0);
    CHECK(one.usage().current == two.usage().current);
}

TEST_CASE("memory that was left when all was held can be taken, whoever else asks",
          "[partition][reservation][attack]") {
    const auto nodes = std::make_unique<four_devices>();
    auto& node = *nodes;
    const auto own_tenant = heap(node.all[0], 0_B, 1_GiB);
    std::uint64_t wrong = 0;
    {
        support::background others(2, [&](unsigned rank) {
            auto& q = rank == 0 ? node.all[0] : *own_tenant;
            if (q.try_charge(1_MiB) == errc::none) q.release(1_MiB);
            for (std::atomic<int> pause{0}; pause < 50;) ++pause;  // is not always just waiting for the mutex
        });
        const auto enough = others.rounds() + 20'000;
        for (int i = 0; i < 20'000 || others.rounds() < enough; ++i) {
            std::vector<gpushare::quota_draw> draws{gpushare::quota_draw{node.all[0]},
                                                    gpushare::quota_draw{node.all[1]}};
            prepared_together held(draws);
            for (auto& d : draws) d.take(d.left());
            held.commit();
            // Everything is taken, and nobody else charged or returned any of it.
            for (auto& d : draws)
                if (d.of().usage().current > 1_GiB || !d.undo()) ++wrong;
        }
    }
    CHECK(wrong == 0);
    CHECK(node.charged(0_B));
}

namespace {

struct outcome {
    std::atomic<std::uint64_t> reserved{0}, refused{0}, lost{0}, wrong{0};
};

/// Random reservations by four threads over six devices, with tenants that burst, doomed sizes, and
/// devices that are lost and come back.
void contend(std::uint64_t times, outcome& seen) {
    constexpr std::size_t devices = 6;
    constexpr std::uint64_t capacity = 1'000;
    struct device {
        quota whole{bytes{capacity}};
        quota bursting{whole, 100_B, 400_B};
        std::atomic<std::uint64_t> held{0};
        std::atomic<bool> lost{false};
    };
    const auto nodes = std::make_unique<std::array<device, devices>>();
    auto& node = *nodes;
    const auto seed = support::seed(21);
    CAPTURE(seed);

    support::together(4, [&](unsigned rank) {
        support::random any{seed + rank};
        struct claim {
            gpushare::reservation<fragile_charge> changes;
            std::vector<std::pair<std::size_t, std::uint64_t>> sizes;
        };
        std::vector<claim> mine;
        const auto drop = [&] {
            for (const auto& [d, n] : mine.back().sizes) node[d].held -= n;
            if (!mine.back().changes.release()) seen.wrong.fetch_add(1);
            mine.pop_back();
        };
        for (std::uint64_t i = 0; i < times / 4; ++i) {
            if (any.one_in(50)) node[any.below(devices)].lost = any.one_in(2);
            while (mine.size() > any.below(4)) drop();
            claim c;
            std::vector<fragile_charge> parts;
            std::array<bool, devices> taken{};
            for (auto count = 1 + any.below(devices); count > 0; --count) {
                const auto d = any.below(devices);  // in any order; the same device is left out
                if (std::exchange(taken[d], true)) continue;
                const auto n = 1 + any.below(any.one_in(8) ? 2 * capacity : capacity / 6);
                parts.emplace_back(any.one_in(3) ? node[d].bursting : node[d].whole, bytes{n}, node[d].lost);
                c.sizes.emplace_back(d, n);
            }
            auto r = gpushare::reservation<fragile_charge>::try_make(std::move(parts));
            if (!r) {
                (r.code() == errc::device_lost ? seen.lost : seen.refused).fetch_add(1);
                continue;
            }
            seen.reserved.fetch_add(1);
            // Raised behind the grant, lowered before the release: what it shows was held in truth.
            for (const auto& [d, n] : c.sizes)
                if (node[d].held.fetch_add(n) + n > capacity) seen.wrong.fetch_add(1);
            c.changes = *std::move(r);
            mine.push_back(std::move(c));
        }
        while (!mine.empty()) drop();
    });

    for (auto& d : node) {
        CHECK(d.bursting.usage().current == 0_B);
        CHECK(d.bursting.usage().borrowed == 0_B);
        CHECK(d.whole.usage().current == 100_B);
        CHECK(d.whole.usage().peak <= bytes{capacity});
        CHECK(d.whole.try_charge(bytes{capacity - 100}) == errc::none);
    }
}

}  // namespace

TEST_CASE("contended reservations with failures injected exceed nothing and lose nothing",
          "[partition][reservation][property]") {
    outcome seen;
    contend(100'000, seen);
    CHECK(seen.wrong.load() == 0);
    CHECK(seen.reserved.load() > 1'000);
    CHECK(seen.refused.load() > 1'000);
    CHECK(seen.lost.load() > 1'000);
}

TEST_CASE("a million contended reservations with failures injected exceed nothing and lose nothing", "[.long]") {
    outcome seen;
    contend(1'000'000, seen);
    CHECK(seen.wrong.load() == 0);
    CHECK(seen.reserved.load() + seen.refused.load() + seen.lost.load() == 1'000'000);
}

}  // namespace reservation_test
