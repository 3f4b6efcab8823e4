// SPDX-License-Identifier: Apache-2.0
#include "inference_server/json.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace inference_server::json {

namespace {

constexpr int deepest = 32;

bool is_blank(char c) noexcept { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }

int hex(char c) noexcept {
    if (is_digit(c)) return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/// The length of the UTF-8 character at the beginning; 0 if there is no valid character.
std::size_t character(std::string_view s) noexcept {
    const auto byte = [s](std::size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0U; };
    const auto follows = [&](std::size_t i) { return (byte(i) & 0xC0U) == 0x80U; };
    const unsigned a = byte(0), b = byte(1);
    if (a < 0x80) return s.empty() ? 0 : 1;
    if (a >= 0xC2 && a < 0xE0) return follows(1) ? 2 : 0;
    if (a >= 0xE0 && a < 0xF0)
        return follows(1) && follows(2) && !(a == 0xE0 && b < 0xA0) && !(a == 0xED && b > 0x9F) ? 3 : 0;
    if (a >= 0xF0 && a < 0xF5)
        return follows(1) && follows(2) && follows(3) && !(a == 0xF0 && b < 0x90) && !(a == 0xF4 && b > 0x8F) ? 4 : 0;
    return 0;
}

/// The value of the four hexadecimal digits at `at`; -1 if they aren't hexadecimal digits.
int code_unit(std::string_view s, std::size_t at) noexcept {
    if (s.size() < at + 4) return -1;
    int unit = 0;
    for (std::size_t i = at; i < at + 4; ++i) {
        const int h = hex(s[i]);
        if (h < 0) return -1;
        unit = 16 * unit + h;
    }
    return unit;
}

/// Goes through a text that may have any content.
class checker {
public:
    explicit checker(std::string_view text) noexcept : text_(text) {}

    std::string_view whole() {
        blanks();
        const std::size_t begin = at_;
        any(0);
        const std::size_t end = at_;
        blanks();
        if (at_ != text_.size()) fail("something behind the value");
        return text_.substr(begin, end - begin);
    }

private:
    [[noreturn]] void fail(const char* why) const {
        throw error("JSON: " + std::string(why) + " at byte " + std::to_string(at_));
    }
    [[nodiscard]] char now() const noexcept { return at_ < text_.size() ? text_[at_] : '\0'; }
    void blanks() noexcept {
        while (at_ < text_.size() && is_blank(text_[at_])) ++at_;
    }
    bool skip(char c) noexcept {
        if (at_ >= text_.size() || text_[at_] != c) return false;
        ++at_;
        return true;
    }

    void any(int depth) {
        if (depth > deepest) fail("nested too deep");
        switch (now()) {
            case '{':
                return list('}', [&] {
                    if (now() != '"') fail("no name of a member");
                    string();
                    blanks();
                    if (!skip(':')) fail("no ':'");
                    blanks();
                    any(depth + 1);
                });
            case '[': return list(']', [&] { any(depth + 1); });
            case '"': return string();
            case 't': return word("true");
            case 'f': return word("false");
            case 'n': return word("null");
            default: return number();
        }
    }
    template <class F>
    void list(char end, F item) {
        ++at_;
        blanks();
        if (skip(end)) return;
        for (;;) {
            item();
            blanks();
            if (skip(end)) return;
            if (!skip(',')) fail("no ',' and no end");
            blanks();
        }
    }
    void word(std::string_view w) {
        if (text_.substr(at_, w.size()) != w) fail("no value");
        at_ += w.size();
    }
    void digits() {
        if (!is_digit(now())) fail("no digit");
        while (is_digit(now())) ++at_;
    }
    void number() {
        skip('-');
        if (!skip('0')) digits();
        if (skip('.')) digits();
        if (skip('e') || skip('E')) {
            if (!skip('+')) skip('-');
            digits();
        }
    }
    void string() {
        for (++at_; !skip('"');) {
            if (at_ >= text_.size()) fail("a string without an end");
            if (static_cast<unsigned char>(now()) < 0x20) fail("a control character in a string");
            if (skip('\\')) {
                escape();
            } else {
                const auto n = character(text_.substr(at_));
                if (n == 0) fail("no UTF-8");
                at_ += n;
            }
        }
    }
    void escape() {
        if (!skip('u')) {
            if (at_ >= text_.size() || std::strchr("\"\\/bfnrt", now()) == nullptr || now() == '\0')
                fail("an unknown escape");
            ++at_;
            return;
        }
        const int unit = code_unit(text_, at_);
        if (unit < 0) fail("no four hexadecimal digits");
        if (unit >= 0xDC00 && unit < 0xE000) fail("half of a surrogate pair");
        at_ += 4;
        if (unit < 0xD800 || unit >= 0xE000) return;
        const int low = text_.substr(at_, 2) == "\\u" ? code_unit(text_, at_ + 2) : -1;
        if (low < 0xDC00 || low >= 0xE000) fail("half of a surrogate pair");
        at_ += 6;
    }

    std::string_view text_;
    std::size_t at_ = 0;
};

void append_utf8(std::string& out, unsigned c) {
    const auto put = [&](unsigned byte) { out += static_cast<char>(byte); };
    if (c < 0x80) {
        put(c);
    } else if (c < 0x800) {
        put(0xC0U | c >> 6U), put(0x80U | (c & 0x3FU));
    } else if (c < 0x10000) {
        put(0xE0U | c >> 12U), put(0x80U | (c >> 6U & 0x3FU)), put(0x80U | (c & 0x3FU));
    } else {
        put(0xF0U | c >> 18U), put(0x80U | (c >> 12U & 0x3FU)), put(0x80U | (c >> 6U & 0x3FU)),
            put(0x80U | (c & 0x3FU));
    }
}

template <class T>
void append_floating(std::string& out, T x) {
    if (!std::isfinite(x)) {
        out += "null";
        return;
    }
    std::array<char, 32> digits;
    out.append(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), x).ptr);
}

}  // namespace

