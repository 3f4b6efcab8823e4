// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Tests of the executor: the PTX that it knows and refuses, and its findings, on kernels of a few
// lines.
#include <algorithm>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>

#include "kernel.hpp"
#include "support/catch.hpp"

using ptx_test::small_kernel;

namespace {

/// The error that a kernel with this line causes.
ptx::error error_of(const std::string& line) {
    try {
        small_kernel k(line);
    } catch (const ptx::error& e) {
        return e;
    }
    FAIL("'" << line << "' was taken");
    throw std::logic_error("not reached");
}

/// words[thread] = %r9
const std::string keep = "mul.wide.u32 %rd7, %r1, 4;\nadd.s64 %rd7, %rd1, %rd7;\nst.global.u32 [%rd7], %r9;";

}  // namespace

TEST_CASE("an unknown instruction is an error with its line and its kernel", "[ptx]") {
    for (const char* line :
         {"tex.2d.v4.f32 %r3, %r4;", "add.sat.s32 %r3, %r4, %r5;", "ld.global.nc.u32 %r3, [%rd1];",
          "ld.acquire.u32 %r3, [%rd1];", "ld.release.gpu.u32 %r3, [%rd1];", "ld.weak.gpu.u32 %r3, [%rd1];",
          "st.acquire.gpu.u32 [%rd1], %r3;", "fence.proxy.async;", "atom.inc.u32 %r3, [%rd1], 1;",
          "vote.any.pred %p1, %p2;", "vote.sync.any.b32 %r3, %p2, -1;", "match.any.sync.b32 %r3, %r1, -1;",
          "redux.sync.add.s32 %r3, %r1, -1;", "bar.arrive 0, 64;", "cvt.rn.f16x2.f32 %r3, %f1, %f2;",
          "shfl.down.b32 %r3, %r1, 1, 31;", "red.global.inc.u32 [%rd1], 1;",
          "red.acquire.gpu.global.add.u32 [%rd1], 1;", "red.async.relaxed.cluster.global.add.u32 [%rd1], 1;"}) {
        const ptx::error e = error_of(line);
        INFO(line << ": " << e.what());
        CHECK(e.code() == ptx::problem::unknown_instruction);
        CHECK(e.line() == 15);
        CHECK(e.kernel() == "test");
    }
    CHECK(error_of("mov.u32 %r3, %clock;").code() == ptx::problem::unknown_name);
    CHECK(error_of("mov.u32 %r3, %r99;").code() == ptx::problem::unknown_name);
    CHECK(error_of("bra NOWHERE;").code() == ptx::problem::unknown_name);
    CHECK(error_of(".branchtargets A, B;").code() == ptx::problem::unknown_directive);
    CHECK(error_of("add.s32 %r3, %r4;").code() == ptx::problem::syntax);
    CHECK(error_of("bar.sync 0, 32;").code() == ptx::problem::unsupported_operand);
    CHECK(error_of("add.s32 3, %r4, %r5;").code() == ptx::problem::unsupported_operand);
    CHECK(error_of("selp.b32 %r3, %r4, %r5, !%p1;").code() == ptx::problem::unsupported_operand);
}

