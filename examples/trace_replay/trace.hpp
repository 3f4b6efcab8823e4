// SPDX-License-Identifier: Apache-2.0
// Reads a trace of inference requests: a CSV file with one row for each request, as published with
// Alibaba's cluster-trace-v2026-GenAI. Rows that a replay can't use are counted, with the reason. A
// file that isn't a trace is a trace_error with one clear line.
//
//   const trace_replay::trace t = trace_replay::read_trace_file("lora_request_trace.csv");
//   std::cout << to_string(t.summary) << '\n';
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace trace_replay {

/// One request that ran to its end on one device.
struct request {
    double arrival_s = 0;     // seconds since the earliest request that was kept
    std::string group;        // the group that sent the request; it becomes a tenant
    std::string model;        // base model
    std::uint32_t steps = 0;  // denoising steps, at least 1
    std::uint32_t loras = 0;  // adapters on top of the base model
    double exec_s = 0;        // device time, positive

    friend bool operator==(const request&, const request&) = default;
};

/// Rows that were left out for one reason, such as "status FAILED" or "empty num_inference_steps".
struct skipped_rows {
    std::string reason;
    std::size_t rows = 0;
    std::size_t first_line = 0;  // in the file, where the header is line 1
};

struct trace_summary {
    std::size_t rows = 0;  // without the header and empty lines
    std::size_t kept = 0;
    std::vector<skipped_rows> skipped;  // the most common reason first
};

/// For example "26392 of 26823 rows kept; skipped: 398 status FAILED (first in line 17), 30 status
/// PENDING (...)".
[[nodiscard]] std::string to_string(const trace_summary& summary);

struct trace {
    std::vector<request> requests;  // by arrival; requests of one second in the file's order
    // the time at which arrival_s is 0, in the file's own time zone
    std::chrono::sys_seconds start{};
    trace_summary summary;
};

/// Says that the file isn't a usable trace. `what()` is one line that names the file and, if known,
/// the line and the field.
class trace_error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// Finds columns by name, in any order, among others. `name` is the file's name in errors. Throws
/// trace_error if the file can't be read, if a column is missing or given twice, or if a number is
/// negative, because a request has no negative numbers.
[[nodiscard]] trace read_trace(std::istream& in, std::string_view name);

/// Opens the file and calls read_trace. Also throws trace_error if the file can't be opened.
[[nodiscard]] trace read_trace_file(const std::string& path);

/// Writes the requests under the published header, so that read_trace returns them again. Arrivals
/// are cut to whole seconds; fields that a `request` doesn't have are left empty.
void write_csv(std::ostream& out, const trace& t);

}  // namespace trace_replay
