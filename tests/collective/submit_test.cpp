// SPDX-License-Identifier: Apache-2.0
// Collectives as launches on the streams of the host backend's devices: the bodies that rank
// threads call, block by block.
#include <gpushare/collective/submit.hpp>

#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include <gpushare/backend/host/host.hpp>

#include "support/catch.hpp"
#include "support/threads.hpp"

namespace submit_test {

using namespace std::chrono_literals;
namespace gs = gpushare;

namespace {

/// A node with a stream per device, and buffers of all ranks.
struct machine {
    machine(std::uint32_t ranks, std::uint32_t sms, std::size_t n, gs::communicator_options options = {.blocks = 4})
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
    CHECK(m.all_reduce({.blocks = 5}) == gs::errc::invalid_specification);  // more than there are blocks
    REQUIRE(m.all_reduce({.blocks = 2}) == gs::errc::none);
    m.wait();
    CHECK(m.summed());
}

TEST_CASE("a number of blocks that is left open is the table's, as far as there are so many and fit", "[collective]") {
    const auto used = [](std::uint32_t sms, std::uint32_t there, std::uint16_t planned) {
        machine m(2, sms, 1000, {.blocks = there});
        m.group.set_tuning(gs::tuning_table::always({gs::algorithm::two_shot, false, 1, 0, planned}));
        m.fill();
        CHECK(m.all_reduce() == gs::errc::none);
        m.wait();
        CHECK(m.summed());
        const auto& view = m.members[0].view();
        std::uint32_t n = 0;
        for (std::uint32_t b = 0; b < there; ++b) n += view.state(0, b).epoch != 0 ? 1 : 0;
        return n;
    };
    CHECK(used(4, 4, 3) == 3);
    CHECK(used(4, 2, 3) == 2);
    CHECK(used(2, 4, 3) == 2);
    CHECK(used(4, 4, 0) == 1);
    // Ranks that share a device share its room.
    gs::host::node node({.devices = 1, .sms = 5});
    gs::communicator group(
        2, {.blocks = 4, .tuning = gs::tuning_table::always({gs::algorithm::two_shot, false, 1, 0, 4})});
    auto stream = node.make_stream({0});
    std::vector<float> x(1000, 1), y(1000, 2);
    const std::array<const float*, 2> in{x.data(), y.data()};
    const std::array<float*, 2> out{x.data(), y.data()};
    const std::array members{group.rank(0), group.rank(1)};
    CHECK(gs::submit_shared_all_reduce<float>(node.gangs(), gs::device_id{0}, stream, members, in, out, 1000) ==
          gs::errc::none);
    stream.record().wait(gs::never);
    CHECK(x == std::vector<float>(1000, 3));
    CHECK(members[1].view().state(1, 1).epoch == 1);
    CHECK(members[1].view().state(1, 2).epoch == 0);
}

TEST_CASE("two groups that don't fit on the devices together queue up, submitted from two threads", "[collective]") {
    const std::uint32_t blocks = GENERATE(1U, 2U);  // of two SMs: the groups run side by side, or one after the other
    machine m(2, 2, 100);
    machine other(2, 2, 100);
    std::vector<gs::host::stream> streams;
    streams.push_back(m.node.make_stream({0}));
    streams.push_back(m.node.make_stream({1}));
    std::vector<gs::errc> codes(2);
    support::together(2, [&](unsigned i) {
        // Rank 0's stream of the one group is busy: where nobody waited, rank 1 of it would take
        // what the other group needs.
        machine& mine = i == 0 ? m : other;
        std::vector<const float*> in;
        std::vector<float*> out;
        for (auto& d : mine.data) {
            in.push_back(d.data());
            out.push_back(d.data());
        }
        for (unsigned round = 0; round < 50; ++round) {
            auto& on = i == 0 ? m.streams : streams;
            on[round % 2].enqueue(20us);
            const auto code = gs::submit_all_reduce<float>(m.node.gangs(), m.devices, std::span(on), mine.members, in,
                                                           out, 100, gs::maximum{}, {.blocks = blocks, .patience = 3s});
            if (code != gs::errc::none) codes[i] = code;
        }
    });
    m.wait();
    for (auto& s : streams) s.record().wait(gs::never);
    CHECK(codes == std::vector<gs::errc>(2));
    CHECK_FALSE(gs::fault_of(m.members[0]));
    CHECK_FALSE(gs::fault_of(other.members[0]));
}

TEST_CASE("a gang waits for those before that it doesn't fit beside, and for no others", "[collective]") {
    machine first(2, 3, 100), second(2, 3, 100), third(2, 3, 100);  // the nodes of the latter two are idle
    auto& node = first.node;
    const auto submit = [&](machine& of, std::vector<gs::host::stream>& on, std::uint32_t blocks) {
        const std::vector<gs::detail::barrier_body> bodies(2);
        return gs::submit(node.gangs(), std::span<const gs::device_id>(first.devices), std::span(on),
                          std::span<const gs::member>(of.members), std::span(bodies), {.blocks = blocks});
    };
    const auto streams = [&] {
        std::vector<gs::host::stream> s;
        s.push_back(node.make_stream({0}));
        s.push_back(node.make_stream({1}));
        return s;
    };
    auto of_first = streams(), of_second = streams(), of_third = streams();
    auto faults = node.faults({0});
    faults.stall(of_first[0]);  // rank 0 of the first doesn't start, so rank 1 holds its SMs
    REQUIRE(submit(first, of_first, 2) == gs::errc::none);
    REQUIRE(submit(second, of_second, 1) == gs::errc::none);
    REQUIRE(submit(third, of_third, 2) == gs::errc::none);
    CHECK(of_second[0].record().wait(gs::never));  // fits beside the first
    CHECK(of_second[1].record().wait(gs::never));
    const auto end_of_third = of_third[1].record();
    CHECK_FALSE(end_of_third.reached());
    faults.resume(of_first[0]);
    CHECK(end_of_third.wait(gs::never));
    for (auto* const group : {&of_first, &of_second, &of_third})
        for (auto& s : *group) s.record().wait(gs::never);
    CHECK_FALSE(gs::fault_of(third.members[0]));
}

TEST_CASE("a rank whose stream is stuck is named on the others once their patience is over", "[collective]") {
    machine m(3, 1, 100);
    auto faults = m.node.faults({1});
    faults.stall(m.streams[1]);
    REQUIRE(m.all_reduce({.patience = 500ms}) == gs::errc::none);
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
    constexpr std::uint32_t ranks = 3, blocks = 2;
    gs::host::node node({.devices = 1, .sms = ranks * blocks});
    auto stream = node.make_stream({0});
    const gs::communicator group(ranks, {.blocks = blocks + 1});
    const std::vector<gs::member> members{group.rank(0), group.rank(1), group.rank(2)};
    std::vector<std::vector<float>> data(ranks, std::vector<float>(500, 2));
    const std::vector<const float*> in{data[0].data(), data[1].data(), data[2].data()};
    const std::vector<float*> out{data[0].data(), data[1].data(), data[2].data()};
    const auto all_reduce = [&](std::uint32_t asked) {
        return gs::submit_shared_all_reduce<float>(node.gangs(), {0}, stream, members, in, out, 500, gs::sum{},
                                                   {.blocks = asked});
    };
    CHECK(all_reduce(blocks + 1) == gs::errc::too_many_blocks);
    CHECK(all_reduce(blocks + 2) == gs::errc::invalid_specification);
    REQUIRE(all_reduce(blocks) == gs::errc::none);
    stream.record().wait(gs::never);
    CHECK_FALSE(gs::fault_of(group.rank(0)));
    for (const auto& d : data) CHECK(d == std::vector<float>(500, 6));
}

TEST_CASE("ranks on one device that don't fit there together are refused, launched one by one as well",
          "[collective]") {
    gs::host::node node({.devices = 1, .sms = 3});
    std::vector<gs::host::stream> streams;
    for (unsigned r = 0; r < 2; ++r) streams.push_back(node.make_stream({0}));
    const gs::communicator group(2, {.blocks = 2});
    const std::vector<gs::member> members{group.rank(0), group.rank(1)};
    const std::vector<gs::device_id> devices{{0}, {0}};
    const std::vector<gs::detail::barrier_body> bodies(2);
    const auto barrier = [&](std::uint32_t blocks) {
        return gs::submit(node.gangs(), std::span<const gs::device_id>(devices), std::span(streams),
                          std::span<const gs::member>(members), std::span(bodies), {.blocks = blocks});
    };
    CHECK(barrier(2) == gs::errc::too_many_blocks);  // each would fit alone
    CHECK(barrier(1) == gs::errc::none);
    for (auto& s : streams) s.record().wait(gs::never);
    CHECK_FALSE(gs::fault_of(members[0]));
}

}  // namespace submit_test
