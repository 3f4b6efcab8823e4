// SPDX-License-Identifier: Apache-2.0
// Training steps with gradients on devices, over the stand-in: which work waits for which stream,
// and the results of ranks that come late, stop early or make other calls. Without torch;
// tests/interop/torch has the hooks.
#include <gpushare/gradient/detail/device_steps.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/average_of_two.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace device_steps_test {

namespace gs = gpushare;
namespace cuda = gpushare::cuda;
using namespace gpushare::literals;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using gs::errc;
using gs::detail::device_gradient;

namespace {

template <class T>
struct fill {
    T* to;
    std::size_t n;
    float x;
    template <class C>
    GPUSHARE_HD void operator()(C& ctx) const {
        for (std::size_t i = ctx.thread_rank(); i < n; i += ctx.num_threads())
            to[i] = static_cast<T>(x + static_cast<float>(i));
    }
};
/// What an optimiser does.
template <class T>
struct subtract {
    T* from;
    const T* x;
    std::size_t n;
    template <class C>
    GPUSHARE_HD void operator()(C& ctx) const {
        for (std::size_t i = ctx.thread_rank(); i < n; i += ctx.num_threads())
            from[i] = static_cast<T>(static_cast<float>(from[i]) - static_cast<float>(x[i]));
    }
};

struct combine_on {
    cuda::stream* on;
    int* calls;
    errc* answer;
    template <class T>
    errc operator()(gs::device_buckets<T>& buckets) const {
        const std::vector<T*> none(2);  // gradients of a rank lie behind each other
        return buckets.advance(std::span(on, 1), none, [this](auto, auto outs, std::size_t n, gs::average) {
            ++*calls;
            on->launch({}, support::average_of_two<T>{outs[0], outs[1], n});
            return *answer;
        });
    }
};
using steps_type = gs::detail::device_steps<cuda::node, combine_on, float, gs::bfloat16>;

constexpr std::size_t floats = 3, halves = 2, each = 10;  // gradients, and elements of each
constexpr std::uint32_t gradients = floats + halves;

/// Two ranks on a device, each with a stream of its own beside the one that combines. Their
/// gradients are, by turns, of both types.
struct machine {
    explicit machine(gs::ns patience = gs::ns::max(), gs::bytes bucket = gs::bytes{sizeof(float) * each})
        : steps(node, std::span(&combining, 1), 2, combine_on{&combining, &calls, &answer}, bucket, patience) {
        for (std::uint32_t r = 0; r < 2; ++r) {
            training.push_back(node.make_stream(gs::device_id{0}));
            of_floats[r].assign(floats * each, -1);
            parameters[r].assign(floats * each, 0);
            of_halves[r].assign(halves * each, gs::bfloat16(-1.0F));
        }
    }
    [[nodiscard]] void* handle(std::uint32_t r) { return training[r].native_handle(); }
    [[nodiscard]] std::vector<device_gradient> registered(std::uint32_t r) {
        std::vector<device_gradient> all;
        for (std::size_t g = 0; g < floats; ++g) {
            all.push_back({"f" + std::to_string(g), gs::detail::gradient_type::f32, &of_floats[r][g * each], each});
            if (g < halves)
                all.push_back(
                    {"h" + std::to_string(g), gs::detail::gradient_type::bf16, &of_halves[r][g * each], each});
        }
        return all;
    }
    void add(std::uint32_t r) { steps.add(r, registered(r), handle(r)); }
    /// Enqueues what computes gradient g, and says so.
    void compute(std::uint32_t r, std::uint32_t g, float x) {
        if (g % 2 == 0)
            training[r].launch({}, fill<float>{&of_floats[r][g / 2 * each], each, x});
        else
            training[r].launch({}, fill<gs::bfloat16>{&of_halves[r][g / 2 * each], each, x});
        steps.ready(r, g, handle(r));
    }
    void compute_all(std::uint32_t r, float x) {
        for (std::uint32_t g = gradients; g-- > 0;) compute(r, g, x);
    }
    void optimise(std::uint32_t r) {
        training[r].launch({}, subtract<float>{parameters[r].data(), of_floats[r].data(), floats * each});
    }
    void synchronise() {
        for (auto& s : training) s.record().wait(gs::never);
    }

