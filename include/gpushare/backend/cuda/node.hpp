// SPDX-License-Identifier: Apache-2.0
// The CUDA devices of this process as a node, on which quotas, limiters, partitions and tenants
// run.
//
//   gpushare::cuda::node node;  // all devices that CUDA shows
//   // tag: whose work it is, a number that you choose
//   auto s = node.make_stream(gpushare::device_id{0}, gpushare::priority{1}, /*tag=*/7);
//   gpushare::tenancy shared{node};
//
// A device's memory comes from cudaMalloc and goes back by cudaFree.
//
//   // memory_error when it isn't there
//   void* p = node.memory(gpushare::device_id{0}).allocate(64_MiB, 256);
//
// An overhead account shows what takes a device's memory outside all tenants. CUDA tells only how
// much memory is free, so the account measures before and after each step.
//
//   gpushare::cuda::overhead_account account{node, d};  // so far: contexts and other processes
//   account.measure("modules", [&] { load_kernels(); });
//   account.measure("vendor workspaces", [&] { make_blas_handles(); });
//   for (const auto& e : account.entries()) log(e.label, e.size);
//
// A node_topology shows how the devices are connected, as far as the CUDA runtime tells. connect()
// enables peer access among devices.
//
//   const gpushare::cuda::node_topology t = gpushare::cuda::query_topology(node);
//   if (t.between(a, b).kind == gpushare::cuda::link_kind::nvlink) ...
//   const bool peers = gpushare::cuda::connect(node, devices);
//
// connect() is compiled and tested over the stand-in for the runtime. It hasn't run on several
// devices yet.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/detail/block_registry.hpp>
#include <gpushare/backend/cuda/detail/device_state.hpp>
#include <gpushare/backend/cuda/detail/node_gangs.hpp>
#include <gpushare/backend/cuda/device.hpp>
#include <gpushare/backend/cuda/error.hpp>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/detail/steady_clock.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace cuda {

/// The bytes that cudaMalloc takes for a request, which CUDA doesn't report: multiples of `step`
/// or, from `paged_from` bytes on, of `page`. The defaults are those of an H200 with driver 580;
/// `./dev gpu` checks them on a device. If small blocks don't fill the page that they share, the
/// rest of the page counts as taken by others, so no byte is unaccounted for.
struct allocation_model {
    bytes step{512};      ///< small blocks take multiples of this
    bytes page{2 << 20};  ///< larger blocks take multiples of this
    /// Blocks of at least this size take whole pages. Half a page still counts as a small block.
    bytes paged_from{(1 << 20) + 1};

    /// The bytes that a request takes; bytes::max() if rounding would overflow.
    [[nodiscard]] constexpr bytes charged(std::uint64_t size) const noexcept {
        const std::uint64_t unit = bytes{size} < paged_from ? step.count() : page.count();
        const bytes whole = bytes{size} + bytes{unit - 1};
        return whole == bytes::max() ? whole : bytes{whole.count() / unit * unit};
    }
};

/// The memory of one device. Safe from any thread. Free all blocks before it is destroyed; the
/// destructor frees blocks that are still allocated. Keeps the device's state alive.
class device_memory {
public:
    /// The alignment of cudaMalloc. A larger alignment can be requested, and is charged.
    static constexpr std::size_t natural_alignment = 256;

    /// Called by the node.
    device_memory(std::shared_ptr<detail::device_state> device, const allocation_model& model)
        : device_(std::move(device)), model_(model), capacity_(figures().total) {}
    device_memory(const device_memory&) = delete;
    device_memory& operator=(const device_memory&) = delete;
    ~device_memory() {
        blocks_.for_each([this](const detail::block& b) { (void)give_back(b); });
    }

