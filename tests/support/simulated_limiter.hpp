// SPDX-License-Identifier: Apache-2.0
// A limiter's core in front of a simulated device, in virtual time. Property tests and the
// benchmark drive limiter_core with this shell. A kernel takes exactly the length with which it was
// submitted.
//
//   gpushare::sim::world world;
//   support::simulated_limiter<gpushare::weighted_fair> limiter{world, {0}, {.depth = 2}};
//   const auto c = limiter.add({.weight = 30_pct});
//   limiter.submit(c, {.length = 200us});    world.run_until(t);    limiter.client(c).device_time;
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include <gpushare/backend/sim/sim.hpp>
#include <gpushare/compute/limiter_core.hpp>
#include <gpushare/units.hpp>

namespace support {

struct simulated_work {
    gpushare::ns length{};
    gpushare::queue_head head{};
};

/// The outcome of a submission.
struct simulated_end {
    gpushare::client_id client{};
    gpushare::instant arrival{}, let_in{}, end{};
    gpushare::ns length{};
};

/// For the world's thread. Neither copied nor moved.
template <gpushare::compute_policy Policy>
class simulated_limiter {
public:
    struct client_state {
        std::deque<simulated_work> line{};
        gpushare::sim::stream stream;
        gpushare::ns device_time{};
        bool backlogged = false;  // has another submission as soon as one is over
        gpushare::detail::inplace_function<void(const simulated_end&), 48> on_end{};
    };

    simulated_limiter(gpushare::sim::world& w, gpushare::device_id d, gpushare::limiter_options o, Policy p = {})
        : world_(&w), device_(d), core_(o, std::move(p)) {}
    simulated_limiter(const simulated_limiter&) = delete;
    simulated_limiter& operator=(const simulated_limiter&) = delete;

    gpushare::client_id add(const gpushare::client_settings& s, std::uint32_t tag = 0) {
        const auto c = core_.add(s);
        client_state fresh{.stream = gpushare::sim::stream(*world_, device_, s.level, tag)};
        if (c.index == clients_.size()) {
            clients_.push_back(std::move(fresh));
        } else {
            clients_[c.index] = std::move(fresh);
        }
        return c;
    }

    void submit(gpushare::client_id c, simulated_work w) {
        if (w.head.arrival == gpushare::instant{}) w.head.arrival = world_->now();
        clients_[c.index].line.push_back(w);
        core_.arrive(c, world_->now(), {.head = w.head});
        pump();
    }

    /// Withdraws all waiting submissions of `c`.
    void withdraw(gpushare::client_id c) {
        for (auto& line = clients_[c.index].line; !line.empty();) {
            line.pop_front();
            core_.withdraw(c, world_->now(), [&](gpushare::client_id) noexcept {
                return gpushare::submission_facts{.head = line.front().head};
            });
        }
    }

    [[nodiscard]] client_state& client(gpushare::client_id c) noexcept { return clients_[c.index]; }
    [[nodiscard]] gpushare::limiter_core<Policy>& core() noexcept { return core_; }
    [[nodiscard]] std::uint64_t let_in() const noexcept { return let_in_; }

    /// Admits everything that can go.
    void pump() {
        const auto now = world_->now();
        const auto behind = [this](gpushare::client_id c) noexcept {
            return gpushare::submission_facts{.head = clients_[c.index].line[1].head};
        };
        while (const auto next = core_.next(now, behind)) {
            const auto& g = *next;
            auto& client = clients_[g.client.index];
            const auto w = client.line.front();
            client.line.pop_front();
            client.stream.enqueue(w.length);
            const auto slot = keep({g, {g.client, w.head.arrival, now, {}, w.length}});
            client.stream.call([this, slot] { end(slot); });
            ++let_in_;
        }
        const auto resume = core_.resume_at();
        if (resume == gpushare::never || (alarm_ > now && alarm_ <= resume)) return;
        alarm_ = resume;
        world_->at(resume, [this] { pump(); });
    }

private:
    struct in_flight {
        gpushare::admission what{};
        simulated_end how{};
    };

    std::uint32_t keep(const in_flight& f) {
        if (free_.empty()) {
            flights_.push_back(f);
            return static_cast<std::uint32_t>(flights_.size() - 1);
        }
        const auto slot = free_.back();
        free_.pop_back();
        flights_[slot] = f;
        return slot;
    }

    void end(std::uint32_t slot) {
        auto f = flights_[slot];
        free_.push_back(slot);
        f.how.end = world_->now();
        core_.complete(f.what, f.how.length);
        auto& client = clients_[f.what.client.index];
        client.device_time += f.how.length;
        if (client.on_end) client.on_end(f.how);
        pump();
    }

    gpushare::sim::world* world_;
    gpushare::device_id device_;
    std::deque<client_state> clients_;
    std::vector<in_flight> flights_;
    std::vector<std::uint32_t> free_;
    gpushare::instant alarm_{};
    std::uint64_t let_in_ = 0;
    gpushare::limiter_core<Policy> core_;  // big
};

}  // namespace support
