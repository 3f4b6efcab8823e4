// SPDX-License-Identifier: Apache-2.0
// Tenants' usage, from the meter to the bill. Meters read usage and make lines of text, a journal
// is a file of lines, and invoices add the lines up.
//
// A journal only ever adds lines. A process that is killed loses at most the line that it was
// writing. The journal rotates a file that has become large: it gives the file a number and begins
// a new one. Needs POSIX.
//
//   gpushare::usage_journal journal{"/var/lib/server/usage"};
//   journal.append(lines);  // from usage_meter::read
//   auto torn = gpushare::usage_journal::read("/var/lib/server/usage", [&](const gpushare::usage_line& l) { bill.add(l); });
//
// Other programs may rotate the file, too. Each append checks whether the path still leads to this
// file (inode), and checks the file's length. If the file was renamed or removed, the journal
// begins a new file; if the file was truncated, the journal continues from there. A tool that
// copies and truncates loses the lines that come between the two steps, so let the tool rename the
// file. A write beyond the process's file size limit (SIGXFSZ) is an error like a full disk.
//
// A usage_line is a tenant's usage between two points in time. All figures are whole numbers, so
// invoices of adjacent periods sum to the invoice of the whole period, to the last ns and byte.
//
//   gpushare::usage_invoices march{begin_of_march, begin_of_april};
//   gpushare::read_usage(text, [&](const gpushare::usage_line& l) { march.add(l); });
//   march.of("chat").device_time;        march.of("chat").reserved.byte_seconds();
//
// A line has: from, until (ns since 1970), device time (ns), bytes x ns reserved, bytes x ns used,
// requests, refusals, name, checksum.
//
// A usage_meter turns readings of a tenant's usage (counters, and its current memory) into lines
// with the usage between two readings. A meter is a value: the caller passes time and readings.
//
//   gpushare::usage_meter chat_meter{"chat"};
//   const auto now = std::chrono::system_clock::now();  // once a second:
//   if (auto line = chat_meter.read(now, gpushare::reading_of(chat.usage()))) journal.append({&*line, 1});
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/parse.hpp>
#include <gpushare/error.hpp>
#include <gpushare/tenant/specification.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The time of day, because a bill outlives the steady clock of a process.
using wall_time = std::chrono::sys_time<ns>;

/// An amount of memory over time, in bytes x ns. It has 128 bits, because 80 GiB fill 64 bits
/// within four minutes.
class byte_time {
public:
    /// The type of the count. Not a `using`, which nvcc rejects here.
    __extension__ typedef unsigned __int128 wide;

    constexpr byte_time() noexcept = default;
    /// An amount in bytes x ns.
    constexpr explicit byte_time(wide count) noexcept : count_(count) {}
    /// `size` bytes for `time`; 0 for a negative time.
    constexpr byte_time(bytes size, ns time) noexcept
        : count_(time.count() > 0 ? wide{size.count()} * static_cast<std::uint64_t>(time.count()) : wide{0}) {}

    /// The amount in bytes x ns.
    [[nodiscard]] constexpr wide count() const noexcept { return count_; }
    /// The amount in bytes x seconds, rounded, for people.
    [[nodiscard]] constexpr double byte_seconds() const noexcept { return static_cast<double>(count_) / 1e9; }

    friend constexpr auto operator<=>(byte_time, byte_time) = default;
    friend constexpr bool operator==(byte_time, byte_time) = default;
    /// The sum.
    friend constexpr byte_time operator+(byte_time a, byte_time b) noexcept { return byte_time{a.count_ + b.count_}; }
    /// The difference. `a` must not be less than `b`.
    friend constexpr byte_time operator-(byte_time a, byte_time b) noexcept { return byte_time{a.count_ - b.count_}; }
    /// Adds an amount.
    constexpr byte_time& operator+=(byte_time b) noexcept { return *this = *this + b; }

private:
    wide count_ = 0;
};

/// The amounts used, and the number of requests.
struct usage_amounts {
    ns device_time{};            ///< device time that was charged
    byte_time reserved{};        ///< memory that was promised, whether used or not
    byte_time used{};            ///< memory that was charged
    std::uint64_t requests = 0;  ///< requests that were answered
    std::uint64_t refusals = 0;  ///< requests that were refused

