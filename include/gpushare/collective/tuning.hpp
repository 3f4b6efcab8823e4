// SPDX-License-Identifier: Apache-2.0
// Which algorithm a size gets: a table that was measured, that a person can read and change, and that is saved as text.
//
//   auto table = gpushare::tuning_table::load(text);      // "2 4096 one_shot cached\n2 any two_shot streaming places=2\n"
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

namespace gpushare {
inline namespace GPUSHARE_ABI {

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
    /// Results go past the caches: not in place, where they are in the caches already, nor to addresses that don't allow it.
    bool streaming = false;
    /// At how many places of its part a thread stores past the caches by turns: 1 or 2.
    std::uint8_t places = 1;
    /// How many cache lines ahead of its work a thread asks for those that it reads and writes; 0 leaves that to the
    /// processor. Where results stay in the caches.
    std::uint8_t ahead = 0;
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

    /// What was found on a machine with a processor of this one's maker: good to begin with. What `tune` finds here is better.
    [[nodiscard]] static tuning_table measured() {
#if defined(__x86_64__)
        if (__builtin_cpu_is("amd")) return measured_on_epyc();
#endif
        return measured_on_xeon();
    }
    /// With 2 and 4 ranks on 2 cores of a Xeon (AVX-512, 2 MiB of second-level cache each), where nobody reads the results.
    [[nodiscard]] static tuning_table measured_on_xeon() {
        using enum algorithm;
        return tuning_table({{2, 512, {one_shot}},
                             {2, std::uint64_t{512} << 10, {two_shot, false, 1, 16}},
                             {2, any_bytes, {two_shot, true, 2, 16}},
                             {any_ranks, 1024, {one_shot}},
                             {any_ranks, std::uint64_t{1} << 20, {two_shot, false, 1, 16}},
                             {any_ranks, any_bytes, {two_shot, true, 1, 16}}});
    }
    /// With 2 and 4 ranks on 2 cores of an EPYC (AVX-512, 32 MiB of third-level cache), where each rank reads its results.
    [[nodiscard]] static tuning_table measured_on_epyc() {
        using enum algorithm;
        return tuning_table({{2, 512, {one_shot}},
                             {2, std::uint64_t{4} << 20, {two_shot}},
                             {2, any_bytes, {two_shot, true}},
                             {any_ranks, 8192, {one_shot}},
                             {any_ranks, std::uint64_t{2} << 20, {two_shot}},
                             {any_ranks, any_bytes, {two_shot, true}}});
    }
    /// Everything by one plan.
    [[nodiscard]] static tuning_table always(const collective_plan& plan) {
        return tuning_table({{any_ranks, any_bytes, plan}});
    }
    [[nodiscard]] static tuning_table always(algorithm how) { return always(collective_plan{how}); }

    [[nodiscard]] std::span<const row> rows() const noexcept { return rows_; }
    friend bool operator==(const tuning_table&, const tuning_table&) = default;

    /// The first row for at least so many ranks and bytes; the two-shot if there is none.
    [[nodiscard]] collective_plan plan(std::uint32_t ranks, std::uint64_t bytes) const noexcept {
        for (const row& r : rows_)
            if (ranks <= r.ranks && bytes <= r.bytes) return r.plan;
        return {};
    }

    /// A line per row: ranks, bytes, algorithm, "cached" or "streaming", and "places=2" or "ahead=16" where they differ from
    /// what they are otherwise; "any" for a row without a limit.
    [[nodiscard]] std::string save() const {
        std::string text;
        for (const row& r : rows_) {
            text += r.ranks == any_ranks ? "any" : std::to_string(r.ranks);
            text += ' ';
            text += r.bytes == any_bytes ? "any" : std::to_string(r.bytes);
            text += ' ';
            text += to_string(r.plan.how);
            text += r.plan.streaming ? " streaming" : " cached";
            if (r.plan.places != collective_plan{}.places) text += " places=" + std::to_string(r.plan.places);
            if (r.plan.ahead != collective_plan{}.ahead) text += " ahead=" + std::to_string(r.plan.ahead);
            text += '\n';
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
            bool good = limit(word(), r.ranks) && limit(word(), r.bytes);
            const std::string_view how = word(), where = word();
            good = good && (where == "cached" || where == "streaming");
            r.plan.streaming = where == "streaming";
            if (rest.starts_with("places="))
                good = good && number(word().substr(7), r.plan.places) && (r.plan.places == 1 || r.plan.places == 2);
            if (rest.starts_with("ahead=")) good = good && number(word().substr(6), r.plan.ahead);
            good = good && rest.empty();
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
    static bool limit(std::string_view word, N& n) noexcept {
        if (word != "any") return number(word, n);
        n = std::numeric_limits<N>::max();
        return true;
    }
    template <class N>
    static bool number(std::string_view word, N& n) noexcept {
        const char* const end = word.data() + word.size();
        const auto [stop, code] = std::from_chars(word.data(), end, n);
        return code == std::errc{} && stop == end && !word.empty();
    }

    std::vector<row> rows_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
