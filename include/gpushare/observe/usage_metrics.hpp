// SPDX-License-Identifier: Apache-2.0
// Usage of devices and tenants as metrics. Device metrics have the names and labels of NVIDIA's
// dcgm-exporter (up to 4.8), so that its dashboards and alerts work; tenant metrics begin with
// gpushare_tenant_.
//
//   gpushare::metrics_text out{page};
//   gpushare::write_device_metrics(out, devices);          // device_metrics, one each
//   gpushare::write_tenant_metrics(out, tenants);          // {"chat", chat.usage()}, ...
#pragma once

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <gpushare/compute/admission.hpp>
#include <gpushare/config.hpp>
#include <gpushare/observe/metrics.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A device at one point in time. Empty fields aren't written.
struct device_metrics {
    device_id device{};             ///< label "gpu", and "device" as nvidia0
    std::string_view uuid{};        ///< label "UUID"
    std::string_view pci_bus_id{};  ///< label "pci_bus_id"
    /// Label "modelName". `promtool check metrics` finds fault with that spelling, which is dcgm-exporter's.
    std::string_view model{};
    std::string_view host{};     ///< label "Hostname"
    bytes capacity{};            ///< of its memory
    bytes used{};                ///< of that, taken: by tenants, contexts and other processes
    double busy_percent = 0;     ///< of its time, since the last reading
    bytes set_aside{};           ///< of `used`, what no tenant is charged for
    std::uint64_t last_xid = 0;  ///< the last error that its driver reported; 0: none
};

/// A tenant at one point in time.
struct tenant_metrics {
    std::string_view name{};  ///< label "tenant"
    tenant_usage usage{};     ///< as tenant::usage() has it
};

/// Memory and utilisation of devices: DCGM_FI_DEV_FB_USED, FB_FREE, FB_RESERVED and FB_TOTAL in
/// MiB, GPU_UTIL in percent, XID_ERRORS.
inline void write_device_metrics(metrics_text& out, std::span<const device_metrics> devices) noexcept {
    const auto write = [&](std::string_view name, std::string_view help, auto value) {
        out.family(name, metric_type::gauge, help);
        for (const auto& d : devices) {
            std::array<char, 24> text{'n', 'v', 'i', 'd', 'i', 'a'};
            char* const digits = text.data() + 6;
            char* const end = std::to_chars(digits, text.data() + text.size(), d.device.index).ptr;
            const std::string_view number(digits, static_cast<std::size_t>(end - digits));
            const std::string_view node(text.data(), static_cast<std::size_t>(end - text.data()));
            out.sample({{"gpu", number},
                        {"UUID", d.uuid},
                        {"pci_bus_id", d.pci_bus_id},
                        {"device", node},
                        {"modelName", d.model},
                        {"Hostname", d.host}},
                       value(d));
        }
    };
    const auto mib = [](bytes b) { return b.count() >> 20; };
    write("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", [](const auto& d) { return d.busy_percent; });
    write("DCGM_FI_DEV_FB_TOTAL", "Framebuffer memory there is (in MiB).",
          [&](const auto& d) { return mib(d.capacity); });
    write("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).",
          [&](const auto& d) { return mib(d.capacity - d.used); });
    write("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).",
          [&](const auto& d) { return mib(d.used - d.set_aside); });
    write("DCGM_FI_DEV_FB_RESERVED", "Framebuffer memory that no tenant is charged for (in MiB).",
          [&](const auto& d) { return mib(d.set_aside); });
    write("DCGM_FI_DEV_XID_ERRORS", "The last error that the driver reported.",
          [](const auto& d) { return d.last_xid; });
}

