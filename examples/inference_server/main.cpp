// SPDX-License-Identifier: Apache-2.0
// Puts the parts together: a service, and the protocols that it is reached by. SIGHUP reads the file of tenants again; SIGTERM and SIGINT
// answer what was asked and end.
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "inference_server/http_server.hpp"
#ifdef INFERENCE_SERVER_GRPC
#include "inference_server/grpc_server.hpp"
#endif
#ifdef INFERENCE_SERVER_OPENVINO
#include "inference_server/openvino_engines.hpp"
#endif

namespace {

using namespace std::chrono_literals;
using namespace inference_server;

constexpr const char* usage = R"(usage: inference_server --tenants FILE [OPTION...]

  --tenants FILE       who may ask, by which keys: see tenants_file.hpp; read again when it changes
  --journal FILE       what each tenant uses, line by line
  --address A          of HTTP and gRPC (127.0.0.1)
  --port N             HTTP (8000)
  --grpc-port N        gRPC (8001)
  --admin-port N       metrics, status page, timeline; on 127.0.0.1 alone (8002)
  --sms N              of the device (2)
  --memory MIB         of the device (1024)
  --idle-after S       seconds after which the weights of a model that nobody asks for are given back (60)
  --drain S            seconds that answers may take at the end (20)
  --gemma-terms-accepted   with Gemma 3 270M, whose weights are under Google's terms, https://ai.google.dev/gemma/terms
)";

struct options {
    service_options service;
    http_options http;
    std::uint16_t grpc_port = 8001;
    std::chrono::milliseconds drain{20'000};
    bool gemma = false;
};

unsigned number(std::string_view name, std::string_view text, unsigned most) {
    unsigned n = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), n);
    if (code != std::errc{} || end != text.data() + text.size() || n > most)
        throw std::invalid_argument(std::string(name) + ": '" + std::string(text) + "' isn't a number up to " +
                                    std::to_string(most));
    return n;
}

options parse(const std::vector<std::string_view>& words) {
    options o;
    o.http.port = 8000;
    o.http.admin_port = 8002;
    for (std::size_t i = 0; i < words.size(); ++i) {
        const auto name = words[i];
        if (name == "--gemma-terms-accepted") {
            o.gemma = true;
            continue;
        }
        if (i + 1 == words.size())
            throw std::invalid_argument(std::string(name) + " isn't an option with a value; see --help");
        const auto value = words[++i];
        const auto port = [&] { return static_cast<std::uint16_t>(number(name, value, 65535)); };
        if (name == "--tenants")
            o.service.tenants = value;
        else if (name == "--journal")
            o.service.journal = value;
        else if (name == "--address")
            o.http.address = value;
        else if (name == "--port")
            o.http.port = port();
        else if (name == "--grpc-port")
            o.grpc_port = port();
        else if (name == "--admin-port")
            o.http.admin_port = port();
        else if (name == "--sms")
            o.service.node.sms = number(name, value, 1024);
        else if (name == "--memory")
            o.service.node.memory = gpushare::bytes{std::uint64_t{number(name, value, 1U << 20)} << 20};
        else if (name == "--idle-after")
            o.service.idle_after = std::chrono::seconds(number(name, value, 1'000'000));
        else if (name == "--drain")
            o.drain = std::chrono::seconds(number(name, value, 86'400));
        else
            throw std::invalid_argument("unknown option '" + std::string(name) + "'; see --help");
    }
    if (o.service.tenants.empty()) throw std::invalid_argument("--tenants FILE is missing; see --help");
    return o;
}

/// A connection is a file.
void allow_many_files() {
    ::rlimit files{};
    if (::getrlimit(RLIMIT_NOFILE, &files) != 0) return;
    files.rlim_cur = files.rlim_max;
    (void)::setrlimit(RLIMIT_NOFILE, &files);
}

std::vector<model_source> models([[maybe_unused]] const options& o) {
    std::vector<model_source> all{tiny_mlp(), tiny_letters(), tensor_parallel_block(), busy_model("busy", 2ms)};
#ifdef INFERENCE_SERVER_OPENVINO
    for (auto& m : openvino_models(o.gemma)) all.push_back(std::move(m));
#else
    if (o.gemma)
        throw std::invalid_argument("--gemma-terms-accepted: built without OpenVINO; ./dev serve builds with it");
#endif
    return all;
}

void run(const options& o) {
    ::sigset_t signals;
    ::sigemptyset(&signals);
    for (const int s : {SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&signals, s);
    ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // of all threads: this one waits for them
    ::signal(SIGPIPE, SIG_IGN);
    allow_many_files();

    service s(o.service, models(o));
    http_server http(s, o.http);
    std::printf("HTTP http://%s:%u, operators http://127.0.0.1:%u\n", o.http.address.c_str(), unsigned{http.port()},
                unsigned{http.admin_port()});
#ifdef INFERENCE_SERVER_GRPC
    grpc_server grpc(s, {.address = o.http.address, .port = o.grpc_port});
    std::printf("gRPC %s:%u\n", o.http.address.c_str(), unsigned{grpc.port()});
#endif
    std::fflush(stdout);
    for (int signal = SIGHUP; signal == SIGHUP;) {
        if (::sigwait(&signals, &signal) != 0) break;
        if (signal == SIGHUP) (void)s.reload();
    }
    const auto began = std::chrono::steady_clock::now();
    if (!s.drain(gpushare::saturating_add(s.now(), o.drain)))
        std::fprintf(stderr, "inference_server: some requests aren't answered\n");
    const auto left = [&] {
        const auto took = std::chrono::steady_clock::now() - began;
        return std::max(o.drain - std::chrono::duration_cast<std::chrono::milliseconds>(took), 1'000ms);
    };
#ifdef INFERENCE_SERVER_GRPC
    grpc.stop(left());  // streams that nobody closes stay as long
#endif
    http.stop(left());
}

}  // namespace

int main(int argc, char** argv) {
    const std::vector<std::string_view> words(argv + 1, argv + argc);
    if (words == std::vector<std::string_view>{"--help"}) return std::printf("%s", usage) < 0;
    try {
        run(parse(words));
    } catch (const std::exception& e) {
        std::fprintf(stderr, "inference_server: %s\n", e.what());
        return 1;
    }
}
