// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The inference protocol from bytes to values and back, and the requests that it refuses.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <gpushare/tenant/specification.hpp>

#include "inference_server/front_door.hpp"
#include "inference_server/message_reader.hpp"
#include "inference_server/openvino/picture.hpp"
#include "inference_server/protocol.hpp"
#include "inference_server/read_file.hpp"
#include "inference_server/tenants_file.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace inference_protocol_test {

using namespace inference_server;
using namespace std::string_literals;

namespace {

int status_of(auto f) {
    try {
        (void)f();
    } catch (const refused& r) {
        return r.status;
    }
    return 200;
}

bool is_json(std::string_view text) {
    try {
        (void)json::parse(text);
        return true;
    } catch (const json::error&) {
        return false;
    }
}

std::string in_quotes(std::string_view text) {
    std::string out;
    json::append(out, text);
    return out;
}

std::string bytes_of(std::initializer_list<float> numbers) {
    std::string out;
    for (const float x : numbers) out.append(reinterpret_cast<const char*>(&x), sizeof x);
    return out;
}

constexpr std::string_view two_by_two =
    R"({"id":"7","inputs":[{"name":"INPUT","datatype":"FP32","shape":[2,2],"data":[[1,2.5],[-3e2,4]]}]})";

const model_info square{"square", "test", {{"INPUT", datatype::fp32, {-1, 2}}}, {{"OUTPUT", datatype::fp32, {-1, 2}}},
                        4,        false};

}  // namespace

TEST_CASE("JSON is what RFC 8259 says, and nothing else", "[examples]") {
    for (const auto* good :
         {"0", "-0", "1.5e+3", "true", "null", "\"\"", "[]", " { } ", "[1,[2],{\"a\":[]}]", R"("\ud83d\ude00\n\/")",
          "{\"a\":1,\"a\":2}", "\"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\""}) {
        CAPTURE(good);
        CHECK(is_json(good));
    }
    for (const auto* bad : {"",
                            " ",
                            "01",
                            "1.",
                            ".5",
                            "+1",
                            "1e",
                            "-",
                            "tru",
                            "nul",
                            "[1,]",
                            "[,1]",
                            "{\"a\"}",
                            "{\"a\":}",
                            "{a:1}",
                            "{\"a\":1,}",
                            "[1 2]",
                            "[1]]",
                            "\"",
                            "\"\\x\"",
                            "\"\\u12\"",
                            R"("\ud800")",
                            R"("\ud800\u0041")",
                            R"("\udc00")",
                            "\"\t\"",
                            "NaN",
                            "[1",
                            "{\"a\":1",
                            "\"\xC0\xAF\"",
                            "\"\xED\xA0\x80\"",
                            "\"\xF4\x90\x80\x80\"",
                            "\"\xE2\x82\"",
                            "'a'",
                            "[1]x"}) {
        CAPTURE(bad);
        CHECK_FALSE(is_json(bad));
    }
    CHECK_FALSE(is_json(std::string_view("\"\\\0\"", 4)));
    CHECK(is_json(std::string(32, '[') + std::string(32, ']')));
    CHECK_FALSE(is_json(std::string(100'000, '[')));
}

TEST_CASE("JSON is read where it lies, with all digits", "[examples]") {
    const auto v =
        json::parse(R"( {"a": [1, 18446744073709551615 ,"x]},\"", {"b":false}, [ ] ], "c" : -9223372036854775808} )");
    const auto a = v.at("a").elements();
    REQUIRE(a.size() == 5);
    CHECK(a[1].number<std::uint64_t>() == std::numeric_limits<std::uint64_t>::max());
    CHECK(a[2].string() == "x]},\"");
    CHECK_FALSE(a[3].at("b").boolean());
    CHECK(a[4].elements().empty());
    CHECK(v.at("c").number<std::int64_t>() == std::numeric_limits<std::int64_t>::min());
    CHECK_FALSE(v.find("d"));
    CHECK_THROWS_AS(a[1].number<std::int64_t>(), json::error);
    CHECK_THROWS_AS(a[0].string(), json::error);
    CHECK_THROWS_AS(a[0].find("x"), json::error);
    CHECK(json::parse(R"("\ud83d\ude00\u00e9\u20ac\u0000")").string() ==
          std::string("\xF0\x9F\x98\x80\xC3\xA9\xE2\x82\xAC\0", 10));
}

