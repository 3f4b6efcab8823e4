// SPDX-License-Identifier: Apache-2.0
// A tenant's usage between two points in time, as a value and as a line of text, and invoices made
// of such lines. All figures are whole numbers, so invoices of adjacent periods sum to the invoice
// of the whole period, to the last ns and byte.
//
//   gpushare::usage_invoices march{begin_of_march, begin_of_april};
//   gpushare::read_usage(text, [&](const gpushare::usage_line& l) { march.add(l); });
//   march.of("chat").device_time;        march.of("chat").reserved.byte_seconds();
//
// A line is: from, until (ns since 1970), device time (ns), bytes x ns reserved, bytes x ns used,
// requests, refusals, name, checksum.
//
// A usage_meter turns readings of what a tenant uses (counters, and the memory that it has at the moment) into lines: what
// it used in between. A value: time and readings come in as arguments.
//
//   gpushare::usage_meter chat_meter{"chat"};
//   const auto now = std::chrono::system_clock::now();                                                  // once a second:
//   if (auto line = chat_meter.read(now, gpushare::reading_of(chat.usage()))) journal.append({&*line, 1});
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/detail/parse.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The time of day: bills outlive the steady clock of a process.
using wall_time = std::chrono::sys_time<ns>;

/// An amount of memory over time, in bytes x ns. 128 bits: 80 GiB fill 64 bits within four minutes.
class byte_time {
public:
    __extension__ using wide = unsigned __int128;  ///< what it is counted in

    constexpr byte_time() noexcept = default;
    /// Bytes x ns.
    constexpr explicit byte_time(wide count) noexcept : count_(count) {}
    /// So many bytes for so long; 0 for a time that runs backwards.
    constexpr byte_time(bytes size, ns time) noexcept
        : count_(time.count() > 0 ? wide{size.count()} * static_cast<std::uint64_t>(time.count()) : wide{0}) {}

    /// Bytes x ns.
    [[nodiscard]] constexpr wide count() const noexcept { return count_; }
    /// Bytes x seconds, rounded: for people.
    [[nodiscard]] constexpr double byte_seconds() const noexcept { return static_cast<double>(count_) / 1e9; }

    friend constexpr auto operator<=>(byte_time, byte_time) = default;
    friend constexpr bool operator==(byte_time, byte_time) = default;
    /// The sum.
    friend constexpr byte_time operator+(byte_time a, byte_time b) noexcept { return byte_time{a.count_ + b.count_}; }
    /// The rest of `a`, which isn't less.
    friend constexpr byte_time operator-(byte_time a, byte_time b) noexcept { return byte_time{a.count_ - b.count_}; }
    /// Adds.
    constexpr byte_time& operator+=(byte_time b) noexcept { return *this = *this + b; }

private:
    wide count_ = 0;
};

/// The amounts used, and the number of requests.
struct usage_amounts {
    ns device_time{};            ///< charged
    byte_time reserved{};        ///< memory that was promised, used or not
    byte_time used{};            ///< memory that was charged
    std::uint64_t requests = 0;  ///< that were answered
    std::uint64_t refusals = 0;  ///< that were refused

    friend constexpr bool operator==(const usage_amounts&, const usage_amounts&) = default;
    /// Adds each.
    constexpr usage_amounts& operator+=(const usage_amounts& o) noexcept {
        device_time += o.device_time;
        reserved += o.reserved;
        used += o.used;
        requests += o.requests;
        refusals += o.refusals;
        return *this;
    }
};

/// A tenant's usage from `from` until before `until`.
struct usage_line {
    std::string tenant{};     ///< its name, of any bytes, not empty
    wall_time from{};         ///< since 1970
    wall_time until{};        ///< later than `from`
    usage_amounts amounts{};  ///< in between

    friend bool operator==(const usage_line&, const usage_line&) = default;
};

