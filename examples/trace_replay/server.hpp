// SPDX-License-Identifier: Apache-2.0
// A tenant's server on one device. It takes requests in order, keeps models in memory for a while
// and evicts them when it needs room, and has a few requests under way at once. It doesn't know
// whether memory and device time are limited: it asks an `access` for both, and each run has its
// own kind of access.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/compute/handles.hpp>
#include <gpushare/tenant/tenant.hpp>

#include "trace_replay/workload.hpp"

namespace trace_replay {

namespace host = gpushare::host;

using ticket = gpushare::tenant<host::node>::ticket;

/// The source of a server's memory and device time.
class access {
public:
    virtual ~access() = default;
    // null: no memory at the moment
    [[nodiscard]] virtual void* try_allocate(gpushare::bytes size) = 0;
    // no work uses the memory any more
    virtual void free(void* p, gpushare::bytes size) = 0;
    /// Adds a ticket for the work, if a limiter stands between the work and the device.
    virtual void submit(gpushare::submission_work<host::stream> work, std::vector<ticket>& tickets) = 0;
};

/// The outcome of a job. Times are instants of the node's clock.
struct job_record {
    bool done = false, refused = false, failed = false;
    gpushare::instant submitted{};  // when its kernels were handed over
    gpushare::instant let_in{};     // when its last kernel went to the device's stream
    gpushare::instant finished{};
    std::uint64_t result = 0;  // a checksum of its result
};

class server {
public:
    server(const workload& w, std::vector<job_record>& records, access& from, std::uint32_t sms,
           const host::steady_clock& clock)
        : workload_(&w), records_(&records), access_(&from), sms_(sms), clock_(clock) {}

    void arrive(std::size_t job) { waiting_.push_back(job); }
    /// Notes finished work, and starts the work that can start. Never blocks.
    void step();
    [[nodiscard]] bool idle() const { return waiting_.empty() && running_.empty(); }
    /// Evicts all models. The server must be idle.
    void clear();

private:
    // Two under way: while one request ends, the kernels of the next are already there.
    static constexpr std::size_t under_way = 2;
    // A model stays for a while after its last request, as in real servers.
    static constexpr gpushare::ns keep_alive = std::chrono::milliseconds(200);
    static constexpr std::uint32_t latent_size = 4096;  // number of floats

    struct resident {
        std::size_t model;
        void* memory;
        std::uint32_t users = 0;
        gpushare::instant last_used{};
    };
    struct running {
        std::size_t job = 0;
        std::list<resident>::iterator model;
        std::vector<void*> loras;
        float* latent = nullptr;
        std::vector<float> read_back;
        std::vector<ticket> tickets;
        host::stream::point end;
        std::atomic<bool> let_in{false};  // release: `end` is set before
    };

    enum class start : std::uint8_t { started, later, never };
    start try_start(std::size_t job);
    void* make_room(gpushare::bytes size);
    void evict(std::list<resident>::iterator idle);
    bool acquire(running& r, const job& j);
    void release(running& r);
    void submit(running& r, const job& j);
    void finish(running& r);

    const workload* workload_;
    std::vector<job_record>* records_;
    access* access_;
    std::uint32_t sms_;
    host::steady_clock clock_;
    std::deque<std::size_t> waiting_;
    std::deque<std::unique_ptr<running>> running_;
    std::list<resident> residents_;  // the least recently used first
};

}  // namespace trace_replay
