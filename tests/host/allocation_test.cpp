// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// Launching doesn't allocate once as much work was in flight as ever will be.
#include <gpushare/backend/host/host.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "support/catch.hpp"
#include "support/sanitizers.hpp"

#ifndef SUPPORT_SANITIZED

namespace {
std::atomic<std::size_t> allocations{0};
}

void* operator new(std::size_t size) {
    ++allocations;
    if (void* const p = std::malloc(size)) return p;
    throw std::bad_alloc{};
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return std::malloc(size); }
// Not inline: g++ 12 sees a pointer of operator new go to free() there.
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

TEST_CASE("a launch doesn't allocate in steady state", "[host]") {
    using namespace gpushare;
    using namespace std::chrono_literals;
    for (const auto t : {host::timing::real, host::timing::modelled}) {
        host::node node{{.sms = 2, .timing = t}};
        auto s = node.make_stream(device_id{0}), other = node.make_stream(device_id{0}, priority{1});
        std::atomic<int> ran{0};
        struct payload {
            std::atomic<int>* ran;
            std::byte rest[200];
            void operator()(host::kernel_context&) const { ++*ran; }
        };
        const auto burst = [&] {
            // Stalled, so that as much as possible is in flight.
            node.faults(device_id{0}).stall(s);
            host::point last;
            for (int i = 0; i < 100; ++i) {
                s.launch({.blocks = 3, .hold = 1us}, payload{&ran, {}});
                s.enqueue(1us);
                (void)s.launch_cooperative({.blocks = 2}, payload{&ran, {}});
                last = s.record();
                other.wait(last);
            }
            node.faults(device_id{0}).resume(s);
            return other.record().wait(never);
        };
        CHECK(burst());
        // Memory grows while more is in flight than ever before, which depends on how the threads
        // meet; it ends soon.
        int bursts = 1;
        std::size_t made = 1;
        bool done = true;
        for (; made != 0 && bursts < 20; bursts += 2) {
            const auto before = allocations.load();
            done = burst() && burst() && done;
            made = allocations.load() - before;
        }
        CHECK(done);
        CHECK(made == 0);
        CHECK(ran == bursts * 100 * 5);
    }
}

#endif
