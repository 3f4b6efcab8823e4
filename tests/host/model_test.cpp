// SPDX-License-Identifier: Apache-2.0
// The model of a node in virtual time: no thread, no clock, every figure exact.
#include <gpushare/backend/host/detail/model.hpp>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "support/catch.hpp"

using namespace gpushare;
using namespace std::chrono_literals;
using host::detail::operation;
using host::detail::stream_state;

namespace {

/// Drives a model as the engine does, from one thread.
class bench {
public:
    explicit bench(std::uint32_t sms, std::uint32_t devices = 1)
        : model_({.devices = devices, .sms = sms, .timing = host::timing::modelled}, *hub_) {}

    stream_state& stream(std::int32_t level = 0, std::uint32_t tag = 0, std::uint32_t device = 0) {
        return model_.open_stream(device, priority{level}, tag);
    }
    /// Opaque work.
    void submit(stream_state& s, std::uint32_t blocks, ns hold, bool cooperative = false) {
        operation& op = model_.operations().acquire();
        op.blocks = blocks;
        op.hold = hold;
        op.cooperative = cooperative;
        model_.submit(s, op, now_);
        model_.settle(now_);
    }
    void submit_wait(stream_state& s, const host::point& p) {
        operation& op = model_.operations().acquire();
        op.blocks = 0;
        op.awaited = p.state();
        ++p.state()->references;
        model_.submit(s, op, now_);
        model_.settle(now_);
    }
    host::point record(stream_state& s) {
        auto& p = hub_->points.acquire();
        p.reached = false;
        p.references = 1;
        p.hub = hub_;
        host::point made{p};
        model_.record(s, p, now_);
        return made;
    }
    /// To `t` after the start, looking at the model there for the first time: whoever drives it may
    /// be late.
    void jump(ns t) {
        now_ = instant{t};
        model_.advance(now_);
    }
    std::vector<host::block_record> blocks(std::uint32_t device = 0) {
        return model_.devices()[device].ledger.take().blocks;
    }
    host::detail::model& model() { return model_; }
    [[nodiscard]] instant now() const { return now_; }

private:
    std::shared_ptr<host::detail::point_hub> hub_ = std::make_shared<host::detail::point_hub>();
    host::detail::model model_;
    instant now_{};
};

}  // namespace

TEST_CASE("a hundred kernels of 1 ms take 100 ms, however late they are looked at", "[host]") {
    bench b{1};
    auto& s = b.stream();
    for (int i = 0; i < 100; ++i) b.submit(s, 1, 1ms);
    const auto done = b.record(s);
    b.jump(40500us);
    CHECK(b.blocks().size() == 40);
    b.jump(99999us);
    CHECK_FALSE(done.reached());
    b.jump(5s);
    CHECK(done.reached());
    CHECK(done.when() == instant{100ms});
}

TEST_CASE("an SM that was idle starts when the work came, not before", "[host]") {
    bench b{1};
    auto& s = b.stream(0, 3);
    b.submit(s, 1, 2ms);
    b.jump(10ms);
    b.submit(s, 2, 3ms);
    b.jump(1s);
    CHECK(b.blocks() == std::vector<host::block_record>{{3, 0, instant{0ms}, instant{2ms}},
                                                        {3, 0, instant{10ms}, instant{13ms}},
                                                        {3, 0, instant{13ms}, instant{16ms}}});
}

TEST_CASE("more blocks than SMs run in waves, and streams fill one another's gaps", "[host]") {
    bench b{4};
    auto &s = b.stream(), &t = b.stream();
    b.submit(s, 6, 10ms);
    b.submit(t, 2, 10ms);
    const auto s_done = b.record(s), t_done = b.record(t);
    b.jump(1s);
    CHECK(s_done.when() == instant{20ms});
    CHECK(t_done.when() == instant{20ms});  // beside the second wave
}

