// SPDX-License-Identifier: Apache-2.0
// Torch's allocator for CUDA with tenants in front of it. Allocations that torch_blocks assigns to
// a tenant come from that tenant's memory. All other allocations come from the previous allocator.
//
//   detail::torch_allocator::install();       // may be called again
//
// Torch's own mechanism, a MemPool with a filter (beginAllocateToPool), doesn't work for tenants.
// While any filter is in force on a device, torch doesn't reclaim blocks that several streams used,
// doesn't free its cache before it reports that memory is exhausted, and fails an internal
// assertion when any pool is emptied, as the end of every MemPool does. Captures have such filters,
// too, but they are short.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/interop/detail/torch_blocks.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

using torch_pool_id = c10::MempoolId_t;

/// Throws torch's error: "CUDA out of memory. " followed by the tenant's sentence.
[[noreturn]] inline void throw_out_of_memory(const torch_owner& whose, const failure& why) {
    throw c10::OutOfMemoryError({__func__, "gpushare/interop/libtorch.hpp", 0},
                                "CUDA out of memory. " + whose.sentence(why));
}

/// Forwards all calls to another allocator. Derived classes override the calls that concern
/// tenants: torch_graph_memory serves one tenant's pools, and torch_allocator serves all tenants.
class torch_forwarding : public c10::cuda::CUDACachingAllocator::CUDAAllocator {
public:
    explicit torch_forwarding(c10::cuda::CUDACachingAllocator::CUDAAllocator& to) noexcept : next_(&to) {}

    c10::DataPtr allocate(std::size_t n) override { return next_->allocate(n); }
    c10::DeleterFnPtr raw_deleter() const override { return next_->raw_deleter(); }
    void copy_data(void* to, const void* from, std::size_t n) const override { next_->copy_data(to, from, n); }
    bool initialized() override { return next_->initialized(); }
    void emptyCache(torch_pool_id id) override { next_->emptyCache(id); }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
        return next_->getDeviceStats(d);
    }
    void resetAccumulatedStats(c10::DeviceIndex d) override { next_->resetAccumulatedStats(d); }
    void resetPeakStats(c10::DeviceIndex d) override { next_->resetPeakStats(d); }
    std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex d) override { return next_->getMemoryInfo(d); }

    void* raw_alloc(std::size_t n) override { return next_->raw_alloc(n); }
    void* raw_alloc_with_stream(std::size_t n, cudaStream_t s) override { return next_->raw_alloc_with_stream(n, s); }
    void raw_delete(void* p) override { next_->raw_delete(p); }
    void init(int devices) override { next_->init(devices); }
    double getMemoryFraction(c10::DeviceIndex d) override { return next_->getMemoryFraction(d); }
    void setMemoryFraction(double f, c10::DeviceIndex d) override { next_->setMemoryFraction(f, d); }
    std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize> getExpandableSegmentSizes(
        c10::DeviceIndex d) override {
        return next_->getExpandableSegmentSizes(d);
    }
    void enable(bool on) override { next_->enable(on); }
    bool isEnabled() const override { return next_->isEnabled(); }
    void cacheInfo(c10::DeviceIndex d, std::size_t* largest) override { next_->cacheInfo(d, largest); }
    void* getBaseAllocation(void* p, std::size_t* n) override { return next_->getBaseAllocation(p, n); }
    using CUDAAllocator::recordStream;
    void recordStream(const c10::DataPtr& p, c10::cuda::CUDAStream s) override { next_->recordStream(p, s); }
    c10::cuda::CUDACachingAllocator::SnapshotInfo snapshot(torch_pool_id id, bool traces) override {
        return next_->snapshot(id, traces);
    }
    void beginAllocateToPool(c10::DeviceIndex d, torch_pool_id id, std::function<bool(cudaStream_t)> filter) override {
        next_->beginAllocateToPool(d, id, std::move(filter));
    }
    void endAllocateToPool(c10::DeviceIndex d, torch_pool_id id) override { next_->endAllocateToPool(d, id); }
    void releasePool(c10::DeviceIndex d, torch_pool_id id) override { next_->releasePool(d, id); }
    int getPoolUseCount(c10::DeviceIndex d, torch_pool_id id) override { return next_->getPoolUseCount(d, id); }
    void createOrIncrefPool(c10::DeviceIndex d, torch_pool_id id, std::shared_ptr<CUDAAllocator> from) override {
        next_->createOrIncrefPool(d, id, std::move(from));
    }
    void setUseOnOOM(c10::DeviceIndex d, torch_pool_id id, bool use) override { next_->setUseOnOOM(d, id, use); }
    void setNoSplit(c10::DeviceIndex d, torch_pool_id id) override { next_->setNoSplit(d, id); }
    bool checkPoolLiveAllocations(c10::DeviceIndex d, torch_pool_id id,
                                  const std::unordered_set<void*>& expected) override {
        return next_->checkPoolLiveAllocations(d, id, expected);
    }
    c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void* p) override {
        return next_->shareIpcHandle(p);
    }
    std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return next_->getIpcDevPtr(std::move(handle)); }
    bool isHistoryEnabled() override { return next_->isHistoryEnabled(); }
    void recordHistory(bool enabled, c10::cuda::CUDACachingAllocator::CreateContextFn context, std::size_t entries,
                       c10::cuda::CUDACachingAllocator::RecordContext when, bool clear,
                       const std::vector<std::string>& skip) override {
        next_->recordHistory(enabled, context, entries, when, clear, skip);
    }
    void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& a) override {
        next_->recordAnnotation(a);
    }
    void pushCompileContext(std::string& s) override { next_->pushCompileContext(s); }
    void popCompileContext() override { next_->popCompileContext(); }
    void setUserMetadata(const std::string& s) override { next_->setUserMetadata(s); }
    std::string getUserMetadata() override { return next_->getUserMetadata(); }
    void attachOutOfMemoryObserver(c10::cuda::CUDACachingAllocator::OutOfMemoryObserver o) override {
        next_->attachOutOfMemoryObserver(std::move(o));
    }
    void attachAllocatorTraceTracker(c10::cuda::CUDACachingAllocator::AllocatorTraceTracker t) override {
        next_->attachAllocatorTraceTracker(std::move(t));
    }
    void enablePeerAccess(c10::DeviceIndex d, c10::DeviceIndex other) override { next_->enablePeerAccess(d, other); }
    cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, std::size_t n, cudaStream_t s,
                            bool peers) override {
        return next_->memcpyAsync(to, to_device, from, from_device, n, s, peers);
    }
    std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> getCheckpointState(c10::DeviceIndex d,
                                                                                        torch_pool_id id) override {
        return next_->getCheckpointState(d, id);
    }
    c10::cuda::CUDACachingAllocator::CheckpointDelta setCheckpointPoolState(
        c10::DeviceIndex d, std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> s) override {
        return next_->setCheckpointPoolState(d, std::move(s));
    }
    std::string name() override { return next_->name(); }

