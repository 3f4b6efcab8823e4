// SPDX-License-Identifier: Apache-2.0
// Collectives in SM partitions of the host backend: all blocks of all ranks have to fit into the
// partition in which they run.
#include <gpushare/collective/submit.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include <gpushare/backend/host/host.hpp>

#include "support/catch.hpp"

namespace sm_partitions_test {

namespace gs = gpushare;

namespace {

constexpr std::uint32_t ranks = 2;

/// A group whose ranks have a stream each in a subset of their device.
struct group_in_subsets {
    group_in_subsets(gs::host::node& n, std::uint32_t sms, std::uint32_t tag) : node(n), group(ranks, {.blocks = 4}) {
        for (std::uint32_t r = 0; r < ranks; ++r) {
            auto parts = gs::host::device_sms{node, {r}}.partition(std::array{sms});
            streams.push_back(parts[0].make_stream({}, tag));
            devices.push_back({r});
            members.push_back(group.rank(r));
            data.emplace_back(5000, static_cast<float>(r + 1));
        }
    }
    gs::errc all_reduce(std::uint32_t blocks) {
        std::vector<const float*> in;
        std::vector<float*> out;
        for (auto& of_rank : data) {
            in.push_back(of_rank.data());
            out.push_back(of_rank.data());
        }
        return gs::submit_all_reduce<float>(node.gangs(), devices, std::span(streams), members, in, out, data[0].size(),
                                            gs::sum{}, gs::launch_options{.blocks = blocks});
    }
    [[nodiscard]] bool all_are(float value) {
        bool right = true;
        for (auto& s : streams) right &= s.record().wait(gs::never);
        for (const auto& of_rank : data)
            for (const float x : of_rank) right &= x == value;
        return right;
    }

    gs::host::node& node;
    gs::communicator group;
    std::vector<gs::device_id> devices;
    std::vector<gs::host::stream> streams;
    std::vector<gs::member> members;
    std::vector<std::vector<float>> data;
};

}  // namespace

TEST_CASE("a collective that doesn't fit its partition is refused, whatever the device could hold", "[collective]") {
    gs::host::node node{{.devices = ranks, .sms = 4}};
    group_in_subsets two(node, 2, 7);
    CHECK(two.all_reduce(3) == gs::errc::too_many_blocks);
    CHECK(two.data[1][0] == 2);
    CHECK(two.all_reduce(2) == gs::errc::none);
    CHECK(two.all_are(3));
    for (std::uint32_t r = 0; r < ranks; ++r)
        for (const auto& block : node.ledger({r}).take().blocks) CHECK(block.sm < 2);
}

TEST_CASE("collectives of different partitions, and one of none beside them, all end", "[collective]") {
    gs::host::node node{{.devices = ranks, .sms = 5}};
    group_in_subsets a(node, 2, 1), b(node, 2, 2);
    group_in_subsets everywhere(node, 1, 3);
    for (std::uint32_t r = 0; r < ranks; ++r) everywhere.streams[r] = node.make_stream({r});
    float of_a = 1;
    for (int round = 0; round < 10; ++round) {
        for (auto* g : {&a, &b, &everywhere})
            for (auto& of_rank : g->data) of_rank.assign(of_rank.size(), of_a);
        CHECK(a.all_reduce(2) == gs::errc::none);
        CHECK(everywhere.all_reduce(4) == gs::errc::none);
        CHECK(b.all_reduce(1) == gs::errc::none);
        for (auto* g : {&a, &b, &everywhere}) CHECK(g->all_are(2 * of_a));
        of_a += 1;
    }
}

}  // namespace sm_partitions_test
