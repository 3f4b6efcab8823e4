// SPDX-License-Identifier: Apache-2.0
#include "serving/iteration.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/serving/iteration_batch.hpp>

#include "support/toy_decoder.hpp"

namespace bench::serving {
namespace {

using gpushare::errc;
using gpushare::instant;
using gpushare::iteration_batch;
using gpushare::iteration_options;
using gpushare::ns;
using gpushare::page_move_kind;
using gpushare::step_plan;
using gpushare::text_id;
using gpushare::text_token;
using support::toy_decoder;

using text = std::vector<text_token>;
constexpr int seeds = 5;

// ---- what a step takes

/// A 7B model in half precision on an H100. Computing a token takes 7.7 ms for 2,048 prompt tokens
/// through 4 of 32 layers, as recorded on an H100 (data/h100). Weights (13.5 GB) and the cache (32
/// layers, with 4,096 keys and 4,096 values of two bytes) are read at 3.35 TB/s, and pages move
/// over PCIe at 64 GB/s. Both rates come from NVIDIA's data sheet.
struct cost {
    static constexpr double token_s = 7.7e-3 * (32.0 / 4) / 2048, weights_s = 13.5e9 / 3.35e12,
                            cached_bytes = 32 * 2 * 4096 * 2, cached_s = cached_bytes / 3.35e12,
                            moved_s = cached_bytes / 64e9, copied_s = 2 * cached_s;

    /// Reading the weights overlaps with computing the tokens.
    static double step(double tokens, double context) {
        return std::max(weights_s, tokens * token_s) + context * cached_s;
    }
};
/// 60 GB of a device's 80 GB are for caches.
constexpr std::uint32_t page_tokens = 16, device_pages = 7168;
/// Each request asks for this many tokens, because the text's length isn't known beforehand.
constexpr std::uint32_t most_new = 1024;

// ---- arrivals

struct arrival {
    double at = 0;  // in seconds
    std::uint32_t tenant = 0, prompt = 0, added = 0;
};
constexpr std::size_t requests = 2000;
// More than either side can serve, so that the figure is a throughput.
constexpr double requests_per_s = 60;

/// The arrival times in seconds and the tenants. If a public trace is available, uses consecutive
/// rows of the trace, sped up.
std::vector<std::pair<double, std::uint32_t>> moments(std::uint64_t seed) {
    std::vector<std::pair<double, std::uint32_t>> all;
    std::mt19937_64 any(seed);
#ifdef GPUSHARE_SHARED_DATA
    std::ifstream file(GPUSHARE_SHARED_DATA "/lora_request_trace.csv");
    std::vector<std::pair<double, std::uint32_t>> rows;
    for (std::string line; std::getline(file, line);) {
        int year = 0, month = 0, day = 0, hour = 0, minute = 0, second = 0;
        const auto group = line.find(",G");
        if (group == line.npos ||
            std::sscanf(line.c_str(), "%d-%d-%d %d:%d:%d", &year, &month, &day, &hour, &minute, &second) != 6)
            continue;
        rows.emplace_back(((month == 12 ? 30 : 0) + day) * 86400.0 + hour * 3600 + minute * 60 + second,
                          static_cast<std::uint32_t>(std::stoul(line.substr(group + 2))) % 8);
    }
    std::ranges::sort(rows);
    if (rows.size() > 2 * requests) {
        const auto first = any() % (rows.size() - requests);
        const double begin = rows[first].first, span = rows[first + requests - 1].first - begin;
        for (std::size_t i = 0; i < requests; ++i)
            all.emplace_back((rows[first + i].first - begin) / span * requests / requests_per_s,
                             rows[first + i].second);
        return all;
    }
#endif
    std::exponential_distribution<> gap(requests_per_s);
    for (double at = 0; all.size() < requests;) all.emplace_back(at += gap(any), static_cast<std::uint32_t>(any() % 8));
    return all;
}
/// Adds lengths like those of ShareGPT (means of 161 and 338 tokens: Kwon et al., SOSP 2023, figure
/// 11), exponential, at most 1,024.
std::vector<arrival> arrivals(std::uint64_t seed) {
    std::vector<arrival> all;
    std::mt19937_64 any(seed + 100);
    const auto length = [&](double mean) {
        const double n = std::exponential_distribution<>(1 / mean)(any);
        return static_cast<std::uint32_t>(std::clamp(n, 1.0, 1024.0));
    };
    for (const auto& [at, tenant] : moments(seed)) all.push_back({at, tenant, length(161), length(338)});
    return all;
}
text some_text(std::mt19937_64& any, std::size_t n) {
    text t(n);
    for (auto& x : t) x = 1 + static_cast<text_token>(any() % 30000);
    return t;
}

// ---- tokens a second

/// Takes as long as the model would, and ends each text at the length that its arrival says.
class modelled_engine {
public:
    static constexpr text_token last = 0;

