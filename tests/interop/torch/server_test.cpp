// SPDX-License-Identifier: Apache-2.0
// The example server with TorchScript models, which the test makes, as its clients see them. For
// `./dev check`: libtorch's headers take a while to compile.
#include <torch/script.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "inference_server/json.hpp"
#include "inference_server/torch_engines.hpp"
#include "interop/torch/served_folder.hpp"
#include "support/catch.hpp"

namespace torch_server_test {

using namespace inference_server;
using namespace std::chrono_literals;
using namespace torch_served;

namespace {

/// x [-1, 4] -> y = x W, [-1, 2].
at::Tensor weights() { return at::arange(8, at::kFloat).view({4, 2}); }
void make_models(const folder& to) {
    torch::jit::Module linear("linear");
    linear.register_parameter("w", weights(), false);
    linear.define("def forward(self, x):\n    return torch.matmul(x, self.w)\n");
    linear.save(to / "linear.pt");
    to.write("linear.json", R"({"inputs":[{"name":"x","datatype":"FP32","shape":[-1,4]}],)"
                            R"("outputs":[{"name":"y","datatype":"FP32","shape":[-1,2]}],"max_batch_size":8})");
    torch::jit::Module two("two");
    two.define("def forward(self, a, b):\n    return a + b, (a * 2).int()\n");
    two.save(to / "two.pt");
    to.write("two.json",
             R"({"inputs":[{"name":"a","datatype":"INT64","shape":[3]},{"name":"b","datatype":"INT64","shape":[3]}],)"
             R"("outputs":[{"name":"sum","datatype":"INT64","shape":[3]},)"
             R"({"name":"twice","datatype":"INT32","shape":[3]}]})");
    torch::jit::Module wrong("wrong");
    wrong.define("def forward(self, x):\n    return x.double()\n");
    wrong.save(to / "wrong.pt");
    to.write("wrong.json", R"({"inputs":[{"name":"x","datatype":"FP32","shape":[1]}],)"
                           R"("outputs":[{"name":"y","datatype":"FP32","shape":[1]}]})");
}

folder with_models() {
    folder f;
    make_models(f);
    return f;
}

struct server : served_folder {
    server() : served_folder(with_models()) {}
    using served_folder::served_folder;
};

std::string row(float first, std::string_view parameters = "") {
    std::string body = R"({"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[)";
    for (int i = 0; i < 4; ++i) body += (i == 0 ? "" : ",") + std::to_string(first + static_cast<float>(i));
    return body + "]}]" + std::string(parameters) + "}";
}
std::vector<float> expected(float first) {
    const auto y = at::matmul(at::arange(first, first + 4, at::kFloat), weights());
    return {y.data_ptr<float>(), y.data_ptr<float>() + 2};
}
template <class T>
std::vector<T> output(const std::string& body, std::size_t nth) {
    std::vector<T> all;
    json::parse(body).at("outputs").elements()[nth].at("data").each_leaf(
        [&](json::value v) { all.push_back(v.number<T>()); });
    return all;
}
constexpr std::string_view linear = "/v2/models/linear/infer";

}  // namespace

TEST_CASE("models as TorchScript answer what torch computes, for each tenant", "[interop][torch]") {
    server s;
    auto c = s.connect();
    for (const auto key : {chat_key, batch_key})
        for (const float first : {0.F, -3.F, 100.F}) {
            const auto r = c.ask("POST", linear, key, row(first));
            REQUIRE(r.status == 200);
            CHECK(output<float>(r.body, 0) == expected(first));
        }
    const auto two = c.ask("POST", "/v2/models/two/infer", chat_key,
                           R"({"inputs":[{"name":"b","datatype":"INT64","shape":[3],"data":[10,20,30]},)"
                           R"({"name":"a","datatype":"INT64","shape":[3],"data":[1,2,3]}]})");
    REQUIRE(two.status == 200);
    CHECK(output<int>(two.body, 0) == std::vector{11, 22, 33});
    CHECK(output<int>(two.body, 1) == std::vector{2, 4, 6});
    CHECK_THAT(c.ask("GET", "/v2/models/linear", chat_key, "").body, Catch::Contains("pytorch_torchscript"));
}

TEST_CASE("a TorchScript model's exception is one request's error, and the next request is served",
          "[interop][torch]") {
    server s;
    auto c = s.connect();
    const auto wrong = c.ask("POST", "/v2/models/wrong/infer", chat_key,
                             R"({"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]})");
    CHECK(wrong.status == 500);
    CHECK_THAT(wrong.body, Catch::Contains("isn't of the type that is described"));
    CHECK(c.ask("POST", linear, chat_key, R"({"inputs":[{"name":"x","datatype":"FP32","shape":[1,3],"data":[1,2,3]}]})")
              .status == 400);
    CHECK(c.ask("POST", linear, chat_key, row(1)).status == 200);
}

