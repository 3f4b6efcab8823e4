// SPDX-License-Identifier: Apache-2.0
#include "serving/rig.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/interop/pmr.hpp>
#include <gpushare/memory/quota.hpp>
#include <gpushare/memory/quota_resource.hpp>

namespace bench::serving {

namespace {

using namespace std::chrono_literals;
using gpushare::device_id;
using gpushare::instant;
using gpushare::ns;
using gpushare::share;
using gpushare::host::block_record;
using limiter = gpushare::compute_limiter<gpushare::host::stream, gpushare::host::steady_clock>;

constexpr ns mean_gap = ns{1s} / 100;
constexpr gpushare::priority urgent{1};

instant now() { return gpushare::host::steady_clock::now(); }

void sleep_until(instant t) {
    std::this_thread::sleep_until(std::chrono::time_point<std::chrono::steady_clock, ns>{t.time_since_epoch()});
}

/// Records whole calls from start to end. The ledger has several blocks for a call that yielded.
/// Thread-safe.
class whole_calls {
public:
    void add(const block_record& b) {
        const std::lock_guard lock(mutex_);
        all_.push_back(b);
    }
    [[nodiscard]] std::vector<block_record> take() {
        const std::lock_guard lock(mutex_);
        return std::exchange(all_, {});
    }

private:
    std::mutex mutex_;
    std::vector<block_record> all_;
};

/// An engine's call as a kernel of one block.
struct one_call {
    engine* of;
    whole_calls* noted;
    std::uint32_t tag;
    bool yields = false;
    void operator()(gpushare::host::kernel_context& on) const {
        const instant began = now();
        of->call(yields ? &on : nullptr);
        noted->add({tag, 0, began, now()});
    }
};

void check(gpushare::errc status) {
    if (status != gpushare::errc::none) throw std::runtime_error("an engine's call failed");
}

/// Keeps `ahead` calls of an engine submitted until a stop is requested.
void keep_busy(limiter& l, gpushare::client_id c, gpushare::host::stream& s, one_call call, std::size_t ahead,
               const std::stop_token& stop) {
    std::deque<limiter::ticket> out;
    while (!stop.stop_requested()) {
        while (out.size() < ahead)
            out.push_back(l.submit(c, s, [call](auto& to) { to.launch({}, call); }, {.key = call.tag}).value());
        out.front().wait();
        for (; !out.empty() && out.front().done(); out.pop_front()) check(out.front().status());
    }
    for (const auto& t : out) t.wait();
}

/// Poisson arrivals until `end`. Calls `handle` for each arrival at its time.
template <class F>
void arrivals(instant begin, instant end, F handle) {
    ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
    gpushare::sim::random any(7);
    for (instant due = begin + any.exponential(mean_gap); due < end; due += any.exponential(mean_gap)) {
        sleep_until(due);
        handle(due);
    }
}

void detect(limiter& l, gpushare::client_id c, gpushare::host::stream& s, one_call call, instant begin, instant end,
            std::deque<detection>& all) {
    std::vector<limiter::ticket> last;
    arrivals(begin, end, [&](instant due) {
        auto& d = all.emplace_back(detection{.due = due, .handed_over = now()});
        last.clear();
        last.push_back(l.submit(
                            c, s, [call](auto& to) { to.launch({}, call); }, {.key = call.tag},
                            [&d](const gpushare::completion& how) { d.done = how.finished_at; })
                           .value());
        d.bound = last.back().bound();
    });
    for (const auto& t : last) t.wait();
}

/// `detections` and the ledger's blocks come from one stream, and therefore have the same order.
void note_waits(outcome& o, std::deque<detection>& detections) {
    std::vector<block_record> blocks;
    std::ranges::copy_if(o.calls, std::back_inserter(blocks), [](const auto& b) { return b.tag == detector; });
    std::ranges::sort(blocks, {}, &block_record::start);
    if (blocks.size() != detections.size()) throw std::runtime_error("the ledger lacks calls");
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        auto& d = detections[i];
        d.waited = blocks[i].start - std::max(d.handed_over, i == 0 ? instant{} : blocks[i - 1].end);
        if (d.due >= o.from && d.due < o.to) o.detections.push_back(d);
    }
}

/// The CPU time that threads spend inside engines.
std::atomic<ns::rep> in_engines{0};

ns cpu_time(clockid_t whose) {
    timespec t{};
    ::clock_gettime(whose, &t);
    return std::chrono::seconds(t.tv_sec) + ns{t.tv_nsec};
}

struct one_timed_call {
    engine* of;
    template <class Context>
    void operator()(Context&) const {
        const ns before = cpu_time(CLOCK_THREAD_CPUTIME_ID);
        of->call();
        in_engines.fetch_add((cpu_time(CLOCK_THREAD_CPUTIME_ID) - before).count(), std::memory_order_relaxed);
    }
};

/// CPU time of the whole process per call without the engine's part, and the engine's part.
struct cpu_per_call {
    double around = 0, engine = 0;
};

template <class F>
cpu_per_call measure(F calls) {
    constexpr int n = 700;
    in_engines = 0;
    const ns before = cpu_time(CLOCK_PROCESS_CPUTIME_ID);
    calls(n);
    const ns all = cpu_time(CLOCK_PROCESS_CPUTIME_ID) - before;
    const ns engine{in_engines.load()};
    return {static_cast<double>((all - engine).count()) / n, static_cast<double>(engine.count()) / n};
}

/// The fraction of a call that lies between `from` and `to`.
double part(const block_record& b, instant from, instant to) {
    const auto inside = std::min(b.end, to) - std::max(b.start, from);
    return inside <= ns{} ? 0 : static_cast<double>(inside.count()) / static_cast<double>((b.end - b.start).count());
}

double seconds(ns t) { return std::chrono::duration<double>(t).count(); }

}  // namespace

