// SPDX-License-Identifier: Apache-2.0
// Horovod's names over any transport of gradient/. Each rank hands over named arrays in any order.
// A thread combines an array as soon as all ranks have handed it over, and combines small arrays
// together.
//
//   using namespace gpushare::horovod;
//   init(net);  // a rank's end, for the whole process
//   const auto pending = allreduce_async(std::span(gradient), "fc.weight");  // the average
//   synchronize(pending);                                      // throws, and names the rank
//   grouped_allreduce(gradients, "block", Sum);                // spans
//   const std::uint32_t last = join();                         // this rank has no more batches
//   shutdown();
//
// If only some of the ranks take part, or if ranks are threads of one process, pass your own
// process_set as the last argument. A process_set uses a transport between its ranks.
//
// The set combines no array before the lowest rank that hasn't joined hands that array over.
// Elements are floats of 16 to 64 bits, or integers of 64 bits, which have no average. The
// transport decides the bits of a sum or a product. Arrays on devices have headers of their own:
// gradient/horovod_devices.hpp for one process, and gradient/horovod_processes.hpp for several.
// gradient/torch_gradients.hpp takes tensors of libtorch, on the host and on CUDA.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
/// Horovod's names.
namespace horovod {

/// How the elements of the ranks that haven't joined are combined.
enum class reduce_op : std::uint8_t {
    average,  ///< the mean of the elements; not for integers
    sum,      ///< the sum of the elements
    minimum,  ///< the smallest element; NaN if a rank has NaN
    maximum,  ///< the largest element; NaN if a rank has NaN
    product,  ///< the product of the elements
};
inline constexpr reduce_op Average = reduce_op::average;  ///< Horovod's name
inline constexpr reduce_op Sum = reduce_op::sum;          ///< Horovod's name
inline constexpr reduce_op Min = reduce_op::minimum;      ///< Horovod's name
inline constexpr reduce_op Max = reduce_op::maximum;      ///< Horovod's name
inline constexpr reduce_op Product = reduce_op::product;  ///< Horovod's name

/// The elements that can be combined.
template <class T>
concept number = std::same_as<T, float> || std::same_as<T, double> || std::same_as<T, float16> ||
    std::same_as<T, bfloat16> || std::same_as<T, std::int64_t>;

/// The options of a process_set.
struct process_set_options {
    ns cycle = std::chrono::microseconds(200);  ///< time between two polls for open requests
    bytes fusion{64 << 20};                     ///< arrays are combined together up to this size
    /// How long a rank waits for the other ranks in a collective on which all ranks have agreed.
    ns patience = std::chrono::seconds(60);
};

namespace detail {

/// The record that a carrier, or a set of ranks on devices, keeps of an array on a device.
struct device_request {
    virtual ~device_request() = default;
};
/// A rank's request. The set's thread fills in the result.
struct request {
    std::string name;
    std::byte* data = nullptr;
    // the number of elements; bytes for a broadcast; 0 if ranks bring different lengths
    std::uint64_t count = 0;
    std::uint64_t what = 0;   // kind, type, operator and root: the same on all ranks
    std::uint64_t shape = 0;  // a hash of all further facts that are the same on all ranks
    std::shared_ptr<device_request> on_device{};
    collective_fault fault{};
    std::exception_ptr thrown{};  // this rank's exception, if it was the fault
    bool done = false;
};
/// Ends the collectives of all ranks by a fault of this rank, unless there was an earlier fault.
/// Returns the fault that counts.
template <class Net>
[[nodiscard]] collective_fault tell_all(Net& net, errc why) {
    if (!gpushare::detail::fault_so_far(net)) net.abort(net.rank(), why);
    // A transport without a thread tells the other ranks in its next call. This call doesn't wait.
    collective_fault f{why, collective_kind::all_reduce, net.rank(), 0, true};
    try {
        if (const auto stands = net.barrier(std::chrono::steady_clock::now()))
            f = stands;
        else
            f.buffers_in_use = false;
    } catch (...) {  // the memory of work under way may still be in use
    }
    return f;
}

/// A hash that is the same in every process (FNV-1a).
[[nodiscard]] constexpr std::uint64_t hash_of(std::string_view name) noexcept {
    std::uint64_t h = 0xcbf2'9ce4'8422'2325U;
    for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100'0000'01b3U;
    return h;
}

// A request's word consists of the type, a bit for a broadcast, the operator, the kind of a call by
// rows, and the root.
inline constexpr std::uint64_t is_broadcast = 1U << 16;
inline constexpr int operator_at = 17, rows_at = 20, root_at = 32;
/// The kind of a request whose result is cut by rows; `none` for all other requests.
enum class by_rows : std::uint8_t { none, all_gather, all_to_all, reduce_scatter };
[[nodiscard]] constexpr by_rows rows_of(std::uint64_t what) noexcept {
    return static_cast<by_rows>(what >> rows_at & 3U);
}
/// Whether requests with this word can be combined together.
[[nodiscard]] constexpr bool fuses(std::uint64_t what) noexcept {
    return (what & is_broadcast) == 0 && rows_of(what) == by_rows::none;
}
[[nodiscard]] constexpr collective_kind kind_of(std::uint64_t what) noexcept {
    switch (rows_of(what)) {
        case by_rows::all_gather: return collective_kind::all_gather;
        case by_rows::all_to_all: return collective_kind::all_to_all;
        case by_rows::reduce_scatter: return collective_kind::reduce_scatter;
        default: break;
    }
    return (what & is_broadcast) != 0 ? collective_kind::broadcast : collective_kind::all_reduce;
}
[[nodiscard]] constexpr reduce_op operator_of(std::uint64_t what) noexcept {
    return static_cast<reduce_op>(what >> operator_at & 7U);
}
[[nodiscard]] constexpr std::uint32_t root_of(std::uint64_t what) noexcept {
    return static_cast<std::uint32_t>(what >> root_at);
}

/// Calls f(T{}) for the type that a request's word names.
template <class F>
decltype(auto) with_type(std::uint64_t what, const F& f) {
    switch (static_cast<std::uint32_t>(what & 0xffffU)) {
        case gpushare::detail::type_id<double>(): return f(double{});
        case gpushare::detail::type_id<float16>(): return f(float16{});
        case gpushare::detail::type_id<bfloat16>(): return f(bfloat16{});
        case gpushare::detail::type_id<std::int64_t>(): return f(std::int64_t{});
        default: return f(float{});
    }
}
/// Calls f with the transport's operator. start_allreduce already refuses to average integers.
template <class T, class F>
collective_fault with_operator(reduce_op op, const F& f) {
    switch (op) {
        case reduce_op::minimum: return f(minimum{});
        case reduce_op::maximum: return f(maximum{});
        case reduce_op::product: return f(product{});
        case reduce_op::average:
            if constexpr (!std::integral<T>) return f(average{});
            break;
        case reduce_op::sum: break;
    }
    return f(sum{});
}
/// The neutral element of `op`, which stands for a rank that has joined.
template <class T>
[[nodiscard]] constexpr T neutral_of(reduce_op op) noexcept {
    using limits = std::numeric_limits<std::conditional_t<std::integral<T>, T, float>>;
    constexpr auto most = std::integral<T> ? limits::max() : limits::infinity();
    constexpr auto least = std::integral<T> ? limits::lowest() : -limits::infinity();
    switch (op) {
        case reduce_op::minimum: return static_cast<T>(most);
        case reduce_op::maximum: return static_cast<T>(least);
        case reduce_op::product: return static_cast<T>(1.0F);
        default: return T{};
    }
}
[[nodiscard]] inline std::size_t size_of(std::uint64_t what) {
    if ((what & is_broadcast) != 0) return 1;
    return with_type(what, []<class T>(T) { return sizeof(T); });
}

/// The sum of floats that stand for elements of 16 bits. `sum` won't do, because a link may
/// compress the sums of floats.
struct sum_of_widened : gpushare::sum {
    static constexpr std::uint32_t id = 0x7002;
};
/// Replaces `n` elements by floats in the same memory, which has room for the floats.
template <class T>
void widen(std::byte* at, std::size_t n) noexcept {
    while (n-- != 0) {  // the last element first, because its float covers earlier elements' ends
        T x;
        std::memcpy(&x, at + n * sizeof x, sizeof x);
        const auto wide = static_cast<float>(x);
        std::memcpy(at + n * sizeof wide, &wide, sizeof wide);
    }
}
/// The inverse of widen().
template <class T>
void narrow(std::byte* at, std::size_t n) noexcept {
    for (std::size_t i = 0; i < n; ++i) {
        float wide;
        std::memcpy(&wide, at + i * sizeof wide, sizeof wide);
        const auto x = static_cast<T>(wide);
        std::memcpy(at + i * sizeof x, &x, sizeof x);
    }
}

/// A rank's call for an array on its device.
struct device_call {
    /// Returns memory for a result of unknown size. `rows` has the rows of each rank, or in a
    /// reduce-scatter the number of rows that this rank gets.
    using placing = std::function<void*(std::span<const std::uint64_t> rows)>;