TEST_CASE("a number of JSON that is too close to 0 is 0, and one that is too large is refused", "[examples]") {
    const std::string zeros(400, '0');
    for (const auto& tiny :
         {"1e-46"s, "123.5e-60"s, "0.1E-99999999999999999999"s, "0." + zeros + "1", "1" + zeros + "e-800", "1e-400"s}) {
        CAPTURE(tiny);
        CHECK(json::parse(tiny).number<float>() == 0.0F);
        CHECK(std::signbit(json::parse("-" + tiny).number<float>()));
        CHECK_NOTHROW(json::parse(tiny).number<double>());
        CHECK_THROWS_AS(json::parse(tiny).number<int>(), json::error);
    }
    for (const auto& large : {"1e400"s, "-1e99999999999999999999"s, "0.001e+500"s, "1" + zeros, "1" + zeros + "e-2",
                              "0." + zeros + "1e900"}) {
        CAPTURE(large);
        CHECK_THROWS_AS(json::parse(large).number<float>(), json::error);
        CHECK_THROWS_AS(json::parse(large).number<double>(), json::error);
    }
    CHECK(json::parse("1e-45").number<float>() == std::numeric_limits<float>::denorm_min());
    CHECK(json::parse("0e-99").number<float>() == 0.0F);
}

TEST_CASE("texts of any bytes are JSON, and come back if they were UTF-8", "[examples]") {
    support::random any(3);
    for (int n = 0; n < 300; ++n) {
        std::string text(any.below(20), '\0');
        for (auto& c : text) c = static_cast<char>(any.below(n % 2 == 0 ? 128 : 256));
        const auto back = json::parse(in_quotes(text)).string();
        if (json::is_utf8(text)) CHECK(back == text);
        CHECK(json::is_utf8(back));
    }
}

TEST_CASE("an inference request is read from JSON and from bytes alike", "[examples]") {
    const auto from_json = parse_infer(two_by_two, {});
    const std::string head =
        R"({"id":"7","parameters":{"binary_data_output":true},"inputs":[{"name":"INPUT","datatype":"FP32","shape":[2,2],"parameters":{"binary_data_size":16}}]})";
    const auto from_bytes = parse_infer(head + bytes_of({1, 2.5F, -300, 4}), head.size());
    CHECK(from_bytes.binary_by_default);
    for (const auto& r : {from_json, from_bytes}) {
        CHECK(r.id == "7");
        REQUIRE(r.inputs.size() == 1);
        const auto x = r.inputs[0].as<float>();
        CHECK(std::vector(x.begin(), x.end()) == std::vector{1.0F, 2.5F, -300.0F, 4.0F});
        check_inputs(square, r);
        CHECK(rows_of(square, r) == 2);
    }
    CHECK(status_of([&] { return parse_infer(head + bytes_of({1}), head.size()); }) == 400);
    CHECK(status_of([&] { return parse_infer(head + bytes_of({1, 2, 3, 4, 5}), head.size()); }) == 400);
    CHECK(status_of([&] { return parse_infer(head, head.size() + 1); }) == 400);
    CHECK(status_of([&] { return parse_infer(head, {}); }) == 400);
}

