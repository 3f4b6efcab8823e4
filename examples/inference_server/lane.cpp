// SPDX-License-Identifier: Apache-2.0
#include "inference_server/lane.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>

#include <gpushare/tenant/foreign_memory.hpp>

namespace inference_server {

namespace {

using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::instant;

constexpr std::uint32_t usual_queue_limit = 64;
/// The number of batches that are handed over at once, so that the next batch is there when the
/// device is done with one.
constexpr std::uint32_t ahead = 2;
/// Calls of a model that doesn't batch run together, one after the other, up to this time and this
/// number. A tenant may get an SM only now and then, for example between the tokens of another
/// tenant's text. Otherwise only `ahead` of its calls would get through each time.
constexpr gpushare::ns short_together = 10ms;
constexpr gpushare::ns::rep most_together = 8;
/// How long one submission reads of a text's prompt. It reads at least one part.
constexpr gpushare::ns read_together = 10ms;

/// Whether the rows of both can be concatenated.
bool alike(const std::vector<tensor>& a, const std::vector<tensor>& b) {
    return std::ranges::equal(a, b, [](const tensor& x, const tensor& y) {
        return x.type != datatype::bytes &&
               std::ranges::equal(x.shape.begin() + 1, x.shape.end(), y.shape.begin() + 1, y.shape.end());
    });
}

/// Puts the requests' inputs into the model's order.
void sort_inputs(const model_info& m, infer_request& r) {
    for (std::size_t i = 0; i < m.inputs.size(); ++i)
        std::iter_swap(r.inputs.begin() + static_cast<std::ptrdiff_t>(i),
                       std::ranges::find(r.inputs, m.inputs[i].name, &tensor::name));
}

}  // namespace

namespace {

/// Made in advance, because there may be no memory later.
const refused out_of_memory{503, "the server is out of memory", 1};  // NOLINT(cert-err58-cpp)

template <class F>
refused or_out_of_memory(F f) noexcept try {
    return f();
} catch (...) {
    return out_of_memory;
}

refused refusal(int status, const char* text) noexcept {
    return or_out_of_memory([&] { return refused(status, text); });
}

refused text_of(const gpushare::failure& why) {
    const std::string text(to_string(why.code));
    switch (why.code) {
        case errc::queue_full: return {429, text, 1};
        case errc::over_quota:
        case errc::out_of_memory: return {507, text};
        case errc::deadline_exceeded: return {504, text};
        case errc::closed:
        case errc::asleep:
        case errc::stopped:
        case errc::quarantined: return {503, text, 1};
        case errc::device_lost: return {503, text};
        default: return {500, text};
    }
}

refused text_of(const std::exception_ptr& why) try { std::rethrow_exception(why); } catch (const refused& r) {
    return r;
} catch (const gpushare::error& e) {
    const auto r = text_of(gpushare::failure{e.code()});
    return {r.status, e.what(), r.retry_after};
} catch (const std::bad_alloc&) {
    return out_of_memory;
} catch (const std::exception& e) {
    return {500, e.what()};
} catch (...) {
    return {500, "the engine failed"};
}

}  // namespace

refused as_refused(const gpushare::failure& why) noexcept {
    return or_out_of_memory([&] { return text_of(why); });
}
refused as_refused(const std::exception_ptr& why) noexcept {
    return or_out_of_memory([&] { return text_of(why); });
}

namespace {

/// The engine's own refusal, if that is why a submission failed.
std::optional<refused> refusal_of(const gpushare::completion& how) noexcept {
    try {
        if (how.error) std::rethrow_exception(how.error);
    } catch (const refused& r) {
        return r;
    } catch (...) {
    }
    return std::nullopt;
}

/// Whether the host lacked memory for the submission. A full quota is a different error.
bool lacked_memory(const gpushare::completion& how) noexcept {
    try {
        if (how.error) std::rethrow_exception(how.error);
    } catch (const gpushare::error&) {
    } catch (const std::bad_alloc&) {
        return true;
    } catch (...) {
    }
    return false;
}

/// The refusal for a submission that failed: the engine's own, or the error with the tenant's name.
refused reason_of(const gpushare::completion& how) noexcept {
    if (auto own = refusal_of(how)) return *std::move(own);
    try {
        if (lacked_memory(how)) return as_refused(how.error);
        how.rethrow();
    } catch (...) {
        return as_refused(std::current_exception());
    }
    return as_refused(gpushare::failure{how.status});
}

gpushare::completion ended_by(errc status, std::exception_ptr error = {}) {
    gpushare::completion c;
    c.status = status;
    c.error = std::move(error);
    return c;
}

/// Whether the engine may be in any state, because it threw something other than a refusal.
bool broke(const gpushare::completion& how) noexcept {
    return (how.status == errc::submission_failed || how.status == errc::kernel_failed) && !refusal_of(how);
}

}  // namespace

/// The requests that one submission runs, from the time when it is let onto the device.
struct lane::batch {
    /// Requests whose rows are concatenated for one call of the engine.
    struct call {
        std::size_t first, end;  // indices of the requests
        std::uint32_t rows;
        std::vector<tensor> inputs{}, outputs{};
        // a refusal by the engine; the other calls of the batch still run
        std::exception_ptr refused{};
    };
    std::shared_ptr<lane> of;
    std::shared_ptr<engine> on;
    std::vector<request> requests;
    std::vector<request> late;  // requests to refuse, because their deadlines have passed
    std::vector<call> calls;
    std::span<std::byte> room;  // leased until the batch's work is over
    when_over outputs_come;     // of calls whose work is over after they return
    gpushare::ns took{};        // of all calls together
    gpushare::priority level = gpushare::no_priority;
    bool starved = false;  // whether there was no memory to take requests
    // whether the engine was entered, so it may be in any state if it throws
    std::atomic<bool> entered{false};
    // For a model in pieces, each step of a call is a submission, piece by piece and call by call.
    // `cut` is the engine when the batch came, or null if the engine has only one piece.
    std::shared_ptr<engine> cut{};
    std::uint32_t pieces = 1;  // of the engine that runs
    // the longest piece; each piece is a submission after the previous one
    gpushare::ns longest{};
    // whether a piece has failed, so that the next pieces have nothing to do
    std::atomic<bool> over{false};
    std::mutex steps;        // guards the members below
    std::uint32_t next = 1;  // the step that is handed over next
    std::uint32_t due = 0;   // how many steps must be handed over
    // whether a thread is handing a step over, and will look for further steps after it
    bool handing = true;
    // steps that were or will be handed over, and that haven't ended
    std::uint32_t open = 1;
    gpushare::completion failure{};  // the first failure

