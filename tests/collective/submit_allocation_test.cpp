// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Submitting a collective doesn't allocate once the streams and the gang order have had as much
// work in flight before.
#include <gpushare/collective/submit.hpp>

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/detail/gang_residents.hpp>

#include "support/catch.hpp"
#include "support/sanitizers.hpp"

#ifndef SUPPORT_SANITIZED

#include "support/failing_new.hpp"

namespace gs = gpushare;

namespace {

/// Allocations of 20 calls, which all succeed, after as many that weren't counted.
template <class Submit>
std::size_t allocations_of(std::span<gs::host::stream> streams, const Submit& submit) {
    bool good = true;
    std::size_t before = 0;
    for (int i = 0; i < 40; ++i) {
        if (i == 20) before = support::this_heap.allocations;
        good = submit() == gs::errc::none && good;
        for (auto& s : streams) s.record().wait(gs::never);
    }
    const std::size_t made = support::this_heap.allocations - before;
    CHECK(good);
    return made;
}

}  // namespace

TEST_CASE("submitting a collective doesn't allocate in steady state", "[collective]") {
    constexpr std::uint32_t ranks = 4;
    constexpr std::size_t width = 16, n = 16 * width;
    gs::host::node node({.devices = ranks, .sms = 4});
    const gs::communicator group(ranks);
    std::vector<gs::device_id> devices;
    std::vector<gs::host::stream> streams;
    std::vector<gs::member> members;
    std::vector<std::vector<float>> x(ranks, std::vector<float>(n, 1));
    std::vector<const float*> in;
    std::vector<float*> out;
    const auto pipeline = [&](std::uint32_t r) {
        return gs::reduced(std::span<const float>(x[r]), width) | gs::relu();
    };
    std::vector<decltype(pipeline(0))> steps;
    for (std::uint32_t r = 0; r < ranks; ++r) {
        devices.push_back({r});
        streams.push_back(node.make_stream({r}));
        members.push_back(group.rank(r));
        in.push_back(x[r].data());
        out.push_back(x[r].data());
        steps.push_back(pipeline(r));
    }
    CHECK(allocations_of(streams, [&] {
              return gs::submit_all_reduce<float>(node.gangs(), devices, std::span(streams), members, in, out, n);
          }) == 0);
    CHECK(allocations_of(streams, [&] {
              return gs::submit_run(node.gangs(), devices, std::span(streams), members, std::span(std::as_const(steps)),
                                    std::span(std::as_const(out)));
          }) == 0);
    // One a call: a kernel with the bodies of 16 ranks is more than the host's streams keep in
    // place.
    CHECK(allocations_of(std::span(streams).first(1), [&] {
              return gs::submit_shared_all_reduce<float>(node.gangs(), devices[0], streams[0], members, in, out, n);
          }) == 20);
}

TEST_CASE("a gang that was given room is noted on its devices without memory", "[collective]") {
    gs::host::node node{{.devices = 1, .sms = 1}};
    auto stream = node.make_stream({0});
    gs::detail::gang_residents<gs::host::stream::point> gangs(1);
    const gs::device_id d{0};
    const int channels[3] = {};
    std::vector<gs::host::stream::point> ends;
    for (int i = 0; i < 3; ++i) ends.push_back(stream.record());
    auto entered = gangs.enter(std::span(&d, 1));
    for (const int& c : channels) entered.make_room(d, 1, &c, stream);
    bool noted = true;
    support::this_heap = {.good = 0};
    try {
        for (std::size_t i = 0; i < 3; ++i) entered.add(d, 1, &channels[i], std::move(ends[i]));
    } catch (const std::bad_alloc&) {
        noted = false;
    }
    support::this_heap = {};
    CHECK(noted);
}

#endif
