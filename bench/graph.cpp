// SPDX-License-Identifier: Apache-2.0
// Measures models cut into pieces: how long the pieces run, what the cuts cost, and whether the
// pieces give the results of the whole model. Real models run on ONNX Runtime, on the host device.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <time.h>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/graph/choice.hpp>
#include <gpushare/graph/onnx.hpp>
#include <gpushare/graph/onnxruntime.hpp>
#include <gpushare/graph/openvino.hpp>
#include <gpushare/graph/plan_text.hpp>
#include <gpushare/graph/run.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "arguments.hpp"
#include "graph/http.hpp"
#include "graph/models.hpp"
#include "harness.hpp"

namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using namespace bench::graph;
using gpushare::ns;
using gpushare::graph::cut_model;
using gpushare::graph::model_graph;
using gpushare::graph::onnxruntime_engine;
using gpushare::graph::onnxruntime_library;
using gpushare::graph::split_plan;
using gpushare::graph::tensor;
using tenancy = gpushare::tenancy<gpushare::host::node>;
using tenant = tenancy::tenant;

constexpr std::size_t repeats = 15;
constexpr std::size_t pairs = 30;  // the two sides of a comparison alternate

// The planner's limit for the page detector; below the bar of 5 ms, because some runs take longer
// than the median.
constexpr ns longest = 4700us;
constexpr ns beside_sound = 3ms;
constexpr auto one_of_two = gpushare::sm_width::of_sms(1, 2);

/// The CPU time that this thread has used.
ns thread_time() {
    timespec t{};
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return std::chrono::seconds(t.tv_sec) + ns{t.tv_nsec};
}

/// ONNX Runtime with a clock around each piece. The engine can also leave out one piece and fill
/// that piece's outputs with zeros.
struct watched_engine {
    /// The default of 0 fits models that are fused already.
    explicit watched_engine(const onnxruntime_library& library, int optimisation = 0)
        : engine(library, {.optimisation = optimisation}) {}
    void enqueue(gpushare::host::stream& to, std::uint32_t piece, std::span<const tensor* const> in,
                 std::span<tensor* const> out) {
        to.launch({.blocks = 1}, [this, piece, in, out](const auto&) {
            if (piece == left_out) {
                for (tensor* t : out) std::memset(t->place(t->type, t->shape), 0, t->size());
                return;
            }
            const auto began = std::chrono::steady_clock::now();
            const ns used = thread_time();
            engine.run(piece, in, out);
            computed[piece] = thread_time() - used;
            took[piece] = std::chrono::steady_clock::now() - began;
        });
    }
    /// Adds a piece.
    void add(std::string_view model) {
        engine.add(model);
        took.emplace_back(), computed.emplace_back();
    }
    onnxruntime_engine engine;
    std::vector<ns> took{};      // the last run of each piece
    std::vector<ns> computed{};  // likewise in CPU time, without the time that other programs took
    std::uint32_t left_out = ~0U;
};

/// A model that runs on a tenant, cut as a plan says.
struct loaded_plan {
    loaded_plan(tenant& on, const onnxruntime_library& library, const loaded_model& m, const model_graph& g,
                const split_plan& plan, int optimisation = 0)
        : outputs(g.outputs.size()), engine(library, optimisation), source(&m) {
        for (const auto& p : plan.pieces) engine.add(m.model.extract(plan.nodes(p.places)));
        model = std::make_unique<cut_model<tenant, watched_engine>>(
            on, g, plan, engine, gpushare::graph::cut_options{.submit = {.key = 1, .width = one_of_two}});
    }
    /// Runs the model once; returns the time in milliseconds.
    double run() {
        const auto began = std::chrono::steady_clock::now();
        for (auto& o : outputs) o = {};
        model->run(source->inputs, outputs);
        return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
    }
    std::vector<tensor> outputs;
    watched_engine engine;
    const loaded_model* source;
    std::unique_ptr<cut_model<tenant, watched_engine>> model;
};

