// SPDX-License-Identifier: Apache-2.0
// Recorded launches of real models that ran alone on a device. kernels.csv.gz has a row for each
// kernel, fill or copy.
//
//   const engines::recording all = engines::read_recording("kernels.csv.gz");
//   const std::vector<engines::iteration>& model = all.at("bert_graph");
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <gpushare/units.hpp>

#include "engines/device.hpp"

namespace engines {

using iteration = std::vector<kernel>;
using recording = std::map<std::string, std::vector<iteration>>;

namespace detail {

// Splits a line of comma-separated values. Quotes surround values that contain a comma.
inline std::vector<std::string> fields(const std::string& line) {
    std::vector<std::string> all(1);
    bool quoted = false;
    for (const char c : line) {
        if (c == '"')
            quoted = !quoted;
        else if (c == ',' && !quoted)
            all.emplace_back();
        else if (c != '\n' && c != '\r')
            all.back() += c;
    }
    return all;
}

enum column : std::uint8_t {
    model,
    number,
    kind = 3,
    name = 4,
    grid = 5,
    block = 8,
    registers = 11,
    shared_bytes = 12,
    duration = 15,
    launch = 16,
    bytes = 18,
    columns = 19
};

/// A kernel for tensor cores keeps its operands in shared memory and isn't bound by memory
/// bandwidth.
inline constexpr std::uint32_t shared_bytes_of_matrices = 48 << 10;

// In "nvjet_sm90_hsh_24x64_64x16_4x2_h_...", the third pair of numbers is the size of the cluster.
// The names of other libraries don't contain the size.
inline std::uint32_t cluster_of(const std::string& function) {
    std::uint32_t a = 0, b = 0;
    if (std::sscanf(function.c_str(), "nvjet_sm90_%*[^_]_%*ux%*u_%*ux%*u_%ux%u_", &a, &b) != 2) return 1;
    return a * b;
}

inline kernel kernel_of(const std::vector<std::string>& row, const device_shape& on) {
    const auto value = [&](int i) { return std::strtod(row[static_cast<std::size_t>(i)].c_str(), nullptr); };
    const auto whole = [&](int i) { return static_cast<std::uint32_t>(value(i)); };
    kernel k;
    k.alone = ns{static_cast<std::int64_t>(value(duration) * 1e3)};
    std::string function;
    for (int i = name; i < registers; ++i) function += row[static_cast<std::size_t>(i)] + ',';
    k.kind = std::hash<std::string>{}(function + (row[kind] == "kernel" ? "" : row[bytes]));
    if (row[kind] == "kernel") {
        k.blocks = whole(grid) * whole(grid + 1) * whole(grid + 2);
        k.block =
            block_of(whole(block) * whole(block + 1) * whole(block + 2), whole(registers), whole(shared_bytes), on);
        k.uses_memory = whole(shared_bytes) < shared_bytes_of_matrices;
        if (const std::uint32_t size = cluster_of(row[name]); size > 1 && k.blocks % size == 0) k.cluster = size;
    } else {  // a fill or a copy takes time in its stream, but no SM
        k.blocks = 0;
    }
    return k;
}

}  // namespace detail

/// Throws std::runtime_error if the file can't be read or contains no recording. Needs gzip.
inline recording read_recording(const std::string& path, const device_shape& on = h100) {
    std::FILE* const file = std::filesystem::exists(path) ? ::popen(("gzip -dc '" + path + "'").c_str(), "r") : nullptr;
    if (file == nullptr) throw std::runtime_error("cannot read " + path);
    recording all;
    std::string line;
    double launched = 0;  // start of the iteration's last launch
    for (int c = 0; (c = std::fgetc(file)) != EOF;) {
        if (line += static_cast<char>(c); c != '\n') continue;
        const auto row = detail::fields(line);
        line.clear();
        if (row.size() < detail::columns || row[0] == "model") continue;
        auto& iterations = all[row[0]];
        const auto n = static_cast<std::size_t>(std::strtoul(row[detail::number].c_str(), nullptr, 10));
        if (iterations.size() <= n) {
            iterations.resize(n + 1);
            launched = 0;
        }
        kernel k = detail::kernel_of(row, on);
        const double launch = std::strtod(row[detail::launch].c_str(), nullptr);
        k.host = ns{static_cast<std::int64_t>((iterations[n].empty() ? 0 : launch - launched) * 1e3)};
        launched = launch;
        iterations[n].push_back(k);
    }
    if (::pclose(file) != 0 || all.empty()) throw std::runtime_error("no recording in " + path);
    return all;
}

/// Returns the model with long launches cut into equal parts of at most `longest` each, which the
/// host launches at once.
inline std::vector<iteration> cut(const std::vector<iteration>& model, ns longest) {
    std::vector<iteration> shorter(model.size());
    for (std::size_t i = 0; i < model.size(); ++i)
        for (kernel k : model[i]) {
            const auto parts = std::max((k.alone + longest - ns{1}) / longest, std::int64_t{1});
            k.alone /= parts;
            for (std::int64_t part = 0; part < parts; ++part) {
                shorter[i].push_back(k);
                k.host = ns{0};  // the parts after the first cost the host no time
            }
        }
    return shorter;
}

}  // namespace engines
