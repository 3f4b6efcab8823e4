// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Trees of quotas against a model that is simple enough to be right: random charges, releases,
// resizes, births and deaths, and after each step every figure of every quota is compared.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_change.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

using gpushare::bytes;
using gpushare::errc;
using gpushare::quota;

namespace {

/// What a quota is to do, in sequence: it holds max(guarantee, use) of its parent, whose use that
/// is.
class model {
public:
    model(model* parent, std::uint64_t guaranteed, std::uint64_t burst)
        : parent_(parent), guaranteed_(guaranteed), burst_(burst) {}

    [[nodiscard]] std::uint64_t used() const { return used_; }
    [[nodiscard]] std::uint64_t guaranteed() const { return guaranteed_; }
    [[nodiscard]] std::uint64_t burst() const { return burst_; }
    [[nodiscard]] std::uint64_t peak() const { return peak_; }
    [[nodiscard]] std::uint64_t held() const { return std::max(guaranteed_, used_); }
    [[nodiscard]] std::uint64_t borrowed() const { return held() - guaranteed_; }
    [[nodiscard]] std::uint64_t free() const {
        const auto left = held() - used_;
        if (parent_ == nullptr || burst_ < borrowed()) return left;
        return left + std::min(burst_ - borrowed(), parent_->free());
    }

    errc charge(std::uint64_t n) {
        const auto more = std::max(guaranteed_, used_ + n) - held();
        if (more > 0) {
            if (used_ + n > guaranteed_ + burst_) return errc::over_quota;
            if (parent_ == nullptr) return errc::over_quota;
            if (parent_->charge(more) != errc::none) return errc::out_of_memory;
        }
        used_ += n;
        peak_ = std::max(peak_, used_);
        return errc::none;
    }

    bool release(std::uint64_t n) {
        if (n > used_) return false;
        hold(guaranteed_, used_ - n);
        return true;
    }

    errc resize(std::uint64_t guaranteed, std::uint64_t burst) {
        const auto holds = std::max(guaranteed, used_);
        if (parent_ != nullptr && holds > held() && parent_->charge(holds - held()) != errc::none) return errc::no_room;
        const auto back = std::max(held(), holds) - holds;
        guaranteed_ = guaranteed;
        burst_ = burst;
        if (parent_ != nullptr) parent_->release(back);
        return errc::none;
    }

    /// What is used stays with the parent.
    void end() {
        if (parent_ != nullptr) parent_->release(held() - used_);
    }

private:
    void hold(std::uint64_t guaranteed, std::uint64_t used) {
        const auto before = held();
        guaranteed_ = guaranteed;
        used_ = used;
        if (parent_ != nullptr) parent_->release(before - held());
    }

    model* parent_;
    std::uint64_t guaranteed_, burst_, used_ = 0, peak_ = 0;
};

struct node {
    std::unique_ptr<model> expected;
    std::unique_ptr<quota> real;
    node* parent = nullptr;
    int depth = 0, children = 0;
    std::uint64_t mine = 0;  // charged here by the test itself, or left behind by a child that ended
};

/// A tree of at most four levels. Sizes are small multiples of a unit, so that limits are met all
/// the time.
class tree {
public:
    tree(std::uint64_t seed, std::uint64_t unit) : any_(seed), unit_(unit) {
        const auto limit = some();
        nodes_.push_back(std::make_unique<node>(node{.expected = std::make_unique<model>(nullptr, limit, 0),
                                                     .real = std::make_unique<quota>(bytes{limit})}));
    }
    tree(const tree&) = delete;
    tree& operator=(const tree&) = delete;
    ~tree() {
        while (!nodes_.empty()) nodes_.pop_back();  // children before parents
    }

    /// False if the quota and its model disagree.
    bool step() {
        auto& n = *any_.of(nodes_);
        switch (any_.below(15)) {
            case 14: return transfer(n, *any_.of(nodes_));
            case 12: return exchange();
            case 13: return in_two_steps(n);
            case 0: return birth(n);
            case 1: return death(n);
            case 2: return resize(n);
            case 3: {  // of more than is charged: it must be noticed
                const auto n_bytes = n.expected->used() + 1 + some();
                return !n.real->release(bytes{n_bytes}) && !n.expected->release(n_bytes);
            }
            case 4:
            case 5:
            case 6:
            case 7: {
                const auto size = n.mine == 0 ? 0 : any_.one_in(3) ? n.mine : any_.below(n.mine + 1);
                n.mine -= size;
                return n.real->release(bytes{size}) && n.expected->release(size);
            }
            default: {
                const auto size = any_.one_in(3) ? n.expected->free() + any_.below(2) : some();
                const auto granted = n.expected->charge(size);
                if (granted == errc::none) n.mine += size;
                return n.real->try_charge(bytes{size}) == granted;
            }
        }
    }

    [[nodiscard]] bool agrees() const {
        return std::ranges::all_of(nodes_, [](const auto& n) {
            if (n->real->pressed() != n->real->wanted_back()) return false;  // nothing stays frozen
            const auto real = n->real->usage();
            const auto& want = *n->expected;
            return real.current.count() == want.used() && real.guaranteed.count() == want.guaranteed() &&
                   real.burst.count() == want.burst() && real.borrowed.count() == want.borrowed() &&
                   real.peak.count() == want.peak() && n->real->free().count() == want.free();
        });
    }

    /// Releases and ends everything below the root. True if the root is as good as new.
    bool winds_down() {
        while (nodes_.size() > 1) {
            const auto leaf =
                std::ranges::find_if(nodes_, [](const auto& n) { return n->depth > 0 && n->children == 0; });
            if (!death(**leaf)) return false;
        }
        auto& root = *nodes_.front();
        return root.real->release(bytes{root.mine}) && root.real->usage().current == bytes{};
    }

private:
    std::uint64_t some() { return any_.below(64) * unit_ + (any_.one_in(4) ? any_.below(unit_) : 0); }
    std::uint64_t some_burst() { return any_.one_in(3) ? 0 : some(); }

