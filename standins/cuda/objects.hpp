// SPDX-License-Identifier: Apache-2.0
// The objects behind CUDA's handles in the stand-in. Plain data, guarded by the machine's mutex.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "standin.hpp"

namespace standin::detail {

struct stream;
struct context;

/// An object that a graph owns beside its nodes. When the last owner drops the object, its callback
/// runs within the call that dropped it, in the same thread. The callback must not call CUDA; if it
/// does, it deadlocks. (Runtime API, cudaUserObjectCreate.)
struct user_object {
    user_object(cudaHostFn_t at_end, void* of) : destroy(at_end), argument(of) {}
    user_object(const user_object&) = delete;
    user_object& operator=(const user_object&) = delete;
    ~user_object() { destroy(argument); }

    cudaHostFn_t destroy;
    void* argument;
};
using user_objects = std::vector<std::shared_ptr<user_object>>;

/// A capture, which records work instead of doing it.
struct capture {
    std::uint64_t id = 0;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    std::thread::id thread{};
    stream* origin = nullptr;
    std::set<stream*> streams{};
    bool invalid = false;
    cudaGraph_t graph = nullptr;  // the resulting graph
    user_objects owns{};
};

/// How far captured streams have come, by their ids. A stream has joined the work that it has seen
/// of other streams.
using progress = std::map<std::uint64_t, std::uint64_t>;

/// One recording of an event. Waits for a recording stay valid after the event is recorded again.
struct mark {
    int device = 0;
    bool reached = false;
    ns at{};
    std::shared_ptr<capture> captured{};  // recorded in a capture: never reached, only joined
    progress seen{};
};

struct range {
    std::uintptr_t begin = 0;
    std::size_t size = 0;

    [[nodiscard]] bool meets(const range& other) const {
        return begin < other.begin + other.size && other.begin < begin + size;
    }
};

/// An entry of a stream's queue. It begins once the entries before it have ended and `awaited` is
/// reached.
struct operation {
    ns length{}, enqueued{};
    std::function<void()> effect{};  // at its end
    kernel_start starts{};           // for a kernel whose length is its computing time
    std::shared_ptr<mark> awaited{}, reaches{};
    std::optional<std::uintptr_t> until_zero{};  // the address of the 64-bit word for which it waits
    ns seen_closed = ns::min();                  // when the word was last seen not to be 0
    range writes{}, reads{};                     // of copies, so that unmapping memory in use is found
    std::shared_ptr<context> in{};               // of graph nodes: the context of the capture, with its SMs
    bool spins = false;                          // a kernel that may wait for other kernels
    std::vector<std::uintptr_t> touches{};       // the addresses to which a kernel's arguments point
    const void* kernel = nullptr;                // the kernel to load with the graph
    std::uint64_t order = 0;                     // in the order of enqueuing, over all streams
    std::uint64_t known = 0;                     // see engine
    std::optional<ns> begun{};
};

struct context {
    int device = 0;
    std::set<std::uint32_t> sms{};  // the numbers of the SMs on which its work runs
    bool green = false;
    bool users = false;  // made by cuCtxCreate
    unsigned long long id = 0;
    // The devices whose memory the context reaches. Peer access is a property of contexts, and not
    // of devices (Driver API, cuCtxEnablePeerAccess).
    std::set<int> peers{};
    bool destroyed = false;   // although streams of it still existed
    std::size_t streams = 0;  // the number of its streams
};

struct stream : std::enable_shared_from_this<stream> {
    cudaStream_t handle = nullptr;
    std::uint64_t id = 0;
    std::shared_ptr<context> in{};
    int priority = 0;
    std::deque<operation> queue{};
    running_kernel runs{};  // the first entry, if it is a running kernel
    ns idle_since{};
    std::uint32_t connection = 0;  // the hardware queue
    bool held = false;
    bool blocking = false;  // synchronises with the legacy stream

    std::shared_ptr<capture> recording{};
    std::vector<operation> recorded{};  // kept by the capture's origin, for all its streams
    progress seen{};
};

struct event {
    std::shared_ptr<context> in{};
    unsigned flags = 0;
    std::shared_ptr<mark> last{};
};

struct graph {
    std::vector<operation> nodes{};
    user_objects owns{};
};
struct executable {
    std::vector<operation> nodes{};
    user_objects owns{};
    std::shared_ptr<mark> running{};  // the latest launch; launches don't overlap
};

struct pool {
    int device = 0;
    std::uint64_t limit = 0;  // 0: none
    std::uint64_t threshold = 0;
    std::uint64_t reserved = 0, reserved_high = 0, used = 0, used_high = 0;
    std::map<cudaMemPoolAttr, int> switches{};
    std::set<int> open_to{};  // devices besides its own
    bool closing = false;     // destroyed while some of its blocks are allocated
};

/// A block of cudaMalloc, a pool or cudaHostAlloc.
struct block {
    std::size_t size = 0, mapped = 0;
    std::uint64_t charge = 0;
    int device = -1;  // -1: the host
    std::shared_ptr<pool> from{};
    std::uint64_t freed_on = 0;     // the id of the stream in which the free is queued
    std::shared_ptr<mark> freed{};  // reached when the stream has reached the free
    bool settled = false;           // whether a later allocation in that stream has already taken the room
    bool of_graph = false;          // the block of a memory node, freed with the graph
    const context* in = nullptr;    // the context of cuCtxCreate with which the block is freed
};

/// Physical memory that can be mapped into reserved addresses. It exists as long as it is mapped.
struct physical {
    int device = 0, file = -1;
    std::size_t size = 0, mappings = 0;
    bool released = false;
    bool rdma = false;
};
struct mapping {
    std::size_t size = 0;
    std::shared_ptr<physical> of{};
    std::uintptr_t handle = 0;  // the handle of `of`
    std::set<int> open_to{};    // devices with access; at first not even its own
};

struct device_state {
    cudaError_t sticky = cudaSuccess;
    bool told = false;        // whether a call has reported the error
    bool active = false;      // whether its primary context exists
    std::uint64_t used = 0;   // bytes in whole pages
    std::uint64_t small = 0;  // bytes of blocks that share pages
    std::shared_ptr<context> primary{};
    std::shared_ptr<stream> default_stream{};  // made if a program uses it, by mistake
    cudaMemPool_t default_pool = nullptr;
    std::set<const void*> loaded{};  // kernels
    std::uint32_t streams_made = 0;
    std::size_t retained = 0;  // how often the primary context was retained through the driver
};

/// Objects by handle. Handles are numbers that are never reused, so a stale handle is always found.
template <class T>
class table {
public:
    template <class Handle>
    [[nodiscard]] std::shared_ptr<T> find(Handle h) const {
        const auto at = all_.find(number(h));
        return at == all_.end() ? nullptr : at->second;
    }
    template <class Handle>
    void add(Handle h, std::shared_ptr<T> object) {
        all_.emplace(number(h), std::move(object));
    }
    template <class Handle>
    bool remove(Handle h) {
        return all_.erase(number(h)) != 0;
    }
    [[nodiscard]] std::size_t size() const { return all_.size(); }
    [[nodiscard]] const auto& all() const { return all_; }

private:
    template <class Handle>
    static std::uintptr_t number(Handle h) {
        if constexpr (std::is_pointer_v<Handle>)
            return reinterpret_cast<std::uintptr_t>(h);
        else
            return h;
    }

    std::map<std::uintptr_t, std::shared_ptr<T>> all_;
};

}  // namespace standin::detail
