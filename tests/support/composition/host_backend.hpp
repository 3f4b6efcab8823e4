// SPDX-License-Identifier: Apache-2.0
// The host node as a backend for the composition matrix. Its points count queries, and a test can
// interrupt calls of the driver.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/backend/host/virtual_memory.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

#include "support/composition/interruption.hpp"
#include "support/composition/stacks.hpp"

namespace support::composition {

/// A point that counts the calls of reached().
class asked_point : public gpushare::host::point {
    using base = gpushare::host::point;

public:
    asked_point() noexcept = default;
    asked_point(base p) noexcept : base(std::move(p)) {}  // NOLINT: what a stream of the node records

    static inline std::atomic<std::uint64_t> asked{0};

    [[nodiscard]] bool reached() const noexcept {
        asked.fetch_add(1, std::memory_order_relaxed);
        return base::reached();
    }
    template <class... Interrupt>
    static bool wait_any(std::span<const asked_point> points, gpushare::instant deadline, Interrupt&... by) {
        return base::wait_any(std::vector<base>(points.begin(), points.end()), deadline, by...);
    }
};
static_assert(gpushare::interruptible_point<asked_point>);

class asking_stream : public gpushare::host::stream {
public:
    using point = asked_point;

    asking_stream(gpushare::host::stream s) noexcept : gpushare::host::stream(std::move(s)) {}  // NOLINT: the node's
    [[nodiscard]] point record() { return gpushare::host::stream::record(); }
};

class told_memory : public gpushare::host::device_memory {
    using base = gpushare::host::device_memory;

public:
    told_memory(bytes capacity, interruption& by) : base({.capacity = capacity}), by_(&by) {}

    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment) {
        by_->strike();
        return base::allocate(size, alignment);
    }
    [[nodiscard]] void* try_allocate(std::size_t size, std::size_t alignment, failure* why = nullptr) noexcept {
        by_->strike();
        return base::try_allocate(size, alignment, why);
    }

private:
    interruption* by_;
};

class told_chunks : public gpushare::host::virtual_memory {
    using base = gpushare::host::virtual_memory;

public:
    told_chunks(told_memory& of, bytes granularity, interruption& by) : base(of, granularity), by_(&by) {}

    [[nodiscard]] gpushare::result<chunk> create() noexcept {
        by_->strike();
        return base::create();
    }

private:
    interruption* by_;
};

class told_node : public gpushare::host::node {
public:
    using stream = asking_stream;
    using memory_type = told_memory;

    told_node(const gpushare::host::node_options& o, interruption& allocations, interruption& new_streams)
        : gpushare::host::node(o), new_streams_(&new_streams) {
        for (std::uint32_t d = 0; d < o.devices; ++d) memory_.emplace_back(o.memory, allocations);
    }
    [[nodiscard]] told_memory& memory(gpushare::device_id d) { return memory_.at(d.index); }
    [[nodiscard]] stream make_stream(gpushare::device_id d, gpushare::priority level = {}, std::uint32_t tag = 0) {
        new_streams_->strike();
        return gpushare::host::node::make_stream(d, level, tag);
    }

private:
    interruption* new_streams_;
    std::deque<told_memory> memory_;
};
static_assert(gpushare::node<told_node>);

class host_backend {
public:
    using node_type = told_node;
    using stream = asking_stream;
    using memory_type = told_memory;
    using pinned_type = told_memory;  // further host memory
    using virtual_memory = told_chunks;

    host_backend(bytes capacity, std::uint32_t devices)
        : node_{{.devices = devices, .memory = capacity, .sms = 1, .timing = gpushare::host::timing::modelled},
                allocations_,
                new_streams_},
          pinned_{capacity, allocations_} {}

    [[nodiscard]] node_type& node() { return node_; }
    [[nodiscard]] memory_type& memory() { return node_.memory(first); }
    [[nodiscard]] virtual_memory& chunks() { return chunks_; }
    [[nodiscard]] stream make_stream(gpushare::device_id d = first) { return node_.make_stream(d); }
    [[nodiscard]] pinned_type& pinned() { return pinned_; }
    /// The memory in use on all devices and in pinned memory.
    [[nodiscard]] bytes used() {
        bytes sum = memory().taken_by_others() + pinned_.used();
        for (std::uint32_t d = 0; d < node_.num_devices(); ++d) sum += node_.memory({d}).used();
        return sum;
    }
    /// Takes a block past all allocators; null if there is no room.
    [[nodiscard]] void* take_for_library() {
        allocations_.strike();
        const std::lock_guard lock(library_);
        const bytes before = memory().taken_by_others(), wanted = before + bytes{unit};
        if (!memory().lost() && memory().take_for_others(wanted) == wanted) return new std::byte;
        (void)memory().take_for_others(before);
        return nullptr;
    }
    void give_for_library(void* p) {
        const std::lock_guard lock(library_);
        delete static_cast<std::byte*>(p);
        (void)memory().take_for_others(memory().taken_by_others() - bytes{unit});
    }
    void fail_allocation(std::uint64_t after) { memory().fail_allocations(after, 1); }
    void heal() { memory().fail_allocations(0, 0); }
    /// Enqueues some work, and keeps the stream's work from beginning until it is let go.
    void stall(stream& s) {
        using namespace std::chrono_literals;
        node_.faults(first).stall(s);
        s.enqueue(1us);
    }
    void resume(stream& s) { node_.faults(first).resume(s); }
    static void fail(stream& s) {
        s.launch({.blocks = 1}, [](auto&) { throw std::runtime_error("on the device"); });
    }
    static void work(stream& s) {
        s.launch({.blocks = 1}, [](auto&) {});
    }
    void hold(stream& s) { stall(s); }
    void let_go(stream& s) { resume(s); }
    void lose() {
        memory().lose();
        node_.faults(first).lose_device();
    }
    [[nodiscard]] interruption& allocations() { return allocations_; }
    [[nodiscard]] interruption& new_streams() { return new_streams_; }
    [[nodiscard]] static std::uint64_t questions() { return asked_point::asked.load(); }

private:
    static constexpr gpushare::device_id first{0};
    interruption allocations_, new_streams_;
    node_type node_;
    pinned_type pinned_;
    std::mutex library_;
    virtual_memory chunks_{memory(), bytes{unit}, allocations_};
};

}  // namespace support::composition
