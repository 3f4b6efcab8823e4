// SPDX-License-Identifier: Apache-2.0
// Horovod's names for arrays on devices, on the host backend: the results of all ranks, whatever
// the order, and of ranks that make other calls, are late, stop or abort.
// tests/cuda/horovod_test.cpp checks which work waits for which stream.
#include <gpushare/gradient/horovod_devices.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <memory_resource>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/gradient/transport.hpp>

#include "support/catch.hpp"
#include "support/named_outcome.hpp"
#include "support/named_ranks.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

namespace horovod_devices_test {

namespace gs = gpushare;
// NOLINTNEXTLINE(google-build-using-namespace): that is what a program does that moves here
using namespace gs::horovod;
using namespace std::chrono_literals;
using gs::collective_kind;
using gs::errc;

namespace {

using machine_type = support::named_machine<gs::host::node, std::pmr::memory_resource, gs::communicator, float>;

/// Ranks on a device each, or all on one.
struct rig {
    explicit rig(std::uint32_t count, bool together = true, std::size_t staging = 512, const device_options& o = {})
        : node({.devices = together ? 1 : count, .sms = 8}),
          group(count, {.blocks = 2}),
          m(node, *std::pmr::new_delete_resource(), group, together, staging, o) {
        for (std::uint32_t r = 0; r < count; ++r) sets.push_back(std::make_unique<process_set>(*m.ranks, r));
    }
    [[nodiscard]] std::uint32_t size() const { return static_cast<std::uint32_t>(sets.size()); }
    template <class E>
    [[nodiscard]] device_array<E> array(std::uint32_t r, std::vector<E>& x, std::size_t row = 1) {
        return m.array(r, std::span(x), row);
    }

