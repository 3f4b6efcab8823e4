// SPDX-License-Identifier: Apache-2.0
// Errors, in three forms: `errc` is the code, `failure` adds the reason with its figures but without text or allocation
// (for `try_` calls), and exceptions add a sentence for people. reason.hpp lists codes, reasons and sentences.
//
//   try { ... } catch (const gpushare::error& e) { log(e.what()); if (e.code() == gpushare::errc::over_quota) ...; }
//
// A refusal of memory is a std::bad_alloc, every other exception a std::runtime_error, and both are a gpushare::error.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/reason.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Whether raise() throws a memory_error for it.
[[nodiscard]] constexpr bool is_memory_refusal(errc code) noexcept {
    return code == errc::over_quota || code == errc::out_of_memory || code == errc::size_overflow ||
           code == errc::bad_alignment;
}

/// The reason for a refusal. Trivial to copy: costs nothing to return. `because` says what the
/// figures mean. Without it they mean what the code implies (reason_of), and aren't shown where the
/// code implies nothing.
struct failure {
    errc code = errc::none;           ///< what went wrong; none: nothing did
    std::uint64_t asked = 0;          ///< how much was asked for
    std::uint64_t left = 0;           ///< how much there was
    std::uint64_t limit = 0;          ///< of how much
    reason because = reason::unsaid;  ///< more closely why, and the unit of the figures

    friend constexpr bool operator==(const failure& f, errc c) noexcept {
        return f.code == c;
    }  ///< Whatever the figures.
};

/// The reason of a failure: its own, or the one that its code implies.
[[nodiscard]] constexpr reason reason_of(const failure& f) noexcept {
    if (f.because != reason::unsaid) return f.because;
    if (f.asked == 0 && f.left == 0 && f.limit == 0) return reason::unsaid;
    switch (f.code) {
        case errc::over_quota:
        case errc::out_of_memory:
        case errc::no_room: return f.limit == 0 && f.left == 0 ? reason::size : reason::size_left;
        case errc::size_overflow: return reason::size;
        case errc::share_exceeded: return reason::shares_exceeded;
        case errc::slo_unreachable: return f.limit == 0 ? reason::unsaid : reason::objective_too_short;
        case errc::too_few_devices: return f.asked == 0 ? reason::unsaid : reason::too_few_devices;
        case errc::no_device: return f.limit == 0 ? reason::unsaid : reason::no_such_device;
        case errc::queue_full: return f.limit == 0 ? reason::unsaid : reason::queue_limit;
        case errc::io_failed: return f.asked == 0 ? reason::unsaid : reason::system_error;
        default: return reason::unsaid;
    }
}

/// The unit of a failure's figures.
[[nodiscard]] constexpr figure_unit unit_of(const failure& f) noexcept {
    return detail::sentence_of(reason_of(f)).unit;
}

