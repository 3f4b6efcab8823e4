// SPDX-License-Identifier: Apache-2.0
// Strong types for quantities: bytes, points in time, shares of device time, priorities, devices,
// tenants. A plain number doesn't compile as an argument of such a type.
//
//   using namespace gpushare::literals;
//   gpushare::bytes quota = 512_MiB;       gpushare::share part = 30_pct;       gpushare::priority urgent{2};
#pragma once

#include <array>
#include <chrono>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// An amount of memory, in 64 bits on every platform. Arithmetic saturates at `max()`, so a sum
/// that overflows is too large and never nearly zero.
class bytes {
public:
    constexpr bytes() noexcept = default;
    /// `count` bytes.
    constexpr explicit bytes(std::uint64_t count) noexcept : count_(count) {}

    /// As a plain number.
    [[nodiscard]] constexpr std::uint64_t count() const noexcept { return count_; }
    /// The result of an overflow: more than any device has.
    [[nodiscard]] static constexpr bytes max() noexcept { return bytes{std::numeric_limits<std::uint64_t>::max()}; }

    // Every <=> has an == next to it: nvcc 13 fails to generate the implicit one.
    friend constexpr auto operator<=>(bytes, bytes) = default;
    friend constexpr bool operator==(bytes, bytes) = default;
    /// Saturates at max().
    friend constexpr bytes operator+(bytes a, bytes b) noexcept {
        return a.count_ > max().count_ - b.count_ ? max() : bytes{a.count_ + b.count_};
    }
    /// Saturates at zero.
    friend constexpr bytes operator-(bytes a, bytes b) noexcept {
        return a.count_ < b.count_ ? bytes{} : bytes{a.count_ - b.count_};
    }
    /// Saturates at max().
    friend constexpr bytes operator*(bytes a, std::uint64_t n) noexcept {
        return n != 0 && a.count_ > max().count_ / n ? max() : bytes{a.count_ * n};
    }
    /// Saturates at max().
    friend constexpr bytes operator*(std::uint64_t n, bytes a) noexcept { return a * n; }
    /// How many times `b` fits into `a`, rounded down. `b` must not be 0.
    friend constexpr std::uint64_t operator/(bytes a, bytes b) noexcept { return a.count_ / b.count_; }
    /// Rounds down. `n` must not be 0.
    friend constexpr bytes operator/(bytes a, std::uint64_t n) noexcept { return bytes{a.count_ / n}; }
    /// The remainder of operator/. `n` must not be 0.
    friend constexpr bytes operator%(bytes a, bytes b) noexcept { return bytes{a.count_ % b.count_}; }
    /// Saturates at max().
    constexpr bytes& operator+=(bytes b) noexcept { return *this = *this + b; }
    /// Saturates at zero.
    constexpr bytes& operator-=(bytes b) noexcept { return *this = *this - b; }

private:
    std::uint64_t count_ = 0;
};

/// A size as a parameter of a function: a plain number (`n * sizeof(float)`) or an amount with its
/// unit (`4_MiB`). Members and results are `bytes` or std::size_t instead. An amount beyond
/// std::size_t counts as the largest size, which no memory has.
class byte_count {
public:
    constexpr byte_count() noexcept = default;  ///< None.
    /// `count` bytes.
    constexpr byte_count(std::size_t count) noexcept : count_(count) {}  // NOLINT: implicit, for arguments
    /// As many as `amount`.
    constexpr byte_count(bytes amount) noexcept  // NOLINT: implicit, for arguments
        : count_(amount.count() < most ? static_cast<std::size_t>(amount.count()) : most) {}

    /// As a plain number.
    constexpr operator std::size_t() const noexcept { return count_; }  // NOLINT: implicit, as a size is a number

private:
    static constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
    std::size_t count_ = 0;
};
static_assert(sizeof(byte_count) == sizeof(std::size_t) && std::is_trivially_copyable_v<byte_count>,
              "a register carries it, as it does a number");

/// Durations are nanoseconds everywhere.
using ns = std::chrono::nanoseconds;

/// In seconds, for printing: `std::printf("%.1f ms", 1e3 * in_seconds(usage.device_time))`.
/// Division by 1.0ms would give a long double, for which printf needs another format.
[[nodiscard]] constexpr double in_seconds(ns t) noexcept { return static_cast<double>(t.count()) / 1e9; }

/// A point in time with a resolution of 1 ns, by the clock with which the embedder drives the
/// library. That is the steady clock, so that `std::chrono::steady_clock::now() + 5ms` is a
/// deadline. A virtual clock has its own epoch: compare and pass only instants of one clock.
using instant = std::chrono::time_point<std::chrono::steady_clock, ns>;
static_assert(std::is_convertible_v<std::chrono::steady_clock::time_point, instant>, "without loss");
/// An instant that never comes. As a deadline it means a wait without limit.
inline constexpr instant never = instant::max();

