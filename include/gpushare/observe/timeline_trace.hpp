// SPDX-License-Identifier: Apache-2.0
// A timeline of waits, admissions and kernels for each tenant and device, written as a file that
// Perfetto and chrome://tracing open. The trace is off until start(). Memory is bounded: only the
// latest records are kept.
//
//   gpushare::timeline_trace trace;
//   trace.start(65536);    trace.name_device({0}, "left GPU");    trace.name_tenant(chat, "chat");
//   trace.wait({0}, chat, arrived, admitted);    trace.permit({0}, chat, admitted, done);
//   trace.kernel({0}, chat, began, ended);       trace.bound({0}, chat, now, longest_wait);
//   std::ofstream("trace.json") << trace.json();
//
// Tenants are numbers that the embedder chooses, such as the tags of its streams. In the file,
// every device is a process with one row of kernels for each tenant. Overlapping waits and permits
// are stacked.
//
// A limiter_trace draws the work of a limiter: each submission's wait, permit and time on the
// device, and the bound that the limiter promises each tenant on its wait for lower levels. It also
// draws the waits that exceeded the bound. Tenants are identified by their clients' tags and names,
// which a tenancy sets; other programs set them in client_settings.
//
//   gpushare::limiter_trace drawn(trace, shared.limiter_of({0}), {0});
//   ...                                                  // and drawn.collect() now and then
//   drawn.collect();
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/compute/submission.hpp>
#include <gpushare/config.hpp>
#include <gpushare/observe/detail/trace_ring.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A record of events with their times, and its text. Any thread may use the object at any time,
/// except start(), which must not overlap other calls. Recording never allocates, locks or waits,
/// and costs one load while the trace is off. All times must come from one clock.
class timeline_trace {
public:
    /// Starts a new trace, with memory for `records` records (40 bytes each). Throws
    /// std::bad_alloc.
    void start(std::size_t records = 65536) {
        ring_.reserve(records);
        on_.store(true, std::memory_order_relaxed);
    }
    /// Stops recording. Existing records stay.
    void stop() noexcept { on_.store(false, std::memory_order_relaxed); }
    /// Whether the trace is on.
    [[nodiscard]] bool on() const noexcept { return on_.load(std::memory_order_relaxed); }

    /// Sets the device's name in the text; the name may have any bytes. Without a name, the text
    /// has the device's number. Throws std::bad_alloc.
    void name_device(device_id d, std::string_view name) { set_name(devices_, d.index, name); }
    /// Sets a tenant's name in the text.
    void name_tenant(std::uint32_t tenant, std::string_view name) { set_name(tenants_, tenant, name); }

    /// Records that a submission waited from its arrival to its admission.
    void wait(device_id d, std::uint32_t tenant, instant arrived, instant admitted) noexcept {
        record(detail::trace_kind::wait, d, tenant, arrived, admitted);
    }
    /// Records that a submission was in flight from its admission until the limiter noticed its
    /// end.
    void permit(device_id d, std::uint32_t tenant, instant admitted, instant done) noexcept {
        record(detail::trace_kind::permit, d, tenant, admitted, done);
    }
    /// Records that work ran on the device from `began` to `ended`.
    void kernel(device_id d, std::uint32_t tenant, instant began, instant ended) noexcept {
        record(detail::trace_kind::kernel, d, tenant, began, ended);
    }
    /// Records the longest wait promised to the tenant from `at` on.
    void bound(device_id d, std::uint32_t tenant, instant at, ns longest_wait) noexcept {
        record(detail::trace_kind::bound, d, tenant, at, instant{longest_wait});
    }
    /// Records that a wait that ended at `at` exceeded the promised bound by `beyond`.
    void violation(device_id d, std::uint32_t tenant, instant at, ns beyond) noexcept {
        record(detail::trace_kind::violation, d, tenant, at, instant{beyond});
    }

    /// The number of records that were overwritten or dropped.
    [[nodiscard]] std::uint64_t lost() const noexcept { return ring_.lost(); }

