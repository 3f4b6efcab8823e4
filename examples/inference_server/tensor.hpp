// SPDX-License-Identifier: Apache-2.0
// Tensors as the open inference protocol (KServe v2) has them, in both of its forms: the elements'
// bytes one after the other, or JSON. Elements of type BYTES are texts of any length, each behind
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
/// As the protocol calls it, such as "FP32".
[[nodiscard]] std::string_view to_string(datatype t) noexcept;
[[nodiscard]] std::optional<datatype> datatype_of(std::string_view name) noexcept;
/// Bytes of an element; 0 for texts.
[[nodiscard]] std::size_t size_of(datatype t) noexcept;

struct tensor {
    std::string name;
    datatype type{};
    std::vector<std::int64_t> shape;
    std::vector<std::byte> data;

    /// Its elements, of a type of that size. Throws std::logic_error for another size.
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
    /// Of BYTES.
    [[nodiscard]] std::vector<std::string_view> texts() const;

private:
    void check_element(std::size_t size) const;
};

/// A tensor of texts.
[[nodiscard]] tensor texts_tensor(std::string name, std::span<const std::string> texts);

/// How many elements; none for a negative extent, or more than 2^32.
[[nodiscard]] std::optional<std::uint64_t> elements_of(std::span<const std::int64_t> shape) noexcept;

/// Takes `data` as the binary form. Throws json::error if it isn't that of the tensor's type and
/// shape.
void set_binary(tensor& t, std::span<const std::byte> data);
/// The same of JSON: an array, flat or nested.
void set_json(tensor& t, json::value data);
/// Appends its elements as a flat array. Texts that aren't UTF-8 can't be said: what isn't becomes
/// U+FFFD.
void append_json(std::string& out, const tensor& t);

}  // namespace inference_server