    const standin::session gpu{{.devices = 1}};
    std::vector<float> of_floats[2], parameters[2];  // outlive the streams, whose kernels may wait to run
    std::vector<gs::bfloat16> of_halves[2];
    int calls = 0;
    errc answer = errc::none;
    cuda::node node;
    cuda::stream combining = node.make_stream(gs::device_id{0});
    std::vector<cuda::stream> training;
    steps_type steps;
};

/// Rank r's gradient of a step is this, and one more for each element.
float value(std::uint32_t r, int step) { return static_cast<float>(3 * step + 7 * static_cast<int>(r)); }

}  // namespace

TEST_CASE("ranks in threads get the averages of each step, in whatever order gradients come", "[cuda][gradient]") {
    const auto seed = support::seed(1);
    CAPTURE(seed);
    machine m;
    constexpr int rounds = 20;
    std::vector<int> faults(2);
    support::together(2, [&](unsigned r) {
        support::random any(seed + r);
        m.add(r);
        for (int step = 0; step < rounds; ++step) {
            std::vector<std::uint32_t> order;
            for (std::uint32_t g = 0; g < gradients; ++g) order.push_back(g);
            for (std::size_t k = order.size(); k > 1; --k) std::swap(order[k - 1], order[any.below(k)]);
            for (const std::uint32_t g : order) m.compute(r, g, value(r, step));
            faults[r] += m.steps.wait(r, m.handle(r)) ? 1 : 0;
            m.optimise(r);
        }
    });
    CHECK(faults == std::vector<int>(2));
    m.synchronise();
    CHECK(m.parameters[0] == m.parameters[1]);
    float expected = 0;
    for (int step = 0; step < rounds; ++step) expected -= (value(0, step) + value(1, step)) / 2;
    for (std::size_t i = 0; i < floats * each; ++i)
        CHECK(m.parameters[0][i] == expected - static_cast<float>(rounds * static_cast<int>(i % each)));
    for (std::size_t i = 0; i < halves * each; ++i)
        CHECK(m.of_halves[1][i] ==
              gs::bfloat16((value(0, rounds - 1) + value(1, rounds - 1)) / 2 + static_cast<float>(i % each)));
    CHECK(m.calls == rounds * 4);  // three buckets of floats, one of halves
}

TEST_CASE("a bucket waits for the stream that computes its gradients, and others go ahead", "[cuda][gradient]") {
    machine m;
    m.add(0);
    m.add(1);
    m.compute(0, 4, 10);
    m.compute(1, 4, 20);
    CHECK(m.calls == 1);  // while the backward pass goes on
    m.combining.record().wait(gs::never);
    CHECK(m.of_floats[0][2 * each] == 15);
    standin::hold(m.training[1].native_handle());
    m.compute(0, 2, 10);
    m.compute(1, 2, 20);
    CHECK(m.calls == 2);  // the host doesn't wait for the device
    m.training[0].record().wait(gs::never);
    auto beside = m.node.make_stream(gs::device_id{0});
    beside.enqueue(1ms);
    beside.record().wait(gs::never);
    CHECK_FALSE(m.combining.record().reached());
    CHECK(m.of_floats[0][each] == 10);
    CHECK(m.of_floats[1][each] == -1);
    standin::let_go(m.training[1].native_handle());
    m.combining.record().wait(gs::never);
    CHECK(m.of_floats[0][each] == 15);
    CHECK(m.of_floats[1][each] == 15);
}

TEST_CASE("work that a rank enqueues behind a step waits for the averages, and the host doesn't", "[cuda][gradient]") {
    machine m;
    m.add(0);
    m.add(1);
    standin::hold(m.combining.native_handle());
    for (std::uint32_t r = 0; r < 2; ++r) m.compute_all(r, value(r, 0));
    for (std::uint32_t r = 0; r < 2; ++r) {
        CHECK_FALSE(m.steps.wait(r, m.handle(r)));
        m.optimise(r);
    }
    auto beside = m.node.make_stream(gs::device_id{0});
    beside.enqueue(1ms);
    beside.record().wait(gs::never);
    CHECK_FALSE(m.training[0].record().reached());
    CHECK(m.parameters[0][0] == 0);
    standin::let_go(m.combining.native_handle());
    m.synchronise();
    for (std::uint32_t r = 0; r < 2; ++r) CHECK(m.parameters[r][0] == -(value(0, 0) + value(1, 0)) / 2);
}

