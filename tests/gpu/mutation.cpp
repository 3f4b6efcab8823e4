// SPDX-License-Identifier: Apache-2.0
#include "gpu/mutation.hpp"

#include <algorithm>
#include <array>
#include <fstream>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>

#include "gpu/batch_norm.hpp"
#include "gpu/joined.hpp"
#include "gpu/packing.hpp"
#include "gpu/softmax.hpp"
#include "standins/ptx/runtime.hpp"

namespace jobs {

namespace {

constexpr std::array orders{ptx::turns::fair, ptx::turns::shuffled, ptx::turns::adversarial};

/// A job as it is run to notice something: whole, or failing in one way. Or all conversions of
/// numbers, gradients that are packed, batches that are normalised, a softmax over sharded classes,
/// or arrays of ranks that have joined.
struct trial {
    job what{};
    setting how{};
    std::optional<failure> fails{};
    bool converts = false, packs = false, normalises = false, shards_classes = false, joins = false;
    std::vector<std::byte> before{}, expected{};
    std::vector<bool> comes_to{};  // mutants

    [[nodiscard]] std::string trouble() const {
        if (converts) return trouble_of_conversions();
        if (normalises) return trouble_of_batch_norm(how.seed);
        if (shards_classes) return trouble_of_softmax(how.seed);
        if (joins) return trouble_of_joined(how.seed);
        if (packs) return trouble_of_packing(how.seed) + trouble_of_feedback(how.seed);
        return fails ? trouble_when(*fails, what, how) : jobs::trouble(what, how, before, expected);
    }
    [[nodiscard]] std::string name() const {
        if (converts) return "conversions";
        if (packs) return "packing, seed " + std::to_string(how.seed);
        if (normalises) return "batch normalisation, seed " + std::to_string(how.seed);
        if (shards_classes) return "softmax, seed " + std::to_string(how.seed);
        if (joins) return "joined ranks, seed " + std::to_string(how.seed);
        return to_string(what) + (fails ? ", failing " + std::to_string(static_cast<int>(*fails)) : "") + ", seed " +
               std::to_string(how.seed);
    }
};

class trials {
public:
    explicit trials(std::uint64_t seed) : any_(seed) {}

    void whole(std::uint32_t which, std::uint32_t n) {
        job j = random_job(any_, which);
        j.rounds = 3;
        j.ranks = 2 + n % 2;
        j.root %= j.ranks;
        j.how = static_cast<gs::algorithm>(n % 3);
        j.pinned = n >= 3;
        if (j.count > 150 && j.width == 1) j.count = 150;
        if (n < 3 && j.threads > 1) j.threads = 33;  // more than a warp, and few to wait for
        add(j, n, std::nullopt);
    }
    void failing(std::uint32_t which, std::uint32_t n) {
        job j = random_job(any_, which);
        const auto how = static_cast<failure>(n % failures);
        j.ranks = how == failure::crossing || how == failure::stuck ? 2 : 3;
        j.root %= j.ranks;
        if (j.count > 60 && j.width == 1) j.count = 60;
        if (how == failure::crossing) j.threads = j.blocks = 1;
        add(j, n, how);
    }
    /// Several kinds back to back.
    void medley(std::uint32_t n) {
        job j = random_medley(any_);
        j.rounds = 6;
        j.ranks = 2 + n % 2;
        j.root %= j.ranks;
        if (j.threads > 1) j.threads = 33;
        add(j, n, std::nullopt);
    }
    /// With so few elements that a block has none, and goes around the ring all the same; or more
    /// than a slot holds at once.
    void ring(std::uint32_t which, std::size_t count) {
        job j = random_job(any_, which);
        j.how = gs::algorithm::ring;
        j.ranks = 3;
        j.blocks = 2;
        j.threads = 64;
        j.count = count;
        j.rounds = 2;
        add(j, 1, std::nullopt);
    }

    /// Several rows a block, whose columns other threads take for a group's scale than for the
    /// row's sum.
    void groups(std::uint32_t which, std::uint32_t threads) {
        job j = random_job(any_, which);
        j.ranks = 2;
        j.blocks = j.rounds = 1;
        j.threads = threads;
        j.width = 140;
        j.count = 8 * j.width;
        add(j, 1, std::nullopt);
    }

