// SPDX-License-Identifier: Apache-2.0
#include "serving/server.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <future>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/serving/usage_journal.hpp>

#include "inference_server/client.hpp"
#include "inference_server/http_server.hpp"
#include "inference_server/openvino/voice_detector.hpp"
#include "inference_server/openvino_engines.hpp"
#include "inference_server/service.hpp"
#include "serving/server_process.hpp"

namespace bench::serving {

namespace {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;

constexpr int repeats = 5;

double at(std::vector<double> values, double quantile) {
    std::ranges::sort(values);
    return values[std::min(values.size() - 1, static_cast<std::size_t>(quantile * static_cast<double>(values.size())))];
}
double p99(const std::vector<double>& values) { return at(values, 0.99); }

// ---- beside both others

void print(const char* what, const std::vector<double>& ms) {
    std::printf("#   %-8s %zu requests: median %.2f ms, 90 %% %.2f, 99 %% %.2f, longest %.2f\n", what, ms.size(),
                at(ms, 0.5), at(ms, 0.9), p99(ms), at(ms, 1));
    std::fflush(stdout);
}

/// Runs the tenant with a latency bound alone, then beside two tenants with four requests in
/// progress each: a reader of pages, and a language model or a reader of lines.
void beside_others(report& r, bool language_model, const std::string& suffix, const std::string& setting) {
    std::vector<std::string> options{"--sms", "2"};
    if (language_model) options.emplace_back("--gemma-terms-accepted");
    const server_process server("name=chat api_key=key-of-chat memory=512MiB compute=20% priority=1 slo=50ms" +
                                    setting +
                                    "\nname=pages api_key=key-of-pages memory=512MiB compute=30%\n"
                                    "name=texts api_key=key-of-texts memory=900MiB compute=50%\n",
                                options);
    const auto asked = [&](std::uint64_t seed) {
        return asked_by_schedule(server.port(), sound("key-of-chat"), 100, 8s, seed);
    };
    std::vector<double> solo_ms, beside_ms, ratio, pages, texts;
    std::printf("# 2 SMs, chat:%s; beside both others:\n", setting.empty() ? " a priority alone" : setting.c_str());
    (void)asked(0);
    for (std::uint64_t i = 1; i <= repeats; ++i) {
        const auto solo = asked(i);
        print("alone", solo);
        const neighbour reads(server.port(), page("key-of-pages"), 4);
        const neighbour writes(server.port(), language_model ? text("key-of-texts") : line("key-of-texts"), 4);
        // The first request loads a model.
        while (reads.answered() == 0 || writes.answered() == 0) std::this_thread::sleep_for(100ms);
        const auto begin = clock::now();
        const double read = static_cast<double>(reads.answered()), written = static_cast<double>(writes.answered());
        const auto beside = asked(i);
        print("beside", beside);
        const double lasted = std::chrono::duration<double>(clock::now() - begin).count();
        pages.push_back((static_cast<double>(reads.answered()) - read) / lasted);
        texts.push_back((static_cast<double>(writes.answered()) - written) / lasted);
        if (pages.back() == 0 || texts.back() == 0) throw std::runtime_error("a neighbour did nothing");
        solo_ms.push_back(p99(solo));
        beside_ms.push_back(p99(beside));
        ratio.push_back(beside_ms.back() / solo_ms.back());
    }
    r.figure("serving.http_p99_vs_solo" + suffix, ratio, "x");
    r.figure("serving.http_p99_solo_ms" + suffix, solo_ms, "ms");
    r.figure("serving.http_p99_ms" + suffix, beside_ms, "ms");
    r.figure("serving.http_pages_per_s" + suffix, pages, "pages/s");
    r.figure("serving.http_texts_per_s" + suffix, texts, "texts/s");
}

// ---- what is between a client and an engine; bills

/// The server in this process, so that the benchmark can call its parts and read the device's
/// ledger.
struct server_here {
    explicit server_here(const temporary_folder& f)
        : core({.tenants = written(f),
                .journal = f.path + "/usage",
                .node = {.memory = gpushare::bytes{std::uint64_t{1} << 30}, .sms = 2}},
               inference_server::openvino_models(false)),
          http(core, {}) {}
    static std::string written(const temporary_folder& f) {
        auto path = f.path + "/tenants";
        std::ofstream(path) << "name=chat api_key=key-of-chat memory=256MiB compute=60% priority=1\n"
                               "name=pages api_key=key-of-pages memory=256MiB compute=40%\n";
        return path;
    }
    inference_server::service core;
    inference_server::http_server http;
};

/// Sends half a second of sound in three ways in turn: over HTTP, directly to the service, and as a
/// launch on a stream outside any limiter. Requests come at random, 40 a second, and each latency
/// counts from the scheduled time.
class ways_in {
public:
    explicit ways_in(server_here& s)
        : server_(s),
          who_(s.core.authenticate("key-of-chat")),
          connection_(s.http.port()),
          stream_(s.core.node().make_stream({0})) {
        request_ = inference_server::parse_infer(sound_.body, std::stoul(sound_.more.substr(sound_.more.find(' '))));
        const auto samples = request_.inputs[0].as<float>();
        std::ranges::copy(samples, padded_.begin() + detector_.context);
    }

