// SPDX-License-Identifier: Apache-2.0
// Horovod's names (horovod.hpp) for arrays on devices of several processes, each with a device. The
// host negotiates over a transport, such as an MPI's, which also carries the elements. Elements go
// from the device to pinned memory and back in chunks: the device copies some chunks while others
// are under way between processes.
//
//   using namespace gpushare::horovod;
//   gpushare::mpi_transport net(MPI_COMM_WORLD);
//   device_process here(node, stream, net, pinned);
//   init(here);
//   const auto sum = allreduce_async(device_array{x, n, caller}, "fc.weight", Sum);
//   synchronize(sum);                                          // `caller` waits for the sum
//
// The names are those of horovod_devices.hpp, and programs hand arrays over as described there.
// `stream` is the process's own stream for the copies. The bits are the same as for arrays in the
// host's memory over this transport; chunks don't change the bits if the transport combines in the
// order of ranks. A process with several devices has a device_process and a thread for each device,
// over the ranks of a two_level_group.
//
// Only the process_set's thread waits for the device, before it sends a chunk.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/lent_arrays.hpp>
#include <gpushare/gradient/detail/lent_stream.hpp>
#include <gpushare/gradient/device_buckets.hpp>
#include <gpushare/gradient/horovod.hpp>
#include <gpushare/gradient/horovod_devices.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace horovod {

/// How the elements of a process with a device are cut into chunks.
struct device_process_options {
    /// Bytes copied and sent at once; the processes use their smallest value.
    bytes chunk{4 << 20};
    std::uint32_t depth = 4;  ///< chunks under way; at least 2
};

namespace detail {

/// A request on a device.
template <class Point>
struct held_request final : device_request {
    held_request(device_call c, Point is_there) : call(std::move(c)), computed(std::move(is_there)) {}
    device_call call;
    Point computed;
    Point end{};            // the point after the device's work
    bool enqueued = false;  // whether there is work on a stream, and an `end`
};

/// Several arrays as one sequence of elements. For a range of elements, it finds the pieces of
/// arrays that make up the range.
template <class T>
class listed_arrays {
public:
    void add(T* data, std::size_t n) {
        if (n == 0) return;
        data_.push_back(data);
        ends_.push_back(size() + n);
    }
    [[nodiscard]] std::size_t size() const noexcept { return ends_.empty() ? 0 : ends_.back(); }
    [[nodiscard]] std::vector<std::pair<T*, std::size_t>> part(const element_range& of) const {
        std::vector<std::pair<T*, std::size_t>> all;
        auto k = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), of.begin) - ends_.begin());
        for (std::size_t at = of.begin; at < of.end; ++k) {
            const std::size_t first = k == 0 ? 0 : ends_[k - 1], end = std::min(ends_[k], of.end);
            all.emplace_back(data_[k] + (at - first), end - at);
            at = end;
        }
        return all;
    }

private:
    std::vector<T*> data_;
    std::vector<std::size_t> ends_;
};

[[nodiscard]] constexpr bool is_number(std::uint32_t type) noexcept {
    return type == gpushare::detail::type_id<float>() || type == gpushare::detail::type_id<double>() ||
           type == gpushare::detail::type_id<float16>() || type == gpushare::detail::type_id<bfloat16>() ||
           type == gpushare::detail::type_id<std::int64_t>();
}
/// The request's word (see horovod.hpp), which is equal on all ranks.
[[nodiscard]] inline std::uint64_t device_word(const device_call& c) {
    const auto rows = [&](by_rows kind) { return static_cast<std::uint64_t>(kind) << rows_at; };
    const std::uint64_t op = c.type | static_cast<std::uint64_t>(c.op) << operator_at;
    switch (c.kind) {
        case collective_kind::broadcast: return is_broadcast | std::uint64_t{c.root} << root_at;
        case collective_kind::all_gather: return rows(by_rows::all_gather);
        case collective_kind::all_to_all: return rows(by_rows::all_to_all);
        case collective_kind::reduce_scatter: return op | rows(by_rows::reduce_scatter);
        default: return op;
    }
}

}  // namespace detail

