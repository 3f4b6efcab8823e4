// SPDX-License-Identifier: Apache-2.0
// Clients of one limiter on their own streams: how many CUDA calls their accounts cost, and whether
// the accounts add up.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include <catch2/catch.hpp>

#include <gpushare/backend/cuda/cuda.hpp>
#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/compute/compute_limiter.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "standins/cuda/standin.hpp"
#include "support/random.hpp"

namespace own_streams_test {

namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
namespace cuda = gpushare::cuda;
using gpushare::client_id;
using gpushare::ns;

struct standin_clock {
    [[nodiscard]] static gpushare::instant now() noexcept { return gpushare::instant{standin::now()}; }
};

/// Clients that always have something waiting, each on its stream, on a device that runs all
/// streams at once. Of this width, or else each fills the device, and they take turns.
struct crowd {
    explicit crowd(std::size_t n, gpushare::limiter_options o = {}, gpushare::sm_width each = {})
        : gate(o), width(each) {
        for (std::size_t i = 0; i < n; ++i) {
            clients.push_back(gate.add({.weight = gpushare::share::of_permille(1000 / n)}));
            streams.push_back(node.make_stream({0}));
        }
    }

    void submit(std::size_t i, ns length) {
        const auto work = [length](cuda::stream& s) { s.enqueue(length); };
        (void)gate.submit(clients[i], streams[i], work, {.width = width});
    }
    // usage() looks at everything that is in flight, and so costs calls.
    [[nodiscard]] gpushare::client_usage total() {
        gpushare::client_usage sum;
        for (const auto c : clients) {
            const auto u = gate.usage(c);
            sum.device_time += u.device_time;
            sum.completed += u.completed;
            sum.waiting += u.waiting;
            sum.in_flight += u.in_flight;
        }
        return sum;
    }
    void close() {
        for (const auto c : clients)
            while (!gate.close(c, gpushare::instant::min())) standin::advance(1ms);
    }

    standin::session gpu{{.time = standin::timing::manual}};
    cuda::node node;
    gpushare::compute_limiter<cuda::stream, standin_clock> gate;
    gpushare::sm_width width;
    std::vector<client_id> clients;
    std::vector<cuda::stream> streams;
};

[[nodiscard]] std::size_t all_calls() {
    std::size_t n = 0;
    for (const auto* name : {"cudaEventRecord", "cuEventQuery", "cuEventElapsedTime", "cudaGetLastError",
                             "cuThreadExchangeStreamCaptureMode", "cudaEventCreateWithFlags", "cudaStreamWaitEvent"})
        n += standin::count(name);
    return n;
}

}  // namespace

TEST_CASE("an account of clients on several streams asks for each end once, and for its time once", "[cuda]") {
    for (std::uint64_t nth = 0; nth < 12; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        const auto n = 2 + any.below(3);
        crowd all(n, {}, gpushare::sm_width(1.0 / static_cast<double>(n)));  // side by side
        const ns length = 1us * (10 + any.below(100));
        CAPTURE(all.clients.size(), length.count());
        const auto step = [&] {
            for (std::size_t i = 0; i < all.clients.size(); ++i) all.submit(i, length);
            standin::advance(length / 2);
        };
        for (int warm_up = 0; warm_up < 200; ++warm_up) step();
        const auto before = all.total().completed;
        standin::forget_calls();
        for (int counted = 0; counted < 300; ++counted) step();
        const auto calls = all_calls();
        // A point at its end and, where the stream was idle, at its begin; how far they are apart,
        // which also tells whether it is over, and where that lies beside others; leave to ask,
        // before and after. Twice as many if ends are asked for anew each time that two are
        // compared.
        CHECK(static_cast<double>(calls) < 6 * static_cast<double>(all.total().completed - before));
        all.close();
    }
}

