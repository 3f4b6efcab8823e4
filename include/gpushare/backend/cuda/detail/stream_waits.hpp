// SPDX-License-Identifier: Apache-2.0
// The words in memory for which streams of lower clients wait, one for each level of a launch gate.
//
//   stream_waits waits(device);
//   const bool can = waits.supported();
//   waits.join(1);                                        // a client of level 1 is added
//   waits.arrived(1);  // its request: closes the waits of all below
//   // what a stream of a client of level 0 waits for
//   waits.each_above(0, [&](CUdeviceptr word) { ... });
//   if (waits.left(1)) waits.open(1);
//
// A level has the same word for as long as the gate lives. Streams and graphs keep their waits for
// the word while the level has no client, or has clients again. So the memory grows with the number
// of levels that ever had a client, but work waits only for levels that have clients now.
//
// The words are in pinned memory. If waits or writes are still enqueued when the gate is destroyed,
// one page of memory is never freed. (Driver API, Stream Memory Operations: waits need 64-bit
// support, which every device since Pascal has, and drivers since CUDA 12 offer them by default.)
// Not thread-safe.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/closing_word.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// Pinned memory for words. Not thread-safe.
class pinned_words {
public:
    using word = gpushare::detail::closing_halves;

    explicit pinned_words(std::shared_ptr<device_state> device) : device_(std::move(device)) {}
    pinned_words(const pinned_words&) = delete;
    pinned_words& operator=(const pinned_words&) = delete;
    ~pinned_words() {
        if (kept_) return;
        for (void* const page : pages_)
            (void)device_->call_beside_captures([&] { return handled(cudaFreeHost(page)); });
    }

    /// Takes a word; null if the driver gives no pinned memory. Throws std::bad_alloc.
    [[nodiscard]] word* take() {
        if (free_.empty()) pin_more();
        if (free_.empty()) return nullptr;
        word* const w = free_.back();
        free_.pop_back();
        return w;
    }
    /// The device may still use a word: the memory is never freed.
    void keep() noexcept { kept_ = true; }

private:
    static constexpr std::size_t at_once = 4096 / sizeof(word);

    void pin_more() {
        free_.reserve((pages_.size() + 1) * at_once);
        pages_.reserve(pages_.size() + 1);
        void* page = nullptr;
        const auto pin = [&] { return handled(cudaHostAlloc(&page, at_once * sizeof(word), cudaHostAllocMapped)); };
        if (device_->call_beside_captures(pin) != cudaSuccess) return;
        pages_.push_back(page);
        for (std::size_t i = 0; i < at_once; ++i) free_.push_back(::new (static_cast<word*>(page) + i) word);
    }

    const std::shared_ptr<device_state> device_;
    std::vector<void*> pages_;
    std::vector<word*> free_;
    bool kept_ = false;
};

class stream_waits {
public:
    explicit stream_waits(std::shared_ptr<device_state> device) : device_(std::move(device)), words_(device_) {}
    stream_waits(const stream_waits&) = delete;
    stream_waits& operator=(const stream_waits&) = delete;
    ~stream_waits() {
        // The device may still have to open a word.
        for (level& l : levels_) {
            l.word.open();
            if (l.word.is_closed()) words_.keep();
        }
    }
    /// Streams or graphs may wait for words after this object is gone.
    void keep_memory() noexcept { words_.keep(); }

    /// Whether the device and the driver have such waits.
    [[nodiscard]] bool supported() const noexcept {
        const driver& api = device_->api();
        int has = 0;
        return api.stream_wait_value && api.stream_write_value &&
               api.device_get_attribute(&has, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
                                        device_->context().device()) == CUDA_SUCCESS &&
               has != 0;
    }

    /// A client of the level is added. Returns false if there is no pinned memory for a word.
    /// Throws std::bad_alloc.
    [[nodiscard]] bool join(int number) {
        if (level* const there = find(number)) {
            ++there->clients;
            return true;
        }
        levels_.reserve(levels_.size() + 1);
        auto* const memory = words_.take();
        if (memory == nullptr) return false;
        levels_.push_back({.number = number, .clients = 1, .word = gpushare::detail::closing_word(*memory)});
        return true;
    }
    /// A client of the level is removed, with this many open requests.
    void leave(int number, std::uint32_t requests) noexcept {
        level* const l = find(number);
        if (l == nullptr) return;
        l->requests -= requests;
        if (requests != 0 && l->requests == 0) l->word.open();
        if (--l->clients == 0) l->word.open();
    }

