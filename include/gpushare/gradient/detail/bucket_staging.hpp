// SPDX-License-Identifier: Apache-2.0
// Carries one bucket over a transport. The bucket goes as a list of arrays if the transport takes
// lists, as one array if the gradients are adjacent, or packed otherwise. Gradients that ask for 16
// bits are rounded into one array for each format. Each rank gets the whole sums, or only its
// shards.
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
#include <gpushare/collective/floats.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/lent_arrays.hpp>
#include <gpushare/gradient/detail/packed_list.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/wire.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// Counts the calls that are under way.
class counted {
public:
    explicit counted(std::uint32_t& n) noexcept : n_(n) { ++n_; }
    counted(const counted&) = delete;
    counted& operator=(const counted&) = delete;
    ~counted() { --n_; }

private:
    std::uint32_t& n_;
};

template <class T>
struct registered_gradient {
    std::string name;
    std::span<T> data;
    wire_format wire;
    // rounding errors for error feedback: now, and before the step
    std::vector<float> residual, owed_before;
    bool rounded;  // whether this step has rounded the gradient
};

/// How many buckets of a channel may be under way at once. Between processes, one bucket travels
/// over the link while the last answers for another bucket arrive.
inline constexpr std::uint32_t most_buckets_at_once = 2;
template <class Net>
inline constexpr std::uint32_t buckets_at_once = pipelined_transport<Net> ? most_buckets_at_once : 1;

