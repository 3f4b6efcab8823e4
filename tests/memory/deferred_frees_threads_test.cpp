// SPDX-License-Identifier: Apache-2.0
// Frees in stream order with several threads: a block that one thread is about to give back, and
// points whose end runs user code.
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include <gpushare/memory/deferred_frees.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/tenant/tenant_memory.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/manual_timeline.hpp"

using namespace gpushare::literals;
using gpushare::errc;
using gpushare::quota;
using gpushare::quota_resource;
using support::fault_resource;
using support::manual_point;
using support::manual_stream;

namespace {

/// A point that holds something whose destructor calls out, as a point holds what a kernel threw.
class talking_point {
public:
    talking_point() = default;
    talking_point(manual_point p, std::function<void()> at_end)
        : point_(std::move(p)), last_(nullptr, [f = std::move(at_end)](void*) { f(); }) {}

    [[nodiscard]] bool reached() const noexcept { return point_.reached(); }
    bool wait(gpushare::instant deadline) const { return point_.wait(deadline); }
    static bool wait_any(std::span<const talking_point> points, gpushare::instant deadline) {
        return points.front().wait(deadline);
    }
    [[nodiscard]] errc status() const noexcept { return point_.status(); }
    [[maybe_unused]] friend gpushare::ns elapsed(const talking_point& a, const talking_point& b) noexcept {
        return elapsed(a.point_, b.point_);
    }

private:
    manual_point point_;
    std::shared_ptr<void> last_;
};
static_assert(gpushare::timeline_point<talking_point>);

/// A tenant's memory over an upstream that can be made to linger in a free.
struct tenant_under_test {
    quota device{1_MiB}, whole{1_MiB};
    fault_resource upstream;
    quota_resource<fault_resource> node{whole, upstream};
    int events = 0;
    gpushare::event_sink sink = [this](const gpushare::tenant_event&) { ++events; };
    gpushare::tenant_memory<quota_resource<fault_resource>, manual_point> mine{
        device, node, "chat", gpushare::device_id{0}, 1_KiB, 0_B, sink, {.stack = gpushare::memory_stack::direct}};
};

}  // namespace

TEST_CASE("points end under no lock", "[memory][deferred]") {
    // Were a lock held, this would hang.
    fault_resource resource;
    gpushare::deferred_frees<talking_point, fault_resource> frees{resource};
    manual_stream s;
    int ended = 0;
    for (int i = 0; i < 4; ++i)
        frees.add(talking_point(s.record(), [&] { ended += frees.pending() < 400_B ? 1 : 0; }),
                  resource.allocate(100, 8), 100, 8);
    s.reach_next();
    s.reach_next();
    CHECK(frees.collect() == 2);
    CHECK(ended == 2);
    s.on_wait([&] { s.reach_all(); });
    CHECK(frees.drain(gpushare::never));
    CHECK(ended == 4);
}

TEST_CASE("an allocation isn't refused while another thread gives back what was reached", "[memory][deferred]") {
    tenant_under_test t;
    manual_stream s;
    void* p = t.mine.allocate(1'000, 8);
    REQUIRE(t.mine.deallocate_after(s.record(), p, 1'000, 8) == errc::none);
    s.reach_next();

    std::atomic<bool> entered{false}, go{false};
    t.upstream.on_deallocate = [&] {
        entered = true;
        while (!go.load()) std::this_thread::yield();
    };
    std::jthread collector([&] { t.mine.collect(); });
    while (!entered.load()) std::this_thread::yield();
    std::jthread releaser([&] {
        std::this_thread::sleep_for(
            std::chrono::milliseconds(20));  // the allocation below is most likely waiting by then
        go = true;
    });
    void* q = t.mine.try_allocate(1'000, 8);
    CHECK(q != nullptr);
    CHECK(t.mine.counts().refused == 0);
    if (q != nullptr) CHECK(t.mine.deallocate(q, 1'000, 8) == errc::none);
    CHECK(t.events == 0);
}

TEST_CASE("only allocations that end without memory count as refused", "[memory][deferred]") {
    tenant_under_test t;
    manual_stream s;
    for (int i = 0; i < 3; ++i) {
        void* p = t.mine.allocate(1'000, 8);
        REQUIRE(t.mine.deallocate_after(s.record(), p, 1'000, 8) == errc::none);
        s.reach_next();
    }
    CHECK(t.mine.counts().refused == 0);
    void* p = t.mine.allocate(1'000, 8);
    CHECK(t.mine.try_allocate(1'000, 8) == nullptr);
    t.upstream.null_next();
    CHECK(t.mine.try_allocate(1, 8) == nullptr);
    CHECK(t.mine.counts().refused == 2);
    CHECK(t.mine.deallocate(p, 1'000, 8) == errc::none);
}

TEST_CASE("freeing null changes nothing", "[memory][resource]") {
    tenant_under_test t;
    void* p = t.node.allocate(1'000, 8);
    CHECK(t.node.deallocate(nullptr, 1'000, 8) == errc::none);
    CHECK(t.whole.usage().current == 1'000_B);
    CHECK(t.upstream.wrong_frees() == 0);
    CHECK(t.node.deallocate(p, 1'000, 8) == errc::none);
    CHECK(t.mine.deallocate(nullptr, 1'000, 8) == errc::none);
    CHECK(t.events == 0);
}
