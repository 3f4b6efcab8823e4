// SPDX-License-Identifier: Apache-2.0
// One model of one tenant. Requests wait in the lane, are put into batches, and run as submissions
// of the tenant. The model's weights are in memory while they are used, and are charged to the
// tenant.
//
//   lane->infer(std::move(request), [](answer a) { ... });         // once, from any thread
//   auto text = lane->generate(prompt, 32);                        // see token_stream
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <gpushare/interop/pmr.hpp>
#include <gpushare/serving/batch_queue.hpp>
#include <gpushare/serving/leased_scratch.hpp>
#include <gpushare/serving/sleeping_tenant.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/tenant.hpp>

#include "inference_server/account.hpp"
#include "inference_server/call_gate.hpp"
#include "inference_server/engine.hpp"

namespace inference_server {

using tenancy = gpushare::tenancy<server_node>;
using tenant = tenancy::tenant;

class lane;
class token_stream;

/// The owner of an engine, and the stream of the engine's calls.
struct owner {
    tenant& who;
    server_node& on;
    std::uint32_t stream = 0;  ///< the number of the tenant's stream for all calls
};

/// How a model is cut into pieces, and how long the pieces took.
struct piece_report {
    std::uint32_t pieces = 0;  ///< pieces of a call; 0 if the model isn't loaded
    gpushare::ns longest{};    ///< the longest piece since the last load
    gpushare::ns cut_to{};     ///< the longest allowed time of a piece; 0 if the model isn't cut
};

/// How a piece of a text ended.
struct token_end {
    bool last = false;             ///< whether the text has ended
    std::optional<refused> why{};  ///< the error, if there was one

    [[nodiscard]] int status() const noexcept { return why ? why->status : 200; }
};

/// The scratch memory that a tenant's engines use one after the other.
using scratch = gpushare::leased_scratch<tenant::memory_type, server_stream>;

using answer = std::variant<infer_response, refused>;
/// Called once, on any thread. It must neither block nor throw.
using on_answer = std::function<void(answer)>;
/// Runs a function soon on the thread for slow work, for example to load a model.
using later = std::function<void(std::function<void()>)>;

/// A refusal as clients see it. If the host has no memory for its text, the refusal says that.
[[nodiscard]] refused as_refused(const gpushare::failure& why) noexcept;
[[nodiscard]] refused as_refused(const std::exception_ptr& why) noexcept;

/// A text that is being continued, in pieces that its reader asks for. So a slow reader holds
/// neither memory for output nor device time while the stream waits for it. One call of more() at a
/// time.
class token_stream : public std::enable_shared_from_this<token_stream> {
public:
    using end = token_end;  ///< how a piece ended
    /// Made by the lane when the text has a place in it: see lane::generate.
    token_stream(std::shared_ptr<lane> of, std::string prompt, std::uint32_t most);
    token_stream(const token_stream&) = delete;
    token_stream& operator=(const token_stream&) = delete;
    ~token_stream();

    /// Makes up to `most` tokens as one submission, after the submissions that read the prompt.
    /// `on_token` is called for each token as it comes, and returns whether its reader is still
    /// there. `on_end` is called once. Any thread may call both. on_end must not throw; if on_token
    /// throws, the text is over.
    ///
    /// A call for a text that is over gives an error. A text that begins waits until there is
    /// memory for it. Throws std::bad_alloc if the host has no memory for the arguments; then
    /// neither function is called.
    void more(std::uint32_t most, std::function<bool(std::string)> on_token, std::function<void(end)> on_end);

private:
    friend class lane;
    struct piece;
    static void go_on(const std::shared_ptr<piece>& p) noexcept;
    void begin(const std::shared_ptr<piece>& p);
    void finish(const std::shared_ptr<piece>& p, const gpushare::completion& how) noexcept;
    const std::shared_ptr<lane> lane_;
    const std::string prompt_;
    std::uint32_t left_;
    bool open_ = true;  // whether the text has its place in the lane
    // These belong to the thread that runs the piece; the next piece begins after it.
    std::shared_ptr<engine> engine_;
    std::unique_ptr<generation> text_;
};

class lane : public std::enable_shared_from_this<lane> {
public:
    enum class state : std::uint8_t { unloaded, loading, ready, closed };

