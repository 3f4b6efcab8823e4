// SPDX-License-Identifier: Apache-2.0
// Every collective, type and kind of epilogue, compiled by nvcc, on one device and on several: the
// same bytes as on the host backend, and no race.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>

#include "gpu/batch_norm.hpp"
#include "gpu/every_cost.hpp"
#include "gpu/job_rig.hpp"
#include "gpu/joined.hpp"
#include "gpu/mutation.hpp"
#include "gpu/packing.hpp"
#include "gpu/softmax.hpp"
#include "standins/ptx/runtime.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace {

constexpr std::array orders{ptx::turns::fair, ptx::turns::shuffled, ptx::turns::adversarial};

void check(const jobs::job& j, const jobs::setting& s) {
    CAPTURE(to_string(j), static_cast<int>(s.who), s.seed);
    CHECK(jobs::trouble(j, s) == "");
}

}  // namespace

TEST_CASE("jobs of every kind leave the host's bytes as compiled", "[compiled]") {
    for (std::uint32_t which = 0; which < jobs::kinds; ++which)
        for (std::uint64_t n = 0; n < orders.size(); ++n) {
            std::mt19937_64 any(which * orders.size() + n);
            check(jobs::random_job(any, which), {.who = orders[n], .seed = n});
        }
}

/// Of whose arrays a thread can't have all addresses in registers.
TEST_CASE("jobs of more ranks than loops are unrolled for leave the host's bytes as compiled", "[compiled]") {
    for (std::uint32_t which = 0; which < jobs::kinds; ++which) {
        std::mt19937_64 any(which);
        jobs::job j = jobs::random_job(any, which);
        j.ranks = jobs::most_ranks;
        j.rounds = 1;
        if (j.threads > 1) j.threads = 33;
        if (j.width == 1) j.count = std::min<std::size_t>(j.count, 150);
        check(j, {.who = orders[which % orders.size()], .seed = which});
    }
}

namespace {

void check_random_jobs(std::uint64_t cases) {
    for (std::uint64_t n = 0; n < cases; ++n) {
        const auto seed = support::seed(n);
        std::mt19937_64 any(seed);
        check(jobs::random_job(any), {.who = orders[any() % orders.size()], .seed = seed});
    }
}

}  // namespace

