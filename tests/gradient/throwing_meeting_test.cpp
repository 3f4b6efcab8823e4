// SPDX-License-Identifier: Apache-2.0
// Processes that meet over a transport that throws in one of them, at each of its calls in turn.
// The others learn at once who has thrown what, instead of waiting, and the one that throws gets
// its own exception.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <new>
#include <span>
#include <type_traits>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/collectives.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/compressed_link.hpp>
#include <gpushare/gradient/horovod_processes.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/two_level.hpp>

#include "support/catch.hpp"
#include "support/leaks.hpp"
#include "support/threads.hpp"

namespace throwing_meeting_test {

namespace gs = gpushare;
using gs::errc;

/// Throws instead of its `left`th call.
struct throwing_transport : gs::thread_transport {
    throwing_transport(const gs::member& me, int at) noexcept : gs::thread_transport(me), left(at) {}
    template <gs::reducible T, class Op>
    gs::collective_fault all_reduce(std::span<const std::type_identity_t<T>> in, std::span<T> out, const Op& op,
                                    gs::instant deadline) {
        return kept.to(in, out, [&] {
            count();
            return gs::thread_transport::all_reduce(in, out, op, deadline);
        });
    }
    template <class T>
    gs::collective_fault all_gather(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                    gs::instant deadline) {
        return kept.to(in, out, [&] {
            count();
            return gs::thread_transport::all_gather(in, out, deadline);
        });
    }
    gs::collective_fault barrier(gs::instant deadline) {
        return kept.of([&] {
            count();
            return gs::thread_transport::barrier(deadline);
        });
    }
    void count() {
        if (--left == 0) throw 7;
    }
    int left;
    support::kept_words kept{};
};

gs::instant later() { return std::chrono::steady_clock::now() + std::chrono::seconds(20); }

/// What a process saw: the number that its own transport threw, or an error and whom that names,
/// and what its next call of the transport says.
struct seen {
    int thrown = 0;
    errc code = errc::none;
    std::uint64_t named = 0;
    gs::collective_fault next{};
};

/// Two processes call make(p, net), the second one over a transport that throws in its `at`th call.
template <class Make>
std::vector<seen> meet(int at, const Make& make) {
    const gs::communicator between(2);
    std::vector<throwing_transport> nets{{between.rank(0), -1}, {between.rank(1), at}};
    std::vector<seen> saw(2);
    support::together(2, [&](unsigned p) {
        try {
            make(p, nets[p]);
        } catch (const gs::operation_error& e) {
            saw[p].code = e.code();
            saw[p].named = e.figures().left;
        } catch (const int number) {
            saw[p].thrown = number;
        }
    });
    support::together(2, [&](unsigned p) { saw[p].next = gs::try_barrier(nets[p].me(), later()); });
    return saw;
}

/// Meets until no call throws. Returns how many calls threw.
template <class Make>
int throw_at_each(const Make& make) {
    for (int at = 1;; ++at) {
        const auto saw = meet(at, make);
        CAPTURE(at);
        CHECK(saw[1].code == errc::none);
        if (saw[1].thrown == 0) {
            CHECK(saw[0].code == errc::none);
            return at - 1;
        }
        CHECK(saw[1].thrown == 7);
        // A process that already has its part when another one throws learns that in its next call.
        CHECK((saw[0].code == errc::backend_failed || saw[0].code == errc::none));
        CHECK(saw[0].named == (saw[0].code == errc::none ? 0 : 1));
        for (const seen& s : saw) {
            CHECK(s.next.code == errc::backend_failed);
            CHECK(s.next.rank == 1);
        }
    }
}

/// A process with a device.
struct machine {
    gs::host::node node{{.devices = 1, .sms = 2}};
    gs::device_id device{0};
    gs::host::stream stream = node.make_stream(device);
    gs::communicator group{1};
    gs::member mine = group.rank(0);
};

TEST_CASE("processes that split learn at once whose transport has thrown", "[gradient]") {
    std::vector<gs::communicator> inner;
    for (int p = 0; p < 2; ++p) inner.emplace_back(1);
    CHECK(throw_at_each([&](unsigned p, auto& net) { (void)gs::split(inner[p], net, {}, later()); }) >= 7);
}

TEST_CASE("processes with devices learn at once whose transport has thrown", "[gradient]") {
    std::vector<machine> m(2);
    const auto make = [&](unsigned p, auto& net) {
        const gs::two_level_devices levels(m[p].node.gangs(), std::span<const gs::device_id>(&m[p].device, 1),
                                           std::span(&m[p].stream, 1), std::span<const gs::member>(&m[p].mine, 1), net,
                                           *std::pmr::new_delete_resource(), {.chunk = gs::bytes{4096}}, {}, later());
    };
    CHECK(throw_at_each(make) >= 9);
}

TEST_CASE("processes that make a link learn at once whose transport has thrown", "[gradient]") {
    CHECK(throw_at_each([](unsigned, auto& net) { const gs::fp8_link link(net, later()); }) >= 3);
    CHECK(throw_at_each([](unsigned, auto& net) { const gs::top_k_link link(net, 4, 0.5, later()); }) >= 3);
}

TEST_CASE("processes with Horovod's names learn at once whose transport has thrown", "[gradient]") {
    std::vector<machine> m(2);
    const auto make = [&](unsigned p, auto& net) {
        const gs::horovod::device_process one(m[p].node, m[p].stream, net, *std::pmr::new_delete_resource(),
                                              {.chunk = gs::bytes{4096}}, later());
    };
    CHECK(throw_at_each(make) >= 3);
}

}  // namespace throwing_meeting_test
