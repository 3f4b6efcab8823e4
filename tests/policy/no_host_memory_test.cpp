// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Policies on a host that runs out of memory: only `add` and `change` allocate, and a failure there
// changes nothing.
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "policy/every_policy.hpp"
#include "support/catch.hpp"
#include "support/failing_new.hpp"
#include "support/random.hpp"

namespace no_host_memory_test {

namespace {

using namespace std::chrono_literals;
using gpushare::client_id;
using gpushare::errc;
using gpushare::failure;
using gpushare::ns;

/// Calls `call` until it succeeds: without the first allocation, without the second, and so on.
template <class F>
failure after_each_failure(F call) {
    for (std::size_t n = 0;; ++n) {
        support::this_heap = {.good = n};
        try {
            const failure why = call();
            support::this_heap = {};
            return why;
        } catch (const std::bad_alloc&) {
            support::this_heap = {};
        }
    }
}

/// The result of a call that must not allocate.
template <class F>
auto without_memory(F call) {
    const auto before = support::this_heap.allocations;
    const auto answer = call();
    if (support::this_heap.allocations != before) FAIL_CHECK("a call that must not fail allocated");
    return answer;
}

/// Two policies that get the same calls. One of them runs out of memory at every chance.
template <class Policy>
struct pair {
    Policy plain, failing;

    failure add(client_id c, const gpushare::client_settings& s) {
        const failure why = plain.add(c, s);
        CHECK(after_each_failure([&] { return failing.add(c, s); }).code == why.code);
        return why;
    }
    void change(client_id c, const gpushare::client_settings& s) {
        const failure why = plain.change(c, s);
        CHECK(after_each_failure([&] { return failing.change(c, s); }).code == why.code);
    }
    template <class F>
    void both(F call) {
        const auto done = [&](Policy& p) {
            call(p);
            return true;
        };
        without_memory([&] { return done(plain); });
        without_memory([&] { return done(failing); });
    }
};

template <class Policy>
class course {
public:
    explicit course(std::uint64_t seed) : any_(seed) {
        for (std::uint32_t i = 0; i < 12; ++i) clients_.push_back({.id = {i, 0}});
    }

    void step() {
        auto& c = any_.of(clients_);
        now_ += 1us;
        ask_about(c.id);
        if (!c.present) {
            ++c.id.generation;
            c.present = of_.add(c.id, settings()).code == errc::none;
        } else if (any_.one_in(20)) {
            of_.both([&](Policy& p) { p.remove(c.id); });
            c.present = false;
        } else if (any_.one_in(5)) {
            of_.change(c.id, settings());
        } else if (any_.one_in(4)) {
            of_.both([&](Policy& p) { p.sleep(c.id); });
        } else {
            wake(c.id);
        }
        serve();
    }

private:
    struct client {
        client_id id;
        bool present = false;
    };

    gpushare::share some_share() { return gpushare::share::of_permille(any_.below(any_.one_in(3) ? 1001 : 200)); }
    gpushare::client_settings settings() {
        return {.weight = some_share(),
                .level = {static_cast<std::int32_t>(any_.below(3)) - 1},
                .cap = some_share(),
                .soft_cap = any_.one_in(2),
                .group = static_cast<std::uint32_t>(any_.below(3))};
    }
    void wake(client_id c) {
        const ns cost{static_cast<std::int64_t>(any_.below(1'000'000))};
        const gpushare::queue_head head{.cost = cost, .remaining = 3 * cost, .arrival = now_, .deadline = now_ + cost};
        of_.both([&](Policy& p) { p.wake(c, head, now_); });
    }
    void ask_about(client_id c) {
        const auto s = settings();
        of_.both([&](Policy& p) {
            (void)gpushare::detail::honours(p, s);
            (void)gpushare::detail::has_classes(p);
            (void)gpushare::detail::lent_bits(p);
            if (clients_[c.index].present) (void)gpushare::detail::hard_cap_of(p, c);
        });
    }
    void serve() {
        const auto picked = without_memory([&] { return of_.plain.pick(now_); });
        if (!(without_memory([&] { return of_.failing.pick(now_); }) == picked)) FAIL("a failure changed something");
        if (!picked) return;
        const ns predicted{static_cast<std::int64_t>(any_.below(1'000'000))}, more = any_.one_in(2) ? 100us : -100us;
        of_.both([&](Policy& p) {
            const auto lent = gpushare::detail::serve(p, *picked, predicted, now_);
            p.sleep(*picked);
            gpushare::detail::correct(p, *picked, more, lent);
            gpushare::detail::ended(p, predicted);
        });
        if (any_.one_in(2)) wake(*picked);
    }

    support::random any_;
    pair<Policy> of_{};
    std::vector<client> clients_;
    gpushare::instant now_{};
};

}  // namespace

TEMPLATE_LIST_TEST_CASE("only add and change of a policy allocate, and a failure there changes nothing",
                        "[policy][memory]", policies::all) {
    const auto seed = support::seed(1);
    CAPTURE(seed);
    course<TestType> calls(seed);
    for (int i = 0; i < 2000; ++i) calls.step();
}

}  // namespace no_host_memory_test

#endif
