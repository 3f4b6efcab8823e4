// SPDX-License-Identifier: Apache-2.0
// status_page.html as text: one file, which loads nothing from elsewhere.
#pragma once

#include <string_view>

namespace inference_server {

extern const std::string_view status_page;

}  // namespace inference_server
