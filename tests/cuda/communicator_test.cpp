// SPDX-License-Identifier: Apache-2.0
// Collectives on CUDA devices, over the stand-in. Ranks that share a device run in one cooperative
// launch, also in a capture. Workspaces lie on the devices if these reach each other, and otherwise
// in pinned memory.
#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/pinned.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <gpushare/collective/quantised_all_reduce.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/gradient/device_buckets.hpp>

#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"

namespace communicator_test {

namespace gs = gpushare;
namespace cuda = gpushare::cuda;
using gs::errc;

namespace {

constexpr std::uint32_t ranks = 4;
constexpr std::size_t n = 1000;

/// Four ranks on the second device of two.
struct fixture {
    const standin::session gpu{{.devices = 2, .sms = 16, .blocks_per_sm = 1}};
    cuda::node node;
    cuda::pinned_memory visible{node};
    const std::vector<gs::device_id> devices = std::vector<gs::device_id>(ranks, gs::device_id{1});
    gs::device_communicator<cuda::node, cuda::pinned_memory> group{node, visible, devices, {.blocks = 3}};
    cuda::stream stream = node.make_stream(gs::device_id{1});
    std::vector<gs::member> members;
    std::vector<std::vector<float>> data{ranks, std::vector<float>(n)};
    std::vector<const float*> in;
    std::vector<float*> out;

