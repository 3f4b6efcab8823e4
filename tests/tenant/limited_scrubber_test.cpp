// SPDX-License-Identifier: Apache-2.0
// Scrubbing as a client of a limiter: in pieces, between which other work gets in; and no block is
// back before its last piece.
#include <gpushare/tenant/limited_scrubber.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/memory/scrubbing_resource.hpp>
#include <gpushare/units.hpp>

#include "support/arena_rig.hpp"
#include "support/catch.hpp"
#include "support/manual_scrubber.hpp"
#include "support/manual_timeline.hpp"
#include "support/one_block.hpp"

namespace limited_scrubber_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::limited_scrubber;
using gpushare::never;
using gpushare::scrubbing_resource;
using support::one_block;
using support::painted;

namespace {

using limiter = gpushare::compute_limiter<support::manual_scrubber, support::manual_clock>;
static_assert(gpushare::scrubber<limited_scrubber<limiter>>);

struct setup {
    void reach_all(errc status = errc::none) {
        while (stream.reach_next(status)) compute.poll();
    }
    void* take() {
        void* const p = blocks.allocate(64, 64);
        std::memset(p, 0x5e, 64);
        return p;
    }

    support::manual_clock clock;
    support::manual_scrubber stream;
    one_block upstream;
    limiter compute{{.depth = 1, .horizon = 0ms}, clock};
    gpushare::client_id cleaner = compute.add({.weight = 5_pct});
    gpushare::client_id urgent = compute.add({.weight = 50_pct, .level = {1}});
    limited_scrubber<limiter> scrubs{compute, cleaner, stream, 16_B};
    scrubbing_resource<one_block, limited_scrubber<limiter>> blocks{upstream, scrubs};
};

}  // namespace

TEST_CASE("a higher tenant gets in between the pieces of a block that is scrubbed", "[tenant][scrub]") {
    setup t;
    void* const p = t.take();
    CHECK(t.blocks.deallocate(p, 64, 64) == errc::none);
    CHECK(t.stream.filled() == 16);  // one piece is on the device, and no more
    std::size_t filled_before = 0;
    const auto between = t.compute.submit(t.urgent, t.stream, [&](auto& s) { filled_before = s.filled(); });
    while (!between->done() && t.stream.reach_next()) t.compute.poll();
    CHECK(filled_before == 16);
    t.blocks.collect();
    CHECK(t.upstream.out);
    CHECK(t.blocks.pending() == 64_B);

    t.reach_all();
    CHECK(painted(p, 64_B, 0));
    CHECK(t.upstream.out);  // it is given back when somebody looks
    CHECK(t.blocks.try_allocate(64, 64) == p);
    CHECK(t.compute.usage(t.cleaner).completed == 4);
}

TEST_CASE("a block in use is scrubbed behind the work that uses it, by the first piece", "[tenant][scrub]") {
    setup t;
    auto kernels = t.stream.neighbour();
    void* const p = t.take();
    const auto used = kernels.record();
    CHECK(t.blocks.deallocate_after(used, p, 64, 64) == errc::none);
    REQUIRE(t.stream.awaited().size() == 1);
    CHECK(t.stream.awaited().front() == used);
    t.reach_all();
    t.blocks.collect();
    CHECK(t.upstream.out);  // the kernel isn't done, whatever the stand-in for a device filled
    kernels.reach_all();
    t.blocks.collect();
    CHECK_FALSE(t.upstream.out);
}

TEST_CASE("a block that isn't scrubbed to its end is given to nobody", "[tenant][scrub]") {
    setup t;
    void* const p = t.take();
    SECTION("because a piece fails") {
        CHECK(t.blocks.deallocate(p, 64, 64) == errc::none);
        t.stream.reach_next();
        t.reach_all(errc::kernel_failed);
        CHECK_FALSE(t.blocks.drain(never));
    }
    SECTION("because a piece can't be enqueued") {
        t.stream.fail_next_fill();
        CHECK(t.blocks.deallocate(p, 64, 64) == errc::none);
        t.reach_all();
        CHECK(t.stream.filled() == 0);
    }
    SECTION("because the client is closed") {
        CHECK(t.compute.close(t.cleaner));
        CHECK(t.blocks.deallocate(p, 64, 64) == errc::submission_failed);
    }
    t.blocks.collect();
    CHECK(t.blocks.try_allocate(64, 64) == nullptr);
    CHECK(t.upstream.out);
}