namespace detail {

// The amount of `all` in the first `part` of `length`, if it comes evenly. Rounded down; a part of
// a split is the difference of two such amounts, so the parts sum to `all`.
template <class N>
[[nodiscard]] constexpr N first_part(N all, std::uint64_t part, std::uint64_t length) noexcept {
    using wide = byte_time::wide;
    const wide n = all;
    return static_cast<N>(n / length * part + n % length * part / length);
}

[[nodiscard]] inline std::string decimal(byte_time::wide n) {
    std::string text;
    do {
        text += static_cast<char>('0' + static_cast<int>(n % 10));
        n /= 10;
    } while (n != 0);
    std::reverse(text.begin(), text.end());
    return text;
}

// Digits and nothing else, of what fits.
[[nodiscard]] inline std::optional<byte_time::wide> parse_wide(std::string_view text) noexcept {
    constexpr auto most = ~byte_time::wide{0};
    if (text.empty()) return {};
    byte_time::wide n = 0;
    for (const char c : text) {
        if (c < '0' || c > '9') return {};
        const auto digit = static_cast<unsigned>(c - '0');
        if (n > (most - digit) / 10) return {};
        n = n * 10 + digit;
    }
    return n;
}

// A name for a line, with characters that a line must not contain as %XX.
[[nodiscard]] inline std::string escaped_name(std::string_view name) {
    std::string out;
    for (const char c : name) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte > 0x20 && byte != 0x7f && byte != '%') {
            out += c;
            continue;
        }
        char code[4];
        std::snprintf(code, sizeof code, "%%%02X", unsigned{byte});
        out += code;
    }
    return out;
}
[[nodiscard]] inline std::optional<std::string> name_of_escaped(std::string_view text) {
    const auto digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1; };
    std::string out;
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] != '%') {
            out += text[i];
            continue;
        }
        if (text.size() - i < 3 || digit(text[i + 1]) < 0 || digit(text[i + 2]) < 0) return {};
        out += static_cast<char>(digit(text[i + 1]) * 16 + digit(text[i + 2]));
        i += 2;
    }
    if (out.empty() || escaped_name(out) != text) return {};  // one way to write each name
    return out;
}

// FNV-1a. A process that can write to the file can forge lines; the checksum finds torn ones.
[[nodiscard]] constexpr std::uint32_t line_checksum(std::string_view text) noexcept {
    std::uint32_t sum = 2166136261U;
    for (const char c : text) sum = (sum ^ static_cast<unsigned char>(c)) * 16777619U;
    return sum;
}
[[nodiscard]] inline std::string checksum_text(std::string_view text) {
    char sum[9];
    std::snprintf(sum, sizeof sum, "%08x", line_checksum(text));
    return sum;
}

}  // namespace detail

/// The line as text, with its line feed. Throws std::bad_alloc.
[[nodiscard]] inline std::string to_text(const usage_line& l) {
    std::string text = std::to_string(l.from.time_since_epoch().count());
    const auto add = [&text](const std::string& field) { (text += ' ') += field; };
    add(std::to_string(l.until.time_since_epoch().count()));
    add(std::to_string(l.amounts.device_time.count()));
    add(detail::decimal(l.amounts.reserved.count()));
    add(detail::decimal(l.amounts.used.count()));
    add(std::to_string(l.amounts.requests));
    add(std::to_string(l.amounts.refusals));
    add(detail::escaped_name(l.tenant));
    add(detail::checksum_text(text));
    return text += '\n';
}

namespace detail {

// The words of a line, one behind the other. Not `good` from the first one on that isn't what it should be.
struct line_words {
    std::string_view rest;
    bool good = true;