    void knows(text_id id, std::size_t whole) { whole_[id] = whole; }
    void step(const step_plan& plan, std::span<text_token> next) {
        double context = 0;
        for (std::size_t i = 0; i < plan.entries.size(); ++i) {
            const auto known = plan.entries[i].begin + plan.entries[i].tokens.size();
            context += static_cast<double>(known);
            next[i] = known + 1 >= whole_.at(plan.entries[i].id) ? last : 1;
        }
        for (const auto& m : plan.moves)
            now += (m.kind == page_move_kind::copy ? cost::copied_s : cost::moved_s) * page_tokens;
        now += cost::step(plan.tokens, context);
    }
    double now = 0;

private:
    std::map<text_id, std::size_t> whole_;
};

/// Generated tokens per second with batching by iteration. With `together`, texts join only when
/// the batch is empty, at most `together` at a time.
double by_iteration(const std::vector<arrival>& all, std::uint64_t seed, std::size_t together = 0) {
    iteration_batch b({.page_tokens = page_tokens, .pages = device_pages, .step_tokens = 1024, .texts = 1024});
    for (std::uint32_t t = 0; t < 8; ++t) (void)b.set_tenant(t);
    modelled_engine e;
    std::mt19937_64 any(seed);
    double added = 0;
    for (std::size_t came = 0, over = 0; over < all.size();) {
        const bool open = together == 0 || b.empty();
        for (std::size_t n = 0; open && came < all.size() && all[came].at <= e.now && (together == 0 || n < together);
             ++n) {
            const auto& a = all[came++];
            const auto id = b.try_push({.tenant = a.tenant,
                                        .prompt = some_text(any, a.prompt),
                                        .most_new = most_new,
                                        .last = modelled_engine::last},
                                       {})
                                .value();
            e.knows(id, a.prompt + a.added);
        }
        if (run_step(b, e, {}) == 0) e.now = std::max(e.now, all[came].at);
        for (const auto& t : b.take_ended()) {
            if (t.why != errc::none) throw std::runtime_error("a text was lost");
            added += static_cast<double>(t.tokens.size());
            ++over;
        }
    }
    return added / e.now;
}

/// The kinds of static batches, which texts can't join or leave.
enum class batches {
    /// each row is computed until the last text ends, as if all texts were as long as the longest
    padded,
    whole,          ///< each row is computed until the last text ends, at its own length
    ragged,         ///< a finished text costs nothing
    known_lengths,  ///< like ragged, and each text reserves only the memory that it will need
};
/// Generated tokens per second with static batches of at most `most` texts. A batch is also limited
/// by the pages that its texts may need.
double by_batches(const std::vector<arrival>& all, std::size_t most, batches how) {
    double now = 0, added = 0;
    for (std::size_t next = 0; next < all.size();) {
        now = std::max(now, all[next].at);
        std::vector<std::pair<double, double>> batch;  // known tokens, tokens still to come
        double pages = 0, prompts = 0, longest = 0;
        for (; next < all.size() && all[next].at <= now && batch.size() < most; ++next) {
            const auto& a = all[next];
            pages += std::ceil((a.prompt + (how == batches::known_lengths ? a.added : most_new)) / double{page_tokens});
            if (pages > device_pages) break;
            batch.emplace_back(a.prompt, a.added);
            prompts += a.prompt;
            longest = std::max(longest, double(a.prompt));
            added += a.added;
        }
        const auto rows = static_cast<double>(batch.size());
        if (how == batches::padded) prompts = rows * longest;
        now += cost::step(prompts, prompts);
        for (bool all_over = false; !all_over;) {
            double live = 0, context = 0;
            all_over = true;
            for (auto& [known, rest] : batch) {
                if (--rest > 0) ++known;
                all_over = all_over && rest <= 1;
                if (rest <= 0 && how != batches::whole) continue;
                ++live;
                context += known;
            }
            ++longest;
            if (how == batches::padded) context = rows * longest;
            if (live != 0) now += cost::step(how == batches::padded ? rows : live, context);
        }
    }
    return added / now;
}
double best_of_batches(const std::vector<arrival>& all, batches how) {
    double best = 0;
    for (std::size_t most = 8; most <= 1024; most *= 2) best = std::max(best, by_batches(all, most, how));
    return best;
}

void gain(report& r) {
    std::vector<double> gains, over_padded, over_ragged, over_known, ours, theirs;
    double planted = 0;
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
        const auto all = arrivals(seed);
        ours.push_back(by_iteration(all, seed));
        theirs.push_back(best_of_batches(all, batches::whole));
        gains.push_back(ours.back() / theirs.back());
        over_padded.push_back(ours.back() / best_of_batches(all, batches::padded));
        over_ragged.push_back(ours.back() / best_of_batches(all, batches::ragged));
        over_known.push_back(ours.back() / best_of_batches(all, batches::known_lengths));
        planted = std::max(planted, by_iteration(all, seed, 64) / theirs.back());
    }
    r.figure("serving.iteration_batching_gain", gains, "x",
             {at_least(2), planted, "texts that join nobody who runs, 64 together"});
    r.figure("serving.iteration_gain_over_padded_batches", over_padded, "x");
    r.figure("serving.iteration_gain_over_ragged_batches", over_ragged, "x");
    r.figure("serving.iteration_gain_over_known_lengths", over_known, "x");
    r.figure("serving.iteration_tokens_per_s", ours, "tokens/s");
    r.figure("serving.static_batches_tokens_per_s", theirs, "tokens/s");
}

// ---- texts are what they are alone

struct wrongs {
    double mismatches = 0, yielded = 0, lost = 0;
};
/// Runs texts of three tenants with common prefixes and forks. The device has a third of the pages
/// that all texts would need.
wrongs compare(std::uint64_t seed, std::optional<page_move_kind> left_out) {
    const iteration_options o{.page_tokens = 4,
                              .pages = 96,
                              .host_pages = 64,
                              .step_tokens = 48,
                              .on_yield = seed % 2 == 0 ? gpushare::yields_by::recompute : gpushare::yields_by::moving};
    iteration_batch b(o);
    toy_decoder e(4, o.pages, o.host_pages);
    if (left_out) e.leaves_out[static_cast<std::size_t>(*left_out)] = true;
    std::mt19937_64 any(seed);
    std::array<text, 3> prefixes;
    for (std::uint32_t t = 0; t < 3; ++t) {
        (void)b.set_tenant(t, {.weight = t + 1, .pages = 64});
        prefixes[t] = some_text(any, 16);
    }
    std::map<text_id, std::pair<text, std::uint32_t>> expected;
    wrongs w;
    for (int step = 0; step < 3000 || !b.empty(); ++step) {
        if (step < 3000 && b.usage().waiting < 12) {
            const auto t = static_cast<std::uint32_t>(any() % 3), n = static_cast<std::uint32_t>(1 + any() % 40);
            text prompt = prefixes[t];
            prompt.resize(any() % 17);
            const auto more = some_text(any, 1 + any() % 20);
            if (any() % 2 != 0) prompt.insert(prompt.end(), more.begin(), more.end());
            if (prompt.empty()) prompt = more;
            expected[b.try_push({.tenant = t, .prompt = prompt, .most_new = n}, {}).value()] = {prompt, n};
            if (any() % 4 == 0) {
                const auto of =
                    std::next(expected.begin(), static_cast<std::ptrdiff_t>(any() % expected.size()))->first;
                const auto known = b.tokens(of);
                text whole(known.begin(), known.end());
                const auto fork = b.try_fork(of, {.prompt = {1}, .most_new = n}, {});
                whole.push_back(1);
                if (fork) expected[*fork] = {whole, n};
            }
        }
        (void)run_step(b, e, {});
        for (const auto& x : b.take_ended()) {
            const auto& [prompt, n] = expected.at(x.id);
            const bool wrong = x.why != errc::none || x.tokens != toy_decoder::alone(prompt, n);
            w.mismatches += wrong ? 1 : 0;
            w.yielded += x.yields != 0 ? 1 : 0;
            w.lost += wrong && x.yields != 0 ? 1 : 0;
            expected.erase(x.id);
        }
    }
    w.lost += static_cast<double>(expected.size());
    w.mismatches += static_cast<double>(expected.size());
    return w;
}
void exactness(report& r) {
    std::vector<double> mismatches, lost, yielded;
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
        const auto w = compare(seed, {});
        mismatches.push_back(w.mismatches);
        lost.push_back(w.lost);
        yielded.push_back(w.yielded);
    }
    r.figure("serving.iteration_token_mismatches", mismatches, "texts",
             {at_most(0), compare(1, page_move_kind::copy).mismatches,
              "pages that aren't copied before they are written to"},
             statistic::most);
    r.figure("serving.kv_preempted_lost", lost, "texts",
             {at_most(0), compare(1, page_move_kind::to_device).lost, "pages that don't come back from the host"},
             statistic::most);
    r.figure("serving.kv_preempted", yielded, "texts");
}

