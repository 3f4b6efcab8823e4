// SPDX-License-Identifier: Apache-2.0
#include "serving/server_process.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <utility>

#include "inference_server/client.hpp"
#include "inference_server/json.hpp"

namespace bench::serving {

using inference_server::connection;

temporary_folder::temporary_folder() {
    path = (std::filesystem::temp_directory_path() / "gpushare_bench_XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("no temporary folder");
}
temporary_folder::~temporary_folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
}

server_process::server_process(std::string_view tenants, const std::vector<std::string>& options) {
    std::ofstream(folder_.path + "/tenants") << tenants;
    std::vector<std::string> words{GPUSHARE_BENCH_SERVER, "--tenants", folder_.path + "/tenants"};
    for (const char* word : {"--port", "0", "--grpc-port", "0", "--admin-port", "0", "--memory", "2048"})
        words.emplace_back(word);
    words.insert(words.end(), options.begin(), options.end());
    std::vector<char*> argv;
    for (auto& w : words) argv.push_back(w.data());
    argv.push_back(nullptr);
    int pipe[2];
    if (::pipe2(pipe, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    process_ = ::fork();
    if (process_ < 0) throw std::runtime_error("no process");
    if (process_ == 0) {
        (void)::prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)::dup2(pipe[1], STDOUT_FILENO);
        (void)::execv(argv[0], argv.data());
        ::_exit(127);
    }
    (void)::close(pipe[1]);
    std::FILE* const said = ::fdopen(pipe[0], "r");
    unsigned port = 0, admin = 0, grpc = 0;
    const int found = std::fscanf(said, "HTTP http://127.0.0.1:%u, operators http://127.0.0.1:%u gRPC 127.0.0.1:%u",
                                  &port, &admin, &grpc);
    (void)std::fclose(said);
    if (found != 3) {
        (void)::kill(process_, SIGKILL);
        (void)::waitpid(process_, nullptr, 0);
        throw std::runtime_error("the example server didn't start");
    }
    port_ = static_cast<std::uint16_t>(port);
    grpc_port_ = static_cast<std::uint16_t>(grpc);
    admin_port_ = static_cast<std::uint16_t>(admin);
}

server_process::~server_process() {
    (void)::kill(process_, SIGTERM);
    int status = 0;
    if (::waitpid(process_, &status, 0) == process_ && status == 0) return;
    std::fprintf(stderr, "the example server ended with wait status %d\n", status);
    // A server that ends with an error voids all figures.
    if (std::uncaught_exceptions() == 0) std::abort();
}

bool server_process::runs() const {
    ::siginfo_t how{};
    return ::waitid(P_PID, static_cast<::id_t>(process_), &how, WEXITED | WNOHANG | WNOWAIT) == 0 && how.si_pid == 0;
}

std::size_t server_process::memory() const {
    std::size_t all = 0, resident = 0, shared = 0;
    std::ifstream("/proc/" + std::to_string(process_) + "/statm") >> all >> resident >> shared;
    return (resident - shared) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

server_process::seen server_process::tenant(std::string_view name) const {
    namespace json = inference_server::json;
    connection operators(admin_port_);
    const auto answer = operators.ask("GET", "/status.json");
    for (const auto& t : json::parse(answer.body).at("tenants").elements()) {
        if (t.at("name").string() != name) continue;
        seen s{t.at("used").number<double>(), {}};
        for (const auto& m : t.at("models").elements()) s.models.push_back(m.at("state").string());
        return s;
    }
    throw std::runtime_error("the server doesn't know the tenant");
}

question of_inputs(std::string path, std::string_view key, std::span<const input> inputs, bool bytes_back) {
    std::string head = bytes_back ? R"({"parameters":{"binary_data_output":true},"inputs":[)" : R"({"inputs":[)", data;
    for (const auto& i : inputs) {
        if (head.back() == '}') head += ',';
        head.append(R"({"name":")").append(i.name).append(R"(","datatype":")").append(i.type);
        head.append(R"(","shape":)").append(i.shape);
        head.append(R"(,"parameters":{"binary_data_size":)").append(std::to_string(i.data.size())).append("}}");
        data.append(i.data);
    }
    head += "]}";
    auto more = "Inference-Header-Content-Length: " + std::to_string(head.size()) + "\r\n";
    return {std::move(path), std::string(key), head.append(data), std::move(more)};
}

namespace {

question binary(std::string path, std::string_view key, std::string_view name, std::string_view type,
                std::string_view shape, std::string_view data) {
    return of_inputs(std::move(path), key, std::array{input{name, type, shape, data}});
}

template <class T>
std::string_view bytes_of(const std::vector<T>& all) {
    return {reinterpret_cast<const char*>(all.data()), all.size() * sizeof(T)};
}

question bars(std::string_view key, int rows, int columns) {
    std::vector<std::uint8_t> image;
    for (int y = 0; y < rows; ++y)
        for (int x = 0; x < columns; ++x)
            image.push_back(y % 80 > 60 && 30 < x && x < columns - 70 && x % 18 > 8 ? 0 : 255);
    return binary("/v2/models/reader/infer", key, "image", "UINT8",
                  "[" + std::to_string(rows) + "," + std::to_string(columns) + "]", bytes_of(image));
}

}  // namespace

question sound(std::string_view key) {
    std::vector<float> samples(8000);
    for (std::size_t i = 0; i < samples.size(); ++i) samples[i] = 0.1F * std::sin(static_cast<float>(i) / 7);
    return binary("/v2/models/voice/infer", key, "samples", "FP32", "[8000]", bytes_of(samples));
}
question page(std::string_view key) { return bars(key, 320, 320); }
question line(std::string_view key) { return bars(key, 96, 320); }
question text(std::string_view key) {
    return {"/v2/models/gemma/generate", std::string(key), R"({"text_input":"Once upon a time","max_tokens":32})"};
}
question nothing(std::string_view key) {
    const std::vector<float> row(16, 0.5F);
    return binary("/v2/models/mlp/infer", key, "INPUT", "FP32", "[1,16]", bytes_of(row));
}

std::string answer_to(connection& c, const question& q) {
    auto r = c.ask("POST", q.path, q.key, q.body, q.more);
    if (r.status != 200) throw std::runtime_error(q.path + ": " + std::to_string(r.status) + " " + r.body);
    return std::move(r.body);
}

std::vector<double> asked_by_schedule(const std::function<asker()>& connect, double per_second,
                                      std::chrono::milliseconds lasts, std::uint64_t seed) {
    using clock = std::chrono::steady_clock;
    using seconds = std::chrono::duration<double>;
    std::mt19937_64 any(seed);
    std::exponential_distribution<> gap(per_second);
    std::vector<seconds> due;
    for (double at = gap(any); at < seconds(lasts).count(); at += gap(any)) due.emplace_back(at);

    // The number of requests that can be in progress. With all connections busy, the next request
    // starts late; its latency includes the delay, because latencies count from the scheduled time.
    constexpr std::size_t connections = 32;
    std::vector<asker> open;
    for (std::size_t i = 0; i < connections; ++i) open.push_back(connect());
    const auto right = open[0]();  // loads the model
    std::vector<double> took(due.size());
    std::atomic<std::size_t> next{0};
    std::mutex mutex;
    std::exception_ptr wrong;
    const auto begin = clock::now() + std::chrono::milliseconds(50);
    {
        std::vector<std::jthread> askers;
        for (auto& ask : open)
            askers.emplace_back([&] {
                try {
                    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < due.size();) {
                        const auto at = begin + std::chrono::duration_cast<clock::duration>(due[i]);
                        std::this_thread::sleep_until(at);
                        if (ask() != right) throw std::runtime_error("another answer");
                        took[i] = std::chrono::duration<double, std::milli>(clock::now() - at).count();
                    }
                } catch (...) {
                    const std::lock_guard lock(mutex);
                    wrong = std::current_exception();
                }
            });
    }
    if (wrong) std::rethrow_exception(wrong);
    return took;
}

std::vector<double> asked_by_schedule(std::uint16_t port, const question& what, double per_second,
                                      std::chrono::milliseconds lasts, std::uint64_t seed) {
    const auto connect = [&]() -> asker {
        return [&, c = std::make_shared<connection>(port)] { return answer_to(*c, what); };
    };
    return asked_by_schedule(connect, per_second, lasts, seed);
}

neighbour::neighbour(std::uint16_t port, const question& what, std::size_t connections) {
    connection first(port);
    (void)answer_to(first, what);  // loads the model
    for (std::size_t i = 0; i < connections; ++i)
        threads_.emplace_back([this, port, what](const std::stop_token& stop) {
            try {
                for (connection c(port); !stop.stop_requested();) {
                    (void)answer_to(c, what);
                    answered_.fetch_add(1, std::memory_order_relaxed);
                }
            } catch (const std::exception& e) {
                std::fprintf(stderr, "a neighbour: %s\n", e.what());
                std::abort();
            }
        });
}

}  // namespace bench::serving
