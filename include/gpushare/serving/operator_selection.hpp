// SPDX-License-Identifier: Apache-2.0
// Which implementation of an operation to use for which shape: our kernel, a vendor library's, or
// an engine's. The choices are a table that is measured once and saved as text, which people can
// read and change.
//
//   auto table = gpushare::operator_table::load("matmul f16:4096x4096x8 cublaslt 41200 3\n");
//   if (const auto* found = table.find("matmul", "f16:4096x4096x8")) use(found->candidate);
//
// A line has the operation, the shape, the candidate, how long the candidate took (ns), and the
// number of candidates. Lines that begin with # are comments.
//
// Implementations are measured on the real arrays, each as a submission of a tenant's. Neighbours
// lose nothing, because the measurements count against the tenant's own share.
//
//   const gpushare::operator_candidate<gpushare::host::stream> all[]{{"ours", [&](auto& to) { ours(to, a, b, c); }},
//                                                                    {"vendor", [&](auto& to) { vendor(to, a, b, c); }}};
//   const auto best = gpushare::select_operator(chat, table, "matmul", "f16:4096x4096x8", std::span(all),
//                                               {.by = all[1], .results = {gpushare::compared(c, 4096 * 8, {.relative = 1e-2})}});
//   best.candidate;                     // from the table the next time, which table.save() keeps
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <gpushare/compute/submission.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/memory/scrub.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The best candidate that was found for one operation and shape. All texts are words: not empty,
/// and without blanks and control characters.
struct operator_choice {
    std::string operation{};       ///< such as "matmul"
    std::string shape{};           ///< everything that the choice depends on: sizes, types, layout
    std::string candidate{};       ///< the name of the best candidate
    ns took{};                     ///< its median time
    std::uint32_t candidates = 1;  ///< the number of candidates

    friend bool operator==(const operator_choice&, const operator_choice&) = default;
};

/// Choices by operation and shape. A value. Not thread-safe while it changes.
class operator_table {
public:
    /// The choice for an operation and shape; null if there is none. O(log rows); neither allocates
    /// nor throws.
    [[nodiscard]] const operator_choice* find(std::string_view operation, std::string_view shape) const noexcept {
        const auto at = place_of(operation, shape);
        return at != rows_.end() && at->operation == operation && at->shape == shape ? &*at : nullptr;
    }
    /// Adds a choice, in place of any earlier choice for its operation and shape. Throws
    /// operation_error: invalid_specification for texts that aren't words, for an operation that
    /// begins with #, or for a time below 0.
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
    /// Removes a choice, so that it is measured again. Returns whether there was one.
    bool forget(std::string_view operation, std::string_view shape) {
        if (find(operation, shape) == nullptr) return false;
        rows_.erase(rows_.begin() + (place_of(operation, shape) - rows_.cbegin()));
        return true;
    }
    /// All choices, ordered by operation and shape.
    [[nodiscard]] std::span<const operator_choice> rows() const noexcept { return rows_; }
    friend bool operator==(const operator_table&, const operator_table&) = default;