/// Cuts after every `each` nodes. If a tensor of unknown type or a value other than a tensor would
/// cross the cut, the cut moves to the next place without such a value.
split_plan plan_of(const model_graph& g, std::uint32_t each) {
    split_plan p{.of_graph = fingerprint(g), .limit = longest};
    p.order.resize(g.nodes.size());
    std::iota(p.order.begin(), p.order.end(), 0U);
    const auto n = static_cast<std::uint32_t>(g.nodes.size());
    const auto lives = lifetimes(g);
    for (std::uint32_t first = 0, at = 1; at <= n; ++at) {
        const auto over = crossing(g, lives, at);
        const bool can = std::ranges::all_of(
            over, [&](std::uint32_t v) { return g.values[v].tensor && size_of(g.values[v].type) != 0; });
        if (at != n && (at - first < each || !can)) continue;
        p.pieces.push_back({{first, at}});
        first = at;
    }
    return p;
}

/// The largest difference between outputs. Infinite if shapes differ, or if values of a type other
/// than float differ.
double error_of(std::span<const tensor> expected, std::span<const tensor> got) {
    double worst = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const tensor &a = expected[i], &b = got[i];
        if (a.type != b.type || a.shape != b.shape) return std::numeric_limits<double>::infinity();
        if (a.size() == 0 || std::memcmp(a.data, b.data, a.size()) == 0) continue;
        if (a.type != gpushare::graph::element::f32) return std::numeric_limits<double>::infinity();
        const auto *x = static_cast<const float*>(a.data), *y = static_cast<const float*>(b.data);
        for (std::size_t k = 0; k < a.size() / sizeof(float); ++k)
            if (std::memcmp(x + k, y + k, sizeof(float)) != 0) {
                const double apart = std::abs(static_cast<double>(x[k]) - static_cast<double>(y[k]));
                worst = std::isnan(apart) ? std::numeric_limits<double>::infinity() : std::max(worst, apart);
            }
    }
    return worst;
}

struct rig {
    gpushare::host::node node{{.devices = 1, .memory = 4_GiB, .sms = 2}};
    tenancy shared{node};
    tenant pages = shared.admit({.name = "pages", .memory = 3_GiB, .compute = 50_pct});
    onnxruntime_library library{GPUSHARE_BENCH_ONNXRUNTIME};
};

/// A plan that makes the whole model one piece.
split_plan whole_plan(const loaded_model& m) {
    return plan_of(m.model.graph(), static_cast<std::uint32_t>(m.model.graph().nodes.size()));
}
/// The model as one piece, exactly as in the file.
loaded_plan whole_of(rig& on, const loaded_model& plain) {
    return {on.pages, on.library, plain, plain.model.graph(), whole_plan(plain), 99};
}

/// Measures pieces one by one in CPU time, which other programs on the core hardly change.
class piece_times {
public:
    /// `values` come from a run of all nodes and must stay where they are.
    piece_times(const loaded_model& of, const model_graph& g, std::span<const tensor> values, onnxruntime_engine& on)
        : of_(&of), graph_(&g), values_(values.begin(), values.end()), engine_(&on) {}
    /// The median of 7 runs after a warm-up. Nothing if the nodes can't run by themselves.
    std::optional<ns> operator()(std::span<const std::uint32_t> nodes) try {
        const std::uint32_t piece = engine_->add(of_->model.extract(nodes));
        const auto edges = edges_of(*graph_, nodes);
        std::vector<const tensor*> in;
        std::vector<tensor*> out;
        for (const std::uint32_t v : edges.inputs) in.push_back(&values_[v]);
        for (const std::uint32_t v : edges.outputs) out.push_back(&values_[v]);
        const auto took = bench::repeated(7, [&] {
            const ns used = thread_time();
            engine_->run(piece, in, out);
            return static_cast<double>((thread_time() - used).count());
        });
        engine_->remove_last();
        return ns{std::llround(bench::value_of(bench::statistic::median, took))};
    } catch (const gpushare::graph::model_error&) {
        return std::nullopt;  // the type of a tensor at the edge is unknown
    }

private:
    const loaded_model* of_;
    const model_graph* graph_;
    std::vector<tensor> values_;
    onnxruntime_engine* engine_;
};

/// A plan, and the history of the search.
struct planned_cuts {
    model_graph graph{};
    split_plan plan{};
    int rounds = 0;        // each round makes a plan and runs all its pieces
    bool settled = false;  // the last round changed no piece, and every piece keeps the limit
};