namespace detail {

/// Text in a fixed buffer: building an error message must not itself run out of memory. Cuts what doesn't fit, and
/// escapes what can't be printed: names and texts come from anybody.
class message {
public:
    /// Text, numbers, bytes, durations or failures, one after the other. Not operator<<, which costs every
    /// includer a look at all of std's.
    template <class... Parts>
    message& add(const Parts&... parts) noexcept {
        (append(parts), ...);
        return *this;
    }
    /// Puts the tenant's name in front; nothing for an empty name. The name is cut, since the
    /// figures behind it must fit as well.
    message& of(std::string_view tenant) noexcept {
        return tenant.empty() ? *this : add("tenant '", tenant_name{tenant}, "': ");
    }
    [[nodiscard]] const char* c_str() const noexcept { return buffer_.data(); }
    /// Whether there is no text.
    [[nodiscard]] bool empty() const noexcept { return size_ == 0; }

private:
    void append(std::string_view text) noexcept {
        size_ += copy_printable(text, buffer_.data() + size_, buffer_.size() - 1 - size_);
        buffer_[size_] = '\0';
    }
    template <std::same_as<tenant_name> Name>  // so that a text is none
    void append(const Name& name) noexcept {
        append(name.view());
    }
    // The sentence of its reason.
    void append(const failure& f) noexcept {
        const auto& how = sentence_of(reason_of(f));
        for (auto rest = how.text; !rest.empty();) {
            const auto open = std::min(rest.find('{'), rest.size());
            append(rest.substr(0, open));
            if (open == rest.size()) break;
            const auto close = rest.find('}', open);
            const auto name = rest.substr(open + 1, close - open - 1);
            if (name == "code")
                append(to_string(f.code));
            else
                append(name == "asked" ? f.asked : name == "left" ? f.left : f.limit, how.unit);
            rest.remove_prefix(close + 1);
        }
    }
    void append(std::uint64_t n) noexcept { print("%llu", static_cast<unsigned long long>(n)); }
    // In the largest unit that keeps the figure exact, else with the rounded MiB beside it.
    void append(bytes b) noexcept {
        constexpr std::array<const char*, 4> unit{"B", "KiB", "MiB", "GiB"};
        auto n = b.count();
        std::size_t i = 0;
        for (; i + 1 < unit.size() && n != 0 && n % 1024 == 0; ++i) n /= 1024;
        if (i == 0 && n >= 10240)
            print("%llu B (%.1f MiB)", static_cast<unsigned long long>(n), static_cast<double>(n) / 1048576.0);
        else
            print("%llu %s", static_cast<unsigned long long>(n), unit[i]);
    }
    // In the largest unit that is at most the figure; digits below a thousandth of the unit are
    // dropped.
    void append(ns t) noexcept {
        struct scale {
            std::uint64_t size;
            const char* unit;
        };
        constexpr std::array<scale, 4> scales{{{1'000'000'000, " s"}, {1'000'000, " ms"}, {1'000, " us"}, {1, " ns"}}};
        if (t < ns{0}) append("-");
        const auto n = t < ns{0} ? std::uint64_t{0} - static_cast<std::uint64_t>(t.count())
                                 : static_cast<std::uint64_t>(t.count());
        const auto& in = *std::ranges::find_if(scales, [n](const scale& s) { return n >= s.size || s.size == 1; });
        append(n / in.size);
        append_thousandths(n % in.size * 1000 / in.size);
        append(in.unit);
    }
    void append(std::uint64_t n, figure_unit unit) noexcept {
        switch (unit) {
            case figure_unit::bytes: return append(bytes{n});
            case figure_unit::permille: return append(n / 10), append_thousandths(n % 10 * 100), append(" %");
            case figure_unit::nanoseconds: return append(ns{static_cast<std::int64_t>(std::min(n, most_ns))});
            case figure_unit::error_number: return append_error(static_cast<int>(n));
            default: return append(n);
        }
    }
    // 250 as ".25", 0 as nothing.
    void append_thousandths(std::uint64_t n) noexcept {
        if (n == 0) return;
        auto digits = 3;
        for (; n % 10 == 0; n /= 10) --digits;
        print(".%0*llu", digits, static_cast<unsigned long long>(n));
    }
    // POSIX's strerror_r returns a number, GNU's the text.
    void append_error(int number) noexcept {
        std::array<char, 128> text{};
        const auto said = ::strerror_r(number, text.data(), text.size());
        if constexpr (std::is_pointer_v<decltype(said)>)
            append(said);
        else
            append(text.data());
        add(" (errno ", static_cast<std::uint64_t>(number), ")");
    }

    template <class... Args>
    void print(const char* format, Args... args) noexcept {
        const int n = std::snprintf(buffer_.data() + size_, buffer_.size() - size_, format, args...);
        if (n > 0) size_ = std::min(size_ + static_cast<std::size_t>(n), buffer_.size() - 1);
    }