    std::string name;
    collective_kind kind = collective_kind::all_reduce;
    std::uint32_t type = 0;     // the type of the elements; the same on all ranks
    std::uint32_t element = 1;  // the size of an element in bytes
    reduce_op op = Sum;
    std::uint32_t root = 0;
    void* data = nullptr;   // the input, and the output of all-reduces and broadcasts
    std::size_t count = 0;  // the number of elements
    std::size_t row = 1;    // elements of a row
    // a hash of all further facts that are the same on all ranks
    std::uint64_t shape = 0;
    std::vector<std::uint64_t> splits{};  // for all_to_all: the rows for each rank
    placing place{};
    std::shared_ptr<const void> keeps{};  // an object that lives until the call is over
    void* stream = nullptr;               // the native handle of the caller's stream
    // the stream that waits in synchronize; empty for `stream`
    std::function<void*()> current{};
};
/// Requests of one kind that are combined or sent together.
struct request_batch {
    std::span<const std::shared_ptr<request>> of_rank;  // null for a rank that has joined
    std::span<const std::uint64_t> counts;              // the count of each request
    std::uint64_t what = 0;
    std::size_t elements = 0;  // the elements of all requests
    std::uint32_t joined = 0;  // the number of ranks that have joined
    std::uint32_t ranks = 1;

