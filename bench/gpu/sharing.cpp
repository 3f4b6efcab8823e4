// SPDX-License-Identifier: Apache-2.0
// Measures ways to share a device: stream priorities, a limiter, and ranks that wait for each
// other.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gpushare/compute/handles.hpp>
#include <gpushare/error.hpp>

#include "collective_kernels.hpp"
#include "experiments.hpp"
#include "rig.hpp"

namespace bench {

namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::never;

}  // namespace

void stream_priority(report& r) {
    const std::size_t repeats = sized<std::size_t>(41, 2);
    rig device;
    auto low = device.stream(0), same = device.stream(0), high = device.stream(5);
    std::printf("# native priorities: low %d, high %d\n", low.native_priority(), high.native_priority());

    const auto latency = [&](cu::stream& s) {
        return us_of([&] {
            launch_spin(s, {.blocks = device.properties().sms, .threads = 256}, 10us);
            spin_until(s.record());
        });
    };
    // A kernel with 40 waves of blocks of 50 us each, which leaves no room on any SM.
    const std::uint32_t wave = max_resident_spins(low, wide_block);
    const auto beside_a_full_device = [&](cu::stream& s, std::size_t i) {
        launch_spin(low, {.blocks = sized(40U, 2U) * wave, .threads = wide_block}, 50us);
        // Waits until some point within the kernel's first half.
        std::this_thread::sleep_for(std::chrono::microseconds(100 + 37 * (i % 20)));
        const double us = latency(s);
        low.record().wait(never);
        return us;
    };
    r.figure("gpu.short_kernel_alone_us", repeated(repeats, [&] { return latency(high); }), "us");
    std::size_t i = 0;
    r.figure("gpu.short_kernel_same_priority_us", repeated(repeats, [&] { return beside_a_full_device(same, ++i); }),
             "us");
    r.figure("gpu.short_kernel_high_priority_us", repeated(repeats, [&] { return beside_a_full_device(high, ++i); }),
             "us");
}

namespace {

/// A client of the limiter, with the records of all its kernels.
struct client_run {
    client_run(rig& device, limiter& shared, gpushare::share weight, gpushare::ns kernel, std::uint32_t blocks_each,
               std::size_t most_kernels)
        : stream(device.stream()),
          gate(&shared),
          id(shared.add({.weight = weight})),
          length(kernel),
          blocks(blocks_each),
          most(most_kernels),
          records(device, blocks * most) {}

    /// Keeps a backlog until `end`.
    void drive(gpushare::instant end) {
        std::deque<limiter::ticket> open;
        while (launched < most && gpushare::host::steady_clock::now() < end) {
            block_record* const to = records.data() + launched++ * blocks;
            auto ticket = gate->submit(id, stream, [this, to](cu::stream& s) {
                launch_spin(s, {.blocks = blocks, .threads = wide_block}, length, to);
            });
            open.push_back(std::move(*ticket));
            if (open.size() < 8) continue;
            open.front().wait();
            open.pop_front();
        }
        for (const auto& t : open) t.wait();
    }

    cu::stream stream;
    limiter* gate;
    gpushare::client_id id;
    gpushare::ns length;
    std::uint32_t blocks;
    std::size_t most, launched = 0;
    device_array<block_record> records;
};

}  // namespace

