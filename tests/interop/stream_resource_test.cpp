// SPDX-License-Identifier: Apache-2.0
// Tags: lock-free, alone
// std::pmr in both directions, resources in stream order, scratch memory, CUB's two phases (with
// algorithms of the test), and blocks that are freed by their address alone.
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory_resource>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/interop/pmr.hpp>
#include <gpushare/interop/stream_resource.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/memory/quota_resource.hpp>
#include <gpushare/memory/quota_wait.hpp>

#include "conformance/memory_resource_suite.hpp"
#include "interop/two_tenants.hpp"
#include "support/fault_resource.hpp"
#include "support/refusing_memory.hpp"
#include "support/waiting.hpp"

using namespace gpushare::literals;
using gpushare::errc;

namespace {

constexpr std::size_t most = std::numeric_limits<std::size_t>::max(), MiB = two_tenants::MiB;

using memory = two_tenants::memory;
using stream = two_tenants::node_type::stream;
using ordered_memory = gpushare::stream_resource<memory, stream>;

static_assert(gpushare::memory_resource<gpushare::pmr_adaptor<memory>>);
static_assert(gpushare::memory_resource<ordered_memory>);
static_assert(!gpushare::stream_ordered_memory<support::fault_resource, stream::point>);

/// As an algorithm of CUB: asks for `needs` bytes, then notes what it got.
struct algorithm {
    std::size_t needs;
    int asked = 7, ran = 7;  // statuses to return; 0 is success
    std::vector<std::pair<void*, std::size_t>> calls{};

    int operator()(void* temporary, std::size_t& size) {
        calls.emplace_back(temporary, size);
        if (temporary != nullptr) return ran;
        size = needs;
        return asked;
    }
};

}  // namespace

// ---- std::pmr

TEST_CASE("a quota behind std::pmr keeps the contract of every resource", "[interop][pmr]") {
    two_tenants f;
    gpushare::pmr_adaptor adapted{f.chat.memory()};
    conformance::check_memory_resource(adapted);
    CHECK(f.charged(f.chat.memory()) == 0);
}

TEST_CASE("containers of std::pmr are charged to their tenant and refused over its quota", "[interop][pmr]") {
    two_tenants f;
    gpushare::pmr_adaptor chat{f.chat.memory()}, batch{f.batch.memory()};
    std::pmr::vector<std::byte> v(4 * MiB, &chat), w(&batch);
    CHECK(f.charged(f.chat.memory()) == 4 * MiB);
    w = v;  // keeps its own tenant
    CHECK(f.charged(f.batch.memory()) == 4 * MiB);
    w = std::move(v);  // as well: the resources aren't equal
    CHECK(f.charged(f.chat.memory()) == 4 * MiB);
    CHECK(w.get_allocator().resource() == &batch);
    CHECK_THROWS_AS(w.resize(9 * MiB), std::bad_alloc);
    CHECK(w.size() == 4 * MiB);
    try {
        (void)chat.allocate(5 * MiB);
        FAIL("allocated");
    } catch (const gpushare::memory_error& e) {
        CHECK(e.tenant() == "chat");
        CHECK(e.code() == errc::over_quota);
        CHECK(e.figures().left == 4 * MiB);
    }
    const volatile std::size_t no_memory_has = most, no_power_of_two = 3;  // that the compiler doesn't see them
    CHECK_THROWS_AS(chat.allocate(no_memory_has), std::bad_alloc);
    CHECK_THROWS_AS(chat.allocate(8, no_power_of_two), std::bad_alloc);
}

TEST_CASE("resources of std::pmr are equal if and only if one can free the other's blocks", "[interop][pmr]") {
    two_tenants f;
    const gpushare::pmr_adaptor chat{f.chat.memory()}, same{f.chat.memory()}, batch{f.batch.memory()};
    CHECK(chat == same);
    CHECK(chat != batch);
    CHECK(chat != *std::pmr::new_delete_resource());
    CHECK(*std::pmr::new_delete_resource() != chat);

    // Copies of a quota_resource are equal, so what refers to them is; a resource of another type
    // never is.
    gpushare::quota limit{1_MiB}, other_limit{1_MiB};
    gpushare::quota_resource a{limit, *std::pmr::new_delete_resource()}, b = a;
    gpushare::quota_resource c{other_limit, *std::pmr::new_delete_resource()};
    CHECK(gpushare::pmr_adaptor{a} == gpushare::pmr_adaptor{b});
    CHECK(gpushare::pmr_adaptor{a} != gpushare::pmr_adaptor{c});
    CHECK(gpushare::pmr_adaptor{a} != chat);
}