    [[nodiscard]] bool is_nobody() const { return of_rank[0] == nullptr; }
    /// The transport's operator. While ranks have joined, an average is a sum that finish()
    /// divides.
    [[nodiscard]] reduce_op op() const {
        const reduce_op asked = operator_of(what);
        return asked == Average && joined != 0 ? Sum : asked;
    }
    /// Whether the elements travel as floats: while ranks have joined, the sum of elements of 16
    /// bits may be infinite although their average isn't.
    [[nodiscard]] bool widens() const {
        return fuses(what) && operator_of(what) == Average && joined != 0 && size_of(what) < sizeof(float);
    }
    /// Makes the average from the sum while ranks have joined; otherwise does nothing.
    template <class T>
    void finish(std::span<T> data) const {
        if (operator_of(what) != Average || joined == 0) return;
        using wide = std::conditional_t<std::same_as<T, double>, double, float>;
        for (T& x : data) x = static_cast<T>(static_cast<wide>(x) / static_cast<wide>(ranks - joined));
    }
    /// Fills in the contribution of a rank that has joined.
    template <class T>
    void fill(std::span<T> data) const {
        std::fill(data.begin(), data.end(), neutral_of<T>(operator_of(what)));
    }
};
/// The collectives that a process_set needs, over any transport.
class carrier {
public:
    carrier() = default;
    carrier(const carrier&) = delete;
    carrier& operator=(const carrier&) = delete;
    virtual ~carrier() = default;
    [[nodiscard]] virtual std::uint32_t rank() const = 0;
    [[nodiscard]] virtual std::uint32_t size() const = 0;
    [[nodiscard]] virtual collective_fault least(std::span<std::uint64_t> words, instant deadline) = 0;
    [[nodiscard]] virtual collective_fault broadcast(std::span<std::uint64_t> words, std::uint32_t root,
                                                     instant deadline) = 0;
    /// Combines or sends requests that all ranks have.
    [[nodiscard]] virtual collective_fault move(const request_batch& all, instant deadline) = 0;
    virtual void abort(errc why) = 0;
    /// Called by the set's thread: tells the other ranks of a fault of this rank, and returns the
    /// fault.
    [[nodiscard]] virtual collective_fault fail(errc why) = 0;

    // The functions below are for arrays on this rank's device. Any thread may call them.
    [[nodiscard]] virtual bool on_device() const noexcept { return false; }
    [[nodiscard]] virtual std::shared_ptr<request> made_of(device_call) {
        raise({.code = errc::not_supported}, {}, "handing an array on a device over to a transport");
    }
    /// Whether the device, too, has finished a request that is done.
    [[nodiscard]] virtual bool is_over(const request&) { return true; }
    /// Makes a stream wait for the device. For null, see device_call::current.
    [[nodiscard]] virtual collective_fault follow(const request&, void*) { return {}; }
    /// Waits for the device.
    virtual void settle() {}
};
template <host_transport Net>
class carrier_over final : public carrier {
public:
    explicit carrier_over(Net& net) noexcept : net_(net) {}
    [[nodiscard]] std::uint32_t rank() const override { return net_.rank(); }
    [[nodiscard]] std::uint32_t size() const override { return net_.size(); }
    [[nodiscard]] collective_fault least(std::span<std::uint64_t> words, instant deadline) override {
        return net_.all_reduce(std::span<const std::uint64_t>(words), words, minimum{}, deadline);
    }
    [[nodiscard]] collective_fault broadcast(std::span<std::uint64_t> words, std::uint32_t root,
                                             instant deadline) override {
        return net_.broadcast(words, root, deadline);
    }
    /// Combines or sends the arrays packed, unless there is only one and this rank has it.
    [[nodiscard]] collective_fault move(const request_batch& all, instant deadline) override {
        const std::size_t size_of_one = size_of(all.what);
        const bool packs = all.of_rank.size() != 1 || all.is_nobody() || all.widens();
        if (packs) packed_.assign(all.elements * (all.widens() ? sizeof(float) : size_of_one), std::byte{});
        const auto each = [&](const auto& f) {
            std::byte* at = packed_.data();
            for (std::size_t k = 0; k < all.of_rank.size(); ++k) {
                const std::size_t n = all.counts[k] * size_of_one;
                if (n != 0 && all.of_rank[k] != nullptr) f(at, all.of_rank[k]->data, n);
                at += n;
            }
        };
        if (packs) each([](std::byte* packed, std::byte* own, std::size_t n) { std::memcpy(packed, own, n); });
        std::byte* const data = packs ? packed_.data() : all.of_rank[0]->data;
        const bool sends = (all.what & is_broadcast) != 0;
        gpushare::detail::lent_arrays memory(packed_);
        const auto f = memory.to([&] {
            return sends ? net_.broadcast(std::span(data, all.elements), root_of(all.what), deadline)
                         : combine(all, data, deadline);
        });
        if (!f && packs) each([](std::byte* packed, std::byte* own, std::size_t n) { std::memcpy(own, packed, n); });
        return f;
    }
    void abort(errc why) override { net_.abort(net_.rank(), why); }
    [[nodiscard]] collective_fault fail(errc why) override {
        const auto f = tell_all(net_, why);
        if (f.buffers_in_use) gpushare::detail::never_free(packed_);
        return f;
    }

private:
    [[nodiscard]] collective_fault combine(const request_batch& all, std::byte* data, instant deadline) {
        return with_type(all.what, [&]<class T>(T) {
            if constexpr (sizeof(T) < sizeof(float))
                if (all.widens()) return combine_widened<T>(all, data, deadline);
            const std::span<T> elements(reinterpret_cast<T*>(data), all.elements);
            if (all.is_nobody()) all.fill(elements);
            const auto f = with_operator<T>(all.op(), [&](auto by) {
                return net_.all_reduce(std::span<const T>(elements), elements, by, deadline);
            });
            if (!f) all.finish(elements);
            return f;
        });
    }
    template <class T>
    [[nodiscard]] collective_fault combine_widened(const request_batch& all, std::byte* data, instant deadline) {
        const std::span<float> elements(reinterpret_cast<float*>(data), all.elements);
        widen<T>(data, all.elements);  // a rank that has joined has zeros
        const auto f = net_.all_reduce(std::span<const float>(elements), elements, sum_of_widened{}, deadline);
        if (f) return f;
        all.finish(elements);
        narrow<T>(data, all.elements);
        return {};
    }

