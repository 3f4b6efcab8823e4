// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Horovod's names while a rank has no memory: each of its allocations fails once. No other rank
// waits for it, and no array is under way that its rank believes it still has.
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <latch>
#include <memory>
#include <memory_resource>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/horovod.hpp>
#include <gpushare/gradient/horovod_devices.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/failing_new.hpp"
#include "support/named_outcome.hpp"
#include "support/named_ranks.hpp"

namespace horovod_memory_test {

namespace gs = gpushare;
using namespace gs::horovod;
using gs::errc;
using support::outcome_of;

/// Calls `hand_over` with an allocation that fails. Whether one has.
template <class F>
bool lacks_memory(std::size_t good, const F& hand_over) {
    bool lacks = false;
    support::this_heap = {.good = good, .recovers = true};
    try {
        hand_over();
    } catch (const std::bad_alloc&) {
        lacks = true;
    }
    support::this_heap = {};
    return lacks;
}

using machine = support::named_machine<gs::host::node, std::pmr::memory_resource, gs::communicator, float>;

struct devices {
    // Destroyed after the machine, which waits for kernels that still use them.
    std::vector<std::vector<float>> x = std::vector(2, std::vector<float>(3, 1));
    std::vector<std::vector<float>> y = std::vector(2, std::vector<float>(300, 1));
    gs::host::node node{{.devices = 2, .sms = 4}};
    gs::communicator group{2, {.blocks = 2}};
    machine m{node,  *std::pmr::new_delete_resource(),
              group, false,
              512,   device_options{.patience = std::chrono::seconds(20)}};
    process_set first{*m.ranks, 0}, second{*m.ranks, 1};
};

TEST_CASE("a rank on a device that lacks memory ends the calls of all ranks, and waits for none", "[interop]") {
    std::size_t failed = 0, told = 0;
    for (bool done = false; !done;) {
        CAPTURE(failed);
        devices d;
        const auto list = [&](std::uint32_t r) {
            return std::vector{d.m.array(r, std::span(d.x[r])), d.m.array(r, std::span(d.y[r]))};
        };
        const auto mine = list(1), others = list(0);
        const auto early = grouped_allreduce_async(std::span<const device_array<float>>(others), "x", Sum, d.first);
        std::vector<handle> late;
        const auto hand_over = [&] {
            late = grouped_allreduce_async(std::span<const device_array<float>>(mine), "x", Sum, d.second);
        };
        done = !lacks_memory(failed, hand_over);
        // It failed before it handed anything over, or it ended all calls: it never did half.
        if (!done) CHECK(outcome_of(hand_over).code == errc::none);
        const auto seen = outcome_of([&] { synchronize(early); });
        CHECK(outcome_of([&] { synchronize(late); }) == seen);
        if (seen.code != errc::none) {
            ++told;
            CHECK(seen == support::named_outcome{errc::out_of_memory, 1});
            CHECK_FALSE(done);
        } else {
            for (const std::uint32_t r : {0U, 1U}) d.m.wait(r);
            CHECK(d.x == std::vector(2, std::vector<float>(3, 2)));
        }
        failed += done ? 0 : 1;
    }
    CHECK(failed > told);
    CHECK(told > 2);
}

/// One process on a device, which never gets beyond its first message.
class stuck final : public detail::carrier {
public:
    void go_on() { open_.count_down(); }
    [[nodiscard]] std::uint32_t rank() const override { return 0; }
    [[nodiscard]] std::uint32_t size() const override { return 1; }
    [[nodiscard]] bool on_device() const noexcept override { return true; }
    [[nodiscard]] gs::collective_fault least(std::span<std::uint64_t>, gs::instant) override { return stops(); }
    [[nodiscard]] gs::collective_fault broadcast(std::span<std::uint64_t>, std::uint32_t, gs::instant) override {
        open_.wait();
        return stops();
    }
    [[nodiscard]] gs::collective_fault move(const detail::request_batch&, gs::instant) override { return stops(); }
    void abort(errc) override {}
    [[nodiscard]] gs::collective_fault fail(errc) override { return stops(); }
    [[nodiscard]] std::shared_ptr<detail::request> made_of(detail::device_call c) override {
        auto made = std::make_shared<detail::request>();
        made->name = std::move(c.name);
        return made;
    }

private:
    [[nodiscard]] static gs::collective_fault stops() { return {errc::stopped, gs::collective_kind::all_reduce, 0, 0}; }
    std::latch open_{1};
};

TEST_CASE("a process that lacks memory hands over all arrays of a group, or none", "[interop]") {
    std::size_t failed = 0;
    for (bool done = false; !done; failed += done ? 0 : 1) {
        CAPTURE(failed);
        stuck net;
        process_set of(net);
        std::vector<device_array<float>> list(5);
        std::vector<handle> all;
        const auto hand_over = [&] {
            all = grouped_allreduce_async(std::span<const device_array<float>>(list), "x", Sum, of);
        };
        done = !lacks_memory(failed, hand_over);
        if (!done) CHECK(outcome_of(hand_over).code == errc::none);  // no name is under way
        net.go_on();
        CHECK(outcome_of([&] { synchronize(all); }).code == errc::stopped);
    }
    CHECK(failed > 5);
}

}  // namespace horovod_memory_test

#endif
