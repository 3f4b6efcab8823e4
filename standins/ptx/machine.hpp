// SPDX-License-Identifier: Apache-2.0
// Devices that run decoded kernels: grids of blocks of threads, in virtual time. A seed decides in
// which order threads take turns.
//
//   ptx::machine m({.seed = 7, .turns = ptx::turns::adversarial});
//   m.memory().add(address, size, ptx::contents::written);
//   auto grid = m.start({.kernel = p.find("scale"), .blocks = {4}, .threads = {256}, .arguments = bytes});
//   while (!grid->over()) m.run(100'000);               // throws ptx::fault
//   m.findings();  // races, unknown contents, divergent barriers
//
// Threads make only the forward progress that CUDA promises. A block that isn't resident doesn't
// run, the blocks of a cooperative grid become resident together, and all threads of resident
// blocks get turns, though perhaps rarely. A grid that isn't cooperative may have to wait until
// earlier grids of its device are over, even if there is room. Only one thread at a time may call a
// machine.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "happens_before.hpp"
#include "memory.hpp"
#include "program.hpp"

namespace ptx {

/// A fatal error of a kernel: an illegal address, or a trap. The device is then lost.
class fault : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// How the machine chooses the next thread and block.
///   fair          all blocks in turn, all threads in turn; grids begin as soon as there is room
///   shuffled      in any order, for any time; some grids that aren't cooperative begin only when
///                 earlier grids of their device are over
///   adversarial   as shuffled, but all grids that aren't cooperative wait for earlier ones; for a
///                 while some blocks get almost no turns; many turns end where threads communicate
enum class turns : std::uint8_t { fair, shuffled, adversarial };

struct machine_options {
    std::uint64_t seed = 1;
    turns who = turns::fair;
    std::uint32_t blocks_per_sm = 32, threads_per_sm = 2048;
    std::uint32_t registers_per_sm = 65'536, shared_per_sm = 228 << 10;
    bool check_races = true, check_contents = true;
    /// Read-modify-writes of system scope are atomic on memory of other devices and of the host,
    /// too. CUDA promises this only if the driver reports it (Programming Guide, "Atomic
    /// Functions"). With false, such operations are findings.
    bool native_atomics = true;
    /// Other threads see strong stores late and in another order, unless the stores are ordered
    /// (8.9). For example, a store before a load may become visible only after the load, unless a
    /// sequentially consistent fence lies in between. Strong loads may return earlier values as
    /// long as nothing orders them behind the store (8.10). The machine is stricter than the model
    /// in three points. No store becomes visible before an earlier load of its thread is done.
    /// After a barrier or fence.sc, all threads see the stores that the thread made before it. All
    /// threads also see a store that its own thread has read.
    bool weak_memory = false;
    std::uint64_t most_instructions = ~std::uint64_t{0};  // more instructions are a fault
};

struct launch {
    const program* of = nullptr;
    const function* kernel = nullptr;
    std::array<std::uint32_t, 3> blocks{1, 1, 1}, threads{1, 1, 1};
    std::vector<std::byte> arguments{};
    std::uint32_t dynamic_shared = 0;
    bool cooperative = false;
    int device = 0;
    std::set<std::uint32_t> sms{0};  // the SMs of its partition
    /// The view of everything that happened before it; null: everything that is over by then.
    view_pointer after{};
};

/// A copy or memset, which the machine does at once.
struct transfer {
    std::uintptr_t from = 0, to = 0;  // `from` 0: a memset
    std::size_t size = 0;
    int device = 0;
    view_pointer after{};  // as launch::after
};

/// The work that all grids together have executed.
struct work_done {
    std::uint64_t instructions = 0, loaded = 0, stored = 0;  // bytes of global memory
    std::uint64_t atomics = 0, sleeps = 0;
};

class grid;

class machine {
public:
    explicit machine(machine_options o = {});
    machine(const machine&) = delete;
    machine& operator=(const machine&) = delete;
    ~machine();

    [[nodiscard]] ptx::memory& memory() { return memory_; }

    /// Queues the grid behind grids that wait for room. Throws std::invalid_argument if no device
    /// could hold the grid.
    std::shared_ptr<grid> start(launch l);
    /// Records the races of the transfer. Returns the view that later work covers.
    [[nodiscard]] view_pointer pass(const transfer& t);
    /// The number of blocks of so many threads that an SM holds at once.
    [[nodiscard]] std::uint32_t resident_blocks(const function& kernel, std::uint32_t threads,
                                                std::uint32_t dynamic_shared = 0) const;

    /// Runs some `instructions` of the resident blocks. Throws fault, which ends all grids of the
    /// device.
    void run(std::uint64_t instructions);
    /// Stops all work on this device until it is thawed.
    void freeze(int device) { frozen_.insert(device); }
    void let_go(int device) { frozen_.erase(device); }
    [[nodiscard]] bool busy() const { return !grids_.empty(); }
    /// The value of view::finished that covers everything that is over.
    [[nodiscard]] std::uint64_t ended() const { return ended_count_; }
    /// Removes entries that `finished` covers already.
    void prune(view& v) const;
    /// Ends all grids at once.
    void stop();

    [[nodiscard]] const work_done& done() const { return done_; }
    [[nodiscard]] std::uint64_t now() const { return now_; }  // ns
    [[nodiscard]] const std::vector<std::string>& findings() const { return findings_; }
    std::vector<std::string> take_findings() { return std::exchange(findings_, {}); }
    /// The place at which each unfinished thread waits.
    [[nodiscard]] std::string who_waits() const;

private:
    friend class grid;
    struct thread;
    struct block;
    struct frame;
    struct delayed_store;