    /// The records as text, in the trace event format (the variant "JSON object"). Throws
    /// std::bad_alloc.
    [[nodiscard]] std::string json() {
        const std::lock_guard lock(mutex_);
        std::string out = "{\"displayTimeUnit\": \"ns\", \"traceEvents\": [";
        // The device and tenant of each row, in order of appearance.
        std::vector<std::pair<std::uint32_t, std::uint32_t>> rows;
        std::uint64_t number = 0;
        const char* separator = "\n";
        const auto next = [&] { out += std::exchange(separator, ",\n"); };
        ring_.for_each([&](const detail::trace_record& r) {
            std::size_t row = 0;
            while (row < rows.size() && rows[row] != std::pair(r.device, r.tenant)) ++row;
            if (row == rows.size()) rows.emplace_back(r.device, r.tenant);
            next();
            append(out, r, ++number);
        });
        std::vector<std::uint32_t> seen;
        for (const auto& [device, tenant] : rows) {
            bool first = true;
            for (const auto d : seen) first &= d != device;
            if (first) {
                seen.push_back(device);
                next();
                out += "{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": " + std::to_string(device) +
                       ", \"args\": {\"name\": \"" + name_of(devices_, device, "device ") + "\"}}";
            }
            next();
            out += "{\"ph\": \"M\", \"name\": \"thread_name\", " + place(device, tenant) + ", \"args\": {\"name\": \"" +
                   name_of(tenants_, tenant, "tenant ") + "\"}}";
        }
        out += "\n], \"otherData\": {\"lost\": " + std::to_string(ring_.lost()) + "}}\n";
        return out;
    }

private:
    struct named {
        std::uint32_t id = 0;
        std::string name{};  // escaped
    };

    void record(detail::trace_kind kind, device_id d, std::uint32_t tenant, instant begin, instant end) noexcept {
        if (on()) ring_.push({kind, d.index, tenant, begin.time_since_epoch().count(), end.time_since_epoch().count()});
    }

    void set_name(std::vector<named>& names, std::uint32_t id, std::string_view name) {
        const std::lock_guard lock(mutex_);
        std::string text = escaped(name);
        for (auto& n : names) {
            if (n.id != id) continue;
            n.name = std::move(text);
            return;
        }
        names.push_back({id, std::move(text)});
    }

    [[nodiscard]] static std::string name_of(const std::vector<named>& names, std::uint32_t id, const char* otherwise) {
        for (const auto& n : names)
            if (n.id == id) return n.name;
        return otherwise + std::to_string(id);
    }

    // The text for use in a JSON string. Bytes outside ASCII become U+FFFD, because names may have
    // any bytes and JSON must be UTF-8.
    [[nodiscard]] static std::string escaped(std::string_view text) {
        std::string out;
        for (const char ch : text) {
            const auto byte = static_cast<unsigned char>(ch);
            if (byte == '"' || byte == '\\') {
                out += '\\';
                out += ch;
            } else if (byte < 0x20) {
                char code[8];
                std::snprintf(code, sizeof code, "\\u%04x", unsigned{byte});
                out += code;
            } else {
                out += byte < 0x7f ? std::string(1, ch) : "\\ufffd";
            }
        }
        return out;
    }

    [[nodiscard]] static std::string place(std::uint32_t device, std::uint32_t tenant) {
        return "\"pid\": " + std::to_string(device) + ", \"tid\": " + std::to_string(tenant);
    }

    // The time from `from` to `to`, in microseconds as the format requires. Computed with unsigned
    // arithmetic, because the distance may not fit into ns.
    [[nodiscard]] static std::string micros(std::int64_t to, std::int64_t from = 0) {
        char text[32];
        const auto distance = static_cast<std::uint64_t>(to) - static_cast<std::uint64_t>(from);
        const auto size = to < from ? 0 - distance : distance;
        std::snprintf(text, sizeof text, "%s%llu.%03u", to < from ? "-" : "",
                      static_cast<unsigned long long>(size / 1000), static_cast<unsigned>(size % 1000));
        return text;
    }

    void append(std::string& out, const detail::trace_record& r, std::uint64_t number) const {
        const auto at = place(r.device, r.tenant) + ", \"ts\": " + micros(r.begin);
        switch (r.kind) {
            case detail::trace_kind::kernel:
                out += "{\"ph\": \"X\", \"name\": \"kernel\", " + at + ", \"dur\": " + micros(r.end, r.begin) + "}";
                return;
            case detail::trace_kind::wait: append_span(out, r, "wait", at, number); return;
            case detail::trace_kind::permit: append_span(out, r, "permit", at, number); return;
            case detail::trace_kind::bound:
                out += "{\"ph\": \"C\", \"name\": \"bound of " + name_of(tenants_, r.tenant, "tenant ") + "\", " + at +
                       ", \"args\": {\"us\": " + micros(r.end) + "}}";
                return;
            case detail::trace_kind::violation:
                out += "{\"ph\": \"i\", \"s\": \"t\", \"name\": \"bound violated\", " + at +
                       ", \"args\": {\"us beyond\": " + micros(r.end) + "}}";
                return;
        }
    }

