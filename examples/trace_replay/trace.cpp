// SPDX-License-Identifier: Apache-2.0
#include "trace_replay/trace.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <fstream>
#include <functional>
#include <istream>
#include <limits>
#include <map>
#include <optional>
#include <ostream>
#include <span>
#include <system_error>
#include <utility>

#include <range/v3/view/enumerate.hpp>

namespace trace_replay {
namespace {

using std::chrono::sys_seconds;

enum column : std::size_t { time_column, status, exec, group, steps, model, loras, num_columns };
constexpr std::array<std::string_view, num_columns> column_names{
    "gmt_create", "predict_status",      "exec_time_seconds",
    "groupId",    "num_inference_steps", "checkpoint_model_version_id",
    "num_lora"};

// A longer line isn't a request, and a file without line breaks must not fill the memory.
constexpr std::size_t longest_line = 1 << 16;
// More seconds, steps or adapters than this are an error: it would be a request of eleven days.
constexpr double largest_number = 1e6;

// A status can be any word. All reasons beyond this number are counted together.
constexpr std::size_t most_reasons = 40;
const std::string other_reasons = "other reasons";

/// The lines of a stream, each cut at `longest_line`.
class line_reader {
public:
    explicit line_reader(std::istream& in) : in_(&in), buffer_(longest_line, '\0') {}

    /// Returns false at the end of the file.
    bool next() {
        in_->getline(buffer_.data(), static_cast<std::streamsize>(buffer_.size()));
        const auto taken = static_cast<std::size_t>(in_->gcount());
        too_long_ = in_->fail() && taken == buffer_.size() - 1;
        if (in_->fail() && !too_long_) return false;
        ++number_;
        // The count includes the line break, except in a last line without one.
        size_ = in_->eof() || too_long_ ? taken : taken - 1;
        if (too_long_) {
            in_->clear();
            in_->ignore(std::numeric_limits<std::streamsize>::max(), '\n');
        }
        if (size_ > 0 && buffer_[size_ - 1] == '\r') --size_;
        return true;
    }

    [[nodiscard]] std::string_view text() const noexcept { return {buffer_.data(), size_}; }
    [[nodiscard]] bool too_long() const noexcept { return too_long_; }
    [[nodiscard]] std::size_t number() const noexcept { return number_; }

private:
    std::istream* in_;
    std::string buffer_;
    std::size_t size_ = 0, number_ = 0;
    bool too_long_ = false;
};

/// Returns false if a quote isn't closed on its line or stands within a cell. A row never spans
/// lines, so a stray quote can't swallow the rest of the file.
bool split_cells(std::string_view line, std::vector<std::string>& cells) {
    cells.clear();
    for (std::size_t at = 0;; ++at) {
        std::string& cell = cells.emplace_back();
        if (at < line.size() && line[at] == '"') {
            for (++at;; ++at) {
                if (at >= line.size()) return false;
                if (line[at] == '"' && (++at >= line.size() || line[at] != '"')) break;
                cell.push_back(line[at]);
            }
            if (at < line.size() && line[at] != ',') return false;
        } else {
            const std::size_t end = std::min(line.find(',', at), line.size());
            cell = line.substr(at, end - at);
            if (cell.find('"') != std::string::npos) return false;
            at = end;
        }
        if (at >= line.size()) return true;
    }
}

/// Accepts exactly "YYYY-MM-DD HH:MM:SS", with a day that exists.
std::optional<sys_seconds> parse_time(std::string_view text) {
    constexpr std::string_view shape = "dddd-dd-dd dd:dd:dd";
    const auto fits = [](char c, char s) { return s == 'd' ? c >= '0' && c <= '9' : c == s; };
    if (!std::ranges::equal(text, shape, fits)) return std::nullopt;
    const auto number = [text](std::size_t at, std::size_t digits) {
        int n = 0;
        for (const char c : text.substr(at, digits)) n = n * 10 + (c - '0');
        return n;
    };
    const std::chrono::year_month_day date{std::chrono::year{number(0, 4)},
                                           std::chrono::month{static_cast<unsigned>(number(5, 2))},
                                           std::chrono::day{static_cast<unsigned>(number(8, 2))}};
    const int hour = number(11, 2), minute = number(14, 2), second = number(17, 2);
    if (!date.ok() || hour > 23 || minute > 59 || second > 59) return std::nullopt;
    return std::chrono::sys_days{date} + std::chrono::hours{hour} + std::chrono::minutes{minute} +
           std::chrono::seconds{second};
}

struct timed_request {
    sys_seconds time;
    request what;
};

/// Turns the cells of one row into a request. The first error becomes the reason. The numbers are
/// checked after an error, too, because a negative number condemns the file.
class row_parser {
public:
    row_parser(std::span<const std::string> cells, std::span<const std::size_t, num_columns> places) noexcept
        : cells_(cells), places_(places) {}

