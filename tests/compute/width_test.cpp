// SPDX-License-Identifier: Apache-2.0
// Width: what fits side by side on a device runs side by side, a charge is duration times width, and a share is one of the
// device's SM time. The core alone, in virtual time; then stand-ins for engines, whose calls are opaque, of one block and from
// 0.3 to 75 ms long, on a modelled device: the same at every run, by the device's own ledger.
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <gpushare/backend/host/ledger.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/modelled_device.hpp"

using namespace std::chrono_literals;
using gpushare::admission;
using gpushare::client_id;
using gpushare::instant;
using gpushare::limiter_core;
using gpushare::ns;
using gpushare::share;
using gpushare::sm_width;
using support::modelled_device;

namespace {

/// A submission of a quarter of the device, which lasts `length`, on a stream.
gpushare::submission_facts quarter(ns length, std::uint64_t stream) {
    return {.head = {.cost = length / 4}, .width = sm_width(0.25), .timeline = stream};
}

std::size_t let_in(limiter_core<>& core, std::vector<admission>* all = nullptr) {
    std::size_t n = 0;
    while (const auto a = core.next(instant{})) {
        if (all != nullptr) all->push_back(*a);
        ++n;
    }
    return n;
}

}  // namespace

static_assert(sm_width{}.part() == 1 && !sm_width{}.known());
static_assert(sm_width(0.25).part() == 0.25 && sm_width(0.25).known());
static_assert(sm_width(3).part() == 1 && !sm_width(-1).known());
static_assert(sm_width::of_sms(33, 132) == sm_width(0.25));
static_assert(!sm_width::of_sms(0, 0).known());

TEST_CASE("as many long ones are let in as fit side by side", "[compute][width]") {
    limiter_core<> core;
    std::vector<client_id> clients;
    for (std::uint64_t i = 0; i < 8; ++i) {
        clients.push_back(core.add({}));
        core.arrive(clients.back(), instant{}, quarter(25ms, i + 1));
    }
    std::vector<admission> in;
    CHECK(let_in(core, &in) == 4);
    core.complete(in[1], 25ms / 4);
    CHECK(let_in(core) == 1);
}

TEST_CASE("what fills the device goes when some of it is free, and then nothing long beside it", "[compute][width]") {
    limiter_core<> core;
    const auto a = core.add({}), b = core.add({}), c = core.add({});
    core.arrive(a, instant{}, quarter(25ms, 1));
    core.arrive(b, instant{}, {.head = {.cost = 25ms}, .width = sm_width(1), .timeline = 2});
    CHECK(let_in(core) == 2);
    core.arrive(c, instant{}, quarter(25ms, 3));
    CHECK(let_in(core) == 0);
}

TEST_CASE("the first of a kind may fill the device or a block of it: others go beside it, few others like it",
          "[compute][width]") {
    limiter_core<> core({.depth = 3});
    const auto a = core.add({}), b = core.add({});
    core.arrive(a, instant{}, {.head = {.cost = 25ms}, .timeline = 1});
    CHECK(let_in(core) == 1);
    core.arrive(b, instant{}, quarter(25ms, 2));
    CHECK(let_in(core) == 1);
    for (std::uint64_t i = 0; i < 4; ++i)
        core.arrive(core.add({}), instant{}, {.head = {.cost = 25ms}, .timeline = i + 3});
    CHECK(let_in(core) == 1);  // three are in flight
}

TEST_CASE("of short ones as many again are let in ahead, beside others and behind their own", "[compute][width]") {
    limiter_core<> core;
    std::vector<client_id> clients;
    for (std::uint64_t i = 0; i < 12; ++i) {
        clients.push_back(core.add({.longest = 1ms}));
        core.arrive(clients.back(), instant{}, quarter(100us, i + 1));
    }
    CHECK(let_in(core) == 8);
    limiter_core<> one;
    const auto only = one.add({.longest = 1ms});
    for (int i = 0; i < 12; ++i) one.arrive(only, instant{}, quarter(200us, 1));
    std::vector<admission> in;
    for (std::optional<admission> next; (next = one.next(instant{}, [](client_id) { return quarter(200us, 1); }));)
        in.push_back(*next);
    CHECK(in.size() == 3);  // until the stream has enough for half a millisecond
}

TEST_CASE("of what may take any time, one goes on each stream", "[compute][width]") {
    limiter_core<> core;
    const auto c = core.add({});
    const auto next = [&] { return core.next(instant{}, [](client_id) { return quarter(10us, 1); }); };
    for (int i = 0; i < 4; ++i) core.arrive(c, instant{}, quarter(10us, 1));
    CHECK(next());
    CHECK_FALSE(next());
}

