// SPDX-License-Identifier: Apache-2.0
// A tuning table says which algorithm an all-reduce of each size uses, and how a fused all-reduce
// stores its results. Tables are measured and saved as text, which people can read and edit.
//
//   #include <gpushare/collective/communicator.hpp>
//   auto table = gpushare::tuning_table::load("4 4096 one_shot cached\n"                    // up to 4 ranks, up to 4096 bytes
//                                             // up to 4 ranks, above that
//                                             "4 any two_shot streaming places=2\n");
//   gpushare::communicator group(4, {.tuning = table});
//
// A row states the most ranks, the most bytes, the algorithm, and how results are stored. Options
// may follow (all_reduce_plan).
//
// The table never changes the bits of a result, because every algorithm combines the ranks' values
// of an element in rank order.
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

/// The algorithms of an all-reduce, with their waits and their traffic for S bytes of each rank and
/// R ranks:
///  - one_shot: each rank leaves its data in its slot, and each rank combines all data itself. One
///    wait, (R+3)RS bytes.
///  - two_shot: each rank combines a part straight from all inputs and writes it to all outputs.
///    Two waits, 2RS bytes.
///  - ring: parts go from rank to rank in chunks, and each rank talks to its neighbours only.
enum class algorithm : std::uint8_t {
    one_shot,  ///< for the smallest sizes
    two_shot,  ///< the least traffic
    ring,      ///< for ranks that reach their neighbours only
};

/// The algorithm's name.
[[nodiscard]] constexpr std::string_view to_string(algorithm a) noexcept {
    constexpr std::array<std::string_view, 3> names{"one_shot", "two_shot", "ring"};
    return names[static_cast<std::size_t>(a)];
}

/// The plan of a plain all-reduce. The fields after `how` apply to the two-shot.
struct all_reduce_plan {
    algorithm how = algorithm::two_shot;  ///< see algorithm
    /// Stores results past the caches. Exceptions are calls in place, whose lines are in the caches
    /// already, and addresses that don't allow such stores.
    bool streaming = false;
    /// With `streaming`: the number of places in its part that a thread writes alternately, 1 or 2.
    std::uint8_t places = 1;
    /// How many cache lines ahead of its work a thread prefetches; 0 leaves prefetching to the
    /// processor. Applies wherever results are stored through the caches, so also in place with
    /// `streaming`.
    std::uint8_t ahead = 0;
    /// The blocks of each rank's kernel, for a submitted call whose caller leaves the number open;
    /// 0 means one block. The call uses fewer blocks if not as many exist or fit.
    std::uint16_t blocks = 0;
    friend constexpr bool operator==(const all_reduce_plan&, const all_reduce_plan&) = default;
};

/// The plan of a fused all-reduce. A fused all-reduce always goes by whole rows, in two shots or
/// one, so these fields are the only choices. The plan has a type of its own, so that a table can't
/// name an algorithm that a fused call wouldn't follow.
struct fused_plan {
    bool streaming = false;    ///< results go past the caches
    std::uint16_t blocks = 0;  ///< as all_reduce_plan::blocks
    /// Each rank runs the stages on all rows, with one wait. The call still goes by two shots in
    /// three cases: a block's rows and its current row don't fit into its slot, ranks keep shards
    /// of the result, or a stage isn't an any_row_stage.
    bool one_shot = false;
    friend constexpr bool operator==(const fused_plan&, const fused_plan&) = default;
};

/// Plans by number of ranks and bytes. A value that any thread may read.
class tuning_table {
public:
    /// One row of a table: the plan for up to `ranks` ranks and up to `bytes` bytes a rank.
    template <class Plan>
    struct row_of {
        std::uint32_t ranks = 0;  ///< at most
        std::uint64_t bytes = 0;  ///< bytes of each rank, at most
        Plan plan{};              ///< the plan for these
        friend constexpr bool operator==(const row_of&, const row_of&) = default;
    };
    using row = row_of<all_reduce_plan>;   ///< a row for plain all-reduces
    using fused_row = row_of<fused_plan>;  ///< a row for fused all-reduces

    /// The number of ranks of a row without a limit.
    static constexpr std::uint32_t any_ranks = std::numeric_limits<std::uint32_t>::max();
    /// The number of bytes of a row without a limit.
    static constexpr std::uint64_t any_bytes = std::numeric_limits<std::uint64_t>::max();

    /// Every call uses the two-shot, with results stored through the caches.
    tuning_table() = default;
    /// Takes rows in any order. A fused call goes by one shot, or stores past the caches, where a
    /// plain call of the same size does.
    explicit tuning_table(std::vector<row> rows) : rows_(sorted(std::move(rows))), fused_(like(rows_)) {}
    /// Takes separate rows for fused calls.
    tuning_table(std::vector<row> rows, std::vector<fused_row> fused)
        : rows_(sorted(std::move(rows))), fused_(sorted(std::move(fused))) {}

