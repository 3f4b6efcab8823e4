// SPDX-License-Identifier: Apache-2.0
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "inference_server/client.hpp"
#include "inference_server/json.hpp"
#include "serving/grpc_client.hpp"
#include "serving/server.hpp"
#include "serving/server_process.hpp"

namespace bench::serving {

namespace {

using namespace std::chrono_literals;
using inference_server::connection;

constexpr double mib = 1 << 20;
constexpr std::string_view tenants =
    "name=chat api_key=key-of-chat memory=64MiB compute=60% priority=1\n"
    "name=noise api_key=key-of-noise memory=64MiB compute=40%\n";

// ---- malformed requests

class malformed {
public:
    explicit malformed(std::uint64_t seed) : any_(seed) {}

    /// A request with a correct head and either a bad body or an unknown target. The server keeps
    /// the connection open.
    [[nodiscard]] std::string with_bad_body() {
        std::string path = "/v2/models/mlp/infer", body = good_, more;
        switch (below(12)) {
            case 0: body.resize(below(body.size())); break;
            case 1: body[below(body.size())] = static_cast<char>(any_()); break;
            case 2: body.insert(below(body.size()), bytes(1 + below(20))); break;
            case 3: body = bytes(below(300)); break;
            case 4: path = "/v2/models/" + word() + "/infer"; break;
            case 5: body = with(R"([1,16])", "[" + number() + "," + number() + "]"); break;
            case 6: body = with("FP32", one_of({"FP16", "INT64", "BYTES", "FP33", "", "BOOL", "UINT8"})); break;
            case 7: body = with("INPUT", word()); break;
            case 8: body = with(R"([0.5)", "[" + number()); break;
            case 9: body = std::string(below(2000), one_of({"[", "{", "{\"a\":", "\"", "\\"})[0]); break;
            case 10: more = "Inference-Header-Content-Length: " + one_of({"0", "2", "17", "5000"}) + "\r\n"; break;
            default:
                path = "/v2/models/letters/generate";
                body = R"({"text_input":)" +
                       one_of({"1", "null", "\"\xff\"", "{}", "\"a\",\"max_tokens\":-1", "\"a\",\"max_tokens\":1e99"}) +
                       "}";
        }
        return request("POST", path, "key-of-noise", body, more);
    }
    /// A request after which the server must close the connection: the key is unknown, or the text
    /// isn't HTTP.
    [[nodiscard]] std::string last() {
        switch (below(11)) {
            case 0: return request("POST", "/v2/models/mlp/infer", word(), good_);
            case 9:
                return request("POST", "/v2/models/mlp/infer", "key-of-noise", good_,
                               "Inference-Header-Content-Length: " + number() + "\r\n");
            case 1:
                return request(
                    "GET",
                    one_of({"/../etc/passwd", "/v2/%2e%2e/x", "/%", "/v2/models//infer", "//", "/v2/\\"}) + word(),
                    "key-of-noise", {});
            case 2:
                return request(one_of({"BREW", "DELETE", "PUT", "CONNECT", "get"}), "/v2/models/mlp/infer",
                               "key-of-noise", good_);
            case 3: return bytes(1 + below(300)) + "\r\n\r\n";
            case 4: return request("GET", "/v2", "key-of-noise", {}, std::string(8000 + below(2000), 'a') + ": b\r\n");
            case 5:
                return "POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
                       "key-of-noise\r\nContent-Length: " +
                       number() + "\r\n\r\n" + good_;
            case 6:
                return "POST /v2/models/mlp/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
                       "key-of-noise\r\nTransfer-Encoding: "
                       "chunked\r\n\r\n" +
                       bytes(below(100));
            case 7: return "GET /v2 HTTP/" + number() + "\r\n\r\n";
            case 8: return request("GET", "/v2", "key-of-noise", {}, bytes(below(50)) + "\r\n");
            default: {
                auto cut = request("POST", "/v2/models/mlp/infer", "key-of-noise", good_);
                cut.resize(1 + below(cut.size() - 1));
                return cut;
            }
        }
    }

private:
    [[nodiscard]] std::size_t below(std::size_t n) { return static_cast<std::size_t>(any_() % n); }
    [[nodiscard]] std::string one_of(std::vector<std::string> all) { return all[below(all.size())]; }
    [[nodiscard]] std::string bytes(std::size_t n) {
        std::string s(n, 0);
        for (auto& c : s) c = static_cast<char>(any_());
        return s;
    }
    [[nodiscard]] std::string word() {
        std::string s(1 + below(20), 0);
        for (auto& c : s) c = static_cast<char>('a' + below(26));
        return s;
    }
    [[nodiscard]] std::string number() {
        return one_of({"-1", "0", "2", "17", "99999999999", "18446744073709551615", "18446744073709551616", "1e999",
                       "0x10", "NaN", "\"1\"", "", "1 1", "9223372036854775808"});
    }
    [[nodiscard]] std::string with(std::string_view what, const std::string& instead) const {
        auto s = good_;
        return s.replace(s.find(what), what.size(), instead);
    }
    [[nodiscard]] static std::string request(const std::string& method, const std::string& path, const std::string& key,
                                             const std::string& body, const std::string& more = {}) {
        return method + " " + path + " HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer " + key + "\r\n" + more +
               "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
    }

