// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// PyTorch's pluggable allocator, as PyTorch uses it: two functions found by name in a shared
// object, which know each other's blocks only through their arguments.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <dlfcn.h>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/interop/pytorch.hpp>

#include "interop/pytorch/plugin.hpp"
#include "interop/two_tenants.hpp"
#include "support/random.hpp"
#include "support/threads.hpp"

using gpushare::errc;

namespace {

constexpr ssize_t MiB = ssize_t{1} << 20;

/// The shared object, loaded, with a server running in it.
class plugin {
public:
    plugin() : loaded_(dlopen(GPUSHARE_PYTORCH_PLUGIN, RTLD_NOW | RTLD_LOCAL)) {
        if (loaded_ == nullptr) throw std::runtime_error(dlerror());
        find("start", start_);
        find("stop", stop_);
        find("chat_malloc", chat_malloc);
        find("chat_try_malloc", chat_try_malloc);
        find("chat_free", chat_free);
        find("chat_record_stream", chat_record_stream);
        find("batch_malloc", batch_malloc);
        find("batch_free", batch_free);
        find("make_stream", make_stream);
        find("destroy_stream", destroy_stream);
        find("occupy", occupy);
        find("synchronize", synchronize);
        find("chat_charged", chat_charged);
        find("batch_charged", batch_charged);
        find("batch_used", batch_used);
        find("wrong_frees", wrong_frees);
        find("unfreed", unfreed);
        start_();
    }
    plugin(const plugin&) = delete;
    plugin& operator=(const plugin&) = delete;
    ~plugin() {
        stop_();
        dlclose(loaded_);
    }

    decltype(&::chat_malloc) chat_malloc = nullptr, chat_try_malloc = nullptr, batch_malloc = nullptr;
    decltype(&::chat_free) chat_free = nullptr, batch_free = nullptr;
    decltype(&::chat_record_stream) chat_record_stream = nullptr;
    decltype(&::make_stream) make_stream = nullptr;
    decltype(&::destroy_stream) destroy_stream = nullptr;
    decltype(&::occupy) occupy = nullptr;
    decltype(&::synchronize) synchronize = nullptr;
    decltype(&::chat_charged) chat_charged = nullptr, batch_charged = nullptr, batch_used = nullptr;
    decltype(&::wrong_frees) wrong_frees = nullptr;
    decltype(&::unfreed) unfreed = nullptr;

private:
    template <class Function>
    void find(const char* name, Function& f) {
        f = reinterpret_cast<Function>(dlsym(loaded_, name));
        if (f == nullptr) throw std::runtime_error(name);
    }

    void* loaded_;
    decltype(&::start) start_ = nullptr, stop_ = nullptr;
};

}  // namespace

TEST_CASE("PyTorch's blocks are charged to their tenant, on the device that PyTorch means", "[interop][pytorch]") {
    plugin torch;
    native_stream* const s = torch.make_stream(0);
    void* const p = torch.chat_malloc(3 * MiB, 0, s);
    void* const q = torch.batch_malloc(2 * MiB, 1, nullptr);
    CHECK(torch.chat_charged(0) == 3 * MiB);
    CHECK(torch.chat_charged(1) == 0);
    CHECK(torch.batch_charged(0) == 0);
    CHECK(torch.batch_charged(1) == 2 * MiB);
    CHECK(torch.batch_used(1) == 2 * MiB);
    void* const a = torch.chat_malloc(0, 0, s);
    void* const b = torch.chat_malloc(0, 0, s);
    CHECK(a != nullptr);
    CHECK(a != b);
    torch.chat_free(a, 0, 0, s);
    torch.chat_free(b, 0, 0, s);
    torch.chat_free(p, 3 * MiB, 0, s);
    torch.batch_free(q, 2 * MiB, 1, nullptr);
    CHECK(torch.chat_charged(0) == 0);
    CHECK(torch.batch_used(1) == 0);
    CHECK(torch.batch_charged(1) == 2 * MiB);  // a pool keeps it
    CHECK(torch.wrong_frees() == 0);
    torch.destroy_stream(s);
}

