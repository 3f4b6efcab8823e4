// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The table of algorithms: lookups, and text there and back.
#include <gpushare/collective/tuning.hpp>

#include <cstdint>
#include <string>
#include <type_traits>

#include "support/catch.hpp"

namespace tuning_test {

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
    for (const auto& table :
         {tuning_table::measured_on_xeon(), tuning_table::measured_on_epyc(), tuning_table::for_devices()}) {
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
    const std::string blocks = "2 4096 one_shot cached blocks=4\n2 any two_shot streaming ahead=3 blocks=36\n";
    const auto of_devices = tuning_table::load(blocks);
    CHECK(of_devices.plan(2, 4096).blocks == 4);
    CHECK(of_devices.plan(2, 4097) == gpushare::all_reduce_plan{algorithm::two_shot, true, 1, 3, 36});
    CHECK(of_devices.fused(2, 4097) == gpushare::fused_plan{true, 36});
    CHECK(of_devices.save() == blocks);
    CHECK(tuning_table::load("any any fused cached blocks=7\n").fused(1, 1) == gpushare::fused_plan{false, 7});
}

TEST_CASE("the table for devices has something for every size, and its blocks fit into slots", "[collective]") {
    const auto table = tuning_table::for_devices();
    CHECK(tuning_table::load(table.save()) == table);
    for (const std::uint32_t ranks : {1U, 2U, 4U, 5U, 8U, 9U, 16U})
        for (std::uint64_t size = 1; size < std::uint64_t{1} << 33; size = size * 3 + 1) {
            const auto plan = table.plan(ranks, size);
            CAPTURE(ranks, size);
            CHECK(plan.blocks > 0);
            CHECK(plan.blocks == table.fused(ranks, size).blocks);
            CHECK(plan.blocks <= 36);
            if (plan.how == algorithm::one_shot) CHECK(size <= std::uint64_t{plan.blocks} * 16 * 1024);
        }
    CHECK(table.plan(4, 512 << 10).how == algorithm::one_shot);
    CHECK(table.plan(8, (256 << 10) + 1).how == algorithm::two_shot);
}

TEST_CASE("a table that can't be read is refused with its line", "[collective]") {
    for (const char* text :
         {"2 4096 one_shot cached\n2 x one_shot cached", "\n2 4096 three_shot cached", "\n2 4096 one_shot",
          "\n2 4096 one_shot cached more", "\n-1 4096 one_shot cached", "\n99999999999 4096 one_shot cached",
          "\n2  4096 one_shot cached", "\n2 4096 two_shot streaming places=3",
          "\n2 4096 two_shot streaming places=", "\n2 4096 two_shot cached ahead=256",
          "\n2 4096 two_shot cached ahead=any", "\n2 4096 two_shot cached ahead=1 places=2",
          "\n2 4096 two_shot cached blocks=65536", "\n2 4096 two_shot cached blocks=1 ahead=1",
          "\n2 4096 fused cached ahead=1", "\n2 4096 two_shot cached places=2 ahead"}) {
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
    CHECK(table.fused(2, 512) == fused_plan{.one_shot = true});
    CHECK(table.fused_rows().size() == 3);
    CHECK(table.save() == plain);  // they follow from the others
    const auto other = tuning_table::load(plain + "any 100 fused streaming\n");
    CHECK(other.fused(2, 100) == fused_plan{true});
    CHECK(other.fused(2, 4097) == fused_plan{});
    CHECK(other.plan(2, 100) == table.plan(2, 100));
    CHECK(other.save() == plain + "any 100 fused streaming\n");
    const std::string one_shot = "any 100 fused_one_shot cached blocks=3\n";
    CHECK(tuning_table::load(plain + one_shot).fused(2, 100) == fused_plan{false, 3, true});
    CHECK(tuning_table::load(plain + one_shot).save() == plain + one_shot);
    CHECK_THROWS_AS(tuning_table::load("2 100 fused cached ahead=16"), gpushare::operation_error);
    // A plan with an algorithm is no plan of a fused call.
    STATIC_REQUIRE_FALSE(std::is_convertible_v<gpushare::all_reduce_plan, fused_plan>);
    STATIC_REQUIRE_FALSE(
        std::is_constructible_v<tuning_table::fused_row, std::uint32_t, std::uint64_t, gpushare::all_reduce_plan>);
}

}  // namespace tuning_test
