// SPDX-License-Identifier: Apache-2.0
// The only file that includes nghttp2. Its callbacks are C functions, so they must not throw.
#include "inference_server/http2.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <new>
#include <unordered_map>
#include <utility>

#include <nghttp2/nghttp2.h>

namespace inference_server {

namespace {

std::string_view view(const std::uint8_t* bytes, std::size_t size) {
    return {reinterpret_cast<const char*>(bytes), size};
}
std::uint8_t* bytes_of(std::string_view s) {
    // nghttp2 copies it
    return const_cast<std::uint8_t*>(reinterpret_cast<const std::uint8_t*>(s.data()));
}
nghttp2_nv field(std::string_view name, std::string_view value) {
    return {bytes_of(name), bytes_of(value), name.size(), value.size(), NGHTTP2_NV_FLAG_NONE};
}

/// Encodes a status message as gRPC requires: characters that aren't printable ASCII are encoded.
std::string percent_encoded(std::string_view text) {
    constexpr std::string_view digits = "0123456789ABCDEF";
    std::string out;
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte >= 0x20 && byte < 0x7F && c != '%')
            out += c;
        else
            (out += '%') += {digits[byte / 16], digits[byte % 16]};
    }
    return out;
}

/// The trailers that end a call.
struct trailers {
    explicit trailers(const call_status& how)
        : code(std::to_string(how.code)),
          message(percent_encoded(std::string_view(how.message).substr(0, 1024))),
          pushback(how.retry_after == 0 ? "" : std::to_string(std::uint64_t{1000} * how.retry_after)) {}
    void append_to(std::vector<nghttp2_nv>& fields) const {
        fields.push_back(field("grpc-status", code));
        if (!message.empty()) fields.push_back(field("grpc-message", message));
        if (!pushback.empty()) fields.push_back(field("grpc-retry-pushback-ms", pushback));
    }
    std::string code, message, pushback;
};

const std::array<nghttp2_nv, 3> response_head() {
    return {field(":status", "200"), field("content-type", "application/grpc"),
            field("grpc-accept-encoding", "identity")};
}

}  // namespace

struct http2::parts {
    parts(events& e, const limits& l) : what(e), most(l) {}

    struct call {
        call_head head{};
        std::size_t head_bytes = 0;
        std::deque<std::string> out{};  // messages with their prefixes
        std::size_t written = 0;        // bytes written of the first message
        std::size_t all_written = 0;
        std::unique_ptr<trailers> last{};
        bool answered = false;  // whether the answer's head is sent
        bool asked = false;     // whether the request's head is there
        bool ended = false;     // whether the client has sent everything
    };

    [[nodiscard]] call* find(call_id c) noexcept {
        const auto found = calls.find(c);
        return found == calls.end() ? nullptr : &found->second;
    }

    // ---- nghttp2's callbacks. `user` is this.