TEST_CASE("every type goes through JSON and comes back", "[examples]") {
    for (const auto* type : {"BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16",
                             "BF16", "FP32", "FP64", "BYTES"}) {
        CAPTURE(type);
        const std::string data = std::string_view(type) == "BOOL"    ? "[true,false]"
                                 : std::string_view(type) == "BYTES" ? R"(["a\"b",""])"
                                                                     : "[1,100]";
        const auto body =
            std::string(R"({"inputs":[{"name":"x","datatype":")") + type + R"(","shape":[2],"data":)" + data + "}]}";
        const auto r = parse_infer(body, {});
        std::string out;
        append_json(out, r.inputs[0]);
        CHECK(out == data);
        tensor again{"x", r.inputs[0].type, {2}, {}};
        set_binary(again, r.inputs[0].data);
        CHECK(again.data == r.inputs[0].data);
    }
    tensor flags{"x", datatype::boolean, {4}, {}};  // an engine reads each byte as a bool
    set_binary(flags, std::vector{std::byte{0}, std::byte{1}, std::byte{2}, std::byte{255}});
    CHECK(flags.data == std::vector{std::byte{0}, std::byte{1}, std::byte{1}, std::byte{1}});
    const std::array<std::string, 2> texts{"a", ""};
    CHECK(texts_tensor("x", texts).texts() == std::vector<std::string_view>{"a", ""});
}

TEST_CASE("a wrong request is refused, with the reason", "[examples]") {
    const auto refuses = [](std::string_view inputs) {
        return status_of([&] { return parse_infer("{\"inputs\":" + std::string(inputs) + "}", {}); }) == 400;
    };
    CHECK(refuses("7"));
    CHECK(refuses("[7]"));
    CHECK(refuses(R"([{"name":"","datatype":"FP32","shape":[1],"data":[1]}])"));
    CHECK(refuses(R"([{"name":"x","datatype":"FP31","shape":[1],"data":[1]}])"));
    CHECK(refuses(R"([{"name":"x","datatype":"FP32","shape":[-1],"data":[1]}])"));
    CHECK(refuses(R"([{"name":"x","datatype":"FP32","shape":[2],"data":[1]}])"));
    CHECK(refuses(R"([{"name":"x","datatype":"FP32","shape":[1.5],"data":[1]}])"));
    CHECK(refuses(R"([{"name":"x","datatype":"UINT8","shape":[1],"data":[256]}])"));
    CHECK(refuses(R"([{"name":"x","datatype":"FP16","shape":[1],"data":[65520]}])"));
    CHECK(refuses(R"([{"name":"x","datatype":"FP16","shape":[1],"data":[-1e9]}])"));
    CHECK(refuses(R"([{"name":"x","datatype":"BF16","shape":[1],"data":[3.4e38]}])"));
    CHECK_FALSE(refuses(R"([{"name":"x","datatype":"FP16","shape":[1],"data":[65519]}])"));
    CHECK(refuses(R"([{"name":"x","datatype":"FP32","shape":[9223372036854775807,4],"data":[]}])"));
    CHECK(refuses(R"([{"name":"x","datatype":"FP32","shape":[65536,65536,65536,65536],"data":[]}])"));
    CHECK(refuses(R"([{"name":"x","datatype":"FP32","shape":[4294967296,4294967296],"data":[]}])"));
    CHECK(refuses(R"([{"name":"x","datatype":"FP32","shape":[1,1,1,1,1,1,1,1,1],"data":[1]}])"));
    CHECK(refuses(R"([{"name":"x","datatype":"FP32","shape":[1],"data":[1],"parameters":{"binary_data_size":4}}])"));
    CHECK_FALSE(refuses(R"([{"name":"x","datatype":"FP32","shape":[0],"data":[]}])"));

    auto r = parse_infer(two_by_two, {});
    const auto with = [&](auto change) {
        auto other = r;
        change(other);
        return status_of([&] { return check_inputs(square, other), 0; });
    };
    CHECK(with([](auto&) {}) == 200);
    CHECK(with([](auto& x) { x.inputs.clear(); }) == 400);
    CHECK(with([](auto& x) { x.inputs[0].name = "OTHER"; }) == 400);
    CHECK(with([](auto& x) { x.inputs[0].type = datatype::int32; }) == 400);
    CHECK(with([](auto& x) { x.inputs[0].shape = {4}; }) == 400);
    CHECK(with([](auto& x) { x.inputs[0].shape = {5, 2}; }) == 400);
    CHECK(with([](auto& x) { x.inputs[0].shape = {0, 2}; }) == 400);
    CHECK(with([](auto& x) { x.outputs.push_back({"OTHER", false}); }) == 400);
}