    friend constexpr bool operator==(const usage_amounts&, const usage_amounts&) = default;
    /// Adds each amount. Device time saturates at the longest duration.
    constexpr usage_amounts& operator+=(const usage_amounts& o) noexcept {
        device_time = saturating_add(device_time, o.device_time);
        reserved += o.reserved;
        used += o.used;
        requests += o.requests;
        refusals += o.refusals;
        return *this;
    }
};

/// A tenant's usage from `from` until before `until`.
struct usage_line {
    std::string tenant{};     ///< the tenant's name, of any bytes, not empty
    wall_time from{};         ///< since 1970
    wall_time until{};        ///< later than `from`
    usage_amounts amounts{};  ///< the amounts in between

    friend bool operator==(const usage_line&, const usage_line&) = default;
};

namespace detail {

// The amount of `all` in the first `part` of `length`, if the amount is spread evenly. Rounded
// down. A part of a split is the difference of two such amounts, so the parts sum to `all`.
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

// Reads digits, and nothing else, of a number that fits.
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

// A name as a line has it: characters that a line must not contain are written as %XX.
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
    if (out.empty() || escaped_name(out) != text) return {};  // each name has only one spelling
    return out;
}

// FNV-1a. The checksum finds torn lines; it doesn't stop forgery by processes that can write to the
// file.
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

// The words of a line, one after the other. `good` is false from the first invalid word on.
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
    // A clock that isn't set yet may be before 1970.
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

/// The line of that text, without the line feed. Nothing for any other text, which means that the
/// line was torn. Throws std::bad_alloc.
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

/// Calls `each(line)` for each whole line of a text, in order. Returns the number of broken lines,
/// including a last line without a line feed. A killed process leaves at most one broken line.
/// Throws std::bad_alloc, and what `each` throws.
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

/// The part of a line between two points in time, if the usage is spread evenly. The parts of any
/// split sum to the line. Zero for a line without a length.
[[nodiscard]] constexpr usage_amounts part_of(const usage_line& l, wall_time from, wall_time until) noexcept {
    if (l.from >= l.until) return {};
    const auto count = [](wall_time t) { return static_cast<std::uint64_t>(t.time_since_epoch().count()); };
    // Unsigned, because a line of a damaged file may be longer than the longest duration.
    const auto since = [&](wall_time t) { return count(std::clamp(t, l.from, l.until)) - count(l.from); };
    const auto length = count(l.until) - count(l.from);
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

    /// Counts the part of the line that falls into the period. Throws std::bad_alloc.
    void add(const usage_line& l) {
        if (l.until <= from_ || l.from >= until_) return;
        tenants_[l.tenant] += part_of(l, from_, until_);
    }
    /// The usage of a tenant; zero for a tenant that no line names.
    [[nodiscard]] usage_amounts of(std::string_view tenant) const {
        const auto found = tenants_.find(tenant);
        return found == tenants_.end() ? usage_amounts{} : found->second;
    }
    /// All tenants, ordered by name.
    [[nodiscard]] const std::map<std::string, usage_amounts, std::less<>>& all() const noexcept { return tenants_; }

private:
    wall_time from_, until_;
    std::map<std::string, usage_amounts, std::less<>> tenants_;
};

/// A tenant's usage at one point in time.
struct usage_reading {
    /// Counter: device time that was charged since the tenant's admission.
    ns device_time{};
    bytes reserved{};            ///< current: memory that is promised to the tenant
    bytes used{};                ///< current: memory that the tenant is charged for
    std::uint64_t requests = 0;  ///< counter: requests that were answered
    std::uint64_t refusals = 0;  ///< counter: requests that were refused
};

/// A reading of a tenant, where each submission counts as a request. A server that counts its own
/// requests overwrites `requests` and `refusals`.
[[nodiscard]] inline usage_reading reading_of(const tenant_usage& u) noexcept {
    return {u.device_time, u.memory, u.current, u.completed, u.refused + u.dropped};
}

