// SPDX-License-Identifier: Apache-2.0
// The file of tenants: specifications as in gpushare/tenant/specification_text.hpp, with each
// tenant's API keys.
//
//   name=chat  api_key=s3cret-chat  memory=64MiB compute=60% priority=1 slo=50ms
//     api_key=another-of-chat
//   name=batch api_key=s3cret-batch memory=32MiB compute=40% queue_limit=16
//     model=detector.onnx cut_to=5ms
//
// A model belongs to one tenant. Its name is the file's without `.onnx`. A path that doesn't begin
//  with a slash is relative to the folder of the tenants' file. The settings after a model are its own:
//    cut_to=5ms              runs in pieces of at most this time; otherwise as one piece
//    shape=INPUT:1x3x64x64   extents of an input for measuring pieces, if the model leaves any open
//    batch=8                 the first extent of all inputs and outputs is a batch of at most this many
//    engine=NAME             otherwise the server's first engine
//
// A program may be writing the file while it is read, so a file that could be the first part of
// another file is refused. Its last line must end with a line feed, and a file without tenants must
// say so, `tenants=none`. A file that is cut between two lines looks whole, so write a new file and
// rename it.
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

/// API keys, found by a hash. A look-up takes one comparison, however many keys there are, and none
/// for a text that is longer than a key can be.
class key_index {
public:
    /// Returns false if the key is already there.
    bool add(std::string_view key);
    /// The number of keys that were added before this key; none if the key isn't there. A
    /// comparison takes the same time for a key that is nearly right as for any other.
    [[nodiscard]] std::optional<std::size_t> find(std::string_view key) const noexcept;
    [[nodiscard]] std::size_t size() const noexcept { return keys_.size(); }
    [[nodiscard]] const std::string& operator[](std::size_t i) const noexcept { return keys_[i]; }

private:
    static std::size_t hash_of(std::string_view key) noexcept;

    std::vector<std::string> keys_;
    std::unordered_multimap<std::size_t, std::size_t> at_;  // indexed by hash
};

/// A tenant's model, as stated in the file.
struct model_setting {
    std::string tenant{}, path{}, name{};
    gpushare::ns cut_to{};  ///< 0 if the model isn't cut
    /// Shapes of inputs, for measurements.
    std::map<std::string, std::vector<std::int64_t>> shapes{};
    /// the most rows; 0 if the model has no batches
    std::uint32_t batch = 0;
    std::string engine{};  ///< empty for any engine
    std::size_t line = 0;  ///< the line of the path

    /// Whether both ask for the same, possibly on different lines.
    [[nodiscard]] bool same_as(const model_setting& o) const noexcept {
        return tenant == o.tenant && path == o.path && cut_to == o.cut_to && shapes == o.shapes && batch == o.batch &&
               engine == o.engine;
    }
};

/// Says that a model of the file can't be served, because of its settings or of their effect. The
/// text begins with the place, such as `tenants.conf:3: cut_to: `, and quotes no value.
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
    [[nodiscard]] std::size_t line() const noexcept { return line_; }  ///< counted from 1
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
/// A key has 8 to 256 characters and belongs to the tenant whose name is before it: on the key's
/// line or, if the line is indented, above. The error's text quotes only names of settings, because
/// a key may have slipped in elsewhere.
[[nodiscard]] tenants_file parse_tenants(std::string_view text, std::string_view file = "tenants");

}  // namespace inference_server
