// SPDX-License-Identifier: Apache-2.0
// An urgent model beside one that always has work, on a device in virtual time: what data/h100/colocation.csv measured on an H100.
//
//   const auto r = engines::colocate({.urgent = &bert, .background = &resnet, .how = engines::strategy::held}, 1);
//
// Each model has a host thread of its own. The background's keeps three iterations in flight and launches at the recorded
// pace; the urgent one serves requests that arrive at random, one graph each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <string_view>
#include <vector>

#include <gpushare/compute/launch_gate.hpp>
#include <gpushare/units.hpp>

#include "engines/device.hpp"
#include "engines/recording.hpp"

namespace engines {

/// The mechanism that orders the two.
enum class strategy : std::uint8_t {
    plain,   ///< nothing: a thread and a stream each
    native,  ///< the urgent stream has the highest priority
    held,    ///< a launch gate holds the background's launching thread
    gated,   ///< a launch gate opens and closes waits in the background's stream
};
[[nodiscard]] constexpr std::string_view to_string(strategy s) noexcept {
    constexpr std::string_view names[] = {"plain", "native", "held", "gated"};
    return names[static_cast<std::size_t>(s)];
}

/// Times of a host and its driver, from data/h100: README.md and the recorded launches.
struct host_costs {
    ns launch_latency{4500};  ///< from a launch to its arrival at the device
    ns graph_start{10'000};   ///< the same of a graph
    ns gap{1000};             ///< between two kernels of a stream
    ns gap_in_graph{100};     ///< between two kernels of a graph
    ns seen{5000};            ///< until a waiting host thread has seen an end
    ns woken{3000};           ///< until a held thread launches again
    ns wait_in_stream{1500};  ///< what an open wait costs its stream: an assumption, to be measured
};

struct setting {
    const std::vector<iteration>* urgent = nullptr;      ///< none: the background is alone
    const std::vector<iteration>* background = nullptr;  ///< none: the urgent model is alone
    double host_pace = 1;  ///< of the recorded time between two launches, without a profiler
    strategy how = strategy::plain;
    double requests_per_s = 428;  ///< a quarter of what the urgent model does alone
    ns length{2'000'000'000};
    gpushare::launch_gate_options gate{};
    device_constants device{};
    host_costs host{};
};

struct outcome {
    std::vector<double> from_arrival_us, call_us;  ///< of each request, sorted
    double iterations_per_s = 0;                   ///< of the background
    double longest_hold_us = 0;
};

/// `p` between 0 and 1.
[[nodiscard]] inline double percentile(const std::vector<double>& sorted, double p) noexcept {
    return sorted.empty()
               ? 0
               : sorted[std::min(sorted.size() - 1, static_cast<std::size_t>(p * static_cast<double>(sorted.size())))];
}

class colocation {
public:
    colocation(const setting& s, std::uint64_t seed)
        : set_(s),
          gpu_(h100, s.device, seed),
          gate_(s.gate),
          batch_(gate_.add({.level = 0})),
          urgent_(gate_.add({.level = 1})),
          stream_(gpu_.make_stream({0, 0, s.host.gap})),
          urgent_stream_(gpu_.make_stream({1, s.how == strategy::native ? 5 : 0, s.host.gap_in_graph})) {}
    colocation(const colocation&) = delete;
    colocation& operator=(const colocation&) = delete;

