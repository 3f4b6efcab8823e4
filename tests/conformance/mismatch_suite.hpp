// SPDX-License-Identifier: Apache-2.0
// Ranks that make different calls get an error, and all of them the same one, over every transport.
// Doesn't use Catch's assertions, as transport_suite.hpp. A group is unusable after a mismatch, so
// a caller that runs the list makes a new group for each entry.
//
//   conformance::mismatch_buffers memory;  // outlives the transport
//   // by all ranks at once, for each k
//   fault = conformance::mismatches<Net>()[k].call(net, net.rank() == odd, memory, deadline);
//   later = net.barrier(deadline);
//   wrong = conformance::wrong_mismatch<Net>(k, faults, later);                     // of all ranks
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace conformance {

/// Of one rank and one call. A transport may touch them after a fault.
class mismatch_buffers {
public:
    /// n elements of 1 for each rank of a group, and one more.
    template <class T>
    [[nodiscard]] std::span<T> of(std::size_t n) {
        auto& memory = kept_.emplace_back(new std::uint64_t[n * sizeof(T) / sizeof(std::uint64_t) + 1]);
        const std::span<T> all(reinterpret_cast<T*>(memory.get()), n);
        for (T& x : all) x = static_cast<T>(1.0F);
        return all;
    }

private:
    std::vector<std::unique_ptr<std::uint64_t[]>> kept_;
};

struct users_first {
    template <class A>
    constexpr A operator()(const A& a, const A&) const noexcept {
        return a;
    }
};
struct users_last {
    template <class A>
    constexpr A operator()(const A&, const A& b) const noexcept {
        return b;
    }
};

template <class Net>
struct mismatch {
    const char* what;
    gpushare::collective_fault (*call)(Net&, bool odd, mismatch_buffers&, gpushare::instant);
    bool nobody_agrees = false;  ///< then groups inside of processes have already differed, each by itself
};

/// An all-reduce of n elements in place.
template <class T, class Op, class Net>
gpushare::collective_fault reduce_some(Net& net, std::size_t n, mismatch_buffers& memory, gpushare::instant until) {
    const std::span<T> x = memory.of<T>(n);
    return net.all_reduce(std::span<const T>(x), x, Op{}, until);
}
template <class T, class Op, class Net>
gpushare::collective_fault scatter_some(Net& net, std::size_t n, mismatch_buffers& memory, gpushare::instant until) {
    const std::span<T> x = memory.of<T>(n * net.size()), part = memory.of<T>(n);
    return net.reduce_scatter(std::span<const T>(x), part, Op{}, until);
}
template <class T, class Net>
gpushare::collective_fault gather_some(Net& net, std::size_t n, mismatch_buffers& memory, gpushare::instant until) {
    const std::span<T> x = memory.of<T>(n * net.size()), part = memory.of<T>(n);
    return net.all_gather(std::span<const T>(part), x, until);
}
template <class T, class Net>
gpushare::collective_fault send_some(Net& net, std::size_t n, std::uint32_t root, mismatch_buffers& memory,
                                     gpushare::instant until) {
    return net.broadcast(memory.of<T>(n), root, until);
}

/// Operators, types and lengths of all_reduce: small ones, which go in one message, and large ones,
/// which go in many.
template <class Net>
void mismatches_of_all_reduce(std::vector<mismatch<Net>>& all) {
    using namespace gpushare;
    using memory = mismatch_buffers;
    const auto add = [&](const char* what, auto call) { all.push_back({what, call}); };
    add("sum beside maximum", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? reduce_some<float, maximum>(net, 100, m, until) : reduce_some<float, sum>(net, 100, m, until);
    });
    add("sum beside average, large", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? reduce_some<float, average>(net, 70'000, m, until)
                   : reduce_some<float, sum>(net, 70'000, m, until);
    });
    add("minimum beside product, of nothing", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? reduce_some<float, minimum>(net, 0, m, until) : reduce_some<float, product>(net, 0, m, until);
    });
    add("float beside int", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? reduce_some<std::int32_t, sum>(net, 100, m, until) : reduce_some<float, sum>(net, 100, m, until);
    });
    add("signed beside unsigned, large", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? reduce_some<std::uint32_t, sum>(net, 70'000, m, until)
                   : reduce_some<std::int32_t, sum>(net, 70'000, m, until);
    });
    add("float16 beside bfloat16", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? reduce_some<float16, average>(net, 50, m, until)
                   : reduce_some<bfloat16, average>(net, 50, m, until);
    });
    add("twice as many of half the size", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? reduce_some<double, sum>(net, 50, m, until) : reduce_some<float, sum>(net, 100, m, until);
    });
    add("one element more", [](Net& net, bool odd, memory& m, instant until) {
        return reduce_some<float, sum>(net, odd ? 101 : 100, m, until);
    });
    add("some beside none", [](Net& net, bool odd, memory& m, instant until) {
        return reduce_some<float, sum>(net, odd ? 0 : 100, m, until);
    });
    add("more by whole chunks", [](Net& net, bool odd, memory& m, instant until) {
        return reduce_some<float, sum>(net, odd ? 2'097'152 : 1'048'576, m, until);
    });
    if constexpr (requires(Net & net, std::span<float> x, instant until) {
                      net.all_reduce(std::span<const float>(x), x, users_first{}, until);
                  }) {
        add("a user's operator beside another", [](Net& net, bool odd, memory& m, instant until) {
            return odd ? reduce_some<float, users_last>(net, 100, m, until)
                       : reduce_some<float, users_first>(net, 100, m, until);
        });
        add("a user's operator beside sum", [](Net& net, bool odd, memory& m, instant until) {
            return odd ? reduce_some<float, users_last>(net, 100, m, until)
                       : reduce_some<float, sum>(net, 100, m, until);
        });
    }
    if constexpr (pipelined_transport<Net>)
        add("started as a sum beside a maximum", [](Net& net, bool odd, memory& m, instant until) {
            const std::span<float> x = m.of<float>(70'000);
            return net.finish(odd ? net.start_all_reduce(x, maximum{}) : net.start_all_reduce(x, sum{}), until);
        });
}
/// Of the others, and of one beside another.
template <class Net>
void mismatches_of_others(std::vector<mismatch<Net>>& all) {
    using namespace gpushare;
    using memory = mismatch_buffers;
    const auto add = [&](const char* what, auto call) { all.push_back({what, call}); };
    add("other roots", [](Net& net, bool odd, memory& m, instant until) {
        return send_some<float>(net, 100, odd ? 0 : net.size() - 1, m, until);
    });
    add("other roots, large", [](Net& net, bool odd, memory& m, instant until) {
        return send_some<float>(net, 700'000, odd ? net.size() - 1 : 0, m, until);
    });
    add("each its own root", [](Net& net, bool, memory& m, instant until) {
        return send_some<std::uint64_t>(net, 3, net.rank(), m, until);
    });
    all.back().nobody_agrees = true;
    add("a broadcast of ints beside floats", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? send_some<std::int32_t>(net, 9, 0, m, until) : send_some<float>(net, 9, 0, m, until);
    });
    add("a shorter broadcast",
        [](Net& net, bool odd, memory& m, instant until) { return send_some<float>(net, odd ? 8 : 9, 0, m, until); });
    add("reduce_scatter by other operators", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? scatter_some<float, minimum>(net, 100, m, until) : scatter_some<float, sum>(net, 100, m, until);
    });
    add("reduce_scatter of other types", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? scatter_some<std::int32_t, sum>(net, 40'000, m, until)
                   : scatter_some<float, sum>(net, 40'000, m, until);
    });
    add("a longer reduce_scatter", [](Net& net, bool odd, memory& m, instant until) {
        return scatter_some<float, sum>(net, odd ? 101 : 100, m, until);
    });
    add("all_gather of other types", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? gather_some<std::int32_t>(net, 10, m, until) : gather_some<float>(net, 10, m, until);
    });
    add("a longer all_gather, large", [](Net& net, bool odd, memory& m, instant until) {
        return gather_some<float>(net, odd ? 40'001 : 40'000, m, until);
    });
    add("all_reduce beside reduce_scatter", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? scatter_some<float, sum>(net, 100, m, until)
                   : reduce_some<float, sum>(net, std::size_t{100} * net.size(), m, until);
    });
    add("all_reduce beside broadcast", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? send_some<float>(net, 100, 0, m, until) : reduce_some<float, sum>(net, 100, m, until);
    });
    add("a barrier beside an all_gather of nothing", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? net.barrier(until) : gather_some<float>(net, 0, m, until);
    });
}

