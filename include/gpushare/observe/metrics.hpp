// SPDX-License-Identifier: Apache-2.0
// Writes metrics in the text format of Prometheus into the caller's memory, without allocating.
//
//   std::array<char, 16384> page;
//   gpushare::metrics_text out{page};
//   out.family("server_requests_total", gpushare::metric_type::counter, "Requests that were answered.");
//   out.sample({{"tenant", "chat"}, {"model", "tiny"}}, answered);
//   if (!out.fits()) ...;                        // out.size() bytes are needed
//   reply(out.text(), gpushare::metrics_text::content_type);
//
// Write all samples of a family right after the family. The class handles the rest of the format.
//
// The header has ready-made metrics of devices and of tenants. Device metrics have the names and
// labels of NVIDIA's dcgm-exporter (up to 4.8), so its dashboards and alerts work. Names of tenant
// metrics begin with gpushare_tenant_.
//
//   gpushare::write_device_metrics(out, devices);          // device_metrics, one each
//   gpushare::write_tenant_metrics(out, tenants);          // {"chat", chat.usage()}, ...
//
// A table shows figures to people. Each column is as wide as its widest cell, and has its own
// alignment.
//
//   gpushare::table t{{"tenant"}, {"share %", gpushare::align::right}};
//   t.add_row({"chat", "29.8"});
//   std::fputs(t.str().c_str(), stdout);
//
// tenant_table shows a tenant its devices and memory, as nvidia-smi shows a whole machine. The
// tenant's own part counts as the whole.
//
//   std::fputs(gpushare::tenant_table(chat).c_str(), stdout);
//
//  chat: 60 % of 2 devices, level 1, 3 in flight, 0 waiting, 12.3 s of device time
//  device  memory used  of          free       kept idle  largest free
//  ------  -----------  ----------  ---------  ---------  ------------
//       0      512 MiB  24576 MiB  24064 MiB    128 MiB     24064 MiB
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/admission.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The type of a family of metrics.
enum class metric_type : std::uint8_t {
    gauge,      ///< goes up and down
    counter,    ///< only goes up; its name ends in _total
    histogram,  ///< samples with the suffixes _bucket (and the label "le"), _sum and _count
    summary,    ///< samples with the label "quantile", and the suffixes _sum and _count
};

/// The type as the format spells it.
[[nodiscard]] constexpr std::string_view to_string(metric_type t) noexcept {
    switch (t) {
        case metric_type::gauge: return "gauge";
        case metric_type::counter: return "counter";
        case metric_type::histogram: return "histogram";
        case metric_type::summary: return "summary";
    }
    return "untyped";
}

/// A label of a sample.
struct metric_label {
    /// Letters, digits and underscores; other characters are written as underscores.
    std::string_view name{};
    std::string_view value{};  ///< any bytes; invalid UTF-8 is written as U+FFFD
};

namespace detail {

// The number of bytes of the first code point; 0 if the code point is invalid.
[[nodiscard]] constexpr std::size_t utf8_length(std::string_view text) noexcept {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const auto lead = byte(0);
    if (lead < 0x80) return 1;
    const std::size_t n = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || text.size() < n) return 0;
    for (std::size_t i = 1; i < n; ++i)
        if ((byte(i) & 0xc0U) != 0x80U) return 0;
    const auto second = byte(1);
    const bool too_long = (lead == 0xe0 && second < 0xa0) || (lead == 0xf0 && second < 0x90);
    // Surrogates, or above U+10FFFF.
    const bool none = (lead == 0xed && second >= 0xa0) || (lead == 0xf4 && second >= 0x90);
    return too_long || none ? 0 : n;
}

}  // namespace detail

/// Writes metrics into memory. For one thread at a time.
class metrics_text {
public:
    /// The content type of an HTTP response with this text.
    static constexpr std::string_view content_type = "text/plain; version=0.0.4; charset=utf-8";

    /// Writes to `to`, which must outlive the object.
    explicit metrics_text(std::span<char> to) noexcept : to_(to) {}

    /// Begins a family, with its help text and type. A name has letters, digits, underscores and
    /// colons; other characters are written as underscores. `name` must outlive the samples.
    void family(std::string_view name, metric_type type, std::string_view help) noexcept {
        name_ = name;
        put("# HELP ");
        put_name(name);
        put(" ");
        put_escaped(help, false);
        put("\n# TYPE ");
        put_name(name);
        put(" ");
        put(to_string(type));
        end_line();
    }

