// SPDX-License-Identifier: Apache-2.0
// The choice of operators: the table as text, for any input, and the measurements of a tenant.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/serving/operator_selection.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"

namespace operator_selection_test {
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

constexpr std::size_t n = 1000;  // numbers of an array

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
        for (auto left = any.below(24); left != 0; --left)
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

TEST_CASE("the options of a selection say how often, how wide and how its trials run", "[serving]") {
    gpushare::host::node node{{.devices = 2, .memory = 64_MiB, .sms = 1}};
    gpushare::tenancy<gpushare::host::node> shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 16_MiB, .devices = 2, .compute = 50_pct});
    const auto second = chat.spec().on[1];
    int runs = 0;
    const std::array one{takes("one", 1ns, &runs)};
    const auto select = [&](const gpushare::selection_options& o) {
        operator_table t;
        return gpushare::select_operator(chat, t, "add", "8", std::span<const candidate>(one), o);
    };
    const auto ran_there = [&] { return node.ledger(second).take().blocks.size(); };
    (void)select({.warm_up = 2, .repeats = 3});
    CHECK(std::exchange(runs, 0) == 5);
    (void)select({.warm_up = 0, .repeats = 0});  // once at least
    CHECK(std::exchange(runs, 0) == 1);
    (void)select({.warm_up = -7, .repeats = 3});
    CHECK(std::exchange(runs, 0) == 3);
    CHECK(ran_there() == 0);
    (void)select({.warm_up = 0, .repeats = 1, .part = 1});
    CHECK(ran_there() == 1);
    CHECK(support::code_of([&] { (void)select({.part = 2}); }) == errc::no_device);
    CHECK(support::code_of([&] { (void)select({.submit = {.stream = 7}}); }) == errc::invalid_specification);
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

TEST_CASE("a candidate whose kernel fails is left out and named, however quick", "[serving][failures]") {
    rig r;
    operator_table t;
    std::vector<gpushare::left_out_operator> out;
    std::vector<candidate> all{takes("right", 300us), takes("fails", 1us), takes("throws", 1us), takes("late", 1us)};
    all[1].run = [](stream& to) { to.launch({}, [](auto&) { throw std::runtime_error("no such tile"); }); };
    all[2].run = [](stream&) { throw std::runtime_error("no such shape"); };
    all[3].run = [runs = 0](stream& to) mutable {
        if (++runs == 3) to.launch({}, [](auto&) { throw 3; });
    };
    const auto best =
        gpushare::select_operator(r.chat, t, "add", "8", std::span<const candidate>(all), {.left_out = &out});
    CHECK(best.candidate == "right");
    REQUIRE(out.size() == 3);
    CHECK(out[0].name == "fails");
    CHECK(out[0].status == errc::kernel_failed);
    CHECK(out[0].why.find("no such tile") != std::string::npos);
    CHECK(out[1].name == "throws");
    CHECK(out[1].status == errc::submission_failed);
    CHECK(out[2].name == "late");
    try {
        (void)gpushare::select_operator(r.chat, t, "add", "9", std::span<const candidate>(all).subspan(1, 2));
        FAIL("none works");
    } catch (const gpushare::operation_error& e) {
        const std::string_view what = e.what();
        CHECK(what.find("fails: ") < what.find("no such tile"));
        CHECK(what.find("throws: ") < what.find("no such shape"));
        CHECK(e.tenant() == "chat");
    }
}

