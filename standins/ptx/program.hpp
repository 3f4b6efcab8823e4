// SPDX-License-Identifier: Apache-2.0
// PTX in the form that the machine runs: every name is a number, and every modifier a field.
//
//   // throws ptx::error for text that the decoder doesn't know
//   const ptx::program p = ptx::decode(ptx::text::parse(text));
//   const ptx::function* kernel = p.find("_Z5scalePf");
//
// A function's registers, its constants and the properties of its thread (%tid.x, addresses of
// arguments) lie side by side in `slots` of 64 bits. So every operand is the number of a slot,
// whatever it was in the text.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arithmetic.hpp"
#include "text.hpp"

namespace ptx {

using slot = std::uint32_t;

enum class operation : std::uint8_t {
    compute,  // result = compute(three operands)
    pack,     // mov.b32 %r, {%rs1, %rs2}
    unpack,   // mov.b32 {%rs1, %rs2}, %r
    load,
    store,
    atomic,
    fence,
    barrier,
    warp_barrier,
    shuffle,
    vote,
    sleep,
    clock,
    branch,
    call,
    leave,  // ret, exit
    trap,
};

/// Chapter 5. An address in the global or parameter space is a generic address, and an address of
/// the host. An address in the shared space is an offset.
enum class space : std::uint8_t { generic, shared, param };

/// Chapter 8: how an access is ordered against other accesses. All orders except `weak` are
/// "strong".
enum class order : std::uint8_t { weak, relaxed, acquire, release, acq_rel, sc };

/// The threads against which an access or fence is ordered. For an access that isn't strong, that
/// is only its own thread.
enum class scope : std::uint8_t { thread, cta, gpu, sys };

[[nodiscard]] constexpr bool acquires(order o) { return o == order::acquire || o >= order::acq_rel; }
[[nodiscard]] constexpr bool releases(order o) { return o >= order::release; }

enum class shuffle_mode : std::uint8_t { up, down, butterfly, indexed };
enum class vote_mode : std::uint8_t { all, any, uniform, ballot };

struct instruction {
    operation what = operation::compute;
    bool negated = false;  // runs if the guard is false
    bool aligned = false;  // of a barrier: all threads of the warp must execute this same instruction
    bool sign = false;     // of a load: a value narrower than its register is sign-extended
    space where = space::generic;
    order ordering = order::weak;
    scope reach = scope::thread;
    shuffle_mode mode = shuffle_mode::down;
    vote_mode asks = vote_mode::all;
    bool opposite = false;     // of a vote: each thread votes with its negated predicate
    std::uint8_t bytes = 0;    // of an element in memory, or in a packed register
    std::uint8_t count = 1;    // elements
    std::uint32_t line = 0;    // in the PTX
    std::uint32_t target = 0;  // of a branch: an instruction; of a call: an index of `calls`
    slot guard = 0;            // slot 0 is true
    /// compute: result and three operands. Accesses: elements, and then the address. Shuffle:
    /// result, value, lane, clamp, mask, and the predicate that says whether the lane was inside.
    /// Vote: result, predicate and, where a shuffle has it, the mask.
    std::array<slot, 6> at{};
    bool second_result = false;  // whether there is this predicate
    std::int64_t offset = 0;     // added to the address
    word (*compute)(word, word, word) = nullptr;
    std::uint32_t number = 0;  // unique in the process
    mutable bool ran = false;  // whether any thread has executed it
};

/// Values that are known only when a thread starts.
enum class own : std::uint8_t {
    tid_x,
    tid_y,
    tid_z,
    ntid_x,
    ntid_y,
    ntid_z,
    ctaid_x,
    ctaid_y,
    ctaid_z,
    nctaid_x,
    nctaid_y,
    nctaid_z,
    laneid,
    warpid,
    smid,
    nsmid,
    envreg1,
    envreg2,
    parameters,  // the address of the arguments, plus `offset`
    locals,      // the address of the parameters that it prepares for calls, plus `offset`
};
struct own_slot {
    slot at = 0;
    own what = own::tid_x;
    std::uint32_t offset = 0;
};

struct function;

struct call {
    struct copy {
        std::uint32_t from = 0, to = 0, bytes = 0;
    };
    const function* callee = nullptr;
    std::vector<copy> arguments{}, results{};  // of the caller's locals, and of the callee's parameters
};

struct function {
    std::string name{};
    bool entry = false;
    std::uint32_t line = 0, most_threads = 0;
    std::vector<instruction> code{};
    std::vector<text::location> sources{};  // of each instruction
    std::vector<call> calls{};
    std::vector<word> constants{};  // the first slots
    std::vector<own_slot> own{};    // the constants that differ from thread to thread
    slot slots = 0;
    struct parameter {
        std::uint32_t offset = 0, bytes = 0;
    };
    std::vector<parameter> parameters{};
    std::uint32_t parameter_bytes = 0, local_bytes = 0, shared_bytes = 0;
    /// The resources that a block needs: the bytes of named shared variables, and the registers of
    /// a thread, which only the assembler knows; see registers_of. 0: unknown.
    std::uint32_t shared_used = 0, registers = 0;
};

struct program {
    std::vector<std::unique_ptr<function>> functions{};
    std::vector<std::string> files{};
    std::string target{};

    [[nodiscard]] const function* find(std::string_view name) const;
    /// The instruction with this number, and its function; nulls for instructions of other
    /// programs.
    [[nodiscard]] std::pair<const function*, const instruction*> find(std::uint32_t number) const;
};

/// "KERNEL, PTX line N (FILE:LINE, inlined into FILE:LINE)", as far as the text has it.
[[nodiscard]] std::string describe(const program& p, const function& f, const instruction& i);

/// Registers of a thread, by the names of kernels, as `ptxas -v` reports them for this target
/// ("sm_90").
[[nodiscard]] std::map<std::string, std::uint32_t, std::less<>> registers_of(std::string_view report,
                                                                             std::string_view target);

/// Throws ptx::error.
[[nodiscard]] program decode(const text::module& m);
/// Everything that `decode` would refuse, each kind once: "unknown instruction
/// 'mma.sync.aligned...'".
[[nodiscard]] std::set<std::string> unknown_in(const text::module& m);

/// The beginning of shared memory. The system uses the memory below, as on devices of compute
/// capability 9.0.
inline constexpr std::uint32_t shared_begin = 1024;

}  // namespace ptx
