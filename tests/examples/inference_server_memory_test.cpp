// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// The inference server when the host has no memory: whichever allocation of the requesting thread
// fails, the client gets exactly one answer or error, and its next request is answered.
#include "inference_server/service.hpp"
#include "support/sanitizers.hpp"

#ifndef SUPPORT_THREAD_SANITIZED

#include <signal.h>
#include <sys/resource.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>

#include "inference_server/engine.hpp"
#include "support/catch.hpp"
#include "support/failing_new.hpp"
#include "support/folder.hpp"
#include "support/leaks.hpp"

namespace inference_server_memory_test {

using namespace inference_server;
using namespace std::chrono_literals;
using support::this_heap;

namespace {

struct small_server {
    explicit small_server(const char* journal = nullptr, std::size_t kept_lines = 10'000) {
        // 448 KiB: a text of `long_prompt` takes 256.
        folder.write("tenants", "name=chat api_key=key-of-chat memory=448KiB compute=60% stack=direct\n");
        core = std::make_unique<service>(service_options{.tenants = folder / "tenants",
                                                         .journal = journal ? folder / journal : "",
                                                         .node = {.memory = gpushare::bytes{64 << 20}, .sms = 2},
                                                         .text_waits = 60s,
                                                         .kept_lines = kept_lines},
                                         std::vector<model_source>{tiny_mlp(), tiny_letters()});
    }
    [[nodiscard]] std::shared_ptr<token_stream> text() const {
        return core->generate(core->authenticate("key-of-chat"), "letters",
                              {.prompt = std::string(500, 'a'), .most_tokens = 10});
    }
    void unload(const char* model) const {
        for (int i = 0; i < 6000; ++i) try {
                return core->unload(core->authenticate("key-of-chat"), model);
            } catch (const refused&) {  // it is being answered
                std::this_thread::sleep_for(10ms);
            }
        FAIL("it is never idle");
    }

    const support::folder folder;
    std::unique_ptr<service> core;
};

/// What came of one question.
struct outcome {
    std::atomic<int> answers{0};
    std::atomic<int> status{0};  // of the last one
    bool threw = false;

