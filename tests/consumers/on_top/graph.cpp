// SPDX-License-Identifier: Apache-2.0
// A program with the umbrella of graph/ alone: a model of two nodes is cut into two pieces.
#include <gpushare/graph/all.hpp>

#include <chrono>
#include <vector>

int main() {
    using namespace std::chrono_literals;
    namespace graph = gpushare::graph;
    graph::model_graph g;
    const auto vector_of = [](const char* name, graph::value_kind kind) {
        return graph::value{
            .name = name, .type = graph::element::f32, .shape = {{.extent = 100}}, .kind = kind, .ranked = true};
    };
    g.values = {vector_of("x", graph::value_kind::input), vector_of("y", graph::value_kind::inner),
                vector_of("z", graph::value_kind::output)};
    g.nodes = {{"first", "Relu", {0}, {1}}, {"second", "Relu", {1}, {2}}};
    g.inputs = {0};
    g.outputs = {2};
    const std::vector<gpushare::ns> times{4ms, 4ms};
    const graph::split_planner planner(g, times, {.limit = 5ms});
    return planner.plan().pieces.size() == 2 ? 0 : 1;
}
