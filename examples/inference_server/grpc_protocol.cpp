// SPDX-License-Identifier: Apache-2.0
#include "inference_server/grpc_protocol.hpp"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

namespace inference_server {

namespace {

using google::protobuf::RepeatedField;
using inference::InferTensorContents;

std::span<const std::byte> as_bytes(const std::string& s) {
    return {reinterpret_cast<const std::byte*>(s.data()), s.size()};
}

void check_name(const std::string& name) {
    if (name.empty() || name.size() > longest_name) throw refused(400, "a name must be 1 to 256 bytes");
}

/// The numbers of a list as elements of type T.
template <class T, class U>
std::vector<std::byte> elements(const tensor& t, const RepeatedField<U>& from) {
    std::vector<std::byte> data(static_cast<std::size_t>(from.size()) * sizeof(T));
    auto* to = data.data();
    for (const U x : from) {
        if constexpr (!std::is_same_v<T, U>)
            if (!std::in_range<T>(x)) throw json::error("tensor '" + t.name + "': a number is out of range");
        const auto y = static_cast<T>(x);
        std::memcpy(to, &y, sizeof y);
        to += sizeof y;
    }
    return data;
}

std::vector<std::byte> elements_of_list(const tensor& t, const InferTensorContents& c) {
    switch (t.type) {
        case datatype::boolean: return elements<bool>(t, c.bool_contents());
        case datatype::uint8: return elements<std::uint8_t>(t, c.uint_contents());
        case datatype::uint16: return elements<std::uint16_t>(t, c.uint_contents());
        case datatype::uint32: return elements<std::uint32_t>(t, c.uint_contents());
        case datatype::uint64: return elements<std::uint64_t>(t, c.uint64_contents());
        case datatype::int8: return elements<std::int8_t>(t, c.int_contents());
        case datatype::int16: return elements<std::int16_t>(t, c.int_contents());
        case datatype::int32: return elements<std::int32_t>(t, c.int_contents());
        case datatype::int64: return elements<std::int64_t>(t, c.int64_contents());
        case datatype::fp32: return elements<float>(t, c.fp32_contents());
        case datatype::fp64: return elements<double>(t, c.fp64_contents());
        case datatype::bytes: {
            const std::vector<std::string> texts(c.bytes_contents().begin(), c.bytes_contents().end());
            return texts_tensor({}, texts).data;
        }
        case datatype::fp16:
        case datatype::bf16: break;
    }
    throw json::error("tensor '" + t.name + "': elements of this type come as bytes");
}

/// The value of a parameter that is a number.
std::optional<std::uint64_t> number(const inference::ModelInferRequest& m, const std::string& name) {
    const auto found = m.parameters().find(name);
    if (found == m.parameters().end()) return std::nullopt;
    const auto& p = found->second;
    if (p.has_uint64_param()) return p.uint64_param();
    if (p.has_int64_param() && p.int64_param() >= 0) return static_cast<std::uint64_t>(p.int64_param());
    throw refused(400, "the parameter '" + name + "' isn't a number from 0 on");
}

/// Checks the parameters of a request, an input or an output.
template <class Message>
void check_parameters(const Message& m) {
    for (const auto& [name, value] : m.parameters()) check_parameter(name);
}

void write_tensor(inference::ModelInferResponse& to, const tensor& t) {
    auto& o = *to.add_outputs();
    o.set_name(t.name);
    o.set_datatype(std::string(to_string(t.type)));
    o.mutable_shape()->Add(t.shape.begin(), t.shape.end());
    to.add_raw_output_contents(t.data.data(), t.data.size());
}

inference::DataType config_type(datatype t) {
    inference::DataType found = inference::TYPE_INVALID;
    (void)inference::DataType_Parse("TYPE_" + (t == datatype::bytes ? "STRING" : std::string(to_string(t))), &found);
    return found;
}

}  // namespace

std::chrono::nanoseconds timeout_of(std::string_view text) {
    constexpr std::pair<char, std::int64_t> units[] = {{'n', 1},
                                                       {'u', 1'000},
                                                       {'m', 1'000'000},
                                                       {'S', 1'000'000'000},
                                                       {'M', 60'000'000'000},
                                                       {'H', 3'600'000'000'000}};
    std::int64_t n = 0;
    const auto* const end = text.data() + (text.empty() ? 0 : text.size() - 1);
    const auto [at, code] = std::from_chars(text.data(), end, n);
    const auto* const unit =
        text.empty() ? std::end(units) : std::ranges::find(units, text.back(), &std::pair<char, std::int64_t>::first);
    if (code != std::errc{} || at != end || n < 0 || text.size() > 9 || unit == std::end(units))
        throw refused(400, "grpc-timeout isn't a time");
    const auto most = std::chrono::nanoseconds::max().count() / 4;
    return std::chrono::nanoseconds(n > most / unit->second ? most : n * unit->second);
}

void check_lists(google::protobuf::io::ZeroCopyInputStream& bytes, std::size_t most) {
    using google::protobuf::internal::WireFormatLite;
    using request = inference::ModelInferRequest;
    google::protobuf::io::CodedInputStream in(&bytes);
    std::size_t raw = 0, inputs = 0, outputs = 0, raws = 0;
    while (const std::uint32_t tag = in.ReadTag()) {
        const bool is_bytes = WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
        const int field = is_bytes ? WireFormatLite::GetTagFieldNumber(tag) : 0;
        inputs += field == request::kInputsFieldNumber;
        outputs += field == request::kOutputsFieldNumber;
        raws += field == request::kRawInputContentsFieldNumber;
        const int begin = in.CurrentPosition();
        if (!WireFormatLite::SkipField(&in, tag)) throw refused(400, "not a message of the protocol");
        if (field == request::kRawInputContentsFieldNumber)
            raw += static_cast<std::size_t>(in.CurrentPosition() - begin);
    }
    if (!in.ConsumedEntireMessage()) throw refused(400, "not a message of the protocol");
    if (std::max({inputs, outputs, raws}) > most_tensors) throw refused(400, "more than 64 tensors");
    if (static_cast<std::size_t>(in.CurrentPosition()) - raw > most)
        throw refused(413, "lists, names and parameters are too large; elements can come as raw bytes");
}

infer_request read_infer(const inference::ModelInferRequest& m) try {
    infer_request r;
    r.id = m.id();
    check_parameters(m);
    if (const auto timeout = number(m, "timeout")) r.timeout_us = *timeout;
    if (const auto priority = number(m, "priority")) r.priority = *priority;
    if (static_cast<std::size_t>(std::max(m.inputs_size(), m.outputs_size())) > most_tensors)
        throw refused(400, "more than 64 tensors");
    int raw = 0;
    for (const auto& i : m.inputs()) {
        check_name(i.name());
        check_parameters(i);
        auto& t = r.inputs.emplace_back(tensor{i.name(), {}, {}, {}});
        const auto type = datatype_of(i.datatype());
        if (!type) throw json::error("tensor '" + t.name + "': an unknown datatype");
        t.type = *type;
        if (static_cast<std::size_t>(i.shape_size()) > most_extents)
            throw json::error("tensor '" + t.name + "': more than 8 extents");
        t.shape.assign(i.shape().begin(), i.shape().end());
        if (i.has_contents())
            set_binary(t, elements_of_list(t, i.contents()));
        else if (raw < m.raw_input_contents_size())
            set_binary(t, as_bytes(m.raw_input_contents(raw++)));
        else
            throw json::error("tensor '" + t.name + "': it has no data");
    }
    if (raw != m.raw_input_contents_size()) throw refused(400, "data of no tensor");
    for (const auto& o : m.outputs()) {
        check_name(o.name());
        check_parameters(o);
        r.outputs.push_back({o.name(), true});
    }
    check_names(r);
    return r;
} catch (const json::error& e) {
    throw refused(400, e.what());
}

generate_request read_generate(const inference::ModelInferRequest& m, const infer_request& r) {
    generate_request g{.id = r.id};
    const auto texts =
        r.inputs.empty() || r.inputs[0].type != datatype::bytes ? std::vector<std::string_view>{} : r.inputs[0].texts();
    if (texts.size() != 1) throw refused(400, "a text to continue is one element of BYTES");
    g.prompt = texts[0];
    if (!json::is_utf8(g.prompt)) throw refused(400, "the text isn't UTF-8");
    if (const auto most = number(m, "max_tokens")) g.most_tokens = text_length(*most);
    return g;
}

void write_infer(inference::ModelInferResponse& to, const infer_response& r, std::span<const requested_output> asked) {
    to.set_model_name(r.model);
    to.set_model_version(r.version);
    to.set_id(r.id);
    if (asked.empty())
        for (const auto& t : r.outputs) write_tensor(to, t);
    for (const auto& o : asked) {
        const auto found = std::ranges::find(r.outputs, o.name, &tensor::name);
        if (found == r.outputs.end()) throw refused(400, "the model has no output '" + o.name + "'");
        write_tensor(to, *found);
    }
}

void write_head(inference::ModelInferResponse& to, const model_info& m, const std::string& id) {
    to.set_model_name(m.name);
    to.set_model_version(std::string(model_version));
    to.set_id(id);
}

void write_token(inference::ModelInferResponse& to, const model_info& m, const std::string& id,
                 const std::string& token) {
    write_head(to, m, id);
    write_tensor(to, texts_tensor(m.outputs.at(0).name, {&token, 1}));
}

void write_server_metadata(inference::ServerMetadataResponse& to) {
    to.set_name(std::string(server_name));
    to.set_version("2");
    for (const auto e : extensions) to.add_extensions(std::string(e));
}

void write_metadata(inference::ModelMetadataResponse& to, const model_info& m) {
    to.set_name(m.name);
    to.add_versions(std::string(model_version));
    to.set_platform(m.platform);
    const auto write = [](auto& info, const tensor_info& t) {
        info.set_name(t.name);
        info.set_datatype(std::string(to_string(t.type)));
        info.mutable_shape()->Add(t.shape.begin(), t.shape.end());
    };
    for (const auto& t : m.inputs) write(*to.add_inputs(), t);
    for (const auto& t : m.outputs) write(*to.add_outputs(), t);
}

void write_config(inference::ModelConfig& to, const model_info& m) {
    to.set_name(m.name);
    to.set_platform(m.platform);
    to.set_backend(std::string(server_name));
    to.set_max_batch_size(static_cast<std::int32_t>(m.max_batch));
    // A configuration states the extents without the batch.
    const auto write = [skip = m.max_batch != 0 ? 1 : 0](auto& info, const tensor_info& t) {
        info.set_name(t.name);
        info.set_data_type(config_type(t.type));
        info.mutable_dims()->Add(t.shape.begin() + skip, t.shape.end());
    };
    for (const auto& t : m.inputs) write(*to.add_input(), t);
    for (const auto& t : m.outputs) write(*to.add_output(), t);
    to.mutable_model_transaction_policy()->set_decoupled(m.streams);
}

}  // namespace inference_server
