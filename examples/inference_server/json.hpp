// SPDX-License-Identifier: Apache-2.0
// JSON without a tree. A text is checked once, as a whole, and is then read in place. So a body
// never takes more memory than its own length, however deep it nests, and numbers keep all their
// digits until a caller asks for a type.
//
//   const auto body = json::parse(text);                       // throws json::error
//   for (const auto& input : body.at("inputs").elements()) use(input.at("name").string());
//   std::string out = "{\"error\":";  json::append(out, why);  out += '}';
#pragma once

#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace inference_server::json {

/// Says what is wrong, and where, if the text is wrong.
struct error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class kind : std::uint8_t { null, boolean, number, string, array, object };

/// A value inside a checked text, to which it points.
class value {
public:
    [[nodiscard]] kind what() const noexcept;
    /// The value as it stands in the text.
    [[nodiscard]] std::string_view text() const noexcept { return text_; }

    /// The first member of that name of an object. Throws error if the value isn't an object.
    [[nodiscard]] std::optional<value> find(std::string_view name) const;
    /// Like find(), but throws error if there is no such member.
    [[nodiscard]] value at(std::string_view name) const;
    /// The elements of an array. Throws error for any other value, and for more than `most`
    /// elements, before it has allocated memory for them.
    [[nodiscard]] std::vector<value> elements(std::size_t most = ~std::size_t{0}) const;
    /// Calls `f(value)` for each element of an array and of the arrays in it, in order. Throws
    /// error for any other value.
    template <class F>
    void each_leaf(F f) const {
        each([&](value v) {
            if (v.what() == kind::array)
                v.each_leaf(f);
            else
                f(v);
        });
    }

    /// These functions throw error if the value is of another kind, or if the number doesn't fit T.
    /// A number that is too close to 0 for a floating-point T is 0.
    [[nodiscard]] std::string string() const;
    [[nodiscard]] bool boolean() const;
    template <class T>
    requires std::integral<T> || std::floating_point<T>
    [[nodiscard]] T number() const {
        T x{};
        const auto [end, code] = std::from_chars(text_.data(), text_.data() + text_.size(), x);
        const bool is_whole = what() == kind::number && end == text_.data() + text_.size();
        if constexpr (std::floating_point<T>)
            if (is_whole && code == std::errc::result_out_of_range && is_below_one())
                return text_.front() == '-' ? -T{} : T{};
        if (!is_whole || code != std::errc{}) wrong("a number");
        return x;
    }

private:
    friend value parse(std::string_view text);
    explicit value(std::string_view text) noexcept : text_(text) {}
    /// Whether the magnitude of a number other than 0 is below 1.
    [[nodiscard]] bool is_below_one() const noexcept;
    [[noreturn]] void wrong(const char* wanted) const;
    template <class F>
    void each(F f) const {
        if (what() != kind::array) wrong("an array");
        for (std::size_t at = first(); at < text_.size() - 1; at = next(at))
            f(value(text_.substr(at, end_of(at) - at)));
    }
    // Positions in the text of an array or object.
    [[nodiscard]] std::size_t first() const noexcept;
    [[nodiscard]] std::size_t end_of(std::size_t at) const noexcept;
    [[nodiscard]] std::size_t next(std::size_t at) const noexcept;

    std::string_view text_;
};

/// Checks the whole text: RFC 8259, in UTF-8, nested at most 32 deep. Throws error.
[[nodiscard]] value parse(std::string_view text);

/// Whether the text is UTF-8, without overlong forms and halves of surrogate pairs.
[[nodiscard]] bool is_utf8(std::string_view text) noexcept;

/// Appends a string in quotes. Each byte that isn't UTF-8 becomes U+FFFD.
void append(std::string& out, std::string_view text);
/// Appends a number that reads back as the same number. NaN and infinity become null, since JSON
/// doesn't have them.
void append(std::string& out, double x);
void append(std::string& out, float x);
template <std::integral T>
void append(std::string& out, T x) {
    if constexpr (std::same_as<T, bool>)
        out += x ? "true" : "false";
    else
        out += std::to_string(x);
}

}  // namespace inference_server::json
