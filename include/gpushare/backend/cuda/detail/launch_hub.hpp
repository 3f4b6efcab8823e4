// SPDX-License-Identifier: Apache-2.0
// The process's subscriber to the driver's launches. The hub finds the client to which a launch
// belongs, by the stream or by the calling thread.
//
//   launch_hub& hub = launch_hub::of_process();
//   hub.join(gate);  // the first one subscribes; throws subscriber_taken
//   { const thread_binding inside(gate, client); engine(); }
//   hub.leave(gate);
//
// CUPTI has one subscriber for each process, so there is one hub for each process while a gate
// exists. If neither the thread nor the stream of a launch is bound, the launch costs two loads and
// a look at a thread-local pointer. If a gate makes streams wait, the hub also looks whether the
// launched code was used before.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cupti.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/detail/launch_call.hpp>
#include <gpushare/backend/cuda/detail/loaded_code.hpp>
#include <gpushare/backend/cuda/detail/own_calls.hpp>
#include <gpushare/backend/cuda/detail/sync_call.hpp>
#include <gpushare/backend/cuda/detail/thread_polls.hpp>
#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/golden_ratio.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// Another part of the process subscribes to CUPTI's callbacks, which have room for one subscriber:
/// a profiler, a debugger, or a framework that profiles itself. errc::not_supported.
class subscriber_taken : public operation_error {
public:
    /// `holder`: the name of the subscriber, from CUPTI.
    explicit subscriber_taken(std::string_view holder)
        : operation_error(
              failure{.code = errc::not_supported}, {},
              gpushare::detail::message().add("launches can't be gated: the process's one subscriber to CUPTI is ",
                                              holder.empty() ? std::string_view("unknown") : holder)),
          holder_(holder) {}
    /// The name of the present subscriber; empty if CUPTI doesn't tell.
    [[nodiscard]] const std::string& holder() const noexcept { return holder_; }

private:
    std::string holder_;
};

namespace detail {

/// A client of a gate. `turn` distinguishes the client from earlier clients with the same number.
struct launch_owner {
    std::uint32_t client = 0, turn = 0;
};

/// A gate's answer to a launch.
enum class launch_verdict : std::uint8_t {
    passes,     ///< the launch goes, and the gate needn't see its end
    followed,   ///< the launch goes, and the gate must see its end
    elsewhere,  ///< the launch is for another device
};

/// A gate, as the hub sees it. No call throws, since the calls come from inside the driver.
class launch_listener {
public:
    launch_listener() noexcept : number_(next_number()) {}
    launch_listener(const launch_listener&) = delete;
    launch_listener& operator=(const launch_listener&) = delete;
    virtual ~launch_listener() = default;
    /// The gate's number, which no other gate of the process has or had.
    [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
    /// Called before a launch in its thread, which may be held. after() follows only for
    /// launch_verdict::followed. `note`: a value below 2^56 for after().
    [[nodiscard]] virtual launch_verdict before(launch_owner who, const launch_call& call,
                                                std::uint64_t& note) noexcept = 0;
    /// Called after the launch. `note`: the value from before().
    virtual void after(launch_owner who, const launch_call& call, std::uint64_t note, CUresult result) noexcept = 0;
    /// Whether the gate makes streams wait, and so must see threads that wait for work on the
    /// device.
    [[nodiscard]] virtual bool waits_in_streams() const noexcept = 0;
    /// Called before the calling thread waits for such work inside the driver. `who`: the thread's
    /// client; null if it has none at this gate. Returns whether the hub must call synchronised()
    /// after the wait.
    [[nodiscard]] virtual bool synchronises(const launch_owner* who, const sync_call& call) noexcept = 0;
    /// Called after such a wait.
    virtual void synchronised() noexcept = 0;
    /// Called after the calling thread has polled for the end of such work without success, at most
    /// once in 50 us. `since`: since when closed waits may have prevented the end. Returns whether
    /// the waits are now open for the thread, until poll_over().
    [[nodiscard]] virtual bool polls(const launch_owner* who, const sync_call& call,
                                     std::optional<instant>& since) noexcept = 0;
    /// The calling thread's poll has succeeded, or the thread has stopped polling.
    virtual void poll_over(const void* what) noexcept = 0;
    /// The stream is about to be destroyed.
    virtual void ends(CUstream s) noexcept = 0;

private:
    [[nodiscard]] static std::uint64_t next_number() noexcept {
        constinit static std::atomic<std::uint64_t> last{0};
        return last.fetch_add(1, std::memory_order_relaxed) + 1;
    }
    const std::uint64_t number_;
};

/// Binds the calling thread's launches to a client while this object exists. The same thread must
/// destroy it. The latest of several bindings counts; bindings may be destroyed in any order.
class thread_binding {
public:
    thread_binding(launch_listener& gate, launch_owner who) noexcept : gate_(&gate), who_(who), outer_(innermost()) {
        innermost() = this;
    }
    thread_binding(const thread_binding&) = delete;
    thread_binding& operator=(const thread_binding&) = delete;
    ~thread_binding() {
        thread_binding** at = &innermost();
        while (*at != nullptr && *at != this) at = &(*at)->outer_;
        if (*at == this) *at = outer_;
    }

