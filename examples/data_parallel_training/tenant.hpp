// SPDX-License-Identifier: Apache-2.0
// The same training as a tenant of devices on which another tenant answers requests. The other
// tenant goes first. Each computation of a rank is a submission of the training tenant. So is each
// piece of a collective, which runs on all devices or on none. All submissions are admitted and
// charged, and the other tenant's requests run between any two of them. If the device can preempt,
// these requests also run between two images of one computation.
//
//   device_ranks devices(node, training);  // `training` is admitted on a device for each rank
//   device_transport net(devices, r);               // in thread r
//   mine.run(net, progress, by_tenant(training, r));
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <type_traits>
#include <vector>

#include <gpushare/backend/host/host.hpp>
#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/compute/handles.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/tenant/tenancy.hpp>
#include <gpushare/units.hpp>

#include "data_parallel_training/report.hpp"
#include "data_parallel_training/training.hpp"

namespace data_parallel_training {

using shared_devices = gpushare::tenancy<gpushare::host::node>;

/// Computes on one device of a tenant. Between images, the stream lets more urgent work run.
class by_tenant {
public:
    static constexpr bool overlaps =
        // a collective that waits on one device for another device's backward pass keeps its SMs
        false;

    by_tenant(shared_devices::tenant& who, std::size_t part) : who_(&who), part_(part) {}

    /// Throws gpushare::operation_error if the tenant may not submit, and what `f` throws.
    template <class F>
    void operator()(network& model, F f) {
        auto done = who_->submit(
            [&](gpushare::host::stream& s) {
                s.launch({.blocks = 1}, [&model, &f](auto& ctx) {
                    model.pause = [&ctx] { (void)ctx.yield(); };
                    f();
                    model.pause = [] {};
                });
            },
            part_);
        (void)done.wait();
        if (done.status() != gpushare::errc::none) gpushare::raise({.code = done.status()}, who_->name(), "training");
    }

private:
    shared_devices::tenant* who_;
    std::size_t part_;
};

/// The ranks of a training on a tenant's devices, and the number of their collectives. Each rank's
/// thread calls all_reduce; the last thread to arrive submits the collective for all ranks, in
/// pieces.
class device_ranks {
public:
    /// `piece` is the number of elements in a submission.
    device_ranks(gpushare::host::node& node, shared_devices::tenant& who, std::size_t piece = 2048);

    [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(members_.size()); }
    [[nodiscard]] gpushare::member rank(std::uint32_t r) const { return between_threads_.rank(r); }
    /// The number of pieces submitted so far, on each device.
    [[nodiscard]] std::uint64_t pieces() const noexcept { return pieces_; }

    template <gpushare::reducible T, class Op>
    [[nodiscard]] gpushare::collective_fault all_reduce(std::uint32_t me, std::span<const T> in, std::span<T> out,
                                                        const Op& op, gpushare::instant deadline) {
        std::unique_lock lock(mutex_);
        if (fault_) return fault_;
        const std::uint64_t meeting = meetings_;
        here_[me] = {in.data(), out.data(), out.size()};
        if (++arrived_ == size()) {
            fault_ = submit<T>(op, deadline);
            arrived_ = 0;
            here_.assign(size(), {});
            ++meetings_;
            all_done_.notify_all();
            return fault_;
        }
        // A condition variable's wait may overflow if it lasts until the latest possible time.
        const gpushare::instant far = std::chrono::steady_clock::now() + std::chrono::hours(24);
        if (!all_done_.wait_until(lock, std::min(deadline, far), [&] { return meetings_ != meeting || fault_; })) {
            const auto absent =
                std::find_if(here_.begin(), here_.end(), [](const part& p) { return p.out == nullptr; });
            end({gpushare::errc::deadline_exceeded, gpushare::collective_kind::all_reduce,
                 static_cast<std::uint32_t>(absent - here_.begin()), 0});
        }
        return fault_;
    }
    /// Ends all waits with this fault.
    void abort(std::uint32_t rank, gpushare::errc why) {
        const std::lock_guard lock(mutex_);
        if (!fault_) end({why, gpushare::collective_kind::all_reduce, rank, 0});
    }

private:
    struct part {
        const void* in = nullptr;
        void* out = nullptr;
        std::size_t count = 0;
    };
    using limiter = shared_devices::limiter;