    std::string_view word() noexcept {
        const auto w = rest.substr(0, rest.find(' '));
        good = good && w.size() < rest.size();
        rest.remove_prefix(std::min(w.size() + 1, rest.size()));
        return w;
    }
    std::uint64_t whole(std::uint64_t most = std::numeric_limits<std::uint64_t>::max()) noexcept {
        const auto n = parse_whole(word());
        good = good && n.code == parse_code::ok && n.value <= most;
        return n.value;
    }
    ns time() noexcept {
        constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
        return ns{static_cast<std::int64_t>(std::min(whole(most), most))};
    }
    // Where a clock isn't set yet it may be before 1970.
    wall_time day() noexcept {
        const bool before = rest.size() > 1 && rest[0] == '-' && rest[1] != '0';
        if (before) rest.remove_prefix(1);
        const ns since = time();
        return wall_time{before ? -since : since};
    }
    byte_time wide() noexcept {
        const auto n = parse_wide(word());
        good = good && n.has_value();
        return byte_time{n.value_or(0)};
    }
};

}  // namespace detail

/// The line whose text that is, without the line feed. Nothing for any other text: it was torn. Throws std::bad_alloc.
[[nodiscard]] inline std::optional<usage_line> parse_usage_line(std::string_view text) {
    const auto space = text.rfind(' ');
    if (space == std::string_view::npos ||
        text.substr(space + 1) != std::string_view(detail::checksum_text(text.substr(0, space))))
        return {};
    detail::line_words words{text.substr(0, space)};
    usage_line l;
    l.from = words.day();
    l.until = words.day();
    l.amounts.device_time = words.time();
    l.amounts.reserved = words.wide();
    l.amounts.used = words.wide();
    l.amounts.requests = words.whole();
    l.amounts.refusals = words.whole();
    auto name = detail::name_of_escaped(words.rest);
    if (!words.good || !name || l.from >= l.until) return {};
    l.tenant = *std::move(name);
    return l;
}

/// Calls `each(line)` for each line of a text that is whole, in their order. Returns how many
/// aren't, that without a line feed at the end among them: a process that is killed leaves at most
/// one. Throws std::bad_alloc, and what `each` throws.
template <class F>
std::size_t read_usage(std::string_view text, F each) {
    std::size_t torn = 0;
    while (!text.empty()) {
        const auto end = text.find('\n');
        if (end == std::string_view::npos) return torn + 1;
        if (const auto line = parse_usage_line(text.substr(0, end)))
            each(*line);
        else
            ++torn;
        text.remove_prefix(end + 1);
    }
    return torn;
}

/// The part of a line between two points in time, if it came evenly. The parts of any split sum to
/// the line. Nothing of a line without a length.
[[nodiscard]] constexpr usage_amounts part_of(const usage_line& l, wall_time from, wall_time until) noexcept {
    if (l.from >= l.until) return {};
    const auto since = [&](wall_time t) {
        return static_cast<std::uint64_t>((std::clamp(t, l.from, l.until) - l.from).count());
    };
    const auto length = static_cast<std::uint64_t>((l.until - l.from).count());
    const auto begin = since(from), end = std::max(begin, since(until));
    const auto between = [&](auto all) {
        return static_cast<decltype(all)>(detail::first_part(all, end, length) -
                                          detail::first_part(all, begin, length));
    };
    return {ns{static_cast<std::int64_t>(between(static_cast<std::uint64_t>(l.amounts.device_time.count())))},
            byte_time{between(l.amounts.reserved.count())}, byte_time{between(l.amounts.used.count())},
            between(l.amounts.requests), between(l.amounts.refusals)};
}

/// Each tenant's usage from one point in time until before another. A value.
class usage_invoices {
public:
    /// Invoices for [from, until).
    usage_invoices(wall_time from, wall_time until) noexcept : from_(from), until_(until) {}

    /// Counts what of the line falls into the period. Throws std::bad_alloc.
    void add(const usage_line& l) {
        if (l.until <= from_ || l.from >= until_) return;
        tenants_[l.tenant] += part_of(l, from_, until_);
    }
    /// Nothing for one that no line names.
    [[nodiscard]] usage_amounts of(std::string_view tenant) const {
        const auto found = tenants_.find(tenant);
        return found == tenants_.end() ? usage_amounts{} : found->second;
    }
    /// By name, in its order.
    [[nodiscard]] const std::map<std::string, usage_amounts, std::less<>>& all() const noexcept { return tenants_; }

private:
    wall_time from_, until_;
    std::map<std::string, usage_amounts, std::less<>> tenants_;
};

