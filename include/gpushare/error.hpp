// SPDX-License-Identifier: Apache-2.0
// Errors, in three forms: `errc` is the code, `failure` adds figures without text or allocation (for `try_` calls), and
// exceptions add a sentence for people.
//
//   try { ... } catch (const gpushare::error& e) { log(e.what()); if (e.code() == gpushare::errc::over_quota) ...; }
//
// A refusal of memory is a std::bad_alloc, every other exception a std::runtime_error, and both are a gpushare::error.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <new>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// What went wrong.
enum class errc : std::uint8_t {
    none,  ///< nothing
    // memory
    over_quota,     ///< the tenant's own limit
    out_of_memory,  ///< the device, or whatever lies below the quota
    size_overflow,  ///< a size that no device has, or that wraps when it is rounded up
    bad_alignment,  ///< zero or not a power of two
    unknown_block,  ///< a free of something never allocated here, or freed already
    wrong_size,     ///< a free with another size or alignment than the allocation's
    // admission and partitions
    invalid_specification,  ///< what was asked for makes no sense
    duplicate_name,         ///< a tenant has that name
    not_whole,              ///< N doesn't divide into M parts of whole units
    too_few_devices,        ///< fewer devices than asked for
    duplicate_device,       ///< the same device twice in one partition
    different_nodes,        ///< devices of several nodes in one partition
    no_room,                ///< not enough unpromised memory
    share_exceeded,         ///< promised shares would sum over the whole device
    too_few_sms,            ///< fewer SMs than asked for
    slo_unreachable,        ///< others' longest work alone takes longer than the objective
    // compute
    deadline_exceeded,  ///< it took longer than the caller would wait
    stopped,            ///< a stop was requested while waiting
    closed,             ///< the tenant or limiter is closing
    queue_full,         ///< the tenant's queue limit
    quarantined,        ///< the tenant failed too often in a row
    asleep,             ///< the tenant sleeps, and refuses what comes
    too_many_blocks,    ///< a cooperative launch that can't be resident at once
    submission_failed,  ///< the callable that enqueues work threw
    kernel_failed,      ///< the work itself failed on the device
    stuck,              ///< the work doesn't end
    device_lost,        ///< the device is gone: everything on it failed
    // backends
    no_driver,       ///< the machine has no driver, or one that doesn't fit
    not_supported,   ///< the driver or device can't do that
    capturing,       ///< not while work is captured into a graph
    backend_failed,  ///< the device's runtime refused a call for another reason
    no_device,       ///< there is no such device
    io_failed,       ///< a file couldn't be read or written; `asked` is errno
    // collectives
    in_flight,  ///< what must be done first isn't: this rank's previous collective, a block's move, a moving tenant's work
    mismatch,  ///< ranks called different collectives, or with different sizes
    aborted,   ///< a rank, or the embedder, gave up the collective
};

/// In English, without a full stop.
[[nodiscard]] constexpr std::string_view to_string(errc code) noexcept {
    switch (code) {
        case errc::none: return "no error";
        case errc::over_quota: return "over the quota";
        case errc::out_of_memory: return "out of device memory";
        case errc::size_overflow: return "size is not representable";
        case errc::bad_alignment: return "alignment is not a power of two";
        case errc::unknown_block: return "block is not allocated here";
        case errc::wrong_size: return "block was allocated with another size or alignment";
        case errc::invalid_specification: return "invalid specification";
        case errc::duplicate_name: return "name is taken";
        case errc::not_whole: return "does not divide into equal whole parts";
        case errc::too_few_devices: return "not enough devices";
        case errc::duplicate_device: return "the same device twice";
        case errc::different_nodes: return "devices are not on one node";
        case errc::no_room: return "not enough unpromised memory";
        case errc::share_exceeded: return "shares would sum over the whole device";
        case errc::too_few_sms: return "not enough SMs";
        case errc::slo_unreachable: return "others' longest work makes the objective impossible";
        case errc::deadline_exceeded: return "deadline exceeded";
        case errc::stopped: return "stop requested";
        case errc::closed: return "closed";
        case errc::queue_full: return "queue is full";
        case errc::quarantined: return "quarantined after repeated failures";
        case errc::asleep: return "asleep";
        case errc::too_many_blocks: return "blocks cannot all be resident";
        case errc::submission_failed: return "enqueuing the work threw";
        case errc::kernel_failed: return "the work failed on the device";
        case errc::stuck: return "the work does not end";
        case errc::device_lost: return "device lost";
        case errc::no_driver: return "no usable device driver";
        case errc::not_supported: return "not supported by the driver or device";
        case errc::capturing: return "not during a graph capture";
        case errc::backend_failed: return "the device's runtime refused the call";
        case errc::no_device: return "no such device";
        case errc::io_failed: return "a file could not be read or written";
        case errc::in_flight: return "something that must be done first is in flight";
        case errc::mismatch: return "the ranks called different collectives";
        case errc::aborted: return "aborted";
    }
    return "unknown error";
}

