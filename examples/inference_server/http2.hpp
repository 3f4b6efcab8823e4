// SPDX-License-Identifier: Apache-2.0
// One connection of HTTP/2 as a gRPC server speaks it, by the distribution's libnghttp2. Bytes
// become calls, and answers become bytes. No sockets, no threads, no clock.
//
//   http2 h(events, {});  // events: what to do with a call, with its bytes, with its end
//   h.receive(bytes);                    // calls them
//   h.send(call, message); h.finish(call, {0, ""});
//   while (h.output(out)) write(out);
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace inference_server {

/// The head of a call, which a client sends before the messages.
struct call_head {
    std::string method, path, content_type, encoding, timeout, authorization, api_key;
    unsigned keys = 0;  ///< the number of keys that the head names
};

/// The end of a call. `code` is gRPC's.
struct call_status {
    int code = 0;
    std::string message{};
    unsigned retry_after = 0;  ///< in seconds; 0 leaves it out
};

class http2 {
public:
    using call_id = std::int32_t;

    /// The events of a connection. receive() and output() call them, and they may call send(),
    /// finish() and consumed().
    class events {
    public:
        virtual void on_call(call_id c, call_head head) = 0;
        /// Bytes of messages. The client may send as many again once consumed() is called for them.
        virtual void on_data(call_id c, std::string_view bytes) = 0;
        /// The client sends no more bytes for this call.
        virtual void on_end(call_id c) = 0;
        /// The call is over, ended by either side.
        virtual void on_closed(call_id c) = 0;

    protected:
        ~events() = default;
    };

    struct limits {
        std::uint32_t calls = 100;  ///< open at the same time; further calls are refused
        /// bytes of a call's head; a longer head ends the connection
        std::size_t head = 8192;
        /// how often a client may cancel calls in a row; after more, the connection ends
        std::size_t resets = 1000;
        std::size_t resets_per_s = 100;  ///< by how much this allowance grows
    };

    /// `e`, and everything that it calls, must outlive this object.
    http2(events& e, const limits& l);
    http2(const http2&) = delete;
    http2& operator=(const http2&) = delete;
    ~http2();

    /// Takes bytes that the client sent. Returns false if the client broke the protocol or a limit;
    /// the connection then ends once all output is written.
    [[nodiscard]] bool receive(std::string_view bytes);
    /// Appends up to about 64 KiB of output. Returns false if there is none.
    [[nodiscard]] bool output(std::string& to);
    /// The number of frames that wait to be written. If there are many, the client doesn't read,
    /// and shouldn't be read either.
    [[nodiscard]] std::size_t waiting() const noexcept;
    /// Whether both sides are done with the connection.
    [[nodiscard]] bool is_over() const noexcept;
    /// The number of frames that the client has sent and that carry no message: PING, SETTINGS,
    /// RST_STREAM, empty DATA and others.
    [[nodiscard]] std::size_t control_frames() const noexcept;

    /// Lets the client send this many further bytes of this call.
    void consumed(call_id c, std::size_t bytes);
    /// Lets a known client have this many bytes under way, for each call and for all calls
    /// together.
    void widen(call_id c, std::uint32_t bytes);
    /// Sends a message. Does nothing if the call is over.
    void send(call_id c, std::string message);
    /// Whether all messages of the call have been written.
    [[nodiscard]] bool is_drained(call_id c) const noexcept;
    /// The bytes of the call's messages that were written so far. While this number stays the same
    /// and the call isn't drained, the client isn't reading.
    [[nodiscard]] std::size_t written(call_id c) const noexcept;
    /// Ends the call after all messages.
    void finish(call_id c, const call_status& how);
    /// Ends the call at once, without a status.
    void reset(call_id c);
    void ping();
    /// Takes no more calls; the existing calls go on.
    void go_away(bool because_of_the_client = false);

private:
    struct parts;
    std::unique_ptr<parts> parts_;
};

/// The first bytes that each client sends.
inline constexpr std::string_view http2_preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

}  // namespace inference_server
