// SPDX-License-Identifier: Apache-2.0
#include "text.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <utility>

namespace ptx::text {

namespace {

// ---- words

struct token {
    enum class kind : std::uint8_t { word, number, quoted, sign, end };
    kind what = kind::end;
    std::string_view text{};
    std::uint32_t line = 0;
};

bool in_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$' ||
           c == '%' || c == '.';
}

/// The text as words, one after the other.
class words {
public:
    explicit words(std::string_view text) : text_(text) { advance(); }

    [[nodiscard]] const token& peek() const { return next_; }
    token take() {
        const token t = next_;
        advance();
        return t;
    }
    /// Whether the next word is `wanted`; if so, takes the word.
    bool accept(std::string_view wanted) {
        if (next_.what == token::kind::end || next_.what == token::kind::quoted || next_.text != wanted) return false;
        advance();
        return true;
    }

private:
    void advance() {
        skip_blanks();
        next_ = {token::kind::end, {}, line_};
        if (at_ == text_.size()) return;
        const std::size_t begin = at_;
        const char first = text_[at_];
        if (first == '"') {
            const std::size_t close = text_.find('"', at_ + 1);
            if (close == text_.npos) throw error(problem::syntax, line_, {}, "a string without an end");
            at_ = close + 1;
            next_ = {token::kind::quoted, text_.substr(begin + 1, close - begin - 1), line_};
            return;
        }
        if (!in_word(first)) {
            next_ = {token::kind::sign, text_.substr(at_++, 1), line_};
            return;
        }
        while (at_ < text_.size() && in_word(text_[at_])) ++at_;
        const bool number = first >= '0' && first <= '9';
        next_ = {number ? token::kind::number : token::kind::word, text_.substr(begin, at_ - begin), line_};
    }
    void skip_blanks() {
        for (; at_ < text_.size(); ++at_) {
            const std::string_view rest = text_.substr(at_);
            if (rest.starts_with("//")) {
                at_ = std::min(text_.find('\n', at_), text_.size()) - 1;
            } else if (rest.starts_with("/*")) {
                const std::size_t close = std::min(text_.find("*/", at_ + 2), text_.size() - 2);
                line_ += static_cast<std::uint32_t>(std::ranges::count(text_.substr(at_, close - at_), '\n'));
                at_ = close + 1;
            } else if (rest.front() == '\n') {
                ++line_;
            } else if (rest.front() != ' ' && rest.front() != '\t' && rest.front() != '\r') {
                return;
            }
        }
    }

    std::string_view text_;
    std::size_t at_ = 0;
    std::uint32_t line_ = 1;
    token next_{};
};

// ---- statements

struct type_size {
    std::string_view name;
    std::uint32_t bytes;
};
constexpr std::array<type_size, 16> types{{{".b8", 1},
                                           {".u8", 1},
                                           {".s8", 1},
                                           {".b16", 2},
                                           {".u16", 2},
                                           {".s16", 2},
                                           {".f16", 2},
                                           {".b32", 4},
                                           {".u32", 4},
                                           {".s32", 4},
                                           {".f32", 4},
                                           {".b64", 8},
                                           {".u64", 8},
                                           {".s64", 8},
                                           {".f64", 8},
                                           {".pred", 8}}};

std::optional<std::uint32_t> bytes_of(std::string_view type) {
    const auto* const found = std::ranges::find(types, type, &type_size::name);
    return found == types.end() ? std::nullopt : std::optional(found->bytes);
}

class parser {
public:
    explicit parser(std::string_view text) : words_(text) {}

    module whole() {
        while (words_.peek().what != token::kind::end) top_level();
        return std::move(module_);
    }

private:
    [[noreturn]] void fail(problem what, const token& at, const std::string& why) const {
        throw error(what, at.line, kernel_, why + ", at '" + std::string(at.text) + "'");
    }
    void expect(std::string_view wanted) {
        if (!words_.accept(wanted)) fail(problem::syntax, words_.peek(), "'" + std::string(wanted) + "' is missing");
    }

