// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/manual_timeline.hpp"

namespace chunked_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using support::manual_clock;
using support::manual_stream;

namespace {

using limiter = gpushare::compute_limiter<manual_stream, manual_clock>;
using names = std::vector<std::string>;

struct setup {
    explicit setup(gpushare::limiter_options options = {.depth = 1, .horizon = 0ms}) : compute(options, clock) {}

    auto submit(std::size_t pieces) {
        return gpushare::submit_chunked(compute, low, stream, pieces, [this](manual_stream& s, std::size_t i) {
            s.enqueue(1ms);
            enqueued.push_back(std::to_string(i));
            if (throws_at == i) throw std::runtime_error("no");
        });
    }
    void finish_one(errc status = errc::none) {
        stream.reach_next();
        stream.reach_next(status);
        compute.poll();
    }

    manual_clock clock;
    manual_stream stream;
    limiter compute;
    gpushare::client_id low = compute.add({.weight = 50_pct});
    gpushare::client_id high = compute.add({.weight = 50_pct, .level = {1}});
    names enqueued;
    std::size_t throws_at = 99;
};

}  // namespace

TEST_CASE("a higher tenant gets in between the pieces, which stay in order", "[compute]") {
    setup t;
    const auto whole = t.submit(4);
    REQUIRE(whole);
    CHECK(whole->size() == 4);
    CHECK(t.enqueued == names{"0"});
    t.finish_one();
    const auto urgent = t.compute.submit(t.high, t.stream, [&](auto& s) {
        s.enqueue(1ms);
        t.enqueued.push_back("high");
    });
    CHECK(t.enqueued == names{"0", "1", "high"});
    while (t.stream.open() != 0) t.finish_one();
    CHECK(t.enqueued == names{"0", "1", "high", "2", "3"});
    CHECK(whole->done());
    CHECK(whole->status() == errc::none);
    CHECK(whole->enqueued() == 4);
    CHECK(whole->device_time() == 4ms);
    CHECK(urgent->done());
}

TEST_CASE("a piece that fails is the last", "[compute]") {
    setup t;
    SECTION("because its callable throws") {
        t.throws_at = 1;
        const auto whole = t.submit(5);
        while (t.stream.open() != 0) t.finish_one();
        CHECK(t.enqueued == names{"0", "1"});
        CHECK(whole->done());
        CHECK(whole->status() == errc::submission_failed);
        CHECK(whole->enqueued() == 2);
    }
    SECTION("because the device says so") {
        const auto whole = t.submit(5);
        t.finish_one(errc::kernel_failed);
        while (t.stream.open() != 0) t.finish_one();
        CHECK(whole->status() == errc::kernel_failed);
        CHECK(whole->enqueued() < 5);
    }
}

TEST_CASE("pieces are cancelled between any two", "[compute]") {
    setup t;
    auto whole = t.submit(5).value();
    t.finish_one();
    whole.cancel();
    t.stream.on_wait([&] { t.finish_one(); });
    CHECK(whole.wait());
    CHECK(t.enqueued == names{"0", "1"});
    CHECK(whole.enqueued() == 2);
    CHECK(whole.status() == errc::none);
}

TEST_CASE("of pieces that aren't all taken, none more is enqueued", "[compute]") {
    setup t{{.depth = 1, .queue_limit = 2, .horizon = 0ms}};
    CHECK(t.submit(9).code() == errc::queue_full);
    while (t.stream.open() != 0) t.finish_one();
    CHECK(t.enqueued == names{"0"});
    CHECK(t.compute.close(t.low));
    CHECK(t.submit(2).code() == errc::closed);
    CHECK(t.submit(0)->done());
}

}  // namespace chunked_test