TEST_CASE("who waits for a stream that others have filled goes on when that has room", "[compute][width]") {
    limiter_core<> core;
    const auto a = core.add({}), b = core.add({});
    core.arrive(a, instant{}, quarter(25ms, 1));
    const auto first = core.next(instant{});
    REQUIRE(first);
    core.arrive(b, instant{}, quarter(25ms, 1));
    CHECK_FALSE(core.next(instant{}));
    core.complete(*first, 25ms / 4);
    const auto second = core.next(instant{});
    REQUIRE(second);
    CHECK(second->client == b);
}

TEST_CASE("who waits for its own stream lets others by, and is owed what it comes to be behind", "[compute][width]") {
    limiter_core<> core;
    const auto a = core.add({.weight = share::of_permille(500)}), b = core.add({.weight = share::of_permille(500)});
    const auto first_of = [&](client_id c) { return quarter(25ms, c == a ? 1 : 2); };
    for (int i = 0; i < 3; ++i) core.arrive(a, instant{}, quarter(25ms, 1));
    const auto one = core.next(instant{}, first_of);
    REQUIRE(one);
    CHECK(one->client == a);
    CHECK_FALSE(core.next(instant{}, first_of));  // behind its own, which takes long
    core.arrive(b, instant{}, quarter(25ms, 2));
    const auto other = core.next(instant{}, first_of);
    REQUIRE(other);
    CHECK(other->client == b);
    core.complete(*one, 25ms / 4);
    const auto again = core.next(instant{}, first_of);
    REQUIRE(again);
    CHECK(again->client == a);
}

TEST_CASE("lower levels don't fill the room of a higher one, whatever their width", "[compute][width]") {
    limiter_core<> core;
    const auto low = core.add({}), high = core.add({.level = {1}});
    for (std::uint64_t i = 0; i < 6; ++i) core.arrive(low, instant{}, quarter(25ms, 1));
    std::uint64_t stream = 0;
    const auto next_low = [&](client_id) { return quarter(25ms, ++stream + 1); };
    std::size_t n = 0;
    while (core.next(instant{}, next_low)) ++n;
    CHECK(n == 4);
    core.arrive(high, instant{}, quarter(25ms, 100));
    const auto up = core.next(instant{});
    REQUIRE(up);
    CHECK(up->client == high);
}

namespace {

/// A tenant with an engine: calls of so many blocks, each from one of its threads, which has a stream and always calls again.
struct engine {
    ns length{};
    std::uint32_t blocks = 1;
    unsigned permille = 0;
    std::uint32_t threads = 1;
};

struct measured {
    double share_pp = 0, metering_pct = 0, idle_pct = 0;  // the worst of all
};

/// Twenty seconds of these, by the device's ledger. An end is noticed 20 us later. `by_thread`: at first all calls of one thread
/// wait before those of the next.
measured run(std::uint32_t sms, const std::vector<engine>& engines, bool declared, bool by_thread = false) {
    using stream = modelled_device::stream;
    using limiter = gpushare::compute_limiter<stream, modelled_device::clock>;
    constexpr ns to_notice = 20us;
    struct tenant {
        engine what;
        client_id id;
        std::deque<stream> streams;
    };
    modelled_device device(sms);
    limiter compute({}, modelled_device::clock(device));
    std::deque<tenant> tenants;
    for (const auto& e : engines) {
        auto& t = tenants.emplace_back();
        t.what = e;
        t.id = compute.add({.weight = share::of_permille(e.permille)});
        const auto tag = static_cast<std::uint32_t>(tenants.size() - 1);
        for (std::uint32_t i = 0; i < e.threads; ++i) t.streams.emplace_back(device, gpushare::priority{}, tag);
    }
    bool over = false;
    struct caller {
        limiter* compute;
        tenant* of;
        std::size_t thread;
        sm_width width;
        const bool* over;
        void operator()() const {
            const auto work = [e = of->what](stream& s) { s.launch(e.blocks, e.length); };
            const auto again = [self = *this](const gpushare::completion&) {
                if (!*self.over) self();
            };
            (void)compute->submit(of->id, of->streams[thread], work, {.width = width}, again);
        }
    };
    constexpr std::size_t ahead = 8;  // always more than are let in
    for (std::size_t nth = 0; nth < ahead; ++nth) {
        for (auto& t : tenants) {
            const auto width = declared ? sm_width::of_sms(t.what.blocks, sms) : sm_width{};
            for (std::size_t i = 0; i < t.streams.size(); ++i) {
                const auto call = nth * t.streams.size() + i;
                caller{&compute, &t, by_thread ? call / ahead : i, width, &over}();
            }
        }
    }
    const auto from = device.now() + 1s, to = from + 20s;
    while (device.now() < to) {
        if (!device.step(to_notice)) FAIL("nothing runs, and nothing is let in");
        compute.poll();
    }
    over = true;
    while (device.step(to_notice)) compute.poll();

    const auto blocks = device.blocks();
    const auto window = gpushare::host::sm_time_by_tag(blocks, from, to, sms);
    const auto in_all = gpushare::host::sm_time_by_tag(blocks, instant{}, gpushare::never, sms);
    REQUIRE(window.size() == engines.size());
    ns used{};
    for (const auto& t : window) used += t.busy;
    measured worst;
    worst.idle_pct = 100 * (1 - std::chrono::duration<double>(used) / (to - from));
    for (std::size_t i = 0; i < engines.size(); ++i) {
        const double part = std::chrono::duration<double>(window[i].busy) / used;
        worst.share_pp = std::max(worst.share_pp, std::abs(100 * part - engines[i].permille / 10.0));
        const auto charged = compute.usage(tenants[i].id).device_time;
        const double off = std::chrono::duration<double>(charged - in_all[i].busy) / in_all[i].busy;
        worst.metering_pct = std::max(worst.metering_pct, 100 * std::abs(off));
    }
    return worst;
}

}  // namespace

