// SPDX-License-Identifier: Apache-2.0
// Tags: lock-free
// The ring of a trace's records: each record is in the ring or counted as lost, never both, and no
// record is torn, however late a writer is.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include <gpushare/observe/detail/trace_ring.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/sanitizers.hpp"
#include "support/threads.hpp"

namespace trace_ring_test {

using gpushare::detail::trace_kind;
using gpushare::detail::trace_record;
using gpushare::detail::trace_ring;

/// A record whose fields all follow from one number.
trace_record numbered(std::int64_t n) {
    return {trace_kind::wait, static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(2 * n), 3 * n, 5 * n};
}

/// The numbers of the records in the ring; -1 for a torn record.
std::vector<std::int64_t> content(trace_ring& ring) {
    std::vector<std::int64_t> found;
    ring.for_each([&](const trace_record& r) {
        const trace_record whole = numbered(r.begin / 3);
        const bool same = r.kind == whole.kind && r.device == whole.device && r.tenant == whole.tenant &&
                          r.begin == whole.begin && r.end == whole.end;
        found.push_back(same ? r.begin / 3 : -1);
    });
    return found;
}

TEST_CASE("a writer that is a whole ring late leaves the later record, and its own is lost once", "[observe]") {
    trace_ring ring;
    ring.reserve(2);
    const auto late = ring.claim();
    ring.push(numbered(1));
    ring.push(numbered(2));  // in the slot of the late record
    CHECK(content(ring) == std::vector<std::int64_t>{1, 2});
    CHECK(ring.lost() == 1);
    ring.put(late, numbered(0));
    CHECK(content(ring) == std::vector<std::int64_t>{1, 2});
    CHECK(ring.lost() == 1);
    for (std::int64_t n = 3; n <= 4; ++n) ring.push(numbered(n));
    CHECK(content(ring) == std::vector<std::int64_t>{3, 4});
    CHECK(ring.lost() == 3);
}

TEST_CASE("a record that nothing has overwritten yet is visited, in its place", "[observe]") {
    trace_ring ring;
    ring.reserve(2);
    ring.push(numbered(0));
    ring.push(numbered(1));
    const auto late = ring.claim();
    ring.push(numbered(3));
    CHECK(content(ring) == std::vector<std::int64_t>{0, 3});
    ring.put(late, numbered(2));
    CHECK(content(ring) == std::vector<std::int64_t>{2, 3});
    CHECK(ring.lost() == 2);
}

TEST_CASE("each record is in the ring or lost, and none is torn, however late a writer is", "[observe]") {
    constexpr unsigned writers = 4;
    const auto each = static_cast<std::int64_t>(support::few(500));
    support::random any(GENERATE(1U, 2U, 3U));
    for (int round = 0; round < static_cast<int>(support::few(30)); ++round) {
        trace_ring ring;
        ring.reserve(1 + any.below(3));
        std::vector<std::uint64_t> seeds(writers);
        for (auto& seed : seeds) seed = any.below(1'000'000);
        std::atomic<unsigned> torn{0}, at_work{writers};
        support::together(writers + 1, [&](unsigned who) {
            if (who == writers) {
                while (at_work != 0)
                    for (const auto n : content(ring)) torn += n < 0 ? 1 : 0;
                return;
            }
            support::random mine(seeds[who]);
            for (std::int64_t i = 0; i < each; ++i) {
                const auto number = ring.claim();
                if (mine.one_in(50)) std::this_thread::yield();  // may come back a whole ring later
                if (mine.one_in(4)) support::spin(mine.below(100));
                ring.put(number, numbered(static_cast<std::int64_t>(number)));
            }
            --at_work;
        });
        const auto left = content(ring);
        CHECK(torn == 0);
        CHECK(left.size() == ring.capacity());
        CHECK(left.size() + ring.lost() == static_cast<std::size_t>(writers * each));
        CHECK(std::ranges::is_sorted(left));
        CHECK(left.front() >= 0);
    }
}

TEST_CASE("a reader costs no record, even if it reads a slot while a writer comes", "[observe]") {
    std::vector<trace_ring> rings(support::few(2000U));
    for (trace_ring& ring : rings) ring.reserve(1);
    std::atomic<std::size_t> at{0};
    support::together(2, [&](unsigned who) {
        for (std::size_t i = 0; i < rings.size(); ++i) {
            if (who == 0) {
                while (at < i) std::this_thread::yield();
                rings[i].push(numbered(7));
            } else {
                at = i;
                for (int k = 0; k < 20; ++k) (void)content(rings[i]);
            }
        }
    });
    std::size_t kept = 0;
    for (trace_ring& ring : rings) {
        kept += content(ring) == std::vector<std::int64_t>{7} ? 1 : 0;
        CHECK(ring.lost() == 0);
    }
    CHECK(kept == rings.size());
}

}  // namespace trace_ring_test
