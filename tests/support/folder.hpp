// SPDX-License-Identifier: Apache-2.0
// A temporary folder, which goes with its files.
//
//   const support::folder files;
//   files.write("tenants", text);
//   read(files / "tenants");
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace support {

struct folder {
    folder() {
        std::string name = (std::filesystem::temp_directory_path() / "gpushare_XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
        path = name;
    }
    folder(folder&& from) noexcept : path(std::exchange(from.path, {})) {}
    folder& operator=(const folder&) = delete;
    ~folder() {
        if (!path.empty()) std::filesystem::remove_all(path);
    }
    [[nodiscard]] std::string operator/(const std::string& name) const { return (path / name).string(); }
    void write(const std::string& name, std::string_view text) const {
        std::ofstream(*this / name, std::ios::binary) << text;
    }

    std::filesystem::path path;
};

}  // namespace support
