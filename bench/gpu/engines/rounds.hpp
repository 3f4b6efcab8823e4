// SPDX-License-Identifier: Apache-2.0
// One round of the experiment: everything beside everything, by the same arrivals. A ratio is of
// two measurements of one round, so that a drift of the machine cancels out.
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

/// All tenants. Made and warmed up once: that takes a third of a minute.
class cast {
public:
    /// `small`: models that a host runs at once, and runs that are over at once.
    cast(place p, bool small);

    [[nodiscard]] place where() const noexcept { return place_; }
    [[nodiscard]] bool is_small() const noexcept { return small_; }
    /// The tenant with requests, as the strategy wants it; `graph`: its passes are a graph each.
    [[nodiscard]] serving_tenant& serving(strategy how, bool graph);
    /// A quarter of what it does alone.
    [[nodiscard]] double requests_per_s(bool graph) const noexcept { return graph ? graphs_per_s_ : eager_per_s_; }
    /// Inference, prefill and training.
    [[nodiscard]] const std::vector<std::unique_ptr<busy_tenant>>& busy() const noexcept { return busy_; }
    /// Another one of the size of the tenants' models.
    [[nodiscard]] std::unique_ptr<model> make_resnet(bool trains) const;
    /// For how long a run counts, and how long it is before that.
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
    latencies alone, eager_alone;                         ///< of requests
    std::map<std::string, double> passes_alone;           ///< a second, by neighbour
    std::map<std::string, outcome> beside, eager_beside;  ///< by key()
    // By gate:
    std::map<strategy, double> cost_pct;              ///< while nobody is urgent, of the worst neighbour
    std::map<strategy, double> alone_cost_pct;        ///< where nobody else has a client, of the worst neighbour
    std::map<strategy, double> beside_cost_pct;       ///< of inference and prefill together, without weights
    std::map<strategy, double> share_error_pp;        ///< of 30 and 70, and of 70 and 30: the worse
    std::map<strategy, double> tenth_error_pp;        ///< of 10 and 90
    std::map<strategy, double> thirds_error_pp;       ///< of 20, 30 and 50, all three neighbours
    std::map<strategy, std::vector<double>> charged;  ///< over what events measured, of inference and prefill
};

/// Without a device: plain threads alone.
[[nodiscard]] round_of measure(cast& all, std::uint64_t seed);

/// Passes a second of one that runs alone. `urgent`: as in setting.
[[nodiscard]] double alone_per_s(cast& all, const busy_part& part, strategy how = strategy::plain, bool urgent = true);
/// How far neighbours are from these percents, in their order, by what each does alone: the worst.
/// `told`: the gate knows of them.
[[nodiscard]] double share_error_pp(cast& all, const round_of& r, strategy how,
                                    const std::vector<std::uint32_t>& shares, bool told = true);

}  // namespace gpu_engines
