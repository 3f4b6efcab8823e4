// SPDX-License-Identifier: Apache-2.0
// Computes what submissions are charged: one function from an observation of a batch to the charges
// of its members. It asks no device and no clock; its memory of earlier batches is an argument.
//
//   detail::span_meter meter;   detail::usual_enqueue_time usual;
//   auto all = detail::charge_for({.client = c, .span = {{begin, end}}, .predicted = 80us}, meter, usual, give_back);
//   const auto one = all.next(20us, false);          // each member's part, in order
//
// A submission is charged its duration times its width, the part of the device that it can fill. If
// the device tells how much of it a stream used, that is the charge. Elsewhere the span between the
// points is too long in four cases, each with its own rule below:
//   others' work is within it             every instant of the device is charged once (span_meter)
//   the device may have been idle         a doubtful span: at most what was predicted
//   its thread was held up in enqueuing   the span less the gap, at least what was predicted (usual_enqueue_time)
//   another began before its end          an overtaken batch: up to where that began, at least what was predicted
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include <gpushare/compute/admission.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// An interval of device time, in ns from an arbitrary origin.
struct interval {
    ns::rep begin = 0, end = 0;
    [[nodiscard]] constexpr ns length() const noexcept { return ns{end - begin}; }
};

/// Turns spans on one device into device time, so that no instant is charged more than once, in
/// whatever order the spans come. If each span fills the device, the sum of all charges, less the
/// time given back, is the union of the spans. Otherwise it is the sum of the widths at each
/// instant, at most 1.
///
/// If spans' widths fit side by side, they ran at once. If other spans overlap, either the kernels
/// ran at once and each should get half of that time, or the later one only waited. Points can't
/// tell these cases apart, but the least time of the later kernel can: it ran for that long before
/// its end. This part of the overlap is proven, and split equally. The rest goes to the span that
/// ended first, which is exact if kernels fill the device and so run one after the other.
///
/// A value; not thread-safe. It remembers at least the latest 64 stretches of time, busy or not.
/// Time before them no longer changes.
class span_meter {
public:
    /// Charges `who` for work with the span between these moments. The work takes at least
    /// `at_least` on the device and fills the part `width` of it. Returns the time that no earlier
    /// charge covers, plus its part of the time proven to be shared. Calls `give_back(client,
    /// time)` for time that others were charged alone and share with it.
    template <std::invocable<client_id, ns> F>
    [[nodiscard]] ns charge(interval span, client_id who, ns at_least, F give_back, double width = 1) {
        if (num_ == 0) {
            remember({.when = {long_ago, 0}});  // idle until the first span
            charged_to_ = 0;
        }
        if (span.end <= span.begin) return ns{0};
        const auto proven_from = std::max(span.begin, span.end - std::max<ns::rep>(at_least.count(), 0));
        ns::rep cost = 0;
        const auto tail = first_after(span.begin);
        const owner mine{who, static_cast<float>(width)};
        if (changes_any(tail, span, mine, proven_from)) cost += rewrite(tail, span, mine, proven_from, give_back);
        if (span.end > charged_to_) {
            const auto from = std::max(span.begin, charged_to_);
            cost += part_of(span.end - from, mine.width);
            remember({.when = {charged_to_, from}});  // idle
            remember({{from, span.end}, 1, {mine}});
            charged_to_ = span.end;
        }
        return ns{cost};
    }

private:
    static constexpr std::size_t most_stretches = 128;  // half are forgotten at once
    static constexpr std::uint32_t most_owners = 8;     // more in one instant share no further
    static constexpr ns::rep long_ago = std::numeric_limits<ns::rep>::min();

    struct owner {
        client_id who{};
        float width = 1;
        friend bool operator==(const owner&, const owner&) = default;
    };
    struct stretch {
        interval when{};
        std::uint32_t num_owners = 0;  // 0: idle
        std::array<owner, most_owners> owners{};

        [[nodiscard]] double width() const noexcept {
            double sum = 0;
            for (std::uint32_t i = 0; i < num_owners; ++i) sum += static_cast<double>(owners[i].width);
            return sum;
        }
        // Whether both fit side by side, so that both ran at once whatever their lengths.
        [[nodiscard]] bool fits(const owner& o) const noexcept {
            return width() + static_cast<double>(o.width) <= 1.001;
        }
        [[nodiscard]] bool is_of(client_id c) const noexcept {
            for (std::uint32_t i = 0; i < num_owners; ++i)
                if (owners[i].who == c) return true;
            return false;
        }
        [[nodiscard]] bool takes(const owner& o) const noexcept {
            return num_owners < most_owners && (!is_of(o.who) || fits(o));
        }
    };

    [[nodiscard]] static ns::rep part_of(ns::rep length, double part) noexcept;