    Net& net_;
    std::vector<std::byte> packed_;
};

/// Ranks on devices of this process (horovod_devices.hpp). Any thread may call these functions.
class named_ranks {
public:
    named_ranks() = default;
    named_ranks(const named_ranks&) = delete;
    named_ranks& operator=(const named_ranks&) = delete;
    virtual ~named_ranks() = default;

    [[nodiscard]] virtual std::uint32_t size() const noexcept = 0;
    virtual void enter(std::uint32_t rank) = 0;
    virtual void leave(std::uint32_t rank) = 0;
    [[nodiscard]] virtual std::vector<std::shared_ptr<device_request>> start(std::uint32_t rank,
                                                                             std::vector<device_call> calls) = 0;
    [[nodiscard]] virtual bool is_done(device_request& one) = 0;
    /// Waits until the request is enqueued. `stream` then waits for the device.
    [[nodiscard]] virtual collective_fault wait(device_request& one, void* stream) = 0;
    [[nodiscard]] virtual std::uint32_t join(std::uint32_t rank) = 0;
};

}  // namespace detail

class process_set;

/// An array that was handed over to a set. Copies refer to the same array. The set must outlive
/// every use of the handle.
class handle {
public:
    handle() = default;

    /// The set that got the array; null for a default-constructed handle.
    [[nodiscard]] process_set* of() const noexcept { return set_; }

private:
    friend class process_set;
    handle(std::shared_ptr<detail::request> one, process_set& of) noexcept : of_(std::move(one)), set_(&of) {}
    handle(std::shared_ptr<detail::device_request> one, process_set& of) noexcept
        : on_device_(std::move(one)), set_(&of) {}
    std::shared_ptr<detail::request> of_;
    std::shared_ptr<detail::device_request> on_device_;  // for sets on devices
    process_set* set_ = nullptr;
};

/// One rank's end of a group. A set over a transport has a thread, which uses the transport until
/// the set is gone; no other code may use the transport in that time. Any thread may use the set.
class process_set {
public:
    /// `net` must outlive the set.
    template <host_transport Net>
    explicit process_set(Net& net, const process_set_options& options = {})
        : process_set(std::make_unique<detail::carrier_over<Net>>(net), nullptr, options) {}
    /// A set for a process with a device (horovod_processes.hpp), which must outlive the set. The
    /// set takes arrays on that device, but none in the host's memory. There may be one set at a
    /// time.
    explicit process_set(detail::carrier& on_device, const process_set_options& options = {})
        : process_set(nullptr, &on_device, options) {}
    /// A set for rank `rank` of ranks on devices (horovod_devices.hpp), which must outlive the set.
    /// The set takes arrays on the rank's device, but none in the host's memory. Throws
    /// operation_error (errc::invalid_specification) for a rank that doesn't exist, or already has
    /// a set.
    process_set(detail::named_ranks& devices, std::uint32_t rank) : devices_(&devices), rank_(rank) {
        devices.enter(rank);
    }
    process_set(const process_set&) = delete;
    process_set& operator=(const process_set&) = delete;
    /// Returns once all ranks destroy their sets; open requests fail with errc::stopped. If the
    /// other ranks don't destroy their sets within options.patience, the destructor aborts the
    /// group. With ranks on devices, the destructor doesn't wait for other ranks, but only until
    /// the devices have finished with this rank's arrays. Open and later requests of other ranks
    /// then fail with errc::stopped and this rank.
    ~process_set() {
        if (devices_ != nullptr) {
            devices_->leave(rank_);
            return;
        }
        std::unique_lock lock(mutex_);
        leaves_ = true;
        changed_.notify_all();
        const bool in_time =
            changed_.wait_until(lock, gpushare::detail::within_a_year(deadline()), [&] { return over_; });
        lock.unlock();
        if (!in_time) net_->abort(errc::stopped);
        thread_.join();
        net_->settle();
    }

    /// This rank, counted from 0.
    [[nodiscard]] std::uint32_t rank() const { return devices_ != nullptr ? rank_ : net_->rank(); }
    /// The number of ranks.
    [[nodiscard]] std::uint32_t size() const { return devices_ != nullptr ? devices_->size() : net_->size(); }
    /// Whether the set takes arrays on devices.
    [[nodiscard]] bool on_devices() const noexcept { return devices_ != nullptr || net_->on_device(); }

