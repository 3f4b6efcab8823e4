// SPDX-License-Identifier: Apache-2.0
#include "memory.hpp"

#include <algorithm>

namespace ptx {

word load_atomically(const std::byte* from, std::size_t bytes) {
    switch (bytes) {
        case 1: return __atomic_load_n(reinterpret_cast<const std::uint8_t*>(from), __ATOMIC_SEQ_CST);
        case 2: return __atomic_load_n(reinterpret_cast<const std::uint16_t*>(from), __ATOMIC_SEQ_CST);
        case 4: return __atomic_load_n(reinterpret_cast<const std::uint32_t*>(from), __ATOMIC_SEQ_CST);
        default: return __atomic_load_n(reinterpret_cast<const std::uint64_t*>(from), __ATOMIC_SEQ_CST);
    }
}

namespace {

bool happened_before(const event& e, const actor& me, const ended_blocks& ended) {
    if (e.who == 0 || e.who == me.id) return true;
    const std::uint32_t block = block_of(e.who);
    if (block == me.block->number && e.clock <= me.block->floor) return true;
    if (const auto when = ended.when(block); when != 0 && when <= me.seen->finished) return true;
    return me.seen->covers(e.who, e.clock);
}

/// Whether both accesses are strong, and each one's scope includes the other's thread.
bool morally_strong(const event& e, const access& a, const ended_blocks& ended) {
    const std::uint32_t block = block_of(e.who), mine = a.by.block->number;
    const int device = ended.device(block), my_device = a.by.block->device;
    return includes(e.reach, block, device, mine, my_device) && includes(a.reach, mine, my_device, block, device);
}

bool conflicts(const event& e, const access& a, const ended_blocks& ended) {
    return !happened_before(e, a.by, ended) && !morally_strong(e, a, ended);
}

}  // namespace

area::granule& area::at(std::size_t offset) {
    auto& p = pages_[offset / page];
    if (p == nullptr) {
        p = std::make_unique<granules>();
        if (fill_[offset / page] == contents::written)
            for (granule& g : *p) g.known = 0xf;
        if (auto copied = copied_.extract(offset / page); !copied.empty()) {
            copied.mapped().more_readers = 0;
            for (granule& g : *p) g.whole = copied.mapped();
        }
    }
    return (*p)[offset % page / unit];
}

std::vector<std::pair<std::size_t, word>> area::changed_by_host() const {
    std::vector<std::pair<std::size_t, word>> changed;
    for (std::size_t w = 0; w < looked_at_.size(); ++w) {
        const std::size_t offset = polled_.begin + w * sizeof(word);
        if (load_atomically(reinterpret_cast<const std::byte*>(begin_ + offset), sizeof(word)) != looked_at_[w])
            changed.emplace_back(offset, looked_at_[w]);
    }
    return changed;
}

void area::look() {
    looked_at_.resize((polled_.end - polled_.begin) / sizeof(word));
    for (std::size_t w = 0; w < looked_at_.size(); ++w)
        looked_at_[w] = load_atomically(reinterpret_cast<const std::byte*>(begin_ + polled_.begin + w * sizeof(word)),
                                        sizeof(word));
}

bool area::known(std::size_t offset, std::size_t bytes) const {
    for (const std::size_t end = offset + bytes; offset < end;) {
        const std::size_t first = offset % unit, count = std::min(unit - first, end - offset);
        const unsigned wanted = ((1U << count) - 1) << first;
        const auto& p = pages_[offset / page];
        if (p == nullptr ? fill_[offset / page] == contents::unknown
                         : ((*p)[offset % page / unit].known & wanted) != wanted)
            return false;
        offset += count;
    }
    return true;
}

std::optional<conflict> area::touch(cell& c, const access& a, const ended_blocks& ended) {
    std::optional<conflict> found;
    const event now{a.by.id, a.by.clock, a.where, a.reach};
    if (conflicts(c.wrote, a, ended)) found = conflict{c.wrote, true};
    if (a.writes) {
        if (!found && conflicts(c.read, a, ended)) found = conflict{c.read, false};
        if (c.more_readers != 0) {
            for (const event& e : readers_[c.more_readers - 1])
                if (!found && conflicts(e, a, ended)) found = conflict{e, false};
            readers_[c.more_readers - 1].clear();
        }
        c.wrote = now;
        c.read = {};
        return found;
    }
    if (!happened_before(c.read, a.by, ended)) {  // two concurrent readers: the other one is kept, too
        if (c.more_readers == 0) {
            readers_.emplace_back();
            c.more_readers = static_cast<std::uint32_t>(readers_.size());
        }
        auto& others = readers_[c.more_readers - 1];
        if (others.size() == many) others.erase(others.begin());
        others.push_back(c.read);
    }
    c.read = now;
    return found;
}

std::optional<conflict> area::touch(std::size_t offset, std::size_t bytes, const access& a, const ended_blocks& ended) {
    std::optional<conflict> found;
    for (const std::size_t end = offset + bytes; offset < end;) {
        granule& g = at(offset);
        const std::size_t first = offset % unit, count = std::min(unit - first, end - offset);
        if (count == unit && g.split == 0) {
            if (const auto c = touch(g.whole, a, ended); c && !found) found = c;
        } else {
            if (g.split == 0) {
                splits_.emplace_back().fill(g.whole);
                for (cell& part : splits_.back()) part.more_readers = 0;
                g.split = static_cast<std::uint32_t>(splits_.size());
            }
            for (std::size_t b = first; b < first + count; ++b)
                if (const auto c = touch(splits_[g.split - 1][b], a, ended); c && !found) found = c;
        }
        if (a.writes) {
            g.known = static_cast<std::uint8_t>(g.known | ((1U << count) - 1) << first);
            // A thread that acquires from here finds no releases any more, unless this access is
            // itself a release; see releases_at.
            if (a.reach == scope::thread && g.released != 0) releases_[g.released - 1].clear();
        }
        offset += count;
    }
    return found;
}

std::optional<conflict> area::touch_all(std::size_t offset, std::size_t bytes, const access& a,
                                        const ended_blocks& ended) {
    std::optional<conflict> found;
    const auto note = [&](const std::optional<conflict>& c) {
        if (!found) found = c;
    };
    if (a.writes) forget_past(offset, bytes);
    for (const std::size_t end = offset + bytes; offset < end;) {
        const std::size_t n = offset / page, next = std::min((n + 1) * page, end);
        const bool whole = offset % page == 0 && (next % page == 0 || next == size_);
        if (pages_[n] != nullptr || !whole) note(touch(offset, next - offset, a, ended));
        if (whole && a.writes) {  // earlier accesses to the page don't matter any more
            pages_[n] = nullptr;
            fill_[n] = contents::written;
        }
        if (pages_[n] == nullptr) note(touch(copied_[n], a, ended));
        offset = next;
    }
    return found;
}

releases_of& area::releases_at(std::size_t offset) {
    granule& g = at(offset);
    if (g.released == 0) {
        releases_.emplace_back();
        g.released = static_cast<std::uint32_t>(releases_.size());
    }
    return releases_[g.released - 1];
}

const releases_of* area::find_releases(std::size_t offset) const {
    const auto& p = pages_[offset / page];
    if (p == nullptr) return nullptr;
    const granule& g = (*p)[offset % page / unit];
    return g.released == 0 ? nullptr : &releases_[g.released - 1];
}

void memory::add(std::uintptr_t begin, std::size_t size, contents c, int owner) {
    areas_[begin] = std::make_unique<area>(begin, size, c, owner);
    recent_.fill(nullptr);
}

void memory::remove(std::uintptr_t begin) {
    areas_.erase(begin);
    recent_.fill(nullptr);
}

void memory::polled_by_host(std::uintptr_t begin, std::size_t size) {
    if (area* const a = find(begin, size)) a->polled_by_host(begin - a->begin(), size);
}

area* memory::find(std::uintptr_t begin, std::size_t size) {
    const auto inside = [&](const area& a) { return begin >= a.begin() && begin - a.begin() + size <= a.size(); };
    for (area* const a : recent_)
        if (a != nullptr && inside(*a)) return a;
    auto at = areas_.upper_bound(begin);
    if (at == areas_.begin() || !inside(*(--at)->second)) return nullptr;
    area* const found = at->second.get();
    recent_[next_++ % recent_.size()] = found;
    return found;
}

}  // namespace ptx
