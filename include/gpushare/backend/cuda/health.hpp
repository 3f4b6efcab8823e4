// SPDX-License-Identifier: Apache-2.0
// Errors of a device that no call could report: the one that made the device unusable, and the last one that a destructor
// had to ignore, with how many there were.
//
//   if (auto why = node.health(d).fatal()) log(why->call, cudaGetErrorName(why->code));
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>

#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// A call of the runtime or driver that failed. `call` is a literal. True if there was one.
struct incident {
    cudaError_t code = cudaSuccess;  ///< what CUDA answered
    const char* call = "";           ///< the function's name
    /// Whether there was one.
    [[nodiscard]] explicit constexpr operator bool() const noexcept { return code != cudaSuccess; }
};

/// Safe from any thread. Shared by everything that belongs to a device; outlives its node.
class health {
public:
    /// An illegal access and its like make every later call on the device fail, and so does a reset of the device: from the first one noticed on, all
    /// points of the device are reached with errc::device_lost. Which kernel it was, CUDA doesn't say: the call in
    /// fatal() is only the one that noticed.
    [[nodiscard]] bool lost() const noexcept {
        // acquire: who sees the loss sees what was written about it.
        return lost_.load(std::memory_order_acquire);
    }
    /// The error that made the device unusable; null while it isn't.
    [[nodiscard]] const incident* fatal() const noexcept { return lost() ? &fatal_ : nullptr; }
    /// The last failure that a destructor, or another function that can't fail, kept to itself; and forgets it.
    incident take_last_error() noexcept {
        const std::lock_guard lock(mutex_);
        const incident last = last_;
        last_ = {};
        return last;
    }
    /// How many failures were kept back so far.
    [[nodiscard]] std::uint64_t unreported() const noexcept { return unreported_.load(std::memory_order_relaxed); }

    // --- what the backend tells

    /// How to find out whether the device still answers, where an error leaves that open. Once, before anything is noted.
    void ask_by(std::function<bool()> answers) { answers_ = std::move(answers); }
    /// Whether it does, as far as that can be asked. A call or more.
    [[nodiscard]] bool answers() const noexcept { return !lost() && (!answers_ || answers_()); }

    /// Looks at the answer of a call whose failure is somebody else's to report. Returns what it stands for.
    errc note(cudaError_t code, const char* call) noexcept { return look_at(detail::handled(code), call); }
    /// The same for a function of the driver's, which leaves nothing for cudaGetLastError(): what the embedder finds there
    /// stays.
    errc note(CUresult code, const char* call) noexcept { return look_at(to_runtime(code), call); }
    /// The same where nobody reports it: it is kept.
    errc keep(cudaError_t code, const char* call) noexcept { return put_away(detail::handled(code), call); }
    /// The same for a function of the driver's.
    errc keep(CUresult code, const char* call) noexcept { return put_away(to_runtime(code), call); }

private:
    errc look_at(cudaError_t code, const char* call) noexcept {
        if (is_sticky(code) || (leaves_open(code) && !answers())) {
            declare_lost(code, call);
            return errc::device_lost;
        }
        return to_errc(code);
    }
    // Whether the device may be lost that answers so. (Runtime API, cudaError: an unknown internal error; what was destroyed with its
    // context, by cudaDeviceReset say, or a green one that only its own streams miss.)
    [[nodiscard]] static constexpr bool leaves_open(cudaError_t code) noexcept {
        return code == cudaErrorUnknown || code == cudaErrorContextIsDestroyed ||
               code == cudaErrorDeviceUninitialized || code == cudaErrorInvalidResourceHandle;
    }
    errc put_away(cudaError_t code, const char* call) noexcept {
        if (code == cudaSuccess) return errc::none;
        const errc why = look_at(code, call);
        const std::lock_guard lock(mutex_);
        last_ = {code, call};
        unreported_.fetch_add(1, std::memory_order_relaxed);
        return why;
    }
    void declare_lost(cudaError_t code, const char* call) noexcept {
        const std::lock_guard lock(mutex_);
        if (fatal_) return;  // who reads it needs no lock: it is written once
        fatal_ = {code, call};
        lost_.store(true, std::memory_order_release);
    }

    std::function<bool()> answers_;
    std::mutex mutex_;
    incident fatal_, last_;
    std::atomic<bool> lost_{false};
    std::atomic<std::uint64_t> unreported_{0};
};

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
