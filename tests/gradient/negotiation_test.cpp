// SPDX-License-Identifier: Apache-2.0
// Negotiation: gradients become ready everywhere in the same order on every rank, the rank that
// delays the others is named, orders are recorded, and differing steps are noticed. For hundreds of
// ranks without a transport.
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/negotiation.hpp>
#include <gpushare/gradient/transport.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace negotiation_test {

namespace gs = gpushare;

std::vector<std::uint32_t> shuffled(std::uint32_t n, support::random& any) {
    auto order = gs::bucket_plan::backward_order(n);
    for (std::size_t i = n; i > 1; --i) std::swap(order[i - 1], order[any.below(i)]);
    return order;
}
std::vector<std::uint64_t> all_of(const std::vector<gs::ready_bits>& ranks) {
    std::vector<std::uint64_t> all(ranks[0].words().begin(), ranks[0].words().end());
    for (const auto& r : ranks)
        for (std::size_t w = 0; w < all.size(); ++w) all[w] = gs::bitwise_and{}(all[w], r.words()[w]);
    return all;
}

TEST_CASE("256 ranks with orders of their own agree on one order, and nothing goes before all have it",
          "[gradient][negotiation]") {
    support::random any(support::seed(1));
    const std::uint32_t gradients = GENERATE(1U, 63U, 64U, 200U);
    constexpr std::uint32_t ranks = 256;
    std::vector<gs::ready_bits> bits(ranks, gs::ready_bits(gradients));
    for (int step = 0; step < 2; ++step) {
        std::vector<std::vector<std::uint32_t>> orders(ranks);
        std::vector<std::size_t> at(ranks);
        for (auto& o : orders) o = shuffled(gradients, any);
        std::vector<std::vector<std::uint32_t>> agreed(ranks);
        for (int exchanges = 0; !bits[0].complete(); ++exchanges) {
            REQUIRE(exchanges < 2000);
            for (std::uint32_t r = 0; r < ranks; ++r)
                for (auto n = any.below(gradients / 4 + 2); n > 0 && at[r] < gradients; --n)
                    REQUIRE(bits[r].mark(orders[r][at[r]++]) == gs::errc::none);
            const auto all = all_of(bits);
            for (std::uint32_t r = 0; r < ranks; ++r) REQUIRE_FALSE(bits[r].take(all, agreed[r]));
            for (const auto g : agreed[0])
                for (std::uint32_t r = 0; r < ranks; ++r) REQUIRE(bits[r].is_marked(g));
        }
        for (std::uint32_t r = 0; r < ranks; ++r) {
            REQUIRE(bits[r].complete());
            REQUIRE_FALSE(bits[r].is_waiting());
            REQUIRE(agreed[r] == agreed[0]);
            bits[r].end_step();
        }
        std::sort(agreed[0].begin(), agreed[0].end());
        for (std::uint32_t g = 0; g < gradients; ++g) REQUIRE(agreed[0][g] == g);
    }
}

TEST_CASE("a gradient that one of 256 ranks lacks is named with the rank once somebody raises the alarm",
          "[gradient][negotiation]") {
    constexpr std::uint32_t ranks = 256, gradients = 64;  // the alarm's bit is in a word of its own
    std::vector<gs::ready_bits> bits(ranks, gs::ready_bits(gradients));
    for (std::uint32_t r = 0; r < ranks; ++r)
        for (std::uint32_t g = 0; g < gradients; ++g)
            if (!(r == 177 && g == 33) && g != 60) (void)bits[r].mark(g);  // nobody has 60: nobody holds it up
    std::vector<std::uint32_t> next;
    CHECK_FALSE(bits[0].take(all_of(bits), next));
    CHECK(next.size() == 62);
    CHECK(bits[0].is_waiting());
    bits[5].raise_alarm();
    CHECK(bits[0].take(all_of(bits), next));
    CHECK(next.size() == 62);
    std::vector<std::uint64_t> words;
    for (const auto& b : bits) words.insert(words.end(), b.words().begin(), b.words().end());
    for (const std::uint32_t r : {0U, 177U, 255U}) CHECK(bits[r].stalled(words) == gs::stall{33, 177});
    bits[5].end_step();
    CHECK_FALSE(bits[5].is_waiting());
}