    // the grids' places (machine.cpp)
    void place_grids();
    [[nodiscard]] bool place(grid& g, bool all);
    void end_block(block& b);
    void count_end();
    [[nodiscard]] view_pointer beginning_after(const view_pointer& after);
    void wake(block& b);
    void jump_to_next_wake();
    void notice_deadlock();
    void run_block(block& b, std::uint64_t& budget);

    // instructions (execute.cpp)
    void start_thread(block& b, std::uint32_t index);
    [[nodiscard]] static std::unique_ptr<word[]> make_slots(const thread& t);
    void run_thread(thread& t, std::uint32_t instructions);
    void execute_access(thread& t, const instruction& i, word* r);
    void delay(thread& t, const instruction& i, word address, word value);
    void show(thread& t, std::size_t stores);
    void show_until(thread& t, word address, std::size_t bytes);
    void show_due(bool all);
    void replaced(thread& t, area& in, word address, std::uint8_t bytes, word old, const releases_of& carried);
    void meet_fences(thread& t, scope reach);
    void notice_host();
    void arrive(thread& t, const instruction& i, std::uint32_t barrier);
    void complete_barrier(block& b, std::uint32_t barrier);
    void shuffle(const std::vector<thread*>& all, const instruction& i);
    void vote(const std::vector<thread*>& all, const instruction& i);
    void meet_warp(thread& t, const instruction& i);
    void call(thread& t, const ptx::call& c);
    void leave(thread& t);
    struct reached {
        std::byte* at = nullptr;
        area* in = nullptr;
        std::size_t offset = 0;
        frame* locals_of = nullptr;
    };
    [[nodiscard]] reached reach(thread& t, const instruction& i, word address, std::size_t bytes);
    void check(thread& t, const instruction& i, const reached& to, std::size_t bytes);
    void looked(thread& t, const reached& to);
    [[nodiscard]] const past_values::one* older_value(thread& t, const instruction& i, const reached& to, word address,
                                                      word present);

    // findings and faults
    [[noreturn]] void fail(const thread& t, const instruction& i, const std::string& what) const;
    void find(const thread& t, const instruction& i, const std::string& what);
    void tell(const std::string& kind, const std::string& what);
    [[nodiscard]] std::string describe(agent a, std::uint32_t where) const;
    [[nodiscard]] std::string race_with(const conflict& c, const std::string& how) const;

    machine_options options_;
    std::mt19937_64 random_;
    ptx::memory memory_;
    std::vector<std::shared_ptr<grid>> grids_;  // unfinished grids, in the order of their launches
    std::vector<block*> running_;
    std::set<int> frozen_;  // devices
    const thread* turn_of_ = nullptr;
    /// Counts events that could end a thread's wait: changes of memory, and threads that do
    /// something other than poll.
    std::uint64_t changes_ = 0;
    std::uint64_t next_notice_ = 0;                  // instructions: see notice_deadlock
    std::vector<thread*> delaying_;                  // threads with stores that no other thread sees yet
    std::uint64_t moment_ = 0;                       // see past_values.hpp
    std::vector<std::uint64_t> moments_at_ends_{0};  // by `ended_count_`
    struct fence_kind {
        scope reach = scope::thread;
        std::uint32_t block = 0;
        int device = 0;
        friend auto operator<=>(const fence_kind&, const fence_kind&) = default;
    };
    std::map<fence_kind, sight> fences_;  // the values that sequentially consistent fences had seen
    /// The part of an SM that a block takes.
    struct share {
        std::uint32_t blocks = 0, threads = 0, registers = 0, shared = 0;
    };
    [[nodiscard]] static share share_of(const function& kernel, std::uint32_t threads, std::uint32_t dynamic_shared);
    [[nodiscard]] bool fits_beside(const share& taken, const share& more) const;
    std::map<std::pair<int, std::uint32_t>, share> taken_;
    ended_blocks ended_;
    view_pointer seen_by_ended_ = std::make_shared<view>();  // the view of all finished grids
    std::uint32_t blocks_started_ = 0;
    std::uint64_t ended_count_ = 0, now_ = 1000, since_tick_ = 0;
    work_done done_;
    std::vector<std::string> findings_;
    std::set<std::string> told_;
    std::vector<std::uint32_t> numbers_;  // for each block that ever ran, its number in its grid
    std::set<const program*> programs_;   // of all grids
};

/// One launch, from its start to its end.
class grid {
public:
    grid(machine& on, launch l);
    grid(const grid&) = delete;
    grid& operator=(const grid&) = delete;
    ~grid();

    [[nodiscard]] bool over() const { return over_; }
    /// The view that later work covers, once the grid is over.
    [[nodiscard]] view_pointer end() const;
    /// Whether the grid was ended before it finished.
    [[nodiscard]] bool stopped() const { return stopped_; }
    [[nodiscard]] const launch& what() const { return what_; }
    [[nodiscard]] std::uint32_t blocks() const { return what_.blocks[0] * what_.blocks[1] * what_.blocks[2]; }
    [[nodiscard]] std::uint32_t threads() const { return what_.threads[0] * what_.threads[1] * what_.threads[2]; }

private:
    friend class machine;

    machine& on_;
    launch what_;
    std::vector<std::unique_ptr<machine::block>> resident_;
    std::vector<std::uint32_t> numbers_;  // the numbers of its blocks among all blocks
    std::uint32_t next_ = 0, ended_ = 0;
    bool over_ = false, stopped_ = false;
    bool kept_ = false;              // it begins only when earlier grids of its device are over
    view_pointer start_{}, seen_{};  // seen_: by its finished blocks
    sight values_{};                 // the values that these had seen
    /// The memory that the driver gives a cooperative launch for its barrier (%envreg1 and 2).
    alignas(16) std::array<std::uint32_t, 64> workspace_{};
};

}  // namespace ptx