crew::crew(bool with_language_model) : detector(make_detector()), readers{make_reader(), make_reader()} {
    // A quota is charged for the caches, which lie in the device's memory.
    static gpushare::host::node node{{.memory = gpushare::bytes{64 << 20}, .sms = 1}};
    static gpushare::quota limit{gpushare::bytes{48 << 20}};
    static gpushare::quota_resource memory{limit, node.memory(device_id{0}), "language model"};
    static gpushare::pmr_adaptor for_caches{memory};
    for (auto& w : writers) w = with_language_model ? make_language_model(for_caches) : make_line_reader();
    if (with_language_model)
        std::printf("# caches: %.1f MiB of the quota\n", static_cast<double>(limit.usage().current.count()) / 0x1p20);
    const std::array<engine*, 5> all{detector.get(), readers[0].get(), readers[1].get(), writers[0].get(),
                                     writers[1].get()};
    for (std::size_t i = 0; i < all.size(); ++i) {
        alone[(i + 1) / 2] = all[i]->rehearse();
        std::printf("# a call takes %.3f ms: %s\n", 1e3 * seconds(alone[(i + 1) / 2]), all[i]->said().c_str());
        if (i == 2) std::printf("# its longest part %.3f ms\n", 1e3 * seconds(all[i]->longest_part()));
        if (i > 0 && i % 2 == 0 && all[i]->said() != all[i - 1]->said()) throw std::runtime_error("engines disagree");
    }
    stretch = std::max(readers[0]->longest_part(), readers[1]->longest_part()) * 2;
}

double outcome::rate(who tenant) const {
    double sum = 0;
    for (const auto& b : whole)
        if (b.tag == tenant) sum += part(b, from, to);
    return sum / seconds(to - from);
}

double outcome::busy(who tenant) const {
    double sum = 0;
    for (const auto& b : calls)
        if (b.tag == tenant) sum += part(b, from, to) * seconds(b.end - b.start);
    return sum;
}

gpushare::ns outcome::used(who tenant) const {
    ns sum{};
    for (const auto& b : calls)
        if (b.tag == tenant) sum += b.end - b.start;
    return sum;
}

double outcome::detector_ms(double quantile) const {
    if (detections.empty()) throw std::runtime_error("nothing was detected");
    std::vector<double> took;
    for (const auto& d : detections) took.push_back(1e3 * seconds(d.done - d.due));
    std::ranges::sort(took);
    return took[std::min(took.size() - 1, static_cast<std::size_t>(quantile * static_cast<double>(took.size())))];
}