TEST_CASE("marking a gradient twice, or one that doesn't exist, is refused", "[gradient][negotiation]") {
    gs::ready_bits bits(64);
    CHECK(bits.mark(3) == gs::errc::none);
    CHECK(bits.mark(3) == gs::errc::mismatch);
    CHECK(bits.mark(64) == gs::errc::mismatch);  // the alarm's
}

TEST_CASE("ranks negotiate over a transport", "[gradient][negotiation]") {
    const std::uint32_t gradients = GENERATE(100U, 3000U);
    constexpr std::uint32_t ranks = 3;
    const gs::communicator group(ranks);
    std::vector<std::vector<std::uint32_t>> agreed(ranks);
    std::vector<std::string> wrong(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        gs::ready_bits mine(gradients);
        support::random any(r);
        std::optional<gs::stall> why;
        const auto order = shuffled(gradients, any);
        for (std::uint32_t k = 0; k < gradients; ++k) {
            if (!(r == 1 && order[k] == 17)) (void)mine.mark(order[k]);
            if (k % 40 == 39 && (gs::negotiate(net, mine, agreed[r], why) || why)) wrong[r] = "a fault, or a stall";
        }
        if (gs::negotiate(net, mine, agreed[r], why) || why || mine.complete()) wrong[r] = "17 isn't everywhere";
        if (r == 2) mine.raise_alarm();
        if (gs::negotiate(net, mine, agreed[r], why) || why != gs::stall{17, 1}) wrong[r] = "another stall";
        if (r == 1) (void)mine.mark(17);
        if (gs::negotiate(net, mine, agreed[r], why) || !mine.complete()) wrong[r] = "not complete";
    });
    CHECK(wrong == std::vector<std::string>(ranks));
    CHECK(agreed[0].size() == gradients);
    CHECK(agreed[1] == agreed[0]);
    CHECK(agreed[2] == agreed[0]);
}

TEST_CASE("threads read one order from a board, whatever order each has, and find what was written before a mark",
          "[gradient][negotiation]") {
    const auto seed = support::seed(GENERATE(range(1U, 5U)));
    const std::uint32_t gradients = GENERATE(0U, 1U, 64U, 200U), ranks = GENERATE(1U, 2U, 3U);
    CAPTURE(seed, gradients, ranks);
    constexpr std::uint32_t steps = 20;
    gs::ready_board board(gradients, ranks);
    std::vector<std::vector<std::vector<std::uint32_t>>> orders(ranks);
    // Of two steps by turns: a rank may be one ahead.
    std::vector<std::vector<std::uint32_t>> values(std::size_t{2} * ranks, std::vector<std::uint32_t>(gradients));
    std::vector<std::string> wrong(ranks);
    support::together(ranks, [&](unsigned r) {
        support::random any(seed * 10 + r);
        for (std::uint32_t step = 1; step <= steps; ++step) {
            const auto order = shuffled(gradients, any);
            std::vector<std::uint32_t> next;
            std::size_t marked = 0, looked = 0;
            while (!board.complete(r)) {
                for (auto n = any.below(9); n > 0 && marked < gradients; --n) {
                    values[r * 2 + step % 2][order[marked]] = step;
                    if (board.mark(r, order[marked++]) != gs::errc::none) wrong[r] = "a mark is refused";
                }
                if (marked < gradients && board.end_step(r) == gs::errc::none) wrong[r] = "ended too early";
                board.take(r, next);
                for (; looked < next.size(); ++looked)
                    for (std::uint32_t q = 0; q < ranks; ++q)
                        if (values[q * 2 + step % 2][next[looked]] != step) wrong[r] = "not ready everywhere";
                std::this_thread::yield();
            }
            orders[r].push_back(next);
            if (board.end_step(r) != gs::errc::none) wrong[r] = "it doesn't end";
        }
    });
    CHECK(wrong == std::vector<std::string>(ranks));
    for (std::uint32_t r = 0; r < ranks; ++r) CHECK(orders[r] == orders[0]);
    for (auto& order : orders[0]) {
        std::sort(order.begin(), order.end());
        CHECK(order.size() == gradients);
        CHECK(std::adjacent_find(order.begin(), order.end()) == order.end());
    }
}

