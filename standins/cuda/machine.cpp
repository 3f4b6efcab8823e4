// SPDX-License-Identifier: Apache-2.0
// The machine: its time, the work on its streams, its errors.
#include "machine.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <utility>

namespace standin::detail {

namespace {

std::unique_ptr<machine>& the_one() {
    static auto* const one = new std::unique_ptr<machine>;  // never destroyed: static objects may call until the end
    return *one;
}

std::atomic<std::uint64_t> generations{0};

}  // namespace

machine& the_machine() {
    static const bool first = [] {
        ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
        restart({});
        return std::atexit(check_at_exit) == 0;
    }();
    static_cast<void>(first);
    return *the_one();
}

void restart(const options& o) {
    the_one() = std::make_unique<machine>(o);
    if (the_engine() != nullptr) the_engine()->reset();
}

machine::machine(const options& o) : chosen(o), generation(++generations), devices(o.devices) {
    for (int d = 0; has_device(d); ++d) {
        device(d).primary = new_context(d);
        device(d).default_pool = new_handle<cudaMemPool_t>();
        pools.add(device(d).default_pool, std::make_shared<pool>(pool{.device = d}));
    }
    ring.reserve(o.log_capacity);
}

// Driver API, cuCtxGetId: "unique over the life of the program".
std::uint64_t machine::new_context_id() noexcept {
    static std::atomic<std::uint64_t> made{0};
    return ++made;
}

std::shared_ptr<context> machine::new_context(int d) {
    auto c = std::make_shared<context>(context{.device = d, .id = new_context_id()});
    for (std::uint32_t sm = 0; sm < chosen.sms; ++sm) c->sms.insert(sm);
    return c;
}

machine::~machine() {
    while (!blocks.empty()) give_back(blocks.begin()->first);
    for (const auto& [handle, p] : physicals.all()) ::close(p->file);
}

// ---- time and work

ns machine::now() const {
    if (chosen.time == timing::manual) return manual_now;
    return std::chrono::duration_cast<ns>(std::chrono::steady_clock::now() - began);
}

void machine::enqueue(stream& on, operation op) {
    if (on.recording != nullptr) {
        if (op.in == nullptr) op.in = on.in;
        on.recording->origin->recorded.push_back(std::move(op));
        ++on.seen[on.id];
        return;
    }
    op.enqueued = now();
    op.order = ++last_id;
    if (the_engine() != nullptr) op.known = the_engine()->known();
    if (on.queue.empty()) busy.push_back(on.shared_from_this());
    on.queue.push_back(std::move(op));
}

/// Runs the stream's kernel for a while; true once it is over. A failed kernel counts as over: its
/// device is lost.
bool machine::run_kernel(stream& s) {
    try {
        if (!s.runs) s.runs = s.queue.front().starts({s.in->device, s.in->sms, s.id, s.queue.front().known});
        if (!s.runs()) return false;
    } catch (const std::exception& e) {
        find(e.what());
        poison(s.in->device, cudaErrorIllegalAddress);
    }
    s.runs = nullptr;
    return true;
}

/// The time at which the first entry of the stream's queue begins; none while it can't begin.
std::optional<ns> machine::begin_of(stream& s) {
    operation& first = s.queue.front();
    if (s.held) return std::nullopt;
    if (first.begun) return first.begun;
    if (first.awaited != nullptr && !first.awaited->reached) return std::nullopt;
    ns begin = std::max(s.idle_since, first.enqueued);
    if (first.awaited != nullptr) begin = std::max(begin, first.awaited->at);
    for (const auto& other : busy) {
        if (other.get() == &s || other->connection != s.connection || other->in->device != s.in->device) continue;
        const auto before = [&](const operation& op) { return op.order < first.order; };
        if (other->queue.empty() || !before(other->queue.front())) continue;
        if (!other->queue.front().begun) return std::nullopt;
        begin = std::max(begin, *other->queue.front().begun);
        if (other->queue.size() > 1 && before(other->queue[1])) return std::nullopt;
    }
    if (first.until_zero) {
        const auto passed = passes(first);
        if (!passed) return std::nullopt;
        begin = std::max(begin, *passed);
    }
    return begin;
}

/// The time at which the word for which the operation waits became 0; none while it isn't 0. The
/// host writes the word without a call.
std::optional<ns> machine::passes(operation& waits) {
    const std::uintptr_t at = *waits.until_zero;
    if (place_of(reinterpret_cast<const void*>(at)).device < 0 && !is_pinned(at)) {
        find("a stream waits for a word in memory that was freed");
        return looked_;
    }
    if (std::atomic_ref(*reinterpret_cast<std::uint64_t*>(at)).load(std::memory_order_acquire) != 0) {
        waits.seen_closed = looked_;
        return std::nullopt;
    }
    if (waits.seen_closed == ns::min()) return ns::min();  // the word was never seen to be closed
    ns by_stream = ns::min();
    for (auto w = words_written.lower_bound(at); w != words_written.end() && w->first < at + sizeof(std::uint64_t); ++w)
        by_stream = std::max(by_stream, w->second);
    return by_stream >= waits.seen_closed ? by_stream : looked_;
}
bool machine::is_pinned(std::uintptr_t at) const {
    auto after = blocks.upper_bound(at);
    if (after == blocks.begin()) return false;
    const auto& [begin, b] = *--after;
    return b.device < 0 && at + sizeof(std::uint64_t) <= begin + b.size;
}

bool machine::step(stream& s, ns until) {
    if (s.queue.empty() || device(s.in->device).sticky != cudaSuccess) return false;
    auto begin = begin_of(s);
    if (!begin || *begin > until) return false;
    news_ |= !s.queue.front().begun;
    s.queue.front().begun = *begin;
    if (*begin + s.queue.front().length > until) return false;
    if (s.queue.front().starts) {
        if (!run_kernel(s)) return false;
        begin = std::max(*begin, now());
    }

    const operation done = std::move(s.queue.front());
    s.queue.pop_front();
    s.idle_since = *begin + done.length;
    if (done.effect) {
        try {
            done.effect();
        } catch (...) {  // a kernel of a device can't throw: on the host, this stands for its failure
            poison(s.in->device, cudaErrorIllegalAddress);
            return true;
        }
    }
    if (the_engine() != nullptr) {
        if (done.writes.size != 0)
            the_engine()->transferred({.from = done.reads.begin,
                                       .to = done.writes.begin,
                                       .size = done.writes.size,
                                       .device = s.in->device,
                                       .stream = s.id,
                                       .known = done.known});
        the_engine()->passed(s.id, done.awaited.get(), done.reaches.get());
    }
    if (done.reaches != nullptr) {
        done.reaches->reached = true;
        done.reaches->at = s.idle_since;
    }
    return true;
}

void machine::run() {
    const ns until = looked_ = now();
    // Work on one stream may be awaited by another stream.
    for (bool any = true; any;) {
        any = false;
        for (const auto& s : busy)
            while (step(*s, until)) any = true;
        any |= std::exchange(news_, false);
    }
    std::erase_if(busy, [](const auto& s) { return s->queue.empty(); });
}

/// The time at which the next work ends that isn't blocked.
ns machine::next_end() {
    ns next = ns::max();
    if (chosen.time == timing::manual) return next;
    for (const auto& s : busy) {
        if (const auto begin = begin_of(*s)) next = std::min(next, *begin + s->queue.front().length);
    }
    return next;
}

/// Waits until `end`, or until another thread changes something, for a second at most.
void machine::wait_for_change(ns end) {
    std::unique_lock lock(mutex, std::adopt_lock);
    // The host opens such a wait by a plain store, which wakes no thread.
    const bool polls = std::ranges::any_of(
        busy, [](const auto& s) { return !s->queue.empty() && s->queue.front().until_zero.has_value(); });
    const ns longest = now() + (polls ? ns{std::chrono::microseconds(50)} : ns{std::chrono::seconds(1)});
    changed.wait_until(lock, began + std::min(end, longest));
    lock.release();  // the caller holds the mutex
}

// ---- errors and records

void machine::poison(int d, cudaError_t code) {
    for (int each = 0; has_device(each); ++each) {
        if (each != d && chosen.scope == poison_scope::device) continue;
        if (device(each).sticky == cudaSuccess) device(each).sticky = code;
    }
    // Queued work never happens, but streams of healthy devices must not wait for it for ever.
    for (const auto& s : busy) {
        if (device(s->in->device).sticky == cudaSuccess) continue;
        for (const operation& op : s->queue) {
            if (op.reaches == nullptr) continue;
            op.reaches->reached = true;
            op.reaches->at = now();
        }
    }
    changed.notify_all();
}

void machine::find_spinning(int d, const char* who) {
    if (chosen.creation_beside_spinning) return;
    for (const auto& s : busy) {
        if (s->in->device != d || !(s->held || chosen.time == timing::manual)) continue;
        if (std::ranges::any_of(s->queue, &operation::spins))
            return find(std::string(who) + " beside a kernel that waits for others, which it may have to wait for");
    }
}

bool machine::load(int d, const void* kernel, const char* who) {
    if (kernel == nullptr || chosen.eager_loading || device(d).loaded.contains(kernel)) return true;
    find_spinning(d, who);
    const auto idle = [&] {
        return device(d).sticky != cudaSuccess ||
               std::ranges::none_of(busy, [&](const auto& s) { return s->in->device == d; });
    };
    const bool loaded = !chosen.loading_waits || wait(who, idle);
    device(d).loaded.insert(kernel);
    return loaded;
}
bool machine::load(int d, const std::vector<operation>& nodes, const char* who) {
    return std::ranges::all_of(nodes, [&](const operation& node) { return load(d, node.kernel, who); });
}

machine::blow machine::strike(const call_info& info) {
    for (auto f = faults.begin(); f != faults.end(); ++f) {
        if (f->call.empty() ? info.always : f->call != info.name) continue;
        if (f->skip > 0) {
            --f->skip;
            continue;
        }
        const blow struck{static_cast<cudaError_t>(f->code), f->call.empty() && info.returns};
        if (f->sticky) {
            poison(current()->device, struck.code);
            device(current()->device).told = true;
        }
        if (--f->times == 0) faults.erase(f);
        return struck;
    }
    return {};
}

void machine::log(const char* name, const void* stream, int result) {
    ++counts[name];
    const call c{.name = name, .stream = stream, .thread = std::this_thread::get_id(), .result = result};
    if (ring.size() < chosen.log_capacity)
        ring.push_back(c);
    else if (!ring.empty())
        ring[logged % ring.size()] = c;
    ++logged;
}

void machine::find(std::string what) {
    constexpr std::size_t enough = 100;
    if (findings.size() < enough) findings.push_back(std::move(what));
}

// ---- threads and contexts

thread_state& machine::thread() {
    static thread_local thread_state mine;
    if (mine.generation != generation) mine = {.generation = generation};
    return mine;
}

CUcontext machine::context_of_thread() {
    if (is_parents()) return nullptr;  // another thread may have had the lock at the fork
    const std::lock_guard lock(mutex);
    const auto& contexts = thread().contexts;
    if (contexts.empty() && devices.empty()) return nullptr;
    const auto& c = contexts.empty() ? devices.front().primary : contexts.back();
    return reinterpret_cast<CUcontext>(c.get());
}

std::shared_ptr<context> machine::primary(int d) {
    device(d).active = true;
    return device(d).primary;
}

std::shared_ptr<context> machine::current() {
    auto& contexts = thread().contexts;
    if (contexts.empty()) contexts.push_back(primary(0));
    // Runtime API, cudaDeviceReset: a later call to the device initialises it anew.
    if (contexts.back()->destroyed && !contexts.back()->green && !contexts.back()->users)
        contexts.back() = primary(contexts.back()->device);
    return contexts.back();
}

void machine::reset_device(int d) {
    const auto went = [&](std::uintptr_t handle) { reset_away.insert(handle); };
    const auto take = [&](auto& objects, auto belongs) {
        std::vector<std::uintptr_t> gone;
        for (const auto& [handle, object] : objects.all())
            if (belongs(*object)) gone.push_back(handle);
        for (const std::uintptr_t handle : gone) {
            objects.remove(handle);
            went(handle);
        }
    };
    const auto of_context = [d](const auto& o) { return o.in->device == d; };
    for (const auto& s : busy)
        if (s->in->device == d)
            for (operation& op : s->queue)
                if (op.reaches != nullptr) op.reaches->reached = true;
    std::erase_if(busy, [d](const auto& s) { return s->in->device == d; });
    take(streams, of_context);
    take(events, of_context);
    take(executables, [d](const executable& e) {
        return e.nodes.empty() || e.nodes.front().in == nullptr || e.nodes.front().in->device == d;
    });
    take(green_contexts, [d](const context& c) { return c.device == d; });
    std::vector<std::uintptr_t> theirs;
    for (const auto& [at, b] : blocks)
        if (b.device == d) theirs.push_back(at);
    for (const std::uintptr_t at : theirs) give_back(at);
    const auto kept = reinterpret_cast<std::uintptr_t>(device(d).default_pool);
    for (const auto& [handle, p] : pools.all())
        if (p->device == d) trim(*p, 0);
    std::vector<std::uintptr_t> emptied;
    for (const auto& [handle, p] : pools.all())
        if (p->device == d && handle != kept) emptied.push_back(handle);
    for (const std::uintptr_t handle : emptied) {
        pools.remove(handle);
        went(handle);
    }
    device(d).primary->destroyed = true;
    device(d).primary = new_context(d);
    device(d).default_stream = nullptr;
    device(d).active = false;
    device(d).sticky = cudaSuccess;
    device(d).told = false;
    changed.notify_all();
}

}  // namespace standin::detail
