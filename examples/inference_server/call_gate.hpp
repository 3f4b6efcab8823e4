// SPDX-License-Identifier: Apache-2.0
// The gate that the engines' launches pass on CUDA, and the threads that make the calls. Each call
// under way has a thread of its own, so an urgent tenant's call is enqueued even while a batch
// tenant's thread is held in the middle of its call, or computes there.
//
//   call_gate gate(node, {});                         // throws gpushare::error without CUPTI
//   const auto calls = gate.add(tenant);              // once for each tenant, a shared_ptr
//   calls->call(options, [](server_stream& to) { ... }, [](const completion& how) { ... });
//
// On the host there is no gate, and the thread that drives the device makes all calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include <gpushare/compute/submission.hpp>
#include <gpushare/units.hpp>

#include "inference_server/server_node.hpp"

#ifdef INFERENCE_SERVER_ON_CUDA
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/launch_gate.hpp>
#include <gpushare/compute/launch_gate.hpp>
#include <gpushare/error.hpp>
#include <gpushare/tenant/tenancy.hpp>
#endif

namespace inference_server {

/// The launches that passed the gate since the last question because they had been held for the
/// longest allowed time.
struct forced_launches {
    std::size_t count = 0;
    /// Clients of the last such launch, as tenant_calls::number().
    std::uint32_t client = 0, held_by = 0;
    gpushare::ns held{};  ///< how long that launch was held
};

#ifdef INFERENCE_SERVER_ON_CUDA

constexpr bool has_call_gate = true;
using call_gate_options = gpushare::launch_gate_options;

/// Threads for functions that may wait. Each function has a thread of its own while it runs. A
/// thread that is done with a function takes the next function.
class call_threads {
public:
    call_threads() = default;
    call_threads(const call_threads&) = delete;
    call_threads& operator=(const call_threads&) = delete;
    ~call_threads() { end(); }

    /// Runs `f`, which doesn't throw, soon. Any thread may call it. If the system has no further
    /// thread, `f` waits for one of the existing threads. Throws std::bad_alloc, and
    /// std::system_error if there is no thread at all.
    void run(std::function<void()> f) {
        {
            const std::lock_guard lock(mutex_);
            waiting_.push_back(std::move(f));
            if (waiting_.size() > free_) add_thread();
        }
        comes_.notify_one();
    }
    /// Returns when all functions have run. No thread may call run() any more.
    void end() {
        std::vector<std::thread> all;
        {
            const std::lock_guard lock(mutex_);
            over_ = true;
            all.swap(threads_);
        }
        comes_.notify_all();
        for (auto& t : all) t.join();
    }

private:
    // Called under the mutex. A new thread counts as free before it has begun. Otherwise each
    // function that leaves the next function here, as a call does, would get one more thread.
    void add_thread() try {
        threads_.emplace_back([this] { work(); });
        ++free_;
    } catch (...) {
        if (!threads_.empty()) return;
        waiting_.pop_back();
        throw;
    }
    void work() {
        std::unique_lock lock(mutex_);
        for (;;) {
            comes_.wait(lock, [this] { return over_ || !waiting_.empty(); });
            --free_;
            if (waiting_.empty()) return;
            auto f = std::move(waiting_.front());
            waiting_.pop_front();
            lock.unlock();
            f();
            f = {};  // objects that `f` owns are destroyed without the lock
            lock.lock();
            ++free_;
        }
    }

    std::mutex mutex_;
    std::condition_variable comes_;
    std::deque<std::function<void()>> waiting_;
    std::size_t free_ = 0;  // threads that don't run a function
    bool over_ = false;
    std::vector<std::thread> threads_;
};

/// The calls of one tenant: those that wait for their turn, the call that is being enqueued, and
/// those that the device computes. All lanes of the tenant share the object. Destroy it before its
/// gate.
class tenant_calls {
public:
    using tenant = gpushare::tenancy<server_node>::tenant;
    using gate = gpushare::cuda::launch_gate<gpushare::launch_gate>;

    /// The client at the gate follows the tenant. Throws std::bad_alloc.
    tenant_calls(gate& at, call_threads& threads, const std::shared_ptr<tenant>& who)
        : gate_(at), threads_(threads), who_(*who), whose_(who), client_(gate_.add(*who)) {}

    /// Whether the calls belong to this tenant, and not to an earlier tenant with the same name.
    [[nodiscard]] bool are_of(const tenant& t) const noexcept { return whose_.lock().get() == &t; }
    /// The client's number at the gate.
    [[nodiscard]] std::uint32_t number() const noexcept { return client_.number(); }

    /// Returns at once. A thread waits for the tenant's turn, calls `run(stream)` there, waits for
    /// the work, and calls `done(how)`, which doesn't throw. The launches of `run` pass the gate.
    /// `done` keeps this object alive. Throws as call_threads::run() does.
    template <class Run, class Done>
    void call(const gpushare::submit_options& o, Run run, Done done) {
        threads_.run([this, o, run = std::move(run), done = std::move(done)] { done(carry_out(o, run)); });
    }
    /// Runs `f` between two calls of the tenant. Returns false without running `f` if a call is
    /// being enqueued, which may last as long as a launch is held.
    template <class F>
    bool between_calls(const F& f) {
        if (!try_begin()) return false;
        const ending ends(*this);
        f();
        return true;
    }
    /// The device time of all calls' launches. Queries the device.
    [[nodiscard]] gpushare::ns device_time() const noexcept { return gate_.usage(client_).device_time; }
    /// The same without the launches' widths. Queries the device.
    [[nodiscard]] gpushare::ns launch_time() const noexcept { return gate_.usage(client_).time; }

private:
    using permit = tenant::permit;

