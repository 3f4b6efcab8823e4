// SPDX-License-Identifier: Apache-2.0
// One model of one tenant: its requests wait here, are put into batches, and run as submissions of
// the tenant. Its weights are there while they are used, and are charged to the tenant.
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

/// The owner of an engine, and where the engine's calls go.
struct owner {
    tenant& who;
    server_node& on;
    std::uint32_t stream = 0;  ///< of the tenant's: the number of the one that all calls are put on
};

/// How a model is cut, and how long its pieces took.
struct piece_report {
    std::uint32_t pieces = 0;  ///< of a call; 0: the model isn't loaded
    gpushare::ns longest{};    ///< that was seen since the last load
    gpushare::ns cut_to{};     ///< no piece is to take longer; 0: the model isn't to be cut
};

/// How a piece of a text ended.
struct token_end {
    bool last = false;             ///< nothing follows
    std::optional<refused> why{};  ///< what went wrong, if it did

    [[nodiscard]] int status() const noexcept { return why ? why->status : 200; }
};

/// The scratch memory that a tenant's engines use one after the other.
using scratch = gpushare::leased_scratch<tenant::memory_type, server_stream>;

using answer = std::variant<infer_response, refused>;
/// Called once, from any thread; must neither block nor throw.
using on_answer = std::function<void(answer)>;
/// Runs a function soon, on a thread that may take its time: to load a model.
using later = std::function<void(std::function<void()>)>;

/// A refusal as clients see it. Where the host has no memory for its text, it says that.
[[nodiscard]] refused as_refused(const gpushare::failure& why) noexcept;
[[nodiscard]] refused as_refused(const std::exception_ptr& why) noexcept;

/// A text that is being continued, in pieces that its reader asks for. So who reads slowly is
/// waited for, and takes neither memory nor device time meanwhile. One call of more() at a time.
class token_stream : public std::enable_shared_from_this<token_stream> {
public:
    using end = token_end;  ///< how a piece ended
    /// One that has a place among the lane's: see lane::generate.
    token_stream(std::shared_ptr<lane> of, std::string prompt, std::uint32_t most);
    token_stream(const token_stream&) = delete;
    token_stream& operator=(const token_stream&) = delete;
    ~token_stream();

    /// Makes up to `most` tokens as one submission, behind those that read the prompt. `on_token`
    /// is called for each token as it comes, and answers whether its reader is still there;
    /// `on_end` is called once. Any thread may call both. on_end mustn't throw; if on_token throws,
    /// the text is over. A text that is over gives an error. One that begins waits until there is
    /// memory for it. Throws std::bad_alloc if the host has no memory for the arguments; then
    /// neither is called.
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
    bool open_ = true;  // it has its place
    // Belongs to the thread that runs the piece; the next piece begins behind it.
    std::shared_ptr<engine> engine_;
    std::unique_ptr<generation> text_;
};

class lane : public std::enable_shared_from_this<lane> {
public:
    enum class state : std::uint8_t { unloaded, loading, ready, closed };

    /// The settings that a lane gets from its service.
    struct settings {
        later run_later;
        std::uint32_t stream = 0;  ///< of the tenant's
        gpushare::sleep_rule rule{};
        server_node* node = nullptr;
        cache_chunks* chunks = nullptr;  ///< of the device
        std::shared_ptr<scratch> room;   ///< of the tenant
        /// A request's time is over then, unless it is answered before: refuse_late() is to be
        /// called.
        std::function<void(gpushare::instant)> on_deadline = [](gpushare::instant) {};
        /// How often memory for caches came free, in all lanes. A lane that waits for memory looks
        /// at this count.
        std::shared_ptr<std::atomic<std::uint64_t>> freed = std::make_shared<std::atomic<std::uint64_t>>(0);
        std::function<void()> on_freed = [] {};              ///< makes the other lanes look
        gpushare::ns text_waits = std::chrono::seconds(30);  ///< for memory, at most
        /// of the tenant; null: who drives the device makes its calls
        std::shared_ptr<tenant_calls> calls{};
    };
    lane(std::shared_ptr<tenant> whose, std::shared_ptr<const model_source> model, std::shared_ptr<account> account,
         settings s);