TEST_CASE("a board refuses what is marked twice or isn't a gradient, and names who holds things up",
          "[gradient][negotiation]") {
    gs::ready_board board(70, 3);
    for (std::uint32_t r = 0; r < 3; ++r)
        for (std::uint32_t g = 0; g < 70; ++g)
            if (!(r == 1 && g == 69) && !(r == 2 && g == 66)) CHECK(board.mark(r, g) == gs::errc::none);
    CHECK(board.mark(0, 3) == gs::errc::mismatch);
    CHECK(board.mark(0, 70) == gs::errc::mismatch);
    CHECK(board.stalled(0) == gs::stall{66, 2});
    std::vector<std::uint32_t> next;
    board.take(0, next);
    CHECK(next.size() == 68);
    CHECK(board.mark(2, 66) == gs::errc::none);
    CHECK(board.stalled(0) == gs::stall{69, 1});
    CHECK(board.mark(1, 69) == gs::errc::none);
    CHECK_FALSE(board.stalled(0).has_value());
    CHECK_FALSE(board.complete(0));
    board.take(0, next);
    CHECK(board.complete(0));
    CHECK(next.size() == 70);
}

TEST_CASE("an order is recorded, agreed on once, and what differs is named", "[gradient][negotiation]") {
    using kind = gs::divergence::kind;
    const gs::communicator group(2);
    std::vector<std::string> wrong(2);
    std::vector<std::vector<std::uint32_t>> orders(2);
    support::together(2, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        gs::recorded_order order(4);
        const std::vector<std::vector<std::uint32_t>> steps{{3, 1, 0, 2}, {3, 1, 2, 0}};
        for (std::size_t s = 0; s < 2; ++s) {
            if (order.ready_to_agree()) wrong[r] = "too early";
            for (std::size_t i = 0; i < 4; ++i)
                if (order.mark(r == 0 ? steps[s][i] : steps[s][3 - i])) wrong[r] = "a divergence";
            if (order.end_step()) wrong[r] = "something is missing";
        }
        if (!order.ready_to_agree() || gs::agree(net, order)) wrong[r] = "no agreement";
        orders[r].assign(order.order().begin(), order.order().end());
        if (order.ready_to_agree()) wrong[r] = "twice";
        // From now on without a message.
        if (order.mark(2) || order.mark(2) != gs::divergence{kind::twice, 2}) wrong[r] = "twice isn't noticed";
        if (order.mark(4) != gs::divergence{kind::unknown, 4}) wrong[r] = "unknown isn't noticed";
        (void)order.mark(0);
        if (order.end_step() != gs::divergence{kind::missing, 1}) wrong[r] = "missing isn't noticed";
        order.restart();
        if (!order.order().empty() || order.ready_to_agree()) wrong[r] = "not forgotten";
    });
    CHECK(wrong == std::vector<std::string>(2));
    CHECK(orders[0] == std::vector<std::uint32_t>{3, 1, 0, 2});
    CHECK(orders[1] == orders[0]);
}

TEST_CASE("a step that lacks a gradient has it as its last, and counts on every rank", "[gradient][negotiation]") {
    gs::recorded_order order(4, 4);
    for (int step = 0; step < 4; ++step) {
        CHECK_FALSE(order.ready_to_agree());
        for (std::uint32_t g = 0; g < (step == 3 ? 4U : 3U); ++g) (void)order.mark(g);
        CHECK(order.end_step().has_value() == (step != 3));
    }
    CHECK(order.ready_to_agree());
    CHECK(order.proposal() == std::vector<std::uint32_t>{0, 1, 2, 3});
}

TEST_CASE("an alarm is for one exchange", "[gradient][negotiation]") {
    gs::ready_bits bits(3);
    (void)bits.mark(1);
    bits.raise_alarm();
    std::vector<std::uint32_t> next;
    const std::vector<std::uint64_t> words(bits.words().begin(), bits.words().end());
    CHECK(bits.take(words, next));
    const std::vector<std::uint64_t> calm(bits.words().begin(), bits.words().end());
    CHECK_FALSE(bits.take(calm, next));
    CHECK(next == std::vector<std::uint32_t>{1});
}

}  // namespace negotiation_test