    /// `size` bytes at a multiple of `alignment` (a power of two); a unique address for 0 bytes.
    /// Contents undefined. Throws memory_error: errc::out_of_memory, size_overflow, bad_alignment,
    /// device_lost.
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment) {
        failure why;
        void* const p = obtain(size, alignment, &why);
        if (p == nullptr) throw memory_error(why, {}, "allocating device memory");
        return p;
    }

    /// Whether the device is lost: then nothing is allocated any more. Acquire, like
    /// health::lost().
    [[nodiscard]] bool lost() const noexcept { return device_->health().lost(); }
    /// Returns null if `allocate` would throw; `why`, unless null, receives the reason.
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, failure* why = nullptr) noexcept {
        return obtain(size, alignment, why);
    }

    /// Frees a block. If no allocation of that size and alignment returned `p`, changes nothing and
    /// returns errc::unknown_block or errc::wrong_size. Null is ignored. Waits for the device, as
    /// cudaFree does.
    errc deallocate(void* p, byte_count size, std::size_t alignment) noexcept {
        if (p == nullptr) return errc::none;
        detail::block b;
        if (const errc why = blocks_.remove(p, size, alignment, b); why != errc::none) return why;
        // A block that CUDA refuses to free can't be freed again; the device's health keeps the
        // error.
        (void)give_back(b);
        blocks_.release(b);
        return errc::none;
    }

    /// The bytes of the capacity that a request takes, by the allocation model; bytes::max() if no
    /// device can have it.
    [[nodiscard]] bytes charged(byte_count size, std::size_t alignment) const noexcept {
        if (!std::has_single_bit(alignment)) return bytes::max();
        const auto asked = detail::padded(size, alignment, natural_alignment);
        return asked == 0 ? bytes::max() : model_.charged(asked);
    }

    /// The device's total memory, by cudaMemGetInfo.
    [[nodiscard]] bytes capacity() const noexcept { return capacity_; }
    /// Bytes that are neither free nor allocated here: contexts, modules, memory kept by pools,
    /// other processes. Chunks of virtual_memory and blocks of memory_pool count as allocated here.
    /// On a lost device, all memory that isn't allocated here. During concurrent allocations and
    /// frees the value may be too high for a moment, by their bytes; it is never too low.
    [[nodiscard]] bytes taken_by_others() const noexcept {
        const auto entered = blocks_.entered(), chunks = device_->chunks().entered();
        const bytes pools = device_->used_of_pools();
        cudaError_t code = cudaSuccess;
        const bytes free = figures(code).free;
        const bytes ours = blocks_.out_since(entered) + device_->chunks().out_since(chunks) +
                           std::min(pools, device_->used_of_pools());
        return capacity_ - (code == cudaSuccess ? free : bytes{}) - ours;
    }
    /// The reason why a request can never be granted: more than the device has, too large an
    /// alignment; errc::none if it can be.
    [[nodiscard]] failure refuses(byte_count size, std::size_t alignment) const noexcept {
        if (charged(size, alignment) <= capacity_) return {};
        if (const failure why = never(size, alignment); why.code != errc::none) return why;
        return {
            .code = errc::out_of_memory, .asked = size, .limit = capacity_.count(), .because = reason::beyond_device};
    }
    /// Not known.
    [[nodiscard]] static constexpr bytes largest_free() noexcept { return bytes::max(); }
    /// No owner: shared by all.
    [[nodiscard]] static constexpr std::string_view owner() noexcept { return {}; }
    /// Never closes.
    [[nodiscard]] static close_token closing() noexcept { return {}; }
    /// The bytes that its blocks take.
    [[nodiscard]] bytes used() const noexcept { return blocks_.charged(); }
    /// The allocation model given to the constructor.
    [[nodiscard]] const allocation_model& model() const noexcept { return model_; }

