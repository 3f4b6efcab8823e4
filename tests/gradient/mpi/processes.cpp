// SPDX-License-Identifier: Apache-2.0
// A process of an MPI transport's test, started by an MPI's launcher: the conformance suite,
// threads in processes, bytes that are counted, what is ready everywhere, a process that doesn't
// come, and going on without it. Prints what is wrong and ends with 1. With the argument "killed":
// a process is killed in the middle of a training.
#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/buckets.hpp>
#include <gpushare/gradient/compressed_link.hpp>
#include <gpushare/gradient/horovod.hpp>
#include <gpushare/gradient/mpi.hpp>
#include <gpushare/gradient/negotiation.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/two_level.hpp>

#include <malloc.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <memory_resource>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "conformance/mismatch_suite.hpp"
#include "conformance/named_suite.hpp"
#include "conformance/shard_suite.hpp"
#include "conformance/transport_suite.hpp"
#include "gradient/process_steps.hpp"
#include "support/failing_new.hpp"
#include "support/mpi_check.hpp"

namespace {

namespace gs = gpushare;
using namespace std::chrono_literals;

using support::check;
using support::wrongs;
/// There are more processes than cores: one that is alive may not answer for a while.
constexpr gs::ns busy_grace = 700ms;
gs::instant in(gs::ns time) { return std::chrono::steady_clock::now() + time; }

void sent_is_what_the_type_says() {
    gs::mpi_transport net(MPI_COMM_WORLD);
    const auto bytes_of = [&]<class T>(T) {
        std::vector<T> x(std::size_t{64} * 100 * net.size());
        const auto before = net.sent();
        if (net.all_reduce(std::span<const T>(x), std::span(x), gs::sum{}, in(60s))) check("a fault", "bytes");
        return (net.sent() - before).count();
    };
    // A part to each of the others, and the own part's result to each of them.
    const std::uint64_t floats = bytes_of(0.0F);
    if (floats != std::uint64_t{2} * (net.size() - 1) * 6400 * sizeof(float))
        check(std::to_string(floats), "bytes sent");
    if (bytes_of(gs::float16{}) * 2 != floats || bytes_of(gs::bfloat16{}) * 2 != floats)
        check("not half", "bytes of halves");
}

/// A few words go to all at once, whatever the options say: no message is received in them.
void words_go_to_all() {
    gs::mpi_transport net(MPI_COMM_WORLD, {.message = gs::bytes{64}, .one_shot = gs::bytes{1}});
    std::uint64_t words[32] = {net.rank()};
    const auto before = net.sent();
    const std::span<std::uint64_t> all(words);
    const auto f = net.all_reduce(std::span<const std::uint64_t>(all), all, gs::sum{}, in(60s));
    const std::uint64_t n = net.size();
    if (f || words[0] != n * (n - 1) / 2) check(gs::describe(f).c_str(), "words");
    if ((net.sent() - before).count() != sizeof words * (n - 1)) check("not to all", "words");
}

/// Gradients that lie behind each other, and some that don't, over several buckets, of which two
/// are under way, and in 16 bits.
void one_piece_or_several() {
    gs::mpi_transport net(MPI_COMM_WORLD, {.message = gs::bytes{512}});
    constexpr std::size_t sizes[] = {1000, 10, 990, 3000, 1000, 0, 500};
    for (const bool apart : {false, true}) {
        std::vector<float> memory(std::size_t{2} * 6500);
        gs::gradient_buckets<> buckets({gs::bytes{8192}, 1});
        std::vector<std::span<float>> all;
        std::size_t at = 0;
        for (const std::size_t n : sizes) {
            all.push_back(std::span(memory).subspan(at, n));
            at += n + (apart ? 3 : 0);
            buckets.add("", all.back(),
                        {.wire = n == 990 || n == 500 ? gs::wire_format::fp16 : gs::wire_format::as_is});
        }
        for (int step = 0; step < 3; ++step) {
            for (const auto& g : all)
                for (std::size_t i = 0; i < g.size(); ++i) g[i] = static_cast<float>(i % 7 + net.rank() * 2);
            for (std::uint32_t g = 0; g < buckets.size(); ++g) (void)buckets.ready(g);
            if (const auto f = buckets.reduce(net, gs::average{}, 60s))
                return check(gs::describe(f).c_str(), "one piece or several");
            std::size_t wrong = 0;
            for (const auto& g : all)
                for (std::size_t i = 0; i < g.size(); ++i)
                    wrong += g[i] != static_cast<float>(i % 7 + net.size() - 1) ? 1 : 0;
            if (wrong != 0) check(std::to_string(wrong) + " elements", apart ? "several pieces" : "one piece");
        }
    }
}

/// Chunks of two arrays under way at once are told apart, however many there are.
void two_of_many_chunks() {
    gs::mpi_transport net(MPI_COMM_WORLD, {.message = gs::bytes{64}});
    std::vector<float> a(std::size_t{8192} * 16 * net.size(), 1.0F), b(a.size(), 100.0F);
    const auto first = net.start_all_reduce(std::span(a), gs::sum{}),
               second = net.start_all_reduce(std::span(b), gs::sum{});
    if (net.finish(first, in(60s)) || net.finish(second, in(60s))) return check("a fault", "many chunks");
    const auto n = static_cast<float>(net.size());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < a.size(); ++i) wrong += a[i] != n || b[i] != 100 * n ? 1 : 0;
    if (wrong != 0) check(std::to_string(wrong) + " elements", "many chunks");
}

