// SPDX-License-Identifier: Apache-2.0
// The operators' view of the service: metrics for Prometheus, the numbers of the status page, and a
// timeline.
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include <gpushare/observe/metrics.hpp>

#include "inference_server/service.hpp"

namespace inference_server {

namespace {

/// The upper end of a bucket of an account, in seconds.
double bucket_end(std::size_t i) { return std::ldexp(1e-6, static_cast<int>(i)); }

double seconds(gpushare::ns t) { return static_cast<double>(t.count()) * 1e-9; }

/// A model on the status page: {"name": ..., "state": ..., "predicted_wake_ms": ...,
/// "last_wake_ms": ...}
std::string model_json(const lane& l) {
    using enum gpushare::sleep_level;
    const auto s = l.sleep();
    std::string out = "{\"name\":";
    json::append(out, std::string_view(l.info().name));
    json::append(out += ",\"state\":", l.now() == lane::state::loading ? "loading" : to_string(s.level()));
    json::append(out += ",\"predicted_wake_ms\":", 1e3 * seconds(s.predicted_wake(weights_released)));
    json::append(out += ",\"last_wake_ms\":", 1e3 * seconds(s.last_wake(weights_released)));
    if (const auto p = l.pieces(); p.cut_to != gpushare::ns{}) {
        json::append(out += ",\"pieces\":", p.pieces);
        json::append(out += ",\"longest_piece_ms\":", 1e3 * seconds(p.longest));
        json::append(out += ",\"cut_to_ms\":", 1e3 * seconds(p.cut_to));
    }
    return out += '}';
}

/// Counts of all answers so far; the status page computes differences.
std::string buckets_json(const account& a) {
    std::string out = "[";
    for (std::size_t i = 0; i < account::buckets; ++i) out += (i == 0 ? "" : ",") + std::to_string(a.in_bucket(i));
    return out += ']';
}

}  // namespace

std::string service::metrics() {
    struct row {
        std::string name;
        gpushare::tenant_usage usage;
        std::shared_ptr<account> counts;
        std::vector<std::pair<std::string, gpushare::sleep_levels>> models;
        std::vector<std::pair<std::string, piece_report>> cut;
    };
    std::vector<row> rows;
    for (const auto& t : tenants_.all()) {
        auto usage = usage_of(*t);
        const std::lock_guard lock(mutex_);
        const auto& of = rows_[t->name()];
        rows.push_back({t->name(), usage, of.counts, {}, {}});
        for (const auto& [model, l] : of.lanes) {
            rows.back().models.emplace_back(model, l->sleep());
            if (const auto p = l->pieces(); p.cut_to != gpushare::ns{}) rows.back().cut.emplace_back(model, p);
        }
    }
    const auto lines_waiting = [this] {
        const std::lock_guard lock(mutex_);
        return std::uint64_t{lines_waiting_};
    }();
    std::vector<gpushare::tenant_metrics> usages;
    gpushare::bytes used{};
    for (const auto& r : rows) {
        usages.push_back({r.name, r.usage});
        used += r.usage.current;
    }
    const gpushare::device_metrics card{.device = server_device, .capacity = memory_of(node_), .used = used};
    const auto write = [&](gpushare::metrics_text& out) {
        using enum gpushare::metric_type;
        gpushare::write_device_metrics(out, {&card, 1});
        gpushare::write_tenant_metrics(out, usages);
        const auto family = [&](std::string_view name, std::string_view help, auto member) {
            out.family(name, counter, help);
            for (const auto& r : rows)
                out.sample({{"tenant", r.name}}, ((*r.counts).*member).load(std::memory_order_relaxed));
        };
        family("server_requests_total", "Requests that were answered.", &account::requests);
        family("server_refusals_total", "Requests that were refused.", &account::refusals);
        family("server_failures_total", "Requests whose engine failed.", &account::failures);
        family("server_tokens_total", "Tokens that were made.", &account::tokens);
        family("server_batches_total", "Batches that ran.", &account::batches);
        family("server_rows_total", "Rows in them.", &account::rows);
        family("server_pieces_total", "Pieces of cut models that ran, each a submission.", &account::pieces);
        const auto of_cut = [&](std::string_view name, std::string_view help, auto reading) {
            out.family(name, gauge, help);
            for (const auto& r : rows)
                for (const auto& [model, p] : r.cut) out.sample({{"tenant", r.name}, {"model", model}}, reading(p));
        };
        of_cut("server_model_pieces", "Into how many submissions a call is cut; 0: not loaded.",
               [](const piece_report& p) { return std::uint64_t{p.pieces}; });
        of_cut("server_model_longest_piece_seconds", "The longest piece since the last load.",
               [](const piece_report& p) { return p.longest; });
        of_cut("server_model_cut_to_seconds", "How long a piece is to take at most.",
               [](const piece_report& p) { return p.cut_to; });
        const auto of_models = [&](std::string_view name, std::string_view help, auto reading) {
            out.family(name, gauge, help);
            for (const auto& r : rows)
                for (const auto& [model, sleep] : r.models)
                    out.sample({{"tenant", r.name}, {"model", model}}, reading(sleep));
        };
        using gpushare::sleep_level, gpushare::sleep_levels;
        of_models("server_model_sleep_level", "0: awake, 1: caches dropped, 2: weights spilled, 3: weights released.",
                  [](const sleep_levels& s) { return static_cast<std::uint64_t>(s.level()); });
        of_models("server_model_predicted_wake_seconds",
                  "The longest of the last eight loads: so long a request may wait for weights that were released.",
                  [](const sleep_levels& s) { return s.predicted_wake(sleep_level::weights_released); });
        of_models("server_model_last_wake_seconds", "How long loading took the last time.",
                  [](const sleep_levels& s) { return s.last_wake(sleep_level::weights_released); });
        out.family("server_journal_lines_waiting", gauge, "Lines that couldn't be written to the journal yet.");
        out.sample({}, lines_waiting);
        out.family("server_request_seconds", histogram, "From a request's arrival until its answer.");
        for (const auto& r : rows) {
            std::uint64_t sum = 0;
            for (std::size_t i = 0; i + 1 < account::buckets; ++i) {
                sum += r.counts->in_bucket(i);
                const auto end = std::to_string(bucket_end(i));
                if (i >= 6) out.sample({{"tenant", r.name}, {"le", end}}, sum, "_bucket");
            }
            sum += r.counts->in_bucket(account::buckets - 1);
            out.sample({{"tenant", r.name}, {"le", "+Inf"}}, sum, "_bucket");
            out.sample({{"tenant", r.name}}, static_cast<double>(r.counts->sum_us()) * 1e-6, "_sum");
            out.sample({{"tenant", r.name}}, sum, "_count");
        }
    };
    std::string page(16384, '\0');
    for (;;) {
        gpushare::metrics_text out{page};
        write(out);
        if (out.fits()) {
            page.resize(out.size());
            return page;
        }
        page.resize(out.size() * 2);
    }
}

std::string service::status_json() {
    std::string out = "{\"now_ms\":" + std::to_string(now().time_since_epoch().count() / 1'000'000);
    out +=
        ",\"sms\":" + std::to_string(sms_of(node_)) + ",\"ready\":" + (ready() ? "true" : "false") + ",\"tenants\":[";
    const char* before = "";
    for (const auto& t : tenants_.all()) {
        const auto u = usage_of(*t);
        const auto launch_ns = launch_time_of(*t);
        const auto spec = t->spec();
        std::size_t waiting = 0;
        std::string models;
        for (const auto& l : lanes_of(t->name())) {
            waiting += l->waiting();
            models += (models.empty() ? "" : ",") + model_json(*l);
        }
        const std::lock_guard lock(mutex_);
        const auto& row = rows_[t->name()];
        const auto add = [&](std::string_view name, auto value) {
            json::append(out += ',', name);
            json::append(out += ':', value);
        };
        out += std::string(before) + "{\"name\":";
        json::append(out, std::string_view(t->name()));
        add("share_permille", spec.compute.permille());
        add("level", spec.level.level);
        add("device_ns", u.device_time.count());
        add("launch_ns", launch_ns.count());
        add("memory", u.memory.count());
        add("used", u.current.count());
        add("waiting", waiting);
        add("requests", row.counts->requests.load(std::memory_order_relaxed));
        add("refusals", row.counts->refusals.load(std::memory_order_relaxed));
        add("failures", row.counts->failures.load(std::memory_order_relaxed));
        add("tokens", row.counts->tokens.load(std::memory_order_relaxed));
        out += ",\"models\":[" + models + "],\"took\":" + buckets_json(*row.counts) + '}';
        before = ",";
    }
    const std::lock_guard lock(mutex_);
    out += "],\"journal_lines_waiting\":" + std::to_string(lines_waiting_) + ",\"wrong\":";
    json::append(out, std::string_view(wrong_));
    return out += '}';
}

std::string service::timeline_json() {
    const std::lock_guard lock(tracing_);
    if (!drawn_) {
        trace_.start();
        trace_.name_device(server_device, "device");
        drawn_.emplace(trace_, shared_.limiter_of(server_device), server_device);
    }
    drawn_->collect();
    return trace_.json();
}

}  // namespace inference_server