/// Turns readings of one tenant into lines of usage. Between two readings, memory counts with its
/// value at the first reading. To bill memory exactly, read also whenever memory changes. Counters
/// are always exact: the lines sum to the last reading minus the first.
///
/// The time of day may be set while the meter runs. With readings of a steady clock as well, the
/// bill is for the time that passed, whatever the time of day says. With the time of day alone, the
/// reading after the clock was set back bills no memory, and the reading after the clock was set
/// forward bills too much memory; counters stay right.
class usage_meter {
public:
    /// A meter for the tenant of this name, which isn't empty. If a tenant is admitted again, read
    /// the old counters for the last time. Then call restarted(), or begin with a new meter.
    explicit usage_meter(std::string tenant) : tenant_(std::move(tenant)) {}

    /// The usage since the last reading. There is no line for the first reading, or if neither time
    /// has passed nor a counter has changed. If the time of day was set back, counters get a line
    /// of 1 ns. If a counter is lower than before without restarted(), it isn't billed until it has
    /// passed its old value. Throws std::bad_alloc, which leaves the meter as before the reading.
    [[nodiscard]] std::optional<usage_line> read(wall_time now, const usage_reading& r) {
        return line(now, last_ ? now - last_->first : ns{}, r);
    }
    /// The same with `passing`, the time of a clock that is never set. That clock tells how much
    /// time has passed: the line ends at `now` and has that length. All readings of a meter must be
    /// of one kind.
    [[nodiscard]] std::optional<usage_line> read(wall_time now, instant passing, const usage_reading& r) {
        auto l = line(now, passing_ ? passing - *passing_ : ns{}, r);
        passing_ = passing;
        return l;
    }

    /// Says that the counters restarted since the last reading, as they do for a tenant that was
    /// admitted again. The next line counts from the counters of `from`. For a counter that is kept
    /// elsewhere and continued, pass its latest value. Not needed before the first reading.
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
        usage_reading last = r;  // for a counter that fell: its highest value
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

/// Options of a usage_journal.
struct journal_options {
    bytes rotate_at{std::uint64_t{64} << 20};  ///< a file that would be larger is rotated first
    /// Whether each append waits until the disk has the lines. They then survive a power cut, and
    /// not only a killed process.
    bool sync = false;
};

namespace detail {

/// While the object lives, the file size limit doesn't end the process: the call that exceeds the
/// limit fails with EFBIG, as if the signal were ignored. Affects only the calling thread. A signal
/// that was pending before stays pending.
class no_file_size_signal {
public:
    no_file_size_signal() noexcept {
        sigset_t pending;
        ::sigemptyset(&this_one_);
        ::sigaddset(&this_one_, SIGXFSZ);
        pending_before_ = ::sigpending(&pending) == 0 && ::sigismember(&pending, SIGXFSZ) == 1;
        blocked_ = ::pthread_sigmask(SIG_BLOCK, &this_one_, &before_) == 0;
    }
    no_file_size_signal(const no_file_size_signal&) = delete;
    no_file_size_signal& operator=(const no_file_size_signal&) = delete;
    ~no_file_size_signal() {
        if (!blocked_) return;
        const int error = errno;
        const timespec at_once{};
        // The kernel sends the signal to the thread that writes, so the signal is here by now, and
        // is this thread's own.
        if (!pending_before_)
            while (::sigtimedwait(&this_one_, nullptr, &at_once) < 0 && errno == EINTR) {
            }
        (void)::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
        errno = error;
    }

private:
    sigset_t this_one_{}, before_{};
    bool blocked_ = false, pending_before_ = false;
};

}  // namespace detail

/// The file to which lines are added. A journal can be moved but not copied, and one thread at a
/// time uses it. A second journal of the same file is refused, even in another process.
class usage_journal {
public:
    /// Opens or makes `path`. Rotated files are `path`.1, `path`.2 and so on, from the oldest. A
    /// partial line of a killed process stays in the file, marked as torn. Throws operation_error:
    /// io_failed with errno in `asked`, or in_flight if another journal has the file.
    explicit usage_journal(std::string path, journal_options o = {}) : path_(std::move(path)), options_(o) {
        if (const failure why = open(); why.code != errc::none) raise(why, {}, "opening a usage journal");
    }
    /// Takes over the file.
    usage_journal(usage_journal&& other) noexcept
        : path_(std::move(other.path_)),
          options_(other.options_),
          file_(std::exchange(other.file_, -1)),
          size_(other.size_),
          torn_(other.torn_),
          half_written_(other.half_written_) {}
    usage_journal& operator=(usage_journal&&) = delete;
    ~usage_journal() { close(); }

