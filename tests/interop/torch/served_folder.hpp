// SPDX-License-Identifier: Apache-2.0
// The example server with the models of a folder of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "inference_server/client.hpp"
#include "inference_server/http_server.hpp"
#include "inference_server/torch_engines.hpp"
#include "support/folder.hpp"

namespace torch_served {

using namespace inference_server;
using support::folder;

inline constexpr std::string_view tenants =
    "name=chat api_key=key-of-chat memory=256MiB compute=50%\n"
    "name=batch api_key=key-of-batch memory=256MiB compute=40%\n"
    "name=small api_key=key-of-small memory=16MiB compute=10%\n";

/// A server of the models of such a folder, on the host.
struct served_folder {
    explicit served_folder(folder of) : files(std::move(of)) {
        files.write("tenants", tenants);
        service_options how;
        how.tenants = files / "tenants";
        how.journal = files / "usage";
        how.node = {.memory = gpushare::bytes{std::uint64_t{1} << 30}, .sms = 1};
        core = std::make_unique<service>(std::move(how), torch_models(files.path.string()));
        http = std::make_unique<http_server>(*core, http_options{});
    }
    [[nodiscard]] connection connect() const { return connection(http->port()); }

    folder files;
    std::unique_ptr<service> core;
    std::unique_ptr<http_server> http;
};
inline constexpr std::string_view chat_key = "key-of-chat", batch_key = "key-of-batch";

}  // namespace torch_served
