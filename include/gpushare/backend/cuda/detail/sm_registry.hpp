// SPDX-License-Identifier: Apache-2.0
// Records which SMs of a device belong to which partition, in units, and which streams are in no
// partition. A part of device_state.
//
//   auto& registry = device->sms();    registry.add(stream.unpartitioned);    registry.unpartitioned();
#pragma once

#include <cuda.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/intrusive.hpp>
#include <gpushare/sm_split.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {
namespace detail {

/// A stream in no partition.
struct unpartitioned_stream {
    unpartitioned_stream* next = nullptr;
    std::uint32_t tag = 0;
};

/// Safe from any thread.
class sm_registry {
public:
    /// The smallest groups of SMs, which all come from one split: groups of one split can be
    /// combined again, but groups of several splits can't. `ask()` returns them and is called once.
    /// They never change.
    template <std::invocable F>
    [[nodiscard]] std::span<const CUdevResource> units(F ask) {
        const std::lock_guard lock(mutex_);
        if (units_.empty()) {
            auto told = ask();
            taken_.resize(told.size());
            units_ = std::move(told);
        }
        return {units_.data(), units_.size()};
    }

    /// Takes free units for partitions of sms[i] SMs each. `into[i]` gets their indices and must
    /// have room for them. All or none; throws as check_sms.
    void take(const sm_split& can, std::span<const std::uint32_t> sms, std::span<std::vector<std::uint32_t>*> into) {
        const std::lock_guard lock(mutex_);
        check_sms(can, sms, static_cast<std::uint32_t>(std::count(taken_.begin(), taken_.end(), false)));
        std::uint32_t next = 0;
        for (std::size_t i = 0; i < sms.size(); ++i)
            for (std::uint32_t left = sms[i] / can.unit; left > 0; --left) {
                while (taken_[next]) ++next;
                taken_[next] = true;
                into[i]->push_back(next);
            }
    }
    void give_back(std::span<const std::uint32_t> units) noexcept {
        const std::lock_guard lock(mutex_);
        for (const std::uint32_t u : units) taken_[u] = false;
    }

    /// Adds or removes a stream in no partition.
    void add(unpartitioned_stream& s) noexcept {
        const std::lock_guard lock(mutex_);
        unpartitioned_.push(s);
    }
    void remove(unpartitioned_stream& s) noexcept {
        const std::lock_guard lock(mutex_);
        unpartitioned_.remove(s);
    }
    /// The tags of the streams in no partition, in order.
    [[nodiscard]] std::vector<std::uint32_t> unpartitioned() const {
        std::vector<std::uint32_t> tags;
        {
            const std::lock_guard lock(mutex_);
            for (const unpartitioned_stream* s = unpartitioned_.front(); s != nullptr; s = s->next)
                tags.push_back(s->tag);
        }
        std::sort(tags.begin(), tags.end());
        return tags;
    }

private:
    mutable std::mutex mutex_;
    std::vector<CUdevResource> units_;
    std::vector<bool> taken_;
    gpushare::detail::fifo<unpartitioned_stream> unpartitioned_;
};

}  // namespace detail
}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