    /// The settings that a lane gets from its service.
    struct settings {
        later run_later;
        std::uint32_t stream = 0;  ///< the number of the tenant's stream
        gpushare::sleep_rule rule{};
        server_node* node = nullptr;
        cache_chunks* chunks = nullptr;  ///< the device's
        std::shared_ptr<scratch> room;   ///< the tenant's
        /// Called with the time at which a request's time is over, unless it is answered before.
        /// The service must then call refuse_late().
        std::function<void(gpushare::instant)> on_deadline = [](gpushare::instant) {};
        /// How often memory for caches became free, in all lanes. A lane that waits for memory
        /// looks at this count.
        std::shared_ptr<std::atomic<std::uint64_t>> freed = std::make_shared<std::atomic<std::uint64_t>>(0);
        /// Makes the other lanes look for memory.
        std::function<void()> on_freed = [] {};
        /// How long a text waits for memory, at most.
        gpushare::ns text_waits = std::chrono::seconds(30);
        /// the tenant's calls; null if the thread that drives the device makes the calls
        std::shared_ptr<tenant_calls> calls{};
    };
    lane(std::shared_ptr<tenant> whose, std::shared_ptr<const model_source> model, std::shared_ptr<account> account,
         settings s);

    /// Queues a request whose inputs were checked. Refuses it at once if too many requests wait.
    void infer(infer_request r, on_answer reply);
    /// Begins a text of at most this many tokens. Throws refused (429) if too many texts are being
    /// continued: as many as may wait, plus those that are handed over.
    std::shared_ptr<token_stream> generate(std::string prompt, std::uint32_t most_tokens);
    /// Calls back when the model is loaded, or with the reason why it isn't. If too many callers
    /// wait for the model, calls back at once.
    void load(std::function<void(const refused*)> done);
    /// Says that there may be memory for texts that wait for it: the first of them tries again.
    /// Texts that have waited too long are refused.
    void memory_came() noexcept;
    /// Refuses the waiting requests whose time is over. Returns when it must be called again;
    /// `never` if no request waits. Throws std::bad_alloc if the host has no memory; the requests
    /// then wait on.
    gpushare::instant refuse_late();
    /// Tries again the work for which the host had no memory, and calls memory_came(). Called once
    /// a second.
    void look_again() noexcept;
    /// Gives the weights back; the next request loads them again. Returns false while requests wait
    /// or run, or while a text isn't over. Requests that are being answered don't count.
    bool unload();
    /// Lets the model sleep as deep as it is time for. Returns whether it sleeps as deep as it can.
    bool let_sleep();
    /// Refuses all waiting and new requests, waits until no work runs, and gives the weights back.
    /// Returns false at the deadline, or when `hurry` is requested.
    bool close(gpushare::instant deadline, const std::stop_token& hurry = {});
    /// Waits until the lane isn't busy. Returns false at the deadline, or when `hurry` is
    /// requested.
    bool wait_idle(gpushare::instant deadline, const std::stop_token& hurry = {});

    [[nodiscard]] state now() const;
    [[nodiscard]] std::string_view whose() const noexcept { return tenant_->name(); }
    [[nodiscard]] const model_info& info() const noexcept { return source_->info; }
    [[nodiscard]] std::size_t waiting() const;
    /// Whether requests wait or run, texts are being continued, or the model is being loaded.
    [[nodiscard]] bool busy() const;
    /// Whether a submission or a load hasn't ended, even if the lane is closed.
    [[nodiscard]] bool works() const;
    /// How deep the model sleeps, and how long it takes to wake.
    [[nodiscard]] gpushare::sleep_levels sleep() const;
    [[nodiscard]] piece_report pieces() const;

private:
    friend class token_stream;
    struct request {
        infer_request what;
        on_answer reply;
        gpushare::instant arrived;
        std::uint32_t rows;
    };
    struct batch;
    /// The counts and objects that are released at the end of a submission.
    struct ended {
        std::size_t requests = 0;
        gpushare::ns call_took{};      ///< the time of each call of the engine; 0 if unknown
        gpushare::ns longest_piece{};  ///< the longest piece of a call
        bool batch = false, text = false;
        /// the engine of the submission, if the engine may be in any state
        std::shared_ptr<engine> broken{};
        /// whether there was no memory for a batch; waiting requests are then looked at again later
        bool starved = false;
        gpushare::priority level = gpushare::no_priority;
    };