/// Of unequal parts: `counts` of the odd rank, and what its arrays lack of `room` elements.
template <class Net>
void mismatches_of_unequal(std::vector<mismatch<Net>>& all) {
    using namespace gpushare;
    using memory = mismatch_buffers;
    const auto add = [&](const char* what, auto call) { all.push_back({what, call}); };
    static constexpr auto counts_of = [](Net& net, bool other) {
        std::vector<std::uint64_t> counts(net.size(), 30'000);
        if (other) --counts[0], ++counts[1];  // as many in all
        return counts;
    };
    static constexpr auto gather = [](Net& net, bool other, std::size_t lacking, memory& m, instant until) {
        const auto in = m.of<float>(30'001), out = m.of<float>(30'000 * net.size() - lacking);
        return net.all_gatherv(std::span<const float>(in), out, counts_of(net, other), until);
    };
    static constexpr auto scatter = [](Net& net, bool other, std::size_t lacking, memory& m, instant until) {
        const auto in = m.of<float>(30'000 * net.size() - lacking), out = m.of<float>(30'001);
        return net.reduce_scatterv(std::span<const float>(in), out, counts_of(net, other), sum{}, until);
    };
    add("an all_gatherv of other counts",
        [](Net& net, bool odd, memory& m, instant until) { return gather(net, odd, 0, m, until); });
    add("a reduce_scatterv of other counts",
        [](Net& net, bool odd, memory& m, instant until) { return scatter(net, odd, 0, m, until); });
    add("an all_gatherv into an array that is too short",
        [](Net& net, bool odd, memory& m, instant until) { return gather(net, false, odd ? 1 : 0, m, until); });
    add("a reduce_scatterv of an array that is too short",
        [](Net& net, bool odd, memory& m, instant until) { return scatter(net, false, odd ? 1 : 0, m, until); });
    add("a reduce_scatterv without counts", [](Net& net, bool odd, memory& m, instant until) {
        if (!odd) return scatter(net, false, 0, m, until);
        return net.reduce_scatterv(std::span<const float>(m.of<float>(1)), m.of<float>(1), {}, sum{}, until);
    });
    static constexpr auto swap = [](Net& net, std::uint64_t sent, std::uint64_t expected, memory& m, instant until) {
        std::vector<std::uint64_t> sends(net.size(), 30'000), receives(net.size(), 30'000);
        const std::uint32_t next = (net.rank() + 1) % net.size();
        sends[next] = sent;
        receives[next] = expected;
        const auto in = m.of<float>(30'001 * net.size()), out = m.of<float>(30'001 * net.size());
        return net.all_to_allv(std::span<const float>(in), sends, out, receives, until);
    };
    add("an all_to_allv that sends one less", [](Net& net, bool odd, memory& m, instant until) {
        return swap(net, odd ? 29'999 : 30'000, 30'000, m, until);
    });
    add("an all_to_allv that sends none",
        [](Net& net, bool odd, memory& m, instant until) { return swap(net, odd ? 0 : 30'000, 30'000, m, until); });
    add("an all_to_allv of more than there is", [](Net& net, bool odd, memory& m, instant until) {
        return swap(net, odd ? 1U << 30 : 30'000, 30'000, m, until);
    });
    add("an all_to_allv of other types", [](Net& net, bool odd, memory& m, instant until) {
        if (!odd) return swap(net, 30'000, 30'000, m, until);
        const std::vector<std::uint64_t> counts(net.size(), 30'000);
        const auto in = m.of<std::int32_t>(30'000 * net.size()), out = m.of<std::int32_t>(30'000 * net.size());
        return net.all_to_allv(std::span<const std::int32_t>(in), counts, out, counts, until);
    });
    add("an all_to_allv beside a barrier", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? net.barrier(until) : swap(net, 30'000, 30'000, m, until);
    });
    add("an all_gatherv beside an all_gather", [](Net& net, bool odd, memory& m, instant until) {
        return odd ? gather(net, false, 0, m, until) : gather_some<float>(net, 30'000, m, until);
    });
}

/// What can be called that doesn't match: `odd` for the one rank that calls something else.
template <class Net>
[[nodiscard]] const std::vector<mismatch<Net>>& mismatches() {
    static const auto all = [] {
        std::vector<mismatch<Net>> list;
        mismatches_of_all_reduce(list);
        mismatches_of_others(list);
        if constexpr (gpushare::unequal_transport<Net>) mismatches_of_unequal(list);
        return list;
    }();
    return all;
}

/// What is wrong with the faults of all ranks: all have the same one, in this call. And the group
/// stays closed: `later` are the faults of a barrier behind it.
template <class Net>
[[nodiscard]] std::string wrong_mismatch(std::size_t k, std::span<const gpushare::collective_fault> faults,
                                         std::span<const gpushare::collective_fault> later) {
    const std::string what = mismatches<Net>()[k].what;
    const bool same_name = !mismatches<Net>()[k].nobody_agrees;
    for (std::size_t r = 0; r < faults.size(); ++r) {
        if (faults[r].code != gpushare::errc::mismatch)
            return what + ": rank " + std::to_string(r) + ": " + gpushare::describe(faults[r]).c_str();
        if ((same_name && faults[r].rank != faults[0].rank) || faults[r].rank >= faults.size())
            return what + ": rank " + std::to_string(r) + " names " + std::to_string(faults[r].rank) + ", rank 0 " +
                   std::to_string(faults[0].rank);
        if (!later[r]) return what + ": rank " + std::to_string(r) + " goes on as if nothing had been";
    }
    return {};
}

}  // namespace conformance
