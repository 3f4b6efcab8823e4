// SPDX-License-Identifier: Apache-2.0
// The shared parts of the compute benchmark: the configuration of all figures, kernels whose
// lengths vary by a factor of ten, and clients that always have work. Each client has its own
// thread, without synchronisation between clients, and runs with or without a limiter.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/compute/handles.hpp>

namespace bench::compute {

using namespace std::chrono_literals;
using gpushare::instant;
using gpushare::ns;
using limiter = gpushare::compute_limiter<gpushare::host::stream, gpushare::host::steady_clock>;

/// The configuration of every figure.
inline constexpr gpushare::limiter_options configuration{};
inline constexpr const char* configuration_text =
    "limiter: default options (depth 3), weighted_fair, one per device; kernels log-uniform 100 us to 1 "
    "ms; of a "
    "client's submissions 1 in 10 is a sequence of four kernels in one permit and 1 in 10 a copy of 256 KiB; a thread "
    "per "
    "client and device";

[[nodiscard]] inline instant now() { return gpushare::host::steady_clock::now(); }

inline void sleep_until(instant t) {
    std::this_thread::sleep_until(std::chrono::time_point<std::chrono::steady_clock, ns>{t.time_since_epoch()});
}

/// Occupies an SM for `length`. Under real timing, the kernel computes.
struct kernel {
    ns length{};
    template <class Context>
    void operator()(Context&) const noexcept {
        for (const auto end = now() + length; now() < end;) {
        }
    }
};

/// A single submission.
struct work {
    enum class kind : std::uint8_t { kernel, sequence, copy };
    kind what{};
    ns length{};
};

struct buffers {
    std::vector<std::byte> from = std::vector<std::byte>(256 << 10), to = from;
};

inline void enqueue(gpushare::host::stream& s, const work& w, bool modelled, std::uint32_t blocks, buffers& b) {
    const auto launch = [&](ns length) {
        if (modelled) {
            s.launch({.blocks = blocks, .hold = length}, gpushare::detail::empty_kernel{});
        } else {
            s.launch({.blocks = blocks}, kernel{length});
        }
    };
    if (w.what == work::kind::copy) {
        s.copy(b.to.data(), b.from.data(), b.from.size());
    } else if (w.what == work::kind::sequence) {
        for (int i = 0; i < 4; ++i) launch(w.length / 4);
    } else {
        launch(w.length);
    }
}

/// Draws a client's submissions at random.
struct mixture {
    gpushare::sim::random any;
    ns shortest = 100us, longest = 1ms;
    bool only_kernels = false;

    work next() {
        const double spread = std::log(static_cast<double>(longest.count()) / static_cast<double>(shortest.count()));
        const ns length{std::llround(static_cast<double>(shortest.count()) * std::exp(spread * any.fraction()))};
        const auto which = any.below(10);
        if (only_kernels || which > 1) return {work::kind::kernel, length};
        return {which == 0 ? work::kind::sequence : work::kind::copy, length};
    }
};

/// A client that keeps `ahead` submissions queued until it is destroyed. A null `l` sends work
/// straight to the stream. With `blocks` 0, kernels fill the device.
class backlogged {
public:
    backlogged(limiter* l, gpushare::client_id c, gpushare::host::node& node, gpushare::device_id d,
               gpushare::priority level, std::uint32_t tag, mixture m, std::size_t ahead = 24, std::uint32_t blocks = 0)
        : stream_(node.make_stream(d, level, tag)),
          modelled_(node.options().timing == gpushare::host::timing::modelled),
          blocks_(blocks == 0 ? node.options().sms : blocks),
          mixture_(m) {
        thread_ = std::jthread([this, l, c, ahead](const std::stop_token& stop) {
            l != nullptr ? run(*l, c, ahead, stop) : run(ahead, stop);
        });
    }

    /// How often, after the start, the client found too few submissions queued to count as
    /// backlogged.
    [[nodiscard]] std::uint64_t gaps() const noexcept { return gaps_.load(std::memory_order_relaxed); }
    /// Stops the client; returns its total charge, or nothing without a limiter.
    ns end() {
        thread_.request_stop();
        thread_.join();
        return account_.device_time;
    }

private:
    void run(limiter& l, gpushare::client_id c, std::size_t ahead, const std::stop_token& stop) {
        std::deque<limiter::ticket> out;
        while (!stop.stop_requested()) {
            while (out.size() < ahead) {
                auto t = l.submit(
                    c, stream_, [this, w = mixture_.next()](auto& s) { enqueue(s, w, modelled_, blocks_, buffers_); });
                if (!t) return;
                out.push_back(*std::move(t));
            }
            (void)out.front().wait(gpushare::never, stop);
            while (!out.empty() && out.front().done()) out.pop_front();
            if (out.size() <= configuration.depth) gaps_.fetch_add(1, std::memory_order_relaxed);
        }
        l.close(c, gpushare::never, {}, &account_);  // queued work refers to this object
    }
    void run(std::size_t ahead, const std::stop_token& stop) {
        std::deque<gpushare::host::point> out;
        while (!stop.stop_requested()) {
            while (out.size() < ahead) {
                enqueue(stream_, mixture_.next(), modelled_, blocks_, buffers_);
                out.push_back(stream_.record());
            }
            (void)out.front().wait(now() + 20ms);
            while (!out.empty() && out.front().reached()) out.pop_front();
        }
        (void)stream_.record().wait(gpushare::never);
    }

    gpushare::host::stream stream_;
    bool modelled_;
    std::uint32_t blocks_;
    mixture mixture_;
    buffers buffers_;
    std::atomic<std::uint64_t> gaps_{0};
    gpushare::client_usage account_{};
    std::jthread thread_;
};

/// Everything that has run on the device so far. Throws std::runtime_error if the ledger
/// overflowed, because the ledger must have every block.
[[nodiscard]] inline std::vector<gpushare::host::block_record> blocks_of(gpushare::host::node& node,
                                                                         gpushare::device_id d) {
    auto taken = node.ledger(d).take();
    if (taken.dropped != 0) throw std::runtime_error("the ledger was full");
    return std::move(taken.blocks);
}

/// Removes every fifth block of a tag from the ledger. The result looks as if the limiter had given
/// the tenant less time, had let SMs idle and had charged the tenant all the same. Figures that
/// rely on the ledger must notice.
inline constexpr const char* lacks_a_fifth = "a ledger that lacks every fifth block of the first tenant";
[[nodiscard]] inline std::vector<gpushare::host::block_record> without_a_fifth(
    std::vector<gpushare::host::block_record> blocks, std::uint32_t tag = 0) {
    std::uint32_t n = 0;
    std::erase_if(blocks, [&](const auto& b) { return b.tag == tag && ++n % 5 == 0; });
    return blocks;
}

/// Device time (SM time divided by the number of SMs) within [from, to), for each tag and in total.
struct device_seconds {
    std::vector<double> of;  // by tag
    double all = 0;

    device_seconds(const std::vector<gpushare::host::block_record>& blocks, instant from, instant to, std::size_t tags,
                   std::uint32_t sms)
        : of(tags) {
        for (const auto& [tag, busy] : gpushare::host::sm_time_by_tag(blocks, from, to, sms)) {
            if (tag < tags) of[tag] = std::chrono::duration<double>(busy).count();
            all += std::chrono::duration<double>(busy).count();
        }
    }
};

}  // namespace bench::compute