    /// Coded blocks by a thread alone, or by a team beside threads that are too few for another
    /// one. The ranks are one more than four, which a thread takes at once; a chunk has several
    /// blocks of each, and the last block ends with a team's first piece.
    void coded(std::uint32_t which, std::uint32_t threads) {
        job j = random_job(any_, which);
        j.ranks = 5;
        j.blocks = j.rounds = 1;
        j.threads = threads;
        j.pinned = false;
        j.count = 656;
        add(j, 1, std::nullopt);
    }

    /// In which threads come to the last element of what loops go through, and loops to the last of
    /// the ranks that they have unrolled.
    void edge(std::uint32_t which, std::uint32_t n) {
        constexpr std::array<std::uint32_t, edges> ranks{2, 4, 5, 8, most_ranks, 3, 2}, threads{1, 1, 160, 2, 33, 1, 1},
            widths{512, 5, 23, 2, 512, 1, 1}, counts{60, 24, 60, 28, 60, 12, 12};
        job j = random_job(any_, which);
        j.ranks = ranks[n];
        j.root %= j.ranks;
        if (!in_order_of_threads(j)) j.threads = threads[n];
        j.blocks = 1;
        j.rounds = 1;
        j.pinned = false;
        j.in_shift = j.out_shift = 0;
        // So many vectors that a thread is left with one, or with as many as it moves at once but
        // one.
        j.count = counts[n];
        if (is_by_rows(j)) {
            // As many floats as a slot holds, and so few that rows end in one, two and three
            // columns.
            j.width = widths[n];
            with_kind(which, [&](auto k) {
                if (decltype(k)::in_pairs) j.width += j.width % 2;
            });
            j.count = (j.width > 100 ? 2 : 8) * j.width;
            if (widths[n] == 5)
                j.steps.back() = {makes_something_of_zeros, 64};  // more than what rows end in, so that a maximum tells
        }
        add(j, n, std::nullopt);
        bring_infinities(j, all_.back().before);
        all_.back().expected = on_host(j, all_.back().before);
    }
    static constexpr std::uint32_t edges = 7;
    void conversions() { all_.push_back({.converts = true}); }
    void packing(std::uint64_t seed) { all_.push_back({.how = {.seed = seed}, .packs = true}); }
    void batch_norm(std::uint64_t seed) { all_.push_back({.how = {.seed = seed}, .normalises = true}); }
    void softmax(std::uint64_t seed) { all_.push_back({.how = {.seed = seed}, .shards_classes = true}); }
    void joined(std::uint64_t seed) { all_.push_back({.how = {.seed = seed}, .joins = true}); }

    [[nodiscard]] std::vector<trial>& all() { return all_; }

private:
    void add(const job& j, std::uint32_t n, std::optional<failure> fails) {
        const setting s{.who = fails == failure::crossing ? orders[1 + n % 2] : orders[n % orders.size()],
                        .seed = any_(),
                        .weak_memory = n % 2 != 0 || fails == failure::crossing};
        trial t{.what = j, .how = s, .fails = fails};
        if (!fails) {
            t.before = contents(j, s.seed);
            t.expected = on_host(j, t.before);
        }
        all_.push_back(std::move(t));
    }

