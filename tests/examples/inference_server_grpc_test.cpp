// SPDX-License-Identifier: Apache-2.0
// The inference server's gRPC as seen by clients that keep to no rules: over loopback, frame by
// frame. Never asserts a duration.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <nghttp2/nghttp2.h>

#include "inference_server/client.hpp"
#include "inference_server/grpc_server.hpp"
#include "open_inference.pb.h"
#include "support/catch.hpp"
#include "support/folder.hpp"
#include "support/sanitizers.hpp"

namespace inference_server_grpc_test {

using namespace inference_server;
using namespace std::chrono_literals;

namespace {

enum kind : std::uint8_t { data, headers, priority, rst, settings, push, ping, go_away, window, continuation };
constexpr std::uint8_t end_stream = 1, ack = 1, end_headers = 4;

std::string frame(kind k, std::uint8_t flags, std::uint32_t stream, std::string_view payload = {}) {
    const auto n = static_cast<std::uint32_t>(payload.size());
    std::string f;
    for (const std::uint32_t byte : {n >> 16U, n >> 8U, n, std::uint32_t{k}, std::uint32_t{flags}, stream >> 24U,
                                     stream >> 16U, stream >> 8U, stream})
        f += static_cast<char>(byte);
    return f.append(payload);
}
std::string field(std::string_view name, std::string_view value) {
    std::string f(1, '\0');
    for (const auto text : {name, value}) {
        auto n = text.size();
        if (n < 127) {
            f += static_cast<char>(n);
        } else {
            f += '\x7f';
            for (n -= 127; n >= 128; n /= 128) f += static_cast<char>(n % 128 + 128);
            f += static_cast<char>(n);
        }
        f += text;
    }
    return f;
}
std::string head(std::string_view method, std::string_view key, const std::string& more = {}) {
    auto h = field(":method", "POST") + field(":scheme", "http") + field(":authority", "x") +
             field(":path", "/inference.GRPCInferenceService/" + std::string(method)) +
             field("content-type", "application/grpc") + more;
    return key.empty() ? h : h + field("authorization", "Bearer " + std::string(key));
}
std::string message(std::string_view body, char flag = 0) {
    const auto n = static_cast<std::uint32_t>(body.size());
    return std::string{flag, static_cast<char>(n >> 24U), static_cast<char>(n >> 16U), static_cast<char>(n >> 8U),
                       static_cast<char>(n)}
        .append(body);
}

/// A client by hand.
class client {
public:
    /// Sends the first bytes of the connection, and `apart` of them a little earlier.
    explicit client(std::uint16_t port, std::size_t apart = 0) : to_(port) {
        if (nghttp2_hd_inflate_new(&heads_) != 0) throw std::bad_alloc();
        const auto first = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings, 0, 0);
        to_.send(first.substr(0, apart));
        if (apart != 0) std::this_thread::sleep_for(50ms);
        to_.send(first.substr(apart));
    }
    client(client&& other) noexcept : to_(std::move(other.to_)), heads_(std::exchange(other.heads_, nullptr)) {}
    client& operator=(client&&) = delete;
    ~client() {
        if (heads_ != nullptr) nghttp2_hd_inflate_del(heads_);
    }

    void send(std::string_view bytes) const { to_.send(bytes); }
    std::uint32_t open(std::string_view method, std::string_view key = {}, const std::string& more = {}) {
        stream_ += 2;
        send(frame(headers, end_headers, stream_, head(method, key, more)));
        return stream_;
    }
    void say(std::uint32_t stream, std::string_view body, bool last = true) const {
        send(frame(data, last ? end_stream : 0, stream, message(body)));
    }
    struct call {
        int status = -1;      ///< of gRPC; -1: it was reset, or the connection ended
        std::string bytes{};  ///< of messages
    };
    /// What became of the call, once it is over.
    call end_of(std::uint32_t stream) {
        call& c = calls_[stream];
        while (!over_[stream] && receive()) {
        }
        return c;
    }
    call ask(std::string_view method, std::string_view key, std::string_view body, const std::string& more = {}) {
        const auto s = open(method, key, more);
        say(s, body);
        return end_of(s);
    }
    /// Whether the server closes it.
    bool ends() {
        while (receive()) {
        }
        return true;
    }
    /// What has come of the call.
    const call& so_far(std::uint32_t stream) { return calls_[stream]; }
    bool answers_pings = true;