TEST_CASE("results are compared with a reference's, and what differs is left out and named", "[serving][failures]") {
    rig r;
    operator_table t;
    auto* const x = static_cast<float*>(r.chat.memory().allocate(n * sizeof(float)));
    auto* const y = static_cast<int*>(r.chat.memory().allocate(n * sizeof(int)));
    std::vector<gpushare::left_out_operator> out;
    const auto writes = [=](std::string name, gpushare::ns time, float factor, std::size_t many = n, int at_500 = 500) {
        return candidate{std::move(name), [=](stream& to) {
                             to.launch({.blocks = 1, .hold = time}, [=](auto&) {
                                 for (std::size_t i = 0; i < many; ++i) x[i] = factor * static_cast<float>(i + 1);
                                 for (std::size_t i = 0; i < many; ++i) y[i] = i == 500 ? at_500 : static_cast<int>(i);
                             });
                         }};
    };
    std::vector<candidate> all{writes("right", 300us, 1), writes("near", 200us, 1.001F),
                               writes("far", 1us, 1.1F),  writes("short", 1us, 1, n - 1),
                               takes("nothing", 1us),     writes("whole", 1us, 1, n, 501)};
    gpushare::operator_reference<stream> exact{
        .by = writes("exact", 1ms, 1),
        .results = {gpushare::compared(x, n, {.relative = 1e-2}), gpushare::compared(y, n)}};
    const auto select = [&](std::string_view shape) {
        return gpushare::select_operator(r.chat, t, "scale", shape, std::span<const candidate>(all), exact,
                                         {.left_out = &out});
    };
    const auto best = select("f32:1000");
    CHECK(best.candidate == "near");
    CHECK(best.candidates == 6);
    REQUIRE(out.size() == 4);
    CHECK(out[0].name == "far");
    CHECK(out[0].status == errc::kernel_failed);
    CHECK(out[0].why == "result 0 isn't as by exact: element 0 is 1.10000002 and should be 1");
    CHECK(out[1].name == "short");
    CHECK(out[1].why.find("element 999 is ") != std::string::npos);
    CHECK(out[2].name == "nothing");
    CHECK(out[3].name == "whole");
    CHECK(out[3].why == "result 1 isn't as by exact: element 500 is 501 and should be 500");
    CHECK(select("f32:1000") == best);  // from the table
    CHECK(out.empty());
    exact.results[0] = gpushare::compared(x, n);
    CHECK(select("f32:exact").candidate == "right");

    SECTION("no candidate is right") {
        exact.by = writes("exact", 1us, 2);
        CHECK(support::code_of([&] { (void)select("f32:2"); }) == errc::kernel_failed);
        CHECK(out.size() == 6);
    }
    SECTION("the reference fails") {
        exact.by.run = [](stream& to) { to.launch({}, [](auto&) { throw std::runtime_error("no memory"); }); };
        try {
            (void)select("f32:3");
            FAIL("a reference that fails is none");
        } catch (const gpushare::operation_error& e) {
            CHECK(e.code() == errc::kernel_failed);
            CHECK(std::string_view(e.what()).find("exact: ") < std::string_view(e.what()).find("no memory"));
        }
        CHECK(t.find("scale", "f32:3") == nullptr);
    }
    SECTION("one that is right only at first") {
        all[0].run = [run = all[0].run, runs = 0](stream& to) mutable {
            if (++runs < 6) run(to);
        };
        exact.by = writes("exact", 1us, 1);
        CHECK(support::code_of([&] { (void)select("f32:4"); }) == errc::kernel_failed);
    }
    SECTION("what reads its results has them restored") {
        all = {{"adds", [=](stream& to) { to.launch({}, [=](auto&) { x[0] += 1; }); }}};
        exact = {.by = all[0], .results = {gpushare::compared(x, 1)}, .prepare = [=](stream& to) {
                     to.launch({}, [=](auto&) { x[0] = 5; });
                 }};
        CHECK(select("f32:5").candidate == "adds");
    }
    r.chat.memory().deallocate(x, n * sizeof(float));
    r.chat.memory().deallocate(y, n * sizeof(int));
}

TEST_CASE("numbers agree within a tolerance, and what is no number agrees with none", "[serving]") {
    constexpr float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    const auto agree = [](auto want, auto have, gpushare::operator_tolerance within) {
        const auto by = gpushare::compared(&want, 1, within);
        return by.difference(reinterpret_cast<const std::byte*>(&want), reinterpret_cast<const std::byte*>(&have))
            .empty();
    };
    CHECK(agree(1.0F, 1.0F, {}));
    CHECK_FALSE(agree(1.0F, 1.0001F, {}));
    CHECK(agree(100.0, 101.0, {.relative = 0.01}));
    CHECK_FALSE(agree(100.0, 101.1, {.relative = 0.01}));
    CHECK_FALSE(agree(0.0, 1e-9, {.relative = 0.5}));
    CHECK(agree(0.0, 1e-9, {.absolute = 1e-8, .relative = 0.5}));
    CHECK(agree(nan, nan, {}));
    CHECK(agree(inf, inf, {}));
    CHECK_FALSE(agree(inf, -inf, {.absolute = 1, .relative = 1}));
    CHECK_FALSE(agree(inf, 1.0F, {.absolute = 1, .relative = 1}));
    CHECK_FALSE(agree(1.0F, inf, {.absolute = 1, .relative = 1}));
    CHECK_FALSE(agree(1.0F, nan, {.absolute = 1, .relative = 1}));
    CHECK_FALSE(agree(nan, 1.0F, {.absolute = 1, .relative = 1}));
    CHECK(agree(7, 7, {}));
    CHECK_FALSE(agree(7, 8, {}));
    CHECK(agree(0.0F, -0.0F, {}));
    CHECK_FALSE(agree(std::int64_t{1} << 60, (std::int64_t{1} << 60) + 1, {}));
    CHECK(agree(gpushare::bfloat16{100.0F}, gpushare::bfloat16{101.0F}, {.relative = 0.02}));
    CHECK_FALSE(agree(gpushare::bfloat16{100.0F}, gpushare::bfloat16{101.0F}, {}));
}

}  // namespace operator_selection_test
