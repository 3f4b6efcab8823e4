// SPDX-License-Identifier: Apache-2.0
// While one rank waits for other processes, calls of the other ranks answer: queries, ready
// gradients, and a stop, which ends that wait. A gate stands for the other processes.
#include <gpushare/gradient/detail/device_steps.hpp>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>

#include "support/average_of_two.hpp"
#include "support/catch.hpp"

namespace device_steps_threads_test {

namespace gs = gpushare;
using namespace std::chrono_literals;
using gs::collective_fault;
using gs::errc;

namespace {

/// Other processes, for which calls wait while it is shut.
class gate {
public:
    void shut() {
        const std::scoped_lock lock(mutex_);
        open_ = false;
    }
    void open() {
        const std::scoped_lock lock(mutex_);
        open_ = true;
        changed_.notify_all();
    }
    /// False if nobody came for so long that something hangs.
    [[nodiscard]] bool await_caller() {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, 5min, [&] { return inside_; });
    }
    /// A call: ends with the gate, or with a fault.
    [[nodiscard]] collective_fault pass() {
        std::unique_lock lock(mutex_);
        inside_ = true;
        changed_.notify_all();
        hangs_ = !changed_.wait_for(lock, 5min, [&] { return open_ || asked_; }) || hangs_;
        inside_ = false;
        ++passed_;
        if (asked_ && !fault_) fault_ = asked_;
        return fault_;
    }
    void interrupt(const collective_fault& why) {
        const std::scoped_lock lock(mutex_);
        asked_ = why;
        changed_.notify_all();
    }
    void end(const collective_fault& why) {
        const std::scoped_lock lock(mutex_);
        beside_ = beside_ || inside_;
        ends_.push_back(why);
    }
    [[nodiscard]] collective_fault fault() const { return fault_; }
    [[nodiscard]] std::vector<collective_fault> ends() const { return ends_; }
    [[nodiscard]] bool hangs() const { return hangs_; }    ///< a call waited for too long
    [[nodiscard]] bool beside() const { return beside_; }  ///< an end came in the middle of a call
    [[nodiscard]] int passed() const { return passed_; }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool open_ = true, inside_ = false, hangs_ = false, beside_ = false;
    int passed_ = 0;
    collective_fault asked_{}, fault_{};
    std::vector<collective_fault> ends_;
};

struct combine_by_gate {
    gate* others;
    gs::host::stream* on;
    template <class T>
    errc operator()(gs::device_buckets<T>& buckets) const {
        const std::vector<T*> none(2);
        return buckets.advance(std::span(on, 1), none, [this](auto, auto outs, std::size_t n, gs::average) {
            if (const auto f = others->pass()) return f.code;
            on->launch({}, support::average_of_two<T>{outs[0], outs[1], n});
            return errc::none;
        });
    }
    [[nodiscard]] collective_fault agree_on(std::uint64_t) const { return others->pass(); }
    void end(errc why, std::uint32_t rank) const { others->end(of_rank(why, rank)); }
    void interrupt(errc why, std::uint32_t rank) const { others->interrupt(of_rank(why, rank)); }
    [[nodiscard]] collective_fault fault() const { return others->fault(); }
    [[nodiscard]] std::uint32_t first() const { return first_rank; }
    static constexpr std::uint32_t first_rank = 6;
    [[nodiscard]] static collective_fault of_rank(errc why, std::uint32_t rank) {
        return {why, gs::collective_kind::all_reduce, first_rank + rank, 1};
    }
};

constexpr std::size_t each = 8;
constexpr std::uint32_t gradients = 4;  // the last one is the first bucket
using found = std::pair<std::string, std::uint32_t>;

/// Two ranks of a process whose every gradient is a bucket.
struct machine {
    explicit machine(gs::ns patience = 60s)  // else a bug hangs
        : steps(node, std::span(&combining, 1), 2, combine_by_gate{&others, &combining},
                gs::bytes{each * sizeof(float)}, patience) {
        for (std::uint32_t r = 0; r < 2; ++r) {
            training.push_back(node.make_stream(gs::device_id{0}));
            of_ranks[r].assign(gradients * each, static_cast<float>(2 + 4 * r));
        }
    }
    void add(std::uint32_t r) {
        std::vector<gs::detail::device_gradient> mine;
        for (std::size_t g = 0; g < gradients; ++g)
            mine.push_back({"g" + std::to_string(g), gs::detail::gradient_type::f32, &of_ranks[r][g * each], each});
        steps.add(r, std::move(mine), &training[r]);
    }
    void ready(std::uint32_t r, std::uint32_t g) { steps.ready(r, g, &training[r]); }
    [[nodiscard]] collective_fault wait(std::uint32_t r) { return steps.wait(r, &training[r]); }
    /// Both ranks are there, and the last gradient is ready in both. Rank 0 brought it, and waits
    /// for the other processes in the thread that is returned.
    [[nodiscard]] std::jthread first_waits() {
        add(0);
        add(1);
        ready(1, 3);
        others.shut();
        std::jthread waits([this] { ready(0, 3); });
        REQUIRE(others.await_caller());
        return waits;
    }
    /// How many elements of rank r aren't the average.
    [[nodiscard]] int wrong(std::uint32_t r) {
        training[r].record().wait(gs::never);
        int n = 0;
        for (const float x : of_ranks[r]) n += x == 4 ? 0 : 1;
        return n;
    }

