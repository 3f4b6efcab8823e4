// SPDX-License-Identifier: Apache-2.0
// A program that links gpushare::compiled and calls what a server calls of a tenancy. Its objects have
// nothing of the library's classes: see check_once.sh.
#include <chrono>
#include <cstddef>
#include <utility>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/gpushare.hpp>

void handle(gpushare::tenant<gpushare::host::node>& tenant, unsigned* out);  // in handler.cpp

namespace {

using namespace gpushare::literals;
using tenancy = gpushare::tenancy<gpushare::host::node>;

// What a request does: memory, a submission with options and a callback, a place at the gate.
bool serve(tenancy::tenant& chat) {
    auto& memory = chat.memory();
    auto* x = static_cast<unsigned*>(memory.allocate(100 * sizeof(unsigned)));
    std::size_t told = 0;
    auto done = chat.submit(
        [x](auto& stream) {
            stream.launch({.blocks = 100}, [x](auto& ctx) { x[ctx.block_rank()] = 2 * ctx.block_rank(); });
        },
        {.key = 7}, [&told](const gpushare::completion&) { ++told; });
    done.wait();
    auto gate = chat.acquire();
    if (gate) gate->enqueue(chat.work_stream(), [](auto& stream) { stream.launch({.blocks = 1}, [](auto&) {}); });
    auto answer = chat.request();
    answer.submit([](auto& stream) { stream.launch({.blocks = 1}, [](auto&) {}); }).wait();
    const bool right = x[99] == 198 && told == 1 && done.status() == gpushare::errc::none;
    void* const more = memory.try_allocate(1_MiB);
    memory.deallocate_after(chat.work_stream().record(), more, 1_MiB);
    return memory.deallocate(x, 100 * sizeof(unsigned)) == gpushare::errc::none && right && gate &&
           memory.drain(gpushare::never);
}

// What an operator does.
bool change(tenancy& shared, tenancy::tenant& chat) {
    chat.resize({.memory = 8_MiB, .compute = 50_pct});
    const bool slept = chat.sleep();
    chat.wake();
    return slept && chat.usage().memory == 8_MiB && shared.rooms().size() == 2 && chat.spec().devices == 2 &&
           shared.unpromised(gpushare::device_id{0}) == 50_pct;
}

}  // namespace

int main() {
    gpushare::host::node node{{.devices = 2, .memory = 64_MiB}};
    tenancy shared{node};
    auto chat = shared.admit({.name = "chat", .memory = 16_MiB, .devices = 2, .compute = 70_pct});
    unsigned handled = 0;
    handle(chat, &handled);
    const bool right = handled == 42 && serve(chat) && change(shared, chat);
    auto refused = shared.try_admit({.name = "chat", .memory = 1_MiB});
    return right && refused.code() == gpushare::errc::duplicate_name && chat.close().complete ? 0 : 1;
}
