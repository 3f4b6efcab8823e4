// SPDX-License-Identifier: Apache-2.0
// One thread serves strangers, and another thread serves clients whose key is known. Both threads
// read, parse short requests and write. Engines answer from their own threads by posting to the
// second thread. This is the only file that includes Beast.
#include "inference_server/http_server.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>

#include "inference_server/carrier.hpp"
#include "inference_server/status_page.hpp"
#include "inference_server/worker.hpp"

namespace inference_server {

namespace {

namespace beast = boost::beast;
namespace http = beast::http;
namespace asio = boost::asio;
using tcp = asio::ip::tcp;
using boost::system::error_code;
using namespace std::chrono_literals;

constexpr std::string_view as_json = "application/json";

std::string_view view(boost::beast::string_view s) { return {s.data(), s.size()}; }

class session;

}  // namespace

/// The state that all sessions share. A session belongs to one thread at a time, its home. The last
/// holder ends the session, even if the holder is an engine.
struct http_server::shell {
    shell(service& s, http_options o)
        : of(s),
          options(std::move(o)),
          door(options.connections),
          front(strangers.io(), endpoint(options.address, options.port)),
          back(tenants.io(), endpoint(options.admin_address, options.admin_port)),
          protocol(front.local_endpoint().protocol()),
          front_port(front.local_endpoint().port()),
          back_port(back.local_endpoint().port()) {}

    static tcp::endpoint endpoint(const std::string& address, std::uint16_t port) {
        return {asio::ip::make_address(address), port};
    }
    void accept(tcp::acceptor& from, bool admin);
    [[nodiscard]] front_door::id opened(session* s, bool admin);
    void known(front_door::id i, const void* whose);
    void closed(front_door::id i, bool admin);
    void close_surplus(bool admin);
    /// For the sessions whose home this is. Called on that thread.
    template <class F>
    void each_session(const carrier& at, F f);
    /// Takes no more connections, and closes those that wait for a request.
    void close_idle(carrier& at, tcp::acceptor& from);
    [[nodiscard]] front_door& door_of(bool admin) noexcept { return admin ? back_door : door; }

    carrier strangers{carrier::rank::strangers}, tenants{carrier::rank::tenants};
    service& of;
    const http_options options;
    // guarded by mutex, like the next two members
    front_door door, back_door{{.most = 64, .strangers = 64}};
    std::map<front_door::id, session*> sessions{}, operators{};
    tcp::acceptor front, back;
    const tcp protocol;
    const std::uint16_t front_port, back_port;
    std::weak_ptr<shell> self;
    std::mutex mutex;  // never held for long, because both threads and the engines wait for it
    std::condition_variable leaves;
    int acceptors = 2;                   // guarded by mutex
    bool in_a_hurry = false;             // guarded by mutex: the end no longer waits
    std::atomic<std::size_t> count{0};   // the number of sessions
    std::atomic<std::size_t> bodies{0};  // in bytes
    std::atomic<bool> ends{false};       // requests that aren't parsed yet are dropped
    std::atomic<bool> stopping{false};
    bool is_shut = false;      // for the strangers' thread
    worker reads, long_reads;  // parse requests that would take a thread of connections too long
};

namespace {

using shell = http_server::shell;

/// A text on its way to the client.
struct outbox {
    std::shared_ptr<token_stream> text;
    std::string waiting, writing;  // events
    bool piece_ended = false, last = false;
};

/// A connection: one request after the other.
class session : public std::enable_shared_from_this<session> {
public:
    session(std::shared_ptr<shell> of, tcp::socket socket, bool admin)
        : shell_(std::move(of)),
          stream_(std::in_place, std::move(socket)),
          admin_(admin),
          home_(admin ? &shell_->tenants : &shell_->strangers),
          buffer_(shell_->options.max_header) {
        error_code ignored;
        stream_->socket().set_option(tcp::no_delay(true), ignored);
        id_ = shell_->opened(this, admin_);
    }
    session(const session&) = delete;
    session& operator=(const session&) = delete;
    ~session() {
        give_back_body();
        gone_->store(true, std::memory_order_relaxed);
        shell_->closed(id_, admin_);
    }

