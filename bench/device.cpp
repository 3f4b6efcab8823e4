// SPDX-License-Identifier: Apache-2.0
// Tests and measures device code without a GPU. The PTX executor runs the kernels of
// tests/gpu/jobs.cu as nvcc compiled them. All figures are counts, except the executor's own speed.
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "gpu/batch_norm.hpp"
#include "gpu/every_cost.hpp"
#include "gpu/job_rig.hpp"
#include "gpu/joined.hpp"
#include "gpu/mutation.hpp"
#include "gpu/packing.hpp"
#include "gpu/softmax.hpp"
#include "harness.hpp"
#include "standins/ptx/runtime.hpp"

namespace {

constexpr std::array orders{ptx::turns::fair, ptx::turns::shuffled, ptx::turns::adversarial};

// ---- all cores

std::uint32_t cores() { return std::max(1U, std::thread::hardware_concurrency()); }

/// Calls f(part) once for each core, in a process of its own, because the executor runs one machine
/// per process. Returns the text from each process. The parent runs no part: jobs leave threads of
/// the host backend behind, and fork() doesn't copy threads into later children.
std::vector<std::string> in_processes(const std::function<std::string(std::uint32_t)>& f) {
    struct child {
        pid_t id;
        int end;
    };
    std::vector<child> children;
    for (std::uint32_t part = 0; part < cores(); ++part) {
        std::array<int, 2> ends{};
        if (pipe(ends.data()) != 0) throw std::runtime_error("no pipe");
        std::fflush(stdout);
        const pid_t id = fork();
        if (id < 0) throw std::runtime_error("no process");
        if (id == 0) {
            int code = 1;
            try {
                const std::string said = f(part);
                std::size_t written = 0;
                for (ssize_t more = 1; written < said.size() && more > 0; written += more > 0 ? std::size_t(more) : 0)
                    more = write(ends[1], said.data() + written, said.size() - written);
                code = written == said.size() ? 0 : 1;
            } catch (const std::exception& e) {
                std::fprintf(stderr, "bench_device: %s\n", e.what());
            }
            _exit(code);
        }
        close(ends[1]);
        children.push_back({id, ends[0]});
    }
    std::vector<std::string> all;
    bool failed = false;
    for (const auto& [id, end] : children) {
        std::string said;
        std::array<char, 4096> some{};
        for (ssize_t n = 0; (n = read(end, some.data(), some.size())) > 0;) said.append(some.data(), std::size_t(n));
        close(end);
        int status = 0;
        failed = waitpid(id, &status, 0) != id || status != 0 || failed;
        all.push_back(std::move(said));
    }
    if (failed) throw std::runtime_error("a process has failed");
    return all;
}

// ---- random jobs

/// The sums of the results. Their text form travels through the pipe from each process.
struct outcome {
    double cases = 0, weak = 0, elements = 0, wrong = 0, races = 0, instructions = 0, seconds = 0;
    std::set<std::string> executed{};  // names of kernels

