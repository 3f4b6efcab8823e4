// SPDX-License-Identifier: Apache-2.0
// One round of the experiment: every neighbour with every strategy, with the same arrivals. A ratio
// always relates two measurements of the same round, so that a drift of the machine cancels out.
//
//   cast all(place::cuda, false);
//   const round_of r = measure(all, 1);
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "colocation.hpp"
#include "tenants.hpp"

namespace gpu_engines {

/// All tenants. Making and warming up the tenants takes a third of a minute, so this happens once.
class cast {
public:
    /// `small` uses models that a host computes immediately, and very short runs.
    cast(place p, bool small);

    [[nodiscard]] place where() const noexcept { return place_; }
    [[nodiscard]] bool is_small() const noexcept { return small_; }
    /// The tenant with requests, on the stream that the strategy needs. With `graph`, each pass is
    /// a graph.
    [[nodiscard]] serving_tenant& serving(strategy how, bool graph);
    /// A quarter of the rate that the tenant reaches alone.
    [[nodiscard]] double requests_per_s(bool graph) const noexcept { return graph ? graphs_per_s_ : eager_per_s_; }
    /// Inference, prefill and training.
    [[nodiscard]] const std::vector<std::unique_ptr<busy_tenant>>& busy() const noexcept { return busy_; }
    /// Makes another model of the same size as the tenants' models.
    [[nodiscard]] std::unique_ptr<model> make_resnet(bool trains) const;
    /// Sets the warm-up and the length of a run. `of_whole` scales the length.
    [[nodiscard]] setting timed(setting s, double of_whole = 1) const;

private:
    place place_;
    bool small_;
    std::vector<std::unique_ptr<serving_tenant>> serving_;  // plain and urgent, each as a graph and eager
    std::vector<std::unique_ptr<busy_tenant>> busy_;
    double graphs_per_s_ = 0, eager_per_s_ = 0;
};

inline constexpr strategy gates[] = {strategy::held, strategy::gated};
[[nodiscard]] inline std::string key(std::string_view name, strategy how) {
    return std::string(name) + ' ' + std::string(to_string(how));
}

struct round_of {
    latencies alone, eager_alone;  ///< latencies of requests
    /// Passes per second alone, for each neighbour.
    std::map<std::string, double> passes_alone;
    std::map<std::string, outcome> beside, eager_beside;  ///< key: key()
    // The key of these maps is the gate:
    std::map<strategy, double> cost_pct;         ///< without requests, for the worst neighbour
    std::map<strategy, double> alone_cost_pct;   ///< without any other client, for the worst neighbour
    std::map<strategy, double> beside_cost_pct;  ///< inference and prefill together, without weights
    std::map<strategy, double> share_error_pp;   ///< the worse of 30/70 and 70/30
    std::map<strategy, double> tenth_error_pp;   ///< shares of 10 and 90
    /// Shares of 20, 30 and 50 for all three neighbours.
    std::map<strategy, double> thirds_error_pp;
    /// Charge divided by the events' time, for inference and prefill.
    std::map<strategy, std::vector<double>> charged;
};

/// Without a device, measures plain threads only.
[[nodiscard]] round_of measure(cast& all, std::uint64_t seed);

/// Passes per second of a neighbour alone. `urgent` is as in setting.
[[nodiscard]] double alone_per_s(cast& all, const busy_part& part, strategy how = strategy::plain, bool urgent = true);
/// The largest deviation of a neighbour's progress from its share in percent, where progress is
/// relative to the rate alone. `shares` are in the neighbours' order. `told` says whether the gate
/// gets the shares.
[[nodiscard]] double share_error_pp(cast& all, const round_of& r, strategy how,
                                    const std::vector<std::uint32_t>& shares, bool told = true);

}  // namespace gpu_engines
