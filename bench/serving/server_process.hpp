// SPDX-License-Identifier: Apache-2.0
// The example server as a process of its own, and those who ask it over loopback: by a schedule
// that doesn't wait for answers, or one request after the other.
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

/// A folder of its own that goes with it.
struct temporary_folder {
    temporary_folder();
    temporary_folder(const temporary_folder&) = delete;
    temporary_folder& operator=(const temporary_folder&) = delete;
    ~temporary_folder();
    std::string path;
};

class server_process {
public:
    /// Throws std::runtime_error where it doesn't start.
    server_process(std::string_view tenants, const std::vector<std::string>& options);
    server_process(const server_process&) = delete;
    server_process& operator=(const server_process&) = delete;
    /// Ends it as an operator does.
    ~server_process();

    [[nodiscard]] std::uint16_t port() const noexcept { return port_; }
    [[nodiscard]] std::uint16_t grpc_port() const noexcept { return grpc_port_; }
    [[nodiscard]] bool runs() const;
    /// Bytes that are the process's own.
    [[nodiscard]] std::size_t memory() const;
    /// What the tenant is charged now, and how deep each of its models sleeps.
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

/// What is asked.
struct question {
    std::string path, key, body;
    std::string more{};  ///< lines of the head
};
/// An input of a model: its type and shape as JSON has them (`[1,16]`), and its bytes.
struct input {
    std::string_view name, type, shape, data;
};
/// The inputs follow the JSON as bytes, as many as there are. `bytes_back`: so do the outputs of
/// the answer.
[[nodiscard]] question of_inputs(std::string path, std::string_view key, std::span<const input> inputs,
                                 bool bytes_back = false);
/// Half a second of sound.
[[nodiscard]] question sound(std::string_view key);
/// Bars where lines of text would be, which are found and read, whatever they say: three of them,
/// or one.
[[nodiscard]] question page(std::string_view key);
[[nodiscard]] question line(std::string_view key);
/// 32 tokens of the language model.
[[nodiscard]] question text(std::string_view key);
/// What costs the server's smallest model nothing.
[[nodiscard]] question nothing(std::string_view key);

/// Asks once, over a connection of its own, and returns the answer. Throws std::runtime_error where
/// it is refused.
using asker = std::function<std::string()>;
/// Asks at times by chance (Poisson) that are fixed beforehand, whether or not others have been
/// answered, by as many askers as are needed. Milliseconds from when each was due until its answer
/// was there, in the order in which they were due. Throws std::runtime_error for an answer that
/// isn't like the others.
[[nodiscard]] std::vector<double> asked_by_schedule(const std::function<asker()>& connect, double per_second,
                                                    std::chrono::milliseconds lasts, std::uint64_t seed);
/// The same over HTTP.
[[nodiscard]] std::vector<double> asked_by_schedule(std::uint16_t port, const question& what, double per_second,
                                                    std::chrono::milliseconds lasts, std::uint64_t seed);

/// Asks once over a connection that is open. Throws std::runtime_error where it is refused.
[[nodiscard]] std::string answer_to(inference_server::connection& c, const question& q);

/// Asks one request after the other over each of its connections, until it goes.
class neighbour {
public:
    neighbour(std::uint16_t port, const question& what, std::size_t connections);
    /// How many were answered so far.
    [[nodiscard]] std::uint64_t answered() const noexcept { return answered_.load(std::memory_order_relaxed); }

private:
    std::atomic<std::uint64_t> answered_{0};  // relaxed: a count
    std::vector<std::jthread> threads_;
};

}  // namespace bench::serving