/// Each process has its gradients in an order of its own: after some reductions of bit vectors all
/// have the same list. What one of them lacks is in nobody's, and named where one asks.
void what_is_ready_everywhere() {
    gs::mpi_transport net(MPI_COMM_WORLD);
    constexpr std::uint32_t gradients = 130;
    const std::uint32_t rank = net.rank(), last = net.size() - 1;
    gs::ready_bits mine(gradients);
    std::vector<std::uint32_t> next;
    std::optional<gs::stall> why;
    const auto exchange = [&] {
        if (const auto f = gs::negotiate(net, mine, next, why, in(60s))) check(gs::describe(f).c_str(), "negotiation");
    };
    for (int step = 0; step < 2; ++step) {
        next.clear();
        for (std::uint32_t k = 0; k < gradients; ++k) {
            const std::uint32_t g = (k * 7 + rank * 31) % gradients;  // 7 has no factor of 130
            if (g != 17 || rank != last) (void)mine.mark(g);
            if (k % 40 == 39) exchange();
            if (why) check("a stall that nobody asked for", "negotiation");
        }
        exchange();
        if (next.size() != gradients - 1 || mine.complete() || why) check("17 is nowhere", "negotiation");
        if (rank == 0) mine.raise_alarm();
        exchange();
        if (why != gs::stall{17, last}) check("another stall", "negotiation");
        if (rank == last) (void)mine.mark(17);
        exchange();
        if (next.size() != gradients || next.back() != 17 || !mine.complete())
            return check("not complete", "negotiation");
        std::vector<std::uint32_t> all(std::size_t{gradients} * net.size());
        if (net.all_gather(std::span<const std::uint32_t>(next), std::span(all), in(60s)))
            check("a fault", "negotiation");
        for (std::size_t i = 0; i < all.size(); ++i)
            if (all[i] != next[i % gradients]) return check("another order", "negotiation");
        mine.end_step();
    }
}

void gossip() {
    gs::mpi_transport net(MPI_COMM_WORLD, {.depth = 0});  // which counts as 1
    const auto ring = gs::neighbour_graph::ring(net.size());
    std::vector<float> x(5000, static_cast<float>(net.rank()));
    for (int step = 0; step < 60; ++step)
        if (gs::gossip_average(net, ring, x, in(60s))) return check("a fault", "gossip");
    const float mean = static_cast<float>(net.size() - 1) / 2;
    if (x[4999] < mean - 1e-3F || x[4999] > mean + 1e-3F) check(std::to_string(x[4999]), "gossip");
}

/// Some threads in each process; gradients in buckets over both.
void threads_in_processes(bool alike) {
    gs::mpi_transport outer(MPI_COMM_WORLD);
    gs::communicator inner(alike || outer.rank() != 0 ? 2 : 1);
    const auto group = gs::split(inner, outer, {.chunk = gs::bytes{8192}, .depth = 3});
    std::vector<std::string> wrong(2);
    std::vector<std::jthread> threads;
    const auto rank = [&](std::uint32_t r) {
        auto net = group.rank(r);
        wrong[r] = conformance::check_transport(net);
        if (wrong[r].empty()) wrong[r] = conformance::check_shards(net, 5);
        std::vector<float> a(5000, static_cast<float>(net.rank())), b(3, 1.0F);
        gs::gradient_buckets<> buckets;
        buckets.add("a", a, {.wire = gs::wire_format::fp16});
        buckets.add("b", b);
        (void)buckets.ready(0);
        (void)buckets.ready(1);
        if (buckets.reduce(net, gs::sum{}, gs::ns(60s))) wrong[r] += "buckets: a fault";
        const auto n = static_cast<float>(net.size());
        if (a[4999] != n * (n - 1) / 2 || b[2] != n) wrong[r] += "buckets: a wrong sum";
    };
    if (inner.size() == 2) threads.emplace_back(rank, 1U);
    rank(0);
    threads.clear();
    for (const auto& w : wrong) check(w, "threads in processes");
}

