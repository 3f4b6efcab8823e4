// SPDX-License-Identifier: Apache-2.0
#include "gpu/mutation.hpp"

#include <array>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>

#include "support/ptx/runtime.hpp"

namespace jobs {

namespace {

/// A job as it is run to notice something: whole, or failing in one way.
struct trial {
    job what{};
    setting how{};
    std::optional<failure> fails{};
    std::vector<std::byte> before{}, expected{};

    [[nodiscard]] std::string trouble() const {
        return fails ? trouble_when(*fails, what, how) : jobs::trouble(what, how, before, expected);
    }
};

std::vector<trial> trials_of(std::uint32_t which, std::uint64_t seed) {
    std::mt19937_64 any(seed * kinds + which);
    std::vector<trial> trials;
    const auto add = [&](job j, setting s, std::optional<failure> fails) {
        trial t{.what = j, .how = s, .fails = fails};
        if (!fails) {
            t.before = contents(j, s.seed);
            t.expected = on_host(j, t.before);
        }
        trials.push_back(std::move(t));
    };
    constexpr std::array orders{ptx::turns::fair, ptx::turns::shuffled, ptx::turns::adversarial};
    for (std::uint32_t n = 0; n < 6; ++n) {
        job j = random_job(any, which);
        j.rounds = 3;
        j.ranks = 2 + n % 2;
        j.root %= j.ranks;
        j.how = static_cast<gs::algorithm>(n % 3);
        j.pinned = n >= 3;
        if (j.count > 150 && j.width == 1) j.count = 150;
        if (n < 3 && j.threads > 1) j.threads = 33;  // more than a warp, and few to wait for
        add(j, {.who = orders[n % orders.size()], .seed = any(), .weak_memory = n % 2 != 0}, std::nullopt);
    }
    for (std::uint32_t n = 0; n < 2 * failures; ++n) {
        job j = random_job(any, which);
        j.ranks = 3;
        j.root %= j.ranks;
        if (j.count > 60 && j.width == 1) j.count = 60;
        add(j, {.who = orders[n % orders.size()], .seed = any(), .weak_memory = n % 2 != 0},
            static_cast<failure>(n % failures));
    }
    return trials;
}

}  // namespace

void campaign::run(const sample& s) {
    std::mt19937_64 any(s.seed);
    for (std::uint32_t which = s.kinds_from; which < s.kinds_to; ++which) {
        for (const ptx::program* p : ptx::runtime::programs()) ptx::forget_what_ran(*p);
        const auto trials = trials_of(which, s.seed);
        for (const trial& t : trials)
            if (const auto wrong = t.trouble(); !wrong.empty())
                throw std::logic_error("wrong before anything was weakened: " + jobs::to_string(t.what) +
                                       (t.fails ? ", failing " + std::to_string(static_cast<int>(*t.fails)) : "") +
                                       "\n" + wrong);
        std::vector<ptx::mutant> mutants;
        for (const ptx::program* p : ptx::runtime::programs())
            for (ptx::mutant& m : ptx::mutants_of(*p, is_shared(which) ? ptx::scope::gpu : ptx::scope::sys))
                if (!seen_.contains(m.in->code[m.at].number)) mutants.push_back(std::move(m));
        found_ += mutants.size();
        for (const ptx::mutant& m : mutants) seen_.insert(m.in->code[m.at].number);
        for (const ptx::mutant& m : mutants) {
            if (any() % s.one_in != 0) continue;
            ++tried_;
            const ptx::mutation broken(m);
            bool killed = false;
            for (auto t = trials.begin(); t != trials.end() && !killed; ++t) killed = !t->trouble().empty();
            if (!killed) survivors_.push_back(m.describe());
        }
    }
}

}  // namespace jobs
