// SPDX-License-Identifier: Apache-2.0
// Converts the open inference protocol's gRPC messages to the values of protocol.hpp, and back.
// Plain functions, as in protocol.hpp.
//
//   auto request = read_infer(message);             // throws refused
//   write_infer(reply, response, outputs);          // its tensors as bytes, as Triton answers
#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <string_view>

#include "inference_server/protocol.hpp"
#include "open_inference.pb.h"

namespace inference_server {

/// The timeout in a call's head, `grpc-timeout`. Throws refused (400).
[[nodiscard]] std::chrono::nanoseconds timeout_of(std::string_view text);

/// Checks a request's bytes before a message is made of them, because a message with many small
/// fields takes many times the memory of its bytes. Throws refused: 413 if more than `most` bytes
/// aren't raw tensors, and 400 for more than 64 tensors or for bytes that aren't a message.
void check_lists(google::protobuf::io::ZeroCopyInputStream& bytes, std::size_t most);
/// Reads a request whose tensors are bytes (raw_input_contents), lists, or a mixture of both.
/// Throws refused (400).
[[nodiscard]] infer_request read_infer(const inference::ModelInferRequest& m);
/// Reads a checked request to a model that streams: its text, and the parameter max_tokens. Throws
/// refused (400).
[[nodiscard]] generate_request read_generate(const inference::ModelInferRequest& m, const infer_request& r);
/// `asked` names the wanted outputs; an empty list stands for all. Throws refused (400) for an
/// output that doesn't exist.
void write_infer(inference::ModelInferResponse& to, const infer_response& r, std::span<const requested_output> asked);
/// Writes an answer without outputs, which ends a stream.
void write_head(inference::ModelInferResponse& to, const model_info& m, const std::string& id);
/// Writes a token as the output of a model that streams.
void write_token(inference::ModelInferResponse& to, const model_info& m, const std::string& id,
                 const std::string& token);

void write_server_metadata(inference::ServerMetadataResponse& to);
void write_metadata(inference::ModelMetadataResponse& to, const model_info& m);
void write_config(inference::ModelConfig& to, const model_info& m);

}  // namespace inference_server
