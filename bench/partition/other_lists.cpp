// SPDX-License-Identifier: Apache-2.0
#include "partition/other_lists.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <random>
#include <utility>

#include <gpushare/units.hpp>

namespace bench {

namespace {

using gpushare::placement_request;
using gpushare::share;

/// Draws a number between `low` and `high` from 53 random bits, so that every platform draws the
/// same numbers.
double between(double low, double high, std::mt19937_64& engine) {
    return low + (high - low) * static_cast<double>(engine() >> 11) / 9007199254740992.0;
}

std::uint64_t scaled(std::uint64_t x, double factor) {
    return static_cast<std::uint64_t>(std::llround(static_cast<double>(x) * factor));
}

/// Scales a part of a device and rounds to whole percent, as in the list.
share scaled(share s, double factor) {
    const auto percent = std::llround(static_cast<double>(s.permille()) * factor / 10);
    return share::of_permille(static_cast<unsigned>(std::clamp(percent, 1LL, 100LL) * 10));
}

bool takes_a_part(const placement_request& r) { return r.devices == 1 && r.each < share::whole() && r.each != share{}; }

/// Applies `change(pod, engine)` to each pod of the list.
template <class Change>
placement_trace changed(const placement_trace& t, std::uint64_t seed, Change change) {
    std::mt19937_64 engine(seed);
    placement_trace other = t;
    for (auto& p : other.pods) change(p, engine);
    return other;
}

/// Makes parts up to a quarter smaller or larger, with one factor for all parts of the same size:
/// another mix of models.
placement_trace other_sizes(const placement_trace& t, std::uint64_t seed) {
    std::map<unsigned, double> factor;  // key: size
    return changed(t, seed, [&](placement_request& p, std::mt19937_64& engine) {
        if (!takes_a_part(p)) return;
        const auto known = factor.find(p.each.permille());
        const double f = known != factor.end() ? known->second : between(0.75, 1.25, engine);
        factor.emplace(p.each.permille(), f);
        p.each = scaled(p.each, f);
    });
}

/// Makes parts up to a quarter smaller or larger, with a factor for each pod: hardly any two pods
/// stay alike.
placement_trace scattered_sizes(const placement_trace& t, std::uint64_t seed) {
    return changed(t, seed, [](placement_request& p, std::mt19937_64& engine) {
        if (takes_a_part(p)) p.each = scaled(p.each, between(0.75, 1.25, engine));
    });
}

placement_trace half_sizes(const placement_trace& t, std::uint64_t seed) {
    return changed(t, seed, [](placement_request& p, std::mt19937_64& engine) {
        if (p.devices == 1 && engine() % 2 == 0) p.each = scaled(p.each, 0.5);
    });
}

placement_trace with_cores(const placement_trace& t, std::uint64_t seed, double low, double high) {
    std::map<std::uint64_t, double> factor;  // key: cores
    return changed(t, seed, [&](placement_request& p, std::mt19937_64& engine) {
        const auto known = factor.find(p.cpu_milli);
        const double f =
            known != factor.end() ? known->second : std::exp(between(std::log(low), std::log(high), engine));
        factor.emplace(p.cpu_milli, f);
        p.cpu_milli = scaled(p.cpu_milli, f);
    });
}

placement_trace other_cores(const placement_trace& t, std::uint64_t seed) { return with_cores(t, seed, 0.5, 2); }
placement_trace more_cores(const placement_trace& t, std::uint64_t seed) { return with_cores(t, seed, 1.5, 1.5); }
placement_trace fewer_cores(const placement_trace& t, std::uint64_t seed) { return with_cores(t, seed, 0.5, 0.5); }

placement_trace more_gangs(const placement_trace& t, std::uint64_t seed) {
    std::mt19937_64 engine(seed);
    placement_trace other = t;
    for (const auto& p : t.pods)
        if (p.devices > 1 && between(0, 1, engine) < 0.3) other.pods.push_back(p);
    return other;
}

placement_trace any_model(const placement_trace& t, std::uint64_t seed) {
    return changed(t, seed, [](placement_request& p, std::mt19937_64&) { p.models = {}; });
}

placement_trace all_at_once(const placement_trace& t, std::uint64_t seed) {
    return more_gangs(other_cores(other_sizes(t, seed), seed), seed);
}

}  // namespace

halved_trace halves(const placement_trace& t, std::uint64_t seed) {
    std::mt19937_64 engine(seed);
    auto pods = t.pods;
    for (std::size_t i = pods.size(); i > 1; --i) std::swap(pods[i - 1], pods[engine() % i]);
    const auto middle = pods.begin() + static_cast<std::ptrdiff_t>(pods.size() / 2);
    return {{pods.begin(), middle}, {t.name + ", half of it", t.nodes, {middle, pods.end()}}};
}

std::span<const perturbation> perturbations() noexcept {
    static constexpr perturbation all[] = {
        {"other sizes", other_sizes},    {"scattered sizes", scattered_sizes},
        {"half sizes", half_sizes},      {"other cores", other_cores},
        {"more cores", more_cores},      {"fewer cores", fewer_cores},
        {"30 % more gangs", more_gangs}, {"any model", any_model},
        {"all at once", all_at_once},
    };
    return all;
}

}  // namespace bench