    /// See allreduce_async. Throws operation_error: errc::duplicate_name while an array of this
    /// name is under way.
    template <number T>
    [[nodiscard]] handle start_allreduce(std::span<T> data, std::string_view name, reduce_op op) {
        return start(reinterpret_cast<std::byte*>(data.data()), data.size(), name, word_of<T>(op));
    }
    /// See grouped_allreduce_async. Throws as start_allreduce, and then hands no array over.
    template <number T>
    [[nodiscard]] std::vector<handle> start_allreduces(std::span<const std::span<T>> list, std::string_view name,
                                                       reduce_op op) {
        std::vector<handle> all;
        all.reserve(list.size());  // no exception once the arrays are handed over
        std::vector<std::shared_ptr<detail::request>> made;
        for (std::size_t k = 0; k < list.size(); ++k)
            made.push_back(made_of(reinterpret_cast<std::byte*>(list[k].data()), list[k].size(),
                                   std::string(name) + "." + std::to_string(k), word_of<T>(op)));
        hand_over(made);
        for (auto& one : made) all.push_back({std::move(one), *this});
        return all;
    }
    /// See broadcast_async.
    template <class T>
    requires std::is_trivially_copyable_v<T>
    [[nodiscard]] handle start_broadcast(std::span<T> data, std::uint32_t root, std::string_view name) {
        if (root >= size())
            raise({errc::invalid_specification, root, 0, size(), reason::no_such_rank}, {}, "a broadcast");
        return start(reinterpret_cast<std::byte*>(data.data()), data.size_bytes(), name,
                     detail::is_broadcast | std::uint64_t{root} << detail::root_at);
    }
    /// Hands over arrays on devices, all at once. Throws operation_error (errc::not_supported) over
    /// a transport, and what allreduce_async throws for an array on a device.
    [[nodiscard]] std::vector<handle> start_on_device(std::vector<detail::device_call> calls) {
        std::vector<handle> all;
        all.reserve(calls.size());  // no exception once the arrays are handed over
        if (devices_ == nullptr) {
            std::vector<std::shared_ptr<detail::request>> made;
            for (auto& one : calls) made.push_back(net_->made_of(std::move(one)));
            hand_over(made);
            for (auto& one : made) all.push_back({std::move(one), *this});
            return all;
        }
        for (auto& one : devices_->start(rank_, std::move(calls))) all.push_back({std::move(one), *this});
        return all;
    }
    /// Hands over one array on a device.
    [[nodiscard]] handle start_on_device(detail::device_call call) {
        std::vector<detail::device_call> one;
        one.push_back(std::move(call));
        return start_on_device(std::move(one))[0];
    }
    /// Whether the array is done, with or without success.
    [[nodiscard]] bool is_done(const handle& h) const {
        if (h.on_device_ != nullptr) return devices_->is_done(*h.on_device_);
        if (h.of_ == nullptr) return true;
        {
            const std::scoped_lock lock(mutex_);
            if (!h.of_->done || h.of_->fault) return h.of_->done;
        }
        return net_->is_over(*h.of_);
    }
    /// Waits for the array. For an array on a device, see synchronize: `stream` waits for the end;
    /// a null `stream` stands for the stream that synchronize chooses.
    [[nodiscard]] collective_fault wait(const handle& h, void* stream = nullptr) {
        if (h.on_device_ != nullptr) return devices_->wait(*h.on_device_, stream);
        std::unique_lock lock(mutex_);
        if (h.of_ == nullptr) return {};
        changed_.wait(lock, [&] { return h.of_->done; });
        lock.unlock();
        return h.of_->fault ? h.of_->fault : net_->follow(*h.of_, stream);
    }
    /// This rank's own exception, if `h` failed because of it; otherwise null.
    [[nodiscard]] std::exception_ptr thrown(const handle& h) const {
        const std::scoped_lock lock(mutex_);
        return h.of_ != nullptr && h.of_->done ? h.of_->thrown : nullptr;
    }
    /// See join.
    [[nodiscard]] std::uint32_t wait_for_all() {
        if (devices_ != nullptr) return devices_->join(rank_);
        std::unique_lock lock(mutex_);
        joins_ = true;
        const std::uint64_t before = joins_done_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return joins_done_ != before || over_; });
        if (joins_done_ == before) raise_fault(fault_);
        return last_joined_;
    }