    gs::host::node node;
    gs::communicator group;
    machine_type m;
    std::vector<std::unique_ptr<process_set>> sets;
};

using outcome = support::named_outcome;
using support::into;
using support::outcome_of;

}  // namespace

TEST_CASE("arrays on devices are combined by their names, in whatever order ranks hand them over", "[interop]") {
    const auto seed = support::seed(GENERATE(range(1U, 9U)));
    support::random any(seed);
    const auto ranks = static_cast<std::uint32_t>(1 + any.below(4));
    const std::size_t staging = any.one_in(2) ? 64 : 4096;
    CAPTURE(seed, ranks, staging);
    std::vector<std::vector<std::vector<float>>> x(ranks), expected(ranks);
    std::vector<std::size_t> sizes(12);
    for (auto& n : sizes) n = any.below(200);
    sizes[3] = 0;
    for (auto& of : x)
        for (const std::size_t n : sizes)
            for (float& v : of.emplace_back(n)) v = static_cast<float>(any.below(1000));
    for (std::size_t g = 0; g < sizes.size(); ++g) {
        std::vector<float> sum(sizes[g]);
        for (std::size_t i = 0; i < sizes[g]; ++i) {
            for (std::uint32_t q = 0; q < ranks; ++q) sum[i] += x[q][g][i];
            if (g % 2 == 0) sum[i] /= static_cast<float>(ranks);
        }
        for (auto& of : expected) of.push_back(sum);
    }
    std::vector<std::vector<std::size_t>> orders(ranks, std::vector<std::size_t>(sizes.size()));
    for (auto& order : orders) {
        std::iota(order.begin(), order.end(), std::size_t{0});
        for (std::size_t k = order.size(); k > 1; --k) std::swap(order[k - 1], order[any.below(k)]);
    }
    rig r(ranks, any.one_in(2), staging);
    support::together(ranks, [&](unsigned k) {
        std::vector<handle> handles;
        for (const std::size_t g : orders[k])
            handles.push_back(
                allreduce_async(r.array(k, x[k][g]), "g" + std::to_string(g), g % 2 == 0 ? Average : Sum, *r.sets[k]));
        synchronize(handles);
        r.m.wait(k);
        for (const handle& h : handles)
            if (!poll(h)) x[k][0].assign(1, -1);
    });
    CHECK(x == expected);
}

TEST_CASE("a group on devices is handed over at once, and a rank may wait for it first", "[interop]") {
    rig r(2);
    std::vector<std::vector<float>> a(2, std::vector<float>(7, 1)), b(2, std::vector<float>(40, 2));
    std::vector<std::vector<float>> alone(2, std::vector<float>(3, 5));
    std::vector<int> wrong(2);
    support::together(2, [&](unsigned k) {
        const std::vector list{r.array(k, a[k]), r.array(k, b[k])};
        const auto one = [&] { allreduce(r.array(k, alone[k]), "alone", Sum, *r.sets[k]); };
        std::vector<handle> handles;
        if (k == 0) one();
        handles = grouped_allreduce_async(std::span<const device_array<float>>(list), "block", Sum, *r.sets[k]);
        if (k == 1) one();
        synchronize(handles);
        grouped_allreduce(std::span<const device_array<float>>(list), "block", Average, *r.sets[k]);
        r.m.wait(k);
    });
    for (std::uint32_t k = 0; k < 2; ++k) {
        CHECK(a[k] == std::vector<float>(7, 2));
        CHECK(b[k] == std::vector<float>(40, 4));
        CHECK(alone[k] == std::vector<float>(3, 10));
    }
}

TEST_CASE("rows of several lengths are gathered, exchanged and scattered", "[interop]") {
    const auto seed = support::seed(GENERATE(range(1U, 9U)));
    support::random any(seed);
    const auto ranks = static_cast<std::uint32_t>(1 + any.below(4));
    const bool together = any.one_in(2);
    const std::size_t row = 1 + any.below(5), summed = any.below(3 * ranks + 1);
    CAPTURE(seed, ranks, together, row, summed);
    rig r(ranks, together);
    std::vector<std::vector<std::uint64_t>> splits(ranks), got_rows(ranks), gathered_rows(ranks), part_rows(ranks);
    std::vector<std::vector<float>> in(ranks), got(ranks), gathered(ranks), parts(ranks), shared(ranks);
    for (std::uint32_t k = 0; k < ranks; ++k) {
        for (std::uint32_t q = 0; q < ranks; ++q) splits[k].push_back(any.one_in(3) ? 0 : any.below(6));
        in[k].resize(std::accumulate(splits[k].begin(), splits[k].end(), std::uint64_t{0}) * row);
        for (std::size_t i = 0; i < in[k].size(); ++i) in[k][i] = static_cast<float>(1000 * k + i);
        shared[k].resize(summed * row);
        for (std::size_t i = 0; i < shared[k].size(); ++i) shared[k][i] = static_cast<float>((k + 1) * i);
    }
    support::together(ranks, [&](unsigned k) {
        const std::array all{
            allgather_async(r.array(k, in[k], row), into(gathered[k], gathered_rows[k], row), "all", *r.sets[k]),
            alltoall_async(r.array(k, in[k], row), splits[k], into(got[k], got_rows[k], row), "to", *r.sets[k]),
            reducescatter_async(r.array(k, shared[k], row), into(parts[k], part_rows[k], row), "part", Sum,
                                *r.sets[k])};
        synchronize(all);
        r.m.wait(k);
    });
    std::vector<float> everything;
    for (const auto& x : in) everything.insert(everything.end(), x.begin(), x.end());
    for (std::uint32_t k = 0; k < ranks; ++k) {
        CHECK(gathered[k] == everything);
        std::vector<float> mine;
        for (std::uint32_t q = 0; q < ranks; ++q) {
            CHECK(gathered_rows[k][q] * row == in[q].size());
            CHECK(got_rows[k][q] == splits[q][k]);
            const auto before = std::accumulate(splits[q].begin(), splits[q].begin() + k, std::uint64_t{0}) * row;
            mine.insert(mine.end(), in[q].begin() + static_cast<std::ptrdiff_t>(before),
                        in[q].begin() + static_cast<std::ptrdiff_t>(before + splits[q][k] * row));
        }
        CHECK(got[k] == mine);
        const auto range = gs::shard_of(summed, k, ranks);
        CHECK(part_rows[k] == std::vector<std::uint64_t>{range.size()});
        REQUIRE(parts[k].size() == range.size() * row);
        for (std::size_t i = 0; i < parts[k].size(); ++i)
            CHECK(parts[k][i] == static_cast<float>(ranks * (ranks + 1) / 2 * (range.begin * row + i)));
    }
}

TEST_CASE("a call that differs is refused on all ranks with the odd one, and the set goes on", "[interop]") {
    rig r(3);
    std::vector<std::vector<outcome>> seen(3);
    std::vector<std::vector<float>> last(3, std::vector<float>(4, 1));
    support::together(3, [&](unsigned k) {
        process_set& of = *r.sets[k];
        std::vector<float> x(6, 1), longer(k == 2 ? 8 : 6, 1), to;
        std::vector<double> y(6, 1);
        std::vector<std::uint64_t> rows;
        const auto note = [&](const auto& start) {
            seen[k].push_back(outcome_of([&] { synchronize(start()); }));
            r.m.wait(k);
        };
        note([&] { return allreduce_async(r.array(k, longer), "length", Sum, of); });
        note([&] { return allreduce_async(r.array(k, x), "operator", k == 0 ? Max : Sum, of); });
        note([&] {
            return k == 1 ? broadcast_async(r.array(k, y), 0, "type", of)
                          : broadcast_async(r.array(k, x), 0, "type", of);
        });
        note([&] {
            return k == 1 ? broadcast_async(r.array(k, x), 0, "kind", of)
                          : allreduce_async(r.array(k, x), "kind", Sum, of);
        });
        note([&] { return broadcast_async(r.array(k, x), k == 2 ? 1 : 0, "root", of); });
        note([&] { return allgather_async(r.array(k, x, k == 0 ? 3 : 2), into(to, rows, 3), "row", of); });
        allreduce(r.array(k, last[k]), "fine", Sum, of);
        r.m.wait(k);
    });
    for (const auto& s : seen)
        CHECK(s == std::vector<outcome>{{errc::mismatch, 2},
                                        {errc::mismatch, 0},
                                        {errc::mismatch, 1},
                                        {errc::mismatch, 1},
                                        {errc::mismatch, 2},
                                        {errc::mismatch, 0}});
    CHECK(last == std::vector(3, std::vector<float>(4, 3)));
}

TEST_CASE("a rank without memory for its result is named to all, and the set goes on", "[interop]") {
    const int how = GENERATE(0, 1, 2, 3);
    const std::array codes{errc::over_quota, errc::out_of_memory, errc::submission_failed, errc::submission_failed};
    rig r(2);
    std::vector<outcome> seen(2);
    std::vector<std::vector<float>> x(2, std::vector<float>(3, 1)), to(2);
    std::vector<std::vector<std::uint64_t>> rows(2);
    support::together(2, [&](unsigned k) {
        const auto place = [&](std::span<const std::uint64_t> of) -> void* {
            if (k == 0) return into(to[k], rows[k], 1)(of);
            if (how == 0) gs::raise({.code = errc::over_quota});
            if (how == 1) throw std::bad_alloc();
            if (how == 2) throw std::runtime_error("of a framework");
            throw how;  // no std::exception
        };
        seen[k] = outcome_of([&] { synchronize(allgather_async(r.array(k, x[k]), place, "x", *r.sets[k])); });
        allreduce(r.array(k, x[k]), "fine", Sum, *r.sets[k]);
        r.m.wait(k);
    });
    CHECK(seen == std::vector<outcome>(2, {codes[static_cast<std::size_t>(how)], 1}));
    CHECK(x == std::vector(2, std::vector<float>(3, 2)));
}

namespace {

/// Memory that the devices reach, and of which there is none.
class refusing final : public std::pmr::memory_resource {
public:
    explicit refusing(int how) : how_(how) {}

private:
    void* do_allocate(std::size_t, std::size_t) override {
        if (how_ == 0) gs::raise({.code = errc::over_quota});
        if (how_ == 1) throw std::bad_alloc();
        throw std::runtime_error("of a framework");
    }
    void do_deallocate(void*, std::size_t, std::size_t) override {}
    [[nodiscard]] bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
        return this == &other;
    }
    int how_;
};

}  // namespace

