// SPDX-License-Identifier: Apache-2.0
// The basis of every experiment on a device: a node, arrays in device memory, and the records of a
// kernel's blocks.
//
//   rig device;
//   auto s = device.stream();
//   device_array<block_record> records(device, blocks);
//   launch_spin(s, {.blocks = blocks}, 1ms, records.data());
//   const kernel_span span = span_of(records.read(s));
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/backend/cuda/stream.hpp>
#include <gpushare/compute/compute_limiter.hpp>
#include <gpushare/units.hpp>

#include "harness.hpp"
#include "kernels.hpp"

namespace bench {

namespace cu = gpushare::cuda;
using limiter = gpushare::compute_limiter<cu::stream, gpushare::host::steady_clock>;

/// Number of threads in a wide block. When as many wide blocks as possible are resident, no other
/// kernel has room.
inline constexpr std::uint32_t wide_block = 512;

/// A node with the first device that CUDA shows.
struct rig {
    [[nodiscard]] cu::stream stream(int level = 0) { return node.make_stream(device, {level}); }
    [[nodiscard]] const cu::device_properties& properties() const { return node.properties(device); }

    cu::node node{{.devices = {0}}};
    gpushare::device_id device{0};
};

/// `size` elements of device memory, initially zero.
template <class T>
requires std::is_trivially_copyable_v<T>
class device_array {
public:
    device_array(rig& r, std::size_t size)
        : memory_(&r.node.memory(r.device)),
          size_(size),
          data_(static_cast<T*>(memory_->allocate(size * sizeof(T), alignof(std::max_align_t)))) {
        auto s = r.stream();
        s.fill(data_, std::byte{0}, size * sizeof(T));
        s.record().wait(gpushare::never);
    }
    device_array(const device_array&) = delete;
    device_array& operator=(const device_array&) = delete;
    ~device_array() { (void)memory_->deallocate(data_, size_ * sizeof(T), alignof(std::max_align_t)); }

    [[nodiscard]] T* data() noexcept { return data_; }
    /// Reads the first `size` elements after all earlier work on `s`.
    [[nodiscard]] std::vector<T> read(cu::stream& s, std::size_t size) const {
        std::vector<T> copy(size);
        s.copy(copy.data(), data_, size * sizeof(T));
        s.record().wait(gpushare::never);
        return copy;
    }
    [[nodiscard]] std::vector<T> read(cu::stream& s) const { return read(s, size_); }

private:
    cu::device_memory* memory_;
    std::size_t size_;
    T* data_;
};

/// The time from the first block's start to the last block's end, by the device's clock.
struct kernel_span {
    std::uint64_t begin = 0, end = 0;  // ns

    [[nodiscard]] double us() const noexcept { return static_cast<double>(end - begin) / 1e3; }
};

[[nodiscard]] inline kernel_span span_of(std::span<const block_record> blocks) {
    return {std::ranges::min(blocks, {}, &block_record::begin).begin,
            std::ranges::max(blocks, {}, &block_record::end).end};
}

[[nodiscard]] inline std::set<std::uint32_t> sms_of(std::span<const block_record> blocks) {
    std::set<std::uint32_t> sms;
    for (const auto& b : blocks) sms.insert(b.sm);
    return sms;
}

/// Waits without sleeping, for latency measurements.
inline void spin_until(const cu::stream::point& p) {
    while (!p.reached()) {
    }
}

/// The microseconds that `f` takes.
template <class F>
double us_of(F f) {
    return ns_per_call(1, std::move(f)) / 1e3;
}

/// Reports a figure that must be 0; otherwise, the experiment has failed.
inline void expect_none(report& r, const std::string& name, double found, const std::string& unit) {
    r.figure(name, {found}, unit);
    if (found != 0) throw std::runtime_error(name + " is not 0");
}

[[nodiscard]] inline double to_us(gpushare::ns t) { return static_cast<double>(t.count()) / 1e3; }
[[nodiscard]] inline double to_mib(gpushare::bytes b) { return static_cast<double>(b.count()) / (1 << 20); }

}  // namespace bench