    // Engines of a tenant share its scratch, and an engine has only one call at a time.
    [[nodiscard]] bool try_begin() {
        const std::lock_guard lock(mutex_);
        return !std::exchange(enqueues_, true);
    }
    class ending {
    public:
        explicit ending(tenant_calls& of) noexcept : of_(of) {}
        ending(const ending&) = delete;
        ending& operator=(const ending&) = delete;
        ~ending() {
            {
                const std::lock_guard lock(of_.mutex_);
                of_.enqueues_ = false;
            }
            of_.next_.notify_all();
        }

    private:
        tenant_calls& of_;
    };
    // Returns with the turn to enqueue, which ends with an `ending`. The limiter counts a permit as
    // work on the device. So a call that waits for another call of the tenant holds no permit: the
    // other call may take as long as the host computes, and the other tenants of the level would
    // wait behind the permit.
    [[nodiscard]] gpushare::result<permit> turn(const gpushare::submit_options& o) {
        for (;;) {
            {
                std::unique_lock lock(mutex_);
                next_.wait(lock, [this] { return !enqueues_; });
            }
            auto p = permit_for(o);
            if (!p || try_begin()) return p;
        }  // the permit is given back, because another call was first
    }
    // Wakes a tenant that sleeps.
    [[nodiscard]] gpushare::result<permit> permit_for(const gpushare::submit_options& o) {
        auto p = who_.acquire(o);
        if (p.code() != gpushare::errc::asleep) return p;
        const auto why = who_.try_wake();
        if (why.code != gpushare::errc::none) return why;  // other tenants have its memory
        return who_.acquire(o);
    }
    template <class Run>
    [[nodiscard]] gpushare::completion carry_out(const gpushare::submit_options& o, const Run& run) noexcept {
        gpushare::completion how;
        try {
            auto p = turn(o);
            how.status = p.code();
            if (p) make(*p, o.stream, run, how);
        } catch (...) {
            how.status = gpushare::errc::submission_failed;
            // otherwise the engine's error came first
            if (!how.error) how.error = std::current_exception();
        }
        return how;
    }
    template <class Run>
    void make(permit& p, std::uint32_t stream, const Run& run, gpushare::completion& how) {
        server_stream* to = nullptr;
        try {
            const ending ends(*this);
            to = &who_.work_stream(0, stream);
            const auto inside = gate_.enter(client_);
            p.enqueue(*to, run);
        } catch (...) {
            how.status = gpushare::errc::submission_failed;
            how.error = std::current_exception();
            how.tenant = who_.name();
        }
        // An engine that threw may have enqueued work before. That work uses the call's tensors.
        if (how.error) {
            if (to != nullptr) (void)to->record().wait(gpushare::never);
            return;
        }
        (void)p.wait();
        how.status = p.status();
        if (how.status == gpushare::errc::none) return;
        try {
            p.rethrow();
        } catch (...) {
            how.error = std::current_exception();
        }
    }

    gate& gate_;
    call_threads& threads_;
    tenant& who_;
    const std::weak_ptr<tenant> whose_;
    std::mutex mutex_;
    std::condition_variable next_;
    bool enqueues_ = false;  // whether a call, or a function between two calls, has the turn
    gate::client client_;
};

/// The gate of the server's device, and its threads.
class call_gate {
public:
    /// Throws cuda::subscriber_taken if a profiler holds the process's subscriber to CUPTI, and
    /// operation_error if CUPTI fails.
    call_gate(server_node& on, const call_gate_options& o) : gate_(on, server_device, gpushare::launch_gate(o)) {}

    [[nodiscard]] std::shared_ptr<tenant_calls> add(const std::shared_ptr<tenant_calls::tenant>& who) {
        return std::make_shared<tenant_calls>(gate_, threads_, who);
    }
    /// The number of threads that are held in the middle of a call.
    [[nodiscard]] std::size_t held() const noexcept { return gate_.held(); }
    [[nodiscard]] forced_launches take_forced() noexcept {
        forced_launches all;
        while (const auto one = gate_.take_forced()) all = {all.count + 1, one->client, one->held_by, one->held};
        return all;
    }
    /// Returns when all calls are over. No thread may make a call any more.
    void end() { threads_.end(); }

private:
    tenant_calls::gate gate_;
    call_threads threads_;
};

#else

constexpr bool has_call_gate = false;
struct call_gate_options {};

/// Without a gate: see above.
struct tenant_calls {
    template <class Run, class Done>
    static void call(const gpushare::submit_options&, const Run&, const Done&) noexcept {}
    template <class F>
    static bool between_calls(const F&) noexcept {
        return false;
    }
    template <class Tenant>
    [[nodiscard]] static bool are_of(const Tenant&) noexcept {
        return false;
    }
    [[nodiscard]] static std::uint32_t number() noexcept { return 0; }
    [[nodiscard]] static gpushare::ns device_time() noexcept { return {}; }
    [[nodiscard]] static gpushare::ns launch_time() noexcept { return {}; }
};
struct call_gate {
    call_gate(server_node&, const call_gate_options&) noexcept {}
    template <class Tenant>
    [[nodiscard]] static std::shared_ptr<tenant_calls> add(const Tenant&) noexcept {
        return nullptr;
    }
    [[nodiscard]] static std::size_t held() noexcept { return 0; }
    [[nodiscard]] static forced_launches take_forced() noexcept { return {}; }
    static void end() noexcept {}
};

#endif

}  // namespace inference_server
