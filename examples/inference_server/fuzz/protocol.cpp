// SPDX-License-Identifier: Apache-2.0
// libFuzzer's entry point for all code that reads the input of clients and operators. Built by
// clang, with the sources of the protocol. `./dev check` runs it, and inputs that it once found go
// into tests/examples/inference_protocol_test.cpp.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include <gpushare/serving/usage_journal.hpp>
#include <gpushare/tenant/specification.hpp>

#include "inference_server/protocol.hpp"
#include "inference_server/tenants_file.hpp"

namespace {

using namespace inference_server;

/// Only the refusals of the protocol may come out.
template <class F>
void attempt(F f) {
    try {
        f();
    } catch (const refused& r) {
        (void)json::parse(error_json(r.what()));
    }
}

void infer(std::string_view text, std::optional<std::size_t> header_length) {
    auto r = parse_infer(text, header_length);
    infer_response back{"m", "1", r.id, r.inputs};
    for (const auto& t : r.inputs)
        if (t.type != datatype::bytes && t.data.size() != elements_of(t.shape).value() * size_of(t.type)) std::abort();
    static const model_info two{"two", "test", {{"x", datatype::fp32, {-1, 2}}, {"y", datatype::bytes, {-1}}},
                                {},    4,      false};
    attempt([&] {
        check_inputs(two, r);
        if (rows_of(two, r) - 1 > 3) std::abort();
    });
    r.outputs.clear();
    const auto body = write_infer(back, r);
    (void)json::parse(std::string_view(body.body).substr(0, body.header_length.value_or(body.body.size())));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 2) return 0;
    const std::string_view text(reinterpret_cast<const char*>(data) + 2, size - 2);
    switch (data[0] % 6) {
        case 0: attempt([&] { infer(text, std::nullopt); }); break;
        case 1: attempt([&] { infer(text, data[1] * (size / 256 + 1)); }); break;
        case 2: attempt([&] { (void)parse_generate(text); }); break;
        case 3: attempt([&] { (void)route_of(data[1] % 2 == 0 ? "GET" : "POST", text); }); break;
        case 4:
            (void)gpushare::read_usage(text, [](const gpushare::usage_line& l) {
                auto again = to_text(l);
                again.pop_back();
                if (gpushare::parse_usage_line(again) != l) std::abort();
            });
            break;
        default:
            try {
                const auto f = parse_tenants(text);
                for (std::size_t i = 0; i < f.keys.size(); ++i)
                    if (f.tenant_of(f.keys[i]) != f.tenants_of_keys[i]) std::abort();
            } catch (const gpushare::specification_error&) {
            } catch (const model_setting_error&) {
            }
    }
    return 0;
}
