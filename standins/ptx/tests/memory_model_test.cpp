// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// The memory model by its litmus tests: which threads may see another thread's writes (PTX ISA,
// chapter 8). In each test block 0 writes words[0] and raises a flag, words[16], and block 1 waits
// for the flag and reads words[0]. A correct program has no race under any seed; the same program
// with one modifier missing has one.
#include <string>

#include "kernel.hpp"
#include "support/catch.hpp"
#include "support/sanitizers.hpp"

namespace {

using ptx_test::small_kernel;

struct message {
    std::string store = "st.release.gpu.u32 [%rd1+64], %r5;", load = "ld.acquire.gpu.u32 %r6, [%rd1+64];";
    std::string before_store{}, after_load{};
};

/// Threads 0 of two blocks.
std::string pass(const message& m) {
    return "setp.ne.s32 %p1, %r1, 0;\n@%p1 bra DONE;\n"
           "mov.u32 %r5, 1;\nsetp.ne.s32 %p2, %r2, 0;\n@%p2 bra RECEIVE;\n"
           "mov.u32 %r4, 42;\nst.global.u32 [%rd1], %r4;\n" +
           m.before_store + "\n" + m.store + "\nbra DONE;\n" + "RECEIVE: " + m.load +
           "\nsetp.eq.s32 %p3, %r6, 0;\n@%p3 bra RECEIVE;\n" + m.after_load +
           "\nld.global.u32 %r7, [%rd1];\nst.global.u32 [%rd1+128], %r7;\nDONE:";
}

/// Returns the races found with any of eight seeds.
std::string races(const std::string& body) {
    std::string found;
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
        small_kernel k(body, {.seed = seed, .who = ptx::turns::adversarial});
        k.run({.blocks = {2, 1, 1}});
        if (!k.found().empty()) found = k.found();
        CHECK(k.words[32] == 42);  // the executor itself runs in one order: only the detector tells
    }
    return found;
}

}  // namespace

TEST_CASE("an acquire sees the writes before the release", "[ptx]") {
    CHECK(races(pass({})) == "");
    CHECK(races(pass({.store = "st.release.sys.u32 [%rd1+64], %r5;"})) == "");
    CHECK(races(pass({.store = "atom.add.release.gpu.u32 %r8, [%rd1+64], %r5;"})) == "");
    CHECK(races(pass({.load = "atom.add.acquire.gpu.u32 %r6, [%rd1+64], 0;"})) == "");
    CHECK(races(pass({.store = "atom.exch.acq_rel.sys.b32 %r8, [%rd1+64], %r5;"})) == "");
}

TEST_CASE("a weakened side is a race, and the report says where", "[ptx]") {
    const std::string relaxed_store = races(pass({.store = "st.relaxed.gpu.u32 [%rd1+64], %r5;"}));
    CHECK_THAT(relaxed_store, Catch::Contains("race: with a write by block 0") &&
                                  Catch::Contains("in test, PTX line 21") &&
                                  Catch::Contains("read by: block 1, thread 0, in test, PTX line"));
    CHECK(races(pass({.load = "ld.relaxed.gpu.u32 %r6, [%rd1+64];"})) != "");
    CHECK(races(pass({.store = "atom.add.relaxed.gpu.u32 %r8, [%rd1+64], %r5;"})) != "");
}

TEST_CASE("a flag that isn't atomic is a race itself", "[ptx]") {
    CHECK(races(pass({.store = "st.global.u32 [%rd1+64], %r5;"})) != "");
}

TEST_CASE("a scope must include the other thread", "[ptx]") {
    CHECK(races(pass({.store = "st.release.cta.u32 [%rd1+64], %r5;"})) != "");
    CHECK(races(pass({.load = "ld.acquire.cta.u32 %r6, [%rd1+64];"})) != "");
}

