// SPDX-License-Identifier: Apache-2.0
// Which algorithm a size gets: a table that was measured, that a person can read and change, and that is saved as text.
//
//   auto table = gpushare::tuning_table::load(text);      // "2 4096 one_shot cached\n..."
//   gpushare::communicator group(4, {.tuning = table});
//
// Whatever it says, the result has the same bits: every algorithm combines the ranks of an element in their order.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// How an all-reduce goes. S bytes a rank, R ranks:
///   flag_in_data   every four bytes travel with the epoch in one word: no flags, no second look; twice the bytes
///   one_shot       each rank leaves its data in its slot and combines all of it itself: one wait, (R+2)RS bytes
///   two_shot       each rank combines a part straight from all inputs and writes it to all outputs: two waits, 2RS bytes
///   ring           parts go from rank to rank in chunks: each rank talks to its neighbours only
enum class algorithm : std::uint8_t { flag_in_data, one_shot, two_shot, ring };

[[nodiscard]] constexpr std::string_view to_string(algorithm a) noexcept {
    constexpr std::array<std::string_view, 4> names{"flag_in_data", "one_shot", "two_shot", "ring"};
    return names[static_cast<std::size_t>(a)];
}

struct collective_plan {
    algorithm how = algorithm::two_shot;
    bool streaming = false;  // results go past the caches
    friend constexpr bool operator==(const collective_plan&, const collective_plan&) = default;
};

/// A value. Safe to read from any thread.
class tuning_table {
public:
    struct row {
        std::uint32_t ranks = 0;  // up to so many
        std::uint64_t bytes = 0;  // a rank, up to so many
        collective_plan plan{};
        friend constexpr bool operator==(const row&, const row&) = default;
    };
    static constexpr std::uint32_t any_ranks = std::numeric_limits<std::uint32_t>::max();
    static constexpr std::uint64_t any_bytes = std::numeric_limits<std::uint64_t>::max();

    tuning_table() = default;
    explicit tuning_table(std::vector<row> rows) : rows_(std::move(rows)) {
        std::stable_sort(rows_.begin(), rows_.end(), [](const row& a, const row& b) {
            return a.ranks != b.ranks ? a.ranks < b.ranks : a.bytes < b.bytes;
        });
    }

    /// As measured with 2 and 4 ranks on 2 cores of a Xeon with 2 MiB of second-level cache each. Past the caches it goes from
    /// the size at which cold data gains more than warm data loses; `tune` sees warm data only.
    [[nodiscard]] static tuning_table measured() {
        using enum algorithm;
        return tuning_table({{2, 512, {one_shot, false}},
                             {2, std::uint64_t{512} << 10, {two_shot, false}},
                             {2, any_bytes, {two_shot, true}},
                             {any_ranks, 1024, {one_shot, false}},
                             {any_ranks, std::uint64_t{1} << 20, {two_shot, false}},
                             {any_ranks, any_bytes, {two_shot, true}}});
    }
    /// Everything by one algorithm.
    [[nodiscard]] static tuning_table always(algorithm how, bool streaming = false) {
        return tuning_table({{any_ranks, any_bytes, {how, streaming}}});
    }

    [[nodiscard]] std::span<const row> rows() const noexcept { return rows_; }
    friend bool operator==(const tuning_table&, const tuning_table&) = default;

    /// The first row for at least so many ranks and bytes; the two-shot if there is none.
    [[nodiscard]] collective_plan plan(std::uint32_t ranks, std::uint64_t bytes) const noexcept {
        for (const row& r : rows_)
            if (ranks <= r.ranks && bytes <= r.bytes) return r.plan;
        return {};
    }

    /// A line per row: ranks, bytes, algorithm, "cached" or "streaming"; "any" for a row without a limit.
    [[nodiscard]] std::string save() const {
        std::string text;
        for (const row& r : rows_) {
            text += r.ranks == any_ranks ? "any" : std::to_string(r.ranks);
            text += ' ';
            text += r.bytes == any_bytes ? "any" : std::to_string(r.bytes);
            text += ' ';
            text += to_string(r.plan.how);
            text += r.plan.streaming ? " streaming\n" : " cached\n";
        }
        return text;
    }

    /// What `save` wrote. Throws operation_error: errc::invalid_specification, with the line in `asked`.
    [[nodiscard]] static tuning_table load(std::string_view text) {
        std::vector<row> rows;
        for (std::uint64_t line = 1; !text.empty(); ++line) {
            std::string_view rest = text.substr(0, text.find('\n'));
            text.remove_prefix(std::min(rest.size() + 1, text.size()));
            if (rest.empty()) continue;
            const auto word = [&] {
                const std::string_view w = rest.substr(0, rest.find(' '));
                rest.remove_prefix(std::min(w.size() + 1, rest.size()));
                return w;
            };
            row r;
            bool good = number(word(), r.ranks) && number(word(), r.bytes);
            const std::string_view how = word(), where = word();
            good = good && (where == "cached" || where == "streaming") && rest.empty();
            r.plan.streaming = where == "streaming";
            bool known = false;
            for (const algorithm a :
                 {algorithm::flag_in_data, algorithm::one_shot, algorithm::two_shot, algorithm::ring})
                if (how == to_string(a)) {
                    r.plan.how = a;
                    known = true;
                }
            if (!good || !known)
                raise({.code = errc::invalid_specification, .asked = line}, {}, "loading a tuning table");
            rows.push_back(r);
        }
        return tuning_table(std::move(rows));
    }

private:
    template <class N>
    static bool number(std::string_view word, N& n) noexcept {
        if (word == "any") {
            n = std::numeric_limits<N>::max();
            return true;
        }
        const char* const end = word.data() + word.size();
        const auto [stop, code] = std::from_chars(word.data(), end, n);
        return code == std::errc{} && stop == end && !word.empty();
    }

    std::vector<row> rows_;
};

}  // namespace gpushare::inline GPUSHARE_ABI