    bool birth(node& parent) {
        if (parent.depth == 3 || parent.children == 3) return true;
        const auto guaranteed = some(), burst = some_burst();
        const auto fits = parent.expected->charge(guaranteed) == errc::none;
        try {
            nodes_.push_back(std::make_unique<node>(
                node{.expected = std::make_unique<model>(parent.expected.get(), guaranteed, burst),
                     .real = std::make_unique<quota>(*parent.real, bytes{guaranteed}, bytes{burst}),
                     .parent = &parent,
                     .depth = parent.depth + 1}));
            ++parent.children;
            return fits;
        } catch (const gpushare::operation_error& e) {
            return !fits && e.code() == errc::no_room;
        }
    }

    bool death(node& n) {
        if (n.depth == 0 || n.children > 0) return true;
        n.expected->end();
        n.parent->mine += n.mine;
        --n.parent->children;
        std::erase_if(nodes_, [&](const auto& other) { return other.get() == &n; });
        return true;
    }

    bool resize(node& n) {
        const auto guaranteed = any_.one_in(3) ? n.expected->used() : some();
        const auto burst = n.depth == 0 ? 0 : some_burst();
        return n.real->resize(bytes{guaranteed}, bytes{burst}) == n.expected->resize(guaranteed, burst);
    }

    // New limits for some of the quotas right below the root: all of them or none, or they are
    // prepared and given up.
    bool exchange() {
        std::vector<node*> whose;
        for (const auto& n : nodes_)
            if (n->depth == 1 && !any_.one_in(3)) whose.push_back(n.get());
        std::vector<gpushare::quota_limits> wanted;
        for (const node* n : whose)
            wanted.push_back(
                {n->real.get(), bytes{any_.one_in(3) ? n->expected->used() : some()}, bytes{some_burst()}});
        const model root_before = *nodes_.front()->expected;
        std::vector<model> before;
        for (const node* n : whose) before.push_back(*n->expected);
        for (std::size_t i = 0; i < whose.size(); ++i)
            (void)whose[i]->expected->resize(std::min(wanted[i].guaranteed.count(), before[i].guaranteed()),
                                             wanted[i].burst.count());
        std::size_t granted = 0;
        while (granted < whose.size() && whose[granted]->expected->resize(wanted[granted].guaranteed.count(),
                                                                          wanted[granted].burst.count()) == errc::none)
            ++granted;
        gpushare::quota_exchange change(*nodes_.front()->real, wanted);
        const auto why = change.prepare();
        const bool fits = why.code == errc::none, made = fits && !any_.one_in(3);
        if (made) change.commit();
        if (fits && !made) change.abandon();
        if (!made) {
            *nodes_.front()->expected = root_before;
            for (std::size_t i = 0; i < whose.size(); ++i) *whose[i]->expected = before[i];
        }
        return fits == (granted == whose.size()) &&
               (fits || (why.code == errc::no_room && change.refused() == granted));
    }

    // Of a charge of the test's own; to a quota that may be above, below or beside.
    bool transfer(node& from, node& to) {
        if (from.mine == 0 || &from == &to) return true;
        const auto size = any_.below(from.mine + 1);
        auto granted = to.expected->charge(size);
        const bool there = granted == errc::none;
        std::vector<model> before;
        for (const auto& n : nodes_) before.push_back(*n->expected);
        if (there || granted == errc::out_of_memory) (void)from.expected->release(size);
        if (granted == errc::out_of_memory) {
            granted = to.expected->charge(size);
            if (granted != errc::none)
                for (std::size_t i = 0; i < nodes_.size(); ++i) *nodes_[i]->expected = before[i];
        }
        if (granted == errc::none) {
            from.mine -= size;
            to.mine += size;
        }
        const auto moved = gpushare::try_transfer(*from.real, *to.real, bytes{size});
        return moved.why == granted && moved.kept == (granted != errc::none);
    }

    // A charge that is prepared, and then made or given up.
    bool in_two_steps(node& n) {
        const auto size = any_.one_in(3) ? n.expected->free() + any_.below(2) : some();
        gpushare::quota_charge change(*n.real, bytes{size});
        if (const auto why = change.prepare(); why.code != errc::none)
            return why.code == n.expected->charge(size) && why.left == n.expected->free();
        if (any_.one_in(3)) {
            change.abandon();
            return size <= n.expected->free();
        }
        change.commit();
        n.mine += size;
        return n.expected->charge(size) == errc::none;
    }

    support::random any_;
    std::uint64_t unit_;
    std::vector<std::unique_ptr<node>> nodes_;  // the root first; children behind their parents
};

void compare(std::uint64_t runs, std::uint64_t steps) {
    for (std::uint64_t run = 0; run < runs; ++run) {
        const auto seed = support::seed(run);
        const auto unit = std::uint64_t{1} << (run % 4 * 13);
        CAPTURE(seed, unit);
        tree t{seed, unit};
        for (std::uint64_t step = 0; step < steps; ++step) {
            if (t.step() && t.agrees()) continue;
            FAIL("the quota and its model disagree after step " << step);
        }
        REQUIRE(t.winds_down());
    }
}

}  // namespace

TEST_CASE("random trees of quotas do what the model does", "[memory][quota][property]") {
    compare(support::few(100), 1'000);
}

TEST_CASE("random trees of quotas do what the model does, for ten million steps", "[.long]") { compare(1'000, 10'000); }