TEST_CASE("fences make a release of later stores and an acquire of earlier loads", "[ptx]") {
    message m{.store = "st.relaxed.gpu.u32 [%rd1+64], %r5;",
              .load = "ld.relaxed.gpu.u32 %r6, [%rd1+64];",
              .before_store = "fence.acq_rel.gpu;",
              .after_load = "fence.acq_rel.gpu;"};
    CHECK(races(pass(m)) == "");
    m.before_store = "membar.gl;";
    CHECK(races(pass(m)) == "");
    m.before_store = "fence.acq_rel.cta;";
    CHECK(races(pass(m)) != "");
    m.before_store = "fence.sc.sys;";
    m.after_load = "";
    CHECK(races(pass(m)) != "");
}

namespace {

/// Block 0 passes the message to block 1, and block 1 passes it to block 2. Each of the two steps
/// has its own flag: words[16] and words[17].
std::string relay(const std::string& on) {
    return "setp.ne.s32 %p1, %r1, 0;\n@%p1 bra DONE;\nmov.u32 %r5, 1;\n"
           "setp.eq.s32 %p2, %r2, 1;\n@%p2 bra MIDDLE;\nsetp.eq.s32 %p2, %r2, 2;\n@%p2 bra LAST;\n"
           "mov.u32 %r4, 42;\nst.global.u32 [%rd1], %r4;\nst.release.gpu.u32 [%rd1+64], %r5;\nbra DONE;\n"
           "MIDDLE: ld.acquire.gpu.u32 %r6, [%rd1+64];\nsetp.eq.s32 %p3, %r6, 0;\n@%p3 bra MIDDLE;\n" +
           on +
           "\nbra DONE;\n"
           "LAST: ld.acquire.gpu.u32 %r6, [%rd1+68];\nsetp.eq.s32 %p3, %r6, 0;\n@%p3 bra LAST;\n"
           "ld.global.u32 %r7, [%rd1];\nDONE:";
}

std::string races_of_three(const std::string& body, std::uint32_t threads = 1) {
    std::string found;
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
        small_kernel k(body, {.seed = seed, .who = ptx::turns::shuffled});
        k.run({.blocks = {3, 1, 1}, .threads = {threads, 1, 1}});
        if (!k.found().empty()) found = k.found();
    }
    return found;
}

}  // namespace

TEST_CASE("a release passes on the writes that its thread has acquired", "[ptx]") {
    CHECK(races_of_three(relay("st.release.gpu.u32 [%rd1+68], %r5;")) == "");
    CHECK(races_of_three(relay("st.relaxed.gpu.u32 [%rd1+68], %r5;")) != "");
}

TEST_CASE("read-modify-writes pass a release on, stores end it", "[ptx]") {
    // Block 1 adds to the flag that block 0 released, and block 2 waits for the sum.
    const auto counted = [](const std::string& middle) {
        return "setp.ne.s32 %p1, %r1, 0;\n@%p1 bra DONE;\nmov.u32 %r5, 1;\n"
               "setp.eq.s32 %p2, %r2, 1;\n@%p2 bra MIDDLE;\nsetp.eq.s32 %p2, %r2, 2;\n@%p2 bra LAST;\n"
               "mov.u32 %r4, 42;\nst.global.u32 [%rd1], %r4;\natom.add.release.gpu.u32 %r8, [%rd1+64], %r5;\nbra "
               "DONE;\n"
               "MIDDLE: ld.relaxed.gpu.u32 %r6, [%rd1+64];\nsetp.eq.s32 %p3, %r6, 0;\n@%p3 bra MIDDLE;\n" +
               middle +
               "\nbra DONE;\n"
               "LAST: ld.acquire.gpu.u32 %r6, [%rd1+64];\nsetp.lt.u32 %p3, %r6, 2;\n@%p3 bra LAST;\n"
               "ld.global.u32 %r7, [%rd1];\nDONE:";
    };
    CHECK(races_of_three(counted("atom.add.relaxed.gpu.u32 %r8, [%rd1+64], %r5;")) == "");
    CHECK(races_of_three(counted("mov.u32 %r9, 2;\nst.relaxed.gpu.u32 [%rd1+64], %r9;")) != "");
}

