// SPDX-License-Identifier: Apache-2.0
// Device code without a device: the kernels of tests/gpu/jobs.cu, run as nvcc compiled them by the PTX executor. Counts, but for the
// executor's own speed.
#include <array>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <stdexcept>
#include <string>

#include "arguments.hpp"
#include "gpu/job_rig.hpp"
#include "gpu/mutation.hpp"
#include "harness.hpp"
#include "support/ptx/runtime.hpp"

namespace {

constexpr std::array orders{ptx::turns::fair, ptx::turns::shuffled, ptx::turns::adversarial};

/// Random jobs, each of them against the host's backend: one that differs ends the program.
void fuzz(bench::report& r, std::uint64_t cases) {
    std::mt19937_64 any(1);
    double elements = 0, weak = 0;
    for (std::uint64_t n = 0; n < cases; ++n) {
        const jobs::job j = jobs::random_job(any, static_cast<std::uint32_t>(n % jobs::kinds));
        const jobs::setting s{.who = orders[any() % orders.size()], .seed = any(), .weak_memory = n % 4 == 3};
        const std::string wrong = jobs::trouble(j, s);
        if (!wrong.empty())
            throw std::runtime_error(jobs::to_string(j) + ", seed " + std::to_string(s.seed) + "\n" + wrong);
        elements += static_cast<double>(jobs::elements(j));
        weak += s.weak_memory ? 1 : 0;
    }
    r.figure("device.fuzz_cases", {static_cast<double>(cases)}, "jobs");
    r.figure("device.fuzz_cases_of_weak_memory", {weak}, "jobs");
    r.figure("device.elements_checked", {elements}, "elements");
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
    jobs::campaign all;
    all.run({.one_in = one_in});
    for (const auto& m : all.survivors()) std::printf("# survives: %s\n", m.c_str());
    r.figure("device.mutants", {static_cast<double>(all.tried())}, "mutants");
    r.figure("device.mutants_killed_pct", {100 * static_cast<double>(all.killed()) / static_cast<double>(all.tried())},
             "%");
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