    void arrange(std::uint32_t max_rows) {
        for (std::size_t i = 0; i < requests.size(); ++i) {
            auto& r = requests[i];
            if (calls.empty() || calls.back().rows + r.rows > max_rows || !alike(calls.back().inputs, r.what.inputs)) {
                calls.push_back({i, i + 1, r.rows, std::move(r.what.inputs)});
                continue;
            }
            auto& c = calls.back();
            c.end = i + 1;
            c.rows += r.rows;
            for (std::size_t t = 0; t < c.inputs.size(); ++t) {
                const auto& more = r.what.inputs[t];
                c.inputs[t].data.insert(c.inputs[t].data.end(), more.data.begin(), more.data.end());
                c.inputs[t].shape[0] += more.shape[0];
            }
        }
    }
    void run(place& context) {
        const auto began = std::chrono::steady_clock::now();
        // the end of the work comes after this store
        entered.store(true, std::memory_order_relaxed);
        for (auto& c : calls) try {
                on->run_in(room, c.inputs, c.outputs, context);
            } catch (const refused&) {
                if (context.num_blocks() > 1) throw;  // all blocks share the members used here
                c.refused = std::current_exception();
            }
        if (calls_end_by_returning && context.num_blocks() == 1) took = std::chrono::steady_clock::now() - began;
    }
    [[nodiscard]] std::size_t all_steps() const noexcept { return pieces > 1 ? calls.size() * pieces : 1; }
    void run_step(std::uint32_t step, place& context) {
        auto& c = calls[step / pieces];
        // runs after the kernel that has set the flag
        if (c.refused || over.load(std::memory_order_relaxed)) return;
        const auto began = std::chrono::steady_clock::now();
        entered.store(true, std::memory_order_relaxed);
        try {
            on->run_piece(step % pieces, c.inputs, c.outputs, context);
        } catch (const refused&) {
            c.refused = std::current_exception();
        } catch (...) {
            over.store(true, std::memory_order_relaxed);
            throw;
        }
        const gpushare::ns lasted = std::chrono::steady_clock::now() - began;
        took += lasted;
        longest = std::max(longest, lasted);
        of->account_->pieces.fetch_add(1, std::memory_order_relaxed);
    }
    /// Calls `f(request, its outputs)` for each request that the engine hasn't refused.
    template <class F>
    void each_answer(F f) {
        for (auto& c : calls)
            for (std::size_t i = c.refused ? c.end : c.first, row = 0; i < c.end; row += requests[i++].rows)
                f(requests[i], c.end - c.first == 1 ? std::move(c.outputs) : rows_of_call(c, row, requests[i].rows));
    }

private:
    static std::vector<tensor> rows_of_call(const call& c, std::size_t first, std::uint32_t rows) {
        std::vector<tensor> mine;
        for (const auto& t : c.outputs) {
            const std::size_t size = t.data.size() / c.rows;
            const auto begin = t.data.begin() + static_cast<std::ptrdiff_t>(first * size);
            mine.push_back({t.name, t.type, t.shape, {begin, begin + static_cast<std::ptrdiff_t>(rows * size)}});
            mine.back().shape[0] = rows;
        }
        return mine;
    }
};

lane::lane(std::shared_ptr<tenant> whose, std::shared_ptr<const model_source> model, std::shared_ptr<account> account,
           settings s)
    : tenant_(std::move(whose)),
      source_(std::move(model)),
      account_(std::move(account)),
      settings_(std::move(s)),
      memory_(tenant_->memory()),
      waiting_({.max_size = std::max(model_.info.max_batch, 1U)}),
      sleep_(settings_.rule, tenant_->now()) {
    came_to(gpushare::sleep_level::weights_released, tenant_->now());
}

// Throws refused.
void check_runs_here(const model_info& m, const engine& e) {
    if (calls_end_by_returning || (!m.streams && e.pieces() == 1 && e.blocks() == 1)) return;
    throw refused(501, "the model runs on the host node alone: it makes a text, or a call is several pieces or blocks");
}

// Called under the lock. The change takes effect at once.
void lane::came_to(gpushare::sleep_level level, instant now) noexcept {
    sleep_.began(level, now);
    sleep_.ended(true, now);
}

std::size_t lane::limit() const {
    const auto n = account_->queue_limit.load(std::memory_order_relaxed);
    return n == 0 ? usual_queue_limit : n;
}

// Called under the lock. The number of requests that run together.
std::size_t lane::at_once() const noexcept {
    if (model_.info.max_batch > 1) return model_.info.max_batch;
    if (call_takes_ == gpushare::ns{}) return 1;  // not known yet
    return static_cast<std::size_t>(std::clamp<gpushare::ns::rep>(short_together / call_takes_, 1, most_together));
}

// Called under the lock.
void lane::asked(instant now) {
    sleep_.request_began(now);
    if (engine_ == nullptr || sleep_.level() == gpushare::sleep_level::awake) return;
    // only caches were dropped, and they fill up while the model runs
    came_to(gpushare::sleep_level::awake, now);
}

// Called under the lock.
void lane::over(std::size_t requests) noexcept {
    for (const auto now = tenant_->now(); requests != 0; --requests) sleep_.request_ended(now);
    if (sleep_.requests() == 0) idle_.notify_all();
}

void lane::infer(infer_request r, on_answer reply) {
    const auto now = tenant_->now();
    sort_inputs(model_.info, r);
    const auto rows = rows_of(model_.info, r);
    const auto deadline = r.timeout_us == 0 || r.timeout_us > 86'400'000'000U
                              ? gpushare::never
                              : now + std::chrono::microseconds(static_cast<std::int64_t>(r.timeout_us));
    const auto level = level_of(r);
    request mine{std::move(r), std::move(reply), now, rows};
    auto why = errc::closed;
    {
        const std::lock_guard lock(mutex_);
        auto rule = waiting_.rule();
        rule.max_size = at_once();
        rule.max_waiting = limit();
        waiting_.set_rule(rule);
        if (state_ != state::closed) why = waiting_.try_push(std::move(mine), now, deadline, level);
        if (why == errc::none) asked(now);
    }
    if (why == errc::none && deadline != gpushare::never) settings_.on_deadline(deadline);
    if (why == errc::none) return pump_or_later();
    refuse(mine, why == errc::queue_full ? full() : as_refused(gpushare::failure{why}));
}

refused lane::full() {
    gpushare::ns until{};
    std::size_t together = 1;
    // of a model in pieces, because its submissions are shorter than a call
    std::optional<gpushare::ns> call;
    {
        const std::lock_guard lock(mutex_);
        together = at_once();
        if (engine_ == nullptr) until = sleep_.predicted_wake();
        if (engine_ != nullptr && engine_->pieces() > 1 && call_takes_ != gpushare::ns{}) call = call_takes_;
    }
    auto e = tenant_->estimate(options(false).key);
    e.lasts = call.value_or(e.lasts);
    if (!e.known) return {429, "too many requests wait", 1};  // the wait is unknown
    until += e.wait + e.lasts * static_cast<std::int64_t>(waiting() / together + 1);
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(until);
    return {
        429, "too many requests wait; one more would be answered in about " + std::to_string(ms.count()) + " ms",
        static_cast<unsigned>(std::clamp<std::int64_t>(std::chrono::ceil<std::chrono::seconds>(ms).count(), 1, 60))};
}

void lane::refuse(request& r, const refused& why) noexcept {
    auto& count = why.status < 500 || why.status == 503 || why.status == 504 ? account_->refusals : account_->failures;
    count.fetch_add(1, std::memory_order_relaxed);
    r.reply(why);
}

gpushare::submit_options lane::options(bool text, gpushare::priority level) const {
    return {.key = std::hash<std::string>{}(model_.info.name) ^ (text ? 1U : 0U),
            .priority = level,
            .stream = settings_.stream};
}

// Level 1 is the tenant's ceiling, 2 the level below, and so on, but at least the tenant's own
// level.
gpushare::priority lane::level_of(const infer_request& r) const {
    if (r.priority == 0) return gpushare::no_priority;
    const auto spec = tenant_->spec();
    const auto most = spec.ceiling.value_or(spec.level);
    const auto room = static_cast<std::uint64_t>(std::max(most.level - spec.level.level, 0));
    const auto below = static_cast<int>(std::min(r.priority - 1, room));
    return static_cast<std::uint64_t>(below) == room ? gpushare::no_priority : gpushare::priority{most.level - below};
}

gpushare::submit_options lane::options(const batch& b, std::uint32_t step) const {
    auto how = options(false, b.level);
    if (b.cut == nullptr) return how;
    const std::uint32_t which = step % b.cut->pieces();
    how.key += std::uint64_t{2} * which;  // the last bit marks texts
    how.cost = b.cut->piece_takes(which);
    return how;
}

// Called without a lock. Wakes a tenant that sleeps.
template <class Run, class Done>
errc lane::hand_over(const Run& run, const gpushare::submit_options& o, const Done& done) {
    if (calls_on_threads()) {
        settings_.calls->call(o, run, done);
        return errc::none;
    }
    const auto submit = [&] { return tenant_->try_submit(run, o, done); };
    auto ticket = submit();
    if (ticket.code() == errc::asleep) {
        if (const auto why = tenant_->try_wake(); why.code != gpushare::errc::none)
            return why.code;  // other tenants have its memory
        ticket = submit();
    }
    return ticket ? errc::none : ticket.code();
}

void lane::pump() {
    std::shared_ptr<batch> next;
    {
        const std::lock_guard lock(mutex_);
        if (waiting_.empty() || state_ == state::loading) return;
        if (engine_ == nullptr) return load_later();
        // Pieces of two calls would meet in one engine. For other models, a more urgent request is
        // taken even beside a batch that was handed over at a lower level.
        const bool cut = engine_->pieces() > 1;
        if (cut ? batches_ >= 1 : batches_ >= ahead && waiting_.level() <= level_) return;
        next = std::make_shared<batch>();
        next->level = waiting_.level();
        level_ = std::max(level_, next->level);
        if (cut) {
            next->cut = engine_;
            next->due = ahead - 1;
            next->open = ahead;
        }
        ++batches_;
        ++submitted_;
    }
    next->of = shared_from_this();
    submit(std::move(next));
}

void lane::look_again() noexcept {
    memory_came();
    pump_or_later();
}

void lane::pump_or_later() noexcept {
    try {
        pump();
        // for lack of the host's memory: waiting requests are looked at again once a second
    } catch (...) {
    }
}

std::shared_ptr<engine> lane::loaded_engine() {
    const std::lock_guard lock(mutex_);
    return engine_;
}

// A step's turn has come. The batch is put together when its first step is let onto the device, so
// that it has all requests that came while it waited.
void lane::enqueue(const std::shared_ptr<batch>& mine, std::uint32_t step, server_stream& to) {
    if (step == 0) mine->of->take(*mine);
    if (mine->requests.empty()) return;
    if (step == 0) mine->pieces = mine->on->pieces();
    if (step >= mine->all_steps()) return;
    if (mine->pieces > 1) {
        put_call(to, 1, mine->outputs_come, [mine, step](place& context) { mine->run_step(step, context); });
        return;
    }
    // Released when this function returns: the next user of the lease comes after this work.
    std::optional<scratch::lease_type> room;
    if (const auto size = mine->on->scratch(); size != 0) {
        room.emplace(mine->of->settings_.room->lease(gpushare::bytes{size}, to));
        mine->room = {static_cast<std::byte*>(room->data()), size};
    }
    put_call(to, mine->on->blocks(), mine->outputs_come, [mine](place& context) { mine->run(context); });
}

void lane::submit(std::shared_ptr<batch> mine) noexcept {
    gpushare::completion how;
    try {
        const auto why = hand_over([mine](server_stream& s) { enqueue(mine, 0, s); }, options(*mine, 0),
                                   [mine](const gpushare::completion& end) { mine->of->step_ended(mine, end); });
        if (why == errc::none) {
            {
                const std::lock_guard lock(mine->steps);
                mine->handing = false;
            }
            return hand_on(mine);
        }
        how = ended_by(why);
    } catch (...) {
        how = ended_by(errc::submission_failed, std::current_exception());
    }
    try {
        take(*mine);
        // for lack of the host's memory: the batch's requests are refused, and the others wait
    } catch (...) {
    }
    finish(*mine, how);
}

// Hands over the steps that are due, in their order. A step may end before its thread is back from
// this function. The thread that notices the end then leaves the next step to it.
void lane::hand_on(const std::shared_ptr<batch>& mine) noexcept {
    for (;;) {
        std::uint32_t step = 0;
        {
            const std::lock_guard lock(mine->steps);
            if (mine->handing || mine->due == 0) return;
            mine->handing = true;
            --mine->due;
            step = mine->next++;
        }
        gpushare::completion how;
        try {
            const auto why = hand_over([mine, step](server_stream& s) { enqueue(mine, step, s); }, options(*mine, step),
                                       [mine](const gpushare::completion& end) { mine->of->step_ended(mine, end); });
            if (why != errc::none) how = ended_by(why);
        } catch (...) {
            how = ended_by(errc::submission_failed, std::current_exception());
        }
        {
            const std::lock_guard lock(mine->steps);
            mine->handing = false;
        }
        if (how.status != errc::none) step_ended(mine, how);
    }
}

// The next step takes this step's place, so that one step waits while another runs. The last step
// to end answers.
void lane::step_ended(const std::shared_ptr<batch>& mine, const gpushare::completion& how) noexcept {
    bool more = false;
    {
        const std::lock_guard lock(mine->steps);
        if (how.status != errc::none && mine->failure.status == errc::none) mine->failure = how;
        more = mine->failure.status == errc::none && mine->next + mine->due < mine->all_steps();
        if (more)
            ++mine->due;
        else if (--mine->open > 0)
            return;
    }
    if (more) return hand_on(mine);
    finish(*mine, mine->failure.status == errc::none ? how : mine->failure);
}

// Throws if the host has no memory. The requests taken so far are in the batch, for finish().
void lane::take(batch& b) {
    if (!b.requests.empty() || !b.late.empty()) return;  // the batch was on the device already
    b.starved = true;
    {
        const std::lock_guard lock(mutex_);
        const auto now = tenant_->now();
        b.late = waiting_.take_expired(now);
        // none if the engine broke in the meantime: the requests then wait for the next engine
        b.on = engine_;
        // The request that raised the batch's level went with another batch. The remaining requests
        // run at their own level.
        if (b.on != nullptr && waiting_.level() >= b.level) b.requests = waiting_.take_now(now);
    }
    b.starved = false;
    refuse_late(b);
    b.arrange(model_.info.max_batch);
}

gpushare::instant lane::refuse_late() {
    std::vector<request> late;
    gpushare::instant next{};
    {
        const std::lock_guard lock(mutex_);
        late = waiting_.take_expired(tenant_->now());
        over(late.size());
        next = waiting_.expires_at();
    }
    for (auto& r : late) refuse(r, as_refused(gpushare::failure{errc::deadline_exceeded}));
    return next;
}

void lane::refuse_late(batch& b) noexcept {
    if (b.late.empty()) return;
    {
        const std::lock_guard lock(mutex_);
        over(b.late.size());
    }
    for (auto& r : b.late) refuse(r, as_refused(gpushare::failure{errc::deadline_exceeded}));
    b.late.clear();
}

void lane::finish(batch& b, const gpushare::completion& how) noexcept {
    // A call on a thread of its own was refused its turn, and so are the requests that would have
    // run with it.
    if (calls_on_threads() && how.status != errc::none && how.status != errc::kernel_failed && !b.starved) try {
            take(b);
        } catch (...) {  // for lack of the host's memory: the requests wait
        }
    auto broken = broke(how) && b.entered.load(std::memory_order_relaxed) ? b.on : nullptr;
    b.on.reset();
    b.cut.reset();
    refuse_late(b);
    {  // before they are answered, because a client with an answer may unload the model
        const std::lock_guard lock(mutex_);
        over(b.requests.size());
    }
    try {
        if (how.status == errc::none) {
            for (const auto& f : b.outputs_come) f();
            account_->batches.fetch_add(b.requests.empty() ? 0 : 1, std::memory_order_relaxed);
            const auto now = tenant_->now();
            for (const auto& c : b.calls)
                if (c.refused)
                    for (std::size_t i = c.first; i < c.end; ++i) {
                        refuse(b.requests[i], as_refused(c.refused));
                        b.requests[i].reply = {};
                    }
            b.each_answer([&](request& r, std::vector<tensor> outputs) {
                account_->answered(now - r.arrived);
                account_->rows.fetch_add(r.rows, std::memory_order_relaxed);
                r.reply(infer_response{model_.info.name, std::string(model_version), r.what.id, std::move(outputs)});
                r.reply = {};
            });
        } else {
            const auto why = reason_of(how);
            for (auto& r : b.requests) refuse(r, why);
        }
    } catch (...) {  // for lack of memory: requests without an answer are told so
        for (auto& r : b.requests)
            if (r.reply) refuse(r, as_refused(std::current_exception()));
    }
    const auto calls = static_cast<gpushare::ns::rep>(b.calls.size());
    ended all{.call_took = calls == 0 ? gpushare::ns{} : b.took / calls,
              .longest_piece = b.longest,
              .batch = true,
              .broken = std::move(broken),
              .starved = b.starved,
              .level = b.level};
    b.requests.clear();
    b.outputs_come.clear();
    b.calls.clear();
    end(std::move(all));
}

bool lane::begin_piece() {
    const std::lock_guard lock(mutex_);
    if (state_ == state::closed) return false;
    ++submitted_;
    return true;
}

void lane::end(ended what) noexcept {
    std::shared_ptr<engine> gone;
    std::unique_ptr<gpushare::workspace> beside;
    {
        const std::lock_guard lock(mutex_);
        --submitted_;
        if (what.batch) --batches_;
        if (what.batch && what.level == level_) level_ = gpushare::no_priority;
        if (what.text) --texts_;
        over(what.requests);
        if (what.call_took != gpushare::ns{})
            call_takes_ += (what.call_took - call_takes_) / (call_takes_ == gpushare::ns{} ? 1 : 4);
        longest_piece_ = std::max(longest_piece_, what.longest_piece);
        // The next request gets a new engine, unless it is already there because another submission
        // of the old engine broke as well.
        if (what.broken != nullptr && what.broken == engine_ && state_ == state::ready) {
            gone = std::move(engine_);
            beside = std::move(beside_);
            state_ = state::unloaded;
            came_to(gpushare::sleep_level::weights_released, tenant_->now());
        }
        if (submitted_ == 0) idle_.notify_all();
    }
    what.broken.reset();
    gone.reset();
    beside.reset();
    if (!what.starved) pump_or_later();
}

// Reserves the scratch in advance, so that no call has to. If a call that is being enqueued has the
// scratch, the engine's first call makes the scratch large enough.
void lane::reserve_scratch(const engine& e) {
    gpushare::failure why;
    const auto reserve = [&] { why = settings_.room->reserve(gpushare::bytes{e.scratch()}); };
    if (calls_on_threads())
        (void)settings_.calls->between_calls(reserve);
    else
        reserve();
    if (e.scratch() != 0 && why.code != errc::none) gpushare::raise(why, whose(), "scratch of a model");
}

// Called under the lock.
void lane::load_later() {
    if (state_ != state::unloaded) return;
    // The load can't end before this lock is released.
    settings_.run_later([self = shared_from_this()] {
        try {
            // Otherwise loads that wait behind others would run in vain while the server ends.
            if (self->now() == state::closed) gpushare::raise(gpushare::failure{errc::closed}, self->whose(), "a load");
            std::unique_ptr<gpushare::workspace> beside;
            if (self->model_.beside != gpushare::bytes{})
                beside = std::make_unique<gpushare::workspace>(self->tenant_->declare_workspace(self->model_.beside));
            auto& whose = *self->tenant_;
            // safe, because there is one load at a time
            std::optional<gpushare::foreign_meter<gpushare::process_memory>> before;
            if (self->model_.measured) before.emplace(gpushare::process_memory{});
            std::shared_ptr<engine> e =
                self->model_.load({self->memory_, *self->settings_.chunks, whose.memory().limit(),
                                   gpushare::tenant_tag{whose.tag()}, whose.name(), &self->owner_});
            check_runs_here(self->model_.info, *e);
            if (before) beside = std::make_unique<gpushare::workspace>(before->charge(whose));
            self->reserve_scratch(*e);
            self->loaded(std::move(e), std::move(beside), nullptr);
        } catch (...) {
            const auto why = as_refused(std::current_exception());
            self->loaded(nullptr, nullptr, &why);
        }
    });
    state_ = state::loading;
    loads_ = true;
    sleep_.began(gpushare::sleep_level::awake, tenant_->now());
}

void lane::loaded(std::shared_ptr<engine> e, std::unique_ptr<gpushare::workspace> beside, const refused* why) noexcept {
    decltype(on_loaded_) told;
    std::vector<request> lost;
    bool starved = false;
    {
        const std::lock_guard lock(mutex_);
        if (state_ == state::loading) {
            state_ = e == nullptr ? state::unloaded : state::ready;
            engine_ = std::move(e);
            beside_ = std::move(beside);
            longest_piece_ = {};
        }
        sleep_.ended(engine_ != nullptr, tenant_->now());
        told.swap(on_loaded_);
        try {
            if (why != nullptr) lost = waiting_.take_all();
        } catch (...) {  // for lack of the host's memory: the requests wait for another load
            starved = true;
        }
        loads_ = false;
        idle_.notify_all();
        // before they are answered, because a client with an answer may unload the model
        over(lost.size() + told.size());
    }
    e.reset();
    beside.reset();
    for (auto& r : lost) refuse(r, *why);
    for (const auto& f : told) try {
            f(why);
        } catch (...) {  // for lack of the host's memory: the other callers are still told
        }
    if (!starved) pump_or_later();
}

void lane::load(std::function<void(const refused*)> done) { when_loaded(std::move(done), true); }

// `limited` is set for requests of their own. A text already waits in its place.
void lane::when_loaded(std::function<void(const refused*)> done, bool limited) {
    {
        std::unique_lock lock(mutex_);
        if (limited && state_ != state::ready && on_loaded_.size() >= limit()) {
            lock.unlock();
            account_->refusals.fetch_add(1, std::memory_order_relaxed);
            const refused why(429, "too many requests wait for the model", 1);
            return done(&why);
        }
        if (state_ == state::ready || state_ == state::closed) {
            const auto why = as_refused(gpushare::failure{errc::closed});
            const bool is_ready = state_ == state::ready;
            asked(tenant_->now());
            over(1);
            lock.unlock();
            return done(is_ready ? nullptr : &why);
        }
        on_loaded_.push_back(std::move(done));
        asked(tenant_->now());
        try {
            load_later();
            // for lack of the host's memory: the caller learns of it by the exception alone
        } catch (...) {
            on_loaded_.pop_back();
            over(1);
            throw;
        }
    }
}

std::shared_ptr<token_stream> lane::generate(std::string prompt, std::uint32_t most_tokens) {
    {
        const std::lock_guard lock(mutex_);
        if (texts_ >= limit() + ahead) {
            account_->refusals.fetch_add(1, std::memory_order_relaxed);
            throw refused(429, "too many texts are being continued", 1);
        }
        ++texts_;
        asked(tenant_->now());
    }
    try {
        return std::make_shared<token_stream>(shared_from_this(), std::move(prompt), most_tokens);
    } catch (...) {
        close_text();
        throw;
    }
}

void lane::close_text() noexcept {
    const std::lock_guard lock(mutex_);
    --texts_;
    over(1);
}

namespace {

/// A tenant's instant is an instant of the steady clock.
std::chrono::time_point<std::chrono::steady_clock, gpushare::ns> steady(instant i) {
    return std::chrono::time_point<std::chrono::steady_clock, gpushare::ns>{i.time_since_epoch()};
}

}  // namespace

bool lane::unload() {
    std::shared_ptr<engine> gone;
    std::unique_ptr<gpushare::workspace> beside;
    const std::lock_guard lock(mutex_);
    if (state_ == state::loading || sleep_.requests() != 0) return false;
    if (state_ == state::closed || engine_ == nullptr) return true;
    came_to(gpushare::sleep_level::weights_released, tenant_->now());
    state_ = state::unloaded;
    gone = std::move(engine_);
    beside = std::move(beside_);
    return true;
}

bool lane::let_sleep() {
    std::optional<gpushare::sleep_level> to;
    {
        const std::lock_guard lock(mutex_);
        const auto now = tenant_->now();
        if (state_ == state::ready && submitted_ == 0) to = sleep_.next(now);
        if (to == gpushare::sleep_level::caches_dropped) {
            engine_->drop_caches();
            came_to(*to, now);
        }
    }
    if (to == gpushare::sleep_level::weights_released) (void)unload();
    const std::lock_guard lock(mutex_);
    return state_ == state::closed || (state_ == state::unloaded && sleep_.requests() == 0 && submitted_ == 0);
}

bool lane::close(instant deadline, const std::stop_token& hurry) {
    std::vector<request> lost;
    std::shared_ptr<engine> gone;
    {
        const std::lock_guard lock(mutex_);
        state_ = state::closed;
        lost = waiting_.take_all();
        over(lost.size());
    }
    for (auto& r : lost) refuse(r, as_refused(gpushare::failure{errc::closed}));
    memory_came();  // waiting texts are refused
    std::unique_lock lock(mutex_);
    const bool over = idle_.wait_until(lock, hurry, steady(deadline), [&] { return submitted_ == 0; });
    gone = std::move(engine_);
    const auto beside = std::move(beside_);
    lock.unlock();
    return over;
}

bool lane::wait_idle(instant deadline, const std::stop_token& hurry) {
    std::unique_lock lock(mutex_);
    return idle_.wait_until(lock, hurry, steady(deadline), [&] { return !is_busy(); });
}

lane::state lane::now() const {
    const std::lock_guard lock(mutex_);
    return state_;
}
std::size_t lane::waiting() const {
    const std::lock_guard lock(mutex_);
    return waiting_.size();
}
// Called under the lock.
bool lane::is_busy() const noexcept { return submitted_ != 0 || sleep_.requests() != 0 || state_ == state::loading; }
bool lane::busy() const {
    const std::lock_guard lock(mutex_);
    return is_busy();
}
bool lane::works() const {
    const std::lock_guard lock(mutex_);
    return submitted_ != 0 || loads_;
}
gpushare::sleep_levels lane::sleep() const {
    const std::lock_guard lock(mutex_);
    return sleep_;
}
piece_report lane::pieces() const {
    const std::lock_guard lock(mutex_);
    return {engine_ == nullptr ? 0 : engine_->pieces(), longest_piece_, model_.cut_to};
}

token_stream::token_stream(std::shared_ptr<lane> of, std::string prompt, std::uint32_t most)
    : lane_(std::move(of)), prompt_(std::move(prompt)), left_(most) {}

token_stream::~token_stream() {
    if (text_ != nullptr) {
        text_.reset();
        lane_->cache_freed();
    }
    if (open_) lane_->close_text();
}

/// Some tokens of a text, from the time when they are requested. The first piece of a text may wait
/// for memory.
struct token_stream::piece {
    std::shared_ptr<token_stream> text;
    std::uint32_t most;
    std::function<bool(std::string)> on_token;
    std::function<void(end)> on_end;
    instant until;                   // the end of its wait for memory
    bool waited = false;             // whether it has waited, and is or was the first in the line
    std::uint64_t freed_before = 0;  // settings::freed before it looked for memory
    bool last = false, has_no_room = false;
    bool reads_on = false;  // whether the prompt goes on in another submission
    // whether the engine was entered, so it may be in any state if it throws
    bool entered = false;
    std::optional<refused> why{};  // set if its reader failed