TEST_CASE("simultaneous work of several streams is charged once in all, however it overlapped", "[cuda]") {
    for (std::uint64_t nth = 0; nth < 12; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        crowd all(2 + any.below(3));
        std::vector<ns> length;
        for (std::size_t i = 0; i < all.clients.size(); ++i) length.push_back(1us * (5 + any.below(150)));
        const auto begin = standin::now();
        for (int step = 0; step < 600; ++step) {
            for (std::size_t i = 0; i < all.clients.size(); ++i)
                if (all.gate.usage(all.clients[i]).waiting < 2) all.submit(i, length[i]);
            standin::advance(3us);
        }
        for (auto u = all.total(); u.in_flight + u.waiting > 0; u = all.total()) {
            standin::advance(1us);
            all.gate.poll();
        }
        // Some stream is busy at every moment but for a step between one kernel and the next.
        const auto busy = standin::now() - begin;
        const double ratio = static_cast<double>(all.total().device_time.count()) / static_cast<double>(busy.count());
        CHECK(ratio > 0.9);
        CHECK(ratio < 1.001);
        all.close();
    }
}

TEST_CASE("clients that take turns share points by turn, and each is charged what its kernels took", "[cuda]") {
    for (std::uint64_t nth = 0; nth < 12; ++nth) {
        const auto seed = support::seed(nth);
        CAPTURE(seed);
        support::random any(seed);
        crowd all(2 + any.below(3));
        std::vector<ns> length;
        for (std::size_t i = 0; i < all.clients.size(); ++i) length.push_back(1us * (3 + any.below(10)));
        CAPTURE(length);
        const auto step = [&] {
            for (std::size_t i = 0; i < all.clients.size(); ++i)
                while (all.gate.usage(all.clients[i]).waiting < 2) all.submit(i, length[i]);
            standin::advance(2us);
            all.gate.poll();
        };
        // Of what has ended beside something in flight, a part isn't published yet: so all is over,
        // before and after.
        const auto settle = [&] {
            for (auto u = all.total(); u.in_flight + u.waiting > 0; u = all.total()) standin::advance(2us);
        };
        for (int warm_up = 0; warm_up < 1000; ++warm_up) step();
        settle();
        const auto begin = standin::now();
        std::vector<gpushare::client_usage> before;
        for (const auto c : all.clients) before.push_back(all.gate.usage(c));
        for (int counted = 0; counted < 5000; ++counted) step();
        settle();
        ns charged{}, ran{};
        for (std::size_t i = 0; i < all.clients.size(); ++i) {
            const auto after = all.gate.usage(all.clients[i]);
            const auto cost = after.device_time - before[i].device_time;
            const auto truth = static_cast<ns::rep>(after.completed - before[i].completed) * length[i];
            CHECK(static_cast<double>(cost.count()) == Approx(static_cast<double>(truth.count())).epsilon(0.01));
            charged += cost;
            ran += truth;
        }
        // One kernel at a time, and few steps without.
        CHECK(ran < standin::now() - begin + 1ms);
        CHECK(static_cast<double>(charged.count()) > 0.8 * static_cast<double>((standin::now() - begin).count()));
        all.close();
    }
}

TEST_CASE("of short kernels that take turns, each costs less than one call", "[cuda]") {
    for (const auto length : {5us, 10us}) {
        crowd all(2);
        std::size_t turn = 0;
        const auto step = [&] {
            all.submit(turn++ % 2, length);
            standin::advance(length);
        };
        for (int waiting = 0; waiting < 100; ++waiting) all.submit(turn++ % 2, length);
        for (int warm_up = 0; warm_up < 1000; ++warm_up) step();
        standin::forget_calls();
        for (int counted = 0; counted < 1000; ++counted) step();
        CHECK(all_calls() < 1000);
        all.close();
    }
}

namespace {

/// Two clients that take turns and of whose kernels it is known that they take 10 us.
struct two_in_turn : crowd {
    explicit two_in_turn() : crowd(2, {.depth = 8}) {
        for (int known = 0; known < 8; ++known) {
            submit(0, 10us);
            submit(1, 10us);
            settle();
        }
    }
    void settle() {
        for (auto u = total(); u.in_flight + u.waiting > 0; u = total()) standin::advance(10us);
    }
    /// Enqueued by a gate: when it is over.
    template <class Before>
    cuda::point enqueue(std::size_t i, ns length, Before before) {
        cuda::point end;
        REQUIRE(gate.enqueue(clients[i], streams[i], [&](cuda::stream& s) {
            before(s);
            s.enqueue(length);
            end = s.record();
        }) == gpushare::errc::none);
        return end;
    }
    cuda::point enqueue(std::size_t i, ns length) {
        return enqueue(i, length, [](cuda::stream&) {});
    }
    [[nodiscard]] static ns until(const cuda::point& p, ns begin) {
        while (!p.reached()) standin::advance(1us);
        return ns{standin::now()} - begin;
    }
};

}  // namespace

