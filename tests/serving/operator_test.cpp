// SPDX-License-Identifier: Apache-2.0
// Choices of operators: the table as text, against any input, and what a tenant measures.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/serving/operator_selection.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"

namespace operator_test {
namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::operator_table;
using stream = gpushare::host::stream;
using candidate = gpushare::operator_candidate<stream>;

errc loading(std::string_view text, std::uint64_t* line = nullptr) {
    try {
        (void)operator_table::load(text);
    } catch (const gpushare::error& e) {
        if (line != nullptr) *line = e.figures().asked;
        return e.code();
    }
    return errc::none;
}

candidate takes(std::string name, gpushare::ns time, int* runs = nullptr) {
    return {std::move(name), [=](stream& to) {
                if (runs != nullptr) ++*runs;
                to.launch({.blocks = 1, .hold = time}, [](auto&) {});
            }};
}

struct rig {
    gpushare::host::node node{{.devices = 1, .memory = 64_MiB, .sms = 2, .timing = gpushare::host::timing::modelled}};
    gpushare::tenancy<gpushare::host::node> shared{node};
    decltype(shared)::tenant chat = shared.admit({.name = "chat", .memory = 16_MiB, .compute = 50_pct});
};

}  // namespace

TEST_CASE("a table of operators is saved, loaded and looked up", "[serving]") {
    operator_table t;
    CHECK(t.find("matmul", "4x4") == nullptr);
    t.keep({"matmul", "8x8", "ours", 40us, 2});
    t.keep({"add", "8x8", "vendor", 1us, 3});
    t.keep({"matmul", "4x4", "ours", 4us, 2});
    t.keep({"matmul", "4x4", "vendor", 3us, 3});
    REQUIRE(t.rows().size() == 3);
    CHECK(t.find("matmul", "4x4")->candidate == "vendor");
    CHECK(t.find("matmul", "4") == nullptr);
    CHECK(t.save() == "add 8x8 vendor 1000 3\nmatmul 4x4 vendor 3000 3\nmatmul 8x8 ours 40000 2\n");
    CHECK(operator_table::load(t.save()) == t);
    CHECK(operator_table::load("# measured on two cores\n\n" + t.save()) == t);
    CHECK(operator_table::load("add 8x8 vendor 1000 3").rows().size() == 1);
    CHECK(t.forget("matmul", "4x4"));
    CHECK_FALSE(t.forget("matmul", "4x4"));
    for (const char* bad : {"", "a b", "a\n", "\t"}) {
        CHECK(support::code_of([&] { t.keep({bad, "x", "y", 1ns}); }) == errc::invalid_specification);
        CHECK(support::code_of([&] { t.keep({"x", bad, "y", 1ns}); }) == errc::invalid_specification);
        CHECK(support::code_of([&] { t.keep({"x", "y", bad, 1ns}); }) == errc::invalid_specification);
    }
    CHECK(support::code_of([&] { t.keep({"#x", "y", "z", 1ns}); }) == errc::invalid_specification);
}

TEST_CASE("a table of operators that isn't as it should be is refused with its line", "[serving]") {
    std::uint64_t line = 0;
    CHECK(loading("add 8x8 vendor 1000 3\nadd 8x9 vendor 1000\n", &line) == errc::invalid_specification);
    CHECK(line == 2);
    for (const char* bad :
         {"add 8x8 vendor 1000 3 4", "add 8x8 vendor -1 3", "add 8x8 vendor 1 -3", "add 8x8 vendor 1 ",
          "add  vendor 1 3", " add 8x8 vendor 1 3", "add 8x8 vendor 9223372036854775808 3",
          "add 8x8 vendor 1 4294967296", "add 8x8 vendor 1x 3", "add 8x8 v 1 3\nadd 8x8 w 1 3"}) {
        CAPTURE(bad);
        CHECK(loading(bad) == errc::invalid_specification);
    }
    const auto seed = support::seed(1);
    CAPTURE(seed);
    support::random any(seed);
    constexpr std::array<std::string_view, 12> tokens{"add", "8x8", " ", " ", " ",  "\n",
                                                      "1",   "3",   "#", "-", "\t", "99999999999"};
    for (int round = 0; round < 5000; ++round) {
        std::string text;
        for (auto n = any.below(24); n != 0; --n)
            text += any.one_in(20) ? std::string(1, static_cast<char>(any.below(256))) : std::string(any.of(tokens));
        if (loading(text) != errc::none) continue;
        const auto t = operator_table::load(text);  // what is accepted comes back
        CHECK(operator_table::load(t.save()) == t);
    }
}

TEST_CASE("a tenant measures candidates once, and the quickest is kept", "[serving]") {
    rig r;
    operator_table t;
    int runs = 0;
    const std::array all{takes("slow", 400us, &runs), takes("quick", 50us, &runs), takes("middle", 200us, &runs)};
    const auto best = gpushare::select_operator(r.chat, t, "matmul", "4x4", std::span<const candidate>(all));
    CHECK(best.candidate == "quick");
    CHECK(best.took >= 50us);
    CHECK(best.candidates == 3);
    CHECK(runs == 18);
    CHECK(*t.find("matmul", "4x4") == best);
    CHECK(r.chat.usage().device_time > 0ns);  // its own
    (void)gpushare::select_operator(r.chat, t, "matmul", "4x4", std::span<const candidate>(all));
    CHECK(runs == 18);
    // What the table names isn't there any more: measured anew.
    const auto left = gpushare::select_operator(r.chat, t, "matmul", "4x4", std::span<const candidate>(all).first(1));
    CHECK(left.candidate == "slow");
}

TEST_CASE("candidates that fail or are wrong are left out, however quick", "[serving]") {
    rig r;
    operator_table t;
    std::vector<candidate> all{takes("wrong", 1us), takes("right", 300us), takes("throws", 1us)};
    all[0].right = [] { return false; };
    all[1].right = [] { return true; };
    all[2].run = [](stream&) { throw std::runtime_error("no such shape"); };
    CHECK(gpushare::select_operator(r.chat, t, "add", "8", std::span<const candidate>(all)).candidate == "right");
    all.erase(all.begin() + 1);
    CHECK(support::code_of([&] {
              (void)gpushare::select_operator(r.chat, t, "add", "9", std::span<const candidate>(all));
          }) == errc::submission_failed);
    CHECK(support::code_of([&] {
              (void)gpushare::select_operator(r.chat, t, "add", "9", std::span<const candidate>(all).first(1));
          }) == errc::kernel_failed);
    CHECK(support::code_of([&] {
              (void)gpushare::select_operator(r.chat, t, "add", "9", std::span<const candidate>());
          }) == errc::invalid_specification);
    CHECK(t.find("add", "9") == nullptr);
}

}  // namespace operator_test
