// SPDX-License-Identifier: Apache-2.0
// Decides where to cut a model so that no piece takes longer than a limit. Dynamic programming over
// the nodes' times finds the fewest and cheapest cuts. Measurements of whole pieces then correct
// the plan, because engines fuse nodes.
//
//   gpushare::graph::split_planner planner(g, times, {.limit = 5ms});   // times: of each node of g
//   while (const auto piece = planner.next_to_measure())
//       planner.measured(*piece, time_of(planner.plan().nodes(*piece)));
//   for (const auto& p : planner.plan().pieces) run(planner.plan().nodes(p.places));
//
// plan_text.hpp writes a plan as text that people can change. run.hpp has the memory for values
// that cross cuts. Everything here is a value: any thread may read it while no thread changes it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/graph/detail/cut_costs.hpp>
#include <gpushare/graph/detail/node_orders.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// The order in which the nodes run. Fewer values are alive at a cut if branches run one after the
/// other than if they alternate.
enum class split_order : std::uint8_t {
    best,         ///< of the orders below, the one whose plan costs least
    given,        ///< the graph's order
    depth_first,  ///< each node directly before the node that needs it
    narrow,       ///< the next node is the one that leaves the fewest bytes alive
};

/// The limit that a plan keeps, and the costs of cuts.
struct split_options {
    ns limit = std::chrono::milliseconds(5);  ///< the longest time that a piece may take; above 0
    /// The overhead of each piece: the engine's call and the submission.
    ns per_piece = std::chrono::microseconds(20);
    /// The bytes of values that a cut writes or reads per second; above 0.
    bytes bandwidth{10'000'000'000};
    /// The engine's fusions; only the constructor reads them.
    std::span<const fusion_rule> fusions = usual_fusions;
    split_order order = split_order::best;  ///< in which the nodes run
    std::uint32_t measurements = 100;       ///< the most pieces that are measured
    /// The planner doesn't measure further for a plan that saves no more than this.
    ns worth{};
};

/// Consecutive nodes that run as one piece.
struct planned_piece {
    node_range places{};  ///< the places in the plan's order
    ns takes{};           ///< the time, measured or predicted
    bytes crossing{};     ///< size of the values alive at the cut after the piece; 0 for the last
    bool over = false;    ///< whether the piece takes longer than the limit
    /// The engine that runs the piece, one word; empty for the first engine (choice.hpp).
    std::string engine{};

    friend bool operator==(const planned_piece&, const planned_piece&) = default;
};

/// Where a model is cut. People may change a plan: plan_text.hpp writes, reads and checks plans.
struct split_plan {
    std::uint64_t of_graph = 0;          ///< fingerprint() of the graph that the plan is for
    ns limit{};                          ///< the longest time that a piece may take
    std::vector<std::uint32_t> order{};  ///< nodes of the graph, in the order in which they run
    /// The pieces in order; each place of the order is in one piece.
    std::vector<planned_piece> pieces{};