TEST_CASE("a free through std::pmr with another size frees the block, and is reported", "[interop][pmr]") {
    two_tenants f;
    gpushare::pmr_adaptor chat{f.chat.memory()}, batch{f.batch.memory()};
    void* const p = chat.allocate(1000, 64);
    batch.deallocate(p, 1000, 64);
    CHECK(f.charged(f.chat.memory()) == 1024);  // another tenant's block isn't touched
    chat.deallocate(p, 1001, 64);
    CHECK(f.charged(f.chat.memory()) == 0);
    chat.deallocate(p, 1000, 64);
    CHECK(f.wrong_frees() == std::vector{errc::unknown_block, errc::wrong_size, errc::unknown_block});
    CHECK(f.charged(f.chat.memory()) == 0);
}

TEST_CASE("a quota and a pool can be built directly on a std::pmr resource", "[interop][pmr]") {
    gpushare::quota limit{1_MiB};
    std::array<std::byte, 4096> buffer{};
    std::pmr::monotonic_buffer_resource small(buffer.data(), buffer.size(), std::pmr::null_memory_resource());
    gpushare::quota_resource limited{limit, static_cast<std::pmr::memory_resource&>(small), "chat"};
    void* const p = limited.allocate(1000, 8);
    CHECK(limit.usage().current == 1000_B);
    CHECK_THROWS_AS(limited.allocate(MiB, 8), gpushare::memory_error);  // the quota's
    CHECK_THROWS_AS(limited.allocate(8000, 8), std::bad_alloc);         // the buffer's, and uncharged
    CHECK(limit.usage().current == 1000_B);
    CHECK(limited.deallocate(p, 1000, 8) == errc::none);

    gpushare::pool_resource pool{*std::pmr::new_delete_resource(), {.segment = 1_MiB}};
    gpushare::pmr_adaptor adapted{pool};  // and back
    conformance::check_memory_resource(adapted);
}

// ---- stream order

TEST_CASE("a resource in stream order keeps the contract of every resource", "[interop][stream]") {
    two_tenants f;
    ordered_memory ordered{f.chat.memory(), f.stream};
    conformance::check_memory_resource(ordered);
    CHECK(f.charged(f.chat.memory()) == 0);
}

TEST_CASE("a block that is freed in stream order is credited once the stream reaches the free", "[interop][stream]") {
    two_tenants f;
    ordered_memory ordered{f.chat.memory(), f.stream};
    void* const p = ordered.allocate(6 * MiB);
    f.hold();
    CHECK(ordered.deallocate(p, 6 * MiB) == errc::none);
    CHECK(f.charged(f.chat.memory()) == 6 * MiB);
    CHECK(ordered.try_allocate(3 * MiB) == nullptr);
    CHECK_THROWS_AS(ordered.allocate(3 * MiB), gpushare::memory_error);
    f.let_go();
    void* const q = ordered.try_allocate(8 * MiB);
    REQUIRE(q != nullptr);
    CHECK(ordered.deallocate(q, 8 * MiB) == errc::none);
}

TEST_CASE("a pool frees in stream order as well", "[interop][stream]") {
    two_tenants f;
    using pool_of_tenant = gpushare::pool_resource<memory, stream::point>;
    static_assert(gpushare::stream_ordered_memory<pool_of_tenant, stream::point>);
    pool_of_tenant pool{f.chat.memory(), {.segment = 1_MiB}};
    gpushare::stream_resource ordered{pool, f.stream};
    conformance::check_memory_resource(ordered);

    void* const p = ordered.allocate(6 * MiB);
    f.hold();
    CHECK(ordered.deallocate(p, 6 * MiB) == errc::none);
    CHECK(ordered.try_allocate(6 * MiB) == nullptr);
    CHECK(ordered.deallocate(p, 6 * MiB) == errc::unknown_block);
    const gpushare::patience now{gpushare::host::steady_clock{}, gpushare::instant::min()};
    gpushare::failure why;
    CHECK(ordered.try_allocate(6 * MiB, 256, now, &why) == nullptr);
    CHECK(why.code == errc::deadline_exceeded);
    f.let_go();
    void* const waited = ordered.allocate(6 * MiB, 256, support::forever());
    CHECK(ordered.deallocate(waited, 6 * MiB) == errc::none);
    gpushare::sizeless_memory blocks{pool};
    void* const q = blocks.try_allocate(6 * MiB, 256);
    REQUIRE(q != nullptr);
    CHECK(blocks.deallocate_after(f.stream.record(), q) == errc::none);
    CHECK(blocks.deallocate_after(f.stream.record(), q) == errc::unknown_block);
}