/// One of several processes that combine arrays on devices by name: one rank, with a device. `Net`
/// is a transport between the processes, which no other code uses while there is a process_set.
/// `Pinned` is memory that the host, copies and kernels reach, such as cuda::pinned_memory. All
/// arguments of the constructor must outlive this object, which must outlive the process_set.
///
/// An alltoall needs a transport with unequal parts (unequal_transport); without one, it is refused
/// (errc::not_supported). An allgather sends each rank's rows to all ranks. A reducescatter sends
/// as much as an allreduce.
template <node Node, host_transport Net, memory_resource Pinned>
requires copier<typename Node::stream> && launcher<typename Node::stream>
class device_process final : public detail::carrier {
    using stream = typename Node::stream;
    using point = typename stream::point;
    using device_call = detail::device_call;
    using held = detail::held_request<point>;

public:
    /// Collective over `net`: the processes agree on the size of a chunk, by `until`. Allocates
    /// options.depth chunks. Throws what `pinned` throws; the other processes then throw an
    /// operation_error that names this process. Throws operation_error if `net` fails.
    device_process(Node& on, stream& copies, Net& net, Pinned& pinned, const device_process_options& options = {},
                   instant until = never)
        : node_(on), stream_(copies), net_(net), pinned_(pinned) {
        agree_on_chunk(options.chunk, until);
        const auto allocate = [&] {
            slots_.resize(std::max(options.depth, 2U));
            for (slot& s : slots_) s.memory = static_cast<std::byte*>(pinned_.allocate(chunk_, alignment));
        };
        gpushare::detail::make_on_all(
            net, allocate, [this] { give_memory_back(); }, until);
    }
    device_process(const device_process&) = delete;
    device_process& operator=(const device_process&) = delete;
    /// Waits for the device. Doesn't free pinned memory that `net` may still use after a fault.
    ~device_process() override {
        settle();
        for (slot& s : slots_)
            if (s.last) (void)gpushare::detail::await(*s.last);
        if (!in_use_) give_memory_back();
    }

    /// Ends all current and later collectives of all processes. Doesn't wait. Any thread may call
    /// abort().
    void abort(errc why) override {
        aborted_.store(why, std::memory_order_release);  // release: pairs with await()
        net_.abort(net_.rank(), why);
    }

    // --- for process_set

    /// See process_set.
    [[nodiscard]] collective_fault fail(errc why) override { return own_fault(why, collective_kind::all_reduce); }

    [[nodiscard]] std::uint32_t rank() const override { return net_.rank(); }  ///< of this process
    /// The number of processes.
    [[nodiscard]] std::uint32_t size() const override { return net_.size(); }
    [[nodiscard]] bool on_device() const noexcept override { return true; }  ///< see process_set
    /// See process_set.
    [[nodiscard]] collective_fault least(std::span<std::uint64_t> words, instant deadline) override {
        return net_.all_reduce(std::span<const std::uint64_t>(words), words, minimum{}, deadline);
    }
    /// See process_set.
    [[nodiscard]] collective_fault broadcast(std::span<std::uint64_t> words, std::uint32_t root,
                                             instant deadline) override {
        return net_.broadcast(words, root, deadline);
    }
    /// See process_set.
    [[nodiscard]] std::shared_ptr<detail::request> made_of(device_call c) override {
        detail::check_call(c, size(), detail::is_number(c.type));
        if (!unequal_transport<Net> && c.kind == collective_kind::all_to_all)
            raise({.code = errc::not_supported}, {}, "an alltoall over a transport of equal parts");
        collect();
        const bool one_length = c.kind != collective_kind::all_gather && c.kind != collective_kind::all_to_all;
        const bool sends = c.kind == collective_kind::broadcast;
        detail::request made{c.name, static_cast<std::byte*>(c.data)};
        made.what = detail::device_word(c);
        made.count = !one_length ? 0 : sends ? c.count * c.element : c.count;
        made.shape = gpushare::detail::mixed_word({c.type, c.element, c.row, c.shape});
        made.on_device = std::make_shared<held>(std::move(c), point{});
        held& one = of(made);
        one.computed = recorded(one.call.stream);
        return std::make_shared<detail::request>(std::move(made));
    }
    /// See process_set.
    [[nodiscard]] bool is_over(const detail::request& one) override {
        collect();
        return !of(one).enqueued || of(one).end.reached();
    }
    /// See process_set.
    [[nodiscard]] collective_fault follow(const detail::request& one, void* current) override {
        collect();
        held& h = of(one);
        if (!h.enqueued) return {};
        if (h.end.reached() && h.end.status() != errc::none) return {h.end.status(), h.call.kind, rank(), 0};
        if (current == nullptr) current = h.call.current ? h.call.current() : h.call.stream;
        const std::scoped_lock lock(mutex_);
        lent_.as(node_, current).wait(h.end);
        return {};
    }
    /// See process_set.
    void settle() override {
        std::vector<std::shared_ptr<detail::device_request>> all;
        {
            const std::scoped_lock lock(mutex_);
            all.assign(running_.begin(), running_.end());
        }
        for (const auto& one : all) (void)gpushare::detail::await(static_cast<held&>(*one).end);
        collect();
    }
    /// See process_set.
    [[nodiscard]] collective_fault move(const detail::request_batch& all, instant deadline) override {
        collect();
        collective_fault f;
        try {
            for (const auto& r : all.of_rank)
                if (r != nullptr) stream_.wait(of(*r).computed);
            f = go(all, deadline);
        } catch (...) {
            f = thrown_fault(gpushare::detail::code_thrown(), detail::kind_of(all.what));
        }
        for (const auto& r : all.of_rank)
            if (r != nullptr) r->thrown = thrown_;
        keep(all);
        in_use_ = in_use_ || f.buffers_in_use;
        return f;
    }

private:
    /// A chunk in pinned memory, and the point after the device's work on it.
    struct slot {
        std::byte* memory = nullptr;
        std::optional<point> last{};
    };
    static constexpr std::size_t alignment = 256, unit = 64;
    static constexpr ns poll = std::chrono::microseconds(50);

