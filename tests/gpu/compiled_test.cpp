// SPDX-License-Identifier: Apache-2.0
// Collectives, compiled by nvcc, on the executor: back to back on a stream without the host in
// between, under several orders of threads and blocks, and in random shapes.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/collective/tuning.hpp>

#include "gpu/collective_kernels.hpp"
#include "gpu/collectives_setting.hpp"
#include "gpu/job_rig.hpp"
#include "standins/cuda/standin.hpp"
#include "standins/ptx/runtime.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace {

namespace cu = gpushare::cuda;
using gpushare::algorithm;

const bool said = (collectives_suite::time_is_virtual = true, collectives_suite::run_on = ptx::runtime::go_on, true);
using gpushare::all_reduce_plan;

/// Some all-reduces of all ranks on one device, each of what the one before left.
struct workload {
    std::uint32_t ranks = 2;
    all_reduce_plan plan{};
    std::size_t count = 0;  // floats a rank
    std::uint32_t blocks = 2, threads = 64;
    int rounds = 3;
    ptx::turns who = ptx::turns::fair;
    std::uint64_t seed = 1;
};

/// Sums that floats hold exactly, whatever the order.
float element(std::uint32_t rank, std::size_t i) { return static_cast<float>((i * 7 + rank * 3) % 11) - 5; }

/// Runs it; what is wrong with the results.
std::string run_rounds(const workload& w) {
    const gpushare::device_id device{0};
    cu::node node{{.devices = {0}}};
    cu::pinned_memory visible(node);
    const std::vector<gpushare::device_id> devices(w.ranks, device);
    gpushare::device_communicator group(node, visible, devices, {.blocks = w.blocks, .slot = gpushare::bytes{4096}});
    group.set_tuning(gpushare::tuning_table::always(w.plan));
    std::vector<gpushare::member> members;
    for (std::uint32_t r = 0; r < w.ranks; ++r) members.push_back(group.rank(r));
    auto stream = node.make_stream(device, gpushare::priority{});
    const bench::rank_group all{node, device, stream, members};

    const std::size_t total = w.ranks * w.count, bytes = total * sizeof(float);
    std::array<float*, 2> arrays{};
    for (float*& a : arrays) a = static_cast<float*>(node.memory(device).allocate(bytes, 256));
    std::vector<float> values(total);
    for (std::size_t i = 0; i < total; ++i) values[i] = element(static_cast<std::uint32_t>(i / w.count), i % w.count);
    stream.copy(arrays[0], values.data(), bytes);
    std::string wrong;
    for (int round = 0; round < w.rounds && wrong.empty(); ++round) {
        const auto code = bench::launch_all_reduce(
            all, arrays[round % 2], arrays[(round + 1) % 2], w.count,
            {.blocks = w.blocks, .threads = w.threads, .patience = std::chrono::milliseconds(20)});
        if (code != gpushare::errc::none) wrong = "refused: " + std::string(gpushare::to_string(code));
    }
    std::vector<float> result(total);
    stream.copy(result.data(), arrays[w.rounds % 2], bytes);
    (void)stream.record().wait(gpushare::never);
    if (const auto fault = gpushare::fault_of(members[0]); fault.code != gpushare::errc::none)
        wrong = "fault: " + std::string(gpushare::to_string(fault.code));
    std::size_t off = 0;
    for (std::size_t i = 0; i < total; ++i) {
        float sum = 0;
        for (std::uint32_t r = 0; r < w.ranks; ++r) sum += element(r, i % w.count);
        for (int round = 1; round < w.rounds; ++round) sum *= static_cast<float>(w.ranks);
        off += result[i] == sum ? 0 : 1;
    }
    if (off != 0 && wrong.empty()) wrong = std::to_string(off) + " of " + std::to_string(total) + " sums are wrong";
    for (float* const a : arrays) (void)node.memory(device).deallocate(a, bytes, 256);
    return wrong;
}

/// Everything that is wrong with it: results, errors, and what the executor and the stand-in found.
std::string trouble(const workload& w) {
    ptx::runtime::options().seed = w.seed;
    ptx::runtime::options().who = w.who;
    standin::reset({.devices = 1, .memory = gpushare::bytes{1 << 30}});
    std::string wrong;
    try {
        wrong = run_rounds(w);
    } catch (const std::exception& e) {
        wrong = e.what();
    }
    wrong += standin::take_findings();
    standin::reset(jobs::roomy);
    return wrong;
}

constexpr std::array plans{all_reduce_plan{algorithm::one_shot}, all_reduce_plan{algorithm::two_shot},
                           all_reduce_plan{algorithm::two_shot, true}, all_reduce_plan{algorithm::ring}};

std::vector<workload> workloads() {
    std::vector<workload> all;
    std::uint64_t seed = 0;
    for (const std::uint32_t ranks : {2U, 3U, 8U})
        for (const auto& plan : plans)
            for (const std::size_t count : {std::size_t{1}, std::size_t{777}, std::size_t{2048}})
                for (const auto who : {ptx::turns::fair, ptx::turns::shuffled, ptx::turns::adversarial})
                    all.push_back({.ranks = ranks, .plan = plan, .count = count, .who = who, .seed = ++seed});
    return all;
}

}  // namespace

