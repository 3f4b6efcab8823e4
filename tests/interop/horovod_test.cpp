// SPDX-License-Identifier: Apache-2.0
// Horovod's names over threads: arrays that ranks pass in any order, sets of some ranks, ranks with
// fewer batches, and faults.
#include <gpushare/gradient/horovod.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <exception>
#include <latch>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/compressed_link.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/two_level.hpp>
#include <gpushare/gradient/wire.hpp>

#include "conformance/named_suite.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace horovod_test {

namespace gs = gpushare;
// NOLINTNEXTLINE(google-build-using-namespace): that is what a program does that moves here
using namespace gs::horovod;
using gs::errc;

namespace {

/// Calls f(rank, its end of a set of all) in a thread of each rank.
template <class F>
void on_ranks(std::uint32_t ranks, const F& f, const process_set_options& options = {}) {
    const gs::communicator group(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        process_set all(net, options);
        f(r, all);
    });
}

}  // namespace

TEST_CASE("arrays handed over in any order are combined by their names", "[interop]") {
    const auto seed = support::seed(GENERATE(range(1U, 6U)));
    const auto ranks = static_cast<std::uint32_t>(1 + seed % 4);
    CAPTURE(seed, ranks);
    support::random any(seed);
    std::vector<std::size_t> sizes(12);
    for (auto& n : sizes) n = any.below(200);
    const process_set_options options{.fusion = gs::bytes{any.one_in(2) ? 1U : 1000U}};
    std::vector<std::vector<std::vector<double>>> x(ranks), expected(ranks);
    for (std::uint32_t r = 0; r < ranks; ++r)
        for (const std::size_t n : sizes) {
            auto& one = x[r].emplace_back(n);
            for (double& v : one) v = static_cast<double>(any.below(1000));
        }
    for (std::uint32_t r = 0; r < ranks; ++r)
        for (std::size_t g = 0; g < sizes.size(); ++g) {
            auto& one = expected[r].emplace_back(sizes[g]);
            for (std::size_t i = 0; i < one.size(); ++i) {
                for (std::uint32_t q = 0; q < ranks; ++q) one[i] += x[q][g][i];
                if (g % 2 == 0) one[i] /= ranks;
            }
        }
    std::vector<std::vector<std::size_t>> orders(ranks, std::vector<std::size_t>(sizes.size()));
    for (auto& order : orders) {
        std::iota(order.begin(), order.end(), std::size_t{0});
        for (std::size_t k = order.size(); k > 1; --k) std::swap(order[k - 1], order[any.below(k)]);
    }
    on_ranks(
        ranks,
        [&](unsigned r, process_set& all) {
            std::vector<handle> handles;
            for (const std::size_t g : orders[r])
                handles.push_back(
                    allreduce_async(std::span(x[r][g]), "g" + std::to_string(g), g % 2 == 0 ? Average : Sum, all));
            synchronize(handles);
        },
        options);
    CHECK(x == expected);
}

TEST_CASE("a set with unlimited patience waits for the other ranks' last arrays", "[interop]") {
    const gs::communicator group(2);
    std::vector<float> x{1.0F, 2.0F};
    std::vector<int> faults(2);
    support::together(2, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        try {
            process_set all(net, {.patience = gs::ns::max()});
            if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
            const handle h = allreduce_async(std::span(x).subspan(r, 1), "last", Sum, all);
            if (r == 1) synchronize(h);  // rank 0 only leaves
        } catch (const gs::error&) {
            faults[r] = 1;
        }
    });
    CHECK(faults == std::vector<int>(2));
    CHECK(x == std::vector<float>{3.0F, 3.0F});
}

TEST_CASE("a handle is done when all ranks have come, and not before", "[interop]") {
    std::vector<int> wrong(2);
    on_ranks(2, [&](unsigned r, process_set& all) {
        std::vector<float> first{1.0F + static_cast<float>(r)}, second{5};
        if (r == 0) {
            const handle early = allreduce_async(std::span(first), "early", Sum, all);
            synchronize(allreduce_async(std::span(second), "other", Sum, all));
            if (poll(early)) ++wrong[r];  // rank 1 hands it over behind the next one
            std::vector<float> go{0};
            allreduce(std::span(go), "go", Sum, all);
            synchronize(early);
            if (first[0] != 3 || second[0] != 10) ++wrong[r];
        } else {
            allreduce(std::span(second), "other", Sum, all);
            std::vector<float> go{0};
            allreduce(std::span(go), "go", Sum, all);
            allreduce(std::span(first), "early", Sum, all);
        }
        if (!poll(handle{})) ++wrong[r];
    });
    CHECK(wrong == std::vector<int>(2));
}