    [[nodiscard]] static held& of(const detail::request& r) { return static_cast<held&>(*r.on_device); }
    /// The processes take the smallest of their chunks.
    void agree_on_chunk(bytes chunk, instant until) {
        const std::uint64_t mine = std::max<std::uint64_t>(chunk.count() / unit, net_.size()) * unit;
        const auto least = [&](auto in, auto out) { return net_.all_reduce(in, out, minimum{}, until); };
        chunk_ = gpushare::detail::exchange_words(net_, {mine}, 1, least, until)[0];
    }
    void give_memory_back() {
        for (slot& s : slots_)
            if (s.memory != nullptr) (void)pinned_.deallocate(s.memory, chunk_, alignment);
    }
    [[nodiscard]] point recorded(void* handle) {
        const std::scoped_lock lock(mutex_);
        stream& s = lent_.as(node_, handle);
        if (gpushare::detail::is_captured(s))
            raise({.code = errc::capturing}, {}, "handing over an array of a stream that is captured");
        return s.record();
    }
    /// Keeps the requests until the enqueued work, which uses their arrays, has ended.
    void keep(const detail::request_batch& all) {
        const point end = stream_.record();
        const std::scoped_lock lock(mutex_);
        for (const auto& r : all.of_rank)
            if (r != nullptr) {
                of(*r).end = end;
                of(*r).enqueued = true;
                running_.push_back(r->on_device);
            }
    }
    /// Drops the requests that the device has finished. Destroys them after the lock is released,
    /// because they may own a framework's tensors.
    void collect() {
        std::vector<std::shared_ptr<const void>> kept;
        std::vector<device_call::placing> places;
        const std::scoped_lock lock(mutex_);
        while (!running_.empty() && static_cast<held&>(*running_.front()).end.reached()) {
            device_call& c = static_cast<held&>(*running_.front()).call;
            kept.push_back(std::move(c.keeps));
            places.push_back(std::move(c.place));
            running_.pop_front();
        }
    }

    // --- called by the set's thread

    /// Makes a fault of this process, and tells the other processes. If another fault came first,
    /// returns that fault.
    [[nodiscard]] collective_fault own_fault(errc code, collective_kind what) {
        auto f = detail::tell_all(net_, code);
        f.what = what;
        in_use_ = in_use_ || f.buffers_in_use;
        return f;
    }
    /// own_fault() while an exception is being handled.
    [[nodiscard]] collective_fault thrown_fault(errc code, collective_kind what) {
        thrown_ = std::current_exception();
        return own_fault(code, what);
    }
    /// Waits until the device has finished with the slot.
    [[nodiscard]] collective_fault await(const slot& s, collective_kind what, instant deadline) {
        if (!s.last) return {};
        for (auto now = std::chrono::steady_clock::now(); !s.last->reached(); now = std::chrono::steady_clock::now()) {
            // acquire: pairs with abort().
            if (const errc why = aborted_.load(std::memory_order_acquire); why != errc::none)
                return own_fault(why, what);
            if (now >= deadline) return own_fault(errc::deadline_exceeded, what);
            if constexpr (pipelined_transport<Net>) net_.advance();
            // the earlier fault counts
            if (const auto f = gpushare::detail::fault_so_far(net_)) return own_fault(f.code, what);
            (void)s.last->wait(std::min(deadline, now + poll));
        }
        return s.last->status() == errc::none ? collective_fault{} : own_fault(s.last->status(), what);
    }
    [[nodiscard]] collective_fault go(const detail::request_batch& all, instant deadline) {
        if ((all.what & detail::is_broadcast) != 0) {
            std::byte* const data = all.is_nobody() ? nullptr : all.of_rank[0]->data;
            return send(data, data, all.elements, detail::root_of(all.what), deadline);
        }
        switch (detail::rows_of(all.what)) {
            case detail::by_rows::all_gather: return all_gather(of(*all.of_rank[0]).call, deadline);
            case detail::by_rows::all_to_all: return all_to_all(of(*all.of_rank[0]).call, deadline);
            case detail::by_rows::reduce_scatter: return reduce_scatter(all, deadline);
            default: break;
        }
        return detail::with_type(all.what, [&]<class T>(T) {
            detail::listed_arrays<T> mine;
            for (std::size_t k = 0; k < all.of_rank.size() && !all.is_nobody(); ++k)
                mine.add(reinterpret_cast<T*>(all.of_rank[k]->data), all.counts[k]);
            return combine<T>(all, mine, mine, 0, deadline);
        });
    }