    /// Adds lines: either all of them count, or none. A failed call may be repeated. If the disk
    /// fails and a half-written batch can't be taken back immediately, the journal takes the batch
    /// back before it adds any further line. If this process ends before that, whole lines of the
    /// batch count. Fails with io_failed with errno in `asked`, invalid_specification for an
    /// invalid line, or out_of_memory for the host's memory.
    failure try_append(std::span<const usage_line> lines) noexcept try {
        std::string text;
        for (const auto& l : lines) {
            if (!takes(l)) return {.code = errc::invalid_specification, .because = reason::bad_usage_line};
            text += to_text(l);
        }
        if (text.empty()) return {};
        if (const failure why = find_file(); why.code != errc::none) return why;
        if (size_ != 0 && size_ + text.size() > options_.rotate_at.count())
            if (const failure why = rotate(); why.code != errc::none) return why;
        return write(text);
    } catch (const error& e) {
        return e.figures();
    } catch (...) {
        return detail::no_host_memory;
    }
    /// Whether a line can be written: it has a name, a length and a beginning that can be read
    /// again, and no negative amount.
    [[nodiscard]] static bool takes(const usage_line& l) noexcept {
        return !l.tenant.empty() && l.from < l.until && l.from > wall_time::min() && l.amounts.device_time >= ns{};
    }
    /// Adds the valid lines, and leaves the invalid lines in `waiting`, so that an invalid line
    /// doesn't keep other lines from being billed. If the file can't be written, all lines stay
    /// there. Fails as try_append, but invalid_specification means that some lines are left.
    failure append_from(std::vector<usage_line>& waiting) noexcept try {
        const auto bad = std::stable_partition(waiting.begin(), waiting.end(), takes);
        const auto good = static_cast<std::size_t>(bad - waiting.begin());
        if (const failure why = try_append(std::span(waiting).first(good)); why.code != errc::none) return why;
        waiting.erase(waiting.begin(), bad);
        if (waiting.empty()) return {};
        return {.code = errc::invalid_specification, .because = reason::bad_usage_line};
    } catch (...) {
        return detail::no_host_memory;
    }
    /// try_append(), but throws the failure.
    void append(std::span<const usage_line> lines) {
        if (const failure why = try_append(lines); why.code != errc::none)
            raise(why, {}, "appending to a usage journal");
    }

    /// Rotates the file: renames it with a number, and begins a new one. Fails as try_append does.
    failure rotate() noexcept try {
        // An earlier call renamed the file, but couldn't begin a new one.
        if (file_ < 0) return open();
        if (const failure why = take_back(); why.code != errc::none) return why;
        if (is_at_path()) {
            const auto aside = numbers_aside(path_);
            // EEXIST: another process was faster, or the numbers have begun again at 0.
            int why = EEXIST;
            for (auto number = aside.empty() ? 1 : aside.back() + 1; why == EEXIST; ++number)
                why = put_aside(path_ + '.' + std::to_string(number));
            // ENOENT: another process has rotated it.
            if (why != 0 && why != ENOENT) return {.code = errc::io_failed, .asked = static_cast<std::uint64_t>(why)};
        }
        close();
        return open();
    } catch (const error& e) {
        return e.figures();
    } catch (...) {
        return detail::no_host_memory;
    }

