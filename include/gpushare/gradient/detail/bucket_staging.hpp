// SPDX-License-Identifier: Apache-2.0
// How one bucket goes over a transport: as a list of arrays where it takes one, else packed; in 16 bits what is asked to.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <string>
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

/// Of a channel: kept from step to step.
template <class T>
class bucket_staging {
    using registered = registered_gradient<T>;

public:
    /// Combines those of `all` that are in `bucket`; `finite` becomes false if one isn't.
    template <host_transport Net, class Op>
    [[nodiscard]] collective_fault combine(Net& net, const Op& op, std::span<registered> all,
                                           std::span<const std::uint32_t> bucket, bool& finite, instant deadline) {
        if (const auto f = as_is(net, op, all, bucket, finite, deadline)) return f;
        if constexpr (std::same_as<T, float>) {
            if (const auto f = halves(net, op, all, bucket, float16s_, wire_format::fp16, finite, deadline)) return f;
            if (const auto f = halves(net, op, all, bucket, bfloat16s_, wire_format::bf16, finite, deadline)) return f;
        }
        return {};
    }

private:
    template <class Net, class Op>
    [[nodiscard]] collective_fault as_is(Net& net, const Op& op, std::span<registered> all,
                                         std::span<const std::uint32_t> bucket, bool& finite, instant deadline) {
        list_.clear();
        std::size_t elements = 0;
        for (const std::uint32_t g : bucket)
            if (all[g].wire == wire_format::as_is) {
                list_.push_back(all[g].data);
                elements += list_.back().size();
            }
        if (list_.empty()) return {};
        const std::span<const std::span<T>> list(list_);
        collective_fault fault;
        if constexpr (list_transport<Net> && requires(bool* out) { net.all_reduce_list(list, op, deadline, out); }) {
            bool good = true;
            fault = net.all_reduce_list(list, op, deadline, &good);
            finite = finite && good;
        } else if constexpr (list_transport<Net>) {
            fault = net.all_reduce_list(list, op, deadline);
            for (const auto& x : list) finite = finite && all_finite(std::span<const T>(x));
        } else {
            const bool alone = list.size() == 1;
            if (!alone) pack(elements);
            const std::span<T> all_of_it = alone ? list.front() : std::span(packed_);
            fault = net.all_reduce(std::span<const T>(all_of_it), all_of_it, op, deadline);
            if (fault) return fault;
            finite = finite && all_finite(std::span<const T>(all_of_it));
            if (!alone) unpack();
        }
        return fault;
    }
    void pack(std::size_t elements) {
        packed_.resize(elements);
        std::size_t at = 0;
        for (const auto& x : list_) at = copy(x, std::span(packed_).subspan(at, x.size()), at);
    }
    void unpack() noexcept {
        std::size_t at = 0;
        for (const auto& x : list_) at = copy(std::span(packed_).subspan(at, x.size()), x, at);
    }
    static std::size_t copy(std::span<const T> from, std::span<T> to, std::size_t at) noexcept {
        std::copy(from.begin(), from.end(), to.begin());
        return at + from.size();
    }
    template <class Net, class Op, class Wire>
    [[nodiscard]] collective_fault halves(Net& net, const Op& op, std::span<registered> all,
                                          std::span<const std::uint32_t> bucket, std::vector<Wire>& memory,
                                          wire_format format, bool& finite, instant deadline) {
        const auto each = [&](const auto& f) {
            std::size_t at = 0;
            for (const std::uint32_t g : bucket)
                if (all[g].wire == format) {
                    f(all[g], at);
                    at += all[g].data.size();
                }
            return at;
        };
        memory.resize(each([](const registered&, std::size_t) {}));
        if (memory.empty()) return {};
        const std::span<Wire> wire(memory);
        each([&](registered& g, std::size_t at) {
            g.owed_before = g.residual;
            g.rounded = true;
            to_wire<Wire>(g.data, wire.subspan(at, g.data.size()), g.residual);
        });
        if (const auto f = net.all_reduce(std::span<const Wire>(wire), wire, op, deadline)) return f;
        each([&](registered& g, std::size_t at) {
            from_wire<Wire>(wire.subspan(at, g.data.size()), g.data);
            finite = finite && all_finite(g.data);
        });
        return {};
    }

    std::vector<std::span<T>> list_;
    std::vector<T> packed_;
    std::vector<float16> float16s_;
    std::vector<bfloat16> bfloat16s_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
