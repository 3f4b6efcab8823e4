// SPDX-License-Identifier: Apache-2.0
#include "trace_replay/replay.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>

#include <gpushare/gpushare.hpp>
#include <gpushare/observe/timeline_trace.hpp>

#include "trace_replay/backlog.hpp"
#include "trace_replay/server.hpp"

namespace trace_replay {

using namespace gpushare::literals;
using namespace std::chrono_literals;
using gpushare::device_id;
using gpushare::instant;

namespace {

constexpr std::uint32_t sms_per_device = 2;

/// The most blocks that a workload can run: the kernels of its steps, and for each job the loading
/// of a model and a copy.
std::size_t blocks_of(const workload& w) {
    std::size_t blocks = 0;
    for (const auto& j : w.jobs) blocks += (std::size_t{j.steps} * j.kernels + 2) * sms_per_device;
    return blocks;
}

/// Access without limits: the device's memory and a stream, as if there were no other tenants.
class bare_access final : public access {
public:
    bare_access(host::node& node, device_id d, std::uint32_t tag)
        : memory_(node.memory(d)), stream_(node.make_stream(d, {}, tag)) {}

    void* try_allocate(gpushare::bytes size) override {
        void* p = memory_.try_allocate(size.count(), 256);
        if (p != nullptr) peak_ = std::max(peak_, held_ += size);
        return p;
    }
    void free(void* p, gpushare::bytes size) override {
        memory_.deallocate(p, size.count(), 256);
        held_ -= size;
    }
    void submit(gpushare::submission_work<host::stream> work, std::vector<ticket>&) override { work(stream_); }
    [[nodiscard]] gpushare::bytes peak() const { return peak_; }

private:
    host::device_memory& memory_;
    host::stream stream_;
    gpushare::bytes held_, peak_;
};

/// The device of each job. A tenant's requests take the devices in turn.
std::vector<std::uint32_t> in_turn(const workload& w, std::uint32_t devices) {
    std::vector<std::uint32_t> turn(w.tenants.size()), device_of;
    for (const auto& j : w.jobs) device_of.push_back(turn[j.tenant]++ % devices);
    return device_of;
}

/// Access under gpushare: the tenant's quota and its queue.
class tenant_access final : public access {
public:
    tenant_access(gpushare::tenant<host::node>& tenant, std::size_t part) : tenant_(tenant), part_(part) {}

    void* try_allocate(gpushare::bytes size) override { return tenant_.memory(part_).try_allocate(size.count()); }
    void free(void* p, gpushare::bytes size) override { tenant_.memory(part_).deallocate(p, size.count()); }
    void submit(gpushare::submission_work<host::stream> work, std::vector<ticket>& tickets) override {
        tickets.push_back(tenant_.submit(std::move(work), part_));
    }

private:
    gpushare::tenant<host::node>& tenant_;
    std::size_t part_;
};

/// A ledger's blocks in bins of time, so that a window looks only at its own bins.
class blocks_by_time {
public:
    blocks_by_time(std::span<const host::block_record> blocks, instant start, gpushare::ns bin, std::size_t bins)
        : start_(start), bin_(bin), bins_(bins) {
        for (const auto& b : blocks)
            for (auto i = index(b.start); i <= index(b.end); ++i) bins_[i].push_back(b);
    }

    /// May return a block twice, which doesn't change when its tag was active.
    [[nodiscard]] std::vector<host::block_record> within(instant from, instant to) const {
        std::vector<host::block_record> all;
        for (auto i = index(from); i <= index(to); ++i) all.insert(all.end(), bins_[i].begin(), bins_[i].end());
        return all;
    }

private:
    [[nodiscard]] std::size_t index(instant t) const {
        return std::min(static_cast<std::size_t>(std::max(t - start_, gpushare::ns{0}) / bin_), bins_.size() - 1);
    }

    instant start_;
    gpushare::ns bin_;
    std::vector<std::vector<host::block_record>> bins_;
};

/// One run: all objects that live while it lasts, in the order in which they must be made.
class run {
public:
    run(const workload& w, const options& o, way how, gpushare::timeline_trace* timeline)
        : workload_(w),
          how_(how),
          node_({.devices = o.devices,
                 .memory = 1_GiB * o.memory_gib,
                 .sms = sms_per_device,
                 .timing = host::timing::modelled,
                 .ledger_capacity = blocks_of(w)}),
          records_(w.jobs.size()),
          device_of_(in_turn(w, o.devices)) {
        if (how == way::unlimited)
            open_bare(o.devices);
        else
            admit_tenants(o.devices);
        if (timeline != nullptr && how != way::unlimited) draw_in(*timeline);
        for (auto& a : accesses_) servers_.emplace_back(w, records_, *a, sms_per_device, node_.get_clock());
    }

