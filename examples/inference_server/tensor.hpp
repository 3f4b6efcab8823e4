// SPDX-License-Identifier: Apache-2.0
// Tensors as in the open inference protocol (KServe v2), in both of its forms: the elements' bytes
// one after the other, or JSON. Elements of type BYTES are texts of any length, each preceded by
// its size in four bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "inference_server/json.hpp"

namespace inference_server {

enum class datatype : std::uint8_t {
    boolean,
    uint8,
    uint16,
    uint32,
    uint64,
    int8,
    int16,
    int32,
    int64,
    fp16,
    bf16,
    fp32,
    fp64,
    bytes
};
/// The protocol's name, such as "FP32".
[[nodiscard]] std::string_view to_string(datatype t) noexcept;
[[nodiscard]] std::optional<datatype> datatype_of(std::string_view name) noexcept;
/// The bytes of an element; 0 for texts.
[[nodiscard]] std::size_t size_of(datatype t) noexcept;

struct tensor {
    std::string name;
    datatype type{};
    std::vector<std::int64_t> shape;
    std::vector<std::byte> data;

    /// The elements, as a type of the same size. Throws std::logic_error for another size.
    template <class T>
    [[nodiscard]] std::span<T> as() {
        check_element(sizeof(T));
        return {reinterpret_cast<T*>(data.data()), data.size() / sizeof(T)};
    }
    template <class T>
    [[nodiscard]] std::span<const T> as() const {
        check_element(sizeof(T));
        return {reinterpret_cast<const T*>(data.data()), data.size() / sizeof(T)};
    }
    /// The texts of a tensor of type BYTES.
    [[nodiscard]] std::vector<std::string_view> texts() const;

private:
    void check_element(std::size_t size) const;
};

/// A tensor of texts.
[[nodiscard]] tensor texts_tensor(std::string name, std::span<const std::string> texts);

/// The number of elements; none for a negative extent, or for more than 2^32 elements.
[[nodiscard]] std::optional<std::uint64_t> elements_of(std::span<const std::int64_t> shape) noexcept;

/// Takes `data` as the binary form. Throws json::error if the data doesn't fit the tensor's type
/// and shape. Any byte of a BOOL but 0 becomes 1.
void set_binary(tensor& t, std::span<const std::byte> data);
/// Takes JSON: an array, flat or nested. Throws json::error in the same way.
void set_json(tensor& t, json::value data);
/// Appends the elements as a flat array. In a text that isn't UTF-8, each invalid byte becomes
/// U+FFFD.
void append_json(std::string& out, const tensor& t);

}  // namespace inference_server
