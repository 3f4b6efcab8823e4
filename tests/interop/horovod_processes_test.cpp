// SPDX-License-Identifier: Apache-2.0
// Horovod's names for arrays on devices of several processes, for which threads stand, each with a
// node of the host backend: the results of all ranks, with the same bits as for host arrays, and
// the ranks that faults name. mpi/devices.cpp has processes; tests/cuda/horovod_processes_test.cpp
// checks which work waits for which stream.
#include <gpushare/gradient/horovod_processes.hpp>

#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory_resource>
#include <new>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/horovod.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/two_level.hpp>

#include "conformance/named_suite.hpp"
#include "support/catch.hpp"
#include "support/eager_transport.hpp"
#include "support/few_blocks.hpp"
#include "support/leaks.hpp"
#include "support/named_outcome.hpp"
#include "support/named_process.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace horovod_processes_test {

namespace gs = gpushare;
// NOLINTNEXTLINE(google-build-using-namespace): that is what a program does that moves here
using namespace gs::horovod;
using namespace std::chrono_literals;
using gs::errc;

namespace {

template <class Net>
struct process : support::named_process<gs::host::node, std::pmr::memory_resource, Net> {
    explicit process(Net& net, const device_process_options& o = {}, const process_set_options& s = {})
        : support::named_process<gs::host::node, std::pmr::memory_resource, Net>(
              std::make_unique<gs::host::node>(gs::host::node_options{.devices = 1, .sms = 2}),
              *std::pmr::new_delete_resource(), net, o, s) {}
};
using one_process = process<gs::thread_transport>;

/// Calls f(process, rank) in a thread of each.
template <class F>
void on_processes(std::uint32_t count, const F& f, const device_process_options& o = {},
                  const process_set_options& s = {}) {
    const gs::communicator group(count);
    support::together(count, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        one_process mine(net, o, s);
        f(mine, r);
    });
}

using outcome = support::named_outcome;
using support::into;
using support::outcome_of;

}  // namespace

TEST_CASE("arrays on devices of processes become what Horovod's names say, with ranks that join", "[interop]") {
    const auto ranks = static_cast<std::uint32_t>(GENERATE(1, 2, 3));
    const auto chunk = static_cast<std::uint64_t>(GENERATE(1, 512, 1 << 20));
    CAPTURE(ranks, chunk);
    std::vector<std::string> wrong(ranks);
    on_processes(ranks,
                 [&](one_process& mine, unsigned r) {
                     wrong[r] = conformance::check_named(mine.set(), support::named_in_process<one_process>{mine});
                 },
                 {.chunk = gs::bytes{chunk}, .depth = 3});
    CHECK(wrong == std::vector<std::string>(ranks));
}