TEST_CASE("groups, broadcasts and other types", "[interop]") {
    std::vector<int> wrong(3);
    on_ranks(3, [&](unsigned r, process_set& all) {
        std::vector<gs::bfloat16> a(5, static_cast<gs::bfloat16>(3.0F * static_cast<float>(r)));
        std::vector<gs::bfloat16> b(2, static_cast<gs::bfloat16>(1.0F));
        const std::vector<std::span<gs::bfloat16>> list{a, b};
        grouped_allreduce(std::span(list), "block", Average, all);
        if (static_cast<float>(a[4]) != 3 || static_cast<float>(b[1]) != 1) ++wrong[r];
        std::vector<std::int64_t> count{static_cast<std::int64_t>(r) + 1};
        allreduce(std::span(count), "count", Sum, all);
        if (count[0] != 6) ++wrong[r];
        std::vector<double> from{static_cast<double>(r), 7};
        synchronize(broadcast_async(std::span(from), 2, "from", all));
        if (from != std::vector<double>{2, 7}) ++wrong[r];
        if (all.rank() != r || all.size() != 3) ++wrong[r];
    });
    CHECK(wrong == std::vector<int>(3));
}

TEST_CASE("sets of some of the ranks work side by side", "[interop]") {
    const gs::communicator everybody(4), odd(2), even(2);
    std::vector<float> sums(4), of_all(4);
    support::together(4, [&](unsigned r) {
        gs::thread_transport net(everybody.rank(r)), some((r % 2 == 0 ? even : odd).rank(r / 2));
        process_set all(net), mine(some);
        std::vector<float> x{static_cast<float>(r)}, y = x;
        const handle h = allreduce_async(std::span(x), "x", Sum, mine);
        allreduce(std::span(y), "x", Sum, all);
        synchronize(h);
        sums[r] = x[0];
        of_all[r] = y[0];
    });
    CHECK(sums == std::vector<float>{2, 4, 2, 4});
    CHECK(of_all == std::vector<float>(4, 6));
}

TEST_CASE("over a link of the largest elements, a set of some ranks averages over these ranks", "[interop]") {
    const gs::communicator everybody(3), pair(2), between(2);
    const std::vector<std::vector<float>> steps[2]{{{8, 0, 2, -6}, {4, 4, 0, 0}}, {{0, 0, 0, 0}, {0, 1, 12, 2}}};
    std::vector<std::vector<std::vector<float>>> seen(2), expected(2);
    std::vector<std::vector<float>> owed(2), left(2), of_all(3);
    support::together(3, [&](unsigned r) {
        gs::thread_transport net(everybody.rank(r));
        process_set all(net);
        of_all[r] = {static_cast<float>(r)};
        if (r != 1) {
            const unsigned q = r / 2;
            gs::thread_transport some(pair.rank(q)), same(between.rank(q));
            gs::top_k_link sparse(some, 4, 0.5);
            gs::top_k_feedback mine_alone(4, 2);
            {
                process_set mine(sparse);
                for (const auto& x : steps[q]) {
                    seen[q].push_back(x);
                    expected[q].push_back(x);
                    allreduce(std::span(seen[q].back()), "x", Average, mine);
                    (void)gs::all_reduce_top_k(same, mine_alone, std::span(expected[q].back()));
                }
                if (mine.size() != 2 || mine.rank() != q) seen[q].clear();
            }
            owed[q] = sparse.owed();
            left[q].assign(mine_alone.residual().begin(), mine_alone.residual().end());
        }
        allreduce(std::span(of_all[r]), "x", Average, all);
    });
    CHECK(seen == expected);
    CHECK(seen[0] == seen[1]);
    CHECK(seen[0] == std::vector<std::vector<float>>{{4, 0, 0, -3}, {2, 2, 6, 1}});
    CHECK(owed == left);
    CHECK(of_all == std::vector<std::vector<float>>(3, {1}));
}

TEST_CASE("over a link of the largest elements, an average is over the ranks that haven't joined", "[interop]") {
    const gs::communicator group(3);
    std::vector<std::vector<float>> seen(3);
    support::together(3, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        gs::top_k_link sparse(net, 2, 1.0);
        process_set all(sparse);
        for (unsigned step = 0; step < 2 && (step == 0 || r != 1); ++step) {
            std::vector<float> x(2, static_cast<float>(3 * r));
            allreduce(std::span(x), "x", Average, all);
            seen[r].push_back(x[1]);
        }
        (void)join(all);
    });
    CHECK(seen == std::vector<std::vector<float>>{{3, 3}, {3}, {3, 3}});
}