/// A tenant's usage at one point in time.
struct usage_reading {
    ns device_time{};            ///< counter: charged since it was admitted
    bytes reserved{};            ///< now: memory that is promised to it
    bytes used{};                ///< now: memory that it is charged for
    std::uint64_t requests = 0;  ///< counter: that were answered
    std::uint64_t refusals = 0;  ///< counter: that were refused
};

/// A reading of a tenant, where a request is a submission: a server that counts its own requests
/// overwrites `requests` and `refusals`.
[[nodiscard]] inline usage_reading reading_of(const tenant_usage& u) noexcept {
    return {u.device_time, u.memory, u.current, u.completed, u.refused + u.dropped};
}

/// Readings of one tenant. Memory counts from one reading to the next with what it was at the first
/// of the two; so who wants it exact reads when it changes as well. Counters are exact whenever
/// they are read: the lines sum to the last reading less the first. The time of day may be set: who
/// reads by a steady clock as well bills the time that passed, whatever the day says. By the time
/// of day alone, no memory is billed for the one reading before which it was set back, and too much
/// for that before which it was set forward; counters are right.
class usage_meter {
public:
    /// For the tenant of this name, which isn't empty. If a tenant is admitted anew, read the last
    /// of its predecessor's counters, then call restarted(), or begin with a new meter.
    explicit usage_meter(std::string tenant) : tenant_(std::move(tenant)) {}

    /// The usage since the last reading. Nothing for the first reading, or if neither time has
    /// passed nor a counter moved. If the time of day was set back, counters have a line of 1 ns.
    /// If a counter is lower than before without restarted(), nothing is billed for it until it has
    /// passed its old value. Throws std::bad_alloc, and then nothing was read.
    [[nodiscard]] std::optional<usage_line> read(wall_time now, const usage_reading& r) {
        return line(now, last_ ? now - last_->first : ns{}, r);
    }
    /// The same where `passing`, of a clock that is never set, tells how much time has passed: a
    /// line ends `now`, and is as long as that. All readings of a meter are of one kind.
    [[nodiscard]] std::optional<usage_line> read(wall_time now, instant passing, const usage_reading& r) {
        auto l = line(now, passing_ ? passing - *passing_ : ns{}, r);
        passing_ = passing;
        return l;
    }

    /// Counters have begun anew since the last reading, as of a tenant that was admitted again: the
    /// next line counts from the counters of `from`. One that is kept elsewhere and went on is
    /// given with its latest value. Before the first reading there is nothing to tell.
    void restarted(const usage_reading& from = {}) noexcept {
        if (!last_) return;
        auto& last = last_->second;
        last.device_time = from.device_time;
        last.requests = from.requests;
        last.refusals = from.refusals;
    }

private:
    [[nodiscard]] std::optional<usage_line> line(wall_time now, ns passed, const usage_reading& r) {
        if (!last_) {
            last_.emplace(now, r);
            return {};
        }
        const auto& old = last_->second;
        const auto since = [](auto is, auto was) { return is < was ? decltype(is){} : is - was; };
        const usage_amounts used{since(r.device_time, old.device_time), byte_time{old.reserved, passed},
                                 byte_time{old.used, passed}, since(r.requests, old.requests),
                                 since(r.refusals, old.refusals)};
        std::optional<usage_line> l;
        if (passed > ns{} || used != usage_amounts{}) l = {tenant_, now - std::max(passed, ns{1}), now, used};
        usage_reading last = r;  // of a counter that fell, the highest
        last.device_time = std::max(r.device_time, old.device_time);
        last.requests = std::max(r.requests, old.requests);
        last.refusals = std::max(r.refusals, old.refusals);
        last_.emplace(now, last);
        return l;
    }

    std::string tenant_;
    std::optional<instant> passing_;
    std::optional<std::pair<wall_time, usage_reading>> last_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
