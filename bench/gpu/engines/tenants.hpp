// SPDX-License-Identifier: Apache-2.0
// The tenants of a device, each with a model, a lane and a thread of its own: one that answers
// requests, and one that always has work.
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

    /// On its own thread.
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

/// Of the same model as others may be: only one of those that share it runs at a time.
struct serving_tenant {
    /// `graph`: passes are replayed from a capture, and launched one by one otherwise.
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
