// SPDX-License-Identifier: Apache-2.0
// One model of one tenant: its requests wait here, are put into batches, and run as submissions of the tenant. Its weights are there
// while they are used, and are charged to the tenant.
//
//   lane->infer(std::move(request), [](answer a) { ... });         // once, from any thread
//   auto text = lane->generate(prompt, 32);                        // null until the model is loaded: see token_stream
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/interop/pmr.hpp>
#include <gpushare/serving/batch_queue.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/tenant/workspace.hpp>

#include "inference_server/account.hpp"
#include "inference_server/engine.hpp"

namespace inference_server {

using tenancy = gpushare::tenancy<gpushare::host::node>;
using tenant = tenancy::tenant;

using answer = std::variant<infer_response, refused>;
/// Called once, from any thread; must neither block nor throw.
using on_answer = std::function<void(answer)>;
/// Runs a function soon, on a thread that may take its time: to load a model.
using later = std::function<void(std::function<void()>)>;

/// A refusal as clients see it.
[[nodiscard]] refused as_refused(const gpushare::failure& why);
[[nodiscard]] refused as_refused(const std::exception_ptr& why) noexcept;

class lane;

/// A text that is being continued, in pieces that its reader asks for. So who reads slowly is waited for, and takes neither memory nor
/// device time meanwhile. One call of more() at a time.
class token_stream : public std::enable_shared_from_this<token_stream> {
public:
    /// How a piece ended.
    struct end {
        bool last = false;  ///< nothing follows
        std::string error;  ///< what went wrong, if it did
        int status = 200;   ///< the same, as HTTP has it
    };
    token_stream(std::shared_ptr<lane> of, std::string prompt, std::uint32_t most);

    /// Makes up to `most` tokens as one submission. `on_token` is called for each as it comes, and answers whether its reader is still
    /// there; `on_end` once. Both from any thread.
    void more(std::uint32_t most, std::function<bool(std::string)> on_token, std::function<void(end)> on_end);

private:
    friend class lane;
    struct piece;
    const std::shared_ptr<lane> lane_;
    const std::string prompt_;
    std::uint32_t left_;
    // Of whoever runs the piece; the next one begins behind it.
    std::shared_ptr<engine> engine_;
    std::unique_ptr<generation> text_;
};

class lane : public std::enable_shared_from_this<lane> {
public:
    enum class state : std::uint8_t { unloaded, loading, ready, closed };

    lane(std::shared_ptr<tenant> whose, const model_source& model, std::shared_ptr<account> account, later run_later,
         std::uint32_t stream);

    /// Queues a request, whose inputs were checked. Refuses at once where too many wait.
    void infer(infer_request r, on_answer reply);
    /// Calls back when the model is loaded, or why it isn't.
    void load(std::function<void(const refused*)> done);
    /// Takes the weights away once what runs is over; the next request loads them again. False while requests wait or run.
    bool unload();
    /// Refuses all that waits and comes, and waits until nothing runs; the weights are given back. False at the deadline.
    bool close(gpushare::instant deadline);

    [[nodiscard]] state now() const;
    [[nodiscard]] const model_info& info() const noexcept { return model_.info; }
    [[nodiscard]] std::size_t waiting() const;
    /// Keeps it from being taken for idle.
    void touch();
    /// Since when nobody asked anything; `never` while somebody does.
    [[nodiscard]] gpushare::instant idle_since() const;

private:
    friend class token_stream;
    struct request {
        infer_request what;
        on_answer reply;
        gpushare::instant arrived;
        std::uint32_t rows;
    };
    struct batch;

    void load_later();
    void loaded(std::shared_ptr<engine> e, const refused* why);
    void pump();
    void submit();
    void take(batch& b);
    void finish(batch& b, const gpushare::completion& how) noexcept;
    void refuse(request& r, const refused& why) noexcept;
    [[nodiscard]] refused full();
    [[nodiscard]] gpushare::submit_options options() const;
    [[nodiscard]] std::shared_ptr<engine> loaded_engine();
    [[nodiscard]] bool begin_piece();
    void end_piece(bool broken) noexcept;

    const std::shared_ptr<tenant> tenant_;
    const model_source& model_;
    const std::shared_ptr<account> account_;
    const later later_;
    const std::uint32_t stream_;
    gpushare::pmr_adaptor<tenant::memory_type> memory_;

    mutable std::mutex mutex_;
    std::condition_variable idle_;
    state state_ = state::unloaded;
    std::vector<std::function<void(const refused*)>> on_loaded_;
    std::shared_ptr<engine> engine_;
    std::unique_ptr<gpushare::workspace> beside_;
    gpushare::batch_queue<request> waiting_;
    std::uint32_t submitted_ = 0;  // batches and pieces of text that aren't over
    gpushare::instant used_{};
};

}  // namespace inference_server
