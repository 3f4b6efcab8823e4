// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Vectors and algorithms of Thrust on tenants' memory, executed by Thrust's CPP system, which g++
// compiles. tests/device has the same code compiled by nvcc for devices.
#define THRUST_DEVICE_SYSTEM THRUST_DEVICE_SYSTEM_CPP
#include <gpushare/interop/thrust.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include <thrust/device_vector.h>
#include <thrust/execution_policy.h>
#include <thrust/host_vector.h>
#include <thrust/reduce.h>
#include <thrust/sort.h>

#include <gpushare/interop/stream_resource.hpp>

#include "interop/two_tenants.hpp"
#include "support/fault_resource.hpp"
#include "support/random.hpp"

namespace {

constexpr std::size_t MiB = two_tenants::MiB;

using memory = two_tenants::memory;
template <class T>
using allocator = gpushare::thrust_allocator<T, memory>;
template <class T>
using vector = thrust::device_vector<T, allocator<T>>;

/// Host memory of which a tenant's part isn't shared with another's, and counts.
using counted = support::fault_resource;

struct fixture : two_tenants {
    allocator<int> mine{chat.memory()}, theirs{batch.memory()};
    std::uint64_t chat_has() { return charged(chat.memory()); }
    std::uint64_t batch_has() { return charged(batch.memory()); }
};

}  // namespace

TEST_CASE("a device_vector is charged to its tenant and refused over its quota", "[interop][thrust]") {
    fixture f;
    {
        vector<int> v(MiB, 7, f.mine);
        CHECK(f.chat_has() == 4 * MiB);
        CHECK(f.batch_has() == 0);
        CHECK(thrust::reduce(v.begin(), v.end(), std::int64_t{0}) == 7 * std::int64_t{MiB});
        CHECK_THROWS_AS(v.resize(2 * MiB), std::bad_alloc);
        CHECK(v.size() == MiB);
        CHECK(f.chat_has() == 4 * MiB);
        try {
            const vector<double> w(MiB, allocator<double>(f.mine));
            FAIL("allocated");
        } catch (const gpushare::memory_error& e) {
            CHECK(e.tenant() == "chat");
            CHECK(e.figures().left == 4 * MiB);
        }
        const vector<int> none(f.mine);
        CHECK(none.empty());
        CHECK_THROWS_AS(v.push_back(1), std::bad_alloc);  // would need twice as much, for a moment thrice
        CHECK(v.data().get()[MiB - 1] == 7);
    }
    CHECK(f.chat_has() == 0);
    CHECK(f.wrong_frees().empty());
}

TEST_CASE("vectors of two tenants that are swapped, moved or copied leave no tenant charged for the other's memory",
          "[interop][thrust]") {
    fixture f;
    {
        vector<int> a(MiB / 4, 1, f.mine), b(MiB / 2, 2, f.theirs);
        const auto balanced = [&] { return f.chat_has() == MiB && f.batch_has() == 2 * MiB; };
        CHECK(balanced());

        a.swap(b);
        CHECK(a.size() == MiB / 2);
        CHECK(a.data().get()[0] == 2);
        CHECK(a.get_allocator() == f.theirs);
        CHECK(b.get_allocator() == f.mine);
        CHECK(balanced());
        using std::swap;
        swap(a, b);
        CHECK(a.get_allocator() == f.mine);
        CHECK(balanced());

        vector<int> moved(std::move(a));
        CHECK(moved.get_allocator() == f.mine);
        CHECK(balanced());
        a = vector<int>(MiB / 4, 3, f.theirs);  // what a had is chat's, and back
        CHECK(a.get_allocator() == f.theirs);
        CHECK(f.chat_has() == MiB);
        CHECK(f.batch_has() == 3 * MiB);

        moved = a;  // copies keep their own tenant
        CHECK(moved.get_allocator() == f.mine);
        CHECK(moved.data().get()[0] == 3);
        CHECK(f.chat_has() == MiB);
        const vector<int> copy(a);
        CHECK(copy.get_allocator() == f.theirs);
        CHECK(f.batch_has() == 4 * MiB);
        b = std::move(moved);
        CHECK(b.get_allocator() == f.mine);
        CHECK(f.chat_has() == MiB);
        CHECK(f.batch_has() == 2 * MiB);
    }
    CHECK(f.chat_has() == 0);
    CHECK(f.batch_has() == 0);
    CHECK(f.wrong_frees().empty());
}