    std::int64_t integer() {
        const bool negative = words_.accept("-");
        const token t = words_.take();
        std::string_view digits = t.text;
        if (t.what != token::kind::number) fail(problem::syntax, t, "a number is missing");
        if (digits.ends_with("U")) digits.remove_suffix(1);
        const bool hex = digits.starts_with("0x") || digits.starts_with("0X");
        if (hex) digits.remove_prefix(2);
        return negative ? -parse_number(t, digits, hex) : parse_number(t, digits, hex);
    }
    std::int64_t parse_number(const token& t, std::string_view digits, bool hex) const {
        std::uint64_t value = 0;
        const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), value, hex ? 16 : 10);
        if (code != std::errc{} || end != digits.data() + digits.size()) fail(problem::syntax, t, "no number");
        return static_cast<std::int64_t>(value);
    }

    // Chapter 11: directives outside of functions.
    void top_level() {
        const token t = words_.take();
        if (t.text == ".version" || t.text == ".address_size") {
            words_.take();
        } else if (t.text == ".target") {
            module_.target = words_.take().text;
            while (words_.accept(",")) words_.take();
        } else if (t.text == ".file") {
            file();
        } else if (t.text == ".visible" || t.text == ".weak" || t.text == ".extern") {
            // Linking: names are unique here.
        } else if (t.text == ".entry" || t.text == ".func") {
            read_function(t);
        } else if (t.text == ".global" || t.text == ".shared" || t.text == ".const") {
            module_.variables.push_back(read_variable(t));
            expect(";");
        } else if (t.text == ".section") {
            words_.take();
            expect("{");
            while (!words_.accept("}")) words_.take();
        } else {
            fail(problem::unknown_directive, t, "no directive that the executor knows");
        }
    }
    void file() {
        const auto number = static_cast<std::size_t>(integer());
        if (module_.files.size() <= number) module_.files.resize(number + 1);
        module_.files[number] = words_.take().text;
        while (words_.accept(",")) integer();  // the file's time and size
    }

    variable read_variable(const token& space) {
        variable v{.line = space.line, .space = space.text};
        for (token t = words_.take();; t = words_.take()) {
            if (t.text == ".align") {
                v.alignment = static_cast<std::uint32_t>(integer());
            } else if (const auto bytes = bytes_of(t.text)) {
                v.element = *bytes;
                break;
            } else if (t.text != ".ptr" && t.text != ".global") {  // hints about the target of a pointer argument
                fail(problem::syntax, t, "a variable without a type");
            }
        }
        while (words_.peek().text == ".ptr" || words_.peek().text == ".global" || words_.peek().text == ".align")
            if (words_.take().text == ".align") (void)integer();
        v.alignment = std::max(v.alignment, v.element);
        v.name = words_.take().text;
        v.bytes = v.element;
        while (words_.accept("[")) {
            v.bytes *= static_cast<std::uint64_t>(words_.peek().text == "]" ? 0 : integer());
            expect("]");
        }
        if (words_.accept("=")) {
            if (words_.accept("{")) {
                do v.initial.push_back(static_cast<std::uint64_t>(integer()));
                while (words_.accept(","));
                expect("}");
            } else {
                v.initial.push_back(static_cast<std::uint64_t>(integer()));
            }
        }
        return v;
    }
    std::vector<variable> list_of_arguments() {
        std::vector<variable> list;
        if (!words_.accept("(")) return list;
        while (!words_.accept(")")) {
            list.push_back(read_variable(words_.take()));
            (void)words_.accept(",");
        }
        return list;
    }

    void read_function(const token& directive) {
        function f{.line = directive.line, .entry = directive.text == ".entry"};
        if (!f.entry) f.results = list_of_arguments();
        kernel_ = f.name = words_.take().text;
        f.arguments = list_of_arguments();
        for (; words_.peek().text.starts_with(".");) limits(f);
        if (words_.accept(";")) {
            f.declared_only = true;
        } else {
            expect("{");
            source_ = {};
            inlined_at_.clear();
            body(f);
        }
        module_.functions.push_back(std::move(f));
        kernel_ = {};
    }
    // Section 11.4: performance directives
    void limits(function& f) {
        const token t = words_.take();
        if (t.text == ".maxntid" || t.text == ".reqntid") {
            f.most_threads = 1;
            do f.most_threads *= static_cast<std::uint32_t>(integer());
            while (words_.accept(","));
        } else if (t.text == ".minnctapersm" || t.text == ".maxnreg") {
            (void)integer();
        } else if (t.text != ".noreturn") {
            fail(problem::unknown_directive, t, "no limit that the executor knows");
        }
    }

    /// Parses up to the closing brace, with the blocks inside. nvcc uses no name twice, except for
    /// parameters of calls.
    void body(function& f) {
        for (std::uint32_t depth = 1; depth > 0;) {
            const token t = words_.take();
            if (t.what == token::kind::end) fail(problem::syntax, t, "a function without an end");
            if (t.text == "{") {
                ++depth;
            } else if (t.text == "}") {
                --depth;
            } else if (t.text == ";") {
                continue;
            } else if (t.text.starts_with(".")) {
                directive_inside(f, t);
            } else if (t.what == token::kind::word && words_.accept(":")) {
                f.labels.push_back({t.text, f.statements.size()});
            } else {
                read_statement(f, t);
            }
        }
    }
    void directive_inside(function& f, const token& t) {
        if (t.text == ".reg") {
            if (const token type = words_.take(); !bytes_of(type.text)) fail(problem::syntax, type, "no type");
            do {
                registers r{.name = words_.take().text};
                if (words_.accept("<")) {
                    r.count = static_cast<std::uint32_t>(integer());
                    r.numbered = true;
                    expect(">");
                }
                f.declared.push_back(r);
            } while (words_.accept(","));
            expect(";");
        } else if (t.text == ".param" || t.text == ".shared" || t.text == ".local") {
            f.variables.push_back(read_variable(t));
            expect(";");
        } else if (t.text == ".pragma") {
            while (!words_.accept(";")) words_.take();
        } else if (t.text == ".loc") {
            read_location();
        } else {
            fail(problem::unknown_directive, t, "no directive that the executor knows");
        }
    }

    // 11.5.4: `.loc FILE LINE COLUMN`, followed for inlined code by
    // `, function_name NAME, inlined_at FILE LINE COLUMN`. If that place was itself inlined, its
    // own directive, which comes earlier, says where.
    void read_location() {
        const auto column = [&] {
            place p{.file = static_cast<std::uint32_t>(integer())};
            p.line = static_cast<std::uint32_t>(integer());
            p.column = static_cast<std::uint32_t>(integer());
            return p;
        };
        const place here = column();
        place caller{};
        while (words_.accept(",")) {
            if (words_.take().text == "inlined_at") {
                caller = column();
            } else {
                words_.take();
                if (words_.accept("+")) words_.take();
            }
        }
        // Without `inlined_at`, an earlier record of the place stays valid.
        if (caller.line != 0) inlined_at_[here] = caller;
        source_ = {here.file, here.line, {}};
        place at = here;
        for (location::point& p : source_.callers) {
            auto next = inlined_at_.find(at);
            if (next == inlined_at_.end()) next = inlined_at_.lower_bound({at.file, at.line, 0});  // another column
            if (next == inlined_at_.end() || next->first.file != at.file || next->first.line != at.line) break;
            at = next->second;
            p = {at.file, at.line};
        }
    }

    void read_statement(function& f, token t) {
        statement s{.line = t.line, .source = source_};
        if (t.text == "@") {
            s.negated = words_.accept("!");
            s.guard = words_.take().text;
            t = words_.take();
        }
        if (t.what != token::kind::word) fail(problem::syntax, t, "no instruction");
        s.opcode = t.text;
        while (!words_.accept(";")) {
            const bool negated = words_.accept("!");
            s.operands.push_back(read_operand());
            s.operands.back().negated = negated;
            if (words_.peek().text != ";") expect(",");
        }
        f.statements.push_back(std::move(s));
    }

    operand read_operand() {
        operand o;
        const token t = words_.peek();
        if (words_.accept("{") || words_.accept("(")) {
            o.what = operand::shape::elements;
            while (!words_.accept(t.text == "{" ? "}" : ")")) {
                o.parts.push_back(read_operand());
                (void)words_.accept(",");
            }
        } else if (words_.accept("[")) {
            o.what = operand::shape::address;
            if (words_.peek().what == token::kind::word) o.name = words_.take().text;
            if (o.name.empty() || words_.accept("+")) o.value = integer();
            expect("]");
        } else if (t.text.starts_with("0f") || t.text.starts_with("0d")) {
            o.what = t.text[1] == 'f' ? operand::shape::real32 : operand::shape::real64;
            words_.take();
            o.value = parse_number(t, t.text.substr(2), true);
        } else if (t.what == token::kind::number || t.text == "-") {
            o.what = operand::shape::integer;
            o.value = integer();
        } else if (t.what == token::kind::word) {
            o.name = words_.take().text;
            if (words_.accept("|")) o.parts.push_back(read_operand());
        } else {
            fail(problem::syntax, t, "no operand");
        }
        return o;
    }

    words words_;
    module module_;
    location source_{};
    struct place {
        std::uint32_t file = 0, line = 0, column = 0;
        friend auto operator<=>(const place&, const place&) = default;
    };
    std::map<place, place> inlined_at_{};  // from the last directive of each place
    std::string_view kernel_{};
};

}  // namespace

module parse(std::string_view text) { return parser(text).whole(); }

}  // namespace ptx::text