    void end(const gpushare::collective_fault& fault) {
        fault_ = fault;
        all_done_.notify_all();
    }
    /// Submits the collective. All ranks have arrived, and wait.
    template <class T, class Op>
    gpushare::collective_fault submit(const Op& op, gpushare::instant deadline) {
        const auto kind = gpushare::collective_kind::all_reduce;
        for (std::uint32_t r = 0; r < size(); ++r)
            if (here_[r].count != here_[0].count) return {gpushare::errc::mismatch, kind, r, 0};
        const std::size_t count = here_[0].count;
        const auto why = gpushare::enqueue_in_pieces<limiter>(
            gang_, streams_, (count + piece_ - 1) / piece_,
            [&](std::size_t i) {
                const std::size_t first = i * piece_, n = std::min(piece_, count - first);
                std::vector<const T*> from;
                std::vector<T*> to;
                for (const part& p : here_) {
                    from.push_back(static_cast<const T*>(p.in) + first);
                    to.push_back(static_cast<T*>(p.out) + first);
                }
                ++pieces_;
                return gpushare::submit_all_reduce<T>(node_->gangs(), devices_, std::span(own_streams_), members_, from,
                                                      to, n, op);
            },
            deadline);
        for (auto* s : streams_)
            if (!s->record().wait(deadline)) return {gpushare::errc::deadline_exceeded, kind, 0, 0};
        if (why != gpushare::errc::none) return {why, kind, 0, 0};
        return gpushare::fault_of(members_[0]);
    }

    gpushare::host::node* node_;
    gpushare::communicator on_devices_, between_threads_;
    std::vector<gpushare::member> members_;
    std::vector<gpushare::device_id> devices_;
    std::vector<gpushare::host::stream> own_streams_;
    std::vector<gpushare::host::stream*> streams_;
    std::vector<gpushare::gang_permit<limiter>::member> gang_;
    std::size_t piece_;

    std::mutex mutex_;
    std::condition_variable all_done_;
    std::vector<part> here_;
    std::uint32_t arrived_ = 0;
    std::uint64_t meetings_ = 0, pieces_ = 0;
    gpushare::collective_fault fault_;
};

/// One rank's end. Small and rare messages, such as fingerprints, go between the threads.
class device_transport {
public:
    static constexpr bool rank_ordered = true, in_host_memory = true;

    device_transport(device_ranks& all, std::uint32_t rank) : all_(&all), threads_(all.rank(rank)) {}

    [[nodiscard]] std::uint32_t rank() const noexcept { return threads_.rank(); }
    [[nodiscard]] std::uint32_t size() const noexcept { return threads_.size(); }
    [[nodiscard]] gpushare::bytes carried() const noexcept { return threads_.carried() + reduced_; }

    template <gpushare::reducible T, class Op>
    [[nodiscard]] gpushare::collective_fault all_reduce(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                                        const Op& op, gpushare::instant deadline) {
        reduced_ += gpushare::bytes{in.size_bytes()};
        return all_->all_reduce<T>(rank(), in, out, op, deadline);
    }
    template <gpushare::reducible T, class Op>
    [[nodiscard]] gpushare::collective_fault reduce_scatter(std::span<const std::type_identity_t<T>> in,
                                                            std::span<T> out, const Op& op,
                                                            gpushare::instant deadline) {
        return threads_.reduce_scatter(in, out, op, deadline);
    }
    template <class T>
    [[nodiscard]] gpushare::collective_fault all_gather(std::span<const std::type_identity_t<T>> in, std::span<T> out,
                                                        gpushare::instant deadline) {
        return threads_.all_gather(in, out, deadline);
    }
    template <class T>
    [[nodiscard]] gpushare::collective_fault broadcast(std::span<T> data, std::uint32_t root,
                                                       gpushare::instant deadline) {
        return threads_.broadcast(data, root, deadline);
    }
    [[nodiscard]] gpushare::collective_fault barrier(gpushare::instant deadline) { return threads_.barrier(deadline); }
    void abort(std::uint32_t rank, gpushare::errc why) const {
        threads_.abort(rank, why);
        all_->abort(rank, why);
    }

private:
    device_ranks* all_;
    gpushare::thread_transport threads_;
    gpushare::bytes reduced_;
};
static_assert(gpushare::host_transport<device_transport>);

/// The figures of both tenants while one training ran.
struct tenant_run {
    training_result training;
    double steps_per_second = 0;
    gpushare::tenant_usage charged;  // the usage that was charged to the training
    std::uint64_t pieces = 0;        // pieces of collectives, on each device
    // the latency of each request, in seconds, in ascending order
    std::vector<double> answered_after;
};
struct tenant_report {
    tenant_run alone, beside;             // the training without requests, and with requests
    std::vector<double> answered_before;  // latencies of requests without a training
};

/// Trains on `ranks` devices, once alone, and once behind a tenant that answers `requests` requests
/// a second on each device (Poisson).
[[nodiscard]] tenant_run train_as_tenant(const command& asked, const digits& data, double requests);
[[nodiscard]] tenant_report train_as_tenant(const command& asked, const digits& data);
void print(const tenant_report& report);

}  // namespace data_parallel_training