    outcome go() {
        start_ = node_.get_clock().now();
        std::size_t next = 0;
        while (next < workload_.jobs.size() || !std::ranges::all_of(servers_, &server::idle)) {
            const auto now = node_.get_clock().now() - start_;
            for (; next < workload_.jobs.size() && workload_.jobs[next].arrival <= now; ++next)
                server_of(next).arrive(next);
            for (auto& l : servers_) l.step();
            for (auto& d : drawn_) d.collect();
            std::this_thread::sleep_for(1ms);
        }
        end_ = node_.get_clock().now();
        for (auto& l : servers_) l.clear();
        for (auto& d : drawn_) d.collect();
        return measure();
    }

private:
    void open_bare(std::uint32_t devices) {
        for (std::uint32_t t = 0; t < workload_.tenants.size(); ++t) {
            tags_.push_back(t + 1);
            for (std::uint32_t d = 0; d < devices; ++d)
                accesses_.push_back(std::make_unique<bare_access>(node_, device_id{d}, t + 1));
        }
    }

    void admit_tenants(std::uint32_t devices) {
        tenancy_.emplace(node_);
        for (const auto& t : workload_.tenants) {
            const bool weighted = how_ == way::weighted;
            tenants_.push_back(tenancy_->admit({.name = t.name,
                                                .memory = t.quota,
                                                .devices = devices,
                                                .compute = weighted ? t.weighted : t.fair,
                                                .level = {weighted && t.urgent ? 1 : 0},
                                                .unit = 1_MiB}));
            tags_.push_back(tenants_.back().tag());
            for (std::uint32_t d = 0; d < devices; ++d)
                accesses_.push_back(std::make_unique<tenant_access>(tenants_.back(), d));
        }
        for (std::uint32_t d = 0; d < devices; ++d)
            dispatchers_.emplace_back(
                [this, d](const std::stop_token& stop) { tenancy_->dispatch(device_id{d}, stop); });
    }

    void draw_in(gpushare::timeline_trace& timeline) {
        for (const auto& t : tenants_) timeline.name_tenant(t.tag(), t.name());
        for (std::uint32_t d = 0; d < node_.num_devices(); ++d)
            drawn_.emplace_back(timeline, tenancy_->limiter_of(device_id{d}), device_id{d});
    }

    server& server_of(std::size_t job) {
        return servers_[workload_.jobs[job].tenant * node_.num_devices() + device_of_[job]];
    }

    outcome measure() {
        outcome out{.how = how_, .tenants = std::vector<tenant_outcome>(workload_.tenants.size())};
        out.length_s = std::chrono::duration<double>(end_ - start_).count();
        for (std::size_t i = 0; i < records_.size(); ++i) {
            const auto& r = records_[i];
            auto& t = out.tenants[workload_.jobs[i].tenant];
            t.refused += r.refused;
            t.failed += r.failed;
            out.results.push_back(r.done ? r.result : 0);
            if (!r.done) continue;
            ++t.done;
            const auto finished = r.finished - start_;
            t.latency_ms.push_back(
                std::chrono::duration<double, std::milli>(finished - workload_.jobs[i].arrival).count());
            t.finished_s.push_back(std::chrono::duration<double>(finished).count());
        }
        measure_memory(out);
        measure_shares(out);
        return out;
    }

    void measure_memory(outcome& out) {
        for (std::size_t t = 0; t < out.tenants.size(); ++t) {
            if (how_ != way::unlimited) {
                const auto usage = tenants_[t].usage();
                out.tenants[t].peak = usage.peak;
                out.tenants[t].quota = usage.memory;
                continue;
            }
            for (std::uint32_t d = 0; d < node_.num_devices(); ++d)
                out.tenants[t].peak += static_cast<const bare_access&>(*accesses_[t * node_.num_devices() + d]).peak();
        }
    }

