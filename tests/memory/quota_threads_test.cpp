// SPDX-License-Identifier: Apache-2.0
// Quotas with many threads. The requests are chosen so that every right answer is known in advance:
// some must always fit, and others can never fit. So each wrong refusal is a defect, whatever the
// interleaving.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace quota_threads_test {

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::errc;
using gpushare::quota;

namespace {

constexpr std::uint64_t rounds = 300'000;

/// The classic defect: adds first and checks after, so that a doomed request takes room away while
/// it is refused.
class add_then_check {
public:
    explicit add_then_check(bytes limit) : limit_(limit.count()) {}

    errc try_charge(bytes n) noexcept {
        const auto used = used_.fetch_add(n.count()) + n.count();
        auto peak = peak_.load();
        while (used > peak && !peak_.compare_exchange_weak(peak, used)) {
        }
        if (used <= limit_) return errc::none;
        used_.fetch_sub(n.count());
        return errc::over_quota;
    }
    bool release(bytes n) noexcept {
        used_.fetch_sub(n.count());
        return true;
    }
    [[nodiscard]] bytes peak() const noexcept { return bytes{peak_.load()}; }

private:
    const std::uint64_t limit_;
    std::atomic<std::uint64_t> used_{0}, peak_{0};
};

/// Charges `fits` over and over; returns how often that was refused, or what was charged couldn't
/// be released.
template <class Quota>
std::uint64_t count_refusals(Quota& q, bytes fits, std::uint64_t times) {
    std::uint64_t refused = 0;
    for (std::uint64_t i = 0; i < times; ++i) {
        if (q.try_charge(fits) != errc::none) {
            ++refused;
        } else {
            refused += q.release(fits) ? 0 : 1;
        }
    }
    return refused;
}

/// Two threads that ask `q` for `doomed` bytes until the scope ends. Grants are counted: there must
/// be none.
template <class Quota>
class attack {
public:
    attack(Quota& q, bytes doomed)
        : threads_(2, [this, &q, doomed](unsigned) {
              if (q.try_charge(doomed) == errc::none) granted_.fetch_add(1);
          }) {}
    [[nodiscard]] int granted() const { return granted_.load(); }
    [[nodiscard]] std::size_t rounds() const { return threads_.rounds(); }

private:
    std::atomic<int> granted_{0};
    support::background threads_;
};

/// As above, for as long as it takes until the other side has been at it as well: on a busy machine
/// one of two threads can be done before the other has begun.
template <class Quota, class Pressure>
std::uint64_t count_refusals_under(const Pressure& pressure, Quota& q, bytes fits) {
    const auto enough = pressure.rounds() + rounds / 30;
    auto refused = count_refusals(q, fits, rounds);
    while (pressure.rounds() < enough) refused += count_refusals(q, fits, 100);
    return refused;
}

/// What threads hold of a quota and of its parent, counted from outside. Raised behind a grant and
/// lowered before a release, so it never shows too much: whatever is over the limit here was over
/// it in truth.
class shadow {
public:
    explicit shadow(bytes limit, shadow* parent = nullptr) : limit_(limit.count()), parent_(parent) {}

    void add(bytes n) noexcept {
        if (held_.fetch_add(n.count()) + n.count() > limit_) exceeded_.fetch_add(1);
        if (parent_ != nullptr) parent_->add(n);
    }
    void remove(bytes n) noexcept {
        if (parent_ != nullptr) parent_->remove(n);
        held_.fetch_sub(n.count());
    }
    [[nodiscard]] std::uint64_t exceeded() const noexcept { return exceeded_.load(); }

private:
    const std::uint64_t limit_;
    shadow* const parent_;
    std::atomic<std::uint64_t> held_{0}, exceeded_{0};
};

void check_clean(const quota& q) {
    CHECK(q.usage().current == 0_B);
    CHECK(q.usage().borrowed == 0_B);
}

}  // namespace