    [[nodiscard]] outcome run() {
        if (set_.background != nullptr) gpu_.at(gpu_.now(), [this] { go_on(); });
        if (set_.urgent != nullptr) gpu_.at(instant{} + first_request, [this] { arrive(); });
        gpu_.run_until(instant{} + set_.length);
        std::ranges::sort(result_.from_arrival_us);
        std::ranges::sort(result_.call_us);
        result_.iterations_per_s = static_cast<double>(over_) / (static_cast<double>(set_.length.count()) * 1e-9);
        return std::move(result_);
    }

private:
    static constexpr int at_once = 3;  // iterations in flight
    static constexpr ns first_request{1'000'000};
    static constexpr ns between_waits{150'000};  // predicted work between two waits in the stream

    // ---- the background's thread: one launch, then the host's time until the next one

    void go_on() {
        const iteration& all = (*set_.background)[begun_ % set_.background->size()];
        if (next_ == 0 && begun_ - over_ >= at_once) {
            waits_for_iteration_ = true;
            return;
        }
        const kernel& k = all[next_];
        if (set_.how == strategy::held && !may_go(k)) return;
        if (set_.how == strategy::gated) put_waits(k);
        launch(k, next_ + 1 == all.size());
        if (++next_ == all.size()) {
            next_ = 0;
            ++begun_;
        }
        const kernel& following = (*set_.background)[begun_ % set_.background->size()][next_];
        const ns pace{static_cast<std::int64_t>(static_cast<double>(following.host.count()) * set_.host_pace)};
        gpu_.at(gpu_.now() + pace, [this] { go_on(); });
    }

    bool may_go(const kernel& k) {
        const instant now = gpu_.now();
        if (!held_) since_ = now;
        const auto a = gate_.ask(batch_, k.alone, now, since_);
        if (a.goes && held_) result_.longest_hold_us = std::max(result_.longest_hold_us, in_us(now - since_));
        held_ = !a.goes;
        if (held_) gpu_.at(std::min(a.again, since_ + set_.gate.longest_hold), [this] { ask_again(); });
        return a.goes;
    }
    void ask_again() {
        if (!held_ || asks_) return;
        asks_ = true;  // once, however many wake the thread
        gpu_.at(gpu_.now() + set_.host.woken, [this] {
            asks_ = false;
            if (held_) go_on();
        });
    }

    void put_waits(const kernel& k) {
        since_wait_ += k.alone;
        if (since_wait_ < between_waits) return;
        since_wait_ = k.alone;
        gpu_.wait_in_stream(stream_, closed_, gpu_.now() + set_.host.launch_latency);
        gpu_.launch(stream_, wait_cost(), gpu_.now() + set_.host.launch_latency);
    }
    // An open wait takes the stream's time, and nothing of an SM to speak of.
    [[nodiscard]] const kernel& wait_cost() {
        cost_ = {.blocks = 1, .block = {32, 0, 0, 0}, .alone = set_.host.wait_in_stream};
        return cost_;
    }

    void launch(const kernel& k, bool last) {
        gate_.launched(batch_, k.alone, gpu_.now());
        gpu_.launch(stream_, k, gpu_.now() + set_.host.launch_latency, [this, last, &k] {
            gate_.finished(batch_, k.alone, k.alone, gpu_.now());
            if (held_) ask_again();
            if (last) gpu_.at(gpu_.now() + set_.host.seen, [this] { iteration_over(); });
        });
    }
    void iteration_over() {
        ++over_;
        if (!waits_for_iteration_) return;
        waits_for_iteration_ = false;
        go_on();
    }

    // ---- the urgent thread: one request after the other

    void arrive() {
        gate_.arrived(urgent_, gpu_.now());
        closed_ = true;
        waiting_.push_back(gpu_.now());
        if (!serves_) serve();
        const ns mean{static_cast<std::int64_t>(1e9 / set_.requests_per_s)};
        gpu_.at(gpu_.now() + gpu_.random().exponential(mean), [this] { arrive(); });
    }

    void serve() {
        serves_ = true;
        const instant arrival = waiting_.front(), begin = gpu_.now();
        waiting_.pop_front();
        const iteration& graph = (*set_.urgent)[0];
        for (std::size_t i = 0; i + 1 < graph.size(); ++i)
            gpu_.launch(urgent_stream_, graph[i], begin + set_.host.graph_start);
        gpu_.launch(urgent_stream_, graph.back(), begin + set_.host.graph_start, [this, arrival, begin] {
            gpu_.at(gpu_.now() + set_.host.seen, [this, arrival, begin] { answered(arrival, begin); });
        });
    }

    void answered(instant arrival, instant begin) {
        const instant now = gpu_.now();
        result_.from_arrival_us.push_back(in_us(now - arrival));
        result_.call_us.push_back(in_us(now - begin));
        gate_.left(urgent_, now);
        if (!waiting_.empty()) return serve();
        serves_ = false;
        const instant opens = now + set_.gate.linger;
        gpu_.at(opens, [this] {
            if (serves_) return;
            closed_ = false;
            gpu_.opened(stream_);
            if (held_) ask_again();
        });
    }

    [[nodiscard]] static double in_us(ns t) noexcept { return static_cast<double>(t.count()) * 1e-3; }

    setting set_;
    device gpu_;
    gpushare::launch_gate gate_;
    gpushare::launch_gate::client batch_, urgent_;
    std::uint32_t stream_, urgent_stream_;
    outcome result_;
    // the background
    std::size_t begun_ = 0, over_ = 0, next_ = 0;
    bool waits_for_iteration_ = false, held_ = false, asks_ = false;
    instant since_{};
    ns since_wait_{0};
    kernel cost_{};
    // the urgent model
    std::deque<instant> waiting_;
    bool serves_ = false, closed_ = false;
};

[[nodiscard]] inline outcome colocate(const setting& s, std::uint64_t seed) { return colocation(s, seed).run(); }

}  // namespace engines
