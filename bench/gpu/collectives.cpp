// SPDX-License-Identifier: Apache-2.0
// Runs collectives of several ranks on one device: checks the sums, measures the speed at each
// size, and measures the gain from fusing.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/pinned.hpp>
#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/quantised_all_reduce.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/device_buckets.hpp>

#include "collective_kernels.hpp"
#include "collective_kinds.hpp"
#include "experiments.hpp"
#include "rig.hpp"

namespace bench {

namespace {

using gpushare::algorithm;
using gpushare::all_reduce_plan;
using gpushare::bytes;
using gpushare::never;

constexpr std::size_t slot = 32768;  // for each block
// Threads per block. Two blocks of 512 threads fit on an SM if the kernels need few registers.
std::uint32_t block() { return sized(512U, 64U); }

/// A group of ranks that share the device.
class shared_ranks {
public:
    shared_ranks(rig& device, std::uint32_t ranks, std::uint32_t blocks, std::size_t of_slot = slot)
        : device_(&device),
          visible_(device.node),
          devices_(ranks, device.device),
          group_(device.node, visible_, devices_, {.blocks = blocks, .slot = bytes{of_slot}}),
          stream_(device.stream()) {
        for (std::uint32_t r = 0; r < ranks; ++r) members_.push_back(group_.rank(r));
    }
    [[nodiscard]] rank_group all() { return {device_->node, device_->device, stream_, members_}; }
    [[nodiscard]] std::uint32_t size() const noexcept { return group_.size(); }
    [[nodiscard]] cu::stream& stream() noexcept { return stream_; }
    void use(gpushare::tuning_table table) { group_.set_tuning(std::move(table)); }

    /// Throws if the group has failed or if a launch was refused.
    void check(gpushare::errc launched) const {
        gpushare::raise_fault(gpushare::fault_of(members_[0]));
        if (launched != gpushare::errc::none)
            throw std::runtime_error("a collective was refused: " + std::string(gpushare::to_string(launched)));
    }
    /// Returns, for each repeat, the microseconds per launch of `count` launches in sequence. The
    /// launches are captured in a graph, and points around the replay give the time, so that the
    /// host's work for submitting doesn't count.
    template <class Launch>
    [[nodiscard]] std::vector<double> times(std::size_t repeats, int count, const Launch& launch) {
        const cu::graph recorded = cu::capture(stream_, [&](cu::stream&) {
            for (int i = 0; i < count; ++i) launch();
        });
        cu::graph_executable replay(recorded);
        return repeated(repeats, [&] {
            const auto begin = stream_.record();
            replay.launch(stream_);
            const auto end = stream_.record();
            end.wait(never);
            check(gpushare::errc::none);
            return to_us(elapsed(begin, end)) / count;
        });
    }

private:
    rig* device_;
    cu::pinned_memory visible_;
    std::vector<gpushare::device_id> devices_;
    gpushare::device_communicator<cu::node, cu::pinned_memory> group_;
    cu::stream stream_;
    std::vector<gpushare::member> members_;
};

double median(std::vector<double> values) {
    std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
    return values[values.size() / 2];
}

constexpr std::array plans{all_reduce_plan{algorithm::one_shot}, all_reduce_plan{algorithm::two_shot},
                           all_reduce_plan{algorithm::two_shot, true}, all_reduce_plan{algorithm::ring}};

float element(std::uint32_t rank, std::size_t i) { return static_cast<float>((i * 7 + rank * 3) % 11) - 5; }

/// The expected results of the collectives other than all-reduce. Rank r contributes element(r, i),
/// and its output holds the same values beforehand.
struct definition {
    std::uint32_t ranks;
    std::size_t part;