/// Runs all pieces of the plan in sequence, so that caches are cold, and reports each piece's CPU
/// time to the planner.
void run_and_tell(rig& on, const loaded_model& m, const model_graph& g, gpushare::graph::split_planner& planner) {
    const split_plan plan = planner.plan();
    loaded_plan cut(on.pages, on.library, m, g, plan);
    std::vector<std::vector<double>> took(plan.pieces.size());
    for (std::size_t run = 0; run < repeats; ++run) {
        (void)cut.run();
        for (std::size_t i = 0; run > 0 && i < took.size(); ++i)
            took[i].push_back(gpushare::in_seconds(cut.engine.computed[i]));
    }
    for (std::size_t i = 0; i < took.size(); ++i)
        planner.measured(plan.pieces[i].places,
                         ns{std::llround(1e9 * bench::value_of(bench::statistic::median, took[i]))});
}

/// Searches for a plan whose pieces keep the limit. The planner first measures pieces one by one,
/// then measures the pieces in a run of the whole plan.
planned_cuts planned(rig& on, const loaded_model& m, ns limit) {
    onnxruntime_engine engine(on.library, {.optimisation = 0});
    gpushare::operator_table table;
    gpushare::graph::piece_measurer values(on.pages, m.model, engine, table,
                                           {.engine = "onnxruntime", .warm_up = 0, .repeats = 1});
    values.run_nodes(m.inputs);
    piece_times measure(m, values.graph(), values.values(), engine);
    std::vector<ns> nodes(values.nodes().begin(), values.nodes().end());
    for (std::uint32_t n = 0; n < nodes.size(); ++n) nodes[n] = measure({&n, 1}).value_or(nodes[n]);
    gpushare::graph::split_planner planner(values.graph(), nodes, {.limit = limit});
    planned_cuts found{.graph = values.graph()};
    while (!found.settled && found.rounds < 6) {
        const auto before = refine(planner, [&](auto piece) { return measure(piece); }).pieces.size();
        run_and_tell(on, m, values.graph(), planner);
        ++found.rounds;
        found.settled =
            planner.settled() && planner.plan().pieces.size() == before && planner.plan().longest() <= limit;
    }
    found.plan = planner.plan();
    return found;
}

/// How much longer `first` takes than `second`, in percent, for each pair of runs. The runs
/// alternate, and so does their order within a pair. One run of each warms up and doesn't count.
template <std::invocable A, std::invocable B>
std::vector<double> above_pct(A first, B second) {
    (void)first(), (void)second();
    std::vector<double> all;
    for (std::size_t i = 0; i < pairs; ++i) {
        double a = 0, b = 0;
        if (i % 2 == 0)
            b = second(), a = first();
        else
            a = first(), b = second();
        all.push_back(100 * (a / b - 1));
    }
    return all;
}

/// Reports the cost of the cuts. `whole` is the model as in the file; `fused` is the fused model
/// that was cut, run as one piece.
void overheads(bench::report& r, rig& on, const loaded_model& m, const model_graph& g, loaded_plan& whole,
               loaded_plan& cut) {
    loaded_plan fused(on.pages, on.library, m, m.model.graph(), whole_plan(m)),
        each(on.pages, on.library, m, g, plan_of(g, 1));
    const auto run = [](loaded_plan& p) { return [&p] { return p.run(); }; };
    const auto computed = [](loaded_plan& p) {
        return [&p] {
            (void)p.run();
            return gpushare::in_seconds(std::reduce(p.engine.computed.begin(), p.engine.computed.end()));
        };
    };
    const auto of_cut = above_pct(run(cut), run(whole));
    const auto of_each = above_pct(run(each), run(whole));
    r.figure("graph.cut_overhead_pct", of_cut, "%",
             {bench::at_most(5), bench::value_of(bench::statistic::median, of_each), "a cut behind each node"});
    r.figure("graph.cut_computing_pct", above_pct(computed(cut), computed(whole)), "%");
    r.figure("graph.fused_overhead_pct", above_pct(run(fused), run(whole)), "%");
    r.figure("graph.fused_computing_pct", above_pct(computed(fused), computed(whole)), "%");
}

