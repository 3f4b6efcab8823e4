// SPDX-License-Identifier: Apache-2.0
// Tags: one-thread, alone
// Tests of the executor behind the stand-in: the findings of both together, for the kernels of
// kernels.ptx.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <cuda_runtime_api.h>

#include "standins/cuda/raw.hpp"
#include "standins/cuda/standin.hpp"
#include "standins/ptx/runtime.hpp"
#include "support/catch.hpp"

// The function that nvcc's objects call.
extern "C" void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*);

namespace {

/// A kernel of kernels.ptx, with the host function that stands for it.
class kernel {
public:
    explicit kernel(const char* name) {
        __cudaRegisterFunction(nullptr, &stub_, nullptr, name, 0, nullptr, nullptr, nullptr, nullptr, nullptr);
    }
    cudaError_t launch(cudaStream_t s, std::uint32_t* words, unsigned threads = 1, bool cooperative = false) const {
        std::array<void*, 1> arguments{static_cast<void*>(&words)};
        return cooperative ? cudaLaunchCooperativeKernel(&stub_, dim3(1), dim3(threads), arguments.data(), 0, s)
                           : cudaLaunchKernel(&stub_, dim3(1), dim3(threads), arguments.data(), 0, s);
    }

private:
    char stub_ = 0;
};
const kernel write_words("write_words"), count_threads("count_threads"), meet("meet");

constexpr std::size_t size = 64 * sizeof(std::uint32_t);

/// 64 words on the current device, all 0.
std::uint32_t* make_words(cudaStream_t s) {
    void* p = nullptr;
    REQUIRE(cudaMalloc(&p, size) == cudaSuccess);
    REQUIRE(cudaMemsetAsync(p, 0, size, s) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(s) == cudaSuccess);
    return static_cast<std::uint32_t*>(p);
}

/// Runs f(stream, another stream, words of device 0), and returns the findings.
template <class F>
std::string found_by(const F& f, const standin::options& o = {}) {
    standin::reset(o);
    const auto s = raw::make_stream(), t = raw::make_stream();
    auto* const words = make_words(s);
    f(s, t, words);
    standin::let_go(s);
    standin::let_go(t);
    (void)cudaStreamSynchronize(s);
    (void)cudaStreamSynchronize(t);
    (void)cudaFree(words);
    (void)cudaStreamDestroy(s);  // returns an error if the device is lost
    (void)cudaStreamDestroy(t);
    return standin::take_findings();
}

bool has(const std::string& found, const std::string& what) { return found.find(what) != std::string::npos; }

}  // namespace

TEST_CASE("a copy or memset beside a kernel is found, unless something orders them", "[ptx][cuda]") {
    enum { nothing, an_event, the_host };
    std::array<std::uint32_t, 64> mine{};
    for (const auto order : {nothing, an_event, the_host})
        for (const bool kernel_first : {false, true})
            for (const std::string what : {"to the host", "to the device", "memset"}) {
                const std::string found = found_by([&](cudaStream_t s, cudaStream_t t, std::uint32_t* words) {
                    const auto e = raw::make_event();
                    const auto copy = [&](cudaStream_t on) {
                        if (what == "memset") return cudaMemsetAsync(words, 1, size, on);
                        return what == "to the host" ? cudaMemcpyAsync(mine.data(), words, size, cudaMemcpyDefault, on)
                                                     : cudaMemcpyAsync(words, mine.data(), size, cudaMemcpyDefault, on);
                    };
                    CHECK((kernel_first ? write_words.launch(s, words, 32) : copy(s)) == cudaSuccess);
                    if (order == an_event) {
                        CHECK(cudaEventRecord(e, s) == cudaSuccess);
                        CHECK(cudaStreamWaitEvent(t, e, 0) == cudaSuccess);
                    }
                    if (order == the_host) CHECK(cudaStreamSynchronize(s) == cudaSuccess);
                    CHECK((kernel_first ? copy(t) : write_words.launch(t, words, 32)) == cudaSuccess);
                    CHECK(cudaStreamSynchronize(s) == cudaSuccess);
                    CHECK(cudaStreamSynchronize(t) == cudaSuccess);
                    raw::destroy(e);
                });
                CAPTURE(static_cast<int>(order), kernel_first, what, found);
                CHECK(has(found, "race: with a") == (order == nothing));
                CHECK(has(found, "a copy or memset") == (order == nothing));
                if (order != nothing) CHECK(found == "");
            }
}

