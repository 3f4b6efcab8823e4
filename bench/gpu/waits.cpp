// SPDX-License-Identifier: Apache-2.0
// Tests whether a stream that waits for a word blocks other streams, namely those that share a
// hardware queue with it. Also measures the cost of waits that are open. No case hangs, because
// each word is opened after some time.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/green_context.hpp>
#include <gpushare/backend/cuda/pinned.hpp>

#include "experiments.hpp"
#include "queue_sharing.hpp"
#include "rig.hpp"

namespace bench {

namespace {

using namespace std::chrono_literals;
using clock_of_host = std::chrono::steady_clock;

/// Two words for which streams wait; one of the words is always 0. Throws operation_error
/// (not_supported) if streams can't wait.
class awaited_words {
public:
    explicit awaited_words(rig& device) : api_(&device.node.api()), memory_(device.node, device.device) {
        CUdevice native = 0;
        int can = 0;
        cu::check(api_->device_get(&native, device.properties().ordinal), "asking for a device");
        cu::check(api_->device_get_attribute(&can, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, native),
                  "asking whether streams can wait");
        if (!api_->stream_wait_value || can == 0) cu::fail(cudaErrorNotSupported, "waiting in a stream");
        at_ = static_cast<std::uint64_t*>(memory_.allocate(2 * sizeof(std::uint64_t), alignof(std::uint64_t)));
        at_[0] = at_[1] = 0;
    }

    [[nodiscard]] std::uint64_t& closable() const noexcept { return at_[1]; }
    void wait_for_open(cu::stream& s) const { wait(s, at_[0]); }
    void wait_for_closable(cu::stream& s) const { wait(s, at_[1]); }

private:
    void wait(cu::stream& s, const std::uint64_t& word) const {
        cu::check(api_->stream_wait_value(s.native_handle(), reinterpret_cast<CUdeviceptr>(&word), 0,
                                          CU_STREAM_WAIT_VALUE_EQ),
                  "waiting in a stream");
    }
    const cu::driver* api_;
    cu::pinned_memory memory_;
    std::uint64_t* at_ = nullptr;
};

struct grouped_stream {
    std::uint32_t group;
    cu::stream s;
};

/// The figures of a case. The number of streams follows each name.
struct stream_mix {
    const char* blocked;        // for the group of the stream that waits
    const char* other_blocked;  // for the other group, if there is one
    const char* slowdown;
};
constexpr stream_mix alike{"gpu.wait_blocks_of_", nullptr, "gpu.beside_closed_wait_of_"};
constexpr stream_mix by_priority{"gpu.wait_blocks_same_priority_of_", "gpu.wait_blocks_other_priority_of_",
                                 "gpu.beside_closed_wait_of_two_priorities_of_"};
constexpr stream_mix by_partition{"gpu.wait_blocks_same_partition_of_", "gpu.wait_blocks_other_partition_of_",
                                  "gpu.beside_closed_wait_of_two_partitions_of_"};

/// Calls `make` with the group of each stream. The first half of the streams has group 0. If the
/// driver assigns queues in turn, groups that alternated would never share a queue.
template <class F>
std::vector<grouped_stream> make_streams(std::size_t count, bool two_groups, F make) {
    std::vector<grouped_stream> made;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t group = two_groups && i >= count / 2 ? 1 : 0;
        made.push_back({group, make(group)});
    }
    return made;
}

struct pending_end {
    std::size_t of;
    cu::stream::point end;
};

/// Looks until all kernels have ended, no further end is to be expected, or the word was opened.
/// Stores the times of the ends in `seen`.
void look_for_ends(std::vector<pending_end>& pending, std::vector<stream_beside>& seen,
                   const std::optional<closed_word>& closed, clock_of_host::time_point begin) {
    patience looks(sized<clock_of_host::duration>(10ms, 1ms), 200);
    bool news = false;
    while (!pending.empty() && looks.go_on(news, clock_of_host::now())) {
        news = false;
        for (std::size_t i = 0; i < pending.size();) {
            const bool over = pending[i].end.reached();
            // The kernel may have ended because the word was opened.
            if (closed && closed->forced()) return;
            if (!over) {
                ++i;
                continue;
            }
            const std::chrono::duration<double, std::micro> us = clock_of_host::now() - begin;
            seen[pending[i].of].end_us = us.count();
            std::swap(pending[i], pending.back());
            pending.pop_back();
            news = true;
        }
    }
}

void finish(const cu::stream::point& end) {
    if (!end.wait(gpushare::host::steady_clock::now() + sized(5s, 120s)))
        throw std::runtime_error("a stream stands still behind a wait that was opened");
}

/// The streams of a case, and the words for which the streams wait.
class wait_case {
public:
    wait_case(const awaited_words& words, std::vector<grouped_stream> streams)
        : words_(&words), streams_(std::move(streams)) {
        (void)beside(0, false);  // a first run loads everything
    }

