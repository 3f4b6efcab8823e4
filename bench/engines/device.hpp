// SPDX-License-Identifier: Apache-2.0
// Simulates a GPU in virtual time, block by block, in the detail that co-location needs. The model
// has SMs with threads, registers, shared memory and slots; kernels in streams; native stream
// priorities, which order only blocks that haven't started; and waits in a stream for a word that
// the host writes. The model doesn't execute kernels.
//
//   engines::device gpu{engines::h100, {}, seed};
//   const auto s = gpu.make_stream({.client = 0, .priority = 0});
//   gpu.launch(s, kernel, gpu.now() + 4500ns, [&] { ... });   // called when the kernel is over
//   gpu.run_until(instant{} + 2s);
//
// The rules and their sources:
//
// Blocks of one priority start in the order in which their kernels became ready. A later kernel
// never passes a kernel whose blocks wait (Amert et al., "GPU scheduling on the NVIDIA TX2", RTSS
// 2017; Gilman et al., "Demystifying the placement policies of the NVIDIA GPU thread block
// scheduler", 2021).
//
// A kernel spreads its blocks breadth first, over the GPCs in turn. Blocks of a cluster start
// together, in one GPC (CUDA C++ Programming Guide, "Thread Block Clusters").
//
// A block takes the time that its kernel took alone, divided by the kernel's number of waves.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/units.hpp>

namespace engines {

using gpushare::instant;
using gpushare::ns;

/// The resources of an SM, or the part that a block needs.
struct sm_room {
    std::uint32_t threads, registers, shared_bytes, slots;

    /// The number of blocks that fit if each block needs `block`.
    [[nodiscard]] constexpr std::uint32_t fits(const sm_room& block) const noexcept {
        const auto times = [](std::uint32_t has, std::uint32_t takes) { return takes == 0 ? ~0U : has / takes; };
        return std::min({times(threads, block.threads), times(registers, block.registers),
                         times(shared_bytes, block.shared_bytes), times(slots, block.slots)});
    }
    [[nodiscard]] constexpr bool holds(const sm_room& block) const noexcept {
        return threads >= block.threads && registers >= block.registers && shared_bytes >= block.shared_bytes &&
               slots >= block.slots;
    }
    constexpr void take(const sm_room& block, std::uint32_t n) noexcept {
        threads -= n * block.threads;
        registers -= n * block.registers;
        shared_bytes -= n * block.shared_bytes;
        slots -= n * block.slots;
    }
    constexpr void give(const sm_room& block, std::uint32_t n) noexcept {
        threads += n * block.threads;
        registers += n * block.registers;
        shared_bytes += n * block.shared_bytes;
        slots += n * block.slots;
    }
};

/// The dimensions of a device.
struct device_shape {
    std::uint32_t sms;
    sm_room sm;
    std::uint32_t reserved_shared_bytes;   ///< added to each block by the system
    std::array<std::uint32_t, 8> gpc_sms;  ///< SMs of each GPC; the sum is `sms`
};

/// Compute capability 9.0, from the CUDA C++ Programming Guide, "Technical Specifications per
/// Compute Capability". 132 of the 144 SMs in eight GPCs work. Devices differ in which GPCs have 18
/// SMs.
inline constexpr device_shape h100{132, {2048, 65536, 233472, 32}, 1024, {18, 16, 16, 16, 18, 16, 16, 16}};

/// A kernel, as recorded when its model ran alone.
struct kernel {
    std::uint32_t blocks = 1;   ///< 0 for a fill or a copy, which takes time in its stream but no SM
    sm_room block{};            ///< the needs of each block
    ns alone{};                 ///< duration on an idle device
    ns host{};                  ///< host time before the launch
    std::uint32_t cluster = 1;  ///< number of blocks that start together, in one GPC
    bool uses_memory = false;   ///< bound by memory bandwidth: slows neighbours down
    /// Equal for launches of the same function with the same grid and block size.
    std::uint64_t kind = 0;
};

/// The needs of a block with `threads` threads. Warps are whole, and registers come in units of 256
/// per warp.
[[nodiscard]] constexpr sm_room block_of(std::uint32_t threads, std::uint32_t registers, std::uint32_t shared_bytes,
                                         const device_shape& on) noexcept {
    const std::uint32_t warps = std::max((threads + 31) / 32, 1U);
    return {warps * 32, warps * ((registers * 32 + 255) / 256 * 256), shared_bytes + on.reserved_shared_bytes, 1};
}

/// The fitted constants. bench/README.md says on which rows they were fitted.
struct device_constants {
    /// How much a small kernel slows down, per share of the slots with memory-bound neighbours.
    double beside_memory = 1.2;
    double jitter = 0.05;  ///< standard deviation of a block's duration, relative
    /// A kernel of matrices that fills the device exactly once has an incomplete last wave of
    /// tiles, so its blocks end earlier by up to this fraction. Blocks of memory-bound kernels
    /// share the bandwidth and end together.
    double tail = 0.20;
};

class device {
public:
    using task = std::function<void()>;
    struct stream_options {
        std::uint32_t client = 0;
        int priority = 0;  ///< the greatest number goes first
        ns gap{1000};      ///< from the end of a kernel to the start of the next one
    };

