// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
#include <gpushare/detail/inplace_function.hpp>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "support/catch.hpp"

using gpushare::detail::inplace_function;

namespace {

/// Counts those alive.
struct counted {
    explicit counted(int& alive) : alive_(&alive) { ++*alive_; }
    counted(counted&& other) noexcept : alive_(other.alive_) { ++*alive_; }
    ~counted() { --*alive_; }
    int operator()(int x) const { return x + 1; }
    int* alive_;
};

}  // namespace

TEST_CASE("an inplace_function owns one callable, wherever it moves", "[host]") {
    int alive = 0;
    {
        inplace_function<int(int), 32> f{counted{alive}};
        CHECK(alive == 1);
        CHECK(f(1) == 2);
        inplace_function<int(int), 32> g{std::move(f)};
        CHECK_FALSE(f);
        CHECK(g(2) == 3);
        CHECK(alive == 1);
        f = std::move(g);
        CHECK_FALSE(g);
        auto& itself = f;
        f = std::move(itself);
        CHECK(f(3) == 4);
        f = counted{alive};
        CHECK(alive == 1);
        f.reset();
        CHECK(alive == 0);
        f.reset();
        f = counted{alive};
    }
    CHECK(alive == 0);
}

TEST_CASE("an inplace_function forwards arguments and exceptions", "[host]") {
    inplace_function<std::unique_ptr<int>(std::unique_ptr<int>), 16> pass = [](auto p) { return p; };
    CHECK(*pass(std::make_unique<int>(5)) == 5);

    int sum = 0;
    inplace_function<void(int&, const std::string&), 16> add = [&](int& n, const std::string& s) {
        n += static_cast<int>(s.size());
        return sum += n;  // a result where none is asked for
    };
    int n = 1;
    add(n, "ab");
    CHECK(n == 3);
    CHECK(sum == 3);

    inplace_function<void(), 16> fail = [] { throw std::runtime_error{"no"}; };
    CHECK_THROWS_AS(fail(), std::runtime_error);
    CHECK_FALSE(inplace_function<void(), 16>{});
    CHECK_FALSE(inplace_function<void(), 16>{nullptr});
}

TEST_CASE("a null pointer to a function is no callable", "[host]") {
    using function = int (*)(int);
    const function none = nullptr, twice = [](int x) { return 2 * x; };
    CHECK_FALSE(inplace_function<int(int), 16>{none});
    inplace_function<int(int), 16> f{twice}, g{*twice};
    REQUIRE(f);
    REQUIRE(g);
    CHECK(f(2) == 4);
    CHECK(g(3) == 6);
}

TEST_CASE("it is known beforehand which callables fit in place", "[host]") {
    using gpushare::detail::fits_in_place;
    STATIC_REQUIRE(fits_in_place<std::array<char, 64>, 64>);
    STATIC_REQUIRE_FALSE(fits_in_place<std::array<char, 65>, 64>);
    struct alignas(64) wide {};
    STATIC_REQUIRE_FALSE(fits_in_place<wide, 64>);
    struct throws_when_moved {
        throws_when_moved(throws_when_moved&&) noexcept(false) {}
    };
    STATIC_REQUIRE_FALSE(fits_in_place<throws_when_moved, 64>);
    STATIC_REQUIRE_FALSE(std::is_copy_constructible_v<inplace_function<void(), 16>>);
}
