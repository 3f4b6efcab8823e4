// SPDX-License-Identifier: Apache-2.0
// Starts the example server as a process, and sends requests over the loopback interface: on a
// schedule that doesn't wait for answers, or one request after another.
//
//   server_process server("name=chat api_key=key-of-chat memory=64MiB compute=100%\n", {"--sms", "2"});
//   neighbour busy(server.port(), page("key-of-batch"), 4);
//   const auto ms = asked_by_schedule(server.port(), sound("key-of-chat"), 100, 5s, seed);
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace inference_server {
class connection;
}

namespace bench::serving {

/// A folder with a unique name. The destructor removes the folder.
struct temporary_folder {
    temporary_folder();
    temporary_folder(const temporary_folder&) = delete;
    temporary_folder& operator=(const temporary_folder&) = delete;
    ~temporary_folder();
    std::string path;
};

class server_process {
public:
    /// Throws std::runtime_error if the server doesn't start.
    server_process(std::string_view tenants, const std::vector<std::string>& options);
    server_process(const server_process&) = delete;
    server_process& operator=(const server_process&) = delete;
    /// Stops the server as an operator would.
    ~server_process();

    [[nodiscard]] std::uint16_t port() const noexcept { return port_; }
    [[nodiscard]] std::uint16_t grpc_port() const noexcept { return grpc_port_; }
    [[nodiscard]] bool runs() const;
    /// The bytes of memory that the process doesn't share.
    [[nodiscard]] std::size_t memory() const;
    /// The tenant's current charge, and the sleep level of each of its models.
    struct seen {
        double used = 0;
        std::vector<std::string> models;
    };
    [[nodiscard]] seen tenant(std::string_view name) const;

private:
    temporary_folder folder_;
    ::pid_t process_ = -1;
    std::uint16_t port_ = 0, admin_port_ = 0, grpc_port_ = 0;
};

/// A request to the server.
struct question {
    std::string path, key, body;
    std::string more{};  ///< further header lines
};
/// An input of a model: its name, its type and shape as in JSON (`[1,16]`), and its bytes.
struct input {
    std::string_view name, type, shape, data;
};
/// A request whose inputs follow the JSON as raw bytes. With `bytes_back`, the answer has its
/// outputs in the same form.
[[nodiscard]] question of_inputs(std::string path, std::string_view key, std::span<const input> inputs,
                                 bool bytes_back = false);
/// Half a second of sound.
[[nodiscard]] question sound(std::string_view key);
/// Pictures with bars in place of lines of text; the reader finds and reads the bars, whatever the
/// result. A page has four bars, a line has one.
[[nodiscard]] question page(std::string_view key);
[[nodiscard]] question line(std::string_view key);
/// 32 tokens of the language model.
[[nodiscard]] question text(std::string_view key);
/// A request to the server's smallest model, which takes almost no time.
[[nodiscard]] question nothing(std::string_view key);

/// Sends one request over its own connection and returns the answer. Throws std::runtime_error if
/// the server refuses.
using asker = std::function<std::string()>;
/// Sends requests at random times (Poisson) that are fixed beforehand, over up to 32 connections,
/// whether or not earlier requests have been answered. Returns the milliseconds from each request's
/// scheduled time to its answer, in the order of the schedule. Throws std::runtime_error if an
/// answer differs from the first answer.
[[nodiscard]] std::vector<double> asked_by_schedule(const std::function<asker()>& connect, double per_second,
                                                    std::chrono::milliseconds lasts, std::uint64_t seed);
/// The same over HTTP.
[[nodiscard]] std::vector<double> asked_by_schedule(std::uint16_t port, const question& what, double per_second,
                                                    std::chrono::milliseconds lasts, std::uint64_t seed);

/// Sends one request over an open connection. Throws std::runtime_error if the server refuses.
[[nodiscard]] std::string answer_to(inference_server::connection& c, const question& q);

/// Sends one request after another over each of its connections until it is destroyed.
class neighbour {
public:
    neighbour(std::uint16_t port, const question& what, std::size_t connections);
    /// The number of answers so far.
    [[nodiscard]] std::uint64_t answered() const noexcept { return answered_.load(std::memory_order_relaxed); }

private:
    std::atomic<std::uint64_t> answered_{0};  // relaxed, because the number is only a count
    std::vector<std::jthread> threads_;
};

}  // namespace bench::serving