TEST_CASE("an input without extents isn't one of a batch, wherever it stands", "[examples]") {
    const model_info two{"two", "test", {{"A", datatype::fp32, {-1}}, {"B", datatype::fp32, {-1}}}, {}, 4, false};
    for (const auto* bad : {"[]", "[2]"}) {
        const auto r = parse_infer(R"({"inputs":[{"name":"B","datatype":"FP32","shape":)" + std::string(bad) +
                                       R"(,"data":[1)" + (bad[1] == '2' ? ",2" : "") +
                                       R"(]},{"name":"A","datatype":"FP32","shape":[1],"data":[1]}]})",
                                   {});
        CHECK(status_of([&] { return check_inputs(two, r), 0; }) == 400);
    }
}

TEST_CASE("a model whose description forgets the batch of an input serves no request", "[examples]") {
    const model_info odd{"odd", "test", {{"A", datatype::fp32, {}}}, {}, 4, false};
    const auto r = parse_infer(R"({"inputs":[{"name":"A","datatype":"FP32","shape":[],"data":[1]}]})", {});
    CHECK(status_of([&] { return check_inputs(odd, r), 0; }) == 400);
    CHECK(json::parse(model_config_json(odd)).at("input").elements()[0].at("dims").text() == "[]");
}

TEST_CASE("an unsupported field that would change an answer is refused, not ignored", "[examples]") {
    const auto refuses = [](std::string_view of_all, std::string_view of_input, std::string_view of_output) {
        return status_of([&] {
                   return parse_infer(R"({"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1])" +
                                          std::string(of_input) + R"(}],"outputs":[{"name":"y")" +
                                          std::string(of_output) + "}]" + std::string(of_all) + "}",
                                      {});
               }) == 400;
    };
    CHECK_FALSE(refuses(R"(,"parameters":{"timeout":5,"priority":1,"of_mine":"x"})", R"(,"parameters":{"of_mine":1})",
                        R"(,"parameters":{"binary_data":true})"));
    CHECK(refuses(R"(,"parameters":{"sequence_id":7,"sequence_start":true,"sequence_end":false})", "", ""));
    CHECK(refuses(R"(,"parameters":{"priority":-1})", "", ""));
    CHECK(refuses(R"(,"parameters":{"priority":"first"})", "", ""));
    CHECK(refuses("", R"(,"parameters":{"shared_memory_region":"r","shared_memory_byte_size":4})", ""));
    CHECK(refuses("", "", R"(,"parameters":{"classification":3})"));
    CHECK(refuses("", "", R"(,"parameters":{"shared_memory_region":"r","shared_memory_byte_size":4})"));
}

TEST_CASE("a name that is there twice is refused", "[examples]") {
    const std::string x = R"({"name":"x","datatype":"FP32","shape":[1],"data":[1]})", y = R"({"name":"y"})";
    const auto status = [](const std::string& inputs, const std::string& outputs) {
        return status_of(
            [&] { return parse_infer("{\"inputs\":[" + inputs + "],\"outputs\":[" + outputs + "]}", {}); });
    };
    CHECK(status(x, y) == 200);
    CHECK(status(x + "," + x, y) == 400);
    CHECK(status(x, y + "," + y) == 400);
}

TEST_CASE("lists are bounded before they take memory", "[examples]") {
    std::string many = "[0";
    for (int n = 0; n < 64; ++n) many += ",0";
    CHECK(json::parse(many + "]").elements().size() == 65);
    CHECK_THROWS_AS(json::parse(many + "]").elements(64), json::error);
    CHECK(status_of([&] { return parse_infer("{\"inputs\":" + many + "]}", {}); }) == 400);
}

