// SPDX-License-Identifier: Apache-2.0
// A word that opens and closes the waits in other streams. The host closes the word when a request
// arrives. The device opens the word after the request's last launch, without help of the host.
//
//   closing_word word(at);                           // streams wait for *at == 0, all 64 bits
//   word.close();                                    // a request arrives
//   if (const auto half = word.hand_over()) ...      // its host is done: the device writes 0 to that half behind the work
//   word.open();                                     // or the host does, where no work is left
//
// The word has two halves, because the device may open the word of the last request after the next
// request has arrived. Each request closes a half that is open, so a late write of the device opens
// only its own request's half. If the device is two requests behind, a third request finds no open
// half. The word is closed then as well, and keep() takes the next half that the device opens.
//
// Not thread-safe on the host: the user must lock. The device writes at any time.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// The memory, which the device reads as one number of 64 bits. It fills a cache line, so that no
/// two words share one.
struct alignas(64) closing_halves {
    std::uint32_t half[2] = {0, 0};
};

class closing_word {
public:
    /// Both halves are 0, and nothing that was enqueued earlier writes there.
    explicit closing_word(closing_halves& at) noexcept : at_(&at) {}

    /// A request has arrived. `later`: the word stays as it is until keep().
    void close(bool later = false) noexcept {
        ++closings_;
        wanted_ = true;
        if (!later) take_half();
    }
    /// Closes the word again if it was opened meanwhile: by force(), or by the device for the
    /// request before the last one.
    void keep() noexcept {
        if (!wanted_) return;
        const bool was_closed = is_closed();
        if (!mine_)
            take_half();
        else if (load(*mine_) == 0)
            store(*mine_, 1);
        if (!was_closed && is_closed()) ++closings_;
    }
    /// The request is over, and its work is done.
    void open() noexcept {
        wanted_ = false;
        if (mine_) store(*std::exchange(mine_, std::nullopt), 0);
    }
    /// Ends the request, whose work may still run. Returns the half to which the device has to
    /// write 0 behind that work. No half: earlier requests have both halves, or the request's half
    /// was forced open.
    [[nodiscard]] std::optional<unsigned> hand_over() noexcept {
        wanted_ = false;
        const auto half = std::exchange(mine_, std::nullopt);
        return half && load(*half) != 0 ? half : std::nullopt;
    }
    /// Opens the half that hand_over() returned, if the device couldn't be asked to open it.
    void open(unsigned half) noexcept { store(half, 0); }
    /// Opens the word until the next keep() or close(), although there is a request. force() also
    /// opens halves that the device is going to open, since the device's write may be queued behind
    /// a stream that waits for the word. That late write may open the half of a later request,
    /// which keep() closes again.
    void force() noexcept {
        for (const unsigned h : {0U, 1U})
            if (load(h) != 0) store(h, 0);
    }

    /// Whether streams wait, as far as the host sees.
    [[nodiscard]] bool is_closed() const noexcept { return load(0) != 0 || load(1) != 0; }
    /// How many times the word was closed.
    [[nodiscard]] std::uint64_t closings() const noexcept { return closings_; }
    [[nodiscard]] closing_halves& memory() const noexcept { return *at_; }

private:
    void take_half() noexcept {
        for (const unsigned h : {0U, 1U}) {
            if (load(h) != 0) continue;  // the device hasn't opened this half yet
            store(h, 1);
            mine_ = h;
            return;
        }
    }
    // The word carries no data. release: the store is visible before the request's launches are.
    // acquire: a thread that sees the device's write also sees the end of the work before it.
    void store(unsigned half, std::uint32_t value) noexcept {
        std::atomic_ref(at_->half[half]).store(value, std::memory_order_release);
    }
    [[nodiscard]] std::uint32_t load(unsigned half) const noexcept {
        return std::atomic_ref(at_->half[half]).load(std::memory_order_acquire);
    }

    closing_halves* at_;
    bool wanted_ = false;
    std::optional<unsigned> mine_{};
    std::uint64_t closings_ = 0;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
