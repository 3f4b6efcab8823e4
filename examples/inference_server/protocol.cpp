// SPDX-License-Identifier: Apache-2.0
#include "inference_server/protocol.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <span>
#include <utility>

namespace inference_server {

namespace {

std::span<const std::byte> as_bytes(std::string_view s) {
    return {reinterpret_cast<const std::byte*>(s.data()), s.size()};
}

std::string name_of(json::value v, std::string_view member) {
    auto name = v.at(member).string();
    if (name.empty() || name.size() > longest_name) throw json::error("a name must be 1 to 256 bytes");
    return name;
}

std::optional<json::value> parameter(json::value of, std::string_view name) {
    const auto all = of.find("parameters");
    return all ? all->find(name) : std::nullopt;
}

bool flag(json::value of, std::string_view name, bool otherwise) {
    const auto v = parameter(of, name);
    return v ? v->boolean() : otherwise;
}

std::vector<json::value> list(json::value of, std::string_view name) { return of.at(name).elements(most_tensors); }

constexpr std::string_view not_spoken[] = {
    "classification", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size",
    "sequence_id",    "sequence_start",       "sequence_end"};

/// Checks the parameters of a request, an input or an output.
void check_parameters(json::value of) {
    for (const auto name : not_spoken)
        if (parameter(of, name)) check_parameter(name);
}

/// Finds a name that comes twice in a list of named things.
template <class List, class Name>
void check_once(std::string_view what, const List& all, Name name) {
    for (auto at = all.begin(); at != all.end(); ++at)
        if (std::ranges::find(all.begin(), at, std::invoke(name, *at), name) != at)
            throw refused(400, std::string(what) + " '" + std::invoke(name, *at) + "' is given twice");
}

/// Takes the tensor's binary data from the front of `rest`.
tensor read_input(json::value v, std::string_view& rest) {
    tensor t{name_of(v, "name"), {}, {}, {}};
    check_parameters(v);
    const auto type = datatype_of(v.at("datatype").string());
    if (!type) throw json::error("tensor '" + t.name + "': an unknown datatype");
    t.type = *type;
    for (const auto& e : v.at("shape").elements(most_extents)) t.shape.push_back(e.number<std::int64_t>());
    const auto size = parameter(v, "binary_data_size");
    if (!size) {
        set_json(t, v.at("data"));
        return t;
    }
    if (v.find("data")) throw json::error("tensor '" + t.name + "': data in both forms");
    const auto n = size->number<std::uint64_t>();
    if (n > rest.size()) throw json::error("tensor '" + t.name + "': the body ends before its bytes do");
    set_binary(t, as_bytes(rest.substr(0, n)));
    rest.remove_prefix(n);
    return t;
}

infer_request read_infer(json::value v, std::string_view rest) {
    infer_request r;
    if (const auto id = v.find("id")) r.id = id->string();
    check_parameters(v);
    r.binary_by_default = flag(v, "binary_data_output", false);
    if (const auto timeout = parameter(v, "timeout")) r.timeout_us = timeout->number<std::uint64_t>();
    if (const auto priority = parameter(v, "priority")) r.priority = priority->number<std::uint64_t>();
    for (const auto& input : list(v, "inputs")) r.inputs.push_back(read_input(input, rest));
    if (!rest.empty()) throw json::error("bytes behind the last tensor");
    if (v.find("outputs"))
        for (const auto& o : list(v, "outputs")) {
            check_parameters(o);
            r.outputs.push_back({name_of(o, "name"), flag(o, "binary_data", r.binary_by_default)});
        }
    check_names(r);
    return r;
}

/// Runs a parser. Its exceptions are the client's fault.
template <class F>
auto as_refused(F f) {
    try {
        return f();
    } catch (const json::error& e) {
        throw refused(400, e.what());
    }
}

template <class Values>
void append_list(std::string& out, const Values& values) {
    out += '[';
    bool first = true;
    for (const auto& v : values) {
        if (!std::exchange(first, false)) out += ',';
        json::append(out, v);
    }
    out += ']';
}

void append_member(std::string& out, std::string_view name, std::string_view text) {
    if (out.back() != '{') out += ',';
    json::append(out, name);
    out += ':';
    json::append(out, text);
}

void append_infos(std::string& out, std::string_view member, const model_info& m, std::span<const tensor_info> infos,
                  bool as_config) {
    out += ',';
    json::append(out, member);
    out += ":[";
    for (const auto& t : infos) {
        if (&t != infos.data()) out += ',';
        out += '{';
        append_member(out, "name", t.name);
        if (as_config)
            append_member(out, "data_type",
                          "TYPE_" + std::string(t.type == datatype::bytes ? "STRING" : to_string(t.type)));
        else
            append_member(out, "datatype", to_string(t.type));
        out += as_config ? ",\"dims\":" : ",\"shape\":";
        // A configuration states the extents without the batch.
        append_list(out, std::span(t.shape).subspan(as_config && m.max_batch != 0 && !t.shape.empty() ? 1 : 0));
        out += '}';
    }
    out += ']';
}

}  // namespace

std::string error_json(std::string_view why) {
    std::string out = "{";
    append_member(out, "error", why);
    return out += '}';
}

std::string_view key_of_bearer(std::string_view authorization) noexcept {
    constexpr std::string_view scheme = "bearer ";
    const auto small = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
    if (!std::ranges::equal(authorization.substr(0, scheme.size()), scheme, {}, small)) return {};
    return authorization.substr(scheme.size());
}

void check_parameter(std::string_view name) {
    if (std::ranges::find(not_spoken, name) != std::end(not_spoken))
        throw refused(400, "the parameter '" + std::string(name) + "' isn't supported");
}

void check_names(const infer_request& r) {
    check_once("input", r.inputs, &tensor::name);
    check_once("output", r.outputs, &requested_output::name);
}

std::uint32_t text_length(std::uint64_t tokens) {
    if (tokens == 0 || tokens > longest_text)
        throw refused(400, "'max_tokens' must be 1 to " + std::to_string(longest_text));
    return static_cast<std::uint32_t>(tokens);
}

infer_request parse_infer(std::string_view body, std::optional<std::size_t> header_length) {
    const std::size_t json_size = header_length.value_or(body.size());
    if (json_size > body.size()) throw refused(400, "the body is shorter than the JSON that it begins with");
    return as_refused([&] { return read_infer(json::parse(body.substr(0, json_size)), body.substr(json_size)); });
}

infer_body write_infer(const infer_response& r, const infer_request& asked) {
    // the outputs, and whether each is sent as bytes
    std::vector<std::pair<const tensor*, bool>> chosen;
    if (asked.outputs.empty())
        for (const auto& t : r.outputs) chosen.emplace_back(&t, asked.binary_by_default);
    for (const auto& o : asked.outputs) {
        const auto found = std::ranges::find(r.outputs, o.name, &tensor::name);
        if (found == r.outputs.end()) throw refused(400, "the model has no output '" + o.name + "'");
        chosen.emplace_back(&*found, o.binary);
    }
    std::string out = "{";
    append_member(out, "model_name", r.model);
    append_member(out, "model_version", r.version);
    if (!r.id.empty()) append_member(out, "id", r.id);
    out += ",\"outputs\":[";
    bool any_binary = false;
    for (const auto& [t, binary] : chosen) {
        if (out.back() != '[') out += ',';
        out += '{';
        append_member(out, "name", t->name);
        append_member(out, "datatype", to_string(t->type));
        out += ",\"shape\":";
        append_list(out, t->shape);
        if (binary) {
            any_binary = true;
            out += ",\"parameters\":{\"binary_data_size\":" + std::to_string(t->data.size()) + '}';
        } else {
            out += ",\"data\":";
            append_json(out, *t);
        }
        out += '}';
    }
    out += "]}";
    infer_body b{any_binary ? std::optional(out.size()) : std::nullopt, std::move(out)};
    for (const auto& [t, binary] : chosen)
        if (binary) b.body.append(reinterpret_cast<const char*>(t->data.data()), t->data.size());
    return b;
}

generate_request parse_generate(std::string_view body) {
    return as_refused([&] {
        const auto v = json::parse(body);
        generate_request r;
        if (const auto id = v.find("id")) r.id = id->string();
        r.prompt = v.at("text_input").string();
        auto most = v.find("max_tokens");
        if (!most) most = parameter(v, "max_tokens");
        if (most) r.most_tokens = text_length(most->number<std::uint32_t>());
        return r;
    });
}

std::string generate_json(std::string_view model, std::string_view version, std::string_view text) {
    std::string out = "{";
    append_member(out, "model_name", model);
    append_member(out, "model_version", version);
    append_member(out, "text_output", text);
    return out += '}';
}

std::string server_metadata_json() {
    std::string out = "{";
    append_member(out, "name", server_name);
    append_member(out, "version", "2");
    out += ",\"extensions\":";
    append_list(out, extensions);
    return out += '}';
}

std::string model_metadata_json(const model_info& m) {
    std::string out = "{";
    append_member(out, "name", m.name);
    out += ",\"versions\":[\"1\"]";
    append_member(out, "platform", m.platform);
    append_infos(out, "inputs", m, m.inputs, false);
    append_infos(out, "outputs", m, m.outputs, false);
    return out += '}';
}

std::string model_config_json(const model_info& m) {
    std::string out = "{";
    append_member(out, "name", m.name);
    append_member(out, "platform", m.platform);
    append_member(out, "backend", server_name);
    out += ",\"max_batch_size\":" + std::to_string(m.max_batch);
    append_infos(out, "input", m, m.inputs, true);
    append_infos(out, "output", m, m.outputs, true);
    out += ",\"model_transaction_policy\":{\"decoupled\":";
    json::append(out, m.streams);
    return out += "}}";
}

void check_inputs(const model_info& m, const infer_request& r) {
    const auto fail = [&](const std::string& why) { throw refused(400, "model '" + m.name + "': " + why); };
    for (const auto& o : r.outputs)
        if (std::ranges::find(m.outputs, o.name, &tensor_info::name) == m.outputs.end())
            fail("it has no output '" + o.name + "'");
    if (r.inputs.size() != m.inputs.size()) fail("it has " + std::to_string(m.inputs.size()) + " inputs");
    // the first input decides, because other inputs may have no extents at all
    std::optional<std::int64_t> batch;
    for (const auto& info : m.inputs) {
        const auto t = std::ranges::find(r.inputs, info.name, &tensor::name);
        if (t == r.inputs.end()) fail("it has an input '" + info.name + "'");
        if (t->type != info.type) fail("input '" + info.name + "' is of " + std::string(to_string(info.type)));
        const bool same =
            std::ranges::equal(t->shape, info.shape, [](auto is, auto should) { return should < 0 || is == should; });
        if (!same) fail("input '" + info.name + "' is of another shape");
        if (m.max_batch == 0) continue;
        // an engine may say that a tensor has no extents
        if (t->shape.empty() || t->shape[0] < 1 || t->shape[0] > m.max_batch)
            fail("a batch is 1 to " + std::to_string(m.max_batch) + " rows");
        if (batch.value_or(t->shape[0]) != t->shape[0]) fail("its inputs have different batches");
        batch = t->shape[0];
    }
}

std::uint32_t rows_of(const model_info& m, const infer_request& r) noexcept {
    return m.max_batch == 0 || r.inputs.empty() ? 1 : static_cast<std::uint32_t>(r.inputs[0].shape[0]);
}

}  // namespace inference_server
