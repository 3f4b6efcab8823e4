// SPDX-License-Identifier: Apache-2.0
// What an embedder builds for PyTorch: a shared object with two tenants of the first device behind
// C functions, their memory for MemPools and their turns for what a Python function enqueues.
// tenants.py uses it, on a device.
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include <sys/types.h>

#include <gpushare/backend/cuda/cuda.hpp>
#include <gpushare/interop/pytorch.hpp>
#include <gpushare/tenant/tenancy.hpp>

using namespace gpushare::literals;

namespace {

using node = gpushare::cuda::node;
using memory = gpushare::tenant<node>::memory_type;

struct server {
    node devices{{.devices = {0}}};
    gpushare::tenancy<node> shared{devices};
    gpushare::tenant<node> chat = shared.admit({.name = "chat", .memory = 2_GiB, .compute = 30_pct});
    gpushare::tenant<node> batch = shared.admit({.name = "batch", .memory = 1_GiB, .compute = 70_pct});
    gpushare::pytorch_allocator<memory, node> for_chat{devices, "chat"}, for_batch{devices, "batch"};
    std::deque<gpushare::tenant<node>::ticket> of_chat, of_batch;

    server() {
        for_chat.add(0, gpushare::device_id{0}, chat.memory());
        for_batch.add(0, gpushare::device_id{0}, batch.memory());
    }
};

/// PyTorch frees its last blocks when the process ends: it is never destroyed.
server& running() {
    static server& one = *new server;
    return one;
}

gpushare::tenant<node>& tenant(int number) { return number == 0 ? running().chat : running().batch; }
auto& open_of(int number) { return number == 0 ? running().of_chat : running().of_batch; }
/// Bytes, without what pools keep for the next allocation.
std::uint64_t used_by(gpushare::tenant<node>& who) {
    const auto now = who.usage();
    return (now.current - now.idle).count();
}

}  // namespace

extern "C" {
void* chat_malloc(ssize_t size, int device, cudaStream_t stream) {
    return running().for_chat.try_allocate(size, device, stream);
}
void chat_free(void* p, ssize_t size, int device, cudaStream_t stream) {
    running().for_chat.deallocate(p, size, device, stream);
}
void* batch_malloc(ssize_t size, int device, cudaStream_t stream) {
    return running().for_batch.try_allocate(size, device, stream);
}
void batch_free(void* p, ssize_t size, int device, cudaStream_t stream) {
    running().for_batch.deallocate(p, size, device, stream);
}

std::uint64_t chat_used() { return used_by(running().chat); }
std::uint64_t batch_used() { return used_by(running().batch); }
std::uint64_t batch_refused() { return running().batch.usage().refused; }
// Chat is 0, batch 1. Each is called by one thread.
cudaStream_t stream_of(int number) { return tenant(number).work_stream().native_handle(); }
// In the tenant's turn; it has up to four under way.
void run(int number, void (*enqueue)()) {
    auto& open = open_of(number);
    open.push_back(tenant(number).submit([enqueue](auto&) { enqueue(); }));
    if (open.size() < 4) return;
    open.front().wait();
    open.pop_front();
}
void finish(int number) {
    for (const auto& ticket : std::exchange(open_of(number), {})) ticket.wait();
}
std::uint64_t device_time_of(int number) {
    return static_cast<std::uint64_t>(tenant(number).usage().device_time.count());
}

std::uint64_t unfreed() { return running().for_chat.unfreed() + running().for_batch.unfreed(); }
}
