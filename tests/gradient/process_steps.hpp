// SPDX-License-Identifier: Apache-2.0
// One of several processes whose ranks train together, on the host backend: its ranks are threads
// that share a device, and their gradients have two types. `Outer` is a transport between
// processes.
//
//   process_steps::process<gs::mpi_transport> mine(2, net);
//   const auto seen = mine.train<float, gs::bfloat16>(3, {});     // what each rank here got
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/detail/device_steps.hpp>
#include <gpushare/gradient/two_level.hpp>

#include "support/random.hpp"
#include "support/threads.hpp"

namespace process_steps {

namespace gs = gpushare;
using gs::detail::device_gradient;
using gs::detail::gradient_type;

constexpr std::size_t each = 40;        // elements of a gradient
constexpr std::uint32_t gradients = 5;  // of a rank: by turns floats and halves

/// How a process trains.
struct manner {
    std::function<void(std::vector<device_gradient>&)> change{};  // what its ranks register
    gs::bytes bucket{each * sizeof(float)};
    gs::ns patience = gs::ns::max();       // of its ranks, for each other
    gs::ns between = gs::ns::max();        // for other processes
    std::uint32_t idle = gradients;        // this rank registers, and has no step
    std::uint32_t stops = gradients;       // this rank stops behind its steps
    bool halfway = false;                  // or in another one of all ranks here, which it begins
    std::function<void()> before_steps{};  // called by each rank
    std::uint64_t seed = 1;                // of the order in which gradients are ready
};
/// What a rank got.
struct outcome {
    gs::errc thrown = gs::errc::none;  // by its registration, and the rank that this named
    std::uint64_t named = 0;
    gs::collective_fault fault{};
    int wrong = 0;  // elements that aren't the average, of all steps
    int steps = 0;  // without a fault
};

template <class Outer>
class process {
public:
    /// Collective: the processes tell each other how many ranks they have.
    process(std::uint32_t ranks, Outer& outer)
        : ranks_(ranks), group_(ranks, {.blocks = 2}), floats_(ranks), halves_(ranks) {
        for (std::uint32_t r = 0; r < ranks; ++r) {
            members_.push_back(group_.rank(r));
            training_.push_back(node_.make_stream(device_));
            floats_[r].resize(3 * each);
            halves_[r].resize(2 * each);
        }
        levels_.emplace(node_.gangs(), std::span(&device_, 1), std::span(&combining_, 1), members_, outer,
                        *std::pmr::new_delete_resource(), gs::two_level_options{.chunk = gs::bytes{256}});
    }
    [[nodiscard]] std::uint32_t first() const { return levels_->first(); }

    /// So many steps of all ranks here; T in the order in which types are combined.
    template <class... T>
    [[nodiscard]] std::vector<outcome> train(int steps, const manner& how) {
        gs::detail::device_steps<gs::host::node, combiner, T...> all(
            node_, std::span(&combining_, 1), ranks_, levels_->combiner(how.between), how.bucket, how.patience);
        std::vector<outcome> seen(ranks_);
        std::latch begun(1);
        support::together(ranks_, [&](unsigned r) {
            support::random any(how.seed + r);
            try {
                auto mine = registered(r);
                if (how.change) how.change(mine);
                all.add(r, std::move(mine), &training_[r]);
            } catch (const gs::operation_error& e) {
                seen[r].thrown = e.code();
                seen[r].named = e.figures().left;
            }
            if (how.before_steps) how.before_steps();
            for (int s = 0; s < steps && r != how.idle && !seen[r].fault; ++s)
                seen[r].wrong += step(all, r, s, any, seen[r]);
            if (how.halfway && r != how.stops) begun.wait();
            for (std::uint32_t g = 0; g < gradients && how.halfway; ++g) all.ready(r, g, &training_[r]);
            if (how.halfway && r == how.stops) begun.count_down();
            if (r == how.stops) all.end(gs::errc::stopped, r);
            if (how.halfway) seen[r].fault = all.wait(r, &training_[r]);
        });
        if (how.idle < ranks_) seen[how.idle].fault = all.wait(how.idle, &training_[how.idle]);
        combining_.record().wait(gs::never);
        return seen;
    }

private:
    using levels_type = gs::two_level_devices<std::remove_cvref_t<decltype(std::declval<gs::host::node&>().gangs())>,
                                              gs::host::stream, Outer, std::pmr::memory_resource>;
    using combiner = typename levels_type::combiner_type;

    [[nodiscard]] std::vector<device_gradient> registered(std::uint32_t r) {
        std::vector<device_gradient> all;
        for (std::size_t g = 0; g < gradients; ++g)
            if (g % 2 == 0)
                all.push_back({"f" + std::to_string(g / 2), gradient_type::f32, &floats_[r][g / 2 * each], each});
            else
                all.push_back({"h" + std::to_string(g / 2), gradient_type::bf16, &halves_[r][g / 2 * each], each});
        return all;
    }
    /// Rank `rank` of all: small integers, whose average bfloats hold.
    [[nodiscard]] static float value(std::uint32_t rank, int step, std::size_t i) {
        return static_cast<float>(4 * (step + 3 * static_cast<int>(rank)) + static_cast<int>(i % each));
    }
    /// In a random order. Returns how many elements are wrong.
    template <class Steps>
    [[nodiscard]] int step(Steps& all, std::uint32_t r, int s, support::random& any, outcome& seen) {
        for (std::size_t i = 0; i < floats_[r].size(); ++i) floats_[r][i] = value(first() + r, s, i);
        for (std::size_t i = 0; i < halves_[r].size(); ++i) halves_[r][i] = gs::bfloat16(value(first() + r, s, i));
        std::vector<std::uint32_t> order;
        for (std::uint32_t g = 0; g < gradients; ++g)
            order.insert(order.begin() + static_cast<int>(any.below(g + 1)), g);
        for (const std::uint32_t g : order) all.ready(r, g, &training_[r]);
        seen.fault = all.wait(r, &training_[r]);
        training_[r].record().wait(gs::never);
        if (seen.fault) return 0;
        ++seen.steps;
        int wrong = 0;
        const auto mean = [&](std::size_t i) {
            float sum = 0;
            for (std::uint32_t rank = 0; rank < levels_->size(); ++rank) sum += value(rank, s, i);
            return sum / static_cast<float>(levels_->size());
        };
        for (std::size_t i = 0; i < floats_[r].size(); ++i) wrong += floats_[r][i] == mean(i) ? 0 : 1;
        for (std::size_t i = 0; i < halves_[r].size(); ++i)
            wrong += static_cast<float>(halves_[r][i]) == mean(i) ? 0 : 1;
        return wrong;
    }

    std::uint32_t ranks_;
    gs::host::node node_{{.devices = 1, .sms = 4}};
    gs::communicator group_;
    std::vector<std::vector<float>> floats_;
    std::vector<std::vector<gs::bfloat16>> halves_;
    gs::device_id device_{0};
    gs::host::stream combining_ = node_.make_stream(device_);
    std::vector<gs::host::stream> training_{};
    std::vector<gs::member> members_{};
    std::optional<levels_type> levels_{};
};

}  // namespace process_steps