    /// The nodes of the graph at a piece's places. Valid as long as the plan.
    [[nodiscard]] std::span<const std::uint32_t> nodes(node_range places) const noexcept {
        return std::span(order).subspan(places.first, places.size());
    }
    /// The longest piece's length.
    [[nodiscard]] ns longest() const noexcept {
        ns all{};
        for (const auto& p : pieces) all = std::max(all, p.takes);
        return all;
    }
    /// The bytes that cross all cuts together. A value that is alive at two cuts counts twice.
    [[nodiscard]] bytes crossing() const noexcept {
        bytes all{};
        for (const auto& p : pieces) all += p.crossing;
        return all;
    }
    friend bool operator==(const split_plan&, const split_plan&) = default;
};

/// A hash of the graph: of all nodes, values, names, types and shapes. FNV-1a, so adversaries can
/// forge it.
[[nodiscard]] inline std::uint64_t fingerprint(const model_graph& g) noexcept {
    std::uint64_t h = 0xcbf29ce484222325;
    const auto number = [&h](std::uint64_t n) {
        for (int i = 0; i < 8; ++i, n >>= 8) h = (h ^ (n & 0xff)) * 0x100000001b3;
    };
    const auto text = [&](const std::string& s) {
        number(s.size());
        for (const char c : s) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    };
    const auto list = [&](const std::vector<std::uint32_t>& all) {
        number(all.size());
        for (const std::uint32_t i : all) number(i);
    };
    number(g.nodes.size());
    for (const auto& n : g.nodes) text(n.name), text(n.type), list(n.inputs), list(n.outputs);
    number(g.values.size());
    for (const auto& v : g.values) {
        text(v.name);
        for (const std::uint64_t n : {std::uint64_t(v.type), std::uint64_t(v.kind), std::uint64_t(v.ranked),
                                      std::uint64_t(v.tensor), std::uint64_t(v.shape.size())})
            number(n);
        for (const auto& d : v.shape) number(static_cast<std::uint64_t>(d.extent)), text(d.symbol);
    }
    list(g.inputs), list(g.outputs);
    return h;
}

/// The graph with its nodes in `order`. With a plan's order, the plan's places are the indices of
/// the result's nodes. Throws operation_error (invalid_specification) if the nodes can't run in
/// `order`.
[[nodiscard]] inline model_graph reordered(const model_graph& g, std::span<const std::uint32_t> order) {
    model_graph out{.values = g.values, .inputs = g.inputs, .outputs = g.outputs};
    std::vector<bool> named(g.nodes.size());
    for (const std::uint32_t n : order) {
        if (n >= g.nodes.size() || named[n]) break;
        named[n] = true;
        out.nodes.push_back(g.nodes[n]);
    }
    if (out.nodes.size() != g.nodes.size() || order.size() != g.nodes.size() || !wrong(out).empty())
        throw operation_error(errc::invalid_specification, {}, "an order in which the nodes can't run");
    return out;
}

/// The size of each value if the graph tells it, otherwise 0.
[[nodiscard]] inline std::vector<bytes> sizes_of(const model_graph& g) {
    std::vector<bytes> all;
    for (const auto& v : g.values) all.push_back(v.size().value_or(bytes{}));
    return all;
}

/// Finds a plan, and corrects the plan by measurements. A state machine without a clock or an
/// engine.
///
/// The planner's plan is the cheapest plan whose pieces keep the limit. The cost consists of
/// `per_piece` for each piece, the time to read and write values at cuts, and the fusions that cuts
/// undo. A node above the limit is a piece by itself, marked `over`. If no buffer can hold a value
/// between some nodes (a sequence, strings), these nodes stay together like one node.
///
/// An unmeasured piece is predicted to take `per_piece` and the sum of its nodes. A measurement
/// replaces the prediction and scales the times of the piece's nodes, from which the planner
/// predicts other pieces. So the planner splits a piece that takes too long, and joins neighbours
/// that take less than predicted, until every piece is measured and no cheaper plan is in prospect.
class split_planner {
public:
    /// `times` has the time of each node, measured or predicted, in the graph's order. `sizes` has
    /// the size of each value, for callers that know better than the graph (dynamic shapes); an
    /// empty span stands for sizes_of(g). Throws operation_error (invalid_specification) for a
    /// graph that isn't sound, a wrong number of times or sizes, and a limit or bandwidth of 0.
    /// Takes O(nodes^2) at worst, and O(nodes * nodes of a piece) in practice.
    split_planner(const model_graph& g, std::span<const ns> times, const split_options& options = {},
                  std::span<const bytes> sizes = {})
        : options_(options), graph_(fingerprint(g)) {
        require(wrong(g).empty(), "planning cuts: the graph isn't sound");
        require(times.size() == g.nodes.size(), "planning cuts: each node needs a time");
        require(sizes.empty() || sizes.size() == g.values.size(), "planning cuts: each value needs a size");
        require(options.limit > ns{} && options.bandwidth > bytes{}, "planning cuts: the limit or bandwidth is 0");
        options_.per_piece = std::clamp(options.per_piece, ns{}, longest_of(g.nodes.size()));
        const std::vector<bytes> own = sizes.empty() ? sizes_of(g) : std::vector<bytes>();
        choose_order(g, times, sizes.empty() ? std::span<const bytes>(own) : sizes);
        options_.fusions = {};  // the span may not live as long as the planner
        replan();
    }

