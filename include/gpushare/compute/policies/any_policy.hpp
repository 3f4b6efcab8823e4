// SPDX-License-Identifier: Apache-2.0
// Any compute policy behind one type (type erasure), so that a limiter's policy is chosen, and
// replaced, at run time.
//
//   // the third argument of a compute_limiter, by type and by value
//   gpushare::any_policy policy{gpushare::weighted_fair{}};
//   limiter.set_policy(gpushare::hard_share{});                  // work continues meanwhile
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include <gpushare/compute/policies/weighted_fair.hpp>
#include <gpushare/compute/policy.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// Holds a policy of any type, weighted_fair by default. Movable; after a move the source can only
/// be assigned to or destroyed. Each call is a virtual call; making one allocates. Not thread-safe.
/// The members are those of compute_policy, and call the held policy.
class any_policy {
public:
    /// Holds a weighted_fair. Throws std::bad_alloc.
    any_policy() : any_policy(weighted_fair{}) {}

    /// Holds `policy`. Throws std::bad_alloc.
    template <class P>
    requires(!std::same_as<P, any_policy> && compute_policy<P>) any_policy(P policy)
        : held_(std::make_unique<model<P>>(std::move(policy))) {}  // NOLINT: any policy is one

    /// A client begins.
    failure add(client_id c, const client_settings& s) { return held_->add(c, s); }
    /// Changes a client's settings.
    failure change(client_id c, const client_settings& s) { return held_->change(c, s); }
    void remove(client_id c) noexcept { held_->remove(c); }  ///< A client ends.
    /// A client has waiting work.
    void wake(client_id c, const queue_head& head, instant now) noexcept { held_->wake(c, head, now); }
    /// A client has no waiting work any more.
    void sleep(client_id c) noexcept { held_->sleep(c); }
    /// A client must not be picked until wake().
    void hold(client_id c) noexcept { held_->hold(c); }
    /// Whether `a` would go first.
    [[nodiscard]] bool before(client_id a, client_id b) const noexcept { return held_->before(a, b); }
    /// The client to serve.
    [[nodiscard]] choice pick(instant now) noexcept { return held_->pick(now); }
    /// Charges a prediction.
    std::uint64_t serve(client_id c, ns cost, instant now) noexcept { return held_->serve(c, cost, now); }
    /// Charges the difference to the true cost.
    void correct(client_id c, ns delta, std::uint64_t lent = 0) noexcept { held_->correct(c, delta, lent); }
    /// Tells how much device time a completed submission took.
    void ended(ns took) noexcept { held_->ended(took); }
    /// Whether the policy enforces the cap.
    [[nodiscard]] bool honours(const client_settings& s) const noexcept { return held_->honours(s); }
    /// Whether the policy uses classes.
    [[nodiscard]] bool has_classes() const noexcept { return held_->has_classes(); }
    /// The name of the client's hard cap.
    [[nodiscard]] std::uint64_t hard_cap_of(client_id c) const noexcept { return held_->hard_cap_of(c); }
    /// Tells a client's standing to another policy.
    void tell_standing(client_id c, client_standing& s, instant now) const noexcept { held_->tell_standing(c, s, now); }
    /// Continues from a standing.
    void resume(client_id c, client_standing& s, instant now) noexcept { held_->resume(c, s, now); }
    /// How many bits of serve()'s result are used.
    [[nodiscard]] unsigned lent_bits() const noexcept { return held_->lent_bits(); }
    /// From now on a client may go several times in a row.
    void take_turns() noexcept { held_->take_turns(); }

private:
    struct interface {
        virtual ~interface() = default;
        virtual failure add(client_id, const client_settings&) = 0;
        virtual failure change(client_id, const client_settings&) = 0;
        virtual void remove(client_id) noexcept = 0;
        virtual void wake(client_id, const queue_head&, instant) noexcept = 0;
        virtual void sleep(client_id) noexcept = 0;
        virtual void hold(client_id) noexcept = 0;
        [[nodiscard]] virtual bool before(client_id, client_id) const noexcept = 0;
        virtual choice pick(instant) noexcept = 0;
        virtual std::uint64_t serve(client_id, ns, instant) noexcept = 0;
        virtual void correct(client_id, ns, std::uint64_t) noexcept = 0;
        virtual void ended(ns) noexcept = 0;
        [[nodiscard]] virtual unsigned lent_bits() const noexcept = 0;
        [[nodiscard]] virtual bool honours(const client_settings&) const noexcept = 0;
        [[nodiscard]] virtual bool has_classes() const noexcept = 0;
        [[nodiscard]] virtual std::uint64_t hard_cap_of(client_id) const noexcept = 0;
        virtual void tell_standing(client_id, client_standing&, instant) const noexcept = 0;
        virtual void resume(client_id, client_standing&, instant) noexcept = 0;
        virtual void take_turns() noexcept = 0;
    };

    template <compute_policy P>
    struct model final : interface {
        explicit model(P p) : policy(std::move(p)) {}
        failure add(client_id c, const client_settings& s) override { return policy.add(c, s); }
        failure change(client_id c, const client_settings& s) override { return policy.change(c, s); }
        void remove(client_id c) noexcept override { policy.remove(c); }
        void wake(client_id c, const queue_head& head, instant now) noexcept override { policy.wake(c, head, now); }
        void sleep(client_id c) noexcept override { policy.sleep(c); }
        void hold(client_id c) noexcept override { detail::hold(policy, c); }
        [[nodiscard]] bool before(client_id a, client_id b) const noexcept override {
            return detail::goes_before(policy, a, b);
        }
        choice pick(instant now) noexcept override { return policy.pick(now); }
        std::uint64_t serve(client_id c, ns cost, instant now) noexcept override {
            return detail::serve(policy, c, cost, now);
        }
        void correct(client_id c, ns delta, std::uint64_t lent) noexcept override {
            detail::correct(policy, c, delta, lent);
        }
        void ended(ns took) noexcept override { detail::ended(policy, took); }
        [[nodiscard]] bool honours(const client_settings& s) const noexcept override {
            return detail::honours(policy, s);
        }
        [[nodiscard]] bool has_classes() const noexcept override { return detail::has_classes(policy); }
        [[nodiscard]] std::uint64_t hard_cap_of(client_id c) const noexcept override {
            return detail::hard_cap_of(policy, c);
        }
        void tell_standing(client_id c, client_standing& s, instant now) const noexcept override {
            detail::tell_standing(policy, c, s, now);
        }
        void resume(client_id c, client_standing& s, instant now) noexcept override {
            detail::resume(policy, c, s, now);
        }
        [[nodiscard]] unsigned lent_bits() const noexcept override { return detail::lent_bits(policy); }
        void take_turns() noexcept override { (void)detail::in_turn(policy, true); }

        P policy;
    };

    std::unique_ptr<interface> held_;
};
static_assert(compute_policy<any_policy>);

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
