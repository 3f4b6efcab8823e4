// SPDX-License-Identifier: Apache-2.0
// Arrays over several devices of the host node: scattered, gathered, with halos; and memory that is
// unavailable or too large.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <numeric>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/error.hpp>
#include <gpushare/partition/data_partition.hpp>

#include "support/catch.hpp"
#include "support/fault_resource.hpp"
#include "support/random.hpp"

namespace multi_buffer_test {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::block_cyclic_partition;
using gpushare::contiguous_partition;
using gpushare::device_id;
using gpushare::errc;
using gpushare::weighted_partition;

namespace host = gpushare::host;
static_assert(gpushare::copier<host::stream>);

namespace {

template <class Partition>
using buffer = gpushare::multi_buffer<std::int32_t, Partition, host::device_memory>;

/// A node with a stream on each device. Guarded memory is out of reach for the host, and for other
/// devices too.
struct machine {
    explicit machine(std::uint32_t devices, bool guarded = false)
        : node({.devices = devices, .memory = 16_MiB, .sms = 1, .guarded = guarded}) {
        for (std::uint32_t d = 0; d < devices; ++d) {
            memories.push_back(&node.memory({d}));
            streams.push_back(node.make_stream({d}));
        }
    }
    void wait() {
        for (auto& s : streams) s.record().wait(gpushare::never);
    }
    [[nodiscard]] gpushare::bytes used() const {
        gpushare::bytes sum;
        for (const auto* m : memories) sum += m->used();
        return sum;
    }