TEST_CASE("PyTorch, which doesn't check for null, gets an exception if memory runs out", "[interop][pytorch]") {
    plugin torch;
    void* const p = torch.chat_malloc(6 * MiB, 1, nullptr);
    try {
        (void)torch.chat_malloc(3 * MiB, 1, nullptr);
        FAIL("allocated");
    } catch (const std::bad_alloc& e) {  // across the C functions and the boundary of the shared object
        CHECK(std::string(e.what()) ==
              "tenant 'chat': allocate: asked for 3 MiB, 2 MiB of 8 MiB left (over the quota)");
        const auto* const why = dynamic_cast<const gpushare::error*>(&e);
        REQUIRE(why != nullptr);
        CHECK(why->code() == errc::over_quota);
        CHECK(why->tenant() == "chat");
        CHECK(why->figures().left == 2 * MiB);
    }
    for (const ssize_t size : {ssize_t{-1}, std::numeric_limits<ssize_t>::min(), std::numeric_limits<ssize_t>::max()})
        CHECK_THROWS_AS(torch.chat_malloc(size, 1, nullptr), std::bad_alloc);
    for (const int device : {-1, 2, 1000}) {
        try {
            (void)torch.chat_malloc(1, device, nullptr);
            FAIL("allocated");
        } catch (const gpushare::operation_error& e) {
            CHECK(e.code() == errc::no_device);
        }
    }
    CHECK(torch.chat_charged(1) == 6 * MiB);
    torch.chat_free(p, 6 * MiB, 1, nullptr);
    CHECK(torch.chat_charged(1) == 0);
}

TEST_CASE("a MemPool gets null if memory runs out: its allocator frees its cache and asks again",
          "[interop][pytorch]") {
    plugin torch;
    void* const cached = torch.chat_try_malloc(6 * MiB, 1, nullptr);
    REQUIRE(cached != nullptr);
    void* p = torch.chat_try_malloc(3 * MiB, 1, nullptr);
    CHECK(p == nullptr);
    torch.chat_free(cached, 6 * MiB, 1, nullptr);  // as PyTorch's caching allocator does on null, and on nothing else
    p = torch.chat_try_malloc(3 * MiB, 1, nullptr);
    CHECK(p != nullptr);
    for (const ssize_t size : {ssize_t{-1}, std::numeric_limits<ssize_t>::min(), std::numeric_limits<ssize_t>::max()})
        CHECK(torch.chat_try_malloc(size, 1, nullptr) == nullptr);
    for (const int device : {-1, 2, 1000}) CHECK(torch.chat_try_malloc(1, device, nullptr) == nullptr);
    CHECK(torch.chat_charged(1) == 3 * MiB);
    torch.chat_free(p, 3 * MiB, 1, nullptr);
    CHECK(torch.chat_charged(1) == 0);
}

TEST_CASE("PyTorch's frees are in the order of the stream that they name", "[interop][pytorch]") {
    plugin torch;
    native_stream *const own = torch.make_stream(0), *const other = torch.make_stream(0);
    void* const p = torch.chat_malloc(6 * MiB, 0, own);
    SECTION("which is the one it was allocated on, as a rule") {
        gate held;
        torch.occupy(own, &held);
        torch.chat_free(p, 6 * MiB, 0, own);
        CHECK(torch.chat_charged(0) == 6 * MiB);
        CHECK_THROWS_AS(torch.chat_malloc(3 * MiB, 0, other), std::bad_alloc);
        held.open();
        torch.synchronize(own);
    }
    SECTION("with a pool in between as well") {
        void* const q = torch.batch_malloc(6 * MiB, 0, own);
        gate held;
        torch.occupy(own, &held);
        torch.batch_free(q, 6 * MiB, 0, own);
        torch.chat_free(p, 6 * MiB, 0, own);
        try {
            (void)torch.batch_malloc(3 * MiB, 0, other);
            FAIL("allocated");
        } catch (const gpushare::memory_error& e) {
            CHECK(e.tenant() == "batch");
            CHECK(e.figures().asked >= 3 * MiB);
        }
        held.open();
        torch.synchronize(own);
        torch.batch_free(torch.batch_malloc(8 * MiB, 0, other), 8 * MiB, 0, other);
        CHECK(torch.batch_used(0) == 0);
    }
    SECTION("or another one") {
        gate held;
        torch.occupy(other, &held);
        torch.chat_free(p, 6 * MiB, 0, other);
        CHECK(torch.chat_charged(0) == 6 * MiB);
        held.open();
        torch.synchronize(other);
    }
    SECTION("also where others were recorded that are done") {
        gate held;
        torch.chat_record_stream(p, other);
        torch.occupy(own, &held);
        torch.chat_free(p, 6 * MiB, 0, own);
        torch.synchronize(other);
        CHECK(torch.chat_charged(0) == 6 * MiB);
        held.open();
        torch.synchronize(own);
        while (torch.chat_charged(0) != 0) std::this_thread::yield();
    }
    SECTION("and of those that were recorded for the block") {
        gate held;
        torch.chat_record_stream(p, other);
        torch.chat_record_stream(p, other);
        torch.chat_record_stream(p, own);
        torch.chat_record_stream(p, nullptr);
        torch.chat_record_stream(nullptr, other);
        torch.occupy(other, &held);
        torch.chat_free(p, 6 * MiB, 0, own);
        torch.synchronize(own);
        CHECK(torch.chat_charged(0) == 6 * MiB);
        held.open();
        torch.synchronize(other);
        while (torch.chat_charged(0) != 0) std::this_thread::yield();  // one hop later

        // The next block at the address has nothing to do with that.
        gate again;
        void* const q = torch.chat_malloc(6 * MiB, 0, own);
        torch.occupy(other, &again);
        torch.chat_free(q, 6 * MiB, 0, own);
        torch.synchronize(own);
        CHECK(torch.chat_charged(0) == 0);
        again.open();
        torch.synchronize(other);
    }
    CHECK(torch.chat_charged(0) == 0);
    CHECK(torch.wrong_frees() == 0);
    CHECK(torch.unfreed() == 0);
    torch.destroy_stream(own);
    torch.destroy_stream(other);
}