TEST_CASE("a rank's gradients may be ready before the other ranks are there", "[cuda][gradient]") {
    machine m;
    m.add(0);
    m.compute_all(0, 2);
    CHECK(m.calls == 0);
    m.add(1);
    m.compute_all(1, 4);
    CHECK_FALSE(m.steps.wait(0, m.handle(0)));
    CHECK_FALSE(m.steps.wait(1, m.handle(1)));
    m.synchronise();
    for (const auto& x : m.of_floats) CHECK(x[0] == 3);
}

TEST_CASE("ranks that have joined take part in others' steps, and end together", "[cuda][gradient]") {
    machine m;
    std::vector<int> faults(2), steps(2);
    support::together(2, [&](unsigned r) {
        m.add(r);
        const auto step = [&](float x) {
            m.compute_all(r, x);
            faults[r] += m.steps.wait(r, m.handle(r)) ? 1 : 0;
            m.optimise(r);
            ++steps[r];
        };
        for (unsigned batches = r == 0 ? 5 : 2; batches > 0; --batches) step(8);
        while (m.steps.another(r)) step(0);
    });
    CHECK(faults == std::vector<int>(2));
    CHECK(steps == std::vector<int>(2, 5));
    m.synchronise();
    CHECK(m.parameters[0] == m.parameters[1]);
    CHECK(m.parameters[0][0] == -2 * 8 - 3 * 4);
}

TEST_CASE("ranks join once for each epoch, and the last to leave an epoch loses no step of the next",
          "[cuda][gradient]") {
    machine m;
    std::vector<int> faults(2), steps(2);
    support::together(2, [&](unsigned r) {
        m.add(r);
        const auto step = [&](float x) {
            m.compute_all(r, x);
            faults[r] += m.steps.wait(r, m.handle(r)) ? 1 : 0;
            m.optimise(r);
            ++steps[r];
        };
        for (unsigned epoch = 0; epoch < 4; ++epoch) {
            for (unsigned batches = (r + epoch) % 2 == 0 ? 3 : 1; batches > 0; --batches) step(8);
            while (m.steps.another(r)) step(0);
        }
    });
    CHECK(faults == std::vector<int>(2));
    CHECK(steps == std::vector<int>(2, 4 * 3));
    m.synchronise();
    CHECK(m.parameters[0] == m.parameters[1]);
    CHECK(m.parameters[0][0] == 4 * (-8 - 2 * 4));
}

TEST_CASE("a rank has no other step where all have joined, and has one as soon as somebody begins", "[gradient]") {
    gs::detail::step_ledger ledger(3);
    ledger.joins(0);
    CHECK(ledger.another(0) == std::nullopt);
    ledger.joins(1);
    ledger.joins(1);
    ledger.begins(1);  // as a rank that has joined does, for others
    CHECK(ledger.another(0) == std::nullopt);
    ledger.begins(2);
    CHECK(ledger.another(0) == true);
    CHECK_FALSE(ledger.has_next(0));
    ledger.combined();
    CHECK(ledger.has_next(0));
    for (std::uint32_t r = 0; r < 3; ++r) ledger.goes_on(r);
    CHECK_FALSE(ledger.has_next(0));
    CHECK(ledger.another(1) == std::nullopt);
    ledger.joins(2);
    CHECK(ledger.another(1) == false);
    ledger.begins(1);  // a step of the next epoch, before the others have looked
    CHECK(ledger.another(0) == false);
    CHECK(ledger.another(2) == false);
    ledger.joins(0);
    CHECK(ledger.another(0) == true);
}