TEST_CASE("collectives back to back are right as compiled, and without a race", "[compiled]") {
    for (const workload& w : workloads()) {
        CAPTURE(w.ranks, to_string(w.plan.how), w.count, static_cast<int>(w.who), w.seed);
        CHECK(trouble(w) == "");
    }
}

// ---- any shape

namespace {

void check_random_workloads(std::size_t cases) {
    for (std::size_t n = 0; n < cases; ++n) {
        const auto seed = support::seed(n);
        support::random any(seed);
        workload w{.ranks = static_cast<std::uint32_t>(1 + any.below(8)),
                   .plan = any.of(plans),
                   .count = 1 + any.below(any.one_in(4) ? 6000 : 600),
                   .blocks = static_cast<std::uint32_t>(1 + any.below(3)),
                   .threads = static_cast<std::uint32_t>(1 + any.below(130)),
                   .rounds = static_cast<int>(1 + any.below(3)),
                   .who = any.one_in(2) ? ptx::turns::shuffled : ptx::turns::adversarial,
                   .seed = seed};
        CAPTURE(seed, w.ranks, to_string(w.plan.how), w.count, w.blocks, w.threads, w.rounds, static_cast<int>(w.who));
        CHECK(trouble(w) == "");
    }
}

}  // namespace

namespace {

/// A transformer's step in one launch, and as an all-reduce with what follows in one launch or in
/// three.
std::vector<std::vector<std::uint16_t>> steps_three_ways(std::uint32_t ranks) {
    constexpr std::size_t tokens = 3, width = bench::transformer_step::width;
    const gpushare::device_id device{0};
    cu::node node{{.devices = {0}}};
    cu::pinned_memory visible(node);
    const std::vector<gpushare::device_id> devices(ranks, device);
    gpushare::device_communicator group(node, visible, devices, {.blocks = 2});
    std::vector<gpushare::member> members;
    for (std::uint32_t r = 0; r < ranks; ++r) members.push_back(group.rank(r));
    auto stream = node.make_stream(device, gpushare::priority{});
    const bench::rank_group all{node, device, stream, members};
    const std::size_t n = ranks * tokens * width;
    std::vector<std::pair<void*, std::size_t>> taken;
    const auto array = [&](std::size_t bytes) {
        taken.emplace_back(node.memory(device).allocate(bytes, 256), bytes);
        return taken.back().first;
    };
    std::vector<float> x(n), residual(n), weight(width);
    for (std::size_t i = 0; i < n; ++i) x[i] = element(static_cast<std::uint32_t>(i / (tokens * width)), i);
    for (std::size_t i = 0; i < n; ++i) residual[i] = element(1, i % (tokens * width));
    for (std::size_t i = 0; i < width; ++i) weight[i] = static_cast<float>(i % 7) / 4;
    const auto upload = [&](const std::vector<float>& from) {
        auto* const to = static_cast<float*>(array(from.size() * sizeof(float)));
        stream.copy(to, from.data(), from.size() * sizeof(float));
        return to;
    };
    bench::transformer_step step{
        .tokens = tokens, .x = upload(x), .residual = upload(residual), .weight = upload(weight)};
    for (float** p : {&step.summed, &step.added, &step.normed}) *p = static_cast<float*>(array(n * sizeof(float)));
    step.scratch = static_cast<float*>(array(2 * ranks * width * sizeof(float)));
    step.out = static_cast<gpushare::bfloat16*>(array(n * sizeof(gpushare::bfloat16)));
    const gpushare::launch_options shape{.blocks = 2, .threads = 64, .patience = std::chrono::seconds(1)};
    std::vector<std::vector<std::uint16_t>> results;
    const auto keep = [&] {
        results.emplace_back(n);
        stream.copy(results.back().data(), step.out, n * sizeof(std::uint16_t));
        (void)stream.record().wait(gpushare::never);
    };
    CHECK(bench::launch_fused(all, step, shape) == gpushare::errc::none);
    keep();
    CHECK(bench::launch_all_reduce(all, step.x, step.summed, tokens * width, shape) == gpushare::errc::none);
    bench::launch_passes(all, step, shape);
    keep();
    bench::launch_one_pass(all, step, shape);
    keep();
    CHECK(gpushare::fault_of(members[0]).code == gpushare::errc::none);
    for (const auto& [p, bytes] : taken) (void)node.memory(device).deallocate(p, bytes, 256);
    return results;
}

}  // namespace

TEST_CASE("a fused step has the bits of its passes as compiled", "[compiled]") {
    standin::reset({.devices = 1, .memory = gpushare::bytes{1 << 30}});
    const auto results = steps_three_ways(2);
    CHECK(results[0] == results[1]);
    CHECK(results[0] == results[2]);
    CHECK(standin::take_findings() == "");
    standin::reset(jobs::roomy);
}

TEST_CASE("the suite says that devices without its kernels aren't supported", "[compiled]") {
    standin::reset({.devices = 1, .capability = 80});
    CHECK_FALSE(collectives_suite::has_kernels());
    standin::reset(jobs::roomy);
    CHECK(collectives_suite::has_kernels());
}

TEST_CASE("all-reduces of any shape are right as compiled", "[compiled]") { check_random_workloads(40); }
TEST_CASE("many all-reduces of any shape are right as compiled", "[.long]") { check_random_workloads(2000); }
