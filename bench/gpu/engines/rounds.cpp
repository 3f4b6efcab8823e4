// SPDX-License-Identifier: Apache-2.0
#include "rounds.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

namespace gpu_engines {
namespace {

// Small sizes that a host computes immediately.
constexpr bert_sizes small_bert{.layers = 2, .width = 64, .heads = 2, .tokens = 16, .words = 100};
constexpr resnet_sizes small_resnet{.images = 2, .side = 32, .channels = 8, .classes = 10, .blocks = {1, 1, 1, 1}};
constexpr llm_sizes small_llm{.layers = 1, .width = 64, .heads = 2, .hidden = 128, .tokens = 16, .words = 100};

std::size_t index_of(strategy how, bool graph) { return (how == strategy::plain ? 0 : 2) + (graph ? 0 : 1); }

/// Runs the tenant at full speed beside requests at a quarter of their model's capacity.
outcome beside_requests(cast& all, busy_tenant& t, strategy how, bool graph, std::uint64_t seed) {
    return colocate(all.timed({.serving = &all.serving(how, graph),
                               .busy = {{.tenant = &t}},
                               .how = how,
                               .per_s = all.requests_per_s(graph)}),
                    seed);
}
latencies requests_alone(cast& all, bool graph, std::uint64_t seed) {
    return colocate(all.timed({.serving = &all.serving(strategy::plain, graph), .per_s = all.requests_per_s(graph)}),
                    seed)
        .answers;
}

void measure_eager(cast& all, round_of& r, std::uint64_t seed) {
    r.eager_alone = requests_alone(all, false, seed);
    busy_tenant& t = *all.busy().front();
    for (const strategy how : {strategy::plain, strategy::gated})
        r.eager_beside[key(t.name, how)] = beside_requests(all, t, how, false, seed);
}

/// The cost for the worst neighbour.
double cost_pct(cast& all, const round_of& r, strategy how, bool urgent) {
    double worst = std::numeric_limits<double>::lowest();
    for (const auto& t : all.busy())
        worst = std::max(worst,
                         100 * (1 - alone_per_s(all, {.tenant = t.get()}, how, urgent) / r.passes_alone.at(t->name)));
    return worst;
}
/// The combined progress of inference and prefill, each relative to its rate alone.
double side_by_side(cast& all, const round_of& r, strategy how) {
    setting s{.urgent = false, .how = how};
    for (std::size_t i = 0; i < 2; ++i) s.busy.push_back({.tenant = all.busy()[i].get(), .weight = 0});
    const auto both = colocate(all.timed(std::move(s)), 1).busy;
    double sum = 0;
    for (std::size_t i = 0; i < both.size(); ++i) sum += both[i].passes_per_s / r.passes_alone.at(all.busy()[i]->name);
    return sum;
}

void measure_gate(cast& all, round_of& r, strategy how, double plainly_side_by_side) {
    r.cost_pct[how] = cost_pct(all, r, how, true);
    r.alone_cost_pct[how] = cost_pct(all, r, how, false);
    r.beside_cost_pct[how] = 100 * (1 - side_by_side(all, r, how) / plainly_side_by_side);
    r.share_error_pp[how] = std::max(share_error_pp(all, r, how, {30, 70}), share_error_pp(all, r, how, {70, 30}));
    r.tenth_error_pp[how] = share_error_pp(all, r, how, {10, 90});
    r.thirds_error_pp[how] = share_error_pp(all, r, how, {20, 30, 50});
    // Training is limited by its host. The gaps between its launches aren't device time, but they
    // lie between the events, so training is left out.
    for (std::size_t i = 0; i < 2; ++i)
        r.charged[how].push_back(charged_over_measured(*all.busy()[i], how, all.is_small() ? 10 : 60));
}

}  // namespace

cast::cast(place p, bool small) : place_(p), small_(small) {
    const std::shared_ptr<model> bert = make_bert(small ? small_bert : bert_sizes{}, p);
    for (const urgency u : {urgency::normal, urgency::high})
        for (const bool graph : {true, false}) serving_.push_back(std::make_unique<serving_tenant>(bert, p, u, graph));
    const auto add = [&](const char* name, std::unique_ptr<model> m) {
        busy_.push_back(std::make_unique<busy_tenant>(name, std::move(m), p));
        busy_.back()->warm_up(5);
    };
    add("inference", make_resnet(false));
    add("prefill", make_llm_prefill(small ? small_llm : llm_sizes{}, p));
    add("training", make_resnet(true));
    graphs_per_s_ = 0.25e6 / pass_us(serving(strategy::plain, true), small ? 10 : 300);
    eager_per_s_ = 0.25e6 / pass_us(serving(strategy::plain, false), small ? 10 : 100);
}

serving_tenant& cast::serving(strategy how, bool graph) { return *serving_[index_of(how, graph)]; }

std::unique_ptr<model> cast::make_resnet(bool trains) const {
    const resnet_sizes pictures = small_ ? small_resnet : resnet_sizes{};
    return trains ? make_resnet_training(pictures, place_) : make_resnet_inference(pictures, place_);
}

setting cast::timed(setting s, double of_whole) const {
    using namespace std::chrono_literals;
    const std::chrono::nanoseconds whole = small_ ? 100ms : 2s;
    s.warm = small_ ? 30ms : 300ms;
    s.length = std::chrono::nanoseconds{static_cast<std::int64_t>(of_whole * static_cast<double>(whole.count()))};
    return s;
}

double alone_per_s(cast& all, const busy_part& part, strategy how, bool urgent) {
    return colocate(all.timed({.urgent = urgent, .busy = {part}, .how = how}, 0.5), 1).busy[0].passes_per_s;
}

double share_error_pp(cast& all, const round_of& r, strategy how, const std::vector<std::uint32_t>& shares, bool told) {
    setting s{.urgent = false, .how = how};
    for (std::size_t i = 0; i < shares.size(); ++i)
        s.busy.push_back({.tenant = all.busy()[i].get(), .weight = told ? shares[i] : 1});
    const auto done = colocate(all.timed(std::move(s)), 1).busy;
    std::vector<double> of_alone;
    double sum = 0, worst = 0;
    for (std::size_t i = 0; i < shares.size(); ++i) {
        of_alone.push_back(done[i].passes_per_s / r.passes_alone.at(all.busy()[i]->name));
        sum += of_alone.back();
    }
    for (std::size_t i = 0; i < shares.size(); ++i)
        worst = std::max(worst, std::abs(100 * of_alone[i] / sum - shares[i]));
    return worst;
}

round_of measure(cast& all, std::uint64_t seed) {
    round_of r;
    r.alone = requests_alone(all, true, seed);
    const bool device = all.where() == place::cuda;
    for (const auto& t : all.busy()) {
        r.passes_alone[t->name] = alone_per_s(all, {.tenant = t.get()});
        for (const strategy how :
             {strategy::plain, strategy::native, strategy::acquire, strategy::held, strategy::gated})
            if (device || how == strategy::plain)
                r.beside[key(t->name, how)] = beside_requests(all, *t, how, true, seed);
    }
    if (!device) return r;
    measure_eager(all, r, seed);
    const double plainly = side_by_side(all, r, strategy::plain);
    for (const strategy how : gates) measure_gate(all, r, how, plainly);
    return r;
}

}  // namespace gpu_engines