TEST_CASE("threads of a block see each other's writes behind a barrier, and not before", "[ptx]") {
    // Each of 64 threads writes a word of shared memory and reads its neighbour's.
    const auto neighbours = [](const std::string& between) {
        return "mov.u32 %r3, shared_words;\nshl.b32 %r4, %r1, 2;\nadd.u32 %r4, %r4, %r3;\nst.shared.u32 [%r4], %r1;\n" +
               between +
               "\nadd.u32 %r5, %r1, 1;\nand.b32 %r5, %r5, 63;\nshl.b32 %r5, %r5, 2;\nadd.u32 %r5, %r5, %r3;\n"
               "ld.shared.u32 %r6, [%r5];\nshl.b32 %r7, %r1, 2;\ncvt.u64.u32 %rd2, %r7;\nadd.s64 %rd2, %rd1, %rd2;\n"
               "st.global.u32 [%rd2], %r6;";
    };
    small_kernel with(neighbours("bar.sync 0;"));
    with.run({.threads = {64, 1, 1}});
    CHECK(with.found() == "");
    for (std::uint32_t t = 0; t < 64; ++t) CHECK(with.words[t] == (t + 1) % 64);
    small_kernel without(neighbours(""));
    without.run({.threads = {64, 1, 1}});
    CHECK_THAT(without.found(), Catch::Contains("race"));
}

TEST_CASE("a barrier and a release make what a whole block wrote visible to another block", "[ptx]") {
    // 32 threads of block 0 write; thread 0 releases behind the barrier; thread 5 of block 1 reads
    // what thread 7 wrote.
    const auto cumulative = [](const std::string& barrier) {
        return "setp.ne.s32 %p2, %r2, 0;\n@%p2 bra RECEIVE;\nshl.b32 %r4, %r1, 2;\ncvt.u64.u32 %rd2, %r4;\n"
               "add.s64 %rd2, %rd1, %rd2;\nst.global.u16 [%rd2], %r1;\n" +
               barrier +
               "\nsetp.ne.s32 %p1, %r1, 0;\n@%p1 bra DONE;\nmov.u32 %r5, 1;\nst.release.gpu.u32 [%rd1+192], %r5;\nbra "
               "DONE;\n"
               "RECEIVE: setp.ne.s32 %p1, %r1, 0;\n@%p1 bra MEET;\nWAIT: ld.acquire.gpu.u32 %r6, [%rd1+192];\n"
               "setp.eq.s32 %p3, %r6, 0;\n@%p3 bra WAIT;\nMEET: bar.sync 0;\nld.global.u16 %rs1, [%rd1+28];\nDONE:";
    };
    CHECK(races_of_three(cumulative("bar.sync 0;"), 32) == "");
    CHECK(races_of_three(cumulative(""), 32) != "");
}

TEST_CASE("shuffles order nothing, bar.warp.sync does", "[ptx]") {
    const auto by = [](const std::string& meeting) {
        return "mov.u32 %r3, shared_words;\nsetp.ne.s32 %p1, %r1, 0;\n@%p1 bra MEET;\nst.shared.u32 [%r3], "
               "%r1;\nMEET: " +
               meeting + "\nld.shared.u32 %r6, [%r3];";
    };
    small_kernel shuffled(by("shfl.sync.down.b32 %r5, %r1, 1, 31, -1;"));
    shuffled.run({.threads = {32, 1, 1}});
    CHECK_THAT(shuffled.found(), Catch::Contains("race"));
    small_kernel met(by("bar.warp.sync 0xffffffff;"));
    met.run({.threads = {32, 1, 1}});
    CHECK(met.found() == "");
}

TEST_CASE("kernels that run at the same time race, those one after the other don't", "[ptx]") {
    const std::string write = "st.global.u32 [%rd1], %r1;";
    small_kernel after(write);
    after.run();
    after.run();
    CHECK(after.found() == "");
    small_kernel together(write);
    together.start();
    together.run();
    CHECK_THAT(together.found(), Catch::Contains("race"));
}

