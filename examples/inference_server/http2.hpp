// SPDX-License-Identifier: Apache-2.0
// One connection of HTTP/2 as a gRPC server speaks it, by the distribution's libnghttp2: bytes
// become calls, answers become bytes. No sockets, no threads, no clock.
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
    unsigned keys = 0;  ///< how many keys it names
};

/// How a call ends. `code` is gRPC's.
struct call_status {
    int code = 0;
    std::string message{};
    unsigned retry_after = 0;  ///< seconds; 0: not said
};

class http2 {
public:
    using call_id = std::int32_t;

    /// The events of a connection. receive() and output() call them, and they may call send(),
    /// finish() and consumed().
    class events {
    public:
        virtual void on_call(call_id c, call_head head) = 0;
        /// Bytes of messages. The client may send as many again when they are consumed().
        virtual void on_data(call_id c, std::string_view bytes) = 0;
        /// The client sends nothing more for this call.
        virtual void on_end(call_id c) = 0;
        /// The call is over, by whichever side.
        virtual void on_closed(call_id c) = 0;

    protected:
        ~events() = default;
    };

    struct limits {
        std::uint32_t calls = 100;  ///< open at a time; more are refused
        /// bytes of a call's head; a longer one ends the connection
        std::size_t head = 8192;
        /// calls that the client cancels at once; the connection ends beyond them
        std::size_t resets = 1000;
        std::size_t resets_per_s = 100;  ///< so many more may follow
    };

    /// Neither `e` nor what it calls may go before this.
    http2(events& e, const limits& l);
    http2(const http2&) = delete;
    http2& operator=(const http2&) = delete;
    ~http2();

    /// Takes bytes that the client sent. False: the client broke the protocol or a limit, and the
    /// connection ends once all output is written.
    [[nodiscard]] bool receive(std::string_view bytes);
    /// Appends up to about 64 KiB of what is to be written. False where there is nothing.
    [[nodiscard]] bool output(std::string& to);
    /// Frames that wait to be written: a client that reads nothing shouldn't be read either where
    /// there are many.
    [[nodiscard]] std::size_t waiting() const noexcept;
    /// Whether both sides are done with it.
    [[nodiscard]] bool is_over() const noexcept;
    /// Frames that the client sent so far and that carry no message: PING, SETTINGS, RST_STREAM,
    /// empty DATA and others.
    [[nodiscard]] std::size_t control_frames() const noexcept;

    /// The client may send so many bytes more of this call.
    void consumed(call_id c, std::size_t bytes);
    /// Lets a client that is known have so many bytes of each call, and of all together, under way.
    void widen(call_id c, std::uint32_t bytes);
    /// Sends a message. Nothing happens where the call is over.
    void send(call_id c, std::string message);
    /// Whether all that was sent has been written.
    [[nodiscard]] bool is_drained(call_id c) const noexcept;
    /// Bytes of its messages that were written so far. One that stays the same while it isn't
    /// drained: the client doesn't read.
    [[nodiscard]] std::size_t written(call_id c) const noexcept;
    /// Ends the call behind what was sent.
    void finish(call_id c, const call_status& how);
    /// Ends it at once, without a word.
    void reset(call_id c);
    void ping();
    /// Takes no more calls; those that are there go on.
    void go_away(bool because_of_the_client = false);

private:
    struct parts;
    std::unique_ptr<parts> parts_;
};

/// The first bytes of each client.
inline constexpr std::string_view http2_preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

}  // namespace inference_server
