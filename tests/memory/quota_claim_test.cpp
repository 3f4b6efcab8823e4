// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Waiters for bytes of a quota: first come first served, no request that fits waits, and no
// guaranteed bytes of others are held back. Without threads: the queue is a state machine.
#include <algorithm>
#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

using namespace gpushare::literals;
using gpushare::bytes;
using gpushare::claim_state;
using gpushare::errc;
using gpushare::quota;
using gpushare::quota_claim;

TEST_CASE("a claim that fits is granted at once, and given back unless taken", "[memory][queue]") {
    quota q{100_B};
    {
        quota_claim fits{q, 60_B};
        CHECK(fits.state() == claim_state::granted);
        CHECK(q.usage().current == 60_B);
    }
    CHECK(q.usage().current == 0_B);
    {
        quota_claim kept{q, 60_B};
        kept.take();
    }
    CHECK(q.usage().current == 60_B);
    CHECK(q.release(60_B));
}

TEST_CASE("a release serves the claim that has waited longest", "[memory][queue]") {
    quota q{100_B};
    REQUIRE(q.try_charge(100_B) == errc::none);
    quota_claim first{q, 50_B}, second{q, 10_B};
    CHECK(first.why() == errc::over_quota);
    CHECK(q.release(20_B));  // would do for the second
    CHECK(first.state() == claim_state::waiting);
    CHECK(second.state() == claim_state::waiting);
    CHECK(q.release(30_B));
    CHECK(first.state() == claim_state::granted);
    CHECK(second.state() == claim_state::waiting);
    CHECK(q.release(10_B));
    CHECK(second.state() == claim_state::granted);
    first.take();
    second.take();
    CHECK(q.usage().current == 100_B);
    CHECK(q.release(100_B));
}

TEST_CASE("a big claim isn't starved by small latecomers", "[memory][queue]") {
    quota q{100_B};
    REQUIRE(q.try_charge(95_B) == errc::none);
    {
        quota_claim big{q, 100_B};
        CHECK(q.free() == 0_B);  // what is left is spoken for
        CHECK(q.try_charge(1_B) == errc::over_quota);
        CHECK(q.try_charge(0_B) == errc::none);
        CHECK(q.release(95_B));
        REQUIRE(big.state() == claim_state::granted);
        CHECK(q.try_charge(1_B) == errc::over_quota);
    }
    CHECK(q.try_charge(100_B) == errc::none);
    CHECK(q.release(100_B));
}

TEST_CASE("a claim that leaves the queue lets those behind go on", "[memory][queue]") {
    quota q{100_B};
    REQUIRE(q.try_charge(50_B) == errc::none);
    auto big = std::make_unique<quota_claim>(q, 90_B);
    quota_claim small{q, 40_B};
    CHECK(small.state() == claim_state::waiting);
    big.reset();
    CHECK(small.state() == claim_state::granted);
    CHECK(q.free() == 10_B);
    CHECK(q.release(50_B));
}

TEST_CASE("a claim that can never fit is refused at once", "[memory][queue]") {
    quota device{100_B};
    quota tenant{device, 10_B, 200_B};
    CHECK(quota_claim(device, 101_B).why() == errc::over_quota);
    CHECK(quota_claim(device, bytes::max()).why() == errc::size_overflow);
    CHECK(quota_claim(tenant, 211_B).state() == claim_state::refused);
    const quota_claim above{tenant, 111_B};
    CHECK(above.state() == claim_state::refused);
    CHECK(above.why() == errc::out_of_memory);
    CHECK(device.usage().current == 10_B);
}

TEST_CASE("a resize serves the queue, or tells it that it waits in vain", "[memory][queue]") {
    quota device{100_B};
    quota tenant{device, 40_B};
    REQUIRE(tenant.try_charge(30_B) == errc::none);
    quota_claim claim{tenant, 20_B}, more{tenant, 35_B};
    CHECK(claim.state() == claim_state::waiting);
    REQUIRE(tenant.resize(50_B, 0_B) == errc::none);
    CHECK(claim.state() == claim_state::granted);
    CHECK(more.state() == claim_state::waiting);
    REQUIRE(tenant.resize(30_B, 0_B) == errc::none);
    CHECK(more.state() == claim_state::refused);
    CHECK(more.why() == errc::over_quota);
    CHECK(tenant.release(30_B));
}

TEST_CASE("burst is handed on when a sibling releases it, is resized or ends", "[memory][queue]") {
    quota device{100_B};
    quota chat{device, 0_B, 100_B};
    auto code = std::make_unique<quota>(device, 20_B, 80_B);
    REQUIRE(code->try_charge(100_B) == errc::none);
    quota_claim first{chat, 10_B}, second{chat, 70_B}, third{chat, 20_B};
    CHECK(first.why() == errc::out_of_memory);
    CHECK(code->release(10_B));
    CHECK(first.state() == claim_state::granted);
    CHECK(code->release(70_B));  // its loan, and nothing of its guarantee
    CHECK(second.state() == claim_state::granted);
    CHECK(code->release(20_B));
    CHECK(third.state() == claim_state::waiting);
    code.reset();
    CHECK(third.state() == claim_state::granted);
}