    /// Calls `each(line)` for each line, the oldest first, including the lines in rotated files.
    /// Returns the number of torn lines. Also works while a journal writes. Throws operation_error
    /// (io_failed), std::bad_alloc, and the exceptions of `each`.
    template <class F>
    static std::size_t read(const std::string& path, F each) {
        // opened first, so that a file that is rotated in the meantime isn't read twice
        const file current(path);
        std::size_t torn = 0;
        for (const auto n : numbers_aside(path)) {
            const file aside(path + '.' + std::to_string(n));
            if (aside.id() != current.id()) torn += read_lines(aside, each);
        }
        return torn + read_lines(current, each);
    }

private:
    [[nodiscard]] static failure failed() noexcept {
        return {.code = errc::io_failed, .asked = static_cast<std::uint64_t>(errno)};
    }

    failure open() noexcept {
        const failure why = [this]() -> failure {
            file_ = ::open(path_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0640);
            if (file_ < 0) return failed();
            if (::flock(file_, LOCK_EX | LOCK_NB) != 0)
                return errno == EWOULDBLOCK ? failure{errc::in_flight} : failed();
            if (const failure unseen = look_at_end(); unseen.code != errc::none) return unseen;
            return options_.sync ? sync_folder() : failure{};
        }();
        if (why.code != errc::none) close();
        return why;
    }
    void close() noexcept {
        if (file_ >= 0) (void)::close(std::exchange(file_, -1));
        size_ = 0;
        torn_ = half_written_ = false;
    }
    // Finds the current length of the file, and whether its last line is whole, because other
    // programs may have truncated the file.
    [[nodiscard]] failure look_at_end() noexcept {
        struct stat now {};
        if (::fstat(file_, &now) != 0) return failed();
        size_ = static_cast<std::uint64_t>(now.st_size);
        char last = '\n';
        if (size_ != 0 && ::pread(file_, &last, 1, now.st_size - 1) != 1) return failed();
        torn_ = last != '\n';
        return {};
    }
    // Whether the path leads to the file that is open here.
    [[nodiscard]] bool is_at_path() const noexcept {
        struct stat open {
        }, there{};
        return ::fstat(file_, &open) == 0 && ::stat(path_.c_str(), &there) == 0 && open.st_ino == there.st_ino &&
               open.st_dev == there.st_dev;
    }
    [[nodiscard]] bool is_removed() const noexcept {
        struct stat open {};
        return ::fstat(file_, &open) == 0 && open.st_nlink == 0;
    }
    // Opens the file that the path leads to now, and finds its end. First takes back the
    // half-written lines in the old file.
    [[nodiscard]] failure find_file() noexcept {
        if (file_ < 0) return open();
        if (const failure why = take_back(); why.code != errc::none) return why;
        if (is_at_path()) return look_at_end();
        close();
        return open();
    }
    // The names of new and of rotated files must survive a power cut as well.
    [[nodiscard]] failure sync_folder() const noexcept try {
        const int folder = ::open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (folder < 0) return failed();
        const failure why = ::fsync(folder) != 0 ? failed() : failure{};
        (void)::close(folder);
        return why;
    } catch (...) {
        return detail::no_host_memory;
    }

    // Writes again if the file was removed in the meantime, because no program could read it there.
    failure write(const std::string& lines) {
        for (int turn = 0; turn < 8; ++turn) {
            if (const failure why = write_here(lines); why.code != errc::none) return why;
            if (!is_removed()) return {};
            close();
            if (const failure why = open(); why.code != errc::none) return why;
        }
        return {.code = errc::io_failed, .asked = ENOENT};
    }
    // Uses one system call, so that other programs read whole lines unless that call fails halfway.
    failure write_here(const std::string& lines) {
        const detail::no_file_size_signal quiet;
        // The mark keeps a torn line from counting: the line may lack only its line feed.
        const std::string text = torn_ ? "~\n" + lines : lines;
        for (std::size_t done = 0; done < text.size();) {
            const auto n = ::write(file_, text.data() + done, text.size() - done);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) return undo(failed());
            half_written_ = true;
            done += static_cast<std::size_t>(n);
        }
        if (options_.sync && ::fdatasync(file_) != 0) return undo(failed());
        size_ += text.size();
        torn_ = half_written_ = false;
        return {};
    }
    // The lines of a failed append must not count, because a second try would add them again.
    failure undo(failure why) noexcept {
        (void)take_back();
        return why;
    }
    failure take_back() noexcept {
        if (!half_written_) return {};
        // If other programs have shortened the file in the meantime, a cut would extend the file
        // with zeros, and the next line would follow these zeros.
        struct stat now {};
        if (::fstat(file_, &now) != 0) return failed();
        if (static_cast<std::uint64_t>(now.st_size) > size_ && ::ftruncate(file_, static_cast<off_t>(size_)) != 0)
            return failed();
        half_written_ = false;
        return {};
    }