/// Devices in processes have the bits of threads in processes: two on one device, or one each; one
/// in the last process.
void devices_in_processes() {
    std::vector<std::vector<float>> x(2, std::vector<float>(30'000)), expected = x;
    gs::mpi_transport outer(MPI_COMM_WORLD), again(MPI_COMM_WORLD);
    const bool together = outer.rank() == 0;
    const std::uint32_t ranks = outer.rank() + 1 == outer.size() ? 1 : 2;
    for (std::uint32_t r = 0; r < 2; ++r)
        for (std::size_t i = 0; i < x[r].size(); ++i)
            x[r][i] = static_cast<float>((i * 7919 + outer.rank() * 31 + r * 17) % 10'007) / 997;
    const gs::two_level_options options{.chunk = gs::bytes{8192}, .depth = 3};
    gs::communicator inner(ranks);
    const auto group = gs::split(inner, outer, options);
    {
        std::vector<std::jthread> threads;
        for (std::uint32_t r = 0; r < ranks; ++r)
            threads.emplace_back([&, r] {
                auto net = group.rank(r);
                (void)net.all_reduce(std::span<const float>(x[r]), std::span(expected[r]), gs::average{}, in(60s));
            });
    }
    gs::host::node node({.devices = together ? 1U : ranks, .sms = 4});
    const gs::communicator shared(ranks);
    std::vector<gs::device_id> devices;
    std::vector<gs::host::stream> streams;
    std::vector<gs::member> members;
    std::vector<float*> at;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        members.push_back(shared.rank(r));
        at.push_back(x[r].data());
        if (together && r != 0) continue;
        devices.push_back({r});
        streams.push_back(node.make_stream(devices[r]));
    }
    const std::span<const gs::member> all(members);
    gs::two_level_devices levels(node.gangs(), std::span<const gs::device_id>(devices), std::span(streams), all, again,
                                 *std::pmr::new_delete_resource(), options);
    const std::vector<const float*> from(at.begin(), at.end());
    const auto f = levels.all_reduce<float>(from, at, x[0].size(), gs::average{}, in(60s));
    for (auto& s : streams) s.record().wait(gs::never);
    if (f) check(gs::describe(f).c_str(), "devices in processes");
    for (std::uint32_t r = 0; r < ranks; ++r)
        if (x[r] != expected[r]) check("other bits than threads", "devices in processes");
    // One calls it with another length: all hear of it.
    const auto g = levels.all_reduce<float>(from, at, outer.rank() == 0 ? 300 : 200, gs::sum{}, in(60s));
    const std::uint32_t odd = outer.size() == 2 ? g.rank : 0;  // of two, either may be it
    if (g.code != gs::errc::mismatch || g.rank != odd) check(gs::describe(g).c_str(), "devices of another length");
    MPI_Barrier(MPI_COMM_WORLD);
}

/// Sums that fp8 holds go over a compressed link as they are, and the largest elements one step
/// after the other; processes that compress in other ways are named.
void compressed_links() {
    gs::mpi_transport net(MPI_COMM_WORLD);
    const auto n = static_cast<float>(net.size());
    {
        gs::fp8_link coded(net);
        gs::communicator inner(1);
        const auto group = gs::split(inner, coded, {.chunk = gs::bytes{8192}});
        auto me = group.rank(0);
        std::vector<float> x(5003);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(1U << i % 4);
        const auto f = me.all_reduce(std::span<const float>(x), std::span(x), gs::sum{}, in(60s));
        std::size_t wrong = f ? 1 : 0;
        for (std::size_t i = 0; i < x.size(); ++i) wrong += x[i] != n * static_cast<float>(1U << i % 4) ? 1 : 0;
        if (wrong != 0) check(std::to_string(wrong) + " elements", "a link of fp8 blocks");
    }
    {
        gs::top_k_link sparse(net, 4, 0.5);
        for (int step = 0; step < 2; ++step) {
            std::vector<float> x = step == 0 ? std::vector<float>{4, 1, 3, 2} : std::vector<float>(4);
            const auto f = sparse.all_reduce(std::span<const float>(x), std::span(x), gs::sum{}, in(60s));
            const auto right = step == 0 ? std::vector<float>{4 * n, 0, 3 * n, 0} : std::vector<float>{0, n, 0, 2 * n};
            if (f || x != right) check("step " + std::to_string(step), "a link of the largest elements");
        }
    }
    const std::uint32_t last = net.size() - 1;
    gs::failure seen;
    try {
        const gs::top_k_link odd(net, net.rank() == last ? 5 : 4, 0.5);
    } catch (const gs::operation_error& e) {
        seen = e.figures();
    }
    if (seen.code != gs::errc::mismatch || seen.left != last) check(std::to_string(seen.left), "another link");
    MPI_Barrier(MPI_COMM_WORLD);
}

/// The ranks of all processes train together; then the last process registers something else: of
/// two processes the second one is named.
void steps_in_processes() {
    for (const bool alike : {true, false}) {
        gs::mpi_transport outer(MPI_COMM_WORLD);
        const std::uint32_t last = outer.size() - 1;
        process_steps::process mine(2, outer);
        process_steps::manner how{.between = gs::ns(60s)};
        if (!alike && outer.rank() == last) how.change = [](auto& gradients) { std::swap(gradients[0], gradients[1]); };
        for (const auto& seen : mine.train<float, gs::bfloat16>(3, how)) {
            const auto& f = seen.fault;
            const bool named = f.code == gs::errc::mismatch && f.rank == 2 * last;
            if (alike ? f || seen.wrong != 0 : !named) check(gs::describe(f).c_str(), "steps in processes");
        }
        MPI_Barrier(MPI_COMM_WORLD);
    }
}

/// The last process stops behind its second step, or in the middle of its third one. Each rank
/// names the rank that stopped, and has its two steps; patience would name the process by its first
/// rank.
void one_stops() {
    for (const bool halfway : {false, true})
        for (std::uint64_t n = 0; n < 5; ++n) {
            gs::mpi_transport outer(MPI_COMM_WORLD);
            const std::uint32_t last = outer.size() - 1;
            process_steps::process mine(2, outer);
            process_steps::manner how{.between = gs::ns(60s), .seed = n};
            const bool stops = outer.rank() == last;
            if (stops) how.stops = 1, how.halfway = halfway;
            for (const auto& seen : mine.train<float, gs::bfloat16>(stops ? 2 : 3, how)) {
                const auto& f = seen.fault;
                const bool named = f.code == gs::errc::stopped && f.rank == 2 * last + 1;
                if (seen.wrong != 0) check("a wrong average", "one stops");
                // Its other rank may hear of it before it has looked for its last step.
                if (stops ? f && !named : !named || (!halfway && seen.steps != 2))
                    check(gs::describe(f).c_str(), halfway ? "one stops halfway" : "one stops");
            }
            MPI_Barrier(MPI_COMM_WORLD);
        }
}

/// A process leaves when it has a call's result: the others have it too, and learn by their next
/// call who left.
void one_leaves_in_order() {
    for (int n = 0; n < 20; ++n) {
        gs::mpi_transport net(MPI_COMM_WORLD,
                              {.message = gs::bytes{2048}, .one_shot = gs::bytes{n % 2 == 0 ? 4096U : 8U}});
        std::vector<float> x(1000, 1.0F);
        const auto f = net.all_reduce(std::span<const float>(x), std::span(x), gs::sum{}, in(60s));
        if (f || x[999] != static_cast<float>(net.size())) check(gs::describe(f).c_str(), "before one leaves");
        const bool leaves = net.rank() == static_cast<std::uint32_t>(n) % net.size();
        if (leaves) net.leave(net.size() + 7, gs::errc::stopped);
        const auto g = net.barrier(in(60s));
        if (g.code != gs::errc::stopped || g.rank != net.size() + 7)
            check(gs::describe(g).c_str(), "behind one that has left");
        MPI_Barrier(MPI_COMM_WORLD);
    }
}

/// Process r has r + 1 batches, by Horovod's names: who has no more joins, and the others go on.
void batches_differ() {
    gs::mpi_transport net(MPI_COMM_WORLD);
    gs::horovod::init(net);
    for (std::uint32_t b = 0; b <= net.rank(); ++b) {
        std::vector<float> x(1000, static_cast<float>(net.rank()));
        gs::horovod::allreduce(std::span(x), "batch " + std::to_string(b), gs::horovod::Average);
        const float mean = static_cast<float>(b + net.size() - 1) / 2;  // of ranks b and above
        if (x[999] != mean) check(std::to_string(x[999]), "batches differ");
    }
    if (gs::horovod::join() != net.size() - 1) check("another rank was last", "batches differ");
    gs::horovod::shutdown();
    MPI_Barrier(MPI_COMM_WORLD);
    check(conformance::check_named(net), "by each operator");
    MPI_Barrier(MPI_COMM_WORLD);
}

/// The last process doesn't take part. All others name it, also those that had no deadline, and go
/// on without it.
void one_doesnt_come() {
    gs::mpi_transport net(MPI_COMM_WORLD, {.grace = busy_grace});
    const std::uint32_t absent = net.size() - 1;
    if (net.rank() == absent) {
        std::this_thread::sleep_for(1s);
        MPI_Barrier(MPI_COMM_WORLD);
        return;
    }
    std::vector<float> x(100'000, 1.0F);
    const auto f =
        net.all_reduce(std::span<const float>(x), std::span(x), gs::sum{}, net.rank() == 0 ? in(100ms) : gs::never);
    if (f.code != gs::errc::deadline_exceeded || f.rank != absent) check(gs::describe(f).c_str(), "one doesn't come");
    if (net.barrier(gs::never) != f) check("another fault", "afterwards");
    const auto fewer = net.shrink(std::span(&absent, 1));
    if (fewer->size() != absent) check("another size", "shrunk");
    std::vector<float> y(1000, 1.0F);
    const auto g = fewer->all_reduce(std::span<const float>(y), std::span(y), gs::sum{}, in(60s));
    if (g || y[999] != static_cast<float>(absent)) check("it doesn't go on", "shrunk");
    MPI_Barrier(MPI_COMM_WORLD);
}

/// A thread of the last process doesn't come. The other threads of all processes hear of it, though
/// they have no deadline, and though the transport was made by a thread that doesn't use it. All
/// name that thread; processes have different numbers of them.
void a_thread_doesnt_come(std::uint32_t absent) {
    gs::mpi_transport outer(MPI_COMM_WORLD, {.grace = busy_grace});
    const bool last = outer.rank() == outer.size() - 1;
    gs::communicator inner(last ? 3 : 2);
    const auto group = gs::split(inner, outer, {.grace = 10s});
    std::vector<gs::collective_fault> faults(inner.size());
    std::vector<std::jthread> threads;
    for (std::uint32_t r = 0; r < faults.size(); ++r) {
        if (last && r == absent) continue;
        threads.emplace_back([&, r] {
            auto net = group.rank(r);
            std::vector<float> x(1000);
            faults[r] =
                net.all_reduce(std::span<const float>(x), std::span(x), gs::sum{}, last ? in(100ms) : gs::never);
        });
    }
    // Whoever has no deadline waits for rank 0 of the last process, which has one, or isn't there.
    if (last && absent == 0) {
        threads.clear();
        (void)outer.barrier(std::chrono::steady_clock::now());
    }
    threads.clear();
    for (std::uint32_t r = 0; r < faults.size(); ++r)
        if (!(last && r == absent) &&
            (faults[r].code != gs::errc::deadline_exceeded || faults[r].rank != 2 * (outer.size() - 1) + absent))
            check(gs::describe(faults[r]).c_str(), "a thread doesn't come");
    MPI_Barrier(MPI_COMM_WORLD);
}

/// The list of what ranks can call differently, by the last process and by the first one.
void processes_call_different_things() {
    using net_type = gs::mpi_transport;
    static conformance::mismatch_buffers memory;  // after a fault messages may still come in
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (std::size_t k = 0; k < conformance::mismatches<net_type>().size(); ++k)
        for (const int odd : {size - 1, 0}) {
            net_type net(MPI_COMM_WORLD, {.grace = busy_grace});
            const bool other = static_cast<int>(net.rank()) == odd;
            const std::uint64_t own[] = {
                conformance::mismatches<net_type>()[k].call(net, other, memory, in(60s)).packed() << 1 >> 1,
                net.barrier(in(60s)).packed()};
            std::vector<std::uint64_t> all(2 * static_cast<std::size_t>(size));
            MPI_Allgather(own, 2, MPI_UINT64_T, all.data(), 2, MPI_UINT64_T, MPI_COMM_WORLD);
            std::vector<gs::collective_fault> faults, later;
            for (std::size_t r = 0; r < all.size(); r += 2) {
                faults.push_back(gs::collective_fault::unpacked(all[r]));
                later.push_back(gs::collective_fault::unpacked(all[r + 1]));
            }
            check(conformance::wrong_mismatch<net_type>(k, faults, later), "different things");
        }
}

/// The same of two levels, with two threads in each process but the first.
void threads_in_processes_call_different_things() {
    using net_type = gs::two_level_group<gs::mpi_transport>::rank_type;
    static conformance::mismatch_buffers memory[2];
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (std::size_t k = 0; k < conformance::mismatches<net_type>().size(); ++k)
        for (const bool last : {true, false}) {
            gs::mpi_transport outer(MPI_COMM_WORLD, {.grace = busy_grace});
            gs::communicator inner(outer.rank() == 0 ? 1 : 2);
            const auto group = gs::split(inner, outer);
            std::uint64_t own[4] = {};
            {
                std::vector<std::jthread> threads;
                for (std::uint32_t r = 0; r < inner.size(); ++r)
                    threads.emplace_back([&, r] {
                        auto net = group.rank(r);
                        const bool odd = net.rank() == (last ? net.size() - 1 : 0);
                        const auto f = conformance::mismatches<net_type>()[k].call(net, odd, memory[r], in(60s));
                        own[2 * r] = f.packed() << 1 >> 1;
                        own[2 * r + 1] = net.barrier(in(60s)).packed();
                    });
            }
            std::vector<std::uint64_t> all(4 * static_cast<std::size_t>(size));
            MPI_Allgather(own, 4, MPI_UINT64_T, all.data(), 4, MPI_UINT64_T, MPI_COMM_WORLD);
            std::vector<gs::collective_fault> faults, later;
            for (std::size_t r = 0; r < all.size(); r += 2) {
                if (r == 2) continue;  // the first process has one
                faults.push_back(gs::collective_fault::unpacked(all[r]));
                later.push_back(gs::collective_fault::unpacked(all[r + 1]));
            }
            check(conformance::wrong_mismatch<net_type>(k, faults, later), "different things on two levels");
        }
}

/// A process leaves by an exception: the others don't wait for it.
void one_leaves_by_an_exception() {
    try {
        gs::mpi_transport net(MPI_COMM_WORLD);
        if (net.rank() == 0) throw 1;
        const auto f = net.barrier(gs::never);
        if (f.code != gs::errc::aborted || f.rank != 0) check(gs::describe(f).c_str(), "an exception");
    } catch (int) {
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

gs::collective_fault exchange_in_pairs(gs::mpi_transport& net, gs::ns patience) {
    const std::uint32_t other = net.rank() ^ 1U;
    static float mine = 1.0F, theirs = 0.0F;  // they stay: a dead one's message is still under way
    return net.exchange<float>(std::span(&mine, 1), std::span(&other, 1), std::span(&theirs, 1),
                               patience == gs::ns::max() ? gs::never : in(patience));
}

/// A training in the middle of which the last process is killed: the others name it, and go on
/// without it. Only one of them has a deadline; the others hear of it. Of four that one doesn't
/// wait for the dead one, but for the one that does.
int killed() {
    gs::mpi_transport net(MPI_COMM_WORLD);
    const std::uint32_t dead = net.size() - 1;
    std::vector<float> large(100'000), small(7);
    gs::gradient_buckets<> buckets({gs::bytes{1000}, 1});
    buckets.add("small", small);
    buckets.add("large", large);
    gs::collective_fault fault;
    int steps = 0;
    const auto train = [&](auto& over, gs::gradient_buckets<>& mine, float ranks, int until) {
        for (; steps < until && !fault; ++steps) {
            std::fill(large.begin(), large.end(), static_cast<float>(steps));
            std::fill(small.begin(), small.end(), 1.0F);
            (void)mine.ready(1);
            (void)mine.ready(0);
            const gs::ns patience = steps < 5 ? gs::ns(60s) : net.rank() == 0 ? gs::ns(1s) : gs::ns::max();
            if (steps == 5) {
                if (net.rank() == dead) (void)std::raise(SIGKILL);
                fault = exchange_in_pairs(net, patience);
                if (fault) return;
            }
            fault = mine.reduce(over, gs::sum{}, patience);
            if (fault) return;
            if (large[99'999] != ranks * static_cast<float>(steps) || small[6] != ranks) check("a wrong sum", "killed");
        }
    };
    train(net, buckets, static_cast<float>(net.size()), 10);
    if (!fault || fault.rank != dead || steps != 5) check(gs::describe(fault).c_str(), "killed");
    std::printf("rank %u: %s\n", net.rank(), gs::describe(fault).c_str());
    fault = {};
    const auto rest = net.shrink(std::span(&dead, 1));
    gs::gradient_buckets<> again({gs::bytes{1000}, 1});  // after a fault the old ones are of no use
    again.add("small", small);
    again.add("large", large);
    steps = 0;  // with deadlines of a minute
    train(*rest, again, static_cast<float>(dead), 5);
    if (fault) check(gs::describe(fault).c_str(), "without it");
    if (wrongs == 0) std::printf("rank %u goes on without rank %u\n", net.rank(), dead);
    std::fflush(nullptr);
    std::_Exit(wrongs == 0 ? 0 : 1);  // MPI_Finalize would wait for who is gone
}

/// The last process has more elements than the others, by whole chunks or by another way of sending
/// them: all learn it, with nobody waiting for a deadline, and of three or more they learn whose.
/// What is called next isn't mistaken for the rest.
void lengths_differ() {
    using call = gs::collective_fault (*)(gs::mpi_transport&, std::vector<float>&, std::size_t n);
    const call calls[] = {
        [](gs::mpi_transport& net, std::vector<float>& x, std::size_t n) {
            return net.all_reduce(std::span<const float>(x).first(n), std::span(x).first(n), gs::sum{}, in(60s));
        },
        [](gs::mpi_transport& net, std::vector<float>& x, std::size_t n) {
            return net.reduce_scatter(std::span<const float>(x).first(n * net.size()), std::span(x).first(n), gs::sum{},
                                      in(60s));
        },
        [](gs::mpi_transport& net, std::vector<float>& x, std::size_t n) {
            return net.all_gather(std::span<const float>(x).last(n), std::span(x).first(n * net.size()), in(60s));
        },
    };
    static std::vector<float> x;  // stays: after a fault messages may still come in
    constexpr std::size_t lengths[][2] = {{1024, 2048}, {1024, 3072}, {2048, 1024}, {0, 1024},
                                          {128, 256},   {1000, 2024}, {1040, 1072}};
    for (std::size_t c = 0; c < std::size(calls); ++c)
        for (const auto& [most, last] : lengths) {
            gs::mpi_transport net(MPI_COMM_WORLD, {.message = gs::bytes{2048}, .one_shot = gs::bytes{512}});
            x.resize(std::size_t{3072} * (net.size() + 1), 1.0F);
            auto f = calls[c](net, x, net.rank() == net.size() - 1 ? last : most);
            if (!f) f = net.barrier(in(60s));  // it heard of it afterwards
            if (f.code != gs::errc::mismatch || (net.size() > 2 && f.rank != net.size() - 1))
                check(gs::describe(f).c_str(), ("lengths of call " + std::to_string(c) + ": " + std::to_string(most) +
                                                " and " + std::to_string(last))
                                                   .c_str());
            MPI_Barrier(MPI_COMM_WORLD);
        }
}

/// The last process has no memory for what it does: its first allocation fails, or its second one,
/// and so on. `act` may throw std::bad_alloc there. The others, whose calls wait for a minute, learn
/// at once who has no memory. Goes on until all allocations succeed.
template <class Act>
void one_without_memory(const char* what, gs::mpi_options options, const Act& act) {
    int threw = 1, allocations = 0;
    for (; threw != 0; ++allocations) {
        gs::mpi_transport net(MPI_COMM_WORLD, options);
        const std::uint32_t last = net.size() - 1;
        static std::vector<float> x, y;  // they stay: after a fault messages may still come in
        x.resize(std::size_t{3000} * net.size(), 1.0F);
        y.resize(x.size());
        gs::collective_fault f;
        threw = 0;
        if (net.rank() == last) support::this_heap = {.good = static_cast<std::size_t>(allocations), .recovers = true};
        try {
            f = act(net, x, y);
        } catch (const std::bad_alloc&) {
            threw = 1;
        }
        support::this_heap = {};
        MPI_Bcast(&threw, 1, MPI_INT, static_cast<int>(last), MPI_COMM_WORLD);
        if (threw != 0 && !f) f = net.barrier(in(60s));  // it heard of it afterwards
        const bool right = threw != 0 ? f.code == gs::errc::out_of_memory && f.rank == last : !f;
        if (!right) check(std::to_string(allocations) + ": " + gs::describe(f).c_str(), what);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    if (allocations < 2) check("no allocation has failed", what);
}
void calls_without_memory() {
    using floats = std::vector<float>;
    for (const std::uint64_t size : {2048U, 1U << 20}) {  // several messages, or one shot
        const gs::mpi_options options{.message = gs::bytes{size}, .depth = 2, .one_shot = gs::bytes{size}};
        one_without_memory("a sum without memory", options, [](gs::mpi_transport& net, floats& x, floats&) {
            return net.all_reduce(std::span<const float>(x), std::span(x), gs::sum{}, in(60s));
        });
        one_without_memory("a gather without memory", options, [](gs::mpi_transport& net, floats& x, floats& y) {
            return net.all_gather(std::span<const float>(x).first(x.size() / net.size()), std::span(y), in(60s));
        });
    }
    one_without_memory("parts without memory", {}, [](gs::mpi_transport& net, floats& x, floats& y) {
        return net.reduce_scatter(std::span<const float>(x), std::span(y).first(x.size() / net.size()), gs::sum{},
                                  in(60s));
    });
    one_without_memory("pairs without memory", {}, [](gs::mpi_transport& net, floats& x, floats& y) {
        std::array<std::uint64_t, 64> counts;
        counts.fill(3000);
        const auto each = std::span<const std::uint64_t>(counts).first(net.size());
        return net.all_to_allv(std::span<const float>(x), each, std::span(y), each, in(60s));
    });
    one_without_memory("a broadcast without memory", {}, [](gs::mpi_transport& net, floats& x, floats&) {
        return net.broadcast(std::span(x), 0, in(60s));
    });
}

/// The last process has no memory at all when it leaves, or gives up: it says so all the same.
void farewells_without_memory() {
    for (const bool leaves : {true, false}) {
        gs::mpi_transport net(MPI_COMM_WORLD);
        const std::uint32_t last = net.size() - 1;
        if (net.rank() == last) {
            support::this_heap.good = 0;
            if (leaves) {
                net.leave(last, gs::errc::stopped);
            } else {
                net.abort(last, gs::errc::stopped);
                net.advance();
            }
            support::this_heap = {};
        }
        const auto f = net.barrier(in(60s));
        if (f.code != gs::errc::stopped || f.rank != last) check(gs::describe(f).c_str(), "a farewell without memory");
        MPI_Barrier(MPI_COMM_WORLD);
    }
}

/// The last process can't make its transport, which is what `make(net)` does for an optional or a
/// pointer.
template <class Net, class Make>
void one_makes_no_transport(const char* what, const Make& make) {
    int threw = 1, allocations = 0;
    for (; threw != 0; ++allocations) {
        Net net{};
        int rank = 0, size = 0;
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &size);
        threw = 0;
        if (rank == size - 1) support::this_heap = {.good = static_cast<std::size_t>(allocations), .recovers = true};
        try {
            make(net);
        } catch (const std::bad_alloc&) {
            threw = 1;
        }
        support::this_heap = {};
        MPI_Bcast(&threw, 1, MPI_INT, size - 1, MPI_COMM_WORLD);
        if (net) {
            const auto f = net->barrier(in(60s));
            const auto last = static_cast<std::uint32_t>(size - 1);
            const bool right = threw != 0 ? f.code == gs::errc::out_of_memory && f.rank == last : !f;
            if (!right) check(gs::describe(f).c_str(), what);
        }
        MPI_Barrier(MPI_COMM_WORLD);
    }
    if (allocations < 2) check("no allocation has failed", what);
}
void a_transport_without_memory() {
    one_makes_no_transport<std::optional<gs::mpi_transport>>("a transport without memory",
                                                             [](auto& net) { net.emplace(MPI_COMM_WORLD); });
    gs::mpi_transport all(MPI_COMM_WORLD);
    one_makes_no_transport<std::unique_ptr<gs::mpi_transport>>("a smaller transport without memory",
                                                               [&](auto& net) { net = all.shrink({}); });
}

/// An MPI that wasn't initialised for as many threads as are asked for.
void too_few_threads() {
    int level = 0;
    MPI_Query_thread(&level);
    try {
        const gs::mpi_transport net(MPI_COMM_WORLD, {.threads = level + 1});
        check("none", "no error of threads");
    } catch (const gs::operation_error& e) {
        if (e.code() != gs::errc::not_supported) check(e.what(), "another error of threads");
    }
}

void an_abort_is_heard() {
    gs::mpi_transport net(MPI_COMM_WORLD);
    if (net.rank() == 0) net.abort(1, gs::errc::stopped);
    const auto f = net.barrier(gs::never);
    if (f.code != gs::errc::stopped || f.rank != 1) check(gs::describe(f).c_str(), "abort");
    MPI_Barrier(MPI_COMM_WORLD);
}

/// A program may go on to call a transport that has failed, for as long as it likes.
void calls_after_a_fault_keep_nothing() {
    gs::mpi_transport net(MPI_COMM_WORLD);
    net.abort(0, gs::errc::stopped);
    std::vector<float> x(1000);
    const auto call = [&] {
        const auto ticket = net.start_all_reduce(std::span(x), gs::sum{});
        if (net.finish(ticket, in(60s)).code != gs::errc::stopped || net.barrier(in(60s)).code != gs::errc::stopped)
            check("no fault", "calls after a fault");
    };
    call();
    const std::size_t before = ::mallinfo2().uordblks;
    for (int i = 0; i < 2000; ++i) call();
    const std::size_t after = ::mallinfo2().uordblks;
    if (after > before + (std::size_t{256} << 10))
        check(std::to_string(after - before) + " bytes", "kept by calls after a fault");
    MPI_Barrier(MPI_COMM_WORLD);
}

}  // namespace

int main(int argc, char** argv) {
    int level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    if (argc > 1 && std::string(argv[1]) == "killed") return killed();
    for (const std::uint64_t message : {std::uint64_t{1} << 20, std::uint64_t{2048}}) {
        gs::mpi_transport net(MPI_COMM_WORLD, {.message = gs::bytes{message}, .depth = 2, .one_shot = gs::bytes{512}});
        check(conformance::check_transport(net), "a transport");
    }
    sent_is_what_the_type_says();
    words_go_to_all();
    gossip();
    what_is_ready_everywhere();
    threads_in_processes(true);
    threads_in_processes(false);
    devices_in_processes();
    compressed_links();
    steps_in_processes();
    one_leaves_in_order();
    one_stops();
    batches_differ();
    one_piece_or_several();
    two_of_many_chunks();
    an_abort_is_heard();
    calls_after_a_fault_keep_nothing();
    lengths_differ();
    calls_without_memory();
    farewells_without_memory();
    a_transport_without_memory();
    too_few_threads();
    processes_call_different_things();
    threads_in_processes_call_different_things();
    for (const std::uint32_t absent : {0U, 1U, 2U}) a_thread_doesnt_come(absent);
    one_leaves_by_an_exception();
    one_doesnt_come();
    MPI_Finalize();
    return wrongs == 0 ? 0 : 1;
}
