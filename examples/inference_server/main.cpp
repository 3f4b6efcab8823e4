// SPDX-License-Identifier: Apache-2.0
// Puts the parts together: a service, and the protocols that serve it. SIGHUP reads the file of
// tenants again. SIGTERM and SIGINT answer the existing requests and end the program, with status 3
// if an engine's call doesn't end. A second one of these signals doesn't wait.
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "inference_server/http_server.hpp"
#ifdef INFERENCE_SERVER_GRPC
#include "inference_server/grpc_server.hpp"
#endif
#ifdef INFERENCE_SERVER_OPENVINO
#include "inference_server/openvino_engines.hpp"
#endif
#ifdef INFERENCE_SERVER_ONNX
#include "inference_server/onnx_models.hpp"
#endif
#ifdef INFERENCE_SERVER_TORCH
#include "inference_server/torch_engines.hpp"
#endif

namespace {

using namespace std::chrono_literals;
using namespace inference_server;

unsigned number(std::string_view name, std::string_view text, unsigned most) {
    unsigned n = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), n);
    if (code != std::errc{} || end != text.data() + text.size() || n > most)
        throw std::invalid_argument(std::string(name) + ": '" + std::string(text) + "' isn't a number up to " +
                                    std::to_string(most));
    return n;
}

#ifdef INFERENCE_SERVER_ON_CUDA

constexpr const char* usage_of_node = R"(  --device N           the device, by CUDA's number (0)
  --find-device        print the device's name and SMs, and end; with status 3 if there is no device
)";

/// Whether the option belongs to the node.
bool set_node(node_options& o, std::string_view name, std::string_view value) {
    if (name == "--sms" || name == "--memory")
        throw std::invalid_argument("'" + std::string(name) + "' is for models on the host; see --help");
    if (name == "--device") o.devices = {static_cast<int>(number(name, value, 1023))};
    return name == "--device";
}

/// Prints the device. Returns the program's status.
int find_device() try {
    const server_node node(usual_node());
    return std::printf("%s, %u SMs\n", node.properties(server_device).name.data(), sms_of(node)) < 0;
} catch (const gpushare::error& e) {
    std::fprintf(stderr, "inference_server: %s\n", e.what());
    return 3;
}

#else

constexpr const char* usage_of_node = R"(  --sms N              the number of the device's SMs (2)
  --memory MIB         the device's memory, in MiB (1024)
)";

bool set_node(node_options& o, std::string_view name, std::string_view value) {
    if (name == "--sms") o.sms = number(name, value, 1024);
    if (name == "--memory") o.memory = gpushare::bytes{std::uint64_t{number(name, value, 1U << 20)} << 20};
    return name == "--sms" || name == "--memory";
}

#endif

constexpr const char* usage = R"(usage: inference_server --tenants FILE [OPTION...]

  --tenants FILE       the tenants and their API keys; see tenants_file.hpp. The server reads the file again when it
                       changes. A tenant can have its own models, as  model=detector.onnx cut_to=5ms  (docs/serving.md,
                       "Models of a tenant's own")
  --journal FILE       write each tenant's usage to this file, a line at a time
  --address A          the address for HTTP and gRPC (127.0.0.1). Before you choose another one, read docs/serving.md,
                       "Facing a network"
  --port N             the port for HTTP (8000)
  --grpc-port N        the port for gRPC (8001)
  --admin-port N       the port for metrics, the status page and the timeline; only on 127.0.0.1 (8002)
%s  --idle-after S       give back a model's weights after this many seconds without a request (60)
  --drain S            at the end, wait this many seconds for answers (20), and ten more for calls that still run
  --torch FOLDER       also serve the folder's models by libtorch: NAME.pt as TorchScript, NAME.pt2 as a package of
                       AOTInductor; NAME.json describes each model. See torch_engines.hpp
  --gemma-terms-accepted   also serve Gemma 3 270M, whose weights are under Google's terms,
                       https://ai.google.dev/gemma/terms

SIGHUP makes the server read the file of tenants again. SIGTERM or SIGINT ends the server; after a second one the
server doesn't wait for anything. The exit status is 0; or 3 if an engine's call still runs after the bills are
written; or 1 after an error.
)";