    /// The binding that counts; null if the thread has none.
    [[nodiscard]] static thread_binding*& innermost() noexcept {
        constinit thread_local thread_binding* of_thread = nullptr;
        return of_thread;
    }
    [[nodiscard]] launch_listener& gate() const noexcept { return *gate_; }
    [[nodiscard]] launch_owner who() const noexcept { return who_; }
    /// The latest earlier binding that still exists.
    [[nodiscard]] const thread_binding* outer() const noexcept { return outer_; }

private:
    launch_listener* gate_;
    launch_owner who_;
    thread_binding* outer_;
};

/// A launch from its entry to its exit, if a gate follows the launch or the driver may wait in it.
/// Kept by the launching thread.
struct launch_under_way {
    std::uint8_t turn = 0;   // never 0 while the launch is under way
    bool by_stream = false;  // the launch is bound by its stream; otherwise by the thread
    launch_listener* gate = nullptr;
    std::uint64_t number = 0;  // the number of the gate, which may be destroyed meanwhile
    launch_owner who{};
    std::uint64_t wait = 0;  // the number of the wait for which gates keep their waits open
    code_use loads{};        // code that is used for the first time
};
/// The launches under way of the calling thread; several only if one launch is made inside another.
class launches_under_way {
public:
    [[nodiscard]] static launch_under_way& next() noexcept {
        if (++turn() == 0) turn() = 1;
        launch_under_way& l = all()[turn() % all().size()];
        l.turn = turn();
        return l;
    }
    /// Takes out the launch with this turn. Its gate is null if a later launch has taken its place.
    [[nodiscard]] static launch_under_way take(std::uint8_t turn) noexcept {
        launch_under_way& l = all()[turn % all().size()];
        return l.turn == turn ? std::exchange(l, {}) : launch_under_way{};
    }
    [[nodiscard]] static bool any() noexcept {
        return std::ranges::any_of(all(), [](const launch_under_way& l) { return l.turn != 0; });
    }

private:
    [[nodiscard]] static std::array<launch_under_way, 4>& all() noexcept {
        constinit thread_local std::array<launch_under_way, 4> of_thread{};
        return of_thread;
    }
    [[nodiscard]] static std::uint8_t& turn() noexcept {
        constinit thread_local std::uint8_t last = 0;
        return last;
    }
};

/// Safe from any thread.
class launch_hub {
public:
    [[nodiscard]] static launch_hub& of_process() {
        // Never destroyed: a callback may be under way at the end of the process.
        static launch_hub* const one = new launch_hub;
        return *one;
    }
    launch_hub(const launch_hub&) = delete;
    launch_hub& operator=(const launch_hub&) = delete;

