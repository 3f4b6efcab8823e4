// SPDX-License-Identifier: Apache-2.0
// The tenants of a device. Each tenant has a model, a lane and a thread. A serving tenant answers
// requests, and a busy tenant always has work.
//
//   busy_tenant resnet("inference", make_resnet_inference({}, p), p);
//   resnet.warm_up(3);
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "lane.hpp"
#include "models.hpp"
#include "worker.hpp"

namespace gpu_engines {

struct busy_tenant {
    busy_tenant(std::string called, std::unique_ptr<model> m, place p)
        : name(std::move(called)), engine(std::move(m)), way(p, urgency::normal) {}

    /// Runs passes on the tenant's own thread.
    void warm_up(int passes) {
        work.begin([this, passes] {
            way.use();
            for (int i = 0; i < passes; ++i) engine->step();
            way.drain();
        });
        work.wait();
    }

    std::string name;
    std::unique_ptr<model> engine;
    lane way;
    worker work;
};

/// Several serving tenants may share a model, but only one of them may run at a time.
struct serving_tenant {
    /// With `graph`, the tenant captures a pass and replays it; otherwise, each pass launches
    /// kernels one by one.
    serving_tenant(const std::shared_ptr<model>& m, place p, urgency u, bool graph) : engine(m), way(p, u) {
        work.begin([this, graph] {
            way.use();
            pass = [this] { engine->step(); };
            if (graph) pass = way.captured(pass);
            for (int i = 0; i < 3; ++i) pass();
            way.drain();
        });
        work.wait();
    }

    std::shared_ptr<model> engine;
    lane way;
    std::function<void()> pass;
    worker work;
};

}  // namespace gpu_engines
