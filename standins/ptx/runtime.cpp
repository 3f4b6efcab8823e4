// SPDX-License-Identifier: Apache-2.0
#include "runtime.hpp"

#include <cuda_runtime_api.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "standins/cuda/machine.hpp"
#include "standins/cuda/standin.hpp"

namespace ptx::runtime {

namespace {

/// Processor time, which other programs on the machine don't prolong.
double seconds_of_thread() {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// One file: its text, and the program decoded from it.
struct loaded {
    std::string text{};
    program decoded{};
};

/// Calls are made under the stand-in's mutex; kernels are registered before main.
class engine : public standin::detail::engine {
public:
    machine_options options{};
    std::map<const void*, std::string> names{};  // of kernels, by their host functions

    void added(std::uintptr_t begin, std::size_t size, int device) override {
        // The host may have written any memory that it can write.
        machine().memory().add(begin, size, device < 0 ? contents::written : contents::unknown,
                               device < 0 ? of_host : device);
    }
    void removed(std::uintptr_t begin) override { machine().memory().remove(begin); }
    void transferred(const transfer& t) override {
        streams_[t.stream] = machine().pass(
            {.from = t.from, .to = t.to, .size = t.size, .device = t.device, .after = before(t.stream, t.known)});
        pass_findings_on();
    }
    void reset() override {
        keep_count();
        machine_.reset();
        streams_.clear();
        marks_.clear();
        host_knows_ = 0;
    }
    void passed(std::uint64_t stream, const void* awaited, const void* reached) override {
        if (awaited != nullptr)
            if (const auto at = marks_.find(awaited); at != marks_.end())
                streams_[stream] = join(streams_[stream], at->second);
        if (reached != nullptr) marks_[reached] = streams_[stream];
    }
    void host_saw() override {
        if (machine_ != nullptr) host_knows_ = machine_->ended();
    }
    [[nodiscard]] std::uint64_t known() const override { return host_knows_; }
    /// Everything that happens before a new kernel or copy on this stream, as a view.
    [[nodiscard]] view_pointer before(std::uint64_t stream, std::uint64_t known) {
        constexpr std::size_t many = 256;
        const view_pointer& so_far = streams_[stream];
        view all = so_far != nullptr ? *so_far : view{};
        all.finished = std::max(all.finished, known);
        machine().prune(all);
        if (all.blocks.size() > many) return nullptr;  // too expensive: assume that all finished work came before
        return std::make_shared<view>(std::move(all));
    }

    void replace(std::size_t file, std::string text) {
        load();
        auto fresh = std::make_unique<loaded>(loaded{std::move(text), {}});
        fresh->decoded = decode(text::parse(fresh->text));
        retired_.push_back(std::exchange(files_[file], std::move(fresh)));
    }

    struct found {
        const program* of = nullptr;
        const function* kernel = nullptr;
    };
    found find(const void* host_function) {
        load();
        const auto name = names.find(host_function);
        if (name == names.end()) return {};
        for (const auto& f : files_)
            if (const function* const k = f->decoded.find(name->second)) return {&f->decoded, k};
        return {};
    }

    standin::detail::running_kernel start(launch l, std::uint64_t stream) {
        ++tally_.launches;
        tally_.executed.insert(l.kernel->name);
        const auto running = machine().start(std::move(l));
        // Runs few instructions at first, so that kernels that were launched together begin at
        // about the same time. Runs more once the host waits or polls.
        return [this, running, stream, asked = 0]() mutable {
            constexpr int often = 64;
            const double begin = seconds_of_thread();
            const bool first = asked++ == 0;
            if (!running->over()) machine().run(!first && (host_waits || asked > often) ? 50'000 : 256);
            tally_.seconds += seconds_of_thread() - begin;
            pass_findings_on();
            if (running->stopped()) throw fault("stopped, because another kernel went wrong");
            if (running->over()) streams_[stream] = running->end();
            return running->over();
        };
    }

    [[nodiscard]] tally total() {
        load();
        tally all = tally_;
        if (machine_ != nullptr) add(all.work, machine_->done());
        for (const auto& f : files_)
            for (const auto& k : f->decoded.functions)
                if (k->entry) all.compiled.insert(k->name);
        return all;
    }

    ptx::machine& machine() {
        if (machine_ == nullptr) {
            machine_options o = std::exchange(options, {});
            o.blocks_per_sm = standin::detail::the_machine().chosen.blocks_per_sm;
            o.native_atomics = standin::detail::the_machine().chosen.peer_atomics;
            machine_ = std::make_unique<ptx::machine>(o);
        }
        return *machine_;
    }
    void polled_by_host(std::uintptr_t begin, std::size_t size) { machine().memory().polled_by_host(begin, size); }
    [[nodiscard]] std::vector<const program*> programs() {
        load();
        std::vector<const program*> all;
        for (const auto& f : files_) all.push_back(&f->decoded);
        return all;
    }

private:
    static void add(work_done& to, const work_done& some) {
        to.instructions += some.instructions;
        to.loaded += some.loaded;
        to.stored += some.stored;
        to.atomics += some.atomics;
        to.sleeps += some.sleeps;
    }
    void pass_findings_on() {
        for (std::string& what : machine().take_findings()) {
            ++tally_.findings;
            if (what.starts_with("race")) ++tally_.races;
            standin::detail::the_machine().find(std::move(what));
        }
    }
    void keep_count() {
        if (machine_ != nullptr) add(tally_.work, machine_->done());
    }
    /// Reads the assembler's report on the file's kernels, if the file was assembled: run_nvcc.sh
    /// keeps the report.
    static void count_registers(program& p, const std::string& path) {
        std::ifstream in(path.substr(0, path.rfind('/') + 1) + "report.txt");
        const std::string report(std::istreambuf_iterator<char>(in), {});
        for (const auto& [name, registers] : registers_of(report, p.target))
            for (const auto& f : p.functions)
                if (f->name == name) f->registers = registers;
    }
    void load() {
        if (!files_.empty()) return;
        for (const char* const* path = ptx_files; *path != nullptr; ++path) {
            std::ifstream in(*path);
            auto f = std::make_unique<loaded>(loaded{{std::istreambuf_iterator<char>(in), {}}, {}});
            try {
                if (!in) throw std::runtime_error("can't be read");
                f->decoded = decode(text::parse(f->text));
                count_registers(f->decoded, *path);
            } catch (const std::exception& e) {
                std::fprintf(stderr, "%s: %s\n", *path, e.what());
                std::exit(EXIT_FAILURE);
            }
            files_.push_back(std::move(f));
        }
    }

    std::vector<std::unique_ptr<loaded>> files_{}, retired_{};
    std::unique_ptr<ptx::machine> machine_{};
    std::map<std::uint64_t, view_pointer> streams_{};  // the view of the finished work of each stream
    std::map<const void*, view_pointer> marks_{};
    std::uint64_t host_knows_ = 0;
    tally tally_{};
};

engine& the_engine() {
    static auto* const one = [] {
        auto* const made = new engine;  // never destroyed: the stand-in calls it until the end of the process
        standin::detail::the_engine() = made;
        return made;
    }();
    return *one;
}

std::array<std::uint32_t, 3> extent(dim3 d) { return {d.x, d.y, d.z}; }

/// A launch in any of the runtime's forms. `arguments` points to each of the kernel's.
struct call {
    const void* host_function = nullptr;
    dim3 blocks{}, threads{};
    std::size_t shared = 0;
    cudaStream_t stream = nullptr;
    bool cooperative = false;
};

cudaError_t launch_kernel(const call& c, void** arguments) {
    const auto [of, kernel] = the_engine().find(c.host_function);
    if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    launch l{.of = of,
             .kernel = kernel,
             .blocks = extent(c.blocks),
             .threads = extent(c.threads),
             .dynamic_shared = static_cast<std::uint32_t>(c.shared),
             .cooperative = c.cooperative};
    l.arguments.resize(kernel->parameter_bytes);
    for (std::size_t p = 0; p < kernel->parameters.size(); ++p)
        std::memcpy(l.arguments.data() + kernel->parameters[p].offset, arguments[p], kernel->parameters[p].bytes);
    return standin::detail::launch(c.stream, c.host_function, c.cooperative, [l](const standin::detail::beginning& at) {
        launch here = l;
        here.device = at.device;
        here.sms = at.sms;
        here.after = the_engine().before(at.stream, at.known);
        return the_engine().start(std::move(here), at.stream);
    });
}

/// The configurations that kernel<<<blocks, threads, shared, stream>>>(...) pushes for the function
/// that it calls next.
std::vector<call>& configured() {
    thread_local std::vector<call> stack;
    return stack;
}

}  // namespace

machine_options& options() { return the_engine().options; }
tally total() { return the_engine().total(); }
void go_on(std::uint64_t instructions) { the_engine().machine().run(instructions); }
void freeze(int device) { the_engine().machine().freeze(device); }
void let_go(int device) { the_engine().machine().let_go(device); }
void polled_by_host(const void* begin, std::size_t size) {
    the_engine().polled_by_host(reinterpret_cast<std::uintptr_t>(begin), size);
}
std::set<std::string> unknown_in(const char* const* paths) {
    std::set<std::string> all;
    for (; *paths != nullptr; ++paths) {
        std::ifstream in(*paths);
        const std::string text(std::istreambuf_iterator<char>(in), {});
        if (text.empty()) throw std::runtime_error(std::string(*paths) + ": can't be read");
        all.merge(ptx::unknown_in(text::parse(text)));
    }
    return all;
}
std::vector<const program*> programs() { return the_engine().programs(); }
void replace(std::size_t file, std::string text) { the_engine().replace(file, std::move(text)); }

extern "C" {

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host_function, void** arguments) {
    call c{host_function, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream};
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeCooperative)
            c.cooperative = config->attrs[i].val.cooperative != 0;
    return launch_kernel(c, arguments);
}

cudaError_t cudaLaunchKernel(const void* host_function, dim3 blocks, dim3 threads, void** arguments, std::size_t shared,
                             cudaStream_t stream) {
    return launch_kernel({host_function, blocks, threads, shared, stream}, arguments);
}

cudaError_t cudaLaunchCooperativeKernel(const void* host_function, dim3 blocks, dim3 threads, void** arguments,
                                        std::size_t shared, cudaStream_t stream) {
    return launch_kernel({host_function, blocks, threads, shared, stream, true}, arguments);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* host_function, int threads,
                                                          std::size_t shared) {
    const auto [of, kernel] = the_engine().find(host_function);
    if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    machine_options o = the_engine().options;
    o.blocks_per_sm = standin::detail::current_options().blocks_per_sm;
    *blocks = threads < 0 ? 0
                          : static_cast<int>(machine(o).resident_blocks(*kernel, static_cast<std::uint32_t>(threads),
                                                                        static_cast<std::uint32_t>(shared)));
    return cudaSuccess;
}

// Called by code that nvcc generates.
void** __cudaRegisterFatBinary(void*) {
    static void* handle = nullptr;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
    the_engine().names[host_function] = name;
}
cudaError_t __cudaGetKernel(const void** kernel, const void* host_function) {
    *kernel = host_function;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(const void* kernel, dim3 blocks, dim3 threads, void** arguments, std::size_t shared,
                               cudaStream_t stream) {
    return launch_kernel({kernel, blocks, threads, shared, stream}, arguments);
}
unsigned __cudaPushCallConfiguration(dim3 blocks, dim3 threads, std::size_t shared, cudaStream_t stream) {
    configured().push_back({nullptr, blocks, threads, shared, stream});
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* blocks, dim3* threads, std::size_t* shared, cudaStream_t* stream) {
    if (configured().empty()) return cudaErrorMissingConfiguration;
    const call c = configured().back();
    configured().pop_back();
    *blocks = c.blocks;
    *threads = c.threads;
    *shared = c.shared;
    *stream = c.stream;
    return cudaSuccess;
}

}  // extern "C"

}  // namespace ptx::runtime
