// SPDX-License-Identifier: Apache-2.0
// The decisions of a compute limiter, as a plain value: whose submission is let in next, what it is charged before its
// true cost is known, and how much may be in flight. Shells (compute_limiter, a simulator, a test) bring the time.
//
//   gpushare::limiter_core core{{.depth = 4}};
//   auto chat = core.add({.weight = 70_pct});
//   core.arrive(chat, now);                          // a submission waits
//   if (auto g = core.next(now)) { ...enqueue...; core.complete(*g, measured_device_time); }
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/weighted_fair.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// One configuration for all clients.
struct limiter_options {
    std::uint32_t depth = 3;            // submissions in flight of one level and those above: more hides the latency of
                                        // enqueuing, fewer shorten a newcomer's wait
    ns first_guess = ns{100'000};       // cost of a client's first submission, before anything is known about it
    std::uint32_t queue_limit = 65536;  // submissions of one client that may wait
};

/// A submission that was let in.
struct grant {
    client_id client{};
    priority level{};
    ns predicted{};
    std::uint32_t policy = 0;  // which of the policies so far let it in
};

/// A client's account. device_time is charged time: see compute_limiter for how it is measured.
struct client_usage {
    ns device_time{};
    ns longest{};                 // the longest submission seen
    std::uint64_t completed = 0;  // submissions that ran, failed ones included
    std::uint64_t failed = 0;
    std::uint32_t waiting = 0, in_flight = 0;
};

/// A value; not thread-safe. Allocates in `add` and `change` alone.
template <compute_policy Policy = weighted_fair>
class limiter_core {
public:
    explicit limiter_core(limiter_options options = {}, Policy policy = {})
        : options_(options), policy_(std::move(policy)) {
        options_.depth = std::max(options_.depth, 1U);
        options_.queue_limit = std::max(options_.queue_limit, 1U);
    }

    /// Throws operation_error where the policy refuses, and std::bad_alloc: then nothing has changed.
    [[nodiscard]] client_id add(const client_settings& s) {
        const auto unused = std::ranges::find(clients_, false, &client_state::present);
        const auto index = static_cast<std::uint32_t>(unused - clients_.begin());
        if (unused == clients_.end()) clients_.emplace_back();
        auto& client = clients_[index];
        const client_id id{index, client.generation + 1};
        open_level(s.level);
        if (const auto why = policy_.add(id, s); why.code != errc::none) raise(why, {}, "limiter");
        client = {.settings = s, .generation = id.generation, .present = true, .predicted = guess(s)};
        return id;
    }

    /// In force for what is let in from now on; what is in flight stays charged as it was.
    /// Where the policy refuses, nothing has changed.
    errc change(client_id c, const client_settings& s) {
        open_level(s.level);
        if (const auto why = policy_.change(c, s); why.code != errc::none) return why.code;
        clients_[c.index].settings = s;
        return errc::none;
    }

    /// From now on `p` decides, among the same clients; it must have none yet. It begins from nothing: what is in flight
    /// was charged by the old policy, which is in `p` afterwards. If `p` refuses a client, nothing has changed.
    errc set_policy(Policy& p, instant now) {
        for (std::uint32_t i = 0; i < clients_.size(); ++i) {
            if (!clients_[i].present) continue;
            const auto why = p.add({i, clients_[i].generation}, clients_[i].settings);
            if (why.code != errc::none) return why.code;
        }
        std::swap(policy_, p);
        ++policies_;
        for (std::uint32_t i = 0; i < clients_.size(); ++i)
            if (clients_[i].usage.waiting != 0) tell({i, clients_[i].generation}, now);
        return errc::none;
    }

    /// The client must have nothing waiting and nothing in flight.
    void remove(client_id c) noexcept {
        policy_.remove(c);
        clients_[c.index].present = false;
    }

    [[nodiscard]] bool contains(client_id c) const noexcept {
        return c.index < clients_.size() && clients_[c.index].present && clients_[c.index].generation == c.generation;
    }

    /// What is behind the head of a line, where nobody says more of it.
    struct nothing_known {
        instant now{};
        [[nodiscard]] line_head operator()(client_id) const noexcept { return {.arrival = now}; }
    };

    /// One more submission of `c` waits. `head` says what is known of it.
    void arrive(client_id c, instant now, const line_head& head) noexcept {
        auto& client = clients_[c.index];
        if (client.usage.waiting++ != 0) return;
        client.head = head;
        tell(c, now);
    }
    void arrive(client_id c, instant now) noexcept { arrive(c, now, {.arrival = now}); }

    /// One submission of `c` no longer waits and was not let in. `head_of(c)` says what is first now, if anything is.
    template <std::invocable<client_id> F>
    void withdraw(client_id c, instant now, F head_of) noexcept {
        auto& client = clients_[c.index];
        if (--client.usage.waiting == 0) {
            policy_.sleep(c);
        } else {
            client.head = head_of(c);
            tell(c, now);
        }
    }
    void withdraw(client_id c, instant now = {}) noexcept { withdraw(c, now, nothing_known{now}); }

