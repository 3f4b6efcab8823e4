// SPDX-License-Identifier: Apache-2.0
// Collectives as launches on the streams of the host backend's devices: the bodies that rank threads call, block by block.
#include <gpushare/collective/submit.hpp>

#include <chrono>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include <gpushare/backend/host/host.hpp>

#include "support/catch.hpp"
#include "support/threads.hpp"

using namespace std::chrono_literals;
namespace gs = gpushare;

namespace {

/// A node with a stream per device, and buffers of all ranks.
struct machine {
    machine(std::uint32_t ranks, std::uint32_t sms, std::size_t n, gs::communicator_options options = {.lanes = 4})
        : node({.devices = ranks, .sms = sms}), group(ranks, options) {
        for (std::uint32_t r = 0; r < ranks; ++r) {
            devices.push_back({r});
            streams.push_back(node.make_stream({r}));
            members.push_back(group.rank(r));
            data.emplace_back(n);
        }
    }
    void fill() {
        for (std::uint32_t r = 0; r < data.size(); ++r)
            for (std::size_t i = 0; i < data[r].size(); ++i) data[r][i] = static_cast<float>((i + r) % 1000);
    }
    [[nodiscard]] bool summed() const {
        for (const auto& of_rank : data)
            for (std::size_t i = 0; i < of_rank.size(); ++i) {
                float sum = 0;
                for (std::uint32_t r = 0; r < data.size(); ++r) sum += static_cast<float>((i + r) % 1000);
                if (of_rank[i] != sum) return false;
            }
        return true;
    }
    gs::errc all_reduce(const gs::launch_options& options = {}) {
        std::vector<const float*> in;
        std::vector<float*> out;
        for (auto& d : data) {
            in.push_back(d.data());
            out.push_back(d.data());
        }
        return gs::submit_all_reduce<float>(node.gangs(), devices, std::span(streams), members, in, out, data[0].size(),
                                            gs::sum{}, options);
    }
    void wait() {
        for (auto& s : streams) s.record().wait(gs::never);
    }

    gs::host::node node;
    gs::communicator group;
    std::vector<gs::device_id> devices;
    std::vector<gs::host::stream> streams;
    std::vector<gs::member> members;
    std::vector<std::vector<float>> data;
};

}  // namespace