/// `a + b`; the longest duration instead of an overflow, and the most negative one instead of an
/// underflow.
[[nodiscard]] constexpr ns saturating_add(ns a, ns b) noexcept {
    ns::rep sum = 0;
    if (__builtin_add_overflow(a.count(), b.count(), &sum)) return b.count() < 0 ? ns::min() : ns::max();
    return ns{sum};
}
/// The same for an instant: `never` instead of an overflow, the earliest instant instead of an
/// underflow.
[[nodiscard]] constexpr instant saturating_add(instant t, ns d) noexcept {
    return instant{saturating_add(t.time_since_epoch(), d)};
}

/// The part of the SMs that a submission can fill. The SMs are those of the device or of an SM
/// partition. For example, one block of one SM fills a quarter of 4 SMs. Submissions whose widths
/// sum to at most 1 run side by side. A width is unknown unless given, and an unknown width counts
/// as 1.
class sm_width {
public:
    constexpr sm_width() noexcept = default;  ///< Not known.
    /// More than 1 counts as 1; 0 and less: not known.
    constexpr explicit sm_width(double part) noexcept : given_(part) {}
    /// `n` of `all` SMs.
    [[nodiscard]] static constexpr sm_width of_sms(std::uint32_t n, std::uint32_t all) noexcept {
        return sm_width(all > 0 ? static_cast<double>(n) / all : 0);
    }

    /// Whether it was given.
    [[nodiscard]] constexpr bool known() const noexcept { return given_ > 0; }
    [[nodiscard]] constexpr double part() const noexcept {
        return given_ < 1 && given_ > 0 ? given_ : 1;
    }  ///< In (0, 1].
    /// As it was given; 0 if it wasn't.
    [[nodiscard]] constexpr double given() const noexcept { return given_; }
    /// Whether the width was given as a part from 0 to 1, or not at all.
    [[nodiscard]] constexpr bool valid() const noexcept { return given_ >= 0 && given_ <= 1; }

    /// Whether both count as the same.
    friend constexpr bool operator==(sm_width a, sm_width b) noexcept {
        return a.known() == b.known() && a.part() == b.part();
    }

private:
    double given_ = 0;
};

/// A share of device time in steps of 0.1 %. `share::of_permille(1000)` is the whole device.
/// Throws std::out_of_range above the whole.
class share {
public:
    constexpr share() noexcept = default;
    /// `permille` thousandths of a device's time.
    [[nodiscard]] static constexpr share of_permille(unsigned long long permille) {
        if (permille > 1000) throw std::out_of_range("gpushare::share: more than 1000 permille of a device");
        share s;
        s.permille_ = static_cast<std::uint16_t>(permille);
        return s;
    }
    /// All of it.
    [[nodiscard]] static constexpr share whole() noexcept { return of_permille(1000); }
    /// In thousandths of a device's time.
    [[nodiscard]] constexpr std::uint32_t permille() const noexcept { return permille_; }
    /// From 0 to 1.
    [[nodiscard]] constexpr double fraction() const noexcept { return permille_ / 1000.0; }

    friend constexpr auto operator<=>(share, share) = default;
    friend constexpr bool operator==(share, share) = default;

private:
    std::uint16_t permille_ = 0;
};

/// The urgency of work: a higher level goes first, and 0 is the default. Backends map levels onto
/// their own range (CUDA counts in the other direction and has few priorities).
struct priority {
    std::int32_t level = 0;  ///< higher goes first

    friend constexpr auto operator<=>(priority, priority) = default;
    friend constexpr bool operator==(priority, priority) = default;
};

namespace detail {

/// Whether a code point above C1 is invisible but changes how the text around it is shown:
/// direction marks, which can make one name look like another, line and paragraph separators, and
/// the byte order mark. Joiners don't count, because words and emoji are written with them.
[[nodiscard]] constexpr bool misleads(std::uint32_t code) noexcept {
    return code == 0x61c || code == 0x200e || code == 0x200f || (code >= 0x2028 && code <= 0x202e) ||
           (code >= 0x2066 && code <= 0x2069) || code == 0xfeff;
}

/// The length of the UTF-8 character at the beginning of `text`, in bytes. 0 if the character is a
/// control character (also DEL and those of C1) or misleading, or if the text isn't UTF-8.
[[nodiscard]] constexpr std::size_t printable_character(std::string_view text) noexcept {
    const auto at = [text](std::size_t i) { return static_cast<std::uint32_t>(static_cast<unsigned char>(text[i])); };
    const auto first = at(0);
    if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
    const std::size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || text.size() < size) return 0;
    auto code = first & (0x7fU >> size);
    for (std::size_t i = 1; i < size; ++i) {
        if ((at(i) & 0xc0U) != 0x80) return 0;
        code = (code << 6) | (at(i) & 0x3fU);
    }
    // or C1
    const bool overlong = size > 1 && code < (size == 2 ? 0xa0U : size == 3 ? 0x800U : 0x10000U);
    return overlong || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) || misleads(code) ? 0 : size;
}

