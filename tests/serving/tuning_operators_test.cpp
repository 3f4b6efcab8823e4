// SPDX-License-Identifier: Apache-2.0
// All-reduces' plans in the table of operators: measured once, read back, changed by people.
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/tune.hpp>
#include <gpushare/serving/operator_selection.hpp>
#include <gpushare/serving/tuning_operators.hpp>

#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/threads.hpp"

namespace tuning_operators_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::algorithm;
using gpushare::errc;
using gpushare::operator_table;

namespace {

constexpr gpushare::tune_options quick{.smallest = 1_KiB, .largest = 8_KiB, .arena = 64_KiB, .per_plan = 20us};

/// Counts what is measured.
struct counted_plans : gpushare::operator_plans {
    using gpushare::operator_plans::operator_plans;
    void keep(gpushare::bytes size, const gpushare::measured_plan& best) {
        ++kept;
        gpushare::operator_plans::keep(size, best);
    }
    int kept = 0;
};

/// What each of two ranks measured beyond `texts`, which become what it knows then; the table of rank 0.
gpushare::tuning_table tuned(std::vector<std::string>& texts, std::vector<int>& measured) {
    const gpushare::communicator group(2);
    std::vector<gpushare::tuning_table> tables(2);
    measured.assign(2, 0);
    support::together(2, [&](unsigned r) {
        operator_table known = operator_table::load(texts[r]);
        counted_plans plans(known, 2);
        tables[r] = gpushare::tune(group.rank(r), plans, quick);
        texts[r] = known.save();
        measured[r] = plans.kept;
    });
    CHECK(tables[0] == tables[1]);
    CHECK(texts[0] == texts[1]);
    return tables[0];
}

}  // namespace

TEST_CASE("an all-reduce's plans are measured once, and kept beside other operators", "[serving][operators]") {
    std::vector<std::string> texts(2, "matmul f16:8x8 vendor 1000 3\n");
    std::vector<int> measured;
    const auto table = tuned(texts, measured);
    CHECK(measured == std::vector<int>{4, 4});
    const auto known = operator_table::load(texts[0]);
    CHECK(known.rows().size() == 5);
    CHECK(known.find("matmul", "f16:8x8") != nullptr);
    const auto* const row = known.find("all_reduce", "float:ranks=2:bytes=2048");
    REQUIRE(row != nullptr);
    CHECK(row->candidates > 1);
    CHECK(row->took > 0ns);
    // The second run of a program measures nothing, and one that lacks a size measures that.
    CHECK(tuned(texts, measured) == table);
    CHECK(measured == std::vector<int>{0, 0});
    for (auto& text : texts) {
        auto without = operator_table::load(text);
        REQUIRE(without.forget("all_reduce", "float:ranks=2:bytes=4096"));
        text = without.save();
    }
    (void)tuned(texts, measured);
    CHECK(measured == std::vector<int>{1, 1});
}

TEST_CASE("plans that people write are followed, and what is none is refused", "[serving][operators]") {
    operator_table table;
    gpushare::operator_plans plans(table, 4);
    CHECK_FALSE(plans.find(4_KiB));
    const gpushare::all_reduce_plan all[]{{algorithm::one_shot},
                                          {algorithm::two_shot, true, 2, 16},
                                          {algorithm::two_shot, false, 1, 0, 36},
                                          {algorithm::ring}};
    for (const auto& plan : all) {
        plans.keep(4_KiB, {plan, 10us, 8});
        CHECK(plans.find(4_KiB) == plan);
        CHECK_FALSE(plans.find(8_KiB));
        CHECK_FALSE(gpushare::operator_plans(table, 2).find(4_KiB));
    }
    table.keep({"all_reduce", plans.shape(4_KiB), "one_shot:cached", 1us, 8});
    CHECK(plans.find(4_KiB) == gpushare::all_reduce_plan{algorithm::one_shot});
    for (const char* const wrong : {"fastest", "fused:cached", "two_shot:cached:ahead", "one_shot", "a:b"}) {
        CAPTURE(wrong);
        table.keep({"all_reduce", plans.shape(8_KiB), wrong, 1us, 8});
        CHECK(support::code_of([&] { (void)plans.find(8_KiB); }) == errc::invalid_specification);
    }
}

}  // namespace tuning_operators_test
