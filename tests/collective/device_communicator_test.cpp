// SPDX-License-Identifier: Apache-2.0
// Groups with their workspaces on devices. The host doesn't touch that memory, and neither do other
// devices if the devices aren't connected: the host backend guards it.
#include <gpushare/collective/submit.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/detail/session.hpp>
#include <gpushare/collective/detail/workspace.hpp>

#include "support/catch.hpp"

namespace device_communicator_test {

using namespace std::chrono_literals;
namespace gs = gpushare;

namespace {

/// Memory that host and devices reach, and how much of it is out.
struct visible_memory {
    std::size_t used = 0;
    void* allocate(std::size_t size, std::size_t alignment) {
        used += size;
        return std::pmr::new_delete_resource()->allocate(size, alignment);
    }
    void deallocate(void* p, std::size_t size, std::size_t alignment) {
        used -= size;
        std::pmr::new_delete_resource()->deallocate(p, size, alignment);
    }
};

using group_type = gs::device_communicator<gs::host::node, visible_memory>;

/// Ranks on devices, each with elements on its own.
struct machine {
    machine(std::vector<gs::device_id> of_ranks, std::size_t n_, gs::communicator_options options = {.blocks = 2},
            gs::workspaces where = gs::workspaces::on_devices)
        : n(n_),
          devices(std::move(of_ranks)),
          // Guarded memory is touched by the blocks of its own device only: as where devices don't
          // reach each other.
          node({.devices = 3, .sms = 4, .guarded = where == gs::workspaces::on_host || devices[0] == devices[1]}),
          group(node, visible, devices, std::move(options), where) {
        for (std::uint32_t r = 0; r < group.size(); ++r) {
            streams.push_back(node.make_stream(devices[r]));
            members.push_back(group.rank(r));
            data.push_back(static_cast<float*>(node.memory(devices[r]).allocate(n * sizeof(float), 64)));
        }
    }
    void fill() {
        std::vector<float> x(n);
        for (std::uint32_t r = 0; r < group.size(); ++r) {
            for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<float>((i + r) % 1000);
            streams[r].copy(data[r], x.data(), n * sizeof(float));
            streams[r].record().wait(gs::never);
        }
    }
    [[nodiscard]] bool summed() {
        std::vector<float> x(n);
        for (std::uint32_t rank = 0; rank < group.size(); ++rank) {
            streams[rank].copy(x.data(), data[rank], n * sizeof(float));
            streams[rank].record().wait(gs::never);
            for (std::size_t i = 0; i < n; ++i) {
                float sum = 0;
                for (std::uint32_t r = 0; r < group.size(); ++r) sum += static_cast<float>((i + r) % 1000);
                if (x[i] != sum) return false;
            }
        }
        return true;
    }
    gs::errc all_reduce(const gs::launch_options& options = {}) {
        const std::vector<const float*> in(data.begin(), data.end());
        return gs::submit_all_reduce<float>(node.gangs(), devices, std::span(streams), members, in, data, n, gs::sum{},
                                            options);
    }
    gs::errc shared_all_reduce(const gs::launch_options& options = {}) {
        const std::vector<const float*> in(data.begin(), data.end());
        return gs::submit_shared_all_reduce<float>(node.gangs(), devices[0], streams[0], members, in, data, n,
                                                   gs::sum{}, options);
    }
    void wait() {
        for (auto& s : streams) s.record().wait(gs::never);
    }

    std::size_t n;
    std::vector<gs::device_id> devices;
    visible_memory visible;
    gs::host::node node;
    group_type group;
    std::vector<gs::host::stream> streams;
    std::vector<gs::member> members;
    std::vector<float*> data;
};

/// A rank that the host sees through a report alone.
struct lone_rank {
    explicit lone_rank(std::uint32_t blocks)
        : area(gs::detail::workspace_view::bytes_of_rank(1, blocks, 1024) + gs::detail::interference_bytes) {
        void* at = area.data();
        std::size_t room = area.size();
        begin = static_cast<std::byte*>(
            std::align(gs::detail::interference_bytes, area.size() - gs::detail::interference_bytes, at, room));
        view = {.workspaces = &begin, .ranks = 1, .blocks = blocks, .slot = 1024, .reports = &report};
        view.prepare(0);
    }
    lone_rank(const lone_rank&) = delete;
    lone_rank& operator=(const lone_rank&) = delete;

