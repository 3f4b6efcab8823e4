// SPDX-License-Identifier: Apache-2.0
// Real engines that share one device: what each has of it, what the urgent one waits, what is lost against plain threads.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.hpp"
#include "harness.hpp"
#include "serving/parts.hpp"
#include "serving/rig.hpp"
#include "serving/server.hpp"

namespace {

using namespace std::chrono_literals;
using namespace bench::serving;

constexpr int repeats = 5;

/// What the writer had of what reader and writer had, percent: 70 are promised.
double share_of_writer(const outcome& o) { return 100 * o.busy(writer) / (o.busy(writer) + o.busy(reader)); }

/// What the worst tenant was charged beside what the ledger says, percent of the latter.
double metering_error(const outcome& o, std::uint32_t sms) {
    double worst = 0;
    for (const who w : {detector, reader, writer})
        if (const auto used = o.used(w); used.count() != 0)
            worst = std::max(worst, 100 * std::abs(static_cast<double>(sms * o.charged[w].count()) /
                                                       static_cast<double>(used.count()) -
                                                   1));
    return worst;
}

/// Work done by reader and writer per second, in cores that do nothing else.
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

/// The bounds that were published, against the waits by the ledger.
struct bounds {
    std::vector<double> violations, bound_ms, vs_p99;