TEST_CASE("a TorchScript model whose results have other rows than the batch is refused", "[interop][torch]") {
    const std::string result = GENERATE("x.sum()", "x[:1]", "torch.cat([x, x])");
    folder f;
    torch::jit::Module sums("sums");
    sums.define("def forward(self, x):\n    return " + result + " if x.size(0) == 2 else x\n");
    sums.save(f / "sums.pt");
    f.write("sums.json", R"({"inputs":[{"name":"x","datatype":"FP32","shape":[-1]}],)"
                         R"("outputs":[{"name":"y","datatype":"FP32","shape":[-1]}],"max_batch_size":8})");
    server s(std::move(f));
    auto c = s.connect();
    const auto ask = [&](const std::string& tensor) {
        return c.ask("POST", "/v2/models/sums/infer", chat_key,
                     R"({"inputs":[{"name":"x","datatype":"FP32",)" + tensor + "}]}");
    };
    const auto wrong = ask(R"("shape":[2],"data":[1,2])");
    CHECK(wrong.status == 500);
    CHECK_THAT(wrong.body, Catch::Contains("'y' has other rows than the batch"));
    CHECK(ask(R"("shape":[3],"data":[1,2,3])").status == 200);
}

TEST_CASE("a TorchScript model that lacks memory is refused with the last line of the reason", "[interop][torch]") {
    folder f;
    torch::jit::Module hungry("hungry");
    hungry.define(
        "def forward(self, x):\n"
        "    assert int(x.size(0)) < 2, 'CUDA out of memory. tenant chat has 1 MiB'\n"
        "    return x\n");
    hungry.save(f / "hungry.pt");
    f.write("hungry.json", R"({"inputs":[{"name":"x","datatype":"FP32","shape":[-1]}],)"
                           R"("outputs":[{"name":"y","datatype":"FP32","shape":[-1]}]})");
    server s(std::move(f));
    auto c = s.connect();
    const auto ask = [&](const char* shape, const char* data) {
        return c.ask(
            "POST", "/v2/models/hungry/infer", chat_key,
            R"({"inputs":[{"name":"x","datatype":"FP32","shape":)" + std::string(shape) + R"(,"data":)" + data + "}]}");
    };
    const auto refused = ask("[2]", "[1,2]");
    CHECK(refused.status == 507);
    CHECK(json::parse(refused.body).at("error").string() == "out of memory. tenant chat has 1 MiB");
    CHECK(ask("[1]", "[7]").status == 200);
}

TEST_CASE("a TorchScript model that can't be loaded says why, without a trace", "[interop][torch]") {
    folder f;
    make_models(f);
    f.write("linear.pt", "no weights");  // read when the model is loaded
    std::filesystem::copy(f / "two.pt", f / "more.pt");
    std::filesystem::copy(f / "linear.json", f / "more.json");
    torch::jit::Module("none").save(f / "none.pt");
    std::filesystem::copy(f / "linear.json", f / "none.json");
    server s(std::move(f));
    auto c = s.connect();
    const auto error_of = [&](const std::string& model) {
        const auto r = c.ask("POST", "/v2/models/" + model + "/infer", chat_key, row(1));
        CHECK(r.status == 500);
        CHECK_THAT(r.body, !Catch::Contains("frame #"));
        return r.body;
    };
    CHECK_THAT(error_of("linear"), Catch::Contains("not a ZIP archive"));
    CHECK_THAT(error_of("more"), Catch::Contains("takes 2 tensors, its description has 1"));
    CHECK_THAT(error_of("none"), Catch::Contains("no forward()"));
}