    std::vector<std::byte> area;
    std::byte* begin = nullptr;
    gs::detail::host_report report{};
    gs::detail::workspace_view view;
};
using session = gs::detail::session<gs::detail::thread_context>;
constexpr gs::collective_fault asked{gs::errc::aborted, gs::collective_kind::barrier, 0, 1};

const std::vector<gs::device_id> one_each{{0}, {1}, {2}};
const std::vector<gs::device_id> all_on_one{{1}, {1}, {1}};

}  // namespace

TEST_CASE("a group on devices, with the workspaces there or in the host's memory", "[collective]") {
    const auto where = GENERATE(gs::workspaces::on_devices, gs::workspaces::on_host);
    const auto how = GENERATE(gs::algorithm::one_shot, gs::algorithm::two_shot, gs::algorithm::ring);
    for (const std::size_t n : {1U, 100U, 30'000U}) {
        machine m(one_each, n, {.blocks = 2, .tuning = gs::tuning_table::always(how)}, where);
        for (const std::uint32_t blocks : {2U, 1U}) {
            m.fill();
            CAPTURE(n, blocks, to_string(how));
            REQUIRE(m.all_reduce({.blocks = blocks}) == gs::errc::none);
            m.wait();
            CHECK_FALSE(gs::fault_of(m.members[0]));
            CHECK(m.summed());
        }
    }
}

TEST_CASE("several ranks on one device, in one launch or in several", "[collective]") {
    machine m(all_on_one, 5000);
    for (unsigned round = 0; round < 4; ++round) {
        m.fill();
        REQUIRE((round % 2 == 0 ? m.shared_all_reduce() : m.all_reduce()) == gs::errc::none);
        m.wait();
        CHECK(m.summed());
    }
    CHECK(m.shared_all_reduce({.blocks = 2}) == gs::errc::too_many_blocks);  // six, of four SMs
    CHECK(m.all_reduce({.blocks = 2}) == gs::errc::too_many_blocks);
    CHECK(m.group.progress()[2].epoch == 4);
    CHECK_FALSE(gs::fault_of(m.members[0]));
}

TEST_CASE("if devices don't reach each other, plans that read others' buffers are refused", "[collective]") {
    machine m(one_each, 100, {}, gs::workspaces::on_host);
    const auto submit = [&]<class Body>(const std::vector<Body>& bodies) {
        return gs::submit(m.node.gangs(), std::span<const gs::device_id>(m.devices), std::span(m.streams),
                          std::span<const gs::member>(m.members), std::span(bodies));
    };
    CHECK(submit(std::vector<gs::detail::broadcast_body<float>>(3)) == gs::errc::not_supported);
    CHECK(submit(std::vector<gs::detail::barrier_body>(3)) == gs::errc::none);
    m.wait();
    CHECK_FALSE(gs::fault_of(m.members[0]));
}

TEST_CASE("the host names who hangs, and its abort reaches blocks that fill the device", "[collective]") {
    machine m(one_each, 100, {.blocks = 4});
    auto faults = m.node.faults({1});
    faults.stall(m.streams[1]);
    REQUIRE(m.all_reduce({.blocks = 4}) == gs::errc::none);
    gs::hang_watch watch(2ms);
    std::optional<gs::collective_fault> late;
    while (!late) {
        std::this_thread::yield();
        const auto seen = m.group.progress();
        late = watch.look(seen, m.node.get_clock().now());
        // Until both others have come they, too, may be late: on a busy machine for longer than the
        // watch has patience.
        if (seen[0].stage == gs::collective_stage::outside || seen[2].stage == gs::collective_stage::outside)
            late.reset();
    }
    CHECK(late->rank == 1);
    CHECK(late->what == gs::collective_kind::all_reduce);
    CHECK(late->epoch == 1);
    m.group.abort(late->rank, late->code);
    m.streams[0].record().wait(gs::never);
    m.streams[2].record().wait(gs::never);
    CHECK(gs::fault_of(m.members[0]) == *late);
    CHECK(gs::fault_of(m.members[1]) == *late);
    faults.resume(m.streams[1]);
    m.wait();
    m.group.abort(0, gs::errc::aborted);  // the first one's reason stands
    REQUIRE(m.all_reduce() == gs::errc::none);
    m.wait();
    CHECK(gs::fault_of(m.members[2]) == *late);

    // Those that live go on.
    const group_type rest = m.group.subgroup(std::vector<std::uint32_t>{0, 2});
    CHECK(rest.devices()[1] == gs::device_id{2});
    const auto meet = [&](const group_type& group) {
        std::vector<gs::member> members;
        std::vector<gs::host::stream> streams;
        for (std::uint32_t r = 0; r < group.size(); ++r) {
            members.push_back(group.rank(r));
            streams.push_back(m.node.make_stream(group.devices()[r]));
        }
        const std::vector<gs::detail::barrier_body> bodies(members.size());
        REQUIRE(gs::submit(m.node.gangs(), group.devices(), std::span(streams), std::span<const gs::member>(members),
                           std::span(bodies)) == gs::errc::none);
        for (auto& s : streams) s.record().wait(gs::never);
        CHECK_FALSE(gs::fault_of(members[1]));
        for (const auto& at : group.progress()) CHECK(at.epoch == 1);
    };
    meet(rest);
    // Without a list of who lives, and with a device in place of the dead one.
    const group_type shrunk = m.group.shrink(std::vector<std::uint32_t>{1});
    CHECK(std::vector(shrunk.devices().begin(), shrunk.devices().end()) == std::vector<gs::device_id>{{0}, {2}});
    const group_type grown = shrunk.grow(std::vector<gs::device_id>{{1}});
    CHECK(std::vector(grown.devices().begin(), grown.devices().end()) == std::vector<gs::device_id>{{0}, {2}, {1}});
    CHECK(grown.tuning() == m.group.tuning());
    CHECK(grown.rank(0).view().direct == m.members[0].view().direct);
    meet(grown);
    const auto parts = grown.split(std::vector<std::uint32_t>{5, 2, 5});
    REQUIRE(parts.size() == 2);
    CHECK(parts[0].size() == 1);
    CHECK(std::vector(parts[1].devices().begin(), parts[1].devices().end()) == std::vector<gs::device_id>{{0}, {1}});
    meet(parts[1]);
    CHECK_THROWS_AS(grown.split(std::vector<std::uint32_t>{1, 2}), gs::operation_error);
}

TEST_CASE("an abort while nothing runs ends what comes later", "[collective]") {
    const bool together = GENERATE(false, true);
    machine m(together ? all_on_one : one_each, 100);
    m.fill();
    m.group.abort(2, gs::errc::kernel_failed);
    REQUIRE((together ? m.shared_all_reduce() : m.all_reduce()) == gs::errc::none);
    m.wait();
    CHECK_FALSE(m.summed());  // it hasn't begun
    for (const auto& me : m.members) {
        CHECK(gs::fault_of(me).code == gs::errc::kernel_failed);
        CHECK(gs::fault_of(me).rank == 2);
    }
}

TEST_CASE("an abort reaches what was captured before it, by the end of its first launch", "[collective]") {
    machine m(one_each, 100);
    using body = gs::detail::all_reduce_body<float, gs::sum>;
    std::vector<gs::detail::rank_kernel<body>> captured;  // its bytes are what a graph keeps
    for (std::uint32_t r = 0; r < 3; ++r)
        captured.push_back({m.members[r].view(), r, gs::ns{10s}.count(), m.members[r].asked(),
                            body{m.data[r], m.data[r], m.n, {}, {gs::algorithm::one_shot}}});
    const auto launch = [&] {
        for (std::uint32_t r = 0; r < 3; ++r)
            REQUIRE(m.streams[r].launch_cooperative({.blocks = 1}, captured[r]) == gs::errc::none);
        m.wait();
    };
    m.group.abort(2, gs::errc::kernel_failed);
    launch();
    for (const auto& me : m.members) CHECK(gs::fault_of(me).code == gs::errc::kernel_failed);
    m.fill();
    launch();
    CHECK_FALSE(m.summed());
}

TEST_CASE("nothing crosses the bus between entering and telling", "[collective]") {
    // What the host sees and asks for stands still until the others are told: a trip there takes
    // longer than what follows.
    lone_rank rank(1);
    const gs::detail::workspace_view& view = rank.view;
    gs::detail::host_report& report = rank.report;
    gs::detail::thread_context ctx{0};
    report.request = asked.packed();
    {
        session t(ctx, view, 0, 0, gs::collective_kind::barrier, gs::never.time_since_epoch().count());
        REQUIRE(t.enter());
        CHECK(report.place == 0);
        CHECK(report.heeded == 0);
        REQUIRE(t.meet(1));
        CHECK(report.place == 0);   // nobody waited for long
        CHECK(report.heeded == 1);  // while all wait for each other
        CHECK_FALSE(t.finish());
        CHECK(report.place >> 32 == 1);
    }
    CHECK(report.verdict == 0);
    session t(ctx, view, 0, 0, gs::collective_kind::barrier, gs::never.time_since_epoch().count());
    CHECK_FALSE(t.enter());
    CHECK(t.fault() == asked);
}

TEST_CASE("a block that waits looks for the host's request though the first one has left", "[collective]") {
    lone_rank rank(2);
    gs::detail::thread_context ctx{0};
    session s(ctx, rank.view, 0, 1, gs::collective_kind::barrier, gs::detail::no_deadline);
    REQUIRE(s.enter());
    rank.report.request = asked.packed();
    CHECK_FALSE(s.wait_until([] { return false; }));
    CHECK(rank.report.heeded == 1);
    CHECK(rank.report.place == 0);  // the first one tells where the rank is
}

TEST_CASE("a rank that ends with a fault has told the host before it says so to others", "[collective]") {
    lone_rank rank(64);
    rank.report.request = asked.packed();
    gs::detail::thread_context ctx{0};
    session s(ctx, rank.view, 0, 63, gs::collective_kind::barrier, gs::detail::no_deadline);
    s.abort_if(asked.packed());
    CHECK(rank.report.verdict == 0);  // nothing is settled until all have left
    CHECK_FALSE(s.enter());
    CHECK(s.fault() == asked);
    CHECK(rank.report.verdict == asked.packed());
}

TEST_CASE("a block that finds the group closed in part closes the rest", "[collective]") {
    lone_rank rank(3);
    gs::detail::atomic_ref{rank.view.state(0, 2).proposal}.store_release(asked.packed());
    gs::detail::atomic_ref{rank.view.state(0, 1).closed}.store_crossing(1);  // and then whoever began was gone
    gs::detail::thread_context ctx{0};
    session s(ctx, rank.view, 0, 1, gs::collective_kind::barrier, gs::detail::no_deadline);
    CHECK_FALSE(s.enter());
    CHECK(s.fault() == asked);
    for (std::uint32_t b = 0; b < 3; ++b) CHECK(rank.view.state(0, b).closed == 1);
}

TEST_CASE("all memory of a group on devices comes back, also where there isn't enough", "[collective]") {
    visible_memory visible;
    gs::host::node node({.devices = 2, .memory = gs::bytes{1 << 20}, .sms = 1});
    const std::vector<gs::device_id> devices{{0}, {1}};
    {
        group_type group(node, visible, devices, {.channels = 2});
        const group_type moved = std::move(group);
        CHECK(node.memory({1}).used() > gs::bytes{0});
        CHECK(visible.used > 0);
        CHECK(moved.rank(1, 1).size() == 2);
        CHECK_THROWS_AS(moved.rank(0, 2), gs::operation_error);
    }
    void* const hog = node.memory({1}).allocate(1 << 19, 64);
    CHECK_THROWS_AS(group_type(node, visible, devices, {.slot = gs::bytes{1 << 18}}), gs::memory_error);
    CHECK_THROWS_AS(group_type(node, visible, {}), gs::operation_error);
    CHECK_THROWS_AS(group_type(node, visible, devices, {.blocks = 0}), gs::operation_error);
    CHECK(visible.used == 0);
    CHECK(node.memory({0}).used() == gs::bytes{0});
    (void)node.memory({1}).deallocate(hog, 1 << 19, 64);
    CHECK(node.memory({1}).used() == gs::bytes{0});
}

}  // namespace device_communicator_test
