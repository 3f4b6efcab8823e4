// SPDX-License-Identifier: Apache-2.0
#include "gpu/packing.hpp"

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include <gpushare/backend/cuda/node.hpp>

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

}  // namespace

std::string trouble_of_packing(std::uint64_t seed) {
    std::mt19937_64 any(seed);
    const auto below = [&](std::size_t n) { return static_cast<std::size_t>(any() % n); };
    std::vector<std::size_t> sizes(1 + below(below(4) == 0 ? 300 : 12)), room(sizes.size());
    for (std::size_t& n : sizes) n = below(below(4) == 0 ? 3000 : 90);
    for (std::size_t& n : room) n = below(6);
    std::string wrong;
    {
        arrays a(sizes, room);
        std::vector<float> x(a.all);
        for (float& one : x) one = (static_cast<float>(below(20'001)) - 10'000) / 997;
        wrong = there_and_back<float>(a, x) + there_and_back<gs::bfloat16>(a, x);
    }
    return wrong + standin::take_findings();  // behind the end of all that is freed
}

packing_cost cost_of_packing() {
    // A bucket of 160 KiB: weights and biases of some layers.
    const std::vector<std::size_t> sizes{64, 9216, 128, 18432, 256, 12544, 10, 512}, room{0, 4, 0, 8, 0, 0, 2, 0};
    arrays a(sizes, room);
    return {ratio_of<float>(a), ratio_of<gs::bfloat16>(a)};
}

}  // namespace jobs