namespace detail {
// Submissions that are over, and why others never ran.
inline void write_over(metrics_text& out, std::span<const tenant_metrics> tenants) noexcept {
    out.family("gpushare_tenant_submissions_total", metric_type::counter, "Submissions that are over.");
    for (const auto& t : tenants) {
        out.sample({{"tenant", t.name}, {"result", "done"}}, t.usage.completed - t.usage.failed);
        out.sample({{"tenant", t.name}, {"result", "failed"}}, t.usage.failed);
        out.sample({{"tenant", t.name}, {"result", "dropped"}}, t.usage.dropped);
    }
    const auto write = [&](std::string_view name, std::string_view help, unrun_counts tenant_usage::*of) {
        out.family(name, metric_type::counter, help);
        for (const auto& t : tenants)
            for (std::size_t i = 0; i < unrun_counts::reasons; ++i) {
                const auto why = static_cast<unrun>(i);
                out.sample({{"tenant", t.name}, {"reason", to_string(why)}}, (t.usage.*of)[why]);
            }
    };
    write("gpushare_tenant_submissions_refused_total", "Submissions that were turned away when they came.",
          &tenant_usage::turned_away);
    write("gpushare_tenant_submissions_cancelled_total", "Submissions that waited and never ran.",
          &tenant_usage::cancelled);
}
inline void write_durations(metrics_text& out, std::span<const tenant_metrics> tenants) noexcept {
    const auto write = [&](std::string_view name, std::string_view help, duration_histogram tenant_usage::*of) {
        out.family(name, metric_type::histogram, help);
        for (const auto& t : tenants) {
            const auto& h = t.usage.*of;
            out.histogram({{"tenant", t.name}}, duration_histogram::limits, h.counts(), h.sum());
        }
    };
    write("gpushare_tenant_queueing_seconds", "How long submissions waited that were let in.", &tenant_usage::queueing);
    write("gpushare_tenant_running_seconds", "How long submissions lasted on their devices.", &tenant_usage::running);
}
}  // namespace detail

/// Writes memory, device time and submissions of tenants: completed submissions, submissions that
/// never ran by reason, and histograms of queueing and running times.
inline void write_tenant_metrics(metrics_text& out, std::span<const tenant_metrics> tenants) noexcept {
    const auto write = [&](std::string_view name, metric_type type, std::string_view help, auto value) {
        out.family(name, type, help);
        for (const auto& t : tenants) out.sample({{"tenant", t.name}}, value(t.usage));
    };
    using enum metric_type;
    write("gpushare_tenant_memory_guaranteed_bytes", gauge, "Memory that is promised.",
          [](const auto& u) { return u.memory; });
    write("gpushare_tenant_memory_burst_bytes", gauge, "Memory beyond that, as long as nobody needs it.",
          [](const auto& u) { return u.burst; });
    write("gpushare_tenant_memory_used_bytes", gauge, "Memory that is charged.",
          [](const auto& u) { return u.current; });
    write("gpushare_tenant_memory_idle_bytes", gauge, "Of that, what pools keep for the next allocation.",
          [](const auto& u) { return u.idle; });
    write("gpushare_tenant_memory_pending_bytes", gauge, "Of that, what is freed once a stream gets there.",
          [](const auto& u) { return u.pending; });
    write("gpushare_tenant_memory_peak_bytes", gauge, "The most memory that was charged at once.",
          [](const auto& u) { return u.peak; });
    write("gpushare_tenant_memory_largest_free_bytes", gauge, "The largest block that it could have.",
          [](const auto& u) { return u.largest_free; });
    write("gpushare_tenant_scrubbed_bytes_total", counter, "Memory that was overwritten between tenants.",
          [](const auto& u) { return u.scrubbed; });
    write("gpushare_tenant_allocations_total", counter, "Allocations that succeeded.",
          [](const auto& u) { return u.allocations; });
    write("gpushare_tenant_allocations_refused_total", counter, "Allocations that were refused.",
          [](const auto& u) { return u.refused; });
    write("gpushare_tenant_device_seconds_total", counter, "Device time that was charged.",
          [](const auto& u) { return u.device_time; });
    write("gpushare_tenant_submissions_waiting", gauge, "Submissions that aren't let in yet.",
          [](const auto& u) { return u.waiting; });
    write("gpushare_tenant_submissions_in_flight", gauge, "Submissions on the devices.",
          [](const auto& u) { return u.in_flight; });
    detail::write_over(out, tenants);
    detail::write_durations(out, tenants);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