    host::node node;
    std::vector<host::device_memory*> memories;
    std::vector<host::stream> streams;
};

std::vector<std::int32_t> numbered(std::size_t n) {
    std::vector<std::int32_t> all(n);
    std::iota(all.begin(), all.end(), 1);
    return all;
}

/// On every rank, adds `n` to its own elements.
template <class Partition>
void add(machine& m, const buffer<Partition>& b, std::int32_t n) {
    for (std::uint32_t r = 0; r < b.shape().ranks(); ++r)
        m.streams[r].launch({.blocks = 1}, [own = b.own(r), n](auto&) {
            for (auto& x : own) x += n;
        });
}

template <class Partition>
void check_round_trip(machine& m, const Partition& shape) {
    const auto before = numbered(static_cast<std::size_t>(shape.size()));
    std::vector<std::int32_t> after(before.size());
    {
        const buffer<Partition> b{shape, m.memories};
        b.scatter(before.data(), std::span{m.streams});
        add(m, b, 1'000);
        b.gather(after.data(), std::span{m.streams});
        m.wait();
    }
    for (std::size_t i = 0; i < before.size(); ++i) REQUIRE(after[i] == before[i] + 1'000);
    REQUIRE(m.used() == 0_B);
}

}  // namespace

TEST_CASE("scattered data is gathered again, whatever the partition", "[partition][buffer]") {
    machine m(4, true);
    for (const std::uint64_t n : {0U, 1U, 3U, 4U, 100U, 4099U}) {
        CAPTURE(n);
        check_round_trip(m, contiguous_partition{n, 4});
        check_round_trip(m, contiguous_partition{n, 4, 64});
        check_round_trip(m, block_cyclic_partition{n, 4, 16});
        check_round_trip(m, weighted_partition<4>{n, std::array<std::uint64_t, 4>{3, 0, 1, 2}, 8});
    }
}

TEST_CASE("the halo is what the neighbours have, even those behind a neighbour", "[partition][buffer]") {
    constexpr std::uint64_t n = 50;
    machine m(5);
    const auto before = numbered(n);
    for (const std::uint64_t halo : {1U, 3U, 10U, 23U, 80U})
        for (const auto& weights :
             {std::array<std::uint64_t, 5>{1, 1, 1, 1, 1}, {5, 0, 1, 0, 3}, {0, 0, 1, 0, 0}, {1, 20, 1, 1, 0}}) {
            CAPTURE(halo, weights);
            const weighted_partition<5> shape{n, weights};
            const buffer<weighted_partition<5>> b{shape, m.memories, halo};
            b.scatter(before.data(), std::span{m.streams});
            add(m, b, 100);  // the halo must see this
            b.exchange_halo(std::span{m.streams});
            add(m, b, 1'000);  // and not this
            m.wait();
            for (std::uint32_t r = 0; r < 5; ++r) {
                if (shape.extent(r) == 0) continue;
                std::vector<std::int32_t> seen(static_cast<std::size_t>(shape.extent(r) + 2 * halo), -1);
                m.streams[r].copy(seen.data(), b.data(r) - halo, seen.size() * sizeof(std::int32_t));
                m.wait();
                for (std::size_t i = 0; i < seen.size(); ++i) {
                    const auto global = static_cast<std::int64_t>(shape.begin(r) + i) - static_cast<std::int64_t>(halo);
                    if (global < 0 || global >= static_cast<std::int64_t>(n)) continue;
                    const bool own = i >= halo && i < seen.size() - halo;
                    REQUIRE(seen[i] == static_cast<std::int32_t>(global) + 1 + (own ? 1'100 : 100));
                }
            }
        }
}

TEST_CASE("halos are exchanged right while the devices run at different speeds", "[partition][buffer][property]") {
    // A moving average, once per step, against the same on one array.
    constexpr std::uint64_t n = 97;
    for (std::uint64_t run = 0; run < 10; ++run) {
        const auto seed = support::seed(run);
        CAPTURE(seed);
        support::random any{seed};
        machine m(3);
        const contiguous_partition shape{n, 3, 4};
        const buffer<contiguous_partition> now{shape, m.memories, 1}, next{shape, m.memories, 1};
        const auto start = numbered(n);  // lasts until the copies are done
        auto expected = start;
        now.scatter(start.data(), std::span{m.streams});
        for (int step = 0; step < 20; ++step) {
            const auto& from = step % 2 == 0 ? now : next;
            const auto& to = step % 2 == 0 ? next : now;
            from.exchange_halo(std::span{m.streams});
            for (std::uint32_t r = 0; r < 3; ++r) {
                if (any.one_in(4)) m.streams[r].enqueue(std::chrono::microseconds(any.below(300)));
                m.streams[r].launch({.blocks = 1}, [in = from.data(r), own = to.own(r), first = shape.begin(r)](auto&) {
                    for (std::size_t i = 0; i < own.size(); ++i) {
                        const auto at = static_cast<std::ptrdiff_t>(i);
                        const auto left = first + i == 0 ? 0 : in[at - 1];
                        const auto right = first + i + 1 == n ? 0 : in[at + 1];
                        own[i] = (left + 2 * in[at] + right) % 10'007;
                    }
                });
            }
            auto smoothed = expected;
            for (std::size_t i = 0; i < n; ++i)
                smoothed[i] =
                    ((i == 0 ? 0 : expected[i - 1]) + 2 * expected[i] + (i + 1 == n ? 0 : expected[i + 1])) % 10'007;
            expected = std::move(smoothed);
        }
        std::vector<std::int32_t> result(n);
        now.gather(result.data(), std::span{m.streams});
        m.wait();
        REQUIRE(result == expected);
    }
}

TEST_CASE("a buffer that one device has no room for takes nothing on the others", "[partition][buffer]") {
    machine m(3);
    void* full = m.memories[2]->allocate(std::size_t{15} << 20, 256);
    CHECK_THROWS_AS(buffer<contiguous_partition>(contiguous_partition{3 << 20, 3}, m.memories), std::bad_alloc);
    CHECK(m.used() == 15_MiB);
    m.memories[2]->deallocate(full, std::size_t{15} << 20, 256);

    support::fault_resource good, bad;
    const std::array<support::fault_resource*, 3> mixed{&good, &good, &bad};
    using over_faults = gpushare::multi_buffer<int, contiguous_partition, support::fault_resource>;
    bad.fail_next([] { throw std::runtime_error("device lost"); });
    CHECK_THROWS_AS(over_faults(contiguous_partition{99, 3}, mixed), std::runtime_error);
    bad.null_next();
    CHECK_THROWS_AS(over_faults(contiguous_partition{99, 3}, mixed), std::bad_alloc);
    CHECK(good.blocks() == 0);
    {
        over_faults one{contiguous_partition{99, 3}, mixed};
        over_faults other = std::move(one);
        CHECK(good.blocks() + bad.blocks() == 3);
        other = over_faults{contiguous_partition{6, 3}, mixed};
        CHECK(good.bytes() + bad.bytes() == 6 * sizeof(int));
    }
    CHECK(good.blocks() + bad.blocks() == 0);
    CHECK(good.wrong_frees() + bad.wrong_frees() == 0);
}

TEST_CASE("a buffer is refused for sizes that can't be and for the wrong number of devices", "[partition][buffer]") {
    machine m(2);
    constexpr auto most = std::numeric_limits<std::uint64_t>::max();
    const auto code = [&](const contiguous_partition& shape, std::uint64_t halo) {
        try {
            (void)buffer<contiguous_partition>(shape, m.memories, halo);
        } catch (const gpushare::error& e) {
            return e.code();
        }
        return errc::none;
    };
    CHECK(code(contiguous_partition{most, 2}, 0) == errc::size_overflow);
    CHECK(code(contiguous_partition{8, 2}, most) == errc::size_overflow);
    CHECK(code(contiguous_partition{8, 2}, most / 8) == errc::size_overflow);
    CHECK(code(contiguous_partition{8, 3}, 0) == errc::invalid_specification);
    CHECK(code(contiguous_partition{0, 2}, most) == errc::none);  // no rank has anything to put a halo to

    const buffer<contiguous_partition> b{contiguous_partition{8, 2}, m.memories};
    const auto from = numbered(8);
    CHECK_THROWS_AS(b.scatter(from.data(), std::span{m.streams}.first(1)), gpushare::operation_error);
    CHECK_THROWS_AS(b.exchange_halo(std::span{m.streams}.first(1)), gpushare::operation_error);
    CHECK(m.used() > 0_B);
}

}  // namespace multi_buffer_test
