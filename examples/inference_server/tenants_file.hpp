// SPDX-License-Identifier: Apache-2.0
// The file of tenants: specifications as gpushare/interop/specification_text.hpp has them, and each tenant's API keys.
//
//   name=chat  api_key=s3cret-chat  memory=64MiB compute=60% priority=1 slo=50ms
//     api_key=another-of-chat
//   name=batch api_key=s3cret-batch memory=32MiB compute=40% queue_limit=16
//
// A file is read while somebody may be writing it, so one that could be the first part of another is refused: its last line ends with a line feed, and
// one without tenants says so, `tenants=none`. What is cut between two lines looks whole: write another file and rename it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <gpushare/tenant/specification.hpp>

namespace inference_server {

struct api_key {
    std::string key, tenant;
};

struct tenants_file {
    std::vector<gpushare::tenant_spec> specs;
    std::vector<api_key> keys;

    /// Whose key it is; empty for nobody's. Takes as long for a key that is nearly right as for any other.
    [[nodiscard]] std::string_view tenant_of(std::string_view key) const noexcept;
};

/// Throws gpushare::specification_error. A key has 8 to 256 characters and belongs to one tenant, whose name is before it: on its
/// line, or above where the line is indented.
[[nodiscard]] tenants_file parse_tenants(std::string_view text);

}  // namespace inference_server