/// Compares the page detector in pieces with the whole model.
void detector(bench::report& r) {
    rig on;
    const loaded_model plain(page_detector()), m(page_detector(), &on.library);
    const auto [g, plan, rounds, settled] = planned(on, m, longest);
    r.setting("pieces", std::to_string(plan.pieces.size()) + ", planned longest " +
                            std::to_string(plan.longest().count() / 1000) + " us, " +
                            (settled ? "settled" : "not settled") + " after " + std::to_string(rounds) + " rounds");
    loaded_plan whole = whole_of(on, plain), cut(on.pages, on.library, m, g, plan);
    const auto longest_of = [](loaded_plan& p) {
        (void)p.run();
        return 1e3 * gpushare::in_seconds(std::ranges::max(p.engine.took));
    };
    const auto of_whole = bench::repeated(repeats, [&] { return longest_of(whole); });
    r.figure("graph.whole_ms", of_whole, "ms");
    r.figure("graph.longest_piece_ms", bench::repeated(repeats, [&] { return longest_of(cut); }), "ms",
             {bench::at_most(5), bench::value_of(bench::statistic::median, of_whole), "the model as one piece"});
    overheads(r, on, m, g, whole, cut);
    r.figure("graph.held_mib", {static_cast<double>(cut.model->held().count()) / (1 << 20)}, "MiB");
    r.text("plan", to_text(plan, g));
}

using stream = tenant::stream;
using engines = gpushare::graph::engine_set<stream>;

/// Computes nothing, and is therefore fast.
struct idle_engine {
    std::uint32_t add(std::string_view) { return pieces++; }
    void remove_last() { --pieces; }
    void enqueue(stream& to, std::uint32_t, std::span<const tensor* const>, std::span<tensor* const> out) {
        to.launch({.blocks = 1}, [out](const auto&) {
            for (tensor* t : out) std::memset(t->place(t->type, t->shape), 0, t->size());
        });
    }
    std::uint32_t pieces = 0;
};

/// The engines on which a model may run, with the time of each piece.
struct all_engines {
    all_engines(const onnxruntime_library& a, const gpushare::graph::openvino_library& b) : first(a), second(b) {
        set.add("onnxruntime", first);
        set.add("openvino", second);
        set.add("idle", idle);
    }
    void enqueue(stream& to, std::uint32_t piece, std::span<const tensor* const> in, std::span<tensor* const> out) {
        at.resize(set.size());
        at[piece].first = to.record();
        set.enqueue(to, piece, in, out);
        at[piece].second = to.record();
    }
    onnxruntime_engine first;
    gpushare::graph::openvino_engine second;
    idle_engine idle;
    engines set;
    std::vector<std::pair<stream::point, stream::point>> at{};
};

/// A model whose pieces run on the engines that a plan names.
struct chosen_model {
    chosen_model(rig& on, const gpushare::graph::openvino_library& openvino, const gpushare::graph::onnx_model& m,
                 const model_graph& g, const split_plan& plan)
        : outputs(g.outputs.size()), engine(on.library, openvino) {
        engine.set.load(m, plan);
        model = std::make_unique<cut_model<tenant, all_engines>>(
            on.pages, g, plan, engine, gpushare::graph::cut_options{.submit = {.key = 1, .width = one_of_two}});
    }
    /// Runs the model once; returns each piece's time in milliseconds.
    std::vector<double> run(std::span<const tensor> inputs) {
        for (auto& o : outputs) o = {};
        model->run(inputs, outputs);
        std::vector<double> took;
        for (const auto& [begin, end] : engine.at) took.push_back(1e3 * gpushare::in_seconds(elapsed(begin, end)));
        return took;
    }
    std::vector<tensor> outputs;
    all_engines engine;
    std::unique_ptr<cut_model<tenant, all_engines>> model;
};

/// Moves all pieces of a plan to one engine, except the pieces that the engine can't run.
template <class Chooser>
split_plan forced(split_plan p, const std::string& engine, const Chooser& choice) {
    for (auto& piece : p.pieces) {
        const auto nodes = p.nodes(piece.places);
        const bool can = std::ranges::none_of(
            choice.left_out(), [&](const auto& l) { return l.engine == engine && std::ranges::equal(l.nodes, nodes); });
        if (can) piece.engine = engine;
    }
    return p;
}

