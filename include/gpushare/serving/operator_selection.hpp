// SPDX-License-Identifier: Apache-2.0
// Measures implementations of one operation on the real arrays, each as a submission of a tenant's, and keeps the best in a table
// (compute/operator_table.hpp). Neighbours lose nothing by it: the tenant pays with its own share.
//
//   const gpushare::operator_candidate<stream> all[]{{"ours", [&](auto& to) { ours(to, a, b); }},
//                                                    {"vendor", [&](auto& to) { vendor(to, a, b); }}};
//   const auto best = gpushare::select_operator(chat, table, "matmul", "f16:4096x4096x8", std::span(all));
//   best.candidate;                     // from the table the next time, which table.save() keeps
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/operator_table.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// One implementation.
template <timeline Stream>
struct operator_candidate {
    std::string name{};                     ///< a word
    std::function<void(Stream& to)> run{};  ///< enqueues it; the same arrays each time
    std::function<bool()> right{};  ///< whether its results are right, after its first run; none: taken for right
};

/// How to measure.
struct selection_options {
    int warm_up = 1;          ///< runs of each that don't count
    int repeats = 5;          ///< of each; the median counts
    std::size_t part = 0;     ///< of the tenant's devices
    submit_options submit{};  ///< of each run
};

/// The best candidate for this operation and shape: as the table has it, if that is one of these; else measured, in turns, by the time on
/// the stream, and kept. One that fails or is wrong is left out. Throws operation_error: what the last one failed with if all do
/// (kernel_failed if wrong); invalid_specification without candidates; and as tenant::submit.
template <class Tenant>
operator_choice select_operator(Tenant& by, operator_table& table, std::string_view operation, std::string_view shape,
                                std::span<const operator_candidate<typename Tenant::stream>> candidates,
                                const selection_options& o = {}) {
    if (const auto* known = table.find(operation, shape))
        for (const auto& c : candidates)
            if (c.name == known->candidate) return *known;
    if (candidates.empty())
        raise({.code = errc::invalid_specification, .because = reason::no_candidates}, by.name(),
              "selecting an operator");

    using stream = typename Tenant::stream;
    std::vector<std::vector<ns>> times(candidates.size());
    std::vector<bool> out(candidates.size());
    errc last = errc::none;
    const auto run = [&](std::size_t i) {
        typename stream::point begin, end;
        auto ticket = by.submit(
            [&](stream& to) {
                begin = to.record();
                candidates[i].run(to);
                end = to.record();
            },
            o.submit, {}, o.part);
        (void)ticket.wait();
        const errc status = ticket.status();
        if (status == errc::closed || status == errc::device_lost) raise({status}, by.name(), "selecting an operator");
        if (status == errc::none) return std::optional<ns>(elapsed(begin, end));
        last = status;
        return std::optional<ns>();
    };
    for (int round = -o.warm_up; round < std::max(o.repeats, 1); ++round)
        for (std::size_t i = 0; i < candidates.size(); ++i) {
            if (out[i]) continue;
            const auto took = run(i);
            const bool wrong = took && round == -o.warm_up && candidates[i].right && !candidates[i].right();
            if (wrong) last = errc::kernel_failed;
            out[i] = !took || wrong;
            if (took && round >= 0) times[i].push_back(*took);
        }

    std::optional<operator_choice> best;
    for (std::size_t i = 0; i < candidates.size(); ++i) {
        if (out[i]) continue;
        const auto middle = times[i].begin() + static_cast<std::ptrdiff_t>(times[i].size() / 2);
        std::ranges::nth_element(times[i], middle);
        if (!best || *middle < best->took)
            best = operator_choice{std::string(operation), std::string(shape), candidates[i].name,
                                   std::max(*middle, ns{}), static_cast<std::uint32_t>(candidates.size())};
    }
    if (!best) raise({last}, by.name(), "selecting an operator: none works");
    table.keep(*best);
    return *best;
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