TEST_CASE("the next kernel of an urgent stream goes before others that wait for the same SMs", "[host]") {
    // All four blocks end at one instant; the follow-up must not find the SMs given away.
    bench b{4};
    auto &urgent = b.stream(1, 1), &other = b.stream(0, 0);
    b.submit(other, 4, 1ms);
    for (int i = 0; i < 10; ++i) b.submit(urgent, 4, 1ms);
    b.submit(other, 4, 1ms);
    const auto urgent_done = b.record(urgent), other_done = b.record(other);
    b.jump(1s);
    CHECK(urgent_done.when() == instant{11ms});
    CHECK(other_done.when() == instant{12ms});
}

TEST_CASE("equal streams take turns", "[host]") {
    bench b{2};
    auto &s = b.stream(0, 1), &t = b.stream(0, 2);
    for (int i = 0; i < 3; ++i) {
        b.submit(s, 2, 1ms);
        b.submit(t, 2, 1ms);
    }
    b.jump(1s);
    std::vector<std::uint32_t> tags;
    for (const auto& block : b.blocks())
        if (block.sm == 0) tags.push_back(block.tag);
    CHECK(tags == std::vector<std::uint32_t>{1, 2, 1, 2, 1, 2});
}

TEST_CASE("cooperative blocks start at one instant", "[host]") {
    bench b{2};
    auto &s = b.stream(0, 1), &coop = b.stream(1, 2), &rest = b.stream(0, 3);
    b.submit(s, 1, 1ms);
    b.submit(coop, 2, 5ms, true);  // waits for the SM of `s`; the other one stays free
    b.submit(rest, 1, 1ms);
    b.jump(1s);
    CHECK(b.blocks() == std::vector<host::block_record>{{1, 0, instant{0ms}, instant{1ms}},
                                                        {2, 0, instant{1ms}, instant{6ms}},
                                                        {2, 1, instant{1ms}, instant{6ms}},
                                                        {3, 0, instant{6ms}, instant{7ms}}});
}

TEST_CASE("two cooperative launches run one after the other", "[host]") {
    bench b{3};
    auto &s = b.stream(0, 1), &t = b.stream(0, 2);
    b.submit(s, 2, 1ms, true);
    b.submit(t, 2, 1ms, true);
    const auto s_done = b.record(s), t_done = b.record(t);
    b.jump(1s);
    CHECK(s_done.when() == instant{1ms});
    CHECK(t_done.when() == instant{2ms});
}

TEST_CASE("a stream waits for another device to the instant", "[host]") {
    bench b{1, 2};
    auto &s = b.stream(0, 0, 0), &t = b.stream(0, 0, 1);
    b.submit(s, 1, 7ms);
    b.submit_wait(t, b.record(s));
    b.submit(t, 1, 1ms);
    b.submit_wait(s, b.record(t));
    const auto round = b.record(s);
    CHECK(b.model().next_event() == instant{7ms});
    b.jump(1s);
    CHECK(round.when() == instant{8ms});
    CHECK(b.blocks(1).at(0).start == instant{7ms});
}

TEST_CASE("all streams that wait for a point go on, whatever is submitted meanwhile", "[host]") {
    bench b{1, 2};
    auto &s = b.stream(0, 0, 0), &t = b.stream(0, 0, 1), &u = b.stream(0, 0, 1);
    b.submit(s, 1, 1ms);
    const auto p = b.record(s);
    b.submit_wait(t, p);
    b.submit_wait(u, p);
    b.submit(t, 1, 1ms);
    b.submit(u, 1, 1ms);
    const auto t_done = b.record(t), u_done = b.record(u);
    b.jump(1s);
    CHECK(t_done.when() == instant{2ms});
    CHECK(u_done.when() == instant{3ms});
}

TEST_CASE("a point recorded late isn't before its record", "[host]") {
    bench b{1};
    auto& s = b.stream();
    b.submit(s, 1, 1ms);
    b.jump(5ms);
    const auto idle = b.record(s);
    CHECK(idle.reached());
    CHECK(idle.when() == instant{5ms});
    b.submit(s, 0, 0ms);
    CHECK(b.record(s).reached());
    b.submit(s, 1, 0ms);
    CHECK(b.record(s).reached());
}

