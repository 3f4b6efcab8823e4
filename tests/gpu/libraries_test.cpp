// SPDX-License-Identifier: Apache-2.0
// Thrust and CUB in a tenant's memory, on a device: the functions of tests/device/interop.cu.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/gradient/wire.hpp>
#include <gpushare/tenant/tenancy.hpp>

#include "support/catch.hpp"

namespace gs = gpushare;
using namespace gpushare::literals;
using node = gs::cuda::node;

cudaError_t sort_and_sum(gs::tenant<node>& chat, float* sum, std::size_t n);
cudaError_t choose(gs::tenant<node>& chat, const float* gradient, float* owed, std::uint32_t n, std::uint32_t k,
                   std::uint32_t* indices, float* values);
void pack_by_cub(gs::tenant<node>& chat, std::span<const std::pair<float*, std::size_t>> arrays, float* flat,
                 bool back);

namespace {

struct fixture {
    node devices;
    gs::tenancy<node> shared{devices};
    gs::tenant<node> chat = shared.admit({.name = "chat", .memory = 256_MiB});

    template <class T>
    [[nodiscard]] T* take(std::size_t n) {
        return static_cast<T*>(chat.memory().allocate(n * sizeof(T), 256));
    }
    template <class T>
    void give(T* p, std::size_t n) {
        CHECK(chat.memory().deallocate(p, n * sizeof(T), 256) == gs::errc::none);
    }
    template <class T>
    void move(T* to, const T* from, std::size_t n) {
        chat.work_stream().copy(to, from, n * sizeof(T));
        REQUIRE(chat.work_stream().record().wait(gs::never));
    }
    [[nodiscard]] gs::bytes used() {
        const auto now = chat.usage();
        return now.current - now.idle;
    }
};

}  // namespace

TEST_CASE("Thrust sorts and CUB adds in a tenant's memory", "[gpu]") {
    fixture f;
    constexpr std::size_t n = 1'000'000;
    auto* const sum = f.take<float>(1);
    REQUIRE(sort_and_sum(f.chat, sum, n) == cudaSuccess);
    float result = 0;
    f.move(&result, sum, 1);
    CHECK(result == n);
    // Vectors and temporary storage are back, but for what the stream hasn't reached.
    f.give(sum, 1);
    REQUIRE(f.chat.work_stream().record().wait(gs::never));
    f.chat.memory().collect();
    CHECK(f.used() == 0_B);
    // What doesn't fit is refused: to Thrust by what its allocator throws.
    CHECK_THROWS_AS(sort_and_sum(f.chat, nullptr, 100'000'000), gs::memory_error);
    REQUIRE(f.chat.work_stream().record().wait(gs::never));
    f.chat.memory().collect();
    CHECK(f.used() == 0_B);
}

TEST_CASE("the largest of a gradient are chosen on a device as on the host", "[gpu]") {
    fixture f;
    const auto seed = std::random_device{}();
    CAPTURE(seed);
    std::mt19937 random(seed);
    constexpr std::uint32_t n = 100'003, k = 1'000;
    auto *const gradient = f.take<float>(n), *const owed = f.take<float>(n), *const values = f.take<float>(k);
    auto* const indices = f.take<std::uint32_t>(k);
    std::vector<float> x(n, 0.0F);
    f.move(owed, x.data(), n);
    gs::top_k_feedback host(n, k);
    for (int step = 0; step < 3; ++step) {
        // Few different values, so that there are equal ones at the edge.
        std::ranges::generate(x, [&] { return static_cast<float>(static_cast<int>(random() % 401) - 200) / 8; });
        f.move(gradient, x.data(), n);
        REQUIRE(choose(f.chat, gradient, owed, n, k, indices, values) == cudaSuccess);
        host.select(x);
        std::vector<std::uint32_t> chosen(k);
        std::vector<float> of_chosen(k), left(n);
        f.move(chosen.data(), indices, k);
        f.move(of_chosen.data(), values, k);
        f.move(left.data(), owed, n);
        for (std::uint32_t i = 1; i < k; ++i) CHECK(std::abs(of_chosen[i]) <= std::abs(of_chosen[i - 1]));
        std::vector<std::uint32_t> order(k);
        std::iota(order.begin(), order.end(), 0U);
        std::ranges::sort(order, {}, [&](std::uint32_t i) { return chosen[i]; });
        for (std::uint32_t i = 0; i < k; ++i) {
            CHECK(chosen[order[i]] == host.indices()[i]);
            CHECK(of_chosen[order[i]] == host.values()[i]);
        }
        CHECK(std::ranges::equal(left, host.residual()));
    }
    f.give(gradient, n);
    f.give(owed, n);
    f.give(values, k);
    f.give(indices, k);
}

TEST_CASE("CUB packs gradients in a tenant's memory, and unpacks them", "[gpu]") {
    fixture f;
    constexpr std::size_t n = 300'000;
    auto *const all = f.take<float>(n), *const flat = f.take<float>(n);
    std::vector<float> x(n), packed, expected;
    std::iota(x.begin(), x.end(), 0.0F);
    f.move(all, x.data(), n);
    std::vector<std::pair<float*, std::size_t>> arrays;  // more than a call lists, small and large, at odd places
    for (std::size_t k = 0, at = 1; k < 70; ++k) {
        const std::size_t size = k == 40 ? 200'000 : 1 + k * 37 % 1'000;
        arrays.emplace_back(all + at, size);
        expected.insert(expected.end(), x.begin() + static_cast<std::ptrdiff_t>(at),
                        x.begin() + static_cast<std::ptrdiff_t>(at + size));
        at += size + k % 4;
    }
    pack_by_cub(f.chat, arrays, flat, false);
    packed.resize(expected.size());
    f.move(packed.data(), flat, packed.size());
    CHECK(packed == expected);
    std::vector<float> zeros(n, 0.0F), back(n), wanted(n, 0.0F);
    f.move(all, zeros.data(), n);
    pack_by_cub(f.chat, arrays, flat, true);
    f.move(back.data(), all, n);
    for (const auto& [at, size] : arrays) std::copy_n(x.begin() + (at - all), size, wanted.begin() + (at - all));
    CHECK(back == wanted);
    f.give(all, n);
    f.give(flat, n);
}
