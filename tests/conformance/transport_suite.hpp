// SPDX-License-Identifier: Apache-2.0
// The contract of every transport. Doesn't use Catch's assertions, since ranks are threads or
// processes: each rank calls the suite, and gets a sentence about the first failure, or an empty
// one.
//
//   std::string wrong = conformance::check_transport(net);            // by all ranks at once
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace conformance {

/// What rank r has at place i: small whole numbers and halves, whose sums are exact in any order.
inline float exact_value(std::uint32_t rank, std::size_t i) {
    return static_cast<float>((i * 7 + rank * 13) % 61) * 0.5F - 8.0F;
}
/// Numbers whose sums depend on the order.
inline float odd_value(std::uint32_t rank, std::size_t i) {
    return 1.0F / static_cast<float>(1 + (i * 31 + rank * 17) % 997) * (i % 5 == rank % 5 ? 1e4F : 1.0F);
}

template <class T>
T cast_to(float x) {
    return static_cast<T>(x);
}

/// An all-reduce of T that is exact, in place and out of place.
template <class T, gpushare::transport Net>
std::string check_sum(Net& net, std::size_t n, gpushare::instant deadline) {
    std::vector<T> in(n), out(n);
    for (std::size_t i = 0; i < n; ++i) in[i] = cast_to<T>(exact_value(net.rank(), i) + 8.0F);
    if (const auto f = net.all_reduce(std::span<const T>(in), std::span(out), gpushare::sum{}, deadline))
        return gpushare::describe(f).c_str();
    for (std::size_t i = 0; i < n; ++i) {
        float all = 0;
        for (std::uint32_t r = 0; r < net.size(); ++r) all += static_cast<float>(cast_to<T>(exact_value(r, i) + 8.0F));
        if (static_cast<float>(out[i]) != static_cast<float>(cast_to<T>(all)))
            return "sum of " + std::to_string(n) + ": element " + std::to_string(i);
    }
    if (const auto f = net.all_reduce(std::span<const T>(in), std::span(in), gpushare::sum{}, deadline))
        return gpushare::describe(f).c_str();
    if (n != 0 && std::memcmp(in.data(), out.data(), n * sizeof(T)) != 0) return "in place " + std::to_string(n);
    return {};
}

template <gpushare::transport Net>
std::string check_others(Net& net, std::size_t n, gpushare::instant deadline) {
    const std::uint32_t ranks = net.size();
    std::vector<float> in(n * ranks), part(n), all(n * ranks);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = exact_value(net.rank(), i);
    if (const auto f = net.reduce_scatter(std::span<const float>(in), std::span(part), gpushare::average{}, deadline))
        return gpushare::describe(f).c_str();
    for (std::size_t i = 0; i < n; ++i) {
        float sum = 0;
        for (std::uint32_t r = 0; r < ranks; ++r) sum += exact_value(r, n * net.rank() + i);
        if (part[i] != sum / static_cast<float>(ranks)) return "reduce_scatter: element " + std::to_string(i);
    }
    // In place: a part of the input is the output, and the other way round.
    std::vector<float> same = in;
    const std::span<float> own = std::span(same).subspan(n * net.rank(), n);
    if (const auto f = net.reduce_scatter(std::span<const float>(same), own, gpushare::average{}, deadline))
        return gpushare::describe(f).c_str();
    for (std::size_t i = 0; i < same.size(); ++i)
        if (same[i] != (i / n == net.rank() ? part[i % n] : in[i])) return "in place: element " + std::to_string(i);
    if (const auto f = net.all_gather(std::span<const float>(own), std::span(same), deadline))
        return gpushare::describe(f).c_str();
    if (const auto f = net.all_reduce(std::span<const float>(in), std::span(all), gpushare::average{}, deadline))
        return gpushare::describe(f).c_str();
    if (n != 0 && std::memcmp(same.data(), all.data(), all.size() * sizeof(float)) != 0)
        return "an all_gather in place behind a reduce_scatter isn't the all-reduce";
    if (const auto f = net.all_gather(std::span<const float>(in).first(n), std::span(all), deadline))
        return gpushare::describe(f).c_str();
    for (std::size_t i = 0; i < all.size(); ++i)
        if (all[i] != exact_value(static_cast<std::uint32_t>(i / n), i % n))
            return "all_gather: element " + std::to_string(i);
    for (std::uint32_t root = 0; root < ranks; ++root) {
        std::vector<std::uint64_t> words(n, net.rank());
        if (const auto f = net.broadcast(std::span(words), root, deadline)) return gpushare::describe(f).c_str();
        for (const auto w : words)
            if (w != root) return "broadcast from " + std::to_string(root);
    }
    return {};
}

/// Parts of several lengths, of which some are empty; in slices of messages, and in place.
template <gpushare::transport Net>
std::string check_unequal(Net& net, std::size_t n, gpushare::instant deadline) {
    if constexpr (gpushare::unequal_transport<Net>) {
        std::vector<std::uint64_t> counts(net.size());
        for (std::uint32_t r = 0; r < net.size(); ++r) counts[r] = r % 3 == 1 ? 0 : n / (r + 1) + r;
        const auto before = [&](std::uint32_t rank) {
            std::size_t sum = 0;
            for (std::uint32_t r = 0; r < rank; ++r) sum += counts[r];
            return sum;
        };
        const std::size_t total = before(net.size()), first = before(net.rank()), mine = counts[net.rank()];
        std::vector<float> in(total), part(mine), all(total, -1.0F);
        for (std::size_t i = 0; i < total; ++i) in[i] = exact_value(net.rank(), i);
        if (const auto f =
                net.reduce_scatterv(std::span<const float>(in), std::span(part), counts, gpushare::sum{}, deadline))
            return gpushare::describe(f).c_str();
        for (std::size_t i = 0; i < mine; ++i) {
            float sum = 0;
            for (std::uint32_t r = 0; r < net.size(); ++r) sum += exact_value(r, first + i);
            if (part[i] != sum) return "reduce_scatterv: element " + std::to_string(i);
        }
        if (const auto f = net.all_gatherv(std::span<const float>(part), std::span(all), counts, deadline))
            return gpushare::describe(f).c_str();
        const std::span<float> own = std::span(in).subspan(first, mine);
        if (const auto f = net.reduce_scatterv(std::span<const float>(in), own, counts, gpushare::sum{}, deadline))
            return gpushare::describe(f).c_str();
        if (const auto f = net.all_gatherv(std::span<const float>(own), std::span(in), counts, deadline))
            return gpushare::describe(f).c_str();
        for (std::size_t i = 0; i < total; ++i) {
            float sum = 0;
            for (std::uint32_t r = 0; r < net.size(); ++r) sum += exact_value(r, i);
            if (all[i] != sum) return "all_gatherv: element " + std::to_string(i);
            if (in[i] != sum) return "unequal parts in place: element " + std::to_string(i);
        }
    }
    return {};
}

/// What rank r has for rank q: of several lengths, some of which are 0, in slices of messages.
template <gpushare::transport Net>
std::string check_pairs(Net& net, std::size_t n, gpushare::instant deadline) {
    if constexpr (gpushare::unequal_transport<Net>) {
        const auto length = [&](std::uint32_t r, std::uint32_t q) -> std::uint64_t {
            return (r + 2 * q) % 4 == 1 ? 0 : n / (r + 1) + 3 * q;
        };
        const std::uint32_t me = net.rank();
        std::vector<std::uint64_t> sends, receives;
        std::vector<float> in, expected;
        for (std::uint32_t q = 0; q < net.size(); ++q) {
            sends.push_back(length(me, q));
            receives.push_back(length(q, me));
            for (std::size_t i = 0; i < sends[q]; ++i) in.push_back(exact_value(me + 10 * q, i));
            for (std::size_t i = 0; i < receives[q]; ++i) expected.push_back(exact_value(q + 10 * me, i));
        }
        std::vector<float> out(expected.size() + 1, -1.0F);
        expected.push_back(-1.0F);
        const auto f = net.all_to_allv(std::span<const float>(in), sends, std::span(out), receives, deadline);
        if (f) return gpushare::describe(f).c_str();
        if (out != expected) return "all_to_allv: a wrong element";
        std::fill(sends.begin(), sends.end(), 0);
        const auto none = net.all_to_allv(std::span<const float>(in), sends, std::span(out), sends, deadline);
        if (none || out != expected) return "all_to_allv of nothing";
    }
    return {};
}

/// Whether all ranks have the bits of rank 0, and, where the transport promises it, those of a sum
/// in the order of ranks.
template <gpushare::transport Net>
std::string check_bits(Net& net, std::size_t n, gpushare::instant deadline) {
    std::vector<float> x(n);
    for (std::size_t i = 0; i < n; ++i) x[i] = odd_value(net.rank(), i);
    if (const auto f = net.all_reduce(std::span<const float>(x), std::span(x), gpushare::average{}, deadline))
        return gpushare::describe(f).c_str();
    std::vector<float> first = x;
    if (const auto f = net.broadcast(std::span(first), 0, deadline)) return gpushare::describe(f).c_str();
    if (n != 0 && std::memcmp(first.data(), x.data(), n * sizeof(float)) != 0) return "ranks have different bits";
    if (Net::rank_ordered)
        for (std::size_t i = 0; i < n; ++i) {
            float sum = odd_value(0, i);
            for (std::uint32_t r = 1; r < net.size(); ++r) sum += odd_value(r, i);
            if (x[i] != sum / static_cast<float>(net.size())) return "not in the order of ranks: " + std::to_string(i);
        }
    return {};
}

template <gpushare::transport Net>
std::string check_pipeline(Net& net, gpushare::instant deadline) {
    if constexpr (gpushare::pipelined_transport<Net>) {
        std::vector<std::vector<float>> some(6);
        std::vector<std::uint64_t> tickets;
        for (std::size_t k = 0; k < some.size(); ++k) {
            some[k].assign(1000 * k + 1, static_cast<float>(k + net.rank()));
            tickets.push_back(net.start_all_reduce(std::span(some[k]), gpushare::sum{}));
            net.advance();
        }
        for (const std::size_t k : {3U, 0U, 1U, 2U, 5U, 4U}) {
            if (const auto f = net.finish(tickets[k], deadline)) return gpushare::describe(f).c_str();
            float sum = 0;
            for (std::uint32_t r = 0; r < net.size(); ++r) sum += static_cast<float>(k + r);
            for (const float x : some[k])
                if (x != sum) return "several at once: " + std::to_string(k);
        }
        std::vector<float> one(std::size_t{3000} * net.size(), 1.0F), other(std::size_t{5000} * net.size(), 2.0F);
        const auto first = net.start_reduce_scatter(std::span(one), gpushare::sum{});
        std::fill_n(other.begin() + std::size_t{5000} * net.rank(), 5000, static_cast<float>(net.rank()));
        const auto second = net.start_all_gather(std::span(other));
        if (const auto f = net.finish(second, deadline)) return gpushare::describe(f).c_str();
        if (const auto f = net.finish(first, deadline)) return gpushare::describe(f).c_str();
        for (std::size_t i = 0; i < one.size(); ++i)
            if (one[i] != (i / 3000 == net.rank() ? static_cast<float>(net.size()) : 1.0F)) return "a started scatter";
        for (std::size_t i = 0; i < other.size(); ++i)
            if (other[i] != static_cast<float>(i / 5000)) return "a started gather";
    }
    return {};
}

/// All that a transport promises while nothing goes wrong.
template <gpushare::transport Net>
std::string check_transport(Net& net) {
    const gpushare::instant deadline = std::chrono::steady_clock::now() + std::chrono::seconds(300);
    if (net.rank() >= net.size()) return "its rank isn't one";
    for (const std::size_t n : {0U, 1U, 2U, 17U, 1000U, 70'001U}) {
        if (auto wrong = check_sum<float>(net, n, deadline); !wrong.empty()) return wrong;
        if (auto wrong = check_sum<gpushare::bfloat16>(net, n, deadline); !wrong.empty()) return "bfloat16: " + wrong;
        if (auto wrong = check_sum<std::int64_t>(net, n, deadline); !wrong.empty()) return "int64: " + wrong;
        if (n != 0)
            if (auto wrong = check_others(net, n, deadline); !wrong.empty()) return wrong;
        if (auto wrong = check_unequal(net, n, deadline); !wrong.empty()) return wrong;
        if (auto wrong = check_pairs(net, n, deadline); !wrong.empty()) return wrong;
        if (auto wrong = check_bits(net, n, deadline); !wrong.empty()) return wrong;
    }
    if (auto wrong = check_pipeline(net, deadline); !wrong.empty()) return wrong;
    if (net.barrier(deadline)) return "barrier";
    const auto before = net.carried();
    std::vector<float> x(100);
    if (net.all_reduce(std::span<const float>(x), std::span(x), gpushare::sum{}, deadline)) return "a last one";
    if (net.carried() != before + gpushare::bytes{400}) return "carried() isn't what went in";
    if (net.all_reduce(std::span<const float>(x).first(3), std::span(x), gpushare::sum{}, deadline).code !=
        gpushare::errc::mismatch)
        return "spans of different sizes aren't refused";
    return {};
}

}  // namespace conformance
