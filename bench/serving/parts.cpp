// SPDX-License-Identifier: Apache-2.0
#include "serving/parts.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <memory_resource>
#include <optional>
#include <queue>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/host/virtual_memory.hpp>
#include <gpushare/serving/page_store.hpp>
#include <gpushare/serving/sleeping_tenant.hpp>
#include <gpushare/serving/usage_journal.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "silent_node.hpp"

namespace bench::serving {
namespace {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::errc;
using gpushare::instant;
using gpushare::ns;
using gpushare::sleep_level;

// ---- bursts that alternate

/// Two models whose requests come in alternating bursts: 20 per second for ten seconds, then 1 per
/// second for ten seconds while the other model has its burst. A request needs 4 to 28 pages,
/// answers 50 ms after it has them, and holds them for 2 s on average. Only memory is limited:
/// requests wait for pages, never for another request's computation.
class bursts {
public:
    explicit bursts(std::uint64_t seed, bool plans_elastic)
        : any_(seed),
          chat_limit_(whole_, plans_elastic ? some_ : half_, plans_elastic ? whole_bytes_ - 2 * some_ : 0_B),
          code_limit_(whole_, plans_elastic ? some_ : half_, plans_elastic ? whole_bytes_ - 2 * some_ : 0_B) {}

    /// Sorted times to the first token, in milliseconds.
    [[nodiscard]] std::vector<double> run() {
        for (std::size_t m = 0; m < 2; ++m) arrive(m, 0s);
        while (!events_.empty()) {
            const event e = events_.top();
            events_.pop();
            now_ = e.at;
            if (e.pages.empty()) {
                waiting_[e.model].push_back({now_, 4 + static_cast<std::size_t>(any_() % 25)});
                arrive(e.model, now_);
            } else if (stores_[e.model]->free(e.pages) != errc::none) {
                throw std::runtime_error("pages that weren't out");
            }
            for (std::size_t m = 0; m < 2; ++m) serve(m);  // memory may have moved between the models
        }
        std::ranges::sort(first_token_ms_);
        return std::move(first_token_ms_);
    }

private:
    using store = gpushare::page_store<gpushare::host::virtual_memory, gpushare::host::stream>;
    struct event {
        ns at{};
        std::size_t model = 0;
        std::vector<std::uint32_t> pages{};  // the pages to free; empty for an arriving request
        bool operator<(const event& o) const noexcept { return at > o.at; }
    };
    struct request {
        ns came;
        std::size_t pages;
    };

    [[nodiscard]] ns after(double mean_s) {
        return ns{static_cast<std::int64_t>(std::exponential_distribution<>(1e-9 / mean_s)(any_))};
    }
    void arrive(std::size_t model, ns from) {
        const bool in_burst = static_cast<std::size_t>(from / 10s) % 2 == model;
        const ns at = from + after(in_burst ? 0.05 : 1);
        if (at < 120s) events_.push({at, model});
    }
    void serve(std::size_t model) {
        auto& line = waiting_[model];
        while (!line.empty()) {
            std::vector<std::uint32_t> pages(line.front().pages);
            if (stores_[model]->try_allocate(pages, gpushare::never).code != errc::none) return;
            first_token_ms_.push_back(
                std::chrono::duration<double, std::milli>(now_ - line.front().came + 50ms).count());
            line.pop_front();
            events_.push({now_ + 50ms + after(2), model, std::move(pages)});
        }
    }

    // 800 pages of 16 KiB. A burst would need about 800 pages at once, so half of the memory serves
    // half of a burst.
    static constexpr gpushare::bytes chunk_ = 64_KiB, whole_bytes_ = 200 * chunk_, half_ = 100 * chunk_,
                                     some_ = 10 * chunk_;

