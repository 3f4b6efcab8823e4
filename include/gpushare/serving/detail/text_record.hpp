// SPDX-License-Identifier: Apache-2.0
// The state that an iteration_batch keeps of a text, of a tenant, and of a tenant's texts on one
// level (a flow). Texts that have pages run; the other texts wait in their flow.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/serving/detail/shared_pages.hpp>
#include <gpushare/serving/iteration_options.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

struct text_record;
struct text_flow;

/// The order in which the texts of a flow begin.
struct begins_before {
    bool operator()(const text_record* a, const text_record* b) const noexcept;
};
using waiting_texts = std::set<text_record*, begins_before>;

struct text_tenant {
    std::uint32_t tag = 0;
    std::uint64_t root = 0;  // the root of the tenant's prefixes
    std::uint32_t weight = 1;
    std::uint32_t pages = 0;  // the most pages that the tenant's texts may use
    std::uint32_t most_waiting = 0;
    std::uint32_t held = 0;  // pages that the tenant's texts use; a shared page counts once
    std::size_t texts = 0, waiting = 0;
    std::uint64_t tokens = 0;  // tokens computed for the tenant
};

struct text_record {
    text_id id = 0;
    text_flow* flow = nullptr;
    instant deadline = never;
    std::uint32_t prompt = 0, most = 0;  // tokens of the prompt, and of the whole text
    text_token last_token = 0;
    bool has_last_token = false;
    std::vector<text_token> tokens{};
    // Tokens whose keys and values are in `pages` or in `parked`.
    std::uint32_t computed = 0;
    std::uint32_t charged = 0;                     // tokens that were charged to the tenant
    std::uint32_t planned = 0;                     // tokens in this step
    std::vector<std::uint32_t> pages{}, parked{};  // pages of the device; pages of the host
    // The number of pages at the beginning that are published prefixes.
    std::uint32_t chained = 0;
    std::uint64_t chain = 0;  // the serial of the last of these pages
    std::uint32_t yields = 0;
    bool running = false;
    errc ends = errc::none;  // the code to end with, once the step is over
    // the text's node in the flow's set, kept here while the text runs
    waiting_texts::node_type place{};

    [[nodiscard]] std::uint32_t known() const noexcept { return static_cast<std::uint32_t>(tokens.size()); }
    /// Known tokens that are neither computed nor in this step.
    [[nodiscard]] std::uint32_t missing() const noexcept { return known() - computed - planned; }
};

/// A tenant's texts on one level. `counter` is the tokens that they were given, divided by the
/// tenant's weight.
struct text_flow {
    text_tenant* tenant = nullptr;
    int level = 0;
    std::uint64_t counter = 0;
    std::size_t texts = 0;  // texts that haven't ended
    waiting_texts waiting{};
    // The state of the step that is being planned:
    std::vector<text_record*> turn{};  // the flow's running texts; texts that decode come first
    std::size_t next = 0;              // the index of the next text in `turn`
    bool may_begin = true;             // whether the next waiting text may begin
    // whether other flows held this flow back, so that it could have used more tokens
    bool held_back = false;
};

inline bool begins_before::operator()(const text_record* a, const text_record* b) const noexcept {
    return a->deadline != b->deadline ? a->deadline < b->deadline : a->id < b->id;
}
/// Whether `a` keeps its pages if only one of the two can.
inline bool goes_first(const text_record* a, const text_record* b) noexcept {
    return a->flow->level != b->flow->level ? a->flow->level > b->flow->level : a->id < b->id;
}

/// Virtual token counters: on each level, tenants are given tokens in proportion to their weights.
inline constexpr std::uint64_t counter_of_token = std::uint64_t{1} << 20;
inline constexpr std::uint32_t most_weight = 1024;

/// Makes room for `n` elements in all, and keeps adding single elements cheap.
template <class T>
void make_room(std::vector<T>& v, std::size_t n) {
    if (n > v.capacity()) v.reserve(std::max(n, 2 * v.capacity()));
}

/// A list that a step shows. The engine reads the list until the step is over. So if more room is
/// needed, it is made outside the list, and the next step uses it.
template <class T>
class step_list {
public:
    /// Makes room for `n` elements, from the next step on.
    void make_room(std::size_t n) {
        if (n > std::max(now_.capacity(), more_.capacity())) more_.reserve(std::max(n, 2 * now_.capacity()));
    }
    /// Begins a step with an empty list.
    void clear() noexcept {
        now_.clear();
        if (more_.capacity() > now_.capacity()) now_.swap(more_);
    }
    /// Adds an element. There must be room for it.
    void add(const T& one) noexcept { now_.push_back(one); }
    /// The first `n` elements. There must be room for them. Elements that weren't added are T{}.
    [[nodiscard]] std::span<T> first(std::size_t n) noexcept {
        if (n > now_.size()) now_.resize(n);
        return std::span(now_).first(n);
    }
    [[nodiscard]] std::span<const T> all() const noexcept { return now_; }
    [[nodiscard]] bool empty() const noexcept { return now_.empty(); }

private:
    std::vector<T> now_, more_;
};

inline void charge_tokens(text_flow& f, std::uint32_t n) noexcept {
    f.counter += counter_of_token * n / f.tenant->weight;
    f.tenant->tokens += n;
}

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
