// SPDX-License-Identifier: Apache-2.0
// Tags: slow
// Buckets: plans, the same bits however gradients are fused, the tuner's choice, and formats on the
// wire.
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/gradient/bucket_plan.hpp>
#include <gpushare/gradient/buckets.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/wire.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "conformance/transport_suite.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/leaks.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace buckets_test {

namespace gs = gpushare;
using namespace gs::literals;
using namespace std::chrono_literals;

TEST_CASE("a plan has each gradient once, in order, and no bucket above the limit but of one", "[gradient][buckets]") {
    const auto seed = support::seed(GENERATE(range(1U, 20U)));
    CAPTURE(seed);
    support::random any(seed);
    std::vector<std::size_t> sizes(any.below(60));
    for (auto& s : sizes) s = any.below(1000);
    auto order = gs::bucket_plan::backward_order(sizes.size());
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[any.below(i)]);
    const gs::bytes limit{any.below(3000)};
    const gs::bucket_plan plan(sizes, order, limit);
    std::vector<std::uint32_t> all;
    std::uint64_t before = 0;
    for (std::uint32_t b = 0; b < plan.size(); ++b) {
        std::uint64_t filled = 0;
        REQUIRE_FALSE(plan.gradients(b).empty());
        for (const auto g : plan.gradients(b)) {
            all.push_back(g);
            filled += sizes[g];
            CHECK(plan.bucket_of(g) == b);
        }
        CHECK((filled <= limit.count() || plan.gradients(b).size() == 1));
        CHECK(std::ranges::is_sorted(plan.gradients(b)));
        // The first in the order wouldn't have fitted into the one before.
        const std::size_t first = all.size() - plan.gradients(b).size();
        if (b != 0) CHECK(before + sizes[order[first]] > limit.count());
        before = filled;
        // The next ones in the order, and no others.
        std::vector<std::uint32_t> next(order.begin() + static_cast<std::ptrdiff_t>(first),
                                        order.begin() + static_cast<std::ptrdiff_t>(all.size()));
        std::ranges::sort(next);
        CHECK(std::ranges::equal(next, plan.gradients(b)));
    }
    CHECK(all.size() == order.size());
    CHECK(std::ranges::equal(plan.order(), order));
}

TEST_CASE("an order that isn't one of these gradients is refused", "[gradient][buckets]") {
    const std::vector<std::size_t> sizes{1, 2, 3};
    for (const std::vector<std::uint32_t>& order :
         {std::vector<std::uint32_t>{0, 1}, {0, 1, 1}, {0, 1, 3}, {0, 1, 2, 2}})
        CHECK(support::code_of([&] { gs::bucket_plan(sizes, order, 1_KiB); }) == gs::errc::invalid_specification);
}

struct model {
    explicit model(std::uint32_t rank, const std::vector<std::size_t>& sizes) {
        for (const auto n : sizes) {
            gradients.emplace_back(n);
            for (std::size_t i = 0; i < n; ++i)
                gradients.back()[i] = conformance::odd_value(rank, i + gradients.size());
        }
    }
    std::vector<std::vector<float>> gradients;
};

/// What the ranks have after a step, fused as `choice` says, with readiness in an order of its own
/// on each rank.
std::vector<std::vector<std::vector<float>>> stepped(std::uint32_t ranks, const std::vector<std::size_t>& sizes,
                                                     const gs::bucket_choice& choice, gs::algorithm how,
                                                     std::uint64_t seed) {
    gs::communicator group(ranks, {.channels = choice.in_flight, .tuning = gs::tuning_table::always(how)});
    std::vector<std::vector<std::vector<float>>> all(ranks);
    support::together(ranks, [&](unsigned r) {
        model mine(r, sizes);
        gs::gradient_buckets<> buckets(choice);
        for (auto& g : mine.gradients) buckets.add("g", g);
        std::vector<std::jthread> communicating;
        for (std::uint32_t c = 0; c < choice.in_flight; ++c)
            communicating.emplace_back([&, c] {
                gs::thread_transport net(group.rank(r, c));
                (void)buckets.reduce(net, gs::average{}, gs::ns::max(), c);
            });
        support::random any(seed + r);
        std::vector<std::uint32_t> order = gs::bucket_plan::backward_order(sizes.size());
        for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[any.below(i)]);
        for (const auto g : order) (void)buckets.ready(g);
        if (buckets.wait()) return;
        communicating.clear();
        all[r] = mine.gradients;
    });
    return all;
}