    /// From now on the gate sees launches. Throws subscriber_taken; operation_error
    /// (backend_failed) if CUPTI fails.
    void join(const std::shared_ptr<launch_listener>& gate) {
        const std::lock_guard turn(joining_);
        {
            const std::lock_guard lock(mutex_);
            gates_.reserve(gates_.size() + 1);
        }
        if (joined_ == 0) subscribe();
        if (gate->waits_in_streams()) watch_waits();
        // Nobody watched until now whether code was unloaded.
        if (in_streams_.load(std::memory_order_relaxed) == 0) loaded_.clear();
        ++joined_;
        const std::lock_guard lock(mutex_);
        gates_.push_back(gate);
        if (gate->waits_in_streams()) in_streams_.fetch_add(1, std::memory_order_relaxed);
    }
    /// From now on the gate sees no launch, except for the ends of launches under way.
    void leave(const launch_listener& gate) noexcept {
        if (in_child()) return;
        const std::lock_guard turn(joining_);
        {
            const std::lock_guard lock(mutex_);
            if (std::erase_if(gates_, [&](const auto& g) { return g.get() == &gate; }) != 0 && gate.waits_in_streams())
                in_streams_.fetch_sub(1, std::memory_order_relaxed);
            std::erase_if(waits_, [&](const wait_under_way& w) { return w.gate.get() == &gate; });
            for (auto at = streams_.begin(); at != streams_.end();) {
                if (at->gate.get() != &gate) {
                    ++at;
                    continue;
                }
                count(at->stream, -1);
                at = streams_.erase(at);
            }
        }
        if (--joined_ == 0) unsubscribe();
    }

    /// Binds all launches into the stream to the client, from any thread, even from one that is
    /// bound to another client. Replaces an earlier binding of the stream. Returns the binding's
    /// number, never 0. Throws std::bad_alloc.
    [[nodiscard]] std::uint64_t bind(CUstream s, const std::shared_ptr<launch_listener>& gate, launch_owner who) {
        bound_stream replaced;  // may destroy a gate, which frees memory: not under the lock
        const std::lock_guard lock(mutex_);
        const auto at = std::ranges::find(streams_, s, &bound_stream::stream);
        if (at != streams_.end()) {
            replaced = std::exchange(*at, {s, gate, who, ++bindings_});
            return bindings_;
        }
        streams_.push_back({s, gate, who, ++bindings_});
        count(s, 1);
        return bindings_;
    }
    /// Ends that binding, unless a later one has replaced it: of the same stream, or of a later
    /// stream that has the same handle.
    void unbind(std::uint64_t number) noexcept {
        if (in_child()) return;
        bound_stream ended;  // may destroy a gate, which frees memory: not under the lock
        const std::lock_guard lock(mutex_);
        const auto at = std::ranges::find(streams_, number, &bound_stream::number);
        if (at == streams_.end()) return;
        ended = std::move(*at);
        count(ended.stream, -1);
        streams_.erase(at);
    }

    /// Whether this process is a child of a fork(), which has neither the parent's threads nor its
    /// device. No launch is held or followed there.
    [[nodiscard]] static bool in_child() noexcept { return child().load(std::memory_order_relaxed); }

private:
    struct bound_stream {
        CUstream stream = nullptr;
        std::shared_ptr<launch_listener> gate{};
        launch_owner who{};
        std::uint64_t number = 0;  // the number of the binding
    };

    // The client of a call that waits or polls; without a gate, the call is of no client.
    struct waiting_client {
        const launch_listener* gate = nullptr;
        launch_owner who{};
        std::shared_ptr<launch_listener> kept{};  // a bound stream's gate may leave meanwhile

        [[nodiscard]] const launch_owner* at(const launch_listener& one) const noexcept {
            return gate == &one ? &who : nullptr;
        }
    };

    // A waiting call for which a gate keeps its waits open.
    struct wait_under_way {
        std::uint64_t number = 0;
        std::thread::id thread{};
        std::shared_ptr<launch_listener> gate{};
    };

    launch_hub() noexcept {
        // A child of fork() must not wait for locks of threads that don't exist there. Alongside
        // the subscriber, this handler is the only trace of the hub in the process.
        (void)::pthread_atfork(nullptr, nullptr, [] { child().store(true, std::memory_order_relaxed); });
    }
    [[nodiscard]] static std::atomic<bool>& child() noexcept {
        constinit static std::atomic<bool> is{false};
        return is;
    }