    /// Writes a sample of the family that was begun last. Labels without a value are left out,
    /// which means the same in the format.
    template <class N>
    requires(std::integral<N> || std::floating_point<N>) void sample(std::initializer_list<metric_label> labels,
                                                                     N value, std::string_view suffix = {}) noexcept {
        begin_sample(labels, suffix);
        put_number(value);
        end_line();
    }
    /// Writes a duration as a sample, in seconds, exactly.
    void sample(std::initializer_list<metric_label> labels, ns value, std::string_view suffix = {}) noexcept {
        begin_sample(labels, suffix);
        put_seconds(value, false);
        end_line();
    }
    /// Writes a histogram of durations, in seconds. `counts` has the count of each bucket up to
    /// each of the ascending `limits`, and one more beyond the last limit; `sum` is the sum of all
    /// durations. The family must be of type histogram.
    void histogram(std::initializer_list<metric_label> labels, std::span<const ns> limits,
                   std::span<const std::uint64_t> counts, ns sum) noexcept {
        std::uint64_t so_far = 0;
        for (std::size_t i = 0; i < counts.size(); ++i) {
            so_far += counts[i];
            begin_labels(labels, "_bucket");
            put("le=\"");
            i < limits.size() ? put_seconds(limits[i], true) : put("+Inf");
            put("\"} ");
            put_number(so_far);
            end_line();
        }
        sample(labels, sum, "_sum");
        sample(labels, so_far, "_count");
    }
    /// Writes a size as a sample, in bytes.
    void sample(std::initializer_list<metric_label> labels, bytes value, std::string_view suffix = {}) noexcept {
        sample(labels, value.count(), suffix);
    }

    /// The lines that fit; all lines if fits().
    [[nodiscard]] std::string_view text() const noexcept { return {to_.data(), whole_}; }
    /// The bytes that all lines need, including lines that don't fit.
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    /// Whether all lines fit.
    [[nodiscard]] bool fits() const noexcept { return size_ <= to_.size(); }

private:
    void begin_sample(std::initializer_list<metric_label> labels, std::string_view suffix) noexcept {
        put_name(name_);
        put_name(suffix, true, false);
        std::string_view before = "{";
        for (const auto& l : labels) {
            if (l.value.empty()) continue;
            put(before);
            put_name(l.name, false);
            put("=\"");
            put_escaped(l.value, true);
            put("\"");
            before = ",";
        }
        put(before == "{" ? " " : "} ");
    }
    // Writes up to the place where a further label may follow.
    void begin_labels(std::initializer_list<metric_label> labels, std::string_view suffix) noexcept {
        put_name(name_);
        put_name(suffix, true, false);
        put("{");
        for (const auto& l : labels) {
            if (l.value.empty()) continue;
            put_name(l.name, false);
            put("=\"");
            put_escaped(l.value, true);
            put("\",");
        }
    }
    // `short_form` leaves out trailing zeros.
    void put_seconds(ns value, bool short_form) noexcept {
        const auto count = value.count();
        const auto size = count < 0 ? 0 - static_cast<std::uint64_t>(count) : static_cast<std::uint64_t>(count);
        if (count < 0) put("-");
        put_number(size / 1000000000);
        auto rest = size % 1000000000;
        if (rest == 0) return;
        std::array<char, 10> digits{'.'};
        for (std::size_t i = 9; i != 0; --i, rest /= 10) digits[i] = static_cast<char>('0' + rest % 10);
        std::size_t n = digits.size();
        while (short_form && digits[n - 1] == '0') --n;
        put({digits.data(), n});
    }
    void end_line() noexcept {
        put("\n");
        if (fits()) whole_ = size_;
    }