TEST_CASE("a rank that doesn't come in time is named to all, with its gradient", "[cuda][gradient]") {
    {
        machine m(1ms);
        m.add(0);
        m.compute_all(0, 1);
        CHECK(m.steps.wait(0, m.handle(0)) ==
              gs::collective_fault{errc::deadline_exceeded, gs::collective_kind::all_reduce, 1, 1});
    }
    machine late(1ms);
    late.add(0);
    late.add(1);
    late.compute_all(0, 1);
    late.compute(1, 4, 1);
    CHECK(late.steps.stalled() == std::pair<std::string, std::uint32_t>("f1", 1));
    CHECK(late.steps.wait(0, late.handle(0)).rank == 1);
    CHECK(late.steps.wait(1, late.handle(1)).code == errc::deadline_exceeded);
    CHECK(late.steps.another(1));  // and the step says so
}

TEST_CASE("a gradient that is ready twice in a step is a fault of its rank", "[cuda][gradient]") {
    machine twice;
    twice.add(0);
    twice.add(1);
    twice.compute(1, 3, 1);
    twice.compute(1, 3, 1);
    CHECK(twice.steps.wait(0, twice.handle(0)).code == errc::in_flight);
    CHECK(twice.steps.wait(0, twice.handle(0)).rank == 1);
}

TEST_CASE("a rank whose stream can't wait for a step is named to the others", "[cuda][gradient]") {
    machine m;
    m.add(0);
    m.add(1);
    for (std::uint32_t r = 0; r < 2; ++r) m.compute_all(r, 2);
    standin::inject({.call = "cudaStreamWaitEvent", .code = cudaErrorInvalidValue});
    CHECK_THROWS_AS(m.steps.wait(0, m.handle(0)), gs::operation_error);
    CHECK(m.steps.wait(1, m.handle(1)).code == errc::submission_failed);
    CHECK(m.steps.wait(1, m.handle(1)).rank == 0);
}

TEST_CASE("a step says what the engine answers, and that training was stopped", "[cuda][gradient]") {
    const auto [answer, expected] =
        GENERATE(std::pair(errc::too_many_blocks, errc::too_many_blocks), std::pair(errc::none, errc::stopped));
    machine m;
    m.answer = answer;
    m.add(0);
    m.add(1);
    if (answer == errc::none) m.steps.end(errc::stopped, 0);
    for (std::uint32_t r = 0; r < 2; ++r) m.compute_all(r, 1);
    for (std::uint32_t r = 0; r < 2; ++r) CHECK(m.steps.wait(r, m.handle(r)).code == expected);
}

TEST_CASE("a parameter that doesn't fit the other ranks is refused by name", "[cuda][gradient]") {
    machine m;
    m.add(0);
    const auto refused = [&](std::uint32_t r, std::vector<device_gradient> some, void* stream) {
        return support::refusal_of([&] { m.steps.add(r, std::move(some), stream); });
    };
    CHECK_THAT(refused(0, m.registered(0), m.handle(0)), Contains(std::string(to_string(errc::invalid_specification))));
    CHECK_THAT(refused(2, m.registered(1), m.handle(1)), Contains(std::string(to_string(errc::invalid_specification))));
    auto other = m.registered(1);
    other[3].count = 9;
    CHECK_THAT(refused(1, other, m.handle(1)),
               Contains(std::string(to_string(errc::mismatch))) && Contains("h1: another rank has other parameters"));
    other = m.registered(1);
    other.pop_back();
    CHECK_THAT(refused(1, other, m.handle(1)), Contains("f2: another rank has other parameters"));
    other = m.registered(1);
    other[0].type = gs::detail::gradient_type::f64;
    CHECK_THAT(refused(1, other, m.handle(1)),
               Contains(std::string(to_string(errc::not_supported))) && Contains("f0: a type"));
    CHECK_THAT(refused(1, m.registered(1), nullptr), Contains("default stream"));
    m.add(1);  // nothing of this is left
    for (std::uint32_t r = 0; r < 2; ++r) m.compute_all(r, 1);
    CHECK_FALSE(m.steps.wait(1, m.handle(1)));
    std::vector<cuda::stream> three;
    for (int i = 0; i < 3; ++i) three.push_back(m.node.make_stream(gs::device_id{0}));
    CHECK_THROWS_AS(steps_type(m.node, std::span(three), 2, combine_on{nullptr, nullptr, nullptr}, 1_MiB, 1s),
                    gs::operation_error);
}

}  // namespace device_steps_test
