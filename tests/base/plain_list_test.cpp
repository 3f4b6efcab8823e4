// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// A vector of plain values, compared with std::vector by random calls; and the promises of growing.
#include <cstddef>
#include <cstdint>
#include <new>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/detail/erase.hpp>
#include <gpushare/detail/plain_list.hpp>

#include "support/catch.hpp"

namespace {

using gpushare::detail::plain_list;

// Not as small as a word, and with a constructor.
struct plain {
    std::uint64_t key = 7;
    std::uint32_t a = 1, b = 2, c = 3;

    friend bool operator==(const plain&, const plain&) = default;
};

plain of(std::uint64_t key) { return {.key = key}; }

bool same(const plain_list<plain>& l, const std::vector<plain>& v) {
    if (l.size() != v.size() || l.empty() != v.empty() || l.capacity() < l.size()) return false;
    for (std::size_t i = 0; i < v.size(); ++i)
        if (!(l[i] == v[i])) return false;
    return v.empty() || (l.front() == v.front() && l.back() == v.back());
}

// One random call, of both.
void call(std::mt19937& random, plain_list<plain>& l, std::vector<plain>& v) {
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random()) % n; };
    const std::size_t at = below(v.size() + 1);
    const auto i = static_cast<std::ptrdiff_t>(at);
    const plain x = of(random());
    const auto one = below(10);
    if (one == 0) {
        l.insert(l.begin() + at, x);
        v.insert(v.begin() + i, x);
    } else if (one == 1) {
        l.erase(l.begin(), l.begin() + at);
        v.erase(v.begin(), v.begin() + i);
    } else if (one == 2) {
        v.resize(at + below(9));
        l.resize(v.size());
    } else if (one == 3) {
        l.resize(at, x);
        v.resize(at, x);
    } else if (one == 4) {
        l.reserve(at * 2);
        v.reserve(at * 2);
    } else if (one > 6 || v.empty()) {
        l.push_back(x);
        v.push_back(x);
    } else if (one == 5) {
        l.push_back(l.front());
        v.push_back(plain(v.front()));
    } else {
        l.pop_back();
        v.pop_back();
        if (at < v.size()) {
            l.erase(l.begin() + at);
            v.erase(v.begin() + i);
        }
    }
}

}  // namespace

TEST_CASE("a plain list has what std::vector has", "[base][plain_list]") {
    for (std::uint32_t seed = 1; seed <= 20; ++seed) {
        CAPTURE(seed);
        std::mt19937 random(seed);
        plain_list<plain> l;
        std::vector<plain> v;
        for (int step = 0; step < 300; ++step) {
            CAPTURE(step);
            call(random, l, v);
            REQUIRE(same(l, v));
        }
        plain_list<plain> copy = l;
        CHECK(same(copy, v));
        const plain_list<plain> moved = std::move(l);
        CHECK(same(moved, v));
        l = copy;  // a list that was moved from is assigned to
        copy.assign(3, of(9));
        CHECK(same(l, v));
        CHECK(same(copy, std::vector<plain>(3, of(9))));
        l.swap(copy);
        CHECK(same(copy, v));
        l.clear();
        CHECK(same(l, {}));
    }
}

TEST_CASE("a plain list moves its elements seldom, and reserves what was asked", "[base][plain_list]") {
    plain_list<int> l;
    std::size_t moves = 0;
    for (int i = 0; i < 1000; ++i) {
        const int* const before = l.data();
        l.resize(l.size() + 1, i);
        moves += l.data() != before ? 1U : 0U;
    }
    CHECK(moves <= 10);
    plain_list<int> exact;
    exact.reserve(7);
    CHECK(exact.capacity() == 7);
    const int* const where = exact.data();
    for (int i = 0; i < 7; ++i) exact.emplace_back(i);
    CHECK(exact.data() == where);
    CHECK(std::span<const int>(exact).size() == 7);
    CHECK(gpushare::detail::erase_where(exact, [](int i) { return i % 2 == 0; }) == 4);
    CHECK(gpushare::detail::erase_equal(exact, 3) == 1);
    CHECK(exact.back() == 5);
    CHECK(plain_list<int>{4, 5}.back() == 5);
    CHECK(plain_list<bool>(3, true)[2]);
}

TEST_CASE("a plain list that can't grow stays as it is", "[base][plain_list]") {
    plain_list<plain> l{of(1), of(2)};
    constexpr std::size_t wraps = std::size_t{1} << 61;  // times the size of an element: 0, in 64 bits
    CHECK_THROWS_AS(l.reserve(wraps), std::bad_alloc);
    CHECK_THROWS_AS(l.resize(wraps), std::bad_alloc);
    CHECK_THROWS_AS(plain_list<plain>(wraps), std::bad_alloc);
    CHECK(same(l, {of(1), of(2)}));
    l.insert(l.begin(), l[1]);  // an element of its own
    const plain_list<plain>& self = l;
    l = self;
    CHECK(same(l, {of(2), of(1), of(2)}));
}