TEST_CASE("a copy races with a kernel that nothing orders it against", "[ptx]") {
    const std::string store = "setp.ne.s32 %p1, %r1, 0;\n@%p1 st.global.u32 [%rd1], %r1;";
    const std::string load = "setp.ne.s32 %p1, %r1, 0;\n@%p1 ld.global.u32 %r3, [%rd1];";
    enum { nothing, its_end, the_copy_first };
    for (const std::string& body : {store, load})
        for (const bool from : {false, true})
            for (const auto order : {nothing, its_end, the_copy_first}) {
                small_kernel k(body);
                std::uint32_t mine = 0;
                const auto here = reinterpret_cast<std::uintptr_t>(&mine),
                           there = reinterpret_cast<std::uintptr_t>(&k.words);
                ptx::transfer t{.from = from ? there : here, .to = from ? here : there, .size = sizeof mine};
                t.after = std::make_shared<ptx::view>();
                ptx::launch l{.threads = {2, 1, 1}, .after = t.after};
                if (order == the_copy_first) l.after = k.machine().pass(t);
                const auto grid = k.start(l);
                while (!grid->over()) k.machine().run(100);
                if (order == its_end) t.after = grid->end();
                if (order != the_copy_first) (void)k.machine().pass(t);
                CAPTURE(body, from, static_cast<int>(order));
                const bool both_read = body == load && from;
                CHECK((k.found().find("race: with a") != std::string::npos) == (order == nothing && !both_read));
                CHECK((k.found().find("a copy or memset on device 0") != std::string::npos) ==
                      (order == nothing && !both_read));
            }
}

TEST_CASE("a kernel is told that it races with a copy that came before", "[ptx]") {
    small_kernel k("st.global.u32 [%rd1], %r1;");
    const auto there = reinterpret_cast<std::uintptr_t>(&k.words), nobody = std::uintptr_t{0};
    const auto start = std::make_shared<ptx::view>();
    (void)k.machine().pass({.from = there, .to = nobody, .size = 4, .after = start});
    k.run({.after = start});
    CHECK_THAT(k.found(),
               Catch::Contains("race: with a read by a copy or memset; written by: block 0, thread 0, in test"));
}

TEST_CASE("a copy of much is one access to whole pages, and to each word of the others", "[ptx]") {
    constexpr std::size_t page = 4096;
    const ptx::block_clock first{.number = 1}, second{.number = 2};
    const auto start = std::make_shared<ptx::view>();
    const ptx::actor one{.id = 1U << ptx::threads_bits, .block = &first, .seen = start};
    const ptx::actor two{.id = 2U << ptx::threads_bits, .block = &second, .seen = start};
    ptx::ended_blocks ended;
    ended.begin(1, 0);
    ended.begin(2, 0);
    for (const std::size_t at : {std::size_t{100}, page, page + 400, 3 * page - 4, 3 * page + 96}) {
        ptx::area a(0, 3 * page + 100, ptx::contents::unknown);
        CHECK_FALSE(a.touch_all(100, 3 * page, {.by = one, .writes = true}, ended));
        CHECK_FALSE(a.known(96, 4));
        CHECK(a.known(100, 3 * page));
        CHECK_FALSE(a.touch(96, 4, {.by = two, .writes = true}, ended));
        CHECK(a.touch(at, 4, {.by = two}, ended));  // a read of the words that the copy wrote
        CHECK(a.touch_all(100, 3 * page, {.by = one, .writes = true}, ended));        // a copy over them
        CHECK_FALSE(a.touch_all(100, 3 * page, {.by = one, .writes = true}, ended));  // only that copy counts now
        CHECK(a.touch_all(0, 3 * page + 100, {.by = two}, ended));
        CHECK(a.touch(at, 4, {.by = one, .writes = true}, ended));
    }
}

TEST_CASE("devices are beyond the scope .gpu", "[ptx]") {
    // Both devices add to one counter. With .sys this is correct, with .gpu it is a race.
    for (const bool far : {false, true})
        for (const std::string scope : {"gpu", "sys"}) {
            small_kernel k("atom.add.relaxed." + scope + ".u32 %r3, [%rd1], 1;");
            k.start({.device = 0});
            k.run({.device = far ? 1 : 0});
            CHECK(k.words[0] == 2);
            CHECK((k.found() == "") == (!far || scope == "sys"));
        }
}

