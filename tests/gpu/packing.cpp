// SPDX-License-Identifier: Apache-2.0
#include "gpu/packing.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/collective/quantised_all_reduce.hpp>
#include <gpushare/gradient/wire.hpp>

#include "gpu/job_rig.hpp"
#include "standins/cuda/standin.hpp"
#include "standins/ptx/runtime.hpp"

namespace jobs {

namespace gs = gpushare;

namespace {

/// Arrays in one piece of a device's memory, with room between them.
struct arrays {
    arrays(std::vector<std::size_t> sizes_, std::span<const std::size_t> room) : sizes(std::move(sizes_)) {
        for (std::size_t k = 0; k < sizes.size(); ++k) {
            at.push_back(all);
            all += sizes[k] + room[k];
            elements += sizes[k];
        }
        floats = static_cast<float*>(memory().allocate((all + 1) * sizeof(float), 256));
        flat = memory().allocate((elements + 1) * sizeof(float), 256);
    }
    arrays(const arrays&) = delete;
    arrays& operator=(const arrays&) = delete;
    ~arrays() {
        (void)memory().deallocate(floats, (all + 1) * sizeof(float), 256);
        (void)memory().deallocate(flat, (elements + 1) * sizeof(float), 256);
    }
    [[nodiscard]] gs::cuda::node::memory_type& memory() { return node.memory({0}); }
    [[nodiscard]] std::vector<std::pair<float*, std::size_t>> pieces() const {
        std::vector<std::pair<float*, std::size_t>> some;
        for (std::size_t k = 0; k < sizes.size(); ++k) some.emplace_back(floats + at[k], sizes[k]);
        return some;
    }
    void copy(void* to, const void* from, std::size_t n) {
        stream.copy(to, from, n);
        (void)stream.record().wait(gs::never);
    }

