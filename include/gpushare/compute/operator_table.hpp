// SPDX-License-Identifier: Apache-2.0
// Which implementation of an operation to use for which shape (our kernel, a vendor library's, an
// engine's): a table that is measured once, saved as text, and read and changed by people.
//
//   auto table = gpushare::operator_table::load("matmul f16:4096x4096x8 cublaslt 41200 3\n");
//   if (const auto* best = table.find("matmul", "f16:4096x4096x8")) use(best->candidate);
//
// serving/operator_selection.hpp measures candidates and fills it in. A line is: operation, shape,
// candidate, how long it took (ns), among how many. Lines that begin with # are comments.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The best that was found for one operation and shape. Texts are words: not empty, without blanks
/// and control characters.
struct operator_choice {
    std::string operation{};       ///< such as "matmul"
    std::string shape{};           ///< all that the choice depends on: sizes, types, layout
    std::string candidate{};       ///< the name of the best
    ns took{};                     ///< its median
    std::uint32_t candidates = 1;  ///< how many there were to choose from

    friend bool operator==(const operator_choice&, const operator_choice&) = default;
};

/// Choices by operation and shape. A value; not thread-safe while it changes.
class operator_table {
public:
    /// Null if nothing is known. O(log rows); neither allocates nor throws.
    [[nodiscard]] const operator_choice* find(std::string_view operation, std::string_view shape) const noexcept {
        const auto at = place_of(operation, shape);
        return at != rows_.end() && at->operation == operation && at->shape == shape ? &*at : nullptr;
    }
    /// In place of what was known of this operation and shape. Throws operation_error:
    /// invalid_specification for what are no words, or a time below 0.
    void keep(operator_choice c) {
        if (!is_word(c.operation) || c.operation.front() == '#' || !is_word(c.shape) || !is_word(c.candidate) ||
            c.took < ns{})
            raise({.code = errc::invalid_specification, .because = reason::no_words}, {},
                  "keeping a choice of operators");
        const auto at = rows_.begin() + (place_of(c.operation, c.shape) - rows_.cbegin());
        if (at != rows_.end() && at->operation == c.operation && at->shape == c.shape)
            *at = std::move(c);
        else
            rows_.insert(at, std::move(c));
    }
    /// So that it is measured anew. Whether it was known.
    bool forget(std::string_view operation, std::string_view shape) {
        if (find(operation, shape) == nullptr) return false;
        rows_.erase(rows_.begin() + (place_of(operation, shape) - rows_.cbegin()));
        return true;
    }
    /// By operation and shape, in their order.
    [[nodiscard]] std::span<const operator_choice> rows() const noexcept { return rows_; }
    friend bool operator==(const operator_table&, const operator_table&) = default;

    /// As text, a line for each choice. Throws std::bad_alloc.
    [[nodiscard]] std::string save() const {
        std::string text;
        for (const auto& r : rows_)
            text += r.operation + ' ' + r.shape + ' ' + r.candidate + ' ' + std::to_string(r.took.count()) + ' ' +
                    std::to_string(r.candidates) + '\n';
        return text;
    }
    /// Reads text that save() wrote, possibly edited by hand. Throws operation_error:
    /// invalid_specification with the line in `asked`, for a malformed line or a second entry for
    /// one operation and shape.
    [[nodiscard]] static operator_table load(std::string_view text) {
        operator_table table;
        for (std::uint64_t line = 1; !text.empty(); ++line) {
            std::string_view rest = text.substr(0, text.find('\n'));
            text.remove_prefix(std::min(rest.size() + 1, text.size()));
            if (rest.empty() || rest.front() == '#') continue;
            bool good = true;
            const auto word = [&] {
                const auto w = rest.substr(0, rest.find(' '));
                rest.remove_prefix(std::min(w.size() + 1, rest.size()));
                good = good && is_word(w);
                return w;
            };
            const auto number = [&](auto most) {
                const auto w = word();
                decltype(most) n{};
                const auto [stop, code] = std::from_chars(w.data(), w.data() + w.size(), n);
                good = good && code == std::errc{} && stop == w.data() + w.size() && n >= 0;
                return n;
            };
            operator_choice c;
            c.operation = word();
            c.shape = word();
            c.candidate = word();
            c.took = ns{number(std::int64_t{})};
            const bool last = rest.find(' ') == std::string_view::npos;
            c.candidates = number(std::uint32_t{});
            if (!good || !last || table.find(c.operation, c.shape) != nullptr)
                raise({.code = errc::invalid_specification, .asked = line, .because = reason::text_line}, {},
                      "loading a table of operators");
            table.keep(std::move(c));
        }
        return table;
    }

private:
    [[nodiscard]] static bool is_word(std::string_view w) noexcept {
        return !w.empty() && std::ranges::all_of(w, [](char c) {
            const auto byte = static_cast<unsigned char>(c);
            return byte > 0x20 && byte != 0x7f;
        });
    }
    [[nodiscard]] std::vector<operator_choice>::const_iterator place_of(std::string_view operation,
                                                                        std::string_view shape) const noexcept {
        return std::lower_bound(rows_.begin(), rows_.end(), std::pair(operation, shape),
                                [](const operator_choice& r, const auto& key) {
                                    return std::pair<std::string_view, std::string_view>(r.operation, r.shape) < key;
                                });
    }

    std::vector<operator_choice> rows_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