    device(const device_shape& shape, const device_constants& c, std::uint64_t seed)
        : shape_(shape), constants_(c), random_(seed), sms_(shape.sms, shape.sm) {
        for (std::uint32_t g = 0, i = 0; g < shape.gpc_sms.size(); ++g) {
            first_.push_back(i);
            for (std::uint32_t n = 0; n < shape.gpc_sms[g]; ++n, ++i) gpc_of_.push_back(g);
        }
        first_.push_back(shape.sms);
        for (std::uint32_t n = 0; order_.size() < shape.sms; ++n)
            for (std::uint32_t g = 0; g < shape.gpc_sms.size(); ++g)
                if (n < shape.gpc_sms[g]) order_.push_back(first_[g] + n);
    }

    [[nodiscard]] instant now() const noexcept { return now_; }
    [[nodiscard]] gpushare::sim::random& random() noexcept { return random_; }
    /// SM time of the client's blocks, in SMs x ns, weighted by the slots that the blocks filled.
    [[nodiscard]] double sm_time(std::uint32_t client) const noexcept { return neighbours_[client].sm_time; }

    /// For each finished kernel of the client, the time from the start of the first block to the
    /// end of the last block, multiplied by the kernel's width.
    [[nodiscard]] ns kernel_time(std::uint32_t client) const noexcept { return neighbours_[client].kernel_time; }

    [[nodiscard]] std::uint32_t make_stream(const stream_options& o) {
        streams_.push_back({o, {}, false, {}});
        if (neighbours_.size() <= o.client) neighbours_.resize(o.client + 1);
        return static_cast<std::uint32_t>(streams_.size() - 1);
    }
    /// `k` must live until the kernel ends. The device sees the launch at `arrival`. `done` may be
    /// empty.
    void launch(std::uint32_t stream, const kernel& k, instant arrival, task done = {}) {
        enqueue(stream, {&k, nullptr, arrival, std::move(done)});
    }
    /// Later work in the stream waits while `*closed`. The caller must call opened() after clearing
    /// the word.
    void wait_in_stream(std::uint32_t stream, const bool& closed, instant arrival) {
        enqueue(stream, {nullptr, &closed, arrival, {}});
    }
    void opened(std::uint32_t stream) { go_on(stream); }
    void at(instant t, task f) {
        std::uint32_t i = 0;
        if (free_tasks_.empty()) {
            i = static_cast<std::uint32_t>(tasks_.size());
            tasks_.emplace_back();
        } else {
            i = free_tasks_.back();
            free_tasks_.pop_back();
        }
        tasks_[i] = std::move(f);
        events_.push(std::max(t, now_), {event::calls, i, 0, 0});
    }
    void run_until(instant t) {
        while (!events_.empty() && events_.first_time() <= t) step();
        now_ = t;
    }

private:
    struct item {
        const kernel* work;
        const bool* closed;  // set for a wait only
        instant arrival;
        task done;
    };
    struct stream_state {
        stream_options options;
        std::deque<item> items;
        bool busy;  // a kernel of the stream is about to start, or runs
        instant last_end;
    };
    struct running {
        const kernel* work = nullptr;
        std::uint32_t stream = 0, unplaced = 0, left = 0, per_sm = 1;
        ns block{};
        instant begun{};
        bool fills_once = false, small = false;
        task done{};
    };
    struct event {
        enum kind : std::uint8_t { calls, begins, ends } what;
        std::uint32_t index;  // of a task, a stream or a running kernel
        std::uint32_t sm, blocks;
    };
    struct client_state {
        // Share of the device's slots that the client's memory-bound blocks fill now.
        double memory_slots = 0;
        double sm_time = 0;
        ns kernel_time{0};
    };

