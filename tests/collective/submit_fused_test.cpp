// SPDX-License-Identifier: Apache-2.0
// Fused all-reduces on streams give the bits that rank threads get from the same pipelines.
#include <gpushare/collective/submit.hpp>

#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/epilogue_stages.hpp>
#include <gpushare/collective/fused_all_reduce.hpp>

#include "support/catch.hpp"
#include "support/threads.hpp"

namespace submit_fused_test {

namespace gs = gpushare;

namespace {

constexpr std::uint32_t ranks = 3;

bool same(std::span<const gs::bfloat16> a, std::span<const gs::bfloat16> b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

struct machine {
    machine(std::size_t rows, std::size_t width_, gs::bytes slot = gs::bytes{32768})
        : width(width_),
          node({.devices = ranks, .sms = 4}),
          group(ranks, {.blocks = 4, .slot = slot}),
          weight(width, 0.5F) {
        for (std::uint32_t r = 0; r < ranks; ++r) {
            devices.push_back({r});
            streams.push_back(node.make_stream({r}));
            members.push_back(group.rank(r));
            in.emplace_back(rows * width);
            for (std::size_t i = 0; i < in[r].size(); ++i) in[r][i] = static_cast<float>((i * 7 + r * 3) % 11) - 5;
            out.emplace_back(rows * width);
        }
    }
    [[nodiscard]] auto steps(std::uint32_t r) const {
        return gs::reduced(in[r], width) | gs::rms_norm(weight, 1e-6F) | gs::cast<gs::bfloat16>();
    }
    template <bool Sharded>
    gs::errc submit(const gs::launch_options& options = {}) {
        std::vector<decltype(steps(0))> all;
        std::vector<gs::bfloat16*> to;
        for (std::uint32_t r = 0; r < ranks; ++r) {
            all.push_back(steps(r));
            to.push_back(out[r].data());
        }
        return submit<Sharded>(std::span(std::as_const(all)), std::span<gs::bfloat16* const>(to), options);
    }
    template <bool Sharded, class Steps>
    gs::errc submit(std::span<const Steps> all, std::span<gs::bfloat16* const> to, const gs::launch_options& options) {
        const std::span<const gs::device_id> on(devices);
        const std::span<const gs::member> who(members);
        if constexpr (Sharded)
            return gs::submit_run_sharded(node.gangs(), on, std::span(streams), who, all, to, options);
        else
            return gs::submit_run(node.gangs(), on, std::span(streams), who, all, to, options);
    }
    void wait() {
        for (auto& s : streams) s.record().wait(gs::never);
    }

    std::size_t width;
    gs::host::node node;
    gs::communicator group;
    std::vector<float> weight;
    std::vector<gs::device_id> devices;
    std::vector<gs::host::stream> streams;
    std::vector<gs::member> members;
    std::vector<std::vector<float>> in;
    std::vector<std::vector<gs::bfloat16>> out;
};

}  // namespace

TEST_CASE("a pipeline on streams, with any number of blocks, has the bits of rank threads", "[collective]") {
    for (const std::size_t rows : {1U, 2U, 50U}) {
        machine m(rows, 100);
        std::vector<std::vector<gs::bfloat16>> want(ranks, std::vector<gs::bfloat16>(rows * m.width));
        support::together(ranks, [&](unsigned r) { gs::run(m.group.rank(r), m.steps(r), std::span(want[r])); });
        for (const auto& [blocks, how] : std::vector<std::pair<std::uint32_t, gs::algorithm>>{
                 {1, gs::algorithm::two_shot},
                 {4, gs::algorithm::two_shot},
                 {2, gs::algorithm::two_shot},
                 {1, gs::algorithm::one_shot},  // fifty rows: too many for a slot
                 {4, gs::algorithm::one_shot}}) {
            CAPTURE(rows, blocks, gs::to_string(how));
            m.group.set_tuning(gs::tuning_table::always(how));
            for (auto& o : m.out) o.assign(o.size(), gs::bfloat16{});
            REQUIRE(m.submit<false>({.blocks = blocks}) == gs::errc::none);
            m.wait();
            CHECK_FALSE(gs::fault_of(m.members[0]));
            for (std::uint32_t r = 0; r < ranks; ++r) CHECK(same(m.out[r], want[r]));

            for (auto& o : m.out) o.assign(o.size(), gs::bfloat16{});
            REQUIRE(m.submit<true>({.blocks = blocks}) == gs::errc::none);
            m.wait();
            for (std::uint32_t r = 0; r < ranks; ++r) {
                const auto own = gs::shard_of(rows, r, ranks);
                const std::size_t kept = own.size() * m.width;
                CHECK(same(std::span(m.out[r]).first(kept), std::span(want[r]).subspan(own.begin * m.width, kept)));
            }
        }
    }
}

TEST_CASE("pipelines of ranks that share a device, in one launch, have the bits of rank threads", "[collective]") {
    constexpr std::size_t rows = 7;
    machine m(rows, 100);
    std::vector<std::vector<gs::bfloat16>> want(ranks, std::vector<gs::bfloat16>(rows * m.width));
    support::together(ranks, [&](unsigned r) { gs::run(m.group.rank(r), m.steps(r), std::span(want[r])); });
    std::vector<decltype(m.steps(0))> steps;
    std::vector<gs::bfloat16*> to;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        steps.push_back(m.steps(r));
        to.push_back(m.out[r].data());
    }
    const std::span<const decltype(m.steps(0))> all(steps);
    const std::span<gs::bfloat16* const> outs(to);
    const auto submit = [&](bool sharded, const auto& some, const gs::launch_options& options) {
        auto& gangs = m.node.gangs();
        return sharded
                   ? gs::submit_shared_run_sharded(gangs, m.devices[1], m.streams[1], m.members, some, outs, options)
                   : gs::submit_shared_run(gangs, m.devices[1], m.streams[1], m.members, some, outs, options);
    };
    for (const bool sharded : {false, true}) {
        for (auto& o : m.out) o.assign(o.size(), gs::bfloat16{});
        REQUIRE(submit(sharded, all, {}) == gs::errc::none);
        m.wait();
        CHECK_FALSE(gs::fault_of(m.members[0]));
        for (std::uint32_t r = 0; r < ranks; ++r) {
            const auto own = sharded ? gs::shard_of(rows, r, ranks) : gs::element_range{0, rows};
            const std::size_t kept = own.size() * m.width;
            CHECK(same(std::span(m.out[r]).first(kept), std::span(want[r]).subspan(own.begin * m.width, kept)));
        }
        const auto before = m.group.progress()[0].epoch;
        CHECK(submit(sharded, all, {.blocks = 4}) == gs::errc::too_many_blocks);  // 12 blocks, 4 SMs
        CHECK(submit(sharded, all.first(2), {}) == gs::errc::invalid_specification);
        CHECK(m.group.progress()[0].epoch == before);
    }
}

TEST_CASE("pipelines that can't be launched are refused, and nothing is launched", "[collective]") {
    machine small(2, 3000, gs::bytes{8192});  // a row of 12,000 bytes doesn't fit into a slot
    CHECK(small.submit<false>() == gs::errc::invalid_specification);
    machine m(2, 100);
    CHECK(m.submit<false>({.blocks = 5}) == gs::errc::invalid_specification);
    std::vector<decltype(m.steps(0))> steps{m.steps(0), m.steps(1), m.steps(2)};
    const std::vector<gs::bfloat16*> to{m.out[0].data(), m.out[1].data(), m.out[2].data()};
    steps[1].width = 99;  // 200 elements aren't rows of 99
    CHECK(m.submit<false>(std::span(std::as_const(steps)), std::span<gs::bfloat16* const>(to), {}) ==
          gs::errc::invalid_specification);
    steps.pop_back();
    CHECK(m.submit<false>(std::span(std::as_const(steps)), std::span<gs::bfloat16* const>(to), {}) ==
          gs::errc::invalid_specification);
    CHECK(m.group.progress()[0].epoch == 0);
    machine odd(2, 99);  // a pair of 4 bits would be half behind a row's end
    std::vector<gs::fp4_pair> pairs(99);
    const auto sinking = [&](std::uint32_t r) {
        return gs::reduced(odd.in[r], odd.width) | gs::into(pairs) | gs::cast<gs::bfloat16>();
    };
    const std::vector sinks{sinking(0), sinking(1), sinking(2)};
    const std::vector<gs::bfloat16*> outs{odd.out[0].data(), odd.out[1].data(), odd.out[2].data()};
    CHECK(odd.submit<false>(std::span(sinks), std::span<gs::bfloat16* const>(outs), {}) ==
          gs::errc::invalid_specification);
    CHECK(odd.group.progress()[0].epoch == 0);
}

}  // namespace submit_fused_test
