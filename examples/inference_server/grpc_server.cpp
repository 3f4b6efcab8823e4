// SPDX-License-Identifier: Apache-2.0
// One thread carries the bytes of strangers, and another thread the bytes of clients whose key is
// known (http2.hpp). Other threads parse messages, one at a time and with tenants in turn. Engines
// post their answers to a further thread, which makes the bytes of the answers.
#include "inference_server/grpc_server.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/stubs/logging.h>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>

#include "inference_server/carrier.hpp"
#include "inference_server/grpc_protocol.hpp"
#include "inference_server/http2.hpp"
#include "inference_server/message_reader.hpp"
#include "inference_server/worker.hpp"

namespace inference_server {

namespace {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;
using boost::system::error_code;
using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;
using when = clock::time_point;

int code_of(int http) noexcept {
    switch (http) {
        case 400: return 3;   // INVALID_ARGUMENT
        case 401: return 16;  // UNAUTHENTICATED
        case 404: return 5;   // NOT_FOUND
        case 409: return 9;   // FAILED_PRECONDITION
        case 413:
        case 429:
        case 507: return 8;   // RESOURCE_EXHAUSTED
        case 501: return 12;  // UNIMPLEMENTED
        case 503: return 14;  // UNAVAILABLE
        case 504: return 4;   // DEADLINE_EXCEEDED
        default: return 13;   // INTERNAL
    }
}

// As over HTTP, one thread parses short messages, and another thread parses messages that take
// longer.
constexpr std::size_t quick_message = 65'536, short_message = 4096;

enum class method : std::uint8_t {
    server_live,
    server_ready,
    server_metadata,
    model_ready,
    model_metadata,
    model_config,
    repository_index,
    load,
    unload,
    infer,
    stream,
};
constexpr std::pair<std::string_view, method> methods[] = {
    {"ServerLive", method::server_live},           {"ServerReady", method::server_ready},
    {"ServerMetadata", method::server_metadata},   {"ModelReady", method::model_ready},
    {"ModelMetadata", method::model_metadata},     {"ModelConfig", method::model_config},
    {"RepositoryIndex", method::repository_index}, {"RepositoryModelLoad", method::load},
    {"RepositoryModelUnload", method::unload},     {"ModelInfer", method::infer},
    {"ModelStreamInfer", method::stream},
};
method method_of(std::string_view path) {
    constexpr std::string_view of_service = "/inference.GRPCInferenceService/";
    if (path.starts_with(of_service))
        for (const auto& [name, m] : methods)
            if (path.substr(of_service.size()) == name) return m;
    throw refused(501, "there is no such method");
}
bool needs_key(method m) noexcept {
    return m != method::server_live && m != method::server_ready && m != method::server_metadata;
}
bool has_tensors(method m) noexcept { return m == method::infer || m == method::stream; }

/// Throws refused (400).
template <class Message>
Message parsed(const std::string& bytes) {
    Message m;
    if (!m.ParseFromString(bytes)) throw refused(400, "the message can't be read");
    return m;
}
template <class Message>
std::string bytes_of(const Message& m) {
    std::string bytes;
    if (!m.SerializeToString(&bytes)) throw refused(500, "the answer can't be written");
    return bytes;
}

class link;

/// A call's part in the counts of its tenant and of all calls, until the call ends. Only its
/// connection's thread uses it.
struct share {
    explicit share(std::atomic<std::size_t>& of_all) : all(of_all) {}
    share(const share&) = delete;
    share& operator=(const share&) = delete;
    ~share() {
        give_back(bytes);
        if (counts == nullptr) return;
        counts->calls.fetch_sub(1, std::memory_order_relaxed);
        if (is_stream) counts->streams.fetch_sub(1, std::memory_order_relaxed);
    }
    void open(const std::shared_ptr<account>& whose, bool stream) {
        counts = whose;
        counts->calls.fetch_add(1, std::memory_order_relaxed);
        if ((is_stream = stream)) counts->streams.fetch_add(1, std::memory_order_relaxed);
    }
    /// Throws refused if there are more than `most` calls in all, or more than half as many of the
    /// tenant's.
    void take(std::size_t n, std::size_t most) {
        bytes += n;
        const auto of_all = all.fetch_add(n, std::memory_order_relaxed) + n;
        if (counts != nullptr && counts->uploads.fetch_add(n, std::memory_order_relaxed) + n > most / 2)
            throw refused(429, "too much is being uploaded with this key", 1);
        if (of_all > most) throw refused(503, "too much is being uploaded", 1);
    }
    void give_back(std::size_t n) noexcept {
        n = std::min(n, bytes);
        bytes -= n;
        all.fetch_sub(n, std::memory_order_relaxed);
        if (counts != nullptr) counts->uploads.fetch_sub(n, std::memory_order_relaxed);
    }