// ---- shares

/// Counts the tokens that each tenant computes. Each position of a text counts once.
class counting_engine {
public:
    explicit counting_engine(std::uint32_t tenants) : tokens(tenants) {}
    void step(const step_plan& plan, std::span<text_token> next) {
        for (const auto& x : plan.entries) {
            auto& seen = seen_[x.id];
            const auto end = x.begin + x.tokens.size();
            if (end > seen) tokens[x.tenant] += static_cast<double>(end - std::max<std::size_t>(seen, x.begin));
            seen = std::max(seen, end);
        }
        std::ranges::fill(next, 1);
    }
    std::vector<double> tokens;

private:
    std::map<text_id, std::size_t> seen_;
};
/// The largest deviation from a tenant's share, in percentage points, for three tenants that always
/// have work.
double share_error(std::uint64_t seed, std::uint32_t pages, bool told) {
    constexpr std::array<std::uint32_t, 3> weights{1, 2, 5};
    iteration_batch b({.page_tokens = 16, .pages = pages, .step_tokens = 256});
    counting_engine e(3);
    std::mt19937_64 any(seed);
    for (std::uint32_t t = 0; t < 3; ++t) (void)b.set_tenant(t, {.weight = told ? weights[t] : 1});
    for (int step = 0; step < 4000; ++step) {
        for (std::uint32_t t = 0; t < 3; ++t)
            while (b.usage(t).waiting < 64)
                (void)b
                    .try_push({.tenant = t,
                               .prompt = some_text(any, 1 + any() % (100 * (3 - t))),
                               .most_new = 1 + static_cast<std::uint32_t>(any() % (80 * (t + 1)))},
                              {})
                    .value();
        (void)run_step(b, e, {});
        (void)b.take_ended();
    }
    const double sum = e.tokens[0] + e.tokens[1] + e.tokens[2];
    double worst = 0;
    for (std::uint32_t t = 0; t < 3; ++t)
        worst = std::max(worst, std::abs(100 * e.tokens[t] / sum - 100 * weights[t] / 8.0));
    return worst;
}
void fairness(report& r) {
    std::vector<double> error, error_short;
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
        error.push_back(share_error(seed, 16384, true));
        error_short.push_back(share_error(seed, 128, true));
    }
    r.figure("serving.iteration_fairness_pp", error, "pp",
             {at_most(1), share_error(1, 16384, false), "a batch that isn't told the weights"}, statistic::most);
    r.figure("serving.iteration_fairness_pp_pages_short", error_short, "pp", statistic::most);
}

