// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The text table: widths, alignment, refusals.
#include <stdexcept>
#include <string>

#include <gpushare/observe/metrics.hpp>

#include "support/catch.hpp"

using gpushare::align;
using gpushare::table;

TEST_CASE("a table aligns text to the left and figures to the right", "[observe][table]") {
    table t{{"tenant"}, {"share %", align::right}, {"note", align::left}};
    t.add_row({"chat", "29.8", "ok"});
    t.add_row({"a longer name", "5", ""});
    CHECK(t.num_columns() == 3);
    CHECK(t.num_rows() == 2);
    CHECK(t.str() ==
          "tenant         share %  note\n"
          "-------------  -------  ----\n"
          "chat              29.8  ok\n"
          "a longer name        5\n");
}

TEST_CASE("a table without rows is its header", "[observe][table]") {
    CHECK(table{{"a"}, {"bc", align::right}}.str() == "a  bc\n-  --\n");
}

TEST_CASE("a table without columns takes empty rows only", "[observe][table]") {
    table t{std::vector<table::column>{}};
    t.add_row({});
    CHECK(t.str() == "\n\n\n");
    CHECK_THROWS_AS(t.add_row({"x"}), std::invalid_argument);
}

TEST_CASE("a row with the wrong number of cells is refused and leaves no trace", "[observe][table]") {
    table t{{"a"}, {"b"}};
    const std::string before = t.str();
    CHECK_THROWS_WITH(t.add_row({"much wider than before"}), "gpushare::table: a row of 1 cells for 2 columns");
    CHECK_THROWS_AS(t.add_row({"1", "2", "3"}), std::invalid_argument);
    CHECK(t.str() == before);
}

TEST_CASE("letters count, not bytes, and a cell stays on its line", "[observe][table]") {
    table t{{"name"}, {"n", align::right}};
    t.add_row({"\u00e9t\u00e9\u2026", "1"});
    t.add_row({"a\nb\tc", "22"});
    t.add_row({"\xFF\xC3", "3"});  // not UTF-8: no more than a wrong width
    CHECK(t.str() ==
          "name    n\n"
          "-----  --\n"
          "\u00e9t\u00e9\u2026    1\n"
          "a b c  22\n"
          "\xFF\xC3      3\n");
}