/// Whether raise() throws a memory_error for it.
[[nodiscard]] constexpr bool is_memory_refusal(errc code) noexcept {
    return code == errc::over_quota || code == errc::out_of_memory || code == errc::size_overflow ||
           code == errc::bad_alignment;
}

/// Why something was refused, with the figures of the refusal in the unit that the code implies (bytes for
/// memory, permille for shares, a count for devices, blocks and queues). Trivial: costs nothing to return.
struct failure {
    errc code = errc::none;   ///< what went wrong; none: nothing did
    std::uint64_t asked = 0;  ///< how much was asked for
    std::uint64_t left = 0;   ///< how much there was
    std::uint64_t limit = 0;  ///< of how much

    friend constexpr bool operator==(const failure& f, errc c) noexcept {
        return f.code == c;
    }  ///< Whatever the figures.
};

namespace detail {

/// Text in a fixed buffer: building an error message must not itself run out of memory. Cuts what doesn't fit.
class message {
public:
    /// Text, numbers, or bytes, one after the other. Not operator<<, which costs every includer a look at all of std's.
    template <class... Parts>
    message& add(const Parts&... parts) noexcept {
        (append(parts), ...);
        return *this;
    }
    [[nodiscard]] const char* c_str() const noexcept { return buffer_.data(); }

private:
    void append(std::string_view text) noexcept {
        size_ += text.copy(buffer_.data() + size_, buffer_.size() - 1 - size_);
        buffer_[size_] = '\0';
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

    template <class... Args>
    void print(const char* format, Args... args) noexcept {
        const int n = std::snprintf(buffer_.data() + size_, buffer_.size() - size_, format, args...);
        if (n > 0) size_ = std::min(size_ + static_cast<std::size_t>(n), buffer_.size() - 1);
    }

    std::array<char, 320> buffer_{};
    std::size_t size_ = 0;
};

/// Characters of a tenant's name that errors keep: the figures behind it must fit into the message as well.
inline constexpr std::size_t longest_name = tenant_name::longest;

/// "tenant 'chat': asked 512 MiB, 37 MiB of 4 GiB left (over the quota)"
[[nodiscard]] inline message describe(const failure& f, std::string_view tenant, std::string_view what) noexcept {
    message m;
    if (!tenant.empty()) m.add("tenant '", tenant.substr(0, longest_name), "': ");
    if (!what.empty()) m.add(what, ": ");
    if (f.code == errc::out_of_memory && f.limit == 0)  // of a device that doesn't say what it has
        m.add("asked ", bytes{f.asked}, " (", to_string(f.code), ")");
    else if (is_memory_refusal(f.code) || f.code == errc::no_room)
        m.add("asked ", bytes{f.asked}, ", ", bytes{f.left}, " of ", bytes{f.limit}, " left (", to_string(f.code), ")");
    else if (f.code == errc::slo_unreachable)
        m.add(to_string(f.code), " (asked ", f.asked, " us, needed ", f.limit, " us)");
    else if (f.asked == 0 && f.limit == 0)
        m.add(to_string(f.code));
    else
        m.add(to_string(f.code), " (asked ", f.asked, ", ", f.left, " of ", f.limit, " left)");
    return m;
}

}  // namespace detail

/// What every exception of the library is besides its std base. Not itself a std::exception: a class with two
/// std::exception bases would slip through `catch (const std::exception&)`.
class error {
public:
    /// What went wrong.
    [[nodiscard]] errc code() const noexcept { return failure_.code; }
    /// With the figures of it.
    [[nodiscard]] const failure& figures() const noexcept { return failure_; }
    /// Empty where no tenant is concerned. Cut at 63 characters.
    [[nodiscard]] std::string_view tenant() const noexcept { return tenant_.view(); }
    /// A sentence for people: who was refused what, and why.
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
        : error(f, tenant), text_(text) {}
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
    /// `text` is the whole sentence.
    operation_error(errc code, std::string_view tenant, const char* text)
        : std::runtime_error(text), error(failure{code}, tenant) {}
    /// With a text of its own, and the figures beside it.
    template <std::same_as<detail::message> Text>
    operation_error(const failure& f, std::string_view tenant, const Text& text)
        : std::runtime_error(text.c_str()), error(f, tenant) {}
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

/// What `make` returns, or the figures of the library's error that it throws. What isn't one passes through, as a lack of the
/// host's memory.
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
