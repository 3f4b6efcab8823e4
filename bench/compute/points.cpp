// SPDX-License-Identifier: Apache-2.0
// Measures metering on a device that doesn't reveal the use of its SMs. The limiter only sees the
// points before and after work, as on a GPU. The host device's ledger has the true use, but the
// limiter can't see the ledger.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <deque>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "compute/measurements.hpp"
#include "compute/rig.hpp"
#include "silent_node.hpp"

namespace bench::compute {

namespace {

using gpushare::device_id;
using gpushare::host::timing;

using silent_limiter = gpushare::compute_limiter<silent_stream, gpushare::host::steady_clock>;
constexpr std::uint32_t sms = 2;

/// The tenants' submissions: only kernels that fill the device, or also copies of one block. With
/// `told_copies`, the limiter learns that the copies are narrow.
enum class with : std::uint8_t { kernels_alone, copies, told_copies };

/// Keeps 24 submissions queued.
void keep_busy(silent_limiter& l, gpushare::client_id c, silent_stream& s, mixture m, bool tell,
               const std::stop_token& stop) {
    buffers b;
    std::deque<silent_limiter::ticket> out;
    while (!stop.stop_requested()) {
        while (out.size() < 24) {
            const work w = m.next();
            gpushare::submit_options o;
            if (tell && w.what == work::kind::copy) o.width = gpushare::sm_width::of_sms(1, sms);
            auto t = l.submit(
                c, s, [&b, w](silent_stream& to) { enqueue(to.inner(), w, true, sms, b); }, o);
            if (!t) return;
            out.push_back(*std::move(t));
        }
        (void)out.front().wait(gpushare::never, stop);
        while (!out.empty() && out.front().done()) out.pop_front();
    }
    for (const auto& t : out) (void)t.wait();
}

struct errors {
    // Errors in percent of the tenant's own use; the worst tenant counts.
    double of_ten_seconds = 0, in_all = 0;
    double planted = 0, planted_in_all = 0;  // errors of the first tenant by an incomplete ledger
    // Device time that idles beside a copy, in percent of the tenant's use; the worst tenant
    // counts.
    double beside_copies = 0;
};

/// Device time that idles beside blocks of `tag` that started alone, that is, without another block
/// of the tag at the same instant.
double beside_lone_blocks(std::vector<gpushare::host::block_record> blocks, std::uint32_t tag) {
    std::erase_if(blocks, [=](const auto& b) { return b.tag != tag; });
    std::ranges::sort(blocks, {}, &gpushare::host::block_record::start);
    ns idle{};
    for (std::size_t i = 0; i < blocks.size(); ++i)
        if ((i == 0 || blocks[i - 1].start != blocks[i].start) &&
            (i + 1 == blocks.size() || blocks[i + 1].start != blocks[i].start))
            idle += (blocks[i].end - blocks[i].start) * (sms - 1) / sms;
    return std::chrono::duration<double>(idle).count();
}

errors metering(const std::vector<unsigned>& permille, std::uint64_t seed, with what) {
    gpushare::host::node node{{.memory = gpushare::bytes{1 << 20}, .sms = sms, .timing = timing::modelled}};
    silent_limiter l{configuration};
    std::vector<gpushare::client_id> ids;
    std::deque<silent_stream> streams;
    std::deque<std::jthread> threads;
    for (std::uint32_t t = 0; t < permille.size(); ++t) {
        ids.push_back(l.add({.weight = gpushare::share::of_permille(permille[t])}));
        streams.emplace_back(node.make_stream(device_id{0}, gpushare::priority{}, t));
    }
    for (std::uint32_t t = 0; t < permille.size(); ++t)
        threads.emplace_back([&, t](const std::stop_token& stop) {
            keep_busy(l, ids[t], streams[t],
                      mixture{.any = gpushare::sim::random(seed + t), .only_kernels = what == with::kernels_alone},
                      what == with::told_copies, stop);
        });
    const auto charged = [&] {
        std::vector<double> all;
        for (const auto c : ids) all.push_back(std::chrono::duration<double>(l.usage(c).device_time).count());
        return all;
    };
    std::this_thread::sleep_for(500ms);
    const auto from = now();
    const auto before = charged();
    std::this_thread::sleep_for(10s);
    const auto to = now();
    const auto after = charged();
    for (auto& t : threads) t.request_stop();
    threads.clear();
    std::vector<double> last;
    for (const auto c : ids) {
        gpushare::client_usage account;
        l.close(c, gpushare::never, {}, &account);
        last.push_back(std::chrono::duration<double>(account.device_time).count());
    }
    const auto blocks = blocks_of(node, device_id{0});
    const device_seconds cut(blocks, from, to, ids.size(), sms),
        all(blocks, instant{}, instant::max(), ids.size(), sms);
    errors worst;
    const auto off = [](double is, double truth) { return 100 * std::abs(is - truth) / truth; };
    const auto lacking = without_a_fifth(blocks);
    worst.planted = off(after[0] - before[0], device_seconds(lacking, from, to, ids.size(), sms).of[0]);
    worst.planted_in_all = off(last[0], device_seconds(lacking, instant{}, instant::max(), ids.size(), sms).of[0]);
    for (std::size_t t = 0; t < ids.size(); ++t) {
        worst.of_ten_seconds = std::max(worst.of_ten_seconds, off(after[t] - before[t], cut.of[t]));
        worst.in_all = std::max(worst.in_all, off(last[t], all.of[t]));
        const double beside = beside_lone_blocks(blocks, static_cast<std::uint32_t>(t));
        worst.beside_copies = std::max(worst.beside_copies, 100 * beside / all.of[t]);
    }
    return worst;
}

}  // namespace

void metering_by_points(report& r) {
    const std::vector<std::vector<unsigned>> cases{{300, 700}, {100, 900}, {750, 250}, {20, 980}, {500, 300, 200}};
    const auto measure = [&](with what, const std::string& tail) {
        std::vector<errors> found(cases.size());
        {
            std::deque<std::jthread> at_once;  // each with a node of its own
            for (std::size_t i = 0; i < cases.size(); ++i)
                at_once.emplace_back([&, i] { found[i] = metering(cases[i], 100 * i, what); });
        }
        const auto all = [&](double errors::*of) {
            std::vector<double> values;
            for (const auto& e : found) values.push_back(e.*of);
            return values;
        };
        const auto figure = [&](const std::string& name, double errors::*of, double errors::*planted) {
            r.figure("compute." + name + tail + "_pct", all(of), "%",
                     control{at_most(1), std::ranges::min(all(planted)), lacks_a_fifth}, statistic::most);
        };
        figure("metering_error_by_points", &errors::of_ten_seconds, &errors::planted);
        figure("metering_error_by_points_in_all", &errors::in_all, &errors::planted_in_all);
        if (what == with::copies)
            r.figure("compute.idle_beside_copies_pct", all(&errors::beside_copies), "%", statistic::most);
    };
    measure(with::copies, "");
    measure(with::told_copies, "_told_widths");
    measure(with::kernels_alone, "_of_kernels");
}

}  // namespace bench::compute
