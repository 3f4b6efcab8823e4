// SPDX-License-Identifier: Apache-2.0
// The memory of a host device: real memory of this process, counted exactly against a capacity. Big
// blocks are mapped pages, which cost the host nothing until they are touched.
//
//   // memory_error when it isn't there
//   void* p = node.memory(gpushare::device_id{0}).allocate(64_MiB, 256);
//
// The options of a node are here as well: the number of devices, their memory and SMs, and the time
// that a block of a kernel takes. With timing::real, the default, a block takes as long as it
// computes; with timing::modelled, as long as its launch says.
//
//   const gpushare::host::node_options options{.devices = 2, .memory = 8_GiB, .sms = 4, .timing = gpushare::host::timing::modelled};
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <string_view>
#include <utility>

#include <gpushare/closing.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/detail/pointer_table.hpp>
#include <gpushare/error.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace host {

/// How long a block takes.
///   real       as long as it computes
///   modelled   its grid's `hold`, or as long as it computes if that is longer (`hold` says how
///              long it *would* take on the device). The SM is held without burning CPU, so eight
///              devices behave like eight on two cores.
/// Opaque work (`stream::enqueue`) takes its given length with both.
enum class timing : std::uint8_t {
    real,      ///< a block takes as long as it computes
    modelled,  ///< a block holds its SM for grid::hold, without computing for it
};

/// Options of a node. All devices of a node are alike.
struct node_options {
    std::uint32_t devices = 1;  ///< the number of devices
    bytes memory = 1_GiB;       ///< memory of each device
    /// SMs of each device; the node starts a thread for each SM.
    std::uint32_t sms = 4;
    std::uint32_t sm_unit = 1;                 ///< SMs of a partition come in multiples of this
    host::timing timing = host::timing::real;  ///< how long a block takes
    /// Device memory can't be touched from outside kernels; see device_memory.
    bool guarded = false;
    bool stale = false;      ///< new blocks aren't zeros, as on a real device; see device_memory
    bytes taken{};           ///< the part of each device's memory that others have
    bytes granularity{512};  ///< allocations are charged in multiples of this
    /// How many blocks of each device the ledger keeps until it is read.
    std::size_t ledger_capacity = std::size_t{1} << 20;
};

/// The properties of a device's memory.
struct memory_options {
    bytes capacity = 1_GiB;  ///< the device's capacity
    /// The part of the capacity that the device's context and other processes have.
    bytes taken{};
    bytes granularity{512};  ///< every allocation is charged in multiples of this power of two
    bool guarded = false;    ///< see device_memory
    /// New blocks hold 0xA5, like data of an earlier owner; not if guarded. For tests.
    bool stale = false;
};

/// The memory of one device. Safe from any thread. Charges are exact: an allocation is refused only
/// if it doesn't fit alongside the bytes charged at that moment, and a refused allocation was never
/// charged.
///
/// `guarded` memory can be touched only while a block or copy of its device runs, because a host
/// program can't reach real device memory either: a stray access faults (SIGSEGV). The guard is
/// approximate: while any block runs, all threads may touch the memory. Meant for tests: whenever
/// the device goes from idle to busy, the guard costs a system call for each allocation.
class device_memory {
public:
    /// Makes the memory of a device. Throws operation_error: errc::invalid_specification.
    explicit device_memory(const memory_options& options);
    device_memory(const device_memory&) = delete;
    device_memory& operator=(const device_memory&) = delete;
    /// Returns allocated blocks to the system.
    ~device_memory();

    /// `size` bytes aligned to `alignment` (a power of two); a unique address for 0 bytes. Contents
    /// undefined. Throws memory_error: errc::out_of_memory, size_overflow, bad_alignment or
    /// device_lost.
    [[nodiscard]] void* allocate(byte_count size, std::size_t alignment);

    /// Returns null if `allocate` would throw; `why`, unless null, receives the reason.
    [[nodiscard]] void* try_allocate(byte_count size, std::size_t alignment, failure* why = nullptr) noexcept;

    /// Makes the first `size` bytes of a new block zeros, from the host; does nothing if its pages
    /// come from the system. False with the option `stale`: a stream has to write the zeros.
    [[nodiscard]] bool zero(void* p, std::size_t size) const noexcept;

