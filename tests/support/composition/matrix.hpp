// SPDX-License-Identifier: Apache-2.0
// The composition matrix: every stack on every kind of owner in every scenario. A scenario is one
// function, and a stack one class. So a new scenario or stack is tried with all others.
//
//   const auto m = support::composition::run_matrix<support::composition::host_backend>();
//   m.cells, m.wrong          // how many were tried, and what was wrong: "pool, tenant, close: ..."
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/quota_wait.hpp>
#include <gpushare/units.hpp>

#include "support/composition/failing.hpp"
#include "support/composition/interruption.hpp"
#include "support/composition/owners.hpp"
#include "support/composition/stacks.hpp"
#include "support/leaks.hpp"
#include "support/threads.hpp"

namespace support::composition {

/// The running cell.
template <class Backend>
struct rig {
    Backend& on;
    owner<Backend>& who;
    std::unique_ptr<stack>& top;
    std::vector<std::string>& wrong;
    std::size_t& false_refusals;
    bool& tried;  ///< false: the scenario doesn't apply to the stack or owner

    void check(bool good, std::string_view what) const {
        if (!good) wrong.emplace_back(what);
    }
    /// Gets a block. If blocks return only when the device has reached their frees, tries again
    /// until then; otherwise the first answer counts.
    [[nodiscard]] void* get(failure& why) const {
        void* p = top->get(why);
        for (int again = 0; p == nullptr && top->defers() && again < 100; ++again) {
            top->reach();
            p = top->get(why);
        }
        return p;
    }
    [[nodiscard]] void* get() const {
        failure unused;
        return get(unused);
    }
    /// Gets as many blocks as there are, at most `most`.
    [[nodiscard]] std::vector<void*> fill(std::size_t most) const {
        std::vector<void*> all;
        while (all.size() < most)
            if (void* const p = get())
                all.push_back(p);
            else
                break;
        return all;
    }
    void put(const std::vector<void*>& all) const {
        for (void* const p : all) check(top->put(p) == errc::none, "a block isn't taken back");
    }
    /// Checks that all memory is back, with the quota and with the device.
    void end() const {
        top->reach();
        top->settle();
        top.reset();
        check(who.limit().usage().current == who.idle(), "bytes are charged for no block");
        check(who.is_even(), "not as many frees as allocations are counted");
        check(who.close(deadline()), "it doesn't close");
        check(who.limit().usage().current == bytes{}, "bytes are charged after the close");
        check(on.used() == bytes{}, "the device hasn't all back");
    }
    static gpushare::instant deadline() { return gpushare::host::steady_clock::now() + std::chrono::seconds(20); }
};

/// A request that waits for one more block asks only the hooks concerned, and only for the missing
/// bytes.
template <class Backend>
void wait_in_vain(const rig<Backend>& r) {
    std::uint64_t strangers = 0, too_much = 0;
    const auto asked = [&](const gpushare::reclaim_request& of) {
        too_much += of.missing > bytes{unit} ? 1 : 0;
        return bytes{};
    };
    const gpushare::quota_hook theirs{r.who.neighbours_limit(), 0,
                                      [&](const gpushare::reclaim_request&) { return ++strangers, bytes{}; },
                                      [](gpushare::instant) { return false; }},
        mine{r.who.limit(), 0, asked, [](gpushare::instant) { return false; }};
    const gpushare::patience until{gpushare::host::steady_clock{},
                                   gpushare::host::steady_clock::now() + std::chrono::milliseconds(2)};
    r.check(try_charge(r.who.limit(), bytes{unit}, until).code != errc::none, "granted over the limit");
    r.check(strangers == 0, "a stranger was asked");
    r.check(too_much == 0, "asked for more than is missing");
}

/// Two workers that together never exceed the memory, beside a thread that makes impossible
/// requests.
template <class Backend>
void exactness(const rig<Backend>& r, int rounds) {
    void* const pinned = r.get();
    r.check(pinned != nullptr, "the first block is refused");
    std::atomic<std::size_t> live{1}, refused{0}, over{0}, granted_too_much{0};
    std::atomic<int> working{2};
    together(3, [&](unsigned rank) {
        if (rank == 2) {
            while (working.load() != 0)
                if (r.who.ask_too_much() != nullptr) granted_too_much.fetch_add(1);
            return;
        }
        const std::size_t share = rank == 0 ? granted / 2 : granted - granted / 2 - 1;
        for (int i = 0; i < rounds; ++i) {
            std::vector<void*> mine;
            for (std::size_t n = 0; n < share; ++n) {
                void* const p = r.get();
                if (p == nullptr) {
                    refused.fetch_add(1);
                    continue;
                }
                if (live.fetch_add(1) >= granted) over.fetch_add(1);
                mine.push_back(p);
            }
            live.fetch_sub(mine.size());
            for (void* const p : mine) (void)r.top->put(p);
        }
        working.fetch_sub(1);
    });
    r.false_refusals += refused;
    r.check(refused == 0, "refused what fits");
    r.check(over == 0, "granted more than there is");
    r.check(granted_too_much == 0, "granted what can't be there");
    r.check(r.who.limit().usage().peak <= blocks(granted), "charged more than the limit");
    if (pinned != nullptr) r.put({pinned});
    const bytes kept = r.top->kept();
    r.check(r.top->get_impossible() == nullptr, "granted what can't be there");
    r.check(r.top->kept() == kept, "what can't be there has cost what is kept");
    auto all = r.fill(granted + 1);
    r.check(all.size() == granted, "not exactly what is granted");
    wait_in_vain(r);
    r.put(all);
    r.end();
}

template <class Backend>
void close_beside_traffic(const rig<Backend>& r, int /*rounds*/) {
    std::atomic<bool> closed{false}, over{false};
    std::atomic<std::uint64_t> late{0}, begun{0};
    bool complete = false;
    together(3, [&](unsigned rank) {
        if (rank == 2) {
            while (begun.load() < 20) std::this_thread::yield();
            for (int again = 0; !complete && again < 1'000; ++again) {  // some of it may be in a call, or be scrubbed
                complete = r.who.close(r.deadline());
                closed.store(true);
                if (complete) break;
                r.top->reach();
                r.top->settle();
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            spin(2'000);
            over.store(true);
            return;
        }
        failure why;
        while (!over.load()) {
            const bool before = closed.load();
            void* const p = r.top->get(why);
            begun.fetch_add(1);
            if (p != nullptr && before) late.fetch_add(1);
            if (p != nullptr) (void)r.top->put(p);
        }
    });
    r.check(late == 0, "handed out after the close");
    failure why;
    r.check(r.top->get(why) == nullptr, "handed out after the close, and later");
    r.check(why.code == errc::closed, "refused for another reason than that it is closed");
    r.top->reach();
    r.top->settle();
    r.top.reset();
    // When a quota closes, its owner must take back all blocks that are still allocated. Until then
    // they stay charged, and the device lacks them.
    r.check(r.who.limit().usage().current == r.on.used(), "what is charged isn't what the device lacks");
    r.check(complete, "it doesn't close");
    r.check(r.who.idle() == bytes{}, "closed, with memory that is kept");
}

template <class Backend>
void device_loss(const rig<Backend>& r, int /*rounds*/) {
    auto all = r.fill(2);
    r.on.lose();
    failure why;
    for (std::size_t i = 0; i <= granted; ++i) {
        void* const p = r.top->get(why);
        if (p == nullptr) break;
        all.push_back(p);
    }
    r.check(all.size() <= granted && why.code != errc::none, "a lost device goes on giving");
    for (void* const p : all) (void)r.top->put(p);
    r.top->reach();
    r.top->settle();
    r.check(r.who.limit().usage().current <= blocks(granted), "charged more than the limit");
    (void)r.who.close(r.deadline());  // returns, complete or not
    r.check(r.top->get(why) == nullptr, "handed out after the close");
    r.top.reset();
}

/// Each of the first allocations fails once, and no memory is lost.
template <class Backend>
void upstream_failure(const rig<Backend>& r, int /*rounds*/) {
    for (std::uint64_t after = 0; after < 5; ++after) {
        r.on.fail_allocation(after);
        std::vector<void*> all;
        for (int i = 0; i < 4; ++i) {
            failure why;
            if (void* const p = r.top->get(why))
                all.push_back(p);
            else
                r.check(why.code != errc::none, "refused without a reason");
        }
        r.on.heal();
        r.put(all);
    }
    auto all = r.fill(granted + 1);
    r.check(all.size() == granted, "a failure has cost something");
    r.put(all);
    r.end();
}

/// Whatever memory is used, freed, kept and scrubbed next to it, the neighbour gets what it was
/// promised.
template <class Backend>
void neighbours_guarantee(const rig<Backend>& r, int /*rounds*/) {
    for (int i = 0; i < 3; ++i) {
        const auto used = r.fill(granted);
        r.check(used.size() == granted, "not what is granted");
        r.top->hold();
        r.put(used);
        std::vector<void*> directly;
        while (void* const p = r.who.memory().try_allocate(unit, 256, nullptr)) directly.push_back(p);
        std::vector<void*> theirs;
        for (std::size_t n = 0; n < promised_to_neighbour; ++n)
            if (void* const p = r.who.neighbour().try_allocate(unit, 256, nullptr)) theirs.push_back(p);
        r.check(theirs.size() == promised_to_neighbour, "a neighbour is refused what it was promised");
        r.check(r.who.overpromised() == bytes{}, "more is promised than is there");
        for (void* const p : theirs) (void)r.who.neighbour().deallocate(p, unit, 256);
        for (void* const p : directly) (void)r.who.memory().deallocate(p, unit, 256);
        r.top->let_go();
    }
    // Memory in use is charged once, and isn't counted as taken by others as well.
    const auto all = r.fill(granted);
    r.check(all.size() == granted, "not what is granted");
    r.check(r.who.overpromised() == bytes{}, "what a tenant uses is others'");
    if constexpr (requires { r.on.before_reading([] {}); }) {  // nor is freed memory counted twice
        r.on.before_reading([&] { r.put(all); });
        (void)r.who.overpromised();
        (void)r.on.memory().taken_by_others();  // of an owner that doesn't measure
        r.check(r.who.left_to_promise() <= blocks(on_device - granted - promised_to_neighbour),
                "promises what isn't there");
    } else {
        r.put(all);
    }
    std::vector<void*> theirs;  // the neighbour's blocks, which it gives back
    for (std::size_t n = 0; n < promised_to_neighbour; ++n)
        if (void* const p = r.who.neighbour().try_allocate(unit, 256, nullptr)) theirs.push_back(p);
    r.check(theirs.size() == promised_to_neighbour, "a neighbour is refused what it was promised");
    for (void* const p : theirs) (void)r.who.neighbour().deallocate(p, unit, 256);
    r.top->reach();
    r.top->settle();
    r.top.reset();
    r.check(r.who.limit().usage().current == r.who.idle(), "bytes are charged for no block");
}

/// The stack works during a capture that forbids threads most calls of the device.
template <class Backend>
void capture(const rig<Backend>& r, int /*rounds*/) {
    const auto warm = r.fill(2);
    const bool whole = r.on.captured([&] {
        for (int i = 0; i < (r.top->keeps_captured() ? 1 : 3); ++i) {
            const auto all = r.fill(4);
            r.check(all.size() == 4, "refused beside a capture");
            r.put(all);
        }
        r.put(warm);
    });
    r.check(whole, "the capture was spoilt");
    r.top->settle();
    auto all = r.fill(granted + 1);
    r.check(all.size() == granted, "what was freed beside a capture isn't back");
    r.put(all);
    r.end();
}

template <class Backend>
void resize_up_and_down(const rig<Backend>& r, int /*rounds*/) {
    constexpr std::size_t more = granted + 4, less = granted / 2;
    r.check(r.who.resize(more), "can't grow");
    auto all = r.fill(more + 1);
    r.check(all.size() == (r.top->is_fixed() ? granted : more), "not exactly what is granted after growing");
    r.check(r.who.resize(less), "can't shrink");
    r.check(r.get() == nullptr, "granted over the limit");
    while (all.size() >= less) {
        r.put({all.back()});
        all.pop_back();
    }
    r.top->reach();
    r.top->settle();
    if (!r.top->is_fixed()) {
        const auto rest = r.fill(2);
        r.check(rest.size() == 1, "not exactly what is granted after shrinking");
        r.put(rest);
    }
    r.check(r.who.resize(granted), "can't grow again");
    r.put(all);
    all = r.fill(granted + 1);
    r.check(all.size() == granted, "not exactly what is granted in the end");
    r.put(all);
    r.end();
}

/// A block that is freed while a close waits elsewhere is neither lost nor charged for ever.
template <class Backend>
void frees_beside_a_close(const rig<Backend>& r, int /*rounds*/) {
    const auto all = r.fill(granted / 2);
    r.tried = r.who.hold_close();
    if (!r.tried) {
        r.put(all);
        return r.end();
    }
    r.top->hold();
    {
        auto closing = std::async(std::launch::async, [&] { return r.who.close(r.deadline()); });
        std::this_thread::sleep_for(std::chrono::milliseconds(5));  // usually the close waits by then
        r.put(all);
        r.who.let_close();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        r.top->let_go();
        const bool complete = closing.get();
        r.check(complete || !r.top->closes(), "a close doesn't wait for what was freed beside it");
        r.check(!complete || r.who.limit().usage().current == bytes{}, "closed, with something charged");
    }
    r.top->let_go();
    r.top->reach();
    r.top->settle();
    r.check(r.who.close(r.deadline()), "it doesn't close");
    r.top.reset();
    r.check(r.on.used() == bytes{}, "the device hasn't all back");
}

/// The number of queries of points grows with the number of frees, and not with its square.
template <class Backend>
void many_pending(const rig<Backend>& r, int /*rounds*/) {
    const auto asked_per_free = [&](std::size_t pending) {
        r.tried = r.top->free_many(pending);
        const auto before = r.on.questions();
        r.top->settle();
        const auto asked = r.on.questions() - before;
        r.top->let_go();
        r.top->reach();
        r.top->settle();
        return 2 * static_cast<double>(asked) / static_cast<double>(pending);
    };
    const double few = asked_per_free(40), many = asked_per_free(400);
    r.check(!r.tried || (few >= 1 && many <= 1.5 * few), "a free costs more questions, the more are pending");
    r.end();
}

/// A release doesn't take more steps if more requests wait.
template <class Backend>
void many_waiting(const rig<Backend>& r, int /*rounds*/) {
    const auto tries = [&](std::size_t waiters) {
        auto all = r.fill(granted);
        r.check(all.size() == granted, "not what is granted");
        std::deque<gpushare::quota_claim> line;
        while (line.size() < waiters) line.emplace_back(r.who.limit(), blocks(granted));
        const auto before = r.who.limit().usage().refusals;  // one for each request that is tried
        for (std::size_t i = 0; i < granted / 2 && !all.empty(); ++i) {
            r.put({all.back()});
            all.pop_back();
            r.top->reach();
            r.top->settle();
        }
        const auto refused = r.who.limit().usage().refusals - before;
        line.clear();
        r.put(all);
        r.top->reach();
        r.top->settle();
        return refused;
    };
    const auto few = tries(10), many = tries(1'000);
    r.check(many <= 2 * few, "a release takes more steps, the more wait");
    r.end();
}

/// While one thread is inside the driver, other threads get their memory.
template <class Backend>
void beside_a_call(const rig<Backend>& r, int /*rounds*/) {
    std::future<bool> other;
    bool in_time = true;
    const auto while_called = [&](interruption& call, auto what, auto beside) {
        call.before_next([&] {
            other = std::async(std::launch::async, beside);
            in_time = other.wait_for(std::chrono::minutes(5)) == std::future_status::ready;
        });
        what();
        call.before_next(nullptr);
        r.tried |= other.valid();
        return !other.valid() || other.get();
    };
    r.tried = false;
    void* p = nullptr;
    r.check(while_called(
                r.on.allocations(), [&] { p = r.get(); },
                [&] {
                    failure why;
                    void* const mine = r.top->get_beside(why);
                    return mine != nullptr && r.top->put_beside(mine) == errc::none;
                }),
            "refused beside a call of the driver's");
    r.check(in_time, "a lock is held through a call of the driver's");
    r.check(p != nullptr, "the first block is refused");
    r.put({p});
    r.check(while_called(
                r.on.new_streams(), [&] { r.who.meet_another(); }, [&] { return r.who.resize(granted); }),
            "can't be resized while somebody comes");
    r.check(in_time, "a lock is held while streams are made");
    r.end();
}

/// A hook may use memory of another tree, whose hooks are then asked.
template <class Backend>
void hooks_across_trees(const rig<Backend>& r, int /*rounds*/) {
    gpushare::quota other{blocks(1)};
    const auto charge = [&] {
        errc why = other.try_charge(blocks(1));
        for (gpushare::detail::hook_cursor asked; why != errc::none && other.ask_next(asked, blocks(1));)
            why = other.try_charge(blocks(1));
        return why == errc::none;
    };
    r.check(charge(), "an empty quota refuses");
    bool asked = false, had = false;
    {
        const gpushare::quota_hook gives{
            other, 0, [&](const gpushare::reclaim_request&) { return other.release(blocks(1)) ? blocks(1) : bytes{}; }};
        const gpushare::quota_hook takes{r.who.limit(), 0, [&](const gpushare::reclaim_request&) {
                                             had |= !std::exchange(asked, true) && charge();
                                             return bytes{};
                                         }};
        r.put(r.fill(granted + 1));
    }
    r.tried = asked;
    r.check(had || !asked, "hooks of another tree aren't asked by a hook");
    r.end();
}

/// An owner that ends while blocks are allocated leaves nothing behind, and nobody touches blocks
/// that were taken back.
template <class Backend>
void close_with_allocated_blocks(const rig<Backend>& r, int /*rounds*/) {
    const auto all = r.fill(granted / 2);
    r.tried = r.who.takes_back() && r.top->is_taken_back();
    if (!r.tried) {
        r.put(all);
        return r.end();
    }
    r.check(r.who.close(r.deadline()), "it doesn't close");
    r.check(r.who.limit().usage().current == bytes{}, "closed, with something charged");
    failure why;
    r.check(r.top->get(why) == nullptr && why.code == errc::closed, "not refused as closed");
    for (void* const p : all) {
        const errc late = r.top->put(p);
        r.check(!r.top->passes_answers() || late == errc::closed, "a free of what was taken back isn't refused");
    }
    r.top.reset();
    r.check(r.who.limit().usage().current == bytes{}, "what was taken back was charged once more");
    r.check(r.on.used() == bytes{}, "the device hasn't all back");
}

/// Wrong uses are refused, and no memory is lost.
template <class Backend>
void misuse(const rig<Backend>& r, int /*rounds*/) {
    void* const p = r.get();
    r.check(p != nullptr, "the first block is refused");
    const auto what = p == nullptr ? std::string_view{} : r.top->misuse(p);
    r.check(what.empty(), what);
    auto all = r.fill(granted + 1);
    r.check(all.size() == granted, "not what is granted, after a wrong free");
    r.put(all);
    r.end();
}

/// The submitter learns that its work failed on the device. No block is lost, whatever is allocated
/// and freed in the stream's order meanwhile.
template <class Backend>
void fails_on_the_device(const rig<Backend>& r, int /*rounds*/) {
    using stream_type = typename Backend::stream;
    auto own = r.on.make_stream(), other = r.on.make_stream();
    auto* const of_stack = static_cast<stream_type*>(r.top->own_stream());
    auto& on = of_stack != nullptr ? *of_stack : own;
    failures tried(
        r.on.node().get_clock(), on, other, [&](stream_type& s) { r.on.fail(s); },
        [&](stream_type& s) { r.on.work(s); });
    void* block = nullptr;
    const auto get = [&](stream_type&) {
        failure why;
        block = r.top->get(why);
    };
    const auto put = [&](stream_type& s) {
        if (block == nullptr) get(s);
        if (void* const p = std::exchange(block, nullptr))
            r.check(r.top->put(p) == errc::none, "a block isn't taken back");
    };
    for (const auto& what : tried.wrong({{"its stack frees", get, put}})) r.check(false, what);
    r.top->reach();
    r.top->settle();
    auto all = r.fill(granted + 1);
    r.check(all.size() == granted, "a failure has cost something");
    r.put(all);
    r.end();
}

template <class Backend>
struct stack_kind {
    std::string_view name;
    std::function<std::unique_ptr<stack>(const site<Backend>&)> make;
};
template <class Backend>
struct owner_kind {
    std::string_view name;
    std::function<std::unique_ptr<owner<Backend>>(Backend&)> make;
    std::uint32_t devices = 1;
};
template <class Backend>
struct scenario {
    std::string_view name;
    void (*run)(const rig<Backend>&, int rounds);
};

template <class Stack, class Backend>
stack_kind<Backend> kind(std::string_view name) {
    return {name, [](const site<Backend>& s) { return std::make_unique<Stack>(s); }};
}
template <class Backend>
std::vector<stack_kind<Backend>> stack_kinds() {
    return {kind<direct_stack<Backend>, Backend>("direct"),
            kind<pool_stack<Backend>, Backend>("pool"),
            kind<cache_stack<Backend>, Backend>("cache"),
            kind<private_stack<Backend>, Backend>("private pool"),
            kind<arena_stack<Backend>, Backend>("arena"),
            kind<scrubbing_stack<Backend>, Backend>("scrubbing above the quota"),
            kind<scrubbed_stack<Backend>, Backend>("scrubbing below the quota"),
            kind<ordered_stack<Backend>, Backend>("stream-ordered"),
            kind<handle_stack<Backend>, Backend>("handles"),
            kind<spillable_stack<Backend>, Backend>("spillable"),
            kind<workspace_stack<Backend>, Backend>("workspaces"),
            kind<counted_stack<Backend>, Backend>("statistics"),
            kind<deferred_stack<Backend>, Backend>("freed in stream order"),
            kind<pytorch_stack<Backend>, Backend>("PyTorch's cache"),
            kind<tall_stack<Backend>, Backend>("adaptors on adaptors")};
}
template <class Backend>
std::vector<owner_kind<Backend>> owner_kinds() {
    using gpushare::memory_stack;
    std::vector<owner_kind<Backend>> all{
        {"quota", [](Backend& on) { return std::make_unique<quota_owner<Backend>>(on, on.memory()); }},
        {"pinned host memory",
         [](Backend& on) {
             return std::make_unique<quota_owner<Backend, typename Backend::pinned_type>>(on, on.pinned());
         }},
        {"tree", [](Backend& on) { return std::make_unique<tree_owner<Backend>>(on); }},
        {"tenant", [](Backend& on) { return std::make_unique<tenant_owner<Backend>>(on, memory_stack::pool); }},
        {"direct tenant",
         [](Backend& on) { return std::make_unique<tenant_owner<Backend>>(on, memory_stack::direct); }},
        {"tenant of two devices",
         [](Backend& on) { return std::make_unique<tenant_owner<Backend>>(on, memory_stack::pool, 2); }, 2},
        {"direct tenant of two devices",
         [](Backend& on) { return std::make_unique<tenant_owner<Backend>>(on, memory_stack::direct, 2); }, 2},
        {"arena tenant", [](Backend& on) { return std::make_unique<tenant_owner<Backend>>(on, memory_stack::arena); }}};
    if constexpr (requires(Backend & on) { on.device_pool(); })
        all.push_back({"stream-ordered tenant", [](Backend& on) {
                           return std::make_unique<tenant_owner<Backend>>(on, memory_stack::stream_ordered);
                       }});
    return all;
}
template <class Backend>
std::vector<scenario<Backend>> scenarios() {
    std::vector<scenario<Backend>> all{{"exactness under attack", &exactness<Backend>},
                                       {"close beside traffic", &close_beside_traffic<Backend>},
                                       {"device loss", &device_loss<Backend>},
                                       {"upstream failure", &upstream_failure<Backend>},
                                       {"neighbour's guarantee", &neighbours_guarantee<Backend>},
                                       {"resize", &resize_up_and_down<Backend>},
                                       {"frees beside a close", &frees_beside_a_close<Backend>},
                                       {"close with allocated blocks", &close_with_allocated_blocks<Backend>},
                                       {"many waiting", &many_waiting<Backend>},
                                       {"beside a driver's call", &beside_a_call<Backend>},
                                       {"hooks across trees", &hooks_across_trees<Backend>},
                                       {"misuse", &misuse<Backend>},
                                       {"fails on the device", &fails_on_the_device<Backend>}};
    if constexpr (requires(Backend & on) { on.questions(); }) all.push_back({"many pending", &many_pending<Backend>});
    if constexpr (requires(Backend & on) { on.captured([] {}); }) all.push_back({"capture", &capture<Backend>});
    return all;
}

struct matrix_result {
    std::size_t cells = 0, failed = 0;
    std::size_t false_refusals = 0;  ///< refusals of fitting requests during attacks
    std::vector<std::string> wrong;  ///< one line for each failure
};

/// `rounds`: of an attack. `more`: further stacks of the backend. `only`: runs only cells whose
/// names contain this text.
template <class Backend>
matrix_result run_matrix(int rounds = 40, const std::vector<stack_kind<Backend>>& more = {},
                         std::string_view only = {}) {
    auto stacks = stack_kinds<Backend>();
    stacks.insert(stacks.end(), more.begin(), more.end());
    matrix_result all;
    for (const auto& s : stacks)
        for (const auto& o : owner_kinds<Backend>())
            for (const auto& how : scenarios<Backend>()) {
                const std::string name =
                    std::string(s.name) + ", " + std::string(o.name) + ", " + std::string(how.name);
                if (name.find(only) == std::string::npos) continue;
                std::vector<std::string> wrong;
                bool tried = true;
                {
                    // Memory that can't be scrubbed any more goes to no tenant, so the tenant that
                    // is charged for it never finishes closing.
                    std::optional<leaks_are_meant> not_back;
                    if (how.run == &device_loss<Backend>) not_back.emplace();
                    Backend on{blocks(on_device), o.devices};
                    const auto who = o.make(on);
                    auto top = s.make(
                        {on, who->limit(), who->memory(), [&] { return who->declare(); }, [&] { who->make_room(); }});
                    how.run({on, *who, top, wrong, all.false_refusals, tried}, rounds);
                }
                all.cells += tried ? 1 : 0;
                all.failed += wrong.empty() ? 0 : 1;
                for (const auto& what : wrong) all.wrong.push_back(name + ": " + what);
            }
    return all;
}

}  // namespace support::composition