    /// The table as text, a line for each choice. Throws std::bad_alloc.
    [[nodiscard]] std::string save() const {
        std::string text;
        for (const auto& r : rows_)
            text += r.operation + ' ' + r.shape + ' ' + r.candidate + ' ' + std::to_string(r.took.count()) + ' ' +
                    std::to_string(r.candidates) + '\n';
        return text;
    }
    /// Reads text that save() wrote and that people may have edited. Throws operation_error:
    /// invalid_specification, with the line in `asked`, for a malformed line or a second line for
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
                good = good && code == std::errc{} && stop == w.data() + w.size() && std::cmp_greater_equal(n, 0);
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

/// One implementation.
template <timeline Stream>
struct operator_candidate {
    std::string name{};                     ///< one word
    std::function<void(Stream& to)> run{};  ///< enqueues the operation; the same arrays each time
    /// whether its results are right, asked after its first run; if empty, the results count as
    /// right
    std::function<bool()> right{};
};

/// How much a number may differ from the reference's number: by `absolute`, or by `relative` times
/// the reference's number. If both are 0, the numbers must be equal. A NaN must match a NaN.
struct operator_tolerance {
    double absolute = 0;  ///< in the results' unit
    double relative = 0;  ///< relative to the reference's number
};

/// An array in the device's memory that the operation writes, and the comparison of a candidate's
/// array with the reference's.
struct operator_result {
    void* at = nullptr;    ///< the array's address
    std::size_t size = 0;  ///< bytes
    /// Compares two arrays of `size` bytes in host memory. Returns an empty text if they agree, and
    /// otherwise a description of the difference, for people.
    std::function<std::string(const std::byte* expected, const std::byte* got)> difference{};
};

/// An array of `n` numbers that are compared one by one: C++'s integers and floats, and types that
/// convert to float.
template <class T>
[[nodiscard]] operator_result compared(T* at, std::size_t n, operator_tolerance within = {}) {
    const auto number = [](const std::byte* from, std::size_t i) {
        T value;
        std::memcpy(&value, from + i * sizeof(T), sizeof(T));
        if constexpr (std::integral<T> || std::floating_point<T>)
            return static_cast<double>(value);
        else
            return static_cast<double>(static_cast<float>(value));
    };
    const auto difference = [=](const std::byte* expected, const std::byte* got) {
        for (std::size_t i = 0; i < n; ++i) {
            if (std::memcmp(expected + i * sizeof(T), got + i * sizeof(T), sizeof(T)) == 0) continue;
            const double want = number(expected, i), have = number(got, i);
            // No number is close to an infinity, and a comparison with a NaN is false.
            const double most = std::max(within.absolute, within.relative * std::abs(want));
            const bool near = std::isfinite(want) && most > 0 && std::abs(want - have) <= most;
            if (near || (!std::integral<T> && want == have) || (std::isnan(want) && std::isnan(have))) continue;
            char text[96];
            (void)std::snprintf(text, sizeof text, "element %zu is %.9g and should be %.9g", i, have, want);
            return std::string(text);
        }
        return std::string();
    };
    return {at, n * sizeof(T), difference};
}

/// The reference with which every candidate has to agree. Before a compared run, the results are
/// overwritten (with bytes of 0xff, which aren't numbers), so that a candidate that doesn't write
/// its results fails.
template <timeline Stream>
struct operator_reference {
    /// the reference; it isn't measured, unless it is a candidate as well
    operator_candidate<Stream> by{};
    std::vector<operator_result> results{};  ///< results of the reference, and of each candidate
    /// For operations that read their results: restores the results instead of overwriting them.
    std::function<void(Stream& to)> prepare{};
};

/// A candidate that selection leaves out, even if it is the fastest.
struct left_out_operator {
    std::string name{};        ///< the candidate's name
    errc status = errc::none;  ///< of its submission; kernel_failed also stands for wrong results
    /// The exception's message, or a description of the wrong result. For people.
    std::string why{};
};

/// How candidates are measured.
struct selection_options {
    int warm_up = 1;          ///< runs of each candidate that don't count
    int repeats = 5;          ///< runs of each candidate that count; the median decides
    std::size_t part = 0;     ///< the number of the tenant's device
    submit_options submit{};  ///< options of each run
    /// gets the candidates that failed or gave wrong results
    std::vector<left_out_operator>* left_out = nullptr;
};

namespace detail {

/// One selection under way.
template <class Tenant>
class operator_trial {
public:
    using stream = typename Tenant::stream;
    using candidate = operator_candidate<stream>;
    using reference = operator_reference<stream>;

    operator_trial(Tenant& by, std::span<const candidate> all, const reference* right, const selection_options& o)
        : by_(by), all_(all), right_(right), o_(o), times_(all.size()), out_(all.size()) {}

    /// Throws the reference's failure.
    void run_reference() {
        if (right_ == nullptr) return;
        if (const auto failed = run(right_->by, &expected_); failed.status != errc::none)
            throw operation_error(failed.status, by_.name(),
                                  ("the reference of operators, " + described(failed)).c_str());
    }
    /// Runs all candidates in turns. Compares the first and the last run of each with the
    /// reference.
    void measure() {
        const std::int64_t rounds = std::int64_t{std::max(o_.warm_up, 0)} + std::max(o_.repeats, 1);
        for (std::int64_t round = 0; round < rounds; ++round)
            for (std::size_t i = 0; i < all_.size(); ++i) {
                if (out_[i]) continue;
                const bool compares = right_ != nullptr && (round == 0 || round == rounds - 1);
                auto failed = run(all_[i], compares ? &got_ : nullptr);
                if (failed.status == errc::none) failed.why = wrong(i, round == 0, compares);
                if (failed.status == errc::none && failed.why.empty()) {
                    if (round >= o_.warm_up) times_[i].push_back(took_);
                    continue;
                }
                if (failed.status == errc::none) failed.status = errc::kernel_failed;
                out_[i] = true;
                left_out_.push_back(std::move(failed));
            }
        if (o_.left_out != nullptr) *o_.left_out = left_out_;
    }
    /// The candidate with the least median. Throws operation_error if no candidate is left.
    [[nodiscard]] operator_choice best(std::string_view operation, std::string_view shape) {
        std::optional<operator_choice> best;
        for (std::size_t i = 0; i < all_.size(); ++i) {
            if (out_[i]) continue;
            const auto middle = times_[i].begin() + static_cast<std::ptrdiff_t>(times_[i].size() / 2);
            std::ranges::nth_element(times_[i], middle);
            if (!best || *middle < best->took)
                best = operator_choice{std::string(operation), std::string(shape), all_[i].name,
                                       std::max(*middle, ns{}), static_cast<std::uint32_t>(all_.size())};
        }
        if (best) return *best;
        std::string text = "no operator works";
        for (const auto& l : left_out_) text.append("; ").append(described(l));
        throw operation_error(left_out_.back().status, by_.name(), text.c_str());
    }

private:
    using host_copies = std::vector<std::vector<std::byte>>;

