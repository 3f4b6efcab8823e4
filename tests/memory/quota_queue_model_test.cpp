// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The waiting requests in trees of quotas, against a model that tries every request again after
// each step: random claims, charges, releases, resizes, births and deaths. The same claims are
// granted, refused and left waiting, and no other figure differs.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

namespace quota_queue_model_test {

using gpushare::bytes;
using gpushare::claim_state;
using gpushare::errc;
using gpushare::quota;
using gpushare::quota_claim;

namespace {

/// A quota and its model, which holds max(guarantee, use) of its parent.
struct node {
    node(node* above, std::uint64_t guarantee, std::uint64_t burst_)
        : parent(above), guaranteed(guarantee), burst(burst_) {}

    node* parent;
    std::uint64_t guaranteed, burst, used = 0;
    bool held_back = false;  // for somebody who waits
    std::optional<quota> real{};
    int depth = 0, children = 0, claims = 0;
    std::uint64_t promised = 0;  // to its children
    std::uint64_t mine = 0;      // charged here by the test itself, or left behind by a child that ended

    [[nodiscard]] std::uint64_t held() const { return std::max(guaranteed, used); }
    [[nodiscard]] std::uint64_t borrowed() const { return held() - guaranteed; }

    bool charge(std::uint64_t n, bool after_waiters) {
        if (n != 0 && held_back && after_waiters) return false;
        if (const auto more = std::max(guaranteed, used + n) - held(); more > 0)
            if (parent == nullptr || used + n > guaranteed + burst || !parent->charge(more, after_waiters))
                return false;
        used += n;
        return true;
    }
    void release(std::uint64_t n) {
        const auto before = held();
        used -= n;
        if (parent != nullptr) parent->release(before - held());
    }
    bool resize(std::uint64_t guarantee, std::uint64_t burst_) {
        const auto holds = std::max(guarantee, used), before = held();
        if (parent != nullptr && holds > before && !parent->charge(holds - before, false)) return false;
        if (parent != nullptr) parent->promised += guarantee - guaranteed;
        guaranteed = guarantee;
        burst = burst_;
        if (parent != nullptr && holds < before) parent->release(before - holds);
        return true;
    }
    [[nodiscard]] bool can_ever_have(std::uint64_t n) const { return n <= attainable(); }
    /// If nothing were charged anywhere, and all guarantees stayed.
    [[nodiscard]] std::uint64_t attainable() const {
        const auto all = guaranteed + (parent == nullptr ? 0 : std::min(burst, parent->attainable()));
        return all - std::min(all, promised);
    }
    /// Nobody who comes later gets what `n` bytes here may come from.
    void hold_back(std::uint64_t n) {
        for (auto* q = this; !q->held_back; q = q->parent) {
            n -= std::min(n, q->held() - q->used);
            q->held_back = true;
            if (q->parent == nullptr || q->borrowed() + n > q->burst) break;
        }
    }
    [[nodiscard]] std::uint64_t free() const {
        if (held_back) return 0;
        const auto left = held() - used;
        return parent == nullptr || burst < borrowed() ? left : left + std::min(burst - borrowed(), parent->free());
    }
};

class tree {
public:
    tree(std::uint64_t seed, std::size_t quotas, std::size_t claims, std::uint64_t limit)
        : any_(seed), most_quotas_(quotas), most_claims_(claims), limit_(limit) {
        nodes_.push_back(std::make_unique<node>(nullptr, limit, 0));
        nodes_.front()->real.emplace(bytes{limit});
    }
    tree(const tree&) = delete;
    tree& operator=(const tree&) = delete;
    ~tree() {
        claims_.clear();
        while (!nodes_.empty()) nodes_.pop_back();  // children before parents
    }

    /// False if it and its model disagree.
    bool step() {
        auto& n = *any_.of(nodes_);
        switch (any_.below(16)) {
            case 0: return birth(n) && agrees();
            case 1: return death(n) && agrees();
            case 2: return resize(n) && agrees();
            case 3: return draw() && agrees();
            case 4:
            case 5:
            case 6: return join(n) && agrees();
            case 7: return leave() && agrees();
            case 8:
            case 9:
            case 10: {
                const auto size = some();
                const bool fits = n.charge(size, true);
                if (fits) n.mine += size;
                return (n.real->try_charge(bytes{size}) == errc::none) == fits && agrees();
            }
            default: {
                const auto size = n.mine == 0 ? 0 : any_.one_in(3) ? n.mine : any_.below(n.mine + 1);
                n.mine -= size;
                n.release(size);
                serve();
                return n.real->release(bytes{size}) && agrees();
            }
        }
    }

    bool winds_down() {
        while (!claims_.empty()) {
            if (!leave()) return false;
        }
        while (nodes_.size() > 1) {
            const auto leaf =
                std::ranges::find_if(nodes_, [](const auto& n) { return n->depth > 0 && n->children == 0; });
            if (!death(**leaf)) return false;
        }
        auto& root = *nodes_.front();
        return root.real->release(bytes{root.mine}) && root.real->usage().current == bytes{} &&
               root.real->free() == bytes{limit_};
    }

    [[nodiscard]] std::uint64_t granted() const { return granted_; }

private:
    struct claim {
        claim(node& at, std::uint64_t n) : of(&at), size(n), real(*at.real, bytes{n}) { ++at.claims; }
        claim(const claim&) = delete;
        claim& operator=(const claim&) = delete;
        ~claim() { --of->claims; }
        node* of;
        std::uint64_t size;
        claim_state expected = claim_state::waiting;
        quota_claim real;
    };

