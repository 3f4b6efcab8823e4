// SPDX-License-Identifier: Apache-2.0
// libFuzzer's entry point for bytes that clients send by gRPC, before and after Protobuf reads
// them. fuzz/protocol.cpp does the same for HTTP.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/stubs/logging.h>

#include "inference_server/grpc_protocol.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace inference_server;
    // for text that isn't UTF-8
    [[maybe_unused]] static const auto before = google::protobuf::SetLogHandler(nullptr);
    google::protobuf::io::ArrayInputStream bytes(data, static_cast<int>(size));
    int looked_at = 0;  // 200 means that the bytes are a message, and not too large
    try {
        check_lists(bytes, 256);
        looked_at = 200;
    } catch (const refused& why) {
        looked_at = why.status;
    }
    inference::ModelInferRequest m;
    const bool is_one = m.ParseFromArray(data, static_cast<int>(size));
    const bool is_wide = std::max({m.inputs_size(), m.outputs_size(), m.raw_input_contents_size()}) > 64;
    if (is_one && !is_wide && looked_at == 400) std::abort();
    if (is_one && looked_at == 200) {
        std::size_t raw = 0;
        // plus at most 3 bytes that state its length
        for (const auto& r : m.raw_input_contents()) raw += r.size() + 3;
        if (is_wide || size > 256 + raw) std::abort();
    }
    if (!is_one) return 0;
    // Only the protocol's refusals may come out.
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
