// SPDX-License-Identifier: Apache-2.0
#include "inference_server/tensor.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include <gpushare/numbers.hpp>

namespace inference_server {

namespace {

struct type_row {
    std::string_view name;
    std::size_t size;
};
constexpr std::array<type_row, 14> types{{{"BOOL", 1},
                                          {"UINT8", 1},
                                          {"UINT16", 2},
                                          {"UINT32", 4},
                                          {"UINT64", 8},
                                          {"INT8", 1},
                                          {"INT16", 2},
                                          {"INT32", 4},
                                          {"INT64", 8},
                                          {"FP16", 2},
                                          {"BF16", 2},
                                          {"FP32", 4},
                                          {"FP64", 8},
                                          {"BYTES", 0}}};
constexpr std::uint64_t most_elements = std::uint64_t{1} << 32;

/// Calls `f` with a value of the C++ type as which a JSON number is read. BOOL and BYTES aren't
/// numbers.
template <class F>
void with_type(datatype t, F f) {
    switch (t) {
        case datatype::uint8: return f(std::uint8_t{});
        case datatype::uint16: return f(std::uint16_t{});
        case datatype::uint32: return f(std::uint32_t{});
        case datatype::uint64: return f(std::uint64_t{});
        case datatype::int8: return f(std::int8_t{});
        case datatype::int16: return f(std::int16_t{});
        case datatype::int32: return f(std::int32_t{});
        case datatype::int64: return f(std::int64_t{});
        case datatype::fp16: return f(gpushare::float16{});
        case datatype::bf16: return f(gpushare::bfloat16{});
        case datatype::fp32: return f(float{});
        case datatype::fp64: return f(double{});
        case datatype::boolean:
        case datatype::bytes: break;
    }
}

void append_bytes(std::vector<std::byte>& to, const void* from, std::size_t size) {
    const auto* first = static_cast<const std::byte*>(from);
    to.insert(to.end(), first, first + size);
}

void append_text(std::vector<std::byte>& to, std::string_view text) {
    const auto size = static_cast<std::uint32_t>(text.size());
    append_bytes(to, &size, sizeof size);
    append_bytes(to, text.data(), text.size());
}

/// Calls `f(text)` for each text. Returns false if the bytes aren't complete texts.
template <class F>
bool each_text(std::span<const std::byte> data, F f) {
    while (!data.empty()) {
        std::uint32_t size = 0;
        if (data.size() < sizeof size) return false;
        std::memcpy(&size, data.data(), sizeof size);
        data = data.subspan(sizeof size);
        if (data.size() < size) return false;
        f(std::string_view(reinterpret_cast<const char*>(data.data()), size));
        data = data.subspan(size);
    }
    return true;
}

[[noreturn]] void fail(const tensor& t, const std::string& why) {
    throw json::error("tensor '" + t.name + "': " + why);
}

std::uint64_t checked_elements(const tensor& t) {
    const auto n = elements_of(t.shape);
    if (!n) fail(t, "its shape has a negative extent, or too many elements");
    return *n;
}

}  // namespace

std::string_view to_string(datatype t) noexcept { return types[static_cast<std::size_t>(t)].name; }
std::size_t size_of(datatype t) noexcept { return types[static_cast<std::size_t>(t)].size; }
std::optional<datatype> datatype_of(std::string_view name) noexcept {
    const auto* const found = std::ranges::find(types, name, &type_row::name);
    if (found == types.end()) return std::nullopt;
    return static_cast<datatype>(found - types.begin());
}

void tensor::check_element(std::size_t size) const {
    if (size != size_of(type)) throw std::logic_error("tensor '" + name + "' is read as another type");
}

std::vector<std::string_view> tensor::texts() const {
    if (type != datatype::bytes) throw std::logic_error("tensor '" + name + "' has no texts");
    std::vector<std::string_view> all;
    each_text(data, [&](std::string_view s) { all.push_back(s); });
    return all;
}

tensor texts_tensor(std::string name, std::span<const std::string> texts) {
    tensor t{std::move(name), datatype::bytes, {static_cast<std::int64_t>(texts.size())}, {}};
    for (const auto& s : texts) append_text(t.data, s);
    return t;
}

std::optional<std::uint64_t> elements_of(std::span<const std::int64_t> shape) noexcept {
    std::uint64_t n = 1;
    for (const auto extent : shape) {
        if (extent < 0 || static_cast<std::uint64_t>(extent) > most_elements) return std::nullopt;
        // The product of two factors of 2^32 would be 0.
        if (extent != 0 && n > most_elements / static_cast<std::uint64_t>(extent)) return std::nullopt;
        n *= static_cast<std::uint64_t>(extent);
    }
    return n;
}

void set_binary(tensor& t, std::span<const std::byte> data) {
    const auto n = checked_elements(t);
    if (t.type == datatype::bytes) {
        std::uint64_t texts = 0;
        if (!each_text(data, [&](std::string_view) { ++texts; }) || texts != n)
            fail(t, "its bytes aren't " + std::to_string(n) + " texts");
    } else if (data.size() != n * size_of(t.type)) {
        fail(t, std::to_string(data.size()) + " bytes for " + std::to_string(n) + " elements of " +
                    std::string(to_string(t.type)));
    }
    t.data.assign(data.begin(), data.end());
    if (t.type == datatype::boolean)  // any other byte would be no bool for an engine
        for (auto& b : t.data) b = std::byte{b != std::byte{0}};
}

void set_json(tensor& t, json::value data) {
    const auto n = checked_elements(t);
    std::uint64_t count = 0;
    t.data.clear();
    // Reserves no more elements than a text of that length can have, even if the shape claims more.
    t.data.reserve(static_cast<std::size_t>(std::min<std::uint64_t>(n, data.text().size() / 2 + 1)) * size_of(t.type));
    const auto read = [&](json::value v) {
        if (t.type == datatype::bytes) {
            append_text(t.data, v.string());
        } else if (t.type == datatype::boolean) {
            const bool b = v.what() == json::kind::number ? v.number<int>() != 0 : v.boolean();
            t.data.push_back(std::byte{b});
        } else {
            with_type(t.type, [&](auto x) {
                using number = decltype(x);
                if constexpr (std::is_arithmetic_v<number>) {
                    x = v.number<number>();
                } else {
                    x = number(v.number<float>());
                    if (std::isinf(static_cast<float>(x))) fail(t, "a number is out of range");
                }
                append_bytes(t.data, &x, sizeof x);
            });
        }
        ++count;
    };
    data.each_leaf(read);
    if (count != n) fail(t, std::to_string(count) + " elements for a shape of " + std::to_string(n));
}

void append_json(std::string& out, const tensor& t) {
    out += '[';
    auto add = [&, first = true](const auto& x) mutable {
        if (!first) out += ',';
        first = false;
        json::append(out, x);
    };
    if (t.type == datatype::bytes) {
        each_text(t.data, add);
    } else if (t.type == datatype::boolean) {
        for (const auto b : t.data) add(b != std::byte{0});
    } else {
        with_type(t.type, [&](auto x) {
            for (std::size_t at = 0; at + sizeof x <= t.data.size(); at += sizeof x) {
                std::memcpy(&x, t.data.data() + at, sizeof x);
                if constexpr (std::is_arithmetic_v<decltype(x)>)
                    add(x);
                else
                    add(static_cast<float>(x));
            }
        });
    }
    out += ']';
}

}  // namespace inference_server
