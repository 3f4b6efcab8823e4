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
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/horovod.hpp>
#include <gpushare/gradient/horovod_devices.hpp>
#include <gpushare/units.hpp>

#include "support/catch.hpp"
#include "support/failing_new.hpp"
#include "support/named_outcome.hpp"

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
