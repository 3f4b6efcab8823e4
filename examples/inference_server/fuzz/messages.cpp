// SPDX-License-Identifier: Apache-2.0
// libFuzzer's way into what clients send by gRPC, once protobuf has read it; protocol.cpp is that for HTTP.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include <google/protobuf/stubs/logging.h>

#include "inference_server/grpc_protocol.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace inference_server;
    [[maybe_unused]] static const auto before = google::protobuf::SetLogHandler(nullptr);  // of what isn't UTF-8
    inference::ModelInferRequest m;
    if (!m.ParseFromArray(data, static_cast<int>(size))) return 0;
    // Only the refusals of the protocol may come out.
    try {
        const auto r = read_infer(m);
        for (const auto& t : r.inputs)
            if (t.type != datatype::bytes && t.data.size() != elements_of(t.shape).value() * size_of(t.type))
                std::abort();
        const infer_response back{"m", "1", r.id, r.inputs};
        inference::ModelInferResponse all, some;
        write_infer(all, back, {});
        if (all.outputs_size() != static_cast<int>(r.inputs.size()) ||
            all.raw_output_contents_size() != all.outputs_size())
            std::abort();
        static const model_info two{"two", "test", {{"x", datatype::fp32, {-1, 2}}, {"y", datatype::bytes, {-1}}},
                                    {},    4,      false};
        try {
            check_inputs(two, r);
            if (rows_of(two, r) - 1 > 3) std::abort();
        } catch (const refused&) {
        }
        try {
            if (read_generate(m, r).prompt.size() > size) std::abort();
        } catch (const refused&) {
        }
        write_infer(some, back, r.outputs);
    } catch (const refused&) {
    }
    return 0;
}