    /// For each chunk k: `bring` copies the chunk from the device, `start` sends it once the device
    /// is done, and `finish` copies it back to the device.
    template <class Bring, class Start, class Finish>
    [[nodiscard]] collective_fault by_chunks(std::size_t chunks, collective_kind what, instant deadline,
                                             const Bring& bring, const Start& start, const Finish& finish) {
        const std::size_t depth = slots_.size();
        for (std::size_t k = 0; chunks != 0 && k < chunks + depth; ++k) {
            if (k >= depth) {
                if (const auto f = finish(k - depth, slots_[k % depth])) return f;
                slots_[k % depth].last = stream_.record();
            }
            if (k < chunks && bring(k, slots_[k % depth])) slots_[k % depth].last = stream_.record();
            if (k == 0 || k > chunks) continue;
            slot& ready = slots_[(k - 1) % depth];
            if (const auto f = await(ready, what, deadline)) return f;
            if (const auto f = start(k - 1, ready)) return f;
        }
        return {};
    }
    /// Copies one piece by a copy, and several pieces by a kernel.
    template <class T>
    void pack(std::span<const std::pair<T*, std::size_t>> pieces, T* to) {
        if (pieces.size() == 1)
            stream_.copy(to, pieces[0].first, pieces[0].second * sizeof(T));
        else if (!pieces.empty())
            kernel_packing{}.pack(stream_, pieces, to);
    }
    template <class T>
    void unpack(std::span<const std::pair<T*, std::size_t>> pieces, T* from) {
        if (pieces.size() == 1)
            stream_.copy(pieces[0].first, from, pieces[0].second * sizeof(T));
        else if (!pieces.empty())
            kernel_packing{}.unpack(stream_, pieces, from);
    }
    /// Combines `from` with the other ranks' elements. The results from element `first` on go to
    /// `to`.
    template <class T>
    [[nodiscard]] collective_fault combine(const detail::request_batch& all, const detail::listed_arrays<T>& from,
                                           const detail::listed_arrays<T>& to, std::size_t first, instant deadline) {
        const std::size_t each = chunk_ / (all.widens() ? sizeof(float) : sizeof(T)), n = all.elements;
        const auto range = [&](std::size_t k) { return element_range{k * each, std::min(n, (k + 1) * each)}; };
        const auto elements = [&](std::size_t k, const slot& s) {
            return std::span(reinterpret_cast<T*>(s.memory), range(k).size());
        };
        std::vector<std::uint64_t> tickets;
        return detail::with_operator<T>(all.op(), [&](auto by) {
            return by_chunks((n + each - 1) / each, detail::kind_of(all.what), deadline,
                             [&](std::size_t k, slot& s) {
                                 if (all.is_nobody()) return false;
                                 const auto pieces = from.part(range(k));
                                 pack<T>(pieces, elements(k, s).data());
                                 return true;
                             },
                             [&](std::size_t k, slot& s) { return start(all, elements(k, s), by, tickets, deadline); },
                             [&](std::size_t k, slot& s) {
                                 if (const auto f = end(tickets, k, deadline)) return f;
                                 finish(all, elements(k, s));
                                 give_back(range(k), first, to, elements(k, s).data());
                                 return collective_fault{};
                             });
        });
    }
    /// Begins to combine a chunk, which has room for widened elements if the batch widens.
    template <class T, class By>
    [[nodiscard]] collective_fault start(const detail::request_batch& all, std::span<T> chunk, const By& by,
                                         std::vector<std::uint64_t>& tickets, instant deadline) {
        if (all.is_nobody()) all.fill(chunk);
        if constexpr (sizeof(T) < sizeof(float))
            if (all.widens()) {
                detail::widen<T>(reinterpret_cast<std::byte*>(chunk.data()), chunk.size());
                return begin(widened(chunk), detail::sum_of_widened{}, tickets, deadline);
            }
        return begin(chunk, by, tickets, deadline);
    }
    template <class T>
    static void finish(const detail::request_batch& all, std::span<T> chunk) {
        if constexpr (sizeof(T) < sizeof(float))
            if (all.widens()) {
                all.finish(widened(chunk));
                return detail::narrow<T>(reinterpret_cast<std::byte*>(chunk.data()), chunk.size());
            }
        all.finish(chunk);
    }
    template <class T>
    [[nodiscard]] static std::span<float> widened(std::span<T> chunk) noexcept {
        return {reinterpret_cast<float*>(chunk.data()), chunk.size()};
    }
    template <class T>
    void give_back(const element_range& chunk, std::size_t first, const detail::listed_arrays<T>& to, T* from) {
        const element_range mine{std::max(chunk.begin, first), std::min(chunk.end, first + to.size())};
        if (mine.begin >= mine.end) return;
        const auto pieces = to.part({mine.begin - first, mine.end - first});
        unpack<T>(pieces, from + (mine.begin - chunk.begin));
    }
    template <class T, class By>
    [[nodiscard]] collective_fault begin(std::span<T> data, const By& by, std::vector<std::uint64_t>& tickets,
                                         instant deadline) {
        if constexpr (pipelined_transport<Net>) {
            tickets.push_back(net_.start_all_reduce(data, by));
            net_.advance();
            return {};
        } else {
            return net_.all_reduce(std::span<const T>(data), data, by, deadline);
        }
    }
    [[nodiscard]] collective_fault end(const std::vector<std::uint64_t>& tickets, std::size_t k, instant deadline) {
        if constexpr (pipelined_transport<Net>)
            return net_.finish(tickets[k], deadline);
        else
            return {};
    }
    /// Sends the root's `from` to all ranks' `to`, unless `to` is null.
    [[nodiscard]] collective_fault send(const std::byte* from, std::byte* to, std::size_t n, std::uint32_t root,
                                        instant deadline) {
        const auto size_of = [&](std::size_t k) { return std::min<std::size_t>(n - k * chunk_, chunk_); };
        return by_chunks(
            (n + chunk_ - 1) / chunk_, collective_kind::broadcast, deadline,
            [&](std::size_t k, slot& s) {
                if (rank() == root) stream_.copy(s.memory, from + k * chunk_, size_of(k));
                return rank() == root;
            },
            [&](std::size_t k, slot& s) { return net_.broadcast(std::span(s.memory, size_of(k)), root, deadline); },
            [&](std::size_t k, slot& s) {
                if (to != nullptr && (rank() != root || from != to))
                    stream_.copy(to + k * chunk_, s.memory, size_of(k));
                return collective_fault{};
            });
    }