TEST_CASE("an answer is in the form that was asked for, output by output", "[examples]") {
    const std::array<std::string, 1> texts{"\xFF\"t"};
    infer_response r{"m", "1", "7", {parse_infer(two_by_two, {}).inputs[0], texts_tensor("TEXT", texts)}};
    auto body = write_infer(r, {});
    CHECK_FALSE(body.header_length);
    const auto v = json::parse(body.body);
    CHECK(v.at("id").string() == "7");
    CHECK(v.at("outputs").elements()[1].at("data").elements()[0].string() == "\xEF\xBF\xBD\"t");

    infer_request asked;
    asked.outputs = {{"TEXT", false}, {"INPUT", true}};
    body = write_infer(r, asked);
    REQUIRE(body.header_length);
    const auto head = json::parse(std::string_view(body.body).substr(0, *body.header_length));
    CHECK(head.at("outputs").elements()[1].at("parameters").at("binary_data_size").number<int>() == 16);
    CHECK(body.body.substr(*body.header_length) == bytes_of({1, 2.5F, -300, 4}));
    asked.outputs = {{"NONE", false}};
    CHECK(status_of([&] { return write_infer(r, asked); }) == 400);
    CHECK(json::parse(error_json("a \"b\"\n")).at("error").string() == "a \"b\"\n");
    CHECK(json::parse(model_metadata_json(square)).at("inputs").elements()[0].at("shape").text() == "[-1,2]");
    CHECK(json::parse(model_config_json(square)).at("input").elements()[0].at("dims").text() == "[2]");
}

TEST_CASE("paths lead to what is there, and tricks nowhere", "[examples]") {
    const auto at = [](std::string_view method, std::string_view path) {
        return status_of([&] { return route_of(method, path); });
    };
    const auto r = route_of("POST", "/v2/models/a%20b/versions/3/infer?x=/../y");
    CHECK(r.what == action::infer);
    CHECK(r.model == "a b");
    CHECK(r.version == "3");
    CHECK(route_of("GET", "/v2/").what == action::server_metadata);
    CHECK(at("GET", "/v2/models/m/infer") == 405);
    CHECK(at("GET", "/") == 404);
    CHECK(at("GET", "/v2/models") == 404);
    CHECK(at("GET", "/v2//health/live") == 404);
    CHECK(at("GET", "/v2/models//ready") == 404);
    for (const auto* trick :
         {"/v2/models/../../etc/passwd", "/v2/models/%2e%2e/ready", "/v2/models/a%2fb/ready", "/v2/models/a%5cb/ready",
          "/v2/models/%00/ready", "/v2/models/%/ready", "/v2/models/%4/ready", "/v2/models/%zz/ready",
          "/v2/models/%ff/ready", "v2/models/m/ready", "", "http://other/v2", "/v2/models/a\nb/ready", "*"}) {
        CAPTURE(trick);
        CHECK(at("GET", trick) == 400);
    }
    CHECK(route_of("GET", "/v2/models/%252e%252e/ready").model == "%2e%2e");  // decoded once
    CHECK(at("GET", "/v2/models/" + std::string(2000, 'a')) == 414);
}

TEST_CASE("a request to continue a text is read with its limits", "[examples]") {
    const auto r = parse_generate(R"({"text_input":"once","parameters":{"max_tokens":5}})");
    CHECK(r.prompt == "once");
    CHECK(r.most_tokens == 5);
    CHECK(parse_generate(R"({"text_input":"","max_tokens":4096})").most_tokens == 4096);
    for (const auto* bad : {"", "{}", R"({"text_input":7})", R"({"text_input":"a","max_tokens":0})",
                            R"({"text_input":"a","max_tokens":4097})", R"({"text_input":"a","max_tokens":-1})"}) {
        CAPTURE(bad);
        CHECK(status_of([&] { return parse_generate(bad); }) == 400);
    }
}

