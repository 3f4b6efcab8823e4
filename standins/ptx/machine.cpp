// SPDX-License-Identifier: Apache-2.0
// Decides where and when blocks run.
#include "machine.hpp"

#include <algorithm>
#include <utility>

#include "thread.hpp"

namespace ptx {

namespace {

constexpr std::uint32_t most_threads = 1024;
constexpr std::uint32_t instructions_per_ns = 16;  // of the whole machine: about one or two busy SMs

}  // namespace

machine::machine(machine_options o) : options_(o), random_(o.seed), numbers_(1) { ended_.begin(0, -1); }
machine::~machine() = default;

grid::grid(machine& on, launch l) : on_(on), what_(std::move(l)) {
    workspace_[0] = static_cast<std::uint32_t>(workspace_.size() * sizeof(std::uint32_t));
    if (what_.cooperative)
        on_.memory_.add(reinterpret_cast<std::uintptr_t>(workspace_.data()), sizeof workspace_, contents::written,
                        what_.device);
}

grid::~grid() {
    if (what_.cooperative) on_.memory_.remove(reinterpret_cast<std::uintptr_t>(workspace_.data()));
}

// Programming Guide, "Compute Capabilities", for 9.0: warps get registers in multiples of 256, and
// each block takes 1 KiB of shared memory in addition to its own.
machine::share machine::share_of(const function& kernel, std::uint32_t threads, std::uint32_t dynamic_shared) {
    constexpr std::uint32_t step = 256, reserved = 1024;
    const std::uint32_t warps = (threads + warp_size - 1) / warp_size;
    const std::uint32_t of_warp = (kernel.registers * warp_size + step - 1) / step * step;
    return {1, warps * warp_size, warps * of_warp, kernel.shared_used + dynamic_shared + reserved};
}

bool machine::fits_beside(const share& taken, const share& more) const {
    return taken.blocks + more.blocks <= options_.blocks_per_sm &&
           taken.threads + more.threads <= options_.threads_per_sm &&
           taken.registers + more.registers <= options_.registers_per_sm &&
           taken.shared + more.shared <= options_.shared_per_sm;
}

std::uint32_t machine::resident_blocks(const function& kernel, std::uint32_t threads,
                                       std::uint32_t dynamic_shared) const {
    if (threads == 0 || threads > most_threads) return 0;
    const share one = share_of(kernel, threads, dynamic_shared);
    std::uint32_t n = 0;
    for (share taken; fits_beside(taken, one); ++n)
        taken = {taken.blocks + 1, taken.threads + one.threads, taken.registers + one.registers,
                 taken.shared + one.shared};
    return n;
}

std::shared_ptr<grid> machine::start(launch l) {
    auto g = std::make_shared<grid>(*this, std::move(l));
    const launch& what = g->what();
    if (what.kernel == nullptr || !what.kernel->entry) throw std::invalid_argument("a kernel is needed");
    if (what.arguments.size() < what.kernel->parameter_bytes) throw std::invalid_argument("arguments are missing");
    const std::uint32_t threads = g->threads(), at_once = resident_blocks(*what.kernel, threads, what.dynamic_shared);
    if (g->blocks() == 0 || at_once == 0 || (what.kernel->most_threads != 0 && threads > what.kernel->most_threads))
        throw std::invalid_argument("a grid that no device can hold");
    if (what.cooperative && g->blocks() > at_once * what.sms.size())
        throw std::invalid_argument("a cooperative grid that doesn't fit at once");
    g->start_ = beginning_after(what.after);
    // CUDA doesn't promise that two launches run concurrently.
    const auto of_this_device = [&](const auto& other) { return other->what().device == what.device; };
    if (!what.cooperative && options_.who != turns::fair && std::ranges::any_of(grids_, of_this_device))
        g->kept_ = options_.who == turns::adversarial || random_() % 2 == 0;
    ++changes_;
    grids_.push_back(g);
    if (what.of != nullptr) programs_.insert(what.of);
    return g;
}

view_pointer machine::beginning_after(const view_pointer& after) {
    if (after != nullptr) return after;
    view before = *seen_by_ended_;  // the launching host has seen the end of all finished grids
    before.finished = ended_count_;
    prune(before);
    return seen_by_ended_ = std::make_shared<view>(std::move(before));
}

/// Does the transfer like a grid of one thread.
view_pointer machine::pass(const transfer& t) {
    const block_clock clock{.number = ++blocks_started_, .device = t.device};
    numbers_.push_back(0);
    ended_.begin(clock.number, t.device);
    const actor me{.id = clock.number << threads_bits, .block = &clock, .seen = beginning_after(t.after)};
    for (const bool writes : {false, true}) {
        const std::uintptr_t begin = writes ? t.to : t.from;
        area* const in = t.size != 0 ? memory_.find(begin, t.size) : nullptr;
        if (in == nullptr) continue;  // host memory, which any thread may have written
        const auto c = in->touch_all(begin - in->begin(), t.size, {.by = me, .writes = writes}, ended_);
        if (c && options_.check_races)
            tell("race of a copy with " + std::to_string(c->with.where), race_with(*c, writes ? "written" : "read") +
                                                                             ": a copy or memset on device " +
                                                                             std::to_string(t.device));
    }
    ++changes_;
    count_end();
    ended_.end(clock.number, ended_count_, t.device);
    view all = *me.seen;
    all.of(clock.number).floor = ~std::uint32_t{0};
    return std::make_shared<view>(std::move(all));
}

void machine::prune(view& v) const {
    std::erase_if(v.blocks, [&](const view::block& b) {
        const auto when = ended_.when(b.number);
        return when != 0 && when <= v.finished;
    });
    v.values.forget_until(moments_at_ends_[v.finished]);
}

view_pointer grid::end() const {
    view all = seen_ != nullptr ? *seen_ : view{};
    if (start_ != nullptr) all.include(*start_);
    all.values.include(values_);
    for (const std::uint32_t number : numbers_) {
        view::block& b = all.of(number);
        b.floor = ~std::uint32_t{0};
        b.threads.clear();
    }
    return std::make_shared<view>(std::move(all));
}

// ---- places

/// Places further blocks of the grid as far as there is room; with `all`, only if all of them fit.
bool machine::place(grid& g, bool all) {
    std::vector<std::uint32_t> free;  // SMs, one for each block that fits
    const std::uint32_t wanted = g.blocks() - g.next_;
    const share one = share_of(*g.what().kernel, g.threads(), g.what().dynamic_shared);
    const auto add = [&](share& used) {
        used = {used.blocks + one.blocks, used.threads + one.threads, used.registers + one.registers,
                used.shared + one.shared};
    };
    std::map<std::uint32_t, share> load;
    for (const std::uint32_t sm : g.what().sms) load[sm] = taken_[{g.what().device, sm}];
    for (bool found = true; found && free.size() < wanted;) {
        found = false;
        for (auto& [sm, used] : load) {
            if (free.size() == wanted) break;
            if (!fits_beside(used, one)) continue;
            add(used);
            free.push_back(sm);
            found = true;
        }
    }
    if (free.empty() || (all && free.size() < wanted)) return false;
    for (const std::uint32_t sm : free) {
        add(taken_[{g.what().device, sm}]);
        auto b = std::make_unique<block>();
        b->of = &g;
        b->index = g.next_++;
        b->sm = sm;
        b->clock = {.number = ++blocks_started_, .device = g.what().device};
        numbers_.push_back(b->index);
        g.numbers_.push_back(b->clock.number);
        ended_.begin(b->clock.number, g.what().device);
        ++changes_;
        const std::size_t shared = g.what().kernel->shared_bytes + g.what().dynamic_shared;
        b->shared.resize(shared);
        b->shared_area = std::make_unique<area>(0, std::max<std::size_t>(shared, 1), contents::unknown);
        b->threads.resize(g.threads());
        for (std::uint32_t t = 0; t < g.threads(); ++t) start_thread(*b, t);
        running_.push_back(b.get());
        g.resident_.push_back(std::move(b));
    }
    return true;
}

/// Places grids in the order of their launches: a later grid of a device waits while an earlier one
/// waits for room.
void machine::place_grids() {
    std::set<int> full, occupied;
    for (const auto& g : grids_) {
        const int device = g->what().device;
        const bool first = occupied.insert(device).second;
        if (g->next_ == g->blocks() || full.contains(device) || (g->kept_ && !first)) continue;
        (void)place(*g, g->what().cooperative);
        if (g->next_ < g->blocks()) full.insert(device);
    }
}

void machine::end_block(block& b) {
    grid& g = *b.of;
    for (thread& t : b.threads) {
        show(t, t.delayed.size());
        g.seen_ = join(g.seen_, t.order.seen);
        g.values_.include(t.order.values);
    }
    const share mine = share_of(*g.what().kernel, g.threads(), g.what().dynamic_shared);
    share& used = taken_[{g.what().device, b.sm}];
    used = {used.blocks - mine.blocks, used.threads - mine.threads, used.registers - mine.registers,
            used.shared - mine.shared};
    std::erase(running_, &b);
    ++changes_;
    g.over_ = ++g.ended_ == g.blocks();
    // Before the whole grid is over, no thread outside can know that one of its blocks is.
    if (g.over_) {
        count_end();
        seen_by_ended_ = join(seen_by_ended_, g.seen_);
        for (const std::uint32_t number : g.numbers_) ended_.end(number, ended_count_, g.what().device);
    }
    std::erase_if(g.resident_, [&](const auto& r) { return r.get() == &b; });
    std::erase_if(grids_, [](const auto& other) { return other->over_; });
}

void machine::count_end() {
    ++ended_count_;
    moments_at_ends_.push_back(moment_);
}

void machine::stop() {
    count_end();
    for (const auto& g : grids_) {
        for (const std::uint32_t number : g->numbers_) ended_.end(number, ended_count_, g->what().device);
        g->resident_.clear();
        g->over_ = g->stopped_ = true;
    }
    grids_.clear();
    delaying_.clear();
    running_.clear();
    taken_.clear();
}

// ---- turns

void machine::wake(block& b) {
    if (b.wakes > now_) return;
    b.wakes = ~std::uint64_t{0};
    std::erase_if(b.asleep, [&](std::uint32_t index) {
        thread& t = b.threads[index];
        if (t.wakes > now_) {
            b.wakes = std::min(b.wakes, t.wakes);
            return false;
        }
        t.is = state::ready;
        b.ready.push_back(index);
        return true;
    });
}

/// If no thread can run, lets time pass until the next one wakes.
void machine::jump_to_next_wake() {
    std::uint64_t next = ~std::uint64_t{0};
    for (const block* b : running_)
        if (!frozen_.contains(b->of->what().device)) next = std::min(next, b->wakes);
    show_due(true);
    if (next != ~std::uint64_t{0}) {
        now_ = std::max(now_, next);
        return;
    }
    const std::string where = who_waits();
    stop();
    throw fault("deadlock: nobody can go on.\n" + where);
}

/// Finds deadlocks: a grid waits for room, and all threads on whose progress it depends poll memory
/// that no thread changes.
void machine::notice_deadlock() {
    constexpr std::uint64_t often = 100'000;
    constexpr std::uint32_t many = 2000;
    if (done_.instructions < next_notice_) return;
    next_notice_ = done_.instructions + often;
    if (!frozen_.empty() || std::ranges::all_of(grids_, [](const auto& g) { return g->next_ == g->blocks(); })) return;
    for (const block* b : running_)
        for (const thread& t : b->threads)
            if ((t.is == state::ready || t.is == state::asleep) && (t.changes != changes_ || t.looks < many)) return;
    throw fault("deadlock: kernels wait for what may only run after them.\n" + who_waits());
}

void machine::run_block(block& b, std::uint64_t& budget) {
    constexpr std::uint32_t fair_turn = 256;
    const bool fair = options_.who == turns::fair;
    std::vector<std::uint32_t> now = std::exchange(b.ready, {});
    if (!fair) std::ranges::shuffle(now, random_);
    for (std::size_t n = 0; n < now.size(); ++n) {
        thread& t = b.threads[now[n]];
        const std::uint32_t turn = fair ? fair_turn : 1U << random_() % 9;
        const std::uint64_t before = done_.instructions;
        run_thread(t, turn);
        const std::uint64_t ran = done_.instructions - before;
        budget -= std::min(budget, ran);
        since_tick_ += ran;
        now_ += since_tick_ / instructions_per_ns;
        since_tick_ %= instructions_per_ns;
        if (t.is == state::ready) b.ready.push_back(now[n]);
        if (budget == 0 || b.over == b.threads.size()) {
            b.ready.insert(b.ready.end(), now.begin() + static_cast<std::ptrdiff_t>(n) + 1, now.end());
            break;
        }
    }
}

void machine::run(std::uint64_t instructions) {
    std::uint64_t budget = instructions;
    if (options_.weak_memory) notice_host();
    try {
        while (budget > 0 && !grids_.empty()) {
            if (done_.instructions > options_.most_instructions) throw fault("it never ends.\n" + who_waits());
            show_due(false);
            place_grids();
            notice_deadlock();
            bool any = false;
            auto round = running_;
            std::erase_if(round, [&](const block* b) { return frozen_.contains(b->of->what().device); });
            if (round.empty() && !running_.empty()) break;
            if (options_.who != turns::fair) std::ranges::shuffle(round, random_);
            for (block* b : round) {
                wake(*b);
                if (b->ready.empty()) continue;
                any = true;
                if (options_.who == turns::adversarial) {
                    constexpr std::array<std::uint32_t, 4> choices{64, 64, 8, 1};
                    if (random_() % 256 == 0) b->eagerness = choices[random_() % choices.size()];
                    if (random_() % 64 >= b->eagerness) continue;
                }
                run_block(*b, budget);
                if (b->over == b->threads.size()) end_block(*b);
                if (budget == 0) break;
            }
            if (!any && !running_.empty()) jump_to_next_wake();
        }
    } catch (...) {
        stop();
        throw;
    }
    if (options_.weak_memory) memory_.for_each_polled([](area& a) { a.look(); });
}

// ---- findings and faults

std::string machine::describe(agent a, std::uint32_t where) const {
    if (where == 0) return "a copy or memset";
    std::string text = "block " + std::to_string(numbers_[block_of(a)]) + " (of all " + std::to_string(block_of(a)) +
                       "), thread " + std::to_string(thread_of(a));
    for (const program* p : programs_)
        if (const auto [in, at] = p->find(where); at != nullptr) text += ", in " + ptx::describe(*p, *in, *at);
    return text;
}

void machine::fail(const thread& t, const instruction& i, const std::string& what) const {
    throw fault(what + ": block " + std::to_string(t.of->index) + ", thread " + std::to_string(t.index) + ", in " +
                ptx::describe(*t.of->of->what().of, *t.frames.back().in, i));
}

void machine::find(const thread& t, const instruction& i, const std::string& what) {
    const std::string place = ptx::describe(*t.of->of->what().of, *t.frames.back().in, i);
    tell(what.substr(0, what.find(':')) + place,
         what + ": block " + std::to_string(t.of->index) + ", thread " + std::to_string(t.index) + ", in " + place);
}

/// Records a finding, each kind once.
void machine::tell(const std::string& kind, const std::string& what) {
    constexpr std::size_t enough = 100;
    if (told_.size() == enough || !told_.insert(kind).second) return;
    findings_.push_back(what);
}

std::string machine::race_with(const conflict& c, const std::string& how) const {
    return std::string("race: ") + (c.wrote ? "with a write by " : "with a read by ") +
           describe(c.with.who, c.with.where) + "; " + how + " by";
}

std::string machine::who_waits() const {
    std::map<std::string, std::uint32_t> where;
    for (const auto& g : grids_) {
        const launch& l = g->what();
        if (g->next_ < g->blocks())
            where[l.kernel->name + (g->kept_ ? ": blocks that may have to wait for earlier kernels of their device"
                                             : ": blocks that aren't resident")] += g->blocks() - g->next_;
        for (const auto& b : g->resident_)
            for (const thread& t : b->threads) {
                if (t.is == state::over) continue;
                const frame& f = t.frames.back();
                const char* const how = t.is == state::at_barrier   ? "at a barrier"
                                        : t.is == state::at_shuffle ? "at a shuffle or vote"
                                        : t.is == state::asleep     ? "asleep"
                                                                    : "running";
                const instruction& i = t.at != nullptr ? *t.at : f.in->code[f.next];
                ++where["block " + std::to_string(b->index) + " " + how + " in " + ptx::describe(*l.of, *f.in, i) +
                        ": threads"];
            }
    }
    std::string text;
    for (const auto& [what, count] : where) text += "  " + what + ": " + std::to_string(count) + "\n";
    return text;
}

}  // namespace ptx
