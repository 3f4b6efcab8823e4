// SPDX-License-Identifier: Apache-2.0
#include "gradient/link.hpp"

#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bench {

namespace {

using series = std::map<std::string, std::vector<double>, std::less<>>;

constexpr std::string_view slow = "--rate 1gbit --burst 256kb", fast = "--rate 10gbit --burst 4mb";
constexpr const char* rounds = "5";

/// Thrown when this machine can't run the measurement.
struct not_here : std::runtime_error {
    using runtime_error::runtime_error;
};

/// Runs a command on the left side of a link and reads the lines "NAME NUMBER" that it prints.
/// Fails if fewer than `at_least` bytes leave either side.
series over(std::string_view shape, const std::string& command, const std::string& at_least = "1000000") {
    const std::string line = std::string(GPUSHARE_SHAPED_LINK " --seconds 1200 --at-least ")
                                 .append(at_least)
                                 .append(" ")
                                 .append(shape)
                                 .append(" ")
                                 .append(command)
                                 .append(" 2>&1");
    std::FILE* const output = ::popen(line.c_str(), "r");
    if (output == nullptr) throw std::runtime_error("it couldn't be started: " + line);
    series all;
    std::string rest;
    std::array<char, 1024> text{};
    while (std::fgets(text.data(), text.size(), output) != nullptr) {
        std::array<char, 64> name{};
        double value = 0;
        char behind = 0;
        if (std::sscanf(text.data(), "%63[a-z_0-9] %lf%c", name.data(), &value, &behind) == 3 && behind == '\n')
            all[name.data()].push_back(value);
        else
            rest += text.data();
    }
    const int status = ::pclose(output);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) throw not_here(rest);
    if (status != 0) throw std::runtime_error(line + " failed:\n" + rest);
    return all;
}

std::string by_mpi(int processes, const char* placement, const std::string& options, const std::string& program) {
    return std::string(GPUSHARE_MPI_ACROSS " openmpi ") + std::to_string(processes) + " " + placement + " " + options +
           " " + program;
}

template <class F>
std::vector<double> each(const std::vector<double>& a, const std::vector<double>& b, const F& f) {
    if (a.size() != b.size() || a.empty()) throw std::runtime_error("measurements are missing");
    std::vector<double> all(a.size());
    std::transform(a.begin(), a.end(), b.begin(), all.begin(), f);
    return all;
}
double ratio(double a, double b) { return a / b; }
double median(const std::vector<double>& v) { return value_of(statistic::median, v); }

/// The difference of two steps has the noise of both steps, so each repeat is the median of eight
/// differences.
std::vector<double> medians_of_blocks(const std::vector<double>& all) {
    std::vector<double> medians;
    for (auto at = all.begin(); all.end() - at >= 8; at += 8) medians.push_back(median({at, at + 8}));
    return medians;
}

std::string milliseconds(const std::vector<double>& seconds) {
    return std::to_string(static_cast<int>(median(seconds) * 1000)) + " ms";
}

#ifdef GPUSHARE_BENCH_ALL_REDUCES
const std::string all_reduces = GPUSHARE_BENCH_ALL_REDUCES;

/// Compares two processes with the rate that iperf3 reaches before each round.
void utilisation(report& r) {
    const std::string one_round =
        "$GPUSHARE_ON_RIGHT iperf3 -s -1 >/dev/null & sleep 0.3; "
        "iperf3 -c $GPUSHARE_RIGHT -t 2 -f k | awk \"/receiver/ {print \\\"iperf_kbit \\\" \\$7}\"; wait; " +
        by_mpi(2, "blocks", "", all_reduces + " 64 1 alone");
    const auto all = over(slow, "bash -c 'for i in 1 2 3 4 5; do " + one_round + "; done'", "600000000");
    r.setting("peers", GPUSHARE_BENCH_PEERS);
    r.setting("iperf3 at 1 Gbit/s", std::to_string(static_cast<int>(median(all.at("iperf_kbit")))) + " kbit/s");
    r.setting("two processes, 64 MiB", milliseconds(all.at("ours")));
    r.figure("gradient.link_utilisation_pct",
             each(all.at("ours"), all.at("iperf_kbit"),
                  [](double s, double kbit) { return 100.0 * (64 << 20) * 8 / 1000.0 / s / kbit; }),
             "%");
}

struct candidate {
    const char* name;
    std::string options;
};
std::string by_algorithm(int n) {
    return "--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm " + std::to_string(n);
}
std::string by_han(const char* segment) {
    return std::string("--mca coll_han_priority 100 --mca coll_han_allreduce_segsize ") + segment;
}