    fixture() {
        for (std::uint32_t r = 0; r < ranks; ++r) {
            members.push_back(group.rank(r));
            in.push_back(data[r].data());
            out.push_back(data[r].data());
        }
    }
    errc all_reduce(cuda::stream& on, std::uint32_t blocks) {
        return gs::submit_shared_all_reduce<float>(node.gangs(), gs::device_id{1}, on, members, in, out, n, gs::sum{},
                                                   {.blocks = blocks, .threads = 64});
    }
    void set(float x) {
        for (auto& d : data) d.assign(n, x);
    }
    [[nodiscard]] bool all_are(float x) const {
        for (const auto& d : data)
            if (d != std::vector<float>(n, x)) return false;
        return true;
    }
};

}  // namespace

TEST_CASE_METHOD(fixture, "several ranks on one device", "[cuda][collective]") {
    for (const std::uint32_t blocks : {2U, 1U}) {
        set(1);
        REQUIRE(all_reduce(stream, blocks) == errc::none);
        CHECK(stream.record().wait(gs::never));
        CHECK(gs::fault_of(members[3]).code == errc::none);
        CHECK(all_are(4));
    }
    CHECK(group.progress()[3].epoch == 2);
}

TEST_CASE_METHOD(fixture, "a launch that the SMs of the stream's partition don't hold at once is refused",
                 "[cuda][collective]") {
    const gs::device_id d{1};
    auto parts = cuda::make_green_contexts(node, d, gpushare::equal_sms(cuda::query_sm_split(node, d), 2));
    auto half = parts[0].make_stream();
    REQUIRE(half.max_cooperative_blocks() < 3 * ranks);
    REQUIRE(stream.max_cooperative_blocks() >= 3 * ranks);
    CHECK(all_reduce(half, 3) == errc::too_many_blocks);
    CHECK(all_reduce(half, 4) == errc::invalid_specification);  // more than the group has
    CHECK(group.progress()[0].epoch == 0);
    CHECK(all_reduce(half, 2) == errc::none);
    CHECK(all_reduce(stream, 3) == errc::none);  // behind the other one: the same channel
    CHECK(stream.record().wait(gs::never));
    CHECK(group.progress()[0].epoch == 2);
    CHECK_FALSE(gs::fault_of(members[0]));
}

TEST_CASE_METHOD(fixture, "a collective that was captured runs at each launch of the graph, on the same workspaces",
                 "[cuda][collective]") {
    const auto g = cuda::capture(stream, [&](cuda::stream& to) { REQUIRE(all_reduce(to, 2) == errc::none); });
    cuda::graph_executable run{g};
    CHECK(group.progress()[0].epoch == 0);
    for (std::uint32_t round = 1; round <= 3; ++round) {
        set(static_cast<float>(round));
        run.launch(stream);
        CHECK(stream.record().wait(gs::never));
        CHECK(all_are(static_cast<float>(4 * round)));
        // And others between two launches.
        REQUIRE(all_reduce(stream, 1) == errc::none);
        CHECK(stream.record().wait(gs::never));
        CHECK(all_are(static_cast<float>(16 * round)));
    }
    CHECK(group.progress()[0].epoch == 6);
    CHECK(gs::fault_of(members[0]).code == errc::none);
}

TEST_CASE_METHOD(fixture,
                 "other collectives in a graph run at each launch, and unequal parts have their current lengths",
                 "[cuda][collective]") {
    std::vector<std::vector<float>> wholes(ranks, std::vector<float>(ranks * n));
    std::vector<std::vector<std::uint64_t>> counts(ranks, std::vector<std::uint64_t>(ranks));
    std::vector<float*> all;
    std::vector<std::span<const float>> parts;
    std::vector<std::span<float>> rooms;
    std::vector<const std::uint64_t*> lengths;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        all.push_back(wholes[r].data());
        parts.emplace_back(data[r]);
        rooms.emplace_back(wholes[r]);
        lengths.push_back(counts[r].data());
    }
    const gs::device_id d{1};
    const gs::launch_options options{.blocks = 2, .threads = 64};
    const auto g = cuda::capture(stream, [&](cuda::stream& to) {
        REQUIRE(gs::submit_shared_all_gather<float>(node.gangs(), d, to, members, in, all, n, options) == errc::none);
        REQUIRE(gs::submit_shared_all_to_all<float>(node.gangs(), d, to, members,
                                                    std::vector<const float*>(all.begin(), all.end()), all, n,
                                                    options) == errc::none);
        REQUIRE(gs::submit_shared_reduce_scatter<float>(node.gangs(), d, to, members,
                                                        std::vector<const float*>(all.begin(), all.end()), out, n,
                                                        gs::sum{}, options) == errc::none);
        REQUIRE(gs::submit_shared_broadcast<float>(node.gangs(), d, to, members, out, n, 2, options) == errc::none);
        REQUIRE(gs::submit_shared_all_gatherv<float>(node.gangs(), d, to, members, parts, rooms, lengths, options) ==
                errc::none);
    });
    cuda::graph_executable run{g};
    CHECK(group.progress()[0].epoch == 0);
    for (std::uint32_t round = 1; round <= 3; ++round) {
        for (std::uint32_t r = 0; r < ranks; ++r) data[r].assign(n, static_cast<float>(r + round));
        for (auto& row : counts) row = {round, 0, 100 * round, 7};
        run.launch(stream);
        CHECK(stream.record().wait(gs::never));
        // All gather what rank r has, and swap: part q of rank r is what rank q had as part r,
        // which is what rank r brought. So rank r's parts are all r + round, and their sum over the
        // ranks is the same everywhere.
        const float sum = 6.0F + 4.0F * static_cast<float>(round);
        CHECK(all_are(sum));
        for (const auto& whole : wholes)
            CHECK(std::all_of(whole.begin(), whole.begin() + 101 * static_cast<std::ptrdiff_t>(round) + 7,
                              [&](float x) { return x == sum; }));
        CHECK(wholes[3][101 * round + 7] == static_cast<float>(3 + round));  // behind the parts: as it was swapped
        CHECK(group.progress()[0].epoch == 5 * round);
    }
    counts[3][3] = n + 1;  // more than rank 3 has
    run.launch(stream);
    CHECK(stream.record().wait(gs::never));
    CHECK(gs::fault_of(members[0]) == gs::collective_fault{errc::mismatch, gs::collective_kind::all_gather, 3, 20});
}