value parse(std::string_view text) { return value(checker(text).whole()); }

bool is_utf8(std::string_view text) noexcept {
    for (std::size_t n = 0; !text.empty(); text.remove_prefix(n))
        if ((n = character(text)) == 0) return false;
    return true;
}

kind value::what() const noexcept {
    switch (text_.front()) {
        case '{': return kind::object;
        case '[': return kind::array;
        case '"': return kind::string;
        case 't':
        case 'f': return kind::boolean;
        case 'n': return kind::null;
        default: return kind::number;
    }
}

void value::wrong(const char* wanted) const {
    throw error(std::string(text_.substr(0, 32)) + (text_.size() > 32 ? "... isn't " : " isn't ") + wanted);
}

bool value::is_below_one() const noexcept {
    const auto e = std::min(text_.find_first_of("eE"), text_.size());
    std::int64_t before = 0;  // digits before the point, or the negative number of zeros behind it
    bool counts = false, behind = false;
    for (const char c : text_.substr(0, e)) {
        behind = behind || c == '.';
        counts = counts || (c >= '1' && c <= '9');
        if (is_digit(c)) before += behind ? -static_cast<int>(!counts) : static_cast<int>(counts);
    }
    constexpr std::int64_t most = std::int64_t{1} << 60;  // no text is as long
    auto power = text_.substr(std::min(e + 1, text_.size()));
    if (power.starts_with('+')) power.remove_prefix(1);
    std::int64_t n = 0;
    if (std::from_chars(power.data(), power.data() + power.size(), n).ec == std::errc::result_out_of_range)
        n = power.starts_with('-') ? -most : most;
    return before + std::clamp(n, -most, most) <= 0;
}

std::size_t value::first() const noexcept {
    std::size_t at = 1;
    while (is_blank(text_[at])) ++at;
    return at;
}

// The text was checked, so each loop finds what it looks for.
std::size_t value::end_of(std::size_t at) const noexcept {
    std::size_t depth = 0;
    for (;; ++at) {
        switch (text_[at]) {
            case '"':
                for (++at; text_[at] != '"'; ++at)
                    if (text_[at] == '\\') ++at;
                if (depth == 0) return at + 1;
                break;
            case '[':
            case '{': ++depth; break;
            case ']':
            case '}':
                if (depth == 0) return at;  // after a number or a word
                if (--depth == 0) return at + 1;
                break;
            default:
                if (depth == 0 && (text_[at] == ',' || is_blank(text_[at]))) return at;
        }
    }
}

std::size_t value::next(std::size_t at) const noexcept {
    for (at = end_of(at); is_blank(text_[at]); ++at) {
    }
    if (text_[at] != ',') return at;  // the end
    for (++at; is_blank(text_[at]); ++at) {
    }
    return at;
}

std::optional<value> value::find(std::string_view name) const {
    if (what() != kind::object) wrong("an object");
    for (std::size_t at = first(); at < text_.size() - 1;) {
        const value key(text_.substr(at, end_of(at) - at));
        for (at += key.text_.size(); text_[at] != ':'; ++at) {
        }
        for (++at; is_blank(text_[at]); ++at) {
        }
        if (key.string() == name) return value(text_.substr(at, end_of(at) - at));
        at = next(at);
    }
    return std::nullopt;
}

value value::at(std::string_view name) const {
    if (const auto found = find(name)) return *found;
    throw error("'" + std::string(name) + "' is missing");
}

std::vector<value> value::elements(std::size_t most) const {
    std::vector<value> all;
    each([&](value v) {
        if (all.size() == most) throw error("an array has more than " + std::to_string(most) + " elements");
        all.push_back(v);
    });
    return all;
}

std::string value::string() const {
    if (what() != kind::string) wrong("a string");
    std::string out;
    for (std::size_t i = 1; i + 1 < text_.size(); ++i) {
        if (text_[i] != '\\') {
            out += text_[i];
            continue;
        }
        switch (const char c = text_[++i]) {
            case 'b': out += '\b'; break;
            case 'f': out += '\f'; break;
            case 'n': out += '\n'; break;
            case 'r': out += '\r'; break;
            case 't': out += '\t'; break;
            case 'u': {
                auto code = static_cast<unsigned>(code_unit(text_, i + 1));
                i += 4;
                if (code >= 0xD800 && code < 0xE000) {
                    code =
                        0x10000U + ((code - 0xD800U) << 10U) + static_cast<unsigned>(code_unit(text_, i + 3)) - 0xDC00U;
                    i += 6;
                }
                append_utf8(out, code);
                break;
            }
            default: out += c;
        }
    }
    return out;
}

bool value::boolean() const {
    if (what() != kind::boolean) wrong("true or false");
    return text_ == "true";
}

void append(std::string& out, std::string_view text) {
    constexpr std::string_view digits = "0123456789abcdef";
    out += '"';
    for (std::size_t n = 0; !text.empty(); text.remove_prefix(n)) {
        n = character(text);
        const char c = text.front();
        if (n == 0) {
            out += "\xEF\xBF\xBD";
            n = 1;
        } else if (c == '"' || c == '\\') {
            (out += '\\') += c;
        } else if (const auto byte = static_cast<unsigned char>(c); byte < 0x20) {
            ((out += "\\u00") += digits[byte / 16]) += digits[byte % 16];
        } else {
            out += text.substr(0, n);
        }
    }
    out += '"';
}
void append(std::string& out, double x) { append_floating(out, x); }
void append(std::string& out, float x) { append_floating(out, x); }

}  // namespace inference_server::json