private:
    struct memory_figures {
        bytes free{}, total{};
    };

    [[nodiscard]] memory_figures figures(cudaError_t& code) const noexcept {
        std::size_t free = 0, total = 0;
        code = detail::call_in(device_->context(), [&] { return cudaMemGetInfo(&free, &total); });
        (void)device_->health().note(code, "cudaMemGetInfo");
        return {bytes{free}, bytes{total}};
    }
    [[nodiscard]] memory_figures figures() const {
        cudaError_t code = cudaSuccess;
        const auto now = figures(code);
        if (code != cudaSuccess) fail(code, "querying a device's memory");
        return now;
    }

    [[nodiscard]] failure never(std::size_t size, std::size_t alignment) const noexcept {
        return gpushare::detail::never_had(size, alignment, capacity_, [&](std::size_t a) { return charged(size, a); });
    }
    void* obtain(std::size_t size, std::size_t alignment, failure* why) noexcept {
        detail::block b{.size = size, .alignment = alignment, .charge = charged(size, alignment)};
        if (b.charge > capacity_) {
            const failure no = never(size, alignment);
            if (no.code != errc::none && why != nullptr) *why = no;
            if (no.code != errc::none) return nullptr;
        }
        const auto asked = static_cast<std::size_t>(detail::padded(size, alignment, natural_alignment));
        cudaError_t code = device_->call_beside_captures([&] { return cudaMalloc(&b.base, asked); });
        const errc refused = device_->health().note(code, "cudaMalloc");
        if (refused == errc::none) {
            void* const p = detail::aligned(b.base, alignment);
            if (blocks_.add(p, b)) return p;
            (void)give_back(b);
        }
        if (why == nullptr) return nullptr;
        *why = {.code = refused == errc::device_lost ? refused : errc::out_of_memory,
                .asked = b.charge.count(),
                .left = figures(code).free.count(),
                .limit = capacity_.count()};
        return nullptr;
    }

    errc give_back(const detail::block& b) noexcept {
        return device_->health().keep(device_->call_beside_captures([&] { return cudaFree(b.base); }), "cudaFree");
    }

    const std::shared_ptr<detail::device_state> device_;
    const allocation_model model_;
    const bytes capacity_;
    detail::block_registry blocks_;
};
static_assert(memory<device_memory>);

namespace detail {

/// The green context of a stream and its number of SMs; empty if the stream isn't in one.
struct green_place {
    CUgreenCtx context = nullptr;
    std::uint32_t sms = 0;
};
[[nodiscard]] inline green_place green_place_of(const driver& api, cudaStream_t stream) noexcept {
    CUgreenCtx green = nullptr;
    CUdevResource has{};
    if (api.stream_get_green(stream, &green) != CUDA_SUCCESS || green == nullptr) return {};
    if (api.green_get_resource(green, &has, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS) return {};
    return {green, has.sm.smCount};
}

}  // namespace detail

/// Options of a node.
struct node_options {
    /// CUDA's numbers, in the node's order; empty: all that CUDA shows.
    std::vector<int> devices{};
    allocation_model memory{};  ///< the bytes that cudaMalloc takes for a request
    bool peer_access = true;    ///< whether devices reach each other's memory, where possible
};

/// A node of CUDA devices. Makes the primary contexts of its devices. They stay when the node is
/// destroyed, since the embedder and its libraries use them as well. Streams and points may outlive
/// the node; its memory may not. Starts no thread. Safe from any thread.
class node {
public:
    using stream = cuda::stream;                        ///< its streams
    using memory_type = device_memory;                  ///< its devices' memory
    using clock_type = gpushare::detail::steady_clock;  ///< the clock of deadlines

    /// Throws operation_error: no_driver, no_device (none, or not that one), duplicate_device,
    /// invalid_specification (too many); memory_error where there is no room for a context.
    explicit node(const node_options& options = {})
        : api_(std::make_shared<const driver>(driver::load())),
          gangs_(open(options)),
          peer_access_(options.peer_access) {
        if (!options.peer_access) return;
        for (std::uint32_t from = 0; from < num_devices(); ++from)
            for (std::uint32_t to = 0; to < num_devices(); ++to)
                if (from != to) (void)enable_peer_access(device_id{from}, device_id{to});
    }
    node(const node&) = delete;
    node& operator=(const node&) = delete;