    void step() {
        now_ = events_.first_time();
        const event e = events_.pop();
        if (e.what == event::begins) {
            begin(e.index);
        } else if (e.what == event::ends) {
            end(e);
        } else {
            task f = std::move(tasks_[e.index]);
            free_tasks_.push_back(e.index);
            f();
        }
    }

    void enqueue(std::uint32_t stream, item i) {
        streams_[stream].items.push_back(std::move(i));
        go_on(stream);
    }

    // Starts the stream's first kernel once the device has seen the launch and the previous kernel
    // has ended.
    void go_on(std::uint32_t index) {
        stream_state& s = streams_[index];
        while (!s.busy && !s.items.empty()) {
            const item& first = s.items.front();
            if (first.closed != nullptr) {
                if (*first.closed) return;
                s.items.pop_front();
                continue;
            }
            s.busy = true;
            events_.push(std::max({now_, first.arrival, s.last_end + s.options.gap}), {event::begins, index, 0, 0});
        }
    }

    void begin(std::uint32_t stream) {
        stream_state& s = streams_[stream];
        const std::uint32_t index = new_running();
        running& r = running_[index];
        const kernel& k = *s.items.front().work;
        r.work = &k;
        r.stream = stream;
        r.unplaced = r.left = k.blocks;
        r.per_sm = std::max(shape_.sm.fits(k.block), 1U);
        const std::uint32_t at_once = shape_.sms * r.per_sm;
        r.block = k.alone / std::max((k.blocks + at_once - 1) / at_once, 1U);
        r.fills_once = !k.uses_memory && k.blocks == at_once;
        r.small = s.options.priority > 0 || k.blocks < shape_.sms;
        r.done = std::move(s.items.front().done);
        s.items.pop_front();
        if (k.blocks == 0) {
            r.begun = now_;
            events_.push(now_ + k.alone, {event::ends, index, 0, 0});
            return;
        }
        const auto behind = std::ranges::find_if(ready_, [&](std::uint32_t other) {
            return streams_[running_[other].stream].options.priority < s.options.priority;
        });
        ready_.insert(behind, index);
        dispatch();
    }

    [[nodiscard]] std::uint32_t new_running() {
        if (free_running_.empty()) {
            running_.emplace_back();
            return static_cast<std::uint32_t>(running_.size() - 1);
        }
        const std::uint32_t index = free_running_.back();
        free_running_.pop_back();
        return index;
    }

    // Starts the blocks of ready kernels in order, until a kernel's blocks don't all fit.
    void dispatch() {
        while (!ready_.empty()) {
            running& r = running_[ready_.front()];
            spread(r);
            for (std::uint32_t i = 0; i < shape_.sms; ++i)
                if (placed_[i] != 0) start(ready_.front(), i, placed_[i]);
            if (r.unplaced != 0) return;
            ready_.erase(ready_.begin());
        }
    }

    // Spreads breadth first. The starting SM moves on by one with each kernel.
    void spread(const running& r) {
        placed_.assign(shape_.sms, 0);
        if (r.work->cluster > 1) return spread_clusters(r);
        std::uint32_t left = r.unplaced;
        for (bool any = true; left != 0 && any;) {
            any = false;
            for (std::uint32_t n = 0; n < shape_.sms && left != 0; ++n) {
                const std::uint32_t i = order_[(next_sm_ + n) % shape_.sms];
                if (!sms_[i].holds(r.work->block)) continue;
                sms_[i].take(r.work->block, 1);
                ++placed_[i];
                --left;
                any = true;
            }
        }
        next_sm_ = (next_sm_ + 1) % shape_.sms;
    }
    void spread_clusters(const running& r) {
        const auto gpcs = static_cast<std::uint32_t>(shape_.gpc_sms.size());
        std::uint32_t left = r.unplaced;
        for (bool any = true; left != 0 && any;) {
            any = false;
            for (std::uint32_t n = 0; n < gpcs && left != 0; ++n)
                if (place_cluster(r, (next_gpc_ + n) % gpcs, left)) any = true;
        }
        next_gpc_ = (next_gpc_ + 1) % gpcs;
    }

    // Places a cluster in the GPC if the GPC has room. Returns true on success.
    bool place_cluster(const running& r, std::uint32_t gpc, std::uint32_t& left) {
        const std::uint32_t size = std::min(r.work->cluster, left);
        std::uint32_t room = 0;
        for (std::uint32_t i = first_[gpc]; i < first_[gpc + 1] && room < size; ++i)
            room += sms_[i].fits(r.work->block);
        if (room < size) return false;
        for (std::uint32_t need = size; need != 0;)
            for (std::uint32_t i = first_[gpc]; i < first_[gpc + 1] && need != 0; ++i) {
                if (!sms_[i].holds(r.work->block)) continue;
                sms_[i].take(r.work->block, 1);
                ++placed_[i];
                --need;
            }
        left -= size;
        return true;
    }