outcome limited(crew& c, const plan& p) {
    whole_calls noted;
    // Both outlive the limiter, which may still report completions while it is destroyed.
    std::deque<detection> detections;
    gpushare::host::node node{{.memory = gpushare::bytes{1 << 20}, .sms = p.cores}};
    limiter l;
    const auto kept = p.keeps_sm ? gpushare::sm_width::of_sms(1, p.cores) : gpushare::sm_width{};
    const ns stretch = p.yields ? c.stretch : ns{0};
    const std::array clients{l.add({.level = urgent, .keeps = kept, .tag = detector}),
                             l.add({.weight = share::of_permille(300), .yields_within = stretch, .tag = reader}),
                             l.add({.weight = share::of_permille(700), .tag = writer})};
    std::deque<gpushare::host::stream> streams;
    outcome o;
    const instant begin = now();
    const ns before = cpu_time(CLOCK_PROCESS_CPUTIME_ID);
    o.from = begin + p.before;
    o.to = o.from + p.window;
    {
        // The detector's thread never waits for an answer, so a separate thread drives the limiter.
        std::jthread dispatcher([&](const std::stop_token& stop) { l.run(stop); });
        std::deque<std::jthread> threads;
        const auto start = [&](who tenant, engine& e, std::size_t ahead) {
            auto& s = streams.emplace_back(node.make_stream(device_id{0}, {}, tenant));
            threads.emplace_back([&, tenant, ahead](const std::stop_token& stop) {
                keep_busy(l, clients[tenant], s, {&e, &noted, tenant, p.yields}, ahead, stop);
            });
        };
        for (std::size_t i = 0; i < p.readers; ++i) start(reader, *c.readers[i], p.ahead);
        for (std::size_t i = 0; i < p.writers; ++i) start(writer, *c.writers[i], p.decode_loop ? 1 : p.ahead);
        auto& s = streams.emplace_back(node.make_stream(device_id{0}, urgent, detector));
        if (p.detects) detect(l, clients[detector], s, {c.detector.get(), &noted, detector}, begin, o.to, detections);
        sleep_until(o.to);
        o.cores = seconds(cpu_time(CLOCK_PROCESS_CPUTIME_ID) - before) / seconds(o.to - begin);
        for (auto& t : threads) t.request_stop();
        threads.clear();
        for (std::uint32_t i = 0; i < tenants; ++i) {
            gpushare::client_usage account;
            l.close(clients[i], gpushare::never, {}, &account);
            o.charged[i] = account.device_time;
        }
    }
    o.calls = node.ledger(device_id{0}).take().blocks;
    o.whole = noted.take();
    note_waits(o, detections);
    return o;
}

outcome on_plain_threads(crew& c, const plan& p) {
    outcome o;
    const instant begin = now();
    o.from = begin + p.before;
    o.to = o.from + p.window;
    whole_calls noted;
    const auto run = [&](who tenant, engine& e, const std::stop_token& stop) {
        while (!stop.stop_requested()) {
            const instant start = now();
            e.call();
            noted.add({tenant, 0, start, now()});
        }
    };
    std::deque<std::jthread> threads;
    for (std::size_t i = 0; i < p.readers; ++i)
        threads.emplace_back([&, i](const std::stop_token& stop) { run(reader, *c.readers[i], stop); });
    for (std::size_t i = 0; i < p.writers; ++i)
        threads.emplace_back([&, i](const std::stop_token& stop) { run(writer, *c.writers[i], stop); });
    threads.emplace_back([&] {
        arrivals(begin, o.to, [&](instant due) {
            detection d{.due = due, .handed_over = now()};
            c.detector->call();
            d.done = now();
            if (due >= o.from) o.detections.push_back(d);
        });
    });
    sleep_until(o.from);
    const ns before = cpu_time(CLOCK_PROCESS_CPUTIME_ID);
    sleep_until(o.to);
    o.cores = seconds(cpu_time(CLOCK_PROCESS_CPUTIME_ID) - before) / seconds(o.to - o.from);
    for (auto& t : threads) t.request_stop();
    threads.clear();
    o.whole = noted.take();
    return o;
}

double submit_cost_percent(crew& c, std::size_t ahead) {
    gpushare::host::node node{{.memory = gpushare::bytes{1 << 20}, .sms = 1}};
    auto s = node.make_stream(device_id{0});
    const one_timed_call k{c.detector.get()};
    const auto direct = [&](int n) {
        std::deque<gpushare::host::point> out;
        for (int i = 0; i < n; ++i) {
            s.launch({}, k);
            out.push_back(s.record());
            if (out.size() < ahead) continue;
            (void)out.front().wait(gpushare::never);
            out.pop_front();
        }
        (void)s.record().wait(gpushare::never);
    };
    limiter l;
    const auto client = l.add({});
    const auto submitted = [&](int n) {
        std::deque<limiter::ticket> out;
        for (int i = 0; i < n; ++i) {
            out.push_back(l.submit(client, s, [&k](auto& to) { to.launch({}, k); }, {.key = detector}).value());
            if (out.size() < ahead) continue;
            out.front().wait();
            out.pop_front();
        }
        for (const auto& t : out) t.wait();
    };
    (void)measure(submitted);
    const auto without = measure(direct), with = measure(submitted);
    l.close(client);
    return 100 * (with.around - without.around) / without.engine;
}

}  // namespace bench::serving