    /// The number of devices, at least 1.
    [[nodiscard]] std::uint32_t num_devices() const noexcept { return static_cast<std::uint32_t>(devices_.size()); }
    /// The clock of deadlines.
    [[nodiscard]] clock_type get_clock() const noexcept { return {}; }
    /// The order in which gangs are enqueued on the node's devices, and the gangs that are on them.
    /// Shared by all nodes of the process.
    [[nodiscard]] detail::node_gangs& gangs() noexcept { return gangs_; }
    /// The driver's functions.
    [[nodiscard]] const driver& api() const noexcept { return *api_; }

    /// The device's memory. Throws operation_error (no_device), as do the next three.
    [[nodiscard]] device_memory& memory(device_id d) { return at(d).memory; }
    /// The device's properties.
    [[nodiscard]] const device_properties& properties(device_id d) const { return state(d)->properties(); }
    /// The errors seen on the device so far.
    [[nodiscard]] cuda::health& health(device_id d) const { return state(d)->health(); }
    /// Whether the device was seen to be unusable.
    [[nodiscard]] bool lost(device_id d) const { return health(d).lost(); }

    /// Makes a stream in the device's primary context: its kernels run on all SMs, partitioned or
    /// not. `level` is clamped to CUDA's few priorities, and ordinary work (level 0) gets the
    /// lowest.
    [[nodiscard]] stream make_stream(device_id d, priority level = {}, std::uint32_t tag = 0) {
        auto made = describe(state(d), tag);
        made->level = level;
        {
            const device_guard on(made->device->context());
            check(cudaStreamCreateWithPriority(&made->native, cudaStreamNonBlocking,
                                               made->device->properties().native_priority(level)),
                  "making a stream");
            made->owned = true;
            check(cudaStreamGetPriority(made->native, &made->native_priority), "querying a stream's priority");
        }
        made->register_unpartitioned();
        return stream(std::move(made));
    }

    /// Takes over a stream of the embedder, which the library will destroy. Throws operation_error:
    /// invalid_specification for a default stream, no_device for one on a device that isn't the
    /// node's.
    [[nodiscard]] stream from_native_handle(cudaStream_t handle, std::uint32_t tag = 0) {
        auto adopted = look_at(handle, tag);
        adopted->register_unpartitioned();
        adopted->owned = true;
        return stream(std::move(adopted));
    }
    /// The same for a stream that the embedder keeps, and destroys after the returned object.
    /// Before each point, one more driver call asks whether the stream is captured.
    [[nodiscard]] stream borrow(cudaStream_t handle, std::uint32_t tag = 0) {
        auto borrowed = look_at(handle, tag);
        borrowed->register_unpartitioned();
        return stream(std::move(borrowed));
    }
    // A literal 0 or nullptr is the default stream, which isn't allowed here.
    stream from_native_handle(int, std::uint32_t = 0) = delete;
    stream from_native_handle(std::nullptr_t, std::uint32_t = 0) = delete;
    stream borrow(int, std::uint32_t = 0) = delete;
    stream borrow(std::nullptr_t, std::uint32_t = 0) = delete;

    /// The device of a stream of another owner. Null and cudaStreamLegacy are the default stream of
    /// the current device. Throws as borrow.
    [[nodiscard]] device_id device_of(cudaStream_t handle) const {
        int ordinal = 0;
        if (handle == nullptr || handle == cudaStreamLegacy)
            check(cudaGetDevice(&ordinal), "querying which device is current");
        else
            ordinal = look_at(handle, 0)->device->ordinal();
        for (std::uint32_t d = 0; d < num_devices(); ++d)
            if (devices_[d].state->ordinal() == ordinal) return device_id{d};
        throw operation_error(errc::no_device, {}, "the stream's device doesn't belong to the node");
    }
    /// As the next function; null and cudaStreamLegacy mean the default stream of the current
    /// device.
    [[nodiscard]] point point_after(cudaStream_t handle) { return point_after(device_of(handle), handle); }
    /// The point after which no work enqueued so far on another owner's stream uses memory: see
    /// stream::last_use. Works as for a borrowed stream, but null and cudaStreamLegacy mean the
    /// default stream of `d`, on which the library enqueues no work of its own.
    [[nodiscard]] point point_after(device_id d, cudaStream_t handle) {
        if (handle != nullptr && handle != cudaStreamLegacy) return stream(look_at(handle, 0)).last_use();
        auto by_default = describe(state(d), 0);
        by_default->native = cudaStreamLegacy;
        by_default->captures.hand_out();
        const device_guard on(by_default->device->context());
        return stream(std::move(by_default)).last_use();
    }

