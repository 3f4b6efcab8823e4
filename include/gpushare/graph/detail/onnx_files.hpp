// SPDX-License-Identifier: Apache-2.0
// A model's bytes: the model's file, and the files next to it that hold weights.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include <gpushare/config.hpp>
#include <gpushare/graph/detail/onnx_library.hpp>
#include <gpushare/graph/detail/onnx_numbers.hpp>
#include <gpushare/graph/graph.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace graph::detail {

/// The format's limit: protocol buffers count bytes with 31 bits.
inline constexpr std::uint64_t most_bytes = std::numeric_limits<std::int32_t>::max();

/// `size` bytes of a file from `offset` on. Throws model_error with `fault` and the name `whose`.
[[nodiscard]] inline std::string read_bytes(const std::filesystem::path& path, std::uint64_t offset, std::uint64_t size,
                                            model_fault fault, const std::string& whose) {
    std::string all(size, '\0');
    std::ifstream file(path, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    if (!file.read(all.data(), static_cast<std::streamsize>(size)))
        throw model_error(fault, whose, "'" + path.string() + "' can't be read");
    return all;
}

/// A whole model file. Throws model_error: no_file, too_large.
[[nodiscard]] inline std::string read_model(const std::filesystem::path& path) {
    std::error_code failed;
    const std::uintmax_t size = std::filesystem::file_size(path, failed);
    if (failed || !std::filesystem::is_regular_file(path, failed))
        throw model_error(model_fault::no_file, {}, "'" + path.string() + "' is no file that can be read");
    if (size > most_bytes) throw model_error(model_fault::too_large, {}, "'" + path.string() + "' has 2 GiB or more");
    return read_bytes(path, 0, size, model_fault::no_file, {});
}

/// Where a weight's bytes are.
struct weight_file {
    std::filesystem::path path{};
    std::uint64_t offset = 0;
    std::uint64_t size = 0;
};

/// The number in an entry of a weight's external data. Throws model_error (external_data).
[[nodiscard]] inline std::uint64_t number_of(const onnx::StringStringEntryProto& entry, const std::string& whose) {
    std::uint64_t n = 0;
    const std::string& text = entry.value();
    const auto [stop, code] = std::from_chars(text.data(), text.data() + text.size(), n);
    if (code != std::errc{} || stop != text.data() + text.size())
        throw model_error(model_fault::external_data, whose, entry.key() + " '" + text + "' is no number");
    return n;
}

/// The file that `location` names. The file must be in `folder` even after all links are followed.
/// Throws model_error (external_data).
[[nodiscard]] inline std::filesystem::path path_within(const std::filesystem::path& folder, const std::string& location,
                                                       const std::string& whose) {
    namespace fs = std::filesystem;
    const auto refuse = [&](std::string_view why) {
        throw model_error(model_fault::external_data, whose, "its file '" + location + "' " + std::string(why));
    };
    if (folder.empty()) refuse("can't be found: the model came without a folder");
    if (location.empty() || location.find('\0') != std::string::npos) refuse("has no name");
    std::error_code failed;
    const fs::path root = fs::canonical(folder, failed);
    if (failed) refuse("is in no folder that can be read");
    const fs::path relative = fs::path(location).lexically_normal();
    if (relative.is_absolute() || *relative.begin() == "..") refuse("is outside of the model's folder");
    const fs::path path = fs::canonical(root / relative, failed);
    if (failed || !fs::is_regular_file(path, failed)) refuse("is missing");
    const fs::path inside = path.lexically_relative(root);
    if (inside.empty() || *inside.begin() == "..") refuse("is outside of the model's folder");
    return path;
}

/// Where a weight's external bytes are. Throws model_error (external_data) if the file lacks them.
[[nodiscard]] inline weight_file file_of(const onnx::TensorProto& weight, const std::filesystem::path& folder) {
    std::string location;
    bool sized = false;
    weight_file found;
    for (const auto& entry : weight.external_data()) {
        if (entry.key() == "location") location = entry.value();
        if (entry.key() == "offset") found.offset = number_of(entry, weight.name());
        if (entry.key() == "length") {
            found.size = number_of(entry, weight.name());
            sized = true;
        }
    }
    found.path = path_within(folder, location, weight.name());
    std::error_code failed;
    const std::uint64_t whole = std::filesystem::file_size(found.path, failed);
    if (failed || found.offset > whole || (sized && found.size > whole - found.offset))
        throw model_error(model_fault::external_data, weight.name(), "its file '" + location + "' is too short");
    if (!sized) found.size = whole - found.offset;
    return found;
}

/// The number of bytes that a weight's shape needs; empty if the type's size is unknown. Throws
/// model_error (bad_weight).
[[nodiscard]] inline std::optional<bytes> size_of(const onnx::TensorProto& weight) {
    value v;
    v.type = element_of(weight.data_type());
    v.ranked = true;
    for (const std::int64_t extent : weight.dims()) {
        if (extent < 0) throw model_error(model_fault::bad_weight, weight.name(), "a negative extent");
        v.shape.push_back({extent, {}});
    }
    return v.size();
}

/// The number of ONNX's typed numbers in a weight. Each is an element, or half of a complex
/// element.
[[nodiscard]] inline std::uint64_t numbers_in(const onnx::TensorProto& w) noexcept {
    return static_cast<std::uint64_t>(w.float_data_size()) + static_cast<std::uint64_t>(w.int32_data_size()) +
           static_cast<std::uint64_t>(w.int64_data_size()) + static_cast<std::uint64_t>(w.double_data_size()) +
           static_cast<std::uint64_t>(w.uint64_data_size()) + static_cast<std::uint64_t>(w.string_data_size());
}

/// Throws model_error (bad_weight, external_data) unless a weight has exactly the bytes that its
/// shape needs. Engines and shape inference read as many bytes as the shape says.
inline void check_weight(const onnx::TensorProto& weight, const std::filesystem::path& folder) {
    const auto wrong = [&](std::uint64_t there, std::uint64_t needed) {
        if (there == needed) return;
        throw model_error(
            model_fault::bad_weight, weight.name(),
            "it has " + std::to_string(there) + " bytes or numbers, and its shape " + std::to_string(needed));
    };
    if (weight.has_segment()) throw model_error(model_fault::bad_weight, weight.name(), "it is in segments");
    const auto size = size_of(weight);
    if (weight.data_location() == onnx::TensorProto::EXTERNAL) {
        const std::uint64_t there = file_of(weight, folder).size;
        if (size) wrong(there, size->count());
    } else if (weight.has_raw_data()) {
        if (size) wrong(weight.raw_data().size(), size->count());
    } else {
        bytes count{1};
        for (const std::int64_t extent : weight.dims()) count = count * static_cast<std::uint64_t>(extent);
        const auto type = element_of(weight.data_type());
        if (type == element::complex64 || type == element::complex128) count = count * 2;
        if (type != element::unknown) wrong(numbers_in(weight), count.count());
    }
}

/// Copies the bytes of a piece's external weights into the piece.
class weight_taker {
public:
    explicit weight_taker(const std::filesystem::path& folder) : folder_(&folder) {}

    /// Throws model_error: external_data; or too_large, before any bytes beyond the limit are read.
    void take_in(onnx::TensorProto& weight) {
        if (weight.data_location() != onnx::TensorProto::EXTERNAL) return;
        const weight_file from = file_of(weight, *folder_);
        if (from.size > left_)
            throw model_error(model_fault::too_large, weight.name(), "the piece has 2 GiB or more with it");
        left_ -= from.size;
        weight.set_raw_data(read_bytes(from.path, from.offset, from.size, model_fault::external_data, weight.name()));
        weight.clear_external_data();
        weight.clear_data_location();
    }
    void take_in(onnx::SparseTensorProto& weight) {
        take_in(*weight.mutable_values());
        take_in(*weight.mutable_indices());
    }
    /// Takes in the weights in attributes and bodies.
    void take_in(onnx::NodeProto& n) {
        for (auto& a : *n.mutable_attribute()) {
            if (a.has_t()) take_in(*a.mutable_t());
            for (auto& t : *a.mutable_tensors()) take_in(t);
            if (a.has_sparse_tensor()) take_in(*a.mutable_sparse_tensor());
            for (auto& t : *a.mutable_sparse_tensors()) take_in(t);
            if (a.has_g()) take_in(*a.mutable_g());
            for (auto& body : *a.mutable_graphs()) take_in(body);
        }
    }
    void take_in(onnx::GraphProto& g) {
        for (auto& w : *g.mutable_initializer()) take_in(w);
        for (auto& w : *g.mutable_sparse_initializer()) take_in(w);
        for (auto& n : *g.mutable_node()) take_in(n);
    }

private:
    const std::filesystem::path* folder_;
    std::uint64_t left_ = most_bytes;
};

}  // namespace graph::detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