    static constexpr auto most_ns = static_cast<std::uint64_t>(ns::max().count());
    std::array<char, 320> buffer_{};
    std::size_t size_ = 0;
};

/// Why nobody has a block of that size and alignment: the alignment is no power of two or above
/// `most`, else the size is more than any device has.
[[nodiscard]] constexpr failure impossible_block(std::uint64_t size, std::uint64_t alignment,
                                                 std::uint64_t most = ~std::uint64_t{0}) noexcept {
    if (!std::has_single_bit(alignment))
        return {.code = errc::bad_alignment, .asked = alignment, .because = reason::no_power_of_two};
    if (alignment > most)
        return {.code = errc::bad_alignment, .asked = alignment, .limit = most, .because = reason::alignment_too_large};
    return {.code = errc::size_overflow, .asked = size, .because = reason::size};
}
/// Whether a block fits into `most` bytes but for its alignment: why, with the largest alignment
/// that fits; else errc::none. `charged(alignment)`: the bytes that the block takes.
template <std::invocable<std::size_t> Charged>
[[nodiscard]] constexpr failure too_aligned(std::size_t alignment, bytes most, Charged charged) noexcept {
    if (!std::has_single_bit(alignment) || charged(alignment) <= most || charged(std::size_t{1}) > most) return {};
    std::size_t fits = alignment / 2;
    while (charged(fits) > most) fits /= 2;
    return impossible_block(0, alignment, fits);
}
/// Why a layer that has `most` bytes in all never has that block, as far as it is the alignment or
/// more than any device has; else errc::none. `charged`: as above.
template <std::invocable<std::size_t> Charged>
[[nodiscard]] constexpr failure never_had(std::size_t size, std::size_t alignment, bytes most,
                                          Charged charged) noexcept {
    if (!std::has_single_bit(alignment)) return impossible_block(size, alignment);
    const auto why = too_aligned(alignment, std::min(most, bytes::max() - bytes{1}), charged);
    if (why.code != errc::none) return why;
    return charged(alignment) == bytes::max() ? impossible_block(size, alignment) : failure{};
}
/// The host has no memory for the record of a block.
inline constexpr failure no_host_memory{.code = errc::out_of_memory, .because = reason::host_memory};

/// Characters of a name that errors keep.
inline constexpr std::size_t longest_name = tenant_name::longest;

/// "tenant 'chat': asked 512 MiB, 37 MiB of 4 GiB left (over the quota)"
[[nodiscard]] inline message describe(const failure& f, std::string_view tenant, std::string_view what) noexcept {
    message m;
    m.of(tenant);
    if (!what.empty()) m.add(what, ": ");
    return m.add(f);
}

/// `text`, with unprintable characters escaped.
[[nodiscard]] inline std::string printable(std::string_view text) {
    std::string all(text.size() * 4, '\0');
    all.resize(copy_printable(text, all.data(), all.size()));
    return all;
}
/// The same; the code's sentence instead of an empty text.
[[nodiscard]] inline std::string whole_sentence(errc code, std::string_view text) {
    return printable(text.empty() ? to_string(code) : text);
}

}  // namespace detail

/// The base of every exception of the library, beside its std base. Not itself a std::exception: a
/// class with two std::exception bases would slip through `catch (const std::exception&)`.
class error {
public:
    /// The error code.
    [[nodiscard]] errc code() const noexcept { return failure_.code; }
    /// The same with the reason and its figures.
    [[nodiscard]] const failure& figures() const noexcept { return failure_; }
    /// Empty where no tenant is concerned. Cut at 63 characters.
    [[nodiscard]] std::string_view tenant() const noexcept { return tenant_.view(); }
    /// A sentence for people: the request, who made it, and why it was refused.
    [[nodiscard]] virtual const char* what() const noexcept = 0;

protected:
    /// Keeps a copy of the name.
    error(const failure& f, std::string_view tenant) noexcept : failure_(f), tenant_(tenant) {}
    error(const error&) = default;
    error& operator=(const error&) = default;
    ~error() = default;

private:
    failure failure_;
    tenant_name tenant_;
};