    void run(place& context) {
        auto& of = *text;
        entered = true;
        if (of.text_ == nullptr) {
            try {
                of.text_ = of.engine_->generate(of.prompt_, of.left_);
            } catch (const no_room&) {
                has_no_room = true;
                return;
            }
        }
        if ((reads_on = read(context))) return;
        for (; most > 0 && of.left_ > 0 && !last; --most, --of.left_) {
            auto token = of.text_->next();
            if (!token) break;
            of.lane_->account_->tokens.fetch_add(1, std::memory_order_relaxed);
            try {
                last = !on_token(*std::move(token));
            } catch (...) {  // usually for lack of the host's memory; the engine isn't at fault
                last = true;
                why = as_refused(std::current_exception());
            }
            give_way(context);  // more urgent work runs between two tokens
        }
        last = last || most > 0 || of.left_ == 0;
    }
    /// Returns true if more of the prompt is left. A long prompt continues in another submission,
    /// behind the waiting submissions.
    bool read(place& context) const {
        const auto turn_ends = std::chrono::steady_clock::now() + read_together;
        for (; text->text_->read_on(); give_way(context))
            if (std::chrono::steady_clock::now() >= turn_ends) return true;
        return false;
    }
    void refuse(const refused& r) noexcept {
        text->lane_->began(*this);
        on_end({true, r});
    }
};

// Called without the lock. Returns true if the piece must wait because other pieces came before it.
bool lane::waits_behind_others(const piece& p) {
    const std::lock_guard lock(mutex_);
    if (p->waited || state_ == state::closed || (for_memory_.empty() && !trying_)) return false;
    for_memory_.push_back(p);
    return true;
}

void lane::cache_freed() noexcept {
    // release: pairs with the acquire of a lane that looks for memory.
    settings_.freed->fetch_add(1, std::memory_order_release);
    try {
        settings_.on_freed();
    } catch (...) {  // for lack of the host's memory: the lanes look again once a second
    }
}

// Throws if the host has no memory; the piece is then not in the line.
void lane::wait_for_memory(const piece& p) {
    // read first, because another thread may take the piece out of the line
    const auto before = p->freed_before;
    {
        const std::lock_guard lock(mutex_);
        if (p->waited) {
            for_memory_.push_front(p);  // the piece was the first, and has tried
            trying_ = false;
        } else {
            for_memory_.push_back(p);
        }
    }
    // acquire: memory that was freed before it was counted is found.
    if (settings_.freed->load(std::memory_order_acquire) != before || now() == state::closed) memory_came();
}

void lane::began(const token_stream::piece& p) noexcept {
    if (!p.waited) return;
    {
        const std::lock_guard lock(mutex_);
        trying_ = false;
    }
    memory_came();  // there may be enough for the next text, too
}

void lane::memory_came() noexcept {
    for (;;) {
        piece first;
        bool late = false, closed = false;
        {
            const std::lock_guard lock(mutex_);
            if (for_memory_.empty()) return;
            closed = state_ == state::closed;
            // the first in the line has waited for longest
            late = closed || for_memory_.front()->until <= tenant_->now();
            if (!late && std::exchange(trying_, true)) return;
            first = std::move(for_memory_.front());
            for_memory_.pop_front();
        }
        if (!late) {
            first->waited = true;
            return token_stream::go_on(first);
        }
        account_->refusals.fetch_add(1, std::memory_order_relaxed);
        if (std::exchange(first->text->open_, false)) close_text();
        first->on_end(
            {true, refusal(503, closed ? "the tenant is gone" : "no memory for the text's cache came in time")});
    }
}

void token_stream::finish(const std::shared_ptr<piece>& p, const gpushare::completion& how) noexcept {
    if (p->has_no_room && how.status == errc::none) try {
            engine_.reset();  // the text hasn't begun, so another engine will do as well
            lane_->wait_for_memory(p);
            return lane_->end({});
        } catch (...) {
            lane_->end({});
            return p->refuse(as_refused(std::current_exception()));
        }
    if (p->reads_on && how.status == errc::none) {
        lane_->began(*p);
        p->waited = false;
        lane_->end({});
        return go_on(p);
    }
    end e{p->last || how.status != errc::none, p->why};
    if (how.status != errc::none) e.why = reason_of(how);
    lane::ended all{.broken = broke(how) && p->entered ? engine_ : nullptr};
    if (e.last) {
        text_.reset();
        engine_.reset();
        all.requests = std::exchange(open_, false) ? 1 : 0;
        all.text = all.requests != 0;
        lane_->cache_freed();
    }
    lane_->began(*p);
    auto& count = e.why ? lane_->account_->failures : lane_->account_->requests;
    if (e.last) count.fetch_add(1, std::memory_order_relaxed);
    lane_->end(std::move(all));
    p->on_end(std::move(e));
}

void token_stream::more(std::uint32_t most, std::function<bool(std::string)> on_token,
                        std::function<void(end)> on_end) {
    const auto until = gpushare::saturating_add(lane_->tenant_->now(), lane_->settings_.text_waits);
    go_on(std::make_shared<piece>(piece{shared_from_this(), most, std::move(on_token), std::move(on_end), until}));
}

void token_stream::go_on(const std::shared_ptr<piece>& p) noexcept try { p->text->begin(p); } catch (...) {
    p->refuse(as_refused(std::current_exception()));
}

// Throws refused, and if the host has no memory. The piece is then not handed over.
void token_stream::begin(const std::shared_ptr<piece>& p) {
    if (!open_) throw refused(503, "the text is over");  // a new text would begin from its prompt
    if (text_ == nullptr && lane_->waits_behind_others(p)) return;
    auto loaded = lane_->loaded_engine();
    if (engine_ != nullptr &&
        // the engine's state is unknown, and another engine doesn't know the text
        engine_ != loaded)
        throw refused(503, "the model's engine is gone");
    engine_ = std::move(loaded);
    if (engine_ == nullptr)  // the model must be loaded first
        return lane_->when_loaded([p](const refused* why) { why == nullptr ? go_on(p) : p->refuse(*why); }, false);
    const auto run = [p](server_stream& s) {
        p->has_no_room = p->reads_on = p->entered = false;  // the piece may have run before
        p->freed_before = p->text->lane_->settings_.freed->load(std::memory_order_acquire);
        when_over nothing;
        put_call(s, 1, nothing, [p](place& context) { p->run(context); });
    };
    if (!lane_->begin_piece()) throw refused(503, std::string(to_string(errc::closed)));
    try {
        const auto why = lane_->hand_over(run, lane_->options(true),
                                          [p](const gpushare::completion& how) { p->text->finish(p, how); });
        if (why != errc::none) finish(p, ended_by(why));
    } catch (...) {
        lane_->end({});
        throw;
    }
}

}  // namespace inference_server
