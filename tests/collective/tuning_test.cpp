// SPDX-License-Identifier: Apache-2.0
// The table of algorithms: lookups, and text there and back.
#include <gpushare/collective/tuning.hpp>

#include <cstdint>
#include <string>
#include <type_traits>

#include "support/catch.hpp"

using gpushare::algorithm;
using gpushare::errc;
using gpushare::tuning_table;

TEST_CASE("a plan is the first row that reaches far enough", "[collective]") {
    const tuning_table table({{4, 100, {algorithm::ring, false}},
                              {2, 1000, {algorithm::two_shot, true}},
                              {2, 10, {algorithm::one_shot, false}}});
    CHECK(table.plan(2, 10).how == algorithm::one_shot);
    CHECK(table.plan(2, 11).streaming);
    CHECK(table.plan(1, 1000).streaming);
    CHECK(table.plan(3, 1).how == algorithm::ring);
    CHECK(table.plan(3, 101) == gpushare::all_reduce_plan{});
    CHECK(table.plan(9, 1) == gpushare::all_reduce_plan{});
    CHECK(tuning_table{}.plan(1, 0) == gpushare::all_reduce_plan{});
}

TEST_CASE("a saved table comes back", "[collective]") {
    for (const auto& table : {tuning_table::measured_on_xeon(), tuning_table::measured_on_epyc()}) {
        CHECK(tuning_table::load(table.save()) == table);
    }
    CHECK(tuning_table::load("") == tuning_table{});
    const auto one = tuning_table::load("2 4096 one_shot cached\nany any ring streaming");
    REQUIRE(one.rows().size() == 2);
    CHECK(one.plan(3, 1) == gpushare::all_reduce_plan{algorithm::ring, true});
    CHECK(one.save() == "2 4096 one_shot cached\nany any ring streaming\n");
    const std::string words = "2 4096 two_shot cached ahead=16\n2 any two_shot streaming places=2 ahead=255\n";
    const auto other = tuning_table::load(words);
    CHECK(other.plan(2, 4096) == gpushare::all_reduce_plan{algorithm::two_shot, false, 1, 16});
    CHECK(other.plan(2, 4097) == gpushare::all_reduce_plan{algorithm::two_shot, true, 2, 255});
    CHECK(other.save() == words);
}

TEST_CASE("a table that can't be read is refused with its line", "[collective]") {
    for (const char* text :
         {"2 4096 one_shot cached\n2 x one_shot cached", "\n2 4096 three_shot cached", "\n2 4096 one_shot",
          "\n2 4096 one_shot cached more", "\n-1 4096 one_shot cached", "\n99999999999 4096 one_shot cached",
          "\n2  4096 one_shot cached", "\n2 4096 two_shot streaming places=3", "\n2 4096 two_shot streaming places=",
          "\n2 4096 two_shot cached ahead=256", "\n2 4096 two_shot cached ahead=any",
          "\n2 4096 two_shot cached ahead=1 places=2", "\n2 4096 two_shot cached places=2 ahead"}) {
        CAPTURE(text);
        try {
            (void)tuning_table::load(text);
            FAIL_CHECK("read");
        } catch (const gpushare::operation_error& e) {
            CHECK(e.code() == errc::invalid_specification);
            CHECK(e.figures().asked == 2);
        }
    }
}

TEST_CASE("fused calls have rows of their own, which hold nothing that they can't follow", "[collective]") {
    using gpushare::fused_plan;
    const std::string plain = "2 512 one_shot cached\n2 4096 two_shot cached\n2 any two_shot streaming\n";
    const auto table = tuning_table::load(plain);
    CHECK(table.fused(2, 4096) == fused_plan{false});
    CHECK(table.fused(2, 4097) == fused_plan{true});
    CHECK(table.fused_rows().size() == 2);
    CHECK(table.save() == plain);  // they follow from the others
    const auto other = tuning_table::load(plain + "any 100 fused streaming\n");
    CHECK(other.fused(2, 100) == fused_plan{true});
    CHECK(other.fused(2, 4097) == fused_plan{});
    CHECK(other.plan(2, 100) == table.plan(2, 100));
    CHECK(other.save() == plain + "any 100 fused streaming\n");
    CHECK_THROWS_AS(tuning_table::load("2 100 fused cached ahead=16"), gpushare::operation_error);
    // A plan with an algorithm is no plan of a fused call.
    STATIC_REQUIRE_FALSE(std::is_convertible_v<gpushare::all_reduce_plan, fused_plan>);
    STATIC_REQUIRE_FALSE(
        std::is_constructible_v<tuning_table::fused_row, std::uint32_t, std::uint64_t, gpushare::all_reduce_plan>);
}