/// A refusal of memory. Containers treat it as the std::bad_alloc that it is.
class memory_error final : public std::bad_alloc, public error {
public:
    /// `what` was attempted, such as "allocate".
    memory_error(const failure& f, std::string_view tenant, std::string_view what) noexcept
        : error(f, tenant), text_(detail::describe(f, tenant, what)) {}
    /// With a text of its own.
    template <std::same_as<detail::message> Text>  // so that {} is no text of its own
    memory_error(const failure& f, std::string_view tenant, const Text& text) noexcept
        : error(f, tenant), text_(text.empty() ? detail::describe(f, tenant, {}) : text) {}
    /// A sentence for people.
    [[nodiscard]] const char* what() const noexcept override { return text_.c_str(); }

private:
    detail::message text_;
};

/// Every other failure. Not final, since std::throw_with_nested adds to it what was thrown before.
class operation_error : public std::runtime_error, public error {
public:
    /// `what` was attempted, such as "admission".
    operation_error(const failure& f, std::string_view tenant, std::string_view what)
        : std::runtime_error(detail::describe(f, tenant, what).c_str()), error(f, tenant) {}
    /// `text` is the whole sentence. Unprintable characters are escaped.
    operation_error(errc code, std::string_view tenant, const char* text)
        : std::runtime_error(detail::whole_sentence(code, text)), error(failure{code}, tenant) {}
    /// With a text of its own, and the figures beside it.
    template <std::same_as<detail::message> Text>
    operation_error(const failure& f, std::string_view tenant, const Text& text)
        : std::runtime_error((text.empty() ? detail::describe(f, tenant, {}) : text).c_str()), error(f, tenant) {}
    /// A sentence for people.
    [[nodiscard]] const char* what() const noexcept override { return std::runtime_error::what(); }
};

/// Throws what `f` calls for. `what` says what was attempted; `tenant` may be empty.
[[noreturn]] inline void raise(const failure& f, std::string_view tenant = {}, std::string_view what = {}) {
    if (is_memory_refusal(f.code)) throw memory_error(f, tenant, what);
    throw operation_error(f, tenant, what);
}

/// A value, or why there is none. `std::expected` in miniature, for `try_` calls.
template <class T>
class [[nodiscard]] result {
public:
    /// A value.
    result(T value) : value_(std::move(value)) {}  // NOLINT: implicit, as in std::expected
    /// The reason why there is none.
    result(const failure& why) noexcept : failure_(why) {}  // NOLINT
    /// The reason without figures.
    result(errc code) noexcept : failure_(failure{.code = code}) {}  // NOLINT

    /// Whether there is a value.
    [[nodiscard]] explicit operator bool() const noexcept { return value_.has_value(); }
    /// The value, which must be there.
    [[nodiscard]] T& operator*() & noexcept { return *value_; }
    /// The value, which must be there.
    [[nodiscard]] const T& operator*() const& noexcept { return *value_; }
    /// The value, which must be there.
    [[nodiscard]] T&& operator*() && noexcept { return *std::move(value_); }
    /// The value, which must be there.
    [[nodiscard]] T* operator->() noexcept { return &*value_; }
    /// The value, which must be there.
    [[nodiscard]] const T* operator->() const noexcept { return &*value_; }
    /// errc::none when there is a value.
    [[nodiscard]] const failure& why() const noexcept { return failure_; }
    /// errc::none when there is a value.
    [[nodiscard]] errc code() const noexcept { return failure_.code; }
    /// The value, or the exception that `why()` calls for.
    [[nodiscard]] T value(std::string_view tenant = {}, std::string_view what = {}) && {
        if (!value_) raise(failure_, tenant, what);
        return *std::move(value_);
    }

private:
    std::optional<T> value_;
    failure failure_;
};

namespace detail {

/// Returns the result of `make`, or the figures of the library error that it throws. Other
/// exceptions pass through, such as a lack of host memory.
template <std::invocable F>
[[nodiscard]] auto or_why(F make) {
    using made = result<decltype(make())>;
    try {
        return made(make());
    } catch (const error& e) {
        return made(e.figures());
    }
}

}  // namespace detail

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