    /// A request of the level has arrived.
    void arrived(int number) noexcept {
        level* const l = find(number);
        if (l != nullptr && l->requests++ == 0 && !ended_) l->word.close(kept_open_ != 0);
    }
    /// A request of the level has left. Returns whether it was the last one.
    [[nodiscard]] bool left(int number) noexcept {
        level* const l = find(number);
        return l != nullptr && --l->requests == 0;
    }
    void open(int number) noexcept {
        if (level* const l = find(number)) l->word.open();
    }
    /// The place at which the device writes a 32-bit 0 to open the word after the work enqueued by
    /// now.
    struct device_opens {
        CUdeviceptr where = 0;
        unsigned half = 0;
    };
    [[nodiscard]] std::optional<device_opens> hand_over(int number) noexcept {
        level* const l = find(number);
        const auto half = l != nullptr ? l->word.hand_over() : std::nullopt;
        if (!half) return std::nullopt;
        return device_opens{address(l->word.memory()) + *half * sizeof(std::uint32_t), *half};
    }
    /// Opens the word in place of the device, which can't be made to.
    void open(int number, const device_opens& instead) noexcept {
        if (level* const l = find(number)) l->word.open(instead.half);
    }
    /// Called when a request of the level launches: closes a word that was forced open.
    void keep(int number) noexcept {
        if (kept_open_ != 0) return;
        if (level* const l = find(number)) l->word.keep();
    }
    /// Opens all words, and keeps requests from closing them. Each call needs one call of
    /// let_close().
    void keep_open() noexcept {
        ++kept_open_;
        for (level& l : levels_) l.word.force();
    }
    /// Ends one keep_open(). The last one closes the words of open requests again.
    void let_close() noexcept {
        if (--kept_open_ != 0) return;
        for (level& l : levels_) l.word.keep();
    }

    /// Whether there is a client above the level.
    [[nodiscard]] bool any_above(int number) const noexcept {
        return std::ranges::any_of(levels_, [&](const level& l) { return l.is_above(number); });
    }
    /// The words above the level, as the device addresses them.
    template <class F>
    void each_above(int number, F f) const noexcept {
        for (const level& l : levels_)
            if (l.is_above(number)) f(address(l.word.memory()));
    }
    /// Whether a word is closed, or may be closed again without another request.
    [[nodiscard]] bool any_closed() const noexcept {
        return std::ranges::any_of(levels_, [](const level& l) { return l.requests != 0 || l.word.is_closed(); });
    }
    [[nodiscard]] bool closed_above(int number) const noexcept {
        return std::ranges::any_of(levels_, [&](const level& l) { return l.is_above(number) && l.word.is_closed(); });
    }
    /// How often the words above the level were closed, words of levels without a client included.
    [[nodiscard]] std::uint64_t closings_above(int number) const noexcept {
        std::uint64_t all = 0;
        for (const level& l : levels_)
            if (l.number > number) all += l.word.closings();
        return all;
    }
    /// Opens the words above the level although requests are open.
    void force_above(int number) noexcept {
        for (level& l : levels_)
            if (l.number > number) l.word.force();
    }
    /// Opens all words for good.
    void end() noexcept {
        ended_ = true;
        for (level& l : levels_) l.word.open();
    }

private:
    struct level {
        int number = 0;
        std::uint32_t clients = 0, requests = 0;
        gpushare::detail::closing_word word;

        // Whether this level has clients and is above level `other`.
        [[nodiscard]] bool is_above(int other) const noexcept { return clients != 0 && number > other; }
    };

    [[nodiscard]] level* find(int number) noexcept {
        const auto at = std::ranges::find(levels_, number, &level::number);
        return at != levels_.end() ? &*at : nullptr;
    }
    // Pinned memory has the same address on the device. (Programming Guide, Unified Virtual
    // Addressing.)
    [[nodiscard]] static CUdeviceptr address(const gpushare::detail::closing_halves& w) noexcept {
        return reinterpret_cast<CUdeviceptr>(&w);
    }

    const std::shared_ptr<device_state> device_;
    pinned_words words_;
    std::vector<level> levels_;
    std::uint32_t kept_open_ = 0;
    bool ended_ = false;
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