    /// The medians in microseconds.
    [[nodiscard]] std::array<double, 3> measure(std::size_t rounds) {
        std::array<std::vector<double>, 3> us;
        auto due = clock::now() + 10ms;
        for (std::size_t n = 0; n < 3 * rounds; ++n) {
            auto request = request_;
            std::this_thread::sleep_until(due);
            switch (n % 3) {
                case 0: over_http(); break;
                case 1: by_service(std::move(request)); break;
                default: by_stream(); break;
            }
            us[n % 3].push_back(std::chrono::duration<double, std::micro>(clock::now() - due).count());
            due += std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(gap_(any_)));
        }
        return {at(us[0], 0.5), at(us[1], 0.5), at(us[2], 0.5)};
    }

private:
    void over_http() {
        if (connection_.ask("POST", sound_.path, sound_.key, sound_.body, sound_.more).status != 200)
            throw std::runtime_error("not answered");
    }
    void by_service(inference_server::infer_request r) {
        std::promise<bool> told;
        server_.core.infer(who_, "voice", std::move(r), [&](const inference_server::answer& a) {
            told.set_value(std::holds_alternative<inference_server::infer_response>(a));
        });
        if (!told.get_future().get()) throw std::runtime_error("refused");
    }
    void by_stream() {
        stream_.launch({}, [this](auto&) {
            detector_.begin();
            keep(detector_.hear(padded_)[0]);
        });
        (void)stream_.record().wait(gpushare::never);
    }