TEST_CASE("an all-reduce on streams, with any number of blocks, changing from launch to launch", "[collective]") {
    for (const std::size_t n : {7U, 300U, 20'000U}) {
        machine m(3, 3, n);
        for (const std::uint32_t blocks : {1U, 3U, 2U, 1U, 3U}) {
            m.fill();
            REQUIRE(m.all_reduce({.blocks = blocks}) == gs::errc::none);
            m.wait();
            CAPTURE(n, blocks);
            CHECK_FALSE(gs::fault_of(m.members[0]));
            CHECK(m.summed());
        }
    }
}

TEST_CASE("more blocks than a device holds at once are refused, before anything is launched", "[collective]") {
    machine m(2, 2, 100);
    m.fill();
    CHECK(m.all_reduce({.blocks = 3}) == gs::errc::too_many_blocks);
    CHECK(m.all_reduce({.blocks = 5}) == gs::errc::invalid_specification);  // more than there are lanes
    CHECK(m.all_reduce({.blocks = 0}) == gs::errc::invalid_specification);
    REQUIRE(m.all_reduce({.blocks = 2}) == gs::errc::none);
    m.wait();
    CHECK(m.summed());
}

TEST_CASE("two groups over the same devices, submitted from two threads, don't block each other", "[collective]") {
    machine m(2, 2, 100);  // an SM for each group: they must fit together, see submit.hpp
    const gs::communicator other(2);
    std::vector<gs::host::stream> streams;
    streams.push_back(m.node.make_stream({0}));
    streams.push_back(m.node.make_stream({1}));
    std::vector<std::vector<float>> data(2, std::vector<float>(100, 1));
    const std::vector<gs::member> members{other.rank(0), other.rank(1)};
    support::together(2, [&](unsigned i) {
        for (unsigned round = 0; round < 20; ++round) {
            if (i == 0) {
                (void)m.all_reduce();
            } else {
                const std::vector<const float*> in{data[0].data(), data[1].data()};
                const std::vector<float*> out{data[0].data(), data[1].data()};
                (void)gs::submit_all_reduce<float>(m.node.gangs(), m.devices, std::span(streams), members, in, out, 100,
                                                   gs::maximum{});
            }
        }
    });
    m.wait();
    for (auto& s : streams) s.record().wait(gs::never);
    CHECK_FALSE(gs::fault_of(m.members[0]));
    CHECK_FALSE(gs::fault_of(members[1]));
    CHECK(data[1][99] == 1);
}

TEST_CASE("a rank whose stream is stuck is named on the others once their patience is over", "[collective]") {
    machine m(3, 1, 100);
    auto faults = m.node.faults({1});
    faults.stall(m.streams[1]);
    REQUIRE(m.all_reduce({.patience = 20ms}) == gs::errc::none);
    m.streams[0].record().wait(gs::never);
    m.streams[2].record().wait(gs::never);
    const auto fault = gs::fault_of(m.members[0]);
    CHECK(fault == gs::collective_fault{gs::errc::deadline_exceeded, gs::collective_kind::all_reduce, 1, 1});
    CHECK(gs::fault_of(m.members[2]) == fault);
    faults.resume(m.streams[1]);
    m.wait();  // the late one sees the fault and doesn't wait
    CHECK(gs::fault_of(m.members[1]) == fault);
}

TEST_CASE("an abort ends the kernels", "[collective]") {
    machine m(2, 1, 100);
    auto faults = m.node.faults({1});
    faults.stall(m.streams[1]);
    REQUIRE(m.all_reduce() == gs::errc::none);
    m.group.abort(1);
    m.streams[0].record().wait(gs::never);
    CHECK(gs::fault_of(m.members[0]).code == gs::errc::aborted);
    faults.resume(m.streams[1]);
    m.wait();
}

TEST_CASE("other collectives go the same way", "[collective]") {
    machine m(2, 2, 100);
    m.fill();
    const std::vector<gs::detail::barrier_body> barriers(2);
    REQUIRE(gs::submit(m.node.gangs(), std::span<const gs::device_id>(m.devices), std::span(m.streams),
                       std::span<const gs::member>(m.members), std::span(barriers), {.blocks = 2}) == gs::errc::none);
    const std::vector<gs::detail::broadcast_body<float>> bodies{{m.data[0].data(), 100, 1}, {m.data[1].data(), 100, 1}};
    REQUIRE(gs::submit(m.node.gangs(), std::span<const gs::device_id>(m.devices), std::span(m.streams),
                       std::span<const gs::member>(m.members), std::span(bodies), {.blocks = 2}) == gs::errc::none);
    m.wait();
    CHECK(m.data[0] == m.data[1]);
    CHECK(m.data[0][5] == 6);
}

TEST_CASE("several ranks on one device, in one launch", "[collective]") {
    constexpr std::uint32_t ranks = 3, lanes = 2;
    gs::host::node node({.devices = 1, .sms = ranks * lanes});
    auto stream = node.make_stream({0});
    const gs::communicator group(ranks, {.lanes = lanes});
    std::vector<std::vector<float>> data(ranks, std::vector<float>(500, 2));
    using body = gs::detail::all_reduce_body<float, gs::sum>;
    std::vector<body> bodies;
    for (auto& d : data) bodies.push_back({d.data(), d.data(), d.size(), {}, {gs::algorithm::two_shot, false}});
    const gs::detail::shared_device_kernel<body> kernel{group.rank(0).view(), bodies.data(), gs::ns{1s}.count()};
    CHECK(stream.launch_cooperative({.blocks = ranks * lanes + 1}, kernel) == gs::errc::too_many_blocks);
    REQUIRE(stream.launch_cooperative({.blocks = ranks * lanes}, kernel) == gs::errc::none);
    stream.record().wait(gs::never);
    CHECK_FALSE(gs::fault_of(group.rank(0)));
    for (const auto& d : data) CHECK(d == std::vector<float>(500, 6));
}