    [[nodiscard]] std::string text() const {
        std::ostringstream out;
        out.precision(17);
        for (const double x : {cases, weak, elements, wrong, races, instructions, seconds}) out << x << " ";
        for (const auto& name : executed) out << name << " ";
        return out.str();
    }
    void add(const std::string& text) {
        std::istringstream in(text);
        for (double* const sum : {&cases, &weak, &elements, &wrong, &races, &instructions, &seconds}) {
            double more = 0;
            if (!(in >> more)) throw std::runtime_error("no outcome");
            *sum += more;
        }
        for (std::string name; in >> name;) executed.insert(name);
    }
};

/// Spreads `cases` cases over all cores. `run` runs one case and describes what is wrong with the
/// results.
template <class Run>
outcome random_cases(std::uint64_t cases, const Run& run) {
    outcome sum;
    for (const auto& text : in_processes([&](std::uint32_t part) {
             constexpr int told = 5;  // print at most five failures of each process
             const auto before = ptx::runtime::total();
             outcome mine;
             for (std::uint64_t n = part; n < cases; n += cores()) {
                 const std::string wrong = run(n, mine);
                 ++mine.cases;
                 if (!wrong.empty() && ++mine.wrong <= told) std::fprintf(stderr, "bench_device: %s\n", wrong.c_str());
             }
             const auto after = ptx::runtime::total();
             mine.races = static_cast<double>(after.races - before.races);
             mine.instructions = static_cast<double>(after.work.instructions - before.work.instructions);
             mine.seconds = after.seconds - before.seconds;
             mine.executed = after.executed;
             return mine.text();
         }))
        sum.add(text);
    return sum;
}
/// Runs random jobs, each with its own seed. If `medleys` is set, one job in sixteen is a medley.
template <class Run>
outcome random_jobs(std::uint64_t cases, std::uint64_t seed, bool medleys, const Run& run) {
    return random_cases(cases, [&](std::uint64_t n, outcome& mine) {
        std::mt19937_64 any(seed << 32 | n);
        const jobs::job j = medleys && any() % 16 == 0
                                ? jobs::random_medley(any)
                                : jobs::random_job(any, static_cast<std::uint32_t>(n % jobs::kinds));
        const std::string wrong = run(j, n, any, mine);
        return wrong.empty() ? "" : jobs::to_string(j) + "\n" + wrong;
    });
}

/// The tests of kernels other than collectives: packing, error feedback, operators over groups, and
/// the contributions of ranks that have joined.
constexpr std::array of_gradients{&jobs::trouble_of_packing, &jobs::trouble_of_feedback, &jobs::trouble_of_batch_norm,
                                  &jobs::trouble_of_softmax, &jobs::trouble_of_joined};

outcome random_gradients(std::uint64_t cases) {
    return random_cases(cases, [](std::uint64_t n, outcome& mine) {
        std::mt19937_64 any(std::uint64_t{3} << 32 | n);
        ptx::machine_options& o = ptx::runtime::options();
        o.who = orders[any() % orders.size()];
        o.seed = any();
        o.weak_memory = any() % 4 == 0;
        mine.weak += o.weak_memory ? 1 : 0;
        const std::uint64_t seed = any();
        const std::string wrong = of_gradients[n % of_gradients.size()](seed);
        return wrong.empty() ? ""
                             : "gradients, case " + std::to_string(n) + ", seed " + std::to_string(seed) + "\n" + wrong;
    });
}

/// Compares random jobs with the host backend's results.
outcome fuzz(bench::report& r, std::uint64_t cases) {
    outcome o = random_jobs(cases, 1, true, [](const jobs::job& j, std::uint64_t n, auto& any, outcome& mine) {
        const jobs::setting s{.who = orders[any() % orders.size()], .seed = any(), .weak_memory = n % 4 == 3};
        mine.elements += static_cast<double>(jobs::elements(j));
        mine.weak += s.weak_memory ? 1 : 0;
        const std::string wrong = jobs::trouble(j, s);
        return wrong.empty() ? "" : "seed " + std::to_string(s.seed) + "\n" + wrong;
    });
    r.figure("device.fuzz_cases", {o.cases}, "jobs");
    const outcome gradients = random_gradients(cases / 100);
    r.figure("device.fuzz_cases_of_gradients", {gradients.cases}, "jobs");
    o.add(gradients.text());
    r.figure("device.fuzz_cases_of_weak_memory", {o.weak}, "jobs");
    r.figure("device.fuzz_cases_wrong", {o.wrong}, "jobs");
    r.figure("device.elements_checked", {o.elements}, "elements");
    return o;
}

outcome failures(bench::report& r, std::uint64_t cases) {
    const outcome o = random_jobs(cases, 2, false, [](const jobs::job& j, std::uint64_t n, auto& any, outcome&) {
        const jobs::setting s{.who = orders[any() % orders.size()], .seed = any(), .weak_memory = n % 2 != 0};
        const auto how = static_cast<jobs::failure>(any() % jobs::failures);
        const std::string wrong = jobs::trouble_when(how, j, s);
        return wrong.empty() ? ""
                             : "failing " + std::to_string(static_cast<int>(how)) + ", seed " + std::to_string(s.seed) +
                                   "\n" + wrong;
    });
    r.figure("device.failures", {o.cases}, "jobs");
    r.figure("device.failures_wrong", {o.wrong}, "jobs");
    return o;
}

// ---- mutants

struct survey {
    double tried = 0, races = 0;
    std::vector<std::string> survivors{}, never_ran{};