TEST_CASE("engines of one-block calls: shares, metering, and no idle SM while anybody waits",
          "[compute][width][promises]") {
    for (const bool declared : {true, false}) {
        for (const std::uint32_t sms : {2U, 4U}) {
            const std::vector<std::vector<engine>> cases{
                {{75ms, 1, 300, sms}, {25ms, 1, 700, sms}},
                {{75ms, 1, 700, sms}, {300us, 1, 300, sms}},
                {{25ms, 1, 300, sms}, {300us, 1, 700, sms}},
                {{75ms, 1, 300, sms}, {25ms, 1, 500, sms}, {300us, 1, 200, sms}},
                {{300us, 1, 300, sms}, {300us, sms, 700, 2}},  // widths from a quarter to all
                {{300us, 1, 300, sms}, {300us, 2, 400, 2}, {300us, sms, 300, 2}},
                {{300us, sms, 300, 1}, {300us, sms, 700, 1}},
            };
            for (std::size_t i = 0; i < cases.size(); ++i) {
                CAPTURE(declared, sms, i);
                const auto worst = run(sms, cases[i], declared);
                CHECK(worst.share_pp <= 0.5);
                CHECK(worst.metering_pct <= 1);
                CHECK(worst.idle_pct <= 1);
            }
        }
    }
}

TEST_CASE("calls of a tenant's other threads go by one that waits for its stream", "[compute][width][promises]") {
    for (const bool declared : {true, false}) {
        for (const std::uint32_t sms : {2U, 4U}) {
            CAPTURE(declared, sms);
            for (const auto& engines : std::vector<std::vector<engine>>{{{75ms, 1, 300, sms}, {25ms, 1, 700, sms}},
                                                                        {{25ms, 1, 300, sms}, {300us, 1, 700, sms}}}) {
                const auto worst = run(sms, engines, declared, true);
                CHECK(worst.share_pp <= 0.5);
                CHECK(worst.metering_pct <= 1);
                CHECK(worst.idle_pct <= 1);
            }
        }
    }
}

TEST_CASE("kernels that fill the device among long calls of a block: shares and metering hold", "[compute][width]") {
    // What is left of a kernel's last blocks leaves SMs idle that the rest of its stream can't use: not counted here.
    for (const std::uint32_t sms : {2U, 4U}) {
        CAPTURE(sms);
        const auto worst = run(sms, {{75ms, 1, 300, sms}, {25ms, 2, 400, 2}, {300us, sms, 300, 2}}, false);
        CHECK(worst.share_pp <= 0.5);
        CHECK(worst.metering_pct <= 1);
    }
}

TEST_CASE("a tenant with one thread gets what one stream can use, and the rest isn't left idle", "[compute][width]") {
    const auto worst = run(2, {{25ms, 1, 300, 1}, {75ms, 1, 700, 1}}, false);
    CHECK(worst.idle_pct <= 1);
    CHECK(worst.share_pp == Approx(20).margin(0.5));  // half of two SMs each: neither can use more
    CHECK(worst.metering_pct <= 1);
}