TEST_CASE("bits are the same for every bucket size, number of channels and algorithm", "[gradient][buckets]") {
    const auto seed = support::seed(GENERATE(range(1U, 6U)));
    CAPTURE(seed);
    support::random any(seed);
    const auto ranks = static_cast<std::uint32_t>(1 + any.below(4));
    std::vector<std::size_t> sizes(1 + any.below(30));
    for (auto& n : sizes) n = any.one_in(3) ? any.below(4000) : 1 + any.below(50);
    // One element after the other, in the order of ranks.
    std::vector<std::vector<float>> expected;
    for (std::size_t g = 0; g < sizes.size(); ++g) {
        expected.emplace_back(sizes[g]);
        for (std::size_t i = 0; i < sizes[g]; ++i) {
            float sum = conformance::odd_value(0, i + g + 1);
            for (std::uint32_t r = 1; r < ranks; ++r) sum += conformance::odd_value(r, i + g + 1);
            expected[g][i] = sum / static_cast<float>(ranks);
        }
    }
    for (const gs::bytes bucket : {0_B, 100_B, 4_KiB, 1_MiB})
        for (const std::uint32_t in_flight : {1U, 3U})
            for (const gs::algorithm how : {gs::algorithm::one_shot, gs::algorithm::two_shot, gs::algorithm::ring}) {
                const auto all = stepped(ranks, sizes, {bucket, in_flight}, how, seed);
                for (const auto& of_rank : all) CHECK(of_rank == expected);
            }
}

TEST_CASE("many steps, a new choice and a new order between them", "[gradient][buckets]") {
    constexpr std::uint32_t ranks = 2;
    const gs::communicator group(ranks);
    std::vector<std::string> wrong(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        std::vector<std::vector<float>> mine(7, std::vector<float>(50));
        gs::gradient_buckets<> buckets({1_KiB, 1});
        for (auto& g : mine) buckets.add("layer " + std::to_string(&g - mine.data()), g);
        for (int step = 0; step < 30; ++step) {
            for (auto& g : mine) std::fill(g.begin(), g.end(), static_cast<float>(step + static_cast<int>(r)));
            for (std::uint32_t g = 0; g < 7; ++g) (void)buckets.ready((g * 3 + static_cast<std::uint32_t>(step)) % 7);
            if (buckets.reduce(net) || buckets.wait()) wrong[r] = "a fault";
            for (const auto& g : mine)
                for (const float x : g)
                    if (x != static_cast<float>(step) + 0.5F) wrong[r] = "a wrong element";
            if (step == 10) buckets.arrange(gs::bucket_choice{gs::bytes{300}, 1});
            if (step == 20) {
                if (buckets.adopt_order(net)) wrong[r] = "no order";
                // As they came in that step.
                if (buckets.plan().order()[1] != (3 + 20) % 7) wrong[r] = "not that order";
            }
        }
        if (buckets.plan().size() != 7) wrong[r] = "not those buckets";  // of 200 bytes each: two don't fit into 300
    });
    CHECK(wrong == std::vector<std::string>(ranks));
}