    void read_header() {
        if (shell_->stopping) return linger();
        idle_ = true;
        give_back_body();
        // Connections wait here for minutes, thousands of them.
        caller_ = {};
        buffer_.shrink_to_fit();
        parser_.emplace();
        parser_->header_limit(static_cast<std::uint32_t>(shell_->options.max_header));
        parser_->body_limit(shell_->options.max_body);
        stream_->expires_after(shell_->options.header_timeout);
        http::async_read_header(*stream_, buffer_, *parser_,
                                [self = shared_from_this()](error_code e, std::size_t) { self->on_header(e); });
    }
    /// Closes a session that waits for a request, because no further request will be served.
    void close_if_idle() {
        if (idle_) stream_->cancel();
    }
    void close_now() {
        gone_->store(true, std::memory_order_relaxed);
        if (stream_) stream_->close();
    }
    /// The only thread that touches the session. It changes once, on the strangers' thread.
    /// acquire: all work that was done there comes before.
    [[nodiscard]] carrier* home() const noexcept { return home_.load(std::memory_order_acquire); }

private:
    // ---- a request

    void on_header(error_code e) {
        idle_ = false;
        if (e == http::error::body_limit) return refuse_unread({413, "the body is too large"});
        if (e == http::error::header_limit || e == http::error::buffer_overflow)
            return refuse_unread({431, "the header is too large"});
        if (e && e.category() == error_code(http::make_error_code(http::error::bad_method)).category() &&
            e != http::error::end_of_stream)
            return refuse_unread({400, "this isn't HTTP: " + e.message()});
        if (e) return;  // closed, or too slow
        try {
            begin();
        } catch (const refused& r) {
            return refuse_unread(r);
        }
        if (caller_.counts != nullptr && home() == &shell_->strangers) return move_in();
        go_on();
    }
    /// The client has shown a key: from now on its requests don't wait in a line with strangers'.
    void move_in() {
        error_code e;
        descriptor socket(stream_->release_socket().release(e));
        if (e) return;
        tcp::socket there(shell_->tenants.io(), shell_->protocol, socket.fd);
        socket.fd = -1;
        stream_.emplace(std::move(there));
        home_.store(&shell_->tenants, std::memory_order_release);
        shell_->tenants.later([self = shared_from_this()] { self->go_on(); });
    }
    void go_on() {
        if (beast::iequals(parser_->get()[http::field::expect], "100-continue")) return ask_for_body();
        read_body();
    }

