// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// Lists whose elements never move, and the loop that erases from vectors.
#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gpushare/detail/erase.hpp>
#include <gpushare/detail/stable_list.hpp>

#include "support/catch.hpp"

using gpushare::detail::stable_list;

namespace {

// Counts those that live, and tells in what order they went.
struct counted {
    counted(std::vector<int>& log, int name) : gone(&log), id(name) {
        if (name < 0) throw std::runtime_error("negative");
        ++alive;
    }
    counted(const counted&) = delete;
    counted& operator=(const counted&) = delete;
    ~counted() {
        --alive;
        gone->push_back(id);
    }
    std::vector<int>* gone;
    int id;
    static inline int alive = 0;
};

}  // namespace

TEST_CASE("elements stay where they are, and go in the order in which they came", "[base][stable_list]") {
    std::vector<int> gone;
    {
        stable_list<counted> all;
        CHECK(all.empty());
        const counted* const first = &all.emplace_back(gone, 0);
        for (int i = 1; i < 100; ++i) CHECK(all.emplace_back(gone, i).id == i);
        CHECK(all.size() == 100);
        CHECK(&all[0] == first);
        CHECK(&std::as_const(all).front() == first);
        CHECK(std::ranges::is_sorted(all, {}, &counted::id));
        CHECK(std::ranges::find(std::as_const(all), 70, &counted::id)->id == 70);
        all.pop_back();
        CHECK(gone == std::vector{99});
        gone.clear();
    }
    CHECK(gone.size() == 99);
    CHECK(std::ranges::is_sorted(gone));
    CHECK(counted::alive == 0);
}

TEST_CASE("an element that can't be made isn't in the list", "[base][stable_list]") {
    std::vector<int> gone;
    stable_list<counted> all;
    all.emplace_back(gone, 1);
    CHECK_THROWS_AS(all.emplace_back(gone, -1), std::runtime_error);
    CHECK(all.size() == 1);
    CHECK(counted::alive == 1);
}

TEST_CASE("erased elements of a vector go, and the rest keeps its order", "[base][erase]") {
    std::vector<int> v{5, 1, 5, 2, 3, 5}, asked;
    const auto gone = gpushare::detail::erase_where(v, [&](int i) {
        asked.push_back(i);
        return i == 5;
    });
    CHECK(gone == 3);
    CHECK(v == std::vector{1, 2, 3});
    CHECK(asked == std::vector{5, 1, 5, 2, 3, 5});  // once each, in order
    CHECK(gpushare::detail::erase_equal(v, 4) == 0);
    CHECK(gpushare::detail::erase_equal(v, 3) == 1);
    CHECK(v == std::vector{1, 2});
    v.clear();
    CHECK(gpushare::detail::erase_equal(v, 1) == 0);
}

TEST_CASE("a range is asked in order, up to the answer", "[base][erase]") {
    const std::vector<int> v{1, 2, 3};
    int asked = 0;
    const auto is = [&](int wanted) {
        return [&asked, wanted](int i) {
            ++asked;
            return i == wanted;
        };
    };
    CHECK(gpushare::detail::any_where(v, is(2)));
    CHECK(std::exchange(asked, 0) == 2);
    CHECK_FALSE(gpushare::detail::any_where(v, is(4)));
    CHECK(std::exchange(asked, 0) == 3);
    CHECK_FALSE(gpushare::detail::all_where(v, is(1)));
    CHECK(std::exchange(asked, 0) == 2);
    CHECK(gpushare::detail::all_where(std::vector<int>{3, 3}, is(3)));
    CHECK(asked == 2);
}