    template <class F>
    static int guarded(F f) noexcept try {
        return f();
    } catch (...) {  // for lack of memory: this connection ends, and no other
        return NGHTTP2_ERR_CALLBACK_FAILURE;
    }
    static int on_begin_headers(nghttp2_session*, const nghttp2_frame* f, void* user) {
        auto& p = *static_cast<parts*>(user);
        if (f->headers.cat != NGHTTP2_HCAT_REQUEST) return 0;
        return guarded([&] { return p.calls.try_emplace(f->hd.stream_id), 0; });
    }
    static int on_header(nghttp2_session*, const nghttp2_frame* f, const std::uint8_t* name, std::size_t name_size,
                         const std::uint8_t* value, std::size_t size, std::uint8_t, void* user) {
        auto& p = *static_cast<parts*>(user);
        auto* const c = p.find(f->hd.stream_id);
        if (c == nullptr) return 0;
        c->head_bytes += name_size + size + 32;
        // A short block can stand for megabytes that the table repeats, so the rest isn't read.
        if (c->head_bytes > p.most.head) return NGHTTP2_ERR_CALLBACK_FAILURE;
        if (c->asked) return 0;  // trailers have no fields that the server uses
        return guarded([&] { return keep(c->head, view(name, name_size), view(value, size)), 0; });
    }
    static void keep(call_head& h, std::string_view name, std::string_view value) {
        const std::pair<std::string_view, std::string*> fields[] = {
            {":method", &h.method},         {":path", &h.path},           {"content-type", &h.content_type},
            {"grpc-encoding", &h.encoding}, {"grpc-timeout", &h.timeout}, {"authorization", &h.authorization},
            {"x-api-key", &h.api_key}};
        const auto found = std::ranges::find(fields, name, [](const auto& f) { return f.first; });
        if (found == std::end(fields)) return;
        *found->second = value;
        h.keys += found->second == &h.authorization || found->second == &h.api_key;
    }
    static int on_frame(nghttp2_session*, const nghttp2_frame* f, void* user) {
        auto& p = *static_cast<parts*>(user);
        const bool is_data = f->hd.type == NGHTTP2_DATA, is_head = f->hd.type == NGHTTP2_HEADERS;
        const bool carries = (is_data && f->hd.length != 0) || is_head || f->hd.type == NGHTTP2_WINDOW_UPDATE;
        if (!carries && (f->hd.flags & NGHTTP2_FLAG_END_STREAM) == 0) ++p.control;
        return guarded([&] {
            auto* c = p.find(f->hd.stream_id);
            if ((!is_data && !is_head) || c == nullptr) return 0;
            if (is_head && !std::exchange(c->asked, true)) p.what.on_call(f->hd.stream_id, std::move(c->head));
            if ((f->hd.flags & NGHTTP2_FLAG_END_STREAM) == 0) return 0;
            c = p.find(f->hd.stream_id);
            if (c == nullptr) return 0;
            c->ended = true;
            p.what.on_end(f->hd.stream_id);
            return 0;
        });
    }
    static int on_data(nghttp2_session* s, std::uint8_t, std::int32_t id, const std::uint8_t* data, std::size_t size,
                       void* user) {
        auto& p = *static_cast<parts*>(user);
        // released at once for the connection, so that one call's backpressure doesn't block others
        (void)nghttp2_session_consume_connection(s, size);
        return guarded([&] { return p.what.on_data(id, view(data, size)), 0; });
    }
    static int on_close(nghttp2_session*, std::int32_t id, std::uint32_t, void* user) {
        auto& p = *static_cast<parts*>(user);
        return guarded([&] {
            if (p.calls.erase(id) != 0) p.what.on_closed(id);
            return 0;
        });
    }
    // The call is answered before the client has sent everything, so the client is told to stop.
    static int on_sent(nghttp2_session* s, const nghttp2_frame* f, void* user) {
        auto& p = *static_cast<parts*>(user);
        const bool ends = (f->hd.type == NGHTTP2_HEADERS || f->hd.type == NGHTTP2_DATA) &&
                          (f->hd.flags & NGHTTP2_FLAG_END_STREAM) != 0;
        const auto* const c = ends ? p.find(f->hd.stream_id) : nullptr;
        if (c == nullptr || c->ended) return 0;
        return nghttp2_submit_rst_stream(s, NGHTTP2_FLAG_NONE, f->hd.stream_id, NGHTTP2_NO_ERROR) == NGHTTP2_ERR_NOMEM
                   ? NGHTTP2_ERR_CALLBACK_FAILURE
                   : 0;
    }
    static ssize_t read_out(nghttp2_session* s, std::int32_t id, std::uint8_t* to, std::size_t size,
                            std::uint32_t* flags, nghttp2_data_source*, void* user) {
        auto& p = *static_cast<parts*>(user);
        auto* const c = p.find(id);
        if (c == nullptr) return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
        std::size_t n = 0;
        while (n < size && !c->out.empty()) {
            const auto rest = std::string_view(c->out.front()).substr(c->written, size - n);
            std::memcpy(to + n, rest.data(), rest.size());
            n += rest.size();
            c->written += rest.size();
            c->all_written += rest.size();
            if (c->written < c->out.front().size()) continue;
            c->out.pop_front();
            c->written = 0;
        }
        if (c->out.empty() && c->last != nullptr) {
            *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
            std::vector<nghttp2_nv> fields;
            const int submitted = guarded([&] {
                c->last->append_to(fields);
                return nghttp2_submit_trailer(s, id, fields.data(), fields.size());
            });
            if (submitted != 0) return NGHTTP2_ERR_CALLBACK_FAILURE;
        } else if (n == 0) {
            return NGHTTP2_ERR_DEFERRED;
        }
        return static_cast<ssize_t>(n);
    }

    events& what;
    const limits most;
    std::unordered_map<call_id, call> calls{};
    std::size_t control = 0;
    nghttp2_session* session = nullptr;
};

