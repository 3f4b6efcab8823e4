// SPDX-License-Identifier: Apache-2.0
// The contract of sharded gradients over every transport. Doesn't use Catch's assertions, as
// transport_suite.hpp.
//
//   std::string wrong = conformance::check_shards(net, seed);            // by all ranks at once
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/buckets.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/wire.hpp>

#include "conformance/transport_suite.hpp"
#include "support/random.hpp"

namespace conformance {

/// Gradients of all sizes, some behind each other, and the buckets that they are registered in.
struct sharded_model {
    sharded_model(std::uint64_t seed, gpushare::bytes bucket) : mine({bucket, 1}) {
        using gpushare::wire_format;
        support::random any(seed);
        sizes.resize(1 + any.below(25));
        for (auto& n : sizes) n = any.one_in(6) ? 0 : any.one_in(3) ? any.below(6000) : 1 + any.below(50);
        std::size_t elements = 0;
        for (const auto n : sizes) elements += n + 3;
        memory.resize(elements);
        for (std::size_t at = 0; const auto n : sizes) {
            gradients.push_back(std::span(memory).subspan(at, n));
            at += n + (any.one_in(2) ? 0 : 1 + any.below(3));
            const wire_format wire = any.one_in(3)   ? wire_format::bf16
                                     : any.one_in(3) ? wire_format::fp16
                                                     : wire_format::as_is;
            mine.add("", gradients.back(), {.wire = wire, .error_feedback = any.one_in(2)});
        }
    }
    void fill(std::uint32_t rank, int step) {
        for (std::size_t g = 0; g < sizes.size(); ++g)
            for (std::size_t i = 0; i < sizes[g]; ++i)
                gradients[g][i] = 0.01F * odd_value(rank, i + g + static_cast<std::size_t>(step));
        for (std::uint32_t g = 0; g < mine.size(); ++g) (void)mine.ready(g);
    }

    /// Whether this rank's shards have the bits of the other's.
    template <class Net>
    [[nodiscard]] bool same_shards(const sharded_model& other, const Net& net) const {
        bool same = true;
        for (std::size_t g = 0; g < sizes.size(); ++g) {
            const auto own = gpushare::shard_of(sizes[g], net.rank(), net.size());
            same = same && (own.size() == 0 ||
                            std::memcmp(gradients[g].data() + own.begin, other.gradients[g].data() + own.begin,
                                        own.size() * sizeof(float)) == 0);
        }
        return same;
    }

    std::vector<std::size_t> sizes;
    std::vector<float> memory;
    std::vector<std::span<float>> gradients;
    gpushare::gradient_buckets<> mine;
};

/// Shards are those of the all-reduce, to the bit, for every size of buckets; a gather makes the
/// whole of them; an infinity that one rank has in another's shard is seen by all. What lies
/// between the gradients stays as it is.
template <gpushare::host_transport Net>
std::string check_shards(Net& net, std::uint64_t seed) {
    using namespace std::chrono_literals;
    using namespace gpushare::literals;
    for (const gpushare::bytes bucket : {0_B, 500_B, 16_KiB, 1_MiB}) {
        sharded_model whole(seed, bucket), sharded(seed, bucket);
        for (int step = 0; step < 3; ++step) {
            const std::string where =
                " in step " + std::to_string(step) + ", buckets of " + std::to_string(bucket.count());
            whole.fill(net.rank(), step);
            sharded.fill(net.rank(), step);
            if (const auto f = whole.mine.reduce(net, gpushare::average{}, 60s)) return gpushare::describe(f).c_str();
            if (const auto f = sharded.mine.reduce_scatter(net, gpushare::average{}, 60s))
                return gpushare::describe(f).c_str() + where;
            if (!sharded.same_shards(whole, net)) return "another shard" + where;
            if (!sharded.mine.was_finite()) return "not finite" + where;
            const std::vector<std::span<float>>& list = sharded.gradients;
            if (const auto f =
                    gpushare::all_gather_shards<float>(net, list, std::chrono::steady_clock::now() + 60s, bucket))
                return gpushare::describe(f).c_str() + where;
            if (std::memcmp(sharded.memory.data(), whole.memory.data(), whole.memory.size() * sizeof(float)) != 0)
                return "gathered shards" + where;
        }
        // The last element of the largest is in the last rank's shard.
        std::size_t largest = 0;
        for (std::size_t g = 0; g < sharded.sizes.size(); ++g)
            if (sharded.sizes[g] > sharded.sizes[largest]) largest = g;
        if (sharded.sizes[largest] < net.size()) continue;
        for (const bool planted : {true, false}) {
            for (sharded_model* const one : {&whole, &sharded}) {
                one->fill(net.rank(), 3);
                if (planted && net.rank() == 0) one->gradients[largest].back() = std::numeric_limits<float>::infinity();
            }
            if (const auto f = whole.mine.reduce(net, gpushare::average{}, 60s)) return gpushare::describe(f).c_str();
            if (const auto f = sharded.mine.reduce_scatter(net, gpushare::average{}, 60s))
                return gpushare::describe(f).c_str();
            if (sharded.mine.was_finite() == planted) return planted ? "an infinity isn't seen" : "it is seen again";
        }
        if (!sharded.same_shards(whole, net)) return "another shard behind a step that was skipped";
    }
    return {};
}

}  // namespace conformance