    void answer(int with) {
        status = with;
        ++answers;
    }
    [[nodiscard]] bool comes() const {
        for (int i = 0; i < 6000 && answers == 0; ++i) std::this_thread::sleep_for(10ms);
        return answers != 0;
    }
    /// It was refused by an exception, or answered, and both at once never.
    void check() const {
        if (!threw) {
            CHECK(comes());
            CHECK((status == 200 || status == 503));
        }
        CHECK(answers == (threw ? 0 : 1));
    }
};

void ask(token_stream& text, const std::shared_ptr<outcome>& o) {
    text.more(
        1, [](const std::string&) { return true; }, [o](const token_end& e) { o->answer(e.status()); });
}

/// Calls `f(outcome)` with the nth allocation of this thread failing, for n = 0, 1, ... until it
/// goes without one that fails. Where the heap doesn't recover all that come behind it in `f` fail,
/// too. `before` and `after`, where all succeed.
template <class Before, class F, class After>
void each_allocation_fails(bool recovers, Before before, F f, After after) {
    for (std::size_t nth = 0;; ++nth) {
        CAPTURE(nth);
        auto what = before();
        const auto o = std::make_shared<outcome>();
        this_heap = {.good = nth, .recovers = recovers};
        try {
            f(what, o);
        } catch (const std::bad_alloc&) {
            o->threw = true;
        }
        const bool went_without = this_heap.allocations <= nth;
        this_heap = {};
        after(what, o);
        if (went_without) {
            CHECK(nth > 0);  // there were some
            return;
        }
        REQUIRE(nth < 1000);
    }
}

}  // namespace

TEST_CASE("without memory on the host texts are refused or go on, and the next ones begin", "[examples]") {
    const small_server s;
    const bool recovers = GENERATE(true, false);
    CAPTURE(recovers);
    const auto works = [&] {
        const auto o = std::make_shared<outcome>();
        const auto t = s.text();
        ask(*t, o);
        o->check();
        CHECK(o->status == 200);
    };
    SECTION("the model is loaded first") {
        each_allocation_fails(
            recovers,
            [&] {
                s.unload("letters");
                return s.text();
            },
            [](auto& t, const auto& o) { ask(*t, o); },
            [&](auto& t, const auto& o) {
                o->check();
                t.reset();
                works();
            });
    }
    SECTION("it is there") {
        works();
        each_allocation_fails(
            recovers, [&] { return s.text(); }, [](auto& t, const auto& o) { ask(*t, o); },
            [&](auto& t, const auto& o) {
                o->check();
                t.reset();
                works();
            });
    }
    SECTION("another text has the memory") {
        struct both {
            std::shared_ptr<token_stream> first, second;
        };
        each_allocation_fails(
            recovers,
            [&] {
                both b{s.text(), s.text()};
                const auto o = std::make_shared<outcome>();
                ask(*b.first, o);
                o->check();
                return b;
            },
            [](auto& b, const auto& o) { ask(*b.second, o); },
            [&](auto& b, const auto& o) {
                b.first.reset();
                o->check();
                b.second.reset();
                works();
            });
    }
    SECTION("its memory comes on the thread that lets another one go") {
        struct both {
            std::shared_ptr<token_stream> first, second;
            std::shared_ptr<outcome> of_second;
        };
        each_allocation_fails(
            recovers,
            [&] {
                both b{s.text(), s.text(), std::make_shared<outcome>()};
                const auto o = std::make_shared<outcome>();
                ask(*b.first, o);
                o->check();
                ask(*b.second, b.of_second);
                std::this_thread::sleep_for(5ms);  // most often it waits by then
                return b;
            },
            [](auto& b, const auto&) { b.first.reset(); },
            [&](auto& b, const auto&) {
                b.of_second->check();
                b.second.reset();
                works();
            });
    }
}

TEST_CASE("without memory on the host requests are refused or answered, and so are the next ones", "[examples]") {
    const small_server s;
    const bool recovers = GENERATE(true, false);
    CAPTURE(recovers);
    const auto request = [] {
        infer_request r;
        r.inputs.push_back({"INPUT", datatype::fp32, {1, 16}, std::vector<std::byte>(64)});
        return r;
    };
    const auto send = [&](infer_request r, const std::shared_ptr<outcome>& o) {
        s.core->infer(s.core->authenticate("key-of-chat"), "mlp", std::move(r), [o](const answer& a) {
            const auto* const why = std::get_if<refused>(&a);
            o->answer(why == nullptr ? 200 : why->status);
        });
    };
    const bool loaded = GENERATE(false, true);
    CAPTURE(loaded);
    each_allocation_fails(
        recovers,
        [&] {
            if (!loaded) s.unload("mlp");
            return request();
        },
        [&](auto& r, const auto& o) { send(std::move(r), o); },
        [&](auto&, const auto& o) {
            o->check();
            const auto next = std::make_shared<outcome>();
            send(request(), next);
            next->check();
            CHECK(next->status == 200);
        });
}

TEST_CASE("a text whose reader has no memory is over, and its engine goes on with the others", "[examples]") {
    const small_server s;
    const auto first = s.text();
    const auto went_on = [&] {
        const auto o = std::make_shared<outcome>();
        ask(*first, o);
        o->check();
        CHECK(o->status == 200);
    };
    went_on();
    const auto other =
        s.core->generate(s.core->authenticate("key-of-chat"), "letters", {.prompt = "a", .most_tokens = 10});
    const auto o = std::make_shared<outcome>();
    other->more(
        4, [](const std::string&) -> bool { throw std::bad_alloc(); },
        [o](const token_end& e) { o->answer(e.last ? e.status() : 0); });
    o->check();
    CHECK(o->status == 503);
    went_on();
}

TEST_CASE("requests are answered once where the thread that puts batches together has no memory", "[examples]") {
    const small_server s;
    constexpr int many = 6;
    const auto asks = std::this_thread::get_id();
    for (std::size_t nth = 0; nth < 24; ++nth) {
        CAPTURE(nth);
        std::array<std::shared_ptr<outcome>, many> all;
        for (int i = 0; i < many; ++i) {
            const auto o = all[static_cast<std::size_t>(i)] = std::make_shared<outcome>();
            infer_request r;
            r.inputs.push_back({"INPUT", datatype::fp32, {1, 16}, std::vector<std::byte>(64)});
            // Whoever answers the first one takes the next ones, too.
            s.core->infer(s.core->authenticate("key-of-chat"), "mlp", std::move(r), [o, nth, i, asks](const answer& a) {
                const auto* const why = std::get_if<refused>(&a);
                o->answer(why == nullptr ? 200 : why->status);
                if (std::this_thread::get_id() == asks) return;
                this_heap = i == 0 ? support::heap{.good = nth, .recovers = true} : support::heap{};
            });
        }
        for (const auto& o : all) o->check();
    }
}

// By one thread, which loads the model as well: what waits is put together there, with one request
// among it that is late.
TEST_CASE("requests that wait for a model are answered once where the host has no memory", "[examples]") {
    const small_server s;
    const bool recovers = GENERATE(true, false), refused_by_device = GENERATE(true, false);
    CAPTURE(recovers, refused_by_device);
    constexpr gpushare::bytes chunk{64 << 10};
    gpushare::host::virtual_memory memory(s.core->node().memory({0}), chunk);
    gpushare::host::stream scrubbing = s.core->node().make_stream({0});
    cache_chunks chunks(memory, scrubbing, {.capacity = 1});
    const auto who = s.core->authenticate("key-of-chat").who;
    const auto room = std::make_shared<scratch>(who->memory(), chunk);
    const auto model = tiny_mlp();
    const std::uint32_t no_stream = who->spec().streams;

    std::function<void()> load;
    struct waiting {
        std::shared_ptr<lane> at;
        std::array<std::shared_ptr<outcome>, 3> all{};
    };
    each_allocation_fails(
        recovers,
        [&] {
            waiting w{.at = std::make_shared<lane>(
                          who, std::make_shared<const model_source>(model), std::make_shared<account>(),
                          lane::settings{.run_later = [&load](std::function<void()> f) { load = std::move(f); },
                                         .stream = refused_by_device ? no_stream : 0,
                                         .node = &s.core->node(),
                                         .chunks = &chunks,
                                         .room = room})};
            for (std::size_t i = 0; i < w.all.size(); ++i) {
                const auto o = w.all[i] = std::make_shared<outcome>();
                infer_request r;
                r.inputs.push_back({"INPUT", datatype::fp32, {1, 16}, std::vector<std::byte>(64)});
                r.timeout_us = i == 1 ? 1 : 0;
                w.at->infer(std::move(r), [o](const answer& a) {
                    const auto* const why = std::get_if<refused>(&a);
                    o->answer(why == nullptr ? 200 : why->status);
                });
            }
            std::this_thread::sleep_for(10us);
            return w;
        },
        [&](auto&, const auto&) { std::exchange(load, {})(); },
        [&](auto& w, const auto&) {
            for (const auto& o : w.all)
                for (int i = 0; i < 1000 && o->answers == 0; ++i) {
                    w.at->look_again();
                    if (load) std::exchange(load, {})();
                    std::this_thread::sleep_for(1ms);
                }
            REQUIRE(w.at->close(gpushare::saturating_add(who->now(), 5min)));
            for (const auto& o : w.all) CHECK(o->answers == 1);
            CHECK((w.all[1]->status == 504 || w.all[1]->status == 503));  // it is late, or the model isn't loaded
            for (const auto& o : {w.all[0], w.all[2]})
                CHECK((o->status == 503 || o->status == (refused_by_device ? 500 : 200)));
        });
}

TEST_CASE("tenants that go are billed to the last request where the host has no memory", "[examples]") {
    const bool recovers = GENERATE(true, false), writable = GENERATE(true, false);
    CAPTURE(recovers, writable);
    const small_server s("usage", 0);
    const auto journal = s.folder / "usage";
    const std::string stays = "name=chat api_key=key-of-chat memory=448KiB compute=60% stack=direct\n",
                      go = "name=one api_key=key-of-one memory=64KiB compute=20%\n"
                           "name=two api_key=key-of-two memory=64KiB compute=20%\n";
    const auto tenants_are = [&](const std::string& text) {
        std::ofstream(s.folder / "tenants") << text;
        return [&core = *s.core] { return core.reload(); };
    };
    const auto ask = [&](const char* key) {
        const auto o = std::make_shared<outcome>();
        infer_request r;
        r.inputs.push_back({"INPUT", datatype::fp32, {1, 16}, std::vector<std::byte>(64)});
        s.core->infer(s.core->authenticate(key), "mlp", std::move(r), [o](const answer& a) {
            const auto* const why = std::get_if<refused>(&a);
            o->answer(why == nullptr ? 200 : why->status);
        });
        o->check();
        REQUIRE(o->status == 200);
    };
    (void)::signal(SIGXFSZ, SIG_IGN);
    ::rlimit was{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &was) == 0);
    for (std::size_t nth = 0;; ++nth) {
        CAPTURE(nth);
        // A tenant that can't even note that it is stuck is left behind (tenant::abandon).
        const support::leaks_are_meant lost;
        REQUIRE(tenants_are(stays + go)().empty());
        for (const auto* key : {"key-of-one", "key-of-two"}) ask(key);
        const auto reload = tenants_are(stays);
        const ::rlimit none{std::filesystem::file_size(journal), was.rlim_max};
        if (!writable) REQUIRE(::setrlimit(RLIMIT_FSIZE, &none) == 0);
        this_heap = {.good = nth, .recovers = recovers};
        try {
            (void)reload();
        } catch (const std::bad_alloc&) {
        }
        const bool went_without = this_heap.allocations <= nth;
        this_heap = {};
        REQUIRE(::setrlimit(RLIMIT_FSIZE, &was) == 0);
        REQUIRE(reload().empty());
        gpushare::usage_invoices bill{gpushare::wall_time::min(), gpushare::wall_time::max()};
        (void)gpushare::usage_journal::read(journal, [&](const gpushare::usage_line& l) { bill.add(l); });
        CHECK(bill.of("one").requests == nth + 1);
        CHECK(bill.of("two").requests == nth + 1);
        if (went_without) {
            CHECK(nth > 0);
            return;
        }
        REQUIRE(nth < 1000);
    }
}