    // Renames the file, but overwrites no other file. Returns 0 or an errno.
    [[nodiscard]] int put_aside(const std::string& to) const noexcept {
#ifdef RENAME_NOREPLACE
        if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return 0;
        // Some file systems don't know the flag.
        if (errno != EINVAL && errno != ENOSYS) return errno;
#endif
        struct stat there {};
        if (::lstat(to.c_str(), &there) == 0) return EEXIST;
        return std::rename(path_.c_str(), to.c_str()) == 0 ? 0 : errno;
    }
    [[nodiscard]] static std::string folder_of(const std::string& path) {
        const auto slash = path.rfind('/');
        return slash == std::string::npos ? "." : path.substr(0, slash + 1);
    }
    [[nodiscard]] static std::vector<std::uint64_t> numbers_aside(const std::string& path) {
        const auto slash = path.rfind('/');
        const auto name = (slash == std::string::npos ? path : path.substr(slash + 1)) + '.';
        std::vector<std::uint64_t> all;
        const auto shut = [](DIR* folder) { (void)::closedir(folder); };
        const std::unique_ptr<DIR, decltype(shut)> at(::opendir(folder_of(path).c_str()), shut);
        if (at == nullptr) raise(failed(), {}, "looking for usage journals");
        while (const dirent* const entry = ::readdir(at.get())) {
            const std::string_view found = entry->d_name;
            if (!found.starts_with(name)) continue;
            const auto number = found.substr(name.size());
            const auto n = detail::parse_whole(number);
            // A copy such as "usage.01" isn't one of our files: its lines would count twice.
            if (n.code == detail::parse_code::ok && std::to_string(n.value) == number) all.push_back(n.value);
        }
        std::sort(all.begin(), all.end());
        return all;
    }

    // A file for reading; empty if it doesn't exist.
    class file {
    public:
        explicit file(const std::string& path) : at_(std::fopen(path.c_str(), "rbe")) {
            struct stat now {};
            if (at_ != nullptr && ::fstat(::fileno(at_), &now) == 0) id_ = now.st_ino;
            if (at_ == nullptr && errno != ENOENT) raise(failed(), {}, "reading a usage journal");
        }
        file(const file&) = delete;
        file& operator=(const file&) = delete;
        ~file() {
            if (at_ != nullptr) (void)std::fclose(at_);
        }
        [[nodiscard]] ino_t id() const noexcept { return id_; }
        [[nodiscard]] std::size_t read(std::span<char> to) const {
            if (at_ == nullptr) return 0;
            const auto n = std::fread(to.data(), 1, to.size(), at_);
            if (std::ferror(at_) != 0) raise(failed(), {}, "reading a usage journal");
            return n;
        }

    private:
        std::FILE* at_;
        ino_t id_ = 0;
    };

    // In pieces, because a journal may be larger than memory.
    template <class F>
    static std::size_t read_lines(const file& from, F& each) {
        std::size_t torn = 0;
        std::string text;
        std::vector<char> piece(std::size_t{1} << 16);
        while (const auto n = from.read(piece)) {
            const std::string_view next(piece.data(), n);
            // Not in all of `text`, which would take quadratic time.
            const auto end = next.rfind('\n');
            if (end == std::string_view::npos) {
                text += next;
                continue;
            }
            text += next.substr(0, end + 1);
            torn += read_usage(text, std::ref(each));
            text = next.substr(end + 1);
        }
        return torn + (text.empty() ? 0 : 1);
    }

    std::string path_;
    journal_options options_;
    int file_ = -1;
    std::uint64_t size_ = 0;
    bool torn_ = false;          // the file doesn't end with a line feed
    bool half_written_ = false;  // bytes behind size_ don't count
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
