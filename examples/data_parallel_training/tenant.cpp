// SPDX-License-Identifier: Apache-2.0
#include "data_parallel_training/tenant.hpp"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>
#include <stop_token>
#include <thread>

namespace data_parallel_training {

namespace {

using namespace gpushare::literals;
using clock = std::chrono::steady_clock;

constexpr std::size_t digits_of_a_request = 4;

double seconds(clock::duration d) { return std::chrono::duration<double>(d).count(); }

/// Answers one device's requests until a stop. Requests arrive at random times (Poisson), and each
/// latency counts from the request's arrival.
std::vector<double> answer(shared_devices::tenant& who, std::size_t part, const digits& data, double per_second,
                           const std::stop_token& stop) {
    std::vector<double> after;
    const auto model = make_network(network_kind::convolutional, 1);
    std::mt19937_64 any(part + 1);
    auto due = clock::now();
    for (std::size_t n = 0; !stop.stop_requested(); ++n) {
        const double uniform = (static_cast<double>(any() >> 11) + 1) * 0x1p-53;
        due += std::chrono::nanoseconds(static_cast<std::int64_t>(-std::log(uniform) / per_second * 1e9));
        std::this_thread::sleep_until(due);
        std::size_t answer = 0;
        const auto work = [&](gpushare::host::stream& s) {
            s.launch({.blocks = 1}, [&](auto&) {
                for (std::size_t i = 0; i < digits_of_a_request; ++i)
                    answer += model->classify(data.image((n * digits_of_a_request + i) % data.size()));
            });
        };
        (void)who.submit(work, part).wait();
        after.push_back(seconds(clock::now() - due));
    }
    return after;
}

/// Answers requests on all devices while `meanwhile()` runs.
template <class F>
std::vector<double> answered_while(shared_devices::tenant& who, std::uint32_t devices, const digits& data,
                                   double per_second, F meanwhile) {
    std::vector<std::vector<double>> of_device(devices);
    {
        std::vector<std::jthread> clients;
        for (std::uint32_t d = 0; per_second > 0 && d < devices; ++d)
            clients.emplace_back(
                [&, d](const std::stop_token& stop) { of_device[d] = answer(who, d, data, per_second, stop); });
        meanwhile();
    }
    std::vector<double> all;
    for (const auto& some : of_device) all.insert(all.end(), some.begin(), some.end());
    std::sort(all.begin(), all.end());
    return all;
}

/// Both tenants, on a device of one SM for each rank.
struct machine {
    explicit machine(std::uint32_t ranks)
        : node({.devices = ranks, .memory = 16_MiB, .sms = 1}),
          tenants(node),
          requests(tenants.admit({.name = "requests",
                                  .memory = gpushare::bytes{1_MiB} * ranks,
                                  .devices = ranks,
                                  .compute = 50_pct,
                                  .level = {1},
                                  .slo = std::chrono::milliseconds(2)})),
          training(tenants.admit({.name = "training",
                                  .memory = gpushare::bytes{1_MiB} * ranks,
                                  .devices = ranks,
                                  .yields_within = std::chrono::microseconds(500)})) {}
    gpushare::host::node node;
    shared_devices tenants;
    shared_devices::tenant requests, training;
};

double percentile(const std::vector<double>& rising, double p) {
    if (rising.empty()) return 0;
    return rising[static_cast<std::size_t>(p * static_cast<double>(rising.size() - 1))];
}

}  // namespace

device_ranks::device_ranks(gpushare::host::node& node, shared_devices::tenant& who, std::size_t piece)
    : node_(&node),
      on_devices_(who.spec().devices, {.blocks = 1}),
      between_threads_(who.spec().devices),
      gang_(who.gang()),
      piece_(piece) {
    for (const auto& g : gang_) {
        members_.push_back(on_devices_.rank(static_cast<std::uint32_t>(members_.size())));
        devices_.push_back(g.device);
        own_streams_.push_back(node.make_stream(g.device, gpushare::best_effort, who.tag()));
    }
    for (auto& s : own_streams_) streams_.push_back(&s);
    here_.resize(members_.size());
}

tenant_run train_as_tenant(const command& asked, const digits& data, double requests) {
    machine all(asked.ranks);
    device_ranks devices(all.node, all.training);
    tenant_run result;
    const auto train = [&] {
        std::vector<training_result> results(asked.ranks);
        const auto begin = clock::now();
        {
            std::vector<std::jthread> ranks;
            for (std::uint32_t r = 0; r < asked.ranks; ++r)
                ranks.emplace_back([&, r] {
                    device_transport net(devices, r);
                    trainer mine(data, asked.training);
                    (void)mine.run(net, r == 0 ? draw_progress : nullptr, by_tenant(all.training, r));
                    results[r] = mine.result();
                });
        }
        result.training = results[0];
        result.steps_per_second = static_cast<double>(results[0].losses.size()) / seconds(clock::now() - begin);
    };
    result.answered_after = answered_while(all.requests, asked.ranks, data, requests, train);
    result.charged = all.training.close().usage;
    result.pieces = devices.pieces();
    return result;
}

tenant_report train_as_tenant(const command& asked, const digits& data) {
    constexpr double per_second = 300;
    tenant_report report;
    {
        machine all(asked.ranks);
        report.answered_before = answered_while(all.requests, asked.ranks, data, per_second,
                                                [] { std::this_thread::sleep_for(std::chrono::seconds(3)); });
    }
    report.alone = train_as_tenant(asked, data, 0);
    report.beside = train_as_tenant(asked, data, per_second);
    return report;
}

void print(const tenant_report& r) {
    const auto line = [](const char* when, const std::vector<double>& all) {
        std::printf("%zu requests %s: median %.2f ms, P99 %.2f ms\n", all.size(), when, 1e3 * percentile(all, 0.5),
                    1e3 * percentile(all, 0.99));
    };
    line("without a training", r.answered_before);
    line("beside the training", r.beside.answered_after);
    std::printf("training: %.0f steps a second alone, %.0f beside the requests: %.0f %% kept; parameters %s\n",
                r.alone.steps_per_second, r.beside.steps_per_second,
                100 * r.beside.steps_per_second / r.alone.steps_per_second,
                r.alone.training.fingerprint == r.beside.training.fingerprint ? "the same" : "NOT the same");
    std::printf(
        "charged to the training: %.2f s of the devices' time in %llu submissions, %llu of them pieces of "
        "collectives\n",
        std::chrono::duration<double>(r.beside.charged.device_time).count(),
        static_cast<unsigned long long>(r.beside.charged.completed), static_cast<unsigned long long>(r.beside.pieces));
}

}  // namespace data_parallel_training
