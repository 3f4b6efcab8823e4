// SPDX-License-Identifier: Apache-2.0
// A small text table for reports: columns are as wide as their widest cell and aligned per column.
//
//   gpushare::table t{{"tenant"}, {"share %", gpushare::align::right}};
//   t.add_row({"chat", "29.8"});
//   std::fputs(t.str().c_str(), stdout);
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// On which side of its column a cell stands.
enum class align : std::uint8_t {
    left,  ///< for text
    right  ///< for figures
};

/// Rows of text under a header. Cells are UTF-8, each code point as wide as any other. A value; not thread-safe.
class table {
public:
    /// One column.
    struct column {
        std::string header;        ///< its first line
        align side = align::left;  ///< of all its cells
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

    /// Adds a row; tabs and line breaks in its cells become spaces. Throws std::invalid_argument
    /// unless there is one cell for each column, and then adds nothing.
    void add_row(std::vector<std::string> cells) {
        if (cells.size() != columns_.size()) {
            throw std::invalid_argument("gpushare::table: a row of " + std::to_string(cells.size()) + " cells for " +
                                        std::to_string(columns_.size()) + " columns");
        }
        for (auto& cell : cells) flatten(cell);
        rows_.push_back(std::move(cells));
        for (std::size_t i = 0; i < columns_.size(); ++i) widths_[i] = std::max(widths_[i], width(rows_.back()[i]));
    }

    /// Columns.
    [[nodiscard]] std::size_t num_columns() const noexcept { return columns_.size(); }
    /// Rows, without the header.
    [[nodiscard]] std::size_t num_rows() const noexcept { return rows_.size(); }

    /// The text: header, rule and rows, two spaces between columns, each line ended by '\n' and none by a space.
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

    /// Code points: every byte but the continuation bytes of UTF-8.
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

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