    void put(std::string_view text) noexcept {
        if (size_ < to_.size()) text.copy(to_.data() + size_, to_.size() - size_);
        size_ += text.size();
    }
    void put_name(std::string_view name, bool colons = true, bool first = true) noexcept {
        for (const char c : name) {
            const bool digit = c >= '0' && c <= '9' && !first;
            const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c == ':' && colons);
            put(letter || digit ? std::string_view(&c, 1) : "_");
            first = false;
        }
    }
    void put_escaped(std::string_view text, bool quotes) noexcept {
        while (!text.empty()) {
            const auto n = detail::utf8_length(text);
            const char c = text.front();
            if (n == 0)
                put("\xef\xbf\xbd");
            else if (c == '\n')
                put("\\n");
            else if (c == '\\')
                put("\\\\");
            // as `\x1b`, with the backslash escaped
            else if (detail::printable_character(text) == 0)
                put_control(text.substr(0, n));
            else if (c == '"' && quotes)
                put("\\\"");
            else
                put(text.substr(0, n));
            text.remove_prefix(n == 0 ? 1 : n);
        }
    }
    void put_control(std::string_view bytes) noexcept {
        for (; !bytes.empty(); bytes.remove_prefix(1)) {
            std::array<char, 4> one{};
            (void)detail::copy_printable(bytes.substr(0, 1), one.data(), one.size());
            put("\\"), put({one.data(), one.size()});
        }
    }
    template <class N>
    void put_number(N value) noexcept {
        if constexpr (std::floating_point<N>) {
            if (std::isnan(value)) return put("NaN");
            if (std::isinf(value)) return put(value > 0 ? "+Inf" : "-Inf");
        }
        std::array<char, 32> digits{};
        const auto [end, code] = std::to_chars(digits.data(), digits.data() + digits.size(), value);
        put({digits.data(), static_cast<std::size_t>(end - digits.data())});
    }

    std::span<char> to_;
    std::string_view name_{};
    std::size_t size_ = 0, whole_ = 0;
};

/// The metrics of a device at one point in time. Empty fields aren't written.
struct device_metrics {
    device_id device{};             ///< label "gpu", and "device" as nvidia0
    std::string_view uuid{};        ///< label "UUID"
    std::string_view pci_bus_id{};  ///< label "pci_bus_id"
    /// Label "modelName". `promtool check metrics` complains about this spelling, which is
    /// dcgm-exporter's.
    std::string_view model{};
    std::string_view host{};  ///< label "Hostname"
    bytes capacity{};         ///< the device's memory
    /// The part of the memory that tenants, contexts and other processes use.
    bytes used{};
    /// The percentage of the time since the last reading in which the device was busy.
    double busy_percent = 0;
    bytes set_aside{};  ///< the part of `used` for which no tenant is charged
    /// The last error that the driver reported for the device; 0 if there was none.
    std::uint64_t last_xid = 0;
};