TEST_CASE("without native atomics only a device's own memory can be updated by all", "[ptx]") {
    for (const int owner : {0, 1, ptx::of_host})
        for (const bool native : {false, true})
            for (const std::string what :
                 {"atom.add.relaxed.sys.u32 %r3, [%rd1], 1;", "red.relaxed.sys.add.u32 [%rd1], 1;",
                  "atom.add.relaxed.gpu.u32 %r3, [%rd1], 1;", "st.relaxed.sys.u32 [%rd1], 1;"}) {
                small_kernel k(what, {.native_atomics = native});
                const auto where = reinterpret_cast<std::uintptr_t>(k.words.data());
                k.machine().memory().add(where, sizeof k.words, ptx::contents::written, owner);
                k.run({.device = 1});
                CAPTURE(owner, native, what);
                const bool needed = owner != 1 && what.find(".sys") != std::string::npos && !what.starts_with("st");
                CHECK((k.found().find("no native atomics: memory of " +
                                      std::string(owner == ptx::of_host ? "the host" : "another device")) !=
                       std::string::npos) == (needed && !native));
                if (!needed || native) CHECK(k.found() == "");
            }
}

TEST_CASE("bytes of one word belong to different threads", "[ptx]") {
    small_kernel k("cvt.u64.u32 %rd2, %r1;\nadd.s64 %rd2, %rd1, %rd2;\nst.global.u8 [%rd2], %r1;");
    k.run({.threads = {64, 1, 1}});
    CHECK(k.found() == "");
    CHECK(k.words[1] == 0x07060504);
    small_kernel same(
        "shr.u32 %r3, %r1, 1;\ncvt.u64.u32 %rd2, %r3;\nadd.s64 %rd2, %rd1, %rd2;\nst.global.u8 [%rd2], %r1;");
    same.run({.threads = {64, 1, 1}});
    CHECK_THAT(same.found(), Catch::Contains("race"));
}

// ---- weak memory: what others see later, and in another order

namespace {

/// Keeps a thread running until other threads can see its stores.
const std::string linger =
    "\nmov.u32 %r8, 0;\nLINGER: add.u32 %r8, %r8, 1;\nsetp.lt.u32 %p4, %r8, 2000;\n@%p4 bra LINGER;\n";

/// Thread 0 of each of two blocks stores to its own word and then reads the other block's word.
/// Returns how often neither thread saw the other's store.
int neither_saw(const std::string& between, bool weak) {
    int neither = 0;
    for (std::uint64_t seed = 1; seed <= support::few(200U); ++seed) {
        small_kernel k(
            "mov.u32 %r5, 1;\nshl.b32 %r4, %r2, 2;\ncvt.u64.u32 %rd2, %r4;\nadd.s64 %rd2, %rd1, %rd2;\n"
            "xor.b32 %r4, %r4, 4;\ncvt.u64.u32 %rd3, %r4;\nadd.s64 %rd3, %rd1, %rd3;\n"
            "st.relaxed.sys.u32 [%rd2], %r5;\n" +
                between + "\nld.relaxed.sys.u32 %r6, [%rd3];\nst.global.u32 [%rd2+64], %r6;" + linger,
            {.seed = seed, .who = ptx::turns::shuffled, .weak_memory = weak});
        k.run({.blocks = {2, 1, 1}});
        CHECK(k.words[0] == 1);  // at the end, all stores are visible
        CHECK(k.words[1] == 1);
        neither += k.words[16] == 0 && k.words[17] == 0 ? 1 : 0;
    }
    return neither;
}

/// Block 0 stores two words, and block 1 loads them in the other order. Returns how often block 1
/// saw the second store without the first.
int second_before_first(const std::string& between, const std::string& second, bool weak,
                        const std::string& look = "ld.acquire.sys.u32", const std::string& behind = "") {
    int seen = 0;
    for (std::uint64_t seed = 1; seed <= support::few(200U); ++seed) {
        small_kernel k("mov.u32 %r5, 1;\nsetp.ne.s32 %p2, %r2, 0;\n@%p2 bra LOOK;\nst.relaxed.sys.u32 [%rd1], %r5;\n" +
                           between + "\n" + second + " [%rd1+4], %r5;" + linger + "bra DONE;\nLOOK: " + look +
                           " %r6, [%rd1+4];\nsetp.eq.s32 %p3, %r6, 0;\n@%p3 bra LOOK;\n" + behind +
                           "\nld.relaxed.sys.u32 %r7, [%rd1];\nst.global.u32 [%rd1+64], %r7;\nDONE:",
                       {.seed = seed, .who = ptx::turns::shuffled, .weak_memory = weak});
        k.run({.blocks = {2, 1, 1}});
        seen += k.words[16] == 0 ? 1 : 0;
    }
    return seen;
}

}  // namespace