TEST_CASE("the number of buckets in flight is tuned online, while threads are in reduce()", "[gradient][buckets]") {
    constexpr std::uint32_t ranks = 2, channels = 4;
    const bool sharded = GENERATE(false, true);
    const gs::communicator group(ranks, {.channels = channels});
    std::vector<std::string> wrong(ranks);
    std::vector<gs::bucket_choice> settled(ranks);
    support::together(ranks, [&](unsigned r) {
        std::vector<std::vector<float>> mine(9, std::vector<float>(700));
        gs::gradient_buckets<> buckets({1_KiB, 1}, channels);
        for (auto& g : mine) buckets.add("", g);
        std::vector<std::jthread> communicating;
        for (std::uint32_t c = 0; c < channels; ++c)
            communicating.emplace_back([&, c] {
                gs::thread_transport net(group.rank(r, c));
                const auto again = [&] {
                    return sharded ? buckets.reduce_scatter(net, gs::average{}, 60s, c)
                                   : buckets.reduce(net, gs::average{}, 60s, c);
                };
                while (!again()) {
                }
            });
        gs::bucket_tuner tuner(buckets.choice(), channels);
        std::uint32_t most = 0;
        for (int step = 0; step < 60; ++step) {
            buckets.arrange(tuner.choice());
            most = std::max(most, buckets.choice().in_flight);
            for (auto& g : mine) std::fill(g.begin(), g.end(), static_cast<float>(step + static_cast<int>(r)));
            for (std::uint32_t g = 9; g > 0; --g) (void)buckets.ready(g - 1);
            if (buckets.wait()) wrong[r] = "a fault";
            const auto kept = sharded ? gs::shard_of(700, r, ranks) : gs::element_range{0, 700};
            for (const auto& g : mine)
                for (std::size_t i = kept.begin; i < kept.end; ++i)
                    if (g[i] != static_cast<float>(step) + 0.5F) wrong[r] = "a wrong element";
            // As if each channel halved a step, and large buckets too: the same on both ranks.
            const auto& c = buckets.choice();
            tuner.step_took(
                gs::ns(100'000'000 / c.in_flight + 4'000'000'000 / static_cast<std::int64_t>(c.bucket.count())));
        }
        if (most != channels) wrong[r] = "never as many as there are";
        settled[r] = tuner.choice();
        buckets.stop();
    });
    CHECK(wrong == std::vector<std::string>(ranks));
    CHECK(settled[0].in_flight == channels);
    CHECK(settled[0] == settled[1]);
}

/// Says when its rank has begun to combine a list.
struct heard_transport : gs::thread_transport {
    heard_transport(const gs::member& me, std::atomic<bool>& flag) noexcept
        : gs::thread_transport(me), entered(&flag) {}
    template <class List, class Op>
    gs::collective_fault all_reduce_list(const List& list, const Op& op, gs::instant deadline, bool* finite = nullptr) {
        *entered = true;
        return gs::thread_transport::all_reduce_list(list, op, deadline, finite);
    }
    std::atomic<bool>* entered;
};

TEST_CASE("a gradient that never comes is named, and nobody waits for it beyond the deadline", "[gradient][buckets]") {
    const gs::communicator group(2);
    std::vector<gs::collective_fault> faults(2);
    std::vector<gs::errc> taken(2, gs::errc::mismatch);
    std::vector<std::string> stalled(2);
    std::vector<std::atomic<bool>> entered(2);
    support::together(2, [&](unsigned r) {
        heard_transport net(group.rank(r), entered[r]);
        std::vector<float> a(3), b(3);
        gs::gradient_buckets<> buckets({0_B, 1});
        buckets.add("embedding", a);
        buckets.add("head", b);
        while (r == 1 && !entered[0]) std::this_thread::yield();  // no patience for that
        taken[r] = buckets.ready(1);
        if (r == 0) (void)buckets.ready(0);
        faults[r] = buckets.reduce(net, gs::average{}, r == 0 ? gs::ns(5min) : gs::ns(2s));
        stalled[r] = buckets.stalled().value_or("nothing");
        if (buckets.wait(std::chrono::steady_clock::now() + 5min).rank != 1)
            stalled[r] += ", and wait() says otherwise";
    });
    CHECK(taken == std::vector(2, gs::errc::none));
    for (const auto& f : faults) {
        CHECK(f.code == gs::errc::deadline_exceeded);
        CHECK(f.rank == 1);
    }
    CHECK(stalled[0] == "nothing");
    CHECK(stalled[1] == "embedding");
}

TEST_CASE("a channel that waits for another one of its rank blames that rank for nothing", "[gradient][buckets]") {
    const gs::communicator group(2, {.channels = 2});
    std::vector<gs::collective_fault> faults(2);
    support::together(2, [&](unsigned r) {
        std::vector<float> a(3), b(3);
        gs::gradient_buckets<> buckets({0_B, 2}, 2);
        buckets.add("embedding", a);
        buckets.add("head", b);
        (void)buckets.ready(1);
        if (r == 0) (void)buckets.ready(0);  // rank 1 lacks it, which goes on channel 1
        std::atomic<bool> entered{false};
        const auto reduce = [&](std::uint32_t channel, gs::ns patience) {
            heard_transport net(group.rank(r, channel), entered);
            while (!buckets.reduce(net, gs::average{}, patience, channel)) {
            }
        };
        const std::jthread late([&] { reduce(1, r == 0 ? gs::ns(800ms) : gs::ns(1500ms)); });
        // On rank 0 the early channel's patience is for a channel that is with the other rank.
        while (r == 0 && !entered) std::this_thread::yield();
        // On rank 1 it waits for that of rank 0, however late that one begins.
        const std::jthread early([&] { reduce(0, r == 0 ? gs::ns(50ms) : gs::ns(60s)); });
        faults[r] = buckets.wait(std::chrono::steady_clock::now() + 60s);
    });
    for (const auto& f : faults) {
        CHECK(f.code == gs::errc::deadline_exceeded);
        CHECK(f.rank == 1);
    }
}

TEST_CASE("patience begins with the step's first gradient, not with the call", "[gradient][buckets]") {
    const gs::communicator group(1);
    std::vector<float> a(3, 1.0F);
    gs::gradient_buckets<> buckets;
    buckets.add("a", a);
    gs::collective_fault fault;
    std::jthread communicates([&] {
        gs::thread_transport net(group.rank(0));
        fault = buckets.reduce(net, gs::sum{}, 20ms);
    });
    std::this_thread::sleep_for(200ms);  // the forward pass
    CHECK(buckets.ready(0) == gs::errc::none);
    CHECK_FALSE(buckets.wait());
    communicates.join();
    CHECK_FALSE(fault);
}

TEST_CASE("a rank that waits without all its gradients learns which one isn't there", "[gradient][buckets]") {
    const gs::communicator group(1);
    std::vector<float> a(3), b(3);
    gs::gradient_buckets<> buckets;
    buckets.add("a", a);
    buckets.add("b", b);
    std::jthread communicates([&] {
        gs::thread_transport net(group.rank(0));
        (void)buckets.reduce(net, gs::sum{}, 20ms);
    });
    if (GENERATE(false, true)) (void)buckets.ready(1);  // or none at all
    CHECK(buckets.wait(std::chrono::steady_clock::now() + 60s).code == gs::errc::deadline_exceeded);
    communicates.join();
    CHECK(buckets.stalled().has_value());
}

/// Throws in its `at`th all-reduce.
template <class Exception>
struct throwing_transport : gs::thread_transport {
    throwing_transport(const gs::member& me, int at, Exception what)
        : gs::thread_transport(me), left(at), thrown(what) {}
    template <class List, class Op>
    gs::collective_fault all_reduce_list(const List& list, const Op& op, gs::instant deadline) {
        if (--left == 0) throw thrown;
        return gs::thread_transport::all_reduce_list(list, op, deadline);
    }
    template <class T, class Op>
    gs::collective_fault all_reduce(std::span<const T> in, std::span<T> out, const Op& op, gs::instant deadline) {
        if (--left == 0) throw thrown;
        return gs::thread_transport::all_reduce(in, out, op, deadline);
    }
    int left;
    Exception thrown;
};

template <class Exception>
void check_throwing(Exception what, gs::errc code) {
    const auto wire = GENERATE(gs::wire_format::as_is, gs::wire_format::bf16);
    const gs::communicator group(3);
    std::vector<std::string> wrong(3);
    support::together(3, [&](unsigned r) {
        std::vector<float> a(3), b(5);
        gs::gradient_buckets<> buckets({0_B, 1});
        buckets.add("a", a, {.wire = wire, .error_feedback = true});
        buckets.add("b", b, {.wire = wire, .error_feedback = true});
        gs::collective_fault end;
        std::jthread communicates([&] {
            throwing_transport net(group.rank(r), r == 1 ? 6 : -1, what);  // the second bucket of the third step
            while (!(end = buckets.reduce(net, gs::sum{}))) {
            }
            if (buckets.reduce(net, gs::sum{}).code != code) wrong[r] = "it isn't closed";
        });
        std::vector<float> owed;
        for (int step = 0; step < 3; ++step) {
            owed.assign(buckets.owed(0).begin(), buckets.owed(0).end());
            std::fill(a.begin(), a.end(), 1 + 0x1p-9F * static_cast<float>(r + 1));
            std::fill(b.begin(), b.end(), 1.0F);
            (void)buckets.ready(0);
            (void)buckets.ready(1);
            const auto fault = buckets.wait(std::chrono::steady_clock::now() + 60s);
            if (fault.code != (step < 2 ? gs::errc::none : code)) wrong[r] = "another fault";
            if (fault && fault.rank != 1) wrong[r] = "another rank";
        }
        communicates.join();
        if (end.code != code || end.rank != 1) wrong[r] = "reduce() says something else";
        if (!std::equal(owed.begin(), owed.end(), buckets.owed(0).begin(), buckets.owed(0).end()))
            wrong[r] = "what was owed is lost";
        if (owed.size() != (wire == gs::wire_format::as_is ? 0U : 3U)) wrong[r] = "nothing was owed";
    });
    CHECK(wrong == std::vector<std::string>(3));
}

TEST_CASE("a transport that throws is a fault of its rank, on all ranks, and what is owed stays",
          "[gradient][buckets]") {
    SECTION("an error of this library") {
        check_throwing(gs::operation_error(gs::errc::io_failed, {}, "a transport"), gs::errc::io_failed);
    }
    SECTION("no memory") { check_throwing(std::bad_alloc(), gs::errc::out_of_memory); }
    SECTION("anything") { check_throwing(7, gs::errc::backend_failed); }
}

/// Throws in its all-reduce, and can't give it up.
struct stuck_transport : gs::thread_transport {
    using gs::thread_transport::thread_transport;
    template <class T, class Op>
    gs::collective_fault all_reduce(std::span<const T>, std::span<T> out, const Op&, gs::instant) {
        kept = std::as_writable_bytes(out);
        throw 7;
    }
    gs::collective_fault barrier(gs::instant) const {
        return {gs::errc::aborted, gs::collective_kind::barrier, 0, 0, true};
    }
    std::span<std::byte> kept;
};

TEST_CASE("buffers that a transport may still touch are reported, and outlive the buckets", "[gradient][buckets]") {
    const support::leaks_are_meant here;
    const gs::communicator group(1);
    stuck_transport net(group.rank(0));
    std::vector<float> a(100, 1.0F);
    {
        gs::gradient_buckets<> buckets;
        buckets.add("a", a, {.wire = gs::wire_format::bf16});
        (void)buckets.ready(0);
        CHECK(buckets.reduce(net).buffers_in_use);
        CHECK(buckets.wait().buffers_in_use);
    }
    REQUIRE(net.kept.size() == 200);
    std::ranges::fill(net.kept, std::byte{1});  // what AddressSanitizer would refuse
}

TEST_CASE("a step that begins while the one before is under way is a fault on all ranks", "[gradient][buckets]") {
    const gs::communicator group(2);
    std::vector<gs::collective_fault> faults(2);
    std::atomic<bool> tried{false};
    support::together(2, [&](unsigned r) {
        std::vector<float> a(3), b(3);
        gs::gradient_buckets<> buckets({0_B, 1});
        buckets.add("a", a);
        buckets.add("b", b);
        std::jthread communicates([&] {
            gs::thread_transport net(group.rank(r));
            while (!buckets.reduce(net, gs::sum{})) {
            }
        });
        while (r == 1 && !tried.load()) std::this_thread::yield();
        (void)buckets.ready(1);
        (void)buckets.ready(0);
        if (r == 0) {
            while (buckets.ready(1) == gs::errc::mismatch) std::this_thread::yield();  // until a thread is in reduce()
            tried = true;
        }
        faults[r] = buckets.wait(std::chrono::steady_clock::now() + 60s);
        if (!faults[r]) faults[r] = buckets.wait(std::chrono::steady_clock::now() + 60s);  // it had been over
    });
    for (const auto& f : faults) {
        CHECK(f.code == gs::errc::in_flight);
        CHECK(f.rank == 0);
    }
}

/// Its all-reduce lasts until `let_go`.
struct slow_transport : gs::thread_transport {
    using gs::thread_transport::thread_transport;
    template <class List, class Op>
    gs::collective_fault all_reduce_list(const List& list, const Op& op, gs::instant deadline, bool* finite = nullptr) {
        entered = true;
        let_go.wait(false);
        const auto fault = gs::thread_transport::all_reduce_list(list, op, deadline, finite);
        left = true;
        return fault;
    }
    std::atomic<bool> entered{false}, let_go{false}, left{false};
};

TEST_CASE("a fault of one channel ends waiting for every step, when the other channel is in the next one",
          "[gradient][buckets]") {
    const gs::communicator group(1, {.channels = 2});
    throwing_transport fails(group.rank(0, 0), 1, gs::operation_error(gs::errc::io_failed, {}, "a transport"));
    gs::thread_transport idle(group.rank(0, 1));
    std::vector<float> a(3), b(3);
    gs::gradient_buckets<> buckets({0_B, 1}, 2);  // the second channel has no buckets
    buckets.add("a", a);
    buckets.add("b", b);
    CHECK(buckets.ready(1) == gs::errc::none);
    CHECK_FALSE(buckets.reduce(idle, gs::average{}, gs::ns::max(), 1));
    CHECK(buckets.reduce(fails, gs::average{}, gs::ns::max(), 0).code == gs::errc::io_failed);
    CHECK(buckets.reduce(idle, gs::average{}, gs::ns::max(), 1).code == gs::errc::io_failed);
    CHECK(buckets.ready(0) == gs::errc::none);  // the backward pass goes on
    for (int i = 0; i < 3; ++i) CHECK(buckets.wait(std::chrono::steady_clock::now() + 10s).code == gs::errc::io_failed);
    CHECK(buckets.stalled() == std::nullopt);
}

TEST_CASE("a channel that waits for the next step waits for the other channels, however long they take",
          "[gradient][buckets]") {
    const gs::communicator group(1, {.channels = 2});
    slow_transport slow(group.rank(0, 0));
    std::vector<float> a(3);
    gs::gradient_buckets<> buckets({0_B, 1}, 2);
    buckets.add("a", a);
    gs::collective_fault first, next;
    std::jthread combines([&] { first = buckets.reduce(slow, gs::average{}, gs::ns::max(), 0); });
    CHECK(buckets.ready(0) == gs::errc::none);
    while (!slow.entered.load()) std::this_thread::yield();
    // Only now: before, its patience would be for the other channel's thread to begin.
    std::jthread waits([&] {
        gs::thread_transport net(group.rank(0, 1));
        while (!(next = buckets.reduce(net, gs::average{}, 1ms, 1))) {
        }
    });
    std::this_thread::sleep_for(100ms);  // many times the patience of the channel that waits
    slow.let_go = true;
    slow.let_go.notify_all();
    CHECK_FALSE(buckets.wait(std::chrono::steady_clock::now() + 60s));
    CHECK(slow.left.load());
    buckets.stop();
    combines.join();
    waits.join();
    CHECK_FALSE(first);
    CHECK(next.code == gs::errc::stopped);
}

TEST_CASE("after a fault nobody stops waiting while a transport has the gradients", "[gradient][buckets]") {
    const gs::communicator group(1);
    slow_transport slow(group.rank(0));
    std::vector<float> a(3);
    gs::gradient_buckets<> buckets;
    buckets.add("a", a);
    std::jthread communicates([&] { (void)buckets.reduce(slow); });
    CHECK(buckets.ready(0) == gs::errc::none);
    while (!slow.entered.load()) std::this_thread::yield();
    CHECK(buckets.ready(0) == gs::errc::in_flight);
    CHECK(buckets.wait(std::chrono::steady_clock::now()).code == gs::errc::deadline_exceeded);
    slow.let_go = true;
    slow.let_go.notify_all();
    CHECK(buckets.wait(std::chrono::steady_clock::now() + 60s).code == gs::errc::in_flight);
    CHECK(slow.left.load());
}

TEST_CASE("wait() is for the step that has begun, whether or not those before were waited for", "[gradient][buckets]") {
    const gs::communicator group(1);
    gs::thread_transport net(group.rank(0));
    std::vector<float> a(3);
    gs::gradient_buckets<> buckets;
    buckets.add("a", a);
    (void)buckets.ready(0);
    CHECK_FALSE(buckets.reduce(net));
    (void)buckets.ready(0);
    CHECK(buckets.wait(std::chrono::steady_clock::now() + 10ms).code == gs::errc::deadline_exceeded);
    CHECK_FALSE(buckets.reduce(net));
    CHECK_FALSE(buckets.wait());
}

TEST_CASE("a gradient that is ready twice or doesn't exist is refused and changes nothing", "[gradient][buckets]") {
    std::vector<float> a(3);
    gs::gradient_buckets<> buckets;
    buckets.add("a", a);
    CHECK(buckets.ready(1) == gs::errc::mismatch);
    CHECK(buckets.ready(0) == gs::errc::none);
    CHECK(buckets.ready(0) == gs::errc::mismatch);
    const gs::communicator group(1);
    gs::thread_transport net(group.rank(0));
    CHECK(buckets.reduce(net, gs::sum{}, gs::ns::max(), 1).code == gs::errc::invalid_specification);
    CHECK_FALSE(buckets.reduce(net));
    gs::gradient_buckets<double> of_doubles;
    std::vector<double> d(3);
    CHECK(support::code_of([&] { of_doubles.add("d", d, {.wire = gs::wire_format::fp16}); }) ==
          gs::errc::invalid_specification);
}

TEST_CASE("after a fault no step succeeds, and nobody waits for one", "[gradient][buckets]") {
    const gs::communicator group(1);
    gs::thread_transport net(group.rank(0));
    std::vector<float> a(3), b(3);
    gs::gradient_buckets<> buckets;
    buckets.add("a", a);
    buckets.add("b", b);
    CHECK(buckets.ready(1) == gs::errc::none);
    CHECK(buckets.reduce(net, gs::average{}, gs::ns(0)).code == gs::errc::deadline_exceeded);
    for (int i = 0; i < 3; ++i) {
        CHECK(buckets.wait(std::chrono::steady_clock::now() + 60s).code == gs::errc::deadline_exceeded);
        CHECK(buckets.stalled() == "a");
        CHECK(buckets.reduce(net).code == gs::errc::deadline_exceeded);
    }
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 3; ++i) CHECK(buckets.wait(begin + 60s));
    CHECK(std::chrono::steady_clock::now() < begin + 60s);
}

TEST_CASE("a thread that waits for the next step is let go, and the group goes on", "[gradient][buckets]") {
    const std::uint32_t channels = GENERATE(1U, 3U);  // of two buckets: one channel has none
    const gs::communicator group(2, {.channels = channels});
    std::vector<std::string> wrong(2);
    support::together(2, [&](unsigned r) {
        std::vector<float> a(3, 1.0F), b(3, 1.0F);
        gs::gradient_buckets<> buckets({0_B, channels});
        buckets.add("a", a);
        buckets.add("b", b);
        std::vector<gs::collective_fault> ends(channels);
        std::vector<std::jthread> communicate;
        for (std::uint32_t c = 0; c < channels; ++c)
            communicate.emplace_back([&, c] {
                gs::thread_transport net(group.rank(r, c));
                while (!(ends[c] = buckets.reduce(net, gs::sum{}, gs::ns::max(), c))) {
                }
            });
        for (int step = 0; step < 5; ++step) {
            (void)buckets.ready(0);
            (void)buckets.ready(1);
            if (buckets.wait()) wrong[r] = "a fault";
            if (step == 2) buckets.arrange({gs::bytes{100}, channels});  // while somebody is in reduce()
        }
        buckets.stop();
        communicate.clear();
        for (const auto& end : ends)
            if (end.code != gs::errc::stopped) wrong[r] = gs::describe(end).c_str();
        gs::thread_transport net(group.rank(r));
        if (net.barrier(gs::never) || a[2] != 32.0F) wrong[r] = "the group doesn't go on";
    });
    CHECK(wrong == std::vector<std::string>(2));
}

TEST_CASE("an order or a choice that is refused changes nothing", "[gradient][buckets]") {
    std::vector<float> a(3), b(3);
    gs::gradient_buckets<> buckets;
    buckets.add("a", a);
    buckets.add("b", b);
    const std::vector<std::uint32_t> twice{0, 0};
    CHECK(support::code_of([&] { buckets.arrange(twice); }) == gs::errc::invalid_specification);
    CHECK(support::code_of([&] { buckets.arrange(gs::bucket_choice{1_KiB, 0}); }) == gs::errc::invalid_specification);
    CHECK(support::code_of([&] { buckets.arrange(gs::bucket_choice{1_KiB, 2}); }) == gs::errc::invalid_specification);
    CHECK(support::code_of([] { gs::gradient_buckets<>({1_KiB, 0}); }) == gs::errc::invalid_specification);
    CHECK(gs::gradient_buckets<>({1_KiB, 3}).channels() == 3);
    CHECK(buckets.ready(0) == gs::errc::none);
    CHECK(buckets.plan().size() == 1);
}

TEMPLATE_TEST_CASE("NaN is seen in gradients of every type", "[gradient][wire]", float, double, gs::float16,
                   gs::bfloat16) {
    const gs::communicator group(1);
    gs::thread_transport net(group.rank(0));
    std::vector<TestType> a(3, static_cast<TestType>(1.0F));
    gs::gradient_buckets<TestType> buckets;
    buckets.add("a", a);
    for (const float x : {1.0F, std::nanf(""), 1.0F, std::numeric_limits<float>::infinity()}) {
        a[1] = static_cast<TestType>(x);
        (void)buckets.ready(0);
        CHECK_FALSE(buckets.reduce(net));
        CHECK(buckets.was_finite() == (x == 1.0F));
    }
}

/// A step costs its buckets' overheads and what isn't hidden behind computing: least somewhere in
/// the middle.
gs::ns modelled_step(const gs::bucket_choice& c, double best_mib, support::random& any) {
    const double mib = static_cast<double>(c.bucket.count()) / 1048576.0;
    const double us = 20'000 + 64.0 / mib * 40.0 * (best_mib / 4.0) + mib * 160.0 / static_cast<double>(c.in_flight);
    return gs::ns{static_cast<std::int64_t>(us * 1000.0 * (1.0 + static_cast<double>(any.below(100)) * 2e-5))};
}

TEST_CASE("the tuner is settled in 50 steps, within 5 % of the best choice, and never worse than the default",
          "[gradient][buckets]") {
    const auto seed = support::seed(GENERATE(range(1U, 12U)));
    CAPTURE(seed);
    support::random any(seed);
    const double best = static_cast<double>(1U << any.below(7)) / 4.0;
    const std::uint32_t most = static_cast<std::uint32_t>(1U << any.below(3));
    const gs::bucket_choice by_default{gs::bytes{std::uint64_t{1} << (18 + any.below(8))}, 1};
    gs::bucket_tuner tuner(by_default, most);
    while (!tuner.settled()) {
        REQUIRE(tuner.choice().in_flight <= most);
        tuner.step_took(modelled_step(tuner.choice(), best, any));
        REQUIRE(tuner.steps() <= gs::bucket_tuner::longest);
    }
    gs::ns least = gs::ns::max();
    for (std::uint64_t size = 1 << 17; size <= 1 << 26; size *= 2)
        for (std::uint32_t n = 1; n <= most; n *= 2)
            least = std::min(least, modelled_step({gs::bytes{size}, n}, best, any));
    const auto took = modelled_step(tuner.choice(), best, any);
    CHECK(took.count() <= least.count() * 105 / 100);
    CHECK(took.count() <= modelled_step(by_default, best, any).count() * 1003 / 1000);
    const auto loaded = gs::bucket_tuner::load(tuner.save(), 4);
    CHECK(loaded.settled());
    CHECK(loaded.choice() == tuner.choice());
}

TEST_CASE("if no choice makes a difference the tuner keeps the default", "[gradient][buckets]") {
    support::random any(support::seed(GENERATE(range(1U, 30U))));
    gs::bucket_tuner tuner({3_MiB, 1}, 4);
    while (!tuner.settled()) tuner.step_took(gs::ns{1'000'000 + static_cast<std::int64_t>(any.below(2000))});
    CHECK(tuner.choice() == gs::bucket_choice{3_MiB, 1});
}

TEST_CASE("a tuner never has more in flight than there are channels, nor has its default", "[gradient][buckets]") {
    const auto most = GENERATE(0U, 1U, 3U);
    gs::bucket_tuner tuner({3_MiB, 4}, most);
    while (!tuner.settled()) {
        REQUIRE(tuner.choice().in_flight <= std::max(most, 1U));
        tuner.step_took(gs::ns{1'000'000});
    }
    CHECK(tuner.choice() == gs::bucket_choice{3_MiB, std::max(most, 1U)});
}

TEST_CASE("a tuner's text that isn't one is refused", "[gradient][buckets]") {
    for (const char* text : {"", "bucket=1", "bucket=0 in_flight=1\n", "bucket=9 in_flight=0\n", "bucket=9 in_flight=1",
                             "bucket=9 in_flight=1\nx", "bucket=-9 in_flight=1\n"})
        CHECK(support::code_of([&] { (void)gs::bucket_tuner::load(text, 4); }) == gs::errc::invalid_specification);
}

TEST_CASE("a choice that was saved with more channels keeps its size with fewer", "[gradient][buckets]") {
    const auto most = GENERATE(0U, 1U, 3U, 9U);
    const auto loaded = gs::bucket_tuner::load("bucket=9 in_flight=4\n", most);
    CHECK(loaded.settled());
    CHECK(loaded.choice() == gs::bucket_choice{gs::bytes{9}, std::clamp(most, 1U, 4U)});
}

TEST_CASE("ranks agree on the longest time", "[gradient][buckets]") {
    const gs::communicator group(3);
    std::vector<gs::ns> times{5ns, 9ns, 2ns};
    support::together(3, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        (void)gs::agree(net, times[r]);
    });
    CHECK(times == std::vector<gs::ns>{9ns, 9ns, 9ns});
}