    /// The table that was measured on a machine with a processor of the same vendor as this one.
    /// The table is a start; tune() finds a better one.
    [[nodiscard]] static tuning_table measured() {
#if defined(__x86_64__)
        if (__builtin_cpu_is("amd")) return measured_on_epyc();
#endif
        return measured_on_xeon();
    }
    /// Measured with 2 and 4 ranks on 2 cores of a Xeon (AVX-512, 2 MiB of second-level cache
    /// each). Each rank read its results.
    [[nodiscard]] static tuning_table measured_on_xeon() {
        using enum algorithm;
        return tuning_table({{2, 1024, {one_shot}},
                             {2, std::uint64_t{16} << 20, {two_shot, false, 1, 16}},
                             {2, any_bytes, {two_shot, true, 2, 16}},
                             {any_ranks, 4096, {one_shot}},
                             {any_ranks, std::uint64_t{1} << 20, {two_shot, false, 1, 16}},
                             {any_ranks, any_bytes, {two_shot, true, 1, 16}}});
    }
    /// Measured with 2 and 4 ranks on 2 cores of an EPYC (AVX-512, 32 MiB of third-level cache).
    /// Each rank read its results.
    [[nodiscard]] static tuning_table measured_on_epyc() {
        using enum algorithm;
        return tuning_table({{2, 512, {one_shot}},
                             {2, std::uint64_t{256} << 10, {two_shot, false, 1, 16}},
                             {2, std::uint64_t{4} << 20, {two_shot}},
                             {2, any_bytes, {two_shot, true}},
                             {any_ranks, 8192, {one_shot}},
                             {any_ranks, std::uint64_t{2} << 20, {two_shot}},
                             {any_ranks, any_bytes, {two_shot, true}}});
    }
    /// For groups on devices, until their own table is measured (tune_submitted). We haven't
    /// measured this table. It follows vLLM's kernels, which use the same algorithms over NVLink.
    /// They take one shot up to 512 KiB for up to 4 ranks, and up to 256 KiB for up to 8 ranks.
    /// They use 36 blocks of 512 threads, and more blocks gained nothing there. Less than 16 KiB
    /// isn't worth another block, since the block has to meet the other ranks' blocks, too.
    [[nodiscard]] static tuning_table for_devices() {
        using enum algorithm;
        constexpr std::uint64_t kib = 1024;
        std::vector<row> rows;
        for (const auto& [ranks, one_shot_until] :
             {std::pair<std::uint32_t, std::uint64_t>{4, 512}, {8, 256}, {any_ranks, 64}}) {
            for (const auto& [size, blocks] : {std::pair<std::uint64_t, std::uint16_t>{16, 1}, {64, 4}, {256, 16}})
                if (size <= one_shot_until) rows.push_back({ranks, size * kib, {one_shot, false, 1, 0, blocks}});
            if (one_shot_until > 256) rows.push_back({ranks, one_shot_until * kib, {one_shot, false, 1, 0, 36}});
            rows.push_back({ranks, any_bytes, {two_shot, false, 1, 0, 36}});
        }
        return tuning_table(std::move(rows));
    }
    /// A table in which every call uses one plan.
    [[nodiscard]] static tuning_table always(const all_reduce_plan& plan) {
        return tuning_table({{any_ranks, any_bytes, plan}});
    }
    /// The same for an algorithm, with defaults for the plan's other fields.
    [[nodiscard]] static tuning_table always(algorithm how) { return always(all_reduce_plan{how}); }

    /// The rows of plain calls, the smallest first.
    [[nodiscard]] std::span<const row> rows() const noexcept { return rows_; }
    /// The rows of fused calls, the smallest first.
    [[nodiscard]] std::span<const fused_row> fused_rows() const noexcept { return fused_; }
    friend bool operator==(const tuning_table&, const tuning_table&) = default;

    /// The plan of a plain all-reduce. The first row for at least this many ranks and bytes
    /// decides; if no row fits, the plan is the two-shot algorithm.
    [[nodiscard]] all_reduce_plan plan(std::uint32_t ranks, std::uint64_t bytes) const noexcept {
        return first(rows_, ranks, bytes);
    }
    /// The plan of a fused all-reduce.
    [[nodiscard]] fused_plan fused(std::uint32_t ranks, std::uint64_t bytes) const noexcept {
        return first(fused_, ranks, bytes);
    }

