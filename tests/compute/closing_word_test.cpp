// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
// The word for which lower clients' streams wait: the host closes it for requests, and the device
// opens it late.
#include <deque>

#include <gpushare/detail/closing_word.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace closing_word_test {

using gpushare::detail::closing_halves;
using gpushare::detail::closing_word;

TEST_CASE("a late opening of the last request leaves the next request's half closed", "[compute][launch_gate]") {
    closing_halves at;
    closing_word word(at);
    word.close();
    const auto first = word.hand_over();
    REQUIRE(first);
    word.close();
    at.half[*first] = 0;  // the device is done with the first
    CHECK(word.is_closed());
    word.open();
    CHECK_FALSE(word.is_closed());
    CHECK(word.closings() == 2);
}

TEST_CASE("a third request beside two that the device hasn't opened is closed by them, and then by itself",
          "[compute][launch_gate]") {
    closing_halves at;
    closing_word word(at);
    for (int i = 0; i < 2; ++i) {
        word.close();
        REQUIRE(word.hand_over() == static_cast<unsigned>(i));
    }
    word.close();
    CHECK(word.is_closed());
    at.half[0] = 0;
    word.keep();  // its next launch
    at.half[1] = 0;
    CHECK(word.is_closed());
    word.open();
    CHECK_FALSE(word.is_closed());
}

TEST_CASE("a word that is forced open stays open until the request launches again", "[compute][launch_gate]") {
    closing_halves at;
    closing_word word(at);
    word.close();
    word.force();
    CHECK_FALSE(word.is_closed());
    word.keep();
    CHECK(word.is_closed());
    word.open();
    word.keep();  // nobody is there
    CHECK_FALSE(word.is_closed());
}

TEST_CASE("a word that is forced open isn't opened again behind the request's work", "[compute][launch_gate]") {
    closing_halves at;
    closing_word word(at);
    word.close();
    const auto late = word.hand_over();
    REQUIRE(late);
    word.close();
    word.force();  // the half that the device was to open as well
    CHECK_FALSE(word.is_closed());
    CHECK_FALSE(word.hand_over());

    word.close(true);  // later
    CHECK_FALSE(word.is_closed());
    const auto before = word.closings();
    word.keep();
    CHECK(word.is_closed());
    CHECK(word.closings() == before + 1);
    word.open();
    CHECK_FALSE(word.is_closed());
}

// The host and the device at random. The device opens halves in the order in which it was told to,
// some time later.
TEST_CASE("a word is closed while a request or its work exists, however late the device is", "[compute][launch_gate]") {
    const auto seed = support::seed(1);
    CAPTURE(seed);
    support::random any(seed);
    for (int round = 0; round < 200; ++round) {
        closing_halves at;
        closing_word word(at);
        std::deque<unsigned> work;  // the halves that the device opens, behind what requests left there
        bool there = false;
        for (int step = 0; step < 400; ++step) {
            if (any.one_in(3) && !work.empty()) {
                at.half[work.front()] = 0;
                work.pop_front();
                word.keep();  // a launch of the request, if there is one
            } else if (!there) {
                word.close();
                there = true;
            } else if (any.one_in(2)) {
                there = false;
                if (work.empty() && any.one_in(2))
                    word.open();
                else if (const auto half = word.hand_over())
                    work.push_back(*half);
            }
            CHECK(word.is_closed() == (there || !work.empty()));
        }
    }
}

}  // namespace closing_word_test