    /// Opens the memory of `to` to kernels and copies of `from`, for the whole process. False if
    /// the machine can't do that. Calling it again does no harm. The memory of pools and virtual
    /// memory isn't covered: see their options.
    bool enable_peer_access(device_id from, device_id to) {
        const int near = state(from)->ordinal(), far = state(to)->ordinal();
        if (near == far) return true;
        int possible = 0;
        check(cudaDeviceCanAccessPeer(&possible, near, far), "querying whether devices reach each other");
        if (possible == 0) return false;
        const device_guard on(state(from)->context());
        const auto code = detail::handled(cudaDeviceEnablePeerAccess(far, 0));
        if (code == cudaErrorTooManyPeers || code == cudaErrorPeerAccessUnsupported) return false;
        if (code != cudaErrorPeerAccessAlreadyEnabled) check(code, "letting a device reach another one's memory");
        return true;
    }

    /// The other devices of the node that reach the memory of `d`, to which pools and virtual
    /// memory there are opened; none if the node was made without peer access. Throws
    /// operation_error.
    [[nodiscard]] std::vector<device_id> peers_of(device_id d) const {
        std::vector<device_id> peers;
        const int home = state(d)->ordinal();
        for (std::uint32_t other = 0; peer_access_ && other < num_devices(); ++other) {
            int possible = 0;
            const int theirs = state(device_id{other})->ordinal();
            if (theirs != home)
                check(cudaDeviceCanAccessPeer(&possible, theirs, home), "querying whether devices reach each other");
            if (possible != 0) peers.push_back(device_id{other});
        }
        return peers;
    }

    /// Makes the device's primary context current for this thread, until the returned guard is
    /// destroyed and restores the previous context.
    [[nodiscard]] device_guard make_current(device_id d) const { return device_guard(state(d)->context()); }

    /// The device's shared state, for objects built on a device: pools, virtual memory, green
    /// contexts.
    [[nodiscard]] const std::shared_ptr<detail::device_state>& state(device_id d) const {
        if (d.index >= num_devices())
            raise({.code = errc::no_device, .asked = d.index, .limit = num_devices()}, {}, "CUDA node");
        return devices_[d.index].state;
    }

private:
    struct entry {
        std::shared_ptr<detail::device_state> state;
        device_memory memory;

        entry(const std::shared_ptr<const driver>& api, int ordinal, bool beside_device_0,
              const allocation_model& model)
            : state(std::make_shared<detail::device_state>(api, ordinal, beside_device_0)), memory(state, model) {}
    };

    detail::node_gangs open(const node_options& options) {
        const auto count = count_devices();
        std::vector<int> wanted = options.devices;
        if (wanted.empty())
            for (std::uint32_t i = 0; i < count; ++i) wanted.push_back(static_cast<int>(i));
        for (auto i = wanted.begin(); i != wanted.end(); ++i) {
            if (*i < 0 || static_cast<std::uint32_t>(*i) >= count)
                raise({.code = errc::no_device, .asked = static_cast<std::uint32_t>(*i), .limit = count}, {},
                      "opening a CUDA node");
            if (std::find(wanted.begin(), i, *i) != i)
                throw operation_error(errc::duplicate_device, {}, "opening a CUDA node: the same device twice");
            devices_.emplace_back(api_, *i, std::find(wanted.begin(), wanted.end(), 0) != wanted.end(), options.memory);
        }
        return {count, wanted};
    }