    /// Frees a block. Returns errc::unknown_block or errc::wrong_size, and changes nothing, if `p`
    /// isn't the result of an allocation of that size and alignment. Null is ignored.
    errc deallocate(void* p, byte_count size, std::size_t alignment) noexcept;

    /// The bytes of the capacity that a request takes; bytes::max() if no device can have as many.
    [[nodiscard]] bytes charged(byte_count size, std::size_t alignment) const noexcept;

    /// The device's capacity.
    [[nodiscard]] bytes capacity() const noexcept { return options_.capacity; }
    /// The bytes that others have, by the options or take_for_others(). Relaxed, like used(): a
    /// figure of one moment, from which nothing else is inferred.
    [[nodiscard]] bytes taken_by_others() const noexcept { return bytes{taken_.load(std::memory_order_relaxed)}; }
    /// The reason why a request can never be granted: more than the device has, too large an
    /// alignment; errc::none if it can be.
    [[nodiscard]] failure refuses(byte_count size, std::size_t alignment) const noexcept;
    /// Not known.
    [[nodiscard]] static constexpr bytes largest_free() noexcept { return bytes::max(); }
    /// No owner: shared by all.
    [[nodiscard]] static constexpr std::string_view owner() noexcept { return {}; }
    /// Never closes.
    [[nodiscard]] static close_token closing() noexcept { return {}; }
    /// Bytes that are allocated or charged now.
    [[nodiscard]] bytes used() const noexcept { return bytes{used_.load(std::memory_order_relaxed)}; }

    /// Charges `n` bytes that another allocator of this device hands out (virtual_memory is one).
    /// Returns out_of_memory, size_overflow or device_lost if an allocation of as many would fail;
    /// then nothing is charged.
    [[nodiscard]] errc charge(bytes n) noexcept;
    /// Releases `n` charged bytes.
    void release(bytes n) noexcept;

    // --- faults, and calls of the engine

    /// After `after` more allocations, the next `count` fail as if the memory were full.
    void fail_allocations(std::uint64_t after, std::uint64_t count) noexcept;

    /// Gives others `wanted` bytes, or all that aren't allocated here if these are fewer. Returns
    /// how many they have.
    bytes take_for_others(bytes wanted) noexcept;

    /// Loses the device: no allocation succeeds any more. Blocks stay valid until they are freed.
    void lose() noexcept;
    /// Whether the device is lost. Relaxed: earlier blocks are still there.
    [[nodiscard]] bool lost() const noexcept { return lost_.load(std::memory_order_relaxed); }

    /// While an object of this class exists, guarded memory can be touched. The engine makes one
    /// around every block that runs.
    class [[nodiscard]] opening {
    public:
        /// Opens guarded memory. Does nothing for other memory.
        explicit opening(device_memory& memory) noexcept : memory_(memory) {
            if (memory_.options_.guarded) memory_.open();
        }
        opening(const opening&) = delete;
        opening& operator=(const opening&) = delete;
        ~opening() {
            if (memory_.options_.guarded) memory_.close();
        }

    private:
        device_memory& memory_;
    };

private:
    struct block {
        void* begin = nullptr;
        std::size_t size = 0, alignment = 0;
        std::uint64_t charge = 0;
        std::size_t mapped = 0;  // bytes; 0 if it came from operator new
    };
    static constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max() / 4;
    static constexpr std::uint64_t smallest_mapping = 64 << 10;

    [[nodiscard]] failure never(std::size_t size, std::size_t alignment) const noexcept;
    void* acquire(std::size_t size, std::size_t alignment, failure& why) noexcept;

    failure exhausted(bytes charge) const noexcept;

    // The reason why `charge` bytes can't be charged now; errc::none if they can be. Call under the
    // mutex.
    failure refusal(bytes charge) noexcept;

    bool fault_strikes() noexcept;

    /// Memory of this process for `b`; null if there is none.
    void* back(block& b) const noexcept;

    static void give_back(const block& b) noexcept;

    void open() noexcept;
    void close() noexcept;
    void protect(int access) noexcept;

