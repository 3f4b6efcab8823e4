// SPDX-License-Identifier: Apache-2.0
// Arenas against a model that knows, for every slot, whether it is mapped and what its tenant wrote
// there. After any sequence of calls, with failures in between, memory, contents and quotas match
// the model.
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <set>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/memory/virtual_arena.hpp>
#include <gpushare/units.hpp>

#include "support/arena_rig.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"

using namespace gpushare::literals;
using gpushare::errc;
using gpushare::instant;
using gpushare::never;
using gpushare::scrub_policy;
using support::advanced;
using support::arena_rig;
using support::vm_call;

namespace {

constexpr std::uint64_t slots = 16;

struct slot_model {
    enum { empty, mapped, leaving } stage = empty;
    int value = -1;            // that its first and last bytes have; -1: whatever this tenant or nobody left
    std::uint64_t ticket = 0;  // departure
};

/// Two arenas of the first tenant and one of the second, and what should be in them.
class machine {
public:
    machine(std::uint64_t seed, scrub_policy policy)
        : any_(seed), policy_(policy), rig_({.capacity = 14, .scrub = policy, .window = 3}) {
        arenas_.push_back(rig_.arena(rig_.chat, 1, slots));
        arenas_.push_back(rig_.arena(rig_.chat, 1, slots));
        arenas_.push_back(rig_.arena(rig_.code, 2, slots));
        rig_.work_by_itself();
    }

    void step() {
        const auto arena = any_.below(3), first = any_.below(slots), count = 1 + any_.below(slots - first);
        if (any_.one_in(8)) break_something();
        switch (any_.below(8)) {
            case 0:
            case 1:
            case 2: commit(arena, first, 1 + any_.below(std::min<std::uint64_t>(count, 6))); break;
            case 3: decommit(arena, first, 1 + any_.below(std::min<std::uint64_t>(count, 3))); break;
            case 4: decommit_after(arena, first, 1 + any_.below(std::min<std::uint64_t>(count, 3))); break;
            case 5: hand_over(arena, first, 1 + any_.below(std::min<std::uint64_t>(count, 3))); break;
            case 6: reach(); break;
            default: tidy(); break;
        }
        rig_.memory.heal();
        check();
    }

private:
    using model = std::array<slot_model, slots>;

    void* at(std::uint64_t arena, std::uint64_t i) { return advanced(arenas_[arena].data(), rig_.chunks(i)); }
    static bool same_tenant(std::uint64_t a, std::uint64_t b) { return (a < 2) == (b < 2); }

    void break_something() {
        const std::array calls{vm_call::create, vm_call::map, vm_call::unmap};
        rig_.memory.fail(any_.of(calls), 1 + any_.below(4), errc::out_of_memory);
        broken_ = true;
    }

    bool all(std::uint64_t arena, std::uint64_t first, std::uint64_t count, int stage) {
        return std::all_of(models_[arena].begin() + static_cast<std::ptrdiff_t>(first),
                           models_[arena].begin() + static_cast<std::ptrdiff_t>(first + count),
                           [&](const slot_model& s) { return s.stage == stage; });
    }
    gpushare::bytes charged(bool chat) {
        std::uint64_t n = 0;
        for (std::uint64_t a = 0; a < 3; ++a)
            for (const auto& s : models_[a]) n += (a < 2) == chat && s.stage != slot_model::empty ? 1 : 0;
        return rig_.chunks(n);
    }

    void commit(std::uint64_t arena, std::uint64_t first, std::uint64_t count) {
        if (!broken_) finish_departures();
        const bool patient = any_.one_in(2), pending = !departures_.empty();
        std::uint64_t missing = 0;
        for (std::uint64_t i = first; i < first + count; ++i) missing += models_[arena][i].stage == slot_model::empty;
        const auto mine = charged(arena < 2) + rig_.chunks(missing);
        const bool fits =
            mine <= rig_.chunks(12) && charged(true) + charged(false) + rig_.chunks(missing) <= rig_.chunks(14);
        const auto why = arenas_[arena].try_commit(rig_.chunks(first), rig_.chunks(count), patient ? never : instant{});
        INFO("commit of " << count << " at " << first << " of " << arena << ", " << missing << " missing, chat "
                          << charged(true).count() << " code " << charged(false).count() << ": "
                          << to_string(why.code));
        if (missing == 0) CHECK(why.code == errc::none);
        if (why.code == errc::none) {
            // A wait lets the device work, and others leave: only then may it fit although it
            // didn't.
            if (!fits) CHECK(pending);
            finish_departures();
            for (std::uint64_t i = first; i < first + count; ++i) {
                slot_model& s = models_[arena][i];
                if (s.stage == slot_model::empty) {
                    // Never what another tenant wrote: zeros, or what this one did.
                    const int seen = *static_cast<unsigned char*>(at(arena, i));
                    if (policy_ == scrub_policy::on_free) CHECK(seen == 0);
                    if (policy_ != scrub_policy::off && seen != 0) CHECK(written_by(arena < 2, seen));
                    s.value = -1;
                }
                s.stage = slot_model::mapped;
                if (any_.one_in(2)) write(arena, i);
            }
        } else if (fits && !broken_) {
            CHECK(why.code == errc::deadline_exceeded);  // being scrubbed
            CHECK_FALSE(patient);
        }
    }

    // Each tenant writes values of its own: even ones and odd ones.
    void write(std::uint64_t arena, std::uint64_t i) {
        const int value = static_cast<int>(any_.below(100)) * 2 + (arena < 2 ? 2 : 1);
        support::paint(at(arena, i), rig_.chunk, value);
        models_[arena][i].value = value;
    }
    static bool written_by(bool chat, int value) { return (value % 2 == 0) == chat; }

