// SPDX-License-Identifier: Apache-2.0
#include "graph/http.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "graph/models.hpp"
#include "inference_server/client.hpp"
#include "percentile.hpp"
#include "serving/server_process.hpp"

namespace bench::graph {

namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;
using serving::neighbour;
using serving::question;

constexpr std::uint64_t repeats = 3;
constexpr double sounds_per_second = 100;
constexpr std::string_view of_chat = "key-of-chat", of_pages = "key-of-pages";

/// A request to a model with float inputs, under the model's name on the server.
question question_for(const model_case& of, const std::string& name, std::string_view key) {
    const loaded_model m(of);
    const auto& g = m.model.graph();
    std::vector<std::string> shapes;
    for (const auto& t : m.inputs) {
        if (t.type != gpushare::graph::element::f32) throw std::runtime_error(name + ": an input of other than floats");
        std::string shape;
        for (const auto extent : t.shape) shape.append(shape.empty() ? "[" : ",").append(std::to_string(extent));
        shapes.push_back(shape + "]");
    }
    std::vector<serving::input> inputs;
    for (std::size_t i = 0; i < m.inputs.size(); ++i)
        inputs.push_back({g.values[g.inputs[i]].name,
                          "FP32",
                          shapes[i],
                          {static_cast<const char*>(m.inputs[i].data), m.inputs[i].size()}});
    return serving::of_inputs("/v2/models/" + name + "/infer", key, inputs, true);
}

/// A tenant of higher priority with the voice detector, and a tenant with four copies of the page
/// detector. A model runs one call at a time, and a stream runs its work in order, so two models on
/// two streams are needed to keep two SMs busy. The server writes its plans next to the models.
class tenants {
public:
    tenants() {
        copy(voice_detector(), "speech");
        for (const char* name : {"cut_0", "cut_1", "whole_0", "whole_1"}) copy(page_detector(), name);
    }
    [[nodiscard]] std::string text() const {
        const auto line = [&](const char* name, const char* how) { return "  model=" + path(name) + ' ' + how + '\n'; };
        const char* const in_pieces = "cut_to=5ms shape=x:1x3x320x320";
        return "name=chat api_key=key-of-chat memory=256MiB compute=60% priority=1 slo=50ms\n" + line("speech", "") +
               "name=pages api_key=key-of-pages memory=1536MiB compute=40% streams=2\n" + line("cut_0", in_pieces) +
               line("cut_1", in_pieces) + line("whole_0", "") + line("whole_1", "");
    }
    /// Copies the first cut model's plan to the second model. Returns the number of pieces.
    [[nodiscard]] std::size_t share_plan() const {
        const std::string plan = path("cut_0") + ".5ms.plan";
        fs::copy_file(plan, path("cut_1") + ".5ms.plan");
        std::ifstream from(plan);
        std::size_t pieces = 0;
        for (std::string line; std::getline(from, line);) pieces += line.starts_with("piece ") ? 1 : 0;
        return pieces;
    }

private:
    [[nodiscard]] std::string path(const std::string& name) const { return folder_.path + '/' + name + ".onnx"; }
    void copy(const model_case& of, const std::string& name) const { fs::copy_file(of.path, path(name)); }

    serving::temporary_folder folder_;
};

/// The outputs of an answer, which follow the JSON.
std::string outputs_of(std::uint16_t port, const question& q) {
    inference_server::connection c(port);
    auto body = serving::answer_to(c, q);
    const auto end = body.find("}]}");
    if (end == std::string::npos || body.size() == end + 3) throw std::runtime_error(q.path + ": no outputs");
    return body.substr(end + 3);
}

/// Two neighbours that request pages without a pause and keep both SMs busy.
class pages {
public:
    pages(std::uint16_t port, const question& first, const question& second)
        : a_(port, first, 2), b_(port, second, 2) {}
    /// The answers per second while `during` runs.
    template <class F>
    double rate(F during) const {
        const auto began = std::chrono::steady_clock::now();
        const auto before = a_.answered() + b_.answered();
        during();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        return static_cast<double>(a_.answered() + b_.answered() - before) / took.count();
    }

private:
    neighbour a_, b_;
};

/// The 99th percentile of the latencies in 2.5 s of requests, in milliseconds. Each latency counts
/// from the scheduled time.
double p99_of_sound(const char* what, std::uint16_t port, const question& sound, std::uint64_t seed) {
    auto ms = serving::asked_by_schedule(port, sound, sounds_per_second, 2500ms, seed);
    std::ranges::sort(ms);
    const auto at = [&](double p) { return percentile(ms, p); };
    std::printf("#   seed %llu, %-18s %zu sounds: median %.2f ms, 90 %% %.2f, 99 %% %.2f, longest %.2f\n",
                static_cast<unsigned long long>(seed), what, ms.size(), at(0.5), at(0.9), at(0.99), at(1));
    std::fflush(stdout);
    return at(0.99);
}

}  // namespace

void over_http(report& r) {
    if (std::string_view(GPUSHARE_BENCH_SERVER).empty())
        return r.is_void("graph.http_p99_vs_alone", "the example server isn't built; ./dev setup graph");
    const tenants models;
    const serving::server_process server(models.text(), {"--sms", "2"});
    const auto port = server.port();
    const auto sound = question_for(voice_detector(), "speech", of_chat);
    const auto page = [](const char* name) { return question_for(page_detector(), name, of_pages); };
    const question cut[]{page("cut_0"), page("cut_1")}, whole[]{page("whole_0"), page("whole_1")};
    const auto right = outputs_of(port, whole[0]);
    // The first request makes the server measure and plan.
    bool equal = outputs_of(port, cut[0]) == right;
    r.setting("pieces over HTTP", std::to_string(models.share_plan()));
    equal = equal && outputs_of(port, cut[1]) == right && outputs_of(port, whole[1]) == right;
    if (!equal) throw std::runtime_error("a page in pieces has other outputs than the whole one");
    (void)p99_of_sound("a warm-up", port, sound, 0);
    std::vector<double> ratio, control, alone_ms, beside_ms, goodput;
    for (std::uint64_t seed = 1; seed <= repeats; ++seed) {
        alone_ms.push_back(p99_of_sound("alone", port, sound, seed));
        {
            const pages busy(port, cut[0], cut[1]);
            const double undisturbed = busy.rate([] { std::this_thread::sleep_for(2s); });
            const double rate =
                busy.rate([&] { beside_ms.push_back(p99_of_sound("beside cut pages", port, sound, seed)); });
            goodput.push_back(100 * rate / undisturbed);
        }
        const pages busy(port, whole[0], whole[1]);
        control.push_back(p99_of_sound("beside whole pages", port, sound, seed) / alone_ms.back());
        ratio.push_back(beside_ms.back() / alone_ms.back());
    }
    r.figure("graph.http_p99_vs_alone", ratio, "x",
             {at_most(4), value_of(statistic::median, control), "pages as one piece each"});
    r.figure("graph.http_p99_alone_ms", alone_ms, "ms");
    r.figure("graph.http_p99_ms", beside_ms, "ms");
    r.figure("graph.http_goodput_pct", goodput, "%");
}

}  // namespace bench::graph
