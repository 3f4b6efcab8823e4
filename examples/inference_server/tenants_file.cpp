// SPDX-License-Identifier: Apache-2.0
#include "inference_server/tenants_file.hpp"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include <gpushare/tenant/specification_text.hpp>

namespace inference_server {

namespace {

[[noreturn]] void fail(const std::string& tenant, std::string_view why) {
    std::string text(why);
    if (!tenant.empty()) text += " (tenant '" + tenant + "')";
    throw gpushare::specification_error(gpushare::specification_error::kind::bad_value, "api_key", text);
}

/// Compares every byte, even after a difference.
bool same(std::string_view a, std::string_view b) noexcept {
    unsigned differ = a.size() == b.size() ? 0 : 1;
    for (std::size_t i = 0; i < b.size(); ++i)
        differ |= static_cast<unsigned char>(b[i]) ^
                  static_cast<unsigned>(i < a.size() ? static_cast<unsigned char>(a[i]) : 0);
    return differ == 0;
}

/// A random start for the hashes of keys, so that an attacker can't know which hashes are close to
/// each other.
std::uint64_t seed() {
    static const std::uint64_t drawn = [] {
        std::random_device any;
        return std::uint64_t{any()} << 32U | any();
    }();
    return drawn;
}

/// An API key may have slipped in among the words of the file, and errors go to logs and answers.
/// So an error names only a setting and the line, and quotes no other word.
[[noreturn]] void fail_without_words(const gpushare::specification_error& e) {
    using kind = gpushare::specification_error::kind;
    if (e.why() == kind::unknown_key) {
        const std::string_view text = e.what();
        const auto line = text.rfind("(line ");
        std::string why = "isn't a setting, and isn't shown, since it may be a secret";
        if (line != std::string_view::npos)
            why.append(" (line ").append(text.substr(line + 6, text.find_first_of(",)", line) - line - 6)).append(")");
        throw gpushare::specification_error(e.why(), "a word", why);
    }
    auto text = std::string_view(e.what()).substr(e.key().size() + 2);
    const auto value = text.starts_with('\'') ? text.find("': ") : std::string_view::npos;
    if (value != std::string_view::npos) text.remove_prefix(value + 3);
    throw gpushare::specification_error(e.why(), e.key(), text);
}

/// A whole number that takes up the whole text.
std::optional<std::uint64_t> whole(std::string_view text) {
    std::uint64_t n = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), n);
    return code == std::errc{} && end == text.data() + text.size() ? std::optional(n) : std::nullopt;
}

/// A time such as 5ms. No value if the text isn't a time, is 0, or is longer than an hour.
std::optional<gpushare::ns> time_of(std::string_view text) {
    using unit = std::pair<std::string_view, std::uint64_t>;
    for (const auto& [name, factor] : {unit{"us", 1'000}, unit{"ms", 1'000'000}, unit{"s", 1'000'000'000}}) {
        if (!text.ends_with(name)) continue;
        const auto n = whole(text.substr(0, text.size() - name.size()));
        if (n && *n >= 1 && *n <= 3'600'000'000'000 / factor) return gpushare::ns{*n * factor};
    }
    return std::nullopt;
}

/// A shape such as INPUT:1x3x64x64.
bool read_shape(std::string_view text, model_setting& to) {
    const auto colon = text.rfind(':');
    if (colon == std::string_view::npos || colon == 0) return false;
    std::vector<std::int64_t> shape;
    for (auto rest = text.substr(colon + 1);; rest.remove_prefix(rest.find('x') + 1)) {
        const auto word = rest.substr(0, rest.find('x'));
        const auto n = whole(word).value_or(0);
        if (n == 0 || n > std::numeric_limits<std::int32_t>::max()) return false;
        shape.push_back(static_cast<std::int64_t>(n));
        if (rest.find('x') == std::string_view::npos) break;
    }
    return to.shapes.emplace(text.substr(0, colon), std::move(shape)).second;
}

/// The name under which a path is served; empty if the result wouldn't be a valid name.
std::optional<std::string> name_of(std::string_view path) {
    const auto file = path.substr(path.rfind('/') + 1);
    if (!file.ends_with(".onnx")) return std::nullopt;
    std::string name(file.substr(0, file.size() - 5));
    const auto fits = [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
               c == '.';
    };
    if (name.empty() || name.size() > 64 || name.front() == '.' || !std::ranges::all_of(name, fits))
        return std::nullopt;
    return name;
}

/// Reads the words about models, among the other words.
class model_words {
public:
    explicit model_words(std::string_view file) : file_(file) {}

