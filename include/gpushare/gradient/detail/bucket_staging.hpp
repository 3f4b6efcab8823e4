// SPDX-License-Identifier: Apache-2.0
// How one bucket goes over a transport: as a list of arrays where it takes one, or as one array where they lie behind each other, else
// packed; in 16 bits what is asked to.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/finite.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/wire.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// One more while this is there.
class counted {
public:
    explicit counted(std::uint32_t& n) noexcept : n_(n) { ++n_; }
    counted(const counted&) = delete;
    counted& operator=(const counted&) = delete;
    ~counted() { --n_; }

private:
    std::uint32_t& n_;
};

/// Of the exception that is being handled.
[[nodiscard]] inline errc code_thrown() noexcept {
    try {
        throw;
    } catch (const error& e) {
        return e.code() == errc::none ? errc::backend_failed : e.code();
    } catch (const std::bad_alloc&) {
        return errc::out_of_memory;
    } catch (...) {
        return errc::backend_failed;
    }
}

template <class T>
struct registered_gradient {
    std::string name;
    std::span<T> data;
    wire_format wire;
    std::vector<float> residual, owed_before;  // of error feedback: now, and when the step began
    bool rounded;                              // in this step
};

/// How many buckets of a channel are under way at once: between processes, one goes over the link while another one's last answers come.
inline constexpr std::uint32_t most_buckets_at_once = 2;
template <class Net>
inline constexpr std::uint32_t buckets_at_once = pipelined_transport<Net> ? most_buckets_at_once : 1;