private:
    process_set(std::unique_ptr<detail::carrier> own, detail::carrier* net, const process_set_options& options)
        : options_(options),
          own_(std::move(own)),
          net_(own_ != nullptr ? own_.get() : net),
          joined_(net_->size()),
          left_(net_->size()) {
        thread_ = std::thread([this] { work(); });
    }
    /// The request's word of an all-reduce.
    template <number T>
    [[nodiscard]] static std::uint64_t word_of(reduce_op op) {
        if (op == Average && std::integral<T>)
            raise({.code = errc::invalid_specification, .because = reason::not_float}, {}, "averaging integers");
        return gpushare::detail::type_id<T>() | static_cast<std::uint64_t>(op) << detail::operator_at;
    }
    [[nodiscard]] std::shared_ptr<detail::request> made_of(std::byte* data, std::size_t count, std::string name,
                                                           std::uint64_t what) const {
        if (on_devices())
            raise({.code = errc::not_supported}, {}, "handing an array of the host over to ranks on devices");
        return std::make_shared<detail::request>(detail::request{std::move(name), data, count, what});
    }
    [[nodiscard]] handle start(std::byte* data, std::size_t count, std::string_view name, std::uint64_t what) {
        auto r = made_of(data, count, std::string(name), what);
        hand_over(std::span(&r, 1));
        return {std::move(r), *this};
    }
    /// Hands over all requests, or none.
    void hand_over(std::span<const std::shared_ptr<detail::request>> all) {
        const std::scoped_lock lock(mutex_);
        const auto refuse = [](const auto& among, const std::string& name) {
            for (const auto& p : among)
                if (p->name == name)
                    raise({.code = errc::duplicate_name}, {}, "handing over an array by a name that is in use");
        };
        for (std::size_t k = 0; k < all.size(); ++k) {
            refuse(pending_, all[k]->name);
            refuse(all.first(k), all[k]->name);
        }
        if (over_)
            for (const auto& r : all) finish(*r, fault_);
        else
            pending_.insert(pending_.end(), all.begin(), all.end());
        changed_.notify_all();
    }

    // Only the set's thread calls the functions below. It reads other threads' requests under the
    // lock, and combines without the lock.
    using requests = std::vector<std::shared_ptr<detail::request>>;
    static constexpr std::size_t words_of_a_request = 4;
    // The answers to a request. The least answer of all ranks counts.
    static constexpr std::uint64_t not_yet = 0, differs = 1, has = 2;

    void work() {
        try {
            while (!cycle()) {
            }
        } catch (...) {  // such as std::bad_alloc
            end_by_exception();
        }
        const std::scoped_lock lock(mutex_);
        if (!fault_) fault_ = {errc::stopped, collective_kind::all_reduce, rank(), 0};
        for (const auto& p : pending_) finish(*p, fault_);
        pending_.clear();
        over_ = true;
        changed_.notify_all();
    }
    void end_by_exception() noexcept {
        const errc why = gpushare::detail::code_thrown();
        collective_fault f{why, collective_kind::all_reduce, rank(), 0};
        const auto thrown = std::current_exception();
        try {
            f = net_->fail(why);
        } catch (...) {  // nobody told the other ranks: they end when their own patience does
        }
        const std::scoped_lock lock(mutex_);
        if (!fault_) fault_ = f;
        thrown_ = thrown;
    }
    void finish(detail::request& r, const collective_fault& f) {
        r.fault = f;
        if (f && r.thrown == nullptr) r.thrown = thrown_;
        r.done = true;
    }
    [[nodiscard]] std::uint32_t leader() const {
        return static_cast<std::uint32_t>(std::find(joined_.begin(), joined_.end(), false) - joined_.begin());
    }
    /// The ranks agree once on what comes next, and do it. Returns true once the set is over.
    [[nodiscard]] bool cycle() {
        requests mine;
        if (leader() == rank()) mine = wait_for_work();
        std::vector<std::uint64_t> count{mine.size()}, asked, answers;
        gpushare::detail::lent_arrays memory(count, asked, answers);
        if (failed(memory.to([&] { return net_->broadcast(std::span(count), leader(), never); }))) return true;
        const std::uint64_t n = count.front();
        asked.resize(n * words_of_a_request);
        for (std::size_t k = 0; k < mine.size(); ++k) {
            asked[k * words_of_a_request] = detail::hash_of(mine[k]->name);
            asked[k * words_of_a_request + 1] = mine[k]->count;
            asked[k * words_of_a_request + 2] = mine[k]->what;
            asked[k * words_of_a_request + 3] = mine[k]->shape;
        }
        if (n != 0 && failed(memory.to([&] { return net_->broadcast(std::span(asked), leader(), deadline()); })))
            return true;
        answers = answer_to(asked, mine);
        if (failed(memory.to([&] { return net_->least(std::span(answers), deadline()); }))) return true;
        note_who_joined(std::span(answers).subspan(n));
        const bool moved = n != 0 && combine(asked, answers, mine);
        if (fault_of_all()) return true;
        if (std::find(left_.begin(), left_.end(), false) == left_.end()) return true;
        if (moved) return false;
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, options_.cycle, [&] { return leaves_; });
        return false;
    }
    [[nodiscard]] instant deadline() const {
        return saturating_add(std::chrono::steady_clock::now(), options_.patience);
    }
    [[nodiscard]] bool failed(const collective_fault& f) {
        const std::scoped_lock lock(mutex_);
        if (f && !fault_) fault_ = f;
        return static_cast<bool>(f);
    }
    [[nodiscard]] bool fault_of_all() {
        const std::scoped_lock lock(mutex_);
        return static_cast<bool>(fault_);
    }
    [[nodiscard]] requests wait_for_work() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !pending_.empty() || joins_ || leaves_; });
        return pending_;
    }
    /// One answer for each request of the leader, followed by two answers for each rank: whether
    /// the rank has joined, and whether the rank leaves. `mine` gets this rank's request for each
    /// answer, or null if there is none.
    [[nodiscard]] std::vector<std::uint64_t> answer_to(std::span<const std::uint64_t> asked, requests& mine) {
        const std::size_t n = asked.size() / words_of_a_request;
        std::vector<std::uint64_t> answers(n + 2 * size(), 1);
        const std::scoped_lock lock(mutex_);
        const bool joins = joins_ && pending_.empty();
        mine.assign(n, nullptr);
        for (std::size_t k = 0; k < n; ++k) {
            const auto one = asked.subspan(k * words_of_a_request, words_of_a_request);
            for (const auto& p : pending_)
                if (detail::hash_of(p->name) == one[0]) mine[k] = p;
            if (mine[k] == nullptr)
                answers[k] = joins ? has : not_yet;
            else
                answers[k] =
                    mine[k]->count == one[1] && mine[k]->what == one[2] && mine[k]->shape == one[3] ? has : differs;
        }
        answers[n + rank()] = joins ? 1 : 0;
        answers[n + size() + rank()] = leaves_ ? 1 : 0;
        return answers;
    }
    void note_who_joined(std::span<const std::uint64_t> words) {
        const std::scoped_lock lock(mutex_);
        for (std::uint32_t r = 0; r < size(); ++r) {
            if (words[r] != 0 && !joined_[r]) last_joined_ = r;
            joined_[r] = words[r] != 0;
            left_[r] = words[size() + r] != 0;
        }
        if (leader() != size()) return;
        joins_ = false;
        joined_.assign(size(), false);
        ++joins_done_;
        changed_.notify_all();
    }
    /// Combines the requests that all ranks have, and refuses those that must be refused. Returns
    /// true if a request is done.
    [[nodiscard]] bool combine(std::span<const std::uint64_t> asked, std::span<const std::uint64_t> answers,
                               const requests& mine) {
        bool moved = false;
        const std::size_t n = mine.size();
        for (std::size_t k = 0; k < n;) {
            const auto what = [&](std::size_t i) { return asked[i * words_of_a_request + 2]; };
            if (const auto why = why_refused(answers[k], what(k)); why || answers[k] != has) {
                if (why) done(std::span(mine).subspan(k, 1), why);
                moved = static_cast<bool>(why) || moved;
                ++k;
                continue;
            }
            moved = true;
            std::size_t end = k + 1, elements = asked[k * words_of_a_request + 1];
            for (; end < n && answers[end] == has && what(end) == what(k) && detail::fuses(what(k)); ++end) {
                const std::size_t more = asked[end * words_of_a_request + 1];
                if ((elements + more) * detail::size_of(what(k)) > options_.fusion.count()) break;
                elements += more;
            }
            const auto f = together(asked, std::span(mine).subspan(k, end - k), k, what(k), elements);
            done(std::span(mine).subspan(k, end - k), f);
            if (failed(f)) return true;
            k = end;
        }
        return moved;
    }
    /// The reason why the ranks refuse a request; the same on all ranks.
    [[nodiscard]] collective_fault why_refused(std::uint64_t answer, std::uint64_t what) const {
        if (answer == differs) return {errc::mismatch, detail::kind_of(what), leader_for_names(), 0};
        if (answer == has && detail::rows_of(what) != detail::by_rows::none)
            if (const auto gone = std::find(joined_.begin(), joined_.end(), true); gone != joined_.end())
                return {errc::not_supported, detail::kind_of(what), static_cast<std::uint32_t>(gone - joined_.begin()),
                        0};
        const bool sends = answer == has && (what & detail::is_broadcast) != 0;
        if (sends && joined_[detail::root_of(what)])
            return {errc::not_supported, collective_kind::broadcast, detail::root_of(what), 0};
        return {};
    }
    [[nodiscard]] std::uint32_t leader_for_names() const { return leader() == size() ? 0 : leader(); }
    void done(std::span<const std::shared_ptr<detail::request>> some, const collective_fault& f) {
        const std::scoped_lock lock(mutex_);
        for (const auto& r : some) {
            if (r == nullptr) continue;
            finish(*r, f);
            pending_.erase(std::remove(pending_.begin(), pending_.end(), r), pending_.end());
        }
        changed_.notify_all();
    }
    /// Combines or sends requests of one kind, with `elements` elements in all.
    [[nodiscard]] collective_fault together(std::span<const std::uint64_t> asked,
                                            std::span<const std::shared_ptr<detail::request>> some, std::size_t first,
                                            std::uint64_t what, std::size_t elements) {
        std::vector<std::uint64_t> counts;
        for (std::size_t k = first; k < first + some.size(); ++k) counts.push_back(asked[k * words_of_a_request + 1]);
        const auto gone = static_cast<std::uint32_t>(std::count(joined_.begin(), joined_.end(), true));
        return net_->move({some, counts, what, elements, gone, size()}, deadline());
    }

    process_set_options options_;
    std::unique_ptr<detail::carrier> own_;
    detail::carrier* net_ = nullptr;  // null for ranks on devices of one process
    detail::named_ranks* devices_ = nullptr;
    std::uint32_t rank_ = 0;  // for ranks on devices
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    requests pending_;  // in the order in which they came
    bool joins_ = false, leaves_ = false, over_ = false;
    std::uint64_t joins_done_ = 0;
    std::uint32_t last_joined_ = 0;
    collective_fault fault_{};
    std::exception_ptr thrown_{};      // this rank's exception, if it was the fault
    std::vector<bool> joined_, left_;  // of each rank; only the set's thread uses these
    std::thread thread_;
};

