// SPDX-License-Identifier: Apache-2.0
// The results of arrays by Horovod's names over every transport, and on devices, for each operator,
// with ranks that join. Doesn't use Catch's assertions, as transport_suite.hpp.
//
//   std::string wrong = conformance::check_named(net);                // by all ranks at once
//   wrong = conformance::check_named(set, how);                       // `how` hands arrays over
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gpushare/error.hpp>
#include <gpushare/gradient/horovod.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/numbers.hpp>

namespace conformance {

/// Whole numbers of either sign, never 0: what a zero of somebody's would change. Few bits, so that
/// all results are exact.
inline float named_value(std::uint32_t rank, std::size_t i) {
    const auto size = static_cast<float>(1 + (i * 5 + rank * 3) % 4);
    return (i / 8 + (i % 3 == 0 ? rank : 0U)) % 2 == 0 ? size : -size;
}

/// Of the ranks from `first` on.
template <class T>
T combined_value(gpushare::horovod::reduce_op op, std::uint32_t first, std::uint32_t ranks, std::size_t i) {
    using gpushare::horovod::reduce_op;
    double all = named_value(first, i);
    for (std::uint32_t r = first + 1; r < ranks; ++r) {
        const double x = named_value(r, i);
        if (op == reduce_op::minimum)
            all = std::min(all, x);
        else if (op == reduce_op::maximum)
            all = std::max(all, x);
        else
            all = op == reduce_op::product ? all * x : all + x;
    }
    if (op == reduce_op::average) all /= ranks - first;
    if constexpr (std::same_as<T, double> || std::integral<T>)
        return static_cast<T>(all);
    else
        return static_cast<T>(static_cast<float>(all));
}

/// Arrays of the host, which hold the results once synchronize has returned.
struct named_on_host {
    template <class T>
    [[nodiscard]] gpushare::horovod::handle all_reduce(std::span<T> x, std::string_view name,
                                                       gpushare::horovod::reduce_op op,
                                                       gpushare::horovod::process_set& of) const {
        return gpushare::horovod::allreduce_async(x, name, op, of);
    }
    template <class T>
    [[nodiscard]] gpushare::horovod::handle broadcast(std::span<T> x, std::uint32_t root, std::string_view name,
                                                      gpushare::horovod::process_set& of) const {
        return gpushare::horovod::broadcast_async(x, root, name, of);
    }
    void synchronize(std::span<const gpushare::horovod::handle> all) const { gpushare::horovod::synchronize(all); }
};

/// Ranks before `joined` have joined; this one hasn't.
template <class T, class How>
std::string check_operators(gpushare::horovod::process_set& of, std::uint32_t joined, const How& how) {
    namespace hvd = gpushare::horovod;
    constexpr hvd::reduce_op all[] = {hvd::Average, hvd::Sum, hvd::Min, hvd::Max, hvd::Product};
    std::vector<std::vector<T>> x;  // of each operator, a large and a small one
    std::vector<hvd::handle> handles;
    for (const std::size_t n : {300U, 7U})
        for (std::size_t k = 0; k < 5; ++k) {
            auto& one = x.emplace_back(n);
            for (std::size_t i = 0; i < n; ++i) one[i] = static_cast<T>(named_value(of.rank(), i + k % 5));
        }
    for (std::size_t k = 0; k < x.size(); ++k) {
        if (std::integral<T> && all[k % 5] == hvd::Average) continue;
        const auto name = "x" + std::to_string(sizeof(T)) + "." + std::to_string(k);
        handles.push_back(how.all_reduce(std::span(x[k]), name, all[k % 5], of));
    }
    how.synchronize(handles);
    for (std::size_t k = 0; k < x.size(); ++k) {
        if (std::integral<T> && all[k % 5] == hvd::Average) continue;
        for (std::size_t i = 0; i < x[k].size(); ++i) {
            const T right = combined_value<T>(all[k % 5], joined, of.size(), i + k % 5);
            bool wrong = std::memcmp(&x[k][i], &right, sizeof(T)) != 0;
            if constexpr (sizeof(T) == 2)  // two levels average averages
                if (all[k % 5] == hvd::Average)
                    wrong = std::abs(static_cast<float>(x[k][i]) - static_cast<float>(right)) > 1.0F / 32;
            if (wrong)
                return "operator " + std::to_string(k % 5) + " beside " + std::to_string(joined) +
                       " that have joined: element " + std::to_string(i);
        }
    }
    return {};
}

/// The average of the largest halves is the largest half, or on two levels a rounding below that,
/// whatever their sum is. Some ranks may have joined.
template <class How>
std::string check_largest(gpushare::horovod::process_set& of, const How& how) {
    using half = gpushare::float16;
    std::vector<std::vector<half>> x;
    std::vector<gpushare::horovod::handle> handles;
    for (const std::size_t n : {300U, 7U}) x.emplace_back(n, half::max());
    for (auto& one : x)
        handles.push_back(
            how.all_reduce(std::span(one), "largest" + std::to_string(handles.size()), gpushare::horovod::Average, of));
    how.synchronize(handles);
    for (const auto& one : x)
        for (const half y : one)
            if (y.bits() > half::max().bits() || y.bits() + 2 < half::max().bits()) return "another number";
    return {};
}

/// Rank r has r + 1 batches, of which each has arrays of every type for every operator; then a rank
/// that has joined can't send. Between two epochs all ranks join.
template <class How>
std::string check_named(gpushare::horovod::process_set& of, const How& how) {
    namespace hvd = gpushare::horovod;
    std::string wrong;
    const auto note = [&](const char* what, const std::string& w) {
        if (wrong.empty() && !w.empty()) wrong = std::string(what) + ": " + w;
    };
    for (int epoch = 0; epoch < 2; ++epoch) {
        for (std::uint32_t b = 0; b <= of.rank(); ++b) {
            note("float", check_operators<float>(of, b, how));
            note("double", check_operators<double>(of, b, how));
            note("float16", check_operators<gpushare::float16>(of, b, how));
            note("bfloat16", check_operators<gpushare::bfloat16>(of, b, how));
            note("int64", check_operators<std::int64_t>(of, b, how));
            note("the largest halves", check_largest(of, how));
            std::vector<float> nan{of.rank() + 1 == of.size() ? std::numeric_limits<float>::quiet_NaN() : 1.0F};
            for (const auto op : {hvd::Min, hvd::Max}) {
                auto x = nan;
                how.synchronize(std::vector{how.all_reduce(std::span(x), "nan", op, of)});
                note("NaN", std::isnan(x[0]) ? "" : "lost");
            }
            if (b == 0) continue;
            gpushare::errc code = gpushare::errc::none;
            try {
                how.synchronize(std::vector{how.broadcast(std::span(nan), b - 1, "sent", of)});
            } catch (const gpushare::operation_error& e) {
                code = e.code();
            }
            note("a broadcast from a rank that has joined", code == gpushare::errc::not_supported ? "" : "goes on");
        }
        note("join", hvd::join(of) + 1 == of.size() ? "" : "another rank was last");
    }
    return wrong;
}
template <gpushare::host_transport Net>
std::string check_named(Net& net) {
    gpushare::horovod::process_set of(net);
    return check_named(of, named_on_host{});
}

}  // namespace conformance