TEST_CASE("an exception while a call is enqueued is told to all by its code, with the rank that enqueued",
          "[interop]") {
    const int how = GENERATE(0, 1, 2);
    const std::array codes{errc::over_quota, errc::out_of_memory, errc::submission_failed};
    const errc code = codes[static_cast<std::size_t>(how)];
    gs::host::node node({.devices = 2, .sms = 8});
    const gs::communicator group(2, {.blocks = 2});
    refusing none(how);
    machine_type m(node, none, group, false);
    process_set first(*m.ranks, 0), second(*m.ranks, 1);
    std::vector<std::vector<float>> x(2, std::vector<float>(3, 1)), to(2);
    std::vector<std::vector<std::uint64_t>> rows(2);
    const auto gather = [&](std::uint32_t r, process_set& of) {
        return allgather_async(m.array(r, std::span(x[r])), into(to[r], rows[r], 1), "x", of);
    };
    const handle waits = gather(0, first), other = allreduce_async(m.array(0, std::span(x[0])), "y", Sum, first);
    if (how == 2)
        CHECK_THROWS_AS(gather(1, second), std::runtime_error);
    else if (how == 1)
        CHECK_THROWS_AS(gather(1, second), std::bad_alloc);
    else
        CHECK(outcome_of([&] { (void)gather(1, second); }).code == code);
    CHECK(outcome_of([&] { synchronize(waits); }) == outcome{code, 1});
    CHECK(outcome_of([&] { synchronize(other); }) == outcome{code, 1});
    CHECK(outcome_of([&] { allreduce(m.array(0, std::span(x[0])), "z", Sum, first); }) == outcome{code, 1});
}