    /// Whether the word is one of them.
    bool read(std::string_view word, std::string_view tenant, std::size_t line) {
        const auto equals = std::min(word.find('='), word.size());
        const auto key = word.substr(0, equals), value = word.substr(std::min(equals + 1, word.size()));
        constexpr std::string_view all[] = {"model", "cut_to", "shape", "batch", "engine"};
        if (equals == word.size() || std::ranges::find(all, key) == std::end(all)) return false;
        const auto wrong = [&](std::string_view why) { throw model_setting_error(file_, line, key, why); };
        if (key == "model") {
            begin(value, tenant, line);
            return true;
        }
        if (models_.empty() || models_.back().tenant != tenant) wrong("belongs behind a tenant's model");
        auto& m = models_.back();
        if (key == "shape") {
            if (!read_shape(value, m))
                wrong("must be an input and its extents, such as INPUT:1x3x64x64, once for each input");
            return true;
        }
        if (!given_.insert(std::string(key)).second) wrong("is given twice");
        if (key == "engine") {
            m.engine = value;
        } else if (key == "cut_to") {
            const auto t = time_of(value);
            if (!t) wrong("must be a whole number of us, ms or s, up to an hour, such as 5ms");
            m.cut_to = *t;
        } else {
            const auto n = whole(value);
            if (!n || *n < 1 || *n > 1024) wrong("must be a whole number from 1 to 1024");
            m.batch = static_cast<std::uint32_t>(*n);
        }
        return true;
    }
    [[nodiscard]] std::vector<model_setting> take() { return std::move(models_); }

private:
    void begin(std::string_view path, std::string_view tenant, std::size_t line) {
        const auto wrong = [&](std::string_view why) { throw model_setting_error(file_, line, "model", why); };
        if (tenant.empty()) wrong("belongs behind a tenant's name; a line of models is indented");
        const auto name = name_of(path);
        if (!name) wrong("must be a file NAME.onnx, whose name has letters, digits, dots, '_' and '-'");
        for (const auto& m : models_)
            if (m.tenant == tenant && m.name == *name) wrong("has the name of another model of the tenant's");
        models_.push_back({.tenant = std::string(tenant), .path = std::string(path), .name = *name, .line = line});
        given_.clear();
    }

    std::string_view file_;
    std::vector<model_setting> models_;
    std::set<std::string> given_;  // settings of the last model
};

}  // namespace

std::size_t key_index::hash_of(std::string_view key) noexcept {
    std::uint64_t h = seed();
    for (const char c : key) h = (h ^ static_cast<unsigned char>(c)) * 0x100'0000'01B3U;  // FNV-1a
    h ^= h >> 32U;
    return static_cast<std::size_t>(h * 0x9E37'79B9'7F4A'7C15U);
}

bool key_index::add(std::string_view key) {
    if (find(key)) return false;
    at_.emplace(hash_of(key), keys_.size());
    keys_.emplace_back(key);
    return true;
}

std::optional<std::size_t> key_index::find(std::string_view key) const noexcept {
    if (key.size() > longest_key) return std::nullopt;
    const auto [begin, end] = at_.equal_range(hash_of(key));
    for (auto i = begin; i != end; ++i)
        if (same(keys_[i->second], key)) return i->second;
    return std::nullopt;
}

tenants_file parse_tenants(std::string_view text, std::string_view file) {
    constexpr std::string_view blanks = " \t\r\n", key_is = "api_key=", name_is = "name=", none = "tenants=none";
    tenants_file f;
    bool says_none = false;
    std::optional<std::size_t> last_key, last_model;
    model_words models(file);
    std::size_t line = 1, counted = 0;  // the line, and the bytes counted so far
    const auto blank_out = [](std::string& rest, std::size_t at, std::size_t size) {
        std::fill_n(rest.begin() + static_cast<std::ptrdiff_t>(at), size, ' ');
    };
    // keys are blanked out of `rest`, so that lines are counted as in the file
    std::string rest(text), tenant;
    for (std::size_t at = 0; (at = text.find_first_not_of(blanks, at)) != std::string_view::npos;) {
        if (text[at] == '#') {
            at = std::min(text.find('\n', at), text.size());
            continue;
        }
        const auto word = text.substr(at, text.find_first_of(blanks, at) - at);
        line += static_cast<std::size_t>(std::ranges::count(text.substr(counted, at - counted), '\n'));
        counted = at;
        if (word.starts_with(name_is)) {
            if (last_key && text.substr(*last_key, at - *last_key).find('\n') == std::string_view::npos)
                fail({}, "belongs behind a tenant's name, not before it");
            if (last_model && text.substr(*last_model, at - *last_model).find('\n') == std::string_view::npos)
                throw model_setting_error(file, line, "model", "belongs behind a tenant's name");
            tenant = word.substr(name_is.size());
        }
        if (models.read(word, tenant, line)) {
            last_model = at;
            blank_out(rest, at, word.size());
        }
        if (word == none) {
            says_none = true;
            blank_out(rest, at, word.size());
        }
        if (word.find(key_is, 1) != std::string_view::npos) fail({}, "has no blank before it, or is given twice");
        if (word.starts_with(key_is)) {
            // Otherwise a key in front of a tenant's line would belong to the tenant above.
            if (at == 0 || text[at - 1] == '\n') fail({}, "belongs behind a tenant's name; a line of keys is indented");
            last_key = at;
            const auto key = word.substr(key_is.size());
            if (tenant.empty()) fail(tenant, "belongs behind a tenant's name; a line of keys is indented");
            if (key.size() < 8 || key.size() > longest_key) fail(tenant, "must be 8 to 256 characters");
            if (!f.keys.add(key)) fail(tenant, "is another tenant's already");
            f.tenants_of_keys.push_back(tenant);
            blank_out(rest, at, word.size());
        }
        at += word.size();
    }
    f.models = models.take();
    try {
        f.specs = gpushare::parse_specifications(rest);
    } catch (const gpushare::specification_error& e) {
        fail_without_words(e);
    }
    if (f.specs.empty() != says_none)
        throw gpushare::specification_error(
            gpushare::specification_error::kind::contradiction, "tenants",
            says_none ? "isn't none: there are some" : "must be none in a file that has no tenant");
    if (!text.ends_with('\n'))
        throw gpushare::specification_error(gpushare::specification_error::kind::bad_value, "the last line",
                                            "has no line feed: perhaps the rest isn't written yet");
    return f;
}

}  // namespace inference_server
