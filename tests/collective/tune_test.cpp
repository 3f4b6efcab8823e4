// SPDX-License-Identifier: Apache-2.0
// The tuner: which plan wins, given the times; all ranks get the same table of usable plans; and a
// rank gives up together with the others.

#include <chrono>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/communicator.hpp>

#include "support/catch.hpp"
#include "support/threads.hpp"

namespace tune_test {

using namespace std::chrono_literals;
using gpushare::algorithm;
using gpushare::communicator;
using gpushare::errc;
using gpushare::tuning_table;
using gpushare::detail::buffer_use;
using gpushare::detail::tuner;

namespace {

constexpr gpushare::tune_options quick{.smallest = gpushare::bytes{64},
                                       .largest = gpushare::bytes{65'536},
                                       .arena = gpushare::bytes{262'144},
                                       .per_plan = 20us};

constexpr auto at(buffer_use u) { return static_cast<std::size_t>(u); }

}  // namespace

TEST_CASE("a plan is judged by where it is the furthest behind the best", "[collective]") {
    tuner::times took{};
    for (auto& t : took) t.fill(1000);
    took[1] = {100, 300, 100};  // the best but for cold buffers, where it takes twice as long
    took[3] = {150, 150, 100};  // never so far behind
    took[0].fill(tuner::unusable);
    const auto worst = tuner::regrets(took);
    CHECK(worst[1] == 2.0);
    CHECK(worst[3] == 1.5);
    CHECK(worst[2] == 10.0);
    CHECK(worst[0] > 1e6);
}

TEST_CASE("a plan has the times of the one that does the same, and none where it can't be used", "[collective]") {
    const communicator group(1, {.slot = gpushare::bytes{4096}});
    const auto me = group.rank(0);
    tuner measuring(me, quick);
    for (const bool fits : {true, false}) {
        const auto took = measuring.measure(fits ? 256 : 8192);
        for (std::size_t p = 0; p < tuner::plans.size(); ++p) {
            const auto& plan = tuner::plans[p];
            CAPTURE(fits, to_string(plan.how), plan.streaming, plan.ahead);
            const bool by_slot = plan.how == algorithm::one_shot;
            for (const std::int64_t t : took[p]) CHECK((t == tuner::unusable) == (by_slot && !fits));
            if (!plan.streaming) continue;
            CHECK(took[p][at(buffer_use::in_place)] == took[plan.ahead == 0 ? 1 : 2][at(buffer_use::in_place)]);
            CHECK(took[p][at(buffer_use::cold)] == took[plan.places == 1 ? 3 : 4][at(buffer_use::cold)]);
        }
    }
}

TEST_CASE("all ranks get the same table, which can be used", "[collective]") {
    for (const unsigned ranks : {1U, 2U, 3U})
        for (const bool read : {true, false}) {
            communicator group(ranks, {.slot = gpushare::bytes{4096}});
            std::vector<tuning_table> tables(ranks);
            auto options = quick;
            options.results_are_read = read;
            support::together(ranks, [&](unsigned r) { tables[r] = gpushare::tune(group.rank(r), options); });
            const tuning_table& table = tables[0];
            CAPTURE(table.save());
            for (const auto& other : tables) CHECK(other == table);
            CHECK(tuning_table::load(table.save()) == table);
            REQUIRE(!table.rows().empty());
            CHECK(table.rows().back().bytes == tuning_table::any_bytes);
            std::uint64_t before = 0;
            for (const auto& row : table.rows()) {
                CHECK(row.ranks == ranks);
                CHECK(row.bytes > before);
                before = row.bytes;
                // What doesn't fit in a slot would go another way than the table says.
                if (row.plan.how == algorithm::one_shot) CHECK(row.bytes <= 4096);
            }
            group.set_tuning(table);
            std::vector<std::vector<int>> x(ranks, std::vector<int>(5000, 1));
            support::together(ranks, [&](unsigned r) { gpushare::all_reduce(group.rank(r), x[r], std::span(x[r])); });
            for (const auto& of_rank : x) CHECK(of_rank == std::vector<int>(5000, static_cast<int>(ranks)));
        }
}

TEST_CASE("a submission gets the plan that took the least time, and another one once that pays", "[collective]") {
    const double never = std::numeric_limits<double>::infinity();
    const auto took = [&](const gpushare::all_reduce_plan& plan, gpushare::bytes size) {
        const auto n = static_cast<double>(size.count());
        switch (plan.how) {
            case algorithm::one_shot: return 2 + n / 256;
            case algorithm::two_shot: return plan.streaming ? 3 + n / 1000 : 3 + n / 1024;  // the former never by 10 %
            default: return 100 + n / 4096;
        }
    };
    const auto table = gpushare::tune_submitted(4, took, quick);
    CHECK(table.save() == "4 256 one_shot cached\n4 any two_shot cached\n");
    const auto nothing = [&](const gpushare::all_reduce_plan&, gpushare::bytes) { return never; };
    CHECK(gpushare::tune_submitted(4, nothing, quick) == tuning_table{});

    // The number of blocks is part of what is measured, where it is asked for: a block each 4 KiB
    // is the best here.
    auto with_blocks = quick;
    with_blocks.most_blocks = 9;
    const auto blocks_took = [](const gpushare::all_reduce_plan& plan, gpushare::bytes size) {
        const auto n = static_cast<double>(size.count());
        return (plan.how == algorithm::two_shot && !plan.streaming ? 1 : 9) *
               (plan.blocks * 1.0 + n / 4096 / plan.blocks);
    };
    CHECK(gpushare::tune_submitted(4, blocks_took, with_blocks).save() ==
          "4 16384 two_shot cached blocks=1\n4 any two_shot cached blocks=4\n");
}

TEST_CASE("a tuner refuses sizes without a float, and gives up with the others", "[collective]") {
    const communicator group(2);
    for (const std::uint64_t size : {0U, 3U}) {
        auto options = quick;
        options.smallest = gpushare::bytes{size};
        try {
            (void)gpushare::tune(group.rank(0), options);
            FAIL_CHECK("tuned");
        } catch (const gpushare::operation_error& e) {
            CHECK(e.code() == errc::invalid_specification);
        }
    }
    auto options = quick;
    options.deadline = gpushare::instant{std::chrono::steady_clock::now().time_since_epoch()} + 20ms;
    try {
        (void)gpushare::tune(group.rank(0), options);  // rank 1 never comes
        FAIL_CHECK("tuned");
    } catch (const gpushare::operation_error& e) {
        CHECK(e.code() == errc::deadline_exceeded);
    }
}

}  // namespace tune_test