TEST_CASE("wrong frees in stream order are told apart and change nothing", "[interop][stream]") {
    two_tenants f;
    ordered_memory ordered{f.chat.memory(), f.stream}, others{f.batch.memory(), f.stream};
    void* const p = ordered.allocate(1000);
    CHECK(others.deallocate(p, 1000) == errc::unknown_block);
    CHECK(ordered.deallocate(p, 999) == errc::wrong_size);
    CHECK(ordered.deallocate(p, 1000, 512) == errc::wrong_size);
    CHECK(ordered.deallocate(nullptr, 1000) == errc::none);
    CHECK(f.charged(f.chat.memory()) == 1024);
    CHECK(ordered.deallocate(p, 1000) == errc::none);
    CHECK(ordered.deallocate(p, 1000) == errc::unknown_block);
    CHECK(ordered != others);
    CHECK(ordered == ordered_memory{f.chat.memory(), f.stream});
}

// ---- scratch memory and CUB

TEST_CASE("scratch memory is as large as needed, and exists for as long as it is used", "[interop][scratch]") {
    two_tenants f;
    ordered_memory ordered{f.chat.memory(), f.stream};
    {
        gpushare::scratch_memory none{ordered};
        CHECK(none.data() == nullptr);
        gpushare::scratch_memory scratch{ordered, 2 * MiB};
        CHECK(reinterpret_cast<std::uintptr_t>(scratch.data()) % 256 == 0);
        void* const before = scratch.data();
        CHECK(scratch.at_least(MiB) == before);
        CHECK(scratch.at_least(2 * MiB) == before);
        CHECK(f.charged(f.chat.memory()) == 2 * MiB);

        CHECK_THROWS_AS(scratch.at_least(7 * MiB), gpushare::memory_error);
        CHECK_THROWS_AS(scratch.at_least(most), gpushare::memory_error);
        CHECK(scratch.data() == before);
        CHECK(scratch.size() == 2 * MiB);

        CHECK(scratch.at_least(3 * MiB) != nullptr);
        CHECK(f.charged(f.chat.memory()) == 3 * MiB);
        none = std::move(scratch);
        CHECK(none.size() == 3 * MiB);
        gpushare::scratch_memory moved{std::move(none)};
        CHECK(none.data() == nullptr);  // NOLINT(bugprone-use-after-move)
        CHECK(f.charged(f.chat.memory()) == 3 * MiB);
    }
    CHECK(f.charged(f.chat.memory()) == 0);
    CHECK(f.wrong_frees().empty());
    CHECK_THROWS_AS(gpushare::scratch_memory(ordered, MiB, 3), gpushare::memory_error);
}

TEST_CASE("the temporary storage of an algorithm in two phases stays until the stream is done with the storage",
          "[interop][cub]") {
    two_tenants f;
    algorithm a{.needs = 5 * MiB, .asked = 0, .ran = 3};
    f.hold();
    CHECK(gpushare::with_temporary_storage(f.chat.memory(), f.stream, a) == 3);
    REQUIRE(a.calls.size() == 2);
    CHECK(a.calls[0].first == nullptr);
    CHECK(a.calls[1].first != nullptr);
    CHECK(a.calls[1].second == 5 * MiB);
    CHECK(f.chat.memory().pending() == 5_MiB);

    algorithm too_big{.needs = 4 * MiB, .asked = 0};
    CHECK_THROWS_AS(gpushare::with_temporary_storage(f.chat.memory(), f.stream, too_big), gpushare::memory_error);
    CHECK(too_big.calls.size() == 1);
    f.let_go();
    CHECK(f.charged(f.chat.memory()) == 0);
    too_big.ran = 0;
    CHECK(gpushare::with_temporary_storage(f.chat.memory(), f.stream, too_big) == 0);
}

TEST_CASE("an algorithm that can't say how much it needs isn't run, and one that needs nothing isn't asked again",
          "[interop][cub]") {
    support::fault_resource upstream;
    algorithm fails{.needs = 100};
    CHECK(gpushare::with_temporary_storage(upstream, fails) == 7);
    CHECK(fails.calls.size() == 1);
    CHECK(upstream.calls() == 0);

    algorithm frugal{.needs = 0, .asked = 0, .ran = 0};
    CHECK(gpushare::with_temporary_storage(upstream, frugal) == 0);
    REQUIRE(frugal.calls.size() == 2);
    CHECK(frugal.calls[1].first != nullptr);
    CHECK(upstream.blocks() == 0);

    const auto throws = [](void* temporary, std::size_t& size) {
        size = 10;
        if (temporary != nullptr) throw std::runtime_error("no launch");
        return 0;
    };
    CHECK_THROWS_AS(gpushare::with_temporary_storage(upstream, throws), std::runtime_error);
    CHECK(upstream.blocks() == 0);
    CHECK(upstream.wrong_frees() == 0);
}

