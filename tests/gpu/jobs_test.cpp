// SPDX-License-Identifier: Apache-2.0
// Every collective, type and kind of epilogue as nvcc compiled it, on one device and on several: the bytes that the host's backend
// leaves, and no race.
#include <array>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/graph.hpp>
#include <gpushare/backend/cuda/node.hpp>

#include "gpu/job_rig.hpp"
#include "gpu/mutation.hpp"
#include "support/catch.hpp"
#include "support/ptx/runtime.hpp"
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

/// Instructions and bytes that kernels need for an element, as costs.txt has them: what costs more is noticed, and what costs less is
/// written down. Ranks that wait look again and again, which is in it and differs from run to run by some percent.
TEST_CASE("kernels cost what they did", "[compiled]") {
    std::map<std::string, std::pair<double, double>> known;
    std::ifstream file(GPUSHARE_KERNEL_COSTS);
    std::string name;
    for (double instructions = 0, bytes = 0; file >> name >> instructions >> bytes;)
        known[name] = {instructions, bytes};
    std::ostringstream now;
    bool same = true;
    for (const jobs::cost& c : jobs::costs()) {
        now << c.name << " " << c.instructions << " " << c.bytes << "\n";
        const auto [instructions, bytes] = known[c.name];
        same = same && std::abs(c.instructions - instructions) <= 0.1 * instructions &&
               std::abs(c.bytes - bytes) <= 0.02 * bytes;
        CHECK(c.bytes >= 0.99 * c.least_bytes);
    }
    INFO("tests/gpu/costs.txt would be\n" << now.str());
    CHECK(same);
}

TEST_CASE("every form of a launch runs the compiled kernel, and so does a graph of it", "[compiled]") {
    namespace cu = gpushare::cuda;
    constexpr std::uint32_t n = 300;
    std::vector<std::uint32_t> words(n, 5);
    {
        cu::node node;
        const gpushare::device_id device{0};
        auto s = node.make_stream(device, gpushare::priority{});
        auto* const on_device =
            static_cast<std::uint32_t*>(node.memory(device).allocate(n * sizeof(std::uint32_t), 64));
        s.copy(on_device, words.data(), n * sizeof(std::uint32_t));
        for (const auto how : {jobs::form::chevrons, jobs::form::function, jobs::form::cooperative_function})
            jobs::add_one(how, s, on_device, n);
        const auto twice = cu::capture(s, [&](cu::stream& captured) {
            jobs::add_one(jobs::form::chevrons, captured, on_device, n);
            jobs::add_one(jobs::form::cooperative_function, captured, on_device, n);
        });
        cu::graph_executable run{twice};
        run.launch(s);
        run.launch(s);
        s.copy(words.data(), on_device, n * sizeof(std::uint32_t));
        CHECK(s.record().wait(gpushare::never));
        (void)node.memory(device).deallocate(on_device, n * sizeof(std::uint32_t), 64);
    }
    CHECK(words == std::vector<std::uint32_t>(n, 5 + 3 + 2 * 2));
}

/// A sample: `./dev bench device mutants` tries all of them.
TEST_CASE("weakened instructions are noticed", "[.mutants]") {
    jobs::campaign some;
    some.run({.one_in = 10, .kinds_from = 22, .kinds_to = 23});
    some.run({.one_in = 20, .kinds_from = 0, .kinds_to = 1});
    std::string survivors;
    for (const auto& m : some.survivors()) survivors += m + "\n";
    WARN(some.killed() << " of " << some.tried() << " of " << some.found() << "\n" << survivors);
    CHECK(some.tried() > 10);
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
