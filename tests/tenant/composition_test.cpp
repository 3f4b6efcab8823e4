// SPDX-License-Identifier: Apache-2.0
// Tags: slow
// Every stack keeps the promises of its parts: every stack, on every kind of owner, in every
// scenario.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/compute/compute_limiter.hpp>

#include "support/catch.hpp"
#include "support/composition/failing.hpp"
#include "support/composition/host_backend.hpp"
#include "support/composition/matrix.hpp"
#include "support/unique_name.hpp"

namespace composition_matrix_test {

using namespace support::composition;
using namespace std::chrono_literals;
namespace host = gpushare::host;

namespace {

/// A stream of the host's whose timeline may outlive it, so that short submissions share points as
/// they do on CUDA.
class sharing_stream {
public:
    using point = host::point;
    struct own_work : host::stream::own_work {
        explicit own_work(sharing_stream& s) : host::stream::own_work(*s.of_) {}
    };
    class handle {
    public:
        handle() = default;
        explicit operator bool() const noexcept { return of_ != nullptr; }
        [[nodiscard]] point record() const { return of_->record(); }

    private:
        friend sharing_stream;
        explicit handle(std::shared_ptr<host::stream> of) noexcept : of_(std::move(of)) {}
        std::shared_ptr<host::stream> of_;
    };

    explicit sharing_stream(host::stream s) : of_(std::make_shared<host::stream>(std::move(s))) {}
    [[nodiscard]] host::stream& native() noexcept { return *of_; }
    [[nodiscard]] point record() { return of_->record(); }
    [[nodiscard]] handle share() const noexcept { return handle(of_); }
    [[nodiscard]] std::uint64_t timeline() const noexcept { return name_; }

private:
    std::shared_ptr<host::stream> of_;
    std::uint64_t name_ = support::unique_name();
};
static_assert(gpushare::shared_timeline<sharing_stream> && gpushare::telling_timeline<sharing_stream>);

const auto fails = [](host::stream& s) {
    s.launch({.blocks = 1}, [](auto&) { throw std::runtime_error("on the device"); });
};
const auto works = [](host::stream& s) { s.launch({.blocks = 1, .hold = 20us}, [](auto&) {}); };

}  // namespace

TEST_CASE("failed work is reported, by every way in, whichever thread records points meanwhile",
          "[tenant][failures][threads]") {
    for (const auto t : {host::timing::real, host::timing::modelled}) {
        host::node node{{.sms = 2, .timing = t}};
        auto on = node.make_stream({0}), other = node.make_stream({0});
        failures tried(node.get_clock(), on, other, fails, works);
        for (const auto& what : tried.wrong(tried.usual())) FAIL_CHECK(what);
        sharing_stream sharing(node.make_stream({0})), another(node.make_stream({0}));
        failures in_batches(
            node.get_clock(), sharing, another, [](sharing_stream& s) { fails(s.native()); },
            [](sharing_stream& s) { works(s.native()); });
        for (const auto& what : in_batches.wrong(in_batches.usual())) FAIL_CHECK(what);
    }
}

TEST_CASE("only the failed members of a batch are reported as failed", "[tenant][failures]") {
    host::node node{{.sms = 2, .timing = host::timing::modelled}};
    sharing_stream s(node.make_stream({0}));
    gpushare::compute_limiter<sharing_stream, host::steady_clock> limiter({.depth = 64, .horizon = 1h});
    const auto c = limiter.add({});
    std::vector<host::point> thieves;
    const auto work = [&](bool bad, bool records) {
        return [&, bad, records](sharing_stream& to) {
            bad ? fails(to.native()) : works(to.native());
            if (records) thieves.push_back(to.record());
        };
    };
    for (int i = 0; i < 20; ++i) limiter.submit(c, s, work(false, false))->wait();  // how long it takes is known
    for (const bool by_permit : {false, true}) {
        const auto before = limiter.usage(c).failed;
        std::vector<gpushare::compute_limiter<sharing_stream, host::steady_clock>::ticket> all;
        node.faults({0}).stall(s.native());
        for (int i = 0; i < 12; ++i) {
            const auto one = work(i % 3 == 1, i % 4 == 1);
            if (by_permit)
                limiter.acquire(c)->enqueue(s, one);
            else
                all.push_back(limiter.submit(c, s, one).value());
        }
        (void)s.record();
        node.faults({0}).resume(s.native());
        while (limiter.usage(c).in_flight != 0) (void)s.record().wait(gpushare::never);
        CHECK(limiter.usage(c).failed - before == 4);
        for (std::size_t i = 0; i < all.size(); ++i) {
            REQUIRE(all[i].done());
            CHECK(all[i].status() == (i % 3 == 1 ? errc::kernel_failed : errc::none));
            if (i % 3 == 1) CHECK_THROWS_WITH(all[i].rethrow(), "on the device");
        }
    }
}

TEST_CASE("the composition matrix on the host", "[tenant][composition][threads]") {
    const auto all = run_matrix<host_backend>();
    CHECK(all.cells == 1420);  // of 15 stacks, 8 owners and 14 scenarios: those where the scenario is about something
    for (const auto& what : all.wrong) FAIL_CHECK(what);
}

TEST_CASE("a stack that refuses what fits is found by the composition matrix", "[tenant][composition][threads]") {
    const auto all = run_matrix<host_backend>(10, {kind<refusing_stack<host_backend>, host_backend>("refusing")},
                                              "refusing, quota, exactness under attack");
    CHECK(all.cells == 1);
    CHECK(all.failed == 1);
    CHECK(all.false_refusals > 0);
}

}  // namespace composition_matrix_test