void share_accuracy(report& r) {
    constexpr double share_of_first = 0.3;
    const std::chrono::milliseconds duration = sized(8s, 1s);
    rig device;
    limiter shared;
    const std::uint32_t wave = max_resident_spins(device.stream(), wide_block);
    // The kernels differ in length, so that shares by number of launches would be wrong.
    client_run first(device, shared, 30_pct, sized(300us, 3us), wave, 20'000);
    client_run second(device, shared, 70_pct, sized(1000us, 10us), wave, 10'000);
    const auto end = gpushare::host::steady_clock::now() + duration;
    {
        std::jthread other([&] { second.drive(end); });
        first.drive(end);
    }

    // The true shares: how long blocks occupied SMs, by the device's clock.
    struct held {
        std::uint64_t begin, end;
        bool by_first;
    };
    std::vector<held> all;
    std::array<double, 2> used{}, errors{};  // used: us of the whole device
    for (client_run* c : {&first, &second}) {
        double sum = 0;
        for (const auto& b : c->records.read(c->stream, c->launched * c->blocks)) {
            all.push_back({b.begin, b.end, c == &first});
            sum += static_cast<double>(b.end - b.begin);
        }
        sum /= wave * 1e3;
        used[c == &second] = sum;
        const double charged = to_us(shared.usage(c->id).device_time);
        errors[c == &second] = 100 * (charged - sum) / sum;
        std::printf("# weight %s: %zu kernels, charged %.3f ms, held the device for %.3f ms\n",
                    c == &first ? "30%" : "70%", c->launched, charged / 1e3, sum / 1e3);
    }
    // Uses the second to seventh of eight windows: both clients have started before the second
    // window, and neither has ended before the eighth.
    const std::uint64_t earliest = std::ranges::min(all, {}, &held::begin).begin;
    const std::uint64_t window =
        sized<std::uint64_t>(1'000'000'000, (std::ranges::max(all, {}, &held::end).end - earliest) / 8);
    std::vector<double> windows;
    for (std::uint64_t w = 1; w < 7; ++w) {
        const std::uint64_t from = earliest + w * window, to = from + window;
        double of_first = 0, of_both = 0;
        for (const auto& b : all) {
            if (b.end <= from || b.begin >= to) continue;
            const auto inside = static_cast<double>(std::min(b.end, to) - std::max(b.begin, from));
            of_both += inside;
            if (b.by_first) of_first += inside;
        }
        windows.push_back(100 * std::abs(of_first / of_both - share_of_first));
    }
    r.figure("gpu.share_error_pp", windows, "pp");
    r.figure("gpu.metering_error_short_kernels_pct", {errors[0]}, "%");
    r.figure("gpu.metering_error_long_kernels_pct", {errors[1]}, "%");
    const double of_whole = (used[0] + used[1]) / std::chrono::duration<double, std::micro>(duration).count();
    r.figure("gpu.device_busy_pct", {100 * of_whole}, "%");
}

void limiter_latency(report& r) {
    const std::size_t repeats = sized<std::size_t>(201, 3);
    rig device;
    limiter shared;
    const std::uint32_t wave = max_resident_spins(device.stream(), wide_block);
    auto low_stream = device.stream(0), high_stream = device.stream(5);
    const auto low = shared.add({.level = {0}}), high = shared.add({.level = {1}});
    std::vector<double> bounds;
    const auto latency = [&] {
        return us_of([&] {
            const auto ticket = shared.submit(high, high_stream, [&](cu::stream& s) {
                launch_spin(s, {.blocks = device.properties().sms, .threads = 256}, 10us);
            });
            bounds.push_back(to_us(ticket->bound()));  // published before the wait
            ticket->wait();
        });
    };
    const double alone = value_of(statistic::median, repeated(repeats, latency));
    std::vector<double> beside;
    {
        // A backlog of kernels that leave no room on any SM.
        std::jthread other([&](const std::stop_token& stop) {
            std::deque<limiter::ticket> open;
            while (!stop.stop_requested()) {
                auto ticket = shared.submit(low, low_stream, [&](cu::stream& s) {
                    launch_spin(s, {.blocks = wave, .threads = wide_block}, sized(300us, 20us));
                });
                open.push_back(std::move(*ticket));
                if (open.size() < 8) continue;
                open.front().wait();
                open.pop_front();
            }
            for (const auto& t : open) t.wait();
        });
        std::this_thread::sleep_for(20ms);
        bounds.clear();
        beside = repeated(repeats, [&] {
            std::this_thread::sleep_for(1ms);
            return latency();
        });
    }
    bounds.erase(bounds.begin());  // of the warm-up
    double violations = 0;
    for (std::size_t i = 0; i < beside.size(); ++i) violations += beside[i] - alone > bounds[i] ? 1 : 0;
    r.figure("gpu.limiter_latency_alone_us", {alone}, "us");
    r.figure("gpu.limiter_latency_us", beside, "us");
    r.figure("gpu.limiter_latency_most_us", beside, "us", statistic::most);
    r.figure("gpu.limiter_bound_us", bounds, "us");
    r.figure("gpu.limiter_bound_violations", {violations}, "waits");
}

void limiter_width(report& r) {
    const std::size_t kernels = sized<std::size_t>(500, 10);
    rig device;
    const std::uint32_t wave = max_resident_spins(device.stream(), wide_block);
    // Two clients whose kernels each fill half of the device. With a declared width of a half, or a
    // width that the limiter learns from the launches, the kernels run side by side. Declared as
    // wide as the device, the kernels take turns.
    const auto us_of_both = [&](gpushare::sm_width width, std::vector<double>& off) {
        limiter shared;
        struct half {
            half(rig& on, limiter& of, std::uint32_t blocks, std::size_t n)
                : stream(on.stream()), id(of.add({})), records(on, blocks * n) {}
            cu::stream stream;
            gpushare::client_id id;
            device_array<block_record> records;
        };
        half first(device, shared, wave / 2, kernels), second(device, shared, wave / 2, kernels);
        const auto drive = [&](half& h) {
            std::deque<limiter::ticket> open;
            for (std::size_t i = 0; i < kernels; ++i) {
                block_record* const to = h.records.data() + i * (wave / 2);
                open.push_back(*shared.submit(h.id, h.stream,
                                              [&, to](cu::stream& s) {
                                                  launch_spin(s, {.blocks = wave / 2, .threads = wide_block},
                                                              sized(300us, 20us), to);
                                              },
                                              {.width = width}));
                if (open.size() < 8) continue;
                open.front().wait();
                open.pop_front();
            }
            for (const auto& t : open) t.wait();
        };
        const double us = us_of([&] {
            std::jthread other([&] { drive(second); });
            drive(first);
        });
        for (half* h : {&first, &second}) {
            double held = 0;
            for (const auto& b : h->records.read(h->stream)) held += static_cast<double>(b.end - b.begin);
            held /= wave * 1e3;
            off.push_back(100 * (to_us(shared.usage(h->id).device_time) - held) / held);
        }
        return us;
    };
    std::vector<double> off_declared, off_learnt, off_in_turn;
    const double declared = us_of_both(gpushare::sm_width(0.5), off_declared);
    const double learnt = us_of_both({}, off_learnt);
    const double in_turn = us_of_both(gpushare::sm_width(1), off_in_turn);
    r.figure("gpu.width_gain", {in_turn / declared}, "x");
    r.figure("gpu.learnt_width_gain", {in_turn / learnt}, "x");
    r.figure("gpu.metering_error_of_width_pct", off_declared, "%");
    r.figure("gpu.metering_error_of_learnt_width_pct", off_learnt, "%");
    r.figure("gpu.metering_error_in_turn_pct", off_in_turn,
             "%");  // 100: charged for the whole device while filling half of it
}

void gangs(report& r) {
    const std::size_t repeats = sized<std::size_t>(101, 3);
    const std::uint32_t devices = std::min(cu::count_devices(), 8U);
    if (devices < 2) throw gpushare::operation_error(gpushare::errc::not_supported, {}, "gangs on one device");
    std::vector<int> ordinals;
    for (std::uint32_t d = 0; d < devices; ++d) ordinals.push_back(static_cast<int>(d));
    cu::node node{{.devices = ordinals}};
    std::vector<std::unique_ptr<limiter>> limiters;
    std::vector<cu::stream> streams;
    std::vector<gpushare::gang_permit<limiter>::member> members;
    for (std::uint32_t d = 0; d < devices; ++d) {
        limiters.push_back(std::make_unique<limiter>());
        streams.push_back(node.make_stream({d}));
        members.push_back({limiters[d].get(), limiters[d]->add({}), {d}});
    }
    std::vector<cu::stream*> all;
    for (auto& s : streams) all.push_back(&s);
    const auto submit = [&] {
        auto gang = gpushare::gang_permit<limiter>::acquire(members);
        if (!gang) throw std::runtime_error("a gang was refused");
        gang->enqueue(node.gangs(), all, [](std::size_t, cu::stream& s) { launch_empty(s); });
        for (auto& s : streams) spin_until(s.record());
        for (auto& l : limiters) l->poll();
    };
    const auto bare = [&] {
        for (auto& s : streams) launch_empty(s);
        for (auto& s : streams) spin_until(s.record());
    };
    r.figure("gpu.gang_us", repeated(repeats, [&] { return us_of(submit); }), "us");
    r.figure("gpu.launches_of_a_gang_us", repeated(repeats, [&] { return us_of(bare); }), "us");
}

void ranks_on_one_device(report& r) {
    const std::size_t repeats = sized<std::size_t>(11, 1);
    const std::uint32_t rounds = sized(1000U, 10U);
    rig device;
    auto s = device.stream();

    struct room {
        room(rig& on, std::uint32_t ranks)
            : flags(on, ranks * meeting::flag_stride),
              payload(on, 2 * ranks),
              wrong(on, 1),
              late(on, 1),
              records(on, ranks) {}
        [[nodiscard]] meeting of(std::uint32_t ranks, std::uint32_t rounds) {
            return {ranks, rounds, flags.data(), payload.data(), wrong.data(), late.data(), records.data()};
        }
        device_array<std::uint32_t> flags, payload, wrong, late;
        device_array<block_record> records;
    };

    double wrong = 0, late = 0;
    const auto barrier_us = [&](std::uint32_t ranks, auto launch) {
        room here(device, ranks);
        launch(here.of(ranks, rounds));
        wrong += here.wrong.read(s)[0];
        late += here.late.read(s)[0];
        return span_of(here.records.read(s)).us() / rounds;
    };
    for (const std::uint32_t ranks : {2U, 8U, device.properties().sms})
        r.figure("gpu.barrier_of_" + std::to_string(ranks) + "_ranks_us",
                 repeated(repeats,
                          [&] {
                              return barrier_us(ranks, [&](const meeting& m) {
                                  if (launch_meeting(s, m) != gpushare::errc::none)
                                      throw std::runtime_error("ranks were refused");
                              });
                          }),
                 "us");

    // More ranks than can be resident: the launch must be refused instead of waiting forever.
    const std::uint32_t too_many = max_resident_spins(s, 1) * 2;
    room none(device, too_many);
    const auto answer = launch_meeting(s, none.of(too_many, rounds));
    std::printf("# %u ranks: %s\n", too_many, std::string(gpushare::to_string(answer)).c_str());
    expect_none(r, "gpu.too_many_ranks_let_in", answer == gpushare::errc::too_many_blocks ? 0 : 1, "launches");

    // As separate launches, the ranks have no guarantee of running at once, but on an idle device
    // they should. There are few repeats: if the ranks don't run at once, each repeat takes seconds
    // and yields no figure.
    std::vector<cu::stream> streams;
    for (int i = 0; i < 8; ++i) streams.push_back(device.stream());
    const double late_before = late;
    const auto beside = repeated(sized<std::size_t>(3, 1), [&] {
        return barrier_us(8, [&](const meeting& m) {
            for (std::uint32_t rank = 0; rank < 8; ++rank) launch_rank(streams[rank], m, rank);
            for (cu::stream& on : streams) s.wait(on.record());
        });
    });
    if (late == late_before) r.figure("gpu.barrier_of_8_streams_us", beside, "us");
    r.figure("gpu.ranks_of_streams_that_gave_up", {late - late_before}, "ranks");
    expect_none(r, "gpu.ranks_of_a_launch_that_gave_up", late_before, "ranks");
    expect_none(r, "gpu.words_missed_by_ranks", wrong, "words");
}

}  // namespace bench
