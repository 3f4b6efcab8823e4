// SPDX-License-Identifier: Apache-2.0
// A plan of cuts as text that people can read and change: the pieces, and their nodes in order.
//
//   const std::string text = gpushare::graph::to_text(planner.plan(), g);
//   const auto plan = gpushare::graph::parse_split_plan(text, g);  // after a person edited it
//
// The lines of the text:
//
// - `split_plan 1`: the version, in the first line
// - `graph 9e3779b97f4a7c15`: the graph's fingerprint(); without this line, only names are compared
// - `limit 5ms`: the limit of a piece
// - `piece takes=4912us crosses=602112B`: begins a piece, with its length and the bytes alive at
//  the cut after it; `engine=openvino` names the engine that runs the piece, and `over` at the end
//  of the line says that the piece exceeds the limit
// - `node 0 conv1 Conv`: a node by its number in the graph, its name and its type
//
// Nodes run from top to bottom. To move a cut, move a `piece` line; to remove a cut, delete the
// line. parse_split_plan() reads only `engine` and `takes` from a `piece` line, and computes the
// rest again. The type after a node's name is for people, too. A line that begins with # is a
// comment. Unprintable characters, blanks and backslashes in names are written as `\x20`.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/detail/parse.hpp>
#include <gpushare/error.hpp>
#include <gpushare/graph/detail/cut_costs.hpp>
#include <gpushare/graph/graph.hpp>
#include <gpushare/graph/split_plan.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph {

/// A plan that can't be read, or that doesn't fit the graph. The code is invalid_specification,
/// except mismatch for `graph_changed`.
class plan_error final : public std::runtime_error, public error {
public:
    /// The kind of error.
    enum class kind : std::uint8_t {
        bad_version,  ///< the first line isn't a plan's, or is of a later version
        /// The line is of unknown kind, missing, misplaced or repeated, or has too few words.
        bad_line,
        bad_value,      ///< a value of the wrong form, or a number that doesn't fit
        graph_changed,  ///< the plan is for another graph
        unknown_node,   ///< a number that no node has
        other_node,     ///< the node of that number has another name
        node_twice,     ///< a node in two places
        node_missing,   ///< a node in no piece, or a gap between two pieces
        wrong_order,    ///< a node before a node whose value it reads
        empty_piece,    ///< a piece without a node
        no_cut,         ///< a cut at which a value is alive that no buffer holds
    };

    /// `line` counts from 1; 0 means that no line is to blame. `text` is a sentence about the
    /// error.
    plan_error(kind why, std::size_t line, std::string_view text)
        : std::runtime_error(sentence(line, text)),
          error(failure{why == kind::graph_changed ? errc::mismatch : errc::invalid_specification}, {}),
          why_(why),
          line_(line) {}

    /// The kind of error.
    [[nodiscard]] kind why() const noexcept { return why_; }
    /// The line that is to blame, from 1; 0 if there is none.
    [[nodiscard]] std::size_t line() const noexcept { return line_; }
    /// A sentence for people; unprintable characters of the input are escaped.
    [[nodiscard]] const char* what() const noexcept override { return std::runtime_error::what(); }

private:
    [[nodiscard]] static std::string sentence(std::size_t line, std::string_view text) {
        gpushare::detail::message m;
        m.add("a plan of cuts: ");
        if (line != 0) m.add("line ", static_cast<std::uint64_t>(line), ": ");
        return m.add(text).c_str();
    }

    kind why_;
    std::size_t line_;
};

