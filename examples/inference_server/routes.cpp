// SPDX-License-Identifier: Apache-2.0
// All paths in one table. Any other path is answered with 404.
#include <algorithm>
#include <span>

#include "inference_server/protocol.hpp"

namespace inference_server {

namespace {

constexpr std::size_t longest_target = 1024;

int hex(char c) noexcept {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/// One part between slashes. It is decoded once, so a part that is encoded twice doesn't turn into
/// something else later.
std::string decoded(std::string_view part) {
    std::string out;
    for (std::size_t i = 0; i < part.size(); ++i) {
        char c = part[i];
        if (c == '%') {
            const int high = i + 2 < part.size() ? hex(part[i + 1]) : -1, low = high < 0 ? -1 : hex(part[i + 2]);
            if (low < 0) throw refused(400, "the path has a '%' without two hexadecimal digits");
            c = static_cast<char>(16 * high + low);
            i += 2;
        }
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F || c == '/' || c == '\\')
            throw refused(400, "the path has a character that no name has");
        out += c;
    }
    if (out == "." || out == ".." || !json::is_utf8(out)) throw refused(400, "the path isn't one");
    return out;
}

std::vector<std::string> parts_of(std::string_view target) {
    if (target.size() > longest_target) throw refused(414, "the path is too long");
    target = target.substr(0, target.find_first_of("?#"));
    if (!target.starts_with('/')) throw refused(400, "the path doesn't begin with '/'");
    std::vector<std::string> parts;
    while (!target.empty()) {
        target.remove_prefix(1);
        const auto end = std::min(target.find('/'), target.size());
        parts.push_back(decoded(target.substr(0, end)));
        target.remove_prefix(end);
    }
    return parts;
}

struct pattern {
    action what;
    std::string_view method, path;  ///< {m} is a model, {v} its version
};
constexpr pattern patterns[] = {
    {action::server_live, "GET", "v2/health/live"},
    {action::server_ready, "GET", "v2/health/ready"},
    {action::server_metadata, "GET", "v2"},
    {action::model_ready, "GET", "v2/models/{m}/ready"},
    {action::model_ready, "GET", "v2/models/{m}/versions/{v}/ready"},
    {action::model_metadata, "GET", "v2/models/{m}"},
    {action::model_metadata, "GET", "v2/models/{m}/versions/{v}"},
    {action::model_config, "GET", "v2/models/{m}/config"},
    {action::model_config, "GET", "v2/models/{m}/versions/{v}/config"},
    {action::infer, "POST", "v2/models/{m}/infer"},
    {action::infer, "POST", "v2/models/{m}/versions/{v}/infer"},
    {action::generate, "POST", "v2/models/{m}/generate"},
    {action::generate, "POST", "v2/models/{m}/versions/{v}/generate"},
    {action::generate_stream, "POST", "v2/models/{m}/generate_stream"},
    {action::generate_stream, "POST", "v2/models/{m}/versions/{v}/generate_stream"},
    {action::repository_index, "POST", "v2/repository/index"},
    {action::model_load, "POST", "v2/repository/models/{m}/load"},
    {action::model_unload, "POST", "v2/repository/models/{m}/unload"},
};

bool fits(std::string_view path, std::span<const std::string> parts, route& r) {
    for (const auto& part : parts) {
        if (path.empty()) return false;
        const auto end = std::min(path.find('/'), path.size());
        const auto wanted = path.substr(0, end);
        path.remove_prefix(std::min(end + 1, path.size()));
        if (wanted == "{m}" && !part.empty())
            r.model = part;
        else if (wanted == "{v}" && !part.empty())
            r.version = part;
        else if (wanted != part)
            return false;
    }
    return path.empty();
}

}  // namespace

route route_of(std::string_view method, std::string_view target) {
    auto parts = parts_of(target);
    if (parts.size() > 1 && parts.back().empty()) parts.pop_back();  // "/v2/" counts as "/v2"
    bool there = false;
    for (const auto& p : patterns) {
        route r{p.what, {}, {}};
        if (!fits(p.path, parts, r)) continue;
        there = true;
        if (p.method == method) return r;
    }
    if (there) throw refused(405, "not by this method");
    throw refused(404, "there is nothing by this path");
}

}  // namespace inference_server