    void add(const outcome& o) {
        std::vector<double> waits, published;
        double n = 0, unknown = 0;
        for (const auto& d : o.detections) {
            waits.push_back(std::chrono::duration<double, std::milli>(d.waited).count());
            published.push_back(std::chrono::duration<double, std::milli>(d.bound).count());
            unknown += d.bound.count() == 0 ? 1 : 0;
            n += d.waited > d.bound ? 1 : 0;
        }
        std::ranges::sort(waits);
        std::ranges::sort(published);
        const double p99 = waits[waits.size() * 99 / 100], bound = published[published.size() / 2];
        std::printf("#     waits by the ledger: P99 %.2f ms, longest %.2f; bound %.2f, %.0f of %zu without one\n", p99,
                    waits.back(), bound, unknown, waits.size());
        violations.push_back(n);
        bound_ms.push_back(bound);
        vs_p99.push_back(bound / p99);
    }
};

/// All three, on as many SMs as cores: `suffix` is that of the figures.
void mixed(bench::report& r, crew& c, std::uint32_t cores, const std::string& suffix, bool keeps_sm = false) {
    std::vector<double> share, metering, solo_ms, p99_ms, p99, plain_p99_ms, good, idle, pages, tokens;
    bounds published;
    double plain_cores = 0;
    const std::size_t engines = cores;
    std::printf("# three engines, %u SMs, shares of 30 and 70 %%%s\n", cores,
                keeps_sm ? ", the detector keeps one" : "");
    for (int i = 0; i < repeats; ++i) {
        const auto solo = limited(c, {.cores = cores, .readers = 0, .writers = 0, .before = 300ms, .window = 3000ms});
        const auto ours = limited(c, {.cores = cores,
                                      .readers = engines,
                                      .writers = engines,
                                      .keeps_sm = keeps_sm,
                                      .window = cores > 1 ? 7000ms : 4000ms});
        print("behind the limiter", ours);
        std::printf("#     %.1f : %.1f %%\n", 100 - share_of_writer(ours), share_of_writer(ours));
        double plain_goodput = 0, plain_p99 = 0;
        for (std::size_t threads = 1; threads <= engines; ++threads) {
            const auto plain = on_plain_threads(
                c, {.cores = cores, .readers = threads, .writers = threads, .before = 300ms, .window = 2000ms});
            print(("plain threads, " + std::to_string(threads) + " per engine").c_str(), plain);
            plain_cores = std::max(plain_cores, plain.cores);
            if (goodput(plain, c) <= plain_goodput) continue;
            plain_goodput = goodput(plain, c);
            plain_p99 = plain.detector_ms(0.99);
        }
        published.add(ours);
        share.push_back(std::abs(share_of_writer(ours) - 70));
        metering.push_back(metering_error(ours, cores));
        solo_ms.push_back(solo.detector_ms(0.99));
        p99_ms.push_back(ours.detector_ms(0.99));
        p99.push_back(p99_ms.back() / solo_ms.back());
        plain_p99_ms.push_back(plain_p99);
        good.push_back(100 * goodput(ours, c) / plain_goodput);
        idle.push_back(100 - 100 * (ours.busy(detector) + ours.busy(reader) + ours.busy(writer)) /
                                 (cores * std::chrono::duration<double>(ours.to - ours.from).count()));
        pages.push_back(ours.rate(reader));
        tokens.push_back(ours.rate(writer));
    }
    using enum bench::statistic;
    r.figure("serving.share_error_pp" + suffix, share, "pp", most);
    r.figure("serving.metering_error_pct" + suffix, metering, "%", most);
    r.figure("serving.p99_solo_ms" + suffix, solo_ms, "ms");
    r.figure("serving.p99_ms" + suffix, p99_ms, "ms");
    r.figure("serving.p99_vs_solo" + suffix, p99, "x");
    r.figure("serving.p99_plain_threads_ms" + suffix, plain_p99_ms, "ms");
    if (plain_cores > 1.05 * cores)  // then they had more than the SMs that they are compared with
        r.is_void("serving.goodput_pct" + suffix,
                  "plain threads took " + std::to_string(plain_cores) + " cores of " + std::to_string(cores));
    else
        r.figure("serving.goodput_pct" + suffix, good, "%");
    r.figure("serving.idle_while_waiting_pct" + suffix, idle, "%_of_the_SMs");
    r.figure("serving.pages_per_s" + suffix, pages, "pages/s");
    r.figure("serving.tokens_per_s" + suffix, tokens, "tokens/s");
    r.figure("serving.bound_violations" + suffix, published.violations, "violations", most);
    r.figure("serving.bound_ms" + suffix, published.bound_ms, "ms");
    r.figure("serving.bound_vs_p99" + suffix, published.vs_p99, "x");
}

/// What two models side by side get done, over twice what one does: they share the way to the memory. No mix with more than one
/// model's time can do better, whoever decides who runs.
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

/// A writer that submits a token and waits for it, beside a reader that has pages waiting always, on one SM.
void decode(bench::report& r, crew& c) {
    std::vector<double> shares, errors;
    for (int i = 0; i < repeats; ++i) {
        const auto o = limited(
            c, {.cores = 1, .readers = 1, .writers = 1, .decode_loop = true, .detects = false, .window = 4000ms});
        std::printf("# decode loop: %.1f pages/s, %.1f tokens/s\n", o.rate(reader), o.rate(writer));
        shares.push_back(share_of_writer(o));
        errors.push_back(std::abs(shares.back() - 70));
    }
    r.figure("serving.decode_share_pct", shares, "%", bench::statistic::mean);
    r.figure("serving.decode_share_error_pp", errors, "pp", bench::statistic::mean);
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

/// A call left out must show: what finds no fault is no figure.
void check_that_faults_show(crew& c) {
    auto& e = *c.writers[0];
    const std::size_t half = e.script() / 2;
    const auto before = e.mismatches();
    for (std::size_t i = 0; i < half; ++i) e.call();
    e.skip();
    for (std::size_t i = half + 1; i < e.script(); ++i) e.call();
    std::printf("# control, a token left out: %llu answers differ\n",
                static_cast<unsigned long long>(e.mismatches() - before));
    if (e.mismatches() == before) throw std::runtime_error("void: a token left out doesn't show");
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const bench::arguments asked(argc, argv, {"two", "kept", "one", "decode", "cost", "parts", "server", "outside"},
                                     {"--gemma-terms-accepted",
                                      "with Gemma 3 270M, whose weights are under Google's terms, "
                                      "https://ai.google.dev/gemma/terms; else single lines of "
                                      "text are read in its place, and all figures end in _without_model"});
        const bool model = asked.has_option();
        const bool no_engines = asked.wants_only("parts") || asked.wants_only("outside");
        bench::start_a_second_thread();
        bench::report r(
            "serving: OpenVINO, a thread per engine, single precision; each call one block on the host device, real "
            "timing; limiter: "
            "default options, weighted_fair; reader 30 %, model 70 %, detector on the level above, 100 calls a second",
            model || no_engines ? "" : "_without_model");
        if (asked.wants("parts")) parts(r);
        if (asked.wants("outside")) from_outside(r);
        if (asked.wants("server")) through_the_server(r, model);
        if (no_engines || asked.wants_only("server")) {
            r.write(asked.json());
            return 0;
        }
        crew c(model);
        if (model) check_that_faults_show(c);
        const auto wrong = [&](const auto& engines) {
            double sum = 0;
            for (const auto& e : engines) sum += static_cast<double>(e->mismatches());
            return sum;
        };
        const double by_control = wrong(c.writers);
        if (asked.wants("two")) {
            mixed(r, c, 2, "");
            two_models(r, c);
        }
        if (asked.wants("kept")) mixed(r, c, 2, "_keeping_an_sm", true);
        if (asked.wants("one")) mixed(r, c, 1, "_one_sm");
        if (asked.wants("decode")) decode(r, c);
        if (asked.wants("cost")) cost(r, c);
        r.figure("serving.token_mismatches", {wrong(c.writers) - by_control}, "tokens");
        r.figure("serving.other_mismatches", {wrong(c.readers) + static_cast<double>(c.detector->mismatches())},
                 "answers");
        r.write(asked.json());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_serving: %s\n", e.what());
        return 1;
    }
}