    /// Unequal lengths, some of which are 0. The length of a pair is the same in both directions.
    [[nodiscard]] std::uint64_t length(std::uint32_t r) const { return r % 3 == 1 ? 0 : part - (part - 1) * r / ranks; }
    [[nodiscard]] std::uint64_t of_pair(std::uint32_t r, std::uint32_t q) const { return length((r + q) % ranks); }
    [[nodiscard]] std::vector<std::uint64_t> lengths() const {
        std::vector<std::uint64_t> all;
        for (std::uint32_t r = 0; r < ranks; ++r) {
            for (std::uint32_t q = 0; q < ranks; ++q) all.push_back(length(q));
            for (std::uint32_t q = 0; q < ranks; ++q) all.push_back(of_pair(r, q));
        }
        return all;
    }
    [[nodiscard]] float sum(std::size_t i) const {
        float all = 0;
        for (std::uint32_t q = 0; q < ranks; ++q) all += element(q, i);
        return all;
    }
    [[nodiscard]] std::vector<float> result(collective which, std::uint32_t r) const {
        std::vector<float> x(ranks * part);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = element(r, i);
        if (which == collective::broadcast)
            for (std::size_t i = 0; i < x.size(); ++i) x[i] = element(ranks - 1, i);
        else if (which == collective::reduce && r == ranks - 1)
            for (std::size_t i = 0; i < x.size(); ++i) x[i] = sum(i);
        else if (which == collective::reduce_scatter)
            for (std::size_t i = 0; i < part; ++i) x[i] = sum(r * part + i);
        else if (which == collective::reduce_scatterv)
            for (std::size_t i = 0; i < length(r); ++i) x[i] = sum(before(r) + i);
        else
            gather(which, r, x);
        return x;
    }

private:
    [[nodiscard]] std::size_t before(std::uint32_t r) const {
        std::size_t all = 0;
        for (std::uint32_t q = 0; q < r; ++q) all += length(q);
        return all;
    }
    /// The start of the data that rank q has for rank r.
    [[nodiscard]] std::size_t before(std::uint32_t q, std::uint32_t r) const {
        std::size_t all = 0;
        for (std::uint32_t k = 0; k < r; ++k) all += of_pair(q, k);
        return all;
    }
    void gather(collective which, std::uint32_t r, std::vector<float>& x) const {
        std::size_t at = 0;
        const auto put = [&](std::uint32_t q, std::size_t first, std::size_t n) {
            for (std::size_t i = 0; i < n; ++i) x[at++] = element(q, first + i);
        };
        for (std::uint32_t q = 0; q < ranks; ++q) {
            if (which == collective::all_gather) put(q, 0, part);
            if (which == collective::all_to_all) put(q, r * part, part);
            if (which == collective::all_gatherv) put(q, 0, length(q));
            if (which == collective::all_to_allv) put(q, before(q, r), of_pair(q, r));
        }
    }
};

/// Counts the wrong elements that the collectives other than all-reduce produce.
double wrong_of_others(rig& device, std::uint32_t ranks, std::size_t part, std::uint32_t threads, double& checked) {
    shared_ranks group(device, ranks, 4);
    const definition by{ranks, part};
    const std::size_t whole = ranks * part;
    device_array<float> in(device, ranks * whole), out(device, ranks * whole);
    device_array<std::uint64_t> lengths(device, by.lengths().size());
    std::vector<float> x(ranks * whole);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = element(static_cast<std::uint32_t>(i / whole), i % whole);
    const auto of_lengths = by.lengths();
    group.stream().copy(lengths.data(), of_lengths.data(), of_lengths.size() * sizeof(std::uint64_t));
    double wrong = 0;
    for (const collective which : collectives) {
        group.stream().copy(in.data(), x.data(), x.size() * sizeof(float));
        group.stream().copy(out.data(), x.data(), x.size() * sizeof(float));
        group.check(
            launch_collective(group.all(), which, {in.data(), out.data(), part, lengths.data()}, {.threads = threads}));
        const auto result = out.read(group.stream(), ranks * whole);
        group.check(gpushare::errc::none);
        for (std::uint32_t r = 0; r < ranks; ++r) {
            const auto expected = by.result(which, r);
            for (std::size_t i = 0; i < whole; ++i) wrong += result[r * whole + i] != expected[i] ? 1 : 0;
        }
        checked += static_cast<double>(ranks * whole);
    }
    return wrong;
}

}  // namespace

void collective_sums(report& r) {
    rig device;
    const std::uint32_t threads = block();
    double wrong = 0, checked = 0;
    for (const std::uint32_t ranks : {1U, 2U, 3U, 8U})
        for (const std::size_t part : {std::size_t{1}, std::size_t{255}, sized<std::size_t>(20'001, 601)})
            wrong += wrong_of_others(device, ranks, part, threads, checked);
    const std::size_t most = sized<std::size_t>(100'003, 3'001);
    for (const std::uint32_t ranks : {1U, 2U, 3U, 8U, 16U}) {
        shared_ranks group(device, ranks, 4);
        device_array<float> in(device, ranks * most), out(device, ranks * most);
        for (const auto& plan : plans)
            for (const std::size_t n : {std::size_t{1}, std::size_t{255}, std::size_t{2048}, most})
                for (const bool in_place : {false, true}) {
                    if (small_form && ranks == 16 && plan.how != algorithm::two_shot)
                        continue;  // the rehearsal would need a thread for each block
                    std::vector<float> x(ranks * n);
                    for (std::uint32_t rank = 0; rank < ranks; ++rank)
                        for (std::size_t i = 0; i < n; ++i) x[rank * n + i] = element(rank, i);
                    group.stream().copy(in.data(), x.data(), x.size() * sizeof(float));
                    group.use(gpushare::tuning_table::always(plan));
                    const std::uint32_t blocks = std::min(n == 255 ? 1U : 4U, most_blocks(group.all(), threads));
                    group.check(launch_all_reduce(group.all(), in.data(), in_place ? in.data() : out.data(), n,
                                                  {.blocks = blocks, .threads = threads}));
                    const auto result = (in_place ? in : out).read(group.stream(), ranks * n);
                    group.check(gpushare::errc::none);
                    for (std::size_t i = 0; i < n; ++i) {
                        float sum = 0;
                        for (std::uint32_t rank = 0; rank < ranks; ++rank) sum += element(rank, i);
                        for (std::uint32_t rank = 0; rank < ranks; ++rank) wrong += result[rank * n + i] != sum ? 1 : 0;
                    }
                    checked += static_cast<double>(ranks * n);
                }
    }
    r.figure("gpu.collective_sums_checked", {checked}, "elements");
    expect_none(r, "gpu.collective_sums_wrong", wrong, "elements");
}

void collective_speed(report& r) {
    const std::uint32_t threads = block();
    const std::uint64_t largest = sized(std::uint64_t{64} << 20, 16'384);
    rig device;
    // Times in us; copies in bytes per us, of which the fastest counts, since speed depends on the
    // addresses.
    double slowest_small = 0, best_copy = 0;
    for (const std::uint32_t ranks : {2U, 4U, 8U}) {
        const std::uint32_t most_lanes = sized(device.properties().sms * 4 / ranks, 2);
        shared_ranks group(device, ranks, most_lanes);
        const std::uint32_t most = std::min(most_lanes, most_blocks(group.all(), threads));
        device_array<float> in(device, ranks * largest / sizeof(float)), out(device, ranks * largest / sizeof(float));

        const auto took = [&](const all_reduce_plan& plan, bytes size) {
            const std::uint64_t of_block = size.count() / plan.blocks;
            if (!gpushare::detail::fits_slot(plan.how, of_block, slot) || of_block > (std::uint64_t{4} << 20))
                // The library would use another plan, or the run would be hopelessly slow.
                return std::numeric_limits<double>::infinity();
            group.use(gpushare::tuning_table::always(plan));
            return median(group.times(sized(5, 1), sized(size.count() <= 65'536 ? 20 : 3, 1), [&] {
                group.check(launch_all_reduce(group.all(), in.data(), out.data(), size.count() / sizeof(float),
                                              {.threads = threads}));
            }));
        };
        const auto table = gpushare::tune_submitted(
            ranks, took,
            {.smallest = bytes{1024}, .largest = bytes{largest}, .arena = bytes{largest}, .most_blocks = most});
        r.text("table_of_" + std::to_string(ranks) + "_ranks", table.save());
        const std::string name = "gpu.all_reduce_of_" + std::to_string(ranks) + "_ranks_";
        for (std::uint64_t size = 1024; size <= largest; size *= 4) {
            const all_reduce_plan plan = table.plan(ranks, size);
            const double us = took(plan, bytes{size});
            std::printf("# %u ranks, %llu bytes: %.1f us, %s%s, %u blocks a rank\n", ranks,
                        static_cast<unsigned long long>(size), us, std::string(to_string(plan.how)).c_str(),
                        plan.streaming ? " streaming" : "", plan.blocks);
            if (size <= 65'536) slowest_small = std::max(slowest_small, us);
            if (size == 65'536 || size == largest) r.figure(name + std::to_string(size >> 10) + "kib_us", {us}, "us");
            if (size != largest) continue;
            // An all-reduce counts as 2RS bytes; the copy below reads and writes the same number of
            // bytes.
            const std::size_t half = ranks * largest;
            const double copy_us =
                median(group.times(sized(11, 1), 3, [&] { group.stream().copy(out.data(), in.data(), half); }));
            r.figure(name + "gb_per_s", {2e-3 * static_cast<double>(half) / us}, "GB/s");
            best_copy = std::max(best_copy, static_cast<double>(half) / copy_us);
            r.figure(name + "copy_fraction", {static_cast<double>(half) / us / best_copy}, "of a copy");
        }
    }
    r.figure("gpu.all_reduce_up_to_64kib_us", {slowest_small}, "us");
}

namespace {

/// The median time in microseconds with the best number of blocks. `launch` takes the number from
/// the table.
template <class Launch>
double best_us(shared_ranks& group, std::uint32_t most, const Launch& launch) {
    double best = std::numeric_limits<double>::infinity();
    for (std::uint32_t blocks = most; blocks != 0 && blocks * 8 > most; blocks /= 2) {
        group.use(
            gpushare::tuning_table::always({.how = algorithm::two_shot, .blocks = static_cast<std::uint16_t>(blocks)}));
        best =
            std::min(best, median(group.times(sized<std::size_t>(5, 1), sized(3, 1), [&] { group.check(launch()); })));
    }
    return best;
}

/// Counts elements whose quantised sum, of floats between -1 and 1, is further off than the library
/// promises.
double quantised_sums_off(shared_ranks& group, device_array<float>& in, device_array<float>& out, std::size_t n) {
    const std::uint32_t ranks = group.size();
    std::vector<float> x(ranks * n);
    for (std::size_t i = 0; i < x.size(); ++i)
        // Values of all magnitudes.
        x[i] = static_cast<float>(i * 2'654'435'761U % 65'536) / 32'768 - 1;
    group.stream().copy(in.data(), x.data(), x.size() * sizeof(float));
    group.check(launch_quantised_all_reduce(group.all(), in.data(), out.data(), n, {.threads = block()}));
    const auto sums = out.read(group.stream(), ranks * n);
    group.check(gpushare::errc::none);
    double off = 0;
    for (std::size_t i = 0; i < n; ++i) {
        double sum = 0, magnitudes = 0;
        for (std::uint32_t r = 0; r < ranks; ++r) {
            sum += static_cast<double>(x[r * n + i]);
            magnitudes += std::abs(static_cast<double>(x[r * n + i]));
        }
        // No value is larger than 1.
        const double bound = gpushare::quantised_error_bound(magnitudes, ranks, ranks);
        for (std::uint32_t r = 0; r < ranks; ++r)
            off += std::abs(static_cast<double>(sums[r * n + i]) - sum) > bound || sums[r * n + i] != sums[i] ? 1 : 0;
    }
    return off;
}

}  // namespace

void collective_quantised(report& r) {
    // Larger slots mean fewer chunks and fewer waits.
    constexpr std::size_t quantised_slot = std::size_t{128} << 10;
    const std::size_t n = sized<std::size_t>(std::size_t{64} << 20, 8192) / sizeof(float);
    rig device;
    double least = std::numeric_limits<double>::infinity(), off = 0;
    for (const std::uint32_t ranks : {2U, 4U, 8U}) {
        const std::uint32_t most_lanes = sized(device.properties().sms * 2 / ranks, 2);
        shared_ranks group(device, ranks, most_lanes, quantised_slot);
        const std::uint32_t most = std::min(most_lanes, most_blocks(group.all(), block()));
        device_array<float> in(device, ranks * n), out(device, ranks * n);
        off += quantised_sums_off(group, in, out, std::min<std::size_t>(n, 100'003));
        const gpushare::launch_options shape{.threads = block()};
        const double exact =
            best_us(group, most, [&] { return launch_all_reduce(group.all(), in.data(), out.data(), n, shape); });
        const double quantised = best_us(
            group, most, [&] { return launch_quantised_all_reduce(group.all(), in.data(), out.data(), n, shape); });
        std::printf("# %u ranks: exact %.1f us, quantised %.1f\n", ranks, exact, quantised);
        least = std::min(least, exact / quantised);
    }
    r.figure("gpu.quantised_all_reduce_gain", {least}, "x");
    expect_none(r, "gpu.quantised_sums_off", off, "elements");
}

void collective_fused(report& r) {
    const std::uint32_t threads = block();
    constexpr std::size_t width = transformer_step::width;
    rig device;
    double least = std::numeric_limits<double>::infinity(), least_field = least, off = 0;
    const std::size_t fewest_tokens = sized<std::size_t>(16, 2), most_tokens = sized<std::size_t>(2048, 2);
    for (const std::uint32_t ranks : {2U, 8U}) {
        const std::uint32_t most_lanes = sized(device.properties().sms * 2 / ranks, 2);
        shared_ranks group(device, ranks, most_lanes);
        const std::uint32_t most = std::min(most_lanes, most_blocks(group.all(), threads));
        const std::size_t all = ranks * most_tokens * width;
        device_array<float> x(device, all), residual(device, all), weight(device, width), summed(device, all);
        device_array<float> added(device, all), normed(device, all), scratch(device, std::size_t{ranks} * most * width);
        device_array<gpushare::bfloat16> out(device, all);
        std::vector<float> numbers(all);
        for (std::size_t i = 0; i < all; ++i) numbers[i] = element(0, i);
        group.stream().copy(x.data(), numbers.data(), all * sizeof(float));
        const std::vector<float> ones(width, 1.0F);
        group.stream().copy(weight.data(), ones.data(), width * sizeof(float));
        group.stream().record().wait(never);

        for (std::size_t tokens = fewest_tokens; tokens <= most_tokens; tokens *= tokens == 1024 ? 2 : 4) {
            transformer_step step{tokens,       x.data(),      residual.data(), weight.data(), summed.data(),
                                  added.data(), normed.data(), out.data(),      scratch.data()};
            // All ranks have the same residual.
            const std::size_t of_rank = step.of_rank();
            for (std::size_t i = 0; i < ranks * of_rank; ++i) numbers[i] = element(1, i % of_rank);
            group.stream().copy(residual.data(), numbers.data(), ranks * of_rank * sizeof(float));
            group.stream().record().wait(never);
            const auto blocks = static_cast<std::uint32_t>(std::min<std::size_t>(most, tokens));
            const gpushare::launch_options shape{.blocks = blocks, .threads = threads};
            const auto sum = [&] {
                group.check(launch_all_reduce(group.all(), step.x, step.summed, step.of_rank(), shape));
            };
            const std::size_t repeats = sized<std::size_t>(7, 1);
            const int count = sized(tokens <= 64 ? 20 : 3, 1);
            const double fused =
                median(group.times(repeats, count, [&] { group.check(launch_fused(group.all(), step, shape)); }));
            // Printed only: the time of a two-shot, for small numbers of rows.
            const double two_shots = [&] {
                const auto table = gpushare::tuning_table::for_devices();
                group.use(gpushare::tuning_table({table.rows().begin(), table.rows().end()},
                                                 {{ranks, gpushare::tuning_table::any_bytes, {}}}));
                auto took = group.times(repeats, count, [&] { group.check(launch_fused(group.all(), step, shape)); });
                group.use(table);
                return median(std::move(took));
            }();
            const auto by_two_shots = out.read(group.stream(), ranks * step.of_rank());
            group.check(launch_fused(group.all(), step, shape));
            const auto by_fused = out.read(group.stream(), ranks * step.of_rank());
            const double passes = median(group.times(repeats, count, [&] {
                sum();
                launch_passes(group.all(), step, shape);
            }));
            const auto by_passes = out.read(group.stream(), ranks * step.of_rank());
            const double field = median(group.times(repeats, count, [&] {
                sum();
                launch_one_pass(group.all(), step, shape);
            }));
            for (std::size_t i = 0; i < by_fused.size(); ++i)
                off += by_fused[i] == by_passes[i] && by_fused[i] == by_two_shots[i] ? 0 : 1;
            std::printf(
                "# %u ranks, %zu tokens: fused %.1f us (by two shots %.1f), its steps %.1f, an all-reduce and one pass "
                "%.1f\n",
                ranks, tokens, fused, two_shots, passes, field);
            if (tokens == most_tokens)
                r.figure("gpu.fused_gain_of_" + std::to_string(ranks) + "_ranks_most_tokens", {passes / fused}, "x");
            least = std::min(least, passes / fused);
            least_field = std::min(least_field, field / fused);
        }
    }
    r.figure("gpu.fused_gain_min", {least}, "x");
    r.figure("gpu.fused_gain_field_min", {least_field}, "x");
    expect_none(r, "gpu.fused_results_off", off, "elements");
}

namespace {

/// The sizes of a ResNet-50's parameters: convolutions, each with the weights and biases of a norm,
/// and the last layer.
std::vector<std::size_t> of_resnet50() {
    std::vector<std::size_t> sizes;
    const auto convolution = [&](std::size_t in, std::size_t out, std::size_t window) {
        sizes.insert(sizes.end(), {in * out * window * window, out, out});
    };
    convolution(3, 64, 7);
    std::size_t in = 64;
    for (const auto& [blocks, width] : {std::pair<int, std::size_t>{3, 64}, {4, 128}, {6, 256}, {3, 512}})
        for (int b = 0; b < blocks; ++b) {
            convolution(in, width, 1);
            convolution(width, width, 3);
            convolution(width, 4 * width, 1);
            if (b == 0) convolution(in, 4 * width, 1);
            in = 4 * width;
        }
    sizes.insert(sizes.end(), {2048 * 1000, 1000});
    return sizes;
}
/// The sizes of the parameters of a BERT with 12 layers.
std::vector<std::size_t> of_bert() {
    constexpr std::size_t width = 768;
    std::vector<std::size_t> sizes{30'522 * width, 512 * width, 2 * width, width, width};
    const auto linear = [&](std::size_t in, std::size_t out) { sizes.insert(sizes.end(), {in * out, out}); };
    for (int layer = 0; layer < 12; ++layer) {
        for (int k = 0; k < 4; ++k) linear(width, width);  // query, key, value, output
        sizes.insert(sizes.end(), {width, width});
        linear(width, 4 * width);
        linear(4 * width, width);
        sizes.insert(sizes.end(), {width, width});
    }
    linear(width, width);
    return sizes;
}

/// The times to combine a step's gradients, in microseconds.
struct gradient_times {
    double flat = 0, in_place = 0, packed = 0, each = 0;
};

/// The gradients of all ranks in two layouts of the same memory. In the first layout, each gradient
/// has all ranks' parts next to each other, so that buckets must be packed. In the second layout,
/// each rank's gradients are one piece.
class gradient_setting {
public:
    gradient_setting(rig& device, std::uint32_t ranks, const std::vector<std::size_t>& sizes)
        : sizes_(sizes),
          ranks_(ranks),
          all_(std::accumulate(sizes.begin(), sizes.end(), std::size_t{0})),
          group_(device, ranks, sized(device.properties().sms * 2 / ranks, 2)),
          memory_(device, ranks * all_),
          apart_(ranks),
          one_piece_(ranks),
          staging_of_(ranks) {
        for (std::size_t before = 0; const std::size_t n : sizes) {
            apart_.add("", places(ranks * before, n), n);
            one_piece_.add("", places(before, all_), n);
            before += n;
        }
        if (one_piece_.packed_elements() != 0) throw std::runtime_error("one piece is packed");
        const std::size_t staged = apart_.staging_bytes().count() / sizeof(float);
        staging_.emplace(device, ranks * staged);
        for (std::uint32_t r = 0; r < ranks; ++r) staging_of_[r] = staging_->data() + r * staged;
    }

    /// Counts the wrong sums of packed buckets. Leaves zeros in memory, because sums of sums would
    /// grow.
    [[nodiscard]] double wrong_sums() {
        std::vector<float> x(ranks_ * all_);
        each_part([&](std::size_t at, std::uint32_t r, std::size_t i) { x[at] = element(r, i); });
        put(x);
        group_.check(launch_buckets(group_.all(), apart_, staging_of_, shape_));
        const auto sums = memory_.read(group_.stream(), ranks_ * all_);
        double wrong = 0;
        each_part([&](std::size_t at, std::uint32_t, std::size_t i) {
            float sum = 0;
            for (std::uint32_t r = 0; r < ranks_; ++r) sum += element(r, i);
            wrong += sums[at] != sum ? 1 : 0;
        });
        put(std::vector<float>(ranks_ * all_));
        return wrong;
    }
    [[nodiscard]] gradient_times times() {
        const auto time = [&](const auto& launch) {
            return median(group_.times(sized<std::size_t>(5, 1), 1, [&] { group_.check(launch()); }));
        };
        float* const all = memory_.data();
        gradient_times took;
        took.flat = time([&] { return launch_all_reduce(group_.all(), all, all, all_, shape_); });
        took.in_place = time([&] { return launch_buckets(group_.all(), one_piece_, staging_of_, shape_); });
        took.packed = time([&] { return launch_buckets(group_.all(), apart_, staging_of_, shape_); });
        took.each = time([&] {
            gpushare::errc code = gpushare::errc::none;
            for (std::size_t k = 0, first = 0; k < sizes_.size() && code == gpushare::errc::none;
                 first += ranks_ * sizes_[k++])
                code = launch_all_reduce(group_.all(), all + first, all + first, sizes_[k], shape_);
            return code;
        });
        return took;
    }

private:
    /// The ranks' places: rank r starts `step` elements after rank r - 1.
    [[nodiscard]] std::vector<float*> places(std::size_t first, std::size_t step) {
        std::vector<float*> at;
        for (std::uint32_t r = 0; r < ranks_; ++r) at.push_back(memory_.data() + first + r * step);
        return at;
    }
    /// Calls f(position, rank, element of the gradient) for gradients in the first layout.
    template <class F>
    void each_part(const F& f) const {
        std::size_t at = 0;
        for (const std::size_t n : sizes_)
            for (std::uint32_t r = 0; r < ranks_; ++r)
                for (std::size_t i = 0; i < n; ++i) f(at++, r, i);
    }
    void put(const std::vector<float>& x) {
        group_.stream().copy(memory_.data(), x.data(), x.size() * sizeof(float));
        group_.stream().record().wait(never);
    }

    std::vector<std::size_t> sizes_;
    std::uint32_t ranks_;
    std::size_t all_;
    gpushare::launch_options shape_{.threads = block()};
    shared_ranks group_;
    device_array<float> memory_;
    gpushare::device_buckets<float> apart_, one_piece_;
    std::optional<device_array<float>> staging_;
    std::vector<float*> staging_of_;
};

}  // namespace

void gradients(report& r) {
    rig device;
    double vs_flat = std::numeric_limits<double>::infinity(), packed_vs_flat = vs_flat, vs_each = vs_flat, wrong = 0;
    for (const bool bert : {false, true}) {
        std::vector<std::size_t> sizes = bert ? of_bert() : of_resnet50();
        if (small_form)
            for (std::size_t& n : sizes) n = std::max<std::size_t>(n / 20'000, 1);
        for (const std::uint32_t ranks : {2U, 4U, 8U}) {
            gradient_setting setting(device, ranks, sizes);
            wrong += setting.wrong_sums();
            const gradient_times took = setting.times();
            std::printf("# %s, %u ranks: flat %.0f us, buckets in place %.0f, packed %.0f, each alone %.0f\n",
                        bert ? "BERT" : "ResNet-50", ranks, took.flat, took.in_place, took.packed, took.each);
            vs_flat = std::min(vs_flat, took.flat / took.in_place);
            packed_vs_flat = std::min(packed_vs_flat, took.flat / took.packed);
            vs_each = std::min(vs_each, took.each / took.in_place);
        }
    }
    r.figure("gpu.buckets_vs_flat", {vs_flat}, "x");
    r.figure("gpu.buckets_packed_vs_flat", {packed_vs_flat}, "x");
    r.figure("gpu.buckets_vs_each", {vs_each}, "x");
    expect_none(r, "gpu.bucket_sums_wrong", wrong, "elements");
}

}  // namespace bench