    std::optional<timed_request> parse() {
        check_status();
        timed_request r;
        const auto time = parse_time(cell(time_column));
        if (!time) reject("bad time");
        r.time = time.value_or(sys_seconds{});
        r.what.group = text(group);
        r.what.model = text(model);
        r.what.steps = whole(steps);
        r.what.loras = whole(loras);
        r.what.exec_s = number(exec);
        if (r.what.steps == 0) reject("zero num_inference_steps");
        if (r.what.exec_s <= 0) reject("zero exec_time_seconds");
        return reason_.empty() ? std::optional(std::move(r)) : std::nullopt;
    }

    [[nodiscard]] const std::string& reason() const noexcept { return reason_; }
    /// The column that holds a negative number, or num_columns.
    [[nodiscard]] column negative() const noexcept { return negative_; }

private:
    [[nodiscard]] const std::string& cell(column c) const { return cells_[places_[c]]; }

    void reject(std::string_view why, std::string_view what = {}) {
        if (reason_.empty()) reason_.append(why).append(what);
    }

    void check_status() {
        const std::string& s = text(status);
        if (s == "SUCCEED") return;
        const bool looks_like_one =
            s.size() <= 16 && std::ranges::all_of(s, [](char c) { return c >= 'A' && c <= 'Z'; });
        looks_like_one ? reject("status ", s) : reject("unknown status");
    }

    const std::string& text(column c) {
        if (cell(c).empty()) reject("empty ", column_names[c]);
        return cell(c);
    }

    double number(column c) {
        const std::string& s = cell(c);
        double value = 0;
        const auto [end, problem] = std::from_chars(s.data(), s.data() + s.size(), value);
        if (s.empty()) {
            reject("empty ", column_names[c]);
        } else if (problem != std::errc{} || end != s.data() + s.size() || !std::isfinite(value)) {
            reject("not a number: ", column_names[c]);
        } else if (value < 0) {
            negative_ = c;
        } else if (value > largest_number) {
            reject("too large: ", column_names[c]);
        } else {
            return value;
        }
        return 0;
    }

    std::uint32_t whole(column c) {
        const double value = number(c);
        if (value != std::floor(value)) reject("not a whole number: ", column_names[c]);
        return static_cast<std::uint32_t>(value);
    }

    std::span<const std::string> cells_;
    std::span<const std::size_t, num_columns> places_;
    std::string reason_;
    column negative_ = num_columns;
};

/// The position of each column in the rows of this file.
std::array<std::size_t, num_columns> find_columns(std::string_view header, const std::string& name,
                                                  std::vector<std::string>& cells) {
    constexpr std::string_view byte_order_mark = "\xEF\xBB\xBF";
    if (header.starts_with(byte_order_mark)) header.remove_prefix(byte_order_mark.size());
    if (!split_cells(header, cells)) throw trace_error(name + ": line 1: a stray quote in the header");
    std::array<std::size_t, num_columns> places{};
    for (const auto& [i, wanted] : ranges::views::enumerate(column_names)) {
        const auto found = std::ranges::find(cells, wanted);
        const std::string quoted = "'" + std::string(wanted) + "'";
        if (found == cells.end()) throw trace_error(name + ": line 1: no column " + quoted + " in the header");
        if (std::ranges::count(cells, wanted) > 1) throw trace_error(name + ": line 1: two columns " + quoted);
        places[i] = static_cast<std::size_t>(found - cells.begin());
    }
    return places;
}

std::vector<skipped_rows> by_count(const std::map<std::string, skipped_rows>& reasons) {
    std::vector<skipped_rows> skipped;
    for (const auto& [reason, rows] : reasons) skipped.push_back(rows);
    std::ranges::stable_sort(skipped, std::ranges::greater{}, &skipped_rows::rows);
    return skipped;
}

bool has_control_character(std::string_view line) {
    return std::ranges::any_of(line, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; });
}

std::string quoted_if_needed(const std::string& cell) {
    if (cell.find_first_of(",\"") == std::string::npos) return cell;
    std::string out = "\"";
    for (const char c : cell) out.append(c == '"' ? 2 : 1, c);
    return out + '"';
}

/// A number such as "32.0", as in the published file, or with as many digits as needed.
std::string decimal(double value) {
    std::array<char, 400> digits{};  // the shortest fixed form of a double has at most 328 digits
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value, std::chars_format::fixed).ptr;
    std::string out(digits.data(), end);
    return out.find('.') == std::string::npos ? out + ".0" : out;
}