TEST_CASE("under weak memory a store may be seen behind a later load, but not behind fence.sc", "[ptx]") {
    CHECK(neither_saw("", false) == 0);
    CHECK(neither_saw("", true) > 0);
    CHECK(neither_saw("fence.acq_rel.sys;", true) > 0);
    CHECK(neither_saw("fence.sc.sys;", true) == 0);
}

TEST_CASE("under weak memory stores overtake each other, unless the second releases or a fence is between", "[ptx]") {
    CHECK(second_before_first("", "st.relaxed.sys.u32", false) == 0);
    CHECK(second_before_first("", "st.relaxed.sys.u32", true) > 0);
    CHECK(second_before_first("", "st.release.sys.u32", true) == 0);
    CHECK(second_before_first("fence.acq_rel.sys;", "st.relaxed.sys.u32", true) == 0);
}

TEST_CASE("under weak memory a load finds what was there before, unless it is ordered behind the store", "[ptx]") {
    const std::string store = "st.release.sys.u32";
    CHECK(second_before_first("", store, true, "ld.relaxed.sys.u32") > 0);
    CHECK(second_before_first("", store, false, "ld.relaxed.sys.u32") == 0);
    CHECK(second_before_first("", store, true, "ld.relaxed.sys.u32", "fence.acq_rel.sys;") == 0);
    CHECK(second_before_first("", store, true, "ld.acquire.sys.u32") == 0);
    // After a barrier, other threads of the block don't see older values than the thread has read.
    CHECK(second_before_first("", store, true, "ld.acquire.sys.u32", "bar.sync 0;") == 0);
}

namespace {

/// Block 2 stores words[0] at once. Much later, block 0 runs `release`, which raises the flag
/// words[1], for which block 1 waits. Returns how often block 1 then found the old value of
/// words[0], although block 0 had found the new value or, depending on `release`, hadn't looked.
int old_behind_release(const std::string& release) {
    int old = 0;
    for (std::uint64_t seed = 1; seed <= support::few(200U); ++seed) {
        small_kernel k(
            "mov.u32 %r5, 1;\nmov.u32 %r6, 1;\nsetp.eq.u32 %p2, %r2, 1;\n@%p2 bra LOOK;\n"
            "setp.eq.u32 %p2, %r2, 0;\n@%p2 bra RELEASE;\nst.relaxed.sys.u32 [%rd1], %r5;\nbra LINGER;\n"
            "RELEASE: mov.u32 %r8, 0;\nLATER: add.u32 %r8, %r8, 1;\nsetp.lt.u32 %p4, %r8, 2000;\n"
            "@%p4 bra LATER;\n" +
                release + "\nst.global.u32 [%rd1+64], %r6;" + linger +
                "bra DONE;\nLOOK: ld.acquire.sys.u32 %r6, [%rd1+4];\nsetp.eq.s32 %p3, %r6, 0;\n"
                "@%p3 bra LOOK;\nld.relaxed.sys.u32 %r7, [%rd1];\nst.global.u32 [%rd1+68], %r7;\nDONE:",
            {.seed = seed, .who = ptx::turns::shuffled, .weak_memory = true});
        k.run({.blocks = {3, 1, 1}});
        old += k.words[16] == 1 && k.words[17] == 0 ? 1 : 0;
    }
    return old;
}

}  // namespace