    std::mt19937_64 any_;
    std::vector<trial> all_{};
};

/// Some collectives on one device and on several: what they have in common is what orders.
std::vector<trial> trials_of_orders(std::uint64_t seed) {
    trials some(seed);
    constexpr std::array<std::uint32_t, 8> kinds_of_bodies{0, 3, 22, 23, 24, 25, 28, 29};
    for (const std::uint32_t which : kinds_of_bodies)
        for (std::uint32_t n = 0; n < 6; ++n) some.whole(which, n);
    for (const std::uint32_t which : {number_of<coded_all_reduce<float, gs::sum, 128, false>>(),
                                      number_of<coded_all_reduce<gs::bfloat16, gs::average, 32, true>>()})
        for (std::uint32_t n = 0; n < 6; ++n) some.whole(which, n);
    for (const std::uint32_t which : {24U, 25U})
        for (const std::size_t count : {10, 1500}) some.ring(which, count);
    for (std::uint32_t n = 0; n < 4; ++n) some.medley(n);
    for (std::uint64_t n = 0; n < 4; ++n) some.packing(n);
    for (std::uint64_t n = 0; n < 2; ++n) some.batch_norm(n);
    for (const std::uint32_t which : kinds_of_bodies)
        for (std::uint32_t n = 0; n < 2 * failures; ++n) some.failing(which, n);
    for (const std::uint32_t which : {0U, 24U})  // what is seen in a short moment only
        for (std::uint32_t n = 0; n < 8; ++n)
            for (const failure how : {failure::ended_midway, failure::crossing, failure::stuck})
                if (how != failure::stuck || n < 3) some.failing(which, static_cast<std::uint32_t>(how) + n * failures);
    for (const std::uint32_t threads : {31U, 33U})
        some.groups(number_of<fused<gs::bfloat16, grouped, false, false>>(), threads);
    for (std::uint64_t n = 0; n < 2; ++n) some.softmax(n);
    some.joined(0);
    return std::move(some.all());
}

std::vector<trial> trials_of_bounds(std::uint64_t seed) {
    trials some(seed);
    const std::uint32_t of_groups = number_of<fused<gs::bfloat16, grouped, false, false>>();
    const auto whole_and_edges = [&](std::uint32_t first, std::uint32_t end) {
        for (std::uint32_t which = first; which < end; ++which)
            for (std::uint32_t n = 0; n < 6; ++n) some.whole(which, n);
        for (std::uint32_t which = first; which < end; ++which)
            for (std::uint32_t n = 0; n < trials::edges; ++n) some.edge(which, n);
    };
    whole_and_edges(0, of_groups);
    for (const std::uint32_t which : {24U, 25U})
        for (const std::size_t count : {10, 1500}) some.ring(which, count);
    for (const std::uint32_t which : {0U, 24U, 25U, 28U})
        for (std::uint32_t n = 0; n < 2 * failures; ++n) some.failing(which, n);
    some.conversions();
    for (std::uint64_t n = 0; n < 12; ++n) some.packing(n);
    for (std::uint64_t n = 0; n < 6; ++n) some.batch_norm(n);
    whole_and_edges(of_groups, kinds);  // behind the others, whose jobs stay what they were
    for (const std::uint32_t threads : {31U, 33U}) some.groups(of_groups, threads);
    some.coded(number_of<coded_all_reduce<float, gs::sum, 128, false>>(), 12);
    some.coded(number_of<coded_all_reduce<gs::bfloat16, gs::average, 32, true>>(), 1);
    for (std::uint64_t n = 0; n < 12; ++n) some.softmax(n);
    for (std::uint64_t n = 0; n < 8; ++n) some.joined(n);
    return std::move(some.all());
}

}  // namespace

void campaign::run(const sample& s) {
    const auto programs = ptx::runtime::programs();
    auto mutants = s.what == mutated::orders ? ptx::mutants_of(programs) : ptx::bounds_of(programs);
    std::erase_if(mutants,
                  [](const ptx::mutant& m) { return m.place.starts_with("jobs."); });  // which are the tests' own
    auto trials = s.what == mutated::orders ? trials_of_orders(s.seed) : trials_of_bounds(s.seed);
    for (trial& t : trials) {
        for (const ptx::program* p : programs) ptx::forget_what_ran(*p);
        if (const auto wrong = t.trouble(); !wrong.empty())
            throw std::logic_error("wrong before anything was weakened: " + t.name() + "\n" + wrong);
        for (const ptx::mutant& m : mutants) t.comes_to.push_back(ptx::ran(m));
    }
    std::mt19937_64 any(s.seed);
    std::vector<std::size_t> order(trials.size());  // of trials: what noticed something is asked first
    for (std::size_t t = 0; t < order.size(); ++t) order[t] = t;
    for (std::size_t n = s.part; n < mutants.size(); n += s.parts) {
        const ptx::mutant& m = mutants[n];
        if (std::ranges::none_of(trials, [&](const trial& t) { return t.comes_to[n]; })) {
            never_ran_.push_back(m.describe());
            continue;
        }
        ++found_;
        if (any() % s.one_in != 0) continue;
        ++tried_;
        const ptx::mutation broken(m);
        const auto noticed = std::ranges::find_if(
            order, [&](std::size_t t) { return trials[t].comes_to[n] && !trials[t].trouble().empty(); });
        if (noticed == order.end())
            survivors_.push_back(m.describe());
        else
            std::rotate(order.begin(), noticed, noticed + 1);
    }
}

std::string reason_for(const std::string& survivor) {
    std::ifstream list(GPUSHARE_SURVIVING_MUTANTS);
    for (std::string line, reason; std::getline(list, line);) {
        if (line.empty() || line.front() == '#') continue;
        if (!line.starts_with("  ")) {
            reason = line;
        } else if (line.substr(2) == survivor) {
            return reason;
        }
    }
    return "";
}

}  // namespace jobs