    void decommit(std::uint64_t arena, std::uint64_t first, std::uint64_t count) {
        const auto why = arenas_[arena].try_decommit(rig_.chunks(first), rig_.chunks(count), {}, instant{});
        if (!all(arena, first, count, slot_model::mapped)) CHECK(why.code == errc::unknown_block);
        if (all(arena, first, count, slot_model::mapped) && !broken_) CHECK(why.code == errc::none);
        if (why.code == errc::none)
            for (std::uint64_t i = first; i < first + count; ++i) models_[arena][i] = {};
    }

    void decommit_after(std::uint64_t arena, std::uint64_t first, std::uint64_t count) {
        const bool sane = all(arena, first, count, slot_model::mapped);
        // Whoever waits expects the oldest open point to be one that he waits for.
        const auto used = sane ? rig_.kernels.record() : support::manual_point{};
        const auto why = arenas_[arena].try_decommit_after(rig_.chunks(first), rig_.chunks(count), {&used, 1});
        CHECK(why.code == (sane ? errc::none : errc::unknown_block));
        if (why.code != errc::none) return;
        departures_.push_back({++tickets_, used});
        for (std::uint64_t i = first; i < first + count; ++i) {
            models_[arena][i].stage = slot_model::leaving;
            models_[arena][i].ticket = tickets_;
        }
        finish_departures();
    }

    void hand_over(std::uint64_t from, std::uint64_t first, std::uint64_t count) {
        const auto to = any_.below(3), to_first = any_.below(slots - count + 1);
        const bool sane = all(from, first, count, slot_model::mapped) && all(to, to_first, count, slot_model::empty);
        const auto why = arenas_[from].try_hand_over(rig_.chunks(first), rig_.chunks(count), arenas_[to],
                                                     rig_.chunks(to_first), {}, never);
        INFO("hand over " << count << " of " << from << " to " << to << ": " << to_string(why.code));
        if (!sane) CHECK(why.code != errc::none);
        if (!sane || why.code == errc::over_quota) return;
        // With a failure in between, the bytes may have stayed, or be the pool's.
        if (why.code != errc::none) {
            CHECK(broken_);
            for (std::uint64_t i = 0; i < count; ++i)
                if (!rig_.memory.at(at(from, first + i))) models_[from][first + i] = {};
            return;
        }
        for (std::uint64_t i = 0; i < count; ++i) {
            slot_model& s = models_[to][to_first + i];
            s = std::exchange(models_[from][first + i], {});
            if (!same_tenant(from, to) && policy_ != scrub_policy::off) s.value = 0;
        }
    }

    void reach() {
        rig_.kernels.reach_next();
        finish_departures();
    }
    void tidy() {
        rig_.pool.collect();
        if (any_.one_in(2)) rig_.pool.scrub_ahead(any_.below(4));
        if (any_.one_in(4)) rig_.pool.trim(any_.below(4));
    }

    void finish_departures() {
        rig_.memory.heal();
        broken_ = false;
        rig_.pool.collect();
        while (!departures_.empty() && departures_.front().used.reached()) {
            for (auto& m : models_)
                for (auto& s : m)
                    if (s.stage == slot_model::leaving && s.ticket == departures_.front().ticket) s = {};
            departures_.pop_front();
        }
    }

    void check() {
        finish_departures();
        CHECK(rig_.memory.wrong() == 0);
        std::set<std::uint64_t> chunks;
        std::uint64_t mapped = 0;
        for (std::uint64_t a = 0; a < 3; ++a) {
            std::uint64_t here = 0, leaving = 0;
            for (std::uint64_t i = 0; i < slots; ++i) {
                const slot_model& s = models_[a][i];
                const auto chunk = rig_.memory.at(at(a, i));
                REQUIRE(chunk.has_value() == (s.stage != slot_model::empty));
                if (!chunk) continue;
                CHECK(chunks.insert(*chunk).second);
                ++(s.stage == slot_model::mapped ? here : leaving);
                if (s.value >= 0) CHECK(support::painted(at(a, i), rig_.chunk, s.value));
            }
            CHECK(arenas_[a].committed() == rig_.chunks(here));
            CHECK(arenas_[a].leaving() == rig_.chunks(leaving));
            mapped += here + leaving;
        }
        CHECK(rig_.chat.usage().current == charged(true));
        CHECK(rig_.code.usage().current == charged(false));
        const auto u = rig_.pool.usage();
        CHECK(u.mapped == mapped);
        CHECK(u.made == u.mapped + u.clean + u.dirty + u.scrubbing);
        CHECK(u.made == rig_.memory.chunks());
    }

    struct departure {
        std::uint64_t ticket;
        support::manual_point used;
    };

    support::random any_;
    scrub_policy policy_;
    arena_rig rig_;
    std::vector<arena_rig::arena_type> arenas_;
    std::array<model, 3> models_{};
    std::deque<departure> departures_;
    std::uint64_t tickets_ = 0;
    bool broken_ = false;
};

void run(std::uint64_t rounds, int steps) {
    for (std::uint64_t round = 0; round < rounds; ++round)
        for (const auto policy : {scrub_policy::on_hand_over, scrub_policy::on_free, scrub_policy::off}) {
            const auto seed = support::seed(round);
            CAPTURE(seed, static_cast<int>(policy));
            machine m(seed, policy);
            for (int i = 0; i < steps; ++i) {
                CAPTURE(i);
                m.step();
            }
        }
}

}  // namespace

TEST_CASE("arenas do what the model says", "[memory][arena][model]") { run(support::few(4), 300); }
TEST_CASE("arenas do what the model says, for long", "[.long][memory][arena][model]") { run(60, 1'000); }