TEST_CASE("an idle loan serves a claim that comes later", "[memory][queue]") {
    quota device{100_B};
    quota chat{device, 0_B, 100_B}, code{device, 0_B, 100_B};
    REQUIRE(code.try_charge(100_B) == errc::none);
    CHECK(code.release(100_B));
    CHECK(quota_claim(chat, 100_B).state() == claim_state::granted);
}

TEST_CASE("a claim holds back nothing that it couldn't be served from", "[memory][queue]") {
    quota device{100_B};
    quota chat{device, 30_B}, code{device, 30_B, 40_B}, third{device, 0_B, 40_B};
    REQUIRE(chat.try_charge(30_B) == errc::none);
    const quota_claim own{chat, 10_B};  // for what chat itself has
    CHECK(code.try_charge(70_B) == errc::none);
    const quota_claim burst{third, 20_B};  // for what code has borrowed
    CHECK(code.release(70_B));
    CHECK(burst.state() == claim_state::granted);
    CHECK(own.state() == claim_state::waiting);
    REQUIRE(code.try_charge(30_B) == errc::none);
    CHECK(code.release(30_B));
    CHECK(chat.release(30_B));
    CHECK(own.state() == claim_state::granted);
}

TEST_CASE("a neighbour's guarantee is there beside anybody's claim, and so is a new one", "[memory][queue]") {
    quota device{100_B};
    quota chat{device, 0_B, 100_B}, code{device, 30_B, 10_B};
    REQUIRE(chat.try_charge(50_B) == errc::none);
    const quota_claim waits{chat, 30_B};
    CHECK(waits.state() == claim_state::waiting);
    CHECK(code.try_charge(31_B) == errc::out_of_memory);  // a byte of those who wait
    CHECK(code.try_charge(30_B) == errc::none);
    CHECK(code.free() == 0_B);
    const quota fresh{device, 20_B};  // guarantees go ahead
    CHECK(device.free() == 0_B);
    CHECK(code.resize(35_B, 10_B) == errc::no_room);
    CHECK(code.release(30_B));
    CHECK(chat.release(50_B));
}

TEST_CASE("a quota that begins to borrow joins the queue of its parent", "[memory][queue]") {
    quota device{100_B};
    quota chat{device, 10_B}, code{device, 0_B, 100_B};
    REQUIRE(chat.try_charge(10_B) == errc::none);
    REQUIRE(code.try_charge(90_B) == errc::none);
    quota_claim waits{chat, 10_B};
    REQUIRE(chat.resize(10_B, 10_B) == errc::none);
    CHECK(waits.why() == errc::out_of_memory);
    CHECK(code.release(9_B));
    CHECK(waits.state() == claim_state::waiting);
    CHECK(code.release(1_B));
    CHECK(waits.state() == claim_state::granted);
    CHECK(code.release(80_B));
}

TEST_CASE("changes of several quotas respect the queue, or go ahead of it for guarantees", "[memory][queue]") {
    quota device{100_B};
    quota chat{device, 0_B, 200_B};
    REQUIRE(chat.try_charge(60_B) == errc::none);
    quota_claim waits{chat, 50_B};
    gpushare::quota_charge late{chat, 10_B};
    const auto why = late.prepare();
    CHECK(why.code == errc::out_of_memory);
    CHECK(why.left == 0);
    gpushare::quota_draw draw{device};
    REQUIRE(draw.prepare().code == errc::none);
    CHECK(draw.left() == 40_B);
    draw.take(10_B);
    draw.commit();
    CHECK(waits.state() == claim_state::waiting);
    CHECK(draw.undo());
    CHECK(waits.state() == claim_state::waiting);
    CHECK(chat.release(10_B));
    CHECK(waits.state() == claim_state::granted);
    CHECK(chat.release(50_B));
}

TEST_CASE("a queue three levels deep is served from any branch", "[memory][queue]") {
    quota node{100_B};
    quota left{node, 0_B, 100_B}, right{node, 0_B, 100_B};
    quota a{left, 0_B, 100_B}, b{left, 0_B, 60_B}, c{right, 10_B, 100_B};
    REQUIRE(c.try_charge(50_B) == errc::none);
    REQUIRE(a.try_charge(50_B) == errc::none);
    quota_claim waits{b, 60_B};
    CHECK(c.release(50_B));  // 40 of it borrowed
    CHECK(waits.state() == claim_state::waiting);
    CHECK(a.release(20_B));
    CHECK(waits.state() == claim_state::granted);
    CHECK(a.release(30_B));
}

