// SPDX-License-Identifier: Apache-2.0
// The example that learns digits: its gradients are right, the bits don't depend on how gradients
// are fused, and training works with each way of combining them. Tests on the real digits are long,
// and run if the digits are there.
#include "data_parallel_training/network.hpp"
#include "data_parallel_training/report.hpp"
#include "data_parallel_training/tenant.hpp"
#include "data_parallel_training/training.hpp"

#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/wire.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace data_parallel_training_test {

namespace gs = gpushare;
using namespace data_parallel_training;

digits drawn(std::size_t n) {
    support::random any(7);
    digits all;
    for (std::size_t i = 0; i < n; ++i) {
        const auto label = any.below(10);
        all.labels.push_back(static_cast<std::uint8_t>(label));
        for (std::size_t p = 0; p < digits::pixels; ++p)
            all.images.push_back(static_cast<float>((p * (label + 3) + any.below(4)) % 17) / 16.0F);
    }
    return all;
}

TEST_CASE("the networks' gradients are what the loss changes by", "[examples][training]") {
    const digits data = drawn(6);
    for (const auto kind : {network_kind::convolutional, network_kind::encoder}) {
        const auto model = make_network(kind, 3);
        std::vector<std::span<const float>> images;
        for (std::size_t i = 0; i < data.size(); ++i) images.push_back(data.image(i));
        const auto here = static_cast<double>(model->forward(images, data.labels));
        std::vector<std::size_t> order;
        model->backward([&](std::size_t p) { order.push_back(p); });
        CHECK(std::is_sorted(order.rbegin(), order.rend()));
        CHECK(order.size() == model->parameters().size());
        support::random any(1);
        for (std::size_t p = 0; p < model->parameters().size(); ++p)
            for (int k = 0; k < 5; ++k) {
                auto& value = model->parameters()[p].value;
                const std::size_t i = any.below(value.size());
                const float before = value[i], h = 4e-3F;
                value[i] = before + h;
                const auto up = static_cast<double>(model->forward(images, data.labels));
                value[i] = before - h;
                const auto down = static_cast<double>(model->forward(images, data.labels));
                value[i] = before;
                CAPTURE(kind == network_kind::encoder, model->parameters()[p].name, i);
                const auto slope = static_cast<double>(model->parameters()[p].gradient[i]);
                // On one side there may be a rectifier's kink.
                const double to_the_right = (up - here) / static_cast<double>(h) - slope,
                             to_the_left = (here - down) / static_cast<double>(h) - slope;
                CHECK(std::min(std::abs(to_the_right), std::abs(to_the_left)) < 6e-3);
            }
    }
}

training_result trained(const digits& data, std::uint32_t ranks, const training_options& options) {
    const gs::communicator group(ranks, {.channels = 1});
    std::vector<training_result> results(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        trainer mine(data, options);
        (void)mine.run(net);
        results[r] = mine.result();
    });
    for (const auto& r : results) {
        CHECK_FALSE(r.fault);
        CHECK(r.all_alike);
        CHECK(r.losses == results[0].losses);
    }
    return results[0];
}

training_options few_steps() {
    training_options options;
    options.epochs = 2;
    options.held_out = 20;
    options.batch = 16;
    return options;
}