    const memory_options options_;
    mutable std::mutex mutex_;
    gpushare::detail::pointer_table<block> blocks_;
    std::atomic<std::uint64_t> used_{0}, taken_;  // written under the mutex, read anywhere
    std::uint64_t succeed_first_ = 0, then_fail_ = 0;
    std::uint64_t openings_ = 0;     // the number of running blocks
    std::atomic<bool> lost_{false};  // written under the mutex
};
static_assert(memory<device_memory>);

#if GPUSHARE_BODIES

GPUSHARE_INLINE device_memory::device_memory(const memory_options& options)
    : options_(options), taken_(options.taken.count()) {
    if (!std::has_single_bit(options.granularity.count()) || options.taken > options.capacity)
        throw operation_error(errc::invalid_specification, {},
                              "host device memory: the granularity must be a power of two and no more may be "
                              "taken than there is");
}

GPUSHARE_INLINE device_memory::~device_memory() {
    blocks_.for_each([](const block& b) { give_back(b); });
}

GPUSHARE_INLINE void* device_memory::allocate(byte_count size, std::size_t alignment) {
    failure why;
    void* const p = acquire(size, alignment, why);
    if (p == nullptr) throw memory_error(why, {}, "allocating device memory");
    return p;
}

GPUSHARE_INLINE void* device_memory::try_allocate(byte_count size, std::size_t alignment, failure* why) noexcept {
    failure unused;
    return acquire(size, alignment, why != nullptr ? *why : unused);
}

GPUSHARE_INLINE bool device_memory::zero(void* p, std::size_t size) const noexcept {
    if (options_.stale) return false;
    if (options_.guarded || charged(size, 1).count() >= smallest_mapping) return true;
    std::memset(p, 0, size);
    return true;
}

GPUSHARE_INLINE errc device_memory::deallocate(void* p, byte_count size, std::size_t alignment) noexcept {
    if (p == nullptr) return errc::none;
    std::unique_lock lock{mutex_};
    const block* const found = blocks_.find(p);
    if (found == nullptr) return errc::unknown_block;
    const block b = *found;
    if (b.size != size || b.alignment != alignment) return errc::wrong_size;
    blocks_.erase(p);
    used_.fetch_sub(b.charge, std::memory_order_relaxed);
    lock.unlock();
    give_back(b);
    return errc::none;
}

GPUSHARE_INLINE bytes device_memory::charged(byte_count size, std::size_t alignment) const noexcept {
    if (!std::has_single_bit(alignment)) return bytes::max();
    const std::uint64_t unit = std::max<std::uint64_t>(options_.granularity.count(), alignment);
    const std::uint64_t whole = std::max<std::uint64_t>(size, 1);
    // Nothing can be mapped beyond half of the address space, and rounding up might overflow there.
    if (whole > largest || unit > largest) return bytes::max();
    return bytes{(whole + unit - 1) & ~(unit - 1)};
}

GPUSHARE_INLINE failure device_memory::refuses(byte_count size, std::size_t alignment) const noexcept {
    if (charged(size, alignment) <= options_.capacity) return {};
    if (const failure why = never(size, alignment); why.code != errc::none) return why;
    return {.code = errc::out_of_memory,
            .asked = size,
            .limit = options_.capacity.count(),
            .because = reason::beyond_device};
}

GPUSHARE_INLINE errc device_memory::charge(bytes n) noexcept {
    if (n.count() > largest) return errc::size_overflow;
    const std::lock_guard lock{mutex_};
    const failure why = refusal(n);
    if (why.code == errc::none) used_.fetch_add(n.count(), std::memory_order_relaxed);
    return why.code;
}

GPUSHARE_INLINE void device_memory::release(bytes n) noexcept {
    const std::lock_guard lock{mutex_};
    used_.fetch_sub(n.count(), std::memory_order_relaxed);
}

GPUSHARE_INLINE void device_memory::fail_allocations(std::uint64_t after, std::uint64_t count) noexcept {
    const std::lock_guard lock{mutex_};
    succeed_first_ = after;
    then_fail_ = count;
}

GPUSHARE_INLINE bytes device_memory::take_for_others(bytes wanted) noexcept {
    const std::lock_guard lock{mutex_};
    const bytes taken = std::min(wanted, options_.capacity - used());
    taken_.store(taken.count(), std::memory_order_relaxed);
    return taken;
}