    std::uint64_t some() { return 1 + any_.below(limit_ / 4); }

    bool birth(node& parent) {
        if (parent.depth == 3 || nodes_.size() >= most_quotas_) return true;
        const auto guaranteed = any_.one_in(2) ? 0 : any_.below(limit_ / 8),
                   burst = any_.one_in(4) ? 0 : any_.below(limit_);
        auto fresh = std::make_unique<node>(&parent, guaranteed, burst);
        fresh->depth = parent.depth + 1;
        const bool fits = parent.charge(guaranteed, false);
        try {
            fresh->real.emplace(*parent.real, bytes{guaranteed}, bytes{burst});
        } catch (const gpushare::operation_error&) {
            return !fits;
        }
        ++parent.children;
        parent.promised += guaranteed;
        nodes_.push_back(std::move(fresh));
        if (fits) refuse_hopeless();
        serve();
        return fits;
    }

    bool death(node& n) {
        if (n.depth == 0 || n.children > 0 || n.claims > 0) return true;
        n.parent->release(n.held() - n.used);
        n.parent->mine += n.mine;
        n.parent->promised -= n.guaranteed;
        --n.parent->children;
        std::erase_if(nodes_, [&](const auto& other) { return other.get() == &n; });
        serve();
        return true;
    }

    bool resize(node& n) {
        const auto guaranteed = any_.one_in(3) ? n.used : any_.below(limit_ / 4);
        const auto burst = n.depth == 0 || any_.one_in(4) ? 0 : any_.below(limit_);
        if (n.depth == 0) return true;
        const bool done = n.resize(guaranteed, burst);
        if (done) refuse_hopeless();
        serve();
        return (n.real->resize(bytes{guaranteed}, bytes{burst}) == errc::none) == done;
    }

    /// Goes ahead of who waits.
    bool draw() {
        auto& root = *nodes_.front();
        gpushare::quota_draw all{*root.real};
        if (all.prepare().code != errc::none || all.left().count() != root.held() - root.used) return false;
        const auto n = any_.one_in(2) ? 0 : any_.below(all.left().count() + 1);
        all.take(bytes{n});
        all.commit();
        root.mine += n;
        const bool fits = root.charge(n, false);
        serve();
        return fits;
    }

    bool join(node& n) {
        if (claims_.size() >= most_claims_) return true;
        const auto size = some();
        claims_.push_back(std::make_unique<claim>(n, size));
        if (!n.can_ever_have(size)) claims_.back()->expected = claim_state::refused;
        serve();
        return true;
    }
    bool leave() {
        if (claims_.empty()) return true;
        claims_.erase(std::next(claims_.begin(), static_cast<std::ptrdiff_t>(any_.below(claims_.size()))));
        serve();
        return true;
    }

    // The simple way: everybody in the order in which they came.
    void serve() {
        for (const auto& n : nodes_) n->held_back = false;
        for (const auto& c : claims_) {
            if (c->expected != claim_state::waiting) continue;
            if (c->of->charge(c->size, true))
                c->expected = claim_state::granted;
            else
                c->of->hold_back(c->size);
        }
    }
    void refuse_hopeless() {
        for (const auto& c : claims_)
            if (c->expected == claim_state::waiting && !c->of->can_ever_have(c->size))
                c->expected = claim_state::refused;
    }

    /// Claims have the same states; those that don't wait any more are taken, or forgotten.
    bool agrees() {
        for (auto it = claims_.begin(); it != claims_.end();) {
            auto& c = **it;
            if (c.real.state() != c.expected) return false;
            if (c.expected == claim_state::waiting) {
                ++it;
                continue;
            }
            if (c.expected == claim_state::granted) {
                c.real.take();
                c.of->mine += c.size;
                ++granted_;
            }
            it = claims_.erase(it);
        }
        // Not after each step: a reading brings idle loans home.
        return !any_.one_in(4) || std::ranges::all_of(nodes_, [](const auto& n) {
            const auto free = n->real->free();
            const auto real = n->real->usage();
            return free.count() == n->free() && real.current.count() == n->used &&
                   real.borrowed.count() == n->borrowed();
        });
    }

    support::random any_;
    const std::size_t most_quotas_, most_claims_;
    const std::uint64_t limit_;
    std::vector<std::unique_ptr<node>> nodes_;  // the root first; children behind their parents
    std::list<std::unique_ptr<claim>> claims_;  // in the order in which they came
    std::uint64_t granted_ = 0;
};

void compare(std::uint64_t runs, std::uint64_t steps) {
    std::uint64_t granted = 0;
    for (std::uint64_t run = 0; run < runs; ++run) {
        const auto seed = support::seed(run);
        const std::size_t quotas = run % 2 == 0 ? 8 : 40, claims = run % 3 == 0 ? 4 : 30;
        CAPTURE(seed, quotas, claims);
        tree t{seed, quotas, claims, run % 5 == 0 ? 40U : 1'000U};
        for (std::uint64_t step = 0; step < steps; ++step) {
            if (t.step()) continue;
            FAIL("the line and its model disagree after step " << step);
        }
        REQUIRE(t.winds_down());
        granted += t.granted();
    }
    CHECK(granted > runs * steps / 50);
}

}  // namespace

TEST_CASE("waiting requests in a tree of quotas are served as if all were tried", "[memory][queue][property]") {
    compare(support::few(100), 2'000);
}

TEST_CASE("waiting requests are served so, for ten million steps", "[.long]") { compare(1'000, 10'000); }

}  // namespace quota_queue_model_test