TEST_CASE("the loss curve is the same to the bit however gradients are fused or sharded", "[examples][training]") {
    const digits data = drawn(100);
    for (const auto kind : {network_kind::convolutional, network_kind::encoder}) {
        training_options options = few_steps();
        options.kind = kind;
        const auto one = trained(data, 2, options);
        CHECK(one.losses.size() == 10);
        for (const std::uint64_t bucket : {1U, 100'000U}) {
            options.fusion.bucket = gs::bytes{bucket};
            const auto other = trained(data, 2, options);
            CHECK(other.losses == one.losses);
            CHECK(other.fingerprint == one.fingerprint);
        }
        for (const auto wire : {gs::wire_format::as_is, gs::wire_format::bf16}) {
            options.wire = wire;
            options.sharded = false;
            const auto whole = trained(data, 3, options);
            options.sharded = true;
            const auto shards = trained(data, 3, options);
            CHECK(shards.losses == whole.losses);
            CHECK(shards.fingerprint == whole.fingerprint);
        }
    }
}

TEST_CASE("a training that is a tenant is charged for all it does, and learns the same to the bit",
          "[examples][training]") {
    const digits data = drawn(100);
    command asked;
    asked.training = few_steps();
    const auto bare = trained(data, 2, asked.training);
    const std::uint64_t steps = bare.losses.size();
    for (const double requests : {0.0, 2000.0}) {
        const auto gated = train_as_tenant(asked, data, requests);
        CHECK_FALSE(gated.training.fault);
        CHECK(gated.training.losses == bare.losses);
        CHECK(gated.training.fingerprint == bare.fingerprint);
        CHECK(gated.pieces > 3 * steps);  // two buckets, of which one has more than two pieces
        // On each device: what is computed and the optimiser, step by step, and all pieces.
        CHECK(gated.charged.completed == asked.ranks * (2 * steps + gated.pieces));
        CHECK(gated.charged.failed == 0);
        CHECK(gated.charged.device_time > gs::ns{0});
        CHECK(gated.answered_after.empty() == (requests == 0));
    }
}

TEST_CASE("a rank that doesn't come is named by the others, who go on from the same state", "[examples][training]") {
    const digits data = drawn(100);
    const training_options options = few_steps();
    const gs::communicator group(3, {.channels = 1}), rest(2, {.channels = 1});
    std::vector<gs::collective_fault> faults(3);
    std::vector<training_result> results(3);
    support::together(3, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        trainer mine(data, options);
        try {
            faults[r] = mine.run(net, [&](std::size_t step, std::size_t, float) {
                if (r == 2 && step == 4) throw 0;
            });
        } catch (int) {
            return net.abort(r, gs::errc::aborted);
        }
        gs::thread_transport fewer(rest.rank(r));
        if (!mine.agree(fewer)) (void)mine.run(fewer);
        results[r] = mine.result();
    });
    for (unsigned r = 0; r < 2; ++r) {
        CHECK(faults[r].rank == 2);
        CHECK_FALSE(results[r].fault);
        CHECK(results[r].all_alike);
        CHECK(results[r].losses.size() == 10);
    }
}

TEST_CASE("a line that isn't a digit is refused, with its number", "[examples][training]") {
    const std::string path = "not_digits.csv";
    std::ofstream(path) << "1,2,3\n";
    CHECK_THROWS_WITH(load_digits(path), path + ", line 1: not 64 pixels and a digit");
    std::filesystem::remove(path);
    CHECK_THROWS_WITH(load_digits(path), "cannot read " + path);
    const char* wrong[] = {"--ranks", "99"};
    CHECK_THROWS_AS(parse(wrong), usage_error);
    const char* lost[] = {"--sharded", "--lost", "go-on"};
    CHECK_THROWS_AS(parse(lost), usage_error);
}

bool have_digits() { return std::filesystem::exists(digits_file()); }

TEST_CASE("16 bits on the wire learn as much, of all gradients or of the large ones", "[examples][.long]") {
    if (!have_digits()) return;
    const digits data = load_digits(digits_file());
    training_options options;
    const auto good = [&](double least) {
        const auto result = trained(data, 2, options);
        CAPTURE(gs::to_string(options.wire), options.least_on_wire, options.error_feedback);
        CHECK(result.accuracy >= least);
        CHECK(result.skipped == 0);
    };
    good(0.97);
    for (const auto wire : {gs::wire_format::fp16, gs::wire_format::bf16})
        for (const std::size_t least : {0U, 1000U})
            for (const bool feedback : {false, true}) {
                options.wire = wire;
                options.least_on_wire = least;
                options.error_feedback = feedback;
                good(0.965);
            }
}

