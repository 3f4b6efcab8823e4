// SPDX-License-Identifier: Apache-2.0
// One atomic reservation across devices: several changes of counted resources, one on each device,
// are made together or not at all, and no other thread ever sees some of them without the others.
//
//   std::vector<gpushare::quota_charge> parts;                        // memory/quota_change.hpp
//   for (const auto d : split.devices) parts.emplace_back(quota_of(d), split.per_device);
//   // r's destructor releases it
//   auto r = gpushare::reservation<gpushare::quota_charge>::make(std::move(parts));
//
// First all changes are prepared, in the order of their resources, so that two reservations never
// wait for each other in a cycle. Then all are committed, which can't fail. If one can't be
// prepared, those before it are abandoned. Nothing is taken before the commit, so nothing is rolled
// back. Other requests for the same resources wait meanwhile, and aren't refused.
#pragma once

#include <compare>
#include <concepts>
#include <cstddef>
#include <iterator>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {
/// A contiguous range: a vector, an array or a span.
template <class Changes>
using change_in = std::remove_pointer_t<decltype(std::data(std::declval<Changes&>()))>;
}  // namespace detail

/// A set of changes that are all prepared, or none. While this object exists, other requests for
/// the resources wait. So be brief, run no user code, and use the resources only through the
/// changes. Meant for the devices of one node: sorting takes time quadratic in the number of
/// changes, and no memory.
template <prepared_change Change>
class prepared_together {
public:
    /// Prepares `changes`, which must outlive this object. why() is the failure of the first change
    /// that can't be prepared, in the order of the resources, or duplicate_device if two changes
    /// have the same resource.
    template <class Changes>
    requires std::same_as<detail::change_in<Changes>, Change>
    explicit prepared_together(Changes&& changes) noexcept
        : begin_(std::data(changes)), end_(begin_ + std::size(changes)) {
        for (Change* next = after(nullptr); next != nullptr; next = after(next)) {
            why_ = count(next->resource()) > 1 ? failure{errc::duplicate_device} : next->prepare();
            if (why_.code == errc::none) continue;
            refused_ = next;
            for (Change* c = begin_; c != end_; ++c)
                if (precedes(*c, *next)) c->abandon();
            return;
        }
        held_ = true;
    }
    prepared_together(const prepared_together&) = delete;
    prepared_together& operator=(const prepared_together&) = delete;
    ~prepared_together() {
        if (!held_) return;
        for (Change* c = begin_; c != end_; ++c) c->abandon();
    }

    /// Whether all changes are prepared.
    [[nodiscard]] explicit operator bool() const noexcept { return held_; }
    /// The reason why a change couldn't be prepared.
    [[nodiscard]] const failure& why() const noexcept { return why_; }
    /// The change that couldn't be prepared, or null.
    [[nodiscard]] const Change* refused() const noexcept { return refused_; }

    /// Makes all changes. Call once, and only if all are prepared.
    void commit() noexcept {
        for (Change* c = begin_; c != end_; ++c) c->commit();
        held_ = false;
    }

private:
    static bool precedes(const Change& a, const Change& b) noexcept {
        // A total order for any pointers.
        return std::compare_three_way{}(a.resource(), b.resource()) < 0;
    }

    // The change with the next resource in the order of addresses, which is the same for all
    // threads.
    Change* after(const Change* last) const noexcept {
        Change* next = nullptr;
        for (Change* c = begin_; c != end_; ++c)
            if ((last == nullptr || precedes(*last, *c)) && (next == nullptr || precedes(*c, *next))) next = c;
        return next;
    }

    [[nodiscard]] std::size_t count(const void* resource) const noexcept {
        std::size_t n = 0;
        for (const Change* c = begin_; c != end_; ++c) n += c->resource() == resource ? 1U : 0U;
        return n;
    }

    Change *begin_, *end_;
    Change* refused_ = nullptr;
    failure why_{};
    bool held_ = false;
};
/// Deduces the type of the changes in a range.
template <class Changes>
prepared_together(Changes&&) -> prepared_together<detail::change_in<Changes>>;

/// Makes all changes or none. Returns the failure of the change that couldn't be prepared. Safe
/// during any other use of the resources.
template <class Changes>
requires prepared_change<detail::change_in<Changes>>
[[nodiscard]] failure try_commit_together(Changes&& changes) noexcept {
    prepared_together held(changes);
    if (held) held.commit();
    return held.why();
}

// clang-format 14 would break the compound requirement apart:
// clang-format off

/// A change that can be undone after the commit. `undo` returns false if there was nothing to undo.
template <class C>
concept undoable_change = prepared_change<C> && requires(C& c) {
    { c.undo() } noexcept -> std::same_as<bool>;
};

// clang-format on

/// Committed changes, which its destructor undoes. Movable; one owner.
template <undoable_change Change>
class reservation {
public:
    reservation() noexcept = default;  // reserves nothing

    /// Makes all changes or none. Codes: those of the changes, and duplicate_device.
    [[nodiscard]] static result<reservation> try_make(std::vector<Change> changes) {
        if (const auto why = try_commit_together(changes); why.code != errc::none) return why;
        return reservation(std::move(changes));
    }
    /// The same, but throws the exception for the code; `tenant` and `what` go into its text.
    [[nodiscard]] static reservation make(std::vector<Change> changes, std::string_view tenant = {},
                                          std::string_view what = "reservation") {
        return try_make(std::move(changes)).value(tenant, what);
    }
    /// Takes over changes that were committed elsewhere.
    explicit reservation(std::vector<Change> committed) noexcept : changes_(std::move(committed)) {}

    /// Takes over the changes.
    reservation(reservation&& other) noexcept : changes_(std::exchange(other.changes_, {})) {}
    /// Undoes its own changes and takes over the changes of `other`.
    reservation& operator=(reservation&& other) noexcept {
        reservation(std::move(other)).changes_.swap(changes_);
        return *this;
    }
    ~reservation() { (void)release(); }

    /// The changes, in the order given.
    [[nodiscard]] std::span<const Change> changes() const noexcept { return changes_; }

    /// Undoes all changes now, the last one first. False if a change couldn't be undone, because
    /// other code has released it.
    bool release() noexcept {
        bool all = true;
        for (; !changes_.empty(); changes_.pop_back()) all &= changes_.back().undo();
        return all;
    }

    /// Drops the changes without undoing them: other code has taken them over.
    void dismiss() noexcept { changes_.clear(); }

private:
    std::vector<Change> changes_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