protected:
    [[nodiscard]] c10::cuda::CUDACachingAllocator::CUDAAllocator& next() const noexcept { return *next_; }

private:
    c10::cuda::CUDACachingAllocator::CUDAAllocator* next_;
};

/// Segments for a torch pool of graphs, from a tenant's memory. Torch calls this object under the
/// lock of the device's allocator, during a capture.
class torch_graph_memory final : public torch_forwarding {
public:
    torch_graph_memory(c10::cuda::CUDACachingAllocator::CUDAAllocator& next,
                       std::shared_ptr<torch_owner> whose) noexcept
        : torch_forwarding(next), whose_(std::move(whose)) {}

    void* raw_alloc(std::size_t n) override {
        const c10::cuda::CUDAStreamCaptureModeGuard may_ask{cudaStreamCaptureModeRelaxed};
        const auto got = torch_blocks::of_process().try_allocate_for_graphs(whose_, n);
        if (got.p == nullptr) throw_out_of_memory(*whose_, got.why);
        return got.p;
    }
    void* raw_alloc_with_stream(std::size_t n, cudaStream_t) override { return raw_alloc(n); }
    void raw_delete(void* p) override {
        const c10::cuda::CUDAStreamCaptureModeGuard may_ask{cudaStreamCaptureModeRelaxed};
        (void)torch_blocks::of_process().deallocate(p);
    }

private:
    std::shared_ptr<torch_owner> whose_;
};

/// The allocator for all tenants. Any thread may use it.
class torch_allocator final : public torch_forwarding {
public:
    /// Puts the process's allocator in front of torch's, if it isn't there yet. The allocator stays
    /// there permanently, because its blocks may outlive everything else.
    static void install() {
        static std::mutex one_at_a_time;
        const std::lock_guard lock(one_at_a_time);
        torch_allocator& all = of_process();
        if (c10::cuda::CUDACachingAllocator::get() == &all) return;
        c10::SetAllocator(c10::kCUDA, &all);
        c10::cuda::CUDACachingAllocator::allocator.store(&all);
    }