TEST_CASE("a turn begins behind what the client before has enqueued, though it is just enqueuing more", "[cuda]") {
    two_in_turn two;
    const auto begin = standin::now();
    for (int i = 0; i < 3; ++i) two.enqueue(0, 10us);
    cuda::point early;
    two.enqueue(0, 500us, [&](cuda::stream&) { early = two.enqueue(1, 10us); });
    const auto late = two.enqueue(1, 10us);  // when all of that is enqueued
    CHECK(two.until(early, begin) >= 40us);
    CHECK(two.until(late, begin) >= 540us);
    two.settle();
    two.close();
}

TEST_CASE("two clients in turn on one stream cost a point a turn", "[cuda]") {
    two_in_turn two;
    standin::forget_calls();
    for (int i = 0; i < 6; ++i)
        REQUIRE(two.gate.enqueue(two.clients[i % 2 == 0 ? 0 : 1], two.streams[0],
                                 [](cuda::stream& s) { s.enqueue(10us); }) == gpushare::errc::none);
    CHECK(standin::count("cudaEventRecord") <= 6);
    two.settle();
    two.close();
}

TEST_CASE("gaps in a client's work aren't charged to it because another's was predicted to last longer", "[cuda]") {
    two_in_turn two;
    const auto before = two.gate.usage(two.clients[1]).device_time;
    REQUIRE(two.gate.enqueue(two.clients[0], two.streams[0], [](cuda::stream& s) { s.enqueue(10us); }, gpushare::never,
                             {}, {.cost = 5ms}) == gpushare::errc::none);
    for (int i = 0; i < 20; ++i) {
        two.enqueue(1, 10us);
        standin::advance(200us);
    }
    two.settle();
    const auto charged = two.gate.usage(two.clients[1]).device_time - before;
    CHECK(charged >= 190us);
    CHECK(charged < 900us);
    two.close();
}

namespace {

/// Blocks of 100 us each, of which the stand-in's 16 SMs hold 32 at once.
auto blocks(std::uint32_t n) {
    return [n](cuda::stream& s) { s.launch({.blocks = n, .hold = 100us}, gpushare::detail::empty_kernel{}); };
}

/// What a submission of `work` on `s` costs a client that is alone: of twenty, the mean, rounded,
/// since events tell times as floats.
template <class Work>
std::chrono::microseconds cost_alone(crowd& c, cuda::stream& s, Work work) {
    const auto before = c.total();
    for (int i = 0; i < 20; ++i) (void)c.gate.submit(c.clients[0], s, work);
    for (auto u = c.total(); u.completed < before.completed + 20; u = c.total()) standin::advance(10us);
    return std::chrono::round<std::chrono::microseconds>((c.total().device_time - before.device_time) / 20);
}

}  // namespace

TEST_CASE("the width of our launches is known from their blocks, in the partition where they run", "[cuda][width]") {
    crowd one(1);
    CHECK(cost_alone(one, one.streams[0], blocks(8)) == 25us);
    CHECK(cost_alone(one, one.streams[0], blocks(32)) == 100us);
    auto half = cuda::device_sms(one.node, {0}).partition(std::vector{8U});
    auto inside = half[0].make_stream();
    CHECK(cost_alone(one, inside, blocks(8)) == 50us);
    CHECK(cost_alone(one, inside, [](cuda::stream& s) { blocks(2)(s), blocks(8)(s), blocks(4)(s); }) == 150us);
    one.close();
}

TEST_CASE("work that isn't our launch may fill the device, whatever is launched beside it", "[cuda][width]") {
    crowd one(1);
    auto& s = one.streams[0];
    void* const p = one.node.memory({0}).allocate(4096, 256);
    CHECK(cost_alone(one, s, [p](cuda::stream& to) { blocks(8)(to), to.fill(p, std::byte{1}, 4096); }) >= 100us);
    CHECK(cost_alone(one, s, [](cuda::stream& to) { to.enqueue(100us); }) == 100us);
    CHECK(cost_alone(one, s, [](cuda::stream& to) {
              blocks(8)(to);
              std::thread([&] { blocks(8)(to); }).join();  // an engine with a thread of its own
          }) == 200us);
    CHECK(cost_alone(one, s, blocks(8)) == 25us);
    (void)s.native_handle();  // from now on somebody may launch past us
    CHECK(cost_alone(one, s, blocks(8)) == 100us);
    (void)one.node.memory({0}).deallocate(p, 4096, 256);
    one.close();
}