TEST_CASE("16 bits on the wire: half the bytes, summed in float32, and an infinity skips the step on all ranks",
          "[gradient][wire]") {
    const auto format = GENERATE(gs::wire_format::fp16, gs::wire_format::bf16);
    constexpr std::uint32_t ranks = 4;
    const gs::communicator group(ranks);
    std::vector<std::string> wrong(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        std::vector<float> large(1001), small(9);
        gs::gradient_buckets<> buckets({1_MiB, 1});
        const gs::mixed_format mixed{format, 100};
        buckets.add("large", large, {.wire = mixed.of(large.size())});
        buckets.add("small", small, {.wire = mixed.of(small.size())});
        const auto step = [&](float x) {
            std::fill(large.begin(), large.end(), x);
            std::fill(small.begin(), small.end(), x);
            (void)buckets.ready(0);
            (void)buckets.ready(1);
            return !buckets.reduce(net, gs::sum{});
        };
        // 256 + 1 isn't a bfloat16, 2048 + 1 no float16: rounded at each step, the ones would be
        // lost.
        const float big = format == gs::wire_format::bf16 ? 256.0F : 2048.0F;
        if (!step(r == 0 ? big : 1.0F)) wrong[r] = "a fault";
        if (large[1000] != big + 4.0F) wrong[r] = "not in float32";  // big + 3, rounded once
        if (small[8] != big + 3.0F) wrong[r] = "small ones aren't as they are";
        if (!buckets.was_finite()) wrong[r] = "not finite";
        const auto carried = net.carried();
        if (buckets.wire_bytes() != gs::bytes{1001 * 2 + 9 * 4} || carried != buckets.wire_bytes())
            wrong[r] = "wire bytes";
        if (!step(r == 2 ? std::numeric_limits<float>::infinity() : 1.0F) || buckets.was_finite())
            wrong[r] = "an infinity wasn't seen";
        if (!step(r == 1 ? std::nanf("") : 1.0F) || buckets.was_finite()) wrong[r] = "a NaN wasn't seen";
        if (!step(1.0F) || !buckets.was_finite()) wrong[r] = "it stays so";
    });
    CHECK(wrong == std::vector<std::string>(ranks));
}