TEST_CASE("a free by PyTorch with another size frees the block, and is reported", "[interop][pytorch]") {
    plugin torch;
    for (int i = 0; i < 100; ++i) {
        void* const p = torch.chat_try_malloc(MiB + 512, 0, nullptr);
        REQUIRE(p != nullptr);
        torch.chat_free(p, i % 3 == 0 ? MiB : i % 3 == 1 ? 2 * MiB : -1, 0, nullptr);
    }
    CHECK(torch.chat_charged(0) == 0);
    CHECK(torch.wrong_frees() == 100);
    CHECK(torch.unfreed() == 0);
}

TEST_CASE("a wrong free by PyTorch changes nothing and is reported", "[interop][pytorch]") {
    plugin torch;
    int local = 0;
    void* const p = torch.chat_malloc(1000, 0, nullptr);
    torch.chat_free(nullptr, 1000, 0, nullptr);
    CHECK(torch.wrong_frees() == 0);
    torch.chat_free(&local, 1000, 0, nullptr);
    torch.chat_free(p, 1000, 1, nullptr);
    torch.batch_free(p, 1000, 0, nullptr);
    CHECK(torch.wrong_frees() == 3);
    CHECK(torch.unfreed() == 0);
    torch.chat_free(p, 1000, 7, nullptr);  // a device that nobody has
    CHECK(torch.unfreed() == 1);
    CHECK(torch.chat_charged(0) == 1024);
    torch.chat_free(p, 1000, 0, nullptr);
    torch.chat_free(p, 1000, 0, nullptr);
    CHECK(torch.wrong_frees() == 4);
    CHECK(torch.chat_charged(0) == 0);
}

TEST_CASE("PyTorch may call from several threads", "[interop][pytorch]") {
    plugin torch;
    support::together(3, [&](unsigned rank) {
        support::random any{support::seed(rank)};
        native_stream *const own = torch.make_stream(0), *const other = torch.make_stream(0);
        for (int i = 0; i < 300; ++i) {
            const auto size = static_cast<ssize_t>(1 + any.below(100'000));
            void* const p = torch.chat_malloc(size, 0, own);
            if (any.one_in(3)) torch.chat_record_stream(p, other);
            torch.chat_free(p, size, 0, own);
        }
        torch.synchronize(own);
        torch.synchronize(other);
        torch.destroy_stream(own);
        torch.destroy_stream(other);
    });
    while (torch.chat_charged(0) != 0) std::this_thread::yield();
    CHECK(torch.wrong_frees() == 0);
}

TEST_CASE("a device is added once for PyTorch", "[interop][pytorch]") {
    two_tenants f;
    gpushare::pytorch_allocator<two_tenants::memory, two_tenants::node_type> mine{f.node};
    mine.add(0, {0}, f.chat.memory());
    const auto why = [&](int ordinal, std::uint32_t device) {
        try {
            mine.add(ordinal, {device}, f.chat.memory());
        } catch (const gpushare::operation_error& e) {
            return e.code();
        }
        return errc::none;
    };
    CHECK(why(0, 1) == errc::duplicate_device);
    CHECK(why(1, 9) == errc::no_device);
    CHECK(why(1, 1) == errc::none);
}