TEST_CASE("a server ends, whichever allocation of its end fails", "[examples]") {
    each_allocation_fails(
        true,
        [] {
            auto s = std::make_unique<small_server>("usage");
            const auto o = std::make_shared<outcome>();
            infer_request r;
            r.inputs.push_back({"INPUT", datatype::fp32, {1, 16}, std::vector<std::byte>(64)});
            s->core->infer(s->core->authenticate("key-of-chat"), "mlp", std::move(r),
                           [o](const answer& a) { o->answer(std::holds_alternative<refused>(a) ? 503 : 200); });
            o->check();
            return s;
        },
        [](const std::unique_ptr<small_server>& s, const std::shared_ptr<outcome>& o) {
            s->core.reset();
            o->answer(200);
        },
        [](const std::unique_ptr<small_server>&, const std::shared_ptr<outcome>& o) { o->check(); });
}

TEST_CASE("a reader of a journal keeps no descriptor if the host has no memory", "[examples]") {
    small_server s;
    s.core.reset();  // its threads open files, too
    const auto path = s.folder / "usage";
    for (int i = 0; i < 3; ++i) REQUIRE(gpushare::usage_journal(path).rotate().code == gpushare::errc::none);
    const auto open = [] {
        return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                             std::filesystem::directory_iterator());
    };
    const auto before = open();
    for (std::size_t nth = 0;; ++nth) {
        CAPTURE(nth);
        this_heap = {.good = nth};
        try {
            (void)gpushare::usage_journal::read(path, [](const gpushare::usage_line&) {});
        } catch (const std::bad_alloc&) {
        }
        const bool went_without = this_heap.allocations <= nth;
        this_heap = {};
        CHECK(open() == before);
        if (went_without) {
            CHECK(nth > 0);
            return;
        }
        REQUIRE(nth < 1000);
    }
}

