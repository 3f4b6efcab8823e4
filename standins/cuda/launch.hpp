// SPDX-License-Identifier: Apache-2.0
// Launches of kernels on the stand-in, for files that g++ compiles: the counterpart of launch.cuh,
// which is for devices. When the stream reaches the launch, the functor runs on the host, one block
// after the other with one thread each. Each block of a cooperative launch has its own host thread,
// since the blocks may wait for each other.
//
//   #include "standins/cuda/launch.hpp"
//   stream.launch({.blocks = 8, .hold = 250us}, kernel);  // takes `hold` for each wave of blocks
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/backend/host/kernel_context.hpp>
#include <gpushare/concepts.hpp>

#include "cupti.hpp"
#include "standin.hpp"

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

class device_context : public host::kernel_context {
public:
    using host::kernel_context::kernel_context;
};
static_assert(gpushare::kernel_context<device_context>);

namespace detail {

template <class K>
void run_blocks(const K& kernel, std::uint32_t blocks, std::uint32_t sms) {
    for (std::uint32_t b = 0; b < blocks; ++b) {
        device_context context(b, blocks, b % sms, nullptr, host::detail::never_lost);
        kernel(context);
    }
}

template <class K>
void run_together(const K& kernel, std::uint32_t blocks, std::uint32_t sms) {
    host::detail::grid_barrier barrier;
    barrier.reset(blocks);
    std::mutex mutex;
    std::exception_ptr thrown;
    {
        std::vector<std::jthread> threads;
        for (std::uint32_t b = 0; b < blocks; ++b)
            threads.emplace_back([&, b] {
                try {
                    device_context context(b, blocks, b % sms, &barrier, host::detail::never_lost);
                    kernel(context);
                } catch (...) {
                    const std::lock_guard lock(mutex);
                    thrown = std::current_exception();
                }
                barrier.leave();
            });
    }
    if (thrown != nullptr) std::rethrow_exception(thrown);
}

/// The address that identifies the kernel.
template <class K>
[[nodiscard]] const void* entry_of() noexcept {
    return reinterpret_cast<const void*>(&run_blocks<K>);
}

enum class launch_kind { plain, cooperative, opaque };

/// The words in a kernel's arguments that may be addresses.
template <class K>
[[nodiscard]] std::vector<std::uintptr_t> addresses_in(const K& kernel) {
    std::vector<std::uintptr_t> found;
    for (std::size_t at = 0; at + sizeof(std::uintptr_t) <= sizeof(K); at += alignof(std::uintptr_t)) {
        std::uintptr_t word = 0;
        std::memcpy(&word, reinterpret_cast<const std::byte*>(&kernel) + at, sizeof word);
        found.push_back(word);
    }
    return found;
}

template <class K>
void launch_on_standin(stream& on, grid g, const K& kernel, launch_kind kind) {
    static_assert(kernel_for<K, device_context>, "a kernel is called with a context: operator()(C& ctx) const");
    static_assert(std::is_trivially_copyable_v<K>, "a kernel travels to a device byte by byte");
    if (g.blocks == 0) return;
    const std::uint32_t at_once = on.max_cooperative_blocks(kernel, g.threads);
    const bool cooperative = kind == launch_kind::cooperative;
    const auto run = cooperative ? &run_together<K> : &run_blocks<K>;
    const auto launch = [&] {
        if (at_once == 0) return cudaErrorInvalidConfiguration;
        const ns length = g.hold * ((g.blocks + at_once - 1) / at_once);
        standin::next_dimensions() = {g.blocks, g.threads};
        return standin::detail::launch(
            on.state().native, entry_of<K>(), cooperative, length, [=, sms = on.sms()] { run(kernel, g.blocks, sms); },
            addresses_in(kernel));
    };
    if (kind == launch_kind::plain)
        on.launched(entry_of<K>(), g, launch);
    else
        on.enqueued_on_device(launch, "launching a kernel");
}

}  // namespace detail

template <class K>
void stream::launch(grid g, const K& kernel) {
    detail::launch_on_standin(*this, g, kernel, detail::launch_kind::plain);
}

template <class K>
errc stream::launch_cooperative(grid g, const K& kernel) {
    if (g.blocks > max_cooperative_blocks(kernel, g.threads)) return errc::too_many_blocks;
    detail::launch_on_standin(*this, g, kernel, detail::launch_kind::cooperative);
    return errc::none;
}

template <class K>
std::uint32_t stream::max_cooperative_blocks(const K&, std::uint32_t threads) const noexcept {
    return detail::cooperative_blocks(state(), detail::entry_of<K>(), threads);
}

template <class Rep, class Period>
void stream::enqueue(std::chrono::duration<Rep, Period> length) {
    const ns whole = std::chrono::ceil<ns>(length);
    if (whole > ns{0})
        detail::launch_on_standin(*this, {.hold = whole}, gpushare::detail::empty_kernel{},
                                  detail::launch_kind::opaque);
}

static_assert(launcher<stream>);

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