    // --- results whose length the ranks tell each other; no rank has joined

    /// Gets the memory for a result. The memory belongs to the caller's stream, so `stream_` waits
    /// for earlier work there.
    [[nodiscard]] collective_fault place(device_call& c, std::span<const std::uint64_t> rows, std::byte*& to) {
        try {
            to = static_cast<std::byte*>(c.place(rows));
        } catch (...) {
            return thrown_fault(gpushare::detail::code_thrown(errc::submission_failed), c.kind);
        }
        stream_.wait(recorded(c.stream));
        return {};
    }
    /// Gathers words of all ranks. Neither array is freed if the transport may still touch it.
    [[nodiscard]] collective_fault gather(std::vector<std::uint64_t>& mine, std::vector<std::uint64_t>& all,
                                          instant deadline) {
        all.resize(mine.size() * size());
        gpushare::detail::lent_arrays memory(mine, all);
        return memory.to(
            [&] { return net_.all_gather(std::span<const std::uint64_t>(mine), std::span(all), deadline); });
    }
    [[nodiscard]] collective_fault all_gather(device_call& c, instant deadline) {
        std::vector<std::uint64_t> mine{c.count / c.row}, rows;
        std::byte* to = nullptr;
        if (const auto f = gather(mine, rows, deadline)) return f;
        if (const auto f = place(c, rows, to)) return f;
        for (std::uint32_t r = 0; r < size(); ++r) {
            const std::size_t n = rows[r] * c.row * c.element;
            if (const auto f = send(static_cast<const std::byte*>(c.data), to, n, r, deadline)) return f;
            to += n;
        }
        return {};
    }
    [[nodiscard]] collective_fault reduce_scatter(const detail::request_batch& all, instant deadline) {
        device_call& c = of(*all.of_rank[0]).call;
        const element_range mine = shard_of(c.count / c.row, rank(), size());
        const std::uint64_t rows = mine.size();
        std::byte* to = nullptr;
        if (const auto f = place(c, std::span(&rows, 1), to)) return f;
        return detail::with_type(all.what, [&]<class T>(T) {
            detail::listed_arrays<T> from, result;
            from.add(static_cast<T*>(c.data), c.count);
            result.add(reinterpret_cast<T*>(to), rows * c.row);
            return combine<T>(all, from, result, mine.begin * c.row, deadline);
        });
    }
    [[nodiscard]] collective_fault all_to_all(device_call& c, instant deadline) {
        if constexpr (unequal_transport<Net>) {
            std::vector<std::uint64_t> splits, rows(size());
            std::byte* to = nullptr;
            if (const auto f = gather(c.splits, splits, deadline)) return f;
            for (std::uint32_t r = 0; r < size(); ++r) rows[r] = splits[std::size_t{r} * size() + rank()];
            if (const auto f = place(c, rows, to)) return f;
            const std::size_t row = c.row * c.element;
            const std::uint64_t most = *std::max_element(splits.begin(), splits.end()) * row;
            const std::size_t each = chunk_ / size();
            for (std::size_t at = 0; at < most; at += each)
                if (const auto f = exchange(c, rows, to, at, each, deadline)) return f;
        }
        return {};
    }
    /// Exchanges at most `each` bytes of every pair of ranks, from byte `at` on, through the first
    /// two slots.
    [[nodiscard]] collective_fault exchange(const device_call& c, std::span<const std::uint64_t> rows, std::byte* to,
                                            std::size_t at, std::size_t each, instant deadline) {
        const std::size_t row = c.row * c.element;
        const auto cut = [&](std::span<const std::uint64_t> of, const auto& f) {
            std::vector<std::uint64_t> sizes;
            std::size_t begin = 0, packed = 0;
            for (const std::uint64_t n : of) {
                const std::size_t some = std::min<std::size_t>(n * row - std::min<std::size_t>(at, n * row), each);
                if (some != 0) f(begin + at, packed, some);
                sizes.push_back(some);
                begin += n * row;
                packed += some;
            }
            return sizes;
        };
        slot &out = slots_[0], &in = slots_[1];
        const auto sends = cut(c.splits, [&](std::size_t from, std::size_t packed, std::size_t n) {
            stream_.copy(out.memory + packed, static_cast<const std::byte*>(c.data) + from, n);
        });
        out.last = stream_.record();
        for (const slot* s : {&out, &in})
            if (const auto f = await(*s, c.kind, deadline)) return f;
        const auto receives = cut(rows, [](std::size_t, std::size_t, std::size_t) {});
        const std::size_t sent = std::accumulate(sends.begin(), sends.end(), std::uint64_t{0}),
                          got = std::accumulate(receives.begin(), receives.end(), std::uint64_t{0});
        if (const auto f =
                net_.all_to_allv(std::span<const std::byte>(out.memory, sent), std::span<const std::uint64_t>(sends),
                                 std::span(in.memory, got), std::span<const std::uint64_t>(receives), deadline))
            return f;
        (void)cut(rows, [&](std::size_t target, std::size_t packed, std::size_t n) {
            stream_.copy(to + target, in.memory + packed, n);
        });
        in.last = stream_.record();
        return {};
    }

    Node& node_;
    stream& stream_;
    Net& net_;
    Pinned& pinned_;
    std::uint64_t chunk_ = 0;
    std::vector<slot> slots_;
    // whether the transport may still use pinned memory; only the set's thread uses this member
    bool in_use_ = false;
    std::exception_ptr thrown_{};
    std::atomic<errc> aborted_{errc::none};
    std::mutex mutex_;  // guards the members below
    gpushare::detail::lent_stream<Node> lent_{};
    std::deque<std::shared_ptr<detail::device_request>> running_;
};

}  // namespace horovod
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