http2::http2(events& e, const limits& l) : parts_(std::make_unique<parts>(e, l)) {
    nghttp2_session_callbacks* callbacks = nullptr;
    nghttp2_option* options = nullptr;
    if (nghttp2_session_callbacks_new(&callbacks) != 0) throw std::bad_alloc();
    const std::unique_ptr<nghttp2_session_callbacks, void (*)(nghttp2_session_callbacks*)> owner(
        callbacks, &nghttp2_session_callbacks_del);
    nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks, &parts::on_begin_headers);
    nghttp2_session_callbacks_set_on_header_callback(callbacks, &parts::on_header);
    nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, &parts::on_frame);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, &parts::on_data);
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, &parts::on_close);
    nghttp2_session_callbacks_set_on_frame_send_callback(callbacks, &parts::on_sent);
    if (nghttp2_option_new(&options) != 0) throw std::bad_alloc();
    const std::unique_ptr<nghttp2_option, void (*)(nghttp2_option*)> options_owner(options, &nghttp2_option_del);
    nghttp2_option_set_no_auto_window_update(options, 1);
    nghttp2_option_set_no_closed_streams(options, 1);
    nghttp2_option_set_stream_reset_rate_limit(options, l.resets, l.resets_per_s);
    nghttp2_option_set_max_outbound_ack(options, 100);
    if (nghttp2_session_server_new2(&parts_->session, callbacks, parts_.get(), options) != 0) throw std::bad_alloc();
    const std::array settings{
        nghttp2_settings_entry{NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, l.calls},
        nghttp2_settings_entry{NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, static_cast<std::uint32_t>(l.head)}};
    (void)nghttp2_submit_settings(parts_->session, NGHTTP2_FLAG_NONE, settings.data(), settings.size());
}

http2::~http2() { nghttp2_session_del(parts_->session); }

bool http2::receive(std::string_view bytes) {
    return nghttp2_session_mem_recv(parts_->session, bytes_of(bytes), bytes.size()) >= 0;
}

bool http2::output(std::string& to) {
    constexpr std::size_t enough = 65'536;
    while (to.size() < enough) {
        const std::uint8_t* some = nullptr;
        const auto n = nghttp2_session_mem_send(parts_->session, &some);
        if (n <= 0) break;
        to.append(view(some, static_cast<std::size_t>(n)));
    }
    return !to.empty();
}

std::size_t http2::waiting() const noexcept { return nghttp2_session_get_outbound_queue_size(parts_->session); }
bool http2::is_over() const noexcept {
    return nghttp2_session_want_read(parts_->session) == 0 && nghttp2_session_want_write(parts_->session) == 0;
}
std::size_t http2::control_frames() const noexcept { return parts_->control; }

void http2::consumed(call_id c, std::size_t bytes) { (void)nghttp2_session_consume_stream(parts_->session, c, bytes); }

void http2::widen(call_id c, std::uint32_t bytes) {
    for (const call_id of : {call_id{0}, c})
        (void)nghttp2_session_set_local_window_size(parts_->session, NGHTTP2_FLAG_NONE, of,
                                                    static_cast<std::int32_t>(of == 0 ? 4 * bytes : bytes));
}

void http2::send(call_id id, std::string message) {
    auto* const c = parts_->find(id);
    if (c == nullptr || c->last != nullptr) return;
    const auto n = static_cast<std::uint32_t>(message.size());
    message.insert(0, {'\0', static_cast<char>(n >> 24U), static_cast<char>(n >> 16U), static_cast<char>(n >> 8U),
                       static_cast<char>(n)});
    c->out.push_back(std::move(message));
    if (std::exchange(c->answered, true)) {
        (void)nghttp2_session_resume_data(parts_->session, id);
        return;
    }
    const auto head = response_head();
    const nghttp2_data_provider body{{}, &parts::read_out};
    (void)nghttp2_submit_response(parts_->session, id, head.data(), head.size(), &body);
}

bool http2::is_drained(call_id id) const noexcept {
    const auto* const c = parts_->find(id);
    return c == nullptr || c->out.empty();
}

std::size_t http2::written(call_id id) const noexcept {
    const auto* const c = parts_->find(id);
    return c == nullptr ? 0 : c->all_written;
}

void http2::finish(call_id id, const call_status& how) {
    auto* const c = parts_->find(id);
    if (c == nullptr || c->last != nullptr) return;
    c->last = std::make_unique<trailers>(how);
    if (c->answered) {
        (void)nghttp2_session_resume_data(parts_->session, id);
        return;
    }
    c->answered = true;
    const auto head = response_head();
    std::vector<nghttp2_nv> fields(head.begin(), head.end());
    c->last->append_to(fields);
    (void)nghttp2_submit_response(parts_->session, id, fields.data(), fields.size(), nullptr);
}

void http2::reset(call_id c) { (void)nghttp2_submit_rst_stream(parts_->session, NGHTTP2_FLAG_NONE, c, NGHTTP2_CANCEL); }

void http2::ping() { (void)nghttp2_submit_ping(parts_->session, NGHTTP2_FLAG_NONE, nullptr); }

void http2::go_away(bool because_of_the_client) {
    (void)nghttp2_submit_goaway(parts_->session, NGHTTP2_FLAG_NONE,
                                nghttp2_session_get_last_proc_stream_id(parts_->session),
                                because_of_the_client ? NGHTTP2_ENHANCE_YOUR_CALM : NGHTTP2_NO_ERROR, nullptr, 0);
}

}  // namespace inference_server