/// Alternating runs of one model: with the plan's engine for each piece, and with each of the two
/// engines for all pieces.
struct choice_runs {
    using times = std::vector<std::vector<double>>;  // [run][piece]
    times chosen{}, first{}, second{};

    /// For each run, the slower engine's time divided by the chosen engine's time, for one piece or
    /// for all pieces together. The medians over all runs decide which engine is the slower one for
    /// a piece.
    [[nodiscard]] std::vector<double> gains(std::size_t piece = ~std::size_t{0}) const {
        std::vector<double> all;
        for (std::size_t run = 0; run < chosen.size(); ++run) {
            double worse = 0, taken = 0;
            for (std::size_t i = 0; i < chosen[run].size(); ++i) {
                if (piece != ~std::size_t{0} && piece != i) continue;
                worse += (second_is_slower(i) ? second : first)[run][i];
                taken += chosen[run][i];
            }
            all.push_back(worse / taken);
        }
        return all;
    }
    [[nodiscard]] static double median_of(const times& of, std::size_t piece) {
        std::vector<double> took;
        for (const auto& run : of) took.push_back(run[piece]);
        return bench::value_of(bench::statistic::median, took);
    }
    [[nodiscard]] bool second_is_slower(std::size_t piece) const {
        return median_of(second, piece) > median_of(first, piece);
    }
};

std::string described(const choice_runs& runs, const split_plan& plan) {
    std::string text;
    for (std::size_t i = 0; i < plan.pieces.size(); ++i) {
        const auto gains = runs.gains(i);
        const auto [least, most] = std::ranges::minmax(gains);
        char line[160];
        (void)std::snprintf(
            line, sizeof line, "piece %zu %s onnxruntime %.2f ms openvino %.2f ms gain %.2f (%.2f to %.2f)\n", i,
            plan.pieces[i].engine.c_str(), choice_runs::median_of(runs.first, i),
            choice_runs::median_of(runs.second, i), bench::value_of(bench::statistic::median, gains), least, most);
        text += line;
    }
    return text;
}

/// One model with the fastest engine for each piece.
struct choice_rig {
    explicit choice_rig(const model_case& of)
        : plain(of),
          model(gpushare::graph::onnx_model::parse(
              // Fused into ONNX's own operators only.
              optimised(on.library, plain.model.whole(), 1), {.inputs = of.shapes,
                                                              .other_domains = gpushare::graph::onnxruntime_domains(),
                                                              .like = &plain.model.graph()})),
          choice(on.pages, model, all.set, table) {
        choice.run_nodes(plain.inputs);
        gpushare::graph::split_planner planner(choice.graph(), choice.nodes(), {.limit = longest});
        plan = choice.chosen(refine(planner, [&](auto nodes) { return choice.measure(nodes); }));
        const auto names = [&](const char* engine) {
            std::size_t n = 0;
            for (const auto& p : plan.pieces) n += p.engine == engine;
            return std::to_string(n) + " on " + engine;
        };
        pieces = names("onnxruntime") + ", " + names("openvino") + ", " + names("idle") + "; left out " +
                 std::to_string(choice.left_out().size()) + " times of " + std::to_string(planner.measurements());
    }
    chosen_model with(const split_plan& p) { return {on, openvino, model, choice.graph(), p}; }
    /// Gives each piece to the slower engine.
    [[nodiscard]] split_plan slowest(const choice_runs& runs) const {
        split_plan p = forced(plan, "onnxruntime", choice);
        const split_plan other = forced(plan, "openvino", choice);
        for (std::size_t i = 0; i < p.pieces.size(); ++i)
            if (runs.second_is_slower(i)) p.pieces[i].engine = other.pieces[i].engine;
        return p;
    }

    rig on;
    const gpushare::graph::openvino_library openvino{GPUSHARE_BENCH_OPENVINO};
    const loaded_model plain;
    const gpushare::graph::onnx_model model;
    all_engines all{on.library, openvino};
    gpushare::operator_table table;
    gpushare::graph::piece_chooser<tenant, gpushare::graph::onnx_model, std::string> choice;
    split_plan plan;
    std::string pieces;
};

