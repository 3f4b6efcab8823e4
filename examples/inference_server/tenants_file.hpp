// SPDX-License-Identifier: Apache-2.0
// The file of tenants: specifications as gpushare/tenant/specification_text.hpp has them, and each
// tenant's API keys.
//
//   name=chat  api_key=s3cret-chat  memory=64MiB compute=60% priority=1 slo=50ms
//     api_key=another-of-chat
//   name=batch api_key=s3cret-batch memory=32MiB compute=40% queue_limit=16
//
// A file is read while somebody may be writing it, so one that could be the first part of another
// is refused: its last line ends with a line feed, and one without tenants says so, `tenants=none`.
// What is cut between two lines looks whole: write another file and rename it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <gpushare/tenant/specification.hpp>

namespace inference_server {

inline constexpr std::size_t longest_key = 256;

/// API keys, found by a hash: one comparison, however many there are, and none for what is longer
/// than a key can be.
class key_index {
public:
    /// False where it is there already.
    bool add(std::string_view key);
    /// How many were added before it; none: it isn't there. A comparison takes as long for a key
    /// that is nearly right as for any other.
    [[nodiscard]] std::optional<std::size_t> find(std::string_view key) const noexcept;
    [[nodiscard]] std::size_t size() const noexcept { return keys_.size(); }
    [[nodiscard]] const std::string& operator[](std::size_t i) const noexcept { return keys_[i]; }

private:
    static std::size_t hash_of(std::string_view key) noexcept;

    std::vector<std::string> keys_;
    std::unordered_multimap<std::size_t, std::size_t> at_;  // by hash
};

struct tenants_file {
    std::vector<gpushare::tenant_spec> specs{};
    key_index keys{};
    std::vector<std::string> tenants_of_keys{};  ///< in the order of `keys`

    /// Whose key it is; empty for nobody's.
    [[nodiscard]] std::string_view tenant_of(std::string_view key) const noexcept {
        const auto found = keys.find(key);
        return found ? std::string_view(tenants_of_keys[*found]) : std::string_view{};
    }
};

/// Throws gpushare::specification_error. A key has 8 to 256 characters and belongs to one tenant,
/// whose name is before it: on its line, or above where the line is indented. What it throws has no
/// word of the file that isn't a setting's name: a key may have slipped there.
[[nodiscard]] tenants_file parse_tenants(std::string_view text);

}  // namespace inference_server
