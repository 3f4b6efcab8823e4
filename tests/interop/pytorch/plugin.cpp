// SPDX-License-Identifier: Apache-2.0
// What an embedder builds for PyTorch: a shared object with the memory of two tenants behind C
// functions. On the host device, whose streams' addresses are the handles.
#include <cstdint>
#include <memory>

#include <sys/types.h>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/interop/pytorch.hpp>
#include <gpushare/memory/pool_resource.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "interop/pytorch/plugin.hpp"

using namespace gpushare::literals;
using gpushare::device_id;

namespace {

using node = gpushare::host::node;
using memory = gpushare::tenant_memory<node::memory_type, node::stream::point>;
using pool = gpushare::pool_resource<memory, node::stream::point>;

struct server {
    node devices{{.devices = 2, .memory = 64_MiB, .sms = 2}};
    std::atomic<int> wrong_frees{0};
    gpushare::tenancy<node> shared{devices, {.events = [this](const gpushare::tenant_event& e) {
                                       if (e.what == gpushare::tenant_event::kind::wrong_free) ++wrong_frees;
                                   }}};
    gpushare::tenant<node> chat = admit("chat"), batch = admit("batch");
    // One tenant has each block from the device, the other a pool in between, as it should.
    pool near{batch.memory(0), {.segment = 2_MiB}}, far{batch.memory(1), {.segment = 2_MiB}};
    gpushare::pytorch_allocator<memory, node> for_chat{devices};
    gpushare::pytorch_allocator<pool, node> for_batch{devices, "batch"};

    server() {
        for (std::uint32_t i = 0; i < 2; ++i) {  // PyTorch sees the devices in another order
            for_chat.add(static_cast<int>(1 - i), device_id{i}, chat.memory(i));
            for_batch.add(static_cast<int>(1 - i), device_id{i}, i == 0 ? near : far);
        }
    }

    gpushare::tenant<node> admit(const char* name) {
        return shared.admit({.name = name, .memory = 16_MiB, .devices = 2, .compute = 40_pct});
    }
};
std::unique_ptr<server> running;

}  // namespace

extern "C" {

// For PyTorch. Its cudaStream_t is a pointer, as any other handle.
void* chat_malloc(ssize_t size, int device, native_stream* stream) {
    return running->for_chat.allocate(size, device, stream);
}
void* chat_try_malloc(ssize_t size, int device, native_stream* stream) {
    return running->for_chat.try_allocate(size, device, stream);
}
void chat_free(void* p, ssize_t size, int device, native_stream* stream) {
    running->for_chat.deallocate(p, size, device, stream);
}
void chat_record_stream(void* p, native_stream* stream) { running->for_chat.record_stream(p, stream); }
void* batch_malloc(ssize_t size, int device, native_stream* stream) {
    return running->for_batch.allocate(size, device, stream);
}
void batch_free(void* p, ssize_t size, int device, native_stream* stream) {
    if (running->for_batch.deallocate(p, size, device, stream) != gpushare::errc::none) ++running->wrong_frees;
}

// For the server and the test.
void start() { running = std::make_unique<server>(); }
void stop() { running.reset(); }
native_stream* make_stream(int device) {
    return reinterpret_cast<native_stream*>(
        new node::stream(running->devices.make_stream({static_cast<std::uint32_t>(1 - device)})));
}
void destroy_stream(native_stream* s) { delete reinterpret_cast<node::stream*>(s); }
void occupy(native_stream* s, gate* until) {
    reinterpret_cast<node::stream*>(s)->launch({}, until->kernel());
    until->wait_inside(1);
}
void synchronize(native_stream* s) { reinterpret_cast<node::stream*>(s)->record().wait(gpushare::never); }
std::uint64_t chat_charged(int device) {
    auto& m = running->chat.memory(static_cast<std::size_t>(1 - device));
    m.collect();
    return (m.capacity() - m.free()).count();
}
std::uint64_t batch_used(int device) { return (device == 1 ? running->near : running->far).usage().used.count(); }
std::uint64_t batch_charged(int device) {
    auto& m = running->batch.memory(static_cast<std::size_t>(1 - device));
    return (m.capacity() - m.free()).count();
}
int wrong_frees() { return running->wrong_frees.load(); }
std::uint64_t unfreed() { return running->for_chat.unfreed() + running->for_batch.unfreed(); }
}