/// Compares the fastest engine for each piece with the slower engine.
void choice(bench::report& r, const model_case& of, const std::string& name) {
    choice_rig rig(of);
    r.setting("pieces" + name, rig.pieces);
    auto best = rig.with(rig.plan), first = rig.with(forced(rig.plan, "onnxruntime", rig.choice)),
         second = rig.with(forced(rig.plan, "openvino", rig.choice));
    const auto& inputs = rig.plain.inputs;
    const auto in_turn = [&](chosen_model& chosen) {
        choice_runs runs;
        for (std::size_t run = 0; run <= repeats; ++run) {
            auto a = chosen.run(inputs), b = first.run(inputs), c = second.run(inputs);
            if (run == 0) continue;  // a warm-up
            runs.chosen.push_back(std::move(a)), runs.first.push_back(std::move(b)),
                runs.second.push_back(std::move(c));
        }
        return runs;
    };
    const choice_runs runs = in_turn(best);
    auto slowest = rig.with(rig.slowest(runs));
    r.figure("graph.choice_gain" + name, runs.gains(), "x",
             {bench::at_least(1.03), bench::value_of(bench::statistic::median, in_turn(slowest).gains()),
              "the slower engine of each piece"});
    r.text("choice" + name, described(runs, rig.plan));
    auto faulty = rig.plan;
    faulty.pieces.back().engine = "idle";
    auto idle = rig.with(faulty);
    loaded_plan whole = whole_of(rig.on, rig.plain);
    (void)whole.run();
    (void)idle.run(inputs);
    r.figure("graph.choice_max_abs_error" + name, {error_of(whole.outputs, best.outputs)}, "",
             {bench::at_most(1e-4), error_of(whole.outputs, idle.outputs),
              "the last piece on an engine that computes nothing"});
}

/// Returns the error of a model in pieces, and the error with one piece left out.
std::pair<double, double> errors(rig& on, const loaded_model& plain, const loaded_model& m) {
    const auto& g = m.model.graph();
    const auto plan = plan_of(g, std::max(static_cast<std::uint32_t>(g.nodes.size()) / 10, 1U));
    loaded_plan whole = whole_of(on, plain);
    loaded_plan cut(on.pages, on.library, m, g, plan), broken(on.pages, on.library, m, g, plan);
    (void)whole.run();
    (void)cut.run();
    const double error = error_of(whole.outputs, cut.outputs);
    double fault = 1;  // without the piece, shapes may be missing, and the run fails
    broken.engine.left_out = static_cast<std::uint32_t>(plan.pieces.size() / 2);
    try {
        (void)broken.run();
        fault = error_of(whole.outputs, broken.outputs);
    } catch (const gpushare::operation_error&) {
    }
    return {error, fault};
}

/// Compares every available model, cut into about ten pieces, with the whole model.
void equality(bench::report& r) {
    rig on;
    std::vector<double> all, unequal;
    double fault = 0;
    std::size_t left_out = 0;
    auto cases = package_cases();
    const auto packages = cases.size();
    for (auto& c : test_data()) cases.push_back(std::move(c));
    for (std::size_t i = 0; i < cases.size(); ++i) try {
            const loaded_model plain(cases[i]);
            if (i >= packages && plain.model.graph().nodes.size() < 2) continue;
            const loaded_model m(cases[i], &on.library);
            const auto [error, planted] = errors(on, plain, m);
            all.push_back(error);
            unequal.push_back(error == 0 ? 0 : 1);
            if (i == 0) fault = planted;
            if (error != 0) std::printf("# %s: %.3g\n", cases[i].path.c_str(), error);
        } catch (const std::exception& e) {
            ++left_out;
            std::printf("# left out: %s: %s\n", cases[i].path.c_str(), e.what());
        }
    r.setting("models tried", std::to_string(all.size()) + ", left out " + std::to_string(left_out));
    r.figure("graph.max_abs_error", all, "", {bench::at_most(0), fault, "a piece of the page detector didn't run"},
             bench::statistic::most);
    const double sum = std::accumulate(unequal.begin(), unequal.end(), 0.0);
    const auto equal_pct = [&](double broken) { return 100 * (1 - broken / static_cast<double>(unequal.size())); };
    r.figure("graph.models_equal_pct", {equal_pct(sum)}, "%",
             {bench::at_least(100), equal_pct(sum + (fault == 0 ? 0 : 1)), "a piece of the page detector didn't run"});
}