    /// Takes a frame. Returns false if the server has closed the connection.
    bool receive() {
        const auto start = bytes(9);
        if (start.empty()) return false;
        const auto at = [&](std::size_t i) { return std::uint32_t{static_cast<unsigned char>(start[i])}; };
        const auto size = at(0) << 16U | at(1) << 8U | at(2);
        const auto stream = at(5) << 24U | at(6) << 16U | at(7) << 8U | at(8);
        const auto payload = bytes(size);
        if (payload.size() < size) return false;
        if (at(3) == settings && (at(4) & ack) == 0) send(frame(settings, ack, 0));
        if (at(3) == ping && (at(4) & ack) == 0 && answers_pings) send(frame(ping, ack, 0, payload));
        if (at(3) == data) calls_[stream].bytes += payload;
        if (at(3) == headers) read_head(stream, payload);
        if (at(3) == rst || ((at(3) == headers || at(3) == data) && (at(4) & end_stream) != 0)) over_[stream] = true;
        return true;
    }

private:
    std::string bytes(std::size_t n) {
        while (got_.size() < n) {
            char some[4096];
            const auto more = to_.receive_some(some);
            if (more.empty()) return {};
            got_ += more;
        }
        auto b = got_.substr(0, n);
        got_.erase(0, n);
        return b;
    }
    void read_head(std::uint32_t stream, std::string_view block) {
        for (int ends = 0; (ends & NGHTTP2_HD_INFLATE_FINAL) == 0;) {
            nghttp2_nv f{};
            const auto n = nghttp2_hd_inflate_hd2(heads_, &f, &ends,
                                                  reinterpret_cast<const std::uint8_t*>(block.data()), block.size(), 1);
            if (n < 0) throw std::runtime_error("a head that can't be read");
            block.remove_prefix(static_cast<std::size_t>(n));
            const std::string name(reinterpret_cast<const char*>(f.name), f.namelen),
                value(reinterpret_cast<const char*>(f.value), f.valuelen);
            if ((ends & NGHTTP2_HD_INFLATE_EMIT) != 0 && name == "grpc-status")
                calls_[stream].status = std::stoi(value);
        }
        nghttp2_hd_inflate_end_headers(heads_);
    }

    connection to_;
    nghttp2_hd_inflater* heads_ = nullptr;
    std::uint32_t stream_ = static_cast<std::uint32_t>(-1);
    std::string got_;
    std::map<std::uint32_t, call> calls_;
    std::map<std::uint32_t, bool> over_;
};

constexpr std::string_view two_tenants =
    "name=chat api_key=key-of-chat memory=16MiB compute=60%\nname=batch api_key=key-of-batch memory=16MiB "
    "compute=40%\n";
constexpr std::string_view chat_key = "key-of-chat", batch_key = "key-of-batch";

struct server {
    explicit server(grpc_options options = {}) {
        write(two_tenants);
        core = std::make_unique<service>(
            service_options{.tenants = folder / "tenants", .node = {.memory = gpushare::bytes{64 << 20}, .sms = 2}},
            std::vector<model_source>{tiny_mlp(), tiny_letters()});
        rpc = std::make_unique<grpc_server>(*core, std::move(options));
    }
    void write(std::string_view tenants) const {
        folder.write("next", tenants);
        std::filesystem::rename(folder / "next", folder / "tenants");
    }
    [[nodiscard]] client connect() const { return client(rpc->port()); }

    const support::folder folder;
    std::unique_ptr<service> core;
    std::unique_ptr<grpc_server> rpc;
};

std::string row() {
    inference::ModelInferRequest m;
    m.set_model_name("mlp");
    auto& i = *m.add_inputs();
    i.set_name("INPUT");
    i.set_datatype("FP32");
    i.add_shape(1);
    i.add_shape(16);
    m.add_raw_input_contents(std::string(64, '\0'));
    return m.SerializeAsString();
}
std::string text(int tokens) {
    inference::ModelInferRequest m;
    m.set_model_name("letters");
    auto& i = *m.add_inputs();
    i.set_name("text_input");
    i.set_datatype("BYTES");
    i.add_shape(1);
    m.add_raw_input_contents(std::string("\2\0\0\0hi", 6));
    (*m.mutable_parameters())["max_tokens"].set_int64_param(tokens);
    return m.SerializeAsString();
}
bool is_answer(const client::call& c) {
    inference::ModelInferResponse r;
    return c.status == 0 && c.bytes.size() > 5 && r.ParseFromString(c.bytes.substr(5)) && r.outputs_size() == 1;
}
std::size_t messages(std::string_view bytes) {
    std::size_t n = 0;
    for (; bytes.size() >= 5; ++n) {
        std::size_t size = 0;
        for (int i = 1; i < 5; ++i) size = size << 8U | static_cast<unsigned char>(bytes[static_cast<std::size_t>(i)]);
        bytes.remove_prefix(5 + size);
    }
    return n;
}

constexpr int invalid = 3, exceeded = 4, exhausted = 8, unimplemented = 12, unavailable = 14, unauthenticated = 16;

}  // namespace