// ---- prefixes

/// The percentage of prompt tokens that didn't have to be computed. Each of eight tenants has three
/// prefixes of 384 tokens, and each prompt starts with one of them.
double saved(std::uint64_t seed, std::uint32_t pages) {
    iteration_batch b({.page_tokens = page_tokens, .pages = pages, .step_tokens = 1024, .texts = 1024});
    modelled_engine e;
    std::mt19937_64 any(seed);
    std::vector<text> prefixes;
    for (std::uint32_t t = 0; t < 8; ++t) (void)b.set_tenant(t);
    for (int i = 0; i < 24; ++i) prefixes.push_back(some_text(any, 384));
    double prompts = 0;
    const auto all = arrivals(seed);
    for (std::size_t came = 0; came < all.size() || !b.empty();) {
        for (; came < all.size() && all[came].at <= e.now; ++came) {
            const auto& a = all[came];
            text prompt = prefixes[a.tenant * 3 + any() % 3];
            const auto more = some_text(any, a.prompt);
            prompt.insert(prompt.end(), more.begin(), more.end());
            prompts += static_cast<double>(prompt.size());
            const auto id =
                b.try_push({.tenant = a.tenant, .prompt = prompt, .most_new = most_new, .last = modelled_engine::last},
                           {})
                    .value();
            e.knows(id, prompt.size() + a.added);
        }
        if (run_step(b, e, {}) == 0 && came < all.size()) e.now = std::max(e.now, all[came].at);
        (void)b.take_ended();
    }
    return 100 * static_cast<double>(b.usage().found) / prompts;
}
void prefixes(report& r) {
    std::vector<double> of_all, of_few;
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
        of_all.push_back(saved(seed, device_pages));
        of_few.push_back(saved(seed, device_pages / 8));
    }
    r.figure("serving.prefix_hit_saving_pct", of_all, "%");
    r.figure("serving.prefix_hit_saving_pct_pages_short", of_few, "%");
}

}  // namespace

void iteration(report& r) {
#ifdef GPUSHARE_SHARED_DATA
    r.setting("arrivals of texts",
              "lora_request_trace.csv, 2,000 in a row, 60 a second, 8 tenants; lengths as of ShareGPT");
#else
    r.setting("arrivals of texts", "by chance, 2,000, 60 a second, 8 tenants; lengths as of ShareGPT");
#endif
    r.setting("a step of a text model", "at least " + rounded(cost::weights_s * 1e3) + " ms; a token " +
                                            rounded(cost::token_s * 1e6) + " us; a token in the cache " +
                                            rounded(cost::cached_s * 1e9) + " ns");
    gain(r);
    exactness(r);
    fairness(r);
    prefixes(r);
}

}  // namespace bench::serving