TEST_CASE("a request for a reload is answered once, whatever throws", "[examples]") {
    small_server s;
    struct told {
        std::atomic<int> begun{0}, first{0}, second{0};
        std::atomic<bool> as_it_is{false}, without{false}, goes{false};
    };
    const auto eventually = [](const auto& f) {
        for (int i = 0; i < 1000 && !f(); ++i) std::this_thread::sleep_for(10ms);
        return f();
    };
    // Two ask while the thread that reloads answers somebody: it comes to both at once, after `f`.
    const auto two_ask = [&](const std::shared_ptr<told>& t, auto f, auto then) {
        s.core->reload_soon([&core = *s.core, t, f, then](std::string_view) {
            core.reload_soon([t](std::string_view) {
                ++t->first;
                throw std::bad_alloc();
            });
            core.reload_soon([t, then](std::string_view why) {
                then(why);
                ++t->second;
            });
            ++t->begun;
            f();
        });
        REQUIRE(eventually([&] { return t->begun == 1; }));
    };
    SECTION("its thread has no memory") {
        const bool recovers = GENERATE(true, false), valid = GENERATE(true, false);
        CAPTURE(recovers, valid);
        if (!valid) std::ofstream(s.folder / "tenants") << "name=chat memory=nonsense\n";
        for (std::size_t nth = 0;; ++nth) {
            CAPTURE(nth);
            const auto t = std::make_shared<told>();
            two_ask(
                t, [=] { this_heap = {.good = nth, .recovers = recovers}; },
                [=](std::string_view why) {
                    t->without = this_heap.allocations <= nth;
                    this_heap = {};
                    t->as_it_is = why.empty() == valid && why != "std::bad_alloc";
                });
            REQUIRE(eventually([&] { return t->second == 1; }));
            CHECK(t->first == 1);
            if (t->without) {
                CHECK(nth > 0);  // there were some
                CHECK(t->as_it_is);
                break;
            }
            REQUIRE(nth < 1000);
        }
        CHECK(s.core->reload().empty() == valid);
        CHECK(s.core->authenticate("key-of-chat").who != nullptr);
    }
    SECTION("a change that came while there was no memory comes later by itself") {
        const auto t = std::make_shared<told>();
        two_ask(
            t,
            [file = s.folder / "tenants"] {
                std::ofstream(file, std::ios::app) << "name=late api_key=key-of-late memory=64KiB compute=20%\n";
                this_heap = {.good = 0};
            },
            [t](std::string_view why) {
                t->without = why == "std::bad_alloc";
                this_heap = {};
            });
        REQUIRE(eventually([&] { return t->second == 1; }));
        CHECK(t->without);
        CHECK(eventually([&] {
            try {
                return s.core->authenticate("key-of-late").who != nullptr;
            } catch (const refused&) {
                return false;
            }
        }));
    }
    SECTION("the server goes") {
        const auto t = std::make_shared<told>();
        two_ask(
            t,
            [=] {
                while (!t->goes) std::this_thread::yield();
                std::this_thread::sleep_for(50ms);  // most often it is told to stop by then
            },
            [](std::string_view) {});
        t->goes = true;
        s.core.reset();
        CHECK(t->first == 1);
        CHECK(t->second == 1);
    }
}

}  // namespace inference_server_memory_test

#endif
