// SPDX-License-Identifier: Apache-2.0
#include "data_parallel_training/report.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <system_error>
#include <vector>

#include "trace_replay/svg.hpp"

namespace data_parallel_training {

namespace {

using trace_replay::canvas;
using trace_replay::point;

template <class N>
N number(std::string_view option, std::string_view text, N least, N most) {
    N n{};
    const auto [stop, code] = std::from_chars(text.data(), text.data() + text.size(), n);
    if (code != std::errc{} || stop != text.data() + text.size() || n < least || n > most)
        throw usage_error(std::string(option) + ": '" + std::string(text) + "' is not a number from " +
                          std::to_string(least) + " to " + std::to_string(most));
    return n;
}

constexpr std::array<std::string_view, 3> component_names{"compute", "exposed communication", "optimiser"};
constexpr std::array<std::string_view, 3> component_colours{"#4878a8", "#d1603d", "#6a9f58"};
std::array<double, 3> components(const step_time& t) { return {t.compute, t.exposed, t.optimiser}; }

/// Medians over groups of steps, so that a picture of a thousand steps has readable lines.
std::vector<std::array<double, 3>> smoothed(const std::vector<step_time>& times, std::size_t groups) {
    std::vector<std::array<double, 3>> all;
    for (std::size_t g = 0; g < groups; ++g) {
        const std::size_t begin = g * times.size() / groups, end = (g + 1) * times.size() / groups;
        std::array<double, 3> medians{};
        for (std::size_t c = 0; c < 3; ++c) {
            std::vector<double> some;
            for (std::size_t i = begin; i < end; ++i) some.push_back(components(times[i])[c]);
            if (some.empty()) continue;
            std::nth_element(some.begin(), some.begin() + static_cast<std::ptrdiff_t>(some.size() / 2), some.end());
            medians[c] = some[some.size() / 2];
        }
        all.push_back(medians);
    }
    return all;
}

}  // namespace

std::string_view help_text() {
    return "usage: data_parallel_training [OPTION...]\n"
           "Trains a small network on handwritten digits. Each rank works on its part of every batch.\n\n"
           "  --data FILE      the digits: digits.csv of scikit-learn\n"
           "  --ranks N        ranks of each process, 1 to 16; a rank is a thread (default 2)\n"
           "  --network KIND   convolutional, or encoder for a transformer's encoder (default convolutional)\n"
           "  --epochs N       how many times the training goes through all digits (default 20)\n"
           "  --batch N        digits in a step, over all ranks together (default 32)\n"
           "  --bucket BYTES   bytes of gradients that are combined at once (default 16384)\n"
           "  --wire FORMAT    the format of gradients between ranks: float32, float16 or bfloat16 (default float32)\n"
           "  --sharded        each rank updates only its shard of the parameters, and keeps only its own momentum\n"
           "  --patience MS    how long a rank waits for another rank, in milliseconds (default 30000)\n"
           "  --lost WHAT      what to do when a process is lost: stop, or go-on without it (default stop)\n"
           "  --fail R:STEP    process R kills itself after that step, to show how the other processes react\n"
           "  --tenant         threads only: train as a best-effort tenant with a device for each rank, first alone,\n"
           "                   and then behind a tenant that answers requests with a latency goal\n"
           "  --svg FILE       the file for the picture (default data_parallel_training.svg)\n"
           "  --help           print this text\n";
}

command parse(std::span<const char* const> arguments) {
    command c;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        const std::string_view option = arguments[i];
        if (option == "--help") {
            c.help = true;
            continue;
        }
        if (option == "--sharded") {
            c.training.sharded = true;
            continue;
        }
        if (option == "--tenant") {
            c.tenant = true;
            continue;
        }
        if (i + 1 == arguments.size())
            throw usage_error(std::string(option) + ": unknown, or without a value; see --help");
        const std::string_view value = arguments[++i];
        if (option == "--data")
            c.data = value;
        else if (option == "--svg")
            c.svg = value;
        else if (option == "--ranks")
            c.ranks = number<std::uint32_t>(option, value, 1, 16);
        else if (option == "--epochs")
            c.training.epochs = number<std::size_t>(option, value, 1, 1000);
        else if (option == "--batch")
            c.training.batch = number<std::size_t>(option, value, 1, 1024);
        else if (option == "--bucket")
            c.training.fusion.bucket = gpushare::bytes{number<std::uint64_t>(option, value, 1, 1 << 30)};
        else if (option == "--network" && (value == "convolutional" || value == "encoder"))
            c.training.kind = value == "encoder" ? network_kind::encoder : network_kind::convolutional;
        else if (option == "--lost" && (value == "stop" || value == "go-on"))
            c.go_on = value == "go-on";
        else if (option == "--fail" && value.find(':') != value.npos) {
            c.fail_rank = number<std::uint32_t>(option, value.substr(0, value.find(':')), 0, 1000);
            c.fail_step = number<std::size_t>(option, value.substr(value.find(':') + 1), 1, 1'000'000);
        } else if (option == "--patience")
            c.training.patience = std::chrono::milliseconds(number<std::int64_t>(option, value, 1, 3'600'000));
        else if (option == "--wire" && value == "float32")
            c.training.wire = gpushare::wire_format::as_is;
        else if (option == "--wire" && value == "float16")
            c.training.wire = gpushare::wire_format::fp16;
        else if (option == "--wire" && value == "bfloat16")
            c.training.wire = gpushare::wire_format::bf16;
        else
            throw usage_error(std::string(option) + " " + std::string(value) + ": unknown; see --help");
    }
    if (c.training.sharded && c.go_on)
        throw usage_error(
            "--sharded: the momentum that a lost process had is lost, so the others can't go on without it");
    return c;
}

