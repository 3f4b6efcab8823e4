// SPDX-License-Identifier: Apache-2.0
// Turns the spans of work on one device into device time, so that every instant is charged once. A span alone says too
// much: the point before a kernel is reached while the device is still busy with somebody else's.
//
//   gpushare::span_meter<stream::point> meter;
//   ns cost = meter.charge(begin, end);      // spans in the order in which they ended
//
// Where two spans overlap, either the kernels ran at once, and each is to have half of that time; or the later one only
// waited. Points don't tell which. What does is how long the later one takes at least: it ran for that long before its
// end, so far the overlap is proven and split equally. The rest goes to the span that ended first, which is exact where
// kernels fill the device and so run one after the other.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// A value; not thread-safe. The sum of all charges, less what is given back, is the union of the spans, in whatever
/// order they come. Remembers at least the latest 64 stretches of time, busy or not: nothing before them changes any more.
template <timeline_point Point>
class span_meter {
public:
    struct refunds_nothing {
        void operator()(client_id, ns) const noexcept {}
    };
    struct interval {  // on the meter's own time, which begins with the first span
        ns::rep begin = 0, end = 0;
    };

    /// Device time of the work between `begin` and `end`, both reached: what no earlier charge covers, and its part of
    /// what is proven to be shared.
    [[nodiscard]] ns charge(const Point& begin, const Point& end) {
        const auto between = [](const Point& a, const Point& b) { return elapsed(a, b); };
        return charge(place(begin, end, elapsed(begin, end), between), end, {}, ns{0}, refunds_nothing{});
    }

    /// When that was: a span of `length`. Asking the device for a time isn't free: `between(point, point)` is asked at most
    /// once, and not for what begins where the latest charge ended.
    template <std::invocable<const Point&, const Point&> F>
    [[nodiscard]] interval place(const Point& begin, const Point& end, ns length, F between) {
        if (charged_to_ == long_ago) {
            remember({.when = {long_ago, 0}});  // idle since ever
            charged_to_ = 0;
            latest_ = begin;
        }
        if constexpr (std::equality_comparable<Point>)
            if (begin == latest_) return {charged_to_, charged_to_ + length.count()};
        const auto at = charged_to_ + between(latest_, end).count();
        return {at - length.count(), at};
    }

    /// charge() for work of `who` that takes `at_least` on the device and whose span is known, up to `end`. Calls
    /// `give_back(client, time)` for what others were charged alone and share with it.
    template <std::invocable<client_id, ns> F>
    [[nodiscard]] ns charge(interval span, const Point& end, client_id who, ns at_least, F give_back) {
        if (span.end <= span.begin) return ns{0};
        const auto proven_from = std::max(span.begin, span.end - std::max<ns::rep>(at_least.count(), 0));
        ns::rep cost = 0;
        const auto tail = first_after(span.begin);
        if (changes_any(tail, span, who, proven_from)) cost += rewrite(tail, span, who, proven_from, give_back);
        if (span.end > charged_to_) {
            const auto from = std::max(span.begin, charged_to_);
            cost += span.end - from;
            remember({.when = {charged_to_, from}});  // idle
            remember({{from, span.end}, 1, {who}});
            latest_ = end;
            charged_to_ = span.end;
        }
        return ns{cost};
    }

private:
    static constexpr std::size_t most_stretches = 128;  // half are forgotten at once
    static constexpr std::uint32_t most_owners = 4;     // more in one instant share no further
    static constexpr ns::rep long_ago = std::numeric_limits<ns::rep>::min();

    struct stretch {
        interval when{};
        std::uint32_t num_owners = 0;  // none: idle
        std::array<client_id, most_owners> owners{};

        [[nodiscard]] bool is_of(client_id c) const noexcept {
            for (std::uint32_t o = 0; o < num_owners; ++o)
                if (owners[o] == c) return true;
            return false;
        }
        [[nodiscard]] bool takes(client_id c) const noexcept { return num_owners < most_owners && !is_of(c); }
    };

    [[nodiscard]] std::size_t first_after(ns::rep t) const noexcept {
        auto i = num_;
        while (i > 0 && stretches_[i - 1].when.end > t) --i;
        return i;
    }

    [[nodiscard]] bool changes_any(std::size_t tail, interval span, client_id who, ns::rep proven_from) const noexcept {
        for (auto i = tail; i < num_ && stretches_[i].when.begin < span.end; ++i)
            if (stretches_[i].num_owners == 0 || (stretches_[i].when.end > proven_from && stretches_[i].takes(who)))
                return true;
        return false;
    }

    // Gives `who` its part of the stretches from `tail` on that lie in `span`.
    template <class F>
    ns::rep rewrite(std::size_t tail, interval span, client_id who, ns::rep proven_from, F& give_back) {
        const auto before = stretches_;
        const auto num_before = num_;
        num_ = tail;
        ns::rep cost = 0;
        for (auto i = tail; i < num_before; ++i) {
            const stretch& s = before[i];
            // Idle time is the span's from its begin on, others' from where it is proven.
            const interval common{std::max(s.when.begin, s.num_owners == 0 ? span.begin : proven_from),
                                  std::min(s.when.end, span.end)};
            if (common.begin >= common.end || !s.takes(who)) {
                remember(s);
                continue;
            }
            stretch shared = s;
            shared.when = common;
            shared.owners[shared.num_owners++] = who;
            // Each had 1/n of it and keeps 1/(n+1): rounded alike on both sides, so that nothing is lost.
            const auto n = static_cast<ns::rep>(s.num_owners);
            const auto length = common.end - common.begin;
            if (n == 0) cost += length;
            for (std::uint32_t o = 0; o < s.num_owners; ++o) {
                const auto part = length / (n * (n + 1));
                cost += part;
                give_back(s.owners[o], ns{part});
            }
            remember({{s.when.begin, common.begin}, s.num_owners, s.owners});
            remember(shared);
            remember({{common.end, s.when.end}, s.num_owners, s.owners});
        }
        return cost;
    }

    void remember(const stretch& s) noexcept {
        if (s.when.begin >= s.when.end) return;
        if (num_ > 0 && stretches_[num_ - 1].when.end == s.when.begin &&
            stretches_[num_ - 1].num_owners == s.num_owners && stretches_[num_ - 1].owners == s.owners) {
            stretches_[num_ - 1].when.end = s.when.end;
            return;
        }
        if (num_ == most_stretches) {
            std::copy(stretches_.end() - most_stretches / 2, stretches_.end(), stretches_.begin());
            num_ = most_stretches / 2;
        }
        stretches_[num_++] = s;
    }

    Point latest_{};                 // that charged_to_ is the place of
    ns::rep charged_to_ = long_ago;  // the latest end so far; at first the begin that was placed first
    std::array<stretch, most_stretches> stretches_{};  // in order of time, without holes, up to charged_to_
    std::size_t num_ = 0;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
