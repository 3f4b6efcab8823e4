// SPDX-License-Identifier: Apache-2.0
// What CUDA's handles stand for in the stand-in. Plain data; the machine's mutex guards it.
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

/// What a graph owns besides nodes: its callback comes when nobody has it any more. It comes in the
/// thread of the call that let it go, within that, so one that calls CUDA, which it mustn't,
/// doesn't get anywhere. (Runtime API, cudaUserObjectCreate.)
struct user_object {
    user_object(cudaHostFn_t at_end, void* of) : destroy(at_end), argument(of) {}
    user_object(const user_object&) = delete;
    user_object& operator=(const user_object&) = delete;
    ~user_object() { destroy(argument); }

    cudaHostFn_t destroy;
    void* argument;
};
using user_objects = std::vector<std::shared_ptr<user_object>>;

/// Work that is recorded instead of done.
struct capture {
    std::uint64_t id = 0;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    std::thread::id thread{};
    stream* origin = nullptr;
    std::set<stream*> streams{};
    bool invalid = false;
    cudaGraph_t graph = nullptr;  // that it becomes
    user_objects owns{};
};

/// How far a captured stream has come, by its id. What a stream has seen of the others, it has
/// joined.
using progress = std::map<std::uint64_t, std::uint64_t>;

/// One recording of an event. Waits for it outlive the event's next one.
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

/// Something in a stream's queue: begins once what is before it has ended and `awaited` is reached.
struct operation {
    ns length{}, enqueued{};
    std::function<void()> effect{};  // at its end
    kernel_start starts{};           // takes as long as it computes
    std::shared_ptr<mark> awaited{}, reaches{};
    std::optional<std::uintptr_t> until_zero{};  // the address of 64 bits that it waits for
    ns seen_closed = ns::min();                  // when these weren't 0, last
    range writes{}, reads{};                     // of copies: so that unmapping under them is found out
    std::shared_ptr<context> in{};               // of nodes of graphs: where they were captured, whose SMs they keep
    bool spins = false;                          // a kernel that may wait for others
    std::vector<std::uintptr_t> touches{};       // what a kernel's arguments point to
    const void* kernel = nullptr;                // that is to be loaded with the graph
    std::uint64_t order = 0;                     // among all that was enqueued
    std::uint64_t known = 0;                     // see engine
    std::optional<ns> begun{};
};

struct context {
    int device = 0;
    std::set<std::uint32_t> sms{};  // the numbers of those that its work runs on
    bool green = false;
    bool users = false;  // of cuCtxCreate
    unsigned long long id = 0;
    std::set<int>
        peers{};  // devices whose memory it reaches: of a context, not of a device (Driver API, cuCtxEnablePeerAccess)
    bool destroyed = false;   // while streams of it were left
    std::size_t streams = 0;  // that exist in it
};

struct stream : std::enable_shared_from_this<stream> {
    cudaStream_t handle = nullptr;
    std::uint64_t id = 0;
    std::shared_ptr<context> in{};
    int priority = 0;
    std::deque<operation> queue{};
    running_kernel runs{};  // the first of these
    ns idle_since{};
    std::uint32_t connection = 0;  // which of its device's
    bool held = false;
    bool blocking = false;  // synchronises with the legacy stream

    std::shared_ptr<capture> recording{};
    std::vector<operation> recorded{};  // by the origin, for all streams of the capture
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
    std::shared_ptr<mark> running{};  // its last launch: it doesn't overlap itself
};

struct pool {
    int device = 0;
    std::uint64_t limit = 0;  // 0: none
    std::uint64_t threshold = 0;
    std::uint64_t reserved = 0, reserved_high = 0, used = 0, used_high = 0;
    std::map<cudaMemPoolAttr, int> switches{};
    std::set<int> open_to{};  // devices besides its own
    bool closing = false;     // destroyed while blocks of it are out
};

/// Of cudaMalloc, a pool or cudaHostAlloc.
struct block {
    std::size_t size = 0, mapped = 0;
    std::uint64_t charge = 0;
    int device = -1;  // -1: the host's
    std::shared_ptr<pool> from{};
    std::uint64_t freed_on = 0;     // the id of the stream that the free is queued in
    std::shared_ptr<mark> freed{};  // once that has got there
    bool settled = false;           // and the room already went to an allocation behind that
    bool of_graph = false;          // of a memory node: it goes with the graph
    const context* in = nullptr;    // of a context of cuCtxCreate, with which it goes
};

/// Memory that can be mapped into reserved addresses. Lives on while it is mapped.
struct physical {
    int device = 0, file = -1;
    std::size_t size = 0, mappings = 0;
    bool released = false;
    bool rdma = false;
};
struct mapping {
    std::size_t size = 0;
    std::shared_ptr<physical> of{};
    std::uintptr_t handle = 0;  // of `of`
    std::set<int> open_to{};    // devices, its own too: none so far
};

struct device_state {
    cudaError_t sticky = cudaSuccess;
    bool told = false;        // somebody has been told
    bool active = false;      // its primary context exists
    std::uint64_t used = 0;   // whole pages
    std::uint64_t small = 0;  // by blocks that share pages
    std::shared_ptr<context> primary{};
    std::shared_ptr<stream> default_stream{};  // once somebody makes the mistake to use it
    cudaMemPool_t default_pool = nullptr;
    std::set<const void*> loaded{};  // kernels
    std::uint32_t streams_made = 0;
    std::size_t retained = 0;  // how often its primary context was, by the driver
};

/// Objects by handle. Handles are numbers that are never used twice, so a stale one is always found
/// out.
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