    [[nodiscard]] entry& at(device_id d) {
        (void)state(d);
        return devices_[d.index];
    }

    static std::shared_ptr<detail::stream_state> describe(const std::shared_ptr<detail::device_state>& device,
                                                          std::uint32_t tag) {
        auto s = std::make_shared<detail::stream_state>();
        s->device = device;
        s->sms = device->properties().sms;
        s->tag = tag;
        return s;
    }

    std::shared_ptr<detail::stream_state> look_at(cudaStream_t handle, std::uint32_t tag) const {
        if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread)
            throw operation_error(errc::invalid_specification, {},
                                  "a default stream can't be shared: it waits for all others");
        const detail::context_guard any(devices_.front().state->context());
        int ordinal = 0, native_priority = 0;
        check(cudaStreamGetDevice(handle, &ordinal), "querying a stream's device");
        check(cudaStreamGetPriority(handle, &native_priority), "querying a stream's priority");
        auto on = devices_.begin();
        while (on != devices_.end() && on->state->ordinal() != ordinal) ++on;
        if (on == devices_.end())
            throw operation_error(errc::no_device, {}, "the stream's device doesn't belong to the node");
        auto s = describe(on->state, tag);
        s->native = handle;
        s->widths.give_up();
        s->captures.hand_out();
        s->native_priority = native_priority;
        s->level = s->device->properties().level_of(native_priority);
        if (const auto place = detail::green_place_of(*api_, handle); place.sms != 0) {
            s->green = place.context;
            s->sms = place.sms;
        }
        return s;
    }

    const std::shared_ptr<const driver> api_;
    std::deque<entry> devices_;
    detail::node_gangs gangs_;
    const bool peer_access_;
};
static_assert(gpushare::node<node>);

/// An account of the device memory that isn't allocated here, step by step. Not thread-safe. Refers
/// to the node's memory, which must outlive it. Memory that other processes take or return during a
/// step counts for the step, since CUDA doesn't distinguish them. Allocations from the device's
/// memory aren't counted; allocations of pools and virtual memory are.
class overhead_account {
public:
    /// The memory that a step took.
    struct entry {
        std::string label{};    ///< the name of the step
        std::int64_t size = 0;  ///< in bytes; negative if memory came back
    };

    /// Opens the account with the memory taken so far. Throws operation_error: errc::no_device.
    overhead_account(node& on, device_id d)
        // Names the type of the entry, because nvcc 13 loses nested braces.
        : memory_(&on.memory(d)),
          entries_(1, entry{"contexts and other processes", signed_bytes(memory_->taken_by_others())}) {}

    /// Runs `step` and records the device memory that it took. Exceptions pass through, and no
    /// entry is made then.
    template <std::invocable F>
    void measure(std::string label, F&& step) {
        const auto before = signed_bytes(memory_->taken_by_others());
        std::forward<F>(step)();
        entries_.push_back({std::move(label), signed_bytes(memory_->taken_by_others()) - before});
    }

    /// The entries in order. The first is the memory taken when the account was opened.
    [[nodiscard]] const std::vector<entry>& entries() const noexcept { return entries_; }

    /// Bytes taken between the steps, or by others since. Negative if more memory came back than
    /// was recorded.
    [[nodiscard]] std::int64_t unexplained() const noexcept {
        auto rest = signed_bytes(memory_->taken_by_others());
        for (const entry& e : entries_) rest -= e.size;
        return rest;
    }

private:
    // No device has 2^63 bytes.
    static std::int64_t signed_bytes(bytes b) noexcept { return static_cast<std::int64_t>(b.count()); }

    device_memory* memory_;
    std::vector<entry> entries_;
};