    /// The best plan as far as times are known.
    [[nodiscard]] const split_plan& plan() const noexcept { return plan_; }
    /// The plan's cost without the time of its nodes: the pieces' overhead and the cuts.
    [[nodiscard]] ns overhead() const noexcept { return overhead_; }
    /// The places in plan().order to measure next, as one piece. No places if the plan is settled.
    [[nodiscard]] std::optional<node_range> next_to_measure() const noexcept { return ask_; }
    /// Whether the planner needs no further measurement.
    [[nodiscard]] bool settled() const noexcept { return !ask_; }
    /// The number of pieces that were measured.
    [[nodiscard]] std::uint32_t measurements() const noexcept { return measured_; }

    /// Takes a measurement, even one that next_to_measure() didn't ask for. `took` is how long the
    /// nodes at `piece` take as one piece, or empty if the engine can't run these nodes by
    /// themselves. Throws operation_error (invalid_specification) if no piece can have these
    /// places.
    void measured(node_range piece, std::optional<ns> took) {
        const auto u = units_of(piece);
        require(u.has_value(), "a measurement of nodes that are no piece");
        if (took) took = std::clamp(*took, ns{}, longest_time);
        known_[*u] = {took, costs_->cost(piece)};
        ++measured_;
        if (took) learn(piece, *took);
        replan();
    }

    /// Takes a plan that a person changed, and fills in the lengths, crossings and marks that this
    /// planner knows or predicts. Throws operation_error (invalid_specification) for another graph
    /// or order, and for a cut that isn't possible.
    [[nodiscard]] split_plan priced(split_plan p) const {
        require(p.order == plan_.order && p.of_graph == graph_, "pricing a plan: the order or the graph is another");
        for (auto& piece : p.pieces) {
            const auto u = units_of(piece.places);
            require(u.has_value(), "pricing a plan: no cut is possible there");
            std::string engine = std::move(piece.engine);
            piece = priced(*u, p.limit);
            piece.engine = std::move(engine);
        }
        return p;
    }

private:
    static constexpr ns longest_time{std::int64_t{1} << 50};  // 13 days
    // The longest time of one of `n` nodes or pieces, so that the sum of all times can't overflow.
    [[nodiscard]] static constexpr ns longest_of(std::size_t n) noexcept {
        return longest_time / static_cast<std::int64_t>(n + 1);
    }
    using unit_range = std::pair<std::uint32_t, std::uint32_t>;  // indices into costs_->cuts()
    struct knowledge {
        std::optional<ns> took{};  // empty if the piece is impossible
        ns cost{};
    };
    // The members are in the order of importance. All but `longest` are sums over pieces, so adding
    // a piece to two beginnings never reverses which beginning is cheaper.
    struct price {
        ns over{};  // the time above the limit, of all pieces together
        ns overhead{};
        std::uint32_t pieces = 0;
        ns longest{};
        friend constexpr auto operator<=>(const price&, const price&) = default;
        friend constexpr bool operator==(const price&, const price&) = default;
    };
    struct step {
        price best{};
        std::uint32_t from = detail::nobody;
    };
    struct found_plan {
        price all{};
        std::vector<unit_range> pieces{};
    };
    enum class pieces_of : std::uint8_t {
        all,       ///< measured or predicted
        measured,  ///< only measured pieces
    };
    enum class lengths : std::uint8_t {
        within_limit,  ///< only pieces within the limit, or of a single unit, which can't be cut
        any,           ///< also pieces above the limit
    };

    static void require(bool holds, const char* otherwise) {
        if (!holds) throw operation_error(errc::invalid_specification, {}, otherwise);
    }

    void choose_order(const model_graph& g, std::span<const ns> times, std::span<const bytes> sizes) {
        std::optional<price> least;
        std::optional<detail::cut_costs> best;
        const auto try_order = [&](split_order kind, auto find) {
            if (options_.order != split_order::best && options_.order != kind) return;
            costs_.emplace(g, find(), sizes, options_.fusions, options_.bandwidth);
            begin_with(times);
            const auto p = search(pieces_of::all, lengths::within_limit)->all;
            if (least && !(p < *least)) return;
            least = p;
            best = costs_;
        };
        try_order(split_order::given, [&] { return detail::given_order(g); });
        try_order(split_order::depth_first, [&] { return detail::depth_first_order(g); });
        try_order(split_order::narrow, [&] { return detail::narrow_order(g, sizes).find(); });
        require(best.has_value(), "planning cuts: no such order");
        costs_ = std::move(best);
        begin_with(times);
    }
    void begin_with(std::span<const ns> times) {
        const ns most = longest_of(times.size());
        times_.clear();
        for (const std::uint32_t n : costs_->order()) times_.push_back(std::clamp(times[n], ns{}, most));
        sum_up();
    }
    void sum_up() {
        until_.assign(1, ns{});
        for (const ns t : times_) until_.push_back(until_.back() + t);
    }

