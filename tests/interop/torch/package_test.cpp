// SPDX-License-Identifier: Apache-2.0
// Packages of AOTInductor in the example server, loaded by torch's own loader if the installed
// libtorch has it. package_model.cpp stands for the code that AOTInductor would compile.
#include <caffe2/serialize/inline_container.h>
#include <torch/script.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "inference_server/engine.hpp"
#include "inference_server/json.hpp"
#include "inference_server/torch_engines.hpp"
#include "inference_server/torch_package.hpp"
#include "interop/torch/served_folder.hpp"
#include "support/catch.hpp"

namespace torch_package_test {

using namespace inference_server;
using namespace torch_served;

namespace {

constexpr std::string_view one_of_each = R"({"inputs":[{"name":"x","datatype":"FP32","shape":[-1]}],)"
                                         R"("outputs":[{"name":"y","datatype":"FP32","shape":[-1]}]})";

std::string content_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

/// As torch._inductor lays one out.
void write_package(const std::string& path, std::string_view device) {
    const std::string code = content_of(TORCH_PACKAGE_MODEL);
    const std::string about = R"({"AOTI_DEVICE_KEY": ")" + std::string(device) + R"("})";
    caffe2::serialize::PyTorchStreamWriter to(path);
    to.writeRecord("archive_format", "pt2", 3);
    to.writeRecord("data/aotinductor/model/m.wrapper.cpp", "", 0);
    to.writeRecord("data/aotinductor/model/m.wrapper.so", code.data(), code.size());
    to.writeRecord("data/aotinductor/model/m.wrapper_metadata.json", about.data(), about.size());
    to.writeEndOfFile();
}

folder with_package(std::string_view device = "cpu", std::string_view description = one_of_each) {
    folder f;
    write_package(f / "triple.pt2", device);
    f.write("triple.json", description);
    return f;
}

auto ask(const served_folder& s, const std::string& numbers, const std::string& count) {
    return s.connect().ask(
        "POST", "/v2/models/triple/infer", chat_key,
        R"({"inputs":[{"name":"x","datatype":"FP32","shape":[)" + count + R"(],"data":)" + numbers + "}]}");
}

}  // namespace

TEST_CASE("a libtorch without AOTInductor refuses packages, and says which one has it", "[interop][torch]") {
    if (has_torch_packages()) return;
    folder f;
    f.write("triple.pt2", "a package");
    f.write("triple.json", one_of_each);
    CHECK_THROWS_AS(torch_models(f.path.string()), unknown_engine);
    CHECK_THROWS_WITH(torch_models(f.path.string()),
                      Catch::Contains("triple.pt2") && Catch::Contains("./dev setup gpu"));
    CHECK_THROWS_AS(torch_package("triple.pt2", {1, 1}, at::kCPU), unknown_engine);
}

TEST_CASE("a package of AOTInductor is served, and what it refuses is one request's error", "[interop][torch]") {
    if (!has_torch_packages()) return;
    const served_folder s(with_package());
    const auto r = ask(s, "[1,2,5]", "3");
    REQUIRE(r.status == 200);
    CHECK_THAT(r.body, Catch::Contains("[3,6,15]"));
    const auto refused = ask(s, "[-1]", "1");
    CHECK(refused.status == 500);
    CHECK_THAT(refused.body, Catch::Contains("standard error"));
    CHECK(ask(s, "[7]", "1").status == 200);
    CHECK_THAT(s.connect().ask("GET", "/v2/models/triple", chat_key, "").body, Catch::Contains("pytorch_aotinductor"));
}

TEST_CASE("a package that doesn't fit its description or the device says why", "[interop][torch]") {
    if (!has_torch_packages()) return;
    const auto error_of = [](folder f) {
        const served_folder s(std::move(f));
        const auto r = ask(s, "[1]", "1");
        CHECK(r.status == 500);
        return r.body;
    };
    CHECK_THAT(
        error_of(with_package("cpu", R"({"inputs":[{"name":"x","datatype":"FP32","shape":[-1]}],"outputs":[]})")),
        Catch::Contains("gives 1 tensors, its description has 0"));
    CHECK_THAT(error_of(with_package("cuda")), Catch::Contains("compiled for 'cuda', and models run on 'cpu'"));
    auto broken = with_package();
    broken.write("triple.pt2", "no package");
    CHECK_THAT(error_of(std::move(broken)), Catch::Contains("triple.pt2") || Catch::Contains("archive"));
    const auto two = with_package();
    two.write("triple.pt", "");
    CHECK_THROWS_WITH(torch_models(two.path.string()), Catch::Contains("triple.pt of that name"));
}

TEST_CASE("a package runs on the stream that it is given, and its calls don't wait for each other",
          "[interop][torch]") {
    if (!has_torch_packages()) return;
    const auto f = with_package();
    torch_package model(f / "triple.pt2", {.inputs = 1, .outputs = 1}, at::kCPU);
    const auto x = at::ones({2}, at::kFloat);
    const auto on = [&](void* stream) { return model.run({x}, stream).at(0)[0].item<double>(); };
    CHECK(on(nullptr) == 3);
    CHECK(on(reinterpret_cast<void*>(std::uintptr_t{5})) == 8);
    CHECK_THROWS_AS(torch_package(f / "triple.pt2", {.inputs = 2, .outputs = 1}, at::kCPU), std::logic_error);
}

}  // namespace torch_package_test