TEST_CASE("a graph is as wide as the widest launch that was captured, unless others may have added to it",
          "[cuda][width][graph]") {
    crowd one(1);
    auto& s = one.streams[0];
    const auto narrow = [](cuda::stream& to) { blocks(8)(to), blocks(16)(to); };
    const auto cost_of = [&](cuda::graph_executable& run) {
        return cost_alone(one, s, [&](cuda::stream& to) { run.launch(to); });
    };
    cuda::graph_executable run{cuda::capture(s, narrow)};
    CHECK(cost_of(run) == 100us);  // twice as long, on half of the SMs
    REQUIRE(run.update(cuda::capture(s, [](cuda::stream& to) { blocks(8)(to), blocks(8)(to); })));
    CHECK(cost_of(run) == 50us);
    // In a graph of graphs, too; and beside a launch.
    cuda::graph_executable outer{cuda::capture(s, [&](cuda::stream& to) { run.launch(to); })};
    CHECK(cost_of(outer) == 50us);
    CHECK(cost_alone(one, s, [&](cuda::stream& to) { run.launch(to), blocks(16)(to); }) == 150us);
    // A copy, a kernel of another kind, a handle.
    cuda::graph_executable opaque{cuda::capture(s, [&](cuda::stream& to) { narrow(to), to.enqueue(100us); })};
    CHECK(cost_of(opaque) == 300us);
    const auto seen = cuda::capture(s, narrow);
    (void)seen.native_handle();
    cuda::graph_executable added_to{seen};
    CHECK(cost_of(added_to) == 200us);
    (void)run.native_handle();
    CHECK(cost_of(run) == 200us);
    REQUIRE(run.update(cuda::capture(s, narrow)));  // whoever has the handle still may change it
    CHECK(cost_of(run) == 200us);
    one.close();
}

TEST_CASE("clients whose launches fill half of the SMs run side by side, at no call of the driver's", "[cuda][width]") {
    crowd two(2);
    const auto round = [&](auto work_of_first) {
        const auto begin = standin::now();
        (void)two.gate.submit(two.clients[0], two.streams[0], work_of_first, {.key = 1});
        (void)two.gate.submit(two.clients[1], two.streams[1], blocks(16), {.key = 2});
        for (auto u = two.total(); u.in_flight + u.waiting > 0; u = two.total()) standin::advance(10us);
        return standin::now() - begin;
    };
    for (int learning = 0; learning < 4; ++learning) (void)round(blocks(16));
    standin::forget_calls();
    const auto before = two.total().device_time;
    for (int i = 0; i < 20; ++i) CHECK(round(blocks(16)) < 150us);
    CHECK(two.total().device_time - before == 20 * 100us);
    CHECK(standin::count("cudaOccupancyMaxActiveBlocksPerMultiprocessor") == 0);
    CHECK(standin::count("cudaStreamWaitEvent") == 0);
    // One of the first client's that may fill all: the next one of its kind runs in turn.
    (void)round([](cuda::stream& s) { s.enqueue(100us); });
    CHECK(round(blocks(16)) >= 200us);
    two.close();
}

TEST_CASE("work that is declared narrow stays off the SMs that a level above keeps", "[cuda][width]") {
    constexpr ns length = 5ms;
    crowd all(3, {}, gpushare::sm_width(0.25));
    const auto above = all.gate.add({.level = {1}, .keeps = gpushare::sm_width(0.5)});
    const auto in_flight_of_three = [&] {
        for (std::size_t i = 0; i < 3; ++i) all.submit(i, length);
        const auto in = all.total().in_flight;
        for (auto u = all.total(); u.in_flight + u.waiting > 0; u = all.total()) standin::advance(1ms);
        return in;
    };
    for (int i = 0; i < 3; ++i) (void)in_flight_of_three();  // how long they take is learnt
    CHECK(in_flight_of_three() == 2);                        // on the half that isn't kept
    CHECK(all.gate.bound_of(above, 0, gpushare::sm_width(0.5)) < length);
    CHECK(all.gate.close(above, gpushare::instant::min()));
    all.close();
}

}  // namespace own_streams_test