TEST_CASE("calls over gRPC are answered, in whatever pieces they come", "[examples]") {
    server s;
    auto c = s.connect();
    inference::ServerLiveResponse live;
    const auto alive = c.ask("ServerLive", {}, {});
    CHECK((alive.status == 0 && live.ParseFromString(alive.bytes.substr(5)) && live.live()));
    CHECK(is_answer(c.ask("ModelInfer", chat_key, row())));
    CHECK(is_answer(c.ask("ModelInfer", {}, row(), field("x-api-key", batch_key))));
    CHECK(is_answer(c.ask("ModelInfer", {}, row(), field("authorization", "bearer " + std::string(chat_key)))));
    const auto whole = message(row());
    const auto pieces = c.open("ModelInfer", chat_key, field("grpc-timeout", "10S"));
    for (const char byte : whole) c.send(frame(data, 0, pieces, {&byte, 1}));
    c.send(frame(data, end_stream, pieces));
    CHECK(is_answer(c.end_of(pieces)));
    const auto texts = c.open("ModelStreamInfer", chat_key);
    c.send(frame(data, end_stream, texts, message(text(20)) + message(row()) + message(text(3))));
    const auto said = c.end_of(texts);
    CHECK(said.status == 0);
    CHECK(messages(said.bytes) == 24);
    CHECK(c.ask("ModelInfer", "nobody", row()).status == unauthenticated);
    CHECK(c.ask("ModelInfer", std::string(7500, 'k'), row()).status == unauthenticated);
    CHECK(c.ask("ModelInfer", chat_key, row(), field("x-api-key", chat_key)).status == invalid);
    CHECK(c.ask("ModelInfer", chat_key, "nonsense").status == invalid);
    CHECK(c.ask("ModelInfer", chat_key, row(), field("grpc-timeout", "soon")).status == invalid);
    CHECK(c.ask("Nothing", chat_key, {}).status == unimplemented);
    const auto empty = c.open("ModelInfer", chat_key);
    c.send(frame(data, end_stream, empty));
    CHECK(c.end_of(empty).status == invalid);
    CHECK(is_answer(c.ask("ModelInfer", chat_key, row())));
}

TEST_CASE("a connection over gRPC may begin in pieces", "[examples]") {
    server s;
    for (const std::size_t apart : {1U, 10U, 23U, 24U, 25U}) {
        CAPTURE(apart);
        client c(s.rpc->port(), apart);
        CHECK(is_answer(c.ask("ModelInfer", chat_key, row())));
    }
}

TEST_CASE("compressed messages aren't read, over gRPC either", "[examples]") {
    server s;
    for (const auto key : {chat_key, std::string_view("nobody")}) {
        auto c = s.connect();
        for (const auto* coding : {"gzip", "deflate", "snappy"}) {
            const auto call = c.open("ModelInfer", key, field("grpc-encoding", coding));
            CHECK(c.end_of(call).status == unimplemented);  // before it says anything
        }
    }
    auto c = s.connect();
    const auto call = c.open("ModelInfer", chat_key);
    c.send(frame(data, 0, call, message("zip", 1)));
    CHECK(c.end_of(call).status == unimplemented);
    CHECK(is_answer(c.ask("ModelInfer", chat_key, row(), field("grpc-encoding", "identity"))));
}