    // Refuses everything that can be refused before the body comes.
    void begin() {
        const auto& head = parser_->get();
        check_framing(head);
        if (admin_) check_browser(head);
        keep_alive_ = head.keep_alive();
        const auto length = parser_->content_length();
        const auto header = head.find("Inference-Header-Content-Length");
        header_length_.reset();
        if (header != head.end()) header_length_ = number(view(header->value()));
        if (!admin_) {
            route_ = route_of(is_head() ? "GET" : view(head.method_string()), view(head.target()));
            if (needs_key(route_.what)) {
                caller_ = shell_->of.authenticate(key(head));
                if (const auto* whose = caller_.counts.get(); std::exchange(whose_, whose) != whose)
                    shell_->known(id_, whose);
            }
        }
        if (header_length_ && *header_length_ > shell_->options.max_json) throw refused(413, "the JSON is too large");
        const auto limit = longest_body();
        if (length && *length > limit) throw refused(413, "the body is too large");
        parser_->body_limit(limit);
        if (head.count(http::field::content_encoding) != 0) throw refused(415, "compressed bodies aren't read");
    }
    /// A request must state its end, its host and its key once and unambiguously, because a proxy
    /// in front may have read it differently. Throws refused.
    static void check_framing(const http::request<http::string_body>& head) {
        const auto times = [&](auto name) { return head.count(name); };
        const auto coding = times(http::field::transfer_encoding), length = times(http::field::content_length);
        if (coding + length > 1) throw refused(400, "more than one length of the body");
        if (coding == 1 && (head.version() < 11 || !beast::iequals(head[http::field::transfer_encoding], "chunked")))
            throw refused(400, "a body comes chunked, or with its length");
        if (times(http::field::host) > 1 || (times(http::field::host) == 0 && head.version() >= 11))
            throw refused(400, "there must be one host");
        if (times(http::field::authorization) + times("X-API-Key") > 1) throw refused(400, "more than one key");
        if (times("Inference-Header-Content-Length") > 1) throw refused(400, "more than one length of the header");
    }
    /// A foreign page in an operator's browser must not make requests, neither under a name of its
    /// own for this address, nor as another site. Throws refused.
    static void check_browser(const http::request<http::string_body>& head) {
        const auto host = view(head[http::field::host]);
        const auto end = host.starts_with('[') ? host.find(']') + 1 : host.find(':');
        const auto name = host.substr(0, end);
        const auto port = host.substr(std::min(name.size(), host.size()));
        const bool is_number = port.empty() || (port[0] == ':' && port.find_first_not_of("0123456789", 1) == port.npos);
        if ((name != "127.0.0.1" && name != "[::1]" && !beast::iequals({name.data(), name.size()}, "localhost")) ||
            !is_number)
            throw refused(403, "operators ask by 127.0.0.1, [::1] or localhost");
        const auto origin = head.find(http::field::origin);
        if (origin != head.end() && view(origin->value()) != "http://" + std::string(host))
            throw refused(403, "not for pages of other sites");
        const auto site = head.find("Sec-Fetch-Site");
        if (site != head.end() && view(site->value()) == "cross-site" && head.method() != http::verb::get)
            throw refused(403, "not for pages of other sites");
    }
    /// Clients without a key get none of the room for bodies.
    [[nodiscard]] std::size_t longest_body() const {
        constexpr std::size_t of_a_word = 65'536;
        if (admin_) return of_a_word;
        switch (route_.what) {
            case action::infer:
                return header_length_ && parser_->content_length() ? shell_->options.max_body
                                                                   : shell_->options.max_json;
            case action::generate:
            case action::generate_stream: return shell_->options.max_json;
            case action::repository_index:
            case action::model_load:
            case action::model_unload: return std::min(of_a_word, shell_->options.max_json);
            default: return 0;  // has no body
        }
    }
    [[nodiscard]] bool is_head() const { return parser_->get().method() == http::verb::head; }
    static std::size_t number(std::string_view text) {
        std::size_t n = 0;
        const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), n);
        if (code != std::errc{} || end != text.data() + text.size()) throw refused(400, "no length of the header");
        return n;
    }
    template <class Head>
    static std::string_view key(const Head& head) {
        const auto bearer = key_of_bearer(view(head[http::field::authorization]));
        return bearer.empty() ? view(head["X-API-Key"]) : bearer;
    }
    static bool needs_key(action a) {
        return a != action::server_live && a != action::server_ready && a != action::server_metadata;
    }

    void ask_for_body() {
        static constexpr std::string_view text = "HTTP/1.1 100 Continue\r\n\r\n";
        asio::async_write(*stream_, asio::buffer(text.data(), text.size()),
                          [self = shared_from_this()](error_code e, std::size_t) {
                              if (!e) self->read_body();
                          });
    }
    void read_body() {
        const auto mib = parser_->content_length().value_or(shell_->options.max_json) >> 20U;
        stream_->expires_after(shell_->options.body_timeout + std::chrono::seconds(mib));
        read_some_body();
    }
    // Counts the bytes that have come, and not those that were announced. Otherwise four clients
    // that send nothing could keep all other clients out.
    void read_some_body() {
        if (parser_->is_done()) return on_body();
        http::async_read_some(*stream_, buffer_, *parser_, [self = shared_from_this()](error_code e, std::size_t) {
            if (e == http::error::body_limit) return self->refuse_unread({413, "the body is too large"});
            if (e) return;
            const auto size = self->parser_->get().body().size(), more = size - self->body_;
            self->body_ = size;
            const auto most = self->shell_->options.max_bodies;
            const auto all = self->shell_->bodies.fetch_add(more, std::memory_order_relaxed) + more;
            if (auto& whose = self->caller_.counts; whose != nullptr) {
                self->counted_for_ = whose;
                if (whose->uploads.fetch_add(more, std::memory_order_relaxed) + more > most / 2)
                    return self->refuse_unread({429, "too much is being uploaded with this key", 1});
            }
            if (all > most) return self->refuse_unread({503, "too much is being uploaded", 1});
            self->read_some_body();
        });
    }
    void on_body() {
        stream_->expires_never();
        attempt([this] { admin_ ? serve_operator() : serve(); });
    }
    template <class F>
    void attempt(F f) {
        try {
            f();
        } catch (...) {
            refuse(as_refused(std::current_exception()));
        }
    }
    void give_back_body() {
        const auto size = std::exchange(body_, 0);
        shell_->bodies.fetch_sub(size, std::memory_order_relaxed);
        if (const auto whose = std::exchange(counted_for_, nullptr))
            whose->uploads.fetch_sub(size, std::memory_order_relaxed);
    }

