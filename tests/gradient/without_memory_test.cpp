// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// A process that has no memory for its part of a group or a link: each of its allocations fails
// once. The other processes learn who lacks memory, instead of waiting, and the transport goes on.
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <chrono>
#include <cstddef>
#include <memory_resource>
#include <new>
#include <optional>
#include <span>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/buckets.hpp>
#include <gpushare/gradient/compressed_link.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/two_level.hpp>

#include "support/catch.hpp"
#include "support/failing_new.hpp"
#include "support/threads.hpp"

namespace without_memory_test {

namespace gs = gpushare;
using gs::errc;

/// What a process saw: its own std::bad_alloc, or the others' error and whom it names.
struct seen {
    bool lacks = false;
    errc code = errc::none;
    std::uint64_t named = 0;
};

/// Two processes call make(p, net), the second one with an allocation that fails, until none does.
/// Returns how many rounds failed.
template <class Make>
std::size_t fail_each(const Make& make) {
    std::size_t failed = 0;
    for (bool done = false; !done; ++failed) {
        const gs::communicator between(2);
        std::vector<seen> saw(2);
        std::vector<int> again(2);
        support::together(2, [&](unsigned p) {
            gs::thread_transport net(between.rank(p));
            if (p == 1) support::this_heap = {.good = failed, .recovers = true};
            try {
                make(p, net);
            } catch (const gs::operation_error& e) {
                saw[p] = {false, e.code(), e.figures().left};
            } catch (const std::bad_alloc&) {
                saw[p].lacks = true;
            }
            support::this_heap = {};
            again[p] = net.barrier(std::chrono::steady_clock::now() + std::chrono::seconds(20)) ? 0 : 1;
        });
        CAPTURE(failed);
        done = !saw[1].lacks;
        CHECK(saw[0].code == (done ? errc::none : errc::out_of_memory));
        CHECK(saw[0].named == (done ? 0 : 1));
        CHECK(saw[1].code == errc::none);
        CHECK(again == std::vector{1, 1});
    }
    return failed - 1;
}

gs::instant later() { return std::chrono::steady_clock::now() + std::chrono::seconds(20); }

TEST_CASE("a process without memory for its part of a group is named to the others", "[gradient]") {
    std::vector<std::optional<gs::communicator>> inner(2);
    for (auto& one : inner) one.emplace(1);
    const std::size_t failed =
        fail_each([&](unsigned p, gs::thread_transport& net) { (void)gs::split(*inner[p], net, {}, later()); });
    CHECK(failed >= 4);
}

TEST_CASE("a process without memory for its devices' part of a group is named to the others", "[gradient]") {
    struct machine {
        gs::host::node node{{.devices = 1, .sms = 2}};
        gs::device_id device{0};
        gs::host::stream stream = node.make_stream(device);
        gs::communicator group{1};
        gs::member mine = group.rank(0);
    };
    std::vector<machine> m(2);
    const std::size_t failed = fail_each([&](unsigned p, gs::thread_transport& net) {
        const gs::two_level_devices levels(m[p].node.gangs(), std::span<const gs::device_id>(&m[p].device, 1),
                                           std::span(&m[p].stream, 1), std::span<const gs::member>(&m[p].mine, 1), net,
                                           *std::pmr::new_delete_resource(), {.chunk = gs::bytes{4096}}, {}, later());
    });
    CHECK(failed >= 5);
}

TEST_CASE("a process without memory for its link is named to the others", "[gradient]") {
    const std::size_t failed =
        fail_each([](unsigned, gs::thread_transport& net) { const gs::fp8_link link(net, later()); });
    CHECK(failed >= 1);
}

TEST_CASE("a gradient that lacks memory isn't registered", "[gradient]") {
    std::vector<float> x(4), y(4);
    for (std::size_t good = 0, failed = 1; failed != 0; ++good) {
        gs::gradient_buckets<> mine;
        (void)mine.add("x", x, {gs::wire_format::bf16, true});
        (void)mine.plan();
        failed = 0;
        support::this_heap = {.good = good, .recovers = true};
        try {
            (void)mine.add("y", y, {gs::wire_format::bf16, true});
        } catch (const std::bad_alloc&) {
            failed = 1;
        }
        support::this_heap = {};
        CAPTURE(good);
        CHECK(mine.size() == 2 - failed);
        CHECK(mine.ready(1) == (failed != 0 ? errc::mismatch : errc::none));
        CHECK((good > 0 || failed == 1));
    }
}

}  // namespace without_memory_test

#endif