namespace detail {
/// Throws the fault, if there is one. An exception that this rank threw before is nested.
inline void raise_with(const collective_fault& f, const std::exception_ptr& thrown) {
    if (!f || thrown == nullptr) return raise_fault(f);
    try {
        std::rethrow_exception(thrown);
    } catch (...) {
        std::throw_with_nested(gpushare::detail::error_of(f));
    }
}
/// The process's own set.
struct set_of_process {
    std::mutex changes{};  // held by an init() or a shutdown()
    // null unless the set is whole
    std::atomic<process_set*> set{nullptr};
    std::unique_ptr<process_set> own{};  // guarded by the mutex
};
[[nodiscard]] inline set_of_process& of_process() {
    static set_of_process all;
    return all;
}
/// Makes the process's set, with a process_set's arguments.
template <class... Arguments>
void init_process(Arguments&... arguments) {
    set_of_process& all = of_process();
    const std::scoped_lock lock(all.changes);
    if (all.own != nullptr) raise({.code = errc::invalid_specification}, {}, "making the process's set twice");
    all.own = std::make_unique<process_set>(arguments...);
    // release: a thread that finds the set finds it made.
    all.set.store(all.own.get(), std::memory_order_release);
}
}  // namespace detail

/// The set that init() made. Throws operation_error (errc::invalid_specification) before init().
[[nodiscard]] inline process_set& global_process_set() {
    // acquire: see init_process.
    process_set* const set = detail::of_process().set.load(std::memory_order_acquire);
    if (set == nullptr) raise({.code = errc::invalid_specification}, {}, "using the process's set before init");
    return *set;
}
/// Makes this process's set, which all functions below use by default. If there is a set already,
/// throws operation_error (errc::invalid_specification): call shutdown() first. Any thread may call
/// init().
template <host_transport Net>
void init(Net& net, const process_set_options& options = {}) {
    detail::init_process(net, options);
}
/// init() for a rank on a device of this process.
inline void init(detail::named_ranks& devices, std::uint32_t rank) { detail::init_process(devices, rank); }
/// init() for a process with a device (horovod_processes.hpp).
inline void init(detail::carrier& on_device, const process_set_options& options = {}) {
    detail::init_process(on_device, options);
}
/// Destroys the set; see process_set's destructor. Any thread may call shutdown(), while no thread
/// uses the set.
inline void shutdown() {
    detail::set_of_process& all = detail::of_process();
    const std::scoped_lock lock(all.changes);
    all.set.store(nullptr, std::memory_order_release);
    all.own.reset();
}
/// Whether the process has a set.
[[nodiscard]] inline bool is_initialized() {
    return detail::of_process().set.load(std::memory_order_acquire) != nullptr;
}
/// The number of this process's rank.
[[nodiscard]] inline std::uint32_t rank() { return global_process_set().rank(); }
[[nodiscard]] inline std::uint32_t size() { return global_process_set().size(); }  ///< ranks