    // ---- answers

    void serve() {
        auto& s = shell_->of;
        switch (route_.what) {
            case action::server_live: return reply(200, R"({"live":true})");
            case action::server_ready: return answer_ready(s.ready());
            case action::server_metadata: return reply(200, server_metadata_json());
            case action::model_metadata: return reply(200, model_metadata_json(model()->info));
            case action::model_config: return reply(200, model_config_json(model()->info));
            case action::model_ready: (void)model(); return answer_ready(s.ready(caller_, route_.model));
            case action::repository_index: return reply(200, index_json());
            case action::model_load:
                return s.load(caller_, route_.model, [self = shared_from_this()](const refused* why) {
                    self->later([self, r = why == nullptr ? std::optional<refused>() : *why] {
                        r ? self->refuse(*r) : self->reply(200, {});
                    });
                });
            case action::model_unload: s.unload(caller_, route_.model); return reply(200, {});
            case action::infer: return read_infer();
            case action::generate: return read_generate(&session::generate);
            case action::generate_stream: return read_generate(&session::stream);
        }
    }
    [[nodiscard]] std::shared_ptr<const model_source> model() const {
        return shell_->of.model(caller_, route_.model, route_.version);
    }
    /// Triton's clients look at the status, and KServe's at the body.
    void answer_ready(bool is) { reply(is ? 200 : 503, is ? R"({"ready":true})" : R"({"ready":false})"); }
    std::string index_json() {
        std::string out = "[";
        for (const auto& m : shell_->of.index(caller_)) {
            if (out.size() > 1) out += ',';
            json::append(out += "{\"name\":", std::string_view(m.name));
            out += R"(,"version":"1","state":")" + std::string(m.ready ? "READY" : "UNAVAILABLE") + R"(","reason":")" +
                   (m.ready ? "" : "not loaded yet") + "\"}";
        }
        return out += ']';
    }

    void read_infer() {
        (void)model();
        const std::size_t size = parser_->get().body().size();
        parse(
            header_length_.value_or(size), size, [this] { return parse_infer(parser_->get().body(), header_length_); },
            [this](infer_request r) { infer(std::move(r)); });
    }
    void read_generate(void (session::*use)(generate_request)) {
        const std::size_t size = parser_->get().body().size();
        parse(
            size, size, [this] { return parse_generate(parser_->get().body()); },
            [this, use](generate_request r) { (this->*use)(std::move(r)); });
    }
    // JSON of 4 KiB takes a tenth of a millisecond, and so does copying a MiB. Longer work doesn't
    // run on this thread, for which all connections wait, but on a thread where tenants take turns.
    // A third thread takes still longer work, such as 4 MiB of JSON, which takes a fifth of a
    // second.
    static constexpr std::size_t quick_json = 4096, quick_bytes = std::size_t{1} << 20, short_json = 65'536;
    template <class Parse, class Use>
    void parse(std::size_t json, std::size_t all, Parse what, Use use) {
        if (json <= quick_json && all <= quick_bytes) return use(what());
        auto read = [self = shared_from_this(), what, use] {
            if (self->shell_->ends) return;
            std::optional<decltype(what())> r;
            std::optional<refused> why;
            try {
                r = what();
            } catch (...) {
                why = as_refused(std::current_exception());
            }
            self->later([self, use, r = std::move(r), why = std::move(why)]() mutable {
                self->attempt([&] { why ? self->refuse(*why) : use(*std::move(r)); });
            });
        };
        elsewhere(json, all).later(std::move(read), caller_.counts.get());
    }
    [[nodiscard]] worker& elsewhere(std::size_t json, std::size_t all) const {
        return json <= short_json && all <= quick_bytes ? shell_->reads : shell_->long_reads;
    }
    void infer(infer_request r) {
        asked_ = {.outputs = r.outputs, .binary_by_default = r.binary_by_default};
        std::string().swap(parser_->get().body());  // an assignment would keep the memory
        shell_->of.infer(caller_, route_.model, std::move(r), [self = shared_from_this()](answer a) {
            self->later([self, a = std::move(a)]() mutable { self->answered(std::move(a)); });
        });
    }
    // A large answer is written by the thread that parses large requests.
    void answered(answer a) {
        if (const auto* why = std::get_if<refused>(&a)) return refuse(*why);
        std::size_t json = 0, all = 0;
        for (const auto& t : std::get<infer_response>(a).outputs) {
            const auto asked = std::ranges::find(asked_.outputs, t.name, &requested_output::name);
            const bool binary = asked == asked_.outputs.end() ? asked_.binary_by_default : asked->binary;
            if (!binary) json += t.data.size();
            all += t.data.size();
        }
        if (json <= quick_json && all <= quick_bytes) return attempt([&] { reply(written(a)); });
        attempt([&] {
            elsewhere(json, all).later(
                [self = shared_from_this(), a = std::make_shared<const answer>(std::move(a))] {
                    if (self->shell_->ends) return;
                    std::optional<infer_body> b;
                    std::optional<refused> why;
                    try {
                        b = self->written(*a);
                    } catch (...) {
                        why = as_refused(std::current_exception());
                    }
                    self->later([self, b = std::move(b), why = std::move(why)]() mutable {
                        self->attempt([&] { why ? self->refuse(*why) : self->reply(*std::move(b)); });
                    });
                },
                caller_.counts.get());
        });
    }
    [[nodiscard]] infer_body written(const answer& a) const { return write_infer(std::get<infer_response>(a), asked_); }
    void reply(infer_body b) {
        reply(200, std::move(b.body), b.header_length ? "application/octet-stream" : as_json, b.header_length);
    }

    void generate(generate_request r) {
        auto text = shell_->of.generate(caller_, route_.model, std::move(r));
        auto all = std::make_shared<std::string>();
        watch(true);
        more(std::move(text), std::move(all));
    }
    void more(std::shared_ptr<token_stream> text, std::shared_ptr<std::string> all) {
        text->more(
            tokens_of_piece,
            [all, gone = gone_, who = caller_](const std::string& t) {
                return all->append(t), !gone->load(std::memory_order_relaxed) && !who.is_revoked();
            },
            [self = shared_from_this(), text, all](token_stream::end e) {
                self->later([self, text, all, e = std::move(e)] {
                    if (self->gone_->load(std::memory_order_relaxed)) return self->close_now();
                    if (self->caller_.is_revoked()) return self->refuse_unread({401, "this API key was taken away"});
                    if (e.why) return self->refuse(*e.why);
                    if (!e.last) return self->more(text, all);
                    self->reply(200, generate_json(self->route_.model, model_version, *all));
                });
            });
    }

    void serve_operator() {
        auto& s = shell_->of;
        const auto& head = parser_->get();
        const auto path = view(head.target());
        if (head.method() == http::verb::post && path == "/reload")
            return s.reload_soon([self = shared_from_this()](std::string_view text) {
                self->later([self, why = std::string(text)] {
                    why.empty() ? self->reply(200, "{}") : self->refuse({409, why});
                });
            });
        if (head.method() != http::verb::get && !is_head()) throw refused(405, "not by this method");
        if (path == "/metrics") return reply(200, s.metrics(), "text/plain; version=0.0.4; charset=utf-8");
        if (path == "/" || path == "/status") return reply(200, std::string(status_page), "text/html; charset=utf-8");
        if (path == "/status.json") return reply(200, s.status_json());
        if (path == "/timeline.json") return reply(200, s.timeline_json());
        throw refused(404, "there is nothing by this path");
    }

    // ---- writing

    /// Runs `f` on this session's thread. Only clients with a key have work done elsewhere that
    /// comes back through this function, so no session moves in the meantime.
    template <class F>
    void later(F f) noexcept {
        home()->later(std::move(f));
    }

    void reply(int status, std::string body, std::string_view type = as_json,
               std::optional<std::size_t> header_length = {}, unsigned retry_after = 0) {
        if (std::exchange(watching_, false)) {
            error_code ignored;
            stream_->socket().cancel(ignored);
        }
        auto& r = response_.emplace();
        // a client of HTTP/1.0 must be told that its connection stays
        r.version(parser_->get().version() == 10 ? 10 : 11);
        r.result(static_cast<unsigned>(status));
        r.set(http::field::content_type, beast::string_view(type.data(), type.size()));
        if (header_length) r.set("Inference-Header-Content-Length", std::to_string(*header_length));
        if (retry_after != 0) r.set(http::field::retry_after, std::to_string(retry_after));
        if (status == 401) r.set(http::field::www_authenticate, "Bearer");
        if (admin_) r.set(http::field::cache_control, "no-store");
        r.body() = std::move(body);
        keep_alive_ = keep_alive_ && !shell_->stopping;
        r.keep_alive(keep_alive_);
        r.prepare_payload();
        stream_->expires_after(shell_->options.write_timeout);
        serializer_.emplace(r);
        auto written = [self = shared_from_this()](error_code e, std::size_t) {
            self->serializer_.reset();
            self->response_.reset();
            if (e) return;
            self->keep_alive_ ? self->read_header() : self->linger();
        };
        if (is_head())  // the answer to HEAD never has a body
            http::async_write_header(*stream_, *serializer_, std::move(written));
        else
            http::async_write(*stream_, *serializer_, std::move(written));
    }
    void refuse(const refused& why) { reply(why.status, error_json(why.what()), as_json, {}, why.retry_after); }
    /// The rest of the request isn't read, so no other request can follow on the connection.
    void refuse_unread(const refused& why) {
        keep_alive_ = false;
        refuse(why);
    }
    /// Closes without losing the answer. A socket that still has unread data would be reset.
    void linger() {
        error_code ignored;
        stream_->socket().shutdown(tcp::socket::shutdown_send, ignored);
        stream_->expires_after(2s);
        discard();
    }
    void discard() {
        stream_->async_read_some(asio::buffer(trash_), [self = shared_from_this()](error_code e, std::size_t n) {
            self->discarded_ += n;
            if (!e && self->discarded_ < std::size_t{1} << 20U) self->discard();
        });
    }

    // ---- a stream of tokens: server-sent events, in chunks. The next piece is made once the last
    // piece is written.

    static constexpr std::uint32_t tokens_of_piece = 8;
    void stream(generate_request r) {
        if (parser_->get().version() < 11) throw refused(505, "streams need HTTP/1.1");
        out_.emplace();
        out_->text = shell_->of.generate(caller_, route_.model, std::move(r));
        keep_alive_ = false;
        out_->writing =
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-store\r\n"
            "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
        watch();
        next_piece();
        flush();
    }
    void next_piece() {
        out_->piece_ended = false;
        out_->text->more(
            tokens_of_piece,
            [self = weak_from_this(), gone = gone_, model = route_.model, who = caller_](const std::string& token) {
                if (gone->load(std::memory_order_relaxed) || who.is_revoked()) return false;
                if (const auto s = self.lock())
                    s->later([s, event = "data: " + generate_json(model, model_version, token) + "\n\n"] {
                        s->add_event(event);
                    });
                return true;
            },
            [self = shared_from_this()](token_stream::end e) {
                self->later([self, e = std::move(e)] {
                    if (e.why) self->add_event("data: " + error_json(e.why->what()) + "\n\n");
                    self->out_->piece_ended = true;
                    self->out_->last = e.last;
                    self->flush();
                });
            });
    }
    void add_event(const std::string& event) {
        constexpr std::string_view digits = "0123456789abcdef";
        std::string size;
        for (auto n = event.size(); n != 0; n /= 16) size.insert(size.begin(), digits[n % 16]);
        out_->waiting += size + "\r\n" + event + "\r\n";
        flush();
    }
    void flush() {
        auto& o = *out_;
        if (writing_ || gone_->load(std::memory_order_relaxed)) return;
        if (o.writing.empty()) {
            if (o.waiting.empty() && o.piece_ended && !o.last) return next_piece();
            if (o.waiting.empty() && o.piece_ended) {
                o.waiting = "0\r\n\r\n";
                o.piece_ended = false;  // only once
                ended_ = true;
            }
            o.writing = std::exchange(o.waiting, {});
        }
        if (o.writing.empty()) return;
        writing_ = true;
        stream_->expires_after(shell_->options.write_timeout);
        asio::async_write(*stream_, asio::buffer(o.writing), [self = shared_from_this()](error_code e, std::size_t) {
            self->writing_ = false;
            self->out_->writing.clear();
            if (e) {
                self->gone_->store(true, std::memory_order_relaxed);
                return self->close_now();
            }
            self->ended_ ? self->close_now() : self->flush();
        });
    }
    /// Finds out that the client has gone, although the server doesn't read from it in the
    /// meantime. A client that has only ended its requests (shutdown) may still read; if it is
    /// gone, writing fails. `unless_it_sends` is for long times without writing: such a client then
    /// counts as gone, as proxies treat it.
    void watch(bool unless_it_sends = false) {
        watching_ = true;
        const auto gone = [self = weak_from_this()](error_code e) {
            // unless the watch was cancelled for an answer
            if (const auto s = self.lock(); s != nullptr && e != asio::error::operation_aborted)
                s->gone_->store(true, std::memory_order_relaxed);
        };
        stream_->socket().async_wait(
            tcp::socket::wait_read, [weak = weak_from_this(), gone, unless_it_sends](error_code e) {
                const auto self = weak.lock();
                if (self == nullptr) return;
                char c = 0;
                const bool ended =
                    !e && self->stream_->socket().receive(asio::buffer(&c, 1), tcp::socket::message_peek, e) == 0;
                if (ended && unless_it_sends) return gone(asio::error::eof);
                if (ended && (!e || e == asio::error::eof))
                    return self->stream_->socket().async_wait(tcp::socket::wait_error, gone);
                if (e) gone(e);
            });
    }

    const std::shared_ptr<shell> shell_;
    std::optional<beast::tcp_stream> stream_;  // empty if there was no memory to move it
    const bool admin_;
    std::atomic<carrier*> home_;
    beast::flat_buffer buffer_;
    std::optional<http::request_parser<http::string_body>> parser_;
    std::optional<http::response<http::string_body>> response_;
    // the serializer of the response
    std::optional<http::response_serializer<http::string_body>> serializer_;
    std::optional<std::size_t> header_length_;
    std::size_t body_ = 0;  // bytes counted in shell::bodies
    route route_;
    service::caller caller_;
    const void* whose_ = nullptr;  // the last key that the connection has shown
    std::shared_ptr<account> counted_for_;
    infer_request asked_;  // the request's outputs
    std::optional<outbox> out_;
    std::array<char, 512> trash_{};
    std::size_t discarded_ = 0;
    bool keep_alive_ = true, idle_ = false, writing_ = false, ended_ = false, watching_ = false;
    front_door::id id_{};
    const std::shared_ptr<std::atomic<bool>> gone_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

