// SPDX-License-Identifier: Apache-2.0
// Device code without a device: the kernels of tests/gpu/jobs.cu, run as nvcc compiled them by the PTX executor. Counts, but for the
// executor's own speed.
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "gpu/job_rig.hpp"
#include "gpu/mutation.hpp"
#include "harness.hpp"
#include "support/ptx/runtime.hpp"

namespace {

constexpr std::array orders{ptx::turns::fair, ptx::turns::shuffled, ptx::turns::adversarial};

struct fuzzed {
    double cases = 0, weak = 0, elements = 0;
};

/// Random jobs, each of them against the host's backend: one that differs ends the program.
fuzzed fuzz_by_one(std::uint64_t seed, std::uint64_t cases) {
    std::mt19937_64 any(seed);
    fuzzed sum;
    for (std::uint64_t n = 0; n < cases; ++n) {
        const jobs::job j = jobs::random_job(any, static_cast<std::uint32_t>(n % jobs::kinds));
        const jobs::setting s{.who = orders[any() % orders.size()], .seed = any(), .weak_memory = n % 4 == 3};
        const std::string wrong = jobs::trouble(j, s);
        if (!wrong.empty())
            throw std::runtime_error(jobs::to_string(j) + ", seed " + std::to_string(s.seed) + "\n" + wrong);
        sum.elements += static_cast<double>(jobs::elements(j));
        sum.weak += s.weak_memory ? 1 : 0;
        ++sum.cases;
    }
    return sum;
}

/// By as many processes as there are cores, each with a seed of its own: the executor runs one machine a process.
void fuzz(bench::report& r, std::uint64_t cases) {
    const std::uint64_t all = std::max(1U, std::thread::hardware_concurrency());
    std::vector<std::pair<pid_t, int>> others;
    for (std::uint64_t n = 1; n < all; ++n) {
        std::array<int, 2> ends{};
        if (pipe(ends.data()) != 0) throw std::runtime_error("no pipe");
        const pid_t child = fork();
        if (child < 0) throw std::runtime_error("no process");
        if (child == 0) {
            int code = 1;
            try {
                const fuzzed mine = fuzz_by_one(1 + n, cases / all);
                code = write(ends[1], &mine, sizeof mine) == static_cast<ssize_t>(sizeof mine) ? 0 : 1;
            } catch (const std::exception& e) {
                std::fprintf(stderr, "bench_device: %s\n", e.what());
            }
            _exit(code);
        }
        close(ends[1]);
        others.emplace_back(child, ends[0]);
    }
    fuzzed sum = fuzz_by_one(1, cases - (all - 1) * (cases / all));
    for (const auto& [child, end] : others) {
        fuzzed more;
        int status = 0;
        const bool told = read(end, &more, sizeof more) == static_cast<ssize_t>(sizeof more);
        close(end);
        if (waitpid(child, &status, 0) != child || status != 0 || !told)
            throw std::runtime_error("a part of the fuzz failed");
        sum.cases += more.cases;
        sum.weak += more.weak;
        sum.elements += more.elements;
    }
    r.figure("device.fuzz_cases", {sum.cases}, "jobs");
    r.figure("device.fuzz_cases_of_weak_memory", {sum.weak}, "jobs");
    r.figure("device.elements_checked", {sum.elements}, "elements");
}

void failures(bench::report& r, std::uint64_t cases) {
    std::mt19937_64 any(2);
    for (std::uint64_t n = 0; n < cases; ++n) {
        const jobs::job j = jobs::random_job(any, static_cast<std::uint32_t>(n % jobs::kinds));
        const jobs::setting s{.who = orders[any() % orders.size()], .seed = any(), .weak_memory = n % 2 != 0};
        const auto how = static_cast<jobs::failure>(any() % jobs::failures);
        const std::string wrong = jobs::trouble_when(how, j, s);
        if (!wrong.empty())
            throw std::runtime_error(jobs::to_string(j) + ", failing " + std::to_string(static_cast<int>(how)) +
                                     ", seed " + std::to_string(s.seed) + "\n" + wrong);
    }
    r.figure("device.failures", {static_cast<double>(cases)}, "jobs");
}

void mutants(bench::report& r, std::uint32_t one_in) {
    const auto percent = [](const jobs::campaign& c) {
        return 100 * static_cast<double>(c.killed()) / static_cast<double>(c.tried());
    };
    jobs::campaign all;
    all.run({.one_in = one_in});
    double unexplained = 0;
    for (const auto& m : all.survivors()) {
        const auto reason = jobs::reason_for(m);
        unexplained += reason.empty() ? 1 : 0;
        std::printf("# survives: %s (%s)\n", m.c_str(), reason.empty() ? "nobody knows why" : reason.c_str());
    }
    for (const auto& m : all.never_ran()) std::printf("# never ran: %s\n", m.c_str());
    r.figure("device.mutants", {static_cast<double>(all.tried())}, "mutants");
    r.figure("device.mutants_killed_pct", {percent(all)}, "%");
    r.figure("device.mutants_unexplained", {unexplained}, "mutants");

    jobs::campaign bounds;
    bounds.run({.one_in = one_in, .what = jobs::mutated::bounds});
    for (const auto& m : bounds.survivors()) std::printf("# bound survives: %s\n", m.c_str());
    r.figure("device.bound_mutants", {static_cast<double>(bounds.tried())}, "mutants");
    r.figure("device.bound_mutants_killed_pct", {percent(bounds)}, "%");
}

void costs(bench::report& r) {
    for (const jobs::cost& c : jobs::costs()) {
        r.figure("ptx.instructions_per_element_of_" + c.name, {c.instructions}, "instructions");
        r.figure("ptx.bytes_per_element_of_" + c.name, {c.bytes}, "B");
        r.figure("ptx.bytes_vs_least_of_" + c.name, {c.bytes / c.least_bytes}, "x");
    }
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const bench::arguments asked(argc, argv, {"costs", "fuzz", "failures", "mutants"},
                                     {"--short", "a hundredth of the cases"});
        const std::uint32_t part = asked.has_option() ? 100 : 1;
        bench::report r("kernels of tests/gpu/jobs.cu for sm_90, on the PTX executor");
        if (asked.wants("costs")) costs(r);
        if (asked.wants("fuzz")) fuzz(r, 100'000 / part);
        if (asked.wants("failures")) failures(r, 5'000 / part);
        if (asked.wants("mutants")) mutants(r, part);
        if (const std::string wrong = jobs::trouble_of_forms(); !wrong.empty()) throw std::runtime_error(wrong);
        const auto all = ptx::runtime::total();
        r.figure("device.kernels_compiled", {static_cast<double>(all.compiled.size())}, "kernels");
        r.figure("device.kernels_executed", {static_cast<double>(all.executed.size())}, "kernels");
        r.figure("device.opcodes_unknown", {0}, "opcodes");  // one would have ended the program
        r.figure("device.races", {0}, "findings");           // so would one
        r.figure("device.executor_mips", {static_cast<double>(all.work.instructions) / all.seconds / 1e6}, "MIPS");
        r.write(asked.json());
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_device: %s\n", e.what());
        return 1;
    }
}
