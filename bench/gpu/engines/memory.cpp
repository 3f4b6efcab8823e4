// SPDX-License-Identifier: Apache-2.0
#include "memory.hpp"

#include <chrono>
#include <cstddef>
#include <deque>

#include <gpushare/units.hpp>

#include "arrivals.hpp"
#include "lane.hpp"
#include "libtorch.hpp"
#include "worker.hpp"

namespace gpu_engines {
namespace {

constexpr int turns = 4;

struct pace {
    std::chrono::milliseconds length;
    int warm;  // number of passes
};

/// Passes per second on the calling thread's stream `s`, with three passes in flight. Calls
/// `behind` after enqueuing each pass.
double passes_per_s(model& m, cudaStream_t s, std::chrono::milliseconds length, const std::function<void()>& behind) {
    std::deque<point> in_flight;
    std::size_t over = 0;
    const auto finish = [&] {
        in_flight.front().wait();
        in_flight.pop_front();
        ++over;
    };
    const auto begin = steady::now();
    do {
        m.step();
        in_flight.emplace_back(s, false);
        behind();
        if (in_flight.size() == 3) finish();
    } while (steady::now() < begin + length);
    while (!in_flight.empty()) finish();
    return 1e6 * static_cast<double>(over) / us_from(begin, steady::now());
}

/// One thread runs both sides, so that cuDNN makes the same choices for both.
memory_ratio measure(const std::function<std::unique_ptr<model>()>& make, gpushare::bytes quota, const pace& p) {
    const auto nothing = [] {};
    const lane way(place::cuda, urgency::normal);
    tenant_memory tenant(quota);
    std::unique_ptr<model> inside, outside;
    const auto in_scope = [&](std::chrono::milliseconds length, const std::function<void()>& behind) {
        double rate = 0;
        tenant.inside([&] { rate = passes_per_s(*inside, tenant.native(), length, behind); });
        return rate;
    };
    const auto in_cache = [&] { return passes_per_s(*outside, way.native(), p.length, nothing); };
    way.use();
    outside = make();
    tenant.inside([&] { inside = make(); });
    wait_for_weights();
    for (int i = 0; i < p.warm; ++i) {
        outside->step();
        tenant.inside([&] { inside->step(); });
    }
    memory_ratio r;
    for (int i = 0; i < turns; ++i) {  // the sides alternate, and so does their order
        const double before = i % 2 == 0 ? in_cache() : 0;
        const double scope = in_scope(p.length, nothing);
        r.of_scope.push_back(scope / (i % 2 == 0 ? before : in_cache()));
    }
    r.of_no_cache = in_scope(p.length, [&] { tenant.give_back(); }) / in_cache();
    return r;
}

}  // namespace

memory_ratio pool_vs_cache(const std::function<std::unique_ptr<model>()>& make, bool small) {
    using namespace std::chrono_literals;
    using namespace gpushare::literals;
    memory_ratio r;
    worker w;
    w.begin([&] { r = measure(make, small ? 64_MiB : 16_GiB, small ? pace{10ms, 2} : pace{500ms, 10}); });
    w.wait();
    return r;
}

}  // namespace gpu_engines