    [[nodiscard]] std::size_t first_after(ns::rep t) const noexcept;

    [[nodiscard]] bool changes_any(std::size_t tail, interval span, const owner& mine,
                                   ns::rep proven_from) const noexcept;

    // Gives `mine` its part of the stretches from `tail` on that are in `span`.
    template <class F>
    ns::rep rewrite(std::size_t tail, interval span, const owner& mine, ns::rep proven_from, F& give_back) {
        const auto before = stretches_;
        const auto num_before = num_;
        num_ = tail;
        ns::rep cost = 0;
        for (auto i = tail; i < num_before; ++i) {
            const stretch& s = before[i];
            // If there was room alongside the others, the span shares time from its begin on;
            // otherwise from the moment at which that is proven.
            const interval common{std::max(s.when.begin, s.fits(mine) ? span.begin : proven_from),
                                  std::min(s.when.end, span.end)};
            if (common.begin >= common.end || !s.takes(mine)) {
                remember(s);
                continue;
            }
            stretch shared = s;
            shared.when = common;
            shared.owners[shared.num_owners++] = mine;
            // The device's idle part covers the charge first. The owners of the time give the rest,
            // in proportion to their widths. Both sides are rounded alike, so no time is lost.
            const double before_it = s.width(), with_it = before_it + static_cast<double>(mine.width);
            const auto length = common.end - common.begin;
            cost += part_of(length, std::min(with_it, 1.0) - std::min(before_it, 1.0));
            const double had = std::max(before_it, 1.0), has = std::max(with_it, 1.0);
            for (std::uint32_t o = 0; o < s.num_owners && has > had; ++o) {
                const auto part = part_of(length, static_cast<double>(s.owners[o].width) * (has - had) / (had * has));
                cost += part;
                give_back(s.owners[o].who, ns{part});
            }
            remember({{s.when.begin, common.begin}, s.num_owners, s.owners});
            remember(shared);
            remember({{common.end, s.when.end}, s.num_owners, s.owners});
        }
        return cost;
    }

    void remember(const stretch& s) noexcept;

    ns::rep charged_to_ = long_ago;  // the latest end so far
    // In order of time, without holes, up to charged_to_.
    std::array<stretch, most_stretches> stretches_{};
    std::size_t num_ = 0;
};

#if GPUSHARE_BODIES

GPUSHARE_INLINE auto span_meter::part_of(ns::rep length, double part) noexcept -> ns::rep {
    return static_cast<ns::rep>(static_cast<double>(length) * part);
}

GPUSHARE_INLINE std::size_t span_meter::first_after(ns::rep t) const noexcept {
    auto i = num_;
    while (i > 0 && stretches_[i - 1].when.end > t) --i;
    return i;
}

GPUSHARE_INLINE bool span_meter::changes_any(std::size_t tail, interval span, const owner& mine,
                                             ns::rep proven_from) const noexcept {
    for (auto i = tail; i < num_ && stretches_[i].when.begin < span.end; ++i)
        if ((stretches_[i].when.end > proven_from || stretches_[i].fits(mine)) && stretches_[i].takes(mine))
            return true;
    return false;
}

GPUSHARE_INLINE void span_meter::remember(const stretch& s) noexcept {
    if (s.when.begin >= s.when.end) return;
    if (num_ > 0 && stretches_[num_ - 1].when.end == s.when.begin && stretches_[num_ - 1].num_owners == s.num_owners &&
        stretches_[num_ - 1].owners == s.owners) {
        stretches_[num_ - 1].when.end = s.when.end;
        return;
    }
    if (num_ == most_stretches) {
        num_ = most_stretches / 2;
        for (std::size_t i = 0; i < num_; ++i) stretches_[i] = stretches_[i + num_];
    }
    stretches_[num_++] = s;
}

#endif  // GPUSHARE_BODIES

/// The time that enqueuing a submission took, and how long the device may have waited for it. 0:
/// unknown.
struct enqueue_time {
    ns took{}, idle{};

    /// The time from the begin of enqueuing to its end. `in_front`: the predicted time that the
    /// device needed to reach that work.
    [[nodiscard]] static constexpr enqueue_time between(instant begin, instant end, ns in_front) noexcept {
        if (end <= begin) return {};
        return {end - begin, std::max(end - begin - in_front, ns{0})};
    }
};