    void subscribe() {
        char holder[CUPTI_OLD_SUBSCRIBER_NAME_MIN_LEN] = {};
        CUpti_SubscriberParams p{};
        p.structSize = CUpti_SubscriberParams_STRUCT_SIZE;
        p.subscriberName = "gpushare's launch gate";
        p.oldSubscriberName = holder;
        p.oldSubscriberSize = sizeof holder;
        const CUptiResult code = cuptiSubscribe_v2(&subscriber_, &launch_hub::called, this, &p);
        if (code == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED) throw subscriber_taken(holder);
        check_cupti(code, "subscribing to the driver's launches");
        for (const CUpti_CallbackId id : code_ids) enable(id);
        enable(launches::asynchronous);
        enable(launches::synchronous);
        // Later versions of CUPTI may not know them.
        for (const CUpti_CallbackId id : old_launch_ids)
            (void)cuptiEnableCallback(1, subscriber_, CUPTI_CB_DOMAIN_DRIVER_API, id);
        enable(stream_end_id);
    }
    // Also subscribes to calls that wait or poll, which matter if streams wait.
    void watch_waits() {
        for (CUpti_CallbackId id = 1; id < CUPTI_DRIVER_TRACE_CBID_SIZE; ++id)
            if (reach_of(id) != wait_reach::none) enable(id);
        for (const CUpti_CallbackId id : host_ids) enable(id);
        for (const CUpti_CallbackId id : poll_ids) enable(id);
    }
    void enable(std::span<const launches::transfer_function> all) {
        for (const auto& f : all) {
            enable(f.id);
            enable(f.of_thread);
        }
    }
    void enable(CUpti_CallbackId id) {
        const CUptiResult code = cuptiEnableCallback(1, subscriber_, CUPTI_CB_DOMAIN_DRIVER_API, id);
        if (code != CUPTI_SUCCESS && joined_ == 0) unsubscribe();
        check_cupti(code, "asking for the driver's launches");
    }
    void unsubscribe() noexcept {
        (void)cuptiUnsubscribe(subscriber_);
        subscriber_ = nullptr;
    }
    static void check_cupti(CUptiResult code, std::string_view what) {
        if (code == CUPTI_SUCCESS) return;
        const char* name = nullptr;
        if (cuptiGetResultString(code, &name) != CUPTI_SUCCESS || name == nullptr) name = "an unknown error";
        throw operation_error(failure{.code = errc::backend_failed}, {},
                              gpushare::detail::message().add(what, ": ", std::string_view{name}, " (",
                                                              static_cast<std::uint64_t>(code), ")"));
    }