TEST_CASE("heads without end end their connection", "[examples]") {
    server s;
    auto c = s.connect();
    c.send(frame(headers, 0, 1, head("ModelInfer", chat_key)));
    for (int i = 0; i < 1000; ++i) c.send(frame(continuation, 0, 1, field("x", std::string(1000, 'y'))));
    CHECK(c.ends());
    auto repeats = s.connect();  // of what the table has: a byte stands for 4 KB
    const std::string in_table =
        "\x40\x01"
        "b"
        "\x7f\x9d\x1e" +
        std::string(3996, 'z');
    repeats.send(frame(headers, end_headers, 1, head("ModelInfer", chat_key) + in_table + std::string(1000, '\xbe')));
    CHECK(repeats.ends());
    auto other = s.connect();
    CHECK(is_answer(other.ask("ModelInfer", chat_key, row())));
}

TEST_CASE("floods of frames that carry nothing end their connection", "[examples]") {
    server s;
    const std::vector<std::string> floods{frame(ping, 0, 0, std::string(8, '\0')), frame(settings, 0, 0),
                                          frame(priority, 0, 1, std::string("\0\0\0\0\1", 5)),
                                          frame(headers, end_headers | end_stream, 1, head("ModelInfer", {}))};
    for (const auto& f : floods) {
        auto c = s.connect();
        for (int i = 0; i < 2000; ++i) c.send(f);
        CHECK(c.ends());
    }
    auto resets = s.connect();
    CHECK(is_answer(resets.ask("ModelInfer", chat_key, row())));  // somebody with a key, too
    for (int i = 0; i < 3000; ++i)
        resets.send(frame(rst, 0, resets.open("ModelInfer", chat_key), std::string("\0\0\0\10", 4)));
    CHECK(resets.ends());
    auto other = s.connect();
    CHECK(is_answer(other.ask("ModelInfer", batch_key, row())));
}

TEST_CASE("a client that is refused again and again without a key is disconnected", "[examples]") {
    server s({.refusals_of_stranger = 4});
    auto c = s.connect();
    for (int i = 0; i < 5; ++i) (void)c.ask("ModelInfer", "nobody", row());
    CHECK(c.ends());
    auto known = s.connect();
    CHECK(is_answer(known.ask("ModelInfer", chat_key, row())));
    for (int i = 0; i < 20; ++i) CHECK(known.ask("ModelInfer", "nobody", row()).status == unauthenticated);
}

TEST_CASE("connections that say nothing keep nobody from gRPC", "[examples]") {
    server s({.connections = {.most = 4, .strangers = 2}});
    auto mine = s.connect();
    CHECK(is_answer(mine.ask("ModelInfer", chat_key, row())));
    std::vector<connection> silent;
    for (int i = 0; i < 10; ++i) silent.emplace_back(s.rpc->port());
    auto other = s.connect();
    CHECK(is_answer(other.ask("ModelInfer", batch_key, row())));
    for (int i = 0; i < 8; ++i) CHECK(silent[static_cast<std::size_t>(i)].ends());
    CHECK(is_answer(mine.ask("ModelInfer", chat_key, row())));
    std::vector<client> keyed;
    for (int i = 0; i < 8; ++i) {
        keyed.push_back(s.connect());
        CHECK(is_answer(keyed.back().ask("ModelInfer", batch_key, row())));
    }
    CHECK(keyed[0].ends());  // who has most goes
    CHECK(is_answer(mine.ask("ModelInfer", chat_key, row())));
    connection nonsense(s.rpc->port());
    nonsense.send("GET / HTTP/1.1\r\n\r\n");
    CHECK(nonsense.ends());
}

TEST_CASE("strangers over gRPC hold up nobody whose key is known", "[examples]") {
    server s;
    auto known = s.connect(), stranger = s.connect();
    CHECK(is_answer(known.ask("ModelInfer", chat_key, row())));
    std::promise<void> go;
    std::atomic<bool> waited{false};
    s.rpc->post([&, until = go.get_future().share()] { waited = until.wait_for(5min) == std::future_status::ready; },
                true);
    const auto live = stranger.open("ServerLive");
    stranger.say(live, {});
    for (int i = 0; i < 3; ++i) CHECK(is_answer(known.ask("ModelInfer", chat_key, row())));
    CHECK(known.ask("ModelInfer", "nobody", row()).status == unauthenticated);
    CHECK(!waited);
    go.set_value();
    CHECK(stranger.end_of(live).status == 0);
    CHECK(waited);
}