/// How long one client usually takes to enqueue. A host thread may lose its core for milliseconds
/// between the point in front of the work and the work itself. The device then idles, and the
/// points don't show it. An engine's call of hundreds of launches always takes long to enqueue.
/// Then only the span is known, and the client pays for all of it, since the device was kept for
/// the client meanwhile. A value; not thread-safe.
class usual_enqueue_time {
public:
    /// Whether a thread was held up: `t.took` is far longer than usual, and the device may have
    /// been idle. Learns what is usual.
    [[nodiscard]] bool is_held_up(const enqueue_time& t) noexcept {
        if (t.took <= ns{0}) return false;
        if (usual_ <= ns{0}) usual_ = t.took;
        const ns most = 4 * usual_ + allowance;
        // A time that is always long becomes usual.
        usual_ += (std::min(t.took, most) - usual_) / 8;
        return t.took > most && t.idle > ns{0};
    }
    /// The time of work whose thread was held up while enqueuing: at least the span less the time
    /// that the device may have been idle, at most the span, and the prediction in between.
    [[nodiscard]] static constexpr ns without_gap(ns span, ns predicted, const enqueue_time& t) noexcept {
        return std::max(std::min(span, predicted), span - t.idle);
    }
    /// The smoothed time; 0: none was seen.
    [[nodiscard]] ns get() const noexcept { return usual_; }

private:
    static constexpr ns allowance{20'000};  // launches and points alone take a few microseconds

    ns usual_{};
};

/// An observation of a batch at its end.
struct observation {
    client_id client{};
    // On the device; for an overtaken batch only up to the begin of the next one, if known.
    std::optional<interval> span{};
    ns length{};     // the whole time between the batch's points
    ns predicted{};  // the sum over the members
    // Of a single member: the least time that it takes with the device to itself.
    ns at_least{};
    double width = 1;              // the part of the device that it can fill
    std::optional<sm_use> used{};  // the use that the device reported, if it does
    enqueue_time enqueued{};       // of a single member with points of its own
    std::uint32_t members = 1;
    bool overtaken = false;  // another batch began behind it before its end was recorded
    bool doubtful = false;   // the device may have been idle in between
    bool contended = false;  // something was in flight on another stream meanwhile
};

/// The charges of a batch's members.
class charges {
public:
    struct part {
        ns took{}, span{};  // the charge, and the member's part of the batch's length
        ns after{};         // how long before the batch's end the member ended
    };

    charges(const observation& seen, ns took, charge::source from) noexcept
        : from_(from),
          took_left_(took),
          span_left_(seen.length),
          took_rate_(seen.members > 1 ? rate(took, seen.predicted) : 0),
          span_rate_(seen.members > 1 ? rate(seen.length, seen.predicted) : 0) {}

    [[nodiscard]] charge::source from() const noexcept { return from_; }
    /// The charge of the next member, or of several alike members, in proportion to `predicted`.
    /// The last member gets the rest.
    [[nodiscard]] part next(ns predicted, bool is_last) noexcept {
        const auto of = [=](double rate, ns& left) {
            const ns mine =
                is_last ? left
                        : std::min(ns{static_cast<ns::rep>(static_cast<double>(predicted.count()) * rate)}, left);
            left -= mine;
            return mine;
        };
        const ns took = of(took_rate_, took_left_), span = of(span_rate_, span_left_);
        return {took, span, span_left_};
    }

private:
    [[nodiscard]] static double rate(ns total, ns predicted) noexcept {
        return predicted > ns{0} ? static_cast<double>(total.count()) / static_cast<double>(predicted.count()) : 0;
    }

    charge::source from_;
    ns took_left_, span_left_;
    double took_rate_, span_rate_;
};

/// Turns the observation `seen` of a batch into the charges of its members. `meter`: the device's;
/// `usual`: of the batch's client. Calls `give_back(client, time)` for time charged to others
/// earlier that turns out to be shared with them.
template <std::invocable<client_id, ns> F>
[[nodiscard]] charges charge_for(const observation& seen, span_meter& meter, usual_enqueue_time& usual, F give_back) {
    const bool alone = seen.members == 1;
    if (seen.used && !seen.overtaken)
        return {seen, seen.used->time,
                !alone           ? charge::source::shared
                : seen.contended ? charge::source::own
                                 : charge::source::alone};
    const ns at_least = alone && !seen.overtaken ? seen.at_least : ns{0};
    ns took = seen.span ? meter.charge(*seen.span, seen.client, at_least, give_back, seen.width) : ns{0};
    if (seen.overtaken) took = std::max(took, seen.predicted);
    if (seen.doubtful) took = std::min(took, seen.predicted);
    auto from = seen.doubtful || seen.overtaken ? charge::source::doubt
                : !alone                        ? charge::source::shared
                : seen.contended                ? charge::source::own
                                                : charge::source::alone;
    if (alone && usual.is_held_up(seen.enqueued)) {
        took = usual_enqueue_time::without_gap(took, seen.predicted, seen.enqueued);
        from = charge::source::doubt;
    }
    return {seen, took, from};
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