TEST_CASE("all that isn't known is counted, each kind once", "[ptx]") {
    const std::string text =
        ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry test()\n{\n.reg .b32 %r<4>;\n"
        "tex.2d.v4.f32 %r1, %r2;\nadd.s32 %r1, %r1, %r2;\ntex.2d.v4.f32 %r1, %r2;\nmov.u32 %r3, %clock;\nret;\n}\n";
    CHECK(ptx::unknown_in(ptx::text::parse(text)) ==
          std::set<std::string>{"unknown instruction 'tex.2d.v4.f32'", "nobody declares '%clock'"});
}

TEST_CASE("threads know who they are", "[ptx]") {
    small_kernel k(
        "mov.u32 %r3, %ntid.x;\nmad.lo.s32 %r4, %r2, %r3, %r1;\nmov.u32 %r9, %nctaid.x;\nmul.lo.s32 %r9, %r9, %r4;\n"
        "mul.wide.u32 %rd7, %r4, 4;\nadd.s64 %rd7, %rd1, %rd7;\nst.global.u32 [%rd7], %r9;");
    k.run({.blocks = {4, 1, 1}, .threads = {16, 1, 1}});
    for (std::uint32_t i = 0; i < 64; ++i) CHECK(k.words[i] == 4 * i);
}

TEST_CASE("guards, loops and calls", "[ptx]") {
    small_kernel k(
        "mov.u32 %r9, 0;\nmov.u32 %r3, 0;\n"
        "AGAIN: setp.gt.u32 %p1, %r3, %r1;\n@%p1 bra OUT;\nadd.s32 %r9, %r9, %r3;\nadd.s32 %r3, %r3, 1;\nbra.uni "
        "AGAIN;\n"
        "OUT: setp.eq.s32 %p2, %r1, 7;\n@!%p2 add.s32 %r9, %r9, 100;\n" +
        keep);
    k.run({.threads = {32, 1, 1}});
    for (std::uint32_t t = 0; t < 32; ++t) CHECK(k.words[t] == t * (t + 1) / 2 + (t == 7 ? 0 : 100));

    const std::string text =
        ".version 9.0\n.target sm_90\n.address_size 64\n"
        ".func (.param .b32 out) twice(.param .b32 a, .param .align 8 .b8 b[16])\n{\n.reg .b32 %r<4>;\n"
        "ld.param.u32 %r1, [a];\nld.param.u32 %r2, [b+8];\nadd.s32 %r3, %r1, %r2;\nst.param.b32 [out], %r3;\nret;\n}\n"
        ".visible .entry test(.param .u64 words)\n{\n.reg .b32 %r<4>;\n.reg .b64 %rd<2>;\nld.param.u64 %rd1, [words];\n"
        "mov.u32 %r1, 30;\nmov.u32 %r2, 12;\n{\n.param .b32 p0;\nst.param.b32 [p0], %r1;\n.param .align 8 .b8 p1[16];\n"
        "st.param.b32 [p1+8], %r2;\n.param .b32 back;\ncall.uni (back), twice, (p0, p1);\nld.param.b32 %r3, "
        "[back];\n}\n"
        "st.global.u32 [%rd1], %r3;\nret;\n}\n";
    const ptx::program p = ptx::decode(ptx::text::parse(text));
    ptx::machine m;
    std::uint32_t word = 0;
    const auto where = reinterpret_cast<std::uintptr_t>(&word);
    m.memory().add(where, sizeof word, ptx::contents::written);
    ptx::launch l{.of = &p, .kernel = p.find("test")};
    l.arguments.resize(8);
    std::memcpy(l.arguments.data(), &where, 8);
    const auto g = m.start(l);
    while (!g->over()) m.run(100);
    CHECK(word == 42);
}

TEST_CASE("registers come in parts", "[ptx]") {
    small_kernel k("mov.u32 %r3, 0x12345678;\nmov.b32 {%rs1, %rs2}, %r3;\nmov.b32 %r9, {%rs2, %rs1};\n" + keep);
    k.run();
    CHECK(k.words[0] == 0x56781234);
    small_kernel v(
        "mov.u32 %r3, 1;\nmov.u32 %r4, 2;\nst.global.v4.u32 [%rd1+16], {%r3, %r4, %r4, %r3};\n"
        "ld.global.v2.u32 {%r5, %r6}, [%rd1+24];\nsub.s32 %r9, %r5, %r6;\n" +
        keep);
    v.run();
    CHECK(v.words[4] == 1);
    CHECK(v.words[7] == 1);
    CHECK(v.words[0] == 1);
    small_kernel s("mov.u32 %r3, 0xff80;\nst.global.u16 [%rd1+8], %r3;\nld.global.s8 %r9, [%rd1+8];\n" + keep);
    s.run();
    CHECK(s.words[0] == 0xffff'ff80);
}

TEST_CASE("shuffles of every kind, with full and partial masks", "[ptx]") {
    const auto shuffle = [](const std::string& line, std::uint32_t threads) {
        small_kernel k(line + keep);
        k.run({.threads = {threads, 1, 1}});
        CHECK(k.found() == "");
        return k.words;
    };
    const auto down = shuffle("shfl.sync.down.b32 %r9|%p1, %r1, 4, 31, -1;\n@!%p1 add.s32 %r9, %r9, 100;\n", 32);
    const auto up = shuffle("shfl.sync.up.b32 %r9, %r1, 4, 0, -1;\n", 32);
    const auto across = shuffle("shfl.sync.bfly.b32 %r9, %r1, 5, 31, -1;\n", 32);
    const auto from = shuffle("shfl.sync.idx.b32 %r9, %r1, 3, 0x181f, -1;\n", 32);  // lane 3 of each eight lanes
    const auto part = shuffle("shfl.sync.down.b32 %r9, %r1, 1, 31, 0x1fff;\n", 13);
    for (std::uint32_t t = 0; t < 32; ++t) {
        CHECK(down[t] == (t + 4 < 32 ? t + 4 : t + 100));
        CHECK(up[t] == (t >= 4 ? t - 4 : t));
        CHECK(across[t] == (t ^ 5));
        CHECK(from[t] == (t & ~7U) + 3);
        if (t < 12) CHECK(part[t] == t + 1);
    }
    small_kernel alone("setp.gt.u32 %p1, %r1, 3;\n@%p1 bra DONE;\nshfl.sync.down.b32 %r9, %r1, 1, 31, -1;\nDONE:");
    CHECK_THROWS_WITH(alone.run({.threads = {32, 1, 1}}),
                      Catch::Contains("mask is over") || Catch::Contains("deadlock"));
    small_kernel other("shfl.sync.down.b32 %r9, %r1, 1, 31, 0xfffe;");
    CHECK_THROWS_WITH(other.run({.threads = {32, 1, 1}}), Catch::Contains("not a member of its own mask"));
}

TEST_CASE("votes of every kind, with full and partial masks", "[ptx]") {
    // The threads of the mask write the result of their vote to words[thread]. The words of other
    // threads stay as they were.
    const auto vote = [](const std::string& yes, const std::string& line, std::uint32_t mask) {
        small_kernel k("mov.u32 %r9, 77;\n" + yes + "\nmov.u32 %r3, " + std::to_string(mask) +
                       ";\nshr.u32 %r4, %r3, %r1;\nand.b32 %r4, %r4, 1;\nsetp.eq.s32 %p1, %r4, 0;\n@%p1 bra OUT;\n" +
                       line + "\nOUT:" + keep);
        k.run({.threads = {32, 1, 1}});
        CHECK(k.found() == "");
        return k.words;
    };
    const auto predicate = [](const std::string& mode, const std::string& of = "%p2") {
        return "vote.sync." + mode + ".pred %p3, " + of + ", %r3;\nselp.b32 %r9, 1, 0, %p3;";
    };
    const std::string below_8 = "setp.lt.u32 %p2, %r1, 8;", nobody = "setp.gt.u32 %p2, %r1, 99;";
    const auto check = [&](const std::string& yes, const std::string& line, std::uint32_t mask, std::uint32_t outcome) {
        const auto words = vote(yes, line, mask);
        INFO(line << ", mask " << mask);
        for (std::uint32_t t = 0; t < 32; ++t) CHECK(words[t] == ((mask >> t & 1) != 0 ? outcome : 77));
    };
    constexpr std::uint32_t all = ~0U, first = 0xff, some = 0x8181, last = 0xff00'0000;
    struct outcomes {
        std::uint32_t mask, every, any, same;
    };
    for (const auto& [mask, every, any, same] :
         {outcomes{all, 0, 1, 0}, outcomes{first, 1, 1, 1}, outcomes{some, 0, 1, 0}, outcomes{last, 0, 0, 1}}) {
        check(below_8, predicate("all"), mask, every);
        check(below_8, predicate("any"), mask, any);
        check(below_8, predicate("uni"), mask, same);
        check(below_8, "vote.sync.ballot.b32 %r9, %p2, %r3;", mask, mask & 0xff);
        check(below_8, "vote.sync.ballot.b32 %r9, !%p2, %r3;", mask, mask & ~0xffU);
        check(nobody, predicate("all", "!%p2"), mask, 1);
        check(nobody, predicate("any"), mask, 0);
    }
    small_kernel gone("setp.gt.u32 %p1, %r1, 3;\n@%p1 bra DONE;\nvote.sync.all.pred %p2, %p1, -1;\nDONE:");
    CHECK_THROWS_WITH(gone.run({.threads = {32, 1, 1}}),
                      Catch::Contains("mask is over") || Catch::Contains("deadlock"));
    small_kernel other("vote.sync.all.pred %p2, %p1, 0xfffe;");
    CHECK_THROWS_WITH(other.run({.threads = {32, 1, 1}}), Catch::Contains("not a member of its own mask"));
    small_kernel differ("shl.b32 %r3, %r1, 5;\nor.b32 %r3, %r3, 3;\nvote.sync.all.pred %p2, %p1, %r3;");
    CHECK_THROWS_WITH(differ.run({.threads = {32, 1, 1}}), Catch::Contains("masks differ"));
}

TEST_CASE("red is an atom without a result", "[ptx]") {
    small_kernel k(
        "red.global.add.u32 [%rd1], 2;\nred.relaxed.gpu.global.max.u32 [%rd1+4], %r1;\nmov.u64 %rd2, 3;\n"
        "red.release.sys.global.or.b64 [%rd1+8], %rd2;");
    k.run({.threads = {48, 1, 1}});
    CHECK(k.found() == "");
    CHECK(k.words[0] == 96);
    CHECK(k.words[1] == 47);
    CHECK(k.words[2] == 3);
    CHECK(k.machine().done().atomics == 3 * 48);
}

TEST_CASE("addresses are checked against memory that is there", "[ptx]") {
    const auto fault_of = [](const std::string& line) {
        small_kernel k(line);
        try {
            k.run();
        } catch (const ptx::fault& f) {
            return std::string(f.what());
        }
        return std::string();
    };
    CHECK_THAT(fault_of("st.global.u32 [%rd1+256], %r1;"),
               Catch::Contains("out of bounds") && Catch::Contains("PTX line 15"));
    CHECK_THAT(fault_of("ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%rd1+248];"), Catch::Contains("misaligned"));
    CHECK_THAT(fault_of("ld.global.u64 %rd2, [%rd1+252];"), Catch::Contains("misaligned"));
    CHECK_THAT(fault_of("ld.u32 %r3, [%rd1+-4];"), Catch::Contains("out of bounds"));
    CHECK_THAT(fault_of("st.shared.u32 [shared_words+256], %r1;"), Catch::Contains("shared memory"));
    CHECK_THAT(fault_of("mov.u32 %r3, 0;\nst.shared.u32 [%r3], %r1;"), Catch::Contains("shared memory"));
    CHECK_THAT(fault_of("mov.u64 %rd2, words;\nst.u64 [%rd2], %rd1;"), Catch::Contains("out of bounds"));
    CHECK_THAT(fault_of("trap;"), Catch::Contains("trap"));
    CHECK(fault_of("mov.b64 %rd2, words;\nld.param.u64 %rd3, [%rd2];\nst.global.u32 [%rd3+252], %r1;") == "");
}

TEST_CASE("reading what nobody wrote is found", "[ptx]") {
    small_kernel k("ld.global.u32 %r3, [%rd1+8];", {}, ptx::contents::unknown);
    k.run();
    CHECK_THAT(k.found(), Catch::Contains("unknown contents"));
    small_kernel written("st.global.u16 [%rd1+8], %r1;\nst.global.u16 [%rd1+10], %r1;\nld.global.u32 %r3, [%rd1+8];",
                         {}, ptx::contents::unknown);
    written.run();
    CHECK(written.found() == "");
    small_kernel shared("ld.shared.u32 %r3, [shared_words+4];");
    shared.run();
    CHECK_THAT(shared.found(), Catch::Contains("unknown contents"));
    const auto local = [](const std::string& store) {
        small_kernel own(".local .align 4 .b8 mine[16];\nmov.u64 %rd2, mine;\n" + store +
                         "\nld.local.u32 %r3, [%rd2+8];");
        own.run();
        return own.found();
    };
    CHECK_THAT(local("st.local.u16 [%rd2+8], %r1;"), Catch::Contains("unknown contents"));
    CHECK(local("st.local.u32 [%rd2+8], %r1;") == "");
    // Compilers copy an object of an empty class as a byte that was never written.
    CHECK(local("ld.local.u8 %r3, [%rd2+4];\nst.local.u32 [%rd2+8], %r1;") == "");
}

TEST_CASE("divergent barriers are found", "[ptx]") {
    small_kernel left("setp.gt.u32 %p1, %r1, 40;\n@%p1 bra DONE;\nbar.sync 0;\nDONE:");
    left.run({.threads = {64, 1, 1}});
    CHECK_THAT(left.found(), Catch::Contains("divergent barrier: a thread that is over"));
    const auto two = [](const std::string& barrier) {
        small_kernel k("setp.gt.u32 %p1, %r1, 20;\n@%p1 bra B;\n" + barrier + "\nbra DONE;\nB: " + barrier +
                       "\nDONE: " + barrier);
        k.run({.threads = {32, 1, 1}});
        return k.found();
    };
    CHECK_THAT(two("bar.sync 0;"), Catch::Contains("its warp is at another one"));
    CHECK(two("barrier.sync 0;") == "");
    small_kernel numbers("setp.gt.u32 %p1, %r1, 31;\n@%p1 bra B;\nbar.sync 1;\nbra DONE;\nB: bar.sync 2;\nDONE:");
    CHECK_THROWS_WITH(numbers.run({.threads = {64, 1, 1}}), Catch::Contains("deadlock") &&
                                                                Catch::Contains("at a barrier in test, PTX line 17") &&
                                                                Catch::Contains(": 32"));
}

TEST_CASE("only resident blocks run", "[ptx]") {
    // The block with the highest number raises the flag that all others wait for.
    const std::string wait =
        "mov.u32 %r3, %nctaid.x;\nsub.u32 %r3, %r3, 1;\nsetp.ne.s32 %p1, %r2, %r3;\n@%p1 bra WAIT;\n"
        "st.release.gpu.u32 [%rd1], 1;\nWAIT: ld.acquire.gpu.u32 %r4, [%rd1];\nsetp.eq.s32 %p2, %r4, 0;\n"
        "@!%p2 bra DONE;\nnanosleep.u32 100;\nmov.u64 %rd2, %globaltimer;\nsetp.lt.u64 %p3, %rd2, 1000000;\n"
        "@%p3 bra WAIT;\nst.release.gpu.u32 [%rd1+4], 1;\nDONE:";
    small_kernel fits(wait, {.blocks_per_sm = 2});
    fits.run({.blocks = {4, 1, 1}, .sms = {0, 1}});
    CHECK(fits.words[1] == 0);
    small_kernel too_many(wait, {.blocks_per_sm = 2});
    too_many.run({.blocks = {5, 1, 1}, .sms = {0, 1}});
    CHECK(too_many.words[1] == 1);  // the threads gave up after a millisecond of virtual time
    CHECK_THROWS_AS(too_many.start({.blocks = {5, 1, 1}, .cooperative = true, .sms = {0, 1}}), std::invalid_argument);
    CHECK_THROWS_AS(too_many.start({.threads = {1025, 1, 1}}), std::invalid_argument);
    CHECK(too_many.machine().resident_blocks(too_many.kernel(), 1024) == 2);
    CHECK(too_many.machine().resident_blocks(too_many.kernel(), 1) == 2);
}

namespace {

/// A grid of one thread and a grid of two threads. Each writes the other grid's flag and waits for
/// its own. Returns the machine's report if a grid doesn't end.
std::string meet(ptx::machine_options o, const ptx::launch& first, const ptx::launch& second) {
    small_kernel k(
        "mov.u32 %r3, %ntid.x;\nsub.u32 %r3, %r3, 1;\nmul.wide.u32 %rd2, %r3, 4;\nadd.s64 %rd2, %rd1, %rd2;\n"
        "xor.b32 %r3, %r3, 1;\nmul.wide.u32 %rd3, %r3, 4;\nadd.s64 %rd3, %rd1, %rd3;\n"
        "st.relaxed.gpu.u32 [%rd3], 1;\n"
        "WAIT: ld.acquire.gpu.u32 %r4, [%rd2];\nsetp.eq.s32 %p1, %r4, 0;\n@%p1 nanosleep.u32 20;\n@%p1 bra WAIT;",
        o);
    try {
        k.start(first);
        k.run(second);
    } catch (const ptx::fault& f) {
        return f.what();
    }
    CHECK(k.found() == "");
    return "";
}

}  // namespace

TEST_CASE("kernels that wait for each other may be a deadlock, unless they are one launch or cooperative", "[ptx]") {
    const ptx::launch one{.threads = {1, 1, 1}}, two{.threads = {2, 1, 1}};
    CHECK(meet({}, one, two) == "");
    const std::string found = meet({.who = ptx::turns::adversarial}, one, two);
    CHECK_THAT(found, Catch::Contains("deadlock") && Catch::Contains("block 0 ") &&
                          Catch::Contains(" in test, PTX line") &&
                          Catch::Contains("test: blocks that may have to wait for earlier kernels of their device: 1"));
    std::set<bool> outcomes;
    for (std::uint64_t seed = 1; seed <= 16; ++seed)
        outcomes.insert(meet({.seed = seed, .who = ptx::turns::shuffled}, one, two).empty());
    CHECK(outcomes.size() == 2);

    ptx::launch together = two, elsewhere = two;
    together.cooperative = true;
    elsewhere.device = 1;
    CHECK(meet({.who = ptx::turns::adversarial}, one, together) == "");
    // The scope of the flags doesn't include another device, but a kernel there runs nevertheless.
    small_kernel apart("st.relaxed.sys.u32 [%rd1], 1;", {.who = ptx::turns::adversarial});
    apart.start(one);
    apart.run(elsewhere);
    CHECK(apart.found() == "");
}

TEST_CASE("a kernel that waits for nobody, or for a time, or for the host, is no deadlock for the one behind it",
          "[ptx]") {
    // 5000 strong loads, each beside a look at the clock; 50'000 weak and strong loads; 50'000
    // turns without a load.
    for (const std::string body :
         {"mov.u32 %r3, 0;\nAGAIN: ld.relaxed.gpu.u32 %r4, [%rd1];\nmov.u64 %rd2, %globaltimer;\nadd.u32 %r3, %r3, 1;\n"
          "setp.lt.u32 %p1, %r3, 5000;\n@%p1 bra AGAIN;",
          "mov.u32 %r3, 0;\nAGAIN: ld.global.u32 %r4, [%rd1];\nld.relaxed.gpu.u32 %r4, [%rd1];\nadd.u32 %r3, %r3, 1;\n"
          "setp.lt.u32 %p1, %r3, 50000;\n@%p1 bra AGAIN;",
          "mov.u32 %r3, 0;\nAGAIN: add.u32 %r3, %r3, 1;\nsetp.lt.u32 %p1, %r3, 50000;\n@%p1 bra AGAIN;"}) {
        small_kernel k(body, {.who = ptx::turns::adversarial});
        k.start();
        CHECK_NOTHROW(k.run());
    }
    small_kernel waits("WAIT: ld.relaxed.sys.u32 %r4, [%rd1];\nsetp.eq.s32 %p1, %r4, 0;\n@%p1 bra WAIT;",
                       {.who = ptx::turns::adversarial});
    const auto where = reinterpret_cast<std::uintptr_t>(waits.words.data());
    waits.machine().memory().add(where, sizeof waits.words, ptx::contents::written, ptx::of_host);
    waits.start();
    waits.start();
    CHECK_NOTHROW(waits.machine().run(500'000));
    waits.words[0] = 1;
    while (waits.machine().busy()) waits.machine().run(10'000);
}

TEST_CASE("blocks need registers and shared memory", "[ptx]") {
    small_kernel k("ld.shared.u32 %r3, [shared_words];", {.blocks_per_sm = 32});
    CHECK(k.kernel().shared_used == 256);
    CHECK(k.machine().resident_blocks(k.kernel(), 256) == 8);
    k.kernel().registers = 40;
    CHECK(k.machine().resident_blocks(k.kernel(), 256) == 6);  // 8 warps of 1280
    k.kernel().registers = 255;
    CHECK(k.machine().resident_blocks(k.kernel(), 512) == 0);
    CHECK_THROWS_AS(k.start({.threads = {512, 1, 1}}), std::invalid_argument);
    k.kernel().registers = 0;
    CHECK(k.machine().resident_blocks(k.kernel(), 32, 100 << 10) == 2);
    CHECK_THROWS_AS(k.start({.blocks = {3, 1, 1}, .dynamic_shared = 100 << 10, .cooperative = true}),
                    std::invalid_argument);

    const auto registers = ptx::registers_of(
        "ptxas info    : Compiling entry function 'one' for 'sm_80'\nptxas info    : Used 7 registers\n"
        "ptxas info    : Compiling entry function 'one' for 'sm_90'\nptxas info    : Function properties for one\n"
        "ptxas info    : Used 42 registers, used 1 barriers\n"
        "ptxas info    : Compiling entry function 'two' for 'sm_90'\n",
        "sm_90");
    CHECK(registers.size() == 1);
    CHECK(registers.at("one") == 42);
}

TEST_CASE("the same seed is the same run, and another one another", "[ptx]") {
    // The order in which threads add.
    const std::string body = "atom.add.relaxed.gpu.u32 %r9, [%rd1+252], 1;\n" + keep;
    const auto order = [&](std::uint64_t seed, ptx::turns who) {
        small_kernel k(body, {.seed = seed, .who = who});
        k.run({.threads = {48, 1, 1}});
        CHECK(k.words[63] == 48);
        return k.words;
    };
    CHECK(order(1, ptx::turns::shuffled) == order(1, ptx::turns::shuffled));
    CHECK(order(1, ptx::turns::shuffled) != order(2, ptx::turns::shuffled));
    CHECK(order(3, ptx::turns::adversarial) == order(3, ptx::turns::adversarial));
    CHECK(order(1, ptx::turns::fair) == order(2, ptx::turns::fair));
}

TEST_CASE("time passes while all sleep", "[ptx]") {
    small_kernel k(
        "mov.u64 %rd2, %globaltimer;\nnanosleep.u32 5000;\nmov.u64 %rd3, %globaltimer;\nsub.s64 %rd3, %rd3, %rd2;\n"
        "cvt.u32.u64 %r9, %rd3;\n" +
        keep);
    k.run();
    CHECK(k.words[0] >= 5000);
    CHECK(k.words[0] < 5100);
    CHECK(k.machine().done().sleeps == 1);
}

TEST_CASE("a report names the source line where the text has it", "[ptx]") {
    small_kernel k(".loc 1 35 7\nst.global.u32 [%rd1], %r1;");
    k.run({.threads = {2, 1, 1}});
    CHECK_THAT(k.found(), Catch::Contains("race"));
    const std::string text =
        ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry test()\n{\n.loc 1 35 7\ntrap;\n}\n"
        ".file 1 \"somewhere.cu\"\n";
    const ptx::program p = ptx::decode(ptx::text::parse(text));
    ptx::machine m;
    const auto g = m.start({.of = &p, .kernel = p.find("test")});
    CHECK_THROWS_WITH(m.run(10), Catch::Contains("PTX line 7 (somewhere.cu:35)"));
    CHECK(g->stopped());
}

TEST_CASE("a report names where code was inlined", "[ptx]") {
    const std::string text =
        ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry test()\n{\n.loc 1 8 1\n"
        ".loc 2 35 7, function_name $L__info0, inlined_at 1 8 3\n.loc 1 4 7, function_name $L__info1+5, inlined_at 2 "
        "35 9\n"
        "trap;\n}\n.file 1 \"a.cu\"\n.file 2 \"b.hpp\"\n";
    const ptx::program p = ptx::decode(ptx::text::parse(text));
    CHECK_THAT(ptx::describe(p, *p.functions[0], p.functions[0]->code[0]),
               Catch::Contains("PTX line 9 (a.cu:4, inlined into b.hpp:35, inlined into a.cu:8)"));
}