/// Runs a model in a loop on a thread of its own.
class background {
public:
    explicit background(loaded_plan& of)
        : thread_([this, &of](const std::stop_token& stop) {
              while (!stop.stop_requested()) {
                  (void)of.run();
                  runs_.fetch_add(1);
              }
          }) {}
    [[nodiscard]] std::uint64_t runs() const { return runs_.load(); }

private:
    std::atomic<std::uint64_t> runs_{0};
    std::jthread thread_;
};

/// The 99th percentile of the time for half a second of sound: 300 requests, one every 20 ms.
double p99_of(loaded_plan& voice) {
    std::vector<double> took;
    auto next = std::chrono::steady_clock::now();
    for (int i = 0; i < 300; ++i) {
        std::this_thread::sleep_until(next += 20ms);
        took.push_back(voice.run());
    }
    std::ranges::sort(took);
    return took[took.size() - 3];
}

/// Measures an urgent tenant's sound beside two tenants that process pages and texts without a
/// pause.
void beside(bench::report& r) {
    rig on;
    tenant texts = on.shared.admit({.name = "texts", .memory = 512_MiB, .compute = 50_pct});
    tenant urgent =
        on.shared.admit({.name = "urgent", .memory = 64_MiB, .compute = 100_pct, .level = gpushare::priority{1}});
    const loaded_model plain_page(page_detector()), page(page_detector(), &on.library), plain_text(text_reader()),
        text(text_reader(), &on.library), sound(voice_detector());
    const auto pages_cut = planned(on, page, beside_sound), lines_cut = planned(on, text, beside_sound);
    loaded_plan voice(urgent, on.library, sound, sound.model.graph(), whole_plan(sound), 99);
    loaded_plan pages(on.pages, on.library, page, pages_cut.graph, pages_cut.plan),
        lines(texts, on.library, text, lines_cut.graph, lines_cut.plan);
    loaded_plan whole_pages(on.pages, on.library, plain_page, plain_page.model.graph(), whole_plan(plain_page), 99),
        whole_lines(texts, on.library, plain_text, plain_text.model.graph(), whole_plan(plain_text), 99);
    std::vector<double> cut, whole, goodput;
    for (int repeat = 0; repeat < 5; ++repeat) {
        const double alone = p99_of(voice);
        const auto rate = [&](auto during) {
            const background a(pages), b(lines);
            const auto began = std::chrono::steady_clock::now();
            during();
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
            return static_cast<double>(a.runs() + b.runs()) / took.count();
        };
        const double undisturbed = rate([] { std::this_thread::sleep_for(6s); });
        goodput.push_back(100 / undisturbed * rate([&] { cut.push_back(p99_of(voice) / alone); }));
        const background a(whole_pages), b(whole_lines);
        whole.push_back(p99_of(voice) / alone);
    }
    r.figure("graph.p99_vs_alone", cut, "x",
             {bench::at_most(4), bench::value_of(bench::statistic::median, whole), "neighbours' models as one piece"});
    r.figure("graph.goodput_pct", goodput, "%");
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const bench::arguments asked(argc, argv, {"detector", "choice", "equality", "beside", "http"});
        bench::start_a_second_thread();
        bench::report r("one host device of 2 SMs; ONNX Runtime, one thread a session");
        r.setting("engine", GPUSHARE_BENCH_ENGINE);
        if (asked.wants("detector")) detector(r);
        if (asked.wants("choice")) {
            choice(r, page_detector(), "");
            choice(r, text_reader(), "_reader");
        }
        if (asked.wants("equality")) equality(r);
        if (asked.wants("beside")) beside(r);
        if (asked.wants("http")) over_http(r);
        r.write(asked.json());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_graph: %s\n", e.what());
        return 1;
    }
}