    c10::DataPtr allocate(std::size_t n) override {
        const auto device = c10::cuda::current_device();
        void* const p = n == 0 ? nullptr : of_tenant(n, device, c10::cuda::getCurrentCUDAStream(device).stream());
        if (p == nullptr) return next().allocate(n);
        return {p, p, &free_any, c10::Device(c10::kCUDA, device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
    void* raw_alloc(std::size_t n) override {
        if (n == 0) return nullptr;
        const auto device = c10::cuda::current_device();
        return raw_alloc_with_stream(n, c10::cuda::getCurrentCUDAStream(device).stream());
    }
    void* raw_alloc_with_stream(std::size_t n, cudaStream_t s) override {
        if (n == 0) return nullptr;
        void* const p = of_tenant(n, c10::cuda::current_device(), s);
        return p != nullptr ? p : next().raw_alloc_with_stream(n, s);
    }
    void raw_delete(void* p) override { free_any(p); }

    using torch_forwarding::recordStream;
    void recordStream(const c10::DataPtr& p, c10::cuda::CUDAStream s) override {
        if (p.get() == nullptr || torch_blocks::of_process().use(p.get(), s.stream())) return;
        next().recordStream(p, s);
    }
    void emptyCache(torch_pool_id id) override {
        next().emptyCache(id);
        if (id == torch_pool_id{0, 0}) torch_blocks::of_process().give_back();
    }
    void* getBaseAllocation(void* p, std::size_t* n) override {
        refuse_tenants(p);
        return next().getBaseAllocation(p, n);
    }
    c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void* p) override {
        refuse_tenants(p);
        return next().shareIpcHandle(p);
    }

    void beginAllocateToPool(c10::DeviceIndex d, torch_pool_id id, std::function<bool(cudaStream_t)> filter) override {
        const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(d).stream();
        auto whose = torch_blocks::of_process().owner_of(d, stream);
        const std::lock_guard lock(mutex_);
        if (whose != nullptr && !graphs_.contains({d, id}) && !exists(d, id)) {
            next().createOrIncrefPool(d, id, std::make_shared<torch_graph_memory>(next(), whose));
            graphs_.emplace(std::pair{d, id}, whose);
        }
        next().beginAllocateToPool(d, id, filter);
        if (whose != nullptr) whose->captures(stream, true);
        underway_.push_back({d, id, stream, std::move(whose), std::move(filter)});
        // Release: a thread that sees the count looks under the mutex.
        captures_.store(underway_.size(), std::memory_order_release);
    }
    void endAllocateToPool(c10::DeviceIndex d, torch_pool_id id) override {
        next().endAllocateToPool(d, id);
        const std::lock_guard lock(mutex_);
        const auto at = std::ranges::find_if(underway_, [&](const capture& c) { return c.device == d && c.id == id; });
        if (at == underway_.end()) return;
        if (at->whose != nullptr) at->whose->captures(at->stream, false);
        underway_.erase(at);
        captures_.store(underway_.size(), std::memory_order_release);
        drop_graphs();
    }
    void releasePool(c10::DeviceIndex d, torch_pool_id id) override {
        next().releasePool(d, id);
        const std::lock_guard lock(mutex_);
        drop_graphs();
    }

private:
    using torch_forwarding::torch_forwarding;

    [[nodiscard]] static torch_allocator& of_process() {
        static torch_allocator* const all = new torch_allocator(*c10::cuda::CUDACachingAllocator::get());
        return *all;
    }

    struct capture {
        c10::DeviceIndex device;
        torch_pool_id id;
        cudaStream_t stream;
        std::shared_ptr<torch_owner> whose;
        std::function<bool(cudaStream_t)> filter;
    };

    static void free_any(void* p) {
        if (p == nullptr || torch_blocks::of_process().deallocate(p)) return;
        of_process().next().raw_delete(p);
    }

    // Returns null if the block doesn't belong to a tenant, or belongs to a graph: torch serves
    // both.
    [[nodiscard]] void* of_tenant(std::size_t n, c10::DeviceIndex device, cudaStream_t s) {
        // Acquire: a capture for which this thread works began earlier, so this thread sees it.
        if (captures_.load(std::memory_order_acquire) != 0 && is_captured(device, s)) return nullptr;
        const auto got = torch_blocks::of_process().try_allocate(device, s, n);
        if (got.whose != nullptr && got.p == nullptr) throw_out_of_memory(*got.whose, got.why);
        return got.p;
    }
    [[nodiscard]] bool is_captured(c10::DeviceIndex device, cudaStream_t s) {
        const std::lock_guard lock(mutex_);
        return std::ranges::any_of(underway_, [&](const capture& c) { return c.device == device && c.filter(s); });
    }
    [[nodiscard]] bool exists(c10::DeviceIndex d, torch_pool_id id) {
        try {
            return next().getPoolUseCount(d, id) > 0;
        } catch (const c10::Error&) {  // there is no such pool
            return false;
        }
    }
    // Empties the pools whose graphs are all gone. Torch can't empty a pool during a capture, so
    // the end of the last capture calls this function again.
    void drop_graphs() noexcept {
        if (!underway_.empty()) return;
        std::erase_if(graphs_, [&](const auto& g) {
            const auto& [d, id] = g.first;
            try {
                if (next().getPoolUseCount(d, id) > 1) return false;
                next().releasePool(d, id);
                next().emptyCache(id);
            } catch (const c10::Error&) {  // the pool was released before
            }
            return true;
        });
    }
    static void refuse_tenants(void* p) {
        TORCH_CHECK(!torch_blocks::of_process().has(p), "a tenant's tensor isn't shared with other processes");
    }

    std::mutex mutex_;
    std::atomic<std::size_t> captures_{0};
    std::vector<capture> underway_;
    std::map<std::pair<c10::DeviceIndex, torch_pool_id>, std::shared_ptr<torch_owner>> graphs_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
