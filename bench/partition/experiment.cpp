// SPDX-License-Identifier: Apache-2.0
#include "partition/experiment.hpp"

#include <time.h>

#include <algorithm>
#include <map>
#include <random>
#include <stdexcept>

#include <gpushare/units.hpp>

namespace bench {

double thread_cpu_us() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}

std::vector<gpushare::placement_request> arrivals(const placement_trace& trace, std::uint64_t seed, double demand) {
    std::mt19937_64 engine(seed);  // not std::shuffle, whose result differs between libraries
    auto order = trace.pods;
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[engine() % i]);
    const double enough = demand * static_cast<double>(trace.nodes.capacity_permille());
    double asked = 0;
    std::size_t arrived = 0;
    for (; asked < enough; ++arrived) {
        if (arrived == trace.pods.size() && asked <= 0)
            throw std::runtime_error(trace.name + ": no pod asks for a GPU");
        if (arrived == order.size()) order.push_back(trace.pods[engine() % trace.pods.size()]);
        asked += static_cast<double>(device_permille(order[arrived]));
    }
    order.resize(arrived);  // the original list may ask for more
    return order;
}

namespace {

/// Fills one device with the most valuable combination of parts. Returns how many parts of each
/// size are taken. Sizes are in permille.
class filling {
public:
    static constexpr std::size_t whole = 1000;

    double solve(std::span<const std::size_t> sizes, std::span<const double> brings, std::vector<double>& taken) {
        for (std::size_t x = 1; x <= whole; ++x) {
            value_[x] = value_[x - 1];
            last_[x] = sizes.size();
            for (std::size_t s = 0; s < sizes.size(); ++s) {
                if (sizes[s] > x || brings[s] + value_[x - sizes[s]] <= value_[x]) continue;
                value_[x] = brings[s] + value_[x - sizes[s]];
                last_[x] = s;
            }
        }
        std::ranges::fill(taken, 0.0);
        for (std::size_t x = whole; x > 0;) {
            if (last_[x] == sizes.size()) {
                --x;
            } else {
                ++taken[last_[x]];
                x -= sizes[last_[x]];
            }
        }
        return value_[whole];
    }

private:
    std::vector<double> value_ = std::vector<double>(whole + 1);
    std::vector<std::size_t> last_ = std::vector<std::size_t>(whole + 1);
};

}  // namespace

double allocation_bound(std::span<const gpushare::placement_request> arrived, std::uint64_t capacity_permille) {
    std::map<std::size_t, double> count;  // number of parts of each size
    for (const auto& r : arrived)
        if (device_permille(r) != 0) count[r.each.permille()] += r.devices;
    std::vector<std::size_t> sizes;
    // Right-hand sides: the number of parts of each size, then the number of devices.
    std::vector<double> amount;
    for (const auto& [size, n] : count) {
        sizes.push_back(size);
        amount.push_back(n);
    }
    amount.push_back(static_cast<double>(capacity_permille) / static_cast<double>(filling::whole));
    const auto rows = amount.size();

    // The revised simplex method. The first basis consists of slack variables. `inverse` is the
    // inverse of the basis, and `brings` has the values of the basis columns.
    std::vector<std::vector<double>> inverse(rows, std::vector<double>(rows));
    for (std::size_t i = 0; i < rows; ++i) inverse[i][i] = 1;
    std::vector<double> solution = amount, brings(rows), price(rows), net(sizes.size()), column(rows),
                        taken(sizes.size());
    double bound = static_cast<double>(capacity_permille);
    filling device;
    constexpr int most_pivots = 5000;
    for (int pivot = 0; pivot < most_pivots; ++pivot) {
        std::ranges::fill(price, 0.0);
        for (std::size_t i = 0; i < rows; ++i)
            for (std::size_t j = 0; j < rows; ++j) price[j] += brings[i] * inverse[i][j];
        // The entering column is a slack variable with a negative price if there is such a
        // variable, and otherwise the most valuable filling at the current prices.
        std::vector<double> entering(rows);
        double gain = 0;
        const auto cheapest = static_cast<std::size_t>(std::ranges::min_element(price) - price.begin());
        constexpr double exact = 1e-7;
        if (price[cheapest] < -exact) {
            entering[cheapest] = 1;
        } else {
            for (std::size_t s = 0; s < sizes.size(); ++s) net[s] = static_cast<double>(sizes[s]) - price[s];
            const double best = device.solve(sizes, net, taken);
            double dual = amount.back() * best;
            for (std::size_t s = 0; s < sizes.size(); ++s) dual += amount[s] * std::max(0.0, price[s]);
            bound = std::min(bound, dual);
            if (best <= price.back() + exact) break;
            for (std::size_t s = 0; s < sizes.size(); ++s) {
                entering[s] = taken[s];
                gain += taken[s] * static_cast<double>(sizes[s]);
            }
            entering.back() = 1;
        }
        std::size_t leaving = rows;
        for (std::size_t i = 0; i < rows; ++i) {
            column[i] = 0;
            for (std::size_t j = 0; j < rows; ++j) column[i] += inverse[i][j] * entering[j];
            if (column[i] > exact && (leaving == rows || solution[i] / column[i] < solution[leaving] / column[leaving]))
                leaving = i;
        }
        if (leaving == rows) break;  // can't happen, because every column uses a limited resource
        const double times = solution[leaving] / column[leaving];
        for (std::size_t i = 0; i < rows; ++i) {
            if (i == leaving) continue;
            solution[i] -= times * column[i];
            for (std::size_t j = 0; j < rows; ++j) inverse[i][j] -= column[i] / column[leaving] * inverse[leaving][j];
        }
        for (double& x : inverse[leaving]) x /= column[leaving];
        solution[leaving] = times;
        brings[leaving] = gain;
    }
    return 100 * bound / static_cast<double>(capacity_permille);
}

}  // namespace bench