    /// If `copies` isn't null, it gets the results.
    left_out_operator run(const candidate& c, host_copies* copies) {
        typename stream::point begin, end;
        auto ticket = by_.submit(
            [&](stream& to) {
                if (copies != nullptr) prepare(to);
                begin = to.record();
                c.run(to);
                end = to.record();
                if (copies != nullptr) copy_results(to, *copies);
            },
            o_.submit, {}, o_.part);
        (void)ticket.wait();
        const errc status = ticket.status();
        if (status == errc::closed || status == errc::device_lost) raise({status}, by_.name(), "selecting an operator");
        if (status == errc::none) took_ = elapsed(begin, end);
        return {c.name, status, status != errc::none ? why(ticket) : std::string()};
    }
    void prepare(stream& to) const {
        if (right_->prepare) return right_->prepare(to);
        if constexpr (scrubber<stream>)
            for (const auto& r : right_->results) to.fill(r.at, std::byte{0xff}, r.size);
    }
    void copy_results(stream& to, host_copies& copies) const {
        if constexpr (copier<stream>) {
            copies.resize(right_->results.size());
            for (std::size_t i = 0; i < copies.size(); ++i) {
                copies[i].resize(right_->results[i].size);
                to.copy(copies[i].data(), right_->results[i].at, copies[i].size());
            }
        }
    }
    /// Empty if the results of candidate `i` are right, otherwise a description of the fault.
    [[nodiscard]] std::string wrong(std::size_t i, bool first, bool compares) const {
        if (first && all_[i].right && !all_[i].right()) return "its results are wrong";
        for (std::size_t r = 0; compares && r < got_.size(); ++r)
            if (auto text = right_->results[r].difference(expected_[r].data(), got_[r].data()); !text.empty())
                return "result " + std::to_string(r) + " isn't as by " + right_->by.name + ": " + text;
        return {};
    }
    template <class Ticket>
    [[nodiscard]] static std::string why(const Ticket& failed) {
        try {
            failed.rethrow();
        } catch (const std::exception& e) {
            return e.what();
        } catch (...) {
        }
        return std::string(to_string(failed.status()));
    }
    [[nodiscard]] static std::string described(const left_out_operator& l) { return l.name + ": " + l.why; }

    Tenant& by_;
    std::span<const candidate> all_;
    const reference* right_;
    const selection_options& o_;
    std::vector<std::vector<ns>> times_;
    std::vector<bool> out_;
    std::vector<left_out_operator> left_out_;
    host_copies expected_, got_;
    ns took_{};
};

template <class Tenant>
operator_choice select_operator(Tenant& by, operator_table& table, std::string_view operation, std::string_view shape,
                                std::span<const operator_candidate<typename Tenant::stream>> candidates,
                                const operator_reference<typename Tenant::stream>* reference,
                                const selection_options& o) {
    if (o.left_out != nullptr) o.left_out->clear();
    if (const auto* known = table.find(operation, shape))
        for (const auto& c : candidates)
            if (c.name == known->candidate) return *known;
    if (candidates.empty())
        raise({.code = errc::invalid_specification, .because = reason::no_candidates}, by.name(),
              "selecting an operator");
    operator_trial<Tenant> trial(by, candidates, reference, o);
    trial.run_reference();
    trial.measure();
    auto best = trial.best(operation, shape);
    table.keep(best);
    return best;
}

}  // namespace detail

/// The best candidate for this operation and shape. If the table names one of these candidates,
/// returns that candidate. Otherwise measures the candidates, in turn, by the time on the stream,
/// and keeps the best. A candidate that fails, or whose `right` returns false, is left out and
/// named (selection_options::left_out). Results are compared with a reference only in the overload
/// that takes one.
///
/// Throws operation_error. If all candidates fail, the error is that of the candidate that failed
/// last (kernel_failed for wrong results), with the names and reasons of all. Without candidates,
/// it is invalid_specification. The errors of tenant::submit are thrown as well.
template <class Tenant>
operator_choice select_operator(Tenant& by, operator_table& table, std::string_view operation, std::string_view shape,
                                std::span<const operator_candidate<typename Tenant::stream>> candidates,
                                const selection_options& o = {}) {
    return detail::select_operator(by, table, operation, shape, candidates, nullptr, o);
}

/// The best candidate whose results agree with the reference's. The reference runs first. Also
/// throws the reference's failure, and std::bad_alloc, because each result is copied to the host
/// twice.
template <class Tenant>
requires copier<typename Tenant::stream> && scrubber<typename Tenant::stream> operator_choice
select_operator(Tenant& by, operator_table& table, std::string_view operation, std::string_view shape,
                std::span<const operator_candidate<typename Tenant::stream>> candidates,
                const operator_reference<typename Tenant::stream>& reference, const selection_options& o = {}) {
    return detail::select_operator(by, table, operation, shape, candidates, &reference, o);
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
