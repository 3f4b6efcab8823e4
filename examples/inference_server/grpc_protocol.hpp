// SPDX-License-Identifier: Apache-2.0
// The open inference protocol's messages of gRPC as the values of protocol.hpp, and back. Plain
// functions, as there.
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

/// Looks at a request's bytes before a message is made of them, which takes many times their memory
/// where they are many small things. Throws refused: 413 where more than `most` bytes are no raw
/// tensors, 400 for more than 64 tensors or what isn't a message.
void check_lists(google::protobuf::io::ZeroCopyInputStream& bytes, std::size_t most);
/// Tensors as bytes (raw_input_contents), as lists, or some so and some so. Throws refused (400).
[[nodiscard]] infer_request read_infer(const inference::ModelInferRequest& m);
/// Of a request to a model that streams, which was checked: its text, and the parameter max_tokens.
/// Throws refused (400).
[[nodiscard]] generate_request read_generate(const inference::ModelInferRequest& m, const infer_request& r);
/// `asked`: the outputs that are wanted; none: all. Throws refused (400) for one that isn't there.
void write_infer(inference::ModelInferResponse& to, const infer_response& r, std::span<const requested_output> asked);
/// Of an answer without outputs, which ends a stream.
void write_head(inference::ModelInferResponse& to, const model_info& m, const std::string& id);
/// A token, as the output of a model that streams.
void write_token(inference::ModelInferResponse& to, const model_info& m, const std::string& id,
                 const std::string& token);

void write_server_metadata(inference::ServerMetadataResponse& to);
void write_metadata(inference::ModelMetadataResponse& to, const model_info& m);
void write_config(inference::ModelConfig& to, const model_info& m);

}  // namespace inference_server
