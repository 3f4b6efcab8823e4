// SPDX-License-Identifier: Apache-2.0
// The open inference protocol (KServe v2, as Triton speaks it over HTTP) as plain functions from
// bytes to values and back. No sockets, no threads, no clock: the shells around these functions are
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

/// The reason why a request isn't served, as its client is told. Copies share their text, so
/// copying needs no memory. The class has a pointer of its own, because std::runtime_error counts
/// references in the standard library, where ThreadSanitizer can't see them, and copies go from
/// thread to thread.
struct refused : std::exception {
    refused(int http_status, std::string reason, unsigned retry_after_s = 0)
        : why(std::make_shared<const std::string>(std::move(reason))),
          status(http_status),
          retry_after(retry_after_s) {}
    // There is no move, so the text always exists.
    refused(const refused&) noexcept = default;
    refused& operator=(const refused&) noexcept = default;
    ~refused() override = default;
    [[nodiscard]] const char* what() const noexcept override { return why->c_str(); }
    std::shared_ptr<const std::string> why;
    int status;            ///< the status of HTTP
    unsigned retry_after;  ///< in seconds; 0 leaves it out
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
    std::string model;    ///< if the action concerns a model
    std::string version;  ///< empty for any version
};
/// Throws refused: 404 for a path that doesn't exist, 405 for the wrong method, and 400 for a
/// suspicious path (`..`, an encoded slash, a control character, or bytes that aren't UTF-8). A
/// query is ignored.
[[nodiscard]] route route_of(std::string_view method, std::string_view target);

/// The key in a field `Authorization: Bearer KEY`. The scheme may be in small letters. Empty for
/// any other text.
[[nodiscard]] std::string_view key_of_bearer(std::string_view authorization) noexcept;

/// The limits of a request.
inline constexpr std::size_t most_tensors = 64, most_extents = 8, longest_name = 256;
inline constexpr std::uint32_t longest_text = 4096;  ///< in tokens

/// An output that a client names.
struct requested_output {
    std::string name;
    bool binary = false;
};
struct infer_request {
    std::string id{};
    std::vector<tensor> inputs{};
    std::vector<requested_output> outputs{};  ///< empty for all outputs
    bool binary_by_default = false;
    std::uint64_t timeout_us = 0;  ///< 0 for none
    /// As Triton counts: 1 goes first, then 2, and so on; 0 takes the tenant's usual priority.
    std::uint64_t priority = 0;
};
struct infer_response {
    std::string model, version, id;
    std::vector<tensor> outputs;
};

/// Throws refused (400) for a parameter of Triton's that would change the answer and isn't
/// supported: classes, shared memory, sequences. All other `parameters` are ignored.
void check_parameter(std::string_view name);
/// Throws refused (400) if two inputs, or two requested outputs, have the same name.
void check_names(const infer_request& r);

/// The length of a requested text, in tokens. Throws refused (400) if texts can't be so long.
[[nodiscard]] std::uint32_t text_length(std::uint64_t tokens);

/// `header_length` is the length of the JSON at the beginning, if binary tensors follow it
/// (Inference-Header-Content-Length). Throws refused (400).
[[nodiscard]] infer_request parse_infer(std::string_view body, std::optional<std::size_t> header_length);

struct infer_body {
    /// the length of the JSON at the beginning, if binary tensors follow it
    std::optional<std::size_t> header_length;
    std::string body;
};
/// Writes the outputs that `asked` names, in the requested form. Throws refused (400) for an output
/// that doesn't exist.
[[nodiscard]] infer_body write_infer(const infer_response& r, const infer_request& asked);

/// A request of Triton's generate extension: {"text_input": "...", "max_tokens": 16}.
struct generate_request {
    std::string id{}, prompt{};
    std::uint32_t most_tokens = 16;
};
[[nodiscard]] generate_request parse_generate(std::string_view body);
/// The answer to it: {"model_name": ..., "model_version": ..., "text_output": ...}
[[nodiscard]] std::string generate_json(std::string_view model, std::string_view version, std::string_view text);

/// An input or an output of a model.
struct tensor_info {
    std::string name;
    datatype type{};
    std::vector<std::int64_t> shape;  ///< -1 stands for any extent
};
struct model_info {
    std::string name, platform;
    std::vector<tensor_info> inputs, outputs;
    /// the first extent of all tensors is a batch of at most this many rows; 0 means no batches
    std::uint32_t max_batch = 0;
    bool streams = false;  ///< whether the model makes tokens
};
[[nodiscard]] std::string server_metadata_json();
[[nodiscard]] std::string model_metadata_json(const model_info& m);
[[nodiscard]] std::string model_config_json(const model_info& m);

/// Checks that a request has the model's inputs, each of its type and shape, and asks for outputs
/// that the model has. Throws refused (400).
void check_inputs(const model_info& m, const infer_request& r);
/// The rows of a request to a model with batches; otherwise 1.
[[nodiscard]] std::uint32_t rows_of(const model_info& m, const infer_request& r) noexcept;

inline constexpr std::string_view server_name = "gpushare", model_version = "1";
/// The supported extensions of Triton's.
inline constexpr std::string_view extensions[] = {"binary_tensor_data", "model_repository", "model_configuration",
                                                  "generate"};

}  // namespace inference_server