    // Waits and permits of one tenant overlap, but spans in one row must not overlap. So each span
    // has an id.
    static void append_span(std::string& out, const detail::trace_record& r, const char* name, const std::string& begin,
                            std::uint64_t number) {
        const auto head = std::string("\"cat\": \"") + name + "\", \"name\": \"" + name +
                          "\", \"id\": " + std::to_string(number) + ", ";
        out += "{\"ph\": \"b\", " + head + begin + "},\n{\"ph\": \"e\", " + head + place(r.device, r.tenant) +
               ", \"ts\": " + micros(r.end) + "}";
    }

    std::atomic<bool> on_{false};
    detail::trace_ring ring_;
    std::mutex mutex_;  // guards the names
    std::vector<named> devices_, tenants_;
};

/// Moves a limiter's records into a trace. The limiter keeps records while this object exists. The
/// object can't be copied or moved. One thread at a time uses it, while other threads use the
/// limiter and the trace, which must outlive it.
template <class Limiter>
class limiter_trace {
public:
    /// Records the limiter `from` of device `d`. `most` is the number of submissions that may end
    /// between two calls of collect() (160 bytes each). If more end, only the latest are drawn.
    /// Throws std::bad_alloc.
    limiter_trace(timeline_trace& to, Limiter& from, device_id d, std::size_t most = 16384)
        : to_(to), from_(from), device_(d) {
        from_.record(most);
    }
    limiter_trace(const limiter_trace&) = delete;             ///< Not copied.
    limiter_trace& operator=(const limiter_trace&) = delete;  ///< Not copied.

    /// Stops the limiter's recording. Records that weren't collected are lost.
    ~limiter_trace() { from_.record(0); }

    /// Draws the submissions that have ended since the last call. Draws a tenant's bound with the
    /// first of them, and again when the bound changes. May throw std::bad_alloc when a tenant
    /// appears for the first time; a later call then draws the rest.
    void collect() {
        // The trace may have overwritten the bounds, or have restarted since they were drawn.
        for (auto& b : bounds_) b.second = ns{-1};
        do {
            for (; drawn_ != taken_; ++drawn_) draw(some_[drawn_]);
            drawn_ = taken_ = 0;
            taken_ = from_.take_records(some_);
        } while (taken_ != 0);
    }

    /// The number of completed submissions that won't be drawn, because `most` was too small.
    [[nodiscard]] std::uint64_t lost() const noexcept { return from_.records_lost(); }

private:
    void draw(const submission_record& r) {
        ns& bound = last_bound(r);  // may throw, so it comes before anything is drawn
        if (r.arrived < r.let_in) to_.wait(device_, r.tag, r.arrived, r.let_in);
        to_.permit(device_, r.tag, r.let_in, r.noticed);
        to_.kernel(device_, r.tag, r.began, r.ended);
        if (r.bound != std::exchange(bound, r.bound)) to_.bound(device_, r.tag, r.arrived, r.bound);
        if (r.beyond > ns{0}) to_.violation(device_, r.tag, r.began, r.beyond);
    }

    ns& last_bound(const submission_record& r) {
        const auto found = std::ranges::find(bounds_, r.tag, [](const auto& b) { return b.first; });
        if (found != bounds_.end()) return found->second;
        if (!r.name.empty()) to_.name_tenant(r.tag, r.name.view());
        return bounds_.emplace_back(r.tag, ns{-1}).second;
    }

    timeline_trace& to_;
    Limiter& from_;
    device_id device_;
    // Records taken from the limiter, which are drawn from drawn_ on.
    std::array<submission_record, 64> some_{};
    std::size_t drawn_ = 0, taken_ = 0;
    // The bound that this collect() has drawn last for each tenant; -1 for none.
    std::vector<std::pair<std::uint32_t, ns>> bounds_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
