// SPDX-License-Identifier: Apache-2.0
// A bucket_plan cuts gradients into buckets: it says which gradients share an all-reduce, and in
// which order the all-reduces run. A plan is a plain value.
//
//   const gpushare::bucket_plan plan(sizes, order, 4_MiB);  // the backward pass's `order`
//   for (std::uint32_t g : plan.gradients(0)) ...           // the first bucket's gradients
//
// A bucket_tuner finds the best size of buckets and number of all-reduces in flight while the
// training runs. The caller reports how long each step of the training took. The choice is final
// after at most 50 steps. A tuner is a plain value: times are arguments.
//
//   gpushare::bucket_tuner tuner;  // begins with buckets of 1 MiB
//   for (int step = 0; step < 50; ++step) {
//       const auto use = tuner.choice();      ...  // a step with it
//       tuner.step_took(agreed_time);
//   }
//   std::ofstream("buckets.txt") << tuner.save();  // for bucket_tuner::load
//
// All ranks must report the same times to make the same choice; agree() makes the times equal. If
// the transport combines in the order of ranks, the choice doesn't change a bit of a result.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/lent_arrays.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Cuts an order of gradients into buckets. A gradient that would make a bucket larger than the
/// limit begins the next bucket. A gradient larger than the limit has a bucket of its own. The same
/// arguments give the same plan on all ranks.
class bucket_plan {
public:
    bucket_plan() = default;  ///< No gradients.
    /// sizes[g] is in bytes. Throws operation_error (errc::invalid_specification) unless `order`
    /// has each gradient once.
    bucket_plan(std::span<const std::size_t> sizes, std::span<const std::uint32_t> order, bytes limit)
        : order_(order.begin(), order.end()), bucket_of_(sizes.size(), none) {
        bool good = order.size() == sizes.size();
        std::uint64_t filled = 0;
        for (std::uint32_t i = 0; good && i < order_.size(); ++i) {
            const std::uint32_t g = order_[i];
            good = g < sizes.size() && bucket_of_[g] == none;
            if (!good) break;
            if (i == 0 || sizes[g] > limit.count() - filled || filled > limit.count()) {
                first_.push_back(i);
                filled = 0;
            }
            filled += sizes[g];
            bucket_of_[g] = size() - 1;
        }
        together_ = order_;
        for (std::uint32_t b = 0; good && b < size(); ++b) {
            const std::span<std::uint32_t> some = std::span(together_).subspan(first_[b], gradients(b).size());
            std::sort(some.begin(), some.end());
        }
        if (!good)
            raise({errc::invalid_specification, order.size(), 0, sizes.size(), reason::no_order}, {},
                  "an order of gradients");
    }
    /// The order in which a backward pass should finish gradients: the last registered one first.
    [[nodiscard]] static std::vector<std::uint32_t> backward_order(std::size_t gradients) {
        std::vector<std::uint32_t> order(gradients);
        std::iota(order.rbegin(), order.rend(), 0U);
        return order;
    }

    /// The number of buckets.
    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(first_.size()); }
    /// The order of all gradients.
    [[nodiscard]] std::span<const std::uint32_t> order() const noexcept { return order_; }
    /// The gradients of bucket `b` in the order of registration, since forward reads are fastest.
    [[nodiscard]] std::span<const std::uint32_t> gradients(std::uint32_t b) const noexcept {
        const std::size_t behind = b + 1 < first_.size() ? first_[b + 1] : order_.size();
        return std::span(together_).subspan(first_[b], behind - first_[b]);
    }
    /// The bucket that has gradient `g`.
    [[nodiscard]] std::uint32_t bucket_of(std::uint32_t g) const noexcept { return bucket_of_[g]; }

    friend bool operator==(const bucket_plan&, const bucket_plan&) = default;

private:
    static constexpr std::uint32_t none = ~0U;

    std::vector<std::uint32_t> order_;
    std::vector<std::uint32_t> together_;  // each bucket's gradients, sorted by number
    // the first gradient of each bucket, in order_ and together_
    std::vector<std::uint32_t> first_;
    std::vector<std::uint32_t> bucket_of_;
};