front_door::id http_server::shell::opened(session* s, bool admin) {
    const std::lock_guard lock(mutex);
    const auto id = door_of(admin).come();
    (admin ? operators : sessions).emplace(id, s);
    count.store(sessions.size() + operators.size(), std::memory_order_relaxed);
    return id;
}

void http_server::shell::known(front_door::id i, const void* whose) {
    const std::lock_guard lock(mutex);
    door.known(i, whose);
}

void http_server::shell::closed(front_door::id i, bool admin) {
    const std::lock_guard lock(mutex);
    door_of(admin).gone(i);
    (admin ? operators : sessions).erase(i);
    count.store(sessions.size() + operators.size(), std::memory_order_relaxed);
    if (sessions.empty() && operators.empty()) leaves.notify_all();
}

template <class F>
void http_server::shell::each_session(const carrier& at, F f) {
    const std::lock_guard lock(mutex);
    for (const auto* all : {&sessions, &operators})
        for (const auto& [id, s] : *all)
            if (s->home() == &at) f(*s);
}

// Called on the thread that accepts.
void http_server::shell::close_surplus(bool admin) {
    // destroyed without the lock, because this may hold the last reference
    std::vector<std::shared_ptr<session>> old;
    {
        const std::lock_guard lock(mutex);
        auto& from = door_of(admin);
        auto& all = admin ? operators : sessions;
        while (const auto id = from.surplus()) {
            from.gone(*id);
            const auto found = all.find(*id);
            if (found == all.end()) continue;
            if (auto s = found->second->weak_from_this().lock()) old.push_back(std::move(s));
        }
    }
    const auto* here = admin ? &tenants : &strangers;
    for (auto& s : old) {
        auto* const home = s->home();
        if (home == here)
            s->close_now();
        else
            home->later([s = std::move(s)] { s->close_now(); });
    }
}