    gate others;
    std::vector<float> of_ranks[2];
    gs::host::node node{{.devices = 1, .sms = 2}};
    gs::host::stream combining = node.make_stream(gs::device_id{0});
    std::vector<gs::host::stream> training{};
    gs::detail::device_steps<gs::host::node, combine_by_gate, float> steps;
};

}  // namespace

TEST_CASE("ranks go on while one of them waits for another process", "[gradient]") {
    machine m;
    std::jthread waits = m.first_waits();
    CHECK(m.steps.stalled() == found("g2", 0));
    m.ready(1, 2);  // noted
    m.ready(1, 0);
    CHECK(m.steps.stalled() == found("g2", 0));
    m.ready(1, 1);
    m.others.open();
    waits.join();
    CHECK_FALSE(m.others.hangs());
    for (const std::uint32_t g : {0U, 1U, 2U}) m.ready(0, g);
    CHECK_FALSE(m.wait(0));
    CHECK_FALSE(m.wait(1));
    CHECK(m.wrong(0) + m.wrong(1) == 0);
    CHECK(m.steps.stalled() == std::nullopt);
}

TEST_CASE("the rank that waits combines what has become ready meanwhile", "[gradient]") {
    machine m;
    m.add(0);
    m.add(1);
    for (const std::uint32_t g : {3U, 2U, 1U}) m.ready(0, g);
    m.ready(0, 0);
    m.others.shut();
    std::jthread waits([&] { m.ready(1, 3); });
    REQUIRE(m.others.await_caller());
    CHECK(m.steps.stalled() == found("g2", 1));
    m.others.open();
    waits.join();
    m.others.shut();
    std::jthread again([&] { m.ready(1, 2); });
    REQUIRE(m.others.await_caller());
    m.ready(1, 1);  // back before its bucket is combined
    m.ready(1, 0);
    CHECK(m.steps.stalled() == std::nullopt);
    m.others.open();
    CHECK_FALSE(m.wait(0));
    CHECK_FALSE(m.wait(1));
    again.join();
    CHECK_FALSE(m.others.hangs());
    CHECK(m.wrong(0) + m.wrong(1) == 0);
    CHECK(m.others.passed() == 1 + static_cast<int>(gradients));  // the comparison, and a bucket of each
}

TEST_CASE("an end answers while a rank waits for another process, and ends that wait", "[gradient]") {
    machine m;
    std::jthread waits = m.first_waits();
    m.steps.end(errc::stopped, 1);
    CHECK(m.wait(1).code == errc::stopped);
    CHECK(m.wait(1).rank == combine_by_gate::first_rank + 1);
    waits.join();
    CHECK(m.wait(0) == m.wait(1));
    CHECK_FALSE(m.steps.another(0) == false);  // and the step says so
    CHECK_FALSE(m.others.hangs());
    CHECK_FALSE(m.others.beside());
    CHECK(m.others.ends() == std::vector{m.wait(0)});  // once, by the one that was away
}

TEST_CASE("the other processes are told once of what ends a step here", "[gradient]") {
    machine m;
    m.add(0);
    m.add(1);
    m.steps.end(errc::stopped, 0);
    m.steps.end(errc::not_supported, 1);
    m.ready(1, 3);
    CHECK(m.wait(1).code == errc::stopped);
    CHECK(m.others.ends() == std::vector{m.wait(1)});
}

TEST_CASE("an end answers while the last rank registers with other processes, and ends that", "[gradient]") {
    machine m;
    m.add(0);
    m.ready(0, 3);
    m.others.shut();
    errc thrown = errc::none;
    std::jthread registers([&] {
        try {
            m.add(1);
        } catch (const gs::operation_error& e) {
            thrown = e.code();
        }
    });
    REQUIRE(m.others.await_caller());
    m.ready(0, 2);
    m.steps.end(errc::stopped, 0);
    CHECK(m.wait(0).code == errc::stopped);
    registers.join();
    CHECK(thrown == errc::stopped);
    CHECK_FALSE(m.others.hangs());
    CHECK(m.others.ends().size() == 1);
}

TEST_CASE("the time in which one waits for another process isn't the ranks' here", "[gradient]") {
    machine m(1ms);
    m.add(0);
    m.add(1);
    for (const std::uint32_t g : {3U, 2U, 1U}) m.ready(0, g);
    m.ready(0, 0);
    for (const std::uint32_t g : {3U, 2U, 1U}) m.ready(1, g);
    m.others.shut();
    std::jthread waits([&] { m.ready(1, 0); });
    REQUIRE(m.others.await_caller());
    collective_fault seen{};
    std::jthread patient([&] { seen = m.wait(0); });
    std::this_thread::sleep_for(50ms);  // long enough for who counts it, mostly
    m.others.open();
    patient.join();
    waits.join();
    CHECK_FALSE(seen);
    CHECK_FALSE(m.wait(1));
}

}  // namespace device_steps_threads_test