/// Hands over an array, to be combined in place. The array must stay in place until the handle is
/// done, and no other code may touch it in that time. Name, length, type and operator must be the
/// same on all ranks; otherwise all ranks get errc::mismatch. Throws operation_error:
/// errc::duplicate_name while an array of this name is under way, and errc::invalid_specification
/// for an average of integers.
template <number T>
[[nodiscard]] handle allreduce_async(std::span<T> data, std::string_view name, reduce_op op = Average,
                                     process_set& of = global_process_set()) {
    return of.start_allreduce(data, name, op);
}
/// All ranks get rank `root`'s array. Throws as allreduce_async, and for a rank that doesn't exist.
template <class T>
[[nodiscard]] handle broadcast_async(std::span<T> data, std::uint32_t root, std::string_view name,
                                     process_set& of = global_process_set()) {
    return of.start_broadcast(data, root, name);
}
/// Hands over several arrays at once, by the names `name.0`, `name.1` and so on. Throws as
/// allreduce_async does, and then hands no array over.
template <number T>
[[nodiscard]] std::vector<handle> grouped_allreduce_async(std::span<const std::span<T>> list, std::string_view name,
                                                          reduce_op op = Average,
                                                          process_set& of = global_process_set()) {
    return of.start_allreduces(list, name, op);
}
/// Whether the array is done, with or without success.
[[nodiscard]] inline bool poll(const handle& h) { return h.of() == nullptr || h.of()->is_done(h); }
/// Waits for the array. Throws operation_error: the fault, which names the rank. If this rank's own
/// memory, stream or framework threw, that exception is nested (std::rethrow_if_nested).
///
/// For an array on a device, waits until the collective is enqueued, and makes a stream wait for
/// the collective's end: torch's current stream for libtorch's tensors, or otherwise the stream
/// with which the array was handed over. If the device meets a fault later, the next calls throw
/// it.
inline void synchronize(const handle& h) {
    if (h.of() == nullptr) return;
    const auto fault = h.of()->wait(h);
    detail::raise_with(fault, h.of()->thrown(h));
}
/// Waits for all arrays, and then throws as for one array, for the first array that failed. So an
/// exception doesn't leave arrays of the host under way.
inline void synchronize(std::span<const handle> all) {
    std::exception_ptr first;
    for (const handle& h : all) {
        try {
            synchronize(h);
        } catch (...) {
            if (first == nullptr) first = std::current_exception();
        }
    }
    if (first != nullptr) std::rethrow_exception(first);
}
/// Hands an array over, and waits for it.
template <number T>
void allreduce(std::span<T> data, std::string_view name, reduce_op op = Average,
               process_set& of = global_process_set()) {
    synchronize(allreduce_async(data, name, op, of));
}
/// Hands arrays over, and waits for them.
template <number T>
void grouped_allreduce(std::span<const std::span<T>> list, std::string_view name, reduce_op op = Average,
                       process_set& of = global_process_set()) {
    synchronize(std::span<const handle>(grouped_allreduce_async(list, name, op, of)));
}
/// Says that this rank has no more batches. Until all ranks have joined, arrays are combined over
/// the ranks that haven't joined. (In Horovod, joined ranks bring zeros, whatever the operator is.)
/// A broadcast from a rank that has joined fails with errc::not_supported, and the fault names the
/// rank. Returns the rank that joined last. Call join() with no array under way. Throws as
/// synchronize does.
inline std::uint32_t join(process_set& of = global_process_set()) { return of.wait_for_all(); }

}  // namespace horovod
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