/// Compares 2 x 2 ranks: tries each candidate once, then alternates between the best candidate and
/// ours.
void against(report& r, const char* figure, const char* what, const char* placement, const std::vector<candidate>& all,
             bool over_ours, const std::string& how = "") {
    const candidate* best = nullptr;
    double least = 0;
    std::string looks;
    for (const auto& c : all) {
        const auto look = over(slow, by_mpi(4, placement, c.options, all_reduces + " 64 1 " + how));
        looks += std::string(looks.empty() ? "" : "; ") + c.name + " " + milliseconds(look.at("mpi"));
        if (best != nullptr && median(look.at("mpi")) >= least) continue;
        best = &c;
        least = median(look.at("mpi"));
    }
    const auto took =
        over(slow, by_mpi(4, placement, best->options, all_reduces + " 64 " + rounds + " " + how), "400000000");
    r.setting(std::string(what) + ", " + placement + ", a look at each", looks);
    r.setting(std::string(what) + ", " + placement, std::string(best->name) + ", " + milliseconds(took.at("mpi")) +
                                                        ", ours " + milliseconds(took.at("ours")));
    r.figure(figure,
             over_ours ? each(took.at("mpi"), took.at("ours"), ratio) : each(took.at("ours"), took.at("mpi"), ratio),
             "x");
}
#endif

}  // namespace

void all_reduces_over_a_link([[maybe_unused]] report& r) {
#ifdef GPUSHARE_BENCH_ALL_REDUCES
    try {
        utilisation(r);
        const std::vector<candidate> flat{{"default", ""},
                                          {"ring", by_algorithm(4)},
                                          {"segmented ring", by_algorithm(5)},
                                          {"Rabenseifner", by_algorithm(6)}};
        against(r, "gradient.hier_vs_flat", "flat", "interleaved", flat, true);
        against(r, "gradient.hier_vs_flat_by_blocks", "flat", "blocks", flat, true);
        against(r, "gradient.hier_vs_han", "coll_han", "blocks",
                {{"segments of 64 KiB", by_han("65536")},
                 {"of 512 KiB", by_han("524288")},
                 {"of 2 MiB", by_han("2097152")}},
                false, "apart");
        const auto took = over(fast, by_mpi(2, "blocks", "", all_reduces + " 64 9"));
        if (took.contains("gloo_ring")) {
            const bool ring = median(took.at("gloo_ring")) < median(took.at("gloo_bcube"));
            const auto& gloo = took.at(ring ? "gloo_ring" : "gloo_bcube");
            r.setting("at 10 Gbit/s", "ours " + milliseconds(took.at("ours")) + ", Gloo's " +
                                          (ring ? "ring " : "bcube ") + milliseconds(gloo) + ", MPI_Allreduce " +
                                          milliseconds(took.at("mpi")));
            r.figure("gradient.inter_vs_gloo", each(took.at("ours"), gloo, ratio), "x");
        }
    } catch (const not_here& e) {
        r.is_void("gradient.link_utilisation_pct", e.what());
    }
#endif
}

void training_over_a_link([[maybe_unused]] report& r) {
#ifdef GPUSHARE_BENCH_TRAINING
    try {
        const auto took =
            over(slow, by_mpi(2, "blocks", "", std::string(GPUSHARE_BENCH_TRAINING " 16 40")), "1000000000");
        for (const auto& [name, seconds] : took)
            if (name.starts_with("look_")) std::printf("#   %s: %s\n", name.c_str(), milliseconds(seconds).c_str());
        for (const auto& [name, what] : {std::pair{"ddp_bucket_mib", "MiB of DDP's buckets"},
                                         std::pair{"our_bucket_mib", "MiB of ours that are tuned"},
                                         std::pair{"last_loss", "loss of the last step"},
                                         std::pair{"half_loss_off", "fp16's losses off by at most"}})
            r.setting(what, std::to_string(took.at(name).back()));
        const auto& theirs = took.at("ddp_exposed");
        r.setting("exposed by DDP", milliseconds(theirs) + " of " + milliseconds(took.at("ddp")));
        const auto& least = took.at("floor_exposed");
        r.setting("exposed by a link that costs the cores nothing", milliseconds(least));
        // The check below also fails if another program disturbed the steps without communication.
        if (median(theirs) < median(took.at("ddp")) / 20) {
            for (const char* figure :
                 {"gradient.exposed_vs_ddp", "gradient.exposed_vs_ddp_tuned", "gradient.exposed_vs_ddp_half"})
                r.is_void(figure, "DDP's communication took no time: steps aren't comparable");
            return;
        }
        for (const auto& [name, figure] :
             {std::pair{"ours", "gradient.exposed_vs_ddp"}, std::pair{"ours_tuned", "gradient.exposed_vs_ddp_tuned"},
              std::pair{"ours_half", "gradient.exposed_vs_ddp_half"}}) {
            const auto& exposed = took.at(std::string(name) + "_exposed");
            r.setting(std::string("exposed by ") + name, milliseconds(exposed) + " of " + milliseconds(took.at(name)));
            r.figure(figure, each(medians_of_blocks(exposed), medians_of_blocks(theirs), ratio), "x");
        }
        r.figure("gradient.exposed_floor_vs_ddp", each(medians_of_blocks(least), medians_of_blocks(theirs), ratio),
                 "x");
    } catch (const not_here& e) {
        r.is_void("gradient.exposed_vs_ddp", e.what());
    }
#endif
}

}  // namespace bench