    /// Launches a kernel behind a wait on the stream `waiting`, then a kernel on each of the other
    /// streams.
    [[nodiscard]] std::vector<stream_beside> beside(std::size_t waiting, bool closes) {
        std::optional<closed_word> closed;
        if (closes) closed.emplace(words_->closable(), sized(2000ms, 120'000ms));
        words_->wait_for_closable(streams_[waiting].s);
        launch_empty(streams_[waiting].s);
        const auto behind = streams_[waiting].s.record();
        std::vector<stream_beside> seen;
        std::vector<pending_end> pending;
        const auto begin = clock_of_host::now();
        for (std::size_t i = 0; i < streams_.size(); ++i) {
            if (i == waiting) continue;
            launch_empty(streams_[i].s);
            pending.push_back({seen.size(), streams_[i].s.record()});
            seen.push_back({streams_[i].group, {}});
        }
        look_for_ends(pending, seen, closed, begin);
        if (closes && behind.reached() && !closed->forced()) throw std::runtime_error("a closed wait doesn't wait");
        forced_ |= closed && closed->forced();
        closed.reset();
        finish(behind);
        for (const pending_end& p : pending) finish(p.end);
        return seen;
    }
    /// The time per launch, from the first launch to the last end, for many launches over all
    /// streams in turn.
    [[nodiscard]] double us_per_launch(bool waits) {
        const std::size_t launches = sized<std::size_t>(2000, 200);
        const double all = us_of([&] {
            for (std::size_t i = 0; i < launches; ++i) {
                cu::stream& s = streams_[i % streams_.size()].s;
                if (waits) words_->wait_for_open(s);
                launch_empty(s);
            }
            for (grouped_stream& g : streams_) spin_until(g.s.record());
        });
        return all / static_cast<double>(launches);
    }

    [[nodiscard]] std::size_t size() const noexcept { return streams_.size(); }
    /// Returns true if a word was opened because its time was over: a launch beside a closed wait
    /// returned only after that.
    [[nodiscard]] bool forced() const noexcept { return forced_; }

private:
    const awaited_words* words_;
    std::vector<grouped_stream> streams_;
    bool forced_ = false;
};

/// Lets streams of the first half wait, one at a time. Returns false if a launch blocked the host;
/// the caller then starts no further case.
bool report_blocked(report& r, const stream_mix& mix, wait_case streams) {
    const std::size_t repeats = sized<std::size_t>(7, 3), half = streams.size() / 2;
    std::array<std::vector<double>, 2> blocked;
    std::vector<double> slowdown;
    for (std::size_t i = 0; i < repeats && !streams.forced(); ++i) {
        const std::size_t waiting = i * half / repeats;  // in group 0
        const auto open = streams.beside(waiting, false);
        const queue_sharing found = compare(streams.beside(waiting, true), open);
        for (std::size_t group = 0; group < 2; ++group) blocked[group].push_back(found.blocked[group]);
        if (found.slowdown) slowdown.push_back(*found.slowdown);
    }
    const std::string of = std::to_string(streams.size());
    r.figure(mix.blocked + of, blocked[0], "streams");
    if (mix.other_blocked != nullptr) r.figure(mix.other_blocked + of, blocked[1], "streams");
    if (!slowdown.empty()) r.figure(mix.slowdown + of, slowdown, "x");
    if (streams.forced()) std::printf("# a launch came back only when the wait beside it was opened\n");
    return !streams.forced();
}

void report_open(report& r, wait_case streams) {
    const auto each = repeated(sized<std::size_t>(9, 2), [&] {
        const double without = streams.us_per_launch(false);
        return streams.us_per_launch(true) - without;
    });
    r.figure("gpu.wait_open_us_of_" + std::to_string(streams.size()), each, "us");
}

/// Two partitions with half of the SMs each; empty if the device or the driver doesn't support
/// partitions.
std::vector<cu::green_context> try_make_halves(rig& device) {
    try {
        const auto can = cu::query_sm_split(device.node, device.device);
        return cu::make_green_contexts(device.node, device.device, gpushare::equal_sms(can, 2));
    } catch (const gpushare::operation_error& e) {
        if (e.code() != gpushare::errc::not_supported) throw;
        std::printf("# waits without partitions: %s\n", e.what());
        return {};
    }
}

void waits_on(report& r, int connections) {
    r.end_names_with("_on_" + std::to_string(connections) + "_connections");
    rig device;
    const awaited_words words(device);
    auto halves = try_make_halves(device);
    const auto level = [&](std::uint32_t group) { return device.stream(group == 0 ? 0 : 5); };
    const auto in_half = [&](std::uint32_t group) { return halves[group].make_stream(); };
    bool host_runs = true;
    for (const std::size_t n : {8U, 32U, 100U}) {
        report_open(r, {words, make_streams(n, false, level)});
        host_runs = host_runs && report_blocked(r, alike, {words, make_streams(n, false, level)}) &&
                    report_blocked(r, by_priority, {words, make_streams(n, true, level)}) &&
                    (halves.empty() || report_blocked(r, by_partition, {words, make_streams(n, true, in_half)}));
    }
    r.figure("gpu.wait_stops_launches", {host_runs ? 0.0 : 1.0}, "seen");
}

}  // namespace

void waits_on_8_connections(report& r) { waits_on(r, 8); }
void waits_on_32_connections(report& r) { waits_on(r, 32); }

}  // namespace bench