void http_server::shell::close_idle(carrier& at, tcp::acceptor& from) {
    error_code ignored;
    from.close(ignored);
    each_session(at, [](session& s) { s.close_if_idle(); });
    const std::lock_guard lock(mutex);
    --acceptors;
    leaves.notify_all();
}

void http_server::shell::accept(tcp::acceptor& from, bool admin) {
    from.async_accept([this, &from, admin](error_code e, tcp::socket socket) {
        if (e == asio::error::operation_aborted || stopping) return;
        const bool fails = e && e != asio::error::connection_aborted;
        if (!admin && fails != std::exchange(is_shut, fails)) of.shut(fails);
        if (fails) {  // usually there are no file descriptors
            auto pause = std::make_shared<asio::steady_timer>(from.get_executor(), 50ms);
            return pause->async_wait([this, &from, admin, pause](error_code) { accept(from, admin); });
        }
        accept(from, admin);
        if (e) return;
        std::make_shared<session>(self.lock(), std::move(socket), admin)->read_header();
        close_surplus(admin);
    });
}

http_server::http_server(service& s, http_options o) : shell_(std::make_shared<shell>(s, std::move(o))) {
    shell_->self = shell_;
    shell_->accept(shell_->front, false);
    shell_->accept(shell_->back, true);
    shell_->tenants.start("HTTP");
    shell_->strangers.start("HTTP");
}