TEST_CASE("the encoder learns on one, two and four ranks", "[examples][.long]") {
    if (!have_digits()) return;
    const digits data = load_digits(digits_file());
    training_options options;
    options.kind = network_kind::encoder;
    for (const std::uint32_t ranks : {1U, 2U, 4U})
        for (options.seed = 1; options.seed <= 3; ++options.seed) CHECK(trained(data, ranks, options).accuracy >= 0.97);
    options.batch = 16;  // the rate goes with it
    CHECK(trained(data, 2, options).accuracy >= 0.97);
}

/// Training where `combine(net, model, step)` does what is between the backward pass and the
/// optimiser, `behind` what follows that.
template <class Combine, class Behind>
double accuracy_by(std::uint32_t ranks, std::size_t epochs, const Combine& combine, const Behind& behind) {
    const digits data = load_digits(digits_file());
    constexpr std::size_t held_out = 297, batch = 32;
    const std::size_t samples = data.size() - held_out, share = batch / ranks;
    const gs::communicator group(ranks);
    std::vector<double> accuracy(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        const auto made = make_network(network_kind::convolutional, 1);
        network& model = *made;
        batches order(samples, 2);
        auto state = combine.prepare(model);
        std::uint64_t step = 0;
        for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
            order.shuffle();
            for (std::size_t at = 0; at + batch <= samples; at += batch, ++step) {
                std::vector<std::span<const float>> images;
                std::vector<std::uint8_t> labels;
                for (const auto i : order.at(at + r * share, share)) {
                    images.push_back(data.image(i));
                    labels.push_back(data.labels[i]);
                }
                (void)model.forward(images, labels);
                model.backward([](std::size_t) {});
                combine(net, model, state);
                model.step(0.03F, 0.9F);
                behind(net, model, step);
            }
        }
        std::size_t right = 0;
        for (std::size_t i = samples; i < data.size(); ++i) right += model.classify(data.image(i)) == data.labels[i];
        accuracy[r] = static_cast<double>(right) / held_out;
    });
    return *std::min_element(accuracy.begin(), accuracy.end());
}

struct by_top_k {
    static std::vector<gs::top_k_feedback> prepare(network& model) {
        std::vector<gs::top_k_feedback> all;
        for (const auto& p : model.parameters())
            all.emplace_back(p.gradient.size(), std::max<std::size_t>(p.gradient.size() / 20, 4));
        return all;
    }
    void operator()(gs::thread_transport& net, network& model, std::vector<gs::top_k_feedback>& owed) const {
        for (std::size_t p = 0; p < owed.size(); ++p)
            (void)gs::all_reduce_top_k(net, owed[p], model.parameters()[p].gradient);
    }
};
struct each_its_own {
    static int prepare(network&) { return 0; }
    void operator()(gs::thread_transport&, network&, int) const {}
};

TEST_CASE("the largest twentieth of the gradients, gossip on a ring, and local steps learn as well",
          "[examples][.long]") {
    if (!have_digits()) return;
    const auto nothing = [](gs::thread_transport&, network&, std::uint64_t) {};
    CHECK(accuracy_by(2, 20, by_top_k{}, nothing) >= 0.95);
    CHECK(accuracy_by(4, 20, each_its_own{}, [](gs::thread_transport& net, network& model, std::uint64_t) {
              const auto ring = gs::neighbour_graph::ring(net.size());
              for (auto& p : model.parameters()) (void)gs::gossip_average(net, ring, p.value);
          }) >= 0.95);
    CHECK(accuracy_by(2, 20, each_its_own{}, [](gs::thread_transport& net, network& model, std::uint64_t step) {
              constexpr gs::local_steps local{.every = 8};
              std::vector<std::span<float>> list;
              for (auto& p : model.parameters()) list.emplace_back(p.value);
              if (local.due(step)) (void)gs::average_all(net, std::span<const std::span<float>>(list));
          }) >= 0.95);
}

}  // namespace data_parallel_training_test