    std::atomic<std::size_t>& all;
    std::shared_ptr<account> counts{};
    std::size_t bytes = 0;
    bool is_stream = false;
};

/// One call. It belongs to its connection's thread, except for the members through which engines
/// are told: `gone`, and members that never change.
struct call {
    call(std::weak_ptr<link> l, http2::call_id i, std::atomic<std::size_t>& all)
        : of(std::move(l)), id(i), counted(all) {}

    const std::weak_ptr<link> of;
    const http2::call_id id;
    method what{};
    service::caller who{};
    when deadline = when::max();
    std::atomic<bool> gone{false};

    share counted;
    message_reader in{0};
    std::string ahead{};      // bytes of the next request that came while a request is being served
    std::size_t serving = 0;  // the bytes of the request that is being served
    bool busy = false;        // whether a request is being served
    bool over = false;        // whether the call has its status
    bool all_said = false;    // whether the client sends no more
    when due = when::max();   // when the message must be complete, or the next one must begin
    std::size_t written = 0;  // the value when it last changed
    when moved{};
    // Facts about a stream's request.
    std::shared_ptr<const model_source> model;
    std::string request_id{};
    bool empty_end = false, piece_runs = false;
    std::shared_ptr<token_stream> text{};
};
using call_ptr = std::shared_ptr<call>;

/// A thread with the connections that it owns. Only that thread uses it.
struct room {
    explicit room(carrier::rank r) : thread(r) {}
    [[nodiscard]] std::vector<std::shared_ptr<link>> all() const {
        std::vector<std::shared_ptr<link>> some;
        for (const auto& [id, l] : links) some.push_back(l);
        return some;
    }

    carrier thread;
    std::map<front_door::id, std::shared_ptr<link>> links{};
    asio::steady_timer clockwork{thread.io()};
    std::array<char, 65'536> bytes{};  // bytes read from whichever connection
    bool stopping = false;
};

}  // namespace

/// The state that all connections share.
struct grpc_server::shell {
    shell(service& s, grpc_options o)
        : of(s),
          options(std::move(o)),
          door(options.connections),
          front(strangers.thread.io(), tcp::endpoint(asio::ip::make_address(options.address), options.port)),
          protocol(front.local_endpoint().protocol()),
          port(front.local_endpoint().port()) {}

    void accept();
    void came(tcp::socket socket);
    void close_surplus();
    void tick(room& r);
    void known(front_door::id id, const void* whose);
    void gone(front_door::id id) noexcept;
    /// Takes no more calls there. Called on its thread.
    void close_idle(room& r);
    static void close(room& r, front_door::id id);
    /// Runs `f` on the tenants' thread. If there is no memory for the call, or the thread no longer
    /// exists, there is nothing left to do.
    template <class F>
    void later(F f) noexcept {
        tenants.thread.later(std::move(f));
    }
    /// Where messages are parsed. This doesn't happen on the threads that carry the bytes of all
    /// connections.
    worker& reader_of(std::size_t message) noexcept { return message <= quick_message ? reads : long_reads; }

    room strangers{carrier::rank::strangers}, tenants{carrier::rank::tenants};
    service& of;
    const grpc_options options;
    // guards the next four members; never held for long, because both threads wait for it
    std::mutex mutex;
    front_door door;
    std::condition_variable leaves;
    int rooms_open = 2;
    bool in_a_hurry = false;            // whether the end no longer waits
    std::atomic<std::size_t> count{0};  // the number of connections
    tcp::acceptor front;
    const tcp protocol;
    const std::uint16_t port;
    std::atomic<std::size_t> message_bytes{0};
    bool is_shut = false;  // for the strangers' thread
    std::weak_ptr<shell> self;
    worker reads, long_reads, answers;
};

namespace {

using shell = grpc_server::shell;

/// A connection. It begins among the strangers, and moves to the tenants' room once it has shown a
/// key. Calls with a key begin in that room, so their answers come back there.
class link final : public std::enable_shared_from_this<link>, public http2::events {
public:
    link(std::shared_ptr<shell> of, tcp::socket socket, front_door::id id)
        : shell_(std::move(of)), socket_(std::move(socket)), id_(id), began_(clock::now()), heard_(began_) {
        shell_->count.fetch_add(1, std::memory_order_relaxed);
        error_code ignored;
        socket_.set_option(tcp::no_delay(true), ignored);
        socket_.non_blocking(true, ignored);
    }
    link(const link&) = delete;
    link& operator=(const link&) = delete;
    ~link() { leave_door(); }