    std::mt19937_64 any_;
    gpushare::host::node node_{{.devices = 1, .memory = 64_MiB, .sms = 1}};
    gpushare::host::virtual_memory memory_{node_.memory({0}), chunk_};
    gpushare::host::stream scrubs_ = node_.make_stream({0});
    gpushare::chunk_pool<gpushare::host::virtual_memory, gpushare::host::stream> pool_{
        memory_, scrubs_, {.capacity = 200}};
    gpushare::quota whole_{whole_bytes_};
    gpushare::quota chat_limit_, code_limit_;
    const gpushare::page_options page_{.lanes = 4, .token = 64_B, .tokens = 64, .pages = 800};
    std::array<std::unique_ptr<store>, 2> stores_{
        std::make_unique<store>(pool_, chat_limit_, gpushare::tenant_tag{1}, page_),
        std::make_unique<store>(pool_, code_limit_, gpushare::tenant_tag{2}, page_)};
    ns now_{};
    std::priority_queue<event> events_;
    std::array<std::deque<request>, 2> waiting_;
    std::vector<double> first_token_ms_;
};

double p99(const std::vector<double>& sorted) { return sorted[sorted.size() * 99 / 100]; }

void burst_ratio(report& r) {
    std::vector<double> ratio, elastic, fixed;
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
        fixed.push_back(p99(bursts(seed, false).run()));
        elastic.push_back(p99(bursts(seed, true).run()));
        ratio.push_back(fixed.back() / elastic.back());
    }
    r.figure("serving.modelled_kv_burst_ttft_ratio", ratio, "x");
    r.figure("serving.modelled_kv_burst_ttft_static_ms", fixed, "ms");
    r.figure("serving.modelled_kv_burst_ttft_elastic_ms", elastic, "ms");
}

// ---- sleep

constexpr std::size_t weights_size = std::size_t{256} << 20;

/// A file as large as the weights of a small model. Waking from the deepest level reads the file.
class weights_file {
public:
    weights_file() {
        const std::vector<char> piece(std::size_t{1} << 20, 'w');
        std::FILE* const file = std::fopen(path_.c_str(), "wb");
        if (file == nullptr) throw std::runtime_error("cannot write " + path_);
        for (std::size_t n = 0; n < weights_size; n += piece.size())
            if (std::fwrite(piece.data(), 1, piece.size(), file) != piece.size())
                throw std::runtime_error("no room in /tmp");
        (void)std::fclose(file);
    }
    ~weights_file() { (void)std::remove(path_.c_str()); }
    void read(void* to) const {
        std::FILE* const file = std::fopen(path_.c_str(), "rb");
        if (file == nullptr || std::fread(to, 1, weights_size, file) != weights_size)
            throw std::runtime_error("cannot read");
        (void)std::fclose(file);
    }

private:
    std::string path_ = "/tmp/gpushare_bench_weights_" + std::to_string(std::random_device{}());
};

void sleep_figures(report& r) {
    const weights_file file;
    constexpr std::array levels{sleep_level::caches_dropped, sleep_level::weights_spilled,
                                sleep_level::weights_released};
    std::array<std::vector<double>, 3> cold, idle;
    std::vector<double> awake;
    for (int repeat = 0; repeat < 5; ++repeat) {
        gpushare::host::node node{{.devices = 1, .memory = 2_GiB, .sms = 1}};
        gpushare::tenancy shared{node, {.spill = 1_GiB, .spill_to = std::pmr::new_delete_resource()}};
        auto chat = shared.admit({.name = "chat", .memory = 1_GiB, .compute = 50_pct});
        std::optional<decltype(chat.allocate_spillable(1_B))> weights;
        const auto load = [&] {
            weights.emplace(chat.allocate_spillable(gpushare::bytes{weights_size}));
            const auto there = weights->use();
            file.read(there.data());
        };
        const auto answer = [&] {  // the first token: reads the weights, allocates a cache
            const auto there = weights->use();
            void* const cache = chat.memory().allocate(64 << 20);
            chat.submit([&](auto& to) {
                    to.launch({}, [p = static_cast<const char*>(there.data())](auto&) {
                        std::uint64_t sum = 0;
                        for (std::size_t n = 0; n < weights_size; n += 4096) sum += static_cast<unsigned char>(p[n]);
                        keep(sum);
                    });
                })
                .wait();
            (void)chat.memory().deallocate(cache, 64 << 20);
        };
        load();
        answer();
        awake.push_back(static_cast<double>(chat.usage().current.count()));
        for (std::size_t n = 0; n < levels.size(); ++n) {
            gpushare::sleep_rule rule{};
            (n == 0 ? rule.drop_caches_after : n == 1 ? rule.spill_after : rule.release_after) = 1ns;
            gpushare::sleeping_tenant model(chat, rule, {.release = [&] { weights.reset(); }, .restore = load});
            while (model.state().level() != levels[n]) (void)model.tick();
            idle[n].push_back(static_cast<double>(chat.usage().current.count()));
            const auto begin = std::chrono::steady_clock::now();
            const auto request = model.use();
            answer();
            cold[n].push_back(
                std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
        }
    }
    r.figure("serving.idle_tenant_bytes_awake", awake, "B");
    for (std::size_t n = 0; n < levels.size(); ++n) {
        std::string name(to_string(levels[n]));
        std::ranges::replace(name, ' ', '_');
        r.figure("serving.cold_start_ms_" + name, cold[n], "ms");
        r.figure("serving.idle_tenant_bytes_" + name, idle[n], "B");
    }
}

// ---- bills

/// A kernel of `blocks` blocks that each hold an SM for `hold`.
void launch(gpushare::host::stream& to, std::uint32_t blocks, ns hold) {
    to.launch({.blocks = blocks, .hold = hold}, [](auto&) {});
}
void launch(silent_stream& to, std::uint32_t blocks, ns hold) { launch(to.inner(), blocks, hold); }

/// Two tenants work while a journal is written, rotated and reopened. Then the function reads bills
/// for seven adjacent periods from the journal. Returns each tenant's billed device time.
struct billed_work {
    std::array<ns, 2> device_time{};
    std::array<std::uint32_t, 2> tags{};
};
template <class Node>
billed_work bill_work_on(Node& node) {
    gpushare::tenancy shared{node};
    std::array tenants{shared.admit({.name = "chat", .memory = 8_MiB, .compute = 70_pct}),
                       shared.admit({.name = "code", .memory = 8_MiB, .compute = 30_pct})};
    std::array meters{gpushare::usage_meter("chat"), gpushare::usage_meter("code")};
    std::string folder = "/tmp/gpushare_bench_XXXXXX";
    if (::mkdtemp(folder.data()) == nullptr) throw std::runtime_error("cannot write to /tmp");
    const auto path = folder + "/usage";
    const auto wall = [] { return std::chrono::time_point_cast<ns>(std::chrono::system_clock::now()); };
    const auto begin = wall();
    std::array<gpushare::usage_amounts, 2> sums;
    billed_work all;
    const auto open = [&] {
        return std::make_unique<gpushare::usage_journal>(path, gpushare::journal_options{.rotate_at = 4_KiB});
    };
    auto journal = open();
    const auto read = [&] {
        for (std::size_t n = 0; n < 2; ++n)
            if (const auto line = meters[n].read(wall(), gpushare::reading_of(tenants[n].usage()))) {
                journal->append({&*line, 1});
                sums[n] += line->amounts;
            }
    };
    read();
    for (int round = 0; round < 50; ++round) {
        for (auto& t : tenants) {
            void* const p = t.memory().allocate(std::size_t{1} << (12 + round % 8));
            for (std::uint32_t k = 1; k <= 4; ++k) t.submit([&](auto& to) { launch(to, k, 200us + round * 3us); });
            (void)t.memory().deallocate(p, std::size_t{1} << (12 + round % 8));
        }
        for (auto& t : tenants) t.submit([](auto&) {}).wait();
        read();
        if (round % 10 == 9) {  // as after a restart
            journal.reset();
            journal = open();
        }
    }
    journal.reset();
    const auto end = wall() + 1s;
    for (std::size_t n = 0; n < 2; ++n) {
        gpushare::usage_amounts billed;
        for (int part = 0; part < 7; ++part) {
            gpushare::usage_invoices invoice(begin + (end - begin) * part / 7, begin + (end - begin) * (part + 1) / 7);
            if (gpushare::usage_journal::read(path, [&](const gpushare::usage_line& l) { invoice.add(l); }) != 0)
                throw std::runtime_error("a line was torn");
            billed += invoice.of(n == 0 ? "chat" : "code");
        }
        if (billed != sums[n]) throw std::runtime_error("the bills don't sum to the lines");
        all.device_time[n] = billed.device_time;
        all.tags[n] = tenants[n].tag();
    }
    const std::string command = "rm -r " + folder;
    if (std::system(command.c_str()) != 0) throw std::runtime_error("cannot remove " + folder);
    return all;
}

constexpr std::uint32_t billed_sms = 2;
const gpushare::host::node_options billed_node{
    .devices = 1, .memory = 64_MiB, .sms = billed_sms, .timing = gpushare::host::timing::modelled};

/// The difference in nanoseconds between the billed device time and the device's ledger: the larger
/// value of both tenants. `planted` is the smaller difference to a ledger that lacks a block.
struct bill_error {
    double off = 0, planted = std::numeric_limits<double>::infinity();
};
bill_error bill_minus_ledger() {
    gpushare::host::node node{billed_node};
    const auto billed = bill_work_on(node);
    const auto ledger = node.ledger({0}).take();
    if (ledger.dropped != 0) throw std::runtime_error("the ledger isn't complete");
    bill_error worst;
    for (std::size_t n = 0; n < 2; ++n) {
        ns by_ledger{};
        for (const auto& b : ledger.blocks)
            if (b.tag == billed.tags[n]) by_ledger += b.end - b.start;
        const auto off = [&](ns truth) {
            return std::abs(static_cast<double>((billed.device_time[n] - truth / billed_sms).count()));
        };
        worst.off = std::max(worst.off, off(by_ledger));
        const auto& lacks = *std::ranges::find(ledger.blocks, billed.tags[n], &gpushare::host::block_record::tag);
        worst.planted = std::min(worst.planted, off(by_ledger - (lacks.end - lacks.start)));
    }
    return worst;
}

/// The same on a node that doesn't reveal the use of its SMs, like a GPU. Compares the sum of both
/// bills with the time in which any block ran; the difference is in percent of that time. `planted`
/// bills the counters twice, as if they had restarted at the end.
bill_error bill_by_points() {
    silent_node node{billed_node};
    const auto billed = bill_work_on(node);
    auto blocks = node.ledger({0}).take().blocks;
    std::ranges::sort(blocks, {}, &gpushare::host::block_record::start);
    ns busy{};
    gpushare::instant until{};
    for (const auto& b : blocks) {
        busy += std::max(b.end - std::max(b.start, until), ns{0});
        until = std::max(until, b.end);
    }
    const auto off = [&](ns sum) {
        return 100 * std::abs(static_cast<double>((sum - busy).count())) / static_cast<double>(busy.count());
    };
    const ns sum = billed.device_time[0] + billed.device_time[1];
    return {off(sum), off(sum + sum)};
}

}  // namespace

void parts(report& r) {
    burst_ratio(r);
    sleep_figures(r);
    double planted = std::numeric_limits<double>::infinity();
    const auto off = repeated(5, [&] {
        const auto b = bill_minus_ledger();
        planted = std::min(planted, b.planted);
        return b.off;
    });
    r.figure("serving.bill_minus_ledger", off, "ns", {at_most(0), planted, "a ledger that lacks a block"},
             statistic::most);
    planted = std::numeric_limits<double>::infinity();
    const auto by_points = repeated(5, [&] {
        const auto b = bill_by_points();
        planted = std::min(planted, b.planted);
        return b.off;
    });
    r.figure("serving.bill_minus_ledger_by_points_pct", by_points, "%",
             {at_most(5), planted, "a counter that is taken to have begun anew"}, statistic::most);
}

}  // namespace bench::serving