TEST_CASE("error feedback: the rounding error of one step is added to the next", "[gradient][wire]") {
    std::vector<float> gradient(40, 0.001F), residual(40), arrived(40);
    std::vector<gs::bfloat16> wire(40);
    gradient[7] = std::numeric_limits<float>::infinity();
    double sum = 0, plain = 0;
    for (int step = 0; step < 1000; ++step) {
        gs::to_wire<gs::bfloat16>(gradient, wire, residual);
        gs::from_wire<gs::bfloat16>(wire, arrived);
        sum += static_cast<double>(arrived[0]);
        plain += static_cast<double>(static_cast<float>(gs::bfloat16(0.001F)));
    }
    CHECK(std::abs(sum - 1.0) < 1e-5);
    CHECK(std::abs(plain - 1.0) > 1e-4);
    CHECK(residual[7] == 0);
    CHECK(std::isinf(arrived[7]));
}

TEST_CASE("a step that is skipped leaves what was owed before it", "[gradient][wire]") {
    constexpr std::uint32_t ranks = 4;
    const gs::communicator group(ranks);
    std::vector<std::string> wrong(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        std::vector<float> a(2);
        gs::gradient_buckets<> buckets;
        buckets.add("a", a, {.wire = gs::wire_format::bf16, .error_feedback = true});
        const auto step = [&](float x, float y) {
            a = {x, y};
            (void)buckets.ready(0);
            if (buckets.reduce(net, gs::sum{})) wrong[r] = "a fault";
            return buckets.was_finite();
        };
        if (!step(1 + 0x1p-9F, 0) || a[0] != 4) wrong[r] = "another first step";  // 2^-9 is owed
        if (step(0x1p-8F * 3, 1.003e38F)) wrong[r] = "four of them are finite";
        if (step(0, r == 2 ? std::numeric_limits<float>::infinity() : 0)) wrong[r] = "an infinity is finite";
        if (!step(0, 0x1p-9F)) wrong[r] = "it stays so";
        if (a != std::vector<float>{4 * 0x1p-9F, 4 * 0x1p-9F}) wrong[r] = "another debt";
    });
    CHECK(wrong == std::vector<std::string>(ranks));
}

TEST_CASE("conversions for the wire are those of the types, at every length", "[gradient][wire]") {
    std::vector<float> from(71), back(71);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = conformance::odd_value(1, i) - 3.0F;
    std::vector<gs::float16> wire(71);
    gs::to_wire<gs::float16>(from, wire);
    gs::from_wire<gs::float16>(wire, back);
    for (std::size_t i = 0; i < from.size(); ++i) {
        CHECK(wire[i].bits() == gs::float16(from[i]).bits());
        CHECK(back[i] == static_cast<float>(wire[i]));
    }
}

}  // namespace buckets_test
