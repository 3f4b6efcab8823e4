// SPDX-License-Identifier: Apache-2.0
// Measures the time to the first token in the server when two tenants receive texts in alternating
// bursts and readers are slow. In one case, each tenant has half of the cache memory. In the other
// case, each tenant has little memory and borrows what the other tenant doesn't use. The clients
// call the service directly: a socket would accept a whole text at once, and no text would hold
// memory for long.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <future>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "inference_server/service.hpp"
#include "serving/server.hpp"
#include "serving/server_process.hpp"

namespace bench::serving {

namespace {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;

// Each tenant has a burst every four seconds. A reader asks for eight tokens at a time, 30 times.
constexpr std::chrono::milliseconds burst = 1s, apart = 2s, whole = 12s, reads_for = 20ms;
constexpr double in_burst = 30, else_ = 1;  // texts per second
constexpr std::uint32_t piece = 8, tokens = 240;

/// Each text holds a cache of 176 KiB for at least 0.6 s. The memory has room for about 22 texts.
struct split_server {
    explicit split_server(const std::string& memory)
        : core({.tenants = written(folder, memory),
                .node = {.memory = gpushare::bytes{std::uint64_t{4} << 20}, .sms = 2}},
               {inference_server::tiny_letters()}),
          who{core.authenticate("key-of-chat"), core.authenticate("key-of-code")} {}
    static std::string written(const temporary_folder& f, const std::string& memory) {
        auto path = f.path + "/tenants";
        std::ofstream(path) << "name=chat api_key=key-of-chat compute=50% queue_limit=1000 stack=direct " << memory
                            << "\nname=code api_key=key-of-code compute=50% queue_limit=1000 stack=direct " << memory
                            << '\n';
        return path;
    }
    /// Reads a text to the end; returns the time of the first token.
    clock::time_point read(std::size_t tenant) {
        std::atomic<clock::rep> first{0};
        const auto text =
            core.generate(who[tenant], "letters", {.prompt = std::string(100, 'a'), .most_tokens = tokens});
        for (bool last = false; !last;) {
            const auto next = clock::now() + reads_for;
            std::promise<inference_server::token_stream::end> told;
            text->more(
                piece,
                [&](const std::string&) {
                    clock::rep none = 0;
                    first.compare_exchange_strong(none, clock::now().time_since_epoch().count());
                    return true;
                },
                [&](inference_server::token_stream::end e) { told.set_value(std::move(e)); });
            const auto end = told.get_future().get();
            if (end.why) throw inference_server::refused(*end.why);
            last = end.last;
            if (!last) std::this_thread::sleep_until(next);
        }
        return clock::time_point(clock::duration(first));
    }

    temporary_folder folder;
    inference_server::service core;
    std::array<inference_server::service::caller, 2> who;
};

/// The times to the first token in milliseconds. Texts arrive at random, at a high rate in bursts
/// and at a low rate in between.
std::vector<double> first_tokens(split_server& server, std::uint64_t seed) {
    struct due {
        clock::duration at;
        std::size_t tenant;
    };
    std::vector<due> all;
    std::mt19937_64 any(seed);
    for (std::size_t tenant = 0; tenant < 2; ++tenant)
        for (clock::duration at{}; at < whole;) {
            const auto began = at / apart * apart;
            const bool bursts = static_cast<std::size_t>(at / apart) % 2 == tenant && at < began + burst;
            const auto next = at + std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(
                                       std::exponential_distribution<>(bursts ? in_burst : else_)(any)));
            const clock::duration edge = at < began + burst ? began + burst : began + apart;
            if (next < edge) all.push_back({next, tenant});
            at = std::min(next, edge);  // draws again at the next phase's rate
        }
    std::ranges::sort(all, {}, &due::at);
    std::vector<double> ms(all.size());
    std::atomic<std::size_t> next{0};
    std::atomic<bool> broken{false};
    const auto begin = clock::now() + 50ms;
    {
        std::vector<std::jthread> clients;
        for (int i = 0; i < 200; ++i)
            clients.emplace_back([&] {
                for (std::size_t n; (n = next++) < all.size();) {
                    const auto at = begin + all[n].at;
                    std::this_thread::sleep_until(at);
                    try {
                        ms[n] = std::chrono::duration<double, std::milli>(server.read(all[n].tenant) - at).count();
                    } catch (const std::exception& e) {
                        std::printf("# %s\n", e.what());
                        broken = true;
                    }
                }
            });
    }
    if (broken) throw std::runtime_error("a text wasn't answered");
    std::ranges::sort(ms);
    return ms;
}

}  // namespace

void cache_bursts(report& r) {
    std::vector<double> ratio, fixed, elastic;
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
        const auto p99 = [&](const std::string& memory) {
            split_server server(memory);
            for (std::size_t tenant = 0; tenant < 2; ++tenant) (void)server.read(tenant);  // loads the models
            const auto ms = first_tokens(server, seed);
            const double late = ms[ms.size() * 99 / 100];
            std::printf("#   %-24s %zu texts: first token median %.1f ms, 99 %% %.1f, longest %.1f\n", memory.c_str(),
                        ms.size(), ms[ms.size() / 2], late, ms.back());
            std::fflush(stdout);
            return late;
        };
        fixed.push_back(p99("memory=2MiB"));
        elastic.push_back(p99("memory=256KiB burst=all"));
        ratio.push_back(fixed.back() / elastic.back());
    }
    r.figure("serving.kv_burst_ttft_ratio", ratio, "x");
    r.figure("serving.kv_burst_ttft_static_ms", fixed, "ms");
    r.figure("serving.kv_burst_ttft_elastic_ms", elastic, "ms");
}

}  // namespace bench::serving