TEST_CASE("a stalled stream starts when it is resumed", "[host]") {
    bench b{1};
    auto &s = b.stream(0, 1), &t = b.stream(0, 2);
    b.submit(s, 1, 2ms);
    b.submit(s, 1, 2ms);
    b.model().stall(s);  // the first has started
    b.submit(t, 1, 1ms);
    b.jump(10ms);
    b.model().resume(s, b.now());
    b.model().settle(b.now());
    b.jump(1s);
    CHECK(b.blocks() == std::vector<host::block_record>{{1, 0, instant{0ms}, instant{2ms}},
                                                        {2, 0, instant{2ms}, instant{3ms}},
                                                        {1, 0, instant{10ms}, instant{12ms}}});
}

TEST_CASE("a lost device cuts what it holds and fails what it has", "[host]") {
    bench b{1, 2};
    auto &s = b.stream(0, 0, 0), &t = b.stream(0, 0, 0), &u = b.stream(0, 0, 1);
    b.submit(s, 3, 10ms);
    const auto first = b.record(s);
    b.submit(s, 1, 1ms);
    const auto second = b.record(s);
    b.submit_wait(t, second);
    const auto waited = b.record(t);
    b.submit_wait(u, second);  // on the healthy device
    b.submit(u, 1, 1ms);
    const auto elsewhere = b.record(u);
    b.jump(12ms);
    b.model().lose(b.model().devices()[0], b.now());
    b.model().settle(b.now());
    for (const auto& p : {first, second, waited}) {
        CHECK(p.reached());
        CHECK(p.status() == errc::device_lost);
        CHECK(p.when() == instant{12ms});
    }
    CHECK(b.blocks().size() == 2);  // the second was cut, the third never started
    CHECK_FALSE(elsewhere.reached());
    b.jump(13ms);
    CHECK(elsewhere.reached());
    CHECK(elsewhere.status() == errc::none);
    b.submit(s, 1, 1ms);
    CHECK(b.record(s).status() == errc::device_lost);
}

TEST_CASE("a closed stream goes when it is empty", "[host]") {
    bench b{1};
    auto& s = b.stream();
    b.submit(s, 1, 1ms);
    const auto done = b.record(s);
    CHECK(b.model().close_stream(s) == nullptr);
    b.jump(1ms);
    CHECK(done.reached());
    b.model().close_stream(b.stream());
    CHECK(b.blocks().size() == 1);
}

TEST_CASE("operations and points are used again", "[host]") {
    bench b{2};
    auto& s = b.stream();
    for (int i = 1; i <= 5000; ++i) {
        b.submit(s, 2, 1us);
        const auto done = b.record(s);
        b.jump(ns{1us} * i);
        REQUIRE(done.reached());
    }
    CHECK(b.model().operations().size() == 1);
}

TEST_CASE("a hold that is outrun ends when the computing does", "[host]") {
    bench b{1};
    auto& s = b.stream();
    operation& op = b.model().operations().acquire();
    op.blocks = 1;
    op.hold = 1ms;
    op.body = [](host::kernel_context&) {};
    b.model().submit(s, op, b.now());
    b.model().settle(b.now());
    const auto done = b.record(s);
    auto* const sm = b.model().take_claimed();
    REQUIRE(sm != nullptr);
    CHECK(b.model().next_event() == never);  // its end isn't known before it has computed
    b.jump(3ms);
    sm->edges[1] = instant{3ms};
    op.body.reset();
    std::exception_ptr thrown = std::make_exception_ptr(std::runtime_error{"no"});
    b.model().finish(*sm, thrown, b.now());
    b.jump(3ms);
    CHECK(done.when() == instant{3ms});
    CHECK(done.status() == errc::kernel_failed);
    CHECK_THROWS_AS(std::rethrow_exception(done.exception()), std::runtime_error);
}