TEST_CASE("jobs of any shape leave the host's bytes as compiled", "[compiled]") { check_random_jobs(200); }
TEST_CASE("many jobs of any shape leave the host's bytes as compiled", "[.long]") { check_random_jobs(10'000); }

TEST_CASE("collectives of several kinds, back to back on a stream, leave the host's bytes as compiled", "[compiled]") {
    for (std::uint64_t n = 0; n < 40; ++n) {
        std::mt19937_64 any(n);
        const jobs::job j = jobs::random_medley(any);
        check(j, {.who = orders[n % orders.size()], .seed = n, .weak_memory = n % 2 != 0});
    }
}

TEST_CASE("every number converts as compiled as it does on the host", "[compiled]") {
    CHECK(jobs::trouble_of_conversions() == "");
}

TEST_CASE("gradients are packed and unpacked as compiled, whatever their sizes and addresses", "[compiled]") {
    for (std::uint64_t n = 0; n < 12; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        CHECK(jobs::trouble_of_packing(seed) == "");
    }
    const auto cost = jobs::cost_of_packing();
    CHECK(cost.as_is >= 1);
    CHECK(cost.as_is < 1.05);
    CHECK(cost.as_bfloats < 1.05);
}

TEST_CASE("error feedback, what top-k has chosen and gossip are the host's bits as compiled", "[compiled]") {
    for (std::uint64_t n = 0; n < 8; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        CHECK(jobs::trouble_of_feedback(seed) == "");
    }
}

TEST_CASE("batch normalisation over ranks is near its definition as compiled", "[compiled]") {
    for (std::uint64_t n = 0; n < 4; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        CHECK(jobs::trouble_of_batch_norm(seed) == "");
    }
}

TEST_CASE("a softmax over sharded classes is the host's as compiled, to the bit where nothing is rounded",
          "[compiled]") {
    for (std::uint64_t n = 0; n < 12; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        CHECK(jobs::trouble_of_softmax(seed) == "");
    }
}

TEST_CASE("joined ranks' elements and the average of the others have the host's bits as compiled", "[compiled]") {
    for (std::uint64_t n = 0; n < 8; ++n) {
        const auto seed = support::seed(n);
        CAPTURE(seed);
        CHECK(jobs::trouble_of_joined(seed) == "");
    }
}

/// Found by the fuzz: of a number near zero that is made of two large ones, an ulp of these is
/// much, and so is one of the smallest numbers there are.
TEST_CASE("a layer norm whose product and offset cancel, or are denormal, is as near as it says", "[compiled]") {
    const jobs::job cancel{
        .which = 31, .ranks = 4, .count = 1485, .width = 165, .blocks = 2, .threads = 1, .rounds = 3};
    CHECK(jobs::trouble(cancel, {.seed = 17188419298744069532U}) == "");
    const jobs::job denormal{.which = 31,
                             .ranks = 5,
                             .count = 1688,
                             .width = 211,
                             .root = 2,
                             .in_shift = 8,
                             .out_shift = 7,
                             .blocks = 2,
                             .threads = 1,
                             .rounds = 1,
                             .how = gpushare::algorithm::ring};
    CHECK(jobs::trouble(denormal, {.seed = 10520659384964001558U}) == "");
}

TEST_CASE("collectives fail as they should as compiled: late ranks, aborts, mismatches", "[compiled]") {
    for (std::uint32_t which = 0; which < jobs::kinds; ++which)
        for (std::uint32_t n = 0; n < jobs::failures; ++n) {
            std::mt19937_64 any(which * jobs::failures + n);
            jobs::job j = jobs::random_job(any, which);
            const jobs::setting s{.who = orders[n % orders.size()], .seed = any(), .weak_memory = n % 2 != 0};
            CAPTURE(to_string(j), n, static_cast<int>(s.who), s.seed);
            CHECK(jobs::trouble_when(static_cast<jobs::failure>(n), j, s) == "");
        }
}

/// Instructions and bytes that kernels need for an element, as costs.txt has them: what costs more
/// is noticed, and what costs less is written down. Ranks that wait look again and again, which is
/// in it and differs from run to run by some percent.
TEST_CASE("kernels cost what they did", "[compiled]") {
    std::map<std::string, std::pair<double, double>> known;
    std::ifstream file(GPUSHARE_KERNEL_COSTS);
    std::string name;
    for (double instructions = 0, bytes = 0; file >> name >> instructions >> bytes;)
        known[name] = {instructions, bytes};
    std::ostringstream now;
    bool same = true;
    for (const jobs::cost& c : jobs::every_cost()) {
        now << c.name << " " << c.instructions << " " << c.bytes << "\n";
        const auto [instructions, bytes] = known[c.name];
        same = same && std::abs(c.instructions - instructions) <= 0.1 * instructions &&
               std::abs(c.bytes - bytes) <= 0.02 * bytes;
        known.erase(c.name);
        CHECK(c.bytes >= 0.99 * c.least_bytes);
    }
    same = same && known.empty();
    INFO("tests/gpu/costs.txt would be\n" << now.str());
    CHECK(same);
}

/// By what orders them, not by when they ran: the second begins when the first is over.
TEST_CASE("kernels of two streams race unless something orders them, whichever ran when", "[compiled]") {
    enum { nothing, an_event, the_host };
    for (const auto order : {nothing, an_event, the_host}) {
        namespace cu = gpushare::cuda;
        standin::reset({.devices = 1});
        {
            cu::node node;
            const gpushare::device_id device{0};
            auto first = node.make_stream(device, gpushare::priority{});
            auto second = node.make_stream(device, gpushare::priority{});
            constexpr std::size_t words = jobs::region / sizeof(std::uint32_t);
            const std::vector<std::uint32_t> zeros(2 * words);
            auto* const at = static_cast<std::uint32_t*>(node.memory(device).allocate(2 * jobs::region, 256));
            first.copy(at, zeros.data(), 2 * jobs::region);
            CHECK(first.record().wait(gpushare::never));
            jobs::reuse_on_device(first, at, at + words, 32);
            const auto over = first.record();
            if (order == an_event) second.wait(over);
            if (order == the_host) CHECK(over.wait(gpushare::never));
            standin::hold(second.native_handle());
            jobs::reuse_on_device(second, at, at + words, 32);
            ptx::runtime::go_on(1'000'000);
            standin::let_go(second.native_handle());
            CHECK(second.record().wait(gpushare::never));
            (void)node.memory(device).deallocate(at, 2 * jobs::region, 256);
        }
        const std::string found = standin::take_findings();
        CHECK((found.find("race") != std::string::npos) == (order == nothing));
    }
    standin::reset(jobs::roomy);
}

/// The kernels of this program for the architecture that runs here, and the kernels of tests/device
/// for each architecture that PTX is generated for.
TEST_CASE("every instruction of our kernels is known, on every architecture", "[compiled]") {
    std::istringstream files(GPUSHARE_ALL_PTX);
    std::size_t count = 0;
    for (std::string file; std::getline(files, file, '|'); ++count) {
        const std::array<const char*, 2> one{file.c_str(), nullptr};
        CAPTURE(file);
        CHECK(ptx::runtime::unknown_in(one.data()) == std::set<std::string>{});
    }
    CHECK(count > 7);
}

TEST_CASE("every form of a launch runs the compiled kernel, and so does a graph of it", "[compiled]") {
    CHECK(jobs::trouble_of_forms() == "");
}

namespace {

void check_mutants(jobs::mutated what, std::size_t least) {
    jobs::campaign all;
    all.run({.what = what});
    std::string unexplained;
    for (const auto& m : all.survivors())
        if (jobs::reason_for(m).empty()) unexplained += m + "\n";
    // Of objects without lines of their source, as the suites are, nobody can say what it is that
    // no job reaches.
    std::string unreached;
    for (const auto& m : all.never_ran())
        if (m.find("PTX line") == std::string::npos && jobs::reason_for(m).empty()) unreached += m + "\n";
    WARN(all.killed() << " of " << all.tried() << " mutants noticed");
    CHECK(unexplained == "");
    CHECK(unreached == "");
    CHECK(all.tried() > least);
}

}  // namespace

/// Each release, acquire, fence, barrier and scope of the source: needed, or in
/// tests/gpu/surviving_mutants.txt with the reason why not.
TEST_CASE("every order is needed by a job, or it is known why none needs it", "[compiled]") {
    check_mutants(jobs::mutated::orders, 50);
}
/// Each comparison of integers by which something is left or skipped, one too far or too near.
TEST_CASE("every bound is needed by a job, or it is known why none needs it", "[.long]") {
    check_mutants(jobs::mutated::bounds, 80);
}

/// Last of all, behind the suites and everything above: what nobody ran, nobody has seen.
TEST_CASE("zz: every kernel of the linked objects was executed", "[compiled]") {
    const auto all = ptx::runtime::total();
    std::string missed;
    for (const auto& name : all.compiled)
        if (!all.executed.contains(name)) missed += name + "\n";
    WARN(all.executed.size() << " of " << all.compiled.size() << " kernels; " << all.work.instructions
                             << " instructions at " << static_cast<double>(all.work.instructions) / all.seconds / 1e6
                             << " MIPS");
    CHECK(missed == "");
}