/// The kinds of links, best first. The runtime doesn't name links. Peers with native atomics count
/// as NVLink (PCIe has no atomics between devices), and other peers as PCIe. All others go through
/// the host's memory, across sockets if the devices' NUMA nodes differ.
enum class link_kind : std::uint8_t {
    same_device,    ///< no link
    nvlink,         ///< peers with native atomics
    pcie,           ///< other peers
    host,           ///< through the host's memory
    across_sockets  ///< through the host's memory, from one processor to another
};

/// The name of the kind.
[[nodiscard]] constexpr std::string_view to_string(link_kind k) noexcept {
    switch (k) {
        case link_kind::same_device: return "same device";
        case link_kind::nvlink: return "NVLink";
        case link_kind::pcie: return "PCIe";
        case link_kind::host: return "host memory";
        case link_kind::across_sockets: return "host memory across sockets";
    }
    return "unknown link";
}

/// The link from one device to another.
struct peer_link {
    link_kind kind = link_kind::same_device;  ///< the likely kind of link
    bool access = true;                       ///< whether loads and stores reach the other's memory
    bool native_atomics = true;               ///< whether atomics do as well
    /// CUDA's rank: 0 is the best link of this machine; not comparable between machines.
    int performance_rank = 0;
};

/// All devices, and a link for each ordered pair. A plain value.
struct node_topology {
    std::vector<device_properties> devices{};  ///< in the node's order
    std::vector<peer_link> links{};            ///< by row: from * devices.size() + to

    /// The link from one device to another. Throws std::out_of_range if there is no such device.
    [[nodiscard]] const peer_link& between(device_id from, device_id to) const {
        const auto in_row = to.index < devices.size() ? std::size_t{to.index} : links.size();
        return links.at(std::size_t{from.index} * devices.size() + in_row);
    }
};

/// Classifies the link of two different devices.
[[nodiscard]] constexpr link_kind classify(bool access, bool native_atomics, std::int32_t numa_from,
                                           std::int32_t numa_to) noexcept {
    if (access) return native_atomics ? link_kind::nvlink : link_kind::pcie;
    return numa_from != numa_to && numa_from >= 0 && numa_to >= 0 ? link_kind::across_sockets : link_kind::host;
}

/// Queries the topology of a node. Throws operation_error if the driver doesn't answer.
[[nodiscard]] inline node_topology query_topology(const node& on) {
    node_topology t;
    for (std::uint32_t i = 0; i < on.num_devices(); ++i) t.devices.push_back(on.properties(device_id{i}));
    const auto ask = [](cudaDeviceP2PAttr what, int from, int to) {
        int value = 0;
        check(cudaDeviceGetP2PAttribute(&value, what, from, to), "querying how devices are connected");
        return value;
    };
    for (const device_properties& from : t.devices) {
        for (const device_properties& to : t.devices) {
            peer_link link;
            if (from.ordinal != to.ordinal) {
                link.access = ask(cudaDevP2PAttrAccessSupported, from.ordinal, to.ordinal) != 0;
                link.native_atomics =
                    link.access && ask(cudaDevP2PAttrNativeAtomicSupported, from.ordinal, to.ordinal) != 0;
                link.performance_rank = ask(cudaDevP2PAttrPerformanceRank, from.ordinal, to.ordinal);
                link.kind = classify(link.access, link.native_atomics, from.host_numa_node, to.host_numa_node);
            }
            t.links.push_back(link);
        }
    }
    return t;
}

/// Opens the memory of all `devices` to kernels on each of them, for the whole process. Returns
/// false if some pairs can't reach each other; the other pairs may be open then. A device may be
/// listed several times. Throws as node::enable_peer_access.
[[nodiscard]] inline bool connect(node& on, std::span<const device_id> devices) {
    bool all = true;
    for (const device_id from : devices)
        for (const device_id to : devices)
            if (from != to) all = on.enable_peer_access(from, to) && all;
    return all;
}

}  // namespace cuda
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