TEST_CASE("the attack finds the classic defect: a big refused request makes a fitting one fail", "[memory][attack]") {
    add_then_check broken{1_GiB};
    REQUIRE(broken.try_charge(1_MiB) == errc::none);
    attack doomed{broken, 1_GiB};
    std::uint64_t refused = 0;
    for (int tries = 0; tries < 1'000 && refused == 0; ++tries) refused += count_refusals(broken, 512_MiB, rounds);
    REQUIRE(refused > 0);
    REQUIRE(broken.peak() > 1_GiB);
    REQUIRE(doomed.granted() == 0);
}

TEST_CASE("a big refused request never makes a fitting one fail (rmm's limiter)", "[memory][attack]") {
    quota q{1_GiB};
    REQUIRE(q.try_charge(1_MiB) == errc::none);
    {
        attack doomed{q, 1_GiB};
        CHECK(count_refusals_under(doomed, q, 512_MiB) == 0);
        CHECK(count_refusals_under(doomed, q, 1023_MiB) == 0);  // the last byte as well
        CHECK(doomed.granted() == 0);
    }
    CHECK(q.usage().peak == 1_GiB);
    CHECK(q.release(1_MiB));
    check_clean(q);
}

TEST_CASE("a doomed attempt to borrow is invisible to siblings", "[memory][attack]") {
    quota device{1_GiB};
    REQUIRE(device.try_charge(1_MiB) == errc::none);
    quota greedy{device, 0_B, 2_GiB};
    quota modest{device, 0_B, 1023_MiB};
    {
        attack doomed{greedy, 1_GiB};
        CHECK(count_refusals_under(doomed, modest, 1023_MiB) == 0);
        CHECK(count_refusals_under(doomed, device, 1023_MiB) == 0);
        CHECK(doomed.granted() == 0);
    }
    CHECK(device.usage().peak == 1_GiB);
    CHECK(greedy.usage().peak == 0_B);
    CHECK(modest.usage().peak == 1023_MiB);
    check_clean(greedy);
    check_clean(modest);
    CHECK(device.release(1_MiB));
}

TEST_CASE("a doomed attempt in the same quota is invisible to one that borrows", "[memory][attack]") {
    quota device{1_GiB};
    quota tenant{device, 256_MiB, 768_MiB};
    REQUIRE(tenant.try_charge(1_MiB) == errc::none);
    {
        attack doomed{tenant, 1_GiB};  // over the tenant's limit
        attack more_doomed{tenant, 1023_MiB + 1_B};
        CHECK(count_refusals_under(doomed, tenant, 1023_MiB) == 0);
        CHECK(count_refusals_under(doomed, tenant, 100_MiB) == 0);
        CHECK(doomed.granted() + more_doomed.granted() == 0);
    }
    CHECK(tenant.usage().peak == 1_GiB);
    CHECK(tenant.release(1_MiB));
    check_clean(tenant);
    CHECK(device.usage().current == 256_MiB);
}

TEST_CASE("a doomed attempt three levels down is invisible everywhere", "[memory][attack]") {
    quota node{1_GiB};
    REQUIRE(node.try_charge(1_MiB) == errc::none);
    quota left{node, 0_B, 2_GiB}, right{node, 0_B, 2_GiB};
    quota greedy{left, 0_B, 2_GiB}, modest{right, 0_B, 2_GiB}, sibling{left, 0_B, 2_GiB};
    {
        attack doomed{greedy, 1_GiB};
        CHECK(count_refusals_under(doomed, modest, 1023_MiB) == 0);
        CHECK(count_refusals_under(doomed, sibling, 1023_MiB) == 0);
        CHECK(doomed.granted() == 0);
    }
    CHECK(left.usage().borrowed == 0_B);
    CHECK(right.usage().borrowed == 0_B);
    CHECK(node.usage().current == 1_MiB);
    CHECK(node.usage().peak == 1_GiB);
    CHECK(node.release(1_MiB));
}

TEST_CASE("two tenants whose quotas sum to the device never see one another's memory pressure", "[memory][attack]") {
    quota device{1_GiB};
    const auto burst = GENERATE(0_B, 1_GiB);  // the noisy one may ask for more than its own, and must not get it
    CAPTURE(burst.count());
    quota noisy{device, 512_MiB, burst};
    quota quiet{device, 512_MiB};
    {
        std::atomic<std::uint64_t> over{0};
        support::background pressure(2, [&](unsigned rank) {
            const bytes all = rank == 0 ? 512_MiB : 64_MiB;
            if (noisy.try_charge(all) == errc::none) noisy.release(all);
            if (noisy.try_charge(512_MiB + 1_B) == errc::none) over.fetch_add(1);
            if (noisy.try_charge(bytes::max()) == errc::none) over.fetch_add(1);
        });
        CHECK(count_refusals_under(pressure, quiet, 512_MiB) == 0);
        CHECK(over.load() == 0);
        CHECK(noisy.usage().refusals > 0);
    }
    CHECK(quiet.usage().refusals == 0);
    CHECK(quiet.usage().peak == 512_MiB);
    CHECK(noisy.usage().peak <= 512_MiB);
    CHECK(device.usage().peak == 1_GiB);
    check_clean(noisy);
    check_clean(quiet);
}

TEST_CASE("a neighbour's resizes are invisible to a tenant within its guarantee", "[memory][attack]") {
    quota device{1_GiB};
    quota noisy{device, 256_MiB};
    quota quiet{device, 512_MiB};
    {
        support::background pressure(2, [&](unsigned rank) {
            (void)noisy.resize(rank == 0 ? 512_MiB : 128_MiB, 64_MiB);
            (void)noisy.resize(600_MiB, 0_B);  // can't be had
            if (noisy.try_charge(100_MiB) == errc::none) noisy.release(100_MiB);
        });
        CHECK(count_refusals_under(pressure, quiet, 512_MiB) == 0);
    }
    check_clean(noisy);
    CHECK(noisy.resize(0_B, 0_B) == errc::none);
    CHECK(device.usage().current == 512_MiB);
}

TEST_CASE("a quota that is resized all the time grants what always fits and loses nothing", "[memory][attack]") {
    quota device{1_GiB};
    quota tenant{device, 300_MiB, 100_MiB};
    REQUIRE(tenant.try_charge(1_MiB) == errc::none);  // what would be released too often comes from here
    {
        support::background resizer(1, [&](unsigned) {
            (void)tenant.resize(300_MiB, 300_MiB);
            (void)tenant.resize(350_MiB, 0_B);
            (void)tenant.resize(320_MiB, 0_B);
            (void)tenant.resize(0_B, 300_MiB);
        });
        std::atomic<std::uint64_t> wrong{0};
        support::together(2, [&](unsigned) { wrong += count_refusals_under(resizer, tenant, 100_MiB); });
        CHECK(wrong.load() == 0);
    }
    CHECK(tenant.usage().peak <= 201_MiB);  // no more was ever charged at once
    CHECK(tenant.usage().current == 1_MiB);
    CHECK(tenant.release(1_MiB));
    CHECK(tenant.resize(0_B, 0_B) == errc::none);
    CHECK(device.usage().current == 0_B);
}

namespace {

// More threads than cores, so that they are interrupted anywhere, and a resize down and up leaves
// no trace in between.
void check_figures_beside_resizes(std::uint64_t times) {
    constexpr unsigned threads = 6;
    quota q{1000_B};
    std::atomic<std::uint64_t> wrong{0};
    {
        support::background resizer(1, [&](unsigned) {
            (void)q.resize(500_B, 0_B);
            (void)q.resize(1000_B, 0_B);
        });
        support::together(threads, [&](unsigned) { wrong += count_refusals(q, 50_B, times); });
    }
    CHECK(wrong.load() == 0);
    CHECK(q.usage().peak <= 50_B * threads);
    CHECK(q.usage().charges == threads * times);
    CHECK(q.usage().releases == threads * times);
    check_clean(q);
}

}  // namespace

TEST_CASE("figures stay exact while a quota is resized down and up", "[memory][attack]") {
    check_figures_beside_resizes(2 * rounds);
}

TEST_CASE("figures stay exact while a quota is resized down and up, for long", "[.long]") {
    check_figures_beside_resizes(100 * rounds);
}

TEST_CASE("the figures of a refusal are of one moment", "[memory][attack]") {
    quota q{1000_B};
    std::uint64_t wrong = 0;
    support::background resizer(1, [&](unsigned) {
        (void)q.resize(500_B, 0_B);
        (void)q.resize(1000_B, 0_B);
    });
    for (std::uint64_t i = 0; i < rounds; ++i)
        if (const auto why = q.explain(errc::over_quota, 2000_B); why.left != why.limit) ++wrong;
    CHECK(wrong == 0);
}

TEST_CASE("no quota is ever exceeded, no fitting request refused, and nothing drifts", "[memory][attack][property]") {
    // Every thread keeps within an eighth of its child, so that what it asks for always fits;
    // attackers ask for what never does.
    constexpr unsigned threads = 4;
    quota device{1'000_MiB};
    quota first{device, 300_MiB, 200_MiB}, second{device, 0_B, 500_MiB};
    const std::array children{&first, &second};
    const auto seed = support::seed(7);
    CAPTURE(seed);

    shadow all{1'000_MiB}, in_first{500_MiB, &all}, in_second{500_MiB, &all};
    const std::array shadows{&in_first, &in_second};
    std::atomic<std::uint64_t> refused{0}, lost{0}, granted_too_much{0};
    REQUIRE(first.try_charge(1_B) == errc::none);
    REQUIRE(second.try_charge(1_B) == errc::none);
    {
        support::background attackers(1, [&](unsigned) {
            for (auto* child : children)
                if (child->try_charge(500_MiB) == errc::none) granted_too_much.fetch_add(1);
        });
        support::together(threads, [&](unsigned rank) {
            support::random any{seed + rank};
            auto& child = *children[rank % 2];
            auto& seen = *shadows[rank % 2];
            std::array<bytes, 8> blocks{};
            for (std::uint64_t i = 0; i < rounds; ++i) {
                auto& b = blocks[any.below(blocks.size())];
                if (b != bytes{}) {
                    seen.remove(b);
                    if (!child.release(b)) lost.fetch_add(1);
                    b = {};
                    continue;
                }
                const bytes n = any.one_in(10) ? 30_MiB : bytes{1 + any.below((30_MiB).count())};
                if (child.try_charge(n) != errc::none) {
                    refused.fetch_add(1);
                    continue;
                }
                b = n;
                seen.add(n);
            }
            for (const auto b : blocks)
                if (b != bytes{} && !child.release(b)) lost.fetch_add(1);
        });
    }
    CHECK(all.exceeded() + in_first.exceeded() + in_second.exceeded() == 0);
    CHECK(refused.load() == 0);
    CHECK(lost.load() == 0);
    CHECK(granted_too_much.load() == 0);
    CHECK(first.release(1_B));
    CHECK(second.release(1_B));
    check_clean(first);
    check_clean(second);
    CHECK(device.usage().current == 300_MiB);
    CHECK(device.usage().peak <= 1'000_MiB);
    CHECK(device.free() == 700_MiB);
}

TEST_CASE("a scarce quota is never exceeded, whoever wins", "[memory][attack][property]") {
    // Threads over two levels want four times what there is. Refusals are right; too much never is.
    quota device{100_MiB};
    quota first{device, 20_MiB, 60_MiB}, second{device, 20_MiB, 60_MiB};
    const auto seed = support::seed(8);
    CAPTURE(seed);
    shadow all{100_MiB}, in_first{80_MiB, &all}, in_second{80_MiB, &all};
    std::atomic<std::uint64_t> lost{0}, granted{0}, refused{0};
    support::together(4, [&](unsigned rank) {
        support::random any{seed + rank};
        auto& child = rank % 2 == 0 ? first : second;
        auto& seen = rank % 2 == 0 ? in_first : in_second;
        for (std::uint64_t i = 0; i < rounds / 30; ++i) {  // all of them at one mutex: slow on a busy machine
            const bytes n = any.one_in(4) ? 80_MiB : bytes{any.below((80_MiB).count())};
            if (child.try_charge(n) != errc::none) {
                refused.fetch_add(1);
                continue;
            }
            granted.fetch_add(1);
            seen.add(n);
            if (any.one_in(8)) std::this_thread::yield();
            seen.remove(n);
            if (!child.release(n)) lost.fetch_add(1);
        }
    });
    CHECK(all.exceeded() + in_first.exceeded() + in_second.exceeded() == 0);
    CHECK(lost.load() == 0);
    CHECK(granted.load() > 0);
    CHECK(refused.load() > 0);
    CHECK(first.usage().charges == first.usage().releases);
    CHECK(first.usage().charges + second.usage().charges == granted.load());
    CHECK(first.usage().refusals + second.usage().refusals == refused.load());
    check_clean(first);
    check_clean(second);
    CHECK(first.usage().peak <= 80_MiB);
    CHECK(device.usage().peak <= 100_MiB);
    CHECK(device.usage().current == 40_MiB);
}

TEST_CASE("a reading under contention is consistent in itself", "[memory][attack]") {
    quota device{100_MiB};
    quota tenant{device, 10_MiB, 50_MiB};
    support::background work(2, [&](unsigned rank) {
        const bytes n = rank == 0 ? 30_MiB : 7_MiB;
        if (tenant.try_charge(n) == errc::none) tenant.release(n);
    });
    std::uint64_t wrong = 0;
    const auto enough = work.rounds() + rounds / 30;
    for (std::uint64_t i = 0; i < rounds || work.rounds() < enough; ++i) {
        const auto u = tenant.usage();
        if (u.current > u.limit() || u.current > u.peak || u.current > u.guaranteed + u.borrowed) ++wrong;
        if (tenant.free() > u.limit()) ++wrong;
    }
    CHECK(wrong == 0);
}

TEST_CASE("children come and go while others charge, and the parent keeps its sum", "[memory][attack]") {
    quota device{100_MiB};
    REQUIRE(device.try_charge(1_MiB) == errc::none);
    std::atomic<std::uint64_t> refused{0};
    support::together(3, [&](unsigned rank) {
        for (std::uint64_t i = 0; i < rounds / 30; ++i) {
            if (rank == 0) {
                refused += count_refusals(device, 30_MiB, 10);
                continue;
            }
            quota child{device, 10_MiB, 20_MiB};
            refused += count_refusals(child, 30_MiB, 10);
        }
    });
    CHECK(refused.load() == 0);
    CHECK(device.usage().current == 1_MiB);
    CHECK(device.release(1_MiB));
}

}  // namespace quota_threads_test