    /// Queues a request, whose inputs were checked. Refuses at once where too many wait.
    void infer(infer_request r, on_answer reply);
    /// A text of at most so many tokens. Throws refused, 429, where too many are being continued:
    /// as many as may wait, and those that are handed over.
    std::shared_ptr<token_stream> generate(std::string prompt, std::uint32_t most_tokens);
    /// Calls back when the model is loaded, or why it isn't: at once, too, where too many wait for
    /// it.
    void load(std::function<void(const refused*)> done);
    /// There may be memory for texts that wait for some: the first of them tries. Those that have
    /// waited too long are refused.
    void memory_came() noexcept;
    /// Refuses the requests that wait and whose time is over. When it is to be called again;
    /// `never`: nothing is waiting for that. Throws std::bad_alloc where the host has no memory;
    /// then they wait on.
    gpushare::instant refuse_late();
    /// Tries again what the host's memory didn't suffice for, and memory_came(). Once a second.
    void look_again() noexcept;
    /// Takes the weights away; the next request loads them again. False while requests wait or run,
    /// or a text isn't over. Requests that are being answered don't count.
    bool unload();
    /// Goes to sleep, as deep as it is time for. Whether it sleeps as deep as it goes.
    bool let_sleep();
    /// Refuses all that waits and comes, and waits until nothing runs; the weights are given back.
    /// False at the deadline, or when `hurry` is requested.
    bool close(gpushare::instant deadline, const std::stop_token& hurry = {});
    /// Waits until the lane isn't busy. False at the deadline, or when `hurry` is requested.
    bool wait_idle(gpushare::instant deadline, const std::stop_token& hurry = {});

    [[nodiscard]] state now() const;
    [[nodiscard]] std::string_view whose() const noexcept { return tenant_->name(); }
    [[nodiscard]] const model_info& info() const noexcept { return source_->info; }
    [[nodiscard]] std::size_t waiting() const;
    /// Whether requests wait or run, texts are being continued, or it is being loaded.
    [[nodiscard]] bool busy() const;
    /// Whether a submission or a load hasn't ended, also of a lane that is closed.
    [[nodiscard]] bool works() const;
    /// How deep it sleeps, and what waking takes.
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
    /// The parts that are over at the end of a submission.
    struct ended {
        std::size_t requests = 0;
        gpushare::ns call_took{};      ///< each call of the engine; 0: not known
        gpushare::ns longest_piece{};  ///< of a call
        bool batch = false, text = false;
        /// the engine that it ran on, where that may be in any state
        std::shared_ptr<engine> broken{};
        /// there was no memory for a batch: what waits is looked at again later
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
    /// Of a batch, or of a piece of a text: what takes how long is learnt of each.
    [[nodiscard]] gpushare::submit_options options(bool text, gpushare::priority level = gpushare::no_priority) const;
    [[nodiscard]] gpushare::priority level_of(const infer_request& r) const;
    /// Of a piece: what takes how long is learnt of each.
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
    std::condition_variable_any idle_;  // something of what busy() and works() look at is over
    state state_ = state::unloaded;
    std::vector<std::function<void(const refused*)>> on_loaded_;
    std::shared_ptr<engine> engine_;
    std::unique_ptr<gpushare::workspace> beside_;
    gpushare::batch_queue<request> waiting_;
    // that aren't over: of all, and those that aren't pieces of text
    std::uint32_t submitted_ = 0, batches_ = 0;
    // the highest of those batches, until one of it ends
    gpushare::priority level_ = gpushare::no_priority;
    std::size_t texts_ = 0;  // that are being continued
    // first ones of texts, first come first served
    std::deque<piece> for_memory_;
    bool trying_ = false;  // the first of them is on the device
    // a load hasn't ended: also where `state_` is closed
    bool loads_ = false;
    gpushare::ns call_takes_{};     // smoothed; 0: not known
    gpushare::ns longest_piece_{};  // since the last load
    gpushare::sleep_levels sleep_;
};

}  // namespace inference_server