std::string time_text(sys_seconds t) {
    const auto day = std::chrono::floor<std::chrono::days>(t);
    const std::chrono::year_month_day date{day};
    const std::chrono::hh_mm_ss clock{t - day};
    std::string out;
    const auto put = [&out](long long n, std::size_t digits, std::string_view after) {
        const std::string s = std::to_string(n);
        out.append(digits - std::min(digits, s.size()), '0').append(s).append(after);
    };
    put(int{date.year()}, 4, "-");
    put(unsigned{date.month()}, 2, "-");
    put(unsigned{date.day()}, 2, " ");
    put(clock.hours().count(), 2, ":");
    put(clock.minutes().count(), 2, ":");
    put(clock.seconds().count(), 2, "");
    return out;
}

}  // namespace

std::string to_string(const trace_summary& summary) {
    std::string out = std::to_string(summary.kept) + " of " + std::to_string(summary.rows) + " rows kept";
    std::string_view before = "; skipped: ";
    for (const skipped_rows& s : summary.skipped) {
        out.append(before).append(std::to_string(s.rows)).append(" ").append(s.reason);
        out.append(" (first in line ").append(std::to_string(s.first_line)).append(")");
        before = ", ";
    }
    return out;
}

trace read_trace(std::istream& in, std::string_view file) {
    const std::string name(file);
    line_reader lines(in);
    if (!lines.next()) throw trace_error(name + (in.bad() ? ": cannot be read" : ": the file is empty"));
    if (lines.too_long()) throw trace_error(name + ": line 1: too long for a header");
    std::vector<std::string> cells;
    const auto places = find_columns(lines.text(), name, cells);
    const std::size_t width = cells.size();

    trace result;
    std::vector<timed_request> kept;
    std::map<std::string, skipped_rows> reasons;
    const auto skip = [&](const std::string& why) {
        const std::string& reason = reasons.size() < most_reasons || reasons.contains(why) ? why : other_reasons;
        ++reasons.try_emplace(reason, skipped_rows{reason, 0, lines.number()}).first->second.rows;
    };
    while (lines.next()) {
        if (lines.text().empty()) continue;
        ++result.summary.rows;
        if (lines.too_long()) {
            skip("line too long");
        } else if (has_control_character(lines.text())) {
            skip("control character");
        } else if (!split_cells(lines.text(), cells)) {
            skip("stray quote");
        } else if (cells.size() != width) {
            skip("wrong number of fields");
        } else {
            row_parser row(cells, places);
            auto parsed = row.parse();
            if (const column bad = row.negative(); bad != num_columns) {
                throw trace_error(name + ": line " + std::to_string(lines.number()) + ": negative " +
                                  std::string(column_names[bad]) + " '" + cells[places[bad]] + "'");
            }
            parsed ? kept.push_back(*std::move(parsed)) : skip(row.reason());
        }
    }
    if (in.bad()) throw trace_error(name + ": line " + std::to_string(lines.number() + 1) + ": cannot be read");

    std::ranges::stable_sort(kept, {}, &timed_request::time);
    if (!kept.empty()) result.start = kept.front().time;
    result.requests.reserve(kept.size());
    for (timed_request& r : kept) {
        r.what.arrival_s = static_cast<double>((r.time - result.start).count());
        result.requests.push_back(std::move(r.what));
    }
    result.summary.kept = result.requests.size();
    result.summary.skipped = by_count(reasons);
    return result;
}

trace read_trace_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw trace_error(path + ": " + std::generic_category().message(errno));
    return read_trace(in, path);
}

void write_csv(std::ostream& out, const trace& t) {
    out << "gmt_create,predict_type,predict_status,exec_time_seconds,groupId,prompt_length,negative_prompt_length,"
           "num_images_per_prompt,num_inference_steps,checkpoint_model_version_id,num_lora\n";
    for (const request& r : t.requests) {
        const sys_seconds time = t.start + std::chrono::seconds{static_cast<long long>(r.arrival_s)};
        out << time_text(time) << ",,SUCCEED," << decimal(r.exec_s) << ',' << quoted_if_needed(r.group) << ",,,,"
            << std::to_string(r.steps) << ".0," << quoted_if_needed(r.model) << ',' << std::to_string(r.loras) << '\n';
    }
}

}  // namespace trace_replay