    std::mt19937_64 any_;
    const std::string good_ =
        R"({"inputs":[{"name":"INPUT","datatype":"FP32","shape":[1,16],"data":[0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5]}]})";
};

/// Sends a million malformed requests through sockets. Each connection sends fifteen requests that
/// keep it open, then one that closes it. Meanwhile, another tenant's requests come on a schedule,
/// and all must be answered.
void bad_requests(report& r, std::uint64_t wanted) {
    const server_process server(tenants, {});
    malformed any(20261125);
    std::vector<double> others;
    std::uint64_t refused = 0, ended = 0, valid = 0;
    double before = 0;
    {
        const std::jthread good([&](const std::stop_token& stop) {
            for (std::uint64_t seed = 1; !stop.stop_requested(); ++seed) {
                const auto some = asked_by_schedule(server.port(), nothing("key-of-chat"), 20, 2s, seed);
                others.insert(others.end(), some.begin(), some.end());
            }
        });
        constexpr int together = 15;
        for (std::uint64_t n = 0; refused + ended < wanted; ++n) {
            std::string all;
            for (int i = 0; i < together; ++i) all += any.with_bad_body();
            connection c(server.port());
            c.send(all + any.last());
            c.end_of_requests();
            for (int i = 0; i <= together; ++i) {
                const int status = c.answer().status;
                if (status == 0 && i < together) throw std::runtime_error("a connection was closed that should stay");
                if (status == 0)
                    ++ended;  // no answer, as for half a request
                else if (status == 500 || status == 503 || status > 505)
                    throw std::runtime_error("a malformed request was answered by " + std::to_string(status));
                else
                    ++(status < 400 ? valid : refused);
            }
            c.reset_at_end();
            // A tenth is done, and everything is warm.
            if (n == wanted / 160) before = static_cast<double>(server.memory());
        }
    }
    if (!server.runs()) throw std::runtime_error("the server ended");
    std::printf("# %llu refused, %llu connections ended without an answer, %llu were valid after all and not counted\n",
                static_cast<unsigned long long>(refused), static_cast<unsigned long long>(ended),
                static_cast<unsigned long long>(valid));
    std::printf("# another tenant meanwhile: %zu requests, all answered\n", others.size());
    std::ranges::sort(others);
    r.figure("serving.bad_requests_survived", {static_cast<double>(refused + ended)}, "requests");
    r.figure("serving.bad_requests_growth_mib", {(static_cast<double>(server.memory()) - before) / mib}, "MiB");
    r.figure("serving.bad_requests_others_p99_ms", {others[others.size() * 99 / 100]}, "ms");
}

// ---- the bound on what others notice

/// Sixteen connections continuously send requests that take as long to read as a short request can
/// and that the server refuses. Another tenant's requests come on a schedule. These requests may
/// wait for one such message of the attacker, and for 4 KiB of each connection.
struct attack {
    /// Returns a function with a connection of its own. The function sends a bad request of `bytes`
    /// bytes and returns whether the server refused it properly.
    std::function<std::function<bool(std::size_t bytes)>(std::string key)> connect;
    /// Latencies of the other tenant, in ms.
    std::function<std::vector<double>(std::uint64_t seed)> others;
};
constexpr int attackers = 16;
constexpr std::size_t longest = 65'000, quick = 4'000;
constexpr double a_second = 50;
constexpr auto lasts = 4s;

std::string attacked_tenants() {
    std::string all = "name=chat api_key=key-of-chat memory=64MiB compute=60% priority=1\n";
    for (int i = 0; i < attackers; ++i) {
        const auto n = std::to_string(i);
        all += "name=noise" + n + " api_key=key-of-noise" + n + " memory=16MiB compute=2%\n";
    }
    return all;
}

/// The results of tests/clients/attacks.py, from attackers without a key and from attackers as one
/// tenant.
struct attacked {
    double survived = 0, memory_mib = 0;
    /// Added to a neighbour's P99 by attackers without a key.
    double more_over_http_ms = 0, more_over_grpc_ms = 0;
};
std::optional<attacked> by_attacks(report& r) {
    const temporary_folder folder;
    const auto file = folder.path + "/attacked.json";
    if (std::system(("python3 " GPUSHARE_BENCH_ATTACKS " " GPUSHARE_BENCH_SERVER " --json " + file).c_str()) != 0) {
        for (const auto* name : {"serving.attacks_survived", "serving.attacked_memory_mib"})
            r.is_void(name, "an attack went otherwise than it should; see what it printed");
        return std::nullopt;
    }
    std::ifstream in(file);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    const auto seen = inference_server::json::parse(text);
    const auto more = [&](const char* protocol) {
        return seen.at("worst_ms").at(protocol).number<double>() - seen.at("alone_ms").at(protocol).number<double>();
    };
    return attacked{seen.at("survived").number<double>(), seen.at("memory_mib").number<double>(), more("http"),
                    more("grpc")};
}

/// `over` is part of the figures' names. `more_by_strangers` is the time in milliseconds that
/// attackers without a key add to a neighbour's P99.
void longest_requests(report& r, const std::string& over, const attack& by, double more_by_strangers) {
    constexpr int rounds = 5;
    std::atomic<int> sent{0}, otherwise{0};
    const auto median_ms = [&](std::size_t bytes) {
        std::vector<double> takes;
        const auto ask = by.connect("key-of-noise0");
        for (int i = 0; i < 100; ++i) {
            const auto began = std::chrono::steady_clock::now();
            if (!ask(bytes)) ++otherwise;
            takes.push_back(
                std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count());
        }
        std::ranges::nth_element(takes, takes.begin() + 50);
        return takes[50];
    };
    const auto p99_of_others = [&](std::uint64_t seed) {
        auto some = by.others(seed);
        std::ranges::sort(some);
        return some[some.size() * 99 / 100];
    };
    const auto attacked_p99 = [&](int noisy, std::uint64_t seed) {
        // Each thread sends its next request as soon as the previous one is answered.
        std::vector<std::jthread> attack;
        for (int i = 0; i < attackers; ++i)
            attack.emplace_back([&, i](const std::stop_token& stop) {
                const auto ask = by.connect("key-of-noise" + std::to_string(i % noisy));
                while (!stop.stop_requested() && otherwise == 0) ++(ask(longest) ? sent : otherwise);
            });
        return p99_of_others(seed);
    };
    std::vector<double> ratios, planted, attacked, one, per_s;
    for (int round = 0; round < rounds; ++round) {
        const auto seed = static_cast<std::uint64_t>(3 * round + 1);
        const double alone = p99_of_others(seed);
        one.push_back(median_ms(longest));
        const double bound = alone + one.back() + attackers * median_ms(quick);
        sent = 0;
        const auto began = std::chrono::steady_clock::now();
        attacked.push_back(attacked_p99(1, seed + 1));
        per_s.push_back(sent / std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
        ratios.push_back(std::max(attacked.back(), alone + more_by_strangers) / bound);
        planted.push_back(attacked_p99(attackers, seed + 2) / bound);
        if (otherwise != 0)
            return r.is_void("serving.attacked_" + over + "p99_vs_bound",
                             "a request wasn't refused as one that is wrong");
    }
    r.figure("serving.attacked_" + over + "p99_vs_bound", ratios, "x",
             {at_most(1), std::ranges::min(planted),
              "each connection is of a tenant of its own, so that turns are of connections"});
    r.figure("serving.attacked_" + over + "p99_ms", attacked, "ms");
    r.figure("serving.bad_" + over + "request_of_64kib_ms", one, "ms");
    r.figure("serving.attacked_" + over + "bad_requests_per_s", per_s, "1/s");
}

/// A request whose tensor is longer than its shape says.
std::string many_numbers(std::size_t bytes) {
    std::string body = R"({"inputs":[{"name":"INPUT","datatype":"FP32","shape":[1,16],"data":[0.5)";
    while (body.size() < bytes) body += ",0.123456789";
    return body + "]}]}";
}

void over_http(report& r, double more_by_strangers) {
    const server_process server(attacked_tenants(), {});
    // The body is long enough that tenants take turns while the server reads it.
    const question other{
        "/v2/models/mlp/infer", "key-of-chat",
        R"({"inputs":[{"name":"INPUT","datatype":"FP32","shape":[1,16],"data":[1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,6]}]})" +
            std::string(5'000, ' ')};
    longest_requests(
        r, "",
        {[&](std::string key) -> std::function<bool(std::size_t)> {
             return [=, c = std::make_shared<connection>(server.port()), long_one = many_numbers(longest),
                     short_one = many_numbers(quick)](std::size_t bytes) {
                 return c->ask("POST", "/v2/models/mlp/infer", key, bytes == quick ? short_one : long_one).status ==
                        400;
             };
         },
         [&](std::uint64_t seed) { return asked_by_schedule(server.port(), other, a_second, lasts, seed); }},
        more_by_strangers);
}

/// The request has tens of thousands of texts for a model that takes numbers.
void over_grpc(report& r, double more_by_strangers) {
    const server_process server(attacked_tenants(), {});
    longest_requests(r, "grpc_",
                     {[&](std::string key) -> std::function<bool(std::size_t)> {
                          return [=, c = std::make_shared<grpc_client>(server.grpc_port()),
                                  long_one = many_texts(longest), short_one = many_texts(quick)](std::size_t bytes) {
                              constexpr int invalid_argument = 3;
                              return c->infer(key, bytes == quick ? short_one : long_one) == invalid_argument;
                          };
                      },
                      [&](std::uint64_t seed) {
                          const auto connect = [&]() -> asker {
                              return [c = std::make_shared<grpc_client>(server.grpc_port()), right = small_row()] {
                                  if (c->infer("key-of-chat", right) != 0)
                                      throw std::runtime_error("it wasn't answered");
                                  return std::string();
                              };
                          };
                          return asked_by_schedule(connect, a_second, lasts, seed);
                      }},
                     more_by_strangers);
}

// ---- thousands of connections

/// Each connection sends most of a request's head, which the server must keep, and later sends the
/// rest.
void many_connections(report& r, std::size_t wanted) {
    ::rlimit files{};
    (void)::getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    (void)::setrlimit(RLIMIT_NOFILE, &files);  // the server does the same
    if (files.rlim_cur < wanted + 100)
        return r.is_void("serving.connections", "a process may open " + std::to_string(files.rlim_cur) + " files here");
    const server_process server(tenants, {});
    const auto head = "GET /v2/health/live HTTP/1.1\r\nHost: bench\r\nX-Padding: " + std::string(7000, 'a');
    {
        connection warm(server.port());
        (void)warm.ask("GET", "/v2/health/live");
    }
    const double before = static_cast<double>(server.memory());
    std::vector<connection> held;
    for (std::size_t i = 0; i < wanted; ++i) {
        held.emplace_back(server.port());
        held.back().send(head);
    }
    // Other clients are still served.
    const auto others = asked_by_schedule(server.port(), nothing("key-of-chat"), 100, 3s, 1);
    const double grown = static_cast<double>(server.memory()) - before;
    std::size_t answered = 0;
    for (auto& c : held) c.send("\r\n\r\n");
    for (auto& c : held) answered += c.answer().status == 200 ? 1 : 0;
    std::printf(
        "# %zu connections, each with 7 KB of a head that isn't complete: %.1f MiB; another tenant's requests "
        "meanwhile: longest %.1f ms\n",
        wanted, grown / mib, std::ranges::max(others));
    r.figure("serving.connections", {static_cast<double>(answered)}, "connections");
    r.figure("serving.connections_mib", {grown / mib}, "MiB");
}

/// Runs MLPerf's load generator in the same way as ./dev check clients.
void load_generator(report& r) {
    if (!std::filesystem::exists(GPUSHARE_BENCH_PYTHON))
        return r.is_void("serving.loadgen_valid", "mlcommons-loadgen isn't installed; ./dev setup clients fetches it");
    const auto command =
        std::string(GPUSHARE_BENCH_PYTHON " " GPUSHARE_BENCH_CLIENTS " " GPUSHARE_BENCH_SERVER " loadgen");
    r.figure("serving.loadgen_valid", {std::system(command.c_str()) == 0 ? 1.0 : 0.0}, "");
}

}  // namespace

void from_outside(report& r) {
    bad_requests(r, 1'000'000);
    const auto seen = by_attacks(r);
    if (seen) {
        r.figure("serving.attacks_survived", {seen->survived}, "attacks");
        r.figure("serving.attacked_memory_mib", {seen->memory_mib}, "MiB");
    }
    over_http(r, seen ? seen->more_over_http_ms : 0);
    over_grpc(r, seen ? seen->more_over_grpc_ms : 0);
    many_connections(r, 5000);
    load_generator(r);
}

}  // namespace bench::serving