/// The staging memory of a bucket under way, kept from step to step.
template <class T>
class bucket_staging {
    using registered = registered_gradient<T>;

public:
    /// Begins to combine the gradients of `all` that are in `bucket`, without waiting. All ranks
    /// begin and end their buckets in the same order.
    template <bool Sharded, host_transport Net, class Op>
    void begin(Net& net, const Op& op, std::span<registered> all, std::span<const std::uint32_t> bucket) {
        parts_ = Sharded ? net.size() : 1;
        kept_ = Sharded ? part_range{net.rank(), net.rank() + 1} : part_range{};
        list_.clear();
        std::size_t fp16 = 0, bf16 = 0;
        for (const std::uint32_t g : bucket) {
            const registered& one = all[g];
            if (one.wire == wire_format::as_is)
                list_.push_back(one.data);
            else
                (one.wire == wire_format::fp16 ? fp16 : bf16) += slot_of(one.data.size(), parts_) * parts_;
        }
        if constexpr (!list_transport<Net>) packed_.pack(list_, parts_, {0, parts_});
        if constexpr (std::same_as<T, float>) {
            float16s_.resize(fp16);
            bfloat16s_.resize(bf16);
            if (fp16 != 0) round(all, bucket, float16s_, wire_format::fp16);
            if (bf16 != 0) round(all, bucket, bfloat16s_, wire_format::bf16);
        }
        tickets_.clear();
        if constexpr (pipelined_transport<Net>)
            (void)each_array(net, [&](auto array) {
                if constexpr (Sharded)
                    tickets_.push_back(net.start_reduce_scatter(array, op));
                else
                    tickets_.push_back(net.start_all_reduce(array, op));
                return collective_fault{};
            });
    }
    /// Waits until the bucket is combined. Clears `finite` if this rank gets an infinity or a NaN.
    template <bool Sharded, host_transport Net, class Op>
    [[nodiscard]] collective_fault end(Net& net, const Op& op, std::span<registered> all,
                                       std::span<const std::uint32_t> bucket, bool& finite, instant deadline) {
        collective_fault fault;
        if constexpr (list_transport<Net>)
            if (!list_.empty()) fault = combine_list<Sharded>(net, op, finite, deadline);
        if constexpr (pipelined_transport<Net>) {
            for (const std::uint64_t ticket : tickets_)
                if (!fault) fault = net.finish(ticket, deadline);
        } else if (!fault) {
            fault = each_array(net, [&]<class E>(std::span<E> array) {
                const std::span<const E> in(array);
                const std::size_t each = array.size() / parts_;
                if constexpr (Sharded)
                    return net.reduce_scatter(in, array.subspan(kept_.begin * each, each), op, deadline);
                else
                    return net.all_reduce(in, array, op, deadline);
            });
        }
        if (fault) return fault;
        if constexpr (!list_transport<Net>) {
            packed_.unpack(list_, kept_);
            look(finite);
        }
        if constexpr (std::same_as<T, float>) {
            if (!float16s_.empty()) widen(all, bucket, float16s_, wire_format::fp16, finite);
            if (!bfloat16s_.empty()) widen(all, bucket, bfloat16s_, wire_format::bf16, finite);
        }
        return {};
    }
    /// Never frees the memory: after a fault with buffers_in_use, the transport may still touch it.
    void leave_behind() noexcept { never_free(*this); }

private:
    /// Calls `f` with each array that is combined as one array, until a call returns a fault.
    template <class Net, class F>
    [[nodiscard]] collective_fault each_array(const Net&, const F& f) {
        collective_fault fault;
        if constexpr (!list_transport<Net>)
            if (!packed_.data().empty()) fault = f(packed_.data());
        if constexpr (std::same_as<T, float>) {
            if (!fault && !float16s_.empty()) fault = f(std::span(float16s_));
            if (!fault && !bfloat16s_.empty()) fault = f(std::span(bfloat16s_));
        }
        return fault;
    }
    template <bool Sharded, class Net, class Op>
    [[nodiscard]] collective_fault combine_list(Net& net, const Op& op, bool& finite, instant deadline) {
        const std::span<const std::span<T>> list(list_);
        const auto call = [&](auto... looks) {
            if constexpr (Sharded)
                return net.reduce_scatter_list(list, op, deadline, looks...);
            else
                return net.all_reduce_list(list, op, deadline, looks...);
        };
        if constexpr (requires(bool* out) { net.all_reduce_list(list, op, deadline, out); }) {
            bool good = true;
            const auto fault = call(&good);
            finite = finite && good;
            return fault;
        } else {
            const auto fault = call();
            look(finite);
            return fault;
        }
    }
    /// Clears `finite` unless all elements of list_ that this rank has received are finite.
    void look(bool& finite) const noexcept {
        for (const std::span<const T> array : list_) {
            const element_range kept = shard_of(array.size(), kept_.begin, parts_);
            finite = finite && all_finite(array.subspan(kept.begin, kept.size()));
        }
    }
    /// Calls `f(gradient, range, wire)` for each gradient of `format` and each part of `which`.
    /// `range` is the part's shard of the gradient, and `wire` is the shard's place in `memory`.
    template <class Wire, class F>
    void each_of(std::span<registered> all, std::span<const std::uint32_t> bucket, wire_format format,
                 std::vector<Wire>& memory, part_range which, const F& f) const {
        for (std::uint32_t p = which.begin; p < which.end; ++p) {
            std::size_t at = p * (memory.size() / parts_);
            for (const std::uint32_t g : bucket) {
                if (all[g].wire != format) continue;
                const element_range shard = shard_of(all[g].data.size(), p, parts_);
                f(all[g], shard, std::span(memory).subspan(at, shard.size()));
                at += slot_of(all[g].data.size(), parts_);
            }
        }
    }
    template <class Wire>
    void round(std::span<registered> all, std::span<const std::uint32_t> bucket, std::vector<Wire>& memory,
               wire_format format) const {
        each_of(all, bucket, format, memory, {0, parts_}, [](registered& g, element_range some, std::span<Wire> wire) {
            if (!g.rounded) g.owed_before = g.residual;
            g.rounded = true;
            const std::span<float> residual = g.residual;
            to_wire<Wire>(g.data.subspan(some.begin, some.size()), wire,
                          residual.empty() ? residual : residual.subspan(some.begin, some.size()));
        });
    }
    template <class Wire>
    void widen(std::span<registered> all, std::span<const std::uint32_t> bucket, std::vector<Wire>& memory,
               wire_format format, bool& finite) const {
        each_of(all, bucket, format, memory, kept_, [&](registered& g, element_range some, std::span<const Wire> wire) {
            finite = finite && all_finite(wire);  // checks half as many bytes as the floats have
            from_wire<Wire>(wire, g.data.subspan(some.begin, some.size()));
        });
    }

    std::vector<std::span<T>> list_;  // gradients that travel unrounded
    // the gradients of list_ as one array, for a transport without lists
    packed_list<T> packed_;
    std::vector<float16> float16s_;
    std::vector<bfloat16> bfloat16s_;
    std::vector<std::uint64_t> tickets_;
    // the number of parts of each packed array: one, or one for each rank
    std::uint32_t parts_ = 1;
    part_range kept_;  // the parts that this rank gets
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