    // Scales the times of the nodes so that their sum equals the piece's time.
    void learn(node_range piece, ns took) {
        const ns sum = until_[piece.behind] - until_[piece.first];
        const ns work = std::max(took - options_.per_piece, ns{});
        const double factor = sum > ns{} ? static_cast<double>(work.count()) / static_cast<double>(sum.count()) : 0;
        for (std::uint32_t p = piece.first; p < piece.behind; ++p)
            times_[p] = sum > ns{} ? ns{std::llround(static_cast<double>(times_[p].count()) * factor)}
                                   : work / static_cast<std::int64_t>(piece.size());
        sum_up();
    }

    [[nodiscard]] std::optional<unit_range> units_of(node_range piece) const {
        const auto& cuts = costs_->cuts();
        const auto first = std::ranges::lower_bound(cuts, piece.first),
                   behind = std::ranges::lower_bound(cuts, piece.behind);
        if (piece.first >= piece.behind || first == cuts.end() || behind == cuts.end() || *first != piece.first ||
            *behind != piece.behind)
            return std::nullopt;
        return unit_range{static_cast<std::uint32_t>(first - cuts.begin()),
                          static_cast<std::uint32_t>(behind - cuts.begin())};
    }
    [[nodiscard]] node_range places_of(unit_range u) const {
        return {costs_->cuts()[u.first], costs_->cuts()[u.second]};
    }
    [[nodiscard]] ns predicted(unit_range u) const {
        const auto at = places_of(u);
        return options_.per_piece + (until_[at.behind] - until_[at.first]);
    }
    [[nodiscard]] ns length(unit_range u) const {
        const auto at = known_.find(u);
        return at != known_.end() && at->second.took ? *at->second.took : predicted(u);
    }
    [[nodiscard]] planned_piece priced(unit_range u, ns limit) const {
        const ns takes = length(u);
        return {places_of(u), takes, costs_->crossing(places_of(u).behind), takes > limit, {}};
    }

    // Considers the piece as the last piece of a plan that ends where the piece ends.
    void relax(std::vector<step>& steps, unit_range u, ns takes, ns cost) const {
        const price& before = steps[u.first].best;
        const price p{before.over + std::max(takes - options_.limit, ns{}), before.overhead + options_.per_piece + cost,
                      before.pieces + 1, std::max(before.longest, takes)};
        step& end = steps[u.second];
        if (end.from == detail::nobody || p < end.best) end = {p, u.first};
    }
    // Considers all unmeasured pieces that begin with unit `first`.
    void relax_predicted(std::vector<step>& steps, detail::cut_costs::piece& piece, std::uint32_t first,
                         lengths which) const {
        const auto& cuts = costs_->cuts();
        piece.begin(cuts[first]);
        for (unit_range u{first, first + 1}; u.second < cuts.size(); ++u.second) {
            const ns takes = predicted(u);
            if (u.second > first + 1 && which == lengths::within_limit && takes > options_.limit) return;
            for (std::uint32_t p = cuts[u.second - 1]; p < cuts[u.second]; ++p) piece.add();
            if (!known_.contains(u)) relax(steps, u, takes, piece.cost());
        }
    }
    // Returns no plan if these pieces don't cover the whole model.
    [[nodiscard]] std::optional<found_plan> search(pieces_of which, lengths longest) const {
        const auto end = static_cast<std::uint32_t>(costs_->cuts().size() - 1);
        std::vector<step> steps(end + 1);
        steps[0].from = 0;
        detail::cut_costs::piece piece(*costs_);
        for (std::uint32_t i = 0; i < end; ++i) {
            if (steps[i].from == detail::nobody) continue;
            if (which == pieces_of::all) relax_predicted(steps, piece, i, longest);
            for (auto k = known_.lower_bound({i, 0}); k != known_.end() && k->first.first == i; ++k) {
                const bool fits =
                    longest == lengths::any || k->first.second == i + 1 || k->second.took <= options_.limit;
                if (k->second.took && fits) relax(steps, k->first, *k->second.took, k->second.cost);
            }
        }
        if (steps[end].from == detail::nobody) return std::nullopt;
        found_plan f{steps[end].best};
        for (std::uint32_t i = end; i > 0; i = steps[i].from) f.pieces.push_back({steps[i].from, i});
        std::ranges::reverse(f.pieces);
        return f;
    }
    // A node that can't run alone needs its neighbours, even if their common piece exceeds the
    // limit.
    [[nodiscard]] std::optional<found_plan> search(pieces_of which) const {
        auto f = search(which, lengths::within_limit);
        return f ? f : search(which, lengths::any);
    }