TEST_CASE("a link leaves halves unchanged, also once a rank has joined", "[interop]") {
    const gs::communicator group(3);
    std::vector<std::vector<float>> seen(3);
    support::together(3, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        gs::top_k_link sparse(net, 2, 1.0);
        process_set all(sparse);
        for (unsigned step = 0; step < 2 && (step == 0 || r != 1); ++step) {
            std::vector<gs::float16> x(5, static_cast<gs::float16>(static_cast<float>(3 * r)));
            allreduce(std::span(x), "x", Average, all);
            seen[r].push_back(static_cast<float>(x[4]));
        }
        (void)join(all);
    });
    CHECK(seen == std::vector<std::vector<float>>{{3, 3}, {3}, {3, 3}});
}

TEST_CASE("ranks with fewer batches join: an average is over the others, and all ranks learn which one was last",
          "[interop]") {
    const std::vector<int> batches{2, 4, 1};
    std::vector<std::vector<float>> seen(3);
    std::vector<std::vector<std::uint32_t>> last(3);
    on_ranks(3, [&](unsigned r, process_set& all) {
        for (int epoch = 0; epoch < 2; ++epoch) {
            for (int b = 0; b < batches[r]; ++b) {
                std::vector<float> x(3, static_cast<float>(r + 1));
                const std::string name = "x" + std::to_string(b);
                allreduce(std::span(x), name, Average, all);
                seen[r].push_back(x[2]);
            }
            last[r].push_back(join(all));
        }
    });
    // 1, 2 and 3; then 1 and 2; then 2 alone.
    CHECK(seen[0] == std::vector<float>{2, 1.5F, 2, 1.5F});
    CHECK(seen[1] == std::vector<float>{2, 1.5F, 2, 2, 2, 1.5F, 2, 2});
    CHECK(seen[2] == std::vector<float>{2, 2});
    for (const auto& l : last) CHECK(l == std::vector<std::uint32_t>{1, 1});
}

TEST_CASE("every operator over threads: ranks that have joined change no result", "[interop]") {
    const auto ranks = GENERATE(1U, 2U, 4U);
    const gs::communicator group(ranks);
    std::vector<std::string> wrong(ranks);
    support::together(ranks, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        wrong[r] = conformance::check_named(net);
    });
    for (const auto& w : wrong) CHECK(w == "");
}

TEST_CASE("every operator over two levels: ranks that have joined change no result", "[interop]") {
    const gs::communicator between(2);
    std::vector<std::unique_ptr<gs::communicator>> inside;
    std::vector<std::unique_ptr<gs::thread_transport>> outer;
    for (std::uint32_t p = 0; p < 2; ++p) {
        inside.push_back(std::make_unique<gs::communicator>(p + 1));
        outer.push_back(std::make_unique<gs::thread_transport>(between.rank(p)));
    }
    std::vector<std::optional<gs::two_level_group<gs::thread_transport>>> groups(2);
    support::together(2, [&](unsigned p) { groups[p].emplace(gs::split(*inside[p], *outer[p])); });
    std::vector<std::string> wrong(3);
    support::together(3, [&](unsigned r) {
        auto net = groups[r == 0 ? 0 : 1]->rank(r == 2 ? 1 : 0);
        wrong[r] = conformance::check_named(net);
    });
    for (const auto& w : wrong) CHECK(w == "");
}

using support::code_of;

TEST_CASE("an array of another length or operator is refused on all ranks, and the set goes on", "[interop]") {
    std::vector<std::vector<errc>> codes(2);
    std::vector<float> sums(2);
    on_ranks(2, [&](unsigned r, process_set& all) {
        std::vector<float> x(4 + r, 1.0F), y(3, 1.0F);
        codes[r].push_back(code_of([&] { allreduce(std::span(x), "length", Sum, all); }));
        codes[r].push_back(code_of([&] { allreduce(std::span(y), "operator", r == 0 ? Sum : Average, all); }));
        std::vector<std::int64_t> whole{1};
        codes[r].push_back(code_of([&] { allreduce(std::span(whole), "whole", Average, all); }));
        codes[r].push_back(code_of([&] { (void)broadcast_async(std::span(y), 2, "root", all); }));
        allreduce(std::span(y), "fine", Sum, all);
        sums[r] = y[0];
    });
    for (const auto& c : codes)
        CHECK(c ==
              std::vector{errc::mismatch, errc::mismatch, errc::invalid_specification, errc::invalid_specification});
    CHECK(sums == std::vector<float>{2, 2});
}