    gs::cuda::node node;
    gs::cuda::stream stream = node.make_stream({0}, gs::priority{});
    std::vector<std::size_t> sizes, at{};
    std::size_t all = 0, elements = 0;
    float* floats = nullptr;
    void* flat = nullptr;
};

/// There and back: what lies in the flat array, and what is in the arrays once that was doubled.
template <class Wire>
std::string there_and_back(arrays& a, const std::vector<float>& x) {
    a.copy(a.floats, x.data(), a.all * sizeof(float));
    auto* const flat = static_cast<Wire*>(a.flat);
    const auto pieces = a.pieces();
    pack_on_device(a.stream, pieces, flat, false);
    std::vector<Wire> packed(a.elements), expected;
    a.copy(packed.data(), flat, a.elements * sizeof(Wire));
    for (std::size_t k = 0; k < a.sizes.size(); ++k)
        for (std::size_t i = 0; i < a.sizes[k]; ++i) expected.push_back(static_cast<Wire>(x[a.at[k] + i]));
    std::string wrong;
    const auto same = [](const auto& left, const auto& right) {
        return left.empty() || std::memcmp(left.data(), right.data(), left.size() * sizeof left[0]) == 0;
    };
    if (!same(packed, expected)) wrong += "packed wrong\n";
    for (Wire& w : packed) w = static_cast<Wire>(2 * static_cast<float>(w));
    a.copy(flat, packed.data(), a.elements * sizeof(Wire));
    pack_on_device(a.stream, pieces, flat, true);
    std::vector<float> back(a.all), all = x;
    a.copy(back.data(), a.floats, a.all * sizeof(float));
    for (std::size_t k = 0, n = 0; k < a.sizes.size(); ++k)
        for (std::size_t i = 0; i < a.sizes[k]; ++i) all[a.at[k] + i] = static_cast<float>(packed[n++]);
    if (!same(back, all)) wrong += "unpacked wrong\n";
    return wrong;
}

template <class Wire>
double ratio_of(arrays& a) {
    const std::vector<float> x(a.all, 1.0F);
    a.copy(a.floats, x.data(), a.all * sizeof(float));
    const auto before = ptx::runtime::total().work;
    pack_on_device(a.stream, a.pieces(), static_cast<Wire*>(a.flat), false);
    pack_on_device(a.stream, a.pieces(), static_cast<Wire*>(a.flat), true);
    (void)a.stream.record().wait(gs::never);
    const auto after = ptx::runtime::total().work;
    const auto moved = after.loaded + after.stored - before.loaded - before.stored;
    return static_cast<double>(moved) / static_cast<double>(2 * a.elements * (sizeof(float) + sizeof(Wire)));
}

template <class T>
bool same_bits(const std::vector<T>& left, const std::vector<T>& right) {
    return left.empty() || std::memcmp(left.data(), right.data(), left.size() * sizeof left[0]) == 0;
}

/// Two steps of error feedback, from one half of the debts to the other and back.
std::string feedback_trouble(arrays& a, std::mt19937_64& any) {
    std::vector<float> x(a.all), owed(2 * a.elements);
    std::vector<std::vector<float>> by_host;
    for (const std::size_t n : a.sizes) by_host.emplace_back(n);
    auto* const debts = static_cast<float*>(a.memory().allocate((owed.size() + 1) * sizeof(float), 256));
    a.copy(debts, owed.data(), owed.size() * sizeof(float));
    std::string wrong;
    for (const bool back : {false, true}) {
        for (float& one : x) one = (static_cast<float>(any() % 20'001) - 10'000) / 997;
        if (back && a.sizes[0] != 0) x[a.at[0]] = HUGE_VALF;
        a.copy(a.floats, x.data(), a.all * sizeof(float));
        std::vector<gs::detail::packing_owing<gs::bfloat16>::piece> pieces;
        std::vector<gs::bfloat16> expected, packed(a.elements);
        std::vector<float> left;
        for (std::size_t k = 0, n = 0; k < a.sizes.size(); n += a.sizes[k++]) {
            pieces.push_back({a.floats + a.at[k], debts + (back ? a.elements : 0) + n, a.sizes[k]});
            std::vector<gs::bfloat16> wire(a.sizes[k]);
            gs::to_wire(std::span<const float>(x).subspan(a.at[k], a.sizes[k]), std::span(wire), std::span(by_host[k]));
            expected.insert(expected.end(), wire.begin(), wire.end());
            left.insert(left.end(), by_host[k].begin(), by_host[k].end());
        }
        const auto half = static_cast<std::ptrdiff_t>(a.elements);
        pack_owing_on_device(a.stream, pieces, static_cast<gs::bfloat16*>(a.flat), back ? -half : half);
        a.copy(packed.data(), a.flat, packed.size() * sizeof(gs::bfloat16));
        a.copy(owed.data(), debts, owed.size() * sizeof(float));
        if (!same_bits(packed, expected)) wrong += "packed wrong with error feedback\n";
        const auto now = owed.begin() + (back ? 0 : half);
        if (!same_bits(std::vector<float>(now, now + half), left)) wrong += "other debts\n";
    }
    (void)a.memory().deallocate(debts, (owed.size() + 1) * sizeof(float), 256);
    return wrong;
}

/// Error feedback of fp8 blocks, whose last one ends where the flat array ends.
std::string coded_feedback_trouble(arrays& a, std::mt19937_64& any, std::uint32_t block) {
    std::vector<float> x(a.all), owed(a.elements), sums(a.elements), left(a.elements);
    for (float& one : x) one = std::ldexp(static_cast<float>(any() % 20'001) - 10'000, -static_cast<int>(any() % 30));
    for (float& one : owed) one = (static_cast<float>(any() % 2001) - 1000) / 9973;
    if (any() % 4 == 0 && a.elements != 0) x[any() % a.elements] = HUGE_VALF;
    const std::size_t size = (a.elements + 1) * sizeof(float);
    auto* const debts = static_cast<float*>(a.memory().allocate(2 * size, 256));
    float* const rest = debts + a.elements;
    a.copy(a.floats, x.data(), a.all * sizeof(float));
    a.copy(debts, owed.data(), a.elements * sizeof(float));
    feed_back_fp8_on_device(a.stream, block, a.floats, static_cast<float*>(a.flat), debts, rest, a.elements);
    a.copy(sums.data(), a.flat, a.elements * sizeof(float));
    a.copy(left.data(), rest, a.elements * sizeof(float));
    (void)a.memory().deallocate(debts, 2 * size, 256);
    std::vector<float> by_host(a.elements);
    const std::span<const float> from = std::span<const float>(x).first(a.elements);
    if (block == 32)
        gs::feed_back_quantised<32>(from, by_host, owed);
    else
        gs::feed_back_quantised<128>(from, by_host, owed);
    std::string wrong;
    if (!same_bits(sums, by_host)) wrong += "other sums for fp8 blocks\n";
    if (!same_bits(left, owed)) wrong += "other debts of fp8 blocks\n";
    return wrong;
}

/// Two ranks choose some of the flat array's elements.
std::string chosen_trouble(arrays& a, std::mt19937_64& any, bool finite) {
    constexpr std::size_t ranks = 2;
    const std::size_t k = a.elements / 3;
    std::vector<float> expected(a.elements);
    std::vector<std::uint32_t> places;
    std::vector<float> values;
    for (std::size_t r = 0; r < ranks; ++r)
        for (std::size_t j = 0; j < k; ++j) {
            places.push_back(static_cast<std::uint32_t>(3 * j + any() % 3));
            values.push_back(static_cast<float>(any() % 1000) / 7);
            if (!finite && j % 7 == 0) values.back() = -HUGE_VALF;  // several threads find one
            expected[places.back()] += values.back();
        }
    for (float& x : expected) x /= static_cast<float>(ranks);
    const std::size_t size = places.size() * sizeof(float);
    auto* const memory = static_cast<std::byte*>(a.memory().allocate(2 * size + 256, 256));
    std::uint32_t flag = 0;
    a.copy(memory, &flag, sizeof flag);
    a.copy(memory + 256, places.data(), size);
    a.copy(memory + 256 + size, values.data(), size);
    std::vector<chosen> all;
    for (std::size_t r = 0; r < ranks; ++r)
        all.push_back({reinterpret_cast<std::uint32_t*>(memory + 256) + r * k,
                       reinterpret_cast<float*>(memory + 256 + size) + r * k, k});
    add_chosen_on_device(a.stream, static_cast<float*>(a.flat), a.elements, all,
                         reinterpret_cast<std::uint32_t*>(memory));
    std::vector<float> got(a.elements);
    a.copy(got.data(), a.flat, got.size() * sizeof(float));
    a.copy(&flag, memory, sizeof flag);
    (void)a.memory().deallocate(memory, 2 * size + 256, 256);
    std::string wrong;
    if (!same_bits(got, expected)) wrong += "other means of what was chosen\n";
    if (flag != (finite || k == 0 ? 0U : 1U)) wrong += "the look for infinities is wrong\n";
    return wrong;
}

/// The flat array becomes the weighted sum of others, which may be more than a launch lists, and
/// the same one several times. What lies behind the sums stays as it is.
std::string gossip_trouble(arrays& a, std::mt19937_64& any) {
    const std::size_t neighbours = 1 + any() % (any() % 3 == 0 ? 2 * gs::detail::most_pieces : 5);
    // A machine that is bounded runs no more.
    const std::size_t most = 4'000'000 / neighbours;
    const std::size_t count = std::min(a.elements - std::min<std::size_t>(a.elements, any() % 4), most);
    std::vector<float> x(a.all), expected(a.elements + 1, -1.0F), got(expected.size());
    for (float& one : x) one = (static_cast<float>(any() % 20'001) - 10'000) / 997;
    a.copy(a.floats, x.data(), x.size() * sizeof(float));
    a.copy(a.flat, expected.data(), expected.size() * sizeof(float));
    std::fill_n(expected.begin(), count, 0.0F);
    std::vector<std::pair<const float*, float>> all;
    for (std::size_t k = 0; k < neighbours; ++k) {
        const std::size_t shift = any() % (a.all - count + 1);
        const float weight = static_cast<float>(1 + any() % 100) / 99;
        all.emplace_back(a.floats + shift, weight);
        for (std::size_t i = 0; i < count; ++i) gs::detail::add_weighted(expected[i], weight, x[shift + i]);
    }
    gossip_on_device(a.stream, static_cast<float*>(a.flat), count, all);
    a.copy(got.data(), a.flat, got.size() * sizeof(float));
    return same_bits(got, expected) ? "" : "other sums of neighbours\n";
}

}  // namespace

std::string trouble_of_feedback(std::uint64_t seed) {
    std::mt19937_64 any(seed);
    std::vector<std::size_t> sizes(1 + any() % (any() % 4 == 0 ? 300 : 12)), room(sizes.size());
    for (std::size_t& n : sizes) n = any() % (any() % 4 == 0 ? 3000 : 90);
    for (std::size_t& n : room) n = any() % 6;
    return on_bounded_machine([&] {
        arrays a(sizes, room);
        std::string wrong = feedback_trouble(a, any);
        for (const bool finite : {true, false}) wrong += chosen_trouble(a, any, finite);
        wrong += gossip_trouble(a, any);
        for (const std::uint32_t block : {32U, 128U}) wrong += coded_feedback_trouble(a, any, block);
        return wrong;
    });
}

std::string trouble_of_packing(std::uint64_t seed) {
    std::mt19937_64 any(seed);
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(any() % n); };
    std::vector<std::size_t> sizes(1 + below(below(4) == 0 ? 300 : 12)), room(sizes.size());
    for (std::size_t& n : sizes) n = below(below(4) == 0 ? 3000 : 90);
    for (std::size_t& n : room) n = below(6);
    return on_bounded_machine([&] {
        arrays a(sizes, room);
        std::vector<float> x(a.all);
        for (float& one : x) one = (static_cast<float>(below(20'001)) - 10'000) / 997;
        return there_and_back<float>(a, x) + there_and_back<gs::bfloat16>(a, x);
    });
}

packing_cost cost_of_packing() {
    // A bucket of 160 KiB: weights and biases of some layers.
    const std::vector<std::size_t> sizes{64, 9216, 128, 18432, 256, 12544, 10, 512}, room{0, 4, 0, 8, 0, 0, 2, 0};
    arrays a(sizes, room);
    return {ratio_of<float>(a), ratio_of<gs::bfloat16>(a)};
}

std::vector<cost> costs_of_packing() {
    const std::vector<std::size_t> none(1);
    arrays few({2048}, none), many({6144}, none);
    std::vector<cost> all;
    /// `work` runs the kernels for each element so many `times`.
    const auto add = [&](std::string name, double least, int times, const auto& work) {
        const auto of = [&](arrays& a) {
            work(a);
            (void)a.stream.record().wait(gs::never);
        };
        const double more = times * static_cast<double>(many.elements - few.elements);
        all.push_back(cost_of_more(
            std::move(name), more, least, [&] { of(few); }, [&] { of(many); }));
    };
    for (arrays* const a : {&few, &many})
        a->copy(a->floats, std::vector<float>(a->all, 1.0F).data(), a->all * sizeof(float));
    const auto flat = [](arrays& a, auto wire) { return static_cast<decltype(wire)*>(a.flat); };
    add("pack", 8, 1, [&](arrays& a) { pack_on_device(a.stream, a.pieces(), flat(a, float{}), false); });
    add("pack_as_bfloats", 6, 1,
        [&](arrays& a) { pack_on_device(a.stream, a.pieces(), flat(a, gs::bfloat16{}), false); });
    add("unpack_bfloats", 6, 1,
        [&](arrays& a) { pack_on_device(a.stream, a.pieces(), flat(a, gs::bfloat16{}), true); });
    std::string wrong;
    add("pack_with_feedback", 14, 2, [&](arrays& a) {
        std::mt19937_64 any(1);
        wrong += feedback_trouble(a, any);
    });
    add("feed_back_fp8", 16, 1, [&](arrays& a) {
        std::mt19937_64 any(1);
        wrong += coded_feedback_trouble(a, any, 128);
    });
    // Two ranks choose a third each; then the mean, and a look.
    add("add_chosen", 4 + 2 * 16.0 / 3 + 8 + 4, 1, [&](arrays& a) {
        std::mt19937_64 any(1);
        wrong += chosen_trouble(a, any, true);
    });
    add("gossip", 12, 1, [&](arrays& a) {
        const std::array<std::pair<const float*, float>, 2> two{{{a.floats, 0.25F}, {a.floats, 0.75F}}};
        gossip_on_device(a.stream, flat(a, float{}), a.elements, two);
    });
    if (!wrong.empty()) throw std::logic_error(wrong);
    return all;
}

}  // namespace jobs