TEST_CASE("a connection over gRPC keeps its calls when its key is known", "[examples]") {
    server s;
    auto all_at_once = s.connect(), by_bytes = s.connect();
    const auto opened = [](std::uint32_t stream, std::string_view method, std::string_view key) {
        return frame(headers, end_headers, stream, head(method, key));
    };
    const auto some = opened(1, "ServerLive", {}) + opened(3, "ModelInfer", chat_key) +
                      opened(5, "ModelStreamInfer", batch_key) + opened(7, "RepositoryIndex", chat_key) +
                      frame(data, end_stream, 1, message({})) + frame(data, end_stream, 3, message(row())) +
                      frame(data, 0, 5, message(row()) + message(text(3))) + frame(data, end_stream, 7, message({})) +
                      frame(data, end_stream, 5, message(row()));
    all_at_once.send(some);
    for (const char byte : some) by_bytes.send({&byte, 1});
    for (auto* c : {&all_at_once, &by_bytes}) {
        CHECK(c->end_of(1).status == 0);
        CHECK(is_answer(c->end_of(3)));
        const auto stream = c->end_of(5);
        CHECK(stream.status == 0);
        CHECK(messages(stream.bytes) == 5);
        CHECK(c->end_of(7).status == 0);
    }
}

TEST_CASE("a server may go while connections over gRPC come and show their keys", "[examples]") {
    server s;
    for (int round = 0; round < support::few(20); ++round) {
        s.rpc = nullptr;
        s.rpc = std::make_unique<grpc_server>(*s.core, grpc_options{.connections = {.most = 6, .strangers = 3}});
        std::vector<std::jthread> clients;
        std::atomic<int> asked{0};
        for (int i = 0; i < 4; ++i)
            clients.emplace_back([&, port = s.rpc->port()](const std::stop_token& over) {
                while (!over.stop_requested()) try {
                        client c(port);
                        const auto call = c.open("ModelInfer", chat_key);
                        c.say(call, row());
                        ++asked;
                        if (asked % 3 != 0) (void)c.end_of(call);
                    } catch (const std::runtime_error&) {  // the server is gone
                        std::this_thread::sleep_for(1ms);
                    }
            });
        for (int i = 0; i < 6000 && asked <= 4 * round; ++i) std::this_thread::sleep_for(10ms);
        round % 2 == 0 ? s.rpc->stop(0ms) : s.rpc->stop(10min);
        CHECK(s.rpc->connections() == 0);
        for (auto& c : clients) c.request_stop();
        clients.clear();
    }
    s.rpc = nullptr;
    s.rpc = std::make_unique<grpc_server>(*s.core, grpc_options{});
    auto c = s.connect();
    CHECK(is_answer(c.ask("ModelInfer", chat_key, row())));
}

TEST_CASE("a tenant's streams are bounded, and end with its key", "[examples]") {
    server s({.max_calls_of_tenant = 6, .max_streams_of_tenant = 3});
    auto batch = s.connect(), chat = s.connect();
    std::vector<std::uint32_t> streams;
    for (int i = 0; i < 3; ++i) streams.push_back(batch.open("ModelStreamInfer", batch_key));
    CHECK(batch.end_of(batch.open("ModelStreamInfer", batch_key)).status == exhausted);
    for (int i = 0; i < 3; ++i) streams.push_back(batch.open("ModelInfer", batch_key));  // without a message
    CHECK(batch.end_of(batch.open("ModelInfer", batch_key)).status == exhausted);
    const auto mine = chat.open("ModelStreamInfer", chat_key);
    chat.say(mine, row());
    CHECK(messages(chat.end_of(mine).bytes) == 1);
    s.write(
        "name=chat api_key=key-of-chat memory=16MiB compute=60%\nname=batch api_key=newer-of-batch memory=16MiB "
        "compute=40%\n");
    CHECK(s.core->reload().empty());
    for (const auto stream : streams) CHECK(batch.end_of(stream).status == unauthenticated);
    CHECK(is_answer(batch.ask("ModelInfer", "newer-of-batch", row())));  // what was counted is given back
}