struct options {
    service_options service;
    http_options http;
    std::uint16_t grpc_port = 8001;
    std::chrono::milliseconds drain{20'000};
    bool gemma = false;
    std::string torch;  ///< a folder of models; empty for none
};

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
        else if (name == "--torch")
            o.torch = value;
        else if (name == "--idle-after")
            o.service.idle_after = std::chrono::seconds(number(name, value, 1'000'000));
        else if (name == "--drain")
            o.drain = std::chrono::seconds(number(name, value, 86'400));
        else if (!set_node(o.service.node, name, value))
            throw std::invalid_argument("unknown option '" + std::string(name) + "'; see --help");
    }
    if (o.service.tenants.empty()) throw std::invalid_argument("--tenants FILE is missing; see --help");
    return o;
}

/// The number of connections that the process can have, since each connection is a file.
std::size_t allow_many_files() {
    ::rlimit files{};
    if (::getrlimit(RLIMIT_NOFILE, &files) != 0) return 1024;
    files.rlim_cur = files.rlim_max;
    (void)::setrlimit(RLIMIT_NOFILE, &files);
    return static_cast<std::size_t>(std::min<::rlim_t>(files.rlim_cur, 1U << 20U));
}

std::string with_port(const std::string& address, unsigned port) {
    const bool is_v6 = address.find(':') != std::string::npos;
    return (is_v6 ? "[" + address + "]:" : address + ":") + std::to_string(port);
}

/// Gives each protocol as many connections as there are files for.
front_door::limits within(front_door::limits l, std::size_t files) {
    l.most = std::min(l.most, connections_for(files));
    l.strangers = std::min(l.strangers, l.most);
    return l;
}

std::vector<model_source> models([[maybe_unused]] const options& o) {
    std::vector<model_source> all;
#ifdef INFERENCE_SERVER_ON_CUDA  // other models compute on the host
    if (o.torch.empty()) throw std::invalid_argument("--torch FOLDER is missing: on CUDA there are no other models");
#else
    all = {tiny_mlp(), tiny_letters(), tensor_parallel_block(), busy_model("busy", 2ms)};
#endif
#ifdef INFERENCE_SERVER_OPENVINO
    for (auto& m : openvino_models(o.gemma)) all.push_back(std::move(m));
#else
    if (o.gemma)
        throw std::invalid_argument("--gemma-terms-accepted: built without OpenVINO; ./dev serve builds with it");
#endif
    if (o.torch.empty()) return all;
#ifdef INFERENCE_SERVER_TORCH
    for (auto& m : torch_models(o.torch)) all.push_back(std::move(m));
#else
    throw std::invalid_argument("--torch: built without libtorch; ./dev serve --torch builds with it");
#endif
    return all;
}

/// Adds models in ONNX's format, by the engines that were built in.
service_options with_onnx(service_options o) {
#ifdef INFERENCE_SERVER_ONNX
    std::vector<onnx_engine> engines;
#ifdef INFERENCE_SERVER_ONNXRUNTIME
    engines.push_back(onnxruntime_of(INFERENCE_SERVER_ONNXRUNTIME));
#endif
    o.model_of = onnx_models(std::move(engines));
#endif
    return o;
}

/// How long calls may go on after their answers aren't awaited any more.
constexpr gpushare::ns grace = 10s;

void run(const options& o) {
    ::sigset_t signals;
    ::sigemptyset(&signals);
    for (const int s : {SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&signals, s);
    // blocked in all threads, because this thread waits for them
    ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    // The calls themselves report a client that is gone, and a journal that can't grow any further.
    for (const int s : {SIGPIPE, SIGXFSZ}) ::signal(s, SIG_IGN);
    const auto files = allow_many_files();

    service s(with_onnx(o.service), models(o));
    auto how = o.http;
    how.connections = within(how.connections, files);
    http_server http(s, how);
    std::printf("HTTP http://%s, operators http://127.0.0.1:%u\n", with_port(how.address, http.port()).c_str(),
                unsigned{http.admin_port()});
#ifdef INFERENCE_SERVER_GRPC
    grpc_options rpc{.address = how.address, .port = o.grpc_port};
    rpc.connections = within(rpc.connections, files);
    grpc_server grpc(s, rpc);
    std::printf("gRPC %s\n", with_port(rpc.address, grpc.port()).c_str());
#endif
    std::fflush(stdout);
    for (int signal = SIGHUP; signal == SIGHUP;) {
        if (::sigwait(&signals, &signal) != 0) break;
        // a TERM that comes in the meantime takes effect at once
        if (signal == SIGHUP) s.reload_soon([](std::string_view) {});
    }
    const std::stop_source second;  // requested by the second signal: ends all waits
    const auto until = gpushare::saturating_add(s.now(), gpushare::ns{o.drain});
    const std::jthread second_signal([&](const std::stop_token& over) {
        const ::timespec often{0, 50'000'000};
        while (!over.stop_requested()) {
            const int signal_now = ::sigtimedwait(&signals, nullptr, &often);
            if (signal_now != SIGINT && signal_now != SIGTERM) continue;
            second.request_stop();
            http.hurry();
#ifdef INFERENCE_SERVER_GRPC
            grpc.hurry();
#endif
        }
    });
    if (!s.drain(until, second.get_token())) std::fprintf(stderr, "inference_server: some requests aren't answered\n");
    const auto patience = [&] {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - s.now());
        return second.stop_requested() ? 0ms : std::max(left, 1'000ms);
    };
#ifdef INFERENCE_SERVER_GRPC
    grpc.stop(patience());
#endif
    http.stop(patience());
    const auto running = s.stop(gpushare::saturating_add(std::max(until, s.now()), grace), second.get_token());
    if (!running.empty()) leave(running);
}

}  // namespace

int main(int argc, char** argv) {
    const std::vector<std::string_view> words(argv + 1, argv + argc);
    if (words == std::vector<std::string_view>{"--help"}) return std::printf(usage, usage_of_node) < 0;
#ifdef INFERENCE_SERVER_ON_CUDA
    if (words == std::vector<std::string_view>{"--find-device"}) return find_device();
#endif
    try {
        run(parse(words));
    } catch (const std::exception& e) {
        std::fprintf(stderr, "inference_server: %s\n", e.what());
        return 1;
    }
}
