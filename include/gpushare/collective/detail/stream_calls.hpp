// SPDX-License-Identifier: Apache-2.0
// Collectives on streams as values: the input and output arrays of all ranks of a call, and the
// body that each rank runs. submit.hpp makes the values from its arguments; detail/submit.hpp
// launches them.
//
//   broadcast_call<float>{data, n, root}.body(r, plan)
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <gpushare/collective/detail/all_reduce.hpp>
#include <gpushare/collective/detail/collectives.hpp>
#include <gpushare/collective/detail/unequal.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/collective/tuning.hpp>
#include <gpushare/config.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// A collective call of all ranks:
///   fits(ranks)     whether the arguments are valid for this many ranks
///   bytes(ranks)    the size of a rank's larger array, by which the tuning table chooses
///   body(r, plan)   the body that rank r runs
template <class Call>
concept stream_call = requires(const Call& call, std::uint32_t ranks, std::size_t r, const all_reduce_plan& plan) {
    { call.fits(ranks) } -> std::same_as<bool>;
    { call.bytes(ranks) } -> std::same_as<std::size_t>;
    call.body(r, plan);
};

/// The inputs and outputs of the ranks, where all ranks' arrays have one length.
template <class T>
struct equal_arrays {
    std::span<const T* const> ins;
    std::span<T* const> outs;
    std::size_t count;  // elements of a part, if arrays have a part for each rank

    [[nodiscard]] bool fits(std::uint32_t ranks) const noexcept { return ins.size() == ranks && outs.size() == ranks; }
};

template <class T, class Op>
struct all_reduce_call : equal_arrays<T> {
    Op op;
    [[nodiscard]] std::size_t bytes(std::uint32_t) const noexcept { return this->count * sizeof(T); }
    [[nodiscard]] all_reduce_body<T, Op> body(std::size_t r, const all_reduce_plan& plan) const noexcept {
        return {this->ins[r], this->outs[r], this->count, op, plan};
    }
};

template <class T, class Op>
struct reduce_scatter_call : equal_arrays<T> {
    Op op;
    [[nodiscard]] std::size_t bytes(std::uint32_t ranks) const noexcept { return ranks * this->count * sizeof(T); }
    [[nodiscard]] reduce_scatter_body<T, Op> body(std::size_t r, const all_reduce_plan&) const noexcept {
        return {this->ins[r], this->outs[r], this->count, op};
    }
};

template <class T>
struct all_gather_call : equal_arrays<T> {
    [[nodiscard]] std::size_t bytes(std::uint32_t ranks) const noexcept { return ranks * this->count * sizeof(T); }
    [[nodiscard]] all_gather_body<T> body(std::size_t r, const all_reduce_plan&) const noexcept {
        return {this->ins[r], this->outs[r], this->count};
    }
};

template <class T>
struct all_to_all_call : equal_arrays<T> {
    /// All ranks are in place, or none is, because two ranks swap the elements that they have for
    /// each other.
    [[nodiscard]] bool fits(std::uint32_t ranks) const noexcept {
        if (!equal_arrays<T>::fits(ranks)) return false;
        std::uint32_t in_place = 0;
        for (std::uint32_t r = 0; r < ranks; ++r) in_place += this->ins[r] == this->outs[r] ? 1 : 0;
        return in_place == 0 || in_place == ranks || this->count == 0;
    }
    [[nodiscard]] std::size_t bytes(std::uint32_t ranks) const noexcept { return ranks * this->count * sizeof(T); }
    [[nodiscard]] all_to_all_body<T> body(std::size_t r, const all_reduce_plan&) const noexcept {
        return {this->ins[r], this->outs[r], this->count};
    }
};

template <class T>
struct broadcast_call {
    std::span<T* const> data;
    std::size_t count;
    std::uint32_t root;
    [[nodiscard]] bool fits(std::uint32_t ranks) const noexcept { return data.size() == ranks && root < ranks; }
    [[nodiscard]] std::size_t bytes(std::uint32_t) const noexcept { return count * sizeof(T); }
    [[nodiscard]] broadcast_body<T> body(std::size_t r, const all_reduce_plan&) const noexcept {
        return {data[r], count, root};
    }
};

template <class T, class Op>
struct reduce_call : equal_arrays<T> {
    Op op;
    std::uint32_t root;
    [[nodiscard]] bool fits(std::uint32_t ranks) const noexcept { return equal_arrays<T>::fits(ranks) && root < ranks; }
    [[nodiscard]] std::size_t bytes(std::uint32_t) const noexcept { return this->count * sizeof(T); }
    [[nodiscard]] reduce_body<T, Op> body(std::size_t r, const all_reduce_plan&) const noexcept {
        return {this->ins[r], this->outs[r], this->count, op, root};
    }
};

/// The inputs and outputs of the ranks, where parts differ in length, with an array of counts for
/// each rank.
template <class T>
struct unequal_arrays {
    std::span<const std::span<const T>> ins;
    std::span<const std::span<T>> outs;
    std::span<const std::uint64_t* const> counts;

    [[nodiscard]] bool fits(std::uint32_t ranks) const noexcept {
        return ins.size() == ranks && outs.size() == ranks && counts.size() == ranks &&
               std::ranges::find(counts, nullptr) == counts.end();
    }
    [[nodiscard]] std::size_t bytes(std::uint32_t) const noexcept {
        std::size_t most = 0;
        for (const auto& x : ins) most = std::max(most, x.size_bytes());
        for (const auto& x : outs) most = std::max(most, x.size_bytes());
        return most;
    }
};

template <class T>
struct all_gatherv_call : unequal_arrays<T> {
    [[nodiscard]] all_gatherv_body<T> body(std::size_t r, const all_reduce_plan&) const noexcept {
        const auto in = this->ins[r];
        const auto out = this->outs[r];
        return {in.data(), in.size(), out.data(), out.size(), this->counts[r]};
    }
};

template <class T, class Op>
struct reduce_scatterv_call : unequal_arrays<T> {
    Op op;
    [[nodiscard]] reduce_scatterv_body<T, Op> body(std::size_t r, const all_reduce_plan&) const noexcept {
        const auto in = this->ins[r];
        const auto out = this->outs[r];
        return {in.data(), in.size(), out.data(), out.size(), this->counts[r], op};
    }
};

/// `counts` are the numbers of elements that ranks send.
template <class T>
struct all_to_allv_call : unequal_arrays<T> {
    std::span<const std::uint64_t* const> receives;
    [[nodiscard]] bool fits(std::uint32_t ranks) const noexcept {
        return unequal_arrays<T>::fits(ranks) && receives.size() == ranks &&
               std::ranges::find(receives, nullptr) == receives.end();
    }
    [[nodiscard]] all_to_allv_body<T> body(std::size_t r, const all_reduce_plan&) const noexcept {
        const auto in = this->ins[r];
        const auto out = this->outs[r];
        return {in.data(), in.size(), out.data(), out.size(), this->counts[r], receives[r]};
    }
};

static_assert(stream_call<all_reduce_call<float, sum>> && stream_call<reduce_scatter_call<float, sum>> &&
              stream_call<all_gather_call<float>> && stream_call<all_to_all_call<float>> &&
              stream_call<broadcast_call<float>> && stream_call<reduce_call<float, sum>> &&
              stream_call<all_gatherv_call<float>> && stream_call<reduce_scatterv_call<float, sum>> &&
              stream_call<all_to_allv_call<float>>);

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare
