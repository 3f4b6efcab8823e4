// SPDX-License-Identifier: Apache-2.0
#include "serving/cores.hpp"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "serving/server_process.hpp"

namespace bench::serving {

namespace {

void hold_to_first(std::uint32_t n) {
    ::cpu_set_t mine, some;
    CPU_ZERO(&some);
    if (::sched_getaffinity(0, sizeof mine, &mine) != 0) throw std::runtime_error("which cores?");
    for (int core = 0; core < CPU_SETSIZE && static_cast<std::uint32_t>(CPU_COUNT(&some)) < n; ++core)
        if (CPU_ISSET(core, &mine)) CPU_SET(core, &some);
    if (::sched_setaffinity(0, sizeof some, &some) != 0) throw std::runtime_error("no cores chosen");
}

}  // namespace

std::uint32_t cores() {
    ::cpu_set_t mine;
    if (::sched_getaffinity(0, sizeof mine, &mine) != 0) throw std::runtime_error("which cores?");
    return static_cast<std::uint32_t>(CPU_COUNT(&mine));
}

void begin_on_first_cores(std::uint32_t n, char** argv) {
    if (cores() <= n) return;
    hold_to_first(n);
    (void)::execv("/proc/self/exe", argv);
    throw std::runtime_error("cannot begin anew");
}

std::string on_one_core(const std::string& part, const std::string& option) {
    const temporary_folder folder;
    const auto json_file = folder.path + "/figures.json";
    std::vector<std::string> words{"/proc/self/exe", json_file, part};
    if (!option.empty()) words.push_back(option);
    std::vector<char*> argv;
    for (auto& w : words) argv.push_back(w.data());
    argv.push_back(nullptr);
    const auto process = ::fork();
    if (process < 0) throw std::runtime_error("no process");
    if (process == 0) {
        (void)::prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)::dup2(STDERR_FILENO, STDOUT_FILENO);
        hold_to_first(1);
        (void)::execv(argv[0], argv.data());
        ::_exit(127);
    }
    int status = 0;
    if (::waitpid(process, &status, 0) != process || status != 0)
        throw std::runtime_error("the process on one core ended with wait status " + std::to_string(status));
    std::ifstream file(json_file);
    return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace bench::serving