    /// Uses only the ledger; the limiter's own account isn't used.
    void measure_shares(outcome& out) {
        out.bin = 250ms;
        const auto bins = static_cast<std::size_t>((end_ - start_) / out.bin) + 1;
        for (auto& t : out.tenants) t.busy.resize(bins);
        backlog_meter meter(out.tenants.size(), start_, end_);
        for (std::uint32_t d = 0; d < node_.num_devices(); ++d) {
            const auto ledger = node_.ledger(device_id{d}).take();
            if (ledger.dropped != 0) throw std::runtime_error("the ledger is too small for the run");
            const blocks_by_time blocks(ledger.blocks, start_, out.bin, bins);
            const auto busy_between = [&](instant from, instant to) {
                std::vector<double> busy(out.tenants.size());
                for (const auto& [tag, time] :
                     host::sm_time_by_tag(blocks.within(from, to), from, to, node_.options().sms))
                    busy[tenant_of(tag)] = static_cast<double>(time.count());
                return busy;
            };
            for (std::size_t b = 0; b < bins; ++b) {
                const auto from = start_ + static_cast<std::int64_t>(b) * out.bin;
                const auto busy = busy_between(from, from + out.bin);
                for (std::size_t t = 0; t < busy.size(); ++t)
                    out.tenants[t].busy[b] += busy[t] / static_cast<double>(out.bin.count()) / node_.num_devices();
            }
            meter.add_device(backlogs(d), weights(), busy_between);
        }
        out.share_error_pp = meter.largest_error_pp();
        out.share_error_percent = meter.largest_relative_error();
        out.together_s = std::chrono::duration<double>(meter.together()).count();
        for (std::size_t t = 0; t < out.tenants.size(); ++t) {
            const auto& m = meter.tenants()[t];
            out.tenants[t].windows = m.windows;
            if (m.windows == 0) continue;
            out.tenants[t].configured = m.configured / static_cast<double>(m.windows);
            out.tenants[t].achieved = m.achieved / static_cast<double>(m.windows);
        }
    }

    std::size_t tenant_of(std::uint32_t tag) const {
        return static_cast<std::size_t>(std::ranges::find(tags_, tag) - tags_.begin());
    }

    /// The share of each tenant. A tenant with priority has no share, and without limits all shares
    /// are equal.
    std::vector<double> weights() const {
        std::vector<double> all;
        for (const auto& t : workload_.tenants)
            all.push_back(how_ != way::weighted ? 1.0 : t.urgent ? 0.0 : t.weighted.fraction());
        return all;
    }

    /// When each tenant had work waiting for device `d`: from the time when a job is handed over
    /// until the turn of its last kernel. Without limits, work doesn't wait before the device, so a
    /// job counts until it is finished.
    std::vector<std::vector<interval>> backlogs(std::uint32_t d) const {
        std::vector<std::vector<interval>> all(workload_.tenants.size());
        for (std::size_t i = 0; i < records_.size(); ++i) {
            const auto& r = records_[i];
            if (!r.done || device_of_[i] != d) continue;
            all[workload_.jobs[i].tenant].push_back({r.submitted, how_ == way::unlimited ? r.finished : r.let_in});
        }
        return all;
    }

    const workload& workload_;
    way how_;
    host::node node_;
    std::optional<gpushare::tenancy<host::node>> tenancy_;
    std::vector<std::uint32_t> tags_;  // the tag of each tenant, in the ledger
    std::deque<gpushare::tenant<host::node>> tenants_;
    // device by device
    std::deque<gpushare::limiter_trace<gpushare::tenancy<host::node>::limiter>> drawn_;
    std::vector<std::unique_ptr<access>> accesses_;  // by tenant, then by device
    std::vector<job_record> records_;
    std::deque<server> servers_;            // in the order of the accesses
    std::vector<std::uint32_t> device_of_;  // the device of each job
    instant start_{}, end_{};
    // declared last, so that they stop before the objects that they drive are destroyed
    std::vector<std::jthread> dispatchers_;
};

}  // namespace

std::string_view to_string(way w) {
    switch (w) {
        case way::unlimited: return "no limits";
        case way::fair: return "fair shares";
        case way::weighted: return "weighted shares and a priority tenant";
    }
    return "";
}

outcome replay(const workload& w, const options& o, way how, gpushare::timeline_trace* timeline) {
    return run(w, o, how, timeline).go();
}

}  // namespace trace_replay
