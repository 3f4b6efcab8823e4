// SPDX-License-Identifier: Apache-2.0
#include "happens_before.hpp"

#include <algorithm>
#include <utility>

namespace ptx {

view::block& view::of(std::uint32_t number) {
    const auto at = std::ranges::lower_bound(blocks, number, {}, &block::number);
    if (at != blocks.end() && at->number == number) return *at;
    return *blocks.insert(at, block{.number = number});
}

void view::include(const view& other) {
    finished = std::max(finished, other.finished);
    values.include(other.values);
    for (const block& theirs : other.blocks) {
        block& mine = of(theirs.number);
        mine.floor = std::max(mine.floor, theirs.floor);
        for (const auto& [id, clock] : theirs.threads) {
            const auto at = std::ranges::lower_bound(mine.threads, id, {}, &std::pair<agent, std::uint32_t>::first);
            if (at != mine.threads.end() && at->first == id)
                at->second = std::max(at->second, clock);
            else
                mine.threads.insert(at, {id, clock});
        }
        std::erase_if(mine.threads, [&](const auto& t) { return t.second <= mine.floor; });
    }
}

bool view::covers(agent a, std::uint32_t clock) const {
    const auto b = std::ranges::lower_bound(blocks, block_of(a), {}, &block::number);
    if (b == blocks.end() || b->number != block_of(a)) return false;
    if (clock <= b->floor) return true;
    const auto t = std::ranges::lower_bound(b->threads, a, {}, &std::pair<agent, std::uint32_t>::first);
    return t != b->threads.end() && t->first == a && clock <= t->second;
}

view_pointer join(const view_pointer& a, const view_pointer& b) {
    if (a == b || b == nullptr) return a;
    if (a == nullptr) return b;
    auto both = std::make_shared<view>(*a);
    both->include(*b);
    return both;
}

bool includes(scope reach, std::uint32_t block, int device, std::uint32_t other_block, int other_device) {
    switch (reach) {
        case scope::thread: return false;
        case scope::cta: return block == other_block;
        case scope::gpu: return device == other_device;
        case scope::sys: return true;
    }
    return false;
}

view_pointer publish(actor& me) {
    auto all = std::make_shared<view>(*me.seen);
    view own{.blocks = {{me.block->number, me.block->floor, {{me.id, me.clock}}}}};
    all->include(own);
    ++me.clock;
    return all;
}

namespace {

bool strong_to_each_other(const release& r, const actor& me, scope reach) {
    return includes(r.reach, r.block, r.device, me.block->number, me.block->device) &&
           includes(reach, me.block->number, me.block->device, r.block, r.device);
}

}  // namespace

void after_load(actor& me, const releases_of& of_value, order ordering, scope reach) {
    for (const release& r : of_value) {
        if (!strong_to_each_other(r, me, reach)) continue;
        if (r.seen == me.latest) continue;
        if (!acquires(ordering)) {
            me.loaded = join(me.loaded, r.seen);
            me.loaded_values.include(r.values);
            continue;
        }
        me.seen = join(me.seen, r.seen);
        me.values.include(r.values);
        me.latest = r.seen;
    }
}

std::optional<release> released_by(actor& me, order ordering, scope reach) {
    if (!releases(ordering) && me.fenced == nullptr) return std::nullopt;
    return release{releases(ordering) ? publish(me) : me.fenced,
                   releases(ordering) ? reach : std::min(reach, me.fenced_scope), me.block->number, me.block->device,
                   releases(ordering) ? me.values : me.fenced_values};
}

void carry(releases_of& of_value, const std::optional<release>& stored, bool read_modify_write) {
    // Only a read-modify-write continues the releases before it.
    if (!read_modify_write) of_value.clear();
    if (!stored) return;
    // Releases of one block with the same scope count as one.
    const auto same = std::ranges::find_if(
        of_value, [&](const release& r) { return r.reach == stored->reach && r.block == stored->block; });
    if (same == of_value.end()) return of_value.push_back(*stored);
    same->seen = join(same->seen, stored->seen);
    same->values.include(stored->values);
}

void after_store(actor& me, releases_of& of_value, order ordering, scope reach, bool read_modify_write) {
    carry(of_value, released_by(me, ordering, reach), read_modify_write);
}

void after_fence(actor& me, order ordering, scope reach) {
    if (acquires(ordering) && me.loaded != nullptr) {
        me.seen = join(me.seen, me.loaded);
        me.loaded = nullptr;
        me.values.include(std::exchange(me.loaded_values, {}));
    }
    if (releases(ordering)) {
        me.fenced = publish(me);
        me.fenced_scope = reach;
        me.fenced_values = me.values;
    }
}

namespace {

void share_values(const std::vector<actor*>& all) {
    sight together;
    for (const actor* a : all) together.include(a->values);
    for (actor* a : all) a->values = together;
}

}  // namespace

void meet(const std::vector<actor*>& all) {
    share_values(all);
    view together = *all.front()->seen;
    for (const actor* a : all) {
        together.include(*a->seen);
        together.include({.blocks = {{a->block->number, a->block->floor, {{a->id, a->clock}}}}});
    }
    const auto shared = std::make_shared<const view>(std::move(together));
    for (actor* a : all) {
        a->seen = shared;
        ++a->clock;
    }
}

void meet_block(const std::vector<actor*>& all, block_clock& block) {
    share_values(all);
    view_pointer together = all.front()->seen;
    for (const actor* a : all) {
        together = join(together, a->seen);
        block.floor = std::max(block.floor, a->clock);
    }
    for (actor* a : all) {
        a->seen = together;
        a->clock = block.floor + 1;
    }
}

}  // namespace ptx