TEST_CASE("a call that makes no sense is refused at once", "[interop]") {
    rig r(2);
    std::vector<float> x(6, 1), to;
    std::vector<std::uint64_t> rows;
    process_set& of = *r.sets[0];
    const auto code = [](const auto& f) { return outcome_of([&] { (void)f(); }).code; };
    const auto exchange = [&](std::vector<std::uint64_t> splits, std::size_t row) {
        return code([&] { return alltoall_async(r.array(0, x, row), splits, into(to, rows, row), "a", of); });
    };
    CHECK(code([&] { return broadcast_async(r.array(0, x), 2, "b", of); }) == errc::invalid_specification);
    CHECK(exchange({1}, 1) == errc::invalid_specification);
    CHECK(exchange({1, 2}, 4) == errc::invalid_specification);
    CHECK(exchange({5, 2}, 1) == errc::invalid_specification);
    CHECK(exchange({~std::uint64_t{0}, 2}, 1) == errc::invalid_specification);
    CHECK(code([&] {
              return allreduce_async(device_array<float>{x.data(), 6, nullptr}, "s", Sum, of);
          }) == errc::invalid_specification);
    CHECK(code([&] { return allreduce_async(std::span(x), "host", Sum, of); }) == errc::not_supported);
    CHECK(code([&] { return process_set(*r.m.ranks, 0).rank(); }) == errc::invalid_specification);
    CHECK(code([&] { return process_set(*r.m.ranks, 2).rank(); }) == errc::invalid_specification);
    (void)allreduce_async(r.array(0, x), "twice", Sum, of);
    CHECK(code([&] { return allreduce_async(r.array(0, x), "twice", Sum, of); }) == errc::duplicate_name);
    const gs::communicator one(1);
    gs::thread_transport net(one.rank(0));
    process_set over_net(net);
    CHECK(code([&] { return allreduce_async(r.array(0, x), "device", Sum, over_net); }) == errc::not_supported);
    CHECK_FALSE(over_net.on_devices());
    CHECK(of.on_devices());
    CHECK(of.size() == 2);
    CHECK(r.sets[1]->rank() == 1);
}