TEST_CASE("the file of tenants has their keys", "[examples]") {
    const auto f = parse_tenants(
        "unit=1MiB # api_key=not_this_one\nname=chat api_key=key-of-chat memory=4MiB compute=60%\n"
        "  api_key=another-of-chat\nname=batch memory=2MiB api_key=key-of-batch queue_limit=3\n");
    REQUIRE(f.specs.size() == 2);
    CHECK(f.specs[1].queue_limit == 3);
    CHECK(f.keys.size() == 3);
    CHECK(f.tenant_of("key-of-chat") == "chat");
    CHECK(f.tenant_of("another-of-chat") == "chat");
    CHECK(f.tenant_of("key-of-batch") == "batch");
    for (const auto* wrong : {"", "key-of-bat", "key-of-batch ", "not_this_one", "key-of-chaT"})
        CHECK(f.tenant_of(wrong).empty());
    const auto complaint = [](std::string_view text) -> std::string {
        try {
            (void)parse_tenants(text);
        } catch (const gpushare::specification_error& e) {
            return e.what();
        }
        return {};
    };
    CHECK_THAT(complaint("api_key=12345678 name=a memory=1B\n"), Catch::Contains("behind a tenant's name"));
    CHECK_THAT(complaint("name=a memory=1B\napi_key=12345678 name=b memory=1B\n"),
               Catch::Contains("behind a tenant's name"));
    CHECK_THAT(complaint("name=a memory=1B\n  api_key=12345678 name=b memory=1B\n"),
               Catch::Contains("behind a tenant's name"));
    CHECK_THAT(complaint("name=a memory=1B\napi_key=12345678\n"), Catch::Contains("indented"));
    CHECK_THAT(complaint("name=a memory=1B api_key=short"), Catch::Contains("8 to 256"));
    CHECK_THAT(complaint("name=a memory=1B api_key=12345678\nname=b memory=1B api_key=12345678"),
               Catch::Contains("another tenant's"));
    for (const auto* cut : {"", "\n", "# nobody\n", "unit=1MiB\n"})
        CHECK_THAT(complaint(cut), Catch::Contains("must be none"));
    CHECK_THAT(complaint("name=a memory=1B\nname=b memory=1"), !Catch::Equals(""));
    CHECK_THAT(complaint("name=a memory=1B\nname=b memory=1B comp"), !Catch::Equals(""));
    CHECK_THAT(complaint("name=a memory=1B queue_limit=1"), Catch::Contains("line feed"));  // or 16, or 100
    CHECK(parse_tenants("# on holiday\ntenants=none\n").specs.empty());
    CHECK_THAT(complaint("tenants=none\nname=a memory=1B\n"), Catch::Contains("there are some"));
    CHECK_THAT(complaint("name=a memory=1B api_key=12345678\nfoo=1"), Catch::Contains("line 2"));
}

TEST_CASE("no word of the file of tenants that may be a key is told", "[examples]") {
    for (const auto* slipped :
         {"name=a memory=1MiB\n  s3cret-key\n", "name=a memory=1MiB s3cret-key\n",
          "name=a memory=1MiB apikey=s3cret-key\n", "name=a memory=s3cret-key\n",
          "name=a memory=1MiBapi_key=s3cret-key\n", "name=aapi_key=s3cret-key memory=1MiB\n",
          "name=a memory=1MiB api_key= s3cret-key\n", "s3cret-key=1\n", "name=a memory=1MiB compute=s3cret-key\n",
          "name=a memory=1MiB api_key=s3cret-key\nname=b memory=1MiB api_key=s3cret-key\n"}) {
        CAPTURE(slipped);
        std::string said;
        try {
            (void)parse_tenants(slipped);
        } catch (const gpushare::specification_error& e) {
            said = e.what();
        }
        CHECK_FALSE(said.empty());
        CHECK_THAT(said, !Catch::Contains("s3cret"));
    }
}

