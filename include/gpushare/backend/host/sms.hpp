// SPDX-License-Identifier: Apache-2.0
// SM partitions of a host device: the blocks of a partition's streams run on its SMs only, as the ledger shows. Streams
// made by the node itself run on all SMs, so tenants are protected from each other only if every tenant is in a
// partition.
//
//   gpushare::host::device_sms sms{node, gpushare::device_id{0}};
//   auto parts = sms.partition(gpushare::equal_sms(sms.split(), 2));
//   gpushare::host::stream s = parts[0].make_stream(gpushare::priority{1}, /*tag=*/7);
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/backend/host/detail/engine.hpp>
#include <gpushare/backend/host/node.hpp>
#include <gpushare/backend/host/stream.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {

/// Movable; one owner; safe from any thread. Its SMs are everybody's again when this and its streams are gone.
class sm_subset {
public:
    sm_subset(sm_subset&&) noexcept = default;
    /// Gives back the SMs that this was.
    sm_subset& operator=(sm_subset other) noexcept {  // by value: what this was is given back now
        std::swap(engine_, other.engine_);
        std::swap(device_, other.device_);
        std::swap(part_, other.part_);
        std::swap(sms_, other.sms_);
        return *this;
    }
    ~sm_subset() {
        if (engine_ != nullptr) engine_->leave_partition(device_, part_);
    }

    /// How many.
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

/// A handle: copies are the same SMs. Safe from any thread; the node must outlive it.
class device_sms {
public:
    /// The device's stream type.
    using stream = host::stream;
    /// Some of its SMs.
    using partition_type = sm_subset;

    /// Throws operation_error (no_device).
    device_sms(node& on, device_id d) : node_(&on), device_(d) { (void)on.checked(d); }

    /// In no partition: its kernels run on every SM.
    [[nodiscard]] stream make_stream(priority level = {}, std::uint32_t tag = 0) {
        return node_->make_stream(device_, level, tag);
    }
    /// By the node's options.
    [[nodiscard]] sm_split split() const noexcept { return node_->engine_->split(); }
    /// The lowest SMs that are in no subset; blocks of others that run there end first. See sm_partitionable.
    [[nodiscard]] std::vector<sm_subset> partition(std::span<const std::uint32_t> sms) {
        std::vector<sm_subset> subsets;
        subsets.reserve(sms.size());
        const auto parts = node_->engine_->open_partitions(device_.index, sms);
        for (std::size_t i = 0; i < sms.size(); ++i)
            subsets.push_back(sm_subset(node_->engine_, device_.index, parts[i], sms[i]));
        return subsets;
    }
    /// A stream that is gone counts while its work runs.
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
