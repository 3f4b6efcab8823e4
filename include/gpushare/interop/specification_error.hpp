// SPDX-License-Identifier: Apache-2.0
// The error that parse_specification, read_environment and read_kubernetes throw, and the type of what they read: keys
// with values.
//
//   try { auto spec = gpushare::parse_specification(text); }
//   catch (const gpushare::specification_error& e) { log(e.what()); mark(e.key()); }
#pragma once

#include <cstdint>
#include <ranges>
#include <stdexcept>
#include <string>
#include <string_view>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A specification that can't be read. The code is size_overflow for `overflow`, else invalid_specification.
class specification_error final : public std::runtime_error, public error {
public:
    /// The kind of error in a key.
    enum class kind : std::uint8_t {
        unknown_key,    ///< in a place where all keys are known
        bad_value,      ///< not of the form, or out of the range, that is allowed
        overflow,       ///< a number that doesn't fit
        duplicate,      ///< the same key twice
        contradiction,  ///< keys that can't both be meant
    };

    /// `text` is a sentence about the key, which goes before it.
    specification_error(kind why, std::string_view key, std::string_view text)
        : std::runtime_error(detail::whole_sentence(errc::none, std::string(key).append(": ").append(text))),
          error(failure{why == kind::overflow ? errc::size_overflow : errc::invalid_specification}, {}),
          why_(why),
          key_(key) {}

    /// The kind of error.
    [[nodiscard]] kind why() const noexcept { return why_; }
    /// The key that is to blame.
    [[nodiscard]] const std::string& key() const noexcept { return key_; }
    /// A sentence for people; what can't be printed of the input is escaped.
    [[nodiscard]] const char* what() const noexcept override { return std::runtime_error::what(); }

private:
    kind why_;
    std::string key_;
};

/// Keys with their values: a map of strings, an array of pairs of string views.
template <class R>
concept key_values = std::ranges::input_range<R> && requires(std::ranges::range_reference_t<R> pair) {
    std::string_view(pair.first);
    std::string_view(pair.second);
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