TEST_CASE("a key is found among thousands, and no other one is", "[examples]") {
    key_index keys;
    for (int i = 0; i < 5000; ++i) CHECK(keys.add("key-number-" + std::to_string(i)));
    CHECK_FALSE(keys.add("key-number-17"));
    CHECK(keys.size() == 5000);
    for (std::size_t i = 0; i < 5000; ++i) CHECK(keys.find("key-number-" + std::to_string(i)) == i);
    CHECK_FALSE(keys.find(""));
    CHECK_FALSE(keys.find("key-number-5000"));
    CHECK_FALSE(keys.find("key-number-1 "));
    CHECK(keys.add(std::string(longest_key + 1, 'k')));  // whoever puts it there: it is nobody's
    CHECK_FALSE(keys.find(std::string(longest_key + 1, 'k')));
}

TEST_CASE("a file looks different once another one is in its place, and is read only if it is one", "[examples]") {
    const auto folder = std::filesystem::temp_directory_path() / ("gpushare_read_" + std::to_string(::getpid()));
    std::filesystem::create_directory(folder);
    const auto path = (folder / "file").string(), next = (folder / "next").string();
    std::ofstream(path) << "one";
    const auto [text, before] = read_file(path);
    CHECK(text == "one");
    CHECK(look_at(path) == before);
    std::ofstream(next) << "two";  // as long, and as old
    std::filesystem::last_write_time(next, std::filesystem::last_write_time(path));
    std::filesystem::rename(next, path);
    CHECK_FALSE(look_at(path) == before);
    std::ofstream(path) << "seven";
    CHECK_FALSE(look_at(path) == before);
    CHECK_THROWS_AS(read_file(path, 2), unreadable);
    CHECK_THROWS_AS(read_file((folder / "nothing").string()), unreadable);
    CHECK_THROWS_AS(read_file(folder.string()), unreadable);
    CHECK(look_at((folder / "nothing").string()) == file_look{});
    REQUIRE(::mkfifo(next.c_str(), 0600) == 0);
    CHECK_THROWS_AS(read_file(next), unreadable);  // at once, though nobody writes into it
    std::filesystem::remove_all(folder);
}

TEST_CASE("messages come in whatever pieces, and compressed ones don't", "[examples]") {
    const auto prefixed = [](std::string body, char flag = 0) {
        const auto n = static_cast<std::uint32_t>(body.size());
        return std::string{flag, static_cast<char>(n >> 24U), static_cast<char>(n >> 16U), static_cast<char>(n >> 8U),
                           static_cast<char>(n)} +
               body;
    };
    const std::string all = prefixed("first") + prefixed("") + prefixed(std::string(1000, 'x'));
    for (std::size_t piece = 1; piece <= all.size(); ++piece) {
        message_reader in(1000);
        std::vector<std::string> messages;
        for (std::size_t at = 0; at < all.size(); at += piece) {
            auto bytes = std::string_view(all).substr(at, piece);
            while (!bytes.empty()) {
                bytes.remove_prefix(in.take(bytes));
                if (in.is_complete()) messages.push_back(in.message());
            }
        }
        CHECK(messages == std::vector<std::string>{"first", "", std::string(1000, 'x')});
        CHECK_FALSE(in.has_begun());
    }
    CHECK(status_of([&] { message_reader(1000).take(prefixed("zip", 1)); }) == 501);
    CHECK(status_of([&] { message_reader(999).take(prefixed(std::string(1000, 'x'))); }) == 413);
    message_reader in(std::size_t{64} << 20);
    CHECK(in.take(std::string_view("\0\3\0\0\0abc", 8)) == 8);
    CHECK_FALSE(in.is_complete());
    CHECK(in.announced() == 3U << 24U);
    CHECK(in.take("d") == 1);
}