    [[nodiscard]] double killed_pct() const { return 100 * (tried - static_cast<double>(survivors.size())) / tried; }
};

survey mutate(std::uint32_t one_in, jobs::mutated what) {
    survey all;
    for (const auto& text : in_processes([&](std::uint32_t part) {
             const auto races_before = ptx::runtime::total().races;
             jobs::campaign mine;
             mine.run({.one_in = one_in, .what = what, .part = part, .parts = cores()});
             std::string said = "t" + std::to_string(mine.tried()) + "\n";
             said += "r" + std::to_string(ptx::runtime::total().races - races_before) + "\n";
             for (const auto& m : mine.survivors()) said += "s" + m + "\n";
             for (const auto& m : mine.never_ran()) said += "n" + m + "\n";
             return said;
         })) {
        std::istringstream in(text);
        for (std::string line; std::getline(in, line);) switch (line.at(0)) {
                case 't': all.tried += std::stod(line.substr(1)); break;
                case 'r': all.races += std::stod(line.substr(1)); break;
                case 's': all.survivors.push_back(line.substr(1)); break;
                default: all.never_ran.push_back(line.substr(1)); break;
            }
    }
    std::ranges::sort(all.survivors);
    std::ranges::sort(all.never_ran);
    return all;
}

/// Counts the survivors for which the list of reasons has no entry.
double unexplained(const survey& s, const char* what) {
    double without = 0;
    for (const auto& m : s.survivors) {
        const auto reason = jobs::reason_for(m);
        without += reason.empty() ? 1 : 0;
        std::printf("# %s survives: %s (%s)\n", what, m.c_str(), reason.empty() ? "nobody knows why" : reason.c_str());
    }
    for (const auto& m : s.never_ran) std::printf("# %s never ran: %s\n", what, m.c_str());
    return without;
}

/// Returns the number of survivors without a reason.
double mutants(bench::report& r, std::uint32_t one_in) {
    const survey all = mutate(one_in, jobs::mutated::orders);
    const double without_reason = unexplained(all, "mutant");
    r.figure("device.mutants", {all.tried}, "mutants");
    r.figure("device.mutants_killed_pct", {all.killed_pct()}, "%");
    r.figure("device.mutants_unexplained", {without_reason}, "mutants");
    // This control shows that device.races can find races.
    r.figure("device.races_of_mutants", {all.races}, "findings");
    return without_reason;
}

/// The same as mutants(), for mutated bounds instead of mutated memory orders.
double bound_mutants(bench::report& r, std::uint32_t one_in) {
    const survey bounds = mutate(one_in, jobs::mutated::bounds);
    const double without_reason = unexplained(bounds, "bound");
    r.figure("device.bound_mutants", {bounds.tried}, "mutants");
    r.figure("device.bound_mutants_killed_pct", {bounds.killed_pct()}, "%");
    r.figure("device.bound_mutants_unexplained", {without_reason}, "mutants");
    return without_reason;
}

void costs(bench::report& r) {
    for (const jobs::cost& c : jobs::every_cost()) {
        r.figure("ptx.instructions_per_element_of_" + c.name, {c.instructions}, "instructions");
        r.figure("ptx.bytes_per_element_of_" + c.name, {c.bytes}, "B");
        r.figure("ptx.bytes_vs_least_of_" + c.name, {c.bytes / c.least_bytes}, "x");
    }
    const jobs::packing_cost packing = jobs::cost_of_packing();
    r.figure("device.pack_bytes_ratio", {std::max(packing.as_is, packing.as_bfloats)}, "x");
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const bench::arguments asked(argc, argv, {"costs", "fuzz", "failures", "mutants", "bounds"},
                                     {"--short", "a hundredth of the cases"});
        const std::uint32_t part = asked.has_option() ? 100 : 1;
        bench::report r("kernels of tests/gpu/jobs.cu for sm_90, on the PTX executor");
        // Figures are counts, and the executor's own clock delays ranks.
        r.setting("clock", "virtual");
        const auto unknown = ptx::runtime::unknown_in(ptx_files);
        for (const auto& what : unknown) std::fprintf(stderr, "bench_device: %s\n", what.c_str());
        r.figure("device.opcodes_unknown", {static_cast<double>(unknown.size())}, "opcodes");
        if (!unknown.empty()) throw std::runtime_error("nothing runs with these");
        double wrong = 0;
        outcome found;  // results of the random jobs
        if (asked.wants("costs")) costs(r);
        if (asked.wants("fuzz")) found.add(fuzz(r, 100'000 / part).text());
        if (asked.wants("failures")) found.add(failures(r, 5'000 / part).text());
        if (asked.wants("mutants")) wrong += mutants(r, part);
        if (asked.wants("bounds")) wrong += bound_mutants(r, part);
        std::string others = jobs::trouble_of_forms() + jobs::trouble_of_conversions();
        for (const auto& trouble : of_gradients) others += trouble(1);
        if (!others.empty()) throw std::runtime_error(others);
        if (found.cases != 0) {
            auto all = ptx::runtime::total();
            all.executed.merge(found.executed);
            r.figure("device.races", {found.races}, "findings");
            r.figure("device.kernels_compiled", {static_cast<double>(all.compiled.size())}, "kernels");
            r.figure("device.kernels_executed", {static_cast<double>(all.executed.size())}, "kernels");
            std::fprintf(stderr, "%.0f million instructions a second of one core's time\n",
                         found.instructions / found.seconds / 1e6);
            wrong += found.wrong + found.races + static_cast<double>(all.compiled.size() - all.executed.size());
        }
        r.write(asked.json());
        if (wrong != 0) throw std::runtime_error("something is wrong, see above");
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_device: %s\n", e.what());
        return 1;
    }
}
