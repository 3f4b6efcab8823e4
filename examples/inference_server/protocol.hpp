// SPDX-License-Identifier: Apache-2.0
// The open inference protocol (KServe v2, as Triton speaks it over HTTP) as plain functions from
// bytes to values and back. No sockets, no threads, no clock: the shells around it are
// http_server.hpp and grpc_server.hpp.
//
//   const auto r = route_of("POST", "/v2/models/mlp/infer");                  // what is asked for
//   auto request = parse_infer(body, header_length);                          // throws refused
//   auto [header, whole] = write_infer(response, request);                    // the answer's body
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "inference_server/tensor.hpp"

namespace inference_server {

/// Why a request isn't served, as its client is told. Copies share their text, so copying needs no
/// memory. By a pointer of our own: std::runtime_error counts in the standard library, where
/// ThreadSanitizer can't see it, and copies go from thread to thread.
struct refused : std::exception {
    refused(int http_status, std::string reason, unsigned retry_after_s = 0)
        : why(std::make_shared<const std::string>(std::move(reason))),
          status(http_status),
          retry_after(retry_after_s) {}
    // Not moved from: its text is always there.
    refused(const refused&) noexcept = default;
    refused& operator=(const refused&) noexcept = default;
    ~refused() override = default;
    [[nodiscard]] const char* what() const noexcept override { return why->c_str(); }
    std::shared_ptr<const std::string> why;
    int status;            ///< of HTTP
    unsigned retry_after;  ///< seconds; 0: not said
};
/// {"error": why}
[[nodiscard]] std::string error_json(std::string_view why);

/// The action that a path asks for.
enum class action : std::uint8_t {
    server_live,
    server_ready,
    server_metadata,
    model_ready,
    model_metadata,
    model_config,
    infer,
    generate,
    generate_stream,
    repository_index,
    model_load,
    model_unload,
};
struct route {
    action what{};
    std::string model;    ///< where it is about one
    std::string version;  ///< empty: any
};
/// Throws refused: 404 for what isn't there, 405 for the wrong method, 400 for a path that tries
/// tricks: `..`, an encoded slash, a control character, what isn't UTF-8. A query is ignored.
[[nodiscard]] route route_of(std::string_view method, std::string_view target);

/// The limits of a request.
inline constexpr std::size_t most_tensors = 64, most_extents = 8, longest_name = 256;
inline constexpr std::uint32_t longest_text = 4096;  ///< tokens

/// An output that a client names.
struct requested_output {
    std::string name;
    bool binary = false;
};
struct infer_request {
    std::string id{};
    std::vector<tensor> inputs{};
    std::vector<requested_output> outputs{};  ///< empty: all
    bool binary_by_default = false;
    std::uint64_t timeout_us = 0;  ///< 0: none
    /// as Triton counts: 1 goes first, 2 behind it, ...; 0: as usual for its tenant
    std::uint64_t priority = 0;
};
struct infer_response {
    std::string model, version, id;
    std::vector<tensor> outputs;
};

/// Throws refused (400) for a parameter of Triton's that would change the answer and isn't
/// supported: classes, shared memory, sequences. All others in `parameters` are ignored.
void check_parameter(std::string_view name);
/// Throws refused (400) where two inputs, or two outputs that are asked for, have one name.
void check_names(const infer_request& r);

/// Of a text in tokens, as asked for. Throws refused (400) where there may be none so long.
[[nodiscard]] std::uint32_t text_length(std::uint64_t tokens);

/// `header_length`: of the JSON in front, where binary tensors follow it
/// (Inference-Header-Content-Length). Throws refused (400).
[[nodiscard]] infer_request parse_infer(std::string_view body, std::optional<std::size_t> header_length);

struct infer_body {
    /// of the JSON in front, if binary tensors follow it
    std::optional<std::size_t> header_length;
    std::string body;
};
/// The outputs that `asked` names, in the form that it wants. Throws refused (400) for one that
/// isn't there.
[[nodiscard]] infer_body write_infer(const infer_response& r, const infer_request& asked);

/// {"text_input": "...", "max_tokens": 16}; of Triton's generate extension.
struct generate_request {
    std::string id{}, prompt{};
    std::uint32_t most_tokens = 16;
};
[[nodiscard]] generate_request parse_generate(std::string_view body);
/// {"model_name": ..., "model_version": ..., "text_output": ...}
[[nodiscard]] std::string generate_json(std::string_view model, std::string_view version, std::string_view text);

/// Of an input or an output of a model.
struct tensor_info {
    std::string name;
    datatype type{};
    std::vector<std::int64_t> shape;  ///< -1: any extent
};
struct model_info {
    std::string name, platform;
    std::vector<tensor_info> inputs, outputs;
    /// the first extent of all tensors is a batch of up to so many; 0: no batches
    std::uint32_t max_batch = 0;
    bool streams = false;  ///< it makes tokens
};
[[nodiscard]] std::string server_metadata_json();
[[nodiscard]] std::string model_metadata_json(const model_info& m);
[[nodiscard]] std::string model_config_json(const model_info& m);

/// A request must have the model's inputs, each of its type and shape, and ask for outputs that it
/// has. Throws refused (400).
void check_inputs(const model_info& m, const infer_request& r);
/// Rows of a request to a model with batches; else 1.
[[nodiscard]] std::uint32_t rows_of(const model_info& m, const infer_request& r) noexcept;

inline constexpr std::string_view server_name = "gpushare", model_version = "1";
/// The supported extensions of Triton's.
inline constexpr std::string_view extensions[] = {"binary_tensor_data", "model_repository", "model_configuration",
                                                  "generate"};

}  // namespace inference_server