// ---- frees without a size

TEST_CASE("blocks are freed by their address, once, in the resource that they came from", "[interop][sizeless]") {
    two_tenants f{gpushare::memory_stack::direct};
    gpushare::sizeless_memory blocks{f.chat.memory()}, others{f.batch.memory()};
    void* const p = blocks.try_allocate(1000, 256);
    void* const q = blocks.try_allocate(0, 1);
    REQUIRE(p != nullptr);
    REQUIRE(q != nullptr);
    CHECK(q != p);
    CHECK(blocks.holds(p, 1000, 128));
    CHECK_FALSE(blocks.holds(p, 1001, 128));
    CHECK_FALSE(blocks.holds(p, 1000, 512));
    CHECK(others.deallocate(p) == errc::unknown_block);
    CHECK(blocks.deallocate(static_cast<std::byte*>(p) + 1) == errc::unknown_block);
    CHECK(blocks.deallocate(&f) == errc::unknown_block);
    CHECK(blocks.deallocate(nullptr) == errc::none);
    CHECK(f.charged(f.chat.memory()) == 1536);

    f.hold();
    CHECK(blocks.deallocate_after(f.stream.record(), p) == errc::none);
    CHECK(blocks.deallocate_after(f.stream.record(), p) == errc::unknown_block);
    CHECK(blocks.deallocate(p) == errc::unknown_block);
    CHECK(f.charged(f.chat.memory()) == 1536);
    f.let_go();
    CHECK(blocks.deallocate(q) == errc::none);
    CHECK(f.charged(f.chat.memory()) == 0);
    for (const std::size_t size : {9 * MiB, most, most - 255}) CHECK(blocks.try_allocate(size, 256) == nullptr);
    for (const std::size_t alignment : {std::size_t{0}, std::size_t{3}, most})
        CHECK(blocks.try_allocate(1, alignment) == nullptr);
    CHECK(f.wrong_frees().empty());
}

TEST_CASE("a block that the memory doesn't take back now can be freed later", "[interop][sizeless]") {
    support::refusing_memory upstream;
    gpushare::sizeless_memory blocks{upstream};
    void* const p = blocks.allocate(100, 64);
    upstream.refuse(errc::capturing);
    CHECK(blocks.deallocate(p) == errc::capturing);
    CHECK(blocks.holds(p, 100, 64));
    upstream.refuse(errc::none);
    CHECK(blocks.deallocate(p) == errc::none);
    CHECK_FALSE(blocks.holds(p, 100, 64));
    CHECK(upstream.blocks() == 0);
    void* const q = blocks.allocate(100, 64);
    upstream.refuse(errc::closed);  // for good
    CHECK(blocks.deallocate(q) == errc::closed);
    CHECK(blocks.deallocate(q) == errc::unknown_block);
    upstream.refuse(errc::none);
    CHECK(upstream.deallocate(q, 100, 64) == errc::none);
}

TEST_CASE("an upstream that throws gives no memory, and a busy one stays exact", "[interop][sizeless]") {
    support::fault_resource upstream;
    gpushare::sizeless_memory blocks{upstream};
    upstream.fail_next([] { throw std::runtime_error("device lost"); });
    CHECK(blocks.try_allocate(100, 8) == nullptr);
    upstream.null_next();
    CHECK(blocks.try_allocate(100, 8) == nullptr);
    upstream.fail_next([] { throw std::runtime_error("device lost"); });
    CHECK_THROWS_AS(blocks.allocate(100, 8), std::runtime_error);
    upstream.null_next();
    CHECK_THROWS_AS(blocks.allocate(100, 8), std::bad_alloc);
    CHECK(blocks.deallocate(blocks.allocate(100, 8)) == errc::none);

    support::together(3, [&](unsigned rank) {
        support::random any{support::seed(rank)};
        std::vector<void*> mine;
        for (int i = 0; i < 2'000; ++i) {
            if (mine.empty() || any.one_in(2)) {
                mine.push_back(blocks.try_allocate(1 + any.below(500), std::size_t{8} << any.below(4)));
            } else {
                std::swap(any.of(mine), mine.back());
                (void)blocks.deallocate(mine.back());
                mine.pop_back();
            }
        }
        for (void* p : mine) (void)blocks.deallocate(p);
    });
    CHECK(upstream.blocks() == 0);
    CHECK(upstream.wrong_frees() == 0);
}