TEST_CASE("every wait of a call ends", "[examples]") {
    server s({.idle_timeout = 1s, .message_timeout = 1s});
    auto c = s.connect();
    const auto nothing = c.open("ModelInfer", chat_key), half = c.open("ModelInfer", chat_key),
               stream = c.open("ModelStreamInfer", chat_key), begun = c.open("ModelStreamInfer", chat_key),
               late = c.open("ModelStreamInfer", chat_key, field("grpc-timeout", "300m"));
    c.send(frame(data, 0, half, message(row()).substr(0, 20)));
    c.send(frame(data, 0, begun, message(row()) + message(row()).substr(0, 20)));
    CHECK(c.end_of(nothing).status == exceeded);
    CHECK(c.end_of(half).status == exceeded);
    CHECK(c.end_of(stream).status == unavailable);
    CHECK(c.end_of(begun).status == exceeded);
    CHECK((c.end_of(late).status == exceeded || c.end_of(late).status == unavailable));
    CHECK(c.ends());  // without a call for long
}

TEST_CASE("a client that vanished is found out", "[examples]") {
    server s({.ping_after = 300ms});
    auto gone = s.connect();
    gone.answers_pings = false;
    (void)gone.open("ModelStreamInfer", chat_key);
    CHECK(gone.ends());
}

TEST_CASE("uploads over gRPC take half of the room of a tenant, and none without a key", "[examples]") {
    server s({.max_messages = 65'536});
    auto stranger = s.connect(), batch = s.connect(), chat = s.connect();
    const auto some = std::string("\0\0\1\0\0", 5) + std::string(15'000, 'x');
    std::vector<std::uint32_t> calls;
    for (int i = 0; i < 4; ++i) {
        const auto call = stranger.open("ModelInfer", "nobody");
        stranger.send(frame(data, 0, call, some));
        CHECK(stranger.end_of(call).status == unauthenticated);
    }
    for (int i = 0; i < 3; ++i) {
        calls.push_back(batch.open("ModelInfer", batch_key));
        batch.send(frame(data, 0, calls.back(), some));
    }
    CHECK(batch.end_of(calls[2]).status == exhausted);
    CHECK(is_answer(chat.ask("ModelInfer", chat_key, row())));
}

TEST_CASE("a long stream gives back all that its requests took of the room for uploads", "[examples]") {
    server s({.max_messages = 2048});
    auto c = s.connect();
    const auto stream = c.open("ModelStreamInfer", chat_key);
    for (std::size_t n = 1; n <= 250; ++n) {  // their prefixes alone are more than a tenant's half
        c.say(stream, row(), false);
        while (messages(c.so_far(stream).bytes) < n && c.so_far(stream).status < 0) REQUIRE(c.receive());
    }
    c.send(frame(data, end_stream, stream));
    const auto all = c.end_of(stream);
    CHECK(all.status == 0);
    CHECK(messages(all.bytes) == 250);
}

TEST_CASE("an error on a stream has the id of its own request", "[examples]") {
    server s;
    auto c = s.connect();
    inference::ModelInferRequest first, wrong;
    REQUIRE(first.ParseFromString(row()));
    wrong = first;
    first.set_id("first");
    wrong.set_id("wrong");
    wrong.set_model_name("nothing");
    const auto stream = c.open("ModelStreamInfer", chat_key);
    c.send(frame(data, end_stream, stream,
                 message(first.SerializeAsString()) + message(wrong.SerializeAsString()) +
                     message(first.SerializeAsString()) + message("nonsense")));
    std::string bytes = c.end_of(stream).bytes;
    std::vector<std::string> ids;
    while (bytes.size() >= 5) {
        const std::size_t size = static_cast<unsigned char>(bytes[3]) * 256U + static_cast<unsigned char>(bytes[4]);
        inference::ModelStreamInferResponse r;
        REQUIRE(r.ParseFromString(bytes.substr(5, size)));
        CHECK(r.error_message().empty() == (r.infer_response().id() == "first"));
        ids.push_back(r.infer_response().id());
        bytes.erase(0, 5 + size);
    }
    CHECK(ids == std::vector<std::string>{"first", "wrong", "first", ""});
}

TEST_CASE("idle streams don't stretch the end", "[examples]") {
    server s;
    auto c = s.connect();
    const auto idle = c.open("ModelStreamInfer", chat_key);
    CHECK(is_answer(c.ask("ModelInfer", chat_key, row())));
    s.rpc->stop(10min);
    CHECK(c.end_of(idle).status == unavailable);
    CHECK(c.ends());
}

}  // namespace inference_server_grpc_test
