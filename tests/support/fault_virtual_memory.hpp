// SPDX-License-Identifier: Apache-2.0
// Virtual memory that counts and fails on demand. It knows all mappings, notices a chunk that is
// mapped twice, mapped over another chunk, or destroyed while mapped, and refuses the calls that
// the test chooses.
//
//   support::fault_virtual_memory memory{device, 64_KiB};
//   memory.fail(support::vm_call::map, 3);      // the third map() from now on
//   CHECK(memory.wrong() == 0);
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include <gpushare/backend/host/virtual_memory.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace support {

enum class vm_call : std::uint8_t { reserve, create, map, unmap };

/// Built on the host's virtual memory. Thread-safe. `FreshIsZero` is the model's fresh_is_zero; new
/// chunks are zero in any case.
template <bool FreshIsZero = true>
class basic_fault_virtual_memory {
    using host_memory = gpushare::host::virtual_memory;

public:
    static constexpr bool fresh_is_zero = FreshIsZero;
    using range = host_memory::range;

    class chunk {
    public:
        chunk(chunk&& other) noexcept
            : memory_(std::exchange(other.memory_, nullptr)), id_(other.id_), physical_(std::move(other.physical_)) {}
        chunk& operator=(chunk other) noexcept {
            std::swap(memory_, other.memory_);
            std::swap(id_, other.id_);
            std::swap(physical_, other.physical_);
            return *this;
        }
        ~chunk() {
            if (memory_ != nullptr) memory_->forget(id_);
        }

    private:
        friend basic_fault_virtual_memory;
        chunk(basic_fault_virtual_memory& m, std::uint64_t id, host_memory::chunk&& physical) noexcept
            : memory_(&m), id_(id), physical_(std::move(physical)) {}

        basic_fault_virtual_memory* memory_;
        std::uint64_t id_;
        host_memory::chunk physical_;
    };

    basic_fault_virtual_memory(gpushare::host::device_memory& device, gpushare::bytes granularity)
        : memory_(device, granularity) {}

    [[nodiscard]] gpushare::bytes granularity() const noexcept { return memory_.granularity(); }
    [[nodiscard]] gpushare::result<range> reserve(std::size_t size) noexcept {
        if (const auto why = strikes(vm_call::reserve); why != gpushare::errc::none) return why;
        return memory_.reserve(size);
    }
    [[nodiscard]] gpushare::result<chunk> create() noexcept {
        if (const auto why = strikes(vm_call::create); why != gpushare::errc::none) return why;
        auto made = memory_.create();
        if (!made) return made.why();
        const std::lock_guard lock(mutex_);
        chunks_.insert(++ids_);
        return chunk{*this, ids_, *std::move(made)};
    }
    gpushare::errc map(void* at, const chunk& c) noexcept {
        if (const auto why = strikes(vm_call::map); why != gpushare::errc::none) return why;
        const std::lock_guard lock(mutex_);
        if (by_chunk_.contains(c.id_) || by_address_.contains(at)) ++wrong_;
        by_chunk_[c.id_] = at;
        by_address_[at] = c.id_;
        return memory_.map(at, c.physical_);
    }
    gpushare::errc unmap(void* at, std::size_t size) noexcept {
        if (const auto why = strikes(vm_call::unmap); why != gpushare::errc::none) return why;
        const std::lock_guard lock(mutex_);
        const auto unit = static_cast<std::size_t>(granularity().count());
        for (std::size_t offset = 0; offset < size; offset += unit) {
            const auto found = by_address_.find(static_cast<std::byte*>(at) + offset);
            if (found == by_address_.end()) {
                ++wrong_;
                continue;
            }
            by_chunk_.erase(found->second);
            by_address_.erase(found);
        }
        return memory_.unmap(at, size);
    }

    /// The `nth` call of that kind from now on returns `why`, and so do the `more` calls after it.
    void fail(vm_call call, std::size_t nth, gpushare::errc why = gpushare::errc::out_of_memory, std::size_t more = 0) {
        const std::lock_guard lock(mutex_);
        faults_[static_cast<std::size_t>(call)] = {nth, more + 1, why};
    }
    /// Called within every call, under no lock. Set it while no other thread uses the memory.
    std::function<void(vm_call)> during;
    void heal() {
        const std::lock_guard lock(mutex_);
        faults_ = {};
    }

    /// The number of wrong calls: a chunk or an address mapped twice, an address unmapped where
    /// nothing is mapped, or a chunk destroyed while it is mapped.
    [[nodiscard]] std::size_t wrong() const {
        return locked([&] { return wrong_; });
    }
    [[nodiscard]] std::size_t mapped() const {
        return locked([&] { return by_address_.size(); });
    }
    [[nodiscard]] std::size_t chunks() const {
        return locked([&] { return chunks_.size(); });
    }
    [[nodiscard]] std::size_t calls(vm_call call) const {
        return locked([&] { return calls_[static_cast<std::size_t>(call)]; });
    }
    /// The number of the chunk that is mapped at the address.
    [[nodiscard]] std::optional<std::uint64_t> at(const void* address) const {
        const std::lock_guard lock(mutex_);
        const auto found = by_address_.find(const_cast<void*>(address));
        return found == by_address_.end() ? std::nullopt : std::optional(found->second);
    }

private:
    struct fault {
        std::size_t nth = 0, count = 0;
        gpushare::errc why = gpushare::errc::none;
    };

    gpushare::errc strikes(vm_call call) noexcept {
        if (during) during(call);
        const std::lock_guard lock(mutex_);
        ++calls_[static_cast<std::size_t>(call)];
        fault& f = faults_[static_cast<std::size_t>(call)];
        if (f.count == 0 || (f.nth > 1 && f.nth-- > 1)) return gpushare::errc::none;
        --f.count;
        return f.why;
    }
    void forget(std::uint64_t id) noexcept {
        const std::lock_guard lock(mutex_);
        if (by_chunk_.contains(id)) ++wrong_;
        chunks_.erase(id);
    }
    template <class F>
    std::size_t locked(F f) const {
        const std::lock_guard lock(mutex_);
        return f();
    }

    host_memory memory_;
    mutable std::mutex mutex_;
    std::set<std::uint64_t> chunks_;
    std::map<std::uint64_t, void*> by_chunk_;
    std::map<void*, std::uint64_t> by_address_;
    std::array<fault, 4> faults_{};
    std::array<std::size_t, 4> calls_{};
    std::uint64_t ids_ = 0;
    std::size_t wrong_ = 0;
};
using fault_virtual_memory = basic_fault_virtual_memory<>;
static_assert(gpushare::virtual_memory<fault_virtual_memory>);

}  // namespace support