TEST_CASE("any sequence of swaps, moves, copies and resizes gives each block back to its resource",
          "[interop][thrust]") {
    const auto seed = support::seed(3);
    CAPTURE(seed);
    support::random any{seed};
    counted chat, batch;
    using alloc = gpushare::thrust_allocator<int, counted>;
    {
        std::vector<thrust::device_vector<int, alloc>> all;
        for (int i = 0; i < 6; ++i) all.emplace_back(any.below(100), i, alloc(i % 2 == 0 ? chat : batch));
        for (int i = 0; i < 3'000; ++i) {
            auto &x = any.of(all), &y = any.of(all);
            switch (any.below(6)) {
                case 0: x.swap(y); break;
                case 1: x = y; break;
                case 2:
                    if (&x != &y) x = std::move(y);
                    break;
                case 3: x.resize(any.below(300)); break;
                case 4: x.shrink_to_fit(); break;
                default: x = thrust::device_vector<int, alloc>(any.below(50), 1, alloc(any.one_in(2) ? chat : batch));
            }
        }
        std::size_t of_chat = 0, of_batch = 0;
        for (const auto& v : all)
            (&v.get_allocator().resource() == &chat ? of_chat : of_batch) += v.capacity() * sizeof(int);
        CHECK(chat.bytes() == of_chat);
        CHECK(batch.bytes() == of_batch);
    }
    CHECK(chat.blocks() + batch.blocks() == 0);
    CHECK(chat.wrong_frees() + batch.wrong_frees() == 0);
}

TEST_CASE("temporary storage of Thrust's algorithms is the tenant's", "[interop][thrust]") {
    fixture f;
    const auto seed = support::seed(4);
    CAPTURE(seed);
    support::random any{seed};
    thrust::host_vector<int> values(20'000);
    for (int& x : values) x = static_cast<int>(any.below(1'000'000));
    counted temporary;
    const gpushare::thrust_allocator<char, counted> mine(temporary);
    vector<int> v(values.size(), f.mine);
    thrust::copy(values.begin(), values.end(), v.begin());
    thrust::stable_sort(thrust::cpp::par(mine), v.begin(), v.end(), thrust::greater<int>());
    CHECK(temporary.calls() > 0);
    CHECK(temporary.blocks() == 0);
    CHECK(temporary.wrong_frees() == 0);
    std::sort(values.begin(), values.end(), std::greater<>());
    CHECK(std::equal(values.begin(), values.end(), v.data().get()));

    temporary.fail_next();
    CHECK_THROWS_AS(thrust::stable_sort(thrust::cpp::par(mine), v.begin(), v.end()), std::bad_alloc);
    CHECK(temporary.blocks() == 0);
}

TEST_CASE("Thrust's frees are in the order of the stream whose resource it has", "[interop][thrust]") {
    fixture f;
    gpushare::stream_resource ordered{f.chat.memory(), f.stream};
    using alloc = gpushare::thrust_allocator<float, decltype(ordered)>;
    {
        const thrust::device_vector<float, alloc> v(MiB, alloc(ordered));
        f.hold();
    }
    CHECK(f.chat_has() == 4 * MiB);
    f.let_go();
    CHECK(f.chat_has() == 0);
}

TEST_CASE("Thrust's allocator tells tenants apart and refuses what no memory has", "[interop][thrust]") {
    fixture f;
    using traits = std::allocator_traits<allocator<int>>;
    static_assert(std::is_same_v<traits::rebind_alloc<char>, allocator<char>>);
    static_assert(!traits::is_always_equal::value);
    CHECK(f.mine != f.theirs);
    CHECK(f.mine == allocator<int>(f.chat.memory()));
    CHECK(f.mine == allocator<double>(f.mine));
    for (const std::size_t n :
         {std::numeric_limits<std::size_t>::max(), std::numeric_limits<std::size_t>::max() / 4 + 1, f.mine.max_size()})
        CHECK_THROWS_AS(f.mine.allocate(n), gpushare::memory_error);
    struct alignas(1024) wide {
        char c[1024];
    };
    allocator<wide> of_wide(f.mine);
    const auto p = of_wide.allocate(2);
    CHECK(reinterpret_cast<std::uintptr_t>(p.get()) % 1024 == 0);
    of_wide.deallocate(p, 1);  // freed as it was allocated, and told
    CHECK(f.chat_has() == 0);
    of_wide.deallocate(p, 2);
    of_wide.deallocate(allocator<wide>::pointer(nullptr), 2);
    CHECK(f.wrong_frees() == std::vector{gpushare::errc::wrong_size, gpushare::errc::unknown_block});
    CHECK(f.chat_has() == 0);
}