TEST_CASE("a TorchScript model's memory is charged to the tenant that loads it", "[interop][torch]") {
    folder f;
    torch::jit::Module large("large");
    large.register_parameter("w", at::ones({2048, 4096}), false);  // 32 MiB
    large.define("def forward(self, x):\n    return x + self.w[0, 0]\n");
    large.save(f / "large.pt");
    f.write("large.json", R"({"inputs":[{"name":"x","datatype":"FP32","shape":[-1,4]}],)"
                          R"("outputs":[{"name":"y","datatype":"FP32","shape":[-1,4]}]})");
    server s(std::move(f));
    auto c = s.connect();
    const auto used = [&](const std::string& tenant) {
        const auto all = s.core->metrics(), line = "gpushare_tenant_memory_used_bytes{tenant=\"" + tenant + "\"} ";
        const auto at = all.find(line);
        REQUIRE(at != std::string::npos);
        return std::stod(all.substr(at + line.size())) / (1 << 20);  // MiB
    };
    CHECK(c.ask("POST", "/v2/models/large/infer", "key-of-small", row(1)).status == 507);
    CHECK(used("small") == 0);
    CHECK(c.ask("POST", "/v2/models/large/infer", chat_key, row(1)).status == 200);
    CHECK(used("chat") >= 32);
    CHECK(used("chat") < 40);
    CHECK(used("batch") == 0);
}

TEST_CASE("requests of both tenants, some with timeouts, are all answered", "[interop][torch]") {
    server s;
    std::vector<std::future<int>> wrong;
    for (int t = 0; t < 4; ++t)
        wrong.push_back(std::async(std::launch::async, [&s, t] {
            auto c = s.connect();
            int n = 0;
            for (int i = 0; i < 25; ++i) {
                const auto first = static_cast<float>(100 * t + i);
                const auto r = c.ask("POST", linear, t % 2 == 0 ? chat_key : batch_key,
                                     row(first, i % 2 == 0 ? R"(,"parameters":{"timeout":60000000})" : ""));
                n += r.status != 200 || output<float>(r.body, 0) != expected(first);
            }
            return n;
        }));
    for (auto& w : wrong) CHECK(w.get() == 0);
}

TEST_CASE("a folder of models that can't be described is refused with the file's name", "[interop][torch]") {
    folder f;
    make_models(f);
    CHECK(torch_models(f.path.string()).size() == 3);
    std::filesystem::remove(f / "two.json");
    CHECK_THROWS_WITH(torch_models(f.path.string()), Catch::Contains("two.json"));
    f.write("two.json", R"({"inputs":[{"name":"a","datatype":"BYTES","shape":[3]}],"outputs":[]})");
    CHECK_THROWS_WITH(torch_models(f.path.string()), Catch::Contains("two.json") && Catch::Contains("datatype"));
    f.write("two.json", R"({"inputs":[{"name":"a","datatype":"FP32","shape":[3]}],"outputs":[]})");
    CHECK(torch_models(f.path.string()).size() == 3);
    for (const std::string in : {"", "3", "-1"})
        for (const std::string out : {"", "3"}) {
            f.write("two.json", R"({"inputs":[{"name":"a","datatype":"FP32","shape":[)" + in +
                                    R"(]}],"outputs":[{"name":"b","datatype":"FP32","shape":[)" + out +
                                    R"(]}],"max_batch_size":8})");
            CHECK_THROWS_WITH(torch_models(f.path.string()),
                              Catch::Contains("two.json: ") && Catch::Contains(in == "-1" ? "'b'" : "'a'"));
        }
    f.write("two.json", R"({"inputs":[{"name":"a","datatype":"FP32","shape":[3]}],"outputs":[]})");
    CHECK_THROWS_WITH(torch_models(f / "missing"), Catch::Contains("missing"));
    const folder empty;
    CHECK_THROWS_WITH(torch_models(empty.path.string()), Catch::Contains("no model"));
}

}  // namespace torch_server_test
