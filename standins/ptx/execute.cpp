// SPDX-License-Identifier: Apache-2.0
// The effect of each instruction on its thread, its block and memory. Sections are those of the PTX
// ISA 9.0.
#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <utility>

#include "thread.hpp"

namespace ptx {

namespace {

word mask_of(std::size_t bytes) { return bytes == 8 ? ~word{0} : (word{1} << 8 * bytes) - 1; }

/// Extends a value from memory to the width of a register.
word extended(word value, const instruction& i) {
    if (!i.sign) return value;
    const unsigned unused = 64 - 8U * i.bytes;
    return static_cast<word>(static_cast<std::int64_t>(value << unused) >> unused);
}

// Stores as load_atomically() loads.
void store_atomically(std::byte* to, word value, std::size_t bytes) {
    switch (bytes) {
        case 1:
            __atomic_store_n(reinterpret_cast<std::uint8_t*>(to), static_cast<std::uint8_t>(value), __ATOMIC_SEQ_CST);
            break;
        case 2:
            __atomic_store_n(reinterpret_cast<std::uint16_t*>(to), static_cast<std::uint16_t>(value), __ATOMIC_SEQ_CST);
            break;
        case 4:
            __atomic_store_n(reinterpret_cast<std::uint32_t*>(to), static_cast<std::uint32_t>(value), __ATOMIC_SEQ_CST);
            break;
        default: __atomic_store_n(reinterpret_cast<std::uint64_t*>(to), value, __ATOMIC_SEQ_CST); break;
    }
}
template <class T>
word combine_atomically(std::byte* at, word operand, word (*f)(word, word, word)) {
    auto* const p = reinterpret_cast<T*>(at);
    T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
    // exch is a mov of its operand, and the other operations are commutative.
    while (!__atomic_compare_exchange_n(p, &old, static_cast<T>(f(operand, old, 0)), false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {
    }
    return old;
}

}  // namespace

// ---- threads

void machine::start_thread(block& b, std::uint32_t index) {
    const grid& g = *b.of;
    const launch& l = g.what();
    thread& t = b.threads[index];
    t.of = &b;
    t.index = index;
    t.order = {
        .id = b.clock.number << threads_bits | index, .block = &b.clock, .seen = g.start_, .values = g.start_->values};
    frame f{.in = l.kernel};
    f.locals.resize(l.kernel->local_bytes);
    f.locals_known.resize(l.kernel->local_bytes);
    f.parameters = const_cast<std::byte*>(l.arguments.data());  // only loaded: decode.cpp knows no store there
    t.frames.push_back(std::move(f));
    t.frames.back().slots = make_slots(t);
    b.ready.push_back(index);
}

std::unique_ptr<word[]> machine::make_slots(const thread& t) {
    const frame& f = t.frames.back();
    const block& b = *t.of;
    const grid& g = *b.of;
    const launch& l = g.what();
    auto slots = std::make_unique<word[]>(f.in->slots);
    std::ranges::copy(f.in->constants, slots.get());
    const auto of = [](std::uint32_t index, const std::array<std::uint32_t, 3>& extent, unsigned axis) -> word {
        return axis == 0   ? index % extent[0]
               : axis == 1 ? index / extent[0] % extent[1]
                           : index / extent[0] / extent[1];
    };
    const auto workspace = l.cooperative ? reinterpret_cast<std::uintptr_t>(g.workspace_.data()) : 0;
    for (const own_slot& o : f.in->own) {
        word& value = slots[o.at];
        switch (o.what) {
            case own::tid_x: value = of(t.index, l.threads, 0); break;
            case own::tid_y: value = of(t.index, l.threads, 1); break;
            case own::tid_z: value = of(t.index, l.threads, 2); break;
            case own::ntid_x: value = l.threads[0]; break;
            case own::ntid_y: value = l.threads[1]; break;
            case own::ntid_z: value = l.threads[2]; break;
            case own::ctaid_x: value = of(b.index, l.blocks, 0); break;
            case own::ctaid_y: value = of(b.index, l.blocks, 1); break;
            case own::ctaid_z: value = of(b.index, l.blocks, 2); break;
            case own::nctaid_x: value = l.blocks[0]; break;
            case own::nctaid_y: value = l.blocks[1]; break;
            case own::nctaid_z: value = l.blocks[2]; break;
            case own::laneid: value = t.lane(); break;
            case own::warpid: value = t.index / warp_size; break;
            case own::smid: value = b.sm; break;
            case own::nsmid: value = l.sms.size(); break;
            case own::envreg1: value = workspace >> 32; break;
            case own::envreg2: value = workspace & 0xffff'ffff; break;
            case own::parameters: value = reinterpret_cast<word>(f.parameters) + o.offset; break;
            case own::locals: value = reinterpret_cast<word>(f.locals.data()) + o.offset; break;
        }
    }
    return slots;
}

void machine::run_thread(thread& t, std::uint32_t instructions) {
    std::uint64_t ran = 0;
    turn_of_ = &t;
    while (ran < instructions && t.is == state::ready) {
        frame& f = t.frames.back();
        word* const r = f.slots.get();
        const instruction* const code = f.in->code.data();
        const instruction& i = code[f.next++];
        ++ran;
        if ((r[i.guard] != 0) == i.negated) continue;  // 9.3: predicated execution
        if (!i.ran) i.ran = true;
        switch (i.what) {
            case operation::compute: r[i.at[0]] = i.compute(r[i.at[1]], r[i.at[2]], r[i.at[3]]); break;
            case operation::branch: f.next = i.target; break;
            case operation::load:
            case operation::store:
            case operation::atomic:
                execute_access(t, i, r);
                if (i.ordering != order::weak && options_.who == turns::adversarial && random_() % 2 == 0)
                    instructions = 0;
                break;
            case operation::pack: {
                word whole = 0;
                for (unsigned e = i.count; e-- > 0;) whole = whole << 8 * i.bytes | (r[i.at[e]] & mask_of(i.bytes));
                r[i.at[4]] = whole;
                break;
            }
            case operation::unpack: {
                const word whole = r[i.at[4]];
                for (unsigned e = 0; e < i.count; ++e) r[i.at[e]] = whole >> 8 * i.bytes * e & mask_of(i.bytes);
                break;
            }
            case operation::clock:
                r[i.at[0]] = now_;
                ++changes_;  // the thread doesn't wait for ever
                break;
            case operation::sleep:  // 9.7.19.4: up to twice the time
                t.is = state::asleep;
                t.wakes = now_ + (r[i.at[0]] & 0xffff'ffff);
                t.of->wakes = std::min(t.of->wakes, t.wakes);
                t.of->asleep.push_back(t.index);
                ++done_.sleeps;
                break;
            case operation::fence:
                ++t.fences;
                if (i.ordering == order::sc) meet_fences(t, i.reach);
                after_fence(t.order, i.ordering, i.reach);
                if (releases(i.ordering)) t.fenced_stores = t.stores;
                break;
            case operation::barrier: arrive(t, i, static_cast<std::uint32_t>(r[i.at[0]])); break;
            case operation::warp_barrier:
            case operation::shuffle:
            case operation::vote: meet_warp(t, i); break;
            case operation::call: call(t, f.in->calls[i.target]); break;
            case operation::leave: leave(t); break;
            case operation::trap: fail(t, i, "trap");
        }
    }
    done_.instructions += ran;
}

// ---- 9.7.12.5 and 9.7.12.6: calls

void machine::call(thread& t, const ptx::call& c) {
    frame f{.in = c.callee};
    f.own_parameters.resize(c.callee->parameter_bytes);
    f.locals.resize(c.callee->local_bytes);
    f.locals_known.resize(c.callee->local_bytes);
    for (const auto& copy : c.arguments)
        std::memcpy(f.own_parameters.data() + copy.to, t.frames.back().locals.data() + copy.from, copy.bytes);
    f.parameters = f.own_parameters.data();
    t.frames.push_back(std::move(f));
    t.frames.back().slots = make_slots(t);
}

void machine::leave(thread& t) {
    block& b = *t.of;
    if (t.frames.size() > 1) {
        const frame callee = std::move(t.frames.back());
        t.frames.pop_back();
        frame& f = t.frames.back();
        for (const auto& copy : f.in->calls[f.in->code[f.next - 1].target].results) {
            std::memcpy(f.locals.data() + copy.to, callee.own_parameters.data() + copy.from, copy.bytes);
            std::fill_n(f.locals_known.begin() + copy.to, copy.bytes, true);
        }
        return;
    }
    t.is = state::over;
    t.frames.back().slots.reset();
    ++b.over;
    for (std::uint32_t n = 0; n < b.arrived.size(); ++n)
        if (b.arrived[n] != 0 && b.arrived[n] + b.over == b.threads.size()) complete_barrier(b, n);
}

// ---- 9.7.13.1: barriers of a block

void machine::arrive(thread& t, const instruction& i, std::uint32_t barrier) {
    block& b = *t.of;
    if (barrier >= b.arrived.size()) fail(t, i, "a block has 16 barriers");
    show(t, t.delayed.size());
    t.is = state::at_barrier;
    t.barrier = barrier;
    t.at = &i;
    if (++b.arrived[barrier] + b.over == b.threads.size()) complete_barrier(b, barrier);
}

/// Completes the barrier once all threads have arrived that still can.
void machine::complete_barrier(block& b, std::uint32_t barrier) {
    std::vector<actor*> all;
    const thread* first_of_warp = nullptr;
    for (thread& t : b.threads) {
        if (t.lane() == 0) first_of_warp = nullptr;
        if (t.is != state::at_barrier || t.barrier != barrier) continue;
        // With .aligned, the whole warp must execute the same instruction, and CUDA requires every
        // thread of the block.
        if (first_of_warp == nullptr) first_of_warp = &t;
        if (t.at->aligned && t.at != first_of_warp->at) find(t, *t.at, "divergent barrier: its warp is at another one");
        if (b.over != 0) find(t, *t.at, "divergent barrier: a thread that is over never comes");
        all.push_back(&t.order);
    }
    meet_block(all, b.clock);
    b.arrived[barrier] = 0;
    for (thread& t : b.threads) {
        if (t.is != state::at_barrier || t.barrier != barrier) continue;
        t.is = state::ready;
        t.at = nullptr;
        if (&t != turn_of_) b.ready.push_back(t.index);  // turn_of_ just continues
    }
}

// ---- 9.7.9.6, 9.7.13.2 and 9.7.13.9: operations of a warp's threads together

void machine::meet_warp(thread& t, const instruction& i) {
    block& b = *t.of;
    const auto members = static_cast<std::uint32_t>(t.frames.back().slots[i.at[4]]);
    if ((members >> t.lane() & 1) == 0) fail(t, i, "not a member of its own mask");
    if (i.what == operation::warp_barrier) show(t, t.delayed.size());
    t.is = state::at_shuffle;
    t.at = &i;
    const std::uint32_t first = t.index - t.lane();
    std::vector<thread*> all;
    for (std::uint32_t lane = 0; lane < warp_size; ++lane) {
        if ((members >> lane & 1) == 0) continue;
        if (first + lane >= b.threads.size()) fail(t, i, "a lane of the mask that the block doesn't have");
        thread& other = b.threads[first + lane];
        if (other.is == state::over) fail(t, i, "a lane of the mask is over");
        if (other.is != state::at_shuffle || other.at != &i) return;  // the last thread to arrive continues below
        if (static_cast<std::uint32_t>(other.frames.back().slots[i.at[4]]) != members) fail(t, i, "masks differ");
        all.push_back(&other);
    }
    if (i.what == operation::shuffle) {
        shuffle(all, i);
    } else if (i.what == operation::vote) {
        vote(all, i);
    } else {
        std::vector<actor*> actors;
        for (thread* each : all) actors.push_back(&each->order);
        meet(actors);
    }
    for (thread* each : all) {
        each->is = state::ready;
        each->at = nullptr;
        if (each != turn_of_) b.ready.push_back(each->index);  // t is taking its turn
    }
}

void machine::shuffle(const std::vector<thread*>& all, const instruction& i) {
    constexpr word of_nobody = 0xdead'beef;  // for the undefined value of a lane outside of the mask
    std::array<word, warp_size> values;
    values.fill(of_nobody);
    for (const thread* t : all) values[t->lane()] = t->frames.back().slots[i.at[1]] & 0xffff'ffff;
    for (thread* t : all) {
        word* const r = t->frames.back().slots.get();
        const auto lane = t->lane();
        const auto by = static_cast<std::uint32_t>(r[i.at[2]]) & 31, packed = static_cast<std::uint32_t>(r[i.at[3]]);
        const std::uint32_t clamp = packed & 31, segment = packed >> 8 & 31;
        const std::uint32_t highest = (lane & segment) | (clamp & ~segment), lowest = lane & segment;
        std::uint32_t from = lane;
        bool inside = false;
        switch (i.mode) {
            case shuffle_mode::up: inside = lane >= by && lane - by >= highest, from = lane - by; break;
            case shuffle_mode::down: inside = lane + by <= highest, from = lane + by; break;
            case shuffle_mode::butterfly: from = lane ^ by, inside = from <= highest; break;
            case shuffle_mode::indexed: from = lowest | (by & ~segment), inside = from <= highest; break;
        }
        r[i.at[0]] = values[inside ? from : lane];
        if (i.second_result) r[i.at[5]] = inside ? 1 : 0;
    }
}

// Finished lanes don't vote. As in a shuffle, they must not be in the mask: a program that counts
// on them is wrong.
void machine::vote(const std::vector<thread*>& all, const instruction& i) {
    word members = 0, yes = 0;
    for (const thread* t : all) {
        const word lane = word{1} << t->lane();
        members |= lane;
        if ((t->frames.back().slots[i.at[1]] != 0) != i.opposite) yes |= lane;
    }
    word outcome = yes;
    switch (i.asks) {
        case vote_mode::all: outcome = yes == members ? 1 : 0; break;
        case vote_mode::any: outcome = yes != 0 ? 1 : 0; break;
        case vote_mode::uniform: outcome = yes == members || yes == 0 ? 1 : 0; break;
        case vote_mode::ballot: break;
    }
    for (thread* t : all) t->frames.back().slots[i.at[0]] = outcome;
}

// ---- 9.7.9.8 to 9.7.9.12 and 9.7.13.5: accesses

machine::reached machine::reach(thread& t, const instruction& i, word address, std::size_t bytes) {
    const bool writes = i.what != operation::load;
    if (i.where == space::shared) {
        block& b = *t.of;
        const auto offset = static_cast<std::uint32_t>(address) - shared_begin;
        if (address % bytes != 0) fail(t, i, "misaligned address in shared memory");
        if (static_cast<std::uint32_t>(address) < shared_begin || offset + bytes > b.shared.size())
            fail(t, i, "out of bounds of shared memory");
        return {b.shared.data() + offset, b.shared_area.get(), offset};
    }
    if (address % bytes != 0) fail(t, i, "misaligned address");
    if (i.where == space::generic)
        if (area* const in = memory_.find(address, bytes); in != nullptr)
            return {reinterpret_cast<std::byte*>(address), in, address - in->begin()};
    // Parameters have generic addresses, too. A kernel's parameters are constants of the grid, and
    // the parameters of calls belong to the thread.
    const auto inside = [&](const std::byte* begin, std::size_t size) {
        const auto first = reinterpret_cast<word>(begin);
        return address >= first && address - first + bytes <= size;
    };
    frame& f = t.frames.back();
    const bool of_kernel = !writes && inside(t.frames.front().parameters, t.of->of->what().arguments.size());
    if (of_kernel || inside(f.own_parameters.data(), f.own_parameters.size()))
        return {reinterpret_cast<std::byte*>(address)};
    if (inside(f.locals.data(), f.locals.size()))
        return {reinterpret_cast<std::byte*>(address), nullptr, address - reinterpret_cast<word>(f.locals.data()), &f};
    fail(t, i, "out of bounds, or of memory that was freed");
}

void machine::check(thread& t, const instruction& i, const reached& to, std::size_t bytes) {
    const bool reads = i.what != operation::store;
    if (reads && options_.check_contents && !to.in->known(to.offset, bytes))
        find(t, i, "unknown contents: nobody has written here");
    const auto c = to.in->touch(to.offset, bytes, {t.order, i.what != operation::load, i.reach, i.number}, ended_);
    if (i.what == operation::atomic && i.reach == scope::sys && !options_.native_atomics && i.where != space::shared &&
        to.in->owner() != t.order.block->device)
        find(t, i,
             std::string("no native atomics: memory of ") +
                 (to.in->owner() == of_host ? "the host" : "another device") + " was updated by");
    if (!options_.check_races) return;
    if (i.reach != scope::sys && to.in->is_polled(to.offset, bytes))
        find(t, i, "race: with the host, which looks here;");
    if (c) find(t, i, race_with(*c, reads ? i.what == operation::load ? "read" : "updated" : "written"));
}

/// Notes a strong load. Polling changes nothing, except that host memory may change at any time.
void machine::looked(thread& t, const reached& to) {
    if (to.in == nullptr || to.in->owner() == of_host) {
        ++changes_;
        return;
    }
    if (t.changes != changes_) t.looks = 0;
    t.changes = changes_;
    ++t.looks;
}

void machine::execute_access(thread& t, const instruction& i, word* r) {
    const std::size_t bytes = std::size_t{i.bytes} * i.count;
    const word address =
        (i.where == space::shared ? r[i.at[4]] & 0xffff'ffff : r[i.at[4]]) + static_cast<word>(i.offset);
    const reached to = reach(t, i, address, bytes);
    const bool strong = i.ordering != order::weak;
    if (!t.delayed.empty() && i.where != space::shared) {
        if (i.what == operation::atomic && releases(i.ordering)) show(t, t.delayed.size());
        show_until(t, address, bytes);
    }
    if (to.in != nullptr) {
        check(t, i, to, bytes);
        if (i.where != space::shared) (i.what == operation::load ? done_.loaded : done_.stored) += bytes;
    }
    if (to.locals_of != nullptr) {
        const auto known = to.locals_of->locals_known.begin() + static_cast<std::ptrdiff_t>(to.offset);
        const auto end = known + static_cast<std::ptrdiff_t>(bytes);
        if (i.what == operation::store)
            std::fill(known, end, true);
        else if (bytes > 1 && options_.check_contents && std::find(known, end, false) != end)  // 1: of an empty class
            find(t, i, "unknown contents: nobody has written here");
    }
    if (i.what == operation::load) {
        if (strong) {
            word value = load_atomically(to.at, i.bytes);
            const releases_of* from = to.in != nullptr ? to.in->find_releases(to.offset) : nullptr;
            if (options_.weak_memory && to.in != nullptr && i.where != space::shared)
                if (const auto* const old = older_value(t, i, to, address, value); old != nullptr) {
                    value = old->value;
                    from = &old->carried;
                }
            r[i.at[0]] = extended(value, i);
            looked(t, to);
            if (from != nullptr) after_load(t.order, *from, i.ordering, i.reach);
            return;
        }
        if (to.in != nullptr) ++changes_;
        for (unsigned e = 0; e < i.count; ++e) {
            word value = 0;
            std::memcpy(&value, to.at + std::size_t{e} * i.bytes, i.bytes);
            r[i.at[e]] = extended(value, i);
        }
        return;
    }
    if (i.what == operation::store) ++changes_;
    if (i.what == operation::store && !strong) {
        if (options_.weak_memory && to.in != nullptr) to.in->forget_past(to.offset, bytes);
        for (unsigned e = 0; e < i.count; ++e) std::memcpy(to.at + std::size_t{e} * i.bytes, &r[i.at[e]], i.bytes);
        return;
    }
    if (to.in == nullptr) fail(t, i, "a strong access to parameters");
    if (options_.weak_memory && i.what == operation::store && i.where != space::shared)
        return delay(t, i, address, r[i.at[0]]);
    releases_of& carried = to.in->releases_at(to.offset);
    if (i.what == operation::atomic) {
        ++done_.atomics;
        const word operand = r[i.at[1]];
        after_load(t.order, carried, i.ordering, i.reach);
        const releases_of before = options_.weak_memory ? carried : releases_of{};
        r[i.at[0]] = i.bytes == 4 ? combine_atomically<std::uint32_t>(to.at, operand, i.compute)
                                  : combine_atomically<std::uint64_t>(to.at, operand, i.compute);
        if (((i.compute(operand, r[i.at[0]], 0) ^ r[i.at[0]]) & mask_of(i.bytes)) == 0)
            looked(t, to);
        else
            ++changes_;
        if (options_.weak_memory && i.where != space::shared)
            replaced(t, *to.in, address, i.bytes, r[i.at[0]] & mask_of(i.bytes), before);
    } else {
        store_atomically(to.at, r[i.at[0]], i.bytes);
    }
    after_store(t.order, carried, i.ordering, i.reach, i.what == operation::atomic);
}

// ---- 8.9: stores that other threads see later

/// Queues the store behind those that it may not overtake: stores to its own address, stores before
/// a fence and, if it releases, all stores.
void machine::delay(thread& t, const instruction& i, word address, word value) {
    constexpr std::uint64_t longest = 4096;
    delayed_store s{.address = address,
                    .value = value,
                    .bytes = i.bytes,
                    .fences = t.fences,
                    .due = done_.instructions + random_() % longest,
                    .number = t.stores++,
                    .releases = released_by(t.order, i.ordering, i.reach)};
    s.released = releases(i.ordering) ? s.number : t.fenced_stores;
    if (t.delayed.empty()) delaying_.push_back(&t);
    auto at = t.delayed.end();
    while (at != t.delayed.begin() && !releases(i.ordering) && std::prev(at)->fences == t.fences &&
           std::prev(at)->address != address && random_() % 2 == 0)
        --at;
    t.delayed.insert(at, std::move(s));
}

/// Makes the first `stores` delayed stores visible to other threads.
void machine::show(thread& t, std::size_t stores) {
    if (stores == 0) return;
    ++changes_;
    for (std::size_t n = 0; n < stores; ++n) {
        delayed_store& s = t.delayed[n];
        area* const in = memory_.find(s.address, s.bytes);
        if (in == nullptr) continue;  // freed meanwhile
        auto* const at = reinterpret_cast<std::byte*>(s.address);
        const word old = load_atomically(at, s.bytes);
        releases_of& carried = in->releases_at(s.address - in->begin());
        store_atomically(at, s.value, s.bytes);
        replaced(t, *in, s.address, s.bytes, old, carried);
        carry(carried, s.releases, false);
        // A release covers the values that its thread had seen by then. For these stores, that is
        // known only now, when they become visible.
        if (s.number < t.fenced_stores) t.order.fenced_values.saw(s.address, moment_);
        for (std::size_t later = n + 1; later < t.delayed.size(); ++later)
            if (delayed_store& r = t.delayed[later]; r.releases && s.number < r.released)
                r.releases->values.saw(s.address, moment_);
    }
    t.delayed.erase(t.delayed.begin(), t.delayed.begin() + static_cast<std::ptrdiff_t>(stores));
    if (t.delayed.empty()) std::erase(delaying_, &t);
}

/// Makes a thread's delayed stores visible before the thread itself reads the address.
void machine::show_until(thread& t, word address, std::size_t bytes) {
    std::size_t stores = 0;
    for (std::size_t n = 0; n < t.delayed.size(); ++n)
        if (t.delayed[n].address < address + bytes && address < t.delayed[n].address + t.delayed[n].bytes)
            stores = n + 1;
    show(t, stores);
}

// ---- 8.10: loads that return earlier values

/// A store has become visible and has replaced `old`.
void machine::replaced(thread& t, area& in, word address, std::uint8_t bytes, word old, const releases_of& carried) {
    const word now = load_atomically(reinterpret_cast<const std::byte*>(address), bytes);
    ++moment_;
    in.past_at(address - in.begin())
        .replace({.value = old, .until = moment_, .gone = done_.instructions, .carried = carried}, now, bytes);
    t.order.values.saw(address, moment_);
}

/// An earlier value that this load returns in place of the present one; null if it returns the
/// present one.
const past_values::one* machine::older_value(thread& t, const instruction& i, const reached& to, word address,
                                             word present) {
    constexpr std::uint64_t longest = 20'000;  // instructions after which every store is visible
    past_values* const past = to.in->find_past(to.offset);
    if (past == nullptr) return nullptr;
    if (!past->describe(present, i.bytes)) {
        to.in->forget_past(to.offset, 1);
        return nullptr;
    }
    const auto& all = past->all();
    // The thread sees all work that was over before it began.
    const std::uint64_t seen = std::max(moments_at_ends_[t.order.seen->finished], t.order.values.of(address));
    const std::size_t first = past->first_after(seen, done_.instructions - std::min(done_.instructions, longest));
    const bool old = first < all.size() && random_() % 4 == 0;
    const auto* const found = old ? &all[first + random_() % (all.size() - first)] : nullptr;
    const std::uint64_t from = old ? found->from : all.back().until;
    t.order.values.saw(address, from);
    return found;
}

/// 8.9.3: of two fence.sc whose scopes include each other, one comes first, and accesses after the
/// second see everything before the first.
void machine::meet_fences(thread& t, scope reach) {
    show(t, t.delayed.size());
    const auto& me = *t.order.block;
    for (const auto& [fence, values] : fences_)
        if (includes(fence.reach, fence.block, fence.device, me.number, me.device) &&
            includes(reach, me.number, me.device, fence.block, fence.device))
            t.order.values.include(values);
    fences_[{reach, reach == scope::cta ? me.number : 0, me.device}].include(t.order.values);
}

/// Notices the values that the host has written since the last turn.
void machine::notice_host() {
    memory_.for_each_polled([&](area& a) {
        for (const auto& [offset, old] : a.changed_by_host()) {
            const word now = load_atomically(reinterpret_cast<const std::byte*>(a.begin() + offset), sizeof(word));
            ++moment_;
            a.past_at(offset).replace({.value = old, .until = moment_, .gone = done_.instructions, .carried = {}}, now,
                                      sizeof(word));
        }
    });
}

void machine::show_due(bool all) {
    if (delaying_.empty()) return;
    const auto some = delaying_;
    for (thread* const t : some) {
        std::size_t stores = 0;
        while (stores < t->delayed.size() && (all || t->delayed[stores].due <= done_.instructions)) ++stores;
        show(*t, stores);
    }
}

}  // namespace ptx
