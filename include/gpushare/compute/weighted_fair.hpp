// SPDX-License-Identifier: Apache-2.0
// Weighted fair sharing of device time, under strict priority between levels: of the waiting clients of the highest
// level, the one that is furthest behind its share goes next.
//
//   gpushare::weighted_fair policy;
//   policy.add(chat, {.weight = 70_pct});  policy.add(batch, {.weight = 30_pct});
//
// Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): a client's tag grows by cost / weight, the smallest tag
// goes next, and a level's virtual time is the tag that was served last. A client that wakes up starts no earlier than
// virtual time, so nobody is owed the time in which it wanted nothing. A pick is O(1), the rest O(log clients).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare::inline GPUSHARE_ABI {

/// A value; not thread-safe. Memory grows with the largest index in use, in `add` alone. A template of nothing: whoever
/// includes it and makes no limiter doesn't compile it.
template <class = void>
class basic_weighted_fair {
public:
    static constexpr bool timeless = true;

    failure add(client_id c, const client_settings& s) {
        if (clients_.size() <= c.index) clients_.resize(c.index + std::size_t{1});
        waiting_.reserve(clients_.capacity());
        open_level(s.level);
        clients_[c.index] = {.id = c, .settings = s, .tag = virtual_time(s.level), .place = not_waiting};
        return {};
    }

    failure change(client_id c, const client_settings& s) {
        open_level(s.level);
        auto& client = clients_[c.index];
        const bool waits = client.place != not_waiting;
        sleep(c);
        // The lead over the old level's virtual time, or the lag behind it, is kept as device time: or else a client
        // raised from 0.1 % would first sit out a thousand times its last kernel.
        const auto lead = static_cast<double>(client.tag - virtual_time(client.settings.level)) *
                          static_cast<double>(weight_of(client.settings)) / static_cast<double>(weight_of(s));
        constexpr auto most = static_cast<double>(rebase_at / 2);
        client.tag = virtual_time(s.level) + static_cast<std::int64_t>(std::clamp(lead, -most, most));
        client.settings = s;
        if (waits) insert(c.index);
        return {};
    }

    void remove(client_id c) noexcept { sleep(c); }

    void wake(client_id c, const line_head&, instant) noexcept {
        auto& client = clients_[c.index];
        if (client.place != not_waiting) return;
        client.tag = std::max(client.tag, virtual_time(client.settings.level));
        insert(c.index);
    }

    void sleep(client_id c) noexcept {
        const auto place = clients_[c.index].place;
        if (place == not_waiting) return;
        const auto last = waiting_.size() - 1;
        swap_places(place, last);
        waiting_.pop_back();
        clients_[c.index].place = not_waiting;
        if (place < last) settle(place);
    }

    [[nodiscard]] choice pick(instant) const noexcept {
        if (waiting_.empty()) return {};
        return clients_[waiting_.front()].id;
    }

    void serve(client_id c, ns cost, instant) noexcept {
        auto& time = virtual_time(clients_[c.index].settings.level);
        time = std::max(time, clients_[c.index].tag);
        correct(c, cost);
    }

    void correct(client_id c, ns delta) noexcept {
        auto& client = clients_[c.index];
        // Two weeks at once is beyond any kernel; without the bound a wild measurement could overflow the tag.
        const auto cost = std::clamp<std::int64_t>(delta.count(), -(std::int64_t{1} << 50), std::int64_t{1} << 50);
        client.tag = std::max(client.tag + cost * 1000 / weight_of(client.settings), -rebase_at);
        if (client.tag > rebase_at) rebase(client.settings.level);
        if (client.place != not_waiting) settle(client.place);
    }

private:
    static constexpr std::size_t not_waiting = static_cast<std::size_t>(-1);
    static constexpr std::int64_t rebase_at = std::int64_t{1} << 61;

    struct client_state {
        client_id id;
        client_settings settings;
        std::int64_t tag = 0;  // ns of device time over weight
        std::size_t place = not_waiting;
    };
    struct level_state {
        priority level;
        std::int64_t time = 0;
    };

    [[nodiscard]] static std::int64_t weight_of(const client_settings& s) noexcept {
        return std::max<std::int64_t>(s.weight.permille(), 1);
    }

    // Null for a level that no client ever had. They are few.
    [[nodiscard]] level_state* find_level(priority p) noexcept {
        for (auto& l : levels_)
            if (l.level == p) return &l;
        return nullptr;
    }

    void open_level(priority p) {
        if (find_level(p) == nullptr) levels_.push_back({p, 0});
    }

    [[nodiscard]] std::int64_t& virtual_time(priority p) noexcept { return find_level(p)->time; }  // add() opened it

    // A tag reaches this after decades, or after months of one client alone at 0.1 %: then only differences matter.
    void rebase(priority p) noexcept {
        const auto base = std::exchange(virtual_time(p), 0);
        for (auto& c : clients_)
            if (c.settings.level == p) c.tag = std::clamp(c.tag - base, -rebase_at / 2, rebase_at / 2);
    }

    // waiting_ is a binary heap of client indices, first to go on top; clients know their place in it.
    [[nodiscard]] bool goes_before(std::uint32_t a, std::uint32_t b) const noexcept {
        const auto& x = clients_[a];
        const auto& y = clients_[b];
        if (x.settings.level != y.settings.level) return x.settings.level > y.settings.level;
        return x.tag != y.tag ? x.tag < y.tag : a < b;
    }

    void insert(std::uint32_t index) noexcept {
        clients_[index].place = waiting_.size();
        waiting_.push_back(index);  // within the capacity that add() reserved
        settle(waiting_.size() - 1);
    }

    void swap_places(std::size_t a, std::size_t b) noexcept {
        std::swap(waiting_[a], waiting_[b]);
        clients_[waiting_[a]].place = a;
        clients_[waiting_[b]].place = b;
    }

    void settle(std::size_t at) noexcept {
        for (; at > 0 && goes_before(waiting_[at], waiting_[(at - 1) / 2]); at = (at - 1) / 2)
            swap_places(at, (at - 1) / 2);
        for (;;) {
            auto first = at;
            for (const auto child : {2 * at + 1, 2 * at + 2})
                if (child < waiting_.size() && goes_before(waiting_[child], waiting_[first])) first = child;
            if (first == at) return;
            swap_places(at, first);
            at = first;
        }
    }

    std::vector<client_state> clients_;
    std::vector<level_state> levels_;
    std::vector<std::uint32_t> waiting_;
};
using weighted_fair = basic_weighted_fair<>;
static_assert(compute_policy<weighted_fair>);

}  // namespace gpushare::inline GPUSHARE_ABI