GPUSHARE_INLINE void device_memory::lose() noexcept {
    const std::lock_guard lock{mutex_};
    lost_.store(true, std::memory_order_relaxed);
}

GPUSHARE_INLINE failure device_memory::never(std::size_t size, std::size_t alignment) const noexcept {
    return gpushare::detail::never_had(size, alignment, options_.capacity,
                                       [&](std::size_t a) { return charged(size, a); });
}

GPUSHARE_INLINE void* device_memory::acquire(std::size_t size, std::size_t alignment, failure& why) noexcept {
    const bytes charge = charged(size, alignment);
    if (charge > options_.capacity) {
        why = never(size, alignment);
        if (why.code != errc::none) return nullptr;
    }
    // One critical section from the check to the entry: no other request ever sees a charge that
    // doesn't last.
    const std::lock_guard lock{mutex_};
    why = refusal(charge);
    if (why.code != errc::none) return nullptr;

    block b{.size = size, .alignment = alignment, .charge = charge.count()};
    void* const p = b.begin = back(b);
    if (p == nullptr) {
        why = exhausted(charge);
        return nullptr;
    }
    try {
        blocks_.insert(p, b);
    } catch (const std::bad_alloc&) {
        give_back(b);
        why = exhausted(charge);
        return nullptr;
    }
    used_.fetch_add(b.charge, std::memory_order_relaxed);
    if (options_.stale && !options_.guarded) std::memset(p, 0xA5, size);
    return p;
}

GPUSHARE_INLINE failure device_memory::exhausted(bytes charge) const noexcept {
    const bytes left = options_.capacity - taken_by_others() - used();
    return {
        .code = errc::out_of_memory, .asked = charge.count(), .left = left.count(), .limit = options_.capacity.count()};
}

GPUSHARE_INLINE failure device_memory::refusal(bytes charge) noexcept {
    if (lost()) return {.code = errc::device_lost};
    const failure full = exhausted(charge);
    return charge.count() > full.left || fault_strikes() ? full : failure{};
}

GPUSHARE_INLINE bool device_memory::fault_strikes() noexcept {
    if (then_fail_ == 0) return false;
    if (succeed_first_ > 0) {
        --succeed_first_;
        return false;
    }
    --then_fail_;
    return true;
}

GPUSHARE_INLINE void* device_memory::back(block& b) const noexcept {
    if (!options_.guarded && b.charge < smallest_mapping)
        // Exactly the requested size, so that AddressSanitizer finds overruns.
        return ::operator new (std::max<std::size_t>(b.size, 1), std::align_val_t{b.alignment}, std::nothrow);

    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::size_t whole = (b.charge + page - 1) & ~(page - 1);
    const std::size_t slack = b.alignment > page ? b.alignment : 0;
    const int access = options_.guarded && openings_ == 0 ? PROT_NONE : PROT_READ | PROT_WRITE;
    void* const mapping = ::mmap(nullptr, whole + slack, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return nullptr;
    b.mapped = whole;
    if (slack == 0) return mapping;

    // Unmap the pages before and after the aligned part.
    auto* const begin = static_cast<std::byte*>(mapping);
    const std::size_t before = -reinterpret_cast<std::uintptr_t>(begin) & (b.alignment - 1);
    if (before != 0) ::munmap(begin, before);
    if (slack != before) ::munmap(begin + before + whole, slack - before);
    return begin + before;
}

GPUSHARE_INLINE void device_memory::give_back(const block& b) noexcept {
    if (b.mapped != 0)
        ::munmap(b.begin, b.mapped);
    else
        ::operator delete (b.begin, std::align_val_t{b.alignment});
}

GPUSHARE_INLINE void device_memory::open() noexcept {
    const std::lock_guard lock{mutex_};
    if (openings_++ == 0) protect(PROT_READ | PROT_WRITE);
}

GPUSHARE_INLINE void device_memory::close() noexcept {
    const std::lock_guard lock{mutex_};
    if (--openings_ == 0) protect(PROT_NONE);
}

GPUSHARE_INLINE void device_memory::protect(int access) noexcept {
    blocks_.for_each([access](const block& b) { ::mprotect(b.begin, b.mapped, access); });
}

#endif  // GPUSHARE_BODIES

}  // namespace host
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