    server_here& server_;
    inference_server::service::caller who_;
    inference_server::connection connection_;
    const question sound_ = sound("key-of-chat");
    inference_server::infer_request request_;
    gpushare::host::stream stream_;
    inference_server::openvino::voice_detector detector_;
    std::array<float, inference_server::openvino::voice_detector::samples> padded_{};
    std::mt19937_64 any_{1};
    std::exponential_distribution<> gap_{40};
};

void overheads(report& r) {
    const temporary_folder folder;
    server_here server(folder);
    ways_in asked(server);
    std::vector<double> protocol, ours;
    (void)asked.measure(20);
    for (int i = 0; i < repeats; ++i) {
        const auto [http, service, stream] = asked.measure(60);
        std::printf("#   sound: %.0f us over HTTP, %.0f handed to the service, %.0f launched\n", http, service, stream);
        protocol.push_back(http - service);
        ours.push_back(service - stream);
    }
    r.figure("serving.http_overhead_us_of_protocol", protocol, "us");
    r.figure("serving.http_overhead_us_of_gpushare", ours, "us");
}

/// The difference in nanoseconds between the device time in the journal of a stopped server and the
/// device's own ledger: the larger value of two tenants. `planted` is the smaller difference to a
/// ledger that lacks a block.
struct bill_error {
    double off = 0, planted = std::numeric_limits<double>::infinity();
};
bill_error bill_minus_ledger() {
    const temporary_folder folder;
    std::array<std::uint32_t, 2> tags{};
    constexpr std::array names{"chat", "pages"};
    gpushare::host::ledger::page ledger;
    {
        server_here server(folder);
        const auto chat = server.core.authenticate("key-of-chat").who,
                   pages = server.core.authenticate("key-of-pages").who;
        tags = {chat->tag(), pages->tag()};
        {
            const neighbour reads(server.http.port(), page("key-of-pages"), 4);
            (void)asked_by_schedule(server.http.port(), sound("key-of-chat"), 100, 3s, 1);
        }
        for (const auto& t : {chat, pages}) t->submit([](auto&) {}).wait();
        ledger = server.core.node().ledger({0}).take();
    }
    if (ledger.dropped != 0) throw std::runtime_error("the ledger isn't complete");
    gpushare::usage_invoices bill(gpushare::wall_time::min(), gpushare::wall_time::max());
    if (gpushare::usage_journal::read(folder.path + "/usage", [&](const gpushare::usage_line& l) { bill.add(l); }) != 0)
        throw std::runtime_error("a line was torn");
    bill_error worst;
    for (std::size_t n = 0; n < 2; ++n) {
        gpushare::ns by_ledger{};
        for (const auto& b : ledger.blocks)
            if (b.tag == tags[n]) by_ledger += b.end - b.start;
        const auto billed = bill.of(names[n]).device_time;
        if (billed.count() == 0 || by_ledger.count() == 0) throw std::runtime_error("no device time to compare");
        std::printf("#   %s: %.3f s of device time billed\n", names[n], std::chrono::duration<double>(billed).count());
        const auto off = [&](gpushare::ns truth) {
            return std::abs(static_cast<double>((billed - truth / 2).count()));
        };
        const auto& lacks = *std::ranges::find(ledger.blocks, tags[n], &gpushare::host::block_record::tag);
        worst.off = std::max(worst.off, off(by_ledger));
        worst.planted = std::min(worst.planted, off(by_ledger - (lacks.end - lacks.start)));
    }
    return worst;
}

// ---- sleep

void sleeps(report& r) {
    const server_process server("name=pages api_key=key-of-pages memory=512MiB compute=100%\n", {"--idle-after", "4"});
    inference_server::connection c(server.port());
    const auto ask = [&](const question& q) {
        if (c.ask("POST", q.path, q.key, q.body, q.more).status != 200) throw std::runtime_error("not answered");
    };
    const auto wake = page("key-of-pages");
    const question says{"/v2/models/letters/generate", "key-of-pages", R"({"text_input":"a","max_tokens":4000})"};
    const std::array<std::string, 2> levels{"caches dropped", "weights released"};
    std::array<std::vector<double>, 2> cold, idle;
    std::vector<double> awake, warm;
    for (int i = 0; i < repeats; ++i)
        for (std::size_t n = 0; n < levels.size(); ++n) {
            ask(wake);
            const auto timed = [&](std::vector<double>& into) {
                const auto begin = clock::now();
                ask(wake);
                into.push_back(std::chrono::duration<double, std::milli>(clock::now() - begin).count());
            };
            timed(warm);
            ask(says);  // last, so that both models are idle from now on
            awake.push_back(server.tenant("pages").used);
            const auto end = clock::now() + 30s;
            server_process::seen seen;
            do {
                if (clock::now() > end) throw std::runtime_error("no model sleeps");
                std::this_thread::sleep_for(50ms);
                seen = server.tenant("pages");
            } while (std::ranges::count(seen.models, levels[n]) != 2);
            // The server destroys a model's engine after it reports the model as asleep, and trims
            // the tenant's pool after that.
            std::this_thread::sleep_for(500ms);
            idle[n].push_back(server.tenant("pages").used);
            timed(cold[n]);
        }
    r.figure("serving.http_idle_tenant_bytes_awake", awake, "B");
    r.figure("serving.http_warm_ms", warm, "ms");
    for (std::size_t n = 0; n < levels.size(); ++n) {
        auto name = levels[n];
        std::ranges::replace(name, ' ', '_');
        r.figure("serving.http_cold_start_ms_" + name, cold[n], "ms");
        r.figure("serving.http_idle_tenant_bytes_" + name, idle[n], "B");
    }
}

}  // namespace

void through_the_server(report& r, bool language_model) {
    beside_others(r, language_model, "", "");
    beside_others(r, language_model, "_keeping_an_sm", " keeps=50%");
    overheads(r);
    sleeps(r);
    std::vector<double> apart;
    double planted = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 3; ++i) {
        const auto b = bill_minus_ledger();
        apart.push_back(b.off);
        planted = std::min(planted, b.planted);
    }
    r.figure("serving.http_bill_minus_ledger", apart, "ns", {at_most(0), planted, "a ledger that lacks a block"},
             statistic::most);
}

}  // namespace bench::serving
