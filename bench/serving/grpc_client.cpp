// SPDX-License-Identifier: Apache-2.0
#include "serving/grpc_client.hpp"

#include <future>
#include <utility>
#include <vector>

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include "open_inference.pb.h"

namespace bench::serving {

struct grpc_client::parts {
    explicit parts(std::shared_ptr<grpc::Channel> c) : stub(std::move(c)) {}
    grpc::GenericStub stub;
};

namespace {

std::shared_ptr<grpc::Channel> channel_to(std::uint16_t port) {
    grpc::ChannelArguments options;
    // Otherwise, all clients share one connection.
    options.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials(), options);
}

inference::ModelInferRequest to_smallest_model(std::vector<std::int64_t> shape, const char* type) {
    inference::ModelInferRequest m;
    m.set_model_name("mlp");
    auto& i = *m.add_inputs();
    i.set_name("INPUT");
    i.set_datatype(type);
    i.mutable_shape()->Add(shape.begin(), shape.end());
    return m;
}

}  // namespace

grpc_client::grpc_client(std::uint16_t port) : parts_(std::make_unique<parts>(channel_to(port))) {}
grpc_client::grpc_client(grpc_client&&) noexcept = default;
grpc_client& grpc_client::operator=(grpc_client&&) noexcept = default;
grpc_client::~grpc_client() = default;

int grpc_client::infer(std::string_view key, const std::string& message) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer " + std::string(key));
    const grpc::Slice slice(message);
    grpc::ByteBuffer request(&slice, 1), response;
    std::promise<int> status;
    parts_->stub.UnaryCall(&context, "/inference.GRPCInferenceService/ModelInfer", {}, &request, &response,
                           [&](const grpc::Status& s) { status.set_value(s.error_code()); });
    return status.get_future().get();
}

std::string small_row() {
    auto m = to_smallest_model({1, 16}, "FP32");
    const std::vector<float> row(16, 0.5F);
    m.add_raw_input_contents(row.data(), row.size() * sizeof(float));
    return m.SerializeAsString();
}

std::string many_texts(std::size_t bytes) {
    constexpr std::size_t of_a_text = 2, of_the_rest = 64;
    const std::size_t n = (bytes - of_the_rest) / of_a_text;
    auto m = to_smallest_model({1, static_cast<std::int64_t>(n)}, "BYTES");
    for (std::size_t i = 0; i < n; ++i) m.mutable_inputs(0)->mutable_contents()->add_bytes_contents("");
    return m.SerializeAsString();
}

}  // namespace bench::serving