    /// Lets in the next submission, if one waits and there is room: work of a level is let in while fewer than `depth`
    /// submissions of that level and above are in flight, so lower levels never fill the room of a higher one.
    /// `head_of(c)` says what is first in the client's line after that, if anything is.
    template <std::invocable<client_id> F>
    [[nodiscard]] std::optional<grant> next(instant now, F head_of) noexcept {
        resume_at_ = never;
        const auto c = policy_.pick(now);
        if (!c) {
            resume_at_ = std::max(c.ask_again(), saturating_add(now, ns{1}));  // time must pass
            return std::nullopt;
        }
        auto& client = clients_[c->index];
        std::uint32_t in_flight = 0;
        for (const auto& l : levels_)
            if (l.level >= client.settings.level) in_flight += l.in_flight;
        if (in_flight >= options_.depth) return std::nullopt;
        const auto predicted = client.head.cost > ns{0} ? client.head.cost : client.predicted;
        const grant g{.client = *c, .level = client.settings.level, .predicted = predicted, .policy = policies_};
        policy_.serve(*c, g.predicted, now);
        ++level(g.level).in_flight;
        ++client.usage.in_flight;
        withdraw(*c, now, head_of);
        return g;
    }
    [[nodiscard]] std::optional<grant> next(instant now) noexcept { return next(now, nothing_known{now}); }

    /// After next() let nothing in: when to call it again though nothing else happened, because a policy holds work back
    /// until then; `never`: no need to.
    [[nodiscard]] instant resume_at() const noexcept { return resume_at_; }

    /// The submission is over and took `device_time`.
    void complete(const grant& g, ns device_time, bool failed = false) noexcept {
        auto& client = leave(g);
        correct(g, device_time - g.predicted);
        // Smoothed over the last eight or so: mixed kernels predict their mean, and each error is corrected above.
        client.predicted += (device_time - client.predicted) / 8;
        client.usage.device_time += device_time;
        client.usage.longest = std::max(client.usage.longest, device_time);
        ++client.usage.completed;
        if (failed) ++client.usage.failed;
    }

    /// The submission was let in but nothing was enqueued: it costs nothing.
    void cancel(const grant& g) noexcept {
        leave(g);
        correct(g, -g.predicted);
    }

    /// The longest that a submission of the highest level waits for work of the levels below: all of it that may be in
    /// flight at once (each level fills its own room), each as long as the longest kernel that any client declared or
    /// showed. With one level in use: what a submission waits for those of its own level that are in flight.
    [[nodiscard]] ns wait_bound() const noexcept {
        ns longest{};
        for (const auto& c : clients_)
            if (c.present) longest = std::max({longest, c.settings.longest, c.usage.longest});
        const auto used = std::ranges::count_if(levels_, [this](const level_state& l) {
            return l.in_flight != 0 || std::ranges::any_of(clients_, [&](const client_state& c) {
                       return c.present && c.settings.level == l.level;
                   });
        });
        const ns::rep submissions = options_.depth * std::max<ns::rep>(used - 1, 1);
        return longest > ns::max() / submissions ? ns::max() : longest * submissions;
    }

    /// Indices of clients so far: `add` gives one of these, or this one.
    [[nodiscard]] std::size_t num_indices() const noexcept { return clients_.size(); }
    [[nodiscard]] const client_usage& usage(client_id c) const noexcept { return clients_[c.index].usage; }
    [[nodiscard]] const client_settings& settings(client_id c) const noexcept { return clients_[c.index].settings; }
    [[nodiscard]] const limiter_options& options() const noexcept { return options_; }

private:
    struct client_state {
        client_settings settings{};
        std::uint32_t generation = 0;
        bool present = false;
        ns predicted{};
        line_head head{};  // while something waits
        client_usage usage{};
    };
    struct level_state {
        priority level;
        std::uint32_t in_flight = 0;
    };

    [[nodiscard]] ns guess(const client_settings& s) const noexcept {
        return s.longest > ns{0} ? s.longest : options_.first_guess;
    }

    void open_level(priority p) {
        if (std::ranges::find(levels_, p, &level_state::level) == levels_.end()) levels_.push_back({p, 0});
    }

    [[nodiscard]] level_state& level(priority p) noexcept {
        return *std::ranges::find(levels_, p, &level_state::level);
    }

    // Tells the policy what is first in a client's line.
    void tell(client_id c, instant now) noexcept {
        const auto& client = clients_[c.index];
        line_head head = client.head;
        if (head.cost <= ns{0}) head.cost = client.predicted;
        head.remaining = std::max(head.remaining, head.cost);
        if (client.settings.slo > ns{0})
            head.deadline = std::min(head.deadline, saturating_add(head.arrival, client.settings.slo));
        policy_.wake(c, head, now);
    }

    // What an earlier policy let in is none of this one's concern.
    void correct(const grant& g, ns delta) noexcept {
        if (g.policy == policies_) policy_.correct(g.client, delta);
    }

    client_state& leave(const grant& g) noexcept {
        --level(g.level).in_flight;
        auto& client = clients_[g.client.index];
        --client.usage.in_flight;
        return client;
    }

    limiter_options options_;
    Policy policy_;
    std::vector<client_state> clients_;
    std::vector<level_state> levels_;
    std::uint32_t policies_ = 0;  // how often another one took over
    instant resume_at_ = never;
};

}  // namespace gpushare::inline GPUSHARE_ABI