TEST_CASE("a name whose collective is in progress is refused", "[interop]") {
    errc twice = errc::none;
    const gs::communicator group(2);
    support::together(2, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        std::vector<float> x{1}, y{1};
        process_set all(net);
        if (r != 0) return;
        (void)allreduce_async(std::span(x), "x", Sum, all);
        twice = code_of([&] { (void)allreduce_async(std::span(y), "x", Sum, all); });
    });
    CHECK(twice == errc::duplicate_name);
}

TEST_CASE("a group is handed over as a whole or not at all", "[interop]") {
    errc group_of_two = errc::none, alone = errc::mismatch;
    const gs::communicator group(2);
    support::together(2, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        std::vector<float> x{1}, y{1}, z{1};
        const std::vector<std::span<float>> list{x, y};
        process_set all(net);
        if (r != 0) return;
        (void)allreduce_async(std::span(z), "g.1", Sum, all);
        group_of_two = code_of([&] { (void)grouped_allreduce_async(std::span(list), "g", Sum, all); });
        alone = code_of([&] { (void)allreduce_async(std::span(x), "g.0", Sum, all); });
    });
    CHECK(group_of_two == errc::duplicate_name);
    CHECK(alone == errc::none);
}

TEST_CASE("a group that fails leaves no array under way", "[interop]") {
    errc failed = errc::none;
    std::atomic<bool> left{false};
    bool under_way = true;
    on_ranks(2, [&](unsigned r, process_set& all) {
        std::vector<float> x(1 + r), y{1};
        if (r == 0) {
            const std::vector<std::span<float>> list{x, y};
            failed = code_of([&] { grouped_allreduce(std::span(list), "g", Sum, all); });
            // handed over again, a name that is under way would be refused
            under_way = code_of([&] { (void)allreduce_async(std::span(x), "g.1", Sum, all); }) != errc::none;
            left = true;
            return;
        }
        CHECK(code_of([&] { allreduce(std::span(x), "g.0", Sum, all); }) == errc::mismatch);
        // Rank 0 would leave at once if it didn't wait for its second array.
        for (int k = 0; k < 200 && !left; ++k) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        allreduce(std::span(y), "g.1", Sum, all);
    });
    CHECK(failed == errc::mismatch);
    CHECK_FALSE(under_way);
}

namespace {

/// Counts what it is asked for.
struct counted : gs::thread_transport {
    using gs::thread_transport::thread_transport;
    template <gs::reducible T, class Op>
    [[nodiscard]] gs::collective_fault all_reduce(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                                  const Op& op, gs::instant deadline) {
        if (!std::same_as<T, std::uint64_t>) ++sums;
        return gs::thread_transport::all_reduce<T>(in, out, op, deadline);
    }
    template <class T>
    [[nodiscard]] gs::collective_fault broadcast(std::span<T> data, std::uint32_t root, gs::instant deadline) {
        ++asked;
        return gs::thread_transport::broadcast(data, root, deadline);
    }
    std::atomic<int> sums{0}, asked{0};
};

}  // namespace

TEST_CASE("arrays that are ready together are combined together, up to a size", "[interop]") {
    const bool fused = GENERATE(false, true);
    const gs::communicator group(2);
    int sums = 0;
    std::vector<std::vector<float>> x(5, std::vector<float>{1});
    std::latch handed(1);
    support::together(2, [&](unsigned r) {
        counted net(group.rank(r));
        if (r == 1) handed.wait();  // rank 0's thread waits for this rank's meanwhile
        process_set all(net, {.fusion = gs::bytes{fused ? 1000U : 4U}});
        if (r == 1) {
            (void)join(all);
            return;
        }
        std::vector<handle> handles;
        for (std::size_t k = 0; k < x.size(); ++k)
            handles.push_back(allreduce_async(std::span(x[k]), std::to_string(k), Sum, all));
        handed.count_down();
        synchronize(handles);
        sums = net.sums;
        (void)join(all);
    });
    CHECK((fused ? sums <= 2 : sums == 5));
    CHECK(x == std::vector<std::vector<float>>(5, {1}));
}

TEST_CASE("the set asks again about arrays that aren't ready after a cycle", "[interop]") {
    const gs::communicator group(2);
    int asked = 0;
    std::latch seen(1);
    support::together(2, [&](unsigned r) {
        counted net(group.rank(r));
        process_set all(net, {.cycle = std::chrono::hours(1)});
        std::vector<float> x{1};
        if (r == 1) return seen.wait();
        (void)allreduce_async(std::span(x), "x", Sum, all);
        while (net.asked < 2) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        asked = net.asked;
        seen.count_down();
    });
    CHECK(asked == 2);  // how many, and which
}