namespace {

/// Arrays of all ranks, and what arrays of the host become over the same transport.
struct named_arrays {
    std::vector<std::vector<std::vector<float>>> x, expected;
    std::vector<std::vector<std::size_t>> orders;  // in which each rank hands them over
};
constexpr reduce_op operators[] = {Average, Sum, Min, Max, Product};

named_arrays some_arrays(std::uint32_t ranks, support::random& any) {
    named_arrays a{std::vector<std::vector<std::vector<float>>>(ranks), {}, {}};
    std::vector<std::size_t> sizes(10);
    for (auto& n : sizes) n = any.one_in(5) ? 0 : any.below(any.one_in(4) ? 3000 : 80);
    for (auto& mine : a.x)
        for (const std::size_t n : sizes)
            for (float& v : mine.emplace_back(n)) v = static_cast<float>(any.below(200'001)) / 997 - 100;
    a.expected = a.x;
    a.orders.assign(ranks, std::vector<std::size_t>(sizes.size()));
    for (auto& order : a.orders) {
        std::iota(order.begin(), order.end(), std::size_t{0});
        for (std::size_t k = order.size(); k > 1; --k) std::swap(order[k - 1], order[any.below(k)]);
    }
    const gs::communicator group(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        process_set of(net);
        for (std::size_t g = 0; g < sizes.size(); ++g)
            allreduce(std::span(a.expected[r][g]), "g" + std::to_string(g), operators[g % 5], of);
    });
    return a;
}

}  // namespace

TEST_CASE("arrays of processes have the bits of arrays of the host, whatever the order, chunk and depth", "[interop]") {
    for (std::uint64_t n = 0; n < 16; ++n) {
        const auto seed = support::seed(n);
        support::random any(seed);
        const auto ranks = static_cast<std::uint32_t>(1 + any.below(4));
        const device_process_options options{.chunk = gs::bytes{1 + any.below(4000)},
                                             .depth = static_cast<std::uint32_t>(any.below(5))};
        const process_set_options together{.fusion = gs::bytes{any.one_in(2) ? 1U : 100'000U}};
        CAPTURE(seed, ranks, options.chunk.count(), options.depth, together.fusion.count());
        auto a = some_arrays(ranks, any);
        on_processes(
            ranks,
            [&](one_process& mine, unsigned r) {
                std::vector<handle> handles;
                for (const std::size_t g : a.orders[r])
                    handles.push_back(allreduce_async(mine.array(std::span(a.x[r][g])), "g" + std::to_string(g),
                                                      operators[g % 5], mine.set()));
                synchronize(handles);
                mine.wait();
            },
            options, together);
        CHECK(a.x == a.expected);
    }
}

TEST_CASE("processes that ask for other chunks take the least of them", "[interop]") {
    const gs::communicator group(3);
    std::vector<std::vector<double>> x(3, std::vector<double>(1000, 1));
    support::together(3, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        one_process mine(net, {.chunk = gs::bytes{100 + 1000 * r}, .depth = r + 2});
        allreduce(mine.array(std::span(x[r])), "x", Sum, mine.set());
        mine.wait();
    });
    CHECK(x == std::vector<std::vector<double>>(3, std::vector<double>(1000, 3)));
}

TEST_CASE("rows are gathered, exchanged and scattered between processes, of any number", "[interop]") {
    for (std::uint64_t n = 0; n < 8; ++n) {
        const auto seed = support::seed(50 + n);
        support::random any(seed);
        const auto ranks = static_cast<std::uint32_t>(1 + any.below(4));
        const std::size_t row = 1 + any.below(3), scattered = any.below(40);
        const device_process_options options{.chunk = gs::bytes{1 + any.below(600)}};
        CAPTURE(seed, ranks, row, scattered, options.chunk.count());
        std::vector<std::vector<std::uint64_t>> splits(ranks, std::vector<std::uint64_t>(ranks));
        for (auto& of : splits)
            for (auto& s : of) s = any.one_in(4) ? 0 : any.below(60);
        std::vector<std::string> wrong(ranks);
        on_processes(
            ranks,
            [&](one_process& mine, unsigned r) {
                const auto value = [](std::size_t from, std::size_t to, std::size_t i) {
                    return static_cast<int>(10'000 * from + 1000 * to + i);
                };
                std::vector<int> x, all, swapped;
                for (std::uint32_t q = 0; q < ranks; ++q)
                    for (std::size_t i = 0; i < splits[r][q] * row; ++i) x.push_back(value(r, q, i));
                std::vector<float> parts(scattered * row, static_cast<float>(r + 1)), part;
                std::vector<std::uint64_t> rows[3];
                synchronize(std::vector{
                    allgather_async(mine.array(std::span(x), row), into(all, rows[0], row), "all", mine.set()),
                    alltoall_async(mine.array(std::span(x), row), splits[r], into(swapped, rows[1], row), "swapped",
                                   mine.set()),
                    reducescatter_async(mine.array(std::span(parts), row), into(part, rows[2], row), "part", Sum,
                                        mine.set())});
                mine.wait();
                std::vector<int> gathered, received;
                std::vector<std::uint64_t> of_each, for_me;
                for (std::uint32_t q = 0; q < ranks; ++q) {
                    of_each.push_back(std::accumulate(splits[q].begin(), splits[q].end(), std::uint64_t{0}));
                    for_me.push_back(splits[q][r]);
                    for (std::uint32_t to = 0; to < ranks; ++to)
                        for (std::size_t i = 0; i < splits[q][to] * row; ++i) {
                            gathered.push_back(value(q, to, i));
                            if (to == r) received.push_back(value(q, to, i));
                        }
                }
                const std::size_t own = gs::shard_of(scattered, r, ranks).size();
                if (rows[0] != of_each || all != gathered) wrong[r] += "gathered ";
                if (rows[1] != for_me || swapped != received) wrong[r] += "exchanged ";
                if (rows[2] != std::vector<std::uint64_t>{own} ||
                    part != std::vector<float>(own * row, static_cast<float>(ranks * (ranks + 1) / 2)))
                    wrong[r] += "scattered";
            },
            options);
        CHECK(wrong == std::vector<std::string>(ranks));
    }
}

TEST_CASE("ranks of processes with several devices combine over two levels", "[interop]") {
    const gs::communicator between(2);
    std::vector<std::string> wrong(4);
    support::together(2, [&](unsigned p) {
        gs::thread_transport outer(between.rank(p));
        gs::communicator inner(2);
        const auto group = gs::split(inner, outer);
        support::together(2, [&](unsigned r) {
            auto net = group.rank(r);
            process<decltype(net)> mine(net, {.chunk = gs::bytes{400}});
            wrong[2 * p + r] =
                conformance::check_named(mine.set(), support::named_in_process<process<decltype(net)>>{mine});
            std::vector<int> x(4);
            std::vector<std::uint64_t> rows;
            const std::vector<std::uint64_t> splits(4, 1);
            const auto refused = outcome_of(
                [&] { (void)alltoall_async(mine.array(std::span(x)), splits, into(x, rows, 1), "x", mine.set()); });
            if (refused.code != errc::not_supported) wrong[2 * p + r] += "an alltoall over equal parts";
        });
    });
    CHECK(wrong == std::vector<std::string>(4));
}

TEST_CASE("processes that say something else of an array all get a mismatch, and go on", "[interop]") {
    std::vector<std::vector<outcome>> seen(3);
    std::vector<std::vector<float>> last(3, std::vector<float>(7, 1));
    on_processes(3, [&](one_process& mine, unsigned r) {
        std::vector<float> x(12, 1);
        std::vector<gs::float16> halves(12);
        std::vector<std::uint64_t> rows;
        const auto all = std::span(x);
        const auto array = [&](std::size_t n, std::size_t row) { return mine.array(all.first(n), row); };
        auto& of = mine.set();
        seen[r] = {
            outcome_of([&] { allreduce(array(r == 1 ? 11 : 12, 1), "length", Sum, of); }),
            outcome_of([&] { allreduce(array(12, 1), "operator", r == 2 ? Max : Sum, of); }),
            outcome_of([&] { allreduce(array(12, r == 1 ? 4 : 3), "row", Sum, of); }),
            outcome_of([&] {
                synchronize(r == 0 ? broadcast_async(mine.array(std::span(halves)), 0, "type", of)
                                   : broadcast_async(array(6, 1), 0, "type", of));
            }),
            outcome_of([&] {
                std::vector<float> to;
                synchronize(r == 2 ? allgather_async(array(12, 1), into(to, rows, 1), "kind", of)
                                   : reducescatter_async(array(12, 1), into(to, rows, 1), "kind", Sum, of));
            }),
        };
        allreduce(mine.array(std::span(last[r])), "last", Sum, of);
        mine.wait();
    });
    for (const auto& outcomes : seen)
        for (const auto& o : outcomes) CHECK(o.code == errc::mismatch);
    CHECK(last == std::vector<std::vector<float>>(3, std::vector<float>(7, 3)));
}

TEST_CASE("rows can't be cut while a process has joined, and it is named", "[interop]") {
    std::vector<outcome> seen(2);
    on_processes(2, [&](one_process& mine, unsigned r) {
        if (r == 0) {
            (void)join(mine.set());
            return;
        }
        std::vector<float> x(4), to;
        std::vector<std::uint64_t> rows;
        seen[1] = outcome_of(
            [&] { synchronize(allgather_async(mine.array(std::span(x)), into(to, rows, 1), "x", mine.set())); });
        (void)join(mine.set());
    });
    CHECK(seen[1] == outcome{errc::not_supported, 0});
}

TEST_CASE("a process without memory for its rows is named to all", "[interop]") {
    std::vector<outcome> seen(3), later(3);
    on_processes(3, [&](one_process& mine, unsigned r) {
        std::vector<float> x(5), to;
        std::vector<std::uint64_t> rows;
        auto place = into(to, rows, 1);
        if (r == 1) place = [](std::span<const std::uint64_t>) -> void* { throw std::bad_alloc(); };
        seen[r] = outcome_of(
            [&] { synchronize(allgather_async(mine.array(std::span(x)), std::move(place), "x", mine.set())); });
        later[r] = outcome_of([&] { allreduce(mine.array(std::span(x)), "y", Sum, mine.set()); });
        mine.leave();  // until then the device may use the arrays
    });
    CHECK(seen == std::vector<outcome>(3, {errc::out_of_memory, 1}));
    CHECK(later == seen);
}

TEST_CASE("a process whose device doesn't come is named to all", "[interop]") {
    std::atomic<bool> gone{false};
    std::vector<outcome> seen(2);
    std::vector<std::vector<float>> x(2, std::vector<float>(100, 1));
    on_processes(2,
                 [&](one_process& mine, unsigned r) {
                     allreduce(mine.array(std::span(x[r])), "before", Sum, mine.set());
                     if (r == 1) mine.caller().launch({.blocks = 1, .threads = 1, .hold = {}}, support::until{&gone});
                     seen[r] = outcome_of([&] { allreduce(mine.array(std::span(x[r])), "x", Sum, mine.set()); });
                     if (r == 1) gone.store(true, std::memory_order_release);
                     mine.wait();
                 },
                 {}, {.patience = 2s});
    CHECK(seen == std::vector<outcome>(2, {errc::deadline_exceeded, 1}));
}

TEST_CASE("an abort ends what waits for a device", "[interop]") {
    std::atomic<bool> gone{false};
    std::vector<outcome> seen(2);
    std::vector<std::vector<float>> x(2, std::vector<float>(100, 1));
    on_processes(2, [&](one_process& mine, unsigned r) {
        allreduce(mine.array(std::span(x[r])), "before", Sum, mine.set());
        if (r == 1) mine.caller().launch({.blocks = 1, .threads = 1, .hold = {}}, support::until{&gone});
        const handle one = allreduce_async(mine.array(std::span(x[r])), "x", Sum, mine.set());
        if (r == 1) mine.rank->abort(errc::stopped);
        seen[r] = outcome_of([&] { synchronize(one); });
        if (r == 1) gone.store(true, std::memory_order_release);
        mine.wait();
    });
    CHECK(seen == std::vector<outcome>(2, {errc::stopped, 1}));
}

TEST_CASE("a fault of another process ends what waits for a device", "[interop]") {
    std::atomic<bool> gone{false};
    std::atomic<int> advanced[2]{};
    std::vector<outcome> seen(2);
    std::vector<std::vector<float>> x(2, std::vector<float>(100, 1));
    const gs::communicator group(2);
    support::together(2, [&](unsigned r) {
        support::eager_transport net(group.rank(r), advanced[r]);
        process<support::eager_transport> mine(net);
        if (r == 1) mine.caller().launch({.blocks = 1, .threads = 1, .hold = {}}, support::until{&gone});
        const handle one = allreduce_async(mine.array(std::span(x[r])), "x", Sum, mine.set());
        // Until it waits for its device, or has failed before.
        while (r == 0 && advanced[1].load() == 0 && !gone.load()) std::this_thread::yield();
        if (r == 0) mine.rank->abort(errc::stopped);
        seen[r] = outcome_of([&] { synchronize(one); });
        if (r == 1) gone.store(true, std::memory_order_release);
        mine.wait();
    });
    CHECK(seen == std::vector<outcome>(2, {errc::stopped, 0}));
}

namespace {

/// What is nested in the exception of `f`, by its sentence.
template <class F>
std::string nested_in(const F& f) {
    try {
        f();
    } catch (const gs::operation_error& outer) {
        try {
            std::rethrow_if_nested(outer);
        } catch (const std::exception& inner) {
            return inner.what();
        }
        return "nothing";
    }
    return "no error";
}
/// One rank throws at the second all-reduce of floats.
struct failing_transport : gs::thread_transport {
    using gs::thread_transport::thread_transport;
    template <class T, class Op>
    gs::collective_fault all_reduce(std::span<const std::type_identity_t<T>> in, std::span<T> out, const Op& op,
                                    gs::instant deadline) {
        if (std::same_as<T, float> && ++reduced == 2 && rank() == 1) throw std::bad_alloc();
        return gs::thread_transport::all_reduce(in, out, op, deadline);
    }
    int reduced = 0;
};

}  // namespace

TEST_CASE("a process's exception is told to all by its code, and to its own caller as it was", "[interop]") {
    std::vector<outcome> seen(2);
    std::vector<std::string> nested(2);
    on_processes(2, [&](one_process& mine, unsigned r) {
        std::vector<float> x(5), to;
        std::vector<std::uint64_t> rows;
        auto place = into(to, rows, 1);
        if (r == 1) place = [](std::span<const std::uint64_t>) -> void* { throw std::runtime_error("no tensor"); };
        const handle one = allgather_async(mine.array(std::span(x)), std::move(place), "x", mine.set());
        seen[r] = outcome_of([&] { synchronize(one); });
        nested[r] = nested_in([&] { synchronize(one); });
        mine.leave();
    });
    CHECK(seen == std::vector<outcome>(2, {errc::submission_failed, 1}));
    CHECK(nested == std::vector<std::string>{"nothing", "no tensor"});

    const gs::communicator group(2);
    support::together(2, [&](unsigned r) {
        failing_transport net(group.rank(r));
        process<failing_transport> mine(net, {.chunk = gs::bytes{64}});
        std::vector<float> x(100, 1);
        const handle one = allreduce_async(mine.array(std::span(x)), "x", Sum, mine.set());
        seen[r] = outcome_of([&] { synchronize(one); });
        nested[r] = nested_in([&] { synchronize(one); });
        mine.leave();
    });
    CHECK(seen == std::vector<outcome>(2, {errc::out_of_memory, 1}));
    CHECK(nested == std::vector<std::string>{"nothing", std::bad_alloc().what()});
}

namespace {

/// Throws where a second all-reduce begins, and can't give up the first one.
struct throwing_transport : gs::thread_transport {
    using gs::thread_transport::thread_transport;
    template <class T, class Op>
    std::uint64_t start_all_reduce(std::span<T>, const Op&) {
        if (started++ == 1) throw std::bad_alloc();
        return 0;
    }
    template <class T, class Op>
    std::uint64_t start_reduce_scatter(std::span<T>, const Op&) {
        return 0;
    }
    template <class T>
    std::uint64_t start_all_gather(std::span<T>) {
        return 0;
    }
    void advance() {}
    gs::collective_fault finish(std::uint64_t, gs::instant) { return {}; }
    gs::collective_fault barrier(gs::instant) const {
        return {errc::aborted, gs::collective_kind::barrier, 0, 0, true};
    }
    int started = 0;
};

}  // namespace

TEST_CASE("a process that gets only some of its chunks gives them back", "[interop]") {
    const gs::communicator group(1);
    gs::thread_transport net(group.rank(0));
    gs::host::node node({.devices = 1, .sms = 2});
    auto copies = node.make_stream(gs::device_id{0});
    support::few_blocks pinned(2);
    CHECK_THROWS_AS(
        (device_process<gs::host::node, gs::thread_transport, support::few_blocks>(node, copies, net, pinned)),
        std::bad_alloc);
    CHECK(pinned.out() == 0);
}

TEST_CASE("no process is made while one of them lacks memory, which is named to all", "[interop]") {
    using made = device_process<gs::host::node, gs::thread_transport, support::few_blocks>;
    const gs::communicator group(3);
    std::vector<outcome> seen(3);
    std::vector<int> out(3), threw(3), again(3);
    support::together(3, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        gs::host::node node({.devices = 1, .sms = 2});
        auto copies = node.make_stream(gs::device_id{0});
        support::few_blocks pinned(r == 1 ? 2 : 100);
        try {
            seen[r] = outcome_of([&] { made(node, copies, net, pinned); });
        } catch (const std::bad_alloc&) {
            threw[r] = 1;
        }
        out[r] = pinned.out();
        support::few_blocks enough(100);
        made later(node, copies, net, enough);
        again[r] = enough.out() == 4 && later.rank() == r ? 1 : 0;
    });
    CHECK(seen == std::vector<outcome>{{errc::out_of_memory, 1}, {}, {errc::out_of_memory, 1}});
    CHECK(threw == std::vector<int>{0, 1, 0});
    CHECK(out == std::vector<int>(3));
    CHECK(again == std::vector<int>(3, 1));
}

TEST_CASE("chunks that are under way when a process runs out of memory stay with the transport", "[interop]") {
    const support::leaks_are_meant here;
    const gs::communicator group(1);
    throwing_transport net(group.rank(0));
    support::few_blocks pinned(100);
    outcome seen;
    std::vector<float> x(100, 1);
    {
        support::named_process<gs::host::node, support::few_blocks, throwing_transport> mine(
            std::make_unique<gs::host::node>(gs::host::node_options{.devices = 1, .sms = 2}), pinned, net,
            {.chunk = gs::bytes{64}, .depth = 3});
        seen = outcome_of([&] { allreduce(mine.array(std::span(x)), "x", Sum, mine.set()); });
        mine.leave();
    }
    CHECK(seen.code == errc::aborted);
    CHECK(pinned.out() == 3);
}

TEST_CASE("an array that a process on a device can't hand over is refused at once", "[interop]") {
    on_processes(1, [&](one_process& mine, unsigned) {
        auto& of = mine.set();
        std::vector<float> x(4);
        std::vector<std::int64_t> n(4);
        std::vector<int> moved(4);
        const auto all = mine.array(std::span(x));
        CHECK(of.on_devices());
        CHECK(outcome_of([&] { (void)allreduce_async(std::span(x), "host", Sum, of); }).code == errc::not_supported);
        CHECK(outcome_of([&] { (void)broadcast_async(all, 1, "root", of); }).code == errc::invalid_specification);
        CHECK(outcome_of([&] { (void)allreduce_async(mine.array(std::span(n)), "n", Average, of); }).code ==
              errc::invalid_specification);
        CHECK(outcome_of([&] {
                  (void)allreduce_async(device_array<float>{x.data(), 4, nullptr}, "s", Sum, of);
              }).code == errc::invalid_specification);
        const std::vector<device_array<float>> twice{all, all};
        std::vector<detail::device_call> calls;
        for (int k = 0; k < 2; ++k)
            calls.push_back({.name = "twice",
                             .type = gs::detail::type_id<float>(),
                             .element = 4,
                             .data = x.data(),
                             .count = 4,
                             .stream = &mine.caller()});
        CHECK(outcome_of([&] { (void)of.start_on_device(calls); }).code == errc::duplicate_name);
        grouped_allreduce(std::span(twice), "twice", Sum, of);
        synchronize(broadcast_async(mine.array(std::span(moved)), 0, "moved", of));
        mine.wait();
    });
}

TEST_CASE("the process's own set may be one on a device", "[interop]") {
    const gs::communicator group(1);
    gs::thread_transport net(group.rank(0));
    gs::host::node node({.devices = 1, .sms = 2});
    auto copies = node.make_stream(gs::device_id{0}), caller = node.make_stream(gs::device_id{0});
    device_process here(node, copies, net, *std::pmr::new_delete_resource());
    init(here, {.fusion = gs::bytes{1}});
    std::vector<float> x(10, 3);
    CHECK(size() == 1);
    allreduce(device_array{x.data(), x.size(), &caller}, "x");
    caller.record().wait(gs::never);
    CHECK(x == std::vector<float>(10, 3));
    CHECK(join() == 0);
    shutdown();
    CHECK_FALSE(is_initialized());
}

}  // namespace horovod_processes_test
