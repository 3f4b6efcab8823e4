// SPDX-License-Identifier: Apache-2.0
// A small text table for reports: columns are as wide as their widest cell and aligned per column.
//
//   gpushare::table t{{"tenant"}, {"share %", gpushare::align::right}};
//   t.add_row({"chat", "29.8"});
//   std::fputs(t.str().c_str(), stdout);
//
// And a tenant's view of its devices and memory, as nvidia-smi shows a whole machine: the tenant's own part is the whole.
//
//   std::fputs(gpushare::tenant_table(chat).c_str(), stdout);
//
//  chat: 60 % of 2 devices, level 1, 3 in flight, 0 waiting, 12.3 s of device time
//  device  memory used  of          free       kept idle  largest free
//  ------  -----------  ----------  ---------  ---------  ------------
//       0      512 MiB  24576 MiB  24064 MiB    128 MiB     24064 MiB
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
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

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

/// A line for the tenant and a row for each of its devices, as of now. Throws std::bad_alloc, and
/// operation_error (closed) as tenant::memory() does. Not for a hot path: looking for the largest
/// free block takes locks.
template <class Tenant>
[[nodiscard]] std::string tenant_table(Tenant& of) {
    const auto tenths = [](std::uint64_t n) { return std::to_string(n / 10) + '.' + std::to_string(n % 10); };
    const auto mib = [](bytes b) { return std::to_string(b.count() >> 20) + " MiB"; };
    const auto spec = of.spec();
    const auto usage = of.usage();
    std::string text = detail::printable(of.name()) + ": " + tenths(spec.compute.permille()) + " % of " +
                       std::to_string(spec.on.size()) + (spec.on.size() == 1 ? " device" : " devices") + ", level " +
                       std::to_string(spec.level.level) + ", " + std::to_string(usage.in_flight) + " in flight, " +
                       std::to_string(usage.waiting) + " waiting, " +
                       tenths(static_cast<std::uint64_t>(usage.device_time.count()) / 100000000) +
                       " s of device time\n";
    using enum align;
    table rows{{"device", right}, {"memory used", right}, {"of", right},
               {"free", right},   {"kept idle", right},   {"largest free", right}};
    for (std::size_t part = 0; part < spec.on.size(); ++part) {
        auto& memory = of.memory(part);
        rows.add_row({std::to_string(spec.on[part].index), mib(memory.limit().usage().current), mib(memory.capacity()),
                      mib(memory.free()), mib(memory.idle()), mib(memory.largest_free())});
    }
    return text += rows.str();
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