/// How gradients are fused.
struct bucket_choice {
    /// The most bytes of a bucket. The default is small, so that little is left to send when the
    /// last gradient is ready, and so that a bucket stays in the caches while it is combined.
    bytes bucket{1 << 20};
    std::uint32_t in_flight = 1;  ///< all-reduces that run at once, each on a channel
    friend constexpr bool operator==(const bucket_choice&, const bucket_choice&) = default;
};

/// Tries every size twice, then the three best sizes three times, then other numbers in flight. At
/// the end the tuner compares the winner with the default, in turn. The winner is taken only if it
/// wins at least four of five pairs and its median is at least half a percent shorter.
class bucket_tuner {
public:
    static constexpr std::uint32_t longest = 50;  ///< the most steps until the choice is final

    /// `most_in_flight` is the number of channels. No choice has more all-reduces in flight, not
    /// even the default.
    explicit bucket_tuner(bucket_choice by_default = {}, std::uint32_t most_in_flight = 1)
        : default_{by_default.bucket, std::clamp(by_default.in_flight, 1U, std::max(most_in_flight, 1U))},
          best_(default_),
          most_in_flight_(most_in_flight) {
        add(default_);
        for (std::uint64_t size = std::uint64_t{128} << 10; size <= std::uint64_t{64} << 20; size *= 2)
            add({bytes{size}, default_.in_flight});
        for (int round = 0; round < 2; ++round)
            for (std::size_t c = 0; c < tried_.size(); ++c) plan_.push_back(c);
    }

    /// The choice for the next step.
    [[nodiscard]] bucket_choice choice() const noexcept { return settled() ? best_ : tried_[plan_[at_]].choice; }
    /// Whether the choice is final.
    [[nodiscard]] bool settled() const noexcept { return phase_ == phase::settled; }
    /// The number of steps reported so far.
    [[nodiscard]] std::uint32_t steps() const noexcept { return steps_; }

    /// Reports how long the step with choice() took. All ranks report the same time.
    void step_took(ns time) {
        if (settled()) return;
        ++steps_;
        tried_[plan_[at_]].times.push_back(time);
        if (++at_ == plan_.size()) next_phase();
    }

    /// The choice as text, for load() in the next run.
    [[nodiscard]] std::string save() const {
        return "bucket=" + std::to_string(best_.bucket.count()) + " in_flight=" + std::to_string(best_.in_flight) +
               '\n';
    }
    /// A settled tuner with the saved choice, with at most `most_in_flight` all-reduces in flight.
    /// Throws operation_error (errc::invalid_specification) for text that save() didn't write.
    [[nodiscard]] static bucket_tuner load(std::string_view text, std::uint32_t most_in_flight) {
        bucket_choice c;
        std::uint64_t size = 0;
        const bool good = number(text, "bucket=", ' ', size) && number(text, "in_flight=", '\n', c.in_flight) &&
                          text.empty() && size != 0 && c.in_flight != 0;
        if (!good)
            raise({.code = errc::invalid_specification, .because = reason::bad_choice}, {},
                  "loading a choice of buckets");
        c.bucket = bytes{size};
        c.in_flight = std::min(c.in_flight, std::max(most_in_flight, 1U));
        bucket_tuner t(c, most_in_flight);
        t.phase_ = phase::settled;
        return t;
    }

private:
    enum class phase : std::uint8_t {
        sizes,            ///< every size
        best_sizes,       ///< the best three again
        flights,          ///< other numbers in flight
        against_default,  ///< the best choice so far, alternating with the default
        settled,          ///< the choice is final
    };
    struct trial {
        bucket_choice choice;
        std::vector<ns> times{};
        /// The shortest time could be luck, so the median decides.
        [[nodiscard]] ns median() const {
            std::vector<ns> sorted = times;
            std::sort(sorted.begin(), sorted.end());
            return sorted.empty() ? ns::max() : sorted[(sorted.size() - 1) / 2];
        }
    };