    static void CUPTIAPI called(void* hub, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* data) {
        if (domain != CUPTI_CB_DOMAIN_DRIVER_API) return;
        static_cast<launch_hub*>(hub)->called(id, *static_cast<const CUpti_CallbackData*>(data));
    }
    void called(CUpti_CallbackId id, const CUpti_CallbackData& data) noexcept {
        const thread_binding* const thread = thread_binding::innermost();
        // relaxed: a caller that binds a stream and launches into it from another thread orders the
        // two.
        const bool any = bound_.load(std::memory_order_relaxed) != 0;
        const bool in_streams = in_streams_.load(std::memory_order_relaxed) != 0;
        if (is_poll(id)) return in_streams ? polled(thread, any, id, data) : void();
        const bool waits = in_streams && reach_of(id) != wait_reach::none;
        if (!waits && id != stream_end_id && thread_polls::of_thread().any()) forget_polls();
        // The stream's binding may have ended inside the call.
        const bool followed = data.callbackSite == CUPTI_API_EXIT && launches_under_way::any();
        const bool is_new = in_streams && (waits || (data.callbackSite == CUPTI_API_ENTER && launches_code(id)));
        if (thread == nullptr && !any && id != stream_end_id && !is_new && !followed) return;
        if (in_child()) return;
        if (waits && !launches::is_synchronous(id)) {
            if (own_calls::depth() == 0) waited(thread, any, id, data);
            return;
        }
        if (id == stream_end_id) {
            if (data.callbackSite == CUPTI_API_ENTER)
                stream_ends(static_cast<const cuStreamDestroy_v2_params*>(data.functionParams)->hStream);
            return;
        }
        if (auto call = read_launch(id, data)) launched(thread, any, in_streams, *call, data);
    }
    void waited(const thread_binding* thread, bool any, CUpti_CallbackId id, const CUpti_CallbackData& data) noexcept {
        const sync_call call = read_sync(id, data);
        std::uint64_t& number = *data.correlationData;
        if (data.callbackSite == CUPTI_API_ENTER) {
            number = 0;
            if (unloads(id)) loaded_.clear();
            if (call.loads.what == nullptr || !loaded_.has(call.loads))
                number = wait_begins(thread, any, call, nullptr);
            return;
        }
        if (const void* const graph = made_graph(id, data)) loaded_.forget(graph);
        if (call.loads.what != nullptr && succeeded(data)) loaded_.add(call.loads);
        wait_ends(number);
    }
    [[nodiscard]] static CUresult result_of(const CUpti_CallbackData& data) noexcept {
        const auto* const result = static_cast<const CUresult*>(data.functionReturnValue);
        return result != nullptr ? *result : CUDA_SUCCESS;
    }
    [[nodiscard]] static bool succeeded(const CUpti_CallbackData& data) noexcept {
        return result_of(data) == CUDA_SUCCESS;
    }
    // Calls f for each gate. The loop goes by index and keeps each gate meanwhile, because a gate's
    // lock isn't taken under the hub's. The loop begins at the last gate, so that it omits none if
    // a gate leaves meanwhile. It may then call f twice for a gate.
    template <class F>
    void each_gate(F f) noexcept {
        std::size_t i = 0;
        {
            const std::lock_guard lock(mutex_);
            i = gates_.size();
        }
        while (i-- != 0) {
            std::shared_ptr<launch_listener> gate;
            {
                const std::lock_guard lock(mutex_);
                if (i < gates_.size()) gate = gates_[i];
            }
            if (gate != nullptr) f(gate);
        }
    }
    // A waiting thread may wait for streams of any gate, but for `beside`, which sees to it by
    // itself. The waiting client is the thread's or, without one, the stream's. Returns the number
    // for wait_ends(); 0 if no gate keeps its waits open.
    [[nodiscard]] std::uint64_t wait_begins(const thread_binding* thread, bool any, const sync_call& call,
                                            const launch_listener* beside) noexcept {
        std::uint64_t note = 0;
        const waiting_client client = client_of(thread, any, call);
        each_gate([&](const std::shared_ptr<launch_listener>& gate) {
            if (gate->waits_in_streams() && gate.get() != beside && gate->synchronises(client.at(*gate), call))
                remember(gate, note);
        });
        return note;
    }
    void remember(const std::shared_ptr<launch_listener>& gate, std::uint64_t& note) noexcept {
        try {
            const std::lock_guard lock(mutex_);
            const bool is_there = std::ranges::find(gates_, gate) != gates_.end();
            if (!is_there) return;  // the gate has left, and its waits are open for good
            const std::uint64_t number = note != 0 ? note : last_wait_ + 1;
            waits_.push_back({number, std::this_thread::get_id(), gate});
            note = number;
            last_wait_ = std::max(last_wait_, number);
        } catch (const std::bad_alloc&) {
            gate->synchronised();  // no memory to remember the call: the waits may close again
        }
    }
    void wait_ends(std::uint64_t note) noexcept {
        while (note != 0) {
            std::shared_ptr<launch_listener> gate;
            {
                const std::lock_guard lock(mutex_);
                const auto at = std::ranges::find_if(waits_, [&](const wait_under_way& w) {
                    return w.number == note && w.thread == std::this_thread::get_id();
                });
                if (at == waits_.end()) return;
                gate = std::move(at->gate);
                waits_.erase(at);
            }
            gate->synchronised();
        }
    }
    // A thread that polls for long counts as waiting. While no gate may have closed waits, and for
    // 50 us after each look, a poll costs a few nanoseconds.
    void polled(const thread_binding* thread, bool any, CUpti_CallbackId id, const CUpti_CallbackData& data) noexcept {
        constexpr std::chrono::microseconds between_looks{50};
        if (data.callbackSite != CUPTI_API_EXIT || own_calls::depth() != 0 || in_child()) return;
        thread_polls& mine = thread_polls::of_thread();
        const bool over = result_of(data) != CUDA_ERROR_NOT_READY;
        if (over ? !mine.any() : thread_polls::closing_gates().load(std::memory_order_relaxed) == 0) return;
        const sync_call call = read_poll(id, data);
        if (over) {
            if (const auto was = mine.over(call.awaited()); was && was->opened) end_poll(was->what);
            return;
        }
        polled_work& work = mine.of(call.awaited());
        const auto now = std::chrono::steady_clock::now();
        if (now - work.told < between_looks) return;
        work.told = now;
        const waiting_client client = client_of(thread, any, call);
        std::optional<instant> since;  // the earliest time that a gate reports
        each_gate([&](const std::shared_ptr<launch_listener>& gate) {
            if (!gate->waits_in_streams()) return;
            std::optional<instant> of_gate = work.since;
            if (gate->polls(client.at(*gate), call, of_gate)) work.opened = true;
            if (of_gate && (!since || *of_gate < *since)) since = of_gate;
        });
        work.since = since;
    }
    void end_poll(const void* what) noexcept {
        each_gate([what](const std::shared_ptr<launch_listener>& gate) { gate->poll_over(what); });
    }
    // The thread launches, so it isn't waiting for the work that it polled.
    void forget_polls() noexcept {
        if (in_child()) return;
        while (const auto was = thread_polls::of_thread().over())
            if (was->opened) end_poll(was->what);
    }
    // The client that waits: the thread's or, without one, the stream's.
    [[nodiscard]] waiting_client client_of(const thread_binding* thread, bool any, const sync_call& call) noexcept {
        if (thread != nullptr) return {.gate = &thread->gate(), .who = thread->who()};
        if (!any || call.stream == nullptr || !may_be_bound(call.stream)) return {};
        bound_stream s = find(call.stream);
        return {.gate = s.gate.get(), .who = s.who, .kept = std::move(s.gate)};
    }
    // A launch that may wait inside the driver passes its own gate first, which may hold it. Then
    // the other gates open their waits for it.
    void launched(const thread_binding* thread, bool any, bool in_streams, launch_call& call,
                  const CUpti_CallbackData& data) noexcept {
        // passed from entry to exit; 0: nothing to do there
        std::uint64_t& note = *data.correlationData;
        if (data.callbackSite != CUPTI_API_ENTER) {
            if (note != 0) ended(call, note, succeeded(data), data);
            return;
        }
        note = 0;
        launch_under_way l;
        if (in_streams && own_calls::depth() == 0) l.loads = first_use(call);
        if (l.loads.what != nullptr) call.waits = wait_reach::all;
        const bool followed = to_owner(thread, any, call, note, l);
        if (in_streams && call.waits != wait_reach::none && own_calls::depth() == 0)
            l.wait = wait_begins(thread, any, sync_of(call), followed ? l.gate : nullptr);
        if (!followed && l.wait == 0 && l.loads.what == nullptr) return;
        launch_under_way& kept = launches_under_way::next();
        l.turn = kept.turn;
        kept = l;
        note |= std::uint64_t{l.turn} << 56;
    }
    // The code of the launch, if it wasn't used before; otherwise none.
    [[nodiscard]] code_use first_use(const launch_call& call) const noexcept {
        if (call.code == nullptr) return {};
        code_use use{.what = call.code, .context = call.context, .graph = call.graph};
        if (!loaded_.has(use)) {
            // In a capture, the driver records the function, and the graph may load it later.
            cudaStreamCaptureStatus now = cudaStreamCaptureStatusNone;
            const bool known = handled(cudaStreamIsCapturing(call.stream, &now)) == cudaSuccess;
            if (known && now == cudaStreamCaptureStatusNone) return use;
            use.how = code_use::way::record;
            if (!loaded_.has(use)) return use;
        }
        return {};
    }
    // The launch belongs to the stream's client or, if the stream isn't bound, to the thread's
    // client. If the launch is for a different device from that client's gate, it belongs to the
    // scope around. Returns whether a gate follows the launch.
    [[nodiscard]] bool to_owner(const thread_binding* thread, bool any, const launch_call& call, std::uint64_t& note,
                                launch_under_way& l) noexcept {
        if (any && may_be_bound(call.stream)) {
            const bound_stream b = find(call.stream);  // keeps the gate alive meanwhile
            if (b.gate != nullptr) {
                l.by_stream = true;
                const launch_verdict is = passed(*b.gate, b.who, call, note, l);
                if (is != launch_verdict::elsewhere) return is == launch_verdict::followed;
            }
        }
        l.by_stream = false;
        for (; thread != nullptr; thread = thread->outer()) {
            const launch_verdict is = passed(thread->gate(), thread->who(), call, note, l);
            if (is != launch_verdict::elsewhere) return is == launch_verdict::followed;
        }
        return false;
    }
    // Passes the launch to a gate.
    [[nodiscard]] static launch_verdict passed(launch_listener& gate, launch_owner who, const launch_call& call,
                                               std::uint64_t& note, launch_under_way& l) noexcept {
        const launch_verdict is = gate.before(who, call, note);
        if (is != launch_verdict::followed) {
            note = 0;
            return is;
        }
        l.gate = &gate;
        l.number = gate.number();
        l.who = who;
        return is;
    }
    // Reports the end of a launch. A scope exists until its thread has left the call, but the gate
    // of a bound stream may be gone.
    void ended(const launch_call& call, std::uint64_t note, bool went, const CUpti_CallbackData& data) noexcept {
        const launch_under_way l = launches_under_way::take(static_cast<std::uint8_t>(note >> 56));
        if (l.turn == 0) return;
        if (l.loads.what != nullptr && went) loaded_.add(l.loads);
        wait_ends(l.wait);
        if (l.gate == nullptr) return;
        const CUresult code = result_of(data);
        const std::uint64_t theirs = note & ((std::uint64_t{1} << 56) - 1);
        if (!l.by_stream) return l.gate->after(l.who, call, theirs, code);
        std::shared_ptr<launch_listener> gate;
        {
            const std::lock_guard lock(mutex_);
            const auto at = std::ranges::find(gates_, l.number, [](const auto& joined) { return joined->number(); });
            if (at != gates_.end()) gate = *at;
        }
        if (gate != nullptr) gate->after(l.who, call, theirs, code);
    }

