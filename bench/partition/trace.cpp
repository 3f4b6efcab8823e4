// SPDX-License-Identifier: Apache-2.0
#include "partition/trace.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <fstream>
#include <map>
#include <random>
#include <stdexcept>
#include <string_view>

#include <gpushare/units.hpp>

namespace bench {

namespace {

using namespace gpushare::literals;
using gpushare::device_model;
using gpushare::placement_request;
using gpushare::share;

std::vector<std::string_view> split(std::string_view line, char separator) {
    std::vector<std::string_view> parts;
    while (true) {
        const auto end = line.find(separator);
        parts.push_back(line.substr(0, end));
        if (end == std::string_view::npos) return parts;
        line.remove_prefix(end + 1);
    }
}

/// Reads a CSV file without quotes line by line.
class table {
public:
    explicit table(const std::filesystem::path& path) : path_(path.string()), file_(path) {
        if (!file_) throw std::runtime_error("cannot read " + path_);
        if (!next()) throw std::runtime_error(path_ + " is empty");
        header_.assign(fields_.begin(), fields_.end());
    }

    bool next() {
        do {
            if (!std::getline(file_, line_)) return false;
            ++number_;
            if (line_.ends_with('\r')) line_.pop_back();
        } while (line_.empty());
        fields_ = split(line_, ',');
        return true;
    }