TEST_CASE("a fill that failed is told by every point behind it, whoever recorded one first",
          "[tenant][scrub][failures]") {
    setup t;
    std::vector<std::byte> memory(64, std::byte{1});
    t.scrubs.fill(memory.data(), std::byte{0}, 16);
    const auto theirs = t.scrubs.record(), mine = t.scrubs.record();  // each of another thread that has filled
    t.reach_all(errc::kernel_failed);
    CHECK(theirs.status() == errc::kernel_failed);
    CHECK(mine.status() == errc::kernel_failed);
    t.scrubs.fill(memory.data(), std::byte{0}, 16);
    const auto later = t.scrubs.record();
    t.reach_all();
    CHECK(later.status() == errc::none);
}

TEST_CASE("points of a scrubber are reached in order, those without scrubbing too", "[tenant][scrub]") {
    setup t;
    std::vector<std::byte> memory(64, std::byte{1});
    CHECK(t.scrubs.record().reached());
    t.scrubs.fill(memory.data(), std::byte{0}, 40);
    const auto first = t.scrubs.record(), second = t.scrubs.record();
    CHECK_FALSE(first.reached());
    CHECK_FALSE(second.reached());
    t.scrubs.wait(first);  // nothing to do: what comes is behind it
    t.reach_all();
    CHECK(first.reached());
    CHECK(second.reached());
    CHECK(first.status() == errc::none);
    CHECK(memory[39] == std::byte{0});
    CHECK(memory[40] == std::byte{1});  // the last piece is shorter

    auto kernels = t.stream.neighbour();
    const auto end = kernels.record();
    t.scrubs.wait(end);
    const auto third = t.scrubs.record();
    CHECK_FALSE(third.reached());
    kernels.reach_all();
    CHECK(third.reached());
    using point = limited_scrubber<limiter>::point;
    CHECK(point::wait_any(std::vector{third, first}, never));
    CHECK(elapsed(point(end), point(end)) == 0ns);
}

TEST_CASE("blocks of the host device go round, scrubbed at a share", "[tenant][scrub][host]") {
    gpushare::host::node node{{.memory = 4_MiB, .sms = 2}};
    auto stream = node.make_stream({0}), kernels = node.make_stream({0});
    gpushare::compute_limiter<gpushare::host::stream, gpushare::host::steady_clock> compute;
    limited_scrubber scrubs{compute, compute.add({.weight = 5_pct}), stream, 256_KiB};
    scrubbing_resource blocks{node.memory({0}), scrubs};
    for (int i = 0; i < 10; ++i) {
        void* const p = blocks.allocate(3 << 20, 256);
        bool clean = false;
        kernels.launch({}, [&, p](auto&) { clean = i == 0 || painted(p, 3_MiB, 0); });
        kernels.fill(p, std::byte{0x5e}, 3 << 20);
        CHECK(blocks.deallocate_after(kernels.record(), p, 3 << 20, 256) == errc::none);
        CHECK(blocks.drain(never));
        CHECK(clean);
    }
}

TEST_CASE("chunks are scrubbed ahead one by one as pieces of a submission", "[tenant][scrub][arena]") {
    support::arena_rig rig({.capacity = 6, .window = 4});
    {
        auto chat = rig.arena(rig.chat, 1);
        chat.commit(0_B, rig.chunks(6));
        support::paint(chat.data(), rig.chunks(6), 0x5e);
    }
    CHECK(rig.pool.usage().dirty == 6);
    support::manual_clock clock;
    limiter compute{{.depth = 1, .horizon = 0ms}, clock};
    const auto cleaner = compute.add({.weight = 5_pct}), urgent = compute.add({.weight = 50_pct, .level = {1}});
    const auto whole = gpushare::submit_chunked(compute, cleaner, rig.scrubber, 3,
                                                [&](auto&, std::size_t) { CHECK(rig.pool.scrub_ahead(1) == 1); });
    CHECK(rig.pool.usage().scrubbing == 1);
    std::uint64_t scrubbing = 0;
    const auto between = compute.submit(urgent, rig.scrubber, [&](auto&) { scrubbing = rig.pool.usage().scrubbing; });
    while (!whole->done() && rig.scrubber.reach_next()) compute.poll();
    CHECK(between->done());
    CHECK(scrubbing == 1);
    CHECK(rig.pool.collect());
    CHECK(rig.pool.usage().clean == 3);
}

}  // namespace limited_scrubber_test