    [[nodiscard]] bound_stream find(CUstream s) noexcept {
        const std::lock_guard lock(mutex_);
        const auto at = std::ranges::find(streams_, s, &bound_stream::stream);
        return at != streams_.end() ? *at : bound_stream{};
    }
    void stream_ends(CUstream s) noexcept {
        bound_stream ended;  // may destroy a gate, which frees memory: not under the lock
        {
            const std::lock_guard lock(mutex_);
            const auto at = std::ranges::find(streams_, s, &bound_stream::stream);
            if (at != streams_.end()) {
                ended = std::move(*at);
                streams_.erase(at);
                count(s, -1);
            }
        }
        each_gate([s](const std::shared_ptr<launch_listener>& gate) { gate->ends(s); });
    }

    // A filter of counts: how many streams are bound, in all and for each place. A launch whose
    // place has no bound stream needs no lock.
    [[nodiscard]] static std::size_t place_of(CUstream s) noexcept {
        const auto n = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(s));
        return static_cast<std::size_t>((n * gpushare::detail::golden_ratio) >> 56);
    }
    [[nodiscard]] bool may_be_bound(CUstream s) const noexcept {
        return filter_[place_of(s)].load(std::memory_order_relaxed) != 0;
    }
    void count(CUstream s, int by) noexcept {
        filter_[place_of(s)].fetch_add(by, std::memory_order_relaxed);
        bound_.fetch_add(by, std::memory_order_relaxed);
    }

    std::atomic<int> bound_{0};
    std::array<std::atomic<int>, 256> filter_{};
    std::mutex joining_;  // held while a gate subscribes, or the last one unsubscribes
    std::size_t joined_ = 0;
    CUpti_SubscriberHandle subscriber_ = nullptr;
    std::mutex mutex_;
    std::vector<std::shared_ptr<launch_listener>> gates_;
    std::atomic<int> in_streams_{0};  // how many of these make streams wait
    std::vector<bound_stream> streams_;
    std::uint64_t bindings_ = 0;  // the number of bindings so far
    std::vector<wait_under_way> waits_;
    std::uint64_t last_wait_ = 0;
    loaded_code loaded_;
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