TEST_CASE("types that ranks don't combine can be moved", "[interop]") {
    rig r(1);
    process_set& of = *r.sets[0];
    std::vector<double> x{1, 2}, to;
    std::vector<std::uint64_t> rows;
    CHECK(outcome_of([&] { (void)allreduce_async(r.array(0, x), "x", Sum, of); }).code == errc::not_supported);
    synchronize(broadcast_async(r.array(0, x), 0, "x", of));
    synchronize(allgather_async(r.array(0, x), into(to, rows, 1), "y", of));
    r.m.wait(0);
    CHECK(to == x);
}

TEST_CASE("spans of other lengths, and too little staging, are refused", "[interop]") {
    gs::host::node node({.devices = 1, .sms = 8});
    const gs::communicator group(2);
    const auto made = [&](std::size_t staging, std::size_t pointers, std::size_t streams_of) {
        const std::vector<gs::device_id> devices{{0}};
        const std::vector<gs::member> members{group.rank(0), group.rank(1)};
        std::vector<gs::host::stream> streams;
        for (std::size_t k = 0; k < streams_of; ++k) streams.push_back(node.make_stream(devices[0]));
        std::vector<double> memory(8);
        const std::vector<void*> where(pointers, memory.data());
        return outcome_of([&] {
                   device_ranks<gs::host::node, std::pmr::memory_resource, float> all(
                       node, devices, std::span(streams), members, *std::pmr::new_delete_resource(), where,
                       gs::bytes{staging});
               })
            .code;
    };
    CHECK(made(64, 2, 1) == errc::none);
    CHECK(made(63, 2, 1) == errc::invalid_specification);
    CHECK(made(64, 1, 1) == errc::invalid_specification);
    CHECK(made(64, 2, 2) == errc::invalid_specification);
}

TEST_CASE("while a rank has joined, what needs all ranks is refused with its number", "[interop]") {
    rig r(3);
    std::vector<std::vector<outcome>> seen(3);
    std::vector<std::uint32_t> last(3);
    std::vector<std::vector<float>> sent(3, std::vector<float>(300));
    support::together(3, [&](unsigned k) {
        process_set& of = *r.sets[k];
        if (k != 1) {
            std::vector<float> x(6, 1), to;
            std::vector<std::uint64_t> rows, splits(3, 1);
            const auto note = [&](const handle& h) { seen[k].push_back(outcome_of([&] { synchronize(h); })); };
            note(allgather_async(r.array(k, x), into(to, rows, 1), "all", of));
            note(alltoall_async(r.array(k, x), splits, into(to, rows, 1), "to", of));
            note(reducescatter_async(r.array(k, x), into(to, rows, 1), "part", Sum, of));
            note(broadcast_async(r.array(k, x), 1, "sent", of));
            sent[k].assign(300, static_cast<float>(k + 1));
            note(broadcast_async(r.array(k, sent[k]), 2, "in pieces", of));
            r.m.wait(k);
        }
        last[k] = join(of);
    });
    for (const std::uint32_t k : {0U, 2U}) {
        std::vector<outcome> expected(5, {errc::not_supported, 1});
        expected[4] = {};
        CHECK(seen[k] == expected);
        CHECK(sent[k] == std::vector<float>(300, 3));
        CHECK(last[k] == last[1]);
    }
}