/// The metrics of a tenant at one point in time.
struct tenant_metrics {
    std::string_view name{};  ///< label "tenant"
    tenant_usage usage{};     ///< the result of tenant::usage()
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
// Writes completed submissions, and submissions that never ran, by reason.
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
    write("gpushare_tenant_memory_burst_bytes", gauge, "Memory beyond that, while others don't need it.",
          [](const auto& u) { return u.burst; });
    write("gpushare_tenant_memory_used_bytes", gauge, "Memory that is charged.",
          [](const auto& u) { return u.current; });
    write("gpushare_tenant_memory_idle_bytes", gauge, "Of that, memory that pools keep for the next allocation.",
          [](const auto& u) { return u.idle; });
    write("gpushare_tenant_memory_pending_bytes", gauge, "Of that, memory whose free a stream has yet to reach.",
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

/// The alignment of the cells of a column.
enum class align : std::uint8_t {
    left,  ///< left, for text
    right  ///< right, for figures
};

/// Rows of text under a header. Cells are UTF-8, and all code points count as equally wide. A
/// value; not thread-safe.
class table {
public:
    /// One column.
    struct column {
        std::string header;        ///< the header of the column
        align side = align::left;  ///< the alignment of all its cells
    };

    /// A table without rows.
    table(std::initializer_list<column> columns) : table(std::vector<column>(columns)) {}
    /// A table without rows.
    explicit table(std::vector<column> columns) : columns_(std::move(columns)) {
        for (column& c : columns_) {
            flatten(c.header);
            widths_.push_back(width(c.header));
        }
    }

    /// Adds a row; tabs and line breaks in its cells become spaces. Throws std::invalid_argument,
    /// and adds nothing, unless there is one cell for each column.
    void add_row(std::vector<std::string> cells) {
        if (cells.size() != columns_.size()) {
            throw std::invalid_argument("gpushare::table: a row of " + std::to_string(cells.size()) + " cells for " +
                                        std::to_string(columns_.size()) + " columns");
        }
        for (auto& cell : cells) flatten(cell);
        rows_.push_back(std::move(cells));
        for (std::size_t i = 0; i < columns_.size(); ++i) widths_[i] = std::max(widths_[i], width(rows_.back()[i]));
    }

    /// The number of columns.
    [[nodiscard]] std::size_t num_columns() const noexcept { return columns_.size(); }
    /// The number of rows, without the header.
    [[nodiscard]] std::size_t num_rows() const noexcept { return rows_.size(); }

    /// The text: header, rule and rows, with two spaces between columns. Each line ends with '\n',
    /// and no line has trailing spaces.
    [[nodiscard]] std::string str() const {
        std::string out, rule;
        for (std::size_t i = 0; i < columns_.size(); ++i) rule.append(i == 0 ? 0 : 2, ' ').append(widths_[i], '-');
        append_line(out, [this](std::size_t i) -> std::string_view { return columns_[i].header; });
        out.append(rule).push_back('\n');
        for (const auto& row : rows_) append_line(out, [&row](std::size_t i) -> std::string_view { return row[i]; });
        return out;
    }

private:
    static void flatten(std::string& cell) {
        for (char& c : cell)
            if (c == '\n' || c == '\r' || c == '\t') c = ' ';
    }

    /// The number of code points: all bytes except the continuation bytes of UTF-8.
    static std::size_t width(std::string_view cell) noexcept {
        std::size_t n = 0;
        for (const char c : cell)
            if ((static_cast<unsigned char>(c) & 0xC0U) != 0x80U) ++n;
        return n;
    }

    template <std::invocable<std::size_t> Cell>
    void append_line(std::string& out, Cell cell) const {
        const std::size_t start = out.size();
        for (std::size_t i = 0; i < columns_.size(); ++i) {
            const std::string_view text = cell(i);
            const std::size_t padding = widths_[i] - width(text);
            if (i != 0) out.append(2, ' ');
            if (columns_[i].side == align::right) out.append(padding, ' ');
            out.append(text);
            if (columns_[i].side == align::left) out.append(padding, ' ');
        }
        while (out.size() > start && out.back() == ' ') out.pop_back();
        out.push_back('\n');
    }

    std::vector<column> columns_;
    std::vector<std::size_t> widths_;
    std::vector<std::vector<std::string>> rows_;
};

/// The current state of a tenant: a line for the tenant and a row for each of its devices. Throws
/// std::bad_alloc, and operation_error (closed) as tenant::memory() does. Not for hot paths,
/// because finding the largest free block takes locks.
template <class Tenant>
[[nodiscard]] std::string tenant_table(Tenant& of) {
    const auto tenths = [](std::uint64_t n) { return std::to_string(n / 10) + '.' + std::to_string(n % 10); };
    const auto mib = [](bytes b) { return std::to_string(b.count() >> 20) + " MiB"; };
    const auto spec = of.spec();
    const auto usage = of.usage();
    std::string text = detail::printable(of.name()) + ": " + tenths(spec.compute.permille()) + " % of " +
                       std::to_string(spec.on.size()) + (spec.on.size() == 1 ? " device" : " devices") + ", level " +
                       std::to_string(spec.level.level) + ", " + std::to_string(usage.in_flight) + " in flight, " +
                       std::to_string(usage.waiting) + " waiting, " +
                       tenths(static_cast<std::uint64_t>(usage.device_time.count()) / 100000000) +
                       " s of device time\n";
    using enum align;
    table rows{{"device", right}, {"memory used", right}, {"of", right},
               {"free", right},   {"kept idle", right},   {"largest free", right}};
    for (std::size_t part = 0; part < spec.on.size(); ++part) {
        auto& memory = of.memory(part);
        rows.add_row({std::to_string(spec.on[part].index), mib(memory.limit().usage().current), mib(memory.capacity()),
                      mib(memory.free()), mib(memory.idle()), mib(memory.largest_free())});
    }
    return text += rows.str();
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