TEST_CASE("a release has what its thread had seen and done by then, and nothing else", "[ptx]") {
    const std::string look = "ld.relaxed.sys.u32 %r6, [%rd1];\n", release = "st.release.sys.u32 [%rd1+4], %r5;\n";
    const std::string other = "st.relaxed.sys.u32 [%rd1+8], %r5;\n", fence = "fence.acq_rel.sys;\n";
    const std::string behind_fence = "st.relaxed.sys.u32 [%rd1+4], %r5;\n";
    CHECK(old_behind_release(look + release) == 0);
    CHECK(old_behind_release(look + fence + behind_fence) == 0);
    CHECK(old_behind_release(release + look) > 0);
    CHECK(old_behind_release(fence + look + behind_fence) > 0);
    CHECK(old_behind_release(other + release) > 0);  // a store to another address says nothing about this one
}

TEST_CASE("nobody sees the values of one address in another order than they came", "[ptx]") {
    int differ = 0;
    for (std::uint64_t seed = 1; seed <= 200; ++seed) {
        small_kernel k(
            "setp.ne.s32 %p2, %r2, 0;\n@%p2 bra LOOK;\nmov.u32 %r5, 1;\nst.relaxed.sys.u32 [%rd1], %r5;\n"
            "mov.u32 %r5, 2;\nst.relaxed.sys.u32 [%rd1], %r5;\nmov.u32 %r5, 3;\nst.relaxed.sys.u32 [%rd1], %r5;" +
                linger +
                "bra DONE;\nLOOK: ld.relaxed.sys.u32 %r6, [%rd1];\nsetp.eq.s32 %p3, %r6, 0;\n@%p3 bra LOOK;\n"
                "ld.relaxed.sys.u32 %r7, [%rd1];\nld.relaxed.sys.u32 %r8, [%rd1];\n"
                "st.global.u32 [%rd1+64], %r6;\nst.global.u32 [%rd1+68], %r7;\nst.global.u32 [%rd1+72], %r8;\nDONE:",
            {.seed = seed, .who = ptx::turns::shuffled, .weak_memory = true});
        k.run({.blocks = {2, 1, 1}});
        CHECK(k.words[16] <= k.words[17]);
        CHECK(k.words[17] <= k.words[18]);
        differ += k.words[16] < k.words[18] ? 1 : 0;
    }
    CHECK(differ > 0);
}

TEST_CASE("a thread sees its own stores, and those of one address in their order", "[ptx]") {
    for (std::uint64_t seed = 1; seed <= 50; ++seed) {
        small_kernel k(
            "mov.u32 %r5, 1;\nmov.u32 %r4, 2;\nst.relaxed.sys.u32 [%rd1], %r5;\nst.relaxed.sys.u32 [%rd1+4], %r5;\n"
            "st.relaxed.sys.u32 [%rd1], %r4;\nld.relaxed.sys.u32 %r6, [%rd1];\nst.global.u32 [%rd1+64], %r6;",
            {.seed = seed, .weak_memory = true});
        k.run();
        CHECK(k.words[0] == 2);
        CHECK(k.words[16] == 2);
    }
}

TEST_CASE("the host that looks while kernels run sees what is strong and of system scope", "[ptx]") {
    for (const std::string store : {"st.relaxed.sys.u32", "st.relaxed.gpu.u32", "st.global.u32"}) {
        small_kernel k("mov.u32 %r5, 1;\n" + store + " [%rd1+8], %r5;\nst.global.u32 [%rd1+64], %r5;");
        k.machine().memory().polled_by_host(reinterpret_cast<std::uintptr_t>(&k.words[2]), 4);
        k.run();
        CHECK((k.found() == "") == (store == "st.relaxed.sys.u32"));
    }
}