/// Of a bucket that is under way: kept from step to step.
template <class T>
class bucket_staging {
    using registered = registered_gradient<T>;

public:
    /// Begins to combine those of `all` that are in `bucket`, and doesn't wait. All ranks begin and end theirs in the same order.
    template <host_transport Net, class Op>
    void begin(Net& net, const Op& op, std::span<registered> all, std::span<const std::uint32_t> bucket) {
        list_.clear();
        std::size_t fp16 = 0, bf16 = 0;
        for (const std::uint32_t g : bucket) {
            const registered& one = all[g];
            if (one.wire == wire_format::as_is)
                list_.push_back(one.data);
            else
                (one.wire == wire_format::fp16 ? fp16 : bf16) += one.data.size();
        }
        if constexpr (!list_transport<Net>) gather();
        if constexpr (std::same_as<T, float>) {
            float16s_.resize(fp16);
            bfloat16s_.resize(bf16);
            if (fp16 != 0) round(all, bucket, float16s_, wire_format::fp16);
            if (bf16 != 0) round(all, bucket, bfloat16s_, wire_format::bf16);
        }
        tickets_.clear();
        if constexpr (pipelined_transport<Net>)
            (void)each_array([&](auto array) {
                tickets_.push_back(net.start_all_reduce(array, op));
                return collective_fault{};
            });
    }
    /// Waits until they are combined; `finite` becomes false if one isn't.
    template <host_transport Net, class Op>
    [[nodiscard]] collective_fault end(Net& net, const Op& op, std::span<registered> all,
                                       std::span<const std::uint32_t> bucket, bool& finite, instant deadline) {
        collective_fault fault;
        if constexpr (list_transport<Net>)
            if (!list_.empty()) fault = combine_list(net, op, finite, deadline);
        if constexpr (pipelined_transport<Net>) {
            for (const std::uint64_t ticket : tickets_)
                if (!fault) fault = net.finish(ticket, deadline);
        } else if (!fault) {
            fault = each_array([&]<class E>(std::span<E> array) {
                return net.all_reduce(std::span<const E>(array), array, op, deadline);
            });
        }
        if (fault) return fault;
        if constexpr (!list_transport<Net>) {
            finite = finite && all_finite(std::span<const T>(flat_));
            spread();
        }
        if constexpr (std::same_as<T, float>) {
            if (!float16s_.empty()) widen(all, bucket, float16s_, wire_format::fp16, finite);
            if (!bfloat16s_.empty()) widen(all, bucket, bfloat16s_, wire_format::bf16, finite);
        }
        return {};
    }
    /// The transport may still touch what was begun, after a fault with buffers_in_use: its memory is never freed.
    void leave_behind() noexcept { (void)new (std::nothrow) bucket_staging(std::move(*this)); }

private:
    /// `f` of each array that is combined as such, until one has a fault.
    template <class F>
    [[nodiscard]] collective_fault each_array(const F& f) {
        collective_fault fault;
        if (!flat_.empty()) fault = f(flat_);
        if constexpr (std::same_as<T, float>) {
            if (!fault && !float16s_.empty()) fault = f(std::span(float16s_));
            if (!fault && !bfloat16s_.empty()) fault = f(std::span(bfloat16s_));
        }
        return fault;
    }
    template <class Net, class Op>
    [[nodiscard]] collective_fault combine_list(Net& net, const Op& op, bool& finite, instant deadline) {
        const std::span<const std::span<T>> list(list_);
        if constexpr (requires(bool* out) { net.all_reduce_list(list, op, deadline, out); }) {
            bool good = true;
            const auto fault = net.all_reduce_list(list, op, deadline, &good);
            finite = finite && good;
            return fault;
        } else {
            const auto fault = net.all_reduce_list(list, op, deadline);
            for (const auto& x : list) finite = finite && all_finite(std::span<const T>(x));
            return fault;
        }
    }
    /// The list as one array: as it lies, if each begins where the one before ends, else packed.
    void gather() {
        std::size_t elements = 0;
        bool whole = true;
        for (std::size_t i = 0; i < list_.size(); elements += list_[i++].size())
            whole = whole && list_[i].data() == list_.front().data() + elements;
        flat_ = list_.empty() ? std::span<T>() : std::span<T>(list_.front().data(), whole ? elements : 0);
        if (whole) return;
        packed_.resize(elements);
        flat_ = packed_;
        std::size_t at = 0;
        for (const auto& x : list_) at = copy(x, flat_.subspan(at, x.size()), at);
    }
    void spread() noexcept {
        if (flat_.data() != packed_.data()) return;
        std::size_t at = 0;
        for (const auto& x : list_) at = copy(flat_.subspan(at, x.size()), x, at);
    }
    static std::size_t copy(std::span<const T> from, std::span<T> to, std::size_t at) noexcept {
        std::copy(from.begin(), from.end(), to.begin());
        return at + from.size();
    }
    /// `f(gradient, wire)` of each of a format, where `wire` is its part of the memory.
    template <class Wire, class F>
    static void each_of(std::span<registered> all, std::span<const std::uint32_t> bucket, wire_format format,
                        std::vector<Wire>& memory, const F& f) {
        std::size_t at = 0;
        for (const std::uint32_t g : bucket) {
            if (all[g].wire != format) continue;
            f(all[g], std::span(memory).subspan(at, all[g].data.size()));
            at += all[g].data.size();
        }
    }
    template <class Wire>
    static void round(std::span<registered> all, std::span<const std::uint32_t> bucket, std::vector<Wire>& memory,
                      wire_format format) {
        each_of(all, bucket, format, memory, [](registered& g, std::span<Wire> wire) {
            g.owed_before = g.residual;
            g.rounded = true;
            to_wire<Wire>(g.data, wire, g.residual);
        });
    }
    template <class Wire>
    static void widen(std::span<registered> all, std::span<const std::uint32_t> bucket, std::vector<Wire>& memory,
                      wire_format format, bool& finite) {
        each_of(all, bucket, format, memory, [&](registered& g, std::span<const Wire> wire) {
            finite = finite && all_finite(wire);  // half the bytes to look at
            from_wire<Wire>(wire, g.data);
        });
    }

    std::vector<std::span<T>> list_;  // of those that travel as they are
    std::span<T> flat_;               // the same as one array, where the transport takes no list
    std::vector<T> packed_;
    std::vector<float16> float16s_;
    std::vector<bfloat16> bfloat16s_;
    std::vector<std::uint64_t> tickets_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