    void read() {
        if (reading_ || !socket_.is_open()) return;
        reading_ = true;
        socket_.async_wait(tcp::socket::wait_read, [self = shared_from_this()](error_code e) {
            self->reading_ = false;
            if (!e && self->socket_.is_open()) self->read_some();
        });
    }
    void close() {
        error_code ignored;
        socket_.close(ignored);
        for (auto& [id, c] : std::exchange(calls_, {})) leave(*c);
        waiting_.clear();
        leave_door();
        home_->links.erase(id_);
    }
    /// Takes no more calls, and closes once the existing calls are over.
    void go_away(bool because_of_the_client = false) {
        if (!session_) return close();
        if (std::exchange(leaving_, true)) return;
        session_->go_away(because_of_the_client);
        for (const auto& [id, c] : calls_copy())
            if (c->what == method::stream && !c->busy) refuse(c, refused(503, "the server is going down"));
        flush();
    }
    void tick(when now) {
        const auto& o = shell_->options;
        if (!session_ ? now - began_ > o.handshake_timeout : lingers_ && now - lingered_ > 2s) return close();
        if (!session_) return;
        credit_ = std::min(credit_ + (known_ ? 50 : 5), known_ ? most_credit : credit_of_stranger);
        if (writing_ && now - wrote_ > o.write_timeout) return close();
        if (now - heard_ > 2 * o.ping_after) return close();
        if (now - heard_ > o.ping_after && !std::exchange(pinged_, true)) session_->ping();
        if (calls_.empty() && now - used_ > (known_ ? o.idle_timeout : o.stranger_timeout)) return go_away();
        for (const auto& [id, c] : calls_copy()) check(c, now);
        flush();
    }

private:
    // ---- bytes