    std::size_t add(const bucket_choice& c) {
        for (std::size_t i = 0; i < tried_.size(); ++i)
            if (tried_[i].choice == c) return i;
        tried_.push_back({c});
        return tried_.size() - 1;
    }
    [[nodiscard]] std::vector<std::size_t> by_time() const {
        std::vector<std::size_t> all(tried_.size());
        for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
        std::stable_sort(all.begin(), all.end(),
                         [&](std::size_t a, std::size_t b) { return tried_[a].median() < tried_[b].median(); });
        return all;
    }
    void repeat(std::span<const std::size_t> which, int rounds) {
        for (int round = 0; round < rounds; ++round) plan_.insert(plan_.end(), which.begin(), which.end());
    }
    void next_phase() {
        plan_.clear();
        at_ = 0;
        std::vector<std::size_t> order = by_time();
        if (phase_ == phase::sizes) {  // after at most 22 steps
            phase_ = phase::best_sizes;
            order.resize(std::min<std::size_t>(order.size(), 3));
            return repeat(order, 3);
        }
        if (phase_ == phase::best_sizes) {  // after at most 31 steps
            phase_ = phase::flights;
            std::vector<std::size_t> more;
            for (std::uint32_t n = 1; n <= std::min(most_in_flight_, 4U); n *= 2)
                if (n != tried_[order.front()].choice.in_flight)
                    more.push_back(add({tried_[order.front()].choice.bucket, n}));
            repeat(more, 3);
            if (!plan_.empty()) return;
            order = by_time();
        }
        if (phase_ == phase::flights) {  // after at most 40 steps
            phase_ = phase::against_default;
            if (order.front() != 0) {
                for (const std::size_t c : {std::size_t{0}, order.front()}) tried_[c].times.clear();
                const std::array<std::size_t, 2> both{0, order.front()};
                challenger_ = order.front();
                return repeat(both, 5);
            }
        }
        phase_ = phase::settled;
        if (challenger_ != 0 && beats_default()) best_ = tried_[challenger_].choice;
    }
    /// The challenger must win at least four of five consecutive pairs, so that a machine that
    /// slows down doesn't decide the comparison. The challenger's median must also be at least half
    /// a percent shorter.
    [[nodiscard]] bool beats_default() const {
        const auto &ours = tried_[challenger_].times, &theirs = tried_[0].times;
        std::size_t won = 0;
        for (std::size_t i = 0; i < ours.size(); ++i) won += ours[i] < theirs[i];
        const ns gain = tried_[0].median() - tried_[challenger_].median();
        return won >= 4 && gain * 200 >= tried_[0].median();
    }
    template <class N>
    static bool number(std::string_view& text, std::string_view name, char end, N& n) noexcept {
        if (!text.starts_with(name)) return false;
        text.remove_prefix(name.size());
        const auto [stop, code] = std::from_chars(text.data(), text.data() + text.size(), n);
        text.remove_prefix(static_cast<std::size_t>(stop - text.data()));
        if (code != std::errc{} || text.empty() || text.front() != end) return false;
        text.remove_prefix(1);
        return true;
    }

    bucket_choice default_, best_;
    std::uint32_t most_in_flight_;
    phase phase_ = phase::sizes;
    std::uint32_t steps_ = 0;
    std::vector<trial> tried_;       // the default first
    std::vector<std::size_t> plan_;  // what this phase tries, in order
    std::size_t at_ = 0;
    std::size_t challenger_ = 0;
};

/// `time` becomes the longest of all ranks' times: the step's time for the whole group.
template <host_transport T>
[[nodiscard]] collective_fault agree(T& net, ns& time, instant deadline = never) {
    // not on the stack: after a fault the transport may still touch the number
    std::vector<std::int64_t> count{time.count()};
    detail::lent_arrays memory(count);
    const auto f = memory.to(
        [&] { return net.all_reduce(std::span<const std::int64_t>(count), std::span(count), maximum{}, deadline); });
    if (!f) time = ns{count[0]};
    return f;
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