TEST_CASE_METHOD(fixture, "a reduce, and sums and swaps of unequal parts, in a graph run at each launch",
                 "[cuda][collective]") {
    std::vector<std::vector<float>> got(ranks, std::vector<float>(n));
    std::vector<std::vector<std::uint64_t>> counts(ranks, std::vector<std::uint64_t>(ranks));
    std::vector<float*> to_root;
    std::vector<std::span<const float>> brought;
    std::vector<std::span<float>> rooms;
    std::vector<const std::uint64_t*> lengths;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        to_root.push_back(got[r].data());
        brought.emplace_back(data[r]);
        rooms.emplace_back(got[r]);
        lengths.push_back(counts[r].data());
    }
    const gs::device_id d{1};
    const gs::launch_options options{.blocks = 2, .threads = 64};
    const auto recorded = [&](const auto& submit) {
        return cuda::graph_executable{
            cuda::capture(stream, [&](cuda::stream& to) { REQUIRE(submit(to) == errc::none); })};
    };
    auto reduce = recorded([&](cuda::stream& to) {
        return gs::submit_shared_reduce<float>(node.gangs(), d, to, members, in, to_root, n, 3, gs::sum{}, options);
    });
    auto scatter = recorded([&](cuda::stream& to) {
        return gs::submit_shared_reduce_scatterv<float>(node.gangs(), d, to, members, brought, rooms, lengths,
                                                        gs::sum{}, options);
    });
    auto swap = recorded([&](cuda::stream& to) {
        return gs::submit_shared_all_to_allv<float>(node.gangs(), d, to, members, brought, rooms, lengths, lengths,
                                                    options);
    });
    const auto run = [&](cuda::graph_executable& g) {
        for (auto& x : got) x.assign(n, -1);
        g.launch(stream);
        CHECK(stream.record().wait(gs::never));
        CHECK_FALSE(gs::fault_of(members[0]));
    };
    const auto element = [](std::size_t r, std::size_t i) { return static_cast<float>(1000 * r + i); };
    for (std::uint32_t round = 1; round <= 2; ++round) {
        for (std::uint32_t r = 0; r < ranks; ++r)
            for (std::size_t i = 0; i < n; ++i) data[r][i] = element(r, i);
        run(reduce);
        for (std::size_t i = 0; i < n; ++i) CHECK(got[3][i] == static_cast<float>(6000 + 4 * i));
        CHECK(got[0] == std::vector<float>(n, -1));
        for (auto& row : counts) row = {7, 0, 100 * round, 3};
        run(scatter);
        for (std::uint32_t r = 0, begin = 0; r < ranks; begin += static_cast<std::uint32_t>(counts[0][r++]))
            for (std::size_t i = 0; i < n; ++i)
                CHECK(got[r][i] == (i < counts[0][r] ? static_cast<float>(6000 + 4 * (begin + i)) : -1.0F));
        for (std::uint32_t r = 0; r < ranks; ++r)  // as many there as back
            for (std::uint32_t q = 0; q < ranks; ++q) counts[r][q] = (r + q) % 3 == 1 ? 0 : round * (10 + r + q);
        run(swap);
        for (std::uint32_t r = 0; r < ranks; ++r) {
            std::vector<float> expected;
            for (std::uint32_t q = 0; q < ranks; ++q) {
                std::size_t begin = 0;
                for (std::uint32_t k = 0; k < r; ++k) begin += counts[q][k];
                for (std::size_t i = 0; i < counts[q][r]; ++i) expected.push_back(element(q, begin + i));
            }
            expected.resize(n, -1);
            CHECK(got[r] == expected);
        }
    }
}

