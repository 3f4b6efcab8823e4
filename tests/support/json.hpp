// SPDX-License-Identifier: Apache-2.0
// Parses the part of JSON that tests need.
//
//   support::parse_json(text)["traceEvents"].items[0]["ts"].text
#pragma once

#include <cctype>
#include <cstddef>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace support {

/// A parsed JSON value, with the accessors that tests need. An accessor throws if the value doesn't
/// have what it asks for.
struct json_value {
    std::string text;  // a string with its escapes decoded, or a number as it is written
    std::vector<json_value> items;
    std::map<std::string, json_value> fields;

    const json_value& operator[](const std::string& name) const { return fields.at(name); }
};

namespace detail {

class json_parser {
public:
    static json_value parse(std::string_view text) {
        json_parser p(text);
        auto value = p.value();
        p.space();
        if (p.at_ != text.size()) throw std::runtime_error("something behind the value");
        return value;
    }

private:
    explicit json_parser(std::string_view text) : text_(text) {}
    void space() {
        while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
    }
    char peek() {
        space();
        return text_.at(at_);
    }
    void expect(char c) {
        if (peek() != c) throw std::runtime_error("expected " + std::string(1, c) + " at " + std::to_string(at_));
        ++at_;
    }
    std::string string() {
        expect('"');
        std::string out;
        for (; text_.at(at_) != '"'; ++at_) {
            const auto c = static_cast<unsigned char>(text_[at_]);
            if (c < 0x20 || c > 0x7e) throw std::runtime_error("a raw byte in a string");
            if (c != '\\') {
                out += text_[at_];
            } else if (const char e = text_.at(++at_); e == 'u') {
                for (int i = 1; i <= 4; ++i)
                    if (std::isxdigit(static_cast<unsigned char>(text_.at(at_ + static_cast<std::size_t>(i)))) == 0)
                        throw std::runtime_error("a bad escape");
                out += "?";
                at_ += 4;
            } else if (e == '"' || e == '\\') {
                out += e;
            } else {
                throw std::runtime_error("a bad escape");
            }
        }
        ++at_;
        return out;
    }
    json_value value() {
        json_value v;
        const char c = peek();
        if (c == '"') {
            v.text = string();
        } else if (c == '{') {
            for (expect('{'); peek() != '}';) {
                if (!v.fields.empty()) expect(',');
                space();
                auto name = string();
                expect(':');
                if (!v.fields.emplace(std::move(name), value()).second) throw std::runtime_error("a field twice");
            }
            expect('}');
        } else if (c == '[') {
            for (expect('['); peek() != ']';) {
                if (!v.items.empty()) expect(',');
                v.items.push_back(value());
            }
            expect(']');
        } else {
            std::size_t used = 0;
            (void)std::stod(std::string(text_.substr(at_, 40)), &used);
            v.text = text_.substr(at_, used);
            at_ += used;
        }
        return v;
    }

    std::string_view text_;
    std::size_t at_ = 0;
};

}  // namespace detail

/// Throws std::runtime_error, std::out_of_range or std::invalid_argument if the text isn't JSON.
[[nodiscard]] inline json_value parse_json(std::string_view text) { return detail::json_parser::parse(text); }

}  // namespace support