namespace detail {

inline constexpr std::array plan_times{gpushare::detail::text_unit{"ns", 1}, gpushare::detail::text_unit{"us", 1'000},
                                       gpushare::detail::text_unit{"ms", 1'000'000},
                                       gpushare::detail::text_unit{"s", 1'000'000'000}};

/// A time in the largest unit that keeps it exact.
[[nodiscard]] inline std::string exact_time(ns t) {
    auto n = std::max<std::int64_t>(t.count(), 0);
    std::size_t unit = 0;
    for (; unit + 1 < plan_times.size() && n != 0 && n % 1000 == 0; ++unit) n /= 1000;
    return std::to_string(n) + std::string(plan_times[unit].name);
}

/// A name as one word that can be printed.
[[nodiscard]] inline std::string as_word(std::string_view name) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::string word;
    while (!name.empty()) {
        const auto byte = static_cast<unsigned char>(name[0]);
        const auto size = byte == ' ' || byte == '\\' ? 0 : gpushare::detail::printable_character(name);
        if (size == 0)
            word += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
        else
            word += name.substr(0, size);
        name.remove_prefix(size == 0 ? 1 : size);
    }
    return word;
}

/// The first words of a line, separated by blanks and tabs, and whether there are more.
struct plan_words {
    std::array<std::string_view, 8> all{};
    std::size_t count = 0;
    bool more = false;
};
[[nodiscard]] inline plan_words words_of(std::string_view line) {
    constexpr std::string_view blanks = " \t\r";
    plan_words w;
    while (true) {
        const auto first = line.find_first_not_of(blanks);
        if (first == line.npos) return w;
        line.remove_prefix(first);
        const auto word = line.substr(0, line.find_first_of(blanks));
        if (w.count == w.all.size()) {
            w.more = true;
            return w;
        }
        w.all[w.count++] = word;
        line.remove_prefix(word.size());
    }
}

/// Reads a plan line by line. Keeps the lines of nodes and pieces for errors found at the end.
class plan_reader {
public:
    explicit plan_reader(const model_graph& g) : g_(g), line_of_node_(g.nodes.size()) {
        plan_.of_graph = fingerprint(g);
    }

    void read(std::string_view text) {
        while (!text.empty()) {
            const auto line = text.substr(0, text.find('\n'));
            text.remove_prefix(std::min(line.size() + 1, text.size()));
            ++line_;
            const auto w = words_of(line);
            if (w.count == 0 || w.all[0].front() == '#') continue;
            read(w);
        }
        end_piece();
        if (!versioned_) refuse(plan_error::kind::bad_version, 0, "there is no line `split_plan 1`");
        if (plan_.limit == ns{}) refuse(plan_error::kind::bad_line, 0, "there is no line `limit`, such as limit 5ms");
    }

    [[nodiscard]] split_plan& plan() noexcept { return plan_; }
    [[nodiscard]] std::size_t line_of_node(std::uint32_t n) const noexcept {
        return n < line_of_node_.size() ? line_of_node_[n] : 0;
    }
    [[nodiscard]] std::size_t line_of_piece(std::size_t i) const noexcept {
        return i < line_of_piece_.size() ? line_of_piece_[i] : 0;
    }

private:
    using kind = plan_error::kind;

    [[noreturn]] static void refuse(kind why, std::size_t line, std::string_view text) {
        throw plan_error(why, line, text);
    }
    void read(const plan_words& w) {
        const auto first = w.all[0];
        const auto wants = [&](std::size_t least, std::size_t most) {
            if (w.more || w.count < least || w.count > most)
                refuse(kind::bad_line, line_, "has too few or too many words");
        };
        if (!versioned_) {
            if (first != "split_plan" || w.count != 2 || w.all[1] != "1")
                refuse(kind::bad_version, line_, "must be `split_plan 1`");
            versioned_ = true;
        } else if (first == "graph") {
            wants(2, 2), once(hashed_), read_graph(w.all[1]);
        } else if (first == "limit") {
            wants(2, 2), once(limited_), plan_.limit = time(w.all[1]);
            if (plan_.limit == ns{}) refuse(kind::bad_value, line_, "a limit must be above 0");
        } else if (first == "piece") {
            wants(1, 5), read_piece(w);
        } else if (first == "node") {
            wants(2, 4), read_node(w);
        } else {
            refuse(kind::bad_line, line_, "must begin with graph, limit, piece or node");
        }
    }
    void once(bool& seen) const {
        if (std::exchange(seen, true)) refuse(kind::bad_line, line_, "is given twice");
    }
    [[nodiscard]] ns time(std::string_view text) const {
        const auto n = gpushare::detail::parse_scaled(text, plan_times);
        const bool fits = n.value <= static_cast<std::uint64_t>(ns::max().count());
        if (n.code != gpushare::detail::parse_code::ok || !fits)
            refuse(kind::bad_value, line_, "a time must be a whole number of ns, us, ms or s, such as 5ms");
        return ns{static_cast<std::int64_t>(n.value)};
    }
    [[nodiscard]] std::string engine(std::string_view name) const {
        if (name.empty() || as_word(name) != name)
            refuse(kind::bad_value, line_, "an engine's name is a word that can be printed");
        return std::string(name);
    }
    void read_graph(std::string_view text) const {
        std::uint64_t h = 0;
        const auto [stop, code] = std::from_chars(text.data(), text.data() + text.size(), h, 16);
        if (code != std::errc{} || stop != text.data() + text.size() || text.size() != 16)
            refuse(kind::bad_value, line_, "a graph's fingerprint has 16 digits from 0 to f");
        if (h != plan_.of_graph)
            refuse(kind::graph_changed, line_, "the plan is for a different graph, or the graph has changed");
    }
    void read_piece(const plan_words& w) {
        end_piece();
        const auto at = static_cast<std::uint32_t>(plan_.order.size());
        plan_.pieces.push_back({.places = {at, at}});
        line_of_piece_.push_back(line_);
        bool timed = false, named = false, crossed = false, marked = false;
        for (std::size_t i = 1; i < w.count; ++i) {
            if (w.all[i].starts_with("takes="))
                once(timed), plan_.pieces.back().takes = time(w.all[i].substr(6));
            else if (w.all[i].starts_with("engine="))
                once(named), plan_.pieces.back().engine = engine(w.all[i].substr(7));
            else if (w.all[i].starts_with("crosses="))
                once(crossed);
            else if (w.all[i] == "over")
                once(marked);
            else
                refuse(kind::bad_line, line_, "`piece` may be followed only by engine=, takes=, crosses= and over");
        }
    }
    void read_node(const plan_words& w) {
        if (plan_.pieces.empty()) refuse(kind::bad_line, line_, "comes before the first piece");
        const auto number = gpushare::detail::parse_whole(w.all[1]);
        if (number.code == gpushare::detail::parse_code::no_number)
            refuse(kind::bad_value, line_, "`node` must be followed by its number");
        if (number.code != gpushare::detail::parse_code::ok || number.value >= g_.nodes.size())
            refuse(kind::unknown_node, line_, "no node has that number");
        const auto n = static_cast<std::uint32_t>(number.value);
        if (w.count > 2 && w.all[2] != as_word(g_.nodes[n].name))
            refuse(kind::other_node, line_, "the node of that number is " + as_word(g_.nodes[n].name));
        line_of_node_[n] = line_;
        plan_.order.push_back(n);
        ++plan_.pieces.back().places.behind;
    }
    void end_piece() const {
        if (!plan_.pieces.empty() && plan_.pieces.back().places.size() == 0)
            refuse(kind::empty_piece, line_of_piece_.back(), "the piece has no node");
    }

    const model_graph& g_;
    split_plan plan_{};
    std::vector<std::size_t> line_of_node_;  // the last line of each node; 0 if there is none
    std::vector<std::size_t> line_of_piece_{};
    std::size_t line_ = 0;
    bool versioned_ = false, hashed_ = false, limited_ = false;
};

/// Throws if the nodes can't run in the plan's order, or if the pieces don't cover that order. The
/// functions find the line of a node and of a piece, for error messages.
template <class LineOfNode, class LineOfPiece>
void check_order(const split_plan& p, const model_graph& g, LineOfNode line_of_node, LineOfPiece line_of_piece) {
    using kind = plan_error::kind;
    const auto by = makers(g);
    std::vector<bool> ran(g.nodes.size());
    for (const std::uint32_t n : p.order) {
        if (n >= g.nodes.size()) throw plan_error(kind::unknown_node, line_of_node(n), "no node has that number");
        const std::string name = as_word(g.nodes[n].name);
        if (ran[n]) throw plan_error(kind::node_twice, line_of_node(n), "node " + name + " is in two places");
        for (const std::uint32_t v : g.nodes[n].inputs)
            if (by[v] != nobody && !ran[by[v]])
                throw plan_error(kind::wrong_order, line_of_node(n),
                                 "node " + name + " reads what a later node makes: " + as_word(g.nodes[by[v]].name));
        ran[n] = true;
    }
    for (std::size_t n = 0; n < ran.size(); ++n)
        if (!ran[n])
            throw plan_error(kind::node_missing, 0,
                             "node " + std::to_string(n) + " " + as_word(g.nodes[n].name) + " is in no piece");
    std::uint32_t at = 0;
    for (std::size_t i = 0; i < p.pieces.size(); ++i) {
        const auto places = p.pieces[i].places;
        if (places.behind <= places.first || places.behind > p.order.size())
            throw plan_error(kind::empty_piece, line_of_piece(i), "the piece has no node");
        if (places.first != std::exchange(at, places.behind))
            throw plan_error(kind::node_missing, line_of_piece(i), "the piece doesn't begin where the last one ends");
    }
    if (at != p.order.size()) throw plan_error(kind::node_missing, 0, "nodes are behind the last piece");
}

/// Throws if a cut is impossible. Sets the crossing bytes and the mark of each piece.
template <class LineOfPiece>
void check_cuts(split_plan& p, const model_graph& g, std::span<const bytes> sizes, LineOfPiece line_of_piece) {
    const cut_costs costs(g, p.order, sizes, {}, bytes{1});
    for (std::size_t i = 0; i < p.pieces.size(); ++i) {
        auto& piece = p.pieces[i];
        if (!std::ranges::binary_search(costs.cuts(), piece.places.behind))
            throw plan_error(plan_error::kind::no_cut, line_of_piece(i + 1),
                             "a sequence, a map or strings live over the cut, and no buffer holds them");
        piece.crossing = costs.crossing(piece.places.behind);
        piece.over = piece.takes > p.limit;
    }
}

}  // namespace detail

/// A plan as text. `g` must be the graph that the plan is for, and sound.
[[nodiscard]] inline std::string to_text(const split_plan& p, const model_graph& g) {
    std::array<char, 17> hash{};
    std::snprintf(hash.data(), hash.size(), "%016llx", static_cast<unsigned long long>(p.of_graph));
    std::string text =
        "split_plan 1\ngraph " + std::string(hash.data()) + "\nlimit " + detail::exact_time(p.limit) + '\n';
    for (const auto& piece : p.pieces) {
        text += piece.engine.empty() ? "piece" : "piece engine=" + detail::as_word(piece.engine);
        text += " takes=" + detail::exact_time(piece.takes) + " crosses=" + std::to_string(piece.crossing.count()) +
                (piece.over ? "B over\n" : "B\n");
        for (const std::uint32_t n : p.nodes(piece.places))
            text += "node " + std::to_string(n) + ' ' + detail::as_word(g.nodes[n].name) + ' ' +
                    detail::as_word(g.nodes[n].type) + '\n';
    }
    return text;
}

/// Throws plan_error if a plan doesn't fit the graph, for example a plan that a person wrote. The
/// graph must be sound. O(edges).
inline void check(const split_plan& p, const model_graph& g) {
    if (p.of_graph != fingerprint(g))
        throw plan_error(plan_error::kind::graph_changed, 0,
                         "the plan is for a different graph, or the graph has changed");
    const auto nowhere = [](std::size_t) { return std::size_t{0}; };
    detail::check_order(p, g, nowhere, nowhere);
    split_plan copy = p;
    detail::check_cuts(copy, g, sizes_of(g), nowhere);
}

/// Reads a plan that to_text() wrote and that people may have changed, and checks the plan against
/// a sound graph. `sizes` is as in split_planner. Throws plan_error with the line and the reason.
[[nodiscard]] inline split_plan parse_split_plan(std::string_view text, const model_graph& g,
                                                 std::span<const bytes> sizes = {}) {
    detail::plan_reader reader(g);
    reader.read(text);
    const auto line_of_node = [&](std::size_t n) { return reader.line_of_node(static_cast<std::uint32_t>(n)); };
    const auto line_of_piece = [&](std::size_t i) { return reader.line_of_piece(i); };
    detail::check_order(reader.plan(), g, line_of_node, line_of_piece);
    const std::vector<bytes> own = sizes.empty() ? sizes_of(g) : std::vector<bytes>();
    if (!sizes.empty() && sizes.size() != g.values.size())
        throw operation_error(errc::invalid_specification, {}, "reading a plan: each value needs a size");
    detail::check_cuts(reader.plan(), g, sizes.empty() ? std::span<const bytes>(own) : sizes, line_of_piece);
    return std::move(reader.plan());
}

}  // namespace graph
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