    // The longest unmeasured piece, which is the likeliest to exceed the limit.
    [[nodiscard]] std::optional<unit_range> unmeasured(const found_plan& f) const {
        std::optional<unit_range> longest;
        for (const unit_range& u : f.pieces)
            if (!known_.contains(u) && (!longest || predicted(u) > predicted(*longest))) longest = u;
        return longest;
    }
    // Measured neighbours that may fit into one piece, if that piece wasn't measured yet.
    [[nodiscard]] std::optional<unit_range> joinable(const found_plan& f) const {
        for (std::size_t i = 1; i < f.pieces.size(); ++i) {
            const unit_range &a = f.pieces[i - 1], &b = f.pieces[i], both{a.first, b.second};
            if (known_.contains(both) || length(a) + length(b) - options_.per_piece > options_.limit) continue;
            const ns apart = known_.at(a).cost + known_.at(b).cost + options_.per_piece;
            if (apart - costs_->cost(places_of(both)) > options_.worth) return both;
        }
        return std::nullopt;
    }

    void replan() {
        ask_.reset();
        auto best = search(pieces_of::all);
        const auto safe = known_.empty() ? std::nullopt : search(pieces_of::measured);
        std::optional<unit_range> ask = best ? unmeasured(*best) : std::nullopt;
        const bool spent = measured_ >= options_.measurements;
        if (safe && (!best || spent || !ask || safe->all.overhead - best->all.overhead <= options_.worth) &&
            (!best || safe->all.over <= best->all.over)) {
            best = safe;
            ask = joinable(*best);
        }
        if (ask && !spent) ask_ = places_of(*ask);
        take(best ? *best : found_plan{{}, {{0, static_cast<std::uint32_t>(costs_->cuts().size() - 1)}}});
    }
    void take(const found_plan& f) {
        plan_ = {.of_graph = graph_, .limit = options_.limit, .order = costs_->order(), .pieces = {}};
        for (const unit_range& u : f.pieces)
            if (u.first != u.second) plan_.pieces.push_back(priced(u, options_.limit));
        overhead_ = f.all.overhead;
    }

    split_options options_;
    std::uint64_t graph_;
    std::optional<detail::cut_costs> costs_{};
    std::vector<ns> times_{};  // the time of the node at each place, as known so far
    std::vector<ns> until_{};  // sums of the times before each place
    std::map<unit_range, knowledge> known_{};
    std::uint32_t measured_ = 0;
    split_plan plan_{};
    ns overhead_{};
    std::optional<node_range> ask_{};
};

/// Measures pieces until the planner is settled. `measure` gets nodes of the graph in the order in
/// which they run, and returns how long they take as one piece. The result is ns, or
/// std::optional<ns> if an engine may be unable to run them.
template <std::invocable<std::span<const std::uint32_t>> Measure>
requires std::convertible_to<std::invoke_result_t<Measure&, std::span<const std::uint32_t>>, std::optional<ns>>
const split_plan& refine(split_planner& planner, Measure measure) {
    while (const auto piece = planner.next_to_measure())
        planner.measured(*piece, measure(planner.plan().nodes(*piece)));
    return planner.plan();
}

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