TEST_CASE("a newcomer always finds room: the oldest connection without a key goes", "[examples]") {
    const int a = 0, b = 0;
    front_door door({.most = 6, .strangers = 3});
    std::vector<front_door::id> ids;
    const auto come = [&] { return ids.emplace_back(door.come()); };
    for (int i = 0; i < 3; ++i) come();
    CHECK_FALSE(door.surplus());
    come();
    CHECK(door.surplus() == ids[0]);  // too many strangers
    door.known(ids[0], &a);
    CHECK_FALSE(door.surplus());
    door.known(ids[1], &a);
    door.known(ids[2], &b);
    for (int i = 0; i < 3; ++i) come();
    CHECK(door.size() == 7);
    CHECK(door.surplus() == ids[3]);  // too many of all: still a stranger
    door.gone(ids[3]);
    CHECK_FALSE(door.surplus());
    for (const auto i : {4, 5, 6}) door.known(ids[static_cast<std::size_t>(i)], &b);
    come();
    CHECK(door.surplus() == ids[2]);  // there are none but the new one: the oldest of whoever has most
    door.gone(ids[2]);
    door.gone(ids[2]);
    CHECK_FALSE(door.surplus());
    door.known(ids[2], &a);  // it is gone
    CHECK(door.size() == 6);
    CHECK(connections_for(160) * 2 + 64 <= 160);
    CHECK(connections_for(20) >= 1);
    CHECK(connections_for(std::size_t{1} << 20) >= 10'000);
}

/// Anything that may come in: whole requests, with bytes changed, cut out, doubled.
TEST_CASE("a picture fades to white at its edges", "[examples]") {
    openvino::picture p{2, 2};
    p.grey = {0, 0.5F, 0.25F, 1};
    CHECK(p.at(0, 0) == 0);
    CHECK(p.at(0.5, 0) == 0.25F);
    CHECK(p.at(0.5, 0.5) == 0.4375F);
    CHECK(p.at(-1, 0) == 1);
    CHECK(p.at(-0.25, 0) == 0.25F);
    CHECK(p.at(0, -0.5) == 0.5F);
    CHECK(p.at(1.5, 0) == 0.75F);
    CHECK(p.at(-7.5, 3) == 1);
}

TEST_CASE("any bytes are read or refused", "[examples]") {
    const std::vector<std::string> seeds{
        std::string(two_by_two), R"({"text_input":"once","parameters":{"max_tokens":5}})",
        R"({"inputs":[{"name":"x","datatype":"BYTES","shape":[2],"data":["a","\ud83d\ude00"]}],"outputs":[{"name":"y","parameters":{"binary_data":true}}]})",
        R"({"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":5}}]})" +
            std::string("\1\0\0\0a", 5)};
    support::random any(11);
    std::uint64_t good = 0;
    for (int n = 0; n < 20'000; ++n) {
        auto text = seeds[any.below(seeds.size())];
        for (auto changes = any.below(4); changes > 0 && !text.empty(); --changes) {
            const auto at = any.below(text.size());
            switch (any.below(4)) {
                case 0: text[at] = static_cast<char>(any.below(256)); break;
                case 1: text.erase(at, any.below(5)); break;
                case 2: text.insert(at, text.substr(any.below(text.size()), any.below(8))); break;
                default: text[at] = "{}[]\",:0-9e.\\u"[any.below(14)];
            }
        }
        try {
            const auto r =
                parse_infer(text, any.below(3) == 0 ? std::optional(any.below(text.size() + 2)) : std::nullopt);
            for (const auto& t : r.inputs) {
                const auto elements = elements_of(t.shape);
                REQUIRE(elements);
                if (t.type != datatype::bytes) REQUIRE(t.data.size() == *elements * size_of(t.type));
                std::string out;
                append_json(out, t);
                REQUIRE(is_json(out));
            }
            ++good;
        } catch (const refused& r) {
            REQUIRE(r.status == 400);
            REQUIRE(is_json(error_json(r.what())));
        }
        try {
            (void)parse_generate(text);
        } catch (const refused&) {
        }
        try {
            (void)route_of("GET", "/v2/models/" + text);
        } catch (const refused&) {
        }
    }
    CHECK(good > 1000);
}

}  // namespace inference_protocol_test
