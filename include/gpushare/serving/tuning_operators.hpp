// SPDX-License-Identifier: Apache-2.0
// All-reduces in the table of operators: one text for all that was measured on a machine, ours, a
// vendor's and an engine's operations alike (serving/operator_selection.hpp).
//
//   auto operators = gpushare::operator_table::load(text);          // every rank's thread: a table of its own, of the same text
//   gpushare::operator_plans kept(operators, me.size());
//   auto tuning = gpushare::tune(me, kept);                         // measures unknown plans; a second run of the program measures none
//   group.set_tuning(tuning);                                       // one of them, when all are done; and operators.save()
//
// A row is "all_reduce float:ranks=2:bytes=4096 two_shot:cached:ahead=16 2100 8": the plan as a tuning_table writes it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <gpushare/collective/tune.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/serving/operator_selection.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The plans of a group's all-reduces in an operator_table, which must outlive it. As thread-safe as the table.
class operator_plans {
public:
    static constexpr std::string_view operation = "all_reduce";  ///< in the table

    /// Plans for groups of so many ranks.
    operator_plans(operator_table& table, std::uint32_t ranks) noexcept : table_(&table), ranks_(ranks) {}

    /// See plan_memory. Throws operation_error (errc::invalid_specification) for a candidate that
    /// is no plan: somebody changed it.
    [[nodiscard]] std::optional<all_reduce_plan> find(bytes size) const {
        const operator_choice* const known = table_->find(operation, shape(size));
        if (known == nullptr) return std::nullopt;
        std::string row = "any any " + known->candidate;
        std::ranges::replace(row, ':', ' ');
        const tuning_table table = tuning_table::load(row);
        if (table.rows().empty())
            throw operation_error(errc::invalid_specification, {},
                                  "the table's choice for an all-reduce is no plan of one");
        return table.rows().front().plan;
    }
    /// See plan_memory. Throws std::bad_alloc.
    void keep(bytes size, const measured_plan& best) {
        const std::string row = tuning_table::always(best.plan).save();
        std::string plan = row.substr(std::string_view("any any ").size());
        plan.pop_back();  // the end of the line
        std::ranges::replace(plan, ' ', ':');
        table_->keep({std::string(operation), shape(size), std::move(plan), best.took, best.candidates});
    }
    /// All that a plan depends on.
    [[nodiscard]] std::string shape(bytes size) const {
        return "float:ranks=" + std::to_string(ranks_) + ":bytes=" + std::to_string(size.count());
    }

private:
    operator_table* table_;
    std::uint32_t ranks_;
};
static_assert(plan_memory<operator_plans>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