void check(const command& asked, const digits& data, std::uint32_t ranks) {
    if (asked.training.batch % ranks != 0)
        throw usage_error("--batch: " + std::to_string(asked.training.batch) + " digits can't be divided among " +
                          std::to_string(ranks) + " ranks");
    if (data.size() < asked.training.held_out + asked.training.batch)
        throw usage_error("--data: " + std::to_string(data.size()) + " digits are too few");
}

void draw_progress(std::size_t step, std::size_t steps, float loss) {
    static const bool is_terminal = isatty(STDERR_FILENO) != 0;
    constexpr std::size_t width = 40;
    if (!is_terminal || (step % 8 != 0 && step != steps)) return;
    std::string bar(width * step / steps, '#');
    bar.resize(width, '.');
    std::fprintf(stderr, "\r[%s] %zu of %zu, loss %.4f%s", bar.c_str(), step, steps, static_cast<double>(loss),
                 step == steps ? "\n" : "");
}

bool print(const training_result& r, std::string_view who) {
    const int n = static_cast<int>(who.size());
    if (r.fault) {
        std::fprintf(stderr, "%.*s: stopped after %zu steps: %s%s%s\n", n, who.data(), r.losses.size(),
                     gpushare::describe(r.fault).c_str(),
                     r.waiting_for.empty() ? "" : "; not ready here: ", r.waiting_for.c_str());
        return false;
    }
    const auto times = smoothed(r.times, 1).front();
    std::printf("%.*s: accuracy %.1f %%, loss %.4f, %zu steps skipped, parameters %016" PRIx64 ", %s\n", n, who.data(),
                100 * r.accuracy, static_cast<double>(r.losses.back()), r.skipped, r.fingerprint,
                r.all_alike ? "the same on all ranks" : "NOT the same on all ranks");
    std::printf("a step: %.2f ms computing, %.2f ms waiting for gradients, %.2f ms optimising\n", 1e3 * times[0],
                1e3 * times[1], 1e3 * times[2]);
    return r.all_alike;
}

void write_svg(const training_result& r, std::string_view who, const std::string& path) {
    constexpr double width = 900, left = 70, right = width - 30;
    canvas c(width, 560);
    c.text({left, 32}, "Training on handwritten digits: " + std::string(who), {.size = 18, .bold = true});
    const auto frame = [&](double top, double bottom, const char* name, double most, const char* unit) {
        c.text({left, top - 10}, name, {.size = 13, .fill = "#444"});
        for (int i = 0; i <= 4; ++i) {
            const double y = bottom - (bottom - top) * i / 4;
            c.line({left, y}, {right, y}, "#ddd", 1);
            c.text({left - 8, y + 4}, trace_replay::fixed(most * i / 4, 2) + unit,
                   {.size = 11, .fill = "#666", .anchor = "end"});
        }
    };
    const double most_loss = *std::max_element(r.losses.begin(), r.losses.end());
    frame(80, 270, "loss of each step", most_loss, "");
    std::vector<point> losses;
    for (std::size_t i = 0; i < r.losses.size(); ++i)
        losses.push_back({left + (right - left) * static_cast<double>(i) / static_cast<double>(r.losses.size()),
                          270 - 190 * static_cast<double>(r.losses[i]) / most_loss});
    c.polyline(losses, "#333", 1);
    const std::size_t groups = std::min<std::size_t>(r.times.size(), 120);
    const auto times = smoothed(r.times, groups);
    double most = 0;
    for (const auto& t : times) most = std::max(most, t[0] + t[1] + t[2]);
    frame(340, 500, "a step's time", 1e3 * most, " ms");
    for (std::size_t g = 0; g < groups; ++g) {
        double y = 500;
        const double x = left + (right - left) * static_cast<double>(g) / static_cast<double>(groups);
        for (std::size_t k = 0; k < 3; ++k) {
            const double h = 160 * times[g][k] / most;
            y -= h;
            c.rectangle({x, y}, (right - left) / static_cast<double>(groups), h, component_colours[k]);
        }
    }
    double x = left;
    for (std::size_t k = 0; k < 3; ++k) {
        c.rectangle({x, 522}, 12, 12, component_colours[k]);
        c.text({x + 18, 533}, component_names[k], {.size = 12});
        x += 40 + trace_replay::text_width(component_names[k], 12);
    }
    std::ofstream file(path);
    file << std::move(c).finish("loss and step time of a data-parallel training");
    if (!file.flush()) throw std::runtime_error("cannot write the picture to " + path);
}

}  // namespace data_parallel_training