TEST_CASE("a rank that aborts ends the other ranks' waits, now and later, and is named", "[interop]") {
    rig r(3);
    std::vector<std::vector<outcome>> seen(3);
    std::latch called(2);
    std::vector<std::vector<float>> x(3, std::vector<float>(2, 1));
    support::together(3, [&](unsigned k) {
        if (k == 1) {
            called.wait();
            return r.m.ranks->abort(1, errc::aborted);
        }
        const handle h = allreduce_async(r.array(k, x[k]), "x", Sum, *r.sets[k]);
        called.count_down();
        seen[k].push_back(outcome_of([&] { synchronize(h); }));
        if (!poll(h)) seen[k].push_back({});
        seen[k].push_back(outcome_of([&] { allreduce(r.array(k, x[k]), "y", Sum, *r.sets[k]); }));
        seen[k].push_back(outcome_of([&] { (void)join(*r.sets[k]); }));
    });
    for (const std::uint32_t k : {0U, 2U}) CHECK(seen[k] == std::vector<outcome>(3, {errc::aborted, 1}));
}

TEST_CASE("a set that ends with open handles stops the others' calls, and what is enqueued goes on", "[interop]") {
    rig r(2);
    std::vector<std::vector<float>> x(2, std::vector<float>(2, 1)), done = x;
    std::vector<handle> done_handles, open;
    for (std::uint32_t k = 0; k < 2; ++k)
        done_handles.push_back(allreduce_async(r.array(k, done[k]), "done", Sum, *r.sets[k]));
    open.push_back(allreduce_async(r.array(1, x[1]), "open", Sum, *r.sets[1]));
    (void)allreduce_async(r.array(0, x[0]), "its own", Sum, *r.sets[0]);
    done_handles[0] = {};
    r.sets[0].reset();
    CHECK(done[0] == std::vector<float>(2, 2));  // its array is no longer in use
    synchronize(done_handles[1]);
    r.m.wait(1);
    CHECK(done[1] == std::vector<float>(2, 2));
    CHECK(outcome_of([&] { synchronize(open[0]); }) == outcome{errc::stopped, 0});
    CHECK(outcome_of([&] { allreduce(r.array(1, x[1]), "its own", Sum, *r.sets[1]); }) == outcome{errc::stopped, 0});
    CHECK(x == std::vector(2, std::vector<float>(2, 1)));
}

TEST_CASE("a rank that doesn't come within the others' patience is named to them", "[interop]") {
    rig r(3, true, 512, {.patience = 1ms});
    std::vector<float> x(2, 1), y(2, 1);
    const handle h = allreduce_async(r.array(0, x), "x", Sum, *r.sets[0]);
    (void)allreduce_async(r.array(2, y), "x", Sum, *r.sets[2]);
    CHECK(outcome_of([&] { synchronize(h); }) == outcome{errc::deadline_exceeded, 1});
    CHECK(outcome_of([&] { allreduce(r.array(1, y), "x", Sum, *r.sets[1]); }) == outcome{errc::deadline_exceeded, 1});
}

TEST_CASE("launches are as wide as the options say", "[interop]") {
    rig r(1, true, 512, {.launches = {.blocks = 3}});  // of a group that has two
    std::vector<float> x(2, 1);
    CHECK(outcome_of([&] { allreduce(r.array(0, x), "x", Sum, *r.sets[0]); }).code == errc::invalid_specification);
}

TEST_CASE("sets of some ranks on devices go on side by side, and a process's own end needs no argument", "[interop]") {
    rig all(2);
    gs::communicator one(1);
    machine_type alone(all.node, *std::pmr::new_delete_resource(), one, true);
    std::vector<std::vector<float>> x(2, std::vector<float>(3, 1)), y = x;
    init(*alone.ranks, 0);
    support::together(2, [&](unsigned k) {
        const handle h = allreduce_async(all.array(k, x[k]), "x", Sum, *all.sets[k]);
        if (k == 1) allreduce(alone.array(0, std::span(y[1])), "x", Sum);
        synchronize(h);
        all.m.wait(k);
    });
    alone.wait(0);
    CHECK(size() == 1);
    shutdown();
    CHECK(x == std::vector(2, std::vector<float>(3, 2)));
    CHECK(y == std::vector(2, std::vector<float>(3, 1)));
}

}  // namespace horovod_devices_test
