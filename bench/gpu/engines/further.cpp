// SPDX-License-Identifier: Apache-2.0
#include "further.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "percentile.hpp"

namespace gpu_engines {
namespace {

constexpr double bar = 2;  // the bar of bench/engines.cpp for loads other than the first
constexpr llm_step_sizes small_step{.layers = 2, .width = 64, .heads = 2, .hidden = 128, .texts = 2, .tokens = 16};

/// Passes per second of each neighbour alone, measured on the first use.
class alone_rates {
public:
    explicit alone_rates(cast& all) : all_(&all) {}
    double of(const busy_part& part) {
        const std::string key = part.tenant->name + (part.as_graph ? " as a graph" : "");
        const auto there = known_.find(key);
        return there != known_.end() ? there->second : known_[key] = alone_per_s(*all_, part);
    }

private:
    cast* all_;
    std::map<std::string, double> known_;
};

double p99_over(const outcome& both, const outcome& alone) {
    const auto over = [](const latencies& a, const latencies& b) {
        return bench::percentile(a.from_arrival_us, 0.99) / bench::percentile(b.from_arrival_us, 0.99);
    };
    const double first = over(both.answers, alone.answers);
    return both.of_second.from_arrival_us.empty() ? first : std::max(first, over(both.of_second, alone.of_second));
}

/// The percentage of requests that take longer than twice the median call alone.
double late_pct(const latencies& a, const latencies& alone) {
    const double deadline = 2 * bench::percentile(alone.call_us, 0.5);
    const auto late = std::ranges::count_if(a.from_arrival_us, [=](double us) { return us > deadline; });
    return 100 * static_cast<double>(late) / static_cast<double>(std::max<std::size_t>(a.from_arrival_us.size(), 1));
}

/// A kind of requests, with the results of running alone.
struct requests {
    requests(cast& all, setting asked) : what(std::move(asked)) {
        what.how = strategy::native;
        alone = colocate(all.timed(what), 1);
    }
    setting what;
    outcome alone;
};

/// Returns the results behind the gate.
outcome report_beside(bench::report& out, cast& all, const std::string& name, const requests& r, const busy_part& part,
                      double passes_alone) {
    setting s = r.what;
    s.busy = {part};
    const auto native = colocate(all.timed(s), 1);
    s.how = strategy::gated;
    auto gated = colocate(all.timed(s), 1);
    out.figure("gpu.engines_p99_vs_alone_" + name, {p99_over(gated, r.alone)}, "x",
               {bench::at_most(bar), p99_over(native, r.alone), "native priorities alone"});
    out.figure("gpu.engines_background_pct_" + name, {100 * gated.busy[0].passes_per_s / passes_alone}, "%");
    return gated;
}

class further {
public:
    further(bench::report& out, cast& all) : out_(out), all_(all), alone_(all) {}

    void graph() {
        const busy_part part{.tenant = all_.busy().front().get(), .as_graph = true};
        (void)report_beside(out_, all_, "inference_graph", of_load(25), part, alone_.of(part));
    }
    void decoding() {
        const place p = all_.where();
        serving_tenant decoder(make_llm_step(all_.is_small() ? small_step : llm_step_sizes{}, p), p, urgency::high,
                               true);
        const requests tokens(all_,
                              {.serving = &decoder, .per_s = 0.25e6 / pass_us(decoder, all_.is_small() ? 10 : 100)});
        const busy_part prefill{.tenant = all_.busy()[1].get()};
        const auto r = report_beside(out_, all_, "prefill_decode", tokens, prefill, alone_.of(prefill));
        const double alone = late_pct(tokens.alone.answers, tokens.alone.answers);
        out_.figure("gpu.engines_decode_late_pp", {late_pct(r.answers, tokens.alone.answers) - alone}, "pp");
    }
    void load(int percent) { beside_each("_load_" + std::to_string(percent), of_load(percent)); }
    void bursts() {
        setting s = of_load(25).what;
        s.burst = 8;
        beside_each("_bursts_of_8", requests(all_, s));
    }
    void two_urgent() {
        serving_tenant& first = all_.serving(strategy::gated, true);
        serving_tenant other(first.engine, all_.where(), urgency::high, true);
        beside_each("_two_urgent",
                    requests(all_, {.serving = &first, .second = &other, .per_s = all_.requests_per_s(true) / 2}));
    }

private:
    [[nodiscard]] requests of_load(int percent) {
        return {all_,
                {.serving = &all_.serving(strategy::gated, true), .per_s = all_.requests_per_s(true) * percent / 25}};
    }
    void beside_each(const std::string& end, const requests& r) {
        for (const auto& t : all_.busy()) {
            const busy_part part{.tenant = t.get()};
            (void)report_beside(out_, all_, t->name + end, r, part, alone_.of(part));
        }
    }

    bench::report& out_;
    cast& all_;
    alone_rates alone_;
};

}  // namespace

void report_further(bench::report& out, cast& all, steady::time_point end) {
    further f(out, all);
    const std::pair<const char*, std::function<void()>> parts[] = {
        {"a graph", [&] { f.graph(); }},
        {"a decoding", [&] { f.decoding(); }},
        {"a load of 50 %", [&] { f.load(50); }},
        {"bursts", [&] { f.bursts(); }},
        {"two urgent tenants", [&] { f.two_urgent(); }},
        {"a load of 5 %", [&] { f.load(5); }},
        {"a load of 75 %", [&] { f.load(75); }},
    };
    constexpr std::chrono::seconds one_takes{20};  // seven runs of 2.3 s, with their controls
    for (const auto& [name, measure] : parts) {
        if (!all.is_small() && steady::now() + one_takes > end)
            std::printf("# left out, for lack of time: %s\n", name);
        else
            measure();
    }
}

}  // namespace gpu_engines