TEST_CASE("copies in a graph come in its order", "[ptx][cuda]") {
    std::array<std::uint32_t, 64> mine{};
    const std::string found = found_by([&](cudaStream_t s, cudaStream_t t, std::uint32_t* words) {
        REQUIRE(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed) == cudaSuccess);
        CHECK(cudaMemcpyAsync(words, mine.data(), size, cudaMemcpyDefault, s) == cudaSuccess);
        CHECK(write_words.launch(s, words, 32) == cudaSuccess);
        CHECK(cudaMemcpyAsync(mine.data(), words, size, cudaMemcpyDefault, s) == cudaSuccess);
        const auto graph = raw::end_capture(s);
        cudaGraphExec_t exec = nullptr;
        REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
        CHECK(cudaGraphLaunch(exec, s) == cudaSuccess);
        CHECK(cudaStreamSynchronize(s) == cudaSuccess);
        CHECK(cudaGraphLaunch(exec, t) == cudaSuccess);
        CHECK(cudaStreamSynchronize(t) == cudaSuccess);
        CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
        CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    });
    CHECK(found == "");
    CHECK(mine[31] == 31);
}

TEST_CASE("kernels that need atomics beyond their device are found, unless there are such", "[ptx][cuda]") {
    for (const bool native : {false, true}) {
        const auto found = [&](bool on_host, int device) {
            return found_by(
                [&](cudaStream_t, cudaStream_t, std::uint32_t* words) {
                    void* host = nullptr;
                    CHECK(cudaHostAlloc(&host, size, 0) == cudaSuccess);
                    const auto s = raw::make_stream(device);
                    CHECK(count_threads.launch(s, on_host ? static_cast<std::uint32_t*>(host) : words, 32) ==
                          cudaSuccess);
                    CHECK(cudaStreamSynchronize(s) == cudaSuccess);
                    raw::destroy(s);
                    CHECK(cudaFreeHost(host) == cudaSuccess);
                    CHECK(cudaSetDevice(0) == cudaSuccess);
                },
                {.peer_atomics = native});
        };
        CHECK(found(false, 0) == "");
        CHECK(has(found(false, 1), "no native atomics: memory of another device") == !native);
        CHECK(has(found(true, 0), "no native atomics: memory of the host") == !native);
    }
}

TEST_CASE("making or loading something beside a compiled kernel that waits for others is found", "[ptx][cuda]") {
    const auto found = [](bool cooperative, const standin::options& o) {
        return found_by(
            [&](cudaStream_t s, cudaStream_t t, std::uint32_t* words) {
                standin::hold(s);
                CHECK(write_words.launch(s, words, 1, cooperative) == cudaSuccess);
                CHECK(write_words.launch(s, words, 1, cooperative) == cudaSuccess);
                CHECK_FALSE(has(standin::findings(), "beside a kernel"));
                standin::hold(t);
                CHECK(count_threads.launch(t, words + 32) == cudaSuccess);
                raw::destroy(raw::make_event());
            },
            o);
    };
    const std::string strict = found(true, {});
    CHECK(has(strict, "cudaLaunchKernelExC beside a kernel that waits for others"));
    CHECK(has(strict, "cudaEventCreateWithFlags beside a kernel that waits for others"));
    CHECK(found(false, {}) == "");
    CHECK_FALSE(has(found(true, {.eager_loading = true}), "cudaLaunchKernelExC beside"));
    CHECK(found(true, {.creation_beside_spinning = true}) == "");
}

TEST_CASE("two plain kernels that wait for each other are a deadlock as soon as they may be one", "[ptx][cuda]") {
    const auto found = [](ptx::turns who, bool cooperative) {
        ptx::runtime::options().who = who;
        return found_by([&](cudaStream_t s, cudaStream_t t, std::uint32_t* words) {
            CHECK(meet.launch(s, words, 1, cooperative) == cudaSuccess);
            CHECK(meet.launch(t, words, 2, cooperative) == cudaSuccess);
            (void)cudaStreamSynchronize(t);
        });
    };
    CHECK(found(ptx::turns::fair, false) == "");
    CHECK(found(ptx::turns::adversarial, true) == "");
    CHECK(has(found(ptx::turns::adversarial, false), "deadlock: kernels wait for what may only run after them"));
    // A new machine doesn't keep the options of the machine before.
    CHECK(found_by([&](cudaStream_t s, cudaStream_t t, std::uint32_t* words) {
              CHECK(meet.launch(s, words, 1) == cudaSuccess);
              CHECK(meet.launch(t, words, 2) == cudaSuccess);
              CHECK(cudaStreamSynchronize(t) == cudaSuccess);
          }) == "");
}
