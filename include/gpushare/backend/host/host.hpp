// SPDX-License-Identifier: Apache-2.0
// A software node: N devices with memory, SMs and streams, in this process. The node behaves like
// hardware in all that matters to a scheduler (order, priorities, occupancy, capacity, failures),
// and keeps a ledger of its blocks.
//
//   gpushare::host::node node{{.devices = 2, .memory = 8_GiB, .sms = 4, .timing = gpushare::host::timing::modelled}};
//   gpushare::host::stream s = node.make_stream(gpushare::device_id{0}, gpushare::priority{1}, /*tag=*/7);
//
// The blocks of an SM partition's streams run on its SMs only, as the ledger shows. Streams made by
// the node itself run on all SMs, so tenants are protected from each other only if every tenant is
// in a partition.
//
//   gpushare::host::device_sms sms{node, gpushare::device_id{0}};
//   auto parts = sms.partition(gpushare::equal_sms(sms.split(), 2));
//   gpushare::host::stream on_half = parts[0].make_stream(gpushare::priority{1}, /*tag=*/7);
//
// For tests, faults can be injected into a device. For a fault of a kernel, let the kernel throw.
//
//   node.faults(gpushare::device_id{0}).fail_allocations(10, 1);  // the 11th fails
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <sys/prctl.h>

#include <gpushare/backend/host/clock.hpp>
#include <gpushare/backend/host/detail/engine.hpp>
#include <gpushare/backend/host/ledger.hpp>
#include <gpushare/backend/host/memory.hpp>
#include <gpushare/backend/host/options.hpp>
#include <gpushare/backend/host/stream.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/detail/device_order_lock.hpp>
#include <gpushare/detail/gang_residents.hpp>
#include <gpushare/detail/stable_list.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {

/// Injects faults into a device. Safe from any thread.
class fault_injector {
public:
    /// After `after` more allocations, the next `count` are refused as if the memory were full.
    void fail_allocations(std::uint64_t after, std::uint64_t count) noexcept {
        memory().fail_allocations(after, count);
    }

    /// Lets others take device memory: `wanted` bytes in all, or all that is left if this is less.
    /// Returns how many bytes they have.
    bytes take_memory(bytes wanted) noexcept { return memory().take_for_others(wanted); }

    /// Stops the stream before its next operation. Work that has started ends; work behind it waits
    /// for `resume`.
    void stall(stream& s) noexcept { s.engine_->stall(*s.state_); }
    /// Ends a stall.
    void resume(stream& s) noexcept { s.engine_->resume(*s.state_); }

    /// Loses the device for good. Queued work fails with errc::device_lost. Running blocks end, and
    /// their work fails as well. Every later launch and allocation fails. All points are reached.
    void lose_device() noexcept { engine_->lose(device_); }

private:
    friend class node;
    fault_injector(std::shared_ptr<detail::engine> engine, std::uint32_t device) noexcept
        : engine_(std::move(engine)), device_(device) {}

    [[nodiscard]] device_memory& memory() noexcept { return engine_->device(device_).memory; }

    std::shared_ptr<detail::engine> engine_;
    std::uint32_t device_;
};

}  // namespace host
namespace host {

/// The node *is* the hardware. The constructor starts one thread for each SM. The destructor works
/// like pulling the plug: it lets started blocks end, fails queued work with errc::device_lost,
/// reaches all points, and joins the threads. Streams and points may outlive the node; its memory
/// may not. Safe from any thread.
class node {
public:
    /// The type of a stream.
    using stream = host::stream;
    /// The type of a device's memory.
    using memory_type = device_memory;
    /// The clock: real time, with both timings.
    using clock_type = steady_clock;

    /// Makes a node. Throws operation_error (errc::invalid_specification) or std::system_error (too
    /// many threads).
    explicit node(const node_options& options);
    node(const node&) = delete;
    node& operator=(const node&) = delete;
    ~node();

    /// The number of devices.
    [[nodiscard]] std::uint32_t num_devices() const noexcept { return options().devices; }
    /// The options given to the constructor.
    [[nodiscard]] const node_options& options() const noexcept { return engine_->options(); }
    /// The clock of deadlines and spans.
    [[nodiscard]] steady_clock get_clock() const noexcept { return {}; }
    /// The order in which gangs are enqueued.
    [[nodiscard]] gpushare::detail::gang_residents<point>& gangs() noexcept { return gangs_; }

    // The following functions throw operation_error (errc::no_device) if there is no such device.

    /// The device's memory. Throws operation_error (no_device), as do all functions with a device.
    [[nodiscard]] device_memory& memory(device_id d) { return at(d).memory; }
    /// The record of blocks that ran on the device.
    [[nodiscard]] host::ledger& ledger(device_id d) { return at(d).ledger; }
    /// Injects faults into the device, for tests.
    [[nodiscard]] fault_injector faults(device_id d) { return {engine_, checked(d)}; }
    /// Whether the device is lost.
    [[nodiscard]] bool lost(device_id d) const { return at(d).lost.load(std::memory_order_acquire); }
    /// Makes a stream. Its work has priority `level`, is recorded with `tag` in the ledger, and
    /// runs on all SMs, partitioned or not.
    [[nodiscard]] stream make_stream(device_id d, priority level = {}, std::uint32_t tag = 0) {
        return {engine_, engine_->open_stream(checked(d), level, tag)};
    }

private:
    friend class device_sms;

