// SPDX-License-Identifier: Apache-2.0
#include "inference_server/tenants_file.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <utility>

#include <gpushare/tenant/specification_text.hpp>

namespace inference_server {

namespace {

[[noreturn]] void fail(const std::string& tenant, std::string_view why) {
    std::string text(why);
    if (!tenant.empty()) text += " (tenant '" + tenant + "')";
    throw gpushare::specification_error(gpushare::specification_error::kind::bad_value, "api_key", text);
}

/// Looks at every byte, whatever it finds.
bool same(std::string_view a, std::string_view b) noexcept {
    unsigned differ = a.size() == b.size() ? 0 : 1;
    for (std::size_t i = 0; i < b.size(); ++i)
        differ |= static_cast<unsigned char>(b[i]) ^
                  static_cast<unsigned>(i < a.size() ? static_cast<unsigned char>(a[i]) : 0);
    return differ == 0;
}

/// Where keys begin to be hashed: by chance, so that nobody outside knows which hashes are near each other.
std::uint64_t seed() {
    static const std::uint64_t drawn = [] {
        std::random_device any;
        return std::uint64_t{any()} << 32U | any();
    }();
    return drawn;
}

/// An API key may have slipped in among the words of the file, and errors go to logs and to answers: what is said has the name of a setting and
/// the line, and no other word.
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

tenants_file parse_tenants(std::string_view text) {
    constexpr std::string_view blanks = " \t\r\n", key_is = "api_key=", name_is = "name=", none = "tenants=none";
    tenants_file f;
    bool says_none = false;
    std::optional<std::size_t> last_key;
    const auto blank_out = [](std::string& rest, std::size_t at, std::size_t size) {
        std::fill_n(rest.begin() + static_cast<std::ptrdiff_t>(at), size, ' ');
    };
    std::string rest(text), tenant;  // the keys are blanked out of `rest`, so that lines are counted as in the file
    for (std::size_t at = 0; (at = text.find_first_not_of(blanks, at)) != std::string_view::npos;) {
        if (text[at] == '#') {
            at = std::min(text.find('\n', at), text.size());
            continue;
        }
        const auto word = text.substr(at, text.find_first_of(blanks, at) - at);
        if (word.starts_with(name_is)) {
            if (last_key && text.substr(*last_key, at - *last_key).find('\n') == std::string_view::npos)
                fail({}, "belongs behind a tenant's name, not before it");
            tenant = word.substr(name_is.size());
        }
        if (word == none) {
            says_none = true;
            blank_out(rest, at, word.size());
        }
        if (word.find(key_is, 1) != std::string_view::npos) fail({}, "has no blank before it, or is there twice");
        if (word.starts_with(key_is)) {
            // Or one in front of a tenant's line would be the key of the tenant above.
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