void http_server::post(std::function<void()> f, bool of_strangers) {
    asio::post((of_strangers ? shell_->strangers : shell_->tenants).io(), std::move(f));
}

http_server::~http_server() {
    stop(0ms);
    shell_->ends = true;
    shell_->reads.stop();
    shell_->long_reads.stop();
    const std::array all{&shell_->strangers, &shell_->tenants};
    for (auto* c : all) c->refuse_more();
    while (std::ranges::count_if(all, &carrier::run_rest) != 0) {
    }  // work that engines have posted since
}

std::uint16_t http_server::port() const noexcept { return shell_->front_port; }
std::uint16_t http_server::admin_port() const noexcept { return shell_->back_port; }
std::size_t http_server::connections() const noexcept { return shell_->count.load(std::memory_order_relaxed); }

void http_server::hurry() {
    const std::lock_guard lock(shell_->mutex);
    shell_->in_a_hurry = true;
    shell_->leaves.notify_all();
}

void http_server::stop(std::chrono::milliseconds patience) {
    const auto s = shell_;
    if (!s->tenants.runs()) return;
    s->stopping = true;
    s->strangers.later([s] { s->close_idle(s->strangers, s->front); });
    s->tenants.later([s] { s->close_idle(s->tenants, s->back); });
    {
        std::unique_lock lock(s->mutex);
        s->leaves.wait_for(lock, patience, [&] {
            return s->in_a_hurry || (s->acceptors == 0 && s->sessions.empty() && s->operators.empty());
        });
    }
    // Ends the strangers' thread first, so that no connection moves to the tenants' thread any
    // more.
    for (auto* const c : {&s->strangers, &s->tenants})
        c->end([s, c] { s->each_session(*c, [](session& each) { each.close_now(); }); });
}

}  // namespace inference_server