    /// The threads. A member by itself, so that the started threads end if starting another one
    /// fails.
    class crew {
    public:
        explicit crew(detail::engine& e) noexcept : engine_(e) {}
        crew(const crew&) = delete;
        crew& operator=(const crew&) = delete;
        ~crew();
        void hire(std::size_t n);

    private:
        detail::engine& engine_;
        gpushare::detail::stable_list<std::thread> threads_;
    };

    static const node_options& checked(const node_options& o);
    [[nodiscard]] std::uint32_t checked(device_id d) const;
    [[nodiscard]] detail::device_state& at(device_id d) const { return engine_->device(checked(d)); }

    const std::shared_ptr<detail::engine> engine_;
    gpushare::detail::gang_residents<point> gangs_;
    crew crew_;
};
static_assert(gpushare::node<node>);

#if GPUSHARE_BODIES

GPUSHARE_INLINE node::~node() = default;

GPUSHARE_INLINE node::crew::~crew() {
    engine_.shut_down();
    for (std::thread& t : threads_) t.join();
}

GPUSHARE_INLINE void node::crew::hire(std::size_t n) {
    while (threads_.size() < n) {
        threads_.emplace_back([&e = engine_] {
            // Timers fire on time, not up to 50 us later.
            ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
            e.work();
        });
    }
}

GPUSHARE_INLINE node::node(const node_options& options)
    : engine_(std::make_shared<detail::engine>(checked(options))), gangs_(options.devices), crew_(*engine_) {
    crew_.hire(std::size_t{options.devices} * options.sms);
}

GPUSHARE_INLINE auto node::checked(const node_options& o) -> const node_options& {
    if (o.devices == 0 || o.devices > gpushare::detail::device_order_lock::max_devices || o.sms == 0 || o.sm_unit == 0)
        throw operation_error(errc::invalid_specification, {},
                              "a host node needs 1 to 1024 devices of 1 or more SMs, in units of 1 or more");
    return o;
}

GPUSHARE_INLINE std::uint32_t node::checked(device_id d) const {
    if (d.index >= num_devices())
        raise({.code = errc::no_device, .asked = d.index, .limit = num_devices()}, {}, "host node");
    return d.index;
}

#endif  // GPUSHARE_BODIES

}  // namespace host
namespace host {

/// A partition: some SMs of a device. Movable; one owner; safe from any thread. The SMs are in no
/// partition again when this object and its streams are gone.
class sm_subset {
public:
    sm_subset(sm_subset&&) noexcept = default;
    /// Gives back the SMs that this object had.
    sm_subset& operator=(sm_subset other) noexcept {  // by value: the old SMs are given back now
        std::swap(engine_, other.engine_);
        std::swap(device_, other.device_);
        std::swap(part_, other.part_);
        std::swap(sms_, other.sms_);
        return *this;
    }
    ~sm_subset() {
        if (engine_ != nullptr) engine_->leave_partition(device_, part_);
    }

    /// The number of SMs.
    [[nodiscard]] std::uint32_t sms() const noexcept { return sms_; }
    /// A stream in the subset; see node::make_stream.
    [[nodiscard]] stream make_stream(priority level = {}, std::uint32_t tag = 0) {
        return {engine_, engine_->open_stream(device_, level, tag, part_)};
    }

private:
    friend class device_sms;
    sm_subset(std::shared_ptr<detail::engine> e, std::uint32_t device, std::uint32_t part, std::uint32_t sms) noexcept
        : engine_(std::move(e)), device_(device), part_(part), sms_(sms) {}

    std::shared_ptr<detail::engine> engine_;
    std::uint32_t device_, part_, sms_;
};

/// The SMs of a device as a handle: copies refer to the same SMs. Safe from any thread; the node
/// must outlive it.
class device_sms {
public:
    /// The device's stream type.
    using stream = host::stream;
    /// The type of a partition.
    using partition_type = sm_subset;

    /// The SMs of device `d`. Throws operation_error (no_device).
    device_sms(node& on, device_id d) : node_(&on), device_(d) { (void)on.checked(d); }

    /// Makes a stream in no partition: its kernels run on every SM.
    [[nodiscard]] stream make_stream(priority level = {}, std::uint32_t tag = 0) {
        return node_->make_stream(device_, level, tag);
    }
    /// How the SMs can be split, by the node's options.
    [[nodiscard]] sm_split split() const noexcept { return node_->engine_->split(); }
    /// Makes partitions of the lowest SMs that are in none. Other blocks that run on these SMs end
    /// first. See sm_partitionable.
    [[nodiscard]] std::vector<sm_subset> partition(std::span<const std::uint32_t> sms) {
        std::vector<sm_subset> subsets;
        subsets.reserve(sms.size());
        const auto parts = node_->engine_->open_partitions(device_.index, sms);
        for (std::size_t i = 0; i < sms.size(); ++i)
            subsets.push_back(sm_subset(node_->engine_, device_.index, parts[i], sms[i]));
        return subsets;
    }
    /// The tags of streams in no partition. A destroyed stream counts while its work runs.
    [[nodiscard]] std::vector<std::uint32_t> outside_any_partition() const {
        return node_->engine_->outside_any_partition(device_.index);
    }

private:
    node* node_;
    device_id device_;
};
static_assert(sm_partitionable<device_sms>);

}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