    void when_loaded(std::function<void(const refused*)> done, bool limited);
    void load_later();
    void reserve_scratch(const engine& e);
    void loaded(std::shared_ptr<engine> e, std::unique_ptr<gpushare::workspace> beside, const refused* why) noexcept;
    void asked(gpushare::instant now);
    void came_to(gpushare::sleep_level level, gpushare::instant now) noexcept;
    void over(std::size_t requests) noexcept;
    [[nodiscard]] bool is_busy() const noexcept;
    [[nodiscard]] bool calls_on_threads() const noexcept { return has_call_gate && settings_.calls != nullptr; }
    [[nodiscard]] std::size_t limit() const;
    [[nodiscard]] std::size_t at_once() const noexcept;
    template <class Run, class Done>
    gpushare::errc hand_over(const Run& run, const gpushare::submit_options& o, const Done& done);
    void pump();
    void pump_or_later() noexcept;
    void submit(std::shared_ptr<batch> mine) noexcept;
    static void enqueue(const std::shared_ptr<batch>& mine, std::uint32_t step, server_stream& to);
    void hand_on(const std::shared_ptr<batch>& mine) noexcept;
    void step_ended(const std::shared_ptr<batch>& mine, const gpushare::completion& how) noexcept;
    void take(batch& b);
    void refuse_late(batch& b) noexcept;
    void finish(batch& b, const gpushare::completion& how) noexcept;
    void refuse(request& r, const refused& why) noexcept;
    [[nodiscard]] refused full();
    /// The options of a batch, or of a piece of a text. The limiter learns separately how long each
    /// of them takes.
    [[nodiscard]] gpushare::submit_options options(bool text, gpushare::priority level = gpushare::no_priority) const;
    [[nodiscard]] gpushare::priority level_of(const infer_request& r) const;
    /// The options of a piece. The limiter learns separately how long each piece takes.
    [[nodiscard]] gpushare::submit_options options(const batch& b, std::uint32_t step) const;
    [[nodiscard]] std::shared_ptr<engine> loaded_engine();
    [[nodiscard]] bool begin_piece();
    using piece = std::shared_ptr<token_stream::piece>;
    [[nodiscard]] bool waits_behind_others(const piece& p);
    void wait_for_memory(const piece& p);
    void began(const token_stream::piece& p) noexcept;
    void cache_freed() noexcept;
    void end(ended what) noexcept;
    void close_text() noexcept;

    const std::shared_ptr<tenant> tenant_;
    const std::shared_ptr<const model_source> source_;
    const model_source& model_ = *source_;
    const std::shared_ptr<account> account_;
    const settings settings_;
    owner owner_{*tenant_, *settings_.node, settings_.stream};
    gpushare::pmr_adaptor<tenant::memory_type> memory_;

    mutable std::mutex mutex_;
    std::condition_variable_any idle_;  // notified when a condition of busy() or works() has ended
    state state_ = state::unloaded;
    std::vector<std::function<void(const refused*)>> on_loaded_;
    std::shared_ptr<engine> engine_;
    std::unique_ptr<gpushare::workspace> beside_;
    gpushare::batch_queue<request> waiting_;
    // submissions that aren't over: all of them, and those that aren't pieces of text
    std::uint32_t submitted_ = 0, batches_ = 0;
    // the highest level of those batches, until a batch of that level ends
    gpushare::priority level_ = gpushare::no_priority;
    std::size_t texts_ = 0;  // texts that are being continued
    // first pieces of texts, first come, first served
    std::deque<piece> for_memory_;
    bool trying_ = false;  // whether the first of them is on the device
    // whether a load hasn't ended, even if `state_` is closed
    bool loads_ = false;
    gpushare::ns call_takes_{};     // smoothed; 0 if unknown
    gpushare::ns longest_piece_{};  // since the last load
    gpushare::sleep_levels sleep_;
};

}  // namespace inference_server
