// SPDX-License-Identifier: Apache-2.0
#include "inference_server/tenants_file.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include <gpushare/interop/specification_text.hpp>

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

}  // namespace

std::string_view tenants_file::tenant_of(std::string_view key) const noexcept {
    std::string_view found;
    for (const auto& k : keys)
        if (same(k.key, key)) found = k.tenant;
    return found;
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
        if (word.starts_with(key_is)) {
            // Or one in front of a tenant's line would be the key of the tenant above.
            if (at == 0 || text[at - 1] == '\n') fail({}, "belongs behind a tenant's name; a line of keys is indented");
            last_key = at;
            std::string key(word.substr(key_is.size()));
            if (tenant.empty()) fail(tenant, "belongs behind a tenant's name; a line of keys is indented");
            if (key.size() < 8 || key.size() > 256) fail(tenant, "must be 8 to 256 characters");
            if (std::ranges::find(f.keys, key, &api_key::key) != f.keys.end())
                fail(tenant, "is another tenant's already");
            f.keys.push_back({std::move(key), tenant});
            blank_out(rest, at, word.size());
        }
        at += word.size();
    }
    f.specs = gpushare::parse_specifications(rest);
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