TEST_CASE_METHOD(fixture, "gradients of ranks that share a device are averaged on one stream, in a graph as well",
                 "[cuda][collective]") {
    gs::device_buckets<float, gs::bfloat16> buckets(ranks, gs::bytes{700});
    for (const std::size_t at : {0U, 301U, 700U}) {
        std::vector<float*> where;
        for (auto& d : data) where.push_back(d.data() + at);
        buckets.add("from " + std::to_string(at), where, 299);
    }
    std::vector<std::vector<gs::bfloat16>> room(ranks, std::vector<gs::bfloat16>(299));
    REQUIRE(buckets.staging_bytes() == gs::bytes{2 * 299});
    std::vector<gs::bfloat16*> staging;
    for (auto& r : room) staging.push_back(r.data());
    const auto step = [&](cuda::stream& on) {
        for (std::uint32_t r = 0; r < ranks; ++r)
            for (std::uint32_t g = 0; g < 3; ++g) CHECK(buckets.ready(r, g) == errc::none);
        const auto engine = [&](auto ins, auto outs, std::size_t count, auto op) {
            return gs::submit_shared_all_reduce<gs::bfloat16>(node.gangs(), gs::device_id{1}, on, members, ins, outs,
                                                              count, op, {.blocks = 2, .threads = 64});
        };
        CHECK(buckets.advance(std::span(&on, 1), staging, engine) == errc::none);
        CHECK(buckets.complete());
    };
    const auto averaged = [&](std::uint32_t of_rank) {  // rank r brought r + 1
        for (std::size_t i = 0; i < n; ++i) {
            const bool gap = (i >= 299 && i < 301) || (i >= 600 && i < 700) || i >= 999;
            if (data[of_rank][i] != (gap ? static_cast<float>(of_rank + 1) : 2.5F)) return false;
        }
        return true;
    };
    const auto bring = [&] {
        for (std::uint32_t r = 0; r < ranks; ++r) data[r].assign(n, static_cast<float>(r + 1));
    };
    bring();
    step(stream);
    CHECK(stream.record().wait(gs::never));
    for (std::uint32_t r = 0; r < ranks; ++r) CHECK(averaged(r));
    cuda::graph_executable run{cuda::capture(stream, step)};
    for (int round = 0; round < 2; ++round) {
        bring();
        run.launch(stream);
        CHECK(stream.record().wait(gs::never));
        for (std::uint32_t r = 0; r < ranks; ++r) CHECK(averaged(r));
    }
}

TEST_CASE_METHOD(fixture, "a quantised all-reduce of ranks that share a device, in a graph as well",
                 "[cuda][collective]") {
    const auto submit = [&](cuda::stream& on) {
        return gs::submit_shared_quantised_all_reduce<float>(node.gangs(), gs::device_id{1}, on, members, in, out, n,
                                                             gs::sum{}, {.blocks = 2, .threads = 64});
    };
    set(3);
    REQUIRE(submit(stream) == errc::none);
    CHECK(stream.record().wait(gs::never));
    CHECK(all_are(12));
    cuda::graph_executable run{
        cuda::capture(stream, [&](cuda::stream& captured) { REQUIRE(submit(captured) == errc::none); })};
    for (int round = 0; round < 2; ++round) {
        set(5);
        run.launch(stream);
        CHECK(stream.record().wait(gs::never));
        CHECK(all_are(20));
    }
    group.abort(2);
    CHECK(submit(stream) == errc::none);
    CHECK(stream.record().wait(gs::never));
    CHECK(gs::fault_of(members[0]).code == errc::aborted);
}

TEST_CASE("workspaces lie on the devices where they reach each other, else in pinned memory", "[cuda][collective]") {
    for (const bool peers : {true, false}) {
        const standin::session gpu{{.devices = 2, .peers = peers}};
        cuda::node node{{.peer_access = false}};
        cuda::pinned_memory visible{node};
        const std::vector<gs::device_id> devices{{0}, {1}};
        REQUIRE(cuda::connect(node, devices) == peers);
        CHECK(cuda::connect(node, std::span(devices).first(1)));
        const auto pinned_before = visible.used();
        const gs::device_communicator group(node, visible, devices, {},
                                            peers ? gs::workspaces::on_devices : gs::workspaces::on_host);
        CHECK((node.memory(gs::device_id{1}).used() > gs::bytes{}) == peers);
        CHECK(visible.used() > pinned_before);
        CHECK(group.rank(1).view().direct == peers);
    }
}

}  // namespace communicator_test