namespace {

/// A tree with claims at random, and after each step: whoever is first in the queue doesn't fit.
class crowd {
public:
    explicit crowd(std::uint64_t seed) : any_(seed) {
        quotas_.push_back(std::make_unique<quota>(bytes{200}));
        for (int i = 0; i < 2; ++i) add(*quotas_.front());
        for (int i = 0; i < 3; ++i) add(*quotas_[1 + any_.below(2)]);
        charged_.resize(quotas_.size());
    }
    crowd(const crowd&) = delete;
    crowd& operator=(const crowd&) = delete;
    ~crowd() {
        claims_.clear();
        while (!quotas_.empty()) quotas_.pop_back();
    }

    bool step() {
        const auto i = any_.below(quotas_.size());
        quota& q = *quotas_[i];
        switch (any_.below(8)) {
            case 0:
                if (i != 0) (void)q.resize(bytes{any_.below(30)}, bytes{any_.one_in(3) ? 0 : any_.below(150)});
                break;
            case 1:
            case 2:
                if (claims_.size() < 6) claims_.push_back(std::make_unique<claim>(q, i, bytes{any_.below(120)}));
                break;
            case 3:
                if (!claims_.empty()) claims_.erase(std::next(claims_.begin(), index(claims_.size())));
                break;
            case 4: {
                const auto n = 1 + any_.below(60);
                if (q.try_charge(bytes{n}) == errc::none) charged_[i] += n;
                break;
            }
            default: {
                const auto n = any_.below(charged_[i] + 1);
                charged_[i] -= n;
                if (!q.release(bytes{n})) return false;
            }
        }
        return settle();
    }

    bool winds_down() {
        claims_.clear();
        for (std::size_t i = 0; i < quotas_.size(); ++i)
            if (!quotas_[i]->release(bytes{charged_[i]})) return false;
        while (quotas_.size() > 1) quotas_.pop_back();
        return quotas_.front()->usage().current == 0_B && quotas_.front()->free() == 200_B;
    }

private:
    struct claim {
        claim(quota& q, std::size_t i, bytes n) : index(i), of(&q), place(q, n) {}
        std::size_t index;
        quota* of;
        quota_claim place;
    };

    std::ptrdiff_t index(std::size_t size) { return static_cast<std::ptrdiff_t>(any_.below(size)); }
    void add(quota& parent) {
        const auto some = any_.below(30);
        quotas_.push_back(std::make_unique<quota>(parent, bytes{std::min(some, parent.free().count())},
                                                  bytes{any_.one_in(4) ? 0 : any_.below(150)}));
    }

    // Takes what was granted. A charge ahead of the queue that succeeds means that the first one in
    // it was forgotten.
    bool settle() {
        for (auto it = claims_.begin(); it != claims_.end();) {
            auto& c = **it;
            if (c.place.state() == claim_state::waiting) {
                ++it;
                continue;
            }
            if (c.place.state() == claim_state::granted) {
                c.place.take();
                charged_[c.index] += c.place.size().count();
            }
            it = claims_.erase(it);
        }
        if (claims_.empty()) return true;
        // The first in the queue is behind nobody. What is charged ahead of the queue shows whether
        // it would fit: all the others leave, and come back behind it in their order.
        const auto& first = *claims_.front();
        std::vector<std::pair<std::size_t, bytes>> others;
        for (auto it = std::next(claims_.begin()); it != claims_.end(); ++it)
            others.emplace_back((*it)->index, (*it)->place.size());
        claims_.erase(std::next(claims_.begin()), claims_.end());
        if (first.place.state() != claim_state::waiting) return false;
        const auto where = first.index;
        const auto size = first.place.size();
        claims_.clear();  // and then it is a charge like any other
        if (quotas_[where]->try_charge(size) == errc::none) return false;
        claims_.push_back(std::make_unique<claim>(*quotas_[where], where, size));
        for (const auto& [i, n] : others) claims_.push_back(std::make_unique<claim>(*quotas_[i], i, n));
        return true;
    }

    support::random any_;
    std::vector<std::unique_ptr<quota>> quotas_;
    std::vector<std::uint64_t> charged_;
    std::list<std::unique_ptr<claim>> claims_;
};

void crowds(std::uint64_t runs, int steps) {
    for (std::uint64_t run = 0; run < runs; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        crowd c{seed};
        for (int step = 0; step < steps; ++step) {
            if (c.step()) continue;
            FAIL("somebody waits that fits, after step " << step);
        }
        REQUIRE(c.winds_down());
    }
}

}  // namespace

TEST_CASE("no claim that fits waits, whatever happens around it", "[memory][queue][property]") { crowds(100, 400); }

TEST_CASE("no claim that fits waits, for ten million steps", "[.long]") { crowds(1'000, 10'000); }