    // The first ready kernel gets the room that has become free on an SM. Later kernels get their
    // turn only when all blocks of the first kernel have started.
    void refill(std::uint32_t sm) {
        if (ready_.empty()) return;
        running& r = running_[ready_.front()];
        if (!sms_[sm].holds(r.work->block)) return;
        if (r.work->cluster > 1) {
            refill_gpc(r, gpc_of_[sm]);
        } else {
            const std::uint32_t n = std::min(sms_[sm].fits(r.work->block), r.unplaced);
            sms_[sm].take(r.work->block, n);
            start(ready_.front(), sm, n);
        }
        if (r.unplaced != 0) return;
        ready_.erase(ready_.begin());
        dispatch();
    }

    void refill_gpc(const running& r, std::uint32_t gpc) {
        placed_.assign(shape_.sms, 0);
        std::uint32_t left = r.unplaced;
        while (left != 0 && place_cluster(r, gpc, left)) {
        }
        for (std::uint32_t i = first_[gpc]; i < first_[gpc + 1]; ++i)
            if (placed_[i] != 0) start(ready_.front(), i, placed_[i]);
    }

    void start(std::uint32_t index, std::uint32_t sm, std::uint32_t blocks) {
        running& r = running_[index];
        if (r.unplaced == r.work->blocks) r.begun = now_;
        const ns takes{std::llround(static_cast<double>(r.block.count()) * scatter(r) * slowed(r))};
        fill(r, blocks, 1);
        neighbours_[streams_[r.stream].options.client].sm_time +=
            static_cast<double>(takes.count()) * blocks / r.per_sm;
        r.unplaced -= blocks;
        events_.push(now_ + takes, {event::ends, index, sm, blocks});
    }

    [[nodiscard]] double scatter(const running& r) noexcept {
        if (r.fills_once) return 1 - constants_.tail * random_.fraction();
        // The standard deviation of a uniform number between -1 and 1 is 1 over this factor.
        constexpr double to_deviation = 1.7320508;
        return 1 + constants_.jitter * to_deviation * (2 * random_.fraction() - 1);
    }

    [[nodiscard]] double slowed(const running& r) const noexcept {
        if (!r.small) return 1;
        double memory = 0;
        for (std::uint32_t c = 0; c < neighbours_.size(); ++c)
            if (c != streams_[r.stream].options.client) memory += neighbours_[c].memory_slots;
        return 1 + constants_.beside_memory * memory;
    }

    void fill(const running& r, std::uint32_t blocks, int sign) noexcept {
        const double share = sign * static_cast<double>(blocks) / (static_cast<double>(shape_.sms) * r.per_sm);
        if (r.work->uses_memory) neighbours_[streams_[r.stream].options.client].memory_slots += share;
    }

    void end(const event& e) {
        running& r = running_[e.index];
        sms_[e.sm].give(r.work->block, e.blocks);
        fill(r, e.blocks, -1);
        r.left -= e.blocks;
        if (r.left == 0) {
            stream_state& s = streams_[r.stream];
            s.busy = false;
            s.last_end = now_;
            neighbours_[s.options.client].kernel_time +=
                (now_ - r.begun) * std::min(r.work->blocks, shape_.sms) / shape_.sms;
            const task done = std::move(r.done);
            const std::uint32_t stream = r.stream;
            free_running_.push_back(e.index);
            go_on(stream);
            if (done) done();
        }
        if (e.blocks != 0) refill(e.sm);
    }

    device_shape shape_;
    device_constants constants_;
    gpushare::sim::random random_;
    instant now_{};
    gpushare::sim::event_queue<event> events_;
    std::vector<sm_room> sms_;
    std::vector<std::uint32_t> placed_;
    std::uint32_t next_sm_ = 0, next_gpc_ = 0;
    std::vector<std::uint32_t> first_, gpc_of_,
        // First SM of each GPC plus an end; GPC of each SM; all SMs, one of each GPC in turn.
        order_;
    std::vector<stream_state> streams_;
    std::vector<running> running_;
    // `ready_` is sorted: the first kernel goes first.
    std::vector<std::uint32_t> free_running_, ready_;
    std::vector<client_state> neighbours_;
    std::vector<task> tasks_;
    std::vector<std::uint32_t> free_tasks_;
};

}  // namespace engines