    /// The table as text, one line per row: ranks, bytes, algorithm, "cached" or "streaming", then
    /// "places=2", "ahead=16" and "blocks=36" where the value isn't the default. A row without a
    /// limit has "any". Rows of fused calls have "fused" or "fused_one_shot" as the algorithm, and
    /// are left out if they follow from the other rows.
    [[nodiscard]] std::string save() const {
        std::string text;
        for (const row& r : rows_) {
            text += limits(r) + std::string(to_string(r.plan.how)) + stores(r.plan.streaming);
            if (r.plan.places != all_reduce_plan{}.places) text += " places=" + std::to_string(r.plan.places);
            if (r.plan.ahead != all_reduce_plan{}.ahead) text += " ahead=" + std::to_string(r.plan.ahead);
            text += blocks(r.plan.blocks) + '\n';
        }
        if (fused_ != like(rows_))
            for (const fused_row& r : fused_)
                text += limits(r) + (r.plan.one_shot ? "fused_one_shot" : "fused") + stores(r.plan.streaming) +
                        blocks(r.plan.blocks) + '\n';
        return text;
    }

    /// Reads text that `save` wrote. Throws operation_error: errc::invalid_specification, with the
    /// line in `asked`.
    [[nodiscard]] static tuning_table load(std::string_view text) {
        std::vector<row> rows;
        std::vector<fused_row> fused;
        for (std::uint64_t line = 1; !text.empty(); ++line) {
            const std::string_view one = text.substr(0, text.find('\n'));
            text.remove_prefix(std::min(one.size() + 1, text.size()));
            if (!one.empty() && !read_line(one, rows, fused))
                raise({.code = errc::invalid_specification, .asked = line, .because = reason::text_line}, {},
                      "loading a tuning table");
        }
        return fused.empty() ? tuning_table(std::move(rows)) : tuning_table(std::move(rows), std::move(fused));
    }

private:
    template <class Row>
    static std::vector<Row> sorted(std::vector<Row> rows) {
        std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
            return a.ranks != b.ranks ? a.ranks < b.ranks : a.bytes < b.bytes;
        });
        return rows;
    }
    template <class Plan>
    static Plan first(const std::vector<row_of<Plan>>& rows, std::uint32_t ranks, std::uint64_t bytes) noexcept {
        for (const auto& r : rows)
            if (ranks <= r.ranks && bytes <= r.bytes) return r.plan;
        return {};
    }
    /// The fused rows that follow from these rows, without a row where nothing changes.
    static std::vector<fused_row> like(const std::vector<row>& rows) {
        std::vector<fused_row> all;
        for (const row& r : rows) {
            const fused_plan plan{r.plan.streaming, r.plan.blocks, r.plan.how == algorithm::one_shot};
            if (all.empty() || all.back().ranks != r.ranks || all.back().plan != plan)
                all.push_back({r.ranks, r.bytes, plan});
            all.back().bytes = r.bytes;
        }
        return all;
    }
    /// Takes the next word off `rest`.
    static std::string_view next_word(std::string_view& rest) noexcept {
        const std::string_view word = rest.substr(0, rest.find(' '));
        rest.remove_prefix(std::min(word.size() + 1, rest.size()));
        return word;
    }
    /// Takes "NAME=NUMBER" off the front of `rest`, if `rest` begins with it. Returns false if no
    /// number follows the name.
    template <class N>
    static bool read_option(std::string_view& rest, std::string_view name, N& n) noexcept {
        return !rest.starts_with(name) || number(next_word(rest).substr(name.size()), n);
    }
    /// Adds the row that `line` describes to one of the lists. Returns false if `line` describes no
    /// row.
    static bool read_line(std::string_view line, std::vector<row>& rows, std::vector<fused_row>& fused) {
        row r;
        if (!limit(next_word(line), r.ranks) || !limit(next_word(line), r.bytes)) return false;
        const std::string_view how = next_word(line), where = next_word(line);
        r.plan.streaming = where == "streaming";
        if (!r.plan.streaming && where != "cached") return false;
        if (how == "fused" || how == "fused_one_shot") {
            if (!read_option(line, "blocks=", r.plan.blocks) || !line.empty()) return false;
            fused.push_back({r.ranks, r.bytes, {r.plan.streaming, r.plan.blocks, how == "fused_one_shot"}});
            return true;
        }
        constexpr std::array known{algorithm::one_shot, algorithm::two_shot, algorithm::ring};
        const auto named = std::ranges::find_if(known, [&](algorithm a) { return how == to_string(a); });
        if (named == known.end() || !read_option(line, "places=", r.plan.places) ||
            !read_option(line, "ahead=", r.plan.ahead) || !read_option(line, "blocks=", r.plan.blocks))
            return false;
        r.plan.how = *named;
        if (!line.empty() || r.plan.places < 1 || r.plan.places > 2) return false;
        rows.push_back(r);
        return true;
    }

    template <class Row>
    static std::string limits(const Row& r) {
        return (r.ranks == any_ranks ? "any" : std::to_string(r.ranks)) + ' ' +
               (r.bytes == any_bytes ? "any" : std::to_string(r.bytes)) + ' ';
    }
    static std::string blocks(std::uint16_t n) { return n == 0 ? std::string() : " blocks=" + std::to_string(n); }
    static const char* stores(bool streaming) noexcept { return streaming ? " streaming" : " cached"; }

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
    std::vector<fused_row> fused_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