    // A stranger's turn is short, so that many strangers delay other connections only little.
    [[nodiscard]] std::size_t turn() const noexcept { return uploads_ ? 65'536 : known_ ? 8192 : 2048; }

    void read_some() {
        error_code e;
        const auto n = socket_.read_some(asio::buffer(home_->bytes.data(), turn()), e);
        if (e == asio::error::would_block) return read();
        if (e) return close();
        heard_ = clock::now();
        pinged_ = false;
        std::string_view bytes(home_->bytes.data(), n);
        if (lingers_) return read();
        if (!session_ && !begins(bytes)) return;
        uploads_ = false;
        const auto before = session_->control_frames();
        const bool fine = session_->receive(bytes);
        credit_ -= static_cast<long>(session_->control_frames() - before);
        if (!fine || credit_ < 0 || refusals_ > shell_->options.refusals_of_stranger) {
            ends_ = true;
            go_away(true);
        }
        if (moves()) return move_in();
        flush();
        if (may_read()) read();
    }
    [[nodiscard]] bool moves() const noexcept { return known_ && home_ == &shell_->strangers && !ends_ && !lingers_; }
    /// From now on the connection doesn't wait in a line with strangers. It isn't read before the
    /// move, and output that is being written goes out first.
    void move_in() {
        if (writing_) return;
        const auto self = shared_from_this();
        error_code e;
        descriptor there(socket_.release(e));
        if (e) return close();
        home_->links.erase(id_);
        socket_ = tcp::socket(shell_->tenants.thread.io());
        socket_.assign(shell_->protocol, there.fd, e);
        if (e) return close();
        there.fd = -1;
        socket_.non_blocking(true, e);
        home_ = &shell_->tenants;
        shell_->later([self] { self->arrive(); });
    }
    void arrive() {
        home_->links.emplace(id_, shared_from_this());
        if (home_->stopping) go_away();
        for (auto& [c, message] : std::exchange(waiting_, {}))
            if (!c->over) attempt(c, [&, m = &message] { begin_serving(c, std::move(*m)); });
        flush();
        if (may_read()) read();
    }
    void leave_door() noexcept {
        if (!std::exchange(has_left_, true)) shell_->gone(id_);
    }
    // Memory for a connection is only kept once it speaks HTTP/2.
    [[nodiscard]] bool begins(std::string_view& bytes) {
        const auto n = std::min(bytes.size(), http2_preface.size() - start_.size());
        start_.append(bytes.substr(0, n));
        bytes.remove_prefix(n);
        if (!http2_preface.starts_with(start_)) return close(), false;
        if (start_.size() < http2_preface.size()) return read(), false;
        const auto& o = shell_->options;
        session_.emplace(*this, http2::limits{.calls = o.max_calls_of_connection, .head = o.max_metadata});
        (void)session_->receive(http2_preface);
        used_ = heard_;
        return true;
    }
    // If a client doesn't read its answers, the server doesn't read its requests either.
    [[nodiscard]] bool may_read() const { return !writing_ || session_->waiting() < 256; }

    void flush() {
        if (writing_ || lingers_ || !session_ || !socket_.is_open()) return;
        out_.clear();
        if (!session_->output(out_)) {
            if (ends_ || session_->is_over() || (leaving_ && calls_.empty())) linger();
            return;
        }
        writing_ = true;
        wrote_ = clock::now();
        asio::async_write(socket_, asio::buffer(out_), [self = shared_from_this()](error_code e, std::size_t) {
            self->writing_ = false;
            if (!self->socket_.is_open()) return;
            if (e) return self->close();
            if (self->moves()) return self->move_in();
            self->make_pieces();
            self->flush();
            self->read();
        });
    }
    // Closes without losing written data. A socket that still has unread data would be reset.
    void linger() {
        error_code ignored;
        socket_.shutdown(tcp::socket::shutdown_send, ignored);
        for (auto& [id, c] : std::exchange(calls_, {})) leave(*c);
        lingers_ = true;
        lingered_ = clock::now();
        read();
    }

    // ---- calls

    [[nodiscard]] std::map<http2::call_id, call_ptr> calls_copy() const { return calls_; }
    [[nodiscard]] call_ptr find(http2::call_id id) const {
        const auto found = calls_.find(id);
        return found == calls_.end() ? nullptr : found->second;
    }
    static void leave(call& c) {
        c.gone.store(true, std::memory_order_relaxed);
        c.over = true;
        c.text.reset();
        c.ahead = {};
    }
    void refuse(const call_ptr& c, const refused& why) {
        if (c->over) return;
        if (!known_) ++refusals_;
        leave(*c);
        session_->finish(c->id, {code_of(why.status), why.what(), why.retry_after});
    }
    /// Runs `f`. An exception of `f` becomes the call's answer.
    template <class F>
    void attempt(const call_ptr& c, F f) {
        try {
            f();
        } catch (...) {
            refuse(c, as_refused(std::current_exception()));
        }
    }

    void on_call(http2::call_id id, call_head head) override {
        const auto c = std::make_shared<call>(weak_from_this(), id, shell_->message_bytes);
        used_ = c->moved = clock::now();
        calls_.emplace(id, c);
        attempt(c, [&] { begin(*c, head); });
    }
    // Refuses everything that can be refused before a message comes.
    void begin(call& c, const call_head& head) {
        const auto& o = shell_->options;
        if (leaving_) throw refused(503, "the server is going down");
        if (head.method != "POST" || !head.content_type.starts_with("application/grpc"))
            throw refused(400, "this isn't gRPC");
        c.what = method_of(head.path);
        if (!head.encoding.empty() && head.encoding != "identity")
            throw refused(501, "compressed messages aren't read");
        if (head.keys > 1) throw refused(400, "more than one key");
        if (!head.timeout.empty()) c.deadline = clock::now() + timeout_of(head.timeout);
        c.due = clock::now() + o.message_timeout;
        if (!needs_key(c.what)) {
            constexpr std::size_t nothing = 64, few = 4;  // such a message has no content
            c.in = message_reader(nothing);
            if (!known_ && calls_.size() > few) throw refused(503, "too many calls without a key", 1);
            return;
        }
        c.in = message_reader(has_tensors(c.what)      ? o.max_message
                              : c.what == method::load ? quick_message
                                                       : short_message);
        const auto bearer = key_of_bearer(head.authorization);
        c.who = shell_->of.authenticate(bearer.empty() ? head.api_key : bearer);
        if (!std::exchange(known_, true)) credit_ = most_credit;
        const auto& counts = *c.who.counts;
        if (std::exchange(whose_, &counts) != &counts) shell_->known(id_, &counts);
        const bool is_stream = c.what == method::stream;
        if (counts.calls.load(std::memory_order_relaxed) >= o.max_calls_of_tenant)
            throw refused(429, "too many calls are open with this key", 1);
        if (is_stream && counts.streams.load(std::memory_order_relaxed) >= o.max_streams_of_tenant)
            throw refused(429, "too many streams are open with this key", 1);
        c.counted.open(c.who.counts, is_stream);
        if (is_stream) c.due = clock::now() + o.idle_timeout;
        if (c.what == method::infer) session_->widen(c.id, 1U << 20U);
    }
    void on_data(http2::call_id id, std::string_view bytes) override {
        const auto c = find(id);
        if (c == nullptr || c->over) return session_->consumed(id, bytes.size());
        attempt(c, [&] {
            c->counted.take(bytes.size(), shell_->options.max_messages);
            c->busy ? void(c->ahead.append(bytes)) : feed(c, bytes);
        });
    }
    void feed(const call_ptr& c, std::string_view bytes) {
        while (!bytes.empty() && !c->over) {
            if (c->busy) {
                if (c->what == method::stream) return void(c->ahead.append(bytes));
                // bytes after the call's only request
                return session_->consumed(c->id, bytes.size());
            }
            const bool began = c->in.has_begun();
            const auto n = c->in.take(bytes);
            bytes.remove_prefix(n);
            session_->consumed(c->id, n);
            if (!began)
                c->due =
                    clock::now() + shell_->options.message_timeout + std::chrono::seconds(c->in.announced() >> 20U);
            if (c->in.is_complete())
                serve(c, c->in.message());
            else
                uploads_ = c->in.announced() > 8192;
        }
    }
    void on_end(http2::call_id id) override {
        const auto c = find(id);
        if (c == nullptr || c->over) return;
        c->all_said = true;
        if (c->what != method::stream && !c->busy) return refuse(c, refused(400, "there is no message"));
        step(c);
    }
    void on_closed(http2::call_id id) override {
        const auto found = calls_.find(id);
        if (found == calls_.end()) return;
        const auto c = found->second;
        calls_.erase(found);
        leave(*c);
        used_ = clock::now();
    }
    /// Ends a call that is too slow, is past its deadline, or whose key was revoked.
    void check(const call_ptr& c, when now) {
        const auto written = session_->written(c->id);
        if (written != c->written || session_->is_drained(c->id)) {
            c->written = written;
            c->moved = now;
        }
        if (now - c->moved > shell_->options.write_timeout) return session_->reset(c->id);
        if (c->over) return;
        if (c->who.is_revoked()) return refuse(c, refused(401, "this API key was taken away"));
        if (now > c->deadline) return refuse(c, refused(504, "the deadline is over"));
        if (!c->busy && now > c->due)
            refuse(c, c->in.has_begun() || c->what != method::stream
                          ? refused(504, "the message didn't come in time")
                          : refused(503, "the stream had no request for long", 1));
    }

    // ---- requests

    void serve(const call_ptr& c, std::string message) {
        c->busy = true;
        c->serving = message_reader::prefix_size + message.size();
        c->due = when::max();
        if (needs_key(c->what) && home_ == &shell_->strangers)
            return void(waiting_.emplace_back(c, std::move(message)));
        begin_serving(c, std::move(message));
    }
    void begin_serving(const call_ptr& c, std::string message) {
        if (has_tensors(c->what)) return read_tensors(c, std::move(message));
        if (c->what == method::load) return load(c, parsed<inference::RepositoryModelLoadRequest>(message));
        answer(c, at_once(*c, message));
    }
    /// The answer to a short request. It is parsed on this thread, for every client.
    [[nodiscard]] std::string at_once(const call& c, const std::string& message) const {
        auto& of = shell_->of;
        switch (c.what) {
            case method::server_live: {
                inference::ServerLiveResponse r;
                r.set_live(true);
                return bytes_of(r);
            }
            case method::server_ready: {
                inference::ServerReadyResponse r;
                r.set_ready(of.ready());
                return bytes_of(r);
            }
            case method::server_metadata: {
                inference::ServerMetadataResponse r;
                write_server_metadata(r);
                return bytes_of(r);
            }
            case method::model_ready: {
                const auto q = parsed<inference::ModelReadyRequest>(message);
                inference::ModelReadyResponse r;
                r.set_ready(of.ready(c.who, of.model(c.who, q.name(), q.version())->info.name));
                return bytes_of(r);
            }
            case method::model_metadata: {
                const auto q = parsed<inference::ModelMetadataRequest>(message);
                inference::ModelMetadataResponse r;
                write_metadata(r, of.model(c.who, q.name(), q.version())->info);
                return bytes_of(r);
            }
            case method::model_config: {
                const auto q = parsed<inference::ModelConfigRequest>(message);
                inference::ModelConfigResponse r;
                write_config(*r.mutable_config(), of.model(c.who, q.name(), q.version())->info);
                return bytes_of(r);
            }
            case method::repository_index: return index(c, parsed<inference::RepositoryIndexRequest>(message));
            default: return unload(c, parsed<inference::RepositoryModelUnloadRequest>(message));
        }
    }
    [[nodiscard]] std::string index(const call& c, const inference::RepositoryIndexRequest& q) const {
        inference::RepositoryIndexResponse r;
        for (const auto& m : shell_->of.index(c.who)) {
            if (q.ready() && !m.ready) continue;
            auto& e = *r.add_models();
            e.set_name(m.name);
            e.set_version(std::string(model_version));
            e.set_state(m.ready ? "READY" : "UNAVAILABLE");
            e.set_reason(m.ready ? "" : "not loaded yet");
        }
        return bytes_of(r);
    }
    template <class T>
    static const std::string& model_of(const T& q) {
        return q.model_name().empty() ? q.repository_name() : q.model_name();
    }
    [[nodiscard]] std::string unload(const call& c, const inference::RepositoryModelUnloadRequest& q) const {
        inference::RepositoryModelUnloadResponse r;
        shell_->of.unload(c.who, model_of(q));
        r.set_model_name(model_of(q));
        r.set_isunloaded(true);
        return bytes_of(r);
    }
    void load(const call_ptr& c, const inference::RepositoryModelLoadRequest& q) {
        const auto name = model_of(q);
        shell_->of.load(c->who, name, [sh = shell_, c, name](const refused* why) {
            sh->later([c, name, r = why == nullptr ? std::optional<refused>() : *why] {
                with(c, [&](link& l) {
                    if (r) return l.refuse(c, *r);
                    inference::RepositoryModelLoadResponse m;
                    m.set_model_name(name);
                    m.set_isloaded(true);
                    l.attempt(c, [&] { l.answer(c, bytes_of(m)); });
                });
            });
        });
    }
    /// Sends the only answer.
    void answer(const call_ptr& c, std::string bytes) {
        if (c->over) return;
        session_->send(c->id, std::move(bytes));
        session_->finish(c->id, {});
        leave(*c);
    }
    /// Runs `f` on the tenants' thread, for a call that isn't over and whose connection still
    /// exists.
    template <class F>
    static void with(const call_ptr& c, F f) {
        const auto l = c->over ? nullptr : c->of.lock();
        if (l == nullptr || !l->session_) return;
        f(*l);
        l->flush();
    }

    /// The earlier of the request's own deadline and the call's.
    static std::uint64_t timeout(const call& c, std::uint64_t us) {
        if (c.deadline == when::max()) return us;
        const auto left = std::chrono::duration_cast<std::chrono::microseconds>(c.deadline - clock::now()).count();
        const auto mine = static_cast<std::uint64_t>(std::max<std::int64_t>(left, 1));
        return us == 0 ? mine : std::min(us, mine);
    }
    // Parses on another thread. An exception there comes back as the answer.
    void read_tensors(const call_ptr& c, std::string message) {
        auto& reader = shell_->reader_of(message.size());
        reader.later(
            [sh = shell_, c, bytes = std::move(message)] {
                if (c->gone.load(std::memory_order_relaxed)) return;
                try {
                    c->what == method::stream ? stream_request(sh, c, bytes) : infer(sh, c, bytes);
                } catch (...) {
                    sh->later([c, why = as_refused(std::current_exception())] {
                        with(c, [&](link& l) { l.failed(c, why); });
                    });
                }
            },
            c->who.counts.get());
    }
    /// Handles a request of a client whose key is known, and counts it.
    static inference::ModelInferRequest infer_message(const shell& sh, const std::string& bytes) {
        google::protobuf::io::ArrayInputStream in(bytes.data(), static_cast<int>(bytes.size()));
        check_lists(in, sh.options.max_lists);
        return parsed<inference::ModelInferRequest>(bytes);
    }
    static void infer(const std::shared_ptr<shell>& sh, const call_ptr& c, const std::string& bytes) {
        const auto q = infer_message(*sh, bytes);
        const auto model = sh->of.model(c->who, q.model_name(), q.model_version());
        auto r = read_infer(q);
        r.timeout_us = timeout(*c, r.timeout_us);
        auto asked = r.outputs;
        sh->of.infer(c->who, model->info.name, std::move(r),
                     [sh, c, asked = std::move(asked)](answer_of_engine a) mutable {
                         answer_later(sh, c, [a = std::move(a), asked = std::move(asked)] {
                             if (const auto* why = std::get_if<refused>(&a)) throw refused(*why);
                             inference::ModelInferResponse m;
                             write_infer(m, std::get<infer_response>(a), asked);
                             return bytes_of(m);
                         });
                     });
    }
    using answer_of_engine = inference_server::answer;
    /// `make` makes the bytes of the only answer, on a thread where tenants take turns.
    template <class F>
    static void answer_later(const std::shared_ptr<shell>& sh, const call_ptr& c, F make) noexcept try {
        sh->answers.later(
            [sh, c, make = std::move(make)] {
                std::variant<std::string, refused> made;
                try {
                    made = make();
                } catch (...) {
                    made = as_refused(std::current_exception());
                }
                sh->later([c, made = std::move(made)]() mutable {
                    with(c, [&](link& l) {
                        if (const auto* why = std::get_if<refused>(&made)) return l.failed(c, *why);
                        if (c->what != method::stream) return l.answer(c, std::get<std::string>(std::move(made)));
                        l.session_->send(c->id, std::get<std::string>(std::move(made)));
                        l.answered(c);
                    });
                });
            },
            c->who.counts.get());
    } catch (...) {
        // Without memory for the answer, the server can do nothing more: the call's deadline ends
        // the call.
    }

    // ---- streams: one request after another, each with one answer or with an answer for each
    // token. The next request is looked at once the last request is answered, and the next piece of
    // a text is made once the last piece is written. So the server waits for slow readers.

    static void stream_request(const std::shared_ptr<shell>& sh, const call_ptr& c, const std::string& bytes) {
        const auto q = infer_message(*sh, bytes);
        sh->later([c, id = q.id()] { c->request_id = id; });  // also for an error
        const auto source = sh->of.model(c->who, q.model_name(), q.model_version());
        const auto& model = source->info;
        const auto wants = q.parameters().find("triton_enable_empty_final_response");
        const bool empty_end = wants != q.parameters().end() && wants->second.bool_param();
        auto r = read_infer(q);
        if (model.streams) {
            check_inputs(model, r);
            auto text = sh->of.generate(c->who, model.name, read_generate(q, r));
            return sh->later([c, source, empty_end, text = std::move(text)] {
                with(c, [&](link& l) {
                    c->model = source;
                    c->empty_end = empty_end;
                    c->text = text;
                    l.step(c);
                });
            });
        }
        r.timeout_us = timeout(*c, r.timeout_us);
        auto asked = r.outputs;
        sh->of.infer(c->who, model.name, std::move(r), [sh, c, asked = std::move(asked)](answer_of_engine a) mutable {
            answer_later(sh, c, [a = std::move(a), asked = std::move(asked)] {
                if (const auto* why = std::get_if<refused>(&a)) throw refused(*why);
                inference::ModelStreamInferResponse m;
                write_infer(*m.mutable_infer_response(), std::get<infer_response>(a), asked);
                mark_final(m);
                return bytes_of(m);
            });
        });
    }
    static void mark_final(inference::ModelStreamInferResponse& r) {
        (*r.mutable_infer_response()->mutable_parameters())["triton_final_response"].set_bool_param(true);
    }
    /// Answers the call's request with an error. That ends a call, unless it is a stream.
    void failed(const call_ptr& c, const refused& why) {
        if (c->over) return;
        if (c->what != method::stream) return refuse(c, why);
        attempt(c, [&] {
            inference::ModelStreamInferResponse r;
            r.set_error_message(why.what());
            r.mutable_infer_response()->set_id(c->request_id);
            session_->send(c->id, bytes_of(r));
            answered(c);
        });
    }
    /// Answers a stream's request with an error.
    void answered(const call_ptr& c) {
        c->busy = c->piece_runs = false;
        c->request_id.clear();
        c->text.reset();
        c->counted.give_back(std::exchange(c->serving, 0));
        c->due = clock::now() + (c->in.has_begun() ? shell_->options.message_timeout : shell_->options.idle_timeout);
        const auto ahead = std::exchange(c->ahead, {});
        attempt(c, [&] { feed(c, ahead); });
        step(c);
    }
    /// Makes the next piece of each text whose last piece is written.
    void make_pieces() {
        std::vector<call_ptr> waiting;
        for (const auto& [id, c] : calls_)
            if (c->text != nullptr && !c->piece_runs) waiting.push_back(c);
        for (const auto& c : waiting) step(c);
    }
    /// Does the next step, unless a step is under way.
    void step(const call_ptr& c) {
        if (c->over || c->what != method::stream) return;
        if (c->text != nullptr && !c->piece_runs && session_->is_drained(c->id)) {
            c->piece_runs = true;
            return attempt(c, [&] { make_piece(c); });
        }
        if (c->busy || (!c->all_said && !leaving_)) return;
        if (c->in.has_begun()) return refuse(c, refused(400, "the message isn't complete"));
        if (leaving_ && !c->all_said) return refuse(c, refused(503, "the server is going down"));
        session_->finish(c->id, {});
        leave(*c);
    }
    void make_piece(const call_ptr& c) {
        constexpr std::uint32_t tokens = 8;
        const auto text = c->text;  // an end that comes at once drops the member
        text->more(
            tokens,
            [sh = shell_, c, model = c->model, id = c->request_id](const std::string& token) {
                if (c->gone.load(std::memory_order_relaxed)) return false;
                inference::ModelStreamInferResponse r;
                write_token(*r.mutable_infer_response(), model->info, id, token);
                sh->later([c, bytes = bytes_of(r)] { with(c, [&](link& l) { l.session_->send(c->id, bytes); }); });
                return true;
            },
            [sh = shell_, c](token_stream::end e) {
                sh->later([c, e = std::move(e)] { with(c, [&](link& l) { l.piece_ended(c, e); }); });
            });
    }
    void piece_ended(const call_ptr& c, const token_stream::end& e) {
        if (e.why) return failed(c, *e.why);
        c->piece_runs = false;
        if (!e.last) return step(c);
        attempt(c, [&] {
            if (c->empty_end) {
                inference::ModelStreamInferResponse r;
                write_head(*r.mutable_infer_response(), c->model->info, c->request_id);
                mark_final(r);
                session_->send(c->id, bytes_of(r));
            }
            answered(c);
        });
    }

    const std::shared_ptr<shell> shell_;
    room* home_ = &shell_->strangers;
    tcp::socket socket_;
    const front_door::id id_;
    // the last key that the connection has shown
    const void* whose_ = nullptr;
    // calls with their messages, waiting for the move
    std::vector<std::pair<call_ptr, std::string>> waiting_{};
    const when began_;
    when heard_, used_{}, wrote_{}, lingered_{};
    std::string start_, out_;
    std::optional<http2> session_;
    std::map<http2::call_id, call_ptr> calls_;
    std::size_t refusals_ = 0;
    static constexpr long most_credit = 1000, credit_of_stranger = 100;
    long credit_ = credit_of_stranger;  // the allowance of frames without content
    bool known_ = false, uploads_ = false, reading_ = false, writing_ = false, pinged_ = false;
    bool leaving_ = false, ends_ = false, lingers_ = false, has_left_ = false;
};

}  // namespace

void grpc_server::shell::accept() {
    front.async_accept([this](error_code e, tcp::socket socket) {
        if (e == asio::error::operation_aborted || strangers.stopping) return;
        const bool fails = e && e != asio::error::connection_aborted;
        if (fails != std::exchange(is_shut, fails)) of.shut(fails);
        if (!fails) {
            // Accepts first, so that the next connection comes even without memory for this
            // connection.
            accept();
            if (!e) came(std::move(socket));
            return;
        }
        // usually there are no file descriptors
        auto pause = std::make_shared<asio::steady_timer>(strangers.thread.io(), 50ms);
        pause->async_wait([this, pause](error_code) {
            if (!strangers.stopping) accept();
        });
    });
}

void grpc_server::shell::came(tcp::socket socket) {
    const auto id = [this] {
        const std::lock_guard lock(mutex);
        return door.come();
    }();
    std::shared_ptr<link> l;
    try {
        l = std::make_shared<link>(self.lock(), std::move(socket), id);
    } catch (...) {
        const std::lock_guard lock(mutex);
        door.gone(id);
        throw;
    }
    strangers.links.emplace(id, l);
    l->read();
    close_surplus();
}

void grpc_server::shell::close_surplus() {
    for (;;) {
        std::optional<front_door::id> old;
        {
            const std::lock_guard lock(mutex);
            old = door.surplus();
            if (old) door.gone(*old);
        }
        if (!old) return;
        if (strangers.links.contains(*old))
            close(strangers, *old);
        else  // moved, or on its way there
            later([r = &tenants, id = *old] { close(*r, id); });
    }
}

void grpc_server::shell::known(front_door::id id, const void* whose) {
    const std::lock_guard lock(mutex);
    door.known(id, whose);
}

void grpc_server::shell::gone(front_door::id id) noexcept {
    const std::lock_guard lock(mutex);
    door.gone(id);
    if (count.fetch_sub(1, std::memory_order_relaxed) == 1) leaves.notify_all();
}

void grpc_server::shell::close(room& r, front_door::id id) {
    const auto found = r.links.find(id);
    if (found == r.links.end()) return;
    const auto l = found->second;
    l->close();
}

void grpc_server::shell::tick(room& r) {
    r.clockwork.expires_after(250ms);
    r.clockwork.async_wait([this, &r](error_code e) {
        if (e) return;
        tick(r);  // first: a step that throws for lack of memory is done the next time
        const auto now = clock::now();
        for (const auto& l : r.all()) l->tick(now);
    });
}

void grpc_server::shell::close_idle(room& r) {
    r.stopping = true;
    error_code ignored;
    if (&r == &strangers) front.close(ignored);
    for (const auto& l : r.all()) l->go_away();
    const std::lock_guard lock(mutex);
    --rooms_open;
    leaves.notify_all();
}

grpc_server::grpc_server(service& s, grpc_options o) : shell_(std::make_shared<shell>(s, std::move(o))) {
    shell_->self = shell_;
    // Protobuf logs a line for each text that isn't UTF-8, so any client could fill the log.
    google::protobuf::SetLogHandler(nullptr);
    shell_->accept();
    for (auto* const r : {&shell_->strangers, &shell_->tenants}) {
        shell_->tick(*r);
        r->thread.start("gRPC");
    }
}

grpc_server::~grpc_server() {
    stop(0ms);
    shell_->reads.stop();
    shell_->long_reads.stop();
    shell_->answers.stop();
    const std::array all{&shell_->strangers.thread, &shell_->tenants.thread};
    for (auto* c : all) c->refuse_more();
    while (std::ranges::count_if(all, &carrier::run_rest) != 0) {
    }  // work that engines have posted since
}

std::uint16_t grpc_server::port() const noexcept { return shell_->port; }
std::size_t grpc_server::connections() const noexcept { return shell_->count.load(std::memory_order_relaxed); }

void grpc_server::post(std::function<void()> f, bool of_strangers) {
    asio::post((of_strangers ? shell_->strangers : shell_->tenants).thread.io(), std::move(f));
}

void grpc_server::hurry() {
    const std::lock_guard lock(shell_->mutex);
    shell_->in_a_hurry = true;
    shell_->leaves.notify_all();
}

void grpc_server::stop(std::chrono::milliseconds patience) {
    const auto s = shell_;
    if (!s->tenants.thread.runs()) return;
    for (auto* const r : {&s->strangers, &s->tenants}) r->thread.later([s, r] { s->close_idle(*r); });
    {
        std::unique_lock lock(s->mutex);
        s->leaves.wait_for(lock, patience, [&] {
            return s->in_a_hurry || (s->rooms_open == 0 && s->count.load(std::memory_order_relaxed) == 0);
        });
    }
    // Ends the strangers' thread first, so that no connection moves to the tenants' thread any
    // more.
    for (auto* const r : {&s->strangers, &s->tenants})
        r->thread.end([s, r] {
            r->clockwork.cancel();
            for (const auto& l : r->all()) l->close();
        });
}

}  // namespace inference_server