/// Copies as many characters of `text` as fit whole into `room` bytes, and returns the number of
/// bytes written. A byte that can't be printed is written in the form `\x1b`. Printable text stays
/// as it is.
constexpr std::size_t copy_printable(std::string_view text, char* to, std::size_t room) noexcept {
    constexpr std::string_view digits = "0123456789abcdef";
    std::size_t done = 0;
    while (!text.empty()) {
        const auto size = printable_character(text);
        if (size == 1 && done < room) {  // nearly every character of most texts
            to[done++] = text[0];
            text.remove_prefix(1);
            continue;
        }
        const auto byte = static_cast<unsigned char>(text[0]);
        const char escaped[] = {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
        const auto piece = size > 0 ? text.substr(0, size) : std::string_view(escaped, sizeof escaped);
        if (piece.size() > room - done) break;
        done += piece.copy(to + done, piece.size());
        text.remove_prefix(size > 0 ? size : 1);
    }
    return done;
}

}  // namespace detail

/// A tenant's name for errors, events and records: cut at 63 characters, copied without allocating,
/// with control characters, marks of direction or byte order, separators of lines and invalid UTF-8
/// written as `\x1b`.
class tenant_name {
public:
    constexpr tenant_name() noexcept = default;  ///< No name.
    /// A copy of the first 63 characters.
    template <std::convertible_to<std::string_view> Text>
    constexpr tenant_name(const Text& name) noexcept {  // NOLINT: implicit, as a text is a name
        detail::copy_printable(std::string_view(name), text_.data(), longest);
    }

    /// Valid as long as this object.
    [[nodiscard]] constexpr std::string_view view() const noexcept { return text_.data(); }
    /// Whether there is no name.
    [[nodiscard]] constexpr bool empty() const noexcept { return text_[0] == '\0'; }

    friend constexpr bool operator==(const tenant_name&, const tenant_name&) = default;

    static constexpr std::size_t longest = 63;  ///< Characters that are kept.

private:
    std::array<char, longest + 1> text_{};
};

/// A device's place in its node, from 0.
struct device_id {
    std::uint32_t index = 0;  ///< from 0

    friend constexpr auto operator<=>(device_id, device_id) = default;
    friend constexpr bool operator==(device_id, device_id) = default;
};

/// A number that the embedder chooses for each tenant, as the tag of the tenant's streams. A tenant
/// may see data that an earlier tenant with the same tag left in memory, so don't reuse a tag
/// before all memory of the earlier tenant is back.
struct tenant_tag {
    std::uint32_t value = 0;  ///< the number

    friend constexpr auto operator<=>(tenant_tag, tenant_tag) = default;
    friend constexpr bool operator==(tenant_tag, tenant_tag) = default;
};

inline namespace literals {

/// Bytes.
consteval bytes operator""_B(unsigned long long n) { return bytes{n}; }
/// 1024 bytes.
consteval bytes operator""_KiB(unsigned long long n) { return bytes{1ULL << 10} * n; }
/// 1024 KiB.
consteval bytes operator""_MiB(unsigned long long n) { return bytes{1ULL << 20} * n; }
/// 1024 MiB.
consteval bytes operator""_GiB(unsigned long long n) { return bytes{1ULL << 30} * n; }
/// 1024 GiB.
consteval bytes operator""_TiB(unsigned long long n) { return bytes{1ULL << 40} * n; }

/// `30_pct`, `0.5_pct`: a share of device time. A share above the whole device, or finer than 0.1
/// %, doesn't compile.
consteval share operator""_pct(unsigned long long n) { return share::of_permille(n > 100 ? 1001 : n * 10); }
/// A share in percent, such as 12.5_pct; in steps of 0.1.
consteval share operator""_pct(long double n) {
    const auto permille = static_cast<unsigned long long>(n * 10 + 0.5L);
    const long double off = n * 10 - static_cast<long double>(permille);
    if (off > 1e-6L || off < -1e-6L) throw std::out_of_range("gpushare::share: finer than 0.1 %");
    return share::of_permille(permille);
}

}  // namespace literals

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