TEST_CASE("the end of a set for which the others don't come aborts the group", "[interop]") {
    const gs::communicator group(2);
    std::latch over(1);
    errc code = errc::none;
    support::together(2, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        std::vector<float> x{1};
        if (r == 0) {
            { const process_set all(net, {.patience = std::chrono::seconds(1)}); }
            return over.count_down();
        }
        process_set all(net);
        over.wait();
        code = code_of([&] { allreduce(std::span(x), "x", Sum, all); });
    });
    CHECK(code == errc::stopped);
}

namespace {

/// One rank throws at its first all-reduce of floats. Others hear of an abort with the next call,
/// as over an MPI.
struct failing_transport : gs::thread_transport {
    using gs::thread_transport::thread_transport;
    template <class T, class Op>
    gs::collective_fault all_reduce(std::span<const std::type_identity_t<T>> in, std::span<T> out, const Op& op,
                                    gs::instant deadline) {
        if (std::same_as<T, float> && rank() == 1) throw std::bad_alloc();
        return gs::thread_transport::all_reduce(in, out, op, deadline);
    }
    gs::collective_fault barrier(gs::instant deadline) {
        if (why != errc::none) gs::thread_transport::abort(rank(), why);
        return gs::thread_transport::barrier(deadline);
    }
    void abort(std::uint32_t, errc code) { why = code; }
    errc why = errc::none;
};

}  // namespace

TEST_CASE("all ranks get the code of an exception on a rank's thread, and that rank's own error nests the exception",
          "[interop]") {
    const gs::communicator group(2);
    std::vector<errc> codes(2), later(2);
    std::vector<int> nested(2);
    support::together(2, [&](unsigned r) {
        failing_transport net(group.rank(r));
        process_set all(net);
        std::vector<float> x{1};
        try {
            allreduce(std::span(x), "x", Sum, all);
        } catch (const gs::operation_error& e) {
            codes[r] = e.figures().left == 1 ? e.code() : errc::none;
            nested[r] = dynamic_cast<const std::nested_exception*>(&e) != nullptr ? 1 : 0;
        }
        later[r] = code_of([&] { allreduce(std::span(x), "y", Sum, all); });
    });
    CHECK(codes == std::vector<errc>(2, errc::out_of_memory));
    CHECK(later == codes);
    CHECK(nested == std::vector<int>{0, 1});
}

TEST_CASE("a process's own end needs no argument", "[interop]") {
    std::vector<float> x{2};
    CHECK(code_of([&] { allreduce(std::span(x), "x"); }) == errc::invalid_specification);
    CHECK_FALSE(is_initialized());
    const gs::communicator group(1);
    gs::thread_transport net(group.rank(0));
    init(net);
    CHECK(is_initialized());
    CHECK(gs::horovod::rank() == 0);
    CHECK(gs::horovod::size() == 1);
    allreduce(std::span(x), "x");
    CHECK(x[0] == 2);
    CHECK(gs::horovod::join() == 0);
    shutdown();
    CHECK_FALSE(is_initialized());
}

TEST_CASE("a process has one set of its own, however many threads make one", "[interop]") {
    constexpr unsigned threads = 4;
    const gs::communicator group(1);
    for (int round = 0; round < 20; ++round) {
        std::atomic<int> made{0}, refused{0}, whole{0};
        std::vector<std::unique_ptr<gs::thread_transport>> nets;
        for (unsigned t = 0; t < threads; ++t) nets.push_back(std::make_unique<gs::thread_transport>(group.rank(0)));
        support::together(threads, [&](unsigned t) {
            const errc code = code_of([&] { init(*nets[t]); });
            made += code == errc::none ? 1 : 0;
            refused += code == errc::invalid_specification ? 1 : 0;
            whole += gs::horovod::size() == 1 && is_initialized() ? 1 : 0;  // someone's, in any case
        });
        CHECK(made == 1);
        CHECK(refused == threads - 1);
        CHECK(whole == threads);
        support::together(threads, [](unsigned) { shutdown(); });
        CHECK_FALSE(is_initialized());
    }
}

TEST_CASE("a rank that aborts ends the other ranks' waits", "[interop]") {
    const gs::communicator group(3);
    std::vector<errc> codes(3);
    support::together(3, [&](unsigned r) {
        gs::thread_transport net(group.rank(r));
        process_set all(net);
        std::vector<float> x{1};
        if (r == 1)
            net.abort(1, errc::stopped);
        else
            codes[r] = code_of([&] { allreduce(std::span(x), "x", Sum, all); });
    });
    CHECK(codes == std::vector{errc::stopped, errc::none, errc::stopped});
}

}  // namespace horovod_test
