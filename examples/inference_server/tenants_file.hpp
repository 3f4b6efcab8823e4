// SPDX-License-Identifier: Apache-2.0
// The file of tenants: specifications as gpushare/tenant/specification_text.hpp has them, and each
// tenant's API keys.
//
//   name=chat  api_key=s3cret-chat  memory=64MiB compute=60% priority=1 slo=50ms
//     api_key=another-of-chat
//   name=batch api_key=s3cret-batch memory=32MiB compute=40% queue_limit=16
//     model=detector.onnx cut_to=5ms
//
// A model is the tenant's alone. Its name is the file's without `.onnx`; its folder is that of this
// file where the path doesn't begin with a slash. The settings behind it belong to that model:
//   cut_to=5ms              runs in pieces that take no longer; else as one
//   shape=INPUT:1x3x64x64   extents of an input with which pieces are measured, where the model leaves any open
//   batch=8                 the first extent of all inputs and outputs is a batch of up to so many
//   engine=NAME             else the server's first one
//
// A file is read while somebody may be writing it, so one that could be the first part of another
// is refused: its last line ends with a line feed, and one without tenants says so, `tenants=none`.
// A file that is cut between two lines looks whole, so write another file and rename it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
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

/// A model of a tenant's, as the file's words say.
struct model_setting {
    std::string tenant{}, path{}, name{};
    gpushare::ns cut_to{};                                      ///< 0: it isn't cut
    std::map<std::string, std::vector<std::int64_t>> shapes{};  ///< of inputs, to measure with
    /// rows; 0: the model has no batches
    std::uint32_t batch = 0;
    std::string engine{};  ///< empty: any
    std::size_t line = 0;  ///< of its path

    /// Whether the same is asked for, on whatever line.
    [[nodiscard]] bool same_as(const model_setting& o) const noexcept {
        return tenant == o.tenant && path == o.path && cut_to == o.cut_to && shapes == o.shapes && batch == o.batch &&
               engine == o.engine;
    }
};

/// A model of the file can't be served: because of its words, or of what they lead to. The text
/// begins with the place, as `tenants.conf:3: cut_to: `, and quotes no value.
class model_setting_error final : public std::runtime_error {
public:
    model_setting_error(std::string_view file, std::size_t line, std::string_view setting, std::string_view why)
        : std::runtime_error(std::string(file)
                                 .append(":")
                                 .append(std::to_string(line))
                                 .append(": ")
                                 .append(setting)
                                 .append(": ")
                                 .append(why)),
          line_(line),
          setting_(setting) {}
    [[nodiscard]] std::size_t line() const noexcept { return line_; }  ///< from 1
    [[nodiscard]] const std::string& setting() const noexcept { return setting_; }

private:
    std::size_t line_;
    std::string setting_;
};

struct tenants_file {
    std::vector<gpushare::tenant_spec> specs{};
    key_index keys{};
    std::vector<std::string> tenants_of_keys{};  ///< in the order of `keys`
    std::vector<model_setting> models{};

    /// The tenant of a key; empty if no tenant has it.
    [[nodiscard]] std::string_view tenant_of(std::string_view key) const noexcept {
        const auto found = keys.find(key);
        return found ? std::string_view(tenants_of_keys[*found]) : std::string_view{};
    }
};

/// Throws gpushare::specification_error, and model_setting_error, whose text calls the file `file`.
/// A key has 8 to 256 characters and belongs to one tenant, whose name is before it: on its line,
/// or above where the line is indented. The error's text has no word of the file except names of
/// settings, since a key may have slipped in elsewhere.
[[nodiscard]] tenants_file parse_tenants(std::string_view text, std::string_view file = "tenants");

}  // namespace inference_server