    [[nodiscard]] bool has(std::string_view column) const {
        return std::ranges::find(header_, column) != header_.end();
    }
    [[nodiscard]] std::string_view text(std::string_view column) const {
        const auto at = static_cast<std::size_t>(std::ranges::find(header_, column) - header_.begin());
        if (at >= header_.size()) throw std::runtime_error(path_ + " has no column " + std::string(column));
        if (at >= fields_.size()) fail(column, "is missing");
        return fields_[at];
    }
    [[nodiscard]] std::uint64_t number(std::string_view column, std::uint64_t most) const {
        const auto field = text(column);
        std::uint64_t value = 0;
        const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
        if (error != std::errc{} || end != field.data() + field.size() || value > most)
            fail(column, "'" + std::string(field) + "' is not a number from 0 to " + std::to_string(most));
        return value;
    }
    [[noreturn]] void fail(std::string_view column, const std::string& why) const {
        throw std::runtime_error(path_ + ", line " + std::to_string(number_) + ": " + std::string(column) + " " + why);
    }

private:
    std::string path_;
    std::ifstream file_;
    std::string line_;
    std::size_t number_ = 0;
    std::vector<std::string> header_;
    std::vector<std::string_view> fields_;
};

constexpr std::uint64_t most_cpu_milli = 1'000'000'000, most_memory_mib = 1'000'000'000;

}  // namespace

placement_trace read_trace(const std::filesystem::path& pods, const std::filesystem::path& nodes) {
    placement_trace trace;
    trace.name = pods.filename().string() + " on " + nodes.filename().string();
    std::map<std::string, device_model, std::less<>> models;
    const auto model_of = [&](std::string_view name, const table& where, std::string_view column) {
        const auto known = models.find(name);
        if (known != models.end()) return known->second;
        if (models.size() == device_model::count) where.fail(column, "is one device model too many");
        return models.emplace(name, device_model{static_cast<std::uint8_t>(models.size())}).first->second;
    };

    for (table t(nodes); t.next();) {
        trace.nodes.add({.cpu_milli = t.number("cpu_milli", most_cpu_milli),
                         .memory = t.number("memory_mib", most_memory_mib) * 1_MiB,
                         .devices = static_cast<std::uint32_t>(t.number("gpu", gpushare::device_set::capacity)),
                         .model = model_of(t.text("model"), t, "model")});
    }
    for (table t(pods); t.next();) {
        placement_request r{.cpu_milli = t.number("cpu_milli", most_cpu_milli),
                            .memory = t.number("memory_mib", most_memory_mib) * 1_MiB,
                            .devices = static_cast<std::uint32_t>(t.number("num_gpu", gpushare::device_set::capacity))};
        if (r.devices != 0) r.each = share::of_permille(t.number("gpu_milli", 1000));
        if (t.has("gpu_spec") && !t.text("gpu_spec").empty()) {
            for (const auto name : split(t.text("gpu_spec"), '|')) r.models.add(model_of(name, t, "gpu_spec"));
        }
        trace.pods.push_back(r);
    }
    if (trace.pods.empty() || trace.nodes.capacity_permille() == 0)
        throw std::runtime_error(trace.name + ": no pods, or no GPUs");
    return trace;
}

placement_trace generate_trace(std::uint64_t seed) {
    struct node_row {
        int count;
        std::uint64_t cpu_milli, memory_mib;
        std::uint32_t devices;
        std::uint8_t model;
    };
    constexpr std::array nodes{node_row{549, 96'000, 393'216, 8, 0}, node_row{387, 104'000, 524'288, 2, 1},
                               node_row{107, 16'000, 122'880, 2, 2}, node_row{39, 128'000, 786'432, 8, 3},
                               node_row{28, 32'000, 131'072, 4, 4},  node_row{22, 64'000, 262'144, 2, 2},
                               node_row{21, 96'000, 786'432, 8, 5},  node_row{19, 8'000, 32'768, 1, 4},
                               node_row{17, 96'000, 393'216, 4, 1},  node_row{9, 48'000, 376'832, 4, 5},
                               node_row{8, 64'000, 262'144, 8, 4},   node_row{5, 8'000, 61'440, 1, 2},
                               node_row{2, 128'000, 1'048'576, 1, 6}};
    struct pod_row {
        double weight;
        std::uint32_t devices;
        unsigned permille;
        std::uint64_t cpu_milli, memory_mib;
    };
    constexpr std::array pods{pod_row{128, 1, 810, 3'150, 5'600},    pod_row{4, 1, 810, 4'150, 10'600},
                              pod_row{115, 1, 1000, 11'300, 49'152}, pod_row{85, 1, 1000, 11'400, 48'128},
                              pod_row{68, 1, 1000, 3'150, 5'600},    pod_row{40, 1, 1000, 18'700, 64'512},
                              pod_row{45, 1, 1000, 9'800, 41'560},   pod_row{60, 1, 1000, 12'000, 24'576},
                              pod_row{42, 1, 1000, 15'700, 58'368},  pod_row{25, 1, 1000, 4'000, 24'576},
                              pod_row{48, 1, 470, 11'900, 47'104},   pod_row{44, 1, 470, 8'000, 30'517},
                              pod_row{30, 1, 650, 11'900, 47'104},   pod_row{40, 1, 320, 4'000, 22'888},
                              pod_row{18, 1, 230, 4'000, 30'517},    pod_row{16, 1, 460, 6'000, 8'192},
                              pod_row{18, 1, 570, 3'600, 8'000},     pod_row{20, 1, 190, 4'000, 15'258},
                              pod_row{6, 1, 370, 4'150, 10'600},     pod_row{4, 1, 80, 2'000, 8'192},
                              pod_row{45, 0, 0, 12'500, 57'344},     pod_row{35, 0, 0, 32'000, 49'152},
                              pod_row{53, 0, 0, 12'000, 43'008},     pod_row{2, 2, 1000, 16'200, 66'560},
                              pod_row{2, 4, 1000, 32'200, 132'096},  pod_row{3, 8, 1000, 64'200, 263'168},
                              pod_row{2, 8, 1000, 88'000, 327'680},  pod_row{0.5, 8, 1000, 120'000, 700'000}};

    placement_trace trace;
    trace.name = "generated pods and nodes (built in, not the public trace)";
    for (const auto& n : nodes) {
        for (int i = 0; i < n.count; ++i)
            trace.nodes.add({n.cpu_milli, n.memory_mib * 1_MiB, n.devices, device_model{n.model}, {}});
    }
    double total = 0;
    for (const auto& p : pods) total += p.weight;
    std::mt19937_64 engine(seed);
    constexpr std::size_t count = 8152;
    while (trace.pods.size() < count) {
        // 53 random bits, so that every platform draws the same numbers.
        double at = total * static_cast<double>(engine() >> 11) / 9007199254740992.0;
        const auto* p = pods.data();
        while (p + 1 < pods.data() + pods.size() && at >= p->weight) at -= p++->weight;
        trace.pods.push_back({.cpu_milli = p->cpu_milli,
                              .memory = p->memory_mib * 1_MiB,
                              .devices = p->devices,
                              .each = share::of_permille(p->permille)});
    }
    return trace;
}

}  // namespace bench
